"""The model under test, as tasks see it: texts in, answers out. Stubs in tests have the same
methods."""

from __future__ import annotations

from typing import Any, Protocol

from corecontext.files import UserError
from corecontext.loading import Loaded
from corecontext.perplexity import document_nll


class Subject(Protocol):
    """What tasks ask of a model."""

    @property
    def limit(self) -> int | None:
        """Most tokens, prompt and answer; None where not known."""

    def encode(self, text: str) -> list[int]:
        """Token numbers, with what the tokenizer puts before a text."""

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, special ones left out."""

    def generate(self, prompt: str, max_new_tokens: int, stop: tuple[str, ...]) -> str:
        """The likeliest continuation."""

    def choose(self, prompt: str, options: tuple[str, ...]) -> int:
        """Which of the continuations is likeliest."""

    def nll(self, ids: list[int]) -> Any:
        """Negative log-likelihoods of tokens 1, 2, ..., a float32 tensor."""


class ModelSubject:
    """A loaded model, greedy, one prompt at a time.

    Args:
        loaded: The model under some attention.
        num_groups: Constant number of core tokens (CCA); None leaves the group size constant.
        chunk_size: Tokens of a prompt read at once.
    """

    def __init__(
        self, loaded: Loaded, *, num_groups: int | None = None, chunk_size: int | None = None
    ) -> None:
        from corecontext.inference import Engine
        from corecontext.integrations.transformers import handle_of
        from corecontext.loading import one_line

        self.loaded, self.chunk_size = loaded, chunk_size
        handle = handle_of(loaded.model)
        if num_groups is not None:
            if handle is None:
                raise UserError(
                    f"num-groups must be given with core tokens, got {num_groups} for another method."
                )
            with one_line():
                handle.configure(num_groups=num_groups)
        self.engine = Engine(loaded.model, chunk_size=chunk_size, keep=1)

    @property
    def limit(self) -> int | None:
        """Most tokens, prompt and answer."""
        return self.loaded.max_length

    def encode(self, text: str) -> list[int]:
        """Token numbers."""
        return self.loaded.tokenizer(text, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """The text of tokens."""
        return self.loaded.tokenizer.decode(ids, skip_special_tokens=True)

    def generate(self, prompt: str, max_new_tokens: int, stop: tuple[str, ...] = ()) -> str:
        """The likeliest continuation, until the model's end or with a stop string."""
        made = self.engine.generate(
            self._tensor(self.encode(prompt)),
            max_new_tokens=max_new_tokens,
            stop_strings=stop,
            tokenizer=self.loaded.tokenizer,
        )[0]
        return self.decode(made)

    def choose(self, prompt: str, options: tuple[str, ...]) -> int:
        """Which continuation has the highest log-likelihood; one reading of the prompt where each
        is one token."""
        import torch

        from corecontext.inference import prefill

        before = self.encode(prompt)
        ends = [
            self.loaded.tokenizer(one, add_special_tokens=False)["input_ids"] for one in options
        ]
        if all(len(end) == 1 for end in ends):
            logits = (
                prefill(self.loaded.model, self._tensor(before), chunk_size=self.chunk_size)
                .logits[0]
                .float()
            )
            return int(logits[[end[0] for end in ends]].argmax())
        scores = []
        for end in ends:
            ids = self._tensor(before + end)
            with torch.inference_mode():
                logits = (
                    self.loaded.model(ids, use_cache=False, logits_to_keep=len(end) + 1)
                    .logits[0, :-1]
                    .float()
                )
            scores.append(float(logits.log_softmax(-1).gather(1, ids[0, -len(end) :, None]).sum()))
        return max(range(len(scores)), key=scores.__getitem__)

    def nll(self, ids: list[int]) -> Any:
        """Negative log-likelihoods in one causal pass."""
        return document_nll(
            self.loaded.model, self._tensor(ids), chunk_size=self.chunk_size or 1024
        )

    def _tensor(self, ids: list[int]) -> Any:
        import torch

        return torch.tensor([ids], device=self.loaded.model.device)
