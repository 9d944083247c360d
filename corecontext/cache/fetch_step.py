"""Attend from one token per row with fetch, in tensor arithmetic only: compact entries, and raw
tokens of the groups chosen."""

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.cache.entries import ALL, Entries
from corecontext.cache.raw_store import RawStore
from corecontext.ops.fetch.choice import choose, to_marks
from corecontext.ops.fetch.core_part import cap, products
from corecontext.ops.fetch.scoring import scores
from corecontext.visibility import sees_core


def attend_fetched(
    entries: Entries, store: RawStore, q: Tensor, see: Tensor, position: Tensor
) -> Tensor:
    """Return the attention [B, H, 1, D] of queries q [B, H, 1, D] at their rows' positions [B].

    Args:
        see: [B, 1, slots], True for the compact entries that each row sees without fetch: ring and
            sinks, then core tokens.
    """
    spec = entries.spec
    num_raw = entries.raw_size
    count = see.shape[2] - num_raw  # groups
    heads = entries.keys.shape[1]
    repeats = q.shape[1] // heads
    queries = q.reshape(-1, repeats, 1, q.shape[3])  # [N, r, 1, D], N = B x Hkv
    keys, values = entries.get(ALL, 0, see.shape[2], q.dtype)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    mass = entries.mass_of_cores(ALL, count)

    # Scores of the compact entries, [N, r, 1, slots].
    compact = cap(products(queries, keys) * spec.scale, spec)
    if mass is not None:
        compact = compact + F.pad(mass.to(compact.dtype), (num_raw, 0))[:, :, None]
    see = see[:, None].expand(-1, heads, -1, -1).flatten(0, 1)[:, :, None]  # [N, 1, 1, slots]
    compact = compact.masked_fill(~see, -torch.inf)

    # The choice [N, k], -1 for no group, and the compact entries without its core tokens.
    later = (position - entries.num_sinks).repeat_interleave(heads)[:, None]  # [N, 1]
    groups = torch.arange(count, device=q.device)
    visible = sees_core(groups, later, spec.group_size, spec.window_size)[:, None, None]
    estimates = scores(store.index(count), store.queries(queries), spec)
    numbers = choose(estimates, visible, min(spec.fetch_groups, count))[:, 0]
    marks = to_marks(numbers, count)
    # mutant fetch: decoding sees a core token beside its raw tokens
    hidden = marks[:, None, None]
    compact[..., num_raw:] = compact[..., num_raw:].masked_fill(hidden, -torch.inf)

    # Raw tokens of the groups chosen, [N, r, 1, k g], in the same softmax.
    raw_keys, raw_values = store.groups(numbers)
    raw = cap(products(queries, raw_keys) * spec.scale, spec)
    is_chosen = (numbers >= 0).repeat_interleave(spec.group_size, 1)[:, None, None]
    raw = raw.masked_fill(~is_chosen, -torch.inf)
    weights = torch.cat((compact, raw), 3).softmax(-1).to(q.dtype)
    of_compact, of_raw = weights.split([compact.shape[3], raw.shape[3]], 3)
    out = of_compact @ values[:, None] + of_raw @ raw_values[:, None]
    return out.reshape(q.shape)
