"""Read an index in low bits in a decoding step: the scores of all visible groups
(`ops/fetch/low_bits.py`), that of the centre included, which is subtracted from the keys.

A byte holds EACH = 8 / BITS codes of neighbouring columns. The i-th codes of all bytes, of columns
i, i + EACH and so on, make one matrix product with the same columns of the rotated query, so that
no element moves between threads. A code stands for a *level*, its number before the key's scale.

Codes of two bits are multiplied as whole numbers (SCORING.whole), which takes half the
instructions: the four levels as numbers of 8 bits in their ratio, to 0.1 %, and each element of a
query as 128 a + b times a *unit* of its row, with a and b of 8 bits, so that the products are
exact. These queries are rotated by a launch of their own.

Letters of tiles, as of `plan.Scoring`: M query heads, N groups, P keys of a group.
"""

import triton
import triton.language as tl

from corecontext.ops.triton.decode.attend_entries import row_of
from corecontext.ops.triton.paged.pages import pages_of_tile
from corecontext.ops.triton.primitives import (
    TINY,
    integers,
    level_of,
    tile_mask,
    tile_products,
    visible_cores,
    weighted_sum,
)

# The levels as bytes, -123, -37, 37 and 123 from the lowest on, and the size of 1 in them: 37 _UNIT
# is the level 0.453.
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
def rotate_kernel(
    q_ptr,
    rotation_ptr,
    rotated,
    kv_heads,
    q_strides,
    INDEX: tl.constexpr,
    SCORING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the rotated queries of each KV head as whole numbers of 15 bits. All columns come from
    one product, so that its loads are on the way together.

    Grid: (B Hkv,). A program reads the queries of its heads and the rotation.

    Args:
        q_ptr: [B, H, 1, D].
        rotation_ptr: The index's rotation, its columns by `low_bits.columns_of_codes`: [EACH, D,
            bytes].
        rotated: Pointers to the numbers [B Hkv, EACH, rows, 2, BLOCK_C] in int8, a and b of 128 a +
            b, and to the unit of each row, [B Hkv, rows] in float32. A row is a query head.
        SCORING, INDEX, TILE: `plan.Scoring`, `plan.IndexForm` and `plan.Tile`.
    """
    BLOCK_C: tl.constexpr = INDEX.block_c
    ROWS: tl.constexpr = SCORING.block_m
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = TILE.block_d
    EACH: tl.constexpr = 8 // INDEX.bits
    BYTES: tl.constexpr = (TILE.dim + EACH - 1) // EACH
    BLOCK: tl.constexpr = min(BLOCK_D, 128)  # dimensions that shared memory holds
    n = tl.program_id(0).to(tl.int64)
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    q_ptr += batch * q_strides[0] + head * TILE.heads * q_strides[1]
    numbers_ptr = rotated[0] + n * (8 * ROWS * BLOCK_C)
    heads = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, EACH * BLOCK_C)
    code = cols // BLOCK_C
    byte = cols % BLOCK_C
    x = tl.zeros([BLOCK_M, EACH * BLOCK_C], tl.float32)
    for start in tl.static_range(0, BLOCK_D, BLOCK):
        dims = start + tl.arange(0, BLOCK)
        mask = tile_mask(heads, TILE.heads, dims, TILE.dim)
        q = tl.load(q_ptr + heads[:, None] * q_strides[1] + dims[None, :], mask=mask, other=0.0)
        at = (code[None, :] * TILE.dim + dims[:, None]) * BYTES + byte[None, :]
        mask = (dims < TILE.dim)[:, None] & (byte < BYTES)[None, :]
        rotation = tl.load(rotation_ptr + at, mask=mask, other=0.0)  # [D, columns]
        x += weighted_sum(q, rotation, TILE.vector)  # [M, columns]
    unit = tl.maximum(tl.max(tl.abs(x), 1), TINY) / 16256  # [M]; 16256 is 127 x 128
    at = heads[:, None] * (2 * BLOCK_C) + (code * (2 * ROWS * BLOCK_C) + byte)[None, :]
    number = tl.floor(x / unit[:, None] + 0.5).to(tl.int32)
    upper = (number + 64) >> 7
    is_row = (heads < ROWS)[:, None]
    tl.store(numbers_ptr + at, upper.to(tl.int8), mask=is_row)
    tl.store(numbers_ptr + at + BLOCK_C, (number - upper * 128).to(tl.int8), mask=is_row)
    tl.store(rotated[1] + n * ROWS + heads, unit, mask=heads < ROWS)


@triton.jit
def score_kernel(
    q_ptr,
    rotation_ptr,
    rotated,
    index,
    pages,
    scores_ptr,
    length,
    numbers,
    scale,
    q_strides,
    page_strides,
    ON_DEVICE: tl.constexpr,
    PAGE: tl.constexpr,
    SINKS: tl.constexpr,
    INDEX: tl.constexpr,
    SCORING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the index scores of all visible groups, [B H, SCORING.width] in float32: the largest
    product with a key of the group, and that with the centre, the same for all groups of a head.

    Grid: (B Hkv, programs). A program reads an even piece of the index of its KV head.

    Args:
        q_ptr, rotation_ptr, rotated: As of `rotate_kernel`, which has written what is read in place
            of queries where SCORING.whole.
        index: Pointers to codes [B Hkv, groups, P, bytes], scales [B Hkv, groups, 1 or P] and
            centres [B Hkv, D] in float32; in pages of PAGE entries, if it is not 0, to those of
            `paged.pages.IndexPages`.
        pages: Pointers to a table of pages and to the sequence of each of the B rows.
        length: Pointers to the length on the device, and to each row's padding.
        page_strides: Of codes, of scales and of centres, and that of the table's rows.
    """
    seen, kv_heads, num_groups, group_size, window_size, num_chosen = integers(numbers)
    HEADS: tl.constexpr = TILE.heads
    KEYS: tl.constexpr = INDEX.keys
    EACH: tl.constexpr = 8 // INDEX.bits
    BYTES: tl.constexpr = (TILE.dim + EACH - 1) // EACH
    BLOCK_C: tl.constexpr = INDEX.block_c
    BLOCK_M: tl.constexpr = SCORING.block_m
    BLOCK_N: tl.constexpr = SCORING.block_n
    BLOCK_P: tl.constexpr = SCORING.block_p
    n, batch, head, position = row_of(length, seen, kv_heads, ON_DEVICE)
    codes_ptr = index[0] + n * num_groups * KEYS * BYTES
    scales_ptr = index[1] + n * num_groups * INDEX.scales
    centre_ptr = index[2] + n * TILE.dim
    table_ptr = pages[0]
    first = 0
    if PAGE:
        codes_ptr = index[0] + head * page_strides[0][2]
        scales_ptr = index[1] + head * page_strides[1][2]
        table_ptr += tl.load(pages[1] + batch).to(tl.int64) * page_strides[3][0]
        # The centre is in the sequence's first page.
        page = tl.load(table_ptr).to(tl.int64)
        centre_ptr = index[2] + page * page_strides[2][0] + head * page_strides[2][1]
        first = SINKS // group_size
    scores_ptr += n * HEADS * SCORING.width - first
    count = visible_cores(position - SINKS, group_size, window_size)
    # Where all groups are chosen, nothing reads their scores.
    count = tl.where(count > num_chosen, tl.minimum(count, num_groups), 0)
    # In pages groups are read by their entries, from the beginning of a page on.
    before = first // max(1, PAGE) * PAGE
    count = tl.where(count > 0, count + first - before, 0)
    size = tl.cdiv(tl.cdiv(count, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    begin = before + tl.program_id(1) * size
    end = tl.minimum(begin + size, before + count)
    heads = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, TILE.block_d)
    q_ptr += batch * q_strides[0] + head * HEADS * q_strides[1]
    mask = tile_mask(heads, HEADS, dims, TILE.dim)
    q = tl.load(q_ptr + heads[:, None] * q_strides[1] + dims[None, :], mask=mask, other=0.0)
    centre = tl.load(centre_ptr + dims, mask=dims < TILE.dim, other=0.0)
    # mutant fetch: a step compares heads without their products with the centre
    offset = tl.sum(q.to(tl.float32) * centre[None, :], 1) * scale  # [M]
    if SCORING.whole:
        unit = tl.load(rotated[1] + n * BLOCK_M + heads)
        queries = _read_queries(
            rotated[0] + n * (8 * BLOCK_M * BLOCK_C), BLOCK_M, BLOCK_C, SCORING.asm
        )
    else:
        queries = _rotated_all(q, rotation_ptr, INDEX, TILE)

    # Keys of a group lie BLOCK_N apart, so that one thread holds them all.
    keys = tl.arange(0, BLOCK_N * BLOCK_P)
    key = keys // BLOCK_N
    is_key = (tl.arange(0, BLOCK_P) < KEYS)[:, None, None]
    cols = tl.arange(0, BLOCK_C)
    numbers = tl.arange(0, BLOCK_N)
    page = 0
    group_page = 0
    if PAGE:
        page = pages_of_tile(table_ptr, begin, end, keys % BLOCK_N, BLOCK_N, PAGE)
        group_page = pages_of_tile(table_ptr, begin, end, numbers, BLOCK_N, PAGE)
    if INDEX.scales == 1:
        entries = begin + numbers
        first_at = _places(entries, group_page, page_strides[1], 1, PAGE)
        scales = tl.load(
            scales_ptr + first_at, mask=(entries >= first) & (entries < end), other=0.0
        )
    # A launch over pages has its stages for all loops: those of this one would be for pages, too.
    for start in tl.range(begin, end, BLOCK_N, num_stages=None if PAGE else SCORING.stages):
        entry = start + keys % BLOCK_N
        exists = (entry >= first) & (entry < end) & (key < KEYS)
        at = _places(entry, page, page_strides[0], KEYS * BYTES, PAGE) + key * BYTES
        at = at[:, None] + cols[None, :]
        is_byte = exists[:, None] & (cols < BYTES)[None, :]
        packed = tl.load(codes_ptr + at, mask=is_byte, other=0)  # [P N, bytes]
        if SCORING.whole:
            products = _whole_products(queries, unit, packed, SCORING.asm)  # [P N, M]
        else:
            products = _byte_products(queries, q.dtype, packed, INDEX, TILE.vector)

        # Times the scales, of the group or of each key; then the largest of a group's keys.
        factor = scale
        if INDEX.scales > 1:
            at = _places(entry, page, page_strides[1], INDEX.scales, PAGE) + key
            products *= tl.load(scales_ptr + at, mask=exists, other=0.0).to(tl.float32)[:, None]
        else:
            # mutant fetch: a step's index scores without their scales
            factor = (scales.to(tl.float32) * scale)[:, None]
        products = tl.reshape(products, [BLOCK_P, BLOCK_N, BLOCK_M])
        if KEYS < BLOCK_P:
            products = tl.where(is_key, products, -float("inf"))
        scores = tl.max(products, 0) * factor + offset[None, :]  # [N, M]
        entries = start + numbers
        at = heads[None, :] * SCORING.width + entries[:, None]
        is_score = (heads < HEADS)[None, :] & ((entries >= first) & (entries < end))[:, None]
        tl.store(scores_ptr + at, scores, mask=is_score)

        # The pages and scales of the next tile are on the way while this one is used.
        if PAGE:
            page = pages_of_tile(table_ptr, start + BLOCK_N, end, keys % BLOCK_N, BLOCK_N, PAGE)
            group_page = pages_of_tile(table_ptr, start + BLOCK_N, end, numbers, BLOCK_N, PAGE)
        if INDEX.scales == 1:
            next_at = _places(entries + BLOCK_N, group_page, page_strides[1], 1, PAGE)
            scales = tl.load(scales_ptr + next_at, mask=entries < end - BLOCK_N, other=0.0)


@triton.jit
def _places(entries, page, strides, size: tl.constexpr, PAGE: tl.constexpr):
    """Return where the codes or the scales of groups begin, in int64: in pages of PAGE entries, by
    their strides, or one after the other, of `size` elements each."""
    if PAGE:
        places = page * strides[0] + entries % PAGE * strides[1]
    else:
        places = entries.to(tl.int64) * size
    return places


@triton.jit
def _byte_products(queries, kind: tl.constexpr, packed, INDEX: tl.constexpr, VECTOR: tl.constexpr):
    """Return the products of keys with rotated queries, [keys, rows], from bytes [keys, bytes].

    Args:
        queries: For each i, the columns i, i + EACH, ... of the queries, [rows, bytes].
        kind: The dtype of the products' operands.
    """
    BITS: tl.constexpr = INDEX.bits
    EACH: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = INDEX.levels
    wide = packed.to(tl.int32)
    level = level_of(wide % 2**BITS, BITS, LEVELS).to(kind)
    total = tile_products(level, queries[0].to(kind), VECTOR)
    for i in tl.static_range(1, EACH):
        level = level_of((wide >> (BITS * i)) % 2**BITS, BITS, LEVELS).to(kind)
        total += tile_products(level, queries[i].to(kind), VECTOR)
    return total


@triton.jit
def _read_queries(scratch_ptr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, ASM: tl.constexpr):
    """Read the numbers of `rotate_kernel` for `_whole_products`: four tiles [bytes, 2 rows], a and
    b of a row side by side."""
    tiles = ()
    for i in tl.static_range(4):
        tiles = tiles + (_query_tile(scratch_ptr, i, ROWS, BLOCK_C, ASM),)
    return tiles


@triton.jit
def _query_tile(scratch_ptr, i, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, ASM: tl.constexpr):
    """Return the i-th tile of queries [bytes, 2 rows]: of the i-th code of each byte, or with ASM
    of the codes that the i-th register of `_LEVELS_ASM` holds."""
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
    """Return the products of keys with queries as `_byte_products` does, from codes of two bits,
    the queries of `_read_queries` and their units [rows]."""
    if ASM:
        levels = tl.inline_asm_elementwise(
            _LEVELS_ASM, "=r,=r,=r,=r,r", [packed], (tl.int8, tl.int8, tl.int8, tl.int8), True, 4
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
def _rotated_columns(x, rotation_ptr, first, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Return columns first, first + EACH, ... of x [rows, D] after the rotation, in float32."""
    EACH: tl.constexpr = 8 // INDEX.bits
    BYTES: tl.constexpr = (TILE.dim + EACH - 1) // EACH
    dims = tl.arange(0, TILE.block_d)
    cols = tl.arange(0, INDEX.block_c)
    mask = tile_mask(dims, TILE.dim, cols, BYTES)
    at = (first * TILE.dim + dims)[:, None] * BYTES + cols[None, :]
    return weighted_sum(x, tl.load(rotation_ptr + at, mask=mask, other=0.0), TILE.vector)


@triton.jit
def _rotated_all(q, rotation_ptr, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Return `_rotated_columns` for first = 0, 1, ..., EACH - 1."""
    rotated = ()
    for first in tl.static_range(8 // INDEX.bits):
        rotated = rotated + (_rotated_columns(q, rotation_ptr, first, INDEX, TILE),)
    return rotated
