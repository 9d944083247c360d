"""Choose groups in a decoding step with fetch."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.decode.attend_entries import row_of
from corecontext.ops.triton.primitives import TINY, integers, visible_cores


@triton.jit
def select_kernel(
    scores,
    choice,
    length,
    numbers,
    num_chosen,
    ON_DEVICE: tl.constexpr,
    SINKS: tl.constexpr,
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

    Grid: (B Hkv,). A program holds the sums of all groups of its KV head.

    Args:
        scores: Pointers to scores [B H, BLOCK] and log-sum-exp [B Hkv, num_parts, HEADS], in
            float32 and units of log 2, as `score_kernel` writes them.
        choice: Pointers to groups [B Hkv, num_chosen] in int32 and marks [B Hkv, BLOCK] in int8.
        length: Pointers to the length on the device, and to each row's padding.
    """
    seen, kv_heads, num_groups, group_size, window_size, num_parts = integers(numbers)
    n, _, _, position = row_of(length, seen, kv_heads, ON_DEVICE)
    scores_ptr = scores[0] + n * HEADS * BLOCK
    lse_ptr = scores[1] + n * num_parts * HEADS
    chosen_ptr = choice[0] + n * num_chosen
    marks_ptr = choice[1] + n * BLOCK
    count = tl.minimum(visible_cores(position - SINKS, group_size, window_size), num_groups)
    groups = tl.arange(0, BLOCK)
    inside = groups < count
    parts = tl.arange(0, BLOCK_S)
    heads = tl.arange(0, BLOCK_H)
    # Each head's log-sum-exp.
    exists = (parts < num_parts)[:, None] & (heads < HEADS)[None, :]
    at = parts[:, None] * HEADS + heads[None, :]
    lse = tl.load(lse_ptr + at, mask=exists, other=-float("inf"))  # [S, H]
    highest = tl.maximum(tl.max(lse, 0), -1e30)  # none is seen
    lse = highest + tl.log2(tl.maximum(tl.sum(tl.exp2(lse - highest[None, :]), 0), TINY))

    # The sum of shares, times 2^100 so that the least do not become 0: its bits, as whole numbers,
    # have its order.
    total = tl.zeros([BLOCK], tl.float32)  # [M]
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
        before = _running_count(is_last, BLOCK)
        # mutant fetch: of equal shares a step chooses the last groups
        is_chosen = (inside & (values >= high)) | (is_last & (before <= num_chosen - at_high))
    place = _running_count(is_chosen, BLOCK) - 1
    tl.store(chosen_ptr + place, groups, mask=is_chosen)
    slots = tl.arange(0, BLOCK_K)
    empty = (slots >= tl.minimum(at_low, num_chosen)) & (slots < num_chosen)
    tl.store(chosen_ptr + slots, slots * 0 - 1, mask=empty)
    tl.store(marks_ptr + groups, is_chosen.to(tl.int8))


@triton.jit
def _running_count(flags, BLOCK: tl.constexpr):
    """Return how many of the flags [BLOCK] are set up to each: in rows, whose counts are summed."""
    ROW: tl.constexpr = 32 if BLOCK >= 1024 else 1
    if ROW == 1:
        count = tl.cumsum(flags.to(tl.int32), 0)
    else:
        rows = tl.reshape(flags.to(tl.int32), [BLOCK // ROW, ROW])
        of_row = tl.sum(rows, 1)
        before = tl.cumsum(of_row, 0) - of_row
        count = tl.reshape(tl.cumsum(rows, 1) + before[:, None], [BLOCK])
    return count
