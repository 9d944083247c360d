"""How a cache is dealt out to layers and KV heads: sizes of their own that take no more than equal
groups would."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from corecontext.config import CCAConfig
from corecontext.visibility import num_complete_groups, window_capacity

COARSE = 4
"""Times the group size of what was not chosen."""
MORE_ENTRIES = 1.05
"""Of the cache with equal groups, at most."""


class Unit(NamedTuple):
    """A layer, counted among those with full attention, or one of its KV heads."""

    layer: int
    head: int | None = None

    def __str__(self) -> str:
        return f"{self.layer}" if self.head is None else f"{self.layer}.{self.head}"


class Shape(NamedTuple):
    """Of a model: full-attention layers, and KV heads of each."""

    layers: int
    kv_heads: int


def spread(
    shape: Shape, chosen: Collection[Unit], small: int, large: int
) -> tuple[int | tuple[int, ...], ...]:
    """`CCAConfig.layer_group_sizes` with one g for the chosen units and one for the others."""

    def size(layer: int) -> int | tuple[int, ...]:
        if Unit(layer) in chosen:
            return small
        heads = tuple(
            small if Unit(layer, head) in chosen else large for head in range(shape.kv_heads)
        )
        return heads if small in heads else large

    return tuple(map(size, range(shape.layers)))


def at_equal_cache(
    shape: Shape, chosen: Collection[Unit], config: CCAConfig, length: int, raw: bool = False
) -> CCAConfig:
    """The smallest groups of the chosen units with which a cache of `length` tokens is no larger
    than with `config.group_size` everywhere (5 % more entries at most); the others' are four times
    that.

    Args:
        raw: The chosen ones keep every token; the window of all shrinks as far as that takes.

    Raises:
        ValueError: none fits: too many are chosen, the length is too short, or half of the window
            or less would stay.
    """
    g, s = config.group_size, config.window_size
    total = shape.layers * shape.kv_heads
    few = sum(shape.kv_heads if unit.head is None else 1 for unit in chosen)

    def entries(size: int, window: int) -> int:
        return num_complete_groups(length, size) + window_capacity(size, window)

    most = MORE_ENTRIES * total * entries(g, s)

    def fits(heads: int, small: int, window: int) -> bool:
        return (
            heads * entries(small, window) + (total - heads) * entries(COARSE * g, window) <= most
        )

    for small, window in (
        ((1, w) for w in range(s, s // 2, -1)) if raw else ((size, s) for size in range(1, g))
    ):
        if fits(few, small, window):
            return config.replace(
                window_size=window,
                head_group_sizes=None,
                layer_group_sizes=spread(shape, chosen, small, COARSE * g),
            )
    if raw:
        room = max((heads for heads in range(few) if fits(heads, 1, s // 2 + 1)), default=0)
        raise ValueError(
            f"what keeps every token must be at most {room} of {total} KV heads, so that more than half "
            f"of the window of {s} stays with {length} tokens, got {few}. Choose fewer, heads in place of "
            "layers (--heads), or give a larger window or smaller groups."
        )
    raise ValueError(
        f"what is chosen must be so little, and length so large, that groups smaller than {g} fit the "
        f"same cache; got {few} of {total} KV heads and {length} tokens."
    )


def untrained_heads(shape: Shape, count: int) -> tuple[Unit, ...]:
    """KV heads that shall keep every token in a model with random weights, whose heads are all
    alike: those of the layers from five eighths of the depth on, where the miniature has its one
    (docs/reproduction.md)."""
    first = 5 * shape.layers // 8
    order = [*range(first, shape.layers), *range(first - 1, -1, -1)]
    return tuple(Unit(layer, head) for layer in order for head in range(shape.kv_heads))[:count]


def raw_heads(shape: Shape, config: CCAConfig, length: int) -> int:
    """How many KV heads keep every token where nobody says: a sixteenth of all, or what takes half
    of the cache with equal groups, if that is less; one at least."""
    total, entries = (
        shape.layers * shape.kv_heads,
        (
            num_complete_groups(length, config.group_size)
            + window_capacity(config.group_size, config.window_size)
        ),
    )
    return max(1, min(total // 16, total * entries // (2 * length)))
