"""Learn an index of fetch: projections of queries and keys that tell the groups' shares of the
softmax under full attention. The model is frozen."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.config import parse_index
from corecontext.fetch_sizes import num_parts
from corecontext.ops.fetch.index import centre_of, part_means, segments
from corecontext.ops.fetch.low_bits import decode, encode, rotation
from corecontext.ops.spec import Spec
from corecontext.visibility import sees_core

LARGEST_STEP = 0.02
"""Of Adam, in root mean squares of the first projections."""


class Projections(NamedTuple):
    """Projections of one layer."""

    query: Tensor
    """[N, D, R], N KV heads."""
    key: Tensor
    """[N, D, R]."""


class LayerIndex:
    """The index of one layer while it learns.

    Args:
        rank: R, elements of a projected key.
        name: Index of projected keys, in low bits.
        steps: Of the training.
    """

    def __init__(self, rank: int, name: str, steps: int) -> None:
        self.rank = rank
        self.name = name
        self.steps = steps
        self.losses: list[float] = []
        self._first: Projections | None = None

    @property
    def projections(self) -> Projections:
        """The projections as they are."""
        assert self._first is not None, "learn() makes them"
        pairs = zip(self._first, self._changes, self._sizes)
        return Projections(*(first + change * size for first, change, size in pairs))

    def learn(self, q: Tensor, k: Tensor, position: Tensor, spec: Spec) -> None:
        """Take a step of Adam that lowers the divergence of the shares from those under full
        attention.

        Args:
            q: Queries of one window [N, r, T, D], at `position` [T].
            k: All its keys, [N, S, D].
        """
        q, k = q.float(), k.float()
        groups = groups_of(k, spec)
        centre = centre_of(k, spec.replace(fetch_index=self.name))
        if self._first is None:
            self._first = whitened(q, k - centre[:, None], self.rank)
            self._sizes = [x.square().mean().sqrt() for x in self._first]
            self._changes = [torch.zeros_like(x, requires_grad=True) for x in self._first]
            self._optimizer = torch.optim.Adam(self._changes, betas=(0.9, 0.95))
        visible = sees_groups(position, groups.shape[1], spec)
        # Queries near the beginning see no group, and have no shares.
        sees_any = visible.any(1)
        q = q[:, :, sees_any]
        visible = visible[sees_any]
        shares = log_shares(q, groups, visible, spec)
        done = len(self.losses) / self.steps
        step = LARGEST_STEP * (1 + math.cos(math.pi * done)) / 2
        self._optimizer.param_groups[0]["lr"] = step
        with torch.enable_grad():
            projections = self.projections
            keys = stored((groups - centre[:, None, None]) @ projections.key[:, None], self.name)
            guess = log_shares(q @ projections.query[:, None], keys, visible, spec)
            difference = (shares - guess).masked_fill(~visible, 0)
            loss = (shares.exp() * difference).sum(-1).mean()
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def whitened(q: Tensor, k: Tensor, rank: int) -> Projections:
    """Return the projections onto the `rank` directions with the largest products of queries
    [N, r, T, D] with centred keys [N, S, D], projected queries of variance 1 in each; for D of
    them the identity."""
    if rank == k.shape[2]:
        same = torch.eye(rank, device=k.device).expand(len(k), -1, -1)
        return Projections(same, same)
    q = q.flatten(1, 2)
    queries = q.mT @ q / q.shape[1]
    keys = k.mT @ k / k.shape[1]
    values, vectors = torch.linalg.eigh(queries)
    values = values.clamp(min=1e-4 * values.amax(1, keepdim=True))[:, None]
    root = vectors * values.sqrt() @ vectors.mT
    inverse = vectors * values.rsqrt() @ vectors.mT
    directions = torch.linalg.eigh(root @ keys @ root)[1].flip(2)[..., :rank]  # largest first
    return Projections(inverse @ directions, root @ directions)


def stored(keys: Tensor, name: str) -> Tensor:
    """Return keys [N, M, g, R] as an index in low bits stores them [N, M, P, R]; the gradient
    passes over the rounding."""
    kind, _, bits = parse_index(name)
    count = num_parts(name, keys.shape[2])
    means = segments(keys, count) if kind == "segments" else part_means(keys, count)
    with torch.no_grad():
        codes, scales = encode(means, bits, shared=True)
        levels = decode(codes, bits, means.shape[3], means.dtype)
        rounded = levels * scales.to(means.dtype)[..., None, None]
        rounded = rounded @ rotation(means.shape[3], means.dtype, means.device).mT
    return means + (rounded - means).detach()


def groups_of(k: Tensor, spec: Spec) -> Tensor:
    """Return the groups [N, M, g, D] of raw keys [N, S, D] behind the first tokens kept raw."""
    count = (k.shape[1] - spec.sinks) // spec.group_size
    end = spec.sinks + count * spec.group_size
    return k[:, spec.sinks : end].unflatten(1, (count, spec.group_size))


def sees_groups(position: Tensor, count: int, spec: Spec) -> Tensor:
    """Return which of `count` groups behind the first tokens queries see, [T, M]."""
    groups = torch.arange(count, device=position.device) + spec.sinks // spec.group_size
    return sees_core(groups, position[:, None], spec.group_size, spec.window_size)


def log_shares(q: Tensor, keys: Tensor, visible: Tensor, spec: Spec) -> Tensor:
    """Return the log shares of groups [N, r, T, M] of keys [N, M, P, D] in the softmax of queries
    [N, r, T, D] over the groups that they see."""
    each = torch.einsum("nrtd,nmpd->nrtmp", q, keys) * spec.scale
    return each.logsumexp(-1).masked_fill(~visible, -torch.inf).log_softmax(-1)
