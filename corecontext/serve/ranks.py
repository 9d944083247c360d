"""Send the first rank's events to the other ranks of a split model.

Transformers splits a model over ranks; each has its heads and their cache. Whatever depends on
time, clients or text is known to the first rank alone: which request leaves the queue with which
settings, which request ends, which tokens were made. It sends these events at the beginning of a
turn, and again after a prompt was read in it, and the other ranks repeat them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BEAT_S = 300.0
"""Longest pause between two messages of the first rank."""
SILENCE = timedelta(seconds=12 * BEAT_S)
"""Silence after which the other ranks take the first for dead."""


class RankLost(Exception):
    """A rank does not answer any more, or has come to another state than the first rank."""


class Ranks:
    """One rank's end of the exchange.

    The ranks are those of torch.distributed, and all must make this object at the same point.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=SILENCE)
        self.size = dist.get_world_size()
        self.leads = dist.get_rank() == 0
        self._events: list[tuple] = []

    def note(self, *event: Any) -> None:
        """Remember an event for the other ranks; without effect on them."""
        if self.leads:
            self._events.append(event)

    @property
    def has_events(self) -> bool:
        """Whether events are to be sent."""
        return bool(self._events)

    def tell(self, tokens: Sequence[int]) -> None:
        """Send the remembered events, and the newest token of each running request.

        Raises:
            RankLost: a rank is gone.
        """
        events = self._events
        self._events = []
        self._broadcast((events, list(tokens)))

    def beat(self) -> None:
        """Show the other ranks, while there is no work, that the first rank lives."""
        self.tell(())

    def close(self) -> None:
        """Let the other ranks end."""
        self._broadcast(None)

    def hear(self) -> tuple[list[tuple], list[int]] | None:
        """Wait for the first rank's events and tokens; None where it closes.

        Raises:
            RankLost: it is gone.
        """
        return self._broadcast(None)

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        return int(values)

    def _broadcast(self, message: Any) -> Any:
        """Return the first rank's message; those of the other ranks are ignored."""
        messages = [message]
        try:
            dist.broadcast_object_list(messages, src=0, group=self.group)
        except RuntimeError as error:
            raise RankLost(f"a process of this model is gone: {error}") from error
        return messages[0]
