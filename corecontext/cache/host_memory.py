"""Pin host memory: keep tensors there that a GPU reads and writes by itself."""

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory as a tensor of `device`.

    For a GPU the memory is pinned and mapped: kernels address it as any tensor of the device, also
    in captured graphs, and each access goes over the bus.

    Raises:
        MemoryError: less host memory is available, or it cannot be pinned.
    """
    memory, is_zero = _host_bytes(math.prod(shape) * dtype.itemsize, device)
    if not is_zero:
        memory.zero_()
    return memory.view(dtype).view(shape)


def _host_bytes(size: int, device: torch.device) -> tuple[Tensor, bool]:
    """Return host memory of this size as bytes of `device`, and whether they are zeros; errors as
    of `host_zeros`."""
    try:
        if device.type != "cuda" or not size:
            _check_available(size)
            return torch.zeros(size, dtype=torch.uint8, device=device), True
        spare = _spare_pages(size, device)
        pages = _new_pinned(size, device) if spare is None else spare
        memory: Any = _Pinned(pages, device)
        tensor = torch.as_tensor(memory, device=device)
        assert tensor.data_ptr() == pages.data_ptr(), "pinned memory must not be copied"
        return tensor, spare is None
    except (RuntimeError, OSError) as error:
        raise MemoryError(_does_not_fit(size, str(error).splitlines()[0])) from None


def _check_available(size: int) -> None:
    """Raise MemoryError where less host memory is available."""
    available = available_bytes()
    if available is not None and size > available:
        raise MemoryError(_does_not_fit(size, f"{available} are available"))


def _does_not_fit(size: int, reason: str) -> str:
    """Return the message for raw tokens of this size in bytes that find no host memory."""
    return (
        f"raw tokens must fit in host memory, got {size} bytes more: {reason}. Use fewer rows, a "
        "shorter maximum length or cache_dtype='int8'."
    )


def _new_pinned(size: int, device: torch.device) -> Tensor:
    """Return pinned pages of zeros."""
    _check_available(size)
    pages = _new_pages(size)
    with torch.cuda.device(device):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), size, 0))
    return pages


class _Pinned:
    """Pinned pages in the form that `torch.as_tensor` reads; they are spare with the last tensor on
    them."""

    def __init__(self, pages: Tensor, device: torch.device) -> None:
        # At the exit of the process the system releases the memory.
        weakref.finalize(self, _keep, pages, device).atexit = False
        self.__cuda_array_interface__ = {
            "shape": (pages.numel(),),
            "typestr": "|u1",
            "data": (pages.data_ptr(), False),
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
    sources = [x.to(target.dtype).contiguous() for target, x in zip(targets, sources)]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources):
            source.record_stream(stream)
            # The copy engine takes one contiguous piece at a time: else the tokens of a head.
            at_once = target.is_contiguous()
            pieces = (x[None] if at_once else x.flatten(0, 1) for x in (target, source))
            for piece, tokens in zip(*pieces):
                piece.copy_(tokens, non_blocking=True)
    return stream.record_event()


class HostCopies(NamedTuple):
    """Copies of tensors in one piece of host memory."""

    tensors: list[Tensor]
    """As tensors of the device, contiguous."""
    ended: torch.cuda.Event | None
    """Whoever reads them on the device waits for it; None where they are complete."""


_ALIGNED = 256
"""Bytes at whose multiples tensors begin in memory that they share."""


def copies_in_host_memory(sources: Sequence[Tensor]) -> HostCopies:
    """Copy tensors [B, Hkv, n, D] of a device to host memory; a GPU goes on meanwhile.

    Memory for all of them is pinned at once: to pin many pieces takes longer than to fill them.

    Raises:
        MemoryError: as of `host_zeros`.
    """
    device = sources[0].device
    sizes = [-(-x.nbytes // _ALIGNED) * _ALIGNED for x in sources]
    memory, _ = _host_bytes(sum(sizes), device)
    pieces = zip(memory.split(sizes), sources)
    copies = [piece[: x.nbytes].view(x.dtype).view(x.shape) for piece, x in pieces]
    if device.type == "cuda":
        return HostCopies(copies, copy_beside(copies, sources))
    for copy, x in zip(copies, sources):
        copy.copy_(x)
    return HostCopies(copies, None)


_TOUCHED = 64 * 2**20
"""Least bytes that threads bring into memory faster than pinning does; to wake them takes time."""


def _new_pages(size: int) -> Tensor:
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


_spare: list[tuple[Tensor, torch.device]] = []
"""Pinned memory that no tensor uses. The cache of the next text has often the same sizes, and to
pin memory takes longer than to read a prompt."""


def _keep(pages: Tensor, device: torch.device) -> None:
    """Keep pinned memory for the next tensor of its size, as long as more than that is available.

    Garbage may be collected while a graph is captured, which a call of CUDA would break: then it is
    left to the next call of this function to release some.
    """
    _spare.append((pages, device))
    if torch.cuda.is_current_stream_capturing():
        return
    available = available_bytes()
    if available is not None and sum(pages.numel() for pages, _ in _spare) > available:
        _release()


def _spare_pages(size: int, device: torch.device) -> Tensor | None:
    """Return spare memory of this size for a device, after the kernels that use it; where there is
    none, release all, so that spare memory of other sizes does not add up."""
    for number, (pages, pinned_for) in enumerate(_spare):
        if pages.numel() == size and pinned_for == device:
            torch.cuda.synchronize(device)
            del _spare[number]
            return pages
    _release()
    return None


def _release() -> None:
    """Unpin and release spare memory, after the kernels that use it."""
    while _spare:
        pages, device = _spare.pop()
        torch.cuda.synchronize(device)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(pages.data_ptr()))


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
