"""Make the demo's task: a document with facts planted at several depths, and their questions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from corecontext.data.retrieval import KINDS, Fact, make_facts, plant


@dataclass(frozen=True)
class Question:
    """A question about one planted fact."""

    fact: Fact
    depth: float
    """Place of the fact: 0 at the beginning of the text, 1 at its end."""
    distance: int
    """Tokens between the fact and the end of the text."""
    token_ids: list[int]
    """The question's tokens, without a beginning-of-text token: they continue the text. In a chat
    the whole prompt."""
    max_new_tokens: int
    in_chat: bool = False
    """Whether a chat model answers, in words of its own."""

    def is_correct(self, answer: str) -> bool:
        """Return whether an answer is the fact's; in a chat, whether it contains it."""
        if self.in_chat:
            return self.fact.answer in answer
        return self.fact.is_correct(answer)


@dataclass(frozen=True)
class Task:
    """The demo's input, the same for every method."""

    token_ids: list[int]
    document_mask: list[bool]
    """True for tokens that perplexity counts: the document's own, not planted facts."""
    questions: list[Question]


def make_task(
    tokenizer: Any, document: str, num_questions: int, max_tokens: int, seed: int = 0
) -> Task:
    """Plant facts at equal distances in a document, cut so that the result has at most
    `max_tokens` tokens, and ask for each fact at its end by the beginning of its sentence."""
    facts = make_facts(random.Random(seed), KINDS, num_questions)
    token_ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    planted = sum(len(_encode(tokenizer, fact.sentence + "\n")) for fact in facts)
    room = max(0, max_tokens - len(token_ids) - planted)
    document = tokenizer.decode(_encode(tokenizer, document)[:room]).rstrip("\ufffd")
    rest = plant(document, facts, [(i + 0.5) / num_questions for i in range(num_questions)])
    mask = [False] * len(token_ids)
    ends = []

    def append(text: str, is_document: bool) -> None:
        piece = _encode(tokenizer, text)
        token_ids.extend(piece)
        mask.extend([is_document] * len(piece))

    for fact in facts:
        before, rest = rest.split(fact.sentence, 1)
        append(before, True)
        append(fact.sentence + rest[0], False)  # with the blank or line break planted behind it
        rest = rest[1:]
        ends.append(len(token_ids))
    append(rest, True)
    length = len(token_ids)
    questions = [
        Question(
            fact,
            depth=end / length,
            distance=length - end,
            token_ids=_encode(tokenizer, fact.prompt),
            max_new_tokens=len(_encode(tokenizer, fact.completion)) + 2,
        )
        for fact, end in zip(facts, ends)
    ]
    return Task(token_ids, mask, questions)


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a piece of text that continues another."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
