"""Run a backend on a whole batch, forward and backward, as one operator.

Under torch.compile it is an operator registered with torch, one node of the graph. Kept for the
backward are q, k, v, out and the log-sum-exp; outside torch.compile also the groups fetched and,
where the batch is one segment, the core tokens and their masses. What is not kept is made again.
"""

import functools
from collections.abc import Sequence
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from corecontext.ops import packed, reference
from corecontext.ops.batch import (
    Attended,
    Gathered,
    SegmentView,
    by_segment,
    find_segments,
    flat_cores,
    wide_dtype,
)
from corecontext.ops.fetch import attend as fetch
from corecontext.ops.fetch.choice import Choice
from corecontext.ops.mass import if_any
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Cores, Inputs, Ragged, Spec, Upstream


def module_of(backend: str) -> ModuleType:
    """Return the backend's functions on one sequence: pool, attend, gradients."""
    if backend == "reference":
        return reference
    if backend == "packed":
        return packed
    from corecontext.ops.triton import backend as triton_backend

    return triton_backend


def attend(inputs: Inputs, ragged: Ragged, spec: Spec, backend: str) -> tuple[Tensor, Tensor]:
    """Return out [B, H, L, D] and log-sum-exp [B, H, L], differentiable in q, k and v.

    Under torch.compile this is the registered operator, else the same without the dispatcher, whose
    checks cost more time than a short sequence.
    """
    tensors = inputs[:3]
    if backend == "reference":
        return _reference(inputs, ragged, spec)
    if torch.compiler.is_compiling():
        if inputs.choice is not None or not isinstance(spec.fetch_index, str):
            raise NotImplementedError(
                "choice must be None, and fetch_index a name, under torch.compile. Disable it for "
                "this call."
            )
        inv_freq = None if spec.rotary is None else spec.rotary.inv_freq
        return cca_attention_op(*tensors, inv_freq, *ragged, *_flat(spec, backend))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Eager.apply(*tensors, inputs.choice, ragged, spec, backend)
    return _forward(inputs, ragged, spec, module_of(backend))[:2]


def _reference(inputs: Inputs, ragged: Ragged, spec: Spec) -> tuple[Tensor, Tensor]:
    """`attend` by the reference, which autograd follows."""
    out, lse = _forward(inputs, ragged, spec, reference)[:2]
    if torch.is_grad_enabled() and out.grad_fn is None:
        # Nothing but padding: gradients are 0, and a backward does not fail.
        # mutant 5: a batch of padding has no backward
        nothing = sum(x[:0].sum() for x in inputs[:3])
        out = out + nothing
        lse = lse + nothing
    return out, lse


def _forward(inputs: Inputs, ragged: Ragged, spec: Spec, module: ModuleType) -> Attended:
    """Attend to a whole batch."""

    def pool(view: SegmentView) -> tuple[Cores, Tensor | None]:
        return module.pool_with_mass(view.groups(), view.spec)

    attend_segment = functools.partial(fetch.attend, module)
    return by_segment(inputs, ragged, spec, pool, attend_segment)


def _gradients(
    upstream: Upstream,
    inputs: Inputs,
    ragged: Ragged,
    spec: Spec,
    module: ModuleType,
    pooled: tuple[Tensor | None, ...] = (),
    choices: Sequence[Choice | None] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        upstream: Of the whole batch, [B, H, L, ...].
        pooled: Keys, values and masses of core tokens; empty to pool again.
        choices: Of each segment; empty to choose again.
    """
    q, k, v = inputs[:3]
    grads = [Gathered(x) for x in (q, k, v)]
    segments = find_segments(q.shape[0], q.shape[2], *ragged)
    # mutant fetch: the backward has another choice
    of_segments = zip(segments, choices or [None] * len(segments), strict=True)
    for segment, choice in of_segments:
        view = SegmentView(segment, inputs, spec)
        groups = view.groups()
        core_k, core_v, mass = pooled or flat_cores(*module.pool_with_mass(groups, view.spec))
        segment_grads = fetch.gradients(
            module,
            upstream.map(view.take),
            view.tokens,
            groups,
            Cores(core_k, core_v),
            view.spec,
            if_any(mass),
            choice,
        )
        for grad, segment_grad in zip(grads, segment_grads):
            grad.put(view, segment_grad)
    return tuple(grad.result() for grad in grads)


# Outside torch.compile


class _Eager(torch.autograd.Function):
    """The operator outside torch.compile."""

    @staticmethod
    def forward(ctx, q, k, v, choice, ragged, spec, backend):
        q, k, v = (_with_even_heads(x) for x in (q, k, v))
        inputs = Inputs(q, k, v, choice)
        out, lse, pooled, choices = _forward(inputs, ragged, spec, module_of(backend))
        groups = [None if x is None else x.groups for x in choices]
        ctx.save_for_backward(q, k, v, out, lse, *ragged, *pooled, *groups)
        ctx.set_materialize_grads(False)
        ctx.num_pooled = len(pooled)
        ctx.spec = spec
        ctx.backend = backend
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse, *rest = ctx.saved_tensors
        ragged = Ragged(*rest[:3])
        rest = rest[3:]
        pooled = tuple(rest[: ctx.num_pooled])
        groups = rest[ctx.num_pooled :]
        share = ctx.spec.fetch_share
        choices = [None if x is None else Choice(x, share) for x in groups]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        # A backward called inside autocast would lose float32 sums.
        with torch.autocast(q.device.type, enabled=False):
            grads = _gradients(
                Upstream(grad_out, grad_lse, out, lse),
                Inputs(q, k, v),
                ragged,
                ctx.spec,
                module_of(ctx.backend),
                pooled,
                choices,
            )
        return *grads, None, None, None, None


def _with_even_heads(x: Tensor) -> Tensor:
    """Return x [B, H, L, D] with one stride from head to head through all rows, as the backends
    need it. Where it has none, as [B, L, H, D] transposed with B > 1, this is the one copy for both
    forward and backward."""
    return x.flatten(0, 1).view(x.shape)


# Under torch.compile

# The operators' schemas: tensors, then the fields of Spec, whose rotation is inv_freq, interleaved.
_TENSORS = (
    "Tensor q, Tensor k, Tensor v, {results}Tensor? inv_freq, "
    "Tensor? attention_mask, Tensor? cu_seqlens, Tensor? position_ids"
)
_SETTINGS = (
    "SymInt group_size, SymInt window_size, float scale, SymInt? num_groups, SymInt sink_size, "
    "float? softcap, bool core_mass, SymInt fetch_groups, "
    "str fetch_index, SymInt fetch_share, bool interleaved, str backend"
)
_FIELDS = tuple(field.name for field in fields(Spec) if field.name != "rotary")


def _flat(spec: Spec, backend: str) -> tuple[Any, ...]:
    """Return spec and backend in the types of `_SETTINGS`; the rotation's tensor travels apart."""
    interleaved = spec.rotary is not None and spec.rotary.interleaved
    return *(getattr(spec, name) for name in _FIELDS), interleaved, backend


def _unflattened(inv_freq: Tensor | None, settings: tuple[Any, ...]) -> tuple[Spec, str]:
    """Invert `_flat`."""
    *fields, interleaved, backend = settings
    rotary = None if inv_freq is None else Rotary(inv_freq, interleaved)
    return Spec(*fields, rotary), backend


@torch.library.custom_op(
    "corecontext::cca_attention",
    mutates_args=(),
    schema=f"({_TENSORS.format(results='')}, {_SETTINGS}) -> (Tensor, Tensor)",
)
def cca_attention_op(q, k, v, inv_freq, *rest) -> tuple[Tensor, Tensor]:
    """Return out [B, H, L, D] and log-sum-exp [B, H, L]; `rest` is `Ragged`, then the settings."""
    spec, backend = _unflattened(inv_freq, rest[3:])
    inputs = Inputs(q, k, v)
    return _forward(inputs, Ragged(*rest[:3]), spec, module_of(backend))[:2]


@cca_attention_op.register_fake
def _(q, *args):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # mutant compile: wrong dtype of the log-sum-exp in the fake
    lse = torch.empty(q.shape[:-1], dtype=wide_dtype(q), device=q.device)
    return out, lse


@torch.library.custom_op(
    "corecontext::cca_attention_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad_out, Tensor? grad_lse, {_TENSORS.format(results='Tensor out, Tensor lse, ')}"
        f", {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
    ),
)
def cca_attention_backward_op(grad_out, grad_lse, q, k, v, *rest) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    out, lse, inv_freq, *rest = rest
    spec, backend = _unflattened(inv_freq, rest[3:])
    return _gradients(
        Upstream(grad_out, grad_lse, out, lse),
        Inputs(q, k, v),
        Ragged(*rest[:3]),
        spec,
        module_of(backend),
    )


@cca_attention_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, *args):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    # Seven tensors or None: q, k, v, inv_freq and Ragged.
    *tensors, ctx.settings = *inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, out, lse, *rest = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    with torch.autocast(q.device.type, enabled=False):
        grads = cca_attention_backward_op(
            grad_out, grad_lse, q, k, v, out, lse, *rest, *ctx.settings
        )
    return *grads, *(None,) * (len(rest) + len(ctx.settings))


cca_attention_op.register_autograd(_backward, setup_context=_setup_context)
