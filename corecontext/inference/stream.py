"""One running request: its prompt is read, then its tokens come one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from corecontext.inference.prefill import prefill
from corecontext.inference.sampling import Sampling
from corecontext.inference.session import Session


class Stream(Iterator[list["int | None"]]):
    """The tokens of one running request: one list per step with a token for each row, None for rows
    that have ended.

    On a GPU the next step is started before the tokens of the last are waited for, so the device
    never waits for the host. Use it as a context manager, or read it to its end, or `close` it:
    then its cache serves the next request.
    """

    def __init__(
        self,
        engine: Any,
        key: tuple,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pads: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: list[int],
        eos: set[int],
        stop_strings: tuple[str, ...],
        tokenizer: Any,
        on_chunk: Callable[[int], Any],
    ) -> None:
        self.engine, self.key, self.sampling, self.seeds = engine, key, sampling, seeds
        self.prompt: tuple | None = (input_ids, attention_mask, pads)
        self.max_new_tokens, self.eos, self.on_chunk = max_new_tokens, eos, on_chunk
        self.stop_strings, self.tokenizer = stop_strings, tokenizer
        self.session: Session | None = None
        self.running = [True] * input_ids.shape[0]
        self.made = 0
        """Steps whose tokens were started."""
        self._tails: list[list[int]] = [[] for _ in self.running]
        # A token has at least a byte, special ones aside, so this many of the newest tokens hold
        # any stop string.
        self._tail_length = max((len(stop.encode()) for stop in stop_strings), default=0) + 8
        self._pending: deque[tuple[Tensor, Any]] = deque()
        self._closed = False

    @property
    def group_size(self) -> int | None:
        """Tokens per core token, g, of this request; None without CCA."""
        config = self.key[2] if self.session is None else self.session.config
        return None if config is None else config.group_size

    @property
    def window_size(self) -> int | None:
        """Nearest tokens kept as they are, s, now; None without CCA."""
        config = self.key[2] if self.session is None else self.session.config
        return None if config is None else config.window_size

    def configure(self, *, group_size: int | None = None, window_size: int | None = None) -> None:
        """Change s of a running request: shrink it, which frees memory and speeds up every further
        step.

        Steps already started (one, on a GPU) still see the old window.

        Raises:
            ValueError: group_size would change (the core tokens are made), window_size would grow
                (the tokens are gone), or the request runs without CCA or has ended.
        """
        if self.group_size is None:
            raise ValueError(
                "configure must be used with CCA enabled, got a request without. "
                "Call corecontext.enable(model)."
            )
        if self._closed:
            raise ValueError(
                "configure must be called on a running request, got one that has ended. Start another."
            )
        if group_size is not None and group_size != self.group_size:
            raise ValueError(
                f"group_size must stay {self.group_size} for the whole request, got {group_size}. "
                "Start a new request for another group size."
            )
        if window_size is None or window_size == self.window_size:
            return
        if window_size > self.window_size:
            raise ValueError(
                f"window_size must be at most {self.window_size} once set, got {window_size}. "
                "Start a new request for a larger window."
            )
        if self.session is None:
            batch, room, config, streams = self.key
            self.key = batch, room, config.replace(window_size=window_size), streams
        else:
            self.session.shrink_window(window_size)

    def __next__(self) -> list[int | None]:
        if self._closed:
            raise StopIteration
        try:
            if self.made == 0:
                return self._first()
            ahead = 2 if self.session.tokens.is_cuda else 1
            while len(self._pending) < ahead and self.made < self.max_new_tokens:
                self._start_step()
            return self._read()
        except BaseException:
            # planted: inference: broken sessions are kept
            self._end(reusable=False)  # half a step may have been written
            raise

    def _first(self) -> list[int | None]:
        """Read the prompt and choose the first token."""
        began = time.perf_counter()
        engine, (input_ids, attention_mask, pads) = self.engine, self.prompt
        self.prompt = None
        session = self.session = engine.take(self.key)
        with session.settings(), engine.fused:
            logits, session.cache, positions = prefill(
                engine.model,
                input_ids,
                attention_mask,
                cache=session.cache,
                chunk_size=engine.chunk_size,
                on_chunk=self.on_chunk,
            )
        session.begin(positions, pads, input_ids.shape[1])
        session.sampler.start(self.sampling, self.seeds, logits.shape[-1])
        session.tokens.copy_(session.sampler.choose(logits, self.sampling.kind))
        self._push()
        tokens = self._read()
        engine.time_to_first_token = time.perf_counter() - began
        return tokens

    def _start_step(self) -> None:
        self.session.step(self.sampling.kind)
        self._push()

    def _push(self) -> None:
        """Start copying the newest tokens to the host, before the next step overwrites them."""
        self.made += 1
        tokens = self.session.tokens
        if not tokens.is_cuda:
            self._pending.append((tokens[:, 0].clone(), None))
            return
        host = torch.empty(len(tokens), dtype=tokens.dtype, device="cpu", pin_memory=True)
        host.copy_(tokens[:, 0], non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(tokens.device))
        self._pending.append((host, copied))

    def _read(self) -> list[int | None]:
        """The oldest tokens not read yet; rows that they end stop running."""
        host, copied = self._pending.popleft()
        if copied is not None:
            copied.synchronize()
        found: list[int | None] = [
            token if runs else None for token, runs in zip(host.tolist(), self.running)
        ]
        for row, token in enumerate(found):
            if token is not None and (token in self.eos or self._stops(row, token)):
                self.running[row] = False
        if not any(self.running) or (self.made == self.max_new_tokens and not self._pending):
            self.close()
        return found

    def _stops(self, row: int, token: int) -> bool:
        """Whether this token completes a stop string."""
        if not self.stop_strings:
            return False
        tail = self._tails[row] = [*self._tails[row], token][-self._tail_length :]
        text = self.tokenizer.decode(
            tail, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in self.stop_strings)

    def close(self) -> None:
        """End the request; its cache is free for the next."""
        self._end(reusable=True)

    def _end(self, reusable: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._pending.clear()
        self.prompt = None
        if self.session is not None:
            session, self.session = self.session, None
            self.key = (*self.key[:2], session.config, self.key[3])
            self.engine.give_back(self.key, session, reusable)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
