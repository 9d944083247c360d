"""The scheduler of every process but the first one of those that a model is split over: it decides
nothing."""

from __future__ import annotations

from typing import Any

from corecontext.config import CCAConfig
from corecontext.serve.rows import RowPool
from corecontext.serve.scheduler import Job, Scheduler
from corecontext.serve.together import Apart


class Follower(Scheduler):
    """Does what the first process's scheduler does, with this process's part of the model and of
    the caches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._jobs: dict[int, Job] = {}

    def follow(self) -> None:
        """Run until the first process closes.

        Raises:
            Apart: the first process is gone, or this one failed where that one did not.
        """
        while self._hear():
            if self._read():
                self._hear()
            self._decode()

    def _hear(self) -> bool:
        told = self.together.hear()
        if told is None:
            return False
        (events, tokens), place = told, None
        for kind, *what in events:
            if kind == "place":
                place = self._place(*what)
            elif kind == "start":
                self._start(place, *what)
            elif kind == "end":
                job = self._jobs.pop(what[0])
                if job.ended is None:
                    self._end(job, "ended")
            else:
                self._clear()
        if any(job.ended for job in self._jobs.values()):
            raise Apart("this process failed at a request that the first one goes on with.")
        for job, token in zip(self._in_rows(), tokens, strict=True):
            job.last_token = token
        return True

    def _start(
        self, pool: RowPool | None, number: int, config: CCAConfig | None, *what: Any
    ) -> None:
        """A request has left the queue of the first process."""
        job = self._jobs[number] = Job(*what, config=config, pool=pool)
        if pool is None:
            raise Apart(
                f"this process has no room for {job.length} tokens, which the first one has."
            )
        self.reading.append(job)

    def _take(self, job: Job, token: int) -> str | None:
        job.made += 1
        return None  # which token it was, and whether it is the last, the first process says
