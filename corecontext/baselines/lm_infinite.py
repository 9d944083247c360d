"""LM-Infinite (arXiv 2308.16137): sinks and window, distances no longer than the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from corecontext.baselines.sink_cache import SinkMethod
from corecontext.config import DEFAULT_WINDOW_SIZE


@dataclass(frozen=True)
class LMInfinite(SinkMethod):
    """A Lambda-shaped mask; sinks beyond the window are all at its far end, the distance ceiling.

    The CCA paper compares with 16 global and 1024 local tokens.
    """

    name: ClassVar[str] = "lm_infinite"
    far_position: ClassVar[str] = "ceiling"
    sinks: int = 16
    window_size: int = DEFAULT_WINDOW_SIZE
