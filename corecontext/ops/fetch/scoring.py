"""Score groups by an index: estimate each group's share of a query's softmax.

Scores estimate the log of a group's mass, log sum_o exp(score of token o), so that those of several
query heads can be compared.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops.fetch.core_part import cap
from corecontext.ops.fetch.index import Index
from corecontext.ops.pooling import widen
from corecontext.ops.spec import Spec


class Queries(NamedTuple):
    """Hold queries as an index scores by them."""

    mapped: Tensor
    """[N, r, T, D']."""
    offset: Tensor | None
    """Added to every product of a query, [N, r, T]; None for nothing."""

    @classmethod
    def of(cls, q: Tensor, index: Index, centre: Tensor | None) -> Queries:
        """Map queries [N, r, T, D].

        Args:
            centre: From `centre_of`.
        """
        offset = None if centre is None else index.centre_products(q, centre)
        return cls(index.map_queries(q), offset)

    def part(self, sequences: slice, rows: slice) -> Queries:
        """Return some queries of some sequences."""
        return Queries(*(None if x is None else x[sequences, :, rows] for x in self))


def centre_of(keys: Tensor, spec: Spec) -> Tensor | None:
    """Return the mean key [N, D], in float32 or wider, that centres the index, None for none, from
    raw keys [N, S, D] from position 0 on."""
    if not spec.num_centred:
        return None
    return widen(keys[:, spec.sinks : spec.sinks + spec.num_centred]).mean(1)


def group_keys(keys: Tensor, spec: Spec, count: int) -> Tensor:
    """Return the raw keys [N, M, g, D] of the first `count` groups after the first tokens kept raw,
    of keys [N, S, D] from position 0 on."""
    end = spec.sinks + count * spec.group_size
    return keys[:, spec.sinks : end].unflatten(1, (count, spec.group_size))


def scores(stored: tuple[Tensor, ...], queries: Queries, spec: Spec) -> Tensor:
    """Return the estimated log mass of each group for each query, [N, r, T, M] in float32 or wider.

    Args:
        stored: What the index has stored of the groups, each [N, M, ...].
    """
    index = spec.index
    each = index.products(stored, queries.mapped)  # [N, r, T, M, P]
    if queries.offset is not None:
        each = each + queries.offset[..., None, None]
    each = cap(each * spec.scale, spec)
    return log_mass(each, index.key_sizes(spec.group_size))


def log_mass(each: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the log mass of each group, [..., M], of the scores of its keys, [..., M, P], that
    stand for `sizes` tokens."""
    if len(set(sizes)) > 1:
        # Filled on the device: a captured step copies nothing from the host.
        runs = [each.new_full((len([*same]),), size) for size, same in groupby(sizes)]
        each = each + torch.cat(runs).log()
    elif sizes[0] > 1:
        each = each + math.log(sizes[0])
    return each.logsumexp(-1)
