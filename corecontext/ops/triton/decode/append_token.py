"""Append a token in a decoding step: store it, attend to it alone, pool the group that it closes.

No other program of the step reads what this writes: the new token comes from the arguments; its
ring slot held a token that no query sees any more; and the core token of the group that it closes
is not visible yet, since the query at t sees (t + 1 - s) // g groups and there are (t + 1) / g.

In 8 bits the token is rounded first, then attended to and pooled as it was rounded, as everywhere
(cache/eight_bit.py). Pooling holds columns a and b of all pairs in two tensors, `_a` and `_b`;
its tiles have a leading 1, one group, as functions of group_tile.py take tiles of groups.
"""

import triton
import triton.language as tl

from corecontext.ops.triton.decode.codes import (
    codes_of,
    dequantize,
    load_scales,
    round_to_codes,
    scale_of,
    store_core,
)
from corecontext.ops.triton.pool.group_tile import (
    column_pairs,
    entropy,
    pool_pairs,
    table_rows,
    token_scores,
)
from corecontext.ops.triton.primitives import log2_scores, tile_mask


@triton.jit
def append_token(
    tokens,
    cache,
    tables,
    partial,
    place,
    factors,
    CACHE: tl.constexpr,
    POOLING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the new token, pool the group that it closes, and write the part of the token alone.

    Args:
        tokens: Pointer to the queries of a KV head, the stride of a head, pointers to its k and v.
        cache: Pointers to a sequence's keys, values, scales of keys and of values, and masses.
        tables: Pointers to cosines and sines [g, R / 2] of the rotation to a group's middle.
        partial: Pointers to this part's output [heads, D] and log-sum-exp [heads].
        place: New token's position (below 0: padding), ring slot; capacity, ring_size, group_size.
        CACHE, POOLING, TILE: `plan.CacheForm`, `plan.Pooling` and `plan.Tile`.
    """
    q_ptr, q_stride, k_ptr, v_ptr = tokens
    keys_ptr, values_ptr, ks_ptr, vs_ptr, mass_ptr = cache
    acc_ptr, lse_ptr = partial
    position, slot, capacity, ring_size, group_size = place
    scale = factors[0]
    softcap = factors[1]
    SINKS: tl.constexpr = CACHE.sinks
    KIND: tl.constexpr = CACHE.kind
    BLOCK_R: tl.constexpr = POOLING.block_r
    dims = tl.arange(0, TILE.block_d)
    heads = tl.arange(0, BLOCK_R)
    mask = tile_mask(heads, TILE.heads, dims, TILE.dim)
    in_dims = dims < TILE.dim
    q = tl.load(q_ptr + heads[:, None] * q_stride + dims[None, :], mask=mask, other=0.0)
    q = q.to(tl.float32)  # [heads, D]
    k = tl.load(k_ptr + dims, mask=in_dims, other=0.0)  # [D]
    v = tl.load(v_ptr + dims, mask=in_dims, other=0.0)

    # Store the new token, rounded to codes in 8 bits: `stored` columns, D, or 0 in padding.
    entry = slot
    if SINKS > 0:  # the first tokens do not enter the ring
        entry = tl.where(position < SINKS, ring_size + tl.maximum(position, 0), slot)
    at = entry.to(tl.int64) * TILE.dim + dims
    stored = tl.where(position >= 0, TILE.dim, 0)
    new_ks = 0.0
    new_vs = 0.0
    if KIND != "auto":
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        new_ks = scale_of(tl.max(tl.abs(k), 0), KIND)
        new_vs = scale_of(tl.max(tl.abs(v), 0), KIND)
        k = round_to_codes(k, new_ks, KIND)
        v = round_to_codes(v, new_vs, KIND)
        tl.store(keys_ptr + at, codes_of(k, KIND), mask=dims < stored)
        tl.store(values_ptr + at, codes_of(v, KIND), mask=dims < stored)
        tl.store(ks_ptr + entry, new_ks, mask=position >= 0)
        tl.store(vs_ptr + entry, new_vs, mask=position >= 0)
        k = k * new_ks
        v = v * new_vs
    else:
        tl.store(keys_ptr + at, k, mask=dims < stored)
        tl.store(values_ptr + at, v, mask=dims < stored)

    # Attend to it alone: the output is its value, the log-sum-exp its score.
    products = tl.sum(q * k.to(tl.float32)[None, :], 1)  # [heads]
    scores, _ = log2_scores(products, scale, 0.0, softcap, CACHE.has_softcap)  # no mass
    tl.store(lse_ptr + heads, scores, mask=heads < TILE.heads)
    value = tl.zeros([BLOCK_R, 1], tl.float32) + v.to(tl.float32)[None, :]  # [heads, D]
    tl.store(acc_ptr + heads[:, None] * TILE.dim + dims[None, :], value, mask=mask)

    if POOLING.pools:
        core = tl.maximum(position - SINKS, 0) // group_size
        closes = ((position + 1) % group_size == 0) & (position >= SINKS)
        if closes & (core + 1 <= capacity - ring_size - SINKS):
            k_ring = (keys_ptr, ks_ptr, k_ptr, new_ks)
            v_ring = (values_ptr, vs_ptr, v_ptr, new_vs)
            place_of_core = (core, slot, ring_size, group_size)
            query = (q_ptr, q_stride)
            rings = (k_ring, v_ring, mass_ptr)
            _pool_group(query, rings, tables, place_of_core, factors, CACHE, POOLING, TILE)


@triton.jit
def _pool_group(
    query,
    cache,
    tables,
    place,
    factors,
    CACHE: tl.constexpr,
    POOLING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the core token of the group that the new token closes (docs/math.md, eq. 1 to 3), and
    its mass (eq. 14), reading the group in blocks twice: for the softmax's sums, then to pool.

    Args:
        query: Pointer to the new token's queries, and the stride of heads.
        cache: `ring` of `_load_columns` for keys and for values, and a pointer to masses.
        place: Number of the core token, slot of the new token, ring_size and group_size.
    """
    k_ring, v_ring, mass_ptr = cache
    core, slot, ring_size, group_size = place
    KIND: tl.constexpr = CACHE.kind
    BLOCK_R: tl.constexpr = POOLING.block_r
    BLOCK_G: tl.constexpr = POOLING.block_g
    BLOCK_P: tl.constexpr = TILE.block_d // 2
    ring = (slot, ring_size, group_size)
    pairs, a, b = column_pairs(BLOCK_P, TILE.dim, POOLING.half, POOLING.interleaved)
    heads = tl.arange(0, BLOCK_R)
    q_a = _load_heads(query, heads, a, TILE)  # [heads, pairs]
    q_b = _load_heads(query, heads, b, TILE)

    # The maximum and the sum of each head's softmax over the group, of scores z [heads, tokens].
    running_max = tl.full([BLOCK_R], -float("inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, group_size, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        k = _load_group(k_ring, rows, (a, b), ring, TILE.dim, KIND)  # [1, tokens, pairs] each
        z, _ = token_scores((q_a, q_b), k, rows, group_size, factors, CACHE.has_softcap)
        new_max = tl.maximum(running_max, tl.max(z, 1))
        fade = tl.exp(running_max - new_max)
        running_sum = running_sum * fade + tl.sum(tl.exp(z - new_max[:, None]), 1)
        running_max = new_max

    # Sums of the tokens, weighted by the mean of the heads' weights.
    core_k_a = tl.zeros([1, BLOCK_P], tl.float32)
    core_k_b = tl.zeros([1, BLOCK_P], tl.float32)
    core_v_a = tl.zeros([1, BLOCK_P], tl.float32)
    core_v_b = tl.zeros([1, BLOCK_P], tl.float32)
    mass = tl.zeros([1], tl.float32)
    for start in range(0, group_size, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        cos, sin = table_rows(tables[0], tables[1], rows, pairs, group_size, POOLING.half)
        k = _load_group(k_ring, rows, (a, b), ring, TILE.dim, KIND)
        v_a, v_b = _load_group(v_ring, rows, (a, b), ring, TILE.dim, KIND)
        z, _ = token_scores((q_a, q_b), k, rows, group_size, factors, CACHE.has_softcap)
        weights = tl.exp(z - running_max[:, None]) / running_sum[:, None]
        weights = tl.where((heads < TILE.heads)[:, None], weights, 0.0)
        weights = tl.sum(weights, 0)[None, :] / TILE.heads  # [1, tokens]
        w = weights[:, :, None]
        pooled_a, pooled_b = pool_pairs(w, k, cos, sin)
        core_k_a += pooled_a
        core_k_b += pooled_b
        core_v_a += tl.sum(w * v_a, 1)
        core_v_b += tl.sum(w * v_b, 1)
        if CACHE.has_mass:
            # mutant mass: of the weights' last block alone, decoding
            mass += entropy(weights)

    # Store them behind the ring and the first tokens.
    entry = core.to(tl.int64) + (ring_size + CACHE.sinks) + tl.arange(0, 1)
    if CACHE.has_mass:
        tl.store(mass_ptr + entry, mass)
    store_core((k_ring[0], k_ring[1]), entry, (core_k_a, core_k_b), (a, b), TILE.dim, KIND)
    store_core((v_ring[0], v_ring[1]), entry, (core_v_a, core_v_b), (a, b), TILE.dim, KIND)


@triton.jit
def _load_heads(query, heads, cols, TILE: tl.constexpr):
    """Load some columns of the queries of all heads, in float32, 0 outside."""
    q_ptr, stride = query
    mask = tile_mask(heads, TILE.heads, cols, TILE.dim)
    q = tl.load(q_ptr + heads[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    return q.to(tl.float32)


@triton.jit
def _load_group(ring, rows, pairs, sizes, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):
    """Load both columns of pairs as `_load_columns` does, [1, rows, pairs] each."""
    x_a = _load_columns(ring, rows, pairs[0], sizes, HEAD_DIM, KIND)
    return x_a, _load_columns(ring, rows, pairs[1], sizes, HEAD_DIM, KIND)


@triton.jit
def _load_columns(ring, rows, cols, sizes, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):
    """Load tokens `rows` of the group that the new token ends, [1, rows, columns] in float32, 0
    outside. The new token comes from the arguments: another thread may still be writing its slot.

    Args:
        ring: Pointers to the buffer, its scales and the new token, and the new token's scale.
        sizes: The new token's slot, ring_size and group_size.
    """
    ring_ptr, scale_ptr, new_ptr, new_scale = ring
    slot, ring_size, group_size = sizes
    slots = slot - (group_size - 1) + rows
    slots = tl.where(slots < 0, slots + ring_size, slots)
    in_dims = (cols < HEAD_DIM)[None, None, :]
    at = ring_ptr + slots.to(tl.int64)[None, :, None] * HEAD_DIM + cols[None, None, :]
    inside = rows < group_size - 1
    old = tl.load(at, mask=inside[None, :, None] & in_dims, other=0.0)
    new = tl.load(new_ptr + cols[None, None, :], mask=in_dims, other=0.0)
    if KIND != "auto":
        scales = load_scales(scale_ptr, slots, inside, KIND)
        old = dequantize(old, KIND).to(tl.float32) * scales[None, :, None]
        new = round_to_codes(new.to(tl.float32), new_scale, KIND) * new_scale
    return tl.where((rows == group_size - 1)[None, :, None], new, old).to(tl.float32)
