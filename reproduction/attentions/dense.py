"""Full attention for rivals, and the refusal of rows that they cannot take."""

from torch import Tensor

from corecontext.baselines.blocks import Scoring, Sinks, sink_attention
from corecontext.baselines.method import Call, left_padding


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Return full causal attention of the last T of S tokens, [B, H, T, D] on [B, Hkv, S, D]."""
    no_sinks = Sinks(k[:, :, :0], v[:, :, :0])
    return sink_attention(q, k, v, no_sinks, k.shape[2], scoring, k.shape[2] - q.shape[2])


def refuse_left_padding(name: str, call: Call) -> None:
    """Raise where rows of a call of this method are padded on the left."""
    if call.attention_mask is not None and bool(left_padding(call.attention_mask).any()):
        raise NotImplementedError(
            f"rows must not be padded on the left under {name}: give them one by one, or pad on "
            "the right."
        )
