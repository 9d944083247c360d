"""Exchange the halo of each chunk: raw tokens that earlier chunks hold are fetched forward, their
gradients returned backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.distributed.layout import Layout, Message
from corecontext.distributed.wire import Wire
from corecontext.ops.spec import Spec


class Shape(NamedTuple):
    """Hold the sizes of a process's queries [B, H, T, D] and keys [B, Hkv, T, D] without T."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Halo(NamedTuple):
    """Send keys, values and the queries that end a group, of all tokens that a chunk sees raw."""

    wire: Wire
    layout: Layout
    spec: Spec
    shape: Shape

    def ends(self, low: int, high: int) -> slice:
        """Return which of the tokens low .. high-1 end a group, counted from low."""
        g = self.spec.group_size
        return slice((g - 1 - low) % g, high - low, g)

    def start(self, chunk: int) -> int:
        """Return the first token of a chunk's halo."""
        return self.layout.halo_start(chunk, self.spec.group_size, self.spec.window_size)

    def size(self, chunk: int) -> int:
        """Return how many tokens a chunk's halo has."""
        return self.layout.starts[chunk] - self.start(chunk)

    def fetch(
        self, tokens: Mapping[int, tuple[Tensor, ...]]
    ) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Return keys and values [B, Hkv, halo, D] before each chunk, and the queries that end a
        group there [B, H, m, D].

        tokens: queries [B, H, T, D], keys and values [B, Hkv, T, D] of each of this process's
        chunks.
        """
        starts = self.layout.starts

        def pack(message: Message) -> Tensor:
            start = starts[message.source]
            span = slice(message.low - start, message.high - start)
            return self._pack(message, *(x[:, :, span] for x in tokens[message.source]))

        pieces = {i: [(k[:, :, :0], v[:, :, :0], q[:, :, :0])] for i, (q, k, v) in tokens.items()}
        for message, buffer in self._deliver(self._messages(), pack, tokens):
            pieces[message.target].append(self._unpack(message, buffer))
        return {i: tuple(torch.cat(x, 2) for x in zip(*pieces[i])) for i in tokens}

    def give_back(
        self, grads: Mapping[int, tuple[Tensor, Tensor, Tensor]]
    ) -> dict[int, tuple[Tensor, ...]]:
        """Return the gradients of each chunk's queries, keys and values, with those added that the
        halos of later chunks send.

        grads: gradients of queries [B, H, halo + T, D], keys and values [B, Hkv, halo + T, D] of
        near parts.
        """
        starts = self.layout.starts
        totals = {i: tuple(x[:, :, self.size(i) :] for x in near) for i, near in grads.items()}

        # From the chunk whose halo it is to the chunk that holds the tokens.
        def pack(message: Message) -> Tensor:
            start = self.start(message.source)
            span = slice(message.low - start, message.high - start)
            return self._pack(message, *(x[:, :, span] for x in grads[message.source]))

        back = [Message(m.target, m.source, m.low, m.high) for m in self._messages()]
        for message, buffer in self._deliver(back, pack, grads):
            start = starts[message.target]
            span = slice(message.low - start, message.high - start)
            total_q, total_k, total_v = (x[:, :, span] for x in totals[message.target])
            grad_k, grad_v, grad_q = self._unpack(message, buffer)
            total_q[:, :, self.ends(message.low, message.high)] += grad_q
            total_k += grad_k
            total_v += grad_v
        return totals

    def _messages(self) -> list[Message]:
        return self.layout.messages(self.spec.group_size, self.spec.window_size)

    def _deliver(
        self,
        messages: list[Message],
        pack: Callable[[Message], Tensor],
        like: Mapping[int, tuple[Tensor, ...]],
    ) -> list[tuple[Message, Tensor]]:
        """Exchange messages; returns those to this process. Messages to itself do not travel."""
        owners = self.layout.owners
        rank = self.layout.rank
        arrived = {}
        sent = []
        received = []
        for message in messages:
            source = owners[message.source]
            target = owners[message.target]
            if target == rank and source == rank:
                arrived[message] = pack(message)
            elif target == rank:
                buffer = like[message.target][0].new_empty(self._elements(message))
                arrived[message] = buffer
                received.append((source, buffer))
            elif source == rank:
                sent.append((target, pack(message)))
        self.wire.exchange(sent, received)
        return list(arrived.items())

    def _elements(self, message: Message) -> int:
        """Elements of a message."""
        raw = 2 * self.shape.num_kv_heads * (message.high - message.low)
        ends = self.shape.num_heads * self._num_ends(message)
        return self.shape.batch_size * self.shape.head_dim * (raw + ends)

    def _num_ends(self, message: Message) -> int:
        ends = self.ends(message.low, message.high)
        return len(range(*ends.indices(message.high - message.low)))

    def _pack(self, message: Message, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_ends = q[:, :, self.ends(message.low, message.high)]
        return torch.cat([x.flatten() for x in (k, v, q_ends)])

    def _unpack(self, message: Message, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A message as keys, values [B, Hkv, tokens, D] and group-end queries [B, H, m, D]."""
        batch, heads, kv_heads, dim = self.shape
        kv_shape = (batch, kv_heads, message.high - message.low, dim)
        size = batch * kv_heads * (message.high - message.low) * dim
        k, v, q_ends = buffer.split([size, size, buffer.numel() - 2 * size])
        q_shape = (batch, heads, self._num_ends(message), dim)
        return k.view(kv_shape), v.view(kv_shape), q_ends.view(q_shape)
