"""Write the operator's tables from its records: on the terminal and in Markdown."""

from __future__ import annotations

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
    print_table,
    shown_mib,
    shown_ms,
    shown_percent,
    shown_times,
    shown_us,
)
from corecontext.record import Record
from corecontext.terminal import console

BOTH = ("forward", "forward_backward")  # side by side in Markdown
times = optional(shown_times)
percent = optional(shown_percent)


def print_operator(records: Sequence[Record]) -> None:
    """Print time by length with the share of the floor, memory and decoding."""
    params = next(r.params for r in records if r.params["method"] == "cca")
    console().print(
        f"{records[0].device}\n{params['query_heads']} query heads of {params['head_dim']}, "
        f"{params['dtype']}, g = {params['group_size']}, s = {params['window_size']}"
    )
    timed = time_rows(records)
    decoded = decode_rows(records)
    print_table(time_columns(timed), timed, "time")
    memory = memory_rows(records)
    print_table(memory_columns(memory), memory, "peak memory above the inputs")
    print_table(decode_columns(decoded), decoded, "decoding, one step of one layer")
    for line in (*crossover_lines(timed), *skipped(records)):
        console().print(line, soft_wrap=True)
    console().print(
        "floor: the operations at the matrix product rate measured here; no method can be faster."
    )


PLACE = (
    Column("", lambda row: row.label, left=True),
    Column("KV heads", lambda row: str(row.params["kv_heads"])),
    Column("length", lambda row: str(row.length)),
)
GAIN = Column("full / CCA", lambda row: times(row.gain))
SHARE = Column("of floor", lambda row: percent(row.share))
RATE = Column("TB/s", lambda row: f"{row.params['bytes_read'] / row.cca / 1e6:.3g}")


def _full_columns(compared: Sequence[Row], show: Callable[[float], str]) -> list[Column]:
    """Return a column for each kernel of full attention; notes below the tables explain gaps."""
    backends = dict.fromkeys(backend for row in compared for backend in row.full)
    return [
        Column(name, lambda row, name=name: optional(show, "skipped")(row.full.get(name)))  # type: ignore[misc]
        for name in backends
    ]


def _other_columns(compared: Sequence[Row]) -> list[Column]:
    """Return a column for each other method that computes CCA."""
    return [
        Column(title, lambda row, name=name: optional(shown_ms)(row.alternatives.get(name)))  # type: ignore[misc]
        for name, title in OTHERS.items()
        if any(name in row.alternatives for row in compared)
    ]


def time_columns(compared: Sequence[Row]) -> list[Column]:
    """Return the columns of the table of times: every kernel that was measured."""
    return [
        *PLACE,
        *_full_columns(compared, shown_ms),
        *_other_columns(compared),
        Column("CCA", lambda row: shown_ms(row.cca)),
        GAIN,
        Column("TFLOP/s", lambda row: f"{row.tflops:.3g}"),
        SHARE,
    ]


def memory_columns(compared: Sequence[Row]) -> list[Column]:
    """Return the columns of the table of peak memory."""
    return [
        *PLACE,
        *_full_columns(compared, shown_mib),
        Column("CCA", lambda row: shown_mib(row.cca)),
        GAIN,
        Column("of the minimum: full", of_full_minimum),
        Column("CCA", of_cca_minimum),
    ]


def decode_columns(compared: Sequence[Row]) -> list[Column]:
    """Return the columns of decoding; the share is that of the rate of copying memory."""
    return [
        PLACE[1],
        Column("batch", lambda row: str(row.params["batch"])),
        Column("context", lambda row: str(row.length)),
        *_full_columns(compared, shown_us),
        Column("CCA", lambda row: shown_us(row.cca)),
        GAIN,
        RATE,
        Column("of copying", SHARE.cell),
    ]


def of_full_minimum(row: Row) -> str:
    """Show full attention's memory over the minimum."""
    return _best(row, lambda best: shown_times(ratio_to_minimum(row, best[1])))


def of_cca_minimum(row: Row) -> str:
    """Show CCA's memory over the minimum."""
    return shown_times(ratio_to_minimum(row, row.cca))


def _best(row: Row, show: Callable[[tuple[str, float]], str], missing: str = "") -> str:
    """Show the best full attention."""
    return show(row.best) if row.best else missing


def crossover_lines(compared: Sequence[Row]) -> list[str]:
    """Return the length from which CCA is faster, for each series of more than one length."""
    lines = []
    for key, length in crossovers(compared).items():
        series = [row for row in compared if row.series == key and row.best]
        if len(series) < 2:
            continue
        place = f"{series[0].label}, {series[0].params['kv_heads']} KV heads"
        if length:
            lines.append(f"{place}: CCA is the faster from {length} tokens on")
        else:
            longest = max(row.length for row in series)
            lines.append(f"{place}: full attention is the faster at {longest} tokens still")
    return lines


# Markdown


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
        lines += _time_markdown(timed)
        lines += _crossover_markdown(timed)
        memory = [row for row in memory_rows(records) if _section(row) == section]
        if memory:
            lines += ["", "Peak memory above the inputs:", "", *_memory_markdown(memory)]
        # Decoding has batches of its own.
        decoded = [row for row in decode_rows(records) if _section(row, batch) == section]
        if decoded:
            lines += ["", *markdown(_decode_markdown_columns(), decoded)]
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


def _time_markdown(compared: Sequence[Row]) -> list[str]:
    """Return forward beside forward and backward, without CUDA graphs."""
    shown = [row for row in compared if row.pass_name in BOTH]
    columns = [
        Column(
            "full attention",
            lambda row: _best(row, lambda best: f"{shown_ms(best[1])} ({best[0]})", "not measured"),
        ),
        *_other_columns(shown),
        Column("CCA", lambda row: shown_ms(row.cca)),
        Column("", GAIN.cell),
        SHARE,
    ]
    return _side_by_side([row for row in compared if not row.graph], BOTH, columns)


def _memory_markdown(compared: Sequence[Row]) -> list[str]:
    columns = [
        Column(
            "full attention",
            lambda row: _best(row, lambda best: shown_mib(best[1]), "not measured"),
        ),
        Column("of the minimum", of_full_minimum),
        Column("CCA", lambda row: shown_mib(row.cca)),
        Column("of the minimum", of_cca_minimum),
    ]
    passes = [name for name in BOTH if any(row.pass_name == name for row in compared)]
    return _side_by_side(compared, passes, columns)


def _decode_markdown_columns() -> list[Column]:
    return [
        PLACE[1],
        Column("batch", lambda row: str(row.params["batch"])),
        Column("context", lambda row: str(row.length)),
        Column(
            "decoding step: full attention",
            lambda row: _best(row, lambda best: f"{shown_us(best[1])} ({best[0]})", "not measured"),
        ),
        Column("CCA", lambda row: shown_us(row.cca)),
        Column("", GAIN.cell),
        RATE,
        Column("of copying", SHARE.cell),
    ]


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
