"""The command line: one table of commands; options.py has shared options, whose help is that of
the settings' fields."""

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from corecontext.cli.entry import application, run
from corecontext.cli.explore import demo, generate, info, perplexity
from corecontext.cli.models import convert, serve
from corecontext.cli.quality import compare, evaluate, inspect
from corecontext.files import UserError
from corecontext.train.command import train_command

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "generate": generate,
    "serve": serve,
    "train": train_command(),
    "convert": convert,
    "perplexity": perplexity,
    "eval": evaluate,
    "compare": compare,
    "inspect": inspect,
    "info": info,
}
MOVED = {"bench": "benchmarks", "reproduce": "reproduction", "layers": "reproduction layers"}
"""Commands that became programs of a clone, with their modules; named for one release."""


def _version(wanted: bool) -> None:
    """Print the version and exit if --version is given."""
    if wanted:
        from corecontext import __version__

        print(f"corecontext {__version__}")
        raise typer.Exit()


def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Core Context Aware attention for long-context language models."""


def _moved(ctx: typer.Context) -> None:
    """Refuse a command of `MOVED`; the error has the command of a clone with the same options."""
    command = " ".join(["python -m", MOVED[ctx.info_name or ""], *ctx.args])
    raise UserError(
        f"`corecontext {ctx.info_name}` has moved out of the package. In a clone of the "
        f"repository, run: {command}"
    )


def build() -> typer.Typer:
    """Make the application of the tables above."""
    app = application(COMMANDS, _top)
    ignored = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name in MOVED:
        app.command(name, hidden=True, context_settings=ignored)(_moved)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    return run(build(), "corecontext", argv)
