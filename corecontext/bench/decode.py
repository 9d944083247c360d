"""How near does a decoding step come to the memory's rate? One layer's step in a CUDA graph, against full attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from corecontext.bench.operator import OperatorBench, rotary_of
from corecontext.cache import CompactLayer
from corecontext.config import CCAConfig
from corecontext.record import Record, make_record
from corecontext.terminal import console
from corecontext.visibility import num_visible_cores

ROUND_BYTES = 1 << 30  # layers take turns until so much is read: no cache of the chip holds it
REPLAYS, ROUNDS = 20, 5


def measure(one: OperatorBench, length: int, device: str) -> list[Record]:
    """Microseconds a layer at this context for CCA and, where its cache fits, full attention; and their floors."""
    cores = num_visible_cores(length, one.group_size, one.window_size)
    entries = {"cca": cores + length + 1 - cores * one.group_size, "full": length}
    rate, records = copy_bytes_per_s(one.device), []
    for method, count in entries.items():
        size = 2 * count * one.batch * one.kv_heads * one.head_dim * getattr(torch, one.dtype).itemsize
        layers = max(2, -(-ROUND_BYTES // size))
        if layers * size > torch.cuda.mem_get_info(one.device)[0] // 2:
            continue
        step = _cca_layers(one, length, layers) if method == "cca" else _full_layers(one, length, layers)
        params = {**one.params(length, method), "bytes": size}
        if method == "full":
            params["backend"] = "sdpa flash"
        times = [1e6 * x / layers for x in _replay_seconds(step)]
        records.append(make_record("operator.decode_us", times, params, device=device))
        floor = {**params, "method": "floor", "of": method, "backend": "copy"}
        records.append(make_record("operator.decode_us", 1e6 * size / rate, floor, device=device))
        del step
        torch.cuda.empty_cache()
    return records


@functools.lru_cache(maxsize=None)
def copy_bytes_per_s(device: str) -> float:
    """Bytes read and written per second by a device-to-device copy of 4 GiB, or of what fits."""
    size = min(1 << 32, torch.cuda.mem_get_info(device)[0] // 4)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(_event_seconds(lambda: target.copy_(source)))


def _cca_layers(one: OperatorBench, length: int, count: int) -> Callable[[], None]:
    """A step of each of `count` layers filled to `length`."""
    layers, token = [], [_normal(one, heads, 1) for heads in (one.query_heads, one.kv_heads, one.kv_heads)]
    for _ in range(count):
        layer = CompactLayer(CCAConfig(one.group_size, one.window_size), rotary_of(token[0]),
                             max_length=length + 4 * REPLAYS * (ROUNDS + 4))
        layer.attend(*token)
        layer.keys.normal_()
        layer.values.normal_()
        layer.seen.fill_(length)
        layers.append(layer)

    def step() -> None:
        for layer in layers:
            layer.attend(*token)

    return step


def _full_layers(one: OperatorBench, length: int, count: int) -> Callable[[], None]:
    """One query per head against each of `count` full caches."""
    caches = [[_normal(one, one.kv_heads, length) for _ in range(2)] for _ in range(count)]
    query = _normal(one, one.query_heads, 1)

    def step() -> None:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            for keys, values in caches:
                F.scaled_dot_product_attention(query, keys, values, enable_gqa=one.query_heads != one.kv_heads)

    return step


def _normal(one: OperatorBench, heads: int, length: int) -> Tensor:
    return torch.randn(one.batch, heads, length, one.head_dim, device=one.device, dtype=getattr(torch, one.dtype))


def _replay_seconds(step: Callable[[], object]) -> list[float]:
    """Seconds of a step captured in a CUDA graph."""
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    return _event_seconds(graph.replay)


def _event_seconds(call: Callable[[], object]) -> list[float]:
    """Seconds of a call, ROUNDS samples of REPLAYS each."""
    call()
    samples = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            call()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3 / REPLAYS)
    return samples


def print_lines(records: Sequence[Record]) -> None:
    """What `measure` found, a line each."""
    for row in rows_of(records):
        console().print(f"decoding at {row['length']} tokens, batch {row['batch']}, {row['kv_heads']} KV heads, "
                        f"{row['method']}: {row['us']:.1f} us a layer, {row['bytes'] / 1e6:.0f} MB, "
                        f"{row['bytes'] / row['us'] / 1e6:.2f} TB/s, {row['share']:.0%} of the copy rate")


def rows_of(records: Sequence[Record]) -> list[dict]:
    """Each decoding step with its share of the copy rate."""
    def key(p: dict) -> tuple:
        return p["length"], p["batch"], p["kv_heads"]
    floors = {(*key(r.params), r.params["of"]): r.value for r in records
              if r.name == "operator.decode_us" and r.params["method"] == "floor"}
    return [{**r.params, "us": r.value, "share": floors[(*key(r.params), r.params["method"])] / r.value}
            for r in records if r.name == "operator.decode_us" and r.params["method"] != "floor"]
