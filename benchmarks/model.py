"""Time the first and the next token of whole models, and their memory, by method and length.

Tokens per second at the best batch that fits are measured too. Run it with `python -m benchmarks
model`; docs/benchmarks.md says how each number is measured.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.check import short
from benchmarks.floor import floor_seconds, step_bytes
from benchmarks.model_check import check_model
from benchmarks.model_methods import (
    CCA_METHODS,
    FULL,
    FULL_ROWS,
    CompactRun,
    FilledRun,
    PlainRun,
    RowsRun,
    StaticRun,
    attention,
    fetching,
)
from benchmarks.model_settings import ModelBench
from benchmarks.operator import free_memory
from benchmarks.operator_settings import backend_of_cca
from benchmarks.replay import repeating, shared_host_memory
from benchmarks.shapes import make_model, make_prompt
from benchmarks.timing import copy_bytes_per_s, matmul_flops_per_s
from corecontext.config import CCAConfig
from corecontext.cost import ModelCost
from corecontext.files import is_out_of_memory, one_line
from corecontext.inference.chunk_size import free_bytes
from corecontext.inference.limits import check_length
from corecontext.integrations.hf.cache_layers import cache_bytes, host_bytes
from corecontext.measure import PeakMemory, synchronize
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress

WARM_LENGTH = 8192  # of a prompt whose queries have more groups to choose from than they fetch
WARM_STEPS = 8  # kernels are compiled, and the step is captured, in the first ones
ENOUGH_S = 30.0  # no more samples of a prompt once they took this long together
MEMORY_SHARE = 0.95  # of the free memory that the caches of a batch may take


class Job(NamedTuple):
    """A method to measure."""

    method: str
    length: int
    config: CCAConfig
    fuse: str = "none"


@dataclass
class _Run:
    """The model, the records so far, and the rates of the machine."""

    bench: ModelBench
    on_records: Callable[[list[Record]], None] | None = None
    records: list[Record] = field(default_factory=list)
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Length and seconds of the longest prompt so far, by method."""

    def __post_init__(self) -> None:
        bench = self.bench
        self.model, self.of_model = make_model(bench.shape, bench.dtype, bench.device)
        self.total_steps = WARM_STEPS + bench.repeats * bench.steps + 2
        if bench.mode != "throughput":  # which fills caches without a prompt
            with one_line():  # refuse before anything is measured
                check_length(self.model.config, max(bench.lengths), self.total_steps)
        self.cuda = torch.device(bench.device).type == "cuda"
        self.device = device_name(bench.device)
        self.cost = ModelCost.of(self.model.config, self.model)
        self.weight_bytes = sum(x.numel() * x.element_size() for x in self.model.parameters())
        self.flops_per_s = matmul_flops_per_s(getattr(torch, bench.dtype), bench.device)
        self.bytes_per_s = copy_bytes_per_s(bench.device)
        free_memory(self.cuda)

    def params(self, job: Job, **more: Any) -> dict[str, Any]:
        """Return a record's params; g and s belong to CCA only."""
        config = job.config
        settings: dict[str, Any] = {}
        if job.method in CCA_METHODS:
            settings = {"group_size": config.group_size, "window_size": config.window_size}
            if config.cache_dtype != "auto":
                settings["cache_dtype"] = config.cache_dtype
            settings |= fetching(self.bench, job.method)
            if "fetch_slots" in settings and self.bench.hit_share is not None:
                settings["hit_share"] = self.bench.hit_share
        elif job.method == "streaming_llm":
            settings = {"sinks": 4, "window_size": config.window_size}
        return {
            "method": job.method,
            "backend": self.backend(job.method),
            **self.of_model,
            "length": job.length,
            "batch": 1,
            **settings,
            **{name: value for name, value in more.items() if value is not None},
        }

    def backend(self, method: str) -> str:
        """Name the kernel of a method's attention."""
        if method in CCA_METHODS:
            return backend_of_cca(self.cost.head_dim, self.bench.dtype, self.bench.device)
        return {"sdpa_flash": "flash", "sdpa_cudnn": "cudnn", FULL_ROWS: "rows"}.get(method, "sdpa")

    def record(self, name: str, value: float | Sequence[float], params: dict[str, Any]) -> None:
        """Keep a value and hand it over at once: a run that is cut short keeps its results."""
        self.records.append(make_record(name, value, params, device=self.device))
        if self.on_records is not None:
            self.on_records(self.records[-1:])

    def skip(self, task: str, reason: str, params: dict[str, Any]) -> None:
        self.record("model.skipped", 1, {**params, "what": task, "reason": reason})

    def attempt(self, task: str, params: dict[str, Any], measure: Callable[[], object]) -> bool:
        """Measure, or record why memory or a baseline refuses; returns whether it was measured."""
        reason = None
        try:
            measure()
        except Exception as error:
            if not is_out_of_memory(error) and params["method"] in CCA_METHODS:
                raise
            reason = _reason(error)
        # Outside of `except`, whose traceback would keep the tensors alive.
        if reason is not None:
            self.skip(task, reason, params)
        free_memory(self.cuda)
        return reason is None


def _reason(error: Exception) -> str:
    """Return why a measurement failed, on one line."""
    if not is_out_of_memory(error):
        return short(error)
    detail = str(error) if isinstance(error, MemoryError) else ""
    return f"out of memory: {detail}" if detail else "out of memory"


def run_model_bench(
    bench: ModelBench, on_records: Callable[[list[Record]], None] | None = None
) -> list[Record]:
    """Check that CCA is right on this model, then measure; method "floor" is the least possible.

    Args:
        on_records: Given each record as soon as it is made.

    Raises:
        UserError: the checkpoint is missing or unsupported.
    """
    run = _Run(bench, on_records)
    if set(CCA_METHODS) & set(bench.methods):
        with one_line():  # the window may reach beyond the model's positions
            check_model(run.model, bench.config())
    tasks = list({"lengths": _lengths, "sweep": _sweep, "throughput": _throughput}[bench.mode](run))
    title = f"python -m benchmarks model, {run.of_model['shape']}"
    with progress(title, sum(weight for weight, _ in tasks)) as advance:
        for weight, task in tasks:
            task()
            advance(weight)
    return run.records


Tasks = Iterator[tuple[float, Callable[[], None]]]
"""Measurements, each with a weight that says about how long it takes."""


def _lengths(run: _Run) -> Tasks:
    """Yield every method at every length, the shortest first."""
    bench = run.bench
    for length in sorted(bench.lengths):
        for method in bench.methods:
            for fuse in bench.fuses if method in CCA_METHODS else ("none",):
                job = Job(method, length, bench.config(), fuse)
                yield length, functools.partial(_measure, run, job)
        yield 0, functools.partial(_record_floors, run, length)


def _sweep(run: _Run) -> Tasks:
    """Yield CCA by group and window size."""
    for length in run.bench.lengths:
        for config in run.bench.sweep_configs():
            job = Job("cca", length, config, run.bench.fuses[0])
            yield length, functools.partial(_measure, run, job)


def _throughput(run: _Run) -> Tasks:
    """Yield every method that has a static step, at every length."""
    for length in run.bench.lengths:
        for method in run.bench.methods:
            if method != "streaming_llm":
                job = Job(method, length, run.bench.config(), run.bench.fuses[0])
                yield 1, functools.partial(_measure_batches, run, job)


def _measure(run: _Run, job: Job) -> None:
    """Measure first token, memory and next tokens of one method at one length."""
    bench = run.bench
    method = job.method
    settings: dict[str, Any] = {}
    if method in CCA_METHODS:
        settings = {"fuse": job.fuse, "chunk_size": bench.chunk_size}
    config = job.config.replace(**fetching(bench, method))
    params = run.params(job, **settings)
    if method in FULL and _estimate_s(run, job) > bench.baseline_limit_s:
        reason = f"over the limit of {bench.baseline_limit_s:g} s a prompt"
        run.skip("growing cache", reason, params)
    elif method != FULL_ROWS:
        task = "prompt" if method in CCA_METHODS else "growing cache"
        with attention(run.model, method, config), repeating(bench, method):
            run.attempt(task, params, lambda: _prompt_and_steps(run, job, params))
    if method in (*FULL, FULL_ROWS) and "itl" in bench.what:
        static = {**params, "cache": "static"}
        with attention(run.model, method, config):
            run.attempt("static cache", static, lambda: _static_steps(run, job, static))


def _estimate_s(run: _Run, job: Job) -> float:
    """Estimate a prompt from the method's longest so far, quadratic in the length."""
    if job.method not in run.last:
        return 0.0
    length, seconds = run.last[job.method]
    return seconds * (job.length / length) ** 2


def _prompt_and_steps(run: _Run, job: Job, params: dict[str, Any]) -> None:
    """Time prompts, as often as there is time for, then further tokens of the last one."""
    bench = run.bench
    method = job.method
    # Load code and compile kernels.
    warm = _start(run, job, make_prompt(run.model, 1, min(job.length, WARM_LENGTH)), 2)
    warm.first()
    warm.step()
    warm.close()
    ids = make_prompt(run.model, 1, job.length)
    seconds: list[float] = []
    peaks: list[int] = []
    current: PlainRun | CompactRun | None = None
    for _ in range(bench.repeats if "ftl" in bench.what else 1):
        if current is not None:
            current.close()
        free_memory(run.cuda)
        current = _start(run, job, ids, run.total_steps)
        peak = PeakMemory(bench.device)
        seconds.append(_seconds(run, current.first))
        peaks.append(peak.read())
        if sum(seconds) > ENOUGH_S:
            break
    assert current is not None
    run.last[method] = (job.length, min(seconds))
    with_cache = {**params, "cache": "compact" if method in CCA_METHODS else "dynamic"}
    if "ftl" in bench.what:
        run.record("model.first_token_s", seconds, params)
        run.record("model.peak_bytes", run.weight_bytes + max(peaks), params)
        run.record("model.cache_bytes", cache_bytes(current.cache), with_cache)
        if in_host_memory := host_bytes(current.cache):
            run.record("model.host_bytes", in_host_memory, with_cache)
    if "itl" in bench.what:
        run.record("model.next_token_ms", _step_ms(run, current.step), with_cache)
    current.close()


def _start(run: _Run, job: Job, ids: torch.Tensor, new_tokens: int) -> PlainRun | CompactRun:
    """Prepare a prompt of a method."""
    if job.method not in CCA_METHODS:
        return PlainRun(run.model, job.method, ids)
    options: dict[str, Any] = {"fuse": _fusing(job.fuse), "chunk_size": run.bench.chunk_size}
    return CompactRun(run.model, ids, new_tokens, **options)


def _fusing(fuse: str) -> str | None:
    return None if fuse == "none" else fuse


def _static_steps(run: _Run, job: Job, params: dict[str, Any]) -> None:
    kind = RowsRun if job.method == FULL_ROWS else StaticRun
    static = kind(run.model, job.method, 1, job.length, run.total_steps)
    run.record("model.next_token_ms", _step_ms(run, static.step), params)
    static.close()


def _record_floors(run: _Run, length: int) -> None:
    """Record the least possible: operations and bytes at the rates measured here."""
    bench = run.bench
    for of, g, s in (("full", 1, 1), ("cca", bench.group_size, bench.window_size)):
        params = run.params(Job(of, length, bench.config()))
        params |= {"method": "floor", "of": of}
        itemsize = run.cost.itemsize if of == "full" else _cache_itemsize(run)
        if "ftl" in bench.what:
            flops = run.cost.prefill_flops(length, g, s)
            seconds = floor_seconds(flops, run.flops_per_s)
            num_bytes = run.cost.cache_bytes(length, g, s) * itemsize / run.cost.itemsize
            run.record("model.first_token_s", seconds, {**params, "backend": "matmul"})
            run.record("model.cache_bytes", num_bytes, {**params, "backend": "formula"})
        if "itl" in bench.what:
            num_bytes = step_bytes(run.cost, length, g, s, cache_itemsize=itemsize)
            copied = {**params, "backend": "copy", "bytes_read": num_bytes}
            run.record("model.next_token_ms", 1e3 * num_bytes / run.bytes_per_s, copied)


def _cache_itemsize(run: _Run) -> float:
    """Return the bytes of a number in CCA's cache, its share of a scale included."""
    return run.cost.itemsize if run.bench.cache_dtype == "auto" else 1 + 4 / run.cost.head_dim


def _measure_batches(run: _Run, job: Job) -> None:
    """Record tokens per second by batch, until a batch does not fit."""
    cache = {"cache": "static"}
    if job.method in CCA_METHODS:
        cache = {"fuse": job.fuse, "cache": "compact"}
    job = job._replace(config=job.config.replace(**fetching(run.bench, job.method)))
    for batch in run.bench.batches or batches(run, job.method, job.length):
        params = {**run.params(job, **cache), "batch": batch}
        measure = functools.partial(_tokens_per_s, run, job, params)
        again = repeating(run.bench, job.method)
        with attention(run.model, job.method, job.config), again, shared_host_memory():
            if not run.attempt("throughput", params, measure):
                return


def batches(run: _Run, method: str, length: int) -> list[int]:
    """Return the largest batch whose caches fit by their formula, and powers of two down to a
    sixteenth of it."""
    bench = run.bench
    room = length + run.total_steps
    if method in CCA_METHODS:
        config = bench.config().replace(**fetching(bench, method))
        row_bytes: float = run.cost.config_bytes(config, room).device
    else:
        row_bytes = run.cost.cache_bytes(room, 1, 1)
    # Logits, in several dtypes.
    row_bytes += 16 * run.model.config.get_text_config(decoder=True).vocab_size
    most = bench.max_batch
    free = free_bytes(torch.device(bench.device))
    if free is not None:
        most = min(most, int(MEMORY_SHARE * free / row_bytes))
    if not most:
        return [1]  # which does not fit, and is recorded so
    powers = [2**i for i in range(32) if most / 16 <= 2**i <= most]
    return sorted({*powers, most})


def _tokens_per_s(run: _Run, job: Job, params: dict[str, Any]) -> None:
    batch = params["batch"]
    sizes = (batch, job.length, run.total_steps)
    current: StaticRun | FilledRun
    if job.method in CCA_METHODS:
        current = FilledRun(run.model, job.config, *sizes, fuse=_fusing(job.fuse))
    elif job.method == FULL_ROWS:
        current = RowsRun(run.model, job.method, *sizes)
    else:
        current = StaticRun(run.model, job.method, *sizes)
    rates = [1e3 * batch / ms for ms in _step_ms(run, current.step)]
    run.record("model.tokens_per_s", rates, params)
    current.close()


def _step_ms(run: _Run, step: Callable[[], object]) -> list[float]:
    """Return milliseconds of a step, one sample for each queue of steps."""
    for _ in range(WARM_STEPS):
        step()

    def queue() -> None:
        for _ in range(run.bench.steps):
            step()

    return [1e3 * _seconds(run, queue) / run.bench.steps for _ in range(run.bench.repeats)]


def _seconds(run: _Run, call: Callable[[], object]) -> float:
    """Return seconds by the wall clock, as a user waits; the device's work included."""
    synchronize(run.bench.device)
    began = time.perf_counter()
    call()
    synchronize(run.bench.device)
    return time.perf_counter() - began
