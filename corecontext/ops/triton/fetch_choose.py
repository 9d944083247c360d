"""Choose the groups whose raw tokens come back: the k with the best index scores.

The mean of a share's queries chooses, among the groups that the last of them sees. Scores of groups
are kept for a few shares at a time (`_SCORE_BYTES`); the k best are found by bisection of the bits
of a float.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.fetch_rule import Choosing, groups_of_share
from corecontext.ops.triton.fetch_scores import Queries, log_sums, score_groups
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2

_SCORE_BYTES = 256 << 20  # scores of groups in memory at a time
_SELECTED = 2048  # scores that a warp holds in registers
_MOST_SELECTED = 8192  # candidates that one program holds
_INFINITY_BITS = tl.constexpr(0x7F800001)  # the bits of NaN are cut to these


@triton.jit(
    do_not_specialize=[
        *("num_groups", "first_share", "q_end", "first_row", "num_rows"),
        *("stride_row", "first_out", "num_out"),
    ]
)
def _select_kernel(
    scores_ptr,
    numbers_ptr,
    chosen_ptr,
    chosen_scores_ptr,
    num_groups,
    first_share,
    q_end,
    first_row,
    num_rows,
    stride_row,
    first_out,
    num_out,
    num_chosen,
    share,
    group_size,
    window_size,
    sink_groups,
    FROM_CANDIDATES: tl.constexpr,
    TO_CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the numbers of the k best of BLOCK groups of one share, ascending, then -1.

    Grid: (N x num_rows, segments of groups). The scores are at least 0, so their bits, as whole
    numbers, have their order: bisection finds the score of the last one chosen. Of groups with that
    score the first ones are chosen.

    Args:
        numbers_ptr: The groups' numbers, where FROM_CANDIDATES: of the k best of each segment.
        chosen_scores_ptr: Where the chosen groups' scores go, where TO_CANDIDATES.
        first_row, num_rows: The shares whose scores there are.
        first_out, num_out: The first share's row of the output, of num_out rows for each sequence.
    """
    n = (tl.program_id(0) // num_rows).to(tl.int64)
    row = tl.program_id(0) % num_rows
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if FROM_CANDIDATES:
        count = stride_row
    else:
        shares = (first_share, share, q_end)
        rule = (group_size, window_size, sink_groups)
        count = groups_of_share(first_row + row, shares, rule, num_groups)
    first = (n * num_rows + row) * stride_row
    scores = tl.load(scores_ptr + first + offs, mask=offs < count, other=-1.0)
    bits = tl.minimum(scores.to(tl.int32, bitcast=True), _INFINITY_BITS)

    # At least k have bits low or more, fewer have high or more.
    low = tl.max(bits, 0) * 0
    high = tl.max(bits, 0) + 1
    at_low = tl.sum((bits >= low).to(tl.int32), 0)
    at_high = low
    while (at_low > num_chosen) & (high - low > 1):
        middle = low + (high - low) // 2
        at_middle = tl.sum((bits >= middle).to(tl.int32), 0)
        enough = at_middle >= num_chosen
        at_low = tl.where(enough, at_middle, at_low)
        at_high = tl.where(enough, at_high, at_middle)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)

    is_chosen = bits >= low
    if at_low > num_chosen:
        is_last = bits == low
        before = tl.cumsum(is_last.to(tl.int32), 0)
        # planted: fetch: of equal scores the last groups are chosen
        is_chosen = (bits >= high) | (is_last & (before <= num_chosen - at_high))
    numbers = offs
    if FROM_CANDIDATES:
        numbers = tl.load(numbers_ptr + first + offs, mask=is_chosen, other=-1)
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    out = (n * num_out + first_out + row) * tl.num_programs(1) + tl.program_id(1)
    tl.store(chosen_ptr + out * num_chosen + place, numbers, mask=is_chosen)
    slots = tl.arange(0, BLOCK_K)
    empty = (slots >= tl.minimum(at_low, num_chosen)) & (slots < num_chosen)
    tl.store(chosen_ptr + out * num_chosen + slots, slots * 0 - 1, mask=empty)
    if TO_CANDIDATES:
        values = bits.to(tl.float32, bitcast=True)
        tl.store(chosen_scores_ptr + out * num_chosen + place, values, mask=is_chosen)
        tl.store(chosen_scores_ptr + out * num_chosen + slots, slots * 0.0 - 1, mask=empty)


def choose(q: Tensor, index: Tensor, settings: Choosing, bias: Tensor | None = None) -> Tensor:
    """Choose groups for each share of queries.

    Args:
        q: The mean query of each of the C shares that the call touches, [N, r, C, D].
        index: Index keys, p for each group, [N, M, p, D]; a group's score is the log-sum-exp of
            its keys' scores.
        bias: Added to the scores of each group, [N, r, M] in float32, or None for zeros.

    Returns:
        The numbers of the chosen groups of each share, [N, C, k] in int32, ascending, then -1 where
        fewer than k are visible. The same from run to run.
    """
    q = contiguous_rows(q)
    index = contiguous_rows(index)
    n, _, count, _ = q.shape
    num_groups = index.shape[1]
    chosen = torch.empty((n, count, settings.num_chosen), dtype=torch.int32, device=q.device)
    if not chosen.numel():
        return chosen
    if not settings.visible_groups(count - 1, num_groups):
        return chosen.fill_(-1)
    call = Queries(q, index, bias, settings)
    lse = log_sums(call)
    # Scores of as many shares as fit into the memory.
    first = 0
    while first < count:
        visible = settings.visible_groups(count - 1, num_groups)
        size = min(count - first, max(1, _SCORE_BYTES // (4 * n * visible)))
        visible = max(1, settings.visible_groups(first + size - 1, num_groups))
        scores = torch.empty((n, size, visible), dtype=torch.float32, device=q.device)
        score_groups(call, lse, scores, first)
        _select(call, scores, first, chosen)
        first += size
    return chosen


class _Output(NamedTuple):
    """Hold where a selection goes."""

    chosen: Tensor
    """[N, rows, ...] in int32."""
    scores: Tensor | None
    """As `chosen`, for another selection; None where there is none."""
    first_row: int


def _select(call: Queries, scores: Tensor, first_row: int, chosen: Tensor) -> None:
    """Write the choice of the shares from first_row on into these rows of chosen."""
    n, rows, visible = scores.shape
    k = chosen.shape[2]
    segments = ceil_div(visible, _SELECTED)
    output = _Output(chosen, None, first_row)
    if segments == 1:
        _launch_select(call, (scores, None), first_row, output)
        return
    numbers = torch.empty((n, rows, segments * k), dtype=torch.int32, device=scores.device)
    best = torch.empty_like(numbers, dtype=torch.float32)
    _launch_select(call, (scores, None), first_row, _Output(numbers, best, 0), segments)
    if segments * k <= _MOST_SELECTED:
        _launch_select(call, (best, numbers), first_row, output)
        return
    order = best.sort(dim=-1, descending=True, stable=True).indices[:, :, :k]
    picked = numbers.gather(2, order)
    ordered = torch.where(picked < 0, visible, picked).sort(-1).values
    chosen[:, first_row : first_row + rows] = torch.where(ordered < visible, ordered, -1)


def _launch_select(
    call: Queries,
    candidates: tuple[Tensor, Tensor | None],
    first_row: int,
    output: _Output,
    segments: int = 1,
) -> None:
    """Select from scores [N, rows, groups or candidates], with the candidates' groups."""
    scores, numbers = candidates
    n, rows, width = scores.shape
    settings = call.settings
    block = _SELECTED if segments > 1 else max(16, power_of_2(width))
    chosen = output.chosen
    launch(
        _select_kernel,
        (n * rows, segments),
        (
            scores,
            chosen if numbers is None else numbers,
            chosen,
            scores if output.scores is None else output.scores,
            *call.positions(),
            *(first_row, rows, width, output.first_row, chosen.shape[1]),
        ),
        (settings.num_chosen, settings.share, *settings.rule),
        FROM_CANDIDATES=numbers is not None,
        TO_CANDIDATES=output.scores is not None,
        BLOCK=block,
        BLOCK_K=power_of_2(settings.num_chosen),
        num_warps=max(1, min(4, block // _SELECTED)),
    )
