"""Summarise item records as one number per method, task and length: a table, and records to
publish."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from corecontext.eval.combine import group_by
from corecontext.eval.task_table import TASKS, Task
from corecontext.record import Record, make_record
from corecontext.terminal import console

_ITEM_PARAMS = ("run", "item", "answer", "references", "prompt_tokens")
"""Parameters of a single item, which rows do not have."""
_LETTERS = {
    "group_size": "g",
    "window_size": "s",
    "sinks": "sinks",
    "num_groups": "m",
    "fetch_groups": "k",
    "prefill": "prefill",
}
"""Names of sizes in a method's column, by their parameter in records."""


class Row(NamedTuple):
    """A number of the table, and what it is of."""

    method: str
    """The method with its sizes."""
    task: str
    size: int | None
    """Tokens, or documents in multidoc_qa."""
    part: str
    """A subtask, a place of the right passage, a bucket of positions; "" for the whole."""
    value: float
    """Perplexity, or a mean score from 0 to 1."""
    count: int
    """Items of a score, tokens of a perplexity."""
    params: Mapping[str, Any]
    name: str = "quality.score"
    """The name of its items' records."""


def summarise(records: Iterable[Record], tasks: Mapping[str, Task] = TASKS) -> list[Row]:
    """Return the rows of item records, the whole before its parts."""

    def key(record: Record) -> tuple:
        params = record.params
        size = params.get("length", params.get("documents"))
        return method_name(params), params["model"], params["weights"], params["task"], size

    rows = []
    for (method, _, _, task, size), group in group_by(records, key).items():
        shared = {
            name: value
            for name, value in group[0].params.items()
            if name not in _ITEM_PARAMS and all(r.params.get(name) == value for r in group)
        }
        for name, (value, count) in tasks[task].combine(group).items():
            params = {**shared, "items": count}
            rows.append(Row(method, task, size, name, value, count, params, group[0].name))
    return rows


def method_name(params: Mapping[str, Any]) -> str:
    """Return a record's method with its sizes, such as "cca g=16 s=1024"."""
    sizes = [f"{letter}={params[key]}" for key, letter in _LETTERS.items() if params.get(key)]
    return " ".join([params["method"], *sizes])


def to_records(rows: Iterable[Row], device: str) -> list[Record]:
    """Return a record for each row, for results/quality.jsonl."""
    records = []
    for row in rows:
        params = dict(row.params)
        if row.part:
            params["part"] = row.part
        records.append(make_record(row.name, row.value, params, device=device))
    return records


def print_table(rows: Sequence[Row], parts: bool = True) -> None:
    """Print a line for each task, size and, with `parts`, part, and a column for each method."""
    methods = list(dict.fromkeys(row.method for row in rows))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # narrow: eight methods fit in 120 columns
    for heading in ("task", "size", "part"):
        table.add_column(heading, no_wrap=True)
    for method in methods:
        table.add_column(method.replace(" ", "\n"), justify="right", overflow="fold")
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if parts or not row.part:
            lines.setdefault((row.task, row.size, row.part), {})[row.method] = shown_value(row)
    for (task, size, name), values in lines.items():
        cells = [values.get(method, "") for method in methods]
        table.add_row(task, "" if size is None else str(size), name or "all", *cells)
    console().print(table)


def shown_value(row: Row) -> str:
    """Return a value as tables show it: a perplexity as it is, a score in percent."""
    return f"{row.value:.4f}" if row.name == "quality.perplexity" else f"{100 * row.value:.1f}"
