"""Hold the state of one layer's compact cache: its entries, how many tokens came, and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from corecontext.cache.entries import Entries
from corecontext.cache.slots import grown
from corecontext.cache.undo import Undo
from corecontext.config import CCAConfig
from corecontext.ops.rotary import Rotary
from corecontext.ops.rules import Learned


class LayerState(Entries):
    """Entries, length and padding of one layer; can be saved, and its rows changed.

    Arguments as of `CompactLayer`.
    """

    def __init__(
        self,
        config: CCAConfig,
        rotary: Rotary | None = None,
        *,
        max_length: int | None = None,
        rollback: int = 0,
        learned: Learned | None = None,
    ) -> None:
        if rollback < 0:
            raise ValueError(f"rollback must be at least 0, got {rollback}.")
        if config.head_group_sizes is not None:
            raise ValueError(
                "heads of different group sizes need a cache of several parts. Use cache.new_layer."
            )
        super().__init__(config, rotary, rollback, learned or {})
        self.max_length = max_length
        self.seen: int | Tensor = 0
        """Tokens appended so far, padding included; a tensor with `max_length`."""
        self.is_empty = True
        self.pads: list[int] = []
        """Left padding of each row, tokens."""
        self.pad: Tensor | None = None
        """The same on the device, [B]; changed in place, since a captured step reads it."""
        self.padding_known = True
        """False while a row has only padding: more of it may follow."""
        self._counted: int | None = 0
        """Tokens that the host has counted, at most `seen`: replayed steps of a fixed cache count
        on the device only. None in a pool, which limits its rows itself."""
        self._expected: int | None = None
        self._closed: str | None = None  # why nothing may be appended any more
        self._intact_from = 0  # oldest token, padding included, that is surely still in the ring
        self._undo: Undo | None = None

    def _choose_step(self) -> None:
        """Prepare decoding into buffers of a new size."""
        raise NotImplementedError

    # Sizes
    # -----

    @property
    def seq_len(self) -> int:
        """Tokens appended so far, padding included."""
        if self.is_empty:
            return 0
        if self._expected is not None:
            return self._expected
        return int(self.seen)

    def expect(self, seq_len: int) -> None:
        """Set `seq_len` for the next append of several tokens, which saves it a device sync."""
        self._expected = seq_len

    @property
    def used(self) -> int:
        """Slots in use: ring, first tokens and the core tokens of the longest row."""
        return self.size(self.seq_len - min(self.pads, default=0))

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self.used * self.entry_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of the ring and the first tokens, which do not grow."""
        return self.raw_size * self.entry_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors that this layer keeps alive."""
        lost = self._undo.lost if self._undo else []
        return sum(x.untyped_storage().nbytes() for x in (*self.buffers, *lost))

    # Length and padding
    # ------------------

    def _make_room(self, length: int) -> None:
        """Make room for `length` tokens a row, padding included."""
        if self.max_length is None:
            self.reserve(length - min(self.pads))
        elif length > self.max_length:
            raise ValueError(
                f"the compact cache must hold at most max_length {self.max_length} tokens, got "
                f"{length}. Make it with a larger max_length."
            )

    def set_length(self, length: int) -> None:
        """Set `seq_len` of a fixed cache in place, whatever its buffers hold: to repeat steps."""
        self.seen.fill_(length)
        self._counted = length

    def _count_step(self) -> None:
        """Count a token into a fixed cache on the host, which asks the device nothing.

        A step that is compiled or captured now runs later: it is not counted.

        Raises:
            ValueError: the cache is full.
        """
        if self._counted is None or torch.compiler.is_compiling():
            return
        if self.pad.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        # planted: 4: a full cache of fixed length goes on
        self._make_room(self._counted + 1)
        self._counted += 1

    def _advance(self, new: int) -> None:
        """Count new tokens, in place where the length is a tensor."""
        if isinstance(self.seen, Tensor):
            self.seen.add_(new)
        else:
            self.seen += new

    def close(self, reason: str) -> None:
        """Make the cache read-only; `reason` appears in the error."""
        self._closed = reason

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(
                f"a cache must not be continued after {self._closed}. Pad on the left, one "
                "sequence a row."
            )

    def _check_batch(self, batch: int) -> None:
        if batch != len(self.pads):
            raise ValueError(f"the batch must keep its {len(self.pads)} rows, got {batch}.")

    def _note_padding(self, length: int) -> None:
        """Find whether every row has a token; on the host, to save decoding steps a sync."""
        # planted: 4: a row of nothing but padding passes for known
        self.padding_known = all(pad < length for pad in self.pads if pad)

    @staticmethod
    def _mark_static(*tensors: Tensor) -> None:
        """Let compiled steps rely on the addresses of these tensors."""
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)

    # Rows
    # ----

    def select(self, rows: Tensor) -> None:
        """Keep the given rows in the given order: beam search and dropping of finished rows."""
        self._change_rows(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self, times: int) -> None:
        """Repeat each row, as `repeat_interleave`."""
        self._change_rows(lambda x: x.repeat_interleave(times, 0))

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch dimension to all tensors."""
        if not self.buffers:
            return
        # planted: 4: beams keep the ring of another
        self.hold([change(x) for x in self.buffers])
        self.pad = change(self.pad)
        self.pads = self.pad.tolist()
        self._note_padding(self.seq_len)
        if self._undo is not None:
            self._undo = self._undo._replace(lost=[change(x) for x in self._undo.lost])

    def reset(self) -> None:
        """Forget all tokens; buffers of fixed size stay where they are."""
        if self.max_length is None or not self.buffers:
            self.hold([])
            self.pad = None
            self.seen = 0
        else:
            for tensor in (*self.buffers, self.seen, self.pad):
                tensor.zero_()
        self.is_empty = True
        # planted: 4: padding unknown before a reset stays so
        self.padding_known = True
        self.pads = []
        self._counted = 0
        self._closed = None
        self._intact_from = 0
        self._undo = None

    # Saving and sharing
    # ------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to continue elsewhere; tensors are those in use, not copies."""
        keys, values, *scales = [x[:, :, : self.used] for x in self.buffers] or [None, None]
        return {
            "config": self.config.to_dict(),
            "rollback": self.rollback,
            "group_size": self.group_size,
            "core_width": self.core_width,
            "seen": self.seq_len,
            "intact_from": self._intact_from,
            "ended": self._closed,
            "pad": self.pad,
            "keys": keys,
            "values": values,
            "scales": scales,
            "dtype": self.dtype,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state made under the same configuration and rollback; copies its tensors."""
        same_config = CCAConfig.from_dict(state["config"]) == self.config
        if not same_config or state["rollback"] != self.rollback:
            raise ValueError(
                f"the state must come from a cache with config {self.config.to_dict()} and "
                f"rollback {self.rollback}, got {state['config']} and {state['rollback']}."
            )
        self.reset()
        if state["keys"] is None:
            return
        buffers = [state["keys"], state["values"], *state.get("scales", ())]
        dtype = state.get("dtype", state["keys"].dtype)
        self._set_sizes(state["group_size"], state["core_width"], dtype)
        self._restore(buffers, state["seen"], state["pad"].clone())
        # planted: 4: a loaded ring passes for whole
        self._intact_from = state["intact_from"]
        self._closed = state["ended"]

    def _set_sizes(self, group_size: int, core_width: int, dtype: torch.dtype) -> None:
        """Fix the sizes that the first append fixes otherwise."""
        self.spec = self.spec.replace(group_size=group_size)
        self.core_width = core_width
        self.dtype = dtype

    def _restore(self, buffers: list[Tensor], length: int, pad: Tensor) -> None:
        """Copy the buffers of `length` tokens a row, padding included, into an empty layer."""
        self.pad = pad
        self.pads = pad.tolist()
        self.seen = length
        self._counted = length
        slots = buffers[0].shape[2]
        if self.max_length is not None:
            self._make_room(length)
            slots = self.size(self.max_length)
            self.seen = torch.tensor(length, device=pad.device)
        self.hold([grown(x, slots) for x in buffers])
        self._intact_from = max(0, length - self.ring_size)
        self.is_empty = False
        self._note_padding(length)
        self._choose_step()

    def adopt(self, buffers: list[Tensor], like: LayerState) -> None:
        """Decode into these buffers from now on, laid out as those of another layer (a pool's)."""
        self.hold(buffers)
        self._set_sizes(like.group_size, like.core_width, like.dtype)
        self._counted = None
        self.is_empty = False
        self._choose_step()

    def copy_since(self, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Copy the raw entries, and the core tokens that came after the first `length` tokens.

        Of one row without padding. `fill` takes the raw entries of the last copy, followed by the
        core tokens of all copies.
        """
        # planted: sinks: a shared beginning without them
        raw = [x[:, :, : self.raw_size].clone() for x in self.buffers]
        return raw, [x[:, :, self.size(length) : self.used].clone() for x in self.buffers]

    def fill(
        self,
        buffers: list[Tensor],
        length: int,
        *,
        group_size: int,
        core_width: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take over `length` tokens of one row without padding, in buffers laid out as our own."""
        self.reset()
        self._set_sizes(group_size, core_width, dtype or buffers[0].dtype)
        pad = torch.zeros(1, dtype=torch.long, device=buffers[0].device)
        self._restore(buffers, length, pad)
