"""Append any number of tokens to one layer's entries, and attend from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.cache.entries import ALL, Entries
from corecontext.cache.full import attend_causally
from corecontext.cache.late import Late
from corecontext.cache.raw_store import Newest
from corecontext.ops.api import backend_module
from corecontext.ops.fetch import attend as fetch
from corecontext.ops.fetch.prompt_rule import EACH_BY_ITSELF, Reading, reading_of
from corecontext.ops.spec import Groups, Tokens
from corecontext.visibility import local_start, num_complete_groups, num_visible_cores


class NewTokens(NamedTuple):
    """The tokens of one append."""

    q: Tensor
    """[B, H, T, D]."""
    k: Tensor
    """[B, Hkv, T, D], rounded to 8 bits and back if the cache is in 8 bits; v likewise."""
    v: Tensor
    stored: list[Tensor]
    """Keys and values as the buffers hold them (`Entries.encode`)."""
    raw: list[Tensor]
    """Keys and values as the store of raw tokens holds them: for fetch as the buffers do, for a
    prompt that full attention reads not rounded."""

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


def reading_by(entries: Entries, device: str, is_prompt: bool) -> Reading:
    """Return how the tokens of an append see the past; without a store of raw tokens by core tokens
    alone. `device` is a kind of device, "cpu" or "cuda"."""
    # mutant prefill: a prompt is read by CCA
    if entries.store is None:
        return EACH_BY_ITSELF
    return reading_of(entries.config, device, is_prompt)


def append_rows(
    entries: Entries, new: NewTokens, rows: slice, position: int, reading: Reading | None
) -> Tensor | None:
    """Store the tokens of rows that share their padding, but not in the ring yet (`put_newest`),
    pool the groups that they complete, and attend from them.

    Args:
        new: The tokens of these rows.
        position: Of the first of them, counted without padding.
        reading: How they see the past; None only stores them.

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

    # Sinks have slots of their own.
    new_sinks = max(0, min(n - position, count))
    if new_sinks:
        stored = [x[:, :, :new_sinks] for x in new.stored]
        entries.put(rows, entries.ring_size + position, stored)

    # Those behind the sinks are a sequence of their own, in which start .. end - 1 are new and raw
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

    # Groups that are complete before, and with the new tokens.
    old = num_complete_groups(start, g)
    total = num_complete_groups(end, g)
    if total > old:
        # The last token of the first new group, counted among the new tokens.
        first_group_end = new_sinks + old * g + g - 1 - start
        q_last = q[:, :, first_group_end : new_sinks + total * g - start : g]
        groups = [x[:, old * g - low : total * g - low].unflatten(1, (-1, g)) for x in (k, v)]
        entries.put_cores(rows, old, entries.pool(Groups(q_last, *groups)))

    if reading is None:
        return None
    # While no query sees a core token, PyTorch's own attention is the fastest.
    spec = entries.spec
    # mutant 4: plain attention for a prompt one token too long
    is_plain = position == 0 and num_visible_cores(end - 1, g, spec.window_size) == 0
    if is_plain and spec.softcap is None:
        return attend_causally(*new[:3], spec.scale)
    tokens = Tokens(q, k, v, position, n + low)
    if entries.store is None:
        tokens = _with_sinks(entries, tokens, rows)
    else:
        keys, values = entries.store.tokens(rows, position + count, Newest(position, new.raw))
        tokens = Tokens(q, keys, values, position)
    # Queries at the beginning of a prompt may see all raw tokens; the rest see core tokens.
    num_full = max(0, min(reading.full_until - position, count))
    if num_full == count:
        out = _attend_fully(entries, tokens, rows)
    else:
        out = torch.empty_like(q)  # as q lies in memory, so that no caller copies it
        if num_full:
            out[:, :, :num_full] = _attend_fully(entries, tokens.until(num_full), rows)
        spec = reading.settings(spec)
        cores = entries.get_cores(rows, total, new.k.dtype)
        backend = backend_module(entries.config.backend, q)
        mass = entries.mass_of_cores(rows, total)
        rest = tokens.after(num_full)
        fetch.attend(backend, rest, cores, spec, mass, out=out[:, :, num_full:])
    return out.unflatten(0, (-1, heads)).flatten(1, 2).to(q.dtype)


def put_newest(entries: Entries, new: NewTokens, rows: slice, position: int) -> None:
    """Store the newest tokens in the ring, after all that may fail; as `append_rows` takes them."""
    count = new.q.shape[2]
    end = max(0, position + count)
    kept = min(end - max(0, position), entries.ring_size)
    entries.put_ring(rows, end - kept, [x[:, :, count - kept :] for x in new.stored])


def append_late(entries: Entries, new: NewTokens, position: int, late: Late) -> tuple[Tensor, Late]:
    """Store tokens of rows of one length as raw tokens only, and attend from them to all raw
    tokens; ring, core tokens and index come late (late.py).

    Args:
        position: Of the first of them, counted without padding.
        late: Holds the groups that are not pooled yet.

    Returns:
        [B, H, T, D], and `late` with the groups that the new tokens complete.
    """
    count = new.q.shape[2]
    entries.store.put_raw(ALL, position, new.raw)
    newest = Newest(position, new.raw)
    heads = new.k.shape[1]
    keys, values = entries.store.tokens(ALL, position + count, newest)
    q = new.q.unflatten(1, (heads, -1)).flatten(0, 1)
    out = _attend_fully(entries, Tokens(q, keys, values, position), ALL)
    # Pooling needs the queries of groups' last tokens: the first behind the sinks, then every g-th.
    new_sinks = max(0, entries.num_sinks - position)
    g = entries.group_size
    last = new_sinks + (entries.num_sinks - 1 - position - new_sinks) % g
    queries = [*late.queries, *([new.q[:, :, last::g].clone()] if last < count else [])]
    kept = None if entries.store.is_near else newest
    return out.unflatten(0, (-1, heads)).flatten(1, 2), Late(queries, position + count, kept)


def _attend_fully(entries: Entries, tokens: Tokens, rows: slice) -> Tensor:
    """Attend from queries [N, r, T, D] to all raw tokens up to their own; N = rows x Hkv."""
    spec = entries.spec
    if spec.softcap is None:
        batch = len(tokens.q) // entries._buffers[0].shape[1]
        q, k, v = (x.unflatten(0, (batch, -1)) for x in tokens[:3])
        out = attend_causally(q.flatten(1, 2), k, v, spec.scale)
        return out.reshape(tokens.q.shape)
    no_cores = entries.get_cores(rows, count=0, dtype=tokens.q.dtype)
    backend = backend_module(entries.config.backend, tokens.q)
    return backend.attend(tokens, no_cores, spec.of_full(tokens.k.shape[1]))[0]


def _with_sinks(entries: Entries, tokens: Tokens, rows: slice) -> Tokens:
    """Return the tokens of an append, raw ones from the ring on, with the sinks beside them."""
    end = tokens.q_start + tokens.q.shape[2]
    n = entries.num_sinks
    if not n:
        return tokens
    ring = entries.ring_size
    sinks = entries.get(rows, ring, ring + min(n, end), tokens.k.dtype)
    sink_k, sink_v = (x.flatten(0, 1) for x in sinks)
    return tokens._replace(sink_k=sink_k, sink_v=sink_v)
