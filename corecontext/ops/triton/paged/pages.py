"""Describe a cache in pages and a ragged batch of new tokens, as the kernels over block tables read
them.

In this folder's shapes P counts pages, E entries of a page, B sequences, and T the new tokens of
all sequences. These are in one tensor, those of a sequence side by side: a chunk of a prompt, one
token, or a token with drafts. Blocks of new tokens never cross sequences: sequence i has the blocks
starts[i] // BLOCK + i to starts[i+1] // BLOCK + i, both included, and may leave the last empty. So
the size of a launch depends on the number of tokens and of sequences only, and it can be captured.
All launches go to the current device, which is that of vLLM's worker.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Pages(NamedTuple):
    """Hold pages of keys and values, of raw tokens or of core tokens, and their block table.

    Entry e of sequence i is entry e mod E of page table[i, e // E]; for raw tokens e is the
    position, for core tokens the number of the group.
    """

    k: Tensor
    """[P, E, Hkv, D], the last dimension contiguous."""
    v: Tensor
    """As k, with the same strides."""
    table: Tensor
    """[B, most pages of a sequence] in int32; pages that no query reads need no valid number."""
    mass: Tensor | None = None
    """Of core tokens, [P, E, Hkv] in float32; None where nothing is added to their scores."""


class IndexPages(NamedTuple):
    """Hold the index of fetch in low bits, beside the core tokens in their pages."""

    codes: Tensor
    """Packed numbers of each group's keys, [P, E, Hkv, bytes of a group] in uint8, the last
    dimension contiguous."""
    scales: Tensor
    """[P, E, Hkv, 1 or keys of a group] in float16."""
    centres: Tensor
    """[P, Hkv, D] in float32, the last dimension contiguous. Row p is the centre of the sequences
    whose first page is p; other rows are undefined."""
    rotations: tuple[Tensor, Tensor]
    """The matrix that rotates keys before they are rounded: in the dtype of queries, its columns in
    the order of the codes (`low_bits.columns_of_codes`), and its signs (`rotation_signs`)."""


class Batch(NamedTuple):
    """Tell which new tokens belong to which sequence."""

    starts: Tensor
    """[B + 1] in int32, from 0: sequence i has the new tokens starts[i] .. starts[i+1]-1."""
    lengths: Tensor
    """[B] in int32: tokens of each sequence, the new ones included."""
    most_new: int
    """At least the new tokens of each sequence."""
    longest: int
    """At least the tokens of each sequence."""


def alignment_of(*tensors: Tensor) -> int:
    """Return the most bytes, 16 or fewer, that divide the address of every row: a kernel that reads
    rows of one tensor or another must tell the compiler."""
    distances = [x.data_ptr() for x in tensors]
    distances += [stride * x.element_size() for x in tensors for stride in x.stride()[:-1]]
    return math.gcd(16, *distances)


def strides_of(raw: Pages, cores: Pages, mass: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the strides (page, entry, KV head) of raw tokens, of core tokens and of masses, and
    those of the two tables' rows."""
    tables = (raw.table.stride(0), cores.table.stride(0))
    return raw.k.stride()[:3], cores.k.stride()[:3], mass.stride()[:3], tables


def num_blocks(tokens: int, sequences: int, block: int) -> int:
    """Return the blocks of a launch over the new tokens of a batch."""
    return tokens // block + sequences


@triton.jit
def owned_block(starts_ptr, num_sequences, block, BLOCK: tl.constexpr):
    """Return the sequence of a block, the last that begins no later, and the block's number within
    it."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(starts_ptr + middle) // BLOCK + middle
        if begin <= block:
            low = middle
        else:
            high = middle
    return low, block - tl.load(starts_ptr + low) // BLOCK - low


@triton.constexpr_function
def gcd(*numbers):
    """Return the greatest common divisor."""
    return math.gcd(*numbers)


@triton.jit
def page_offsets(table_ptr, entries, mask, strides, PAGE: tl.constexpr):
    """Return the offsets of a sequence's entries from the first page, in elements, in int64.

    Args:
        table_ptr: Row of the block table of this sequence.
        entries: Their numbers in the sequence.
        mask: Which of them to look up; the others get page 0.
        strides: Of pages, and of entries in a page.
        PAGE: Entries of a page.
    """
    page = tl.load(table_ptr + entries // PAGE, mask=mask, other=0).to(tl.int64)
    return page * strides[0] + (entries % PAGE) * strides[1]


@triton.jit
def pages_of_tile(table_ptr, first, end, members, COUNT: tl.constexpr, PAGE: tl.constexpr):
    """Return the pages, in int64, of the members of a tile of COUNT entries from `first` on, which
    is a multiple of COUNT or of PAGE; from `end` on page 0.

    Threads look up the pages of all runs of neighbours, few and the same for all: by looking up
    each of its own entries a thread loses more time than it takes to read them.
    """
    RUN: tl.constexpr = gcd(COUNT, PAGE)
    pages = members * 0
    for i in tl.static_range(COUNT // RUN):
        entry = first + i * RUN
        page = tl.load(table_ptr + entry // PAGE, mask=entry < end, other=0)
        # mutant vllm: all members of a tile have its last page
        pages = tl.where(members // RUN == i, page, pages)
    return pages.to(tl.int64)
