"""Attention of one document's chunks: a near part and a far part for each, their exchanges, and the
backward.

A chunk needs three things: its own tokens; the halo, the at most s + g - 2 raw tokens before it;
and the core tokens of everything before the halo, which every one of its queries sees. The halo
begins with a group, so halo and chunk together are an ordinary CCA sequence (the near part), which
any backend computes at once; the far part is attention to core tokens without a mask. The core
tokens travel while the near part is computed, and backward their gradients while the near part's
are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.distributed.halo import Halo
from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Gathering
from corecontext.ops import partial
from corecontext.ops.merge import merge_into
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream


class Call(NamedTuple):
    """What forward and backward share: one document and how it lies."""

    halo: Halo
    module: ModuleType
    core_bias: float
    spec: Spec
    """With one group size and no first tokens kept raw."""
    keep: Callable[[Tensor], None] | None = None
    """Called with the keys and values of all core tokens, [2, N, Hc, M, D]."""

    @property
    def layout(self) -> Layout:
        """How the document lies."""
        return self.halo.layout

    @property
    def group_size(self) -> int:
        """Tokens per core token."""
        return self.halo.group_size

    def far(self, chunk: int) -> int:
        """Core tokens that every query of a chunk sees: its near part begins after them."""
        return (
            self.layout.halo_start(chunk, self.group_size, self.halo.window_size) // self.group_size
        )

    def own(self, chunk: int) -> slice:
        """The near part's groups that end in the chunk itself."""
        first, end = self.layout.groups(chunk, self.group_size)
        return slice(first - self.far(chunk), end - self.far(chunk))

    def counts(self, rank: int) -> list[int]:
        """Core tokens that each chunk of a process makes."""
        return [
            b - a
            for a, b in (self.layout.groups(i, self.group_size) for i in self.layout.chunks(rank))
        ]

    @property
    def most(self) -> int:
        """Core tokens of the process that makes most: what a message of core tokens holds."""
        return max(sum(self.counts(rank)) for rank in range(self.halo.wire.size))

    def bias(self, like: Tensor) -> Tensor | None:
        """The bias [N, r] of queries like these [N, r, T, D]."""
        if not self.core_bias:
            return None
        wide = torch.promote_types(like.dtype, torch.float32)
        return torch.full(like.shape[:2], self.core_bias, device=like.device, dtype=wide)

    def groups(self, q_last: Tensor, k: Tensor, v: Tensor) -> Groups:
        """The groups of a near part: group-end queries [N, r, M, D] as they are, keys and values
        [N, S, D] by group."""
        shape = (q_last.shape[2], self.group_size)
        k, v = (x[:, : shape[0] * shape[1]].unflatten(1, shape) for x in (k, v))
        return Groups(q_last, k, v)


class _Attend(torch.autograd.Function):
    """The near parts by the backend, the far parts by plain attention, merged; the backward gets
    the merged result."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kv_heads, tokens = k.shape[1], by_chunk(call, q, k, v)
        near, cores, own, results = [], [], [], []
        halos = call.halo.fetch(tokens)
        for chunk, (chunk_q, chunk_k, chunk_v) in tokens.items():
            halo_k, halo_v, halo_ends = halos[chunk]
            last = torch.cat(
                (halo_ends, chunk_q[:, :, call.halo.ends(*call.layout.span(chunk))]), 2
            )
            near_k, near_v = (
                torch.cat(pair, 2).flatten(0, 1) for pair in ((halo_k, chunk_k), (halo_v, chunk_v))
            )
            near.append((by_kv_head(last, kv_heads), near_k, near_v))
            cores.append(call.module.pool(call.groups(*near[-1]), call.spec))
            own.append(torch.stack([x[:, :, call.own(chunk)] for x in cores[-1]]))
        gathering = gather_cores(call, own, k)
        for (chunk, (chunk_q, *_)), (_, near_k, near_v), (core_k, core_v) in zip(
            tokens.items(), near, cores
        ):
            local = by_kv_head(chunk_q, kv_heads)
            results.append(
                call.module.attend(
                    Tokens(local, near_k, near_v, q_start=call.halo.size(chunk)),
                    Cores(core_k, core_v),
                    call.spec,
                    call.bias(local),
                )
            )
        every = in_order(call, gathering.wait())  # [2, N, Hc, M, D], M of the whole sequence
        if call.keep is not None:
            call.keep(every)
        for (chunk, (chunk_q, *_)), (out, lse) in zip(tokens.items(), results):
            if call.far(chunk):
                _merge_far(
                    call, by_kv_head(chunk_q, kv_heads), every[:, :, :, : call.far(chunk)], out, lse
                )
        ctx.call, ctx.kv_heads = call, kv_heads
        ctx.save_for_backward(
            q, every, *(x for group in (near, cores, results) for one in group for x in one)
        )
        return torch.cat(
            [q[:, :, :0], *(out.reshape(*q.shape[:2], -1, q.shape[3]) for out, _ in results)], 2
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        call, kv_heads, chunks = ctx.call, ctx.kv_heads, ctx.call.layout.chunks()
        q, every, *saved = ctx.saved_tensors
        near = [saved[3 * i : 3 * i + 3] for i in range(len(chunks))]
        cores, results = (
            [saved[at * len(chunks) + 2 * i :][:2] for i in range(len(chunks))] for at in (3, 5)
        )
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = [
            [by_kv_head(x, kv_heads) for x in both] for both in by_chunk(call, q, grad_out).values()
        ]
        with torch.autocast(q.device.type, enabled=False):
            far_dq, far_grads = [], torch.zeros_like(every, dtype=wide)
            for chunk, (local, grad), (out, lse) in zip(chunks, rows, results):
                far = slice(0, call.far(chunk))
                far_dq.append(
                    _far_backward(
                        call, local, every[:, :, :, far], grad, out, lse, far_grads[:, :, :, far]
                    )
                )
            scattering = scatter_core_grads(call, far_grads)
            grads = []
            for i, (chunk, (local, grad)) in enumerate(zip(chunks, rows)):
                # The halo's queries are others': zeros with no gradient, which add nothing to
                # anybody's.
                grad, local, out, lse = (
                    after_zeros(call.halo.size(chunk), x) for x in (grad, local, *results[i])
                )
                *parts, _ = call.module.gradients(
                    Upstream(grad, None, out, lse),
                    Tokens(local, *near[i][1:]),
                    call.groups(*near[i]),
                    Cores(*cores[i]),
                    call.spec,
                    call.bias(local),
                )
                grads.append([x.to(wide) for x in parts])
                if far_dq[i] is not None:
                    grads[i][0][:, :, call.halo.size(chunk) :] += far_dq[i]
            _pool_backward(call, scattering.wait(), near, grads)
            # [N, ...] to [B, H or Hkv, halo + T, D]
            near_grads = {
                chunk: tuple(x.reshape(q.shape[0], -1, *x.shape[-2:]) for x in one)
                for chunk, one in zip(chunks, grads)
            }
            own = call.halo.give_back(near_grads)
        empty = (q[:, :, :0], q[:, :kv_heads, :0], q[:, :kv_heads, :0])
        return *(
            torch.cat([none, *(own[i][at].to(q.dtype) for i in chunks)], 2)
            for at, none in enumerate(empty)
        ), None


def by_chunk(call: Call, *tensors: Tensor) -> dict[int, tuple[Tensor, ...]]:
    """Each chunk's part of this process's tensors [B, H, T, D]."""
    found, low = {}, 0
    for chunk in call.layout.chunks():
        high = low + call.layout.lengths[chunk]
        found[chunk] = tuple(x[:, :, low:high] for x in tensors)
        low = high
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Attention of this process's queries [B, H, T, D], T the share that the layout gives it. A
    collective call."""
    return _Attend.apply(q, k, v, call)


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, T, ...] to [N, r, T, ...], N = B Hkv."""
    return x.reshape(x.shape[0] * kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def after_zeros(count: int, x: Tensor) -> Tensor:
    """x [N, r, T, ...] behind `count` zero queries."""
    return torch.cat((x.new_zeros(*x.shape[:2], count, *x.shape[3:]), x), 2)


# Core tokens
# ----------------------------------------------------------------------------------------------------


def gather_cores(call: Call, own: list[Tensor], like: Tensor) -> Gathering:
    """Send this process's core tokens, one [2, N, Hc, m, D] in the dtype of `like` for each chunk,
    to all; filled up to the largest share."""
    halo = call.halo
    heads = halo.num_heads // halo.num_kv_heads if call.spec.core_heads == "query" else 1
    mine = torch.cat(
        [like.new_empty(2, halo.batch_size * halo.num_kv_heads, heads, 0, halo.head_dim), *own], 3
    )
    return call.halo.wire.gather(F.pad(mine, (0, 0, 0, call.most - mine.shape[3])))


def _places(call: Call) -> list[tuple[int, int, int, int]]:
    """For each chunk: its process, where its core tokens begin in that one's message, in the
    sequence, and how many."""
    found = []
    for rank in range(call.halo.wire.size):
        at = 0
        for chunk, count in zip(call.layout.chunks(rank), call.counts(rank)):
            found.append((rank, at, call.layout.groups(chunk, call.group_size)[0], count))
            at += count
    return sorted(found, key=lambda place: place[2])


def in_order(call: Call, every: Tensor) -> Tensor:
    """The core tokens of the whole sequence, [2, N, Hc, M, D], from all processes' messages."""
    return torch.cat(
        [every[rank][:, :, :, at : at + count] for rank, at, _, count in _places(call)], 3
    )


def scatter_core_grads(call: Call, grads: Tensor) -> Gathering:
    """Send gradients of core tokens [2, N, Hc, M, D] to those who made them."""
    every = grads.new_zeros(call.halo.wire.size, *grads.shape[:3], call.most, grads.shape[4])
    for rank, at, first, count in _places(call):
        every[rank][:, :, :, at : at + count] = grads[:, :, :, first : first + count]
    return call.halo.wire.scatter_sum(every)


def _pool_backward(call: Call, core_grads: Tensor, near: list, grads: list) -> None:
    """Add what others' queries give the queries and keys of the groups that end in this process's
    chunks."""
    g, at = call.group_size, 0
    for i, (chunk, count) in enumerate(zip(call.layout.chunks(), call.counts(call.layout.rank))):
        if count:
            own = call.own(chunk)
            q_last, k, v = call.groups(*near[i])
            dq_last, *dkv = call.module.pool_backward(
                Cores(*core_grads[:, :, :, at : at + count].contiguous().unbind()),
                Groups(q_last[:, :, own], k[:, own], v[:, own]),
                call.spec,
            )
            tokens = slice(own.start * g, own.stop * g)
            for total, grad in zip(grads[i][1:], dkv):
                total[:, tokens] += grad.flatten(1, 2)
            if dq_last is not None:
                grads[i][0][:, :, tokens][:, :, g - 1 :: g] += dq_last
        at += count


# The far part
# ---------------------------------------------------------------------------------------------------


def by_core_head(x: Tensor, far: Tensor) -> Tensor:
    """[N, r, T, ...] to [N Hc, r / Hc, T, ...]."""
    heads = far.shape[2]
    return x.reshape(x.shape[0] * heads, x.shape[1] // heads, *x.shape[2:])


def far_keys(far: Tensor) -> list[Tensor]:
    """Core keys and values [N Hc, 1, M, D]."""
    return [x.flatten(0, 1)[:, None] for x in far.unbind()]


def _merge_far(call: Call, q: Tensor, far: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge attention to core tokens [2, N, Hc, M, D] into out [N, r, T, D] and lse [N, r, T], in
    place."""
    far_out, far_lse = partial.forward(
        by_core_head(q, far),
        *far_keys(far),
        scale=call.spec.scale,
        softcap=call.spec.softcap,
    )
    far_out, far_lse = far_out.reshape(out.shape), far_lse.reshape(lse.shape) + call.core_bias
    merge_into(out, lse, far_out, far_lse)


def _far_backward(
    call: Call,
    q: Tensor,
    far: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    far_grads: Tensor,
) -> Tensor | None:
    """Add to the gradients of the core tokens that a chunk sees far away; returns its queries' [N,
    r, T, D]."""
    if not far.shape[3]:
        return None
    # A bias on all core scores only shifts the part's log-sum-exp.
    results = (grad_out, out, lse - call.core_bias)
    grad_out, out, lse = (by_core_head(x, far) for x in results)
    dq, *grads = partial.backward(
        Upstream(grad_out, None, out, lse),
        by_core_head(q, far),
        *far_keys(far),
        scale=call.spec.scale,
        softcap=call.spec.softcap,
    )
    for total, grad in zip(far_grads, grads):
        total += grad.reshape(total.shape)
    return dq.reshape(q.shape)
