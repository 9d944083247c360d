"""Pooling of groups into core tokens in plain torch, with its backward written out: linear memory,
any device.

The equations are those of `ops/reference.py`; here keys and values are read in chunks of groups, so
that no float32 copy of all keys is ever made, and nothing is kept for the backward but the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Cores, Groups, Spec

_CHUNK_ELEMENTS = 1 << 23  # elements of K widened at once: 32 MiB in float32


def forward(groups: Groups, spec: Spec) -> Cores:
    """Return core tokens [N, 1 or r, M, D] in the dtype of k; arguments as in `reference.pool`."""
    q_last, k, v = groups
    num_heads = q_last.shape[1] if spec.core_heads == "query" else 1
    shape = (k.shape[0], num_heads, k.shape[1], k.shape[3])
    core_k, core_v = k.new_empty(shape), v.new_empty(shape)
    for part in _chunks(k):
        wide_k, wide_v = _wide(k[:, part]), _wide(v[:, part])
        turned = _turn(wide_k, spec.rotary, 1)
        if spec.pooling == "max":
            core_k[:, :, part], core_v[:, :, part] = (
                turned.amax(2)[:, None],
                wide_v.amax(2)[:, None],
            )
            continue
        weights, _, _ = _weights(q_last[:, :, part], wide_k, spec)
        core_k[:, :, part] = torch.einsum("nrmg,nmgd->nrmd", weights, turned)
        core_v[:, :, part] = torch.einsum("nrmg,nmgd->nrmd", weights, wide_v)
    return Cores(core_k, core_v)


def backward(grad_cores: Cores, groups: Groups, spec: Spec) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of q_last (None unless the weights are learned), k and v, in the dtype
    of each."""
    q_last, k, v = groups
    grad_q = torch.empty_like(q_last) if spec.pooling == "cca" else None
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    for part in _chunks(k):
        wide_k, wide_v, wide_q = _wide(k[:, part]), _wide(v[:, part]), _wide(q_last[:, :, part])
        into_k, into_v = _wide(grad_cores.k[:, :, part]), _wide(grad_cores.v[:, :, part])
        turned = _turn(wide_k, spec.rotary, 1)
        if spec.pooling == "max":
            grad_turned, grad_v[:, part] = (
                _max_backward(into_k, turned),
                _max_backward(into_v, wide_v),
            )
            grad_k[:, part] = _turn(grad_turned, spec.rotary, -1)
            continue
        weights, probs, slope = _weights(wide_q, wide_k, spec)
        # planted: 6: keys turned to the middle, gradients not turned back
        part_k = _turn(torch.einsum("nrmg,nrmd->nmgd", weights, into_k), spec.rotary, -1)
        grad_v[:, part] = torch.einsum("nrmg,nrmd->nmgd", weights, into_v)
        if grad_q is not None:
            grad_probs = torch.einsum("nrmd,nmgd->nrmg", into_k, turned) + torch.einsum(
                "nrmd,nmgd->nrmg", into_v, wide_v
            )
            if spec.core_heads == "kv":  # the weights are the mean over r query heads
                grad_probs = grad_probs / probs.shape[1]
            # planted: 6: gradient through the pooling weights dropped
            grad_scores = (
                probs * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True)) * spec.scale
            )
            if slope is not None:
                grad_scores = grad_scores * slope
            grad_q[:, :, part] = torch.einsum("nrmg,nmgd->nrmd", grad_scores, wide_k)
            part_k = part_k + torch.einsum("nrmg,nrmd->nmgd", grad_scores, wide_q)
        grad_k[:, part] = part_k
    return grad_q, grad_k, grad_v


def _wide(x: Tensor) -> Tensor:
    # planted: 7: pooling computed in the inputs' dtype
    return x if x.dtype == torch.float64 else x.float()


def _chunks(k: Tensor) -> list[slice]:
    """Slices of groups whose keys are widened together."""
    size = max(1, _CHUNK_ELEMENTS // max(1, k.shape[0] * k.shape[2] * k.shape[3]))
    return [slice(i, i + size) for i in range(0, k.shape[1], size)]


def _turn(k: Tensor, rotary: Rotary | None, direction: int) -> Tensor:
    """Keys of a group turned to its middle position (direction 1) or back (-1)."""
    if rotary is None:
        return k
    group_size = k.shape[2]
    # planted: 1: groups of one token are turned
    return rotary.turn(k, direction * (group_size // 2 - torch.arange(group_size, device=k.device)))


def _weights(q_last: Tensor, k: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pooling weights [N, 1 or r, M, g]; each query head's probabilities; the slope of the
    softcap."""
    if spec.pooling == "mean":
        num_heads = q_last.shape[1] if spec.core_heads == "query" else 1
        shape = (k.shape[0], num_heads, k.shape[1], k.shape[2])
        weights = torch.full(shape, 1 / k.shape[2], dtype=k.dtype, device=k.device)
        return weights, weights, None
    scores = torch.einsum("nrmd,nmgd->nrmg", q_last.to(k.dtype), k) * spec.scale
    slope = None
    if spec.softcap is not None:
        capped = torch.tanh(scores / spec.softcap)
        scores = spec.softcap * capped
        slope = 1 - capped.square()
    probs = scores.softmax(-1)
    # planted: 8: weights of one query head instead of the mean
    return (probs.mean(1, keepdim=True) if spec.core_heads == "kv" else probs), probs, slope


def _max_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of the maximum over a group, shared among ties as torch's amax does: x [N, M, g,
    D]."""
    winners = (x == x.amax(2, keepdim=True)).to(x.dtype)
    return winners / winners.sum(2, keepdim=True) * grad.sum(1)[:, :, None]
