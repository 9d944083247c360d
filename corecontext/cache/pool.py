"""Rows of cache for requests that come and go: each row has its own length, and all are decoded together.

A compact layer finds every entry by a row's position, which is the length of the batch minus the row's padding. So a
row of any length can join a batch at any time: it gets the padding (of either sign) that makes its position right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corecontext.cache.full import FullLayer
from corecontext.cache.layer import CompactLayer
from corecontext.config import CCAConfig
from corecontext.visibility import num_complete_groups, window_capacity

IDLE = 2 ** 30  # padding of a row without a request: its position stays negative, so a kernel stores nothing


@dataclass(frozen=True)
class RowShape:
    """What a token of cache takes in a model."""

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, config, dtype: torch.dtype) -> RowShape:
        """Read off a Hugging Face config."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        return cls(text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, heads,
                   getattr(text, "head_dim", None) or text.hidden_size // heads, dtype.itemsize)

    def row_bytes(self, config: CCAConfig | None, max_length: int) -> int:
        """Bytes of a row of `max_length` tokens over all layers; `config` None is full attention."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize * self.entries(config, max_length)

    def entries(self, config: CCAConfig | None, max_length: int) -> int:
        """Entries of a layer's row: the ring, and a core token (r of them per query head) for each group."""
        if config is None:
            return max_length
        width = self.query_heads // self.kv_heads if config.core_heads == "query" else 1
        return (window_capacity(config.group_size, config.window_size)
                + num_complete_groups(max_length, config.group_size) * width)


class RowPool:
    """A fixed number of rows of one g and s; rows 0 .. used - 1 hold requests.

    Args:
        config: CCA's settings; None for full attention.
        rows: Requests that it holds at most.
        max_length: Tokens of the longest, prompt and answer.
        shape: Sizes of the model's cache.
        fixed: Keep lengths in tensors, so that a decoding step can be captured.
    """

    def __init__(self, config: CCAConfig | None, rows: int, max_length: int, shape: RowShape, *,
                 fixed: bool) -> None:
        self.config, self.rows, self.max_length, self.shape, self.fixed = config, rows, max_length, shape, fixed
        self.layers: list[CompactLayer | FullLayer] = []
        self.used = self.seen = 0
        self._pads = [IDLE] * rows
        self._pad: Tensor | None = None  # [rows], shared by all layers
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @property
    def row_bytes(self) -> int:
        """Bytes of a row over all layers."""
        return self.shape.row_bytes(self.config, self.max_length)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, allocated with the first request."""
        return self.rows * self.row_bytes

    def add(self, layers: Sequence[CompactLayer | FullLayer]) -> int:
        """Copy a prompt that has been read, one row with a growing cache; returns the row that it got."""
        assert self.used < self.rows, "a row was added to a full pool"
        if not self.layers:
            self._allocate(layers)
        row, self.used = self.used, self.used + 1
        for one, (keys, values) in zip(layers, self._buffers):
            entries = self.shape.entries(self.config, int(one.seen))
            for buffer, read in ((keys, one.keys), (values, one.values)):
                buffer[row, :, :entries] = read[0, :, :entries]
                buffer[row, :, entries:] = 0  # of a request before; a masked NaN would still be one
        self._set_pad(row, self.seen - int(layers[0].seen))
        return row

    def remove(self, row: int) -> int | None:
        """Free a row. The last one takes its place; returns that one's old number, or None where none moved."""
        self.used -= 1
        last = self.used
        if row != last:
            for keys, values in self._buffers:
                keys[row].copy_(keys[last])
                values[row].copy_(values[last])
            self._set_pad(row, self._pads[last])
        self._set_pad(last, IDLE)
        return last if row != last else None

    def hold(self, count: int) -> None:
        """Let the next step take the first `count` rows."""
        for layer, (keys, values) in zip(self.layers, self._buffers):
            layer.keys, layer.values = keys[:count], values[:count]
            layer.pad, layer.pads = self._pad[:count], self._pads[:count]

    def _set_pad(self, row: int, pad: int) -> None:
        self._pads[row] = pad
        self._pad[row] = pad

    def _allocate(self, layers: Sequence[CompactLayer | FullLayer]) -> None:
        """Buffers like those of a first request."""
        device = layers[0].keys.device
        self._pad = torch.full((self.rows,), IDLE, dtype=torch.long, device=device)
        for one in layers:
            heads, dim, dtype = one.keys.shape[1], one.keys.shape[3], one.keys.dtype
            size = (self.rows, heads, self.shape.entries(self.config, self.max_length), dim)
            # Zeros, not garbage: a masked NaN would still reach the output as 0 x NaN.
            keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
            self._buffers.append((keys, values))
            layer: CompactLayer | FullLayer
            if isinstance(one, FullLayer):
                layer = FullLayer(self.max_length, fixed=self.fixed)
                layer.keys = keys
            else:
                layer = CompactLayer(one.config, one.rotary, max_length=self.max_length if self.fixed else None)
                layer.adopt(keys, values, one)
            layer.seen = torch.zeros((), dtype=torch.long, device=device) if self.fixed else 0
            self.layers.append(layer)


class PooledLayer:
    """One layer's rows of several pools as one batch: the rows of a step in the order of the pools."""

    is_empty, padding_known, config = False, True, None

    def __init__(self, parts: Sequence[tuple[int, CompactLayer | FullLayer]]) -> None:
        self.parts = parts

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """Each pool appends and attends for its rows; [B, H, 1, D]."""
        if len(self.parts) == 1:
            return self.parts[0][1].attend(q, k, v, **options)
        sizes = [count for count, _ in self.parts]
        rows = zip(*(x.split(sizes) for x in (q, k, v)))
        return torch.cat([layer.attend(*some, **options) for some, (_, layer) in zip(rows, self.parts)])
