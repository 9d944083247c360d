"""Exchange the halo of each chunk: the raw tokens before it that its queries see.

Earlier chunks hold them: the forward fetches their keys and values, the backward returns gradients.
Of queries only those travel that end a group of g tokens, since pooling needs them.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.distributed.layout import Layout, Message
from corecontext.distributed.wire import Wire
from corecontext.ops.spec import Spec


class Shape(NamedTuple):
    """Hold the sizes of queries [B, H, T, D] and keys [B, Hkv, T, D] that all chunks share."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Halo(NamedTuple):
    """Exchange the halos of one document's chunks; positions count from its first pooled token."""

    wire: Wire
    layout: Layout
    spec: Spec
    shape: Shape

    def group_ends(self, low: int, high: int) -> slice:
        """Return the slice of tokens low .. high-1, counted from low, that end a group."""
        g = self.spec.group_size
        return slice((g - 1 - low) % g, high - low, g)

    def start(self, chunk: int) -> int:
        """Return the position of the first token of a chunk's halo."""
        return self.layout.halo_start(chunk, self.spec.group_size, self.spec.window_size)

    def size(self, chunk: int) -> int:
        """Count the tokens of a chunk's halo."""
        return self.layout.starts[chunk] - self.start(chunk)

    def fetch(
        self, tokens: Mapping[int, tuple[Tensor, ...]]
    ) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Return by chunk the keys and the values [B, Hkv, halo, D] of its halo, and the queries
        [B, H, M, D] that end a group there. A collective call.

        Args:
            tokens: By chunk of this process, its queries [B, H, T, D], keys and values [B, Hkv, T,
                D].
        """
        starts = self.layout.starts
        pieces = {i: [(k[:, :, :0], v[:, :, :0], q[:, :, :0])] for i, (q, k, v) in tokens.items()}
        for message, piece in self._deliver(tokens, starts.__getitem__):
            pieces[message.target].append(piece)
        return {i: tuple(torch.cat(x, 2) for x in zip(*pieces[i])) for i in tokens}

    def give_back(
        self, grads: Mapping[int, tuple[Tensor, Tensor, Tensor]]
    ) -> dict[int, tuple[Tensor, ...]]:
        """Return by chunk the gradients of its queries [B, H, T, D], keys and values [B, Hkv, T,
        D], with those added that it has as the halo of later chunks. A collective call.

        Args:
            grads: By chunk of this process, gradients of the queries [B, H, halo + T, D], keys and
                values [B, Hkv, halo + T, D] of its halo and itself.
        """
        totals = {i: tuple(x[:, :, self.size(i) :] for x in near) for i, near in grads.items()}
        for message, (grad_k, grad_v, grad_q) in self._deliver(grads, self.start, back=True):
            start = self.layout.starts[message.target]
            span = slice(message.low - start, message.high - start)
            total_q, total_k, total_v = (x[:, :, span] for x in totals[message.target])
            total_q[:, :, self.group_ends(message.low, message.high)] += grad_q
            total_k += grad_k
            total_v += grad_v
        return totals

    def _deliver(
        self,
        tensors: Mapping[int, tuple[Tensor, ...]],
        start: Callable[[int], int],
        back: bool = False,
    ) -> list[tuple[Message, list[Tensor]]]:
        """Exchange messages; return those to this process, each with its keys, values [B, Hkv,
        tokens, D] and group-end queries [B, H, M, D]. Messages to itself do not travel.

        Args:
            tensors: By chunk, queries, keys and values.
            start: Gives the position of a chunk's first token in these tensors.
            back: Whether to send from the chunk that sees the tokens to the one that holds them.
        """
        messages = self.layout.messages(self.spec.group_size, self.spec.window_size)
        if back:
            messages = [m._replace(source=m.target, target=m.source) for m in messages]
        owners = self.layout.owners
        rank = self.layout.rank
        arrived = {}
        sent = []
        received = []
        for message in messages:
            source = owners[message.source]
            target = owners[message.target]
            if source == rank:
                packed = self._pack(message, tensors[message.source], start(message.source))
            if target == rank and source == rank:
                arrived[message] = packed
            elif target == rank:
                sizes = map(math.prod, self._shapes(message))
                arrived[message] = tensors[message.target][0].new_empty(sum(sizes))
                received.append((source, arrived[message]))
            elif source == rank:
                sent.append((target, packed))
        self.wire.exchange(sent, received)
        return [(message, self._unpack(message, x)) for message, x in arrived.items()]

    def _shapes(self, message: Message) -> list[tuple[int, ...]]:
        """Return the shapes of a message's keys, values and group-end queries."""
        batch, heads, kv_heads, dim = self.shape
        count = message.high - message.low
        num_ends = len(range(count)[self.group_ends(message.low, message.high)])
        kv_shape = (batch, kv_heads, count, dim)
        return [kv_shape, kv_shape, (batch, heads, num_ends, dim)]

    def _pack(self, message: Message, tensors: tuple[Tensor, ...], start: int) -> Tensor:
        """Copy a message's keys, values and group-end queries into one flat buffer, from queries,
        keys and values whose first token is at position `start`."""
        q, k, v = (x[:, :, message.low - start : message.high - start] for x in tensors)
        q_ends = q[:, :, self.group_ends(message.low, message.high)]
        return torch.cat([x.flatten() for x in (k, v, q_ends)])

    def _unpack(self, message: Message, buffer: Tensor) -> list[Tensor]:
        """Return the keys, values and group-end queries of a message as views of its buffer."""
        shapes = self._shapes(message)
        pieces = buffer.split([math.prod(shape) for shape in shapes])
        return [x.view(shape) for x, shape in zip(pieces, shapes)]
