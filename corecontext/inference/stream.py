"""Run one request: read its prompt, then make its tokens step by step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.config import check_int
from corecontext.inference.prefill import prefill
from corecontext.inference.sampling import INVALID, InvalidLogits, Sampling
from corecontext.inference.session import Session, SessionKey


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Options of a request to `Engine.stream`, besides its prompt.

    Raises:
        TypeError: a field is of another kind.
        ValueError: a field breaks a rule.
    """

    max_new_tokens: int
    """Most tokens to make for each row."""
    sampling: Sampling | None = None
    """How tokens are chosen; None takes the likeliest."""
    seed: int | Sequence[int] = 0
    """Seed of the batch, or a seed for each row: then a row's tokens do not depend on its
    neighbours."""
    eos_token_id: int | Sequence[int] | None = None
    """Tokens that end a row; None takes those of the model's generation config, [] none."""
    stop_strings: str | Sequence[str] = ()
    """Texts that end a row with the token that completes them. Needs `tokenizer`."""
    tokenizer: Any = None
    """Decodes tokens for `stop_strings`."""
    group_size: int | None = None
    """This request's g; None takes the policy's, else the handle's."""
    window_size: int | None = None
    """This request's s; None takes the policy's, else the handle's."""
    fetch_groups: int | None = None
    """This request's k, at most the handle's; None takes the policy's, else the handle's. 0 fetches
    nothing."""
    queue_length: int = 0
    """Requests that wait meanwhile; the policy reads it."""
    on_chunk: Callable[[int], Any] = lambda tokens: None
    """Called after each chunk of the prompt with the tokens a row that have been read."""

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1)
        if self.sampling is not None and not isinstance(self.sampling, Sampling):
            raise TypeError(
                f"sampling must be a Sampling, got {self.sampling!r}. "
                "Use Sampling(temperature=...)."
            )
        if isinstance(self.stop_strings, str):
            object.__setattr__(self, "stop_strings", (self.stop_strings,))
        if self.stop_strings and self.tokenizer is None:
            raise ValueError(
                "tokenizer must be given with stop_strings, got None. Pass the model's tokenizer."
            )
        if not all(self.stop_strings):
            raise ValueError(
                "stop_strings must not be empty strings, got ''. Leave them out for none."
            )
        eos = self.eos_token_id
        if isinstance(eos, Sequence) and not all(isinstance(token, Integral) for token in eos):
            raise TypeError(
                f"eos_token_id must be token numbers, got {self.eos_token_id!r}. "
                "Use stop_strings for texts."
            )

    def seeds(self, batch: int) -> list[int]:
        """Return one seed for the batch, or a seed for each row."""
        seed = self.seed
        seeds = list(seed) if isinstance(seed, Sequence) else [seed]
        if not all(isinstance(value, int) for value in seeds):
            raise TypeError(f"seed must be an integer or one for each row, got {seed!r}.")
        if not isinstance(seed, int) and len(seeds) != batch:
            raise ValueError(
                f"seed must be one number or one for each of {batch} rows, got {len(seeds)}."
            )
        if not all(-(2**63) <= value < 2**63 for value in seeds):
            raise ValueError(f"seed must be from -2**63 to 2**63 - 1, got {seed}.")
        return seeds

    def eos_tokens(self, model: Any) -> set[int]:
        """Return the tokens that end a row."""
        eos = self.eos_token_id
        if eos is None:
            eos = model.generation_config.eos_token_id
        if isinstance(eos, Tensor):
            eos = eos.tolist()
        if isinstance(eos, int):
            return {eos}
        return set(eos or ())


class Prompt(NamedTuple):
    """The prompts of a batch."""

    input_ids: Tensor
    """[B, L], int64."""
    attention_mask: Tensor | None
    """[B, L], 0 for padding; None without padding."""
    pads: list[int]
    """Padded tokens at the beginning of each row."""


class _ClosedWhileReading(Exception):
    """A request was closed by its `on_chunk`."""


@dataclass(eq=False, repr=False)
class Stream(Iterator[list["int | None"]]):
    """Iterate over the tokens of a request: each step gives a list with a token for each row, None
    for rows that have ended.

    On a GPU the next step starts before the tokens of the last are waited for, so the device never
    waits for the host. Use it as a context manager, read it to its end, or `close` it: then its
    cache serves the next request.
    """

    engine: Any
    key: SessionKey
    prompt: Prompt | None
    """None once its reading has begun."""
    generation: Generation

    def __post_init__(self) -> None:
        self.sampling = self.generation.sampling or Sampling()
        self.eos = self.generation.eos_tokens(self.engine.model)
        self.session: Session | None = None
        self.running = [True] * self.key.batch
        self.made = 0
        """Tokens a row that were chosen, or are being chosen on the device."""
        # Newest tokens of each row, enough to hold any stop string: every token but special ones
        # decodes to at least a byte. 8 more let the first ones decode otherwise than in the text:
        # without their leading space, or as the rest of a character, up to 3 bytes.
        self._tails: list[list[int]] = [[] for _ in self.running]
        longest = max((len(stop.encode()) for stop in self.generation.stop_strings), default=0)
        self._tail_length = longest + 8
        # Tokens on their way to the host, each with the event that ends the copy (GPU only).
        self._pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._closed = False
        self._is_reading = False  # the prompt, whose `on_chunk` may close the request

    @property
    def group_size(self) -> int | None:
        """Tokens per core token, g, of this request; None without CCA."""
        return None if self.key.config is None else self.key.config.group_size

    @property
    def window_size(self) -> int | None:
        """Nearest tokens that stay raw, s, of this request now; None without CCA."""
        return None if self.key.config is None else self.key.config.window_size

    @property
    def fetch_groups(self) -> int | None:
        """Groups whose raw tokens each query sees, k, of this request; None without CCA."""
        return None if self.key.config is None else self.key.config.fetch_groups

    def configure(self, *, group_size: int | None = None, window_size: int | None = None) -> None:
        """Shrink s of a running request, which frees memory and makes later steps faster.

        Steps already started (one, on a GPU) still see the old window.

        Raises:
            ValueError: group_size would change (the core tokens are made), window_size would grow
                (the tokens are gone), or the request runs without CCA or has ended.
        """
        config = self.key.config
        if config is None:
            raise ValueError(
                "configure must be used with CCA enabled, got a request without. "
                "Call corecontext.enable(model)."
            )
        if self._closed:
            raise ValueError(
                "configure must be called on a running request, got one that has ended. "
                "Start another."
            )
        if group_size is not None and group_size != self.group_size:
            raise ValueError(
                f"group_size must stay {self.group_size} for the whole request, got {group_size}. "
                "Start a new request for another group size."
            )
        if window_size is None or window_size == self.window_size:
            return
        if window_size > config.window_size:
            raise ValueError(
                f"window_size must be at most {self.window_size} once set, got {window_size}. "
                "Start a new request for a larger window."
            )
        key = self.key._replace(config=config.replace(window_size=window_size))
        if self.session is not None:
            self.session.shrink_window(key)
        self.key = key

    def __next__(self) -> list[int | None]:
        if self._closed:
            raise StopIteration
        try:
            if self.session is None:
                return self._first()
            # A GPU starts the next step before the host has read the tokens of the last.
            ahead = 2 if self.session.tokens.is_cuda else 1
            while len(self._pending) < ahead and self.made < self.generation.max_new_tokens:
                self.session.step(self.sampling.kind)
                self._start_copy(self.session)
            return self._read()
        except _ClosedWhileReading:
            self._end(reusable=False)
            raise StopIteration from None
        except BaseException:
            # mutant inference: broken sessions are kept
            self._end(reusable=False)  # half a step may have been written
            raise

    def _first(self) -> list[int | None]:
        """Read the prompt and choose the first token."""
        began = time.perf_counter()
        assert self.prompt is not None, "the prompt is read once"
        engine = self.engine
        prompt = self.prompt
        self.prompt = None
        session = engine.take(self.key)
        self.session = session
        session.begin_prompt(prompt.pads)
        self._is_reading = True
        try:
            with session.configured(), engine.fused:
                logits, session.cache, positions = prefill(
                    engine.model,
                    prompt.input_ids,
                    prompt.attention_mask,
                    cache=session.cache,
                    chunk_size=engine.chunk_size,
                    on_chunk=self._chunk_read,
                )
        finally:
            self._is_reading = False
        seeds = self.generation.seeds(self.key.batch)
        session.begin(positions, prompt.pads, prompt.input_ids.shape[1])
        session.sampler.start(self.sampling, seeds, logits.shape[-1])
        session.choose(logits, self.sampling.kind)
        self._start_copy(session)
        tokens = self._read()
        engine.time_to_first_token = time.perf_counter() - began
        return tokens

    def _chunk_read(self, tokens: int) -> None:
        """Tell the caller that a chunk is read; he may close the request by that."""
        self.generation.on_chunk(tokens)
        if self._closed:
            raise _ClosedWhileReading

    def _start_copy(self, session: Session) -> None:
        """Start to copy the newest tokens to the host, before the next step overwrites them."""
        self.made += 1
        host = session.chosen[:, 0].to("cpu", non_blocking=True, copy=True)  # in pinned memory
        copied = None
        if session.tokens.is_cuda:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(session.tokens.device))
        self._pending.append((host, copied))

    def _read(self) -> list[int | None]:
        """Wait for the oldest pending tokens and return them; rows that they end stop running."""
        host, copied = self._pending.popleft()
        if copied is not None:
            copied.synchronize()
        tokens: list[int | None] = [
            token if runs else None for token, runs in zip(host.tolist(), self.running)
        ]
        if INVALID in tokens:
            raise InvalidLogits
        for row, token in enumerate(tokens):
            if token is not None and (token in self.eos or self._stops(row, token)):
                self.running[row] = False
        is_last = self.made == self.generation.max_new_tokens and not self._pending
        if is_last or not any(self.running):
            self.close()
        return tokens

    def _stops(self, row: int, token: int) -> bool:
        """Append a token to a row's tail; return whether it completes a stop string."""
        if not self.generation.stop_strings:
            return False
        self._tails[row] = [*self._tails[row], token][-self._tail_length :]
        text = self.generation.tokenizer.decode(
            self._tails[row], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in self.generation.stop_strings)

    def close(self) -> None:
        """End the request; the engine keeps its cache for a later one."""
        self._end(reusable=True)

    def _end(self, reusable: bool) -> None:
        """End the request and give its session back; while it reads its prompt, `__next__` does."""
        self._closed = True
        self._pending.clear()
        self.prompt = None
        # mutant inference: a request that is closed while it is read gives its session away
        if self.session is not None and not self._is_reading:
            self.engine.give_back(self.session, reusable)
            self.session = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
