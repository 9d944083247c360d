"""Compress prompts into core tokens for kvpress: `CCAPress`.

kvpress 0.5.5 needs transformers below 5.3, the rest of this package 5.17 or later; this module runs
with either. Install both in an environment of its own: pip install kvpress==0.5.5, then pip install
--no-deps corecontext.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corecontext.config import CCAConfig
from corecontext.integrations.hf.rotation import find_rotary
from corecontext.ops.api import pool_core_tokens
from corecontext.visibility import group_size_for, num_sinks, num_visible_cores

try:
    from kvpress.presses.base_press import BasePress
    from kvpress.utils import get_prerope_query_states
except ImportError as error:
    raise ImportError(
        f"kvpress must be installed, got: {error}. In an environment of its own: pip install "
        "kvpress==0.5.5, then pip install --no-deps corecontext."
    ) from None

PLAIN = CCAConfig.paper()
FIXED_FIELDS = (
    "core_bias",
    "layer_group_sizes",
    "head_group_sizes",
    "cache_dtype",
    "core_mass",
    "fetch_groups",
)
"""Fields that must be `PLAIN`'s: a plain cache attends to core tokens as to any other entry."""


class Sizes(NamedTuple):
    """Say which entries stand for a prompt."""

    group_size: int
    sinks: int
    """First tokens that stay raw."""
    cores: int
    """Core tokens of the groups behind them; later tokens stay raw."""

    def entries(self, length: int) -> int:
        """Count the entries of a prompt of `length` tokens."""
        return length - self.cores * (self.group_size - 1)


@dataclass
class CCAPress(BasePress):
    """Replace the past of a prompt, once full attention has read it, by first tokens, core tokens
    and the window of the token that follows.

    These are ordinary entries of transformers' cache, so whatever comes next is appended raw: the
    window grows with the answer, and no further core tokens are made.
    """

    config: CCAConfig = field(default_factory=lambda: CCAConfig.pooling(core_mass=False))
    """g, s, first tokens and the core tokens' position. Masses and a bias of core tokens,
    sizes by layer or head and 8 bits have no place in a plain cache."""
    compression_ratio: float | None = None
    """Share of the entries to remove, at least 0 and below 1; None keeps the config's g and s. With
    it g is the config's, or the least above it that leaves a quarter of the entries to the window;
    the window takes what is left."""

    def __post_init__(self) -> None:
        for name in FIXED_FIELDS:
            value = getattr(self.config, name)
            plain = getattr(PLAIN, name)
            if value != plain:
                raise NotImplementedError(
                    f"{name} must be {plain!r} in a press, got {value!r}: a plain cache cannot "
                    f"hold it. Give {name}={plain!r}, or use corecontext.enable with "
                    "prefill='full'."
                )

    def post_init_from_model(self, model: nn.Module) -> None:
        """Find how the model rotates its keys.

        Raises:
            NotImplementedError: the model has more than a language model, or its rotation is not
                known.
        """
        if hasattr(model.model, "language_model"):
            raise NotImplementedError(
                f"{type(model).__name__} has no core tokens here. Load its language model alone."
            )
        self.rotary = None
        if self.config.core_position == "middle":
            layer = model.model.layers[0].self_attn
            self.rotary = find_rotary(model, layer, layer.layer_idx)

    def sizes(self, length: int) -> Sizes:
        """Choose the entries of a prompt of `length` tokens.

        Raises:
            ValueError: compression_ratio is not in range, or leaves no room for the first tokens.
        """
        return _sizes(self.config, self.compression_ratio, length)

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return the entries [B, Hkv, S, D] of keys and values [B, Hkv, L, D]; arguments as of
        `BasePress.compress`."""
        _check_no_padding(kwargs.get("attention_mask"))
        g, n, cores = self.sizes(keys.shape[2])
        if g == 1 or not cores:
            return keys, values
        span = slice(n, n + cores * g)
        queries = get_prerope_query_states(module, hidden_states[:, span])
        cos, sin = (x[:, span] for x in kwargs["position_embeddings"])
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        queries, _ = apply(queries, queries, cos, sin)
        pooled = pool_core_tokens(
            queries,
            keys[:, :, span],
            values[:, :, span],
            group_size=g,
            core_position=self.config.core_position,
            rotary=self.rotary,
            scale=module.scaling,
        )
        new_keys, new_values = (
            torch.cat((x[:, :, :n], core, x[:, :, span.stop :]), 2)
            for x, core in zip((keys, values), pooled)
        )
        return new_keys, new_values


@functools.lru_cache(maxsize=64)
def _sizes(config: CCAConfig, ratio: float | None, length: int) -> Sizes:
    """Choose the entries of a prompt; cached, since every layer asks and the search takes time."""
    if ratio is None:
        g = config.group_size
        if config.num_groups is not None:
            g = group_size_for(length, config.window_size, config.num_groups)
        sinks = num_sinks(config.sink_size, g)
        # The token behind the prompt sees as many.
        return Sizes(g, sinks, num_visible_cores(length - sinks, g, config.window_size))
    if not 0 <= ratio < 1:
        raise ValueError(f"compression_ratio must be at least 0 and below 1, got {ratio}.")
    most = int(length * (1 - ratio))
    for g in range(max(2, config.group_size), length + 1):
        sinks = num_sinks(config.sink_size, g)
        cores = -(-(length - most) // (g - 1))
        window = length + 1 - sinks - cores * g
        if window > most // 4:
            return Sizes(g, sinks, cores)
    raise ValueError(
        f"compression_ratio must leave room for first tokens and window, got {ratio} of {length} "
        f"tokens. Take a smaller one, or a smaller sink_size than {config.sink_size}."
    )


def _check_no_padding(mask: Tensor | None) -> None:
    """Raise where the last token does not see all others."""
    if mask is None:
        return
    if mask.dim() == 2:
        hidden = mask == 0
    elif mask.dtype == torch.bool:
        hidden = ~mask[..., -1, :]
    else:
        hidden = mask[..., -1, :] < 0  # added to the scores
    if hidden.any():
        raise ValueError(
            "attention_mask must have no padding, got some. Compress the prompts one by one."
        )
