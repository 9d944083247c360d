"""Hold the settings of attention within one document that several processes hold."""

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from corecontext.distributed.halo import Halo
from corecontext.distributed.layout import Layout
from corecontext.ops.spec import Groups, Spec


class Call(NamedTuple):
    """Hold the settings that forward and backward of one document share."""

    halo: Halo
    module: ModuleType
    """The backend."""

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

    @property
    def cores(self) -> Layout:
        """The layout of the core tokens."""
        return self.layout.groups(self.spec.group_size)

    def made(self, chunk: int) -> slice:
        """Return which groups of the near part end in the chunk itself."""
        first, end = self.cores.span(chunk)
        return slice(first - self.far(chunk), end - self.far(chunk))

    def empty(self, like: Tensor) -> Tensor:
        """Return keys and values of no core token, [2, N, 1, 0, D], in the dtype of `like`."""
        batch_size, _, kv_heads, dim = self.halo.shape
        return like.new_empty(2, batch_size * kv_heads, 1, 0, dim)

    def far_mass(self, chunk: int, masses: Tensor | None) -> Tensor | None:
        """Return the masses of the core tokens that a chunk sees far away, [N, r, M], of all [1, N,
        1, M', 1]."""
        if masses is None:
            return None
        _, heads, kv_heads, _ = self.halo.shape
        return masses[0, ..., : self.far(chunk), 0].expand(-1, heads // kv_heads, -1)

    def groups(self, q_last: Tensor, k: Tensor, v: Tensor) -> Groups:
        """Return the groups of a near part, from its group-end queries [N, r, M, D] and its keys
        and values [N, S, D]."""
        shape = (q_last.shape[2], self.spec.group_size)
        k, v = (x[:, : shape[0] * shape[1]].unflatten(1, shape) for x in (k, v))
        return Groups(q_last, k, v)
