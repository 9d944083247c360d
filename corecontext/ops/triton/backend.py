"""Gather the surface of the Triton backend: the functions of `packed` on one sequence, fetch by
kernels, and the decoding step of a cache."""

import torch
import triton
from torch import Tensor

from corecontext.ops import compose
from corecontext.ops.capability import nvidia_capability
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream
from corecontext.ops.triton import fetch_kernels as fetch
from corecontext.ops.triton.attend import anywhere, best
from corecontext.ops.triton.attend.far_past import FarPast
from corecontext.ops.triton.decode.plain_step import decode_step
from corecontext.ops.triton.decode.step_with_fetch import fetch_step, fetch_step_unsupported_reason
from corecontext.ops.triton.launch import on_device
from corecontext.ops.triton.pool import launcher as pooling
from corecontext.ops.triton.pool.launcher import rotation_tables

__all__ = [
    "attend",
    "attend_backward",
    "attend_list",
    "decode_step",
    "fetch",
    "fetch_step",
    "fetch_step_unsupported_reason",
    "gradients",
    "pool",
    "pool_backward",
    "pool_with_mass",
    "rotation_tables",
    "unsupported_reason",
]

MAX_HEAD_DIM = 256
# Read at import: torch.compile cannot trace it.
_INTERPRETED = triton.knobs.runtime.interpret


def unsupported_reason(q: Tensor) -> str | None:
    """Return why this backend cannot take the call, or None."""
    if q.device.type != "cuda" and not _INTERPRETED:
        return f"device {q.device.type!r} is not cuda"
    capability = nvidia_capability(q.device)
    if capability is not None and capability < (8, 0):  # Triton supports none of these
        return f"compute capability {capability[0]}.{capability[1]} is less than 8.0"
    if q.dtype == torch.float64:
        return "float64 is not one of float32, bfloat16, float16"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim {q.shape[-1]} is more than {MAX_HEAD_DIM}"
    return None


def attend(
    tokens: Tokens, cores: Cores, spec: Spec, mass: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `packed.attend` does: out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in
    float32."""
    with on_device(tokens.q):
        return best.attend(tokens, cores, spec, mass)


def attend_list(
    tokens: Tokens, far: FarPast, spec: Spec, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `attend` does, to raw tokens and a far past whose entries are in a list."""
    with on_device(tokens.q):
        return best.attend_list(tokens, far, spec, out=out)


def attend_backward(
    upstream: Upstream, tokens: Tokens, cores: Cores, spec: Spec, mass: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, core keys, core values and masses (None without them), in
    float32, the same from run to run."""
    with on_device(tokens.q):
        return anywhere.attend_backward(upstream, tokens, cores, spec, mass)


def gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, through attention and through pooling: on Hopper by
    kernels that add up those of queries in any order, unless PyTorch is to be deterministic."""
    with on_device(tokens.q):
        grads = best.gradients(upstream, tokens, groups, cores, spec, mass)
        if grads is not None:
            return grads
        grads = anywhere.attend_backward(upstream, tokens, cores, spec, mass)
        return compose.through_pooling(grads, groups, spec, pooling.pool_backward)


def pool(groups: Groups, spec: Spec) -> Cores:
    """Pool groups into core tokens; torch can differentiate the result."""
    has_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in groups)
    if has_gradients or torch.compiler.is_compiling():
        rotary = spec.rotary
        rotation = (None, False) if rotary is None else (rotary.inv_freq, rotary.interleaved)
        settings = (*rotation, spec.scale, spec.softcap)
        return Cores(*pooling.pool_op(*groups, *settings))
    return pool_with_mass(groups, spec)[0]


def pool_with_mass(groups: Groups, spec: Spec) -> tuple[Cores, Tensor | None]:
    """Pool groups into core tokens; return these, and their masses where the settings ask."""
    with on_device(groups.k):
        return pooling.pool(groups, spec)


def pool_backward(
    grad_cores: Cores, groups: Groups, spec: Spec, grad_mass: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q_last, k and v of groups, from those of their core tokens."""
    with on_device(groups.k):
        return pooling.pool_backward(grad_cores, groups, spec, grad_mass)
