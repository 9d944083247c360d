"""Make the demo's task: a document with facts planted at several depths, and their questions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from corecontext.data.retrieval import KINDS, Fact, make_facts, plant

CHAT_KINDS = ("passkey", "value")


@dataclass(frozen=True)
class Question:
    """A question about one planted fact."""

    fact: Fact
    depth: float
    """Place of the fact: 0 at the beginning of the text, 1 at its end."""
    distance: int
    """Tokens between the fact and the end of the text."""
    token_ids: list[int]
    """The question's tokens, without a beginning-of-text token: they continue the text."""
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
    """True for tokens that perplexity counts: the document's own, not planted facts; for a chat
    model those of the second half, the far ones."""
    questions: list[Question]


def make_task(
    tokenizer: Any, document: str, num_questions: int, max_tokens: int, seed: int = 0
) -> Task:
    """Plant facts at equal distances in a document, cut so that the result has at most
    `max_tokens` tokens, and ask for each fact at its end: by the model's chat template where it has
    one, else by the beginning of the fact's sentence."""
    in_chat = bool(tokenizer.chat_template)
    facts = make_facts(random.Random(seed), CHAT_KINDS if in_chat else KINDS, num_questions)
    if in_chat:
        head, tail = _chat_frame(tokenizer)
        token_ids = _encode(tokenizer, head)
        prompts = [f"\n\n{_chat_question(fact)}{tail}" for fact in facts]
    else:
        token_ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        prompts = [fact.prompt for fact in facts]
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
    if in_chat:
        mask[: length // 2] = [False] * (length // 2)
    questions = [
        Question(
            fact,
            depth=end / length,
            distance=length - end,
            token_ids=_encode(tokenizer, prompt),
            max_new_tokens=len(_encode(tokenizer, fact.completion)) + (24 if in_chat else 2),
            in_chat=in_chat,
        )
        for fact, prompt, end in zip(facts, prompts, ends)
    ]
    return Task(token_ids, mask, questions)


def _chat_frame(tokenizer: Any) -> tuple[str, str]:
    """Return what the chat template writes before and after the user's message."""
    message = [{"role": "user", "content": "\x00"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    head, _, tail = text.partition("\x00")
    return head + "Read this text and answer the question after it.\n\n", tail


def _chat_question(fact: Fact) -> str:
    """Return the question about a fact whose sentence says "The ... is ANSWER."."""
    subject = fact.sentence.partition(" is ")[0]
    return f"Question: What is {subject[0].lower()}{subject[1:]}? Answer with the number only."


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a piece of text that continues another."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
