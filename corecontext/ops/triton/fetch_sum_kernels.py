"""Score groups of many index keys: kernels that take each product of a query with a key once.

One stores, for each query head, the sum of exp over a group's keys, and the log-sum-exp over a
segment of groups; the other turns them into scores of groups, as
`fetch_score_kernels.group_scores_kernel` does by taking all products again, which is cheaper where
a group has few keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.fetch_rule import groups_of_share
from corecontext.ops.triton.fetch_score_kernels import index_scores, load_heads
from corecontext.ops.triton.primitives import load_tile, softmax_step


@triton.jit
def _sum_keys(
    state, queries, index, sums, begin, end, visible, scale, softcap, MASKED: tl.constexpr, sizes
):
    """Store the sums of exp over the keys of groups begin .. end-1, and continue the log-sum-exp
    over all groups.

    Args:
        state: Running maxima of all heads, then their running sums.
        queries, index, visible, sizes: As in `fetch_score_kernels._continue_lse`.
        sums: Where the first head's row of sums begins, [rows], and its row of maxima, one for
            each BLOCK_N groups; rows between heads, which rows exist, and elements of a row.
    """
    index_ptr, stride_group, stride_key, num_groups, bias_ptr = index
    sums_ptr, maxima_ptr, num_rows, exists, width = sums
    num_tiles = (width + sizes[6] - 1) // sizes[6]
    HEAD_DIM: tl.constexpr = sizes[0]
    BLOCK_D: tl.constexpr = sizes[1]
    HEADS: tl.constexpr = sizes[4]
    KEYS: tl.constexpr = sizes[5]
    BLOCK_N: tl.constexpr = sizes[6]
    BLOCK_M: tl.constexpr = sizes[7]
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(begin, end, BLOCK_N):
        groups = start + offs
        totals = ()
        for _ in tl.static_range(HEADS):
            totals = totals + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
        for key in range(KEYS):
            tile = index_ptr + key * stride_key + dims[:, None]
            tile += groups.to(tl.int64)[None, :] * stride_group
            k = load_tile(tile, groups, num_groups, dims, MASKED, True, HEAD_DIM, BLOCK_D)
            maxima = ()
            sums_so_far = ()
            added = ()
            for i in tl.static_range(HEADS):
                biases = bias_ptr + i * num_groups
                scores = index_scores(
                    queries[i], k, groups, num_groups, biases, scale, softcap, sizes
                )
                if MASKED:
                    scores = tl.where(groups[None, :] < visible[:, None], scores, -float("inf"))
                weights, fade, running_max, running_sum = softmax_step(
                    scores, state[i], state[HEADS + i], MASKED
                )
                maxima = maxima + (running_max,)
                sums_so_far = sums_so_far + (running_sum,)
                added = added + (totals[i] * fade[:, None] + weights,)
            state = maxima + sums_so_far
            totals = added
        for i in tl.static_range(HEADS):
            place = (sums_ptr + i * num_rows * width)[:, None] + groups[None, :]
            tl.store(place, totals[i], mask=exists[:, None] & (groups < width)[None, :])
            place = maxima_ptr + i * num_rows * num_tiles + start // BLOCK_N
            tl.store(place, state[i], mask=exists)
    return state


@triton.jit(
    do_not_specialize=[
        *("num_groups", "first_share", "q_end", "first_head"),
        *("first_row", "num_rows", "width"),
    ]
)
def sum_keys_kernel(
    q_ptr,
    index_ptr,
    bias_ptr,
    sums_ptr,
    maxima_ptr,
    lse_ptr,
    num_groups,
    first_share,
    q_end,
    first_head,
    first_row,
    num_rows,
    width,
    scale,
    softcap,
    q_strides,
    index_strides,
    num_sequences,
    heads_per_n,
    share,
    group_size,
    window_size,
    sink_groups,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write, for the shares first_row .. first_row + num_rows - 1, the sum of exp over the keys of
    each group, [N, r, num_rows, width], less a maximum for every BLOCK_N groups, [N, r, num_rows,
    width / BLOCK_N], and the log-sum-exp over each segment of groups, [segments, N, r, num_rows];
    maxima and log-sum-exp in units of log 2.

    Grid: (tiles of shares x N, segments of groups). A program owns BLOCK_M shares of HEADS heads
    and SEGMENT groups.
    """
    tile = tl.program_id(0) // num_sequences
    n = (tl.program_id(0) % num_sequences).to(tl.int64)
    own = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first_row + own
    exists = own < num_rows
    rule = (group_size, window_size, sink_groups)
    shares = (first_share, share, q_end)
    last = first_row + tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1
    begin = tl.program_id(1) * SEGMENT
    end = tl.minimum(begin + SEGMENT, groups_of_share(last, shares, rule, num_groups))
    end = tl.maximum(end, begin)
    sizes: tl.constexpr = (
        HEAD_DIM,
        BLOCK_D,
        HAS_BIAS,
        HAS_SOFTCAP,
        HEADS,
        KEYS,
        BLOCK_N,
        BLOCK_M,
    )
    head = n * heads_per_n + first_head
    state = ()
    for _ in tl.static_range(HEADS):
        state = state + (tl.full([BLOCK_M], -float("inf"), tl.float32),)
    for _ in tl.static_range(HEADS):
        state = state + (tl.zeros([BLOCK_M], tl.float32),)
    if begin < end:
        queries = load_heads(q_ptr, n, first_head, rows, exists, q_strides, HEADS, sizes)
        index = (
            index_ptr + n * index_strides[0],
            index_strides[1],
            index_strides[2],
            num_groups,
            bias_ptr + head * num_groups,
        )
        visible = groups_of_share(rows, shares, rule, num_groups)
        own_row = head * num_rows + own
        maxima = maxima_ptr + own_row * ((width + BLOCK_N - 1) // BLOCK_N)
        sums = (sums_ptr + own_row * width, maxima, num_rows.to(tl.int64), exists, width)
        first = groups_of_share(first_row + tile * BLOCK_M, shares, rule, num_groups)
        whole = begin + tl.maximum(tl.minimum(first, end) - begin, 0) // BLOCK_N * BLOCK_N
        state = _sum_keys(
            state, queries, index, sums, begin, whole, visible, scale, softcap, False, sizes
        )
        state = _sum_keys(
            state, queries, index, sums, whole, end, visible, scale, softcap, True, sizes
        )
    segment_heads = tl.program_id(1) * num_sequences * heads_per_n + head
    for i in tl.static_range(HEADS):
        lse = state[i] + tl.log2(state[HEADS + i])
        lse = tl.where(state[HEADS + i] > 0, lse, -float("inf"))
        tl.store(lse_ptr + (segment_heads + i) * num_rows + own, lse, mask=exists)


@triton.jit(do_not_specialize=["num_groups", "first_share", "q_end", "first_row", "num_rows"])
def merge_heads_kernel(
    sums_ptr,
    maxima_ptr,
    lse_ptr,
    scores_ptr,
    best_ptr,
    num_groups,
    first_share,
    q_end,
    first_row,
    num_rows,
    width,
    num_sequences,
    heads_per_n,
    share,
    group_size,
    window_size,
    sink_groups,
    RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the scores of groups [N, num_rows, width] and the largest of each run of RUN groups,
    from the sums of `sum_keys_kernel` and the log-sum-exp of each head's row.

    Grid: (N x num_rows, blocks of BLOCK groups).
    """
    n = (tl.program_id(0) // num_rows).to(tl.int64)
    row = tl.program_id(0) % num_rows
    shares = (first_share, share, q_end)
    rule = (group_size, window_size, sink_groups)
    visible = groups_of_share(first_row + row, shares, rule, num_groups)
    RUNS: tl.constexpr = BLOCK // RUN
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    groups = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    if tl.program_id(1) * BLOCK < visible:
        kept = (groups < visible) & (groups < width)
        num_tiles = (width + BLOCK_N - 1) // BLOCK_N
        total = tl.zeros([RUNS, RUN], tl.float32)
        for head in range(heads_per_n):
            place = (n * heads_per_n + head) * num_rows + row
            sums = tl.load(sums_ptr + place * width + groups, mask=kept, other=0.0)
            tile = place * num_tiles + run * RUN // BLOCK_N
            maxima = tl.load(maxima_ptr + tile, mask=run * RUN < visible, other=-float("inf"))
            total += sums * tl.exp2(maxima - tl.load(lse_ptr + place))[:, None]
        first = n * num_rows + row
        tl.store(scores_ptr + first * width + groups, total, mask=kept)
        best = tl.max(tl.where(kept, total, -1.0), 1)
        num_runs = width // RUN
        tl.store(best_ptr + first * num_runs + run, best, mask=run < num_runs)
