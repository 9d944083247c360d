"""Attend with fetch over block tables, each new token by its own choice of groups, in launches that
depend on shapes only:

rotate, score, select   as in a decoding step without pages (`decode/step_with_fetch.py`)
mark, claim             slots for chosen groups from host memory (`group_slots.py`)
attend                  to first tokens, core tokens of groups not chosen, raw tokens of chosen
                        groups and of the window, as one list; several programs split a long one
merge                   the parts of the softmax

A token that sees all tokens raw has no far past here: its window begins with its sequence.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.capability import nvidia_capability
from corecontext.ops.fetch.low_bits import columns_of_codes, rotation
from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode.attend_entries import load_queries, store_part
from corecontext.ops.triton.decode.merge_parts import merge
from corecontext.ops.triton.decode.plan import (
    ROTATE_WARPS,
    SCORE_WARPS,
    FetchPlan,
    StepSizes,
    fetch_plan,
)
from corecontext.ops.triton.decode.score_index import rotate_kernel, score_kernel
from corecontext.ops.triton.decode.select_groups import select_kernel
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, ints, launch, power_of_2
from corecontext.ops.triton.paged.group_slots import FarPages, find_places
from corecontext.ops.triton.paged.pages import (
    IndexPages,
    Pages,
    alignment_of,
    page_offsets,
    strides_of,
)
from corecontext.ops.triton.paged.token_rows import Rows
from corecontext.ops.triton.primitives import (
    integers,
    log2_scores,
    softmax_step,
    tile_products,
    visible_cores,
    weighted_sum,
)
from corecontext.ops.triton.tiles import chip_of, decode_splits


@triton.jit
def _attend_rows_kernel(
    q_ptr,
    raw,
    cores,
    tables,
    rows,
    choice,
    partial,
    numbers,
    scale,
    strides,
    page_sizes,
    num_chosen,
    GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_FAR: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend from the query heads of a KV head, of one new token, to an even part of the entries
    that it sees.

    Grid: (T Hkv, parts).

    Args:
        raw: Pointers to keys and values of raw tokens in pages, to the same in host memory where
            HAS_FAR, and to slots [Hkv, n, GROUP, 2 D] where HAS_SLOTS.
        cores: Pointers to keys, values and masses of core tokens.
        tables: Pointers to the tables of raw tokens and of core tokens.
        rows: Pointers to the fields of `Rows`.
        choice: Pointers to groups [T Hkv, num_chosen] and marks [T Hkv, WIDTH], as `select_kernel`
            writes them, and to slots [T Hkv, num_chosen], as `find_places` does.
        partial: Pointers to the parts' outputs [T Hkv, parts, HEADS, D] and log-sum-exp [T Hkv,
            parts, HEADS].
        numbers: KV heads, window size, slots of a KV head.
        strides: Of q, of pages of raw tokens, of core tokens and of masses, of both tables' rows,
            and of pages in host memory.
        page_sizes: Entries of a page of raw tokens, of core tokens, in host memory.
    """
    kv_heads, window_size, num_slots = integers(numbers)
    q_strides, page_strides, core_strides, mass_strides, table_strides, far_strides = strides
    n = tl.program_id(0).to(tl.int64)
    row = n // kv_heads
    head = n % kv_heads
    sequence = tl.load(rows[0] + row).to(tl.int64)
    position = tl.load(rows[1] + row)
    groups = visible_cores(-tl.load(rows[2] + row) - SINKS, GROUP, window_size)
    q_ptr += row * q_strides[0] + head * TILE.heads * q_strides[1]
    q = load_queries(q_ptr, q_strides[1], TILE)
    keys_ptr = raw[0] + head * page_strides[2]
    values_ptr = raw[1] + head * page_strides[2]
    far_keys_ptr = raw[2] + head * far_strides[2]
    far_values_ptr = raw[3] + head * far_strides[2]
    core_keys_ptr = cores[0] + head * core_strides[2]
    core_values_ptr = cores[1] + head * core_strides[2]
    mass_ptr = cores[2]
    if HAS_MASS:
        mass_ptr += head * mass_strides[2]
    table_ptr = tables[0] + sequence * table_strides[0]
    core_table_ptr = tables[1] + sequence * table_strides[1]
    chosen_ptr = choice[0] + n * num_chosen
    marks_ptr = choice[1] + n * WIDTH
    places_ptr = choice[2] + n * num_chosen
    slots_ptr = raw[4] + head * num_slots * GROUP * (2 * TILE.dim)

    # The list: first tokens, core tokens, tokens of chosen groups, the window. Where all groups are
    # chosen, it has no core tokens. All groups are numbered from the first one behind the sinks.
    num_fetched = tl.minimum(groups, num_chosen) * GROUP
    num_cores = tl.where(groups > num_chosen, groups, 0)
    num_sinks = tl.where(groups > 0, SINKS, 0)
    window = num_sinks + groups * GROUP
    num_far = num_sinks + num_cores
    num_before = num_far + num_fetched
    total = num_before + position + 1 - window
    nearest = visible_cores(position, GROUP, window_size) * GROUP
    tiles = tl.cdiv(total, TILE.block_n)
    part_size = tl.cdiv(tiles, tl.num_programs(1)) * TILE.block_n
    begin = tl.program_id(1) * part_size
    end = tl.minimum(begin + part_size, total)

    acc = tl.full([TILE.block_m, TILE.block_d], 0.0, tl.float32)
    running_sum = tl.full([TILE.block_m], 0.0, tl.float32)
    running_max = tl.full([TILE.block_m], -float("inf"), tl.float32)
    dims = tl.arange(0, TILE.block_d)
    for start in tl.range(begin, end, TILE.block_n, num_stages=TILE.stages):
        # Find the entries.
        entry = start + tl.arange(0, TILE.block_n)
        inside = entry < end
        is_core = inside & (entry >= num_sinks) & (entry < num_far)
        is_fetched = inside & (entry >= num_far) & (entry < num_before)
        place = entry - num_far
        chosen = tl.load(chosen_ptr + place // GROUP, mask=is_fetched, other=0)
        token = tl.where(entry < num_sinks, entry, entry - num_before + window)
        token = tl.where(is_fetched, SINKS + chosen * GROUP + place % GROUP, token)
        group = entry - num_sinks
        core_entry = group + SINKS // GROUP
        core_at = page_offsets(core_table_ptr, core_entry, is_core, core_strides, page_sizes[1])
        is_raw = inside & ~is_core
        if HAS_FAR:
            # Pages on the device keep first tokens and those from `nearest` on.
            is_far = is_raw & (token >= SINKS) & (token < nearest)
            is_raw = is_raw & ~is_far
            far_at = page_offsets(core_table_ptr, token, is_far, far_strides, page_sizes[2])
        raw_at = page_offsets(table_ptr, token, is_raw, page_strides, page_sizes[0])
        k_at = tl.where(is_core, core_keys_ptr + core_at, keys_ptr + raw_at)
        v_at = tl.where(is_core, core_values_ptr + core_at, values_ptr + raw_at)
        if HAS_FAR:
            # mutant vllm: chosen tokens are read from the window's pages
            k_at = tl.where(is_far, far_keys_ptr + far_at, k_at)
            v_at = tl.where(is_far, far_values_ptr + far_at, v_at)
        if HAS_SLOTS:
            slot = tl.load(places_ptr + place // GROUP, mask=is_fetched, other=-1)
            slot_at = slots_ptr + (slot.to(tl.int64) * GROUP + place % GROUP) * (2 * TILE.dim)
            k_at = tl.where(slot >= 0, slot_at, k_at)
            v_at = tl.where(slot >= 0, slot_at + TILE.dim, v_at)
        k_at = tl.multiple_of(k_at, ALIGNMENT)
        v_at = tl.multiple_of(v_at, ALIGNMENT)
        mask = inside[:, None] & (dims < TILE.dim)[None, :]
        k = tl.load(k_at[:, None] + dims[None, :], mask=mask, other=0.0)
        v = tl.load(v_at[:, None] + dims[None, :], mask=mask, other=0.0)

        # Score them; core tokens of chosen groups are not seen.
        mass = 0.0
        if HAS_MASS:
            at = page_offsets(core_table_ptr, core_entry, is_core, mass_strides, page_sizes[1])
            mass = tl.load(mass_ptr + at, mask=is_core, other=0.0)[None, :]
        scores, _ = log2_scores(tile_products(q, k, TILE.vector), scale, mass, 1.0, False)
        # mutant vllm: chosen groups keep their core tokens
        is_chosen = tl.load(marks_ptr + group, mask=is_core, other=0) != 0
        scores = tl.where((inside & ~is_chosen)[None, :], scores, -float("inf"))
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, True
        )
        acc = acc * fade[:, None] + weighted_sum(weights, v, TILE.vector)
    at = n * tl.num_programs(1) + tl.program_id(1)
    acc_ptr = partial[0] + at * (TILE.heads * TILE.dim)
    lse_ptr = partial[1] + at * TILE.heads
    store_part((acc_ptr, lse_ptr), (acc, running_sum, running_max), TILE)


@functools.lru_cache(maxsize=8)
def rotations_of(bits: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """Return `IndexPages.rotations`, the same tensors at each call: captured launches read them."""
    matrices = [rotation(dim, kind, device) for kind in (dtype, torch.float32)]
    return tuple(columns_of_codes(x, bits) for x in matrices)


class Work(NamedTuple):
    """Hold the plan of a step, and the tensors that its launches leave for the next ones."""

    plan: FetchPlan
    num_groups: int
    """Groups behind the sinks of the longest sequence."""
    rotated: tuple[Tensor, Tensor]
    """Queries as whole numbers of 8 bits, with their scales, where `plan.scoring.whole`."""
    scores: Tensor
    """Of groups by the index, [T Hkv, query heads of a KV head, width]."""
    choice: tuple[Tensor, Tensor]
    """Chosen groups [T Hkv, k] and marks [T Hkv, width]."""
    partial: tuple[Tensor, Tensor]
    """The parts' outputs and log-sum-exp, as `merge` takes them."""

    @classmethod
    def of(cls, q: Tensor, kv_heads: int, longest: int, spec: Spec) -> Work:
        """Take the memory of a step with the queries q [T, H, D], of sequences of at most `longest`
        tokens."""
        tokens, num_heads, dim = q.shape
        count = tokens * kv_heads
        heads = num_heads // kv_heads
        g = spec.group_size
        num_groups = max(1, ceil_div(longest - spec.sinks, g))
        num_chosen = min(spec.fetch_groups, num_groups)
        chip = chip_of(q.device)
        entries = spec.sinks + spec.window_size + g + num_chosen * g + num_groups
        is_nvidia = nvidia_capability(q.device) is not None
        shape = (q.dtype, count, heads, dim, entries, num_groups, num_chosen, is_nvidia)
        plan = fetch_plan(chip, StepSizes(*shape), spec)
        scoring = plan.scoring
        # Parts as of tiles half as large: on an H200 16 requests of 32K take 12 % less time.
        num_parts = decode_splits(chip, count, min(entries, longest), plan.tile.block_n // 2)

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((count, *shape), dtype=dtype, device=q.device)

        num_bytes = 8 * scoring.block_m * plan.index.block_c if scoring.whole else 0
        return cls(
            plan,
            num_groups,
            rotated=(make(num_bytes, dtype=torch.int8), make(scoring.block_m)),
            scores=make(heads, scoring.width),
            choice=(make(num_chosen, dtype=torch.int32), make(scoring.width, dtype=torch.int8)),
            partial=(make(num_parts, heads, dim), make(num_parts, heads)),
        )


def attend_rows(
    q: Tensor,
    rows: Rows,
    pages: tuple[Pages, Pages],
    index: IndexPages,
    longest: int,
    spec: Spec,
    out: Tensor,
    far: FarPages | None = None,
) -> None:
    """Attend from new tokens to all that they see under fetch (docs/math.md, eq. 15).

    Args:
        q: [T, H, D], rotary applied.
        rows: Of these tokens.
        pages: Raw tokens and core tokens; they hold the new tokens and the groups that these
            complete.
        index: Holds what `pool_pages` wrote.
        longest: At least the tokens of each sequence; launches depend on it.
        out: [T, H, D], contiguous, written.
        far: Raw tokens in host memory; None where pages of raw tokens hold all.
    """
    q = contiguous_rows(q)
    raw, cores = pages
    has_far = far is not None
    far, slots = far or FarPages(raw)
    kv_heads = raw.k.shape[2]
    work = Work.of(q, kv_heads, longest, spec)
    plan = work.plan
    count = q.shape[0] * kv_heads
    num_chosen = work.choice[0].shape[1]
    sizes = (kv_heads, work.num_groups, spec.group_size, spec.window_size)
    length = (rows.pads, rows.pads)
    mass = cores.k if cores.mass is None else cores.mass
    pages = (cores.table, rows.sequences)
    if plan.scoring.whole:
        launch(
            rotate_kernel,
            (count,),
            (q, index.rotations[0], work.rotated, kv_heads),
            (q.stride()[:2],),
            INDEX=plan.index,
            SCORING=plan.scoring,
            TILE=plan.tile,
            num_warps=ROTATE_WARPS,
        )
    launch(
        score_kernel,
        (count, plan.num_scoring),
        (
            *(q, index.rotations[0], work.rotated, (index.codes, index.scales)),
            *(pages, work.scores, length, ints(0, *sizes, num_chosen)),
            float(spec.scale),
        ),
        (
            q.stride()[:2],
            (
                *(index.codes.stride()[:3], index.scales.stride()[:3]),
                (cores.table.stride(0), cores.k.shape[1]),
            ),
        ),
        ON_DEVICE=False,
        PAGED=True,
        SINKS=spec.sinks,
        INDEX=plan.index,
        SCORING=plan.scoring,
        TILE=plan.tile,
        num_warps=SCORE_WARPS,
    )
    launch(
        select_kernel,
        (count,),
        (
            *(q, index.centres, pages, work.scores, work.choice, length),
            *(work.choice * 2, work.choice, ints(0, *sizes, 0, 0), float(spec.scale)),
        ),
        (num_chosen, q.stride()[:2], (*index.centres.stride()[:2], cores.table.stride(0))),
        ON_DEVICE=False,
        PAGED=True,
        SINKS=spec.sinks,
        TILE=plan.tile,
        BLOCK=plan.scoring.width,
        BLOCK_K=power_of_2(num_chosen),
        BLOCK_N=0,
        num_warps=plan.select_warps,
    )
    # Kernels do not touch the tensors that stand in for missing ones.
    choice, kept, num_slots = (*work.choice, work.choice[0]), raw.k, 0
    if slots is not None:
        choice = (*work.choice, torch.empty_like(work.choice[0]))
        kept, num_slots = slots.tokens, slots.owner.shape[1]
        find_places(slots, choice, cores, far, rows.sequences, spec.sinks)
    launch(
        _attend_rows_kernel,
        (count, work.partial[0].shape[1]),
        (
            *(q, (raw.k, raw.v, far.k, far.v, kept), (cores.k, cores.v, mass)),
            *((raw.table, cores.table), tuple(rows), choice, work.partial),
            *(ints(kv_heads, spec.window_size, num_slots), float(spec.scale)),
        ),
        (
            (q.stride()[:2], *strides_of(raw, cores, mass), far.k.stride()[:3]),
            (raw.k.shape[1], cores.k.shape[1], far.k.shape[1]),
            num_chosen,
        ),
        GROUP=spec.group_size,
        SINKS=spec.sinks,
        WIDTH=plan.scoring.width,
        HAS_MASS=cores.mass is not None,
        HAS_FAR=has_far,
        HAS_SLOTS=slots is not None,
        ALIGNMENT=alignment_of(raw.k, raw.v, cores.k, cores.v, far.k, far.v, kept),
        TILE=plan.tile,
        **plan.attend_options,
    )
    merge(work.partial, out)
