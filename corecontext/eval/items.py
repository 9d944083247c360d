"""One question to a model: how it is asked, how it is scored, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from corecontext.eval.subject import Subject
from corecontext.perplexity import Perplexity


class Settings(NamedTuple):
    """What tasks may be told; each takes what it knows."""

    lengths: tuple[int, ...] = ()
    """Most tokens of prompt and answer (ruler), of a window (perplexity), of a prompt before it is
    cut (longbench)."""
    documents: tuple[int, ...] = (20,)
    """Numbers of passages (multidoc_qa)."""
    subtasks: tuple[str, ...] = ()
    """Of the task's parts, those to run; all where empty."""
    limit: int | None = None
    """Most questions of each part."""
    positions: int = 5
    """Places of the right passage, evenly spaced (multidoc_qa)."""
    shots: int = 5
    """Examples before a question (mmlu)."""
    seed: int = 42
    max_new_tokens: int | None = None
    """Replaces the task's own limits."""


class Question(NamedTuple):
    """A prompt and what answers it."""

    prompt: str
    references: Sequence[str]


class Outcome(NamedTuple):
    """A score and what else is recorded with it."""

    value: float
    details: Mapping[str, Any]


class TooLong(Exception):
    """A prompt and its answer exceed the limit, the model's or the one asked for: the item is left
    out and counted."""


@dataclass(frozen=True)
class Generated:
    """A question answered in free text."""

    key: str
    params: Mapping[str, Any]
    make: Callable[[], Question] = field(repr=False)
    """Builds the prompt when it is needed: all of them together may be large."""
    max_new_tokens: int
    score: Callable[[str, Sequence[str]], float] = field(repr=False)
    stop: tuple[str, ...] = ()
    name = "quality.score"

    def run(self, subject: Subject) -> Outcome:
        """Ask and score."""
        question = self.make()
        tokens = _fits(subject, question.prompt, self.max_new_tokens)
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

    def run(self, subject: Subject) -> Outcome:
        """Ask and compare."""
        prompt = self.make()
        tokens = _fits(subject, prompt, 1)
        chosen = subject.choose(prompt, self.options)
        return Outcome(
            float(chosen == self.right),
            {
                "prompt_tokens": tokens,
                "answer": self.options[chosen].strip(),
                "references": [self.options[self.right].strip()],
            },
        )


@dataclass(frozen=True)
class Window:
    """Tokens of one document, each predicted from all before it in the window."""

    key: str
    params: Mapping[str, Any]
    ids: list[int] = field(repr=False)
    num_bytes: int
    name = "quality.perplexity"

    def run(self, subject: Subject) -> Outcome:
        """Perplexity, and the sums by bucket of positions from which that of many windows is
        made."""
        if subject.limit is not None and len(self.ids) > subject.limit:
            raise TooLong(f"{len(self.ids)} tokens exceed the model's {subject.limit}")
        found = Perplexity(subject.nll(self.ids), self.num_bytes)
        buckets = []
        for start, end, _ in found.by_position():
            part = found.nll[max(0, start - 1) : end - 1].double()
            buckets.append([start, end, float(part.sum()), len(part)])
        return Outcome(
            found.value,
            {
                "nll": float(found.nll.double().sum()),
                "tokens": len(found.nll),
                "bytes": self.num_bytes,
                "buckets": buckets,
            },
        )


Item = Generated | Chosen | Window


def _fits(subject: Subject, prompt: str, new: int) -> int:
    """Tokens of the prompt.

    Raises:
        TooLong: with the answer it exceeds the limit.
    """
    count = len(subject.encode(prompt))
    if subject.limit is not None and count + new > subject.limit:
        raise TooLong(f"{count} tokens and {new} new ones exceed the model's {subject.limit}")
    return count
