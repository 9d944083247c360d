"""Call PyTorch's attention with rows that its kernels read rightly."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_READ_BYTES = 16
"""Kernels read so many bytes of a row at once."""


def step_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from few queries [B, H, n, D] to all keys and values [B, H, S, D], without cuDNN: for
    each S that a process sees first it takes milliseconds to plan, and each step has another."""
    cuda = torch.backends.cuda
    if not q.is_cuda or torch.compiler.is_compiling() or not cuda.cudnn_sdp_enabled():
        return scaled_attention(q, k, v, scale=scale)
    cuda.enable_cudnn_sdp(False)
    try:
        return scaled_attention(q, k, v, scale=scale)
    finally:
        cuda.enable_cudnn_sdp(True)


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call `torch.nn.functional.scaled_dot_product_attention`, which on some GPUs reads rows that
    begin anywhere as if they were aligned, and gives wrong results without an error (seen with
    PyTorch 2.11, float16 and bfloat16, on an H100)."""
    return F.scaled_dot_product_attention(*map(with_aligned_rows, (q, k, v)), **options)


def with_aligned_rows(x: Tensor) -> Tensor:
    """Return x, copied unless it is contiguous, or each row begins at a multiple of 16 bytes and
    has its elements side by side."""
    if x.is_contiguous():
        return x
    *steps, last = x.stride()
    unit = max(1, _READ_BYTES // x.element_size())
    # mutant layouts: PyTorch reads rows that begin anywhere
    if last == 1 and all(step % unit == 0 for step in (x.storage_offset(), *steps)):
        return x
    return x.contiguous()
