"""Choose the groups whose raw tokens come back: the k with the best index scores.

The mean of a share's queries chooses, among the groups that the last of them sees. Scores of groups
are kept for a few shares at a time (`_SCORE_BYTES`); bisection.py finds the k best. Of many groups,
first the k best runs are found, each RUN neighbouring groups with the largest of their scores: the
k best groups are in them.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.attend.shares import Choosing, groups_of_share
from corecontext.ops.triton.choose.bisection import bisect, order_of
from corecontext.ops.triton.choose.byte_keys import RUN
from corecontext.ops.triton.launch import ints, launch, power_of_2
from corecontext.ops.triton.primitives import integers

_SCORE_BYTES = 256 << 20  # scores of groups in memory at a time
_SELECTED = 2048  # scores that a warp of the selection holds in registers
_MOST_SELECTED = 8192  # most scores that one program selects from


@triton.jit
def _select_kernel(
    pointers,
    numbers,
    share,
    rule,
    RUN: tl.constexpr,
    FROM_RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the numbers of the k best of at most BLOCK groups of one share, rising, then -1.

    Grid: (N x num_rows,). Of equal scores the first groups are chosen. With FROM_RUNS it chooses
    among the groups of k runs; without, among all groups where RUN is 1, else among runs.

    Args:
        pointers: To the scores of groups, or of runs where they are chosen; to the numbers of k
            runs for each share, read with FROM_RUNS only; and to the choice.
        numbers: M, first share and end of the queries as of `groups_of_share`; first_row and
            num_rows, the shares that have scores; stride_row and stride_n, elements between the
            scores of two shares, and between the choices of two sequences; k.
    """
    scores_ptr, runs_ptr, chosen_ptr = pointers
    values = integers(numbers)
    num_groups, first_share, q_end, first_row, num_rows = values[:5]
    stride_row, stride_n, num_chosen = values[5:]
    n = (tl.program_id(0) // num_rows).to(tl.int64)
    row = tl.program_id(0) % num_rows
    offs = tl.arange(0, BLOCK)
    shares = (first_share, share, q_end)
    count = groups_of_share(first_row + row, shares, rule, num_groups)
    first = (n * num_rows + row) * stride_row
    if FROM_RUNS:
        runs = runs_ptr + (n * num_rows + row) * num_chosen
        run = tl.load(runs + offs // RUN, mask=offs < num_chosen * RUN, other=-1)
        group = tl.where(run < 0, count, run * RUN + offs % RUN)
    else:
        count = (count + RUN - 1) // RUN
        group = offs
    scores = tl.load(scores_ptr + first + group, mask=group < count, other=0.0)
    bits = order_of(scores, group < count)
    low, high, at_low, at_high = bisect(bits, num_chosen, WIDE=False)
    is_chosen = bits >= low
    if at_low > num_chosen:
        is_last = bits == low
        before = tl.cumsum(is_last.to(tl.int32), 0)
        # mutant fetch: of equal scores the last groups are chosen
        is_chosen = (bits >= high) | (is_last & (before <= num_chosen - at_high))
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    chosen_ptr += n * stride_n + row * num_chosen
    tl.store(chosen_ptr + place, group, mask=is_chosen)
    places = tl.arange(0, BLOCK_K)
    is_empty = (places >= tl.minimum(at_low, num_chosen)) & (places < num_chosen)
    tl.store(chosen_ptr + places, places * 0 - 1, mask=is_empty)


class Scorer(Protocol):
    """Score groups, for each share of queries the largest product of any key with any head."""

    @property
    def queries(self) -> Tensor:
        """The mean query of each of the C shares that the call touches, [N, r, C, D]."""

    @property
    def num_groups(self) -> int:
        """Groups: M."""

    def width(self, num_groups: int) -> int:
        """Return the elements of a row of scores of so many groups, a multiple of RUN."""

    def score(self, settings: Choosing, first_row: int, scores: Tensor, best: Tensor) -> None:
        """Fill the scores [N, rows, groups] of the shares from first_row on that they see, and the
        largest of each run of groups, [N, rows, groups / RUN]."""


def choose(scorer: Scorer, settings: Choosing) -> Tensor:
    """Choose groups for each share of queries.

    Returns:
        The numbers of the chosen groups of each share, [N, C, k] in int32, rising, then -1 where
        fewer than k are visible. The same from run to run.
    """
    n, _, count, _ = scorer.queries.shape
    device = scorer.queries.device
    num_groups = scorer.num_groups
    chosen = torch.empty((n, count, settings.num_chosen), dtype=torch.int32, device=device)
    if not chosen.numel():
        return chosen
    if not settings.visible_groups(count - 1, num_groups):
        return chosen.fill_(-1)
    # Scores of as many shares at a time as fit into the memory.
    first = 0
    while first < count:
        visible = settings.visible_groups(count - 1, num_groups)
        size = min(count - first, max(1, _SCORE_BYTES // (4 * n * visible)))
        width = scorer.width(max(1, settings.visible_groups(first + size - 1, num_groups)))
        scores = torch.empty((n, size, width), dtype=torch.float32, device=device)
        runs = scores.new_empty((n, size, width // RUN))
        scorer.score(settings, first, scores, runs)
        places = (num_groups, settings.first_share, settings.q_end, first)
        _select((settings, places), scores, runs, chosen[:, first : first + size])
        first += size
    return chosen


def _has_runs(visible: int, k: int) -> bool:
    """Whether the k best of `visible` groups are found in two steps, the best runs first: where
    groups are many, and both steps fit into a program."""
    candidates = k * RUN
    fits = candidates <= _MOST_SELECTED and visible <= RUN * _MOST_SELECTED
    return fits and visible >= min(_SELECTED, 2 * candidates)


def _select(
    call: tuple[Choosing, tuple[int, ...]], scores: Tensor, runs: Tensor, chosen: Tensor
) -> None:
    """Write the choice [N, rows, k] of some shares.

    Args:
        call: The settings, and the first four `numbers` of the kernel.
        scores: Of groups, [N, rows, groups].
        runs: The largest of each run, [N, rows, groups / RUN].
    """
    settings, (num_groups, *_, first_row) = call
    rows, width = scores.shape[1:]
    if _has_runs(width, settings.num_chosen):
        best_runs = torch.empty(chosen.shape, dtype=torch.int32, device=chosen.device)
        _launch_select(call, runs, None, best_runs)
        _launch_select(call, scores, best_runs, chosen)
    elif width <= _MOST_SELECTED:
        _launch_select(call, scores, None, chosen, of_groups=True)
    else:  # a sort by PyTorch
        shares = range(first_row, first_row + rows)
        seen = [[settings.visible_groups(share, num_groups)] for share in shares]
        seen = torch.tensor(seen, device=scores.device)
        unseen = torch.arange(width, device=scores.device) >= seen
        order = scores.masked_fill(unseen, -torch.inf)
        order = order.sort(dim=-1, descending=True, stable=True)
        ordered = order.indices[:, :, : chosen.shape[2]].clamp(max=seen).sort(-1).values
        chosen.copy_(torch.where(ordered < seen, ordered, -1))


def _launch_select(
    call: tuple[Choosing, tuple[int, ...]],
    scores: Tensor,
    runs: Tensor | None,
    chosen: Tensor,
    of_groups: bool = False,
) -> None:
    """Write the k best of scores [N, rows, groups or runs] to chosen [N, rows, k].

    Args:
        runs: Choose among the groups of these runs, [N, rows, k].
        of_groups: Without runs: whether scores are those of groups, not of runs.
    """
    settings, places = call
    n, rows, width = scores.shape
    k = chosen.shape[2]
    block = max(16, power_of_2(width if runs is None else k * RUN))
    launch(
        _select_kernel,
        (n * rows,),
        (
            (scores, chosen if runs is None else runs, chosen),
            ints(*places, rows, width, chosen.stride(0), k),
        ),
        (settings.share, settings.rule),
        RUN=1 if of_groups else RUN,
        FROM_RUNS=runs is not None,
        BLOCK=block,
        BLOCK_K=power_of_2(k),
        num_warps=max(1, min(4, block // _SELECTED)),
    )
