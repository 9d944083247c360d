"""Give some layers or KV heads small groups, or every token, at the cache size of equal groups."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from corecontext.config import CCAConfig
from corecontext.visibility import num_complete_groups, num_sinks, window_capacity

COARSE = 4
"""Group size of the heads that were not chosen, as a multiple of the equal group size."""
MORE_ENTRIES = 1.05
"""Largest cache, as a multiple of the cache with equal groups."""


class Unit(NamedTuple):
    """A choice: a layer, counted among those with full attention, or one of its KV heads."""

    layer: int
    head: int | None = None

    def __str__(self) -> str:
        return f"{self.layer}" if self.head is None else f"{self.layer}.{self.head}"


class Shape(NamedTuple):
    """Numbers of full-attention layers, and of KV heads of each."""

    layers: int
    kv_heads: int


def spread(
    shape: Shape, chosen: Collection[Unit], small: int, large: int
) -> tuple[int | tuple[int, ...], ...]:
    """Return `CCAConfig.layer_group_sizes` with g = small for the chosen units, large elsewhere."""
    sizes: list[int | tuple[int, ...]] = []
    for layer in range(shape.layers):
        heads = [Unit(layer, head) for head in range(shape.kv_heads)]
        if Unit(layer) in chosen:
            sizes.append(small)
        elif any(head in chosen for head in heads):
            sizes.append(tuple(small if head in chosen else large for head in heads))
        else:
            sizes.append(large)
    return tuple(sizes)


def at_equal_cache(
    shape: Shape, chosen: Collection[Unit], config: CCAConfig, length: int, raw: bool = False
) -> CCAConfig:
    """Return the smallest groups of the chosen units at the cache size of equal groups.

    A cache of `length` tokens has at most 5 % more entries than with `config.group_size`
    everywhere; units that were not chosen get groups four times that size.

    Args:
        raw: Let the chosen units keep every token, and shrink the window of all heads to pay for
            it.

    Raises:
        ValueError: no size fits: too many units are chosen, the length is too short, or half of the
            window or less would stay.
    """
    g, s = config.group_size, config.window_size
    heads = shape.layers * shape.kv_heads
    count = sum(shape.kv_heads if unit.head is None else 1 for unit in chosen)
    for small, window in _choices(g, s, raw):
        if _fits(count, heads, small, window, config, length):
            sizes = spread(shape, chosen, small, COARSE * g)
            return config.replace(
                window_size=window, head_group_sizes=None, layer_group_sizes=sizes
            )
    if not raw:
        raise ValueError(
            "what is chosen must be so little, and length so large, that groups smaller than "
            f"{g} fit the same cache; got {count} of {heads} KV heads and {length} tokens."
        )
    fitting = [few for few in range(count) if _fits(few, heads, 1, s // 2 + 1, config, length)]
    raise ValueError(
        f"what keeps every token must be at most {max(fitting, default=0)} of {heads} KV heads, so "
        f"that more than half of the window of {s} stays with {length} tokens, got {count}. Choose "
        "fewer, heads in place of layers (--heads), or give a larger window or smaller groups."
    )


def raw_heads(shape: Shape, config: CCAConfig, length: int) -> int:
    """Return how many KV heads keep every token by default.

    A sixteenth of all heads, or fewer where these would take more than half of the cache with equal
    groups; at least one.
    """
    heads = shape.layers * shape.kv_heads
    entries = _entries(length, config.group_size, config)
    return max(1, min(heads // 16, heads * entries // (2 * length)))


def _choices(group_size: int, window_size: int, raw: bool) -> Iterator[tuple[int, int]]:
    """Yield g of the chosen units and s of all, the most wanted first."""
    if raw:
        yield from ((1, window) for window in range(window_size, window_size // 2, -1))
    else:
        yield from ((size, window_size) for size in range(1, group_size))


def _fits(count: int, heads: int, small: int, window: int, config: CCAConfig, length: int) -> bool:
    """Whether `count` of the heads can have groups of `small` tokens."""
    g = config.group_size
    limit = MORE_ENTRIES * heads * _entries(length, g, config)
    config = config.replace(window_size=window)
    chosen = count * _entries(length, small, config)
    return chosen + (heads - count) * _entries(length, COARSE * g, config) <= limit


def _entries(length: int, group_size: int, config: CCAConfig) -> int:
    """Return the cache entries of one head with groups of this size for `length` tokens."""
    # mutant heads: the cache of a search has no first tokens
    n = num_sinks(config.sink_size, group_size)
    cores = num_complete_groups(length - n, group_size)
    return window_capacity(group_size, config.window_size) + n + cores
