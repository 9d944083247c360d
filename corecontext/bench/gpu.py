"""How near does CCA come to a GPU's limit, pass by pass and length by length, and from which length on does it win?

Run it with `corecontext bench operator --device cuda`; docs/benchmarks.md says how each number is taken.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from corecontext.bench import cost, decode
from corecontext.bench.measure import matmul_flops_per_s
from corecontext.bench.operator import OperatorBench, attend_cca, check_correct, make_inputs
from corecontext.bench.rows import check_rows
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import console, progress

SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
PASSES = ("forward", "backward")
ALL_AT_LEAST_S = 2e-3  # short calls are timed several in a row
PAUSE_S = 0.3  # before each sample: a chip at its power limit runs slower, and not by whose turn it is


@dataclass(frozen=True)
class GpuBench:
    """What to measure; `base` says the sizes, its lengths and KV heads are replaced one by one."""

    base: OperatorBench
    kv_heads: Sequence[int] = (32, 8)
    decode_batches: Sequence[int] = (1, 8, 64)
    decode_length: int = 131072
    flex_limit: int = 32768
    """Longest length at which FlexAttention is compiled and timed."""
    baseline_limit_s: float = 20.0
    """A baseline whose call would take longer, four times its last at half the length, is left out."""


def run_gpu_bench(bench: GpuBench) -> tuple[list[Record], list[str]]:
    """Check, then measure; returns the records and what was left out."""
    base, records, notes = bench.base, [], []
    device = device_name(base.device)
    rate = matmul_flops_per_s(getattr(torch, base.dtype), base.device)
    with progress("corecontext bench operator", sum(base.lengths) * len(bench.kv_heads)) as advance:
        for kv_heads in bench.kv_heads:
            one = replace(base, kv_heads=kv_heads)
            check_correct(one)
            seconds: dict[tuple[str, str], float] = {}
            for length in sorted(one.lengths):
                records += _at_length(bench, one, length, rate, device, seconds, notes)
                advance(length)
    for kv_heads in bench.kv_heads if bench.decode_batches else ():
        for batch in bench.decode_batches:
            records += decode.measure(replace(base, kv_heads=kv_heads, batch=batch), bench.decode_length, device)
    return records, notes


def _at_length(bench: GpuBench, one: OperatorBench, length: int, rate: float, device: str,
               seconds: dict[tuple[str, str], float], notes: list[str]) -> list[Record]:
    """Every method at one length, in turn; `seconds` remembers the last time of each."""
    records = []
    q, k, v = make_inputs(length, one.query_heads, one.kv_heads, one.head_dim, one.batch, one.dtype, one.device)
    if length == max(one.lengths):
        check_rows(q, k, v, attend_cca(q, k, v, one.group_size, one.window_size), one.group_size, one.window_size)
    methods = [("cca", "")] + [("full", name) for name in ("cudnn", "flash", "flash_attn_4")] + [("cca", "flex")]
    for method, backend in methods:
        for name in PASSES if one.backward and not (backend == "flex") else ("forward",):
            if 4 * seconds.get((backend, name), 0.0) > bench.baseline_limit_s:
                notes.append(f"{backend} {name} at {length} tokens: would take longer than {bench.baseline_limit_s} s")
                continue
            if backend == "flex" and length > bench.flex_limit:
                continue
            try:
                samples = _samples(_call(method, backend, name, q, k, v, one), one.repeats)
            except _Missing:
                continue
            except (RuntimeError, torch.OutOfMemoryError) as error:
                notes.append(f"{backend or 'CCA'} {name} at {length} tokens: {str(error).splitlines()[0][:90]}")
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            seconds[backend, name] = statistics.median(samples)
            params = one.params(length, method)
            if backend:
                params["backend"] = f"sdpa {backend}" if backend in SDPA else backend
            records.append(make_record(f"operator.{name}_ms", [1e3 * x for x in samples], params, device=device))
        if method == "cca" and not backend:
            records += _floors(one, length, rate, device)
            if one.backward:
                records.append(_memory(one, length, q, k, v, device))
    return records


def _floors(one: OperatorBench, length: int, rate: float, device: str) -> list[Record]:
    """The shortest possible times of CCA at this machine's matrix product rate."""
    records = []
    for name in PASSES if one.backward else PASSES[:1]:
        flops = cost.operator_flops(length, one.query_heads, one.kv_heads, one.head_dim, group_size=one.group_size,
                                    window_size=one.window_size, batch=one.batch, backward=name == "backward")
        params = {**one.params(length, "cca"), "method": "floor", "of": "cca", "backend": "matmul", "flops": flops}
        records.append(make_record(f"operator.{name}_ms", 1e3 * cost.floor_seconds(flops, rate), params, device=device))
    return records


def _memory(one: OperatorBench, length: int, q: Tensor, k: Tensor, v: Tensor, device: str) -> Record:
    """Peak memory of forward and backward, with q, k, v and the gradient of the output."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() - sum(x.numel() * x.element_size() for x in (q, k, v))
    torch.cuda.reset_peak_memory_stats()
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend_cca(*inputs, one.group_size, one.window_size)
    torch.autograd.grad(out, inputs, torch.randn_like(out))
    peak = torch.cuda.max_memory_allocated() - before
    least = cost.operator_bytes(length, one.query_heads, one.kv_heads, one.head_dim, q.element_size(),
                                batch=one.batch, backward=True)
    return make_record("operator.peak_bytes", peak, {**one.params(length, "cca"), "pass": "forward + backward",
                                                     "least_bytes": least}, device=device)


class _Missing(Exception):
    """A baseline that is not installed here."""


def _call(method: str, backend: str, name: str, q: Tensor, k: Tensor, v: Tensor,
          one: OperatorBench) -> Callable[[], Any]:
    """One pass of one method. Baselines that know no grouped heads get expanded keys, made before the clock starts."""
    attend = _attend(method, backend, one, q)
    if method == "full":
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    inputs = [x.detach().requires_grad_(name == "backward") for x in (q, k, v)]
    if name == "forward":
        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*inputs)
        return forward
    out = attend(*inputs)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _attend(method: str, backend: str, one: OperatorBench, q: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The function of q, k, v that is timed."""
    if method == "cca" and not backend:
        return lambda q, k, v: attend_cca(q, k, v, one.group_size, one.window_size)
    if backend == "flex":
        return _flex(one, q)
    if backend == "flash_attn_4":
        try:
            from flash_attn.cute import flash_attn_func
        except ImportError:
            raise _Missing from None
        return lambda q, k, v: flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)[0].transpose(1, 2)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPA[backend]]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return sdpa


def _flex(one: OperatorBench, q: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """CCA through FlexAttention: our pooling, then its mask over [core tokens; tokens]."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from corecontext.bench.operator import rotary_of
    from corecontext.ops.api import pool_core_tokens

    g, s, length = one.group_size, one.window_size, q.shape[2]
    num_cores = length // g

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        cores = torch.clamp(query + 1 - s, min=0) // g
        token = key - num_cores
        return torch.where(key < num_cores, key < cores, (token >= cores * g) & (token <= query))

    mask = create_block_mask(sees, None, None, length, num_cores + length, device=q.device, _compile=True)
    compiled = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cores = pool_core_tokens(q, k, v, group_size=g, rotary=rotary_of(q))
        keys, values = (torch.cat(pair, 2) for pair in zip(cores, (k, v)))
        return compiled(q, keys, values, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def _samples(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of a call, by device events around as many calls in a row as last ALL_AT_LEAST_S."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    count = max(1, round(ALL_AT_LEAST_S / max(once, 1e-6)))
    samples = []
    for _ in range(repeats if once < 2 else 1):
        time.sleep(min(PAUSE_S, 20 * once))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()  # clocks rise and caches fill before the events
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3 / count)
    return samples


def rows_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row for each KV heads, pass and length: times of the methods, operations a second, share of the floor."""
    rows: dict[tuple[int, str, int], dict[str, Any]] = {}
    for r in records:
        if r.name not in ("operator.forward_ms", "operator.backward_ms"):
            continue
        p, name = r.params, r.name.removeprefix("operator.").removesuffix("_ms")
        row = rows.setdefault((p["kv_heads"], name, p["length"]), {"kv_heads": p["kv_heads"], "pass": name,
                                                                   "length": p["length"]})
        if p["method"] == "floor":
            row["floor"], row["flops"] = r.value, p.get("flops")
        else:
            row["cca" if p["method"] == "cca" and p["backend"] != "flex" else p["backend"]] = r.value
    found = [row for _, row in sorted(rows.items(), key=lambda item: (-item[0][0], item[0][1] != "forward",
                                                                       item[0][2])) if "cca" in row]
    for row in found:
        full = [row[name] for name in ("sdpa cudnn", "sdpa flash", "flash_attn_4") if name in row]
        row["gain"] = min(full) / row["cca"] if full else None
        row["tflops"] = row["flops"] / row["cca"] / 1e9 if row.get("flops") else None
        row["share"] = row["floor"] / row["cca"] if "floor" in row else None
    return found


def crossover(rows: Sequence[dict[str, Any]]) -> int | None:
    """The shortest measured length from which on CCA is no slower than the best full attention."""
    best = None
    for row in sorted(rows, key=lambda row: -row["length"]):
        if row["gain"] is None:
            continue
        if row["gain"] < 1:
            break
        best = row["length"]
    return best


def print_gpu_table(records: Sequence[Record], notes: Sequence[str]) -> None:
    """Every pass and length, decoding, and what was left out."""
    table = Table(title=records[0].device, box=SIMPLE_HEAD)
    names = ("KV heads", "pass", "length", "CCA ms", "cuDNN", "flash", "FA4", "flex", "best full / CCA", "TFLOP/s",
             "of the floor")
    for name in names:
        table.add_column(name, justify="left" if name == "pass" else "right")
    rows = rows_of(records)
    for row in rows:
        times = [f"{row[m]:.3g}" if m in row else "-" for m in ("cca", "sdpa cudnn", "sdpa flash", "flash_attn_4",
                                                                "flex")]
        table.add_row(str(row["kv_heads"]), row["pass"], str(row["length"]), *times,
                      f"{row['gain']:.2f}x" if row["gain"] else "-", f"{row['tflops']:.0f}" if row["tflops"] else "-",
                      f"{row['share']:.0%}" if row["share"] else "-")
    console().print(table)
    for kv_heads in sorted({row["kv_heads"] for row in rows}, reverse=True):
        for name in PASSES:
            some = [row for row in rows if row["kv_heads"] == kv_heads and row["pass"] == name]
            if some:
                console().print(f"{kv_heads} KV heads, {name}: no slower than full attention from "
                                f"{crossover(some) or 'no measured length'} tokens on")
    for r in records:
        if r.name == "operator.peak_bytes":
            console().print(f"{r.params['kv_heads']} KV heads, {r.params['length']} tokens, forward + backward: "
                            f"{r.value / 2 ** 20:.0f} MiB, {r.value / r.params['least_bytes']:.3f} of inputs, output "
                            "and their gradients")
    decode.print_lines(records)
    for note in notes:
        console().print(f"left out: {note}")
