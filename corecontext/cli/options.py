"""Options that several commands share, checks of their values, and commands made of them."""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_origin

import typer
from rich.markup import escape

from corecontext.baselines.rivals import NAMES
from corecontext.config import CCAConfig, listed, setting_help
from corecontext.files import UserError
from corecontext.methods import PRESET, PRESET_HELP, field_of

Command = Callable[..., None]
SIZES = ("group_size", "window_size", "sinks", "core_mass")
"""Settings of CCA that every command with them takes; `sinks` is the field `sink_size` of
CCAConfig."""


def unpacked(name: str | None) -> str | None:
    """Return the folder that a GGUF file is unpacked into; other names of models as they are."""
    from corecontext.integrations.hf.gguf_files import local_model

    return name and local_model(name)


MODEL_HELP = "Folder in the Hugging Face format, GGUF file, smollm2, or an identifier on the hub."
Model = Annotated[str, typer.Option(help=MODEL_HELP, callback=unpacked)]
Text = Annotated[str, typer.Argument(help="Text, or - for standard input.")]
Method = Annotated[str, typer.Option(help="cca, or full for the model's own attention.")]
AnyMethod = Annotated[
    str,
    typer.Option(
        help=f"{listed(('cca', 'full', *NAMES))}; settings that it does not have are refused."
    ),
]
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
        "--json", help="Append the measured values to this file, one JSON line each; - prints them."
    ),
]
Tasks = Annotated[list[str], typer.Option(help="perplexity or multidoc_qa; may be repeated.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Folder with the task's files (docs/evaluation.md), or TASK=PATH; may be repeated."
    ),
]


Preset = Annotated[str | None, typer.Option(help=PRESET_HELP, rich_help_panel="Attention")]


@dataclass(frozen=True)
class LoadOptions:
    """Say how a command loads its model, besides its attention."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    untested: Untested = False


@dataclass(frozen=True)
class EvaluationOptions(LoadOptions):
    """Describe the evaluation in `eval` and `compare`, besides methods and tasks."""

    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a window (perplexity); may be repeated.")
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


def with_options(kind: type) -> Callable[[Command], Command]:
    """Let a command take as options those fields of a dataclass that are annotated as options; it
    gets an instance as its argument `options`."""
    parameters = [
        parameter
        for parameter in inspect.signature(kind, eval_str=True).parameters.values()
        if get_origin(parameter.annotation) is Annotated
    ]
    return _taking("options", parameters, kind)


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Let a command take a preset and settings of CCA as options; it gets a dict of those that are
    given as its argument `settings`."""
    annotations = {PRESET: Preset, **{name: setting_option(name) for name in names}}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    return _taking("settings", parameters, given)


def setting_option(name: str) -> Any:
    """Return the annotation of a setting: its type, and an option whose help is the first sentence
    under its field."""
    field = field_of(name)  # "sinks", the field sink_size, gets --sinks and --sink-size
    names = [f"--{setting.replace('_', '-')}" for setting in dict.fromkeys((name, field))]
    default = getattr(CCAConfig, field)
    kind = int if default is None else type(default)
    if kind is bool:
        names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
        default = "yes" if default else "no"
    if default is None:  # fetch_slots: as `CCAConfig.slots_for` says
        default = "twice the groups on a GPU, fewer from 80K tokens on, none elsewhere"
    text = f"{setting_help(field)} Default: the checkpoint's, else {default}."
    option = typer.Option(*names, help=escape(text), rich_help_panel="Attention")
    return Annotated[kind | None, option]  # type: ignore[valid-type]


def _taking(name: str, parameters: list[inspect.Parameter], make: Callable[..., Any]) -> Any:
    """Return a decorator that replaces a command's parameter `name` by these parameters; the
    command gets `make` of their values as `name`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = make(**{parameter.name: given.pop(parameter.name) for parameter in parameters})
            command(**given, **{name: made})

        of_command = inspect.signature(command, eval_str=True).parameters.values()
        all_parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (*of_command, *parameters)
            if parameter.name != name
        ]
        run.__signature__ = inspect.Signature(all_parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def check_least(least: int, **values: int | None) -> None:
    """Raise a UserError unless each option, by its name, is at least `least` or left out."""
    for name, value in values.items():
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise UserError(f"{option} must be at least {least}, got {value}.")


def check_appended(*paths: str | None) -> None:
    """Raise a UserError, before any work is done, for paths that records cannot be appended to, or
    whose files begin with anything but a record; "-" is standard output."""
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
        # An interrupted write may have cut the only record: appending starts a new line.
        is_cut = line.startswith(b'{"name": "') and not line.endswith(b"\n")
        try:
            read_records(path, b"" if is_cut else line)
        except ValueError as error:
            raise UserError(f"{error} Give a new file, or one of records.") from None


def publish(
    path: str | None, show: Callable[[], None], records: Callable[[], Iterable[Any]]
) -> None:
    """Print a table by `show`, and append the records to the file `path` of --json, if one is
    given, even if the reader of standard output has ended (`| head`).

    With path "-" the records alone go to standard output, and the table to standard error.
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
