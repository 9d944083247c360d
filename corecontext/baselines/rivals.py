"""List the rival methods. A new rival is a file beside this one and a row here.

Commands read the table for their help, so it loads a method's file only when the method is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from corecontext.config import check_choice

if TYPE_CHECKING:
    from corecontext.baselines.method import Method

SINKS = ("window_size", "sinks")


class Rival(NamedTuple):
    """A method, and where it can be chosen."""

    file: str
    """Holds the class of its settings."""
    maker: str
    takes: tuple[str, ...]
    """Settings that the user may give."""
    commands: tuple[str, ...] = ("eval", "train")
    """Commands whose help offers it."""


RIVALS = {
    "window": Rival("sink_methods", "WindowOnly", ("window_size",)),
    "streaming_llm": Rival("sink_methods", "StreamingLLM", SINKS),
    "lm_infinite": Rival("sink_methods", "LMInfinite", SINKS),
    "minference": Rival("minference", "MInference", ("patterns",), ("eval",)),
    "longlora": Rival("longlora", "LongLoRA", ("group_size",), ("train",)),
    "duo_attention": Rival("duo_attention", "DuoAttention", ("full_heads", *SINKS), ("eval",)),
}
NAMES = tuple(RIVALS)


def offered(command: str) -> tuple[str, ...]:
    """Return the rivals that the help of "eval" or "train" offers."""
    return tuple(name for name, rival in RIVALS.items() if command in rival.commands)


def takers(setting: str) -> tuple[str, ...]:
    """Return the rivals that a command can give a setting."""
    return tuple(name for name in NAMES if setting in RIVALS[name].takes)


def make_rival(name: str, **settings: Any) -> Method:
    """Make the rival of a name in NAMES.

    Args:
        settings: group_size, window_size, sinks, patterns, full_heads; None is the rival's default.

    Raises:
        ValueError: there is no such rival, or it has no such setting.
    """
    check_choice("method", name, NAMES)
    given = {key: value for key, value in settings.items() if value is not None}
    for key, value in given.items():
        if key not in RIVALS[name].takes:
            raise ValueError(
                f"{key} must not be given for {name}, got {value}: it has no such size."
            )
    file, maker = RIVALS[name][:2]
    return getattr(importlib.import_module(f"corecontext.baselines.{file}"), maker)(**given)
