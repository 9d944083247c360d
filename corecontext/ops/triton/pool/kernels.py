"""Pool groups and compute the gradients, each program with whole groups in registers.

Keys are loaded as pairs of columns (group_tile.py), so the elements that a rotation mixes meet in
one thread; exchanged through shared memory they took twice the time.
"""

import triton
import triton.language as tl

from corecontext.ops.triton.pool.group_tile import (
    column_pairs,
    entropy,
    head_at,
    load_row,
    load_tokens,
    owned_groups,
    pool_pairs,
    softmax,
    store_row,
    store_tokens,
    table_rows,
    token_scores,
)
from corecontext.ops.triton.primitives import TINY, integers


@triton.jit
def _mean_weights(query, k, rows, group_size, factors, SHAPE: tl.constexpr):
    """Return the pooling weights of tokens, the mean over query heads, [groups, rows], 0 outside.

    Args:
        query: Pointer to the queries of groups' last tokens, their strides, and the tile.
        k: Columns a and b of the keys.
    """
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_G: tl.constexpr = SHAPE.block_g
    q_ptr, q_strides, tile = query
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    for h in range(SHAPE.heads):
        q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], tile, SHAPE.dim)
        z, _ = token_scores(q, k, rows, group_size, factors, SHAPE.has_softcap)
        weights += softmax(z) / SHAPE.heads
    return weights


@triton.jit
def pool_fwd_kernel(tokens, cores, tables, numbers, factors, strides, SHAPE: tl.constexpr):
    """Pool whole groups.

    Grid: N * ceil(M / block_m). A program owns block_m groups of one sequence, all their tokens
    (block_g >= group_size) and all r heads. Reads their keys and values once, r queries a group and
    the tables; writes a core key and value for each group, and its mass (docs/math.md, eq. 14).
    Keys, values, weights and sums are float32 in registers.

    Args:
        tokens: Pointers to queries of groups' last tokens [N, r, M, D], k and v [N, M, g, D].
        cores: Pointers to keys and values of core tokens [N, 1, M, D], float32 masses [N, 1, M].
        tables: Pointers to cosines and sines of the rotation to the middle, [g, R / 2] in float32.
        numbers: M and g.
        strides: Of q, k and v, and those that the keys and values of core tokens both have.
        SHAPE: `launcher.Shape`.
    """
    num_groups, group_size = integers(numbers)
    q_ptr, k_ptr, v_ptr = tokens
    q_strides, k_strides, v_strides, core_strides = strides
    # Read all tokens of the groups: every head uses them.
    n, groups = owned_groups(num_groups, SHAPE.block_m)
    rows = tl.arange(0, SHAPE.block_g).to(tl.int64)
    pairs, a, b = column_pairs(SHAPE.block_p, SHAPE.dim, SHAPE.half, SHAPE.interleaved)
    tile = (groups, rows, a, b, num_groups, group_size)
    k = load_tokens(k_ptr + n * k_strides[0], k_strides, tile, SHAPE.dim)
    v_a, v_b = load_tokens(v_ptr + n * v_strides[0], v_strides, tile, SHAPE.dim)
    cos, sin = table_rows(tables[0], tables[1], rows, pairs, group_size, SHAPE.half)

    # Weigh them by the mean of the heads' weights.
    query = (q_ptr + n * q_strides[0], q_strides, tile)
    weights = _mean_weights(query, k, rows, group_size, factors, SHAPE)
    w = weights[:, :, None]
    core = n * core_strides[0]
    store_row(cores[0] + core, pool_pairs(w, k, cos, sin), core_strides[2], tile, SHAPE.dim)
    core_v = (tl.sum(w * v_a, 1), tl.sum(w * v_b, 1))
    store_row(cores[1] + core, core_v, core_strides[2], tile, SHAPE.dim)
    if SHAPE.has_mass:
        tl.store(cores[2] + n * num_groups + groups, entropy(weights), mask=groups < num_groups)


@triton.jit
def pool_bwd_kernel(
    upstream,
    tokens,
    tables,
    gradients,
    numbers,
    factors,
    strides,
    ADD: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Compute the gradients of pooling for whole groups, and of their masses.

    Grid: as of `pool_fwd_kernel`: no two programs write the same row. Reads keys and values once,
    the gradients of the core tokens, q and the tables; recomputes the weights; writes the gradients
    of all its tokens and of q. All sums are float32 in registers.

    Args:
        upstream: Pointers to gradients of core keys and values [N, 1, M, D], and masses [N, 1, M].
        tokens, tables, numbers, SHAPE: As of `pool_fwd_kernel`.
        gradients: Pointers to those of `tokens`.
        strides: Of the gradients of core keys and values, of tokens, and of their gradients.
        ADD: Whether to add to the gradients of keys and values that are there.
    """
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_G: tl.constexpr = SHAPE.block_g
    BLOCK_P: tl.constexpr = SHAPE.block_p
    num_groups, group_size = integers(numbers)
    q_ptr, k_ptr, v_ptr = tokens
    grad_q_ptr, grad_k_ptr, grad_v_ptr = gradients
    grad_core_k_strides, grad_core_v_strides = strides[:2]
    q_strides, k_strides, v_strides = strides[2:5]
    grad_q_strides, grad_k_strides, grad_v_strides = strides[5:]
    n, groups = owned_groups(num_groups, SHAPE.block_m)
    rows = tl.arange(0, SHAPE.block_g).to(tl.int64)
    pairs, a, b = column_pairs(SHAPE.block_p, SHAPE.dim, SHAPE.half, SHAPE.interleaved)
    tile = (groups, rows, a, b, num_groups, group_size)
    q_ptr += n * q_strides[0]
    grad_q_ptr += n * grad_q_strides[0]
    k = load_tokens(k_ptr + n * k_strides[0], k_strides, tile, SHAPE.dim)
    k_a, k_b = k
    cos, sin = table_rows(tables[0], tables[1], rows, pairs, group_size, SHAPE.half)
    cos = cos[None, :, :]
    sin = sin[None, :, :]
    # Gradients of the core key (into) and the core value (value), the same for all tokens.
    into = upstream[0] + n * grad_core_k_strides[0]
    into_a, into_b = load_row(into, grad_core_k_strides[2], tile, SHAPE.dim)
    into = upstream[1] + n * grad_core_v_strides[0]
    value_a, value_b = load_row(into, grad_core_v_strides[2], tile, SHAPE.dim)
    into_a = into_a[:, None, :]
    into_b = into_b[:, None, :]
    value_a = value_a[:, None, :]
    value_b = value_b[:, None, :]
    v_a, v_b = load_tokens(v_ptr + n * v_strides[0], v_strides, tile, SHAPE.dim)

    # The core key's gradient, rotated back from the middle to each token.
    back_a = into_a * cos + into_b * sin
    back_b = into_b * cos - into_a * sin
    # The weights are the mean over the heads.
    products = back_a * k_a + back_b * k_b + value_a * v_a + value_b * v_b
    grad_probs = tl.sum(products, 2) / SHAPE.heads
    if SHAPE.has_mass:
        # The derivative is -1 - log w; the constant vanishes in the softmax's backward.
        weights = _mean_weights((q_ptr, q_strides, tile), k, rows, group_size, factors, SHAPE)
        place = upstream[2] + n * num_groups + groups
        grad_mass = tl.load(place, mask=groups < num_groups, other=0.0) / SHAPE.heads
        grad_probs -= grad_mass[:, None] * tl.log(tl.maximum(weights, TINY))

    # Back through each head's softmax and the scale, to its query and the keys as they are scored.
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    grad_a = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_P], tl.float32)
    grad_b = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_P], tl.float32)
    for h in range(SHAPE.heads):
        q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], tile, SHAPE.dim)
        z, slope = token_scores(q, k, rows, group_size, factors, SHAPE.has_softcap)
        probs = softmax(z)
        grad_z = probs * (grad_probs - tl.sum(probs * grad_probs, 1)[:, None]) * factors[0]
        if SHAPE.has_softcap:
            grad_z *= slope
        grad_z = grad_z[:, :, None]
        grad_q = (tl.sum(grad_z * k_a, 1), tl.sum(grad_z * k_b, 1))
        at = head_at(grad_q_ptr, h, grad_q_strides[1])
        store_row(at, grad_q, grad_q_strides[2], tile, SHAPE.dim)
        grad_a += grad_z * q[0][:, None, :]
        grad_b += grad_z * q[1][:, None, :]
        weights += probs / SHAPE.heads

    # To the keys and values as they are summed.
    w = weights[:, :, None]
    grad_k = (grad_a + w * back_a, grad_b + w * back_b)
    grad_k_ptr += n * grad_k_strides[0]
    grad_v_ptr += n * grad_v_strides[0]
    store_tokens(grad_k_ptr, grad_k, grad_k_strides, tile, SHAPE.dim, ADD)
    grad_v = (w * value_a, w * value_b)
    store_tokens(grad_v_ptr, grad_v, grad_v_strides, tile, SHAPE.dim, ADD)
