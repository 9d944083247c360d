"""Count hits of slots for fetched groups while a model reads a text token by token."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from corecontext.baselines import enabled
from corecontext.cache import parts_of
from corecontext.config import CCAConfig
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.loading import Loaded
from reproduction.real.attention import tokens_of


def hit_rates(
    loaded: Loaded, config: CCAConfig, ids: Iterable[int], steps: int, slots: Sequence[int]
) -> dict[int, float]:
    """Return the share of fetched groups that are in a slot already, by the number of slots of a KV
    head, in the last `steps` tokens of a text; the tokens before them are read at once.

    Each number of slots, at least as many as groups are fetched, replaces the groups that were not
    read for longest, of equal ones that of the lower slot, as a cache does. The first step fills
    slots and is not counted.

    Args:
        config: Settings with fetch; where raw tokens are kept changes no choice.
    """
    tokens = tokens_of([ids], loaded.model)
    # The portable path: steps call the store, which a fused step does not.
    config = config.replace(store="device", backend="packed", prefill="fetch")
    choices: list[list[Tensor]] = []
    with enabled(loaded.model, config), torch.inference_mode():
        cache = returned_cache(loaded.model.get_decoder()(tokens[:, :-steps], use_cache=True))
        for layer in cache.layers:
            for cached in parts_of(layer.compact):
                of_layer: list[Tensor] = []
                choices.append(of_layer)
                cached.store.groups = _recorded(cached.store.groups, of_layer)
        for step in range(steps, 0, -1):
            position = tokens.shape[1] - step
            loaded.model.get_decoder()(
                tokens[:, position : position + 1], **with_cache(cache), use_cache=True
            )
    # [KV heads of all layers, steps, k].
    by_head = torch.cat([torch.stack(each, 1) for each in choices if each]).tolist()
    return {count: _hit_rate(by_head, count) for count in slots}


def _recorded(groups, choices: list[Tensor]):
    """Return `RawStore.groups` that keeps the numbers that it is called with."""

    def record(numbers: Tensor) -> tuple[Tensor, Tensor]:
        choices.append(numbers.clone())
        return groups(numbers)

    return record


def _hit_rate(by_head: Sequence[Sequence[Sequence[int]]], num_slots: int) -> float:
    """Return the share of hits over all heads and all steps but the first; -1 is no group."""
    hits = lookups = 0
    for steps in by_head:
        # The slot of each group, the least recently read first, of equal ones the lowest slot.
        slots: OrderedDict[int, int] = OrderedDict()
        for number, step in enumerate(steps):
            chosen = [group for group in step if group >= 0]
            read = {group: slots.pop(group) for group in chosen if group in slots}
            if number:
                hits += len(read)
                lookups += len(chosen)
            for group in chosen:
                if group in read:
                    continue
                used = len(slots) + len(read)
                read[group] = used if used < num_slots else slots.popitem(last=False)[1]
            slots.update(sorted(read.items(), key=itemgetter(1)))
    return hits / max(1, lookups)
