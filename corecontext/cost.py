"""Operations, bytes and the floor: the only owner of cost formulas (docs/math.md, cost).

An operation is one multiplication or addition, so a matrix product of m x k by k x n has 2 m k n.
Full attention is CCA with group_size=1, so every function here serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from corecontext.model_sizes import ModelSizes
from corecontext.visibility import (
    local_start,
    num_complete_groups,
    num_far_entries,
    num_scores,
    num_visible_cores,
    window_capacity,
)

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # q k^T, p v; q k^T again, dp, dv, dq, dk


def attention_flops(
    seq_len: int,
    query_heads: int,
    head_dim: int,
    *,
    group_size: int = 1,
    window_size: int = 1,
    sinks: int = 0,
    batch: int = 1,
    backward: bool = False,
) -> int:
    """Operations of causal attention's matrix products: 4 D H sum_t (j(t) + t + 1 - j(t) g), and
    2.5 times that back.

    Args:
        seq_len, query_heads, head_dim, batch: Sizes of the queries.
        group_size: Tokens per core token; 1 is full attention.
        window_size: Nearest tokens seen uncompressed.
        sinks: First tokens kept raw, a multiple of group_size (`visibility.num_sinks`).
        backward: Count the backward pass instead; it computes the scores again, as every
            linear-memory kernel does.
    """
    products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
    return (
        2
        * products
        * batch
        * query_heads
        * head_dim
        * num_scores(seq_len, group_size, window_size, sinks)
    )


def pooling_flops(
    seq_len: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    group_size: int,
    sinks: int = 0,
    batch: int = 1,
    backward: bool = False,
) -> int:
    """Operations of making the core tokens: each group's last query against its keys, two weighted
    sums; 2x back."""
    tokens = num_complete_groups(seq_len - sinks, group_size) * group_size if group_size > 1 else 0
    return (2 if backward else 1) * batch * tokens * head_dim * (2 * query_heads + 4 * kv_heads)


def operator_flops(
    seq_len: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    group_size: int = 1,
    window_size: int = 1,
    sinks: int = 0,
    batch: int = 1,
    backward: bool = False,
) -> int:
    """Operations of the whole operator: pooling and attention."""
    return attention_flops(
        seq_len,
        query_heads,
        head_dim,
        group_size=group_size,
        window_size=window_size,
        sinks=sinks,
        batch=batch,
        backward=backward,
    ) + pooling_flops(
        seq_len,
        query_heads,
        kv_heads,
        head_dim,
        group_size=group_size,
        sinks=sinks,
        batch=batch,
        backward=backward,
    )


def pass_flops(pass_name: str, *sizes: int, **options: int) -> int:
    """Operations of "forward", "backward" or "forward_backward"; the arguments of
    `operator_flops`."""
    return sum(
        operator_flops(*sizes, **options, backward=back)
        for back, name in ((False, "forward"), (True, "backward"))
        if name in pass_name
    )


def operator_bytes(
    seq_len: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    batch: int = 1,
    backward: bool = False,
) -> int:
    """Bytes that must move at least: q, k, v read and out written once; back also dout, dq, dk and
    dv."""
    forward = batch * seq_len * head_dim * itemsize * (2 * query_heads + 2 * kv_heads)
    return 2 * forward if backward else forward


def decode_bytes(
    position: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    group_size: int = 1,
    window_size: int = 1,
    sinks: int = 0,
    batch: int = 1,
) -> int:
    """Bytes of the keys and values that the query at `position` sees: what a decoding step of one
    layer reads."""
    entries = (
        num_far_entries(num_visible_cores(position, group_size, window_size), group_size, sinks)
        + position
        + 1
        - local_start(position, group_size, window_size)
    )
    return 2 * batch * kv_heads * head_dim * itemsize * entries


def floor_seconds(
    flops: float, flops_per_s: float, num_bytes: float = 0, bytes_per_s: float = float("inf")
) -> float:
    """The shortest possible time: all operations at the machine's matmul rate, or all bytes at its
    memory rate."""
    return max(flops / flops_per_s, num_bytes / bytes_per_s)


def cache_entries(
    seq_len: int,
    group_size: int = 1,
    window_size: int = 1,
    cores_per_group: int = 1,
    sinks: int = 0,
) -> int:
    """Cached tokens per layer, sequence and KV head: L // g + s + g - 1; L for full attention
    (group_size=1). First tokens kept raw take n (1 - 1 / g) more."""
    if group_size == 1:
        return seq_len
    cores = num_complete_groups(seq_len - sinks, group_size)
    return cores * cores_per_group + sinks + window_capacity(group_size, window_size)


def cache_bytes(
    seq_len: int,
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    group_size: int = 1,
    window_size: int = 1,
    cores_per_group: int = 1,
    sinks: int = 0,
    batch: int = 1,
) -> int:
    """Bytes of the keys and values that a model keeps after seq_len tokens."""
    entries = cache_entries(seq_len, group_size, window_size, cores_per_group, sinks)
    return 2 * batch * num_layers * kv_heads * head_dim * itemsize * entries


@dataclass(frozen=True)
class ModelCost:
    """What decides a decoder's cost; build it with `ModelCost.of`."""

    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    linear_weights: int
    """Weights that one token is multiplied with, without the output head; of experts only those it
    is sent to."""
    head_weights: int
    """Weights of the output head, used for the last token only in a prefill."""
    windows: Sequence[int] = ()
    """Window of each layer that slides by design; CCA leaves these layers alone."""
    itemsize: int = 2
    """Bytes of a cached number."""

    @classmethod
    def of(cls, config: Any, model: Any = None) -> ModelCost:
        """Read the sizes from a Hugging Face config; weights are counted on a model without memory.

        Args:
            config: A transformers config of a causal language model.
            model: The model itself where it is at hand, on any device; default one made on the meta
                device.
        """
        if model is None:
            import torch
            from transformers import AutoModelForCausalLM

            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        windows = tuple(int(text.sliding_window) for kind in kinds if kind == "sliding_attention")
        sizes = ModelSizes.of(config)
        head = model.get_output_embeddings().weight.numel()
        return cls(
            len(kinds) - len(windows),
            sizes.query_heads,
            sizes.kv_heads,
            sizes.head_dim,
            _weights_per_token(model, text),
            head,
            windows,
            _itemsize(text),
        )

    def prefill_flops(
        self, seq_len: int, group_size: int = 1, window_size: int = 1, sinks: int = 0
    ) -> int:
        """Operations of the first token of a prompt."""
        attend = operator_flops(
            seq_len,
            self.query_heads,
            self.kv_heads,
            self.head_dim,
            group_size=group_size,
            window_size=window_size,
            sinks=sinks,
        )
        sliding = sum(
            4 * self.query_heads * self.head_dim * _banded_scores(seq_len, window)
            for window in self.windows
        )
        return (
            2 * (self.linear_weights * seq_len + self.head_weights)
            + sliding
            + self.num_layers * attend
        )

    def step_flops(
        self, seq_len: int, group_size: int = 1, window_size: int = 1, *, checkpointing: bool = True
    ) -> int:
        """Operations of one training step on a sequence: forward, the layers' forward again where
        activations were forgotten, and backward; the loss's head is computed once
        (docs/training.md)."""
        sizes = (seq_len, self.query_heads, self.kv_heads, self.head_dim)
        forward, backward = (
            operator_flops(*sizes, group_size=group_size, window_size=window_size, backward=back)
            for back in (False, True)
        )
        sliding = sum(
            2 * self.query_heads * self.head_dim * _banded_scores(seq_len, window)
            for window in self.windows
        )
        times = 2 if checkpointing else 1
        layers = self.num_layers * (times * forward + backward) + sliding * (
            times * FORWARD_PRODUCTS + BACKWARD_PRODUCTS
        )
        return layers + seq_len * (2 * self.linear_weights * (times + 2) + 6 * self.head_weights)

    def cache_bytes(
        self,
        seq_len: int,
        group_size: int = 1,
        window_size: int = 1,
        cores_per_group: int = 1,
        sinks: int = 0,
    ) -> int:
        """Bytes cached after seq_len tokens, sliding layers included."""
        sizes = (self.kv_heads, self.head_dim, self.itemsize)
        return cache_bytes(
            seq_len,
            self.num_layers,
            *sizes,
            group_size=group_size,
            window_size=window_size,
            cores_per_group=cores_per_group,
            sinks=sinks,
        ) + sum(cache_bytes(min(seq_len, window), 1, *sizes) for window in self.windows)

    def step_bytes(
        self,
        seq_len: int,
        group_size: int = 1,
        window_size: int = 1,
        *,
        batch: int = 1,
        cache_itemsize: float | None = None,
    ) -> float:
        """Bytes that a decoding step with seq_len tokens before it reads at least: weights once,
        and what it sees.

        Args:
            cache_itemsize: Bytes of a cached number, scales included, where it is not that of the
                weights.
        """
        itemsize = self.itemsize if cache_itemsize is None else cache_itemsize
        sizes = (self.kv_heads, self.head_dim, 1)
        seen = self.num_layers * decode_bytes(
            seq_len, *sizes, group_size=group_size, window_size=window_size, batch=batch
        ) + sum(
            decode_bytes(min(seq_len, window - 1), *sizes, batch=batch) for window in self.windows
        )
        return self.weight_bytes() + itemsize * seen

    def weight_bytes(self) -> int:
        """Bytes of the weights that every decoding step reads."""
        return (self.linear_weights + self.head_weights) * self.itemsize


def _banded_scores(seq_len: int, window: int) -> int:
    """Query-key pairs of a causal sliding window."""
    inside = min(seq_len, window)
    return inside * (inside + 1) // 2 + (seq_len - inside) * window


def _weights_per_token(model: Any, text: Any) -> int:
    """Matrix weights used for one token; embeddings are looked up, not multiplied."""
    skip = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    experts = next(
        (
            n
            for key in ("num_local_experts", "num_experts", "n_routed_experts")
            if (n := getattr(text, key, None))
        ),
        0,
    )
    used = getattr(text, "num_experts_per_tok", None) or experts
    total = 0
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and id(weight) not in skip:
            routed = experts and ".experts." in name
            total += weight.numel() * used // experts if routed else weight.numel()
    return total


def _itemsize(text: Any) -> int:
    """Bytes of a number in the dtype the checkpoint is stored in; float32 where it says nothing."""
    import torch

    dtype = getattr(text, "dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 4
