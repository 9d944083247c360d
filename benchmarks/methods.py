"""Run attention by each method that is compared, under the names of records.

Full causal attention: "full" (PyTorch's choice), "sdpa_flash" and "sdpa_cudnn" (PyTorch's two fast
kernels by name), "flash_attn_4" (the package flash-attn-4). CCA: "cca" (the backend that this
package chooses), "packed" (queries packed into PyTorch's kernels), "flex" (PyTorch's FlexAttention,
pooling included), "cca_sinks" (the first SINKS tokens raw) and "cca_default" (these, and masses).
Fetch, raw tokens of 64 groups that the default index chooses: "fetch" (each query by itself) and
"fetch_shared" (16 neighbours together); "fetch_mean" and "fetch_mean_shared" choose by mean keys,
"fetch_default" and "fetch_default_shared" have all settings of the preset `default`.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from corecontext.config import PAPER_RULE, PRESETS
from corecontext.ops.api import cca_attention
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Spec

THETA = 10_000.0
FULL = ("full", "sdpa_flash", "sdpa_cudnn", "flash_attn_4")
SINKS = 16
ALIKE_TOKENS = 600
ALIKE_NOISE = 0.006
FETCH: dict[str, Any] = {"fetch_groups": 64, "fetch_index": PAPER_RULE["fetch_index"]}
MEAN: dict[str, Any] = {"fetch_groups": 64, "fetch_index": "mean"}
SETTINGS: dict[str, dict[str, Any]] = {
    "packed": {"backend": "packed"},
    "cca_sinks": {"sink_size": SINKS},
    "cca_default": {"sink_size": SINKS, "core_mass": True},
    "fetch": {**FETCH, "fetch_share": 1},
    "fetch_shared": {**FETCH, "fetch_share": 16},
    "fetch_mean": {**MEAN, "fetch_share": 1},
    "fetch_mean_shared": {**MEAN, "fetch_share": 16},
    "fetch_default": {"preset": "default", "fetch_share": 1},
    "fetch_default_shared": {"preset": "default", "fetch_share": 16},
    "cca": {},
}
"""Settings of `cca_attention` by method."""
DECODING: dict[str, dict[str, Any]] = {
    "cca": {},
    "fetch": {"fetch_groups": 64, "fetch_index": "pairs:2"},
}
"""Settings of a compact cache by method."""
COMPRESSED = ("flex", *SETTINGS)
METHODS = FULL + COMPRESSED
KERNELS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
PASSES = ("forward", "backward", "forward_backward")

Attend = Callable[..., Tensor]
"""q [B, H, L, D], k and v [B, Hkv, L, D], group_size, window_size to [B, H, L, D]."""


class Sizes(NamedTuple):
    """Sizes of inputs besides their length, their dtype and device."""

    query_heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: str
    device: str

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return torch.device(self.device).type == "cuda"


def default_methods(device: str, dtype: str) -> tuple[str, ...]:
    """Return the methods compared by default; the fast kernels take no float32."""
    if torch.device(device).type != "cuda" or dtype == "float32":
        return "full", "cca"
    usual = (*FULL[1:], "flex", "cca")
    return tuple(method for method in METHODS if method in usual)


def attend_with(method: str) -> Attend:
    """Return a method's function.

    Raises:
        ImportError: the method's package is not installed.
    """
    if method in SETTINGS:
        return functools.partial(attend_cca, **SETTINGS[method])
    if method == "flex":
        from benchmarks.flex import flex_cca  # loads a compiler

        return functools.partial(flex_cca, rotary_theta=THETA)
    if method == "flash_attn_4":
        package = importlib.import_module("flash_attn.cute")
        return functools.partial(_flash_attn_4, package.flash_attn_func)
    return functools.partial(_sdpa, KERNELS.get(method))


def attend_cca(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group_size: int,
    window_size: int,
    backend: str = "auto",
    preset: str | None = None,
    **settings: Any,
) -> Tensor:
    """Compute CCA with the default settings, or all those of a preset, but for those given."""
    sizes = {"group_size": group_size, "window_size": window_size}
    if preset is not None:
        sizes = {name: x for name, x in PRESETS[preset].settings.items() if name != "store"}
    options = {**sizes, **settings}
    out = cca_attention(q, k, v, rotary=rotary_for(q), backend=backend, **options)
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out


@functools.cache
def _rotary(head_dim: int, device: torch.device) -> Rotary:
    return Rotary.from_theta(THETA, head_dim, device)


def rotary_for(q: Tensor) -> Rotary:
    """Return the rotation of the keys; CCA rotates core keys to their group's middle with it."""
    return _rotary(q.shape[-1], q.device)


def spec_for(q: Tensor, group_size: int, window_size: int) -> Spec:
    """Return the operator's settings in `attend_cca`."""
    return Spec(group_size, window_size, q.shape[-1] ** -0.5, rotary=rotary_for(q))


def _sdpa(
    kernel: SDPBackend | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group_size: int = 1,
    window_size: int = 1,
) -> Tensor:
    """Compute full causal attention by a kernel of PyTorch; None for its choice."""
    grouped = q.shape[1] != k.shape[1]
    context = contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel)
    with context:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _flash_attn_4(
    attend: Callable, q: Tensor, k: Tensor, v: Tensor, group_size: int, window_size: int
) -> Tensor:
    """Compute FlashAttention-4, which takes [B, L, H, D]."""
    out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def make_inputs(length: int, sizes: Sizes, alike: bool = False) -> list[Tensor]:
    """Return q [B, H, L, D], k and v [B, Hkv, L, D], standard normal, seed 0.

    Args:
        alike: Neighbouring queries choose alike, as `make_alike` says.
    """
    generator = torch.Generator(sizes.device).manual_seed(0)
    options = {"device": sizes.device, "dtype": getattr(torch, sizes.dtype)}
    q, k, v = (
        torch.randn(sizes.batch, heads, length, sizes.head_dim, generator=generator, **options)
        for heads in (sizes.query_heads, sizes.kv_heads, sizes.kv_heads)
    )
    return [make_alike(q) if alike else q, k, v]


def make_alike(noise: Tensor) -> Tensor:
    """Return queries [B, H, L, D] made of standard normal noise of which neighbours choose alike:
    each is a slow random walk and ALIKE_NOISE of noise of its own, so that a query keeps 80 % of 64
    groups from the one before, and 16 neighbours choose about 125 together, as on real models."""
    keep = math.exp(-1 / ALIKE_TOKENS)
    slow = torch.empty_like(noise)
    size = 512
    place = torch.arange(size, device=noise.device)
    fade = keep ** (place[:, None] - place).clamp(min=0).float()
    steps = torch.tril(fade) * (1 - keep**2) ** 0.5
    walk = torch.randn_like(noise[:, :, 0], dtype=torch.float32)
    for low in range(0, noise.shape[2], size):
        tokens = noise[:, :, low : low + size].float()
        count = tokens.shape[2]
        tokens = (
            steps[:count, :count] @ tokens + keep ** (place[:count, None] + 1) * walk[:, :, None]
        )
        walk = tokens[:, :, -1]
        slow[:, :, low : low + size] = tokens
    independent = noise.roll(1, 3)
    return slow * (1 - ALIKE_NOISE) ** 0.5 + independent * ALIKE_NOISE**0.5


def make_call(
    method: str,
    pass_name: str,
    inputs: list[Tensor],
    grad: Tensor | None,
    group_size: int,
    window_size: int,
) -> Callable[[], object]:
    """Return a function that runs one pass of a method once on these inputs.

    The backward alone reuses the graph of one forward, which is kept.
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
