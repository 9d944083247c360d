"""Copy new tokens of all layers from pages of the device to pages of the host, in one launch."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.launch import ceil_div, launch
from corecontext.ops.triton.paged.pages import Pages
from corecontext.ops.triton.paged.store_tokens import stored_tile


@triton.jit
def _page_rows(slots_ptr, tokens, exists, heads, strides, page_size):
    """Return the offsets of tokens of KV heads from a layer's first page, and which have a slot."""
    slots = tl.load(slots_ptr + tokens, mask=exists, other=-1).to(tl.int64)
    at = slots // page_size * strides[0] + slots % page_size * strides[1]
    return at + heads * strides[2], slots >= 0


@triton.jit(
    do_not_specialize=["num_tokens", "num_layers"],
    do_not_specialize_on_alignment=["slots_ptr", "far_slots_ptr"],
)
def _copy_kernel(
    base_ptr,
    layers_ptr,
    slots_ptr,
    far_slots_ptr,
    num_tokens,
    num_layers,
    strides,
    page_size,
    far_page_size,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy tokens of all KV heads. Grid: (programs,), each of which copies BLOCK_T tokens of a
    layer, then those so many programs further on, up to the last of the last layer.

    Args:
        base_ptr: Keys of the first layer on the device.
        layers_ptr: [layers, 4], elements from there to each layer's keys and values on the device
            and in host memory.
        slots_ptr, far_slots_ptr: Where each token is, and where it goes, page times page size plus
            entry; -1 for nowhere.
        strides: Of pages, entries and KV heads, on the device and in host memory.
        ALIGNED: Divides all of `layers_ptr`.
    """
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    head = row % BLOCK_H
    dims = tl.arange(0, BLOCK_D)
    tiles = tl.cdiv(num_tokens, BLOCK_T)
    for tile in range(tl.program_id(0), num_layers * tiles, tl.num_programs(0)):
        layer_ptr = layers_ptr + tile // tiles * 4
        token = tile % tiles * BLOCK_T + row // BLOCK_H
        exists = (token < num_tokens) & (head < NUM_HEADS)
        source, is_kept = _page_rows(slots_ptr, token, exists, head, strides[0], page_size)
        target, is_far = _page_rows(far_slots_ptr, token, exists, head, strides[1], far_page_size)
        mask = (is_kept & is_far)[:, None] & (dims < HEAD_DIM)[None, :]
        for i in tl.static_range(2):
            near_at = tl.multiple_of(tl.load(layer_ptr + i), ALIGNED)
            far_at = tl.multiple_of(tl.load(layer_ptr + 2 + i), ALIGNED)
            x = tl.load(base_ptr + near_at + source[:, None] + dims[None, :], mask=mask)
            tl.store(base_ptr + far_at + target[:, None] + dims[None, :], x, mask=mask)


def copy_tokens(
    layers: Sequence[tuple[Pages, Pages]],
    slots: Tensor,
    far_slots: Tensor,
    num_programs: int | None = None,
) -> None:
    """Copy tokens of all layers from their pages of the device to those of the host.

    Args:
        layers: Of each layer, the pages of the device and of the host, in all layers of the same
            shapes and strides.
        slots, far_slots: Where each token is and where it goes, [T] in int64: page times entries of
            a page plus entry, -1 for nowhere.
        num_programs: As of `store_tokens`.
    """
    near, far = layers[0][0].k, layers[0][1].k
    tensors = [x for device, host in layers for x in (device.k, device.v, host.k, host.v)]
    places = _places(tuple(x.data_ptr() for x in tensors), near.element_size(), near.device)
    heads, dim = near.shape[2:]
    block_t, block_h, block_d = stored_tile(heads, dim, near.element_size())
    count = slots.shape[0]
    tiles = len(layers) * ceil_div(count, block_t)
    launch(
        _copy_kernel,
        (min(tiles, num_programs or tiles),),
        (near, places.offsets, slots, far_slots, count, len(layers)),
        ((near.stride()[:3], far.stride()[:3]), near.shape[1], far.shape[1]),
        NUM_HEADS=heads,
        HEAD_DIM=dim,
        ALIGNED=places.aligned,
        BLOCK_T=block_t,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=4,
    )


class _Places(NamedTuple):
    """Tell where tensors begin."""

    offsets: Tensor
    """Elements from the first tensor to each, in int64."""
    aligned: int
    """Power of two that divides all of them, at most 16."""


@functools.lru_cache(maxsize=4)
def _places(addresses: tuple[int, ...], itemsize: int, device: torch.device) -> _Places:
    """Return where tensors begin. It is kept: the copy to the device waits for all work there."""
    offsets = [(address - addresses[0]) // itemsize for address in addresses]
    return _Places(torch.tensor(offsets, device=device), math.gcd(16, *offsets))
