"""Round queries and the keys of an index in low bits to 8 bits, for `hopper_scores.py`.

Each query has one scale, its *unit*, and so have all keys of a group: the largest product of a
query with a group's keys is found among whole numbers, then multiplied by both units.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.choose.index_keys import signs_of
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2
from corecontext.ops.triton.primitives import TINY, dot, tile_mask

MAX_DIM = 128
RUN = 8  # neighbouring groups, a run, whose keys alternate in memory
TILE_KEYS = 128  # keys of a tile that one matrix product takes
_ROWS = 64  # queries that one program rounds


class Bytes(NamedTuple):
    """Hold queries and keys of a choice in int8. D' is D padded to a power of 2, at least 32."""

    queries: Tensor
    """[N, r, C, D']."""
    units: Tensor
    """The value of a query's whole number 1, times the scale of scores, [N, r, C] in float32."""
    offsets: Tensor
    """Products of each query with the centre, times the scale of scores, [N, r, C]."""
    keys: Tensor
    """[N, 1, M' P, D'], M rounded up to M' by `block_of`: of each run of RUN groups the first key
    of each group, then the second of each, and so on."""
    group_units: Tensor
    """The value of 1 in the whole numbers of a group's keys, [N, M'] in float32."""
    num_keys: int
    """Keys of a group: P."""
    num_groups: int
    """M."""


@triton.jit(do_not_specialize=["count", "heads"])
def queries_kernel(
    inputs,
    results,
    count,
    heads,
    factors,
    strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate BLOCK queries, round them to 8 bits and multiply them with the centre.

    Grid: (tiles of queries, N r).

    Args:
        inputs: Pointers to queries [N, r, C, D], to the signs of the index's rotation
            (`low_bits.rotation`, not rotary), 1, -1 and 0, and to the centre [N, D].
        results: Pointers to queries, units and offsets of `Bytes`.
        count, heads: C and r.
        factors: The size of the rotation's numbers that are not 0, and the scale of scores.
    """
    q_ptr, signs_ptr, centre_ptr = inputs
    unit, scale = factors
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    mask = tile_mask(rows, count, dims, HEAD_DIM)
    q_ptr += head // heads * strides[0] + head % heads * strides[1]
    q = tl.load(q_ptr + rows.to(tl.int64)[:, None] * strides[2] + dims[None, :], mask=mask, other=0)
    place = signs_ptr + dims[:, None] * HEAD_DIM + dims[None, :]
    signs = tl.load(place, mask=tile_mask(dims, HEAD_DIM, dims, HEAD_DIM), other=0)
    x = dot(q, signs.to(q.dtype)) * unit
    size = tl.maximum(tl.max(tl.abs(x), 1), TINY) / 127
    whole = tl.floor(x / size[:, None] + 0.5)
    centre = tl.load(centre_ptr + head // heads * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    offset = tl.sum(q.to(tl.float32) * centre[None, :], 1)
    flat = head * count + rows
    place = results[0] + flat[:, None] * BLOCK_D + dims[None, :]
    tl.store(place, whole.to(tl.int8), mask=(rows < count)[:, None])
    tl.store(results[1] + flat, size * scale, mask=rows < count)
    tl.store(results[2] + flat, offset * scale, mask=rows < count)


@triton.jit(do_not_specialize=["num_groups"])
def keys_kernel(
    keys_ptr,
    results,
    num_groups,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Round the keys of a group [N, M, PARTS, D] to those of `Bytes`.

    Grid: (M', N). Groups from M on are zeros.

    Args:
        keys_ptr, num_groups: Pointer to the keys, and M.
        results: Pointers to keys and group_units of `Bytes`.
    """
    group = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, PARTS)
    dims = tl.arange(0, BLOCK_D)
    mask = (key * 0 + group < num_groups)[:, None] & (dims < HEAD_DIM)[None, :]
    at = ((n * num_groups + group) * PARTS + key)[:, None] * HEAD_DIM + dims[None, :]
    x = tl.load(keys_ptr + at, mask=mask, other=0.0).to(tl.float32)
    size = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), TINY) / 127
    whole = tl.floor(x / size + 0.5)
    first = n * tl.num_programs(0) + group // RUN * RUN
    place = (first * PARTS + key * RUN + group % RUN)[:, None] * BLOCK_D + dims[None, :]
    tl.store(results[0] + place, whole.to(tl.int8))
    tl.store(results[1] + n * tl.num_programs(0) + group, size)


def block_of(num_keys: int) -> int:
    """Return how many groups, of `num_keys` keys each, are scored together: a block. Its keys fill
    one tile, or several where a run has more."""
    return max(RUN, TILE_KEYS // num_keys)


def to_bytes(q: Tensor, keys: Tensor, centre: Tensor | None, scale: float) -> Bytes:
    """Round queries and keys, in the same dtype, to `Bytes`.

    Args:
        q: The mean queries of shares, [N, r, C, D], not yet rotated as keys are.
        keys: [N, M, P, D] of an index in low bits, P a power of 2.
        centre: [N, D], or None for zeros.
        scale: Of the scores.
    """
    q = contiguous_rows(q)
    keys = keys.contiguous()
    n, r, count, dim = q.shape
    _, num_groups, num_keys, _ = keys.shape
    block_d = max(32, power_of_2(dim))
    signs, unit = signs_of(dim, q.device)
    if centre is None:
        centre = q.new_zeros(n, dim)
    whole = block_of(num_keys) * ceil_div(num_groups, block_of(num_keys))
    queries = torch.empty((n, r, count, block_d), dtype=torch.int8, device=q.device)
    units = torch.empty((n, r, count), dtype=torch.float32, device=q.device)
    offsets = torch.empty_like(units)  # begins at a multiple of 16 bytes, too
    stored = torch.empty((n, 1, whole * num_keys, block_d), dtype=torch.int8, device=q.device)
    group_units = torch.empty((n, whole), dtype=torch.float32, device=q.device)
    launch(
        queries_kernel,
        (ceil_div(count, _ROWS), n * r),
        (
            *((q, signs, centre.float().contiguous()), (queries, units, offsets), count, r),
            (unit, float(scale)),
        ),
        (tuple(q.stride()[:-1]),),
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        BLOCK=_ROWS,
        num_warps=4,
    )
    launch(
        keys_kernel,
        (whole, n),
        (keys, (stored, group_units), num_groups),
        PARTS=num_keys,
        RUN=RUN,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return Bytes(queries, units, offsets, stored, group_units, num_keys, num_groups)
