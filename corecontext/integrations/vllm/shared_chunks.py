"""Attend from long prompts whose neighbouring tokens share a choice: what a chunk sees is gathered
from pages, and the kernels of a prompt read it, as in a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.ops.fetch import attend as fetch
from corecontext.ops.fetch.prompt_rule import Reading
from corecontext.ops.spec import Cores, Spec, Tokens
from corecontext.ops.triton import backend
from corecontext.ops.triton.paged.chunk import longest_pages
from corecontext.ops.triton.paged.gather import Span, gather_chunk
from corecontext.ops.triton.paged.group_slots import GroupSlots
from corecontext.ops.triton.paged.pages import Pages


def attend_sharing(
    new: tuple[Tensor, Tensor, Tensor],
    past: int,
    pages: tuple[Pages, Pages],
    spec: Spec,
    reading: Reading,
    out: Tensor,
    slots: GroupSlots | None = None,
) -> None:
    """Attend from new tokens of one prompt, queries [T, H, D], keys and values [T, Hkv, D], which
    follow `past` earlier ones.

    Args:
        pages: Raw tokens and core tokens of the sequence, which hold the new tokens and the groups
            that these complete.
        reading: Which tokens of a prompt see all, and how many later ones share a choice.
        out: [T, H, D], written in place.
        slots: Copies of groups on the device, where `pages` have raw tokens in host memory.
    """
    kv_heads = new[1].shape[1]
    q, grouped_out = (x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for x in (new[0], out))
    count = q.shape[2]
    end = past + count
    first_group = spec.sinks // spec.group_size
    num_cores = max(0, end // spec.group_size - first_group)
    span = Span(0, past, end, 0, first_group, num_cores)
    k, v, far = gather_chunk(new[1:], span, *pages, spec, slots)
    cores = Cores(far.k[:, None], far.v[:, None])
    tokens = Tokens(q, k, v, past)
    # The beginning of a prompt sees all tokens before it.
    num_full = max(0, min(reading.full_until - past, count))
    if num_full:
        none = Cores(cores.k[:, :, :0], cores.v[:, :, :0])
        results = backend.attend(tokens.until(num_full), none, spec.of_full(end))[0]
        grouped_out[:, :, :num_full] = results
    if num_full < count:
        # mutant vllm: neighbours of a prompt choose each by itself
        spec = reading.settings(spec)
        mass = None if far.mass is None else far.mass[:, None]
        rest = grouped_out[:, :, num_full:]
        fetch.attend(backend, tokens.after(num_full), cores, spec, mass, out=rest)


def attend_longest(
    q: Tensor, kv_heads: int, page_size: int, longest: int, spec: Spec, reading: Reading
) -> None:
    """Take the most memory that `attend_sharing` may need, with the queries q [T, H, D] as the last
    ones of a prompt of `longest` tokens, as `chunk.attend_longest_chunk` does."""
    pages = longest_pages(q, kv_heads, page_size, longest, spec)
    new = pages[0].k.new_zeros(q.shape[0], *pages[0].k.shape[2:])
    past = max(0, longest - q.shape[0])
    attend_sharing((q, new, new), past, pages, spec, reading, torch.empty_like(q))


def compile_for_any_length(
    q: Tensor, kv_heads: int, page_size: int, longest: int, spec: Spec, reading: Reading
) -> None:
    """Compile the kernels among which `attend_sharing` chooses by the length of a prompt: for the
    first of the queries q as its last token. Arguments as of `attend_longest`."""
    for length in lengths_of_kernels(longest, spec, reading):
        attend_longest(q[:1], kv_heads, page_size, length, spec, reading)


def lengths_of_kernels(longest: int, spec: Spec, reading: Reading) -> list[int]:
    """Return lengths of prompts whose last tokens need all kernels: one that sees all tokens, the
    first that chooses, and those before which each power of 2 of groups is reached and passed,
    since these are the sizes of tiles of scores."""
    first = reading.full_until + 1
    counts = [count for i in range(31) for count in (1 << i, (1 << i) + 1)]
    ends = [spec.sinks + spec.window_size + count * spec.group_size for count in counts]
    return [x for x in (1, first, *ends, longest) if x == 1 or first <= x <= longest]
