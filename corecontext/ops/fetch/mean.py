"""Index "mean": the mean key of each group."""

import torch
from torch import Tensor

from corecontext.ops.fetch.index import Index
from corecontext.ops.pooling import widen


class Mean(Index):
    """Keep one key a group, the mean of its keys."""

    def key_sizes(self, group_size: int) -> tuple[int, ...]:
        """Return g: the key stands for the whole group."""
        return (group_size,)

    def encode(self, keys: Tensor, centre: Tensor | None) -> tuple[Tensor, ...]:
        """Return the mean keys [N, M, 1, D], in the dtype of the raw keys."""
        return (widen(keys).mean(2, keepdim=True).to(keys.dtype),)

    def decode(self, stored: tuple[Tensor, ...], dim: int, dtype: torch.dtype) -> Tensor:
        """Return the mean keys, [N, M, 1, D]."""
        return stored[0].to(dtype)
