"""Plan the caches of vLLM's attention layers, and the bytes of their pages.

vLLM gives each layer one cache. Here it holds the window, or with fetch from the device all raw
tokens. Core tokens have a second cache: a `LayerCache`, which vLLM takes for a further layer, since
it is in its table of layers. KV heads that keep every token have caches of their own, which several
layers may share. Needs vLLM.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec

from corecontext.integrations.vllm.cache_specs import CoreSpec, RawSpec, TokenSpec, WindowSpec
from corecontext.integrations.vllm.engine_options import num_drafts
from corecontext.integrations.vllm.host_pages import HostPages, HostTokens
from corecontext.integrations.vllm.page_layout import PageLayout, core_entries
from corecontext.integrations.vllm.raw_heads import RawShare
from corecontext.integrations.vllm.start_check import check_layout, check_start


class LayerCache(AttentionLayerBase):
    """Stand in vLLM's table of layers for a further cache of an attention layer.

    Args:
        layer_name: Its name in that table.
        spec: What vLLM is told of the cache.
        host_pages: Makes the raw tokens, for core tokens with fetch from host memory.
    """

    def __init__(
        self,
        layer_name: str,
        spec: AttentionSpec,
        backend: type[AttentionBackend],
        host_pages: HostPages | None = None,
    ) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self.backend = backend
        self.host_pages = host_pages
        self.host: HostTokens | None = None
        """Raw tokens in host memory."""
        self.slots: Tensor | None = None
        """Memory of their slots on the device, taken before vLLM measures what is left."""
        self.is_last = False
        """Whether it is that of the worker's last layer."""
        self.pages: Any = None
        """Views of this cache and of the layer's own, which the first step makes."""
        self.kv_cache = torch.tensor([])

    @property
    def kv_cache(self) -> Tensor:
        """The cache that vLLM made. When vLLM sets another, the views and the raw tokens of this
        one are freed, too."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: Tensor) -> None:
        self._kv_cache = kv_cache
        self.pages = None
        self.host = None

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the cache that vLLM made."""
        check_layout(kv_cache, self.spec)
        self.kv_cache = kv_cache
        if self.host_pages is not None:
            self.take_slots(kv_cache.device)
            self.host = self.host_pages.make(kv_cache, self.slots)

    def take_slots(self, device: torch.device) -> None:
        """Take the memory for slots, once."""
        if self.slots is None and self.host_pages is not None:
            self.slots = self.host_pages.slots(device)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the backend."""
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Return the description of the cache."""
        return self.spec


class LayerCaches(NamedTuple):
    """Hold the caches of a layer besides its own."""

    cores: LayerCache | None
    """None where all its heads keep every token: then it has no window either."""
    raw: list[tuple[Any, RawShare]]
    """Caches of heads that keep every token, and the places there of this layer's heads. A cache is
    a `LayerCache`, or a layer of vLLM whose own cache is used."""


class CacheSpecs(NamedTuple):
    """Describe the kinds of caches of a model."""

    window: WindowSpec | None
    """None with fetch from the device."""
    cores: CoreSpec
    raw: RawSpec | None = None
    """Of KV heads that keep every token; None without them."""
    tokens: TokenSpec | None = None
    """None but with fetch from the device."""


def plan_caches(layers: dict[int, Any], backend: type[AttentionBackend]) -> list[LayerCache]:
    """Plan the caches of the layers of a worker, set each layer's description and `impl.caches`,
    and return those to add to vLLM's table of layers.

    A layer's own cache is its window. A layer that has no core tokens lends its own cache to heads
    that keep every token, maybe those of other layers.

    Args:
        layers: vLLM's attention layers, by number.
        backend: That of the added caches.

    Raises:
        ValueError: vLLM would keep other pages than planned.
    """
    first = next(iter(layers.values()))
    raw_heads = first.impl.raw_heads
    specs = cache_specs_of(first)
    check_start([spec for spec in specs if spec is not None])

    host_pages = None
    if first.impl.config.fetches_from_host:
        vllm_config = first.impl.vllm_config
        num_slots = first.impl.config.slots_for(vllm_config.model_config.max_model_len)
        host_pages = HostPages(vllm_config, specs.cores, len(layers), num_slots)

    # Windows and core tokens.
    cores: dict[int, LayerCache] = {}
    holders: list[Any] = []
    for number, layer in layers.items():
        if raw_heads.pools(number):
            layer.get_kv_cache_spec = partial(_spec_of_layer, specs.tokens or specs.window)
            name = f"{layer.layer_name}.cores"
            cores[number] = LayerCache(name, specs.cores, backend, host_pages)
        else:
            layer.get_kv_cache_spec = partial(_spec_of_layer, specs.raw)
            holders.append(layer)

    if cores:
        cores[max(cores)].is_last = True

    # Caches of heads that keep every token. Their names must have no second number between dots:
    # vLLM reads a layer's number from them.
    added = list(cores.values())
    shares: dict[int, list[RawShare]] = {}
    if specs.raw is not None:
        per_cache = specs.raw.num_kv_heads
        for cache in range(len(holders), -(-raw_heads.most(list(layers)) // per_cache)):
            added.append(LayerCache(f"{first.layer_name}.raw_{cache}", specs.raw, backend))
            holders.append(added[-1])
        rank = get_tensor_model_parallel_rank() if len(raw_heads.heads[0]) > 1 else 0
        shares = raw_heads.shares(list(layers), rank, per_cache)
    for number, layer in layers.items():
        raw = [(holders[share.cache], share) for share in shares.get(number, [])]
        layer.impl.caches = LayerCaches(cores.get(number), raw)
    return added


def cache_specs_of(layer: Any) -> CacheSpecs:
    """Return the descriptions of the caches that vLLM's layers have, all like this one."""
    impl = layer.impl
    page_size = impl.vllm_config.cache_config.block_size
    dtype = layer.kv_cache_torch_dtype
    shape: dict[str, Any] = {
        "num_kv_heads": impl.num_kv_heads,
        "head_size": impl.head_size,
        "dtype": dtype,
    }
    if impl.config.fetch_groups:
        tokens = TokenSpec(block_size=page_size, **shape)
        entries = core_entries(impl.config, page_size, impl.head_size, dtype.itemsize)
        padded = {**shape, "page_size_padded": tokens.page_size_bytes}
        layout = PageLayout.of(impl.config, page_size, entries)
        cores = CoreSpec.of(layout, is_complete_later=impl.config.fetches_from_host, **padded)
        if not impl.config.fetches_from_host:
            return CacheSpecs(None, cores, tokens=tokens)
        return CacheSpecs(WindowSpec.of(layout, num_drafts(impl.vllm_config), **shape), cores)
    layout = PageLayout.of(impl.config, page_size)
    if impl.config.core_mass:
        # A float for each core token behind the keys and values of a page.
        width = 2 * impl.head_size * dtype.itemsize + 4
        shape["page_size_padded"] = page_size * impl.num_kv_heads * width
    window = WindowSpec.of(layout, num_drafts(impl.vllm_config), **shape)
    cores = CoreSpec.of(layout, **shape)
    raw = None
    if impl.raw_heads.most(range(len(impl.raw_heads.heads))):
        per_cache = impl.raw_heads.per_cache(page_size, layout.group_size)
        page_tokens = page_size * impl.num_kv_heads // per_cache
        raw = RawSpec(block_size=page_tokens, **{**shape, "num_kv_heads": per_cache})
    return CacheSpecs(window, cores, raw)


def _spec_of_layer(spec: AttentionSpec, vllm_config: VllmConfig) -> AttentionSpec:
    """Return the description of a layer's first cache, in place of vLLM's for full attention."""
    return spec
