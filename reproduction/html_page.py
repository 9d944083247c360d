"""Write one self-contained HTML page: sections, tables, images, and a link from each number to its
record."""

import base64
import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.tables import Column, cells
from corecontext.record import Record

DASH = "&ndash;"
STYLE = """:root { color-scheme: light dark; }
body { max-width: 70rem; margin: 0 auto; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums;
  display: block; overflow-x: auto; }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; border-bottom: 1px solid #8884;
  vertical-align: top; }
td a { color: inherit; text-decoration-color: #8888; }
img { max-width: 100%; background: white; }
pre { font-size: .72rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
li:target pre { outline: 2px solid #c60; }"""
SCRIPT = """addEventListener('hashchange', () => {
const at = document.getElementById(location.hash.slice(1));
if (at && at.closest('details')) { at.closest('details').open = true; at.scrollIntoView(); } });"""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>{style}</style>
</head><body><h1>{title}</h1>{sections}<section id="records"><h2>Records</h2>
<details><summary>{count} records, one for each number</summary><ol>{records}</ol></details>
</section><script>{script}</script></body></html>
"""


class Page:
    """Sections, and the records that their numbers link to."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = list(records)
        self.sections: list[str] = []

    def find(self, name: str, **params: Any) -> Record | None:
        """Return the newest record with these params; perplexities are by default of the test
        split."""
        if name in ("quality.perplexity", "quality.gain_kept"):
            params.setdefault("split", "test")
        for record in reversed(self.records):
            if record.name == name and all(
                record.params.get(key) == value for key, value in params.items()
            ):
                return record
        return None

    def find_all(self, name: str, method: str, seeds: Iterable[int], **params: Any) -> list[Record]:
        """Return a method's records over the seeds."""
        records = (self.find(name, stage=f"{method}-{seed}", **params) for seed in seeds)
        return [record for record in records if record is not None]

    def cell(self, record: Record | None, show: Callable[[float], str] | None = None) -> str:
        """Return a number that links to its record; a dash where there is none."""
        if record is None:
            return DASH
        number = next(i for i, listed in enumerate(self.records) if listed is record)
        return f'<a href="#r{number}">{(show or format_of(record))(record.value)}</a>'

    def mean(self, records: Sequence[Record]) -> str:
        """Return the mean of records of one name with their spread; of one, the record."""
        if not records:
            return DASH
        listed = ", ".join(self.cell(record) for record in records)
        if len(records) == 1:
            return listed
        show = format_of(records[0])
        values = [record.value for record in records]
        return f"{show(fmean(values))} &plusmn; {show(stdev(values))} ({listed})"

    def section(self, anchor: str, title: str, *paragraphs: str) -> None:
        """Add a section."""
        head = f'<section id="{anchor}"><h2>{html.escape(title)}</h2>'
        self.sections.append(f"{head}{''.join(paragraphs)}</section>")

    def render(self, title: str) -> str:
        """Return the whole page."""
        records = "".join(
            f'<li id="r{i}" value="{i}"><pre>{html.escape(record.to_json())}</pre></li>'
            for i, record in enumerate(self.records)
        )
        return PAGE.format(
            title=html.escape(title),
            style=STYLE,
            sections="".join(self.sections),
            count=len(self.records),
            records=records,
            script=SCRIPT,
        )


def table(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """Return a table; cells are HTML, titles are text."""
    head, *body = cells(columns, rows)
    titles = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>" for texts in body
    )
    return f"<table><tr>{titles}</tr>{lines}</table>"


def image(path: Path | None, text: str) -> str:
    """Return a PNG inside the page, or a note that it is missing."""
    if path is None:
        return "<p>Not measured yet.</p>"
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'


def format_of(record: Record) -> Callable[[float], str]:
    """Return the format of a record's value: perplexities, or shares."""
    return "{:.3f}".format if record.name == "quality.perplexity" else percent


def percent(x: float) -> str:
    """Show a share with one decimal."""
    return f"{100 * x:.1f} %"


def milliseconds(seconds: float) -> str:
    """Show seconds as milliseconds."""
    return f"{1000 * seconds:.1f}"


def mebibytes(num_bytes: float) -> str:
    """Show bytes as MiB."""
    return f"{num_bytes / 2**20:.2f}"
