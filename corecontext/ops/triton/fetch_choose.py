"""Choose the groups whose raw tokens come back: the k with the best index scores.

The mean of a share's queries chooses, among the groups that the last of them sees. Masses of groups
are kept for a few shares at a time (`_MASS_BYTES`); the k best are found by bisection of the bits
of a float. Of many groups, first the k runs of neighbours with the largest scores are found: the k
best groups are in them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.fetch_rule import Choosing, groups_of_share
from corecontext.ops.triton.fetch_scores import RUN, Masses, Queries, group_masses, mass_dtype
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2

_CACHE_BYTES = 16 << 20  # index keys in use at a time, which then stay in the L2 cache
_MASS_BYTES = 512 << 20  # masses of groups in memory at a time
_SELECTED = 2048  # scores that a warp holds in registers
_MOST_SELECTED = 8192  # scores of groups that one program bisects
_MOST_IN_RUNS = 32768  # groups whose runs one program bisects
_INFINITY_BITS = tl.constexpr(0x7F800001)  # the bits of NaN are cut to these


@triton.jit
def _scores_of(
    masses_ptr, sums_ptr, runs, count, stride_head, num_rows, HEADS: tl.constexpr, RUN: tl.constexpr
):
    """Return the scores of the groups of runs, their shares added up over the heads, [runs, RUN];
    -1 from group `count` on and where a run is -1."""
    groups = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    # A run has one mask, so that it is read at once.
    exists = ((runs >= 0) & (runs * RUN < count))[:, None]
    total = tl.zeros(groups.shape, tl.float32)
    for i in tl.static_range(HEADS):
        masses = tl.load(masses_ptr + i * stride_head + groups, mask=exists, other=0.0)
        total += masses.to(tl.float32) / tl.load(sums_ptr + i * num_rows)
    return tl.where(exists & (groups < count), total, -1.0)


@triton.jit(
    do_not_specialize=[
        *("num_groups", "first_share", "q_end", "first_row", "num_rows"),
        *("num_runs", "stride_n"),
    ]
)
def _select_kernel(
    masses_ptr,
    sums_ptr,
    runs_ptr,
    chosen_ptr,
    num_groups,
    first_share,
    q_end,
    first_row,
    num_rows,
    num_runs,
    stride_n,
    num_chosen,
    share,
    group_size,
    window_size,
    sink_groups,
    HEADS: tl.constexpr,
    RUN: tl.constexpr,
    OF_RUNS: tl.constexpr,
    FROM_RUNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the numbers of the k best of the groups in at most BLOCK_R runs of one share, or of
    these runs, ascending, then -1.

    Grid: (N x num_rows,). The scores are at least 0, so their bits, as whole numbers, have their
    order: bisection finds the score of the last one chosen. Of groups with that score the first
    ones are chosen.

    Args:
        masses_ptr, sums_ptr: As in `fetch_scores.Masses`.
        runs_ptr: Runs whose groups can be chosen, k for each share, where FROM_RUNS.
        first_row, num_rows: The shares whose masses there are.
        num_runs: Runs of RUN groups that there are masses of.
        stride_n: Elements between the choices of two sequences.
        OF_RUNS: Choose runs of RUN groups by the largest score in each.
    """
    n = (tl.program_id(0) // num_rows).to(tl.int64)
    row = tl.program_id(0) % num_rows
    shares = (first_share, share, q_end)
    rule = (group_size, window_size, sink_groups)
    count = groups_of_share(first_row + row, shares, rule, num_groups)
    sums_ptr += n * HEADS * num_rows + row
    masses_ptr += (n * HEADS * num_rows + row) * num_runs * RUN
    runs = tl.arange(0, BLOCK_R)
    if FROM_RUNS:
        place = runs_ptr + (n * num_rows + row) * num_chosen + runs
        runs = tl.load(place, mask=runs < num_chosen, other=-1)
    stride_head = num_rows.to(tl.int64) * num_runs * RUN
    scores = _scores_of(masses_ptr, sums_ptr, runs, count, stride_head, num_rows, HEADS, RUN)
    if OF_RUNS:
        scores = tl.max(scores, 1)
        numbers = runs
    else:
        scores = tl.reshape(scores, [BLOCK_R * RUN])
        numbers = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
        numbers = tl.reshape(numbers, [BLOCK_R * RUN])
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
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    chosen_ptr += n * stride_n + row * num_chosen
    tl.store(chosen_ptr + place, numbers, mask=is_chosen)
    slots = tl.arange(0, BLOCK_K)
    empty = (slots >= tl.minimum(at_low, num_chosen)) & (slots < num_chosen)
    tl.store(chosen_ptr + slots, slots * 0 - 1, mask=empty)


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
    index = index.contiguous()
    n, _, count, _ = q.shape
    num_groups = index.shape[1]
    chosen = torch.empty((n, count, settings.num_chosen), dtype=torch.int32, device=q.device)
    if not chosen.numel():
        return chosen
    if not settings.visible_groups(count - 1, num_groups):
        return chosen.fill_(-1)
    # Some KV heads at a time, whose index keys stay in the L2 cache.
    size = max(1, _CACHE_BYTES // max(1, index[0].numel() * index.element_size()))
    for low in range(0, n, size):
        heads = slice(low, low + size)
        call = Queries(q[heads], index[heads], None if bias is None else bias[heads], settings)
        _choose(call, chosen[heads])
    return chosen


def _choose(call: Queries, chosen: Tensor) -> None:
    """Write the choice [N, C, k] of all shares, as many at a time as their masses fit into the
    memory."""
    n, r, count, _ = call.q.shape
    num_groups = call.index.shape[1]
    settings = call.settings
    itemsize = n * r * mass_dtype(call.q).itemsize
    first = 0
    while first < count:
        visible = max(1, settings.visible_groups(count - 1, num_groups))
        size = min(count - first, max(1, _MASS_BYTES // (itemsize * visible)))
        visible = max(1, settings.visible_groups(first + size - 1, num_groups))
        masses = group_masses(call, first, size, ceil_div(visible, RUN))
        _select(call, masses, chosen[:, first : first + size])
        first += size


def _select(call: Queries, masses: Masses, chosen: Tensor) -> None:
    """Write the choice [N, rows, k] of some shares."""
    width = masses.groups.shape[3]
    candidates = RUN * chosen.shape[2]
    # The k best of many groups are in the k best runs.
    are_many = width >= min(_SELECTED, 2 * candidates)
    if are_many and candidates <= _MOST_SELECTED and width <= _MOST_IN_RUNS:
        best = torch.empty(chosen.shape, dtype=torch.int32, device=chosen.device)
        _launch_select(call, masses, None, best, of_runs=True)
        _launch_select(call, masses, best, chosen)
    elif width <= _MOST_SELECTED:
        _launch_select(call, masses, None, chosen)
    else:
        rows = range(masses.first_row, masses.first_row + chosen.shape[1])
        seen = [[call.settings.visible_groups(row, width)] for row in rows]
        seen = torch.tensor(seen, device=chosen.device)
        unseen = torch.arange(width, device=chosen.device) >= seen
        scores = (masses.groups / masses.sums[..., None]).sum(1, dtype=torch.float32)
        order = scores.masked_fill(unseen, -1).sort(dim=-1, descending=True, stable=True).indices
        ordered = order[:, :, : chosen.shape[2]].clamp(max=seen).sort(-1).values
        chosen.copy_(torch.where(ordered < seen, ordered, -1))


def _launch_select(
    call: Queries, masses: Masses, runs: Tensor | None, chosen: Tensor, of_runs: bool = False
) -> None:
    """Select groups, of some runs where they are given; or runs."""
    n, r, rows, width = masses.groups.shape
    k = chosen.shape[2]
    settings = call.settings
    block = power_of_2(k if runs is not None else width // RUN)
    launch(
        _select_kernel,
        (n * rows,),
        (
            *(masses.groups, masses.sums, chosen if runs is None else runs, chosen),
            *(*call.positions(), masses.first_row, rows, width // RUN, chosen.stride(0)),
        ),
        (k, settings.share, *settings.rule),
        HEADS=r,
        RUN=RUN,
        OF_RUNS=of_runs,
        FROM_RUNS=runs is not None,
        BLOCK_R=block,
        BLOCK_K=power_of_2(k),
        num_warps=max(1, min(16, block * RUN // _SELECTED)),
    )
