"""Make a benchmark's command line from its settings, so that each option is written once.

A settings class is a frozen dataclass; the string under a field is the help text of its option.
"""

import ast
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, TypeVar

import typer

from corecontext.cli.options import Force, Json
from corecontext.config import check_choice, check_int
from corecontext.files import check_output
from corecontext.record import Record

DTYPES = ("float32", "bfloat16", "float16")
Settings = TypeVar("Settings")


def option(default: Any, *, gpu: Any = None, name: str = "") -> Any:
    """Declare a field with an option.

    Args:
        gpu: Default on a GPU, where it is another.
        name: The option without dashes; default the field's name.
    """
    return field(default=default, metadata={"gpu": gpu, "name": name})


def for_device(settings: type[Settings], device: str, **given: Any) -> Settings:
    """Make settings with the defaults of a device, as far as they are not given."""
    defaults: dict[str, Any] = {"device": device}
    if device.startswith("cuda"):
        for setting in fields(settings):  # type: ignore[arg-type]
            if setting.metadata.get("gpu") is not None:
                defaults[setting.name] = setting.metadata["gpu"]
    return settings(**{**defaults, **given})


def check_positive(**values: int | Sequence[int] | None) -> None:
    """Raise ValueError unless each value, or each of its items, is an integer of at least 1."""
    for name, value in values.items():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if item is not None:
                check_int(name, item, 1)


def check_choices(name: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ValueError unless each word is one of those allowed."""
    for word in given:
        check_choice(name, word, tuple(allowed))


Plot = Annotated[
    str | None,
    typer.Option("--plot", help="Draw a figure (.png, .svg or .pdf); needs the extra 'plot'."),
]


@dataclass(frozen=True)
class Output:
    """The files that a command writes."""

    json: str | None
    plot: str | None

    def check(self, force: bool) -> None:
        """Raise UserError before anything is measured unless the files can be written."""
        check_output(self.plot, force)
        check_output(self.json, force=True)  # appended to
        if self.plot is not None:
            from benchmarks.drawing import check_plot

            check_plot(self.plot)

    def keep(self, records: Sequence[Record]) -> None:
        """Append records at once: a long run that is cut short keeps its results."""
        if self.json is not None:
            from corecontext.record import append_records

            append_records(self.json, records)

    def draw(self, draw: Callable[[Sequence[Record], str], None], records: list[Record]) -> None:
        """Draw the figure, if one is asked for."""
        if self.plot is not None:
            draw(records, self.plot)


def make_command(
    settings: type, run: Callable[[dict[str, Any], Output], None]
) -> Callable[..., None]:
    """Make the function that the command line calls: every field is an option.

    Args:
        run: Gets the options that were given, by field, and the output; its docstring is the help.
    """

    def command(json: str | None, plot: str | None, force: bool, **options: Any) -> None:
        output = Output(json, plot)
        output.check(force)
        run({name: _plain(value) for name, value in options.items() if _is_given(value)}, output)

    texts = field_help(settings)
    hints = typing.get_type_hints(settings)
    parameters = {
        setting.name: _annotation(setting, hints[setting.name], texts[setting.name])
        for setting in fields(settings)
    }
    parameters |= {"json": Json, "plot": Plot, "force": Force}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if name == "force" else None,
                annotation=annotation,
            )
            for name, annotation in parameters.items()
        ]
    )
    command.__annotations__ = parameters
    command.__doc__ = run.__doc__
    return command


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value != []


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def field_help(settings: type) -> dict[str, str]:
    """Return the string under each field of a dataclass, on one line."""
    source = textwrap.dedent(inspect.getsource(settings))
    tree: Any = ast.parse(source)
    body: list[Any] = tree.body[0].body
    return {
        statement.target.id: " ".join(text.value.value.split())  # type: ignore[union-attr, attr-defined]
        for statement, text in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _annotation(setting: Field[Any], hint: Any, text: str) -> Any:
    """Return a typer option; None, not the field's default, stands for an option not given."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is not None:
        hint = list[typing.get_args(hint)[0]]  # type: ignore[misc]
        text += " May be repeated."
    if "Default:" not in text:
        text += _default_text(setting)
    name = (setting.metadata.get("name") or setting.name).replace("_", "-")
    return Annotated[hint | None, typer.Option(f"--{name}", help=text)]


def _default_text(setting: Field[Any]) -> str:
    if setting.default is MISSING or setting.default in (None, (), False):
        return ""
    text = f" Default: {_shown(setting.default)}"
    if setting.metadata.get("gpu") is not None:
        text += f"; on a GPU {_shown(setting.metadata['gpu'])}"
    return f"{text}."


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
