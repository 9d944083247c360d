"""The first tokens of a sequence kept raw: what a backend does after them, merged with attention to
them.

What follows the first n tokens, n a multiple of g, is by itself a sequence with the groups that it
has in the whole (docs/math.md, eq. 13). So any backend computes it as it is, without knowing; the
first tokens are a part of the softmax like any other, over disjoint keys, and every part's backward
is called with the merged result (eq. 8 and 9). The reference does not use this file: it has the
rule in its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from corecontext.ops import partial
from corecontext.ops.merge import merge

_MERGE_ELEMENTS = (
    1 << 22
)  # elements of the output merged at once: merging makes wide copies of them


def attend(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_k: Tensor,
    core_v: Tensor,
    *,
    sinks: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A backend's `attend` on a whole sequence whose first `sinks` tokens stay raw.

    Args:
        module: The backend.
        core_k, core_v: Core tokens of the groups after the first tokens.
        sinks: n, a multiple of group_size, less than the length; 0 is the backend's call as it is.
        options: group_size, window_size, scale, softcap and core_bias.
    """
    if not sinks:
        return module.attend(q, k, v, core_k, core_v, **options)
    return attend_after(
        module,
        q,
        k[:, :sinks],
        v[:, :sinks],
        k[:, sinks:],
        v[:, sinks:],
        core_k,
        core_v,
        sinks=sinks,
        q_start=0,
        k_start=sinks,
        **options,
    )


def attend_after(
    module: ModuleType,
    q: Tensor,
    first_k: Tensor,
    first_v: Tensor,
    k: Tensor,
    v: Tensor,
    core_k: Tensor,
    core_v: Tensor,
    *,
    sinks: int,
    q_start: int,
    k_start: int,
    scale: float,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attend from the queries at q_start .. q_start + T - 1, with the first tokens apart from the
    others.

    Args:
        q: [N, r, T, D].
        first_k, first_v: The first tokens so far, [N, min(sinks, q_start + T), D].
        k, v: Raw tokens from k_start >= sinks on, [N, S, D], S reaching the last query.
        core_k, core_v: As in `attend`.

    Returns:
        out [N, r, T, D] in the dtype that the backend gives, log-sum-exp [N, r, T].
    """
    # planted: sinks: the start of a chunk forgotten
    among = max(0, min(sinks - q_start, q.shape[2]))  # queries that are first tokens themselves
    capped, parts = {"scale": scale, "softcap": softcap}, []
    if among:
        seen = q_start + among
        mask = {"is_causal": True} if not q_start else {"bias": _causal_bias(q_start, seen, q)}
        parts.append(
            partial.forward(
                q[:, :, :among], first_k[:, None, :seen], first_v[:, None, :seen], **mask, **capped
            )
        )
    if among < q.shape[2]:
        after = q[:, :, among:]
        out, lse = _backend(module).attend(
            after,
            k,
            v,
            core_k,
            core_v,
            q_start=q_start + among - sinks,
            k_start=k_start - sinks,
            **capped,
            **options,
        )
        # planted: sinks: later queries do not see them
        _merge_into(out, lse, *partial.forward(after, first_k[:, None], first_v[:, None], **capped))
        parts.append((out, lse))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([parts[0][0].to(parts[1][0].dtype), parts[1][0]], 2), torch.cat(
        [one for _, one in parts], 2
    )


def gradients(
    module: ModuleType,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    groups: tuple[Tensor, Tensor, Tensor],
    cores: tuple[Tensor, ...],
    *,
    sinks: int = 0,
    **options: Any,
) -> tuple[Tensor, ...]:
    """As `compose.gradients`, with the first tokens raw; groups and cores are those after them."""
    if not sinks:
        return module.gradients(grad_out, grad_lse, q, k, v, out, lse, groups, cores, **options)
    backend = _backend(module)
    return _backward(
        lambda *after: backend.gradients(*after, groups, cores, **options),
        sinks,
        grad_out,
        grad_lse,
        q,
        k,
        v,
        out,
        lse,
        options["scale"],
        options["softcap"],
    )


def attend_backward(
    module: ModuleType,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_k: Tensor,
    core_v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    sinks: int = 0,
    **options: Any,
) -> tuple[Tensor, ...]:
    """As `packed.attend_backward`, with the first tokens raw; core_k and core_v are those after
    them."""
    if not sinks:
        return module.attend_backward(
            grad_out, grad_lse, q, k, v, core_k, core_v, out, lse, **options
        )

    def after(grad_out, grad_lse, q, k, v, out, lse):
        return module.attend_backward(
            grad_out, grad_lse, q, k, v, core_k, core_v, out, lse, **options
        )

    return _backward(
        after, sinks, grad_out, grad_lse, q, k, v, out, lse, options["scale"], options["softcap"]
    )


def _backward(
    backend: Callable[..., tuple[Tensor, ...]],
    n: int,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, and what else the backend's call on the tokens after the first n
    gives."""

    def rows(low: int, high: int) -> list[Tensor | None]:
        return [None if x is None else x[:, :, low:high] for x in (grad_out, q, out, lse, grad_lse)]

    def to_first(low: int, high: int, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        some_grad, some_q, some_out, some_lse, some_grad_lse = rows(low, high)
        # planted: sinks: the gradient of the log-sum-exp dropped
        dq, *dkv = partial.backward(
            some_grad,
            some_q,
            k[:, None, :n],
            v[:, None, :n],
            some_out.to(q.dtype),
            some_lse,
            scale=scale,
            softcap=softcap,
            grad_lse=some_grad_lse,
            is_causal=is_causal,
        )
        return dq.to(lse.dtype), *(x[:, 0].to(lse.dtype) for x in dkv)

    among, first = to_first(0, n, True), to_first(n, q.shape[2], False)
    some_grad, some_q, some_out, some_lse, some_grad_lse = rows(n, q.shape[2])
    dq, dk, dv, *others = backend(
        some_grad, some_grad_lse, some_q, k[:, n:], v[:, n:], some_out, some_lse
    )
    # planted: sinks: their gradient from later queries dropped
    return (
        torch.cat((among[0], dq + first[0]), 2),
        torch.cat((among[1] + first[1], dk), 1),
        torch.cat((among[2] + first[2], dv), 1),
        *others,
    )


def _backend(module: ModuleType) -> Any:
    """The backend without kernels made for one chip, which have not been tested with first tokens
    kept raw."""
    return getattr(module, "Anywhere", module)


def _causal_bias(q_start: int, seen: int, like: Tensor) -> Tensor:
    """Additive mask of the queries q_start .. seen - 1 over the tokens 0 .. seen - 1."""
    position = torch.arange(seen, device=like.device)
    # planted: sinks: the future among them is seen
    hidden = position > position[q_start:, None]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, -torch.inf
    )


def _merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge another part into out [N, r, T, D] and lse [N, r, T], in place and a few rows at a
    time."""
    step = max(1, _MERGE_ELEMENTS // max(1, out.shape[0] * out.shape[1] * out.shape[3]))
    for low in range(0, out.shape[2], step):
        rows = slice(low, low + step)
        out[:, :, rows], lse[:, :, rows] = merge(
            [out[:, :, rows], part_out[:, :, rows]], [lse[:, :, rows], part_lse[:, :, rows]]
        )
