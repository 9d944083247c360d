"""Pooling kernels for groups too large for the registers of a program: it walks one group in blocks
of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.pool.group_tile import (
    head_at,
    load_row,
    load_tables,
    load_tokens,
    owned_groups,
    pool_keys,
    rotate_back,
    rotation_pairs,
    store_row,
    store_tokens,
    swap_pairs,
    token_scores,
)


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def pool_long_fwd_kernel(
    tokens,
    cores,
    tables,
    num_groups,
    group_size,
    scale,
    softcap,
    strides,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Pool long groups.

    Grid: N * M. A program owns one group (BLOCK_M = 1) and walks its tokens BLOCK_G at a time, once
    for each head, with an online softmax. Reads K and V r times, all but the first from cache;
    writes as `pool_short_fwd_kernel`, whose arguments it has. Maxima, sums and pooled rows are
    float32 in registers.
    """
    q_ptr, k_ptr, v_ptr = tokens
    core_k_ptr, core_v_ptr = cores
    cos_ptr, sin_ptr = tables
    q_strides, k_strides, v_strides, core_strides = strides
    n, groups = owned_groups(num_groups, BLOCK_M)
    cols, pair, partner, sign = rotation_pairs(BLOCK_D, HALF, INTERLEAVED)
    group = (groups, groups, cols, num_groups, group_size)  # for single rows, which have no tokens
    q_ptr += n * q_strides[0]
    k_ptr += n * k_strides[0]
    v_ptr += n * v_strides[0]
    core_k_ptr += n * core_strides[0]
    core_v_ptr += n * core_strides[0]
    core_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    core_v = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for h in range(HEADS):
        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sum_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        sum_v = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], group, HEAD_DIM)
        for start in range(0, group_size, BLOCK_G):
            rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
            tile = (groups, rows, cols, num_groups, group_size)
            k = load_tokens(k_ptr, k_strides, tile, HEAD_DIM)
            v = load_tokens(v_ptr, v_strides, tile, HEAD_DIM)
            # The sums so far fade to the new maximum.
            z, _ = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
            new_top = tl.maximum(top, tl.max(z, 1))
            keep = tl.exp(top - new_top)
            probs = tl.exp(z - new_top[:, None])
            top = new_top
            total *= keep
            sum_k *= keep[:, None]
            sum_v *= keep[:, None]
            total += tl.sum(probs, 1)
            sum_v += tl.sum(probs[:, :, None] * v, 1)
            cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
            sum_k += pool_keys(probs, k, (cos, sin, partner, sign), BLOCK_M, BLOCK_D, HALF)
        core_k += sum_k / total[:, None] / HEADS
        core_v += sum_v / total[:, None] / HEADS
    store_row(core_k_ptr, core_k, core_strides[2], group, HEAD_DIM)
    store_row(core_v_ptr, core_v, core_strides[2], group, HEAD_DIM)


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def pool_long_bwd_kernel(
    upstream,
    tokens,
    tables,
    gradients,
    num_groups,
    group_size,
    scale,
    softcap,
    strides,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute the gradients of pooling for long groups.

    Grid: N * M. A program owns one group (BLOCK_M = 1) and walks its tokens BLOCK_G at a time: for
    each head once for the softmax and its backward's sum and once for the gradient of q, then once
    for those of K and V. Reads K 2 r + 1 times and V as often, all but the first from cache; writes
    as `pool_short_bwd_kernel`, whose arguments it has. Each head's maximum, sum and sum of probs *
    grad_probs wait in vectors of BLOCK_H >= r float32 in registers.
    """
    grad_core_k_ptr, grad_core_v_ptr = upstream
    q_ptr, k_ptr, v_ptr = tokens
    cos_ptr, sin_ptr = tables
    grad_q_ptr, grad_k_ptr, grad_v_ptr = gradients
    grad_core_k_strides, grad_core_v_strides = strides[:2]
    q_strides, k_strides, v_strides = strides[2:5]
    grad_q_strides, grad_k_strides, grad_v_strides = strides[5:]
    n, groups = owned_groups(num_groups, BLOCK_M)
    cols, pair, partner, sign = rotation_pairs(BLOCK_D, HALF, INTERLEAVED)
    group = (groups, groups, cols, num_groups, group_size)  # for single rows, which have no tokens
    grad_core_k_ptr += n * grad_core_k_strides[0]
    grad_core_v_ptr += n * grad_core_v_strides[0]
    q_ptr += n * q_strides[0]
    k_ptr += n * k_strides[0]
    v_ptr += n * v_strides[0]
    grad_q_ptr += n * grad_q_strides[0]
    grad_k_ptr += n * grad_k_strides[0]
    grad_v_ptr += n * grad_v_strides[0]
    heads = tl.arange(0, BLOCK_H)
    tops = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    means = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)

    into_k = load_row(grad_core_k_ptr, grad_core_k_strides[2], group, HEAD_DIM)
    into_v = load_row(grad_core_v_ptr, grad_core_v_strides[2], group, HEAD_DIM)
    swapped = swap_pairs(into_k, partner, sign, BLOCK_M, BLOCK_D, HALF)

    for h in range(HEADS):
        q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], group, HEAD_DIM)

        # The softmax's maximum and sum, and the mean that its backward subtracts.
        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        mean = tl.zeros([BLOCK_M], tl.float32)
        for start in range(0, group_size, BLOCK_G):
            rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
            tile = (groups, rows, cols, num_groups, group_size)
            k = load_tokens(k_ptr, k_strides, tile, HEAD_DIM)
            v = load_tokens(v_ptr, v_strides, tile, HEAD_DIM)
            cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
            back = rotate_back(into_k, swapped, cos, sin, HALF)
            grad_probs = tl.sum(back * k + into_v[:, None, :] * v, 2)
            z, _ = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
            new_top = tl.maximum(top, tl.max(z, 1))
            keep = tl.exp(top - new_top)
            probs = tl.exp(z - new_top[:, None])
            total = total * keep + tl.sum(probs, 1)
            mean = mean * keep + tl.sum(probs * grad_probs, 1)
            top = new_top
        mean = mean / total

        # The gradient of the query, from all tokens.
        grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(0, group_size, BLOCK_G):
            rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
            tile = (groups, rows, cols, num_groups, group_size)
            k = load_tokens(k_ptr, k_strides, tile, HEAD_DIM)
            v = load_tokens(v_ptr, v_strides, tile, HEAD_DIM)
            cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
            back = rotate_back(into_k, swapped, cos, sin, HALF)
            grad_probs = tl.sum(back * k + into_v[:, None, :] * v, 2)
            z, slope = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
            probs = tl.exp(z - top[:, None]) / total[:, None]
            grad_z = probs * (grad_probs - mean[:, None]) * slope
            grad_q += tl.sum(grad_z[:, :, None] * k, 1)
        # The weights are the mean over the heads.
        grad_q = grad_q * (scale / HEADS)
        store_row(
            head_at(grad_q_ptr, h, grad_q_strides[1]), grad_q, grad_q_strides[2], group, HEAD_DIM
        )

        # Keep the head's sums for the last walk.
        here = (heads == h)[None, :]
        tops = tl.where(here, top[:, None], tops)
        totals = tl.where(here, total[:, None], totals)
        means = tl.where(here, mean[:, None], means)

    # The gradients of the tokens, each from all heads.
    for start in range(0, group_size, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
        tile = (groups, rows, cols, num_groups, group_size)
        cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
        k = load_tokens(k_ptr, k_strides, tile, HEAD_DIM)
        v = load_tokens(v_ptr, v_strides, tile, HEAD_DIM)
        grad_k = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_D], tl.float32)
        grad_v = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_D], tl.float32)
        back = rotate_back(into_k, swapped, cos, sin, HALF)
        grad_probs = tl.sum(back * k + into_v[:, None, :] * v, 2)
        for h in range(HEADS):
            q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], group, HEAD_DIM)
            z, slope = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
            here = (heads == h)[None, :]
            top = tl.sum(tl.where(here, tops, 0.0), 1)
            total = tl.sum(tl.where(here, totals, 0.0), 1)
            mean = tl.sum(tl.where(here, means, 0.0), 1)
            probs = tl.exp(z - top[:, None]) / total[:, None] * (1 / HEADS)
            grad_z = probs * (grad_probs - mean[:, None]) * scale * slope
            grad_k += probs[:, :, None] * back + grad_z[:, :, None] * q[:, None, :]
            grad_v += probs[:, :, None] * into_v[:, None, :]
        store_tokens(grad_k_ptr, grad_k, grad_k_strides, tile, HEAD_DIM, ADD)
        store_tokens(grad_v_ptr, grad_v, grad_v_strides, tile, HEAD_DIM, ADD)
