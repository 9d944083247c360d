"""Store new tokens in their pages, pool the groups that they complete, and write what fetch keeps
of such groups: an index, and a copy of their tokens in a slot."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.capability import nvidia_capability
from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode.plan import Tile, index_form
from corecontext.ops.triton.launch import (
    Constants,
    Fixed,
    contiguous_rows,
    ints,
    launch,
    power_of_2,
)
from corecontext.ops.triton.paged.group_slots import PROMPT_TRY, FarPages, take_slots
from corecontext.ops.triton.paged.index_pages import write_group_index
from corecontext.ops.triton.paged.pages import (
    Batch,
    IndexPages,
    Pages,
    num_blocks,
    owned_block,
    page_offsets,
)
from corecontext.ops.triton.paged.sequence_rows import load_rows, rows_of
from corecontext.ops.triton.pool.group_tile import capped, column_pairs, table_rows
from corecontext.ops.triton.pool.launcher import rotation_tables
from corecontext.ops.triton.primitives import TINY, integers
from corecontext.ops.triton.tiles import pool_tiles

_INDEX_WARPS = 4
"""Of a program where one of the duties is to write an index, at least."""
_REGISTERS = 128
"""Of a thread of such a program, so that four programs run on a multiprocessor at once: 1,024
tokens of an 8B model take an H200 14.3 us for 17.2 of three programs."""
_FITTING = 32 * 128
"""Numbers of a group's keys, at most, for which so many registers are enough."""


@triton.jit
def _load_query(ptr, a, b, in_dims):
    """Load a query as two tiles [1, pairs] in float32: column a of each pair, and column b."""
    x_a = tl.load(ptr + a[None, :], mask=in_dims[None, :], other=0.0)
    x_b = tl.load(ptr + b[None, :], mask=in_dims[None, :], other=0.0)
    return x_a.to(tl.float32), x_b.to(tl.float32)


@triton.jit
def _load_pairs(source, rows, a, b, in_dims):
    """Load keys or values (`load_rows`) as two tiles [tokens, pairs] in float32, as a query."""
    x_a = load_rows(source, rows, a, in_dims)
    x_b = load_rows(source, rows, b, in_dims)
    return x_a.to(tl.float32), x_b.to(tl.float32)


@triton.jit
def _scores(q_a, q_b, k_a, k_b, inside, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the scores of tokens under one query, [tokens], in natural units, -inf outside."""
    z = (tl.sum(q_a * k_a, 1) + tl.sum(q_b * k_b, 1)) * scale
    z, _ = capped(z, softcap, HAS_SOFTCAP)
    return tl.where(inside, z, -float("inf"))


@triton.jit
def _store_rows(target_ptr, target_at, x, exists, HEAD_DIM: tl.constexpr, BLOCK_P: tl.constexpr):
    """Store the rows that exist; the offsets are where they begin."""
    dims = tl.arange(0, 2 * BLOCK_P)
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(target_ptr + target_at[:, None] + dims[None, :], x, mask=mask)


@triton.jit
def _store_new(
    keys, values, sequence, targets, block, count, PAGES: tl.constexpr, SIZES: tl.constexpr
):
    """Store a block of GROUP new tokens of a sequence in their pages, of the device, or of device
    and host.

    Args:
        keys, values: As `load_rows` takes them.
        sequence: As of `rows_of`.
        targets: Strides of pages; pointers to pages of the host for the KV head, to their table,
            and their strides.
        block, count: Number of the block, and how many new tokens there are.
        PAGES: Entries of a page of the device and, where such are stored to, of the host; else 0.
        SIZES: As of `_keep_group`.
    """
    table_ptr, past = sequence
    page_strides, far_keys_ptr, far_values_ptr, far_table_ptr, far_strides = targets
    GROUP: tl.constexpr = SIZES[1]
    DIM: tl.constexpr = SIZES[2]
    dims = tl.arange(0, 2 * SIZES[4])
    for start in range(0, GROUP, SIZES[3]):
        number = start + tl.arange(0, SIZES[3])
        row = block * GROUP + number
        is_new = (number < GROUP) & (row < count)
        mask = is_new[:, None] & (dims < DIM)[None, :]
        k_at = (row.to(tl.int64) * keys[2])[:, None] + dims[None, :]
        v_at = (row.to(tl.int64) * values[2])[:, None] + dims[None, :]
        k = tl.load(keys[1] + k_at, mask=mask, other=0.0)
        v = tl.load(values[1] + v_at, mask=mask, other=0.0)
        token = past + row
        at = page_offsets(table_ptr, token, is_new, page_strides, PAGES[0])
        _store_rows(keys[0], at, k, is_new, DIM, SIZES[4])
        _store_rows(values[0], at, v, is_new, DIM, SIZES[4])
        if PAGES[1] > 0:
            at = page_offsets(far_table_ptr, token, is_new, far_strides, PAGES[1])
            _store_rows(far_keys_ptr, at, k, is_new, DIM, SIZES[4])
            _store_rows(far_values_ptr, at, v, is_new, DIM, SIZES[4])


@triton.jit
def _keep_group(
    slots,
    keys,
    values,
    sequence,
    begin,
    core,
    sizes,
    page_strides,
    SIZES: tl.constexpr,
):
    """Copy a group's tokens to a slot, if one is free, and release the one that a sequence before
    had for its place.

    Args:
        slots: Pointers to the tensors of `GroupSlots`.
        keys, values: As `load_rows` takes them.
        sequence: As of `rows_of`.
        begin: The group's first token.
        core: Its core token, page times E plus entry.
        sizes: As of `take_slots`.
        SIZES: Tokens of a page, GROUP, HEAD_DIM, BLOCK_G, BLOCK_P.
    """
    head, kv_heads, num_slots = sizes
    GROUP: tl.constexpr = SIZES[1]
    DIM: tl.constexpr = SIZES[2]
    zero = tl.arange(0, 1)
    core += zero
    # mutant vllm: a page of another sequence keeps the slots of the one before
    tl.store(slots[1] + core * kv_heads + head, zero - 1)
    slot = tl.max(take_slots(slots[1:], core, zero == 0, sizes, PROMPT_TRY), 0)
    kept_ptr = slots[0] + (head * num_slots + slot) * (GROUP * 2 * DIM)
    dims = tl.arange(0, 2 * SIZES[4])
    for start in range(0, tl.where(slot >= 0, GROUP, 0), SIZES[3]):
        number = start + tl.arange(0, SIZES[3])
        inside = number < GROUP
        rows = rows_of(begin + number, inside, sequence, page_strides, SIZES[0])
        at = number * (2 * DIM)
        k = load_rows(keys, rows, dims, dims < DIM)
        v = load_rows(values, rows, dims, dims < DIM)
        _store_rows(kept_ptr, at, k, inside, DIM, SIZES[4])
        _store_rows(kept_ptr, at + DIM, v, inside, DIM, SIZES[4])


@triton.jit
def _softmax_sums(queries, keys, tokens, columns, factors, FORM: tl.constexpr):
    """Return the maximum and the sum of each query head's softmax over a group, [BLOCK_R] each.

    Args:
        queries: Pointer to the queries of the group's last token, and a head's stride.
        keys: As `load_rows` takes them.
        tokens: The sequence, as of `rows_of`; the group's first token; strides of pages.
        columns: Columns a and b of each pair, and which pairs exist.
        factors: Scale, softcap and whether there is a softcap.
        FORM: Tokens of a page, GROUP, BLOCK_G, HEADS, BLOCK_R.
    """
    sequence, begin, page_strides = tokens
    a, b, in_dims = columns
    scale, softcap, HAS_SOFTCAP = factors
    heads = tl.arange(0, FORM[4])
    maxima = tl.zeros([FORM[4]], tl.float32)
    sums = tl.zeros([FORM[4]], tl.float32)
    for h in range(FORM[3]):
        q_a, q_b = _load_query(queries[0] + h * queries[1], a, b, in_dims)
        running_max = -float("inf")
        running_sum = 0.0
        for start in range(0, FORM[1], FORM[2]):
            number = start + tl.arange(0, FORM[2])
            inside = number < FORM[1]
            rows = rows_of(begin + number, inside, sequence, page_strides, FORM[0])
            k_a, k_b = _load_pairs(keys, rows, a, b, in_dims)
            z = _scores(q_a, q_b, k_a, k_b, inside, scale, softcap, HAS_SOFTCAP)
            new_max = tl.maximum(running_max, tl.max(z, 0))
            fade = tl.exp(running_max - new_max)
            running_sum = running_sum * fade + tl.sum(tl.exp(z - new_max), 0)
            running_max = new_max
        maxima = tl.where(heads == h, running_max, maxima)
        sums = tl.where(heads == h, running_sum, sums)
    return maxima, sums


@triton.jit
def _pool_pages_kernel(
    q_ptr,
    new,
    raw,
    far,
    cores,
    index,
    slots,
    page_tables,
    tables,
    sequences,
    numbers,
    scale,
    softcap,
    strides,
    PAGES: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STORES_FAR: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    GROUP: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INDEX: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store new tokens of a sequence for one KV head, pool one group, if they complete it
    (docs/math.md, eq. 1 to 3), and write the index of an earlier one (`index_pages.py` says which).

    Grid: (blocks of GROUP new tokens, Hkv, duties). Block i of a sequence stores its i-th GROUP new
    tokens, and pools the i-th group that they touch. One program does both, one keeps the tokens
    in a slot, one writes the index, as far as there are both: they end sooner than one that does
    all, and none reads what another one stores. Keys are read in
    blocks of BLOCK_G tokens: with the values, for the weighted tokens; where a group has several
    blocks, before that by each query head for the sums of its softmax. All sums are float32.

    Args:
        q_ptr: Queries of the new tokens, [T, H, D].
        new: Pointers to their keys, values and slots.
        raw, far: Pointers to keys and values of raw tokens in pages, of the device and of the host.
        cores: Pointers to keys, values and masses of core tokens.
        index: Pointers to codes, scales and centres of the index, and to the signs of its rotation.
        slots: Pointers to the tensors of `GroupSlots`, in their order: tokens in slots, the slot of
            each core token (-1: none), and what finds a slot, where the group is copied to.
        page_tables: Pointers to the tables of raw tokens and of core tokens.
        tables: Pointers to cosines and sines of the rotation to a group's middle.
        sequences: Pointers to each sequence's first new token and to its length.
        numbers: Sequences, slots of a KV head.
        strides: Of q, of pages of raw tokens, of core tokens and of masses, of both tables' rows,
            of `far`, of new keys and values; then of codes, scales and centres.
        PAGES: Entries of a page of raw tokens, of core tokens, of `far`.
        CENTRED: Tokens that the centre of the index counts.
    """
    num_sequences, num_slots = integers(numbers)
    keys_ptr, values_ptr = raw
    core_keys_ptr, core_values_ptr, mass_ptr = cores
    cos_ptr, sin_ptr = tables
    starts_ptr, lengths_ptr = sequences
    q_strides, page_strides, core_strides, mass_strides, table_strides = strides[:5]
    far_strides, k_strides, v_strides = strides[5:8]
    sequence, block = owned_block(starts_ptr, num_sequences, tl.program_id(0), GROUP)
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(starts_ptr + sequence)
    length = tl.load(lengths_ptr + sequence)
    past = length - (tl.load(starts_ptr + sequence + 1) - first)
    group = past // GROUP + block
    begin = group * GROUP
    first_slot = tl.load(new[2] + first, mask=past < length, other=-1)
    # mutant vllm: a step without places stores its tokens
    length = tl.where(first_slot < 0, past, length)
    core_table_ptr = page_tables[1] + sequence.to(tl.int64) * table_strides[1]
    tokens = (page_tables[0] + sequence.to(tl.int64) * table_strides[0], past)
    new_k_ptr = new[0] + first.to(tl.int64) * k_strides[0] + head * k_strides[1]
    new_v_ptr = new[1] + first.to(tl.int64) * v_strides[0] + head * v_strides[1]
    keys = (keys_ptr + head * page_strides[2], new_k_ptr, k_strides[0])
    values = (values_ptr + head * page_strides[2], new_v_ptr, v_strides[0])
    SIZES: tl.constexpr = (PAGES[0], GROUP, HEAD_DIM, BLOCK_G, BLOCK_P)
    # The longest duty begins first.
    duty = tl.num_programs(2) - 1 - tl.program_id(2)
    if duty == 0:
        far_head = head * far_strides[2]
        targets = (page_strides, far[0] + far_head, far[1] + far_head, core_table_ptr, far_strides)
        STORED: tl.constexpr = (PAGES[0], PAGES[2] if STORES_FAR else 0)
        _store_new(keys, values, tokens, targets, block, length - past, STORED, SIZES)
    # mutant vllm: a group is pooled before its last token
    completed = (begin + GROUP <= length) & (begin >= SINKS)
    if completed & (duty == 0):
        pairs, a, b = column_pairs(BLOCK_P, HEAD_DIM, HALF, INTERLEAVED)
        in_dims = pairs < HEAD_DIM // 2
        # The query of the group's last token, one row for each head.
        last = (first + begin + GROUP - 1 - past).to(tl.int64)
        q_ptr += last * q_strides[0] + head * HEADS * q_strides[1]

        # A group of several blocks needs the sums of each query head's softmax before.
        IS_ONE: tl.constexpr = GROUP <= BLOCK_G
        heads = tl.arange(0, BLOCK_R)
        if not IS_ONE:
            of_group = (tokens, begin, page_strides)
            columns = (a, b, in_dims)
            factors = (scale, softcap, HAS_SOFTCAP)
            FORM: tl.constexpr = (PAGES[0], GROUP, BLOCK_G, HEADS, BLOCK_R)
            maxima, sums = _softmax_sums(
                (q_ptr, q_strides[1]), keys, of_group, columns, factors, FORM
            )

        # Sums of the tokens by the mean of the heads' weights, keys rotated to the group's middle,
        # and the entropy of these weights.
        core_k_a = tl.zeros([BLOCK_P], tl.float32)
        core_k_b = tl.zeros([BLOCK_P], tl.float32)
        core_v_a = tl.zeros([BLOCK_P], tl.float32)
        core_v_b = tl.zeros([BLOCK_P], tl.float32)
        mass = 0.0
        for start in range(0, GROUP, BLOCK_G):
            number = start + tl.arange(0, BLOCK_G)
            inside = number < GROUP
            rows = rows_of(begin + number, inside, tokens, page_strides, PAGES[0])
            k_a, k_b = _load_pairs(keys, rows, a, b, in_dims)
            v_a, v_b = _load_pairs(values, rows, a, b, in_dims)
            weights = tl.zeros([BLOCK_G], tl.float32)
            for h in tl.range(HEADS, loop_unroll_factor=4):
                q_a, q_b = _load_query(q_ptr + h * q_strides[1], a, b, in_dims)
                z = _scores(q_a, q_b, k_a, k_b, inside, scale, softcap, HAS_SOFTCAP)
                if IS_ONE:
                    maximum = tl.max(z, 0)
                    total = tl.sum(tl.exp(z - maximum), 0)
                else:
                    maximum = tl.sum(tl.where(heads == h, maxima, 0.0), 0)
                    total = tl.sum(tl.where(heads == h, sums, 0.0), 0)
                weights += tl.exp(z - maximum) / total
            weights /= HEADS
            w = weights[:, None]
            cos, sin = table_rows(cos_ptr, sin_ptr, number, pairs, GROUP, HALF)
            core_k_a += tl.sum(w * (k_a * cos - k_b * sin), 0)
            core_k_b += tl.sum(w * (k_b * cos + k_a * sin), 0)
            core_v_a += tl.sum(w * v_a, 0)
            core_v_b += tl.sum(w * v_b, 0)
            if HAS_MASS:
                mass -= tl.sum(weights * tl.log(tl.maximum(weights, TINY)), 0)

        # Store the core token in its page.
        page = tl.load(core_table_ptr + group // PAGES[1]).to(tl.int64)
        entry = group % PAGES[1]
        core_at = page * core_strides[0] + entry * core_strides[1] + head * core_strides[2]
        dtype = core_keys_ptr.dtype.element_ty
        tl.store(core_keys_ptr + core_at + a, core_k_a.to(dtype), mask=in_dims)
        tl.store(core_keys_ptr + core_at + b, core_k_b.to(dtype), mask=in_dims)
        tl.store(core_values_ptr + core_at + a, core_v_a.to(dtype), mask=in_dims)
        tl.store(core_values_ptr + core_at + b, core_v_b.to(dtype), mask=in_dims)
        if HAS_MASS:
            mass_at = page * mass_strides[0] + entry * mass_strides[1] + head * mass_strides[2]
            tl.store(mass_ptr + mass_at, mass)
    if HAS_SLOTS:
        if completed & (duty == 1):
            page = tl.load(core_table_ptr + group // PAGES[1]).to(tl.int64)
            core = page * PAGES[1] + group % PAGES[1]
            of_slots = (head, tl.num_programs(1), num_slots)
            _keep_group(slots, keys, values, tokens, begin, core, of_slots, page_strides, SIZES)
    if HAS_INDEX:
        if duty == tl.num_programs(2) - 1:
            write_group_index(
                keys,
                index,
                tokens,
                core_table_ptr,
                (head, group, length),
                (page_strides, strides[8], strides[9], strides[10]),
                PAGES,
                SINKS,
                GROUP,
                CENTRED,
                INDEX,
                TILE,
            )


class PoolPlan(NamedTuple):
    """Hold what all launches of `pool_pages` for the caches of a layer have in common."""

    raw: Fixed
    """Keys and values of raw tokens in pages; the other fields as `_pool_pages_kernel` has them."""
    far: Fixed
    cores: Fixed
    index: Fixed
    slots: Fixed
    rotation: Fixed
    strides: tuple[tuple[tuple[int, ...], ...], ...]
    """Of pages, and of the index."""
    num_slots: int
    """Of a KV head."""
    scale: float
    softcap: float
    kv_heads: int
    duties: int
    """Programs among which the work for a group is split."""
    num_warps: int
    """Of a program."""
    most_registers: int | None
    """Of a thread."""
    constants: dict[str, Any]
    made: dict[bool, Constants]
    """Results of `compiled_for`."""

    def compiled_for(self, stores_far: bool) -> Constants:
        """Return what the kernel is compiled for that stores new tokens on the host as well, or on
        the device alone."""
        if stores_far not in self.made:
            self.made[stores_far] = Constants(
                **self.constants,
                STORES_FAR=stores_far,
                num_warps=self.num_warps,
                maxnreg=self.most_registers,
            )
        return self.made[stores_far]

    @classmethod
    def of(
        cls,
        raw: Pages,
        cores: Pages,
        spec: Spec,
        num_heads: int,
        index: IndexPages | None = None,
        far: FarPages | None = None,
    ) -> PoolPlan:
        """Return the plan of caches, whose memory must not move.

        Args:
            raw, cores: Tables are not read. D is even.
            spec: group_size is one number.
            num_heads: Query heads.
            index: With fetch, where the index is written.
            far: Raw tokens in host memory, where new ones are stored, too. Completed groups are
                copied into slots that are free; slots that sequences before had for their places
                are released.
        """
        kv_heads, dim = raw.k.shape[2:]
        g = spec.group_size
        # Only block_g, block_p and num_warps count: here each program has one group.
        tiles = pool_tiles(g, dim)
        # Kernels do not touch the tensors that stand in for missing ones.
        tables = rotation_tables(spec.rotary, g, raw.k.device) or (raw.k, raw.k)
        mass = cores.k if cores.mass is None else cores.mass
        far_pages, slots = far or FarPages(raw)
        slot_tensors, index_tensors, form = (raw.k,) * 6, (raw.k,) * 4, None
        if slots is not None:
            slot_tensors = tuple(slots)
        if index is not None:
            index_tensors = (*index[:3], index.rotations[1])
            form = index_form(spec, dim)
        of_index = (*(x.stride()[:3] for x in index_tensors[:2]), index_tensors[2].stride()[:2])
        registers = None
        if index is not None and g * dim <= _FITTING and nvidia_capability(raw.k.device):
            registers = _REGISTERS
        num_slots = 0 if slots is None else slots.owner.shape[1]
        constants = {
            "PAGES": (raw.k.shape[1], cores.k.shape[1], far_pages.k.shape[1]),
            "SINKS": spec.sinks,
            "HEADS": num_heads // kv_heads,
            "HEAD_DIM": dim,
            "HALF": 0 if spec.rotary is None else tables[0].shape[1],
            "INTERLEAVED": spec.rotary is not None and spec.rotary.interleaved,
            "HAS_MASS": cores.mass is not None,
            "HAS_SOFTCAP": spec.softcap is not None,
            "HAS_SLOTS": slots is not None,
            "HAS_INDEX": index is not None,
            "GROUP": g,
            "CENTRED": spec.num_centred,
            "BLOCK_R": power_of_2(num_heads // kv_heads),
            "BLOCK_G": tiles.block_g,
            "BLOCK_P": tiles.block_p,
            "INDEX": form,
            # Writing an index needs the head's size alone of a tile.
            "TILE": Tile(1, dim, 1, 1, max(16, power_of_2(dim)), vector=False, stages=1),
        }
        return cls(
            raw=Fixed(raw.k, raw.v),
            far=Fixed(*far_pages[:2]),
            cores=Fixed(cores.k, cores.v, mass),
            index=Fixed(*index_tensors),
            slots=Fixed(*slot_tensors),
            rotation=Fixed(*tables),
            strides=(
                (raw.k.stride()[:3], cores.k.stride()[:3], mass.stride()[:3]),
                (far_pages.k.stride()[:3],),
                of_index,
            ),
            num_slots=num_slots,
            scale=float(spec.scale),
            softcap=float(spec.softcap or 1.0),
            kv_heads=kv_heads,
            duties=1 + (slots is not None) + (index is not None),
            num_warps=tiles.num_warps if index is None else max(_INDEX_WARPS, tiles.num_warps),
            most_registers=registers,
            constants=constants,
            made={},
        )


def pool_pages(
    q: Tensor,
    new: tuple[Tensor, Tensor, Tensor],
    batch: Batch,
    tables: tuple[Tensor, Tensor],
    plan: PoolPlan,
    stores_far: bool = False,
) -> None:
    """Store new tokens, and write the core tokens, and where the plan has masses these, of the
    groups that they complete (docs/math.md, eq. 1 to 3 and 14).

    Args:
        q: [T, H, D], of the new tokens, rotary applied.
        new: Their keys and values [T, Hkv, D], and their slots, [T] in int64. Those of a sequence
            whose first slot is -1 are neither stored nor counted: a server's step may be there only
            to keep ranks together.
        tables: Of raw tokens and of core tokens.
        stores_far: Whether they are stored in host memory, too, where the plan has such pages.
    """
    k, v, places = new
    q, k, v = map(contiguous_rows, (q, k, v))
    sequences = batch.lengths.shape[0]
    blocks = num_blocks(q.shape[0], sequences, plan.constants["GROUP"])
    of_pages, of_far, of_index = plan.strides
    of_tables = (tables[0].stride(0), tables[1].stride(0))
    of_new = (k.stride()[:2], v.stride()[:2])
    launch(
        _pool_pages_kernel,
        (blocks, plan.kv_heads, plan.duties),
        (
            *(q, (k, v, places), plan.raw, plan.far, plan.cores, plan.index, plan.slots, tables),
            *(plan.rotation, (batch.starts, batch.lengths), ints(sequences, plan.num_slots)),
            *(plan.scale, plan.softcap),
        ),
        ((q.stride()[:2], *of_pages, of_tables, *of_far, *of_new, *of_index),),
        plan.compiled_for(stores_far),
    )
