"""The operator's tables, from its records: on the terminal and in README."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.operator_report import (
    LABELS,
    OTHERS,
    Row,
    crossovers,
    decode_rows,
    memory_rows,
    of_minimum,
    skipped,
    time_rows,
)
from corecontext.record import Record
from corecontext.terminal import console


def shown_ms(value: float | None) -> str:
    """Milliseconds with three figures."""
    if value is None:
        return ""
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


def shown_us(value: float | None) -> str:
    """Microseconds with three figures."""
    if value is None:
        return ""
    return f"{value:.3g} us" if value < 1000 else shown_ms(value / 1e3)


def print_table(records: Sequence[Record]) -> None:
    """Time by length, CCA beside full attention, with the share of the floor that was reached;
    memory; decoding."""
    params = next(r.params for r in records if r.params["method"] == "cca")
    console().print(
        f"{records[0].device}\n{params['query_heads']} query heads of {params['head_dim']}, "
        f"{params['dtype']}, g = {params['group_size']}, s = {params['window_size']}"
    )
    for title, (head, *body) in (
        ("time", time_cells(records)),
        ("peak memory above the inputs", memory_cells(records)),
        ("decoding, one step of one layer", decode_cells(records)),
    ):
        if body:
            table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
            for number, column in enumerate(head):
                table.add_column(column, justify="right" if number else "left", no_wrap=True)
            for cells in body:
                table.add_row(*cells)
            console().print(table)
    for line in (*crossover_lines(time_rows(records)), *skipped(records)):
        console().print(line, soft_wrap=True)
    console().print(
        "floor: the operations at the matrix product rate measured here; no method can be faster."
    )


def time_cells(records: Sequence[Record]) -> list[list[str]]:
    """Head and body of the table of times: every kernel that was measured."""
    found = time_rows(records)
    backends, others = _backends(found), _others(found)
    head = [
        "",
        "KV heads",
        "length",
        *backends,
        *others,
        "CCA",
        "full / CCA",
        "TFLOP/s",
        "of floor",
    ]
    body = [
        [
            row.label,
            str(row.params["kv_heads"]),
            str(row.length),
            *_full_cells(row, backends, shown_ms),
            *(shown_ms(row.others.get(one)) for one in others),
            shown_ms(row.cca),
            _times(row.gain),
            f"{row.tflops:.3g}",
            _percent(row.share),
        ]
        for row in found
    ]
    return [head, *body]


def _others(found: Sequence[Row]) -> list[str]:
    """The other ways to compute CCA that were measured."""
    return [one for one in OTHERS if any(one in row.others for row in found)]


def memory_cells(records: Sequence[Record]) -> list[list[str]]:
    """Head and body of the table of peak memory."""
    found = memory_rows(records)
    backends = _backends(found)
    head = ["", "KV heads", "length", *backends, "CCA", "full / CCA", "of the minimum: full", "CCA"]
    return [
        head,
        *(
            [
                row.label,
                str(row.params["kv_heads"]),
                str(row.length),
                *_full_cells(row, backends, _mib),
                _mib(row.cca),
                _times(row.gain),
                _times(of_minimum(row, row.best[1]) if row.best else None),
                _times(of_minimum(row, row.cca)),
            ]
            for row in found
        ),
    ]


def decode_cells(records: Sequence[Record]) -> list[list[str]]:
    """Head and body of the table of decoding; the share is that of the rate at which memory is
    copied."""
    found = decode_rows(records)
    backends = _backends(found)
    head = ["KV heads", "batch", "context", *backends, "CCA", "full / CCA", "TB/s", "of copying"]
    return [
        head,
        *(
            [
                str(row.params["kv_heads"]),
                str(row.params["batch"]),
                str(row.length),
                *_full_cells(row, backends, shown_us),
                shown_us(row.cca),
                _times(row.gain),
                f"{row.params['bytes_read'] / row.cca / 1e6:.3g}",
                _percent(row.share),
            ]
            for row in found
        ),
    ]


def crossover_lines(found: Sequence[Row]) -> list[str]:
    """From which length CCA wins: one line for each series that has more than one length."""
    lines = []
    for shape, length in crossovers(found).items():
        of_shape = [row for row in found if row.shape == shape and row.best]
        if len(of_shape) > 1:
            row = of_shape[0]
            what = f"{row.label}, {row.params['kv_heads']} KV heads"
            lines.append(
                f"{what}: CCA is the faster from {length} tokens on"
                if length
                else f"{what}: full attention is the faster at {max(r.length for r in of_shape)} tokens still"
            )
    return lines


def operator_markdown(records: Sequence[Record]) -> str:
    """README's tables of the operator: a section for each device and shape, against the fastest
    full attention."""
    sections: dict[tuple[Any, ...], list[Row]] = {}
    for row in time_rows(records):
        sections.setdefault(_section(row), []).append(row)
    lines: list[str] = []
    for section, found in sections.items():
        device, heads, dim, batch, dtype, g, s = section
        lines += [
            "",
            f"**{device}**, {heads} query heads of {dim}, {dtype}, g = {g}, s = {s}"
            + (f", batch {batch}:" if batch != 1 else ":"),
            "",
        ]
        lines += _time_markdown(found)
        lines += [""] * bool(notes := _crossover_markdown(found)) + notes
        lines += _memory_markdown([row for row in memory_rows(records) if _section(row) == section])
        lines += _decode_markdown(
            [row for row in decode_rows(records) if _section(row, batch) == section]
        )
    notes = skipped(records)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines[1:]) + "\n"


def _section(row: Row, batch: int | None = None) -> tuple[Any, ...]:
    """What the rows of one section share; decoding has batches of its own."""
    p = row.params
    return (
        row.device,
        p["query_heads"],
        p["head_dim"],
        batch or p["batch"],
        p["dtype"],
        p["group_size"],
        p["window_size"],
    )


def _time_markdown(found: Sequence[Row]) -> list[str]:
    """Forward, and forward and backward, side by side."""
    shown = ("forward", "forward_backward")
    places: dict[tuple[int, int], dict[str, Row]] = {}
    for row in found:
        if not row.graph:
            places.setdefault((row.params["kv_heads"], row.length), {})[row.pass_name] = row
    others = _others([row for row in found if row.pass_name in shown])
    parts = [
        part
        for name in shown
        for part in (
            f"{LABELS[name]}: full attention",
            *(OTHERS[one] for one in others),
            "CCA",
            "",
            "of floor",
        )
    ]
    lines = ["| KV heads | L | " + " | ".join(parts) + " |", "|---:|---:|" + "---:|" * len(parts)]
    for (kv_heads, length), passes in places.items():
        cells: list[str] = []
        for name in shown:
            if name not in passes:
                cells += [""] * (len(parts) // 2)
                continue
            row = passes[name]
            cells += [
                f"{shown_ms(row.best[1])} ({row.best[0]})" if row.best else "not measured",
                *(shown_ms(row.others.get(one)) for one in others),
                shown_ms(row.cca),
                _times(row.gain),
                _percent(row.share),
            ]
        lines.append(f"| {kv_heads} | {length} | " + " | ".join(cells) + " |")
    return lines


def _crossover_markdown(found: Sequence[Row]) -> list[str]:
    """From which length CCA wins, by pass and KV heads, in one sentence."""
    wins = []
    for shape, length in crossovers(
        row for row in found if row.pass_name != "backward" and not row.graph
    ).items():
        of_shape = [row for row in found if row.shape == shape]
        if len(of_shape) > 1:
            since = f"L = {length}" if length else "no measured length"
            wins.append(f"{since} ({of_shape[0].label}, {of_shape[0].params['kv_heads']} KV heads)")
    return [f"CCA is the faster from {', '.join(wins)} on."] if wins else []


def _memory_markdown(found: Sequence[Row]) -> list[str]:
    """Peak memory of forward, and of forward and backward, side by side."""
    places: dict[tuple[int, int], dict[str, Row]] = {}
    for row in found:
        places.setdefault((row.params["kv_heads"], row.length), {})[row.pass_name] = row
    passes = [
        name
        for name in ("forward", "forward_backward")
        if any(name in rows for rows in places.values())
    ]
    heads = [
        f"{LABELS[name]}: full attention | of the minimum | CCA | of the minimum" for name in passes
    ]
    lines = [
        "",
        "Peak memory above the inputs:",
        "",
        "| KV heads | L | " + " | ".join(heads) + " |",
        "|---:|---:|" + "---:|" * 4 * len(passes),
    ]
    for (kv_heads, length), by_pass in places.items():
        cells = []
        for name in passes:
            if name not in by_pass:
                cells += [""] * 4
                continue
            row = by_pass[name]
            for peak in (row.best[1] if row.best else None, row.cca):
                cells += (
                    ["not measured", ""]
                    if peak is None
                    else [_mib(peak), _times(of_minimum(row, peak))]
                )
        lines.append(f"| {kv_heads} | {length} | " + " | ".join(cells) + " |")
    return lines if places else []


def _decode_markdown(found: Sequence[Row]) -> list[str]:
    """One decoding step of one layer."""
    lines = []
    for row in found:
        p, full = (
            row.params,
            f"{shown_us(row.best[1])} ({row.best[0]})" if row.best else "not measured",
        )
        lines.append(
            f"| {p['kv_heads']} | {p['batch']} | {row.length} | {full} | {shown_us(row.cca)} | "
            f"{_times(row.gain)} | {p['bytes_read'] / row.cca / 1e6:.3g} | {_percent(row.share)} |"
        )
    return lines and [
        "",
        "| KV heads | batch | context | decoding step: full attention | CCA | | TB/s | of copying |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
        *lines,
    ]


def _backends(found: Sequence[Row]) -> list[str]:
    """Every kernel of full attention among the rows."""
    return list(dict.fromkeys(backend for row in found for backend in row.full))


def _full_cells(row: Row, backends: Sequence[str], shown: Callable[[float], str]) -> list[str]:
    """Full attention's cells; what is missing is explained below the tables."""
    return [shown(row.full[backend]) if backend in row.full else "skipped" for backend in backends]


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _mib(value: float) -> str:
    return f"{value / 2**20:.1f} MiB"
