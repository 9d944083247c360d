"""Choose groups in a decoding step with fetch, and give them slots where there are any."""

import triton
import triton.language as tl

from corecontext.ops.triton.choose.bisection import bisect, order_of
from corecontext.ops.triton.decode.attend_entries import row_of
from corecontext.ops.triton.decode.find_slots import give_slots
from corecontext.ops.triton.primitives import integers, visible_cores


@triton.jit
def select_kernel(
    scores_ptr,
    choice,
    length,
    slots,
    places,
    numbers,
    num_chosen,
    ON_DEVICE: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the numbers of the k groups with the largest score of any query head
    (`ops.fetch.choice.choose`), rising, then -1; and for each group whether it is chosen. Of groups
    that tie for the last place the lower numbers are chosen.

    Grid: (B Hkv,). A program holds the scores of all groups of its KV head.

    Args:
        scores_ptr: [B H, BLOCK] in float32 of `score_kernel`.
        choice: Pointers to groups [B Hkv, num_chosen] in int32 and marks [B Hkv, BLOCK] in int8.
        length: Pointers to the length on the device, and to each row's padding.
        slots, places: Where BLOCK_N is not 0, `slots` and `results` of `give_slots`.
        numbers: Length (unless ON_DEVICE), KV heads, groups that there is room for, group_size,
            window_size; with slots, entries of their table and slots.
        BLOCK, BLOCK_K, BLOCK_N: Powers of 2, at least the groups, the groups chosen and the slots.
    """
    values = integers(numbers)
    seen, kv_heads, num_groups, group_size, window_size = values[:5]
    HEADS: tl.constexpr = TILE.heads
    n, _, _, position = row_of(length, seen, kv_heads, ON_DEVICE)
    scores_ptr += n * HEADS * BLOCK
    chosen_ptr = choice[0] + n * num_chosen
    marks_ptr = choice[1] + n * BLOCK
    count = tl.minimum(visible_cores(position - SINKS, group_size, window_size), num_groups)
    groups = tl.arange(0, BLOCK)
    inside = groups < count
    # Up to num_chosen groups are all chosen.
    is_chosen = inside
    place = groups
    if count > num_chosen:
        largest = tl.full([BLOCK], -float("inf"), tl.float32)  # [groups]
        for h in tl.static_range(HEADS):
            # No mask, so that four are loaded at once: `order_of` drops those that are not seen.
            largest = tl.maximum(largest, tl.load(scores_ptr + h * BLOCK + groups))
        scores = order_of(largest, inside)
        # At least num_chosen scores are >= low, fewer are >= high.
        low, high, at_low, at_high = bisect(scores, num_chosen, WIDE=True)
        is_chosen = inside & (scores >= low)
        if at_low > num_chosen:  # some groups tie for the last place
            is_last = inside & (scores == low)
            before = _running_count(is_last, BLOCK)
            # mutant fetch: of equal scores a step chooses the last groups
            is_chosen = (inside & (scores >= high)) | (is_last & (before <= num_chosen - at_high))
        place = _running_count(is_chosen, BLOCK) - 1
    tl.store(chosen_ptr + place, groups, mask=is_chosen)
    choices = tl.arange(0, BLOCK_K)
    empty = (choices >= tl.minimum(count, num_chosen)) & (choices < num_chosen)
    tl.store(chosen_ptr + choices, choices * 0 - 1, mask=empty)
    tl.store(marks_ptr + groups, is_chosen.to(tl.int8))
    if BLOCK_N:
        tl.debug_barrier()  # all threads have written the choice
        table_size, num_slots = values[5:]
        sizes = (num_chosen, BLOCK, table_size, num_slots)
        give_slots(n, choice, slots, places, sizes, BLOCK_N, BLOCK_K)


@triton.jit
def _running_count(flags, BLOCK: tl.constexpr):
    """Return how many of the flags [BLOCK] are set up to each, itself included; many flags are
    counted in rows, then the rows before each are added."""
    ROW: tl.constexpr = 32 if BLOCK >= 1024 else 1
    if ROW == 1:
        count = tl.cumsum(flags.to(tl.int32), 0)
    else:
        rows = tl.reshape(flags.to(tl.int32), [BLOCK // ROW, ROW])
        of_row = tl.sum(rows, 1)
        before = tl.cumsum(of_row, 0) - of_row
        count = tl.reshape(tl.cumsum(rows, 1) + before[:, None], [BLOCK])
    return count
