"""Hide a number in a text and ask a model for it, through its chat template (needles)."""

import contextlib
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from corecontext.data.chat import chat_prompt
from corecontext.data.retrieval import Fact, plant
from corecontext.files import UserError

SENTENCE = "The special magic number is {number}."
QUESTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the number afterwards.\n\n{text}\n\nWhat is the special magic number?"
)
ANSWER = "The special magic number is"
"""The beginning of the answer; the prompt ends with it."""
ANSWER_TOKENS = 32
"""Most tokens that a model may answer with."""


class Needle(NamedTuple):
    """A prompt in the model's chat template whose answer is a number hidden in it."""

    ids: list[int]
    """The tokens of the prompt."""
    answer: list[int]
    """Those of the number."""
    number: str
    depth: float
    """Place of the number in the text, from 0 (the beginning) to 1 (the end)."""

    def is_found(self, answer: str) -> bool:
        """Whether an answer has all digits."""
        return self.number in answer


def make_needles(text: str, tokenizer: Any, length: int, count: int, seed: int) -> list[Needle]:
    """Return `count` prompts of at most `length` tokens, and only a few fewer; the number is at
    evenly spaced depths.

    Each has another piece of the text and another number of seven digits.

    Raises:
        UserError: the text is too short, the length has no room for a question, or the tokenizer
            does not tell the offsets of its tokens.
    """
    offsets = _encode(tokenizer, text)["offset_mapping"]
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
        piece_tokens = length
        needle = None
        # Cut the piece until the prompt fits: question and chat template take tokens, too.
        while needle is None or len(needle.ids) > length:
            piece_tokens -= 0 if needle is None else len(needle.ids) - length
            if piece_tokens < 1:
                raise UserError(f"length must have room for a question, got {length} tokens.")
            piece = text[offsets[start][0] : offsets[start + piece_tokens - 1][1]]
            needle = _needle(tokenizer, piece, number, depth)
        needles.append(needle)
    return needles


def _needle(tokenizer: Any, text: str, number: str, depth: float) -> Needle:
    """Hide a number in a text, and return the prompt that asks for it."""
    fact = Fact("passkey", SENTENCE.format(number=number), "", number)
    question = QUESTION.format(text=plant(text, [fact], [depth]))
    prompt = chat_prompt(tokenizer, [("user", question)]) + ANSWER
    span = (len(prompt), len(prompt) + 1 + len(number))  # a blank and the number
    ids, (place,) = find_tokens(tokenizer, f"{prompt} {number}", [span])
    return Needle(ids[: place.start], ids[place], number, depth)


def find_tokens(
    tokenizer: Any, text: str, places: Sequence[tuple[int, int]]
) -> tuple[list[int], list[slice]]:
    """Return the tokens of a text, and for each of `places`, characters from start to end
    (exclusive), the slice of the tokens that hold it.

    Raises:
        UserError: the tokenizer does not tell the offsets of its tokens.
    """
    encoded = _encode(tokenizer, text)
    offsets = encoded["offset_mapping"]
    ends = [end for _, end in offsets]
    starts = [start for start, _ in offsets]
    spans = [slice(bisect_right(ends, start), bisect_left(starts, end)) for start, end in places]
    return encoded["input_ids"], spans


def _encode(tokenizer: Any, text: str) -> Any:
    """Return a text's "input_ids" and "offset_mapping": (start, end) of each token's characters."""
    options = {"return_offsets_mapping": True, "add_special_tokens": False, "verbose": False}
    encoded = {}
    with contextlib.suppress(ValueError, NotImplementedError):
        encoded = tokenizer(text, **options)
    if "offset_mapping" not in encoded:  # a tokenizer in plain Python ignores or refuses it
        raise UserError(
            "tokenizer must give the places of its tokens, got one that does not. Use a model with "
            "a tokenizer.json."
        )
    return encoded
