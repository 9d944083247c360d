"""Read an index in low bits in a decoding step: the scores of all visible groups
(`ops/fetch/low_bits.py`).

A byte holds EACH = 8 / BITS codes of neighbouring columns. The i-th codes of all bytes, of columns
i, i + EACH and so on, make one matrix product with the same columns of the rotated query, so that
no element moves between threads.

Codes of two bits are multiplied as whole numbers, which takes half the instructions: levels as
numbers of 8 bits in their ratio, to 0.1 %, and each query as two such numbers, 15 bits in all, so
that their products are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.decode.plain_step import tile_products, weighted_sum
from corecontext.ops.triton.primitives import (
    LOG2E,
    TINY,
    tile_mask,
    visible_cores,
)

# Bytes -123, -37, 37 and 123 from the lowest on, and the size of 1 among the levels.
_TABLE = tl.constexpr(0x7B25DB85)
_UNIT = tl.constexpr(0.0122566)
# One register of four bytes becomes 16 levels, in four: each nibble of s selects a byte of the
# table by the first or third code of a byte, one of t by the second or fourth.
_LEVELS_ASM = tl.constexpr("""
{
  .reg .b32 s, t;
  and.b32 s, $4, 0x33333333;
  shr.u32 t, $4, 2;
  and.b32 t, t, 0x33333333;
  prmt.b32 $0, 0x7B25DB85, 0, s;
  shr.u32 s, s, 16;
  prmt.b32 $1, 0x7B25DB85, 0, s;
  prmt.b32 $2, 0x7B25DB85, 0, t;
  shr.u32 t, t, 16;
  prmt.b32 $3, 0x7B25DB85, 0, t;
}
""")


@triton.jit
def level_of(codes, BITS: tl.constexpr, LEVELS: tl.constexpr):
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
    kind: tl.constexpr,
    packed,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return the products of keys with rotated queries, [keys, rows], from bytes [keys, bytes].

    Args:
        queries: For each i, the columns i, i + EACH, ... of the queries.
    """
    EACH: tl.constexpr = 8 // BITS
    wide = packed.to(tl.int32)
    level = level_of(wide % 2**BITS, BITS, LEVELS).to(kind)
    total = tile_products(level, queries[0].to(kind), VECTOR)
    for i in tl.static_range(1, EACH):
        level = level_of((wide >> (BITS * i)) % 2**BITS, BITS, LEVELS).to(kind)
        total += tile_products(level, queries[i].to(kind), VECTOR)
    return total


@triton.jit
def _store_whole(at, x, unit, mask, BLOCK_C: tl.constexpr):
    """Store x / unit [rows, columns] as whole numbers 128 a + b of 15 bits: a at `at`, b a tile's
    BLOCK_C columns behind."""
    number = tl.floor(x / unit[:, None] + 0.5).to(tl.int32)
    upper = (number + 64) >> 7
    tl.store(at, upper.to(tl.int8), mask=mask)
    tl.store(at + BLOCK_C, (number - upper * 128).to(tl.int8), mask=mask)


@triton.jit
def rotate_queries(
    queries,
    results,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Write the rotated queries of a KV head as `_write_queries`, all columns by one product, whose
    loads wait together.

    Args:
        queries: As of `score_share`.
        results: Pointers to the tiles and to the unit of each row.
        ROWS: Rows of a tile, at most BLOCK_M.
    """
    BYTES: tl.constexpr = (HEAD_DIM + EACH - 1) // EACH
    BLOCK: tl.constexpr = min(BLOCK_D, 128)  # dimensions that shared memory holds
    q_ptr, q_stride, rotation_ptr = queries
    scratch_ptr, unit_ptr = results
    heads = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, EACH * BLOCK_C)
    code = cols // BLOCK_C
    byte = cols % BLOCK_C
    x = tl.zeros([BLOCK_M, EACH * BLOCK_C], tl.float32)
    for start in tl.static_range(0, BLOCK_D, BLOCK):
        dims = start + tl.arange(0, BLOCK)
        mask = tile_mask(heads, HEADS, dims, HEAD_DIM)
        q = tl.load(q_ptr + heads[:, None] * q_stride + dims[None, :], mask=mask, other=0.0)
        at = (code[None, :] * HEAD_DIM + dims[:, None]) * BYTES + byte[None, :]
        mask = (dims < HEAD_DIM)[:, None] & (byte < BYTES)[None, :]
        x += weighted_sum(q, tl.load(rotation_ptr + at, mask=mask, other=0.0), VECTOR)
    unit = tl.maximum(tl.max(tl.abs(x), 1), TINY) / 16256
    at = heads[:, None] * (2 * BLOCK_C) + (code * (2 * ROWS * BLOCK_C) + byte)[None, :]
    _store_whole(scratch_ptr + at, x, unit, (heads < ROWS)[:, None], BLOCK_C)
    tl.store(unit_ptr + heads, unit, mask=heads < ROWS)


@triton.jit
def _write_queries(rotated, scratch_ptr):
    """Write rotated queries as whole numbers 128 a + b of 15 bits, four int8 tiles [rows, 2,
    columns] of a and b, and return the unit of each row.

    Args:
        rotated: Four tiles of columns, [rows, columns] in float32.
        scratch_ptr: Room for the tiles, from where they come back in the layout of a product.
    """
    highest = tl.maximum(tl.max(tl.abs(rotated[0]), 1), tl.max(tl.abs(rotated[1]), 1))
    highest = tl.maximum(highest, tl.max(tl.abs(rotated[2]), 1))
    highest = tl.maximum(highest, tl.max(tl.abs(rotated[3]), 1))
    unit = tl.maximum(highest, TINY) / 16256
    ROWS: tl.constexpr = rotated[0].shape[0]
    BLOCK_C: tl.constexpr = rotated[0].shape[1]
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_C)
    at = scratch_ptr + rows[:, None] * (2 * BLOCK_C) + cols[None, :]
    for i in tl.static_range(4):
        _store_whole(at + i * (2 * ROWS * BLOCK_C), rotated[i], unit, None, BLOCK_C)
    return unit


@triton.jit
def _read_queries(scratch_ptr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, ASM: tl.constexpr):
    """Return the tiles of `_write_queries` for `_whole_products`, [columns, 2 rows]."""
    x0 = _query_tile(scratch_ptr, 0, ROWS, BLOCK_C, ASM)
    x1 = _query_tile(scratch_ptr, 1, ROWS, BLOCK_C, ASM)
    x2 = _query_tile(scratch_ptr, 2, ROWS, BLOCK_C, ASM)
    x3 = _query_tile(scratch_ptr, 3, ROWS, BLOCK_C, ASM)
    return (x0, x1, x2, x3)


@triton.jit
def _query_tile(scratch_ptr, i, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, ASM: tl.constexpr):
    """Return the i-th tile of queries [columns, 2 rows]: of the i-th code of each byte, or with ASM
    in the order of `_LEVELS_ASM`."""
    place = tl.arange(0, BLOCK_C)
    wide = tl.arange(0, 2 * ROWS)
    code = i
    byte = place
    if ASM:
        code = place % 2 * 2 + i // 2
        byte = place // 4 * 4 + i % 2 * 2 + place % 4 // 2
    at = code * (2 * ROWS * BLOCK_C) + byte
    return tl.load(scratch_ptr + at[:, None] + wide[None, :] * BLOCK_C)


@triton.jit
def _whole_products(queries, unit, packed, ASM: tl.constexpr):
    """Return `_byte_products` of codes of two bits with the queries of `_read_queries`."""
    if ASM:
        levels = tl.inline_asm_elementwise(
            _LEVELS_ASM,
            "=r,=r,=r,=r,r",
            [packed],
            (tl.int8, tl.int8, tl.int8, tl.int8),
            True,
            4,
        )
    else:
        shift = packed.to(tl.int32) * 8
        table = tl.full(packed.shape, _TABLE, tl.int32)
        l0 = (table >> (shift & 24)).to(tl.int8)
        # mutant fetch: the second levels of bytes, mirrored, in a step
        l1 = (table >> ((shift >> 2) & 24)).to(tl.int8)
        l2 = (table >> ((shift >> 4) & 24)).to(tl.int8)
        l3 = (table >> ((shift >> 6) & 24)).to(tl.int8)
        levels = (l0, l1, l2, l3)
    total = tl.dot(levels[0], queries[0], out_dtype=tl.int32)
    for i in tl.static_range(1, 4):
        total = tl.dot(levels[i], queries[i], acc=total, out_dtype=tl.int32)
    pairs = tl.reshape(total, [total.shape[0], total.shape[1] // 2, 2])
    upper, lower = tl.split(pairs)
    return (upper * 128 + lower).to(tl.float32) * (unit * _UNIT)[None, :]


@triton.jit
def _rotated_columns(
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
    BYTES: tl.constexpr = (HEAD_DIM + EACH - 1) // EACH
    dims = tl.arange(0, BLOCK_D)
    cols = tl.arange(0, BLOCK_C)
    mask = tile_mask(dims, HEAD_DIM, cols, BYTES)
    at = (first * HEAD_DIM + dims)[:, None] * BYTES + cols[None, :]
    return weighted_sum(x, tl.load(rotation_ptr + at, mask=mask, other=0.0), VECTOR)


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
    """Return `_rotated_columns` of each first column."""
    r = rotation_ptr
    x0 = _rotated_columns(q, r, 0, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)
    x1 = _rotated_columns(q, r, 1, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)
    rotated = (x0, x1)
    if EACH > 2:
        x2 = _rotated_columns(q, r, 2, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)
        x3 = _rotated_columns(q, r, 3, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)
        rotated = (x0, x1, x2, x3)
    if EACH > 4:
        x4 = _rotated_columns(q, r, 4, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)
        x5 = _rotated_columns(q, r, 5, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)
        x6 = _rotated_columns(q, r, 6, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)
        x7 = _rotated_columns(q, r, 7, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)
        rotated = (x0, x1, x2, x3, x4, x5, x6, x7)
    return rotated


@triton.jit
def score_share(
    queries,
    index,
    results,
    bounds,
    scale,
    HEADS: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALES: tl.constexpr,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WHOLE: tl.constexpr,
    ROTATED: tl.constexpr,
    ASM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the index scores of a share of a row's groups, [HEADS, WIDTH], and their log-sum-exp
    [HEADS], in units of log 2.

    A score is the log-sum-exp of the scores of a group's PARTS keys; that all parts have the same
    size, and the centre, shift all of a head's scores alike.

    Args:
        queries: Pointer to q, the stride of its heads, and a pointer to the rotation.
        index: Pointers to the row's codes [M, PARTS, ceil(D BITS / 8)] and scales [M, SCALES], of
            each key or of the group.
        results: Pointers to the row's scores, to the share's log-sum-exp, and where WHOLE to 8
            BLOCK_M BLOCK_C bytes and the unit of each row: its own, or where ROTATED those that
            `rotate_queries` has written.
        bounds: First group of the share, and one past its last.
    """
    EACH: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (HEAD_DIM + EACH - 1) // EACH
    q_ptr, q_stride, rotation_ptr = queries
    codes_ptr, scales_ptr = index
    scores_ptr, lse_ptr, scratch_ptr, unit_ptr = results
    begin, end = bounds
    heads = tl.arange(0, BLOCK_M)
    if ROTATED:
        unit = tl.load(unit_ptr + heads)
    else:
        dims = tl.arange(0, BLOCK_D)
        mask = tile_mask(heads, HEADS, dims, HEAD_DIM)
        q = tl.load(q_ptr + heads[:, None] * q_stride + dims[None, :], mask=mask, other=0.0)
        rotated = _rotated_all(q, rotation_ptr, EACH, HEAD_DIM, BLOCK_D, BLOCK_C, VECTOR)
        if WHOLE:
            unit = _write_queries(rotated, scratch_ptr)
            tl.debug_barrier()  # other threads have stored what a thread loads
    if WHOLE:
        whole = _read_queries(scratch_ptr, BLOCK_M, BLOCK_C, ASM)

    # Parts of a group lie BLOCK_N keys apart, so that one thread holds them all.
    keys = tl.arange(0, BLOCK_N * BLOCK_P)
    part = keys // BLOCK_N
    is_part = (tl.arange(0, BLOCK_P) < PARTS)[:, None, None]
    cols = tl.arange(0, BLOCK_C)
    running_max = tl.full([BLOCK_N, BLOCK_M], -1e30, tl.float32)
    running_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SCALES == 1:
        groups = begin + tl.arange(0, BLOCK_N)
        scales = tl.load(scales_ptr + groups, mask=groups < end, other=0.0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        group = start + keys % BLOCK_N
        exists = (group < end) & (part < PARTS)
        at = (group.to(tl.int64) * PARTS + part)[:, None] * BYTES + cols[None, :]
        packed = tl.load(codes_ptr + at, mask=exists[:, None] & (cols < BYTES)[None, :], other=0)
        if WHOLE:
            products = _whole_products(whole, unit, packed, ASM)
        else:
            products = _byte_products(rotated, q.dtype, packed, BITS, LEVELS, VECTOR)

        # The log-sum-exp of the parts.
        groups = start + tl.arange(0, BLOCK_N)
        if SCALES > 1:
            place = group.to(tl.int64) * SCALES + part
            products *= tl.load(scales_ptr + place, mask=exists, other=0.0).to(tl.float32)[:, None]
            factor = scale * LOG2E
        else:
            # mutant fetch: a step's index scores without their scales
            factor = (scales.to(tl.float32) * (scale * LOG2E))[:, None]
            # Those of the next tile are on the way while this one is used.
            scales = tl.load(scales_ptr + groups + BLOCK_N, mask=groups < end - BLOCK_N, other=0.0)
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
        place = heads[None, :] * WIDTH + groups[:, None]
        tl.store(scores_ptr + place, scores, mask=(heads < HEADS)[None, :] & inside)
        scores = tl.where(inside, scores, -float("inf"))
        new_max = tl.maximum(running_max, scores)
        running_sum = running_sum * tl.exp2(running_max - new_max) + tl.exp2(scores - new_max)
        running_max = new_max
    highest = tl.max(running_max, 0)
    total = tl.sum(running_sum * tl.exp2(running_max - highest[None, :]), 0)
    lse = tl.where(total > 0, highest + tl.log2(tl.maximum(total, TINY)), -float("inf"))
    tl.store(lse_ptr + heads, lse, mask=heads < HEADS)


@triton.jit
def scoring_bounds(position, share_of, sizes, SINKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first group of a share of the visible groups, and one past its last.

    Args:
        share_of: Number of the share, and how many there are.
        sizes: Groups that there is room for, group_size and window_size.
    """
    share, num_shares = share_of
    num_groups, group_size, window_size = sizes
    count = visible_cores(position - SINKS, group_size, window_size)
    count = tl.minimum(count, num_groups)
    size = tl.cdiv(tl.cdiv(count, num_shares), BLOCK_N) * BLOCK_N
    return share * size, tl.minimum(share * size + size, count)
