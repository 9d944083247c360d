"""Attend from the new tokens of a ragged batch to core tokens and raw tokens in pages, in one
softmax.

A block of queries reads one list of entries: first raw tokens before its window, core tokens, the
raw tokens of its window. Long lists are shared out among programs, whose parts are merged as in a
decoding step; prompts and decoding tokens run in the same kernel.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode import _merge_kernel
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2
from corecontext.ops.triton.paged import Batch, Pages, num_blocks, owned_block
from corecontext.ops.triton.primitives import dot, log2_scores, softmax_step, visible_cores
from corecontext.ops.triton.tiles import Tiles, chip_of, decode_splits, paged_tiles

MOST_UNITS = 2**31 - 1
"""Places of entries are 32-bit numbers up to here: 32 GiB of pages of a layer."""


@triton.jit
def _entries(index, end, places, tables, PAGE: tl.constexpr):
    """Return for places of the list which are core tokens, their numbers among entries of their
    kind, and their pages, which are read now: 0 from `end` on."""
    num_sinks, num_cores, first_group, window = places[:4]
    raw_table, core_table = tables
    num_far = num_sinks + num_cores
    is_core = (index >= num_sinks) & (index < num_far)
    raw = tl.where(index < num_sinks, index, index - num_far + window)
    entry = tl.where(is_core, index - num_sinks + first_group, raw)
    table = tl.where(is_core, core_table + entry // PAGE, raw_table + entry // PAGE)
    return is_core, entry, tl.load(table, mask=index < end, other=0)


@triton.jit
def _attend_list(state, q, pages, places, begin, end, scale, softcap, MASKED: tl.constexpr, sizes):
    """Continue an online softmax over the entries begin .. end-1 of a list, in tiles.

    Args:
        state: Output so far, running sum and running maximum of each row.
        pages: Pointers to keys, values and masses, the tables of raw tokens and of core tokens,
            strides of keys and values in units of UNIT elements and of masses, the bias.
        places: Number of first tokens and of core tokens in the list, the first group with a core
            token, the first raw token of the window; each row's position and number of groups that
            are far past.
        sizes: GROUP, HAS_BIAS, HAS_MASS, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_N, ALIGNMENT, UNIT,
            WIDE, PAGE.
    """
    acc, running_sum, running_max = state
    k_ptr, v_ptr, mass_ptr, tables, strides, mass_strides, bias = pages
    first_group = places[2]
    position, groups = places[4:]
    GROUP: tl.constexpr = sizes[0]
    HAS_BIAS: tl.constexpr = sizes[1]
    HAS_MASS: tl.constexpr = sizes[2]
    HAS_SOFTCAP: tl.constexpr = sizes[3]
    HEAD_DIM: tl.constexpr = sizes[4]
    BLOCK_D: tl.constexpr = sizes[5]
    BLOCK_N: tl.constexpr = sizes[6]
    ALIGNMENT: tl.constexpr = sizes[7]
    UNIT: tl.constexpr = sizes[8]
    WIDE: tl.constexpr = sizes[9]
    PAGE: tl.constexpr = sizes[10]
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < HEAD_DIM
    columns = tl.arange(0, BLOCK_N)
    # Pages are read a tile ahead, so that keys and values need not wait for their places.
    is_core, entry, page = _entries(begin + columns, end, places, tables, PAGE)
    for start in tl.range(begin, end, BLOCK_N):
        later = _entries(start + BLOCK_N + columns, end, places, tables, PAGE)
        inside = start + columns < end
        row = entry % PAGE
        if WIDE:
            page = page.to(tl.int64)
        at = (page * strides[0] + row * strides[1]).to(tl.int64) * UNIT
        k_at = tl.multiple_of(k_ptr + at, ALIGNMENT)
        v_at = tl.multiple_of(v_ptr + at, ALIGNMENT)
        if MASKED:
            k_mask = inside[None, :] & in_dims[:, None]
            v_mask = inside[:, None] & in_dims[None, :]
        else:
            k_mask = in_dims[:, None]
            v_mask = in_dims[None, :]
        k = tl.load(k_at[None, :] + dims[:, None], mask=k_mask, other=0.0)

        # Score them, with the bias and the masses of core tokens.
        shift = 0.0
        if HAS_BIAS:
            shift = tl.where(is_core, bias, 0.0)[None, :]
        if HAS_MASS:
            mass_at = page.to(tl.int64) * mass_strides[0] + row * mass_strides[1]
            mass = tl.load(mass_ptr + mass_at, mask=is_core & inside, other=0.0)
            shift = shift + mass[None, :]
        scores, _ = log2_scores(dot(q, k), scale, shift, softcap, HAS_SOFTCAP)
        if MASKED:
            sees_core = entry[None, :] < groups[:, None]
            low = groups * GROUP
            # planted: vllm: a token is seen beside its core token
            sees_raw = (entry[None, :] >= low[:, None]) | (entry < first_group * GROUP)[None, :]
            sees_raw = sees_raw & (entry[None, :] <= position[:, None])
            seen = tl.where(is_core[None, :], sees_core, sees_raw) & inside[None, :]
            scores = tl.where(seen, scores, -float("inf"))
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, MASKED
        )
        v = tl.load(v_at[:, None] + dims[None, :], mask=v_mask, other=0.0)
        acc = acc * fade[:, None] + dot(weights.to(v.dtype), v)
        is_core, entry, page = later
    return acc, running_sum, running_max


@triton.jit(do_not_specialize=["num_sequences", "window_size"])
def _attend_pages_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    core_table_ptr,
    mass_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    acc_ptr,
    lse_ptr,
    num_sequences,
    window_size,
    scale,
    softcap,
    bias,
    q_strides,
    page_strides,
    mass_strides,
    table_strides,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IN_PARTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend from BLOCK_Q new tokens, all HEADS query heads of a KV head, to an even share of the
    entries that they see.

    Grid: (blocks of BLOCK_Q new tokens, Hkv, shares). Writes the output, or where IN_PARTS a part
    of the softmax: the normalised output in float32 and its log-sum-exp in units of log 2; -inf and
    no output where no entry is seen.
    """
    # Read the queries that this program owns: row m is token m // HEADS, head m % HEADS.
    sequence, block = owned_block(starts_ptr, num_sequences, tl.program_id(0), BLOCK_Q)
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(starts_ptr + sequence)
    num_new = tl.load(starts_ptr + sequence + 1) - first
    past = tl.load(lengths_ptr + sequence) - num_new
    if block * BLOCK_Q < num_new:
        rows = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        token = block * BLOCK_Q + rows // HEADS
        owned = (rows < BLOCK_Q * HEADS) & (token < num_new)
        mask = owned[:, None] & (dims < HEAD_DIM)[None, :]
        flat = (first + token).to(tl.int64)
        query_head = head * HEADS + rows % HEADS
        q_at = q_ptr + (flat * q_strides[0] + query_head * q_strides[1])[:, None] + dims[None, :]
        q = tl.load(q_at, mask=mask, other=0.0)

        # The list: entries that all rows see, that some see, raw tokens that all and some see.
        FIRST_GROUP: tl.constexpr = SINKS // GROUP
        lowest = past + block * BLOCK_Q
        highest = past + tl.minimum(block * BLOCK_Q + BLOCK_Q, num_new) - 1
        groups_lowest = visible_cores(lowest, GROUP, window_size)
        groups_highest = visible_cores(highest, GROUP, window_size)
        window = groups_lowest * GROUP
        num_sinks = tl.minimum(window, SINKS)
        num_far = num_sinks + tl.maximum(groups_highest - FIRST_GROUP, 0)
        whole = num_sinks + tl.maximum(groups_lowest - FIRST_GROUP, 0)
        whole = whole // BLOCK_N * BLOCK_N
        total = num_far + highest + 1 - window
        middle = num_far + groups_highest * GROUP - window
        middle = whole + (middle - whole + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        causal = num_far + lowest + 1 - window
        causal = tl.maximum(middle, middle + (causal - middle) // BLOCK_N * BLOCK_N)
        first_end = tl.minimum(middle, total)

        # This program's share of it.
        num_shares = tl.num_programs(2)
        tiles = (total + BLOCK_N - 1) // BLOCK_N
        share = (tiles + num_shares - 1) // num_shares * BLOCK_N
        begin = tl.program_id(2) * share
        end = begin + share

        position = tl.minimum(past + token, highest)
        groups = visible_cores(position, GROUP, window_size)
        row = sequence.to(tl.int64)
        tables = (table_ptr + row * table_strides[0], core_table_ptr + row * table_strides[1])
        mass = mass_ptr
        if HAS_MASS:
            mass = mass_ptr + head * mass_strides[2]
        at = head * page_strides[2] * UNIT
        pages = (keys_ptr + at, values_ptr + at, mass, tables, page_strides, mass_strides, bias)
        places = (num_sinks, num_far - num_sinks, FIRST_GROUP, window, position, groups)
        sizes: tl.constexpr = (
            GROUP,
            HAS_BIAS,
            HAS_MASS,
            HAS_SOFTCAP,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            ALIGNMENT,
            UNIT,
            WIDE,
            PAGE,
        )
        state = (
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.full([BLOCK_M], -float("inf"), tl.float32),
        )
        low, high = begin, tl.minimum(whole, end)
        state = _attend_list(state, q, pages, places, low, high, scale, softcap, False, sizes)
        low, high = tl.maximum(whole, begin), tl.minimum(first_end, end)
        state = _attend_list(state, q, pages, places, low, high, scale, softcap, True, sizes)
        low, high = tl.maximum(middle, begin), tl.minimum(causal, end)
        state = _attend_list(state, q, pages, places, low, high, scale, softcap, False, sizes)
        low, high = tl.maximum(causal, begin), tl.minimum(total, end)
        acc, running_sum, running_max = _attend_list(
            state, q, pages, places, low, high, scale, softcap, True, sizes
        )

        if IN_PARTS:
            any_seen = running_max != -float("inf")
            running_sum = tl.where(any_seen, running_sum, 1.0)
            part = (flat * tl.num_programs(1) + head) * num_shares + tl.program_id(2)
            row = part * HEADS + rows % HEADS
            tl.store(lse_ptr + row, running_max + tl.log2(running_sum), mask=owned)
            at = row[:, None] * HEAD_DIM + dims[None, :]
            tl.store(acc_ptr + at, acc / running_sum[:, None], mask=mask & any_seen[:, None])
        else:
            row = flat * (tl.num_programs(1) * HEADS) + query_head
            at = out_ptr + row[:, None] * HEAD_DIM + dims[None, :]
            tl.store(at, (acc / running_sum[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def attend_pages(
    q: Tensor,
    batch: Batch,
    raw: Pages,
    cores: Pages,
    spec: Spec,
    core_bias: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from new tokens to the core tokens and raw tokens that they see (docs/math.md, eq. 5,
    13 and 14). Which programs run depends on shapes, `batch.most_new` and `batch.longest` only.

    Args:
        q: [T, H, D], rotary applied; tokens behind those of the batch are ignored.
        raw, cores: Hold the new tokens and the core tokens of the groups that they complete, in
            pages of one memory.
        out: [T, H, D], contiguous, to write into; None makes one.

    Returns:
        [T, H, D] in the dtype of q; undefined behind the tokens of the batch. Sums are float32 and
        the same from run to run.
    """
    assert raw.k.data_ptr() == cores.k.data_ptr(), "both kinds of pages must be in one memory"
    q = contiguous_rows(q)
    tokens, num_heads, dim = q.shape
    kv_heads = raw.k.shape[2]
    heads = num_heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    chip = chip_of(q.device)
    tiles = paged_tiles(chip, q.dtype, dim, batch.most_new * heads)
    block_m = max(tiles.block_m, power_of_2(heads))
    block_q = block_m // heads
    sequences = batch.lengths.shape[0]
    blocks = num_blocks(tokens, sequences, block_q)
    parts = _num_parts(blocks * kv_heads, batch, spec, tiles, q)
    shape = (tokens * kv_heads, parts, heads)
    acc, lse = out, batch.starts
    if parts > 1:
        acc = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    mass = cores.k if cores.mass is None else cores.mass
    alignment = _alignment(raw.k, raw.v)
    # In units of so many elements, places of entries mostly fit in 32 bits: cheap products.
    unit = alignment // q.element_size()
    with torch.cuda.device_of(q):
        launch(
            _attend_pages_kernel,
            (blocks, kv_heads, parts),
            (
                *(q, raw.k, raw.v, raw.table, cores.table, mass),
                *(batch.starts, batch.lengths, out, acc, lse, sequences, spec.window_size),
                *(float(spec.scale), float(spec.softcap or 1.0), float(core_bias)),
            ),
            (
                q.stride()[:2],
                tuple(step // unit for step in raw.k.stride()[:3]),
                mass.stride()[:3],
                (raw.table.stride(0), cores.table.stride(0)),
            ),
            PAGE=raw.k.shape[1],
            GROUP=spec.group_size,
            SINKS=spec.sinks,
            HEADS=heads,
            HAS_BIAS=core_bias != 0,
            HAS_MASS=cores.mass is not None,
            HAS_SOFTCAP=spec.softcap is not None,
            IN_PARTS=parts > 1,
            ALIGNMENT=alignment,
            UNIT=unit,
            WIDE=raw.k.shape[0] * raw.k.stride(0) // unit > MOST_UNITS,
            HEAD_DIM=dim,
            BLOCK_Q=block_q,
            BLOCK_M=block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_D=max(16, power_of_2(dim)),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        if parts > 1:
            _merge(acc, lse, out, parts)
    return out


def _alignment(*pages: Tensor) -> int:
    """Return the bytes, at most 16, of which the place of each entry is a multiple: the compiler
    cannot know it of one of two places."""
    places = [x.data_ptr() for x in pages]
    places += [stride * x.element_size() for x in pages for stride in x.stride()[:3]]
    return math.gcd(16, *places)


def _num_parts(programs: int, batch: Batch, spec: Spec, tiles: Tiles, q: Tensor) -> int:
    """Return the programs that share the entries of a block."""
    entries = spec.sinks + spec.window_size + spec.group_size + batch.most_new
    entries += ceil_div(batch.longest, spec.group_size)
    entries = min(entries, batch.longest)
    return decode_splits(chip_of(q.device), programs, entries, tiles.block_n)


def _merge(acc: Tensor, lse: Tensor, out: Tensor, parts: int) -> None:
    """Merge the parts [T Hkv, parts, HEADS, D] of each query head into one softmax."""
    tokens, num_heads, dim = out.shape
    block_p, block_d = power_of_2(parts), max(16, power_of_2(dim))
    launch(
        _merge_kernel,
        (tokens * num_heads,),
        (acc, lse, out, lse, parts),
        ON_DEVICE=False,
        HEADS=acc.shape[2],
        HEAD_DIM=dim,
        BLOCK_P=block_p,
        BLOCK_D=block_d,
        num_warps=min(8, max(1, block_p * block_d // 1024)),
    )
