"""The command line: one table of commands, whose functions lie in the files beside this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from corecontext.cli.bench import bench_model, bench_operator, bench_serve, bench_train
from corecontext.cli.evaluate import compare, evaluate, inspect, layers, reproduce
from corecontext.cli.models import convert, serve
from corecontext.cli.text import demo, generate, info, perplexity
from corecontext.text import UserError
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
    "layers": layers,
    "reproduce": reproduce,
    "info": info,
}
BENCHES: dict[str, Callable[..., None]] = {
    "operator": bench_operator,
    "model": bench_model,
    "train": bench_train,
    "serve": bench_serve,
}


def _version(wanted: bool) -> None:
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


def build() -> typer.Typer:
    """The application made from the table above."""
    options: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}
    app, bench = typer.Typer(**options), typer.Typer(help="Measure on this machine.", **options)
    app.callback()(_top)
    bench.callback()(lambda: None)
    for name, command in COMMANDS.items():
        app.command(name)(command)
    for name, command in BENCHES.items():
        bench.command(name)(command)
    app.add_typer(bench, name="bench")
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or 2 after printing one line that says what to put right."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us; what is printed goes nowhere
            setattr(sys, name, open(os.devnull, "w"))
    try:
        command = typer.main.get_command(build())
        code = command.main(
            args=arguments or ["--help"], prog_name="corecontext", standalone_mode=False
        )
        if code == 130:  # typer makes an exit of Ctrl-C itself
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a disk that filled up, a file that was taken away, meanwhile
        return _fail(
            f"{error.filename or 'the output'} cannot be read or written: {error.strerror or error}."
        )
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(
            error, "exit_code"
        ):  # what the command line's parser refuses
            return _fail(error.format_message())
        from corecontext.loading import is_out_of_memory

        if is_out_of_memory(error):
            return _fail(
                "out of memory. Use a shorter text or length, --dtype bfloat16, a larger --group-size or a "
                "smaller --window-size."
            )
        raise


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2
