"""Attention over [core tokens; local tokens] in Triton: one online softmax forward, three kernels
backward.

Both kinds of keys obey one rule: the query at t sees keys with low(t) <= index < high(t); core
tokens have low 0 and high j(t), raw tokens low j(t) g and high t + 1 (docs/math.md, eq. 4). So one
inner loop serves both. Tiles that every row sees are not masked, tiles that no row sees are not
visited. The file is long because forward and backward share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.tiles import Tiles, chip_of, dkv_tiles, dq_tiles, forward_tiles

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The interpreter cannot multiply bfloat16 and knows no tensor cores: there, products are of
# float32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a, b):
    """a @ b in float32; true float32 for float32 inputs."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def _tanh(x):
    """tanh by exp2, which every backend has."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _cores_of(position, group_size, window_size):
    """j(t) for positions of any shape; // truncates toward zero, so the difference is clamped
    first."""
    return tl.maximum(position + 1 - window_size, 0) // group_size


@triton.jit
def _load(
    pointers,
    rows,
    num_rows,
    dims,
    MASKED: tl.constexpr,
    ROW_AXIS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A tile whose rows may end and whose columns may be fewer than BLOCK_D; zeros outside."""
    if ROW_AXIS == 0:
        in_rows, in_dims = (rows < num_rows)[:, None], (dims < HEAD_DIM)[None, :]
    else:
        in_rows, in_dims = (rows < num_rows)[None, :], (dims < HEAD_DIM)[:, None]
    if MASKED:
        tile = tl.load(pointers, mask=in_rows & in_dims, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=in_dims, other=0.0)
    return tile


@triton.jit
def _scores(raw, scale, bias, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores in units of log 2, and the derivative of the softcap."""
    slope = 1.0
    if HAS_SOFTCAP:
        capped = _tanh(raw * (scale / softcap))
        scores = (softcap * capped + bias) * LOG2E
        slope = 1 - capped * capped
    else:
        scores = raw * (scale * LOG2E) + bias * LOG2E
    return scores, slope


@triton.jit
def _attend_loop(
    acc,
    total,
    highest,
    q,
    k_ptr,
    v_ptr,
    stride_k,
    stride_v,
    begin,
    end,
    num_keys,
    low,
    high,
    scale,
    bias,
    softcap,
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Online softmax over keys begin .. end-1, in tiles; low and high are rows' bounds, used where
    MASKED."""
    offs_n, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k_tile = k_ptr + begin.to(tl.int64) * stride_k + offs_n[None, :] * stride_k + dims[:, None]
    v_tile = v_ptr + begin.to(tl.int64) * stride_v + offs_n[:, None] * stride_v + dims[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + offs_n
        k = _load(k_tile, keys, num_keys, dims, MASKED, 1, HEAD_DIM, BLOCK_D)
        scores, _ = _scores(_dot(q, k), scale, bias, softcap, HAS_SOFTCAP)
        if MASKED:
            seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        if MASKED:  # a row that has seen nothing yet: exp2(-inf - -inf) would be NaN
            shift = tl.where(new == -float("inf"), 0.0, new)
        else:
            shift = new
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(highest - shift)
        total = total * fade + tl.sum(weights, 1)
        v = _load(v_tile, keys, num_keys, dims, MASKED, 0, HEAD_DIM, BLOCK_D)
        acc = acc * fade[:, None] + _dot(weights.to(v.dtype), v)
        highest = new
        k_tile += BLOCK_N * stride_k
        v_tile += BLOCK_N * stride_v
    return acc, total, highest


@triton.jit
def _bounds(first, last, q_start, group_size, window_size, BLOCK_N: tl.constexpr):
    """Where the loops of one query tile begin and end: whole core tiles, all core tokens; local
    head, middle, end."""
    cores_first = _cores_of(q_start + first, group_size, window_size)
    cores_last = _cores_of(q_start + last, group_size, window_size)
    whole = cores_first // BLOCK_N * BLOCK_N
    local = cores_first * group_size
    seen_by_all = cores_last * group_size
    middle = local + (seen_by_all - local + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    causal = tl.maximum(middle, middle + (q_start + first + 1 - middle) // BLOCK_N * BLOCK_N)
    return whole, cores_last, local, middle, causal, q_start + last + 1


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_cores", "q_start", "k_start"])
def _attend_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    core_k_ptr,
    core_v_ptr,
    bias_ptr,
    out_ptr,
    lse_ptr,
    stride_qn,
    stride_qr,
    stride_qt,
    stride_kn,
    stride_kt,
    stride_vn,
    stride_vt,
    stride_ckn,
    stride_ckr,
    stride_ckm,
    stride_cvn,
    stride_cvr,
    stride_cvm,
    num_queries,
    num_keys,
    num_cores,
    q_start,
    k_start,
    num_heads,
    heads_per_n,
    heads_per_core,
    scale,
    softcap,
    group_size,
    window_size,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (query tiles x N r,). A program owns BLOCK_M queries of one head: it reads them and the
    keys and values they see once, keeps output and sums in float32, and writes output and
    log-sum-exp. Heads that share keys run side by side, and tiles that see most run first."""
    pid = tl.program_id(0)
    tile = tl.num_programs(0) // num_heads - 1 - pid // num_heads
    head = (pid % num_heads).to(tl.int64)
    n, r = head // heads_per_n, head % heads_per_n
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    inside = rows < num_queries
    q_tile = (
        q_ptr
        + n * stride_qn
        + r * stride_qr
        + rows.to(tl.int64)[:, None] * stride_qt
        + dims[None, :]
    )
    q = tl.load(q_tile, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    position = q_start + rows
    cores = _cores_of(position, group_size, window_size)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M, num_queries) - 1
    whole, cores_end, local, middle, causal, end = _bounds(
        tile * BLOCK_M, last, q_start, group_size, window_size, BLOCK_N
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    core = r // heads_per_core
    k_base = core_k_ptr + n * stride_ckn + core * stride_ckr
    v_base = core_v_ptr + n * stride_cvn + core * stride_cvr
    zero = cores * 0
    acc, total, highest = _attend_loop(
        acc,
        total,
        highest,
        q,
        k_base,
        v_base,
        stride_ckm,
        stride_cvm,
        whole * 0,
        whole,
        num_cores,
        zero,
        cores,
        scale,
        bias,
        softcap,
        False,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    acc, total, highest = _attend_loop(
        acc,
        total,
        highest,
        q,
        k_base,
        v_base,
        stride_ckm,
        stride_cvm,
        whole,
        cores_end,
        num_cores,
        zero,
        cores,
        scale,
        bias,
        softcap,
        True,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    k_base = k_ptr + n * stride_kn - k_start.to(tl.int64) * stride_kt
    v_base = v_ptr + n * stride_vn - k_start.to(tl.int64) * stride_vt
    low, high = cores * group_size, position + 1
    limit = k_start + num_keys
    acc, total, highest = _attend_loop(
        acc,
        total,
        highest,
        q,
        k_base,
        v_base,
        stride_kt,
        stride_vt,
        local,
        tl.minimum(middle, end),
        limit,
        low,
        high,
        scale,
        0.0,
        softcap,
        True,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    acc, total, highest = _attend_loop(
        acc,
        total,
        highest,
        q,
        k_base,
        v_base,
        stride_kt,
        stride_vt,
        middle,
        causal,
        limit,
        low,
        high,
        scale,
        0.0,
        softcap,
        False,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    acc, total, highest = _attend_loop(
        acc,
        total,
        highest,
        q,
        k_base,
        v_base,
        stride_kt,
        stride_vt,
        causal,
        end,
        limit,
        low,
        high,
        scale,
        0.0,
        softcap,
        True,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    out = acc / total[:, None]
    out_tile = out_ptr + (head * num_queries + rows)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(
        out_tile,
        out.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (dims < HEAD_DIM)[None, :],
    )
    tl.store(lse_ptr + head * num_queries + rows, (highest + tl.log2(total)) * LN2, mask=inside)


@triton.jit
def _dq_loop(
    dq,
    dbias,
    q,
    grad,
    lse,
    delta,
    k_ptr,
    v_ptr,
    stride_k,
    stride_v,
    begin,
    end,
    num_keys,
    low,
    high,
    scale,
    bias,
    softcap,
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradient of one query tile through keys begin .. end-1; dbias sums the scores' gradients."""
    offs_n, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k_tile = k_ptr + begin.to(tl.int64) * stride_k + offs_n[:, None] * stride_k + dims[None, :]
    v_tile = v_ptr + begin.to(tl.int64) * stride_v + offs_n[:, None] * stride_v + dims[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + offs_n
        k = _load(k_tile, keys, num_keys, dims, MASKED, 0, HEAD_DIM, BLOCK_D)
        v = _load(v_tile, keys, num_keys, dims, MASKED, 0, HEAD_DIM, BLOCK_D)
        scores, slope = _scores(_dot(q, tl.trans(k)), scale, bias, softcap, HAS_SOFTCAP)
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        grad_scores = weights * (_dot(grad, tl.trans(v)) - delta[:, None])
        dbias += tl.sum(grad_scores, 1)
        if HAS_SOFTCAP:
            grad_scores = grad_scores * slope
        dq += _dot(grad_scores.to(k.dtype), k)
        k_tile += BLOCK_N * stride_k
        v_tile += BLOCK_N * stride_v
    return dq, dbias


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_cores"])
def _attend_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    core_k_ptr,
    core_v_ptr,
    bias_ptr,
    out_ptr,
    lse_ptr,
    grad_ptr,
    grad_lse_ptr,
    dq_ptr,
    delta_ptr,
    dbias_ptr,
    stride_qn,
    stride_qr,
    stride_qt,
    stride_kn,
    stride_kt,
    stride_vn,
    stride_vt,
    stride_ckn,
    stride_ckr,
    stride_ckm,
    stride_cvn,
    stride_cvr,
    stride_cvm,
    stride_gn,
    stride_gr,
    stride_gt,
    num_queries,
    num_keys,
    num_cores,
    num_heads,
    heads_per_n,
    heads_per_core,
    scale,
    softcap,
    group_size,
    window_size,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (query tiles x N r,). A program owns BLOCK_M queries of one head and walks the keys as
    the forward does; it writes their gradient, sum(grad out) - grad lse for the other kernels, and
    its part of the bias's gradient."""
    pid = tl.program_id(0)
    tile = tl.num_programs(0) // num_heads - 1 - pid // num_heads
    head = (pid % num_heads).to(tl.int64)
    n, r = head // heads_per_n, head % heads_per_n
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    inside = rows < num_queries
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    wide = rows.to(tl.int64)
    q = tl.load(
        q_ptr + n * stride_qn + r * stride_qr + wide[:, None] * stride_qt + dims[None, :],
        mask=mask,
        other=0.0,
    )
    grad = tl.load(
        grad_ptr + n * stride_gn + r * stride_gr + wide[:, None] * stride_gt + dims[None, :],
        mask=mask,
        other=0.0,
    )
    flat = head * num_queries + rows
    out = tl.load(out_ptr + flat[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    lse = tl.load(lse_ptr + flat, mask=inside, other=0.0) * LOG2E
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + flat, mask=inside, other=0.0)
    tl.store(delta_ptr + flat, delta, mask=inside)
    cores = _cores_of(rows, group_size, window_size)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M, num_queries) - 1
    whole, cores_end, local, middle, causal, end = _bounds(
        tile * BLOCK_M, last, 0, group_size, window_size, BLOCK_N
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_M], tl.float32)
    core = r // heads_per_core
    k_base = core_k_ptr + n * stride_ckn + core * stride_ckr
    v_base = core_v_ptr + n * stride_cvn + core * stride_cvr
    zero = cores * 0
    dq, dbias = _dq_loop(
        dq,
        dbias,
        q,
        grad,
        lse,
        delta,
        k_base,
        v_base,
        stride_ckm,
        stride_cvm,
        whole * 0,
        whole,
        num_cores,
        zero,
        cores,
        scale,
        bias,
        softcap,
        False,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    dq, dbias = _dq_loop(
        dq,
        dbias,
        q,
        grad,
        lse,
        delta,
        k_base,
        v_base,
        stride_ckm,
        stride_cvm,
        whole,
        cores_end,
        num_cores,
        zero,
        cores,
        scale,
        bias,
        softcap,
        True,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    if HAS_BIAS:
        tl.store(dbias_ptr + flat, dbias, mask=inside)
    k_base, v_base = k_ptr + n * stride_kn, v_ptr + n * stride_vn
    low, high = cores * group_size, rows + 1
    dq, dbias = _dq_loop(
        dq,
        dbias,
        q,
        grad,
        lse,
        delta,
        k_base,
        v_base,
        stride_kt,
        stride_vt,
        local,
        tl.minimum(middle, end),
        num_keys,
        low,
        high,
        scale,
        0.0,
        softcap,
        True,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    dq, dbias = _dq_loop(
        dq,
        dbias,
        q,
        grad,
        lse,
        delta,
        k_base,
        v_base,
        stride_kt,
        stride_vt,
        middle,
        causal,
        num_keys,
        low,
        high,
        scale,
        0.0,
        softcap,
        False,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    dq, dbias = _dq_loop(
        dq,
        dbias,
        q,
        grad,
        lse,
        delta,
        k_base,
        v_base,
        stride_kt,
        stride_vt,
        causal,
        end,
        num_keys,
        low,
        high,
        scale,
        0.0,
        softcap,
        True,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
    )
    tl.store(
        dq_ptr + flat[:, None] * HEAD_DIM + dims[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _dkv_loop(
    dk,
    dv,
    k,
    v,
    keys,
    q_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    stride_q,
    stride_g,
    begin,
    end,
    num_queries,
    scale,
    bias,
    softcap,
    group_size,
    window_size,
    CORE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients of one key tile from queries begin .. end-1; scores are held transposed, [keys,
    queries]."""
    offs, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q_tile = q_ptr + begin.to(tl.int64) * stride_q + offs[:, None] * stride_q + dims[None, :]
    g_tile = grad_ptr + begin.to(tl.int64) * stride_g + offs[:, None] * stride_g + dims[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        rows = start + offs
        q = _load(q_tile, rows, num_queries, dims, MASKED, 0, HEAD_DIM, BLOCK_D)
        grad = _load(g_tile, rows, num_queries, dims, MASKED, 0, HEAD_DIM, BLOCK_D)
        if MASKED:
            lse = tl.load(lse_ptr + rows, mask=rows < num_queries, other=0.0) * LOG2E
            delta = tl.load(delta_ptr + rows, mask=rows < num_queries, other=0.0)
        else:
            lse, delta = tl.load(lse_ptr + rows) * LOG2E, tl.load(delta_ptr + rows)
        scores, slope = _scores(_dot(k, tl.trans(q)), scale, bias, softcap, HAS_SOFTCAP)
        weights = tl.exp2(scores - lse[None, :])
        if MASKED:
            cores = _cores_of(rows, group_size, window_size)
            if CORE:
                seen = keys[:, None] < cores[None, :]
            else:
                seen = (keys[:, None] >= (cores * group_size)[None, :]) & (
                    keys[:, None] <= rows[None, :]
                )
            weights = tl.where(seen & (rows < num_queries)[None, :], weights, 0.0)
        dv += _dot(weights.to(grad.dtype), grad)
        grad_scores = weights * (_dot(v, tl.trans(grad)) - delta[None, :])
        if HAS_SOFTCAP:
            grad_scores = grad_scores * slope
        dk += _dot(grad_scores.to(q.dtype), q)
        q_tile += BLOCK_N * stride_q
        g_tile += BLOCK_N * stride_g
    return dk, dv


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _attend_dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    lse_ptr,
    grad_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    stride_qn,
    stride_qr,
    stride_qt,
    stride_kn,
    stride_kh,
    stride_kt,
    stride_vn,
    stride_vh,
    stride_vt,
    stride_gn,
    stride_gr,
    stride_gt,
    num_queries,
    num_keys,
    num_key_heads,
    heads_per_n,
    heads_per_key,
    scale,
    softcap,
    group_size,
    window_size,
    CORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (key tiles x key heads,). A program owns BLOCK_M keys of one head, core tokens or raw
    ones: it walks all queries of all heads that see one of them, sums in float32 and writes once,
    so the result does not depend on the order of programs."""
    pid = tl.program_id(0)
    tile = pid // num_key_heads  # early keys are seen by most queries and run first
    key_head = (pid % num_key_heads).to(tl.int64)
    keys_per_n = heads_per_n // heads_per_key
    n, h = key_head // keys_per_n, key_head % keys_per_n
    keys = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = (keys < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
    wide = keys.to(tl.int64)
    k = tl.load(
        k_ptr + n * stride_kn + h * stride_kh + wide[:, None] * stride_kt + dims[None, :],
        mask=mask,
        other=0.0,
    )
    v = tl.load(
        v_ptr + n * stride_vn + h * stride_vh + wide[:, None] * stride_vt + dims[None, :],
        mask=mask,
        other=0.0,
    )
    first, last = tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, num_keys) - 1
    # Queries begin .. end-1 see some of these keys, low .. high-1 all of them.
    if CORE:
        begin, end = (first + 1) * group_size + window_size - 1, num_queries
        low, high = (last + 1) * group_size + window_size - 1, num_queries
    else:
        begin, end = (
            first,
            tl.minimum((last // group_size + 1) * group_size + window_size - 1, num_queries),
        )
        low, high = (
            last,
            tl.minimum((first // group_size + 1) * group_size + window_size - 1, num_queries),
        )
    begin = tl.minimum(begin, end)
    low = begin + (tl.maximum(low - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    high = low + tl.maximum(high - low, 0) // BLOCK_N * BLOCK_N
    dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(heads_per_key):
        r = h * heads_per_key + i
        head = n * heads_per_n + r
        q_base = q_ptr + n * stride_qn + r * stride_qr
        g_base = grad_ptr + n * stride_gn + r * stride_gr
        lse_base, delta_base = lse_ptr + head * num_queries, delta_ptr + head * num_queries
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + head).to(tl.float32)
        dk, dv = _dkv_loop(
            dk,
            dv,
            k,
            v,
            keys,
            q_base,
            g_base,
            lse_base,
            delta_base,
            stride_qt,
            stride_gt,
            begin,
            tl.minimum(low, end),
            num_queries,
            scale,
            bias,
            softcap,
            group_size,
            window_size,
            CORE,
            True,
            HAS_SOFTCAP,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
        )
        dk, dv = _dkv_loop(
            dk,
            dv,
            k,
            v,
            keys,
            q_base,
            g_base,
            lse_base,
            delta_base,
            stride_qt,
            stride_gt,
            low,
            high,
            num_queries,
            scale,
            bias,
            softcap,
            group_size,
            window_size,
            CORE,
            False,
            HAS_SOFTCAP,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
        )
        dk, dv = _dkv_loop(
            dk,
            dv,
            k,
            v,
            keys,
            q_base,
            g_base,
            lse_base,
            delta_base,
            stride_qt,
            stride_gt,
            high,
            end,
            num_queries,
            scale,
            bias,
            softcap,
            group_size,
            window_size,
            CORE,
            True,
            HAS_SOFTCAP,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
        )
    flat = (key_head * num_keys + keys)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(dk_ptr + flat, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + flat, dv.to(dv_ptr.dtype.element_ty), mask=mask)


def _last_contiguous(x: Tensor) -> Tensor:
    """Kernels read rows of neighbouring elements; anything else is copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _sizes(tiles: Tiles, dim: int, softcap: float | None) -> dict[str, int | bool]:
    """What every kernel is compiled for."""
    return {
        "HAS_SOFTCAP": softcap is not None,
        "HEAD_DIM": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _bias_of(core_bias: Tensor | None, q: Tensor) -> Tensor:
    """The bias as a flat float32 tensor [N r], or anything where there is none."""
    return q if core_bias is None else core_bias.float().contiguous()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_k: Tensor,
    core_v: Tensor,
    *,
    q_start: int = 0,
    k_start: int = 0,
    group_size: int,
    window_size: int,
    scale: float,
    softcap: float | None = None,
    core_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `packed.attend`: out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in float32."""
    q, k, v, core_k, core_v = map(_last_contiguous, (q, k, v, core_k, core_v))
    n, r, num_queries, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    tiles = forward_tiles(chip_of(q.device), q.dtype, dim)
    _attend_fwd_kernel[(triton.cdiv(num_queries, tiles.block_m) * n * r,)](
        q,
        k,
        v,
        core_k,
        core_v,
        _bias_of(core_bias, q),
        out,
        lse,
        *q.stride()[:3],
        *k.stride()[:2],
        *v.stride()[:2],
        *core_k.stride()[:3],
        *core_v.stride()[:3],
        num_queries,
        k.shape[1],
        core_k.shape[2],
        q_start,
        k_start,
        n * r,
        r,
        r // core_k.shape[1],
        scale,
        softcap or 1.0,
        group_size,
        window_size,
        HAS_BIAS=core_bias is not None,
        **_sizes(tiles, dim, softcap),
    )
    return out, lse


def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_k: Tensor,
    core_v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    group_size: int,
    window_size: int,
    scale: float,
    softcap: float | None = None,
    core_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """As `packed.attend_backward`: gradients in float32, the same from run to run."""
    q, k, v, core_k, core_v, grad_out = map(_last_contiguous, (q, k, v, core_k, core_v, grad_out))
    out, lse = out.contiguous(), lse.contiguous()
    n, r, num_queries, dim = q.shape
    num_keys, num_cores, core_heads = k.shape[1], core_k.shape[2], core_k.shape[1]
    dq, dk, dv, dcore_k, dcore_v = (
        torch.empty(x.shape, dtype=torch.float32, device=q.device)
        for x in (q, k, v, core_k, core_v)
    )
    delta = torch.empty_like(lse)
    dbias = torch.empty_like(lse) if core_bias is not None else delta
    chip, bias = chip_of(q.device), _bias_of(core_bias, q)
    tiles = dq_tiles(chip, q.dtype, dim)
    _attend_dq_kernel[(triton.cdiv(num_queries, tiles.block_m) * n * r,)](
        q,
        k,
        v,
        core_k,
        core_v,
        bias,
        out,
        lse,
        grad_out,
        lse if grad_lse is None else grad_lse.contiguous(),
        dq,
        delta,
        dbias,
        *q.stride()[:3],
        *k.stride()[:2],
        *v.stride()[:2],
        *core_k.stride()[:3],
        *core_v.stride()[:3],
        *grad_out.stride()[:3],
        num_queries,
        num_keys,
        num_cores,
        n * r,
        r,
        r // core_heads,
        scale,
        softcap or 1.0,
        group_size,
        window_size,
        HAS_BIAS=core_bias is not None,
        HAS_GRAD_LSE=grad_lse is not None,
        **_sizes(tiles, dim, softcap),
    )
    tiles = dkv_tiles(chip, q.dtype, dim)
    for key, value, dkey, dvalue, is_core in (
        (k[:, None], v[:, None], dk, dv, False),
        (core_k, core_v, dcore_k, dcore_v, True),
    ):
        heads, count = key.shape[1], key.shape[2]
        if count:
            _attend_dkv_kernel[(triton.cdiv(count, tiles.block_m) * n * heads,)](
                q,
                key,
                value,
                bias,
                lse,
                grad_out,
                delta,
                dkey,
                dvalue,
                *q.stride()[:3],
                *key.stride()[:3],
                *value.stride()[:3],
                *grad_out.stride()[:3],
                num_queries,
                count,
                n * heads,
                r,
                r // heads,
                scale,
                softcap or 1.0,
                group_size,
                window_size,
                CORE=is_core,
                HAS_BIAS=is_core and core_bias is not None,
                **_sizes(tiles, dim, softcap),
            )
    return dq, dk, dv, dcore_k, dcore_v, None if core_bias is None else dbias.sum(-1)
