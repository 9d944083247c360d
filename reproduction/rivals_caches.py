"""Ask about contexts that this package's caches compress, once full attention has read them.

Each cache has the bytes of the presses' at the context's own length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.baselines import enabled
from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, cache_bytes, cache_entries, entry_bytes
from corecontext.files import UserError
from corecontext.heads.budget import COARSE, Unit, spread
from corecontext.inference import prefill
from corecontext.integrations.hf_cache import cache_bytes as bytes_of
from corecontext.integrations.hf_cache import host_bytes
from corecontext.loading import Loaded, one_line
from corecontext.visibility import num_sinks
from reproduction.real_methods import Heads, Sizes, describe, equal_heads
from reproduction.rivals_tasks import Item

SINKS = 16
"""First tokens that stay raw."""


class Fetch(NamedTuple):
    """How fetch spends its bytes on the device; the window takes the rest."""

    group_size: int
    index: str
    groups: int
    """Fetched groups, which are read from host memory and take no bytes of the cache."""


FETCH = {
    4: Fetch(16, "bits:2", 64),
    8: Fetch(16, "pairs:2", 64),
    16: Fetch(32, "parts:4:2", 32),
}
"""By compression."""


def _cca(compression: int) -> CCAConfig:
    """Return core tokens in half of the bytes; the window takes the other half."""
    return CCAConfig(2 * compression, sink_size=SINKS, core_mass=True, prefill="full")


def _fetch(compression: int) -> CCAConfig:
    """Return groups fetched from raw tokens in host memory."""
    if compression not in FETCH:
        raise UserError(f"compression must be one of {tuple(FETCH)} for fetch, got {compression}.")
    g, index, groups = FETCH[compression]
    return CCAConfig(
        g,
        sink_size=SINKS,
        core_mass=True,
        prefill="full",
        fetch_groups=groups,
        fetch_slots=0,
        fetch_index=index,
        store="host",
    )


CACHES: dict[str, Callable[[int], CCAConfig]] = {
    "cca": _cca,
    "cca_raw_heads": _cca,
    "fetch": _fetch,
}
"""The settings of each method but its window, by compression."""


class CacheRun:
    """A model under a method, its caches as large as the presses' at each context's length.

    Args:
        loaded: The model under full attention.
        name: A key of CACHES, or "full" for transformers' own cache.
        compression: Entries of full attention's cache for each one's bytes.
        heads: KV heads that may keep every token, the best first.
    """

    def __init__(self, loaded: Loaded, name: str, compression: int, heads: Heads) -> None:
        self.name = name
        self.compression = compression
        self.model = loaded.model
        self.heads = heads
        cost = ModelCost.of(self.model.config, self.model)
        self.cost = replace(cost, itemsize=self.model.dtype.itemsize)

    def settings(self, length: int) -> CCAConfig | None:
        """Return the settings for a context of so many tokens.

        Raises:
            UserError: no window fits.
        """
        if self.name == "full":
            return None
        config = CACHES[self.name](self.compression)
        coarse = (config.group_size,)
        if self.name == "cca_raw_heads":
            # Short contexts have no room for first tokens and a window of large groups.
            coarse = tuple(config.group_size * factor for factor in (COARSE, 2, 1))
        window, g = max((self._window(config, g, length), g) for g in coarse)
        if not window:
            raise UserError(
                f"contexts must be longer for {self.name}, got {length} tokens. Take a smaller "
                "--compression."
            )
        config = config.replace(window_size=window)
        if self.name == "cca_raw_heads":
            groups = spread(self.heads.shape, self._raw_heads(config, length), 1, g)
            config = config.replace(layer_group_sizes=groups)
        return config

    def _window(self, config: CCAConfig, group_size: int, length: int) -> int:
        """Return the widest window with which a cache has the bytes of `length / compression`
        tokens, given groups of this size beside heads that keep every token; 0 where none fits."""
        cost = self.cost
        raw_heads = len(self._raw_heads(config, length))
        sinks = num_sinks(config.sink_size, group_size)
        num_heads = cost.num_layers * cost.kv_heads
        budget = cache_bytes(
            length // self.compression, cost.num_layers, cost.kv_heads, cost.head_dim, cost.itemsize
        )

        def is_too_large(window: int) -> bool:
            if not raw_heads:
                return cost.config_bytes(config.replace(window_size=window), length).device > budget
            entries = (num_heads - raw_heads) * cache_entries(
                length, group_size, window, sinks=sinks
            )
            entries += raw_heads * (length + window)  # its window is kept twice
            return entries * entry_bytes(config, cost.head_dim, cost.itemsize) > budget

        return bisect_left(range(length), True, lo=1, key=is_too_large) - 1

    def _raw_heads(self, config: CCAConfig, length: int) -> tuple[Unit, ...]:
        """Return the heads that keep every token of a context: as many as sinks and windows in the
        others would leave room for."""
        if self.name != "cca_raw_heads":
            return ()
        sizes = Sizes(length, config.group_size, length // (2 * self.compression), SINKS)
        return self.heads.chosen[: equal_heads(sizes, self.heads.shape)]

    def sizes(self, length: int) -> dict[str, Any]:
        """Return the settings for a context of so many tokens, for a record's params."""
        config = self.settings(length)
        chosen = () if config is None else self._raw_heads(config, length)
        return describe(config, Heads(self.heads.shape, chosen))

    def ask(self, item: Item, *, first: bool = False) -> tuple[Tensor, dict[str, int]]:
        """Return the logits of the answer's tokens [n, vocabulary], and the bytes of the compressed
        context.

        Args:
            first: Only the first token's.
        """
        config = self.settings(item.question)
        if config is None:
            return self._ask(item, first)
        with one_line(), enabled(self.model, config):
            return self._ask(item, first)

    def _ask(self, item: Item, first: bool) -> tuple[Tensor, dict[str, int]]:
        end = item.answer if first else len(item.ids) - 1
        tokens = torch.tensor([item.ids[:end]], device=self.model.device)
        count = end - item.answer + 1
        with torch.inference_mode():
            cache = prefill(self.model, tokens[:, : item.question]).cache
            device_bytes = bytes_of(cache)
            sizes = {
                "device_bytes": device_bytes,
                "kept_bytes": device_bytes,
                "host_bytes": host_bytes(cache),
            }
            # Tokens whose logits are kept are no part of the prompt: the settings read them.
            question = tokens[:, item.question :]
            output = self.model(question, past_key_values=cache, logits_to_keep=question.shape[1])
        return output.logits[0, -count:], sizes
