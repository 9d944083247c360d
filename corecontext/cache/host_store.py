"""Keep the raw tokens of one layer, laid out as in raw_store.py, in host memory, where the device
reads and writes them by itself."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corecontext.cache.host_memory import copy_beside, host_zeros
from corecontext.cache.raw_store import Format, Newest, RawStore, num_bytes
from corecontext.cache.unchanged import write_last
from corecontext.ops.spec import Spec

_BESIDE = 1024
"""Least tokens of a `put` that a copy engine takes to host memory while kernels go on."""


@dataclass
class _Writing:
    """Tell which copies to host memory may still run."""

    ended: torch.cuda.Event | None = None
    """The end of the last of them; None where none runs."""

    def wait(self) -> None:
        """Let all that follows on the device come after the copies."""
        if self.ended is not None:
            self.ended.wait()
            self.ended = None


class HostStore(RawStore):
    """Keys and values by position in host memory; the index on the device.

    For a GPU the raw tokens lie in pinned memory, which PyTorch sees as tensors of the device: a
    step stores its token and reads its chosen groups over the bus, also in captured graphs. A
    prompt's tokens are copied there while the next layers run.
    """

    def __init__(self, spec: Spec, like: list[Tensor], format: Format, length: int) -> None:
        self._writing = _Writing()  # one for this store and those that `rows` returns
        super().__init__(spec, like, format, length)

    @property
    def raw(self) -> list[Tensor]:
        """Keys and values [B, Hkv, S, D] as stored, once all copies to them have ended."""
        self._writing.wait()
        return self._raw

    @raw.setter
    def raw(self, raw: list[Tensor]) -> None:
        self._raw = raw

    @property
    def is_near(self) -> bool:
        """Whether device and host have one memory."""
        return self._raw[0].device.type == "cpu"

    def _room(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return host_zeros(shape, like.dtype, like.device)

    # Sizes

    def device_bytes(self, length: int) -> int:
        """Bytes in use on the device: of the index."""
        return num_bytes(self._used_index(length))

    def host_bytes(self, length: int) -> int:
        """Bytes in use in host memory."""
        return num_bytes(self._used_raw(length))

    @property
    def device_tensors(self) -> list[Tensor]:
        """All tensors on the device."""
        return self.extras

    @property
    def host_tensors(self) -> list[Tensor]:
        """All tensors in host memory."""
        return self.raw

    # Rows and length

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens; a store that grows, doubles at least: pinning is slow."""
        if length <= self.length:
            return
        length = max(length, 2 * self.length)
        # All is made before anything changes: where memory runs out, the store stays as it was.
        larger = [self._room(x, (*x.shape[:2], length, x.shape[3])) for x in self.raw]
        self._grow_index(length)
        for buffer, x in zip(larger, self.raw):
            buffer[:, :, : x.shape[2]] = x
        self.raw = larger

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, [new B], in the given order."""
        sources = rows.tolist()
        if len(sources) != self.raw[0].shape[0]:
            chosen = [self._room(x, (len(sources), *x.shape[1:])) for x in self.raw]
            for buffer, x in zip(chosen, self.raw):
                _copy_rows(buffer, x, sources)
            self._select_extras(rows)
            self.raw = chosen
            return
        self._select_extras(rows)
        # mutant fetch: beams keep the host's raw tokens of another
        _move_rows(self.raw, sources)

    def clear(self) -> None:
        """Forget all tokens, in place."""
        for tensor in self.extras:
            tensor.zero_()
        self._clear_first(0)

    def _write_state(self, state: Sequence[Tensor], centre: Tensor | None) -> None:
        super()._write_state(state, centre)
        self._clear_first(state[0].shape[2])

    def _clear_first(self, length: int) -> None:
        """Clear the first group's tokens behind the first `length` ones: a step reads that group in
        place of none. Other tokens are not read before they are written."""
        end = self.spec.sinks + self.spec.group_size
        for x in self.raw:
            # mutant fetch: tokens of a text before stay in the first group
            x[:, :, length:end] = 0

    # Writing

    def put_raw(self, rows: slice, position: int, stored: list[Tensor]) -> None:
        """Store tokens as `put`, without an index."""
        count = stored[0].shape[2]
        if self.is_near or count < _BESIDE:
            super().put_raw(rows, position, stored)
            return
        targets = [x[rows, :, position : position + count] for x in self.raw]
        self._writing.ended = copy_beside(targets, stored)

    def end_prompt(self) -> None:
        """Let later work on the device wait for copies that still run: captured steps read the
        memory without asking `raw`."""
        self._writing.wait()

    # Reading

    def _read(
        self, which: slice, rows: slice, tokens: slice, newest: Newest | None
    ) -> list[Tensor]:
        """Copy tokens to the device, where kernels may read them several times. `newest` are there
        already, so only the tokens before them cross the bus."""
        if newest is None:
            return [x[rows, :, tokens].clone() for x in self.raw[which]]
        if newest.position <= tokens.start:
            new = slice(tokens.start - newest.position, tokens.stop - newest.position)
            return [x[:, :, new] for x in newest.stored]
        start, stop = tokens.start, tokens.stop
        position = max(start, min(newest.position, stop))
        new = slice(position - newest.position, stop - newest.position)
        read = []
        # Tokens before the newest need no waiting: copies run one after the other, and `put_raw`
        # asked `raw`, which waits for the earlier ones.
        for x, own in zip(self._raw[which], newest.stored):
            # mutant fetch: a chunk reads its own tokens in place of those before it
            before = x[rows, :, start:position]
            read.append(torch.cat([before, own[:, :, new].to(x.dtype)], 2))
        return read


def _copy_rows(target: Tensor, source: Tensor, rows: Sequence[int]) -> None:
    """Copy rows one by one: indexing by a tensor would make the whole copy on the device first."""
    for i, row in enumerate(rows):
        target[i].copy_(source[row])


def _move_rows(buffers: Sequence[Tensor], rows: Sequence[int]) -> None:
    """Reorder rows in place, row i from rows[i]."""
    moved = [i for i, row in enumerate(rows) if row != i]
    # Rows that are overwritten before another row has copied them.
    overwritten = {rows[i] for i in moved} & set(moved)
    saved = [{row: x[row].clone() for row in overwritten} for x in buffers]
    for x, before in zip(buffers, saved):
        for i in moved:
            write_last(functools.partial(x[i].copy_, before.get(rows[i], x[rows[i]])))
