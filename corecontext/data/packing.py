"""Documents packed into rows of one length: which document lies where, and in which order training
sees the rows.

A row is a slice of all documents' tokens laid end to end. Nothing is copied before a row is asked
for, and everything follows from lengths and seeds, so a row has a number that names the same tokens
in every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from corecontext.files import UserError

IGNORED = -100  # the label that transformers leaves out of the loss


class PackedRows(torch.utils.data.Dataset):
    """Rows of `row_length` tokens; positions begin at 0 in each document, and where a row cuts one,
    again."""

    def __init__(self, documents: Any, row_length: int, order: np.ndarray | None = None) -> None:
        """documents: with columns input_ids, length and origin, as `read_corpus` makes. order:
        their numbers, repeats allowed; default as they are.

        Raises:
            UserError: there are fewer tokens than one row has.
        """
        self.row_length = row_length
        self.order = np.arange(len(documents)) if order is None else order
        lengths = np.asarray(documents.with_format("numpy")["length"][:])[self.order]
        self.edges = np.concatenate(([0], np.cumsum(lengths)))
        self.origins = documents.select_columns(["origin"])
        self.tokens = documents.select_columns(["input_ids"]).with_format("numpy")
        if len(self) < 1:
            raise UserError(
                f"data must hold at least one row of {row_length} tokens, got {self.edges[-1]} tokens in "
                f"{len(documents)} documents. Give more text, or a shorter --context-length."
            )

    def __len__(self) -> int:
        """Whole rows; the rest of the tokens is left out."""
        return int(self.edges[-1] // self.row_length)

    def _pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Of each document in a row: its number, and the first token and the one after the last
        that lie there."""
        start, end = row * self.row_length, (row + 1) * self.row_length
        at = int(np.searchsorted(self.edges, start, "right")) - 1
        while start < end:
            low, high = int(self.edges[at]), min(int(self.edges[at + 1]), end)
            if start < high:
                yield int(self.order[at]), start - low, high - low
            start, at = high, at + 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        """As `fill_row`."""
        if not 0 <= row < len(self):
            raise IndexError(f"row must be below {len(self)}, got {row}.")
        pieces = [
            self.tokens[document]["input_ids"][low:high]
            for document, low, high in self._pieces(row)
        ]
        return fill_row(self.row_length, pieces, row)

    def mark(self) -> str:
        """Tells rows of other data apart: their documents' lengths and order, and the tokens of a
        few rows."""
        digest = hashlib.sha256(self.edges.tobytes())
        for row in np.linspace(0, len(self) - 1, 9).astype(int).tolist():
            digest.update(self[row]["input_ids"].numpy().tobytes())
        return digest.hexdigest()[:16]

    def describe(self, row: int) -> str:
        """Where the text of a row comes from."""
        found = [
            f"{self.origins[document]['origin']} (tokens {low} to {high - 1})"
            for document, low, high in self._pieces(row)
        ]
        return "; ".join(found[:4]) + (
            f"; and {len(found) - 4} more documents" if len(found) > 4 else ""
        )


def fill_row(row_length: int, pieces: Sequence[np.ndarray], row: int) -> dict[str, Any]:
    """input_ids, labels (the first token of each piece is nobody's to predict) and position_ids,
    [L] each."""
    ids = np.empty(row_length, np.int64)
    positions = np.empty(row_length, np.int64)
    labels, at = ids.copy(), 0
    for tokens in pieces:
        if not len(tokens):
            continue
        piece = slice(at, at := at + len(tokens))
        ids[piece] = labels[piece] = tokens
        positions[piece] = np.arange(len(tokens))
        labels[piece.start] = IGNORED
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        "row": row,
    }


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch: tensors [B, L], and the rows' numbers."""
    return {
        name: [row[name] for row in rows]
        if name == "row"
        else torch.stack([row[name] for row in rows])
        for name in rows[0]
    }


def shuffled(count: int, seed: int) -> np.ndarray:
    """The numbers below count in random order."""
    return np.random.default_rng(seed).permutation(count)


def upsampled(
    lengths: np.ndarray, sources: Sequence[str], long_tokens: int, long_share: float, seed: int
) -> np.ndarray:
    """Document numbers in random order in which long documents make up `long_share` of each
    source's tokens.

    Each source keeps its share of all tokens: long documents come more often, and as many tokens of
    short ones are left out. A source whose long documents already have the share, or that has none,
    stays as it is.

    Args:
        lengths: Tokens of each document.
        long_tokens: A document with more is long.
        long_share: In (0, 1).
    """
    rng = np.random.default_rng(seed)
    names = np.asarray(sources)
    chosen = []
    for source in sorted(set(sources)):
        here = np.flatnonzero(names == source)
        is_long = lengths[here] > long_tokens
        long, short, total = here[is_long], here[~is_long], lengths[here].sum()
        if not len(long) or lengths[long].sum() >= long_share * total:
            chosen.append(here)
            continue
        chosen += [
            _drawn(part, lengths, share * total, rng)
            for part, share in ((long, long_share), (short, 1 - long_share))
        ]
    return rng.permutation(np.concatenate(chosen))


def _drawn(
    documents: np.ndarray, lengths: np.ndarray, tokens: float, rng: np.random.Generator
) -> np.ndarray:
    """Documents in random order, over and over, until they have so many tokens."""
    found, have = [], 0
    while have < tokens:
        for document in rng.permutation(documents):
            if have >= tokens:
                break
            found.append(document)
            have += lengths[document]
    return np.asarray(found, dtype=np.int64)


class RunOrder(torch.utils.data.Sampler):
    """The rows of a whole run in the order they are seen: pass after pass over all rows, each
    shuffled by its number.

    One long list instead of epochs, so that the n-th batch is the same whether the run was stopped
    before or not.
    """

    def __init__(
        self, num_rows: int, num_samples: int, seed: int | None, *, block: int = 1, repeats: int = 1
    ) -> None:
        """seed: None for rows that lie in their order already.

        block, repeats: each `block` neighbours come `repeats` times, for processes that share a
        batch.
        """
        super().__init__()
        self.num_rows, self.num_samples, self.seed, self.block, self.repeats = (
            num_rows,
            num_samples,
            seed,
            block,
            repeats,
        )

    def __len__(self) -> int:
        return self.num_samples * self.repeats

    def _rows(self) -> Iterator[int]:
        if self.seed is None:
            yield from range(self.num_samples)
            return
        for start in range(0, self.num_samples, self.num_rows):
            rng = np.random.default_rng((self.seed, start // self.num_rows))
            yield from rng.permutation(self.num_rows)[: self.num_samples - start].tolist()

    def __iter__(self) -> Iterator[int]:
        block: list[int] = []
        for row in self._rows():
            block.append(row)
            if len(block) == self.block:
                yield from block * self.repeats
                block = []
        yield from block * self.repeats
