"""What compact caches need of a sequence on several processes: its core tokens, and its last raw
tokens.

The core tokens travel in the forward anyway. The ring's tokens are the sequence's tail, which one
or a few processes hold; they send it to those that are to decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.distributed.halo import Halo
from corecontext.ops.rotary import Rotary
from corecontext.visibility import window_capacity


class Kept(NamedTuple):
    """One layer's entries as `CompactLayer` holds them: the token at position p in slot p mod C,
    cores behind."""

    keys: Tensor
    """[B, Hkv, C + M w, D]; C the ring's slots, M the core tokens, w their heads for each of k."""
    values: Tensor
    group_size: int
    core_width: int
    rotary: Rotary | None


@dataclass
class Keeper:
    """Collects, call by call, what each layer's compact cache needs. Given to `Shard`, for forwards
    without backward.

    Args:
        rollback: Extra ring tokens, as of `CompactLayer`.
        process: The one process that is to hold the caches; None for all.
    """

    rollback: int = 0
    process: int | None = None
    layers: list[Kept] = field(default_factory=list)
    """One entry for each attention call so far, in order (of a layer with several group sizes one
    for each of them); none on processes that are to hold nothing."""

    def targets(self, size: int) -> list[int]:
        """Who is to hold the caches, of `size` processes."""
        return list(range(size)) if self.process is None else [self.process]

    def keep(self, halo: Halo, rotary: Rotary | None, k: Tensor, v: Tensor, cores: Tensor) -> None:
        """Take over one layer. A collective call.

        k, v: this process's tokens [B, Hkv, T, D]. cores: keys and values of all core tokens [2, B
        Hkv, w, M, D].
        """
        ring = window_capacity(halo.group_size, halo.window_size) + self.rollback
        tail = self._tail(halo, k, v, ring)
        if tail is None:
            return
        length, width, buffers = halo.layout.seq_len, cores.shape[2], []
        slots = torch.arange(length - tail.shape[3], length, device=k.device) % ring
        for raw, core in zip(tail, cores):
            core = core.transpose(1, 2).reshape(*k.shape[:2], -1, k.shape[3])
            buffers.append(
                torch.cat((k.new_zeros(*k.shape[:2], ring, k.shape[3]), core.to(k.dtype)), 2)
            )
            buffers[-1][:, :, slots] = raw
        self.layers.append(Kept(*buffers, halo.group_size, width, rotary))

    def _tail(self, halo: Halo, k: Tensor, v: Tensor, count: int) -> Tensor | None:
        """Keys and values of the sequence's last `count` tokens, or of all, [2, B, Hkv, n, D]; None
        if not for here."""
        wire, layout = halo.wire, halo.layout
        targets, first = self.targets(wire.size), max(0, layout.seq_len - count)
        pieces, sent, received, end = [], [], [], 0
        for chunk, owner in enumerate(layout.owners):
            if owner == wire.rank:
                end += layout.lengths[chunk]  # of this chunk, among the tokens here
            n = layout.starts[chunk + 1] - max(first, layout.starts[chunk])
            if n <= 0:
                continue
            if owner == wire.rank:
                pieces.append(torch.stack([x[:, :, end - n : end] for x in (k, v)]).detach())
                sent += [(target, pieces[-1]) for target in targets if target != owner]
            elif wire.rank in targets:
                pieces.append(k.new_empty(2, *k.shape[:2], n, k.shape[3]))
                received.append((owner, pieces[-1]))
        wire.exchange(sent, received)
        return torch.cat(pieces, 3) if wire.rank in targets else None
