"""Rows of cache for requests that come and go: each row has its own length, and all are decoded
together.

A compact layer finds every entry by a row's position, which is the length of the batch minus the
row's padding. So a row of any length can join a batch at any time: it gets the padding (of either
sign) that makes its position right.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corecontext.cache.full import FullLayer
from corecontext.cache.heads import HeadsLayer, parts_of
from corecontext.cache.layer import CompactLayer
from corecontext.config import CCAConfig
from corecontext.model_sizes import ModelSizes
from corecontext.ops.head_split import heads_of_each
from corecontext.visibility import num_complete_groups, num_sinks, window_capacity

IDLE = (
    2**30
)  # padding of a row without a request: its position stays negative, so a kernel stores nothing


@dataclass(frozen=True)
class RowShape:
    """What a token of cache takes in a model."""

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    itemsize: int
    processes: int = 1
    """That share the heads; the numbers of heads are those of one of them."""

    @classmethod
    def of(cls, config, dtype: torch.dtype, processes: int = 1) -> RowShape:
        """Read off a Hugging Face config; of a model split over processes, what one of them has.

        Raises:
            ValueError: its KV heads cannot be split so.
        """
        sizes = ModelSizes.of(config)
        if sizes.kv_heads % processes:
            raise ValueError(
                f"a model must be split over a number of processes that divides its {sizes.kv_heads} KV heads, "
                f"got {processes}."
            )
        return cls(
            sizes.layers,
            sizes.kv_heads // processes,
            sizes.query_heads // processes,
            sizes.head_dim,
            dtype.itemsize,
            processes,
        )

    def row_bytes(self, config: CCAConfig | None, max_length: int, before: int = 0) -> int:
        """Bytes of a row of `max_length` tokens over all layers; `config` None is full attention.
        Of several processes those of the one that has most, so that all find room for as many rows.

        Args:
            before: Tokens whose core tokens are held elsewhere.
        """

        def entries(rank: int) -> int:
            elsewhere = (
                self._row_entries(config, before, rank) - self._row_entries(config, 0, rank)
                if before
                else 0
            )
            return self._row_entries(config, max_length, rank) - elsewhere

        return max(map(entries, range(self.processes))) * self.entry_bytes(config)

    def _row_entries(self, config: CCAConfig | None, max_length: int, rank: int) -> int:
        """Keys of a row over all layers and the heads of a process."""
        total = 0
        for layer in range(self.layers):
            own = config and config.of_layer(layer).of_process(rank, self.processes)
            if own is None or own.head_group_sizes is None:
                total += self.kv_heads * self.entries(own, max_length)
                continue
            for g, heads in zip(*heads_of_each(own.head_group_sizes)):
                total += len(heads) * self.entries(
                    own.replace(head_group_sizes=None, group_size=g), max_length
                )
        return total

    def entry_bytes(self, config: CCAConfig | None) -> int:
        """Bytes of a key and a value of one head; in 8 bits of their scales in float32, too."""
        if config is None or config.cache_dtype == "auto":
            return 2 * self.head_dim * self.itemsize
        return 2 * (self.head_dim + torch.float32.itemsize)

    def entries(self, config: CCAConfig | None, max_length: int) -> int:
        """Entries of one layer's row, with this layer's settings: the ring, the first tokens kept
        raw, and a core token (r of them per query head) for each group behind them."""
        if config is None:
            return max_length
        width = self.query_heads // self.kv_heads if config.core_heads == "query" else 1
        g, n = config.group_size, num_sinks(config.sink_size, config.group_size)
        # planted: sinks: forgotten by a server's rows
        return (
            window_capacity(g, config.window_size)
            + n
            + num_complete_groups(max_length - n, g) * width
        )


class RowPool:
    """A fixed number of rows of one g (or one for each layer or KV head) and s; rows 0 .. used - 1
    hold requests.

    Args:
        config: CCA's settings; None for full attention.
        rows: Requests that it holds at most.
        max_length: Tokens of the longest, prompt and answer.
        shape: Sizes of the model's cache.
        fixed: Keep lengths in tensors, so that a decoding step can be captured.
    """

    def __init__(
        self, config: CCAConfig | None, rows: int, max_length: int, shape: RowShape, *, fixed: bool
    ) -> None:
        self.config, self.rows, self.max_length, self.shape, self.fixed = (
            config,
            rows,
            max_length,
            shape,
            fixed,
        )
        self.layers: list[CompactLayer | HeadsLayer | FullLayer] = []
        self._parts: list[CompactLayer | FullLayer] = []  # of all layers, in order
        self.used = self.seen = 0
        self._pads = [IDLE] * rows
        self._pad: Tensor | None = None  # [rows], shared by all layers
        self._buffers: list[list[Tensor]] = []  # of each of these, all rows
        self.row_bytes = shape.row_bytes(config, max_length)
        """Bytes of a row over all layers."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, allocated with the first request."""
        return self.rows * self.row_bytes

    def add(self, layers: Sequence[CompactLayer | HeadsLayer | FullLayer]) -> int:
        """Copy a prompt that has been read, one row with a growing cache; returns the row that it
        got."""
        assert self.used < self.rows, "a row was added to a full pool"
        if not self.layers:
            self._allocate(layers)
        row, self.used = self.used, self.used + 1
        for one, buffers in zip(itertools.chain(*map(parts_of, layers)), self._buffers):
            entries = self.shape.entries(one.config, int(one.seen))
            for buffer, read in zip(buffers, one.buffers):
                buffer[row, :, :entries] = read[0, :, :entries]
                buffer[row, :, entries:] = 0  # of a request before; a masked NaN would still be one
        self._set_pad(row, self.seen - int(layers[0].seen))
        return row

    def remove(self, row: int) -> int | None:
        """Free a row. The last one takes its place; returns that one's old number, or None where
        none moved."""
        self.used -= 1
        last = self.used
        if row != last:
            for buffer in itertools.chain(*self._buffers):
                buffer[row].copy_(buffer[last])
            self._set_pad(row, self._pads[last])
        self._set_pad(last, IDLE)
        return last if row != last else None

    def hold(self, count: int) -> None:
        """Let the next step take the first `count` rows."""
        for layer, buffers in zip(self._parts, self._buffers):
            layer.hold([buffer[:count] for buffer in buffers])
            layer.pad, layer.pads = self._pad[:count], self._pads[:count]

    def _set_pad(self, row: int, pad: int) -> None:
        self._pads[row] = pad
        self._pad[row] = pad

    def _allocate(self, layers: Sequence[CompactLayer | HeadsLayer | FullLayer]) -> None:
        """Buffers like those of a first request; where memory runs out, none, so that a later one
        can try again."""
        device = parts_of(layers[0])[0].keys.device
        self._pad = torch.full((self.rows,), IDLE, dtype=torch.long, device=device)
        made, held = [], []
        for one in layers:
            parts = [self._like(part) for part in parts_of(one)]
            made.append(one.of(parts) if isinstance(one, HeadsLayer) else parts[0])
            held += parts
        self.layers, self._parts, self._buffers = made, held, [part.buffers for part in held]

    def _like(self, one: CompactLayer | FullLayer) -> CompactLayer | FullLayer:
        """All rows of what holds one."""
        entries = self.shape.entries(one.config, self.max_length)
        # Zeros, not garbage: a masked NaN would still reach the output as 0 x NaN.
        buffers = [x.new_zeros(self.rows, x.shape[1], entries, x.shape[3]) for x in one.buffers]
        layer: CompactLayer | FullLayer
        if isinstance(one, FullLayer):
            layer = FullLayer(self.max_length, fixed=self.fixed)
            layer.hold(buffers)
        else:
            layer = CompactLayer(
                one.config,
                one.rotary,
                max_length=self.max_length if self.fixed else None,
                learned=one.learned,
            )
            layer.adopt(buffers, one)
        layer.seen = (
            torch.zeros((), dtype=torch.long, device=buffers[0].device) if self.fixed else 0
        )
        return layer


class PooledLayer:
    """One layer's rows of several pools as one batch: the rows of a step in the order of the
    pools."""

    is_empty, padding_known, config = False, True, None

    def __init__(self, parts: Sequence[tuple[int, CompactLayer | HeadsLayer | FullLayer]]) -> None:
        self.parts = parts

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """Each pool appends and attends for its rows; [B, H, 1, D]."""
        if len(self.parts) == 1:
            return self.parts[0][1].attend(q, k, v, **options)
        sizes = [count for count, _ in self.parts]
        rows = zip(*(x.split(sizes) for x in (q, k, v)))
        return torch.cat(
            [layer.attend(*some, **options) for some, (_, layer) in zip(rows, self.parts)]
        )
