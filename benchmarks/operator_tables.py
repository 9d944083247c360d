"""Write the operator's tables from its records: a section for each device and sizes."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.operator_report import (
    LABELS,
    OTHERS,
    Row,
    crossovers,
    decode_rows,
    memory_rows,
    ratio_to_minimum,
    skipped,
    time_rows,
)
from benchmarks.tables import (
    Column,
    markdown,
    optional,
    shown_mib,
    shown_ms,
    shown_percent,
    shown_times,
    shown_us,
)
from corecontext.record import Record

BOTH = ("forward", "forward_backward")  # side by side
KV_HEADS = Column("KV heads", lambda row: str(row.params["kv_heads"]))
GAIN = Column("", lambda row: optional(shown_times)(row.gain))
SHARE = Column("of floor", lambda row: optional(shown_percent)(row.share))


def _full(title: str, show: Callable[[float], str], *, named: bool) -> Column:
    """Return the column of the best full attention, with its kernel or without."""

    def cell(row: Row) -> str:
        if row.best is None:
            return "not measured"
        kernel, value = row.best
        return f"{show(value)} ({kernel})" if named else show(value)

    return Column(title, cell)


MEMORY = (
    _full("full attention", shown_mib, named=False),
    Column("of the minimum", lambda row: _of_minimum(row, row.best and row.best[1])),
    Column("CCA", lambda row: shown_mib(row.cca)),
    Column("of the minimum", lambda row: _of_minimum(row, row.cca)),
)
STEPS = (
    KV_HEADS,
    Column("batch", lambda row: str(row.params["batch"])),
    Column("context", lambda row: str(row.length)),
    _full("decoding step: full attention", shown_us, named=True),
    Column("CCA", lambda row: shown_us(row.cca)),
    GAIN,
    Column("TB/s", lambda row: f"{row.params['bytes_read'] / row.cca / 1e6:.3g}"),
    Column("of copying", SHARE.cell),
)


def _of_minimum(row: Row, peak: float | None) -> str:
    """Show a peak over the minimum."""
    return "" if peak is None else shown_times(ratio_to_minimum(row, peak))


def _times(compared: Sequence[Row]) -> list[Column]:
    """Return the columns of a pass, with each other method that computes CCA."""
    others = [
        Column(title, lambda row, name=name: optional(shown_ms)(row.alternatives.get(name)))  # type: ignore[misc]
        for name, title in OTHERS.items()
        if any(name in row.alternatives for row in compared if row.pass_name in BOTH)
    ]
    cca = Column("CCA", lambda row: shown_ms(row.cca))
    return [_full("full attention", shown_ms, named=True), *others, cca, GAIN, SHARE]


def operator_markdown(records: Sequence[Record]) -> str:
    """Return the page's tables: a section for each device and sizes, against the fastest full."""
    sections: dict[tuple[Any, ...], list[Row]] = {}
    for row in time_rows(records):
        sections.setdefault(_section(row), []).append(row)
    lines: list[str] = []
    for section, timed in sections.items():
        device, heads, dim, batch, dtype, g, s = section
        head = f"**{device}**, {heads} query heads of {dim}, {dtype}, g = {g}, s = {s}"
        lines += ["", head + (f", batch {batch}:" if batch != 1 else ":"), ""]
        queued = [row for row in timed if not row.graph]
        lines += _side_by_side(queued, BOTH, _times(timed))
        lines += _crossover_markdown(timed)
        memory = [row for row in memory_rows(records) if _section(row) == section]
        if memory:
            passes = [name for name in BOTH if any(row.pass_name == name for row in memory)]
            table = _side_by_side(memory, passes, MEMORY)
            lines += ["", "Peak memory above the inputs:", "", *table]
        # Decoding has batches of its own.
        decoded = [row for row in decode_rows(records) if _section(row, batch) == section]
        if decoded:
            lines += ["", *markdown(STEPS, decoded)]
    notes = skipped(records)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines[1:]) + "\n"


def _section(row: Row, batch: int | None = None) -> tuple[Any, ...]:
    """Return the key that the rows of one section share."""
    p = row.params
    sizes = (p["query_heads"], p["head_dim"], batch or p["batch"], p["dtype"])
    return (row.device, *sizes, p["group_size"], p["window_size"])


Passes = dict[str, Row]
"""The rows of one place, by pass."""


def _side_by_side(
    compared: Sequence[Row], passes: Sequence[str], columns: Sequence[Column]
) -> list[str]:
    """Return a table with the columns repeated for each pass, its name in the first one's title."""
    places: dict[tuple[int, int], Passes] = {}
    for row in compared:
        places.setdefault((row.params["kv_heads"], row.length), {})[row.pass_name] = row

    def of_pass(column: Column, name: str, first: bool) -> Column:
        title = f"{LABELS[name]}: {column.title}" if first else column.title
        return Column(title, lambda at: column.cell(at[name]) if name in at else "")

    any_row: Callable[[Passes], Row] = lambda at: next(iter(at.values()))  # noqa: E731
    return markdown(
        [
            Column("KV heads", lambda at: str(any_row(at).params["kv_heads"])),
            Column("L", lambda at: str(any_row(at).length)),
            *(
                of_pass(column, name, number == 0)
                for name in passes
                for number, column in enumerate(columns)
            ),
        ],
        places.values(),
    )


def _crossover_markdown(compared: Sequence[Row]) -> list[str]:
    """Return one sentence with the lengths from which CCA is faster, by pass and KV heads."""
    rows_of_passes = [row for row in compared if row.pass_name != "backward" and not row.graph]
    wins = []
    for key, length in crossovers(rows_of_passes).items():
        series = [row for row in compared if row.series == key]
        if len(series) > 1:
            since = f"L = {length}" if length else "no measured length"
            wins.append(f"{since} ({series[0].label}, {series[0].params['kv_heads']} KV heads)")
    return ["", f"CCA is the faster from {', '.join(wins)} on."] if wins else []
