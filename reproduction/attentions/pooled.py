"""The paper's rule with plain pooling: core tokens are the mean or the maximum of their group."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from corecontext.baselines.blocks import masked_attention
from corecontext.baselines.method import Call, Method
from corecontext.config import PAPER_RULE, check_int
from corecontext.ops.reference import visible
from corecontext.ops.spec import Spec
from corecontext.visibility import num_complete_groups
from reproduction.attentions.dense import refuse_left_padding


@dataclass(frozen=True)
class Pooled(Method):
    """Core tokens without weights, in place of CCA's. The cache keeps every token: only quality is
    measured, and the cost is CCA's."""

    needs_rotary = True
    group_size: int = PAPER_RULE["group_size"]
    window_size: int = PAPER_RULE["window_size"]

    def __post_init__(self) -> None:
        check_int("group_size", self.group_size, 1)
        check_int("window_size", self.window_size, 1)

    def pool(self, groups: Tensor) -> Tensor:
        """Pool groups [B, Hkv, M, g, D] into core tokens [B, Hkv, M, D]."""
        raise NotImplementedError

    def attend(self, call: Call) -> Tensor:
        """Attend to core tokens of the far past and to the window."""
        refuse_left_padding(self.name, call)
        k, v = call.k, call.v
        g = self.group_size
        length = k.shape[2]
        num_groups = num_complete_groups(length, g)
        wide = torch.promote_types(k.dtype, torch.float32)
        groups = [x[:, :, : num_groups * g].unflatten(2, (num_groups, g)).to(wide) for x in (k, v)]
        groups[0] = call.rotary.rotate(groups[0], g // 2 - torch.arange(g, device=k.device))
        core_k, core_v = (self.pool(x).to(k.dtype) for x in groups)

        position = torch.arange(length, device=k.device)
        spec = Spec(g, self.window_size, call.scoring.scale)
        see = torch.cat(
            visible(position[length - call.q.shape[2] :], position, num_groups, spec), 1
        )
        keys = torch.cat((core_k, k), 2)
        values = torch.cat((core_v, v), 2)
        return masked_attention(call.q, keys, values, see[None, None], call.scoring)


@dataclass(frozen=True)
class MeanPooled(Pooled):
    """Core tokens are means."""

    name: ClassVar[str] = "mean"

    def pool(self, groups: Tensor) -> Tensor:
        """Return the mean of each group."""
        return groups.mean(3)


@dataclass(frozen=True)
class MaxPooled(Pooled):
    """Core tokens are maxima of each element, of keys that are rotated already."""

    name: ClassVar[str] = "max"

    def pool(self, groups: Tensor) -> Tensor:
        """Return the maximum of each group; a tie shares its gradient."""
        return groups.amax(3)
