"""Measure published rows that have no record yet, in the order of their importance, until a time
limit."""

import gc
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from corecontext.files import UserError

LimitMinutes = Annotated[
    float | None, typer.Option(help="With --published: begin no row that is not done by then.")
]
ListRows = Annotated[
    bool, typer.Option("--list", help="With --published: only list these rows, with their times.")
]
Only = Annotated[
    str, typer.Option(help="With --published: part of a row's command; leave out other rows.")
]
LIMITS = ("limit_minutes", "list_rows", "only")
"""Parameters that need --published."""


class Pending(NamedTuple):
    """A row without a record."""

    command: str
    """The command that measures it alone."""
    seconds: Callable[[], float]
    """Estimates its time on one H200, from now on."""
    measure: Callable[[], None]
    """Measures it and appends its records."""


def options_of(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the options of settings that are not the defaults. An option has its setting's name;
    the values of a tuple, whose name is a plural, are given one by one."""
    options = []
    for name, value in settings.items():
        if value == defaults[name]:
            continue
        is_tuple = isinstance(value, tuple)
        option = f"--{(name.removesuffix('s') if is_tuple else name).replace('_', '-')}"
        if value is True:
            options.append(option)
        else:
            options += [
                text for each in (value if is_tuple else [value]) for text in (option, str(each))
            ]
    return options


def command_of(program: str, model: str, options: Sequence[str]) -> str:
    """Return the command that measures a row of a model alone."""
    start = ["python", "-m", "reproduction", program, "--model", model, "--data", "FOLDER"]
    return shlex.join([*start, *options])


def with_text(pending: Sequence[Pending], text: str) -> list[Pending]:
    """Return the rows whose command contains a text.

    Raises:
        UserError: rows are missing, but none of them has it.
    """
    chosen = [row for row in pending if text in row.command]
    if pending and not chosen:
        raise UserError(
            f"only must be part of a missing row's command, got {text!r}. --list prints them."
        )
    return chosen


def list_pending(pending: Sequence[Pending]) -> None:
    """Print rows with their estimated times."""
    total = 0.0
    for row in pending:
        seconds = row.seconds()
        total += seconds
        print(f"{seconds:5.0f} s  {row.command}")
    # Rows that share a trained model train it once.
    print(f"{len(pending)} rows are missing: at most about {total / 60:.0f} minutes on one H200")


def measure_pending(pending: Sequence[Pending], limit_minutes: float | None) -> None:
    """Measure rows in order. A row whose estimate does not fit in the rest of the time is left for
    another run, a row that fails is reported, and the next ones are measured.

    Raises:
        UserError: rows have failed.
    """
    start = time.monotonic()
    left = []
    failed = []
    for row in pending:
        spent = time.monotonic() - start
        if limit_minutes is not None and spent + row.seconds() > 60 * limit_minutes:
            left.append(row)
            continue
        print(f"after {spent:.0f} s: {row.command}", flush=True)
        try:
            row.measure()
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{row.command}: {error}")
        gc.collect()  # models of a failed row
    if left:
        print(f"{len(left)} rows are left, the first: {left[0].command}", file=sys.stderr)
    if failed:
        raise UserError(f"{len(failed)} rows failed, the first: {failed[0]}")


def check_options(context: typer.Context, beside: Collection[str]) -> None:
    """Refuse options on the command line that rows of --published settle, or that need it.

    Args:
        beside: Names of parameters that may be given beside --published.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    if "published" not in given:
        if given & set(LIMITS):
            raise UserError(
                "limit-minutes, list and only must be given with published, got no such option. "
                "Use --published."
            )
        return
    settled = sorted(given - {"published", *LIMITS, *beside})
    if settled:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in settled)
        raise UserError(
            f"published must be given without the settings of its rows, got {options}. Remove them."
        )
