"""Send rank 0's events to the other ranks of a split model.

Transformers splits a model over ranks; each has its heads and their cache. Whatever depends on
time, clients or text is known to rank 0 alone: which request leaves the queue with which settings,
which request ends, which tokens were made. It sends these events at the beginning of a turn, and
again after a prompt was read in it, and the other ranks repeat them.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

HEARTBEAT_S = 300.0
"""Longest pause between two messages of rank 0."""
SILENCE = timedelta(seconds=12 * HEARTBEAT_S)
"""Silence after which the other ranks take rank 0 for dead."""


class RankLost(Exception):
    """A rank does not answer any more, or has come to another state than rank 0."""


class Ranks:
    """One rank's end of the exchange.

    The ranks are those of torch.distributed, and all must make this object at the same point.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=SILENCE)
        self.size = dist.get_world_size()
        self.is_rank_0 = dist.get_rank() == 0
        self.events: list[tuple] = []
        """For the next broadcast."""

    def record(self, *event: Any) -> None:
        """Keep an event for the next broadcast; without effect on the other ranks."""
        if self.is_rank_0:
            self.events.append(event)

    def broadcast(self, tokens: Sequence[int] = ()) -> None:
        """Send the recorded events, and the newest token of each running request; without either it
        shows the other ranks, while there is no work, that rank 0 lives.

        Raises:
            RankLost: a rank is gone.
        """
        events = self.events
        self.events = []
        self._exchange((events, list(tokens)))

    def close(self) -> None:
        """Let the other ranks end."""
        self._exchange(None)

    def receive(self) -> tuple[list[tuple], list[int]] | None:
        """Wait for rank 0's events and tokens; None where it closes.

        Raises:
            RankLost: it is gone.
        """
        return self._exchange(None)

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        return int(values)

    def _exchange(self, message: Any) -> Any:
        """Return rank 0's message; those of the other ranks are ignored."""
        messages = [message]
        try:
            dist.broadcast_object_list(messages, src=0, group=self.group)
        except RuntimeError as error:
            raise RankLost(f"a process of this model is gone: {error}") from error
        return messages[0]
