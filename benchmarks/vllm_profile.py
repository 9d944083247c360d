"""Show which kernels the steps of vLLM run, by their time on the device, and how long the device
waits for the host."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from benchmarks.tables import Column, markdown, print_page, shown_ms
from corecontext.terminal import console

MOST_KERNELS = 20
"""Kernels in a table, those that take the most time."""
NAME_LENGTH = 60
"""Characters of a kernel's name in a table."""
STEPS = 8
"""Steps of each phase but the first, which is a whole prompt."""


class Span(NamedTuple):
    """Hold a kernel's run on the device."""

    name: str
    start: float
    """Microseconds."""
    end: float


class Kernel(NamedTuple):
    """Hold the time of a kernel in a step."""

    name: str
    ms: float
    launches: float


class Phase(NamedTuple):
    """Hold the steps of one kind, all values by step."""

    title: str
    steps: int
    wall_ms: float
    busy_ms: float
    """With a kernel on the device."""
    kernels: list[Kernel]
    """Those that take the most time first."""


COLUMNS = (
    Column("kernel", lambda kernel: kernel.name[:NAME_LENGTH], left=True),
    Column("ms a step", lambda kernel: f"{kernel.ms:.2f}"),
    Column("launches", lambda kernel: f"{kernel.launches:.1f}"),
)


def profile_engine(
    engine: Any, prompt: Callable[[], list[int]], options: Any, requests: int, first_steps: int
) -> Iterable[Phase]:
    """Run requests in vLLM's engine and yield the phases that they go through: a prompt alone, a
    prompt beside the decoding of half of the requests, the decoding of all.

    Args:
        prompt: Makes the tokens of a prompt.
        options: vLLM's sampling parameters of each request; its answer must last all phases.
        requests: Requests that are sent at once.
        first_steps: Steps in which the engine reads one prompt.
    """
    engine.add_request("alone", {"prompt_token_ids": prompt()}, options)
    yield _measure(engine, "a prompt alone", first_steps)
    for number in range(requests - 1):
        engine.add_request(str(number), {"prompt_token_ids": prompt()}, options)
    begun = _step_until(engine, requests // 2, first_steps)
    yield _measure(engine, f"a prompt beside {begun} decoding sequences", STEPS)
    begun = _step_until(engine, requests, first_steps)
    yield _measure(engine, f"decoding of {begun} sequences", STEPS)


def _step_until(engine: Any, wanted: int, first_steps: int) -> int:
    """Run steps until so many requests get tokens; return how many do, fewer where the cache holds
    no more."""
    begun = 0
    stalled = 0
    while begun < wanted and stalled <= 2 * first_steps:
        count = len(engine.step())
        stalled = 0 if count > begun else stalled + 1
        begun = max(begun, count)
    return begun


def _measure(engine: Any, title: str, steps: int) -> Phase:
    """Run steps under the profiler, after those that the engine has begun already."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        wall_ms = 1000 * (time.perf_counter() - start)
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA
    ]
    return phase_of(title, steps, wall_ms, spans)


def phase_of(title: str, steps: int, wall_ms: float, spans: Sequence[Span]) -> Phase:
    """Sum up the runs of kernels in some steps; runs side by side count once as busy time."""
    busy_us = 0.0
    last_end = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        busy_us += max(0.0, span.end - max(span.start, last_end))
        last_end = max(last_end, span.end)
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.name, []).append(span.end - span.start)
    kernels = [Kernel(name, sum(us) / 1000 / steps, len(us) / steps) for name, us in times.items()]
    kernels.sort(key=lambda kernel: kernel.ms, reverse=True)
    return Phase(title, steps, wall_ms / steps, busy_us / 1000 / steps, kernels)


def print_phase(phase: Phase) -> None:
    """Print a phase: a line with the time of a step, then a table of its kernels."""
    console().print(
        f"{phase.title}, {phase.steps} steps: {shown_ms(phase.wall_ms)} a step, the device is busy "
        f"for {shown_ms(phase.busy_ms)}"
    )
    print_page(markdown(COLUMNS, phase.kernels[:MOST_KERNELS]))
