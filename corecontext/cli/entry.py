"""Run a command line: exit codes, one line for each error, and closed or full outputs."""

import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from corecontext.config import GONE_OPTIONS, MOVED_OPTIONS, REMOVED
from corecontext.files import UserError, first_line


def application(
    commands: Mapping[str, Callable[..., None]], top: Callable[..., None]
) -> typer.Typer:
    """Make an application of commands by name. The docstring of `top` is its help, and the
    parameters of `top` are the options before a command, as --version."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(top)
    for name, command in commands.items():
        app.command(name)(command)
    return app


def _with_home(argument: str) -> str:
    """Expand the ~ of an argument `--option=~/path`, which shells leave as it is."""
    is_path = re.fullmatch(r"--[\w-]+=~/\S*", argument)
    return argument.replace("~", os.path.expanduser("~"), 1) if is_path else argument


def run(app: typer.Typer, program: str, argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    It is 0, or 2 after one line that explains a mistake of the user; 130 after Ctrl-C and 141 after
    a closed pipe, as of programs that these signals end (128 and the signal's number).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as for a daemon: discard output
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        command = typer.main.get_command(app)
        for subcommand in getattr(command, "commands", {}).values():
            _state_defaults(subcommand)
        arguments = list(map(_with_home, arguments)) or ["--help"]
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = command.main(args=arguments, prog_name=program, standalone_mode=False)
        if code == 130:  # typer turns Ctrl-C into this exit code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _fail(str(error))
    except NotImplementedError as error:  # settings that an operator or a cache does not have
        return _fail(first_line(error))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk, or a file that disappeared meanwhile
        name, reason = error.filename or "the output", error.strerror or error
        if isinstance(error, shutil.Error):  # (source, target, reason) of each file of a folder
            _, name, reason = error.args[0][0]
        return _fail(f"{name} cannot be read or written: {reason}.")
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _fail(_gone(error) or error.format_message())  # refused by the parser
        from corecontext.files import is_out_of_memory

        if is_out_of_memory(error):
            return _fail(
                "out of memory. Use a shorter text or length, --dtype bfloat16, a larger "
                "--group-size or a smaller --window-size."
            )
        raise


def _gone(error: Any) -> str:
    """Return the message for an option of an earlier version; "" for one that never was."""
    option = getattr(error, "option_name", "")
    if option in MOVED_OPTIONS:
        return (
            f"{option}, {MOVED_OPTIONS[option]}, has moved to the laboratory with its method. In a "
            "clone of the repository, run `python -m reproduction compare` with the options of "
            "your command."
        )
    if option in GONE_OPTIONS:
        return f"{option} was removed: {GONE_OPTIONS[option]}."
    for row in REMOVED:
        if option == f"--{row.field.replace('_', '-')}":
            return f"{option}, {row.what}, was removed in version {row.since}. {row.instead}"
    return ""


def _warn(message: Warning | str, *_: Any, **place: Any) -> None:
    """Print a warning without its file and line, which say nothing to a user."""
    print(f"warning: {message}", file=sys.stderr)


def _state_defaults(command: Any) -> None:
    """End the help of every option with its default, unless the help has "Default:" already."""
    for option in command.params:
        default = option.default
        if isinstance(default, (list, tuple)):
            default = ", ".join(map(str, default))
        option.show_default = False
        is_stated = "Default:" in (getattr(option, "help", None) or "Default:")
        if not is_stated and default not in (None, False, ""):
            option.help = f"{option.help} Default: {default}."


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2
