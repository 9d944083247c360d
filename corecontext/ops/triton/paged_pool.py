"""Store new tokens in their pages, then pool the groups that they complete, reading raw keys and
values from window pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.launch import contiguous_rows, launch, power_of_2
from corecontext.ops.triton.paged import Batch, Pages, num_blocks, owned_block, page_offsets
from corecontext.ops.triton.pool import rotation_tables
from corecontext.ops.triton.pool_mass import TINY
from corecontext.ops.triton.pool_tile import load_tables, pool_keys, rotation_pairs, token_scores
from corecontext.ops.triton.primitives import tile_mask

MOST_ELEMENTS = 4096  # query heads x tokens x columns that a program pools at a time


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
def _load_group(ptr, at, rows, cols, group_size, HEAD_DIM: tl.constexpr):
    """Load tokens of one group from their pages, [1, rows, columns] in float32, 0 outside."""
    mask = tile_mask(rows, group_size, cols, HEAD_DIM)
    return tl.load(ptr + at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)[None]


@triton.jit(do_not_specialize=["num_sequences", "group_size"])
def _pool_pages_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    core_keys_ptr,
    core_values_ptr,
    mass_ptr,
    core_table_ptr,
    cos_ptr,
    sin_ptr,
    starts_ptr,
    lengths_ptr,
    num_sequences,
    group_size,
    scale,
    softcap,
    q_strides,
    page_strides,
    core_strides,
    mass_strides,
    table_strides,
    page_sizes,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Pool one group of one KV head, if new tokens complete it (docs/math.md, eq. 1 to 3).

    Grid: (blocks of GROUP = group_size new tokens, Hkv). Keys and values are read in blocks of
    tokens: once for the softmax's sums, once for the weighted tokens; all sums are float32.
    """
    sequence, block = owned_block(starts_ptr, num_sequences, tl.program_id(0), GROUP)
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(starts_ptr + sequence)
    length = tl.load(lengths_ptr + sequence)
    past = length - (tl.load(starts_ptr + sequence + 1) - first)
    group = past // group_size + block
    begin = group * group_size
    # planted: vllm: a group is pooled before its last token
    completed = begin + group_size <= length
    if completed & (begin >= SINKS):
        # Read the query of the group's last token, of all heads.
        cols, pair, partner, sign = rotation_pairs(BLOCK_D, HALF, INTERLEAVED)
        heads = tl.arange(0, BLOCK_R)
        last = (first + begin + group_size - 1 - past).to(tl.int64)
        q_at = q_ptr + last * q_strides[0] + head * HEADS * q_strides[1]
        q_at += heads[:, None] * q_strides[1] + cols[None, :]
        q = tl.load(q_at, mask=tile_mask(heads, HEADS, cols, HEAD_DIM), other=0.0)
        q = q.to(tl.float32)
        table_ptr += sequence.to(tl.int64) * table_strides[0]
        keys_ptr += head * page_strides[2]
        values_ptr += head * page_strides[2]

        # The maximum and the sum of each query head's softmax.
        running_max = tl.full([BLOCK_R], -float("inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_R], tl.float32)
        for start in range(0, group_size, BLOCK_G):
            rows = start + tl.arange(0, BLOCK_G)
            inside = rows < group_size
            at = page_offsets(table_ptr, begin + rows, inside, page_strides, page_sizes[0])
            k = _load_group(keys_ptr, at, rows, cols, group_size, HEAD_DIM)
            z, _ = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
            new_max = tl.maximum(running_max, tl.max(z, 1))
            fade = tl.exp(running_max - new_max)
            running_sum = running_sum * fade + tl.sum(tl.exp(z - new_max[:, None]), 1)
            running_max = new_max

        # Sums of the tokens by the mean of the heads' weights, and its entropy.
        core_k = tl.zeros([1, BLOCK_D], tl.float32)
        core_v = tl.zeros([1, BLOCK_D], tl.float32)
        mass = tl.zeros([1], tl.float32)
        for start in range(0, group_size, BLOCK_G):
            rows = start + tl.arange(0, BLOCK_G)
            inside = rows < group_size
            at = page_offsets(table_ptr, begin + rows, inside, page_strides, page_sizes[0])
            cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
            k = _load_group(keys_ptr, at, rows, cols, group_size, HEAD_DIM)
            v = _load_group(values_ptr, at, rows, cols, group_size, HEAD_DIM)
            z, _ = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
            weights = tl.exp(z - running_max[:, None]) / running_sum[:, None]
            weights = tl.where((heads < HEADS)[:, None], weights, 0.0)
            weights = tl.sum(weights, 0)[None, :] / HEADS
            core_k += pool_keys(weights, k, (cos, sin, partner, sign), 1, BLOCK_D, HALF)
            core_v += tl.sum(weights[:, :, None] * v, 1)
            if HAS_MASS:
                mass -= tl.sum(weights * tl.log(tl.maximum(weights, TINY)), 1)

        # Store the core token in its page.
        page = tl.load(
            core_table_ptr + sequence.to(tl.int64) * table_strides[1] + group // page_sizes[1]
        ).to(tl.int64)
        entry = group % page_sizes[1]
        core_at = page * core_strides[0] + entry * core_strides[1] + head * core_strides[2]
        core_at = core_at + cols[None, :]
        core_k = core_k.to(core_keys_ptr.dtype.element_ty)
        core_v = core_v.to(core_values_ptr.dtype.element_ty)
        in_dims = (cols < HEAD_DIM)[None, :]
        tl.store(core_keys_ptr + core_at, core_k, mask=in_dims)
        tl.store(core_values_ptr + core_at, core_v, mask=in_dims)
        if HAS_MASS:
            mass_at = page * mass_strides[0] + entry * mass_strides[1] + head * mass_strides[2]
            tl.store(mass_ptr + mass_at + tl.arange(0, 1), mass)


def store_tokens(k: Tensor, v: Tensor, slots: Tensor, pages: Pages) -> None:
    """Store new tokens in their pages.

    Args:
        k, v: [T, Hkv, D], rotary applied.
        slots: [at most T] in int64, page times E plus entry; -1 stores nothing.
    """
    k, v = map(contiguous_rows, (k, v))
    heads, dim = k.shape[1:]
    with torch.cuda.device_of(k):
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


def pool_pages(q: Tensor, batch: Batch, raw: Pages, cores: Pages, spec: Spec) -> None:
    """Write the core tokens, and with `cores.mass` the masses, of the groups that new tokens
    complete (docs/math.md, eq. 1 to 3 and 14).

    Args:
        q: [T, H, D], of the new tokens, rotary applied.
        raw: Holds the new tokens already.
        spec: One core token for each KV head, pooled by "cca".
    """
    q = contiguous_rows(q)
    kv_heads, dim = raw.k.shape[2:]
    heads = q.shape[1] // kv_heads
    g = spec.group_size
    block_r, block_d = power_of_2(heads), power_of_2(dim)
    # Kernels do not touch the tensors that stand in for missing ones.
    cos, sin = rotation_tables(spec.rotary, g, q.device) or (raw.k, raw.k)
    mass = cores.k if cores.mass is None else cores.mass
    sequences = batch.lengths.shape[0]
    with torch.cuda.device_of(q):
        launch(
            _pool_pages_kernel,
            (num_blocks(q.shape[0], sequences, g), kv_heads),
            (
                *(q, raw.k, raw.v, raw.table, cores.k, cores.v, mass, cores.table, cos, sin),
                *(batch.starts, batch.lengths, sequences, g),
                *(float(spec.scale), float(spec.softcap or 1.0)),
            ),
            (
                *(q.stride()[:2], raw.k.stride()[:3], cores.k.stride()[:3], mass.stride()[:3]),
                (raw.table.stride(0), cores.table.stride(0)),
                (raw.k.shape[1], cores.k.shape[1]),
            ),
            SINKS=spec.sinks,
            HEADS=heads,
            HEAD_DIM=dim,
            HALF=0 if spec.rotary is None else cos.shape[1],
            INTERLEAVED=spec.rotary is not None and spec.rotary.interleaved,
            HAS_MASS=cores.mass is not None,
            HAS_SOFTCAP=spec.softcap is not None,
            GROUP=g,
            BLOCK_R=block_r,
            BLOCK_G=max(1, min(power_of_2(g), MOST_ELEMENTS // (block_r * block_d))),
            BLOCK_D=block_d,
            num_warps=4,
        )
