"""Keep caches of prompts' beginnings for requests that begin alike (a system prompt, a document).

A prompt is read in chunks of one size. After each chunk, the cache's state becomes a node of a
tree, a child of the node of the chunk before. A node holds the window and sinks at its end, and the
core tokens of its chunk, with fetch also the chunk's raw tokens and index; under full attention it
holds the chunk's raw tokens. Requests branch where
chunks end, so a branched request is read in the very chunks, and has the very numbers, that it
would have alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corecontext.cache import CompactLayer, FullLayer, HeadsLayer, parts_of
from corecontext.cache.host_memory import copies_in_host_memory
from corecontext.config import CCAConfig
from corecontext.cost import CacheBytes
from corecontext.inference.room import RowShape
from corecontext.integrations.hf.cache_layers import CCALayer
from corecontext.serve.rows import with_store_of

EARLY_CHUNKS = 4
"""Chunks of a prompt before larger ones may follow: where most prompts that begin alike part."""


def _key(config: CCAConfig | None, parent: Node | None, tokens: Sequence[int]) -> tuple:
    """Return the key of a node. Its parent is hashed by identity, so the hash of a late chunk takes
    no longer than that of an early one."""
    # mutant serve: the hash of a chunk is that of its whole beginning
    return (config, parent, tuple(tokens))


class Node:
    """A chunk that has been read, after those of its ancestors.

    Args:
        key: (settings, the parent or None for the first chunk, the chunk's tokens).
        layers: All layers' caches after the chunk.
        shape: Sizes of the model's cache.
    """

    def __init__(
        self, key: tuple, layers: Sequence[CompactLayer | HeadsLayer | FullLayer], shape: RowShape
    ) -> None:
        self.key = key
        config, parent, _ = key
        self.parent: Node | None = parent
        self.children = 0
        self.last_use = 0
        self.length = layers[0].seq_len
        before = 0 if parent is None else parent.length
        caches = [cache for layer in layers for cache in parts_of(layer)]
        self.layers: list[tuple] = []
        """Settings and rotation of each compact layer; none under full attention."""
        if config is not None:
            self.layers = [(layer.config, parts_of(layer)[0].spec.rotary) for layer in layers]
        self.dtypes = [cache.dtype for cache in caches]
        """Of each cache in the layers, before rounding."""
        self.raw, self.cores = zip(*(cache.copy_since(before) for cache in caches))
        """For each cache, copies of its buffers [1, Hkv, entries, D]: the raw entries (window and
        sinks) at the chunk's end, and the core tokens that the chunk added."""
        # mutant serve: a shared beginning without its raw tokens
        added = [cache.store.since(before, self.length) for cache in caches if cache.store]
        to_host = config is not None and config.fetches_from_host
        self.fetched, self._copied = _copies(added, to_host)
        """The chunk's raw tokens and index in each cache with fetch; and the end of copies to host
        memory, None where they are complete."""
        self.nbytes = shape.row_bytes(config, self.length, before)
        """Bytes of the budget that the node takes beside its ancestors."""
        self.counted = shape.bytes_of(config, self.length, before)
        """Its bytes on the device and in host memory."""

    def wait(self) -> None:
        """Let all that follows on the device come after the copies of raw tokens."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None


def _copies(
    stored: Sequence[tuple[list[Tensor], list[Tensor]]], to_host: bool
) -> tuple[list[list[Tensor]], torch.cuda.Event | None]:
    """Copy raw tokens and index of each store, raw tokens to host memory if asked.

    Returns:
        (copies of each store's raw tokens and index, the end of copies that still run or None).
    """
    raw = [tensor for tensors, _ in stored for tensor in tensors]
    if to_host and raw:
        copies, ended = copies_in_host_memory(raw)
    else:
        copies, ended = [tensor.clone() for tensor in raw], None
    raw_copies = iter(copies)
    copied = [
        [*(next(raw_copies) for _ in tensors), *(tensor.clone() for tensor in index)]
        for tensors, index in stored
    ]
    return copied, ended


@dataclass(eq=False)
class PrefixStore:
    """Beginnings of prompts by settings and tokens; the least recently used is dropped first."""

    chunk_size: int
    """Tokens of a chunk."""
    limit: int
    """Bytes that it may hold; 0 keeps none."""
    shape: RowShape
    """Sizes of the model's cache."""
    later_chunk_size: int | None = None
    """Tokens of a chunk behind the first EARLY_CHUNKS; None for as many."""

    def __post_init__(self) -> None:
        self.nbytes = 0
        self._nodes: dict[tuple, Node] = {}  # by `Node.key`
        self._clock = itertools.count()  # numbers the uses of nodes

    def counted(self) -> CacheBytes:
        """Count the bytes of all beginnings on the device and in host memory."""
        counts = [node.counted for node in list(self._nodes.values())]
        return CacheBytes(*(sum(count) for count in zip((0, 0), *counts)))

    def find(self, config: CCAConfig | None, prompt: Sequence[int]) -> Node | None:
        """Find the longest beginning that leaves at least one token of the prompt to read."""
        node = None
        start = 0
        while (end := self.chunk_end(config, start)) < len(prompt):
            child = self._nodes.get(_key(config, node, prompt[start:end]))
            if child is None:
                break
            node = child
            node.last_use = next(self._clock)
            start = end
        return node

    def chunk_end(self, config: CCAConfig | None, start: int) -> int:
        """Return where the chunk ends that begins at `start`, the same for all prompts with these
        settings. Full attention's later chunks take longer than the first, and stay as they are."""
        is_early = start < EARLY_CHUNKS * self.chunk_size or config is None
        if is_early or self.later_chunk_size is None:
            return start + self.chunk_size
        return start + self.later_chunk_size

    def add(
        self,
        config: CCAConfig | None,
        parent: Node | None,
        tokens: Sequence[int],
        cache: Any,
        room: int,
    ) -> Node | None:
        """Keep the cache's state at the end of a chunk.

        Args:
            parent: The chunk before; None for the first, or where that was not kept.
            tokens: Of this chunk.
            room: Bytes that all beginnings may take now, within `limit`.

        Returns:
            The node; None where the chunk before was not kept, or the node does not fit: the
            budget, or the machine's memory.
        """
        layers = [layer.compact for layer in cache.layers]
        limit = min(self.limit, room)
        # Only a first chunk has no parent; of a later one the chunk before was not kept.
        if (parent is None) != (layers[0].seq_len == self.chunk_size) or limit <= 0:
            return None
        if parent is not None and self._nodes.get(parent.key) is not parent:
            return None  # it has been dropped since
        key = _key(config, parent, tokens)
        node = self._nodes.get(key)
        if node is None:
            try:
                node = Node(key, layers, self.shape)
            except MemoryError:  # the request needs no copy
                return None
            node.last_use = next(self._clock)
            self._nodes[key] = node
            self.nbytes += node.nbytes
            if parent is not None:
                parent.children += 1
            self.trim(limit)
        return node if self._nodes.get(key) is node else None

    def load(self, node: Node, cache: Any, reading: CCAConfig | None) -> None:
        """Fill an empty cache of a model with a beginning; `reading` says where raw tokens are.
        Under full attention the cache has its layers already."""
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        path.reverse()

        if not node.layers:
            for index, layer in enumerate(cache.layers):
                pieces = zip(*(chunk.cores[index] for chunk in path))
                layer.compact.fill([torch.cat(x, 2) for x in pieces], node.length)
            return
        # Make empty layers; fill each with the last chunk's raw entries and all core tokens, in the
        # order of the text.
        cache.layers = []
        for config, rotary in node.layers:
            layer = CCALayer(with_store_of(config, reading), rotary)
            layer.is_initialized = True
            cache.layers.append(layer)
        caches = [compact for layer in cache.layers for compact in parts_of(layer.compact)]
        for chunk in path:
            chunk.wait()
        for index, (compact, dtype) in enumerate(zip(caches, node.dtypes, strict=True)):
            cores = [chunk.cores[index] for chunk in path]
            buffers = [torch.cat(pieces, 2) for pieces in zip(node.raw[index], *cores)]
            fetched = [chunk.fetched[index] for chunk in path if chunk.fetched]
            compact.fill(
                buffers,
                node.length,
                group_size=compact.config.group_size,
                dtype=dtype,
                store=[torch.cat(pieces, 2) for pieces in zip(*fetched)],
            )

    def trim(self, limit: int) -> None:
        """Drop beginnings until they take at most `limit` bytes: the least recently used first, and
        a chunk only after its children."""
        if self.nbytes <= limit:
            return
        leaves = [(node.last_use, node) for node in self._nodes.values() if not node.children]
        heapq.heapify(leaves)  # no two nodes have the same last use
        while self.nbytes > limit:
            _, leaf = heapq.heappop(leaves)
            del self._nodes[leaf.key]
            self.nbytes -= leaf.nbytes
            # A prompt that is being read may hold the node, whose memory is freed all the same.
            # mutant serve: a dropped beginning keeps its memory
            leaf.raw = leaf.cores = ()
            leaf.fetched = []
            parent = leaf.parent
            if parent is None:
                continue
            parent.children -= 1
            if not parent.children:
                heapq.heappush(leaves, (parent.last_use, parent))
