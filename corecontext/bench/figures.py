"""Figures and README's tables, drawn from records: no number is ever typed by hand.

`python -m corecontext.bench.figures` draws results/*.svg; with `--readme` it also rewrites the
tables of README and docs/, which stand between `<!-- table: NAME -->` and `<!-- end table -->`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from corecontext.bench.drawing import CCA, FULL, SUFFIXES, check_plot, pyplot, save
from corecontext.bench.model_figure import draw_model, draw_sweep
from corecontext.bench.model_tables import model_markdown
from corecontext.bench.operator_figure import draw_operator
from corecontext.bench.serve_figure import draw_serve
from corecontext.bench.tables import operator_markdown
from corecontext.bench.training_figure import draw_training, training_markdown
from corecontext.record import Record, read_records
from corecontext.text import write_text

__all__ = [
    "SUFFIXES",
    "check_plot",
    "demo_table",
    "draw_demo",
    "draw_model",
    "draw_operator",
    "draw_sweep",
    "main",
    "model_markdown",
    "newest",
    "operator_markdown",
    "update_tables",
]

DEMO_ROWS = (
    ("time to first token", "first_token_s", "{:.2f} s", 1),
    ("time per further token", "next_token_ms", "{:.1f} ms", 1),
    ("cache", "cache_bytes", "{:.1f} MiB", 2**20),
    ("peak memory of the prefill", "peak_bytes", "{:.1f} MiB", 2**20),
    ("perplexity", "perplexity", "{:.3f}", 1),
    ("planted facts found", "retrieval_accuracy", "{:.0%}", 1),
)


def draw_demo(records: Sequence[Record], path: str) -> None:
    """Bars of what the demo measured, full attention beside CCA."""
    rows = [row for row in DEMO_ROWS if row[1] != "retrieval_accuracy"]
    figure, axes = pyplot().subplots(
        1, len(rows), figsize=(2.3 * len(rows), 2.6), layout="constrained"
    )
    for axis, (label, name, shown, unit) in zip(axes, rows):
        values = [
            newest(records, f"demo.{name}", method=method).value / unit
            for method in ("full", "cca")
        ]
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
    """README's table of the demo, in Markdown."""
    params = newest(records, "demo.first_token_s", method="cca").params
    lines = [
        f"`corecontext demo` on {records[-1].device}: {params['length']} tokens, {params['dtype']}, "
        f"g = {params['group_size']}, s = {params['window_size']}.",
        "",
        "| | full attention | CCA |",
        "|---|---:|---:|",
    ]
    for label, name, shown, unit in DEMO_ROWS:
        values = [
            newest(records, f"demo.{name}", method=method).value / unit
            for method in ("full", "cca")
        ]
        lines.append(f"| {label} | " + " | ".join(shown.format(value) for value in values) + " |")
    return "\n".join(lines) + "\n"


OneTable = tuple[str, str, Callable[[Sequence[Record]], str]]
"""What stands in the page's mark, the file of its records in results/, and what makes it of
them."""
TABLES: Sequence[OneTable] = (
    ("demo", "demo", demo_table),
    ("operator", "operator", operator_markdown),
    ("model", "model", model_markdown),
    ("training", "training", training_markdown),
)


def newest(records: Iterable[Record], name: str, **params: Any) -> Record:
    """The last record of this name and these params.

    Raises:
        ValueError: there is none.
    """
    for r in reversed(list(records)):
        if r.name == name and all(r.params.get(key) == value for key, value in params.items()):
            return r
    raise ValueError(f"records must hold {name} with {params}, got none.")


def update_tables(text: str, results: Path, tables: Sequence[OneTable] = TABLES) -> str:
    """A page with its tables made anew from the records; a table without records stays as it is."""
    for name, file, draw in tables:
        path = results / f"{file}.jsonl"
        if path.exists():
            before, mark, rest = text.partition(f"<!-- table: {name} -->\n")
            if mark:
                text = (
                    before
                    + mark
                    + draw(read_records(path))
                    + rest[rest.index("<!-- end table -->") :]
                )
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Draw every figure that has records; with --readme rewrite the tables too."""
    parser = argparse.ArgumentParser(
        prog="python -m corecontext.bench.figures", description=main.__doc__
    )
    parser.add_argument("--results", default="results", help="folder of the records")
    parser.add_argument(
        "--readme",
        nargs="?",
        const="README.md",
        help="also rewrite the tables of this file and of docs/ beside it",
    )
    options = parser.parse_args(argv)
    results = Path(options.results)
    for name, figure, draw in (
        ("demo", "demo", draw_demo),
        ("operator", "operator", draw_operator),
        ("model", "model", draw_model),
        ("model", "model_sweep", draw_sweep),
        ("training", "training", draw_training),
    ):
        if (results / f"{name}.jsonl").exists():
            draw(read_records(results / f"{name}.jsonl"), str(results / f"{figure}.svg"))
    if (results / "serve.jsonl").exists():
        records = read_records(results / "serve.jsonl")
        for mode in {r.params["mode"] for r in records} & {"day", "rising"}:
            draw_serve(
                [r for r in records if r.params["mode"] == mode], str(results / f"serve-{mode}.svg")
            )
    if options.readme:
        update_pages(options.readme, results)
    return 0


def update_pages(readme: str | Path, results: Path, tables: Sequence[OneTable] = TABLES) -> None:
    """Rewrite the tables of README and of docs/ beside it."""
    for page in (Path(readme), *sorted(Path(readme).parent.glob("docs/*.md"))):
        write_text(page, update_tables(page.read_text(encoding="utf-8"), results, tables))


if __name__ == "__main__":
    sys.exit(main())
