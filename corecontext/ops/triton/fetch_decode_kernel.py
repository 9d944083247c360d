"""The kernel of a decoding step with fetch, in one launch or one for each phase."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.decode import (
    append_token,
    attend_entries,
    merge_columns,
    num_entries,
    store_part,
)
from corecontext.ops.triton.fetch_decode_attend import (
    fetched_sums,
    joined_sums,
    store_raw,
    without_chosen,
)
from corecontext.ops.triton.fetch_decode_choice import choose_groups
from corecontext.ops.triton.fetch_decode_index import score_share, scoring_bounds
from corecontext.ops.triton.fetch_decode_sync import arrive, prefetch, wait_for
from corecontext.ops.triton.fetch_decode_write import close_group
from corecontext.ops.triton.primitives import tile_mask, visible_cores

# Phases of a step.
ALL = tl.constexpr(-1)
SCORE = tl.constexpr(0)
CHOOSE = tl.constexpr(1)
ATTEND = tl.constexpr(2)
MERGE = tl.constexpr(3)
COUNTERS = tl.constexpr(32)
"""Numbers of a row's counters, a line of the cache: programs that have scored, choices made,
programs that have attended, programs that have merged; of the first row also rows done."""


@triton.jit(
    do_not_specialize=[
        *("seen", "kv_heads", "num_groups", "group_size", "window_size", "capacity", "ring_size"),
        *("room", "fetched_room", "num_centred", "num_scoring", "num_parts", "groups_each"),
        *("ahead", "last_units"),
    ]
)
def fetch_step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    mass_ptr,
    raw_k_ptr,
    raw_v_ptr,
    fetched_k_ptr,
    fetched_v_ptr,
    codes_ptr,
    scales_ptr,
    centre_ptr,
    rotation_ptr,
    wide_rotation_ptr,
    seen_ptr,
    pad_ptr,
    cos_ptr,
    sin_ptr,
    scratch_ptr,
    scores_ptr,
    score_lse_ptr,
    chosen_ptr,
    marks_ptr,
    acc_ptr,
    lse_ptr,
    out_ptr,
    counter_ptr,
    seen,
    kv_heads,
    num_groups,
    group_size,
    window_size,
    capacity,
    ring_size,
    room,
    fetched_room,
    num_centred,
    num_scoring,
    num_parts,
    groups_each,
    ahead,
    last_units,
    scale,
    bias,
    q_strides,
    k_strides,
    v_strides,
    num_chosen,
    PHASE: tl.constexpr,
    PREFETCHES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    SINKS: tl.constexpr,
    FETCHED_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    CORE_WIDTH: tl.constexpr,
    POOLS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASS: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALES: tl.constexpr,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WHOLE: tl.constexpr,
    ASM: tl.constexpr,
    WIDTH: tl.constexpr,
    SCORE_M: tl.constexpr,
    SCORE_N: tl.constexpr,
    SCORE_P: tl.constexpr,
    SCORE_STAGES: tl.constexpr,
    CLOSE_P: tl.constexpr,
    SEGMENTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Append the new tokens and attend with fetch: score the index, choose, attend in parts, merge
    them; in one launch, where PHASE is ALL, or in one for each.

    Grid: (B Hkv, programs). Each program has a share of the index, of the compact entries and of
    the chosen groups, and merges some columns of some heads. The first also stores the new token
    and pools the group that it closes; the last chooses, may have fewer entries for it, and writes
    the index of an earlier group: no program reads what these two write.

    Args:
        fetched_k_ptr: [B Hkv, fetched_room, HEAD_DIM], the raw keys behind FETCHED_SINKS tokens, or
            the slots of groups, where `chosen_ptr` has the numbers of slots; values likewise.
        scratch_ptr: [B Hkv, programs, 8 SCORE_M BLOCK_C] in int8, where WHOLE.
        scores_ptr: [B H, WIDTH] in units of log 2; their log-sum-exp: [B Hkv, num_scoring, HEADS].
        chosen_ptr: [B Hkv, num_chosen]; without OVERLAPS there are marks [B Hkv, WIDTH].
        acc_ptr: The parts of the softmax [B Hkv, num_parts, HEADS, HEAD_DIM], that of the new token
            first, and their log-sum-exp [B Hkv, num_parts, HEADS].
        counter_ptr: [B Hkv, COUNTERS] in int32, zeros before and after.
        ahead: Elements of a program's keys, and of its values, that it asks for ahead.
        last_units: The last program's entries, where each of the others has 8.
        OVERLAPS: Attend to all core tokens while a program chooses, then take some out.
    """
    AT_ONCE: tl.constexpr = PHASE == ALL
    BYTES: tl.constexpr = (HEAD_DIM * BITS + 7) // 8
    row = tl.program_id(0)
    part = tl.program_id(1)
    programs = tl.num_programs(1)
    n = row.to(tl.int64)
    batch = (row // kv_heads).to(tl.int64)
    head = (row % kv_heads).to(tl.int64)
    if ON_DEVICE:
        seen = tl.load(seen_ptr)
    position = (seen - tl.load(pad_ptr + batch)).to(tl.int32)
    slot = tl.maximum(position, 0) % ring_size
    q_ptr += batch * q_strides[0] + head * HEADS * q_strides[1]
    k_ptr += batch * k_strides[0] + head * k_strides[1]
    v_ptr += batch * v_strides[0] + head * v_strides[1]
    keys_ptr += n * capacity * HEAD_DIM
    values_ptr += n * capacity * HEAD_DIM
    mass_ptr += n * capacity
    raw_k_ptr += n * room * HEAD_DIM
    raw_v_ptr += n * room * HEAD_DIM
    fetched_k_ptr += n * fetched_room * HEAD_DIM
    fetched_v_ptr += n * fetched_room * HEAD_DIM
    codes_ptr += n * num_groups * PARTS * BYTES
    scales_ptr += n * num_groups * SCALES
    scores_ptr += n * HEADS * WIDTH
    score_lse_ptr += n * num_scoring * HEADS
    scratch_ptr += (n * programs + part) * (8 * SCORE_M * BLOCK_C)
    chosen_ptr += n * num_chosen
    marks_ptr += n * WIDTH
    rows_done_ptr = counter_ptr + 4
    counter_ptr += n * COUNTERS
    acc_ptr += n * num_parts * HEADS * HEAD_DIM
    lse_ptr += n * num_parts * HEADS
    buffers = (keys_ptr, values_ptr, keys_ptr, values_ptr, mass_ptr, marks_ptr)
    place = (position, capacity, ring_size, group_size, window_size)
    length, cores = num_entries(place, SINKS, CORE_WIDTH)
    unit = tl.cdiv(length, 8 * (programs - 1) + last_units)
    begin = tl.minimum(part * 8 * unit, length)
    end = tl.minimum(begin + tl.where(part < programs - 1, 8, last_units) * unit, length)

    # Score a share of the index.
    if AT_ONCE or PHASE == SCORE:
        sizes = (num_groups, group_size, window_size)
        first, last = scoring_bounds(position, (part, programs), sizes, SINKS, SCORE_N)
        if PREFETCHES:
            prefetch(codes_ptr, first * (PARTS * BYTES), last * (PARTS * BYTES), 1, 256)
        score_share(
            (q_ptr, q_strides[1], rotation_ptr),
            (codes_ptr, scales_ptr),
            (scores_ptr, score_lse_ptr + part * HEADS, scratch_ptr),
            (first, last),
            scale,
            HEADS,
            BITS,
            PARTS,
            SCALES,
            LEVELS,
            HEAD_DIM,
            BLOCK_C,
            WHOLE,
            ASM,
            WIDTH,
            SCORE_M,
            SCORE_N,
            SCORE_P,
            BLOCK_D,
            VECTOR,
            SCORE_STAGES,
        )
        if AT_ONCE:
            arrive(counter_ptr)
        if PREFETCHES:
            stop = tl.minimum(end * HEAD_DIM, begin * HEAD_DIM + ahead)
            prefetch(keys_ptr, begin * HEAD_DIM, stop, 2, 256)
            prefetch(values_ptr, begin * HEAD_DIM, stop, 2, 256)

    # Store the new token while others score; choose when they have.
    if AT_ONCE or PHASE == CHOOSE:
        if part == 0:
            append_token(
                (q_ptr, q_strides[1], k_ptr, v_ptr),
                buffers,
                (cos_ptr, sin_ptr),
                (acc_ptr, lse_ptr),
                (position, slot, capacity, ring_size, group_size),
                scale,
                1.0,
                "auto",
                SINKS,
                HEADS,
                CORE_WIDTH,
                POOLS,
                HEAD_DIM,
                HALF,
                INTERLEAVED,
                HAS_MASS,
                False,
                BLOCK_R,
                BLOCK_G,
                BLOCK_D,
            )
            store_raw((k_ptr, v_ptr), (raw_k_ptr, raw_v_ptr), position, room, HEAD_DIM, BLOCK_D)
        if part == programs - 1:
            if AT_ONCE:
                wait_for(counter_ptr, programs)
            count = visible_cores(position - SINKS, group_size, window_size)
            choose_groups(
                scores_ptr,
                score_lse_ptr,
                chosen_ptr,
                marks_ptr,
                (tl.minimum(count, num_groups), num_scoring),
                num_chosen,
                HEADS,
                WIDTH,
                BLOCK_R,
                BLOCK_S,
                BLOCK_K,
                not OVERLAPS,
            )
            if AT_ONCE:
                arrive(counter_ptr + 1)

    # Attend to a share of the compact entries, and of the chosen groups.
    if AT_ONCE or PHASE == ATTEND:
        if AT_ONCE and not OVERLAPS:
            wait_for(counter_ptr + 1, 1)
        dims = tl.arange(0, BLOCK_D)
        heads = tl.arange(0, BLOCK_M)
        mask = tile_mask(heads, HEADS, dims, HEAD_DIM)
        q = tl.load(q_ptr + heads[:, None] * q_strides[1] + dims[None, :], mask=mask, other=0.0)
        sums = attend_entries(
            q,
            buffers,
            begin,
            end,
            (position, slot, position - SINKS - cores * group_size, ring_size),
            scale,
            1.0,
            bias,
            "auto",
            SINKS,
            CORE_WIDTH,
            HAS_BIAS,
            HAS_MASS,
            not OVERLAPS,
            False,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            VECTOR,
            STAGES,
        )
        if OVERLAPS:
            if AT_ONCE:
                wait_for(counter_ptr + 1, 1)
            sums = without_chosen(
                q,
                sums,
                buffers,
                chosen_ptr,
                (begin, end),
                ring_size + SINKS,
                num_chosen,
                scale,
                HAS_MASS,
                HEAD_DIM,
                BLOCK_N,
                BLOCK_D,
                VECTOR,
            )
        fetched = fetched_sums(
            q,
            (fetched_k_ptr, fetched_v_ptr),
            chosen_ptr,
            part,
            (groups_each, num_chosen, group_size),
            scale,
            FETCHED_SINKS,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            VECTOR,
            STAGES,
        )
        first = (part + 1) * HEADS
        parts = (acc_ptr + first * HEAD_DIM, lse_ptr + first)
        store_part(parts, joined_sums(sums, fetched), heads, dims, mask, HEADS, HEAD_DIM)
        if AT_ONCE:
            arrive(counter_ptr + 2)
        # No program waits for the index of an earlier group.
        if part == programs - 1:
            close_group(
                (raw_k_ptr + SINKS * HEAD_DIM, k_ptr),
                (centre_ptr + n * HEAD_DIM, codes_ptr, scales_ptr, wide_rotation_ptr),
                (position - SINKS, group_size, num_centred, num_groups),
                SINKS,
                BITS,
                PARTS,
                SCALES,
                LEVELS,
                HEAD_DIM,
                CLOSE_P,
                BLOCK_C,
                BLOCK_D,
                SEGMENTS,
                GROUP,
            )

    # Merge the parts of a head, some columns a program.
    if AT_ONCE or PHASE == MERGE:
        COLUMNS: tl.constexpr = BLOCK_D // SLICES
        if AT_ONCE:
            if part < HEADS * SLICES:
                wait_for(counter_ptr + 2, programs)
        for task in range(part, HEADS * SLICES, programs):
            query_head = task // SLICES
            merge_columns(
                (acc_ptr + query_head * HEAD_DIM, lse_ptr + query_head),
                out_ptr + (n * HEADS + query_head) * HEAD_DIM,
                num_parts,
                task % SLICES * COLUMNS + tl.arange(0, COLUMNS),
                HEADS,
                HEAD_DIM,
                BLOCK_P,
            )
        if AT_ONCE:
            # The last program of a row clears its counters, that of the last row counts the token.
            if arrive(counter_ptr + 3) == programs - 1:
                for i in tl.static_range(4):
                    tl.store(counter_ptr + i, 0)
                if arrive(rows_done_ptr) == tl.num_programs(0) - 1:
                    tl.store(rows_done_ptr, 0)
                    if ON_DEVICE:
                        tl.store(seen_ptr, tl.load(seen_ptr) + 1)
        elif ON_DEVICE:
            if (row == 0) & (part == 0):
                tl.store(seen_ptr, seen + 1)
