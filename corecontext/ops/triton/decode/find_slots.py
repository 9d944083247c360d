"""Give slots on the device to the groups that a decoding step has chosen."""

import triton
import triton.language as tl

MOST_SLOTS = 2048
"""Most slots of a KV head, which one program orders by age."""
NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # the age of a slot that must not be given away


@triton.jit
def _ages(last_used_ptr, owner_ptr, marks_ptr, slots, num_slots):
    """Return the number of the step that last read each slot, NEVER where this step reads it."""
    exists = slots < num_slots
    owner = tl.load(owner_ptr + slots, mask=exists, other=-1)
    is_read = tl.load(marks_ptr + tl.maximum(owner, 0), mask=exists & (owner >= 0), other=0) > 0
    age = tl.load(last_used_ptr + slots, mask=exists, other=0)
    # mutant fetch: a step evicts a group that it reads
    return tl.where(exists & (is_read == 0), age, NEVER)


@triton.jit
def give_slots(n, choice, slots, results, sizes, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Write the slot of each group that a sequence chose: -1 for no group, -2 - slot where the
    group is not in its slot yet and must be loaded. A missing group gets the slot that was not read
    for longest, of equal ones the lower, as in `SlotStore._find_slots`.

    Args:
        n: The sequence, of B Hkv.
        choice: Pointers to the groups chosen [B Hkv, num_chosen], rising, then -1, and to marks [B
            Hkv, width], 1 for these groups; width is the groups' number, padded.
        slots: Pointers to `FetchSlots`: table (slot of each group, or -1), owner (group of each
            slot, or -1), last_used and counts (steps, groups found in a slot, groups looked up).
        results: Pointers to the slots written, and to scratch for the slots that are given away,
            oldest first, [B Hkv, num_chosen] each.
        sizes: num_chosen, width, entries of the table, slots.
    """
    num_chosen, width, table_size, num_slots = sizes
    table_ptr, owner_ptr, last_used_ptr, counts_ptr = slots
    slot_ptr, order_ptr = results
    chosen_ptr = choice[0] + n * num_chosen
    marks_ptr = choice[1] + n * width
    table_ptr += n * table_size
    owner_ptr += n * num_slots
    last_used_ptr += n * num_slots
    order_ptr += n * num_chosen

    # Look up the slots of the chosen groups, [BLOCK_K]; number those that are missing.
    choices = tl.arange(0, BLOCK_K)
    inside = choices < num_chosen
    group = tl.load(chosen_ptr + choices, mask=inside, other=-1)
    is_group = group >= 0
    slot = tl.load(table_ptr + tl.maximum(group, 0), mask=is_group, other=-1)
    is_missing = is_group & (slot < 0)
    rank = tl.cumsum(is_missing.to(tl.int32), 0) - 1
    num_missing = tl.sum(is_missing.to(tl.int32), 0)
    clock = tl.load(counts_ptr + 3 * n) + 1
    hits = tl.load(counts_ptr + 3 * n + 1)
    lookups = tl.load(counts_ptr + 3 * n + 2)

    # Find the oldest slots, one by one: few groups are missing. The slot's number is the lower
    # digit of its age, so that no two are equal.
    order = tl.arange(0, BLOCK_N)
    ages = _ages(last_used_ptr, owner_ptr, marks_ptr, order, num_slots)
    ages = tl.where(ages < NEVER, ages * BLOCK_N + order, NEVER)
    for i in range(num_missing):
        oldest = tl.min(ages, 0)
        tl.store(order_ptr + i, (oldest % BLOCK_N).to(tl.int32))
        ages = tl.where(ages == oldest, NEVER, ages)
    # All threads have read the ages and written the order.
    tl.debug_barrier()
    slot = tl.where(is_missing, tl.load(order_ptr + rank, mask=is_missing, other=0), slot)
    evicted = tl.load(owner_ptr + slot, mask=is_missing, other=-1)
    tl.debug_barrier()  # all threads have read the owners before one is overwritten

    # mutant fetch: an evicted group keeps its slot, in a step
    tl.store(table_ptr + evicted, evicted * 0 - 1, mask=evicted >= 0)
    tl.store(table_ptr + group, slot, mask=is_missing)
    tl.store(owner_ptr + slot, group, mask=is_missing)
    tl.store(last_used_ptr + slot, (group * 0).to(tl.int64) + clock, mask=is_group)
    tl.store(
        slot_ptr + n * num_chosen + choices, tl.where(is_missing, -2 - slot, slot), mask=inside
    )
    num_read = tl.sum(is_group.to(tl.int64), 0)
    tl.store(counts_ptr + 3 * n, clock)
    tl.store(counts_ptr + 3 * n + 1, hits + num_read - num_missing)
    tl.store(counts_ptr + 3 * n + 2, lookups + num_read)
