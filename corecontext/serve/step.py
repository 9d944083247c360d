"""One decoding step of requests in several pools: the model runs once over all rows, attention pool
by pool."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from corecontext.inference.session import WARM_UP, side_stream
from corecontext.integrations.hf_cache import GivenLayer
from corecontext.serve.rows import PooledLayer, RowPool

KEEP_GRAPHS = 64  # steps of as many different (pool, rows) are kept captured

Parts = tuple[tuple[RowPool, int], ...]
"""Pools, and how many of the first rows of each take part."""


class Step:
    """Buffers of a step over the rows of some pools; captured in a CUDA graph where it is given
    memory for graphs."""

    def __init__(self, model: Any, parts: Parts, memory: Any, warm: int = 0) -> None:
        self.model, self.parts, self.memory, self.warm, device = (
            model,
            parts,
            memory,
            warm,
            model.device,
        )
        rows = sum(count for _, count in parts)
        self.tokens, self.positions = (
            torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in range(2)
        )
        self._hold()
        layers = zip(*(pool.layers for pool, _ in parts))
        self.cache = Cache(
            layers=[
                GivenLayer(PooledLayer([(count, layer) for (_, count), layer in zip(parts, own)]))
                for own in layers
            ]
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def _hold(self) -> None:
        for pool, count in self.parts:
            pool.hold(count)

    @torch.no_grad()
    def _run(self) -> Tensor:
        out = self.model(
            self.tokens, position_ids=self.positions, past_key_values=self.cache, use_cache=True
        )
        return out.logits[:, -1]

    def run(self) -> Tensor:
        """Feed `tokens`: logits [rows, vocabulary]."""
        if self.graph is None:
            self._hold()
        if self.memory is None:
            return self._run()
        with torch.cuda.device(
            self.tokens.device
        ):  # graphs and streams belong to it, not to the current device
            return self._captured()

    def _captured(self) -> Tensor:
        """A captured step; the first ones run uncaptured, and the one after them is captured before
        it is replayed."""
        if self.graph is not None:
            self.graph.replay()
            return self.logits
        current = torch.cuda.current_stream()
        stream = side_stream(current)
        if self.warm < WARM_UP:  # kernels are compiled and chosen, and workspaces allocated
            self.warm += 1
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                logits = self._run()
            current.wait_stream(stream)
            logits.record_stream(current)
            return logits
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.memory, stream=stream):
                self.logits = self._run()
        except RuntimeError as error:  # recording ran nothing: the step is still to be done
            warnings.warn(
                f"a step of {type(self.model).__name__} cannot be captured in a CUDA graph, so it runs "
                f"uncaptured, which is slower: {error}",
                stacklevel=2,
            )
            self.memory = None
            return self._run()
        self.graph = graph
        graph.replay()
        return self.logits


class DecodeBatch:
    """Decodes the rows of pools together.

    On a GPU a step is captured once for each set of pools and rows in them, rounded up to a power
    of four: capturing takes as long as many steps, and rows without a request, which run along and
    store nothing, next to no time. On a CPU just the rows in use are run.

    Args:
        model: A causal language model with CCA enabled.
        capture: False runs steps uncaptured on a GPU too.
    """

    def __init__(self, model: Any, *, capture: bool = True) -> None:
        self.model, self.fixed = model, model.device.type == "cuda"
        self._memory, self._keeper = (
            _graph_memory(model.device) if capture and self.fixed else (None, None)
        )
        self._steps: OrderedDict[tuple, Step] = OrderedDict()

    def step(
        self,
        pools: Sequence[RowPool],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
    ) -> Tensor:
        """Feed one token to each row in use; returns logits [rows in use, vocabulary], pool after
        pool.

        Args:
            pools: Those with requests, in the same order every time.
            tokens, positions: For each pool the newest token of each row, and its position.
        """
        parts = tuple((pool, self._rounded(pool)) for pool in pools)
        step = self._step_for(parts)
        for buffer, values in ((step.tokens, tokens), (step.positions, positions)):
            flat = [
                x
                for row, (_, count) in zip(values, parts)
                for x in (*row, *[0] * (count - len(row)))
            ]
            buffer.copy_(torch.tensor(flat)[:, None])
        logits = step.run()
        for pool in pools:
            pool.seen += 1
        if all(pool.used == count for pool, count in parts):
            return logits
        used, start = [], 0
        for pool, count in parts:
            used.append(logits[start : start + pool.used])
            start += count
        return torch.cat(used)

    def _rounded(self, pool: RowPool) -> int:
        if not pool.fixed:
            return pool.used
        return min(pool.rows, 4 ** (((pool.used - 1).bit_length() + 1) // 2))

    def _step_for(self, parts: Parts) -> Step:
        if self._memory is None:
            return Step(self.model, parts, None)
        key = tuple((id(pool), count) for pool, count in parts)
        # What the first step compiled and chose need not be compiled and chosen again.
        step = self._steps.pop(key, None) or Step(
            self.model, parts, self._memory, WARM_UP - 1 if self._steps else 0
        )
        self._steps[key] = step
        while len(self._steps) > KEEP_GRAPHS:
            self._steps.popitem(last=False)
        return step

    def forget(self, pool: RowPool) -> None:
        """Drop the captured steps of a pool that is given up."""
        for key in [key for key in self._steps if any(one == id(pool) for one, _ in key)]:
            del self._steps[key]


def _graph_memory(device: torch.device) -> tuple[Any, torch.cuda.CUDAGraph]:
    """Memory for all graphs, since what a step gives is used before the next one runs; and a graph
    that keeps it alive: PyTorch captures nothing more into memory that has lost its last graph, as
    when all pools are given up."""
    memory, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, pool=memory):
        torch.zeros(1, device=device)
    return memory, graph
