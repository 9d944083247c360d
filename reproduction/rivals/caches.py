"""Ask about contexts that this package's caches compress, once full attention has read them.

Each cache has the bytes of the presses' at the context's own length.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.head_budget import COARSE, Unit, spread
from corecontext.baselines import enabled
from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, cache_bytes, entry_bytes, store_bytes
from corecontext.files import UserError
from corecontext.inference import prefill
from corecontext.inference.prefill import end_prompt, new_cache, read_chunk
from corecontext.integrations.hf.cache_layers import cache_bytes as bytes_of
from corecontext.integrations.hf.cache_layers import host_bytes
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.loading import Loaded, one_line
from reproduction.real.methods import Heads, Sizes, describe, equal_heads
from reproduction.rivals.tasks import FAILURES, Answer, Cell, Item

FULL = Cell("full", 1)
SINKS = 16
"""First tokens that stay raw."""


class Fetch(NamedTuple):
    """How fetch spends its bytes on the device; the window takes the rest."""

    group_size: int
    index: str
    groups: int
    """Fetched groups, which are read from host memory and take no bytes of the cache."""


FETCH = {
    4: (Fetch(16, "bits:2", 64),),
    8: (Fetch(32, "bits:2", 32), Fetch(16, "pairs:2", 64)),
    16: (Fetch(32, "parts:4:2", 32),),
}
"""By compression, the finest index first; others take the next smaller one's."""


def _cca(compression: int, factors: Sequence[int] = (1,)) -> list[CCAConfig]:
    """Return core tokens in half of the bytes; the window takes the other half."""
    config = CCAConfig.pooling(2 * compression, sink_size=SINKS, core_mass=True, prefill="full")
    return [config.replace(group_size=config.group_size * factor) for factor in factors]


def _fetch(compression: int) -> list[CCAConfig]:
    """Return groups fetched from raw tokens in host memory."""
    nearest = max((key for key in FETCH if key <= compression), default=min(FETCH))
    return [
        CCAConfig(
            g,
            sink_size=SINKS,
            core_mass=True,
            prefill="full",
            fetch_groups=groups,
            fetch_slots=0,
            fetch_index=index,
            store="host",
        )
        for g, index, groups in FETCH[nearest]
    ]


CACHES: dict[str, Callable[[int], list[CCAConfig]]] = {
    "cca": _cca,
    # Short contexts have no room for first tokens and a window of large groups.
    "cca_raw_heads": partial(_cca, factors=(COARSE, 2, 1)),
    "fetch": _fetch,
    "fetch_raw_heads": _fetch,
}
"""The settings of each method but its window, by compression."""
WITH_HEADS = ("cca_raw_heads", "fetch_raw_heads")
WINDOW_SHARE = 8
"""Entries of a cache for each of the window's, where a coarser index, or fewer heads that keep all
tokens, leave it so many."""


class CacheRun:
    """A model under a method, its caches as large as the presses' at each context's length.

    Args:
        loaded: The model under full attention.
        cell: A key of CACHES, or "full" for transformers' own cache, and the compression: entries
            of full attention's cache for each one's bytes.
        heads: KV heads that may keep every token, the best first.
        with_full: Return full attention's answers, too, from the same reading of a context; the
            cache must have a store of raw tokens.
    """

    def __init__(
        self, loaded: Loaded, cell: Cell, heads: Heads, *, with_full: bool = False
    ) -> None:
        self.cells = (FULL, cell) if with_full else (cell,)
        self.name = cell.method
        self.compression = cell.compression
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
        config, raw_heads = self._choose(length)
        if not raw_heads:
            return config
        groups = spread(self.heads.shape, raw_heads, 1, config.group_size)
        return config.replace(layer_group_sizes=groups)

    def _choose(self, length: int) -> tuple[CCAConfig, tuple[Unit, ...]]:
        """Return group size and window for a context of so many tokens, and the heads that keep
        every token: as many as leave a window to the others."""
        options = CACHES[self.name](self.compression)
        enough = length // (WINDOW_SHARE * self.compression)
        most = 0
        if self.name in WITH_HEADS:
            sizes = Sizes(length, options[-1].group_size, length // (2 * self.compression), SINKS)
            most = min(len(self.heads.chosen), equal_heads(sizes, self.heads.shape))
        for count in range(most, min(most, 1) - 1, -1):
            windows = [self._window(config, count, length) for config in options]
            # The finest index with enough of a window, or the group size with the widest.
            limit = enough if options[0].fetch_groups else length
            best = max(range(len(options)), key=lambda i: min(windows[i], limit))
            if windows[best] >= (enough if most else 1):
                config = options[best].replace(window_size=windows[best])
                return config, self.heads.chosen[:count]
        raise UserError(
            f"contexts must be longer for {self.name}, got {length} tokens. Take a smaller "
            "--compression."
        )

    def _window(self, config: CCAConfig, raw_heads: int, length: int) -> int:
        """Return the widest window with which a cache has the bytes of `length / compression`
        tokens, given heads that keep every token; 0 where none fits."""
        cost = self.cost
        heads = cost.num_layers * cost.kv_heads
        budget = cache_bytes(
            length // self.compression, cost.num_layers, cost.kv_heads, cost.head_dim, cost.itemsize
        )

        def is_too_large(window: int) -> bool:
            sized = config.replace(window_size=window)
            grouped = cost.config_bytes(sized, length).device
            # The window of heads that keep every token is kept twice.
            raw = (length + window) * entry_bytes(config, cost.head_dim, cost.itemsize)
            raw += store_bytes(sized, length, cost.head_dim, cost.itemsize).device
            return grouped * (heads - raw_heads) + raw * raw_heads * heads > budget * heads

        return bisect_left(range(length), True, lo=1, key=is_too_large) - 1

    def sizes(self, cell: Cell, length: int) -> dict[str, Any]:
        """Return the settings for a context of so many tokens, for a record's params."""
        if cell == FULL:
            return describe(None, self.heads)
        raw_heads = self._choose(length)[1]
        return describe(self.settings(length), Heads(self.heads.shape, raw_heads))

    def ask(self, item: Item) -> dict[Cell, Answer | Exception]:
        """Return the answers from a compressed context, or how the method failed."""
        try:
            answers = self.read(item, len(item.ids) - 1)
        except FAILURES as error:
            return dict.fromkeys(self.cells, error)
        return {
            cell: item.answers(logits[None], [sizes])[0]
            for cell, (logits, sizes) in answers.items()
        }

    def first_token(self, cell: Cell, item: Item) -> dict[str, int]:
        """Answer with one token, and return the bytes of the compressed context."""
        logits, sizes = self.read(item, item.answer)[cell]
        logits.argmax(-1).tolist()  # waits for the device
        return sizes

    def read(self, item: Item, end: int) -> dict[Cell, tuple[Tensor, dict[str, int]]]:
        """Return the logits of the answer's tokens [n, vocabulary], given those before an end, and
        the bytes of the context, by cell."""
        config = self.settings(item.question)
        tokens = torch.tensor([item.ids[:end]], device=self.model.device)
        question = tokens[:, item.question :]
        first = item.answer - item.question - 1
        answers = {}
        with ExitStack() as settings, torch.inference_mode():
            if config is not None:
                settings.enter_context(one_line())
                settings.enter_context(enabled(self.model, config))
            if FULL in self.cells and config is not None:
                cache = new_cache(self.model, None)
                read_chunk(self.model, tokens, None, [0], cache, 0, item.question)
                # Before the end of the prompt, full attention reads. The settings would read tokens
                # that are scored, and those whose logits are kept by number.
                output = self.model(question, **with_cache(cache), use_cache=True)
                cache.crop(item.question)
                end_prompt(cache)
                answers[FULL] = output.logits[0, first:], self._full_sizes(item.question)
            else:
                cache = prefill(self.model, tokens[:, : item.question]).cache
            device_bytes = bytes_of(cache)
            sizes = {
                "device_bytes": device_bytes,
                "kept_bytes": device_bytes,
                "host_bytes": host_bytes(cache),
            }
            # Tokens whose logits are kept are no part of the prompt: the settings read them.
            output = self.model(question, **with_cache(cache), logits_to_keep=question.shape[1])
        answers[self.cells[-1]] = output.logits[0, first:], sizes
        return answers

    def _full_sizes(self, length: int) -> dict[str, int]:
        """Return the bytes of full attention's cache of a context."""
        cost = self.cost
        size = cache_bytes(length, cost.num_layers, cost.kv_heads, cost.head_dim, cost.itemsize)
        return {"device_bytes": size, "kept_bytes": size, "host_bytes": 0}
