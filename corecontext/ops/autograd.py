"""A backend as one registered torch operator: pooling and attention of a whole batch, and their
backward.

Registered, so that torch.compile and activation checkpointing treat it as one node. Kept for the
backward are q, k, v, out, the log-sum-exp and, where the batch is one segment, the core tokens;
else the backward pools again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from types import ModuleType
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from corecontext.ops import packed, sinks
from corecontext.ops.batch import SegmentView, find_segments
from corecontext.ops.rotary import Rotary


def module_of(backend: str) -> ModuleType:
    """The backend's functions on one sequence: pool, attend, gradients."""
    return packed if backend == "packed" else _triton_backend()


@functools.cache
def _triton_backend() -> ModuleType:
    return importlib.import_module("corecontext.ops.triton.backend")


class Settings(NamedTuple):
    """What a call computes, besides its tensors; 0 stands for no num_groups and for no softcap."""

    group_size: int
    window_size: int
    num_groups: int
    sink_size: int
    scale: float
    softcap: float
    pooling: str
    core_heads: str
    interleaved: bool
    backend: str

    def options(self, inv_freq: Tensor | None) -> dict[str, Any]:
        """The arguments that pooling and its backward share."""
        rotary = None if inv_freq is None else Rotary(inv_freq, self.interleaved)
        return {
            "scale": self.scale,
            "softcap": self.softcap or None,
            "pooling": self.pooling,
            "core_heads": self.core_heads,
            "rotary": rotary,
        }


def cca_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_bias: Tensor | None,
    inv_freq: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D] and log-sum-exp [B, H, L], differentiable.

    The registered operator where torch.compile looks on, else the same without the dispatcher,
    whose checks cost more time than a short sequence."""
    tensors = (q, k, v, core_bias, inv_freq, attention_mask, cu_seqlens, position_ids)
    if torch.compiler.is_compiling():
        return cca_attention_op(*tensors, *settings)
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, core_bias)
    ):
        return _Eager.apply(*tensors, settings)
    return _forward(*tensors, settings)[:2]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_bias: Tensor | None,
    inv_freq: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, log-sum-exp and, where the batch is one segment, its core tokens."""
    module, options = module_of(settings.backend), settings.options(inv_freq)
    out, lse = _Batch(q), _Batch(q[..., 0], _lse_dtype(q), fill=-torch.inf)
    segments = find_segments(q.shape[0], q.shape[2], attention_mask, cu_seqlens, position_ids)
    cores: tuple[Tensor, ...] = ()
    for segment in segments:
        one = SegmentView(segment, q, k, v, core_bias, *settings[:4])
        cores = module.pool(*one.groups(), **options)
        part_out, part_lse = sinks.attend(
            module,
            one.q,
            one.k,
            one.v,
            *cores,
            **one.sizes,
            scale=settings.scale,
            softcap=settings.softcap or None,
            core_bias=one.core_bias,
        )
        out.put(one, part_out)
        lse.put(one, part_lse)
    return out.result(), lse.result(), cores if len(segments) == 1 else ()


def _gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    core_bias: Tensor | None,
    inv_freq: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    settings: Settings,
    cores: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, or None, core_bias [H]; pools again without `cores`."""
    grads = [_Batch(x) for x in (q, k, v)]
    grad_bias = (
        None if core_bias is None else torch.zeros(q.shape[1], dtype=_lse_dtype(q), device=q.device)
    )
    module, options = module_of(settings.backend), settings.options(inv_freq)
    for segment in find_segments(q.shape[0], q.shape[2], attention_mask, cu_seqlens, position_ids):
        one = SegmentView(segment, q, k, v, core_bias, *settings[:4])
        groups = one.groups()
        *parts, dbias = sinks.gradients(
            module,
            one.take(grad_out),
            None if grad_lse is None else one.take(grad_lse),
            one.q,
            one.k,
            one.v,
            one.take(out),
            one.take(lse),
            groups,
            cores or module.pool(*groups, **options),
            **one.sizes,
            core_bias=one.core_bias,
            **options,
        )
        for grad, part in zip(grads, parts):
            grad.put(one, part)
        if dbias is not None:
            grad_bias += dbias.reshape(-1, q.shape[1]).sum(0)
    return *(grad.result() for grad in grads), grad_bias


def _heads_in_rows(x: Tensor) -> Tensor:
    """x [B, H, L, D] with one stride from head to head through all rows, as the backends need it;
    of several rows that transformers' layout has otherwise, a copy, which the backward then need
    not make again."""
    return x.flatten(0, 1).view(x.shape)


class _Eager(torch.autograd.Function):
    """The operator outside torch.compile."""

    @staticmethod
    def forward(ctx, *inputs):
        *tensors, settings = inputs
        tensors[:3] = (_heads_in_rows(x) for x in tensors[:3])
        out, lse, cores = _forward(*tensors, settings)
        ctx.save_for_backward(*tensors[:3], out, lse, *tensors[3:], *cores)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse, *rest = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        off = torch.is_autocast_enabled(
            q.device.type
        )  # inside autocast the float32 sums would be lost
        with torch.autocast(q.device.type, enabled=False) if off else contextlib.nullcontext():
            *grads, grad_bias = _gradients(
                grad_out, grad_lse, q, k, v, out, lse, *rest[:5], ctx.settings, tuple(rest[5:])
            )
        return (
            *grads,
            None if grad_bias is None else grad_bias.to(rest[0].dtype),
            None,
            None,
            None,
            None,
            None,
        )


@torch.library.custom_op("corecontext::cca_attention", mutates_args=())
def cca_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_bias: Optional[Tensor],
    inv_freq: Optional[Tensor],
    attention_mask: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    position_ids: Optional[Tensor],
    group_size: int,
    window_size: int,
    num_groups: int,
    sink_size: int,
    scale: float,
    softcap: float,
    pooling: str,
    core_heads: str,
    interleaved: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D] and log-sum-exp [B, H, L]."""
    return _forward(
        q,
        k,
        v,
        core_bias,
        inv_freq,
        attention_mask,
        cu_seqlens,
        position_ids,
        Settings(
            group_size,
            window_size,
            num_groups,
            sink_size,
            scale,
            softcap,
            pooling,
            core_heads,
            interleaved,
            backend,
        ),
    )[:2]


class _Batch:
    """A result [B, H or Hkv, L, ...] put together from segments, or the one segment that is the
    whole batch."""

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
            # planted: memory: padding left uninitialised
            self.total = torch.full(
                self.like.shape, self.fill, dtype=self.dtype, device=self.like.device
            )
        return self.total


@cca_attention_op.register_fake
def _(q, k, v, *args):
    # planted: compile: wrong dtype of the log-sum-exp in the fake
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(
        q.shape[:-1], dtype=_lse_dtype(q), device=q.device
    )


@torch.library.custom_op("corecontext::cca_attention_backward", mutates_args=())
def cca_attention_backward_op(
    grad_out: Tensor,
    grad_lse: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    core_bias: Optional[Tensor],
    inv_freq: Optional[Tensor],
    attention_mask: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    position_ids: Optional[Tensor],
    group_size: int,
    window_size: int,
    num_groups: int,
    sink_size: int,
    scale: float,
    softcap: float,
    pooling: str,
    core_heads: str,
    interleaved: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and core_bias ([H], zeros where there is none)."""
    settings = Settings(
        group_size,
        window_size,
        num_groups,
        sink_size,
        scale,
        softcap,
        pooling,
        core_heads,
        interleaved,
        backend,
    )
    *grads, grad_bias = _gradients(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        out,
        lse,
        core_bias,
        inv_freq,
        attention_mask,
        cu_seqlens,
        position_ids,
        settings,
    )
    if grad_bias is None:
        grad_bias = torch.zeros(q.shape[1], dtype=_lse_dtype(q), device=q.device)
    return *grads, grad_bias


@cca_attention_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, *args):
    return (
        *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)),
        torch.empty(q.shape[1], dtype=_lse_dtype(q), device=q.device),
    )


def _setup_context(ctx, inputs, output):
    q, k, v, core_bias, inv_freq, attention_mask, cu_seqlens, position_ids, *ctx.settings = inputs
    ctx.save_for_backward(
        q, k, v, *output, core_bias, inv_freq, attention_mask, cu_seqlens, position_ids
    )
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, out, lse, core_bias, *rest = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    with torch.autocast(
        q.device.type, enabled=False
    ):  # a backward called inside autocast would lose float32 sums
        grad_q, grad_k, grad_v, grad_bias = cca_attention_backward_op(
            grad_out, grad_lse, q, k, v, out, lse, core_bias, *rest, *ctx.settings
        )
    none = (None,) * (len(rest) + len(ctx.settings))
    return (
        grad_q,
        grad_k,
        grad_v,
        None if core_bias is None else grad_bias.to(core_bias.dtype),
        *none,
    )


cca_attention_op.register_autograd(_backward, setup_context=_setup_context)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
