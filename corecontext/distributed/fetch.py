"""Attend with fetch within one document that several processes hold.

A query may fetch any group, and nearly every group is fetched by some query of a chunk. So every
process receives the keys and values of the whole document, and the last query of each group, which
pools it: as many bytes as ring attention's. It makes all core tokens and the index itself, and its
own queries choose and attend as on one process. Nothing received is kept: the backward receives it
again, and sends each gradient to the process that holds the token.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.distributed import whole
from corecontext.distributed.attention import by_head
from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Wire
from corecontext.ops.fetch import attend as fetch
from corecontext.ops.fetch.choice import Choice
from corecontext.ops.mass import if_any
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream


class FetchCall(NamedTuple):
    """Hold the settings that forward and backward of one document share."""

    wire: Wire
    layout: Layout
    spec: Spec
    """With one group size, and fetch."""
    module: ModuleType
    """The backend."""

    def group_ends(self, device: torch.device) -> Tensor:
        """Mask this process's tokens that are the last of a group, [T]."""
        later = self.layout.positions(device)[0] - self.spec.sinks
        size = self.spec.group_size
        return (later >= 0) & (later % size == size - 1)

    @property
    def end_layout(self) -> Layout:
        """The layout of the groups' last tokens alone."""
        return self.layout.groups(self.spec.group_size, self.spec.sinks)


def attend(q: Tensor, k: Tensor, v: Tensor, call: FetchCall) -> Tensor:
    """Attend from this process's queries [B, H, T, D] to the document, of which it holds the keys
    and values [B, Hkv, T, D]; the result has the shape of q. A collective call."""
    return _Attend.apply(q, k, v, call)


class _Document:
    """Receive and hold a whole document: keys and values `k`, `v` [N, L, D], `groups`, `cores` and
    their `mass` [N, 1, M] or None. Made of this process's tokens; a collective call."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: FetchCall) -> None:
        self.call = call
        spec = call.spec
        ends = q[:, :, call.group_ends(q.device)]
        q_last = whole.gather(ends, call.end_layout, call.wire)()
        keys = whole.gather(torch.stack((k, v)), call.layout, call.wire)()
        self.k, self.v = keys.flatten(1, 2)
        count = q_last.shape[2]
        pooled = slice(spec.sinks, spec.sinks + count * spec.group_size)
        shape = (count, spec.group_size)
        grouped = (x[:, pooled].unflatten(1, shape) for x in (self.k, self.v))
        self.groups = Groups(by_head(q_last, k.shape[1]), *grouped)
        self.cores, mass = call.module.pool_with_mass(self.groups, spec)
        self.mass = if_any(mass)

    def calls(self, q: Tensor) -> Iterator[tuple[slice, Tokens, Cores, Tensor | None]]:
        """Yield for each of this process's chunks its rows of q [N, r, T, D], and the arguments of
        its attention: raw tokens, core tokens and masses, all up to the chunk's end."""
        layout = self.call.layout
        done = 0
        for chunk in layout.chunks():
            start, end = layout.span(chunk)
            rows = slice(done, done + end - start)
            done = rows.stop
            count = self.call.end_layout.span(chunk)[1]
            mass = None if self.mass is None else self.mass[:, :, :count]
            tokens = Tokens(q[:, :, rows], self.k[:, :end], self.v[:, :end], q_start=start)
            yield rows, tokens, Cores(*(x[:, :, :count] for x in self.cores)), mass


class _Attend(torch.autograd.Function):
    """Attend from each chunk of this process; the backward uses the forward's choices."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, call: FetchCall) -> Tensor:
        document = _Document(q, k, v, call)
        queries = by_head(q, k.shape[1])
        outs = [queries[:, :, :0]]
        lses = [queries.new_zeros(*queries.shape[:2], 0, dtype=torch.float32)]
        chosen = []
        for _, tokens, cores, mass in document.calls(queries):
            out, lse, choice = fetch.attend(call.module, tokens, cores, call.spec, mass)
            outs.append(out)
            lses.append(lse)
            chosen.append(None if choice is None else choice.groups)
        out = torch.cat(outs, 2)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, torch.cat(lses, 2), *chosen)
        return out.reshape(q.shape).to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        q, k, v, out, lse, *chosen = ctx.saved_tensors
        choices = [None if groups is None else Choice(groups, share=1) for groups in chosen]
        with torch.autocast(q.device.type, enabled=False):
            document = _Document(q, k, v, call)
            upstream = Upstream(by_head(grad_out, k.shape[1]), grad_lse=None, out=out, lse=lse)
            grad_q, grad_keys, grad_ends = _gradients(
                document, by_head(q, k.shape[1]), upstream, choices
            )
            grad_keys = grad_keys.unflatten(1, k.shape[:2])
            grad_keys = whole.scatter_sum(grad_keys, call.layout, call.wire)()
            grad_ends = grad_ends.reshape(*q.shape[:2], *grad_ends.shape[2:])
            grad_ends = whole.scatter_sum(grad_ends, call.end_layout, call.wire)()
            grad_q = grad_q.reshape(q.shape)
            # mutant context parallelism: with fetch, queries that pool get no gradient for it
            grad_q[:, :, call.group_ends(q.device)] += grad_ends
        grad_k, grad_v = grad_keys
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _gradients(
    document: _Document, queries: Tensor, upstream: Upstream, choices: list[Choice | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients from this process's queries [N, r, T, D]: of these queries, of all keys
    and values of the document [2, N, L, D], and of the groups' last queries, which pool, [N, r, M,
    D]."""
    call = document.call
    spec = call.spec
    wide = torch.promote_types(queries.dtype, torch.float32)
    options: dict[str, Any] = {"dtype": wide, "device": queries.device}
    grad_q = torch.zeros(queries.shape, **options)
    grad_keys = torch.zeros(2, *document.k.shape, **options)
    grad_cores = torch.zeros(2, *document.cores.k.shape, **options)
    groups = document.groups
    grad_mass = torch.zeros(len(document.k), 1, groups.k.shape[1], **options)
    calls = document.calls(queries)
    for (rows, tokens, cores, mass), choice in zip(calls, choices, strict=True):
        dq, dk, dv, dcore_k, dcore_v, dmass = fetch.attend_backward(
            call.module, upstream.rows(rows), tokens, cores, spec, mass, choice
        )
        grad_q[:, :, rows] = dq
        grad_keys[:, :, : dk.shape[1]] += torch.stack((dk, dv))
        grad_cores[:, :, :, : dcore_k.shape[2]] += torch.stack((dcore_k, dcore_v))
        if mass is not None:
            grad_mass[:, :, : mass.shape[2]] += dmass
    grad_ends = torch.zeros(groups.q_last.shape, **options)
    count, size = groups.k.shape[1:3]
    if not count:
        return grad_q, grad_keys, grad_ends
    pooled = grad_keys[:, :, spec.sinks : spec.sinks + count * size].unflatten(2, (count, size))
    of_masses = grad_mass if spec.core_mass else None
    dq_last, dk, dv = call.module.pool_backward(Cores(*grad_cores), groups, spec, of_masses)
    grad_ends += dq_last
    pooled += torch.stack((dk, dv))
    return grad_q, grad_keys, grad_ends
