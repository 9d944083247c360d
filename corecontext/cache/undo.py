"""Restore the tokens that the last append pushed out of the ring."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.cache.entries import Entries
from corecontext.cache.slots import read, write

UNDO_LIMIT = 256
"""Longest append, in tokens, that can be cropped away beyond `rollback`."""


class Undo(NamedTuple):
    """The entries that the last append pushed out of the ring."""

    start: int
    """Slots of the sequence before that append."""
    lost: list[Tensor]
    """[B, Hkv, n, D] for each buffer: the entries whose slots it took, in its tokens' order."""
    intact_from: int
    """Oldest token that was surely in the ring before it."""

    @classmethod
    def of(
        cls, entries: Entries, pad: Tensor, start: int, stored: list[Tensor], intact_from: int
    ) -> Undo | None:
        """Copy what the append of these encoded tokens [B, Hkv, n, D] will push out.

        None where the ring has room for them, or they are more than UNDO_LIMIT.
        """
        ring = entries.ring_size
        new = stored[0].shape[2]
        if start == 0 or start + new <= ring or new > UNDO_LIMIT:
            return None
        slots = _ring_slots(pad, start, min(new, ring), ring)
        # Of more tokens than the ring has slots, the last push out the first.
        lost = [
            torch.cat((read(buffer, slots), x[:, :, : max(0, new - ring)]), 2)
            for buffer, x in zip(entries.buffers, stored)
        ]
        return cls(start, lost, intact_from)

    def restore(self, entries: Entries, pad: Tensor, base: int, end: int) -> Undo | None:
        """Put back the entries lost to the tokens base .. end - 1; return the rest of the undo."""
        kept = base - self.start
        count = min(end - base, entries.ring_size)
        slots = _ring_slots(pad, base, count, entries.ring_size)
        for buffer, lost in zip(entries.buffers, self.lost):
            # planted: 4: a rejected draft stays in the ring
            write(buffer, slots, lost[:, :, kept : kept + count])
        if not kept:
            return None
        return self._replace(lost=[x[:, :, :kept] for x in self.lost])


def _ring_slots(pad: Tensor, start: int, count: int, ring: int) -> Tensor:
    """Return the ring slots [B, count] of `count` tokens from `start` on, padding included."""
    return (start - pad[:, None] + torch.arange(count, device=pad.device)) % ring
