"""Time calls, and measure this machine's rates of matrix products and copies.

Warm up, then take samples; a record keeps their median and the 20 and 80 % quantiles. Calls to be
compared take turns, and a GPU is timed by its own clock (docs/benchmarks.md).
"""

import random
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from corecontext.graphs import CapturedStep
from corecontext.measure import synchronize

QUEUE_S = 0.02
"""Seconds that a sample on a GPU lasts."""
QUEUE_CALLS = 200
"""Most calls of a sample."""
SETTLE_S = 0.05
"""Seconds of the same calls, untimed, before a sample on a GPU: a GPU that has just reached its
power limit runs at lower clocks for a while, so a method would pay for the one before it."""


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


def queue_seconds(
    call: Callable[[], Any], count: int, device: str = "cpu", settling: int = 0
) -> float:
    """Time `count` calls right after another, in seconds per call; on a GPU by its own clock.

    As between a model's layers, the next call is launched while the last still runs: the launch
    costs time only where it takes longer than the work.

    Args:
        settling: Calls before them that are not timed.
    """
    for _ in range(settling):
        call()
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
    """Time several calls by name in turns, in seconds, so that drift meets all of them alike. Each
    round has another order, since a GPU is warmer behind some calls than behind others.

    On a GPU a sample is a queue of calls that lasts QUEUE_S, at most QUEUE_CALLS of them, behind
    calls of SETTLE_S that are not timed.

    Args:
        repeats: Samples of each; fewer, but at least one, once its calls took budget_s together.
        once: Names to call only once and without a warm-up, since they are slow.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    counts: dict[str, int] = {}
    settling: dict[str, int] = {}
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
            settling[name] = min(QUEUE_CALLS, round(SETTLE_S / seconds))
            queue_seconds(call, counts[name], device)
    order = list(counts)
    shuffled = random.Random(0)
    for _ in range(repeats):
        shuffled.shuffle(order)
        for name in order:
            count = counts[name]
            if spent[name] <= budget_s:
                seconds = queue_seconds(calls[name], count, device, settling.get(name, 0))
                samples[name].append(seconds)
                spent[name] += count * seconds
    return samples


def capture(call: Callable[[], Any]) -> CapturedStep:
    """Capture a call in a CUDA graph, whose replays cost the host nothing."""
    step = CapturedStep(call)
    step.record()
    return step


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
