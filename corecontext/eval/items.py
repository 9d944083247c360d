"""Ask a model one question, score the answer, and return the details to record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from corecontext.eval.subject import ModelSubject
from corecontext.perplexity import Perplexity


class Settings(NamedTuple):
    """Options shared by all tasks; each reads those it supports."""

    lengths: tuple[int, ...] = ()
    """Most tokens of prompt and answer (ruler), of a window (perplexity), of a prompt before it is
    cut (longbench)."""
    documents: tuple[int, ...] = (20,)
    """Numbers of passages (multidoc_qa)."""
    subtasks: tuple[str, ...] = ()
    """Subtasks to run; all where empty."""
    limit: int | None = None
    """Most questions of each subtask."""
    positions: int = 5
    """Places of the right passage, evenly spaced (multidoc_qa)."""
    shots: int = 5
    """Examples before a question (mmlu)."""
    seed: int = 42
    max_new_tokens: int | None = None
    """Replaces the task's own limits."""


class Question(NamedTuple):
    """A prompt and its right answers."""

    prompt: str
    references: Sequence[str]


class Outcome(NamedTuple):
    """A score, and the details recorded with it."""

    value: float
    details: Mapping[str, Any]


class TooLong(Exception):
    """A prompt and its answer exceed the model's limit or the requested length: the item is left
    out and counted."""


@dataclass(frozen=True)
class Generated:
    """A question answered in free text."""

    key: str
    params: Mapping[str, Any]
    make: Callable[[], Question] = field(repr=False)
    """Builds the prompt on demand: all prompts together may be large."""
    max_new_tokens: int
    score: Callable[[str, Sequence[str]], float] = field(repr=False)
    stop: tuple[str, ...] = ()
    name = "quality.score"

    def run(self, subject: ModelSubject) -> Outcome:
        """Ask the question and score the answer."""
        question = self.make()
        tokens = _count_tokens(subject, question.prompt, self.max_new_tokens)
        answer = subject.generate(question.prompt, self.max_new_tokens, self.stop)
        return Outcome(
            self.score(answer, question.references),
            {"prompt_tokens": tokens, "answer": answer, "references": list(question.references)},
        )


@dataclass(frozen=True)
class Chosen:
    """A question with a fixed set of answers."""

    key: str
    params: Mapping[str, Any]
    make: Callable[[], str] = field(repr=False)
    options: tuple[str, ...]
    right: int
    name = "quality.accuracy"

    def run(self, subject: ModelSubject) -> Outcome:
        """Ask the question and compare the choice."""
        prompt = self.make()
        tokens = _count_tokens(subject, prompt, 1)
        chosen = subject.choose(prompt, self.options)
        details = {
            "prompt_tokens": tokens,
            "answer": self.options[chosen].strip(),
            "references": [self.options[self.right].strip()],
        }
        return Outcome(float(chosen == self.right), details)


@dataclass(frozen=True)
class Window:
    """Tokens of a document, each predicted from all tokens before it in the window."""

    key: str
    params: Mapping[str, Any]
    ids: list[int] = field(repr=False)
    num_bytes: int
    name = "quality.perplexity"

    def run(self, subject: ModelSubject) -> Outcome:
        """Return the perplexity, and sums by bucket of positions to combine with other windows."""
        if subject.limit is not None and len(self.ids) > subject.limit:
            raise TooLong(f"{len(self.ids)} tokens exceed the model's {subject.limit}")
        perplexity = Perplexity(subject.nll(self.ids), self.num_bytes)
        details = {
            "nll": float(perplexity.nll.double().sum()),
            "tokens": len(perplexity.nll),
            "bytes": self.num_bytes,
            "buckets": [
                [start, end, float(nll.sum()), len(nll)] for start, end, nll in perplexity.buckets()
            ],
        }
        return Outcome(perplexity.value, details)


Item = Generated | Chosen | Window


def _count_tokens(subject: ModelSubject, prompt: str, new_tokens: int) -> int:
    """Return the number of tokens of the prompt.

    Raises:
        TooLong: prompt and answer exceed the model's limit.
    """
    count = len(subject.encode(prompt))
    if subject.limit is not None and count + new_tokens > subject.limit:
        raise TooLong(
            f"{count} tokens and {new_tokens} new ones exceed the model's {subject.limit}"
        )
    return count
