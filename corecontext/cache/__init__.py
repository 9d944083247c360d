"""The compact cache: layer.py is one layer's, entries.py its layout; raw tokens of fetch in
raw_store.py and host_*.py."""

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
