"""Copy a checkpoint with other settings of CCA: the weights stay as they are."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open

from corecontext.config import CCAConfig
from corecontext.files import UserError, one_line, write_text
from corecontext.train.checkpoint import publish


def check_copy(source: str, target: str) -> None:
    """Raise a UserError, before any work is done, unless `convert` can begin: source is a
    checkpoint's folder, and target does not exist."""
    if not (Path(source).expanduser() / "config.json").is_file():
        raise UserError(f"model '{source}' must be a folder with config.json, got none.")
    _check_whole(Path(source).expanduser())
    if Path(target).exists():
        raise UserError(f"output '{target}' already exists. Give a new folder.")


def _check_whole(folder: Path) -> None:
    """Raise a UserError where a checkpoint lacks a file of weights that its index names, or where
    one is cut off."""
    names = {file.name for file in folder.glob("*.safetensors")}
    for index in folder.glob("*.index.json"):
        with one_line(f"file '{index}' must name the weights of a checkpoint"):
            names |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(names):
        if not (folder / name).is_file():
            raise UserError(
                f"model '{folder}' must hold all of its weights, got none of {name}. Take the "
                "whole checkpoint."
            )
        if name.endswith(".safetensors"):
            # Opening compares the size with the header.
            with (
                one_line(f"file '{folder / name}' must hold weights"),
                safe_open(folder / name, "pt"),
            ):
                pass


def convert(source: str, target: str, config: CCAConfig | None) -> None:
    """Copy a checkpoint with the same weights; put CCA's settings into the config.json of the copy,
    or remove them (None).

    Raises:
        UserError: source is not a checkpoint, or target exists or cannot be written.
    """
    check_copy(source, target)
    old = Path(source).expanduser()
    new = Path(target)
    staged = new.with_name(f".{new.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        shutil.copytree(old, staged)
        settings = json.loads((staged / "config.json").read_text(encoding="utf-8"))
        settings.pop("cca", None)
        if config is not None:
            settings["cca"] = config.to_dict()
        write_text(staged / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
        publish(staged, new)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"output '{target}' cannot be written: {reason}.") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
