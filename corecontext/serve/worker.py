"""Run the model in a thread of its own, and carry requests and tokens between it and asyncio."""

import asyncio
import logging
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from corecontext.files import is_out_of_memory
from corecontext.inference.sampling import InvalidLogits
from corecontext.serve.errors import Code, RequestError, draining, internal_error
from corecontext.serve.request import Request, Slot, TokenLogprobs
from corecontext.serve.scheduler import Scheduler
from corecontext.serve.text import TextStream

log = logging.getLogger("corecontext.serve")
FINISHED = ("stop", "length")
"""Reasons to end a request with a whole answer."""


@dataclass(eq=False)
class Answer:
    """The text of one request, piece by piece: tokens come on the worker's thread, pieces go to
    asyncio."""

    request: Request
    text: TextStream
    """Decodes its tokens."""
    on_end: Callable[[Slot], None]
    """Called with the slot that has ended, on the worker's thread."""
    slot: Slot | None = None
    """The request on its way; None until it is submitted."""
    finish_reason: str | None = None
    """"stop" or "length", once the text has come."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | list[TokenLogprobs] | None] = asyncio.Queue()
        self.logprobs: list[TokenLogprobs] = []
        """Of the tokens so far, for a `LogprobsWriter`, which empties it."""

    def on_token(self, token: int) -> bool:
        """Take a new token; return whether a stop text ends the answer with it."""
        if token not in self.request.eos:
            piece = self.text.push(token)
            if piece:
                self._put(piece)
        return self.text.stopped

    def on_ended(self, slot: Slot) -> None:
        """Take the end of the request, and tell the client of it, whatever fails here."""
        try:
            if slot.end_reason in FINISHED:
                self._end_text(slot)
        # mutant serve: a client waits where the end of its text fails
        except Exception as error:
            slot.end_reason = "error"
            slot.error = error
        try:
            self.on_end(slot)
        finally:
            self._put(None)

    def _end_text(self, slot: Slot) -> None:
        """Send the text that was held back; a stop text may be found in it."""
        rest = self.text.end()
        if rest:
            self._put(rest)
        # mutant serve: a stop text in the last characters does not count
        if self.text.stopped:
            slot.end_reason = "stop"

    def on_logprobs(self, records: list[TokenLogprobs]) -> None:
        """Take the log-probabilities of the next tokens."""
        self._put(records)

    def _put(self, piece: str | list[TokenLogprobs] | None) -> None:
        """Hand a piece to asyncio; None is the end."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text in pieces; afterwards `finish_reason` is set.

        Raises:
            RequestError: the request ended without its answer.
        """
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, str):
                yield piece
            else:
                self.logprobs += piece
        assert self.slot is not None, "a request that has ended was submitted"
        if self.slot.end_reason not in FINISHED:
            raise _failure(self.slot)
        self.finish_reason = self.slot.end_reason


def _failure(slot: Slot) -> RequestError:
    """Return the error of a request that ended without its answer."""
    if slot.end_reason == "timeout":
        return RequestError(
            Code.TIMEOUT,
            f"the request took longer than its time limit; {slot.made} tokens were made. Ask for "
            "fewer new tokens, or try again when fewer requests run.",
        )
    if slot.end_reason == "cancelled":
        return RequestError(
            Code.CANCELLED,
            "the server was stopped before the request came to its end. Try another one.",
        )
    if slot.error is not None and is_out_of_memory(slot.error):
        return RequestError(
            Code.OUT_OF_MEMORY,
            "the request ran out of memory. Shorten the prompt, or try again when fewer requests "
            "run.",
        )
    if isinstance(slot.error, InvalidLogits):
        return RequestError(Code.INTERNAL, str(slot.error))
    return internal_error()


@dataclass(eq=False)
class Worker:
    """Run a scheduler in a thread of its own."""

    scheduler: Scheduler
    """Runs the model, which no other thread may use."""
    on_end: Callable[[Slot], None] = lambda slot: None
    """Called with each slot that has ended, on the worker's thread."""
    draining: bool = False
    """Whether new requests are refused."""
    failed: bool = False
    """Whether the thread has ended because the model cannot run any more."""

    def __post_init__(self) -> None:
        self._stop = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="corecontext-model", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return self.scheduler.idle

    def submit(self, request: Request, text: TextStream) -> Answer:
        """Hand a request to the scheduler; called on the event loop.

        Raises:
            RequestError: the server shuts down, or as `Scheduler.submit`.
            ValueError: as `Scheduler.submit`.
        """
        if self.draining or not self.alive:
            raise draining()
        answer = Answer(request, text, self.on_end)
        answer.slot = self.scheduler.submit(
            request, answer.on_token, answer.on_ended, answer.on_logprobs
        )
        self._wake.set()
        return answer

    def cancel(self, answer: Answer) -> None:
        """End a request, as when its client has gone; without effect after its end."""
        if answer.slot is not None:
            self.scheduler.cancel(answer.slot)
        self._wake.set()

    def stop(self, timeout: float = 60.0) -> None:
        """End the thread; requests that still run are cancelled."""
        self.draining = True
        self._stop = True
        self._wake.set()
        if self.alive:
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stop:
                if self.scheduler.run_turn():
                    continue
                self._wake.wait()
                self._wake.clear()
            self.scheduler.close()
            for slot in [*self.scheduler.waiting, *self.scheduler.active()]:
                self.scheduler.cancel(slot)
            while self.scheduler.run_turn():
                pass
        # mutant serve: a broken device leaves its clients waiting
        except Exception as error:
            # The error is no single request's: the device is broken. The exit code then tells a
            # supervisor, such as systemd, to start the server anew.
            log.exception("the model cannot run any more")
            self.draining = True
            self.failed = True
            self.scheduler.abandon(error)


def error_of(slot: Slot) -> dict[str, Any]:
    """Return a request's error as fields of a log line: its class and the place where it was
    raised, never its text, which may quote the prompt."""
    if slot.error is None:
        return {}
    frames = traceback.extract_tb(slot.error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames]
    # mutant serve: the text of a request's error in the log
    return {"error": type(slot.error).__name__, "at": "".join(places[-1:])}
