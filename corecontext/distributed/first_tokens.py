"""Keep the first tokens of a document (sinks) raw on several processes.

Every process gets the keys and values of the first n tokens. The tokens after them are a sequence
of their own (docs/math.md, eq. 13), whose queries see all n; the first n see one another causally.
"""

import torch
from torch import Tensor

from corecontext.distributed import whole
from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Wire
from corecontext.ops.spec import Spec


def gather(k: Tensor, v: Tensor, layout: Layout, wire: Wire) -> Tensor:
    """Return keys and values of all n first tokens, [2, B, Hkv, n, D], from those that this process
    holds, [B, Hkv, T, D]; differentiable. A collective call.

    Args:
        layout: Of the n first tokens alone.
    """
    return _Gather.apply(k, v, layout, wire)


class _Gather(torch.autograd.Function):
    """Gather forward; sum the gradients over the processes backward."""

    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, layout: Layout, wire: Wire) -> Tensor:
        ctx.layout = layout
        ctx.wire = wire
        return whole.gather(torch.stack((k, v)), layout, wire)()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_k, grad_v = whole.scatter_sum(grad, ctx.layout, ctx.wire)().to(grad.dtype)
        return grad_k, grad_v, None, None


def attend(q: Tensor, first: Tensor, positions: Tensor, spec: Spec) -> Tensor:
    """Attend causally among the first tokens, in plain torch; differentiable.

    Args:
        q: The queries of them that this process holds, [B, H, T, D], at `positions` [T].
        first: Keys and values of all, [2, B, Hkv, n, D].
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = first.to(wide)
    queries = q.to(wide).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bhrtd,bhsd->bhrts", queries, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    # mutant context parallelism: first tokens see the future among them
    future = torch.arange(k.shape[2], device=q.device) > positions[:, None]
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bhrts,bhsd->bhrtd", weights, v).flatten(1, 2).to(q.dtype)
