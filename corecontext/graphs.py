"""Capture a step in a CUDA graph and replay it.

Every capture of a process goes through here, because all must share one side stream: cuBLAS keeps
a workspace, 32 MiB on Hopper, for every stream that it has seen.
"""

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

WARM_UP = 2
"""Calls that run uncaptured first: they compile and choose kernels, and allocate workspaces."""


def side_stream() -> torch.cuda.Stream:
    """Return the stream on which steps of the current stream are warmed up and captured."""
    return _side_stream(torch.cuda.current_stream())


@functools.cache
def _side_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(current.device)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage within the block: a graph that is freed while another one is captured
    breaks the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a method that does not keep its object alive, for a step that the object
    owns: else the caches of both would stay in memory until Python collects garbage."""
    # mutant graphs: a dropped owner of a step keeps its memory
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        owned = weak()
        assert owned is not None, "a step is called by its owner"
        return owned(*arguments)

    return call


@dataclass(eq=False)
class CapturedStep:
    """Call a function, after its first calls by replaying a CUDA graph of it.

    The function must read and write tensors that never move, and must not wait for the device. Its
    results are the graph's memory: the next call overwrites them. The step keeps the function
    alive, and so the tensors that the graph reads; its owner gives it a `weak_call`.
    """

    function: Callable[[], Any]
    """Called without arguments."""
    _: KW_ONLY
    name: str = "a step"
    """Names the function in the warning that it cannot be captured."""
    warm_up: int = WARM_UP
    """Calls that still run uncaptured before the graph is recorded."""
    generators: Sequence[torch.Generator] = ()
    """Random generators that the function draws from; replays continue their streams."""
    memory: Any = None
    """Memory pool shared with other graphs; None gives the graph its own."""
    error_mode: str = "global"
    """CUDA's capture error mode; "thread_local" lets other threads allocate meanwhile."""
    device: torch.device | None = None
    """Device of the graph and its streams; None is the current device."""

    def __post_init__(self) -> None:
        self._can_be_captured = True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    @property
    def recorded(self) -> bool:
        """Whether calls replay a graph."""
        return self._graph is not None

    def __call__(self) -> Any:
        """Run the function once: on the side stream in the warm-up, later by its graph."""
        with torch.cuda.device(self.device):
            if self._graph is None and self._can_be_captured:
                if self.warm_up > 0:
                    return self._warm_up()
                self._try_to_record()
            if self._graph is None:
                return self.function()
            self._graph.replay()
            return self._result

    def record(self) -> None:
        """Run what is left of the warm-up, then record the graph; recording runs nothing.

        Raises:
            RuntimeError: the function cannot be captured.
        """
        with torch.cuda.device(self.device):
            while self.warm_up > 0:
                self._warm_up()
            graph = torch.cuda.CUDAGraph()
            for generator in self.generators:
                graph.register_generator_state(generator)
            recording = torch.cuda.graph(
                graph, pool=self.memory, stream=side_stream(), capture_error_mode=self.error_mode
            )
            # mutant graphs: garbage is collected while a step is captured
            with without_collection(), recording:
                self._result = self.function()
            self._graph = graph

    def _warm_up(self) -> Any:
        """Run the function uncaptured, on the stream that will capture it."""
        self.warm_up -= 1
        current = torch.cuda.current_stream()
        side = side_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = self.function()
        current.wait_stream(side)
        # The current stream reads the result: its memory must not be reused before.
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor):
                x.record_stream(current)
        return result

    def _try_to_record(self) -> None:
        """Record the graph, or warn and let all calls run uncaptured."""
        try:
            self.record()
        except RuntimeError as error:
            self._can_be_captured = False
            self._result = None
            warnings.warn(
                f"{self.name} cannot be captured in a CUDA graph, so it runs uncaptured, which is "
                f"slower: {error}",
                stacklevel=3,
            )
