"""Weigh core tokens by the mass of their groups: the entropy of the pooling weights, added to their
scores.

For weights w with entropy H(w), and c the scale of scores, log sum_i exp(c q.k_i) >= c q.(sum_i w_i
k_i) + H(w): a core token counts at most as its tokens together do (docs/math.md, eq. 14).
"""

import torch
from torch import Tensor


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy of weights [..., g], in nats; differentiable, a weight of 0 adds 0."""
    # mutant mass: entropy in bits
    return torch.special.entr(weights).sum(-1)


def if_any(mass: Tensor | None) -> Tensor | None:
    """Return masses [N, 1, M]; None where there is no core token."""
    return None if mass is None or not mass.shape[2] else mass
