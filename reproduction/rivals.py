"""Compare ways to compress a context that full attention has read: kvpress's presses, and this
package's caches.

Presses run in kvpress's environment, caches in this package's own; the questions are the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional

from corecontext.config import listed
from corecontext.files import UserError
from corecontext.heads.budget import Shape
from corecontext.loading import Loaded
from corecontext.record import Record, append_records, device_name, make_record, read_records
from reproduction.real import RealModel
from reproduction.real_methods import Heads
from reproduction.rivals_tasks import PASSAGES, Counts, Item, Task, make_items

COMPRESSIONS = (4, 8, 16)
"""Entries of full attention's cache for each that stays."""
LEAST = 0.5
"""Share of right answers that full attention must reach in a task."""
OWN = ("cca", "cca_raw_heads", "fetch")
"""Methods with caches of this package."""
PRESSED = (
    *("streaming_llm", "knorm", "keydiff", "lagkv", "tova", "snapkv", "pyramidkv"),
    *("expected_attention", "adakv", "kvzip", "cca_press"),
)
"""Methods in kvpress's environment."""
NAMES = ("full", *OWN, *PRESSED)


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


def compare(
    real: RealModel, comparison: Comparison, methods: Sequence[str], compressions: Sequence[int]
) -> None:
    """Measure methods at each compression, and append the records of each as they are made."""
    for name in methods:
        if name not in NAMES:
            raise UserError(f"method must be {listed(NAMES)}, got {name!r}.")
    loaded = real.original
    tasks = make_items(
        loaded, real.protocol.data, lambda: real.essays, comparison.counts, comparison.seed
    )
    tasks = _answerable(tasks, comparison)
    heads = Heads(Shape(0, 0))
    if "cca_raw_heads" in methods:
        heads = _best_first(real.heads, real.protocol.full_heads)
    refused = []
    for name in methods:
        for compression in (1,) if name == "full" else compressions:
            run = _new_run(loaded, name, compression, heads)
            for task, items in tasks.items():
                try:
                    records = _measure(run, comparison, task, items)
                except (AssertionError, RuntimeError, UserError, ValueError) as error:
                    # A context may be too short, or kvpress fail: the others go on.
                    refused.append(f"{name} 1/{compression} {task.name} {task.length}: {error}")
                    print(refused[-1], file=sys.stderr, flush=True)
                    continue
                append_records(comparison.output, records)
                values = ", ".join(f"{record.name} {record.value:.4f}" for record in records)
                print(f"{name} 1/{compression} {task.name} {task.length}: {values}", flush=True)
    if refused:
        raise UserError(f"{len(refused)} measurements failed, the first: {refused[0]}")


def _answerable(tasks: dict[Task, list[Item]], comparison: Comparison) -> dict[Task, list[Item]]:
    """Return the tasks in which full attention is at least half right, and those without right and
    wrong."""
    if comparison.full is None:
        return tasks
    answered = {
        Task(record.params["task"], record.params["length"])
        for record in read_records(comparison.full)
        if record.params["method"] == "full"
        and (record.name == "real.answer_nll" or record.value >= LEAST)
    }
    return {task: items for task, items in tasks.items() if task in answered}


def _best_first(heads: Heads, given: str | None) -> Heads:
    """Return heads in the order in which they were given or found."""
    if given is None:
        return heads
    order = [name.strip() for name in given.split(",")]
    chosen = sorted(heads.chosen, key=lambda unit: order.index(f"{unit.layer}:{unit.head}"))
    return Heads(heads.shape, tuple(chosen))


def _new_run(loaded: Loaded, name: str, compression: int, heads: Heads) -> Any:
    """Return the run of a method, whose environment must be there."""
    if name in OWN or (name == "full" and find_spec("kvpress") is None):
        from reproduction.rivals_caches import CacheRun

        return CacheRun(loaded, name, compression, heads)
    if find_spec("kvpress") is None:
        raise UserError(
            f"method {name!r} needs the package kvpress, which is not installed. It has an "
            "environment of its own: pip install kvpress==0.5.5, then pip install --no-deps "
            "corecontext."
        )
    from reproduction.rivals_press import PressRun

    return PressRun(loaded, name, compression)


def _measure(run: Any, comparison: Comparison, task: Task, items: Sequence[Item]) -> list[Record]:
    """Return the records of a task under a method."""
    device = device_name(run.model.device)
    params = {
        "model": comparison.name,
        "method": run.name,
        "compression": run.compression,
        "trained_by": comparison.trained_by,
        "trained_tokens": comparison.trained_tokens,
        "task": task.name,
        "length": task.length,
        "seed": comparison.seed,
    }
    if comparison.first_tokens:
        seconds, sizes = _first_token(run, items[0], comparison.first_tokens)
        params |= {**run.sizes(items[0].question), **sizes}
        return [make_record("real.first_token_s", seconds, params, device=device)]

    values = []
    sizes = []
    for item in items:
        logits, item_sizes = run.ask(item)
        sizes.append(item_sizes)
        answer = torch.tensor(item.ids[item.answer :], device=logits.device)
        if task.name == PASSAGES:
            values.append(float(functional.cross_entropy(logits.float(), answer)))
        else:
            values.append(item.share_right((logits.argmax(-1) == answer).tolist()))
    params |= run.sizes(items[-1].question)
    params |= {name: round(fmean(size[name] for size in sizes)) for name in sizes[0]}
    params["context_tokens"] = round(fmean(item.question for item in items))
    params["questions"] = len(items)
    name = "real.answer_nll" if task.name == PASSAGES else "real.accuracy"
    return [make_record(name, fmean(values), params, device=device)]


def _first_token(run: Any, item: Item, count: int) -> tuple[list[float], dict[str, int]]:
    """Return the seconds from a context to the first token of the answer, so many times, and the
    bytes of the cache."""
    seconds = []
    for _ in range(count + 1):
        start = time.perf_counter()
        logits, sizes = run.ask(item, first=True)
        logits.argmax(-1).tolist()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return seconds[1:], sizes  # the first warms up
