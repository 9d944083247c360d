"""What a model's attention is replaced with: one frozen, validated description."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from sys import float_info
from typing import Any

DEFAULT_GROUP_SIZE = 16
DEFAULT_WINDOW_SIZE = 1024
POOLINGS = ("cca", "mean", "max", "mean_query")
LEARNED_WEIGHTS = ("temperature", "probe", "distance", "key_gain")
LEARNED = (*LEARNED_WEIGHTS, "bias")
CORE_POSITIONS = ("middle", "token")
CORE_HEADS = ("kv", "query")
CACHE_DTYPES = ("auto", "int8", "fp8")
MOST = 2**31 - 1
"""The largest size: what kernels count tokens with."""
BACKENDS = ("auto", "reference", "packed", "triton")


@dataclass(frozen=True)
class CCAConfig:
    """Core Context Aware attention, as docs/math.md defines it."""

    group_size: int = DEFAULT_GROUP_SIZE
    """Tokens per core token (g), at least 1. With 1 the attention is full attention."""
    window_size: int = DEFAULT_WINDOW_SIZE
    """Nearest tokens that every query sees uncompressed (s), at least 1."""
    num_groups: int | None = None
    """A constant number of groups (m): g = max(1, ceil((L - s) / m)) is then taken from each
    sequence's length."""
    pooling: str = "cca"
    """What makes a core token: "cca" (weights of the group's last query), "mean", "max", or
    "mean_query" (weights of the mean over its query heads, instead of the mean of their
    weights)."""
    core_position: str = "middle"
    """Rotary position of a core key: "middle" of its group (the paper), or "token": keys pooled as
    they are."""
    core_heads: str = "kv"
    """One core token per "kv" head (mean of the query heads' weights), or per "query" head (r times
    the memory)."""
    core_bias: float = 0.0
    """Added to every core token's score; log(group_size) is proportional attention."""
    learned: tuple[str, ...] = ()
    """Parameters that `enable` adds to each layer, zero at first, which is the paper's rule:
    "temperature", "probe" (of the values), "distance" and "key_gain" change how core tokens are
    made, "bias" is added to their scores."""
    layer_group_sizes: tuple[int | tuple[int, ...], ...] | None = None
    """g of each full-attention layer, in order, instead of group_size for all; or for each KV head
    of a layer, a tuple. A head whose g is 1 keeps every token."""
    sink_size: int = 0
    """First tokens of a sequence that every query sees uncompressed, rounded up to a multiple of g
    (each layer's own); their groups are not pooled. 0, the paper's rule, keeps none."""
    cache_dtype: str = "auto"
    """How caches hold keys and values: "auto" (as they come), or in 8 bits with a scale for each
    entry and head, "int8" or "fp8" (e4m3). What goes through a cache then sees the rounded ones;
    training without one does not."""
    head_group_sizes: tuple[int, ...] | None = None
    """g of each KV head, in order, in every layer."""
    backend: str = "auto"
    """Who computes: "auto", "packed" (plain torch, linear memory), "triton" (GPU kernels) or
    "reference" (dense)."""

    def __post_init__(self) -> None:
        for name in ("group_size", "window_size"):
            _check_positive_int(name, getattr(self, name))
        if self.num_groups is not None:
            _check_positive_int("num_groups", self.num_groups)
        check_int("sink_size", self.sink_size, 0)
        for name, allowed in (
            ("pooling", POOLINGS),
            ("core_position", CORE_POSITIONS),
            ("core_heads", CORE_HEADS),
            ("cache_dtype", CACHE_DTYPES),
            ("backend", BACKENDS),
        ):
            check_choice(name, getattr(self, name), allowed)
        if isinstance(self.core_bias, bool) or not isinstance(self.core_bias, (int, float)):
            raise TypeError(
                f"core_bias must be a number, got {self.core_bias!r}. Use 0.0 for none."
            )
        for name, value in (
            ("learned", self.learned),
            ("layer_group_sizes", self.layer_group_sizes),
            ("head_group_sizes", self.head_group_sizes),
        ):
            if not isinstance(value, (tuple, list)) and (value is not None or name == "learned"):
                raise TypeError(f"{name} must be a tuple, got {value!r}.")
        object.__setattr__(self, "learned", tuple(self.learned))
        for one in self.learned:
            check_choice("learned", one, LEARNED)
        if self.learned and self.pooling not in ("cca", "mean_query"):
            raise ValueError(
                f"learned must come with pooling 'cca' or 'mean_query', got {self.pooling!r}: others have "
                "no weights to learn."
            )
        for name in ("layer_group_sizes", "head_group_sizes"):
            sizes = getattr(self, name)
            if sizes is None:
                continue
            if name == "layer_group_sizes":
                sizes = [tuple(one) if isinstance(one, list) else one for one in sizes]
            object.__setattr__(self, name, tuple(sizes))
            if not sizes or () in sizes:
                raise ValueError(f"{name} must not be empty, got {sizes}.")
            for one in sizes:
                for size in (
                    one if isinstance(one, tuple) and name == "layer_group_sizes" else (one,)
                ):
                    _check_positive_int(name, size)
            if self.num_groups is not None:
                raise ValueError(f"num_groups must not be given with {name}: both set g.")
        if self.layer_group_sizes is not None and self.head_group_sizes is not None:
            raise ValueError(
                "head_group_sizes must not be given with layer_group_sizes, whose entries may be tuples."
            )
        if not abs(self.core_bias) <= float_info.max:
            raise ValueError(f"core_bias must be finite, got {self.core_bias}. Use 0.0 for none.")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for a model's config.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CCAConfig:
        """The inverse of `to_dict`; unknown keys are errors."""
        if not isinstance(values, Mapping):
            raise TypeError(f"CCA settings must map names to values, got {values!r}.")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = get_close_matches(str(key), known, 1)
                raise ValueError(
                    f"unknown CCA setting {key!r}. "
                    + (f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}.")
                )
        return cls(**values)

    def replace(self, **changes: Any) -> CCAConfig:
        """A copy with some fields changed, validated again; a new group_size is that of every layer
        and head."""
        if changes.get("group_size", self.group_size) != self.group_size:
            changes = {"layer_group_sizes": None, "head_group_sizes": None, **changes}
        return type(self).from_dict({**self.to_dict(), **changes})

    @property
    def varies(self) -> bool:
        """Whether layers or heads have a g of their own."""
        return self.layer_group_sizes is not None or self.head_group_sizes is not None

    def of_layer(self, index: int) -> CCAConfig:
        """The settings of one full-attention layer, counted from 0.

        Raises:
            ValueError: layer_group_sizes has none for it.
        """
        sizes = self.layer_group_sizes
        if sizes is None:
            return self
        if index >= len(sizes):
            raise ValueError(
                f"layer_group_sizes must have one g for each full-attention layer, got {len(sizes)}."
            )
        size = sizes[index]
        if isinstance(size, tuple):
            return dataclasses.replace(self, head_group_sizes=size, layer_group_sizes=None)
        return dataclasses.replace(self, group_size=size, layer_group_sizes=None)

    def of_process(self, rank: int, processes: int) -> CCAConfig:
        """A layer's settings for the KV heads of one of the processes that share them evenly
        (tensor parallelism)."""
        sizes = self.head_group_sizes
        if sizes is None or processes == 1:
            return self
        count = len(sizes) // processes
        own = sizes[rank * count : (rank + 1) * count]
        if len(set(own)) == 1:
            return dataclasses.replace(self, group_size=own[0], head_group_sizes=None)
        return dataclasses.replace(self, head_group_sizes=own)


def _check_positive_int(name: str, value: Any) -> None:
    """Raise unless value is an int of at least 1."""
    check_int(name, value, 1, " (a query sees itself)" if name == "window_size" else "")


def check_int(name: str, value: Any, least: int, why: str = "") -> None:
    """Raise unless value is an int of at least `least` (a bool is no size)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{name} must be at least {least}{why}, got {value}.")
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value}.")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless value is one of the allowed words."""
    if value not in allowed:
        near = get_close_matches(str(value), allowed, 1)
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
