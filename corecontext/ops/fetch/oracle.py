"""Index "oracle": all raw keys, for the exact largest score of each group."""

import torch
from torch import Tensor

from corecontext.ops.fetch.index import Index


class Oracle(Index):
    """Score a group by all its tokens."""

    reads_raw = True

    def key_sizes(self, group_size: int) -> tuple[int, ...]:
        """Return 1 for each token."""
        return (1,) * group_size

    def encode(self, keys: Tensor, centre: Tensor | None) -> tuple[Tensor, ...]:
        """Return the raw keys themselves."""
        return (keys,)

    def decode(self, stored: tuple[Tensor, ...], dim: int, dtype: torch.dtype) -> Tensor:
        """Return the raw keys, [N, M, g, D]."""
        return stored[0].to(dtype)
