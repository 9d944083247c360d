"""The backward of pooling and attention together, from a backend's two on one sequence."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor


def gradients(
    backend: ModuleType,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    groups: tuple[Tensor, Tensor, Tensor],
    cores: tuple[Tensor, Tensor],
    *,
    group_size: int,
    window_size: int,
    core_bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the bias (docs/math.md, eq. 8 to 10).

    Args:
        grad_out, grad_lse: Gradients of the output [N, r, T, D] and, or None, of the log-sum-exp
            [N, r, T].
        q, k, v: [N, r, T, D] and [N, T, D].
        out, lse: What `attend` gave.
        groups: What `pool` got: group-end queries [N, r, M, D], keys and values by group [N, M, g,
            D].
        cores: What it gave: core keys and values [N, 1 or r, M, D].
        core_bias: [N, r].
        options: scale, softcap, pooling, core_heads and rotary.

    Returns:
        In the shapes of q, k, v and the bias, in float32 or wider.
    """
    core_k, core_v = cores
    dq, dk, dv, dcore_k, dcore_v, dbias = backend.attend_backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        core_k,
        core_v,
        out,
        lse,
        group_size=group_size,
        window_size=window_size,
        scale=options["scale"],
        softcap=options["softcap"],
        core_bias=core_bias,
    )
    num_groups, size = groups[1].shape[1:3]
    if num_groups:
        dq_last, dk_pool, dv_pool = backend.pool_backward(dcore_k, dcore_v, *groups, **options)
        pooled = num_groups * size
        if dq_last is not None:
            dq[:, :, size - 1 : pooled : size] += dq_last
        dk[:, :pooled] += dk_pool.flatten(1, 2)
        dv[:, :pooled] += dv_pool.flatten(1, 2)
    return dq, dk, dv, dbias
