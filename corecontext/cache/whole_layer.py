"""Cache all keys and values of one layer for a request whose length is known and so short that full
attention is the fastest (ops/fetch/prompt_rule.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corecontext.cache.full import FullLayer, attend_causally
from corecontext.cache.raw_store import num_bytes


class WholeLayer(FullLayer):
    """Every token of a batch, whose prompts are read together, in chunks; rows may be padded on the
    left.

    Args:
        max_length: Slots of a row, tokens.
        pad: Left padding of each row, [B]; layers of one device share it.
        fixed: As for `FullLayer`.
    """

    host_bytes = allocated_host_bytes = 0
    raw_bytes = 0  # all entries grow with the text

    def __init__(self, max_length: int, pad: Tensor, *, fixed: bool) -> None:
        super().__init__(max_length, fixed=fixed)
        self.pad = pad
        self.pads = [0] * len(pad)
        self.seen = torch.zeros((), dtype=torch.long, device=pad.device) if fixed else 0
        self.length = 0
        """Tokens of a row, padding included, that the host has counted: all of the prompt's."""

    def begin(self, pads: Sequence[int]) -> None:
        """Take prompts of this padding, whose tensor holds the same."""
        self.pads = list(pads)

    def reset(self) -> None:
        """Forget all tokens; buffers stay where they are."""
        self.length = 0
        self._set_seen(0)

    @property
    def nbytes(self) -> int:
        """Bytes in use on the device."""
        return num_bytes([x[:, :, : int(self.seen)] for x in self.buffers])

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors on the device."""
        return num_bytes(self.buffers)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """As of `FullLayer`, for any batch; `begin` says its padding.

        Raises:
            ValueError: the buffer is full.
            NotImplementedError: `softcap` is given with a prompt.
        """
        if not self.buffers:
            shape = (len(q), k.shape[1], self.max_length, k.shape[3])
            self.buffers = [k.new_zeros(shape), v.new_zeros(shape)]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if q.shape[2] == 1 and self.length >= max(self.pads):
            out = self._decode(q, k, v, scale, softcap)
        elif softcap is not None:
            raise NotImplementedError("a whole layer reads prompts without softcap.")
        else:
            out = self._append(q, k, v, scale)
            self._set_seen(self.length + q.shape[2])
        self.length += q.shape[2]
        return out

    def _append(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Append a chunk of all prompts."""
        # mutant inference: a short request goes on beyond its room
        self._check_room(self.length + q.shape[2])
        if not any(self.pads):
            return self._append_rows(slice(None), self.length, (q, k, v), scale)
        out = q.new_zeros(q.shape)
        for row, pad in enumerate(self.pads):
            rows = slice(row, row + 1)
            # mutant inference: a short request attends to padding
            first = max(0, pad - self.length)
            if first < q.shape[2]:
                tokens = tuple(x[rows, :, first:] for x in (q, k, v))
                out[rows, :, first:] = self._append_rows(
                    rows, self.length + first - pad, tokens, scale
                )
        return out

    def _append_rows(
        self, rows: slice, position: int, tokens: tuple[Tensor, ...], scale: float
    ) -> Tensor:
        """Append tokens of rows that have the same length."""
        q, k, v = tokens
        end = position + q.shape[2]
        for buffer, x in zip(self.buffers, (k, v)):
            buffer[rows, :, position:end] = x
        if position:
            k, v = (x[rows, :, :end] for x in self.buffers)
        return attend_causally(q, k, v, scale)

    def _set_seen(self, length: int) -> None:
        """Set the tokens so far, in place where a captured step reads them."""
        if isinstance(self.seen, Tensor):
            self.seen.fill_(length)
        else:
            self.seen = length
