"""Attend to the raw tokens of chosen groups on any GPU, in one softmax with all else that a query
sees: results and gradients of that part are taken in here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from corecontext.ops.spec import Upstream
from corecontext.ops.triton.attend.chosen_call import Call
from corecontext.ops.triton.attend.raw import (
    fetch_dkv_kernel,
    fetch_dq_kernel,
    fetch_fwd_kernel,
)
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, numbers
from corecontext.ops.triton.tiles import fetch_dkv_tiles, fetch_dq_tiles, fetch_tiles


def attend_raw(call: Call, out: Tensor, lse: Tensor) -> None:
    """Attend to the raw tokens of chosen groups and merge with out [N, r, T, D] and lse [N, r, T],
    in place."""
    tokens, cores, _, _, choice = call
    q, k, v = map(contiguous_rows, tokens[:3])
    n, count, _ = choice.groups.shape
    constants = call.constants(fetch_tiles(*call.chip(), call.rows), call.rows)
    launch(
        fetch_fwd_kernel,
        (n * count * ceil_div(call.rows, constants["BLOCK_M"]),),
        (
            *((q, k, v), choice.groups.contiguous(), (out, lse)),
            numbers(
                *(q.shape[2], cores.k.shape[2], count),
                *(tokens.q_start // choice.share, tokens.q_start),
            ),
            *call.factors(),
        ),
        (tuple(x.stride()[:-1] for x in (q, k, v, out)), *call.specialized()),
        **constants,
    )


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
    tokens, cores, spec, _, choice = call
    dq, dk, dv = grads
    q, k, v, grad_out = map(contiguous_rows, (*tokens[:3], upstream.grad_out))
    num_groups = cores.k.shape[2]
    if not (q.numel() and choice.groups.shape[2] and num_groups):
        return
    lse = upstream.lse.contiguous()
    delta = torch.empty_like(lse)
    (add_query_gradient or _add_query_gradient)(upstream, call, dq, delta, query_scale)
    order, begin = _shares_by_group(choice.groups, num_groups)
    tiles = fetch_dkv_tiles(*call.chip(), spec.group_size)
    constants = call.constants(tiles, spec.group_size)
    launch(
        fetch_dkv_kernel,
        (ceil_div(spec.group_size, constants["BLOCK_M"]) * num_groups * q.shape[0],),
        (
            *((q, k, v), (lse, grad_out, delta), (order, begin), (dk, dv)),
            *(numbers(q.shape[2], k.shape[1], num_groups, order.shape[1]), *call.factors()),
        ),
        (tuple(x.stride()[:-1] for x in (q, k, v, grad_out)), *call.specialized()),
        **constants,
    )


def _add_query_gradient(
    upstream: Upstream, call: Call, dq: Tensor, delta: Tensor, query_scale: float
) -> None:
    """Add the gradient through raw tokens of chosen groups, times query_scale, to dq [N, r, T, D]
    in float32, in place; fill delta [N, r, T] = sum(grad out) - grad lse."""
    q, k, v, grad_out = map(contiguous_rows, (*call.tokens[:3], upstream.grad_out))
    lse = upstream.lse.contiguous()
    grad_lse = lse if upstream.grad_lse is None else upstream.grad_lse.contiguous()
    chosen = call.choice.groups.contiguous()
    n, count, _ = chosen.shape
    constants = call.constants(fetch_dq_tiles(*call.chip(), call.rows), call.rows)
    launch(
        fetch_dq_kernel,
        (n * count * ceil_div(call.rows, constants["BLOCK_M"]),),
        (
            *((q, k, v), chosen, (upstream.out.contiguous(), lse, grad_out, grad_lse), (dq, delta)),
            *(numbers(q.shape[2], call.cores.k.shape[2], count), *call.factors(), query_scale),
        ),
        (tuple(x.stride()[:-1] for x in (q, k, v, grad_out)), *call.specialized()),
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
