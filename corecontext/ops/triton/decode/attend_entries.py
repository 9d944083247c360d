"""Attend to the entries of a compact cache in a decoding step, as one part of a softmax.

A part is the softmax over some entries for all query heads of a KV head: its normalised output
[heads, D] in float32 and its log-sum-exp [heads] in units of log 2: -inf and no output where it
sees no entry. Tiles of queries have TILE.block_m rows, of which TILE.heads are heads. Entries are
ring_size slots of the ring, first tokens (SINKS), then core tokens.
"""

import triton
import triton.language as tl

from corecontext.ops.triton.decode.codes import dequantize, load_scales
from corecontext.ops.triton.primitives import (
    log2_scores,
    softmax_step,
    tile_mask,
    tile_products,
    visible_cores,
    weighted_sum,
)


@triton.jit
def row_of(length, seen, kv_heads, ON_DEVICE: tl.constexpr):
    """Return the program's sequence n of B Hkv, its row of the batch and its KV head, all in int64,
    and the position of its new token in int32, below 0 in padding.

    Args:
        length: Pointers to the length on the device and to the padding of each row of the batch.
        seen: The length, padding included, where it is not ON_DEVICE.
    """
    row = tl.program_id(0)
    # mutant offsets: 32 bits in a decoding step
    n = row.to(tl.int64)
    batch = (row // kv_heads).to(tl.int64)
    head = (row % kv_heads).to(tl.int64)
    if ON_DEVICE:
        seen = tl.load(length[0])
    position = (seen - tl.load(length[1] + batch)).to(tl.int32)
    return n, batch, head, position


@triton.jit
def load_queries(q_ptr, stride, TILE: tl.constexpr):
    """Load the queries of all heads of a KV head, [heads, D], 0 outside; `stride` is a head's."""
    heads = tl.arange(0, TILE.block_m)
    dims = tl.arange(0, TILE.block_d)
    mask = tile_mask(heads, TILE.heads, dims, TILE.dim)
    return tl.load(q_ptr + heads[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def num_entries(sizes, SINKS: tl.constexpr):
    """Return how many entries a step goes through, seen or not, and how many core tokens it sees.

    Args:
        sizes: Position of the new token, capacity, ring_size, group_size and window_size.
    """
    position, capacity, ring_size, group_size, window_size = sizes
    # Before there are core tokens, later ring slots were never written.
    cores = visible_cores(position - SINKS, group_size, window_size)
    length = tl.where(cores > 0, cores + ring_size, tl.minimum(position, ring_size))
    if SINKS > 0:
        behind = tl.where(cores > 0, cores + SINKS, tl.minimum(position, SINKS))
        length = ring_size + behind
    return tl.minimum(length, capacity), cores


@triton.jit
def attend_entries(q, cache, bounds, place, factors, CACHE: tl.constexpr, TILE: tl.constexpr):
    """Attend to entries begin .. end-1 by an online softmax: ring slots whose token is at most
    `reach` positions older than the new one (older ones are in core tokens), first tokens before
    it, and all core tokens. Unseen entries are not read, so their contents have no effect.

    Args:
        q: [heads, D].
        cache: Pointers to a sequence's keys, values, scales of keys and of values, and masses.
        bounds: begin and end.
        place: Position and ring slot of the new token, reach and ring_size.
        CACHE, TILE: `plan.CacheForm` and `plan.Tile`.

    Returns:
        Weighted values, sum of the weights and maximum, for `store_part`.
    """
    keys_ptr, values_ptr, ks_ptr, vs_ptr, mass_ptr = cache
    begin, end = bounds
    position, slot, reach, ring_size = place
    scale, softcap = factors
    SINKS: tl.constexpr = CACHE.sinks
    KIND: tl.constexpr = CACHE.kind
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_D: tl.constexpr = TILE.block_d
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    tile = begin.to(tl.int64) * TILE.dim + offs[:, None] * TILE.dim + dims[None, :]
    k_tile = keys_ptr + tile
    v_tile = values_ptr + tile
    for start in tl.range(begin, end, BLOCK_N, num_stages=TILE.stages):
        # Which entries are seen: in the ring by age (0 is the new token, which is a part of its
        # own), of the first tokens by position, all core tokens before `end`.
        entries = start + offs
        is_core = entries >= ring_size + SINKS
        age = slot - entries
        age = tl.where(age < 0, age + ring_size, age)
        seen = (age > 0) & (age <= reach)
        if SINKS > 0:
            seen = tl.where(entries < ring_size, seen, entries - ring_size < position)
        seen = (entries < end) & (is_core | seen)  # [entries]
        mask = seen[:, None] & (dims < TILE.dim)[None, :]

        k = tl.load(k_tile, mask=mask, other=0.0)  # [entries, D]
        v = tl.load(v_tile, mask=mask, other=0.0)
        if KIND != "auto":  # codes in 8 bits: scales of keys are multiplied with the products
            k = dequantize(k, KIND).to(q.dtype)
            scales = load_scales(vs_ptr, entries, seen, KIND)[:, None]
            v = (dequantize(v, KIND).to(tl.float32) * scales).to(q.dtype)
        products = tile_products(q, k, TILE.vector)  # [heads, entries]
        if KIND != "auto":
            products = products * load_scales(ks_ptr, entries, seen, KIND)[None, :]
        shift = 0.0
        if CACHE.has_mass:
            # mutant mass: that of the entry before, in a fused step
            mass = tl.load(mass_ptr + entries, mask=seen & is_core, other=0.0)
            shift = mass[None, :]
        scores, _ = log2_scores(products, scale, shift, softcap, CACHE.has_softcap)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, SOME_SEE_NOTHING=True
        )
        acc = acc * fade[:, None] + weighted_sum(weights, v, TILE.vector)  # [heads, D]
        k_tile += BLOCK_N * TILE.dim
        v_tile += BLOCK_N * TILE.dim
    return acc, running_sum, running_max


@triton.jit
def store_part(partial, sums, TILE: tl.constexpr):
    """Write a part of the softmax.

    Args:
        partial: Pointers to the part's output and log-sum-exp.
        sums: Weighted values, sum of the weights and maximum, of an online softmax.
    """
    acc_ptr, lse_ptr = partial
    acc, running_sum, running_max = sums
    heads = tl.arange(0, TILE.block_m)
    dims = tl.arange(0, TILE.block_d)
    mask = tile_mask(heads, TILE.heads, dims, TILE.dim)
    any_seen = running_max != -float("inf")
    running_sum = tl.where(any_seen, running_sum, 1.0)
    tl.store(lse_ptr + heads, running_max + tl.log2(running_sum), mask=heads < TILE.heads)
    at = heads[:, None] * TILE.dim + dims[None, :]
    tl.store(acc_ptr + at, acc / running_sum[:, None], mask=mask & any_seen[:, None])
