"""Run methods x tasks on one checkpoint: load the model once per method, and run every task."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corecontext.eval import ruler
from corecontext.eval.items import Settings
from corecontext.eval.runner import TASKS, describe, run_task
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from corecontext.loading import WHOLE, load
from corecontext.methods import settings_for
from corecontext.record import Record


class ModelOptions(NamedTuple):
    """How to load and run the model under every method."""

    settings: Mapping[str, Any] = {}
    """Settings for `load`, by name. Each method takes those that it has; one that no method has is
    refused."""
    num_groups: int | None = None
    """Constant number of core tokens, for methods with core tokens."""
    chunk_size: int | None = None
    """Tokens of a prompt read at once."""
    chat_template: bool | None = None
    """Whether questions go into the model's chat template; None where its tokenizer has one."""
    dtype: str = "auto"
    device: str = "auto"


def data_paths(
    given: Sequence[str], tasks: Sequence[str], optional: Container[str] = ()
) -> dict[str, str]:
    """Return each task's data path from "PATH" for all tasks, or "TASK=PATH" for one; "" for an
    `optional` task without one.

    Raises:
        UserError: a path does not exist, or a task has no path, no folder, or is unknown.
    """
    paths: dict[str, str] = {}
    for argument in given:
        task, _, path = argument.partition("=")
        if task not in TASKS or not path:
            task = ""
            path = argument
        if not Path(path).exists():
            raise UserError(
                f"data must be an existing folder, or TASK=FOLDER with a task of "
                f"{', '.join(TASKS)}, got '{argument}'."
            )
        paths[task] = path
    for task in tasks:
        if task not in TASKS:
            raise UserError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
        path = paths.get(task, paths.get("", ""))
        if not path and task in optional:
            continue
        if not path:
            raise UserError(
                f"data must be given for {task}, got none. Use --data FOLDER or --data "
                f"{task}=FOLDER."
            )
        if task != "perplexity" and not Path(path).is_dir():
            raise UserError(f"data of {task} must be a folder, got the file '{path}'.")
    return {task: paths.get(task, paths.get("", "")) for task in tasks}


def needs_data(settings: Settings, task: str) -> bool:
    """Whether a task with these settings reads files."""
    subtasks = of_task(settings, task).subtasks
    return task != "ruler" or not subtasks or not set(subtasks) <= set(ruler.WITHOUT_FILES)


def of_task(settings: Settings, task: str) -> Settings:
    """Return the settings with the subtasks of this task: "TASK:SUBTASK", or "SUBTASK" for every
    task."""
    prefix = f"{task}:"
    subtasks = (
        name.removeprefix(prefix)
        for name in settings.subtasks
        if ":" not in name or name.startswith(prefix)
    )
    return settings._replace(subtasks=tuple(subtasks))


def evaluate(
    model: str,
    methods: Sequence[str],
    tasks: Sequence[str],
    data: Sequence[str],
    settings: Settings,
    options: ModelOptions,
    results: str | None = None,
) -> list[Record]:
    """Return the item records of every method on every task.

    Args:
        model: A folder in the Hugging Face format, or an identifier on the hub.
        methods: Names that `corecontext.loading.load` knows; repeats are ignored.
        tasks: Keys of TASKS; repeats are ignored.
        data: See `data_paths`; a task that reads no file may go without.
        settings: Which questions of each task to ask.
        options: How to load and run the model.
        results: See `run_task`.

    Raises:
        UserError: an argument is wrong.
    """
    methods = list(dict.fromkeys(methods))
    tasks = list(dict.fromkeys(tasks))
    for name in settings.subtasks:
        task, separator, _ = name.partition(":")
        if separator and task not in tasks:
            raise UserError(
                f"subtask must be SUBTASK or TASK:SUBTASK, with a task of {', '.join(tasks)}, got "
                f"{name!r}."
            )
    without_data = [task for task in tasks if not needs_data(settings, task)]
    paths = data_paths(data, tasks, optional=without_data)
    # One model at a time; of several methods, each gets the settings that it has.
    records = []
    for method in methods:
        given = settings_for(method, methods, options.settings)
        loaded = load(model, method=method, dtype=options.dtype, device=options.device, **given)
        if options.chunk_size is not None and getattr(loaded.config, "num_groups", None):
            raise UserError(WHOLE)
        # A number of groups stands in for their size, so the same methods have it.
        as_size = {"group_size": options.num_groups}
        num_groups = settings_for(method, methods, as_size).get("group_size")
        subject = ModelSubject(
            loaded,
            num_groups=num_groups,
            chunk_size=options.chunk_size,
            chat_template=options.chat_template,
        )
        identity = describe(loaded, model, method)
        if num_groups is not None:
            identity.pop("group_size", None)
            identity["num_groups"] = num_groups
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
        del subject, loaded  # frees the memory for the next method
    return records
