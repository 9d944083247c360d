"""What the user sees: tables on standard output; progress on standard error, a bar or now and then
a line."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 10.0  # in a log file a short job says nothing, a long one shows that it lives

Advance = Callable[[float], None]


def console() -> Console:
    """Standard output; wide enough for every table where it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@contextlib.contextmanager
def progress(description: str, total: float) -> Iterator[Advance]:
    """Show a piece of work while it lasts; the block gets a function to call with the amount just
    done."""
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield lambda amount: bar.advance(task, amount)
        return

    done, spoken = 0.0, time.monotonic()

    def advance(amount: float) -> None:
        nonlocal done, spoken
        done += amount
        if time.monotonic() - spoken >= LINE_EVERY_S:
            spoken = time.monotonic()
            print(
                f"{description}: {min(100, round(100 * done / total))} %",
                file=sys.stderr,
                flush=True,
            )

    yield advance
