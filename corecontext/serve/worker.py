"""The thread that runs the model, and the way from an asyncio request to it and back."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from corecontext.loading import is_out_of_memory
from corecontext.serve.scheduler import Job, Scheduler
from corecontext.serve.text import TextStream
from corecontext.serve.together import BEAT_S, Apart

log = logging.getLogger("corecontext.serve")


class Draining(Exception):
    """The server is shutting down and takes no more requests."""


class Failed(Exception):
    """A request ended without its answer: "timeout", "cancelled" or "error", said for the
    client."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Answer:
    """The pieces of one request's text, as they are made."""

    def __init__(self, job: Job, text: TextStream, on_end: Callable[[Job], None]) -> None:
        self.job, self.text = job, text
        self.finish_reason: str | None = None
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._on_end = on_end
        job.on_token, job.on_end = self._on_token, self._ended

    def _on_token(self, token: int) -> bool:
        if token not in self.job.eos:
            piece = self.text.push(token)
            if piece:
                self._put(piece)
        return self.text.stopped

    def _ended(self, reason: str) -> None:
        rest = self.text.end() if reason in ("stop", "length") else ""
        if rest:
            self._put(rest)
            if self.text.stopped:
                reason = self.job.ended = "stop"
        self._on_end(self.job)
        self._put(None)

    def _put(self, piece: str | None) -> None:
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[str]:
        """The text; afterwards `finish_reason` is set.

        Raises:
            Failed: the request ended without its answer.
        """
        while (piece := await self._pieces.get()) is not None:
            yield piece
        reason = self.job.ended or "error"
        if reason in ("stop", "length"):
            self.finish_reason = reason
        elif reason == "error":
            memory = self.job.error is not None and is_out_of_memory(self.job.error)
            raise Failed(
                reason,
                "the request ran out of memory. Shorten the prompt, or try again when fewer requests "
                "run."
                if memory
                else "the request failed inside the server, which has noted why.",
            )
        elif reason == "cancelled":
            raise Failed(
                reason,
                "the server was stopped before the request came to its end. Try another one.",
            )
        else:
            raise Failed(
                reason,
                f"the request took longer than its time limit; {self.job.made} tokens were made. "
                "Ask for fewer new tokens, or try again when fewer requests run.",
            )


class Worker:
    """Runs a scheduler in a thread of its own.

    Args:
        scheduler: What it runs.
        on_end: Called with each job that has ended, on the worker's thread.
    """

    def __init__(
        self, scheduler: Scheduler, on_end: Callable[[Job], None] = lambda job: None
    ) -> None:
        self.scheduler, self.on_end, self.draining = scheduler, on_end, False
        self.failed = False
        """Whether the thread has ended because nothing can be run any more."""
        self._wake, self._stop = threading.Event(), False
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

    def submit(self, job: Job, text: TextStream) -> Answer:
        """Hand a request over; called on the event loop.

        Raises:
            Draining: the server shuts down.
            ValueError, QueueFull: as `Scheduler.submit`.
        """
        if self.draining or not self.alive:
            raise Draining(
                "the server is shutting down and takes no more requests. Try another one."
            )
        answer = Answer(job, text, self.on_end)
        self.scheduler.submit(job)
        self._wake.set()
        return answer

    def cancel(self, answer: Answer) -> None:
        """The client has gone: free what its request holds before the next step. Nothing happens
        after its end."""
        self.scheduler.cancel(answer.job)
        self._wake.set()

    def stop(self, timeout: float = 60.0) -> None:
        """End the thread; requests that still run are cancelled."""
        self.draining = self._stop = True
        self._wake.set()
        if self.alive:
            self._thread.join(timeout)

    def _run(self) -> None:
        together = self.scheduler.together
        try:
            while not self._stop:
                if self._turn():
                    continue
                if not self._wake.wait(BEAT_S) and together is not None:
                    together.beat()
                self._wake.clear()
            for job in [*self.scheduler.waiting, *self.scheduler.active()]:
                self.scheduler.cancel(job)
            while not self.scheduler.idle and self._turn():
                pass
            if together is not None:
                together.close()
        except (
            Apart
        ) as error:  # health then says so, and whatever watches over the server starts another one
            log.exception("a process that has a part of the model is gone")
            self.draining = self.failed = True
            self.scheduler.abandon(error)

    def _turn(self) -> bool:
        """One turn; an error that no request could be blamed for is noted, and ends none of the
        others."""
        try:
            return self.scheduler.step()
        except Apart:
            raise
        except Exception:
            log.exception("a turn of the scheduler failed")
            return not self.scheduler.idle


def error_of(job: Job) -> dict[str, Any]:
    """What a log line says of a job's error: its kind and where it was raised, never its text,
    which may quote."""
    if job.error is None:
        return {}
    where = job.error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = "" if where is None else f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
    return {"error": type(job.error).__name__, "at": place}
