"""Store new tokens in their pages, of the device or of the host."""

import functools

import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.launch import (
    Constants,
    ceil_div,
    contiguous_rows,
    launch,
    power_of_2,
)
from corecontext.ops.triton.paged.pages import Pages

STORED_BYTES = 16384
"""Bytes of new keys and as many of values that a program stores at once."""


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    num_tokens,
    k_strides,
    v_strides,
    page_strides,
    page_size,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store new tokens, of all KV heads. Grid: (programs,), each of which stores BLOCK_T tokens,
    then those so many programs further on, up to the last.

    Args:
        k_ptr, v_ptr: [T, Hkv, D] of the new tokens.
        keys_ptr, values_ptr: Pages.
        slots_ptr: Where each token goes, page times page_size plus entry; -1 for nowhere.
        page_strides: Page, entry and KV head.
    """
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    head = row % BLOCK_H
    dims = tl.arange(0, BLOCK_D)
    for start in range(tl.program_id(0) * BLOCK_T, num_tokens, tl.num_programs(0) * BLOCK_T):
        token = start + row // BLOCK_H
        exists = (token < num_tokens) & (head < NUM_HEADS)
        slot = tl.load(slots_ptr + token, mask=exists, other=-1).to(tl.int64)
        mask = (slot >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
        token = token.to(tl.int64)
        at = (token * k_strides[0] + head * k_strides[1])[:, None] + dims[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        at = (token * v_strides[0] + head * v_strides[1])[:, None] + dims[None, :]
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        at = slot // page_size * page_strides[0] + slot % page_size * page_strides[1]
        at = (at + head * page_strides[2])[:, None] + dims[None, :]
        tl.store(keys_ptr + at, k, mask=mask)
        tl.store(values_ptr + at, v, mask=mask)


def store_tokens(
    k: Tensor, v: Tensor, slots: Tensor, pages: Pages, num_programs: int | None = None
) -> None:
    """Store new tokens in their pages.

    Args:
        k, v: [T, Hkv, D], rotary applied.
        slots: Where the first tokens of them go, [at most T] in int64: page times E plus entry, -1
            for nowhere.
        num_programs: At most so many programs store them, which leave the others of the device to
            what runs beside; None for as many as there are tiles.
    """
    k, v = map(contiguous_rows, (k, v))
    heads, dim = k.shape[1:]
    constants = _constants(heads, dim, k.element_size())
    tiles = ceil_div(slots.shape[0], constants.constants["BLOCK_T"])
    launch(
        _store_kernel,
        (min(tiles, num_programs or tiles),),
        (k, v, pages.k, pages.v, slots, slots.shape[0]),
        (k.stride()[:2], v.stride()[:2], pages.k.stride()[:3], pages.k.shape[1]),
        constants,
    )


@functools.cache
def _constants(heads: int, dim: int, itemsize: int) -> Constants:
    """Return what the kernel is compiled for."""
    block_t, block_h, block_d = stored_tile(heads, dim, itemsize)
    blocks = {"BLOCK_T": block_t, "BLOCK_H": block_h, "BLOCK_D": block_d}
    return Constants(NUM_HEADS=heads, HEAD_DIM=dim, **blocks, num_warps=4)


def stored_tile(heads: int, dim: int, itemsize: int) -> tuple[int, int, int]:
    """Return the tokens, KV heads and columns of a tile of `store_tokens`."""
    block_h, block_d = power_of_2(heads), power_of_2(dim)
    return max(1, STORED_BYTES // (block_h * block_d * itemsize)), block_h, block_d
