"""List the rival methods by the names that commands have for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from corecontext.baselines.duo_attention import DuoAttention
from corecontext.baselines.lm_infinite import LMInfinite
from corecontext.baselines.longlora import LongLoRA
from corecontext.baselines.method import Method
from corecontext.baselines.minference import MInference
from corecontext.baselines.streaming_llm import StreamingLLM
from corecontext.baselines.window import WindowOnly
from corecontext.config import CCAConfig, check_choice

SINKS = ("window_size", "sinks")


class Rival(NamedTuple):
    """How one method is made and used."""

    make: Callable[..., Method | CCAConfig]
    takes: tuple[str, ...]
    """Settings that users choose."""
    trains: bool = True
    """Whether `corecontext train` offers it."""
    generates: bool = True
    """Whether it differs from full attention outside of training."""


RIVALS = {
    "window": Rival(WindowOnly, SINKS),
    "streaming_llm": Rival(StreamingLLM, SINKS),
    "lm_infinite": Rival(LMInfinite, SINKS),
    "minference": Rival(MInference, ("patterns",), trains=False),
    "longlora": Rival(LongLoRA, ("group_size",), generates=False),
    # Our own operators with another pooling; `corecontext train` has --pooling for them.
    "mean": Rival(partial(CCAConfig, pooling="mean"), ("group_size", "window_size"), trains=False),
    "max": Rival(partial(CCAConfig, pooling="max"), ("group_size", "window_size"), trains=False),
    # From Python only: its heads come from a search.
    "duo_attention": Rival(DuoAttention, ("full_heads", *SINKS), trains=False),
}
OPTIONS = ("group_size", "window_size", "sinks", "patterns")
"""Settings that commands can give."""
NAMES = tuple(name for name, rival in RIVALS.items() if set(rival.takes) <= set(OPTIONS))
"""The methods that commands can make."""


def make_rival(name: str, **settings: Any) -> Method | CCAConfig:
    """Make the rival of a name in NAMES.

    Args:
        settings: group_size, window_size, sinks, patterns; None is the rival's default.

    Raises:
        ValueError: there is no such rival, or it has no such setting.
    """
    check_choice("method", name, NAMES)
    rival = RIVALS[name]
    given = {key: value for key, value in settings.items() if value is not None}
    for key, value in given.items():
        if key not in rival.takes:
            raise ValueError(
                f"{key} must not be given for {name}, got {value}: it has no such size."
            )
    return rival.make(**given)
