"""Attend to the raw tokens of chosen groups in a decoding step, and take their core tokens out of
the attention to a compact cache."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.decode import tile_products, weighted_sum
from corecontext.ops.triton.primitives import log2_scores, softmax_step


@triton.jit
def store_raw(tokens, raw, position, room, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the new key and value of a row at its position; padding has none.

    Args:
        tokens: Pointers to the new key and value.
        raw: Pointers to the row's raw keys and values.
        room: Positions that there are.
    """
    dims = tl.arange(0, BLOCK_D)
    mask = dims < HEAD_DIM
    at = tl.maximum(position, 0).to(tl.int64) * HEAD_DIM + dims
    stored = tl.where((position >= 0) & (position < room), HEAD_DIM, 0)
    k = tl.load(tokens[0] + dims, mask=mask, other=0.0)
    v = tl.load(tokens[1] + dims, mask=mask, other=0.0)
    # planted: fetch: a fused step leaves its raw token unstored
    tl.store(raw[0] + at, k, mask=dims < stored)
    tl.store(raw[1] + at, v, mask=dims < stored)


@triton.jit
def fetched_sums(
    q,
    raw,
    chosen_ptr,
    share,
    sizes,
    scale,
    SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from all heads to the raw tokens of a share of the chosen groups; return the sums for
    `store_part`.

    Args:
        q: [BLOCK_M, BLOCK_D].
        raw: Pointers to the row's raw keys and values.
        chosen_ptr: Numbers of the row's groups, -1 for none.
        sizes: Groups of a share, groups chosen, and group_size.
    """
    groups_each, num_chosen, group_size = sizes
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    offs = tl.arange(0, BLOCK_N)
    begin = share * groups_each * group_size
    end = tl.minimum(begin + groups_each * group_size, num_chosen * group_size)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        place = start + offs
        group = tl.load(chosen_ptr + place // group_size, mask=place < end, other=-1)
        seen = group >= 0
        # planted: fetch: a fused step reads groups as if there were no first tokens
        token = tl.where(seen, group, 0).to(tl.int64) * group_size + (place % group_size + SINKS)
        at = token[:, None] * HEAD_DIM + dims[None, :]
        exists = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(raw[0] + at, mask=exists, other=0.0)
        v = tl.load(raw[1] + at, mask=exists, other=0.0)
        products = tile_products(q, k, VECTOR)
        scores, _ = log2_scores(products, scale, 0.0, 1.0, False)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, True
        )
        acc = acc * fade[:, None] + weighted_sum(weights, v, VECTOR)
    return acc, running_sum, running_max


@triton.jit
def without_chosen(
    q,
    sums,
    buffers,
    chosen_ptr,
    bounds,
    first_core,
    num_chosen,
    scale,
    HAS_MASS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Take the core tokens of chosen groups out of the sums over entries.

    In half precision up to 2^-9 of their weight stays, as in any weight; the raw tokens that come
    instead weigh about as much.

    Args:
        buffers: As of `attend_entries`.
        bounds: The entries that the sums count.
        first_core: The entry of the first core token.
    """
    acc, total, highest = sums
    begin, end = bounds
    dims = tl.arange(0, BLOCK_D)
    offs = tl.arange(0, BLOCK_N)
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    before = total
    for start in range(0, num_chosen, BLOCK_N):
        group = tl.load(chosen_ptr + start + offs, mask=start + offs < num_chosen, other=-1)
        entry = group + first_core
        counted = (group >= 0) & (entry >= begin) & (entry < end)
        if tl.max(counted.to(tl.int32), 0) > 0:
            at = entry.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            mask = counted[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(buffers[0] + at, mask=mask, other=0.0)
            v = tl.load(buffers[1] + at, mask=mask, other=0.0)
            mass = 0.0
            if HAS_MASS:
                mass = tl.load(buffers[4] + entry, mask=counted, other=0.0)[None, :]
            products = tile_products(q, k, VECTOR)
            scores = log2_scores(products, scale, mass, 1.0, False)[0]
            # planted: fetch: chosen groups keep their core tokens in a step's sums
            weights = tl.where(counted[None, :], tl.exp2(scores - shift[:, None]), 0.0)
            total -= tl.sum(weights, 1)
            acc -= weighted_sum(weights, v, VECTOR)
    # Of less than rounding leaves nothing counts.
    seen = total > before * 1e-6
    highest = tl.where(seen, highest, -float("inf"))
    return tl.where(seen[:, None], acc, 0.0), tl.where(seen, total, 0.0), highest


@triton.jit
def joined_sums(first, second):
    """Return the sums of two parts of a softmax as those of the whole."""
    acc, total, highest = first
    acc_2, total_2, highest_2 = second
    new_max = tl.maximum(highest, highest_2)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    fade = tl.exp2(highest - shift)
    fade_2 = tl.exp2(highest_2 - shift)
    acc = acc * fade[:, None] + acc_2 * fade_2[:, None]
    return acc, total * fade + total_2 * fade_2, new_max
