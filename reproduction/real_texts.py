"""Cut windows from long documents, and hide numbers in essays, for measuring a pretrained model."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from corecontext.data.chat import chat_prompt
from corecontext.data.packing import fill_row
from corecontext.data.readers import find_file, read_documents
from corecontext.data.retrieval import Fact, plant
from corecontext.files import UserError

SENTENCE = "The secret number is {number}."
QUESTION = (
    "A secret number is hidden in the text below. Memorize it: a question follows the text.\n\n"
    "{text}\n\nWhat is the secret number?"
)
TOKENISED_AT_ONCE = 16
"""Documents, in parallel threads."""


class Window(NamedTuple):
    """Consecutive tokens of one document."""

    origin: str
    ids: np.ndarray
    """[L], int32."""


def cut_windows(
    path: Path, tokenizer: Any, length: int, count: int, most: int | None = None
) -> list[Window]:
    """Return the first windows of `length` tokens inside documents, without overlap.

    Args:
        path: JSON lines with `text`.
        count: Windows to cut; fewer where the file has no more.
        most: Windows of one document at most; None for all.

    Raises:
        UserError: no document is as long.
    """
    windows: list[Window] = []
    documents = read_documents(path)
    while len(windows) < count and (batch := list(islice(documents, TOKENISED_AT_ONCE))):
        tokens = tokenizer([text for _, _, text in batch], verbose=False)["input_ids"]
        for (name, _, _), ids in zip(batch, tokens):
            starts = range(0, len(ids) - length + 1, length)[:most]
            pieces = (np.asarray(ids[i : i + length], np.int32) for i in starts)
            windows += [Window(f"{name}, token {i}", piece) for i, piece in zip(starts, pieces)]
    if not windows:
        raise UserError(f"length must be at most that of a document in '{path}', got {length}.")
    return windows[:count]


class WindowRows(torch.utils.data.Dataset):
    """Training rows that are one window each."""

    def __init__(self, windows: list[Window]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.windows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a row as `fill_row` does."""
        ids = self.windows[row].ids
        return fill_row(len(ids), [ids], row)

    def describe(self, row: int) -> str:
        """Return where the text of a row comes from."""
        return self.windows[row].origin


class Needle(NamedTuple):
    """A prompt in the model's chat template whose answer is a number hidden in it."""

    ids: list[int]
    number: str
    depth: float
    """Place of the number in the text, from 0 (the beginning) to 1 (the end)."""

    def is_found(self, answer: str) -> bool:
        """Whether an answer has all digits."""
        return self.number in answer


def make_needles(folder: str, tokenizer: Any, length: int, count: int, seed: int) -> list[Needle]:
    """Return prompts of at most `length` tokens, and only a few fewer, at `count` even depths.

    Each has another piece of the essays and another number of seven digits.

    Args:
        folder: Holds haystack_essays.

    Raises:
        UserError: the essays are too short, or the length has no room for a question.
    """
    path = find_file(folder, ("haystack_essays",))
    essays = "\n\n".join(text for _, _, text in read_documents(path))
    options = {"return_offsets_mapping": True, "add_special_tokens": False, "verbose": False}
    offsets = tokenizer(essays, **options)["offset_mapping"]
    if len(offsets) < length:
        raise UserError(
            f"haystack_essays must have at least {length} tokens, got {len(offsets)} in '{path}'."
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
            text = essays[offsets[start][0] : offsets[start + tokens - 1][1]]
            ids = _prompt(tokenizer, text, number, depth)
        needles.append(Needle(ids, number, depth))
    return needles


def _prompt(tokenizer: Any, text: str, number: str, depth: float) -> list[int]:
    """Return the token ids of a chat that asks for the number hidden in a text."""
    fact = Fact("passkey", SENTENCE.format(number=number), "", number)
    question = QUESTION.format(text=plant(text, [fact], [depth]))
    prompt = chat_prompt(tokenizer, [("user", question)])
    return tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
