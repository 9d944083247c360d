"""Treat several compact layers as one: those of the KV heads of each group size, or of all layers
of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from corecontext.cache.full import FullLayer
from corecontext.cache.layer import CompactLayer
from corecontext.cache.unchanged import unchanged_by_errors
from corecontext.config import CCAConfig
from corecontext.ops.head_split import gather_heads, heads_of_each, split_heads
from corecontext.ops.rotary import Rotary


def _first(name: str) -> property:
    """Make a property that returns the first part's; all parts have the same."""
    return property(lambda self: getattr(self.parts[0], name), doc=f"As `CompactLayer.{name}`.")


def _sum(name: str) -> property:
    """Make a property that returns the sum over the parts."""
    doc = f"Sum of `CompactLayer.{name}`."
    return property(lambda self: sum(getattr(cache, name) for cache in self.parts), doc=doc)


def _each(name: str) -> Callable[..., None]:
    """Make a method that calls the method of this name of each part."""

    @unchanged_by_errors
    def method(self: Parts, *args: Any) -> None:
        for cache in self.parts:
            getattr(cache, name)(*args)

    method.__doc__ = f"As `CompactLayer.{name}`, of every part."
    return method


class Parts:
    """Compact layers that hold the same tokens; see `CompactLayer` for each method."""

    seq_len = _first("seq_len")
    nbytes = _sum("nbytes")
    host_bytes = _sum("host_bytes")
    raw_bytes = _sum("raw_bytes")
    allocated_bytes = _sum("allocated_bytes")
    allocated_host_bytes = _sum("allocated_host_bytes")
    crop = _each("crop")
    shrink_window = _each("shrink_window")
    select = _each("select")
    repeat = _each("repeat")
    reset = _each("reset")

    STATE: ClassVar[str]
    """Key of the list of the parts' states in a saved state."""

    def __init__(self, caches: Iterable[Any]) -> None:
        self.parts = list(caches)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every part."""
        return {self.STATE: [cache.state_dict() for cache in self.parts]}

    @unchanged_by_errors
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state of as many parts."""
        states = state[self.STATE]
        if len(states) != len(self.parts):
            raise ValueError(
                f"the state must have {len(self.parts)} {self.STATE}, got {len(states)}."
            )
        for cache, cache_state in zip(self.parts, states):
            cache.load_state_dict(cache_state)


class HeadsLayer(Parts):
    """A layer whose KV heads have different group sizes: one `CompactLayer` for the heads of each,
    which gets the arguments; config must have `head_group_sizes`."""

    STATE = "parts"
    is_empty = _first("is_empty")
    padding_known = _first("padding_known")
    seen = _first("seen")
    pads = _first("pads")
    max_length = _first("max_length")
    expect = _each("expect")
    plan = _each("plan")
    close = _each("close")
    end_prompt = _each("end_prompt")

    def __init__(self, config: CCAConfig, rotary: Rotary | None = None, **options: Any) -> None:
        assert config.head_group_sizes is not None, "one g for all heads takes a CompactLayer"
        self.config = config
        sizes, self.heads = heads_of_each(config.head_group_sizes)
        configs = [config.replace(head_group_sizes=None, group_size=g) for g in sizes]
        super().__init__(CompactLayer(each, rotary, **options) for each in configs)

    def of(self, layers: Sequence[CompactLayer]) -> HeadsLayer:
        """Return a copy of this layer whose parts are these, one for each group size."""
        layer = copy.copy(self)
        layer.parts = list(layers)
        return layer

    @unchanged_by_errors
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Append new tokens and attend from them, each part for its heads; arguments as of
        `CompactLayer.attend`."""
        sizes = self.config.head_group_sizes
        if len(sizes) != k.shape[1]:
            raise ValueError(
                f"head_group_sizes must have one g for each of the {k.shape[1]} KV heads, got "
                f"{sizes}."
            )
        tensors = zip(*(split_heads(x, self.heads, len(sizes)) for x in (q, k, v)))
        outs = [cache.attend(*qkv, **options) for cache, qkv in zip(self.parts, tensors)]
        return gather_heads(outs, self.heads)

    def shrink_window(self, window_size: int) -> None:
        """Let later queries see fewer raw tokens, as `CompactLayer.shrink_window`."""
        super().shrink_window(window_size)  # refuses before the settings change
        self.config = self.config.replace(window_size=window_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every part."""
        return {"config": self.config.to_dict(), **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state made under the same configuration."""
        if CCAConfig.from_dict(state["config"]) != self.config:
            raise ValueError(
                f"the state must come from a cache with config {self.config.to_dict()}, got "
                f"{state['config']}."
            )
        super().load_state_dict(state)


class CompactKVCache(Parts):
    """The compact cache of a whole model, one layer for each of its layers.

    Args:
        num_layers: Layers of the model.
        config: Settings of each layer. rotary: The keys' rotation, for core_position="middle".
        max_length: Tokens a row that buffers are fixed for; None lets them grow.
        rollback: Tokens that `crop` can always take back.
    """

    STATE = "layers"

    def __init__(
        self,
        num_layers: int,
        config: CCAConfig,
        rotary: Rotary | None = None,
        *,
        max_length: int | None = None,
        rollback: int = 0,
    ) -> None:
        options = {"max_length": max_length, "rollback": rollback}
        super().__init__(new_layer(config, rotary, **options) for _ in range(num_layers))
        self.layers: list[CompactLayer | HeadsLayer] = self.parts
        """The cache of each layer."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Append to one layer and attend; options as for `CompactLayer.attend`."""
        return self.parts[layer_idx].attend(q, k, v, **options)


def parts_of(layer: CompactLayer | HeadsLayer | FullLayer) -> list[Any]:
    """Return the layers that hold the buffers: a `HeadsLayer`'s parts, else the layer itself."""
    return layer.parts if isinstance(layer, HeadsLayer) else [layer]


def new_layer(
    config: CCAConfig, rotary: Rotary | None = None, **options: Any
) -> CompactLayer | HeadsLayer:
    """Make the empty cache of one layer; arguments as for `CompactLayer`."""
    kind = CompactLayer if config.head_group_sizes is None else HeadsLayer
    return kind(config, rotary, **options)
