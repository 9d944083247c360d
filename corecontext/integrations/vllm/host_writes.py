"""Store the raw tokens of prompts in host memory beside the layer's products behind attention: the
bus takes a quarter of the time of these."""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.ops.triton.paged.pages import Pages
from corecontext.ops.triton.paged.store_tokens import store_tokens

PROGRAMS = 8
"""Programs that store to host memory: enough for the bus, and most multiprocessors stay free
(docs/tuning-notes.md)."""


FEWEST = 2048
"""Least new tokens of a step that are stored on the other stream: events and the change of streams
cost the host more time than the bus takes for fewer, and short prompts wait for the host."""


class HostWrites:
    """Store new tokens on a stream of their own, for all layers of a worker.

    What a step writes is in host memory when the step ends, since its last layer waits. No token of
    the same step reads it there: one that shares it waits for the next step
    (`cache_managers.CoreManager`), and all others have it in the window or as new tokens.

    Args:
        most_captured: Most new tokens of a step whose parts between attention are replayed. Replays
            of later layers write where such a step has its keys and values, so they are stored at
            once.
    """

    def __init__(self, most_captured: int) -> None:
        self.fewest = max(FEWEST, most_captured + 1)
        self.stream: torch.cuda.Stream | None = None

    def store(self, new: tuple[Tensor, Tensor], slots: Tensor, pages: Pages, is_last: bool) -> None:
        """Store new tokens.

        Args:
            new: Keys and values [T, Hkv, D].
            slots: As of `store_tokens`.
            pages: In host memory.
            is_last: Whether no later layer of the worker stores in this step.
        """
        k, v = new
        if k.device.type != "cuda" or slots.shape[0] < self.fewest:
            store_tokens(k, v, slots, pages)
            return
        current = torch.cuda.current_stream(k.device)
        if self.stream is None:
            # Its programs start before those of products that wait for a multiprocessor.
            self.stream = torch.cuda.Stream(k.device, priority=-1)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            store_tokens(k, v, slots, pages, PROGRAMS)
        for x in new:
            x.record_stream(self.stream)
        if is_last:
            current.wait_stream(self.stream)
