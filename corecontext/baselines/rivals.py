"""List the rival methods that every command offers.

Others are in the laboratory, the folder reproduction/ of the repository. Commands read the table
for their help, so a method's file is loaded only when the method is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from corecontext.config import check_choice
from corecontext.files import UserError

if TYPE_CHECKING:
    from corecontext.baselines.method import Method


class Rival(NamedTuple):
    """A method, and its settings."""

    file: str
    """Module of this folder that holds its class."""
    maker: str
    """Name of the class."""
    takes: tuple[str, ...]
    """Settings that the user may give."""


RIVALS = {
    "window": Rival("sink_methods", "WindowOnly", ("window_size",)),
    "streaming_llm": Rival("sink_methods", "StreamingLLM", ("window_size", "sinks")),
    "lm_infinite": Rival("sink_methods", "LMInfinite", ("window_size", "sinks")),
}
NAMES = tuple(RIVALS)
_COMPARE = "run `python -m reproduction compare --method {}` with the other options of your command"
MOVED = {
    **{name: _COMPARE.format(name) for name in ("minference", "duo_attention", "mean", "max")},
    "longlora": "enable reproduction.attentions.longlora.LongLoRA() in a training loop of your own",
}
"""Rivals that have moved to the laboratory, and how to use them there."""


def check_moved(name: str) -> None:
    """Raise a UserError for a rival that has moved to the laboratory."""
    if name in MOVED:
        raise UserError(
            f"method {name} has moved to the laboratory. In a clone of the repository, "
            f"{MOVED[name]}."
        )


def make_rival(name: str, **settings: Any) -> Method:
    """Make the rival of a name in NAMES.

    Args:
        settings: group_size, window_size, sinks; None is the rival's default.

    Raises:
        ValueError: there is no such rival, or it has no such setting.
        UserError: it has moved to the laboratory.
    """
    check_moved(name)
    check_choice("method", name, NAMES)
    given = {key: value for key, value in settings.items() if value is not None}
    rival = RIVALS[name]
    for key, value in given.items():
        if key not in rival.takes:
            raise ValueError(
                f"{key} must not be given for {name}, got {value}: it has no such size."
            )
    module = importlib.import_module(f"corecontext.baselines.{rival.file}")
    return getattr(module, rival.maker)(**given)
