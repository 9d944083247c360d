"""Attend from a share's queries to the raw tokens of its chosen groups: kernels, also backward.

The queries of a share and of all heads of a KV head see the same tokens: they are the rows of a
tile, whose tokens are gathered group by group. Rows are numbered by *lanes*: lane i of a share is
query i % padded of head i // padded, where `padded` is the number of its queries rounded up to a
power of 2; some lanes have no query. Log-sum-exps in memory are natural.

The backward of keys and values inverts the choice: for each group the shares that chose it, sorted,
so that one program sums each gradient and results do not change from run to run.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from corecontext.ops.triton.attend.shares import groups_seen
from corecontext.ops.triton.primitives import LN2, LOG2E, dot, integers, log2_scores, softmax_step


class RawForm(NamedTuple):
    """Hold what every kernel here is compiled for."""

    heads: int
    """Query heads of a KV head."""
    has_softcap: bool
    dim: int
    block_d: int
    block_m: int
    """Lanes that a program owns; tokens, where it computes the gradient of keys and values."""
    block_n: int
    """Tokens of a tile that it walks through; lanes, where it computes that gradient."""


@triton.jit
def _share_rows(lanes, number, shares, num_queries, HEADS: tl.constexpr):
    """Return head and query (row of q) of the lanes of a share, and which of them exist; any shape.

    Args:
        number: Of the share, counted from the first share of the call.
        shares: That first share's number from position 0, queries of a share, `padded`, q_start.
    """
    first_share, share, padded, q_start = shares
    head = lanes // padded
    within = lanes % padded
    row = (first_share + number) * share + within - q_start
    exists = (head < HEADS) & (within < share) & (row >= 0) & (row < num_queries)
    return head.to(tl.int64), row, exists


@triton.jit
def _owned_lanes(num_shares, padded_share, FORM: tl.constexpr):
    """Return the sequence n of this program, in int64, its share, and the lanes that it owns."""
    blocks = (FORM.heads * padded_share + FORM.block_m - 1) // FORM.block_m
    n = tl.program_id(0) // (blocks * num_shares)
    lanes = tl.program_id(0) % blocks * FORM.block_m + tl.arange(0, FORM.block_m)
    return n.to(tl.int64), tl.program_id(0) // blocks % num_shares, lanes


@triton.jit
def _raw_tokens(chosen_ptr, index, end, rule):
    """Return the group, -1 for none, and the position of tokens `index` of all tokens of a share's
    chosen groups, of which there are `end`."""
    group_size, _, sink_groups = rule
    group = tl.load(chosen_ptr + index // group_size, mask=index < end, other=-1)
    token = (sink_groups + tl.maximum(group, 0)) * group_size + index % group_size
    return group, token.to(tl.int64)


@triton.jit
def fetch_fwd_kernel(
    tokens, chosen_ptr, results, numbers, factors, strides, sizes, rule, FORM: tl.constexpr
):
    """Attend to the raw tokens of chosen groups and merge with out and lse, which hold attention to
    all else that the queries see, in place.

    Grid: (row blocks x C x N,). A program owns block_m lanes of a share. KV heads come one after
    the other, so that the keys and values in use are few.

    Args:
        tokens: Pointers to q [N, r, T, D], k and v [N, S, D].
        chosen_ptr: The groups chosen, [N, C, k], rising, then -1.
        results: Pointers to out [N, r, T, D] and log-sum-exp [N, r, T].
        strides: Of q, k, v and out.
        sizes: k, queries of a share, and `padded`.
    """
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_D: tl.constexpr = FORM.block_d
    num_queries, num_groups, num_shares, first_share, q_start = integers(numbers)
    scale, softcap = factors
    q_ptr, k_ptr, v_ptr = tokens
    out_ptr, lse_ptr = results
    q_strides, k_strides, v_strides, out_strides = strides
    num_chosen, share, padded_share = sizes
    group_size = rule[0]
    n, number, lanes = _owned_lanes(num_shares, padded_share, FORM)
    shares = (first_share, share, padded_share, q_start)
    head, row, exists = _share_rows(lanes, number, shares, num_queries, FORM.heads)
    dims = tl.arange(0, FORM.block_d)
    visible = groups_seen(tl.maximum(q_start + row, 0), rule, num_groups)  # [lanes]
    visible = tl.where(exists, visible, 0)
    # Choice i is group i or later, as they rise: only the first max(visible) choices can be seen.
    count = tl.minimum(tl.max(visible, 0), num_chosen)
    if count > 0:
        mask = exists[:, None] & (dims < FORM.dim)[None, :]
        wide = row.to(tl.int64)[:, None]
        q_tile = q_ptr + n * q_strides[0] + head[:, None] * q_strides[1] + wide * q_strides[2]
        q = tl.load(q_tile + dims[None, :], mask=mask, other=0.0)  # [lanes, D]
        chosen = chosen_ptr + (n * num_shares + number) * num_chosen
        k_base = k_ptr + n * k_strides[0] + dims[:, None]
        v_base = v_ptr + n * v_strides[0] + dims[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        running_sum = tl.zeros([BLOCK_M], tl.float32)
        running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        end = count * group_size
        for start in tl.range(0, end, FORM.block_n):
            index = start + tl.arange(0, FORM.block_n)
            group, token = _raw_tokens(chosen, index, end, rule)
            k_mask = (group >= 0)[None, :] & (dims < FORM.dim)[:, None]
            k = tl.load(k_base + token[None, :] * k_strides[1], mask=k_mask, other=0.0)
            scores, _ = log2_scores(dot(q, k), scale, 0.0, softcap, FORM.has_softcap)  # no mass
            # mutant fetch: a group of the window comes twice, Triton
            seen = (group >= 0)[None, :] & (group[None, :] < visible[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            weights, fade, running_max, running_sum = softmax_step(
                scores, running_max, running_sum, SOME_SEE_NOTHING=True
            )
            v_mask = (group >= 0)[:, None] & (dims < FORM.dim)[None, :]
            v = tl.load(v_base + token[:, None] * v_strides[1], mask=v_mask, other=0.0)
            acc = acc * fade[:, None] + dot(weights.to(v.dtype), v)

        # Merge two parts (docs/math.md, eq. 8); the one in out and lse always has a key.
        lse_place = lse_ptr + (n * FORM.heads + head) * num_queries + row
        first_lse = tl.load(lse_place, mask=exists, other=0.0) * LOG2E
        top = tl.maximum(first_lse, running_max)
        fade = tl.exp2(running_max - top)
        first = tl.exp2(first_lse - top)
        total = running_sum * fade + first
        place = out_ptr + n * out_strides[0] + head[:, None] * out_strides[1]
        place += wide * out_strides[2] + dims[None, :]
        out = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        # mutant fetch: raw tokens merged without their weight, Triton
        out = (acc * fade[:, None] + out * first[:, None]) / total[:, None]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_place, (top + tl.log2(total)) * LN2, mask=exists)


@triton.jit
def fetch_dq_kernel(
    tokens,
    chosen_ptr,
    upstream,
    results,
    numbers,
    factors,
    strides,
    sizes,
    rule,
    HAS_GRAD_LSE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Add the gradient of queries through the raw tokens of chosen groups, times query_scale, to
    dq, in place; write delta = sum(out * grad out) - grad lse.

    Grid: as that of the forward. Queries begin at position 0.

    Args:
        tokens, chosen_ptr, sizes: As of the forward.
        upstream: Pointers to out and log-sum-exp of the whole softmax, and the gradients of both.
        results: Pointers to dq [N, r, T, D] and delta [N, r, T] in float32.
        factors: Scale, softcap and query_scale: the scale, or 1 where dq is scaled later.
        strides: Of q, k, v and the gradient of out.
    """
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_D: tl.constexpr = FORM.block_d
    num_queries, num_groups, num_shares = integers(numbers)
    scale, softcap, query_scale = factors
    q_ptr, k_ptr, v_ptr = tokens
    out_ptr, lse_ptr, grad_ptr, grad_lse_ptr = upstream
    dq_ptr, delta_ptr = results
    q_strides, k_strides, v_strides, grad_strides = strides
    num_chosen, share, padded_share = sizes
    group_size = rule[0]
    n, number, lanes = _owned_lanes(num_shares, padded_share, FORM)
    shares = (0, share, padded_share, 0)
    head, row, exists = _share_rows(lanes, number, shares, num_queries, FORM.heads)
    dims = tl.arange(0, FORM.block_d)
    mask = exists[:, None] & (dims < FORM.dim)[None, :]
    flat = (n * FORM.heads + head) * num_queries + row
    wide = row.to(tl.int64)[:, None]
    grad_tile = grad_ptr + n * grad_strides[0] + head[:, None] * grad_strides[1]
    grad = tl.load(grad_tile + wide * grad_strides[2] + dims[None, :], mask=mask, other=0.0)
    # Delta, which the kernel of keys and values reads, too.
    out = tl.load(out_ptr + flat[:, None] * FORM.dim + dims[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + flat, mask=exists, other=0.0)
    tl.store(delta_ptr + flat, delta, mask=exists)
    # The chosen groups' tokens; a query drops groups that it does not see.
    visible = tl.where(exists, groups_seen(row, rule, num_groups), 0)
    count = tl.minimum(tl.max(visible, 0), num_chosen)
    if count > 0:
        q_tile = q_ptr + n * q_strides[0] + head[:, None] * q_strides[1] + wide * q_strides[2]
        q = tl.load(q_tile + dims[None, :], mask=mask, other=0.0)
        lse = tl.load(lse_ptr + flat, mask=exists, other=0.0) * LOG2E
        chosen = chosen_ptr + (n * num_shares + number) * num_chosen
        k_base = k_ptr + n * k_strides[0] + dims[None, :]
        v_base = v_ptr + n * v_strides[0] + dims[None, :]
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        end = count * group_size
        for start in tl.range(0, end, FORM.block_n):
            index = start + tl.arange(0, FORM.block_n)
            group, token = _raw_tokens(chosen, index, end, rule)
            key_mask = (group >= 0)[:, None] & (dims < FORM.dim)[None, :]
            k = tl.load(k_base + token[:, None] * k_strides[1], mask=key_mask, other=0.0)
            v = tl.load(v_base + token[:, None] * v_strides[1], mask=key_mask, other=0.0)
            scores, slope = log2_scores(dot(q, tl.trans(k)), scale, 0.0, softcap, FORM.has_softcap)
            seen = (group >= 0)[None, :] & (group[None, :] < visible[:, None])
            weights = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
            grad_scores = weights * (dot(grad, tl.trans(v)) - delta[:, None])
            if FORM.has_softcap:
                grad_scores = grad_scores * slope
            dq += dot(grad_scores.to(k.dtype), k)
        place = dq_ptr + flat[:, None] * FORM.dim + dims[None, :]
        # mutant fetch: the gradient of queries through core tokens is lost, Triton
        total = tl.load(place, mask=mask, other=0.0) + dq * query_scale
        tl.store(place, total, mask=mask)


@triton.jit
def fetch_dkv_kernel(
    tokens, upstream, choices, results, numbers, factors, strides, sizes, rule, FORM: tl.constexpr
):
    """Add the gradients of raw tokens from queries that chose their group to dk and dv, in place.

    Grid: (token blocks of a group x M x N,). A program owns block_m tokens of one group and walks
    the queries of all shares that chose it, block_n lanes at a time; scores are [tokens, lanes].

    Args:
        tokens, sizes: As of the forward; strides: as of `fetch_dq_kernel`.
        upstream: Pointers to log-sum-exp, the gradient of out, and delta.
        choices: Pointers to the places [N, C k] of choices, c k + i for choice i of share c, sorted
            by the group chosen, and to where each group's places begin, [N, M + 1].
        results: Pointers to dk and dv [N, S, D].
    """
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_D: tl.constexpr = FORM.block_d
    num_queries, num_keys, num_groups, num_choices = integers(numbers)
    scale, softcap = factors
    q_ptr, k_ptr, v_ptr = tokens
    lse_ptr, grad_ptr, delta_ptr = upstream
    order_ptr, begin_ptr = choices
    dk_ptr, dv_ptr = results
    q_strides, k_strides, v_strides, grad_strides = strides
    num_chosen, share, padded_share = sizes
    group_size, _, sink_groups = rule
    blocks = (group_size + FORM.block_m - 1) // FORM.block_m
    pid = tl.program_id(0)
    n = (pid // (blocks * num_groups)).to(tl.int64)
    group = pid // blocks % num_groups
    begin = tl.load(begin_ptr + n * (num_groups + 1) + group)
    end = tl.load(begin_ptr + n * (num_groups + 1) + group + 1)
    if begin < end:
        # The tokens stay in registers.
        within = pid % blocks * FORM.block_m + tl.arange(0, FORM.block_m)
        token = ((sink_groups + group) * group_size + within).to(tl.int64)
        dims = tl.arange(0, FORM.block_d)
        key_mask = (within < group_size)[:, None] & (dims < FORM.dim)[None, :]
        k_tile = k_ptr + n * k_strides[0] + token[:, None] * k_strides[1] + dims[None, :]
        v_tile = v_ptr + n * v_strides[0] + token[:, None] * v_strides[1] + dims[None, :]
        k = tl.load(k_tile, mask=key_mask, other=0.0)
        v = tl.load(v_tile, mask=key_mask, other=0.0)
        shares = (0, share, padded_share, 0)
        q_base = q_ptr + n * q_strides[0] + dims[None, :]
        grad_base = grad_ptr + n * grad_strides[0] + dims[None, :]
        order = order_ptr + n * num_choices + begin
        dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        lanes_of_share = FORM.heads * padded_share
        total = (end - begin) * lanes_of_share
        # Every query of a share that chose the group, if it sees the group.
        for start in tl.range(0, total, FORM.block_n):
            lanes = start + tl.arange(0, FORM.block_n)
            inside = lanes < total
            number = tl.load(order + lanes // lanes_of_share, mask=inside, other=0) // num_chosen
            head, row, exists = _share_rows(
                lanes % lanes_of_share, number, shares, num_queries, FORM.heads
            )
            exists = exists & inside
            seen = exists & (groups_seen(tl.maximum(row, 0), rule, num_groups) > group)
            mask = seen[:, None] & (dims < FORM.dim)[None, :]
            wide = row.to(tl.int64)[:, None]
            q_tile = q_base + head[:, None] * q_strides[1] + wide * q_strides[2]
            q = tl.load(q_tile, mask=mask, other=0.0)
            grad_tile = grad_base + head[:, None] * grad_strides[1] + wide * grad_strides[2]
            grad = tl.load(grad_tile, mask=mask, other=0.0)
            flat = (n * FORM.heads + head) * num_queries + row
            lse = tl.load(lse_ptr + flat, mask=seen, other=float("inf")) * LOG2E
            delta = tl.load(delta_ptr + flat, mask=seen, other=0.0)
            scores, slope = log2_scores(dot(k, tl.trans(q)), scale, 0.0, softcap, FORM.has_softcap)
            weights = tl.exp2(scores - lse[None, :])
            dv += dot(weights.to(grad.dtype), grad)
            grad_scores = weights * (dot(v, tl.trans(grad)) - delta[None, :])
            if FORM.has_softcap:
                grad_scores = grad_scores * slope
            dk += dot(grad_scores.to(q.dtype), q)
        place = (n * num_keys + token)[:, None] * FORM.dim + dims[None, :]
        # mutant fetch: the gradient of keys in the window is lost, Triton
        dk = tl.load(dk_ptr + place, mask=key_mask, other=0.0) + dk * scale
        tl.store(dk_ptr + place, dk, mask=key_mask)
        dv += tl.load(dv_ptr + place, mask=key_mask, other=0.0)
        tl.store(dv_ptr + place, dv, mask=key_mask)
