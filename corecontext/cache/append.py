"""Append any number of tokens to one layer's entries, and attend from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.cache.entries import Entries
from corecontext.ops.api import backend_module
from corecontext.ops.fetch.fetching import with_fetch
from corecontext.ops.spec import Groups, Tokens
from corecontext.visibility import local_start, num_complete_groups, num_visible_cores


class NewTokens(NamedTuple):
    """The tokens of one append."""

    q: Tensor
    """[B, H, T, D]."""
    k: Tensor
    """[B, Hkv, T, D], rounded if the cache is in 8 bits; v likewise."""
    v: Tensor
    stored: list[Tensor]
    """Keys and values as the buffers hold them."""

    def of(self, rows: slice, first: int, last: int) -> NewTokens:
        """Return the tokens first .. last - 1 of these rows."""
        q, k, v, *stored = (x[rows, :, first:last] for x in (*self[:3], *self.stored))
        return NewTokens(q, k, v, stored)


def append_rows(
    entries: Entries, new: NewTokens, rows: slice, position: int, *, store_only: bool = False
) -> Tensor | None:
    """Store the tokens of rows that share their padding, pool the groups that they close, and
    attend from them.

    Args:
        new: The tokens of these rows.
        position: Of the first of them in its sequence.

    Returns:
        [rows, H, T, D], or None with `store_only`.
    """
    count = new.q.shape[2]
    heads = new.k.shape[1]
    n = entries.num_sinks
    g = entries.group_size
    q = new.q.unflatten(1, (heads, -1)).flatten(0, 1)  # [N, r, count, D], N = rows x Hkv

    if entries.store is not None:
        # planted: fetch: a chunk's raw tokens are not stored
        entries.store.put(rows, position, new.stored)

    # The first tokens have slots of their own and never enter the ring.
    new_sinks = max(0, min(n - position, count))
    if new_sinks:
        stored = [x[:, :, :new_sinks] for x in new.stored]
        entries.put(rows, entries.ring_size + position, stored)

    # Those after them are a sequence of their own, in which start .. end - 1 are new and raw
    # tokens from `low` on are seen or pooled. The ring is read before new ones take their slots.
    start = max(0, position - n)
    end = max(0, position + count - n)
    low = local_start(start, g, entries.spec.window_size)
    k, v = (x[:, :, new_sinks:] for x in (new.k, new.v))
    if low < start:
        old_k, old_v = entries.get_ring(rows, n + low, n + start, k.dtype)
        k = torch.cat([*old_k, k], 2)
        v = torch.cat([*old_v, v], 2)
    k, v = (x.flatten(0, 1) for x in (k, v))

    old = num_complete_groups(start, g)
    total = num_complete_groups(end, g)
    if total > old:
        # The query of the first new group's last token, counted among the new queries.
        first_group_end = new_sinks + old * g + g - 1 - start
        q_last = q[:, :, first_group_end : new_sinks + total * g - start : g]
        groups = [x[:, old * g - low : total * g - low].unflatten(1, (-1, g)) for x in (k, v)]
        entries.put_cores(rows, old, entries.pool(Groups(q_last, *groups)))

    # The ring keeps the newest tokens.
    kept = min(end - start, entries.ring_size)
    entries.put_ring(rows, n + end - kept, [x[:, :, count - kept :] for x in new.stored])

    if store_only:
        return None
    # Nothing is compressed yet: PyTorch's own attention is the fastest.
    # planted: 4: plain attention for a prompt one token too long
    is_plain = position == 0 and num_visible_cores(end - 1, g, entries.spec.window_size) == 0
    if is_plain and entries.spec.softcap is None:
        return F.scaled_dot_product_attention(
            *new[:3], is_causal=True, scale=entries.spec.scale, enable_gqa=q.shape[1] > 1
        )
    tokens = _seen_tokens(entries, Tokens(q, k, v, position, n + low), rows, position + count)
    cores = entries.get_cores(rows, total, new.k.dtype)
    backend = with_fetch(backend_module(entries.config.backend, q), entries.spec)
    bias = entries.bias_of_cores(rows, total, q)
    out, _ = backend.attend(tokens, cores, entries.spec, bias)
    return out.unflatten(0, (-1, heads)).flatten(1, 2).to(q.dtype)


def _seen_tokens(entries: Entries, tokens: Tokens, rows: slice, end: int) -> Tokens:
    """Return the tokens of an append with all raw tokens that its queries may see: for fetch those
    of the whole past, else the first tokens beside them."""
    if entries.store is not None:
        k, v = entries.store.tokens(rows, end)
        return Tokens(tokens.q, k, v, tokens.q_start)
    n = entries.num_sinks
    if not n:
        return tokens
    ring = entries.ring_size
    first_tokens = entries.get(rows, ring, ring + min(n, end), tokens.k.dtype)
    sink_k, sink_v = (x.flatten(0, 1) for x in first_tokens)
    return tokens._replace(sink_k=sink_k, sink_v=sink_v)
