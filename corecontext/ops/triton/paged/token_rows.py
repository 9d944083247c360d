"""Describe the new tokens of a step one by one, by a launch that a graph can capture: replayed, it
writes the rows of the newest step into the same buffers."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.launch import ceil_div, ints, launch
from corecontext.ops.triton.paged.pages import Batch
from corecontext.ops.triton.primitives import integers

BLOCK = 128
"""New tokens of a program."""


class Rows(NamedTuple):
    """Hold what the kernels of fetch read of each new token, [T] in int32."""

    sequences: Tensor
    """Row of the block tables; the first for tokens that fill up a captured batch."""
    positions: Tensor
    """Position in its sequence; 0 for such tokens."""
    pads: Tensor
    """Minus the position, for tokens that choose; 1, as of position -1, which has no far past, for
    those that see all tokens raw. Kernels of a decoding step take it as a row's padding, of 0
    tokens seen."""

    def part(self, tokens: slice) -> Rows:
        """Return the rows of some tokens."""
        return Rows(*(x[tokens] for x in self))


@triton.jit
def _rows_kernel(
    starts_ptr, lengths_ptr, full_until_ptr, rows_ptr, clock_ptr, numbers, BLOCK: tl.constexpr
):
    """Write the rows of BLOCK tokens, and count the step. Grid: (blocks of tokens,).

    Args:
        starts_ptr, lengths_ptr: As of `pages.Batch`.
        full_until_ptr, rows_ptr: As of `write_rows`.
        clock_ptr: Steps so far, one more afterwards.
        numbers: Sequences, new tokens, and the tokens that rows_ptr has room for.
    """
    num_sequences, num_tokens, room = integers(numbers)
    if tl.program_id(0) == 0:
        tl.store(clock_ptr, tl.load(clock_ptr) + 1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A token's sequence is the last one that begins no later: halve the range until it has one.
    sequence = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_sequences
    width = num_sequences
    while width > 1:
        middle = (sequence + high) // 2
        is_later = (tl.load(starts_ptr + middle) <= token) & (high - sequence > 1)
        high = tl.where(is_later, high, middle)
        sequence = tl.where(is_later, middle, sequence)
        width = (width + 1) // 2
    end = tl.load(starts_ptr + sequence + 1)
    exists = token < end
    position = tl.where(exists, tl.load(lengths_ptr + sequence) - end + token, 0)
    chooses = exists & (position >= tl.load(full_until_ptr + sequence))
    inside = token < num_tokens
    # vLLM may fill up a table with rows of no pages.
    # mutant vllm: tokens that fill up a batch read a row of no pages
    tl.store(rows_ptr + token, tl.where(exists, sequence, 0), mask=inside)
    tl.store(rows_ptr + room + token, position, mask=inside)
    # mutant vllm: tokens of a prompt choose
    pads = tl.where(chooses, -position, 1)
    tl.store(rows_ptr + 2 * room + token, pads, mask=inside)


@functools.cache
def clock_of(device: torch.device) -> Tensor:
    """Return the number of steps so far, [1] in int64; all layers read one clock."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def write_rows(batch: Batch, full_until: Tensor, num_tokens: int, buffer: Tensor) -> Rows:
    """Describe the first `num_tokens` new tokens of a batch, and count its step, by one launch.

    Args:
        full_until: [B] in int32: tokens of a sequence before this position see all tokens raw.
        buffer: [3, at least num_tokens] in int32, written: a line for each field of `Rows`.
    """
    launch(
        _rows_kernel,
        (ceil_div(num_tokens, BLOCK),),
        (
            *(batch.starts, batch.lengths, full_until, buffer, clock_of(buffer.device)),
            ints(batch.lengths.shape[0], num_tokens, buffer.stride(0)),
        ),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return Rows(*buffer[:, :num_tokens])
