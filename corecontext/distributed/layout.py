"""Lay one sequence out over several processes in contiguous chunks, and plan which tokens and
groups each chunk needs.

No function here communicates: every process computes the same plan from the same few integers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.visibility import local_start, num_complete_groups


class Message(NamedTuple):
    """Name tokens low .. high-1 of the sequence that chunk `source` holds and chunk `target` sees
    raw, so that they are sent."""

    source: int
    target: int
    low: int
    high: int


@dataclass(frozen=True)
class Layout:
    """Assign contiguous chunks of one sequence to processes. Positions count within the whole
    sequence."""

    lengths: tuple[int, ...]
    """Tokens of each chunk, in the order of the sequence; a chunk may be empty."""
    owners: tuple[int, ...]
    """The process that holds each chunk, counted within its group."""
    rank: int
    """This process."""

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.owners) or min(self.lengths, default=-1) < 0:
            raise ValueError(
                f"lengths must be at least 0, one for each owner, got {self.lengths} and "
                f"{self.owners}."
            )

    @classmethod
    def contiguous(cls, lengths: tuple[int, ...], rank: int) -> Layout:
        """Give process i the i-th chunk."""
        return cls(tuple(lengths), tuple(range(len(lengths))), rank)

    @classmethod
    def balanced(cls, seq_len: int, num_processes: int, rank: int) -> Layout:
        """Balance the work: of 2 N chunks of nearly equal length, process i holds the i-th and the
        i-th from the end.

        A late token sees more core tokens than an early one, so with one chunk each the last
        process would do most.
        """
        num_chunks = 2 * num_processes
        edges = [seq_len * i // num_chunks for i in range(num_chunks + 1)]
        return cls(
            tuple(b - a for a, b in pairwise(edges)),
            tuple(min(i, num_chunks - 1 - i) for i in range(num_chunks)),
            rank,
        )

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of each chunk's first token, then the length of the sequence."""
        return tuple(sum(self.lengths[:i]) for i in range(len(self.lengths) + 1))

    @property
    def seq_len(self) -> int:
        """Tokens of the whole sequence."""
        return self.starts[-1]

    @property
    def is_shared(self) -> bool:
        """Whether more than one process holds tokens."""
        return len({owner for owner, length in zip(self.owners, self.lengths) if length}) > 1

    def chunks(self, rank: int | None = None) -> list[int]:
        """Return the numbers of a process's chunks that are not empty, rising; by default this
        process's."""
        rank = self.rank if rank is None else rank
        chunks = enumerate(zip(self.owners, self.lengths))
        return [i for i, (owner, length) in chunks if owner == rank and length]

    def span(self, chunk: int) -> tuple[int, int]:
        """Return the position of a chunk's first token, and the one after its last."""
        return self.starts[chunk], self.starts[chunk + 1]

    def groups(self, group_size: int, first: int = 0) -> Layout:
        """Return the layout of the complete groups behind the `first` tokens kept raw, as a
        sequence of groups: a chunk has those whose last token it holds, and pools them."""
        edges = [num_complete_groups(start - first, group_size) for start in self.starts]
        return Layout(tuple(b - a for a, b in pairwise(edges)), self.owners, self.rank)

    def halo_start(self, chunk: int, group_size: int, window_size: int) -> int:
        """Return the position of the first token that a query of a chunk sees raw, often in an
        earlier chunk: always the first of a group."""
        return local_start(self.starts[chunk], group_size, window_size)

    def messages(self, group_size: int, window_size: int) -> list[Message]:
        """Plan the exchange of the raw tokens that chunks see in earlier chunks, in one order for
        all processes."""
        messages = []
        for target, length in enumerate(self.lengths):
            halo = self.halo_start(target, group_size, window_size)
            for source in range(target if length else 0):
                start, end = self.span(source)
                if max(start, halo) < end:
                    messages.append(Message(source, target, max(start, halo), end))
        return messages

    def clip(self, start: int, end: int) -> Layout:
        """Return the layout of tokens start .. end-1 as a sequence, on the same processes."""
        spans = pairwise(self.starts)
        lengths = tuple(max(0, min(b, end) - max(a, start)) for a, b in spans)
        return Layout(lengths, self.owners, self.rank)

    def take(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this process's tokens of a tensor over the whole sequence."""
        chunks = [whole.narrow(dim, self.starts[i], self.lengths[i]) for i in self.chunks()]
        return torch.cat(chunks or [whole.narrow(dim, 0, 0)], dim)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of this process's tokens, [1, T]."""
        return self.take(torch.arange(self.seq_len, device=device)[None])
