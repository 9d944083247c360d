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

from corecontext.ops.mass import add_to_bias
from corecontext.ops.spec import Cores, Spec, Tokens
from corecontext.ops.triton import backend
from corecontext.ops.triton.launch import ceil_div
from corecontext.ops.triton.paged import Batch, Pages
from corecontext.ops.triton.paged_attend import attend_pages
from corecontext.visibility import local_start, num_visible_cores

LONG_CHUNK = 2048
"""New tokens of a sequence from which on its entries are gathered. For fewer, the host launches
longer than the device runs: 1.5 ms a layer for 1,024 tokens on an H200."""


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
    gathered entries, and compiles the kernels that read them."""
    shape = (1, page_size, kv_heads, q.shape[2])
    page = torch.zeros(shape, dtype=q.dtype, device=q.device)
    table = torch.zeros(1, ceil_div(longest, page_size), dtype=torch.int32, device=q.device)
    raw = Pages(page, page, table)
    mass = torch.zeros(shape[:3], device=q.device) if spec.core_mass else None
    past = max(0, longest - q.shape[0])
    new = page.new_zeros(q.shape[0], *shape[2:])
    cores = raw._replace(mass=mass)
    _attend_chunk((q, new, new), past, raw, cores, spec, core_bias, torch.empty_like(q))


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
    q = new[0]
    g = spec.group_size
    sinks = spec.sinks
    kv_heads = raw.k.shape[2]
    end = past + q.shape[0]
    # Raw tokens from the first query's window on, and the first ones where they are not among them.
    low = local_start(past, g, spec.window_size)
    sink_k = sink_v = None
    if low < sinks:
        low = 0
    elif sinks:
        # planted: vllm: a long chunk reads its window for the first tokens
        sink_k, sink_v = (_gather(x, raw.table, 0, sinks).transpose(0, 1) for x in raw[:2])
    # The new ones are at hand: only those before them are read from pages.
    k, v = new[1:]
    if low < past:
        k = torch.cat((_gather(raw.k, raw.table, low, past), k))
        v = torch.cat((_gather(raw.v, raw.table, low, past), v))
    k, v = k.transpose(0, 1), v.transpose(0, 1)

    # Core tokens that the last query sees, and their masses.
    total = num_visible_cores(end - 1, g, spec.window_size)
    first = min(sinks // g, total)
    core_k, core_v = (_gather(x, cores.table, first, total) for x in cores[:2])
    core_k, core_v = core_k.transpose(0, 1)[:, None], core_v.transpose(0, 1)[:, None]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    bias = None
    if core_bias:
        bias = torch.full(grouped.shape[:2], core_bias, dtype=torch.float32, device=q.device)
    if cores.mass is not None:
        mass = _gather(cores.mass, cores.table, first, total).transpose(0, 1)[:, None]
        bias = add_to_bias(bias, mass, grouped.shape[1])
    tokens = Tokens(grouped, k, v, past, low, sink_k, sink_v)
    grouped_out = out.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    backend.attend(tokens, Cores(core_k, core_v), spec, bias, grouped_out)


def _gather(pages: Tensor, table: Tensor, begin: int, end: int) -> Tensor:
    """Return entries begin .. end-1 of one sequence, [end - begin, Hkv, ...], from pages
    [P, E, Hkv, ...] and a table [1, most pages]."""
    size = pages.shape[1]
    first = begin // size
    numbers = table[0, first : ceil_div(end, size)]
    entries = pages.index_select(0, numbers).flatten(0, 1)
    return entries[begin - first * size : end - first * size]
