"""The compact cache: core tokens of the far past and a ring of recent tokens, for any model."""

from corecontext.cache.cropping import UNDO_LIMIT
from corecontext.cache.full import FullLayer
from corecontext.cache.layer import CompactLayer
from corecontext.cache.parts import CompactKVCache, HeadsLayer, new_layer, parts_of

__all__ = [
    "UNDO_LIMIT",
    "CompactKVCache",
    "CompactLayer",
    "FullLayer",
    "HeadsLayer",
    "new_layer",
    "parts_of",
]
