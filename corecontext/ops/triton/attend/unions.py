"""List the union of neighbouring queries' choices, with the queries that chose each group.

Neighbours choose alike. So a union of the choices of QUERIES queries has only a few times the
groups of one choice: a kernel reads it once for all of them, and masks each row to its own groups.
Groups that only one half of the queries chose lie at its ends, so that the other half can leave out
most of them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.attend.marks import Marks
from corecontext.ops.triton.attend.shares import groups_seen
from corecontext.ops.triton.launch import ceil_div, ints, launch
from corecontext.ops.triton.primitives import integers

QUERIES = 32  # queries of a union, a bit each
_WORDS = 4  # of marks, for 32 entries of the far past each, that a program reads at a time


class Unions(NamedTuple):
    """Hold the unions of N sequences: I of each, one for QUERIES queries, of at most U groups."""

    groups: Tensor
    """Groups that some query chose and sees, [N, I, U] in int32: those that only the first half of
    the queries chose, those of both halves, those of the second half alone, each rising; undefined
    behind them."""
    queries: Tensor
    """Bit i for each group: whether query i chose and sees it, [N, I, U] in int32."""
    ends: Tensor
    """Where these three lists end, [N, I, 3] in int32; so the last one is the groups' number."""


@triton.jit
def _either(a, b):
    """Return the bits of either word."""
    return a | b


@triton.jit
def _count(words):
    """Return the number of bits of words [W]."""
    return tl.sum(tl.sum((words[:, None] >> tl.arange(0, 32)[None, :]) & 1, 1), 0)


@triton.jit
def _words_seen(words_ptr, start, seen, exists, WORDS: tl.constexpr):
    """Return the marks of queries, [queries, WORDS], of those entries that each of them sees.

    Args:
        words_ptr: Each query's words, [queries, 1].
        start: The first word's number.
        seen: Entries that each query sees, those before its groups included, [queries, 1].
        exists: Whether there is such a query, [queries, 1].
    """
    word = start + tl.arange(0, WORDS)[None, :]
    # Rows of marks have whole tiles of 128 entries, so no word is outside.
    words = tl.load(words_ptr + word, mask=exists, other=0)
    # mutant fetch: a union shows groups before they are far past
    count = tl.minimum(tl.maximum(seen - word * 32, 0), 32)
    return words & tl.where(count < 32, ~(-1 << tl.minimum(count, 31)), -1)


@triton.jit
def union_kernel(
    words_ptr, unions, numbers, share, rule, QUERIES: tl.constexpr, WORDS: tl.constexpr
):
    """Write the union of QUERIES neighbouring queries.

    Grid: (I, N). A program reads the marks of its queries twice, WORDS words at a time: to count
    the groups of the three lists, and to write them.

    Args:
        words_ptr: Marks of shares, [N, C, W].
        unions: Pointers to the tensors of `Unions`.
        numbers: As unpacked: C is num_shares, W num_words, U `most`; group 0 is entry first_entry.
        share: Queries of a share.
    """
    num_queries, num_groups, num_shares, num_words, q_start, first_entry, most = integers(numbers)
    groups_ptr, queries_ptr, ends_ptr = unions
    item = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    words_ptr += tl.program_id(1).to(tl.int64) * num_shares * num_words
    first_row = tl.program_id(0) * QUERIES
    last = q_start + tl.minimum(first_row + QUERIES, num_queries) - 1
    end = tl.cdiv(first_entry + groups_seen(last, rule, num_groups), 32)
    rows = first_row + tl.arange(0, QUERIES)
    exists = (rows < num_queries)[:, None]
    number = (q_start + tl.minimum(rows, num_queries - 1)) // share - q_start // share  # share
    words_ptr += (number.to(tl.int64) * num_words)[:, None]
    seen = (first_entry + groups_seen(q_start + rows, rule, num_groups))[:, None]
    is_first = (tl.arange(0, QUERIES) < QUERIES // 2)[:, None]
    only_first = 0
    of_both = 0
    for start in tl.range(0, end, WORDS):
        words = _words_seen(words_ptr, start, seen, exists, WORDS)
        of_first = tl.reduce(tl.where(is_first, words, 0), 0, _either)
        of_second = tl.reduce(tl.where(is_first, 0, words), 0, _either)
        only_first += _count(of_first & ~of_second)
        of_both += _count(of_first & of_second)
    # Where the next groups of each list go.
    first_place = item * most
    both_place = first_place + only_first
    second_place = both_place + of_both
    for i in tl.static_range(2):
        tl.store(ends_ptr + item * 3 + i, only_first + i * of_both)
    bit = tl.arange(0, 32)  # of a word
    within = tl.arange(0, WORDS)[:, None] * 32 + bit[None, :]  # entry among those of WORDS words
    shift = tl.arange(0, QUERIES)[:, None, None]
    for start in tl.range(0, end, WORDS):
        words = _words_seen(words_ptr, start, seen, exists, WORDS)
        bits = (words[:, :, None] >> bit[None, None, :]) & 1
        # For each group the queries that chose it, as bits.
        chosen = tl.reshape(tl.sum(bits << shift, 0), [32 * WORDS])
        group = tl.reshape(start * 32 + within - first_entry, [32 * WORDS])
        in_first = chosen & ((1 << (QUERIES // 2)) - 1) != 0
        in_second = (chosen >> (QUERIES // 2)) != 0
        # Counts of the three lists so far, each in 10 bits of a number.
        unit = tl.where(in_first, tl.where(in_second, 1 << 10, 1), 1 << 20)
        counts = tl.cumsum(tl.where(chosen != 0, unit, 0), 0)
        of_list = tl.where(in_first, tl.where(in_second, counts >> 10, counts), counts >> 20)
        place = tl.where(in_first, tl.where(in_second, both_place, first_place), second_place)
        place += of_list % 1024 - 1
        tl.store(groups_ptr + place, group, mask=chosen != 0)
        tl.store(queries_ptr + place, chosen, mask=chosen != 0)
        total = tl.max(counts, 0)
        first_place += total % 1024
        both_place += (total >> 10) % 1024
        second_place += total >> 20
    tl.store(ends_ptr + item * 3 + 2, (second_place - item * most).to(tl.int32))


def unite(
    marks: Marks,
    first_entry: int,
    places: tuple[int, int, int],
    num_chosen: int,
    rule: tuple[int, int, int],
) -> Unions:
    """Unite the choices of neighbouring queries.

    Args:
        marks: Of the choice, where group 0 is entry first_entry.
        places: Position of the first query, number of queries, and of groups.
        num_chosen: Groups that a share chooses at most.
    """
    q_start, num_queries, num_groups = places
    n, num_shares, num_words = marks.words.shape
    shares = min(QUERIES, ceil_div(QUERIES - 1, marks.share) + 1)
    shape = (n, ceil_div(num_queries, QUERIES))
    most = max(1, min(num_groups, shares * num_chosen))
    # Tensors of their own, which begin at a multiple of 16 bytes: one kernel takes all.
    groups = marks.words.new_empty((*shape, most))
    queries = torch.empty_like(groups)
    ends = marks.words.new_empty((*shape, 3))
    launch(
        union_kernel,
        (shape[1], n),
        (
            marks.words,
            (groups, queries, ends),
            ints(num_queries, num_groups, num_shares, num_words, q_start, first_entry, most),
        ),
        (marks.share, rule),
        QUERIES=QUERIES,
        WORDS=_WORDS,
        num_warps=1,
    )
    return Unions(groups, queries, ends)
