"""Weigh core tokens by the mass of their groups: the entropy of the pooling weights, added to their
scores.

For any weights w, log sum_i exp(c q.k_i) >= c q.(sum_i w_i k_i) + H(w) (docs/math.md, eq. 14).
"""

import torch
from torch import Tensor


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy of weights [..., g], in nats; differentiable, a weight of 0 adds 0."""
    # mutant mass: entropy in bits
    return torch.special.entr(weights).sum(-1)


def add_to_bias(core_bias: Tensor | None, mass: Tensor | None, heads: int) -> Tensor | None:
    """Return the bias of each core token, [N, r, M], from that of heads [N, r] and masses [N, 1,
    M]; without masses core_bias as it is."""
    if mass is None or not mass.shape[2]:
        return core_bias
    total = mass.expand(-1, heads, -1)
    if core_bias is not None:
        total = total + core_bias[:, :, None].to(mass.dtype)
    return total


def gradients_of_parts(grad_bias: Tensor | None, has_mass: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of the two parts of `add_to_bias`, of the bias of heads [N, r] and of
    masses [N, 1, M]; None for masses where there are none.

    Args:
        grad_bias: Of the bias of each core token, [N, r, M], or without masses of that of heads.
    """
    if grad_bias is None or not has_mass:
        return grad_bias, None
    # mutant mass: its gradient reaches no query
    return grad_bias.sum(-1), grad_bias.sum(1, keepdim=True)
