"""The halo of a chunk: raw tokens that earlier chunks hold, fetched forward, their gradients
returned backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.distributed.layout import Layout, Message
from corecontext.distributed.wire import Wire


class Halo(NamedTuple):
    """Who exchanges which tokens: keys, values and the queries that end a group, of everything a
    chunk sees raw."""

    wire: Wire
    layout: Layout
    group_size: int
    window_size: int
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def ends(self, low: int, high: int) -> slice:
        """Of tokens low .. high-1 those that end a group, counted from low."""
        return slice((self.group_size - 1 - low) % self.group_size, high - low, self.group_size)

    def size(self, chunk: int) -> int:
        """Tokens of a chunk's halo."""
        return self.layout.starts[chunk] - self.layout.halo_start(
            chunk, self.group_size, self.window_size
        )

    def fetch(
        self, tokens: Mapping[int, tuple[Tensor, Tensor, Tensor]]
    ) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Keys and values [B, Hkv, halo, D] before each chunk, and the queries that end a group
        there [B, H, m, D].

        tokens: queries [B, H, T, D], keys and values [B, Hkv, T, D] of each of this process's
        chunks.
        """
        starts = self.layout.starts

        def pack(message: Message) -> Tensor:
            source, _, low, high = message
            return self._pack(
                low,
                high,
                *(x[:, :, low - starts[source] : high - starts[source]] for x in tokens[source]),
            )

        parts: dict[int, list[tuple[Tensor, ...]]] = {i: [] for i in tokens}
        for message, buffer in self._deliver(self._messages(), pack, tokens):
            parts[message.target].append(self._unpack(buffer, message.low, message.high))
        return {
            i: tuple(torch.cat(one, 2) for one in zip(*found))
            if (found := parts[i])
            # type: ignore[misc]
            else (k[:, :, :0], v[:, :, :0], q[:, :, :0])
            for i, (q, k, v) in tokens.items()
        }

    def give_back(
        self, grads: Mapping[int, tuple[Tensor, Tensor, Tensor]]
    ) -> dict[int, tuple[Tensor, ...]]:
        """Gradients of each chunk's queries, keys and values, with those that later chunks' halos
        send added.

        grads: gradients of queries [B, H, halo + T, D], keys and values [B, Hkv, halo + T, D] of
        near parts.
        """
        starts = self.layout.starts
        own = {i: tuple(x[:, :, self.size(i) :] for x in one) for i, one in grads.items()}

        def pack(
            message: Message,
        ) -> Tensor:  # from the chunk whose halo it is to the one that holds the tokens
            source, _, low, high = message
            first = starts[source] - self.size(source)
            return self._pack(
                low, high, *(x[:, :, low - first : high - first] for x in grads[source])
            )

        back = [Message(m.target, m.source, m.low, m.high) for m in self._messages()]
        for (_, target, low, high), buffer in self._deliver(back, pack, grads):
            span = slice(low - starts[target], high - starts[target])
            part_k, part_v, part_q = self._unpack(buffer, low, high)
            dq, dk, dv = (x[:, :, span] for x in own[target])
            dq[:, :, self.ends(low, high)] += part_q
            dk += part_k
            dv += part_v
        return own

    def _messages(self) -> list[Message]:
        return self.layout.messages(self.group_size, self.window_size)

    def _deliver(
        self,
        messages: list[Message],
        pack: Callable[[Message], Tensor],
        like: Mapping[int, tuple[Tensor, ...]],
    ) -> list[tuple[Message, Tensor]]:
        """Exchange messages; returns those to this process. Those from itself go without the
        wire."""
        owners, rank = self.layout.owners, self.layout.rank
        here = [m for m in messages if owners[m.target] == rank]
        arrived = {
            m: pack(m)
            if owners[m.source] == rank
            else like[m.target][0].new_empty(self.elements(m.low, m.high))
            for m in here
        }
        self.wire.exchange(
            [
                (owners[m.target], pack(m))
                for m in messages
                if owners[m.source] == rank != owners[m.target]
            ],
            [(owners[m.source], arrived[m]) for m in here if owners[m.source] != rank],
        )
        return list(arrived.items())

    def elements(self, low: int, high: int) -> int:
        """Elements of the message about tokens low .. high-1."""
        return (
            self.batch_size
            * self.head_dim
            * (2 * self.num_kv_heads * (high - low) + self.num_heads * self._num_ends(low, high))
        )

    def _num_ends(self, low: int, high: int) -> int:
        return len(range(*self.ends(low, high).indices(high - low)))

    def _pack(self, low: int, high: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([x.flatten() for x in (k, v, q[:, :, self.ends(low, high)])])

    def _unpack(self, buffer: Tensor, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
        """A message as keys, values [B, Hkv, tokens, D] and group-end queries [B, H, m, D]."""
        size = self.batch_size * self.num_kv_heads * (high - low) * self.head_dim
        shape = (self.batch_size, self.num_kv_heads, high - low, self.head_dim)
        return (
            buffer[:size].view(shape),
            buffer[size : 2 * size].view(shape),
            buffer[2 * size :].view(
                self.batch_size, self.num_heads, self._num_ends(low, high), self.head_dim
            ),
        )
