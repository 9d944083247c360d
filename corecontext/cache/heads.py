"""The compact cache of a layer whose KV heads have group sizes of their own: a `CompactLayer` for
the heads of each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from corecontext.cache.full import FullLayer
from corecontext.cache.layer import CompactLayer
from corecontext.config import CCAConfig
from corecontext.ops.head_split import (
    gather_heads,
    heads_of_each,
    split_heads,
    split_learned,
)
from corecontext.ops.rotary import Rotary
from corecontext.ops.rules import Learned


class HeadsLayer:
    """What `CompactLayer` is, for a config with `head_group_sizes`; arguments as there.

    The parts hold the same tokens of different heads, so what holds of rows and lengths holds of
    any of them.
    """

    def __init__(
        self,
        config: CCAConfig,
        rotary: Rotary | None = None,
        *,
        max_length: int | None = None,
        rollback: int = 0,
        learned: Learned | None = None,
    ) -> None:
        assert config.head_group_sizes is not None, "one g for all heads takes a CompactLayer"
        self.config, self.max_length, self.rollback, self.learned = (
            config,
            max_length,
            rollback,
            learned or {},
        )
        sizes, self.heads = heads_of_each(config.head_group_sizes)
        self.parts = [
            CompactLayer(
                config.replace(head_group_sizes=None, group_size=g),
                rotary,
                max_length=max_length,
                rollback=rollback,
            )
            for g in sizes
        ]
        self._hand_out()

    def _hand_out(self) -> None:
        """Learned parameters as they are now: they may have been trained since."""
        for part, own in zip(
            self.parts, split_learned(self.learned, self.heads, sum(map(len, self.heads)))
        ):
            part.learned = own

    def of(self, layers: Sequence[CompactLayer]) -> HeadsLayer:
        """The same over other parts, one for each of these."""
        other = copy.copy(self)
        other.parts = list(layers)
        return other

    @property
    def _first(self) -> CompactLayer:
        return self.parts[0]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was appended yet."""
        return self._first.is_empty

    @property
    def padding_known(self) -> bool:
        """Whether every row has a token."""
        return self._first.padding_known

    @property
    def seen(self) -> int | Tensor:
        """Slots appended so far."""
        return self._first.seen

    @property
    def seq_len(self) -> int:
        """The same as a number."""
        return self._first.seq_len

    @property
    def pads(self) -> list[int]:
        """Slots of left padding by row."""
        return self._first.pads

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(part.nbytes for part in self.parts)

    @property
    def raw_bytes(self) -> int:
        """Of those what does not grow."""
        return sum(part.raw_bytes for part in self.parts)

    @property
    def allocated_bytes(self) -> int:
        """Bytes held."""
        return sum(part.allocated_bytes for part in self.parts)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See `CompactLayer.attend`."""
        sizes, outs = self.config.head_group_sizes, []
        assert sizes is not None
        if len(sizes) != k.shape[1]:
            raise ValueError(
                f"head_group_sizes must have one g for each of the {k.shape[1]} KV heads, got {sizes}."
            )
        self._hand_out()
        for part, *tensors in zip(
            self.parts, *(split_heads(x, self.heads, len(sizes)) for x in (q, k, v))
        ):
            outs.append(part.attend(*tensors, **options))
        return gather_heads(outs, self.heads)

    def expect(self, seq_len: int) -> None:
        """See `CompactLayer.expect`."""
        for part in self.parts:
            part.expect(seq_len)

    def close(self, what: str) -> None:
        """See `CompactLayer.close`."""
        for part in self.parts:
            part.close(what)

    def crop(self, num_tokens: int) -> None:
        """See `CompactLayer.crop`; where one g refuses, no part has changed."""
        for part in self.parts:
            part.check_crop(num_tokens)
        for part in self.parts:
            part.crop(num_tokens)

    def shrink_window(self, window_size: int) -> None:
        """See `CompactLayer.shrink_window`."""
        for part in self.parts:
            part.shrink_window(window_size)
        self.config = self.config.replace(window_size=window_size)

    def select(self, rows: Tensor) -> None:
        """See `CompactLayer.select`."""
        for part in self.parts:
            part.select(rows)

    def repeat(self, times: int) -> None:
        """See `CompactLayer.repeat`."""
        for part in self.parts:
            part.repeat(times)

    def reset(self) -> None:
        """See `CompactLayer.reset`."""
        for part in self.parts:
            part.reset()

    def state_dict(self) -> dict[str, Any]:
        """See `CompactLayer.state_dict`."""
        return {
            "config": self.config.to_dict(),
            "parts": [part.state_dict() for part in self.parts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `CompactLayer.load_state_dict`."""
        if CCAConfig.from_dict(state["config"]) != self.config:
            raise ValueError(
                f"the state must come from a cache with config {self.config.to_dict()}, got "
                f"{state['config']}."
            )
        self._hand_out()
        for part, own in zip(self.parts, state["parts"]):
            part.load_state_dict(own)


def parts_of(layer: CompactLayer | HeadsLayer | FullLayer) -> list[Any]:
    """What holds the buffers: the layer itself, or its `CompactLayer` parts."""
    return list(layer.parts) if isinstance(layer, HeadsLayer) else [layer]


def new_layer(
    config: CCAConfig, rotary: Rotary | None = None, **options: Any
) -> CompactLayer | HeadsLayer:
    """The empty cache of one layer; arguments as for `CompactLayer`."""
    return (CompactLayer if config.head_group_sizes is None else HeadsLayer)(
        config, rotary, **options
    )
