"""Manage the pages of a request in vLLM: which are dropped, and which a later request shares whose
text begins alike. Needs vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from corecontext.integrations.vllm.cache_specs import CoreSpec, RawSpec, TokenSpec, WindowSpec


class WindowManager(SlidingWindowManager):
    """Manage window pages: as those of a sliding window, but keep those of first tokens."""

    kv_cache_spec: WindowSpec

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the first token behind the sinks that later steps read."""
        certain = max(0, num_computed_tokens - self.kv_cache_spec.drafts)
        return self.kv_cache_spec.layout.first_kept(certain)

    def remove_skipped_blocks(
        self, request_id: str, processed_tokens: int, *prompt_tokens: int | None
    ) -> None:
        """Drop the pages that no step after `processed_tokens` tokens reads."""
        pages = self.req_to_blocks[request_id]
        skipped = self.get_num_skipped_tokens(processed_tokens) // self.block_size
        last = min(skipped, len(pages)) - 1
        sink_pages = self.kv_cache_spec.layout.sink_pages
        # In most decoding steps the window begins in the same page as before.
        if last < sink_pages or pages[last] is self._null_block:
            return
        # vLLM drops pages from the window backwards, until it meets the empty page.
        first = pages[:sink_pages]
        pages[: len(first)] = [self._null_block] * len(first)
        super().remove_skipped_blocks(request_id, processed_tokens, *prompt_tokens)
        pages[: len(first)] = first

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args,
        **kwargs,
    ) -> int:
        """Count the free pages that a step takes; shared pages of no request are free, too."""
        if not new_computed_blocks:
            pages = self.req_to_blocks.get(request_id, ())
            if num_tokens <= len(pages) * self.block_size:
                return 0  # as in most decoding steps
        count = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )
        first = self._first_of(new_computed_blocks, total_computed_tokens)
        return count + self._get_num_evictable_blocks(first)

    def add_local_computed_blocks(
        self, request_id: str, pages: Sequence[KVCacheBlock], local: int, external: int
    ) -> None:
        """Give a new request the pages that it shares with an earlier one: vLLM's, and then those
        of first tokens, for which vLLM has put empty ones.

        Args:
            request_id: The request.
            pages: Pages of the shared beginning.
            local: Its tokens.
            external: Tokens from other servers.
        """
        first = self._first_of(pages, local)
        self.block_pool.touch(first)
        super().add_local_computed_blocks(request_id, pages, local, external)
        self.req_to_blocks[request_id][: len(first)] = first

    def _first_of(self, pages: Sequence[KVCacheBlock], computed: int) -> Sequence[KVCacheBlock]:
        """Return the pages of first tokens that vLLM would drop after so many tokens."""
        dropped = self.get_num_skipped_tokens(computed) // self.block_size
        return pages[: min(dropped, self.kv_cache_spec.layout.sink_pages)]

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: WindowSpec,
        *args,
        **kwargs,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Return the pages of the longest cached beginning, for each group of layers, and how many
        tokens it has; it needs its first pages, too."""
        sizes = (block_pool.hash_block_size, kv_cache_spec.block_size)
        block_hashes = resolve_block_hashes(block_hashes, *sizes)
        shared, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
        )
        for number in range(min(kv_cache_spec.layout.sink_pages, len(shared[0]))):
            cached = block_pool.get_cached_block(block_hashes[number], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in kv_cache_group_ids), 0
            for pages, page in zip(shared, cached):
                pages[number] = page
        return shared, length

    @classmethod
    def reachable_block_mask(
        cls, start_block: int, end_block: int, *args, kv_cache_spec: WindowSpec, **kwargs
    ) -> list[bool] | None:
        """Return which of some pages a shared beginning may need: vLLM's and the first ones; None
        for all."""
        mask = super().reachable_block_mask(
            start_block, end_block, *args, kv_cache_spec=kv_cache_spec, **kwargs
        )
        if mask is not None:
            for number in range(start_block, min(kv_cache_spec.layout.sink_pages, end_block)):
                mask[number - start_block] = True
        return mask


class CoreManager(FullAttentionManager):
    """Manage pages of core tokens, or of all tokens: as those of full attention, each shared as a
    whole."""

    supports_fine_grained_hash_lookup = False

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.is_complete_later = getattr(self.kv_cache_spec, "is_complete_later", False)
        self.unfinished: set[int] = set()
        """Pages that this step fills, if they are complete at its end only."""

    def new_step_starts(self) -> None:
        """Forget the pages of the step before."""
        self.unfinished.clear()

    def cache_blocks(self, request: Request, num_tokens: int, *args, **kwargs) -> None:
        """Offer a request's full pages to later ones."""
        name = request.request_id
        first = self.num_cached_block.get(name, 0)
        super().cache_blocks(request, num_tokens, *args, **kwargs)
        if self.is_complete_later:
            pages = self.req_to_blocks[name][first : self.num_cached_block.get(name, 0)]
            self.unfinished.update(page.block_id for page in pages)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args,
        **kwargs,
    ) -> int:
        """Count the free pages that a step takes: more than there are for a request that shares
        pages which this step fills, so that vLLM takes it in the next one."""
        if any(page.block_id in self.unfinished for page in new_computed_blocks):
            return self.block_pool.num_gpu_blocks + 1
        return super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, *args, **kwargs
        )

    def _cache_partial_tail_block(self, *args) -> None:
        """Leave out the page at a prompt's end, whose last group may be half pooled."""


class RawManager(CoreManager):
    """Manage the pages of KV heads that keep every token."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: RawSpec,
        *args,
        **kwargs,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Return the pages of the longest cached beginning of at most `max_length` tokens, and how
        many it has."""
        spec = kv_cache_spec.as_full_attention()
        return super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, spec, *args, **kwargs
        )


def register_cache_specs() -> None:
    """Register the caches with vLLM; more than once has no further effect."""
    # A registry that is not empty keeps vLLM from registering its own.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(WindowSpec, WindowManager, uniform_type_base_spec=WindowSpec)
    KVCacheSpecRegistry.register(CoreSpec, CoreManager, uniform_type_base_spec=CoreSpec)
    KVCacheSpecRegistry.register(TokenSpec, CoreManager, uniform_type_base_spec=TokenSpec)
    KVCacheSpecRegistry.register(RawSpec, RawManager, uniform_type_base_spec=RawSpec)
