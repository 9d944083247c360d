"""The state of one batch being decoded: its cache, its buffers, and its step, captured in a CUDA
graph on a GPU."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from corecontext.config import CCAConfig
from corecontext.inference.sampling import Sampler
from corecontext.integrations.hf_cache import CCALayer, layer_bytes
from corecontext.integrations.transformers import Handle

WARM_UP = (
    2  # steps that run uncaptured first: kernels are compiled and chosen, and workspaces allocated
)


@functools.cache
def side_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """Where steps that will be replayed on `current` are warmed up and captured: one stream for all
    of them, because cuBLAS keeps a workspace, on Hopper of 32 MiB, for every stream that it has
    seen."""
    return torch.cuda.Stream(current.device)


class Session:
    """Cache and buffers for batches of one size, length, g and s; used for one request after
    another.

    Where every layer is compact and `static` is set, the cache has fixed buffers and a step reads
    and writes tensors that never move. Otherwise (sliding-window layers, no CCA, a CPU) the cache
    grows and steps are not captured.

    Args:
        model: The model; its forward makes the step.
        handle: Its CCA handle, or None for full attention.
        config: CCA's settings for this session; None without a handle.
        batch, max_length: Rows, and most tokens a row.
        streams: Random streams, 1 or `batch`.
        static: Whether to use fixed buffers where the model allows it.
        capture: Whether to capture steps in CUDA graphs where buffers are fixed.
        forward: What runs a step where buffers are fixed: the model, or a compiled one.
    """

    def __init__(
        self,
        model: Any,
        handle: Handle | None,
        config: CCAConfig | None,
        batch: int,
        max_length: int,
        streams: int,
        *,
        static: bool,
        capture: bool,
        forward: Any,
    ) -> None:
        self.model, self.handle, self.config = model, handle, config
        self.batch, self.max_length = batch, max_length
        self._compact = handle is not None and not handle.hybrid
        self.fixed = static and self._compact
        self.forward = forward if self.fixed else model
        device = model.device
        self.capture = capture and self.fixed and device.type == "cuda"
        self.cache = self._new_cache()
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.mask: Tensor | None = (
            None  # [B, max_length] for padded rows beside layers that are not compact
        )
        self.length = 0
        self.sampler = Sampler(batch, device, streams)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._warm: dict[str, int] = {}

    def _new_cache(self) -> Any:
        if self.fixed:
            return StaticCache(self.model.config, max_cache_len=self.max_length)
        return DynamicCache(config=self.model.config)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the cache holds."""
        return sum(
            layer.compact.allocated_bytes if isinstance(layer, CCALayer) else layer_bytes(layer)
            for layer in self.cache.layers
        )

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The model set to this session's g and s, and back: sessions with other settings may run
        in between."""
        before = None if self.handle is None else self.handle.config
        if before is None or before == self.config:
            yield
            return
        self.handle.configure(**self.config.to_dict())
        try:
            yield
        finally:
            # planted: inference: a request leaves its settings behind
            self.handle.configure(**before.to_dict())

    def reset(self) -> None:
        """Make ready for the next request; fixed buffers stay where they are, for the captured
        steps."""
        if self.fixed:
            self.cache.reset()
        else:
            self.cache = self._new_cache()
        self.mask, self.length = None, 0

    def begin(self, positions: Tensor, pads: list[int], length: int) -> None:
        """Take over a prefilled prompt of so many slots; positions [B] are those of the next
        tokens."""
        self.positions.copy_(positions[:, None])
        self.length = length
        if max(pads) and not self._compact:
            slots = torch.arange(self.max_length, device=positions.device)
            self.mask = (slots >= torch.tensor(pads, device=positions.device)[:, None]).long()

    def shrink_window(self, window_size: int) -> None:
        """See `CompactLayer.shrink_window`; buffers move, so steps are captured anew."""
        self.config = self.config.replace(window_size=window_size)
        self._graphs.clear()
        self._warm.clear()
        for layer in self.cache.layers:
            if isinstance(layer, CCALayer):
                layer.compact.shrink_window(window_size)

    def step(self, kind: str) -> None:
        """Feed `tokens`, put the next ones in their place. Nothing is read by the host."""
        self.length += 1
        if not self.capture:
            self._step(kind)
            return
        with torch.cuda.device(
            self.tokens.device
        ):  # graphs and streams belong to it, not to the current device
            self._replay(kind)

    def _replay(self, kind: str) -> None:
        """A captured step; the first ones run uncaptured, and the one after them is captured before
        it is replayed."""
        if kind in self._graphs:
            self._graphs[kind].replay()
        elif self._warm.setdefault(kind, 0) < WARM_UP:
            self._warm[kind] += 1
            current = torch.cuda.current_stream()
            side = side_stream(current)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self._step(kind)
            current.wait_stream(side)
        else:
            try:
                self._graphs[kind] = self._captured(kind)
            except RuntimeError as error:  # recording ran nothing: the step is still to be done
                warnings.warn(
                    f"a step of {type(self.model).__name__} cannot be captured in a CUDA graph, so its steps "
                    f"run uncaptured, which is slower: {error}",
                    stacklevel=2,
                )
                self.capture = False
                self._step(kind)
                return
            self._graphs[kind].replay()

    def _captured(self, kind: str) -> torch.cuda.CUDAGraph:
        """A step as a graph; recording it runs nothing."""
        graph = torch.cuda.CUDAGraph()
        for generator in self.sampler.generators:
            graph.register_generator_state(generator)  # each replay then draws further numbers
        with torch.cuda.graph(graph, stream=side_stream(torch.cuda.current_stream())):
            self._step(kind)
        return graph

    @torch.no_grad()
    def _step(self, kind: str) -> None:
        mask = None if self.mask is None else self.mask[:, : self.length]
        with self.settings():
            out = self.forward(
                self.tokens,
                attention_mask=mask,
                position_ids=self.positions,
                past_key_values=self.cache,
                use_cache=True,
            )
        self.tokens.copy_(self.sampler.choose(out.logits[:, -1], kind))
        self.positions.add_(1)
