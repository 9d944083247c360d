"""Put KV heads that keep every token into caches of their own.

All KV heads of a block table have as many entries. So heads that keep every token have other caches
in vLLM than the core tokens and the window of their layer's other heads. vLLM gives the pages of
all caches the same bytes, and each worker the same caches. So each of these caches has places for
the same number of heads, and the heads of a worker, of all its layers, fill them in order: few
places stay empty, with tensor parallelism, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from corecontext.config import CCAConfig


class RawShare(NamedTuple):
    """Hold heads of a layer that are neighbours in a cache, and their places there."""

    cache: int
    """Number of the cache among those of the worker."""
    first: int
    """Place of the first of these heads in the cache."""
    heads: tuple[int, ...]
    """KV heads, by their number on the rank."""


class RawHeads(NamedTuple):
    """Tell which KV heads keep every token."""

    heads: tuple[tuple[tuple[int, ...], ...], ...]
    """heads[layer][rank]: such heads, by their number on this rank of tensor parallelism."""
    kv_heads: int
    """KV heads of a rank."""

    @classmethod
    def of(cls, layers: Sequence[CCAConfig], kv_heads: int, ranks: int = 1) -> RawHeads:
        """Read the settings of all layers of a model with `kv_heads` KV heads; with more ranks than
        heads several ranks have the same head, as in vLLM."""
        count = max(1, kv_heads // ranks)
        copies = max(1, ranks // kv_heads)
        starts = [rank // copies * count for rank in range(ranks)]
        heads = []
        for layer in layers:
            sizes = layer.head_group_sizes or (layer.group_size,) * kv_heads
            is_raw = [size == 1 for size in sizes]
            of_ranks = [is_raw[start : start + count] for start in starts]
            heads.append(tuple(tuple(itertools.compress(range(count), x)) for x in of_ranks))
        return cls(tuple(heads), count)

    def pools(self, layer: int) -> bool:
        """Return whether a head of a layer, on any rank, has core tokens."""
        return any(len(heads) < self.kv_heads for heads in self.heads[layer])

    def most(self, layers: Sequence[int]) -> int:
        """Return the number of such heads in some layers, on the rank that has the most."""
        counts = [[len(heads) for heads in self.heads[layer]] for layer in layers]
        return max(map(sum, zip(*counts)))

    def per_cache(self, page_size: int, group_size: int) -> int:
        """Return how many heads share a cache: the number that takes the least memory for long
        requests, as vLLM groups layers, and of equal ones that with the fewest groups.

        Args:
            page_size: Entries of a page with all heads of a rank.
            group_size: Tokens of a core token.
        """
        numbers = range(len(self.heads))
        compact = sum(map(self.pools, numbers))
        raw = self.most(numbers)

        # For `size` heads a cache: entries of a token, in units of all heads of a rank (a window's
        # are constant), and vLLM's groups: pooled heads have two for each, core tokens and window.
        def cost(size: int) -> tuple[float, int]:
            layers, groups = grouped_caches([compact, -(-raw // size)])
            entries = layers * (groups[0] / group_size + groups[1] * size / self.kv_heads)
            return entries, 2 * groups[0] + groups[1]

        entries = page_size * self.kv_heads
        sizes = [size for size in range(1, self.kv_heads + 1) if entries % size == 0]
        return min(sizes, key=cost)

    def shares(self, layers: Sequence[int], rank: int, per_cache: int) -> dict[int, list[RawShare]]:
        """Return the places of a rank's heads in the caches of a worker with some layers."""
        places = itertools.count()
        shares: dict[int, list[RawShare]] = {}
        for layer in layers:
            # mutant vllm: heads of two layers have one place in a cache
            placed = [(head, next(places)) for head in self.heads[layer][rank]]
            shares[layer] = []
            for cache, pairs in itertools.groupby(placed, lambda pair: pair[1] // per_cache):
                heads, numbers = zip(*pairs)
                shares[layer].append(RawShare(cache, numbers[0] % per_cache, heads))
        return shares


def grouped_caches(counts: Sequence[int]) -> tuple[int, list[int]]:
    """Return how many layers vLLM puts into a group, and the groups of each kind of cache, of which
    there are so many layers: its rule for caches with pages of the same bytes."""
    size = min(counts)
    if max(counts) < 1.5 * size:
        size = max(counts)
    return size, [-(-count // size) for count in counts]
