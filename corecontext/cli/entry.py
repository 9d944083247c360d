"""Run a command line: exit codes, one line for each error, and closed or full outputs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import typer

from corecontext.files import UserError


def application(
    commands: Mapping[str, Callable[..., None]], top: Callable[..., None]
) -> typer.Typer:
    """Make an application of commands by name; `top` documents it and has its own options."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(top)
    for name, command in commands.items():
        app.command(name)(command)
    return app


def run(app: typer.Typer, program: str, argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 2 after one line that explains the mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as for a daemon: discard output
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        command = typer.main.get_command(app)
        code = command.main(args=arguments or ["--help"], prog_name=program, standalone_mode=False)
        if code == 130:  # typer turns Ctrl-C into this exit code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk, or a file that disappeared meanwhile
        name = error.filename or "the output"
        return _fail(f"{name} cannot be read or written: {error.strerror or error}.")
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _fail(error.format_message())  # refused by the parser of the command line
        from corecontext.files import is_out_of_memory

        if is_out_of_memory(error):
            return _fail(
                "out of memory. Use a shorter text or length, --dtype bfloat16, a larger "
                "--group-size or a smaller --window-size."
            )
        raise


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2
