"""Compute the weights of core tokens and queries by layer and head, which attention never forms."""

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
    """Weights of a layer's heads of one group size on a text, float32 on the CPU; H query heads,
    M groups, Q queries, R raw tokens at most."""

    layer: int
    """Index among the full-attention layers."""
    heads: tuple[int, ...]
    """Indices of these query heads."""
    group_size: int
    pooling: Tensor
    """Weights of each query head's last query inside each group, [H, M, g]."""
    used: Tensor
    """Weights that core tokens were pooled with, [H, M, g]; the mean over the query heads of a KV
    head where they share a core token."""
    core: Tensor
    """Weights of each query on core tokens, [H, Q, M]; 0 for invisible ones."""
    raw: Tensor
    """Weights on raw tokens, [H, Q, R]; the last is the query itself."""
    first: Tensor
    """Weights on the first tokens kept raw, where they are not among those, [H, Q, n]."""
    fetched: Tensor
    """Weights on the raw tokens of groups that the query fetches, [H, Q, M, g], 0 for others;
    without fetch [H, Q, 0, g]."""


def attention_maps(
    loaded: Loaded, input_ids: Tensor, queries: Sequence[int], layers: Sequence[int] = ()
) -> list[LayerMap]:
    """Return the maps of a text's layers in order; several of a layer whose heads have different
    group sizes.

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
    # Attention reports each layer's queries and keys, of which its maps are made.
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
    group_sizes, kv_heads_of = heads_of_each(sizes)
    heads = split_heads(torch.arange(inputs.q.shape[1]), kv_heads_of, kv_heads, 0)
    maps = []
    for i, split in enumerate(split_inputs(inputs, kv_heads_of)):
        part_spec = spec.replace(group_size=group_sizes[i]).for_length(inputs.q.shape[2])
        maps.append(_map(index, heads[i].tolist(), split, part_spec, queries))
    return maps


def _map(
    layer: int, heads: Sequence[int], inputs: Inputs, spec: Spec, queries: Sequence[int]
) -> LayerMap:
    """Return the map of heads with one group size."""
    # Pool as the model does, and keep the weights.
    q, k, v = (x[0].float() for x in inputs[:3])
    kv_heads, length = k.shape[:2]
    g = spec.group_size
    num_groups = num_complete_groups(length, g)
    end = num_groups * g
    groups = Groups(
        q[:, g - 1 : end : g].unflatten(0, (kv_heads, -1)),
        k[:, :end].unflatten(1, (num_groups, g)),
        v[:, :end].unflatten(1, (num_groups, g)),
    )
    weights, pooling, _ = weights_of(groups.q_last, groups.k, spec)  # [Hkv, r, M, g]
    used = weights.expand_as(pooling).flatten(0, 1)
    pooling = pooling.flatten(0, 1)
    core_k = reference.pool(groups, spec).k
    # Keys and masses by query head: a query adds the latter to its scores.
    core_k = core_k.expand(-1, len(q) // kv_heads, -1, -1).flatten(0, 1)  # [H, M, D]
    raw_k = k.repeat_interleave(len(q) // kv_heads, 0)
    mass = entropy(used) if spec.core_mass else torch.zeros_like(used[..., 0])  # [H, M]
    by_kv_head = (kv_heads, len(q) // kv_heads)
    chosen = _fetched_groups(q.unflatten(0, by_kv_head), k, num_groups, spec, queries)
    chosen = chosen.repeat_interleave(by_kv_head[1], 0)  # [H, Q, M]

    # Attend with one query at a time, over core tokens and all raw tokens up to itself.
    starts = [local_start(t, g, spec.window_size) for t in queries]
    reach = max((t + 1 - start for t, start in zip(queries, starts)), default=1)
    core = torch.zeros(len(q), len(queries), num_groups)
    raw = torch.zeros(len(q), len(queries), reach)
    first = torch.zeros(len(q), len(queries), spec.sinks)
    fetched = torch.zeros(len(q), len(queries), num_groups if spec.fetch_groups else 0, g)
    for i, (t, start) in enumerate(zip(queries, starts)):
        # The first tokens replace the core tokens of their groups, as far as they are not local.
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
        scores_of_far = scores[:, num_cores + num_first : num_cores + start]
        scores[:, :num_cores].masked_fill_(chosen[:, i, cores], -torch.inf)
        scores_of_far.masked_fill_(~chosen[:, i, cores].repeat_interleave(g, 1), -torch.inf)
        weights = scores.softmax(-1).cpu()
        core[:, i, cores] = weights[:, :num_cores]
        if spec.fetch_groups:
            far = weights[:, num_cores + num_first : num_cores + start]
            fetched[:, i, cores] = far.unflatten(1, (num_cores, g))
        first[:, i, :num_first] = weights[:, num_cores : num_cores + num_first]
        raw[:, i, reach - num_local :] = weights[:, num_cores + start :]
    return LayerMap(layer, tuple(heads), g, pooling.cpu(), used.cpu(), core, raw, first, fetched)


def _fetched_groups(
    q: Tensor, k: Tensor, num_groups: int, spec: Spec, queries: Sequence[int]
) -> Tensor:
    """Return the groups that each query fetches, [Hkv, Q, M], True where it does.

    Args:
        q: Of all positions, [Hkv, r, L, D].
        k: [Hkv, L, D].
        num_groups: Complete groups, those of first tokens too: M.
    """
    chosen = torch.zeros(len(k), len(queries), num_groups, dtype=torch.bool, device=k.device)
    without = spec.sinks // spec.group_size
    if not spec.fetch_groups or num_groups <= without:
        return chosen
    asked = sorted(set(queries))
    position = torch.tensor(asked, device=k.device)
    see_core, _ = reference.visible(position, position, num_groups - without, spec)
    choice = reference.choose(q[:, :, position], position, see_core, k, spec)
    chosen[:, :, without:] = choice[:, [asked.index(t) for t in queries]]
    return chosen
