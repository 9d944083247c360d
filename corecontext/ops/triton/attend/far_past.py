"""List the far past as the kernels read it: the first tokens that stay raw, then the core tokens.

A query that has j(t) groups in its far past sees the first entries of this list, as many as
`visibility.num_far_entries` counts (docs/math.md, eq. 13), so that a kernel needs no second part of
the softmax for first tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.ops.spec import Cores, Spec, Tokens
from corecontext.visibility import local_start


class FarPast(NamedTuple):
    """Hold the entries of the far past of N sequences."""

    k: Tensor
    """[N, E, D]."""
    v: Tensor
    """[N, E, D]."""
    bias: Tensor | None
    """Added to the scores, [N, r, E] in float32, 0 for first tokens; None for zeros. Of one head,
    [N, 1, E], where it is the same for all, as masses alone are. Contiguous."""

    @property
    def mass(self) -> Tensor | None:
        """The bias of any query head where it is the same for all, [N, E]."""
        return self.bias[:, 0] if self.bias is not None and self.bias.shape[1] == 1 else None

    def heads_per_bias(self, heads: int) -> int:
        """Return how many of the query heads of a KV head share a bias."""
        return heads if self.bias is None else heads // self.bias.shape[1]


def far_past(tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None) -> FarPast:
    """List the entries of the far past.

    Args:
        cores: Core tokens of the groups after the first n = `spec.sinks` tokens.
        core_bias: [N, r], or [N, r, M] with a number for each core token.
    """
    k, v = (x[:, 0] for x in cores)
    if spec.sinks:
        first = zip(_sinks(tokens, spec.sinks), (k, v))
        k, v = (torch.cat((raw, core.to(raw.dtype)), 1) for raw, core in first)
    bias = None
    if core_bias is not None:
        bias = _bias_of_entries(core_bias, k.shape[1], cores.k.shape[2])
    return FarPast(k, v, bias)


def _bias_of_entries(core_bias: Tensor, num_entries: int, num_cores: int) -> Tensor:
    """Return the bias of each entry as `FarPast` has it."""
    # `ops.mass.add_to_bias` expands masses over query heads.
    # mutant mass: a bias of each query head is taken for masses
    is_mass = core_bias.dim() == 3 and core_bias.stride(1) == 0
    bias = (core_bias[:, :1] if is_mass else core_bias).float()
    if bias.dim() == 2:
        bias = bias[:, :, None].expand(-1, -1, num_cores)
    # mutant sinks: core bias added to them, Triton
    bias = F.pad(bias, (num_entries - num_cores, 0))
    return bias.contiguous()


def near_past(tokens: Tokens, spec: Spec) -> Tokens:
    """Return the queries with raw tokens that reach from the first one that a query sees."""
    if tokens.sink_k is None:
        return tokens
    if local_start(tokens.q_start, spec.group_size, spec.window_size) >= tokens.k_start:
        return tokens._replace(sink_k=None, sink_v=None)
    k = torch.cat((tokens.sink_k, tokens.k), 1)
    v = torch.cat((tokens.sink_v, tokens.v), 1)
    return Tokens(tokens.q, k, v, tokens.q_start)


def add_to_sinks(far_gradient: Tensor, gradient: Tensor, n: int) -> Tensor:
    """Add the gradients of the first n entries [N, h, E, D] to those of raw tokens [N, T, D], in
    place; return the gradients of the core tokens."""
    if n:
        # mutant sinks: their gradient from later queries dropped, Triton
        gradient[:, :n] += far_gradient[:, :, :n].sum(1)
    return far_gradient[:, :, n:]


def bias_gradient(far_gradient: Tensor, core_bias: Tensor, n: int) -> Tensor:
    """Return the gradient of core_bias, in its shape, from that of all entries, [N, r, E]."""
    of_cores = far_gradient[:, :, n:]
    if core_bias.dim() == 2:
        return of_cores.sum(-1)
    return of_cores


def _sinks(tokens: Tokens, n: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the first n tokens, of those so far."""
    if tokens.sink_k is None:
        return tokens.k[:, :n], tokens.v[:, :n]
    return tokens.sink_k, tokens.sink_v
