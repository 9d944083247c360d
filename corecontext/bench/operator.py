"""How long do CCA's forward and forward + backward take here, against full causal SDPA and against the floor?

And how does their peak memory grow with the length? Run it with `corecontext bench operator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from corecontext.bench import cost
from corecontext.bench.measure import PeakMemory, matmul_flops_per_s, peak_bytes_in_subprocess, sample_seconds
from corecontext.config import CCAConfig
from corecontext.ops.api import cca_attention, choose_backend
from corecontext.ops.rotary import Rotary
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import console, progress

THETA = 10_000.0
METHODS = ("full", "cca")
ENOUGH_S = 60.0  # no more repeats of a call once they took this long together


@dataclass(frozen=True)
class OperatorBench:
    """What to measure."""

    lengths: Sequence[int] = (32768,)
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    group_size: int = 16
    window_size: int = 1024
    backward: bool = True
    memory_lengths: Sequence[int] | None = None
    """Lengths at which peak memory is measured; default a quarter, half and all of the longest."""
    repeats: int = 5

    def __post_init__(self) -> None:
        CCAConfig(self.group_size, self.window_size)  # validates
        for name, values in (("length", self.lengths), ("memory_length", self.memory_lengths or (1,)),
                             ("query_heads", (self.query_heads,)), ("kv_heads", (self.kv_heads,)),
                             ("batch", (self.batch,)), ("repeats", (self.repeats,))):
            for value in values:
                if value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide query_heads, got {self.kv_heads} and {self.query_heads}.")
        if self.head_dim % 2 or not 2 <= self.head_dim <= 512:
            raise ValueError(f"head_dim must be even and at most 512, got {self.head_dim}.")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}.")

    def sizes(self, length: int) -> dict[str, Any]:
        """The arguments of `make_call` that say how large the inputs are."""
        return {"length": length, "query_heads": self.query_heads, "kv_heads": self.kv_heads,
                "head_dim": self.head_dim, "batch": self.batch, "dtype": self.dtype, "device": self.device,
                "group_size": self.group_size, "window_size": self.window_size}

    def params(self, length: int, method: str) -> dict[str, Any]:
        """A record's params; g and s belong to CCA only."""
        sizes = {k: v for k, v in self.sizes(length).items() if k != "device"}
        if method == "full":
            del sizes["group_size"], sizes["window_size"]
        probe = torch.empty(1, 1, 1, self.head_dim, dtype=getattr(torch, self.dtype), device=self.device)
        return {"method": method, "backend": "sdpa" if method == "full" else choose_backend("auto", probe), **sizes}

    def flops(self, length: int, method: str, backward: bool) -> int:
        """Operations of one call."""
        g, s = (1, 1) if method == "full" else (self.group_size, self.window_size)
        return sum(cost.operator_flops(length, self.query_heads, self.kv_heads, self.head_dim, group_size=g,
                                       window_size=s, batch=self.batch, backward=back)
                   for back in ((False, True) if backward else (False,)))


def run_operator_bench(bench: OperatorBench) -> list[Record]:
    """Check that CCA is right, then measure; returns the records, method "floor" being the shortest possible time."""
    check_correct(bench)
    passes = (False, True) if bench.backward else (False,)
    longest = max(bench.lengths)
    memory_lengths = bench.memory_lengths or sorted({max(1, longest // 4), max(1, longest // 2), longest})
    device, records = device_name(bench.device), []
    steps = len(METHODS) * len(passes) * (sum(bench.lengths) + sum(memory_lengths) / 4)
    with progress("corecontext bench operator", steps) as advance:
        rate = matmul_flops_per_s(getattr(torch, bench.dtype), bench.device)
        for length in bench.lengths:
            for backward in passes:
                name = "operator.forward_backward_ms" if backward else "operator.forward_ms"
                for method in METHODS:
                    call = make_call(method, backward=backward, **bench.sizes(length))
                    seconds = sample_seconds(call, repeats=bench.repeats, device=bench.device, budget_s=ENOUGH_S)
                    params = bench.params(length, method)
                    records.append(make_record(name, [1e3 * x for x in seconds], params, device=device))
                    floor_ms = 1e3 * cost.floor_seconds(bench.flops(length, method, backward), rate)
                    records.append(make_record(name, floor_ms, {**params, "method": "floor", "of": method,
                                                                "backend": "matmul"}, device=device))
                    del call
                    advance(length)
        for length in memory_lengths:
            for backward in passes:
                for method in METHODS:
                    arguments = {"method": method, "backward": backward, **bench.sizes(length)}
                    peak = (peak_bytes_in_subprocess(__name__, "peak_bytes", arguments) if bench.device == "cpu"
                            else peak_bytes(**arguments))
                    params = {**bench.params(length, method), "backward": backward}
                    records.append(make_record("operator.peak_bytes", peak, params, device=device))
                    advance(length / 4)
    return records


def make_call(method: str, *, length: int, query_heads: int, kv_heads: int, head_dim: int, batch: int, dtype: str,
              device: str, group_size: int, window_size: int, backward: bool) -> Callable[[], Tensor]:
    """A function that runs the operator once on inputs made here: forward, or forward and backward."""
    q, k, v = make_inputs(length, query_heads, kv_heads, head_dim, batch, dtype, device)
    grad = torch.randn_like(q) if backward else None
    attend = _attend_full if method == "full" else _attend_cca

    def call() -> Tensor:
        if grad is None:
            with torch.no_grad():
                return attend(q, k, v, group_size, window_size)
        for x in (q, k, v):
            x.grad = None
            x.requires_grad_()
        out = attend(q, k, v, group_size, window_size)
        out.backward(grad)
        return out

    return call


def make_inputs(length: int, query_heads: int, kv_heads: int, head_dim: int, batch: int, dtype: str,
                device: str) -> list[Tensor]:
    """q [B, H, L, D], k and v [B, Hkv, L, D], standard normal, seed 0."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(batch, heads, length, head_dim, generator=generator, device=device,
                        dtype=getattr(torch, dtype)) for heads in (query_heads, kv_heads, kv_heads)]


def peak_bytes(**arguments: Any) -> int:
    """Peak memory of one call above its inputs."""
    short = {**arguments, "length": arguments["window_size"] + 3 * arguments["group_size"]}
    make_call(**short)()  # loads code and starts threads, which are no cost of the call
    call = make_call(**arguments)
    peak = PeakMemory(arguments["device"])
    call()
    return peak.read()


def check_correct(bench: OperatorBench) -> None:
    """Raise unless CCA agrees with the float64 reference as closely as plain attention does, query by query."""
    length = bench.window_size + 4 * bench.group_size + 3
    q, k, v = make_inputs(length, bench.query_heads, bench.kv_heads, bench.head_dim, 1, bench.dtype, bench.device)
    sizes = (bench.group_size, bench.window_size)
    q64, k64, v64 = q.double(), k.double(), v.double()
    truth = _attend_cca(q64, k64, v64, *sizes, backend="reference")
    error = (_attend_cca(q, k, v, *sizes) - truth).abs().amax(-1)
    usual = (_attend_full(q, k, v, *sizes) - _attend_full(q64, k64, v64, *sizes)).abs().amax(-1)
    bound = 2 * usual.clamp(min=usual.median()) + torch.finfo(q.dtype).eps * truth.abs().amax(-1)
    if not bool((error <= 4 * bound).all()):
        row = int((error / bound).amax((0, 1)).argmax())
        raise AssertionError(f"CCA is wrong on this machine, nothing was timed: query {row} is off by "
                             f"{float(error[..., row].max()):.2e}, plain attention by {float(usual.max()):.2e}")


def _attend_full(q: Tensor, k: Tensor, v: Tensor, group_size: int, window_size: int) -> Tensor:
    """The baseline: whatever PyTorch's own attention picks, on grouped heads."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _attend_cca(q: Tensor, k: Tensor, v: Tensor, group_size: int, window_size: int, backend: str = "auto") -> Tensor:
    """CCA with the default settings."""
    out = cca_attention(q, k, v, group_size=group_size, window_size=window_size, rotary=_rotary(q), backend=backend)
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out


def _rotary(q: Tensor) -> Rotary:
    """The rotation that the keys are taken to have; it turns core keys to their middle position."""
    return Rotary.from_theta(THETA, q.shape[-1])


def print_table(records: Sequence[Record]) -> None:
    """Time and memory by length, CCA beside full attention, with the share of the floor that was reached."""
    params = next(r.params for r in records if r.params["method"] == "cca")
    table = Table(title=f"{records[0].device}\n{params['query_heads']} query and {params['kv_heads']} KV heads of "
                        f"{params['head_dim']}, {params['dtype']}, g = {params['group_size']}, s = "
                        f"{params['window_size']}", box=SIMPLE_HEAD)
    for column in ("", "length", "full (SDPA)", "CCA", "full / CCA", "floor, full", "floor, CCA"):
        table.add_column(column, justify="left" if not column and not table.columns else "right")
    for row in table_rows(records):
        table.add_row(*row)
    console().print(table)
    console().print("floor: the operations at the matrix product rate measured here; no method can be faster.")


def table_rows(records: Sequence[Record]) -> list[list[str]]:
    """The cells of the table, also of README's."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for r in records:
        method = r.params["method"] + (f" of {r.params['of']}" if "of" in r.params else "")
        label = {"operator.forward_ms": "forward", "operator.forward_backward_ms": "forward + backward",
                 "operator.peak_bytes": "memory, " + ("forward + backward" if r.params.get("backward")
                                                      else "forward")}[r.name]
        found.setdefault((label, r.params["length"]), {})[method] = r.value
    rows = []
    for (label, length), value in sorted(found.items()):
        memory = label.startswith("memory")
        shown = [f"{value[m] / 2 ** 20:.1f} MiB" if memory else f"{value[m]:.0f} ms" for m in METHODS]
        floors = [f"{value['floor of ' + m]:.0f} ms" if not memory else "" for m in METHODS]
        rows.append([label, str(length), *shown, f"{value['full'] / value['cca']:.2f}x", *floors])
    return rows
