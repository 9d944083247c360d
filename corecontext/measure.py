"""Measure time and memory of a call.

Time: warm up, then take samples; a record keeps their median and the 20 and 80 % quantiles. Calls
to be compared take turns, and a GPU is timed by its own clock (docs/benchmarks.md).

Memory on a GPU is the count of PyTorch's allocator. On a CPU there is no such count, so it is the
process's peak resident memory above the resident memory before the call. The kernel's high-water
mark is reset first (Linux, /proc/self/clear_refs), and `peak_bytes_in_subprocess` runs the call in
a fresh process in which the C allocator returns every large block at once: memory kept from earlier
work can then neither hide an allocation nor count as one. It is right to about a MiB, since the
kernel counts pages in batches. Where the mark cannot be reset (macOS), the growth of the process's
lifetime peak is reported, a lower bound.
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

from corecontext.graphs import CapturedStep

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Environment in which glibc returns large blocks to the system at once."""
QUEUE_S = 0.02
"""Seconds that a sample on a GPU lasts."""
QUEUE_CALLS = 200
"""Most calls of a sample."""


def sample_seconds(
    call: Callable[[], Any],
    *,
    repeats: int = 5,
    warm_up: int = 1,
    device: str = "cpu",
    budget_s: float = float("inf"),
) -> list[float]:
    """Time each of `repeats` calls after `warm_up` calls, in seconds; fewer, but at least one, once
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
    """Time `count` calls right after another, in seconds per call; on a GPU by its own clock.

    As between a model's layers, the next call is launched while the last still runs: the launch
    costs time only where it takes longer than the work.
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
    """Time several calls by name in turns, in seconds, so that drift meets all of them alike.

    On a GPU a sample is a queue of calls that lasts QUEUE_S, at most QUEUE_CALLS of them.

    Args:
        repeats: Samples of each; fewer, but at least one, once its calls took budget_s together.
        once: Names to call only once and without a warm-up, since they are slow.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    counts: dict[str, int] = {}
    spent = dict.fromkeys(calls, 0.0)
    for name, call in calls.items():
        if name in once:
            samples[name].append(queue_seconds(call, 1, device))
            continue
        call()
        counts[name] = 1
        if torch.device(device).type == "cuda":
            seconds = queue_seconds(call, 1, device)
            counts[name] = max(1, min(QUEUE_CALLS, round(QUEUE_S / seconds)))
            queue_seconds(call, counts[name], device)
    for _ in range(repeats):
        for name, count in counts.items():
            if spent[name] <= budget_s:
                samples[name].append(queue_seconds(calls[name], count, device))
                spent[name] += count * samples[name][-1]
    return samples


def capture(call: Callable[[], Any]) -> CapturedStep:
    """Capture a call in a CUDA graph, whose replays cost the host nothing."""
    step = CapturedStep(call)
    step.record()
    return step


def synchronize(device: str) -> None:
    """Wait for a GPU's queued work; return at once on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory:
    """Peak memory, in bytes, above the memory in use when this object was made."""

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._device = device
        if self._cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        elif reset_resident_peak():
            self._before = _resident_bytes()
        else:
            self._before = _resident_peak_bytes()

    def read(self) -> int:
        """Return the peak so far."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _resident_peak_bytes() - self._before)


def peak_bytes_in_subprocess(module: str, function: str, arguments: dict[str, Any]) -> int:
    """Return the peak bytes that `module.function(**arguments)` reports from a fresh process (see
    `PeakMemory`)."""
    code = (
        f"import json, sys; from {module} import {function} as measure; "
        "print(measure(**json.loads(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    environment = {**package_path(), **MALLOC}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if done.returncode < 0 or "memory" in last.lower():
            raise MemoryError(last)
        raise RuntimeError(f"measuring in a subprocess failed: {last}")
    return int(done.stdout.split()[-1])


def matmul_flops_per_s(dtype: torch.dtype, device: str = "cpu", size: int | None = None) -> float:
    """Measure the best rate of matrix products of this machine, operations per second; the floor
    assumes it."""
    size = size or (8192 if torch.device(device).type == "cuda" else 2048)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = sample_seconds(lambda: a @ b, repeats=10, warm_up=3, device=device)
    return 2 * size**3 / min(seconds)


def copy_bytes_per_s(device: str = "cpu", num_bytes: int | None = None) -> float:
    """Measure the best rate at which this machine copies memory, bytes read and written per second;
    it bounds decoding."""
    num_bytes = num_bytes or (2**31 if torch.device(device).type == "cuda" else 2**28)
    a, b = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = sample_seconds(lambda: b.copy_(a), repeats=10, warm_up=3, device=device)
    return 2 * num_bytes / min(seconds)


def reset_resident_peak() -> bool:
    """Reset the process's resident high-water mark; return False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def _resident_bytes() -> int:
    """Return the resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _resident_peak_bytes() -> int:
    """Return the resident high-water mark of this process."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes


def package_path() -> dict[str, str]:
    """Return an environment in which a subprocess imports this very package, and no files of the
    current folder."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
