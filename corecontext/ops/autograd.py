"""A backend as one registered torch operator: pooling and attention of a whole batch, and their backward.

Registered, so that torch.compile and activation checkpointing treat it as one node; only q, k, v, out and the
log-sum-exp are kept for the backward, which pools again.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Optional

import torch
from torch import Tensor

from corecontext.ops import packed
from corecontext.ops.rotary import Rotary
from corecontext.ops.segments import SegmentView, find_segments


def module_of(backend: str) -> ModuleType:
    """The backend's functions on one sequence: pool, attend, gradients."""
    return packed if backend == "packed" else importlib.import_module("corecontext.ops.triton.backend")


@torch.library.custom_op("corecontext::cca_attention", mutates_args=())
def cca_attention_op(q: Tensor, k: Tensor, v: Tensor, core_bias: Optional[Tensor], inv_freq: Optional[Tensor],
                     attention_mask: Optional[Tensor], cu_seqlens: Optional[Tensor], position_ids: Optional[Tensor],
                     group_size: int, window_size: int, num_groups: int, scale: float, softcap: float, pooling: str,
                     core_heads: str, interleaved: bool, backend: str) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D] and log-sum-exp [B, H, L]; 0 stands for no num_groups and for no softcap."""
    module = module_of(backend)
    options = {"scale": scale, "softcap": softcap or None, "pooling": pooling, "core_heads": core_heads,
               "rotary": None if inv_freq is None else Rotary(inv_freq, interleaved)}
    out, lse = _Batch(q), _Batch(q[..., 0], _lse_dtype(q), fill=-torch.inf)
    for segment in find_segments(q.shape[0], q.shape[2], attention_mask, cu_seqlens, position_ids):
        one = SegmentView(segment, q, k, v, core_bias, group_size, window_size, num_groups)
        core_k, core_v = module.pool(*one.groups(), **options)
        part_out, part_lse = module.attend(one.q, one.k, one.v, core_k, core_v, **one.sizes, scale=scale,
                                           softcap=softcap or None, core_bias=one.core_bias)
        out.put(one, part_out)
        lse.put(one, part_lse)
    return out.result(), lse.result()


class _Batch:
    """A result [B, H or Hkv, L, ...] put together from segments, or the one segment that is the whole batch."""

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None, fill: float = 0.0) -> None:
        self.like, self.dtype, self.fill, self.total = like, dtype or like.dtype, fill, None

    def put(self, one: SegmentView, part: Tensor) -> None:
        """Take over one segment's part [N, ..., T, ...]."""
        if part.numel() == self.like.numel():
            self.total = part.reshape(self.like.shape).to(self.dtype)
            return
        one.put(self.result(), part)

    def result(self) -> Tensor:
        """The whole, filled where no segment lies."""
        if self.total is None:
            self.total = torch.full(self.like.shape, self.fill, dtype=self.dtype, device=self.like.device)
        return self.total


@cca_attention_op.register_fake
def _(q, k, v, *args):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(q.shape[:-1], dtype=_lse_dtype(q),
                                                                             device=q.device)


@torch.library.custom_op("corecontext::cca_attention_backward", mutates_args=())
def cca_attention_backward_op(
        grad_out: Tensor, grad_lse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        core_bias: Optional[Tensor], inv_freq: Optional[Tensor], attention_mask: Optional[Tensor],
        cu_seqlens: Optional[Tensor], position_ids: Optional[Tensor], group_size: int, window_size: int,
        num_groups: int, scale: float, softcap: float, pooling: str, core_heads: str,
        interleaved: bool, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and core_bias ([H], zeros where there is none)."""
    grads = [_Batch(x) for x in (q, k, v)]
    grad_bias = torch.zeros(q.shape[1], dtype=_lse_dtype(q), device=q.device)
    module = module_of(backend)
    options = {"scale": scale, "softcap": softcap or None, "pooling": pooling, "core_heads": core_heads,
               "rotary": None if inv_freq is None else Rotary(inv_freq, interleaved)}
    for segment in find_segments(q.shape[0], q.shape[2], attention_mask, cu_seqlens, position_ids):
        one = SegmentView(segment, q, k, v, core_bias, group_size, window_size, num_groups)
        dq, dk, dv, dbias = module.gradients(
            one.take(grad_out), None if grad_lse is None else one.take(grad_lse), one.q, one.k, one.v, one.take(out),
            one.take(lse), one.groups(), **one.sizes, core_bias=one.core_bias, **options)
        for grad, part in zip(grads, (dq, dk, dv)):
            grad.put(one, part)
        if dbias is not None:
            grad_bias += dbias.reshape(-1, q.shape[1]).sum(0)
    return *(grad.result() for grad in grads), grad_bias


@cca_attention_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, *args):
    return (*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)),
            torch.empty(q.shape[1], dtype=_lse_dtype(q), device=q.device))


def _setup_context(ctx, inputs, output):
    q, k, v, core_bias, inv_freq, attention_mask, cu_seqlens, position_ids, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, core_bias, inv_freq, attention_mask, cu_seqlens, position_ids)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, out, lse, core_bias, *rest = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    with torch.autocast(q.device.type, enabled=False):  # a backward called inside autocast would lose float32 sums
        grad_q, grad_k, grad_v, grad_bias = cca_attention_backward_op(grad_out, grad_lse, q, k, v, out, lse, core_bias,
                                                                      *rest, *ctx.settings)
    none = (None,) * (len(rest) + len(ctx.settings))
    return grad_q, grad_k, grad_v, None if core_bias is None else grad_bias.to(core_bias.dtype), *none


cca_attention_op.register_autograd(_backward, setup_context=_setup_context)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
