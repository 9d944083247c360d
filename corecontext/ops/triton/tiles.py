"""Choose tile sizes of kernels and splits of a decoding step by tables, never tuned while running;
the kernels for Hopper have their own.

They depend on head size, dtype and `Chip` alone, so that tests can ask about any chip.
"""

import functools
from typing import NamedTuple

import torch

from corecontext.ops.triton.launch import ceil_div, power_of_2

_WHOLE_GROUP = 16384  # most elements of keys of a padded group that one program holds in registers
_ELEMENTS = 32 * 64  # elements of keys that a warp of a pooling kernel holds
MOST_SPLITS = 127  # programs of a KV head: with the new token, 128 parts that one program merges


class Tiles(NamedTuple):
    """Hold a tile's queries (block_m) and keys (block_n), and how Triton compiles the kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Chip(NamedTuple):
    """Hold the sizes of a device that the tables depend on."""

    shared_memory: int
    """Bytes that one program may use; 0 for the interpreter."""
    multiprocessors: int


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """Return the chip of a device."""
    if device.type != "cuda":
        return Chip(shared_memory=0, multiprocessors=8)
    properties = torch.cuda.get_device_properties(device)
    return Chip(
        max(properties.shared_memory_per_block, properties.shared_memory_per_block_optin),
        properties.multi_processor_count,
    )


def forward_tiles(chip: Chip, dtype: torch.dtype, dim: int) -> Tiles:
    """Choose for the forward of attention: a program owns block_m queries."""
    shared = chip.shared_memory
    if shared == 0:
        return Tiles(32, 32, 4, 1)
    if dtype == torch.float32:
        return Tiles(64, 32, 4, 2) if dim <= 128 else Tiles(32, 16, 4, 2)
    if shared < 160 * 1024:  # Ampere and later chips made for graphics
        return Tiles(64, 64, 4, 2) if dim <= 128 else Tiles(64, 32, 4, 2)
    return Tiles(128, 64, 8, 2) if dim > 128 else Tiles(64, 64, 4, 3)


def dq_tiles(chip: Chip, dtype: torch.dtype, dim: int) -> Tiles:
    """Choose for the gradient of queries: a program owns block_m queries."""
    shared = chip.shared_memory
    if shared == 0:
        return Tiles(32, 32, 4, 1)
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1) if dim <= 128 else Tiles(16, 16, 4, 1)
    if dim > 128:
        return Tiles(64, 32, 8, 1)
    if shared < 160 * 1024:
        return Tiles(64, 32, 4, 2)
    return Tiles(64, 32, 4, 3)


def dkv_tiles(chip: Chip, dtype: torch.dtype, dim: int) -> Tiles:
    """Choose for the gradients of keys and values: a program owns block_m keys."""
    if dim > 128 and dtype != torch.float32 and 0 < chip.shared_memory < 160 * 1024:
        return Tiles(32, 32, 8, 1)  # 80 KiB; block_m 64 would take 112 of the 99 that there are
    return dq_tiles(chip, dtype, dim)


def choose_tiles(chip: Chip, dtype: torch.dtype, dim: int) -> Tiles:
    """Choose for scores of groups: block_m shares of up to four heads, block_n groups."""
    shared = chip.shared_memory
    if shared == 0:
        return Tiles(32, 32, 4, 1)
    if dtype == torch.float32 or dim > 128:
        return Tiles(16, 32, 4, 1)
    if shared < 160 * 1024:
        return Tiles(32, 64, 4, 2)
    if shared < 200 * 1024:  # Ampere's matrix products hold more in registers
        return Tiles(64, 32, 4, 2)
    return Tiles(64, 64, 4, 2)


def fetch_tiles(chip: Chip, dtype: torch.dtype, dim: int, rows: int) -> Tiles:
    """Choose for raw tokens of chosen groups: block_n tokens, and at most block_m of the `rows`
    queries, of all r heads, that see the same tokens."""
    shared = chip.shared_memory
    if shared == 0:
        return Tiles(32, 32, 4, 1)
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1) if dim <= 128 else Tiles(16, 16, 4, 1)
    if dim > 128:
        return Tiles(32, 32, 4, 1)
    if shared < 160 * 1024:
        return Tiles(64, 32, 4, 2)
    # Few rows wait for their tokens, so the more programs the better.
    return Tiles(16, 32, 1, 3) if rows <= 16 else Tiles(64, 64, 4, 2)


def fetch_dq_tiles(chip: Chip, dtype: torch.dtype, dim: int, rows: int) -> Tiles:
    """Choose for gradient of queries through raw tokens of chosen groups, as `fetch_tiles`."""
    tiles = fetch_tiles(chip, dtype, dim, rows)
    # In half precision with much shared memory few rows get larger tiles than in the forward.
    return Tiles(16, 64, 2, 2) if tiles == (16, 32, 1, 3) else tiles


def fetch_dkv_tiles(chip: Chip, dtype: torch.dtype, dim: int, group_size: int) -> Tiles:
    """Choose for the gradients of raw tokens of chosen groups: at most block_m tokens of a group,
    block_n rows."""
    tiles = fetch_tiles(chip, dtype, dim, group_size)
    # Half precision with much shared memory: more rows at once, where a group is one tile.
    is_half_and_large = tiles in (Tiles(16, 32, 1, 3), Tiles(64, 64, 4, 2))
    return Tiles(32, 128, 4, 2) if is_half_and_large and group_size <= 32 else tiles


def paged_tiles(chip: Chip, dtype: torch.dtype, dim: int, rows: int) -> Tiles:
    """Choose for attention over pages: block_m of the `rows` that a sequence has for a KV head."""
    tiles = forward_tiles(chip, dtype, dim)
    is_half = dtype != torch.float32 and dim <= 128 and chip.shared_memory > 0
    if rows <= 16:  # the rows of the smallest matrix product
        return Tiles(16, 32, 1, 3) if is_half else tiles._replace(block_m=16)
    if is_half and rows > 64 and chip.shared_memory >= 160 * 1024:
        return Tiles(128, 64, 8, 3)
    return tiles


class PoolTiles(NamedTuple):
    """Hold a pooling tile's groups (block_m), tokens (block_g) and pairs of columns (block_p), and
    how Triton compiles the kernel."""

    whole: bool
    """Whether a program holds whole groups in registers; else it walks one group in blocks."""
    block_m: int
    block_g: int
    block_p: int
    num_warps: int


def pool_tiles(group_size: int, head_dim: int) -> PoolTiles:
    """Choose for `pool`, `pool_backward` and `pool_pages`.

    A thread holds 64 elements of K. With half of that, which spills no register, the backward takes
    2 to 14 % longer on an H200.
    """
    block_d = power_of_2(max(2, head_dim))
    block_g = power_of_2(group_size)
    size = block_g * block_d
    if size > _WHOLE_GROUP:
        # At least one token: a larger head_dim only makes the loop longer.
        return PoolTiles(False, 1, max(1, 4 * _ELEMENTS // block_d), block_d // 2, 4)
    block_m = max(1, _ELEMENTS // size)
    num_warps = min(16, max(1, size * block_m // _ELEMENTS))
    return PoolTiles(True, block_m, block_g, block_d // 2, num_warps)


class DecodeTiles(NamedTuple):
    """Hold a tile's query heads (block_m) and entries (block_n), how Triton compiles it, and
    whether its products are sums of vectors, without matrix instructions."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    vector: bool


def decode_tiles(chip: Chip, dtype: torch.dtype, heads: int, dim: int) -> DecodeTiles:
    """Choose for `decode_step`: `heads` query heads attend to the same entries. Tiles of 16 KiB of
    keys, several on the way at once."""
    block_d, block_m = power_of_2(max(dim, 16)), power_of_2(heads)
    interpreted = chip.shared_memory == 0
    if dtype == torch.float32:
        # True float32 has no tensor cores, and sums of vectors need no padded rows.
        block_n = 8 if interpreted else max(1, min(32, 4096 // (block_m * block_d)))
        return DecodeTiles(block_m, block_n, 4 if block_m * block_d <= 2048 else 8, 3, vector=True)
    block_m = max(16, block_m)  # rows of the smallest matrix product
    if interpreted:
        return DecodeTiles(block_m, 16, 4, 1, vector=False)
    # Many queries leave room for fewer tiles.
    large = block_m * block_d > 8192 and chip.shared_memory < 160 * 1024
    return DecodeTiles(block_m, min(128, 8192 // block_d), 4, 2 if large else 3, vector=False)


def decode_splits(chip: Chip, rows: int, capacity: int, block_n: int) -> int:
    """Choose among how many programs the entries of each of `rows` KV heads are split, from shapes
    only: a captured step keeps its launch.

    As many as run at once, three on a multiprocessor; more, so that the last ones do not run alone,
    where each still has 32 tiles; fewer where each would have less than two.
    """
    units = chip.multiprocessors
    wanted = max(3 * units // rows - 1, min(8 * units // rows, capacity // (32 * block_n)))
    return max(1, min(wanted, ceil_div(capacity, 2 * block_n), MOST_SPLITS))
