"""Run a pretrained model under an attention: losses, first choices, bytes of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from corecontext.baselines import enabled
from corecontext.files import UserError
from corecontext.integrations.hf.cache_layers import cache_bytes, host_bytes
from corecontext.integrations.hf.cache_name import returned_cache
from corecontext.loading import Loaded, one_line
from corecontext.perplexity import hidden_nll

T = TypeVar("T")
TOKENS_AT_ONCE = 32768
"""Tokens of a forward pass."""
NO_CACHE: dict[str, int | None] = {"device_bytes": None, "host_bytes": None}


class AttentionRun:
    """A model under an attention, for the length of a with block. Texts are read without a cache,
    which changes no result.

    Args:
        loaded: The model under full attention.
        attention: A CCAConfig, a rival's settings, or None for full attention.
    """

    def __init__(self, loaded: Loaded, attention: Any) -> None:
        self.model = loaded.model
        self.attention = attention
        self._exit = ExitStack()

    def __enter__(self) -> AttentionRun:
        """Enable the attention."""
        if self.attention is not None:
            with one_line():
                self._exit.enter_context(enabled(self.model, self.attention))
        return self

    def __exit__(self, *error: object) -> None:
        """Give the model back its own attention."""
        self._exit.close()

    def nll(self, texts: Sequence[Iterable[int]]) -> Tensor:
        """Return the losses of tokens 1, 2, ... of texts of one length [B, L - 1]."""
        tokens = tokens_of(texts, self.model)
        hidden = self._hidden(tokens)
        rows = range(len(tokens))
        nll = torch.stack(
            [hidden_nll(self.model, hidden[i : i + 1], tokens[i : i + 1]) for i in rows]
        )
        if not nll.isfinite().all():
            raise UserError("losses must be finite, got NaN or infinity. Take another --dtype.")
        return nll

    def is_first_choice(self, texts: Sequence[Iterable[int]], first: int) -> Tensor:
        """Return whether each token from `first` on, in texts of one length, is the model's first
        choice after the tokens before it [B, L - first]."""
        tokens = tokens_of(texts, self.model)
        hidden = self._hidden(tokens)[:, first - 1 : -1]
        with torch.inference_mode():
            choices = self.model.get_output_embeddings()(hidden).argmax(-1)
        return (choices == tokens[:, first:]).cpu()

    def cache_size(self, ids: Iterable[int]) -> dict[str, int | None]:
        """Return the bytes of the cache after a text."""
        tokens = tokens_of([ids], self.model)
        with one_line(), torch.inference_mode():
            cache = returned_cache(self.model.get_decoder()(tokens, use_cache=True))
        return {"device_bytes": cache_bytes(cache), "host_bytes": host_bytes(cache)}

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states of texts in one pass [B, L, C]."""
        with one_line(), torch.inference_mode():
            return self.model.get_decoder()(tokens, use_cache=False).last_hidden_state


def batches(texts: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    """Yield texts of one length in batches of at most TOKENS_AT_ONCE tokens, or one by one."""
    count = max(1, TOKENS_AT_ONCE // length)
    for low in range(0, len(texts), count):
        yield texts[low : low + count]


def tokens_of(texts: Sequence[Iterable[int]], model: Any) -> Tensor:
    """Return the token ids of texts of one length [B, L] on the model's device."""
    rows = [list(ids) for ids in texts]
    return torch.tensor(rows, dtype=torch.int64, device=model.device)
