"""Write tables from a list of columns, as Markdown or on the terminal; show numbers in units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Table

from corecontext.terminal import console

MOST_COLUMNS = 500


class Column(NamedTuple):
    """A column: its title and the text of a row's cell."""

    title: str
    cell: Callable[[Any], str]
    left: bool = False
    """Text is aligned left, numbers right."""


def cells(columns: Sequence[Column], rows: Iterable[Any]) -> list[list[str]]:
    """Return the head and the body of a table."""
    body = [[column.cell(row) for column in columns] for row in rows]
    return [[column.title for column in columns], *body]


def markdown(columns: Sequence[Column], rows: Iterable[Any]) -> list[str]:
    """Return the lines of a Markdown table."""
    head, *body = cells(columns, rows)
    rule = "|".join("---" if column.left else "---:" for column in columns)
    return [markdown_row(head), f"|{rule}|", *map(markdown_row, body)]


def markdown_row(texts: Sequence[str]) -> str:
    """Return one line of a Markdown table; an empty cell is one space wide."""
    return "| " + " | ".join(texts) + " |"


def print_table(columns: Sequence[Column], rows: Iterable[Any], title: str | None = None) -> None:
    """Print a table on the terminal; nothing where it has no rows."""
    head, *body = cells(columns, rows)
    if not body:
        return
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for column, text in zip(columns, head):
        table.add_column(text, justify="left" if column.left else "right", no_wrap=True)
    for texts in body:
        table.add_row(*texts)
    # At its natural width, also where that is wider than the terminal: no number is cut off.
    screen = console()
    limits = screen.options.update(max_width=MOST_COLUMNS)
    screen.width = max(screen.width, Measurement.get(screen, limits, table).maximum)
    screen.print(table, crop=False)


def optional(show: Callable[[float], str], missing: str = "") -> Callable[[float | None], str]:
    """Return a format that shows None as `missing`."""
    return lambda value: missing if value is None else show(value)


def shown_ms(value: float) -> str:
    """Show milliseconds with three digits, seconds from 1,000 on."""
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


def shown_us(value: float) -> str:
    """Show microseconds with three digits, milliseconds from 1,000 on."""
    return f"{value:.3g} us" if value < 1000 else shown_ms(value / 1e3)


def shown_mib(value: float) -> str:
    """Show bytes as MiB."""
    return f"{value / 2**20:.1f} MiB"


def shown_bytes(value: float) -> str:
    """Show bytes with three digits, as GiB from half a GiB on, else as MiB."""
    if value >= 2**29:
        return f"{value / 2**30:.3g} GiB"
    return f"{value / 2**20:.3g} MiB"


def shown_times(value: float) -> str:
    """Show a ratio."""
    return f"{value:.2f}x"


def shown_percent(value: float) -> str:
    """Show a share."""
    return f"{value:.0%}"


def shown_tokens(length: float) -> str:
    """Show a number of tokens the way people say it: 512, 8K, 128K, 1M."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if length >= size and length % size == 0:
            return f"{length / size:g}{letter}"
    return f"{length:,.0f}"
