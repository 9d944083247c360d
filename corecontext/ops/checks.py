"""Check the arguments of the operators, and complete scale and bias."""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.ops.rotary import Rotary

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are tensors of four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must be [B, heads, L, D], got {list(x.shape)}.")
        if x.is_meta:
            raise ValueError(f"{name} must hold numbers, got a meta tensor. Load the weights.")


def check_tensor(name: str, x: object) -> None:
    """Raise unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are self-attention inputs of one batch."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}.")
    if k.shape != v.shape:
        raise ValueError(f"v must have the shape of k, {list(k.shape)}, got {list(v.shape)}.")
    if k.dtype != q.dtype or v.dtype != q.dtype or k.device != q.device or v.device != q.device:
        raise TypeError(
            f"q, k and v must share one dtype and device, got {q.dtype}, {k.dtype}, {v.dtype} on "
            f"{q.device}, {k.device}, {v.device}. Cast them first."
        )
    if (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]):
        raise ValueError(
            f"k must match q in batch, length and head size: q is {list(q.shape)}, k "
            f"{list(k.shape)}. For new tokens on earlier ones use CompactKVCache."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the KV heads must divide the query heads, got {k.shape[1]} and {q.shape[1]}."
        )
    if q.shape[3] % 2 or not 2 <= q.shape[3] <= 512:
        raise ValueError(f"head_dim must be even and at most 512, got {q.shape[3]}.")


def check_rotary_size(rotary: Rotary | None, head_dim: int) -> None:
    """Raise unless the rotation fits the head."""
    if rotary is not None and 2 * rotary.inv_freq.numel() > head_dim:
        raise ValueError(
            f"rotary must rotate at most head_dim {head_dim} dimensions, got "
            f"{2 * rotary.inv_freq.numel()}."
        )


def positive(name: str, value: float | None, way_out: str) -> float | None:
    """Return value if it is None or a finite number above 0: others make NaN of the scores."""
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}. {way_out}")
    if not 0 < value < float("inf"):
        raise ValueError(
            f"{name} must be above 0{' and finite' if value > 0 else ''}, got {value}. {way_out}"
        )
    return value


def scale_of(scale: float | None, q: Tensor) -> float:
    """Return the factor of the scores, by default 1 / sqrt(D)."""
    if scale is None:
        # mutant oracle: default softmax scale
        return q.shape[3] ** -0.5
    positive("scale", scale, "Use None for 1 / sqrt(D).")
    return float(scale)


def bias_tensor(core_bias: float | Tensor | None, q: Tensor) -> Tensor | None:
    """Return the bias as [H] on q's device, or None where there is none."""
    num_heads = q.shape[1]
    if isinstance(core_bias, Tensor):
        if core_bias.shape != (num_heads,):
            raise ValueError(
                f"core_bias must be a number or have shape [H] = [{num_heads}], got "
                f"{list(core_bias.shape)}."
            )
    elif core_bias is not None:
        if not isinstance(core_bias, (int, float)):
            raise TypeError(f"core_bias must be a number or a tensor [H], got {core_bias!r}.")
        if not abs(core_bias) < float("inf"):
            raise ValueError(f"core_bias must be finite, got {core_bias}. Use 0.0 for none.")
        if not core_bias:
            return None
        wide = torch.promote_types(q.dtype, torch.float32)
        return torch.full((num_heads,), float(core_bias), dtype=wide, device=q.device)
    return core_bias
