"""Attend with fetch over block tables, each new token by its own choice of groups, in launches that
depend on shapes only:

rotate, score, select   as in a decoding step without pages (`decode/step_with_fetch.py`)
mark, claim             slots for chosen groups from host memory (`group_slots.py`)
attend                  to first tokens, core tokens of groups not chosen, raw tokens of chosen
                        groups and of the window, as one list; several programs split a long one,
                        and each first fills the slots that its groups claimed
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
from corecontext.ops.fetch.low_bits import columns_of_codes, rotation, rotation_signs
from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode.attend_entries import load_queries, store_part
from corecontext.ops.triton.decode.merge_parts import merge
from corecontext.ops.triton.decode.plan import (
    ROTATE_WARPS,
    SCORE_WARPS,
    FetchPlan,
    StepSizes,
    fetch_plan,
    scoring_splits,
)
from corecontext.ops.triton.decode.score_index import rotate_kernel, score_kernel
from corecontext.ops.triton.decode.select_groups import select_kernel
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, ints, launch, power_of_2
from corecontext.ops.triton.paged.group_slots import CLAIMED, FarPages, find_places
from corecontext.ops.triton.paged.pages import (
    IndexPages,
    Pages,
    alignment_of,
    gcd,
    page_offsets,
    pages_of_tile,
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
from corecontext.ops.triton.tiles import Chip, chip_of

MOST_PARTS = 32


@triton.jit
def _raw_tile(first, lists, raw, choice, tables, strides, SIZES: tl.constexpr):
    """Return pointers to the keys of a tile of raw tokens, from entry `first` of their list on.

    Each run of neighbours is in one page. They are looked up a tile ahead: where a turn of the loop
    loads its own addresses, the compiler has fewer tiles on the way.

    Args:
        lists: Tokens of chosen groups, first tokens and all raw tokens of the list; the first token
            of the window, and the first one for which window pages are read.
        raw: Of the KV head, as of `_attend_rows_kernel`.
        choice: Pointers to the row's chosen groups and their places.
        tables: Pointers to the tables of the row's sequence.
        strides: Of pages of raw tokens, and of those before the window.
        SIZES: N, GROUP, SINKS, HEAD_DIM, HAS_FAR, HAS_SLOTS, ALIGNMENT, then PAGES.
    """
    num_fetched, num_sinks, num_raw, window, nearest = lists
    page_strides, far_strides = strides
    N: tl.constexpr = SIZES[0]
    GROUP: tl.constexpr = SIZES[1]
    SINKS: tl.constexpr = SIZES[2]
    RUN: tl.constexpr = gcd(N, GROUP, SINKS, SIZES[7], SIZES[9])
    members = tl.arange(0, N)
    k_at = raw[0] + members
    for i in tl.static_range(N // RUN):
        entry = first + i * RUN
        is_fetched = entry < num_fetched
        chosen = tl.load(choice[0] + entry // GROUP, mask=is_fetched, other=0)
        near = entry - num_fetched
        token = tl.where(near < num_sinks, near, near - num_sinks + window)
        token = tl.where(is_fetched, SINKS + chosen * GROUP + entry % GROUP, token)
        is_raw = entry < num_raw
        is_far = False
        if SIZES[4]:
            # First tokens have pages beside the window's.
            is_far = is_raw & (token >= SINKS) & (token < nearest)
            is_raw = is_raw & ~is_far
        run = raw[0] + page_offsets(tables[0], token, is_raw, page_strides, SIZES[7])
        stride = page_strides[1]
        if SIZES[4]:
            far_at = page_offsets(tables[1], token, is_far, far_strides, SIZES[9])
            # mutant vllm: chosen tokens are read from the window's pages
            run = tl.where(is_far, raw[1] + far_at, run)
            stride = tl.where(is_far, far_strides[1], stride)
        if SIZES[5]:
            slot = tl.load(choice[1] + entry // GROUP, mask=is_fetched, other=-1)
            slot = tl.where(slot <= CLAIMED, -slot + CLAIMED, slot)
            slot_at = (slot.to(tl.int64) * GROUP + entry % GROUP) * (2 * SIZES[3])
            run = tl.where(slot >= 0, raw[2] + slot_at, run)
            stride = tl.where(slot >= 0, 2 * SIZES[3], stride)
        k_at = tl.where(members // RUN == i, run + members % RUN * stride, k_at)
    return tl.multiple_of(k_at, SIZES[6])


@triton.jit
def _fill_slots(entries, raw, choice, num_chosen, table_ptr, strides, SIZES, BLOCK_K: tl.constexpr):
    """Copy tokens of chosen groups from host memory to the slots that these have claimed, as far as
    they are among some entries of the list of raw tokens.

    While a program waits for the bus, others attend.

    Args:
        entries: The first of these entries, and the one behind the last.
        raw, choice, SIZES: As of `_raw_tile`.
        table_ptr: The table of core tokens of the row's sequence.
        strides: Of pages in host memory.
    """
    begin, end = entries
    GROUP: tl.constexpr = SIZES[1]
    DIM: tl.constexpr = SIZES[3]
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    number = tl.arange(0, BLOCK_K)
    place = tl.load(choice[1] + number, mask=number < num_chosen, other=-1)
    is_mine = (number * GROUP < end) & (number * GROUP + GROUP > begin) & (place <= CLAIMED)
    order = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    within = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    for i in range(tl.sum(is_mine.to(tl.int32), 0)):
        is_this = is_mine & (order == i)
        this = tl.sum(tl.where(is_this, number, 0), 0)
        slot = tl.sum(tl.where(is_this, -place + CLAIMED, 0), 0).to(tl.int64)
        token = SIZES[2] + tl.load(choice[0] + this) * GROUP + within
        entry = this * GROUP + within
        exists = (within < GROUP) & (entry >= begin) & (entry < end)
        far_at = page_offsets(table_ptr, token, exists, strides, SIZES[9])[:, None] + dims[None, :]
        slot_at = ((slot * GROUP + within) * (2 * DIM))[:, None] + dims[None, :]
        mask = exists[:, None] & (dims < DIM)[None, :]
        # Values are right behind their keys.
        k = tl.load(raw[1] + far_at, mask=mask)
        v = tl.load(raw[1] + far_at + DIM, mask=mask)
        # mutant vllm: a group that a step loads is not kept
        tl.store(raw[2] + slot_at, k, mask=mask)
        tl.store(raw[2] + slot_at + DIM, v, mask=mask)
    tl.debug_barrier()


@triton.jit
def _core_tile(first, end, cores, marks_ptr, table_ptr, strides, SIZES: tl.constexpr):
    """Return pointers to the keys of a tile of core tokens, from entry `first` on, and what is
    added to their scores: -inf where they are not seen, or from `end` on.

    Args:
        cores: Of the KV head, as of `_attend_rows_kernel`.
        marks_ptr: Marks of the row's groups.
        table_ptr: The table of the row's sequence.
        strides: Of pages of core tokens and of masses.
        SIZES: N, FIRST, PAGE, HAS_MASS and ALIGNMENT.
    """
    core_strides, mass_strides = strides
    PAGE: tl.constexpr = SIZES[2]
    members = tl.arange(0, SIZES[0])
    entry = first + members
    inside = (entry >= SIZES[1]) & (entry < end)
    page = pages_of_tile(table_ptr, first, end, members, SIZES[0], PAGE)
    k_at = cores[0] + page * core_strides[0] + entry % PAGE * core_strides[1]
    # Core tokens of chosen groups are not seen.
    # mutant vllm: chosen groups keep their core tokens
    is_chosen = tl.load(marks_ptr + entry - SIZES[1], mask=inside, other=0) != 0
    bias = entry * 0.0
    if SIZES[3]:
        mass_at = page * mass_strides[0] + entry % PAGE * mass_strides[1]
        bias = tl.load(cores[1] + mass_at, mask=inside, other=0.0)
    k_at = tl.multiple_of(k_at, SIZES[4])
    return k_at, tl.where(inside & ~is_chosen, bias, -float("inf"))


@triton.jit
def _attend_tile(state, q, k_at, inside, bias, scale, TILE: tl.constexpr):
    """Continue an online softmax over a tile of entries.

    Args:
        state: Output so far, running sum and running maximum of each row.
        k_at: Pointers to the keys of the entries, of which those that are `inside` are read.
        bias: Added to their scores; -inf where they are not seen.
    """
    acc, running_sum, running_max = state
    dims = tl.arange(0, TILE.block_d)
    mask = inside[:, None] & (dims < TILE.dim)[None, :]
    at = k_at[:, None] + dims[None, :]
    k = tl.load(at, mask=mask, other=0.0)
    v = tl.load(at + TILE.dim, mask=mask, other=0.0)
    products = tile_products(q, k, TILE.vector)
    scores, _ = log2_scores(products, scale, bias[None, :], 1.0, False)
    weights, fade, running_max, running_sum = softmax_step(scores, running_max, running_sum, True)
    acc = acc * fade[:, None] + weighted_sum(weights, v, TILE.vector)
    return acc, running_sum, running_max


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
    num_chosen,
    PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_FAR: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend from the query heads of a KV head, of one new token, to an even part of the tiles
    that it sees.

    Grid: (T Hkv, parts).

    Args:
        raw: Pointers to keys of raw tokens in pages, to the same in host memory where HAS_FAR, and
            to slots [Hkv, n, GROUP, 2 D] where HAS_SLOTS. Behind all keys are their values.
        cores: Pointers to keys and masses of core tokens.
        tables: Pointers to the tables of raw tokens and of core tokens.
        rows: Pointers to the fields of `Rows`.
        choice: Pointers to groups [T Hkv, num_chosen] and marks [T Hkv, WIDTH], as `select_kernel`
            writes them, and to slots [T Hkv, num_chosen], as `find_places` does.
        partial: Pointers to the parts' outputs [T Hkv, parts, HEADS, D] and log-sum-exp [T Hkv,
            parts, HEADS].
        numbers: KV heads, window size, slots of a KV head.
        strides: Of q, of pages of raw tokens, of core tokens and of masses, of both tables' rows,
            and of pages in host memory.
        PAGES: Entries of a page of raw tokens, of core tokens, in host memory.
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
    slots_ptr = raw[2] + head * num_slots * GROUP * (2 * TILE.dim)
    raw = (raw[0] + head * page_strides[2], raw[1] + head * far_strides[2], slots_ptr)
    cores = (cores[0] + head * core_strides[2], cores[1] + head * mass_strides[2])
    table_ptr = tables[0] + sequence * table_strides[0]
    core_table_ptr = tables[1] + sequence * table_strides[1]
    chosen = (choice[0] + n * num_chosen, choice[2] + n * num_chosen)
    marks_ptr = choice[1] + n * WIDTH

    # Two lists: tokens of chosen groups, first tokens and the window; and core tokens by their
    # entries, from the beginning of a page on, none where all groups are chosen. All groups are
    # numbered from the first one behind the sinks.
    N: tl.constexpr = TILE.block_n
    FIRST: tl.constexpr = SINKS // GROUP
    BEFORE: tl.constexpr = FIRST // PAGES[1] * PAGES[1]
    num_fetched = tl.minimum(groups, num_chosen) * GROUP
    num_sinks = tl.where(groups > 0, SINKS, 0)
    window = num_sinks + groups * GROUP
    num_raw = num_fetched + num_sinks + position + 1 - window
    nearest = visible_cores(position, GROUP, window_size) * GROUP
    end_core = tl.where(groups > num_chosen, FIRST + groups, BEFORE)
    raw_tiles = tl.cdiv(num_raw, N)
    tiles = raw_tiles + tl.cdiv(end_core - BEFORE, N)
    part_size = tl.cdiv(tiles, tl.num_programs(1))
    begin = tl.program_id(1) * part_size
    end = tl.minimum(begin + part_size, tiles)

    acc = tl.full([TILE.block_m, TILE.block_d], 0.0, tl.float32)
    running_sum = tl.full([TILE.block_m], 0.0, tl.float32)
    running_max = tl.full([TILE.block_m], -float("inf"), tl.float32)
    members = tl.arange(0, N)
    lists = (num_fetched, num_sinks, num_raw, window, nearest)
    of_raw = (page_strides, far_strides)
    both = (table_ptr, core_table_ptr)
    SIZES: tl.constexpr = (N, GROUP, SINKS, TILE.dim, HAS_FAR, HAS_SLOTS, ALIGNMENT) + PAGES
    if HAS_SLOTS:
        last = tl.minimum(end, raw_tiles) * N
        places = (num_chosen, core_table_ptr, far_strides)
        _fill_slots((begin * N, last), raw, chosen, *places, SIZES, BLOCK_K)
    k_at = _raw_tile(begin * N, lists, raw, chosen, both, of_raw, SIZES)
    for tile in tl.range(begin, tl.minimum(end, raw_tiles)):
        inside = tile * N + members < num_raw
        bias = tl.where(inside, 0.0, -float("inf"))
        acc, running_sum, running_max = _attend_tile(
            (acc, running_sum, running_max), q, k_at, inside, bias, scale, TILE
        )
        k_at = _raw_tile(tile * N + N, lists, raw, chosen, both, of_raw, SIZES)
    begin = BEFORE + (tl.maximum(begin, raw_tiles) - raw_tiles) * N
    end = BEFORE + (end - raw_tiles) * N
    of_cores = (core_strides, mass_strides)
    FORM: tl.constexpr = (N, FIRST, PAGES[1], HAS_MASS, ALIGNMENT)
    k_at, bias = _core_tile(begin, end_core, cores, marks_ptr, core_table_ptr, of_cores, FORM)
    for first in tl.range(begin, end, N):
        inside = (first + members >= FIRST) & (first + members < end_core)
        acc, running_sum, running_max = _attend_tile(
            (acc, running_sum, running_max), q, k_at, inside, bias, scale, TILE
        )
        k_at, bias = _core_tile(
            first + N, end_core, cores, marks_ptr, core_table_ptr, of_cores, FORM
        )
    at = n * tl.num_programs(1) + tl.program_id(1)
    acc_ptr = partial[0] + at * (TILE.heads * TILE.dim)
    lse_ptr = partial[1] + at * TILE.heads
    store_part((acc_ptr, lse_ptr), (acc, running_sum, running_max), TILE)


@functools.lru_cache(maxsize=8)
def rotations_of(bits: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """Return `IndexPages.rotations`, the same tensors at each call: captured launches read them."""
    return columns_of_codes(rotation(dim, dtype, device), bits), rotation_signs(dim, device)


def parts_of_rows(chip: Chip, rows: int, tiles: int) -> int:
    """Return the parts of the tiles of each of `rows` KV heads, by shapes only: as many as run at
    once, three on a multiprocessor, but five where these are fewer than two. 22 requests of 32K
    take an H100 117 us in two parts, 133 in three; 57, which fetch 1.5 % of their groups over the
    bus, an H200 261 us in five parts, 280 in three, 265 in eight."""
    fitting = 3 * chip.multiprocessors // rows
    return min(MOST_PARTS, tiles, fitting if fitting > 1 else 5)


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
        # With one program a multiprocessor has too few warps.
        splits = scoring_splits(2, num_groups, scoring.block_n)
        plan = plan._replace(num_scoring=max(plan.num_scoring, splits))
        num_parts = parts_of_rows(chip, count, ceil_div(min(entries, longest), plan.tile.block_n))

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
        pages: Raw tokens and core tokens, values right behind their keys; they hold the new tokens
            and the groups that these complete.
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
            *(q, index.rotations[0], work.rotated, (index.codes, index.scales, index.centres)),
            *(pages, work.scores, length, ints(0, *sizes, num_chosen)),
            float(spec.scale),
        ),
        (
            q.stride()[:2],
            (
                *(index.codes.stride()[:3], index.scales.stride()[:3]),
                *(index.centres.stride()[:2], cores.table.stride()[:1]),
            ),
        ),
        ON_DEVICE=False,
        PAGE=cores.k.shape[1],
        SINKS=spec.sinks,
        INDEX=plan.index,
        SCORING=plan.scoring,
        TILE=plan.tile,
        num_warps=SCORE_WARPS,
        num_stages=plan.scoring.stages,
    )
    launch(
        select_kernel,
        (count,),
        (
            *(work.scores, work.choice, length),
            *(work.choice * 2, work.choice, ints(0, *sizes, 0, 0)),
        ),
        (num_chosen,),
        ON_DEVICE=False,
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
        find_places(slots, choice, cores, rows.sequences, spec.sinks)
    launch(
        _attend_rows_kernel,
        (count, work.partial[0].shape[1]),
        (
            *(q, (raw.k, far.k, kept), (cores.k, mass)),
            *((raw.table, cores.table), tuple(rows), choice, work.partial),
            *(ints(kv_heads, spec.window_size, num_slots), float(spec.scale)),
        ),
        (
            (q.stride()[:2], *strides_of(raw, cores, mass), far.k.stride()[:3]),
            num_chosen,
        ),
        PAGES=(raw.k.shape[1], cores.k.shape[1], far.k.shape[1]),
        GROUP=spec.group_size,
        SINKS=spec.sinks,
        WIDTH=plan.scoring.width,
        HAS_MASS=cores.mass is not None,
        HAS_FAR=has_far,
        HAS_SLOTS=slots is not None,
        ALIGNMENT=alignment_of(raw.k, cores.k, far.k, kept),
        BLOCK_K=power_of_2(num_chosen),
        TILE=plan.tile,
        num_stages=plan.tile.stages,
        **plan.attend_options,
    )
    merge(work.partial, out)
