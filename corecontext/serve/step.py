"""Decode one token for the requests of several pools: the model runs once over all rows, attention
pool by pool."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from corecontext.cache import parts_of
from corecontext.graphs import WARM_UP, CapturedStep, weak_call
from corecontext.integrations.hf.cache_layers import GivenLayer
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.serve.rows import PooledLayer, RowPool

KEEP_GRAPHS = 64
"""Captured steps that are kept, at most: each is for one set of pools and of rows in them."""

MANY_ROWS = 16
"""Requests beyond which a step runs over all rows of its pools: rows without a request add little
to it then, and few different steps are captured, however many of which rows are in use."""

PoolRows = tuple[tuple[RowPool, int], ...]
"""(pool, number of its first rows that a step runs over), for each pool."""


@dataclass(eq=False)
class Step:
    """A step over the rows of some pools: its buffers, and its graph on a GPU."""

    model: Any
    """Its forward makes the step."""
    pool_rows: PoolRows
    memory: Any = None
    """Memory for graphs; None runs the step uncaptured."""
    warm_up: int = WARM_UP
    """Calls that run uncaptured before the step is captured."""

    def __post_init__(self) -> None:
        device = self.model.device
        counts = [count for _, count in self.pool_rows]
        self.tokens = torch.zeros(sum(counts), 1, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.tokens)
        by_layer = zip(*(pool.layers for pool, _ in self.pool_rows))
        self.cache = Cache(layers=[GivenLayer(PooledLayer(x, counts)) for x in by_layer])
        self._captured: CapturedStep | None = None
        if self.memory is not None:
            self._captured = CapturedStep(
                weak_call(self._run),
                name=f"a step of {type(self.model).__name__}",
                warm_up=self.warm_up,
                memory=self.memory,
                device=device,
            )

    def run(self) -> Tensor:
        """Feed `tokens`; return logits [rows, vocabulary], valid until the next step."""
        return self._run() if self._captured is None else self._captured()

    @torch.no_grad()
    def _run(self) -> Tensor:
        for pool, count in self.pool_rows:
            pool.hold(count)  # another step may have taken other rows of it
        out = self.model(
            self.tokens, position_ids=self.positions, **with_cache(self.cache), use_cache=True
        )
        return out.logits[:, -1]


@dataclass(eq=False)
class DecodeBatch:
    """Decode the rows of pools together.

    On a GPU a step is captured once for each set of pools and of rows in them, rounded up to a
    power of four, or to all beyond MANY_ROWS: to capture takes as long as many steps, and rows
    without a request, which store nothing, take next to no time. On a CPU only rows with a request
    are run.
    """

    model: Any
    """A causal language model with CCA enabled."""
    _: KW_ONLY
    capture: bool = True
    """False runs steps uncaptured on a GPU too."""

    def __post_init__(self) -> None:
        self.fixed = self.model.device.type == "cuda"
        """Whether pools must have buffers that never move."""
        self._memory: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None  # keeps `_memory` alive
        if self.capture and self.fixed:
            self._memory, self._keeper = _graph_memory(self.model.device)
        self._steps: OrderedDict[tuple, Step] = OrderedDict()  # captured, the latest used last

    def step(self, pools: Sequence[RowPool]) -> Tensor:
        """Feed the newest token of each request; return logits [requests, vocabulary], pool after
        pool.

        Args:
            pools: Pools with requests, always in the same order.
        """
        pool_rows = self._rows_of(pools)
        step = self._step_for(pool_rows)
        inputs: list[tuple[int, int]] = []  # (token, position) of each row
        for pool, count in pool_rows:
            inputs += [(slot.last_token, slot.length - 1) for slot in pool.slots]
            inputs += [(0, 0)] * (count - len(pool.slots))
        tokens, positions = torch.tensor(inputs).T
        step.tokens.copy_(tokens[:, None])
        step.positions.copy_(positions[:, None])
        logits = step.run()
        for pool in pools:
            pool.seen += 1
        if all(len(pool.slots) == count for pool, count in pool_rows):
            return logits
        # Leave out rows without a request.
        by_pool = logits.split([count for _, count in pool_rows])
        return torch.cat([rows[: len(pool.slots)] for pool, rows in zip(pools, by_pool)])

    def _rows_of(self, pools: Sequence[RowPool]) -> PoolRows:
        """Return the rows of each pool in a step: those in use, on a GPU rounded up."""
        # mutant serve: a step is captured for each number of rows in use
        is_many = sum(len(pool.slots) for pool in pools) > MANY_ROWS
        return tuple((pool, self._rounded(pool, is_many)) for pool in pools)

    @staticmethod
    def _rounded(pool: RowPool, is_many: bool) -> int:
        """Return the rows of a pool in a step, which may be one of many rows."""
        used = len(pool.slots)
        if not pool.fixed:
            return used
        if is_many:
            return pool.rows
        rows = 1
        while rows < used:
            rows *= 4
        return min(pool.rows, rows)

    def _step_for(self, pool_rows: PoolRows) -> Step:
        """Return the step over these rows: a captured one, used before or new, if possible."""
        layers = (layer for pool, _ in pool_rows for layer in pool.layers)
        asks_device = any(cache.asks_device for layer in layers for cache in parts_of(layer))
        if self._memory is None or asks_device:
            return Step(self.model, pool_rows)
        key = tuple((id(pool), count) for pool, count in pool_rows)
        step = self._steps.pop(key, None)
        if step is None:
            # The first step has compiled and chosen kernels, so later ones warm up in one call.
            warm_up = 1 if self._steps else WARM_UP
            step = Step(self.model, pool_rows, self._memory, warm_up)
        self._steps[key] = step
        while len(self._steps) > KEEP_GRAPHS:
            self._steps.popitem(last=False)
        return step

    def forget(self, pool: RowPool) -> None:
        """Drop the captured steps of a pool that is released."""
        for key in list(self._steps):
            if any(address == id(pool) for address, _ in key):
                del self._steps[key]


def _graph_memory(device: torch.device) -> tuple[Any, torch.cuda.CUDAGraph]:
    """Return (memory for all graphs, a graph that keeps it alive).

    All graphs share it, since a step's result is used before the next step runs. PyTorch captures
    no more into memory that has lost its last graph, as when all pools are dropped.
    """
    memory = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, pool=memory):
        torch.zeros(1, device=device)
    return memory, graph
