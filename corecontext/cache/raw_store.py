"""Lay out and keep all raw tokens of one layer beside its compact cache, for fetch, with the index
of their groups.

Over 400 lines, as a store has one layout, which every method here reads or writes. `n` tokens of a
call are new ones; N = rows x Hkv.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from corecontext.cache.eight_bit import decode_all
from corecontext.cache.slots import grown, read, write
from corecontext.cache.unchanged import write_last
from corecontext.ops.api import backend_module
from corecontext.ops.fetch import attend as fetch
from corecontext.ops.fetch.index import Index, index_of
from corecontext.ops.fetch.low_bits import LowBits, columns_of_codes, rotation, rotation_signs
from corecontext.ops.fetch.scoring import Queries, centre_of
from corecontext.ops.spec import RawSlots, Spec
from corecontext.visibility import num_complete_groups


class Format(NamedTuple):
    """Say how a cache stores keys and values."""

    kind: str
    """One of `config.CACHE_DTYPES`: "auto" (not rounded), "int8" or "fp8"."""
    dtype: torch.dtype
    """Of keys and values before they are rounded."""


class Newest(NamedTuple):
    """Hold tokens just stored, on the device: a store in host memory need not read them back."""

    position: int
    """Of the first of them."""
    stored: Sequence[Tensor]
    """Keys and values [rows, Hkv, n, D] as the cache stores them, in 8 bits with their scales."""


@functools.cache
def _forms_of(
    fetch_index: str | Index, group_size: int, head_dim: int, dtype: torch.dtype
) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the shape of a group and the dtype of each tensor that an index stores, by the index
    of a group that takes no memory; all layers share them, since that takes milliseconds."""
    index = index_of(fetch_index)
    if index.reads_raw:
        return []
    keys = torch.empty(1, 1, group_size, head_dim, dtype=dtype, device="meta")
    return [(x.shape[2:], x.dtype) for x in index.encode(keys, centre=None)]


class RawStore:
    """Keys and values by position, and an index by group, on the device.

    Args:
        spec: The layer's settings, its group size fixed.
        like: A key and a value as the cache stores them, [B, Hkv, 1, D]; in 8 bits their scales
            follow.
        format: Of `like`.
        length: Tokens to make room for.
    """

    _BY_ROW: ClassVar[tuple[str, ...]] = ("raw", "index_buffers", "centre")
    """Attributes whose tensors begin with the rows."""
    backend = "auto"
    """`CCAConfig.backend`."""

    def __init__(self, spec: Spec, like: list[Tensor], format: Format, length: int) -> None:
        self.spec = spec
        self.format = format

        key = self._decoded(like)[0]
        forms = _forms_of(spec.fetch_index, spec.group_size, key.shape[3], key.dtype)
        self._shapes = [shape for shape, _ in forms]
        """Shape of a group in each tensor that the index stores; none where it reads raw keys."""

        self.raw = [self._room(x, (*x.shape[:2], length, x.shape[3])) for x in like]
        """Keys and values [B, Hkv, S, D], the token at position p of its row's sequence in slot p.
        In 8 bits scales of keys and of values follow, [B, Hkv, S, 1]: every second tensor is a
        key's."""
        groups = self.num_groups(length)
        self.index_buffers = [
            key.new_zeros(*key.shape[:2], groups, math.prod(shape), dtype=dtype)
            for shape, dtype in forms
        ]
        """[B, Hkv, M, numbers of a group] each: a group's shape is flattened."""
        self.centre: Tensor | None = None
        """[B, Hkv, D], the mean key that centres an index in low bits. It is written with the last
        token that it counts; no group has an index before."""
        if spec.num_centred:
            wide = torch.promote_types(key.dtype, torch.float32)
            self.centre = key.new_zeros(*key.shape[:2], key.shape[3], dtype=wide)
        if isinstance(spec.index, LowBits):
            # `RawSlots.rotations`. Held here: a captured step reads them where they are.
            matrix = rotation(key.shape[3], key.dtype, key.device)
            signs = rotation_signs(key.shape[3], key.device)
            self._rotations = (columns_of_codes(matrix, spec.index.bits), signs)

    def fits(self, like: list[Tensor], group_size: int) -> bool:
        """Whether an empty store for such tokens would have the same buffers, so that this one can
        be cleared and used."""
        mine = [(x[:, :, :1].shape, x.dtype, x.device) for x in self.raw]
        wanted = [(x.shape, x.dtype, x.device) for x in like]
        return self.spec.group_size == group_size and mine == wanted

    @property
    def is_near(self) -> bool:
        """Whether the device reads raw tokens as fast as its other tensors."""
        return True

    def _room(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return zeros of this shape for raw tokens; `like` gives dtype and device."""
        return like.new_zeros(shape)

    # Sizes

    def num_groups(self, length: int) -> int:
        """Complete groups of a row of `length` tokens."""
        return num_complete_groups(length - self.spec.sinks, self.spec.group_size)

    def num_indexed(self, length: int) -> int:
        """Groups of a row of `length` tokens that have an index."""
        spec = self.spec
        sizes = (spec.group_size, spec.window_size)
        return spec.index.num_indexed(length - spec.sinks, *sizes)

    @property
    def length(self) -> int:
        """Tokens that there is room for."""
        return self.raw[0].shape[2]

    @property
    def centred_length(self) -> int:
        """Tokens of a row up to the last that its centre counts, sinks included."""
        return self.spec.sinks + self.spec.num_centred

    def used(self, length: int) -> list[Tensor]:
        """Return raw tokens and index of rows of `length` tokens: the state to save."""
        return self._used_raw(length) + self._used_index(length)

    def _used_raw(self, length: int) -> list[Tensor]:
        return [x[:, :, :length] for x in self.raw]

    def _used_index(self, length: int) -> list[Tensor]:
        return [x[:, :, : self.num_indexed(length)] for x in self.index_buffers]

    def device_bytes(self, length: int) -> int:
        """Bytes in use on the device, by rows of `length` tokens."""
        return num_bytes(self.used(length))

    def host_bytes(self, length: int) -> int:
        """Bytes in use in host memory."""
        return 0

    @property
    def device_tensors(self) -> list[Tensor]:
        """All tensors on the device."""
        return [*self.raw, *self.extras]

    @property
    def host_tensors(self) -> list[Tensor]:
        """All tensors in host memory."""
        return []

    @property
    def extras(self) -> list[Tensor]:
        """The tensors beside the raw tokens, which are always on the device."""
        return self.index_buffers + ([] if self.centre is None else [self.centre])

    # Rows and length

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens; a store that grows, grows by a quarter at least."""
        if length <= self.length:
            return
        length = max(length, self.length + max(64, self.length // 4))
        raw = [grown(x, length) for x in self.raw]
        self._grow_index(length)
        self.raw = raw  # last: `length` is its length, and memory may run out before

    def _grow_index(self, length: int) -> None:
        groups = self.num_groups(length)
        self.index_buffers = [grown(x, groups) for x in self.index_buffers]

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, [new B], in the given order."""
        self.raw = [x.index_select(0, rows) for x in self.raw]
        self._select_extras(rows)

    def _select_extras(self, rows: Tensor) -> None:
        self.index_buffers = [x.index_select(0, rows) for x in self.index_buffers]
        if self.centre is not None:
            self.centre = self.centre.index_select(0, rows)

    def rows(self, rows: slice) -> RawStore:
        """Return a store of some rows, on the same memory."""
        view = copy.copy(self)
        for name in self._BY_ROW:
            value = getattr(self, name)
            if isinstance(value, list):
                setattr(view, name, [x[rows] for x in value])
            elif value is not None:
                setattr(view, name, value[rows])
        return view

    def move_row(self, target: int, source: int, length: int) -> None:
        """Copy a row of `length` tokens to another row."""
        for x in (*self.raw, *self.index_buffers):
            x[target, :, :length] = x[source, :, :length]
        if self.centre is not None:
            self.centre[target] = self.centre[source]

    def since(self, before: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return raw tokens, and index, of `used` that came after the first `before` of `length`
        tokens."""
        indexed = slice(self.num_indexed(before), self.num_indexed(length))
        raw = [x[:, :, before:length] for x in self.raw]
        return raw, [x[:, :, indexed] for x in self.index_buffers]

    def forget(self, lengths: Tensor) -> None:
        """Drop copies of tokens that a crop has taken back; rows keep `lengths` [B] tokens. There
        are none here, and later tokens overwrite those taken back."""

    def clear(self) -> None:
        """Forget all tokens, in place."""
        for tensor in (*self.raw, *self.extras):
            tensor.zero_()

    def load(self, state: Sequence[Tensor]) -> None:
        """Copy a state that `used` returned, also of this very store."""
        self.reserve(state[0].shape[2])
        centre = None
        if self.centre is not None and state[0].shape[2] >= self.centred_length:
            first = [x[:, :, : self.centred_length] for x in state[: len(self.raw) : 2]]
            keys = self._decoded([x.to(self.centre.device) for x in first])[0]
            centre = centre_of(keys.flatten(0, 1), self.spec).view(self.centre.shape)
        write_last(functools.partial(self._write_state, state, centre))

    def take(self, store: RawStore, length: int) -> None:
        """Copy the state of another store for rows of `length` tokens."""
        self._write_state(store.used(length), store.centre)

    def _write_state(self, state: Sequence[Tensor], centre: Tensor | None) -> None:
        """Copy a state that `used` returned, and its centre [B, Hkv, D]."""
        for buffer, x in zip((*self.raw, *self.index_buffers), state):
            size = x.shape[2]
            buffer[:, :, :size] = x
            # A step may read slots behind the length, and mask them; in host memory it reads none.
            if not any(buffer is raw for raw in self.host_tensors):
                buffer[:, :, size:] = 0
        if centre is not None:
            self.centre.copy_(centre)

    # Reading

    def tokens(
        self, rows: slice, length: int, newest: Newest | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, length, D] of the first `length` tokens; `newest` are the
        last of them."""
        stored = self._read(slice(None), rows, slice(0, length), newest)
        keys, values = self._decoded(stored)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def read(self, start: int, stop: int, newest: Newest | None = None) -> list[Tensor]:
        """Return keys and values [B, Hkv, n, D] of the tokens start .. stop - 1 of all rows, as
        stored."""
        return self._read(slice(None), slice(None), slice(start, stop), newest)

    @property
    def has_index(self) -> bool:
        """Whether the index is stored."""
        return bool(self._shapes)

    def _keys(self, rows: slice, start: int, stop: int, newest: Newest | None = None) -> Tensor:
        """Return the keys [N, n, D] of the tokens start .. stop - 1."""
        if newest is not None:
            newest = newest._replace(stored=newest.stored[::2])
        stored = self._read(slice(None, None, 2), rows, slice(start, stop), newest)
        return self._decoded(stored)[0].flatten(0, 1)

    def _read(
        self, which: slice, rows: slice, tokens: slice, newest: Newest | None
    ) -> list[Tensor]:
        """Return tokens of the raw buffers `which` as tensors on the device; `newest` has tensors
        of these buffers only."""
        return [x[rows, :, tokens] for x in self.raw[which]]

    def _decoded(self, stored: list[Tensor]) -> list[Tensor]:
        """Return keys, or keys and values, from their stored form."""
        return decode_all(stored, *self.format)

    def index(self, count: int) -> tuple[Tensor, ...]:
        """Return the index of the first `count` groups of all rows, [N, M, ...] each, as
        `Index.encode` returns it."""
        if self.spec.index.reads_raw:
            first = self.spec.sinks
            size = self.spec.group_size
            keys = self._keys(slice(None), first, first + count * size)
            return self.spec.index.encode(keys.unflatten(1, (count, size)), centre=None)
        return tuple(
            x[:, :, :count].reshape(x.shape[0] * x.shape[1], count, *shape)
            for x, shape in zip(self.index_buffers, self._shapes)
        )

    def queries(self, q: Tensor) -> Queries:
        """Map queries [N, r, T, D] of all rows to those by which the index scores."""
        return Queries.of(q, self.spec.index, self._centre(slice(None)))

    def _centre(self, rows: slice) -> Tensor | None:
        """Return the mean key [N, D] that centres the index of these rows; None without."""
        return None if self.centre is None else self.centre[rows].flatten(0, 1)

    def groups(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, k g, D] of the groups [N, k], any tokens for -1."""
        size = self.spec.group_size
        offset = torch.arange(size, device=numbers.device)
        positions = self.spec.sinks + numbers.long().clamp(min=0)[..., None] * size + offset
        places = positions.flatten(1)[..., None]  # [N, k g, 1]
        flat = [x.flatten(0, 1) for x in self.raw]
        stored = [x.gather(1, places.expand(-1, -1, x.shape[2])) for x in flat]
        keys, values = self._decoded(stored)
        return keys, values

    def as_slots(self) -> RawSlots | None:
        """Return the buffers as a decoding step in Triton takes them; None where raw tokens are in
        8 bits, the index is not in low bits or there is no room for a group."""
        is_low = isinstance(self.spec.index, LowBits) and self.centre is not None
        if not is_low or len(self.raw) > 2 or not self.index_buffers[0].shape[2]:
            return None
        keys, values = self.raw
        codes, scales = self.index_buffers
        return RawSlots(keys, values, codes, scales, self.centre, self._rotations)

    # Writing

    def put(self, rows: slice, position: int, stored: list[Tensor]) -> None:
        """Store encoded tokens [rows, Hkv, n, D] from a position on, and the index due by them."""
        self.put_raw(rows, position, stored)
        end = position + stored[0].shape[2]
        self.index_tokens(rows, position, end, Newest(position, stored))

    def put_raw(self, rows: slice, position: int, stored: list[Tensor]) -> None:
        """Store tokens as `put`, without an index."""
        for buffer, x in zip(self.raw, stored):
            buffer[rows, :, position : position + x.shape[2]] = x

    def end_prompt(self) -> None:
        """Let steps wait for copies to host memory that still run; here there are none."""

    def index_tokens(
        self, rows: slice, position: int, end: int, newest: Newest | None = None
    ) -> None:
        """Write the index that is due with the stored tokens position .. end - 1: of groups that
        they complete, or of earlier ones, which waited for the centre."""
        if self.centre is not None and position < self.centred_length <= end:
            self._set_centre(rows, newest)
        self._build_index(rows, self.num_indexed(position), self.num_indexed(end), newest)

    def _set_centre(self, rows: slice, newest: Newest | None = None) -> None:
        """Compute the centre from the first keys of these rows."""
        centre = centre_of(self._keys(rows, 0, self.centred_length, newest), self.spec)
        # mutant fetch: an index without its centre
        self.centre[rows] = centre.unflatten(0, (-1, self.centre.shape[1]))

    def _build_index(self, rows: slice, first: int, end: int, newest: Newest | None = None) -> None:
        """Write the index of the groups first .. end - 1."""
        if first == end or not self._shapes:
            return
        sinks = self.spec.sinks
        size = self.spec.group_size
        keys = self._keys(rows, sinks + first * size, sinks + end * size, newest)
        keys = keys.unflatten(1, (end - first, size))
        self.write_index(rows, first, self.encode(keys, self._centre(rows)))

    def encode(self, keys: Tensor, centre: Tensor | None) -> tuple[Tensor, ...]:
        """Return the index of groups as `Index.encode`, by the backend."""
        return fetch.encode(backend_module(self.backend, keys), keys, centre, self.spec)

    def write_index(self, rows: slice, first: int, stored: Sequence[Tensor]) -> None:
        """Store the index of groups from `first` on, [N, M, ...] each."""
        for buffer, x in zip(self.index_buffers, stored):
            # mutant fetch: a cache's index of a later group
            view = buffer[rows, :, first : first + x.shape[1]]
            view.copy_(x.reshape(view.shape))

    def shrink_window(self, spec: Spec) -> None:
        """Build the index anew under the settings of a smaller window: the centre counts at most
        as many tokens as the window has."""
        # mutant fetch: an index centred for the window of before
        self.spec = spec
        if not spec.num_centred:  # a window below a group
            self.centre = None
        elif self.centre is not None and self.length >= self.centred_length:
            self.centre = torch.empty_like(self.centre)
            self._set_centre(slice(None))
        # Written beside the old ones, which stay where a failure ends this.
        self.index_buffers = [x.clone() for x in self.index_buffers]
        # Of all groups that there is room for: no query sees those of tokens to come.
        self._build_index(slice(None), 0, self.num_groups(self.length))

    def put_step(self, position: Tensor, stored: list[Tensor], *, closes: bool) -> None:
        """Store an encoded token [B, Hkv, 1, D] of each row at its position [B], and where `closes`
        the index that is due with it, in tensor arithmetic."""
        slot = position.clamp(min=0)[:, None]
        for buffer, x in zip(self.raw, stored):
            write(buffer, slot, x)
        if closes:
            self.index_step(position)

    def index_step(self, position: Tensor) -> None:
        """Write the index that is due with the newest token of each row, stored already at
        `position` [B], in tensor arithmetic. In other rows nothing is due: they keep theirs."""
        if not self._shapes or not self.index_buffers[0].shape[2]:
            return
        if self.centre is not None and self.length >= self.centred_length:
            self._centre_step(position)
        # An index in low bits lags the newest token: the group of an earlier `position` is due.
        size = self.spec.group_size
        position = position - self.spec.index.lag(size, self.spec.window_size)
        start = (position // size * size).clamp(min=0)
        slots = start[:, None] + torch.arange(size, device=position.device)
        slots = slots.clamp(max=self.length - 1)
        keys = self._decoded([read(x, slots) for x in self.raw[::2]])[0]
        stored = self.spec.index.encode(keys.flatten(0, 1)[:, None], self._centre(slice(None)))
        closes = ((position + 1) % size == 0)[:, None, None, None]
        group = (position - self.spec.sinks) // size
        # Groups of sinks write to the first group, which is written again before it is seen.
        target = group.clamp(0, self.index_buffers[0].shape[2] - 1)[:, None]
        for buffer, x in zip(self.index_buffers, stored):
            x = x.reshape(*buffer.shape[:2], 1, buffer.shape[3])
            # mutant fetch: a step leaves the index of a closed group unwritten
            write(buffer, target, torch.where(closes, x, read(buffer, target)))

    def _centre_step(self, position: Tensor) -> None:
        """Write the centre of the rows whose newest token, at `position` [B], is the last that it
        counts."""
        centre = centre_of(self._keys(slice(None), 0, self.centred_length), self.spec)
        is_last = (position + 1 == self.centred_length)[:, None, None]
        self.centre.copy_(torch.where(is_last, centre.view(self.centre.shape), self.centre))


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Count the bytes of tensors' elements."""
    return sum(x.numel() * x.element_size() for x in tensors)
