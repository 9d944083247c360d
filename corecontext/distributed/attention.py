"""Attend within one document's chunks: a near part and a far part for each, their exchanges, and
the backward.

The queries of a chunk see its own tokens; the halo, the at most s + g - 2 raw tokens before it; and
the core tokens of all groups before the halo, all of which every query sees. The halo begins with
a group, so halo and chunk together are an ordinary CCA sequence (the near part), which any
backend computes at once; the far part is attention to core tokens without a mask. The core tokens
travel while the near part is computed, their gradients while the near part's are.

Pooled here are all groups of a near part; those that end in its chunk are made for all processes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.distributed import whole
from corecontext.distributed.call import Call
from corecontext.ops import partial
from corecontext.ops.mass import if_any
from corecontext.ops.merge import merge_into
from corecontext.ops.spec import Cores, Groups, Tokens, Upstream


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, first: Tensor | None) -> Tensor:
    """Attend from this process's queries [B, H, T, D] to the document, of which it holds the keys
    and values [B, Hkv, T, D]; the result has the shape of q. A collective call.

    Args:
        first: Keys and values of first tokens, [2, B, Hkv, n, D], which all queries see too; or
            None.
    """
    return _Attend.apply(q, k, v, call, first)


class _Near(NamedTuple):
    """Hold the tensors of a chunk that its backward needs."""

    q_last: Tensor
    """The queries that end the near part's groups, [N, r, M, D]."""
    k: Tensor
    """Keys of the near part, [N, S, D]; v as well."""
    v: Tensor
    core_k: Tensor
    """Core keys of the near part, [N, 1, M, D]; core_v as well."""
    core_v: Tensor
    mass: Tensor | None
    """Masses of these, [N, 1, M]."""
    out: Tensor
    """Results of the chunk's queries [N, r, T, D], in the end over all parts."""
    lse: Tensor
    """Their log-sum-exp, [N, r, T]."""


class _Attend(torch.autograd.Function):
    """Merge the near parts, by the backend, with the far parts, by plain attention. The backward of
    each part gets the merged result, whose softmax is over all of them."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, call: Call, first: Tensor | None) -> Tensor:
        kv_heads = k.shape[1]
        tokens = by_chunk(call, q, k, v)
        # Pool the near parts: each chunk's tokens behind those of its halo. `made` has the core
        # tokens that this process makes for all, [2, N, 1, M, D]: none without a chunk.
        halos = call.halo.fetch(tokens)
        pooled: dict[int, tuple[Tensor, ...]] = {}
        no_cores = call.no_cores(k)
        no_masses = no_cores[:1, ..., :1].to(torch.promote_types(k.dtype, torch.float32))
        made = [no_cores]
        made_masses = [no_masses]
        for chunk, (chunk_q, chunk_k, chunk_v) in tokens.items():
            halo_k, halo_v, halo_ends = halos[chunk]
            chunk_ends = chunk_q[:, :, call.halo.group_ends(*call.layout.span(chunk))]
            q_last = by_head(torch.cat((halo_ends, chunk_ends), 2), kv_heads)
            near_k = torch.cat((halo_k, chunk_k), 2).flatten(0, 1)
            near_v = torch.cat((halo_v, chunk_v), 2).flatten(0, 1)
            groups = call.near_groups(q_last, near_k, near_v)
            cores, mass = call.module.pool_with_mass(groups, call.spec)
            if mass is not None:
                made_masses.append(mass[None, :, :, call.own_groups(chunk), None])
            pooled[chunk] = (q_last, near_k, near_v, *cores, mass)
            made.append(torch.stack([x[:, :, call.own_groups(chunk)] for x in cores]))
        # Attend to the near parts while the core tokens travel.
        wire = call.halo.wire
        wait_for_cores = whole.gather(torch.cat(made, 3), call.core_layout, wire)
        if call.has_mass:
            wait_for_masses = whole.gather(torch.cat(made_masses, 3), call.core_layout, wire)
        queries = {chunk: by_head(chunk_q, kv_heads) for chunk, (chunk_q, *_) in tokens.items()}
        near: dict[int, _Near] = {}
        for chunk, (q_last, near_k, near_v, *cores, mass) in pooled.items():
            results = call.module.attend(
                Tokens(queries[chunk], near_k, near_v, q_start=call.halo.size(chunk)),
                Cores(*cores),
                call.spec,
                if_any(mass),  # None where the near part has no complete group
            )
            near[chunk] = _Near(q_last, near_k, near_v, *cores, mass, *results)
        all_cores = wait_for_cores()  # [2, N, 1, M, D], M of the whole sequence
        all_masses = None
        if call.has_mass:
            all_masses = wait_for_masses()  # [1, N, 1, M, 1]
        for chunk, chunk_near in near.items():
            if call.num_far(chunk):
                far = all_cores[:, :, :, : call.num_far(chunk)]
                mass = call.far_mass(chunk, all_masses)
                _merge_far(call, queries[chunk], far, mass, chunk_near.out, chunk_near.lse)
            if first is not None:
                # mutant context parallelism: later chunks do not see the first tokens
                _merge_first(call, queries[chunk], first, chunk_near.out, chunk_near.lse)
        ctx.call = call
        ctx.kv_heads = kv_heads
        saved = [x for tensors in near.values() for x in tensors]
        ctx.save_for_backward(q, all_cores, all_masses, first, *saved)
        outs = [x.out.reshape(*q.shape[:2], -1, q.shape[3]) for x in near.values()]
        return torch.cat([q[:, :, :0], *outs], 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        kv_heads = ctx.kv_heads
        q, all_cores, all_masses, first, *saved = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        size = len(_Near._fields)
        near = {
            chunk: _Near(*saved[size * i : size * (i + 1)])
            for i, chunk in enumerate(call.layout.chunks())
        }
        rows = {
            chunk: [by_head(x, kv_heads) for x in tensors]
            for chunk, tensors in by_chunk(call, q, grad_out).items()
        }
        with torch.autocast(q.device.type, enabled=False):
            # The far parts first: their gradients of core tokens have to travel.
            far_dq = {}
            core_grads = torch.zeros_like(all_cores, dtype=wide)
            mass_grads = None if all_masses is None else torch.zeros_like(all_masses)
            first_grads = None if first is None else torch.zeros_like(first, dtype=wide)
            for chunk, (queries, grad) in rows.items():
                far = slice(0, call.num_far(chunk))
                upstream = Upstream(grad, grad_lse=None, out=near[chunk].out, lse=near[chunk].lse)
                cores, core_grad = (x[:, :, :, far] for x in (all_cores, core_grads))
                mass = call.far_mass(chunk, all_masses)
                far_dq[chunk], grad_mass = _far_backward(
                    call, upstream, queries, cores, mass, core_grad
                )
                if grad_mass is not None:
                    mass_grads[0, :, :, far, 0] += grad_mass
                if first is not None:
                    far_dq[chunk] += _first_backward(call, upstream, queries, first, first_grads)
            wire = call.halo.wire
            wait_for_cores = whole.scatter_sum(core_grads, call.core_layout, wire)
            if mass_grads is not None:
                wait_for_masses = whole.scatter_sum(mass_grads, call.core_layout, wire)
            # The near parts. A halo has no queries here: zeros with zero gradients in their place
            # add nothing to any sum.
            grads = {}
            for chunk, (queries, grad) in rows.items():
                q_last, near_k, near_v, *cores, mass, out, lse = near[chunk]
                halo = call.halo.size(chunk)
                queries, grad, out, lse = (after_zeros(halo, x) for x in (queries, grad, out, lse))
                groups = call.near_groups(q_last, near_k, near_v)
                dq, dk, dv = call.module.gradients(
                    Upstream(grad, grad_lse=None, out=out, lse=lse),
                    Tokens(queries, near_k, near_v),
                    groups,
                    Cores(*cores),
                    call.spec,
                    if_any(mass),
                )
                grads[chunk] = [x.to(wide) for x in (dq, dk, dv)]
                grads[chunk][0][:, :, halo:] += far_dq[chunk]
            core_grads = wait_for_cores()
            if mass_grads is not None:
                mass_grads = wait_for_masses()
            _add_pool_gradients(call, core_grads, mass_grads, near, grads)
            # [N, ...] to [B, H or Hkv, halo + T, D]
            near_grads = {
                chunk: tuple(x.reshape(q.shape[0], -1, *x.shape[-2:]) for x in tensors)
                for chunk, tensors in grads.items()
            }
            chunk_grads = call.halo.give_back(near_grads)
        like = (q[:, :, :0], q[:, :kv_heads, :0], q[:, :kv_heads, :0])
        if first is not None:
            first_grads = first_grads.to(first.dtype)
        return *joined_chunks(chunk_grads, like), None, first_grads


def _merge_far(
    call: Call, q: Tensor, far: Tensor, mass: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Merge attention to core tokens [2, N, 1, M, D] of masses [N, r, M] into out [N, r, T, D]
    and lse [N, r, T], in place."""
    scoring = partial.Scoring(call.spec.scale, call.spec.softcap, key_bias=mass)
    merge_into(out, lse, partial.forward(q, *far.unbind(), scoring))


def _merge_first(call: Call, q: Tensor, first: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge attention to the first tokens [2, B, Hkv, n, D] into out [N, r, T, D] and lse [N, r,
    T], in place."""
    scoring = partial.Scoring(call.spec.scale, call.spec.softcap)
    merge_into(out, lse, partial.forward(q, *first_keys(first), scoring))


def _first_backward(
    call: Call, upstream: Upstream, q: Tensor, first: Tensor, first_grads: Tensor
) -> Tensor:
    """Add to `first_grads` [2, B, Hkv, n, D]; return the gradients of a chunk's queries q,
    [N, r, T, D], from the first tokens."""
    scoring = partial.Scoring(call.spec.scale, call.spec.softcap)
    dq, *grads = partial.backward(upstream, q, *first_keys(first), scoring)
    for total, grad in zip(first_grads, grads):
        total += grad.reshape(total.shape)
    return dq


def _far_backward(
    call: Call, upstream: Upstream, q: Tensor, far: Tensor, mass: Tensor | None, core_grads: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Add to `core_grads` [2, N, 1, M, D], of the core tokens `far` of a chunk's far part; return
    the gradients of the chunk's queries [N, r, T, D], in float32 or wider, and of the masses
    [N, 1, M], None without."""
    if not far.shape[3]:
        return torch.zeros_like(q, dtype=core_grads.dtype), None
    scoring = partial.Scoring(call.spec.scale, call.spec.softcap, key_bias=mass)
    dq, dk, dv, *dmass = partial.backward(upstream, q, *far.unbind(), scoring)
    for total, grad in zip(core_grads, (dk, dv)):
        total += grad
    # `dmass` is empty without masses, else it has their gradient by query head, [N, r, M].
    grad_mass = dmass[0].sum(1, keepdim=True) if dmass else None
    return dq.to(core_grads.dtype), grad_mass


def _add_pool_gradients(
    call: Call, core_grads: Tensor, mass_grads: Tensor | None, near: dict[int, _Near], grads: dict
) -> None:
    """Add to `grads` what the pooled tokens get from far parts, through the core tokens that this
    process made.

    Args:
        core_grads: Of these core keys and values, [2, N, 1, M, D].
        mass_grads: Of their masses, [1, N, 1, M, 1], or None.
        near: Tensors of the near parts, by chunk.
        grads: Gradients of the near parts' queries, keys and values so far, by chunk.
    """
    g = call.spec.group_size
    masses = {}
    if mass_grads is not None:
        masses = whole.by_chunk(call.core_layout, mass_grads, call.layout.rank)
    for chunk, core_grad in whole.by_chunk(call.core_layout, core_grads, call.layout.rank).items():
        # Through the pooling of the groups that this chunk made.
        made = call.own_groups(chunk)
        q_last, k, v = call.near_groups(*near[chunk][:3])
        groups = Groups(q_last[:, :, made], k[:, made], v[:, made])
        mass_grad = None
        if chunk in masses:
            # mutant context parallelism: later chunks give a mass no gradient
            mass_grad = masses[chunk][0, ..., 0].contiguous()
        dq_last, *dkv = call.module.pool_backward(
            Cores(*core_grad.contiguous().unbind()), groups, call.spec, mass_grad
        )
        # Of a group's queries, only the last one pools.
        tokens = slice(made.start * g, made.stop * g)
        total_q, *total_kv = grads[chunk]
        total_q[:, :, tokens][:, :, g - 1 :: g] += dq_last
        for total, grad in zip(total_kv, dkv):
            total[:, tokens] += grad.flatten(1, 2)


# Shapes


def by_chunk(call: Call, *tensors: Tensor) -> dict[int, tuple[Tensor, ...]]:
    """Split this process's tensors [B, H, T, D] by chunk."""
    chunks = call.layout.chunks()
    lengths = [call.layout.lengths[chunk] for chunk in chunks]
    return dict(zip(chunks, zip(*(x.split(lengths, 2) for x in tensors))))


def joined_chunks(chunks: dict[int, tuple[Tensor, ...]], like: Sequence[Tensor]) -> list[Tensor]:
    """Join tensors that `by_chunk` split, in the dtypes of the empty tensors `like`, [B, H or Hkv,
    0, D], which are the result where there is no chunk."""
    return [
        torch.cat([empty, *(tensors[i].to(empty.dtype) for tensors in chunks.values())], 2)
        for i, empty in enumerate(like)
    ]


def by_head(x: Tensor, heads: int) -> Tensor:
    """Reshape [B, H, T, ...] to [B heads, H / heads, T, ...]."""
    return x.reshape(x.shape[0] * heads, x.shape[1] // heads, *x.shape[2:])


def after_zeros(count: int, x: Tensor) -> Tensor:
    """Return x [N, r, T, ...] behind `count` zero queries."""
    return torch.cat((x.new_zeros(*x.shape[:2], count, *x.shape[3:]), x), 2)


def first_keys(first: Tensor) -> list[Tensor]:
    """Return keys and values [N, 1, n, D] of first tokens [2, B, Hkv, n, D]; N is B Hkv."""
    return [x.flatten(0, 1)[:, None] for x in first.unbind()]
