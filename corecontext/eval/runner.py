"""Runs a task's items and records each; what a results file holds already is not run again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from corecontext.data.readers import OPENERS, file_hash, model_hash
from corecontext.eval import longbench, mmlu, multidoc_qa, ruler, windows
from corecontext.eval.items import Item, Settings, TooLong
from corecontext.eval.subject import Subject
from corecontext.files import UserError
from corecontext.loading import Loaded
from corecontext.record import Record, append_records, device_name, make_record, parse_records
from corecontext.terminal import progress

TASKS: dict[str, Callable[[str | Path, Settings, Subject], list[Item]]] = {
    "perplexity": windows.items,
    "multidoc_qa": multidoc_qa.items,
    "ruler": ruler.items,
    "mmlu": mmlu.items,
    "longbench": longbench.items,
}
_FILES = {
    "perplexity": windows.FILES,
    "multidoc_qa": multidoc_qa.FILES,
    "ruler": ruler.FILES,
    "mmlu": mmlu.FILES,
    "longbench": (
        "longbench_config",
        *longbench.SUBTASKS,
        *(f"{task}_e" for task in longbench.SUBTASKS),
    ),
}


def describe(loaded: Loaded, model: str, method: str) -> dict[str, Any]:
    """What identifies a model and its attention in records."""
    sizes = {
        k: (hashlib.sha256(json.dumps(v).encode()).hexdigest()[:16] if k == "patterns" else v)
        for k, v in loaded.sizes().items()
    }
    return {"method": method, "model": Path(model).name, "weights": model_hash(model), **sizes}


def data_hashes(task: str, data: str | Path) -> dict[str, str]:
    """The files of a task that are there, by name, with their hashes."""
    path = Path(data)
    if path.is_file():
        return {path.name: file_hash(path)}
    names = {
        f"{name}{ending}{packed}"
        for name in _FILES[task]
        for ending in (".jsonl", ".json")
        for packed in OPENERS
    }
    return {one.name: file_hash(one) for one in sorted(path.glob("*")) if one.name in names}


def run_task(
    task: str,
    data: str | Path,
    settings: Settings,
    subject: Subject,
    identity: Mapping[str, Any],
    *,
    results: str | os.PathLike[str] | None = None,
    device: Any = "cpu",
) -> list[Record]:
    """Evaluate a subject on one task.

    Args:
        task: A key of TASKS.
        data: Folder (or, for perplexity, file) with the task's data.
        settings: What to run of it.
        subject: The model under test.
        identity: What tells it from others, for records: see `describe`.
        results: File that each item is appended to as a record as soon as it is done; items that it
            holds with the same identity, data and settings are taken from there.
        device: What the model is on, for records.

    Returns:
        One record per item, in the order of the items. Items too long for the model are missing.

    Raises:
        UserError: the task, data or a setting is wrong, or every item is too long.
    """
    if task not in TASKS:
        raise UserError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
    for name, value, least in (
        ("limit", settings.limit, 1),
        ("positions", settings.positions, 1),
        ("shots", settings.shots, 0),
        ("max-new-tokens", settings.max_new_tokens, 1),
        *(("length", length, 1) for length in settings.lengths),
    ):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}.")
    items = TASKS[task](data, settings, subject)
    common = {**identity, "task": task, "data": data_hashes(task, data), "seed": settings.seed}
    if settings.max_new_tokens is not None:
        common["max_new_tokens"] = settings.max_new_tokens
    params = {}
    for item in items:
        one = {**common, **item.params, "item": item.key}
        params[fingerprint(one)] = one
    if len(params) < len(items):
        raise UserError(
            f"items of {task} must have names of their own, got {len(items) - len(params)} twice."
        )
    done = {} if results is None else finished(results)
    template = None
    found, skipped = [], []
    with progress(f"{identity.get('method', '')} {task}".strip(), max(1, len(items))) as advance:
        for item, (mark, one) in zip(items, params.items()):
            record = done.get(mark)
            if record is None:
                try:
                    outcome = item.run(subject)
                except TooLong as reason:
                    skipped.append(str(reason))
                    advance(1)
                    continue
                template = template or make_record(item.name, 0.0, {}, device=device_name(device))
                record = dataclasses.replace(
                    template,
                    name=item.name,
                    unit=make_unit(item.name),
                    value=outcome.value,
                    params={**one, "run": mark, **outcome.details},
                    date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                )
                if results is not None:
                    append_records(results, [record])
            found.append(record)
            advance(1)
    if not found:
        raise UserError(
            f"{task} must have an item that fits, got none of {len(items)}"
            f"{': ' + skipped[0] if skipped else ''}."
        )
    if skipped:
        from corecontext.terminal import console

        console().print(f"{task}: {len(skipped)} of {len(items)} left out ({skipped[0]})")
    return found


def make_unit(name: str) -> str:
    """The unit of a record's name."""
    from corecontext.record import UNITS

    return UNITS[name]


def fingerprint(params: Mapping[str, Any]) -> str:
    """Short name of one item under one model, data and settings."""
    return hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[:16]


def finished(path: str | os.PathLike[str]) -> dict[str, Record]:
    """Items that a results file holds, by fingerprint; a last line that was cut off by an
    interruption is removed.

    Raises:
        UserError: the file holds something else, and stays as it is.
    """
    path = Path(path)
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    cut, begins = data[whole:], b'{"name": "quality.'
    try:
        records = parse_records(data[:whole], path)
        if not cut.startswith(begins[: len(cut)]):
            raise ValueError(f"{path}: the last line must be a record, got {cut[:60]!r}.")
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(str(error)) from None
    if cut:
        with path.open("r+b") as file:
            file.truncate(whole)
    return {one.params["run"]: one for one in records if "run" in one.params}


def select(records: Sequence[Record]) -> list[Record]:
    """The item records among others, the newest of each."""
    return list({one.params["run"]: one for one in records if "run" in one.params}.values())
