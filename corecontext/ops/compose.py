"""Compose the backward of pooling and attention from a backend's two on one sequence."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream


def gradients(
    backend: ModuleType,
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and core_bias of a whole sequence (docs/math.md, eq. 8 to
    10).

    Args:
        backend: Has `attend_backward` and `pool_backward`.

    Returns:
        In the shapes of q, k, v and core_bias, in float32 or wider.
    """
    dq, dk, dv, dcore_k, dcore_v, dbias = backend.attend_backward(
        upstream, tokens, cores, spec, core_bias
    )
    num_groups, size = groups.k.shape[1:3]
    if num_groups:
        dq_last, dk_pool, dv_pool = backend.pool_backward(Cores(dcore_k, dcore_v), groups, spec)
        pooled = slice(spec.sinks, spec.sinks + num_groups * size)
        dq[:, :, pooled][:, :, size - 1 :: size] += dq_last
        dk[:, pooled] += dk_pool.flatten(1, 2)
        dv[:, pooled] += dv_pool.flatten(1, 2)
    return dq, dk, dv, dbias
