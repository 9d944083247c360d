"""The ways of attending that are compared, by the names that records give them.

Full causal attention: "full" (whatever PyTorch picks), "sdpa_flash" and "sdpa_cudnn" (PyTorch's two
fast kernels, asked for by name), "flash_attn_4" (the package flash-attn-4). CCA: "cca" (this
package, by what it chooses), "packed" (by the packing of queries into PyTorch's kernels, wherever
that is not chosen) and "flex" (the same result from PyTorch's FlexAttention, pooling included).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from corecontext.ops.api import cca_attention
from corecontext.ops.rotary import Rotary

THETA = 10_000.0
FULL = ("full", "sdpa_flash", "sdpa_cudnn", "flash_attn_4")
COMPRESSED = ("flex", "packed", "cca")
METHODS = FULL + COMPRESSED
KERNELS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
PASSES = ("forward", "backward", "forward_backward")

Attend = Callable[..., Tensor]
"""q [B, H, L, D], k and v [B, Hkv, L, D], group_size, window_size to [B, H, L, D]."""


def default_methods(device: str, dtype: str) -> tuple[str, ...]:
    """What is compared where nothing else is asked for; the fast kernels take no float32."""
    if torch.device(device).type != "cuda" or dtype == "float32":
        return "full", "cca"
    return tuple(method for method in METHODS if method not in ("full", "packed"))


def attend_with(method: str) -> Attend:
    """The function of that name.

    Raises:
        ImportError: the package that it needs is not installed.
    """
    if method == "cca":
        return attend_cca
    if method == "packed":
        return functools.partial(attend_cca, backend="packed")
    if method == "flex":
        from benchmarks.flex import flex_cca  # loads a compiler

        return functools.partial(flex_cca, rotary_theta=THETA)
    if method == "flash_attn_4":
        return functools.partial(
            _flash_attn_4, importlib.import_module("flash_attn.cute").flash_attn_func
        )
    return functools.partial(_sdpa, KERNELS.get(method))


def attend_cca(
    q: Tensor, k: Tensor, v: Tensor, group_size: int, window_size: int, backend: str = "auto"
) -> Tensor:
    """CCA with the default settings."""
    out = cca_attention(
        q,
        k,
        v,
        group_size=group_size,
        window_size=window_size,
        rotary=rotary_for(q),
        backend=backend,
    )
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out


@functools.cache
def _rotary(head_dim: int, device: torch.device) -> Rotary:
    return Rotary.from_theta(THETA, head_dim, device)


def rotary_for(q: Tensor) -> Rotary:
    """The rotation that the keys are taken to have; it turns core keys to their middle position."""
    return _rotary(q.shape[-1], q.device)


def _sdpa(
    kernel: SDPBackend | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group_size: int = 1,
    window_size: int = 1,
) -> Tensor:
    """PyTorch's full causal attention on grouped heads, by the kernel asked for or the one that it
    picks."""
    if kernel is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


def _flash_attn_4(
    attend: Callable, q: Tensor, k: Tensor, v: Tensor, group_size: int, window_size: int
) -> Tensor:
    """FlashAttention-4, which wants [B, L, H, D]."""
    out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def make_inputs(
    length: int, query_heads: int, kv_heads: int, head_dim: int, batch: int, dtype: str, device: str
) -> list[Tensor]:
    """q [B, H, L, D], k and v [B, Hkv, L, D], standard normal, seed 0."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(
            batch,
            heads,
            length,
            head_dim,
            generator=generator,
            device=device,
            dtype=getattr(torch, dtype),
        )
        for heads in (query_heads, kv_heads, kv_heads)
    ]


def make_call(
    method: str,
    pass_name: str,
    inputs: list[Tensor],
    grad: Tensor | None,
    group_size: int,
    window_size: int,
) -> Callable[[], object]:
    """A function that runs one pass of a method once on these inputs.

    The backward alone runs on the graph of one forward, made here and kept.
    """
    attend = attend_with(method)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs, group_size, window_size)

    if pass_name == "forward":
        return forward
    leaves = [x.detach().requires_grad_() for x in inputs]

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves, group_size, window_size), leaves, grad)

    if pass_name == "forward_backward":
        return both
    out = attend(*leaves, group_size, window_size)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
