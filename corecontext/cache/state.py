"""Hold the state of one layer's compact cache: its entries, how many tokens came, and padding.

Lengths of a row, in tokens, padding included but in `_room`; `seq_len` is the one to ask for:

    seen          tokens that came; of a fixed cache a tensor, which captured steps count up
    _counted      tokens of these that the host knows of
    _expected     tokens before the next append, as `expect` has told; None after the append
    _planned      tokens that the next append makes room for
    max_length    tokens that a fixed cache has room for; None of a growing one
    _room         tokens that a growing cache has room for, padding excluded
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.cache import late
from corecontext.cache.entries import ALL, Entries
from corecontext.cache.late import Late
from corecontext.cache.raw_store import Format, RawStore, num_bytes
from corecontext.cache.slots import read, write
from corecontext.cache.stores import has_own_memory, new_store
from corecontext.cache.unchanged import unchanged_by_errors
from corecontext.cache.whole_rows import WholeRows
from corecontext.config import CCAConfig
from corecontext.ops.capability import is_captured
from corecontext.ops.fetch.prompt_rule import most_read, most_whole
from corecontext.ops.rotary import Rotary


class Undo(NamedTuple):
    """The entries that the last append pushed out of the ring."""

    seen_before: int
    """Tokens of a row before that append, padding included."""
    lost: list[Tensor]
    """[B, Hkv, n, D] for each buffer: the entries that its tokens overwrote, in their order."""
    oldest_in_ring: int
    """`_oldest_in_ring` before it."""


class LayerState(Entries):
    """Entries, length and padding of one layer, whose rows can be reordered and repeated.
    `max_length` fixes the buffers for so many tokens a row, None lets them grow; `rollback` tokens
    can always be taken back (`crop`). With `begins_on_device` few raw tokens of a growing cache are
    on the device, though its settings name host memory (`prompt_rule.most_whole`)."""

    def __init__(
        self,
        config: CCAConfig,
        rotary: Rotary | None = None,
        *,
        max_length: int | None = None,
        rollback: int = 0,
        begins_on_device: bool = False,
    ) -> None:
        if rollback < 0:
            raise ValueError(f"rollback must be at least 0, got {rollback}.")
        if config.head_group_sizes is not None:
            raise ValueError(
                "heads of different group sizes need a cache of several parts. Use cache.new_layer."
            )
        super().__init__(config, rotary, rollback)
        self.max_length = max_length
        self.begins_on_device = begins_on_device
        self.seen: int | Tensor = 0
        """Tokens appended so far, padding included; a tensor, 0-dim, with `max_length`."""
        self.is_empty = True
        self.pads: list[int] = []
        """Left padding of each row, tokens."""
        self.pad: Tensor | None = None
        """The same on the device, [B]; changed in place, since a captured step reads it."""
        self.padding_known = True
        """False while a row has only padding: more of it may follow."""
        self._counted: int | None = 0
        """Tokens that the host has counted, at most `seen`: replayed steps of a fixed cache count
        on the device only. None on buffers of a server (`adopt`), which counts its rows itself."""
        self._expected: int | None = None
        self._planned = 0
        self.late = Late()
        """Groups that are complete and not pooled yet (`catch_up` pools them)."""
        self.whole: WholeRows | None = None
        """All tokens, in place of buffers and store, before there is a compact form."""
        self._room = 0
        self._waits = False  # whether raw tokens are still to move to host memory
        self._closed: str | None = None  # why nothing may be appended any more
        self._oldest_in_ring = 0  # place, padding included, of the oldest token surely there
        self._undo: Undo | None = None

    # Sizes

    @property
    def seq_len(self) -> int:
        """Tokens appended so far, padding included."""
        if self.is_empty:
            return 0
        if self._expected is not None:
            return self._expected
        return int(self.seen)

    def expect(self, seq_len: int) -> None:
        """Set `seq_len` for the next append only, whose tokens are a prompt's, also a single one:
        this saves a device sync."""
        self._expected = seq_len

    def plan(self, length: int) -> None:
        """Let the next append of a growing cache make room for `length` tokens a row, padding
        included. Without it each chunk of a prompt moves the tokens before it, and pins host memory
        anew."""
        self._planned = length

    @property
    def used(self) -> int:
        """Slots in use: ring, first tokens and the core tokens of the longest row."""
        return self.size(self._longest)

    @property
    def nbytes(self) -> int:
        """Bytes in use on the device."""
        if self.whole is not None:
            return self.whole.nbytes
        return self.used * self.entry_bytes + self.store_bytes

    @property
    def store_bytes(self) -> int:
        """Bytes in use on the device for fetch: raw tokens, or slots for those in host memory, and
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
        """Bytes of the ring and the sinks, which do not grow with the text."""
        return self.raw_size * self.entry_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors on the device that this layer keeps alive."""
        lost = self._undo.lost if self._undo else []
        store = self.store.device_tensors if self.store else []
        whole = self.whole.buffers if self.whole else []
        return sum(x.untyped_storage().nbytes() for x in (*self._buffers, *store, *lost, *whole))

    @property
    def allocated_host_bytes(self) -> int:
        """Bytes of all tensors in host memory that this layer keeps alive."""
        return num_bytes(self.store.host_tensors) if self.store else 0

    # Length and padding

    def allocate(self, shape: tuple[int, int, int], like: list[Tensor]) -> None:
        """Make buffers of zeros, [B, Hkv, slots] = `shape` and D, dtype and device as in `like`,
        unless there are such already: compiled steps may rely on addresses in a fixed cache."""
        shapes = [(*shape, x.shape[3]) for x in like]
        wanted = [(size, x.dtype, x.device) for size, x in zip(shapes, like)]
        if wanted == [(tuple(x.shape), x.dtype, x.device) for x in self.buffers]:
            return
        self.buffers = [x.new_zeros(size) for size, x in zip(shapes, like)]
        if self.max_length is not None:
            self.seen = torch.zeros((), dtype=torch.long, device=like[0].device)
            for tensor in (*self.buffers, self.seen, self.pad):
                torch._dynamo.mark_static_address(tensor)

    def allocate_store(self, like: list[Tensor], length: int) -> None:
        """Make an empty store for fetch, for encoded tokens such as `like`, [B, Hkv, 1, D] each,
        unless there is such already; rows will first have `length` tokens."""
        if not self.config.fetch_groups:
            return
        # A fixed buffer that was reset stays where it is, for captured steps.
        if self.store is not None and self.store.fits(like, self.group_size):
            return
        most = self._device_room(self.pad.device, len(self.pads))
        self._waits = most > 0 and length <= most
        room = max(0, length) if self._waits else self.max_length or 0
        self.store = self._new_store(like, room, on_device=self._waits)
        if self.max_length is not None:
            for tensor in (*self.store.raw, *self.store.extras):
                torch._dynamo.mark_static_address(tensor)

    def _new_store(self, like: list[Tensor], length: int, *, on_device: bool = False) -> RawStore:
        return new_store(self.config, self.spec, like, self.dtype, length, on_device=on_device)

    def _device_room(self, device: torch.device, rows: int) -> int:
        """Tokens of a row up to which a growing cache has raw tokens on the device, though its
        settings name host memory: steps read so few in less time than they choose."""
        config = self.config
        grows = self.begins_on_device and self.max_length is None
        from_host = config.fetches_from_host and config.fetch_slots is None
        if not grows or not from_host or not has_own_memory(device):
            return 0
        return most_whole(config, device.type) // rows

    def _most_whole(self, device: torch.device, rows: int) -> int:
        """Return the tokens of a row up to which a growing cache needs no compact form."""
        config = self.config
        grows = self.begins_on_device and self.max_length is None
        if not grows or config.num_groups is not None:
            return 0
        most = most_read(config, device.type)
        if config.fetches_from_host and has_own_memory(device):
            most = min(most, self._device_room(device, rows))
        return most

    def _place_raw(self, length: int) -> None:
        """Move raw tokens to host memory, if they wait for that and rows of `length` tokens are too
        many for the device."""
        if not self._waits or length <= self._device_room(self.pad.device, len(self.pads)):
            return
        self.catch_up()
        before = self.store
        like = [x.new_zeros((*x.shape[:2], 1, x.shape[3])) for x in before.raw]
        store = self._new_store(like, 0)
        store.reserve(max(self._with_answer(length), before.length))
        # mutant fetch: tokens from before the move to host memory are lost
        store.take(before, max(0, self._longest))
        self.store = store
        # mutant fetch: raw tokens that moved to host memory keep the step of the device
        self._choose_step()
        self._waits = False

    def _with_answer(self, length: int) -> int:
        """Return the tokens that host memory has room for where rows have `length`, and no length
        is planned: to pin it anew for an answer is slow."""
        return length if self._planned else length + length // 8

    def begin_prompt(self, like: Tensor) -> None:
        """Make an empty store of raw tokens, for keys such as `like` [B, Hkv, n, D], where only a
        prompt needs one: full attention reads it, and later tokens do not fetch."""
        if self.config.keeps_raw_while_reading:
            self._room = 0
            spec = self.spec.replace(fetch_index="oracle")  # which stores no index
            like = like[:, :, :1]
            self.store = RawStore(spec, [like, like], Format("auto", like.dtype), length=0)

    def end_prompt(self) -> None:
        """Drop raw tokens that are kept only while full attention reads a prompt."""
        if self.store is None:
            return
        self.store.end_prompt()
        if not self.config.fetch_groups:
            # mutant prefill: raw tokens of a prompt stay
            self.store = None

    def catch_up(self) -> None:
        """Bring ring, core tokens and index up to the tokens in the store."""
        late.catch_up([self])

    def fill_ring(self) -> None:
        """Copy the last tokens of the store into the ring, and the sinks into their slots."""
        ring = self.ring_size
        n = self.num_sinks
        # The common length of all rows, where the host knows it: a late append does.
        length = None
        newest = self.late.newest  # on the device still: not read back from host memory
        if newest is not None:
            length = self.late.length
        elif isinstance(self.seen, int) and len(set(self.pads)) == 1:
            length = self.seen - self.pads[0]
        if length is not None:
            first = max(n, length - ring)
            if first < length:
                # mutant fetch: a ring that lags is read
                self.put_ring(ALL, first, self.store.read(first, length, newest))
            self.put(ALL, ring, self.store.read(0, min(n, length), newest))
            return
        # Else each row by the positions of its last tokens, in tensor arithmetic.
        last = (self.seen - self.pad)[:, None] + torch.arange(-ring, 0, device=self.pad.device)
        positions = last.clamp(min=0)
        n = min(self.raw_size - ring, self.store.length)
        for buffer, x in zip(self._buffers, self.store.raw):
            write(buffer, last % ring, read(x, positions))
            buffer[:, :, ring : ring + n] = x[:, :, :n]

    def _set_sizes(self, group_size: int, dtype: torch.dtype) -> None:
        """Fix g and the dtype of keys and values, which the first append or a state tells."""
        self.spec = self.spec.replace(group_size=group_size)
        self.dtype = dtype

    def _make_room(self, length: int) -> None:
        """Make room for `length` tokens a row, padding included; raise where a fixed cache has
        less."""
        if self.max_length is None:
            if length - min(self.pads) > self._room:
                # mutant 4: each chunk of a prompt makes room for itself
                room = max(length, self._planned) - min(self.pads)
                self._place_raw(room)
                store = self.store
                if store is not None and not store.is_near and room > store.length:
                    room = self._with_answer(room)
                self._room = self.reserve(room)
                if self._waits:
                    most = self._device_room(self.pad.device, len(self.pads))
                    self._room = min(self._room, most)
        elif length > self.max_length:
            raise ValueError(
                f"the compact cache must hold at most max_length {self.max_length} tokens, got "
                f"{length}. Make it with a larger max_length."
            )
        elif self.store is not None:
            self.store.reserve(length)

    def set_length(self, length: int) -> None:
        """Set `seen`, in place where it is a tensor, and the counts of the host."""
        if isinstance(self.seen, Tensor):
            self.seen.fill_(length)
        else:
            self.seen = length
        self._counted = length
        self._note_padding(length)

    def _counts_steps(self) -> bool:
        """Whether the host counts the token of a step in a fixed cache, without a device sync.

        A step that is compiled or captured now runs later: it is not counted.
        """
        if self._counted is None or torch.compiler.is_compiling():
            return False
        return not is_captured(self.pad.device)

    def close(self, reason: str) -> None:
        """Make the cache read-only; `reason` appears in the error."""
        self._closed = reason

    def _store_pads(self, device: torch.device) -> None:
        """Copy `pads` to `pad`, in place while the batch is the same."""
        if self.pad is None or len(self.pad) != len(self.pads):
            self.pad = torch.zeros(len(self.pads), dtype=torch.long, device=device)
        self.pad.zero_()
        if any(self.pads):
            self.pad.copy_(torch.tensor(self.pads, device=device))

    def _check_rows(self, batch: int) -> None:
        """Raise unless a batch of this many rows can be appended."""
        if self._closed:
            raise ValueError(
                f"a cache must not be continued after {self._closed}. Pad on the left, one "
                "sequence a row."
            )
        if not self.is_empty and batch != len(self.pads):
            raise ValueError(f"the batch must keep its {len(self.pads)} rows, got {batch}.")

    def _note_padding(self, length: int) -> None:
        """Set `padding_known` for rows of `length` tokens, padding included."""
        # mutant 4: a row of nothing but padding passes for known
        self.padding_known = all(pad < length for pad in self.pads if pad)

    # Rows

    def select(self, rows: Tensor) -> None:
        """Keep the given rows in the given order: beam search and dropping of finished rows."""
        self._change_rows(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self, times: int) -> None:
        """Repeat each row, as `repeat_interleave`."""
        self._change_rows(lambda x: x.repeat_interleave(times, 0))

    @unchanged_by_errors
    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch dimension, such as a choice of rows, to all tensors."""
        if not self.buffers:
            return
        rows = change(torch.arange(len(self.pads), device=self.keys.device))
        # mutant 4: beams keep the ring of another
        self.buffers = [change(x) for x in self.buffers]
        self.pad = change(self.pad)
        self.pads = self.pad.tolist()
        self._note_padding(self.seq_len)
        if self._undo is not None:
            self._undo = self._undo._replace(lost=[change(x) for x in self._undo.lost])
        if self.store is not None:  # last: host memory is changed in place
            # mutant fetch: beams keep the raw tokens of another
            self.store.select(rows)
            self._room = 0  # more rows may be too many for the device

    def reset(self) -> None:
        """Forget all tokens; buffers of a fixed cache stay where they are."""
        self.is_late = False
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
        """Reset the counts and flags that the host keeps of the tokens."""
        self.is_empty = True
        # mutant 4: padding unknown before a reset stays so
        self.padding_known = True
        self._counted = 0
        self._expected = None
        self._planned = 0
        self._room = 0
        self.late = Late()
        self.whole = None
        # mutant 4: a cache that was closed stays so after a reset
        self._closed = None
        self._oldest_in_ring = 0
        self._undo = None
