"""Encode the index in low bits of many groups, as a cache stores it (`ops/fetch/low_bits.py`), in
one reading of the raw keys."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.fetch.low_bits import columns_of_codes, rotation
from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode.plan import Tile, index_form
from corecontext.ops.triton.decode.write_index import encode_keys, part_means
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2
from corecontext.ops.triton.primitives import tile_mask


@triton.jit(do_not_specialize=["num_groups"])
def index_codes_kernel(
    inputs,
    stored,
    num_groups,
    strides,
    GROUP_SIZE: tl.constexpr,
    INDEX: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the codes and scales of groups.

    Grid: (M, N).

    Args:
        inputs: Pointers to raw keys from the first group on, to the centre [N, D], and to the
            rotation in float32.
        stored: Pointers to codes [N, M, P, bytes] and scales [N, M, scales].
        strides: Of sequences and tokens.
    """
    k_ptr, centre_ptr, rotation_ptr = inputs
    KEYS: tl.constexpr = INDEX.keys
    BYTES: tl.constexpr = (TILE.dim * INDEX.bits + 7) // 8
    group = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, TILE.block_d)
    centre = tl.load(centre_ptr + n * TILE.dim + dims, mask=dims < TILE.dim, other=0.0)
    k_ptr += n * strides[0] + group * GROUP_SIZE * strides[1]
    means = part_means(k_ptr, strides[1], centre, GROUP_SIZE // KEYS, INDEX, TILE)
    packed, scales = encode_keys(means, rotation_ptr, INDEX, TILE)
    key = tl.arange(0, INDEX.block_p)
    cols = tl.arange(0, INDEX.block_c)
    at = n * num_groups + group
    place = stored[0] + (at * KEYS + key)[:, None] * BYTES + cols[None, :]
    tl.store(place, packed.to(tl.uint8), mask=tile_mask(key, KEYS, cols, BYTES))
    place = stored[1] + at * INDEX.scales + key
    tl.store(place, scales.to(tl.float16), mask=key < INDEX.scales)


@functools.lru_cache(maxsize=8)
def _columns(head_dim: int, bits: int, device: torch.device) -> Tensor:
    """Return the rotation's columns as `columns_of_codes`, in float32."""
    return columns_of_codes(rotation(head_dim, torch.float32, device), bits)


def encode(keys: Tensor, centre: Tensor | None, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return codes and scales as `LowBits.encode`, of parts of one size.

    Args:
        keys: [N, M, g, D].
        centre: [N, D], or None for zeros.
    """
    index = spec.index
    n, count, size, dim = keys.shape
    keys = contiguous_rows(keys.flatten(1, 2))
    if centre is None:
        centre = keys.new_zeros(n, dim)
    num_keys = index.num_keys(size)
    num_bytes = ceil_div(dim * index.bits, 8)
    codes = torch.empty((n, count, num_keys, num_bytes), dtype=torch.uint8, device=keys.device)
    scales_shape = (n, count) if index.shares_scale else (n, count, num_keys)
    scales = torch.empty(scales_shape, dtype=torch.float16, device=keys.device)
    launch(
        index_codes_kernel,
        (count, n),
        (
            (keys, centre.float().contiguous(), _columns(dim, index.bits, keys.device)),
            (codes, scales),
            count,
        ),
        (keys.stride()[:-1],),
        GROUP_SIZE=size,
        INDEX=index_form(spec, dim),
        # Queries and entries have no part in it.
        TILE=Tile(1, dim, 1, 1, max(16, power_of_2(dim)), vector=False, stages=1),
        num_warps=4,
    )
    return codes, scales
