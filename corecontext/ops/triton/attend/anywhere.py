"""Attention over [core tokens; local tokens] in Triton: one online softmax forward, three kernels
backward.

Both kinds of keys obey one rule: the query at t sees keys with low(t) <= index < high(t). Raw
tokens have low j(t) g and high t + 1; the entries of the far past, which are core tokens behind
first tokens kept raw, have low 0 and as high the number of entries in j(t) groups (docs/math.md,
eq. 4 and 13). So one inner loop serves both. Tiles that every row sees are not masked, tiles that
no row sees are not visited. The file is long because forward and backward share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Cores, Spec, Tokens, Upstream
from corecontext.ops.triton.attend.far_past import (
    FarPast,
    add_to_sinks,
    bias_gradient,
    far_past,
    near_past,
)
from corecontext.ops.triton.attend.marks import Marks, marked_entries, marked_keys, marks_of_rows
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2
from corecontext.ops.triton.primitives import (
    LN2,
    LOG2E,
    dot,
    first_query_of_entry,
    last_query_of_token,
    load_tile,
    log2_scores,
    softmax_step,
    tile_mask,
    visible_cores,
    visible_entries,
)
from corecontext.ops.triton.tiles import Tiles, chip_of, dkv_tiles, dq_tiles, forward_tiles


@triton.jit
def _key_ranges(first, last, q_start, rule, BLOCK_N: tl.constexpr):
    """Return where the loops over keys of the query rows first .. last begin and end.

    Entries: all rows see 0 .. whole-1, some see whole .. far_end-1. Raw tokens: some see local ..
    middle-1, all middle .. causal-1, some causal .. end-1.

    Args:
        rule: group_size, window_size and sink_groups.
    """
    group_size, window_size, sink_groups = rule
    groups_first = visible_cores(q_start + first, group_size, window_size)
    groups_last = visible_cores(q_start + last, group_size, window_size)
    whole = visible_entries(groups_first, group_size, sink_groups) // BLOCK_N * BLOCK_N
    far_end = visible_entries(groups_last, group_size, sink_groups)
    local = groups_first * group_size
    seen_by_all = groups_last * group_size
    middle = local + (seen_by_all - local + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    # mutant 3: the next token is seen, Triton tiles without a mask
    causal = tl.maximum(middle, middle + (q_start + first + 1 - middle) // BLOCK_N * BLOCK_N)
    return whole, far_end, local, middle, causal, q_start + last + 1


@triton.jit
def _attend_keys(state, q, keys, begin, end, scale, softcap, MASKED: tl.constexpr, sizes):
    """Continue an online softmax over keys begin .. end-1, in tiles.

    Args:
        state: Output so far, running sum and running maximum of each row.
        keys: Pointers and strides of k and v, their number, the rows' bounds low and high, used
            where MASKED, a pointer to the keys' biases, and one to each row's marks.
        sizes: HAS_BIAS, HAS_MARKS, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_N.
    """
    acc, running_sum, running_max = state
    k_ptr, v_ptr, stride_k, stride_v, num_keys, low, high, bias_ptr, marks = keys
    HAS_BIAS: tl.constexpr = sizes[0]
    HAS_MARKS: tl.constexpr = sizes[1]
    HAS_SOFTCAP: tl.constexpr = sizes[2]
    HEAD_DIM: tl.constexpr = sizes[3]
    BLOCK_D: tl.constexpr = sizes[4]
    BLOCK_N: tl.constexpr = sizes[5]
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    k_tile = k_ptr + begin.to(tl.int64) * stride_k + offs[None, :] * stride_k + dims[:, None]
    v_tile = v_ptr + begin.to(tl.int64) * stride_v + offs[:, None] * stride_v + dims[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        index = start + offs
        k = load_tile(k_tile, index, num_keys, dims, MASKED, True, HEAD_DIM, BLOCK_D)
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + index, mask=index < num_keys, other=0.0)[None, :]
        scores, _ = log2_scores(dot(q, k), scale, bias, softcap, HAS_SOFTCAP)
        if MASKED:
            seen = (index[None, :] >= low[:, None]) & (index[None, :] < high[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        if HAS_MARKS:
            # mutant fetch: a fetched group keeps its core token, Triton
            scores = tl.where(marked_entries(marks, start, BLOCK_N), -float("inf"), scores)
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, MASKED or HAS_MARKS
        )
        v = load_tile(v_tile, index, num_keys, dims, MASKED, False, HEAD_DIM, BLOCK_D)
        acc = acc * fade[:, None] + dot(weights.to(v.dtype), v)
        k_tile += BLOCK_N * stride_k
        v_tile += BLOCK_N * stride_v
    return acc, running_sum, running_max


@triton.jit(
    do_not_specialize=[
        *("num_queries", "num_keys", "num_entries", "q_start", "k_start"),
        *("num_shares", "num_words"),
    ]
)
def _attend_fwd_kernel(
    tokens,
    far,
    results,
    num_queries,
    num_keys,
    num_entries,
    q_start,
    k_start,
    num_shares,
    num_words,
    scale,
    softcap,
    strides,
    heads,
    rule,
    share,
    HAS_BIAS: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend.

    Grid: (query tiles x N r,). A program owns BLOCK_M queries of one head: it reads them and the
    keys and values they see once, keeps output and sums in float32, and writes output and
    log-sum-exp. Heads that share keys run side by side, and tiles that see most run first.

    Args:
        tokens: Pointers to q [N, r, T, D], k and v [N, S, D].
        far: Pointers to keys and values of the far past [N, r', E, D], the biases of its entries
            [N r, E] and marks.
        results: Pointers to out [N, r, T, D] and log-sum-exp [N, r, T] in float32.
        strides: Of q, k and v, and of keys and values of the far past.
        heads: Query heads in all, of each KV head, and of each head r' of the far past.
        rule: group_size, window_size and sink_groups.
    """
    q_ptr, k_ptr, v_ptr = tokens
    far_k_ptr, far_v_ptr, bias_ptr, marks_ptr = far
    out_ptr, lse_ptr = results
    q_strides, k_strides, v_strides, far_k_strides, far_v_strides = strides
    num_heads, heads_per_n, heads_per_core = heads
    group_size, window_size, sink_groups = rule
    # Read the queries that this program owns.
    pid = tl.program_id(0)
    tile = tl.num_programs(0) // num_heads - 1 - pid // num_heads
    # mutant offsets: 32 bits of a head in the forward
    head = (pid % num_heads).to(tl.int64)
    n = head // heads_per_n
    r = head % heads_per_n
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    inside = rows < num_queries
    mask = tile_mask(rows, num_queries, dims, HEAD_DIM)
    q_tile = q_ptr + n * q_strides[0] + r * q_strides[1]
    q_tile += rows.to(tl.int64)[:, None] * q_strides[2] + dims[None, :]
    q = tl.load(q_tile, mask=mask, other=0.0)
    position = q_start + rows
    groups = visible_cores(position, group_size, window_size)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M, num_queries) - 1
    whole, far_end, local, middle, causal, end = _key_ranges(
        tile * BLOCK_M, last, q_start, rule, BLOCK_N
    )
    state = (
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], -float("inf"), tl.float32),
    )
    sizes: tl.constexpr = (HAS_BIAS, HAS_MARKS, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_N)

    # The far past: entries that all rows see, then those that some do.
    core = r // heads_per_core
    k_base = far_k_ptr + n * far_k_strides[0] + core * far_k_strides[1]
    v_base = far_v_ptr + n * far_v_strides[0] + core * far_v_strides[1]
    high = visible_entries(groups, group_size, sink_groups)
    biases = bias_ptr + head * num_entries
    steps = (far_k_strides[2], far_v_strides[2], num_entries)
    marks = marks_ptr
    if HAS_MARKS:
        marks = marks_of_rows(marks_ptr, n, position, q_start, (share, num_shares, num_words))
    keys = (k_base, v_base) + steps + (high * 0, high, biases, marks)
    state = _attend_keys(state, q, keys, whole * 0, whole, scale, softcap, False, sizes)
    state = _attend_keys(state, q, keys, whole, far_end, scale, softcap, True, sizes)

    # Raw tokens: the oldest, which some rows see as core tokens; the middle; the causal end.
    raw_sizes: tl.constexpr = (False, False, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_N)
    k_base = k_ptr + n * k_strides[0] - k_start.to(tl.int64) * k_strides[1]
    v_base = v_ptr + n * v_strides[0] - k_start.to(tl.int64) * v_strides[1]
    low = groups * group_size
    limit = k_start + num_keys
    keys = (k_base, v_base, k_strides[1], v_strides[1], limit, low, position + 1, biases, marks)
    first_end = tl.minimum(middle, end)
    state = _attend_keys(state, q, keys, local, first_end, scale, softcap, True, raw_sizes)
    state = _attend_keys(state, q, keys, middle, causal, scale, softcap, False, raw_sizes)
    acc, running_sum, running_max = _attend_keys(
        state, q, keys, causal, end, scale, softcap, True, raw_sizes
    )

    out = acc / running_sum[:, None]
    out_tile = out_ptr + (head * num_queries + rows)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=mask)
    lse = (running_max + tl.log2(running_sum)) * LN2
    tl.store(lse_ptr + head * num_queries + rows, lse, mask=inside)


@triton.jit
def _query_gradients(dq, queries, keys, begin, end, scale, softcap, MASKED: tl.constexpr, sizes):
    """Continue the gradient of one query tile through keys begin .. end-1.

    Args:
        dq: The gradient so far.
        queries: q, grad out, log-sum-exp in units of log 2, and delta of each row.
        keys, sizes: As in `_attend_keys`.
    """
    q, grad, lse, delta = queries
    k_ptr, v_ptr, stride_k, stride_v, num_keys, low, high, bias_ptr, marks = keys
    HAS_BIAS: tl.constexpr = sizes[0]
    HAS_MARKS: tl.constexpr = sizes[1]
    HAS_SOFTCAP: tl.constexpr = sizes[2]
    HEAD_DIM: tl.constexpr = sizes[3]
    BLOCK_D: tl.constexpr = sizes[4]
    BLOCK_N: tl.constexpr = sizes[5]
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    k_tile = k_ptr + begin.to(tl.int64) * stride_k + offs[:, None] * stride_k + dims[None, :]
    v_tile = v_ptr + begin.to(tl.int64) * stride_v + offs[:, None] * stride_v + dims[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        index = start + offs
        k = load_tile(k_tile, index, num_keys, dims, MASKED, False, HEAD_DIM, BLOCK_D)
        v = load_tile(v_tile, index, num_keys, dims, MASKED, False, HEAD_DIM, BLOCK_D)
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + index, mask=index < num_keys, other=0.0)[None, :]
        scores, slope = log2_scores(dot(q, tl.trans(k)), scale, bias, softcap, HAS_SOFTCAP)
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            seen = (index[None, :] >= low[:, None]) & (index[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        if HAS_MARKS:
            weights = tl.where(marked_entries(marks, start, BLOCK_N), 0.0, weights)
        grad_scores = weights * (dot(grad, tl.trans(v)) - delta[:, None])
        if HAS_SOFTCAP:
            grad_scores = grad_scores * slope
        dq += dot(grad_scores.to(k.dtype), k)
        k_tile += BLOCK_N * stride_k
        v_tile += BLOCK_N * stride_v
    return dq


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_entries", "num_shares", "num_words"])
def _attend_dq_kernel(
    tokens,
    far,
    upstream,
    results,
    num_queries,
    num_keys,
    num_entries,
    num_shares,
    num_words,
    scale,
    softcap,
    strides,
    heads,
    rule,
    share,
    HAS_BIAS: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the gradient of the queries.

    Grid: (query tiles x N r,). A program owns BLOCK_M queries of one head and walks the keys as
    the forward does, with sums in float32; it writes their gradient, and delta = sum(grad out) -
    grad lse for the other kernels.

    Args:
        tokens, far, heads, rule: As of the forward.
        upstream: Pointers to out, log-sum-exp and the gradients of both.
        results: Pointers to the gradient of q [N, r, T, D] and delta [N, r, T] in float32.
        strides: As of the forward, then those of the gradient of out.
    """
    q_ptr, k_ptr, v_ptr = tokens
    far_k_ptr, far_v_ptr, bias_ptr, marks_ptr = far
    out_ptr, lse_ptr, grad_ptr, grad_lse_ptr = upstream
    dq_ptr, delta_ptr = results
    q_strides, k_strides, v_strides, far_k_strides, far_v_strides, grad_strides = strides
    num_heads, heads_per_n, heads_per_core = heads
    group_size, window_size, sink_groups = rule
    # Read the rows that this program owns.
    pid = tl.program_id(0)
    tile = tl.num_programs(0) // num_heads - 1 - pid // num_heads
    head = (pid % num_heads).to(tl.int64)
    n = head // heads_per_n
    r = head % heads_per_n
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    inside = rows < num_queries
    mask = tile_mask(rows, num_queries, dims, HEAD_DIM)
    wide = rows.to(tl.int64)[:, None]
    q_base = q_ptr + n * q_strides[0] + r * q_strides[1]
    q = tl.load(q_base + wide * q_strides[2] + dims[None, :], mask=mask, other=0.0)
    grad_base = grad_ptr + n * grad_strides[0] + r * grad_strides[1]
    grad = tl.load(grad_base + wide * grad_strides[2] + dims[None, :], mask=mask, other=0.0)
    flat = head * num_queries + rows
    out = tl.load(out_ptr + flat[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    lse = tl.load(lse_ptr + flat, mask=inside, other=0.0) * LOG2E
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + flat, mask=inside, other=0.0)
    tl.store(delta_ptr + flat, delta, mask=inside)
    queries = (q, grad, lse, delta)
    groups = visible_cores(rows, group_size, window_size)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M, num_queries) - 1
    whole, far_end, local, middle, causal, end = _key_ranges(tile * BLOCK_M, last, 0, rule, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sizes: tl.constexpr = (HAS_BIAS, HAS_MARKS, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_N)

    # Through the far past: entries that all rows see, then those that some do.
    core = r // heads_per_core
    k_base = far_k_ptr + n * far_k_strides[0] + core * far_k_strides[1]
    v_base = far_v_ptr + n * far_v_strides[0] + core * far_v_strides[1]
    high = visible_entries(groups, group_size, sink_groups)
    biases = bias_ptr + head * num_entries
    steps = (far_k_strides[2], far_v_strides[2], num_entries)
    marks = marks_ptr
    if HAS_MARKS:
        marks = marks_of_rows(marks_ptr, n, rows, 0, (share, num_shares, num_words))
    keys = (k_base, v_base) + steps + (high * 0, high, biases, marks)
    dq = _query_gradients(dq, queries, keys, whole * 0, whole, scale, softcap, False, sizes)
    dq = _query_gradients(dq, queries, keys, whole, far_end, scale, softcap, True, sizes)

    # Through raw tokens: the oldest, the middle, the causal end.
    raw_sizes: tl.constexpr = (False, False, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_N)
    k_base = k_ptr + n * k_strides[0]
    v_base = v_ptr + n * v_strides[0]
    low = groups * group_size
    keys = (k_base, v_base, k_strides[1], v_strides[1], num_keys, low, rows + 1, biases, marks)
    first_end = tl.minimum(middle, end)
    dq = _query_gradients(dq, queries, keys, local, first_end, scale, softcap, True, raw_sizes)
    dq = _query_gradients(dq, queries, keys, middle, causal, scale, softcap, False, raw_sizes)
    dq = _query_gradients(dq, queries, keys, causal, end, scale, softcap, True, raw_sizes)
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + flat[:, None] * HEAD_DIM + dims[None, :], dq, mask=mask)


@triton.jit
def _key_gradients(
    state, keys, queries, begin, end, scale, softcap, rule, MASKED: tl.constexpr, sizes
):
    """Continue the gradients of one key tile from queries begin .. end-1; scores are held
    transposed, [keys, queries].

    Args:
        state: The gradients of k, v and the keys' biases so far.
        keys: k, v, the keys' indices and their biases, [keys, 1] or 0.
        queries: Pointers to q, grad out, log-sum-exp and delta, strides of the first two, their
            number, and the marks: a pointer to those of the first query, and share, num_shares and
            num_words.
        rule: group_size, window_size and sink_groups.
        sizes: FAR, HAS_BIAS, HAS_MARKS, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_N.
    """
    dk, dv, dbias = state
    k, v, index, bias = keys
    q_ptr, grad_ptr, lse_ptr, delta_ptr, stride_q, stride_g, num_queries, marks, shares = queries
    group_size, window_size, sink_groups = rule
    FAR: tl.constexpr = sizes[0]
    HAS_BIAS: tl.constexpr = sizes[1]
    HAS_MARKS: tl.constexpr = sizes[2]
    HAS_SOFTCAP: tl.constexpr = sizes[3]
    HEAD_DIM: tl.constexpr = sizes[4]
    BLOCK_D: tl.constexpr = sizes[5]
    BLOCK_N: tl.constexpr = sizes[6]
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    q_tile = q_ptr + begin.to(tl.int64) * stride_q + offs[:, None] * stride_q + dims[None, :]
    g_tile = grad_ptr + begin.to(tl.int64) * stride_g + offs[:, None] * stride_g + dims[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        rows = start + offs
        q = load_tile(q_tile, rows, num_queries, dims, MASKED, False, HEAD_DIM, BLOCK_D)
        grad = load_tile(g_tile, rows, num_queries, dims, MASKED, False, HEAD_DIM, BLOCK_D)
        if MASKED:
            lse = tl.load(lse_ptr + rows, mask=rows < num_queries, other=0.0) * LOG2E
            delta = tl.load(delta_ptr + rows, mask=rows < num_queries, other=0.0)
        else:
            lse = tl.load(lse_ptr + rows) * LOG2E
            delta = tl.load(delta_ptr + rows)
        scores, slope = log2_scores(dot(k, tl.trans(q)), scale, bias, softcap, HAS_SOFTCAP)
        weights = tl.exp2(scores - lse[None, :])
        if MASKED:
            groups = visible_cores(rows, group_size, window_size)
            if FAR:
                high = visible_entries(groups, group_size, sink_groups)
                seen = index[:, None] < high[None, :]
            else:
                is_raw = index[:, None] >= (groups * group_size)[None, :]
                seen = is_raw & (index[:, None] <= rows[None, :])
            weights = tl.where(seen & (rows < num_queries)[None, :], weights, 0.0)
        if HAS_MARKS:
            words = marks_of_rows(marks, 0, rows, 0, shares)
            weights = tl.where(marked_keys(words, index), 0.0, weights)
        dv += dot(weights.to(grad.dtype), grad)
        grad_scores = weights * (dot(v, tl.trans(grad)) - delta[None, :])
        if HAS_BIAS:
            dbias += tl.sum(grad_scores, 1)
        if HAS_SOFTCAP:
            grad_scores = grad_scores * slope
        dk += dot(grad_scores.to(q.dtype), q)
        q_tile += BLOCK_N * stride_q
        g_tile += BLOCK_N * stride_g
    return dk, dv, dbias


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_shares", "num_words"])
def _attend_dkv_kernel(
    tokens,
    far,
    upstream,
    results,
    num_queries,
    num_keys,
    num_shares,
    num_words,
    scale,
    softcap,
    strides,
    heads,
    rule,
    share,
    FAR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the gradients of keys and values, of the far past's entries (FAR) or of raw tokens.

    Grid: (key tiles x key heads,). A program owns BLOCK_M keys of one head: it walks all queries of
    all heads that see one of them, sums in float32 and writes once, so the result does not depend
    on the order of programs. Gradients of biases are written for each query head.

    Args:
        tokens: Pointers to q [N, r, T, D], and to keys and values [N, r', S, D].
        far: Pointers to the biases of entries and to marks.
        upstream: Pointers to log-sum-exp, the gradient of out, and delta.
        results: Pointers to the gradients of keys, values and biases in float32.
        strides: Of q, keys, values and the gradient of out.
        heads: Heads r' in all, and query heads of each KV head and of each head r'.
        rule: group_size, window_size and sink_groups.
    """
    q_ptr, k_ptr, v_ptr = tokens
    bias_ptr, marks_ptr = far
    lse_ptr, grad_ptr, delta_ptr = upstream
    dk_ptr, dv_ptr, dbias_ptr = results
    q_strides, k_strides, v_strides, grad_strides = strides
    num_key_heads, heads_per_n, heads_per_key = heads
    group_size, window_size, sink_groups = rule
    # Read the keys that this program owns; early keys are seen by most queries and run first.
    pid = tl.program_id(0)
    tile = pid // num_key_heads
    key_head = (pid % num_key_heads).to(tl.int64)
    keys_per_n = heads_per_n // heads_per_key
    n = key_head // keys_per_n
    h = key_head % keys_per_n
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = tile_mask(index, num_keys, dims, HEAD_DIM)
    wide = index.to(tl.int64)[:, None]
    k_base = k_ptr + n * k_strides[0] + h * k_strides[1]
    k = tl.load(k_base + wide * k_strides[2] + dims[None, :], mask=mask, other=0.0)
    v_base = v_ptr + n * v_strides[0] + h * v_strides[1]
    v = tl.load(v_base + wide * v_strides[2] + dims[None, :], mask=mask, other=0.0)

    # Queries begin .. end-1 see some of these keys, low .. high-1 all of them; low and high are
    # moved inwards to whole tiles.
    first = tile * BLOCK_M
    last = tl.minimum(tile * BLOCK_M + BLOCK_M, num_keys) - 1
    if FAR:
        begin = first_query_of_entry(first, group_size, window_size, sink_groups)
        low = first_query_of_entry(last, group_size, window_size, sink_groups)
        high = num_queries
        end = num_queries
    else:
        begin = first
        low = last
        high = tl.minimum(last_query_of_token(first, group_size, window_size), num_queries)
        end = tl.minimum(last_query_of_token(last, group_size, window_size), num_queries)
    begin = tl.minimum(begin, end)
    low = begin + (tl.maximum(low - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    high = low + tl.maximum(high - low, 0) // BLOCK_N * BLOCK_N

    dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sizes: tl.constexpr = (FAR, HAS_BIAS, HAS_MARKS, HAS_SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_N)
    for i in range(heads_per_key):
        r = h * heads_per_key + i
        head = n * heads_per_n + r
        bias = 0.0
        if HAS_BIAS:
            biases = bias_ptr + head * num_keys + index
            bias = tl.load(biases, mask=index < num_keys, other=0.0)[:, None]
        keys = (k, v, index, bias)
        queries = (
            q_ptr + n * q_strides[0] + r * q_strides[1],
            grad_ptr + n * grad_strides[0] + r * grad_strides[1],
            lse_ptr + head * num_queries,
            delta_ptr + head * num_queries,
            q_strides[2],
            grad_strides[2],
            num_queries,
            marks_ptr + n * num_shares * num_words,
            (share, num_shares, num_words),
        )
        state = (dk, dv, tl.zeros([BLOCK_M], tl.float32))
        begin_end = tl.minimum(low, end)
        state = _key_gradients(
            state, keys, queries, begin, begin_end, scale, softcap, rule, True, sizes
        )
        state = _key_gradients(state, keys, queries, low, high, scale, softcap, rule, False, sizes)
        dk, dv, dbias = _key_gradients(
            state, keys, queries, high, end, scale, softcap, rule, True, sizes
        )
        if HAS_BIAS:
            tl.store(dbias_ptr + head * num_keys + index, dbias, mask=index < num_keys)
    flat = (key_head * num_keys + index)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(dk_ptr + flat, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + flat, dv.to(dv_ptr.dtype.element_ty), mask=mask)


def _constants(tiles: Tiles, dim: int, softcap: float | None) -> dict[str, int | bool]:
    """Return what every kernel is compiled for."""
    return {
        "HAS_SOFTCAP": softcap is not None,
        "HEAD_DIM": dim,
        "BLOCK_D": max(16, power_of_2(dim)),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def rule_of(spec: Spec) -> tuple[int, int, int]:
    """Return the group size, the window size and the number of groups that stay raw."""
    return spec.group_size, spec.window_size, spec.sinks // spec.group_size


def attend(
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None = None,
    marks: Marks | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as `packed.attend` does: out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in
    float32; to no core token that is marked for the query's share."""
    far = far_past(tokens, cores, spec, core_bias)
    return attend_list(near_past(tokens, spec), far, spec, marks)


def attend_list(
    tokens: Tokens, far: FarPast, spec: Spec, marks: Marks | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `attend` does, to a far past that is listed already.

    Args:
        tokens: Raw tokens from the first one on that a query sees behind its far past.
    """
    q, k, v, far_k, far_v = map(contiguous_rows, (*tokens[:3], far.k, far.v))
    n, r, num_queries, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    # A launch needs pointers, also to what is not read.
    bias = lse if far.bias is None else far.bias
    words = lse if marks is None else marks.words
    tiles = forward_tiles(chip_of(q.device), q.dtype, dim)
    launch(
        _attend_fwd_kernel,
        (ceil_div(num_queries, tiles.block_m) * n * r,),
        (
            *((q, k, v), (far_k, far_v, bias, words), (out, lse)),
            *(num_queries, k.shape[1], far_k.shape[2], tokens.q_start, tokens.k_start),
            *shape_of(marks),
            *(float(spec.scale), float(spec.softcap or 1.0)),
        ),
        (
            tuple(x.stride()[:-1] for x in (q, k, v, far_k, far_v)),
            (n * r, r, r // far_k.shape[1]),
            rule_of(spec),
            1 if marks is None else marks.share,
        ),
        HAS_BIAS=far.bias is not None,
        HAS_MARKS=marks is not None,
        **_constants(tiles, dim, spec.softcap),
    )
    return out, lse


def shape_of(marks: Marks | None) -> tuple[int, int]:
    """Return the number of shares of marks and of words of each."""
    return (1, 1) if marks is None else marks.words.shape[1:]


def attend_backward(
    upstream: Upstream,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None = None,
    marks: Marks | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return gradients as `packed.attend_backward` does, in float32, the same from run to run; of
    the attention to core tokens that are not marked."""
    tokens.check_whole()
    # Queries: each program walks the keys that its tile sees, and writes delta for the keys.
    far = far_past(tokens, cores, spec, core_bias)
    q, k, v, far_k, far_v = map(contiguous_rows, (*tokens[:3], far.k, far.v))
    grad_out = contiguous_rows(upstream.grad_out)
    lse = upstream.lse.contiguous()
    n, r, num_queries, dim = q.shape
    dq, dk, dv, dfar_k, dfar_v = (
        torch.empty(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v, far_k, far_v)
    )
    delta = torch.empty_like(lse)
    bias = lse if far.bias is None else far.bias  # not read without biases: a launch needs pointers
    dbias = torch.empty_like(bias)
    words = lse if marks is None else marks.words
    grad_lse = lse if upstream.grad_lse is None else upstream.grad_lse.contiguous()
    results = (upstream.out.contiguous(), lse, grad_out, grad_lse)
    numbers = (float(spec.scale), float(spec.softcap or 1.0))
    tiles = dq_tiles(chip_of(q.device), q.dtype, dim)
    launch(
        _attend_dq_kernel,
        (ceil_div(num_queries, tiles.block_m) * n * r,),
        (
            *((q, k, v), (far_k, far_v, bias, words), results, (dq, delta)),
            *(num_queries, k.shape[1], far_k.shape[2], *shape_of(marks), *numbers),
        ),
        (
            tuple(x.stride()[:-1] for x in (q, k, v, far_k, far_v, grad_out)),
            (n * r, r, r // far_k.shape[1]),
            rule_of(spec),
            1 if marks is None else marks.share,
        ),
        HAS_BIAS=core_bias is not None,
        HAS_MARKS=marks is not None,
        HAS_GRAD_LSE=upstream.grad_lse is not None,
        **_constants(tiles, dim, spec.softcap),
    )
    # Keys, raw tokens and those of the far past: each program walks the queries that see its tile.
    tiles = dkv_tiles(chip_of(q.device), q.dtype, dim)
    for key, value, dkey, dvalue, is_far in (
        (k[:, None], v[:, None], dk, dv, False),
        (far_k, far_v, dfar_k, dfar_v, True),
    ):
        heads, count = key.shape[1:3]
        if not count:
            continue
        launch(
            _attend_dkv_kernel,
            (ceil_div(count, tiles.block_m) * n * heads,),
            (
                *((q, key, value), (bias, words), (lse, grad_out, delta), (dkey, dvalue, dbias)),
                *(num_queries, count, *shape_of(marks), *numbers),
            ),
            (
                tuple(x.stride()[:-1] for x in (q, key, value, grad_out)),
                (n * heads, r, r // heads),
                rule_of(spec),
                1 if marks is None else marks.share,
            ),
            FAR=is_far,
            HAS_BIAS=is_far and far.bias is not None,
            HAS_MARKS=is_far and marks is not None,
            **_constants(tiles, dim, spec.softcap),
        )
    # First tokens are entries of the far past and raw tokens, too.
    dcore_k = add_to_sinks(dfar_k, dk, spec.sinks)
    dcore_v = add_to_sinks(dfar_v, dv, spec.sinks)
    dbias = None if core_bias is None else bias_gradient(dbias, core_bias, spec.sinks)
    return dq, dk, dv, dcore_k, dcore_v, dbias
