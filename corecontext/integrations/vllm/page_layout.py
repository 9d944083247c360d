"""Place raw tokens and core tokens in pages: which of them a request keeps, writes and reads.

A request has two block tables. Window pages hold raw tokens: the token at position p is entry p mod
E of page p // E, and pages that no later query reads are dropped. Core pages hold core tokens: the
core token of group c is entry c mod E of page c // E. So a core page covers g E tokens; it has the
bytes of a window page. First tokens stay raw in the first window pages, and the entries of their
groups in the first core page stay empty. So a page's contents depend on its own tokens and those
before them only, and requests that begin alike can share pages of both kinds. With fetch a core
page also holds an index and has fewer entries; with fetch from the device no raw token is dropped.

The functions take whole numbers; which entries a query sees is the rule of `visibility.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from corecontext.config import CCAConfig
from corecontext.ops.fetch.index import index_of
from corecontext.visibility import local_start, num_sinks, num_visible_cores, window_capacity

SLOTS_SHARE = 0.1
"""Slots of groups take at most this share of the memory that vLLM may use."""


class Reads(NamedTuple):
    """Hold the numbers, from 0, of the tokens and groups that one query reads, no token twice."""

    sinks: range
    """First raw tokens before the window."""
    cores: range
    """Groups read as core tokens."""
    raw: range
    """Raw tokens of the window, the query's own included."""


@dataclass(frozen=True)
class PageLayout:
    """Describe how the cache of one layer is paged."""

    group_size: int
    """Tokens per core token (g)."""
    window_size: int
    """Nearest tokens that every query sees raw (s)."""
    sinks: int
    """First tokens kept raw, a multiple of g (n)."""
    page_size: int
    """Entries of a page of either kind (E)."""
    core_entries: int = 0
    """Entries of a core page with fetch, where they are fewer; 0 for E."""

    @classmethod
    def of(cls, config: CCAConfig, page_size: int, core_entries: int = 0) -> PageLayout:
        """Make the layout for a model's settings."""
        g = config.group_size
        sinks = num_sinks(config.sink_size, g)
        return cls(g, config.window_size, sinks, page_size, core_entries)

    @property
    def core_page_tokens(self) -> int:
        """Tokens that a core page stands for; the length of a shared beginning is a multiple."""
        return self.group_size * (self.core_entries or self.page_size)

    @property
    def sink_pages(self) -> int:
        """Window pages that are never dropped, the first ones."""
        return -(-self.sinks // self.page_size)

    @property
    def window_tokens(self) -> int:
        """Most raw tokens behind the sinks that the next query reads, its own included."""
        return window_capacity(self.group_size, self.window_size)

    def first_kept(self, computed: int) -> int:
        """Return the first raw token behind the sinks that steps after `computed` tokens read, for
        their queries and to pool groups."""
        # mutant vllm: a window page is dropped too early
        return local_start(computed, self.group_size, self.window_size)

    def window_pages(self, computed: int, total: int) -> list[int]:
        """Return the window pages, by number, that a request with `computed` tokens keeps or gets
        before the step that brings `total` tokens."""
        end = -(-total // self.page_size)
        first = max(self.sink_pages, self.first_kept(computed) // self.page_size)
        return [*range(min(self.sink_pages, end)), *range(first, end)]

    def most_window_pages(self, new_tokens: int, longest: int) -> int:
        """Return the most window pages that a request of up to `longest` tokens has in a step of up
        to `new_tokens`."""
        # At worst the first of these tokens is the last of its page.
        spanned = self.window_tokens - 1 + min(new_tokens, longest)
        pages = self.sink_pages + -(-(spanned - 1) // self.page_size) + 1
        return min(pages, -(-longest // self.page_size))

    def core_pages(self, total: int) -> range:
        """Return the core pages, by number, of a request with `total` tokens."""
        return range(-(-total // self.core_page_tokens))

    def cache_tokens(
        self, pages: int, length: int, new_tokens: int, groups: int = 1, raw_pages: int = 0
    ) -> int:
        """Return how many tokens `pages` pages hold, in requests of `length` tokens: one is in a
        step of `new_tokens`, the others decode.

        Args:
            groups: Groups into which vLLM splits the layers; each has window and core pages.
            raw_pages: Pages of a request for KV heads that keep every token.
        """
        most = groups * self.most_window_pages(new_tokens, length)
        usual = groups * self.most_window_pages(1, length)
        each = usual + groups * len(self.core_pages(length)) + raw_pages
        return max(0, (pages - most + usual) * length // each)

    def completed_groups(self, start: int, end: int) -> range:
        """Return the groups that tokens start .. end-1 complete, without those of first tokens: a
        step writes their core tokens."""
        first = max(start, self.sinks) // self.group_size
        return range(first, max(first, end // self.group_size))

    def reads(self, position: int) -> Reads:
        """Return the entries that the query at `position` reads."""
        window = local_start(position, self.group_size, self.window_size)
        first_group = self.sinks // self.group_size
        groups = num_visible_cores(position, self.group_size, self.window_size)
        return Reads(
            range(min(self.sinks, window)),
            range(first_group, max(first_group, groups)),
            range(window, position + 1),
        )


def fetched_tokens(pages: int, length: int, page_size: int, core_page_tokens: int) -> int:
    """Return how many tokens `pages` pages hold, in requests of `length` tokens, with fetch from
    the device."""
    return pages * length // (-(-length // page_size) + -(-length // core_page_tokens))


def core_entries(config: CCAConfig, page_size: int, head_dim: int, itemsize: int) -> int:
    """Return the core tokens of a page that has the bytes of `page_size` raw tokens, with fetch: as
    many as fit beside their masses and their index, a power of two.

    Raises:
        ValueError: it has no room for one.
    """
    index = index_of(config.fetch_index)
    token = 2 * head_dim * itemsize
    entry = token + 4 * config.core_mass
    entry += index.num_bytes(config.group_size, head_dim, itemsize)
    room = page_size * token // entry
    if not room:
        raise ValueError(
            f"block_size must be at least {-(-entry // token)} with cca.group_size "
            f"{config.group_size} and cca.fetch_index {config.fetch_index!r}, got {page_size}. "
            "Change it by --block-size."
        )
    return 1 << (room.bit_length() - 1)
