"""Round keys and values to 8-bit codes with a scale for each entry and head (docs/numerics.md)."""

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The largest code: of 8-bit integers, and of floats with 4 bits of exponent and 3 of fraction."""


def encode(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Round vectors to codes, so that the largest element of each vector gets the largest code.

    Args:
        x: [..., D].
        kind: "int8", or "fp8" (e4m3).

    Returns:
        Codes [..., D] in int8 (of "fp8" the bits), and scales [..., 1] in float32: x is about code
        times scale.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / LARGEST[kind]
    x = x / torch.where(scale == 0, 1.0, scale)
    if kind == "int8":
        return x.round().clamp(-127, 127).to(torch.int8), scale
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8), scale


def decode(codes: Tensor, scale: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return code times scale, in this dtype."""
    if kind == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    return (codes.float() * scale).to(dtype)


def encode_pair(k: Tensor, v: Tensor, kind: str) -> list[Tensor]:
    """Return keys and values [..., D] as a cache stores them: as they are for kind "auto", else
    codes of both, then scales of both."""
    if kind == "auto":
        return [k, v]
    k_codes, k_scale = encode(k, kind)
    v_codes, v_scale = encode(v, kind)
    return [k_codes, v_codes, k_scale, v_scale]


def decode_all(stored: list[Tensor], kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Return vectors from their stored form: themselves for kind "auto", else all codes, then as
    many scales."""
    if kind == "auto":
        return stored
    half = len(stored) // 2
    return [decode(codes, scale, kind, dtype) for codes, scale in zip(stored, stored[half:])]
