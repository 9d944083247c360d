"""KV heads with group sizes of their own: which go together, and their part of a tensor.

Parts are slices, never made by lists of indexes, which would be copied to the device at every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from corecontext.ops.spec import Inputs


def check_sizes(sizes: Sequence[int], kv_heads: int, num_groups: int | None) -> tuple[int, ...]:
    """The sizes, if they are one for each KV head.

    Raises:
        ValueError: they are not, or `num_groups` would set g as well.
    """
    if len(sizes) != kv_heads:
        raise ValueError(
            f"group_size must be a number, or one for each of the {kv_heads} KV heads, got {sizes}."
        )
    if num_groups is not None:
        raise ValueError(
            "num_groups must not be given with a group_size for each head: both set g."
        )
    return tuple(sizes)


def heads_of_each(sizes: Sequence[int]) -> tuple[tuple[int, ...], list[list[int]]]:
    """Every group size and its KV heads, in the order in which they come first."""
    every = tuple(dict.fromkeys(sizes))
    return every, [[head for head, one in enumerate(sizes) if one == g] for g in every]


def deal(x: Tensor, parts: Sequence[Sequence[int]], kv_heads: int, dim: int = 1) -> list[Tensor]:
    """A dimension that has one entry for each KV head, or r for its query heads, dealt out to parts
    of the heads; all heads are in one part each. Neighbours stay views, and the backward is one
    `torch.cat`."""
    runs = [list(_runs(heads)) for heads in parts]
    pieces = _cut(x, sorted(run for some in runs for run in some), kv_heads, dim)
    return [_joined([pieces[run] for run in some], dim) for some in runs]


def deal_learned(
    learned: Mapping[str, Tensor], parts: Sequence[Sequence[int]], kv_heads: int
) -> list[dict[str, Tensor]]:
    """The learned parameters of each part's heads."""
    dealt = {name: deal(x, parts, kv_heads, 0) for name, x in learned.items()}
    return [{name: of_parts[i] for name, of_parts in dealt.items()} for i in range(len(parts))]


def split_inputs(inputs: Inputs, parts: Sequence[Sequence[int]]) -> list[Inputs]:
    """The tensors of a call for each part's heads."""
    kv_heads = inputs.k.shape[1]
    bias = inputs.bias
    if isinstance(bias, Tensor):
        biases = deal(bias, parts, kv_heads, 0)
    else:
        biases = [bias] * len(parts)
    q, k, v = (deal(x, parts, kv_heads) for x in inputs[:3])
    learned = deal_learned(inputs.learned, parts, kv_heads)
    return [Inputs(*fields) for fields in zip(q, k, v, biases, learned)]


def put_back(dealt: Sequence[Tensor], parts: Sequence[Sequence[int]]) -> Tensor:
    """The inverse of `deal`: what was computed for each part, [B, ...] by query head, as one in the
    order of heads."""
    pieces: dict[tuple[int, int], Tensor] = {}
    for x, heads in zip(dealt, parts, strict=True):
        pieces |= _cut(x, list(_runs(heads)), len(heads), 1)
    return _joined([pieces[run] for run in sorted(pieces)], 1)


def _cut(
    x: Tensor, runs: Sequence[tuple[int, int]], kv_heads: int, dim: int
) -> dict[tuple[int, int], Tensor]:
    """A dimension of so many KV heads, cut into runs that lie in it one after another."""
    repeats = x.shape[dim] // kv_heads
    return dict(zip(runs, x.split([count * repeats for _, count in runs], dim), strict=True))


def _joined(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _runs(heads: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours together: (first, count)."""
    first = 0
    for at in range(1, len(heads) + 1):
        if at == len(heads) or heads[at] != heads[at - 1] + 1:
            yield heads[first], at - first
            first = at
