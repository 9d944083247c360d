"""Rows of a corpus that is read while it trains: nothing is tokenised ahead or kept on disk.

A row still has a number that names the same tokens in every run. Documents come in blocks, each
shuffled by its own number, and are laid end to end; where a block begins is remembered together
with the tokens left over, so that a run goes on from there and not from the start. What is
remembered only saves time: without it the rows are the same.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corecontext.data.corpus import check_named
from corecontext.data.documents import HUB, HubName, documents, files_of
from corecontext.data.packing import fill_row
from corecontext.files import UserError

_AT_ONCE = 16  # documents tokenised together


class FileShard:
    """The documents of one file, from any of them on."""

    def __init__(self, path: str, text_field: str, source_field: str | None) -> None:
        self.fields, self.path, self.count = (text_field, source_field), path, 0
        self.mark = f"{Path(path).name} {Path(path).stat().st_size}"

    def read(self, state: Any = None) -> Iterator[dict[str, str]]:
        """The documents after those that `state` counts; None for all."""
        self.count = state or 0
        for one in itertools.islice(documents([self.path], *self.fields), self.count, None):
            self.count += 1
            yield one

    def state(self) -> Any:
        """What `read` needs to go on after the last document."""
        return self.count


class HubShard:
    """One of the parts that a dataset on the hub is stored in, from any row on."""

    def __init__(
        self, name: HubName, rows: Any, index: int, text_field: str, source_field: str | None
    ) -> None:
        self.name, self.rows, self.index, self.fields = (
            name,
            rows,
            index,
            (text_field, source_field),
        )
        self.count, self.mark = 0, f"{name.identifier} {index}"

    def read(self, state: Any = None) -> Iterator[dict[str, str]]:
        """As that of FileShard.

        Raises:
            UserError: the hub does not answer, after `datasets` tried again for a while.
        """
        part = self.rows.shard(num_shards=self.rows.num_shards, index=self.index)
        self.part, self.count = part, 0
        if state is not None:
            self.count = state["count"]
            part.load_state_dict(state["rows"])
        rows = iter(part)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # of as many kinds as in HubName.load
                told = (str(error).splitlines() or [type(error).__name__])[0]
                raise UserError(
                    f"dataset '{self.name.identifier}' cannot be read on: {told}. The same command "
                    "continues the run from its last checkpoint."
                ) from None
            if row is None:
                return
            self.count += 1
            name = self.name._replace(identifier=f"{self.name.identifier} part {self.index}")
            if one := name.document(row, self.count, *self.fields):
                yield one

    def state(self) -> Any:
        """What `read` needs to go on after the last document."""
        return {"count": self.count, "rows": self.part.state_dict()}


def open_shards(
    names: Sequence[str],
    *,
    text_field: str = "text",
    source_field: str | None = None,
    cache_dir: str | None = None,
) -> list[FileShard | HubShard]:
    """The files, and parts of hub datasets, that some names stand for; names as in `read_corpus`.

    Raises:
        UserError: a file is missing, or a hub dataset is not to be had.
    """
    check_named(names)
    found: list[FileShard | HubShard] = []
    for name in names:
        if not name.startswith(HUB):
            found += [FileShard(str(path), text_field, source_field) for path in files_of(name)]
            continue
        parsed = HubName.parse(name)
        rows = parsed.load(cache_dir=cache_dir, streaming=True)
        found += [
            HubShard(parsed, rows, i, text_field, source_field) for i in range(rows.num_shards)
        ]
    return found


class StreamedRows(torch.utils.data.Dataset):
    """Rows of `row_length` tokens in the order in which training sees them; to be asked for in that
    order."""

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
        """encode: From texts to token numbers, as `corpus.encoder` makes it.

        Args:
            count: Rows of the whole run; after the last document comes the first one again, in
                another order.
            block_size: Documents shuffled together. Files and parts come in random order, too.
            ahead: How many rows before the last one asked for may still be asked for, or for their
                state.
        """
        self.shards, self.encode, self.row_length, self.count = shards, encode, row_length, count
        self.seed, self.block_size, self.ahead = seed, block_size, ahead
        self._origins: dict[int, str] = {}
        self.load_state_dict(
            {"row": 0, "pass": 0, "shard": 0, "inner": None, "block": 0, "first": 0, "rest": []}
        )

    def __len__(self) -> int:
        """Rows of the whole run."""
        return self.count

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._states = [state]
        self._restart(state)

    def state_dict(self, row: int) -> dict[str, Any]:
        """The last state, of plain values, from which a row and those after it can be read."""
        return [one for one in self._states if one["row"] <= row][-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        """input_ids, labels and position_ids, [L] each, as those of PackedRows.

        Raises:
            UserError: a document is broken (says where), or all hold less than one row.
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
        return fill_row(self.row_length, [ids for _, _, ids in pieces], row)

    def mark(self) -> str:
        """Tells other data apart, as far as that is known before it is read: names and sizes of
        files."""
        return hashlib.sha256("\n".join(shard.mark for shard in self.shards).encode()).hexdigest()[
            :16
        ]

    def describe(self, row: int) -> str:
        """Where the text of a row that was asked for lately comes from."""
        return self._origins.get(row, "read long ago")

    # One row after the other
    # ------------------------------------------------------------------------------------------

    def _restart(self, state: dict[str, Any]) -> None:
        self._row, self._pass, self._shard, self._block = (
            state[k] for k in ("row", "pass", "shard", "block")
        )
        self._first = state["first"]
        """Row with which this pass began."""
        self._rest: deque[tuple[str, int, np.ndarray]] = deque(
            (origin, low, np.asarray(ids, np.int64)) for origin, low, ids in state["rest"]
        )
        """Tokens not yet in a row: origin, place in the document and numbers of each piece."""
        self._have = sum(len(ids) for *_, ids in self._rest)
        self._texts: list[dict[str, str]] = []
        self._reading: Iterator[dict[str, str]] | None = None
        self._inner = state["inner"]

    def _next_row(self) -> list[tuple[str, int, np.ndarray]]:
        """The pieces of documents that make the next row."""
        while self._have < self.row_length:
            if not self._texts:
                self._remember()
                self._texts = self._next_block()
                continue
            some, self._texts = self._texts[:_AT_ONCE], self._texts[_AT_ONCE:]
            for one, made in zip(some, self.encode([one["text"] for one in some])):
                self._rest.append((one["origin"], 0, np.asarray(made, np.int64)))
                self._have += len(made)
        pieces, wanted = [], self.row_length
        while wanted:
            origin, low, ids = self._rest.popleft()
            if len(ids) > wanted:
                self._rest.appendleft((origin, low + wanted, ids[wanted:]))
            ids = ids[:wanted]
            wanted -= len(ids)
            pieces.append((origin, low, ids))
        self._have -= self.row_length
        told = [
            f"{origin} (tokens {low} to {low + len(ids) - 1})"
            for origin, low, ids in pieces
            if len(ids)
        ]
        self._origins[self._row] = "; ".join(told[:4]) + (
            f"; and {len(told) - 4} more" if len(told) > 4 else ""
        )
        self._row += 1
        return pieces

    def _next_block(self) -> list[dict[str, str]]:
        """The next documents in random order; none at the end of a pass, after which another
        begins."""
        order = np.random.default_rng((self.seed, self._pass)).permutation(len(self.shards))
        found: list[dict[str, str]] = []
        while len(found) < self.block_size and self._shard < len(order):
            if self._reading is None:
                self._reading = self.shards[order[self._shard]].read(self._inner)
            if (one := next(self._reading, None)) is not None:
                found.append(one)
                continue
            self._reading, self._inner = None, None
            self._shard += 1
        if found:
            rng = np.random.default_rng((self.seed, self._pass, self._block))
            self._block += 1
            return [found[i] for i in rng.permutation(len(found))]
        if self._row == self._first:
            raise UserError(
                f"data must hold at least one row of {self.row_length} tokens, got {self._have} tokens. "
                "Give more text, or a shorter --context-length."
            )
        self._rest.clear()
        self._have, self._pass, self._shard, self._block, self._first = (
            0,
            self._pass + 1,
            0,
            0,
            self._row,
        )
        return []

    # Where it stands
    # --------------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Keep the state here, where a block begins; one for each row."""
        inner = self._inner
        if self._reading is not None:
            order = np.random.default_rng((self.seed, self._pass)).permutation(len(self.shards))
            inner = self.shards[order[self._shard]].state()
        rest = [(origin, low, ids.tolist()) for origin, low, ids in self._rest]
        state = {
            "row": self._row,
            "pass": self._pass,
            "shard": self._shard,
            "inner": inner,
            "block": self._block,
            "first": self._first,
            "rest": rest,
        }
        if self._states[-1]["row"] < self._row:
            self._states.append(state)
        elif self._states[-1]["row"] == self._row:
            self._states[-1] = state

    def _forget(self, row: int) -> None:
        """Drop what nobody asks for any more."""
        while len(self._states) > 1 and self._states[1]["row"] <= row - self.ahead:
            del self._states[0]
        self._origins = {i: told for i, told in self._origins.items() if i >= row - self.ahead}
