"""Choose the groups whose raw tokens come back: the k with the best index scores.

The mean of a share's queries chooses, among the groups that the last of them sees. Scores of groups
are kept for a few shares at a time (`_SCORE_BYTES`); the k best are found by bisection of the bits
of a float. Of many groups, first the k runs of neighbours with the largest scores are found: the k
best groups are in them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.attend.shares import Choosing, groups_of_share
from corecontext.ops.triton.choose.group_scores import (
    RUN,
    Queries,
    log_sums,
    score_groups,
)
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, ints, launch, power_of_2
from corecontext.ops.triton.primitives import integers

_SCORE_BYTES = 256 << 20  # scores of groups in memory at a time
_SELECTED = 2048  # scores that a warp holds in registers
_MOST_SELECTED = 8192  # scores that one program holds
_INFINITY_BITS = tl.constexpr(0x7F800001)  # the bits of NaN are cut to these


@triton.jit
def _select_kernel(
    scores_ptr,
    runs_ptr,
    chosen_ptr,
    numbers,
    num_chosen,
    share,
    group_size,
    window_size,
    sink_groups,
    RUN: tl.constexpr,
    FROM_RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the numbers of the k best of at most BLOCK groups of one share, ascending, then -1.

    Grid: (N x num_rows,). The scores are at least 0, so their bits, as whole numbers, have their
    order: bisection finds the score of the last one chosen. Of groups with that score the first
    ones are chosen.

    Args:
        scores_ptr: Scores of groups, or where RUN > 1 and not FROM_RUNS, the largest of each run.
        runs_ptr: Runs whose groups can be chosen, k for each share, where FROM_RUNS.
        first_row, num_rows: The shares whose scores there are.
        stride_row, stride_n: Elements between the scores of two shares, and between the choices of
            two sequences.
    """
    num_groups, first_share, q_end, first_row, num_rows, stride_row, stride_n = integers(numbers)
    n = (tl.program_id(0) // num_rows).to(tl.int64)
    row = tl.program_id(0) % num_rows
    offs = tl.arange(0, BLOCK)
    shares = (first_share, share, q_end)
    rule = (group_size, window_size, sink_groups)
    count = groups_of_share(first_row + row, shares, rule, num_groups)
    first = (n * num_rows + row) * stride_row
    if FROM_RUNS:
        runs = runs_ptr + (n * num_rows + row) * num_chosen
        run = tl.load(runs + offs // RUN, mask=offs < num_chosen * RUN, other=-1)
        numbers = tl.where(run < 0, count, run * RUN + offs % RUN)
    else:
        count = (count + RUN - 1) // RUN
        numbers = offs
    scores = tl.load(scores_ptr + first + numbers, mask=numbers < count, other=-1.0)
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
        # mutant fetch: of equal scores the last groups are chosen
        is_chosen = (bits >= high) | (is_last & (before <= num_chosen - at_high))
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    chosen_ptr += n * stride_n + row * num_chosen
    tl.store(chosen_ptr + place, numbers, mask=is_chosen)
    slots = tl.arange(0, BLOCK_K)
    empty = (slots >= tl.minimum(at_low, num_chosen)) & (slots < num_chosen)
    tl.store(chosen_ptr + slots, slots * 0 - 1, mask=empty)


def choose(q: Tensor, index: Tensor, settings: Choosing) -> Tensor:
    """Choose groups for each share of queries.

    Args:
        q: The mean query of each of the C shares that the call touches, [N, r, C, D].
        index: Index keys, p for each group, [N, M, p, D]; a group's score is the log-sum-exp of
            its keys' scores.

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
    call = Queries(q, index, settings)
    lse = log_sums(call)
    # Scores of as many shares as fit into the memory.
    first = 0
    while first < count:
        visible = settings.visible_groups(count - 1, num_groups)
        size = min(count - first, max(1, _SCORE_BYTES // (4 * n * visible)))
        visible = max(1, settings.visible_groups(first + size - 1, num_groups))
        width = RUN * ceil_div(visible, RUN)
        scores = torch.empty((n, size, width), dtype=torch.float32, device=q.device)
        runs = None
        if _has_runs(width, settings.num_chosen):
            runs = scores.new_empty((n, size, width // RUN))
        score_groups(call, lse, scores, first, runs)
        _select(call, scores, runs, first, chosen[:, first : first + size])
        first += size
    return chosen


def _has_runs(visible: int, k: int) -> bool:
    """Whether the k best of `visible` groups are found by way of the best runs."""
    candidates = k * RUN
    fits = candidates <= _MOST_SELECTED and visible <= RUN * _MOST_SELECTED
    return fits and visible >= min(_SELECTED, 2 * candidates)


def _select(
    call: Queries, scores: Tensor, runs: Tensor | None, first_row: int, chosen: Tensor
) -> None:
    """Write the choice [N, rows, k] of the shares from first_row on.

    Args:
        scores: Of groups, [N, rows, groups].
        runs: The largest of each run, [N, rows, runs], or None.
    """
    visible = scores.shape[2]
    if runs is not None:
        best = torch.empty(chosen.shape, dtype=torch.int32, device=chosen.device)
        _launch_select(call, runs, None, first_row, best)
        _launch_select(call, scores, best, first_row, chosen)
    elif visible <= _MOST_SELECTED:
        _launch_select(call, scores, None, first_row, chosen, of_groups=True)
    else:
        rows = range(first_row, first_row + scores.shape[1])
        seen = [[call.settings.visible_groups(row, visible)] for row in rows]
        seen = torch.tensor(seen, device=scores.device)
        unseen = torch.arange(visible, device=scores.device) >= seen
        order = scores.masked_fill(unseen, -1).sort(dim=-1, descending=True, stable=True).indices
        ordered = order[:, :, : chosen.shape[2]].clamp(max=seen).sort(-1).values
        chosen.copy_(torch.where(ordered < seen, ordered, -1))


def _launch_select(
    call: Queries,
    scores: Tensor,
    runs: Tensor | None,
    first_row: int,
    chosen: Tensor,
    of_groups: bool = False,
) -> None:
    """Select from scores [N, rows, groups], of some runs where they are given; or from the largest
    scores of runs."""
    n, rows, width = scores.shape
    k = chosen.shape[2]
    settings = call.settings
    block = max(16, power_of_2(width if runs is None else k * RUN))
    launch(
        _select_kernel,
        (n * rows,),
        (
            *(scores, chosen if runs is None else runs, chosen),
            ints(*call.positions(), first_row, rows, width, chosen.stride(0)),
        ),
        (k, settings.share, *settings.rule),
        RUN=1 if of_groups else RUN,
        FROM_RUNS=runs is not None,
        BLOCK=block,
        BLOCK_K=power_of_2(k),
        num_warps=max(1, min(4, block // _SELECTED)),
    )
