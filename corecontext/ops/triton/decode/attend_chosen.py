"""Attend to the tokens of chosen groups in a decoding step."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.decode.plain_step import tile_products, weighted_sum
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
    # mutant fetch: a fused step leaves its raw token unstored
    tl.store(raw[0] + at, k, mask=dims < stored)
    tl.store(raw[1] + at, v, mask=dims < stored)


@triton.jit
def fetched_sums(
    q,
    buffers,
    numbers_ptr,
    bounds,
    sizes,
    scale,
    HAS_MASS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from all heads to a share of the tokens of chosen groups; return the sums for
    `store_part`.

    Args:
        q: [BLOCK_M, BLOCK_D].
        buffers: Pointers to the row's keys, values and masses.
        numbers_ptr: Numbers of the row's groups, -1 for none.
        bounds: The share's first token of those of all chosen groups, and one past its last.
        sizes: Tokens of a group, before the first group, in all, and, where HAS_MASS, with masses.
    """
    group_size, before, room, with_mass = sizes
    begin, end = bounds
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    offs = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        place = start + offs
        group = tl.load(numbers_ptr + place // group_size, mask=place < end, other=-1)
        seen = group >= 0
        # mutant fetch: a fused step reads groups as if there were no first tokens
        token = tl.where(seen, group, 0).to(tl.int64) * group_size + (place % group_size + before)
        seen = seen & (token < room)
        at = token[:, None] * HEAD_DIM + dims[None, :]
        exists = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(buffers[0] + at, mask=exists, other=0.0)
        v = tl.load(buffers[1] + at, mask=exists, other=0.0)
        mass = 0.0
        if HAS_MASS:
            mass = tl.load(buffers[2] + token, mask=seen & (token < with_mass), other=0.0)[None, :]
        products = tile_products(q, k, VECTOR)
        scores, _ = log2_scores(products, scale, mass, 1.0, False)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, True
        )
        acc = acc * fade[:, None] + weighted_sum(weights, v, VECTOR)
    return acc, running_sum, running_max


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
