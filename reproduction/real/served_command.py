"""The command line of the questions to a pretrained model behind `vllm serve`."""

import shlex
from typing import Annotated

import typer

from corecontext.cli.options import MODEL_HELP, Seed
from corecontext.config import listed
from corecontext.files import UserError

METHODS = ("full", "device", "default")


def served(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    data: Annotated[str, typer.Option(help="Folder with haystack_essays (.jsonl, .xz).")] = "",
    method: Annotated[
        list[str],
        typer.Option(help=f"{listed(METHODS)}, a preset of fetch; may be repeated."),
    ] = list(METHODS),
    needles: Annotated[int, typer.Option(help="Needles of each length.")] = 25,
    needle_length: Annotated[
        list[int], typer.Option(help="Tokens of a needle's prompt; may be repeated.")
    ] = [7900],
    lists: Annotated[int, typer.Option(help="Lists of values to be given back.")] = 0,
    options: Annotated[str, typer.Option(help="More options of `vllm serve`, in quotes.")] = "",
    seed: Seed = 0,
    output: Annotated[str, typer.Option(help="File that records are appended to.")] = (
        "results/vllm.jsonl"
    ),
) -> None:
    """Needles and lists asked by HTTP from `vllm serve` (docs/vllm.md)."""
    from corecontext.cli.options import check_appended, check_least
    from reproduction.real.served import ServedQuestions

    check_appended(output)
    check_least(0, needles=needles, lists=lists)
    for name in method:
        if name not in METHODS:
            raise UserError(f"method must be {listed(METHODS)}, got {name!r}.")
    if not data:
        raise UserError("data must be given, got none. Use --data FOLDER.")
    if not needles and not lists:
        raise UserError("needles and lists must not both be 0. Use --needles N.")
    words = shlex.split(options)
    ServedQuestions(model, data, output, needles, needle_length, lists, words, seed).measure(method)
