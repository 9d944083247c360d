"""Show tables on standard output and progress on standard error."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 10.0
"""Seconds between lines of progress where there is no terminal: a short job writes none."""

Advance = Callable[[float], None]
"""Function to call with the amount of work just done, in the unit of the total."""


def console() -> Console:
    """Return a console on standard output, 120 columns wide where it is no terminal. It prints text
    as it is: names of data may look like rich's markup."""
    width = None if sys.stdout.isatty() else 120
    # mutant eval: names of data are read as markup
    return Console(highlight=False, markup=False, emoji=False, width=width)


@contextlib.contextmanager
def progress(description: str, total: float) -> Iterator[Advance]:
    """Show the progress of the block: a bar, or lines where there is no terminal. The block gets an
    `Advance`; `total` is the sum of what it is called with."""
    if sys.stderr.isatty():
        text = TextColumn("{task.description}", markup=False)
        times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
        columns = (text, BarColumn(), TaskProgressColumn(), *times)
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield lambda amount: bar.advance(task, amount)
        return

    done = 0.0
    started = printed = time.monotonic()

    def advance(amount: float) -> None:
        nonlocal done, printed
        done += amount
        if time.monotonic() - printed >= LINE_EVERY_S:
            printed = time.monotonic()
            fraction = min(1.0, done / total)
            line = f"{description}: {100 * fraction:.0f} %"
            if fraction > 0:
                left = timedelta(seconds=round((printed - started) * (1 / fraction - 1)))
                line += f", about {left} left"
            print(line, file=sys.stderr, flush=True)

    yield advance
