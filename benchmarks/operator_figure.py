"""Draw the operator's figure: time, memory and decoding by length on one device."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.drawing import CCA, FLEX, FLOOR, FULL, pyplot, save
from benchmarks.operator_report import (
    KERNEL_TITLES,
    LABELS,
    Row,
    decode_rows,
    memory_rows,
    time_rows,
)
from benchmarks.plotting import draw_line, finish
from benchmarks.tables import shown_tokens
from corecontext.record import Record

STYLES = ("-", "--", ":")
SHADES = (FULL, "#4d4d4d", "#c0a080", "#c8c8c8")


def draw_operator(records: Sequence[Record], path: str) -> None:
    """Draw a panel for each pass, memory and decoding, on the device with most records.

    Of several numbers of KV heads the one measured at the most lengths is drawn.
    """
    [(device, _)] = Counter(r.device for r in records).most_common(1)
    records = [r for r in records if r.device == device]
    timed = [row for row in time_rows(records) if not row.graph]
    counts = Counter(row.params["kv_heads"] for row in timed)
    kv_heads = max(counts, key=lambda heads: counts[heads])
    timed, memory, decoded = (
        [row for row in rows if row.params["kv_heads"] == kv_heads]
        for rows in (timed, memory_rows(records), decode_rows(records))
    )
    passes = [name for name in LABELS if any(row.pass_name == name for row in timed)]
    panels = len(passes) + bool(memory) + bool(decoded)
    columns = min(3, panels)
    lines = -(-panels // columns)
    figure, axes = pyplot().subplots(
        lines, columns, figsize=(4.2 * columns, 2.9 * lines + 0.4), layout="constrained"
    )
    free = list(axes.flat) if panels > 1 else [axes]
    for name in passes:
        _draw_times(free.pop(0), [row for row in timed if row.pass_name == name])
    if memory:
        _draw_memory(free.pop(0), memory)
    if decoded:
        _draw_decoding(free.pop(0), decoded)
    for axis in free:
        axis.set_visible(False)
    figure.suptitle(_message(timed), fontsize=11, x=0.01, ha="left")
    save(figure, path)


def _message(timed: Sequence[Row]) -> str:
    """Say how CCA compares at the longest forward, and under which settings."""
    params = timed[0].params
    settings = (
        f"{params['query_heads']} query and {params['kv_heads']} KV heads of {params['head_dim']}, "
        f"{params['dtype']}, g = {params['group_size']}, s = {params['window_size']}, "
        f"{timed[0].device}"
    )
    compared = [row for row in timed if row.pass_name == "forward" and row.gain]
    if not compared:
        return f"Attention of one layer\n{settings}"
    last = compared[-1]
    return (
        f"At {shown_tokens(last.length)} tokens full attention takes {last.gain:.1f} times as long "
        f"as CCA\n{settings}"
    )


def _draw_times(axis: Any, rows: Sequence[Row]) -> None:
    """Draw milliseconds by length."""
    backends = dict.fromkeys(backend for row in rows for backend in row.full)
    for shade, backend in zip(SHADES, backends):
        title = KERNEL_TITLES.get(backend, f"full ({backend})")
        draw_line(axis, {row.length: row.full.get(backend) for row in rows}, title, shade)
    draw_line(
        axis, {row.length: row.alternatives.get("flex") for row in rows}, "FlexAttention", FLEX
    )
    draw_line(axis, {row.length: row.cca for row in rows}, "CCA", CCA)
    draw_line(axis, {row.length: row.floor for row in rows}, "floor of CCA", FLOOR, "--")
    finish(axis, f"{LABELS[rows[0].pass_name]}, ms")


def _draw_memory(axis: Any, rows: Sequence[Row]) -> None:
    """Draw peak memory; a straight line is linear growth."""
    for style, name in zip(STYLES, dict.fromkeys(row.pass_name for row in rows)):
        of_pass = [row for row in rows if row.pass_name == name]
        full = {row.length: row.best[1] / 2**30 for row in of_pass if row.best}
        draw_line(axis, full, f"full, {LABELS[name]}", FULL, style)
        cca = {row.length: row.cca / 2**30 for row in of_pass}
        draw_line(axis, cca, f"CCA, {LABELS[name]}", CCA, style)
    finish(axis, "peak memory above the inputs, GiB", log_x=False, log_y=False)


def _draw_decoding(axis: Any, rows: Sequence[Row]) -> None:
    """Draw microseconds of a step of one layer by context length."""
    for style, batch in zip(STYLES, dict.fromkeys(row.params["batch"] for row in rows)):
        of_batch = [row for row in rows if row.params["batch"] == batch]
        full = {row.length: row.best[1] for row in of_batch if row.best}
        draw_line(axis, full, f"full, batch {batch}", FULL, style)
        draw_line(
            axis, {row.length: row.cca for row in of_batch}, f"CCA, batch {batch}", CCA, style
        )
    finish(axis, "decoding step of a layer, us", "tokens of the context")
