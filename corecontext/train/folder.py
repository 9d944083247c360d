"""The folder of a run: check that it is free or this run's, and write its settings."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corecontext.config import PAPER_RULE, without_removed
from corecontext.files import UserError, alone_in, write_text
from corecontext.record import source_version, versions
from corecontext.train.checkpoint import clear_staging, latest
from corecontext.train.train_config import TrainConfig

SETTINGS = "train_config.json"
MODEL = "model"
"""Subfolder of the finished model."""
MAY_CHANGE = {"output", "workers", "cache_dir", "report_to"}
MAY_CHANGE |= {"save_every", "keep", "log_every", "eval_every", "fit_memory"}
"""Fields that may change in a continued run: at most they change the rounding of its results."""


def check_folder(folder: Path, config: TrainConfig, facts: dict[str, Any] | None = None) -> None:
    """Raise a UserError unless the folder is free, or holds a part of this run.

    Args:
        facts: Once known, "processes", their number, and "rows", `PackedRows.fingerprint`.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output '{folder}' must be a folder, got a file. Give another --output.")
    if (folder / SETTINGS).is_file():
        _check_same_run(folder, config, facts or {})
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"output '{folder}' must be a new or empty folder, or a run's, got one with other "
            "files."
        )
    if (folder / MODEL).exists():
        raise UserError(
            f"output '{folder}' already holds the finished run in {MODEL}/. Give another --output."
        )


def _check_same_run(folder: Path, config: TrainConfig, facts: dict[str, Any]) -> None:
    """Raise a UserError unless the settings and facts in a run's folder are these."""
    try:
        saved = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        # Older versions had fewer fields.
        before = {**TrainConfig().to_dict(), **PAPER_RULE, **without_removed(saved["config"])}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f"output '{folder}' must hold a run's settings in {SETTINGS}, which cannot be read: "
            f"{error}. Give another --output."
        ) from None
    now = config.to_dict()
    for key in sorted(now.keys() - MAY_CHANGE):
        if before.get(key) != now[key]:
            raise UserError(
                f"output '{folder}' holds a run with other settings: {key} was "
                f"{before.get(key)!r}, got {now[key]!r}. Give another --output, or the same "
                "settings to continue it."
            )
    changes = {
        "processes": "of {} processes, got {}: a step would have other rows. Start as many",
        "rows": "on other data, or data that has changed since",
    }
    for key, change in changes.items():
        if key in saved and key in facts and saved[key] != facts[key]:
            raise UserError(
                f"output '{folder}' holds a run {change.format(saved[key], facts[key])}. Give "
                "another --output to begin anew."
            )


def claim(folder: Path, config: TrainConfig, facts: dict[str, Any]) -> None:
    """Check a run's folder, and write the settings and `facts` into it."""
    check_folder(folder, config, facts)
    clear_staging(folder)
    commit, dirty = source_version()
    content = {
        "config": config.to_dict(),
        **facts,
        "commit": commit,
        "dirty": dirty,
        "versions": versions(),
    }
    try:
        write_text(folder / SETTINGS, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"output '{folder}' cannot be written: {error.strerror}. Free space, or give another "
            "--output."
        ) from None


def release(folder: Path) -> None:
    """Free the folder of a failed run, unless it has a checkpoint to continue from."""
    if latest(folder) is None:
        clear_staging(folder)
        shutil.rmtree(folder / "runs", ignore_errors=True)  # tensorboard's
        (folder / SETTINGS).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder for the block: two runs would delete each other's half-written
    checkpoints.

    Raises:
        UserError: another process uses it.
    """
    with alone_in(folder) as alone:
        if not alone:
            raise UserError(
                f"output '{folder}' is in use by another process. Wait until it ends, or give "
                "another --output."
            )
        yield
