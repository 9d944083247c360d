"""Keys and values of one layer under full attention, in a static buffer: the baseline of the
compact cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.cache.slots import write
from corecontext.ops.api import backend_module, choose_backend
from corecontext.ops.attend_buffer import attend_buffer
from corecontext.ops.spec import Slots, Spec


class FullLayer:
    """Every key and value of one layer, the token at position p in slot p; rows may have different
    lengths.

    Prompts are read one row at a time, by PyTorch's attention; decoding steps take all rows, by the
    kernel that also decodes from the compact cache where there is one.

    Args:
        max_length: Slots of a row, tokens.
        fixed: Keep the length in a tensor, so that a decoding step can be captured.
    """

    is_empty, padding_known = (
        False,
        True,
    )  # no first append differs from a later one, and no mask is ever needed
    config = None

    def __init__(self, max_length: int, *, fixed: bool = False) -> None:
        self.max_length, self.fixed = max_length, fixed
        self.keys: Tensor | None = None  # [B, Hkv, max_length, D]
        self.values: Tensor | None = None
        self.pad: Tensor | None = None  # [B]; a row's length is seen - pad
        self.pads: list[int] = []
        self.seen: int | Tensor = 0

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values; [] before the first append."""
        return [x for x in (self.keys, self.values) if x is not None]

    def hold(self, buffers: list[Tensor]) -> None:
        """Take these for the buffers."""
        self.keys, self.values = buffers

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(x.untyped_storage().nbytes() for x in self.buffers)

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
        """Append n new tokens and attend from them to everything so far, causally.

        Args:
            q: [B, H, n, D], rotary applied; B is 1 where n is more than 1. k, v: [B, Hkv, n, D].

        Raises:
            ValueError: the buffer is full.
            NotImplementedError: `softcap`, or a mask, is given with a prompt.
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self.keys is None:
            shape = (len(q), k.shape[1], self.max_length, k.shape[3])
            self.keys, self.values = (
                torch.zeros(shape, dtype=k.dtype, device=k.device) for _ in range(2)
            )
            self.pad, self.pads = (
                torch.zeros(len(q), dtype=torch.long, device=q.device),
                [0] * len(q),
            )
        if q.shape[2] == 1 and attention_mask is None:
            return self._decode(q, k, v, scale, softcap)
        if softcap is not None or attention_mask is not None or len(q) > 1:
            raise NotImplementedError(
                "the static full cache reads one prompt at a time, without padding and softcap."
            )
        start, end = int(self.seen), int(self.seen) + q.shape[2]
        if end > self.max_length:
            raise ValueError(
                f"the full cache must hold at most max_length {self.max_length} tokens, got {end}."
            )
        self.keys[:, :, start:end], self.values[:, :, start:end] = k, v
        self.seen += q.shape[2]
        grouped = q.shape[1] != k.shape[1]
        if start == 0:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
            )
        from torch.nn.attention.bias import (
            causal_lower_right,
        )  # loads the compiler, which takes a second

        return F.scaled_dot_product_attention(
            q,
            self.keys[:, :, :end],
            self.values[:, :, :end],
            scale=scale,
            attn_mask=causal_lower_right(end - start, end),
            enable_gqa=grouped,
        )

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """One token per row, in tensor arithmetic only."""
        if (
            choose_backend("auto", q) == "triton"
        ):  # a window that nothing leaves, so no group is ever pooled
            slots = Slots(self.keys, self.values, self.seen, self.pad, self.max_length)
            spec = Spec(1, self.max_length, scale, pooling="mean", softcap=softcap)
            out = backend_module("triton", q).decode_step(q, k, v, slots, spec)
            if not self.fixed:  # a tensor is counted on the device
                self.seen += 1
            return out
        position = self.seen - self.pad  # [B]
        at = position.clamp(0, self.max_length - 1)[:, None]
        write(self.keys, at, k)
        write(self.values, at, v)
        longest = self.max_length if self.fixed else self.seen + 1 - min(self.pads)
        see = torch.arange(longest, device=q.device) <= at
        if isinstance(self.seen, Tensor):
            self.seen.add_(1)
        else:
            self.seen += 1
        return attend_buffer(
            q,
            self.keys[:, :, :longest],
            self.values[:, :, :longest],
            see[:, None],
            longest,
            scale=scale,
            softcap=softcap,
        )
