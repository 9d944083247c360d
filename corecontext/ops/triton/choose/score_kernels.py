"""Score groups by index keys: the kernel that runs everywhere."""

import triton
import triton.language as tl

from corecontext.ops.triton.attend.shares import groups_of_share
from corecontext.ops.triton.primitives import dot, integers, load_tile


@triton.jit
def _load_heads(q_ptr, n, first_head, rows, exists, q_strides, HEADS: tl.constexpr, sizes):
    """Return the query tiles [rows, columns] of HEADS heads; `sizes` as of `_store_scores`."""
    HEAD_DIM: tl.constexpr = sizes[0]
    BLOCK_D: tl.constexpr = sizes[1]
    dims = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    tile = q_ptr + n * q_strides[0] + first_head.to(tl.int64) * q_strides[1]
    tile += rows.to(tl.int64)[:, None] * q_strides[2] + dims[None, :]
    heads = (tl.load(tile, mask=mask, other=0.0),)
    for i in tl.static_range(1, HEADS):
        heads = heads + (tl.load(tile + i * q_strides[1], mask=mask, other=0.0),)
    return heads


@triton.jit
def _store_scores(
    scores_ptr, queries, offsets, index, bounds, rows, scale, MASKED: tl.constexpr, sizes
):
    """Store the scores of groups begin .. end-1 for the shares that a program owns: the largest
    product of any key with any query head, as `ops.fetch.choice.choose` says in PyTorch.

    Args:
        queries: The query tile of each head.
        offsets: Products of a row with the centre of keys, added to every score, for each head.
        index: Pointer to the index keys of a KV head, strides of groups and keys, number of groups.
        bounds: begin and end.
        rows: Rows of the scores, which exist, elements between them, and groups that each sees.
        sizes: HEAD_DIM, BLOCK_D, HEADS, KEYS, BLOCK_N, MERGES, BLOCK_M of the kernel.
    """
    index_ptr, stride_group, stride_key, num_groups = index
    begin, end = bounds
    row, exists, stride_row, visible = rows
    HEAD_DIM: tl.constexpr = sizes[0]
    BLOCK_D: tl.constexpr = sizes[1]
    HEADS: tl.constexpr = sizes[2]
    KEYS: tl.constexpr = sizes[3]
    BLOCK_N: tl.constexpr = sizes[4]
    MERGES: tl.constexpr = sizes[5]
    BLOCK_M: tl.constexpr = sizes[6]
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(begin, end, BLOCK_N):
        groups = start + offs
        largest = tl.full([BLOCK_M, BLOCK_N], -float("inf"), tl.float32)
        for key in range(KEYS):
            tile = index_ptr + key * stride_key + dims[:, None]
            tile += groups.to(tl.int64)[None, :] * stride_group
            k = load_tile(tile, groups, num_groups, dims, MASKED, True, HEAD_DIM, BLOCK_D)
            for i in tl.static_range(HEADS):
                # mutant fetch: heads are compared without their products with the centre, Triton
                scores = dot(queries[i], k) * scale + offsets[i][:, None]
                largest = tl.maximum(largest, scores)
        place = scores_ptr + row[:, None] * stride_row + groups[None, :]
        kept = exists[:, None]
        if MASKED:
            kept = kept & (groups[None, :] < visible[:, None])
        if MERGES:
            largest = tl.maximum(largest, tl.load(place, mask=kept, other=-float("inf")))
        tl.store(place, largest, mask=kept)


@triton.jit
def _store_best(scores_ptr, best_ptr, begin, end, rows, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Store the largest stored score of each run of groups begin .. end-1; `rows` as above."""
    row, exists, stride_row, visible = rows
    num_runs = stride_row // RUN
    within = tl.arange(0, RUN)
    for start in tl.range(begin, end, BLOCK):
        run = start // RUN + tl.arange(0, BLOCK // RUN)
        groups = run[None, :, None] * RUN + within[None, None, :]
        kept = exists[:, None] & (run < num_runs)[None, :]
        # A run is masked as a whole, so that one instruction reads it.
        place = scores_ptr + (row * stride_row)[:, None, None] + groups
        scores = tl.load(place, mask=kept[:, :, None], other=-float("inf"))
        best = tl.max(tl.where(groups < visible[:, None, None], scores, -float("inf")), 2)
        tl.store(best_ptr + (row * num_runs)[:, None] + run[None, :], best, mask=kept)


@triton.jit
def group_scores_kernel(
    inputs,
    results,
    numbers,
    scale,
    strides,
    sequences,
    share,
    rule,
    MERGES: tl.constexpr,
    SEGMENT: tl.constexpr,
    RUN: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the scores of the groups that each share sees, [N, num_rows, stride_row] in float32:
    of the shares first_row .. first_row + num_rows - 1 of the call; and the largest of each run of
    groups, [N, num_rows, stride_row / RUN].

    Grid: (tiles of shares x N, segments of groups). A program owns BLOCK_M shares of HEADS heads
    and SEGMENT groups.

    Args:
        inputs: Pointers to q [N, r, C, D], to index keys [N, M, KEYS, D], and to offsets [N, r, C]:
            products of the queries with the centre, times the scale.
        results: Pointers to the scores and to the largest of each run.
        numbers: C, M, first share and end of the queries as of `groups_of_share`, first_head,
            first_row, num_rows and stride_row.
        strides: Of q and of the index.
        sequences: N and r.
        MERGES: Whether an earlier launch stored scores of other query heads: the larger one stays.
    """
    q_ptr, index_ptr, offsets_ptr = inputs
    scores_ptr, best_ptr = results
    values = integers(numbers)
    num_shares, num_groups, first_share, q_end = values[:4]
    first_head, first_row, num_rows, stride_row = values[4:]
    q_strides, index_strides = strides
    num_sequences, heads_per_n = sequences
    tile = tl.program_id(0) // num_sequences
    n = (tl.program_id(0) % num_sequences).to(tl.int64)
    offs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    stride_row = tl.multiple_of(stride_row, RUN)
    rows = first_row + offs
    exists = offs < num_rows
    shares = (first_share, share, q_end)
    last = first_row + tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1
    begin = tl.program_id(1) * SEGMENT
    end = tl.minimum(begin + SEGMENT, groups_of_share(last, shares, rule, num_groups))
    if begin < end:
        sizes: tl.constexpr = (HEAD_DIM, BLOCK_D, HEADS, KEYS, BLOCK_N, MERGES, BLOCK_M)
        queries = _load_heads(q_ptr, n, first_head, rows, exists, q_strides, HEADS, sizes)
        head = n * heads_per_n + first_head
        offsets = ()
        for i in tl.static_range(HEADS):
            place = offsets_ptr + (head + i) * num_shares + rows
            offsets = offsets + (tl.load(place, mask=exists, other=0.0),)
        index = (index_ptr + n * index_strides[0], index_strides[1], index_strides[2], num_groups)
        visible = groups_of_share(rows, shares, rule, num_groups)
        places = (n * num_rows + offs, exists, stride_row, visible)
        # Groups that every share of the tile sees need no mask.
        first = groups_of_share(first_row + tile * BLOCK_M, shares, rule, num_groups)
        whole = begin + tl.maximum(tl.minimum(first, end) - begin, 0) // BLOCK_N * BLOCK_N
        bounds = (begin, whole)
        _store_scores(scores_ptr, queries, offsets, index, bounds, places, scale, False, sizes)
        bounds = (whole, end)
        _store_scores(scores_ptr, queries, offsets, index, bounds, places, scale, True, sizes)
        tl.debug_barrier()  # from here on all threads see the scores
        _store_best(scores_ptr, best_ptr, begin, end, places, RUN, BLOCK_N)
