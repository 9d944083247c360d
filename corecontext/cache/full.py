"""Cache one layer's keys and values under full attention, in a static buffer: the baseline of the
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

    Prompts are read one row at a time, by PyTorch's attention. Decoding steps take all rows, by the
    kernel that also decodes from the compact cache, where there is one.

    Args:
        max_length: Slots of a row, tokens.
        fixed: Keep the length in a tensor, so that a decoding step can be captured.
    """

    config = None
    is_empty = False  # the first append is like later ones
    padding_known = True  # no mask is ever needed
    asks_device = False

    def __init__(self, max_length: int, *, fixed: bool = False) -> None:
        self.max_length = max_length
        self.fixed = fixed
        self.buffers: list[Tensor] = []
        """Keys and values, [B, Hkv, max_length, D]."""
        self.pad: Tensor | None = None
        """[B]; a row's length is seen - pad."""
        self.pads: list[int] = []
        """The same on the host."""
        self.seen: int | Tensor = 0

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
        """Append n new tokens and attend from them to all tokens so far, causally.

        Args:
            q: [B, H, n, D], rotary applied; B is 1 where n is more than 1. k, v: [B, Hkv, n, D].

        Raises:
            ValueError: the buffer is full.
            NotImplementedError: `softcap`, or a mask, is given with a prompt.
        """
        if not self.buffers:
            shape = (len(q), k.shape[1], self.max_length, k.shape[3])
            self.buffers = [k.new_zeros(shape), v.new_zeros(shape)]
            self.pad = torch.zeros(len(q), dtype=torch.long, device=q.device)
            self.pads = [0] * len(q)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if q.shape[2] == 1 and attention_mask is None:
            return self._decode(q, k, v, scale, softcap)
        if softcap is not None or attention_mask is not None or len(q) > 1:
            raise NotImplementedError(
                "the static full cache reads one prompt at a time, without padding and softcap."
            )
        return self._append(q, k, v, scale)

    def _append(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Append a chunk of one prompt."""
        start = int(self.seen)
        end = start + q.shape[2]
        self._check_room(end)
        for buffer, x in zip(self.buffers, (k, v)):
            buffer[:, :, start:end] = x
        self.seen += end - start
        keys, values = (buffer[:, :, :end] for buffer in self.buffers)
        return attend_causally(q, keys, values, scale)

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Append one token per row, in tensor arithmetic only."""
        # A length on a GPU is not read back; a step that is compiled now runs later.
        is_counted = isinstance(self.seen, int) or not self.seen.is_cuda
        if is_counted and not torch.compiler.is_compiling():
            # mutant 4: a full cache of full attention goes on
            self._check_room(int(self.seen) + 1 - min(self.pads))
        lengths = (self.seen, self.pad, self.pads)
        backend = choose_backend("auto", q)
        out = step_on_all(self.buffers, (q, k, v), lengths, (scale, softcap), backend)
        if not (self.fixed and backend == "triton"):  # the kernel has counted on the device
            self.seen += 1
        return out

    def _check_room(self, length: int) -> None:
        """Raise where the buffer cannot hold rows of this length."""
        if length > self.max_length:
            raise ValueError(
                f"the full cache must hold at most max_length {self.max_length} tokens, got "
                f"{length}. Make it with a larger max_length."
            )


def step_on_all(
    buffers: list[Tensor],
    tokens: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[int | Tensor, Tensor, list[int]],
    scaling: tuple[float, float | None],
    backend: str,
) -> Tensor:
    """Store a token of each row behind those that it has, and attend from it to all of them.

    Args:
        buffers: Keys and values [B, Hkv, S, D], the token at position p in slot p.
        tokens: q [B, H, 1, D], k and v [B, Hkv, 1, D].
        lengths: Tokens so far, padding included; each row's padding [B], and the same on the host.
            A tensor of tokens counts one more where backend "triton" takes the step.
        scaling: Scale and softcap.

    Returns:
        [B, H, 1, D].
    """
    q, k, v = tokens
    seen, pad, pads = lengths
    room = buffers[0].shape[2]
    scale, softcap = scaling
    if backend == "triton":
        # A window that no token leaves: no group is ever pooled.
        module = backend_module("triton", q)
        spec = Spec(1, room, scale, softcap=softcap)
        return module.decode_step(q, k, v, Slots(*buffers, seen, pad, room), spec)
    end = room
    if isinstance(seen, int):
        end = seen + 1 - min(pads)
        if softcap is None and seen + 1 - max(pads) == end:
            for buffer, x in zip(buffers, (k, v)):
                buffer.narrow(2, end - 1, 1).copy_(x)
            keys, values = (x.narrow(2, 0, end) for x in buffers)
            # The r query heads of a KV head are rows of one product.
            grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(grouped, keys, values, scale=scale).view(q.shape)
    slot = (seen - pad).clamp(0, room - 1)[:, None]  # [B, 1]
    for buffer, x in zip(buffers, (k, v)):
        write(buffer, slot, x)
    see = torch.arange(end, device=q.device) <= slot
    keys, values = (x[:, :, :end] for x in buffers)
    return attend_buffer(q, keys, values, see[:, None], end, scale=scale, softcap=softcap)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from [B, H, T, D], the last T tokens, to keys and values [B, Hkv, S, D]."""
    options = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    # Imported here: it loads the compiler, which takes a second.
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
