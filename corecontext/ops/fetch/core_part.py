"""Attend to core tokens, with their masses, of the groups that a query sees and has not chosen."""

import torch
from torch import Tensor

from corecontext.ops.fetch.index import products
from corecontext.ops.spec import Cores, Spec, Upstream


def cap(scores: Tensor, spec: Spec) -> Tensor:
    """Return scores [...] under the softcap, where there is one."""
    if spec.softcap is None:
        return scores
    return spec.softcap * torch.tanh(scores / spec.softcap)


def scores(
    q: Tensor, cores: Cores, spec: Spec, mass: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the scores of core tokens and the softcap's slope, None without one: [N, r, T, M] in
    float32 or wider.

    Args:
        q: [N, r, T, D].
        mass: [N, 1, M], or None.
    """
    total = products(q, cores.k[:, 0]) * spec.scale
    slope = None
    if spec.softcap is not None:
        capped = torch.tanh(total / spec.softcap)
        total = spec.softcap * capped
        slope = 1 - capped.square()
    if mass is not None:
        total = total + mass.to(total.dtype)[:, :, None]
    return total, slope


def forward(
    q: Tensor, cores: Cores, spec: Spec, mass: Tensor | None, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out [N, r, T, D] in q's dtype and log-sum-exp [N, r, T] in float32 or wider; a row
    that sees no core token is 0 with -inf.

    Args:
        seen: [N, T, M], True where a query sees the core token: not that of a group it fetches.
    """
    total, _ = scores(q, cores, spec, mass)
    total = total.masked_fill(~seen[:, None], -torch.inf)
    lse = total.logsumexp(-1)
    weights = (total - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return weights.to(q.dtype) @ cores.v, lse


def backward(
    upstream: Upstream,
    q: Tensor,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, core keys and core values, and those of each core token's scores
    summed over queries, [N, r, M], given the whole softmax's results (docs/math.md, eq. 9)."""
    grad_out, grad_lse, out, lse = upstream
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        # mutant fetch: gradient of the log-sum-exp dropped, core tokens
        delta = delta - grad_lse
    total, slope = scores(q, cores, spec, mass)
    total = total.masked_fill(~seen[:, None], -torch.inf)
    weights = (total - lse[..., None]).exp()
    grad_scores = weights * (products(grad_out, cores.v[:, 0]) - delta[..., None])
    grad_of_cores = grad_scores.sum(2)  # without the softcap's slope: masses come after it
    if slope is not None:
        grad_scores = grad_scores * slope
    grad_scores = (grad_scores * spec.scale).to(q.dtype)
    grad_q = grad_scores @ cores.k
    grad_k = grad_scores.mT @ q
    grad_v = weights.to(q.dtype).mT @ grad_out.to(q.dtype)
    grad_k, grad_v = (x.sum(1, keepdim=True, dtype=lse.dtype) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v, grad_of_cores
