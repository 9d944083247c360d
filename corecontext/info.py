"""What would CCA cost and save for this model? Arithmetic only: no weights are loaded and nothing
is measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, attention_flops
from corecontext.loading import cca_config, check_architecture, load_config, one_line
from corecontext.terminal import console
from corecontext.visibility import group_size_for, num_sinks


def print_info(
    name: str,
    group_size: int | None,
    window_size: int | None,
    lengths: Sequence[int] | None,
    sinks: int | None = None,
) -> None:
    """Print operations and cache bytes for full attention and CCA by length.

    Raises:
        UserError: the model is missing or its architecture unsupported, or a setting breaks a rule.
    """
    cca_config(
        None, group_size, window_size, sinks=sinks
    )  # bad sizes fail before the model is looked for
    hf_config = load_config(name)
    check_architecture(hf_config)
    config = cca_config(hf_config, group_size, window_size, sinks=sinks)
    with one_line(f"model '{name}' cannot be built"):
        cost = ModelCost.of(hf_config)
    limit = (
        getattr(hf_config.get_text_config(decoder=True), "max_position_embeddings", None) or 131072
    )
    with one_line():  # sizes by layer or head may not fit the model
        table = info_table(cost, config, lengths or default_lengths(limit), hf_config.model_type)
    console().print(table)
    console().print(
        f"weights read for each new token: {_bytes(cost.weight_bytes())}; cache in "
        f"{8 * cost.itemsize}-bit numbers; the model was built for {limit} tokens"
    )


def default_lengths(limit: int) -> list[int]:
    """Powers of two from 4096, and the model's limit."""
    return [n for n in (2**i for i in range(12, 24)) if n < limit] + [limit]


def info_table(cost: ModelCost, config: CCAConfig, lengths: Sequence[int], kind: str) -> Table:
    """One row per length."""
    s, sizes = (
        config.window_size,
        [
            g
            for layer in range(cost.num_layers)
            for g in _by_head(config.of_layer(layer), cost.kv_heads)
        ],
    )
    shares = {
        g: sizes.count(g) / len(sizes) for g in sorted(set(sizes))
    }  # of all KV heads: what g costs adds up
    n = num_sinks(config.sink_size, max(shares))
    width = cost.query_heads // cost.kv_heads if config.core_heads == "query" else 1
    table = Table(
        title=f"{kind}: {cost.num_layers} full-attention layers, {cost.query_heads} query and "
        f"{cost.kv_heads} KV heads of {cost.head_dim}, "
        + (
            f"{config.num_groups} groups"
            if config.num_groups
            else f"g = {' or '.join(map(str, shares))}"
        )
        + f", s = {s}"
        + (f", the first {n} tokens raw" if n else ""),
        box=SIMPLE_HEAD,
        caption="operations: a multiplication or an addition each",
    )
    parts = [(f"{part}\nfull", "\nCCA", "") for part in ("attention", "first token", "cache")]
    for column in ("length", *sum(parts, ())):
        table.add_column(column, justify="right", no_wrap=True)
    for length in lengths:
        if config.num_groups:  # g follows from the length
            shares = {group_size_for(length, s, config.num_groups): 1.0}

        def costs(g: int, s: int, first: int, length: int = length) -> tuple[float, float, float]:
            return (
                cost.num_layers
                * attention_flops(
                    length,
                    cost.query_heads,
                    cost.head_dim,
                    group_size=g,
                    window_size=s,
                    sinks=first,
                ),
                cost.prefill_flops(length, g, s, first),
                cost.cache_bytes(length, g, s, width, first),
            )

        ours = [
            [share * x for x in costs(g, s, num_sinks(config.sink_size, g))]
            for g, share in shares.items()
        ]
        pairs = [costs(1, 1, 0), [sum(some) for some in zip(*ours)]]
        cells = []
        for full, ours, shown in zip(*pairs, (_flops, _flops, _bytes)):
            cells += [shown(full), shown(ours), f"{full / ours:.1f}x"]
        table.add_row(str(length), *cells)
    return table


def _by_head(config: CCAConfig, kv_heads: int) -> tuple[int, ...]:
    """g of each KV head of a layer."""
    sizes = config.head_group_sizes or (config.group_size,) * kv_heads
    if len(sizes) != kv_heads:
        raise ValueError(
            f"group sizes by head must be one for each of the {kv_heads} KV heads, got {sizes}."
        )
    return sizes


def _flops(value: float) -> str:
    """Operations with a prefix."""
    return _with_prefix(value, 1000, ("", "k", "M", "G", "T", "P", "E"))


def _bytes(value: float) -> str:
    """Bytes with a binary prefix."""
    return _with_prefix(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _with_prefix(value: float, step: int, prefixes: tuple[str, ...]) -> str:
    """Three figures and a prefix."""
    for prefix in prefixes[:-1]:
        if value < step:
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {prefix}".rstrip()
        value /= step
    return f"{value:.3g} {prefixes[-1]}"
