"""Estimate the costs and savings of CCA for a model, by arithmetic alone: no weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, attention_flops, fetch_flops
from corecontext.loading import check_architecture, load_config, one_line
from corecontext.methods import PRESET, cca_config
from corecontext.terminal import console
from corecontext.visibility import group_size_for, num_sinks


def print_info(
    name: str,
    settings: Mapping[str, Any],
    lengths: Sequence[int] | None,
    untested: bool = False,
    vllm_gib: float | None = None,
) -> None:
    """Print operations and cache bytes for full attention and CCA by length.

    Args:
        settings: Those of CCA, by name, as `cca_config` takes them.
        vllm_gib: Print the tokens too that vLLM's cache holds on a GPU of so many GiB.
    """
    # Bad sizes fail before the model is looked for.
    cca_config(None, settings)
    from corecontext.inference.limits import position_limit
    from corecontext.integrations.hf.attention_interface import full_layers
    from corecontext.integrations.hf.rotation import check_rope_type, layer_type_of
    from corecontext.integrations.vllm.capacity import capacity_table

    hf_config = load_config(name, alone=True)
    check_architecture(hf_config, untested)
    config = cca_config(hf_config, settings)
    with one_line(f"model '{name}' cannot be built"):
        cost = ModelCost.of(hf_config)
    limit = position_limit(hf_config) or 131072
    lengths = lengths or default_lengths(limit)
    with one_line():  # sizes by layer or head may not fit the model
        tables = [info_table(cost, config, lengths, hf_config.model_type)]
        if vllm_gib is not None:
            served = config
            if getattr(hf_config, "cca", None) is None and settings.get(PRESET) is None:
                served = cca_config(hf_config, {**settings, PRESET: "pooling"})
            tables.append(capacity_table(hf_config, cost, served, lengths, vllm_gib))
    console().print(*tables)
    console().print(
        f"weights read for each new token: {_bytes(cost.weight_bytes())}; cache in "
        f"{8 * cost.itemsize}-bit numbers; the model was built for {limit} tokens"
    )
    if config.core_position == "middle":
        try:
            check_rope_type(hf_config, layer_type_of(hf_config, full_layers(hf_config)[0]))
        except NotImplementedError as error:
            console().print(f"CCA cannot be enabled: {error}")


def default_lengths(limit: int) -> list[int]:
    """Return powers of two from 4096, and the model's limit."""
    return [n for n in (2**i for i in range(12, 24)) if n < limit] + [limit]


def info_table(cost: ModelCost, config: CCAConfig, lengths: Sequence[int], kind: str) -> Table:
    """Make the table, one row per length."""
    # The cost of each g counts by its share of all KV heads.
    layers = [config.of_layer(layer) for layer in range(cost.num_layers)]
    sizes = [g for layer in layers for g in _by_head(layer, cost.kv_heads)]
    shares = {g: sizes.count(g) / len(sizes) for g in sorted(set(sizes))}
    sinks = num_sinks(config.sink_size, max(shares))
    # The title names the settings that the columns depend on.
    title = (
        f"{kind}: {cost.num_layers} full-attention layers, {cost.query_heads} query and "
        f"{cost.kv_heads} KV heads of {cost.head_dim}, "
    )
    if config.num_groups:
        title += f"{config.num_groups} groups"
    else:
        title += f"g = {' or '.join(map(str, shares))}"
    title += f", s = {config.window_size}"
    if sinks:
        title += f", the first {sinks} tokens raw"
    if config.core_mass:
        title += ", with masses"
    if config.fetch_groups:
        title += f", {config.fetch_groups} groups fetched by {config.fetch_index}"
        title += f", raw tokens on the {config.store}"
    # Three columns a quantity: full attention, CCA, and their ratio.
    table = Table(
        title=title, box=SIMPLE_HEAD, caption="operations: a multiplication or an addition each"
    )
    table.add_column("length", justify="right", no_wrap=True)
    for quantity in ("attention", "first token", "cache"):
        for column in (f"{quantity}\nfull", "\nCCA", ""):
            table.add_column(column, justify="right", no_wrap=True)
    if config.fetches_from_host:
        table.add_column("in host\nmemory", justify="right", no_wrap=True)
    for length in lengths:
        if config.num_groups:  # g follows from the length
            shares = {group_size_for(length, config.window_size, config.num_groups): 1.0}
        full = _costs(cost, length, CCAConfig.paper(1, 1))
        compact = [0.0, 0.0, 0.0, 0.0]
        for g, share in shares.items():
            costs = _costs(cost, length, config.replace(group_size=g, num_groups=None))
            compact = [total + share * value for total, value in zip(compact, costs)]
        cells = []
        for before, after, shown in zip(full, compact, (_flops, _flops, _bytes)):
            cells += [shown(before), shown(after), f"{before / after:.1f}x"]
        if config.fetches_from_host:
            cells.append(_bytes(compact[3]))
        table.add_row(str(length), *cells)
    return table


def _costs(cost: ModelCost, length: int, config: CCAConfig) -> tuple[float, ...]:
    """Return operations of attention, operations of the first token, and bytes of the cache on the
    device and in host memory."""
    g, s = config.group_size, config.window_size
    sinks = num_sinks(config.sink_size, g)
    attention = attention_flops(
        length, cost.query_heads, cost.head_dim, group_size=g, window_size=s, sinks=sinks
    )
    fetch = cost.num_layers * fetch_flops(config, length, cost.query_heads, cost.head_dim)
    first_token = cost.prefill_flops(length, g, s, sinks) + fetch
    return (cost.num_layers * attention + fetch, first_token, *cost.config_bytes(config, length))


def _by_head(config: CCAConfig, kv_heads: int) -> tuple[int, ...]:
    """Return g of each KV head of a layer."""
    sizes = config.head_group_sizes or (config.group_size,) * kv_heads
    if len(sizes) != kv_heads:
        raise ValueError(
            f"group sizes by head must be one for each of the {kv_heads} KV heads, got {sizes}."
        )
    return sizes


def _with_prefix(value: float, step: int, prefixes: tuple[str, ...]) -> str:
    """Format three figures and a prefix."""
    for prefix in prefixes[:-1]:
        if value < step:
            digits = max(0, 3 - len(str(int(value))))
            return f"{value:.{digits}f} {prefix}".rstrip()
        value /= step
    return f"{value:.3g} {prefixes[-1]}"


_flops = partial(_with_prefix, step=1000, prefixes=("", "k", "M", "G", "T", "P", "E"))
_bytes = partial(_with_prefix, step=1024, prefixes=("B", "KiB", "MiB", "GiB", "TiB"))
