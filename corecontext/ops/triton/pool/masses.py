"""The mass of core tokens, the entropy of their pooling weights, and its backward in Triton: K is
read once more."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops import mass as plain
from corecontext.ops.spec import Groups, Spec
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch
from corecontext.ops.triton.pool.group_tile import (
    head_at,
    load_row,
    load_tokens,
    owned_groups,
    softmax,
    store_row,
    store_tokens,
    token_scores,
)
from corecontext.ops.triton.primitives import TINY
from corecontext.ops.triton.tiles import pool_tiles


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def mass_fwd_kernel(
    tokens,
    mass_ptr,
    num_groups,
    group_size,
    scale,
    softcap,
    strides,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the entropy of the weights of each core token, [N, 1, M] in float32.

    Grid: N * ceil(M / BLOCK_M). A program owns whole groups, as in `pool_short_fwd_kernel`.

    Args:
        tokens: Pointers to the queries of last tokens [N, r, M, D] and to k [N, M, g, D].
        strides: Of both.
    """
    q_ptr, k_ptr = tokens
    q_strides, k_strides = strides
    n, groups = owned_groups(num_groups, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    tile = (groups, rows, tl.arange(0, BLOCK_D), num_groups, group_size)
    k = load_tokens(k_ptr + n * k_strides[0], k_strides, tile, HEAD_DIM)
    q_ptr += n * q_strides[0]
    mass_ptr += n * num_groups + groups
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    for h in range(HEADS):
        q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], tile, HEAD_DIM)
        z, _ = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
        weights += softmax(z) / HEADS
    mass = -tl.sum(weights * tl.log(tl.maximum(weights, TINY)), 1)
    tl.store(mass_ptr, mass, mask=groups < num_groups)


@triton.jit(do_not_specialize=["num_groups", "group_size"])
def mass_bwd_kernel(
    tokens,
    gradients,
    grad_ptr,
    num_groups,
    group_size,
    scale,
    softcap,
    strides,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the gradients of q and of the groups' tokens, from those of the masses.

    Grid: as of `mass_fwd_kernel`. The weights are computed again; all sums are float32.

    Args:
        tokens: As of `mass_fwd_kernel`.
        gradients: Pointers to those of `tokens`, in float32.
        grad_ptr: The gradients of the masses.
        strides: Of `tokens` and of `gradients`.
    """
    q_ptr, k_ptr = tokens
    grad_q_ptr, grad_k_ptr = gradients
    q_strides, k_strides, grad_q_strides, grad_k_strides = strides
    n, groups = owned_groups(num_groups, BLOCK_M)
    rows = tl.arange(0, BLOCK_G).to(tl.int64)
    tile = (groups, rows, tl.arange(0, BLOCK_D), num_groups, group_size)
    k = load_tokens(k_ptr + n * k_strides[0], k_strides, tile, HEAD_DIM)
    q_ptr += n * q_strides[0]
    grad_q_ptr += n * grad_q_strides[0]
    grad_ptr += n * num_groups + groups
    # The mean of the heads' weights.
    weights = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    for h in range(HEADS):
        q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], tile, HEAD_DIM)
        z, _ = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
        weights += softmax(z) / HEADS
    # The derivative is -1 - log w; the constant vanishes in the softmax's backward.
    grad = tl.load(grad_ptr, mask=groups < num_groups, other=0.0) / HEADS
    grad_probs = -grad[:, None] * tl.log(tl.maximum(weights, TINY))
    grad_k = tl.zeros([BLOCK_M, BLOCK_G, BLOCK_D], tl.float32)
    for h in range(HEADS):
        q = load_row(head_at(q_ptr, h, q_strides[1]), q_strides[2], tile, HEAD_DIM)
        z, slope = token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP)
        probs = softmax(z)
        grad_z = probs * (grad_probs - tl.sum(probs * grad_probs, 1)[:, None]) * scale * slope
        grad_q = tl.sum(grad_z[:, :, None] * k, 1)
        grad_q_row = head_at(grad_q_ptr, h, grad_q_strides[1])
        store_row(grad_q_row, grad_q, grad_q_strides[2], tile, HEAD_DIM)
        grad_k += grad_z[:, :, None] * q[:, None, :]
    grad_k_ptr += n * grad_k_strides[0]
    store_tokens(grad_k_ptr, grad_k, grad_k_strides, tile, HEAD_DIM, False)


def forward(groups: Groups, spec: Spec) -> Tensor:
    """Return the mass of each core token, as `ops.mass.forward`, in float32."""
    q_last, k, _ = groups
    tiles = pool_tiles(k.shape[2], k.shape[3], halves=False)
    if not tiles.whole:
        return plain.forward(groups, spec)
    mass = torch.empty(k.shape[0], 1, k.shape[1], dtype=torch.float32, device=k.device)
    q_last, k = map(contiguous_rows, (q_last, k))
    _launch(mass_fwd_kernel, ((q_last, k), mass), (q_last, k), spec)
    return mass


def backward(grad: Tensor, groups: Groups, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return the gradients of q_last and k, as `ops.mass.backward`, in float32."""
    q_last, k, _ = groups
    if not pool_tiles(k.shape[2], k.shape[3], halves=False).whole:
        return plain.backward(grad, groups, spec)
    grad_q, grad_k = (
        torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q_last, k)
    )
    q_last, k = map(contiguous_rows, (q_last, k))
    tensors = ((q_last, k), (grad_q, grad_k), grad.float().contiguous())
    _launch(mass_bwd_kernel, tensors, (q_last, k, grad_q, grad_k), spec)
    return grad_q, grad_k


def _launch(kernel, tensors: tuple, strided: tuple[Tensor, ...], spec: Spec) -> None:
    """Launch a kernel on whole groups; `strided` begins with q_last and k."""
    q_last, k = strided[:2]
    batch, num_groups, group_size, head_dim = k.shape
    if not k.numel():
        return
    tiles = pool_tiles(group_size, head_dim, halves=False)
    launch(
        kernel,
        (batch * ceil_div(num_groups, tiles.block_m),),
        (*tensors, num_groups, group_size, float(spec.scale), float(spec.softcap or 1.0)),
        (tuple(x.stride()[:3] for x in strided),),
        HEADS=q_last.shape[1],
        HEAD_DIM=head_dim,
        HAS_SOFTCAP=spec.softcap is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_G=tiles.block_g,
        BLOCK_D=tiles.block_d,
        num_warps=tiles.num_warps,
    )
