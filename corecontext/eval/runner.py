"""Run a task's items and record each; items already in the results file are not run again."""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from corecontext.data.readers import OPENERS, file_hash, model_hash
from corecontext.eval.items import Settings, TooLong, Window
from corecontext.eval.subject import ModelSubject
from corecontext.eval.task_table import Task
from corecontext.files import UserError
from corecontext.loading import Loaded
from corecontext.record import UNITS, Record, append_records, device_name, make_record, read_records
from corecontext.terminal import progress


def describe(loaded: Loaded, model: str) -> dict[str, Any]:
    """Return the parameters that name a model and its attention in records."""
    # A model on the hub by its whole name: two may differ in their owner alone.
    weights = model_hash(model) or model
    identity = {"method": loaded.method, "model": Path(model).name, "weights": weights}
    return identity | loaded.sizes()


def data_hashes(task: Task, data: str | Path) -> dict[str, str]:
    """Return the hashes of a task's data files by name; {} where `data` is ""."""
    if not data:
        return {}
    path = Path(data)
    if path.is_file():
        return {path.name: file_hash(path)}
    names = {
        f"{name}{ending}{compression}"
        for name in task.files
        for ending in (".jsonl", ".json")
        for compression in OPENERS
    }
    return {file.name: file_hash(file) for file in sorted(path.glob("*")) if file.name in names}


def run_task(
    task: Task,
    data: str | Path,
    settings: Settings,
    subject: ModelSubject,
    identity: Mapping[str, Any],
    *,
    results: str | os.PathLike[str] | None = None,
    device: Any = "cpu",
) -> list[Record]:
    """Evaluate a subject on a task.

    Args:
        task: See `corecontext.eval.task_table`.
        data: Folder (or, for perplexity, file) with the task's data; "" for a task that reads none.
        settings: Which questions to ask.
        subject: The model under test.
        identity: Parameters that distinguish it in records: see `describe`.
        results: File for a record of each item, written as soon as the item is done; items in it
            with the same identity, data and settings are not run again.
        device: The model's device, for records.

    Returns:
        A record per item, in the order of the items. Items too long for the model are left out.

    Raises:
        UserError: the data or a setting is wrong, or every item is too long.
    """
    _check(settings)
    name = task.name
    items = task.items(data, settings, subject)
    common = {**identity, "task": name, "data": data_hashes(task, data), "seed": settings.seed}
    if settings.max_new_tokens is not None:
        common["max_new_tokens"] = settings.max_new_tokens
    # Each item's parameters by their fingerprint, in the order of the items.
    params_by_id = {}
    for item in items:
        item_params = {**common, **item.params, "item": item.key}
        if not isinstance(item, Window):
            item_params["chat_template"] = subject.chat and item.chat
        params_by_id[fingerprint(item_params)] = item_params
    if len(params_by_id) < len(items):
        repeated = len(items) - len(params_by_id)
        raise UserError(f"items of {name} must have names of their own, got {repeated} twice.")

    done = {} if results is None else finished(results)
    reused = len(params_by_id.keys() & done.keys())
    print(f"{name}: {len(items)} items, {reused} of them done before", file=sys.stderr)
    template = None  # a record that describes commit and machine: they are asked for once
    records: list[Record] = []
    skipped: list[str] = []
    with progress(f"{identity.get('method', '')} {name}".strip(), max(1, len(items))) as advance:
        for item, (run, item_params) in zip(items, params_by_id.items()):
            if run in done:
                records.append(done[run])
                advance(1)
                continue
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
                unit=UNITS[item.name],
                value=outcome.value,
                params={**item_params, "run": run, **outcome.details},
                date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            )
            if results is not None:
                append_records(results, [record])
            records.append(record)
            advance(1)

    if not records:
        reason = f": {skipped[0]}" if skipped else ""
        raise UserError(f"{name} must have an item that fits, got none of {len(items)}{reason}.")
    if skipped:
        print(f"{name}: {len(skipped)} of {len(items)} left out ({skipped[0]})", file=sys.stderr)
    # A window of t + 1 tokens has t losses.
    longest = max(r.params.get("prompt_tokens") or r.params["tokens"] + 1 for r in records)
    note = subject.idle_note(longest)
    if note:
        print(f"{name}: {note}", file=sys.stderr)
    return records


def _check(settings: Settings) -> None:
    """Raise a UserError unless the settings are in range."""
    for name, value, least in (
        ("limit", settings.limit, 1),
        ("positions", settings.positions, 1),
        ("max-new-tokens", settings.max_new_tokens, 1),
        *(("length", length, 1) for length in settings.lengths),
    ):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}.")


def fingerprint(value: Any) -> str:
    """Return a hash of plain values, such as an item's model, data and settings."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def finished(path: str | os.PathLike[str]) -> dict[str, Record]:
    """Return the records in a results file by their item's fingerprint, "run"; remove a last line
    that an interruption cut off.

    Raises:
        UserError: the file holds other content, and is not changed.
    """
    path = Path(path)
    if not path.exists():
        return {}
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    rest = data[end:]
    # Other content in the last line is not deleted.
    beginning = b'{"name": "quality.'
    try:
        records = read_records(path, data[:end])
        if not rest.startswith(beginning[: len(rest)]):
            raise ValueError(f"{path}: the last line must be a record, got {rest[:60]!r}.")
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(str(error)) from None
    if rest:
        with path.open("r+b") as file:
            file.truncate(end)
    return {record.params["run"]: record for record in records if "run" in record.params}
