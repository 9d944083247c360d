"""Define the base class of rival methods, and the arguments of a call of theirs."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from corecontext.baselines.blocks import Scoring
from corecontext.ops.rotary import Rotary


class Layer(NamedTuple):
    """A full-attention layer of the model that runs a method."""

    index: int
    """Among all layers of the model."""
    full_index: int
    """Among the full-attention layers."""
    query_heads: int
    kv_heads: int


class Call(NamedTuple):
    """One attention call: the last T of S tokens of each row, one document a row."""

    q: Tensor
    """[B, H, T, D], rotary applied."""
    k: Tensor
    """[B, Hkv, S, D]. A method with a cache of its own gets the T new tokens alone."""
    v: Tensor
    scoring: Scoring
    layer: Layer
    attention_mask: Tensor | None = None
    """[B, S], 0 for padding."""
    rotary: Rotary | None = None
    """How keys were rotated, for methods with `needs_rotary`."""
    cache: Any = None
    """The layer's cache: the method's own, transformers' growing one, or None."""
    training: bool = False
    """Whether the model is in training mode, in which a method may attend differently."""


class Method:
    """Base of all rivals; each is a frozen dataclass of its settings."""

    name: ClassVar[str]
    needs_rotary: bool = False
    """Whether the method rotates queries or keys itself, by `Call.rotary`; every layer of the model
    must rotate then."""

    def check(self, layer: Layer) -> None:
        """Raise a ValueError where the settings do not fit a layer."""

    def make_cache(self, layer: Layer) -> Any:
        """Return an empty cache of one layer, None for transformers' growing cache.

        It is a layer of transformers' `Cache` (`CacheLayerMixin`) with two additions: `settings`, a
        tuple, equal for caches of equal sizes, and `close()`, after which it refuses all calls:
        packed documents are not cached.
        """
        return None

    def attend(self, call: Call) -> Tensor:
        """Return the call's attention, [B, H, T, D]."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for records."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


def left_padding(attention_mask: Tensor) -> Tensor:
    """Count the padded slots before each row of a mask [B, L]."""
    return (attention_mask.cumsum(1) == 0).sum(1)
