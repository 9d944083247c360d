"""Store the raw tokens of prompts in host memory beside a step's products, which the bus would hold
up: those of many tokens behind each layer's attention, those of few behind the last layer's."""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.ops.triton.paged.copy_tokens import copy_tokens
from corecontext.ops.triton.paged.pages import Pages
from corecontext.ops.triton.paged.store_tokens import store_tokens

PROGRAMS = 8
"""Programs that store to host memory: enough for the bus, and most multiprocessors stay free
(docs/tuning-notes.md)."""
FEWEST = 2048
"""Least new tokens of a step that each layer stores: events and the change of streams cost the host
more time than the bus takes for fewer, and short prompts wait for the host."""


class HostWrites:
    """Store new tokens on a stream of their own, for all layers of a worker.

    What a step writes is in host memory when the next step begins. No token of the same step reads
    it there: one that shares it waits for the next step (`cache_managers.CoreManager`), and all
    others have it in the window or as new tokens.

    Args:
        most_captured: Most new tokens of a step whose parts between attention are replayed. Replays
            of later layers write where such a step has its keys and values, so none of them is
            stored by its layer.
    """

    def __init__(self, most_captured: int) -> None:
        self.fewest = max(FEWEST, most_captured + 1)
        self.stream: torch.cuda.Stream | None = None
        self.layers: list[tuple[Pages, Pages]] = []
        """Pages of the layers whose tokens the last one of the step stores."""
        self.is_pending = False
        """Whether the step before may still be storing."""

    def store(
        self,
        new: tuple[Tensor, Tensor],
        slots: tuple[Tensor, Tensor],
        pages: tuple[Pages, Pages],
        is_last: bool,
    ) -> None:
        """Store the new tokens of a layer, which are in pages of the device.

        Args:
            new: Keys and values [T, Hkv, D].
            slots: In pages of the device and of the host, as of `copy_tokens`.
            pages: Of the device and of the host.
            is_last: Whether no later layer of the worker stores in this step.
        """
        if slots[1].shape[0] >= self.fewest and on_gpu(new[0]):
            self._store_layer(new, slots[1], pages[1], is_last)
            return
        self.layers.append(pages)
        if is_last:
            self._store_step(slots)

    def wait(self) -> None:
        """Let the current stream wait for what the step before stores. It must be called before
        anything of a step reads or writes pages."""
        self.layers = []  # those of a step that failed
        if self.is_pending:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.is_pending = False

    def _store_layer(
        self, new: tuple[Tensor, Tensor], slots: Tensor, pages: Pages, is_last: bool
    ) -> None:
        """Store the new tokens of a layer beside what it does next."""
        stream = self._follow(new[0].device)
        with torch.cuda.stream(stream):
            store_tokens(*new, slots, pages, PROGRAMS)
        for x in new:
            x.record_stream(stream)
        if is_last:
            self.is_pending = True
            self.wait()

    def _store_step(self, slots: tuple[Tensor, Tensor]) -> None:
        """Store the new tokens of all layers beside what follows the last one."""
        layers, self.layers = self.layers, []
        if not on_gpu(slots[0]):
            copy_tokens(layers, *slots)
            return
        # The next step writes its slots where these are.
        slots = torch.stack(slots)
        stream = self._follow(slots.device)
        with torch.cuda.stream(stream):
            copy_tokens(layers, *slots, PROGRAMS)
        slots.record_stream(stream)
        self.is_pending = True

    def _follow(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of the stores, behind what the current one has done."""
        if self.stream is None:
            # Its programs start before those of products that wait for a multiprocessor.
            self.stream = torch.cuda.Stream(device, priority=-1)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        return self.stream


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is on a GPU, which has more than one stream."""
    return x.device.type == "cuda"
