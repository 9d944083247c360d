"""Pooling of groups into core tokens and its backward in Triton: K and V are read once, no
intermediate result is kept.

The equations are those of `ops/reference.py`; all is float32 in registers. Three pairs of kernels:
`pool_short` holds whole groups in registers, `pool_half` does so faster for the usual rotation,
`pool_long` walks larger groups.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from corecontext.ops.capability import is_captured
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Cores, Groups, Spec
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2
from corecontext.ops.triton.pool.half import pool_half_bwd_kernel, pool_half_fwd_kernel
from corecontext.ops.triton.pool.long import pool_long_bwd_kernel, pool_long_fwd_kernel
from corecontext.ops.triton.pool.short import pool_short_bwd_kernel, pool_short_fwd_kernel
from corecontext.ops.triton.tiles import pool_tiles

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check(groups: Groups) -> None:
    """Raise unless these kernels can take the call."""
    for name, x in zip(("q", "k", "v"), groups):
        if x.dtype not in _DTYPES:
            raise NotImplementedError(
                f"the Triton pooling cannot run this call: dtype of {name} {x.dtype} is not in "
                "(float32, float16, bfloat16). Use corecontext.ops.pooling."
            )


_TABLES = WeakIdKeyDictionary()  # by the tensor of frequencies


def rotation_tables(
    rotary: Rotary | None, group_size: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines that rotate each token of a group to its middle, [g, R / 2] in
    float32; None without a rotation.

    They are kept with the frequencies they are made of, until those change, but not where a graph
    is being captured."""
    if rotary is None:
        return None
    source = rotary.inv_freq
    tables_of_source = _TABLES.setdefault(source, {})
    # mutant pooling: tables of frequencies that have changed
    version = None if source.is_inference() else source._version
    key = (group_size, device, version)
    if key in tables_of_source:
        return tables_of_source[key]
    offsets = group_size // 2 - torch.arange(group_size, dtype=torch.float64, device=device)
    angle = offsets[:, None] * source.detach().to(device=device, dtype=torch.float64)[None, :]
    tables = angle.cos().float(), angle.sin().float()
    if version is not None and not is_captured(device):
        tables_of_source[key] = tables
    return tables


def _rotates_halves(spec: Spec, head_dim: int) -> bool:
    """Return whether the kernels for two halves of the columns can take the call."""
    rotary = spec.rotary
    return (
        rotary is not None
        and not rotary.interleaved
        and 2 * rotary.inv_freq.numel() == head_dim
        and head_dim & (head_dim - 1) == 0
        and head_dim >= 16
        and spec.softcap is None
    )


def _launch(
    kernels: tuple,
    groups: Groups,
    spec: Spec,
    tensors: tuple[tuple, tuple],
    strides: tuple,
    **chosen: Any,
) -> None:
    """Launch the kernel of `kernels` for halves of the columns, for whole groups or for larger
    ones.

    Args:
        kernels: All three, the first None where the call is not one of halves.
        tensors: The tuples of tensors before the rotation's tables, and those behind.
        chosen: Constants of this call.
    """
    batch, num_groups, group_size, head_dim = groups.k.shape
    heads = groups.q_last.shape[1]
    halves = kernels[0] is not None
    tiles = pool_tiles(group_size, head_dim, halves)
    # Kernels do not touch the tensors that stand in for missing ones.
    tables = rotation_tables(spec.rotary, group_size, groups.k.device) or (groups.k, groups.k)
    arguments = (*tensors[0], tables, *tensors[1], num_groups, group_size, float(spec.scale))
    if tiles.whole and halves:
        kernel = kernels[0]
    else:
        kernel = kernels[1 if tiles.whole else 2]
        arguments += (float(spec.softcap or 1.0),)
    rotary = spec.rotary
    values = {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "HALF": 0 if rotary is None else rotary.inv_freq.numel(),
        "INTERLEAVED": rotary is not None and rotary.interleaved,
        "HAS_SOFTCAP": spec.softcap is not None,
        "BLOCK_M": tiles.block_m,
        "BLOCK_G": tiles.block_g,
        "BLOCK_D": tiles.block_d,
        "BLOCK_H": power_of_2(heads),
        **chosen,
    }
    launch(
        kernel,
        (batch * ceil_div(num_groups, tiles.block_m),),
        arguments,
        (strides,),
        num_warps=tiles.num_warps,
        # In the kernel's own order, as a launch needs them.
        **{name: values[name] for name in kernel.arg_names if name in values},
    )


def pool(groups: Groups, spec: Spec) -> Cores:
    """Pool groups into core tokens (docs/math.md, eq. 1 to 3).

    Args:
        groups: float32, float16 or bfloat16, any strides; k and v, usually views of [N, T, D], are
            not copied as long as the last dimension is contiguous.

    Returns:
        Core tokens in the dtype of k and of v; summed in float32. K and V are read once.
    """
    _check(groups)
    q_last, k, v = map(contiguous_rows, groups)
    batch, num_groups, _, head_dim = k.shape
    core_k = k.new_empty(batch, 1, num_groups, head_dim)
    core_v = v.new_empty(batch, 1, num_groups, head_dim)
    if core_k.numel():
        half_kernel = pool_half_fwd_kernel if _rotates_halves(spec, head_dim) else None
        _launch(
            (half_kernel, pool_short_fwd_kernel, pool_long_fwd_kernel),
            Groups(q_last, k, v),
            spec,
            (((q_last, k, v), (core_k, core_v)), ()),
            tuple(x.stride()[:3] for x in (q_last, k, v, core_k)),
        )
    return Cores(core_k, core_v)


def pool_backward(
    grad_cores: Cores, groups: Groups, spec: Spec, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q_last, k and v (docs/math.md, eq. 10).

    Args:
        grad_cores: Gradients of the core tokens, in any of the three dtypes.
        groups, spec: As given to `pool`.
        into: Tensors of the shape of k and v to add their gradients to, in place.

    Returns:
        In the dtype and shape of q_last, k and v, summed in float32; that of q_last in float32
        where `into` is given. K and V are read once, their gradients written once.
    """
    _check(groups)
    q_last, k, v = map(contiguous_rows, groups)
    grad_core_k, grad_core_v = map(contiguous_rows, grad_cores)
    grad_q = torch.empty_like(
        q_last,
        dtype=q_last.dtype if into is None else torch.float32,
        memory_format=torch.contiguous_format,
    )
    grad_k, grad_v = (torch.empty_like(k), torch.empty_like(v)) if into is None else into
    gradients = (grad_q, grad_k, grad_v)
    if k.numel():
        halves = _rotates_halves(spec, k.shape[3])
        upstream = (grad_core_k, grad_core_v)
        _launch(
            (pool_half_bwd_kernel if halves else None, pool_short_bwd_kernel, pool_long_bwd_kernel),
            Groups(q_last, k, v),
            spec,
            ((upstream, (q_last, k, v)), (gradients,)),
            tuple(x.stride()[:3] for x in (*upstream, q_last, k, v, *gradients)),
            ADD=into is not None,
        )
    return gradients


# As an operator of torch, for autograd and torch.compile
# -------------------------------------------------------------------------------------------------


def _spec(inv_freq: Tensor | None, interleaved: bool, scale: float, softcap: float | None) -> Spec:
    """The settings of a pooling, from those of `pool_op`."""
    rotary = None if inv_freq is None else Rotary(inv_freq, interleaved)
    return Spec(1, 1, scale, softcap=softcap, rotary=rotary)


@torch.library.custom_op("corecontext::pool", mutates_args=())
def pool_op(
    q_last: Tensor,
    k: Tensor,
    v: Tensor,
    inv_freq: Optional[Tensor],  # noqa: UP045 (torch 2.9 reads schemas in this form)
    interleaved: bool,
    scale: float,
    softcap: Optional[float],  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    """Return `pool` of the three tensors of `Groups`."""
    with torch.cuda.device_of(k):
        settings = (inv_freq, interleaved, scale, softcap)
        return tuple(pool(Groups(q_last, k, v), _spec(*settings)))


@pool_op.register_fake
def _(q_last, k, v, *settings):
    shape = (k.shape[0], 1, k.shape[1], k.shape[3])
    return k.new_empty(shape), v.new_empty(shape)


@torch.library.custom_op(
    "corecontext::pool_backward",
    mutates_args=(),
    schema="(Tensor grad_k, Tensor grad_v, Tensor q_last, Tensor k, Tensor v, Tensor? inv_freq, "
    "bool interleaved, float scale, float? softcap) -> (Tensor, Tensor, Tensor)",
)
def _pool_backward_op(grad_k, grad_v, q_last, k, v, *settings) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(k):
        return pool_backward(Cores(grad_k, grad_v), Groups(q_last, k, v), _spec(*settings))


@_pool_backward_op.register_fake
def _(grad_k, grad_v, q_last, k, v, *settings):
    return q_last.new_empty(q_last.shape), torch.empty_like(k), torch.empty_like(v)


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx, grad_k, grad_v):
    grads = _pool_backward_op(grad_k, grad_v, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, *(None,) * len(ctx.settings)


pool_op.register_autograd(_backward, setup_context=_save_inputs)
