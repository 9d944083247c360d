"""Call PyTorch's attention with rows that its kernels read rightly, and with few lengths: for each
length that a process sees first cuDNN plans for 40 ms or more (docs/tuning-notes.md)."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_READ_BYTES = 16
"""Kernels read so many bytes of a row at once."""
_PLANNED = 769
"""Least tokens of a prompt that cuDNN reads sooner than FlashAttention-2 does, on an H200."""
_MOST_PADDED = 16384
"""Tokens of a prompt, up to which to plan takes longer than to read tokens that pad it."""


def step_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from few queries [B, H, n, D] to all keys and values [B, H, S, D], without cuDNN: each
    step has another S."""
    with _without_cudnn(q):
        return scaled_attention(q, k, v, scale=scale)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attend causally from [B, H, T, D] to keys and values [B, Hkv, T, D], by few plans of cuDNN:
    it is the fastest for many tokens, and takes none for as few as `_PLANNED`."""
    length = q.shape[2]
    if not _plans(q) or length > _MOST_PADDED or torch.is_grad_enabled():
        return scaled_attention(q, k, v, is_causal=True, **options)
    if length < _PLANNED:
        with _without_cudnn(q):
            return scaled_attention(q, k, v, is_causal=True, **options)
    # Tokens behind the last one are seen by none before them.
    behind = planned_length(length) - length
    q, k, v = (F.pad(x, (0, 0, 0, behind)) if behind else x for x in (q, k, v))
    return scaled_attention(q, k, v, is_causal=True, **options)[:, :, :length]


def planned_length(length: int) -> int:
    """Return the least of the lengths planned for that is at least `length`: eight for each power
    of two."""
    step = max(1, 1 << (length - 1).bit_length() >> 4)
    return -(-length // step) * step


def _plans(x: Tensor) -> bool:
    """Whether PyTorch may call cuDNN for tensors such as x."""
    return x.is_cuda


@contextlib.contextmanager
def _without_cudnn(x: Tensor) -> Iterator[None]:
    """Let PyTorch take another of its kernels for tensors such as x."""
    cuda = torch.backends.cuda
    if torch.compiler.is_compiling() or not _plans(x) or not cuda.cudnn_sdp_enabled():
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        yield
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
