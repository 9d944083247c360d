"""Tile sizes of the attention kernels: a table by head size, dtype and shared memory, never tuned while running."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """Queries and keys of a tile, and how Triton compiles the kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@functools.lru_cache(maxsize=None)
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def forward_tiles(q: Tensor) -> Tiles:
    """For `attend`."""
    dim, shared = q.shape[-1], _shared_memory(q.device)
    if shared == 0:
        return Tiles(32, 32, 4, 1)
    if q.dtype == torch.float32:
        return Tiles(64, 32, 4, 2) if dim <= 128 else Tiles(32, 16, 4, 2)
    if shared < 160 * 1024:  # Ampere and later chips made for graphics
        return Tiles(64, 64, 4, 2) if dim <= 128 else Tiles(64, 32, 4, 2)
    return Tiles(128, 64, 8, 2) if dim > 128 else Tiles(64, 64, 4, 3)


def dq_tiles(q: Tensor) -> Tiles:
    """For the gradient of queries; block_m queries are what a program owns."""
    return _backward_tiles(q)


def dkv_tiles(q: Tensor) -> Tiles:
    """For the gradients of keys; block_m keys are what a program owns."""
    return _backward_tiles(q)


def _backward_tiles(q: Tensor) -> Tiles:
    dim, shared = q.shape[-1], _shared_memory(q.device)
    if shared == 0:
        return Tiles(32, 32, 4, 1)
    if q.dtype == torch.float32:
        return Tiles(32, 32, 4, 1) if dim <= 128 else Tiles(16, 16, 4, 1)
    if dim > 128:
        return Tiles(64, 32, 8, 1)
    if shared < 160 * 1024:
        return Tiles(64, 32, 4, 2)
    return Tiles(64, 32, 4, 3)
