"""Attend from the new tokens of a ragged batch to core tokens and raw tokens in pages, in one
softmax.

A block of queries reads one list of entries: first raw tokens before its window, core tokens, the
raw tokens of its window. Several programs split a long list, and their parts are merged as in a
decoding step. Prompts and decoding tokens run in the same kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode.merge_parts import merge
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, ints, launch, power_of_2
from corecontext.ops.triton.paged.pages import (
    Batch,
    Pages,
    alignment_of,
    num_blocks,
    owned_block,
    page_offsets,
    strides_of,
)
from corecontext.ops.triton.primitives import (
    dot,
    integers,
    log2_scores,
    softmax_step,
    visible_cores,
)
from corecontext.ops.triton.tiles import (
    MOST_SPLITS,
    Tiles,
    chip_of,
    decode_splits,
    paged_tiles,
)


@triton.jit
def _attend_list(state, q, pages, places, begin, end, scale, softcap, MASKED: tl.constexpr, sizes):
    """Continue an online softmax over the entries begin .. end-1 of a list, in tiles.

    Args:
        state: Weighted values so far, running sum and running maximum of each row.
        q: Queries [BLOCK_M, BLOCK_D].
        pages: Pointers to keys, values and table of raw tokens, to the same of core tokens, to
            masses; strides of raw tokens, core tokens and masses.
        places: Number of first tokens and of core tokens in the list, the first group with a core
            token, the first raw token of the window; each row's position and number of groups that
            are far past.
        MASKED: Whether some row does not see some of these entries.
        sizes: HAS_MASS and HAS_SOFTCAP as one, GROUP, HEAD_DIM, BLOCK_D, BLOCK_N,
            ALIGNMENT and PAGES.
    """
    acc, running_sum, running_max = state
    raw_k, raw_v, raw_table, core_k, core_v, core_table, mass_ptr = pages[:7]
    raw_strides, core_strides, mass_strides = pages[7:]
    num_sinks, num_cores, first_group, window, position, groups = places
    HAS_MASS: tl.constexpr = sizes[0][0]
    HAS_SOFTCAP: tl.constexpr = sizes[0][1]
    GROUP: tl.constexpr = sizes[1]
    HEAD_DIM: tl.constexpr = sizes[2]
    BLOCK_D: tl.constexpr = sizes[3]
    BLOCK_N: tl.constexpr = sizes[4]
    ALIGNMENT: tl.constexpr = sizes[5]
    PAGES: tl.constexpr = sizes[6]
    dims = tl.arange(0, BLOCK_D)
    num_far = num_sinks + num_cores
    for start in tl.range(begin, end, BLOCK_N):
        # Find the entries: by their number in the list, in pages of one kind or the other.
        index = start + tl.arange(0, BLOCK_N)
        inside = index < end
        is_core = (index >= num_sinks) & (index < num_far)
        group = index - num_sinks + first_group
        token = tl.where(index < num_sinks, index, index - num_far + window)
        core_at = page_offsets(core_table, group, is_core & inside, core_strides, PAGES[1])
        raw_at = page_offsets(raw_table, token, inside & ~is_core, raw_strides, PAGES[0])
        in_dims = dims < HEAD_DIM
        k_at = tl.multiple_of(tl.where(is_core, core_k + core_at, raw_k + raw_at), ALIGNMENT)
        v_at = tl.multiple_of(tl.where(is_core, core_v + core_at, raw_v + raw_at), ALIGNMENT)
        if MASKED:
            k_mask = inside[None, :] & in_dims[:, None]
            v_mask = inside[:, None] & in_dims[None, :]
        else:
            k_mask = in_dims[:, None]
            v_mask = in_dims[None, :]
        k = tl.load(k_at[None, :] + dims[:, None], mask=k_mask, other=0.0)

        # Score them, with the masses of core tokens.
        shift = 0.0
        if HAS_MASS:
            at = page_offsets(core_table, group, is_core & inside, mass_strides, PAGES[1])
            shift = tl.load(mass_ptr + at, mask=is_core & inside, other=0.0)[None, :]
        scores, _ = log2_scores(dot(q, k), scale, shift, softcap, HAS_SOFTCAP)
        if MASKED:
            sees_core = group[None, :] < groups[:, None]
            low = groups * GROUP
            # mutant vllm: a token is seen beside its core token
            sees_raw = (token[None, :] >= low[:, None]) | (token < first_group * GROUP)[None, :]
            sees_raw = sees_raw & (token[None, :] <= position[:, None])
            seen = tl.where(is_core[None, :], sees_core, sees_raw) & inside[None, :]
            scores = tl.where(seen, scores, -float("inf"))
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, MASKED
        )
        v = tl.load(v_at[:, None] + dims[None, :], mask=v_mask, other=0.0)
        acc = acc * fade[:, None] + dot(weights.to(v.dtype), v)
    return acc, running_sum, running_max


@triton.jit(
    # Sequences from any row on: their rows are not aligned.
    do_not_specialize_on_alignment=["table_ptr", "core_table_ptr", "starts_ptr", "lengths_ptr"]
)
def _attend_pages_kernel(
    q_ptr,
    raw,
    cores,
    table_ptr,
    core_table_ptr,
    starts_ptr,
    lengths_ptr,
    results,
    numbers,
    scale,
    softcap,
    strides,
    PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IN_PARTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend from BLOCK_Q new tokens, all HEADS query heads of a KV head, to an even part of the
    entries that they see.

    Grid: (blocks of BLOCK_Q new tokens, Hkv, parts). Writes the output, or where IN_PARTS a part of
    the softmax: the normalised output in float32 and its log-sum-exp in units of log 2; -inf and no
    output where no entry is seen.

    Args:
        raw: Pointers to keys and values of raw tokens.
        cores: Pointers to keys, values and masses of core tokens.
        results: Pointers to the output [T, H, D], and to the parts' outputs [T Hkv, parts, HEADS,
            D] and log-sum-exp [T Hkv, parts, HEADS].
        strides: Of q, of pages of raw tokens, of core tokens and of masses, and of both tables.
        PAGES: Entries of a page of raw tokens and of core tokens.
    """
    num_sequences, window_size = integers(numbers)
    keys_ptr, values_ptr = raw
    core_keys_ptr, core_values_ptr, mass_ptr = cores
    out_ptr, acc_ptr, lse_ptr = results
    q_strides, page_strides, core_strides, mass_strides, table_strides = strides
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

        # The list is read in four runs, of which the second and the fourth need a mask. They end at
        # - whole: first tokens and core tokens that all rows see;
        # - middle: core tokens of the latest groups, and raw tokens of these groups, in place of
        #   which some rows see the core tokens;
        # - causal: raw tokens that all rows see;
        # - total: those from the block's first query on.
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
        middle_end = tl.minimum(middle, total)

        # This program's part of it.
        num_parts = tl.num_programs(2)
        tiles = (total + BLOCK_N - 1) // BLOCK_N
        part_size = (tiles + num_parts - 1) // num_parts * BLOCK_N
        begin = tl.program_id(2) * part_size
        end = begin + part_size

        position = tl.minimum(past + token, highest)
        groups = visible_cores(position, GROUP, window_size)
        raw_of_head = (keys_ptr + head * page_strides[2], values_ptr + head * page_strides[2])
        table = table_ptr + sequence.to(tl.int64) * table_strides[0]
        core_k = core_keys_ptr + head * core_strides[2]
        core_v = core_values_ptr + head * core_strides[2]
        core_table = core_table_ptr + sequence.to(tl.int64) * table_strides[1]
        mass = mass_ptr
        if HAS_MASS:
            mass = mass_ptr + head * mass_strides[2]
        pages = raw_of_head + (table, core_k, core_v, core_table, mass)
        pages = pages + (page_strides, core_strides, mass_strides)
        places = (num_sinks, num_far - num_sinks, FIRST_GROUP, window, position, groups)
        flags: tl.constexpr = (HAS_MASS, HAS_SOFTCAP)
        sizes: tl.constexpr = (flags, GROUP, HEAD_DIM, BLOCK_D, BLOCK_N, ALIGNMENT, PAGES)
        state = (
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.full([BLOCK_M], -float("inf"), tl.float32),
        )
        low, high = begin, tl.minimum(whole, end)
        state = _attend_list(state, q, pages, places, low, high, scale, softcap, False, sizes)
        low, high = tl.maximum(whole, begin), tl.minimum(middle_end, end)
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
            part_number = (flat * tl.num_programs(1) + head) * num_parts + tl.program_id(2)
            row = part_number * HEADS + rows % HEADS
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
    out: Tensor | None = None,
) -> Tensor:
    """Attend from new tokens to the core tokens and raw tokens that they see (docs/math.md, eq. 5,
    13 and 14). Which programs run depends on shapes, `batch.most_new` and `batch.longest` only.

    Args:
        q: [T, H, D], rotary applied; tokens behind those of the batch are ignored.
        raw, cores: Hold the new tokens and the core tokens of the groups that they complete.
        out: [T, H, D], contiguous, to write into; None makes one.

    Returns:
        [T, H, D] in the dtype of q; undefined behind the tokens of the batch. Sums are float32 and
        the same from run to run.
    """
    q = contiguous_rows(q)
    kv_heads = raw.k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tiles = _tiles_of(q, kv_heads, batch.most_new)
    num_parts = _num_parts(q, kv_heads, batch, spec, tiles)
    _launch(q, batch, (raw, cores), spec, out, tiles, num_parts)
    return out


def compile_for_any_batch(q: Tensor, raw: Pages, cores: Pages, spec: Spec) -> None:
    """Compile all kernels among which `attend_pages` chooses, by launches for no new token, which
    read and write no page: the first batch that needed one would wait seconds for it.

    Args:
        q, raw, cores: As of a batch; their dtypes and strides are compiled for.
    """
    q = contiguous_rows(q[:1])
    kv_heads = raw.k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = torch.zeros(2, dtype=torch.int32, device=q.device)
    # Tiles depend on the rows of a sequence: 1 to 128 new tokens, by powers of two, use them all.
    all_tiles = dict.fromkeys(_tiles_of(q, kv_heads, 1 << i) for i in range(8))
    batch = Batch(starts, starts[:1], 1, 1)
    for tiles in all_tiles:
        for num_parts in (1, 2):
            _launch(q, batch, (raw, cores), spec, out, tiles, num_parts)
    compile_merges(q, kv_heads, MOST_SPLITS)


def compile_merges(q: Tensor, kv_heads: int, most: int) -> None:
    """Compile the kernels that merge 2 to `most` parts of the softmax, for the first of the queries
    q [T, H, D]."""
    q = q[:1]
    for exponent in range(1, power_of_2(most).bit_length()):
        merge(_parts(q, kv_heads, 1 << exponent), torch.empty_like(q))


def _tiles_of(q: Tensor, kv_heads: int, most_new: int) -> Tiles:
    """Return the tiles for sequences of at most `most_new` new tokens: block_m rows hold all query
    heads of a token."""
    heads = q.shape[1] // kv_heads
    tiles = paged_tiles(chip_of(q.device), q.dtype, q.shape[2], most_new * heads)
    return tiles._replace(block_m=max(tiles.block_m, power_of_2(heads)))


def _blocks_of(q: Tensor, kv_heads: int, batch: Batch, tiles: Tiles) -> int:
    """Return the blocks of new tokens of a launch."""
    block_q = tiles.block_m // (q.shape[1] // kv_heads)
    return num_blocks(q.shape[0], batch.lengths.shape[0], block_q)


def _parts(q: Tensor, kv_heads: int, num_parts: int) -> tuple[Tensor, Tensor]:
    """Return memory for parts of the softmax: outputs [T Hkv, num_parts, query heads of a KV head,
    D] and log-sum-exp [T Hkv, num_parts, query heads of a KV head]."""
    tokens, num_heads, dim = q.shape
    shape = (tokens * kv_heads, num_parts, num_heads // kv_heads)
    acc = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
    return acc, torch.empty(shape, dtype=torch.float32, device=q.device)


def _launch(
    q: Tensor,
    batch: Batch,
    pages: tuple[Pages, Pages],
    spec: Spec,
    out: Tensor,
    tiles: Tiles,
    num_parts: int,
) -> None:
    """Attend to pages of raw tokens and of core tokens by tiles of these sizes; `num_parts`
    programs split the entries of a block of queries."""
    raw, cores = pages
    dim = q.shape[2]
    kv_heads = raw.k.shape[2]
    heads = q.shape[1] // kv_heads
    acc, lse = out, batch.starts
    if num_parts > 1:
        acc, lse = _parts(q, kv_heads, num_parts)
    mass = cores.k if cores.mass is None else cores.mass
    launch(
        _attend_pages_kernel,
        (_blocks_of(q, kv_heads, batch, tiles), kv_heads, num_parts),
        (
            *(q, (raw.k, raw.v), (cores.k, cores.v, mass), raw.table, cores.table),
            *(batch.starts, batch.lengths, (out, acc, lse)),
            ints(batch.lengths.shape[0], spec.window_size),
            *(float(spec.scale), float(spec.softcap or 1.0)),
        ),
        ((q.stride()[:2], *strides_of(raw, cores, mass)),),
        PAGES=(raw.k.shape[1], cores.k.shape[1]),
        GROUP=spec.group_size,
        SINKS=spec.sinks,
        HEADS=heads,
        HAS_MASS=cores.mass is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        IN_PARTS=num_parts > 1,
        ALIGNMENT=alignment_of(raw.k, raw.v, cores.k, cores.v),
        HEAD_DIM=dim,
        BLOCK_Q=tiles.block_m // heads,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, power_of_2(dim)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if num_parts > 1:
        merge((acc, lse), out)


def _num_parts(q: Tensor, kv_heads: int, batch: Batch, spec: Spec, tiles: Tiles) -> int:
    """Return the number of programs that split the entries of a block of queries."""
    programs = _blocks_of(q, kv_heads, batch, tiles) * kv_heads
    entries = spec.sinks + spec.window_size + spec.group_size + batch.most_new
    entries += ceil_div(batch.longest, spec.group_size)
    entries = min(entries, batch.longest)
    return decode_splits(chip_of(q.device), programs, entries, tiles.block_n)
