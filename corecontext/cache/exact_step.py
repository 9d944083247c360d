"""Append one token per row and attend from it to all raw tokens, where that takes less time than
choosing among them (ops/fetch/prompt_rule.py).

The token goes to the store of raw tokens only: the ring gets it before its next reading (late.py).
"""

from torch import Tensor

from corecontext.cache.decode_step import close_groups, group_of
from corecontext.cache.entries import Entries
from corecontext.cache.full import step_on_all
from corecontext.cache.slots import read
from corecontext.ops.api import choose_backend


def exact_step(
    entries: Entries,
    tokens: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[int | Tensor, Tensor, list[int]],
) -> Tensor:
    """Store the tokens q [B, H, 1, D], k, v [B, Hkv, 1, D], and return their attention [B, H, 1, D]
    to all raw tokens; `lengths` are a layer's `seen`, `pad` [B] and `pads` (state.py)."""
    spec = entries.spec
    seen, _, pads = lengths
    backend = entries.config.backend
    if backend == "auto" and isinstance(seen, int) and len(set(pads)) == 1:
        backend = "torch"  # for rows of one length its launches cost the host least
    else:
        backend = choose_backend(backend, tokens[0])
    return step_on_all(entries.store.raw, tokens, lengths, (spec.scale, spec.softcap), backend)


def close_in_store(entries: Entries, q: Tensor, position: Tensor) -> None:
    """Pool and index the group of every row whose token at `position` [B], with the query q
    [B, H, 1, D], is the last of its group; its tokens are read from the store."""
    store = entries.store
    slots = group_of(position, entries.group_size).clamp(0, store.length - 1)
    close_groups(entries, q, position, [read(x, slots) for x in store.raw])
    store.index_step(position)
