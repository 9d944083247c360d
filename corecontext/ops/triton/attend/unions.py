"""List the union of neighbouring queries' choices, with the queries that chose each group.

Neighbours choose alike. So a union of the choices of QUERIES queries has only a few times the
groups of one choice: a kernel reads it once for all of them, and masks each row to its own groups.
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
    """Groups that some query chose and sees, rising, [N, I, U] in int32; undefined behind their
    count."""
    queries: Tensor
    """Bit i for each group: whether query i chose and sees it, [N, I, U] in int32."""
    counts: Tensor
    """Groups of each union, [N, I] in int32."""


@triton.jit
def union_kernel(
    words_ptr, unions, numbers, share, rule, QUERIES: tl.constexpr, WORDS: tl.constexpr
):
    """Write the union of QUERIES neighbouring queries.

    Grid: (I, N). A program reads the marks of its queries, WORDS words at a time.

    Args:
        words_ptr: Marks of shares, [N, C, W].
        unions: Pointers to the tensors of `Unions`.
        numbers: As unpacked: C is num_shares, W num_words, U `most`; group 0 is entry first_entry.
        share: Queries of a share.
    """
    num_queries, num_groups, num_shares, num_words, q_start, first_entry, most = integers(numbers)
    groups_ptr, queries_ptr, counts_ptr = unions
    item = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    words_ptr += tl.program_id(1).to(tl.int64) * num_shares * num_words
    first_row = tl.program_id(0) * QUERIES
    last = q_start + tl.minimum(first_row + QUERIES, num_queries) - 1
    end = first_entry + groups_seen(last, rule, num_groups)
    count = 0
    rows = first_row + tl.arange(0, QUERIES)
    exists = (rows < num_queries)[:, None]
    number = (q_start + tl.minimum(rows, num_queries - 1)) // share - q_start // share  # share
    words_ptr += number.to(tl.int64)[:, None] * num_words + tl.arange(0, WORDS)[None, :]
    seen = groups_seen(q_start + rows, rule, num_groups)[:, None, None]
    bit = tl.arange(0, 32)  # of a word
    within = tl.arange(0, WORDS)[:, None] * 32 + bit[None, :]  # entry among those of WORDS words
    shift = tl.arange(0, QUERIES)[:, None, None]
    for start in tl.range(0, end, 32 * WORDS):
        # [QUERIES, WORDS]; rows of marks have whole tiles of 128 entries, so no word is outside.
        words = tl.load(words_ptr + start // 32, mask=exists, other=0)
        group = start + within - first_entry
        # mutant fetch: a union shows groups before they are far past
        is_seen = group[None, :, :] < seen
        bits = tl.where(is_seen, (words[:, :, None] >> bit[None, None, :]) & 1, 0)
        # For each group the queries that chose it, as bits.
        chosen = tl.reshape(tl.sum(bits << shift, 0), [32 * WORDS])
        group = tl.reshape(group, [32 * WORDS])
        is_chosen = chosen != 0
        place = item * most + count + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        tl.store(groups_ptr + place, group, mask=is_chosen)
        tl.store(queries_ptr + place, chosen, mask=is_chosen)
        count += tl.sum(is_chosen.to(tl.int32), 0)
    tl.store(counts_ptr + item, count)


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
    counts = marks.words.new_empty(shape)
    launch(
        union_kernel,
        (shape[1], n),
        (
            marks.words,
            (groups, queries, counts),
            ints(num_queries, num_groups, num_shares, num_words, q_start, first_entry, most),
        ),
        (marks.share, rule),
        QUERIES=QUERIES,
        WORDS=_WORDS,
        num_warps=1,
    )
    return Unions(groups, queries, counts)
