"""Read and write an index in low bits in a decoding step: the scores of all visible groups, and the
index of a group (`ops/fetch/low_bits.py`).

A byte holds EACH = 8 / BITS codes of neighbouring columns. The i-th codes of all bytes, of columns
i, i + EACH and so on, make one matrix product with the same columns of the rotated query, so that
no element moves between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.decode import tile_products, weighted_sum
from corecontext.ops.triton.primitives import (
    LOG2E,
    TINY,
    tile_mask,
    visible_cores,
)

# One register of four bytes becomes 16 levels in bfloat16, or float16, in eight: codes select two
# bytes each from tables of four, which `prmt` looks up four at a time.
_TABLES = {"bf16": (0x3F3EBEBF, 0xC1E8E8C1), "fp16": (0x3E37B7BE, 0x08404008)}
_LEVELS_ASM = """
{{
  .reg .b32 s, t, hi, lo, x;
  and.b32 s, $8, 0x33333333;
  shr.u32 t, $8, 2;
  and.b32 t, t, 0x33333333;
{lookups}
}}
"""


def _levels_asm(dtype: str) -> str:
    """Return the instructions for a dtype.

    A nibble of s has the first or third code of a byte, one of t the second or fourth: outputs 0
    and 2, then 1 and 3.
    """
    high, low = _TABLES[dtype]
    lines = []
    for source, outputs in (("s", (0, 2)), ("t", (1, 3))):
        for half in (0, 1):
            if half:
                lines.append(f"shr.u32 {source}, {source}, 16;")
            lines.append(f"prmt.b32 hi, {high:#x}, 0, {source};")
            lines.append(f"prmt.b32 lo, {low:#x}, 0, {source};")
            # Bytes 0 and 2 of both are the first code of two bytes, bytes 1 and 3 the second.
            lines.append(f"prmt.b32 ${2 * outputs[0] + half}, lo, hi, 0x6240;")
            lines.append(f"prmt.b32 ${2 * outputs[1] + half}, lo, hi, 0x7351;")
    return _LEVELS_ASM.format(lookups="\n".join("  " + line for line in lines))


_BF16_ASM = tl.constexpr(_levels_asm("bf16"))
_FP16_ASM = tl.constexpr(_levels_asm("fp16"))
_REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r")


@triton.jit
def _level(codes, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the level of each code in float32; LEVELS are those above 0."""
    UPPER: tl.constexpr = 2 ** (BITS - 1)
    is_upper = codes >= UPPER
    distance = tl.where(is_upper, codes - UPPER, UPPER - 1 - codes)
    level = tl.zeros(codes.shape, tl.float32) + LEVELS[0]
    for i in tl.static_range(1, UPPER):
        level = tl.where(distance == i, LEVELS[i], level)
    return tl.where(is_upper, level, -level)


@triton.jit
def _byte_products(
    queries,
    packed,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    ASM: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return the products of keys with rotated queries, [keys, rows], from bytes [keys, bytes].

    Args:
        queries: For each i, the columns i, i + EACH, ... of the queries.
    """
    EACH: tl.constexpr = 8 // BITS
    kind: tl.constexpr = queries[0].dtype
    if ASM:
        if kind == tl.bfloat16:
            levels = tl.inline_asm_elementwise(
                _BF16_ASM,
                _REGISTERS,
                [packed],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                True,
                4,
            )
        else:
            levels = tl.inline_asm_elementwise(
                _FP16_ASM,
                _REGISTERS,
                [packed],
                (tl.float16, tl.float16, tl.float16, tl.float16),
                True,
                4,
            )
        total = tile_products(levels[0], queries[0], False)
        for i in tl.static_range(1, EACH):
            total += tile_products(levels[i], queries[i], False)
    else:
        wide = packed.to(tl.int32)
        level = _level(wide % 2**BITS, BITS, LEVELS).to(kind)
        total = tile_products(level, queries[0], VECTOR)
        for i in tl.static_range(1, EACH):
            level = _level((wide >> (BITS * i)) % 2**BITS, BITS, LEVELS).to(kind)
            total += tile_products(level, queries[i], VECTOR)
    return total


@triton.jit
def _rotated(
    x,
    rotation_ptr,
    first,
    EACH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return the columns first, first + EACH, ... of x [rows, D] after the rotation, in float32."""
    dims = tl.arange(0, BLOCK_D)
    cols = tl.arange(0, BLOCK_C) * EACH + first
    mask = tile_mask(dims, HEAD_DIM, cols, HEAD_DIM)
    rotation = tl.load(
        rotation_ptr + dims[:, None] * HEAD_DIM + cols[None, :], mask=mask, other=0.0
    )
    return weighted_sum(x, rotation, VECTOR)


@triton.jit
def _rotated_all(
    q,
    rotation_ptr,
    EACH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return `_rotated` of each first column, in the dtype of q."""
    r = rotation_ptr
    x0 = _rotated(q, r, 0, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR).to(q.dtype)
    x1 = _rotated(q, r, 1, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR).to(q.dtype)
    rotated = (x0, x1)
    if EACH > 2:
        x2 = _rotated(q, r, 2, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR).to(q.dtype)
        x3 = _rotated(q, r, 3, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR).to(q.dtype)
        rotated = (x0, x1, x2, x3)
    if EACH > 4:
        x4 = _rotated(q, r, 4, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR).to(q.dtype)
        x5 = _rotated(q, r, 5, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR).to(q.dtype)
        x6 = _rotated(q, r, 6, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR).to(q.dtype)
        x7 = _rotated(q, r, 7, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR).to(q.dtype)
        rotated = (x0, x1, x2, x3, x4, x5, x6, x7)
    return rotated


@triton.jit(do_not_specialize=["seen", "kv_heads", "num_groups", "group_size", "window_size"])
def fetch_scores_kernel(
    q_ptr,
    rotation_ptr,
    codes_ptr,
    scales_ptr,
    scores_ptr,
    lse_ptr,
    seen_ptr,
    pad_ptr,
    seen,
    kv_heads,
    num_groups,
    group_size,
    window_size,
    scale,
    q_strides,
    ON_DEVICE: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALES: tl.constexpr,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the index scores of the visible groups for each query head, [B H, M], and the
    log-sum-exp of each program's share of them, [B Hkv, programs, HEADS], in units of log 2.

    Grid: (B Hkv, programs). A score is the log-sum-exp of the scores of a group's PARTS keys; that
    all parts have the same size, and the centre, shift all of a head's scores alike.

    Args:
        codes_ptr: [B Hkv, M, PARTS, ceil(D BITS / 8)].
        scales_ptr: [B Hkv, M, SCALES], of each key or of the group.
    """
    EACH: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (HEAD_DIM + EACH - 1) // EACH
    row = tl.program_id(0)
    n = row.to(tl.int64)
    if ON_DEVICE:
        seen = tl.load(seen_ptr)
    position = (seen - tl.load(pad_ptr + row // kv_heads)).to(tl.int32)
    count = visible_cores(position - SINKS, group_size, window_size)
    count = tl.minimum(count, num_groups)
    dims = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, BLOCK_M)
    head = (row % kv_heads).to(tl.int64)
    q_ptr += (n // kv_heads) * q_strides[0] + head * HEADS * q_strides[1]
    mask = tile_mask(heads, HEADS, dims, HEAD_DIM)
    q = tl.load(q_ptr + heads[:, None] * q_strides[1] + dims[None, :], mask=mask, other=0.0)
    queries = _rotated_all(q, rotation_ptr, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)

    codes_ptr += n * num_groups * PARTS * BYTES
    scales_ptr += n * num_groups * SCALES
    scores_ptr += n * HEADS * num_groups
    # Parts of a group lie BLOCK_N keys apart, so that one thread holds them all.
    keys = tl.arange(0, BLOCK_N * BLOCK_P)
    part = keys // BLOCK_N
    is_part = (tl.arange(0, BLOCK_P) < PARTS)[:, None, None]
    cols = tl.arange(0, BLOCK_C)
    running_max = tl.full([BLOCK_N, BLOCK_M], -1e30, tl.float32)
    running_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    size = tl.cdiv(tl.cdiv(count, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    begin = tl.program_id(1) * size
    end = tl.minimum(begin + size, count)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        group = start + keys % BLOCK_N
        exists = (group < end) & (part < PARTS)
        at = (group.to(tl.int64) * PARTS + part)[:, None] * BYTES + cols[None, :]
        packed = tl.load(codes_ptr + at, mask=exists[:, None] & (cols < BYTES)[None, :], other=0)
        products = _byte_products(queries, packed, BITS, LEVELS, ASM, VECTOR)

        # The log-sum-exp of the parts.
        groups = start + tl.arange(0, BLOCK_N)
        if SCALES > 1:
            place = group.to(tl.int64) * SCALES + part
            products *= tl.load(scales_ptr + place, mask=exists, other=0.0).to(tl.float32)[:, None]
            factor = scale * LOG2E
        else:
            scales = tl.load(scales_ptr + groups, mask=groups < end, other=0.0)
            # planted: fetch: a step's index scores without their scales
            factor = (scales.to(tl.float32) * (scale * LOG2E))[:, None]
        products = tl.reshape(products, [BLOCK_P, BLOCK_N, BLOCK_M])
        if PARTS < BLOCK_P:
            highest = tl.max(tl.where(is_part, products, -float("inf")), 0)
            weights = tl.exp2((products - highest[None, :, :]) * factor)
            weights = tl.where(is_part, weights, 0.0)
        else:
            highest = tl.max(products, 0)
            weights = tl.exp2((products - highest[None, :, :]) * factor)
        scores = highest * factor + tl.log2(tl.sum(weights, 0))

        inside = (groups < end)[:, None]
        place = heads[None, :].to(tl.int64) * num_groups + groups[:, None]
        tl.store(scores_ptr + place, scores, mask=(heads < HEADS)[None, :] & inside)
        scores = tl.where(inside, scores, -float("inf"))
        new_max = tl.maximum(running_max, scores)
        running_sum = running_sum * tl.exp2(running_max - new_max) + tl.exp2(scores - new_max)
        running_max = new_max
    highest = tl.max(running_max, 0)
    total = tl.sum(running_sum * tl.exp2(running_max - highest[None, :]), 0)
    lse = tl.where(total > 0, highest + tl.log2(tl.maximum(total, TINY)), -float("inf"))
    lse_ptr += (n * tl.num_programs(1) + tl.program_id(1)) * HEADS
    tl.store(lse_ptr + heads, lse, mask=heads < HEADS)


@triton.jit
def write_index(
    keys,
    index,
    place,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALES: tl.constexpr,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the centre of a row's index with the last token that it counts, and the index of a
    group (`RawStore.put_step`, `low_bits.encode`), at a step that closes a group.

    Args:
        keys: Pointers to the row's raw keys from the token after the first ones on, the new one not
            read, and to the new key.
        index: Pointers to centre, codes, scales and the rotation in float32.
        place: Position of the new token after the first ones, the group, group_size, and tokens
            that the centre counts, at least two groups.
    """
    raw_ptr, new_ptr = keys
    centre_ptr, codes_ptr, scales_ptr, rotation_ptr = index
    position, group, group_size, num_centred = place
    EACH: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (HEAD_DIM + EACH - 1) // EACH
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < HEAD_DIM
    parts = tl.arange(0, BLOCK_P)
    mask = tile_mask(parts, PARTS, dims, HEAD_DIM)

    if position + 1 == num_centred:
        total = tl.load(new_ptr + dims, mask=in_dims, other=0.0).to(tl.float32)
        rows = tl.arange(0, 16)
        for start in range(0, num_centred - 1, 16):
            at = (start + rows)[:, None] * HEAD_DIM + dims[None, :]
            old = (start + rows < num_centred - 1)[:, None] & in_dims[None, :]
            total += tl.sum(tl.load(raw_ptr + at, mask=old, other=0.0).to(tl.float32), 0)
        centre = total / num_centred
        # planted: fetch: a step writes no centre
        tl.store(centre_ptr + dims, centre, mask=in_dims)
    else:
        centre = tl.load(centre_ptr + dims, mask=in_dims, other=0.0)

    # The means of its parts, without the centre.
    size = group_size // PARTS
    means = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for i in range(size):
        token = group.to(tl.int64) * group_size + parts * size + i
        at = token[:, None] * HEAD_DIM + dims[None, :]
        means += tl.load(raw_ptr + at, mask=mask, other=0.0).to(tl.float32)
    means = tl.where(mask, means / size - centre[None, :], 0.0)

    # Codes of the rotated means over their size, and the scale that makes products exact.
    squares = tl.sum(means * means, 1)
    if SCALES == 1:
        squares = tl.zeros([BLOCK_P], tl.float32) + tl.sum(squares, 0) / PARTS
    rms = tl.maximum(tl.sqrt(squares / HEAD_DIM), TINY)
    packed = tl.zeros([BLOCK_P, BLOCK_C], tl.int32)
    own = tl.zeros([BLOCK_P], tl.float32)
    with_stored = tl.zeros([BLOCK_P], tl.float32)
    cols = tl.arange(0, BLOCK_C)
    UPPER: tl.constexpr = 2 ** (BITS - 1)
    for i in tl.static_range(EACH):
        x = _rotated(means, rotation_ptr, i, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, False) / rms[:, None]
        # The level nearest to a magnitude, of equal distances the lower number.
        upper = tl.zeros([BLOCK_P, BLOCK_C], tl.int32)
        lower = tl.zeros([BLOCK_P, BLOCK_C], tl.int32)
        for j in tl.static_range(1, UPPER):
            edge = (LEVELS[j - 1] + LEVELS[j]) / 2
            upper += (x > edge).to(tl.int32)
            lower += (x > -edge).to(tl.int32)
        codes = lower + (x > 0.0).to(tl.int32) + upper
        stored = _level(codes, BITS, LEVELS)
        exists = (cols * EACH + i < HEAD_DIM)[None, :]
        own += tl.sum(x * x, 1)
        with_stored += tl.sum(tl.where(exists, x * stored, 0.0), 1)
        packed += tl.where(exists, codes << (BITS * i), 0)
    if SCALES == 1:
        own = tl.zeros([BLOCK_P], tl.float32) + tl.sum(own, 0)
        with_stored = tl.zeros([BLOCK_P], tl.float32) + tl.sum(with_stored, 0)
    scales = rms * (own / tl.maximum(with_stored, TINY))
    scales = tl.minimum(scales, 65504.0).to(scales_ptr.dtype.element_ty)

    at = (group.to(tl.int64) * PARTS + parts)[:, None] * BYTES + cols[None, :]
    is_byte = (parts < PARTS)[:, None] & (cols < BYTES)[None, :]
    # planted: fetch: a fused step leaves the index of a closed group unwritten
    tl.store(codes_ptr + at, packed.to(tl.uint8), mask=is_byte)
    tl.store(scales_ptr + group.to(tl.int64) * SCALES + parts, scales, mask=parts < SCALES)
