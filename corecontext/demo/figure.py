"""Draw the demo's figure, and write its table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from corecontext.drawing import CCA, FULL, pyplot, save
from corecontext.record import Record, newest

DEMO_ROWS = (
    ("time to first token", "first_token_s", "{:.2f} s", 1),
    ("time per further token", "next_token_ms", "{:.1f} ms", 1),
    ("cache", "cache_bytes", "{:.1f} MiB", 2**20),
    ("peak memory of the prefill", "peak_bytes", "{:.1f} MiB", 2**20),
    ("perplexity", "perplexity", "{:.3f}", 1),
    ("planted facts found", "retrieval_accuracy", "{:.0%}", 1),
)
"""Label, record, format and unit of each quantity."""


def draw_demo(records: Sequence[Record], path: str) -> None:
    """Draw bars of the measured values, full attention beside CCA."""
    rows = [row for row in DEMO_ROWS if row[1] != "retrieval_accuracy"]
    size = (2.3 * len(rows), 2.6)
    figure, axes = pyplot().subplots(1, len(rows), figsize=size, layout="constrained")
    for axis, (label, name, shown, unit) in zip(axes, rows):
        values = _values(records, name, unit)
        bars = axis.bar(("full", "CCA"), values, color=(FULL, CCA))
        axis.bar_label(bars, [shown.format(value) for value in values], fontsize=8)
        axis.set_title(label, fontsize=9)
        axis.set_yticks([])
        axis.margins(y=0.15)
        axis.spines[["top", "right", "left"]].set_visible(False)
    params = newest(records, "demo.first_token_s", method="cca").params
    figure.supxlabel(
        f"{params['length']} tokens, g = {params['group_size']}, s = {params['window_size']}; "
        f"{records[0].device}",
        fontsize=8,
    )
    save(figure, path)


def demo_table(records: Sequence[Record]) -> str:
    """Return README's table of the demo, in Markdown."""
    params = newest(records, "demo.first_token_s", method="cca").params
    lines = [
        f"`corecontext demo` on {records[-1].device}: {params['length']} tokens, "
        f"{params['dtype']}, g = {params['group_size']}, s = {params['window_size']}.",
        "",
        "| | full attention | CCA |",
        "|---|---:|---:|",
    ]
    for label, name, shown, unit in DEMO_ROWS:
        cells = [shown.format(value) for value in _values(records, name, unit)]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _values(records: Sequence[Record], name: str, unit: float) -> list[float]:
    """Return a quantity of full attention and of CCA."""
    methods = ("full", "cca")
    return [newest(records, f"demo.{name}", method=method).value / unit for method in methods]
