"""Append any number of tokens to one layer's entries, and attend from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.cache.entries import Entries
from corecontext.cache.full import attend_causally
from corecontext.cache.raw_store import Newest
from corecontext.ops.api import backend_module
from corecontext.ops.fetch import attend as fetch
from corecontext.ops.spec import Groups, Spec, Tokens
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
    raw: list[Tensor]
    """Keys and values for the store of raw tokens: encoded as in the buffers for fetch, not rounded
    for a prompt that full attention reads."""

    def of(self, rows: slice, first: int, last: int) -> NewTokens:
        """Return the tokens first .. last - 1 of these rows."""
        q, k, v = (x[rows, :, first:last] for x in self[:3])
        stored, raw = ([x[rows, :, first:last] for x in tensors] for tensors in self[3:])
        return NewTokens(q, k, v, stored, raw)


def new_tokens(entries: Entries, q: Tensor, k: Tensor, v: Tensor) -> NewTokens:
    """Return the tokens of an append, rounded as the cache stores them."""
    stored = entries.encode(k, v)
    raw = stored if entries.config.fetch_groups else [k, v]
    # mutant prefill: a prompt is read after its tokens are rounded
    return NewTokens(q, *entries.decode(stored, k.dtype), stored, raw)


def reading_of(entries: Entries, is_prompt: bool) -> str:
    """Return the attention of an append, one of `config.PREFILLS`.

    A prompt is read as `CCAConfig.prefill` says, by full attention only while its raw tokens are
    kept; other tokens attend as in decoding, "auto".
    """
    if not is_prompt:
        return "auto"
    prefill = entries.config.prefill
    # mutant prefill: a prompt is read by CCA
    if prefill == "full" and entries.store is None:
        return "auto"
    return prefill


def spec_of(spec: Spec, reading: str, end: int) -> Spec:
    """Return the settings by which tokens before `end` attend."""
    if reading == "full":
        # A window that no token leaves: no core token is seen.
        return spec.replace(window_size=end, sink_size=0, fetch_groups=0)
    if reading == "cca":
        return spec.replace(fetch_groups=0)
    return spec


def append_rows(
    entries: Entries, new: NewTokens, rows: slice, position: int, reading: str | None
) -> Tensor | None:
    """Store the tokens of rows that share their padding but for the ring, pool the groups that they
    close, and attend from them.

    Args:
        new: The tokens of these rows.
        position: Of the first of them in its sequence.
        reading: The attention, one of `config.PREFILLS`; None only stores.

    Returns:
        [rows, H, T, D], or None where they are only stored.
    """
    count = new.q.shape[2]
    heads = new.k.shape[1]
    n = entries.num_sinks
    g = entries.group_size
    q = new.q.unflatten(1, (heads, -1)).flatten(0, 1)  # [N, r, count, D], N = rows x Hkv

    if entries.store is not None:
        # mutant fetch: a chunk's raw tokens are not stored
        entries.store.put(rows, position, new.raw)

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
    # mutant prefill: core tokens of a prompt are pooled before they are rounded
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

    if reading is None:
        return None
    if reading == "full":
        return _attend_fully(entries, new, rows, position)
    spec = spec_of(entries.spec, reading, position + count)
    # Nothing is compressed yet: PyTorch's own attention is the fastest.
    # mutant 4: plain attention for a prompt one token too long
    is_plain = position == 0 and num_visible_cores(end - 1, g, spec.window_size) == 0
    if is_plain and spec.softcap is None:
        return attend_causally(*new[:3], spec.scale)
    if position == 0 and spec.fetch_groups:
        # All raw tokens are at hand: host memory need not be read.
        tokens = Tokens(q, new.k.flatten(0, 1), new.v.flatten(0, 1))
    else:
        newest = Newest(position, new.raw)
        tokens = _seen_tokens(entries, Tokens(q, k, v, position, n + low), rows, spec, newest)
    cores = entries.get_cores(rows, total, new.k.dtype)
    backend = backend_module(entries.config.backend, q)
    bias = entries.bias_of_cores(rows, total, q)
    out = fetch.attend(backend, tokens, cores, spec, bias)[0]
    return out.unflatten(0, (-1, heads)).flatten(1, 2).to(q.dtype)


def put_newest(entries: Entries, new: NewTokens, rows: slice, position: int) -> None:
    """Let the newest tokens take their slots in the ring, after all that may fail; arguments as of
    `append_rows`."""
    n = entries.num_sinks
    count = new.q.shape[2]
    start = max(0, position - n)
    end = max(0, position + count - n)
    kept = min(end - start, entries.ring_size)
    entries.put_ring(rows, n + end - kept, [x[:, :, count - kept :] for x in new.stored])


def _attend_fully(entries: Entries, new: NewTokens, rows: slice, position: int) -> Tensor:
    """Attend from new queries to all raw tokens up to their own, [rows, H, T, D]."""
    q = new.q
    end = position + q.shape[2]
    heads = entries.keys.shape[1]
    k, v = entries.store.tokens(rows, end, Newest(position, new.raw))
    if entries.spec.softcap is None:
        k, v = (x.unflatten(0, (-1, heads)) for x in (k, v))
        return attend_causally(q, k, v, entries.spec.scale)
    grouped = q.unflatten(1, (heads, -1)).flatten(0, 1)
    tokens = Tokens(grouped, k, v, position)
    cores = entries.get_cores(rows, 0, q.dtype)
    spec = spec_of(entries.spec, "full", end)
    out, _ = backend_module(entries.config.backend, q).attend(tokens, cores, spec)
    return out.unflatten(0, (-1, heads)).flatten(1, 2)


def _seen_tokens(
    entries: Entries, tokens: Tokens, rows: slice, spec: Spec, newest: Newest
) -> Tokens:
    """Return the tokens of an append with all raw tokens that its queries may see: for fetch those
    of the whole past, else the first tokens beside them.

    Args:
        newest: The raw tokens of the append.
    """
    end = tokens.q_start + tokens.q.shape[2]
    if spec.fetch_groups:
        k, v = entries.store.tokens(rows, end, newest)
        return Tokens(tokens.q, k, v, tokens.q_start)
    n = entries.num_sinks
    if not n:
        return tokens
    ring = entries.ring_size
    first_tokens = entries.get(rows, ring, ring + min(n, end), tokens.k.dtype)
    sink_k, sink_v = (x.flatten(0, 1) for x in first_tokens)
    return tokens._replace(sink_k=sink_k, sink_v=sink_v)
