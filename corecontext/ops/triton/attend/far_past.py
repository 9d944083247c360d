"""List the far past as the kernels read it: the first tokens that stay raw, then the core tokens.

The query at t, which has j(t) groups in its far past, sees the first entries of this list, as many
as `visibility.num_far_entries` counts (docs/math.md, eq. 13), so a kernel needs no part for sinks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Cores, Spec, Tokens
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, ints, launch, power_of_2
from corecontext.ops.triton.primitives import integers
from corecontext.visibility import local_start

_ROWS = 32  # entries of a program


class FarPast(NamedTuple):
    """Hold the entries of the far past of N sequences."""

    k: Tensor
    """[N, E, D]."""
    v: Tensor
    """[N, E, D]."""
    mass: Tensor | None
    """Added to the scores, [N, E] in float32, contiguous, 0 for first tokens; None for zeros."""


@triton.jit(do_not_specialize=["mass_stride"])
def list_kernel(
    first,
    cores,
    results,
    numbers,
    mass_stride,
    strides,
    HAS_MASS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy first tokens, then core tokens, to the entries of a far past.

    Grid: (tiles of ROWS entries, N).

    Args:
        first: Pointers to keys and values of the first tokens, [N, n, D].
        cores: Pointers to keys and values of core tokens [N, M, D] and to their masses [N, M].
        results: Pointers to keys and values [N, n + M, D] and masses [N, n + M] in float32.
        numbers: n, M.
        mass_stride: From the masses of a sequence to those of the next.
        strides: Of sequences and tokens, of both of `first`, then of the keys and values of
            `cores`.
    """
    num_first, num_cores = integers(numbers)
    n = tl.program_id(1).to(tl.int64)
    num_entries = num_first + num_cores
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    is_core = entry >= num_first
    core = (entry - num_first).to(tl.int64)
    inside = (dims < HEAD_DIM)[None, :]
    has_core = (is_core & (entry < num_entries))[:, None] & inside
    has_first = (entry < num_first)[:, None] & inside
    place = (n * num_entries + entry)[:, None] * HEAD_DIM + dims[None, :]
    for i in tl.static_range(2):  # keys, then values
        at = n * strides[i][0] + entry.to(tl.int64)[:, None] * strides[i][1] + dims[None, :]
        rows = tl.load(first[i] + at, mask=has_first, other=0.0)
        tl.store(results[i] + place, rows, mask=has_first)
        at = n * strides[2 + i][0] + core[:, None] * strides[2 + i][1] + dims[None, :]
        rows = tl.load(cores[i] + at, mask=has_core, other=0.0)
        rows = rows.to(results[i].dtype.element_ty)
        tl.store(results[i] + place, rows, mask=has_core)
    if HAS_MASS:
        exists = entry < num_entries
        # mutant sinks: masses of core tokens added to them, Triton
        mass = tl.load(cores[2] + n * mass_stride + core, mask=is_core & exists, other=0.0)
        tl.store(results[2] + n * num_entries + entry, mass.to(tl.float32), mask=exists)


def far_past(tokens: Tokens, cores: Cores, spec: Spec, mass: Tensor | None) -> FarPast:
    """List the entries of the far past.

    Args:
        cores: Core tokens of the groups after the first n = `spec.sinks` tokens.
        mass: Of the core tokens, [N, 1, M].
    """
    core_k, core_v = (x[:, 0] for x in cores)
    if mass is not None:
        mass = mass[:, 0]
    if not spec.sinks:
        return FarPast(core_k, core_v, None if mass is None else mass.float().contiguous())
    sink_k, sink_v = _sinks(tokens, spec.sinks)
    sources = tuple(map(contiguous_rows, (sink_k, sink_v, core_k, core_v)))
    batch, num_first, dim = sink_k.shape
    num_entries = num_first + core_k.shape[1]
    k = sink_k.new_empty(batch, num_entries, dim)
    v = sink_v.new_empty(batch, num_entries, dim)
    masses = None
    if mass is not None:
        mass = contiguous_rows(mass)
        masses = k.new_empty(batch, num_entries, dtype=torch.float32)
    # Without masses the kernel reads and writes none: any tensor stands for them.
    given_mass, listed_mass = (k, k) if mass is None else (mass, masses)
    launch(
        list_kernel,
        (ceil_div(num_entries, _ROWS), batch),
        (
            sources[:2],
            (*sources[2:], given_mass),
            (k, v, listed_mass),
            ints(num_first, core_k.shape[1]),
            given_mass.stride(0),
        ),
        (tuple(x.stride()[:2] for x in sources),),
        HAS_MASS=mass is not None,
        HEAD_DIM=dim,
        BLOCK_D=power_of_2(dim),
        ROWS=_ROWS,
        num_warps=4,
    )
    return FarPast(k, v, masses)


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
