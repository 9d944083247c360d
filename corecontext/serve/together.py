"""One scheduler run by several processes in step, each with its part of the model (tensor
parallelism).

Transformers splits a model over processes; each has its heads and their cache. What depends on
time, on clients or on text is known to the first process alone: who leaves the queue with which
settings, who ends, which tokens were made. It tells the others at the beginning of a turn, and
again where a prompt was read in it, and they do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BEAT_S = 300.0  # the others hear from the first so often at least
SILENCE = timedelta(seconds=12 * BEAT_S)  # after which they take it for dead


class Apart(Exception):
    """A process does not answer any more, or has come to something else than the first one."""


class Together:
    """One process's end. The processes are those of torch.distributed, and all make this at the
    same place."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=SILENCE)
        self.size, self.leads = dist.get_world_size(), dist.get_rank() == 0
        self._news: list[tuple] = []

    def note(self, *event: Any) -> None:
        """Remember what the others must be told; the first process does."""
        if self.leads:
            self._news.append(event)

    @property
    def has_news(self) -> bool:
        """Whether something is remembered."""
        return bool(self._news)

    def tell(self, tokens: Sequence[int]) -> None:
        """Tell all others what is remembered, and the newest token of each running request.

        Raises:
            Apart: one of them is gone.
        """
        news, self._news = self._news, []
        self._exchange((news, list(tokens)))

    def beat(self) -> None:
        """Let the others hear, while nothing is to be done, that the first process lives."""
        self.tell(())

    def close(self) -> None:
        """Let the others end."""
        self._exchange(None)

    def hear(self) -> Any:
        """What the first process says next.

        Raises:
            Apart: it is gone.
        """
        return self._exchange(None)

    def least(self, value: int) -> int:
        """The smallest of all processes' values."""
        held = torch.tensor([value])
        dist.all_reduce(held, dist.ReduceOp.MIN, group=self.group)
        return int(held)

    def _exchange(self, what: Any) -> Any:
        held = [what]
        try:
            dist.broadcast_object_list(held, src=0, group=self.group)
        except RuntimeError as error:
            raise Apart(f"a process of this model is gone: {error}") from error
        return held[0]
