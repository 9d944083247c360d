"""Run a pretrained model under an attention: losses, bytes of the cache, answers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corecontext.baselines import enabled
from corecontext.config import CCAConfig
from corecontext.data.needles import ANSWER_TOKENS
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from corecontext.integrations.hf_cache import cache_bytes
from corecontext.loading import Loaded, one_line
from corecontext.perplexity import hidden_nll


class AttentionRun:
    """A model under an attention, for the length of a with block.

    Args:
        loaded: The model under full attention.
        attention: A CCAConfig, a rival's settings, or None for full attention.
        use_cache: False runs whole texts, as where the attention has no cache.
    """

    def __init__(self, loaded: Loaded, attention: Any, *, use_cache: bool = True) -> None:
        self.model = loaded.model
        self.attention = attention
        self.loaded = replace(loaded, rival=attention)
        if isinstance(attention, CCAConfig):
            self.loaded = replace(loaded, config=attention)
        self.cache: dict[str, int | None] = {"device_bytes": None, "host_bytes": None}
        """Bytes of the cache after the last text of `nll`; None where there is no cache."""
        self.has_cache = use_cache and self._has_cache()
        self._exit = ExitStack()

    def __enter__(self) -> AttentionRun:
        """Enable the attention; without a cache it is enabled for single passes, between drafts."""
        if self.has_cache:
            with one_line():
                self._exit.enter_context(self._enabled())
        self._subject = ModelSubject(self.loaded)
        return self

    def __exit__(self, *error: object) -> None:
        """Give the model back its own attention."""
        self._exit.close()

    def _enabled(self) -> AbstractContextManager:
        return nullcontext() if self.attention is None else enabled(self.model, self.attention)

    def _pass(self) -> AbstractContextManager:
        return nullcontext() if self.has_cache else self._enabled()

    def _has_cache(self) -> bool:
        """Whether the attention has a cache; without, it runs on whole texts."""
        with one_line(), self._enabled(), torch.inference_mode():
            try:
                self.model.get_decoder()(tokens_of([0, 0], self.model), use_cache=True)
            except NotImplementedError:
                return False
        return True

    def nll(self, ids: Iterable[int]) -> Tensor:
        """Return the losses of tokens 1, 2, ... of a text."""
        tokens = tokens_of(ids, self.model)
        with one_line(), self._pass(), torch.inference_mode():
            output = self.model.get_decoder()(tokens, use_cache=self.has_cache)
            nll = hidden_nll(self.model.get_output_embeddings(), output.last_hidden_state, tokens)
        if not nll.isfinite().all():
            raise UserError("losses must be finite, got NaN or infinity. Take another --dtype.")
        if self.has_cache:
            layers = output.past_key_values.layers
            host = sum(getattr(layer, "host_bytes", 0) for layer in layers)
            device = cache_bytes(output.past_key_values) - host
            self.cache = {"device_bytes": device, "host_bytes": host}
        return nll

    def answer(self, prompt: list[int]) -> str:
        """Return the greedy answer to a prompt."""
        if not self.has_cache:
            return self._answer_in_passes(prompt)
        with one_line():
            return self._subject.generate(prompt, ANSWER_TOKENS)

    def _answer_in_passes(self, prompt: list[int]) -> str:
        """Return the greedy answer by passes over the whole text.

        Full attention, which has a cache, drafts the rest of the answer. A pass under the attention
        accepts the tokens that are its own greedy ones, and corrects the first that is not.
        """
        head = self.model.get_output_embeddings()
        answer: list[int] = []
        end = self.loaded.tokenizer.eos_token_id
        while len(answer) < ANSWER_TOKENS and end not in answer:
            room = ANSWER_TOKENS - len(answer)
            text = tokens_of([*prompt, *answer], self.model)
            draft = self._subject.engine.generate(text, max_new_tokens=room)[0]
            tokens = tokens_of([*prompt, *answer, *draft[:-1]], self.model)
            with one_line(), self._pass(), torch.inference_mode():
                hidden = self.model.get_decoder()(tokens, use_cache=False).last_hidden_state
                greedy = head(hidden[0, -len(draft) :]).argmax(-1).tolist()
            agreed = 0
            while agreed < len(draft) and greedy[agreed] == draft[agreed]:
                agreed += 1
            answer += greedy[: agreed + 1]
        if end in answer:
            answer = answer[: answer.index(end)]
        return self._subject.decode(answer)


def tokens_of(ids: Iterable[int], model: Any) -> Tensor:
    """Return token ids as a row [1, L] on the model's device."""
    return torch.tensor([list(ids)], dtype=torch.int64, device=model.device)
