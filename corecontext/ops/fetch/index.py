"""Define what an index of fetch is: keys of a group that stand for its tokens, and queries to score
them by.

A group's score estimates the largest score of its tokens: the largest map(q) . key_p of its P keys
(`ops.fetch.scoring`).
"""

import functools
import importlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from corecontext.config import parse_index
from corecontext.visibility import num_complete_groups


class Index(ABC):
    """Make and read the keys of groups.

    To add an index, write a subclass in a file of its own and its row of `config.INDICES`. N is
    rows x KV heads: an index with weights of each KV head repeats them for the rows.
    """

    name = ""
    """As `CCAConfig.fetch_index`; "" for an index that has no row."""
    reads_raw = False
    """Whether its keys are the raw keys, which a cache has: nothing is stored beside them."""

    @abstractmethod
    def key_sizes(self, group_size: int) -> tuple[int, ...]:
        """Return how many tokens each of the P keys of a group stands for."""

    @abstractmethod
    def encode(self, keys: Tensor, centre: Tensor | None) -> tuple[Tensor, ...]:
        """Return what is stored of groups, each [N, M, ...], from their raw keys [N, M, g, D],
        rotary applied.

        Args:
            centre: [N, D], as `num_centred` says.
        """

    @abstractmethod
    def decode(self, stored: tuple[Tensor, ...], dim: int, dtype: torch.dtype) -> Tensor:
        """Return the keys [N, M, P, D'] of what `encode` returned, in dtype; D' is `dim`."""

    def map_queries(self, q: Tensor) -> Tensor:
        """Return the queries [N, r, T, D'] that score keys, of q [N, r, T, D], in its dtype."""
        return q

    def centre_products(self, q: Tensor, centre: Tensor) -> Tensor | None:
        """Return the products of queries with the centre that keys lack, [N, r, T]; None where keys
        are not centred."""
        return None

    def products(self, stored: tuple[Tensor, ...], mapped: Tensor) -> Tensor:
        """Return the inner products of mapped queries with keys, [N, r, T, M, P] in float32 or
        wider."""
        keys = self.decode(stored, mapped.shape[3], mapped.dtype)
        return products(mapped, keys.flatten(1, 2)).unflatten(3, keys.shape[1:3])

    # Sizes

    def key_dim(self, head_dim: int) -> int:
        """Return the elements of a key: D'."""
        return head_dim

    def num_centred(self, group_size: int, window_size: int) -> int:
        """Count the tokens, after the first tokens kept raw, whose mean key centres the others:
        whole groups, at most the window, so that each query that sees a group is behind them."""
        return 0

    def num_keys(self, group_size: int) -> int:
        """Count the keys of a group: P."""
        return len(self.key_sizes(group_size))

    def num_bytes(self, group_size: int, head_dim: int, itemsize: int) -> int:
        """Count the bytes of a group and KV head, raw keys having `itemsize` bytes an element."""
        return self.num_keys(group_size) * self.key_dim(head_dim) * itemsize

    def num_stored_bytes(self, group_size: int, head_dim: int, itemsize: int) -> int:
        """Count those that a cache stores beside its raw tokens."""
        return 0 if self.reads_raw else self.num_bytes(group_size, head_dim, itemsize)

    def lag(self, group_size: int, window_size: int) -> int:
        """Count the tokens that come after a group's last one before it gets keys: those that the
        centre counts, less one group. They are fewer than the window, so that the keys are there
        before any query sees the group."""
        return max(0, self.num_centred(group_size, window_size) - group_size)

    def num_indexed(self, seq_len: int, group_size: int, window_size: int) -> int:
        """Count the groups that have keys after seq_len tokens behind those kept raw: where a
        centre is needed they wait for its tokens, as no query sees a group that is younger."""
        return num_complete_groups(seq_len - self.lag(group_size, window_size), group_size)


def index_of(index: str | Index) -> Index:
    """Return the index of a name.

    Raises:
        ValueError: no index has this name.
    """
    return index if isinstance(index, Index) else _made(index)


@functools.lru_cache(maxsize=64)
def _made(name: str) -> Index:
    where, numbers = parse_index(name)
    module, _, kind = where.partition(":")
    index = getattr(importlib.import_module(module), kind)(*numbers)
    index.name = name
    return index


def products(q: Tensor, keys: Tensor) -> Tensor:
    """Return the inner products of q [N, r, T, D] with keys [N, K, D], [N, r, T, K] in float32 or
    wider, accumulated in it."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = q.flatten(1, 2)
    if q.device.type == "cuda" and q.dtype != wide:
        total = torch.bmm(rows, keys.to(q.dtype).mT, out_dtype=wide)
    else:
        total = rows.to(wide) @ keys.to(wide).mT
    return total.unflatten(1, q.shape[1:3])
