"""Hold the settings of attention within one document that several processes hold."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.distributed.halo import Halo
from corecontext.distributed.layout import Layout
from corecontext.ops.spec import Groups, Spec


class Call(NamedTuple):
    """Hold the settings that forward and backward of one document share."""

    halo: Halo
    module: ModuleType
    """The backend."""
    core_bias: float
    keep: Callable[[Tensor, Tensor | None], None] | None = None
    """Called with the keys and values of all core tokens, [2, N, 1, M, D], and their masses, [1,
    N, 1, M, 1] or None."""

    @property
    def layout(self) -> Layout:
        """The document's chunks."""
        return self.halo.layout

    @property
    def spec(self) -> Spec:
        """The settings, with one group size and no first tokens kept raw: these are not a part of
        the sequence."""
        return self.halo.spec

    @property
    def has_mass(self) -> bool:
        """Whether masses are added to the scores of core tokens; that of one token is 0."""
        return self.spec.core_mass and self.spec.group_size > 1

    def far(self, chunk: int) -> int:
        """Return how many core tokens every query of a chunk sees: its near part begins after
        them."""
        return self.halo.start(chunk) // self.spec.group_size

    def made(self, chunk: int) -> slice:
        """Return which groups of the near part end in the chunk itself."""
        first, end = self.layout.groups(chunk, self.spec.group_size)
        return slice(first - self.far(chunk), end - self.far(chunk))

    def counts(self, rank: int) -> list[int]:
        """Return how many core tokens each chunk of a process makes."""
        spans = [self.layout.groups(i, self.spec.group_size) for i in self.layout.chunks(rank)]
        return [end - first for first, end in spans]

    @property
    def message_size(self) -> int:
        """Core tokens in a message: those of the process that makes most."""
        return max(sum(self.counts(rank)) for rank in range(self.halo.wire.size))

    def bias(self, queries: Tensor) -> Tensor | None:
        """Return the bias [N, r] of queries [N, r, T, D]."""
        if not self.core_bias:
            return None
        wide = torch.promote_types(queries.dtype, torch.float32)
        return torch.full(queries.shape[:2], self.core_bias, device=queries.device, dtype=wide)

    def groups(self, q_last: Tensor, k: Tensor, v: Tensor) -> Groups:
        """Return the groups of a near part, from its group-end queries [N, r, M, D] and its keys
        and values [N, S, D]."""
        shape = (q_last.shape[2], self.spec.group_size)
        k, v = (x[:, : shape[0] * shape[1]].unflatten(1, shape) for x in (k, v))
        return Groups(q_last, k, v)
