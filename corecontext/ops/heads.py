"""KV heads with group sizes of their own: which go together, and their part of a tensor.

Parts are slices, never made by lists of indexes, which would be copied to the device at every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor


def check_sizes(sizes: Sequence[int], kv_heads: int, num_groups: int | None) -> tuple[int, ...]:
    """The sizes, if they are one for each KV head.

    Raises:
        ValueError: they are not, or `num_groups` would set g as well.
    """
    if len(sizes) != kv_heads:
        raise ValueError(f"group_size must be a number, or one for each of the {kv_heads} KV heads, got {sizes}.")
    if num_groups is not None:
        raise ValueError("num_groups must not be given with a group_size for each head: both set g.")
    return tuple(sizes)


def heads_of_each(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Every group size with its KV heads, in the order in which they come first."""
    return [(g, [head for head, one in enumerate(sizes) if one == g]) for g in dict.fromkeys(sizes)]


def take(x: Tensor, heads: Sequence[int], kv_heads: int, dim: int = 1) -> Tensor:
    """These KV heads of a dimension that has one entry for each, or r for its query heads."""
    repeats = x.shape[dim] // kv_heads
    parts = [x.narrow(dim, first * repeats, count * repeats) for first, count in _runs(heads)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def take_learned(learned: Mapping[str, Tensor], heads: Sequence[int], kv_heads: int) -> dict[str, Tensor]:
    """The learned parameters of these KV heads and their query heads."""
    return {name: take(x, heads, kv_heads, 0) for name, x in learned.items()}


def in_order(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The inverse of `take` for all group sizes: parts [B, ...] by query head, in the order of `heads_of_each`."""
    return put_back(parts, [heads for _, heads in heads_of_each(sizes)])


def put_back(parts: Sequence[Tensor], heads: Sequence[Sequence[int]]) -> Tensor:
    """The inverse of `take`: parts [B, ...] by query head, and the KV heads of each, all of them once."""
    order = [head for some in heads for head in some]
    return take(torch.cat(list(parts), 1), [order.index(head) for head in range(len(order))], len(order))


def _runs(heads: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours together: (first, count)."""
    first = 0
    for at in range(1, len(heads) + 1):
        if at == len(heads) or heads[at] != heads[at - 1] + 1:
            yield heads[first], at - first
            first = at
