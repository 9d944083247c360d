"""Ask a model one question, score the answer, and return the details to record."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from corecontext.perplexity import Perplexity


class Settings(NamedTuple):
    """The options of all tasks; each task reads those that it has."""

    lengths: tuple[int, ...] = ()
    """Most tokens: of a window (perplexity), or of what a task says."""
    documents: tuple[int, ...] = (20,)
    """Numbers of passages (multidoc_qa)."""
    subtasks: tuple[str, ...] = ()
    """Subtasks to run; all where empty."""
    limit: int | None = None
    """Most questions of each subtask."""
    positions: int = 5
    """Places of the right passage, evenly spaced (multidoc_qa)."""
    seed: int = 42
    max_new_tokens: int | None = None
    """Most tokens of an answer, in place of the task's own limit."""


def check_subtasks(given: Sequence[str], subtasks: Collection[str]) -> None:
    """Raise a UserError for a subtask that is not one of a task's own."""
    for name in given:
        if not subtasks:
            raise UserError(
                f"subtask must be left out for a task without any, got {name!r}. Use TASK:{name} "
                "for another task."
            )
        if name not in subtasks:
            raise UserError(f"subtask must be one of {', '.join(subtasks)}, got {name!r}.")


class Question(NamedTuple):
    """A prompt and its right answers, `references`."""

    prompt: str
    references: Sequence[str]


class Outcome(NamedTuple):
    """An item's value, a score or a perplexity, and the details recorded with it."""

    value: float
    details: Mapping[str, Any]


class TooLong(Exception):
    """A prompt and its answer exceed the model's limit or the requested length: the item is left
    out and counted."""


@dataclass(frozen=True)
class Generated:
    """A question answered in free text."""

    key: str
    """Names the item among those of its task."""
    params: Mapping[str, Any]
    """Params of its record, such as the number of passages."""
    make: Callable[[], Question] = field(repr=False)
    """Builds the prompt on demand: all prompts together may be large."""
    max_new_tokens: int
    score: Callable[[str, Sequence[str]], float] = field(repr=False)
    """Scores an answer by the references, from 0 to 1."""
    stop: tuple[str, ...] = ()
    chat: bool = True
    """Whether the prompt is a question, for a chat template, or a text to continue."""
    name: ClassVar[str] = "quality.score"
    """Name of its record."""

    def run(self, subject: ModelSubject) -> Outcome:
        """Ask the question and score the answer."""
        question = self.make()
        prompt = encode_question(subject, question.prompt, self.chat, self.max_new_tokens)
        answer = subject.generate(prompt, self.max_new_tokens, self.stop)
        details = {
            "prompt_tokens": len(prompt),
            "answer": answer,
            "references": list(question.references),
        }
        return Outcome(self.score(answer, question.references), details)


@dataclass(frozen=True)
class Window:
    """Tokens of a document, each predicted from all tokens before it in the window."""

    key: str
    params: Mapping[str, Any]
    ids: list[int] = field(repr=False)
    num_bytes: int
    """UTF-8 bytes of the window's text."""
    chat: ClassVar[bool] = False
    name: ClassVar[str] = "quality.perplexity"

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


Item = Generated | Window


def encode_question(subject: ModelSubject, prompt: str, chat: bool, new_tokens: int) -> list[int]:
    """Return the token ids of a prompt that is followed by at most so many tokens.

    Raises:
        TooLong: prompt and answer exceed the model's limit.
    """
    ids = subject.encode_prompt(prompt, chat)
    if subject.limit is not None and len(ids) + new_tokens > subject.limit:
        raise TooLong(
            f"{len(ids)} tokens and {new_tokens} new ones exceed the model's {subject.limit}"
        )
    return ids
