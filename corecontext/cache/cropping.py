"""Take tokens back from one layer's compact cache: drafts that were refused, a shorter prompt.

The next query of a shorter sequence may see tokens that have left the ring, so a growing cache
keeps those that the last short append has overwritten there (`Undo`).
"""

import functools

import torch
from torch import Tensor

from corecontext.cache.slots import read, write
from corecontext.cache.state import LayerState, Undo
from corecontext.cache.unchanged import unchanged_by_errors, write_last
from corecontext.visibility import local_start

UNDO_LIMIT = 256
"""Longest append, in tokens, that can be cropped away beyond `rollback`."""


class CroppedState(LayerState):
    """The state of one layer, whose last tokens can be taken back."""

    @unchanged_by_errors
    def crop(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens, exactly.

        Possible while the ring still has, or can get back, all raw tokens that the next query sees:
        always `rollback` tokens, counted from the longest that the sequence ever was; in a growing
        cache also all of the last append, if that had at most UNDO_LIMIT tokens and was no step,
        and `rollback` tokens before it.

        Raises:
            ValueError: fewer tokens are cached, or a token that the next query needs has left the
                ring.
        """
        end = self.seq_len
        undone_to, oldest_in_ring = self.check_crop(num_tokens)
        if num_tokens == 0:
            return
        self._expected = None
        if self.store is not None:
            self.store.forget(end - num_tokens - self.pad)
        self._restore_lost(undone_to, end)
        self._oldest_in_ring = oldest_in_ring
        self.set_length(end - num_tokens)

    def check_crop(self, num_tokens: int) -> tuple[int, int]:
        """Raise where `crop` would raise, changing nothing.

        Returns:
            The length, padding included, down to which `crop` undoes the last append by putting
            back the tokens that it overwrote in the ring; and the oldest token in the ring then.
        """
        self.catch_up()
        end = self.seq_len
        if not 0 <= num_tokens <= end:
            raise ValueError(f"crop must take back 0 to {end} tokens, got {num_tokens}.")
        left = end - num_tokens
        # Only the last append can be undone: down to where it began.
        undone_to = left
        in_ring_until = end
        oldest_in_ring = self._oldest_in_ring
        if self._undo is not None:
            undone_to = in_ring_until = max(left, self._undo.seen_before)
            oldest_in_ring = self._undo.oldest_in_ring
        # Of the tokens before, the ring holds as many as it has slots; steps on a cache of fixed
        # length, which the host does not count, leave `_oldest_in_ring` as it is.
        oldest_in_ring = max(oldest_in_ring, in_ring_until - self.ring_size)

        # The oldest token of the ring that each row's next query sees; a row of sinks sees none.
        n = self.num_sinks
        g = self.group_size
        s = self.spec.window_size
        needed = [
            pad + n + local_start(left - pad - n, g, s) for pad in self.pads if left > pad + n
        ]
        if not needed:
            return undone_to, 0
        # mutant 4: crop accepts a window without its first token
        if num_tokens and min(needed) < oldest_in_ring:
            raise ValueError(
                f"crop must leave the window whole, got {num_tokens} tokens to take back from a "
                f"cache made with rollback={self.rollback}. Give it a larger rollback."
            )
        return undone_to, oldest_in_ring

    def _note_lost(self, start: int, stored: list[Tensor]) -> None:
        """Copy the entries that an append will overwrite in the ring, for `crop`.

        Args:
            start: Tokens a row before the append, padding included.
            stored: Its encoded tokens, [B, Hkv, n, D] each; of more than UNDO_LIMIT nothing is
                copied.
        """
        self._undo = None
        ring = self.ring_size
        new = stored[0].shape[2]
        if self.max_length is not None or not start or start + new <= ring or new > UNDO_LIMIT:
            return
        slots = self._ring_slots(start, min(new, ring))
        # Of more tokens than the ring has slots, the last overwrite the first.
        lost = [
            torch.cat((read(buffer, slots), x[:, :, : max(0, new - ring)]), 2)
            for buffer, x in zip(self.buffers, stored)
        ]
        self._undo = Undo(start, lost, self._oldest_in_ring)

    def _restore_lost(self, undone_to: int, end: int) -> None:
        """Put back the entries that the tokens undone_to .. end - 1 have overwritten."""
        if self._undo is None:
            return
        kept = undone_to - self._undo.seen_before
        count = min(end - undone_to, self.ring_size)
        slots = self._ring_slots(undone_to, count)
        for buffer, lost in zip(self.buffers, self._undo.lost):
            # mutant 4: a rejected draft stays in the ring
            write_last(functools.partial(write, buffer, slots, lost[:, :, kept : kept + count]))
        rest = [x[:, :, :kept] for x in self._undo.lost]
        self._undo = self._undo._replace(lost=rest) if kept else None

    def _ring_slots(self, start: int, count: int) -> Tensor:
        """Return the ring slots [B, count] of `count` tokens from `start` on, padding included."""
        positions = start - self.pad[:, None] + torch.arange(count, device=self.pad.device)
        return positions % self.ring_size
