"""Build an index in low bits (`ops/fetch/low_bits.py`) of a whole sequence, reading the raw keys
once: as codes and scales, or as the keys that these stand for, in the dtype of the queries."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.fetch import low_bits
from corecontext.ops.fetch.low_bits import LowBits
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2
from corecontext.ops.triton.primitives import TINY, dot, level_of, tile_mask

MAX_DIM = 128  # elements of a key; the rotation of more does not fit into shared memory
_ROWS = 64  # parts that one program holds


@triton.jit
def _rotate(x, rotation_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return x [rows, columns] in float32 times the signs of the rotation. Products are of
    bfloat16, which holds signs exactly, and x as the sum of three numbers."""
    dims = tl.arange(0, BLOCK_D)
    signs = tl.load(
        rotation_ptr + dims[:, None] * HEAD_DIM + dims[None, :],
        mask=tile_mask(dims, HEAD_DIM, dims, HEAD_DIM),
        other=0.0,
    )
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return dot(low, signs) + dot(middle, signs) + dot(high, signs)


@triton.jit
def _nearest_codes(x, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the code of the level nearest to each element of x, of two at the same distance the
    lower one. LEVELS are those above 0, as of `level_of`."""
    codes = (x > 0.0).to(tl.int32) + (2 ** (BITS - 1) - 1)
    for i in tl.static_range(1, 2 ** (BITS - 1)):
        edge = (LEVELS[i - 1] + LEVELS[i]) / 2
        codes += (x > edge).to(tl.int32) - (x <= -edge).to(tl.int32)
    return codes


@triton.jit(do_not_specialize=["num_groups"])
def index_keys_kernel(
    inputs,
    results,
    num_groups,
    unit,
    strides,
    GROUP_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    AS_CODES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write the keys [N, M, P, D] of groups, or AS_CODES their codes [N, M, P, bytes] and scales.

    Grid: (blocks of BLOCK_G groups, N).

    Args:
        inputs: Pointers to raw keys from the first group on, to the centre [N, D], and to the signs
            of the rotation, 1, -1 and 0.
        results: Pointers to keys, or to codes and to scales [N, M, P], [N, M] where SHARED.
        unit: Signs times it are the rotation.
        PARTS, BLOCK_P: Keys of a group, P, each the mean of GROUP_SIZE / PARTS tokens; P padded.
        SHARED: One scale for the P keys of a group, else one for each.
    """
    k_ptr, centre_ptr, rotation_ptr = inputs
    n = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK_G * BLOCK_P)
    group = tl.program_id(0) * BLOCK_G + row // BLOCK_P
    part_idx = row % BLOCK_P
    exists = (group < num_groups) & (part_idx < PARTS)
    dims = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]

    # Means of the parts, without the centre.
    SIZE: tl.constexpr = GROUP_SIZE // PARTS
    token = (group * GROUP_SIZE + part_idx * SIZE).to(tl.int64)
    place = k_ptr + n * strides[0] + token[:, None] * strides[1] + dims[None, :]
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(1, SIZE):
        x += tl.load(place + i * strides[1], mask=mask, other=0.0).to(tl.float32)
    centre = tl.load(centre_ptr + n * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    x = tl.where(mask, x / SIZE - centre[None, :], 0.0)

    # Levels nearest to the rotated means over their root mean square, and the scale by which the
    # product of x and its stored form is that of x and x.
    x = _rotate(x, rotation_ptr, HEAD_DIM, BLOCK_D) * unit
    squares = tl.sum(x * x, 1)
    count = HEAD_DIM
    if SHARED:
        squares = _sum_of_group(squares, BLOCK_G, BLOCK_P)
        count = HEAD_DIM * PARTS
    rms = tl.maximum(tl.sqrt(squares / count), TINY)
    x = x / rms[:, None]
    codes = _nearest_codes(x, BITS, LEVELS)
    stored = level_of(codes, BITS, LEVELS)
    squares = tl.sum(x * x, 1)
    product = tl.sum(x * stored, 1)
    if SHARED:
        squares = _sum_of_group(squares, BLOCK_G, BLOCK_P)
        product = _sum_of_group(product, BLOCK_G, BLOCK_P)
    scale = tl.minimum(rms * (squares / tl.maximum(product, TINY)), 65504.0).to(tl.float16)
    first = n * num_groups + group
    key = first * PARTS + part_idx
    if AS_CODES:
        EACH: tl.constexpr = 8 // BITS
        BYTES: tl.constexpr = (HEAD_DIM + EACH - 1) // EACH
        BLOCK_C: tl.constexpr = BLOCK_D // EACH
        codes = tl.where((dims < HEAD_DIM)[None, :], codes, 0)
        codes = tl.reshape(codes, [BLOCK_G * BLOCK_P, BLOCK_C, EACH])
        shifts = BITS * tl.arange(0, EACH)
        packed = tl.sum(codes << shifts[None, None, :], 2).to(tl.uint8)
        cols = tl.arange(0, BLOCK_C)
        is_byte = exists[:, None] & (cols < BYTES)[None, :]
        tl.store(results[0] + key[:, None] * BYTES + cols[None, :], packed, mask=is_byte)
        if SHARED:
            key = first
            exists = exists & (part_idx == 0)
        tl.store(results[1] + key, scale, mask=exists)
    else:
        keys = stored * scale.to(tl.float32)[:, None]
        at = key[:, None] * HEAD_DIM + dims[None, :]
        tl.store(results[0] + at, keys.to(results[0].dtype.element_ty), mask=mask)


@triton.jit
def _sum_of_group(x, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return for each row the sum of x [rows] over its group."""
    total = tl.sum(tl.reshape(x, [BLOCK_G, BLOCK_P]), 1)
    total = tl.broadcast_to(total[:, None], [BLOCK_G, BLOCK_P])
    return tl.reshape(total, [BLOCK_G * BLOCK_P])


@functools.lru_cache(maxsize=8)
def signs_of(head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """Return the signs of the rotation [D, D], 1, -1 and 0 in bfloat16, and the unit that they are
    multiples of: signs times unit are the rotation."""
    rotation = low_bits.rotation(head_dim, torch.float32, device)
    unit = (head_dim & -head_dim) ** -0.5
    return (rotation / unit).round().bfloat16(), unit


def build(
    k: Tensor, num_groups: int, group_size: int, index: LowBits, centre: Tensor | None
) -> Tensor:
    """Return the keys [N, M, P, D] of an index as its codes have them, rotated, in the dtype of k.

    Args:
        k: Raw keys from the first group on, [N, S, D], rotary applied; D at most MAX_DIM.
        centre: From `scoring.centre_of`, [N, D]; None where the window is smaller than a group.
    """
    shape = (k.shape[0], num_groups, index.num_keys(group_size), k.shape[2])
    keys = torch.empty(shape, dtype=k.dtype, device=k.device)
    _launch(k, (keys,), (num_groups, group_size), index, centre)
    return keys


def encode(keys: Tensor, index: LowBits, centre: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes and scales as `LowBits.encode`, where all parts have as many tokens.

    Args:
        keys: Raw keys of groups, [N, M, g, D], D at most MAX_DIM.
    """
    n, num_groups, group_size, dim = keys.shape
    count = index.num_keys(group_size)
    shape = (n, num_groups, count, ceil_div(dim * index.bits, 8))
    codes = torch.empty(shape, dtype=torch.uint8, device=keys.device)
    shape = shape[: 2 if index.shares_scale else 3]
    scales = torch.empty(shape, dtype=torch.float16, device=keys.device)
    _launch(keys.flatten(1, 2), (codes, scales), (num_groups, group_size), index, centre)
    return codes, scales


def _launch(
    k: Tensor,
    results: tuple[Tensor, ...],
    sizes: tuple[int, int],
    index: LowBits,
    centre: Tensor | None,
) -> None:
    """Fill keys, or codes and scales; `sizes` are groups and their tokens."""
    num_groups, group_size = sizes
    count = index.num_keys(group_size)
    k = contiguous_rows(k)
    n, _, dim = k.shape
    if centre is None:
        centre = k.new_zeros(n, dim)
    block_p = power_of_2(count)
    block_g = max(1, _ROWS // block_p)
    signs, unit = signs_of(dim, k.device)
    launch(
        index_keys_kernel,
        (ceil_div(num_groups, block_g), n),
        ((k, centre.float().contiguous(), signs), results, num_groups, unit),
        (k.stride()[:-1],),
        GROUP_SIZE=group_size,
        PARTS=count,
        SHARED=index.shares_scale,
        BITS=index.bits,
        LEVELS=low_bits.LEVELS[index.bits],
        AS_CODES=len(results) > 1,
        HEAD_DIM=dim,
        BLOCK_D=max(16, power_of_2(dim)),
        BLOCK_P=block_p,
        BLOCK_G=block_g,
        num_warps=4,
    )
