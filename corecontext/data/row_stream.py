"""Read and tokenise a corpus row by row during training, without a copy of its tokens on disk.

As in `packing`, a row number names the same tokens in every run. Documents come in blocks, each
shuffled by its own number, and are laid end to end. At each block's beginning the state is recorded
together with the tokens left over, so that a run continues from there and not from the start.
States only save time: without them the rows are the same.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from corecontext.data.corpus import check_named
from corecontext.data.documents import HUB, Fields, HubName, documents, files_of
from corecontext.data.packing import fill_row, join_places
from corecontext.files import UserError, first_line

_AT_ONCE = 16  # documents tokenised together


class FileShard:
    """The documents of a file, readable from any of them on."""

    def __init__(self, path: str, fields: Fields) -> None:
        self.path = path
        self.fields = fields
        self.count = 0
        self.mark = f"{Path(path).name} {Path(path).stat().st_size}"

    def read(self, state: Any = None) -> Iterator[dict[str, str]]:
        """Yield the documents after those that `state` counts; None for all."""
        self.count = state or 0
        for document in itertools.islice(documents([self.path], self.fields), self.count, None):
            self.count += 1
            yield document

    def state(self) -> Any:
        """Return the state from which `read` continues after the last document."""
        return self.count


class HubShard:
    """A shard of a dataset on the hub, readable from any row on."""

    def __init__(self, name: HubName, rows: Any, index: int, fields: Fields) -> None:
        self.name = name
        self.rows = rows
        self.index = index
        self.fields = fields
        self.count = 0
        self.mark = f"{name.identifier} {index}"

    def read(self, state: Any = None) -> Iterator[dict[str, str]]:
        """As `FileShard.read`.

        Raises:
            UserError: the hub does not answer, after the retries of `datasets`.
        """
        # A new view of the shard: an old one would begin again at the state it was given.
        self.shard = self.rows.shard(num_shards=self.rows.num_shards, index=self.index)
        self.count = 0
        if state is not None:
            self.count = state["count"]
            self.shard.load_state_dict(state["rows"])
        name = self.name._replace(identifier=f"{self.name.identifier} part {self.index}")
        rows = iter(self.shard)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # of as many kinds as in HubName.load
                raise UserError(
                    f"dataset '{self.name.identifier}' cannot be read on: {first_line(error)}. The "
                    "same command continues the run from its last checkpoint."
                ) from None
            if row is None:
                return
            self.count += 1
            if (document := name.document(row, self.count, self.fields)) is not None:
                yield document

    def state(self) -> Any:
        """Return the state from which `read` continues after the last document."""
        return {"count": self.count, "rows": self.shard.state_dict()}


def open_shards(
    names: Sequence[str],
    *,
    text_field: str = "text",
    source_field: str | None = None,
    cache_dir: str | None = None,
) -> list[FileShard | HubShard]:
    """Return the files, and shards of hub datasets, that some names stand for; names as in
    `read_corpus`.

    Raises:
        UserError: a file is missing, or a hub dataset cannot be loaded.
    """
    check_named(names)
    fields = Fields(text_field, source_field)
    shards: list[FileShard | HubShard] = []
    for name in names:
        if name.startswith(HUB):
            hub_name = HubName.parse(name)
            rows = hub_name.load(cache_dir=cache_dir, streaming=True)
            shards += [HubShard(hub_name, rows, i, fields) for i in range(rows.num_shards)]
        else:
            shards += [FileShard(str(path), fields) for path in files_of(name)]
    return shards


class _Tokens(NamedTuple):
    """Consecutive tokens of a document, the first of them at `start`."""

    origin: str
    start: int
    ids: np.ndarray


class StreamedRows(torch.utils.data.Dataset):
    """Rows of `row_length` tokens in training order, to be read in that order."""

    def __init__(
        self,
        shards: Sequence[FileShard | HubShard],
        encode: Callable[[list[str]], list[list[int]]],
        row_length: int,
        count: int,
        *,
        seed: int = 0,
        block_size: int = 1000,
        ahead: int = 64,
    ) -> None:
        """Begin at the first row.

        Args:
            encode: From texts to token ids, as `corpus.encoder` makes it.
            row_length: Tokens of a row, L.
            count: Rows of the whole run; after the last document comes the first one again, in
                another order.
            block_size: Documents shuffled together. Files and shards come in random order, too.
            ahead: How many rows before the last row read remain available, and their states.
        """
        self.shards = shards
        self.encode = encode
        self.row_length = row_length
        self.count = count
        self.seed = seed
        self.block_size = block_size
        self.ahead = ahead
        self._origins: dict[int, str] = {}
        self.load_state_dict(
            {"row": 0, "pass": 0, "shard": 0, "inner": None, "block": 0, "first": 0, "rest": []}
        )

    def __len__(self) -> int:
        """Return the number of rows of the whole run."""
        return self.count

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._states = [state]
        self._restart(state)

    def state_dict(self, row: int) -> dict[str, Any]:
        """Return the last state, of plain values, from which a row and its successors can be
        read."""
        return [state for state in self._states if state["row"] <= row][-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return input_ids, labels and position_ids, [L] each, as PackedRows does.

        Raises:
            UserError: a document is broken (says where), or all hold less than a row.
        """
        if not 0 <= row < self.count:
            raise IndexError(f"row must be below {self.count}, got {row}.")
        if row < self._row:
            self._restart(self.state_dict(row))
        while True:
            pieces = self._next_row()
            if self._row > row:
                break
        self._forget(row)
        return fill_row(self.row_length, [piece.ids for piece in pieces], row)

    def mark(self) -> str:
        """Return 16 digits that tell other data apart, as far as is possible before it is read:
        they depend on the names and sizes of files."""
        marks = "\n".join(shard.mark for shard in self.shards)
        return hashlib.sha256(marks.encode()).hexdigest()[:16]

    def describe(self, row: int) -> str:
        """Return where the text of a recently read row comes from."""
        return self._origins.get(row, "read long ago")

    # Row after row

    def _restart(self, state: dict[str, Any]) -> None:
        """Read on from a state of `_record_state`."""
        self._row = state["row"]
        self._pass = state["pass"]
        self._shard = state["shard"]
        self._block = state["block"]
        self._first = state["first"]
        """Row with which this pass began."""
        self._rest: deque[_Tokens] = deque(
            _Tokens(origin, start, np.asarray(ids, np.int64))
            for origin, start, ids in state["rest"]
        )
        """Tokens not yet in a row."""
        self._available = sum(len(tokens.ids) for tokens in self._rest)
        self._block_documents: list[dict[str, str]] = []
        self._reading: Iterator[dict[str, str]] | None = None
        self._inner = state["inner"]
        """State of the shard to continue with."""

    def _next_row(self) -> list[_Tokens]:
        """Return the pieces of documents that make the next row."""
        while self._available < self.row_length:
            if not self._block_documents:
                self._record_state()
                self._block_documents = self._next_block()
            else:
                self._tokenise_next()
        pieces = []
        missing = self.row_length
        while missing:
            tokens = self._rest.popleft()
            if len(tokens.ids) > missing:
                rest = tokens._replace(start=tokens.start + missing, ids=tokens.ids[missing:])
                self._rest.appendleft(rest)
                tokens = tokens._replace(ids=tokens.ids[:missing])
            missing -= len(tokens.ids)
            pieces.append(tokens)
        self._available -= self.row_length
        places = [
            f"{origin} (tokens {start} to {start + len(ids) - 1})"
            for origin, start, ids in pieces
            if len(ids)
        ]
        self._origins[self._row] = join_places(places, "more")
        self._row += 1
        return pieces

    def _tokenise_next(self) -> None:
        """Move the next documents of the block to the tokens."""
        batch = self._block_documents[:_AT_ONCE]
        self._block_documents = self._block_documents[_AT_ONCE:]
        for document, ids in zip(batch, self.encode([document["text"] for document in batch])):
            self._rest.append(_Tokens(document["origin"], 0, np.asarray(ids, np.int64)))
            self._available += len(ids)

    def _next_block(self) -> list[dict[str, str]]:
        """Return the next documents in random order; none at the end of a pass, where another
        begins."""
        block: list[dict[str, str]] = []
        while len(block) < self.block_size and self._shard < len(self.shards):
            if self._reading is None:
                self._reading = self._current_shard().read(self._inner)
            document = next(self._reading, None)
            if document is not None:
                block.append(document)
                continue
            self._reading = None
            self._inner = None
            self._shard += 1
        if block:
            # mutant training: every pass over a block has one order
            rng = np.random.default_rng((self.seed, self._pass, self._block))
            self._block += 1
            return [block[i] for i in rng.permutation(len(block))]
        if self._row == self._first:
            raise UserError(
                f"data must hold at least one row of {self.row_length} tokens, got "
                f"{self._available} tokens. Give more text, or a shorter --context-length."
            )
        # The tokens that do not fill a row are left out, as in PackedRows.
        self._rest.clear()
        self._available = 0
        self._pass += 1
        self._shard = 0
        self._block = 0
        self._first = self._row
        return []

    def _current_shard(self) -> FileShard | HubShard:
        """Return the shard in reading; each pass has an order of its own."""
        order = np.random.default_rng((self.seed, self._pass)).permutation(len(self.shards))
        return self.shards[order[self._shard]]

    # States

    def _record_state(self) -> None:
        """Record the state at the beginning of a block; the last one for each row."""
        inner = self._inner
        if self._reading is not None:
            inner = self._current_shard().state()
        state = {
            "row": self._row,
            "pass": self._pass,
            "shard": self._shard,
            "inner": inner,
            "block": self._block,
            "first": self._first,
            "rest": [(origin, start, ids.tolist()) for origin, start, ids in self._rest],
        }
        if self._states[-1]["row"] == self._row:
            self._states.pop()
        if not self._states or self._states[-1]["row"] < self._row:
            self._states.append(state)

    def _forget(self, row: int) -> None:
        """Drop the states and origins of rows too far back."""
        oldest = row - self.ahead
        while len(self._states) > 1 and self._states[1]["row"] <= oldest:
            del self._states[0]
        self._origins = {i: place for i, place in self._origins.items() if i >= oldest}
