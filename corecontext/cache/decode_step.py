"""Append one token per row and attend from it, in tensor arithmetic only.

The host asks the device for no number, so that a step can be compiled or captured.
"""

import torch
from torch import Tensor

from corecontext.cache.entries import ALL, Entries
from corecontext.cache.fetch_step import attend_fetched
from corecontext.cache.slots import read, write
from corecontext.ops.attend_buffer import attend_buffer
from corecontext.ops.spec import Groups
from corecontext.visibility import sees_core, sees_token


def decode_step(
    entries: Entries,
    tokens: tuple[Tensor, Tensor, Tensor],
    position: Tensor,
    *,
    num_cores: int,
    closes: bool,
) -> Tensor:
    """Store the tokens q [B, H, 1, D], k, v [B, Hkv, 1, D], close groups that they complete, and
    return their attention [B, H, 1, D].

    Args:
        position: [B], of each row's token, below 0 in padding.
        num_cores: Core tokens to look at, at least as many as any row sees.
        closes: Whether the token of any row may be the last of its group.
    """
    q, k, v = tokens
    stored = entries.encode(k, v)
    _put_tokens(entries, position, stored)
    if closes:
        _close_in_ring(entries, q, position)
    see = _visible(entries, position, num_cores)
    if entries.store is not None:
        entries.store.put_step(position, stored, closes=closes)
        if num_cores:
            return attend_fetched(entries, entries.store, q, see, position)
    raw_size = entries.raw_size
    keys, values = entries.get(ALL, 0, raw_size + num_cores, q.dtype)
    return attend_buffer(
        q,
        keys,
        values,
        see,
        raw_size,
        scale=entries.spec.scale,
        softcap=entries.spec.softcap,
        mass=entries.masses(ALL, num_cores) if entries.has_mass else None,
    )


def _put_tokens(entries: Entries, position: Tensor, stored: list[Tensor]) -> None:
    """Store each row's token, encoded, in the slot of its position."""
    ring = entries.ring_size
    n = entries.num_sinks
    slot = position % ring
    if n:
        # mutant sinks: decoding puts them into the ring
        slot = torch.where((position >= 0) & (position < n), ring + position, slot)
    for buffer, x in zip(entries.buffers, stored):
        write(buffer, slot[:, None], x)


def _close_in_ring(entries: Entries, q: Tensor, position: Tensor) -> None:
    """Pool the group of every row whose newest token is a group's last; other rows keep theirs."""
    # Pool the newest token's group in all rows: which of them closes is known to the device only.
    slots = group_of(position, entries.group_size) % entries.ring_size
    close_groups(entries, q, position, [read(x, slots) for x in entries.buffers])


def group_of(position: Tensor, group_size: int) -> Tensor:
    """Return the positions of the group of each row's token at `position` [B]: [B, g]."""
    start = position // group_size * group_size
    return start[:, None] + torch.arange(group_size, device=position.device)


def close_groups(entries: Entries, q: Tensor, position: Tensor, stored: list[Tensor]) -> None:
    """Pool the stored tokens [B, Hkv, g, D] of every row's newest group by the query [B, H, 1, D]
    of its last token."""
    k, v = (x.flatten(0, 1)[:, None] for x in entries.decode(stored, q.dtype))  # [N, 1, g, D]
    entries.put_closed(position, entries.pool(Groups(q.reshape(len(k), -1, 1, q.shape[3]), k, v)))


def _visible(entries: Entries, position: Tensor, num_cores: int) -> Tensor:
    """Return which entries each row's query sees, [B, 1, slots], True where it does."""
    sizes = (entries.group_size, entries.spec.window_size)
    n = entries.num_sinks
    ring = entries.ring_size
    device = position.device
    position = position[:, None]
    # The tokens behind the n sinks are a sequence of their own.
    later = position - n if n else position

    # mutant 4: decoding sees one core token too few
    see_core = sees_core(torch.arange(num_cores, device=device), later, *sizes)

    # The token in a ring slot is the newest whose position, modulo C, is the slot.
    age = (position - torch.arange(ring, device=device)) % ring
    # mutant sinks: decoding sees the ring's old slots
    see_raw = sees_token(later - age, later, *sizes)
    if n:
        first = torch.arange(entries.raw_size - ring, device=device)
        # mutant sinks: decoding sees those to come
        see_first = sees_token(first, position, *sizes, n)
        see_raw = torch.cat((see_raw, see_first), -1)
    return torch.cat((see_raw, see_core), -1)[:, None]
