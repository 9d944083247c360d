"""LongLoRA (arXiv 2309.12307): train in groups that are shifted in half of the heads."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.baselines.blocks import Scoring, expand_heads
from corecontext.baselines.method import Call, Method
from corecontext.config import check_int
from reproduction.attentions.dense import dense_attention, refuse_left_padding


@dataclass(frozen=True)
class LongLoRA(Method):
    """Training in groups, shifted by half a group in half of the heads; full attention otherwise.

    The half groups at the two ends stay apart, so that no token sees a later one.
    """

    name: ClassVar[str] = "longlora"
    group_size: int | None = None
    """Tokens that attend to one another; None is a quarter of the length, as in the paper."""

    def __post_init__(self) -> None:
        if self.group_size is not None:
            check_int("group_size", self.group_size, 2)

    def attend(self, call: Call) -> Tensor:
        """Attend in groups while training, else to all tokens."""
        refuse_left_padding(self.name, call)
        if not call.training:
            return dense_attention(call.q, call.k, call.v, call.scoring)
        length = call.q.shape[2]
        if call.k.shape[2] != length:
            raise ValueError(
                "shifted sparse attention trains on whole sequences, got a filled cache. "
                "Call model.eval() to generate."
            )
        size = self.group_size or max(2, -(-length // 4))
        return shifted_attention(call.q, call.k, call.v, size, call.scoring)


def shifted_attention(q: Tensor, k: Tensor, v: Tensor, group_size: int, scoring: Scoring) -> Tensor:
    """Attend causally inside groups of tokens, [B, H, L, D] on [B, Hkv, L, D].

    In the second half of the heads groups begin half a group earlier.
    """
    heads = q.shape[1] // 2
    tensors = (q, expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1]))
    halves = []
    if heads:  # PyTorch 2.10 crashes without one
        halves.append(_grouped(*(x[:, :heads] for x in tensors), group_size, scoring))
    first = group_size - group_size // 2  # tokens of the short group at the beginning
    shifted = [x[:, heads:].tensor_split((first,), 2) for x in tensors]
    outs = [_grouped(*qkv, group_size, scoring) for qkv in zip(*shifted) if qkv[0].shape[2]]
    return torch.cat((*halves, torch.cat(outs, 2)), 1)


def _grouped(q: Tensor, k: Tensor, v: Tensor, group_size: int, scoring: Scoring) -> Tensor:
    """Attend causally inside groups counted from the first token; the last may be shorter."""
    batch, _, length, _ = q.shape
    rest = -length % group_size  # zeros at the end are later than every token
    q, k, v = (
        F.pad(x, (0, 0, 0, rest)).unflatten(2, (-1, group_size)).transpose(1, 2).flatten(0, 1)
        for x in (q, k, v)
    )
    out = dense_attention(q, k, v, scoring)
    return out.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, :length]
