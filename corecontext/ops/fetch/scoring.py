"""Score groups by an index: estimate the largest score of a token of each group.

Keys may lack their centre (a mean key). Its product with the query is added back, so that scores
of several query heads can be compared. A softcap changes no order, so it is left out.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from corecontext.ops.fetch.index import Index
from corecontext.ops.pooling import widen
from corecontext.ops.spec import Spec


class Queries(NamedTuple):
    """Hold queries in the form by which an index scores."""

    mapped: Tensor
    """[N, r, T, D']."""
    offset: Tensor | None
    """Product with the centre, added to every product of a query, [N, r, T]; None without one."""

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
    """Return the centre of the index, a mean key [N, D] in float32 or wider, or None for an index
    without one; from raw keys [N, S, D] from position 0 on."""
    if not spec.num_centred:
        return None
    return widen(keys[:, spec.sinks : spec.sinks + spec.num_centred]).mean(1)


def group_keys(keys: Tensor, spec: Spec, count: int) -> Tensor:
    """Return the raw keys [N, M, g, D] of the first `count` groups after the sinks, of keys
    [N, S, D] from position 0 on."""
    end = spec.sinks + count * spec.group_size
    return keys[:, spec.sinks : end].unflatten(1, (count, spec.group_size))


def key_scores(stored: tuple[Tensor, ...], queries: Queries, spec: Spec) -> Tensor:
    """Return the scores of the keys of groups, [N, r, T, M, P] in float32 or wider.

    Args:
        stored: What the index has stored of the groups, each [N, M, ...].
    """
    each = spec.index.products(stored, queries.mapped)
    if queries.offset is not None:
        # mutant fetch: heads are compared without their products with the centre, PyTorch
        each = each + queries.offset[..., None, None]
    return each * spec.scale


def scores(stored: tuple[Tensor, ...], queries: Queries, spec: Spec) -> Tensor:
    """Return the scores of groups, the largest of their keys', [N, r, T, M] in float32 or wider;
    arguments as of `key_scores`."""
    return key_scores(stored, queries, spec).amax(-1)
