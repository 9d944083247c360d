"""Make tables of records: group them into rows, and write a cell for each column; as Markdown or on
the terminal.

A row is a list of records with one value of every key, in the order of the file: of time. A table
is declared by its keys and its columns.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Table

from corecontext.record import Record, latest
from corecontext.terminal import console

MOST_COLUMNS = 500
Row = Sequence[Record]


class Column(NamedTuple):
    """A column: its title and the text of a row's cell."""

    title: str
    cell: Callable[[Any], str]
    left: bool = False
    """Text is aligned left, numbers right."""


class Key(NamedTuple):
    """A column by whose values records are grouped and rows sorted."""

    title: str
    value: Callable[[Record], Any]
    show: Callable[[Any], str] = str
    left: bool = False


def key(param: str, title: str, show: Callable[[Any], str] = str) -> Key:
    """Return the key of a param."""
    return Key(title, lambda record: record.params.get(param), show)


def newest(title: str, name: str, show: Callable[[float], str], **params: Any) -> Column:
    """Return the column of a row's newest value of this name and these params."""

    def cell(row: Row) -> str:
        record = latest(row, name, **params)
        return "" if record is None else show(record.value)

    return Column(title, cell)


def mean(title: str, name: str, form: str, scale: float = 1, **params: Any) -> Column:
    """Return the column of the mean over a row's seeds, and from two on their standard deviation:
    of the newest value of each that has this name and these params."""

    def cell(row: Row) -> str:
        by_seed = {r.params["seed"]: scale * r.value for r in row if is_of(r, name, **params)}
        return mean_and_spread(list(by_seed.values()), form)

    return Column(title, cell)


def is_of(record: Record, name: str, **params: Any) -> bool:
    """Whether a record has this name and these params."""
    return record.name == name and all(
        record.params.get(key) == value for key, value in params.items()
    )


def rows_by(keys: Sequence[Key], records: Iterable[Record]) -> list[Row]:
    """Return the records with one value of each key together, sorted by these values."""
    rows: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        rows.setdefault(tuple(key.value(record) for key in keys), []).append(record)
    return [rows[place] for place in sorted(rows)]


def grouped(keys: Sequence[Key], columns: Sequence[Column], records: Iterable[Record]) -> list[str]:
    """Return the lines of a Markdown table of records, a row for each place."""

    def column(key: Key) -> Column:
        return Column(key.title, lambda row: key.show(key.value(row[0])), key.left)

    return markdown([*map(column, keys), *columns], rows_by(keys, records))


def cells(columns: Sequence[Column], rows: Iterable[Any]) -> list[list[str]]:
    """Return the head and the body of a table."""
    body = [[column.cell(row) for column in columns] for row in rows]
    return [[column.title for column in columns], *body]


def markdown(columns: Sequence[Column], rows: Iterable[Any]) -> list[str]:
    """Return the lines of a Markdown table."""
    head, *body = cells(columns, rows)
    rule = "|".join("---" if column.left else "---:" for column in columns)
    return [_line(head), f"|{rule}|", *map(_line, body)]


def _line(texts: Sequence[str]) -> str:
    """Return one line of a Markdown table; an empty cell is one space wide."""
    return "| " + " | ".join(texts) + " |"


def print_page(lines: Iterable[str]) -> None:
    """Print lines of a page on the terminal, the cells of its tables below one another."""
    table: list[list[str]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            table.append([text.strip() for text in line.strip("|").split("|")])
            continue
        if len(table) > 2:
            _print_table(*table)
        table = []
        if line:
            console().print(line.replace("**", ""), soft_wrap=True, markup=False)


def _print_table(head: list[str], rule: list[str], *body: list[str]) -> None:
    """Print a table at its natural width, so that no number is cut off."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for text, line in zip(head, rule):
        table.add_column(text, justify="right" if line.endswith(":") else "left", no_wrap=True)
    for texts in body:
        table.add_row(*texts)
    screen = console()
    limits = screen.options.update(max_width=MOST_COLUMNS)
    screen.width = max(screen.width, Measurement.get(screen, limits, table).maximum)
    screen.print(table, crop=False)


def mean_and_spread(values: Sequence[float], form: str) -> str:
    """Show a mean, and from two values on their standard deviation; "" without any."""
    if not values:
        return ""
    spread = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return form.format(fmean(values)) + spread


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
