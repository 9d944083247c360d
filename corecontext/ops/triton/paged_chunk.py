"""Attend from long chunks of prompts whose past is in pages: its entries are gathered beside the
new tokens, and the kernels for contiguous keys read them, in a fraction of the time that reading by
block table takes.

The host must know the lengths of such sequences. The rest of a batch stays with `attend_pages`, in
parts of neighbouring sequences, so that decoding tokens beside a chunk, long or short, get tiles of
their size.
"""

from __future__ import annotations

import itertools
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


class Part(NamedTuple):
    """Hold neighbouring sequences of a batch: a long chunk by itself, decoding ones, or short
    chunks."""

    sequences: slice
    """Rows of the block tables."""
    tokens: slice
    """Their new tokens among those of the batch."""
    batch: Batch | None
    """The sequences as a batch of their own, None for a long chunk."""
    past: int
    """Tokens of the sequence of a long chunk before its new ones."""


def parts_of(
    starts: list[int], lengths: list[int], batch: Batch, most_decoded: int = 1
) -> list[Part]:
    """Split a batch into long chunks, runs of decoding sequences, and runs of short chunks.

    Args:
        starts, lengths: Those of the batch, on the host; lengths are read of long chunks only.
        most_decoded: New tokens of a decoding sequence at most, drafts included. More need a tile
            of other rows.
    """
    counts = [end - start for start, end in itertools.pairwise(starts)]

    def kind(row: int) -> tuple[bool, bool]:
        return counts[row] > most_decoded, counts[row] >= LONG_CHUNK

    parts = []
    for (_, is_long), run in itertools.groupby(range(len(counts)), kind):
        rows = list(run)
        if is_long:
            for i in rows:
                tokens = slice(starts[i], starts[i + 1])
                parts.append(Part(slice(i, i + 1), tokens, None, lengths[i] - counts[i]))
            continue
        first, end = rows[0], rows[-1] + 1
        tokens = slice(starts[first], starts[end])
        if tokens.start < tokens.stop:
            rebased = batch.starts[first : end + 1] - tokens.start
            most_new = max(counts[first:end])
            part_batch = Batch(rebased, batch.lengths[first:end], most_new, batch.longest)
            parts.append(Part(slice(first, end), tokens, part_batch, 0))
    return parts


def attend_parts(
    tokens: tuple[Tensor, Tensor, Tensor],
    parts: list[Part],
    raw: Pages,
    cores: Pages,
    spec: Spec,
    core_bias: float,
    out: Tensor,
) -> None:
    """Attend as `attend_pages` does, from the new tokens of all parts.

    Args:
        tokens: Queries [T, H, D], keys and values [T, Hkv, D] of the new tokens of the whole batch.
        raw, cores: Hold the new tokens and what they complete; their tables have the rows of the
            whole batch.
        out: [T, H, D], written in place.
    """
    for part in parts:
        pages = [kind._replace(table=kind.table[part.sequences]) for kind in (raw, cores)]
        q, k, v = (x[part.tokens] for x in tokens)
        results = out[part.tokens]
        if part.batch is not None:
            attend_pages(q, part.batch, *pages, spec, core_bias, results)
        else:
            _attend_chunk((q, k, v), part.past, *pages, spec, core_bias, results)


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
