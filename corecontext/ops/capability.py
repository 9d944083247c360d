"""What kind of NVIDIA GPU a device is."""

from __future__ import annotations

import functools

import torch


def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability, or None for what is not NVIDIA's: PyTorch gives AMD's chips numbers of
    the same kind."""
    return _ask(device)


# What torch.compiler.assume_constant_result sets, without loading the compiler: otherwise the
# question is a node of the compiled graph.
nvidia_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _ask(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)
