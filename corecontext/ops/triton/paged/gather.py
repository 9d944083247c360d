"""Gather what a long chunk of one sequence sees, from pages and from the new tokens, in one launch:
raw tokens in order, behind them the list of its far past."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.attend.far_past import FarPast
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, ints, launch, power_of_2
from corecontext.ops.triton.paged.group_slots import GroupSlots
from corecontext.ops.triton.paged.pages import Pages, alignment_of, page_offsets, strides_of
from corecontext.ops.triton.primitives import integers
from corecontext.visibility import local_start, num_visible_cores

BLOCK_E = 32
"""Entries that a program copies: 8 KiB of keys and as many of values, of one head of 128."""


class Span(NamedTuple):
    """Tell which entries the new tokens of a sequence see: raw tokens low .. end-1, of which those
    from `past` on are new; and the far past, first tokens and the core tokens behind them."""

    low: int
    """The first raw token."""
    past: int
    """Tokens before the new ones; those from `low` on are read from pages."""
    end: int
    """Tokens of the sequence, the new ones included."""
    sinks: int
    """First tokens in the list of the far past."""
    first_group: int
    """The group of its first core token."""
    cores: int
    """Core tokens in the list."""

    @classmethod
    def of(cls, past: int, num_new: int, spec: Spec) -> Span:
        """Return the entries for `num_new` tokens behind `past` others."""
        end = past + num_new
        low = local_start(past, spec.group_size, spec.window_size)
        groups = num_visible_cores(end - 1, spec.group_size, spec.window_size)
        first_group = min(spec.sinks // spec.group_size, groups)
        # Where no group is far past, `low` is 0: the raw tokens hold the first ones.
        # mutant vllm: a long chunk does without first tokens
        sinks = min(spec.sinks, end) if groups else 0
        return cls(low, past, end, sinks, first_group, groups - first_group)


@triton.jit(
    # Sequences from any row on: their rows are not aligned.
    do_not_specialize_on_alignment=["table_ptr", "core_table_ptr"]
)
def _gather_kernel(
    new_tokens,
    raw,
    cores,
    table_ptr,
    core_table_ptr,
    slots,
    gathered,
    numbers,
    strides,
    PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy BLOCK_E entries of one KV head, of a list of `total`: raw tokens of pages, new tokens,
    first tokens, core tokens, in this order.

    Grid: (blocks of BLOCK_E entries, Hkv).

    Args:
        new_tokens: Pointers to keys and values of the new tokens.
        raw: Pointers to keys and values of raw tokens.
        cores: Pointers to keys, values and masses of core tokens.
        table_ptr, core_table_ptr: The sequence's rows of the tables of raw and of core tokens.
        slots: Pointers to the tokens and to the table of `GroupSlots`: a group before the new
            tokens that has a slot is read there, not in its page.
        gathered: Pointers to the keys, values and masses that are written.
        numbers: Entries of the list; its raw tokens from pages; all its raw tokens, new ones
            included; its first tokens; `Span.low`, `Span.first_group`; slots of a KV head.
        strides: Of new keys and values, of pages of raw tokens, of core tokens and of masses.
        PAGES: Entries of a page of raw tokens and of core tokens.
    """
    total, num_past, num_near, num_sinks, low, first_group, num_slots = integers(numbers)
    k_ptr, v_ptr = new_tokens
    keys_ptr, values_ptr = raw
    core_keys_ptr, core_values_ptr, mass_ptr = cores
    gathered_k_ptr, gathered_v_ptr, gathered_mass_ptr = gathered
    k_strides, v_strides, page_strides, core_strides, mass_strides = strides
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = index < total
    is_past = index < num_past
    is_new = (index >= num_past) & (index < num_near)
    is_core = inside & (index >= num_near + num_sinks)
    is_raw = inside & ~is_new & ~is_core

    # Find the entries.
    token = tl.where(is_past, low + index, index - num_near)
    raw_at = page_offsets(table_ptr, token, is_raw, page_strides, PAGES[0])
    raw_at += head * page_strides[2]
    group = index - num_near - num_sinks + first_group
    core_at = page_offsets(core_table_ptr, group, is_core, core_strides, PAGES[1])
    core_at += head * core_strides[2]
    new = (index - num_past).to(tl.int64)
    k_at = tl.where(is_core, core_keys_ptr + core_at, keys_ptr + raw_at)
    v_at = tl.where(is_core, core_values_ptr + core_at, values_ptr + raw_at)
    if HAS_SLOTS:
        # The table is valid for pooled groups only. First tokens and an incomplete group still have
        # there the slot of the sequence that had their page before.
        # mutant vllm: a prompt reads a slot of another sequence
        is_whole = is_past & (token < (low + num_near) // GROUP * GROUP)
        # mutant vllm: a prompt reads a slot of another sequence for its first tokens
        is_whole = is_whole & (token >= first_group * GROUP)
        kv_heads = tl.num_programs(1)
        slot_strides = (PAGES[1] * kv_heads, kv_heads)
        at = page_offsets(core_table_ptr, token // GROUP, is_whole, slot_strides, PAGES[1])
        slot = tl.load(slots[1] + at + head, mask=is_whole, other=-1)
        at = ((head * num_slots + slot) * GROUP + token % GROUP) * (2 * HEAD_DIM)
        k_at = tl.where(slot >= 0, slots[0] + at, k_at)
        v_at = tl.where(slot >= 0, slots[0] + at + HEAD_DIM, v_at)
    k_at = tl.where(is_new, k_ptr + new * k_strides[0] + head * k_strides[1], k_at)
    v_at = tl.where(is_new, v_ptr + new * v_strides[0] + head * v_strides[1], v_at)
    k_at = tl.multiple_of(k_at, ALIGNMENT)
    v_at = tl.multiple_of(v_at, ALIGNMENT)

    # Copy them.
    dims = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    at = (head * total + index)[:, None] * HEAD_DIM + dims[None, :]
    k = tl.load(k_at[:, None] + dims[None, :], mask=mask, other=0.0)
    v = tl.load(v_at[:, None] + dims[None, :], mask=mask, other=0.0)
    tl.store(gathered_k_ptr + at, k, mask=mask)
    tl.store(gathered_v_ptr + at, v, mask=mask)

    # The masses of the far past: none of first tokens.
    if HAS_MASS:
        mass_at = page_offsets(core_table_ptr, group, is_core, mass_strides, PAGES[1])
        mass_at += head * mass_strides[2]
        mass = tl.load(mass_ptr + mass_at, mask=is_core, other=0.0)
        is_far = inside & (index >= num_near)
        at = head * (total - num_near) + index - num_near
        tl.store(gathered_mass_ptr + at, mass, mask=is_far)


def gather_chunk(
    new: tuple[Tensor, Tensor],
    span: Span,
    raw: Pages,
    cores: Pages,
    spec: Spec,
    slots: GroupSlots | None = None,
) -> tuple[Tensor, Tensor, FarPast]:
    """Gather the entries that the new tokens of one sequence see.

    Args:
        new: Keys and values [T, Hkv, D] of the new tokens.
        span: Which entries these are.
        raw, cores: Pages of the sequence; tables [1, most pages].
        slots: Copies of groups of raw tokens; None reads all from `raw`.

    Returns:
        Keys and values [Hkv, S, D] of the raw tokens low .. end-1; and the list of the far past,
        one for each KV head.
    """
    k, v = map(contiguous_rows, new)
    kv_heads, dim = k.shape[1:]
    num_far = span.sinks + span.cores
    num_near = span.end - span.low
    total = num_near + num_far
    gathered = torch.empty((2, kv_heads, total, dim), dtype=k.dtype, device=k.device)
    has_mass = cores.mass is not None  # also where the list is empty: one kernel less
    gathered_mass = gathered
    if has_mass:
        gathered_mass = torch.empty((kv_heads, num_far), dtype=torch.float32, device=k.device)
    mass = cores.k if cores.mass is None else cores.mass
    # Kernels do not touch the tensors that stand in for missing ones.
    slot_tensors, num_slots = (raw.k, cores.table), 0
    if slots is not None:
        slot_tensors, num_slots = (slots.tokens, slots.table), slots.owner.shape[1]
    numbers = (total, span.past - span.low, num_near, span.sinks, span.low, span.first_group)
    launch(
        _gather_kernel,
        (ceil_div(total, BLOCK_E), kv_heads),
        (
            *((k, v), (raw.k, raw.v), (cores.k, cores.v, mass), raw.table, cores.table),
            *(slot_tensors, (gathered[0], gathered[1], gathered_mass), ints(*numbers, num_slots)),
        ),
        ((k.stride()[:2], v.stride()[:2], *strides_of(raw, cores, mass)[:3]),),
        PAGES=(raw.k.shape[1], cores.k.shape[1]),
        GROUP=spec.group_size,
        HAS_MASS=has_mass,
        HAS_SLOTS=slots is not None,
        ALIGNMENT=alignment_of(k, v, raw.k, raw.v, cores.k, cores.v, slot_tensors[0]),
        HEAD_DIM=dim,
        BLOCK_E=BLOCK_E,
        BLOCK_D=max(16, power_of_2(dim)),
        num_warps=4,
    )
    near_k, near_v = gathered[:, :, :num_near]
    far_k, far_v = gathered[:, :, num_near:]
    return near_k, near_v, FarPast(far_k, far_v, gathered_mass if has_mass else None)
