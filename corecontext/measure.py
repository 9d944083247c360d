"""Measure the peak memory of a call.

On a GPU PyTorch's allocator counts it. On a CPU it is the peak of the process's resident memory,
less the resident memory before the call. Linux lets a process reset that peak; it is right to about
a MiB, since the kernel counts pages in batches. Where it cannot be reset (macOS), the growth of the
peak of the process's whole life is returned, a lower bound.
"""

import os
import resource
import sys
from pathlib import Path

import torch


def synchronize(device: str) -> None:
    """Wait for a GPU's queued work; return at once on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory:
    """Measure peak memory, in bytes, above the memory in use when this object is made."""

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._device = device
        if self._cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        elif reset_resident_peak():
            self._before = _resident_bytes()
        else:
            self._before = _resident_peak_bytes()

    def read(self) -> int:
        """Return the peak so far."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _resident_peak_bytes() - self._before)


def reset_resident_peak() -> bool:
    """Reset the peak of the process's resident memory; return False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets the peak: man proc
        return True
    except OSError:
        return False


def _resident_bytes() -> int:
    """Return the resident memory of this process now: the second field of statm, in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _resident_peak_bytes() -> int:
    """Return the peak of the resident memory of this process since its start or its reset."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes


def package_path() -> dict[str, str]:
    """Return the environment variables with which a subprocess imports this very package, and no
    files of the current folder."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
