"""A window alone: each query sees its nearest tokens only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from corecontext.baselines.sink_cache import SinkMethod
from corecontext.config import DEFAULT_WINDOW_SIZE


@dataclass(frozen=True)
class WindowOnly(SinkMethod):
    """The nearest tokens and no sinks."""

    name: ClassVar[str] = "window"
    sinks: int = 0
    window_size: int = DEFAULT_WINDOW_SIZE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks:
            raise ValueError(
                f"sinks must be 0 for a window alone, got {self.sinks}. Use StreamingLLM."
            )
