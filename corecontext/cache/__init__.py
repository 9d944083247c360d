"""The compact cache: core tokens of the far past and a ring of recent tokens. Nothing here knows of
Hugging Face."""

from corecontext.cache.heads import HeadsLayer, new_layer, parts_of
from corecontext.cache.layer import UNDO_LIMIT, CompactLayer
from corecontext.cache.model import CompactKVCache

__all__ = ["UNDO_LIMIT", "CompactKVCache", "CompactLayer", "HeadsLayer", "new_layer", "parts_of"]
