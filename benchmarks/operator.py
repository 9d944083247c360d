"""Time CCA's forward, backward and decoding step against full attention and against the floor.

Peak memory by length is measured too. Run it with `python -m benchmarks operator`;
docs/benchmarks.md says how each number is measured.
"""

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.check import check_correct, short
from benchmarks.decoding import DecodeTask, decode_methods, decode_seconds
from benchmarks.floor import floor_seconds
from benchmarks.methods import FULL, Sizes, make_call, make_inputs
from benchmarks.operator_settings import OperatorBench
from benchmarks.peak_memory import peak_bytes_in_subprocess
from benchmarks.timing import capture, copy_bytes_per_s, matmul_flops_per_s, sample_in_turns
from corecontext.measure import PeakMemory
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress

ENOUGH_S = {"cpu": 60.0, "cuda": 4.0}  # no more samples of a call once they took this long together
ONCE_S = 5.0  # calls that take longer are sampled once, unwarmed, on a GPU
GRAPH_LENGTH = 16384  # up to this length, where launching may dominate, a CUDA graph is timed too


@dataclass
class _Run:
    """The records of a run, and the rates of the machine."""

    bench: OperatorBench
    on_records: Callable[[list[Record]], None] | None = None
    records: list[Record] = field(default_factory=list)
    longest: dict[tuple[str, str, int], tuple[int, float]] = field(default_factory=dict)
    """Length and seconds of the longest call so far, by method, pass and KV heads."""

    handed: int = 0
    """Records handed over so far."""

    def __post_init__(self) -> None:
        bench = self.bench
        self.device = device_name(bench.device)
        self.cuda = torch.device(bench.device).type == "cuda"
        self.enough_s = ENOUGH_S["cuda" if self.cuda else "cpu"]
        self.flops_per_s = matmul_flops_per_s(getattr(torch, bench.dtype), bench.device)
        if bench.decode_batches:
            self.bytes_per_s = copy_bytes_per_s(bench.device)

    def hand_over(self) -> None:
        """Hand over the records since the last time."""
        if self.on_records is not None:
            self.on_records(self.records[self.handed :])
        self.handed = len(self.records)

    def record(self, name: str, value: float | list[float], params: dict[str, Any]) -> None:
        self.records.append(make_record(name, value, params, device=self.device))


@dataclass
class _Case:
    """One number of KV heads at one length."""

    run: _Run
    kv_heads: int
    length: int | None

    def params(self, method: str, pass_name: str, **more: Any) -> dict[str, Any]:
        return self.run.bench.params(method, pass_name, self.kv_heads, self.length, **more)

    def record(
        self,
        name: str,
        value: float | list[float],
        method: str,
        pass_name: str,
        **more: Any,
    ) -> None:
        self.run.record(name, value, self.params(method, pass_name, **more))

    def skip(self, method: str, pass_name: str, reason: str, **more: Any) -> None:
        params = {**self.params(method, pass_name, **more), "reason": reason}
        self.run.record("operator.skipped", 1, params)

    def estimate_s(self, method: str, pass_name: str) -> float | None:
        """Estimate a call from the longest so far: full attention is quadratic in the length."""
        longest = self.run.longest.get((method, pass_name, self.kv_heads))
        if longest is None:
            return None
        length, seconds = longest
        assert self.length is not None
        ratio = self.length / length
        if method in FULL:
            return seconds * ratio**2
        return seconds * ratio


def run_operator_bench(
    bench: OperatorBench, on_records: Callable[[list[Record]], None] | None = None
) -> list[Record]:
    """Check that CCA is right, then measure; the records of method "floor" are the least time.

    Args:
        on_records: Given the new records after each length.
    """
    excluded = {
        kv_heads: check_correct(
            bench.timed_methods,
            bench.sizes(kv_heads),
            bench.group_size,
            bench.window_size,
            longest=max(bench.lengths),
            decoding=bool(bench.decode_batches),
        )
        for kv_heads in bench.kv_heads
    }
    # The bar counts tokens, fewer where a measurement of as many takes less time.
    steps = len(bench.kv_heads) * (
        sum(bench.lengths)
        + sum(bench.lengths_of_memory) / 4
        + len(bench.decode_batches) * sum(bench.lengths_of_decoding) / 16
    )
    run = _Run(bench, on_records)
    with progress("python -m benchmarks operator", steps) as advance:
        for kv_heads in bench.kv_heads:
            for method, reason in excluded[kv_heads].items():
                _Case(run, kv_heads, None).skip(method, "all", reason)
            methods = [name for name in bench.timed_methods if name not in excluded[kv_heads]]
            for length in sorted(bench.lengths):
                _measure_time(_Case(run, kv_heads, length), methods)
                run.hand_over()
                advance(length)
            for length in bench.lengths_of_memory:
                _measure_memory(_Case(run, kv_heads, length), methods)
                run.hand_over()
                advance(length / 4)
            for batch in bench.decode_batches:
                for length in bench.lengths_of_decoding:
                    _measure_decoding(_Case(run, kv_heads, length), decode_methods(methods), batch)
                    run.hand_over()
                    advance(length / 16)
    return run.records


def _measure_time(case: _Case, methods: Sequence[str]) -> None:
    """Time every pass of every method, the methods taking turns."""
    run = case.run
    length = case.length
    assert length is not None
    sizes = run.bench.sizes(case.kv_heads)
    inputs = make_inputs(length, sizes, alike=run.bench.choices == "model")
    grad = None
    if set(run.bench.timed_passes) != {"forward"}:
        grad = torch.randn_like(inputs[0])
    for pass_name in run.bench.timed_passes:
        calls, once = _make_calls(case, methods, pass_name, inputs, grad)
        timer = "queue" if run.cuda else "wall"
        try:
            _sample(case, calls, pass_name, once, timer)
        except torch.OutOfMemoryError:  # slow calls were not tried before
            for method in once:
                calls.pop(method)
                case.skip(method, pass_name, "out of memory")
            _sample(case, calls, pass_name, set(), timer)
        if run.cuda and pass_name == "forward" and length <= GRAPH_LENGTH:
            _sample(case, _captured(case, calls, pass_name), pass_name, set(), "graph")
        _record_floors(case, pass_name)
        del calls
        free_memory(run.cuda)


def _make_calls(
    case: _Case,
    methods: Sequence[str],
    pass_name: str,
    inputs: list[torch.Tensor],
    grad: torch.Tensor | None,
) -> tuple[dict[str, Callable[[], object]], set[str]]:
    """Return the calls by method, and the methods so slow that they are called once."""
    bench = case.run.bench
    calls: dict[str, Callable[[], object]] = {}
    once = set()
    for method in methods:
        estimate = case.estimate_s(method, pass_name) or 0.0
        if method == "flex" and case.length not in bench.flex_lengths:
            case.skip(method, pass_name, "not among its lengths, each of which is compiled")
            continue
        if method in FULL and estimate > bench.baseline_limit_s:
            reason = f"over the limit of {bench.baseline_limit_s:g} s a call"
            case.skip(method, pass_name, reason, estimated_s=estimate)
            continue
        try:
            call = make_call(method, pass_name, inputs, grad, bench.group_size, bench.window_size)
            if case.run.cuda and estimate > ONCE_S:
                once.add(method)
            elif case.run.cuda:
                call()  # a kernel's refusal shows here
        except Exception as error:
            if method == "cca" and not isinstance(error, torch.OutOfMemoryError):
                raise
            case.skip(method, pass_name, short(error))
        else:
            calls[method] = call
    return calls, once


def _captured(
    case: _Case, calls: Mapping[str, Callable[[], object]], pass_name: str
) -> dict[str, Callable[[], object]]:
    """Return the calls as CUDA graphs."""
    graphs: dict[str, Callable[[], object]] = {}
    for method, call in calls.items():
        try:
            graphs[method] = capture(call)
        except Exception as error:
            case.skip(method, pass_name, short(error), timer="graph")
    return graphs


def _sample(
    case: _Case,
    calls: Mapping[str, Callable[[], object]],
    pass_name: str,
    once: Collection[str],
    timer: str,
) -> None:
    """Time the calls in turns and record them."""
    run = case.run
    samples = sample_in_turns(
        calls,
        repeats=run.bench.repeats,
        device=run.bench.device,
        budget_s=run.enough_s,
        once=once,
    )
    for method, seconds in samples.items():
        if timer != "graph":
            assert case.length is not None
            run.longest[method, pass_name, case.kv_heads] = (case.length, min(seconds))
        milliseconds = [1e3 * x for x in seconds]
        case.record(f"operator.{pass_name}_ms", milliseconds, method, pass_name, timer=timer)


def _record_floors(case: _Case, pass_name: str) -> None:
    """Record the least time: the operations at the machine's matrix product rate."""
    assert case.length is not None
    for method in ("full", "cca"):
        flops = case.run.bench.flops(case.length, case.kv_heads, method == "cca", pass_name)
        floor_ms = 1e3 * floor_seconds(flops, case.run.flops_per_s)
        params = case.params(method, pass_name)
        params |= {"method": "floor", "of": method, "backend": "matmul"}
        case.run.record(f"operator.{pass_name}_ms", floor_ms, params)


def _measure_memory(case: _Case, methods: Sequence[str]) -> None:
    """Record the peak memory of the forward, and of forward and backward.

    Not of FlexAttention, which is compiled for each length, nor of the backward alone, which needs
    no more than with the forward.
    """
    run = case.run
    bench = case.run.bench
    limit = bench.baseline_limit_s
    if run.cuda:  # a slow call for its memory alone is not worth the device's time
        limit = min(limit, ONCE_S)
    for pass_name in bench.timed_passes:
        for method in methods:
            if method == "flex" or pass_name == "backward":
                continue
            estimate = case.estimate_s(method, pass_name) or 0.0
            if method in FULL and estimate > limit:
                reason = f"over the limit of {limit:g} s a call"
                case.skip(method, f"memory of {pass_name}", reason)
                continue
            arguments: dict[str, Any] = {
                "method": method,
                "pass_name": pass_name,
                "length": case.length,
                "group_size": bench.group_size,
                "window_size": bench.window_size,
                "sizes": bench.sizes(case.kv_heads),
            }
            try:
                if run.cuda:
                    peak = peak_bytes(**arguments)
                else:
                    peak = peak_bytes_in_subprocess(__name__, "peak_bytes", arguments)
            except Exception as error:
                if method == "cca":
                    raise
                case.skip(method, f"memory of {pass_name}", short(error))
                continue
            backward = pass_name != "forward"
            case.record("operator.peak_bytes", peak, method, pass_name, backward=backward)
            free_memory(run.cuda)


def peak_bytes(
    method: str,
    pass_name: str,
    length: int,
    group_size: int,
    window_size: int,
    sizes: Sequence[Any],
) -> int:
    """Return the peak memory of one call above its inputs; `sizes` are those of `Sizes`."""
    sizes = Sizes(*sizes)

    def prepare(tokens: int) -> Callable[[], object]:
        inputs = make_inputs(tokens, sizes)
        grad = torch.randn_like(inputs[0]) if pass_name != "forward" else None
        return make_call(method, pass_name, inputs, grad, group_size, window_size)

    prepare(window_size + 3 * group_size)()  # loads code and starts threads, no cost of the call
    call = prepare(length)
    peak = PeakMemory(sizes.device)
    call()
    return peak.read()


def _measure_decoding(case: _Case, methods: Sequence[str], batch: int) -> None:
    """Time one step at one context length and batch."""
    run = case.run
    bench = case.run.bench
    assert case.length is not None
    sizes = bench.sizes(case.kv_heads)._replace(batch=batch)
    task = DecodeTask(case.length, sizes, bench.group_size, bench.window_size)
    samples = decode_seconds(
        task,
        methods,
        repeats=bench.repeats,
        budget_s=run.enough_s,
        on_skip=lambda method, reason: case.skip(method, "decode", reason, batch=batch),
    )
    for method, seconds in samples.items():
        num_bytes = task.step_bytes(method)
        params = {**case.params(method, "decode", batch=batch), "bytes_read": num_bytes}
        timed = {"timer": "graph" if run.cuda else "wall", "layers": task.layers(method)}
        run.record("operator.decode_us", [1e6 * x for x in seconds], {**params, **timed})
        floor = {"method": "floor", "of": method, "backend": "copy"}
        run.record("operator.decode_us", 1e6 * num_bytes / run.bytes_per_s, {**params, **floor})
    free_memory(run.cuda)


def free_memory(cuda: bool) -> None:
    """Release cached memory, so that one measurement leaves none to the next."""
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
