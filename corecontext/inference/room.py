"""Count the bytes of a server's rows of cache, and of a request until its prompt is read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from corecontext.config import CCAConfig
from corecontext.cost import CacheBytes, entry_bytes, store_bytes
from corecontext.model_sizes import ModelSizes
from corecontext.visibility import num_complete_groups, num_sinks, window_capacity

NEAR_SHARE = 0.125
"""Most of a server's budget that the cache takes into which a prompt is read with its raw tokens on
the device, where its row has them in host memory."""


class Needed(NamedTuple):
    """Hold the bytes of a request until its prompt is read."""

    row: CacheBytes
    """Of its row."""
    reading: CacheBytes
    """Of the cache into which its prompt is read."""
    of_budget: int
    """What both take of a server's budget."""

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.row.device + self.reading.device

    @property
    def host(self) -> int:
        """All bytes in host memory."""
        return self.row.host + self.reading.host


@dataclass(frozen=True)
class RowShape:
    """Sizes of a model's cache, by which bytes of rows are counted."""

    sizes: ModelSizes
    """Layers, heads and head size."""
    itemsize: int
    """Bytes of a number in the cache before it is rounded."""
    host_rate: float = 0.0
    """Bytes of the budget that a byte in host memory takes: the budget over that of host memory.
    So what fits the budget fits both."""

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, host_rate: float = 0.0) -> RowShape:
        """Read the sizes off a Hugging Face config."""
        return cls(ModelSizes.of(config), dtype.itemsize, host_rate)

    def bytes_of(self, config: CCAConfig | None, max_length: int, before: int = 0) -> CacheBytes:
        """Return the bytes of a row of `max_length` tokens over all layers, on the device and in
        host memory.

        Args:
            config: CCA's settings; None is full attention.
            before: First tokens whose core tokens, and raw tokens with fetch or under full
                attention, are held elsewhere.
        """
        dim = self.sizes.head_dim
        if config is None:
            heads = self.sizes.layers * self.sizes.kv_heads
            return CacheBytes(heads * (max_length - before) * 2 * dim * self.itemsize, 0)
        device = host = 0
        layers = Counter(config.of_layer(index) for index in range(self.sizes.layers))
        for layer, count in layers.items():
            group_sizes = layer.head_group_sizes or (layer.group_size,) * self.sizes.kv_heads
            for g, heads_of_layer in Counter(group_sizes).items():
                heads = count * heads_of_layer
                # Bytes of one KV head with this g, of which these layers have `heads`.
                head = layer.replace(head_group_sizes=None, group_size=g)
                entries = self.entries(head, max_length)
                store = store_bytes(head, max_length, dim, self.itemsize)
                if before:
                    entries -= num_complete_groups(before - num_sinks(head.sink_size, g), g)
                    earlier = store_bytes(head, before, dim, self.itemsize)
                    store = CacheBytes(*(x - y for x, y in zip(store, earlier)))
                compact = entries * entry_bytes(head, dim, self.itemsize)
                # mutant serve: raw tokens on the device are not counted
                device += heads * (compact + store.device)
                host += heads * store.host
        return CacheBytes(device, host)

    def reading_of(self, config: CCAConfig | None, max_length: int) -> CacheBytes:
        """Return the bytes of the cache into which a row's prompt is read: as many as a row's, and
        those of all raw tokens if full attention reads it."""
        row = self.bytes_of(config, max_length)
        # mutant prefill: memory forgets the raw tokens of prompts
        if config is not None and config.keeps_raw_while_reading:
            return row._replace(device=row.device + self.bytes_of(None, max_length).device)
        return row

    def entries(self, config: CCAConfig | None, max_length: int) -> int:
        """Count the entries of a row in one layer, whose settings these are: the ring, the sinks,
        and a core token for each group after them."""
        if config is None:
            return max_length
        g = config.group_size
        n = num_sinks(config.sink_size, g)
        ring = window_capacity(g, config.window_size)
        # mutant sinks: forgotten by a server's rows
        return ring + min(n, max_length) + num_complete_groups(max_length - n, g)

    def budget_bytes(self, cache: CacheBytes) -> int:
        """Return the bytes of the budget that a cache takes."""
        # mutant serve: raw tokens in host memory are not counted
        return max(cache.device, math.ceil(cache.host * self.host_rate))

    def row_bytes(self, config: CCAConfig | None, max_length: int, before: int = 0) -> int:
        """Return the bytes of the budget that a row takes; arguments as of `bytes_of`."""
        return self.budget_bytes(self.bytes_of(config, max_length, before))

    def reading_bytes(self, config: CCAConfig | None, max_length: int) -> int:
        """Return those that the cache takes into which a row's prompt is read."""
        return self.budget_bytes(self.reading_of(config, max_length))

    def read_as(self, config: CCAConfig | None, max_length: int, budget: int) -> CCAConfig | None:
        """Return the settings by which the prompt of a row of `max_length` tokens is read: with the
        raw tokens on the device, where they take little of the budget. Each chunk reads those of
        all chunks before."""
        if config is None or not config.fetches_from_host:
            return config
        near = config.replace(store="device", fetch_slots=None)
        small = self.budget_bytes(self.bytes_of(near, max_length)) <= NEAR_SHARE * budget
        return near if small else config

    def needed(self, config: CCAConfig | None, max_length: int, budget: int) -> Needed:
        """Count the bytes of a request that gets a row of `max_length` tokens."""
        row = self.bytes_of(config, max_length)
        read_as = self.read_as(config, max_length, budget)
        reading = self.reading_of(read_as, max_length)
        # mutant serve: memory forgets the prompts that are read
        return Needed(row, reading, self.budget_bytes(row) + self.budget_bytes(reading))
