"""Choose the k best groups of each query, for the r query heads of a KV head together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def choose(scores: Tensor, visible: Tensor, num_groups: int) -> Tensor:
    """Mark the k groups with the largest sums, over the query heads, of their shares of a softmax
    over the scores of visible groups; of equal sums the lower group.

    Sums are compared by their logs, which do not underflow.

    Args:
        scores: Index scores, [N, r, C, M] in float32 or wider.
        visible: [C, M], True where the query sees the group.
        num_groups: k.

    Returns:
        [N, C, M], True for at most k groups of each of the C choices.
    """
    scores = scores.masked_fill(~visible, -torch.inf)
    total = scores.logsumexp(-1)
    # A query that sees no group has no share of -inf - -inf.
    shares = scores - total.masked_fill(total == -torch.inf, 0)[..., None]
    # mutant fetch: the first query head chooses for all
    shares = shares.logsumexp(1)  # [N, C, M]
    return best(shares, num_groups)


def mean_of_shares(x: Tensor, first: int, share: int) -> Tensor:
    """Return the means over the queries of each share, [N, r, C, ...] of x [N, r, T, ...], summed
    in float32 or wider; `first` is the position of the first query."""
    if share == 1:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    # mutant fetch: a shared choice starts with the call, not at a multiple
    before = first % share
    after = -(before + x.shape[2]) % share
    padding = (0, 0) * (x.dim() - 3) + (before, after)
    total = F.pad(x.to(wide), padding).unflatten(2, (-1, share)).sum(3)
    counts = torch.ones(x.shape[2], dtype=wide, device=x.device)
    sizes = F.pad(counts, (before, after)).unflatten(0, (-1, share)).sum(1)
    return (total / sizes.view(-1, *[1] * (x.dim() - 3))).to(x.dtype)


def last_of_shares(x: Tensor, first: int, share: int) -> Tensor:
    """Return the rows of the last query of each share, [C, ...] of x [T, ...]."""
    if share == 1:
        return x
    before = first % share
    count = -(-(before + x.shape[0]) // share)
    rows = torch.arange(count, device=x.device) * share + share - 1 - before
    return x[rows.clamp(max=x.shape[0] - 1)]


def expand(choice: Tensor, first: int, length: int, share: int) -> Tensor:
    """Return the choice of each query, [N, T, ...], from that of each share, [N, C, ...]; a query
    drops groups that it does not see."""
    if share == 1:
        return choice
    return choice.repeat_interleave(share, 1)[:, first % share :][:, :length]


def best(values: Tensor, count: int) -> Tensor:
    """Mark the `count` largest of the last dimension, the lower index of equal ones; -inf is never
    marked, and neither are values of a row with NaN."""
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


def to_indices(chosen: Tensor, count: int) -> Tensor:
    """Return the numbers of the marked groups, rising, [N, C, count] in int32; -1 fills the end."""
    groups = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device)
    place = (chosen.cumsum(-1) - 1).masked_fill(~chosen, count)
    indices = torch.full(
        (*chosen.shape[:-1], count + 1), -1, dtype=torch.int32, device=chosen.device
    )
    return indices.scatter_(-1, place, groups.expand(chosen.shape))[..., :count]


def to_mask(indices: Tensor, num_groups: int) -> Tensor:
    """Return the marks [N, C, M] of group numbers [N, C, k]; -1 marks none."""
    place = indices.long().masked_fill(indices < 0, num_groups)
    # A number of a group behind the last marks none, either.
    marks = torch.zeros(
        (*indices.shape[:-1], num_groups + 1), dtype=torch.bool, device=indices.device
    )
    return marks.scatter_(-1, place.clamp(max=num_groups), True)[..., :num_groups]
