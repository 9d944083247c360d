"""Pool groups into core tokens, with their masses, in plain torch with the backward written out:
linear memory, any device.

The equations are those of `ops/reference.py`; here keys and values are read in chunks of groups, so
that no float32 copy of all keys is ever made, and only the inputs are kept for the backward.
"""

import torch
from torch import Tensor

from corecontext.ops.mass import entropy
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Cores, Groups, Spec

_CHUNK_ELEMENTS = 1 << 23  # elements of keys widened at once: 32 MiB in float32


def forward(groups: Groups, spec: Spec) -> Cores:
    """Return core tokens [N, 1, M, D] in the dtype of k; arguments as in `reference.pool`."""
    return forward_with_mass(groups, spec)[0]


def forward_with_mass(groups: Groups, spec: Spec) -> tuple[Cores, Tensor | None]:
    """Return core tokens, and with `spec.core_mass` the mass of each, [N, 1, M] in float32 or
    wider."""
    q_last, k, v = groups
    shape = (k.shape[0], 1, k.shape[1], k.shape[3])
    cores = Cores(k.new_empty(shape), v.new_empty(shape))
    mass = None
    if spec.core_mass:
        mass = k.new_empty(shape[:3], dtype=torch.promote_types(k.dtype, torch.float32))
    for chunk in _chunks_of_groups(k):
        wide_k, wide_v = (widen(x[:, chunk]) for x in (k, v))
        weights, _, _ = weights_of(q_last[:, :, chunk], wide_k, spec)
        for core, x in zip(cores, (_to_middle(wide_k, spec.rotary, 1), wide_v)):
            core[:, :, chunk] = torch.einsum("nrmg,nmgd->nrmd", weights, x)
        if mass is not None:
            mass[:, :, chunk] = entropy(weights)
    return cores, mass


def backward(
    grad_cores: Cores, groups: Groups, spec: Spec, grad_mass: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q_last, k and v, in the dtype of each, from those of core tokens and
    of their masses [N, 1, M]."""
    q_last, k, v = groups
    grad_q = torch.empty_like(q_last)
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    for chunk in _chunks_of_groups(k):
        wide_k, wide_v = (widen(x[:, chunk]) for x in (k, v))
        grad_core_k, grad_core_v = (widen(x[:, :, chunk]) for x in grad_cores)
        # Through the weighted sums.
        wide_q = widen(q_last[:, :, chunk])
        weights, probs, slope = weights_of(wide_q, wide_k, spec)
        chunk_k = torch.einsum("nrmg,nrmd->nmgd", weights, grad_core_k)
        # mutant 6: keys turned to the middle, gradients not turned back
        chunk_k = _to_middle(chunk_k, spec.rotary, -1)
        grad_v[:, chunk] = torch.einsum("nrmg,nrmd->nmgd", weights, grad_core_v)
        # Through the weights: the softmax of scores of q_last and k.
        rotated = _to_middle(wide_k, spec.rotary, 1)
        grad_weights = torch.einsum("nrmd,nmgd->nrmg", grad_core_k, rotated)
        grad_weights = grad_weights + torch.einsum("nrmd,nmgd->nrmg", grad_core_v, wide_v)
        if grad_mass is not None:
            # The derivative is -1 - log w; the constant vanishes in the softmax's backward.
            least = torch.finfo(weights.dtype).tiny
            grad_weights = grad_weights - grad_mass[:, :, chunk, None] * weights.clamp(least).log()
        grad_scores = _through_weights(grad_weights, probs, slope, spec)
        grad_q[:, :, chunk] = torch.einsum("nrmg,nmgd->nrmd", grad_scores, wide_k)
        grad_k[:, chunk] = chunk_k + torch.einsum("nrmg,nrmd->nmgd", grad_scores, wide_q)
    return grad_q, grad_k, grad_v


def _through_weights(
    grad_weights: Tensor, probs: Tensor, slope: Tensor | None, spec: Spec
) -> Tensor:
    """Return the gradient of the products q . k, [N, r, M, g], from that of the pooling weights,
    [N, 1, M, g]; arguments as `weights_of` returns them."""
    grad_weights = grad_weights / probs.shape[1]  # the weights are the mean over r query heads
    mean = (probs * grad_weights).sum(-1, keepdim=True)
    # mutant 6: gradient through the pooling weights dropped
    # mutant mass: gradient without the softmax's mean
    grad_scores = probs * (grad_weights - mean) * spec.scale
    return grad_scores if slope is None else grad_scores * slope


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or float64 as it is."""
    # mutant 7: pooling computed in the inputs' dtype
    return x if x.dtype == torch.float64 else x.float()


def _chunks_of_groups(k: Tensor) -> list[slice]:
    """Return slices of groups whose keys are widened together."""
    size = max(1, _CHUNK_ELEMENTS // max(1, k.shape[0] * k.shape[2] * k.shape[3]))
    return [slice(i, i + size) for i in range(0, k.shape[1], size)]


def _to_middle(k: Tensor, rotary: Rotary | None, direction: int) -> Tensor:
    """Rotate the keys of a group to its middle position (direction 1) or back (-1)."""
    if rotary is None:
        return k
    group_size = k.shape[2]
    # mutant 1: groups of one token are turned
    return rotary.rotate(
        k, direction * (group_size // 2 - torch.arange(group_size, device=k.device))
    )


def weights_of(q_last: Tensor, k: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return pooling weights [N, 1, M, g]; the probabilities of each query head, whose mean they
    are, and the slope of the softcap, both [N, r, M, g]."""
    scores = torch.einsum("nrmd,nmgd->nrmg", q_last.to(k.dtype), k) * spec.scale
    slope = None
    if spec.softcap is not None:
        capped = torch.tanh(scores / spec.softcap)
        scores = spec.softcap * capped
        slope = 1 - capped.square()
    probs = scores.softmax(-1)
    # mutant 8: weights of one query head instead of the mean
    return probs.mean(1, keepdim=True), probs, slope
