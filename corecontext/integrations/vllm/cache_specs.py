"""Describe the caches of a layer to vLLM: raw tokens of the window or, with fetch from the device,
all of them; core tokens; and all tokens of KV heads that keep every token.

vLLM has one pool of pages for all caches, so pages of all kinds have the same bytes. A window page
holds E tokens; a core page E core tokens, which stand for g E tokens; a page of heads that keep
every token holds more tokens if it has fewer heads. Needs vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

from corecontext.integrations.vllm.page_layout import PageLayout


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """Describe the cache of raw tokens: the first ones, and those that the next query reads."""

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
        """How many tokens before a step's first one keep their pages in vLLM's runner; 0 keeps all,
        first tokens too."""
        return 0

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Return the most pages of a request, which vLLM reserves. Tokens are in flight from the
        step that reads them until later steps know its outcome."""
        return self.layout.most_window_pages(max_in_flight_tokens + self.drafts, max_model_len)


@dataclass(frozen=True, kw_only=True)
class CoreSpec(FullAttentionSpec):
    """Describe the cache of core tokens; `block_size` counts the tokens that a page stands for."""

    is_complete_later: bool = False
    """Whether what a step writes is complete at its end only: raw tokens in host memory."""

    @classmethod
    def of(cls, layout: PageLayout, **shape) -> CoreSpec:
        """Make the spec of a layout; shape is num_kv_heads, head_size, dtype and other fields."""
        g = layout.group_size
        return cls(block_size=layout.core_page_tokens, tokens_per_state=g, **shape)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """How many bytes of a page vLLM offloads: all, since index and masses are behind keys and
        values."""
        return self.page_size_padded or super().unpadded_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class TokenSpec(FullAttentionSpec):
    """Describe the cache of all tokens of all KV heads, with fetch from the device."""


@dataclass(frozen=True, kw_only=True)
class RawSpec(AttentionSpec):
    """Describe a cache of KV heads that keep every token, beside a window.

    It is no FullAttentionSpec, as `CoreSpec` is. Where a request shares a beginning, vLLM cuts the
    pages of such specs to the tokens that all caches have, but only for the first kind of them.
    """

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest request."""
        longest = vllm_config.model_config.max_model_len
        return -(-longest // self.block_size) * self.page_size_bytes

    def as_full_attention(self) -> FullAttentionSpec:
        """Return vLLM's description of such a cache."""
        shape = {"num_kv_heads": self.num_kv_heads, "head_size": self.head_size}
        return FullAttentionSpec(block_size=self.block_size, dtype=self.dtype, **shape)
