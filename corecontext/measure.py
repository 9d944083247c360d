"""Time and memory of a call.

Time: warm up, then the samples of which a record keeps the median and the 20 and 80 % quantiles.
Calls that are to be compared take turns, and a GPU is timed by its own clock (docs/benchmarks.md).

Memory on a GPU is what PyTorch's allocator counted. On a CPU there is no such count, so it is the
process's peak resident memory above what was resident before the call. The kernel's high-water mark
is set back first (Linux, /proc/self/clear_refs), and `peak_bytes_in_subprocess` runs the call in a
fresh process in which the C allocator gives every large block back at once: memory kept from
earlier work can then neither hide an allocation nor count as one. It is right to about a MiB, since
the kernel counts pages in batches. Where the mark cannot be set back (macOS), the growth of the
process's lifetime peak is reported, a lower bound.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
}  # glibc: no hoarding
QUEUE_S, QUEUE_CALLS = 0.02, 200


def sample_seconds(
    call: Callable[[], Any],
    *,
    repeats: int = 5,
    warm_up: int = 1,
    device: str = "cpu",
    budget_s: float = float("inf"),
) -> list[float]:
    """Seconds of each of `repeats` calls after `warm_up` calls; fewer, but one at least, once
    budget_s is spent."""
    for _ in range(warm_up):
        call()
    samples: list[float] = []
    for _ in range(repeats):
        samples.append(queue_seconds(call, 1, device))
        if sum(samples) > budget_s:
            break
    return samples


def queue_seconds(call: Callable[[], Any], count: int, device: str = "cpu") -> float:
    """Seconds per call of `count` calls one right after another; on a GPU between two events of its
    own clock.

    A queue shows what a model's layers see: the next call is launched while the last one runs, so
    the launch costs time only where it takes longer than the work.
    """
    synchronize(device)
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(count):
        call()
    after.record()
    synchronize(device)
    return before.elapsed_time(after) / 1e3 / count


def sample_in_turns(
    calls: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    device: str = "cpu",
    budget_s: float = float("inf"),
    once: Collection[str] = (),
) -> dict[str, list[float]]:
    """Seconds of several calls by name, in turns, so that whatever drifts meanwhile meets all of
    them alike.

    Args:
        repeats: Samples of each; fewer, but one at least, once its calls took budget_s together.
        once: Names that are called once only, without a warm-up: those so slow that it makes no
            difference.

    On a GPU a sample is a queue of calls that lasts QUEUE_S, at most QUEUE_CALLS of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    counts, spent = dict[str, int](), dict[str, float]()
    for name, call in calls.items():
        if name in once:
            samples[name].append(queue_seconds(call, 1, device))
            continue
        call()
        counts[name], spent[name] = 1, 0.0
        if torch.device(device).type == "cuda":
            one = queue_seconds(call, 1, device)
            counts[name] = max(1, min(QUEUE_CALLS, round(QUEUE_S / one)))
            queue_seconds(call, counts[name], device)
    for _ in range(repeats):
        for name, count in counts.items():
            if spent[name] <= budget_s:
                samples[name].append(queue_seconds(calls[name], count, device))
                spent[name] += count * samples[name][-1]
    return samples


class Captured:
    """A call as a CUDA graph, without anything that the host does. It keeps the call, for a graph
    does not keep the tensors that it reads: freed, their memory would be used again, or be gone,
    when the graph is replayed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, call: Callable[[], Any]) -> None:
        self._graph, self._call = graph, call

    def __call__(self) -> None:
        self._graph.replay()


def capture(call: Callable[[], Any]) -> Captured:
    """Capture a call after two that warm it up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return Captured(graph, call)


def synchronize(device: str) -> None:
    """Wait for a GPU's queued work; nothing on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory:
    """Peak memory, in bytes, above what was in use when it was started."""

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._device = device
        if self._cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            self._before = _resident_bytes() if reset_resident_peak() else _resident_peak_bytes()

    def read(self) -> int:
        """The peak since the start."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _resident_peak_bytes() - self._before)


def peak_bytes_in_subprocess(module: str, function: str, arguments: dict[str, Any]) -> int:
    """Peak bytes that `module.function(**arguments)` reports from a fresh process (see
    `PeakMemory`)."""
    code = f"import json, sys; from {module} import {function} as f; print(f(**json.loads(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        capture_output=True,
        text=True,
        env={**package_path(), **MALLOC},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if done.returncode < 0 or "memory" in last.lower():
            raise MemoryError(last)
        raise RuntimeError(f"measuring in a subprocess failed: {last}")
    return int(done.stdout.split()[-1])


def matmul_flops_per_s(dtype: torch.dtype, device: str = "cpu", size: int | None = None) -> float:
    """The best matrix product rate of this machine, operations per second: what the floor is made
    of."""
    size = size or (8192 if torch.device(device).type == "cuda" else 2048)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / min(sample_seconds(lambda: a @ b, repeats=10, warm_up=3, device=device))


def copy_bytes_per_s(device: str = "cpu", num_bytes: int | None = None) -> float:
    """The best rate at which this machine copies memory, bytes read and written per second: what
    decoding is up to."""
    num_bytes = num_bytes or (2**31 if torch.device(device).type == "cuda" else 2**28)
    a, b = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return (
        2
        * num_bytes
        / min(sample_seconds(lambda: b.copy_(a), repeats=10, warm_up=3, device=device))
    )


def reset_resident_peak() -> bool:
    """Set the process's resident high-water mark back to now; False where the system has no way
    to."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def _resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _resident_peak_bytes() -> int:
    """Resident high-water mark of this process."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes


def package_path() -> dict[str, str]:
    """An environment in which a subprocess imports this very package, from wherever it was
    loaded."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
    }  # not what happens to lie in the current folder
