"""Hold the settings of attention within one document that several processes hold."""

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from corecontext.distributed.halo import Halo
from corecontext.distributed.layout import Layout
from corecontext.ops.spec import Groups, Spec


class Call(NamedTuple):
    """Hold the settings that forward and backward of one document share.

    attention.py has the words: the *near part* of a chunk is its halo and itself, its *far part*
    are the core tokens of all groups before these.
    """

    halo: Halo
    module: ModuleType
    """The backend."""

    @property
    def layout(self) -> Layout:
        """The document's chunks."""
        return self.halo.layout

    @property
    def spec(self) -> Spec:
        """The settings, with one group size. The sequence begins behind the first tokens kept raw,
        so that these have none."""
        return self.halo.spec

    @property
    def has_mass(self) -> bool:
        """Whether masses are added to the scores of core tokens; that of a single token is 0."""
        return self.spec.core_mass and self.spec.group_size > 1

    def num_far(self, chunk: int) -> int:
        """Count the core tokens of a chunk's far part, which all of its queries see."""
        return self.halo.start(chunk) // self.spec.group_size

    @property
    def core_layout(self) -> Layout:
        """The layout of the core tokens: each is on the process that makes it."""
        return self.layout.groups(self.spec.group_size)

    def own_groups(self, chunk: int) -> slice:
        """Return the slice of a near part's groups that end in the chunk itself, which makes their
        core tokens for all processes; groups of the halo are pooled here for the chunk alone."""
        first, end = self.core_layout.span(chunk)
        return slice(first - self.num_far(chunk), end - self.num_far(chunk))

    def no_cores(self, like: Tensor) -> Tensor:
        """Return keys and values of no core token, [2, N, 1, 0, D], in the dtype of `like`: a
        process without chunks gathers these."""
        batch_size, _, kv_heads, dim = self.halo.shape
        return like.new_empty(2, batch_size * kv_heads, 1, 0, dim)

    def far_mass(self, chunk: int, masses: Tensor | None) -> Tensor | None:
        """Return the masses of the core tokens in a chunk's far part, [N, r, M], from those of the
        whole document, [1, N, 1, all M, 1]."""
        if masses is None:
            return None
        _, heads, kv_heads, _ = self.halo.shape
        return masses[0, ..., : self.num_far(chunk), 0].expand(-1, heads // kv_heads, -1)

    def near_groups(self, q_last: Tensor, k: Tensor, v: Tensor) -> Groups:
        """Return the complete groups of a near part, from its group-end queries [N, r, M, D] and
        its keys and values [N, S, D]."""
        count = q_last.shape[2]
        size = self.spec.group_size
        k, v = (x[:, : count * size].unflatten(1, (count, size)) for x in (k, v))
        return Groups(q_last, k, v)
