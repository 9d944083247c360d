"""List the far past as the kernels read it: the first tokens that stay raw, then the core tokens.

The query at t, which has j(t) groups in its far past, sees the first entries of this list, as many
as `visibility.num_far_entries` counts (docs/math.md, eq. 13), so a kernel needs no part for sinks.
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
    mass: Tensor | None
    """Added to the scores, [N, E] in float32, contiguous, 0 for first tokens; None for zeros."""


def far_past(tokens: Tokens, cores: Cores, spec: Spec, mass: Tensor | None) -> FarPast:
    """List the entries of the far past.

    Args:
        cores: Core tokens of the groups after the first n = `spec.sinks` tokens.
        mass: Of the core tokens, [N, 1, M].
    """
    k, v = (x[:, 0] for x in cores)
    if spec.sinks:
        pairs = zip(_sinks(tokens, spec.sinks), (k, v))
        k, v = (torch.cat((raw, core.to(raw.dtype)), 1) for raw, core in pairs)
    if mass is not None:
        # mutant sinks: masses of core tokens added to them, Triton
        mass = F.pad(mass[:, 0].float(), (k.shape[1] - cores.k.shape[2], 0)).contiguous()
    return FarPast(k, v, mass)


def near_past(tokens: Tokens, spec: Spec) -> Tokens:
    """Return the queries with the raw tokens of their near past: with sinks before them, where some
    query still sees these as raw neighbours."""
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


def mass_gradient(far_gradient: Tensor, n: int) -> Tensor:
    """Return the gradients of masses [N, 1, M] from those of the entries' scores [N, r, E]."""
    return far_gradient[:, :, n:].sum(1, keepdim=True)


def _sinks(tokens: Tokens, n: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the first n tokens, or of as many as there are."""
    if tokens.sink_k is None:
        return tokens.k[:, :n], tokens.v[:, :n]
    return tokens.sink_k, tokens.sink_v
