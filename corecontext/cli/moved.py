"""Point to the programs that commands outside of the package have become, for one release."""

from __future__ import annotations

import typer

from corecontext.files import UserError

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(ctx: typer.Context) -> None:
    """Moved to `python -m benchmarks`."""
    raise _moved("bench", "benchmarks", ctx.args)


def reproduce(ctx: typer.Context) -> None:
    """Moved to `python -m reproduction`."""
    raise _moved("reproduce", "reproduction", ctx.args)


def _moved(old: str, module: str, arguments: list[str]) -> UserError:
    command = " ".join(["python -m", module, *arguments])
    return UserError(
        f"`corecontext {old}` has moved out of the package. In a clone of the repository, run: "
        f"{command}"
    )
