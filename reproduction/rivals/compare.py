"""Compare ways to compress a context that full attention has read: kvpress's presses, and this
package's caches.

Presses run in kvpress's environment, caches in this package's own; the questions are the same.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from benchmarks.head_budget import Shape
from corecontext.config import listed
from corecontext.files import UserError
from corecontext.loading import Loaded
from corecontext.record import Record, append_records, device_name, make_record, read_records
from reproduction.real.methods import Heads
from reproduction.real.model import RealModel
from reproduction.rivals.tasks import (
    FAILURES,
    PASSAGES,
    Cell,
    Counts,
    Item,
    Source,
    Task,
    make_items,
)

COMPRESSIONS = (4, 8, 16)
"""Entries of full attention's cache for each that stays."""
LEAST = 0.5
"""Share of right answers that full attention must reach in a task."""
OWN = ("cca", "cca_raw_heads", "fetch", "fetch_raw_heads")
"""Methods with caches of this package."""
PRESSED = (
    *("streaming_llm", "knorm", "keydiff", "lagkv", "tova", "snapkv", "pyramidkv"),
    *("expected_attention", "adakv", "kvzip"),
)
"""Methods in kvpress's environment."""
NAMES = ("full", *OWN, *PRESSED)
Questions = dict[tuple[Counts, int, frozenset[Task] | None], dict[Task, list[Item]]]
"""Questions of each task by counts, seed and the tasks wanted."""


@dataclass(frozen=True)
class Comparison:
    """Name a model and the contexts on which its caches are compared."""

    name: str
    """The model's name in records."""
    trained_by: str | None
    """The method that the model was trained under."""
    trained_tokens: int
    counts: Counts
    full: str | None
    """A file with records of full attention: only tasks that it answers at least half right."""
    first_tokens: int
    """Measure the seconds to the first token so many times, and no answers; 0 measures answers."""
    output: str
    seed: int = 0
    command: str | None = None
    """The command in the records; None is this process's."""
    trained_index: str | None = None
    """The index of fetch that the model was trained under."""


def compare(
    real: RealModel,
    comparison: Comparison,
    cells: Sequence[Cell],
    questions: Questions | None = None,
) -> None:
    """Measure methods at their compressions, and append the records of each task as they are made.

    Args:
        questions: Those of earlier comparisons with the same tokenizer; these are added.

    Raises:
        UserError: a method or task is unknown, or measurements have failed.
    """
    for cell in cells:
        if cell.method not in NAMES:
            raise UserError(f"method must be {listed(NAMES)}, got {cell.method!r}.")
    loaded = real.original
    wanted = None
    if comparison.full is not None:
        wanted = answered_tasks(read_records(comparison.full), comparison.trained_tokens)
    questions = {} if questions is None else questions
    key = (comparison.counts, comparison.seed, wanted)
    if key not in questions:
        source = Source(loaded, real.protocol.data, lambda: real.essays, comparison.seed)
        questions[key] = make_items(source, comparison.counts, wanted)
    tasks = questions[key]
    if not tasks:
        raise UserError(
            "tasks must have questions, got none. Give --needles, or records in --full."
        )
    heads = Heads(Shape(0, 0))
    if any(cell.method.endswith("raw_heads") for cell in cells):
        heads = _best_first(real.heads, real.protocol.full_heads)
    runs = list(_new_runs(loaded, cells, heads, share=not comparison.first_tokens))
    measure = _times if comparison.first_tokens else _answers
    refused = []
    for task, items in tasks.items():
        for run in runs:
            for cell, measured in measure(run, comparison, task, items):
                place = f"{cell.method} 1/{cell.compression} {task.name} {task.length}"
                if isinstance(measured, Exception):
                    refused.append(f"{place}: {measured}")
                    print(refused[-1], file=sys.stderr, flush=True)
                    continue
                append_records(comparison.output, [measured])
                print(f"{place}: {measured.name} {measured.value:.4f}", flush=True)
    if refused:
        raise UserError(f"{len(refused)} measurements failed, the first: {refused[0]}")


def cells_of(methods: Sequence[str], compressions: Sequence[int]) -> list[Cell]:
    """Return each method at each compression; full attention at none."""
    cells = [Cell("full", 1)] if "full" in methods else []
    return cells + [Cell(name, c) for c in compressions for name in methods if name != "full"]


def answered_tasks(records: Iterable[Record], trained_tokens: int) -> frozenset[Task]:
    """Return the tasks in which full attention is at least half right, and those without right and
    wrong."""
    return frozenset(
        Task(record.params["task"], record.params["length"])
        for record in records
        if record.params["method"] == "full"
        and record.params["trained_tokens"] == trained_tokens
        and (record.name == "real.answer_nll" or record.value >= LEAST)
    )


def of_first_device(records: Sequence[Record]) -> list[Record]:
    """Return the records of the first one's device: bytes and seconds on others do not compare."""
    return [record for record in records if record.device == records[0].device]


def _best_first(heads: Heads, given: str | None) -> Heads:
    """Return heads in the order in which they were given or found."""
    if given is None:
        return heads
    order = [name.strip() for name in given.split(",")]
    chosen = sorted(heads.chosen, key=lambda unit: order.index(f"{unit.layer}:{unit.head}"))
    return Heads(heads.shape, tuple(chosen))


def _new_runs(loaded: Loaded, cells: Sequence[Cell], heads: Heads, *, share: bool) -> Iterator[Any]:
    """Return runs for methods and compressions, whose environment must be there.

    Args:
        share: Read a context once for full attention and a cache.
    """
    has_kvpress = find_spec("kvpress") is not None
    methods = (*PRESSED, "full") if has_kvpress else PRESSED
    pressed = [cell for cell in cells if cell.method in methods]
    if pressed and not has_kvpress:
        raise UserError(
            f"method {pressed[0].method!r} needs the package kvpress, which is not installed. It "
            "has an environment of its own: pip install kvpress==0.5.5, then pip install --no-deps "
            "corecontext."
        )
    if pressed:
        from reproduction.rivals.press import PressRun

        yield PressRun(loaded, pressed)
    of_caches = [cell for cell in cells if cell not in pressed]
    if of_caches:
        from reproduction.rivals.caches import FULL, CacheRun

        # A cache that stores all raw tokens gives full attention's answers as well.
        stored = [cell for cell in of_caches if cell.method == "fetch"]
        shared = stored[0] if share and FULL in of_caches and stored else None
        for cell in of_caches:
            if shared is None or cell != FULL:
                yield CacheRun(loaded, cell, heads, with_full=cell == shared)


def _answers(
    run: Any, comparison: Comparison, task: Task, items: Sequence[Item]
) -> Iterator[tuple[Cell, Record | Exception]]:
    """Measure the answers of a task."""
    values: dict[Cell, list[float]] = {cell: [] for cell in run.cells}
    sizes: dict[Cell, list[dict[str, int]]] = {cell: [] for cell in run.cells}
    failed: dict[Cell, Exception] = {}
    for item in items:
        for cell, answer in run.ask(item).items():
            if isinstance(answer, Exception):
                failed.setdefault(cell, answer)
                continue
            values[cell].append(
                answer.nll if task.name == PASSAGES else item.share_right(answer.choices)
            )
            sizes[cell].append(answer.sizes)
    name = "real.answer_nll" if task.name == PASSAGES else "real.accuracy"
    for cell in run.cells:
        if cell in failed:
            yield cell, failed[cell]
            continue
        params = _params(comparison, cell, task) | run.sizes(cell, items[-1].question)
        params |= {key: round(fmean(size[key] for size in sizes[cell])) for key in sizes[cell][0]}
        params["context_tokens"] = round(fmean(item.question for item in items))
        params["questions"] = len(items)
        yield cell, _record(run, comparison, name, fmean(values[cell]), params)


def _times(
    run: Any, comparison: Comparison, task: Task, items: Sequence[Item]
) -> Iterator[tuple[Cell, Record | Exception]]:
    """Measure the seconds from a context to the first token of the answer, many times."""
    for cell in run.cells:
        seconds = []
        try:
            for _ in range(comparison.first_tokens + 1):
                start = time.perf_counter()
                sizes = run.first_token(cell, items[0])
                seconds.append(time.perf_counter() - start)
            params = _params(comparison, cell, task) | run.sizes(cell, items[0].question) | sizes
        except FAILURES as error:
            yield cell, error
            continue
        # The first warms up.
        yield cell, _record(run, comparison, "real.first_token_s", seconds[1:], params)


def _record(
    run: Any,
    comparison: Comparison,
    name: str,
    value: float | list[float],
    params: dict[str, Any],
) -> Record:
    """Make a record of a run's device and of the row's command."""
    device = device_name(run.model.device)
    return make_record(name, value, params, device=device, command=comparison.command)


def _params(comparison: Comparison, cell: Cell, task: Task) -> dict[str, Any]:
    """Return the params of a record that are known before it is measured."""
    return {
        "model": comparison.name,
        "method": cell.method,
        "compression": cell.compression,
        "trained_by": comparison.trained_by,
        "trained_tokens": comparison.trained_tokens,
        "trained_index": comparison.trained_index,
        "task": task.name,
        "length": task.length,
        "seed": comparison.seed,
    }
