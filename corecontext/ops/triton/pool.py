"""Pooling of groups into core tokens and its backward as Triton kernels: K and V are read once,
nothing is kept.

The equations are those of `ops/reference.py`, the arguments and results those of `ops/pooling.py`;
all is float32 in registers. The file is longer than usual because there are three pairs of kernels:
the first holds whole groups in registers and is bound by memory, the second does so faster for the
usual rotation, with keys as two halves, the third walks a group that is too large for that in
blocks of tokens. What they need (tiles, tables, scores) is written once above them.

The turn to the middle position costs no second read of K: with c and s the cosines and sines of a
row of the table, sum_o phi_o R_o k_o = sum_o phi_o c_o k_o + swap(sum_o phi_o s_o k_o), where swap
exchanges the two elements of a pair with a sign. So elements are exchanged in the one pooled row,
and in the backward in the one row dK (docs/math.md, eq. 3 and 10). Only max pooling, whose turn is
inside the maximum, loads the other element of each pair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from corecontext.ops.rotary import Rotary
from corecontext.ops.triton.launch import ceil_div, launch, power_of_2
from corecontext.ops.triton.tiles import pool_tiles

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def unsupported_reason(q_last: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these kernels cannot take the call, or None."""
    for name, x in (("q", q_last), ("k", k), ("v", v)):
        if x.dtype not in _DTYPES:
            return f"dtype of {name} {x.dtype} is not in (float32, float16, bfloat16)"
    return None


@triton.jit
def _pairs(BLOCK_D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each column: its number, its column in the tables, its partner in the rotation, the
    partner's sign."""
    cols = tl.arange(0, BLOCK_D)
    if INTERLEAVED:
        first = cols % 2 == 0
        pair = cols // 2
        partner = tl.where(first, cols + 1, cols - 1)
    else:
        first = cols < HALF
        pair = tl.where(first, cols, cols - HALF)
        partner = tl.where(first, cols + HALF, cols - HALF)
    turned = cols < 2 * HALF
    return (
        cols,
        pair,
        tl.where(turned, partner, cols),
        tl.where(turned, tl.where(first, -1.0, 1.0), 0.0),
    )


@triton.jit
def _load_rows(
    ptr, stride_m, stride_g, groups, rows, cols, num_groups, group_size, HEAD_DIM: tl.constexpr
):
    """Tokens of some groups, [groups, rows, columns] in float32, 0 outside."""
    mask = (
        (groups < num_groups)[:, None, None]
        & (rows < group_size)[None, :, None]
        & (cols < HEAD_DIM)[None, None, :]
    )
    at = (groups * stride_m)[:, None, None] + (rows * stride_g)[None, :, None] + cols[None, None, :]
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(
    ptr,
    x,
    stride_m,
    stride_g,
    groups,
    rows,
    cols,
    num_groups,
    group_size,
    HEAD_DIM: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write what `_load_rows` reads, or add to it."""
    mask = (
        (groups < num_groups)[:, None, None]
        & (rows < group_size)[None, :, None]
        & (cols < HEAD_DIM)[None, None, :]
    )
    at = (groups * stride_m)[:, None, None] + (rows * stride_g)[None, :, None] + cols[None, None, :]
    if ADD:
        x += tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_one(ptr, stride_m, groups, cols, num_groups, HEAD_DIM: tl.constexpr):
    """One row for each of some groups, [groups, columns] in float32, 0 outside."""
    mask = (groups < num_groups)[:, None] & (cols < HEAD_DIM)[None, :]
    return tl.load(ptr + (groups * stride_m)[:, None] + cols[None, :], mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def _store_one(ptr, x, stride_m, groups, cols, num_groups, HEAD_DIM: tl.constexpr):
    """Write what `_load_one` reads."""
    mask = (groups < num_groups)[:, None] & (cols < HEAD_DIM)[None, :]
    tl.store(
        ptr + (groups * stride_m)[:, None] + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF: tl.constexpr):
    """Cosines and sines of each row's turn to the middle, [1, rows, columns or 1]; 1 and 0 where
    nothing turns."""
    if HALF > 0:
        mask = (rows < group_size)[:, None] & (cols < 2 * HALF)[None, :]
        at = (rows * HALF)[:, None] + pair[None, :]
        cos = tl.load(cos_ptr + at, mask=mask, other=1.0)[None, :, :]
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)[None, :, :]
    else:
        cos = (rows * 0).to(tl.float32)[None, :, None] + 1.0
        sin = cos - 1.0
    return cos, sin


@triton.jit
def _turned(
    k_ptr,
    k,
    cos,
    sin,
    stride_m,
    stride_g,
    groups,
    rows,
    partner,
    sign,
    num_groups,
    group_size,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Keys turned to the middle; k_ptr for the other element of each pair."""
    if HALF > 0:
        other = _load_rows(
            k_ptr, stride_m, stride_g, groups, rows, partner, num_groups, group_size, HEAD_DIM
        )
        # An explicit fma: the same bits wherever this is computed, so that a maximum finds itself
        # again.
        turned = tl.fma(k, cos, other * (sin * sign[None, None, :]))
    else:
        turned = k
        other = k
    return turned, other


@triton.jit
def _partners(x, partner, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """x [BLOCK_M, BLOCK_D] with the elements of each pair exchanged."""
    return tl.gather(x, tl.broadcast_to(partner[None, :], [BLOCK_M, BLOCK_D]), 1)


@triton.jit
def _swapped(x, partner, sign, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr):
    """x [BLOCK_M, BLOCK_D] with the elements of each pair exchanged, then the first of them
    negated."""
    if HALF > 0:
        swapped = _partners(x, partner, BLOCK_M, BLOCK_D) * sign[None, :]
    else:
        swapped = x
    return swapped


@triton.jit
def _pooled_key(
    weights,
    k,
    cos,
    sin,
    partner,
    sign,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
):
    """Weighted sum of the turned keys, [groups, columns]."""
    part = weights[:, :, None] * k
    if HALF > 0:
        pooled = tl.sum(part * cos, 1) + _swapped(
            tl.sum(part * sin, 1), partner, sign, BLOCK_M, BLOCK_D, HALF
        )
    else:
        pooled = tl.sum(part, 1)
    return pooled


@triton.jit
def _turned_back(x, x_swapped, cos, sin, HALF: tl.constexpr):
    """Rows x [groups, columns] turned back from the middle to each token, [groups, rows,
    columns]."""
    if HALF > 0:
        back = x[:, None, :] * cos - x_swapped[:, None, :] * sin
    else:
        back = x[:, None, :] + cos * 0.0
    return back


@triton.jit
def _scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores of the tokens under their group's query, [groups, rows], -inf outside; the slope of
    the softcap."""
    z = tl.sum(q[:, None, :] * k, 2) * scale
    slope = tl.full(z.shape, 1.0, tl.float32)
    if HAS_SOFTCAP:
        x = z / softcap
        # Near 0 the quotient would lose the digits that 1 - exp cancels: there the series, exact to
        # 1e-8.
        e = tl.exp(-2.0 * tl.abs(x))
        far = (1.0 - e) / (1.0 + e)
        y = x * x
        near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
        t = tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))
        z = softcap * t
        slope = 1.0 - t * t
    return tl.where((rows < group_size)[None, :], z, -float("inf")), slope


@triton.jit
def _top(x, rows, group_size):
    """Largest of each element over the rows, [groups, columns]; NaN if there is one, as in
    torch."""
    top = tl.max(tl.where((rows < group_size)[None, :, None], x, -float("inf")), 1)
    return tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), top)


@triton.jit
def _num_top(x, top, rows, group_size):
    """How many rows reach the top, [groups, columns]."""
    return tl.sum(((x == top[:, None, :]) & (rows < group_size)[None, :, None]).to(tl.float32), 1)


@triton.jit
def _max_grad(share, x, top):
    """Gradient of a maximum over rows: the share where a row reaches it, else 0; NaN for a NaN
    maximum, as in torch."""
    return tl.where(x == top[:, None, :], share[:, None, :], 0.0 * share[:, None, :])


@triton.jit
def _max_grad_key(
    share,
    top,
    turned,
    k,
    other,
    cos,
    sin,
    partner,
    sign,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
):
    """Gradient of keys under the maximum of turned keys: `_max_grad` of both elements of a pair,
    turned back."""
    grad = _max_grad(share, turned, top)
    if HALF > 0:
        # The other element of each pair, turned as `_turned` does it there: its sign is the
        # opposite.
        other_turned = tl.fma(other, cos, k * (sin * -sign[None, None, :]))
        other_top = _partners(top, partner, BLOCK_M, BLOCK_D)
        other_share = _swapped(share, partner, sign, BLOCK_M, BLOCK_D, HALF)
        grad = grad * cos - _max_grad(other_share, other_turned, other_top) * sin
    return grad


@triton.jit
def _grad_head_sum(
    ptr,
    stride_h,
    stride_m,
    groups,
    cols,
    num_groups,
    HEADS_OUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Gradient of the core tokens summed over the heads that share them."""
    total = _load_one(ptr, stride_m, groups, cols, num_groups, HEAD_DIM)
    for h in range(1, HEADS_OUT):
        total += _load_one(ptr + h * stride_h, stride_m, groups, cols, num_groups, HEAD_DIM)
    return total


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def _pool_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    core_k_ptr,
    core_v_ptr,
    cos_ptr,
    sin_ptr,
    q_n,
    q_h,
    q_m,
    k_n,
    k_m,
    k_g,
    v_n,
    v_m,
    v_g,
    core_n,
    core_h,
    core_m,
    num_groups,
    group_size,
    scale,
    softcap,
    HEADS: tl.constexpr,
    HEADS_OUT: tl.constexpr,
    POOLING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Pool whole groups.

    Grid: N * ceil(M / BLOCK_M). A program owns BLOCK_M groups of one n, all their tokens (BLOCK_G
    >= group_size) and all their heads. Reads their K and V once, r rows of q and the tables [g, R /
    2]; writes HEADS_OUT rows of each core tensor per group. Keys, values, weights and sums are
    float32 in registers.
    """
    tiles = tl.cdiv(num_groups, BLOCK_M)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    groups = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    cols, pair, partner, sign = _pairs(BLOCK_D, HALF, INTERLEAVED)
    k_ptr += n * k_n
    core_k_ptr += n * core_n
    core_v_ptr += n * core_n
    k = _load_rows(k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
    v = _load_rows(v_ptr + n * v_n, v_m, v_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
    cos, sin = _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)

    if POOLING == "max":
        k, _ = _turned(
            k_ptr,
            k,
            cos,
            sin,
            k_m,
            k_g,
            groups,
            rows,
            partner,
            sign,
            num_groups,
            group_size,
            HEAD_DIM,
            HALF,
        )
        core_k = _top(k, rows, group_size)
        core_v = _top(v, rows, group_size)
    else:
        weights = tl.where((rows < group_size)[None, :], 1.0 / group_size, 0.0) + tl.zeros(
            [BLOCK_M, 1], tl.float32
        )
        if POOLING == "cca":
            if HEADS_OUT == 1:
                weights = weights * 0.0
            for h in range(HEADS):
                q = _load_one(q_ptr + n * q_n + h * q_h, q_m, groups, cols, num_groups, HEAD_DIM)
                z, _ = _scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
                probs = tl.exp(z - tl.max(z, 1)[:, None])
                probs = probs / tl.sum(probs, 1)[:, None]
                if HEADS_OUT == 1:
                    weights += probs / HEADS
                else:
                    core_v = tl.sum(probs[:, :, None] * v, 1)
                    core_k = _pooled_key(probs, k, cos, sin, partner, sign, BLOCK_M, BLOCK_D, HALF)
                    _store_one(
                        core_k_ptr + h * core_h, core_k, core_m, groups, cols, num_groups, HEAD_DIM
                    )
                    _store_one(
                        core_v_ptr + h * core_h, core_v, core_m, groups, cols, num_groups, HEAD_DIM
                    )
        if POOLING == "mean" or HEADS_OUT == 1:
            core_v = tl.sum(weights[:, :, None] * v, 1)
            core_k = _pooled_key(weights, k, cos, sin, partner, sign, BLOCK_M, BLOCK_D, HALF)
    if POOLING != "cca" or HEADS_OUT == 1:
        for h in range(HEADS_OUT):
            _store_one(core_k_ptr + h * core_h, core_k, core_m, groups, cols, num_groups, HEAD_DIM)
            _store_one(core_v_ptr + h * core_h, core_v, core_m, groups, cols, num_groups, HEAD_DIM)


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def _pool_bwd_kernel(
    grad_core_k_ptr,
    grad_core_v_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    dck_n,
    dck_h,
    dck_m,
    dcv_n,
    dcv_h,
    dcv_m,
    q_n,
    q_h,
    q_m,
    k_n,
    k_m,
    k_g,
    v_n,
    v_m,
    v_g,
    dq_n,
    dq_h,
    dq_m,
    dk_n,
    dk_m,
    dk_g,
    dv_n,
    dv_m,
    dv_g,
    num_groups,
    group_size,
    scale,
    softcap,
    HEADS: tl.constexpr,
    HEADS_OUT: tl.constexpr,
    POOLING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradients of pooling for whole groups.

    Grid: N * ceil(M / BLOCK_M). A program owns BLOCK_M groups of one n, all their tokens and heads:
    no two programs write the same row. Reads K and V once (the mean reads neither), the gradients
    of the core tokens, q and the tables; recomputes the weights; writes the gradients of all its
    tokens and of q. All sums are float32 in registers.
    """
    tiles = tl.cdiv(num_groups, BLOCK_M)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    groups = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    cols, pair, partner, sign = _pairs(BLOCK_D, HALF, INTERLEAVED)
    grad_core_k_ptr += n * dck_n
    grad_core_v_ptr += n * dcv_n
    k_ptr += n * k_n
    v_ptr += n * v_n
    cos, sin = _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)

    if POOLING == "cca":
        k = _load_rows(k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
        v = _load_rows(v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
        grad_k = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_D], tl.float32)
        if HEADS_OUT == 1:
            into_k = _load_one(grad_core_k_ptr, dck_m, groups, cols, num_groups, HEAD_DIM)
            into_v = _load_one(grad_core_v_ptr, dcv_m, groups, cols, num_groups, HEAD_DIM)
            back = _turned_back(
                into_k, _swapped(into_k, partner, sign, BLOCK_M, BLOCK_D, HALF), cos, sin, HALF
            )
            # The weights are the mean over the heads.
            grad_probs = tl.sum(back * k + into_v[:, None, :] * v, 2) / HEADS
            weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
        else:
            grad_v = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_D], tl.float32)
        for h in range(HEADS):
            if HEADS_OUT > 1:
                into_k = _load_one(
                    grad_core_k_ptr + h * dck_h, dck_m, groups, cols, num_groups, HEAD_DIM
                )
                into_v = _load_one(
                    grad_core_v_ptr + h * dcv_h, dcv_m, groups, cols, num_groups, HEAD_DIM
                )
                back = _turned_back(
                    into_k, _swapped(into_k, partner, sign, BLOCK_M, BLOCK_D, HALF), cos, sin, HALF
                )
                grad_probs = tl.sum(back * k + into_v[:, None, :] * v, 2)
            q = _load_one(q_ptr + n * q_n + h * q_h, q_m, groups, cols, num_groups, HEAD_DIM)
            z, slope = _scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
            probs = tl.exp(z - tl.max(z, 1)[:, None])
            probs = probs / tl.sum(probs, 1)[:, None]
            grad_z = probs * (grad_probs - tl.sum(probs * grad_probs, 1)[:, None]) * scale * slope
            grad_q = tl.sum(grad_z[:, :, None] * k, 1)
            _store_one(
                grad_q_ptr + n * dq_n + h * dq_h, grad_q, dq_m, groups, cols, num_groups, HEAD_DIM
            )
            grad_k += grad_z[:, :, None] * q[:, None, :]
            if HEADS_OUT > 1:
                grad_k += probs[:, :, None] * back
                grad_v += probs[:, :, None] * into_v[:, None, :]
            else:
                weights += probs / HEADS
        if HEADS_OUT == 1:
            grad_k += weights[:, :, None] * back
            grad_v = weights[:, :, None] * into_v[:, None, :]
    else:
        into_k = _grad_head_sum(
            grad_core_k_ptr, dck_h, dck_m, groups, cols, num_groups, HEADS_OUT, HEAD_DIM
        )
        into_v = _grad_head_sum(
            grad_core_v_ptr, dcv_h, dcv_m, groups, cols, num_groups, HEADS_OUT, HEAD_DIM
        )
        if POOLING == "mean":
            other_into_k = _swapped(into_k, partner, sign, BLOCK_M, BLOCK_D, HALF)
            grad_k = _turned_back(into_k, other_into_k, cos, sin, HALF) / group_size
            grad_v = into_v[:, None, :] / group_size + tl.zeros([1, BLOCK_G, 1], tl.float32)
        else:
            k = _load_rows(k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
            v = _load_rows(v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
            turned, other = _turned(
                k_ptr,
                k,
                cos,
                sin,
                k_m,
                k_g,
                groups,
                rows,
                partner,
                sign,
                num_groups,
                group_size,
                HEAD_DIM,
                HALF,
            )
            top = _top(turned, rows, group_size)
            share = into_k / _num_top(turned, top, rows, group_size)
            grad_k = _max_grad_key(
                share, top, turned, k, other, cos, sin, partner, sign, BLOCK_M, BLOCK_D, HALF
            )
            top = _top(v, rows, group_size)
            grad_v = _max_grad(into_v / _num_top(v, top, rows, group_size), v, top)
    _store_rows(
        grad_k_ptr + n * dk_n,
        grad_k,
        dk_m,
        dk_g,
        groups,
        rows,
        cols,
        num_groups,
        group_size,
        HEAD_DIM,
        ADD,
    )
    _store_rows(
        grad_v_ptr + n * dv_n,
        grad_v,
        dv_m,
        dv_g,
        groups,
        rows,
        cols,
        num_groups,
        group_size,
        HEAD_DIM,
        ADD,
    )


@triton.jit
def _load_half_tables(cos_ptr, sin_ptr, rows, cols, group_size, HALF: tl.constexpr):
    """Cosines and sines for one half of the columns, [1, rows, HALF]."""
    at, mask = (
        (rows * HALF)[:, None] + cols[None, :],
        (rows < group_size)[:, None] & (cols < HALF)[None, :],
    )
    return tl.load(cos_ptr + at, mask=mask, other=1.0)[None], tl.load(
        sin_ptr + at, mask=mask, other=0.0
    )[None]


@triton.jit
def _probs(z):
    """Softmax over rows of [groups, rows]."""
    probs = tl.exp(z - tl.max(z, 1)[:, None])
    return probs / tl.sum(probs, 1)[:, None]


@triton.jit
def _half_scores(q_a, q_b, k_a, k_b, rows, group_size, scale):
    """Scores of the tokens under their group's query, [groups, rows], -inf outside."""
    z = (tl.sum(q_a[:, None, :] * k_a, 2) + tl.sum(q_b[:, None, :] * k_b, 2)) * scale
    return tl.where((rows < group_size)[None, :], z, -float("inf"))


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def _pool_half_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    core_k_ptr,
    core_v_ptr,
    cos_ptr,
    sin_ptr,
    num_groups,
    group_size,
    scale,
    q_n,
    q_h,
    q_m,
    k_n,
    k_m,
    k_g,
    v_n,
    v_m,
    v_g,
    core_n,
    core_h,
    core_m,
    HEADS: tl.constexpr,
    HEADS_OUT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """`_pool_fwd_kernel` for the usual case: learned weights, and a rotation that pairs column i
    with i + HALF and turns them all. Keys are loaded as two halves, so the elements of a pair meet
    in one thread.

    Grid: N * ceil(M / BLOCK_M)."""
    tiles = tl.cdiv(num_groups, BLOCK_M)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    groups = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    cols = tl.arange(0, HALF)
    k_ptr += n * k_n
    v_ptr += n * v_n
    core_k_ptr += n * core_n
    core_v_ptr += n * core_n
    k_a = _load_rows(k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HALF)
    k_b = _load_rows(k_ptr + HALF, k_m, k_g, groups, rows, cols, num_groups, group_size, HALF)
    v_a = _load_rows(v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HALF)
    v_b = _load_rows(v_ptr + HALF, v_m, v_g, groups, rows, cols, num_groups, group_size, HALF)
    cos, sin = _load_half_tables(cos_ptr, sin_ptr, rows, cols, group_size, HALF)
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    for h in range(HEADS):
        q_at = q_ptr + n * q_n + h * q_h
        q_a = _load_one(q_at, q_m, groups, cols, num_groups, HALF)
        q_b = _load_one(q_at + HALF, q_m, groups, cols, num_groups, HALF)
        probs = _probs(_half_scores(q_a, q_b, k_a, k_b, rows, group_size, scale))
        if HEADS_OUT == 1:
            weights += probs / HEADS
        else:
            weights = probs
        if HEADS_OUT > 1 or h == HEADS - 1:
            w = weights[:, :, None]
            into_k, into_v = (
                core_k_ptr + h % HEADS_OUT * core_h,
                core_v_ptr + h % HEADS_OUT * core_h,
            )
            _store_one(
                into_k,
                tl.sum(w * (k_a * cos - k_b * sin), 1),
                core_m,
                groups,
                cols,
                num_groups,
                HALF,
            )
            _store_one(
                into_k + HALF,
                tl.sum(w * (k_b * cos + k_a * sin), 1),
                core_m,
                groups,
                cols,
                num_groups,
                HALF,
            )
            _store_one(into_v, tl.sum(w * v_a, 1), core_m, groups, cols, num_groups, HALF)
            _store_one(into_v + HALF, tl.sum(w * v_b, 1), core_m, groups, cols, num_groups, HALF)


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def _pool_half_bwd_kernel(
    grad_core_k_ptr,
    grad_core_v_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    num_groups,
    group_size,
    scale,
    dck_n,
    dck_h,
    dck_m,
    dcv_n,
    dcv_h,
    dcv_m,
    q_n,
    q_h,
    q_m,
    k_n,
    k_m,
    k_g,
    v_n,
    v_m,
    v_g,
    dq_n,
    dq_h,
    dq_m,
    dk_n,
    dk_m,
    dk_g,
    dv_n,
    dv_m,
    dv_g,
    HEADS: tl.constexpr,
    ADD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """`_pool_bwd_kernel` for one core token per KV head in the usual case (see
    `_pool_half_fwd_kernel`).

    Grid: N * ceil(M / BLOCK_M)."""
    tiles = tl.cdiv(num_groups, BLOCK_M)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    groups = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    cols = tl.arange(0, HALF)
    k_ptr += n * k_n
    v_ptr += n * v_n
    k_a = _load_rows(k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HALF)
    k_b = _load_rows(k_ptr + HALF, k_m, k_g, groups, rows, cols, num_groups, group_size, HALF)
    cos, sin = _load_half_tables(cos_ptr, sin_ptr, rows, cols, group_size, HALF)
    grad_core_k_ptr += n * dck_n
    grad_core_v_ptr += n * dcv_n
    into_a = _load_one(grad_core_k_ptr, dck_m, groups, cols, num_groups, HALF)[:, None, :]
    into_b = _load_one(grad_core_k_ptr + HALF, dck_m, groups, cols, num_groups, HALF)[:, None, :]
    value_a = _load_one(grad_core_v_ptr, dcv_m, groups, cols, num_groups, HALF)[:, None, :]
    value_b = _load_one(grad_core_v_ptr + HALF, dcv_m, groups, cols, num_groups, HALF)[:, None, :]
    v_a = _load_rows(v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HALF)
    v_b = _load_rows(v_ptr + HALF, v_m, v_g, groups, rows, cols, num_groups, group_size, HALF)
    back_a, back_b = (
        into_a * cos + into_b * sin,
        into_b * cos - into_a * sin,
    )  # turned back to each token
    # The weights are the mean over the heads.
    grad_probs = tl.sum(back_a * k_a + back_b * k_b + value_a * v_a + value_b * v_b, 2) / HEADS
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    grad_a = tl.zeros([BLOCK_M, BLOCK_G, HALF], tl.float32)
    grad_b = tl.zeros([BLOCK_M, BLOCK_G, HALF], tl.float32)
    for h in range(HEADS):
        q_at, dq_at = q_ptr + n * q_n + h * q_h, grad_q_ptr + n * dq_n + h * dq_h
        q_a = _load_one(q_at, q_m, groups, cols, num_groups, HALF)
        q_b = _load_one(q_at + HALF, q_m, groups, cols, num_groups, HALF)
        probs = _probs(_half_scores(q_a, q_b, k_a, k_b, rows, group_size, scale))
        grad_z = (probs * (grad_probs - tl.sum(probs * grad_probs, 1)[:, None]) * scale)[:, :, None]
        _store_one(dq_at, tl.sum(grad_z * k_a, 1), dq_m, groups, cols, num_groups, HALF)
        _store_one(dq_at + HALF, tl.sum(grad_z * k_b, 1), dq_m, groups, cols, num_groups, HALF)
        grad_a += grad_z * q_a[:, None, :]
        grad_b += grad_z * q_b[:, None, :]
        weights += probs / HEADS
    w = weights[:, :, None]
    grad_k_ptr += n * dk_n
    grad_v_ptr += n * dv_n
    _store_rows(
        grad_k_ptr,
        grad_a + w * back_a,
        dk_m,
        dk_g,
        groups,
        rows,
        cols,
        num_groups,
        group_size,
        HALF,
        ADD,
    )
    _store_rows(
        grad_k_ptr + HALF,
        grad_b + w * back_b,
        dk_m,
        dk_g,
        groups,
        rows,
        cols,
        num_groups,
        group_size,
        HALF,
        ADD,
    )
    _store_rows(
        grad_v_ptr, w * value_a, dv_m, dv_g, groups, rows, cols, num_groups, group_size, HALF, ADD
    )
    _store_rows(
        grad_v_ptr + HALF,
        w * value_b,
        dv_m,
        dv_g,
        groups,
        rows,
        cols,
        num_groups,
        group_size,
        HALF,
        ADD,
    )


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def _pool_long_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    core_k_ptr,
    core_v_ptr,
    cos_ptr,
    sin_ptr,
    q_n,
    q_h,
    q_m,
    k_n,
    k_m,
    k_g,
    v_n,
    v_m,
    v_g,
    core_n,
    core_h,
    core_m,
    num_groups,
    group_size,
    scale,
    softcap,
    HEADS: tl.constexpr,
    HEADS_OUT: tl.constexpr,
    POOLING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Pool groups too large for registers.

    Grid: N * M. A program owns one group (BLOCK_M = 1) and walks its tokens BLOCK_G at a time, once
    for each head, with an online softmax. Reads K and V r times, all but the first from cache;
    writes as `_pool_fwd_kernel`. Maxima, sums and pooled rows are float32 in registers.
    """
    n = (tl.program_id(0) // num_groups).to(tl.int64)
    groups = (tl.program_id(0) % num_groups).to(tl.int64) + tl.arange(0, BLOCK_M)
    cols, pair, partner, sign = _pairs(BLOCK_D, HALF, INTERLEAVED)
    k_ptr += n * k_n
    v_ptr += n * v_n
    core_k_ptr += n * core_n
    core_v_ptr += n * core_n
    core_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    core_v = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    if POOLING == "max":
        core_k -= float("inf")
        core_v -= float("inf")
        for start in range(0, group_size, BLOCK_G):
            rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
            k = _load_rows(k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
            v = _load_rows(v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
            cos, sin = _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
            k, _ = _turned(
                k_ptr,
                k,
                cos,
                sin,
                k_m,
                k_g,
                groups,
                rows,
                partner,
                sign,
                num_groups,
                group_size,
                HEAD_DIM,
                HALF,
            )
            # The condition takes a NaN and keeps it.
            top = _top(k, rows, group_size)
            core_k = tl.where((top > core_k) | (top != top), top, core_k)
            top = _top(v, rows, group_size)
            core_v = tl.where((top > core_v) | (top != top), top, core_v)
    else:
        for h in range(HEADS if POOLING == "cca" else 1):
            top = tl.full([BLOCK_M], -float("inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            sum_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            sum_v = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            q = _load_one(q_ptr + n * q_n + h * q_h, q_m, groups, cols, num_groups, HEAD_DIM)
            for start in range(0, group_size, BLOCK_G):
                rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
                k = _load_rows(
                    k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HEAD_DIM
                )
                v = _load_rows(
                    v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HEAD_DIM
                )
                if POOLING == "cca":
                    z, _ = _scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
                    new_top = tl.maximum(top, tl.max(z, 1))
                    keep = tl.exp(top - new_top)
                    probs = tl.exp(z - new_top[:, None])
                    top = new_top
                    total *= keep
                    sum_k *= keep[:, None]
                    sum_v *= keep[:, None]
                else:
                    probs = tl.where((rows < group_size)[None, :], 1.0, 0.0) + tl.zeros(
                        [BLOCK_M, 1], tl.float32
                    )
                total += tl.sum(probs, 1)
                sum_v += tl.sum(probs[:, :, None] * v, 1)
                cos, sin = _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
                sum_k += _pooled_key(probs, k, cos, sin, partner, sign, BLOCK_M, BLOCK_D, HALF)
            pooled_k = sum_k / total[:, None]
            pooled_v = sum_v / total[:, None]
            if POOLING == "cca" and HEADS_OUT > 1:
                _store_one(
                    core_k_ptr + h * core_h, pooled_k, core_m, groups, cols, num_groups, HEAD_DIM
                )
                _store_one(
                    core_v_ptr + h * core_h, pooled_v, core_m, groups, cols, num_groups, HEAD_DIM
                )
            else:
                core_k += pooled_k / (HEADS if POOLING == "cca" else 1)
                core_v += pooled_v / (HEADS if POOLING == "cca" else 1)
    if POOLING != "cca" or HEADS_OUT == 1:
        for h in range(HEADS_OUT):
            _store_one(core_k_ptr + h * core_h, core_k, core_m, groups, cols, num_groups, HEAD_DIM)
            _store_one(core_v_ptr + h * core_h, core_v, core_m, groups, cols, num_groups, HEAD_DIM)


@triton.jit
def _count_top(top, count, x, rows, group_size):
    """Running maximum and number of rows that reach it, continued with the rows of x."""
    block_top = _top(x, rows, group_size)
    block_count = _num_top(x, block_top, rows, group_size)
    count = tl.where(
        block_top == top, count + block_count, tl.where(block_top > top, block_count, count)
    )
    # The condition takes a NaN and keeps it; nothing equals it, so its count is 0 as in torch.
    is_nan = (block_top != block_top) | (top != top)
    top = tl.where(is_nan, float("nan"), tl.maximum(top, block_top))
    return top, tl.where(is_nan, 0.0, count)


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def _pool_long_bwd_kernel(
    grad_core_k_ptr,
    grad_core_v_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    dck_n,
    dck_h,
    dck_m,
    dcv_n,
    dcv_h,
    dcv_m,
    q_n,
    q_h,
    q_m,
    k_n,
    k_m,
    k_g,
    v_n,
    v_m,
    v_g,
    dq_n,
    dq_h,
    dq_m,
    dk_n,
    dk_m,
    dk_g,
    dv_n,
    dv_m,
    dv_g,
    num_groups,
    group_size,
    scale,
    softcap,
    HEADS: tl.constexpr,
    HEADS_OUT: tl.constexpr,
    POOLING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Gradients of pooling for groups too large for registers.

    Grid: N * M. A program owns one group (BLOCK_M = 1) and walks its tokens BLOCK_G at a time: for
    each head once for the softmax and its backward's sum and once for the gradient of q, then once
    for those of K and V. Reads K 2 r + 1 times and V as often, all but the first from cache; writes
    as `_pool_bwd_kernel`. Each head's maximum, sum and sum of probs * grad_probs wait in vectors of
    BLOCK_H >= r float32 in registers.
    """
    n = (tl.program_id(0) // num_groups).to(tl.int64)
    groups = (tl.program_id(0) % num_groups).to(tl.int64) + tl.arange(0, BLOCK_M)
    cols, pair, partner, sign = _pairs(BLOCK_D, HALF, INTERLEAVED)
    grad_core_k_ptr += n * dck_n
    grad_core_v_ptr += n * dcv_n
    q_ptr += n * q_n
    k_ptr += n * k_n
    v_ptr += n * v_n
    grad_k_ptr += n * dk_n
    grad_v_ptr += n * dv_n
    heads = tl.arange(0, BLOCK_H)

    if POOLING == "cca":
        tops = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        totals = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        means = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        for h in range(HEADS):
            core_head = h if HEADS_OUT > 1 else 0
            into_k = _load_one(
                grad_core_k_ptr + core_head * dck_h, dck_m, groups, cols, num_groups, HEAD_DIM
            )
            into_v = _load_one(
                grad_core_v_ptr + core_head * dcv_h, dcv_m, groups, cols, num_groups, HEAD_DIM
            )
            other_into_k = _swapped(into_k, partner, sign, BLOCK_M, BLOCK_D, HALF)
            q = _load_one(q_ptr + h * q_h, q_m, groups, cols, num_groups, HEAD_DIM)
            top = tl.full([BLOCK_M], -float("inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            mean = tl.zeros([BLOCK_M], tl.float32)
            for start in range(0, group_size, BLOCK_G):
                rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
                k = _load_rows(
                    k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HEAD_DIM
                )
                v = _load_rows(
                    v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HEAD_DIM
                )
                cos, sin = _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
                back = _turned_back(into_k, other_into_k, cos, sin, HALF)
                grad_probs = tl.sum(back * k + into_v[:, None, :] * v, 2)
                z, _ = _scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
                new_top = tl.maximum(top, tl.max(z, 1))
                keep = tl.exp(top - new_top)
                probs = tl.exp(z - new_top[:, None])
                total = total * keep + tl.sum(probs, 1)
                mean = mean * keep + tl.sum(probs * grad_probs, 1)
                top = new_top
            mean = mean / total
            grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for start in range(0, group_size, BLOCK_G):
                rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
                k = _load_rows(
                    k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HEAD_DIM
                )
                v = _load_rows(
                    v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HEAD_DIM
                )
                cos, sin = _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
                back = _turned_back(into_k, other_into_k, cos, sin, HALF)
                grad_probs = tl.sum(back * k + into_v[:, None, :] * v, 2)
                z, slope = _scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
                probs = tl.exp(z - top[:, None]) / total[:, None]
                grad_z = probs * (grad_probs - mean[:, None]) * slope
                grad_q += tl.sum(grad_z[:, :, None] * k, 1)
            # The weights are the mean over the heads that share a core token.
            grad_q = grad_q * (scale * HEADS_OUT / HEADS)
            _store_one(
                grad_q_ptr + n * dq_n + h * dq_h, grad_q, dq_m, groups, cols, num_groups, HEAD_DIM
            )
            here = (heads == h)[None, :]
            tops = tl.where(here, top[:, None], tops)
            totals = tl.where(here, total[:, None], totals)
            means = tl.where(here, mean[:, None], means)
    else:
        into_k = _grad_head_sum(
            grad_core_k_ptr, dck_h, dck_m, groups, cols, num_groups, HEADS_OUT, HEAD_DIM
        )
        into_v = _grad_head_sum(
            grad_core_v_ptr, dcv_h, dcv_m, groups, cols, num_groups, HEADS_OUT, HEAD_DIM
        )
        other_into_k = _swapped(into_k, partner, sign, BLOCK_M, BLOCK_D, HALF)
        if POOLING == "max":
            top_k = tl.full([BLOCK_M, BLOCK_D], -float("inf"), tl.float32)
            top_v = tl.full([BLOCK_M, BLOCK_D], -float("inf"), tl.float32)
            count_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            count_v = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for start in range(0, group_size, BLOCK_G):
                rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
                k = _load_rows(
                    k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HEAD_DIM
                )
                v = _load_rows(
                    v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HEAD_DIM
                )
                cos, sin = _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
                k, _ = _turned(
                    k_ptr,
                    k,
                    cos,
                    sin,
                    k_m,
                    k_g,
                    groups,
                    rows,
                    partner,
                    sign,
                    num_groups,
                    group_size,
                    HEAD_DIM,
                    HALF,
                )
                top_k, count_k = _count_top(top_k, count_k, k, rows, group_size)
                top_v, count_v = _count_top(top_v, count_v, v, rows, group_size)

    for start in range(0, group_size, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G).to(tl.int64)
        cos, sin = _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
        if POOLING == "mean":
            grad_k = _turned_back(into_k, other_into_k, cos, sin, HALF) / group_size
            grad_v = into_v[:, None, :] / group_size + tl.zeros([1, BLOCK_G, 1], tl.float32)
        else:
            k = _load_rows(k_ptr, k_m, k_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
            v = _load_rows(v_ptr, v_m, v_g, groups, rows, cols, num_groups, group_size, HEAD_DIM)
        if POOLING == "cca":
            grad_k = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_D], tl.float32)
            grad_v = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_D], tl.float32)
            for h in range(HEADS):
                core_head = h if HEADS_OUT > 1 else 0
                into_k = _load_one(
                    grad_core_k_ptr + core_head * dck_h, dck_m, groups, cols, num_groups, HEAD_DIM
                )
                into_v = _load_one(
                    grad_core_v_ptr + core_head * dcv_h, dcv_m, groups, cols, num_groups, HEAD_DIM
                )
                back = _turned_back(
                    into_k, _swapped(into_k, partner, sign, BLOCK_M, BLOCK_D, HALF), cos, sin, HALF
                )
                grad_probs = tl.sum(back * k + into_v[:, None, :] * v, 2)
                q = _load_one(q_ptr + h * q_h, q_m, groups, cols, num_groups, HEAD_DIM)
                z, slope = _scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
                here = (heads == h)[None, :]
                top = tl.sum(tl.where(here, tops, 0.0), 1)
                total = tl.sum(tl.where(here, totals, 0.0), 1)
                mean = tl.sum(tl.where(here, means, 0.0), 1)
                probs = tl.exp(z - top[:, None]) / total[:, None] * (HEADS_OUT / HEADS)
                grad_z = probs * (grad_probs - mean[:, None]) * scale * slope
                grad_k += probs[:, :, None] * back + grad_z[:, :, None] * q[:, None, :]
                grad_v += probs[:, :, None] * into_v[:, None, :]
        if POOLING == "max":
            turned, other = _turned(
                k_ptr,
                k,
                cos,
                sin,
                k_m,
                k_g,
                groups,
                rows,
                partner,
                sign,
                num_groups,
                group_size,
                HEAD_DIM,
                HALF,
            )
            grad_k = _max_grad_key(
                into_k / count_k,
                top_k,
                turned,
                k,
                other,
                cos,
                sin,
                partner,
                sign,
                BLOCK_M,
                BLOCK_D,
                HALF,
            )
            grad_v = _max_grad(into_v / count_v, v, top_v)
        _store_rows(
            grad_k_ptr,
            grad_k,
            dk_m,
            dk_g,
            groups,
            rows,
            cols,
            num_groups,
            group_size,
            HEAD_DIM,
            ADD,
        )
        _store_rows(
            grad_v_ptr,
            grad_v,
            dv_m,
            dv_g,
            groups,
            rows,
            cols,
            num_groups,
            group_size,
            HEAD_DIM,
            ADD,
        )


_TABLES = WeakIdKeyDictionary()  # by the tensor of frequencies


def _tables(rotary: Rotary | None, group_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the turn of each token of a group to its middle, [g, R / 2] in float32.

    Kept with the frequencies they are made of, until those change; not what a graph being captured
    makes."""
    if rotary is None:
        nothing = torch.empty(1, dtype=torch.float32, device=device)
        return nothing, nothing
    source = rotary.inv_freq
    known = _TABLES.setdefault(source, {})
    key = (group_size, device, None if source.is_inference() else source._version)
    if key in known:
        return known[key]
    offsets = group_size // 2 - torch.arange(group_size, dtype=torch.float64, device=device)
    angle = offsets[:, None] * source.detach().to(device=device, dtype=torch.float64)[None, :]
    tables = angle.cos().float(), angle.sin().float()
    if key[2] is not None and not (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    ):
        known[key] = tables
    return tables


def _halves(rotary: Rotary | None, head_dim: int, softcap: float | None) -> bool:
    """Whether the kernels for two halves of the columns can take the call."""
    return (
        rotary is not None
        and not rotary.interleaved
        and 2 * rotary.inv_freq.numel() == head_dim
        and head_dim & (head_dim - 1) == 0
        and head_dim >= 16
        and softcap is None
    )


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of all dimensions but the last."""
    return tuple(step for x in tensors for step in x.stride()[:3])


def _columns_adjacent(x: Tensor) -> Tensor:
    """x, copied only if its last dimension is strided (as in an expanded gradient)."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _check(q_last: Tensor, k: Tensor, v: Tensor) -> None:
    reason = unsupported_reason(q_last, k, v)
    if reason is not None:
        raise NotImplementedError(
            f"the Triton pooling cannot run this call: {reason}. Use corecontext.ops.pooling."
        )


def pool(
    q_last: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    pooling: str = "cca",
    core_heads: str = "kv",
    rotary: Rotary | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Pool groups into core tokens (docs/math.md, eq. 1 to 3).

    Args:
        q_last: The query of each group's last token, [N, r, M, D]; float32, float16 or bfloat16,
            any strides.
        k, v: Keys and values by group, [N, M, g, D], usually views of [N, T, D]; any strides, not
            copied as long as the last dimension is contiguous.
        scale, pooling, core_heads, rotary, softcap: As in `reference.pool`.

    Returns:
        core_k, core_v, [N, 1 or r, M, D] in the dtype of k and of v; summed in float32. K and V are
        read once.

    Raises:
        NotImplementedError: a dtype is not one of the three.
    """
    _check(q_last, k, v)
    q_last, k, v = _columns_adjacent(q_last), _columns_adjacent(k), _columns_adjacent(v)
    batch, num_groups, group_size, head_dim = k.shape
    heads = q_last.shape[1]
    heads_out = heads if core_heads == "query" else 1
    core_k = k.new_empty(batch, heads_out, num_groups, head_dim)
    core_v = v.new_empty(batch, heads_out, num_groups, head_dim)
    if core_k.numel() == 0:
        return core_k, core_v
    halves = pooling == "cca" and _halves(rotary, head_dim, softcap)
    whole, block_m, block_g, block_d, num_warps = pool_tiles(
        group_size, head_dim, heads, halves=halves, backward=False
    )
    kernel = _pool_fwd_kernel if whole else _pool_long_fwd_kernel
    cos, sin = _tables(rotary, group_size, k.device)
    with torch.cuda.device_of(k):
        if whole and halves:
            launch(
                _pool_half_fwd_kernel,
                (batch * ceil_div(num_groups, block_m),),
                (q_last, k, v, core_k, core_v, cos, sin, num_groups, group_size, float(scale)),
                _strides(q_last, k, v, core_k),
                HEADS=heads,
                HEADS_OUT=heads_out,
                HALF=head_dim // 2,
                BLOCK_M=block_m,
                BLOCK_G=block_g,
                num_warps=num_warps,
            )
            return core_k, core_v
        kernel[(batch * ceil_div(num_groups, block_m),)](
            q_last,
            k,
            v,
            core_k,
            core_v,
            cos,
            sin,
            *q_last.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *core_k.stride()[:3],
            num_groups,
            group_size,
            float(scale),
            float(softcap or 1.0),
            HEADS=heads,
            HEADS_OUT=heads_out,
            POOLING=pooling,
            HEAD_DIM=head_dim,
            HALF=0 if rotary is None else rotary.inv_freq.numel(),
            INTERLEAVED=rotary is not None and rotary.interleaved,
            HAS_SOFTCAP=softcap is not None,
            BLOCK_M=block_m,
            BLOCK_G=block_g,
            BLOCK_D=block_d,
            num_warps=num_warps,
        )
    return core_k, core_v


def pool_backward(
    grad_core_k: Tensor,
    grad_core_v: Tensor,
    q_last: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    pooling: str = "cca",
    core_heads: str = "kv",
    rotary: Rotary | None = None,
    softcap: float | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of q_last (None unless the weights are learned), k and v (docs/math.md, eq. 10).

    Args:
        grad_core_k, grad_core_v: Gradients of the core tokens, [N, 1 or r, M, D] in any of the
            three dtypes.
        q_last, k, v, scale, pooling, core_heads, rotary, softcap: As given to `pool`.
        into: Tensors of the shape of k and v to add their gradients to, in place.

    Returns:
        In the dtype and shape of q_last, k and v, summed in float32; that of q_last in float32
        where `into` is given. K and V are read once, their gradients written once.

    Raises:
        NotImplementedError: a dtype is not one of the three.
    """
    _check(q_last, k, v)
    q_last, k, v = _columns_adjacent(q_last), _columns_adjacent(k), _columns_adjacent(v)
    grad_core_k, grad_core_v = _columns_adjacent(grad_core_k), _columns_adjacent(grad_core_v)
    batch, num_groups, group_size, head_dim = k.shape
    heads = q_last.shape[1]
    grad_q = (
        torch.empty_like(
            q_last,
            dtype=q_last.dtype if into is None else torch.float32,
            memory_format=torch.contiguous_format,
        )
        if pooling == "cca"
        else None
    )
    grad_k, grad_v = (torch.empty_like(k), torch.empty_like(v)) if into is None else into
    if k.numel() == 0:
        return grad_q, grad_k, grad_v
    halves = pooling == "cca" and core_heads == "kv" and _halves(rotary, head_dim, softcap)
    whole, block_m, block_g, block_d, num_warps = pool_tiles(
        group_size, head_dim, heads, halves=halves, backward=True
    )
    kernel, more = _pool_bwd_kernel, {}
    if not whole:
        kernel, more = _pool_long_bwd_kernel, {"BLOCK_H": power_of_2(heads)}
    # Without learned weights no kernel touches the gradient of q.
    into_q = q_last if grad_q is None else grad_q
    cos, sin = _tables(rotary, group_size, k.device)
    with torch.cuda.device_of(k):
        if whole and halves:
            launch(
                _pool_half_bwd_kernel,
                (batch * ceil_div(num_groups, block_m),),
                (
                    grad_core_k,
                    grad_core_v,
                    q_last,
                    k,
                    v,
                    cos,
                    sin,
                    grad_q,
                    grad_k,
                    grad_v,
                    num_groups,
                    group_size,
                    float(scale),
                ),
                _strides(grad_core_k, grad_core_v, q_last, k, v, grad_q, grad_k, grad_v),
                HEADS=heads,
                ADD=into is not None,
                HALF=head_dim // 2,
                BLOCK_M=block_m,
                BLOCK_G=block_g,
                num_warps=num_warps,
            )
            return grad_q, grad_k, grad_v
        kernel[(batch * ceil_div(num_groups, block_m),)](
            grad_core_k,
            grad_core_v,
            q_last,
            k,
            v,
            cos,
            sin,
            into_q,
            grad_k,
            grad_v,
            *grad_core_k.stride()[:3],
            *grad_core_v.stride()[:3],
            *q_last.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *into_q.stride()[:3],
            *grad_k.stride()[:3],
            *grad_v.stride()[:3],
            num_groups,
            group_size,
            float(scale),
            float(softcap or 1.0),
            HEADS=heads,
            HEADS_OUT=heads if core_heads == "query" else 1,
            POOLING=pooling,
            HEAD_DIM=head_dim,
            HALF=0 if rotary is None else rotary.inv_freq.numel(),
            INTERLEAVED=rotary is not None and rotary.interleaved,
            HAS_SOFTCAP=softcap is not None,
            ADD=into is not None,
            BLOCK_M=block_m,
            BLOCK_G=block_g,
            BLOCK_D=block_d,
            num_warps=num_warps,
            **more,
        )
    return grad_q, grad_k, grad_v
