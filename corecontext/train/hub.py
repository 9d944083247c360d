"""Push a finished model to the hub; make its repository before the run begins."""

from __future__ import annotations

from pathlib import Path

from corecontext.files import UserError, first_line


def prepare(name: str) -> None:
    """Make a private repository, unless it exists: missing permission should show before the
    training.

    Raises:
        UserError: the repository cannot be written.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(name, private=True, exist_ok=True)
    except Exception as error:  # of the network, of the hub, of the name
        raise UserError(
            f"push_to '{name}' cannot be written: {first_line(error)}. Log in with `hf auth "
            "login`, or leave --push-to out."
        ) from None


def push(folder: Path, name: str) -> None:
    """Upload a finished model.

    Raises:
        UserError: the hub does not accept it; the folder stays.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(
            repo_id=name, folder_path=str(folder), commit_message="Trained by corecontext"
        )
    except Exception as error:
        raise UserError(
            f"the finished model lies in '{folder}', but push_to '{name}' failed: "
            f"{first_line(error)}. Push it with `hf upload {name} {folder}`."
        ) from None
