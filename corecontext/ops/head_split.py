"""Split tensors by KV heads that have the same group size, and gather the results.

Pieces are slices of neighbouring heads: a list of indexes would be copied to the device at every
call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from corecontext.ops.spec import Inputs

HeadSets = Sequence[Sequence[int]]
"""The KV heads of each group size; every head is in one set."""


def check_sizes(sizes: Sequence[int], kv_heads: int, num_groups: int | None) -> tuple[int, ...]:
    """Return the sizes if there is one for each KV head.

    Raises:
        ValueError: there is not, or `num_groups` would set g as well.
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
    """Return the different group sizes and the KV heads of each, in order of first appearance."""
    distinct = tuple(dict.fromkeys(sizes))
    return distinct, [[head for head, size in enumerate(sizes) if size == g] for g in distinct]


def split_heads(x: Tensor, sets: HeadSets, kv_heads: int, dim: int = 1) -> list[Tensor]:
    """Return the heads of each set, along a dimension of KV heads or of r query heads for each.

    Neighbouring heads stay views, and the backward is one `torch.cat`.
    """
    repeats = x.shape[dim] // kv_heads
    runs = sorted(run for heads in sets for run in _runs(heads))
    pieces = dict(zip(runs, x.split([count * repeats for _, count in runs], dim), strict=True))
    split = [[pieces[run] for run in _runs(heads)] for heads in sets]
    return [torch.cat(slices, dim) if len(slices) > 1 else slices[0] for slices in split]


def split_inputs(inputs: Inputs, sets: HeadSets) -> list[Inputs]:
    """Return the queries, keys and values of each set of heads."""
    kv_heads = inputs.k.shape[1]
    q, k, v = (split_heads(x, sets, kv_heads) for x in inputs[:3])
    return [Inputs(*fields) for fields in zip(q, k, v)]


def gather_heads(outs: Sequence[Tensor], sets: HeadSets) -> Tensor:
    """Return the results of all sets, each [B, r heads of the set, ...], in the order of heads."""
    if len(outs) == 1 and list(sets[0]) == sorted(sets[0]):
        return outs[0]
    pieces: dict[int, Tensor] = {}
    for out, heads in zip(outs, sets, strict=True):
        pieces |= zip(heads, out.chunk(len(heads), 1))
    return torch.cat([pieces[head] for head in sorted(pieces)], 1)


def _runs(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of neighbouring heads, each as (first, count)."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        if runs and sum(runs[-1]) == head:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((head, 1))
    return runs
