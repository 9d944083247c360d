"""Keep all raw tokens of one layer beside its compact cache, for fetch, with the index of their
groups."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from corecontext.cache.slots import grown, read, write
from corecontext.ops.fetch.index import Index, build, centre_of, num_centred
from corecontext.ops.spec import Spec
from corecontext.visibility import num_complete_groups


class RawStore:
    """Keys and values by position, and an index by group.

    Args:
        spec: The layer's settings, its group size fixed.
        like: A key, [B, Hkv, 1, D].
        length: Tokens to make room for.
    """

    def __init__(self, spec: Spec, like: Tensor, length: int) -> None:
        self.spec = spec
        one_group = like[:1, 0, :1].expand(1, spec.group_size, -1)[None]
        index = build(one_group, spec.fetch_index)
        self._shapes: list[torch.Size] = []
        """Of a group in each tensor of the index; the raw keys of "oracle" are stored already."""
        if not any(x is one_group for x in index.tensors):
            self._shapes = [x.shape[2:] for x in index.tensors]
        kinds = [x.dtype for x in index.tensors[: len(self._shapes)]]
        self.buffers = [like.new_zeros(*like.shape[:2], length, like.shape[3]) for _ in range(2)]
        """Keys and values [B, Hkv, S, D], the token at position p of its row's sequence in slot p;
        then the index, [B, Hkv, M, numbers of a group] each."""
        groups = self._num_groups(length)
        self.buffers += [
            like.new_zeros(*like.shape[:2], groups, math.prod(shape), dtype=dtype)
            for shape, dtype in zip(self._shapes, kinds)
        ]

    def _num_groups(self, length: int) -> int:
        return num_complete_groups(length - self.spec.sinks, self.spec.group_size)

    def _num_indexed(self, length: int) -> int:
        """Groups that have an index: those in low bits wait for the tokens that centre them, as no
        query sees a group that is younger."""
        return self._num_groups(length - num_centred(self.spec))

    def used(self, length: int) -> list[Tensor]:
        """Return the buffers' entries of rows of `length` tokens."""
        sizes = [length] * 2 + [self._num_indexed(length)] * len(self._shapes)
        return [x[:, :, :size] for x, size in zip(self.buffers, sizes)]

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens, and a quarter more than now at least."""
        room = self.buffers[0].shape[2]
        if length <= room:
            return
        length = max(length, room + max(64, room // 4))
        sizes = [length] * 2 + [self._num_groups(length)] * len(self._shapes)
        self.buffers = [grown(x, size) for x, size in zip(self.buffers, sizes)]

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the rows."""
        self.buffers = [function(x) for x in self.buffers]

    # Reading
    # -------

    def tokens(self, rows: slice, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, length, D] of the first tokens, N = rows x KV heads."""
        keys, values = (x[rows, :, :length].flatten(0, 1) for x in self.buffers[:2])
        return keys, values

    def index(self, count: int) -> Index:
        """Return the index of the first `count` groups of all rows."""
        first = self.spec.sinks
        size = self.spec.group_size
        tensors = [
            x[:, :, :count].reshape(x.shape[0] * x.shape[1], count, *shape)
            for x, shape in zip(self.buffers[2:], self._shapes)
        ]
        if not self._shapes:
            keys = self.tokens(slice(None), first + count * size)[0][:, first:]
            tensors = [keys.unflatten(1, (count, size))]
        return Index(self.spec.fetch_index, size, tuple(tensors), self._centre(slice(None)))

    def _centre(self, rows: slice) -> Tensor | None:
        """The mean key [N, D] that centres the index of these rows."""
        end = self.spec.sinks + num_centred(self.spec)
        return centre_of(self.tokens(rows, end)[0], self.spec)

    def groups(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, k g, D] of groups [N, k], the first group for -1."""
        size = self.spec.group_size
        offset = torch.arange(size, device=numbers.device)
        slots = self.spec.sinks + numbers.long().clamp(min=0)[..., None] * size + offset
        place = slots.flatten(1)[..., None]
        keys, values = (
            x.flatten(0, 1).gather(1, place.expand(-1, -1, x.shape[3])) for x in self.buffers[:2]
        )
        return keys, values

    # Writing
    # -------

    def put(self, rows: slice, position: int, k: Tensor, v: Tensor) -> None:
        """Store tokens [rows, Hkv, n, D] from a position on, and the index of groups they close."""
        end = position + k.shape[2]
        for buffer, x in zip(self.buffers, (k, v)):
            buffer[rows, :, position:end] = x
        old, total = self._num_indexed(position), self._num_indexed(end)
        if total == old or not self._shapes:
            return
        first = self.spec.sinks
        size = self.spec.group_size
        keys = self.tokens(rows, first + total * size)[0][:, first + old * size :]
        keys = keys.unflatten(1, (total - old, size))
        index = build(keys, self.spec.fetch_index, self._centre(rows))
        for buffer, x in zip(self.buffers[2:], index.tensors):
            # planted: fetch: a cache's index of a later group
            view = buffer[rows, :, old:total]
            view.copy_(x.reshape(view.shape))

    def shrink_window(self, spec: Spec) -> None:
        """Build the index anew under the settings of a smaller window, which may centre keys by
        fewer tokens."""
        # planted: fetch: an index centred for the window of before
        self.spec = spec
        groups = self._num_groups(self.buffers[0].shape[2])
        if not self._shapes or not groups:
            return
        first = spec.sinks
        size = spec.group_size
        keys = self.tokens(slice(None), first + groups * size)[0][:, first:]
        keys = keys.unflatten(1, (groups, size))
        index = build(keys, spec.fetch_index, self._centre(slice(None)))
        for buffer, x in zip(self.buffers[2:], index.tensors):
            buffer.copy_(x.reshape(buffer.shape))

    def put_step(self, position: Tensor, k: Tensor, v: Tensor) -> None:
        """Store a token [B, Hkv, 1, D] of each row at its position [B], in tensor arithmetic, and
        the index of the groups that it closes."""
        slot = position.clamp(min=0)[:, None]
        for buffer, x in zip(self.buffers, (k, v)):
            write(buffer, slot, x)
        if not self._shapes or not self.buffers[2].shape[2]:
            return
        # The index of the newest group that may have one; rows that close no group keep theirs.
        size = self.spec.group_size
        position = position - num_centred(self.spec)
        start = (position // size * size).clamp(min=0)
        slots = start[:, None] + torch.arange(size, device=position.device)
        last_slot = self.buffers[0].shape[2] - 1
        keys = read(self.buffers[0], slots.clamp(max=last_slot)).flatten(0, 1)[:, None]
        index = build(keys, self.spec.fetch_index, self._centre(slice(None)))
        is_last = ((position + 1) % size == 0)[:, None, None, None]
        group = (position - self.spec.sinks) // size
        # Groups of first tokens write to the first group, which is written again before it is seen.
        target = group.clamp(0, self.buffers[2].shape[2] - 1)[:, None]
        for buffer, x in zip(self.buffers[2:], index.tensors):
            x = x.reshape(*buffer.shape[:2], 1, buffer.shape[3])
            # planted: fetch: a step leaves the index of a closed group unwritten
            write(buffer, target, torch.where(is_last, x, read(buffer, target)))
