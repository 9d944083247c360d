"""Make the compact entries of tokens that are in the store of raw tokens only, those of all layers
in few launches.

While queries attend to all raw tokens, ring, core tokens and index are not read. A layer then keeps
the queries that pooling needs (`Late`), and `catch_up` makes them before they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from corecontext.cache.entries import ALL
from corecontext.cache.raw_store import Newest
from corecontext.ops.fetch.scoring import widen
from corecontext.ops.spec import Groups


@dataclass
class Late:
    """Hold what a layer's late core tokens are made of; all rows have one length."""

    queries: list[Tensor] = field(default_factory=list)
    """[B, H, groups, D] each, of the last tokens of groups that are not pooled yet, in order."""
    length: int = 0
    """Tokens of a row, without padding, after the last late append or step that filled a group."""
    newest: Newest | None = None
    """Raw tokens of these groups that are still on the device, where the store is in host memory:
    they need not be read back."""

    @property
    def count(self) -> int:
        """Groups that are not pooled yet."""
        return sum(x.shape[2] for x in self.queries)


def catch_up(layers: Sequence[Any]) -> None:
    """Bring ring, core tokens and index of layers, each a `LayerState`, up to their stores; layers
    of one shape share their launches."""
    for layer in layers:
        if layer.whole is not None:
            layer.grow_up()
    layers = [layer for layer in layers if layer.is_late]
    by_shape: dict[Any, list[Any]] = {}
    for layer in layers:
        layer.is_late = False
        if layer.late.queries:
            by_shape.setdefault(_shape(layer), []).append(layer)
    try:
        for alike in by_shape.values():
            _pool(alike)
        for layer in layers:
            layer.fill_ring()
            layer.late = Late()
    except BaseException:
        for layer in layers:  # what is written already is written again
            layer.is_late = True
        raise


def _shape(layer: Any) -> Any:
    """Return sizes and settings that layers must share to be pooled together."""
    spec = layer.spec
    rotary = None if spec.rotary is None else spec.rotary.inv_freq.data_ptr()
    keys = layer.store.raw[0]
    sizes = (spec.group_size, spec.window_size, spec.sink_size, spec.scale, spec.softcap)
    late = (layer.late.length, layer.late.count)
    return (*sizes, spec.fetch_index, rotary, keys.shape, keys.dtype, keys.device, *late)


def _pool(layers: Sequence[Any]) -> None:
    """Pool and index the late groups of layers of one shape."""
    layer = layers[0]
    spec = layer.spec
    g = spec.group_size
    count = layer.late.count
    first = layer.num_cores(layer.late.length) - count
    start = spec.sinks + first * g
    # Groups of all layers, one layer behind the other: N = layers x B x Hkv sequences.
    tokens = [x.store.read(start, start + count * g, x.late.newest) for x in layers]
    k, v = (
        torch.cat([x.flatten(0, 1) for x in each]).unflatten(1, (-1, g)) for each in zip(*tokens)
    )
    queries = [torch.cat(x.late.queries, 2) for x in layers]
    q_last = torch.cat([x.unflatten(1, (tokens[0][0].shape[1], -1)).flatten(0, 1) for x in queries])
    cores = layer.pool(Groups(q_last, k, v))
    size = len(k) // len(layers)  # sequences of a layer
    for number, layer in enumerate(layers):
        rows = slice(number * size, (number + 1) * size)
        # mutant fetch: groups that steps closed are not pooled
        layer.put_cores(ALL, first, [x[rows] for x in cores])

    # The index may lag core tokens; its centre is the mean of the first keys behind the sinks.
    # Layers build it together where these are their first groups.
    store = layer.store
    if first or not store.has_index:
        for layer in layers:
            layer.store.index_tokens(ALL, start, layer.late.length)
        return
    end = store.num_indexed(layer.late.length)
    centres = None
    if store.centre is not None and store.centred_length <= layer.late.length:
        centres = widen(k.flatten(1, 2)[:, : spec.num_centred]).mean(1)
    stored = store.encode(k[:, :end], centres) if end else ()
    for number, layer in enumerate(layers):
        rows = slice(number * size, (number + 1) * size)
        if centres is not None:
            layer.store.centre.copy_(centres[rows].view(layer.store.centre.shape))
        layer.store.write_index(ALL, 0, [x[rows] for x in stored])
