"""Attend in vLLM from pages of raw tokens and of core tokens.

A layer attends to its core tokens and the window, then, from KV heads that keep every token, to all
tokens. With fetch it has all raw tokens: a prompt sees the past by the rule of prompts
(`ops/fetch/prompt_rule.py`), and each token of an answer by its own choice. `cache_plan.py` plans
the caches. Needs vLLM.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from corecontext.integrations.vllm.cache_plan import LayerCaches, plan_caches
from corecontext.integrations.vllm.cache_specs import CoreSpec, WindowSpec
from corecontext.integrations.vllm.engine_options import check_server, num_drafts
from corecontext.integrations.vllm.fetch_pages import index_pages_of
from corecontext.integrations.vllm.model_settings import raw_heads_of, settings_of, spec_of
from corecontext.integrations.vllm.raw_heads import RawShare
from corecontext.integrations.vllm.row_buffers import RowBuffers
from corecontext.integrations.vllm.shared_chunks import (
    attend_longest,
    attend_sharing,
    compile_for_any_length,
)
from corecontext.integrations.vllm.start_check import check_group, check_table
from corecontext.integrations.vllm.whole_prompts import flash_attention
from corecontext.ops.capability import is_captured
from corecontext.ops.fetch.prompt_rule import NO_END, reading_of
from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged import chunk as paged_chunk
from corecontext.ops.triton.paged.attend_pages import (
    attend_pages,
    compile_for_any_batch,
    compile_merges,
)
from corecontext.ops.triton.paged.attend_rows import MOST_PARTS, Work, attend_rows, rotations_of
from corecontext.ops.triton.paged.batch_parts import AttendWhole, Kind, Part, attend_parts, parts_of
from corecontext.ops.triton.paged.chunk import attend_longest_chunk, compile_chunk
from corecontext.ops.triton.paged.first_prompt import compile_for_any_prompt
from corecontext.ops.triton.paged.group_slots import FarPages
from corecontext.ops.triton.paged.pages import Batch, IndexPages, Pages
from corecontext.ops.triton.paged.pool_pages import PoolPlan, pool_pages
from corecontext.ops.triton.paged.store_tokens import store_tokens
from corecontext.ops.triton.paged.token_rows import Rows
from corecontext.ops.triton.pool.launcher import rotation_tables
from corecontext.visibility import first_core_query


class CoreContextBackend(AttentionBackend):
    """Name the parts of the backend and the inputs that it takes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM has for a backend that is not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CoreContextAttention]:
        """Return the class of a layer's attention."""
        return CoreContextAttention

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        """Return the class that describes a batch."""
        return BatchBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layouts of caches that have a layer's pages one after the other, each in one
        piece; in vLLM's names L is layers, B pages, H heads, N entries, C elements."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return whether the device may know fewer drafts of a step than the CPU: no, since the CPU
        splits the step."""
        return False


class StepMetadata(NamedTuple):
    """Describe the new tokens of a step for one cache of a layer."""

    num_tokens: int
    """New tokens, those included that only fill up a captured batch."""
    batch: Batch
    table: Tensor
    """Block table of the cache, [B, most pages]."""
    slots: Tensor
    """vLLM's slot mapping, [num_tokens]: the place of each new token in the cache, page times
    tokens of a page plus entry, -1 for none."""
    parts: list[Part]
    """The batch by kinds of sequences; empty where one launch takes all of them."""
    attend_whole: AttendWhole | None
    """vLLM's FlashAttention for whole prompts; None without it."""
    rows: Rows | None = None
    """The new tokens one by one, with fetch."""


class BatchBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Describe a step for one kind of cache: only block table and slots differ between them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        table = vllm_config.compilation_config.static_forward_context
        self.host_pages = None
        for layer in map(table.get, layer_names):
            check_group(kv_cache_spec, layer.get_kv_cache_spec(vllm_config))
            self.host_pages = getattr(layer, "host_pages", None)
        # Only window pages hold first tokens, which the runner might not pass on.
        self.is_checked = not (
            isinstance(kv_cache_spec, WindowSpec) and kv_cache_spec.layout.sink_pages
        )
        self.most_decoded = 1 + num_drafts(vllm_config)
        # vLLM puts sequences with at most so many new tokens first, so that a step has few parts.
        self.reorder_batch_threshold = self.most_decoded
        self.longest = vllm_config.model_config.max_model_len
        config = settings_of(vllm_config.model_config.hf_text_config)
        dtype, head_size = vllm_config.model_config.dtype, kv_cache_spec.head_size
        self.attend_whole = flash_attention(dtype, head_size, device)
        self.rows = None
        self.full_until = NO_END
        self.most_whole = 0
        if config.fetch_groups and not isinstance(kv_cache_spec, CoreSpec):
            self.full_until = reading_of(config, device.type, True).full_until
            self.rows = RowBuffers(vllm_config, device, self.full_until)
            if config.fetches_from_host:
                # All other chunks are SHARING: their kernels gather the tokens before them.
                self.most_whole = self.full_until if self.attend_whole else 0
                self.full_until = 0
            elif kv_cache_spec.block_size % 16:  # a page of FlashAttention's
                self.attend_whole = None
        # A step is split into parts if some sequence has so many new tokens.
        self.shortest = paged_chunk.LONG_CHUNK
        if config.fetch_groups:
            self.shortest = self.most_decoded + 1
        elif self.attend_whole is not None:
            self.most_whole = first_core_query(config.group_size, config.window_size)
            self.shortest = self.most_decoded + 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StepMetadata:
        """Return the description of a step; nothing is copied and nothing waits for the device."""
        common = common_attn_metadata
        if self.host_pages is not None:
            self.host_pages.writes.wait()
        if not self.is_checked:
            rows = (common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound)
            layout = self.kv_cache_spec.layout
            self.is_checked = check_table(common.block_table_tensor, *rows, layout)
        longest = common.max_seq_len
        if common.max_query_len <= self.most_decoded:
            # A captured decoding step is replayed for any length, and the step that warms it up
            # must compile the kernels that it captures.
            longest = self.longest
        batch = Batch(common.query_start_loc, common.seq_lens, common.max_query_len, longest)
        count = common.num_actual_tokens
        slots = common.slot_mapping[:count]
        table = common.block_table_tensor
        # Of the cache of core tokens a layer reads only the table and the slots.
        parts = [] if isinstance(self.kv_cache_spec, CoreSpec) else self._parts(common, batch)
        rows = None
        if self.rows is not None:
            rows = self.rows.write(common, batch)
        return StepMetadata(count, batch, table, slots, parts, self.attend_whole, rows)

    def _parts(self, common: CommonAttentionMetadata, batch: Batch) -> list[Part]:
        """Return the parts of a step; none where it has neither long chunks nor whole prompts, nor
        fetch: then one launch takes all of its sequences."""
        if common.max_query_len < self.shortest:
            return []
        starts = common.query_start_loc_cpu.tolist()
        # Exact for chunks of prompts; too large for some other sequences.
        lengths = common.seq_lens_cpu_upper_bound.tolist()
        sizes = (self.most_decoded, self.most_whole, self.full_until)
        split = parts_of(starts, lengths, batch, *sizes)
        if self.rows is not None:
            return split
        return split if {part.kind for part in split} & {Kind.LONG, Kind.WHOLE} else []

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> StepMetadata:
        """Return the description of a step to capture, with lengths of a few tokens: a replay reads
        its own lengths, and long ones would only make the capture slow."""
        metadata = self.build(0, common_attn_metadata)
        metadata.batch.lengths.fill_(metadata.batch.most_new)
        return metadata


class CoreContextAttention(AttentionImpl[StepMetadata]):
    """Attend for one layer, and own its caches besides the first, which vLLM's layer owns."""

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
        hf_config = self.vllm_config.model_config.hf_text_config
        self.config = settings_of(hf_config)
        check_server(self.vllm_config, self.config)
        self.spec = spec_of(hf_config, scale, softcap)
        # With a window of the longest sequence no query sees a core token.
        self.longest = self.vllm_config.model_config.max_model_len
        self.raw_spec = self.spec.replace(window_size=self.longest, sink_size=0, core_mass=False)
        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        self.raw_heads = raw_heads_of(hf_config, ranks)
        self.caches: LayerCaches | None = None
        self.most_decoded = 1 + num_drafts(self.vllm_config)
        self.is_prepared = False
        self.is_compiled = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Plan the caches of all layers of this worker, once; by now each has a name in vLLM's
        table, and vLLM has not asked for caches yet."""
        if self.caches is None:
            table = self.vllm_config.compilation_config.static_forward_context
            layers = {
                extract_layer_index(name): layer
                for name, layer in table.items()
                if isinstance(getattr(layer, "impl", None), CoreContextAttention)
            }
            added = plan_caches(layers, CoreContextBackend)
            table.update((cache.layer_name, cache) for cache in added)

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
            kv_cache: The layer's own cache, [P, Hkv, E, 2 D], keys before values.
            attn_metadata: That of the layer's own cache; None in a run that only measures memory.
            output: [tokens, H, D], written in place.
            fused: Scales of an output in 8 bits, which vLLM leaves None for this backend.
        """
        if attn_metadata is None:
            self._prepare(query)
            return output.fill_(0)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, list):
            metadata = metadata[0]
        compiles = not self.is_compiled and not is_captured(query.device)
        count = attn_metadata.num_tokens
        tensors = (query, key, value, output)
        if count < query.shape[0]:  # to take a part takes the host longer than it seems
            tensors = (query[:count], key[:count], value[:count], output[:count])
        if self.caches.cores is not None:
            cores = self.caches.cores
            raw = (kv_cache, attn_metadata)
            cores = (cores.kv_cache, metadata[cores.layer_name])
            if self.spec.fetch_groups:
                self._attend_fetched(*tensors, raw, cores, compiles)
            else:
                self._attend_compact(*tensors, raw, cores, compiles)
        for cache, share in self.caches.raw:
            of_cache = (cache.kv_cache, metadata[cache.layer_name])
            self._attend_raw(*tensors, *of_cache, share, compiles)
        self.is_compiled |= compiles
        return output

    def _pages(
        self,
        raw: tuple[Tensor, StepMetadata],
        cores: tuple[Tensor, StepMetadata],
        dtype: torch.dtype,
    ) -> tuple[Pages, Pages, IndexPages | None, FarPages | None, PoolPlan]:
        """Return the pages of raw tokens and of core tokens; with fetch the index, for queries of
        this dtype, and the raw tokens in host memory; and how groups are pooled among them.

        Views are made once, since that takes the host longer than a launch; only the block tables
        are those of the step.
        """
        cache = self.caches.cores
        if cache.pages is None:
            page_bytes = cache.spec.page_size_bytes if self.config.core_mass else None
            index = index_pages_of(cores[0], dtype, self.spec) if self.spec.fetch_groups else None
            placed = pages_of(cores[0], cores[1].table, page_bytes)
            host = None
            if cache.host is not None:
                host = FarPages(pages_of(cache.host.tokens, cores[1].table), cache.host.slots)
            of_raw = pages_of(raw[0], raw[1].table)
            plan = PoolPlan.of(of_raw, placed, self.spec, self.num_heads, index, host)
            cache.pages = (of_raw, placed, index, host, plan)
        raw_pages, core_pages, index, host, plan = cache.pages
        table = cores[1].table
        host = host and host._replace(pages=host.pages._replace(table=table))
        raw_pages = raw_pages._replace(table=raw[1].table)
        return raw_pages, core_pages._replace(table=table), index, host, plan

    def _attend_compact(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        window: tuple[Tensor, StepMetadata],
        cores: tuple[Tensor, StepMetadata],
        compiles: bool,
    ) -> None:
        """Attend to core tokens and the window, from all heads: those that keep every token are
        overwritten later. To leave them out would need a copy of queries, keys and values, and the
        pages have room for them.
        """
        step = window[1]
        raw, cores, _, _, plan = self._pages(window, cores, query.dtype)
        if compiles:
            compile_for_any_batch(query, raw, cores, self.spec)
            compile_for_any_prompt(query, (key, value, step.slots), raw, cores, self.spec)
        new = (key, value, step.slots)
        pool_pages(query, new, step.batch, (raw.table, cores.table), plan)
        tokens = (query, key, value)
        attend_step(tokens, step, (raw, cores), self.spec, out)

    def _attend_fetched(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        raw: tuple[Tensor, StepMetadata],
        cores: tuple[Tensor, StepMetadata],
        compiles: bool,
    ) -> None:
        """Attend from prompts by their rule, and from each token of an answer by its own choice."""
        step = raw[1]
        core_slots = cores[1].slots
        raw, cores, index, host, plan = self._pages(raw, cores, query.dtype)
        if compiles:
            of_pages = (raw, cores, self.spec, index, host)
            compile_for_any_prompt(query, (key, value, step.slots), *of_pages)
            if host is None and step.attend_whole is None:
                compile_for_any_batch(query, raw, raw, self.raw_spec)
                compile_chunk((query, key, value), raw, raw, self.raw_spec)
        new = (key, value, step.slots)
        stores_far = host is not None and step.batch.most_new <= self.most_decoded
        pool_pages(query, new, step.batch, (raw.table, cores.table), plan, stores_far)

        def choose(tokens: slice) -> None:
            rows = step.rows.part(tokens)
            q, results = query[tokens], out[tokens]
            attend_rows(q, rows, (raw, cores), index, self.longest, self.spec, results, host)

        if not step.parts:
            choose(slice(None))
        for run in step.parts:
            q, k, v, results = query, key, value, out
            if len(step.parts) > 1:
                q, k, v, results = (x[run.tokens] for x in (query, key, value, out))
            if run.kind is Kind.DECODING:
                choose(run.tokens)
            elif run.kind is Kind.SHARING:
                pages, slots = host or (raw, None)
                pages = [x._replace(table=x.table[run.sequences]) for x in (pages, cores)]
                reading = reading_of(self.config, query.device.type, True)
                attend_sharing((q, k, v), run.past, pages, self.spec, reading, results, slots)
            elif run.kind is Kind.WHOLE:
                step.attend_whole(q, k, v, run.batch, self.spec, results)
            elif step.attend_whole is not None:
                table = raw.table
                # A part only where it is one: to take it costs each layer of a short prompt.
                if run.batch.lengths.shape[0] < table.shape[0]:
                    table = table[run.sequences]
                step.attend_whole(q, raw.k, raw.v, run.batch, self.spec, results, table)
            else:
                tokens = (query, key, value)
                attend_parts(tokens, [run], raw, raw, self.raw_spec, out)
        if host is not None and not stores_far:
            # Behind attention, which has launches that wait for single programs.
            cache = self.caches.cores
            slots = (step.slots, core_slots)
            cache.host_pages.writes.store(new[:2], slots, (raw, host.pages), cache.is_last)

    def _attend_raw(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        cache: Tensor,
        step: StepMetadata,
        share: RawShare,
        compiles: bool,
    ) -> None:
        """Attend to every token from the query heads of some KV heads, in place of what `out` has
        of them."""
        pages = pages_of(cache[:, share.first : share.first + len(share.heads)], step.table)
        query, key, value = (self._select(x, share.heads) for x in (query, key, value))
        if compiles:
            compile_for_any_batch(query, pages, pages, self.raw_spec)
            compile_chunk((query, key, value), pages, pages, self.raw_spec)
        store_tokens(key, value, step.slots, pages)
        results = torch.empty_like(query, memory_format=torch.contiguous_format)
        attend_step((query, key, value), step, (pages, pages), self.raw_spec, results)
        width = self.num_heads // self.num_kv_heads
        for head, rows in zip(share.heads, results.split(width, 1)):
            out[:, head * width : (head + 1) * width] = rows

    def _select(self, x: Tensor, heads: tuple[int, ...]) -> Tensor:
        """Return the part of queries, keys or values [T, heads, D] that belongs to some KV heads; a
        view where these are neighbours."""
        width = x.shape[1] // self.num_kv_heads
        if heads[-1] - heads[0] == len(heads) - 1:
            return x[:, heads[0] * width : (heads[-1] + 1) * width]
        return torch.cat([x[:, head * width : (head + 1) * width] for head in heads], 1)

    def _prepare(self, query: Tensor) -> None:
        """Take the most memory that a chunk of so many new tokens may need, which vLLM measures,
        and make the tables that kernels read."""
        # A step that is captured later must find the tables of the rotation on its device.
        rotation_tables(self.spec.rotary, self.spec.group_size, query.device)
        if self.spec.fetch_groups:
            self._prepare_fetch(query)
            return
        if query.shape[0] < paged_chunk.LONG_CHUNK:
            return
        page_size = self.vllm_config.cache_config.block_size
        if self.caches.cores is not None:
            sizes = (self.num_kv_heads, page_size, self.longest)
            attend_longest_chunk(query, *sizes, self.spec)
        for _, share in self.caches.raw:
            sizes = (len(share.heads), page_size, self.longest)
            attend_longest_chunk(self._select(query, share.heads), *sizes, self.raw_spec)

    def _prepare_fetch(self, query: Tensor) -> None:
        """Take the memory of the last chunk of the longest prompt, then of a step in which the most
        requests decode."""
        reading = reading_of(self.config, query.device.type, True)
        sizes = (self.num_kv_heads, self.vllm_config.cache_config.block_size, self.longest)
        if reading.full_until < self.longest or self.config.fetches_from_host:
            attend_longest(query, *sizes, self.spec, reading)
        most = self.vllm_config.scheduler_config.max_num_seqs
        most *= 1 + num_drafts(self.vllm_config)
        self.caches.cores.take_slots(query.device)
        rotations_of(self.spec.index.bits, self.head_size, query.dtype, query.device)
        if self.caches.cores.is_last and not self.is_prepared:
            # Once, by one layer: all layers have the same kernels.
            compile_for_any_length(query, *sizes, self.spec, reading)
            compile_merges(query, self.num_kv_heads, MOST_PARTS)
            self.is_prepared = True
        Work.of(query[:most], self.num_kv_heads, self.longest, self.spec)


def attend_step(
    tokens: tuple[Tensor, Tensor, Tensor],
    step: StepMetadata,
    pages: tuple[Pages, Pages],
    spec: Spec,
    out: Tensor,
) -> None:
    """Attend from the new tokens of a step, queries [T, H, D], keys and values [T, Hkv, D], to
    pages of raw tokens and of core tokens that hold them, and write the output."""
    if step.parts:
        attend_parts(tokens, step.parts, *pages, spec, out, step.attend_whole)
    else:
        attend_pages(tokens[0], step.batch, *pages, spec, out)


def pages_of(cache: Tensor, table: Tensor, page_bytes: int | None = None) -> Pages:
    """Return a cache [P, Hkv, E, 2 D] as pages; given `page_bytes`, with the masses, which are the
    last bytes of each page."""
    k, v = cache.transpose(1, 2).chunk(2, -1)
    if page_bytes is None:
        return Pages(k, v, table)
    pages, heads, entries, _ = cache.shape
    stride = cache.stride(0) * cache.element_size() // 4
    first = (cache.storage_offset() * cache.element_size() + page_bytes) // 4 - entries * heads
    numbers = torch.empty(0, dtype=torch.float32, device=cache.device)
    numbers.set_(cache.untyped_storage())
    mass = numbers.as_strided((pages, entries, heads), (stride, heads, 1), first)
    return Pages(k, v, table, mass)
