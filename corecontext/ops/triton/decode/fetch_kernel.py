"""The kernel of a decoding step with fetch: each phase is a launch."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.choose.select_step import choose_groups
from corecontext.ops.triton.decode.attend_chosen import fetched_sums, joined_sums, store_raw
from corecontext.ops.triton.decode.plain_step import (
    append_token,
    attend_entries,
    merge_columns,
    num_entries,
    store_part,
)
from corecontext.ops.triton.decode.score_index import (
    rotate_queries,
    score_share,
    scoring_bounds,
)
from corecontext.ops.triton.decode.write_index import close_group
from corecontext.ops.triton.primitives import tile_mask, visible_cores

# Phases of a step.
ROTATE = tl.constexpr(0)
SCORE = tl.constexpr(1)
CHOOSE = tl.constexpr(2)
ATTEND = tl.constexpr(3)
FETCH = tl.constexpr(4)
MERGE = tl.constexpr(5)


@triton.jit(
    do_not_specialize=[
        *("seen", "kv_heads", "num_groups", "group_size", "window_size", "capacity", "ring_size"),
        *("room", "fetched_room", "num_centred", "num_scoring", "num_fetching", "num_parts"),
        "groups_each",
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
    unit_ptr,
    scores_ptr,
    score_lse_ptr,
    chosen_ptr,
    numbers_ptr,
    marks_ptr,
    acc_ptr,
    lse_ptr,
    out_ptr,
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
    num_fetching,
    num_parts,
    groups_each,
    scale,
    bias,
    q_strides,
    k_strides,
    v_strides,
    num_chosen,
    PHASE: tl.constexpr,
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
    OVERLAPS: tl.constexpr,
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
    them, each by a launch.

    Grid: (B Hkv, programs). Programs have shares of the index, of the compact entries and of the
    chosen groups, or merge some columns of a head. One also stores the new token and pools the
    group that it closes, one writes the index of an earlier group: no program reads what these two
    write.

    With OVERLAPS attention to compact entries waits for no choice: it takes the core tokens of all
    groups. A launch of its own attends to fetched tokens, and its last program to the core tokens
    of the groups chosen, which the merge takes out again. Another one rotates the queries.

    Args:
        fetched_k_ptr: [B Hkv, fetched_room, HEAD_DIM], the raw keys behind FETCHED_SINKS tokens, or
            the slots of groups; values likewise.
        scratch_ptr: [B Hkv, programs that rotate, 8 SCORE_M BLOCK_C] in int8, where WHOLE.
        unit_ptr: [B Hkv, SCORE_M], where rotation has a launch.
        scores_ptr: [B H, WIDTH] in units of log 2; their log-sum-exp: [B Hkv, num_scoring, HEADS].
        chosen_ptr: Groups [B Hkv, num_chosen], and their marks [B Hkv, WIDTH].
        numbers_ptr: As chosen_ptr, groups or slots.
        acc_ptr: The parts of the softmax [B Hkv, num_parts, HEADS, HEAD_DIM], that of the new token
            first, then the num_fetching of fetched tokens, and their log-sum-exp [B Hkv, num_parts,
            HEADS].
    """
    BYTES: tl.constexpr = (HEAD_DIM * BITS + 7) // 8
    ROTATED: tl.constexpr = OVERLAPS and WHOLE
    ATTENDS: tl.constexpr = PHASE == ATTEND
    APPENDS: tl.constexpr = ATTENDS if OVERLAPS else PHASE == CHOOSE
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
    scratch_ptr += (n if ROTATED else n * programs + part) * (8 * SCORE_M * BLOCK_C)
    unit_ptr += n * SCORE_M
    chosen_ptr += n * num_chosen
    numbers_ptr += n * num_chosen
    marks_ptr += n * WIDTH
    acc_ptr += n * num_parts * HEADS * HEAD_DIM
    lse_ptr += n * num_parts * HEADS
    buffers = (keys_ptr, values_ptr, keys_ptr, values_ptr, mass_ptr, marks_ptr)
    place = (position, capacity, ring_size, group_size, window_size)
    length, cores = num_entries(place, SINKS, CORE_WIDTH)
    size = tl.cdiv(length, 8 * programs) * 8
    begin = tl.minimum(part * size, length)

    if PHASE == ROTATE:
        rotate_queries(
            (q_ptr, q_strides[1], rotation_ptr),
            (scratch_ptr, unit_ptr),
            HEADS,
            8 // BITS,
            HEAD_DIM,
            BLOCK_C,
            SCORE_M,
            BLOCK_M,
            BLOCK_D,
            VECTOR,
        )

    # Score a share of the index.
    if PHASE == SCORE:
        sizes = (num_groups, group_size, window_size)
        score_share(
            (q_ptr, q_strides[1], rotation_ptr),
            (codes_ptr, scales_ptr),
            (scores_ptr, score_lse_ptr + part * HEADS, scratch_ptr, unit_ptr),
            scoring_bounds(position, (part, programs), sizes, SINKS, SCORE_N),
            scale,
            HEADS,
            BITS,
            PARTS,
            SCALES,
            LEVELS,
            HEAD_DIM,
            BLOCK_C,
            WHOLE,
            ROTATED,
            ASM,
            WIDTH,
            SCORE_M,
            SCORE_N,
            SCORE_P,
            BLOCK_D,
            VECTOR,
            SCORE_STAGES,
        )

    # Store the new token while others choose or attend.
    if APPENDS:
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
    if PHASE == CHOOSE:
        if part == programs - 1:
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
            )

    # Attend to a share of the compact entries, or of the fetched tokens, or of both.
    if ATTENDS or PHASE == FETCH:
        dims = tl.arange(0, BLOCK_D)
        heads = tl.arange(0, BLOCK_M)
        mask = tile_mask(heads, HEADS, dims, HEAD_DIM)
        q = tl.load(q_ptr + heads[:, None] * q_strides[1] + dims[None, :], mask=mask, other=0.0)
        place_of_part = part + 1
        if ATTENDS:
            place_of_part += num_fetching
            sums = attend_entries(
                q,
                buffers,
                begin,
                tl.minimum(begin + size, length),
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
        if PHASE == FETCH or not OVERLAPS:
            each = groups_each * group_size
            bounds = (part * each, tl.minimum(part * each + each, num_chosen * group_size))
            sizes = (group_size, FETCHED_SINKS, fetched_room, 0)
            if PHASE == FETCH:
                is_core = part == programs - 1
                if is_core:
                    fetched_k_ptr = keys_ptr
                    fetched_v_ptr = values_ptr
                    numbers_ptr = chosen_ptr
                bounds = (
                    tl.where(is_core, 0, bounds[0]),
                    tl.where(is_core, num_chosen, bounds[1]),
                )
                sizes = (
                    tl.where(is_core, 1, group_size),
                    tl.where(is_core, ring_size + SINKS, FETCHED_SINKS),
                    tl.where(is_core, length, fetched_room),
                    tl.where(is_core, length, 0),
                )
            fetched = fetched_sums(
                q,
                (fetched_k_ptr, fetched_v_ptr, mass_ptr),
                numbers_ptr,
                bounds,
                sizes,
                scale,
                HAS_MASS and PHASE == FETCH,
                HEAD_DIM,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
                VECTOR,
                STAGES,
            )
            if PHASE == FETCH:
                sums = fetched
            else:
                sums = joined_sums(sums, fetched)
        parts = (acc_ptr + place_of_part * (HEADS * HEAD_DIM), lse_ptr + place_of_part * HEADS)
        store_part(parts, sums, heads, dims, mask, HEADS, HEAD_DIM)
        # No program waits for the index of an earlier group.
        if ATTENDS:
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
                )

    # Merge the parts of a head, some columns a program.
    if PHASE == MERGE:
        COLUMNS: tl.constexpr = BLOCK_D // SLICES
        query_head = part // SLICES
        merge_columns(
            (acc_ptr + query_head * HEAD_DIM, lse_ptr + query_head),
            out_ptr + (n * HEADS + query_head) * HEAD_DIM,
            num_parts,
            num_fetching,
            part % SLICES * COLUMNS + tl.arange(0, COLUMNS),
            OVERLAPS,
            HEADS,
            HEAD_DIM,
            BLOCK_P,
        )
        if ON_DEVICE:
            if (row == 0) & (part == 0):
                tl.store(seen_ptr, seen + 1)
