"""The compact cache of a whole model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from corecontext.cache.heads import new_layer
from corecontext.config import CCAConfig
from corecontext.ops.rotary import Rotary


class CompactKVCache:
    """The compact cache of a whole model: one `CompactLayer` per layer.

    Args:
        num_layers: Layers of the model.
        config, rotary, max_length, rollback: As for `CompactLayer`.
    """

    def __init__(
        self,
        num_layers: int,
        config: CCAConfig,
        rotary: Rotary | None = None,
        *,
        max_length: int | None = None,
        rollback: int = 0,
    ) -> None:
        self.layers = [
            new_layer(config, rotary, max_length=max_length, rollback=rollback)
            for _ in range(num_layers)
        ]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Append to one layer and attend; see `CompactLayer.attend`."""
        return self.layers[layer_idx].attend(q, k, v, **options)

    @property
    def seq_len(self) -> int:
        """Tokens appended so far, padding included."""
        return self.layers[0].seq_len

    @property
    def nbytes(self) -> int:
        """Bytes in use over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes held over all layers."""
        return sum(layer.allocated_bytes for layer in self.layers)

    def crop(self, num_tokens: int) -> None:
        """Take back the last tokens of every layer."""
        for layer in self.layers:
            layer.crop(num_tokens)

    def shrink_window(self, window_size: int) -> None:
        """Let all later queries see fewer raw tokens; see `CompactLayer.shrink_window`."""
        for layer in self.layers:
            layer.shrink_window(window_size)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows in the given order."""
        for layer in self.layers:
            layer.select(rows)

    def repeat(self, times: int) -> None:
        """Repeat each row."""
        for layer in self.layers:
            layer.repeat(times)

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.reset()

    def state_dict(self) -> dict[str, Any]:
        """The state of every layer."""
        return {"layers": [layer.state_dict() for layer in self.layers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of as many layers."""
        if len(state["layers"]) != len(self.layers):
            raise ValueError(
                f"the state must have {len(self.layers)} layers, got {len(state['layers'])}."
            )
        for layer, one in zip(self.layers, state["layers"]):
            layer.load_state_dict(one)
