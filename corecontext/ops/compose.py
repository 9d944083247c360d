"""Compose the backward of attention with that of pooling, on one whole sequence."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from corecontext.ops.spec import Cores, Groups, Spec


def through_pooling(
    grads: tuple[Any, ...],
    groups: Groups,
    spec: Spec,
    pool_backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of a whole sequence (docs/math.md, eq. 8 to 10), in their
    shapes, in float32 or wider: those of attention, and in place those through core tokens.

    Args:
        grads: From a backend's `attend_backward`: of q, k, v, core_k, core_v and the masses.
        pool_backward: The same backend's.
    """
    dq, dk, dv, dcore_k, dcore_v, dmass = grads
    num_groups, size = groups.k.shape[1:3]
    if num_groups:
        dq_last, dk_pool, dv_pool = pool_backward(Cores(dcore_k, dcore_v), groups, spec, dmass)
        pooled = slice(spec.sinks, spec.sinks + num_groups * size)
        # Views, added to in place; the last query of each group weighs its tokens.
        dq[:, :, pooled][:, :, size - 1 :: size] += dq_last
        dk[:, pooled] += dk_pool.flatten(1, 2)
        dv[:, pooled] += dv_pool.flatten(1, 2)
    return dq, dk, dv
