"""Make the command `train` from the fields of TrainConfig: each is an option."""

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer
from rich.markup import escape

from corecontext.config import PRESETS, REMOVED, CCAConfig, check_choice, field_help, setting_help
from corecontext.files import UserError
from corecontext.methods import PRESET, PRESET_HELP
from corecontext.train.train_config import (
    DEFAULT_RECIPE,
    METHODS,
    RECIPES,
    SCHEDULE,
    TrainConfig,
    load_recipe,
)

_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PANELS = {
    "model": "Run",
    "method": "Attention",
    "shape": "Model",
    "text_field": "Data",
    "steps": "Optimization",
    "precision": "Speed and memory",
    "eval_every": "Logs and checkpoints",
    "seed": "Reproducibility",
}
"""Groups of options in the help, by the first field of each."""
_NAMES = {"sink_size": ("--sinks", "--sink-size"), "precision": ("--dtype", "--precision")}
"""Names of options that are not called as their fields."""
_SPLIT_OPTIONS = {"batch_size", "accumulation", "checkpointing"}
"""Options that split a step's rows by hand."""


def train_command() -> Callable[..., None]:
    """Return the function for the command line, with a signature made from the fields."""

    def train(recipe: str | None = None, **options: Any) -> None:
        """Train or fine-tune a model with CCA attention; the same command again continues a run
        that was stopped."""
        from corecontext.files import one_line
        from corecontext.integrations.hf.gguf_files import local_model

        # Options that were given override the recipe, or the defaults for this model.
        given = {name: value for name, value in options.items() if value not in (None, [])}
        with one_line():
            if "shape" in given:
                given["shape"] = _parsed("shape", given["shape"])
            if PRESET in given:
                check_choice(PRESET, given[PRESET], tuple(PRESETS))
                given = PRESETS[given.pop(PRESET)].settings | given
            base = TrainConfig() if recipe is None else load_recipe(recipe)
            _check_used(given, given.get("method", base.method))
            given = _default_fit_memory(given, recipe) | given
            config = _default_config(given) if recipe is None else base.replace(**given)
        config = config.replace(model=local_model(config.model))
        from corecontext.train.run import train as run

        result = run(config)
        if not _is_first_rank():
            return
        losses = {"loss": result.losses[-1][1], **result.parts, **result.metrics}
        text = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in losses.items())
        print(f"{result.model}: {result.steps} steps, {text}")

    recipe = typer.Argument(
        help="fetch (each query sees raw tokens of its best groups, and the original model "
        f"teaches; {SCHEDULE['steps']} steps of {SCHEDULE['accumulation']} rows of "
        f"{SCHEDULE['context_length']} tokens, rate {SCHEDULE['learning_rate']:g}) or paper "
        "(its rule alone); FILE.py:FUNCTION that returns a TrainConfig; or a run's "
        "train_config.json. Default: CCA's settings in the checkpoint, or else "
        f"{DEFAULT_RECIPE}, as far as possible. The options' defaults are those of "
        f"{DEFAULT_RECIPE}."
    )
    # Each field becomes an option with the field's docstring as its help, or CCAConfig's.
    texts = field_help(TrainConfig)
    annotations: dict[str, Any] = {"recipe": Annotated[str | None, recipe]}
    panel = ""
    for setting in fields(TrainConfig):
        panel = _PANELS.get(setting.name, panel)
        text = texts.get(setting.name) or setting_help(setting.name)
        annotations[setting.name] = _annotation(setting, escape(text), panel)
    annotations[PRESET] = Annotated[
        str | None, typer.Option(help=PRESET_HELP, rich_help_panel="Attention")
    ]
    # Options of earlier versions, which the settings refuse in one line.
    removed = Annotated[str | None, typer.Option(hidden=True)]
    for row in REMOVED:
        annotations.setdefault(row.field, removed)
    train.__annotations__ = annotations
    train.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, _KEYWORD, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    return train


def _default_fit_memory(given: dict[str, Any], recipe: str | None) -> dict[str, bool]:
    """Return `fit_memory` where it is not given: on, but off where the options split a step's rows
    by hand. {} for a recipe in a file, which has its own."""
    if given.keys() & _SPLIT_OPTIONS:
        return {"fit_memory": False}
    if recipe is None or recipe in RECIPES:
        return {"fit_memory": True}
    return {}


def _check_used(given: dict[str, Any], method: str) -> None:
    """Raise a UserError for a given option of CCA that another method would ignore.

    TrainConfig does not know which options were given. g, s and a `fetch_groups` of 0 may be given
    for any method; TrainConfig itself refuses `layer_group_sizes`.
    """
    if method == "cca" or method not in METHODS:  # TrainConfig refuses others
        return
    names = {setting.name for setting in fields(CCAConfig)}
    names -= {"fetch_groups", "layer_group_sizes", "group_size", "window_size"}
    for name, value in given.items():
        if name in names or (name == "fetch_groups" and value):
            raise UserError(
                f"{name} must be left out with method {method!r}, which would ignore it, got "
                f"{value}."
            )


def _is_first_rank() -> bool:
    """Whether this process prints for all; torchrun sets RANK."""
    return os.environ.get("RANK", "0") == "0"


def _default_config(given: dict[str, Any]) -> TrainConfig:
    """Return the settings of a run without a recipe: CCA's in the checkpoint, or the default
    recipe."""
    from corecontext.train.student import best_settings, saved_settings

    saved = saved_settings(TrainConfig().replace(**given), given)
    config = TrainConfig().replace(**saved | given)
    if saved:
        return config
    best = best_settings(config, given)
    config = config.replace(**best)
    if best and config.method == "cca" and _is_first_rank():
        titles = {
            "fetch_groups": f"raw tokens of {config.fetch_groups} groups for each query",
            "group_size": f"groups of {config.group_size} tokens",
            "window_size": f"a window of {config.window_size} tokens",
            "distil": "the model as it was teaches",
            "steps": f"{config.steps} steps",
            "context_length": f"rows of {config.context_length} tokens",
            "learning_rate": f"rate {config.learning_rate:g}",
        }
        used = ", ".join(titles[name] for name in titles if best.get(name, 0) != 0)
        print(f"by default: {used}. The paper's rule: corecontext train paper")
    return config


def _parsed(name: str, text: str) -> Any:
    """Return the value of an option that is given as JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        option = name.replace("_", "-")
        raise UserError(f"{option} must be JSON, got {text!r}: {error}.") from None


def _annotation(setting: Field, text: str, panel: str) -> Any:
    """Return the option of a field, None where it is not given, because a recipe may have it. The
    help ends with the default recipe's value."""
    default: Any = setting.default
    if setting.default_factory is not MISSING:
        default = setting.default_factory()
    default = RECIPES[DEFAULT_RECIPE].get(setting.name, default)
    # The type is text, as "float | None".
    kind: Any = {"int": int, "float": float, "bool": bool}.get(str(setting.type).split()[0], str)
    if str(setting.type).startswith("tuple"):
        kind = list[int] if "int" in str(setting.type) else list[str]
        default = " ".join(map(str, default))
        text += " May be repeated."
    if default not in (None, "", {}, False):
        text += f" Default: {default}."
    names = _NAMES.get(setting.name, ())
    option = typer.Option(*names, help=text, rich_help_panel=panel)
    return Annotated[kind | None, option]  # type: ignore[valid-type]
