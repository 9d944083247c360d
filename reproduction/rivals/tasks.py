"""Make questions about contexts: the context is read and compressed before the question is known.

The right answer follows the question. Each of its tokens is compared with the model's first choice
after the right tokens before it, or its likelihood is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from corecontext.data.chat import chat_prompt
from corecontext.data.needles import find_tokens
from corecontext.eval import multidoc_qa
from corecontext.eval.items import Generated, Settings
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from corecontext.loading import Loaded
from reproduction.real.tasks import LIST_TOKENS, Question, list_questions, needle_questions
from reproduction.suites import ruler

FAILURES = (AssertionError, RuntimeError, UserError, ValueError)
"""Errors of a method that the others survive: a context may be too short, or kvpress fail."""
QUESTION = "Question:"
"""Where a question begins in the prompts of RULER and of multi-document QA."""
MARKS = {"needles": "What is the special magic number?", "list": "Return the"}
"""Where other questions begin."""
PASSAGES = "passages"
"""The task whose answers' likelihood is measured."""
ORDERED = ("niah_multivalue",)
"""Tasks of RULER whose answers may come in any order: here, that of the text."""


class Counts(NamedTuple):
    """How many questions each task has, and how long their prompts are."""

    needles: int = 25
    """Of each length."""
    needle_lengths: tuple[int, ...] = (4000, 7900)
    lists: int = 10
    ruler: int = 20
    """Of each subtask."""
    ruler_length: int = 4096
    """Most tokens of prompt and answer."""
    passages: int = 50
    """Questions about passages."""
    documents: int = 20
    """Passages of such a question."""


class Item(NamedTuple):
    """A context, a question about it and the right answer."""

    ids: list[int]
    """Tokens of all three."""
    question: int
    """The question's first token."""
    places: tuple[slice, ...]
    """Tokens of each fact in the answer; the answer is the text from the first of them on."""

    @property
    def answer(self) -> int:
        """The answer's first token."""
        return self.places[0].start

    def share_right(self, choices: Sequence[int]) -> float:
        """Return the share of facts whose tokens were all chosen, given tokens from `answer` on."""
        first = self.answer
        facts = [
            self.ids[place] == choices[place.start - first : place.stop - first]
            for place in self.places
        ]
        return sum(facts) / len(facts)

    def answers(self, logits: Tensor, sizes: Sequence[dict[str, int]]) -> list[Answer]:
        """Return answers from the logits of the right one's tokens [C, n, vocabulary]."""
        right = torch.tensor(self.ids[self.answer :], device=logits.device)
        choices = logits.argmax(-1).tolist()
        nlls = torch.stack([functional.cross_entropy(row.float(), right) for row in logits])
        return [Answer(*answer) for answer in zip(choices, nlls.tolist(), sizes)]


class Cell(NamedTuple):
    """A method, and entries of full attention's cache for each that stays."""

    method: str
    compression: int


class Answer(NamedTuple):
    """A model's tokens in the place of the right answer's, after the right ones before them."""

    choices: list[int]
    """Most likely tokens."""
    nll: float
    """How unlikely the right answer is, in nats a token."""
    sizes: dict[str, int]
    """Bytes of the compressed context."""


class Task(NamedTuple):
    """A task's name and the nominal tokens of its prompts."""

    name: str
    length: int


class Source(NamedTuple):
    """Where questions come from."""

    loaded: Loaded
    data: str
    """Folder with the files of RULER and of multi-document QA."""
    essays: Callable[[], str]
    """Returns the text around needles and lists."""
    seed: int


def make_items(
    source: Source, counts: Counts, wanted: Collection[Task] | None = None
) -> dict[Task, list[Item]]:
    """Return the questions of each task that has any.

    Args:
        wanted: The tasks to make; None makes all.
    """
    tokenizer = source.loaded.tokenizer
    makers: dict[Task, Callable[[], list[Item]]] = {}

    def needles(length: int) -> list[Item]:
        questions = needle_questions(
            source.essays(), tokenizer, length, counts.needles, source.seed
        )
        return _split(questions, tokenizer, MARKS["needles"])

    def lists() -> list[Item]:
        questions = list_questions(source.essays(), tokenizer, counts.lists, source.seed)
        return _split(questions, tokenizer, MARKS["list"])

    if counts.needles:
        for length in counts.needle_lengths:
            makers[Task("needles", length)] = partial(needles, length)
    if counts.lists:
        makers[Task("list", LIST_TOKENS)] = lists
    if counts.ruler:
        for name in ruler.available(source.data):
            makers[Task(name, counts.ruler_length)] = partial(_ruler_items, source, counts, name)
    if counts.passages:
        makers[Task(PASSAGES, counts.documents)] = partial(_passage_items, source, counts)
    return {task: make() for task, make in makers.items() if wanted is None or task in wanted}


def _split(questions: Sequence[Question], tokenizer: Any, mark: str) -> list[Item]:
    """Return questions with the token at which each begins: the last place of a mark."""
    marks = tokenizer(mark, add_special_tokens=False)["input_ids"]
    return [Item(ids, _last_place(ids, marks), spans) for ids, spans in questions]


def _last_place(ids: Sequence[int], marks: Sequence[int]) -> int:
    """Return where some tokens are last found in others."""
    for start in range(len(ids) - len(marks), -1, -1):
        if ids[start : start + len(marks)] == marks:
            return start
    raise UserError("the question must have tokens of its own, got none. Take another tokenizer.")


def _ruler_items(source: Source, counts: Counts, name: str) -> list[Item]:
    """Return the questions of a subtask of RULER."""
    loaded = source.loaded
    settings = Settings(
        (counts.ruler_length,), subtasks=(name,), limit=counts.ruler, seed=source.seed
    )
    questions = []
    for item in ruler.items(source.data, settings, ModelSubject(loaded)):
        assert isinstance(item, Generated)
        prompt, references = item.make()
        if name in ORDERED:
            references = sorted(references, key=prompt.index)
        if name.startswith("qa"):  # any of them is right
            references = references[:1]
        questions.append(_asked(loaded, prompt, references))
    return _split(questions, loaded.tokenizer, QUESTION)


def _passage_items(source: Source, counts: Counts) -> list[Item]:
    """Return questions about passages, the right one at each place in turn."""
    loaded = source.loaded
    settings = Settings(documents=(counts.documents,), limit=counts.passages, seed=source.seed)
    places = len(multidoc_qa.gold_places(counts.documents, settings.positions))
    items = multidoc_qa.items(source.data, settings, ModelSubject(loaded))
    questions = []
    for index in range(len(items) // places):
        item = items[index * places + index % places]
        assert isinstance(item, Generated)
        prompt, references = item.make()
        questions.append(_asked(loaded, prompt, references[:1]))
    return _split(questions, loaded.tokenizer, QUESTION)


def _asked(loaded: Loaded, prompt: str, references: Sequence[str]) -> Question:
    """Return a prompt in the chat template with its answer, which begins with the prompt's line
    "Answer:"."""
    asked, _, beginning = prompt.rpartition("\nAnswer:")
    text = chat_prompt(loaded.tokenizer, [("user", asked)]) + f"Answer:{beginning}"
    places = []
    for i, reference in enumerate(references):
        text += ", " if i else " "
        # A blank belongs to the word after it.
        places.append((len(text) - 1, len(text) + len(reference)))
        text += reference
    ids, spans = find_tokens(loaded.tokenizer, text, places)
    return Question(ids, tuple(spans))
