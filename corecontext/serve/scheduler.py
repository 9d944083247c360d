"""Many requests on one model: they join and leave between steps, and prompts are read in chunks
between steps.

One turn reads a chunk of at most one prompt and makes one token for each request that is past its
prompt, so a long prompt delays the others by a chunk, never by its length. Which prompt is read
alternates between the one that came first and the one that is nearest to its end: no prompt waits
for ever, and a short one does not wait for a long one.

The file is long because where a request is (queue, reading, a row) and which memory that takes must
change together.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from corecontext.cache.full import FullLayer
from corecontext.config import CCAConfig
from corecontext.inference.engine import rounded_up
from corecontext.inference.limits import position_limit
from corecontext.inference.policy import Load, Policy
from corecontext.inference.prefill import read_chunk
from corecontext.inference.sampling import Sampling, choose_rows
from corecontext.inference.session import WARM_UP
from corecontext.integrations.hf_cache import GivenLayer
from corecontext.integrations.transformers import handle_of
from corecontext.serve.prefix import Node, PrefixStore
from corecontext.serve.rows import RowPool, RowShape
from corecontext.serve.step import DecodeBatch
from corecontext.serve.together import Apart, Together
from corecontext.visibility import group_size_for

READING_AT_ONCE = (
    4  # prompts that are being read; each holds a cache of its own until it joins the others
)
RECENT_S = 30.0  # a time to first token older than this says nothing about the load now
PREFIX_SHARE = 0.25  # of the budget, at most, for beginnings of prompts


class QueueFull(Exception):
    """So many requests wait already that this one is not taken."""


@dataclass(eq=False)
class Job:
    """One request, and what has become of it. The callbacks run on the scheduler's thread."""

    prompt: Sequence[int]
    """Token numbers, at least one."""
    max_new_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    eos: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    group_size: int | None = None
    """This request's g; None leaves it to the policy. Must be None where the model has a g for each
    layer."""
    window_size: int | None = None
    """This request's s; None leaves it to the policy."""
    deadline: float | None = None
    """When it is ended unfinished, by `time.monotonic`; None is never."""
    on_token: Callable[[int], bool] = lambda token: False
    """Called with each token; returns True to end the answer with it."""
    on_end: Callable[[str], Any] = lambda reason: None
    """Called once, with "stop", "length", "cancelled", "timeout" or "error"."""

    config: CCAConfig | None = None
    """Settings that it got when it started; None under full attention, and before."""
    error: BaseException | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that were not read, because a request before it began alike."""
    made: int = 0
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    """When it left the queue."""
    first_token_at: float | None = None
    ended: str | None = None
    cancelled: bool = False
    number: int = 0
    """By which several processes know it, from when it leaves the queue."""
    # Where it is:
    read: int = 0
    cache: Any = None
    node: Node | None = None
    pool: RowPool | None = None
    row: int | None = None
    last_token: int = 0
    generator: torch.Generator | None = None
    ids: Any = None

    @property
    def length(self) -> int:
        """Most tokens that its cache will hold: the last token made is never fed."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds since it came, queue included."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived


class Scheduler:
    """Runs requests on one model. `submit` and `cancel` may be called from any thread, `step` from
    one.

    Args:
        model: A causal language model with CCA enabled, all of whose layers have full attention.
        full: Serve full attention from a static cache instead, the baseline.
        cache_bytes: Budget of all caches.
        max_rows: Requests that run at once, at most.
        rows_per_pool: Rows that are allocated at once for requests of one (g, s) and similar
            length.
        queue_limit: Requests that may wait.
        chunk_size: Tokens of a prompt read in a turn; None is 256 on a CPU and 2048 on a GPU.
        policy: Gives (g, s) of requests that choose none; None leaves the model's own. Of a model
            with a g for each layer only s is chosen.
        max_length: Most tokens of prompt and answer; None is what the model was built for.
        capture: As for `DecodeBatch`; of a model split over processes nothing is captured.
        together: The processes that a model is split over. The first one schedules, the others have
            a `Follower`.

    Raises:
        ValueError: a setting breaks a rule, or the model is not enabled.
        NotImplementedError: the model has sliding-window layers, or was enabled with rollback.
    """

    def __init__(
        self,
        model: Any,
        *,
        full: bool = False,
        cache_bytes: int = 2**30,
        max_rows: int = 64,
        rows_per_pool: int = 8,
        queue_limit: int = 256,
        chunk_size: int | None = None,
        policy: Policy | None = None,
        max_length: int | None = None,
        capture: bool = True,
        together: Together | None = None,
    ) -> None:
        handle = handle_of(model)
        if handle is None:
            raise ValueError(
                "model must have CCA enabled, got one without. Call corecontext.enable(model)."
            )
        if handle.hybrid:
            raise NotImplementedError(
                "models with sliding-window layers cannot be served yet: their caches have no "
                "rows that come and go."
            )
        if handle.rollback and not full:
            raise NotImplementedError(
                f"rollback must be 0 in a model that is served, got {handle.rollback}: its rows "
                "take nothing back. Enable it without."
            )
        if chunk_size is None:
            chunk_size = 2048 if model.device.type == "cuda" else 256
        for name, value, least in (
            ("cache_bytes", cache_bytes, 1),
            ("max_rows", max_rows, 1),
            ("rows_per_pool", rows_per_pool, 1),
            ("queue_limit", queue_limit, 0),
            ("chunk_size", chunk_size, 1),
            ("max_length", max_length or 1, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        self.together, self._numbers = together, itertools.count(1)
        self.model, self.handle, self.full, self.policy = (
            model,
            handle,
            full,
            None if full else policy,
        )
        self.cache_bytes = cache_bytes if together is None else together.least(cache_bytes)
        self.max_rows, self.rows_per_pool = max_rows, rows_per_pool
        self.queue_limit, self.chunk_size = queue_limit, chunk_size
        limit = position_limit(model.config)
        self.max_length = min(x for x in (limit, max_length, 2**40) if x is not None)
        self.shape = RowShape.of(
            model.config, model.dtype, 1 if together is None else together.size
        )
        self.batch = DecodeBatch(model, capture=capture and together is None)
        self.prefixes = PrefixStore(
            chunk_size, 0 if full else int(PREFIX_SHARE * self.cache_bytes), self.shape
        )
        self.pools: list[RowPool] = []
        self.waiting: deque[Job] = deque()
        self.reading: list[Job] = []
        self.running: dict[RowPool, list[Job]] = {}
        self._lock, self._odd = threading.Lock(), False
        self._first_token: tuple[float, float] | None = None  # when, and after how many seconds

    # Requests
    # --------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Put a request in the queue.

        Raises:
            ValueError: the request breaks a rule, is too long, or would not fit the whole budget.
            QueueFull: too many wait already.
        """
        if not job.prompt or job.max_new_tokens < 1:
            raise ValueError(
                f"prompt and answer must have at least one token, got {len(job.prompt)} and "
                f"{job.max_new_tokens}."
            )
        if job.length > self.max_length:
            raise ValueError(
                f"prompt and answer must fit {self.max_length} tokens, got {len(job.prompt)} and "
                f"{job.max_new_tokens}. Shorten the prompt or ask for fewer new tokens."
            )
        config = self._config_for(job, None)
        if 2 * self.shape.row_bytes(config, rounded_up(job.length)) > self.cache_bytes:
            raise ValueError(
                f"prompt and answer must fit the cache, got {job.length} tokens for a budget of "
                f"{self.cache_bytes / 2**20:.0f} MiB. Shorten the prompt or ask for fewer new tokens."
            )
        with self._lock:
            if len(self.waiting) >= self.queue_limit and (self.waiting or not self._has_room()):
                raise QueueFull(f"{len(self.waiting)} requests wait already. Try again later.")
            self.waiting.append(job)

    def cancel(self, job: Job) -> None:
        """End a request; what it holds is free before the next step."""
        job.cancelled = True

    def _has_room(self) -> bool:
        """Whether a request would not wait: only a queue of none asks."""
        return self.num_active < self.max_rows and len(self.reading) < READING_AT_ONCE

    @property
    def num_active(self) -> int:
        """Requests that have left the queue."""
        return len(self.reading) + sum(map(len, list(self.running.values())))

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.num_active

    def active(self) -> list[Job]:
        """Requests that have left the queue."""
        return [*self.reading, *(job for jobs in list(self.running.values()) for job in jobs)]

    # Memory
    # ----------------------------------------------------------------------------------------------------

    @property
    def cache_bytes_used(self) -> int:
        """Bytes of the rows that requests hold, and of the caches into which prompts are read."""
        return sum(pool.used * pool.row_bytes for pool in self.pools) + 2 * self._reading_bytes()

    @property
    def cache_bytes_allocated(self) -> int:
        """Bytes of all rows, used or not, of the caches into which prompts are read, and of
        beginnings."""
        return (
            sum(pool.nbytes for pool in self.pools) + self._reading_bytes() + self.prefixes.nbytes
        )

    def _reading_bytes(self) -> int:
        """Bytes of the caches into which prompts are read; other threads ask while requests end."""
        return sum(
            pool.row_bytes for pool in [job.pool for job in list(self.reading)] if pool is not None
        )

    def load(self, prompt_length: int = 0) -> Load:
        """How busy the scheduler is now, besides the request that asks, which has not left the
        queue yet."""
        recent, now = self._first_token, time.monotonic()
        seconds = recent[1] if recent is not None and now - recent[0] < RECENT_S else None
        return Load(
            max(0, len(self.waiting) - 1),
            self.cache_bytes_used,
            self.cache_bytes,
            seconds,
            prompt_length,
        )

    def _config_for(self, job: Job, load: Load | None) -> CCAConfig | None:
        """Settings of a request; without a load those that need the least memory are not known, so
        the model's."""
        if self.full:
            if job.group_size is not None or job.window_size is not None:
                raise ValueError(
                    "group_size and window_size must be left out, got a server of full attention."
                )
            return None
        own, g, s = self.handle.config, job.group_size, job.window_size
        if own.varies and g is not None:
            raise ValueError(
                f"group_size must be left out, got {g} for a model with a g for each layer or head, "
                f"{own.layer_group_sizes or own.head_group_sizes}."
            )
        if load is not None and self.policy is not None and (g is None or s is None):
            policy_g, policy_s = self.policy(load)
            g, s = policy_g if g is None else g, policy_s if s is None else s
        s = own.window_size if s is None else s
        if own.varies:
            return own.replace(window_size=s)
        if g is None:
            g = (
                own.group_size
                if own.num_groups is None
                else group_size_for(len(job.prompt), s, own.num_groups)
            )
        return own.replace(group_size=g, window_size=s, num_groups=None)

    def _place(self, config: CCAConfig | None, length: int) -> RowPool | None:
        """A pool with a free row: one that is not far too long, else a new one, else any, else a
        new one in place of those that nobody uses, else None."""
        self._note(
            "place", config, length
        )  # what is given up for it is so even where it is not enough
        room = rounded_up(length)
        fitting = sorted(
            (
                pool
                for pool in self.pools
                if pool.config == config
                and pool.max_length >= length
                and pool.used + self._promised(pool) < pool.rows
            ),
            key=lambda pool: pool.max_length,
        )
        if (
            fitting
            and fitting[0].max_length <= 2 * room
            and self._free(fitting[0].row_bytes, keep=fitting[0])
        ):
            return fitting[0]
        row = self.shape.row_bytes(config, room)
        for evict in (
            (False, True) if fitting else (True,)
        ):  # what fits is given up, too, before anybody waits
            if not self._free(2 * row, evict):
                if not evict and self._free(fitting[0].row_bytes, keep=fitting[0]):
                    return fitting[0]
                continue
            spare = (
                self.cache_bytes - self.cache_bytes_allocated - row - self._share_left()
            )  # for rows after the first
            pool = RowPool(
                config,
                max(1, min(self.rows_per_pool, self.max_rows, spare // row)),
                room,
                self.shape,
                fixed=self.batch.fixed,
            )
            self.pools.append(pool)
            return pool
        return None

    def _free(self, wanted: int, evict: bool = True, keep: RowPool | None = None) -> bool:
        """Whether so many bytes are free, after giving up what nobody uses now."""

        def missing() -> int:
            return wanted - (self.cache_bytes - self.cache_bytes_allocated)

        if missing() + self._share_left() > 0 and evict:
            for pool in [pool for pool in self.pools if not pool.used and not self._promised(pool)]:
                if pool is not keep:
                    self._drop(pool)
        if missing() > 0 and evict:
            self.prefixes.trim(max(0, self.prefixes.nbytes - max(0, missing())))
        return missing() <= 0

    def _share_left(self) -> int:
        """Bytes of their share that beginnings do not hold yet; only requests that need it take it
        from them."""
        return self.prefixes.limit - self.prefixes.nbytes

    def _promised(self, pool: RowPool) -> int:
        """Rows of a pool that prompts being read will take."""
        return sum(job.pool is pool for job in self.reading)

    def _drop(self, pool: RowPool) -> None:
        self.pools.remove(pool)
        self.batch.forget(pool)

    def warm_up(self, sizes: Iterable[tuple[int, int]] = ()) -> None:
        """Run a made-up request with the model's own (g, s) and with each of `sizes`, before the
        first one comes, so that none waits for kernels to be compiled. Nothing of it is kept."""
        own = self.handle.config
        if self.full or own.varies:
            sizes = ()
        for g, s in dict.fromkeys([(None, None), *sizes]):
            seen = (g or own.group_size) + (
                s or own.window_size
            )  # beyond it core tokens are used, too
            length = min(max(self.chunk_size, seen) + 1, self.max_length - WARM_UP - 2)
            job = Job(
                [0] * max(1, length),
                min(WARM_UP + 2, self.max_length - 1),
                group_size=g,
                window_size=s,
            )
            try:
                self.submit(job)
            except ValueError:  # larger than the budget
                continue
            while not self.idle:
                self.step()
            if job.error is not None:
                raise job.error
        self._clear()
        self._first_token = None

    def _clear(self) -> None:
        """Give up all that no request holds; none is there."""
        self._note("clear")
        for pool in list(self.pools):
            self._drop(pool)
        self.prefixes.trim(0)

    # A turn
    # ----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn; returns whether there was anything to do."""
        self._end_the_unwanted()
        self._admit()
        if self.together is None:
            worked = self._read()
            return self._decode() or worked
        if not (self.reading or self.running or self.together.has_news):
            return False
        self.together.tell([job.last_token for job in self._in_rows()])
        worked = self._read()
        if worked:
            self.together.tell([job.last_token for job in self._in_rows()])
        return self._decode() or worked

    def _note(self, *event: Any) -> None:
        """Something that the other processes of this model must do, too."""
        if self.together is not None:
            self.together.note(*event)

    def _in_rows(self) -> list[Job]:
        """Running requests in the order of a step, which recurs."""
        return [job for pool in self.pools if pool in self.running for job in self.running[pool]]

    def abandon(self, error: BaseException) -> None:
        """End all requests with this error: nothing can be run any more."""
        with self._lock:
            waiting = list(self.waiting)
            self.waiting.clear()
        for job in [*waiting, *self.active()]:
            self._end(job, "error", error)

    def _end_the_unwanted(self) -> None:
        """End requests that were cancelled or have no time left, wherever they are."""
        now = time.monotonic()
        with self._lock:
            unwanted = [job for job in self.waiting if job.cancelled or now > (job.deadline or now)]
            for job in unwanted:
                self.waiting.remove(job)
        for job in [*unwanted, *self.active()]:
            if job.cancelled or now > (job.deadline or now):
                self._end(job, "cancelled" if job.cancelled else "timeout")

    def _admit(self) -> None:
        """Let requests leave the queue in its order, as long as there is a row for the first
        one."""
        while self.waiting and self._has_room():
            job = self.waiting[0]
            try:
                job.config = self._config_for(job, self.load(len(job.prompt)))
                pool = self._place(job.config, job.length)
            except Exception as error:  # a policy is the user's code
                with self._lock:
                    self.waiting.popleft()
                self._end(job, "error", error)
                continue
            if pool is None:
                if self.num_active:
                    return
                with (
                    self._lock
                ):  # it would wait for ever: the policy chose what the budget cannot hold
                    self.waiting.popleft()
                self._end(
                    job,
                    "error",
                    MemoryError(
                        f"{job.length} tokens do not fit the cache with the settings that "
                        f"the policy chose, {job.config}."
                    ),
                )
                continue
            job.pool, job.started, job.number = pool, time.monotonic(), next(self._numbers)
            self._note(
                "start",
                job.number,
                job.config,
                list(job.prompt),
                job.max_new_tokens,
                job.sampling,
                job.seed,
            )
            self.reading.append(
                job
            )  # first: whoever asks from another thread finds it in one place or the other
            with self._lock:
                self.waiting.popleft()

    def _read(self) -> bool:
        """Read one chunk of one prompt."""
        if not self.reading:
            return False
        self._odd = not self._odd
        job = (
            self.reading[0]
            if self._odd
            else min(self.reading, key=lambda job: len(job.prompt) - job.read)
        )
        try:
            logits = self._read_chunk(job)
            if logits is not None:
                self._join(job, logits)
        except Exception as error:
            self._end(job, "error", error)
        return True

    def _read_chunk(self, job: Job) -> torch.Tensor | None:
        """Logits [1, vocabulary] after the last chunk of a prompt, None before."""
        if job.cache is None:
            self._begin(job)
        end = min(len(job.prompt), job.read + self.chunk_size)
        before = self.handle.config
        if job.config is not None:
            self.handle.configure(**job.config.to_dict())
        try:
            out = read_chunk(self.model, job.ids, None, [0], job.cache, job.read, end)
        finally:
            self.handle.configure(**before.to_dict())
        start, job.read = job.read, end
        if end - start == self.chunk_size and not self.full and (job.node is None) == (start == 0):
            room = self.cache_bytes - self.cache_bytes_allocated + self.prefixes.nbytes
            job.node = self.prefixes.add(
                job.config, job.node, tuple(job.prompt[start:end]), job.cache, room
            )
        return out.logits[:, -1] if end == len(job.prompt) else None

    def _begin(self, job: Job) -> None:
        """Make the cache of a prompt, filled with the longest beginning that is known."""
        device = self.model.device
        job.ids = torch.tensor([list(job.prompt)], device=device)
        job.generator = torch.Generator(device)
        job.generator.manual_seed(job.seed)
        if self.full:
            job.cache = Cache(
                layers=[GivenLayer(FullLayer(job.length)) for _ in range(self.shape.layers)]
            )
            return
        job.cache = DynamicCache(config=self.model.config)
        job.node = self.prefixes.find(job.config, job.prompt)
        if job.node is not None:
            self.prefixes.load(job.node, job.cache)
            job.read = job.cached_tokens = job.node.length

    def _join(self, job: Job, logits: torch.Tensor) -> None:
        """Move a prompt that has been read into its row, and make its first token."""
        token = int(choose_rows(logits, [job.sampling], [job.generator])[0])
        job.first_token_at = time.monotonic()
        self._first_token = job.first_token_at, job.time_to_first_token
        reason = self._take(job, token)
        if reason is not None:
            self._end(job, reason)
            return
        pool = job.pool
        job.row = pool.add([layer.compact for layer in job.cache.layers])
        self.running.setdefault(pool, []).append(job)
        self.reading.remove(job)
        job.cache = job.node = job.ids = None

    def _take(self, job: Job, token: int) -> str | None:
        """Hand a token on; returns why the answer ends with it, or None."""
        job.last_token, job.made = token, job.made + 1
        if job.on_token(token) or token in job.eos:
            return "stop"
        return "length" if job.made == job.max_new_tokens else None

    def _decode(self) -> bool:
        """One token for each running request."""
        if not self.running:
            return False
        pools, jobs = [pool for pool in self.pools if pool in self.running], self._in_rows()
        try:
            logits = self.batch.step(
                pools,
                [[job.last_token for job in self.running[pool]] for pool in pools],
                [[len(job.prompt) + job.made - 1 for job in self.running[pool]] for pool in pools],
            )
            tokens = choose_rows(
                logits, [job.sampling for job in jobs], [job.generator for job in jobs]
            ).tolist()
        except Exception as error:
            if self.together is not None:  # whether the others failed, and where, is not known
                raise Apart("a step failed in one of the processes of this model.") from error
            for job in jobs:
                self._end(job, "error", error)
            for pool in pools:  # half a step may have been written
                if pool in self.pools:
                    self._drop(pool)
                self._replace(pool)
            return True
        for job, token in zip(jobs, tokens):
            try:
                reason = self._take(job, token)
            except Exception as error:
                self._end(job, "error", error)
                continue
            if reason is not None:
                self._end(job, reason)
        return True

    def _replace(self, pool: RowPool) -> None:
        """Give prompts that are being read a new pool for one that was dropped."""
        promised = [job for job in self.reading if job.pool is pool]
        if promised:
            fresh = RowPool(pool.config, pool.rows, pool.max_length, self.shape, fixed=pool.fixed)
            self.pools.append(fresh)
            for job in promised:
                job.pool = fresh

    def _end(self, job: Job, reason: str, error: BaseException | None = None) -> None:
        """Free what a request holds, then say so."""
        if job.number:
            self._note("end", job.number)
        if job in self.reading:
            self.reading.remove(job)
        if job.row is not None:
            jobs = self.running[job.pool]
            if job.pool.remove(job.row) is not None:
                jobs[job.row] = jobs[-1]
                jobs[job.row].row = job.row
            jobs.pop()
            if not jobs:
                del self.running[job.pool]
        pool, job.pool, job.row = job.pool, None, None
        if pool is not None and not pool.used and not self._promised(pool) and not self.batch.fixed:
            self._drop(pool)  # with captured steps it is kept until its memory is needed
        job.cache = job.node = job.ids = job.generator = None
        if error is not None:
            traceback.clear_frames(
                error.__traceback__
            )  # else what the call that failed had computed stays in memory
        job.ended, job.error = reason, error
        job.on_end(reason)
