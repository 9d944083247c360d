"""Describe a request (`Request`, from its user) and its progress (`Slot`, of the scheduler)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from corecontext.config import CCAConfig
from corecontext.inference.sampling import INVALID, InvalidLogits, Sampling
from corecontext.serve.prefix import Node

log = logging.getLogger("corecontext.serve")


class TokenLogprobs(NamedTuple):
    """A token with its log-probability, and the likeliest tokens in its place."""

    token: int
    logprob: float | None = None
    """None for a prompt's first token, which follows nothing."""
    top: Sequence[tuple[int, float]] | None = None
    """(token, log-probability), the likeliest first."""


@dataclass(frozen=True)
class Request:
    """A user's request."""

    prompt: Sequence[int]
    """Token numbers, at least one."""
    max_new_tokens: int
    """0 reads the prompt only."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    eos: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    group_size: int | None = None
    """This request's g; None leaves it to the policy. Must be None where the model has a g for each
    layer."""
    window_size: int | None = None
    """This request's s; None leaves it to the policy."""
    fetch_groups: int | None = None
    """This request's k, at most the model's; None leaves it to the policy, 0 fetches nothing."""
    deadline: float | None = None
    """Time by `time.monotonic` at which the request is ended unfinished; None is never."""
    arrived: float = field(default_factory=time.monotonic)
    logprobs: int | None = None
    """Likeliest tokens to record beside each new one; None records no log-probabilities."""
    prompt_logprobs: bool = False
    """Whether to record the prompt's tokens, too, all of which are then read, none taken from the
    prefix store."""

    NO_SIZES: ClassVar = (None, None, None)
    """The `sizes` of a request that chooses none."""

    @property
    def sizes(self) -> tuple[int | None, int | None, int | None]:
        """The request's own (g, s, k)."""
        return self.group_size, self.window_size, self.fetch_groups

    @property
    def chooses_sizes(self) -> bool:
        """Whether the request has a g, s or k of its own."""
        return self.sizes != self.NO_SIZES

    @property
    def may_be_whole(self) -> bool:
        """Whether full attention may run the request where that takes less time: it neither has
        sizes of its own nor scores its prompt, which is to measure the model's settings."""
        return not self.chooses_sizes and not self.prompt_logprobs

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(eq=False)
class Slot:
    """A request on its way through the scheduler: from the queue, over its prompt, to a row."""

    request: Request
    on_token: Callable[[int], bool | None] = lambda token: False
    """Called with each token on the scheduler's thread; returns True to end the answer with it."""
    on_end: Callable[[Slot], Any] = lambda slot: None
    """Called once on the scheduler's thread, with `end_reason` and `error` set."""
    on_logprobs: Callable[[list[TokenLogprobs]], Any] = lambda records: None
    """Called before `on_token` and `on_end` with `logprobs`, if there are any."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities for the next call of `on_logprobs`."""

    # Settings, fixed when it leaves the queue
    config: CCAConfig | None = None
    """CCA's settings; None under full attention, and in the queue."""

    # Its prompt, while it is read
    cache: Any = None
    """A cache of transformers that grows; later it is copied into the row."""
    ids: Any = None
    """Token numbers of the prompt, [1, L] in int64."""
    node: Node | None = None
    """The last chunk of its prompt in the prefix store."""
    read: int = 0
    """Tokens of the prompt in the cache."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix store."""

    # Its row, while tokens are made
    pool: Any = None
    """The `RowPool` that promises it a row while its prompt is read, and then gives it one."""
    generator: Any = None
    """Its random stream, a `torch.Generator`."""
    last_token: int = 0
    made: int = 0
    """New tokens so far."""

    # Its times by `time.monotonic`, and its end
    started: float | None = None
    """When it left the queue."""
    first_token_at: float | None = None
    cancelled: bool = False
    end_reason: str | None = None
    """"stop", "length", "cancelled", "timeout" or "error"."""
    error: BaseException | None = None

    @property
    def length(self) -> int:
        """Tokens so far, of the prompt and of the answer."""
        return len(self.request.prompt) + self.made

    def wants_to_end(self, now: float) -> str | None:
        """Return why it must end now, unfinished: "cancelled" or "timeout"; else None."""
        if self.cancelled:
            return "cancelled"
        if self.request.deadline is not None and now > self.request.deadline:
            return "timeout"
        return None

    def take(self, token: int) -> str | None:
        """Hand a new token to `on_token`; return "stop" or "length" if the answer ends with it.

        Raises:
            InvalidLogits: the token is `INVALID`, since the logits are no numbers.
        """
        if token == INVALID:
            raise InvalidLogits
        self.last_token = token
        self.made += 1
        self._send_logprobs()
        if self.on_token(token) or token in self.request.eos:
            return "stop"
        if self.made == self.request.max_new_tokens:
            return "length"
        return None

    def _send_logprobs(self) -> None:
        records = self.logprobs
        self.logprobs = []
        if records:
            self.on_logprobs(records)

    def end(self, reason: str, error: BaseException | None) -> None:
        """Note the end and call `on_end`. If that fails, it is only logged: the other requests of
        the turn must get their tokens."""
        self.end_reason = reason
        self.error = error
        try:
            self._send_logprobs()
            self.on_end(self)
        # mutant serve: a failing callback takes the others' tokens
        except Exception:
            log.exception("the callback of a request's end failed")
