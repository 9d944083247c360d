"""How long do CCA's forward, backward and decoding step take here, against full attention and
against the floor?

And how does their peak memory grow with the length? Run it with `python -m benchmarks operator`;
docs/benchmarks.md says how each number is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.check import check_correct, short
from benchmarks.decoding import decode_methods, decode_seconds, layers_for
from benchmarks.methods import FULL, default_methods, make_call, make_inputs
from benchmarks.operator_settings import OperatorBench
from corecontext import cost
from corecontext.measure import (
    PeakMemory,
    capture,
    copy_bytes_per_s,
    matmul_flops_per_s,
    peak_bytes_in_subprocess,
    sample_in_turns,
)
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress

ENOUGH_S = {"cpu": 60.0, "cuda": 4.0}  # no more samples of a call once they took this long together
ONCE_S = 5.0  # calls that take longer are sampled once, unwarmed, on a GPU
GRAPH_LENGTH = 16384  # a CUDA graph is timed too up to this length, where launching may take longer than computing


@dataclass
class _Run:
    """One run: what is found, what is left out, and how fast the machine is."""

    bench: OperatorBench
    on_records: Callable[[list[Record]], None] | None = None
    records: list[Record] = field(default_factory=list)
    last: dict[tuple[str, str, int], tuple[int, float]] = field(default_factory=dict)
    """Length and seconds of the longest call so far, by method, pass and KV heads."""

    handed: int = 0

    def __post_init__(self) -> None:
        self.device = device_name(self.bench.device)
        self.cuda = torch.device(self.bench.device).type == "cuda"
        self.enough_s = ENOUGH_S["cuda" if self.cuda else "cpu"]
        self.flops_per_s = matmul_flops_per_s(getattr(torch, self.bench.dtype), self.bench.device)
        self.bytes_per_s = copy_bytes_per_s(self.bench.device) if self.bench.decode_batches else 0.0

    def hand_over(self) -> None:
        """Give out what was found since the last time."""
        if self.on_records is not None:
            self.on_records(self.records[self.handed :])
        self.handed = len(self.records)

    def record(self, name: str, value: float | list[float], params: dict[str, Any]) -> None:
        self.records.append(make_record(name, value, params, device=self.device))

    def skip(
        self,
        method: str,
        pass_name: str,
        kv_heads: int,
        length: int | None,
        reason: str,
        **more: Any,
    ) -> None:
        params = self.bench.params(method, pass_name, kv_heads, length, **more)
        self.record("operator.skipped", 1, {**params, "reason": reason})

    def estimate_s(self, method: str, pass_name: str, kv_heads: int, length: int) -> float | None:
        """What a call should take going by the longest so far: four times as long at twice the
        length."""
        known = self.last.get((method, pass_name, kv_heads))
        return (
            None
            if known is None
            else known[1] * (length / known[0]) ** (2 if method in FULL else 1)
        )


def run_operator_bench(
    bench: OperatorBench, on_records: Callable[[list[Record]], None] | None = None
) -> list[Record]:
    """Check that CCA is right, then measure; returns the records, method "floor" being the shortest
    possible time.

    Args:
        on_records: Given the new records after each length.
    """
    wanted = (
        (*(method for method in bench.methods if method != "cca"), "cca")
        if bench.methods
        else default_methods(bench.device, bench.dtype)
    )
    longest = max(bench.lengths)
    memory_lengths = bench.memory_lengths or sorted(
        {max(1, longest // 4), max(1, longest // 2), longest}
    )
    decode_lengths = bench.decode_lengths or bench.lengths
    missing = {
        kv_heads: check_correct(
            wanted,
            bench.sizes(kv_heads),
            bench.group_size,
            bench.window_size,
            longest=longest,
            decoding=bool(bench.decode_batches),
        )
        for kv_heads in bench.kv_heads
    }
    steps = len(bench.kv_heads) * (
        sum(bench.lengths)
        + sum(memory_lengths) / 4
        + len(bench.decode_batches) * sum(decode_lengths) / 16
    )
    with progress("python -m benchmarks operator", steps) as advance:
        run = _Run(bench, on_records)
        for kv_heads in bench.kv_heads:
            methods = tuple(method for method in wanted if method not in missing[kv_heads])
            for method, reason in missing[kv_heads].items():
                run.skip(method, "all", kv_heads, None, reason)
            for length in sorted(bench.lengths):
                _measure_time(run, methods, kv_heads, length)
                advance(length)
                run.hand_over()
            for length in memory_lengths:
                _measure_memory(run, methods, kv_heads, length)
                advance(length / 4)
                run.hand_over()
            for batch in bench.decode_batches:
                for length in decode_lengths:
                    _measure_decoding(run, decode_methods(methods), kv_heads, length, batch)
                    advance(length / 16)
                    run.hand_over()
    return run.records


def _measure_time(run: _Run, methods: Sequence[str], kv_heads: int, length: int) -> None:
    """Every pass of every method at one length, the methods taking turns."""
    bench = run.bench
    inputs = make_inputs(length, **bench.sizes(kv_heads))
    grad = torch.randn_like(inputs[0]) if set(bench.passes) != {"forward"} else None
    for pass_name in bench.passes:
        calls, once = {}, set()
        for method in methods:
            estimate = run.estimate_s(method, pass_name, kv_heads, length)
            if method == "flex" and length not in bench.flex_lengths:
                run.skip(
                    method,
                    pass_name,
                    kv_heads,
                    length,
                    "not among its lengths, each of which is compiled",
                )
            elif method in FULL and estimate is not None and estimate > bench.baseline_limit_s:
                run.skip(
                    method,
                    pass_name,
                    kv_heads,
                    length,
                    f"over the limit of {bench.baseline_limit_s:g} s a call",
                    estimated_s=estimate,
                )
            else:
                try:
                    calls[method] = make_call(
                        method, pass_name, inputs, grad, bench.group_size, bench.window_size
                    )
                    if run.cuda and estimate is not None and estimate > ONCE_S:
                        once.add(method)
                    elif run.cuda:
                        calls[method]()  # what a kernel refuses shows here
                except Exception as error:
                    calls.pop(method, None)
                    if method == "cca" and not isinstance(error, torch.OutOfMemoryError):
                        raise
                    run.skip(method, pass_name, kv_heads, length, short(error))
        try:
            _sample(
                run, calls, pass_name, kv_heads, length, once, timer="queue" if run.cuda else "wall"
            )
        except torch.OutOfMemoryError:  # those that take their time are not tried before
            for method in once:
                calls.pop(method)
                run.skip(method, pass_name, kv_heads, length, "out of memory")
            _sample(run, calls, pass_name, kv_heads, length, set(), timer="queue")
        if run.cuda and pass_name == "forward" and length <= GRAPH_LENGTH:
            graphs = {}
            for method, call in calls.items():
                try:
                    graphs[method] = capture(call)
                except Exception as error:
                    run.skip(method, pass_name, kv_heads, length, short(error), timer="graph")
            _sample(run, graphs, pass_name, kv_heads, length, set(), timer="graph")
            del graphs
        for compressed in (False, True):
            of = "cca" if compressed else "full"
            floor_ms = 1e3 * cost.floor_seconds(
                bench.flops(length, kv_heads, compressed, pass_name), run.flops_per_s
            )
            run.record(
                f"operator.{pass_name}_ms",
                floor_ms,
                {
                    **bench.params(of, pass_name, kv_heads, length),
                    "method": "floor",
                    "of": of,
                    "backend": "matmul",
                },
            )
        del calls
        free_memory(run.cuda)


def _sample(
    run: _Run,
    calls: Mapping[str, Callable[[], object]],
    pass_name: str,
    kv_heads: int,
    length: int,
    once: set[str],
    timer: str,
) -> None:
    """Time the calls in turns and record them."""
    found = sample_in_turns(
        calls, repeats=run.bench.repeats, device=run.bench.device, budget_s=run.enough_s, once=once
    )
    for method, seconds in found.items():
        if timer != "graph":
            run.last[method, pass_name, kv_heads] = length, min(seconds)
        run.record(
            f"operator.{pass_name}_ms",
            [1e3 * x for x in seconds],
            run.bench.params(method, pass_name, kv_heads, length, timer=timer),
        )


def _measure_memory(run: _Run, methods: Sequence[str], kv_heads: int, length: int) -> None:
    """Peak memory of the forward, and of forward and backward, at one length; full attention's
    where it is no wait."""
    bench = run.bench
    for pass_name in bench.passes:
        for method in methods:
            if (
                method == "flex" or pass_name == "backward"
            ):  # compiled for each length; no more than with the forward
                continue
            limit = min(bench.baseline_limit_s, ONCE_S) if run.cuda else bench.baseline_limit_s
            if (
                method in FULL
                and (run.estimate_s(method, pass_name, kv_heads, length) or 0) > limit
            ):
                run.skip(
                    method,
                    f"memory of {pass_name}",
                    kv_heads,
                    length,
                    f"over the limit of {limit:g} s a call",
                )
                continue
            arguments = {
                "method": method,
                "pass_name": pass_name,
                "length": length,
                "group_size": bench.group_size,
                "window_size": bench.window_size,
                **bench.sizes(kv_heads),
            }
            try:
                peak = (
                    peak_bytes(**arguments)
                    if run.cuda
                    else peak_bytes_in_subprocess(__name__, "peak_bytes", arguments)
                )
            except Exception as error:
                if method == "cca":
                    raise
                run.skip(method, f"memory of {pass_name}", kv_heads, length, short(error))
                continue
            run.record(
                "operator.peak_bytes",
                peak,
                bench.params(method, pass_name, kv_heads, length, backward=pass_name != "forward"),
            )
            free_memory(run.cuda)


def _measure_decoding(
    run: _Run, methods: Sequence[str], kv_heads: int, length: int, batch: int
) -> None:
    """One step at one context length and batch."""
    bench, sizes = run.bench, {**run.bench.sizes(kv_heads), "batch": batch}
    timer = "graph" if run.cuda else "wall"
    found = decode_seconds(
        length,
        methods,
        sizes,
        bench.group_size,
        bench.window_size,
        repeats=bench.repeats,
        budget_s=run.enough_s,
        on_skip=lambda method, reason: run.skip(
            method, "decode", kv_heads, length, reason, batch=batch
        ),
    )
    for method, seconds in found.items():
        layers, num_bytes = layers_for(length, method, sizes, bench.group_size, bench.window_size)
        params = bench.params(method, "decode", kv_heads, length, batch=batch)
        run.record(
            "operator.decode_us",
            [1e6 * x for x in seconds],
            {**params, "timer": timer, "layers": layers, "bytes_read": num_bytes},
        )
        run.record(
            "operator.decode_us",
            1e6 * num_bytes / run.bytes_per_s,
            {**params, "method": "floor", "of": method, "backend": "copy", "bytes_read": num_bytes},
        )
    free_memory(run.cuda)


def peak_bytes(
    *, method: str, pass_name: str, length: int, group_size: int, window_size: int, **sizes: Any
) -> int:
    """Peak memory of one call above its inputs."""

    def prepared(tokens: int) -> Callable[[], object]:
        inputs = make_inputs(tokens, **sizes)
        grad = torch.randn_like(inputs[0]) if pass_name != "forward" else None
        return make_call(method, pass_name, inputs, grad, group_size, window_size)

    prepared(
        window_size + 3 * group_size
    )()  # loads code and starts threads, which are no cost of the call
    call = prepared(length)
    peak = PeakMemory(sizes["device"])
    call()
    return peak.read()


def free_memory(cuda: bool) -> None:
    """Give cached memory back, so that one measurement leaves none to the next."""
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
