"""The backward of `hopper_forward.py`: one pass over key tiles, which adds up queries' gradients.

A program owns 128 keys, entries of the far past or raw tokens. Two groups of warps, the consumers,
own 64 of them each and keep their gradients in registers, while another warp, the producer, copies
the queries that see them into shared memory. The queries' gradients are added to memory by the
tensor memory accelerator, in any order of programs, so the last bits differ from run to run. Where
torch is asked for deterministic algorithms, `anywhere.attend_backward` runs instead.

Barriers are explained in `hopper_forward.py`: readers of a place in a ring wait for `ready`,
writers for `free`. `num_n` is N, `heads_per_n` r; `s` are scores, `p` weights, `dp` the gradients
of p, `ds` of s. The file is long because the groups of warps are one algorithm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from corecontext.ops.fetch.choice import Choice
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream
from corecontext.ops.triton.attend import hopper_forward, hopper_union, hopper_union_dq
from corecontext.ops.triton.attend.anywhere import rule_of
from corecontext.ops.triton.attend.chosen import Call, add_raw_gradients
from corecontext.ops.triton.attend.far_past import FarPast, add_to_sinks, far_past, mass_gradient
from corecontext.ops.triton.attend.hopper_forward import fill_marked
from corecontext.ops.triton.attend.marks import EntryMarks, mark_entries
from corecontext.ops.triton.launch import ceil_div, ints, launch, power_of_2
from corecontext.ops.triton.pool.launcher import pool_backward
from corecontext.ops.triton.primitives import (
    LOG2E,
    first_query_of_entry,
    integers,
    last_query_of_token,
    tile_mask,
)
from corecontext.ops.triton.tensor_memory import (
    add_out,
    aligned,
    barriers,
    copy_in,
    descriptor,
    tiles,
    wait_out,
)

BLOCK_M = gl.constexpr(64)  # queries of a tile
HALF_N = gl.constexpr(64)  # keys of a consumer
BLOCK_N = gl.constexpr(128)  # keys of a program
STAGES = gl.constexpr(2)  # query tiles in shared memory
HEADS_PER_TURN = 4  # query heads whose far tiles run together: their sums fit the L2 cache
# Sums, the queries' gradients in float32, may take 1 / SUM_SHARE of the bytes of q, k, v, the
# output and their gradients: 4 % more memory.
SUM_SHARE = 26
# At least so many bytes of sums: a launch takes as long as its first far tile, which all queries
# see, so a launch needs enough heads to fill the device meanwhile (docs/tuning-notes.md).
MIN_BYTES = 288 << 20


@triton.jit
def _prepare_kernel(
    upstream,
    results,
    numbers,
    strides,
    HAS_GRAD_LSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write *stats* of the queries for `_attend_bwd_hopper`, and zeros where it adds up gradients.

    Grid: (query tiles, N r). A program reads a tile's output and its gradient. The tile's stats are
    -lse in units of log 2 and -delta, BLOCK float32 each, -inf and 0 where no query is.

    Args:
        upstream: Pointers to out, log-sum-exp and the gradients of both.
        results: Pointers to stats [N, r, tiles, 2 BLOCK] and to the sums [N, r, T, D] in float32.
        strides: Of out and of its gradient.
    """
    out_ptr, lse_ptr, grad_ptr, grad_lse_ptr = upstream
    stats_ptr, sum_ptr = results
    out_strides, grad_strides = strides
    num_queries, heads_per_n = integers(numbers)
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    n = head // heads_per_n
    r = head % heads_per_n
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    inside = rows < num_queries
    mask = tile_mask(rows, num_queries, dims, HEAD_DIM)
    wide = rows.to(tl.int64)[:, None]
    out_ptr += n * out_strides[0] + r * out_strides[1]
    out = tl.load(out_ptr + wide * out_strides[2] + dims[None, :], mask=mask, other=0.0)
    grad_ptr += n * grad_strides[0] + r * grad_strides[1]
    grad = tl.load(grad_ptr + wide * grad_strides[2] + dims[None, :], mask=mask, other=0.0)
    delta = -tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    flat = head * num_queries + rows
    if HAS_GRAD_LSE:
        delta += tl.load(grad_lse_ptr + flat, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + flat, mask=inside, other=float("inf"))
    at = stats_ptr + (head * tl.num_programs(0) + tile) * 2 * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, -lse * LOG2E)
    tl.store(at + BLOCK, delta)
    zeros = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    tl.store(sum_ptr + flat[:, None] * HEAD_DIM + dims[None, :], zeros, mask=mask)


@triton.jit
def _finish_kernel(
    gradients,
    numbers,
    scale,
    group_size,
    sink_groups,
    HAS_LAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the queries' gradients in their dtype.

    Grid: (query tiles, N r). A program reads a tile's float32 sum, scales it and, at the end of
    each group, adds the gradient from its pooling.

    Args:
        gradients: Pointers to the sums; with HAS_LAST, to gradients from pooling of each group's
            last query, [N, r, M, D]; and to the result.
    """
    sum_ptr, last_ptr, grad_ptr = gradients
    num_queries, num_groups = integers(numbers)
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    mask = tile_mask(rows, num_queries, dims, HEAD_DIM)
    at = (head * num_queries + rows)[:, None] * HEAD_DIM + dims[None, :]
    grad = tl.load(sum_ptr + at, mask=mask, other=0.0) * scale
    if HAS_LAST:
        group = rows // group_size - sink_groups
        closes = (rows % group_size == group_size - 1) & (group >= 0) & (group < num_groups)
        last = (head * num_groups + group)[:, None] * HEAD_DIM + dims[None, :]
        grad += tl.load(last_ptr + last, mask=mask & closes[:, None], other=0.0).to(tl.float32)
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=mask)


# One array of shared memory holds all tiles of 64 rows, as arguments of a group of warps occupy
# registers for its lifetime: STAGES tiles of queries, STAGES of the output's gradients, then two of
# the program's keys and two of its values.


@gluon.jit
def _copy_queries(source, memory, tile):
    """Copy the keys and values of the program, then the queries that see them, latest first, so
    that programs that run together read the same queries: the producer warp.

    Args:
        source: Descriptors of q, grad out, stats, k, v, and of keys and values of the far past.
        memory: Shared memory of tiles and of stats, and barriers `ready` and `free` of the stages;
            the last `ready` is that of keys and values.
        tile: Sequence, first query head and number of heads, first key, whether keys are entries of
            the far past, first row of the last tile of queries, and number of these tiles.
    """
    q_desc, grad_desc, stats_desc, k_desc, v_desc, far_k_desc, far_v_desc = source
    tiles_smem, stats_smem, ready, free = memory
    n, first_head, num_heads, key, is_far, last_row, tiles = tile
    keys_ready = ready.index(STAGES)
    mbarrier.expect(keys_ready, 4 * k_desc.block_type.nbytes)
    for half in gl.static_range(2):
        k_tile = tiles_smem.index(2 * STAGES + half)
        v_tile = tiles_smem.index(2 * STAGES + 2 + half)
        if is_far:
            copy_in(far_k_desc, [n, 0, key + HALF_N * half, 0], keys_ready, k_tile)
            copy_in(far_v_desc, [n, 0, key + HALF_N * half, 0], keys_ready, v_tile)
        else:
            copy_in(k_desc, [n, 0, key + HALF_N * half, 0], keys_ready, k_tile)
            copy_in(v_desc, [n, 0, key + HALF_N * half, 0], keys_ready, v_tile)
    step = 0  # query tiles so far, of all heads
    for head in range(first_head, first_head + num_heads):
        for i in range(tiles):
            row = last_row - BLOCK_M * i
            stage = step % STAGES
            stage_ready = ready.index(stage)
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(
                stage_ready, 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes
            )
            copy_in(q_desc, [n, head, row, 0], stage_ready, tiles_smem.index(stage))
            copy_in(stats_desc, [n, head, row // BLOCK_M, 0], stage_ready, stats_smem.index(stage))
            copy_in(grad_desc, [n, head, row, 0], stage_ready, tiles_smem.index(STAGES + stage))
            step += 1


@gluon.jit
def _add_query_gradients(memory, sum_desc, place, step, sizes: gl.constexpr):
    """Add half the columns of a query tile's gradient, from all keys of the program, to the sum.

    Args:
        memory: Tiles of keys, of ds and of the sum, and the barriers `ready` and `free` of ds.
        place: Sequence, query head and first row of the tile.
        step: Number of the query tile in the program.
        sizes: HALF (which columns), BLOCK_D.
    """
    HALF: gl.constexpr = sizes[0]
    BLOCK_D: gl.constexpr = sizes[1]
    tiles_smem, dscores_smem, sum_smem, dscores_ready, dscores_free = memory
    n, head, row = place
    COLUMNS: gl.constexpr = BLOCK_D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    ring = step % 2
    mbarrier.wait(dscores_ready.index(ring), step // 2 & 1)
    keys = tiles_smem.index(2 * STAGES).reshape([HALF_N, BLOCK_D]).slice(HALF * COLUMNS, COLUMNS, 1)
    dq = warpgroup_mma(
        dscores_smem.index(2 * ring).permute([1, 0]),
        keys,
        gl.zeros([BLOCK_M, COLUMNS], gl.float32, layout),
        use_acc=False,
        is_async=True,
    )
    keys = tiles_smem.index(2 * STAGES + 1).reshape([HALF_N, BLOCK_D])
    keys = keys.slice(HALF * COLUMNS, COLUMNS, 1)
    dq = warpgroup_mma(dscores_smem.index(2 * ring + 1).permute([1, 0]), keys, dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(dscores_free.index(ring))
    # mutant hopper: a sum is overwritten before it is added
    wait_out(0)  # until the sum of the tile before has been read
    sum_smem.reshape([BLOCK_M, COLUMNS]).store(dq)
    fence_async_shared()
    add_out(sum_desc, [n, head, row, HALF * COLUMNS], sum_smem)


@gluon.jit
def _query_marks(marks, row, exists, SHARE: gl.constexpr):
    """Load the marks of queries row .. row + BLOCK_M - 1: a tuple of words [keys], one for every 32
    shares; the first bit is that of the first query's share."""
    first = row // SHARE
    words = ()
    for j in gl.static_range((BLOCK_M // SHARE + 31) // 32):
        word = gl.load(marks + first // 32 + j, mask=exists, other=0)
        words = words + (word >> first % 32,)
    return words


@gluon.jit
def _key_gradients(
    HALF: gl.constexpr,
    HAS_MASS: gl.constexpr,
    SHARE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    sum_smem,
    dscores,
    results,
    inputs,
    keys_of,
    places,
    scale,
    memory,
    tile,
):
    """Compute the gradients of HALF_N keys from all queries that see one of them, with scores
    transposed, [keys, queries]: a consumer.

    The scores' gradients of both consumers meet in shared memory; the gradient of a query tile is
    made from them one step later, half of its columns by each consumer, so that none waits.

    Args:
        sum_smem: Shared memory of half the columns of a query tile's gradient.
        dscores: Shared memory of the scores' gradients, and its barriers `ready` and `free`.
        results: Descriptor of the sums; pointers to gradients of far past, keys, values, masses.
        inputs: Pointers to masses and to marks, and words of marks of an entry.
        keys_of: Where the sequence's keys begin in the gradients, in keys; from gradients of keys
            to those of values in the far past, in elements; number of keys.
        places: num_queries, group_size, window_size, sink_groups.
        memory, tile: As of `_copy_queries`.
    """
    dscores_smem, dscores_ready, dscores_free = dscores
    sum_desc, far_grad_ptr, grad_k_ptr, grad_v_ptr, dmass_ptr = results
    mass_ptr, marks_ptr, num_words = inputs
    offset, value_offset, num_keys = keys_of
    num_queries, group_size, window_size, sink_groups = places
    tiles_smem, stats_smem, ready, free = memory
    n, first_head, num_heads, key, is_far, last_row, tiles = tile
    sizes: gl.constexpr = (HALF, BLOCK_D)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = tiles_smem.dtype
    key += HALF_N * HALF
    k = tiles_smem.index(2 * STAGES + HALF).reshape([HALF_N, BLOCK_D])
    v = tiles_smem.index(2 * STAGES + 2 + HALF).reshape([HALF_N, BLOCK_D])
    zero = gl.zeros([HALF_N, BLOCK_M], gl.float32, s_layout)
    dk = gl.zeros([HALF_N, BLOCK_D], gl.float32, d_layout)
    dv = gl.zeros([HALF_N, BLOCK_D], gl.float32, d_layout)
    dmass = gl.zeros([HALF_N], gl.float32, gl.SliceLayout(1, s_layout))
    # Queries low <= t < high see a key; whole_low <= t < whole_high see all keys of the consumer.
    keys = key + gl.arange(0, HALF_N, gl.SliceLayout(1, s_layout))
    if is_far:
        low = first_query_of_entry(keys, group_size, window_size, sink_groups)
        high = keys * 0 + num_queries
        whole_low = first_query_of_entry(key + HALF_N - 1, group_size, window_size, sink_groups)
        whole_high = num_queries
    else:
        low = keys
        high = gl.minimum(last_query_of_token(keys, group_size, window_size), num_queries)
        whole_low = key + HALF_N - 1
        whole_high = gl.minimum(last_query_of_token(key, group_size, window_size), num_queries)
    products = (tiles_smem, dscores_smem, sum_smem, dscores_ready, dscores_free)
    mass = gl.zeros([HALF_N], gl.float32, gl.SliceLayout(1, s_layout))
    if HAS_MASS:
        exists = (keys < num_keys) & is_far
        mass = gl.load(mass_ptr + keys, mask=exists, other=0.0) * LOG2E
    is_marked = (keys < num_keys) & is_far
    marks = marks_ptr + keys.to(gl.int64) * num_words
    mbarrier.wait(ready.index(STAGES), 0)
    row = last_row
    head = first_head
    # Not the values of row and head: Triton 3.6 takes two names of one value for one loop variable.
    row_before = last_row + BLOCK_M
    head_before = first_head - 1
    for step in range(num_heads * tiles):
        stage = step % STAGES
        phase = step // STAGES & 1
        q = tiles_smem.index(stage).reshape([BLOCK_M, BLOCK_D])
        grad = tiles_smem.index(STAGES + stage).reshape([BLOCK_M, BLOCK_D])

        # Weights, from the scores and the queries' log-sum-exp.
        words = ()
        if SHARE > 0:
            words = _query_marks(marks, row, is_marked, SHARE)
        mbarrier.wait(ready.index(stage), phase)
        s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, grad.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        stats = stats_smem.index(stage).reshape([2 * BLOCK_M])
        start = stats.slice(0, BLOCK_M).load(columns)
        s = s * scale + start[None, :]
        if HAS_MASS:
            s += mass[:, None]
        p = gl.exp2(s)
        if (row < whole_low) | (row + BLOCK_M > whole_high):
            position = row + gl.arange(0, BLOCK_M, columns)
            seen = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
            p = gl.where(seen, p, 0.0)
        if SHARE > 0:
            if is_far:
                p = fill_marked(p, words, 0.0, SHARE, BLOCK_M, s_layout)

        # The scores' gradients, handed to the other consumer too.
        dp = warpgroup_mma_wait(0, [dp])
        ds = p * (dp + stats.slice(BLOCK_M, BLOCK_M).load(columns)[None, :])
        if HAS_MASS:
            dmass += gl.sum(ds, 1)
        p_half = gl.convert_layout(p.to(dtype), p_layout)
        ds_half = ds.to(dtype)
        dv = warpgroup_mma(p_half, grad, dv, is_async=True)
        ring = step % 2
        # mutant hopper: gradients of scores are overwritten that are still read
        mbarrier.wait(dscores_free.index(ring), (step // 2 & 1) ^ 1)
        dscores_smem.index(2 * ring + HALF).store(ds_half)
        fence_async_shared()
        mbarrier.arrive(dscores_ready.index(ring))
        dk = warpgroup_mma(gl.convert_layout(ds_half, p_layout), q, dk, is_async=True)
        if step > 0:
            place = (n, head_before, row_before)
            _add_query_gradients(products, sum_desc, place, step - 1, sizes)

        # Go on to the next tile, then to the next head.
        dv, dk = warpgroup_mma_wait(0, [dv, dk])
        mbarrier.arrive(free.index(stage))
        row_before = row
        head_before = head
        row -= BLOCK_M
        if row <= last_row - BLOCK_M * tiles:
            row = last_row
            head += 1
    if tiles > 0:
        place = (n, head_before, row_before)
        _add_query_gradients(products, sum_desc, place, num_heads * tiles - 1, sizes)

    # Write the keys' gradients: of the far past in float32 for pooling, of raw ones in their dtype.
    if HAS_MASS:
        if is_far:
            gl.store(dmass_ptr + keys, dmass, mask=keys < num_keys)
    keys = key + gl.arange(0, HALF_N, gl.SliceLayout(1, d_layout))
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, d_layout))
    mask = (keys < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
    at = (offset + keys)[:, None] * HEAD_DIM + dims[None, :]
    dk = dk * (scale / LOG2E)
    if is_far:
        gl.store(far_grad_ptr + at, dk, mask=mask)
        gl.store(far_grad_ptr + value_offset + at, dv, mask=mask)
    else:
        gl.store(grad_k_ptr + at, dk.to(dtype), mask=mask)
        gl.store(grad_v_ptr + at, dv.to(dtype), mask=mask)
    wait_out(0)


@gluon.jit
def _attend_bwd_hopper(
    q_desc,
    grad_desc,
    stats_desc,
    k_desc,
    v_desc,
    far_k_desc,
    far_v_desc,
    sum_desc,
    inputs,
    results,
    numbers,
    rule,
    scale,
    HAS_MASS: gl.constexpr,
    SHARE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """Compute the gradients of keys and values, and sums of the queries' gradients.

    Grid: (tiles of BLOCK_N entries x N r + tiles of BLOCK_N tokens x N,). A program owns a tile of
    keys: it reads them and the queries that see them once, keeps their gradients in float32 and
    writes them once; it adds to the queries' sums in float32. The far past comes first,
    heads_per_turn heads at a time and of those the tiles that most queries see first: so few heads
    that their sums stay in the L2 cache.

    Args:
        stats_desc, sum_desc: Descriptors of the results of `_prepare_kernel`.
        inputs: Pointers to masses, and to words of `EntryMarks`.
        results: Pointers to gradients of the far past, of keys, of values and of masses.
        numbers: Entries, programs of the far past, words of marks of an entry, heads_per_turn.
        SHARE: Queries with the same marks, a power of 2 up to BLOCK_M; 0 without marks.
    """
    mass_ptr, marks_ptr = inputs
    far_grad_ptr, grad_k_ptr, grad_v_ptr, dmass_ptr = results
    num_entries, far_programs, num_words, heads_per_turn = integers(numbers)
    group_size, window_size, sink_groups = integers(rule)
    num_n, heads_per_n, num_queries, _ = q_desc.shape
    dtype: gl.constexpr = q_desc.dtype
    tiles_smem = tiles(q_desc, 2 * STAGES + 4)
    stats_smem = tiles(stats_desc, STAGES)
    dscores_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_N, BLOCK_M], dtype)
    dscores_smem = gl.allocate_shared_memory(dtype, [4, HALF_N, BLOCK_M], dscores_layout)
    sum_smem = tiles(sum_desc, 2)
    ready = barriers(STAGES + 1, 1)  # the last one for the keys and values
    free = barriers(STAGES, 2)
    dscores_ready = barriers(2, 2)
    dscores_free = barriers(2, 2)
    fence_async_shared()

    # The keys that this program owns, and the queries begin .. end-1 that see one of them.
    pid = gl.program_id(0)
    is_far = pid < far_programs
    if is_far:
        # A turn is the far tiles of heads_per_turn heads; the last turn may have fewer heads.
        turn_programs = (num_entries + BLOCK_N - 1) // BLOCK_N * heads_per_turn
        turn = pid // turn_programs
        heads = gl.minimum(heads_per_turn, num_n * heads_per_n - turn * heads_per_turn)
        head = turn * heads_per_turn + (pid - turn * turn_programs) % heads
        n = head // heads_per_n
        first_head = head % heads_per_n
        num_heads = gl.to_tensor(1)
        key = (pid - turn * turn_programs) // heads * BLOCK_N
        num_keys = num_entries
        begin = first_query_of_entry(key, group_size, window_size, sink_groups)
        end = num_queries
        offset = head.to(gl.int64) * num_entries
        value_offset = num_n.to(gl.int64) * heads_per_n * num_entries * HEAD_DIM
        mass_ptr += n.to(gl.int64) * num_entries
        marks_ptr += n.to(gl.int64) * num_entries * num_words
        dmass_ptr += offset
    else:
        n = (pid - far_programs) % num_n
        first_head = gl.to_tensor(0)
        num_heads = heads_per_n
        key = (pid - far_programs) // num_n * BLOCK_N
        num_keys = num_queries
        begin = key
        last_key = gl.minimum(key + BLOCK_N, num_keys) - 1
        end = gl.minimum(last_query_of_token(last_key, group_size, window_size), num_queries)
        offset = n.to(gl.int64) * num_queries
        value_offset = offset
    num_tiles = gl.maximum((end + BLOCK_M - 1) // BLOCK_M - begin // BLOCK_M, 0)
    last_row = (end - 1) // BLOCK_M * BLOCK_M
    # Arguments of a group of warps: constants, its own, those of all.
    dscores = (dscores_smem, dscores_ready, dscores_free)
    results = (sum_desc, far_grad_ptr, grad_k_ptr, grad_v_ptr, dmass_ptr)
    inputs = (mass_ptr, marks_ptr, num_words)
    keys_of = (offset, value_offset, num_keys)
    places = (num_queries, group_size, window_size, sink_groups)
    source = (q_desc, grad_desc, stats_desc, k_desc, v_desc, far_k_desc, far_v_desc)
    memory = (tiles_smem, stats_smem, ready, free)
    tile = (n, first_head, num_heads, key, is_far, last_row, num_tiles)
    consumers = (dscores, results, inputs, keys_of, places, scale, memory, tile)
    first = sum_smem.index(0)
    second = sum_smem.index(1)
    gl.warp_specialize(
        [
            (_key_gradients, (0, HAS_MASS, SHARE, HEAD_DIM, BLOCK_D, first) + consumers),
            (_key_gradients, (1, HAS_MASS, SHARE, HEAD_DIM, BLOCK_D, second) + consumers),
            (_copy_queries, (source, memory, tile)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of their threads
    )


def takes(q: Tensor, spec: Spec) -> bool:
    """Whether these kernels can take the call: a share has a power of 2 of queries."""
    share = spec.fetch_share
    if spec.fetch_groups and (share > BLOCK_M.value or share & share - 1):
        return False
    if torch.are_deterministic_algorithms_enabled() or q.shape[-1] > 128:
        return False
    return hopper_forward.takes(q, spec)


class _Chunk(NamedTuple):
    """Hold tensors of some sequences: inputs of the forward, q [N, r, T, D], k and v [N, 1, T, D];
    then gradients to fill, dq [N, r, T, D], dk and dv [N, T, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    far: FarPast
    groups: Groups
    upstream: Upstream
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dscores: Tensor | None
    """Of the scores of entries, [N, r, E]; None without masses."""
    chosen: Tensor | None
    """The groups of a `Choice`, [N, C, k]; None without fetch."""

    def rows(self, rows: slice) -> _Chunk:
        """Return the tensors of some of the sequences."""
        return _Chunk(*(_take_rows(x, rows) for x in self))


def _take_rows(x: Tensor | tuple | None, rows: slice) -> Tensor | tuple | None:
    """Take rows of a tensor, or of each tensor of a named tuple; None stays None."""
    if x is None:
        return None
    if isinstance(x, Tensor):
        return x[rows]
    return type(x)(*(_take_rows(y, rows) for y in x))


def gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients as `packed.gradients` does, in the dtype of q, k and v; a few KV heads at a
    time, so that the float32 sums of their queries' gradients take little memory.

    Args:
        choice: Groups whose raw tokens the queries attended to, not to their core tokens.
    """
    q = aligned(tokens.q)
    k = aligned(tokens.k[:, None])
    v = aligned(tokens.v[:, None])
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty_like(tokens.k, memory_format=torch.contiguous_format) for _ in range(2))
    far = far_past(tokens, cores, spec, mass)
    dscores = None
    if far.mass is not None:
        shape = (*q.shape[:2], far.k.shape[1])
        dscores = torch.empty(shape, dtype=torch.float32, device=q.device)
    # mutant 5: of a document in a row the log-sum-exp of other tokens, Hopper
    lse = upstream.lse.contiguous()  # of a document in a packed row it is a slice
    grad_out = aligned(upstream.grad_out)
    upstream = Upstream(grad_out, upstream.grad_lse, aligned(upstream.out), lse)
    chosen = None if choice is None else choice.groups
    share = 0 if choice is None else choice.share
    all_sequences = _Chunk(q, k, v, far, groups, upstream, dq, dk, dv, dscores, chosen)
    size = _sequences_at_once(q, tokens.k)
    sums = torch.empty(size, *q.shape[1:], dtype=torch.float32, device=q.device)
    for start in range(0, q.shape[0], size):
        # Slicing takes time even where it changes nothing.
        chunk = (
            all_sequences if size >= q.shape[0] else all_sequences.rows(slice(start, start + size))
        )
        _fill_gradients(chunk, spec, sums, share)
    return dq, dk, dv


def _sequences_at_once(q: Tensor, k: Tensor) -> int:
    """Return for how many sequences the queries' sums in float32 fit the limit: 1 / SUM_SHARE of q,
    k, v, the output and their gradients, and at least MIN_BYTES."""
    head_bytes = q.shape[2] * q.shape[3] * q.element_size()
    limit = 4 * (q.shape[0] * q.shape[1] + k.shape[0]) * head_bytes // SUM_SHARE
    return max(1, min(q.shape[0], max(limit, MIN_BYTES) // (2 * q.shape[1] * head_bytes)))


def _fill_gradients(chunk: _Chunk, spec: Spec, sums: Tensor, share: int) -> None:
    """Fill the gradients of a chunk. `sums` is memory for those of its queries in float32, [N, r,
    T, D]; `share` queries have chosen together."""
    # Stats of the queries, and zeros in sums.
    n, r, num_queries, dim = chunk.q.shape
    grad_out, grad_lse, out, lse = chunk.upstream
    num_groups = chunk.groups.k.shape[1]
    tiles = ceil_div(num_queries, BLOCK_M.value)
    block_d = power_of_2(dim)
    stats = torch.empty(n, r, tiles, 2 * BLOCK_M.value, dtype=torch.float32, device=out.device)
    # A launch needs pointers, also to what is not read: another tensor stands in.
    lse_gradient = lse if grad_lse is None else grad_lse.contiguous()
    launch(
        _prepare_kernel,
        (tiles, n * r),
        ((out, lse, grad_out, lse_gradient), (stats, sums), ints(num_queries, r)),
        ((out.stride()[:3], grad_out.stride()[:3]),),
        HAS_GRAD_LSE=grad_lse is not None,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        BLOCK=BLOCK_M.value,
        num_warps=4,
    )
    # Through entries that are not marked and raw tokens, then through raw tokens of the choice.
    marks = None
    if chunk.chosen is not None:
        marks = mark_entries(chunk.chosen, share, chunk.far.k.shape[1], spec.sinks)
    far_gradients = _attend_backward(chunk, spec, stats, sums, marks)
    if chunk.chosen is not None:
        tokens = Tokens(chunk.q, chunk.k[:, 0], chunk.v[:, 0])
        cores = Cores(*(x[:, None, spec.sinks :] for x in chunk.far[:2]))
        call = Call(tokens, cores, spec, None, Choice(chunk.chosen, share))
        grads = (sums, chunk.dk, chunk.dv)
        kernel = hopper_union_dq.add_query_gradient if hopper_union.takes(call) else None
        add_raw_gradients(chunk.upstream, call, grads, query_scale=1.0, add_query_gradient=kernel)
    # Through the pooling; first tokens are entries of the far past and raw tokens, too.
    grad_cores = Cores(
        add_to_sinks(far_gradients[0], chunk.dk, spec.sinks),
        add_to_sinks(far_gradients[1], chunk.dv, spec.sinks),
    )
    grad_last = _add_pooling(grad_cores, chunk, spec) if num_groups else None
    # The gradient of queries, rounded once: from attention and, of each group's last, from pooling.
    last_gradient = sums if grad_last is None else grad_last
    launch(
        _finish_kernel,
        (tiles, n * r),
        ((sums, last_gradient, chunk.dq), ints(num_queries, num_groups), float(spec.scale)),
        (spec.group_size, spec.sinks // spec.group_size),
        HAS_LAST=grad_last is not None,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        BLOCK=BLOCK_M.value,
        num_warps=4,
    )


def _attend_backward(
    chunk: _Chunk, spec: Spec, stats: Tensor, sums: Tensor, marks: EntryMarks | None
) -> Tensor:
    """Add the queries' gradients, still to be scaled, to sums; fill those of k, v and scores.
    Marked entries have no part in them.

    Returns:
        Gradients of keys and values of the far past by query head, [2, N, r, E, D] in float32.
    """
    q, k, v = chunk.q, chunk.k, chunk.v
    n, r, num_queries, dim = q.shape
    num_entries = chunk.far.k.shape[1]
    far_gradients = torch.empty(2, n, r, num_entries, dim, dtype=torch.float32, device=q.device)
    # A descriptor needs memory even where there is no entry to read.
    far_k, far_v = (aligned(x[:, None]) for x in chunk.far[:2]) if num_entries else (k, v)
    # Without masses other tensors stand in, which are neither read nor written.
    mass = chunk.upstream.lse if chunk.far.mass is None else chunk.far.mass
    dscores = stats if chunk.far.mass is None else chunk.dscores
    far_programs = ceil_div(num_entries, BLOCK_N.value) * n * r
    rows = BLOCK_M.value
    descriptors = (
        *(descriptor(q, rows), descriptor(chunk.upstream.grad_out, rows), descriptor(stats, 1)),
        *(descriptor(x, HALF_N.value) for x in (k, v, far_k, far_v)),
        descriptor(sums, rows, power_of_2(dim) // 2),
    )
    words = mass if marks is None else marks.words
    num_words = 0 if marks is None else marks.words.shape[2]
    numbers = ints(num_entries, far_programs, num_words, HEADS_PER_TURN)
    launch(
        _attend_bwd_hopper,
        (far_programs + ceil_div(num_queries, BLOCK_N.value) * n,),
        (
            *(*descriptors, (mass, words), (far_gradients, chunk.dk, chunk.dv, dscores)),
            *(numbers, ints(*rule_of(spec)), spec.scale * LOG2E.value),
        ),
        HAS_MASS=chunk.far.mass is not None,
        SHARE=0 if marks is None else marks.share,
        HEAD_DIM=dim,
        BLOCK_D=power_of_2(dim),
        num_warps=4,
    )
    return far_gradients


def _add_pooling(grad_cores: Cores, chunk: _Chunk, spec: Spec) -> Tensor:
    """Add the gradients through pooling to those of k and v; return those of each group's last
    query, [N, r, M, D]."""
    if chunk.q.shape[1] > 1:
        grad_cores = Cores(*(x.sum(1, keepdim=True) for x in grad_cores))
    shape = chunk.groups.k.shape[1:3]
    pooled = slice(spec.sinks, spec.sinks + shape[0] * shape[1])
    into = tuple(x[:, pooled].unflatten(1, shape) for x in (chunk.dk, chunk.dv))
    dscores = chunk.dscores
    grad_mass = None if dscores is None else mass_gradient(dscores, spec.sinks)
    return pool_backward(grad_cores, chunk.groups, spec, grad_mass, into)[0]
