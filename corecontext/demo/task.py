"""What the demo asks: the document with facts planted at several depths, and a question for
each."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from typing import Any

from corecontext.data.retrieval import KINDS, Fact, make_facts, plant


@dataclass(frozen=True)
class Question:
    """A question about one planted fact."""

    fact: Fact
    depth: float
    """Where the fact stands: 0 at the beginning of the text, 1 at its end."""
    distance: int
    """Tokens between the fact and the end of the text."""
    token_ids: list[int]
    """The question's tokens, without a beginning-of-text token: they continue the text."""
    max_new_tokens: int


@dataclass(frozen=True)
class Task:
    """The demo's input, the same for every method."""

    token_ids: list[int]
    document_mask: list[bool]
    """True for the document's own tokens, False for planted facts, which perplexity leaves out."""
    questions: list[Question]

    def to_json(self) -> str:
        """For the process that measures."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(
            values["token_ids"],
            values["document_mask"],
            [
                Question(**{**question, "fact": Fact(**question["fact"])})
                for question in values["questions"]
            ],
        )


def make_task(
    tokenizer: Any,
    document: str,
    *,
    num_questions: int = 6,
    max_tokens: int | None = None,
    seed: int = 0,
) -> Task:
    """Plant facts at equal distances in a document and ask for each at its end.

    Args:
        tokenizer: The model's.
        document: Plain text.
        num_questions: How many facts to plant.
        max_tokens: Most tokens of the result; the document is cut to that.
        seed: Of the facts.
    """
    facts = make_facts(random.Random(seed), KINDS, num_questions)
    token_ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if max_tokens is not None:
        room = (
            max_tokens
            - len(token_ids)
            - sum(len(_encode(tokenizer, fact.sentence + "\n")) for fact in facts)
        )
        document = tokenizer.decode(_encode(tokenizer, document)[: max(0, room)]).rstrip("\ufffd")
    rest = plant(document, facts, [(i + 0.5) / num_questions for i in range(num_questions)])
    mask, ends = [False] * len(token_ids), []

    def put(text: str, own: bool) -> None:
        piece = _encode(tokenizer, text)
        token_ids.extend(piece)
        mask.extend([own] * len(piece))

    for fact in facts:
        before, rest = rest.split(fact.sentence, 1)
        put(before, True)
        put(
            fact.sentence + rest[0], False
        )  # with the blank or line break that was planted behind it
        rest = rest[1:]
        ends.append(len(token_ids))
    put(rest, True)
    return Task(
        token_ids,
        mask,
        [
            Question(
                fact,
                end / len(token_ids),
                len(token_ids) - end,
                _encode(tokenizer, fact.prompt),
                len(_encode(tokenizer, fact.completion)) + 2,
            )
            for fact, end in zip(facts, ends)
        ],
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a piece of text that continues another."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
