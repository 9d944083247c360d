"""Choose the k best groups of each query, for the r query heads of a KV head together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Choice(NamedTuple):
    """Hold the groups whose raw tokens queries see instead of their core tokens.

    A share is n neighbouring queries with one choice, aligned to positions: with n = 64, queries 0
    to 63, then 64 to 127. Each query drops the groups that it does not see.
    """

    groups: Tensor
    """[N, C, k] in int32: for each of the C shares that the queries touch the numbers of groups,
    rising, then -1. The first group after the sinks is 0."""
    share: int
    """Queries of a share: n."""

    def part(self, sequences: slice, shares: slice = slice(None)) -> Choice:
        """Return the choice of some sequences and shares."""
        return self._replace(groups=self.groups[sequences, shares])

    def of_queries(self, first: int, num_visible: Tensor) -> Tensor:
        """Return the groups of each query [N, T, k]; -1 for none.

        Args:
            first: Position of the first query.
            num_visible: How many groups each query sees, [T].
        """
        positions = torch.arange(first, first + len(num_visible), device=num_visible.device)
        groups = self.groups[:, positions // self.share - first // self.share]
        # mutant fetch: a shared choice shows groups before they are far past
        return groups.masked_fill(groups >= num_visible[:, None], -1)


def num_shares(first: int, end: int, share: int) -> int:
    """Count the shares that the queries at positions first .. end - 1 touch: C."""
    return -(-end // share) - first // share


def choose(scores: Tensor, visible: Tensor, num_groups: int) -> Tensor:
    """Return the numbers of the k groups with the largest score of any query head; of equal ones
    the lower group. Kernels do the same in `ops/triton/choose`: score_kernels.py finds the largest
    score of each group, select.py the k best.

    Args:
        scores: Index scores, [N, r, C, M] in float32 or wider.
        visible: [C, M], or any shape that broadcasts to that of scores, True where the last query
            of the share sees the group.
        num_groups: k.

    Returns:
        [N, C, k] in int32, rising, then -1 where fewer than k are visible.
    """
    # mutant fetch: the first query head chooses for all
    largest = scores.masked_fill(~visible, -torch.inf).amax(1)
    return to_numbers(best(largest, num_groups), num_groups)


def mean_of_shares(x: Tensor, first: int, share: int) -> Tensor:
    """Return the means over the queries of each share, [N, r, C, D] of x [N, r, T, D], summed in
    float32 or wider; `first` is the position of the first query."""
    if share == 1:
        return x
    num_queries = x.shape[2]
    # Queries of a share that begins before the call, of whole shares, of one that ends after it.
    # mutant fetch: a shared choice starts with the call, not at a multiple
    head = min(-first % share, num_queries)
    tail = (num_queries - head) % share
    runs = x.split([head, num_queries - head - tail, tail], 2)
    wide = torch.promote_types(x.dtype, torch.float)
    means = [
        run.unflatten(2, (-1, size)).mean(3, dtype=wide)
        for run, size in zip(runs, (head, share, tail))
        if run.shape[2]
    ]
    return torch.cat(means, 2).to(x.dtype)


def best(values: Tensor, count: int) -> Tensor:
    """Mark the `count` largest of the last dimension, of equal ones the first; -inf never. A row of
    more than `count` values that holds NaN has no mark."""
    if count >= values.shape[-1]:
        return values > -torch.inf
    # Which of equal values topk returns depends on the device; the least of the k best does not.
    least = values.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above = values > least
    equal = values == least
    room = count - above.sum(-1, keepdim=True)
    # mutant fetch: of equal groups all are taken
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    return chosen & (values > -torch.inf)


def to_numbers(chosen: Tensor, count: int) -> Tensor:
    """Return the numbers of the groups marked in [N, C, M], rising, then -1: [N, C, count] in
    int32."""
    groups = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device)
    place = (chosen.cumsum(-1) - 1).masked_fill(~chosen, count)
    numbers = torch.full(
        (*chosen.shape[:-1], count + 1), -1, dtype=torch.int32, device=chosen.device
    )
    return numbers.scatter_(-1, place, groups.expand(chosen.shape))[..., :count]


def to_marks(numbers: Tensor, num_groups: int) -> Tensor:
    """Return the marks [N, C, M] of group numbers [N, C, k]; -1 marks none."""
    place = numbers.long().masked_fill(numbers < 0, num_groups)
    # A number from num_groups on marks none, either.
    marks = torch.zeros(
        (*numbers.shape[:-1], num_groups + 1), dtype=torch.bool, device=numbers.device
    )
    return marks.scatter_(-1, place.clamp(max=num_groups), True)[..., :num_groups]
