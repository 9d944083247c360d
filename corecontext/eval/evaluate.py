"""Run methods x tasks on one checkpoint: load the model once per method, and run every task."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corecontext.baselines.method import Method
from corecontext.eval.items import Settings
from corecontext.eval.runner import describe, run_task
from corecontext.eval.subject import ModelSubject
from corecontext.eval.task_table import Task
from corecontext.files import UserError
from corecontext.loading import WHOLE, load
from corecontext.methods import settings_taken
from corecontext.record import Record


class ModelOptions(NamedTuple):
    """How to load and run the model under every method."""

    settings: Mapping[str, Any] = {}
    """Settings for `load`, by name. Each method takes those that it has; one that no method has is
    refused."""
    num_groups: int | None = None
    """Number of core tokens at any length, for methods that have them; None keeps their size."""
    chunk_size: int | None = None
    """Tokens of a prompt read at once."""
    chat_template: bool | None = None
    """Whether questions go into the model's chat template; None where its tokenizer has one."""
    dtype: str = "auto"
    device: str = "auto"


def data_paths(given: Sequence[str], tasks: Sequence[Task], settings: Settings) -> dict[str, str]:
    """Return each task's data path. "PATH" is given for all tasks, "TASK=PATH" for one; a task that
    reads no file may have none, "".

    Raises:
        UserError: a path does not exist, or a task has no path, or no folder.
    """
    names = [task.name for task in tasks]
    paths: dict[str, str] = {}
    for argument in given:
        name, _, path = argument.partition("=")
        if name not in names or not path:
            name = ""
            path = argument
        if not Path(path).exists():
            raise UserError(
                f"data must be an existing folder, or TASK=FOLDER with a task of "
                f"{', '.join(names)}, got '{argument}'."
            )
        paths[name] = path
    for task in tasks:
        path = paths.setdefault(task.name, paths.get("", ""))
        if not path and needs_data(settings, task):
            raise UserError(
                f"data must be given for {task.name}, got none. Use --data FOLDER or --data "
                f"{task.name}=FOLDER."
            )
        if path and task.name != "perplexity" and not Path(path).is_dir():
            raise UserError(f"data of {task.name} must be a folder, got the file '{path}'.")
    return paths


def needs_data(settings: Settings, task: Task) -> bool:
    """Whether a task with these settings reads files: a subtask may read none."""
    subtasks = of_task(settings, task.name).subtasks
    return not subtasks or not set(subtasks) <= set(task.without_files)


def of_task(settings: Settings, task: str) -> Settings:
    """Return the settings with this task's subtasks: those given as "TASK:SUBTASK" with its name,
    or as "SUBTASK", for every task."""
    prefix = f"{task}:"
    subtasks = (
        name.removeprefix(prefix)
        for name in settings.subtasks
        if ":" not in name or name.startswith(prefix)
    )
    return settings._replace(subtasks=tuple(subtasks))


def evaluate(
    model: str,
    methods: Sequence[str | Method],
    tasks: Sequence[Task],
    data: Sequence[str],
    settings: Settings,
    options: ModelOptions,
    results: str | None = None,
) -> list[Record]:
    """Return the item records of every method on every task.

    Args:
        model: A folder in the Hugging Face format, or an identifier on the hub.
        methods: "cca", "full", or a rival by its name or itself; repeats are ignored.
        tasks: Rows of `task_table.TASKS`, or tasks of the laboratory.
        data: See `data_paths`.
        settings: Which questions of each task to ask.
        options: How to load and run the model.
        results: File for a record of each item; items that it has already are not run again.

    Raises:
        UserError: an argument is wrong.
    """
    methods = list(dict.fromkeys(methods))
    names = [task.name for task in tasks]
    for subtask in settings.subtasks:
        name, separator, _ = subtask.partition(":")
        if separator and name not in names:
            raise UserError(
                f"subtask must be SUBTASK or TASK:SUBTASK, with a task of {', '.join(names)}, got "
                f"{subtask!r}."
            )
    paths = data_paths(data, tasks, settings)
    # One model at a time; of several methods, each gets the settings that it has.
    records = []
    for method in methods:
        given = settings_taken(method, methods, options.settings)
        loaded = load(model, method=method, dtype=options.dtype, device=options.device, **given)
        if options.chunk_size is not None and getattr(loaded.config, "num_groups", None):
            raise UserError(WHOLE)  # a constant number of groups needs the whole text at once
        # A number of groups replaces their size: the methods with a group_size take it.
        as_size = {"group_size": options.num_groups}
        num_groups = settings_taken(method, methods, as_size).get("group_size")
        subject = ModelSubject(
            loaded,
            num_groups=num_groups,
            chunk_size=options.chunk_size,
            chat_template=options.chat_template,
        )
        identity = describe(loaded, model)
        if num_groups is not None:
            identity.pop("group_size", None)
            identity["num_groups"] = num_groups
        for task in tasks:
            records += run_task(
                task,
                paths[task.name],
                of_task(settings, task.name),
                subject,
                identity,
                results=results,
                device=loaded.model.device,
            )
        del subject, loaded  # frees the memory for the next method
    return records
