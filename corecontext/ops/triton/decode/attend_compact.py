"""Append a token to a cache with a store, and attend to compact entries, in a step with fetch."""

import triton
import triton.language as tl

from corecontext.ops.triton.decode.append_token import append_token
from corecontext.ops.triton.decode.attend_entries import (
    attend_entries,
    load_queries,
    num_entries,
    row_of,
    store_part,
)
from corecontext.ops.triton.decode.write_index import close_group
from corecontext.ops.triton.primitives import integers


@triton.jit
def attend_compact_kernel(
    tokens,
    cache,
    raw,
    index,
    tables,
    length,
    partial,
    numbers,
    scale,
    q_strides,
    k_strides,
    v_strides,
    ON_DEVICE: tl.constexpr,
    CACHE: tl.constexpr,
    POOLING: tl.constexpr,
    INDEX: tl.constexpr,
    TILE: tl.constexpr,
):
    """Append the new tokens, and attend to compact entries in parts, to all visible core tokens.

    Grid: (B Hkv, programs). A program reads an even piece of the visible entries once, for all
    heads; the first of these also stores the new token and pools the group that it closes. One
    before them writes the index of an earlier group. No program of the step reads what another one
    of this launch writes.

    Args:
        tokens: Pointers to q [B, H, 1, D], k and v [B, Hkv, 1, D].
        cache: Pointers to keys and values [B Hkv, capacity, D] and masses [B Hkv, capacity].
        raw: Pointers to raw keys and values [B Hkv, room, D], on the device or in host memory.
        index: Pointers to codes [B Hkv, num_groups, P, bytes], scales [B Hkv, num_groups, 1 or P],
            centre [B Hkv, D] and the index's rotation in float32.
        tables: Pointers to cosines and sines [g, R / 2] of the rotation to a group's middle.
        length: Pointers to the length on the device, and to each row's padding.
        partial: Pointers to outputs [B Hkv, parts, HEADS, D] and log-sum-exp [B Hkv, parts, HEADS]
            in float32: part 0 is the new token, then come num_fetching parts of
            `attend_chosen_kernel`, then this launch's, one for each program that attends.
    """
    values = integers(numbers)
    seen, kv_heads, num_groups, group_size, window_size = values[:5]
    capacity, ring_size, room, num_centred, num_fetching = values[5:]
    n, batch, head, position = row_of(length, seen, kv_heads, ON_DEVICE)
    program = tl.program_id(1) - 1  # -1 writes an index
    programs = tl.num_programs(1) - 1
    SINKS: tl.constexpr = CACHE.sinks
    SIZE: tl.constexpr = TILE.heads * TILE.dim
    q_ptr = tokens[0] + batch * q_strides[0] + head * TILE.heads * q_strides[1]
    k_ptr = tokens[1] + batch * k_strides[0] + head * k_strides[1]
    v_ptr = tokens[2] + batch * v_strides[0] + head * v_strides[1]
    keys_ptr = cache[0] + n * capacity * TILE.dim
    values_ptr = cache[1] + n * capacity * TILE.dim
    # The cache is not in 8 bits: no scales are read.
    cache_of_row = (keys_ptr, values_ptr, keys_ptr, values_ptr, cache[2] + n * capacity)
    raw_k_ptr = raw[0] + n * room * TILE.dim
    raw_v_ptr = raw[1] + n * room * TILE.dim
    first = n * (1 + num_fetching + programs)  # part 0 of the sequence
    factors = (scale, 1.0)  # scores have no softcap
    slot = tl.maximum(position, 0) % ring_size

    if program < 0:
        KEYS: tl.constexpr = INDEX.keys
        BYTES: tl.constexpr = (TILE.dim * INDEX.bits + 7) // 8
        index_of_row = (
            index[0] + n * num_groups * KEYS * BYTES,
            index[1] + n * num_groups * INDEX.scales,
            index[2] + n * TILE.dim,
            index[3],
        )
        keys = (raw_k_ptr + SINKS * TILE.dim, k_ptr)
        sizes = (position - SINKS, group_size, num_centred, num_groups)
        close_group(keys, index_of_row, sizes, SINKS, INDEX, TILE)
        return
    if program == 0:
        append_token(
            (q_ptr, q_strides[1], k_ptr, v_ptr),
            cache_of_row,
            tables,
            (partial[0] + first * SIZE, partial[1] + first * TILE.heads),
            (position, slot, capacity, ring_size, group_size),
            factors,
            CACHE,
            POOLING,
            TILE,
        )
        _store_raw((k_ptr, v_ptr), (raw_k_ptr, raw_v_ptr), position, room, TILE)

    # Attend to an even piece of the entries, in multiples of 8.
    entries, cores = num_entries((position, capacity, ring_size, group_size, window_size), SINKS)
    size = tl.cdiv(entries, 8 * programs) * 8
    begin = tl.minimum(program * size, entries)
    q = load_queries(q_ptr, q_strides[1], TILE)  # [heads, D]
    reach = position - SINKS - cores * group_size  # older tokens are in core tokens
    bounds = (begin, tl.minimum(begin + size, entries))
    place = (position, slot, reach, ring_size)
    sums = attend_entries(q, cache_of_row, bounds, place, factors, CACHE, TILE)
    part = first + 1 + num_fetching + program
    store_part((partial[0] + part * SIZE, partial[1] + part * TILE.heads), sums, TILE)


@triton.jit
def _store_raw(tokens, raw, position, room, TILE: tl.constexpr):
    """Store the new key and value at their position; of padding no column is `stored`.

    Args:
        tokens: Pointers to the new key and value.
        raw: Pointers to the sequence's raw keys and values.
        room: Positions that there is room for.
    """
    dims = tl.arange(0, TILE.block_d)
    mask = dims < TILE.dim
    at = tl.maximum(position, 0).to(tl.int64) * TILE.dim + dims
    stored = tl.where((position >= 0) & (position < room), TILE.dim, 0)
    k = tl.load(tokens[0] + dims, mask=mask, other=0.0)
    v = tl.load(tokens[1] + dims, mask=mask, other=0.0)
    # mutant fetch: a fused step leaves its raw token unstored
    tl.store(raw[0] + at, k, mask=dims < stored)
    tl.store(raw[1] + at, v, mask=dims < stored)
