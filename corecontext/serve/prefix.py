"""Caches of prompts' beginnings, kept for requests that begin alike (a system prompt, a document).

A prompt is read in chunks of one size. After each, what a further chunk needs is a node of a tree:
the raw tokens, and the core tokens of this chunk; those of earlier ones are its ancestors'.
Requests branch where chunks end, so a branched request is read in the very chunks, and has the very
numbers, that it would have alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from corecontext.cache import CompactLayer, HeadsLayer, parts_of
from corecontext.config import CCAConfig
from corecontext.integrations.hf_cache import CCALayer
from corecontext.serve.rows import RowShape
from corecontext.visibility import num_complete_groups


class Node:
    """A chunk that has been read, after those of its ancestors."""

    def __init__(
        self,
        key: tuple,
        parent: Node | None,
        layers: Sequence[CompactLayer | HeadsLayer],
        used: int,
        shape: RowShape,
    ) -> None:
        self.key, self.parent, self.used, self.children = key, parent, used, 0
        self.length = layers[0].seq_len
        before = 0 if parent is None else parent.length
        parts = [part for layer in layers for part in parts_of(layer)]
        self.layers = [(layer.config, parts_of(layer)[0].rotary, layer.learned) for layer in layers]
        self.given = [(part._core_width, part._dtype) for part in parts]
        # planted: sinks: a shared beginning without them
        self.raw = [[x[:, :, : part.raw_size].clone() for x in part.buffers] for part in parts]
        self.cores = [[self._cores(part, x, before) for x in part.buffers] for part in parts]
        self.nbytes = shape.row_bytes(key[0], self.length, before)

    def _cores(self, layer: CompactLayer, buffer: Tensor, before: int) -> Tensor:
        """Core tokens of the groups that closed in this chunk."""
        raw, width = layer.raw_size, layer._core_width
        old, new = (
            num_complete_groups(length - layer.num_sinks, layer.group_size)
            for length in (before, self.length)
        )
        return buffer[:, :, raw + old * width : raw + new * width].clone()

    @property
    def path(self) -> list[Node]:
        """From the first chunk to this one."""
        return [self] if self.parent is None else [*self.parent.path, self]


class PrefixStore:
    """Beginnings of prompts by their g, s and tokens, the least recently used ones dropped first.

    Args:
        chunk_size: Tokens of a chunk.
        limit: Bytes that it may hold; 0 keeps nothing.
        shape: Sizes of the model's cache. Of several processes all count alike: what one drops, all
            do.
    """

    def __init__(self, chunk_size: int, limit: int, shape: RowShape) -> None:
        self.chunk_size, self.limit, self.shape, self.nbytes = chunk_size, limit, shape, 0
        self._nodes: dict[tuple, Node] = {}
        self._clock = itertools.count()

    def find(self, config: CCAConfig, prompt: Sequence[int]) -> Node | None:
        """The longest beginning that is held; at least one token of the prompt is left to read."""
        node = None
        for end in range(self.chunk_size, len(prompt), self.chunk_size):
            further = self._nodes.get(
                (config, node and node.key, tuple(prompt[end - self.chunk_size : end]))
            )
            if further is None:
                break
            node = further
            node.used = next(self._clock)
        return node

    def add(
        self, config: CCAConfig, parent: Node | None, tokens: Sequence[int], cache: Any, room: int
    ) -> Node | None:
        """Keep what has been read up to the end of a chunk; None where its parent is gone, or it
        does not fit `room` (bytes, of which what is held is a part) or the limit."""
        layers, limit = [layer.compact for layer in cache.layers], min(self.limit, room)
        if (parent is None) != (layers[0].seq_len == self.chunk_size) or limit <= 0:
            return None
        if parent is not None and self._nodes.get(parent.key) is not parent:
            return None
        key = (config, parent and parent.key, tuple(tokens))
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, parent, layers, next(self._clock), self.shape)
            self.nbytes += node.nbytes
            if parent is not None:
                parent.children += 1
            self.trim(limit)
        return node if self._nodes.get(key) is node else None

    def load(self, node: Node, cache: Any) -> None:
        """Fill an empty cache of a model with a beginning."""
        path, cache.layers = node.path, []
        for config, rotary, learned in node.layers:
            cache.layers.append(CCALayer(config, rotary, learned=learned))
            cache.layers[-1].is_initialized = True
        parts = [part for layer in cache.layers for part in parts_of(layer.compact)]
        for index, (part, (width, dtype)) in enumerate(zip(parts, node.given, strict=True)):
            keys, values, *scales = (
                torch.cat([raw, *(one.cores[index][i] for one in path)], 2)
                for i, raw in enumerate(node.raw[index])
            )
            part.load_state_dict(
                {
                    "config": part.config.to_dict(),
                    "rollback": 0,
                    "group_size": part.config.group_size,
                    "ended": None,
                    "core_width": width,
                    "seen": node.length,
                    "keys": keys,
                    "values": values,
                    "scales": scales,
                    "dtype": dtype,
                    "intact_from": max(0, node.length - part.ring_size),
                    "pad": torch.zeros(1, dtype=torch.long, device=keys.device),
                }
            )

    def trim(self, limit: int) -> None:
        """Drop beginnings, the least recently used first and no chunk before those behind it, until
        they fit."""
        while self.nbytes > limit:
            leaf = min(
                (node for node in self._nodes.values() if not node.children),
                key=lambda node: node.used,
            )
            del self._nodes[leaf.key]
            self.nbytes -= leaf.nbytes
            if leaf.parent is not None:
                leaf.parent.children -= 1
