"""The Triton backend's surface: the same functions as `packed`, on one sequence, and the decoding step of a cache."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from corecontext.ops.triton.attend import attend, attend_backward
from corecontext.ops.triton.decode import decode_step, turn_tables
from corecontext.ops.triton.pool import pool, pool_backward

__all__ = ["attend", "attend_backward", "decode_step", "pool", "pool_backward", "turn_tables", "unsupported_reason"]

MAX_HEAD_DIM = 256


def unsupported_reason(q: Tensor) -> str | None:
    """Why this backend cannot take the call, or None."""
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"device {q.device.type!r} is not cuda"
    if q.dtype == torch.float64:
        return "float64 is not one of float32, bfloat16, float16"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim {q.shape[-1]} is more than {MAX_HEAD_DIM}"
    return None
