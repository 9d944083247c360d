"""Keep some raw tokens of the far past beside core tokens, by rules that no cache has.

In plain tensors, with memory for all pairs of tokens: to measure the rules on a model as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from corecontext.baselines.method import Call, Method
from corecontext.ops.mass import entropy
from corecontext.ops.pooling import weights_of
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Spec
from corecontext.visibility import num_sinks, visible_cores_of


@dataclass(frozen=True)
class KeptTokens(Method):
    """CCA with mass, of which some groups or some tokens of each group stay raw for all queries."""

    name: ClassVar[str] = "kept_tokens"
    needs_rotary: ClassVar[bool] = True
    core_mass: ClassVar[bool] = True
    group_size: int
    window_size: int
    sinks: int
    heavy: int = 0
    """Tokens of each group that stay raw: those with the largest pooling weights."""
    worst: int = 0
    """Groups of a KV head that stay raw: those whose core tokens' weights are furthest from the
    groups' under full attention, over all queries of the text. No cache can know it in advance."""

    def attend(self, call: Call) -> Tensor:
        """Attend in whole texts, a KV head at a time."""
        if call.cache is not None:
            raise NotImplementedError(f"{self.name} has no cache. Use use_cache=False.")
        repeats = call.q.shape[1] // call.k.shape[1]
        outs = []
        for q, k, v in zip(call.q, call.k, call.v):
            heads = zip(q.float().split(repeats), k.float(), v.float())
            options = (call.rotary, call.scoring.scale)
            outs.append(torch.cat([self._attend(*head, *options) for head in heads]))
        return torch.stack(outs).to(call.q.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rotary: Any, scale: float) -> Tensor:
        """Attend with one KV head: q [r, T, D], k and v [T, D]."""
        length = k.shape[0]
        first = num_sinks(self.sinks, self.group_size)
        pooled = self._pool(q, k, v, rotary, scale)
        slots = torch.arange(length, device=q.device)
        far = visible_cores_of(slots - first, self.group_size, self.window_size)[:, None]
        causal = slots <= slots[:, None]
        is_near = (slots - first >= far * self.group_size) | (slots < first) | pooled.is_raw
        groups = torch.arange(pooled.k.shape[0], device=q.device)
        is_far = groups < far
        scores = q @ k.mT * scale
        core_scores = (q @ pooled.k.mT * scale + pooled.mass).masked_fill(~is_far, -torch.inf)
        raw_scores = scores.masked_fill(~(is_near & causal), -torch.inf)
        if self.worst:
            weights = torch.cat((raw_scores, core_scores), -1).softmax(-1)[..., length:]
            inside = slice(first, first + len(groups) * self.group_size)
            true = scores.masked_fill(~causal, -torch.inf).softmax(-1)[..., inside]
            true = true.unflatten(-1, (len(groups), -1)).sum(-1)
            errors = ((true - weights).abs() * is_far).sum((0, 1))
            chosen = errors.topk(min(self.worst, len(groups))).indices
            is_raw = torch.zeros_like(groups, dtype=torch.bool)
            is_raw[chosen] = True
            core_scores = core_scores.masked_fill(is_raw, -torch.inf)
            is_near[:, inside] |= is_raw.repeat_interleave(self.group_size)
            raw_scores = scores.masked_fill(~(is_near & causal), -torch.inf)
        weights = torch.cat((raw_scores, core_scores), -1).softmax(-1)
        return weights[..., :length] @ v + weights[..., length:] @ pooled.v

    def _pool(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, scale: float) -> _Pooled:
        """Pool the groups behind the sinks, without their heavy tokens."""
        g = self.group_size
        first = num_sinks(self.sinks, g)
        count = max(0, k.shape[0] - first) // g
        end = first + count * g
        k_groups, v_groups = (x[first:end].unflatten(0, (count, g)) for x in (k, v))
        spec = Spec(g, self.window_size, scale)
        q_last = q[:, first + g - 1 : end : g]
        weights = weights_of(q_last[None], k_groups[None], spec)[0][0, 0]
        is_heavy = torch.zeros_like(weights, dtype=torch.bool)
        is_heavy.scatter_(1, weights.topk(self.heavy).indices, True)
        weights = weights.masked_fill(is_heavy, 0)
        weights = weights / weights.sum(-1, keepdim=True)
        is_raw = torch.zeros(k.shape[0], dtype=torch.bool, device=k.device)
        is_raw[first:end] = is_heavy.flatten()
        middle = g // 2 - torch.arange(g, device=k.device)
        core_k = torch.einsum("mg,mgd->md", weights, rotary.rotate(k_groups, middle))
        core_v = torch.einsum("mg,mgd->md", weights, v_groups)
        return _Pooled(core_k, core_v, entropy(weights), is_raw)


class _Pooled(NamedTuple):
    """The core tokens of M groups."""

    k: Tensor
    """[M, D], as v."""
    v: Tensor
    mass: Tensor
    """[M]."""
    is_raw: Tensor
    """Tokens that are in no core token, [T]."""
