"""Attend over [core tokens; local tokens] on any GPU: one kernel forward, three backward.

Both kinds of keys obey one rule: the query at t sees keys with low(t) <= index < high(t). With j(t)
groups in its far past, raw tokens have low j(t) g and high t + 1; the entries of the far past,
which are first tokens kept raw, then core tokens, have low 0 and as high the number of entries in
j(t) groups (docs/math.md, eq. 4 and 13). So one inner loop serves both. Tiles of keys that every
query of a program sees are not masked, tiles that none sees are not visited.

Tiles of queries are [rows, D]. The file is long because forward and backward share it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Cores, Spec, Tokens, Upstream
from corecontext.ops.triton.attend.far_past import (
    FarPast,
    add_to_sinks,
    far_past,
    mass_gradient,
    near_past,
)
from corecontext.ops.triton.attend.marks import Marks, marked_entries, marked_keys, marks_of_rows
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, ints, launch, power_of_2
from corecontext.ops.triton.primitives import (
    LN2,
    LOG2E,
    dot,
    first_query_of_entry,
    integers,
    last_query_of_token,
    load_tile,
    log2_scores,
    softmax_step,
    tile_mask,
    visible_cores,
    visible_entries,
)
from corecontext.ops.triton.tiles import Tiles, chip_of, dkv_tiles, dq_tiles, forward_tiles


class Form(NamedTuple):
    """Hold what every kernel is compiled for."""

    has_mass: bool
    """Whether masses are added to the scores of entries."""
    has_marks: bool
    """Whether entries are marked, which are then not seen."""
    has_softcap: bool
    dim: int
    block_d: int
    block_m: int
    """Queries that a program owns; keys, where it computes the gradient of keys and values."""
    block_n: int
    """Keys of a tile that it walks through; queries, where it computes that gradient."""


@triton.jit
def _owned_rows(heads, FORM: tl.constexpr):
    """Return the query head of this program of all N r, its sequence n and its number r there, in
    int64, and its first query. Heads that share keys run side by side, tiles that see most first.

    Args:
        heads: N r and r.
    """
    pid = tl.program_id(0)
    tile = tl.num_programs(0) // heads[0] - 1 - pid // heads[0]
    # mutant offsets: 32 bits of a head in the forward
    head = (pid % heads[0]).to(tl.int64)
    return head, head // heads[1], head % heads[1], tile * FORM.block_m


@triton.jit
def _walks(tokens, far, strides, head, heads, place, rule, marking, FORM: tl.constexpr):
    """Return the keys of five walks, of `_attend_keys`, and where each begins and ends.

    Walks are over 0: entries that all queries of a program see; 1: entries that some see; 2: raw
    tokens that some see, as others have them in their far past; 3: raw tokens that all see; 4: raw
    tokens that some see, as they are later than others. So 0 and 1 are FAR, 1, 2 and 4 are MASKED.

    Args:
        tokens, far, strides, heads: As of `_attend_fwd_kernel`.
        head: Of all N r.
        place: Number of queries, first query, position of query 0, first raw token, number of raw
            tokens and of entries.
        marking: Queries of a share, number of shares, words of each.
    """
    _, k_ptr, v_ptr = tokens
    far_k_ptr, far_v_ptr, mass_ptr, marks_ptr = far
    _, k_strides, v_strides, far_k_strides, far_v_strides = strides[:5]
    num_queries, first, q_start, k_start, num_keys, num_entries = place
    group_size, window_size, sink_groups = rule
    n = head // heads[1]
    position = q_start + first + tl.arange(0, FORM.block_m)
    groups = visible_cores(position, group_size, window_size)
    high = visible_entries(groups, group_size, sink_groups)  # [rows]
    masses = mass_ptr + n * num_entries
    marks = marks_ptr
    if FORM.has_marks:
        marks = marks_of_rows(marks_ptr, n, position, q_start, marking)
    far_k = far_k_ptr + n * far_k_strides[0]
    far_v = far_v_ptr + n * far_v_strides[0]
    entries = (far_k, far_v, far_k_strides[1], far_v_strides[1], num_entries)
    entries = entries + (high * 0, high, masses, marks)  # low is 0
    k = k_ptr + n * k_strides[0] - tl.cast(k_start, tl.int64) * k_strides[1]
    v = v_ptr + n * v_strides[0] - tl.cast(k_start, tl.int64) * v_strides[1]
    raw = (k, v, k_strides[1], v_strides[1], k_start + num_keys)
    raw = raw + (groups * group_size, position + 1, masses, marks)

    # Bounds of walks: 0, whole, far_end; local, middle, causal, end; inner ones at whole tiles.
    last = tl.minimum(first + FORM.block_m, num_queries) - 1
    groups_first = visible_cores(q_start + first, group_size, window_size)
    groups_last = visible_cores(q_start + last, group_size, window_size)
    whole = visible_entries(groups_first, group_size, sink_groups) // FORM.block_n * FORM.block_n
    far_end = visible_entries(groups_last, group_size, sink_groups)
    local = groups_first * group_size
    seen_by_all = groups_last * group_size
    middle = local + (seen_by_all - local + FORM.block_n - 1) // FORM.block_n * FORM.block_n
    behind = q_start + first + 1 - middle
    # mutant 3: the next token is seen, Triton tiles without a mask
    causal = tl.maximum(middle, middle + behind // FORM.block_n * FORM.block_n)
    end = q_start + last + 1
    begins = (whole * 0, whole, local, middle, causal)
    ends = (whole, far_end, tl.minimum(middle, end), causal, end)
    return (entries, entries, raw, raw, raw), begins, ends


@triton.jit
def _tile_pointers(keys, begin, FORM: tl.constexpr):
    """Return pointers to the first tile of keys and of values of a walk, [keys, columns]."""
    k_ptr, v_ptr, stride_k, stride_v = keys[:4]
    offs = tl.arange(0, FORM.block_n)[:, None]
    dims = tl.arange(0, FORM.block_d)[None, :]
    k_tile = k_ptr + begin.to(tl.int64) * stride_k + offs * stride_k + dims
    return k_tile, v_ptr + begin.to(tl.int64) * stride_v + offs * stride_v + dims


@triton.jit
def _attend_keys(
    state, q, keys, begin, end, factors, FAR: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr
):
    """Continue an online softmax over keys begin .. end-1, in tiles.

    Args:
        state: Output so far, running sum and running maximum of each row.
        keys: Pointers to k and v, their strides, one past the last key, the rows' bounds low and
            high, used where MASKED, and, where FAR, pointers to masses and to each row's marks.
        FAR: Whether keys are entries of the far past, else raw tokens.
        MASKED: Whether some row may not see some key.
    """
    acc, running_sum, running_max = state
    stride_k, stride_v, num_keys, low, high, mass_ptr, marks = keys[2:]
    HAS_MARKS: tl.constexpr = FAR and FORM.has_marks
    offs = tl.arange(0, FORM.block_n)
    dims = tl.arange(0, FORM.block_d)
    k_tile, v_tile = _tile_pointers(keys, begin, FORM)
    for start in tl.range(begin, end, FORM.block_n):
        index = start + offs
        # False: the tile [keys, columns] is not transposed.
        k = load_tile(k_tile, index, num_keys, dims, MASKED, False, FORM.dim, FORM.block_d)
        mass = 0.0
        if FAR and FORM.has_mass:
            mass = tl.load(mass_ptr + index, mask=index < num_keys, other=0.0)[None, :]
        products = dot(q, tl.trans(k))  # [rows, keys]
        scores, _ = log2_scores(products, factors[0], mass, factors[1], FORM.has_softcap)
        if MASKED:
            seen = (index[None, :] >= low[:, None]) & (index[None, :] < high[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        if HAS_MARKS:
            # mutant fetch: a fetched group keeps its core token, Triton
            scores = tl.where(marked_entries(marks, start, FORM.block_n), -float("inf"), scores)
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, MASKED or HAS_MARKS
        )
        v = load_tile(v_tile, index, num_keys, dims, MASKED, False, FORM.dim, FORM.block_d)
        acc = acc * fade[:, None] + dot(weights.to(v.dtype), v)
        k_tile += FORM.block_n * stride_k
        v_tile += FORM.block_n * stride_v
    return acc, running_sum, running_max


@triton.jit
def _attend_fwd_kernel(
    tokens, far, results, numbers, factors, strides, heads, rule, share, FORM: tl.constexpr
):
    """Attend.

    Grid: (query tiles x N r,). A program owns block_m queries of one head: it reads them and the
    keys and values they see once, with sums in float32.

    Args:
        tokens: Pointers to q [N, r, T, D], k and v [N, S, D].
        far: Pointers to keys and values of the far past [N, E, D], its masses [N, E], and marks.
        results: Pointers to out [N, r, T, D] and natural log-sum-exp [N, r, T] in float32.
        strides: Of q, k and v, and of keys and values of the far past.
        heads: Query heads in all (N r), and of each KV head (r).
        share: Queries with the same marks.
    """
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_D: tl.constexpr = FORM.block_d
    num_queries, num_keys, num_entries, q_start, k_start, num_shares, num_words = integers(numbers)
    q_ptr = tokens[0]
    q_strides = strides[0]
    # Read the queries that this program owns.
    head, n, r, first = _owned_rows(heads, FORM)
    rows = first + tl.arange(0, FORM.block_m)
    dims = tl.arange(0, FORM.block_d)
    mask = tile_mask(rows, num_queries, dims, FORM.dim)
    q_tile = q_ptr + n * q_strides[0] + r * q_strides[1]
    q_tile += rows.to(tl.int64)[:, None] * q_strides[2] + dims[None, :]
    q = tl.load(q_tile, mask=mask, other=0.0)  # [rows, D]

    state = (
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], -float("inf"), tl.float32),
    )
    place = (num_queries, first, q_start, k_start, num_keys, num_entries)
    marking = (share, num_shares, num_words)
    keys, begins, ends = _walks(tokens, far, strides, head, heads, place, rule, marking, FORM)
    for i in tl.static_range(5):  # the walks: FAR, then MASKED
        state = _attend_keys(
            state, q, keys[i], begins[i], ends[i], factors, i < 2, i != 0 and i != 3, FORM
        )
    acc, running_sum, running_max = state

    out = acc / running_sum[:, None]
    out_tile = results[0] + (head * num_queries + rows)[:, None] * FORM.dim + dims[None, :]
    tl.store(out_tile, out.to(results[0].dtype.element_ty), mask=mask)
    lse = (running_max + tl.log2(running_sum)) * LN2
    tl.store(results[1] + head * num_queries + rows, lse, mask=rows < num_queries)


@triton.jit
def _query_gradients(
    dq,
    queries,
    keys,
    begin,
    end,
    factors,
    FAR: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Continue the gradient of one query tile through keys begin .. end-1.

    Args:
        dq: The gradient so far.
        queries: q, grad out, log-sum-exp in units of log 2, and delta of each row.
        keys: As in `_attend_keys`.
    """
    q, grad, lse, delta = queries
    stride_k, stride_v, num_keys, low, high, mass_ptr, marks = keys[2:]
    offs = tl.arange(0, FORM.block_n)
    dims = tl.arange(0, FORM.block_d)
    k_tile, v_tile = _tile_pointers(keys, begin, FORM)
    for start in tl.range(begin, end, FORM.block_n):
        index = start + offs
        k = load_tile(k_tile, index, num_keys, dims, MASKED, False, FORM.dim, FORM.block_d)
        v = load_tile(v_tile, index, num_keys, dims, MASKED, False, FORM.dim, FORM.block_d)
        mass = 0.0
        if FAR and FORM.has_mass:
            mass = tl.load(mass_ptr + index, mask=index < num_keys, other=0.0)[None, :]
        products = dot(q, tl.trans(k))  # [rows, keys]
        scores, slope = log2_scores(products, factors[0], mass, factors[1], FORM.has_softcap)
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            seen = (index[None, :] >= low[:, None]) & (index[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        if FAR and FORM.has_marks:
            weights = tl.where(marked_entries(marks, start, FORM.block_n), 0.0, weights)
        grad_scores = weights * (dot(grad, tl.trans(v)) - delta[:, None])
        if FORM.has_softcap:
            grad_scores = grad_scores * slope
        dq += dot(grad_scores.to(k.dtype), k)
        k_tile += FORM.block_n * stride_k
        v_tile += FORM.block_n * stride_v
    return dq


@triton.jit
def _attend_dq_kernel(
    tokens,
    far,
    upstream,
    results,
    numbers,
    factors,
    strides,
    heads,
    rule,
    share,
    HAS_GRAD_LSE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute the gradient of the queries.

    Grid: (query tiles x N r,). A program owns block_m queries of one head and walks the keys as the
    forward does, with sums in float32; it writes their gradient, and delta for the other kernels.

    Args:
        tokens, far, heads, share: As of the forward.
        upstream: Pointers to out, log-sum-exp and the gradients of both.
        results: Pointers to the gradient of q [N, r, T, D] and delta [N, r, T] in float32.
        strides: As of the forward, then those of the gradient of out.
    """
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_D: tl.constexpr = FORM.block_d
    num_queries, num_keys, num_entries, num_shares, num_words = integers(numbers)
    q_ptr = tokens[0]
    out_ptr, lse_ptr, grad_ptr, grad_lse_ptr = upstream
    dq_ptr, delta_ptr = results
    q_strides = strides[0]
    grad_strides = strides[5]
    # Read the rows that this program owns.
    head, n, r, first = _owned_rows(heads, FORM)
    rows = first + tl.arange(0, FORM.block_m)
    dims = tl.arange(0, FORM.block_d)
    inside = rows < num_queries
    mask = tile_mask(rows, num_queries, dims, FORM.dim)
    wide = rows.to(tl.int64)[:, None]
    q_base = q_ptr + n * q_strides[0] + r * q_strides[1]
    q = tl.load(q_base + wide * q_strides[2] + dims[None, :], mask=mask, other=0.0)
    grad_base = grad_ptr + n * grad_strides[0] + r * grad_strides[1]
    grad = tl.load(grad_base + wide * grad_strides[2] + dims[None, :], mask=mask, other=0.0)
    flat = head * num_queries + rows
    out = tl.load(out_ptr + flat[:, None] * FORM.dim + dims[None, :], mask=mask, other=0.0)
    lse = tl.load(lse_ptr + flat, mask=inside, other=0.0) * LOG2E
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + flat, mask=inside, other=0.0)
    tl.store(delta_ptr + flat, delta, mask=inside)

    # Walk through the keys.
    queries = (q, grad, lse, delta)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    place = (num_queries, first, 0, 0, num_keys, num_entries)
    marking = (share, num_shares, num_words)
    keys, begins, ends = _walks(tokens, far, strides, head, heads, place, rule, marking, FORM)
    for i in tl.static_range(5):
        dq = _query_gradients(
            dq, queries, keys[i], begins[i], ends[i], factors, i < 2, i != 0 and i != 3, FORM
        )
    dq = (dq * factors[0]).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + flat[:, None] * FORM.dim + dims[None, :], dq, mask=mask)


@triton.jit
def _key_gradients(
    state,
    keys,
    queries,
    bounds,
    factors,
    rule,
    FAR: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Continue the gradients of a key tile from queries begin .. end-1; scores are [keys, queries].

    Args:
        state: The gradients of k, v and the keys' masses so far.
        keys: k and v [keys, D], the keys' numbers, and their masses, [keys, 1] or 0.
        queries: Pointers to q, grad out, log-sum-exp and delta, strides of the first two, their
            number, and the marks: a pointer, and share, num_shares and num_words.
        bounds: begin and end.
    """
    dk, dv, dmass = state
    k, v, index, mass = keys
    q_ptr, grad_ptr, lse_ptr, delta_ptr, stride_q, stride_g, num_queries, marks, shares = queries
    begin, end = bounds
    group_size, window_size, sink_groups = rule
    offs = tl.arange(0, FORM.block_n)
    dims = tl.arange(0, FORM.block_d)
    q_tile, g_tile = _tile_pointers((q_ptr, grad_ptr, stride_q, stride_g), begin, FORM)
    for start in tl.range(begin, end, FORM.block_n):
        rows = start + offs
        q = load_tile(q_tile, rows, num_queries, dims, MASKED, False, FORM.dim, FORM.block_d)
        grad = load_tile(g_tile, rows, num_queries, dims, MASKED, False, FORM.dim, FORM.block_d)
        if MASKED:
            lse = tl.load(lse_ptr + rows, mask=rows < num_queries, other=0.0) * LOG2E
            delta = tl.load(delta_ptr + rows, mask=rows < num_queries, other=0.0)
        else:
            lse = tl.load(lse_ptr + rows) * LOG2E
            delta = tl.load(delta_ptr + rows)
        products = dot(k, tl.trans(q))  # [keys, queries]
        scores, slope = log2_scores(products, factors[0], mass, factors[1], FORM.has_softcap)
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
        if FORM.has_marks:
            words = marks_of_rows(marks, 0, rows, 0, shares)
            weights = tl.where(marked_keys(words, index), 0.0, weights)
        dv += dot(weights.to(grad.dtype), grad)
        grad_scores = weights * (dot(v, tl.trans(grad)) - delta[None, :])
        if FORM.has_mass:
            dmass += tl.sum(grad_scores, 1)
        if FORM.has_softcap:
            grad_scores = grad_scores * slope
        dk += dot(grad_scores.to(q.dtype), q)
        q_tile += FORM.block_n * stride_q
        g_tile += FORM.block_n * stride_g
    return dk, dv, dmass


@triton.jit
def _attend_dkv_kernel(
    tokens,
    far,
    upstream,
    results,
    numbers,
    factors,
    strides,
    heads,
    rule,
    share,
    FAR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute the gradients of keys and values, of the far past's entries (FAR) or of raw tokens.

    Grid: (key tiles x N,). A program owns block_m keys: it walks all queries of all heads that see
    one of them, sums in float32 and writes once, so the result does not depend on the order of
    programs. Gradients of masses are written for each query head.

    Args:
        tokens: Pointers to q [N, r, T, D], and to keys and values [N, S, D].
        far: Pointers to the masses of entries and to marks.
        upstream: Pointers to log-sum-exp, the gradient of out, and delta.
        results: Pointers to the gradients of keys, values and masses in float32.
        strides: Of q, keys, values and the gradient of out.
        heads: N, and query heads of each KV head (r).
        share: As of the forward.
    """
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_D: tl.constexpr = FORM.block_d
    num_queries, num_keys, num_shares, num_words = integers(numbers)
    q_ptr, k_ptr, v_ptr = tokens
    mass_ptr, marks_ptr = far
    lse_ptr, grad_ptr, delta_ptr = upstream
    dk_ptr, dv_ptr, dmass_ptr = results
    q_strides, k_strides, v_strides, grad_strides = strides
    group_size, window_size, sink_groups = rule
    # Read the keys that this program owns; early keys are seen by most queries and run first.
    first = tl.program_id(0) // heads[0] * FORM.block_m
    n = (tl.program_id(0) % heads[0]).to(tl.int64)
    index = first + tl.arange(0, FORM.block_m)
    dims = tl.arange(0, FORM.block_d)
    mask = tile_mask(index, num_keys, dims, FORM.dim)
    wide = index.to(tl.int64)[:, None]
    k_base = k_ptr + n * k_strides[0]
    k = tl.load(k_base + wide * k_strides[1] + dims[None, :], mask=mask, other=0.0)
    v_base = v_ptr + n * v_strides[0]
    v = tl.load(v_base + wide * v_strides[1] + dims[None, :], mask=mask, other=0.0)

    # Queries begin .. end-1 see some of these keys, low .. high-1 all of them, where low and high
    # are moved inwards to whole tiles. So the middle one of the three bounds needs no mask.
    last = tl.minimum(first + FORM.block_m, num_keys) - 1
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
    low = begin + (tl.maximum(low - begin, 0) + FORM.block_n - 1) // FORM.block_n * FORM.block_n
    high = low + tl.maximum(high - low, 0) // FORM.block_n * FORM.block_n
    bounds = ((begin, tl.minimum(low, end)), (low, high), (high, end))

    mass = 0.0
    if FORM.has_mass:
        masses = mass_ptr + n * num_keys + index
        mass = tl.load(masses, mask=index < num_keys, other=0.0)[:, None]
    dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(heads[1]):
        r = tl.cast(i, tl.int64)
        head = n * heads[1] + r
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
        keys = (k, v, index, mass)
        state = (dk, dv, tl.zeros([BLOCK_M], tl.float32))
        for j in tl.static_range(3):
            state = _key_gradients(
                state, keys, queries, bounds[j], factors, rule, FAR, j != 1, FORM
            )
        dk, dv, dmass = state
        if FORM.has_mass:
            tl.store(dmass_ptr + head * num_keys + index, dmass, mask=index < num_keys)
    flat = (n * num_keys + index)[:, None] * FORM.dim + dims[None, :]
    tl.store(dk_ptr + flat, (dk * factors[0]).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + flat, dv.to(dv_ptr.dtype.element_ty), mask=mask)


def form_of(tiles: Tiles, dim: int, spec: Spec, has_mass: bool, has_marks: bool) -> Form:
    """Return the constants of a kernel."""
    block_d = max(16, power_of_2(dim))
    blocks = (block_d, tiles.block_m, tiles.block_n)
    return Form(has_mass, has_marks, spec.softcap is not None, dim, *blocks)


def rule_of(spec: Spec) -> tuple[int, int, int]:
    """Return `rule`: group_size, window_size and the number of groups that are sinks."""
    return spec.group_size, spec.window_size, spec.sinks // spec.group_size


def attend(
    tokens: Tokens, cores: Cores, spec: Spec, mass: Tensor | None = None, marks: Marks | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `packed.attend` does: out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in
    float32; to no core token that is marked for the query's share."""
    far = far_past(tokens, cores, spec, mass)
    return attend_list(near_past(tokens, spec), far, spec, marks)


def attend_list(
    tokens: Tokens, far: FarPast, spec: Spec, marks: Marks | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `attend` does, to a far past that is listed already.

    Args:
        tokens: Queries, and the raw tokens of their near past.
    """
    q, k, v, far_k, far_v = map(contiguous_rows, (*tokens[:3], far.k, far.v))
    n, r, num_queries, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    # A launch needs pointers, also to what is not read.
    mass = lse if far.mass is None else far.mass
    words = lse if marks is None else marks.words
    tiles = forward_tiles(chip_of(q.device), q.dtype, dim)
    sizes = (num_queries, k.shape[1], far_k.shape[1], tokens.q_start, tokens.k_start)
    factors = (float(spec.scale), float(spec.softcap or 1.0))
    strides = tuple(x.stride()[:-1] for x in (q, k, v, far_k, far_v))
    share = 1 if marks is None else marks.share
    launch(
        _attend_fwd_kernel,
        (ceil_div(num_queries, tiles.block_m) * n * r,),
        (
            *((q, k, v), (far_k, far_v, mass, words), (out, lse)),
            *(ints(*sizes, *shape_of(marks)), factors),
        ),
        (strides, (n * r, r), rule_of(spec), share),
        FORM=form_of(tiles, dim, spec, has_mass=far.mass is not None, has_marks=marks is not None),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
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
    mass: Tensor | None = None,
    marks: Marks | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, the core tokens' keys and values and their masses (None
    without), as `packed.attend_backward` does, in float32, the same from run to run; through core
    tokens that are not marked."""
    tokens.check_whole()
    # Queries: each program walks the keys that its tile sees, and writes delta for the keys.
    far = far_past(tokens, cores, spec, mass)
    q, k, v, far_k, far_v = map(contiguous_rows, (*tokens[:3], far.k, far.v))
    grad_out = contiguous_rows(upstream.grad_out)
    lse = upstream.lse.contiguous()
    n, r, num_queries, dim = q.shape
    dq, dk, dv, dfar_k, dfar_v = (
        torch.empty(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v, far_k, far_v)
    )
    delta = torch.empty_like(lse)
    # Not read without masses: a launch needs pointers.
    masses = lse if far.mass is None else far.mass
    dscores = torch.empty((n, r, far_k.shape[1]), dtype=torch.float32, device=q.device)
    words = lse if marks is None else marks.words
    grad_lse = lse if upstream.grad_lse is None else upstream.grad_lse.contiguous()
    given = (upstream.out.contiguous(), lse, grad_out, grad_lse)
    factors = (float(spec.scale), float(spec.softcap or 1.0))
    rule_and_share = (rule_of(spec), 1 if marks is None else marks.share)
    strides = tuple(x.stride()[:-1] for x in (q, k, v, far_k, far_v, grad_out))
    tiles = dq_tiles(chip_of(q.device), q.dtype, dim)
    launch(
        _attend_dq_kernel,
        (ceil_div(num_queries, tiles.block_m) * n * r,),
        (
            *((q, k, v), (far_k, far_v, masses, words), given, (dq, delta)),
            *(ints(num_queries, k.shape[1], far_k.shape[1], *shape_of(marks)), factors),
        ),
        (strides, (n * r, r), *rule_and_share),
        HAS_GRAD_LSE=upstream.grad_lse is not None,
        FORM=form_of(tiles, dim, spec, has_mass=far.mass is not None, has_marks=marks is not None),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    # Keys, raw tokens and those of the far past: each program walks the queries that see its tile.
    tiles = dkv_tiles(chip_of(q.device), q.dtype, dim)
    for key, value, dkey, dvalue, is_far in (
        (k, v, dk, dv, False),
        (far_k, far_v, dfar_k, dfar_v, True),
    ):
        count = key.shape[1]
        if not count:
            continue
        has_mass = is_far and far.mass is not None
        given = ((q, key, value), (masses, words), (lse, grad_out, delta))
        numbers = ints(num_queries, count, *shape_of(marks))
        strides = tuple(x.stride()[:-1] for x in (q, key, value, grad_out))
        launch(
            _attend_dkv_kernel,
            (ceil_div(count, tiles.block_m) * n,),
            (*given, (dkey, dvalue, dscores), numbers, factors),
            (strides, (n, r), *rule_and_share),
            FAR=is_far,
            FORM=form_of(tiles, dim, spec, has_mass, is_far and marks is not None),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    # First tokens are entries of the far past and raw tokens, too.
    dcore_k = add_to_sinks(dfar_k[:, None], dk, spec.sinks)
    dcore_v = add_to_sinks(dfar_v[:, None], dv, spec.sinks)
    dmass = None if mass is None else mass_gradient(dscores, spec.sinks)
    return dq, dk, dv, dcore_k, dcore_v, dmass
