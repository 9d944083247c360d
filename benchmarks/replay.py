"""Let decoding steps fetch groups that repeat as those of a real text do, and layers share host
memory: a model of random weights repeats few, and pinning memory takes longer than measuring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.model_methods import fetching
from benchmarks.model_settings import ModelBench
from corecontext.cache import host_store
from corecontext.ops.spec import RawSlots
from corecontext.ops.triton import fetch_decode

STEPS = 16  # after which choices repeat from the first


def repeating_choices(rows: int, count: int, num_groups: int, share: float) -> Tensor:
    """Return the groups [STEPS, rows, count] that steps choose, rising; each step keeps `share` of
    those of the step before."""
    generator = torch.Generator().manual_seed(0)

    def shuffled(x: Tensor) -> Tensor:
        return x.gather(1, torch.rand(x.shape, generator=generator).argsort(1))

    kept = round(share * count)
    chosen = torch.arange(count).expand(rows, -1)
    unchosen = torch.arange(count, num_groups).expand(rows, -1)
    steps = []
    for _ in range(STEPS):
        chosen = shuffled(chosen)
        unchosen = shuffled(unchosen)
        before = chosen[:, kept:]
        chosen = torch.cat((chosen[:, :kept], unchosen[:, : count - kept]), 1)
        unchosen = torch.cat((unchosen[:, count - kept :], before), 1)
        steps.append(chosen.sort(1)[0])
    return torch.stack(steps).int()


@contextlib.contextmanager
def _replayed(share: float) -> Iterator[None]:
    """Have steps with slots fetch groups of which `share` were fetched by the step before."""
    load = fetch_decode.find_and_load
    tables: dict[Any, Tensor] = {}

    def find_and_load(raw: RawSlots, chosen: Tensor, marks: Tensor, sinks: int) -> Tensor:
        assert raw.slots is not None, "there are slots"
        rows, count = chosen.shape
        key = (rows, count, raw.codes.shape[2])
        if key not in tables:
            tables[key] = repeating_choices(*key, share).to(chosen.device)
        step = raw.slots.counts[0, 0, :1] % STEPS
        numbers = tables[key].index_select(0, step)[0]
        marks.zero_().scatter_(1, numbers.long(), 1)
        return load(raw, numbers, marks, sinks)

    with mock.patch.object(fetch_decode, "find_and_load", find_and_load):
        yield


def repeating(bench: ModelBench, method: str) -> contextlib.AbstractContextManager[None]:
    """Have a method with slots choose groups that repeat, where that is asked for."""
    if bench.hit_share is None or "fetch_slots" not in fetching(bench, method):
        return contextlib.nullcontext()
    return _replayed(bench.hit_share)


@contextlib.contextmanager
def shared_host_memory() -> Iterator[None]:
    """Give the keys of all layers one memory, and their values one."""
    allocate = host_store.host_zeros
    memory: dict[Any, list[Tensor]] = {}

    def host_zeros(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensors = memory.setdefault((tuple(shape), dtype, device), [])
        if len(tensors) < 2:
            tensors.append(allocate(shape, dtype, device))
        else:
            tensors.reverse()
        return tensors[-1]

    with mock.patch.object(host_store, "host_zeros", host_zeros):
        yield
