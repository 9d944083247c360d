"""What core tokens listen to and what a query looks at, by layer and head: the weights that
attention never forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.files import UserError
from corecontext.loading import Loaded
from corecontext.ops import rules
from corecontext.ops.api import pool_core_tokens
from corecontext.ops.head_split import deal, deal_learned, heads_of_each
from corecontext.ops.spec import Groups, Spec
from corecontext.visibility import (
    group_size_for,
    local_start,
    num_complete_groups,
    num_sinks,
    num_visible_cores,
)


class LayerMap(NamedTuple):
    """Weights of a layer's heads of one group size on one text, float32 on the CPU; H query heads,
    M groups, Q queries, R raw tokens at most."""

    layer: int
    """Counted among those with full attention."""
    heads: tuple[int, ...]
    """Numbers of these query heads."""
    group_size: int
    pooling: Tensor
    """Weights of each query head's last query inside each group, [H, M, g]."""
    used: Tensor
    """What core tokens were made with: [H, M, g]; the mean over the query heads of a KV head where
    they share one."""
    core: Tensor
    """Weights of each query on core tokens, [H, Q, M]; 0 where it sees none."""
    raw: Tensor
    """Weights on raw tokens, [H, Q, R]; the last is the query itself."""
    first: Tensor
    """Weights on the first tokens kept raw, where they are not among those, [H, Q, n]."""

    def spread(self, head: int, query: int, position: int) -> Tensor:
        """Weight of every token in the query's output, core weights spread over their groups:
        [position + 1]."""
        whole = torch.zeros(position + 1)
        far = (self.core[head, query, :, None] * self.used[head]).flatten()[: position + 1]
        whole[: len(far)] += far
        near, first = (
            self.raw[head, query][-(position + 1) :],
            self.first[head, query][: position + 1],
        )
        whole[position + 1 - len(near) :] += near
        whole[: len(first)] += first
        return whole


def attention_maps(
    loaded: Loaded, input_ids: Tensor, queries: Sequence[int], layers: Sequence[int] = ()
) -> list[LayerMap]:
    """The maps of a text's layers in order, several of a layer whose heads have group sizes of
    their own.

    Args:
        loaded: A model under CCA.
        input_ids: [1, L].
        queries: Positions whose attention is wanted.
        layers: Full-attention layers, counted from 0; all where empty.

    Raises:
        UserError: the method has no core tokens with weights, or there is no such layer or
            position.
    """
    from corecontext.integrations.transformers import handle_of

    handle, length = handle_of(loaded.model), input_ids.shape[1]
    if handle is None:
        raise UserError("method must be cca to look at core tokens, got another attention.")
    if handle.config.pooling == "max":
        raise UserError(
            "pooling 'max' has no weights to show: each element comes from a token of its own."
        )
    for position in queries:
        if not 0 <= position < length:
            raise UserError(f"query must be a position from 0 to {length - 1}, got {position}.")
    for layer in layers:
        if not 0 <= layer < len(handle.full):
            raise UserError(
                f"layer must be one of the {len(handle.full)} with full attention, counted from 0, got "
                f"{layer}."
            )
    found: dict[int, list[LayerMap]] = {}

    def look(
        index: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        softcap: float | None,
        rotary: Any,
        learned: rules.Learned,
    ) -> None:
        if layers and index not in layers:
            return
        own, kv_heads = handle.layers[index], k.shape[1]
        scale = q.shape[3] ** -0.5 if scale is None else scale
        sizes, parts = heads_of_each(own.head_group_sizes or (own.group_size,) * kv_heads)
        dealt = [deal(x, parts, kv_heads) for x in (q, k, v)]
        numbers = deal(torch.arange(q.shape[1]), parts, kv_heads, 0)
        found[index] = []
        for g, learns, heads, *tensors in zip(
            sizes, deal_learned(learned, parts, kv_heads), numbers, *dealt
        ):
            config = dataclasses.replace(own, group_size=g, head_group_sizes=None)
            some = _map(config, *tensors, scale, softcap, rotary, learns, queries)
            found[index].append(some._replace(layer=index, heads=tuple(heads.tolist())))

    handle.observer = look
    try:
        with torch.inference_mode():
            loaded.model(input_ids, use_cache=False, logits_to_keep=1)
    finally:
        handle.observer = None
    return [one for _, maps in sorted(found.items()) for one in maps]


def _map(
    config: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    rotary: Any,
    learned: rules.Learned,
    queries: Sequence[int],
) -> LayerMap:
    """The map of heads of one group size, from their queries [1, H, L, D], keys and values; `layer`
    and `heads` are the caller's to say."""
    q, k, v = q.float(), k.float(), v.float()
    heads, kv_heads, length = q.shape[1], k.shape[1], q.shape[2]
    s, g = config.window_size, config.group_size
    if config.num_groups:
        g = group_size_for(length, s, config.num_groups)
    count, repeats, n = (
        num_complete_groups(length, g),
        heads // kv_heads,
        num_sinks(config.sink_size, g),
    )
    split = rules.by_sequence(learned, kv_heads, 1)
    grouped_k, grouped_v = (x[0, :, : count * g].unflatten(1, (count, g)) for x in (k, v))
    q_last = q[0, :, g - 1 : count * g : g].unflatten(0, (kv_heads, repeats))
    options = {"scale": scale, "softcap": softcap}
    if config.pooling == "mean":
        weights = torch.full((kv_heads, repeats, count, g), 1 / g, device=q.device)
        core_k = pool_core_tokens(
            q,
            k,
            v,
            group_size=g,
            pooling="mean",
            core_position=config.core_position,
            core_heads=config.core_heads,
            rotary=rotary,
            **options,
        )[0]
    else:
        groups = Groups(q_last, grouped_k, grouped_v)
        spec = Spec.of(config, rotary, scale, softcap)
        weights = rules.weights_of(groups, spec, split)
        core_k = rules.pool(groups, spec, split).k.flatten(0, 1)[None]
    used = (
        weights.mean(1, keepdim=True).expand_as(weights) if config.core_heads == "kv" else weights
    )
    core_k = core_k.repeat_interleave(heads // core_k.shape[1], 1)[0]  # [H, M, D]
    raw_k = k.repeat_interleave(repeats, 1)[0]
    bias = (
        float(config.core_bias) + learned["bias"].float()[:, None]
        if "bias" in learned
        else config.core_bias
    )
    core = torch.zeros(heads, len(queries), count)
    widest = max((t + 1 - local_start(t, g, s) for t in queries), default=1)
    raw, first = torch.zeros(heads, len(queries), widest), torch.zeros(heads, len(queries), n)
    for i, t in enumerate(queries):
        seen, low = num_visible_cores(t, g, s), local_start(t, g, s)
        kept = min(
            low, n
        )  # first tokens before the near ones, in place of the first groups' core tokens
        cores = slice(kept // g, seen)
        scores = (
            torch.cat((core_k[:, cores], raw_k[:, :kept], raw_k[:, low : t + 1]), 1)
            @ q[0, :, t, :, None]
            * scale
        )
        scores = (
            scores[..., 0] if softcap is None else softcap * torch.tanh(scores[..., 0] / softcap)
        )  # [H, S]
        scores[:, : seen - cores.start] += bias
        parts = scores.softmax(-1).cpu().split([seen - cores.start, kept, t + 1 - low], 1)
        core[:, i, cores], first[:, i, :kept], raw[:, i, widest - (t + 1 - low) :] = parts
    return LayerMap(
        0,
        tuple(range(heads)),
        g,
        weights.flatten(0, 1).cpu(),
        used.flatten(0, 1).cpu(),
        core,
        raw,
        first,
    )
