"""Hold the entries of one layer's compact cache: which slot holds which token, in which dtype.

Keys and values are buffers [B, Hkv, slots, D]. The slot of an entry follows from its position p in
its row's sequence, padding left out, so that no position is stored. With a ring of C slots, n sinks
and M core tokens the C + n + M slots are

    0 .. C - 1              the ring: the token at position p >= n in slot p mod C;
    C .. C + n - 1          the sinks: the token at position p < n in slot C + p;
    C + n + c               the core token of group c, counted behind the sinks.

C = s + g - 1 + rollback: a query sees the raw tokens of its window, and before it up to g - 1 of a
group that has not left the window as a whole. Ring and sinks have no more slots than tokens may
come: those of a fixed cache, or so far. Softmax does not depend on the order of entries, and rotary
is already applied to the keys, so a decoding step attends to one contiguous slice.

In 8 bits (`CCAConfig.cache_dtype`) buffers of scales [B, Hkv, slots, 1] follow keys and values. A
token is rounded when it comes, and attended to and pooled as rounded, so that all ways of appending
agree. With `CCAConfig.core_mass` a buffer [B, Hkv, slots, 1] of the core tokens' masses, in float32
or wider, comes last; it is 0 in the slots of raw tokens. With fetch a `RawStore` holds all raw
tokens beside these buffers.
"""

import torch
from torch import Tensor

from corecontext.cache.eight_bit import decode_all, encode_pair
from corecontext.cache.raw_store import RawStore
from corecontext.cache.slots import grown, read, ring_views, write
from corecontext.config import CCAConfig
from corecontext.ops.api import backend_module
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Cores, Groups, Spec
from corecontext.visibility import num_complete_groups, window_capacity

ALL = slice(None)
"""All rows of a batch."""


def check_fetch(config: CCAConfig) -> None:
    """Raise unless a cache can hold the raw tokens that fetch reads, where it is on.

    Raises:
        NotImplementedError: the settings store them nowhere.
    """
    if config.fetch_groups and config.store == "none":
        raise NotImplementedError(
            f"fetch_groups must be 0 with a cache of store='none', got {config.fetch_groups}. Use "
            "store='device' or 'host', or run whole sequences with use_cache=False."
        )


class Entries:
    """The buffers of one layer, empty at first, and the layer's settings; `rows` in arguments are
    rows of the batch."""

    def __init__(self, config: CCAConfig, rotary: Rotary | None, rollback: int) -> None:
        check_fetch(config)
        self.config = config
        self.rollback = rollback
        """Slots of the ring beyond s + g - 1, for `crop`."""
        self.spec = Spec.of(config, rotary, scale=1.0).replace(num_groups=None)
        """The same settings for kernels, with the g, scale and softcap of the last append. It has
        no `num_groups`: the first append replaces that by the g that it means."""
        self.ring_room: int | None = None
        """Most slots of the ring, at least as many as tokens came: a short text needs no whole
        ring. None gives it all C slots."""
        self._buffers: list[Tensor] = []
        """`buffers` as they are, late tokens missing: for sizes, and for what brings these in."""
        self.is_late = False
        """Whether the last tokens are in the store of raw tokens only (late.py)."""
        self.dtype: torch.dtype | None = None
        """Of keys and values before they are rounded."""
        self.store: RawStore | None = None
        """Raw tokens for fetch, from the first append on."""

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values, in 8 bits their scales, and with `core_mass` the core tokens' masses;
        tokens that are late are brought in first."""
        if self.is_late:
            self.catch_up()
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers

    def catch_up(self) -> None:
        """Bring the entries up to the tokens in the store (`state.LayerState`)."""
        raise NotImplementedError

    @property
    def keys(self) -> Tensor:
        """[B, Hkv, slots, D]."""
        return self.buffers[0]

    @property
    def values(self) -> Tensor:
        """[B, Hkv, slots, D]."""
        return self.buffers[1]

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and of values, [B, Hkv, slots, 1] in 8 bits, else None."""
        if self.config.cache_dtype == "auto":
            return None, None
        return self.buffers[2], self.buffers[3]

    @property
    def mass_buffer(self) -> Tensor | None:
        """[B, Hkv, slots, 1], None without masses."""
        return self.buffers[-1] if self.has_mass else None

    # Sizes

    @property
    def group_size(self) -> int:
        """Tokens per core token: g."""
        return self.spec.group_size

    @property
    def ring_size(self) -> int:
        """Slots of the ring: C = s + g - 1 + rollback, at most `ring_room`."""
        return self.whole_ring if self.ring_room is None else min(self.whole_ring, self.ring_room)

    @property
    def whole_ring(self) -> int:
        """Slots of the ring without a limit: s + g - 1 + rollback."""
        # mutant 4: the ring is one token too short
        return window_capacity(self.group_size, self.spec.window_size) + self.rollback

    @property
    def num_sinks(self) -> int:
        """First tokens that stay raw, whole groups of them: n."""
        return self.spec.sinks

    @property
    def raw_size(self) -> int:
        """Slots before the core tokens: C + n, or fewer while there is no room for n sinks."""
        size = self.ring_size + self.num_sinks
        return min(size, self._buffers[0].shape[2]) if self._buffers else size

    def size(self, length: int) -> int:
        """Slots for a row of `length` tokens: C + n + M."""
        # mutant 4: a slot for each first token that may ever come
        first = min(self.num_sinks, length)
        return self.ring_size + first + self.num_cores(length)

    def num_cores(self, length: int) -> int:
        """Complete groups of a row of `length` tokens: M."""
        return num_complete_groups(length - self.num_sinks, self.group_size)

    @property
    def capacity(self) -> int:
        """Groups that the buffers have slots for."""
        return self._buffers[0].shape[2] - self.raw_size

    @property
    def entry_bytes(self) -> int:
        """Bytes of one slot of all rows and heads, keys and values, measured on the buffers."""
        return sum(x[:, :, :1].numel() * x.element_size() for x in self._buffers)

    # Storing and loading

    def encode(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return keys and values as the buffers store them: as they are, or codes and scales."""
        return encode_pair(k, v, self.config.cache_dtype)

    def decode(self, stored: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return keys and values from what `encode` returned or a buffer holds."""
        kind = self.config.cache_dtype
        return decode_all(stored[: 2 if kind == "auto" else 4], kind, dtype)

    def put(self, rows: slice, start: int, stored: list[Tensor]) -> None:
        """Store encoded entries [B, Hkv, n, D] from slot `start` on."""
        for buffer, x in zip(self.buffers, stored):
            buffer[rows, :, start : start + x.shape[2]] = x

    def get(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> list[Tensor]:
        """Return keys and values [B, Hkv, n, D] of the slots start .. stop - 1."""
        return self.decode([x[rows, :, start:stop] for x in self.buffers], dtype)

    def put_ring(self, rows: slice, start: int, stored: list[Tensor]) -> None:
        """Store at most C encoded tokens [B, Hkv, n, D] of positions `start` on in the ring."""
        stop = start + stored[0].shape[2]
        for buffer, x in zip(self.buffers, stored):
            for view in ring_views(buffer, rows, start, stop, self.ring_size):
                view.copy_(x[:, :, : view.shape[2]])
                x = x[:, :, view.shape[2] :]

    def get_ring(
        self, rows: slice, start: int, stop: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values of the ring's positions start .. stop - 1, each [B, Hkv, n, D] in
        up to two pieces."""
        views = [ring_views(x, rows, start, stop, self.ring_size) for x in self.buffers]
        pieces = [self.decode(list(piece), dtype) for piece in zip(*views)]
        return [k for k, _ in pieces], [v for _, v in pieces]

    def put_cores(self, rows: slice, first: int, stored: list[Tensor]) -> None:
        """Store core tokens that `pool` returned, [N, 1, M, D], of the groups from `first` on."""
        heads = self.keys.shape[1]
        self.put(rows, self.raw_size + first, [x[:, 0].unflatten(0, (-1, heads)) for x in stored])

    def put_closed(self, position: Tensor, cores: list[Tensor]) -> None:
        """Store the core token that `pool` returned of each row's newest group, [N, 1, 1, D], in
        rows whose token at `position` [B] is the last of its group; other rows keep theirs."""
        if self.capacity < 1:
            return
        g = self.group_size
        n = self.num_sinks
        # mutant 4: every row closes its group with the first row
        is_last = ((position + 1) % g == 0)[:, None, None, None]
        # Groups of sinks write to core slot 0, which is written again before it is seen.
        # mutant sinks: a core token in another's slot
        group = (position - n if n else position) // g
        group = group.clamp(0, self.capacity - 1)
        target = self.raw_size + group[:, None]
        for buffer, core in zip(self._buffers, cores):
            core = core.reshape(*buffer.shape[:2], 1, core.shape[-1]).to(buffer.dtype)
            write(buffer, target, torch.where(is_last, core, read(buffer, target)))

    def get_cores(self, rows: slice, count: int, dtype: torch.dtype) -> Cores:
        """Return core keys and values [N, 1, M, D] of the first `count` groups."""
        cores = self.get(rows, self.raw_size, self.raw_size + count, dtype)
        return Cores(*(x.flatten(0, 1)[:, None] for x in cores))

    # Core tokens

    @property
    def has_mass(self) -> bool:
        """Whether core tokens have masses; those of single tokens are 0."""
        return self.config.core_mass and self.group_size > 1

    def pool(self, groups: Groups) -> list[Tensor]:
        """Return the core tokens [N, 1, M, D] of groups of N = rows x Hkv sequences, as the buffers
        store them."""
        backend = backend_module(self.config.backend, groups.q_last)
        spec = self.spec.replace(core_mass=self.has_mass)
        cores, mass = backend.pool_with_mass(groups, spec)
        stored = self.encode(*cores)
        return stored if mass is None else [*stored, mass[..., None]]

    def masses(self, rows: slice, count: int) -> Tensor:
        """Return the masses [B, Hkv, M] of the first `count` groups."""
        start = self.raw_size
        # mutant mass: that of the group before, from a cache
        return self.buffers[-1][rows, :, start : start + count, 0]

    def mass_of_cores(self, rows: slice, count: int) -> Tensor | None:
        """Return the masses [N, 1, M] of the first `count` groups, N = rows x Hkv; None without."""
        if not self.has_mass or not count:
            return None
        return self.masses(rows, count).flatten(0, 1)[:, None]

    def reserve(self, length: int) -> int:
        """Make room for rows of `length` tokens; what grows, grows by a quarter at least. Return
        the tokens that there is room for."""
        if self.store is not None:
            self.store.reserve(length)
        if self.ring_room is not None and length > self.ring_room:
            self.grow_ring(max(length, self.ring_room + self.ring_room // 4))
        before = self._buffers[0].shape[2]
        needed = self.size(length)
        if needed > before:
            if behind_ring := before - self.ring_size:
                needed = max(needed, before + max(16, behind_ring // 4))
            self._buffers = [grown(x, needed) for x in self._buffers]
        # Behind the ring there are slots of sinks, then of groups: one more group may be begun.
        tokens = self._buffers[0].shape[2] - self.ring_size
        if tokens >= self.num_sinks:
            tokens = self.num_sinks + (self.capacity + 1) * self.group_size - 1
        if self.ring_room is not None:
            tokens = min(tokens, self.ring_room)
        return tokens if self.store is None else min(tokens, self.store.length)

    def grow_ring(self, room: int | None) -> None:
        """Set `ring_room`, None for no limit, and add the slots that the ring gets by it behind
        its tokens: fewer came than it has slots, so that they stay in theirs."""
        ring = self.ring_size
        before = self.ring_room
        self.ring_room = room
        try:
            if more := self.ring_size - ring:
                self._buffers = [_with_gap(x, ring, more) for x in self._buffers]
        except BaseException:
            self.ring_room = before
            raise


def _with_gap(buffer: Tensor, slot: int, size: int) -> Tensor:
    """Return a copy of a buffer with `size` empty slots inserted before a slot."""
    empty = buffer.new_zeros(*buffer.shape[:2], size, buffer.shape[3])
    return torch.cat((buffer[:, :, :slot], empty, buffer[:, :, slot:]), 2)
