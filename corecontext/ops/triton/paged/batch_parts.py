"""Split a batch by the attention that suits its sequences, and attend part by part.

- For long chunks of prompts `chunk.py` gathers the entries.
- Whole prompts that see no core token have plain causal attention: the caller may pass a function.
- Steps and chunks of long prompts with fetch (`Kind.SHARING`) are left to the caller.
- All others go to `attend_pages`, in runs of neighbouring sequences of a kind: decoding tokens
  beside a chunk get tiles of their size.

The host must know the lengths of long chunks and whole prompts.
"""

import enum
import itertools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from corecontext.ops.fetch.prompt_rule import NO_END
from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged import chunk as paged_chunk
from corecontext.ops.triton.paged.attend_pages import attend_pages
from corecontext.ops.triton.paged.pages import Batch, Pages


class Kind(enum.Enum):
    """Name the sequences of a part."""

    DECODING = enum.auto()
    """One new token, or one with drafts."""
    SHORT = enum.auto()
    """Short chunks of prompts."""
    LONG = enum.auto()
    """A long chunk by itself."""
    WHOLE = enum.auto()
    """Whole prompts so short that none of their tokens sees a core token."""
    SHARING = enum.auto()
    """A chunk by itself of a prompt with fetch, whose neighbouring tokens share a choice."""


class Part(NamedTuple):
    """Hold neighbouring sequences of a batch, all of one kind."""

    kind: Kind
    sequences: slice
    """Rows of the block tables."""
    tokens: slice
    """Their new tokens among those of the batch."""
    batch: Batch
    """The sequences as a batch of their own."""
    past: int
    """Tokens before the new ones of the first sequence; read where it is a part by itself."""


AttendWhole = Callable[..., None]
"""A function (q, k, v, batch, spec, out, table=None) of plain causal attention: queries [T, H, D],
keys and values [T, Hkv, D] of the new tokens, a spec whose scale and softcap count, the output
[T, H, D] to write. With the block table of raw tokens, k and v are those of `Pages`, and queries
see the earlier tokens of their sequence, too."""


def parts_of(
    starts: list[int],
    lengths: list[int],
    batch: Batch,
    most_decoded: int = 1,
    most_whole: int = 0,
    full_until: int = NO_END,
) -> list[Part]:
    """Split a batch into runs of neighbouring sequences of a kind; a LONG or SHARING chunk is a
    part by itself.

    Args:
        starts, lengths: Those of the batch, on the host. Lengths are read of chunks of prompts
            only; those of other sequences may be too large.
        most_decoded: Sequences with at most so many new tokens, drafts included, are DECODING.
        most_whole: Prompts of at most so many tokens are WHOLE: 0 for none, else at most s + g - 1,
            since longer ones see a core token.
        full_until: Tokens of a prompt that see all tokens before them; chunks that reach further
            are SHARING.
    """
    counts = [end - start for start, end in itertools.pairwise(starts)]

    def kind_of(row: int) -> Kind:
        if counts[row] <= most_decoded:
            return Kind.DECODING
        if lengths[row] == counts[row] <= most_whole:
            return Kind.WHOLE
        if lengths[row] > full_until:
            return Kind.SHARING
        return Kind.LONG if counts[row] >= paged_chunk.LONG_CHUNK else Kind.SHORT

    parts = []
    for kind, run in itertools.groupby(range(len(counts)), kind_of):
        rows = list(run)
        runs = [[row] for row in rows] if kind in (Kind.LONG, Kind.SHARING) else [rows]
        for neighbours in runs:
            first, end = neighbours[0], neighbours[-1] + 1
            tokens = slice(starts[first], starts[end])
            if tokens.start == tokens.stop:
                continue
            rebased = batch.starts[first : end + 1]
            if tokens.start:
                rebased = rebased - tokens.start
            most_new = max(counts[first:end])
            of_part = Batch(rebased, batch.lengths[first:end], most_new, batch.longest)
            past = lengths[first] - counts[first]
            parts.append(Part(kind, slice(first, end), tokens, of_part, past))
    return parts


def attend_parts(
    tokens: tuple[Tensor, Tensor, Tensor],
    parts: list[Part],
    raw: Pages,
    cores: Pages,
    spec: Spec,
    out: Tensor,
    attend_whole: AttendWhole | None = None,
) -> None:
    """Attend as `attend_pages` does, from the new tokens of all parts: to core tokens and the
    window, without fetch.

    Args:
        parts: None of them `Kind.SHARING`.
        tokens: Queries [T, H, D], keys and values [T, Hkv, D] of the new tokens of the whole batch.
        raw, cores: Hold the new tokens and what they complete; their tables have the rows of the
            whole batch.
        out: [T, H, D], written in place.
        attend_whole: Takes whole prompts; None leaves them to `attend_pages`.
    """
    for part in parts:
        pages = [kind._replace(table=kind.table[part.sequences]) for kind in (raw, cores)]
        q, k, v = (x[part.tokens] for x in tokens)
        results = out[part.tokens]
        if part.kind is Kind.LONG:
            paged_chunk.attend_chunk((q, k, v), part.past, *pages, spec, results)
        elif part.kind is Kind.WHOLE and attend_whole is not None:
            attend_whole(q, k, v, part.batch, spec, results)
        else:
            attend_pages(q, part.batch, *pages, spec, results)
