"""Core tokens of a rule of their own (learned parameters, the mean query) on several processes.

What parts.py computes, put together from pieces that autograd knows: fetch the halo, pool in plain
torch, gather the core tokens, attend by the backend. The core tokens do not travel while something
else is computed, and the far part's backward is plain matrix products: the price of rules that no
kernel has. Gradients of the parameters are this process's share, as those of any weight: data
parallelism or FSDP sums them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from corecontext.config import LEARNED_WEIGHTS
from corecontext.distributed.attention import (
    Call,
    after_zeros,
    by_chunk,
    by_core_head,
    by_kv_head,
    far_keys,
    gather_cores,
    in_order,
    scatter_core_grads,
)
from corecontext.ops import partial, rules
from corecontext.ops.merge import merge
from corecontext.ops.spec import Cores, Groups, Tokens, Upstream


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, learned: Mapping[str, Tensor]) -> Tensor:
    """Attention of this process's queries [B, H, T, D]; differentiable in `learned`, too. A
    collective call."""
    batch_size, kv_heads = q.shape[0], k.shape[1]
    weights = rules.by_sequence(
        {name: x for name, x in learned.items() if name in LEARNED_WEIGHTS}, kv_heads, batch_size
    )
    bias = torch.full(
        (q.shape[1],),
        call.core_bias,
        device=q.device,
        dtype=torch.promote_types(q.dtype, torch.float32),
    )
    bias = (
        (bias + learned["bias"] if "bias" in learned else bias)
        .unflatten(0, (kv_heads, -1))
        .repeat(batch_size, 1)
    )
    anchor, *fetched = _Fetch.apply(k, v, call)
    chunks, own = by_chunk(call, q), []
    fetched = [x.flatten(0, 1) for x in fetched]  # [N, halo + T, D]
    near = {chunk: fetched[2 * i : 2 * i + 2] for i, chunk in enumerate(chunks)}
    for chunk, both in near.items():
        groups, (local,) = call.own(chunk), chunks[chunk]
        last = by_kv_head(
            local[:, :, call.halo.ends(*call.layout.span(chunk))], kv_heads
        )  # each group ends here
        tokens = slice(groups.start * call.group_size, groups.stop * call.group_size)
        shape = (last.shape[2], call.group_size)
        near_k, near_v = (x[:, tokens].unflatten(1, shape) for x in both)
        made = rules.pool(Groups(last, near_k, near_v), call.spec, weights)
        own.append(torch.stack(made))
    every = _Gather.apply(anchor, call, *own)  # [2, N, Hc, M, D]
    if call.keep is not None:
        call.keep(every)
    # A process without tokens of this document takes part in the backward's exchanges all the same.
    outs = [q[:, :, :0] + every[:, :, :, :0].sum().to(q.dtype)]
    for chunk, (near_k, near_v) in near.items():
        local, halo, far = (
            by_kv_head(chunks[chunk][0], kv_heads),
            call.halo.size(chunk),
            call.far(chunk),
        )
        cores = every[:, :, :, far : far + near_k.shape[1] // call.group_size]
        out, lse = (
            x[:, :, halo:]
            for x in rules.attend(
                call.module,
                Tokens(after_zeros(halo, local), near_k, near_v),
                Cores(*cores.unbind()),
                call.spec,
                bias,
            )
        )
        if far:
            far_out, far_lse = _Far.apply(
                by_core_head(local, every),
                *far_keys(every[:, :, :, :far]),
                call.spec.scale,
                call.spec.softcap,
            )
            out, _ = merge(
                [out, far_out.reshape(out.shape)],
                [lse, far_lse.reshape(lse.shape) + bias[..., None].to(lse.dtype)],
            )
        outs.append(out.reshape(batch_size, q.shape[1], -1, q.shape[3]).to(q.dtype))
    return torch.cat(outs, 2)


class _Fetch(torch.autograd.Function):
    """Each chunk's keys and values behind those of its halo [B, Hkv, halo + T, D]; first an empty
    tensor, which orders the exchanges of a process that has no chunk."""

    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, ...]:
        ctx.halo = call.halo._replace(num_heads=0)  # a group's last query is where it is pooled
        tokens, found = by_chunk(call, k[:, :0], k, v), [k.new_empty(0)]
        halos = ctx.halo.fetch(tokens)
        for chunk, (_, *both) in tokens.items():
            found += [torch.cat(pair, 2) for pair in zip(halos[chunk], both)]
        ctx.empty = (*k.shape[:2], 0, k.shape[3])
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, anchor: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wide = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
        near = {
            chunk: (wide[2 * i][:, :0], *wide[2 * i : 2 * i + 2])
            for i, chunk in enumerate(ctx.halo.layout.chunks())
        }
        own = ctx.halo.give_back(near)
        empty = anchor.new_empty(ctx.empty)
        return *(
            torch.cat([empty, *(own[i][at].to(anchor.dtype) for i in near)], 2) for at in (1, 2)
        ), None


class _Gather(torch.autograd.Function):
    """Every process's core tokens [2, N, Hc, M, D], from this one's by chunk [2, N, Hc, m, D]."""

    @staticmethod
    def forward(ctx, anchor: Tensor, call: Call, *own: Tensor) -> Tensor:
        ctx.call, ctx.counts = call, [x.shape[3] for x in own]
        return in_order(call, gather_cores(call, list(own), anchor).wait())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        mine = scatter_core_grads(ctx.call, wide).wait()[:, :, :, : sum(ctx.counts)].to(grad.dtype)
        return grad.new_zeros(0), None, *(mine.split(ctx.counts, 3) if ctx.counts else ())


class _Far(torch.autograd.Function):
    """Attention to all of some core tokens, out and log-sum-exp; q [N Hc, r / Hc, T, D], keys [N
    Hc, 1, M, D]."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = partial.forward(q, k, v, scale=scale, softcap=softcap)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.softcap = scale, softcap
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = partial.backward(
            Upstream(grad_out, grad_lse, out, lse), q, k, v, scale=ctx.scale, softcap=ctx.softcap
        )
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v))), None, None
