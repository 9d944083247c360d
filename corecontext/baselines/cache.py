"""A cache layer that holds each row's first tokens and its last ones, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from corecontext.baselines.blocks import sink_attention
from corecontext.ops.head_split import deal, put_back
from corecontext.ops.rotary import Rotary


def left_padding(attention_mask: Tensor) -> Tensor:
    """Padded slots before each row of a mask [B, L]."""
    return (attention_mask.cumsum(1) == 0).sum(1)


class SinkLayer(CacheLayerMixin):
    """`sinks` first tokens and `window_size` last tokens, with rotary applied.

    `update` hands new tokens through; the attention function, which knows the padding, appends
    them. What has left the window is gone, so drafts cannot be taken back (no assisted decoding).
    """

    is_croppable = False
    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, sinks: int, window_size: int) -> None:
        super().__init__()
        self.settings: tuple[Any, ...] = (sinks, window_size)
        """What it was made with: a cache must keep them."""
        self.sinks, self.window_size, self.seen = sinks, window_size, 0
        self.pads: Tensor | None = None
        self.closed = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty buffers like these keys and values."""
        self.keys, self.values = (
            x.new_zeros(*x.shape[:2], self.sinks, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Hand the new tokens through."""
        return key_states, value_states

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        *,
        far_position: str,
        rotary: Rotary | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Append the tokens k, v [B, Hkv, T, D] and let their queries q [B, H, T, D] attend: [B, H,
        T, D]."""
        if self.closed:
            raise ValueError(
                "a cache that saw documents packed in one row cannot be continued. Start a new cache."
            )
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        if attention_mask is not None:
            self.pads = left_padding(attention_mask)
        sink_k, sink_v = (
            self._with_sinks(old[:, :, : self.sinks], new)
            for old, new in ((self.keys, k), (self.values, v))
        )
        all_k, all_v = (
            torch.cat((old[:, :, self.sinks :], new), 2) if self.seen else new
            for old, new in ((self.keys, k), (self.values, v))
        )
        out = sink_attention(
            q,
            all_k,
            all_v,
            sink_k,
            sink_v,
            first=self.seen,
            window_size=self.window_size,
            pads=self.pads,
            far_position=far_position,
            rotary=rotary,
            scale=scale,
            softcap=softcap,
        )
        self.keys, self.values = (
            torch.cat((sinks, every[:, :, -self.window_size :]), 2).detach()
            for sinks, every in ((sink_k, all_k), (sink_v, all_v))
        )
        self.seen += k.shape[2]
        return out

    def _with_sinks(self, old: Tensor, new: Tensor) -> Tensor:
        """The sinks after the new tokens, which may hold some of them."""
        if not self.sinks or (self.seen >= self.sinks and self.pads is None):
            return old
        pads = 0 if self.pads is None else self.pads[:, None]
        slots = (torch.arange(self.sinks, device=new.device)[None] + pads - self.seen).expand(
            new.shape[0], -1
        )
        index = slots.clamp(0, new.shape[2] - 1)[:, None, :, None].expand(
            -1, new.shape[1], -1, new.shape[3]
        )
        inside = ((slots >= 0) & (slots < new.shape[2]))[:, None, :, None]
        return torch.where(inside, new.gather(2, index), old)

    def get_seq_length(self) -> int:
        """Slots appended so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset that a mask of this layer would have."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """No longest sequence."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = self.pads = None
        self.is_initialized, self.closed, self.seen = False, False, 0

    def close(self) -> None:
        """Take no more tokens: several documents went through, of which the cache holds none.

        Raises:
            ValueError: it holds tokens already.
        """
        if self.seen:
            raise ValueError(
                f"documents packed in one row must not follow a filled cache, got {self.seen} tokens. "
                "Start a new cache."
            )
        self.closed = True

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return (
            sum(x.numel() * x.element_size() for x in (self.keys, self.values))
            if self.is_initialized
            else 0
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, but for nothing."""
        if tokens_to_remove:
            raise NotImplementedError(
                "tokens cannot be taken back: what left the window is gone. Use no drafts."
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._each(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self._each(lambda x: x[indices.to(x.device)])

    def _each(self, change) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.pads = None if self.pads is None else change(self.pads)

    def offload(self) -> None:
        """Refused: transformers offloads before the attention has appended."""
        raise NotImplementedError(
            "an offloaded cache cannot hold sinks and window. Use the default cache."
        )


EVERYTHING = 2**40  # a window that nothing leaves


class DuoLayer(SinkLayer):
    """The same where some KV heads keep every token.

    Args:
        full: These heads.
        heads: KV heads in all.
    """

    def __init__(self, sinks: int, window_size: int, full: Sequence[int], heads: int) -> None:
        super().__init__(sinks, window_size)
        self.settings, self.heads = (sinks, window_size, tuple(full), heads), heads
        rest = [head for head in range(heads) if head not in full]
        both = [(list(full), SinkLayer(0, EVERYTHING)), (rest, SinkLayer(sinks, window_size))]
        self.shares, self.parts = zip(*[(some, layer) for some, layer in both if some])

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """See `SinkLayer.attend`."""
        outs = []
        for layer, *tensors in zip(
            self.parts, *(deal(x, self.shares, self.heads) for x in (q, k, v))
        ):
            layer.closed = self.closed
            outs.append(layer.attend(*tensors, attention_mask, **options))
        self.is_initialized, self.seen = True, self.seen + k.shape[2]
        return put_back(outs, self.shares)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self.parts)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        for layer in self.parts:
            layer.reset()

    def _each(self, change) -> None:
        for layer in self.parts:
            layer._each(change)
