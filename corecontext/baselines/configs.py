"""What each rival sees: frozen, validated descriptions, and the names the command line has for
them.

Sizes of the papers: StreamingLLM 4 sinks (arXiv 2309.17453), LM-Infinite 16 global and 1024 local
tokens as the CCA paper sets it (arXiv 2308.16137), MInference patterns such as (1000, 6096) with
blocks of 64 (arXiv 2407.02490), LongLoRA groups of a quarter of the length (arXiv 2309.12307).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from corecontext.config import CCAConfig, check_choice, check_int

NAMES = ("window", "streaming_llm", "lm_infinite", "minference", "longlora", "mean", "max")
KINDS = ("a_shape", "vertical_slash", "block_sparse")


@dataclass(frozen=True)
class _Sinks:
    """A query sees its nearest `window_size` tokens, itself included, and the first `sinks`
    tokens."""

    name: ClassVar[str]
    far_position: ClassVar[str]
    """Where a sink that has left the window stands: see `sink_attention`."""
    sinks: int
    window_size: int

    def __post_init__(self) -> None:
        check_int("sinks", self.sinks, 0)
        check_int("window_size", self.window_size, 1)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for records."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class StreamingLLM(_Sinks):
    """Sinks and window with positions counted inside the cache: no distance exceeds its size."""

    name: ClassVar[str] = "streaming_llm"
    far_position: ClassVar[str] = "cache"
    sinks: int = 4
    window_size: int = 1024


@dataclass(frozen=True)
class LMInfinite(_Sinks):
    """A Lambda-shaped mask; sinks beyond the window all stand at its far end, the distance
    ceiling."""

    name: ClassVar[str] = "lm_infinite"
    far_position: ClassVar[str] = "ceiling"
    sinks: int = 16
    window_size: int = 1024


@dataclass(frozen=True)
class WindowOnly(_Sinks):
    """The nearest tokens and nothing else."""

    name: ClassVar[str] = "window"
    far_position: ClassVar[str] = "none"
    sinks: int = 0
    window_size: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks:
            raise ValueError(
                f"sinks must be 0 for a window alone, got {self.sinks}. Use StreamingLLM."
            )


@dataclass(frozen=True)
class DuoAttention:
    """Some KV heads see everything, the others sinks and window (arXiv 2410.10819); which ones is
    given.

    That paper finds the heads by training gates; `corecontext layers --heads` finds them by trial.
    """

    name: ClassVar[str] = "duo_attention"
    far_position: ClassVar[str] = "none"
    full_heads: tuple[tuple[int, ...], ...]
    """By full-attention layer, the KV heads that see everything; () where none does."""
    sinks: int = 4
    window_size: int = 1024

    def __post_init__(self) -> None:
        check_int("sinks", self.sinks, 0)
        check_int("window_size", self.window_size, 1)
        object.__setattr__(self, "full_heads", tuple(tuple(layer) for layer in self.full_heads))
        for head in (head for layer in self.full_heads for head in layer):
            check_int("full_heads", head, 0)

    def of(self, index: int, kv_heads: int) -> tuple[int, ...]:
        """The heads of one layer, counted among those with full attention.

        Raises:
            ValueError: there are none for this layer, or no such heads.
        """
        if index >= len(self.full_heads) or any(
            head >= kv_heads for head in self.full_heads[index]
        ):
            raise ValueError(
                f"full_heads must have heads from 0 to {kv_heads - 1} for each layer, got "
                f"{self.full_heads[index] if index < len(self.full_heads) else 'no such layer'}."
            )
        return tuple(sorted(set(self.full_heads[index])))

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for records."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Pattern:
    """What one head computes while it reads a prompt."""

    kind: str = "vertical_slash"
    """"a_shape", "vertical_slash" or "block_sparse"."""
    first: int = 1000
    """Sinks of an A-shape, columns of vertical-slash, key blocks of block-sparse."""
    second: int = 6096
    """Window of an A-shape, tokens on diagonals of vertical-slash; unused for block-sparse."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_int("first", self.first, 0 if self.kind == "a_shape" else 1)
        check_int("second", self.second, 0 if self.kind == "block_sparse" else 1)


@dataclass(frozen=True)
class MInference:
    """Sparse reading of the prompt, a pattern for each head; steps after it, and the cache, are
    full attention's."""

    name: ClassVar[str] = "minference"
    patterns: tuple[tuple[Pattern, ...], ...] | None = None
    """By layer and query head, from `search_patterns`; None is the default pattern everywhere."""
    block_size: int = 64
    """Rows that share one choice of keys; a diagonal is a band of blocks."""
    probe: int = 64
    """Last queries, from which columns and diagonals are estimated."""

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, 1)
        check_int("probe", self.probe, 1)
        if self.patterns is not None:
            object.__setattr__(self, "patterns", tuple(tuple(layer) for layer in self.patterns))

    def of(self, layer: int, heads: int) -> tuple[Pattern, ...]:
        """The patterns of one layer's query heads.

        Raises:
            ValueError: there are none for this layer, or not one for each head.
        """
        if self.patterns is None:
            return (Pattern(),) * heads
        if layer >= len(self.patterns) or len(self.patterns[layer]) != heads:
            raise ValueError(
                f"patterns must have one pattern for each of {heads} heads of layer {layer}, got "
                f"{len(self.patterns[layer]) if layer < len(self.patterns) else 'no such layer'}. "
                "Search them on this model."
            )
        return self.patterns[layer]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for records."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class LongLoRA:
    """Training in groups, shifted by half a group in half of the heads; outside of training it is
    full attention.

    The half groups at the two ends stay apart, so that no token sees a later one.
    """

    name: ClassVar[str] = "longlora"
    group_size: int | None = None
    """Tokens that attend to one another; None is a quarter of the length."""

    def __post_init__(self) -> None:
        if self.group_size is not None:
            check_int("group_size", self.group_size, 2)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for records."""
        return dataclasses.asdict(self)


Rival = StreamingLLM | LMInfinite | WindowOnly | DuoAttention | MInference | LongLoRA | CCAConfig


def make_rival(
    name: str,
    *,
    group_size: int | None = None,
    window_size: int | None = None,
    sinks: int | None = None,
) -> Rival:
    """The rival of this name; sizes that it does not have are errors, sizes that are None are its
    own defaults.

    "mean" and "max" are our own operators with another pooling.
    """
    check_choice("method", name, NAMES)
    given = {
        k: v
        for k, v in (("group_size", group_size), ("window_size", window_size), ("sinks", sinks))
        if v is not None
    }
    if name in ("mean", "max"):
        kind, fixed = CCAConfig, {"pooling": name}
    else:
        kind, fixed = (
            {one.name: one for one in (StreamingLLM, LMInfinite, WindowOnly, MInference, LongLoRA)}[
                name
            ],
            {},
        )
    known = {field.name for field in dataclasses.fields(kind)}
    for key in given:
        if key not in known:
            raise ValueError(
                f"{key} must not be given for {name}, got {given[key]}: it has no such size."
            )
    return kind(**given, **fixed)
