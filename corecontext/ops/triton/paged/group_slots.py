"""Keep recently fetched groups on the device, in slots, where all raw tokens are in host memory.

A group is known by the place of its core token, page times E plus entry: so sequences that share
pages share slots. The launch that pools keeps the groups that new tokens complete, if slots are
free or were not read for long: so a prompt that fits reads nothing from host memory. A step marks
the slots of the groups that it chose as read, and gives the groups without one slots that it does
not read. The launch that attends to these groups fills the slots from host memory: so the bus and
the device's memory are busy at the same time. Programs take slots at the same time, so two
sequences may load the same group in a step, each for itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.launch import ints, launch, power_of_2
from corecontext.ops.triton.paged.pages import Pages
from corecontext.ops.triton.primitives import integers

_TRIES = tl.constexpr(8)
"""Slots that a chosen group without one tries, one after the other. It takes the first if that was
not read in the last 128 steps, the next if not in the last 64 and so on, the last one if not in
this step."""
STEP_TRY = tl.constexpr(0)
PROMPT_TRY = tl.constexpr(4)
"""The first of these tries of a group that a step has chosen, and of one that is pooled: the groups
of the prompts before fill the slots within few steps, so none would be old, and each try that
fails passes over a slot."""
NOT_KEPT = tl.constexpr(-2)
"""Stands for the slot of a group that has none: it is read from host memory. -1 is no group."""
CLAIMED = tl.constexpr(-3)
"""CLAIMED - n stands for slot n, where the group belongs from this step on: it has yet to be copied
there from host memory."""


class GroupSlots(NamedTuple):
    """Hold groups of raw tokens of a layer on the device, in n slots of each KV head."""

    tokens: Tensor
    """[Hkv, n, g, 2 D], keys before values."""
    table: Tensor
    """The slot of each core token's group, [P, E, Hkv] in int32, -1 for none."""
    owner: Tensor
    """The core token of each slot, page times E plus entry, [Hkv, n] in int32, -1 for none."""
    last_used: Tensor
    """The step that last read each slot, [Hkv, n] in int64."""
    hands: Tensor
    """A hand of each KV head goes round its slots: those tried so far, [Hkv] in int64. The next to
    try is this number mod n."""
    clock: Tensor
    """Steps so far, as `write_rows` counts them, [1] in int64."""

    @classmethod
    def make(cls, tokens: Tensor, cores: tuple[int, int, int], clock: Tensor) -> GroupSlots:
        """Return empty slots in the memory `tokens`, for core tokens [P, E, Hkv]."""

        def filled(*shape: int, value: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=tokens.device)

        heads, count = tokens.shape[:2]
        return cls(
            tokens,
            table=filled(*cores, value=-1, dtype=torch.int32),
            owner=filled(heads, count, value=-1, dtype=torch.int32),
            last_used=filled(heads, count, value=-1000, dtype=torch.int64),
            hands=filled(heads, value=0, dtype=torch.int64),
            clock=clock,
        )


class FarPages(NamedTuple):
    """Hold all raw tokens of a layer in host memory; the window's are on the device, too."""

    pages: Pages
    """By the table of core tokens: a page holds the tokens that a core page stands for."""
    slots: GroupSlots | None = None
    """Copies of some groups on the device."""


@triton.jit
def take_slots(slots, core, is_missing, sizes, TRY: tl.constexpr):
    """Give groups of one KV head that miss a slot one each, and return these, [K] in int32: -1
    where none was free in so many tries, and where none is missing.

    Args:
        slots: Pointers to `GroupSlots` without the tokens.
        core: Their core tokens, page times E plus entry, [K].
        is_missing: [K].
        sizes: The KV head, KV heads, slots of a KV head.
        TRY: Number of the first try.
    """
    table_ptr, owner_ptr, last_used_ptr, hands_ptr, clock_ptr = slots
    head, kv_heads, num_slots = sizes
    owner_ptr += head * num_slots
    last_used_ptr += head * num_slots
    table_ptr += head
    core_at = core.to(tl.int64) * kv_heads
    clock = tl.load(clock_ptr)
    taken = core.to(tl.int32) * 0 - 1
    count = tl.sum(is_missing.to(tl.int32), 0)
    number = count * 0 + TRY
    while (count > 0) & (number < _TRIES):
        first = tl.atomic_add(hands_ptr + head, count.to(tl.int64))
        slot = (first + tl.cumsum(is_missing.to(tl.int32), 0) - 1) % num_slots
        age = clock - tl.load(last_used_ptr + slot, mask=is_missing, other=0)
        is_free = is_missing & (age > tl.where(number < _TRIES - 1, 128 >> number, 0))
        before = tl.atomic_max(last_used_ptr + slot, clock + core_at * 0, mask=is_free)
        # Another program may have taken it.
        is_free = is_free & (before < clock)
        evicted = tl.load(owner_ptr + slot, mask=is_free, other=-1)
        evicted_ptr = table_ptr + evicted.to(tl.int64) * kv_heads
        has_owner = evicted >= 0
        is_owner = has_owner & (tl.load(evicted_ptr, mask=has_owner, other=-1) == slot)
        # mutant vllm: an evicted group keeps its slot
        tl.store(evicted_ptr, slot.to(tl.int32) * 0 - 1, mask=is_owner)
        tl.store(owner_ptr + slot, core.to(tl.int32), mask=is_free)
        tl.store(table_ptr + core_at, slot.to(tl.int32), mask=is_free)
        taken = tl.where(is_free, slot.to(tl.int32), taken)
        is_missing = is_missing & ~is_free
        count = tl.sum(is_missing.to(tl.int32), 0)
        number += 1
    return taken


@triton.jit
def _slots_kernel(
    chosen_ptr,
    places_ptr,
    slots,
    core_table_ptr,
    sequences_ptr,
    numbers,
    num_chosen,
    PAGE: tl.constexpr,
    CLAIMS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Find the slots of the groups that a token has chosen, and mark them as read; where CLAIMS, a
    second launch, give the groups without a slot one.

    Grid: (T Hkv,).

    Args:
        chosen_ptr: Groups behind the sinks, [T Hkv, num_chosen] in int32, -1 for none.
        places_ptr: Their slots, as chosen_ptr; -1 for no group, NOT_KEPT for one without a slot, or
            as of CLAIMED.
        slots: Pointers to `GroupSlots`.
        core_table_ptr: Table of core tokens.
        sequences_ptr: Row of the table of each token.
        numbers: KV heads, slots of a KV head, the first group with a core token, stride of the
            table's rows.
        PAGE: Entries of a page of core tokens.
    """
    kv_heads, num_slots, first_group, table_stride = integers(numbers)
    n = tl.program_id(0).to(tl.int64)
    head = n % kv_heads
    choices = tl.arange(0, BLOCK_K)
    inside = choices < num_chosen
    at = n * num_chosen + choices
    group = tl.load(chosen_ptr + at, mask=inside, other=-1)
    exists = group >= 0
    entry = group + first_group
    core_table_ptr += tl.load(sequences_ptr + n // kv_heads).to(tl.int64) * table_stride
    page = tl.load(core_table_ptr + entry // PAGE, mask=exists, other=0)
    core = page * PAGE + entry % PAGE
    if not CLAIMS:
        core_at = core.to(tl.int64) * kv_heads
        slot = tl.load(slots[1] + core_at + head, mask=exists, other=-1)
        # mutant vllm: a step may evict a group that it reads
        tl.store(
            slots[3] + head * num_slots + slot, tl.load(slots[5]) + core_at * 0, mask=slot >= 0
        )
        place = tl.where(exists & (slot < 0), NOT_KEPT, slot)
        tl.store(places_ptr + at, place, mask=inside)
    else:
        place = tl.load(places_ptr + at, mask=inside, other=-1)
        slot = take_slots(slots[1:], core, place == NOT_KEPT, (head, kv_heads, num_slots), STEP_TRY)
        tl.store(places_ptr + at, -slot + CLAIMED, mask=slot >= 0)


def find_places(
    slots: GroupSlots,
    choice: tuple[Tensor, ...],
    cores: Pages,
    sequences: Tensor,
    sinks: int,
) -> None:
    """Write the slots of the groups that new tokens have chosen; those that had none get one, as
    far as slots are free.

    Args:
        choice: Groups [T Hkv, k], -1 for none; their marks, not read; the slots that are written,
            as the groups: -1 for no group, NOT_KEPT for one without a slot, or as of CLAIMED.
        cores: Core tokens; the table is that of all sequences.
        sequences: Row of the table of each new token.
        sinks: First tokens, which have no core tokens.
    """
    chosen, _, places = choice
    num_chosen = chosen.shape[1]
    g = slots.tokens.shape[2]
    for claims in (False, True):
        launch(
            _slots_kernel,
            (chosen.shape[0],),
            (
                *(chosen, places, tuple(slots), cores.table, sequences),
                ints(*slots.owner.shape, sinks // g, cores.table.stride(0)),
            ),
            (num_chosen,),
            PAGE=cores.k.shape[1],
            CLAIMS=claims,
            BLOCK_K=power_of_2(num_chosen),
            num_warps=4 if num_chosen > 64 else 1,
        )
