"""Schedule many requests on one model: they join and leave between steps.

A turn reads a chunk of at most one prompt, then makes one token for each request that is past its
prompt (a step), so a long prompt delays the others by a chunk, never by its length. The prompt to
read alternates between the first to arrive and the nearest to its end: no prompt waits forever,
and a short prompt does not wait for a long one.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from corecontext.inference.chunk_size import SERVED_CHUNK
from corecontext.inference.fuse import Fused
from corecontext.inference.limits import position_limit
from corecontext.inference.policy import Load, Policy
from corecontext.inference.room import RowShape
from corecontext.inference.sampling import choose_rows
from corecontext.inference.session import may_run_full_attention
from corecontext.integrations.hf.rotation import fix_rotation
from corecontext.serve.admission import Admission, servable_handle
from corecontext.serve.errors import Code, InvalidRequest, RequestError, draining
from corecontext.serve.logprobs import add_logprobs
from corecontext.serve.memory import CacheMemory
from corecontext.serve.prefix import PrefixStore
from corecontext.serve.reading import read_next_chunk
from corecontext.serve.request import Request, Slot, TokenLogprobs
from corecontext.serve.rows import RowPool
from corecontext.serve.step import DecodeBatch

READING_AT_ONCE = 4
"""At most this many prompts are read in alternation; each holds a cache of its own until it gets a
row."""
RECENT_S = 30.0
"""A time to first token that is older tells nothing about the load now."""
PREFIX_SHARE = 0.25
"""Share of the budget, at most, for beginnings of prompts."""
UNLIMITED = 2**40
"""Tokens; more than any model has positions for."""


@dataclass(eq=False, repr=False)
class Scheduler:
    """Run requests on one model. `submit` and `cancel` may be called from any thread,
    `run_turn` from one.

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
    host_bytes: int = 2**30
    """Budget of raw tokens in host memory, where the model's settings keep them there."""
    max_rows: int = 64
    """Requests that run at once, at most."""
    rows_per_pool: int = 8
    """Rows that are allocated at once for requests of one (g, s, k) and similar length."""
    queue_limit: int = 256
    """Requests that may wait."""
    client_sizes: int = 8
    """Different (g, s, k) that requests may choose at once; 0 forbids a choice."""
    chunk_size: int = SERVED_CHUNK["cpu"]
    """Tokens of a prompt read in a turn."""
    later_chunk_size: int | None = None
    """The same behind the first four chunks, under CCA; None for as many."""
    policy: Policy | None = None
    """Chooses (g, s) or (g, s, k) for requests that do not; None leaves the model's own. A model
    with a g for each layer keeps its g."""
    max_length: int = UNLIMITED
    """Most tokens of prompt and answer, within the model's positions."""
    capture: bool = True
    """Capture steps in CUDA graphs, on a GPU."""

    def __post_init__(self) -> None:
        self.handle = servable_handle(self.model, self.full)
        self.fused = Fused(self.model, "kernels")  # as the Engine
        positive = ("cache_bytes", "host_bytes", "max_rows", "rows_per_pool", "chunk_size")
        for name in (*positive, "max_length", "queue_limit", "client_sizes"):
            least = 0 if name in ("queue_limit", "client_sizes") else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        self.max_length = min(self.max_length, position_limit(self.model.config) or UNLIMITED)

        # Some models choose rotary frequencies by length. A step has rows of many lengths: all get
        # the frequencies of the longest.
        fix_rotation(self.model, self.max_length)

        budget = self.cache_bytes
        from_host = self.handle.config.fetches_from_host and not self.full
        host_rate = budget / self.host_bytes if from_host else 0.0
        shape = RowShape.of(self.model.config, self.model.dtype, host_rate)
        self.batch = DecodeBatch(self.model, capture=self.capture)
        prefix_bytes = 0 if self.full else int(PREFIX_SHARE * budget)
        fetches = bool(self.handle.config.fetch_groups) and not self.full
        may_be_whole = fetches and may_run_full_attention(self.model, self.handle)
        self.memory = CacheMemory(
            shape,
            budget,
            min(self.rows_per_pool, self.max_rows),
            PrefixStore(self.chunk_size, prefix_bytes, shape, self.later_chunk_size),
            self.batch,
            may_be_whole and self.batch.fixed,
        )
        self.admission = Admission(
            self.max_length, self.memory, self.handle.config, self.full, self.policy
        )

        # A request is in the queue, among the prompts being read, or in a row of its pool.
        self.waiting: deque[Slot] = deque()
        self.reading: list[Slot] = []
        self._lock = threading.Lock()  # of the queue
        self._closed = False  # written under the lock: afterwards no request enters the queue
        self._read_oldest = False  # whether the last turn read the first prompt to arrive
        self._newest_first_token: tuple[float, float | None] = (0.0, None)
        """Time of the newest first token, and the seconds that its request waited for it."""

    # Requests

    def submit(
        self,
        request: Request,
        on_token: Callable[[int], bool | None] = lambda token: False,
        on_end: Callable[[Slot], Any] = lambda slot: None,
        on_logprobs: Callable[[list[TokenLogprobs]], Any] = lambda records: None,
    ) -> Slot:
        """Put a request in the queue; `Slot` describes the callbacks.

        Raises:
            ValueError: as `Admission.check`.
            RequestError: too many requests wait already, too many sizes are chosen, or the
                scheduler is closed.
        """
        # mutant serve: sized by the settings of the prompt that is read
        self.admission.check(request)
        slot = Slot(request, on_token, on_end, on_logprobs)
        with self._lock:
            if self._closed:
                raise draining()
            must_wait = bool(self.waiting) or not self._has_room()
            if must_wait and len(self.waiting) >= self.queue_limit:
                raise RequestError(
                    Code.QUEUE_FULL,
                    f"{len(self.waiting)} requests wait already. Try again later.",
                )
            if request.chooses_sizes:
                self._check_choice(request)
            self.waiting.append(slot)
        return slot

    def _check_choice(self, request: Request) -> None:
        """Refuse sizes beyond the number of different ones that requests may choose at once."""
        if not self.client_sizes:
            raise InvalidRequest(
                Code.INVALID,
                "group_size, window_size and fetch_groups must be left out: this server lets no "
                "request choose them.",
            )
        choices = {slot.request.sizes for slot in [*self.waiting, *self.active()]}
        choices -= {request.sizes, Request.NO_SIZES}
        if len(choices) >= self.client_sizes:
            raise RequestError(
                Code.QUEUE_FULL,
                f"requests of {len(choices)} other sizes run already. Leave group_size, "
                "window_size and fetch_groups out, or try again later.",
            )

    def cancel(self, slot: Slot) -> None:
        """End a request; its memory is free before the next step."""
        slot.cancelled = True

    def close(self) -> None:
        """Refuse all further requests. Call it before the last turns: later requests would never
        end."""
        with self._lock:
            self._closed = True

    def _has_room(self) -> bool:
        """Whether the first request of the queue may leave it, memory aside."""
        return self.num_active < self.max_rows and len(self.reading) < READING_AT_ONCE

    @property
    def num_active(self) -> int:
        """Requests that have left the queue."""
        return len(self.active())

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.waiting and not self.num_active

    def active(self) -> list[Slot]:
        """Return the requests that have left the queue."""
        return [*self.reading, *self._in_rows()]

    def load(self, prompt_length: int = 0) -> Load:
        """Return the load without the request that asks, which is still in the queue."""
        made_at, wait = self._newest_first_token
        if time.monotonic() - made_at >= RECENT_S:
            wait = None
        queue_length = max(0, len(self.waiting) - 1)
        return Load(queue_length, self.memory.used, self.memory.budget, wait, prompt_length)

    # A turn

    def run_turn(self) -> bool:
        """Run one turn; return whether there was anything to do."""
        self._drop_cancelled_and_expired()
        self._admit()
        with self.fused:
            has_read = self._read()
            has_decoded = self._decode()
        return has_read or has_decoded

    def _in_rows(self) -> list[Slot]:
        """Return the running requests in the order of a step."""
        pools = list(self.memory.pools)  # a copy: other threads ask while requests end
        return [slot for pool in pools for slot in pool.slots]

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
                config = self.admission.settings_for(slot.request, load)
                pool = self.memory.place(config, slot.request.length, slot.request.may_be_whole)
                if pool is None and self.num_active:
                    return
                if pool is None:
                    # It would wait forever: the budget is free, and the policy chose too much.
                    raise MemoryError(
                        f"{slot.request.length} tokens do not fit the cache with the settings that "
                        f"the policy chose, {config}."
                    )
            except Exception as error:  # a policy is the user's code
                self.waiting.popleft()
                self._end(slot, "error", error)
                continue
            slot.config = pool.config
            slot.started = time.monotonic()
            slot.pool = pool
            pool.promised += 1
            # Append before leaving the queue: other threads that ask never miss the request.
            self.reading.append(slot)
            self.waiting.popleft()

    def _stop_reading(self, slot: Slot) -> None:
        """Free the memory by which a prompt is read, and the promise of its row."""
        assert slot.pool is not None, "a prompt is read for a row of a pool"
        slot.pool.promised -= 1
        self.reading.remove(slot)
        slot.cache = None
        slot.ids = None
        slot.node = None

    def _read(self) -> bool:
        """Read one chunk of one prompt: the first to arrive and the nearest to its end in turns."""
        if not self.reading:
            return False
        self._read_oldest = not self._read_oldest
        slot = self.reading[0]
        if not self._read_oldest:
            slot = min(self.reading, key=lambda slot: len(slot.request.prompt) - slot.read)
        try:
            logits = read_next_chunk(self.model, slot, self.memory)
            if logits is not None:
                self._join(slot, logits)
        except torch.AcceleratorError:  # the device can compute nothing any more
            raise
        except Exception as error:
            self._end(slot, "error", error)
        return True

    def _join(self, slot: Slot, logits: Tensor) -> None:
        """Make the first token, and copy the prompt's cache into its row."""
        if not slot.request.max_new_tokens:
            self._end(slot, "length")
            return
        token = int(choose_rows(logits, [slot.request.sampling], [slot.generator])[0])
        add_logprobs([slot], logits, [token])
        now = time.monotonic()
        slot.first_token_at = now
        self._newest_first_token = (now, now - slot.request.arrived)
        self._take(slot, token)
        if slot.end_reason is not None:
            return
        slot.pool.add(slot, [layer.compact for layer in slot.cache.layers])
        self._stop_reading(slot)

    def _take(self, slot: Slot, token: int) -> None:
        """Hand a token on; end the request where its answer ends with it, or its callback fails."""
        try:
            reason = slot.take(token)
        except Exception as error:
            self._end(slot, "error", error)
            return
        if reason is not None:
            self._end(slot, reason)

    def _decode(self) -> bool:
        """Make one token for each running request."""
        slots = self._in_rows()
        if not slots:
            return False
        # Always in one order, so that captured steps are found again.
        pools = [pool for pool in self.memory.pools if pool.slots]
        try:
            logits = self.batch.step(pools)
            samplings = [slot.request.sampling for slot in slots]
            generators = [slot.generator for slot in slots]
            tokens = choose_rows(logits, samplings, generators).tolist()
            add_logprobs(slots, logits, tokens)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            self._end_failed_step(pools, slots, error)
            return True
        for slot, token in zip(slots, tokens):
            self._take(slot, token)
        return True

    def _end_failed_step(
        self, pools: list[RowPool], slots: list[Slot], error: BaseException
    ) -> None:
        """End the requests of a failed step, and replace their pools."""
        for slot in slots:
            self._end(slot, "error", error)
        for pool in pools:  # half a step may have been written
            fresh = self.memory.replace(pool)
            for slot in self.reading:
                if slot.pool is pool:
                    slot.pool = fresh

    def _end(self, slot: Slot, reason: str, error: BaseException | None = None) -> None:
        """Free a request's memory, then call `on_end`."""
        if slot in self.reading:
            self._stop_reading(slot)
        if slot.pool is not None:
            if slot in slot.pool.slots:
                slot.pool.remove(slot)
            self.memory.release(slot.pool)
        slot.pool = None
        slot.generator = None
        if error is not None:
            # The frames of the failed call hold its tensors, and so their memory.
            traceback.clear_frames(error.__traceback__)
        slot.end(reason, error)

    def clear(self) -> None:
        """Drop all caches, and the newest time to first token; call it when idle."""
        self.memory.clear()
        self._newest_first_token = (0.0, None)

    def abandon(self, error: BaseException) -> None:
        """End all requests with this error: the model cannot run any more."""
        with self._lock:
            self._closed = True
            # A prompt whose cache was being copied into its row is in both.
            slots = list(dict.fromkeys([*self.waiting, *self.active()]))
            self.waiting.clear()
        self.reading.clear()
        self.memory.pools.clear()
        for slot in slots:
            slot.end("error", error)
