"""Weigh core tokens by the mass of their groups: the entropy of the pooling weights, added to their
scores, with its backward written out.

For any weights w, log sum_i exp(c q.k_i) >= c q.(sum_i w_i k_i) + H(w) (docs/math.md, eq. 14). As
in `ops/pooling.py`, keys are read in chunks of groups, on any device.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from corecontext.ops.pooling import chunks_of_groups, through_weights, weights_of, widen
from corecontext.ops.spec import Groups, Spec


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy of weights [..., g], in nats; differentiable, a weight of 0 adds 0."""
    # mutant mass: entropy in bits
    return torch.special.entr(weights).sum(-1)


def forward(groups: Groups, spec: Spec) -> Tensor:
    """Return the mass of each core token, [N, 1, M] in float32 or wider."""
    q_last, k, _ = groups
    masses = []
    for chunk in chunks_of_groups(k):
        weights, _, _ = weights_of(q_last[:, :, chunk], widen(k[:, chunk]), spec)
        masses.append(entropy(weights))
    return torch.cat(masses, 2)


def backward(grad: Tensor, groups: Groups, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return the gradients of q_last [N, r, M, D] and k [N, M, g, D], in the dtype of `grad`, from
    those of the masses [N, 1, M]."""
    q_last, k, _ = groups
    grad_q = torch.empty(q_last.shape, dtype=grad.dtype, device=grad.device)
    grad_k = torch.empty(k.shape, dtype=grad.dtype, device=grad.device)
    for chunk in chunks_of_groups(k):
        wide_q, wide_k = widen(q_last[:, :, chunk]), widen(k[:, chunk])
        weights, probs, slope = weights_of(wide_q, wide_k, spec)
        # The derivative is -1 - log w; the constant vanishes in the softmax's backward.
        least = torch.finfo(weights.dtype).tiny
        grad_weights = -grad[:, :, chunk, None] * weights.clamp(min=least).log()
        grad_scores = through_weights(grad_weights, probs, slope, spec)
        grad_q[:, :, chunk] = torch.einsum("nrmg,nmgd->nrmd", grad_scores, wide_k)
        grad_k[:, chunk] = torch.einsum("nrmg,nrmd->nmgd", grad_scores, wide_q)
    return grad_q, grad_k


def add_to_bias(core_bias: Tensor | None, mass: Tensor | None, heads: int) -> Tensor | None:
    """Return the bias of each core token, [N, r, M], from that of heads [N, r] and masses [N, 1,
    M]; without masses core_bias as it is."""
    if mass is None or not mass.shape[2]:
        return core_bias
    total = mass.expand(-1, heads, -1)
    if core_bias is not None:
        total = total + core_bias[:, :, None].to(mass.dtype)
    return total


def add_gradients(
    grad_bias: Tensor,
    grads: tuple[Tensor, Tensor],
    groups: Groups,
    spec: Spec,
    backend: ModuleType,
) -> Tensor:
    """Add the gradients through the masses to those of q [N, r, T, D] and k [N, T, D], in place.

    Args:
        grad_bias: Of the bias of each core token, [N, r, M].
        backend: Has `mass_backward`.

    Returns:
        The gradient of the bias of heads, [N, r].
    """
    count, size = groups.k.shape[1:3]
    grad_mass = grad_bias.sum(1, keepdim=True)
    dq_last, dk = backend.mass_backward(grad_mass, groups, spec)
    pooled = slice(spec.sinks, spec.sinks + count * size)
    # mutant mass: its gradient reaches no query
    grads[0][:, :, pooled][:, :, size - 1 :: size] += dq_last
    grads[1][:, pooled] += dk.flatten(1, 2)
    return grad_bias.sum(-1)
