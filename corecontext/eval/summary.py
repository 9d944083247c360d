"""From item records to one number for each method, task and length: a table, a figure, and records
to publish."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from corecontext.eval.longbench import CATEGORIES
from corecontext.record import Record, make_record
from corecontext.terminal import console

SIZES = ("group_size", "window_size", "sinks", "num_groups", "patterns")


class Row(NamedTuple):
    """One number of the table."""

    method: str
    """With its sizes."""
    task: str
    size: int | None
    """Tokens, or documents in multidoc_qa."""
    part: str
    """A subtask, a place of the right passage, a bucket of positions; "" for all together."""
    value: float
    """Perplexity, or a fraction."""
    count: int
    params: Mapping[str, Any]


def summarise(records: Iterable[Record]) -> list[Row]:
    """The rows of item records, the whole before its parts."""
    groups: dict[tuple, list[Record]] = {}
    for one in records:
        p = one.params
        groups.setdefault(
            (
                method_name(p),
                p["model"],
                p["weights"],
                p["task"],
                p.get("length", p.get("documents")),
            ),
            [],
        ).append(one)
    rows = []
    for (method, _, _, task, size), some in groups.items():
        shared = {
            k: v
            for k, v in some[0].params.items()
            if all(one.params.get(k) == v for one in some)
            and k not in ("run", "item", "answer", "references", "prompt_tokens")
        }
        parts = perplexity_parts(some) if task == "perplexity" else score_parts(some)
        rows += [
            Row(method, task, size, part, value, count, {**shared, "items": count})
            for part, (value, count) in parts.items()
        ]
    return rows


def method_name(params: Mapping[str, Any]) -> str:
    """The method and the sizes it ran with."""
    letters = {"group_size": "g", "window_size": "s", "sinks": "sinks", "num_groups": "m"}
    sizes = [f"{letters[key]}={params[key]}" for key in letters if params.get(key)]
    return " ".join([params["method"], *sizes])


def perplexity_parts(records: Sequence[Record]) -> dict[str, tuple[float, int]]:
    """Perplexity of all tokens together, by domain, and by bucket of positions: (value, tokens)."""
    sums: dict[str, list[float]] = {"": [0.0, 0]}
    for one in records:
        sources = [("", one.params["nll"], one.params["tokens"])]
        if one.params.get("domain"):
            sources.append((one.params["domain"], one.params["nll"], one.params["tokens"]))
        sources += [
            (f"{start}-{end - 1}", nll, count) for start, end, nll, count in one.params["buckets"]
        ]
        for part, nll, count in sources:
            total = sums.setdefault(part, [0.0, 0])
            total[0], total[1] = total[0] + nll, total[1] + count
    return {
        part: (math.exp(nll / count), int(count)) for part, (nll, count) in sums.items() if count
    }


def score_parts(records: Sequence[Record]) -> dict[str, tuple[float, int]]:
    """Mean scores: (value, items). The whole is the mean of subtasks (RULER), of categories
    (LongBench), of items."""
    task = records[0].params["task"]
    key = {"multidoc_qa": "position"}.get(task, "subtask")
    parts = {
        name: _mean(some, "bucket" if task == "longbench" else None)
        for name, some in _by(records, lambda one: str(one.params.get(key, "")), key == "position")
    }
    counts = {
        name: len(some)
        for name, some in _by(records, lambda one: str(one.params.get(key, "")), False)
    }
    if task == "longbench":
        for category, tasks in CATEGORIES.items():
            here = [name for name in tasks if name in parts]
            if here:
                parts[category] = sum(parts[name] for name in here) / len(here)
                counts[category] = sum(counts[name] for name in here)
        values = [parts[category] for category in CATEGORIES if category in parts]
        whole = sum(values) / len(values)
    elif task == "ruler":
        whole = sum(parts.values()) / len(parts)
    else:
        whole = _mean(records, None)
    return {
        "": (whole, len(records)),
        **{name: (value, counts[name]) for name, value in parts.items()},
    }


def _by(
    records: Sequence[Record], key: Callable[[Record], str], numeric: bool
) -> list[tuple[str, list[Record]]]:
    """Records by a key, in its order where it is a number."""
    groups: dict[str, list[Record]] = {}
    for one in records:
        groups.setdefault(key(one), []).append(one)
    return (
        sorted(groups.items(), key=lambda item: int(item[0])) if numeric else list(groups.items())
    )


def _mean(records: Sequence[Record], within: str | None) -> float:
    """The mean, or the mean of the means of each value of a key."""
    if within is None:
        return sum(one.value for one in records) / len(records)
    means = [
        _mean(some, None)
        for _, some in _by(records, lambda one: str(one.params.get(within)), False)
    ]
    return sum(means) / len(means)


def to_records(rows: Iterable[Row], device: str) -> list[Record]:
    """One record for each row, for results/quality.jsonl."""
    names = {"perplexity": "quality.perplexity", "mmlu": "quality.accuracy"}
    return [
        make_record(
            names.get(row.task, "quality.score"),
            row.value,
            {**row.params, **({"part": row.part} if row.part else {})},
            device=device,
        )
        for row in rows
    ]


def print_table(rows: Sequence[Row], parts: bool = True) -> None:
    """Methods in columns; perplexity as it is, scores in percent."""
    methods = list(dict.fromkeys(row.method for row in rows))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # narrow: eight methods fit in 120 columns
    for heading in ("task", "size", "part"):
        table.add_column(heading, no_wrap=True)
    for method in methods:
        table.add_column(method.replace(" ", "\n"), justify="right", overflow="fold")
    for task, size, part in dict.fromkeys((row.task, row.size, row.part) for row in rows):
        if part and not parts:
            continue
        values = {
            row.method: row for row in rows if (row.task, row.size, row.part) == (task, size, part)
        }
        shown = [
            ("" if (row := values.get(method)) is None else shown_value(row)) for method in methods
        ]
        table.add_row(task, "" if size is None else str(size), part or "all", *shown)
    console().print(table)


def shown_value(row: Row) -> str:
    """A value as tables have it."""
    return f"{row.value:.4f}" if row.task == "perplexity" else f"{100 * row.value:.1f}"


def draw(rows: Sequence[Row], path: str) -> None:
    """One panel a task: value against length (or documents), one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from corecontext.files import atomic_path

    whole = [row for row in rows if not row.part]
    tasks = list(dict.fromkeys(row.task for row in whole))
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(4.5 * len(tasks), 3.6), squeeze=False)
    for panel, task in zip(panels[0], tasks):
        here = [row for row in whole if row.task == task]
        for method in dict.fromkeys(row.method for row in here):
            points = sorted(
                (row.size or 0, row.value * (1 if task == "perplexity" else 100))
                for row in here
                if row.method == method
            )
            panel.plot(
                [str(size) if size else "all" for size, _ in points],
                [value for _, value in points],
                "o-",
                label=method,
            )
        panel.set_title(task)
        panel.set_xlabel("documents" if task == "multidoc_qa" else "length, tokens")
        panel.set_ylabel("perplexity" if task == "perplexity" else "score, %")
        if task != "perplexity":
            panel.set_ylim(-3, 103)
        panel.legend(fontsize=7)
    figure.tight_layout()
    with atomic_path(path) as name:
        figure.savefig(name, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)
