"""Write an index in low bits in a decoding step: that of a group (`ops/fetch/low_bits.py`).

All keys of an index are taken less the *centre*, the mean of the first num_centred keys, which is
known only once these tokens are there. The step that completes them writes the centre and the index
of group 0, and each later step that completes a group that of the next one. So the index of a group
comes num_centred - g tokens late; no query sees the group yet, as num_centred is at most s.
"""

import triton
import triton.language as tl

from corecontext.ops.triton.primitives import TINY, dot, level_of, tile_mask

_SIGNS = tl.constexpr(128 * 128)
"""Signs of the rotation that shared memory has at once, at most."""


@triton.jit
def close_group(keys, index, sizes, SINKS: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Write the index of an earlier group, if the new token completes a group.

    Args:
        keys, index: As of `_write_index`.
        sizes: Position of the new token, counted from the first one behind the sinks; group_size,
            num_centred, and groups that there is room for.
    """
    later, group_size, num_centred, num_groups = sizes
    group = tl.maximum(later + 1 - num_centred, 0) // group_size
    closes = ((later + SINKS + 1) % group_size == 0) & (later + 1 >= num_centred)
    if closes & (group < num_groups):
        _write_index(keys, index, (later, group, group_size, num_centred), INDEX, TILE)


@triton.jit
def _write_index(keys, index, place, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Write the index of a group (`low_bits.encode`), and before it the sequence's centre, if the
    new token is the last that the centre counts.

    Args:
        keys: Pointers to the sequence's raw keys, from the first one behind the sinks on (the new
            token's place in them is not read), and to the new key.
        index: Pointers to its codes [M, P, bytes], scales [M, 1 or P] and centre [D], and to
            the signs of the rotation, as `store_index` has them.
        place: Position of the new token, counted as the raw keys, the group, group_size, and
            num_centred, at least two groups.
    """
    raw_ptr, new_ptr = keys
    codes_ptr, scales_ptr, centre_ptr, signs_ptr = index
    position, group, group_size, num_centred = place
    KEYS: tl.constexpr = INDEX.keys
    HEAD_DIM: tl.constexpr = TILE.dim
    BLOCK_P: tl.constexpr = INDEX.block_p
    BLOCK_D: tl.constexpr = TILE.block_d
    BYTES: tl.constexpr = (HEAD_DIM * INDEX.bits + 7) // 8
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

    # The means of the group's parts of consecutive tokens, one for each key, less the centre.
    first = group.to(tl.int64) * group_size
    size = group_size // KEYS
    means = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)  # [P, D]
    for i in range(size):
        token = first + key * size + i
        at = token[:, None] * HEAD_DIM + dims[None, :]
        means += tl.load(raw_ptr + at, mask=mask, other=0.0).to(tl.float32)
    means = means / size
    means = tl.where(mask, means - centre[None, :], 0.0)

    codes_ptr += group.to(tl.int64) * KEYS * BYTES
    scales_ptr += group.to(tl.int64) * INDEX.scales
    # mutant fetch: a fused step leaves the index of a closed group unwritten
    store_index(means, (codes_ptr, scales_ptr, signs_ptr), INDEX, TILE)


@triton.jit
def store_index(means, targets, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Round the keys of a group (`low_bits.encode`).

    Args:
        means: Its keys [P, D] in float32, from which the centre is subtracted; 0 outside.
        targets: Pointers to the group's codes [P, bytes] and scales [P] or [1], and to the signs of
            the rotation, [D, D] in bfloat16 (`low_bits.rotation_signs`).
    """
    codes_ptr, scales_ptr, signs_ptr = targets
    BITS: tl.constexpr = INDEX.bits
    LEVELS: tl.constexpr = INDEX.levels
    BLOCK_P: tl.constexpr = INDEX.block_p
    EACH: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = (TILE.dim + EACH - 1) // EACH
    COLUMNS: tl.constexpr = min(TILE.block_d, _SIGNS // TILE.block_d)
    # All elements of the rotation but zeros are of one magnitude.
    SIZE: tl.constexpr = (TILE.dim & -TILE.dim) ** -0.5

    # Divide the means by their root mean square, of each key or of the group, and split them into
    # three bfloat16 numbers, whose sum is the mean in float32.
    squares = tl.sum(means * means, 1)
    if INDEX.scales == 1:
        squares = tl.zeros([BLOCK_P], tl.float32) + tl.sum(squares, 0) / INDEX.keys
    rms = tl.maximum(tl.sqrt(squares / TILE.dim), TINY)
    high = means.to(tl.bfloat16)
    rest = means - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    # Rotate and round. The scale makes the product of a rotated mean with its rounded form that
    # with itself: the quotient of these two sums.
    of_rotated = tl.zeros([BLOCK_P], tl.float32)
    with_stored = tl.zeros([BLOCK_P], tl.float32)
    key = tl.arange(0, BLOCK_P)
    dims = tl.arange(0, TILE.block_d)
    UPPER: tl.constexpr = 2 ** (BITS - 1)
    for first in tl.range(0, TILE.block_d, COLUMNS, num_stages=1):
        cols = first + tl.arange(0, COLUMNS)
        at = dims[:, None] * TILE.dim + cols[None, :]
        signs = tl.load(signs_ptr + at, mask=tile_mask(dims, TILE.dim, cols, TILE.dim), other=0.0)
        x = (dot(low, signs) + dot(middle, signs) + dot(high, signs)) * SIZE
        x = x / rms[:, None]
        # A code is the number of edges, halfway between neighbouring levels, that x is above.
        codes = (x > 0.0).to(tl.int32)
        for j in tl.static_range(1, UPPER):
            edge = (LEVELS[j - 1] + LEVELS[j]) / 2
            codes += (x > edge).to(tl.int32) + (x > -edge).to(tl.int32)
        stored = level_of(codes, BITS, LEVELS)
        exists = (cols < TILE.dim)[None, :]
        of_rotated += tl.sum(x * x, 1)
        with_stored += tl.sum(tl.where(exists, x * stored, 0.0), 1)
        # A byte holds EACH codes of neighbouring columns, the first in its lowest bits.
        codes = tl.where(exists, codes << (cols % EACH * BITS)[None, :], 0)
        packed = tl.sum(tl.reshape(codes, [BLOCK_P, COLUMNS // EACH, EACH]), 2)
        byte = first // EACH + tl.arange(0, COLUMNS // EACH)
        at = key[:, None] * BYTES + byte[None, :]
        is_byte = tile_mask(key, INDEX.keys, byte, BYTES)
        tl.store(codes_ptr + at, packed.to(tl.uint8), mask=is_byte)
    if INDEX.scales == 1:
        of_rotated = tl.zeros([BLOCK_P], tl.float32) + tl.sum(of_rotated, 0)
        with_stored = tl.zeros([BLOCK_P], tl.float32) + tl.sum(with_stored, 0)
    scales = rms * (of_rotated / tl.maximum(with_stored, TINY))
    scales = tl.minimum(scales, 65504.0)  # the largest float16
    tl.store(scales_ptr + key, scales.to(scales_ptr.dtype.element_ty), mask=key < INDEX.scales)
