"""Rotate keys by a few positions inside a group, as pooling needs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Describe a model's rotary embedding, so that a pooled key can be given the position of its
    group's middle.

    Rotation by p then by d is rotation by p + d, so keys that are already rotated need only a
    further rotation by the offset to the middle token: a table of g rows, the same for every group
    (docs/math.md, eq. 3). A scaling of the rotated keys, such as YaRN's, commutes with it and must
    not be applied again.
    """

    inv_freq: Tensor
    """Angles of a rotation by one position, [R / 2], in radians; the first R <= D dimensions
    rotate."""
    interleaved: bool = False
    """False: dimension i pairs with i + R / 2 (Llama). True: 2i pairs with 2i + 1 (GLM)."""

    @classmethod
    def from_theta(
        cls, theta: float, head_dim: int, device: torch.device | str | None = None
    ) -> Rotary:
        """Use the common frequencies theta^(-2i / D) over all D dimensions.

        Raises:
            ValueError: theta is no finite number above 0, or head_dim is odd or less than 2.
        """
        if not 0 < theta < float("inf"):
            raise ValueError(
                f"theta must be finite and above 0, got {theta}. Take the model's rope_theta."
            )
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim must be even and at least 2, got {head_dim}.")
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
        return cls((theta**-exponent).float())

    def rotate(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Rotate x by `offsets` positions.

        Args:
            x: [..., n, D], any float dtype; computed in it.
            offsets: [n], positions to rotate by.

        Returns:
            [..., n, D].
        """
        # Angles in float64: they are few, and float32 would cost accuracy at large offsets.
        angle = offsets.double()[:, None] * self.inv_freq.to(offsets.device).double()[None, :]
        cos, sin = (f(angle).to(x.dtype) for f in (torch.cos, torch.sin))  # [n, R / 2]
        x, rest = x.tensor_split([2 * self.inv_freq.numel()], -1)
        if self.interleaved:
            first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
            # mutant oracle: interleaved pairs turned the wrong way
            pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
            rotated = pairs.flatten(-2)
        else:
            first, second = x.chunk(2, -1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated
