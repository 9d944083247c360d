"""Unite the keys of groups to segments (`index.segments`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.launch import contiguous_rows, launch, power_of_2

MAX_GROUP = 64
"""Most tokens of a group, whose errors one program holds."""
_ELEMENTS = 2048  # of a group's keys, that a warp holds
_ON_GPU = False
"""Whether GPUs unite keys by this kernel: it compiles, and no GPU has run it yet."""


def takes(group_size: int) -> bool:
    """Whether the kernel takes groups of this size; else PyTorch unites their keys."""
    return group_size <= MAX_GROUP and (_ON_GPU or triton.knobs.runtime.interpret)


@triton.jit
def segment_means(
    keys_ptr,
    stride_token,
    group_size,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the means of a group's segments (`index.segments`) [BLOCK_P, BLOCK_D]; keys_ptr points
    to its first key."""
    tokens = tl.arange(0, BLOCK_G)
    rows = tokens[:, None]
    columns = tokens[None, :]
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < HEAD_DIM
    is_key = (rows < group_size) & in_dims[None, :]
    keys = tl.load(keys_ptr + rows * stride_token + dims[None, :], mask=is_key, other=0.0)
    keys = keys.to(tl.float32)
    error = tl.zeros([BLOCK_G, BLOCK_G], tl.float32)
    for i in range(group_size):
        key = tl.load(keys_ptr + i * stride_token + dims, mask=in_dims, other=0.0).to(tl.float32)
        apart = tl.where(is_key, keys - key[None, :], 0.0)
        error = tl.where(columns == i, tl.sum(apart * apart, 1)[:, None] / 2, error)

    # The row of a segment's first token and the column say the same; others are not read.
    begins = (tokens < group_size).to(tl.int32)
    number = tl.zeros([BLOCK_G], tl.float32) + 1
    for _ in range(group_size - PARTS):
        rank = tl.cumsum(begins, 0)
        are_neighbours = (rank[None, :] - rank[:, None] == 1) & (begins[None, :] == 1)
        are_neighbours = are_neighbours & (begins[:, None] == 1)
        candidates = tl.where(are_neighbours, error, float("inf"))
        least = tl.min(tl.min(candidates, 1), 0)
        pair = tl.where(candidates == least, rows * BLOCK_G + columns, BLOCK_G * BLOCK_G - 1)
        first = tl.min(tl.min(pair, 1), 0)
        left = first // BLOCK_G
        right = first % BLOCK_G
        to_left = tl.sum(tl.where(rows == left, error, 0.0), 0)
        to_right = tl.sum(tl.where(rows == right, error, 0.0), 0)
        size_left = tl.sum(tl.where(tokens == left, number, 0.0), 0)
        size_right = tl.sum(tl.where(tokens == right, number, 0.0), 0)
        total = size_left + size_right
        united = (size_left + number) * to_left + (size_right + number) * to_right
        united = (united - number * least) / (total + number)
        error = tl.where(rows == left, united[None, :], error)
        across = tl.sum(tl.where(rows == columns, united[None, :], 0.0), 1)
        error = tl.where(columns == left, across[:, None], error)
        number = tl.where(tokens == left, total, number)
        begins = tl.where(tokens == right, 0, begins)

    part_of = tl.cumsum(begins, 0) - 1
    part_idx = tl.arange(0, BLOCK_P)
    means = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_P], tl.float32)
    for i in range(group_size):
        is_part = part_idx == tl.sum(tl.where(tokens == i, part_of, 0), 0)
        key = tl.load(keys_ptr + i * stride_token + dims, mask=in_dims, other=0.0).to(tl.float32)
        means += tl.where(is_part[:, None], key[None, :], 0.0)
        count += is_part.to(tl.float32)
    return means / tl.maximum(count, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_groups"])
def segment_means_kernel(
    k_ptr,
    means_ptr,
    num_groups,
    stride_n,
    stride_token,
    GROUP_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the means of each group's segments [N, M, P, D].

    Grid: (M, N).
    """
    group = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    keys_ptr = k_ptr + n * stride_n + group * GROUP_SIZE * stride_token
    means = segment_means(
        keys_ptr, stride_token, GROUP_SIZE, PARTS, HEAD_DIM, BLOCK_G, BLOCK_P, BLOCK_D
    )
    part_idx = tl.arange(0, BLOCK_P)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    at = ((n * num_groups + group) * PARTS + part_idx) * HEAD_DIM + dims
    tl.store(means_ptr + at, means, mask=(part_idx < PARTS) & (dims < HEAD_DIM))


def build(k: Tensor, num_groups: int, group_size: int, num_parts: int) -> Tensor:
    """Return the means of `num_parts` segments of each group [N, M, P, D] in float32, of groups of
    at most MAX_GROUP tokens.

    Args:
        k: Raw keys from the first group on, [N, S, D].
    """
    k = contiguous_rows(k)
    n, _, dim = k.shape
    means = torch.empty((n, num_groups, num_parts, dim), dtype=torch.float32, device=k.device)
    block_g = max(2, power_of_2(group_size))
    block_d = power_of_2(dim)
    if num_groups:
        launch(
            segment_means_kernel,
            (num_groups, n),
            (k, means, num_groups),
            tuple(k.stride()[:-1]),
            GROUP_SIZE=group_size,
            PARTS=num_parts,
            HEAD_DIM=dim,
            BLOCK_G=block_g,
            BLOCK_P=power_of_2(num_parts),
            BLOCK_D=block_d,
            num_warps=min(8, max(1, block_g * block_d // _ELEMENTS)),
        )
    return means
