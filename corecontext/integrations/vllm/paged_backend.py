"""Attend in vLLM from pages of raw tokens and of core tokens.

The attention layer's own cache is the window. Its core tokens are a second cache, an object of its
own in vLLM's table of layers, which is added when the weights have been loaded: then every layer
has a name, and vLLM has not asked for caches yet. Needs vLLM.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from corecontext.integrations.vllm.cache_specs import CoreSpec, WindowSpec
from corecontext.integrations.vllm.model_settings import settings_of, spec_of
from corecontext.integrations.vllm.page_layout import PageLayout
from corecontext.ops.triton import paged_chunk
from corecontext.ops.triton.paged import Batch, Pages
from corecontext.ops.triton.paged_attend import attend_pages
from corecontext.ops.triton.paged_chunk import (
    Part,
    attend_longest_chunk,
    attend_parts,
    parts_of,
)
from corecontext.ops.triton.paged_pool import pool_pages, store_tokens
from corecontext.ops.triton.pool import rotation_tables


class CoreContextBackend(AttentionBackend):
    """Name the parts of the backend and the inputs that it takes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM lists a backend of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CoreContextAttention]:
        """Return the class of a layer's attention."""
        return CoreContextAttention

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        """Return the class that describes a batch."""
        return BatchBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of a cache: pages of either kind, their keys before their values."""
        return (num_blocks, 2, num_kv_heads, block_size, head_size)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Return whether pages may come from elsewhere: first tokens would be lost."""
        return False


class StepMetadata(NamedTuple):
    """Describe the new tokens of a step for one of the two caches."""

    num_tokens: int
    """New tokens, with those that fill up a captured batch."""
    batch: Batch
    table: Tensor
    """Block table of the cache, [B, most pages]."""
    slots: Tensor
    """Places of the new tokens in a window cache, [num_tokens]."""
    parts: list[Part]
    """Long chunks of prompts and the sequences between them; empty without such chunks."""


class BatchBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Describe a step; the same for both caches but for the block table."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.most_decoded = 1 + num_drafts(vllm_config)
        # vLLM puts sequences with at most so many new tokens first, so that few parts are left.
        self.reorder_batch_threshold = self.most_decoded
        self.longest = vllm_config.model_config.max_model_len

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StepMetadata:
        """Return the description of a step; nothing is copied and nothing waits for the device."""
        common = common_attn_metadata
        longest = common.max_seq_len
        if common.max_query_len <= self.most_decoded:
            # A captured decoding step is replayed for any length, and the step that warms it up
            # must compile the kernels that it captures.
            longest = self.longest
        batch = Batch(common.query_start_loc, common.seq_lens, common.max_query_len, longest)
        count = common.num_actual_tokens
        slots = common.slot_mapping[:count]
        parts = []
        if common.max_query_len >= paged_chunk.LONG_CHUNK:
            # Exact for chunks of prompts; other sequences may be shorter than that.
            lengths = common.seq_lens_cpu_upper_bound.tolist()
            parts = parts_of(common.query_start_loc_cpu.tolist(), lengths, batch)
        return StepMetadata(count, batch, common.block_table_tensor, slots, parts)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> StepMetadata:
        """Return the description of a step to capture, whose sequences are short: captured programs
        read their lengths anew, and long ones would only take time."""
        metadata = self.build(0, common_attn_metadata)
        metadata.batch.lengths.fill_(metadata.batch.most_new)
        return metadata


class CoreCache(AttentionLayerBase):
    """Stand in vLLM's table of layers for the core tokens of an attention layer."""

    def __init__(self, layer_name: str, spec: CoreSpec) -> None:
        self.layer_name = layer_name
        self.spec = spec
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the backend, whose caches have one shape."""
        return CoreContextBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CoreSpec:
        """Return the description of the cache."""
        return self.spec


class CoreContextAttention(AttentionImpl[StepMetadata]):
    """Attend for one layer, and own its cache of core tokens."""

    OPTIONS = (
        "alibi_slopes",
        "sliding_window",
        "kv_cache_dtype",
        "logits_soft_cap",
        "attn_type",
        "kv_sharing_target_layer_name",
    )
    """Arguments of vLLM's backends after the first four, in order."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args, **kwargs
    ) -> None:
        """Read the settings of the model that is being built.

        Raises:
            ValueError: the model or the server has a setting that is not available.
        """
        options = {**dict(zip(self.OPTIONS, args)), **kwargs}
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads
        self.scale = float(scale)
        self.kv_cache_dtype = options.pop("kv_cache_dtype", "auto")
        softcap = options.pop("logits_soft_cap", None)
        attn_type = str(getattr(options.get("attn_type"), "value", options.get("attn_type")))
        options.pop("attn_type", None)
        given = [name for name, value in options.items() if value]
        if attn_type not in ("decoder", "None"):
            given.append(f"attn_type {attn_type}")
        if given:
            raise ValueError(
                f"layers must have plain causal attention for core context, got {', '.join(given)}."
                " Serve the model by `corecontext serve`, or without --attention-backend CUSTOM."
            )
        self.vllm_config = get_current_vllm_config()
        check_server(self.vllm_config)
        hf_config = self.vllm_config.model_config.hf_text_config
        self.config = settings_of(hf_config)
        self.spec = spec_of(hf_config, scale, softcap)
        self.cores: CoreCache | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Add the cache of core tokens to vLLM's table of layers; again where weights are loaded
        again."""
        layers = self.vllm_config.compilation_config.static_forward_context
        name, layer = next(
            (name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is self
        )
        layout = PageLayout.of(self.config, self.vllm_config.cache_config.block_size)
        shape: dict[str, Any] = {
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": layer.kv_cache_torch_dtype,
        }
        if self.config.core_mass:
            # A float for each core token behind the keys and values of a page.
            width = 2 * self.head_size * shape["dtype"].itemsize + 4
            shape["page_size_padded"] = layout.page_size * self.num_kv_heads * width
        window = WindowSpec.of(layout, num_drafts(self.vllm_config), **shape)
        layer.get_kv_cache_spec = partial(_spec_of_layer, window)
        if self.cores is None:
            self.cores = CoreCache(f"{name}.cores", CoreSpec.of(layout, **shape))
            layers[self.cores.layer_name] = self.cores

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StepMetadata | None,
        output: Tensor,
        **fused: Any,
    ) -> Tensor:
        """Store the new tokens, pool the groups that they complete, attend from them.

        Args:
            query: [tokens, H, D], rotary applied; key, value: [tokens, Hkv, D].
            kv_cache: Window pages, [P, 2, Hkv, E, D].
            attn_metadata: None in a run that only measures memory.
            output: [tokens, H, D], written in place.
            fused: Scales of an output in 8 bits, which vLLM leaves None for this backend.
        """
        if attn_metadata is None:
            self._prepare(query)
            return output.fill_(0)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, list):
            metadata = metadata[0]
        count = attn_metadata.num_tokens
        # Not kept between steps: vLLM frees the caches of the run that measures memory.
        has_mass = self.config.core_mass
        raw = pages_of(kv_cache, attn_metadata.table, has_mass)
        cores = pages_of(self.cores.kv_cache, metadata[self.cores.layer_name].table, has_mass)
        batch = attn_metadata.batch
        query = query[:count]
        store_tokens(key[:count], value[:count], attn_metadata.slots, raw)
        pool_pages(query, batch, raw, cores, self.spec)
        bias = self.config.core_bias
        out = output[:count]
        if attn_metadata.parts:
            attend_parts(query, attn_metadata.parts, raw, cores, self.spec, bias, out)
        else:
            attend_pages(query, batch, raw, cores, self.spec, bias, out)
        return output

    def _prepare(self, query: Tensor) -> None:
        """Take the memory of the longest chunk with so many new tokens, which vLLM measures, and
        make the tables that kernels need."""
        # A step that is captured later must find the tables of the rotation on its device.
        rotation_tables(self.spec.rotary, self.spec.group_size, query.device)
        if query.shape[0] >= paged_chunk.LONG_CHUNK:
            page_size = self.vllm_config.cache_config.block_size
            longest = self.vllm_config.model_config.max_model_len
            attend_longest_chunk(
                *(query, self.num_kv_heads, page_size, longest, self.spec, self.config.core_bias)
            )


def _spec_of_layer(spec: WindowSpec, vllm_config: VllmConfig) -> WindowSpec:
    """Return the description of a layer's window, in place of vLLM's for full attention."""
    return spec


def pages_of(cache: Tensor, table: Tensor, has_mass: bool) -> Pages:
    """Return a cache [P, 2, Hkv, E, D] as pages, with the masses behind their keys and values."""
    k = cache[:, 0].transpose(1, 2)
    v = cache[:, 1].transpose(1, 2)
    if not has_mass:
        return Pages(k, v, table)
    pages, _, heads, entries, _ = cache.shape
    stride = cache.stride(0) * cache.element_size() // 4
    first = stride - entries * heads
    numbers = torch.empty(0, dtype=torch.float32, device=cache.device)
    numbers.set_(cache.untyped_storage())
    first += cache.storage_offset() * cache.element_size() // 4
    mass = numbers.as_strided((pages, entries, heads), (stride, heads, 1), first)
    return Pages(k, v, table, mass)


def num_drafts(vllm_config: VllmConfig) -> int:
    """Return the tokens that a step may bring and reject."""
    speculation = vllm_config.speculative_config
    return 0 if speculation is None else speculation.num_speculative_tokens or 0


def check_server(vllm_config: VllmConfig) -> None:
    """Raise where an option of the server does not go with two caches a layer.

    Raises:
        ValueError: says which option to change.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError(
            "the hybrid KV cache manager must be on for core context: window and core tokens have "
            "a table each. Leave out --disable-hybrid-kv-cache-manager."
        )
    if vllm_config.kv_transfer_config is not None:
        raise ValueError(
            "kv_transfer_config must not be given with core context: its caches are not sent to "
            "other servers. Leave out --kv-transfer-config."
        )
    if vllm_config.use_v2_model_runner:
        raise ValueError(
            "vLLM's model runner must be V1 for core context, which has not run with V2. "
            "Set the environment variable VLLM_USE_V2_MODEL_RUNNER=0."
        )
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method != "ngram":
        raise ValueError(
            f"speculative method must be 'ngram' with core context, got {speculation.method!r}: a "
            "draft model would need caches of its own. Use --speculative-config with it."
        )
