"""Pool by rules that no kernel has, learned parameters and the mean query, in plain torch.

Pooling here is differentiable code on a group's keys and values, and a backend's attention takes
its core tokens as inputs, so a rule is written once, for every backend, for training and for the
cache. With all parameters zero it is the paper's rule (docs/math.md, eq. 12).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from corecontext.config import LEARNED, LEARNED_WEIGHTS
from corecontext.ops.batch import SegmentView, by_segment, wide_dtype
from corecontext.ops.fetch.fetching import with_fetch
from corecontext.ops.mass import entropy
from corecontext.ops.spec import Cores, Groups, Inputs, Ragged, Spec, Tokens, Upstream

Learned = Mapping[str, Tensor]


def shapes(
    names: tuple[str, ...], num_heads: int, num_kv_heads: int, head_dim: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each learned parameter of one layer."""
    all_shapes = {
        "temperature": (num_heads,),
        "probe": (num_heads, head_dim),
        "distance": (num_heads,),
        "key_gain": (num_kv_heads,),
        "bias": (num_heads,),
    }
    return {name: all_shapes[name] for name in names}


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
            f"learned must come with pooling 'cca' or 'mean_query', got {pooling!r}: others have "
            "no weights to learn."
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
    """Return whether pooling is done here and not by the backend."""
    return pooling != "cca" or any(name in LEARNED_WEIGHTS for name in learned or ())


def by_sequence(learned: Learned, num_kv_heads: int, rows: int) -> dict[str, Tensor]:
    """Repeat the parameters of pooling for N = rows x KV heads sequences, in float32 or wider:
    those by query head are [N, r, ...], by KV head [N]."""
    repeated = {}
    for name, parameter in learned.items():
        if name not in LEARNED_WEIGHTS:
            continue
        x = parameter.to(wide_dtype(parameter))
        if name != "key_gain":
            x = x.unflatten(0, (num_kv_heads, -1))
        repeated[name] = x.repeat(rows, *(1,) * (x.dim() - 1))
    return repeated


def weights_of(groups: Groups, spec: Spec, learned: Learned) -> Tensor:
    """Return each query head's pooling weights [N, r, M, g] (docs/math.md, eq. 1 and 12);
    arguments as in `pool`."""
    q_last, k, v = groups
    if spec.pooling == "mean":
        return k.new_full((*q_last.shape[:3], k.shape[2]), 1 / k.shape[2])
    if spec.pooling == "mean_query":
        q_last = q_last.mean(1, keepdim=True).expand_as(q_last)
    scores = torch.einsum("nrmd,nmgd->nrmg", q_last, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if "temperature" in learned:
        scores = scores * learned["temperature"].exp()[:, :, None, None]
    if "probe" in learned:
        scores = scores + torch.einsum("nrd,nmgd->nrmg", learned["probe"], v) * spec.scale
    if "distance" in learned:
        back = torch.arange(k.shape[2], 0, -1, device=k.device, dtype=k.dtype).log2()
        scores = scores + learned["distance"][:, :, None, None] * back
    return scores.softmax(-1)


def mass(groups: Groups, spec: Spec, learned: Learned) -> Tensor:
    """Return the entropy of each core token's pooling weights, [N, 1 or r, M]; arguments as in
    `pool`."""
    weights = weights_of(Groups(*(x.to(wide_dtype(x)) for x in groups)), spec, learned)
    if spec.core_heads == "kv":
        weights = weights.mean(1, keepdim=True)
    return entropy(weights)


def pool(groups: Groups, spec: Spec, learned: Learned) -> Cores:
    """Pool groups into core tokens, in the dtype of k (docs/math.md, eq. 12); differentiable.

    Args:
        learned: From `by_sequence`.
    """
    dtype = groups.k.dtype
    size = groups.k.shape[2]
    groups = Groups(*(x.to(wide_dtype(x)) for x in groups))
    q_last, k, v = groups
    if spec.rotary is not None:
        k = spec.rotary.rotate(k, size // 2 - torch.arange(size, device=k.device))
    if spec.pooling == "max":
        heads = 1 if spec.core_heads == "kv" else q_last.shape[1]
        return Cores(*(x.amax(2)[:, None].expand(-1, heads, -1, -1).to(dtype) for x in (k, v)))
    weights = weights_of(groups, spec, learned)
    if spec.core_heads == "kv":
        weights = weights.mean(1, keepdim=True)
    core_k, core_v = (torch.einsum("nrmg,nmgd->nrmd", weights, x) for x in (k, v))
    if "key_gain" in learned:
        core_k = core_k * learned["key_gain"].exp()[:, None, None, None]
    return Cores(core_k.to(dtype), core_v.to(dtype))


def attention(
    inputs: Inputs, ragged: Ragged, spec: Spec, module: ModuleType
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, L, D] and log-sum-exp [B, H, L], pooled by a rule of this file or by the
    reference: autograd follows the pooling.

    Args:
        module: The backend that attends, and pools where no rule of this file does.
    """
    pools_here = is_own_rule(spec.pooling, inputs.learned)

    def pool_segment(view: SegmentView) -> tuple[Cores, Tensor | None]:
        groups = view.groups()
        if not pools_here:
            masses = module.mass(groups, view.spec) if view.spec.core_mass else None
            return module.pool(groups, view.spec), masses
        learned = by_sequence(inputs.learned, inputs.k.shape[1], view.num_rows)
        masses = mass(groups, view.spec, learned) if view.spec.core_mass else None
        return pool(groups, view.spec, learned), masses

    # Attention has the backend's own backward.
    attend_segment = functools.partial(attend, module)
    out, lse, _ = by_segment(inputs, ragged, spec, pool_segment, attend_segment)
    if torch.is_grad_enabled() and out.grad_fn is None:
        # Nothing but padding: gradients are 0, and a backward does not fail.
        # mutant 5: a batch of padding has no backward
        nothing = sum(x[:0].sum() for x in (*inputs[:3], *inputs.learned.values()))
        out = out + nothing
        lse = lse + nothing
    return out, lse


def attend(
    module: ModuleType, tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend by a backend on a whole sequence, with gradients for the core tokens; the reference
    has its own."""
    if hasattr(module, "attend_backward"):
        module = with_fetch(module, spec)
        return _Attend.apply(*tokens[:3], *cores, core_bias, module, spec)
    return module.attend(tokens, cores, spec, core_bias)


class _Attend(torch.autograd.Function):
    """Attention to given core tokens."""

    @staticmethod
    def forward(ctx, q, k, v, core_k, core_v, core_bias, module, spec):
        out, lse = module.attend(Tokens(q, k, v), Cores(core_k, core_v), spec, core_bias)
        ctx.save_for_backward(q, k, v, core_k, core_v, core_bias, out, lse)
        ctx.module = module
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_lse):
        *inputs, core_bias, out, lse = ctx.saved_tensors
        if grad_out is None:  # the loss takes the log-sum-exp alone
            grad_out = torch.zeros_like(out)
        with torch.autocast(out.device.type, enabled=False):
            grads = ctx.module.attend_backward(
                Upstream(grad_out, grad_lse, out, lse),
                Tokens(*inputs[:3]),
                Cores(*inputs[3:]),
                ctx.spec,
                core_bias,
            )
        cast = (
            None if grad is None else grad.to(x.dtype)
            for grad, x in zip(grads, (*inputs, core_bias))
        )
        return *cast, None, None
