"""Methods x tasks on one checkpoint: loads the model once for each method and runs every task under
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from corecontext.baselines.rivals import takers
from corecontext.eval.items import Settings
from corecontext.eval.runner import TASKS, describe, run_task
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from corecontext.loading import WHOLE, load
from corecontext.record import Record


def data_paths(given: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """Where each task's data is: "PATH" for all tasks, or "TASK=PATH" for one.

    Raises:
        UserError: a task has none, or none is of that name.
    """
    found: dict[str, str] = {}
    for one in given:
        task, equals, path = one.partition("=")
        if equals and task in TASKS:
            found[task] = path
        else:
            found[""] = one
    for task in tasks:
        if task not in TASKS:
            raise UserError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
        if task not in found and "" not in found:
            raise UserError(
                f"data must be given for {task}, got none. Use --data FOLDER or --data {task}=FOLDER."
            )
    return {task: found.get(task, found.get("", "")) for task in tasks}


def of_task(settings: Settings, task: str) -> Settings:
    """The settings with the subtasks of this task: "TASK:PART", or "PART" for every task."""
    split = [one.partition(":") for one in settings.subtasks]
    return settings._replace(
        subtasks=tuple(part or name for name, colon, part in split if not colon or name == task)
    )


def evaluate(
    model: str,
    methods: Sequence[str],
    tasks: Sequence[str],
    data: Sequence[str],
    settings: Settings,
    *,
    sizes: Mapping[str, Any] | None = None,
    num_groups: int | None = None,
    chunk_size: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    results: str | None = None,
) -> list[Record]:
    """Item records of every method on every task.

    Args:
        model: A folder in the Hugging Face format, or an identifier on the hub.
        methods: Names that `corecontext.loading.load` knows.
        tasks: Keys of TASKS.
        data: See `data_paths`.
        settings: What to run of each task.
        sizes: group_size, window_size, sinks, patterns for `load`; methods take those that they
            have.
        num_groups: Constant number of core tokens, for methods with core tokens.
        chunk_size: Tokens of a prompt read at once.
        results: See `run_task`.

    Raises:
        UserError: something given is wrong.
    """
    methods, tasks = list(dict.fromkeys(methods)), list(dict.fromkeys(tasks))  # none counts twice
    paths, records = data_paths(data, tasks), []
    for method in methods:
        given = dict(sizes or {})
        if len(methods) > 1:  # each method takes what it has
            have = {"sinks": ("cca", *takers("sinks")), "patterns": takers("patterns")}
            given = {k: v for k, v in given.items() if method in have.get(k, methods)}
        loaded = load(model, method=method, dtype=dtype, device=device, **given)
        if (
            chunk_size is not None
            and loaded.config is not None
            and loaded.config.num_groups is not None
        ):
            raise UserError(WHOLE)
        groups = num_groups if loaded.config is not None or len(methods) == 1 else None
        subject = ModelSubject(loaded, num_groups=groups, chunk_size=chunk_size)
        identity = describe(loaded, model, method)
        if groups is not None:
            identity = {
                **{k: v for k, v in identity.items() if k != "group_size"},
                "num_groups": groups,
            }
        for task in tasks:
            records += run_task(
                task,
                paths[task],
                of_task(settings, task),
                subject,
                identity,
                results=results,
                device=loaded.model.device,
            )
        del subject, loaded
    return records
