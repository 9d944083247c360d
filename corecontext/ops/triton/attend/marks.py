"""Mark the entries of the far past that a share of queries does not see: one bit each.

A row of 32-bit words for each share holds a bit for each entry of `far_past.far_past`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.launch import ceil_div, ints, launch, power_of_2
from corecontext.ops.triton.primitives import integers


class Marks(NamedTuple):
    """Hold the marks of N sequences."""

    words: Tensor
    """[N, C, W] in int32; bit e % 32 of word e // 32 is that of entry e. W has room for whole tiles
    of 128 entries, so that a kernel reads the words of a tile without a mask."""
    share: int
    """Neighbouring queries with the same marks."""


class EntryMarks(NamedTuple):
    """Hold the same marks by entry, for a backward whose programs own keys."""

    words: Tensor
    """[N, E, W] in int32; bit c % 32 of word c // 32 is that of share c. W fits tiles of 64."""
    share: int


@triton.jit
def marks_of_rows(marks_ptr, n, position, q_start, shares):
    """Return a pointer to the words of each row of a tile of queries.

    Args:
        position: Of each row's query. Rows behind the last query get the words of the last share.
        shares: Queries of a share, number of shares, words of each share.
    """
    share, num_shares, num_words = shares
    number = tl.minimum(position // share - q_start // share, num_shares - 1)
    return marks_ptr + (n * num_shares + number).to(tl.int64) * num_words


@triton.jit
def marked_entries(marks, start, BLOCK: tl.constexpr):
    """Return which of BLOCK entries from start on are marked, [rows, entries]; `marks` are pointers
    of `marks_of_rows`, start is a multiple of BLOCK, which is at most 64."""
    offs = tl.arange(0, BLOCK)
    words = tl.load(marks + start // 32)[:, None]
    if BLOCK > 32:
        words = tl.where(offs[None, :] < 32, words, tl.load(marks + start // 32 + 1)[:, None])
    return (words >> ((start + offs) % 32)[None, :]) & 1 != 0


@triton.jit
def marked_keys(marks, entries):
    """Return which entries are marked, [entries, rows], as `marked_entries` does for a tensor of
    entries, at most 64 from a multiple of their count on."""
    word = tl.min(entries, 0) // 32
    words = tl.load(marks + word)[None, :]
    if entries.shape[0] > 32:
        words = tl.where(
            (entries // 32 == word)[:, None], words, tl.load(marks + word + 1)[None, :]
        )
    return (words >> (entries % 32)[:, None]) & 1 != 0


@triton.jit
def _mark_kernel(chosen_ptr, words_ptr, numbers, BY_ENTRY: tl.constexpr, BLOCK: tl.constexpr):
    """Set the bits of one share's groups.

    Grid: (N C,). With BY_ENTRY words are those of `EntryMarks`, else of `Marks`.
    """
    num_words, first_entry, num_entries, num_shares, num_chosen = integers(numbers)
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, BLOCK)  # among the k groups of the share
    group = tl.load(chosen_ptr + row * num_chosen + ranks, mask=ranks < num_chosen, other=-1)
    entry = tl.maximum(group, 0) + first_entry
    unit = tl.full([BLOCK], 1, tl.int32)
    if BY_ENTRY:
        share = row % num_shares
        bit = unit << (share % 32).to(tl.int32)
        place = (row // num_shares * num_entries + entry) * num_words + share // 32
    else:
        bit = unit << (entry % 32)
        place = row * num_words + entry // 32
    tl.atomic_or(words_ptr + place, bit, mask=group >= 0, sem="relaxed")


def mark(chosen: Tensor, share: int, num_entries: int, first_entry: int) -> Marks:
    """Mark chosen groups.

    Args:
        chosen: [N, C, k] in int32, -1 where there is none.
        num_entries: Entries of the far past, of which the first are first_entry raw tokens.
    """
    shape = (*chosen.shape[:2], 4 * ceil_div(max(1, num_entries), 128))
    return Marks(_words(chosen, shape, num_entries, first_entry, by_entry=False), share)


def mark_entries(chosen: Tensor, share: int, num_entries: int, first_entry: int) -> EntryMarks:
    """Mark chosen groups as `mark` does, by entry."""
    n, count, _ = chosen.shape
    shape = (n, num_entries, 2 * ceil_div(max(1, count), 64))
    return EntryMarks(_words(chosen, shape, num_entries, first_entry, by_entry=True), share)


def _words(
    chosen: Tensor, shape: tuple[int, ...], num_entries: int, first_entry: int, by_entry: bool
) -> Tensor:
    """Return words of this shape with the bits of chosen groups."""
    n, count, k = chosen.shape
    words = torch.zeros(shape, dtype=torch.int32, device=chosen.device)
    launch(
        _mark_kernel,
        (n * count,),
        (chosen, words, ints(shape[2], first_entry, num_entries, count, k)),
        BY_ENTRY=by_entry,
        BLOCK=power_of_2(k),
        num_warps=1,
    )
    return words
