"""Compute a model's pooling and attention weights by layer and head, which kernels never form."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.files import UserError
from corecontext.loading import Loaded
from corecontext.ops import reference
from corecontext.ops.head_split import heads_of_each, split_heads, split_inputs
from corecontext.ops.mass import entropy
from corecontext.ops.pooling import weights_of
from corecontext.ops.spec import Groups, Inputs, Spec
from corecontext.visibility import local_start, num_complete_groups, num_visible_cores


class LayerMap(NamedTuple):
    """Weights on a text of those heads of a layer that have one group size g, float32 on the CPU.

    H counts these query heads, M groups, Q the queries that are looked at, R the most raw tokens
    that one of them sees from the end of its far past on, n sinks. What a query sees adds up to 1.
    """

    layer: int
    """Index among the full-attention layers."""
    heads: tuple[int, ...]
    """Indices of these query heads in the layer."""
    group_size: int
    pooling: Tensor
    """Weights on a group's tokens by each query head's query at the group's end, [H, M, g]."""
    used: Tensor
    """Weights that core tokens were pooled with, [H, M, g]: the mean of `pooling` over the query
    heads of a KV head, which share a core token."""
    core: Tensor
    """Weights of each query on core tokens, [H, Q, M]; 0 for invisible ones."""
    raw: Tensor
    """Weights on the raw tokens behind the far past, [H, Q, R]; the last is the query itself."""
    first: Tensor
    """Weights on sinks in the far past, [H, Q, n]; those behind it are in `raw`."""
    fetched: Tensor
    """Weights on the raw tokens of groups that the query fetches, [H, Q, M, g], 0 for others;
    without fetch [H, Q, 0, g]."""


def attention_maps(
    loaded: Loaded, input_ids: Tensor, queries: Sequence[int], layers: Sequence[int] = ()
) -> list[LayerMap]:
    """Return the maps of a text in the order of layers, one for each group size of a layer.

    Args:
        loaded: A model under CCA.
        input_ids: [1, L].
        queries: Positions of the queries.
        layers: Full-attention layers, counted from 0; all where empty.

    Raises:
        UserError: the method has no core tokens, or there is no such layer or position.
    """
    from corecontext.integrations.hf.enabling import handle_of

    # Mistakes end before the model runs.
    handle = handle_of(loaded.model)
    if handle is None:
        raise UserError("method must be cca to look at core tokens, got another attention.")
    length = input_ids.shape[1]
    for position in queries:
        if not 0 <= position < length:
            raise UserError(f"query must be a position from 0 to {length - 1}, got {position}.")
    for layer in layers:
        if not 0 <= layer < len(handle.full):
            raise UserError(
                f"layer must be one of the {len(handle.full)} with full attention, counted from 0, "
                f"got {layer}."
            )
    # Each layer's attention calls `observe` with its q [1, H, L, D], k and v [1, Hkv, L, D].
    maps: dict[int, list[LayerMap]] = {}

    def observe(
        index: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        softcap: float | None,
        rotary: Any,
    ) -> None:
        if layers and index not in layers:
            return
        config = handle.layers[index]
        if scale is None:
            scale = q.shape[3] ** -0.5
        spec = Spec.of(config, rotary, scale, softcap)
        maps[index] = _layer_maps(index, Inputs(q, k, v), spec, queries)

    handle.observer = observe
    try:
        with torch.inference_mode():
            loaded.model(input_ids, use_cache=False, logits_to_keep=1)
    finally:
        handle.observer = None
    return [layer_map for index in sorted(maps) for layer_map in maps[index]]


def _layer_maps(index: int, inputs: Inputs, spec: Spec, queries: Sequence[int]) -> list[LayerMap]:
    """Return a map for each group size of a layer."""
    kv_heads = inputs.k.shape[1]
    sizes = spec.group_size
    if isinstance(sizes, int):
        sizes = (sizes,) * kv_heads
    group_sizes, kv_heads_of_size = heads_of_each(sizes)
    query_heads = torch.arange(inputs.q.shape[1])
    heads_of_size = split_heads(query_heads, kv_heads_of_size, kv_heads, dim=0)
    inputs_of_size = split_inputs(inputs, kv_heads_of_size)
    maps = []
    for g, heads, split in zip(group_sizes, heads_of_size, inputs_of_size):
        spec_of_size = spec.replace(group_size=g).for_length(inputs.q.shape[2])
        maps.append(_map(index, heads.tolist(), split, spec_of_size, queries))
    return maps


def _map(
    layer: int, heads: Sequence[int], inputs: Inputs, spec: Spec, queries: Sequence[int]
) -> LayerMap:
    """Return the map of heads with one group size; `inputs` has these heads only."""
    # Pool as the model does, and keep the weights.
    q, k, v = (x[0].float() for x in inputs[:3])  # [H, L, D], [Hkv, L, D]
    kv_heads, length = k.shape[:2]
    r = len(q) // kv_heads
    g = spec.group_size
    num_groups = num_complete_groups(length, g)
    end = num_groups * g
    groups = Groups(
        q[:, g - 1 : end : g].unflatten(0, (kv_heads, r)),
        k[:, :end].unflatten(1, (num_groups, g)),
        v[:, :end].unflatten(1, (num_groups, g)),
    )
    # [Hkv, 1, M, g], [Hkv, r, M, g]
    mean_pooling, pooling, _ = weights_of(groups.q_last, groups.k, spec)
    used = mean_pooling.expand_as(pooling).flatten(0, 1)
    pooling = pooling.flatten(0, 1)
    core_k = reference.pool(groups, spec).k
    # Keys, masses and choices by query head.
    core_k = core_k.expand(-1, r, -1, -1).flatten(0, 1)  # [H, M, D]
    raw_k = k.repeat_interleave(r, 0)  # [H, L, D]
    mass = entropy(used) if spec.core_mass else torch.zeros_like(used[..., 0])  # [H, M]
    chosen = _fetched_groups(q.unflatten(0, (kv_heads, r)), k, num_groups, spec, queries)
    chosen = chosen.repeat_interleave(r, 0)  # [H, Q, M]

    # Attend with one query at a time to core tokens, then to all raw tokens up to itself. Its far
    # past ends at its `start`.
    starts = [local_start(t, g, spec.window_size) for t in queries]
    reach = max((t + 1 - start for t, start in zip(queries, starts)), default=1)  # R
    core = torch.zeros(len(q), len(queries), num_groups)
    raw = torch.zeros(len(q), len(queries), reach)
    first = torch.zeros(len(q), len(queries), spec.sinks)
    fetched = torch.zeros(len(q), len(queries), num_groups if spec.fetch_groups else 0, g)
    for i, (t, start) in enumerate(zip(queries, starts)):
        # Groups of sinks have no core token.
        num_first = min(start, spec.sinks)
        cores = slice(num_first // g, num_visible_cores(t, g, spec.window_size))
        keys = torch.cat((core_k[:, cores], raw_k[:, : t + 1]), 1)
        scores = (keys @ q[:, t, :, None])[..., 0] * spec.scale  # [H, keys]
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        num_cores = cores.stop - cores.start
        num_local = t + 1 - start
        scores[:, :num_cores] += mass[:, cores]
        # A group is seen as its core token or, where it is fetched, as its raw tokens.
        pooled_tokens = slice(num_cores + num_first, num_cores + start)
        is_fetched = chosen[:, i, cores]
        scores[:, :num_cores].masked_fill_(is_fetched, -torch.inf)
        scores[:, pooled_tokens].masked_fill_(~is_fetched.repeat_interleave(g, 1), -torch.inf)
        weights = scores.softmax(-1).cpu()
        core[:, i, cores] = weights[:, :num_cores]
        if spec.fetch_groups:
            fetched[:, i, cores] = weights[:, pooled_tokens].unflatten(1, (num_cores, g))
        first[:, i, :num_first] = weights[:, num_cores : num_cores + num_first]
        raw[:, i, reach - num_local :] = weights[:, num_cores + start :]
    return LayerMap(layer, tuple(heads), g, pooling.cpu(), used.cpu(), core, raw, first, fetched)


def _fetched_groups(
    q: Tensor, k: Tensor, num_groups: int, spec: Spec, queries: Sequence[int]
) -> Tensor:
    """Return the groups that each query fetches, [Hkv, Q, M], True where it does. Each query
    chooses by itself, as in all calls without a cache.

    Args:
        q: Of all positions, [Hkv, r, L, D].
        k: [Hkv, L, D].
        num_groups: Complete groups, M, those of sinks included: they are never fetched.
    """
    chosen = torch.zeros(len(k), len(queries), num_groups, dtype=torch.bool, device=k.device)
    sink_groups = spec.sinks // spec.group_size
    if not spec.fetch_groups or num_groups <= sink_groups:
        return chosen
    ascending = sorted(set(queries))
    position = torch.tensor(ascending, device=k.device)
    see_core, _ = reference.visible(position, position, num_groups - sink_groups, spec)
    choice = reference.choose(q[:, :, position], position, see_core, k, spec)
    chosen[:, :, sink_groups:] = choice[:, [ascending.index(t) for t in queries]]
    return chosen
