"""Checkpoints that are whole or not there: written aside, then renamed; taken away by a rename,
then deleted.

Whatever has the name checkpoint-N is complete, whenever the process was killed or the power failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError

STAGING, DOOMED = ".saving", ".deleting"
STREAM = "stream.json"
"""In a checkpoint: how far streamed data was read."""
_NAME = re.compile(r"checkpoint-(\d+)$")


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest step first."""
    found = [
        (int(match[1]), path)
        for path in folder.glob("checkpoint-*")
        if (match := _NAME.match(path.name))
    ]
    return [path for _, path in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The checkpoint to resume from, or None."""
    return found[-1] if (found := checkpoints(folder)) else None


def step_of(checkpoint: Path) -> int:
    """The number of optimiser steps in a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def is_write_failure(error: BaseException) -> bool:
    """True for what a full disk, a quota or a lost file system make the libraries raise that write
    checkpoints."""
    if isinstance(error, (OSError, SafetensorError)):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("PytorchStreamWriter", "inline_container", "iostream")
    )


def clear_staging(folder: Path) -> None:
    """Delete what an interrupted save or deletion left."""
    for name in (STAGING, DOOMED):
        shutil.rmtree(folder / name, ignore_errors=True)


def publish(staged: Path, target: Path) -> None:
    """Give a written folder its name once all of it is on the disk; a complete one of that name
    stays."""
    for path in [*staged.rglob("*"), staged]:
        _sync(path)
    if target.exists():
        shutil.rmtree(staged)
        return
    os.rename(staged, target)
    _sync(target.parent)


def keep_newest(folder: Path, count: int) -> None:
    """Delete all complete checkpoints but the newest `count`."""
    doomed = folder / DOOMED
    for path in checkpoints(folder)[:-count]:
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(OSError):  # it is there for the next time
            os.rename(path, doomed)  # at once no checkpoint any more, instead of half of one
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
