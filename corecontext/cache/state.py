"""Hold the state of one layer's compact cache: its entries, how many tokens came, and padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.cache.entries import Entries
from corecontext.cache.raw_store import Format, RawStore, num_bytes
from corecontext.cache.slots import read, write
from corecontext.cache.stores import new_store
from corecontext.config import CCAConfig
from corecontext.ops.rotary import Rotary
from corecontext.ops.rules import Learned

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
        """Set `seq_len` for the next append, of a prompt's tokens, which saves it a device sync."""
        self._expected = seq_len

    @property
    def used(self) -> int:
        """Slots in use: ring, first tokens and the core tokens of the longest row."""
        return self.size(self._longest)

    @property
    def nbytes(self) -> int:
        """Bytes in use on the device."""
        return self.used * self.entry_bytes + self.store_bytes

    @property
    def store_bytes(self) -> int:
        """Bytes in use on the device for fetch: raw tokens, or slots of those in host memory, and
        the index."""
        return self.store.device_bytes(self._longest) if self.store else 0

    @property
    def host_bytes(self) -> int:
        """Bytes in use in host memory, of raw tokens for fetch."""
        return self.store.host_bytes(self._longest) if self.store else 0

    @property
    def _longest(self) -> int:
        """Tokens of the longest row."""
        return self.seq_len - min(self.pads, default=0)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the ring and the first tokens, which do not grow."""
        return self.raw_size * self.entry_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors on the device that this layer keeps alive."""
        lost = self._undo.lost if self._undo else []
        store = self.store.device_tensors if self.store else []
        return sum(x.untyped_storage().nbytes() for x in (*self.buffers, *store, *lost))

    @property
    def allocated_host_bytes(self) -> int:
        """Bytes of all tensors in host memory that this layer keeps alive."""
        return num_bytes(self.store.host_tensors) if self.store else 0

    # Length and padding
    # ------------------

    def allocate(self, shape: tuple[int, int, int], like: list[Tensor]) -> None:
        """Make zero buffers [B, Hkv, S] for entries such as `like`, unless there are such; compiled
        steps may rely on their addresses in a fixed cache."""
        shapes = [(*shape, x.shape[3]) for x in like]
        wanted = [(size, x.dtype, x.device) for size, x in zip(shapes, like)]
        if wanted == [(tuple(x.shape), x.dtype, x.device) for x in self.buffers]:
            return
        self.buffers = [x.new_zeros(size) for size, x in zip(shapes, like)]
        if self.max_length is not None:
            self.seen = torch.zeros((), dtype=torch.long, device=like[0].device)
            for tensor in (*self.buffers, self.seen, self.pad):
                torch._dynamo.mark_static_address(tensor)

    def allocate_store(self, like: list[Tensor]) -> None:
        """Make an empty store for fetch, for tokens such as `like`, encoded [B, Hkv, 1, D], unless
        there is such."""
        if not self.config.fetch_groups:
            return
        # A fixed buffer that was reset stays where it is, for captured steps.
        if self.store is not None and self.store.fits(like, self.group_size):
            return
        self.store = new_store(self.config, self.spec, like, self.dtype, self.max_length or 0)
        if self.max_length is not None:
            for tensor in (*self.store.raw, *self.store.extras):
                torch._dynamo.mark_static_address(tensor)

    def begin_prompt(self, like: Tensor) -> None:
        """Make an empty store of raw tokens, for keys such as `like` [B, Hkv, n, D], where full
        attention reads the prompt; fetch has one."""
        if self.config.prefill == "full" and not self.config.fetch_groups:
            spec = self.spec.replace(fetch_index="oracle")
            like = like[:, :, :1]
            self.store = RawStore(spec, [like, like], Format("auto", like.dtype), 0)

    def end_prompt(self) -> None:
        """Drop raw tokens that are kept only while full attention reads a prompt
        (`CCAConfig.prefill`); a later append is read by the settings."""
        if self.store is not None and not self.config.fetch_groups:
            # planted: prefill: raw tokens of a prompt stay
            self.store = None

    def _make_room(self, length: int) -> None:
        """Make room for `length` tokens a row, padding included."""
        if self.max_length is None:
            self.reserve(length - min(self.pads))
        elif length > self.max_length:
            raise ValueError(
                f"the compact cache must hold at most max_length {self.max_length} tokens, got "
                f"{length}. Make it with a larger max_length."
            )
        elif self.store is not None:
            self.store.reserve(length)

    def set_length(self, length: int) -> None:
        """Set `seq_len`, in place where it is a tensor, whatever the buffers hold."""
        if isinstance(self.seen, Tensor):
            self.seen.fill_(length)
        else:
            self.seen = length
        self._counted = length
        self._note_padding(length)

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

    def close(self, reason: str) -> None:
        """Make the cache read-only; `reason` appears in the error."""
        self._closed = reason

    def _store_pads(self, device: torch.device) -> None:
        """Copy the padding of the rows to the device, in place while the batch is the same."""
        if self.pad is None or len(self.pad) != len(self.pads):
            self.pad = torch.zeros(len(self.pads), dtype=torch.long, device=device)
        self.pad.zero_()
        if any(self.pads):
            self.pad.copy_(torch.tensor(self.pads, device=device))

    def _check_rows(self, batch: int) -> None:
        """Raise unless this many rows can go on."""
        if self._closed:
            raise ValueError(
                f"a cache must not be continued after {self._closed}. Pad on the left, one "
                "sequence a row."
            )
        if not self.is_empty and batch != len(self.pads):
            raise ValueError(f"the batch must keep its {len(self.pads)} rows, got {batch}.")

    def _note_padding(self, length: int) -> None:
        """Find whether every row has a token; on the host, to save decoding steps a sync."""
        # planted: 4: a row of nothing but padding passes for known
        self.padding_known = all(pad < length for pad in self.pads if pad)

    # Undoing the last append
    # -----------------------

    def _note_lost(self, start: int, stored: list[Tensor]) -> None:
        """Copy what the append of these encoded tokens [B, Hkv, n, D] will push out of the ring,
        unless they are more than UNDO_LIMIT."""
        self._undo = None
        ring = self.ring_size
        new = stored[0].shape[2]
        if self.max_length is not None or not start or start + new <= ring or new > UNDO_LIMIT:
            return
        slots = self._ring_slots(start, min(new, ring))
        # Of more tokens than the ring has slots, the last push out the first.
        lost = [
            torch.cat((read(buffer, slots), x[:, :, : max(0, new - ring)]), 2)
            for buffer, x in zip(self.buffers, stored)
        ]
        self._undo = Undo(start, lost, self._intact_from)

    def _restore_lost(self, base: int, end: int) -> None:
        """Put back the entries lost to the tokens base .. end - 1."""
        if self._undo is None:
            return
        kept = base - self._undo.start
        count = min(end - base, self.ring_size)
        slots = self._ring_slots(base, count)
        for buffer, lost in zip(self.buffers, self._undo.lost):
            # planted: 4: a rejected draft stays in the ring
            write(buffer, slots, lost[:, :, kept : kept + count])
        rest = [x[:, :, :kept] for x in self._undo.lost]
        self._undo = self._undo._replace(lost=rest) if kept else None

    def _ring_slots(self, start: int, count: int) -> Tensor:
        """Return the ring slots [B, count] of `count` tokens from `start` on, padding included."""
        tokens = start - self.pad[:, None] + torch.arange(count, device=self.pad.device)
        return tokens % self.ring_size

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
        rows = change(torch.arange(len(self.pads), device=self.keys.device))
        # planted: 4: beams keep the ring of another
        self.buffers = [change(x) for x in self.buffers]
        self.pad = change(self.pad)
        self.pads = self.pad.tolist()
        self._note_padding(self.seq_len)
        if self.store is not None:
            # planted: fetch: beams keep the raw tokens of another
            self.store.select(rows)
        if self._undo is not None:
            self._undo = self._undo._replace(lost=[change(x) for x in self._undo.lost])

    def reset(self) -> None:
        """Forget all tokens; buffers of fixed size stay where they are."""
        if self.max_length is None or not self.buffers:
            self.buffers = []
            self.store = None
            self.pad = None
            self.seen = 0
        else:
            self.end_prompt()
            for tensor in (*self.buffers, self.seen, self.pad):
                tensor.zero_()
            if self.store is not None:
                self.store.clear()
        self.pads = []
        self._clear()

    def _clear(self) -> None:
        """Reset what the host knows of the tokens."""
        self.is_empty = True
        # planted: 4: padding unknown before a reset stays so
        self.padding_known = True
        self._counted = 0
        self._expected = None
        # planted: 4: a cache that was closed stays so after a reset
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
            "store": self.store.used(self._longest) if self.store else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state made under the same configuration and rollback; copies its tensors."""
        same_config = CCAConfig.from_dict(state["config"]) == self.config
        if not same_config or state["rollback"] != self.rollback:
            raise ValueError(
                f"the state must come from a cache with config {self.config.to_dict()} and "
                f"rollback {self.rollback}, got {state['config']} and {state['rollback']}."
            )
        if state["keys"] is None:
            self.reset()
            return
        self.fill(
            [state["keys"], state["values"], *state.get("scales", ())],
            state["seen"],
            group_size=state["group_size"],
            core_width=state["core_width"],
            dtype=state.get("dtype"),
            pad=state["pad"],
            store=state.get("store", []),
        )
        # planted: 4: a loaded ring passes for whole
        self._intact_from = state["intact_from"]
        # planted: 4: a loaded cache forgets that it is closed
        self._closed = state["ended"]

    def _set_sizes(self, group_size: int, core_width: int, dtype: torch.dtype) -> None:
        """Fix the sizes that the first append fixes otherwise."""
        self.spec = self.spec.replace(group_size=group_size)
        self.core_width = core_width
        self.dtype = dtype

    def adopt(self, buffers: list[Tensor], like: LayerState) -> None:
        """Decode into these buffers from now on, laid out as those of another layer (a pool's)."""
        self.buffers = buffers
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
        pad: Tensor | None = None,
        store: Sequence[Tensor] = (),
    ) -> None:
        """Copy `length` tokens a row, padding included, from buffers laid out as our own.

        Args:
            dtype: Of keys and values before they were rounded; None is that of the buffers.
            pad: [B], left padding; None is one row without.
            store: Entries of the store for fetch.

        Raises:
            NotImplementedError: the layer fetches, and `store` has nothing.
        """
        if self.config.fetch_groups and not store:
            raise NotImplementedError(
                "fetch_groups must be 0 where prompts are shared or read by several processes, got "
                f"{self.config.fetch_groups}."
            )
        if self.max_length is not None:
            self._make_room(length)
        self._set_sizes(group_size, core_width, dtype or buffers[0].dtype)
        used = buffers[0].shape[2]
        slots = used if self.max_length is None else self.size(self.max_length)
        if pad is None:
            pad = torch.zeros(1, dtype=torch.long, device=buffers[0].device)
        # planted: 4: a cache loses its own state when it loads it
        self.pads = pad.tolist()
        self._store_pads(pad.device)
        if self.max_length is None:
            self.buffers = []
        self.allocate((*buffers[0].shape[:2], slots), buffers)
        # A fixed cache, whose buffers stay where they are, may be given these very buffers.
        for buffer, x in zip(self.buffers, buffers):
            buffer[:, :, :used] = x
            buffer[:, :, used:] = 0
        if store:
            self.begin_prompt(store[0])
            num_raw = 2 if self.config.cache_dtype == "auto" else 4
            self.allocate_store([x[:, :, :1] for x in store[:num_raw]])
            self.store.load(store)
        self._clear()
        self.set_length(length)
        self._intact_from = max(0, length - self.ring_size)
        self.is_empty = False
        self._choose_step()
