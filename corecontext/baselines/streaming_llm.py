"""StreamingLLM (arXiv 2309.17453): sinks and window, positions counted inside the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from corecontext.baselines.sink_cache import SinkMethod
from corecontext.config import DEFAULT_WINDOW_SIZE


@dataclass(frozen=True)
class StreamingLLM(SinkMethod):
    """Sinks and window with positions counted inside the cache: no distance exceeds its size.

    The paper keeps 4 sinks.
    """

    name: ClassVar[str] = "streaming_llm"
    far_position: ClassVar[str] = "cache"
    sinks: int = 4
    window_size: int = DEFAULT_WINDOW_SIZE
