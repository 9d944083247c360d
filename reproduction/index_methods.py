"""Attentions of the comparison of indices: one that shows its queries and keys, and fetch by a
learned index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from corecontext import cca_attention
from corecontext.baselines.method import Call, Method
from corecontext.config import CCAConfig
from corecontext.ops.fetch import index as fetch_index
from corecontext.ops.fetch import query_blocks
from corecontext.ops.spec import Cores, Spec, Tokens
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
        with projected(self.layers[call.layer.full_index]):
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
                fetch_index=config.fetch_index,
                fetch_share=1,
            )


@contextmanager
def projected(projections: Projections) -> Iterator[None]:
    """Make fetch choose by projected queries and keys, of one row, in the plain path and in the
    kernels."""
    from corecontext.ops.triton import fetch_backend

    def build(keys: Tensor, name: str, centre: Tensor | None) -> fetch_index.Index:
        assert centre is not None, "an index in low bits has a centre"
        to_keys, to_queries = weights_of(keys)
        keys = keys.float() @ to_keys[:, None]
        centre = (centre.float()[:, None] @ to_keys)[:, 0]
        index = fetch_index.build(keys, name, centre)
        # Blocks of queries take some KV heads of an index: each with its own projection.
        return index._replace(centre=torch.cat((centre, to_queries.flatten(1)), 1))

    def weights_of(keys: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(keys) // len(projections.key)
        key, query = (
            x.to(keys.device, torch.float32) for x in (projections.key, projections.query)
        )
        return key.repeat(rows, 1, 1), query.repeat(rows, 1, 1)

    def parted(index: fetch_index.Index, q: Tensor) -> tuple[fetch_index.Index, Tensor]:
        """Return an index with its centre alone, and the projected queries."""
        rank = projections.key.shape[2]
        centre, to_queries = index.centre.split([rank, rank * q.shape[3]], 1)
        weights = to_queries.unflatten(1, (q.shape[3], rank))
        return index._replace(centre=centre), (q.float() @ weights[:, None]).to(q.dtype)

    def scores(index: fetch_index.Index, q: Tensor, *rest: object) -> Tensor:
        return fetch_index.scores(*parted(index, q), *rest)

    def keys_of(q: Tensor, tokens: Tokens, cores: Cores, spec: Spec) -> tuple[Tensor, Tensor]:
        g, first = spec.group_size, spec.sinks
        groups = tokens.k[:, first : first + cores.k.shape[2] * g].unflatten(1, (-1, g))
        centre = fetch_index.centre_of(tokens.k, spec)
        return fetch_index.as_products(*parted(build(groups, spec.fetch_index, centre), q))

    places = ((query_blocks, "build", build), (query_blocks, "scores", scores))
    places += ((fetch_backend, "_index", keys_of),)
    before = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        yield
    finally:
        for (module, name, _), function in zip(places, before):
            setattr(module, name, function)
