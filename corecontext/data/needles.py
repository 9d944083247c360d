"""Hide a number in a text and ask a model for it, through its chat template (needles)."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from corecontext.data.chat import chat_prompt
from corecontext.data.retrieval import Fact, plant
from corecontext.files import UserError

SENTENCE = "The secret number is {number}."
QUESTION = (
    "A secret number is hidden in the text below. Memorize it: a question follows the text.\n\n"
    "{text}\n\nWhat is the secret number?"
)
ANSWER_TOKENS = 32
"""Most tokens of an answer."""


class Needle(NamedTuple):
    """A prompt in the model's chat template whose answer is a number hidden in it."""

    ids: list[int]
    number: str
    depth: float
    """Place of the number in the text, from 0 (the beginning) to 1 (the end)."""

    def answered(self, tokenizer: Any) -> tuple[list[int], int]:
        """Return the prompt with the right answer, and the place of the number's first token."""
        options = {"add_special_tokens": False, "verbose": False}
        sentence = SENTENCE.format(number=self.number).removesuffix(".")
        before = sentence.removesuffix(f" {self.number}")
        answer = tokenizer(sentence, **options)["input_ids"]
        start = len(self.ids) + len(tokenizer(before, **options)["input_ids"])
        return [*self.ids, *answer], start

    def is_found(self, answer: str) -> bool:
        """Whether an answer has all digits."""
        return self.number in answer


def make_needles(text: str, tokenizer: Any, length: int, count: int, seed: int) -> list[Needle]:
    """Return prompts of at most `length` tokens, and only a few fewer, at `count` even depths.

    Each has another piece of the text and another number of seven digits.

    Raises:
        UserError: the text is too short, or the length has no room for a question.
    """
    options = {"return_offsets_mapping": True, "add_special_tokens": False, "verbose": False}
    offsets = tokenizer(text, **options)["offset_mapping"]
    if len(offsets) < length:
        raise UserError(
            f"the text around needles must have at least {length} tokens, got {len(offsets)}."
        )
    rng = random.Random(f"{seed}-{length}")
    needles = []
    for i in range(count):
        number = str(rng.randrange(10**6, 10**7))
        start = rng.randrange(len(offsets) - length + 1)
        depth = i / max(1, count - 1)
        tokens = length
        ids: list[int] = []
        # Cut the text until the prompt fits: its question and template take tokens, too.
        while not ids or len(ids) > length:
            tokens -= max(0, len(ids) - length)
            if tokens < 1:
                raise UserError(f"length must have room for a question, got {length} tokens.")
            piece = text[offsets[start][0] : offsets[start + tokens - 1][1]]
            ids = _prompt(tokenizer, piece, number, depth)
        needles.append(Needle(ids, number, depth))
    return needles


def _prompt(tokenizer: Any, text: str, number: str, depth: float) -> list[int]:
    """Return the token ids of a chat that asks for the number hidden in a text."""
    fact = Fact("passkey", SENTENCE.format(number=number), "", number)
    question = QUESTION.format(text=plant(text, [fact], [depth]))
    prompt = chat_prompt(tokenizer, [("user", question)])
    return tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
