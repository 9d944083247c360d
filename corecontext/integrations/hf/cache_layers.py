"""Put compact caches behind the interface of the layers in transformers' `Cache`."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

from corecontext.cache import new_layer, parts_of
from corecontext.cache.late import catch_up
from corecontext.config import CCAConfig
from corecontext.ops.rotary import Rotary

OFFLOADED = (
    "an offloaded cache cannot hold core tokens. The compact cache is small: use "
    "cache_implementation='dynamic' or 'static'."
)


class CCALayer(CacheLayerMixin):
    """One layer's compact cache, `compact`, behind transformers' interface.

    transformers calls `update` to store new keys and values. Here it stores nothing: the attention
    function, which also has the queries, appends them. Lengths include padding, as in `generate`.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False
    is_attended = False
    """Whether the call in progress has CCA's attention, which appends the tokens."""
    is_alone = True
    """Whether all layers have CCA's attention; sliding-window layers would take the size of their
    mask from this one."""

    def __init__(self, config: CCAConfig, rotary: Rotary | None, **options: Any) -> None:
        super().__init__()
        self.compact = new_layer(config, rotary, **options)
        is_fixed = self.compact.max_length is not None
        self.is_compileable = is_fixed and not config.fetches_by_slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first append makes the buffers, whose size depends on its length."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Return the new tokens as they are: the attention function appends them.

        Raises:
            ValueError: the attention is not CCA's, as after `handle.disable()`.
        """
        if not self.is_attended:
            raise ValueError(
                "the cache must be one of the model's attention, got one that was made "
                "under CCA, which is not enabled. Start a new cache."
            )
        self.is_attended = False
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self) -> int | Tensor:
        """Return how many tokens were appended so far; a tensor for a fixed cache, so that compiled
        code does not depend on the number."""
        return self.compact.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of this layer's mask. Length 0 asks for none: for a single token
        the padding is known, and a mask that grows with every step would be compiled anew."""
        # mutant plug-in: padding read one token at a time
        if query_length == 1 and self.is_alone and self._needs_no_mask:
            return 0, 0
        if self.compact.max_length is not None:
            return self.compact.max_length, 0
        return self.compact.seen + query_length, 0

    @property
    def _needs_no_mask(self) -> bool:
        return not self.compact.is_empty and self.compact.padding_known

    def get_max_length(self) -> int:
        """Return the most tokens of a row, or -1 for a growing cache."""
        return -1 if self.compact.max_length is None else self.compact.max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Take back -tokens_to_remove tokens; a positive number is instead the length to keep."""
        if tokens_to_remove > 0:
            tokens_to_remove = min(0, tokens_to_remove - self.compact.seq_len)
        self.compact.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row by that of a beam, by index."""
        self.compact.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.compact.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows, by index or mask."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.compact.select(indices)

    def reset(self) -> None:
        """Forget all tokens."""
        self.compact.reset()

    def offload(self) -> None:
        """Refuse: transformers offloads after `update`, before the attention reads the cache."""
        raise NotImplementedError(OFFLOADED)

    @property
    def batch_size(self) -> int:
        """Return the rows, or -1 before the first append."""
        return len(self.compact.pads) or -1

    @property
    def nbytes(self) -> int:
        """Bytes in use on the device."""
        return self.compact.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes in use in host memory."""
        return self.compact.host_bytes


class GivenLayer(CCALayer):
    """A layer over an object that has `attend` and counts lengths itself, such as the server's rows
    of all requests."""

    def __init__(self, attention) -> None:
        CacheLayerMixin.__init__(self)
        self.compact = attention
        self.is_compileable = False

    def get_seq_length(self) -> int:
        """Return 0: rows differ in length, so the caller passes their positions."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length 0, which asks for no mask."""
        return 0, 0

    def get_max_length(self) -> int:
        """Return -1: each row has its own limit."""
        return -1


class GrowingCache(DynamicCache):
    """A growing cache for whoever knows how long a text will be, or counts the bytes of both
    memories: compact layers make room for a whole prompt at once, and raw tokens are where their
    settings say from the first one on.

    Args:
        config: The model's config.
        planned_length: Tokens of a row that will come, padding included.
    """

    def __init__(self, config: Any, planned_length: int) -> None:
        super().__init__(config=config)
        self.planned_length = planned_length


def compact_layer(
    cache: Cache, layer_idx: int, config: CCAConfig, rotary: Rotary | None, **options: Any
) -> CCALayer:
    """Return the compact cache of layer `layer_idx` in `cache`. The first call puts it there, in
    place of transformers' own empty layer.

    Args:
        options: `rollback`, tokens that the cache can always take back.

    Raises:
        ValueError: the cache already holds tokens of another attention, or was filled with another
            g or s.
        NotImplementedError: the cache is quantised or offloaded.
    """
    if getattr(cache, "offloading", False):
        raise NotImplementedError(OFFLOADED)
    while len(cache.layers) <= layer_idx and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if isinstance(layer, GivenLayer):
        return layer
    if isinstance(layer, CCALayer):
        if layer.compact.config is config or layer.compact.config == config:
            return layer
        if not layer.compact.is_empty:
            raise ValueError(
                f"a filled cache must keep its settings {layer.compact.config}, got {config}. "
                "Start a new cache for other settings."
            )
        length = layer.compact.max_length
    elif type(layer) not in (DynamicLayer, StaticLayer):
        raise NotImplementedError(
            f"a cache of layer type {type(layer).__name__} cannot hold core tokens. "
            "Use DynamicCache or StaticCache."
        )
    elif int(layer.get_seq_length()):
        raise ValueError(
            "the cache must be empty or made under CCA, got "
            f"{int(layer.get_seq_length())} tokens cached by another attention. Start a new cache."
        )
    else:
        length = getattr(layer, "max_cache_len", None)
    options["begins_on_device"] = not isinstance(cache, GrowingCache)
    layer = CCALayer(config, rotary, max_length=length, **options)
    if isinstance(cache, GrowingCache):
        layer.compact.plan(cache.planned_length)
    cache.layers[layer_idx] = layer
    return layer


def make_compact(cache: Cache) -> None:
    """Bring compact layers that hold few tokens as they are into their compact form."""
    for layer in cache.layers:
        if isinstance(layer, CCALayer):
            catch_up(parts_of(layer.compact))


def cache_bytes(cache: Cache) -> int:
    """Return the device's bytes in use by a cache of transformers, compact or not."""
    return sum(map(layer_bytes, cache.layers))


def host_bytes(cache: Cache) -> int:
    """Return the bytes in use in host memory by such a cache."""
    return sum(getattr(layer, "host_bytes", 0) for layer in cache.layers)


def layer_bytes(layer: CacheLayerMixin) -> int:
    """Return the bytes in use on the device by one layer of such a cache."""
    if hasattr(layer, "nbytes"):  # CCA's, or a rival's
        return layer.nbytes
    if layer.keys is None:
        return 0
    return layer.keys.nbytes + layer.values.nbytes
