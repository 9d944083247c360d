"""The command `train`: every field of TrainConfig is an option, so none is written down twice."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Optional

import typer

from corecontext.train.config import TrainConfig, field_help, load_recipe


def train_command() -> Callable[..., None]:
    """The function that the command line calls, with a signature made from the fields."""
    def train(recipe: str | None = None, **options: Any) -> None:
        """Train or fine-tune a model with CCA attention; the same command again continues a run that was stopped."""
        from corecontext.loading import one_line

        given = {name: value for name, value in options.items() if value not in (None, [])}
        with one_line():
            if "shape" in given:
                given["shape"] = json.loads(given["shape"])
            if recipe is None:
                from corecontext.train.model import held_settings

                given = held_settings(TrainConfig().replace(**given), given) | given
            config = (TrainConfig() if recipe is None else load_recipe(recipe)).replace(**given)
        from corecontext.train.run import train as run

        result = run(config)
        losses = {"loss": result.losses[-1][1], **{k: v for k, v in result.metrics.items() if k.startswith("eval_")}}
        if int(os.environ.get("RANK", "0")):  # torchrun's others
            return
        print(f"{result.model}: {result.steps} steps, " +
              ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in losses.items()))

    texts = {name: " ".join(text.split()) for name, text in field_help().items()}
    recipe = typer.Argument(help="FILE.py:FUNCTION that returns a TrainConfig, or a run's train_config.json.")
    parameters = [inspect.Parameter("recipe", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None,
                                    annotation=Annotated[Optional[str], recipe])]
    for one in fields(TrainConfig):
        parameters.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=None,
                                            annotation=_annotation(one, texts[one.name])))
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {one.name: one.annotation for one in parameters}
    return train


def _annotation(one: Field, text: str) -> Any:
    """An option for a field; None, not its default, stands for what was not given, which a recipe may give."""
    default: Any = one.default_factory() if one.default_factory is not MISSING else one.default
    if str(one.type).startswith("tuple"):
        kind: Any = list[int] if "int" in str(one.type) else list[str]
        default, text = " ".join(map(str, default)), f"{text} May be repeated."
    else:
        kind = {"int": int, "float": float, "bool": bool}.get(str(one.type).split(" ")[0], str)
    shown = "" if default in (None, "", {}, False) else f" Default: {default}."
    return Annotated[Optional[kind], typer.Option(help=text + shown)]  # type: ignore[valid-type]
