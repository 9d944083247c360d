"""Attend on several processes with pooling that no kernel has: learned parameters, the mean query.

The same steps as in attention.py, put together from pieces that autograd knows: fetch the halo,
pool in plain torch, gather the core tokens, attend by the backend. The core tokens do not travel
while something else is computed, and the far part's backward is plain matrix products. Gradients of
the parameters are this process's share, as those of any weight: data parallelism or FSDP sums them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from corecontext.distributed.attention import (
    after_zeros,
    by_chunk,
    by_head,
    far_keys,
    joined_chunks,
)
from corecontext.distributed.call import Call
from corecontext.distributed.core_tokens import (
    far_mass,
    gather_entries,
    in_order,
    no_cores,
    no_masses,
    scatter_grads,
    split_message,
)
from corecontext.ops import partial, rules
from corecontext.ops.mass import add_to_bias
from corecontext.ops.merge import merge
from corecontext.ops.spec import Cores, Groups, Tokens, Upstream


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    first: Tensor | None,
    learned: Mapping[str, Tensor],
) -> Tensor:
    """Attend from this process's queries [B, H, T, D], with `first` to the first tokens [2, B, Hkv,
    n, D] too; differentiable in `learned` as well. A collective call."""
    kv_heads = k.shape[1]
    spec = call.spec
    g = spec.group_size
    weights = rules.by_sequence(learned, kv_heads, q.shape[0])
    bias = _bias(call, learned, q, kv_heads)
    # Near keys and values: each chunk's behind those of its halo.
    anchor, *fetched = _Fetch.apply(k, v, call)
    fetched = [x.flatten(0, 1) for x in fetched]  # [N, halo + T, D]
    chunks = by_chunk(call, q)
    queries = {chunk: by_head(chunk_q, kv_heads) for chunk, (chunk_q,) in chunks.items()}
    near = {chunk: fetched[2 * i : 2 * i + 2] for i, chunk in enumerate(chunks)}
    # Pool where a group ends, which is where its last query is.
    made = []
    made_masses = []
    for chunk, near_kv in near.items():
        groups = call.made(chunk)
        q_last = queries[chunk][:, :, call.halo.ends(*call.layout.span(chunk))]
        tokens = slice(groups.start * g, groups.stop * g)
        near_k, near_v = (x[:, tokens].unflatten(1, (q_last.shape[2], g)) for x in near_kv)
        pooled = Groups(q_last, near_k, near_v)
        made.append(torch.stack(rules.pool(pooled, spec, weights)))
        if call.has_mass:
            made_masses.append(rules.mass(pooled, spec, weights)[None, ..., None])
    all_cores = _Gather.apply(anchor, call, no_cores(call, anchor), *made)  # [2, N, Hc, M, D]
    all_masses = None
    if call.has_mass:  # [1, N, Hc, M, 1]
        all_masses = _Gather.apply(anchor, call, no_masses(call, anchor), *made_masses)
    if call.keep is not None:
        call.keep(all_cores, all_masses)
    # A process without tokens of this document takes part in the backward's exchanges all the same.
    outs = [q[:, :, :0] + all_cores[:, :, :, :0].sum().to(q.dtype)]
    if all_masses is not None:
        outs[0] = outs[0] + all_masses[:, :, :, :0].sum().to(q.dtype)
    if first is not None:
        outs[0] = outs[0] + first[:, :, :, :0].sum()
    for chunk, (near_k, near_v) in near.items():
        halo = call.halo.size(chunk)
        far = call.far(chunk)
        near_groups = slice(far, far + near_k.shape[1] // g)
        near_cores = all_cores[:, :, :, near_groups]
        near_bias = bias
        if all_masses is not None:
            near_bias = add_to_bias(bias, all_masses[0, :, :, near_groups, 0], bias.shape[1])
        tokens = Tokens(after_zeros(halo, queries[chunk]), near_k, near_v)
        out, lse = rules.attend(call.module, tokens, Cores(*near_cores.unbind()), spec, near_bias)
        outs_of_parts = [out[:, :, halo:]]
        lses = [lse[:, :, halo:]]
        options = {"scale": spec.scale, "softcap": spec.softcap}
        if far:
            far_out, far_lse = _Far.apply(
                by_head(queries[chunk], all_cores.shape[2]),
                *far_keys(all_cores[:, :, :, :far]),
                far_mass(call, chunk, all_masses),
                options,
            )
            far_lse = far_lse.reshape(lses[0].shape) + bias[..., None].to(lse.dtype)
            outs_of_parts.append(far_out.reshape(outs_of_parts[0].shape))
            lses.append(far_lse)
        if first is not None:
            first_out, first_lse = _Far.apply(queries[chunk], *far_keys(first), None, options)
            outs_of_parts.append(first_out)
            lses.append(first_lse)
        out, _ = merge(outs_of_parts, lses)
        outs.append(out.reshape(*q.shape[:2], -1, q.shape[3]).to(q.dtype))
    return torch.cat(outs, 2)


def _bias(call: Call, learned: Mapping[str, Tensor], q: Tensor, kv_heads: int) -> Tensor:
    """The bias of core tokens, given and learned, [N, r]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    bias = torch.full((q.shape[1],), call.core_bias, device=q.device, dtype=wide)
    if "bias" in learned:
        bias = bias + learned["bias"]
    return bias.unflatten(0, (kv_heads, -1)).repeat(q.shape[0], 1)


class _Fetch(torch.autograd.Function):
    """Each chunk's keys and values behind those of its halo [B, Hkv, halo + T, D]; first an empty
    tensor, which orders the exchanges of a process that has no chunk."""

    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, ...]:
        # A group's last query is where it is pooled, so no queries travel.
        ctx.halo = call.halo._replace(shape=call.halo.shape._replace(num_heads=0))
        tokens = by_chunk(call, k[:, :0], k, v)
        halos = ctx.halo.fetch(tokens)
        near = []
        for chunk, (_, chunk_k, chunk_v) in tokens.items():
            halo_k, halo_v, _ = halos[chunk]
            near += [torch.cat((halo_k, chunk_k), 2), torch.cat((halo_v, chunk_v), 2)]
        ctx.empty_shape = (*k.shape[:2], 0, k.shape[3])
        return k.new_empty(0), *near

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, anchor: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wide = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
        near = {
            chunk: (wide[2 * i][:, :0], *wide[2 * i : 2 * i + 2])
            for i, chunk in enumerate(ctx.halo.layout.chunks())
        }
        empty = anchor.new_empty(ctx.empty_shape)
        like = (empty[:, :0], empty, empty)
        _, grad_k, grad_v = joined_chunks(ctx.halo.give_back(near), like)
        return grad_k, grad_v, None


class _Gather(torch.autograd.Function):
    """Every process's core tokens [2, N, Hc, M, D], from this process's by chunk [2, N, Hc, m, D];
    or masses [1, N, Hc, M, 1] likewise."""

    @staticmethod
    def forward(ctx, anchor: Tensor, call: Call, empty: Tensor, *made: Tensor) -> Tensor:
        ctx.call = call
        return in_order(call, gather_entries(call, list(made), empty).wait())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        sums = scatter_grads(ctx.call, wide).wait().to(grad.dtype)
        grads = split_message(ctx.call, sums, ctx.call.layout.rank)
        return grad.new_zeros(0), None, None, *grads.values()


class _Far(torch.autograd.Function):
    """Attention to all of these core tokens, out and log-sum-exp; q [N Hc, r / Hc, T, D], keys [N
    Hc, 1, M, D], masses [N Hc, r / Hc, M] or None."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, mass: Tensor | None, options: dict
    ) -> tuple[Tensor, Tensor]:
        ctx.options = options
        out, lse = partial.forward(q, k, v, bias=mass, **options)
        ctx.save_for_backward(q, k, v, mass, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, mass, out, lse = ctx.saved_tensors
        upstream = Upstream(grad_out, grad_lse, out, lse)
        grads = partial.backward(upstream, *inputs, bias=mass, **ctx.options)
        grad_mass = None
        if mass is not None:
            grad_mass = grads[3]
        return *(grad.to(x.dtype) for grad, x in zip(grads[:3], inputs)), grad_mass, None
