"""The Triton backend's surface: the same functions as `packed`, on one sequence, and the decoding
step of a cache.

Kernels made for Hopper take the calls they can; those of `attend`, which run everywhere, take the
others.
"""

from __future__ import annotations

import contextlib
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
from torch import Tensor

from corecontext.ops import compose
from corecontext.ops.capability import nvidia_capability
from corecontext.ops.triton import attend as anywhere
from corecontext.ops.triton import pool as pooling
from corecontext.ops.triton.attend import attend_backward
from corecontext.ops.triton.decode import decode_step, turn_tables
from corecontext.ops.triton.pool import pool_backward

try:  # Gluon is young: a Triton without it, or with another, has the other kernels
    from corecontext.ops.triton import hopper_backward, hopper_forward
except (ImportError, AttributeError):
    hopper_forward = hopper_backward = None

__all__ = [
    "attend",
    "attend_backward",
    "decode_step",
    "gradients",
    "pool",
    "pool_backward",
    "turn_tables",
    "unsupported_reason",
]

MAX_HEAD_DIM = 256


def unsupported_reason(q: Tensor) -> str | None:
    """Why this backend cannot take the call, or None."""
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"device {q.device.type!r} is not cuda"
    capability = nvidia_capability(q.device)
    if capability is not None and capability < (8, 0):  # Triton has given these up
        return f"compute capability {capability[0]}.{capability[1]} is less than 8.0"
    if q.dtype == torch.float64:
        return "float64 is not one of float32, bfloat16, float16"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim {q.shape[-1]} is more than {MAX_HEAD_DIM}"
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_k: Tensor,
    core_v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    **sizes: Any,
) -> tuple[Tensor, Tensor]:
    """As `packed.attend`: out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in float32."""
    with _on(q):
        if (
            hopper_forward is not None
            and q.numel()
            and hopper_forward.unsupported_reason(q, scale, softcap) is None
        ):
            try:
                return hopper_forward.attend(q, k, v, core_k, core_v, scale=scale, **sizes)
            except triton.CompilationError as error:
                _do_without_hopper(error)
        return anywhere.attend(q, k, v, core_k, core_v, scale=scale, softcap=softcap, **sizes)


def gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    *tensors: Any,
    scale: float,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `compose.gradients`."""
    with _on(q):
        if (
            hopper_backward is not None
            and hopper_backward.unsupported_reason(q, scale, softcap) is None
        ):
            try:
                return hopper_backward.gradients(
                    grad_out, grad_lse, q, *tensors, scale=scale, **options
                )
            except triton.CompilationError as error:
                _do_without_hopper(error)
        return compose.gradients(
            Anywhere, grad_out, grad_lse, q, *tensors, scale=scale, softcap=softcap, **options
        )


def _do_without_hopper(error: triton.CompilationError) -> None:
    """Gluon changes from release to release; nothing has been launched when it cannot compile."""
    global hopper_forward, hopper_backward
    hopper_forward = hopper_backward = None
    why = next(
        (line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__
    )
    warnings.warn(
        f"Triton {triton.__version__} cannot compile the kernels made for Hopper, so those that run on every "
        f"GPU are used, which are slower; Triton 3.6 to 3.9 can. It said: {why.strip()}",
        stacklevel=3,
    )


def pool(q_last: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """As `packed.pool`, differentiable like it."""
    if torch.is_grad_enabled() and (q_last.requires_grad or k.requires_grad or v.requires_grad):
        return _Pool.apply(q_last, k, v, options)
    return pooling.pool(q_last, k, v, **options)


class _Pool(torch.autograd.Function):
    """Pooling by itself; where attention follows, `autograd` goes back through both at once."""

    @staticmethod
    def forward(ctx, q_last, k, v, options):
        ctx.save_for_backward(q_last, k, v)
        ctx.options = options
        return pooling.pool(q_last, k, v, **options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_core_k, grad_core_v):
        return *pool_backward(grad_core_k, grad_core_v, *ctx.saved_tensors, **ctx.options), None


def _on(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()


class Anywhere:
    """This backend without the kernels made for one chip."""

    pool_backward = staticmethod(pool_backward)
    attend_backward = staticmethod(attend_backward)

    @staticmethod
    def attend(q: Tensor, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """As `attend`."""
        with _on(q):
            return anywhere.attend(q, *tensors, **options)

    @staticmethod
    def gradients(
        grad_out: Tensor, *tensors: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `gradients`."""
        with _on(grad_out):
            return compose.gradients(Anywhere, grad_out, *tensors, **options)
