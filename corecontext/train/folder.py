"""The folder of a run: whose it is, and that nobody else writes into it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corecontext.files import UserError, alone_in, write_text
from corecontext.record import source_version, versions
from corecontext.train.checkpoint import clear_staging
from corecontext.train.train_config import TrainConfig

SETTINGS, MODEL = "train_config.json", "model"
MAY_CHANGE = {
    "output",
    "workers",
    "cache_dir",
    "save_every",
    "keep",
    "log_every",
    "report_to",
    "eval_every",
    "push_to",
}
"""Fields that a continued run may have changed: what it computes stays the same."""


def make(folder: Path) -> None:
    """The run's folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"output '{folder}' cannot be made: {error.strerror}. Give another --output."
        ) from None


def held_heads(folder: Path) -> dict[str, Any] | None:
    """The sizes by head that were found for the run in this folder, which `check_folder` has let
    pass."""
    path = folder / SETTINGS
    return json.loads(path.read_text(encoding="utf-8")).get("heads") if path.is_file() else None


def check_folder(folder: Path, config: TrainConfig, facts: dict[str, Any] | None = None) -> None:
    """Raise unless the folder is free, or holds part of this run, of the same `facts` as far as
    these are known."""
    path = folder / SETTINGS
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output '{folder}' must be a folder, got a file. Give another --output.")
    if path.is_file():
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            before = {
                **TrainConfig().to_dict(),
                **saved["config"],
            }  # an older version had fewer fields
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(
                f"output '{folder}' must hold a run's settings in {SETTINGS}, which cannot be read: "
                f"{error}. Give another --output."
            ) from None
        now = config.to_dict()
        changed = sorted(
            key for key in now if before.get(key) != now[key] and key not in MAY_CHANGE
        )
        if changed:
            raise UserError(
                f"output '{folder}' holds a run with other settings: {changed[0]} was "
                f"{before.get(changed[0])!r}, got {now[changed[0]]!r}. Give another --output, or the same "
                "settings to continue it."
            )
        for key, told in (
            ("processes", "of {} processes, got {}: a step would have other rows. Start as many"),
            ("rows", "on other data, or data that has changed since"),
        ):
            if facts is not None and saved.get(key, facts[key]) != facts[key]:
                raise UserError(
                    f"output '{folder}' holds a run {told.format(saved[key], facts[key])}. Give another "
                    "--output to begin anew."
                )
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"output '{folder}' must be a new or empty folder, or a run's, got one with other files."
        )
    if (folder / MODEL).exists():
        raise UserError(
            f"output '{folder}' already holds the finished run in {MODEL}/. Give another --output."
        )


def claim(folder: Path, config: TrainConfig, facts: dict[str, Any]) -> None:
    """Write the settings into the run's folder, once all else is known to be right."""
    check_folder(folder, config, facts)
    clear_staging(folder)
    commit, dirty = source_version()
    try:
        write_text(
            folder / SETTINGS,
            json.dumps(
                {
                    "config": config.to_dict(),
                    **facts,
                    "commit": commit,
                    "dirty": dirty,
                    "versions": versions(),
                },
                indent=1,
            )
            + "\n",
        )
    except OSError as error:
        raise UserError(
            f"output '{folder}' cannot be written: {error.strerror}. Free space, or give another "
            "--output."
        ) from None


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """This run alone writes into its folder: two would delete each other's half-written
    checkpoints.

    Raises:
        UserError: another process holds it.
    """
    with alone_in(folder) as alone:
        if not alone:
            raise UserError(
                f"output '{folder}' is in use by another process. Wait until it ends, or give another "
                "--output."
            )
        yield
