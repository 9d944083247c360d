"""Attend to chosen groups in a decoding step: to raw tokens, and to core tokens to be taken out.

The parts of `attend_compact` count the core tokens of all visible groups, as they may run before
the choice; so those of chosen groups are a part of their own here, and the merge subtracts it.
"""

import triton
import triton.language as tl

from corecontext.ops.triton.decode.attend_entries import (
    load_queries,
    num_entries,
    row_of,
    store_part,
)
from corecontext.ops.triton.primitives import (
    integers,
    log2_scores,
    softmax_step,
    tile_products,
    weighted_sum,
)


@triton.jit
def attend_chosen_kernel(
    q_ptr,
    cache,
    fetched,
    raw,
    chosen,
    length,
    partial,
    numbers,
    scale,
    num_chosen,
    q_strides,
    ON_DEVICE: tl.constexpr,
    FETCHED_SINKS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    CACHE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend to fetched tokens in parts, and to the core tokens of the groups chosen in one more.

    Grid: (B Hkv, programs). A program reads the tokens of groups_each groups once, for all heads;
    the last program reads the core tokens of all groups chosen. Where a group is not in its slot
    yet, its program loads it from host memory and stores it there.

    Args:
        q_ptr: [B, H, 1, D].
        cache: Pointers to keys and values [B Hkv, capacity, D] and masses [B Hkv, capacity].
        fetched: Pointers to keys and values [B Hkv, fetched_room, D] that groups are read from: all
            raw tokens, FETCHED_SINKS of them before group 0; or slots of one group each.
        raw: Where HAS_SLOTS, pointers to raw keys and values [B Hkv, raw_room, D] in host memory.
        chosen: Pointers to the groups chosen, [B Hkv, num_chosen] in int32, -1 for none, and to
            their places in `fetched`: the same, or their slots as `give_slots` writes them.
        length: Pointers to the length on the device, and to each row's padding.
        partial: Pointers to outputs [B Hkv, num_parts, HEADS, D] and log-sum-exp [B Hkv, num_parts,
            HEADS] in float32; part 0 is the new token, this launch writes 1, 2 and so on.
        CACHE, TILE: `plan.CacheForm` and `plan.Tile`.
    """
    values = integers(numbers)
    seen, kv_heads, group_size, window_size, capacity = values[:5]
    ring_size, fetched_room, raw_room, num_parts, groups_each = values[5:]
    n, batch, head, position = row_of(length, seen, kv_heads, ON_DEVICE)
    program = tl.program_id(1)
    SINKS: tl.constexpr = CACHE.sinks
    q_ptr += batch * q_strides[0] + head * TILE.heads * q_strides[1]
    q = load_queries(q_ptr, q_strides[1], TILE)  # [heads, D]
    entries, _ = num_entries((position, capacity, ring_size, group_size, window_size), SINKS)
    fetched_k_ptr = fetched[0] + n * fetched_room * TILE.dim
    fetched_v_ptr = fetched[1] + n * fetched_room * TILE.dim
    numbers_ptr = chosen[1] + n * num_chosen
    # Core tokens are groups of one token in the compact cache, behind its ring and first tokens.
    is_core = program == tl.num_programs(1) - 1
    if is_core:
        fetched_k_ptr = cache[0] + n * capacity * TILE.dim
        fetched_v_ptr = cache[1] + n * capacity * TILE.dim
        numbers_ptr = chosen[0] + n * num_chosen
    each = groups_each * group_size
    end = tl.minimum(program * each + each, num_chosen * group_size)
    bounds = (tl.where(is_core, 0, program * each), tl.where(is_core, num_chosen, end))
    sizes = (  # of `_fetched_sums`
        tl.where(is_core, 1, group_size),
        tl.where(is_core, ring_size + SINKS, FETCHED_SINKS),
        tl.where(is_core, entries, fetched_room),
        tl.where(is_core, entries, 0),
    )
    buffers = (fetched_k_ptr, fetched_v_ptr, cache[2] + n * capacity)
    raw_at = n * raw_room * TILE.dim
    in_host = (raw[0] + raw_at, raw[1] + raw_at)
    pointers = (buffers, in_host, (numbers_ptr, chosen[0] + n * num_chosen))
    FIRST: tl.constexpr = SINKS if HAS_SLOTS else -1
    sums = _fetched_sums(q, pointers, bounds, sizes, scale, FIRST, CACHE, TILE)
    part = n * num_parts + 1 + program
    acc_ptr = partial[0] + part * (TILE.heads * TILE.dim)
    store_part((acc_ptr, partial[1] + part * TILE.heads), sums, TILE)


@triton.jit
def _fetched_sums(
    q, pointers, bounds, sizes, scale, FIRST: tl.constexpr, CACHE: tl.constexpr, TILE: tl.constexpr
):
    """Attend from all heads to some tokens of chosen groups; return the sums for `store_part`.

    The tokens of all chosen groups are numbered: token i is number i % g of chosen group i // g.

    Args:
        q: [heads, D].
        pointers: Three tuples of pointers: to a sequence's keys, values and masses in `buffers`; to
            its keys and values in host memory; to the places of its chosen groups in `buffers`, and
            to their numbers. A place is -1 for none, -2 - slot for a slot into which the group must
            be loaded first.
        bounds: The first of these tokens that is read, and one past the last.
        sizes: Tokens of a group; in `buffers` tokens before the first group, tokens in all, and
            tokens with masses (0 where there are none).
        FIRST: First tokens in host memory (SINKS), where places are slots; else -1.
    """
    buffers, in_host, numbers = pointers
    group_size, before, room, with_mass = sizes
    begin, end = bounds
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_D: tl.constexpr = TILE.block_d
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    offs = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=TILE.stages):
        place = start + offs
        group = tl.load(numbers[0] + place // group_size, mask=place < end, other=-1)  # [tokens]
        if FIRST >= 0:
            is_missing = group < -1
            group = tl.where(is_missing, -2 - group, group)
        seen = group >= 0
        # mutant fetch: a fused step reads groups as if there were no first tokens
        token = tl.where(seen, group, 0).to(tl.int64) * group_size + (place % group_size + before)
        seen = seen & (token < room)
        at = token[:, None] * TILE.dim + dims[None, :]
        exists = seen[:, None] & (dims < TILE.dim)[None, :]
        k_ptrs, v_ptrs = buffers[0] + at, buffers[1] + at
        if FIRST >= 0:
            group = tl.load(numbers[1] + place // group_size, mask=is_missing, other=0)
            # mutant fetch: a missing group is loaded as if there were no first tokens
            source = group.to(tl.int64) * group_size + (place % group_size + FIRST)
            at_raw = source[:, None] * TILE.dim + dims[None, :]
            k_ptrs = tl.where(is_missing[:, None], in_host[0] + at_raw, k_ptrs)
            v_ptrs = tl.where(is_missing[:, None], in_host[1] + at_raw, v_ptrs)
        k = tl.load(k_ptrs, mask=exists, other=0.0)  # [tokens, D]
        v = tl.load(v_ptrs, mask=exists, other=0.0)
        if FIRST >= 0:
            # mutant fetch: a group that a step loads is not kept
            tl.store(buffers[0] + at, k, mask=exists & is_missing[:, None])
            tl.store(buffers[1] + at, v, mask=exists & is_missing[:, None])
        mass = 0.0
        if CACHE.has_mass:
            mass = tl.load(buffers[2] + token, mask=seen & (token < with_mass), other=0.0)[None, :]
        products = tile_products(q, k, TILE.vector)  # [heads, tokens]
        scores, _ = log2_scores(products, scale, mass, softcap=1.0, HAS_SOFTCAP=False)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, SOME_SEE_NOTHING=True
        )
        acc = acc * fade[:, None] + weighted_sum(weights, v, TILE.vector)  # [heads, D]
    return acc, running_sum, running_max
