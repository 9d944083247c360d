"""What kind of NVIDIA GPU a device is."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=None)
def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability, or None for what is not NVIDIA's: PyTorch gives AMD's chips numbers of the same kind."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)
