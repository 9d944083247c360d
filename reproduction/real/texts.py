"""Cut windows from long documents, for measuring and training a pretrained model."""

from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from corecontext.data.packing import fill_row
from corecontext.data.readers import read_documents
from corecontext.files import UserError

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
