"""The command `train`: every field of TrainConfig is an option, so none is written down twice."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from corecontext.files import UserError
from corecontext.train.train_config import TrainConfig, field_help, load_recipe


def train_command() -> Callable[..., None]:
    """The function that the command line calls, with a signature made from the fields."""

    def train(recipe: str | None = None, **options: Any) -> None:
        """Train or fine-tune a model with CCA attention; the same command again continues a run
        that was stopped."""
        from corecontext.loading import one_line

        given = {name: value for name, value in options.items() if value not in (None, [])}
        with one_line():
            if "shape" in given:
                given["shape"] = json.loads(given["shape"])
            config = (
                load_recipe(recipe).replace(**given) if recipe is not None else _by_default(given)
            )
        from corecontext.train.run import train as run

        result = run(config)
        losses = {
            "loss": result.losses[-1][1],
            **{k: v for k, v in result.metrics.items() if k.startswith("eval_")},
        }
        if int(os.environ.get("RANK", "0")):  # torchrun's others
            return
        print(
            f"{result.model}: {result.steps} steps, "
            + ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in losses.items())
        )

    texts = {name: " ".join(text.split()) for name, text in field_help().items()}
    recipe = typer.Argument(
        help="raw (some KV heads keep every token, and the model as it was teaches) or paper (its "
        "rule alone); FILE.py:FUNCTION that returns a TrainConfig; or a run's "
        "train_config.json. Default: what the checkpoint says of CCA, or else raw, as far as "
        "a run can have it."
    )
    parameters = [
        inspect.Parameter(
            "recipe",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[str | None, recipe],
        )
    ]
    for one in fields(TrainConfig):
        parameters.append(
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_annotation(one, texts[one.name]),
            )
        )
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {one.name: one.annotation for one in parameters}
    return train


def _by_default(given: dict[str, Any]) -> TrainConfig:
    """What a run has where no recipe is named: the checkpoint's own settings of the attention, or
    the recipe `raw`."""
    from corecontext.train.student import best_settings, held_settings

    held = held_settings(TrainConfig().replace(**given), given)
    try:
        config = TrainConfig().replace(**held | given)
    except ValueError as error:
        own = [name for name in held if name not in given and name in str(error)]
        if not own:
            raise
        raise UserError(
            f"{error} '{given['model']}' was adapted with {' and '.join(own)} of its own: leave the option "
            "out, or begin with a model that was not adapted."
        ) from None
    best = {} if held else best_settings(config, given)
    if best and not int(os.environ.get("RANK", "0")):
        told = {
            "raw_heads": "KV heads that keep every token",
            "distil": "the model as it was teaches",
        }
        print(
            f"by default: {', '.join(told[name] for name in best)}. The paper's rule: corecontext train paper"
        )
    return config.replace(**best)


def _annotation(one: Field, text: str) -> Any:
    """An option for a field; None, not its default, stands for what was not given, which a recipe
    may give."""
    default: Any = one.default_factory() if one.default_factory is not MISSING else one.default
    if str(one.type).startswith("tuple"):
        kind: Any = list[int] if "int" in str(one.type) else list[str]
        default, text = " ".join(map(str, default)), f"{text} May be repeated."
    else:
        kind = {"int": int, "float": float, "bool": bool}.get(str(one.type).split(" ")[0], str)
    shown = "" if default in (None, "", {}, False) else f" Default: {default}."
    return Annotated[kind | None, typer.Option(help=text + shown)]  # type: ignore[valid-type]
