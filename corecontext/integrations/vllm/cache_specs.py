"""Describe the caches of a layer to vLLM: raw tokens of the window, core tokens, and all tokens of
KV heads that keep every token.

vLLM has one pool of pages for all caches, so all kinds have pages of the same bytes: a window page
holds E tokens, a core page E core tokens, which stand for g E tokens. A page of few heads that keep
every token holds as many more tokens as there are fewer heads. Needs vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

from corecontext.integrations.vllm.page_layout import PageLayout


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """Describe the cache of raw tokens: those that the next query reads, and the first ones."""

    layout: PageLayout
    drafts: int = 0
    """Tokens that vLLM may count as computed before it rejects them (speculative decoding)."""

    @classmethod
    def of(cls, layout: PageLayout, drafts: int, **shape) -> WindowSpec:
        """Make the spec of a layout; shape is num_kv_heads, head_size and dtype."""
        return cls(
            block_size=layout.page_size,
            sliding_window=layout.window_tokens,
            layout=layout,
            drafts=drafts,
            **shape,
        )

    @property
    def num_retained_tokens(self) -> int:
        """Tokens below a step's first position behind which vLLM's runner drops pages: 0 keeps them
        all, first tokens too."""
        return 0

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Return the most pages of a request, as vLLM reserves them; tokens are in flight from the
        time that a step brings them until the next steps know its outcome."""
        return self.layout.most_window_pages(max_in_flight_tokens + self.drafts, max_model_len)


@dataclass(frozen=True, kw_only=True)
class CoreSpec(FullAttentionSpec):
    """Describe the cache of core tokens; `block_size` is the tokens that a page stands for."""

    @classmethod
    def of(cls, layout: PageLayout, **shape) -> CoreSpec:
        """Make the spec of a layout; shape is num_kv_heads, head_size and dtype."""
        g = layout.group_size
        return cls(block_size=layout.core_page_tokens, tokens_per_state=g, **shape)


@dataclass(frozen=True, kw_only=True)
class RawSpec(AttentionSpec):
    """Describe a cache of KV heads that keep every token, with fetch all of them.

    It is no FullAttentionSpec, as `CoreSpec` is: of several kinds of these, vLLM cuts the pages of
    the first alone to the beginning that a request shares in all caches.
    """

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest request."""
        longest = vllm_config.model_config.max_model_len
        return -(-longest // self.block_size) * self.page_size_bytes

    def as_full_attention(self) -> FullAttentionSpec:
        """Return vLLM's description of such a cache."""
        shape = {"num_kv_heads": self.num_kv_heads, "head_size": self.head_size}
        return FullAttentionSpec(block_size=self.block_size, dtype=self.dtype, **shape)
