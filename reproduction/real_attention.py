"""Run a pretrained model under an attention: losses, first choices, bytes of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from corecontext.baselines import enabled
from corecontext.files import UserError
from corecontext.integrations.hf_cache import cache_bytes, host_bytes
from corecontext.loading import Loaded, one_line
from corecontext.perplexity import hidden_nll


class AttentionRun:
    """A model under an attention, for the length of a with block.

    Args:
        loaded: The model under full attention.
        attention: A CCAConfig, a rival's settings, or None for full attention.
        use_cache: False leaves out the cache, and its bytes.
    """

    def __init__(self, loaded: Loaded, attention: Any, *, use_cache: bool = True) -> None:
        self.model = loaded.model
        self.attention = attention
        self.cache: dict[str, int | None] = {"device_bytes": None, "host_bytes": None}
        """Bytes of the cache after the last text of `nll`; None where there is no cache."""
        self._use_cache = use_cache
        self._exit = ExitStack()

    def __enter__(self) -> AttentionRun:
        """Enable the attention."""
        if self.attention is not None:
            with one_line():
                self._exit.enter_context(enabled(self.model, self.attention))
        self.has_cache = self._use_cache and self._has_cache()
        return self

    def __exit__(self, *error: object) -> None:
        """Give the model back its own attention."""
        self._exit.close()

    def _has_cache(self) -> bool:
        """Whether the attention has a cache."""
        with one_line(), torch.inference_mode():
            try:
                self.model.get_decoder()(tokens_of([0, 0], self.model), use_cache=True)
            except NotImplementedError:
                return False
        return True

    def nll(self, ids: Iterable[int]) -> Tensor:
        """Return the losses of tokens 1, 2, ... of a text [L - 1]."""
        tokens = tokens_of(ids, self.model)
        hidden = self._hidden(tokens)
        nll = hidden_nll(self.model, hidden, tokens)
        if not nll.isfinite().all():
            raise UserError("losses must be finite, got NaN or infinity. Take another --dtype.")
        return nll

    def is_first_choice(self, ids: Sequence[int], first: int) -> Tensor:
        """Return whether each token of a text from `first` on is the model's first choice after the
        tokens before it [L - first]."""
        tokens = tokens_of(ids, self.model)
        hidden = self._hidden(tokens)[:, first - 1 : -1]
        with torch.inference_mode():
            choices = self.model.get_output_embeddings()(hidden).argmax(-1)
        return (choices == tokens[:, first:])[0].cpu()

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states of a text in one pass [1, L, C], and note the bytes of its
        cache."""
        with one_line(), torch.inference_mode():
            output = self.model.get_decoder()(tokens, use_cache=self.has_cache)
        if self.has_cache:
            cache = output.past_key_values
            self.cache = {"device_bytes": cache_bytes(cache), "host_bytes": host_bytes(cache)}
        return output.last_hidden_state


def tokens_of(ids: Iterable[int], model: Any) -> Tensor:
    """Return token ids as a row [1, L] on the model's device."""
    return torch.tensor([list(ids)], dtype=torch.int64, device=model.device)
