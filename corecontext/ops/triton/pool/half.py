"""Pooling kernels for the usual case: short groups, no softcap, and a rotation that pairs column i
with i + HALF and rotates all columns.

Keys are loaded as two halves, so the elements of a pair meet in one thread; elsewhere they are
exchanged through shared memory, which takes twice the time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.pool.group_tile import (
    head_at,
    load_row,
    load_tables,
    load_tokens,
    owned_groups,
    softmax,
    store_row,
    store_tokens,
)


@triton.jit
def _load_token_halves(ptr, strides, tile, HALF: tl.constexpr):
    """Load both halves of a tile's tokens."""
    return load_tokens(ptr, strides, tile, HALF), load_tokens(ptr + HALF, strides, tile, HALF)


@triton.jit
def _store_token_halves(ptr, a, b, strides, tile, HALF: tl.constexpr, ADD: tl.constexpr):
    """Store both halves of a tile's tokens, or add to them."""
    store_tokens(ptr, a, strides, tile, HALF, ADD)
    store_tokens(ptr + HALF, b, strides, tile, HALF, ADD)


@triton.jit
def _load_row_halves(ptr, stride, tile, HALF: tl.constexpr):
    """Load both halves of a row for each group."""
    return load_row(ptr, stride, tile, HALF), load_row(ptr + HALF, stride, tile, HALF)


@triton.jit
def _store_row_halves(ptr, a, b, stride, tile, HALF: tl.constexpr):
    """Store both halves of a row for each group."""
    store_row(ptr, a, stride, tile, HALF)
    store_row(ptr + HALF, b, stride, tile, HALF)


@triton.jit
def _probs(q_a, q_b, k_a, k_b, rows, group_size, scale):
    """Return the weights of the tokens under their group's query, [groups, rows], 0 outside."""
    z = (tl.sum(q_a[:, None, :] * k_a, 2) + tl.sum(q_b[:, None, :] * k_b, 2)) * scale
    return softmax(tl.where((rows < group_size)[None, :], z, -float("inf")))


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def pool_half_fwd_kernel(
    tokens,
    cores,
    tables,
    num_groups,
    group_size,
    scale,
    strides,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Pool whole groups; arguments, grid, reads, writes and float32 as in
    `pool_short_fwd_kernel`."""
    q_ptr, k_ptr, v_ptr = tokens
    core_k_ptr, core_v_ptr = cores
    cos_ptr, sin_ptr = tables
    q_strides, k_strides, v_strides, core_strides = strides
    n, groups = owned_groups(num_groups, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    cols = tl.arange(0, HALF)
    tile = (groups, rows, cols, num_groups, group_size)
    q_ptr += n * q_strides[0]
    core_k_ptr += n * core_strides[0]
    core_v_ptr += n * core_strides[0]
    k_a, k_b = _load_token_halves(k_ptr + n * k_strides[0], k_strides, tile, HALF)
    v_a, v_b = _load_token_halves(v_ptr + n * v_strides[0], v_strides, tile, HALF)
    cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, cols, group_size, HALF)

    # The mean of the heads' weights.
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    for h in range(HEADS):
        q_a, q_b = _load_row_halves(head_at(q_ptr, h, q_strides[1]), q_strides[2], tile, HALF)
        weights += _probs(q_a, q_b, k_a, k_b, rows, group_size, scale) / HEADS
    w = weights[:, :, None]
    core_a = tl.sum(w * (k_a * cos - k_b * sin), 1)
    core_b = tl.sum(w * (k_b * cos + k_a * sin), 1)
    _store_row_halves(core_k_ptr, core_a, core_b, core_strides[2], tile, HALF)
    core_a = tl.sum(w * v_a, 1)
    core_b = tl.sum(w * v_b, 1)
    _store_row_halves(core_v_ptr, core_a, core_b, core_strides[2], tile, HALF)


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def pool_half_bwd_kernel(
    upstream,
    tokens,
    tables,
    gradients,
    num_groups,
    group_size,
    scale,
    strides,
    HEADS: tl.constexpr,
    ADD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Compute the gradients of pooling; arguments, grid, reads, writes and float32 as in
    `pool_short_bwd_kernel`."""
    grad_core_k_ptr, grad_core_v_ptr = upstream
    q_ptr, k_ptr, v_ptr = tokens
    cos_ptr, sin_ptr = tables
    grad_q_ptr, grad_k_ptr, grad_v_ptr = gradients
    grad_core_k_strides, grad_core_v_strides = strides[:2]
    q_strides, k_strides, v_strides = strides[2:5]
    grad_q_strides, grad_k_strides, grad_v_strides = strides[5:]
    n, groups = owned_groups(num_groups, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    cols = tl.arange(0, HALF)
    tile = (groups, rows, cols, num_groups, group_size)
    q_ptr += n * q_strides[0]
    grad_q_ptr += n * grad_q_strides[0]
    grad_k_ptr += n * grad_k_strides[0]
    grad_v_ptr += n * grad_v_strides[0]
    grad_core_k_ptr += n * grad_core_k_strides[0]
    grad_core_v_ptr += n * grad_core_v_strides[0]
    k_a, k_b = _load_token_halves(k_ptr + n * k_strides[0], k_strides, tile, HALF)
    cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, cols, group_size, HALF)
    into_a, into_b = _load_row_halves(grad_core_k_ptr, grad_core_k_strides[2], tile, HALF)
    value_a, value_b = _load_row_halves(grad_core_v_ptr, grad_core_v_strides[2], tile, HALF)
    into_a = into_a[:, None, :]
    into_b = into_b[:, None, :]
    value_a = value_a[:, None, :]
    value_b = value_b[:, None, :]
    v_a, v_b = _load_token_halves(v_ptr + n * v_strides[0], v_strides, tile, HALF)

    # The core key's gradient, rotated back to each token.
    back_a = into_a * cos + into_b * sin
    back_b = into_b * cos - into_a * sin
    # The weights are the mean over the heads.
    grad_probs = tl.sum(back_a * k_a + back_b * k_b + value_a * v_a + value_b * v_b, 2) / HEADS

    # Back through each head's softmax, to its query and to the keys as they are scored.
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    grad_a = tl.zeros([BLOCK_M, BLOCK_G, HALF], tl.float32)
    grad_b = tl.zeros([BLOCK_M, BLOCK_G, HALF], tl.float32)
    for h in range(HEADS):
        q_a, q_b = _load_row_halves(head_at(q_ptr, h, q_strides[1]), q_strides[2], tile, HALF)
        probs = _probs(q_a, q_b, k_a, k_b, rows, group_size, scale)
        grad_z = (probs * (grad_probs - tl.sum(probs * grad_probs, 1)[:, None]) * scale)[:, :, None]
        grad_q_a = tl.sum(grad_z * k_a, 1)
        grad_q_b = tl.sum(grad_z * k_b, 1)
        at = head_at(grad_q_ptr, h, grad_q_strides[1])
        _store_row_halves(at, grad_q_a, grad_q_b, grad_q_strides[2], tile, HALF)
        grad_a += grad_z * q_a[:, None, :]
        grad_b += grad_z * q_b[:, None, :]
        weights += probs / HEADS

    # To the keys and values as they are summed.
    w = weights[:, :, None]
    grad_a += w * back_a
    grad_b += w * back_b
    _store_token_halves(grad_k_ptr, grad_a, grad_b, grad_k_strides, tile, HALF, ADD)
    _store_token_halves(grad_v_ptr, w * value_a, w * value_b, grad_v_strides, tile, HALF, ADD)
