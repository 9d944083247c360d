"""Cache each row's first tokens and its last ones, for the methods that see only these."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from corecontext.baselines.blocks import Sinks, sink_attention
from corecontext.baselines.method import Call, left_padding


class SinkCacheLayer(DynamicLayer):
    """Cache of one layer with n = `sinks` first tokens and s = `window_size` last tokens.

    `keys` and `values`, rotary applied, are [B, Hkv, n + up to s, D]: sinks, then the window; a
    sink still in the window is in both.

    `update` returns the new tokens alone; `attend`, which knows the padding, appends them. Tokens
    that left the window are gone, so drafts cannot be taken back (no assisted decoding).
    """

    is_croppable = False
    supports_early_init = False

    def __init__(self, sinks: int, window_size: int) -> None:
        super().__init__()
        self.settings: tuple[Any, ...] = (sinks, window_size)
        """Sizes that a later call must have, too."""
        self.sinks = sinks
        self.window_size = window_size
        self.seen = 0
        """Tokens a row so far, padding included."""
        self.pads: Tensor | None = None
        """[B], padded slots before each row."""
        self.closed = False
        """Whether more tokens are refused."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty buffers like these keys and values."""
        self.keys, self.values = (
            x.new_zeros(*x.shape[:2], self.sinks, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> Any:
        """Return the new tokens; `attend` appends them."""
        return key_states, value_states

    def attend(self, call: Call, far_position: str) -> Tensor:
        """Append a call's tokens and let its queries attend: [B, H, T, D]; see `blocks.Sinks`."""
        if self.closed:
            raise ValueError(
                "a cache that saw documents packed in one row cannot be continued. "
                "Start a new cache."
            )
        if not self.is_initialized:
            self.lazy_initialization(call.k, call.v)
        if call.attention_mask is not None:
            self.pads = left_padding(call.attention_mask)
        sinks = [
            self._updated_sinks(cached[:, :, : self.sinks], new)
            for cached, new in ((self.keys, call.k), (self.values, call.v))
        ]
        tokens = [call.k, call.v]
        if self.seen:
            recent = (self.keys[:, :, self.sinks :], self.values[:, :, self.sinks :])
            tokens = [torch.cat(pair, 2) for pair in zip(recent, tokens)]
        out = sink_attention(
            call.q,
            *tokens,
            Sinks(*sinks, far_position, call.rotary),
            self.window_size,
            call.scoring,
            first=self.seen,
            pads=self.pads,
        )
        self.keys, self.values = (
            torch.cat((first, x[:, :, -self.window_size :]), 2).detach()
            for first, x in zip(sinks, tokens)
        )
        self.seen += call.k.shape[2]
        return out

    def _updated_sinks(self, cached: Tensor, new: Tensor) -> Tensor:
        """Return the sinks [B, Hkv, n, D], filled with those among the new tokens."""
        if not self.sinks or (self.seen >= self.sinks and self.pads is None):
            return cached
        pads = 0 if self.pads is None else self.pads[:, None]
        # Where each sink is among the new tokens: outside, if it came earlier or comes later.
        places = torch.arange(self.sinks, device=new.device)[None] + pads - self.seen
        places = places.expand(new.shape[0], -1)[:, None, :, None]
        index = places.clamp(0, new.shape[2] - 1).expand(-1, new.shape[1], -1, new.shape[3])
        is_new = (places >= 0) & (places < new.shape[2])
        return torch.where(is_new, new.gather(2, index), cached)

    def get_seq_length(self) -> int:
        """Return the tokens a row so far, padding included."""
        return self.seen

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.is_initialized = False  # the next text may have another number of rows
        self.pads = None
        self.closed = False
        self.seen = 0

    def close(self) -> None:
        """Refuse later calls: packed documents are not cached.

        Raises:
            ValueError: it holds tokens already.
        """
        if self.seen:
            raise ValueError(
                "documents packed in one row must not follow a filled cache, got "
                f"{self.seen} tokens. Start a new cache."
            )
        self.closed = True

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens."""
        if tokens_to_remove:
            raise NotImplementedError(
                "tokens cannot be taken back: what left the window is gone. Use no drafts."
            )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.change_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.change_rows(lambda x: x[indices.to(x.device)])

    reorder_cache = batch_select_indices

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to every tensor that has one entry for each row."""
        if self.is_initialized:
            self.keys = change(self.keys)
            self.values = change(self.values)
            self.pads = None if self.pads is None else change(self.pads)

    def offload(self) -> None:
        """Refuse to offload: transformers does it before the attention has appended."""
        raise NotImplementedError(
            "an offloaded cache cannot hold sinks and window. Use the default cache."
        )
