"""A finished model on the hub: a place for it before the run begins, the whole folder, card
included, at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corecontext.files import UserError


def prepare(name: str) -> None:
    """Make a private repository, unless there is one: who may not write should know before the
    training.

    Raises:
        UserError: it cannot be had.
    """
    try:
        _api().create_repo(name, private=True, exist_ok=True)
    except Exception as error:  # of the network, of the hub, of the name
        raise UserError(
            f"push_to '{name}' cannot be written: {_told(error)}. Log in with `hf auth login`, or leave "
            "--push-to out."
        ) from None


def push(folder: Path, name: str) -> None:
    """Upload a finished model.

    Raises:
        UserError: the hub does not take it; the folder stays.
    """
    try:
        _api().upload_folder(
            repo_id=name, folder_path=str(folder), commit_message="Trained by corecontext"
        )
    except Exception as error:
        raise UserError(
            f"the finished model lies in '{folder}', but push_to '{name}' failed: {_told(error)}. Push it "
            f"with `hf upload {name} {folder}`."
        ) from None


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _told(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
