"""Count operations and bytes of attention and of whole models (docs/math.md, cost).

An operation is one multiplication or addition, so a matrix product of m x k by k x n has 2 m k n.
Full attention is CCA with group_size=1, so the functions serve both. The letters are those of
docs/code.md. No other file of the package states a cost formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from corecontext.config import CCAConfig
from corecontext.model_sizes import ModelSizes
from corecontext.ops.fetch.index import index_of
from corecontext.ops.fetch.prompt_rule import reading_of
from corecontext.visibility import (
    num_complete_groups,
    num_scores,
    num_sinks,
    num_visible_cores,
    window_capacity,
)

FORWARD_PRODUCTS = 2
"""Matrix products of the forward pass: q k^T, p v."""
BACKWARD_PRODUCTS = 5
"""Of the backward pass: q k^T again, dp, dv, dq, dk."""


def attention_flops(
    seq_len: int,
    query_heads: int,
    head_dim: int,
    *,
    group_size: int = 1,
    window_size: int = 1,
    sinks: int = 0,
    backward: bool = False,
) -> int:
    """Count operations of causal attention's matrix products: 4 D H sum_t (j(t) + t + 1 - j(t) g),
    where the query at t sees j(t) core tokens, and 2.5 times that in the backward pass.

    Args:
        seq_len, query_heads, head_dim: Sizes of the queries.
        group_size: Tokens per core token; 1 is full attention.
        window_size: Nearest tokens seen uncompressed.
        sinks: First tokens kept raw, a multiple of group_size (`visibility.num_sinks`).
        backward: Count the backward pass instead; it computes the scores again, as every
            linear-memory kernel does.
    """
    products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
    scores = num_scores(seq_len, group_size, window_size, sinks)
    return 2 * products * query_heads * head_dim * scores


def pooling_flops(
    seq_len: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    group_size: int,
    sinks: int = 0,
    backward: bool = False,
) -> int:
    """Count operations of making the core tokens. The last query of a group, in each query head,
    scores its keys; each KV head has a weighted sum of keys and one of values. The backward pass
    has twice as many."""
    if group_size == 1:
        return 0
    tokens = num_complete_groups(seq_len - sinks, group_size) * group_size
    forward = tokens * head_dim * (2 * query_heads + 4 * kv_heads)
    return 2 * forward if backward else forward


def operator_flops(
    seq_len: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    group_size: int = 1,
    window_size: int = 1,
    sinks: int = 0,
    *,
    backward: bool = False,
) -> int:
    """Count operations of the whole operator, pooling and attention, for one sequence."""
    options: dict[str, Any] = {"group_size": group_size, "sinks": sinks, "backward": backward}
    attention = attention_flops(seq_len, query_heads, head_dim, window_size=window_size, **options)
    return attention + pooling_flops(seq_len, query_heads, kv_heads, head_dim, **options)


def cache_entries(seq_len: int, group_size: int = 1, window_size: int = 1, sinks: int = 0) -> int:
    """Count entries of the cache of a layer, sequence and KV head: (L - n) // g core tokens, n =
    `sinks` first tokens and s + g - 1 of the window; L for full attention (group_size=1)."""
    if group_size == 1:
        return seq_len
    cores = num_complete_groups(seq_len - sinks, group_size)
    return cores + min(sinks, seq_len) + window_capacity(group_size, window_size)


def cache_bytes(entries: int, num_layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Count bytes of a model's cache with so many `entries` in each layer and KV head; `itemsize`
    is that of a number."""
    return 2 * num_layers * kv_heads * head_dim * itemsize * entries


class CacheBytes(NamedTuple):
    """Bytes of a cache, or of a part of it."""

    device: int
    host: int


def entry_bytes(config: CCAConfig, head_dim: int, itemsize: int) -> int:
    """Count bytes of one entry of a compact cache: key and value of a KV head, and the float32 mass
    that every entry has room for."""
    has_mass = config.core_mass and config.group_size > 1
    return _token_bytes(config, head_dim, itemsize) + 4 * has_mass


def _token_bytes(config: CCAConfig, head_dim: int, itemsize: int) -> int:
    """Count bytes of key and value of a KV head; in 8 bits each has a float32 scale."""
    if config.cache_dtype == "auto":
        return 2 * head_dim * itemsize
    return 2 * (head_dim + 4)


def store_bytes(config: CCAConfig, seq_len: int, head_dim: int, itemsize: int) -> CacheBytes:
    """Count bytes that fetch, under settings with one g, adds to the compact cache of a KV head and
    row after seq_len tokens: raw tokens, the index, with store "host" slots and their table."""
    if not config.fetch_groups or config.store == "none":
        return CacheBytes(0, 0)
    g = config.group_size
    sinks = num_sinks(config.sink_size, g)
    raw = seq_len * _token_bytes(config, head_dim, itemsize)
    kind = index_of(config.fetch_index)
    index = kind.num_stored_bytes(g, head_dim, itemsize)
    index *= kind.num_indexed(seq_len - sinks, g, config.window_size)
    if config.store == "device":
        return CacheBytes(raw + index, 0)
    num_slots = config.slots_for(seq_len)
    if not num_slots:
        return CacheBytes(index, raw)
    # A slot holds a group's tokens, its number (int32) and the step that last read it (int64). The
    # table has the slot of each group (int32), and a column for no group.
    groups = num_complete_groups(seq_len - sinks, g)
    slots = min(num_slots, groups) * (g * _token_bytes(config, head_dim, itemsize) + 4 + 8)
    return CacheBytes(index + slots + 4 * (groups + 1), raw)


def fetch_flops(config: CCAConfig, seq_len: int, query_heads: int, head_dim: int) -> int:
    """Count operations that fetch, under settings with one g, adds to those of CCA over a prompt.
    Each fetched group adds g - 1 keys to its query: g raw tokens come in place of a core token.
    Each share of queries scores the index's keys of all groups that it sees."""
    if not config.fetch_groups:
        return 0
    g, s = config.group_size, config.window_size
    length = seq_len - num_sinks(config.sink_size, g)
    visible = num_visible_cores(length - 1, g, s)
    # `reading.share` queries choose `reading.times` (1 or 2) times k groups. A device, none here,
    # would say how many first tokens full attention reads; fetch is counted for all.
    reading = reading_of(config, device="", is_prompt=True)
    chosen = min(reading.times * config.fetch_groups, visible)
    fetched = _num_visible(length, g, s, chosen) * (g - 1)
    scored = _num_visible(length, g, s, visible) // reading.share
    scored *= index_of(config.fetch_index).num_keys(g)
    return 2 * query_heads * head_dim * (FORWARD_PRODUCTS * fetched + scored)


def _num_visible(seq_len: int, group_size: int, window_size: int, most: int) -> int:
    """Count pairs of a query and a group that it sees, at most `most` for each query: the sum over
    m = 1 to `most` of the L - (s + m g - 1) queries that see at least m groups."""
    return most * (seq_len - window_size + 1) - group_size * most * (most + 1) // 2


@dataclass(frozen=True)
class ModelCost:
    """Sizes of a decoder that its cost depends on; build it with `ModelCost.of`."""

    num_layers: int
    """Layers with full attention, which CCA replaces; those of `windows` are not counted."""
    query_heads: int
    kv_heads: int
    head_dim: int
    linear_weights: int
    """Weights that one token is multiplied with, without the output head; of experts only those
    that it is routed to."""
    head_weights: int
    """Weights of the output head, used for the last token only in a prefill."""
    windows: Sequence[int] = ()
    """Window, in tokens, of each sliding-window layer; CCA leaves these layers alone."""
    itemsize: int = 2
    """Bytes of a cached number."""

    @classmethod
    def of(cls, config: Any, model: Any = None) -> ModelCost:
        """Read the sizes from a Hugging Face config and count the weights.

        Args:
            config: A transformers config of a causal language model.
            model: The model itself, on any device; None makes one without memory.
        """
        model = empty_model(config) if model is None else model
        text = config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        windows = tuple(int(text.sliding_window) for kind in kinds if kind == "sliding_attention")
        sizes = ModelSizes.of(config)
        return cls(
            len(kinds) - len(windows),
            sizes.query_heads,
            sizes.kv_heads,
            sizes.head_dim,
            _weights_per_token(model, text),
            model.get_output_embeddings().weight.numel(),
            windows,
            _itemsize(text),
        )

    def prefill_flops(
        self, seq_len: int, group_size: int = 1, window_size: int = 1, sinks: int = 0
    ) -> int:
        """Count operations of reading a prompt, up to the logits of its first new token."""
        heads = (self.query_heads, self.kv_heads, self.head_dim)
        attention = operator_flops(seq_len, *heads, group_size, window_size, sinks)
        sliding = FORWARD_PRODUCTS * self._sliding_product_flops(seq_len)
        weights = 2 * (self.linear_weights * seq_len + self.head_weights)
        return weights + sliding + self.num_layers * attention

    def step_flops(
        self, seq_len: int, group_size: int = 1, window_size: int = 1, *, checkpointing: bool = True
    ) -> int:
        """Count operations of one training step on a sequence: the forward, with checkpointing the
        layers' forward again, and the backward, which has two products with each weight; the output
        head is computed once (docs/training.md)."""
        heads = (self.query_heads, self.kv_heads, self.head_dim)
        forward = operator_flops(seq_len, *heads, group_size, window_size)
        backward = operator_flops(seq_len, *heads, group_size, window_size, backward=True)
        forwards = 2 if checkpointing else 1
        attention = self.num_layers * (forwards * forward + backward)
        products = forwards * FORWARD_PRODUCTS + BACKWARD_PRODUCTS
        sliding = products * self._sliding_product_flops(seq_len)
        weights = 2 * self.linear_weights * (forwards + 2) + 6 * self.head_weights
        return attention + sliding + seq_len * weights

    def cache_bytes(
        self, seq_len: int, group_size: int = 1, window_size: int = 1, sinks: int = 0
    ) -> int:
        """Count bytes cached after seq_len tokens, sliding-window layers included."""
        entries = cache_entries(seq_len, group_size, window_size, sinks)
        compact = cache_bytes(entries, self.num_layers, self.kv_heads, self.head_dim, self.itemsize)
        return compact + self.sliding_bytes(seq_len)

    def config_bytes(self, config: CCAConfig, seq_len: int) -> CacheBytes:
        """Count bytes cached after seq_len tokens under CCA's settings of one g, on the device and
        in host memory: masses, 8 bits, raw tokens of fetch and sliding-window layers included."""
        g = config.group_size
        sinks = num_sinks(config.sink_size, g)
        compact = cache_entries(seq_len, g, config.window_size, sinks)
        compact *= entry_bytes(config, self.head_dim, self.itemsize)
        store = store_bytes(config, seq_len, self.head_dim, self.itemsize)
        heads = self.num_layers * self.kv_heads
        device = heads * (compact + store.device) + self.sliding_bytes(seq_len)
        return CacheBytes(device, heads * store.host)

    def sliding_bytes(self, seq_len: int) -> int:
        """Count bytes cached by sliding-window layers."""
        entries = sum(min(seq_len, window) for window in self.windows)
        return cache_bytes(entries, 1, self.kv_heads, self.head_dim, self.itemsize)

    def weight_bytes(self) -> int:
        """Count bytes of the weights that every decoding step reads."""
        return (self.linear_weights + self.head_weights) * self.itemsize

    def _sliding_product_flops(self, seq_len: int) -> int:
        """Count operations of one of attention's matrix products, in all sliding-window layers."""
        scores = 0
        for window in self.windows:
            inside = min(seq_len, window)
            scores += inside * (inside + 1) // 2 + (seq_len - inside) * window
        return 2 * self.query_heads * self.head_dim * scores


def empty_model(config: Any) -> Any:
    """Make a causal language model on the meta device: without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _weights_per_token(model: Any, text: Any) -> int:
    """Count weights of matrices that one token is multiplied with: no embeddings, no output head,
    and of routed experts only as many as a token takes."""
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next(filter(None, (getattr(text, name, None) for name in names)), 0)
    used = getattr(text, "num_experts_per_tok", None) or experts
    total = 0
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or id(weight) in embeddings:
            continue
        count = weight.numel()
        if experts and ".experts." in name:
            count = count * used // experts
        total += count
    return total


def _itemsize(text: Any) -> int:
    """Return bytes of a number in the config's dtype; 4, float32's, where it names none."""
    import torch

    dtype = getattr(text, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 4
