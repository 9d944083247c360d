"""Keys and values in 8 bits: codes, and one scale for each entry and head (docs/numerics.md)."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The largest code of each kind: of 8-bit integers, and of floating point with 4 bits of exponent
and 3 of fraction."""


def encode(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Round vectors to codes, the largest number of each to the largest code.

    Args:
        x: [..., D].
        kind: "int8", or "fp8" (e4m3).

    Returns:
        Codes [..., D] in int8 (for "fp8" their bits), and scales [..., 1] in float32; code times
        scale is the number.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / LARGEST[kind]
    x = x / torch.where(scale == 0, 1.0, scale)
    if kind == "int8":
        return x.round().clamp(-127, 127).to(torch.int8), scale
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8), scale


def decode(codes: Tensor, scale: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The numbers that codes and scales stand for, in this dtype."""
    numbers = codes if kind == "int8" else codes.view(torch.float8_e4m3fn)
    return (numbers.float() * scale).to(dtype)
