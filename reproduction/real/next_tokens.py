"""Measure what a prompt is worth to the tokens behind it, by the way in which it was read."""

import unittest.mock
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.baselines import enabled
from corecontext.config import CCAConfig
from corecontext.integrations.hf.cache_layers import CCALayer
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.ops.fetch import prompt_rule
from corecontext.perplexity import hidden_nll
from reproduction.real.attention import tokens_of
from reproduction.real.shared_rules import sharing_by

SHARE = 16
"""Neighbouring tokens of a prompt that share a choice."""
BEGINNING = 8192
"""Tokens that full attention reads first in some readings: as many as on a GPU."""


class PromptReading(NamedTuple):
    """Describe a way to read a prompt."""

    prefill: str
    """As of `CCAConfig`; "auto" shares choices."""
    full_until: int = 0
    """Full attention reads so many tokens first."""
    times: int = 1
    """Times k groups of a shared choice."""
    share: int = SHARE
    """Neighbours that share one."""
    rule: str | None = None
    """By which they choose, as of `shared_rules.RULES`; None is the package's, by their mean
    query."""


READINGS = {
    "query": PromptReading("fetch"),
    "full": PromptReading("full"),
    f"share {SHARE}": PromptReading("auto"),
    f"share {SHARE}, 2 k": PromptReading("auto", times=2),
    f"full {BEGINNING}, share {SHARE}": PromptReading("auto", BEGINNING),
    f"full {BEGINNING}, share {SHARE}, 2 k": PromptReading("auto", BEGINNING, 2),
    "share 8, 2 k": PromptReading("auto", times=2, share=8),
    "share 32, 2 k": PromptReading("auto", times=2, share=32),
    f"share {SHARE}, 2 k, largest": PromptReading("auto", times=2, rule="largest"),
    f"share {SHARE}, 2 k, shares": PromptReading("auto", times=2, rule="shares"),
}
"""The ways by name: a choice of each token, full attention, shared choices from the first token on
or behind a beginning that full attention reads."""


def losses_behind(
    model: Any,
    config: CCAConfig,
    reading: PromptReading,
    count: int,
    texts: Sequence[Iterable[int]],
) -> Tensor:
    """Return the losses of what the last `count` tokens of texts say of their next ones, in nats,
    [B, count - 1]; these tokens choose one by one, whatever the tokens before them do.

    Args:
        model: A model under full attention.
        config: Settings with fetch.
        reading: How the tokens before the last ones are read.
        texts: Token ids of texts of one length.
    """
    tokens = tokens_of(texts, model)
    # Where raw tokens are kept changes no choice.
    config = config.replace(store="device", fetch_slots=0, fetch_share=reading.share)
    last = tokens[:, -count:]
    by_query = config.replace(prefill="fetch")
    decoder = model.get_decoder()
    rule = unittest.mock.patch.multiple(
        prompt_rule,
        PROMPT_LENGTHS={model.device.type: reading.full_until},
        SHARED_GROUPS=reading.times,
    )
    read = enabled(model, config.replace(prefill=reading.prefill))
    with read, torch.inference_mode(), rule, sharing_by(reading.rule):
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
