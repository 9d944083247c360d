"""Give slots on the device to the groups that a decoding step has chosen."""

import triton
import triton.language as tl

MOST_SLOTS = 2048
"""Most slots of a KV head, which one program orders by age."""
_MOST_AGE = tl.constexpr(2**31 - 1)  # in steps, times the slots


@triton.jit
def load_slots(n, slots, sizes, BLOCK: tl.constexpr):
    """Load what is known of a sequence's slots before groups are chosen.

    Args:
        n: The sequence, of B Hkv.
        slots: Pointers to `FetchSlots`: table (slot of each group, or -1), owner (group of each
            slot, or -1), last_used and counts (steps, groups found in a slot, groups looked up).
        sizes: Entries of the table, slots.
        BLOCK: A power of 2, at least the groups.

    Returns:
        The slot of each group, -1 for none, [BLOCK]; pointers to those tensors of the sequence; and
        its counts.
    """
    table_size, num_slots = sizes
    table_ptr = slots[0] + n * table_size
    counts_ptr = slots[3] + 3 * n
    groups = tl.arange(0, BLOCK)
    slot = tl.load(table_ptr + groups, mask=groups < table_size, other=-1)
    counts = (tl.load(counts_ptr), tl.load(counts_ptr + 1), tl.load(counts_ptr + 2))
    of_row = (table_ptr, slots[1] + n * num_slots, slots[2] + n * num_slots, counts_ptr)
    return slot, of_row, counts


@triton.jit
def give_slots(loaded, is_chosen, is_missing, rank, num_slots, BLOCK_N: tl.constexpr):
    """Give a slot to each chosen group that has none, and return the slots of all groups; it is -2
    - slot where the group must be loaded, [groups]. A missing group gets the slot that was not read
    for longest, of equal ones the lower, as in `SlotStore._find_slots`.

    Args:
        loaded: As of `load_slots`.
        is_chosen, is_missing: Whether a group is chosen, and whether it has no slot then, [groups].
        rank: Missing groups before each, [groups].
        BLOCK_N: A power of 2, at least the slots.
    """
    slot, of_row, counts = loaded
    table_ptr, owner_ptr, last_used_ptr, counts_ptr = of_row
    clock = counts[0] + 1
    order = tl.arange(0, BLOCK_N)
    exists = order < num_slots
    owner = tl.load(owner_ptr + order, mask=exists, other=-1)
    now = (slot * 0).to(tl.int64) + clock
    # mutant fetch: a step evicts a group that it reads
    tl.store(last_used_ptr + slot, now, mask=is_chosen & (slot >= 0))
    tl.debug_barrier()  # slots that this step reads are the youngest: none is given away
    # The age and, from the last one on, the slot's number make one number of 31 bits, so that no
    # two are equal.
    age = clock - tl.load(last_used_ptr + order, mask=exists, other=0)
    age = tl.minimum(age, _MOST_AGE // BLOCK_N).to(tl.int32)
    age = tl.where(exists, age * BLOCK_N + (BLOCK_N - 1 - order), -1)
    tl.debug_barrier()  # all threads have read owners and ages before one is overwritten

    # Find the oldest slots, one by one: few groups are missing.
    num_missing = tl.sum(is_missing.to(tl.int32), 0)
    given = slot
    for i in range(num_missing):
        oldest = tl.max(age, 0)
        given = tl.where(is_missing & (rank == i), BLOCK_N - 1 - oldest % BLOCK_N, given)
        age = tl.where(age == oldest, -1, age)
    is_evicted = (age < 0) & (owner >= 0)
    # mutant fetch: an evicted group keeps its slot, in a step
    tl.store(table_ptr + owner, owner * 0 - 1, mask=is_evicted)
    tl.store(table_ptr + tl.arange(0, slot.shape[0]), given, mask=is_missing)
    tl.store(owner_ptr + given, tl.arange(0, slot.shape[0]), mask=is_missing)
    tl.store(last_used_ptr + given, now, mask=is_missing)
    num_read = tl.sum(is_chosen.to(tl.int64), 0)
    tl.store(counts_ptr, clock)
    tl.store(counts_ptr + 1, counts[1] + num_read - num_missing)
    tl.store(counts_ptr + 2, counts[2] + num_read)
    return tl.where(is_missing, -2 - given, given)
