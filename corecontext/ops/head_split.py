"""Split tensors by KV heads that have the same group size, and gather the results.

Shares are slices, never made by lists of indexes, which would be copied to the device at every
call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from corecontext.ops.spec import Inputs

Shares = Sequence[Sequence[int]]
"""Which KV heads belong to each share; every head is in one."""


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


def split_heads(x: Tensor, shares: Shares, kv_heads: int, dim: int = 1) -> list[Tensor]:
    """Split a dimension that has one entry for each KV head, or r for its query heads.

    Neighbouring heads stay views, and the backward is one `torch.cat`.
    """
    repeats = x.shape[dim] // kv_heads
    runs = sorted(run for heads in shares for run in _runs(heads))
    pieces = dict(zip(runs, x.split([count * repeats for _, count in runs], dim), strict=True))
    split = [[pieces[run] for run in _runs(heads)] for heads in shares]
    return [torch.cat(share, dim) if len(share) > 1 else share[0] for share in split]


def split_inputs(inputs: Inputs, shares: Shares) -> list[Inputs]:
    """Split the tensors of a call."""
    kv_heads = inputs.k.shape[1]
    q, k, v = (split_heads(x, shares, kv_heads) for x in inputs[:3])
    return [Inputs(*fields) for fields in zip(q, k, v)]


def gather_heads(outs: Sequence[Tensor], shares: Shares) -> Tensor:
    """Return the results of each share, [B, r heads, ...], as one tensor in the order of heads."""
    if len(outs) == 1 and list(shares[0]) == sorted(shares[0]):
        return outs[0]
    pieces: dict[int, Tensor] = {}
    for out, heads in zip(outs, shares, strict=True):
        pieces |= zip(heads, out.chunk(len(heads), 1))
    return torch.cat([pieces[head] for head in sorted(pieces)], 1)


def _runs(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours together: (first, count)."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        if runs and sum(runs[-1]) == head:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((head, 1))
    return runs
