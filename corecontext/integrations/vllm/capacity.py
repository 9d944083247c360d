"""Count the tokens that vLLM's cache holds, with core context and with full attention, by
arithmetic alone: vLLM need not be installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, entry_bytes
from corecontext.files import UserError
from corecontext.integrations.vllm.model_settings import check_architecture, pooled_settings
from corecontext.integrations.vllm.page_layout import (
    SLOTS_SHARE,
    PageLayout,
    core_entries,
    fetched_tokens,
)
from corecontext.integrations.vllm.raw_heads import RawHeads, grouped_caches

MEMORY_SHARE = 0.92
"""Share of a GPU's memory that vLLM uses by default."""
PAGE_SIZE = 16
"""Entries of a page, vLLM's default."""
IN_FLIGHT = 2 * 8192
"""Tokens of a prompt that have pages already but are not computed yet: two steps of vLLM's default
size on large GPUs, because vLLM schedules a step while the one before runs."""


def gpu_gib(given: float | None, *, is_needed: bool = True) -> float | None:
    """Return the memory of a GPU in GiB: as given, else of this machine's; None without either.

    Raises:
        UserError: it is needed, there is no GPU, and none given.
    """
    import torch

    if given is not None:
        if not 0 < given < float("inf"):
            raise UserError(f"gpu_memory must be more than 0, got {given}.")
        return given
    if not torch.cuda.is_available():
        if not is_needed:
            return None
        raise UserError("gpu_memory must be given on a machine without a GPU, such as 141.")
    return torch.cuda.get_device_properties(0).total_memory / 2**30


def page_bytes(cost: ModelCost, config: CCAConfig) -> int:
    """Return the bytes of a page of one layer."""
    return cost.kv_heads * PAGE_SIZE * entry_bytes(config, cost.head_dim, cost.itemsize)


def held_tokens(
    cost: ModelCost, config: CCAConfig, length: int, free: int, slots: int = 0
) -> tuple[int, int]:
    """Return how many tokens `free` bytes hold, in requests of `length` tokens: with full
    attention, and with core context, where `slots` of these bytes are for slots."""
    full_page = cost.num_layers * page_bytes(cost, CCAConfig.paper())
    full = free // full_page * PAGE_SIZE
    if config.fetch_groups:
        entries = core_entries(pooled_settings(config), PAGE_SIZE, cost.head_dim, cost.itemsize)
        pages = (free - slots) // full_page
        layout = PageLayout.of(config, PAGE_SIZE, entries)
        if config.fetches_from_host:
            return full, layout.cache_tokens(pages, length, IN_FLIGHT)
        return full, fetched_tokens(pages, length, PAGE_SIZE, layout.core_page_tokens)

    # The layers that have core tokens, and the caches of heads that keep every token.
    pooled = pooled_settings(config)
    numbers = range(cost.num_layers)
    raw = RawHeads.of([config.of_layer(number) for number in numbers], cost.kv_heads)
    layers = cost.num_layers
    groups = 1
    raw_pages = 0
    if raw.most(numbers):
        heads = raw.per_cache(PAGE_SIZE, pooled.group_size)
        caches = [sum(map(raw.pools, numbers)), -(-raw.most(numbers) // heads)]
        layers, (groups, raw_groups) = grouped_caches(caches)
        raw_pages = raw_groups * -(-length * heads // (PAGE_SIZE * cost.kv_heads))

    pages = free // (layers * page_bytes(cost, pooled))
    layout = PageLayout.of(pooled, PAGE_SIZE)
    return full, layout.cache_tokens(pages, length, IN_FLIGHT, groups, raw_pages)


def capacity_table(
    hf_config: Any, cost: ModelCost, config: CCAConfig, lengths: Sequence[int], gib: float
) -> Table:
    """Make a table of the tokens that a GPU of `gib` GiB holds, one row a length of requests.

    Raises:
        UserError: the weights alone do not fit.
        ValueError: the model or a setting is not available in vLLM.
    """
    check_architecture(hf_config)
    pooled_settings(config)
    weights = cost.weight_bytes()
    if not hf_config.tie_word_embeddings:
        # A step reads one row of the embedding, which has the output head's size.
        weights += cost.head_weights * cost.itemsize
    free = int(MEMORY_SHARE * gib * 2**30) - weights
    if free <= 0:
        raise UserError(
            f"gpu_memory must be more than the weights' {weights / 2**30:.1f} GiB / "
            f"{MEMORY_SHARE}, got {gib:.4g} GiB."
        )
    host = ""
    slots = 0
    if config.fetches_from_host:
        if config.fetch_slots != 0:
            slots = int(SLOTS_SHARE * MEMORY_SHARE * gib * 2**30)
        page = cost.num_layers * page_bytes(cost, CCAConfig.paper())
        entries = core_entries(pooled_settings(config), PAGE_SIZE, cost.head_dim, cost.itemsize)
        raw = page // PAGE_SIZE * config.group_size * entries
        pages = (free - slots) // page
        host = (
            f"; {pages * page / 2**30:.1f} GiB of it for pages, {slots / 2**30:.1f} GiB for slots, "
            f"and raw tokens of {pages:,} pages take {pages * raw / 2**30:.1f} GiB of host memory, "
            f"{max(1, 2**30 // raw):,} pages a GiB: --num-gpu-blocks-override"
        )
    table = Table(
        title=f"vLLM on one GPU of {gib:.4g} GiB: tokens in the cache",
        box=SIMPLE_HEAD,
        caption=(
            f"{MEMORY_SHARE:.0%} of the memory without the weights; a step's own memory is "
            f"taken from it too{host}"
        ),
    )
    method = "fetch" if config.fetch_groups else "CCA"
    for column in ("tokens of\na request", "full", method, ""):
        table.add_column(column, justify="right", no_wrap=True)
    for length in lengths:
        full, compact = held_tokens(cost, config, length, free, slots)
        table.add_row(str(length), f"{full:,}", f"{compact:,}", f"{compact / max(1, full):.1f}x")
    return table
