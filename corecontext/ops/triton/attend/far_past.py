"""List the far past as the kernels read it: the first tokens that stay raw, then the core tokens.

A query that has j(t) groups in its far past sees the first entries of this list, as many as
`visibility.num_far_entries` counts (docs/math.md, eq. 13), so that a kernel needs no second part of
the softmax for first tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Cores, Spec, Tokens
from corecontext.ops.triton.launch import ceil_div, launch
from corecontext.visibility import local_start


class FarPast(NamedTuple):
    """Hold the entries of the far past of N sequences."""

    k: Tensor
    """[N, 1, E, D]."""
    v: Tensor
    """[N, 1, E, D]."""
    bias: Tensor | None
    """Added to the scores, [N, r, E] in float32, 0 for first tokens; None for zeros."""
    mass: Tensor | None = None
    """The bias of any query head where it is the same for all, as masses alone are, [N, E]."""


MASS_PARTS = 16
"""Numbers whose sum is a mass: three that are not 0, for the precision of float32, of as many as a
matrix product takes at least."""
_ROWS = 128


@triton.jit(do_not_specialize=["num_entries"])
def mass_parts_kernel(
    mass_ptr, parts_ptr, num_entries, scale, mass_stride, PARTS: tl.constexpr, ROWS: tl.constexpr
):
    """Write each mass over the scale of scores as a sum of numbers in half precision.

    Grid: (tiles of ROWS entries, N).
    """
    n = tl.program_id(1).to(tl.int64)
    entries = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [E]
    exists = entries < num_entries
    rest = tl.load(mass_ptr + n * mass_stride + entries, mask=exists, other=0.0) / scale
    column = tl.arange(0, PARTS)[None, :]
    terms = tl.zeros([ROWS, PARTS], parts_ptr.dtype.element_ty)  # [E, P]
    for i in tl.static_range(3):
        rounded = rest.to(parts_ptr.dtype.element_ty)
        terms = tl.where(column == i, rounded[:, None], terms)
        rest -= rounded.to(tl.float32)
    place = (n * num_entries + entries)[:, None] * PARTS + column
    tl.store(parts_ptr + place, terms, mask=exists[:, None])


def mass_parts(mass: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return numbers [N, 1, E, MASS_PARTS] in `dtype` whose sums are mass / scale, [N, E]."""
    n, num_entries = mass.shape
    terms = torch.empty(n, 1, num_entries, MASS_PARTS, dtype=dtype, device=mass.device)
    launch(
        mass_parts_kernel,
        (ceil_div(num_entries, _ROWS), n),
        (mass, terms, num_entries, scale),
        (mass.stride(0),),
        PARTS=MASS_PARTS,
        ROWS=_ROWS,
        num_warps=4,
    )
    return terms


def far_past(tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None) -> FarPast:
    """List the entries of the far past.

    Args:
        cores: Core tokens of the groups after the first n = `spec.sinks` tokens.
        core_bias: [N, r], or [N, r, M] with a number for each core token.
    """
    bias = None
    mass = None
    first = 0
    if spec.sinks:
        sinks = _sinks(tokens, spec.sinks)
        first = sinks[0].shape[1]
        heads = cores.k.shape[1]
        cores = Cores(
            *(
                torch.cat((raw[:, None].expand(-1, heads, -1, -1), core.to(raw.dtype)), 2)
                for raw, core in zip(sinks, cores)
            )
        )
    if core_bias is not None:
        # `ops.mass.add_to_bias` expands masses over query heads.
        # mutant mass: a bias of each query head is taken for masses
        is_mass = core_bias.dim() == 3 and (core_bias.shape[1] == 1 or core_bias.stride(1) == 0)
        bias = core_bias.float()
        if bias.dim() == 2:
            bias = bias[:, :, None].expand(-1, -1, cores.k.shape[2] - first)
        # mutant sinks: core bias added to them, Triton
        bias = F.pad(bias, (first, 0))
        if is_mass:
            mass = bias[:, 0]
    return FarPast(*cores, bias, mass)


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
