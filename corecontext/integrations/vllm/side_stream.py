"""Run launches that nothing else of a step reads beside the layer's attention and products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from corecontext.ops.triton.paged.chunk import LONG_CHUNK


class SideStream:
    """Run launches on a stream of their own, for all layers of a worker. The step's last layer
    waits for them.

    Args:
        most_captured: Most new tokens of a step whose parts between attention are replayed. Replays
            of later layers write where such a step has its queries, keys and values, so nothing
            runs beside them.
    """

    def __init__(self, most_captured: int) -> None:
        self.fewest = max(LONG_CHUNK, most_captured + 1)
        self.stream: torch.cuda.Stream | None = None

    def takes(self, tokens: Tensor) -> bool:
        """Whether launches that read these new tokens [T, heads, D] may run beside the step."""
        return tokens.device.type == "cuda" and tokens.shape[0] >= self.fewest

    @contextlib.contextmanager
    def beside(self, inputs: Iterable[Tensor], is_last: bool) -> Iterator[None]:
        """Launch on the stream for the length of a with block.

        Args:
            inputs: Tensors of this layer that the launches read.
            is_last: Whether no later layer of the worker launches there in this step.
        """
        inputs = list(inputs)
        current = torch.cuda.current_stream(inputs[0].device)
        if self.stream is None:
            # Its programs start before those of products that wait for a multiprocessor.
            self.stream = torch.cuda.Stream(inputs[0].device, priority=-1)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        for x in inputs:
            x.record_stream(self.stream)
        if is_last:
            current.wait_stream(self.stream)
