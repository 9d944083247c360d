"""DuoAttention (arXiv 2410.10819): some KV heads see all tokens, the others sinks and window."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from corecontext.baselines.method import Call, Layer
from corecontext.baselines.sink_cache import SinkCacheLayer
from corecontext.baselines.sink_methods import SinkMethod
from corecontext.config import PAPER_RULE, check_int
from corecontext.integrations.hf.attention_interface import full_layers
from corecontext.integrations.hf.cache_layers import layer_bytes
from corecontext.model_sizes import ModelSizes
from corecontext.ops.head_split import gather_heads, split_heads

ENDLESS = 2**40
"""A window that no token leaves."""


def find_heads(text: str | None, hf_config: Any) -> tuple[tuple[int, ...], ...]:
    """Return the KV heads that see all tokens, for each full-attention layer.

    Args:
        text: "LAYER:HEAD,..."; None takes the heads that keep every token in the checkpoint's own
            settings, as `corecontext layers --heads --raw` chooses them.

    Raises:
        ValueError: the text has another form or no such layer, or there is none and no such head.
    """
    layers = len(full_layers(hf_config))
    heads = range(ModelSizes.of(hf_config).kv_heads)
    rule = "full_heads must be LAYER:HEAD,LAYER:HEAD,..., such as 12:0,12:3"
    if text is None:
        saved = getattr(hf_config, "cca", None) or {}
        of_layers = saved.get("layer_group_sizes") or ()
        if saved.get("head_group_sizes"):
            of_layers = (saved["head_group_sizes"],) * layers
        sizes = [(size,) * len(heads) if isinstance(size, int) else size for size in of_layers]
        chosen = [(i, head) for i in range(len(sizes)) for head in heads if sizes[i][head] == 1]
        if not chosen:
            raise ValueError(
                f"{rule}, for a checkpoint without heads that keep every token, got none. Find "
                "them with corecontext layers --heads --raw."
            )
    else:
        pairs = [re.fullmatch(r"\s*(\d+):(\d+)\s*", pair) for pair in text.split(",")]
        chosen = [(int(pair[1]), int(pair[2])) for pair in pairs if pair]
        if len(chosen) < len(pairs) or any(layer >= layers for layer, _ in chosen):
            raise ValueError(f"{rule}, with layers from 0 to {layers - 1}, got {text!r}.")
    return tuple(tuple(h for i, h in chosen if i == layer) for layer in range(layers))


@dataclass(frozen=True)
class DuoAttention(SinkMethod):
    """Some KV heads see all tokens, the others sinks and window.

    The paper finds the heads by training gates; `corecontext layers --heads` finds them by trial.
    """

    name: ClassVar[str] = "duo_attention"
    full_heads: tuple[tuple[int, ...], ...]
    """For each full-attention layer the KV heads that see all tokens; () where none does."""
    sinks: int = 4
    window_size: int = PAPER_RULE["window_size"]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "full_heads", tuple(tuple(layer) for layer in self.full_heads))
        for head in (head for layer in self.full_heads for head in layer):
            check_int("full_heads", head, 0)

    def check(self, layer: Layer) -> None:
        """Raise a ValueError where the layer has no list of heads, or no such heads."""
        got: object = "no such layer"
        if layer.full_index < len(self.full_heads):
            got = self.full_heads[layer.full_index]
            if all(head < layer.kv_heads for head in got):
                return
        raise ValueError(
            f"full_heads must have heads from 0 to {layer.kv_heads - 1} for each layer, got {got}."
        )

    def make_cache(self, layer: Layer) -> DuoLayer:
        """Return an empty cache of one layer."""
        full = sorted(set(self.full_heads[layer.full_index]))
        return DuoLayer(self.sinks, self.window_size, full, layer.kv_heads)


class DuoLayer(SinkCacheLayer):
    """A cache whose KV heads keep either all tokens or sinks and window.

    Args:
        full: The heads that keep all tokens.
        heads: KV heads in all.
    """

    def __init__(self, sinks: int, window_size: int, full: Sequence[int], heads: int) -> None:
        super().__init__(sinks, window_size)
        self.settings = (sinks, window_size, tuple(full), heads)
        self.heads = heads
        self.shares: list[list[int]] = []
        """The heads of each layer in `layers`."""
        self.layers: list[SinkCacheLayer] = []
        if full:
            self.shares.append(list(full))
            self.layers.append(SinkCacheLayer(0, ENDLESS))
        if len(full) < heads:
            self.shares.append([head for head in range(heads) if head not in full])
            self.layers.append(SinkCacheLayer(sinks, window_size))

    def attend(self, call: Call, far_position: str) -> Tensor:
        """Append and attend in each share of the heads: see `SinkCacheLayer.attend`."""
        tensors = [split_heads(x, self.shares, self.heads) for x in (call.q, call.k, call.v)]
        outs = []
        for layer, q, k, v in zip(self.layers, *tensors):
            layer.closed = self.closed
            outs.append(layer.attend(call._replace(q=q, k=k, v=v), far_position))
        self.is_initialized = True
        self.seen += call.k.shape[2]
        return gather_heads(outs, self.shares)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(map(layer_bytes, self.layers))

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        for layer in self.layers:
            layer.reset()

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to every tensor that has one entry for each row."""
        for layer in self.layers:
            layer.change_rows(change)
