"""Figures and README's tables, drawn from records: no number is ever typed by hand.

`python -m benchmarks.figures` draws results/*.svg; with `--readme` it also rewrites the
tables of README and docs/, which stand between `<!-- table: NAME -->` and `<!-- end table -->`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.model_figure import draw_model, draw_sweep
from benchmarks.model_tables import model_markdown
from benchmarks.operator_figure import draw_operator
from benchmarks.operator_tables import operator_markdown
from benchmarks.serving_figure import draw_serve
from benchmarks.training_figure import draw_training, training_markdown
from corecontext.demo.figure import demo_table, draw_demo
from corecontext.files import write_text
from corecontext.record import Record, read_records

__all__ = [
    "demo_table",
    "draw_demo",
    "draw_model",
    "draw_operator",
    "draw_sweep",
    "main",
    "model_markdown",
    "operator_markdown",
    "update_tables",
]

OneTable = tuple[str, str, Callable[[Sequence[Record]], str]]
"""What stands in the page's mark, the file of its records in results/, and what makes it of
them."""
TABLES: Sequence[OneTable] = (
    ("demo", "demo", demo_table),
    ("operator", "operator", operator_markdown),
    ("model", "model", model_markdown),
    ("training", "training", training_markdown),
)


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=main.__doc__)
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
