"""Make the demo's prompts: numbers hidden in a user's text, or a document with planted facts."""

import random
from dataclasses import dataclass
from typing import Any

from corecontext.data.needles import ANSWER_TOKENS, SENTENCE, make_needles
from corecontext.data.retrieval import KINDS, Fact, make_facts, plant

ASKED = "What is the special magic number?"
"""The question of needle prompts as tables show it."""


@dataclass(frozen=True)
class Question:
    """Hold a question about one planted fact."""

    fact: Fact
    depth: float
    """Place of the fact: 0 at the beginning of the text, 1 at its end."""
    distance: int
    """Tokens between the fact and the end of the text."""
    max_new_tokens: int
    """Most tokens of an answer."""
    token_ids: list[int]
    """The question's tokens, which continue the prompt; empty where the prompt itself asks."""

    def is_correct(self, answer: str) -> bool:
        """Whether an answer is the fact's; where the prompt itself asks, whether it contains it."""
        if self.token_ids:
            return self.fact.is_correct(answer)
        return self.fact.answer in answer


@dataclass(frozen=True)
class Prompt:
    """Hold a text that every method reads, and the questions about it."""

    token_ids: list[int]
    is_counted: list[bool]
    """True for the tokens that perplexity counts."""
    questions: list[Question]


def needle_prompts(tokenizer: Any, document: str, count: int, max_tokens: int) -> list[Prompt]:
    """Make `count` prompts of at most `max_tokens` tokens from a document, each with a number
    hidden in it, at even depths, and a question for it, in the model's chat template if there is
    one.

    Perplexity counts the second half of each prompt.
    """
    length = min(len(_encode(tokenizer, document)), max_tokens)
    prompts = []
    for needle in make_needles(document, tokenizer, length, count, seed=0):
        tokens = len(needle.ids)
        fact = Fact("passkey", SENTENCE.format(number=needle.number), ASKED, needle.number)
        distance = round((1 - needle.depth) * tokens)
        question = Question(fact, needle.depth, distance, ANSWER_TOKENS, [])
        is_counted = [i > (tokens - 1) // 2 for i in range(tokens)]
        prompts.append(Prompt(needle.ids, is_counted, [question]))
    return prompts


def fact_prompt(
    tokenizer: Any, document: str, count: int, max_tokens: int, seed: int = 0
) -> Prompt:
    """Plant `count` facts at equal distances in a document, which is cut so that the result has at
    most `max_tokens` tokens. Each question is the beginning of the fact's sentence, at the end.

    Perplexity counts the document's own tokens.
    """
    facts = make_facts(random.Random(seed), KINDS, count)
    token_ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    planted = sum(len(_encode(tokenizer, fact.sentence + "\n")) for fact in facts)
    room = max(0, max_tokens - len(token_ids) - planted)
    document = tokenizer.decode(_encode(tokenizer, document)[:room]).rstrip("\ufffd")
    rest = plant(document, facts, [(i + 0.5) / count for i in range(count)])
    is_counted = [False] * len(token_ids)
    ends = []

    def append(text: str, counted: bool) -> None:
        piece = _encode(tokenizer, text)
        token_ids.extend(piece)
        is_counted.extend([counted] * len(piece))

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
            max_new_tokens=len(_encode(tokenizer, fact.completion)),
            token_ids=_encode(tokenizer, fact.prompt),
        )
        for fact, end in zip(facts, ends)
    ]
    return Prompt(token_ids, is_counted, questions)


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a piece of text that continues another."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
