"""Score groups by index keys: kernels. One reads the index keys for each row's log-sum-exp, one for
the scores."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.attend.shares import groups_of_share
from corecontext.ops.triton.primitives import dot, integers, load_tile, log2_scores, softmax_step


@triton.jit
def _load_heads(q_ptr, n, first_head, rows, exists, q_strides, HEADS: tl.constexpr, sizes):
    """Load the query tiles of HEADS heads, [rows, columns] each."""
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
def _continue_lse(state, queries, index, bounds, visible, factors, MASKED: tl.constexpr, sizes):
    """Continue the log-sum-exp of every row over index keys of groups begin .. end-1.

    Args:
        bounds: begin and end.
        factors: scale and softcap.
        state: Running maxima of all heads, then their running sums.
        queries: The query tile of each head.
        index: Pointer to the index keys of a KV head, strides of groups and keys, number of groups.
        visible: Groups that each row sees, used where MASKED.
        sizes: HEAD_DIM, BLOCK_D, HAS_SOFTCAP, HEADS, KEYS, BLOCK_N.
    """
    index_ptr, stride_group, stride_key, num_groups = index
    begin, end = bounds
    scale, softcap = factors
    HEAD_DIM: tl.constexpr = sizes[0]
    BLOCK_D: tl.constexpr = sizes[1]
    HAS_SOFTCAP: tl.constexpr = sizes[2]
    HEADS: tl.constexpr = sizes[3]
    KEYS: tl.constexpr = sizes[4]
    BLOCK_N: tl.constexpr = sizes[5]
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    num_tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
    for step in tl.range(0, num_tiles * KEYS):
        groups = begin + step // KEYS * BLOCK_N + offs
        tile = index_ptr + (step % KEYS) * stride_key + dims[:, None]
        tile += groups.to(tl.int64)[None, :] * stride_group
        k = load_tile(tile, groups, num_groups, dims, MASKED, True, HEAD_DIM, BLOCK_D)
        maxima = ()
        sums = ()
        for i in tl.static_range(HEADS):
            scores, _ = log2_scores(dot(queries[i], k), scale, 0.0, softcap, HAS_SOFTCAP)
            if MASKED:
                scores = tl.where(groups[None, :] < visible[:, None], scores, -float("inf"))
            _, _, running_max, running_sum = softmax_step(
                scores, state[i], state[HEADS + i], MASKED
            )
            maxima = maxima + (running_max,)
            sums = sums + (running_sum,)
        state = maxima + sums
    return state


@triton.jit
def index_lse_kernel(
    q_ptr,
    index_ptr,
    lse_ptr,
    numbers,
    scale,
    softcap,
    strides,
    sequences,
    share,
    rule,
    HAS_SOFTCAP: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the log-sum-exp of each row's index scores over its far past, in units of log 2.

    Grid: (tiles of shares x N,). A program owns BLOCK_M shares of HEADS heads, so that an index key
    is read once for all of them.

    Args:
        q_ptr: [N, r, C, D].
        index_ptr: Index keys [N, M, KEYS, D].
        lse_ptr: [N, r, C] in float32.
        strides: Of q and of the index.
        sequences: N and r.
        rule: group_size, window_size and sink_groups.
    """
    num_shares, num_groups, first_share, q_end, first_head = integers(numbers)
    q_strides, index_strides = strides
    num_sequences, heads_per_n = sequences
    pid = tl.program_id(0)
    tile = tl.num_programs(0) // num_sequences - 1 - pid // num_sequences
    n = (pid % num_sequences).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < num_shares
    shares = (first_share, share, q_end)
    sizes: tl.constexpr = (HEAD_DIM, BLOCK_D, HAS_SOFTCAP, HEADS, KEYS, BLOCK_N)
    queries = _load_heads(q_ptr, n, first_head, rows, exists, q_strides, HEADS, sizes)
    visible = groups_of_share(rows, shares, rule, num_groups)
    end = groups_of_share(tile * BLOCK_M + BLOCK_M - 1, shares, rule, num_groups)
    first = groups_of_share(tile * BLOCK_M, shares, rule, num_groups)
    whole = first // BLOCK_N * BLOCK_N
    head = n * heads_per_n + first_head
    index = (index_ptr + n * index_strides[0], index_strides[1], index_strides[2], num_groups)
    state = ()
    for _ in tl.static_range(HEADS):
        state = state + (tl.full([BLOCK_M], -float("inf"), tl.float32),)
    for _ in tl.static_range(HEADS):
        state = state + (tl.zeros([BLOCK_M], tl.float32),)
    factors = (scale, softcap)
    bounds = (whole * 0, whole)
    state = _continue_lse(state, queries, index, bounds, visible, factors, False, sizes)
    bounds = (whole, end)
    state = _continue_lse(state, queries, index, bounds, visible, factors, True, sizes)
    for i in tl.static_range(HEADS):
        lse = state[i] + tl.log2(state[HEADS + i])
        tl.store(lse_ptr + (head + i) * num_shares + rows, lse, mask=exists)


@triton.jit
def _share(scores, log_sum):
    """Return the share of one key of each group in the softmax of one query head, [rows, groups].

    A group's score is the sum of these over its keys and over the query heads: how keys are reduced
    and heads choose together, which `ops.fetch.scoring.log_mass` and
    `ops.fetch.choice.sum_of_shares` say in PyTorch.
    """
    return tl.exp2(scores - log_sum[:, None])


@triton.jit
def _store_scores(
    scores_ptr, queries, log_sums, index, bounds, rows, factors, MASKED: tl.constexpr, sizes
):
    """Store the scores of groups begin .. end-1 for the shares that a program owns.

    Args:
        log_sums: The log-sum-exp of each row, for each head.
        bounds: begin and end.
        rows: Rows of the scores, which of them exist, elements between them, and groups that each
            of them sees.
        factors: scale and softcap.
        sizes: As in `_continue_lse`; then ADD and BLOCK_M.
    """
    index_ptr, stride_group, stride_key, num_groups = index
    begin, end = bounds
    row, exists, stride_row, visible = rows
    scale, softcap = factors
    HEAD_DIM: tl.constexpr = sizes[0]
    BLOCK_D: tl.constexpr = sizes[1]
    HAS_SOFTCAP: tl.constexpr = sizes[2]
    HEADS: tl.constexpr = sizes[3]
    KEYS: tl.constexpr = sizes[4]
    BLOCK_N: tl.constexpr = sizes[5]
    ADD: tl.constexpr = sizes[6]
    BLOCK_M: tl.constexpr = sizes[7]
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(begin, end, BLOCK_N):
        groups = start + offs
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for key in range(KEYS):
            tile = index_ptr + key * stride_key + dims[:, None]
            tile += groups.to(tl.int64)[None, :] * stride_group
            k = load_tile(tile, groups, num_groups, dims, MASKED, True, HEAD_DIM, BLOCK_D)
            for i in tl.static_range(HEADS):
                scores, _ = log2_scores(dot(queries[i], k), scale, 0.0, softcap, HAS_SOFTCAP)
                total += _share(scores, log_sums[i])
        place = scores_ptr + row[:, None] * stride_row + groups[None, :]
        kept = exists[:, None]
        if MASKED:
            kept = kept & (groups[None, :] < visible[:, None])
        if ADD:
            total += tl.load(place, mask=kept, other=0.0)
        tl.store(place, total, mask=kept)


@triton.jit
def _store_best(scores_ptr, best_ptr, begin, end, rows, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Store the largest score of each run of groups begin .. end-1, from the stored scores."""
    row, exists, stride_row, visible = rows
    num_runs = stride_row // RUN
    within = tl.arange(0, RUN)
    for start in tl.range(begin, end, BLOCK):
        run = start // RUN + tl.arange(0, BLOCK // RUN)
        groups = run[None, :, None] * RUN + within[None, None, :]
        kept = exists[:, None] & (run < num_runs)[None, :]
        # A run has one mask, so that it is read at once.
        place = scores_ptr + (row * stride_row)[:, None, None] + groups
        scores = tl.load(place, mask=kept[:, :, None], other=-1.0)
        best = tl.max(tl.where(groups < visible[:, None, None], scores, -1.0), 2)
        tl.store(best_ptr + (row * num_runs)[:, None] + run[None, :], best, mask=kept)


@triton.jit
def group_scores_kernel(
    q_ptr,
    index_ptr,
    lse_ptr,
    scores_ptr,
    best_ptr,
    numbers,
    scale,
    softcap,
    strides,
    sequences,
    share,
    rule,
    HAS_SOFTCAP: tl.constexpr,
    ADD: tl.constexpr,
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
    of the shares first_row .. first_row + num_rows - 1 of the call; and, where RUN is not 0, the
    largest of each run of groups, [N, num_rows, stride_row / RUN].

    Grid: (tiles of shares x N, segments of groups). A program owns BLOCK_M shares of HEADS heads
    and SEGMENT groups.

    Args:
        q_ptr, index_ptr, lse_ptr, strides, sequences, rule: As of `index_lse_kernel`.
    """
    values = integers(numbers)
    num_shares, num_groups, first_share, q_end = values[:4]
    first_head, first_row, num_rows, stride_row = values[4:]
    q_strides, index_strides = strides
    num_sequences, heads_per_n = sequences
    tile = tl.program_id(0) // num_sequences
    n = (tl.program_id(0) % num_sequences).to(tl.int64)
    offsets = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if RUN > 0:
        stride_row = tl.multiple_of(stride_row, RUN)
    rows = first_row + offsets
    exists = offsets < num_rows
    shares = (first_share, share, q_end)
    last = first_row + tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1
    begin = tl.program_id(1) * SEGMENT
    end = tl.minimum(begin + SEGMENT, groups_of_share(last, shares, rule, num_groups))
    if begin < end:
        shape: tl.constexpr = (HEAD_DIM, BLOCK_D, HAS_SOFTCAP, HEADS, KEYS, BLOCK_N)
        sizes: tl.constexpr = shape + (ADD, BLOCK_M)
        queries = _load_heads(q_ptr, n, first_head, rows, exists, q_strides, HEADS, sizes)
        head = n * heads_per_n + first_head
        log_sums = ()
        for i in tl.static_range(HEADS):
            place = lse_ptr + (head + i) * num_shares + rows
            log_sums = log_sums + (tl.load(place, mask=exists, other=0.0),)
        index = (index_ptr + n * index_strides[0], index_strides[1], index_strides[2], num_groups)
        visible = groups_of_share(rows, shares, rule, num_groups)
        places = (n * num_rows + offsets, exists, stride_row, visible)
        # Groups that every share of the tile sees need no mask.
        first = groups_of_share(first_row + tile * BLOCK_M, shares, rule, num_groups)
        whole = begin + tl.maximum(tl.minimum(first, end) - begin, 0) // BLOCK_N * BLOCK_N
        factors = (scale, softcap)
        bounds = (begin, whole)
        _store_scores(scores_ptr, queries, log_sums, index, bounds, places, factors, False, sizes)
        bounds = (whole, end)
        _store_scores(scores_ptr, queries, log_sums, index, bounds, places, factors, True, sizes)
        if RUN > 0:
            tl.debug_barrier()  # the scores have been stored
            _store_best(scores_ptr, best_ptr, begin, end, places, RUN, BLOCK_N)
