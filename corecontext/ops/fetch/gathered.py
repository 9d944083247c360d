"""Attend to the raw tokens of a few groups of each query, gathered for it."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops import partial
from corecontext.ops.spec import Spec, Upstream


class Gather(NamedTuple):
    """Hold queries and the groups that each of them fetches."""

    q: Tensor
    """[N, r, T, D]."""
    k: Tensor
    """Raw keys of all groups, [N, M, g, D]."""
    v: Tensor
    """[N, M, g, D]."""
    choice: Tensor
    """Groups of each query, [N, T, k] in int32, -1 for none."""
    elements: int
    """Most elements of keys gathered at once."""

    def rows(self) -> list[slice]:
        """Return slices of queries whose keys are gathered together."""
        each = self.k.shape[0] * self.choice.shape[2] * self.k.shape[2] * self.k.shape[3]
        size = max(1, self.elements // max(1, each))
        return [slice(low, low + size) for low in range(0, self.q.shape[2], size)]

    def places(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the sequence and the number of each group gathered, both [N, t, k] for t queries;
        group 0 in place of -1, which `parts` masks."""
        choice = self.choice[:, rows].long().clamp(min=0)
        sequence = torch.arange(choice.shape[0], device=choice.device)[:, None, None]
        return sequence.expand_as(choice), choice

    def by_query(self, x: Tensor) -> Tensor:
        """Return x [N, r, t, ...] as [N t, 1, r, ...]: queries as sequences, heads as queries."""
        return x.transpose(1, 2).flatten(0, 1)[:, None]

    def by_head(self, x: Tensor) -> Tensor:
        """Invert `by_query`."""
        return x[:, 0].unflatten(0, (self.q.shape[0], -1)).transpose(1, 2)

    def parts(self) -> Iterator[tuple[slice, tuple[Tensor, ...], Tensor]]:
        """Yield t queries at a time: their rows; q [N t, 1, r, D], k and v [N t, 1, k g, D]; their
        mask [N t, 1, r, k g]."""
        for rows in self.rows():
            places = self.places(rows)
            keys, values = (x.flatten(2)[places] for x in (self.k, self.v))  # [N, t, k, g D]
            dim = self.q.shape[3]
            k, v = (x.flatten(0, 1).unflatten(2, (-1, dim)).flatten(1, 2) for x in (keys, values))
            q = self.by_query(self.q[:, :, rows])
            # mutant fetch: the first group is seen where there is none
            seen = (self.choice[:, rows] >= 0).flatten(0, 1)
            mask = partial.as_mask(seen, q).repeat_interleave(self.k.shape[2], -1)
            mask = mask[:, None, None].expand(-1, 1, q.shape[2], -1)
            yield rows, (q, k[:, None], v[:, None]), mask


def forward(gather: Gather, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return out [N, r, T, D] and log-sum-exp [N, r, T]; both undefined for a query without
    groups."""
    q = gather.q
    out = torch.empty_like(q)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    for rows, tensors, mask in gather.parts():
        scoring = partial.Scoring(spec.scale, spec.softcap, mask=mask)
        results = partial.forward(*tensors, scoring)
        out[:, :, rows], lse[:, :, rows] = map(gather.by_head, results)
    return out, lse


def backward(upstream: Upstream, gather: Gather, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, and of k and v as [N, M, g, D], in float32 or wider."""
    n, count, size, dim = gather.k.shape
    wide = upstream.lse.dtype
    device = gather.q.device
    grad_q = torch.empty(gather.q.shape, dtype=wide, device=device)
    grad_kv = [torch.zeros(n * count, size * dim, dtype=wide, device=device) for _ in range(2)]
    for rows, tensors, mask in gather.parts():
        dq, *dkv = partial.backward(
            upstream.rows(rows).map(gather.by_query),
            *tensors,
            partial.Scoring(spec.scale, spec.softcap, mask=mask),
        )
        grad_q[:, :, rows] = gather.by_head(dq)
        sequence, group = gather.places(rows)
        place = (sequence * count + group).flatten()
        for total, grad in zip(grad_kv, dkv):
            total.index_add_(0, place, grad[:, 0].to(wide).reshape(-1, size * dim))
    return grad_q, *(x.view(n, count, size, dim) for x in grad_kv)
