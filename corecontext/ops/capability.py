"""Ask a device for its NVIDIA compute capability, and whether its work is being captured."""

import functools

import torch


def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability, or None for a device that is not NVIDIA's: PyTorch gives AMD's
    chips numbers of the same kind."""
    return _capability(device)


# Tells torch.compile that the result is constant, not a node of its graph, as
# `torch.compiler.assume_constant_result` does, which would load the compiler. It looks through
# functools.cache and would miss a mark on a cached function: so another one has the cache.
nvidia_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph of the device's current stream is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)
