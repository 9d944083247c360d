"""Learn an index of fetch: projections of queries and keys that tell the groups' shares of the
softmax under full attention. The model is frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops.fetch.index import index_of
from corecontext.ops.fetch.low_bits import LowBits, part_means, rotation
from corecontext.ops.fetch.scoring import centre_of
from corecontext.ops.spec import Spec
from corecontext.visibility import sees_core

LARGEST_STEP = 0.01
"""Of Adam, in root mean squares of the first projections."""
WARMUP = 20
"""Steps in which the step size rises."""
QUERIES = 64
"""Queries of each query head in a step."""


class Sample(NamedTuple):
    """Queries and keys of one layer and window under full attention."""

    q: Tensor
    """[N, r, T, D], N KV heads."""
    position: Tensor
    """Of the queries, [T], rising."""
    k: Tensor
    """All keys of the window, [N, S, D]."""


class Projections(NamedTuple):
    """Projections of one layer."""

    query: Tensor
    """[N, D, R], N KV heads."""
    key: Tensor
    """[N, D, R]."""

    def detached(self) -> Projections:
        """Return a copy that no later step changes."""
        return Projections(*(x.detach().clone() for x in self))


class LayerIndex:
    """The index of one layer, which learns from samples.

    Args:
        samples: Of windows, in the order of the steps.
        rank: R, elements of a projected key.
        name: Index of projected keys, in low bits.
        spec: Settings of the operator.
    """

    def __init__(self, samples: Sequence[Sample], rank: int, name: str, spec: Spec) -> None:
        self.name = name
        self.spec = spec
        self.losses: list[float] = []
        """Divergence of each step, in nats."""
        self._samples = [self._prepare(sample) for sample in samples]
        keys = [sample.k - centre[:, None] for sample, _, _, centre in self._samples]
        self._first = principal(
            torch.cat([sample.q for sample, *_ in self._samples], 2), torch.cat(keys, 1), rank
        )
        self._sizes = [x.square().mean().sqrt() for x in self._first]
        self._changes = [torch.zeros_like(x, requires_grad=True) for x in self._first]

    @property
    def projections(self) -> Projections:
        """The projections as they are; principal directions before the first step."""
        pairs = zip(self._first, self._changes, self._sizes)
        return Projections(*(first + change * size for first, change, size in pairs))

    def learn(self, steps: int, generator: torch.Generator) -> None:
        """Take steps of Adam that lower the divergence of the shares from those under full
        attention, each on one window."""
        optimizer = torch.optim.Adam(self._changes, betas=(0.9, 0.95))
        for step in range(steps):
            rate = min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.param_groups[0]["lr"] = LARGEST_STEP * rate
            sample, visible, shares, centre = self._samples[step % len(self._samples)]
            chosen = torch.randperm(len(visible), generator=generator)[:QUERIES]
            chosen = chosen.to(sample.q.device)
            with torch.enable_grad():
                guess = self._guess(sample.q[:, :, chosen], sample.k, centre, visible[chosen])
                loss = divergence(shares[:, :, chosen], guess, visible[chosen])
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(float(loss.detach()))

    def _prepare(self, sample: Sample) -> tuple[Sample, Tensor, Tensor, Tensor]:
        """Return a sample in float32, of queries that see a group; the groups that they see, their
        shares, and the centre of the keys."""
        k = sample.k.float()
        groups = groups_of(k, self.spec)
        visible = sees_groups(sample.position, groups.shape[1], self.spec)
        sees_any = visible.any(1)
        q = sample.q.float()[:, :, sees_any]
        visible = visible[sees_any]
        centre = centre_of(k, self.spec.replace(fetch_index=self.name))
        sample = Sample(q, sample.position[sees_any], k)
        return sample, visible, log_shares(q, groups, visible, self.spec), centre

    def _guess(self, q: Tensor, k: Tensor, centre: Tensor, visible: Tensor) -> Tensor:
        """Return the log shares by the index as stored."""
        projections = self.projections
        groups = groups_of(k - centre[:, None], self.spec)
        keys = stored(groups @ projections.key[:, None], self.name)
        return log_shares(q @ projections.query[:, None], keys, visible, self.spec)


def principal(q: Tensor, k: Tensor, rank: int) -> Projections:
    """Return projections onto the R directions with the largest products of queries [N, r, T, D]
    with centred keys [N, S, D], both of the same variance in each direction.

    With Q and K the second moments of queries and keys, and u the leading eigenvectors of
    Q^1/2 K Q^1/2, whose eigenvalues are e^2: keys are projected by Q^1/2 u e^-1/2, queries by
    Q^-1/2 u e^1/2. Of all scales of the directions these make the error of scores least where all
    elements of a projected key are rounded with the same error.
    """
    q = q.flatten(1, 2)
    queries = q.mT @ q / q.shape[1]
    keys = k.mT @ k / k.shape[1]
    values, vectors = torch.linalg.eigh(queries)
    values = values.clamp(min=1e-4 * values.amax(1, keepdim=True))[:, None]
    root = vectors * values.sqrt() @ vectors.mT
    inverse = vectors * values.rsqrt() @ vectors.mT
    squares, directions = torch.linalg.eigh(root @ keys @ root)
    directions = directions.flip(2)[..., :rank]  # largest first
    squares = squares.flip(1)[:, None, :rank]
    scale = squares.clamp(min=1e-8 * squares.amax(2, keepdim=True)) ** 0.25
    return Projections(inverse @ directions * scale, root @ directions / scale)


def divergence(shares: Tensor, guess: Tensor, visible: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of log shares [N, r, T, M] from others."""
    difference = (shares - guess).masked_fill(~visible, 0)
    return (shares.exp() * difference).sum(-1).mean()


def stored(keys: Tensor, name: str) -> Tensor:
    """Return keys [N, M, g, R] as an index in low bits stores them [N, M, P, R]; the gradient
    passes over the rounding."""
    index = index_of(name)
    assert isinstance(index, LowBits), "projected keys are stored in low bits"
    means = part_means(keys, index.key_sizes(keys.shape[2]))
    rank = means.shape[3]
    with torch.no_grad():
        rounded = index.decode(index.encode(keys, None), rank, means.dtype)
        rounded = rounded @ rotation(rank, means.dtype, means.device).mT
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
    """Return the log shares of groups [N, r, T, M] of keys [N, M, P, D], all of which count alike,
    in the softmax of queries [N, r, T, D] over the groups that they see."""
    rows, heads = q.shape[:2]
    each = (q.flatten(1, 2) @ keys.flatten(1, 2).mT * spec.scale).unflatten(2, (-1, keys.shape[2]))
    scores = each.logsumexp(-1).view(rows, heads, -1, keys.shape[1])
    return scores.masked_fill(~visible, -torch.inf).log_softmax(-1)
