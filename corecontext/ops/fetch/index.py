"""Define what an index of fetch is: P keys of each group that stand for its tokens, and a map of
queries to score them by.

A group's score estimates the largest score of its tokens: the largest map(q) . key_p over its P
keys (`ops.fetch.scoring`).
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

    To add an index, write a subclass in a file of its own and its row of `config.INDICES`. Tensors
    begin with N = rows x KV heads: an index with weights of each KV head repeats them for the rows.
    """

    name = ""
    """As `CCAConfig.fetch_index`; "" for an index without a row in `config.INDICES`."""
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
            centre: Mean of the first keys, [N, D], which the index may subtract; None without one.
        """

    @abstractmethod
    def decode(self, stored: tuple[Tensor, ...], dim: int, dtype: torch.dtype) -> Tensor:
        """Return the keys [N, M, P, D'], in dtype, of what `encode` returned; D' is `dim`."""

    def map_queries(self, q: Tensor) -> Tensor:
        """Return the queries [N, r, T, D'] that score keys, of q [N, r, T, D], in its dtype."""
        return q

    def centre_products(self, q: Tensor, centre: Tensor) -> Tensor | None:
        """Return the products of queries with the centre, which keys lack, [N, r, T]; None where
        keys are not centred."""
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
        """Count the tokens after the sinks whose mean key is the centre; 0 for no centre. They are
        whole groups, at most the window: whoever sees a group comes after them."""
        return 0

    def num_keys(self, group_size: int) -> int:
        """Count the keys of a group: P."""
        return len(self.key_sizes(group_size))

    def num_bytes(self, group_size: int, head_dim: int, itemsize: int) -> int:
        """Count the bytes of a group and KV head, raw keys having `itemsize` bytes an element."""
        return self.num_keys(group_size) * self.key_dim(head_dim) * itemsize

    def num_stored_bytes(self, group_size: int, head_dim: int, itemsize: int) -> int:
        """Count the bytes that a cache stores of them beside its raw tokens."""
        return 0 if self.reads_raw else self.num_bytes(group_size, head_dim, itemsize)

    def lag(self, group_size: int, window_size: int) -> int:
        """Count the tokens by which a group's keys come later than its last token: those of the
        centre less one group, 0 without a centre. They are fewer than the window, so that the keys
        are there before any query sees the group."""
        return max(0, self.num_centred(group_size, window_size) - group_size)

    def num_indexed(self, seq_len: int, group_size: int, window_size: int) -> int:
        """Count the groups that have keys once seq_len tokens have come after the sinks."""
        return num_complete_groups(seq_len - self.lag(group_size, window_size), group_size)


def index_of(index: str | Index) -> Index:
    """Return an index by its name, or an index as it is.

    Raises:
        ValueError: no index has this name.
    """
    return index if isinstance(index, Index) else _made(index)


@functools.lru_cache(maxsize=64)
def _made(name: str) -> Index:
    path, numbers = parse_index(name)  # as "corecontext.ops.fetch.low_bits:Parts" and (4, 2)
    module, _, class_name = path.partition(":")
    index = getattr(importlib.import_module(module), class_name)(*numbers)
    index.name = name
    return index


def products(q: Tensor, keys: Tensor) -> Tensor:
    """Return the inner products [N, r, T, K] of q [N, r, T, D] with keys [N, K, D], accumulated in
    float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = q.flatten(1, 2)
    if q.device.type == "cuda" and q.dtype != wide:
        total = torch.bmm(rows, keys.to(q.dtype).mT, out_dtype=wide)
    else:
        total = rows.to(wide) @ keys.to(wide).mT
    return total.unflatten(1, q.shape[1:3])
