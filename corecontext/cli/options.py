"""Options that several commands share, checks of their values, and commands made of them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from corecontext.baselines.rivals import offered, takers
from corecontext.config import (
    DEFAULT_GROUP_SIZE,
    DEFAULT_SINK_SIZE,
    DEFAULT_WINDOW_SIZE,
    FETCH_INDICES,
    PREFILLS,
    CCAConfig,
    listed,
)
from corecontext.files import UserError


def unpacked(name: str | None) -> str | None:
    """Return the folder of a model that is a GGUF file; other names as they are."""
    from corecontext.integrations.hf.gguf_files import local_model

    return name and local_model(name)


MODEL_HELP = "Folder in the Hugging Face format, GGUF file, smollm2, or an identifier on the hub."
Model = Annotated[str, typer.Option(help=MODEL_HELP, callback=unpacked)]
Text = Annotated[str, typer.Argument(help="Text, or - for standard input.")]
GroupSize = Annotated[
    int | None,
    typer.Option(
        help=f"Tokens per core token, g. Default: the checkpoint's, else {DEFAULT_GROUP_SIZE}."
    ),
]
WindowSize = Annotated[
    int | None,
    typer.Option(
        help="Nearest tokens kept as they are, s. Default: the checkpoint's, else "
        f"{DEFAULT_WINDOW_SIZE}."
    ),
]
Sinks = Annotated[
    int | None,
    typer.Option(
        "--sinks",
        "--sink-size",
        help=f"First tokens that stay uncompressed: {listed(('cca', *takers('sinks')))}. Under cca "
        f"whole groups. Default: the checkpoint's, else {DEFAULT_SINK_SIZE}; a rival's own.",
    ),
]
CoreMass = Annotated[
    bool | None,
    typer.Option(
        "--core-mass/--no-core-mass",
        help="Add the entropy of their weights to core tokens' scores (cca). Default: the "
        "checkpoint's, else yes.",
    ),
]
CacheDtype = Annotated[
    str | None,
    typer.Option(
        help="Cached keys and values: auto, or 8 bits as int8 or fp8. "
        "Default: the checkpoint's, else auto."
    ),
]
FetchGroups = Annotated[
    int | None,
    typer.Option(
        help="Groups whose raw tokens each query sees (cca). Default: the checkpoint's, else 0."
    ),
]
FetchIndex = Annotated[
    str | None,
    typer.Option(
        help=f"Index that chooses them: {listed(FETCH_INDICES)}. Default: the checkpoint's, else "
        f"{CCAConfig.fetch_index}."
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="Where a cache keeps raw tokens for fetch: device or host. Default: the checkpoint's, "
        "else device."
    ),
]
FetchSlots = Annotated[
    int | None,
    typer.Option(
        help="Slots of recently fetched groups on the device, with --store host. Default: the "
        "checkpoint's, else 0: steps read host memory."
    ),
]
Prefill = Annotated[
    str | None,
    typer.Option(
        help=f"Attention by which a prompt is read (cca): {listed(PREFILLS)}. Default: the "
        "checkpoint's, else auto, as decoding."
    ),
]
Method = Annotated[str, typer.Option(help="cca, or full for the model's own attention.")]
AnyMethod = Annotated[str, typer.Option(help=f"{listed(('cca', 'full', *offered('eval')))}.")]
ChunkSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a prompt read at once; bounds the memory. Default: by the free memory."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of random choices.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Untested = Annotated[
    bool,
    typer.Option(
        "--untested", help="Accept an architecture that no test has, after a check on the model."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        help="Append the measured values to this file, one JSON line each; - prints them.",
    ),
]
Plot = Annotated[
    str | None,
    typer.Option("--plot", help="Draw a figure (.png, .svg or .pdf); needs the extra 'plot'."),
]
Tasks = Annotated[
    list[str],
    typer.Option(help="perplexity or multidoc_qa; may be repeated."),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Folder with the task's files (docs/evaluation.md), or TASK=PATH; may be repeated."
    ),
]


@dataclass(frozen=True)
class SizeOptions:
    """How a command loads its model under CCA: arguments of `corecontext.loading.load`."""

    group_size: GroupSize = None
    window_size: WindowSize = None
    sinks: Sinks = None
    core_mass: CoreMass = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    untested: Untested = False


@dataclass(frozen=True)
class LoadOptions(SizeOptions):
    """How a command loads its model under any method."""

    method: AnyMethod = "cca"
    cache_dtype: CacheDtype = None
    fetch_groups: FetchGroups = None
    fetch_index: FetchIndex = None
    store: Store = None
    fetch_slots: FetchSlots = None
    prefill: Prefill = None


@dataclass(frozen=True)
class EvaluationOptions(SizeOptions):
    """Describe the evaluation in `eval` and `compare` beside methods and tasks."""

    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a window (perplexity); may be repeated."),
    ] = None
    documents: Annotated[
        list[int] | None, typer.Option(help="Passages (multidoc_qa); may be repeated. Default: 20.")
    ] = None
    subtask: Annotated[
        list[str] | None,
        typer.Option(help="Subtask to run, or TASK:SUBTASK; may be repeated. Default: all."),
    ] = None
    limit: Annotated[
        int | None, typer.Option(help="Most questions of each subtask. Default: all.")
    ] = None
    positions: Annotated[int, typer.Option(help="Places of the right passage (multidoc_qa).")] = 5
    seed: Seed = 42
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer. Default: the task's own limit.")
    ] = None
    fetch_groups: FetchGroups = None
    fetch_index: FetchIndex = None
    prefill: Prefill = None
    num_groups: Annotated[
        int | None, typer.Option(help="Constant number of core tokens; replaces --group-size.")
    ] = None
    chunk_size: ChunkSize = None
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Ask questions as a user's message in the model's chat template. Default: where "
            "its tokenizer has one.",
        ),
    ] = None
    results: Annotated[
        str | None,
        typer.Option(
            help="Append each item to this file as soon as it is done; finished items are not run "
            "again."
        ),
    ] = None
    json: Json = None


def with_options(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take every field of a dataclass as an option; it gets them as `options`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = [field.name for field in fields(kind)]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = kind(**{name: given.pop(name) for name in names})
            command(**given, options=options)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for function in (command, kind)
            for parameter in inspect.signature(function, eval_str=True).parameters.values()
            if parameter.name != "options"
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def check_least(least: int, **values: int | None) -> None:
    """Raise a UserError unless each option, by its name, is at least `least` or left out."""
    for name, value in values.items():
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise UserError(f"{option} must be at least {least}, got {value}.")


def check_appended(*paths: str | None) -> None:
    """Raise a UserError, before any work is done, for files that records cannot be appended to, or
    that hold anything else."""
    from corecontext.files import check_output
    from corecontext.record import read_records

    for path in paths:
        if path is None or path == "-":
            continue
        check_output(path, force=True)
        if not os.path.exists(path):
            continue
        with open(path, "rb") as file:
            line = file.readline()
        is_cut = line.startswith(b'{"name": "') and not line.endswith(b"\n")
        try:
            read_records(path, b"" if is_cut else line)
        except ValueError as error:
            raise UserError(f"{error} Give a new file, or one of records.") from None


def publish(
    path: str | None, show: Callable[[], None], records: Callable[[], Iterable[Any]]
) -> None:
    """Print a table, and append the records to the file of --json, where one is given, even where
    the table's reader has ended.

    With "-" the records alone go to standard output, and the table to standard error.
    """
    from corecontext.record import append_records

    if path == "-":
        with contextlib.redirect_stdout(sys.stderr):
            show()
        for record in records():
            print(record.to_json())
        return
    try:
        show()
    finally:
        if path is not None:
            append_records(path, records())


def check_drawn(path: str | None, force: bool) -> None:
    """Raise a UserError, before any work is done, for a figure that cannot be drawn."""
    if path is None:
        return
    from corecontext.drawing import check_plot
    from corecontext.files import check_output

    check_output(path, force)
    check_plot(path)
