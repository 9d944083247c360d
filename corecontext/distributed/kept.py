"""Collect the entries of compact caches while several processes read a sequence: its core tokens,
and its last raw tokens.

The core tokens travel in the forward anyway. The ring's tokens are the sequence's tail, which one
or a few processes hold; they send it to those that decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.distributed.halo import Halo
from corecontext.distributed.wire import Wire
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Spec
from corecontext.visibility import window_capacity


class Kept(NamedTuple):
    """Hold one layer's entries as `CompactLayer` does: the token at position p in slot p mod C,
    first tokens kept raw and core tokens behind."""

    keys: Tensor
    """[B, Hkv, C + n + M, D]; C the ring's slots, n the first tokens' slots, M the core tokens."""
    values: Tensor
    """As keys."""
    masses: Tensor | None
    """Of the core tokens, [B, Hkv, C + n + M, 1], in float32 or wider, or None."""
    group_size: int
    rotary: Rotary | None
    raw: tuple[Tensor, ...] = ()
    """Keys and values of all tokens, [B, Hkv, L, D] each, where the layer fetches."""


@dataclass
class Keeper:
    """Collect, call by call, the entries of each layer's compact cache. Given to `Shard`, for
    forwards without backward.

    Args:
        rollback: Extra ring tokens, as of `CompactLayer`.
        process: The process that will hold the caches; None for all.
        store: That of `CCAConfig`: raw tokens for "host" wait in host memory.
    """

    rollback: int = 0
    process: int | None = None
    store: str = "device"
    layers: list[Kept] = field(default_factory=list)
    """One entry for each attention call so far, in order (of a layer with several group sizes one
    for each size); empty on processes that hold no cache."""

    def targets(self, size: int) -> list[int]:
        """Return the processes that will hold the caches, of `size` processes."""
        return list(range(size)) if self.process is None else [self.process]

    def keep(
        self,
        halo: Halo,
        k: Tensor,
        v: Tensor,
        first: Tensor | None,
        sinks: int,
        cores: Tensor,
        masses: Tensor | None,
    ) -> None:
        """Append one layer. A collective call.

        Args:
            halo: Of the tokens after the first ones.
            k, v: This process's tokens among them, [B, Hkv, T, D].
            first: Keys and values of the first tokens kept raw, [2, B, Hkv, at most n, D].
            sinks: Slots for these, n.
            cores: Keys and values of all core tokens, [2, B Hkv, 1, M, D].
            masses: Of these, [1, B Hkv, 1, M, 1], or None.
        """
        # The last tokens, wherever they are, reach the processes that will hold the caches.
        spec = halo.spec
        ring = window_capacity(spec.group_size, spec.window_size) + self.rollback
        tail = self._tail(halo, k, v, ring)
        if tail is None:
            return
        if first is None:
            first = tail[:, :, :, :0]
        length = sinks + halo.layout.seq_len
        self.layers.append(_laid_out(tail, first, cores, masses, spec, sinks, length, ring))

    def keep_document(
        self, wire: Wire, spec: Spec, raw: Tensor, cores: Tensor, masses: Tensor | None
    ) -> None:
        """Append one layer that fetches, of which every process has all tokens.

        Args:
            raw: Keys and values of the whole sequence, [2, B, Hkv, L, D].
            cores, masses: As of `keep`.
        """
        if wire.rank not in self.targets(wire.size):
            return
        ring = window_capacity(spec.group_size, spec.window_size) + self.rollback
        length = raw.shape[3]
        sinks = spec.sinks
        first, later = raw[:, :, :, :sinks], raw[:, :, :, sinks:]
        tail = later[:, :, :, max(0, length - sinks - ring) :]
        kept = _laid_out(tail, first, cores, masses, spec, sinks, length, ring)
        # All layers wait until the whole model has run.
        place = torch.device("cpu") if self.store == "host" else raw.device
        self.layers.append(kept._replace(raw=tuple(x.to(place) for x in raw)))

    def _tail(self, halo: Halo, k: Tensor, v: Tensor, count: int) -> Tensor | None:
        """Keys and values of the sequence's last `count` tokens, or of all, [2, B, Hkv, n, D]; None
        on processes that hold no cache."""
        rank = halo.wire.rank
        layout = halo.layout
        targets = self.targets(halo.wire.size)
        first = max(0, layout.seq_len - count)
        pieces = [k.new_empty(2, *k.shape[:2], 0, k.shape[3])]
        sent = []
        received = []
        end = 0  # of a chunk, among this process's tokens
        for chunk, owner in enumerate(layout.owners):
            if owner == rank:
                end += layout.lengths[chunk]
            n = layout.starts[chunk + 1] - max(first, layout.starts[chunk])
            if n <= 0:
                continue
            if owner == rank:
                piece = torch.stack([x[:, :, end - n : end] for x in (k, v)]).detach()
                sent += [(target, piece) for target in targets if target != owner]
            elif rank in targets:
                piece = k.new_empty(2, *k.shape[:2], n, k.shape[3])
                received.append((owner, piece))
            else:
                continue
            pieces.append(piece)
        halo.wire.exchange(sent, received)
        return torch.cat(pieces, 3) if rank in targets else None


def _laid_out(
    tail: Tensor,
    first: Tensor,
    cores: Tensor,
    masses: Tensor | None,
    spec: Spec,
    sinks: int,
    length: int,
    ring: int,
) -> Kept:
    """Lay out the buffers of a cache of `length` tokens: the ring, the first tokens, and the core
    tokens, in this order.

    Args:
        tail: Keys and values of the last tokens, at most as many as the ring has slots,
            [2, B, Hkv, n, D].
        first, cores, masses: As of `Keeper.keep`.
        sinks: Slots for first tokens.
    """
    shape = tail.shape[1:3]
    dim = tail.shape[4]
    slots = torch.arange(length - tail.shape[3], length, device=tail.device) % ring
    first = F.pad(first, (0, 0, 0, sinks - first.shape[3]))
    buffers = []
    for raw, first_raw, core in zip(tail, first, cores):
        core = core.reshape(*shape, -1, dim)
        empty_ring = raw.new_zeros(*shape, ring, dim)
        buffer = torch.cat((empty_ring, first_raw, core.to(raw.dtype)), 2)
        buffer[:, :, slots] = raw
        buffers.append(buffer)
    if masses is not None:
        behind = masses[0].reshape(*shape, -1, 1)
        masses = F.pad(behind, (0, 0, ring + sinks, 0))
    return Kept(*buffers, masses, spec.group_size, spec.rotary)
