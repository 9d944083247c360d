"""Cache all keys and values of one layer under full attention, in a static buffer: for requests
under full attention, for those so short that it is the fastest (ops/fetch/prompt_rule.py), and as
the baseline of the compact cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from corecontext.cache.raw_store import num_bytes
from corecontext.cache.slots import write
from corecontext.ops.api import backend_module, choose_backend
from corecontext.ops.attend_buffer import attend_buffer
from corecontext.ops.spec import Slots, Spec
from corecontext.ops.torch_attention import causal_attention, scaled_attention, step_attention


class FullLayer:
    """Every key and value of one layer, the token at position p in slot p; rows may have different
    lengths.

    Prompts are read by PyTorch's attention. Decoding steps use the kernel that also decodes from
    the compact cache, where there is one.

    Args:
        max_length: Slots of a row, tokens.
        pad: Left padding of each row, [B], one tensor for all layers; None lets the first append
            make one of zeros.
        fixed: Keep the length in a tensor, so that a decoding step can be captured.
        seen: A 0-dim tensor for the length, padding included. Steps count it up; the caller sets it
            behind a prompt, those of all layers in one launch. None: the layer makes and sets it.
    """

    # Attributes of a `CompactLayer`, in whose place this layer can be:
    config = None  # no settings of CCA
    store = None  # its buffers are the raw tokens
    is_empty = False  # the first append is like later ones
    padding_known = True  # no mask is ever needed
    asks_device = False
    host_bytes = allocated_host_bytes = 0
    raw_bytes = 0  # all entries grow with the text

    def __init__(
        self,
        max_length: int,
        pad: Tensor | None = None,
        *,
        fixed: bool = False,
        seen: Tensor | None = None,
    ) -> None:
        self.max_length = max_length
        self.fixed = fixed
        self.buffers: list[Tensor] = []
        """Keys and values, [B, Hkv, max_length, D]."""
        self.pad = pad
        """[B]; tokens of a row are seen - pad."""
        self.pads = [] if pad is None else [0] * len(pad)
        """The same on the host."""
        self.seen: int | Tensor = 0 if seen is None else seen
        self._counts = seen is None  # whether this layer counts prompts in `seen`
        self._reads_prompt = False  # whether a single token is a chunk, not a step
        self.length = 0
        """Tokens of a row, padding included, that the host has counted: all of a prompt's."""

    def begin(self, pads: Sequence[int]) -> None:
        """Take chunks of prompts up to `end_prompt`; `pads` are the numbers of `pad`."""
        self.pads = list(pads)
        self._reads_prompt = True

    def end_prompt(self) -> None:
        """Take single tokens as steps from now on; `seen` holds the prompt's length by then."""
        self._reads_prompt = False

    def reset(self) -> None:
        """Forget all tokens; buffers stay where they are."""
        self.length = 0
        if self._counts:
            self.seen = self.seen.zero_() if isinstance(self.seen, Tensor) else 0

    @property
    def seq_len(self) -> int:
        """Tokens of the prompts so far, padding included."""
        return self.length

    @property
    def dtype(self) -> torch.dtype:
        """That of keys and values."""
        return self.buffers[0].dtype

    def copy_since(self, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Copy keys and values of the tokens after the first `length`; the first list, for what is
        kept of the end only, is empty (saving.py)."""
        return [], [x[:, :, length : self.length].clone() for x in self.buffers]

    def fill(self, buffers: Sequence[Tensor], length: int) -> None:
        """Take the first `length` tokens of prompts: keys and values [B, Hkv, length, D]."""
        self._check_room(length)
        self._allocate(buffers[0])
        for buffer, x in zip(self.buffers, buffers):
            buffer[:, :, :length] = x
        self.length = length
        self.seen += length

    @property
    def nbytes(self) -> int:
        """Bytes in use on the device."""
        count = max(self.length, int(self.seen))
        return num_bytes([x[:, :, :count] for x in self.buffers])

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
        """Append n new tokens to each row, and attend from each to all tokens of its row up to
        itself.

        Args:
            q: [B, H, n, D], rotary applied. k, v: [B, Hkv, n, D].

        Raises:
            ValueError: the buffer is full.
            NotImplementedError: a mask is given, or `softcap` with more than one token.
        """
        count = q.shape[2]
        if attention_mask is not None or (softcap is not None and count > 1):
            raise NotImplementedError(
                "the static full cache reads prompts without masks and softcap."
            )
        if not self.buffers:
            self._allocate(k)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        # mutant inference: a last chunk of one token is a step
        if count == 1 and not self._reads_prompt:
            out = self._decode(q, k, v, scale, softcap)
        else:
            out = self._append(q, k, v, scale)
            if self._counts:
                self.seen += count
        self.length += count
        return out

    def _allocate(self, like: Tensor) -> None:
        """Make the buffers for keys such as `like` [B, Hkv, n, D]."""
        shape = (*like.shape[:2], self.max_length, like.shape[3])
        self.buffers = [like.new_zeros(shape), like.new_zeros(shape)]
        if self.pad is None:
            self.pad = torch.zeros(len(like), dtype=torch.long, device=like.device)
            self.pads = [0] * len(like)
        if self.fixed and self._counts:
            self.seen = torch.zeros((), dtype=torch.long, device=like.device)

    def _append(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Append a chunk of the prompts, with padding at its beginning in shorter rows."""
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
        """Append tokens q, k, v from `position` on to rows that have as many tokens each."""
        q, k, v = tokens
        end = position + q.shape[2]
        for buffer, x in zip(self.buffers, (k, v)):
            buffer[rows, :, position:end] = x
        if position:
            k, v = (x[rows, :, :end] for x in self.buffers)
        return attend_causally(q, k, v, scale)

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Append one token per row and attend from it, in tensor arithmetic only."""
        # A length on a GPU is not read back; a step that is compiled now runs later.
        is_on_host = isinstance(self.seen, int) or not self.seen.is_cuda
        if is_on_host and not torch.compiler.is_compiling():
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
        lengths: `seen`, tokens so far, padding included; `pad`, each row's padding [B]; and `pads`,
            the same on the host. The kernel of backend "triton" adds 1 to `seen`, if a tensor.
        scaling: Scale and softcap.
        backend: "triton" takes the kernel, any other name plain PyTorch.

    Returns:
        [B, H, 1, D].
    """
    q, k, v = tokens
    seen, pad, pads = lengths
    room = buffers[0].shape[2]
    scale, softcap = scaling
    if backend == "triton":
        # For the kernel a compact cache whose window no token leaves: no group is ever pooled.
        module = backend_module("triton", q)
        spec = Spec(group_size=1, window_size=room, scale=scale, softcap=softcap)
        return module.decode_step(q, k, v, Slots(*buffers, seen, pad, room), spec)
    end = room
    if isinstance(seen, int):
        end = max(1, seen + 1 - min(pads))  # rows that are padding so far see one slot, too
        # Rows of one length need no mask.
        if softcap is None and seen + 1 - max(pads) == end:
            for buffer, x in zip(buffers, (k, v)):
                buffer.narrow(2, end - 1, 1).copy_(x)
            keys, values = (x.narrow(2, 0, end) for x in buffers)
            # The r query heads of a KV head are rows of one product.
            grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
            return step_attention(grouped, keys, values, scale).reshape(q.shape)
    slot = (seen - pad).clamp(0, room - 1)[:, None]  # [B, 1]
    for buffer, x in zip(buffers, (k, v)):
        write(buffer, slot, x)
    see = torch.arange(end, device=q.device) <= slot  # [B, end]
    keys, values = (x[:, :, :end] for x in buffers)
    return attend_buffer(q, keys, values, see[:, None], end, scale=scale, softcap=softcap)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally from [B, H, T, D], the last T tokens, to keys and values [B, Hkv, S, D]."""
    options = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if q.shape[2] == k.shape[2]:
        return causal_attention(q, k, v, **options)
    # Imported here: it loads the compiler, which takes a second.
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_attention(q, k, v, attn_mask=mask, **options)
