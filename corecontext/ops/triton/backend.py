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

import torch
import triton
from torch import Tensor

from corecontext.ops import compose
from corecontext.ops.capability import nvidia_capability
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream
from corecontext.ops.triton import fetch_backend
from corecontext.ops.triton.attend import anywhere
from corecontext.ops.triton.attend.chosen import Call, Fetched, Kernels, attend_raw
from corecontext.ops.triton.attend.far_past import FarPast, far_past, near_past
from corecontext.ops.triton.attend.marks import Marks
from corecontext.ops.triton.decode.plain_step import decode_step
from corecontext.ops.triton.decode.step_with_fetch import fetch_step, fetch_step_unsupported_reason
from corecontext.ops.triton.fetch_backend import fetch_unsupported_reason
from corecontext.ops.triton.pool import launcher as pooling
from corecontext.ops.triton.pool import masses as pool_mass
from corecontext.ops.triton.pool.launcher import rotation_tables

try:  # Gluon is young: a Triton without it, or with another, has the other kernels
    from corecontext.ops.triton.attend import hopper_backward, hopper_forward
    from corecontext.ops.triton.attend import hopper_query as hopper_fetch_query
    from corecontext.ops.triton.attend import hopper_raw as hopper_fetch
except (ImportError, AttributeError):
    hopper_forward = hopper_backward = None

__all__ = [
    "attend",
    "attend_backward",
    "attend_list",
    "decode_step",
    "fetch_attend",
    "fetch_attend_backward",
    "fetch_gradients",
    "fetch_step",
    "fetch_step_unsupported_reason",
    "fetch_unsupported_reason",
    "gradients",
    "mass",
    "mass_backward",
    "pool",
    "pool_backward",
    "rotation_tables",
    "unsupported_reason",
]

MAX_HEAD_DIM = 256
_INTERPRETED = triton.knobs.runtime.interpret  # torch.compile cannot trace its look-up


def unsupported_reason(q: Tensor) -> str | None:
    """Return why this backend cannot take the call, or None."""
    if q.device.type != "cuda" and not _INTERPRETED:
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
    """Attend as `packed.attend` does: out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in
    float32."""
    with _on(tokens.q):
        return _attend(tokens, cores, spec, core_bias)


def attend_list(
    tokens: Tokens, far: FarPast, spec: Spec, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `attend` does, to a far past that is listed already.

    Args:
        tokens: Raw tokens from the first one on that a query sees behind its far past.
        out: [N, r, T, D] of any strides, written in place; None makes one.
    """
    with _on(tokens.q):
        return _attend_list(tokens, far, spec, out=out)


def _attend(
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None,
    marks: Marks | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend`, to no core token that is marked."""
    far = far_past(tokens, cores, spec, core_bias)
    return _attend_list(near_past(tokens, spec), far, spec, marks)


def _attend_list(
    tokens: Tokens,
    far: FarPast,
    spec: Spec,
    marks: Marks | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend_list`, by the kernels that suit the device."""
    if (
        hopper_forward is not None
        and tokens.q.numel()
        and hopper_forward.unsupported_reason(tokens.q, spec) is None
    ):
        try:
            return hopper_forward.attend_list(tokens, far, spec, marks, out)
        except triton.CompilationError as error:
            _do_without_hopper(error)
    results, lse = anywhere.attend_list(tokens, far, spec, marks)
    return results if out is None else out.copy_(results), lse


def _attend_raw(call: Call, out: Tensor, lse: Tensor) -> None:
    """`fetch_attend.attend_raw`, by the kernels that suit the device."""
    if (
        hopper_forward is not None
        and hopper_forward.unsupported_reason(call.tokens.q, call.spec) is None
    ):
        for kernel in (hopper_fetch, hopper_fetch_query):
            if kernel.takes(call):
                try:
                    kernel.attend(call, out, lse)
                    return
                except triton.CompilationError as error:
                    _do_without_hopper(error)
                    break
    attend_raw(call, out, lse)


def attend_backward(
    upstream: Upstream, tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return gradients as `packed.attend_backward` does, in float32, the same from run to run."""
    with _on(tokens.q):
        return anywhere.attend_backward(upstream, tokens, cores, spec, core_bias)


def fetch_attend(
    tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fetch as `fetch_backend.fetch_attend` does."""
    with _on(tokens.q):
        return fetch_backend.fetch_attend(
            tokens, cores, spec, core_bias, Kernels(_attend, _attend_raw)
        )


def fetch_attend_backward(
    upstream: Upstream,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None,
    choice: Tensor,
) -> tuple[Tensor, ...]:
    """Return gradients as `fetch_backend.fetch_attend_backward` does."""
    with _on(tokens.q):
        return fetch_backend.fetch_attend_backward(upstream, tokens, cores, spec, core_bias, choice)


def fetch_gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None,
    choice: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Return gradients as `compose.gradients` does, for the choice of a forward; None where
    `fetch_attend_backward` and `pool_backward` have to make them."""
    with _on(tokens.q):
        if (
            hopper_backward is None
            or fetch_unsupported_reason(spec, tokens) is not None
            or hopper_backward.unsupported_reason(tokens.q, spec) is not None
        ):
            return None
        fetched = Fetched(choice, spec.fetch_share)
        try:
            return hopper_backward.gradients(
                upstream, tokens, groups, cores, spec, core_bias, fetched
            )
        except triton.CompilationError as error:
            _do_without_hopper(error)
            return None


def gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return gradients as `compose.gradients` does."""
    with _on(tokens.q):
        if (
            hopper_backward is not None
            and hopper_backward.unsupported_reason(tokens.q, spec) is None
        ):
            try:
                return hopper_backward.gradients(upstream, tokens, groups, cores, spec, core_bias)
            except triton.CompilationError as error:
                _do_without_hopper(error)
        this = sys.modules[__name__]
        return compose.gradients(this, upstream, tokens, groups, cores, spec, core_bias)


def _do_without_hopper(error: triton.CompilationError) -> None:
    """Drop the kernels made for Hopper, with a warning: Gluon changes from release to release.
    Nothing has been launched when it cannot compile."""
    global hopper_forward, hopper_backward
    hopper_forward = hopper_backward = None
    lines = (line for line in reversed(str(error).splitlines()) if line.strip())
    reason = next(lines, type(error).__name__)
    warnings.warn(
        f"Triton {triton.__version__} cannot compile the kernels made for Hopper, so those that "
        "run on every GPU are used, which are slower; Triton 3.6 to 3.9 can. It said: "
        f"{reason.strip()}",
        stacklevel=3,
    )


def pool(groups: Groups, spec: Spec) -> Cores:
    """Pool as `packed.pool` does, differentiable like it."""
    follows = torch.is_grad_enabled() and any(x.requires_grad for x in groups)
    if follows or torch.compiler.is_compiling():
        rotary = spec.rotary
        rotation = (None, False) if rotary is None else (rotary.inv_freq, rotary.interleaved)
        settings = (*rotation, spec.core_heads, spec.scale, spec.softcap)
        return Cores(*pooling.pool_op(*groups, *settings))
    with _on(groups.k):
        return pooling.pool(groups, spec)


def pool_backward(grad_cores: Cores, groups: Groups, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients as `packed.pool_backward` does."""
    with _on(groups.k):
        return pooling.pool_backward(grad_cores, groups, spec)


def mass(groups: Groups, spec: Spec) -> Tensor:
    """Return the mass of each core token, as `packed.mass`."""
    with _on(groups.k):
        return pool_mass.forward(groups, spec)


def mass_backward(grad: Tensor, groups: Groups, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return gradients as `packed.mass_backward` does."""
    with _on(groups.k):
        return pool_mass.backward(grad, groups, spec)


def _on(x: Tensor) -> AbstractContextManager:
    """Make x's device the current one, on which Triton launches."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()
