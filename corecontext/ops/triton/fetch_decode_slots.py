"""Give the groups that a step has chosen slots on the device, and load those that are missing from
host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import RawSlots
from corecontext.ops.triton.launch import launch, power_of_2
from corecontext.ops.triton.tiles import chip_of

MOST_SLOTS = 2048
"""Slots of a KV head that one program orders by age."""
NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_COPIED = 1024  # numbers that a program copies at once
_LOADING = 64  # programs on a multiprocessor that load groups, most of which are there already


@triton.jit
def _ages(last_used_ptr, owner_ptr, marks_ptr, slots, num_slots):
    """Return the step that last read each slot, NEVER where this step reads it."""
    exists = slots < num_slots
    owner = tl.load(owner_ptr + slots, mask=exists, other=-1)
    is_read = tl.load(marks_ptr + tl.maximum(owner, 0), mask=exists & (owner >= 0), other=0) > 0
    age = tl.load(last_used_ptr + slots, mask=exists, other=0)
    # planted: fetch: a step evicts a group that it reads
    return tl.where(exists & (is_read == 0), age, NEVER)


@triton.jit(do_not_specialize=["num_chosen", "num_groups", "table_size", "num_slots"])
def find_slots_kernel(
    chosen_ptr,
    marks_ptr,
    table_ptr,
    owner_ptr,
    last_used_ptr,
    counts_ptr,
    order_ptr,
    slot_ptr,
    missing_ptr,
    num_chosen,
    num_groups,
    table_size,
    num_slots,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the slot of each chosen group, -1 for none, and the group where it is still to be
    loaded, else -1. Missing groups get the slots that were not read for longest, of equal ones the
    lower, as in `SlotStore._find_slots`.

    Grid: (B Hkv,).

    Args:
        marks_ptr: [B Hkv, num_groups], 1 for the groups chosen.
        order_ptr: [B Hkv, num_chosen], scratch.
    """
    n = tl.program_id(0).to(tl.int64)
    chosen_ptr += n * num_chosen
    marks_ptr += n * num_groups
    table_ptr += n * table_size
    owner_ptr += n * num_slots
    last_used_ptr += n * num_slots
    order_ptr += n * num_chosen

    choices = tl.arange(0, BLOCK_K)
    inside = choices < num_chosen
    group = tl.load(chosen_ptr + choices, mask=inside, other=-1)
    is_group = group >= 0
    slot = tl.load(table_ptr + tl.maximum(group, 0), mask=is_group, other=-1)
    is_missing = is_group & (slot < 0)
    rank = tl.cumsum(is_missing.to(tl.int32), 0) - 1

    # The oldest slots, one by one: few groups are missing.
    slots = tl.arange(0, BLOCK_N)
    ages = _ages(last_used_ptr, owner_ptr, marks_ptr, slots, num_slots)
    ages = tl.where(ages < NEVER, ages * BLOCK_N + slots, NEVER)
    for i in range(tl.sum(is_missing.to(tl.int32), 0)):
        oldest = tl.min(ages, 0)
        tl.store(order_ptr + i, (oldest % BLOCK_N).to(tl.int32))
        ages = tl.where(ages == oldest, NEVER, ages)
    # All threads have read the ages and written the order.
    tl.debug_barrier()
    slot = tl.where(is_missing, tl.load(order_ptr + rank, mask=is_missing, other=0), slot)
    before = tl.load(owner_ptr + slot, mask=is_missing, other=-1)
    clock = tl.load(counts_ptr + 3 * n) + 1
    hits = tl.load(counts_ptr + 3 * n + 1)
    lookups = tl.load(counts_ptr + 3 * n + 2)
    tl.debug_barrier()  # the owners of before are read

    # planted: fetch: an evicted group keeps its slot, in a step
    tl.store(table_ptr + before, before * 0 - 1, mask=before >= 0)
    tl.store(table_ptr + group, slot, mask=is_missing)
    tl.store(owner_ptr + slot, group, mask=is_missing)
    tl.store(last_used_ptr + slot, (group * 0).to(tl.int64) + clock, mask=is_group)
    tl.store(slot_ptr + n * num_chosen + choices, slot, mask=inside)
    missing = tl.where(is_missing, group, -1)
    tl.store(missing_ptr + n * num_chosen + choices, missing, mask=inside)
    num_read = tl.sum(is_group.to(tl.int64), 0)
    tl.store(counts_ptr + 3 * n, clock)
    tl.store(counts_ptr + 3 * n + 1, hits + num_read - tl.sum(is_missing.to(tl.int64), 0))
    tl.store(counts_ptr + 3 * n + 2, lookups + num_read)


@triton.jit(do_not_specialize=["num_chosen", "room", "num_slots", "first"])
def load_slots_kernel(
    missing_ptr,
    slot_ptr,
    raw_k_ptr,
    raw_v_ptr,
    keys_ptr,
    values_ptr,
    num_chosen,
    room,
    num_slots,
    first,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy missing groups from host memory into their slots.

    Grid: (B Hkv, programs that share the groups of a row).

    Args:
        first: Tokens before the first group.
        GROUP: Numbers of a group's keys.
    """
    n = tl.program_id(0).to(tl.int64)
    for i in range(tl.program_id(1), num_chosen, tl.num_programs(1)):
        at = n * num_chosen + i
        group = tl.load(missing_ptr + at)
        if group >= 0:
            slot = tl.load(slot_ptr + at)
            # planted: fetch: a missing group is loaded as if there were no first tokens
            source = (n * room + first) * HEAD_DIM + group.to(tl.int64) * GROUP
            target = (n * num_slots + slot) * GROUP
            for start in tl.static_range(0, GROUP, BLOCK):
                place = start + tl.arange(0, BLOCK)
                mask = place < GROUP
                k = tl.load(raw_k_ptr + source + place, mask=mask)
                v = tl.load(raw_v_ptr + source + place, mask=mask)
                tl.store(keys_ptr + target + place, k, mask=mask)
                tl.store(values_ptr + target + place, v, mask=mask)


def find_and_load(raw: RawSlots, chosen: Tensor, marks: Tensor, sinks: int) -> Tensor:
    """Return the slots [B Hkv, k] in int32 of the groups chosen, -1 for none, after those that were
    missing have been loaded.

    Args:
        chosen: [B Hkv, k] in int32, -1 for none.
        marks: [B Hkv, M], 1 for the groups chosen.
    """
    fetched = raw.slots
    assert fetched is not None, "there are slots"
    rows, num_chosen = chosen.shape
    num_slots, group_size, dim = fetched.keys.shape[2:]
    order, slot, missing = (torch.empty_like(chosen) for _ in range(3))
    launch(
        find_slots_kernel,
        (rows,),
        (
            *(chosen, marks, fetched.table, fetched.owner, fetched.last_used, fetched.counts),
            *(order, slot, missing, num_chosen, marks.shape[1], fetched.table.shape[2], num_slots),
        ),
        BLOCK_N=max(32, power_of_2(num_slots)),
        BLOCK_K=power_of_2(num_chosen),
        num_warps=8 if num_slots > 128 else 4,
    )
    fitting = _LOADING * chip_of(chosen.device).multiprocessors // rows
    launch(
        load_slots_kernel,
        (rows, max(1, min(num_chosen, fitting))),
        (
            *(missing, slot, raw.keys, raw.values, fetched.keys, fetched.values),
            *(num_chosen, raw.keys.shape[2], num_slots, sinks),
        ),
        GROUP=group_size * dim,
        HEAD_DIM=dim,
        BLOCK=min(_COPIED, power_of_2(group_size * dim)),
        num_warps=4,
    )
    return slot
