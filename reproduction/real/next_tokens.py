"""Measure what a prompt is worth to the tokens behind it, by the way in which it was read."""

from __future__ import annotations

import unittest.mock
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from corecontext.baselines import enabled
from corecontext.config import CCAConfig
from corecontext.integrations.hf.cache_layers import CCALayer
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.ops.fetch.prompt_rule import PROMPT_LENGTHS
from corecontext.perplexity import hidden_nll
from reproduction.real.attention import tokens_of

SHARE = 16
"""Neighbouring tokens of a prompt that share a choice."""
READINGS: dict[str, dict[str, Any]] = {
    "query": {"prefill": "fetch", "fetch_share": 1},
    "full": {"prefill": "full", "fetch_share": 1},
    f"share {SHARE}": {"prefill": "auto", "fetch_share": SHARE},
}
"""Settings of each way to read a prompt: a choice of each token, full attention, shared choices,
here from the first token on."""


def losses_behind(
    model: Any, config: CCAConfig, count: int, texts: Sequence[Iterable[int]]
) -> Tensor:
    """Return the losses of what the last `count` tokens of texts say of their next ones, in nats,
    [B, count - 1]; these tokens choose one by one, whatever the tokens before them do.

    Args:
        model: A model under full attention.
        config: Settings with fetch, by which the tokens before the last ones are read.
        texts: Token ids of texts of one length.
    """
    tokens = tokens_of(texts, model)
    # Where raw tokens are kept changes no choice.
    config = config.replace(store="device", fetch_slots=0)
    last = tokens[:, -count:]
    by_query = config.replace(**READINGS["query"])
    decoder = model.get_decoder()
    # Full attention reads no beginning of a prompt.
    no_lengths = unittest.mock.patch.dict(PROMPT_LENGTHS, clear=True)
    with enabled(model, config), torch.inference_mode(), no_lengths:
        cache = returned_cache(decoder(tokens[:, :-count], use_cache=True))
    for layer in cache.layers:
        if isinstance(layer, CCALayer):
            layer.compact.config = by_query
    with enabled(model, by_query), torch.inference_mode():
        hidden = decoder(last, **with_cache(cache), use_cache=True).last_hidden_state
        rows = range(len(last))
        return torch.stack(
            [hidden_nll(model, hidden[i : i + 1], last[i : i + 1]) for i in rows]
        ).double()
