"""Hold rows of cache for requests that come and go, each of its own length, decoded together.

A compact layer finds every entry by a row's position, which is the length of the batch minus the
row's padding. So a row of any length can join a batch at any time, with the padding that makes its
position right: -600 for a prompt of 700 tokens that joins after 100 steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from corecontext.cache import CompactLayer, FullLayer, HeadsLayer, parts_of
from corecontext.cache.raw_store import RawStore
from corecontext.cache.stores import new_store
from corecontext.config import CCAConfig
from corecontext.inference.room import RowShape

IDLE = 2**30
"""Padding of a row without a request: its position stays negative, so a kernel stores nothing."""

Layer = CompactLayer | HeadsLayer | FullLayer
"""A layer's cache; a `HeadsLayer` has a `CompactLayer` for the KV heads of each g."""


def with_store_of(config: CCAConfig, like: CCAConfig | None) -> CCAConfig:
    """Return settings with the store of raw tokens that those of `like` have."""
    if like is None or not config.fetch_groups:
        return config
    return config.replace(store=like.store, fetch_slots=like.fetch_slots)


@dataclass(eq=False, repr=False)
class RowPool:
    """A fixed number of rows, all with the same settings."""

    config: CCAConfig | None
    """CCA's settings; None for full attention."""
    rows: int
    """Requests that it holds at most."""
    max_length: int
    """Tokens of the longest, prompt and answer."""
    shape: RowShape
    """Sizes of the model's cache."""
    _: KW_ONLY
    fixed: bool
    """Keep lengths in tensors, so that a decoding step can be captured."""
    reading: CCAConfig | None = None
    """The settings by which a row's prompt is read, where raw tokens are nearer meanwhile; None
    for the row's."""
    slots: list[Any] = field(default_factory=list)
    """The request (`Slot`) of each row in use, the first rows."""
    promised: int = 0
    """Rows for prompts that are being read."""
    seen: int = 0
    """Steps so far: a row's position is this minus its padding."""

    def __post_init__(self) -> None:
        self.layers: list[Layer] = []  # made with the first request
        self._caches: list[CompactLayer | FullLayer] = []  # `_parts` of the layers
        # Of each cache with all rows; the cache itself gets those of a step (`hold`).
        self._buffers: list[list[Tensor]] = []
        self._stores: list[RawStore | None] = []
        self._pads = [IDLE] * self.rows  # of each row, on the host
        self._pad: Any = None  # the same on the device, [rows], shared by all layers
        self.row_bytes = self.shape.row_bytes(self.config, self.max_length)
        """Bytes of a row over all layers."""
        self.reading = self.reading or self.config
        self.reading_bytes = self.shape.reading_bytes(self.reading, self.max_length)
        """Bytes of the cache into which a row's prompt is read."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, allocated with the first request."""
        return self.rows * self.row_bytes

    @property
    def is_idle(self) -> bool:
        """Whether no request has or will get a row."""
        return not self.slots and not self.promised

    def has_room(self, config: CCAConfig | None, length: int) -> bool:
        """Whether a request of these settings and length can get a row."""
        free = self.rows - len(self.slots) - self.promised
        return self.config == config and self.max_length >= length and free > 0

    def add(self, slot: Any, layers: Sequence[Layer]) -> None:
        """Give a request a row, and copy its prompt's cache, one growing row, into it."""
        assert len(self.slots) < self.rows, "a row was added to a full pool"
        if not self.layers:
            self._allocate(layers)
        row = len(self.slots)
        self.slots.append(slot)
        for cache, buffers in zip(self._parts(layers), self._buffers):
            entries = self.shape.entries(cache.config, int(cache.seen))
            for buffer, read in zip(buffers, cache.buffers):
                buffer[row, :, :entries] = read[0, :, :entries]
                # An earlier request may have left NaN, which a mask does not remove (0 x NaN).
                # mutant serve: a longer request stays behind a shorter one
                buffer[row, :, entries:] = 0
        for store, cache in zip(self._stores, self._parts(layers)):
            if store is not None:
                # mutant serve: a request's raw tokens stay with its prompt
                store.rows(slice(row, row + 1)).load(cache.store.used(int(cache.seen)))
        self._set_pad(row, self.seen - int(layers[0].seen))

    def remove(self, slot: Any) -> None:
        """Free a request's row, which the last row replaces."""
        row = self.slots.index(slot)
        last = len(self.slots) - 1
        if row != last:
            for buffer in itertools.chain(*self._buffers):
                buffer[row].copy_(buffer[last])
            for store in filter(None, self._stores):
                store.move_row(row, last, self.seen - self._pads[last])
            self._set_pad(row, self._pads[last])
            self.slots[row] = self.slots[last]
        self.slots.pop()
        self._set_pad(last, IDLE)

    def hold(self, count: int) -> None:
        """Let the next step run over the first `count` rows."""
        for cache, buffers in zip(self._caches, self._buffers):
            cache.buffers = [buffer[:count] for buffer in buffers]
            cache.pad = self._pad[:count]
            cache.pads = self._pads[:count]
        for cache, store in zip(self._caches, self._stores):
            if store is not None and isinstance(cache, CompactLayer):
                cache.store = store.rows(slice(count))

    def _set_pad(self, row: int, pad: int) -> None:
        """Set a row's padding on the host and on the device."""
        self._pads[row] = pad
        self._pad[row] = pad

    def _allocate(self, layers: Sequence[Layer]) -> None:
        """Make buffers for all rows, like those of a first request. If memory runs out, none is
        kept, so that a later request can try again."""
        device = parts_of(layers[0])[0].buffers[0].device
        self._pad = torch.full((self.rows,), IDLE, dtype=torch.long, device=device)
        made: list[Layer] = []
        for layer in layers:
            caches: list[Any] = [self._like(cache) for cache in parts_of(layer)]
            made.append(layer.of(caches) if isinstance(layer, HeadsLayer) else caches[0])
        self.layers = made
        self._caches = self._parts(made)
        self._stores = [getattr(cache, "store", None) for cache in self._caches]
        self._buffers = [cache.buffers for cache in self._caches]

    @staticmethod
    def _parts(layers: Sequence[Layer]) -> list[Any]:
        """List the caches of all layers in order: one a layer, or one for each g in it."""
        return [cache for layer in layers for cache in parts_of(layer)]

    def _like(self, cache: CompactLayer | FullLayer) -> CompactLayer | FullLayer:
        """Make a cache of all rows, empty, for a cache of one row."""
        entries = self.shape.entries(cache.config, self.max_length)
        # Zeros, not garbage: a masked NaN would still reach the output as 0 x NaN.
        buffers = [x.new_zeros(self.rows, x.shape[1], entries, x.shape[3]) for x in cache.buffers]
        made: CompactLayer | FullLayer
        if isinstance(cache, FullLayer):
            made = FullLayer(self.max_length, fixed=self.fixed)
            made.buffers = buffers
        else:
            config = with_store_of(cache.config, self.config)
            made = CompactLayer(
                config,
                cache.spec.rotary,
                max_length=self.max_length if self.fixed else None,
            )
            if cache.store is not None and cache.dtype is not None:
                like = [x[:, :, :1].expand(self.rows, -1, -1, -1) for x in cache.store.raw]
                made.store = new_store(config, cache.spec, like, cache.dtype, self.max_length)
            made.adopt(buffers, cache)
        made.seen = 0
        if self.fixed:
            made.seen = torch.zeros((), dtype=torch.long, device=buffers[0].device)
        return made


@dataclass(eq=False)
class PooledLayer:
    """One layer's rows of several pools as one batch, in the order of the pools."""

    layers: Sequence[Layer]
    """The same layer of the model in each pool."""
    counts: list[int]
    """Rows of each pool in the step."""
    # Attributes of a `CompactLayer`, in whose place this is:
    is_empty: ClassVar = False
    padding_known: ClassVar = True
    config: ClassVar = None  # no draft is appended here (layer_call.py)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Append a token a row and attend, each pool for its rows; return [B, H, 1, D]."""
        if len(self.layers) == 1:
            return self.layers[0].attend(q, k, v, **options)
        rows = zip(*(x.split(self.counts) for x in (q, k, v)))
        return torch.cat(
            [layer.attend(*tensors, **options) for layer, tensors in zip(self.layers, rows)]
        )
