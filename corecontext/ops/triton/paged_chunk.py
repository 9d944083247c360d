"""Split a batch by the attention that suits its sequences, and attend.

- Long chunks of prompts: their entries are gathered beside the new tokens, and the kernels for
  contiguous keys read them, in a fraction of the time that reading by block table takes.
- Whole prompts that see no core token: plain causal attention, which the caller may have a function
  for.
- The others stay with `attend_pages`, in parts of neighbouring sequences, so that decoding tokens
  beside a chunk, long or short, get tiles of their size.

The host must know the lengths of long chunks and whole prompts.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops.spec import Spec, Tokens
from corecontext.ops.triton import backend
from corecontext.ops.triton.launch import ceil_div
from corecontext.ops.triton.paged import Batch, Pages
from corecontext.ops.triton.paged_attend import attend_pages
from corecontext.ops.triton.paged_gather import Span, gather_chunk

LONG_CHUNK = 512
"""New tokens of a sequence from which on its entries are gathered. On an H200, 512 behind 24,576
others take the device 63 us a layer in place of 231, and the host 190 in place of 42."""


class Kind(enum.Enum):
    """Name the sequences of a part."""

    DECODING = enum.auto()
    """One new token, or one with drafts."""
    SHORT = enum.auto()
    """Short chunks of prompts."""
    LONG = enum.auto()
    """A long chunk by itself."""
    WHOLE = enum.auto()
    """Whole prompts whose tokens see each other and nothing else."""


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
    """Tokens before the new ones of the sequence of a long chunk."""


AttendWhole = Callable[[Tensor, Tensor, Tensor, Batch, Spec, Tensor], None]
"""Causal attention within the sequences of a batch: queries [T, H, D], keys and values [T, Hkv, D],
the batch, of the spec the scale and the softcap, the output [T, H, D] to write into."""


def parts_of(
    starts: list[int],
    lengths: list[int],
    batch: Batch,
    most_decoded: int = 1,
    most_whole: int = 0,
) -> list[Part]:
    """Split a batch into long chunks and runs of sequences of another kind.

    Args:
        starts, lengths: Those of the batch, on the host; lengths are read of chunks of prompts
            only, and are never less than the sequence's.
        most_decoded: New tokens of a decoding sequence at most, drafts included. More need a tile
            of other rows.
        most_whole: Tokens of a whole prompt at most: 0, or at most s + g - 1, since longer ones see
            a core token.
    """
    counts = [end - start for start, end in itertools.pairwise(starts)]

    def kind_of(row: int) -> Kind:
        if counts[row] <= most_decoded:
            return Kind.DECODING
        if lengths[row] == counts[row] <= most_whole:
            return Kind.WHOLE
        return Kind.LONG if counts[row] >= LONG_CHUNK else Kind.SHORT

    parts = []
    for kind, run in itertools.groupby(range(len(counts)), kind_of):
        rows = list(run)
        # Each long chunk is a part by itself.
        runs = [[row] for row in rows] if kind is Kind.LONG else [rows]
        for neighbours in runs:
            first, end = neighbours[0], neighbours[-1] + 1
            tokens = slice(starts[first], starts[end])
            if tokens.start == tokens.stop:
                continue
            rebased = batch.starts[first : end + 1] - tokens.start
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
    core_bias: float,
    out: Tensor,
    attend_whole: AttendWhole | None = None,
) -> None:
    """Attend as `attend_pages` does, from the new tokens of all parts.

    Args:
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
            _attend_chunk((q, k, v), part.past, *pages, spec, core_bias, results)
        elif part.kind is Kind.WHOLE and attend_whole is not None:
            attend_whole(q, k, v, part.batch, spec, results)
        else:
            attend_pages(q, part.batch, *pages, spec, core_bias, results)


def attend_longest_chunk(
    q: Tensor, kv_heads: int, page_size: int, longest: int, spec: Spec, core_bias: float
) -> None:
    """Attend from new tokens [T, H, D] as the last ones of a sequence of `longest` tokens, whose
    pages are one page of zeros: a run before there are caches takes the memory of the longest
    gathered entries. It compiles the kernels that gather and read them, with a far past and
    without."""
    shape = (1, page_size, kv_heads, q.shape[2])
    page = torch.zeros(shape, dtype=q.dtype, device=q.device)
    table = torch.zeros(1, ceil_div(longest, page_size), dtype=torch.int32, device=q.device)
    raw = Pages(page, page, table)
    mass = torch.zeros(shape[:3], device=q.device) if spec.core_mass else None
    cores = raw._replace(mass=mass)
    new = page.new_zeros(q.shape[0], *shape[2:])
    out = torch.empty_like(q)
    past = max(0, longest - q.shape[0])
    _attend_chunk((q, new, new), past, raw, cores, spec, core_bias, out)
    few = slice(0, spec.window_size)
    _attend_chunk((q[few], new[few], new[few]), 0, raw, cores, spec, core_bias, out[few])


def _attend_chunk(
    new: tuple[Tensor, Tensor, Tensor],
    past: int,
    raw: Pages,
    cores: Pages,
    spec: Spec,
    core_bias: float,
    out: Tensor,
) -> None:
    """Attend from new tokens of one sequence, queries [T, H, D], keys and values [T, Hkv, D], which
    follow `past` earlier ones."""
    kv_heads = raw.k.shape[2]
    q, grouped_out = (x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for x in (new[0], out))
    span = Span.of(past, q.shape[2], spec)
    k, v, far = gather_chunk(new[1:], span, raw, cores, q.shape[1], core_bias)
    backend.attend_list(Tokens(q, k, v, past, span.low), far, spec, grouped_out)
