"""How long do whole models take for the first and the next token, and what memory, by method and
context length?

And how many tokens a second do they decode at the best batch that fits? Run it with `corecontext
bench model`; docs/benchmarks.md says how each number is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.check import short
from benchmarks.model_check import check_model
from benchmarks.model_methods import (
    FULL,
    OURS,
    RAW,
    ROWS,
    CompactRun,
    FilledRun,
    PlainRun,
    RowsRun,
    StaticRun,
    attention,
    raw_config,
)
from benchmarks.model_settings import ModelBench
from benchmarks.operator import free_memory
from benchmarks.shapes import make_model, make_prompt
from corecontext import cost
from corecontext.config import CCAConfig
from corecontext.heads.budget import Shape
from corecontext.inference.limits import check_length, free_bytes
from corecontext.integrations.hf_cache import cache_bytes
from corecontext.loading import is_out_of_memory, one_line
from corecontext.measure import PeakMemory, copy_bytes_per_s, matmul_flops_per_s, synchronize
from corecontext.ops.api import choose_backend
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress

WARM_STEPS = 8  # kernels are compiled, and the step is captured, in the first ones
ENOUGH_S = 30.0  # no more samples of a prompt once they took this long together
MEMORY_SHARE = 0.95  # of the free memory that the caches of a batch may take


@dataclass
class _Run:
    """One run: the model, what is found, and how fast the machine is."""

    bench: ModelBench
    on_records: Callable[[list[Record]], None] | None = None
    records: list[Record] = field(default_factory=list)
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Length and seconds of the longest prompt so far, by method."""

    def __post_init__(self) -> None:
        bench = self.bench
        self.model, self.of_model = make_model(bench.shape, bench.dtype, bench.device)
        if bench.mode != "throughput":  # which fills caches without a prompt
            with one_line():  # said before anything is measured
                check_length(
                    self.model.config,
                    max(bench.lengths),
                    WARM_STEPS + bench.repeats * bench.steps + 2,
                )
        self.cuda = torch.device(bench.device).type == "cuda"
        self.device = device_name(bench.device)
        self.cost = cost.ModelCost.of(self.model.config, self.model)
        self.weight_bytes = sum(x.numel() * x.element_size() for x in self.model.parameters())
        self.flops_per_s = matmul_flops_per_s(getattr(torch, bench.dtype), bench.device)
        self.bytes_per_s = copy_bytes_per_s(bench.device)
        free_memory(self.cuda)

    def params(self, method: str, length: int, config: CCAConfig, **more: Any) -> dict[str, Any]:
        """What a record says besides its value; g and s belong to CCA only."""
        own: dict[str, Any] = {}
        if method in OURS:
            own = {"group_size": config.group_size, "window_size": config.window_size}
            own |= {"cache_dtype": config.cache_dtype} if config.cache_dtype != "auto" else {}
        elif method == "streaming_llm":
            own = {"sinks": 4, "window_size": config.window_size}
        return {
            "method": method,
            "backend": self.backend(method),
            **self.of_model,
            "length": length,
            "batch": 1,
            **own,
            **{name: value for name, value in more.items() if value is not None},
        }

    def backend(self, method: str) -> str:
        """What computes a method's attention: for CCA, what `backend="auto"` chooses here."""
        if method in OURS:
            return choose_backend(
                "auto",
                torch.empty(
                    1, 1, 1, self.cost.head_dim, dtype=self.model.dtype, device=self.bench.device
                ),
            )
        return {"sdpa_flash": "flash", "sdpa_cudnn": "cudnn", ROWS: "rows"}.get(method, "sdpa")

    def record(self, name: str, value: float | Sequence[float], params: dict[str, Any]) -> None:
        """Keep a value, and hand it over at once: a long run that is cut short has not been for
        nothing."""
        self.records.append(make_record(name, value, params, device=self.device))
        if self.on_records is not None:
            self.on_records(self.records[-1:])

    def skip(self, what: str, reason: str, params: dict[str, Any]) -> None:
        self.record("model.skipped", 1, {**params, "what": what, "reason": reason})

    def attempt(self, what: str, params: dict[str, Any], measure: Callable[[], object]) -> bool:
        """Measure; what memory or a baseline refuses is recorded, and the rest goes on."""
        reason = None
        try:
            measure()
        except Exception as error:
            if is_out_of_memory(error):
                reason = "out of memory" + (
                    ": " + str(error) if isinstance(error, MemoryError) and str(error) else ""
                )
            elif params["method"] in OURS:
                raise
            else:
                reason = short(error)
        if reason is not None:  # outside of `except`, whose traceback would keep the tensors alive
            self.skip(what, reason, params)
        free_memory(self.cuda)
        return reason is None


def run_model_bench(
    bench: ModelBench, on_records: Callable[[list[Record]], None] | None = None
) -> list[Record]:
    """Check that CCA is right on this model, then measure; returns the records, "floor" being the
    least there can be.

    Args:
        on_records: Given each record as soon as it is made.

    Raises:
        UserError: the checkpoint is missing or unsupported.
    """
    run = _Run(bench, on_records)
    if set(OURS) & set(bench.methods):
        with one_line():  # the window may reach beyond the model's positions
            check_model(run.model, bench.config())
    jobs = list({"lengths": _lengths, "sweep": _sweep, "throughput": _throughput}[bench.mode](run))
    with progress(
        f"python -m benchmarks model, {run.of_model['shape']}", sum(weight for weight, _ in jobs)
    ) as advance:
        for weight, job in jobs:
            job()
            advance(weight)
    return run.records


def _lengths(run: _Run) -> Iterator[tuple[float, Callable[[], None]]]:
    """Every method at every length, the shortest first; the weight says about how long each
    takes."""
    bench = run.bench
    for length in sorted(bench.lengths):
        for method in bench.methods:
            for fuse in bench.fuses if method in OURS else ("none",):
                yield (
                    length,
                    lambda length=length, method=method, fuse=fuse: _method(  # type: ignore[misc]
                        run, method, length, bench.config(), fuse
                    ),
                )
        yield 0, lambda length=length: _floors(run, length)  # type: ignore[misc]


def _sweep(run: _Run) -> Iterator[tuple[float, Callable[[], None]]]:
    """CCA by group and window size."""
    for length in run.bench.lengths:
        for config in run.bench.sweep():
            yield (
                length,
                lambda length=length, config=config: _method(  # type: ignore[misc]
                    run, "cca", length, config, run.bench.fuses[0]
                ),
            )


def _method(run: _Run, method: str, length: int, config: CCAConfig, fuse: str) -> None:
    """First token, memory and next tokens of one method at one length."""
    bench = run.bench
    own: dict[str, Any] = {"fuse": fuse, "chunk_size": bench.chunk_size} if method in OURS else {}
    if method == RAW:
        try:
            config_of, count = raw_config(
                Shape(run.cost.num_layers, run.cost.kv_heads), config, length
            )
        except ValueError as error:
            return run.skip("prompt", short(error), run.params(method, length, config, **own))
        own |= {"raw_heads": count, "raw_window_size": config_of.window_size}
    else:
        config_of = config
    params = run.params(method, length, config, **own)
    known = run.last.get(method)
    estimate = known and known[1] * (length / known[0]) ** 2
    if method in FULL and estimate and estimate > bench.baseline_limit_s:
        run.skip(
            "growing cache", f"over the limit of {bench.baseline_limit_s:g} s a prompt", params
        )
    elif method != ROWS:
        with attention(run.model, method, config_of):
            run.attempt(
                "growing cache" if method not in OURS else "prompt",
                params,
                lambda: _prompt_and_steps(run, method, params, length, fuse),
            )
    if method in (*FULL, ROWS) and "itl" in bench.what:
        static = {**params, "cache": "static"}
        with attention(run.model, method, config):
            run.attempt("static cache", static, lambda: _static_steps(run, method, static, length))


def _prompt_and_steps(
    run: _Run, method: str, params: dict[str, Any], length: int, fuse: str
) -> None:
    """Prompts, as often as there is time for; the last one goes on."""
    bench = run.bench
    total = WARM_STEPS + bench.repeats * bench.steps + 2
    fusing = None if fuse == "none" else fuse

    def start(ids: torch.Tensor, new_tokens: int) -> PlainRun | CompactRun:
        if method not in OURS:
            return PlainRun(run.model, method, ids)
        return CompactRun(run.model, ids, new_tokens, fuse=fusing, chunk_size=bench.chunk_size)

    warm = start(make_prompt(run.model, 1, min(length, 2048)), 2)
    warm.first()  # loads code and compiles kernels
    warm.step()
    warm.close()
    ids, seconds, peaks, going = make_prompt(run.model, 1, length), list[float](), list[int](), None
    for _ in range(bench.repeats if "ftl" in bench.what else 1):
        if going is not None:
            going.close()
        free_memory(run.cuda)
        going, peak = start(ids, total), PeakMemory(bench.device)
        seconds.append(_seconds(run, going.first))
        peaks.append(peak.read())
        if sum(seconds) > ENOUGH_S:
            break
    assert going is not None
    run.last[method] = length, min(seconds)
    kind = {"cache": "compact" if method in OURS else "dynamic"}
    if "ftl" in bench.what:
        run.record("model.first_token_s", seconds, params)
        run.record("model.peak_bytes", run.weight_bytes + max(peaks), params)
        run.record("model.cache_bytes", cache_bytes(going.cache), {**params, **kind})
    if "itl" in bench.what:
        run.record("model.next_token_ms", _step_ms(run, going.step), {**params, **kind})
    going.close()


def _static_steps(run: _Run, method: str, params: dict[str, Any], length: int) -> None:
    total = WARM_STEPS + run.bench.repeats * run.bench.steps + 2
    static = (RowsRun if method == ROWS else StaticRun)(
        run.model, method, params["batch"], length, total
    )
    run.record("model.next_token_ms", _step_ms(run, static.step), params)
    static.close()


def _floors(run: _Run, length: int) -> None:
    """The least possible: operations at the matrix product rate, bytes at the rate of copying, both
    measured here."""
    bench = run.bench
    for of, g, s in (("full", 1, 1), ("cca", bench.group_size, bench.window_size)):
        params = {**run.params(of, length, bench.config()), "method": "floor", "of": of}
        itemsize = _cache_itemsize(run) if of == "cca" else run.cost.itemsize
        if "ftl" in bench.what:
            flops = run.cost.prefill_flops(length, g, s)
            run.record(
                "model.first_token_s",
                cost.floor_seconds(flops, run.flops_per_s),
                {**params, "backend": "matmul"},
            )
            run.record(
                "model.cache_bytes",
                run.cost.cache_bytes(length, g, s) * itemsize / run.cost.itemsize,
                {**params, "backend": "formula"},
            )
        if "itl" in bench.what:
            num_bytes = run.cost.step_bytes(length, g, s, cache_itemsize=itemsize)
            run.record(
                "model.next_token_ms",
                1e3 * num_bytes / run.bytes_per_s,
                {**params, "backend": "copy", "bytes_read": num_bytes},
            )


def _cache_itemsize(run: _Run) -> float:
    """Bytes of a number in CCA's cache, its share of a scale included."""
    return run.cost.itemsize if run.bench.cache_dtype == "auto" else 1 + 4 / run.cost.head_dim


def _throughput(run: _Run) -> Iterator[tuple[float, Callable[[], None]]]:
    """Every method that has a static step, at every length."""
    for length in run.bench.lengths:
        for method in run.bench.methods:
            if method != "streaming_llm":
                yield 1, lambda length=length, method=method: _batches(run, method, length)  # type: ignore[misc]


def _batches(run: _Run, method: str, length: int) -> None:
    """Tokens per second by batch."""
    bench, config = run.bench, run.bench.config()
    for batch in batches(run, method, length):
        own = (
            {"fuse": bench.fuses[0], "cache": "compact"} if method == "cca" else {"cache": "static"}
        )
        params = {**run.params(method, length, config, **own), "batch": batch}
        with attention(run.model, method, config):
            if not run.attempt(
                "throughput",
                params,
                lambda batch=batch, params=params: _tokens_per_s(  # type: ignore[misc]
                    run, method, params, length, batch
                ),
            ):
                return


def batches(run: _Run, method: str, length: int) -> list[int]:
    """What the caches' formula says that memory holds, and the powers of two down to a sixteenth of
    it."""
    bench, config = run.bench, run.bench.config()
    g, s = (config.group_size, config.window_size) if method == "cca" else (1, 1)
    room = length + WARM_STEPS + bench.repeats * bench.steps + 2
    row = run.cost.cache_bytes(room, g, s) * (
        _cache_itemsize(run) / run.cost.itemsize if method == "cca" else 1
    )
    row += (
        16 * run.model.config.get_text_config(decoder=True).vocab_size
    )  # logits, in several dtypes
    free = free_bytes(torch.device(bench.device))
    most = bench.max_batch if free is None else min(bench.max_batch, int(MEMORY_SHARE * free / row))
    powers = [2**i for i in range(32) if most / 16 <= 2**i <= most]
    return sorted({*powers, most}) if most else [1]  # the one that does not fit is recorded as such


def _tokens_per_s(run: _Run, method: str, params: dict[str, Any], length: int, batch: int) -> None:
    bench = run.bench
    total, fuse = WARM_STEPS + bench.repeats * bench.steps + 2, bench.fuses[0]
    going: StaticRun | FilledRun = (
        FilledRun(
            run.model, bench.config(), batch, length, total, fuse=None if fuse == "none" else fuse
        )
        if method == "cca"
        else (RowsRun if method == ROWS else StaticRun)(run.model, method, batch, length, total)
    )
    run.record("model.tokens_per_s", [1e3 * batch / ms for ms in _step_ms(run, going.step)], params)
    going.close()


def _step_ms(run: _Run, step: Callable[[], object]) -> list[float]:
    """Milliseconds of a step, one sample for each queue of steps."""
    for _ in range(WARM_STEPS):
        step()

    def queue() -> None:
        for _ in range(run.bench.steps):
            step()

    return [1e3 * _seconds(run, queue) / run.bench.steps for _ in range(run.bench.repeats)]


def _seconds(run: _Run, call: Callable[[], object]) -> float:
    """By the wall clock, as a user waits; the device's work included."""
    synchronize(run.bench.device)
    began = time.perf_counter()
    call()
    synchronize(run.bench.device)
    return time.perf_counter() - began
