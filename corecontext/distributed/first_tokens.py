"""Keep the first tokens of a document raw on several processes.

Every process gets the keys and values of the first n tokens. The tokens after them are a sequence
of their own (docs/math.md, eq. 13), whose queries see all n; the first n see one another causally.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Wire
from corecontext.ops.spec import Spec


def gather(k: Tensor, v: Tensor, layout: Layout, wire: Wire) -> Tensor:
    """Return keys and values of all first tokens, [2, B, Hkv, n, D], from this process's [B, Hkv,
    t, D]; differentiable. A collective call.

    Args:
        layout: Of the first tokens alone.
    """
    return _Gather.apply(k, v, layout, wire)


class _Gather(torch.autograd.Function):
    """The gathering; backward, gradients are summed over the processes."""

    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, layout: Layout, wire: Wire) -> Tensor:
        ctx.layout = layout
        ctx.wire = wire
        ctx.count = k.shape[2]
        message = torch.stack((k, v))
        room = _message_size(layout, wire) - ctx.count
        messages = wire.gather(F.pad(message, (0, 0, 0, room))).wait()
        pieces: dict[int, Tensor] = {}
        for rank, received in enumerate(messages):
            pieces |= _by_chunk(layout, received, rank)
        return torch.cat([pieces[chunk] for chunk in sorted(pieces)], 3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout = ctx.layout
        wide = torch.promote_types(grad.dtype, torch.float32)
        shape = (*grad.shape[:3], _message_size(layout, ctx.wire), grad.shape[4])
        messages = torch.zeros(ctx.wire.size, *shape, dtype=wide, device=grad.device)
        for rank, message in enumerate(messages):
            for chunk, target in _by_chunk(layout, message, rank).items():
                # planted: context parallelism: gradients of first tokens from the last process only
                target += grad[:, :, :, slice(*layout.span(chunk))]
        total = ctx.wire.scatter_sum(messages).wait()
        grad_k, grad_v = total[:, :, :, : ctx.count].to(grad.dtype)
        return grad_k, grad_v, None, None


def _message_size(layout: Layout, wire: Wire) -> int:
    """Return the tokens of a message: those of the process that holds most."""
    return max(sum(_counts(layout, rank)) for rank in range(wire.size))


def _counts(layout: Layout, rank: int) -> list[int]:
    return [layout.lengths[chunk] for chunk in layout.chunks(rank)]


def _by_chunk(layout: Layout, message: Tensor, rank: int) -> dict[int, Tensor]:
    """Split a process's message [2, B, Hkv, t, D] by chunk; views."""
    counts = _counts(layout, rank)
    return dict(zip(layout.chunks(rank), message[:, :, :, : sum(counts)].split(counts, 3)))


def attend(q: Tensor, first: Tensor, positions: Tensor, spec: Spec) -> Tensor:
    """Attend causally among the first tokens, in plain torch; differentiable.

    Args:
        q: This process's queries among them, [B, H, t, D], at `positions` [t].
        first: Keys and values of all, [2, B, Hkv, n, D].
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = first.to(wide)
    queries = q.to(wide).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bhrtd,bhsd->bhrts", queries, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    # planted: context parallelism: first tokens see the future among them
    future = torch.arange(k.shape[2], device=q.device) > positions[:, None]
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bhrts,bhsd->bhrtd", weights, v).flatten(1, 2).to(q.dtype)
