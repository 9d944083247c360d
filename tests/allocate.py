"""Allocate memory in a subprocess of tests/test_bench.py."""

import torch

from corecontext import measure

MIB = 2**20


def allocate(mib: int) -> int:
    """Return the peak memory of making and dropping a tensor of so many MiB."""
    torch.ones(8 * MIB)  # 32 MiB, released before the count begins
    peak = measure.PeakMemory()
    torch.ones(mib * MIB // 4)
    torch.ones(1000)
    return peak.read()
