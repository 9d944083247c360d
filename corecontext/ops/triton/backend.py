"""The Triton backend's surface: the same functions as `packed`, on one sequence, and the decoding
step of a cache.

Kernels made for Hopper take the calls they can; those of `attend`, which run everywhere, take the
others.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
from torch import Tensor

from corecontext.ops import compose, sinks
from corecontext.ops.capability import nvidia_capability
from corecontext.ops.spec import Cores, Groups, Slots, Spec, Tokens, Upstream
from corecontext.ops.triton import attend as anywhere
from corecontext.ops.triton import decode
from corecontext.ops.triton import pool as pooling
from corecontext.ops.triton.decode import turn_tables

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
    tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `packed.attend`: out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in float32."""
    q = tokens.q
    with _on(q):
        if spec.sinks:  # kernels made for one chip have not been tested with first tokens kept raw
            return sinks.attend(attend_anywhere, tokens, cores, spec, core_bias)
        if (
            hopper_forward is not None
            and q.numel()
            and hopper_forward.unsupported_reason(q, spec.scale, spec.softcap) is None
        ):
            try:
                return hopper_forward.attend(
                    *tokens[:3],
                    *cores,
                    q_start=tokens.q_start,
                    k_start=tokens.k_start,
                    group_size=spec.group_size,
                    window_size=spec.window_size,
                    scale=spec.scale,
                    core_bias=core_bias,
                )
            except triton.CompilationError as error:
                _do_without_hopper(error)
        return attend_anywhere(tokens, cores, spec, core_bias)


def attend_anywhere(
    tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `attend`, by the kernels that run on every GPU; spec has no first tokens kept raw."""
    return anywhere.attend(
        *tokens[:3],
        *cores,
        q_start=tokens.q_start,
        k_start=tokens.k_start,
        group_size=spec.group_size,
        window_size=spec.window_size,
        scale=spec.scale,
        softcap=spec.softcap,
        core_bias=core_bias,
    )


def attend_backward(
    upstream: Upstream, tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """As `packed.attend_backward`: gradients in float32, the same from run to run."""
    with _on(tokens.q):
        if spec.sinks:
            return sinks.attend_backward(attend_backward, upstream, tokens, cores, spec, core_bias)
        return anywhere.attend_backward(
            upstream.grad_out,
            upstream.grad_lse,
            *tokens[:3],
            *cores,
            upstream.out,
            upstream.lse,
            group_size=spec.group_size,
            window_size=spec.window_size,
            scale=spec.scale,
            softcap=spec.softcap,
            core_bias=core_bias,
        )


def gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `compose.gradients`."""
    q = tokens.q
    with _on(q):
        if (
            hopper_backward is not None
            and not spec.sinks
            and hopper_backward.unsupported_reason(q, spec.scale, spec.softcap) is None
        ):
            try:
                return hopper_backward.gradients(
                    upstream.grad_out,
                    upstream.grad_lse,
                    *tokens[:3],
                    upstream.out,
                    upstream.lse,
                    groups,
                    cores,
                    group_size=spec.group_size,
                    window_size=spec.window_size,
                    scale=spec.scale,
                    core_bias=core_bias,
                    pooling=spec.pooling,
                    core_heads=spec.core_heads,
                    rotary=spec.rotary,
                )
            except triton.CompilationError as error:
                _do_without_hopper(error)
        this = sys.modules[__name__]
        return compose.gradients(this, upstream, tokens, groups, cores, spec, core_bias)


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


def pool(groups: Groups, spec: Spec) -> Cores:
    """As `packed.pool`, differentiable like it."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in groups):
        return Cores(*_Pool.apply(*groups, spec))
    return _pool(groups, spec)


def pool_backward(
    grad_cores: Cores, groups: Groups, spec: Spec
) -> tuple[Tensor | None, Tensor, Tensor]:
    """As `packed.pool_backward`."""
    with _on(groups.k):
        return pooling.pool_backward(*grad_cores, *groups, **_pool_options(spec))


def _pool(groups: Groups, spec: Spec) -> Cores:
    with _on(groups.k):
        return Cores(*pooling.pool(*groups, **_pool_options(spec)))


def _pool_options(spec: Spec) -> dict[str, Any]:
    return {
        "scale": spec.scale,
        "softcap": spec.softcap,
        "pooling": spec.pooling,
        "core_heads": spec.core_heads,
        "rotary": spec.rotary,
    }


class _Pool(torch.autograd.Function):
    """Pooling by itself; where attention follows, `autograd` goes back through both at once."""

    @staticmethod
    def forward(ctx, q_last, k, v, spec):
        ctx.save_for_backward(q_last, k, v)
        ctx.spec = spec
        return tuple(_pool(Groups(q_last, k, v), spec))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_core_k, grad_core_v):
        groups = Groups(*ctx.saved_tensors)
        return *pool_backward(Cores(grad_core_k, grad_core_v), groups, ctx.spec), None


def decode_step(
    q: Tensor, k: Tensor, v: Tensor, slots: Slots, spec: Spec, core_bias: float = 0.0
) -> Tensor:
    """Append one token to each row of a compact cache and attend from it (docs/math.md, eq. 1 to
    5); [B, H, 1, D] in the dtype of q."""
    return decode.decode_step(
        q,
        k,
        v,
        slots.keys,
        slots.values,
        slots.seen,
        slots.pad,
        turn=slots.turn,
        interleaved=spec.rotary is not None and spec.rotary.interleaved,
        group_size=spec.group_size,
        window_size=spec.window_size,
        ring_size=slots.ring_size,
        sinks=spec.sinks,
        pooling=spec.pooling,
        core_heads=spec.core_heads,
        scale=spec.scale,
        softcap=spec.softcap,
        core_bias=core_bias,
        key_scales=slots.key_scales,
        value_scales=slots.value_scales,
        cache_dtype=slots.cache_dtype,
    )


def _on(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()
