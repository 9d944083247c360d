"""Pin host memory: keep tensors there that a GPU reads and writes by itself."""

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory as a tensor of `device`.

    For a GPU the memory is pinned and mapped: kernels address it as any tensor of the device, also
    in captured graphs, and each access goes over the bus.

    Raises:
        MemoryError: less host memory is available, or it cannot be pinned.
    """
    size = math.prod(shape) * dtype.itemsize
    available = available_bytes()
    if available is not None and size > available:
        raise MemoryError(_does_not_fit(size, f"{available} are available"))
    try:
        if device.type != "cuda" or not size:
            return torch.zeros(shape, dtype=dtype, device=device)
        memory: Any = _Pinned(size, device)
        tensor = torch.as_tensor(memory, device=device)
        assert tensor.data_ptr() == memory.address, "pinned memory must not be copied"
        return tensor.view(dtype).view(shape)
    except (RuntimeError, OSError) as error:
        raise MemoryError(_does_not_fit(size, str(error).splitlines()[0])) from None


def _does_not_fit(size: int, reason: str) -> str:
    """Return the message for raw tokens of this size in bytes that find no host memory."""
    return (
        f"raw tokens must fit in host memory, got {size} bytes more: {reason}. Use fewer rows, a "
        "shorter maximum length or cache_dtype='int8'."
    )


class _Pinned:
    """Page-locked memory of this size in bytes, in the form that `torch.as_tensor` reads; it is
    unpinned with the last tensor on it."""

    def __init__(self, size: int, device: torch.device) -> None:
        pages = _pages(size)
        cuda = torch.cuda.cudart()
        self.address = pages.data_ptr()
        with torch.cuda.device(device):
            torch.cuda.check_error(cuda.cudaHostRegister(self.address, size, 0))
        # At the exit of the process the system releases the memory.
        weakref.finalize(self, _unpin, pages, device).atexit = False
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }


_streams: dict[torch.device, torch.cuda.Stream] = {}
"""The stream of each device for copies to host memory."""


def copy_beside(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event:
    """Copy tensors [B, Hkv, n, D] of a device to tensors in host memory, by the device's copy
    engine, while the current stream goes on; return the event at the copies' end."""
    device = sources[0].device
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    # The copy engine takes one contiguous piece at a time: the tokens of a head.
    sources = [x.to(target.dtype).contiguous() for target, x in zip(targets, sources)]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources):
            source.record_stream(stream)
            for head, tokens in zip(target.flatten(0, 1), source.flatten(0, 1)):
                head.copy_(tokens, non_blocking=True)
    return stream.record_event()


_TOUCHED = 64 * 2**20
"""Least bytes that threads bring into memory faster than pinning does; to wake them takes time."""


def _pages(size: int) -> Tensor:
    """Return memory of exactly this size, where PyTorch's pinned memory has powers of two.

    The system makes its pages, large ones where it has them, of zeros when they are first touched.
    Many pages are touched here, by all threads, because pinning would touch them one by one. A
    forked process does not inherit them: a write to a page that two processes share would move it
    away from the device.
    """
    if not hasattr(mmap, "MADV_DONTFORK"):  # Windows
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).zero_()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = torch.frombuffer(memory, dtype=torch.uint8)
    return pages.zero_() if size >= _TOUCHED else pages


_unused: list[tuple[Tensor, torch.device]] = []
"""Pinned memory that no tensor uses, still to be unpinned."""


def _unpin(pages: Tensor, device: torch.device) -> None:
    """Unpin and release memory, after the kernels that use it.

    Garbage may be collected while a graph is captured. Waiting for the device would break the
    capture, so memory is then left to the next call of this function.
    """
    _unused.append((pages, device))
    while _unused and not torch.cuda.is_current_stream_capturing():
        pages, device = _unused.pop()
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())


def available_bytes() -> int | None:
    """Return the bytes of host memory that this process may still take: of the machine, and of its
    control group; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        total = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # Pages of files that were read, such as the model's, count as used and can be dropped.
        used -= _inactive_file_bytes((group / "memory.stat").read_text())
        return min(total, limit - used)
    except (OSError, ValueError):  # no such group, or "max"
        return total


def _inactive_file_bytes(statistics: str) -> int:
    """Return the bytes of inactive file pages of a control group's memory.stat."""
    lines = (line.split() for line in statistics.splitlines())
    return next((int(value) for name, value in lines if name == "inactive_file"), 0)
