"""Divide one budget of bytes among rows of cache, prompts being read, and shared beginnings."""

import math
from dataclasses import dataclass, field

from corecontext.config import CCAConfig
from corecontext.cost import CacheBytes
from corecontext.inference.limits import rounded_up
from corecontext.inference.room import RowShape
from corecontext.ops.fetch.prompt_rule import most_whole
from corecontext.serve.prefix import PrefixStore
from corecontext.serve.rows import RowPool
from corecontext.serve.step import DecodeBatch

MANY_WHOLE = 16
"""Rows under full attention with which a step is so full that further rows, which choose, would
slow it by as much as they add: a short request waits for one of these rows instead."""


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
        return self._needed(config, rounded_up(length)) <= self.budget

    def _needed(self, config: CCAConfig | None, room: int) -> int:
        """Return the bytes of a row and of the cache into which its prompt is read."""
        return self.shape.needed(config, room, self.budget).of_budget

    def place(
        self, config: CCAConfig | None, length: int, may_be_whole: bool = True
    ) -> RowPool | None:
        """Choose a pool with a free row, under full attention where a request of these settings
        and length may run so and there is room.

        Of those the shortest, if at most twice as long as needed, else a new one, else any that
        fits, else a new one in place of idle pools. None if nothing fits; idle memory is evicted
        even then. None, too, where a request would run under full attention but for room, and
        many rows do so of which any that ends makes room.
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
        needed = self._needed(config, room)
        # To read into a longer row under full attention could take the place of beginnings.
        best = self._shortest(config, length, 2 * room if is_whole else math.inf)
        if best is not None:
            # The prompt is read into a cache of its own, which must fit, too.
            if best.max_length <= 2 * room and self.free(best.reading_bytes, keep=best):
                return best
            if needed <= self.unallocated:
                return self._allocate(config, room)
            if self.free(best.reading_bytes, keep=best):
                return best
        if self.free(needed):
            return self._allocate(config, room)
        return None

    def _shortest(self, config: CCAConfig | None, length: int, most: float) -> RowPool | None:
        """Return the shortest pool of these settings with a free row for `length` tokens and at
        most `most`."""
        fitting = [pool for pool in self.pools if pool.has_room(config, length)]
        best = min(fitting, key=lambda pool: pool.max_length, default=None)
        return best if best is not None and best.max_length <= most else None

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
        pool = self._shortest(None, length, 2 * room)
        idle = sum(x.nbytes for x in self.pools if x.is_idle and x is not pool)
        needed = 2 * self.shape.row_bytes(None, room) if pool is None else pool.reading_bytes
        # mutant serve: rows under full attention take the share of beginnings
        return self.allocated - idle + needed + self._prefix_share_left <= self.budget

    def _allocate(self, config: CCAConfig | None, room: int) -> RowPool:
        """Add a pool of as many rows as leave room to read a prompt and for the prefixes' share."""
        row = self.shape.row_bytes(config, room)
        read_as = self.shape.read_as(config, room, self.budget)
        reading = self.shape.reading_bytes(read_as, room)
        spare = self.unallocated - reading - self._prefix_share_left
        rows = max(1, min(self.rows_per_pool, spare // row))
        fixed = self.batch.fixed
        pool = RowPool(config, rows, room, self.shape, fixed=fixed, reading=read_as)
        self.pools.append(pool)
        return pool

    def free(self, wanted: int, keep: RowPool | None = None) -> bool:
        """Evict idle pools, then beginnings, until `wanted` bytes are free.

        Args:
            keep: A pool that must stay, though it is idle.

        Returns:
            Whether they are free.
        """
        if wanted + self._prefix_share_left > self.unallocated:
            for pool in list(self.pools):
                if pool.is_idle and pool is not keep:
                    self.drop(pool)
        # Beginnings are evicted only for a request that fits in no other way.
        missing = wanted - self.unallocated
        if missing > 0:
            self.prefixes.trim(max(0, self.prefixes.nbytes - missing))
        return wanted <= self.unallocated

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
