"""Pool groups into core tokens in Triton, and backward; keys and values are read once.

The equations are those of `ops/reference.py`. A group is held in registers, in float32; larger ones
are pooled by `ops/pooling.py`.
"""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from corecontext.ops import pooling as plain
from corecontext.ops.capability import is_captured
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Cores, Groups, Spec
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, ints, launch
from corecontext.ops.triton.pool.kernels import pool_bwd_kernel, pool_fwd_kernel
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

    They are cached until the frequencies change; not those of an inference tensor, whose changes
    are not counted, nor those made during a capture, which belong to its graph."""
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


class Shape(NamedTuple):
    """Hold what both kernels are compiled for."""

    heads: int
    """Query heads of a KV head (r)."""
    dim: int
    """Columns of a key."""
    half: int
    """Pairs of columns that rotate; 0 without a rotation."""
    interleaved: bool
    """Whether the columns of a pair are neighbours."""
    has_softcap: bool
    has_mass: bool
    """Whether masses are written, or gradients come through them."""
    block_m: int
    """Groups of a tile."""
    block_g: int
    """Tokens of a group in a tile."""
    block_p: int
    """Pairs of columns of a tile."""


def _holds_groups(k: Tensor) -> bool:
    """Return whether a program can hold a whole group in registers."""
    return pool_tiles(k.shape[2], k.shape[3]).whole


def _launch(
    kernel: Any,
    groups: Groups,
    spec: Spec,
    tensors: tuple[tuple, ...],
    strided: tuple[Tensor, ...],
    has_mass: bool,
    **constants: bool,
) -> None:
    """Launch a kernel on groups.

    Args:
        tensors: The kernel's tuples of tensors, in its order, but its third, the rotation's tables.
        strided: Tensors whose strides the kernel takes.
        constants: ADD of the backward: whether gradients are added to those that are there.
    """
    batch, num_groups, group_size, dim = groups.k.shape
    tiles = pool_tiles(group_size, dim)
    rotary = spec.rotary
    # Without a rotation the kernels read no tables: any tensor stands for them.
    tables = rotation_tables(rotary, group_size, groups.k.device) or (groups.k, groups.k)
    shape = Shape(
        groups.q_last.shape[1],
        dim,
        0 if rotary is None else rotary.inv_freq.numel(),
        rotary is not None and rotary.interleaved,
        spec.softcap is not None,
        has_mass,
        *(tiles.block_m, tiles.block_g, tiles.block_p),
    )
    launch(
        kernel,
        (batch * ceil_div(num_groups, tiles.block_m),),
        (
            *(*tensors[:2], tables, *tensors[2:], ints(num_groups, group_size)),
            (float(spec.scale), float(spec.softcap or 1.0)),
        ),
        (tuple(x.stride()[:3] for x in strided),),
        num_warps=tiles.num_warps,
        **constants,
        SHAPE=shape,
    )


def pool(groups: Groups, spec: Spec) -> tuple[Cores, Tensor | None]:
    """Pool groups into core tokens (docs/math.md, eq. 1 to 3).

    Args:
        groups: q_last, the query of each group's last token [N, r, M, D], and k and v [N, M, g, D];
            float32, float16 or bfloat16, any strides. k and v, usually views of [N, T, D], are not
            copied as long as the last dimension is contiguous.

    Returns:
        Core tokens in the dtypes of k and of v, and with `spec.core_mass` float32 masses [N, 1, M].
    """
    _check(groups)
    if not _holds_groups(groups.k):
        return plain.forward_with_mass(groups, spec)
    q_last, k, v = map(contiguous_rows, groups)
    shape = (k.shape[0], 1, k.shape[1])
    core_k = k.new_empty(*shape, k.shape[3])
    core_v = v.new_empty(*shape, v.shape[3])
    mass = k.new_empty(shape, dtype=torch.float32) if spec.core_mass else None
    if core_k.numel():
        _launch(
            pool_fwd_kernel,
            Groups(q_last, k, v),
            spec,
            ((q_last, k, v), (core_k, core_v, core_k if mass is None else mass)),
            (q_last, k, v, core_k),
            has_mass=spec.core_mass,
        )
    return Cores(core_k, core_v), mass


def pool_backward(
    grad_cores: Cores,
    groups: Groups,
    spec: Spec,
    grad_mass: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q_last, k and v (docs/math.md, eq. 10).

    Args:
        grad_cores: Gradients of the core tokens, in any of the three dtypes.
        groups, spec: As given to `pool`.
        grad_mass: Gradients of the masses, [N, 1, M], or None.
        into: Tensors of the shape of k and v to add their gradients to, in place.

    Returns:
        In the dtype and shape of q_last, k and v; that of q_last in float32 where `into` is given.
    """
    _check(groups)
    if not _holds_groups(groups.k):
        grad_q, *grads = plain.backward(grad_cores, groups, spec, grad_mass)
        if into is None:
            return grad_q, *grads
        for total, grad in zip(into, grads):
            total += grad
        return grad_q.float(), *into
    q_last, k, v = map(contiguous_rows, groups)
    upstream = tuple(map(contiguous_rows, grad_cores))
    grad_q = torch.empty_like(
        q_last,
        dtype=q_last.dtype if into is None else torch.float32,
        memory_format=torch.contiguous_format,
    )
    grad_k, grad_v = (torch.empty_like(k), torch.empty_like(v)) if into is None else into
    gradients = (grad_q, grad_k, grad_v)
    if k.numel():
        of_masses = k if grad_mass is None else grad_mass.float().contiguous()
        _launch(
            pool_bwd_kernel,
            Groups(q_last, k, v),
            spec,
            ((*upstream, of_masses), (q_last, k, v), gradients),
            (*upstream, q_last, k, v, *gradients),
            has_mass=grad_mass is not None,
            ADD=into is not None,
        )
    return gradients


# As an operator of torch, for autograd and torch.compile


def _spec(inv_freq: Tensor | None, interleaved: bool, scale: float, softcap: float | None) -> Spec:
    """Return the settings of a pooling, which reads no group_size (1) and no window_size (1)."""
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
        return tuple(pool(Groups(q_last, k, v), _spec(*settings))[0])


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
