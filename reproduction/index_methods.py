"""Attentions of the comparison of indices: one that shows its queries and keys, and fetch by a
learned index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from corecontext import cca_attention
from corecontext.baselines.method import Call, Method
from corecontext.config import CCAConfig
from corecontext.ops.fetch.index import Index, index_of
from corecontext.ops.fetch.low_bits import LowBits
from reproduction.index_training import Projections


@dataclass(frozen=True)
class Shown(Method):
    """Full attention to whole texts that shows each layer's queries, keys and values; models with
    a softcap have another."""

    name: ClassVar[str] = "shown"
    needs_rotary = True
    look: Callable[[Call], None]

    def attend(self, call: Call) -> Tensor:
        """Call `look`, and attend to all tokens."""
        self.look(call)
        return scaled_dot_product_attention(
            *call[:3], is_causal=True, scale=call.scoring.scale, enable_gqa=True
        )


@dataclass(frozen=True)
class LearnedFetch(Method):
    """Fetch by an index of projected keys, on whole texts."""

    name: ClassVar[str] = "fetch"
    needs_rotary = True
    config: CCAConfig
    """Sizes, and the index of projected keys."""
    layers: tuple[Projections, ...]
    """Of each full-attention layer."""
    steps: int
    """That the projections have learned; 0 for principal directions."""
    windows: int
    """That they come from."""

    @property
    def rank(self) -> int:
        """Elements of a projected key."""
        return self.layers[0].key.shape[2]

    def fetching(self, num_groups: int) -> LearnedFetch:
        """Return the same with another number of groups fetched."""
        return replace(self, config=self.config.replace(fetch_groups=num_groups))

    def attend(self, call: Call) -> Tensor:
        """Attend with fetch; the layer's projections choose."""
        config = self.config
        return cca_attention(
            call.q,
            call.k,
            call.v,
            group_size=config.group_size,
            window_size=config.window_size,
            sink_size=config.sink_size,
            rotary=call.rotary,
            scale=call.scoring.scale,
            softcap=call.scoring.softcap,
            core_mass=config.core_mass,
            fetch_groups=config.fetch_groups,
            fetch_index=self.index_of(call.layer.full_index),
            fetch_share=1,
        )

    def index_of(self, layer: int) -> Projected:
        """Return the index of a full-attention layer."""
        index = index_of(self.config.fetch_index)
        assert isinstance(index, LowBits), "projected keys are stored in low bits"
        return Projected(self.layers[layer], index)


class Projected(Index):
    """Keys that another index stores after a projection, of each KV head its own; queries have
    theirs."""

    def __init__(self, projections: Projections, index: LowBits) -> None:
        self.projections = projections
        self.index = index
        self.name = index.name

    def key_sizes(self, group_size: int) -> tuple[int, ...]:
        """Return those of the other index."""
        return self.index.key_sizes(group_size)

    def key_dim(self, head_dim: int) -> int:
        """Return R."""
        return self.projections.key.shape[2]

    def num_centred(self, group_size: int, window_size: int) -> int:
        """Count as the other index."""
        return self.index.num_centred(group_size, window_size)

    def num_bytes(self, group_size: int, head_dim: int, itemsize: int) -> int:
        """Count those of keys of R elements."""
        return self.index.num_bytes(group_size, self.key_dim(head_dim), itemsize)

    def encode(self, keys: Tensor, centre: Tensor | None) -> tuple[Tensor, ...]:
        """Return what the other index stores of projected keys."""
        assert centre is not None, "an index in low bits has a centre"
        projected = keys.float() @ self._for(keys, self.projections.key)[:, None]
        return self.index.encode(projected, self._centre(centre))

    def decode(self, stored: tuple[Tensor, ...], dim: int, dtype: torch.dtype) -> Tensor:
        """Return projected keys."""
        return self.index.decode(stored, dim, dtype)

    def map_queries(self, q: Tensor) -> Tensor:
        """Return projected queries, as the other index scores by them."""
        return self.index.map_queries(self._queries(q))

    def centre_products(self, q: Tensor, centre: Tensor) -> Tensor:
        """Return the products with the projected centre."""
        return self.index.centre_products(self._queries(q), self._centre(centre))

    def products(self, stored: tuple[Tensor, ...], mapped: Tensor) -> Tensor:
        """Return those of the other index."""
        return self.index.products(stored, mapped)

    def _queries(self, q: Tensor) -> Tensor:
        return (q.float() @ self._for(q, self.projections.query)[:, None]).to(q.dtype)

    def _centre(self, centre: Tensor) -> Tensor:
        return (centre.float()[:, None] @ self._for(centre, self.projections.key))[:, 0]

    def _for(self, x: Tensor, weights: Tensor) -> Tensor:
        """Weights [N, D, R] of each sequence of x [N, ...], of [Hkv, D, R]."""
        rows = len(x) // len(weights)
        return weights.to(x.device, torch.float32).repeat(rows, 1, 1)
