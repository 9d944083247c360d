"""Score groups by index keys: the kernel that reads these, once."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.fetch_rule import groups_of_share
from corecontext.ops.triton.primitives import LOG2E, TINY, dot, load_tile, log2_scores

_MOST = tl.constexpr(2.0**100)  # of a mass; sums of so many groups are finite


@triton.jit
def _index_scores(q, index, groups, key, MASKED: tl.constexpr, sizes):
    """Return the scores [rows, groups] of one key of each group, in units of log 2.

    Args:
        index: Pointer to the index keys of a KV head, number of groups, pointer to the biases of
            the head, scale and softcap.
        sizes: HEAD_DIM, BLOCK_D, HAS_BIAS, HAS_SOFTCAP, KEYS, BLOCK_N.
    """
    index_ptr, num_groups, bias_ptr, scale, softcap = index
    HEAD_DIM: tl.constexpr = sizes[0]
    BLOCK_D: tl.constexpr = sizes[1]
    HAS_BIAS: tl.constexpr = sizes[2]
    HAS_SOFTCAP: tl.constexpr = sizes[3]
    dims = tl.arange(0, BLOCK_D)
    KEYS: tl.constexpr = sizes[4]
    tile = index_ptr + ((groups * KEYS + key) * HEAD_DIM)[None, :] + dims[:, None]
    k = load_tile(tile, groups, num_groups, dims, MASKED, True, HEAD_DIM, BLOCK_D)
    products = dot(q, k)
    if HAS_BIAS or HAS_SOFTCAP:
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + groups, mask=groups < num_groups, other=0.0)[None, :]
        scores, _ = log2_scores(products, scale, bias, softcap, HAS_SOFTCAP)
    else:
        scores = products * (scale * LOG2E)
    return scores


@triton.jit
def _store_masses(
    masses_ptr, sums, q, index, begin, end, reference, rows, MASKED: tl.constexpr, sizes
):
    """Store the masses of groups begin .. end-1 and add them to the rows' sums.

    Args:
        rows: Offsets of the masses of the rows, which of them exist, and groups that each sees.
    """
    place, exists, visible = rows
    KEYS: tl.constexpr = sizes[4]
    BLOCK_N: tl.constexpr = sizes[5]
    offs = tl.arange(0, BLOCK_N)
    total = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
    num_tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
    for step in tl.range(0, num_tiles * KEYS):
        groups = begin + step // KEYS * BLOCK_N + offs
        scores = _index_scores(q, index, groups, step % KEYS, MASKED, sizes)
        total += tl.exp2(scores - reference[:, None])
        if step % KEYS == KEYS - 1:
            kept = exists[:, None]
            if MASKED:
                kept = kept & (groups[None, :] < visible[:, None])
                total = tl.where(kept, total, 0.0)
            total = tl.minimum(total, _MOST)
            sums += tl.sum(total, 1)
            at = masses_ptr + place[:, None] + groups[None, :]
            tl.store(at, total.to(masses_ptr.dtype.element_ty), mask=kept)
            total = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
    return sums


@triton.jit(
    do_not_specialize=["num_groups", "first_share", "q_end", "first_row", "num_rows", "num_runs"]
)
def group_masses_kernel(
    q_ptr,
    index_ptr,
    bias_ptr,
    masses_ptr,
    sums_ptr,
    num_groups,
    first_share,
    q_end,
    first_row,
    num_rows,
    num_runs,
    scale,
    softcap,
    q_strides,
    num_heads,
    heads_per_n,
    share,
    group_size,
    window_size,
    sink_groups,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    RUN: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the masses of the groups that each share sees, sum_p exp(score of key p) over a factor
    of the row, [N r, num_rows, num_runs RUN], and their sums, [N r, num_rows] in float32: of the
    shares first_row .. first_row + num_rows - 1 of the call.

    Args:
        index_ptr: [N, M, KEYS, D], contiguous, fewer than 2^31 elements for each of the N.

    Grid: (tiles of shares x N r,). A program owns BLOCK_M shares of one head. The factor is the
    largest score among the first keys of the first BLOCK_N groups.
    """
    tile = tl.num_programs(0) // num_heads - 1 - tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    n = head // heads_per_n
    own = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = own < num_rows
    rows = first_row + own
    rule = (group_size, window_size, sink_groups)
    shares = (first_share, share, q_end)
    visible = groups_of_share(rows, shares, rule, num_groups)
    first = groups_of_share(first_row + tile * BLOCK_M, shares, rule, num_groups)
    last = first_row + tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1
    end = groups_of_share(last, shares, rule, num_groups)
    sizes: tl.constexpr = (HEAD_DIM, BLOCK_D, HAS_BIAS, HAS_SOFTCAP, KEYS, BLOCK_N)

    dims = tl.arange(0, BLOCK_D)
    q_tile = q_ptr + n * q_strides[0] + head % heads_per_n * q_strides[1]
    q_tile += rows.to(tl.int64)[:, None] * q_strides[2] + dims[None, :]
    q = tl.load(q_tile, mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    index = (
        index_ptr + n * num_groups * KEYS * HEAD_DIM,
        num_groups,
        bias_ptr + head * num_groups,
        scale,
        softcap,
    )
    groups = tl.arange(0, BLOCK_N)
    scores = _index_scores(q, index, groups, 0, True, sizes)
    scores = tl.where(groups[None, :] < visible[:, None], scores, -float("inf"))
    reference = tl.max(scores, 1)
    reference = tl.where(visible > 0, reference, 0.0)

    masses_ptr += head * num_rows * num_runs * RUN
    places = (own * num_runs * RUN, exists, visible)
    sums = tl.zeros([BLOCK_M], tl.float32)
    whole = first // BLOCK_N * BLOCK_N
    sums = _store_masses(
        masses_ptr, sums, q, index, whole * 0, whole, reference, places, False, sizes
    )
    sums = _store_masses(masses_ptr, sums, q, index, whole, end, reference, places, True, sizes)
    # A row that sees no group: not 0 / 0.
    tl.store(sums_ptr + head * num_rows + own, tl.maximum(sums, TINY), mask=exists)
