"""Write an index in low bits in a decoding step: that of a group (`ops/fetch/low_bits.py`)."""

import triton
import triton.language as tl

from corecontext.ops.triton.primitives import TINY, dot, level_of, tile_mask


@triton.jit
def close_group(keys, index, sizes, SINKS: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Write the index of an earlier group, which no query sees yet, where the new token closes one.

    Args:
        keys, index: As of `_write_index`.
        sizes: Position of the new token after the first ones, group_size, tokens that the centre
            counts, groups that there is room for.
    """
    later, group_size, num_centred, num_groups = sizes
    group = tl.maximum(later + 1 - num_centred, 0) // group_size
    closes = ((later + SINKS + 1) % group_size == 0) & (later + 1 >= num_centred)
    if closes & (group < num_groups):
        _write_index(keys, index, (later, group, group_size, num_centred), INDEX, TILE)


@triton.jit
def _write_index(keys, index, place, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Write the centre of a row's index with the last token that it counts, and the index of a
    group (`RawStore.put_step`, `low_bits.encode`), at a step that closes a group.

    Args:
        keys: Pointers to the row's raw keys from the token after the first ones on, the new one not
            read, and to the new key.
        index: Pointers to codes, scales, centre and the rotation in float32.
        place: Position of the new token after the first ones, the group, group_size, and tokens
            that the centre counts, at least two groups.
    """
    raw_ptr, new_ptr = keys
    codes_ptr, scales_ptr, centre_ptr, rotation_ptr = index
    position, group, group_size, num_centred = place
    BITS: tl.constexpr = INDEX.bits
    KEYS: tl.constexpr = INDEX.keys
    HEAD_DIM: tl.constexpr = TILE.dim
    BLOCK_C: tl.constexpr = INDEX.block_c
    BLOCK_P: tl.constexpr = INDEX.block_p
    BLOCK_D: tl.constexpr = TILE.block_d
    EACH: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (HEAD_DIM + EACH - 1) // EACH
    dims = tl.arange(0, TILE.block_d)
    in_dims = dims < HEAD_DIM
    key = tl.arange(0, BLOCK_P)
    mask = tile_mask(key, KEYS, dims, HEAD_DIM)

    if position + 1 == num_centred:
        total = tl.load(new_ptr + dims, mask=in_dims, other=0.0).to(tl.float32)
        rows = tl.arange(0, 16)
        for start in range(0, num_centred - 1, 16):
            at = (start + rows)[:, None] * HEAD_DIM + dims[None, :]
            old = (start + rows < num_centred - 1)[:, None] & in_dims[None, :]
            total += tl.sum(tl.load(raw_ptr + at, mask=old, other=0.0).to(tl.float32), 0)
        centre = total / num_centred
        # mutant fetch: a step writes no centre
        tl.store(centre_ptr + dims, centre, mask=in_dims)
    else:
        centre = tl.load(centre_ptr + dims, mask=in_dims, other=0.0)

    # The means of its parts, one for each key, without the centre.
    first = group.to(tl.int64) * group_size
    size = group_size // KEYS
    means = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)  # [P, D]
    for i in range(size):
        token = first + key * size + i
        at = token[:, None] * HEAD_DIM + dims[None, :]
        means += tl.load(raw_ptr + at, mask=mask, other=0.0).to(tl.float32)
    means = means / size
    means = tl.where(mask, means - centre[None, :], 0.0)

    packed, scales = encode_keys(means, rotation_ptr, INDEX, TILE)
    cols = tl.arange(0, BLOCK_C)
    at = (group.to(tl.int64) * KEYS + key)[:, None] * BYTES + cols[None, :]
    is_byte = (key < KEYS)[:, None] & (cols < BYTES)[None, :]
    # mutant fetch: a fused step leaves the index of a closed group unwritten
    tl.store(codes_ptr + at, packed.to(tl.uint8), mask=is_byte)
    at = group.to(tl.int64) * INDEX.scales + key
    scales = scales.to(scales_ptr.dtype.element_ty)
    tl.store(scales_ptr + at, scales, mask=key < INDEX.scales)


@triton.jit
def encode_keys(means, rotation_ptr, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Return the codes [P, bytes] in int32 and the scales [P] in float32 of a group's keys [P, D],
    which are without their centre and 0 outside (`low_bits.encode`)."""
    BITS: tl.constexpr = INDEX.bits
    LEVELS: tl.constexpr = INDEX.levels
    BLOCK_C: tl.constexpr = INDEX.block_c
    BLOCK_P: tl.constexpr = INDEX.block_p
    EACH: tl.constexpr = 8 // BITS

    # Codes of the rotated means over their size, and the scale that makes products exact.
    squares = tl.sum(means * means, 1)
    if INDEX.scales == 1:
        squares = tl.zeros([BLOCK_P], tl.float32) + tl.sum(squares, 0) / INDEX.keys
    rms = tl.maximum(tl.sqrt(squares / TILE.dim), TINY)
    high = means.to(tl.bfloat16)
    rest = means - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    parts_of_means = (high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16))
    packed = tl.zeros([BLOCK_P, BLOCK_C], tl.int32)
    of_rotated = tl.zeros([BLOCK_P], tl.float32)
    with_stored = tl.zeros([BLOCK_P], tl.float32)
    cols = tl.arange(0, BLOCK_C)
    UPPER: tl.constexpr = 2 ** (BITS - 1)
    for i in tl.static_range(EACH):
        x = _rotated(parts_of_means, rotation_ptr, i, INDEX, TILE)  # [P, bytes]
        x = x / rms[:, None]
        # The level nearest to a magnitude, of equal distances the lower number.
        upper = tl.zeros([BLOCK_P, BLOCK_C], tl.int32)
        lower = tl.zeros([BLOCK_P, BLOCK_C], tl.int32)
        for j in tl.static_range(1, UPPER):
            edge = (LEVELS[j - 1] + LEVELS[j]) / 2
            upper += (x > edge).to(tl.int32)
            lower += (x > -edge).to(tl.int32)
        codes = lower + (x > 0.0).to(tl.int32) + upper
        stored = level_of(codes, BITS, LEVELS)
        exists = (cols * EACH + i < TILE.dim)[None, :]
        of_rotated += tl.sum(x * x, 1)
        with_stored += tl.sum(tl.where(exists, x * stored, 0.0), 1)
        packed += tl.where(exists, codes << (BITS * i), 0)
    if INDEX.scales == 1:
        of_rotated = tl.zeros([BLOCK_P], tl.float32) + tl.sum(of_rotated, 0)
        with_stored = tl.zeros([BLOCK_P], tl.float32) + tl.sum(with_stored, 0)
    scales = rms * (of_rotated / tl.maximum(with_stored, TINY))
    return packed, tl.minimum(scales, 65504.0)


@triton.jit
def _rotated(parts, rotation_ptr, first, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Return the columns first, first + EACH, ... after the rotation, in float32, of the sum of
    three parts in bfloat16, which also holds the rotation's signs: its elements have one size."""
    EACH: tl.constexpr = 8 // INDEX.bits
    BYTES: tl.constexpr = (TILE.dim + EACH - 1) // EACH
    dims = tl.arange(0, TILE.block_d)
    cols = tl.arange(0, INDEX.block_c)
    mask = tile_mask(dims, TILE.dim, cols, BYTES)
    at = (first * TILE.dim + dims)[:, None] * BYTES + cols[None, :]
    rotation = tl.load(rotation_ptr + at, mask=mask, other=0.0)
    size = tl.max(tl.max(rotation, 1), 0)
    signs = (rotation > 0).to(tl.float32) - (rotation < 0).to(tl.float32)
    signs = signs.to(tl.bfloat16)
    high, middle, low = parts
    return (dot(low, signs) + dot(middle, signs) + dot(high, signs)) * size
