"""Other ways to make core tokens at the same cache size, in plain torch; attention to them is any
backend's.

Pooling here is differentiable code on a group's keys and values, and attention takes its core
tokens as inputs, so a rule is written once, for every backend, for training and for the cache. With
all parameters zero it is the paper's rule (docs/math.md, eq. 12).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from corecontext.config import LEARNED, LEARNED_WEIGHTS
from corecontext.ops import sinks
from corecontext.ops.batch import SegmentView, find_segments
from corecontext.ops.rotary import Rotary

Learned = Mapping[str, Tensor]


def shapes(
    names: tuple[str, ...], num_heads: int, num_kv_heads: int, head_dim: int
) -> dict[str, tuple[int, ...]]:
    """The shape of each learned parameter of one layer."""
    known = {
        "temperature": (num_heads,),
        "probe": (num_heads, head_dim),
        "distance": (num_heads,),
        "key_gain": (num_kv_heads,),
        "bias": (num_heads,),
    }
    return {name: known[name] for name in names}


def check(
    learned: Learned, num_heads: int, num_kv_heads: int, head_dim: int, pooling: str = "cca"
) -> None:
    """Raise unless these are a layer's learned parameters.

    Raises:
        TypeError: no tensors by name.
        ValueError: an unknown name, a wrong shape, or a pooling without weights to learn.
    """
    if not isinstance(learned, Mapping):
        raise TypeError(f"learned must map names to tensors, got {type(learned).__name__}.")
    if pooling not in ("cca", "mean_query"):
        raise ValueError(
            f"learned must come with pooling 'cca' or 'mean_query', got {pooling!r}: others have no "
            "weights to learn."
        )
    for name, value in learned.items():
        if name not in LEARNED:
            raise ValueError(f"learned must hold {', '.join(LEARNED)}, got {name!r}.")
        if not isinstance(value, Tensor):
            raise TypeError(f"learned {name!r} must be a tensor, got {type(value).__name__}.")
        wanted = shapes((name,), num_heads, num_kv_heads, head_dim)[name]
        if tuple(value.shape) != wanted:
            raise ValueError(
                f"learned {name!r} must have shape {list(wanted)}, got {list(value.shape)}. Tensor "
                "parallelism splits the heads and cannot be used with learned core tokens."
            )


def is_own_rule(pooling: str, learned: Learned | None) -> bool:
    """True where pooling is done here and not by the backend."""
    return pooling == "mean_query" or any(name in LEARNED_WEIGHTS for name in learned or ())


def by_sequence(learned: Learned, num_kv_heads: int, rows: int) -> dict[str, Tensor]:
    """Parameters by query head to [N, r, ...], by KV head to [N], N = rows x KV heads; in float32
    or wider."""
    wide = {name: x if x.dtype == torch.float64 else x.float() for name, x in learned.items()}
    return {
        name: x.repeat(rows)
        if name == "key_gain"
        else x.unflatten(0, (num_kv_heads, -1)).repeat(rows, *(1,) * x.dim())
        for name, x in wide.items()
    }


def weights_of(
    q_last: Tensor,
    k: Tensor,
    v: Tensor,
    learned: Learned,
    *,
    scale: float,
    pooling: str = "cca",
    softcap: float | None = None,
) -> Tensor:
    """Each query head's pooling weights [N, r, M, g] (docs/math.md, eq. 1 and 12); arguments as in
    `pool`."""
    if pooling == "mean_query":
        q_last = q_last.mean(1, keepdim=True).expand_as(q_last)
    scores = torch.einsum("nrmd,nmgd->nrmg", q_last, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if "temperature" in learned:
        scores = scores * learned["temperature"].exp()[:, :, None, None]
    if "probe" in learned:
        scores = scores + torch.einsum("nrd,nmgd->nrmg", learned["probe"], v) * scale
    if "distance" in learned:
        back = torch.arange(k.shape[2], 0, -1, device=k.device, dtype=k.dtype).log2()
        scores = scores + learned["distance"][:, :, None, None] * back
    return scores.softmax(-1)


def pool(
    q_last: Tensor,
    k: Tensor,
    v: Tensor,
    learned: Learned,
    *,
    scale: float,
    pooling: str = "cca",
    core_heads: str = "kv",
    rotary: Rotary | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Core keys and values [N, 1 or r, M, D] in the dtype of k (docs/math.md, eq. 12);
    differentiable.

    Args:
        q_last, k, v: As in `reference.pool`.
        learned: From `by_sequence`.
    """
    dtype, size = k.dtype, k.shape[2]
    q_last, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q_last, k, v))
    weights = weights_of(q_last, k, v, learned, scale=scale, pooling=pooling, softcap=softcap)
    if core_heads == "kv":
        weights = weights.mean(1, keepdim=True)
    if rotary is not None:
        k = rotary.turn(k, size // 2 - torch.arange(size, device=k.device))
    core_k, core_v = (torch.einsum("nrmg,nmgd->nrmd", weights, x) for x in (k, v))
    if "key_gain" in learned:
        core_k = core_k * learned["key_gain"].exp()[:, None, None, None]
    return core_k.to(dtype), core_v.to(dtype)


def attention(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    learned: Learned,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    sizes: tuple[int, int, int, int],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D] and log-sum-exp [B, H, L] of `cca_attention` under a rule of this file.

    Args:
        module: The backend.
        bias: [H] or None.
        sizes: group_size, window_size, num_groups or 0, sink_size.
        options: scale, softcap, pooling, core_heads and rotary.
    """
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=out.dtype, device=q.device)
    for segment in find_segments(q.shape[0], q.shape[2], attention_mask, cu_seqlens, position_ids):
        one = SegmentView(segment, q, k, v, bias, *sizes)
        here = by_sequence(
            {name: x for name, x in learned.items() if name in LEARNED_WEIGHTS},
            k.shape[1],
            segment.last_row - segment.first_row,
        )
        cores = pool(*one.groups(), here, **options)
        part = attend(
            module,
            one.q,
            one.k,
            one.v,
            *cores,
            one.core_bias,
            one.sizes,
            options["scale"],
            options["softcap"],
        )
        one.put(out, part[0])
        one.put(lse, part[1])
    return out.to(q.dtype), lse


def attend(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_k: Tensor,
    core_v: Tensor,
    bias: Tensor | None,
    sizes: dict[str, int],
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """A backend's attention with gradients for the core tokens; the reference has its own."""
    if hasattr(module, "attend_backward"):
        return _Attend.apply(q, k, v, core_k, core_v, bias, module, sizes, scale, softcap)
    return module.attend(
        q, k, v, core_k, core_v, **sizes, scale=scale, softcap=softcap, core_bias=bias
    )


class _Attend(torch.autograd.Function):
    """Attention to given core tokens."""

    @staticmethod
    def forward(ctx, q, k, v, core_k, core_v, bias, module, sizes, scale, softcap):
        options = {**sizes, "scale": scale, "softcap": softcap, "core_bias": bias}
        out, lse = sinks.attend(module, q, k, v, core_k, core_v, **options)
        ctx.save_for_backward(q, k, v, core_k, core_v, out, lse, bias)
        ctx.module, ctx.options = module, {**sizes, "scale": scale, "softcap": softcap}
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_lse):
        *tensors, bias = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(tensors[5])
        with torch.autocast(tensors[0].device.type, enabled=False):
            grads = sinks.attend_backward(
                ctx.module, grad_out, grad_lse, *tensors, **ctx.options, core_bias=bias
            )
        cast = (
            None if grad is None else grad.to(x.dtype)
            for grad, x in zip(grads, (*tensors[:5], bias))
        )
        return *cast, None, None, None, None
