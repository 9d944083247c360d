"""Pooling kernels for groups that one program holds in registers, with any rotation or none."""

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
    softmax,
    store_row,
    store_tokens,
    swap_pairs,
    token_scores,
)


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def pool_short_fwd_kernel(
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
    """Pool whole groups.

    Grid: N * ceil(M / BLOCK_M). A program owns BLOCK_M groups of one n, all their tokens (BLOCK_G
    >= group_size) and all their heads. Reads their K and V once, r rows of q and the tables [g, R /
    2]; writes a row of each core tensor per group. Keys, values, weights and sums are
    float32 in registers.

    Args:
        tokens: Pointers to the queries of last tokens [N, r, M, D], and to k and v [N, M, g, D].
        cores: Pointers to the keys and values of core tokens [N, 1, M, D].
        tables: Pointers to cosines and sines [g, R / 2] in float32.
        strides: Of all tensors but tables; both of `cores` have the same.
    """
    q_ptr, k_ptr, v_ptr = tokens
    core_k_ptr, core_v_ptr = cores
    cos_ptr, sin_ptr = tables
    q_strides, k_strides, v_strides, core_strides = strides
    # Read all tokens of the groups: every head uses them.
    n, groups = owned_groups(num_groups, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    cols, pair, partner, sign = rotation_pairs(BLOCK_D, HALF, INTERLEAVED)
    tile = (groups, rows, cols, num_groups, group_size)
    q_ptr += n * q_strides[0]
    core_k_ptr += n * core_strides[0]
    core_v_ptr += n * core_strides[0]
    k = load_tokens(k_ptr + n * k_strides[0], k_strides, tile, HEAD_DIM)
    v = load_tokens(v_ptr + n * v_strides[0], v_strides, tile, HEAD_DIM)
    cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
    rotation = (cos, sin, partner, sign)

    # Weigh them by the mean of the heads' weights.
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    for h in range(HEADS):
        q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], tile, HEAD_DIM)
        z, _ = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
        weights += softmax(z) / HEADS
    core_v = tl.sum(weights[:, :, None] * v, 1)
    core_k = pool_keys(weights, k, rotation, BLOCK_M, BLOCK_D, HALF)
    store_row(core_k_ptr, core_k, core_strides[2], tile, HEAD_DIM)
    store_row(core_v_ptr, core_v, core_strides[2], tile, HEAD_DIM)


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def pool_short_bwd_kernel(
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
):
    """Compute the gradients of pooling for whole groups.

    Grid: N * ceil(M / BLOCK_M). A program owns BLOCK_M groups of one n, all their tokens and heads:
    no two programs write the same row. Reads K and V once, the gradients of the core tokens, q and
    the tables; recomputes the weights; writes the gradients of all its tokens and of q, or adds to
    those of the tokens. All sums are float32 in registers.

    Args:
        upstream: Pointers to the gradients of core keys and values [N, 1, M, D].
        tokens, tables, strides: As of `pool_short_fwd_kernel`.
        gradients: Pointers to those of `tokens`.
    """
    grad_core_k_ptr, grad_core_v_ptr = upstream
    q_ptr, k_ptr, v_ptr = tokens
    cos_ptr, sin_ptr = tables
    grad_q_ptr, grad_k_ptr, grad_v_ptr = gradients
    grad_core_k_strides, grad_core_v_strides = strides[:2]
    q_strides, k_strides, v_strides = strides[2:5]
    grad_q_strides, grad_k_strides, grad_v_strides = strides[5:]
    n, groups = owned_groups(num_groups, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    cols, pair, partner, sign = rotation_pairs(BLOCK_D, HALF, INTERLEAVED)
    tile = (groups, rows, cols, num_groups, group_size)
    grad_core_k_ptr += n * grad_core_k_strides[0]
    grad_core_v_ptr += n * grad_core_v_strides[0]
    q_ptr += n * q_strides[0]
    grad_q_ptr += n * grad_q_strides[0]
    cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
    k = load_tokens(k_ptr + n * k_strides[0], k_strides, tile, HEAD_DIM)
    v = load_tokens(v_ptr + n * v_strides[0], v_strides, tile, HEAD_DIM)
    grad_k = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_D], tl.float32)
    into_k = load_row(grad_core_k_ptr, grad_core_k_strides[2], tile, HEAD_DIM)
    into_v = load_row(grad_core_v_ptr, grad_core_v_strides[2], tile, HEAD_DIM)
    swapped = swap_pairs(into_k, partner, sign, BLOCK_M, BLOCK_D, HALF)
    back = rotate_back(into_k, swapped, cos, sin, HALF)
    # The weights are the mean over the heads.
    grad_probs = tl.sum(back * k + into_v[:, None, :] * v, 2) / HEADS
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)

    for h in range(HEADS):
        # Back through this head's softmax, to its query and to the keys as they are scored.
        q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], tile, HEAD_DIM)
        z, slope = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
        probs = softmax(z)
        grad_z = probs * (grad_probs - tl.sum(probs * grad_probs, 1)[:, None]) * scale * slope
        grad_q = tl.sum(grad_z[:, :, None] * k, 1)
        store_row(
            head_at(grad_q_ptr, h, grad_q_strides[1]), grad_q, grad_q_strides[2], tile, HEAD_DIM
        )
        grad_k += grad_z[:, :, None] * q[:, None, :]
        weights += probs / HEADS

    # To the keys and values as they are summed.
    grad_k += weights[:, :, None] * back
    grad_v = weights[:, :, None] * into_v[:, None, :]
    grad_k_ptr += n * grad_k_strides[0]
    grad_v_ptr += n * grad_v_strides[0]
    store_tokens(grad_k_ptr, grad_k, grad_k_strides, tile, HEAD_DIM, ADD)
    store_tokens(grad_v_ptr, grad_v, grad_v_strides, tile, HEAD_DIM, ADD)
