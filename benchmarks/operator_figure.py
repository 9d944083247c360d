"""The operator's figure: what was measured on the device of the last record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.operator_report import LABELS, Row, decode_rows, memory_rows, time_rows
from corecontext.drawing import CCA, FLEX, FLOOR, FULL, pyplot, save
from corecontext.record import Record

STYLES = ("-", "--", ":")
SHADES = (FULL, "#4d4d4d", "#c0a080", "#c8c8c8")


def draw_operator(records: Sequence[Record], path: str) -> None:
    """Time against the baselines and the floor, share of the floor, memory and decoding, as far as
    there are any.

    A line of panels for each number of KV heads.
    """
    records = [r for r in records if r.device == records[-1].device]
    times, memory, decoding = time_rows(records), memory_rows(records), decode_rows(records)
    passes = [name for name in LABELS if any(row.pass_name == name for row in times)]
    heads = list(dict.fromkeys(row.params["kv_heads"] for row in times))
    panels = len(passes) + 1 + bool(memory) + bool(decoding)
    figure, axes = pyplot().subplots(
        len(heads),
        panels,
        figsize=(3.4 * panels, 3.2 * len(heads)),
        squeeze=False,
        layout="constrained",
    )
    for line, kv_heads in zip(axes, heads):
        rest, of_heads = list(line), _of(times, kv_heads)
        for name in passes:
            _draw_times(rest.pop(0), [row for row in of_heads if row.pass_name == name])
        _draw_shares(rest.pop(0), of_heads)
        if memory:
            _draw_memory(rest.pop(0), _of(memory, kv_heads))
        if decoding:
            _draw_decoding(rest.pop(0), _of(decoding, kv_heads))
        line[0].set_ylabel(f"{kv_heads} KV heads", fontsize=9)
    figure.suptitle(records[0].device, fontsize=9)
    save(figure, path)


def _of(rows: Sequence[Row], kv_heads: int) -> list[Row]:
    """The rows of one line of panels; of passes not those of CUDA graphs."""
    return [
        row
        for row in rows
        if row.params["kv_heads"] == kv_heads and (row.pass_name == "decode" or not row.graph)
    ]


def _draw_times(axis: Any, rows: Sequence[Row]) -> None:
    """Milliseconds by length, both axes logarithmic."""
    for shade, backend in zip(
        SHADES, dict.fromkeys(backend for row in rows for backend in row.full)
    ):
        _line(
            axis,
            {row.length: row.full[backend] for row in rows if backend in row.full},
            f"full ({backend})",
            shade,
        )
    _line(
        axis,
        {row.length: row.others["flex"] for row in rows if "flex" in row.others},
        "FlexAttention",
        FLEX,
    )
    _line(axis, {row.length: row.cca for row in rows}, "CCA", CCA)
    _line(axis, {row.length: row.floor for row in rows if row.floor}, "floor of CCA", FLOOR, "--")
    _dress(axis, f"{LABELS[rows[0].pass_name] if rows else ''}, ms", log=True)


def _draw_shares(axis: Any, rows: Sequence[Row]) -> None:
    """How near CCA comes to the floor."""
    for style, name in zip(STYLES, dict.fromkeys(row.pass_name for row in rows)):
        _line(
            axis,
            {
                row.length: 100 * row.share
                for row in rows
                if row.pass_name == name and row.share is not None
            },
            LABELS[name],
            CCA,
            style,
        )
    axis.set_ylim(0, 100)
    _dress(axis, "CCA: % of the floor's rate")


def _draw_memory(axis: Any, rows: Sequence[Row]) -> None:
    """Peak memory; a straight line is linear growth."""
    for style, name in zip(STYLES, dict.fromkeys(row.pass_name for row in rows)):
        of = [row for row in rows if row.pass_name == name]
        for label, color, points in (
            ("full", FULL, {row.length: row.best[1] / 2**20 for row in of if row.best}),
            ("CCA", CCA, {row.length: row.cca / 2**20 for row in of}),
        ):
            _line(axis, points, f"{label}, {LABELS[name]}", color, style)
    axis.set(xlim=(0, None), ylim=(0, None))
    _dress(axis, "peak memory above the inputs, MiB", linear=True)


def _draw_decoding(axis: Any, rows: Sequence[Row]) -> None:
    """Microseconds of a step of one layer by context length."""
    for style, batch in zip(STYLES, dict.fromkeys(row.params["batch"] for row in rows)):
        of = [row for row in rows if row.params["batch"] == batch]
        for label, color, points in (
            ("full", FULL, {row.length: row.best[1] for row in of if row.best}),
            ("CCA", CCA, {row.length: row.cca for row in of}),
        ):
            _line(axis, points, f"{label}, batch {batch}", color, style)
    _dress(axis, "decoding step of a layer, us", log=True)


def _line(axis: Any, points: dict[int, Any], label: str, color: str, style: str = "-") -> None:
    if points:
        axis.plot(
            *zip(*sorted(points.items())), style, marker="o", markersize=3, color=color, label=label
        )


def _dress(axis: Any, title: str, log: bool = False, linear: bool = False) -> None:
    """Title, scales and, where there is anything to explain, a legend."""
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("length", fontsize=8)
    axis.tick_params(labelsize=7)
    if not linear:
        axis.set_xscale("log", base=2)
    if log:
        axis.set_yscale("log")
    if axis.lines:
        axis.legend(fontsize=6)
