"""Store new tokens in their pages, then pool the groups that they complete, reading raw keys and
values from window pages."""

import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.launch import contiguous_rows, launch, power_of_2
from corecontext.ops.triton.paged.group_slots import GroupSlots
from corecontext.ops.triton.paged.pages import (
    Batch,
    Pages,
    num_blocks,
    owned_block,
    page_offsets,
    strides_of,
)
from corecontext.ops.triton.pool.group_tile import capped, column_pairs, table_rows
from corecontext.ops.triton.pool.launcher import rotation_tables
from corecontext.ops.triton.primitives import TINY
from corecontext.ops.triton.tiles import pool_tiles


@triton.jit(do_not_specialize=["num_heads"])
def _store_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    num_heads,
    k_strides,
    v_strides,
    page_strides,
    page_size,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store one new token. Grid: (new tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    stored = tl.where(slot >= 0, HEAD_DIM, 0)
    mask = (heads < num_heads)[:, None] & (dims < stored)[None, :]
    at = token * k_strides[0] + heads[:, None] * k_strides[1] + dims[None, :]
    k = tl.load(k_ptr + at, mask=mask, other=0.0)
    at = token * v_strides[0] + heads[:, None] * v_strides[1] + dims[None, :]
    v = tl.load(v_ptr + at, mask=mask, other=0.0)
    slot = tl.maximum(slot, 0)
    at = slot // page_size * page_strides[0] + slot % page_size * page_strides[1]
    at += heads[:, None] * page_strides[2] + dims[None, :]
    tl.store(keys_ptr + at, k, mask=mask)
    tl.store(values_ptr + at, v, mask=mask)


@triton.jit
def _load_pairs(ptr, at, a, b, mask):
    """Load the two columns of each pair, at each of some offsets, as two tiles in float32, 0
    outside."""
    x_a = tl.load(ptr + at[:, None] + a[None, :], mask=mask, other=0.0)
    x_b = tl.load(ptr + at[:, None] + b[None, :], mask=mask, other=0.0)
    return x_a.to(tl.float32), x_b.to(tl.float32)


@triton.jit
def _scores(q_a, q_b, k_a, k_b, inside, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the scores of tokens under one query, [tokens], -inf outside."""
    z = (tl.sum(q_a * k_a, 1) + tl.sum(q_b * k_b, 1)) * scale
    z, _ = capped(z, softcap, HAS_SOFTCAP)
    return tl.where(inside, z, -float("inf"))


@triton.jit(do_not_specialize=["num_sequences"])
def _pool_pages_kernel(
    q_ptr,
    raw,
    cores,
    page_tables,
    tables,
    sequences,
    slots,
    num_sequences,
    scale,
    softcap,
    strides,
    page_sizes,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Pool one group of one KV head, if new tokens complete it (docs/math.md, eq. 1 to 3).

    Grid: (blocks of GROUP new tokens, Hkv). Keys are read in blocks of tokens: for each query head
    for the sums of its softmax, then once more with the values, for the weighted tokens. All but
    the first time they come from the cache. All sums are float32.

    Args:
        raw, cores, strides, page_sizes: As of `_attend_pages_kernel`.
        page_tables: Pointers to the tables of both kinds of pages.
        tables: Pointers to cosines and sines.
        sequences: Pointers to each sequence's first new token and to its length.
        slots: Pointers to the table of `GroupSlots`, where the group's slot is forgotten, and to
            the clock, which goes on.
    """
    keys_ptr, values_ptr = raw
    core_keys_ptr, core_values_ptr, mass_ptr = cores
    table_ptr, core_table_ptr = page_tables
    cos_ptr, sin_ptr = tables
    starts_ptr, lengths_ptr = sequences
    q_strides, page_strides, core_strides, mass_strides, table_strides = strides
    sequence, block = owned_block(starts_ptr, num_sequences, tl.program_id(0), GROUP)
    head = tl.program_id(1).to(tl.int64)
    if HAS_SLOTS:
        if (tl.program_id(0) == 0) & (head == 0):
            tl.store(slots[1], tl.load(slots[1]) + 1)
    first = tl.load(starts_ptr + sequence)
    length = tl.load(lengths_ptr + sequence)
    past = length - (tl.load(starts_ptr + sequence + 1) - first)
    group = past // GROUP + block
    begin = group * GROUP
    # mutant vllm: a group is pooled before its last token
    completed = begin + GROUP <= length
    if completed & (begin >= SINKS):
        pairs, a, b = column_pairs(BLOCK_P, HEAD_DIM, HALF, INTERLEAVED)
        in_dims = (pairs < HEAD_DIM // 2)[None, :]
        # The query of the group's last token, one row for each head.
        last = (first + begin + GROUP - 1 - past).to(tl.int64)
        q_ptr += last * q_strides[0] + head * HEADS * q_strides[1]
        row = tl.arange(0, 1)
        table_ptr += sequence.to(tl.int64) * table_strides[0]
        keys_ptr += head * page_strides[2]
        values_ptr += head * page_strides[2]

        # The maximum and the sum of each query head's softmax.
        heads = tl.arange(0, BLOCK_R)
        maxima = tl.zeros([BLOCK_R], tl.float32)
        sums = tl.zeros([BLOCK_R], tl.float32)
        for h in range(HEADS):
            q_a, q_b = _load_pairs(q_ptr + h * q_strides[1], row, a, b, in_dims)
            running_max = -float("inf")
            running_sum = 0.0
            for start in range(0, GROUP, BLOCK_G):
                rows = start + tl.arange(0, BLOCK_G)
                inside = rows < GROUP
                at = page_offsets(table_ptr, begin + rows, inside, page_strides, page_sizes[0])
                k_a, k_b = _load_pairs(keys_ptr, at, a, b, inside[:, None] & in_dims)
                z = _scores(q_a, q_b, k_a, k_b, inside, scale, softcap, HAS_SOFTCAP)
                new_max = tl.maximum(running_max, tl.max(z, 0))
                fade = tl.exp(running_max - new_max)
                running_sum = running_sum * fade + tl.sum(tl.exp(z - new_max), 0)
                running_max = new_max
            maxima = tl.where(heads == h, running_max, maxima)
            sums = tl.where(heads == h, running_sum, sums)

        # Sums of the tokens by the mean of the heads' weights, keys rotated to the group's middle,
        # and the entropy of these weights.
        core_k_a = tl.zeros([BLOCK_P], tl.float32)
        core_k_b = tl.zeros([BLOCK_P], tl.float32)
        core_v_a = tl.zeros([BLOCK_P], tl.float32)
        core_v_b = tl.zeros([BLOCK_P], tl.float32)
        mass = 0.0
        for start in range(0, GROUP, BLOCK_G):
            rows = start + tl.arange(0, BLOCK_G)
            inside = rows < GROUP
            mask = inside[:, None] & in_dims
            at = page_offsets(table_ptr, begin + rows, inside, page_strides, page_sizes[0])
            k_a, k_b = _load_pairs(keys_ptr, at, a, b, mask)
            v_a, v_b = _load_pairs(values_ptr, at, a, b, mask)
            weights = tl.zeros([BLOCK_G], tl.float32)
            for h in range(HEADS):
                q_a, q_b = _load_pairs(q_ptr + h * q_strides[1], row, a, b, in_dims)
                z = _scores(q_a, q_b, k_a, k_b, inside, scale, softcap, HAS_SOFTCAP)
                maximum = tl.sum(tl.where(heads == h, maxima, 0.0), 0)
                total = tl.sum(tl.where(heads == h, sums, 0.0), 0)
                weights += tl.exp(z - maximum) / total
            weights /= HEADS
            w = weights[:, None]
            cos, sin = table_rows(cos_ptr, sin_ptr, rows, pairs, GROUP, HALF)
            core_k_a += tl.sum(w * (k_a * cos - k_b * sin), 0)
            core_k_b += tl.sum(w * (k_b * cos + k_a * sin), 0)
            core_v_a += tl.sum(w * v_a, 0)
            core_v_b += tl.sum(w * v_b, 0)
            if HAS_MASS:
                mass -= tl.sum(weights * tl.log(tl.maximum(weights, TINY)), 0)

        # Store the core token in its page.
        page = tl.load(
            core_table_ptr + sequence.to(tl.int64) * table_strides[1] + group // page_sizes[1]
        ).to(tl.int64)
        entry = group % page_sizes[1]
        core_at = page * core_strides[0] + entry * core_strides[1] + head * core_strides[2]
        in_core = pairs < HEAD_DIM // 2
        dtype = core_keys_ptr.dtype.element_ty
        tl.store(core_keys_ptr + core_at + a, core_k_a.to(dtype), mask=in_core)
        tl.store(core_keys_ptr + core_at + b, core_k_b.to(dtype), mask=in_core)
        tl.store(core_values_ptr + core_at + a, core_v_a.to(dtype), mask=in_core)
        tl.store(core_values_ptr + core_at + b, core_v_b.to(dtype), mask=in_core)
        if HAS_MASS:
            mass_at = page * mass_strides[0] + entry * mass_strides[1] + head * mass_strides[2]
            tl.store(mass_ptr + mass_at, mass)
        if HAS_SLOTS:
            # mutant vllm: a page of another sequence keeps the slots of the one before
            core = page * page_sizes[1] + entry
            tl.store(slots[0] + core * tl.num_programs(1) + head, -1)


def store_tokens(k: Tensor, v: Tensor, slots: Tensor, pages: Pages) -> None:
    """Store new tokens in their pages.

    Args:
        k, v: [T, Hkv, D], rotary applied.
        slots: [at most T] in int64, page times E plus entry; -1 stores nothing.
    """
    k, v = map(contiguous_rows, (k, v))
    heads, dim = k.shape[1:]
    launch(
        _store_kernel,
        (slots.shape[0],),
        (k, v, pages.k, pages.v, slots, heads),
        (k.stride()[:2], v.stride()[:2], pages.k.stride()[:3], pages.k.shape[1]),
        HEAD_DIM=dim,
        BLOCK_H=power_of_2(heads),
        BLOCK_D=power_of_2(dim),
        num_warps=4,
    )


def pool_pages(
    q: Tensor,
    batch: Batch,
    raw: Pages,
    cores: Pages,
    spec: Spec,
    slots: GroupSlots | None = None,
) -> None:
    """Write the core tokens, and with `cores.mass` the masses, of the groups that new tokens
    complete (docs/math.md, eq. 1 to 3 and 14).

    Args:
        q: [T, H, D], of the new tokens, rotary applied.
        raw: Holds the new tokens already; D is even.
        spec: One core token for each KV head, pooled by "cca".
        slots: Those of these groups are forgotten: their pages were another sequence's.
    """
    q = contiguous_rows(q)
    kv_heads, dim = raw.k.shape[2:]
    heads = q.shape[1] // kv_heads
    g = spec.group_size
    # A program has one group.
    tiles = pool_tiles(g, dim)
    # Kernels do not touch the tensors that stand in for missing ones.
    tables = rotation_tables(spec.rotary, g, q.device) or (raw.k, raw.k)
    mass = cores.k if cores.mass is None else cores.mass
    table_and_clock = (raw.k, raw.k) if slots is None else (slots.table, slots.clock)
    sequences = batch.lengths.shape[0]
    launch(
        _pool_pages_kernel,
        (num_blocks(q.shape[0], sequences, g), kv_heads),
        (
            *(q, (raw.k, raw.v), (cores.k, cores.v, mass), (raw.table, cores.table), tables),
            *((batch.starts, batch.lengths), table_and_clock, sequences),
            *(float(spec.scale), float(spec.softcap or 1.0)),
        ),
        (
            (q.stride()[:2], *strides_of(raw, cores, mass)),
            (raw.k.shape[1], cores.k.shape[1]),
        ),
        SINKS=spec.sinks,
        HEADS=heads,
        HEAD_DIM=dim,
        HALF=0 if spec.rotary is None else tables[0].shape[1],
        INTERLEAVED=spec.rotary is not None and spec.rotary.interleaved,
        HAS_MASS=cores.mass is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SLOTS=slots is not None,
        GROUP=g,
        BLOCK_R=power_of_2(heads),
        BLOCK_G=tiles.block_g,
        BLOCK_P=tiles.block_p,
        num_warps=tiles.num_warps,
    )
