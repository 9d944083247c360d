"""Schedule many requests on one model: they join and leave between steps.

One turn reads a chunk of at most one prompt and makes one token for each request that is past its
prompt, so a long prompt delays the others by a chunk, never by its length. The prompt to read
alternates between the first to arrive and the nearest to its end: no prompt waits forever, and a
short prompt does not wait for a long one.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from corecontext.config import CCAConfig
from corecontext.inference.limits import position_limit
from corecontext.inference.policy import Load, Policy
from corecontext.inference.sampling import choose_rows
from corecontext.serve.admission import Admission, servable_handle
from corecontext.serve.errors import Code, RequestError
from corecontext.serve.memory import CacheMemory
from corecontext.serve.prefix import PrefixStore
from corecontext.serve.ranks import RankLost, Ranks
from corecontext.serve.reading import PromptReader
from corecontext.serve.request import Request, Slot
from corecontext.serve.rows import RowPool, RowShape
from corecontext.serve.step import DecodeBatch

READING_AT_ONCE = 4
"""Prompts that are being read; each holds a cache of its own until it joins the others."""
RECENT_S = 30.0
"""A time to first token older than this says nothing about the load now."""
PREFIX_SHARE = 0.25
"""Share of the budget, at most, for beginnings of prompts."""
UNLIMITED = 2**40


@dataclass(eq=False, repr=False)
class Scheduler:
    """Run requests on one model. `submit` and `cancel` may be called from any thread, `step` from
    one.

    Raises:
        ValueError: a setting breaks a rule, or the model is not enabled.
        NotImplementedError: the model has sliding-window layers, or was enabled with rollback.
    """

    model: Any
    """A causal language model with CCA enabled, all of whose layers have full attention."""
    _: KW_ONLY
    full: bool = False
    """Serve full attention from a static cache instead, the baseline."""
    cache_bytes: int = 2**30
    """Budget of all caches."""
    max_rows: int = 64
    """Requests that run at once, at most."""
    rows_per_pool: int = 8
    """Rows that are allocated at once for requests of one (g, s) and similar length."""
    queue_limit: int = 256
    """Requests that may wait."""
    chunk_size: int = 256
    """Tokens of a prompt read in a turn."""
    policy: Policy | None = None
    """Gives (g, s) of requests that choose none; None leaves the model's own. Of a model with a g
    for each layer only s is chosen."""
    max_length: int = UNLIMITED
    """Most tokens of prompt and answer, within the model's positions."""
    capture: bool = True
    """As for `DecodeBatch`; of a model split over ranks nothing is captured."""
    ranks: Ranks | None = None
    """The ranks that a model is split over. The first rank schedules, the others have a
    `Follower`."""

    def __post_init__(self) -> None:
        self.handle = servable_handle(self.model, self.full)
        for name in ("cache_bytes", "max_rows", "rows_per_pool", "chunk_size", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.queue_limit < 0:
            raise ValueError(f"queue_limit must be at least 0, got {self.queue_limit}.")
        self.max_length = min(self.max_length, position_limit(self.model.config) or UNLIMITED)

        # All ranks must have one budget, or they would make different choices.
        budget = self.cache_bytes
        num_ranks = 1
        if self.ranks is not None:
            budget = self.ranks.least(budget)
            num_ranks = self.ranks.size
        shape = RowShape.of(self.model.config, self.model.dtype, num_ranks)
        self.batch = DecodeBatch(self.model, capture=self.capture and self.ranks is None)
        prefix_bytes = 0 if self.full else int(PREFIX_SHARE * budget)
        self.memory = CacheMemory(
            shape,
            budget,
            min(self.rows_per_pool, self.max_rows),
            PrefixStore(self.chunk_size, prefix_bytes, shape),
            self.batch,
        )
        config = self.handle.config
        self.admission = Admission(self.max_length, self.memory, config, self.full, self.policy)
        self.reader = PromptReader(self.model, self.handle, self.chunk_size, self.memory, self.full)

        # A request is in one of these: the queue, the prompts being read, or its pool's rows.
        self.waiting: deque[Slot] = deque()
        self.reading: list[Slot] = []
        self.running: dict[RowPool, list[Slot]] = {}
        self._lock = threading.Lock()  # of the queue
        self._numbers = itertools.count(1)
        self._first_come = False  # which prompt is read in the next turn
        self._last_first_token: tuple[float, float] | None = None  # when, and after which wait

    # Requests
    # ----------------------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        on_token: Callable[[int], bool | None] = lambda token: False,
        on_end: Callable[[Slot], Any] = lambda slot: None,
    ) -> Slot:
        """Put a request in the queue; callbacks as for `Slot`.

        Raises:
            ValueError: as `Admission.check`.
            RequestError: too many requests wait already.
        """
        # planted: serve: sized by the settings of the prompt that is read
        self.admission.check(request)
        slot = Slot(request, on_token, on_end)
        with self._lock:
            must_wait = bool(self.waiting) or not self._has_room()
            if must_wait and len(self.waiting) >= self.queue_limit:
                raise RequestError(
                    Code.QUEUE_FULL,
                    f"{len(self.waiting)} requests wait already. Try again later.",
                )
            self.waiting.append(slot)
        return slot

    def cancel(self, slot: Slot) -> None:
        """End a request; its memory is free before the next step."""
        slot.cancelled = True

    def _has_room(self) -> bool:
        """Whether the first request of the queue may leave it, memory aside."""
        return self.num_active < self.max_rows and len(self.reading) < READING_AT_ONCE

    @property
    def num_active(self) -> int:
        """Requests that have left the queue."""
        return len(self.reading) + sum(map(len, list(self.running.values())))

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.waiting and not self.num_active

    def active(self) -> list[Slot]:
        """Return the requests that have left the queue."""
        rows = list(self.running.values())  # a copy: other threads ask while requests end
        return [*self.reading, *itertools.chain(*rows)]

    def load(self, prompt_length: int = 0) -> Load:
        """Return the load besides the request that asks, which is still in the queue."""
        seconds = None
        recent = self._last_first_token
        if recent is not None and time.monotonic() - recent[0] < RECENT_S:
            seconds = recent[1]
        return Load(
            max(0, len(self.waiting) - 1),
            self.memory.used,
            self.memory.budget,
            seconds,
            prompt_length,
        )

    # A turn
    # ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one turn; return whether there was anything to do."""
        self._drop_cancelled_and_expired()
        self._admit()
        if self.ranks is None:
            worked = self._read()
            return self._decode() or worked
        if not (self.reading or self.running or self.ranks.has_events):
            return False
        self.ranks.tell(self._last_tokens())
        worked = self._read()
        if worked:
            self.ranks.tell(self._last_tokens())
        return self._decode() or worked

    def _note(self, *event: Any) -> None:
        """Let the other ranks repeat an event, if there are any."""
        if self.ranks is not None:
            self.ranks.note(*event)

    def _pools_in_use(self) -> list[RowPool]:
        """Return the pools of a step, always in one order: captured steps recur."""
        return [pool for pool in self.memory.pools if pool in self.running]

    def _in_rows(self) -> list[Slot]:
        """Return the running requests in the order of a step."""
        return [slot for pool in self._pools_in_use() for slot in self.running[pool]]

    def _last_tokens(self) -> list[int]:
        return [slot.last_token for slot in self._in_rows()]

    def _drop_cancelled_and_expired(self) -> None:
        now = time.monotonic()
        with self._lock:
            dropped = [slot for slot in self.waiting if slot.wants_to_end(now)]
            for slot in dropped:
                self.waiting.remove(slot)
        for slot in [*dropped, *self.active()]:
            reason = slot.wants_to_end(now)
            if reason is not None:
                self._end(slot, reason)

    def _admit(self) -> None:
        """Let requests leave the queue in order, as long as there is a row for the first."""
        while self.waiting and self._has_room():
            slot = self.waiting[0]
            try:
                load = self.load(len(slot.request.prompt))
                slot.config = self.admission.settings_for(slot.request, load)
                pool = self._place(slot.config, slot.request.length)
                if pool is None and self.num_active:
                    return
                if pool is None:
                    # It would wait forever: the budget is free, and the policy chose too much.
                    raise MemoryError(
                        f"{slot.request.length} tokens do not fit the cache with the settings that "
                        f"the policy chose, {slot.config}."
                    )
            except Exception as error:  # a policy is the user's code
                self._leave_queue()
                self._end(slot, "error", error)
                continue
            slot.started = time.monotonic()
            slot.number = next(self._numbers)
            self._note("start", slot.number, slot.config, slot.request)
            # Append before leaving the queue, so concurrent readers never miss the request.
            self._start_reading(slot, pool)
            self._leave_queue()

    def _leave_queue(self) -> None:
        with self._lock:
            self.waiting.popleft()

    def _place(self, config: CCAConfig | None, length: int) -> RowPool | None:
        """Choose a pool; other ranks do the same, since a failure also evicts."""
        self._note("place", config, length)
        return self.memory.place(config, length)

    def _start_reading(self, slot: Slot, pool: RowPool) -> None:
        slot.pool = pool
        pool.promised += 1
        self.reading.append(slot)

    def _stop_reading(self, slot: Slot) -> None:
        assert slot.pool is not None, "a prompt is read for a row of a pool"
        slot.pool.promised -= 1
        self.reading.remove(slot)
        slot.release_prompt()

    def _read(self) -> bool:
        """Read one chunk of one prompt: the first to arrive and the nearest to its end in turns."""
        if not self.reading:
            return False
        self._first_come = not self._first_come
        slot = self.reading[0]
        if not self._first_come:
            slot = min(self.reading, key=lambda slot: slot.unread)
        try:
            logits = self.reader.read(slot)
            if logits is not None:
                self._join(slot, logits)
        except Exception as error:
            self._end(slot, "error", error)
        return True

    def _join(self, slot: Slot, logits: Tensor) -> None:
        """Make the first token, and move the prompt's cache into its row."""
        token = int(choose_rows(logits, [slot.request.sampling], [slot.generator])[0])
        now = time.monotonic()
        slot.first_token_at = now
        self._last_first_token = (now, now - slot.request.arrived)
        reason = self._take(slot, token)
        if reason is not None:
            self._end(slot, reason)
            return
        pool = slot.pool
        slot.row = pool.add([layer.compact for layer in slot.cache.layers])
        self.running.setdefault(pool, []).append(slot)
        self._stop_reading(slot)

    def _take(self, slot: Slot, token: int) -> str | None:
        """Hand a token on; return why the answer ends with it, or None."""
        return slot.take(token)

    def _decode(self) -> bool:
        """Make one token for each running request."""
        if not self.running:
            return False
        pools = self._pools_in_use()
        slots = self._in_rows()
        rows = [self.running[pool] for pool in pools]
        try:
            logits = self.batch.step(
                pools,
                [[slot.last_token for slot in row] for row in rows],
                [[len(slot.request.prompt) + slot.made - 1 for slot in row] for row in rows],
            )
            samplings = [slot.request.sampling for slot in slots]
            generators = [slot.generator for slot in slots]
            tokens = choose_rows(logits, samplings, generators).tolist()
        except Exception as error:
            self._end_failed_step(pools, slots, error)
            return True
        for slot, token in zip(slots, tokens):
            try:
                reason = self._take(slot, token)
            except Exception as error:
                self._end(slot, "error", error)
                continue
            if reason is not None:
                self._end(slot, reason)
        return True

    def _end_failed_step(
        self, pools: list[RowPool], slots: list[Slot], error: BaseException
    ) -> None:
        """End the requests of a failed step, and replace their pools."""
        if self.ranks is not None:  # the other ranks may have failed elsewhere, or not at all
            raise RankLost("a step failed in one of the processes of this model.") from error
        for slot in slots:
            self._end(slot, "error", error)
        for pool in pools:  # half a step may have been written
            fresh = self.memory.replace(pool)
            for slot in self.reading:
                if slot.pool is pool:
                    slot.pool = fresh

    def _end(self, slot: Slot, reason: str, error: BaseException | None = None) -> None:
        """Free a request's memory, then call `on_end`."""
        if slot.number:
            self._note("end", slot.number)
        if slot in self.reading:
            self._stop_reading(slot)
        pool = slot.pool
        if slot.row is not None:
            # The last row of the pool takes its place.
            slots = self.running[pool]
            if pool.remove(slot.row) is not None:
                slots[slot.row] = slots[-1]
                slots[slot.row].row = slot.row
            slots.pop()
            if not slots:
                del self.running[pool]
        slot.row = None
        slot.pool = None
        slot.generator = None
        if pool is not None:
            self.memory.release(pool)
        if error is not None:
            # The frames of the failed call hold its tensors.
            traceback.clear_frames(error.__traceback__)
        slot.end(reason, error)

    def clear(self) -> None:
        """Drop all memory that no request holds, and the time to first token; call it when idle."""
        self._note("clear")
        self.memory.clear()
        self._last_first_token = None

    def abandon(self, error: BaseException) -> None:
        """End all requests with this error: the model cannot run any more."""
        with self._lock:
            waiting = list(self.waiting)
            self.waiting.clear()
        for slot in [*waiting, *self.active()]:
            self._end(slot, "error", error)
