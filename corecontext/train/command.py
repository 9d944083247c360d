"""Make the command `train` from the fields of TrainConfig: each is an option."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from corecontext.files import UserError
from corecontext.train.train_config import TrainConfig, field_help, load_recipe

_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD


def train_command() -> Callable[..., None]:
    """Return the function for the command line, with a signature made from the fields."""

    def train(recipe: str | None = None, **options: Any) -> None:
        """Train or fine-tune a model with CCA attention; the same command again continues a run
        that was stopped."""
        from corecontext.files import one_line
        from corecontext.integrations.hf_gguf import local_model

        given = {name: value for name, value in options.items() if value not in (None, [])}
        with one_line():
            if "shape" in given:
                given["shape"] = json.loads(given["shape"])
            if recipe is None:
                config = _default_config(given)
            else:
                config = load_recipe(recipe).replace(**given)
        config = config.replace(model=local_model(config.model))
        from corecontext.train.run import train as run

        result = run(config)
        if not _is_first_rank():
            return
        losses = {"loss": result.losses[-1][1], **result.metrics}
        text = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in losses.items())
        print(f"{result.model}: {result.steps} steps, {text}")

    recipe = typer.Argument(
        help="raw (some KV heads keep every token, and the original model teaches) or paper (its "
        "rule alone); FILE.py:FUNCTION that returns a TrainConfig; or a run's "
        "train_config.json. Default: CCA's settings in the checkpoint, or else raw, as far as "
        "possible."
    )
    texts = field_help()
    annotations: dict[str, Any] = {"recipe": Annotated[str | None, recipe]}
    for setting in fields(TrainConfig):
        annotations[setting.name] = _annotation(setting, " ".join(texts[setting.name].split()))
    train.__annotations__ = annotations
    train.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, _KEYWORD, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    return train


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _default_config(given: dict[str, Any]) -> TrainConfig:
    """Return the settings of a run without a recipe: CCA's in the checkpoint, or the recipe
    `raw`."""
    from corecontext.train.student import best_settings, saved_settings

    saved = saved_settings(TrainConfig().replace(**given), given)

    def fits(names: Collection[str]) -> bool:
        """Return whether the run can have these of the saved settings."""
        with contextlib.suppress(ValueError):
            TrainConfig().replace(**{name: saved[name] for name in names} | given)
            return True
        return False

    try:
        config = TrainConfig().replace(**saved | given)
    except ValueError as error:
        causes = [name for name in saved if name not in given and fits(saved.keys() - {name})]
        if not causes:
            raise
        raise UserError(
            f"{error} '{given['model']}' was adapted with {' and '.join(causes)} of its own: leave "
            "the option out, or begin with a model that was not adapted."
        ) from None
    if saved:
        return config
    best = best_settings(config, given)
    if best and _is_first_rank():
        titles = {
            "raw_heads": "KV heads that keep every token",
            "distil": "the model as it was teaches",
        }
        print(
            f"by default: {', '.join(titles[name] for name in best)}. The paper's rule: "
            "corecontext train paper"
        )
    return config.replace(**best)


def _annotation(setting: Field, text: str) -> Any:
    """Return the option of a field; it is None where not given, because a recipe may give it."""
    default: Any = setting.default
    if setting.default_factory is not MISSING:
        default = setting.default_factory()
    kind: Any = {"int": int, "float": float, "bool": bool}.get(str(setting.type).split()[0], str)
    if str(setting.type).startswith("tuple"):
        kind = list[int] if "int" in str(setting.type) else list[str]
        default = " ".join(map(str, default))
        text += " May be repeated."
    if default not in (None, "", {}, False):
        text += f" Default: {default}."
    return Annotated[kind | None, typer.Option(help=text)]  # type: ignore[valid-type]
