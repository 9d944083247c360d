"""List the tasks that evaluate a checkpoint; a new one is a file beside this one and a row here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from corecontext.config import listed
from corecontext.eval import multidoc_qa, windows
from corecontext.eval.combine import Values, perplexities, scores_by
from corecontext.eval.items import Item, Settings
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from corecontext.record import Record


class Task(NamedTuple):
    """The questions of a task and how their records are combined."""

    name: str
    items: Callable[[str | Path, Settings, ModelSubject], list[Item]]
    files: tuple[str, ...]
    """Names of its data files, without endings."""
    combine: Callable[[Sequence[Record]], Values]
    """Combines the records of its items, all of one method and size."""
    without_files: tuple[str, ...] = ()
    """Subtasks that read no file."""


TASKS = {
    task.name: task
    for task in (
        Task("perplexity", windows.items, windows.FILES, perplexities),
        Task("multidoc_qa", multidoc_qa.items, multidoc_qa.FILES, partial(scores_by, "position")),
    )
}
MOVED = ("ruler", "mmlu", "longbench")
"""Tasks of the laboratory (reproduction/), which has those above, too."""


def pick_tasks(names: Iterable[str], tasks: Mapping[str, Task] = TASKS) -> list[Task]:
    """Return tasks by their names; repeats are ignored.

    Raises:
        UserError: there is no such task.
    """
    for name in names:
        if name in tasks:
            continue
        if name in MOVED:
            raise UserError(
                f"task {name} has moved to the laboratory. In a clone of the repository, run "
                f"`python -m reproduction compare --task {name}` with the other options of your "
                "command, or take the task of lm-evaluation-harness (docs/evaluation.md)."
            )
        raise UserError(f"task must be {listed(tuple(tasks))}, got {name!r}.")
    return [tasks[name] for name in dict.fromkeys(names)]
