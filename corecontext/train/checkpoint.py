"""Keep checkpoints complete or absent: a new one is written aside, then renamed; an old one is
renamed, then deleted.

So a folder named checkpoint-N is complete, even if the process was killed or the power failed.
"""

import contextlib
import os
import re
import shutil
import traceback
from pathlib import Path

import torch
from safetensors import SafetensorError

STAGING = ".saving"
"""Subfolder of a run in which a checkpoint is written."""
DOOMED = ".deleting"
"""Name of a checkpoint that is being deleted."""
_NAME = re.compile(r"checkpoint-(\d+)$")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run by their steps, the first one first."""
    paths = [path for path in folder.glob("checkpoint-*") if _NAME.match(path.name)]
    return sorted(paths, key=step_of)


def latest(folder: Path) -> Path | None:
    """Return the checkpoint to resume from, or None."""
    paths = checkpoints(folder)
    return paths[-1] if paths else None


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps in a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def is_write_failure(error: BaseException) -> bool:
    """Return whether an error is one of writing to the disk, such as a full disk, a quota or a lost
    file system."""
    if isinstance(error, (OSError, SafetensorError)):
        return True
    # torch.save writes in C++, whose errors have no type of their own.
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and frames[-1].filename == torch.serialization.__file__


def clear_staging(folder: Path) -> None:
    """Delete the remains of an interrupted save or deletion."""
    for name in (STAGING, DOOMED):
        shutil.rmtree(folder / name, ignore_errors=True)


def publish(staged: Path, target: Path) -> None:
    """Rename a written folder to its target once all of it is on the disk; where the target exists,
    it stays and the new folder is deleted."""
    # mutant training: a checkpoint is named before it is on the disk
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
        # Rename first: an interrupted deletion must not leave half a checkpoint.
        with contextlib.suppress(OSError):
            os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
