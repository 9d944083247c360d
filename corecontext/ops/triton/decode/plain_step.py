"""One decoding step of the compact cache in two Triton launches: store, pool and attend in parts;
merge the parts.

A step is bound by reading the cache once, so the entries of each KV head are shared out evenly
among several programs (its parts), by the length that is read on the device: the launch does not
depend on it and can be captured in a graph. Storing and pooling need no launch of their own,
because no other program of the step reads what they write: the new token comes from the arguments,
its ring slot held a token that no query sees any more, and the core token of the group that it
closes is not visible yet, for (t + 1 - s) // g < (t + 1) / g. The file is long because both
launches and their formats in 8 bits belong together.

Where the cache is in 8 bits, codes become numbers tile by tile; the new token is rounded first,
then attended to and pooled as it was rounded, as everywhere (cache/eight_bit.py). The bits of fp8
(e4m3), moved to where float16 has them, are its numbers over 256, on chips without fp8 too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Slots, Spec
from corecontext.ops.triton.launch import contiguous_rows, launch, power_of_2
from corecontext.ops.triton.pool.group_tile import (
    load_tables,
    pool_keys,
    rotation_pairs,
    token_scores,
)
from corecontext.ops.triton.primitives import (
    TINY,
    dot,
    log2_scores,
    softmax_step,
    tile_mask,
    visible_cores,
)
from corecontext.ops.triton.tiles import Chip, chip_of, decode_splits, decode_tiles


@triton.jit
def tile_products(q, k, VECTOR: tl.constexpr):
    """Return rows of q times rows of k, [rows, entries] in float32. Few float32 rows would spill as
    a matrix product."""
    if VECTOR:
        products = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2)
    else:
        products = dot(q, tl.trans(k))
    return products


@triton.jit
def weighted_sum(weights, v, VECTOR: tl.constexpr):
    """Return weighted sums of the rows of v, [rows, columns] in float32."""
    if VECTOR:
        # Not weights * v: a sum of such products over 16 rows is compiled as a product in TF32.
        mixed = tl.sum(tl.fma(weights[:, :, None], v.to(tl.float32)[None, :, :], 0.0), 1)
    else:
        mixed = dot(weights.to(v.dtype), v)
    return mixed


@triton.jit
def _dequantize(codes, KIND: tl.constexpr):
    """Dequantize codes without the scale. fp8 comes out 256 times too small; `_load_scales`
    compensates."""
    if KIND == "fp8":
        wide = codes.to(tl.int16)
        codes = ((wide & -32768) | ((wide & 127) << 7)).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def _load_scales(scale_ptr, entries, mask, KIND: tl.constexpr):
    """Load the scales of some entries, for the results of `_dequantize`."""
    scales = tl.load(scale_ptr + entries, mask=mask, other=0.0)
    if KIND == "fp8":
        scales = scales * 256.0
    return scales


@triton.jit
def _scale_of(highest, KIND: tl.constexpr):
    """Return the scale of vectors by their largest magnitudes."""
    if KIND == "fp8":
        scale = tl.div_rn(highest, 448.0)
    else:
        scale = tl.div_rn(highest, 127.0)
    return scale


@triton.jit
def _round_to_codes(x, scale, KIND: tl.constexpr):
    """Divide numbers in float32 by their scale and round to those that have codes, ties to even.
    Adding and subtracting a large number rounds to its spacing."""
    x = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
    if KIND == "fp8":
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        # mutant decoding: fp8 rounds ties up
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    else:
        x = tl.minimum(tl.maximum((x + 12582912.0) - 12582912.0, -127.0), 127.0)
    return x


@triton.jit
def _codes(x, KIND: tl.constexpr):
    """Return the codes of numbers from `_round_to_codes`."""
    if KIND == "fp8":
        bits = (x * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
        x = ((bits & -32768) >> 8) | ((bits >> 7) & 127)
    return x.to(tl.int8)


@triton.jit
def _row_scales(x, KIND: tl.constexpr):
    """Return the scale of each row of x [rows, columns], [rows, 1]."""
    return _scale_of(tl.max(tl.abs(x), 1), KIND)[:, None]


@triton.jit
def _load_group(
    ring, slot, rows, cols, ring_size, group_size, HEAD_DIM: tl.constexpr, KIND: tl.constexpr
):
    """Load tokens of the group that ends in `slot`, [1, rows, columns] in float32, 0 outside. The
    last one comes from the arguments: another thread may still be writing its slot.

    Args:
        ring: Pointers to the buffer, its scales and the new token, and the new token's scale.
    """
    ring_ptr, scale_ptr, new_ptr, new_scale = ring
    slots = slot - (group_size - 1) + rows
    slots = tl.where(slots < 0, slots + ring_size, slots)
    in_dims = (cols < HEAD_DIM)[None, None, :]
    at = ring_ptr + slots.to(tl.int64)[None, :, None] * HEAD_DIM + cols[None, None, :]
    inside = rows < group_size - 1
    old = tl.load(at, mask=inside[None, :, None] & in_dims, other=0.0)
    new = tl.load(new_ptr + cols[None, None, :], mask=in_dims, other=0.0)
    if KIND != "auto":
        scales = _load_scales(scale_ptr, slots, inside, KIND)
        old = _dequantize(old, KIND).to(tl.float32) * scales[None, :, None]
        new = _round_to_codes(new.to(tl.float32), new_scale, KIND) * new_scale
    return tl.where((rows == group_size - 1)[None, :, None], new, old).to(tl.float32)


@triton.jit
def _pool_group(
    q,
    k_ring,
    v_ring,
    tables,
    mass_ptr,
    place,
    scale,
    softcap,
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the WIDTH core tokens of the group that the new token closes (docs/math.md, eq. 1 to
    3), and their masses (eq. 14), reading the group in blocks: once for the softmax's sums, once
    for the weighted tokens.

    Args:
        k_ring, v_ring: As `ring` of `_load_group`.
        tables: Pointers to cosines and sines.
        place: Number of the core token, slot of the new token, ring_size and group_size.
    """
    core, slot, ring_size, group_size = place
    cos_ptr, sin_ptr = tables
    BLOCK_W: tl.constexpr = BLOCK_R if WIDTH > 1 else 1
    cols, pair, partner, sign = rotation_pairs(BLOCK_D, HALF, INTERLEAVED)

    # The maximum and the sum of each query head's softmax.
    running_max = tl.full([BLOCK_R], -float("inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, group_size, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        k = _load_group(k_ring, slot, rows, cols, ring_size, group_size, HEAD_DIM, KIND)
        z, _ = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
        new_max = tl.maximum(running_max, tl.max(z, 1))
        fade = tl.exp(running_max - new_max)
        running_sum = running_sum * fade + tl.sum(tl.exp(z - new_max[:, None]), 1)
        running_max = new_max

    # Sums of the tokens by each head's weights, or by their mean.
    heads = tl.arange(0, BLOCK_R)
    core_k = tl.zeros([BLOCK_W, BLOCK_D], tl.float32)
    core_v = tl.zeros([BLOCK_W, BLOCK_D], tl.float32)
    mass = tl.zeros([BLOCK_W], tl.float32)
    for start in range(0, group_size, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        cos, sin = load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
        k = _load_group(k_ring, slot, rows, cols, ring_size, group_size, HEAD_DIM, KIND)
        v = _load_group(v_ring, slot, rows, cols, ring_size, group_size, HEAD_DIM, KIND)
        z, _ = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
        weights = tl.exp(z - running_max[:, None]) / running_sum[:, None]
        if WIDTH == 1:
            weights = tl.where((heads < HEADS)[:, None], weights, 0.0)
            weights = tl.sum(weights, 0)[None, :] / HEADS
        core_k += pool_keys(weights, k, (cos, sin, partner, sign), BLOCK_W, BLOCK_D, HALF)
        core_v += tl.sum(weights[:, :, None] * v, 1)
        if HAS_MASS:
            # mutant mass: of the weights' last block alone, decoding
            mass -= tl.sum(weights * tl.log(tl.maximum(weights, TINY)), 1)

    # Store them behind the ring and the first tokens.
    k_buffer, k_scales, _, _ = k_ring
    v_buffer, v_scales, _, _ = v_ring
    wide = tl.arange(0, BLOCK_W)
    entries = core.to(tl.int64) * WIDTH + (ring_size + SINKS) + wide
    at = entries[:, None] * HEAD_DIM + cols[None, :]
    in_dims = (cols < HEAD_DIM)[None, :]
    mask = (wide < WIDTH)[:, None] & in_dims
    if HAS_MASS:
        tl.store(mass_ptr + entries, mass, mask=wide < WIDTH)
    if KIND != "auto":
        core_k = tl.where(in_dims, core_k, 0.0)
        core_v = tl.where(in_dims, core_v, 0.0)
        k_scale = _row_scales(core_k, KIND)
        v_scale = _row_scales(core_v, KIND)
        tl.store(k_scales + entries[:, None], k_scale, mask=(wide < WIDTH)[:, None])
        tl.store(v_scales + entries[:, None], v_scale, mask=(wide < WIDTH)[:, None])
        tl.store(k_buffer + at, _codes(_round_to_codes(core_k, k_scale, KIND), KIND), mask=mask)
        tl.store(v_buffer + at, _codes(_round_to_codes(core_v, v_scale, KIND), KIND), mask=mask)
    else:
        tl.store(k_buffer + at, core_k.to(k_buffer.dtype.element_ty), mask=mask)
        tl.store(v_buffer + at, core_v.to(v_buffer.dtype.element_ty), mask=mask)


@triton.jit
def _load_marks(marks_ptr, entries, end, first_core, WIDTH: tl.constexpr):
    """Return the marks of the groups of core tokens, 0 for entries before them and behind."""
    is_core = (entries >= first_core) & (entries < end)
    return tl.load(marks_ptr + (entries - first_core) // WIDTH, mask=is_core, other=0)


@triton.jit
def attend_entries(
    q,
    buffers,
    begin,
    end,
    place,
    scale,
    softcap,
    bias,
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to buffer entries begin .. end-1 by an online softmax: ring slots whose token is at
    most `reach` positions old, first tokens before the new one, then core tokens of groups without
    a mark. Unseen entries are not read, so their contents have no effect.

    Args:
        buffers: Pointers to keys, values, their scales, the core tokens' masses and marks.
        place: Position and slot of the new token, reach and ring_size.
    """
    keys_ptr, values_ptr, ks_ptr, vs_ptr, mass_ptr, marks_ptr = buffers
    position, slot, reach, ring_size = place
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    tile = begin.to(tl.int64) * HEAD_DIM + offs[:, None] * HEAD_DIM + dims[None, :]
    k_tile = keys_ptr + tile
    v_tile = values_ptr + tile
    if HAS_MARKS:  # those of the next tile are on the way while this one is used
        marks = _load_marks(marks_ptr, begin + offs, end, ring_size + SINKS, WIDTH)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        # Which entries are seen: by age in the ring (0 is the new token, counted apart), by
        # position among the first tokens, all core tokens before `end`.
        entries = start + offs
        is_core = entries >= ring_size + SINKS
        age = slot - entries
        age = tl.where(age < 0, age + ring_size, age)
        seen = (age > 0) & (age <= reach)
        if SINKS > 0:
            seen = tl.where(entries < ring_size, seen, entries - ring_size < position)
        seen = (entries < end) & (is_core | seen)
        mask = seen[:, None] & (dims < HEAD_DIM)[None, :]

        k = tl.load(k_tile, mask=mask, other=0.0)
        v = tl.load(v_tile, mask=mask, other=0.0)
        if KIND != "auto":
            k = _dequantize(k, KIND).to(q.dtype)
            scales = _load_scales(vs_ptr, entries, seen, KIND)[:, None]
            v = (_dequantize(v, KIND).to(tl.float32) * scales).to(q.dtype)
        products = tile_products(q, k, VECTOR)
        if KIND != "auto":
            products = products * _load_scales(ks_ptr, entries, seen, KIND)[None, :]
        shift = 0.0
        if HAS_BIAS:
            shift = tl.where(is_core, bias, 0.0)[None, :]
        if HAS_MASS:
            # mutant mass: that of the entry before, in a fused step
            mass = tl.load(mass_ptr + entries, mask=seen & is_core, other=0.0)
            shift += mass[None, :]
        scores, _ = log2_scores(products, scale, shift, softcap, HAS_SOFTCAP)
        visible = seen[None, :]
        if WIDTH > 1:  # query head i sees the core tokens made for it
            core_entry = (entries - ring_size - SINKS)[None, :]
            visible = visible & ((core_entry < 0) | (core_entry % WIDTH == heads[:, None]))
        if HAS_MARKS:
            mark = marks
            marks = _load_marks(marks_ptr, entries + BLOCK_N, end, ring_size + SINKS, WIDTH)
            # mutant fetch: a fetched group keeps its core token, in a step
            visible = visible & (mark == 0)[None, :]
        scores = tl.where(visible, scores, -float("inf"))
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, True
        )
        acc = acc * fade[:, None] + weighted_sum(weights, v, VECTOR)
        k_tile += BLOCK_N * HEAD_DIM
        v_tile += BLOCK_N * HEAD_DIM
    return acc, running_sum, running_max


@triton.jit
def append_token(
    tokens,
    buffers,
    tables,
    partial,
    place,
    scale,
    softcap,
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the new token, pool the group that it closes, and write the result of attention to it
    alone.

    Args:
        tokens: Pointer to q, the stride of its heads, pointers to k and v.
        buffers: As of `attend_entries`.
        partial: Pointers to this program's output and log-sum-exp.
        place: Position and slot of the new token, capacity, ring_size and group_size.
    """
    q_ptr, q_stride, k_ptr, v_ptr = tokens
    keys_ptr, values_ptr, ks_ptr, vs_ptr, mass_ptr, _ = buffers
    acc_ptr, lse_ptr = partial
    position, slot, capacity, ring_size, group_size = place
    dims = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, BLOCK_R)
    mask = tile_mask(heads, HEADS, dims, HEAD_DIM)
    in_dims = dims < HEAD_DIM
    q = tl.load(q_ptr + heads[:, None] * q_stride + dims[None, :], mask=mask, other=0.0)
    q = q.to(tl.float32)
    k = tl.load(k_ptr + dims, mask=in_dims, other=0.0)
    v = tl.load(v_ptr + dims, mask=in_dims, other=0.0)

    # Store the new token, rounded to codes in 8 bits; padding has no slot.
    entry = slot
    if SINKS > 0:  # the first tokens do not enter the ring
        entry = tl.where(position < SINKS, ring_size + tl.maximum(position, 0), slot)
    at = entry.to(tl.int64) * HEAD_DIM + dims
    stored = tl.where(position >= 0, HEAD_DIM, 0)
    new_ks = 0.0
    new_vs = 0.0
    if KIND != "auto":
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        new_ks = _scale_of(tl.max(tl.abs(k), 0), KIND)
        new_vs = _scale_of(tl.max(tl.abs(v), 0), KIND)
        k = _round_to_codes(k, new_ks, KIND)
        v = _round_to_codes(v, new_vs, KIND)
        tl.store(keys_ptr + at, _codes(k, KIND), mask=dims < stored)
        tl.store(values_ptr + at, _codes(v, KIND), mask=dims < stored)
        tl.store(ks_ptr + entry, new_ks, mask=position >= 0)
        tl.store(vs_ptr + entry, new_vs, mask=position >= 0)
        k = k * new_ks
        v = v * new_vs
    else:
        tl.store(keys_ptr + at, k, mask=dims < stored)
        tl.store(values_ptr + at, v, mask=dims < stored)

    # Attend to it alone: its value, with its score for a log-sum-exp.
    products = tl.sum(q * k.to(tl.float32)[None, :], 1)
    scores, _ = log2_scores(products, scale, 0.0, softcap, HAS_SOFTCAP)
    tl.store(lse_ptr + heads, scores, mask=heads < HEADS)
    value = tl.zeros([BLOCK_R, 1], tl.float32) + v.to(tl.float32)[None, :]
    tl.store(acc_ptr + heads[:, None] * HEAD_DIM + dims[None, :], value, mask=mask)

    if POOLS:
        core = tl.maximum(position - SINKS, 0) // group_size
        closes = ((position + 1) % group_size == 0) & (position >= SINKS)
        if closes & ((core + 1) * WIDTH <= capacity - ring_size - SINKS):
            _pool_group(
                q,
                (keys_ptr, ks_ptr, k_ptr, new_ks),
                (values_ptr, vs_ptr, v_ptr, new_vs),
                tables,
                mass_ptr,
                (core, slot, ring_size, group_size),
                scale,
                softcap,
                KIND,
                SINKS,
                HEADS,
                WIDTH,
                HEAD_DIM,
                HALF,
                INTERLEAVED,
                HAS_MASS,
                HAS_SOFTCAP,
                BLOCK_R,
                BLOCK_G,
                BLOCK_D,
            )


@triton.jit
def store_part(partial, sums, heads, dims, mask, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Write a part of the softmax: its output and log-sum-exp, -inf and no output where it sees
    no entry.

    Args:
        partial: As in `append_token`.
        sums: Weighted values, sum of the weights and maximum, of an online softmax.
        mask: Which elements of the output exist.
    """
    acc_ptr, lse_ptr = partial
    acc, running_sum, running_max = sums
    any_seen = running_max != -float("inf")
    running_sum = tl.where(any_seen, running_sum, 1.0)
    tl.store(lse_ptr + heads, running_max + tl.log2(running_sum), mask=heads < HEADS)
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(acc_ptr + at, acc / running_sum[:, None], mask=mask & any_seen[:, None])


@triton.jit
def num_entries(place, SINKS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the entries that a step reads, visible or not, and the groups visible as core tokens.

    Args:
        place: Position of the new token, capacity, ring_size, group_size and window_size.
    """
    position, capacity, ring_size, group_size, window_size = place
    # Before there are core tokens, later ring slots were never written.
    cores = visible_cores(position - SINKS, group_size, window_size)
    length = tl.where(cores > 0, cores * WIDTH + ring_size, tl.minimum(position, ring_size))
    if SINKS > 0:
        behind = tl.where(cores > 0, cores * WIDTH + SINKS, tl.minimum(position, SINKS))
        length = ring_size + behind
    return tl.minimum(length, capacity), cores


@triton.jit
def _attend_share(
    queries,
    buffers,
    partial,
    share_of,
    place,
    scale,
    softcap,
    bias,
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from all heads to one of several even shares of the entries, at least a tile.

    Args:
        queries: Pointer to q and the stride of its heads.
        buffers, partial: As in `append_token`.
        share_of: Number of the share, and how many there are.
        place: Position and slot of the new token, capacity, ring_size, group_size, window_size.
    """
    q_ptr, q_stride = queries
    share, num_shares = share_of
    position, slot, capacity, ring_size, group_size, window_size = place
    dims = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, BLOCK_M)
    mask = tile_mask(heads, HEADS, dims, HEAD_DIM)
    q = tl.load(q_ptr + heads[:, None] * q_stride + dims[None, :], mask=mask, other=0.0)
    sizes = (position, capacity, ring_size, group_size, window_size)
    length, cores = num_entries(sizes, SINKS, WIDTH)
    size = tl.maximum((length + num_shares - 1) // num_shares, BLOCK_N)
    begin = share * size
    sums = attend_entries(
        q,
        buffers,
        begin,
        tl.minimum(begin + size, length),
        (position, slot, position - SINKS - cores * group_size, ring_size),
        scale,
        softcap,
        bias,
        KIND,
        SINKS,
        WIDTH,
        HAS_BIAS,
        HAS_MASS,
        False,  # no marks
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        VECTOR,
        STAGES,
    )
    store_part(partial, sums, heads, dims, mask, HEADS, HEAD_DIM)


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
    mass_ptr,
    seen_ptr,
    pad_ptr,
    cos_ptr,
    sin_ptr,
    acc_ptr,
    lse_ptr,
    seen,
    kv_heads,
    capacity,
    ring_size,
    group_size,
    window_size,
    scale,
    softcap,
    bias,
    q_strides,
    k_strides,
    v_strides,
    ON_DEVICE: tl.constexpr,
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Append the new tokens and attend in parts.

    Grid: (B Hkv, 1 + shares). The first program of a KV head stores its new token and pools the
    group that it closes, where POOLS; each other one reads an even share of the visible entries
    once, for all HEADS query heads. All write a part of the softmax: the normalised output [HEADS,
    D] in float32 and its log-sum-exp in units of log 2; -inf and no output where no entry is seen.
    """
    row = tl.program_id(0)
    program = tl.program_id(1)
    # mutant offsets: 32 bits in a decoding step
    n = row.to(tl.int64)
    batch = (row // kv_heads).to(tl.int64)
    head = (row % kv_heads).to(tl.int64)
    if ON_DEVICE:
        seen = tl.load(seen_ptr)
    position = (seen - tl.load(pad_ptr + batch)).to(tl.int32)
    slot = tl.maximum(position, 0) % ring_size
    q_ptr += batch * q_strides[0] + head * HEADS * q_strides[1]
    keys_ptr += n * capacity * HEAD_DIM
    values_ptr += n * capacity * HEAD_DIM
    ks_ptr += n * capacity  # not read unless in 8 bits
    vs_ptr += n * capacity
    mass_ptr += n * capacity  # not read without masses
    first = (n * tl.num_programs(1) + program) * HEADS
    acc_ptr += first * HEAD_DIM
    lse_ptr += first
    buffers = (keys_ptr, values_ptr, ks_ptr, vs_ptr, mass_ptr, keys_ptr)
    partial = (acc_ptr, lse_ptr)
    if program == 0:
        k_ptr += batch * k_strides[0] + head * k_strides[1]
        v_ptr += batch * v_strides[0] + head * v_strides[1]
        append_token(
            (q_ptr, q_strides[1], k_ptr, v_ptr),
            buffers,
            (cos_ptr, sin_ptr),
            partial,
            (position, slot, capacity, ring_size, group_size),
            scale,
            softcap,
            KIND,
            SINKS,
            HEADS,
            WIDTH,
            POOLS,
            HEAD_DIM,
            HALF,
            INTERLEAVED,
            HAS_MASS,
            HAS_SOFTCAP,
            BLOCK_R,
            BLOCK_G,
            BLOCK_D,
        )
    else:
        _attend_share(
            (q_ptr, q_strides[1]),
            buffers,
            partial,
            (program - 1, tl.num_programs(1) - 1),
            (position, slot, capacity, ring_size, group_size, window_size),
            scale,
            softcap,
            bias,
            KIND,
            SINKS,
            HEADS,
            WIDTH,
            HAS_BIAS,
            HAS_MASS,
            HAS_SOFTCAP,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            VECTOR,
            STAGES,
        )


@triton.jit
def merge_columns(
    partials,
    out_ptr,
    num_parts,
    removed,
    dims,
    REMOVES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Merge the parts of a query head into one softmax (docs/math.md, eq. 8), some columns of it,
    with sums in float32.

    Args:
        partials: Pointers to the head's first output and log-sum-exp; the others HEADS heads apart.
        out_ptr: Where the head's output begins.
        removed: With REMOVES, the part to be taken out of those behind it, which count it.
    """
    acc_ptr, lse_ptr = partials
    number = tl.arange(0, BLOCK_P)
    lse = tl.load(lse_ptr + number * HEADS, mask=number < num_parts, other=-float("inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))  # the new token's part is never empty
    if REMOVES:
        counted = tl.sum(tl.where(number > removed, weights, 0.0), 0)
        # mutant fetch: chosen groups keep their core tokens in a step's sums
        weights = tl.where(number == removed, -weights, weights)
        rest = tl.sum(tl.where(number >= removed, weights, 0.0), 0)
        # A rest that rounding alone may have left is dropped.
        kept = tl.where(rest > counted * 1e-6, weights, 0.0)
        weights = tl.where(number < removed, weights, kept)
    acc = tl.load(
        acc_ptr + number[:, None] * (HEADS * HEAD_DIM) + dims[None, :],
        mask=(lse != -float("inf"))[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    out = tl.sum(weights[:, None] * acc, 0) / tl.sum(weights, 0)
    tl.store(out_ptr + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


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
    """Merge the parts of each query head into one softmax (docs/math.md, eq. 8).

    Grid: (B H,). A program reads the parts of its head and writes its output, with sums in float32.
    The first one also counts the new token: no program of this launch reads the length.
    """
    head = tl.program_id(0).to(tl.int64)
    first = head // HEADS * num_parts * HEADS + head % HEADS
    dims = tl.arange(0, BLOCK_D)
    partials = (acc_ptr + first * HEAD_DIM, lse_ptr + first)
    out_ptr += head * HEAD_DIM
    merge_columns(partials, out_ptr, num_parts, 0, dims, False, HEADS, HEAD_DIM, BLOCK_P)
    if ON_DEVICE:
        if tl.program_id(0) == 0:
            tl.store(seen_ptr, tl.load(seen_ptr) + 1)


class _Plan(NamedTuple):
    """Hold the constants that the launches of one shape are compiled for."""

    num_parts: int
    step: dict[str, int | bool]
    merge: dict[str, int]


@functools.lru_cache(maxsize=1024)
def step_plan(
    chip: Chip,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    head_dim: int,
    capacity: int,
    group_size: int,
) -> _Plan:
    """Return the plan of a shape, looked up at every step; rows is B Hkv, heads those that share
    one."""
    tiles = decode_tiles(chip, dtype, heads, head_dim)
    num_parts = 1 + decode_splits(chip, rows, capacity, tiles.block_n)
    block_d = max(16, power_of_2(head_dim))
    block_r, block_p = power_of_2(heads), power_of_2(num_parts)
    block_g = max(1, min(power_of_2(group_size), 4096 // (block_r * block_d)))
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


def _decode(q: Tensor, k: Tensor, v: Tensor, slots: Slots, spec: Spec, core_bias: float) -> Tensor:
    """Launch both kernels of a step."""
    q, k, v = map(contiguous_rows, (q, k, v))
    batch, num_heads, _, head_dim = q.shape
    keys, values = slots.keys, slots.values
    kv_heads, capacity = keys.shape[1:3]
    rows = batch * kv_heads
    heads = num_heads // kv_heads
    plan = step_plan(chip_of(q.device), q.dtype, rows, heads, head_dim, capacity, spec.group_size)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    acc = torch.empty((rows, plan.num_parts, heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, plan.num_parts, heads), dtype=torch.float32, device=q.device)
    # Kernels do not touch the tensors that stand in for missing ones.
    on_device = isinstance(slots.seen, Tensor)
    if on_device:
        length = slots.seen
        seen = 0
    else:
        length = slots.pad
        seen = slots.seen
    cos, sin = slots.rotation or (keys, keys)
    key_scales = keys if slots.key_scales is None else slots.key_scales
    value_scales = values if slots.value_scales is None else slots.value_scales
    masses = keys if slots.masses is None else slots.masses
    with torch.cuda.device_of(q):
        launch(
            _step_kernel,
            (rows, plan.num_parts),
            (
                *(q, k, v, keys, values, key_scales, value_scales, masses, length, slots.pad),
                *(cos, sin, acc, lse, seen, kv_heads, capacity, slots.ring_size, spec.group_size),
                *(spec.window_size, float(spec.scale), float(spec.softcap or 1.0)),
                float(core_bias),
            ),
            (q.stride()[:2], k.stride()[:2], v.stride()[:2]),
            ON_DEVICE=on_device,
            KIND=slots.cache_dtype,
            SINKS=spec.sinks,
            HEADS=heads,
            WIDTH=heads if spec.core_heads == "query" else 1,
            POOLS=capacity > slots.ring_size + spec.sinks,
            HEAD_DIM=head_dim,
            HALF=0 if slots.rotation is None else cos.shape[1],
            INTERLEAVED=spec.rotary is not None and spec.rotary.interleaved,
            HAS_BIAS=core_bias != 0,
            HAS_MASS=slots.masses is not None,
            HAS_SOFTCAP=spec.softcap is not None,
            **plan.step,
        )
        launch(
            _merge_kernel,
            (batch * num_heads,),
            (acc, lse, out, length, plan.num_parts),
            ON_DEVICE=on_device,
            HEADS=heads,
            HEAD_DIM=head_dim,
            **plan.merge,
        )
    return out


def slots_of(
    buffers: list[Tensor],
    seen: Tensor | None,
    pad: Tensor,
    tables: list[Tensor],
    sizes: list[int],
    factors: list[float],
    cache_dtype: str,
) -> tuple[Slots, Spec, float]:
    """Return the slots, the settings and the core bias of what `arguments_of` returned."""
    keys, values, *scales = buffers
    masses = scales.pop() if len(scales) % 2 else None
    group_size, window_size, sink_size, ring_size, per_query, interleaved, length = sizes
    scale, softcap, core_bias = factors
    core_heads = "query" if per_query else "kv"
    seen = length if seen is None else seen
    tables = tuple(tables) or None
    slots = Slots(
        keys, values, seen, pad, ring_size, tables, *(scales or (None, None)), cache_dtype, masses
    )
    spec = Spec(group_size, window_size, scale, None, sink_size, core_heads, softcap or None)
    if tables:  # only the layout of pairs counts beside them
        spec = spec.replace(rotary=Rotary(tables[0], bool(interleaved)))
    return slots, spec, core_bias


def arguments_of(slots: Slots, spec: Spec, core_bias: float) -> list[Any]:
    """Return the arguments of a step as an operator of a graph takes them, as `_decode_op`."""
    optional = (slots.key_scales, slots.value_scales, slots.masses)
    on_device = isinstance(slots.seen, Tensor)
    sizes = (spec.group_size, spec.window_size, spec.sink_size, slots.ring_size)
    # mutant decoding: a compiled step takes interleaved pairs for halves
    choices = (spec.core_heads == "query", spec.rotary is not None and spec.rotary.interleaved)
    return [
        [slots.keys, slots.values, *(x for x in optional if x is not None)],
        slots.seen if on_device else None,
        slots.pad,
        list(slots.rotation or ()),
        [int(x) for x in (*sizes, *choices, 0 if on_device else slots.seen)],
        [float(spec.scale), float(spec.softcap or 0), float(core_bias)],
        slots.cache_dtype,
    ]


@torch.library.custom_op("corecontext::decode_step", mutates_args=("buffers", "seen"))
def _decode_op(
    tokens: list[Tensor],
    buffers: list[Tensor],
    seen: Optional[Tensor],  # noqa: UP045 (torch 2.9 reads schemas in this form)
    pad: Tensor,
    tables: list[Tensor],
    sizes: list[int],
    factors: list[float],
    cache_dtype: str,
) -> Tensor:
    """Run `_decode` as one operator of a graph.

    Args:
        buffers: Keys, values, in 8 bits the scales of both, and masses where there are any.
        seen: `Slots.seen` where it is counted on the device, else the last of `sizes`.
        tables: `Slots.rotation`, or empty.
    """
    return _decode(*tokens, *slots_of(buffers, seen, pad, tables, sizes, factors, cache_dtype))


@_decode_op.register_fake
def _(tokens, *args):
    q = tokens[0]
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def decode_step(
    q: Tensor, k: Tensor, v: Tensor, slots: Slots, spec: Spec, core_bias: float = 0.0
) -> Tensor:
    """Append one token to each row of a compact cache and attend from it (docs/math.md, eq. 1 to
    5).

    Args:
        q: [B, H, 1, D], rotary applied.
        k, v: [B, Hkv, 1, D].
        slots: The new token and the core tokens of a group that it closes are written in place; a
            core token without a slot is dropped. A tensor `seen` counts the new token, in place.

    Returns:
        [B, H, 1, D] in the dtype of q. Sums are float32 and the same from run to run. Each visible
        entry is read once.
    """
    if not torch.compiler.is_compiling():
        return _decode(q, k, v, slots, spec, core_bias)
    # An operator's dispatch costs more than the launches, so only graphs have it.
    return _decode_op([q, k, v], *arguments_of(slots, spec, core_bias))
