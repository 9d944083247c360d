"""Attend to the raw tokens of chosen groups, in one softmax with all else that a query sees.

`anywhere.py` attends to first tokens, to the core tokens of groups that are not chosen (`marks.py`)
and to the window. `raw.py` attends to the raw tokens of chosen groups and takes the
results of the first part into one softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops.spec import Cores, Spec, Tokens, Upstream
from corecontext.ops.triton.attend import anywhere as unfetched
from corecontext.ops.triton.attend.marks import Marks, mark
from corecontext.ops.triton.attend.raw import (
    fetch_dkv_kernel,
    fetch_dq_kernel,
    fetch_fwd_kernel,
)
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2
from corecontext.ops.triton.tiles import (
    Chip,
    Tiles,
    chip_of,
    fetch_dkv_tiles,
    fetch_dq_tiles,
    fetch_tiles,
)

_MARK_BYTES = 256 << 20  # marks in memory at a time, of some KV heads


class Fetched(NamedTuple):
    """Hold a choice."""

    chosen: Tensor
    """[N, C, k] in int32: for each share that the queries touch the numbers of the chosen groups
    behind the first tokens that stay raw, ascending, then -1."""
    share: int
    """Neighbouring queries that chose together (n): those of positions a n .. a n + n - 1."""


class Call(NamedTuple):
    """Hold a call to the kernels of this file for some sequences of KV heads."""

    tokens: Tokens
    cores: Cores
    spec: Spec
    core_bias: Tensor | None
    fetched: Fetched

    def specialized(self) -> tuple[int, ...]:
        """Return the last arguments of every kernel."""
        share = self.fetched.share
        sizes = (self.fetched.chosen.shape[2], share, power_of_2(share))
        return *sizes, *unfetched.rule_of(self.spec)

    def numbers(self) -> tuple[float, float]:
        """Return scale and softcap."""
        return float(self.spec.scale), float(self.spec.softcap or 1.0)

    @property
    def rows(self) -> int:
        """Rows of a share: queries, rounded up to a power of 2, of all heads of a KV head."""
        return self.tokens.q.shape[1] * power_of_2(self.fetched.share)

    def constants(self, tiles: Tiles, rows: int) -> dict[str, int | bool]:
        """Return what a kernel is compiled for whose tiles have at most `rows` rows."""
        r, _, dim = self.tokens.q.shape[1:]
        return {
            "HEADS": r,
            "HAS_SOFTCAP": self.spec.softcap is not None,
            "HEAD_DIM": dim,
            "BLOCK_D": max(16, power_of_2(dim)),
            "BLOCK_M": max(16, min(tiles.block_m, power_of_2(rows))),
            "BLOCK_N": tiles.block_n,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }

    def chip(self) -> tuple[Chip, torch.dtype, int]:
        """Return the first arguments of the tables of tiles."""
        q = self.tokens.q
        return chip_of(q.device), q.dtype, q.shape[3]

    def marks(self) -> Marks:
        """Mark the core tokens that no query of a share sees."""
        tokens = self.tokens
        cores = self.cores
        spec = self.spec
        first = min(spec.sinks, tokens.k.shape[1])
        entries = first + cores.k.shape[2]
        return mark(self.fetched.chosen, self.fetched.share, entries, first)


def _calls(
    tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None, fetched: Fetched
) -> list[tuple[slice, Call]]:
    """Return the call for some sequences at a time, whose marks fit into their memory."""
    n, count = fetched.chosen.shape[:2]
    size = max(1, _MARK_BYTES // max(1, count * (spec.sinks + cores.k.shape[2]) // 8))
    calls = []
    for low in range(0, n, size):
        heads = slice(low, low + size)
        call = Call(
            Tokens(*(x[heads] for x in tokens[:3]), tokens.q_start),
            Cores(*(x[heads] for x in cores)),
            spec,
            None if core_bias is None else core_bias[heads],
            Fetched(fetched.chosen[heads], fetched.share),
        )
        calls.append((heads, call))
    return calls


def _together(results: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Concatenate the results of parts."""
    if len(results) == 1:
        return results[0]
    return tuple(None if x[0] is None else torch.cat(x) for x in zip(*results))


def attend(
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None,
    fetched: Fetched,
    kernels: Kernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to first tokens, raw tokens of chosen groups, core tokens of the other groups and the
    window, in one softmax.

    Args:
        tokens: Raw tokens from position 0 on.
        cores: Core tokens of the groups behind the first tokens that stay raw.
        core_bias: [N, r], or [N, r, M], or None.
        kernels: Those of every device where there are none.

    Returns:
        out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in float32.
    """
    calls = _calls(tokens, cores, spec, core_bias, fetched)
    return _together([_attend(call, kernels or ANYWHERE) for _, call in calls])


def _attend(call: Call, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """`attend` for sequences whose marks fit into their memory."""
    out, lse = kernels.unfetched(*call[:4], call.marks())
    if out.numel() and call.fetched.chosen.shape[2]:
        kernels.raw(call, out, lse)
    return out, lse


def attend_raw(call: Call, out: Tensor, lse: Tensor) -> None:
    """Attend to the raw tokens of chosen groups and merge with out [N, r, T, D] and lse [N, r, T],
    in place."""
    tokens, cores, _, _, fetched = call
    q, k, v = map(contiguous_rows, tokens[:3])
    n, count, _ = fetched.chosen.shape
    constants = call.constants(fetch_tiles(*call.chip(), call.rows), call.rows)
    launch(
        fetch_fwd_kernel,
        (n * count * ceil_div(call.rows, constants["BLOCK_M"]),),
        (
            *(q, k, v, fetched.chosen.contiguous(), out, lse),
            *(q.shape[2], cores.k.shape[2], count),
            *(tokens.q_start // fetched.share, tokens.q_start, *call.numbers()),
        ),
        (*(x.stride()[:-1] for x in (q, k, v, out)), *call.specialized()),
        **constants,
    )


class Kernels(NamedTuple):
    """Hold the two parts of a forward."""

    unfetched: Callable[..., tuple[Tensor, Tensor]]
    """Attends to all but raw tokens of chosen groups, with the arguments of `attend.attend`."""
    raw: Callable[[Call, Tensor, Tensor], None]
    """Attends to these, as `attend_raw`."""


ANYWHERE = Kernels(unfetched.attend, attend_raw)


def attend_backward(
    upstream: Upstream,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None,
    fetched: Fetched,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, core_k, core_v and core_bias of a whole sequence, in
    float32, the same from run to run; the choice has none."""
    results = [
        _attend_backward(upstream.map(lambda x, heads=heads: x[heads]), call)
        for heads, call in _calls(tokens, cores, spec, core_bias, fetched)
    ]
    return _together(results)


def _attend_backward(upstream: Upstream, call: Call) -> tuple[Tensor | None, ...]:
    """`attend_backward` for sequences whose marks fit into their memory."""
    grads = unfetched.attend_backward(upstream, *call[:4], call.marks())
    add_raw_gradients(upstream, call, grads[:3], float(call.spec.scale))
    return grads


def add_raw_gradients(
    upstream: Upstream,
    call: Call,
    grads: tuple[Tensor, Tensor, Tensor],
    query_scale: float,
    add_query_gradient: Callable[..., None] | None = None,
) -> None:
    """Add the gradients through raw tokens of chosen groups to those of q, k and v, in place.

    Args:
        grads: That of q in float32; the others in float32 or their dtype.
        query_scale: Factor of the gradient of q.
        add_query_gradient: Another `_add_query_gradient`.
    """
    tokens, cores, spec, _, fetched = call
    dq, dk, dv = grads
    q, k, v, grad_out = map(contiguous_rows, (*tokens[:3], upstream.grad_out))
    num_groups = cores.k.shape[2]
    if not (q.numel() and fetched.chosen.shape[2] and num_groups):
        return
    lse = upstream.lse.contiguous()
    delta = torch.empty_like(lse)
    (add_query_gradient or _add_query_gradient)(upstream, call, dq, delta, query_scale)
    order, begin = _shares_by_group(fetched.chosen, num_groups)
    tiles = fetch_dkv_tiles(*call.chip(), spec.group_size)
    constants = call.constants(tiles, spec.group_size)
    launch(
        fetch_dkv_kernel,
        (ceil_div(spec.group_size, constants["BLOCK_M"]) * num_groups * q.shape[0],),
        (
            *(q, k, v, lse, grad_out, delta, order, begin, dk, dv),
            *(q.shape[2], k.shape[1], num_groups, order.shape[1], *call.numbers()),
        ),
        (*(x.stride()[:-1] for x in (q, k, v, grad_out)), *call.specialized()),
        **constants,
    )


def _add_query_gradient(
    upstream: Upstream, call: Call, dq: Tensor, delta: Tensor, query_scale: float
) -> None:
    """Add the gradient through raw tokens of chosen groups, times query_scale, to dq [N, r, T, D]
    in float32, in place; fill delta [N, r, T] = sum(grad out) - grad lse."""
    q, k, v, grad_out = map(contiguous_rows, (*call.tokens[:3], upstream.grad_out))
    lse = upstream.lse.contiguous()
    chosen = call.fetched.chosen.contiguous()
    n, count, _ = chosen.shape
    constants = call.constants(fetch_dq_tiles(*call.chip(), call.rows), call.rows)
    launch(
        fetch_dq_kernel,
        (n * count * ceil_div(call.rows, constants["BLOCK_M"]),),
        (
            *(q, k, v, chosen, upstream.out.contiguous(), lse, grad_out),
            lse if upstream.grad_lse is None else upstream.grad_lse.contiguous(),
            *(dq, delta, q.shape[2], call.cores.k.shape[2], count, *call.numbers(), query_scale),
        ),
        (*(x.stride()[:-1] for x in (q, k, v, grad_out)), *call.specialized()),
        HAS_GRAD_LSE=upstream.grad_lse is not None,
        **constants,
    )


def _shares_by_group(chosen: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return the places [N, C k] of a choice [N, C, k], sorted by group, and where the places of
    each group begin, [N, M + 1]; both in int32."""
    flat = chosen.flatten(1)
    flat = torch.where(flat < 0, num_groups, flat)
    ordered, order = flat.sort(dim=1, stable=True)
    groups = torch.arange(num_groups + 1, dtype=torch.int32, device=chosen.device)
    begin = torch.searchsorted(ordered, groups.expand(chosen.shape[0], -1).contiguous())
    return order.to(torch.int32), begin.to(torch.int32)
