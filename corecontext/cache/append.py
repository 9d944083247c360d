"""Append any number of tokens to one layer's entries, and attend from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.cache.entries import Entries
from corecontext.ops.api import backend_module
from corecontext.ops.spec import Groups, Tokens
from corecontext.visibility import local_start, num_complete_groups, num_visible_cores


class NewTokens(NamedTuple):
    """The tokens of one append."""

    q: Tensor
    """[B, H, n, D]."""
    k: Tensor
    """[B, Hkv, n, D], rounded if the cache is in 8 bits; v likewise."""
    v: Tensor
    stored: list[Tensor]
    """Keys and values as the buffers hold them."""


class Span(NamedTuple):
    """The new tokens of rows that share their padding."""

    rows: slice
    first: int
    """Index of their first token among the new ones."""
    last: int
    """Index after their last token."""
    position: int
    """Position of the first token in its sequence."""


class _Raw(NamedTuple):
    """Raw tokens behind the first n: those in the ring that new tokens need, and the new ones."""

    k: Tensor
    """[N, S, D], N = rows x Hkv; v likewise."""
    v: Tensor
    low: int
    """Position of the first of them; like all positions here it is counted behind the first n."""
    start: int
    """Position of the first new token."""
    end: int
    """Position after the last one."""


def append_rows(
    entries: Entries, new: NewTokens, span: Span, *, store_only: bool = False
) -> Tensor | None:
    """Store the tokens of a span, pool the groups that they close, and attend from them.

    Returns:
        [rows, H, last - first, D], or None with `store_only`.
    """
    rows, first, last, position = span
    count = last - first
    heads = new.k.shape[1]
    n = entries.num_sinks
    q = new.q[rows, :, first:last].unflatten(1, (heads, -1)).flatten(0, 1)  # [N, r, count, D]
    num_sinks = max(0, min(n - position, count))  # new tokens that are among the first n

    # The first tokens have slots of their own and never enter the ring.
    if num_sinks:
        stored = [x[rows, :, first : first + num_sinks] for x in new.stored]
        entries.put(rows, entries.ring_size + position, stored)

    # Tokens of the ring are read before new ones take their slots.
    raw = _raw_tokens(entries, new, span, num_sinks)
    _pool_groups(entries, q[:, :, num_sinks:], raw, rows)

    # The ring keeps the newest tokens.
    kept = min(raw.end - raw.start, entries.ring_size)
    stored = [x[rows, :, last - kept : last] for x in new.stored]
    entries.put_ring(rows, n + raw.end - kept, stored)

    if store_only:
        return None
    return _attend(entries, new, span, q, raw)


def _raw_tokens(entries: Entries, new: NewTokens, span: Span, num_sinks: int) -> _Raw:
    """Return the new tokens behind the first n, and before them what they see or pool."""
    n = entries.num_sinks
    count = span.last - span.first
    start = max(0, span.position - n)
    end = max(0, span.position + count - n)
    low = local_start(start, entries.group_size, entries.spec.window_size)
    old_k, old_v = entries.get_ring(span.rows, n + low, n + start, new.k.dtype)
    new_k, new_v = (x[span.rows, :, span.first + num_sinks : span.last] for x in (new.k, new.v))
    if old_k:
        new_k = torch.cat([*old_k, new_k], 2)
        new_v = torch.cat([*old_v, new_v], 2)
    return _Raw(new_k.flatten(0, 1), new_v.flatten(0, 1), low, start, end)


def _pool_groups(entries: Entries, q: Tensor, raw: _Raw, rows: slice) -> None:
    """Pool the groups that queries [N, r, end - start, D] close, and store their core tokens."""
    g = entries.group_size
    old = num_complete_groups(raw.start, g)
    total = num_complete_groups(raw.end, g)
    if total == old:
        return
    q_last = q[:, :, old * g + g - 1 - raw.start : total * g - raw.start : g]
    groups = slice(old * g - raw.low, total * g - raw.low)
    k, v = (x[:, groups].unflatten(1, (total - old, g)) for x in (raw.k, raw.v))
    entries.put_cores(rows, old, entries.pool(Groups(q_last, k, v)))


def _attend(entries: Entries, new: NewTokens, span: Span, q: Tensor, raw: _Raw) -> Tensor:
    """Attend to first tokens, core tokens and raw tokens; [rows, H, T, D].

    Args:
        q: The span's queries, [N, r, T, D].
    """
    rows, first, last, position = span
    heads = new.k.shape[1]
    dtype = new.k.dtype
    n = entries.num_sinks
    g = entries.group_size
    s = entries.spec.window_size

    # Nothing is compressed yet: PyTorch's own attention is the fastest.
    # planted: 4: plain attention for a prompt one token too long
    is_plain = position == 0 and num_visible_cores(raw.end - 1, g, s) == 0
    if is_plain and entries.spec.softcap is None:
        new_q, new_k, new_v = (x[rows, :, first:last] for x in (new.q, new.k, new.v))
        return F.scaled_dot_product_attention(
            new_q, new_k, new_v, is_causal=True, scale=entries.spec.scale, enable_gqa=q.shape[1] > 1
        )

    tokens = Tokens(q, raw.k, raw.v, q_start=position, k_start=n + raw.low)
    if n:
        ring = entries.ring_size
        first_tokens = entries.get(rows, ring, ring + min(n, position + last - first), dtype)
        sink_k, sink_v = (x.flatten(0, 1) for x in first_tokens)
        tokens = tokens._replace(sink_k=sink_k, sink_v=sink_v)
    cores = entries.get_cores(rows, num_complete_groups(raw.end, g), dtype)
    backend = backend_module(entries.config.backend, q)
    out, _ = backend.attend(tokens, cores, entries.spec, _core_bias(entries, q))
    return out.unflatten(0, (-1, heads)).flatten(1, 2).to(q.dtype)


def _core_bias(entries: Entries, q: Tensor) -> Tensor | None:
    """Return the addend of core scores for queries [N, r, T, D], as [N, r]; None for 0."""
    bias = entries.core_bias(q.dtype)
    if isinstance(bias, Tensor):
        heads = entries.keys.shape[1]
        return bias.reshape(heads, -1).repeat(q.shape[0] // heads, 1)
    if not bias:
        return None
    return q.new_full(q.shape[:2], bias, dtype=torch.promote_types(q.dtype, torch.float32))
