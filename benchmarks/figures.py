"""Draw the figures and write the tables of README and docs from the records in results/.

`python -m benchmarks.figures` draws results/*.svg; with `--readme` it also rewrites the tables of
README and docs/, between `<!-- table: NAME -->` and `<!-- end table -->`. No number is typed by
hand.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fetch_tables import fetch_markdown, passes_markdown
from benchmarks.headline import default_markdown, headline_markdown
from benchmarks.model_figure import draw_model, draw_sweep
from benchmarks.model_tables import model_markdown
from benchmarks.operator_figure import draw_operator
from benchmarks.operator_tables import operator_markdown
from benchmarks.serving_report import draw_serve
from benchmarks.training_report import draw_training, training_markdown
from benchmarks.user import user_markdown
from benchmarks.vllm_report import vllm_markdown
from corecontext.demo.report import demo_table
from corecontext.files import write_text
from corecontext.record import Record, read_records

__all__ = [
    "demo_table",
    "draw_model",
    "draw_operator",
    "draw_sweep",
    "fetch_markdown",
    "main",
    "model_markdown",
    "operator_markdown",
    "update_tables",
]


class PageTable(NamedTuple):
    """A table of a page."""

    mark: str
    """Its name in the page's mark."""
    files: str
    """The files of its records in results/, separated by spaces; "?" ends one that may be
    missing."""
    render: Callable[[Sequence[Record]], str]
    where: tuple[str, Any] | None = None
    """The param, and its value, of the records that count; None for all."""


class Figure(NamedTuple):
    """A figure of results/."""

    name: str
    files: str
    """The files of its records in results/, separated by spaces."""
    draw: Callable[[Sequence[Record], str], None]


def _of_presets(records: Sequence[Record]) -> str:
    """Return the tables of presets: exact prompts are a sentence of docs/fetch.md."""
    return user_markdown([record for record in records if record.params["method"] != "exact"])


TABLES: Sequence[PageTable] = (
    PageTable("headline, default", "operator user vllm", default_markdown),
    PageTable("headline", "operator model", headline_markdown),
    PageTable("demo", "demo", demo_table),
    PageTable("demo, whole", "demo_whole", demo_table),
    PageTable("demo, smollm2", "demo_smollm2", demo_table),
    PageTable("operator", "operator", operator_markdown),
    PageTable("fetch", "fetch", fetch_markdown),
    PageTable("fetch, passes", "operator", passes_markdown),
    PageTable("model", "model", model_markdown),
    PageTable("training", "training", training_markdown),
    PageTable("vllm", "vllm", vllm_markdown),
    PageTable("user", "user", _of_presets),
)
FIGURES: Sequence[Figure] = (
    Figure("operator", "operator", draw_operator),
    Figure("model", "model", draw_model),
    Figure("model_sweep", "model", draw_sweep),
    Figure("training", "training", draw_training),
    Figure("serve-day", "serve", lambda records, path: draw_serve(records, path, "day")),
    Figure("serve-rising", "serve", lambda records, path: draw_serve(records, path, "rising")),
)


def _read(results: Path, files: str) -> list[Record] | None:
    """Return the records of all files, or None where a file is missing; one whose name ends in "?"
    may be."""
    paths = [results / f"{name.removesuffix('?')}.jsonl" for name in files.split()]
    there = [path for path in paths if path.exists()]
    if any(
        not name.endswith("?") and path not in there for name, path in zip(files.split(), paths)
    ):
        return None
    return [record for path in there for record in read_records(path)]


def update_tables(text: str, results: Path, tables: Sequence[PageTable] = TABLES) -> str:
    """Return a page with its tables drawn anew; a table without records stays as it is."""
    for table in tables:
        before, mark, rest = text.partition(f"<!-- table: {table.mark} -->\n")
        records = _read(results, table.files) if mark else None
        if records is not None:
            if table.where is not None:
                param, value = table.where
                records = [record for record in records if record.params[param] == value]
            text = before + mark + table.render(records) + rest[rest.index("<!-- end table -->") :]
    return text


def update_pages(readme: str | Path, results: Path, tables: Sequence[PageTable] = TABLES) -> None:
    """Rewrite the tables of README and of docs/ beside it."""
    for page in (Path(readme), *sorted(Path(readme).parent.glob("docs/*.md"))):
        write_text(page, update_tables(page.read_text(encoding="utf-8"), results, tables))


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
    for figure in FIGURES:
        records = _read(results, figure.files)
        if records is not None:
            figure.draw(records, str(results / f"{figure.name}.svg"))
    if options.readme:
        update_pages(options.readme, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
