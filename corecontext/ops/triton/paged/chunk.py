"""Attend from long chunks of prompts whose past is in pages: copy its entries beside the new
tokens, and let the kernels for contiguous keys read them. Reading by block table takes several
times as long."""

import torch
from torch import Tensor

from corecontext.ops.spec import Spec, Tokens
from corecontext.ops.triton import backend
from corecontext.ops.triton.launch import ceil_div
from corecontext.ops.triton.paged.gather import Span, gather_chunk
from corecontext.ops.triton.paged.pages import Pages

LONG_CHUNK = 512
"""New tokens of a sequence from which on its entries are gathered. On an H200, 512 behind 24,576
others take the device 63 us a layer instead of 231, and the host 190 us instead of 42."""


def attend_longest_chunk(
    q: Tensor, kv_heads: int, page_size: int, longest: int, spec: Spec
) -> None:
    """Take the most memory that a chunk may need, and compile its kernels: vLLM runs this before
    there are caches, to measure what is left for them. The queries q [T, H, D] attend as the last
    of `longest` tokens, then some as a sequence without far past."""
    raw, cores = longest_pages(q, kv_heads, page_size, longest, spec)
    new = raw.k.new_zeros(q.shape[0], *raw.k.shape[2:])
    out = torch.empty_like(q)
    past = max(0, longest - q.shape[0])
    attend_chunk((q, new, new), past, raw, cores, spec, out)
    few = slice(0, spec.window_size)
    attend_chunk((q[few], new[few], new[few]), 0, raw, cores, spec, out[few])


def compile_chunk(new: tuple[Tensor, Tensor, Tensor], raw: Pages, cores: Pages, spec: Spec) -> None:
    """Compile the kernels that read these pages for a chunk, by its first token as a whole
    sequence: no page is read.

    Args:
        new: As of `attend_chunk`, of any sequence.
    """
    q, k, v = (x[:1] for x in new)
    attend_chunk((q, k, v), 0, raw, cores, spec, torch.empty_like(q))


def longest_pages(
    q: Tensor, kv_heads: int, page_size: int, longest: int, spec: Spec
) -> tuple[Pages, Pages]:
    """Return pages of raw tokens and of core tokens, for a sequence of `longest` tokens: the same
    page of zeros again and again."""
    shape = (1, page_size, kv_heads, q.shape[2])
    page = torch.zeros(shape, dtype=q.dtype, device=q.device)
    table = torch.zeros(1, ceil_div(longest, page_size), dtype=torch.int32, device=q.device)
    mass = torch.zeros(shape[:3], device=q.device) if spec.core_mass else None
    return Pages(page, page, table), Pages(page, page, table, mass)


def attend_chunk(
    new: tuple[Tensor, Tensor, Tensor], past: int, raw: Pages, cores: Pages, spec: Spec, out: Tensor
) -> None:
    """Attend from new tokens of one sequence, queries [T, H, D], keys and values [T, Hkv, D], which
    follow `past` earlier ones; write to `out`, [T, H, D]."""
    kv_heads = raw.k.shape[2]
    q, grouped_out = (x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for x in (new[0], out))
    span = Span.of(past, q.shape[2], spec)
    k, v, far = gather_chunk(new[1:], span, raw, cores, spec)
    backend.attend_list(Tokens(q, k, v, past, span.low), far, spec, grouped_out)
