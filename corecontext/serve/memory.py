"""Divide one budget of bytes among rows of cache, prompts being read, and shared beginnings."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from corecontext.config import CCAConfig
from corecontext.cost import CacheBytes
from corecontext.inference.limits import rounded_up
from corecontext.inference.room import Needed, RowShape
from corecontext.ops.fetch.prompt_rule import most_whole
from corecontext.serve.prefix import PrefixStore
from corecontext.serve.rows import RowPool
from corecontext.serve.step import DecodeBatch

MANY_WHOLE = 8
"""Rows under full attention beside which a short request waits for one of them rather than choose.
Of 8,192 tokens 4 such rows answered about as many requests a second as 16 that choose, and 12 half
as many again (docs/benchmarks.md, "Serving")."""


@dataclass(eq=False)
class CacheMemory:
    """Pools of rows and the prefix store within one budget."""

    shape: RowShape
    """Sizes of the model's cache."""
    budget: int
    """Bytes of all caches; a byte in host memory counts as `shape.host_rate` bytes."""
    rows_per_pool: int
    """Rows that are allocated at once, at most."""
    prefixes: PrefixStore
    """Beginnings of prompts; its limit is its share of the budget."""
    batch: DecodeBatch
    """Decodes from the pools, and has captured steps of them."""
    runs_short_whole: bool = False
    """Whether short requests for fetch (`most_whole`) run under full attention while there is room,
    because it takes less time."""
    pools: list[RowPool] = field(default_factory=list)

    @property
    def budgets(self) -> str:
        """The budget in words, with that of host memory if rows need any."""
        text = f"{self.budget / 2**20:.0f} MiB"
        if self.shape.host_rate:
            text += f", and {self.budget / self.shape.host_rate / 2**20:.0f} MiB in host memory"
        return text

    def counted(self) -> tuple[CacheBytes, CacheBytes]:
        """Count the bytes on the device and in host memory of all but beginnings.

        Returns:
            (bytes used, bytes allocated). `used` and `allocated` have them as bytes of the budget,
            `allocated` with beginnings.
        """
        used_device = used_host = allocated_device = allocated_host = 0
        for pool in list(self.pools):
            row = self.shape.bytes_of(pool.config, pool.max_length)
            # A prompt that is read has a promised row, and a cache of its own to be read into.
            used_rows = len(pool.slots) + pool.promised
            reading = self.shape.reading_of(pool.reading, pool.max_length)
            reading_device = pool.promised * reading.device
            reading_host = pool.promised * reading.host
            used_device += used_rows * row.device + reading_device
            used_host += used_rows * row.host + reading_host
            allocated_device += pool.rows * row.device + reading_device
            allocated_host += pool.rows * row.host + reading_host
        used = CacheBytes(used_device, used_host)
        return used, CacheBytes(allocated_device, allocated_host)

    @property
    def used(self) -> int:
        """Bytes of the rows that requests hold or will get, and of the caches into which prompts
        are read."""
        rows = sum((len(pool.slots) + pool.promised) * pool.row_bytes for pool in self.pools)
        # mutant serve: the load forgets the caches into which prompts are read
        return rows + self._reading

    @property
    def allocated(self) -> int:
        """Bytes of all rows, used or not, of the caches into which prompts are read, and of
        beginnings."""
        return sum(pool.nbytes for pool in self.pools) + self._reading + self.prefixes.nbytes

    @property
    def _reading(self) -> int:
        """Bytes of the caches into which prompts are read."""
        return sum(pool.promised * pool.reading_bytes for pool in self.pools)

    @property
    def unallocated(self) -> int:
        """Bytes of the budget that are not allocated."""
        return self.budget - self.allocated

    def fits(self, config: CCAConfig | None, length: int) -> bool:
        """Whether an empty server could hold a request: its row, and the cache into which its
        prompt is read."""
        return self.shape.needed(config, rounded_up(length), self.budget).of_budget <= self.budget

    def place(
        self, config: CCAConfig | None, length: int, may_be_whole: bool = True
    ) -> RowPool | None:
        """Choose a pool with a free row, under full attention where a request of these settings
        and length may run so and there is room.

        Of those the shortest, if at most twice as long as needed, else a new one, else any that
        fits, else a new one in place of idle pools. None if nothing fits; idle memory is evicted
        even then. None, too, where a request would run under full attention but for room, and
        many rows do so of which any that ends makes room; and where idle rows like its own, which
        have captured steps, would be evicted for a prompt that can be read after those before it.
        """
        room = rounded_up(length)
        # mutant serve: a request that asks for its own sizes runs under full attention
        is_short = may_be_whole and self._is_short(config, room)
        is_whole = is_short and self._has_whole_room(length)
        # mutant serve: a short request chooses beside many rows under full attention
        if is_short and not is_whole and self._num_whole(length, 2 * room) >= MANY_WHOLE:
            return None
        if is_whole:
            config = None
        best = self._shortest(config, length, 2 * room)
        if best is not None:
            # The prompt is read into a cache of its own, which must fit, too.
            alike = self._fitting(config, length, 2 * room)
            self._drop_idle(best.reading_bytes, keep=alike)
            if best.reading_bytes <= self.unallocated:
                return best
            # mutant serve: rows that are needed next go for a prompt that could wait
            if self._reading and any(pool.is_idle for pool in alike):
                return None
            if self.free(best.reading_bytes, keep=[best]):
                return best
        needed = self.shape.needed(config, room, self.budget)
        # To read into a longer row under full attention could take the place of beginnings.
        if best is None and not is_whole:
            best = self._shortest(config, length, math.inf)
        if best is not None and needed.of_budget <= self.unallocated:
            return self._allocate(config, room, needed)
        if best is not None and self.free(best.reading_bytes, keep=[best]):
            return best
        return self._allocate_with_room(config, room, needed)

    def _allocate_with_room(
        self, config: CCAConfig | None, room: int, needed: Needed
    ) -> RowPool | None:
        """Add a pool in place of idle pools and beginnings. None if a row and what its prompt is
        read into do not fit, or if the pool would have more rows once the prompts that are read now
        have been read: a step attends pool by pool."""
        wanted = needed.of_budget
        if wanted + self._prefix_share_left > self.unallocated:
            self._drop_idle(wanted + (self.rows_per_pool - 1) * self.shape.budget_bytes(needed.row))
        rows = self._num_rows(config, room, needed)
        # mutant serve: many pools of a row in place of one
        if rows < self._num_rows(config, room, needed, more=self._reading):
            return None
        return self._allocate(config, room, needed) if self.free(wanted) else None

    def _shortest(self, config: CCAConfig | None, length: int, most: float) -> RowPool | None:
        """Return the shortest pool of these settings with a free row for `length` tokens and at
        most `most`."""
        fitting = self._fitting(config, length, most)
        return min(fitting, key=lambda pool: pool.max_length, default=None)

    def _fitting(self, config: CCAConfig | None, length: int, most: float) -> list[RowPool]:
        """Return the pools of these settings with a free row for `length` tokens and at most
        `most`."""
        pools = (pool for pool in self.pools if pool.has_room(config, length))
        return [pool for pool in pools if pool.max_length <= most]

    def _is_short(self, config: CCAConfig | None, room: int) -> bool:
        """Whether a row of `room` tokens for fetch takes less time under full attention."""
        return config is not None and self.runs_short_whole and room <= most_whole(config, "cuda")

    def _num_whole(self, length: int, most: int) -> int:
        """Count the requests that have or will get a row under full attention with room for
        `length` tokens, and for at most `most`."""
        pools = (x for x in self.pools if x.config is None and length <= x.max_length <= most)
        return sum(len(pool.slots) + pool.promised for pool in pools)

    def _has_whole_room(self, length: int) -> bool:
        """Whether there is room for a row under full attention that leaves beginnings their share
        of the budget."""
        room = rounded_up(length)
        row = self.shape.row_bytes(None, room)
        pool = self._shortest(None, length, 2 * room)
        if pool is None and row > self._whole_left(room, busy_only=True):
            return False
        idle = sum(x.nbytes for x in self.pools if x.is_idle and x is not pool)
        needed = 2 * row if pool is None else pool.reading_bytes
        # mutant serve: rows under full attention take the share of beginnings
        return self.allocated - idle + needed + self._prefix_share_left <= self.budget

    def _whole_left(self, room: int, busy_only: bool) -> int:
        """Return the bytes that further rows of `room` tokens under full attention may take: all
        that leave beginnings their share if that holds many such rows, else half of the budget
        while no row chooses, as few rows are no faster than many that choose. `busy_only` leaves
        out idle pools, which can go."""
        most = self.budget - self.prefixes.limit
        # One more row is a prompt that is read.
        if most < (MANY_WHOLE + 1) * self.shape.row_bytes(None, room):
            chooses = any(pool.config is not None and not pool.is_idle for pool in self.pools)
            # mutant serve: rows under full attention and rows that choose take turns on a budget
            most = 0 if chooses else self.budget // 2
        pools = (x for x in self.pools if x.config is None and not (busy_only and x.is_idle))
        return most - sum(pool.nbytes for pool in pools)

    def _allocate(self, config: CCAConfig | None, room: int, needed: Needed) -> RowPool:
        """Add a pool of as many rows as leave room to read a prompt and for the prefixes' share."""
        rows = max(1, self._num_rows(config, room, needed))
        read_as = self.shape.read_as(config, room, self.budget)
        fixed = self.batch.fixed
        pool = RowPool(config, rows, room, self.shape, fixed=fixed, reading=read_as)
        self.pools.append(pool)
        return pool

    def _num_rows(self, config: CCAConfig | None, room: int, needed: Needed, more: int = 0) -> int:
        """Return how many rows a new pool can have, with `more` bytes free."""
        reading = self.shape.budget_bytes(needed.reading)
        spare = self.unallocated + more - reading - self._prefix_share_left
        if config is None and self.runs_short_whole:
            spare = min(spare, self._whole_left(room, busy_only=False))
        return min(self.rows_per_pool, spare // self.shape.budget_bytes(needed.row))

    def free(self, wanted: int, keep: Collection[RowPool] = ()) -> bool:
        """Evict idle pools, then beginnings, until `wanted` bytes are free.

        Args:
            keep: Pools that must stay, though they are idle.

        Returns:
            Whether they are free.
        """
        self._drop_idle(wanted, keep)
        # Beginnings are evicted only for a request that fits in no other way.
        missing = wanted - self.unallocated
        if missing > 0:
            self.prefixes.trim(max(0, self.prefixes.nbytes - missing))
        return wanted <= self.unallocated

    def _drop_idle(self, wanted: int, keep: Collection[RowPool] = ()) -> bool:
        """Evict idle pools, but those to keep, until `wanted` bytes are free beside the share of
        beginnings; return whether they are."""
        for pool in list(self.pools):
            if wanted + self._prefix_share_left <= self.unallocated:
                return True
            if pool.is_idle and pool not in keep:
                self.drop(pool)
        return wanted + self._prefix_share_left <= self.unallocated

    @property
    def _prefix_share_left(self) -> int:
        """Bytes of the prefixes' share that beginnings do not hold yet."""
        return self.prefixes.limit - self.prefixes.nbytes

    def release(self, pool: RowPool) -> None:
        """Drop a pool that a request has left, if it is idle."""
        # On a GPU it is kept, with its captured steps, until its memory is needed.
        if pool.is_idle and not self.batch.fixed:
            self.drop(pool)

    def drop(self, pool: RowPool) -> None:
        """Free a pool's rows and captured steps."""
        self.pools.remove(pool)
        self.batch.forget(pool)

    def replace(self, pool: RowPool) -> RowPool | None:
        """Drop a pool after a failed step; return a new one for its promised rows, if any."""
        if pool in self.pools:
            self.drop(pool)
        if not pool.promised:
            return None
        sizes = (pool.config, pool.rows, pool.max_length, self.shape)
        fresh = RowPool(*sizes, fixed=pool.fixed, reading=pool.reading)
        fresh.promised = pool.promised
        self.pools.append(fresh)
        return fresh

    def clear(self) -> None:
        """Drop all pools and beginnings; no request may hold any."""
        for pool in list(self.pools):
            self.drop(pool)
        self.prefixes.trim(0)
