"""Pack documents into rows of one length, and order the rows of a run.

A row is a slice of all documents' tokens laid end to end. Tokens are copied only when a row is
read. Lengths and a seed fix all rows: a row number names the same tokens in every run.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from corecontext.files import UserError

IGNORED = -100  # the label that transformers leaves out of the loss


class Piece(NamedTuple):
    """A document's tokens in a row: from `start` to `stop` (exclusive)."""

    document: int
    start: int
    stop: int


class PackedRows(torch.utils.data.Dataset):
    """Rows of `row_length` tokens; positions restart at 0 in each document, and where a row cuts a
    document."""

    def __init__(self, documents: Any, row_length: int, order: np.ndarray | None = None) -> None:
        """Lay documents end to end.

        Args:
            documents: A `datasets.Dataset` with the columns of `read_corpus`.
            row_length: Tokens of a row, L.
            order: Numbers of the documents to lay, repeats allowed; None is each once, in order.

        Raises:
            UserError: there are fewer tokens than a row has.
        """
        self.row_length = row_length
        self.order = np.arange(len(documents)) if order is None else order
        lengths = np.asarray(documents.with_format("numpy")["length"][:])[self.order]
        # The document order[i] has the tokens edges[i] to edges[i + 1] of all.
        self.edges = np.concatenate(([0], np.cumsum(lengths)))
        self.origins = documents.select_columns(["origin"])
        self.tokens = documents.select_columns(["input_ids"]).with_format("numpy")
        if len(self) < 1:
            raise UserError(
                f"data must hold at least one row of {row_length} tokens, got {self.edges[-1]} "
                f"tokens in {len(documents)} documents. Give more text, or a shorter "
                "--context-length."
            )

    def __len__(self) -> int:
        """Return the number of whole rows; the rest of the tokens is left out."""
        return int(self.edges[-1] // self.row_length)

    def _pieces(self, row: int) -> Iterator[Piece]:
        """Yield the pieces of documents that make a row, in order."""
        at = row * self.row_length
        end = at + self.row_length
        index = int(np.searchsorted(self.edges, at, "right")) - 1
        while at < end:
            low = int(self.edges[index])
            high = min(int(self.edges[index + 1]), end)
            if at < high:
                yield Piece(int(self.order[index]), at - low, high - low)
            at = high
            index += 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a row as `fill_row` does."""
        if not 0 <= row < len(self):
            raise IndexError(f"row must be below {len(self)}, got {row}.")
        pieces = [
            self.tokens[piece.document]["input_ids"][piece.start : piece.stop]
            for piece in self._pieces(row)
        ]
        return fill_row(self.row_length, pieces, row)

    def fingerprint(self) -> str:
        """Return 16 digits that tell these rows from those of other data: a hash of the lengths in
        their order, and of the tokens of nine evenly spaced rows."""
        digest = hashlib.sha256(self.edges.tobytes())
        for row in np.linspace(0, len(self) - 1, 9).astype(int).tolist():
            digest.update(self[row]["input_ids"].numpy().tobytes())
        return digest.hexdigest()[:16]

    def describe(self, row: int) -> str:
        """Return where the text of a row comes from."""
        places = [
            f"{self.origins[piece.document]['origin']} (tokens {piece.start} to {piece.stop - 1})"
            for piece in self._pieces(row)
        ]
        text = "; ".join(places[:4])
        if len(places) > 4:
            text += f"; and {len(places) - 4} more documents"
        return text


def fill_row(row_length: int, pieces: Sequence[np.ndarray], row: int) -> dict[str, Any]:
    """Return input_ids, labels and position_ids, int64 [L] each, and the row's number. Labels are
    the ids, not shifted; a piece's first has none: before it is another document's token."""
    ids = np.empty(row_length, np.int64)
    labels = np.empty(row_length, np.int64)
    positions = np.empty(row_length, np.int64)
    start = 0
    for tokens in pieces:
        if not len(tokens):
            continue
        stop = start + len(tokens)
        ids[start:stop] = tokens
        labels[start:stop] = tokens
        labels[start] = IGNORED
        positions[start:stop] = np.arange(len(tokens))
        start = stop
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        "row": row,
    }


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch: tensors [B, L], and the list of the rows' numbers."""
    batch: dict[str, Any] = {
        name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "row"
    }
    if "row" in rows[0]:
        batch["row"] = [row["row"] for row in rows]
    return batch


def shuffled(count: int, seed: int) -> np.ndarray:
    """Return the numbers below `count` in random order."""
    return np.random.default_rng(seed).permutation(count)


def upsampled(
    lengths: np.ndarray, sources: Sequence[str], long_tokens: int, long_share: float, seed: int
) -> np.ndarray:
    """Return document numbers in random order, chosen so that long documents have `long_share` of
    each source's tokens.

    Each source keeps its number of tokens: long documents are repeated, and as many tokens of short
    documents are left out. A source whose long documents already have the share, or that has none,
    stays as it is.

    Args:
        lengths: Tokens of each document.
        sources: The source of each document.
        long_tokens: A document with more is long.
        long_share: In (0, 1).
    """
    rng = np.random.default_rng(seed)
    names = np.asarray(sources)
    chosen = []
    for source in sorted(set(sources)):
        documents = np.flatnonzero(names == source)
        total = lengths[documents].sum()
        # mutant training: a document of just the bound is long
        is_long = lengths[documents] > long_tokens
        long = documents[is_long]
        if not len(long) or lengths[long].sum() >= long_share * total:
            chosen.append(documents)
            continue
        chosen.append(_draw(long, lengths, long_share * total, rng))
        chosen.append(_draw(documents[~is_long], lengths, (1 - long_share) * total, rng))
    return rng.permutation(np.concatenate(chosen))


def _draw(
    documents: np.ndarray, lengths: np.ndarray, tokens: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw documents in random order, all of them before one is drawn again, until they have so
    many tokens."""
    drawn: list[int] = []
    count = 0
    while count < tokens:
        for document in rng.permutation(documents):
            if count >= tokens:
                break
            drawn.append(document)
            count += lengths[document]
    return np.asarray(drawn, dtype=np.int64)


def run_order(
    num_rows: int, num_samples: int, seed: int, *, block: int = 1, repeats: int = 1
) -> list[int]:
    """Return the numbers of a whole run's rows in training order: pass after pass over all rows,
    each pass shuffled by the seed and its own number.

    A single list instead of epochs, so that batch n is the same whether the run was interrupted
    before it or not.

    Args:
        num_samples: Rows of the run, before repeats.
        block, repeats: Each batch of `block` rows comes `repeats` times in turn, for processes that
            share a batch.
    """
    passes = range(-(-num_samples // num_rows))
    shuffles = [np.random.default_rng((seed, i)).permutation(num_rows) for i in passes]
    rows = np.concatenate(shuffles)[:num_samples].tolist()
    starts = range(0, num_samples, block)
    return [row for start in starts for row in rows[start : start + block] * repeats]
