"""Methods that see sinks and a window: a window alone, StreamingLLM and LM-Infinite."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from corecontext.baselines.method import Call, Layer, Method
from corecontext.baselines.sink_cache import SinkCacheLayer
from corecontext.config import PAPER_RULE, check_int


class SinkMethod(Method):
    """Base of methods whose queries see the first `sinks` tokens and their nearest `window_size`
    tokens, themselves included."""

    far_position: ClassVar[str] = "none"
    """Position of a sink that has left the window: see `blocks.Sinks`."""
    sinks: int
    window_size: int

    def __post_init__(self) -> None:
        check_int("sinks", self.sinks, 0)
        check_int("window_size", self.window_size, 1)

    @property
    def needs_rotary(self) -> bool:
        """Whether sinks are rotated to another position."""
        return self.far_position != "none"

    @property
    def full_length(self) -> int:
        """Longest sequence, in tokens, on which the method equals full attention."""
        return self.window_size + self.sinks

    def make_cache(self, layer: Layer) -> SinkCacheLayer:
        """Return an empty cache of one layer."""
        return SinkCacheLayer(self.sinks, self.window_size)

    def attend(self, call: Call) -> Tensor:
        """Attend in the call's cache, or in one that is dropped afterwards."""
        cache = self.make_cache(call.layer) if call.cache is None else call.cache
        return cache.attend(call, self.far_position)


@dataclass(frozen=True)
class WindowOnly(SinkMethod):
    """The nearest tokens and no sinks."""

    name: ClassVar[str] = "window"
    sinks: int = 0
    window_size: int = PAPER_RULE["window_size"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks:
            raise ValueError(
                f"sinks must be 0 for a window alone, got {self.sinks}. Use StreamingLLM."
            )


@dataclass(frozen=True)
class StreamingLLM(SinkMethod):
    """Sinks and window with positions counted inside the cache, so that no distance exceeds its
    size (arXiv 2309.17453). The paper keeps 4 sinks."""

    name: ClassVar[str] = "streaming_llm"
    far_position: ClassVar[str] = "cache"
    sinks: int = 4
    window_size: int = PAPER_RULE["window_size"]


@dataclass(frozen=True)
class LMInfinite(SinkMethod):
    """Sinks and window; sinks that have left the window are all at the same distance, `window_size`
    (arXiv 2308.16137). The CCA paper compares with 16 global and 1024 local tokens."""

    name: ClassVar[str] = "lm_infinite"
    far_position: ClassVar[str] = "ceiling"
    sinks: int = 16
    window_size: int = PAPER_RULE["window_size"]

    @property
    def full_length(self) -> int:
        """Longest sequence, in tokens, on which the method equals full attention."""
        # The first token that leaves the window is at this distance anyway.
        return self.window_size + min(self.sinks, 1)
