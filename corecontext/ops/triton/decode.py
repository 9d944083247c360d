"""One decoding step of the compact cache in two Triton launches: store, pool and attend in parts;
merge the parts.

A step is bound by reading the cache once, so the entries of each KV head are shared out evenly
among several programs (its parts), by the length that is read on the device: the launch does not
depend on it and can be captured in a graph. Storing and pooling need no launch of their own,
because no other program of the step reads what they write: the new token comes from the arguments,
its ring slot held a token that no query sees any more, and the core token of the group that it
closes is not visible yet, for (t + 1 - s) // g < (t + 1) / g.

Where the cache is in 8 bits, codes become numbers tile by tile; the new token is rounded first,
then attended to and pooled as it was rounded, as everywhere (cache/eight_bit.py). The bits of fp8
(e4m3), moved to where float16 has them, are its numbers over 256, on chips without fp8 too.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.rotary import Rotary
from corecontext.ops.triton.attend import _cores_of, _dot, _last_contiguous
from corecontext.ops.triton.attend import _scores as _attend_scores
from corecontext.ops.triton.pool import _load_tables, _pairs, _pooled_key, _tables, _top
from corecontext.ops.triton.pool import _scores as _pool_scores
from corecontext.ops.triton.tiles import Chip, chip_of, decode_splits, decode_tiles


@triton.jit
def _products(q, k, VECTOR: tl.constexpr):
    """Rows of q times rows of k, [rows, entries] in float32. Few float32 rows would spill as a
    matrix product."""
    if VECTOR:
        products = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2)
    else:
        products = _dot(q, tl.trans(k))
    return products


@triton.jit
def _mixed(weights, v, VECTOR: tl.constexpr):
    """Weighted sums of the rows of v, [rows, columns] in float32."""
    if (
        VECTOR
    ):  # not weights * v: a sum of such products over 16 rows is compiled as a product in TF32
        mixed = tl.sum(tl.fma(weights[:, :, None], v.to(tl.float32)[None, :, :], 0.0), 1)
    else:
        mixed = _dot(weights.to(v.dtype), v)
    return mixed


@triton.jit
def _numbers(codes, KIND: tl.constexpr):
    """What codes of the cache stand for before they are scaled; those of fp8 are 256 times too
    small."""
    if KIND == "fp8":
        wide = codes.to(tl.int16)
        codes = ((wide & -32768) | ((wide & 127) << 7)).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def _load_scales(scale_ptr, entries, mask, KIND: tl.constexpr):
    """The scales of some entries, for what `_numbers` gives."""
    scales = tl.load(scale_ptr + entries, mask=mask, other=0.0)
    if KIND == "fp8":
        scales = scales * 256.0
    return scales


@triton.jit
def _scale_of(highest, KIND: tl.constexpr):
    """The scale of vectors by their largest magnitudes."""
    if KIND == "fp8":
        scale = tl.div_rn(highest, 448.0)
    else:
        scale = tl.div_rn(highest, 127.0)
    return scale


@triton.jit
def _rounded(x, scale, KIND: tl.constexpr):
    """Numbers in float32 over their scale, rounded to those that have codes; ties to even. Adding
    and taking away a large number rounds to its spacing."""
    x = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
    if KIND == "fp8":
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    else:
        x = tl.minimum(tl.maximum((x + 12582912.0) - 12582912.0, -127.0), 127.0)
    return x


@triton.jit
def _codes(x, KIND: tl.constexpr):
    """The codes of numbers from `_rounded`."""
    if KIND == "fp8":
        bits = (x * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
        x = ((bits & -32768) >> 8) | ((bits >> 7) & 127)
    return x.to(tl.int8)


@triton.jit
def _largest(x, KIND: tl.constexpr):
    """The scale of each row of x [rows, columns], [rows, 1]."""
    return _scale_of(tl.max(tl.abs(x), 1), KIND)[:, None]


@triton.jit
def _group_rows(
    ring_ptr,
    ring_scale_ptr,
    new_ptr,
    new_scale,
    slot,
    rows,
    cols,
    ring_size,
    group_size,
    HEAD_DIM: tl.constexpr,
    KIND: tl.constexpr,
):
    """Tokens of the group that ends in `slot`, [1, rows, columns] in float32, 0 outside; the last
    one is the new one, whose slot another thread may only just be writing."""
    slots = slot - (group_size - 1) + rows
    slots = tl.where(slots < 0, slots + ring_size, slots)
    in_dims = (cols < HEAD_DIM)[None, None, :]
    at = ring_ptr + slots.to(tl.int64)[None, :, None] * HEAD_DIM + cols[None, None, :]
    inside = rows < group_size - 1
    old = tl.load(at, mask=inside[None, :, None] & in_dims, other=0.0)
    new = tl.load(new_ptr + cols[None, None, :], mask=in_dims, other=0.0)
    if KIND != "auto":
        old = (
            _numbers(old, KIND).to(tl.float32)
            * _load_scales(ring_scale_ptr, slots, inside, KIND)[None, :, None]
        )
        new = _rounded(new.to(tl.float32), new_scale, KIND) * new_scale
    return tl.where((rows == group_size - 1)[None, :, None], new, old).to(tl.float32)


@triton.jit
def _pool_group(
    q,
    k_ptr,
    v_ptr,
    ring_k_ptr,
    ring_v_ptr,
    ks_ptr,
    vs_ptr,
    new_ks,
    new_vs,
    core,
    cos_ptr,
    sin_ptr,
    slot,
    ring_size,
    group_size,
    scale,
    softcap,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the WIDTH core tokens of the group that the new token closes (docs/math.md, eq. 1 to
    3), reading the group in blocks: once for the softmax's sums, once for the weighted tokens."""
    BLOCK_W: tl.constexpr = BLOCK_R if WIDTH > 1 else 1
    cols, pair, partner, sign = _pairs(BLOCK_D, HALF, INTERLEAVED)
    heads = tl.arange(0, BLOCK_R)
    highest = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if POOLING == "cca":
        for start in range(0, group_size, BLOCK_G):
            rows = start + tl.arange(0, BLOCK_G)
            k = _group_rows(
                ring_k_ptr,
                ks_ptr,
                k_ptr,
                new_ks,
                slot,
                rows,
                cols,
                ring_size,
                group_size,
                HEAD_DIM,
                KIND,
            )
            z, _ = _pool_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
            new = tl.maximum(highest, tl.max(z, 1))
            total = total * tl.exp(highest - new) + tl.sum(tl.exp(z - new[:, None]), 1)
            highest = new
    if POOLING == "max":
        core_k = tl.full([BLOCK_W, BLOCK_D], -float("inf"), tl.float32)
        core_v = tl.full([BLOCK_W, BLOCK_D], -float("inf"), tl.float32)
    else:
        core_k = tl.zeros([BLOCK_W, BLOCK_D], tl.float32)
        core_v = tl.zeros([BLOCK_W, BLOCK_D], tl.float32)
    for start in range(0, group_size, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        cos, sin = _load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
        k = _group_rows(
            ring_k_ptr,
            ks_ptr,
            k_ptr,
            new_ks,
            slot,
            rows,
            cols,
            ring_size,
            group_size,
            HEAD_DIM,
            KIND,
        )
        v = _group_rows(
            ring_v_ptr,
            vs_ptr,
            v_ptr,
            new_vs,
            slot,
            rows,
            cols,
            ring_size,
            group_size,
            HEAD_DIM,
            KIND,
        )
        if POOLING == "max":
            if HALF > 0:
                other = _group_rows(
                    ring_k_ptr,
                    ks_ptr,
                    k_ptr,
                    new_ks,
                    slot,
                    rows,
                    partner,
                    ring_size,
                    group_size,
                    HEAD_DIM,
                    KIND,
                )
                k = tl.fma(k, cos, other * (sin * sign[None, None, :]))
            core_k = tl.maximum(
                core_k, _top(k, rows, group_size), propagate_nan=tl.PropagateNan.ALL
            )
            core_v = tl.maximum(
                core_v, _top(v, rows, group_size), propagate_nan=tl.PropagateNan.ALL
            )
        else:
            if POOLING == "mean":
                weights = tl.where((rows < group_size)[None, :], 1.0 / group_size, 0.0) + tl.zeros(
                    [BLOCK_W, 1], tl.float32
                )
            else:
                z, _ = _pool_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
                weights = tl.exp(z - highest[:, None]) / total[:, None]
                if WIDTH == 1:
                    weights = (
                        tl.sum(tl.where((heads < HEADS)[:, None], weights, 0.0), 0)[None, :] / HEADS
                    )
            core_k += _pooled_key(weights, k, cos, sin, partner, sign, BLOCK_W, BLOCK_D, HALF)
            core_v += tl.sum(weights[:, :, None] * v, 1)
    wide = tl.arange(0, BLOCK_W)
    entries = core.to(tl.int64) * WIDTH + (ring_size + SINKS) + wide
    at = entries[:, None] * HEAD_DIM + cols[None, :]
    in_dims = (cols < HEAD_DIM)[None, :]
    mask = (wide < WIDTH)[:, None] & in_dims
    if KIND != "auto":
        core_k, core_v = tl.where(in_dims, core_k, 0.0), tl.where(in_dims, core_v, 0.0)
        k_scale, v_scale = _largest(core_k, KIND), _largest(core_v, KIND)
        tl.store(ks_ptr + entries[:, None], k_scale, mask=(wide < WIDTH)[:, None])
        tl.store(vs_ptr + entries[:, None], v_scale, mask=(wide < WIDTH)[:, None])
        tl.store(ring_k_ptr + at, _codes(_rounded(core_k, k_scale, KIND), KIND), mask=mask)
        tl.store(ring_v_ptr + at, _codes(_rounded(core_v, v_scale, KIND), KIND), mask=mask)
    else:
        tl.store(ring_k_ptr + at, core_k.to(ring_k_ptr.dtype.element_ty), mask=mask)
        tl.store(ring_v_ptr + at, core_v.to(ring_v_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend_loop(
    q,
    keys_ptr,
    values_ptr,
    ks_ptr,
    vs_ptr,
    begin,
    end,
    position,
    slot,
    reach,
    ring_size,
    scale,
    softcap,
    bias,
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over buffer entries begin .. end-1: ring slots whose token is at most `reach`
    positions old, first tokens before the new one, then core tokens. Unseen entries are not read,
    so whatever lies there has no effect."""
    offs, dims, heads = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    tile = begin.to(tl.int64) * HEAD_DIM + offs[:, None] * HEAD_DIM + dims[None, :]
    k_tile, v_tile = keys_ptr + tile, values_ptr + tile
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        entries = start + offs
        is_core = entries >= ring_size + SINKS
        age = slot - entries
        age = tl.where(
            age < 0, age + ring_size, age
        )  # of the token in a ring slot; 0 is the new one, counted apart
        seen = (age > 0) & (age <= reach)
        if SINKS > 0:
            seen = tl.where(entries < ring_size, seen, entries - ring_size < position)
        seen = (entries < end) & (is_core | seen)
        mask = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_tile, mask=mask, other=0.0)
        v = tl.load(v_tile, mask=mask, other=0.0)
        if KIND != "auto":
            k = _numbers(k, KIND).to(q.dtype)
            v = (
                _numbers(v, KIND).to(tl.float32)
                * _load_scales(vs_ptr, entries, seen, KIND)[:, None]
            ).to(q.dtype)
        products = _products(q, k, VECTOR)
        if KIND != "auto":
            products = products * _load_scales(ks_ptr, entries, seen, KIND)[None, :]
        shift = 0.0
        if HAS_BIAS:
            shift = tl.where(is_core, bias, 0.0)[None, :]
        scores, _ = _attend_scores(products, scale, shift, softcap, HAS_SOFTCAP)
        visible = seen[None, :]
        if WIDTH > 1:  # query head i sees the core tokens made for it
            visible = visible & (
                (entries < ring_size + SINKS)[None, :]
                | ((entries - ring_size - SINKS)[None, :] % WIDTH == heads[:, None])
            )
        scores = tl.where(visible, scores, -float("inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(
            new == -float("inf"), 0.0, new
        )  # nothing seen yet: exp2(-inf - -inf) would be NaN
        weights = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(highest - safe)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + _mixed(weights, v, VECTOR)
        highest = new
        k_tile += BLOCK_N * HEAD_DIM
        v_tile += BLOCK_N * HEAD_DIM
    return acc, total, highest


@triton.jit
def _append(
    q_ptr,
    k_ptr,
    v_ptr,
    ring_k_ptr,
    ring_v_ptr,
    ks_ptr,
    vs_ptr,
    cos_ptr,
    sin_ptr,
    acc_ptr,
    lse_ptr,
    stride_qh,
    position,
    slot,
    capacity,
    ring_size,
    group_size,
    scale,
    softcap,
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the new token, pool the group that it closes, and write what attention to it alone
    gives."""
    heads, dims = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    in_heads, in_dims = heads < HEADS, dims < HEAD_DIM
    mask = in_heads[:, None] & in_dims[None, :]
    q = tl.load(q_ptr + heads[:, None] * stride_qh + dims[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    k = tl.load(k_ptr + dims, mask=in_dims, other=0.0)
    v = tl.load(v_ptr + dims, mask=in_dims, other=0.0)
    entry = slot
    if SINKS > 0:  # the first tokens do not enter the ring
        entry = tl.where(position < SINKS, ring_size + tl.maximum(position, 0), slot)
    at = entry.to(tl.int64) * HEAD_DIM + dims
    stored = tl.where(position >= 0, HEAD_DIM, 0)  # padding has no slot
    new_ks, new_vs = 0.0, 0.0
    if KIND != "auto":
        k, v = k.to(tl.float32), v.to(tl.float32)
        new_ks, new_vs = (
            _scale_of(tl.max(tl.abs(k), 0), KIND),
            _scale_of(tl.max(tl.abs(v), 0), KIND),
        )
        k, v = _rounded(k, new_ks, KIND), _rounded(v, new_vs, KIND)
        tl.store(ring_k_ptr + at, _codes(k, KIND), mask=dims < stored)
        tl.store(ring_v_ptr + at, _codes(v, KIND), mask=dims < stored)
        tl.store(ks_ptr + entry, new_ks, mask=position >= 0)
        tl.store(vs_ptr + entry, new_vs, mask=position >= 0)
        k, v = k * new_ks, v * new_vs
    else:
        tl.store(ring_k_ptr + at, k, mask=dims < stored)
        tl.store(ring_v_ptr + at, v, mask=dims < stored)
    scores, _ = _attend_scores(
        tl.sum(q * k.to(tl.float32)[None, :], 1), scale, 0.0, softcap, HAS_SOFTCAP
    )
    tl.store(lse_ptr + heads, scores, mask=in_heads)
    tl.store(
        acc_ptr + heads[:, None] * HEAD_DIM + dims[None, :],
        tl.zeros([BLOCK_R, 1], tl.float32) + v.to(tl.float32)[None, :],
        mask=mask,
    )
    core = tl.maximum(position - SINKS, 0) // group_size
    if (
        ((position + 1) % group_size == 0)
        & (position >= SINKS)
        & ((core + 1) * WIDTH <= capacity - ring_size - SINKS)
    ):
        _pool_group(
            q,
            k_ptr,
            v_ptr,
            ring_k_ptr,
            ring_v_ptr,
            ks_ptr,
            vs_ptr,
            new_ks,
            new_vs,
            core,
            cos_ptr,
            sin_ptr,
            slot,
            ring_size,
            group_size,
            scale,
            softcap,
            SINKS,
            HEADS,
            WIDTH,
            POOLING,
            HEAD_DIM,
            HALF,
            INTERLEAVED,
            HAS_SOFTCAP,
            KIND,
            BLOCK_R,
            BLOCK_G,
            BLOCK_D,
        )


@triton.jit
def _attend_share(
    q_ptr,
    keys_ptr,
    values_ptr,
    ks_ptr,
    vs_ptr,
    acc_ptr,
    lse_ptr,
    stride_qh,
    share,
    num_shares,
    position,
    slot,
    capacity,
    ring_size,
    group_size,
    window_size,
    scale,
    softcap,
    bias,
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from all heads to one of num_shares even shares of the entries, at least a tile."""
    heads, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_heads = heads < HEADS
    at, mask = (
        heads[:, None] * HEAD_DIM + dims[None, :],
        in_heads[:, None] & (dims < HEAD_DIM)[None, :],
    )
    q = tl.load(q_ptr + heads[:, None] * stride_qh + dims[None, :], mask=mask, other=0.0)
    cores = _cores_of(position - SINKS, group_size, window_size)
    # Before there are core tokens, later ring slots were never written.
    length = tl.where(cores > 0, cores * WIDTH + ring_size, tl.minimum(position, ring_size))
    if SINKS > 0:
        length = ring_size + tl.where(cores > 0, cores * WIDTH + SINKS, tl.minimum(position, SINKS))
    length = tl.minimum(length, capacity)
    size = tl.maximum((length + num_shares - 1) // num_shares, BLOCK_N)
    begin = share * size
    acc, total, highest = _attend_loop(
        q,
        keys_ptr,
        values_ptr,
        ks_ptr,
        vs_ptr,
        begin,
        tl.minimum(begin + size, length),
        position,
        slot,
        position - SINKS - cores * group_size,
        ring_size,
        scale,
        softcap,
        bias,
        KIND,
        SINKS,
        WIDTH,
        HAS_BIAS,
        HAS_SOFTCAP,
        HEAD_DIM,
        VECTOR,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        STAGES,
    )
    some = highest != -float("inf")
    total = tl.where(some, total, 1.0)
    tl.store(lse_ptr + heads, highest + tl.log2(total), mask=in_heads)
    tl.store(acc_ptr + at, acc / total[:, None], mask=mask & some[:, None])


@triton.jit(
    do_not_specialize=["seen", "kv_heads", "capacity", "ring_size", "group_size", "window_size"]
)
def _step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    ks_ptr,
    vs_ptr,
    seen_ptr,
    pad_ptr,
    cos_ptr,
    sin_ptr,
    acc_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    seen,
    kv_heads,
    capacity,
    ring_size,
    group_size,
    window_size,
    scale,
    softcap,
    bias,
    ON_DEVICE: tl.constexpr,
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (B Hkv, 1 + shares). The first program of a KV head appends its new token; each other
    one reads an even share of the visible entries once, for all HEADS query heads. All write a part
    of the softmax: the normalised output [HEADS, D] in float32 and its log-sum-exp in units of log
    2; -inf and no output where nothing is seen."""
    row, part = tl.program_id(0), tl.program_id(1)
    n, batch, head = row.to(tl.int64), (row // kv_heads).to(tl.int64), (row % kv_heads).to(tl.int64)
    if ON_DEVICE:
        seen = tl.load(seen_ptr)
    position = (seen - tl.load(pad_ptr + batch)).to(tl.int32)
    slot = tl.maximum(position, 0) % ring_size
    q_ptr += batch * stride_qb + head * HEADS * stride_qh
    keys_ptr += n * capacity * HEAD_DIM
    values_ptr += n * capacity * HEAD_DIM
    ks_ptr += n * capacity  # not read unless in 8 bits
    vs_ptr += n * capacity
    first = (n * tl.num_programs(1) + part) * HEADS
    acc_ptr += first * HEAD_DIM
    lse_ptr += first
    if part == 0:
        _append(
            q_ptr,
            k_ptr + batch * stride_kb + head * stride_kh,
            v_ptr + batch * stride_vb + head * stride_vh,
            keys_ptr,
            values_ptr,
            ks_ptr,
            vs_ptr,
            cos_ptr,
            sin_ptr,
            acc_ptr,
            lse_ptr,
            stride_qh,
            position,
            slot,
            capacity,
            ring_size,
            group_size,
            scale,
            softcap,
            KIND,
            SINKS,
            HEADS,
            WIDTH,
            POOLING,
            HEAD_DIM,
            HALF,
            INTERLEAVED,
            HAS_SOFTCAP,
            BLOCK_R,
            BLOCK_G,
            BLOCK_D,
        )
    else:
        _attend_share(
            q_ptr,
            keys_ptr,
            values_ptr,
            ks_ptr,
            vs_ptr,
            acc_ptr,
            lse_ptr,
            stride_qh,
            part - 1,
            tl.num_programs(1) - 1,
            position,
            slot,
            capacity,
            ring_size,
            group_size,
            window_size,
            scale,
            softcap,
            bias,
            KIND,
            SINKS,
            HEADS,
            WIDTH,
            HEAD_DIM,
            HAS_BIAS,
            HAS_SOFTCAP,
            VECTOR,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            STAGES,
        )


@triton.jit(do_not_specialize=["num_parts"])
def _merge_kernel(
    acc_ptr,
    lse_ptr,
    out_ptr,
    seen_ptr,
    num_parts,
    ON_DEVICE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (B H,). One softmax from the parts of a query head (docs/math.md, eq. 8). The first
    program also counts the new token: in this launch nobody reads the length."""
    head = tl.program_id(0).to(tl.int64)
    parts, dims = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    row = (head // HEADS * num_parts + parts) * HEADS + head % HEADS
    lse = tl.load(lse_ptr + row, mask=parts < num_parts, other=-float("inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))  # the new token's part is never empty
    acc = tl.load(
        acc_ptr + row[:, None] * HEAD_DIM + dims[None, :],
        mask=(lse != -float("inf"))[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    out = tl.sum(weights[:, None] * acc, 0) / tl.sum(weights, 0)
    tl.store(
        out_ptr + head * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM
    )
    if ON_DEVICE:
        if tl.program_id(0) == 0:
            tl.store(seen_ptr, tl.load(seen_ptr) + 1)


class _Plan(NamedTuple):
    """What the launches of one shape are compiled for."""

    num_parts: int
    step: dict[str, int | bool]
    merge: dict[str, int]


@functools.lru_cache(maxsize=1024)
def _plan(
    chip: Chip,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    head_dim: int,
    capacity: int,
    group_size: int,
) -> _Plan:
    """Looked up at every step, so that nothing is worked out twice; rows is B Hkv, heads those that
    share one."""
    tiles = decode_tiles(chip, dtype, heads, head_dim)
    num_parts = 1 + decode_splits(chip, rows, capacity, tiles.block_n)
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_r, block_p = triton.next_power_of_2(heads), triton.next_power_of_2(num_parts)
    block_g = max(1, min(triton.next_power_of_2(group_size), 4096 // (block_r * block_d)))
    step = {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": block_d,
        "BLOCK_R": block_r,
        "BLOCK_G": block_g,
        "VECTOR": tiles.vector,
        "STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
    }
    merge = {
        "BLOCK_P": block_p,
        "BLOCK_D": block_d,
        "num_warps": min(8, max(1, block_p * block_d // 1024)),
    }
    return _Plan(num_parts, step, merge)


def turn_tables(
    rotary: Rotary | None, group_size: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines for `decode_step`, [g, R / 2] in float32: the turn of a group's tokens to
    its middle."""
    return None if rotary is None else _tables(rotary, group_size, device)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Optional[Tensor],
    seen_before: int,
    pad: Tensor,
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    interleaved: bool,
    group_size: int,
    window_size: int,
    ring_size: int,
    sinks: int,
    pooling: str,
    core_heads: str,
    scale: float,
    softcap: float,
    core_bias: float,
    key_scales: Optional[Tensor],
    value_scales: Optional[Tensor],
    cache_dtype: str,
) -> Tensor:
    """`decode_step` in the types that an operator can have; softcap 0 is none."""
    q, k, v = _last_contiguous(q), _last_contiguous(k), _last_contiguous(v)
    batch, num_heads, _, head_dim = q.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    rows, heads = batch * kv_heads, num_heads // kv_heads
    plan = _plan(chip_of(q.device), q.dtype, rows, heads, head_dim, capacity, group_size)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    acc = torch.empty((rows, plan.num_parts, heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, plan.num_parts, heads), dtype=torch.float32, device=q.device)
    on_device = seen is not None
    length = seen if on_device else pad
    with torch.cuda.device_of(q):
        _step_kernel[(rows, plan.num_parts)](
            q,
            k,
            v,
            keys,
            values,
            keys if key_scales is None else key_scales,
            values if value_scales is None else value_scales,
            length,
            pad,
            keys if cos is None else cos,
            keys if sin is None else sin,
            acc,
            lse,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            seen_before,
            kv_heads,
            capacity,
            ring_size,
            group_size,
            window_size,
            scale,
            softcap or 1.0,
            core_bias,
            ON_DEVICE=on_device,
            KIND=cache_dtype,
            SINKS=sinks,
            HEADS=heads,
            WIDTH=heads if core_heads == "query" else 1,
            POOLING=pooling,
            HEAD_DIM=head_dim,
            HALF=0 if cos is None else cos.shape[1],
            INTERLEAVED=interleaved,
            HAS_BIAS=core_bias != 0,
            HAS_SOFTCAP=softcap != 0,
            **plan.step,
        )
        _merge_kernel[(batch * num_heads,)](
            acc,
            lse,
            out,
            length,
            plan.num_parts,
            ON_DEVICE=on_device,
            HEADS=heads,
            HEAD_DIM=head_dim,
            **plan.merge,
        )
    return out


_step_op = torch.library.custom_op(
    "corecontext::decode_step",
    _step,
    mutates_args=("keys", "values", "seen", "key_scales", "value_scales"),
)


@_step_op.register_fake
def _(q, *args):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: int | Tensor,
    pad: Tensor,
    *,
    turn: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    group_size: int,
    window_size: int,
    ring_size: int,
    sinks: int = 0,
    pooling: str,
    core_heads: str,
    scale: float,
    softcap: float | None = None,
    core_bias: float = 0.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    cache_dtype: str = "auto",
) -> Tensor:
    """Append one token to each row of a compact cache and attend from it (docs/math.md, eq. 1 to
    5).

    Args:
        q: [B, H, 1, D], rotary applied. k, v: [B, Hkv, 1, D].
        keys, values: [B, Hkv, C + n + M w, D], contiguous: the token at position p in slot p mod C;
            the first n tokens not there but behind it; then w core tokens of each later group, w =
            r for core_heads="query" and 1 otherwise. The new token and the core tokens of a group
            that it closes are written in place; a core token without a slot is dropped.
        seen: Slots appended so far, padding included; a tensor (0-dim, int64) counts the new one,
            in place.
        pad: [B] in int64, slots of left padding; the new token's position is seen - pad.
        turn, interleaved: From `turn_tables`, and `Rotary.interleaved`.
        ring_size: C >= s + g - 1.
        sinks: First tokens kept raw, n, a multiple of g.
        pooling, core_heads, scale, softcap, core_bias: As in `cca_attention`.
        key_scales, value_scales, cache_dtype: Of codes in 8 bits, [B, Hkv, C + n + M w, 1] in
            float32, and their kind.

    Returns:
        [B, H, 1, D] in the dtype of q. Sums are float32 and the same from run to run. Each visible
        entry is read once.
    """
    cos, sin = (None, None) if turn is None else turn
    on_device = isinstance(seen, Tensor)
    step = (
        _step_op if torch.compiler.is_compiling() else _step
    )  # an operator's dispatch costs more than the launches
    return step(
        q,
        k,
        v,
        keys,
        values,
        seen if on_device else None,
        0 if on_device else seen,
        pad,
        cos,
        sin,
        interleaved,
        group_size,
        window_size,
        ring_size,
        sinks,
        pooling,
        core_heads,
        float(scale),
        float(softcap or 0),
        float(core_bias),
        key_scales,
        value_scales,
        cache_dtype,
    )
