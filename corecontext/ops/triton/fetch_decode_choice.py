"""Choose groups in a decoding step with fetch, and write the index of a group beside it."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.fetch_decode_write import write_index
from corecontext.ops.triton.primitives import TINY, visible_cores


@triton.jit
def _choose(
    scores_ptr,
    lse_ptr,
    chosen_ptr,
    marks_ptr,
    sizes,
    num_chosen,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the numbers of the k groups with the largest sums of shares over the query heads
    (`ops.fetch.choice.choose`), rising, then -1, and a mark for each visible group.

    Bisection of a float's bits finds the sum of the last group chosen; of those with this sum the
    first ones are chosen.

    Args:
        sizes: Visible groups, and parts of the log-sum-exp.
    """
    count, num_parts = sizes
    groups = tl.arange(0, BLOCK)
    inside = groups < count
    parts = tl.arange(0, BLOCK_S)
    heads = tl.arange(0, BLOCK_H)
    # Each head's log-sum-exp.
    exists = (parts < num_parts)[:, None] & (heads < HEADS)[None, :]
    at = parts[:, None] * HEADS + heads[None, :]
    lse = tl.load(lse_ptr + at, mask=exists, other=-float("inf"))
    highest = tl.maximum(tl.max(lse, 0), -1e30)  # none is seen
    lse = highest + tl.log2(tl.maximum(tl.sum(tl.exp2(lse - highest[None, :]), 0), TINY))

    # The sum of shares, times 2^100 so that the least do not become 0: its bits, as whole numbers,
    # have its order.
    total = tl.zeros([BLOCK], tl.float32)
    for h in tl.static_range(HEADS):
        shift = 100.0 - tl.sum(tl.where(heads == h, lse, 0.0), 0)
        # Groups that are not seen have no scores; without a mask four are loaded at once.
        total += tl.exp2(tl.load(scores_ptr + h * BLOCK + groups) + shift)
    values = tl.where(inside, total.to(tl.int32, bitcast=True), -1)

    # At least k have low or more, fewer have high or more.
    low = tl.min(tl.where(inside, values, 0x7FFFFFF0), 0)
    high = tl.max(values, 0) + 1
    at_low = count
    at_high = count * 0
    while (at_low > num_chosen) & (low + 1 < high):
        middle = low + (high - low) // 2
        at_middle = tl.sum((values >= middle).to(tl.int32), 0)
        enough = at_middle >= num_chosen
        at_low = tl.where(enough, at_middle, at_low)
        at_high = tl.where(enough, at_high, at_middle)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)

    is_chosen = inside & (values >= low)
    if at_low > num_chosen:
        is_last = inside & (values == low)
        before = tl.cumsum(is_last.to(tl.int32), 0)
        # planted: fetch: of equal shares a step chooses the last groups
        is_chosen = (inside & (values >= high)) | (is_last & (before <= num_chosen - at_high))
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen_ptr + place, groups, mask=is_chosen)
    slots = tl.arange(0, BLOCK_K)
    empty = (slots >= tl.minimum(at_low, num_chosen)) & (slots < num_chosen)
    tl.store(chosen_ptr + slots, slots * 0 - 1, mask=empty)
    tl.store(marks_ptr + groups, is_chosen.to(tl.int8))


@triton.jit(
    do_not_specialize=[
        *("seen", "kv_heads", "num_groups", "group_size", "window_size", "num_parts"),
        *("room", "num_centred"),
    ]
)
def fetch_choose_kernel(
    scores_ptr,
    lse_ptr,
    chosen_ptr,
    marks_ptr,
    k_ptr,
    raw_k_ptr,
    centre_ptr,
    codes_ptr,
    scales_ptr,
    rotation_ptr,
    seen_ptr,
    pad_ptr,
    seen,
    kv_heads,
    num_groups,
    group_size,
    window_size,
    num_parts,
    room,
    num_centred,
    k_strides,
    num_chosen,
    ON_DEVICE: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALES: tl.constexpr,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose groups for each row of KV heads, and write the index of an earlier group, which no
    query sees yet, where the new token closes one.

    Grid: (B Hkv, 2), a program for each of the two.
    """
    row = tl.program_id(0)
    n = row.to(tl.int64)
    batch = (row // kv_heads).to(tl.int64)
    if ON_DEVICE:
        seen = tl.load(seen_ptr)
    later = (seen - tl.load(pad_ptr + batch)).to(tl.int32) - SINKS
    if tl.program_id(1) == 0:
        count = tl.minimum(visible_cores(later, group_size, window_size), num_groups)
        _choose(
            scores_ptr + n * HEADS * BLOCK,
            lse_ptr + n * num_parts * HEADS,
            chosen_ptr + n * num_chosen,
            marks_ptr + n * BLOCK,
            (count, num_parts),
            num_chosen,
            HEADS,
            BLOCK,
            BLOCK_H,
            BLOCK_S,
            BLOCK_K,
        )
    else:
        group = tl.maximum(later + 1 - num_centred, 0) // group_size
        closes = ((later + SINKS + 1) % group_size == 0) & (later + 1 >= num_centred)
        if closes & (group < num_groups):
            BYTES: tl.constexpr = (HEAD_DIM * BITS + 7) // 8
            k_ptr += batch * k_strides[0] + (row % kv_heads).to(tl.int64) * k_strides[1]
            write_index(
                (raw_k_ptr + (n * room + SINKS) * HEAD_DIM, k_ptr),
                (
                    centre_ptr + n * HEAD_DIM,
                    codes_ptr + n * num_groups * PARTS * BYTES,
                    scales_ptr + n * num_groups * SCALES,
                    rotation_ptr,
                ),
                (later, group, group_size, num_centred),
                BITS,
                PARTS,
                SCALES,
                LEVELS,
                HEAD_DIM,
                BLOCK_P,
                BLOCK_C,
                BLOCK_D,
                SEGMENTS,
                BLOCK_G,
            )
