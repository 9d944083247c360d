"""What would CCA cost and save for this model? Arithmetic only: no weights are loaded and nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from corecontext.bench.cost import ModelCost, attention_flops
from corecontext.config import CCAConfig
from corecontext.loading import cca_config, check_architecture, load_config, one_line
from corecontext.terminal import console
from corecontext.visibility import num_sinks


def print_info(name: str, group_size: int | None, window_size: int | None, lengths: Sequence[int] | None,
               sinks: int | None = None) -> None:
    """Print operations and cache bytes for full attention and CCA by length.

    Raises:
        UserError: the model is missing or its architecture unsupported, or a setting breaks a rule.
    """
    cca_config(None, group_size, window_size, sinks=sinks)  # bad sizes fail before the model is looked for
    hf_config = load_config(name)
    check_architecture(hf_config)
    config = cca_config(hf_config, group_size, window_size, sinks=sinks)
    with one_line(f"model '{name}' cannot be built"):
        cost = ModelCost.of(hf_config)
    limit = getattr(hf_config.get_text_config(decoder=True), "max_position_embeddings", None) or 131072
    console().print(info_table(cost, config, lengths or default_lengths(limit), hf_config.model_type))
    console().print(f"weights read for each new token: {_bytes(cost.weight_bytes())}; cache in "
                  f"{8 * cost.itemsize}-bit numbers; the model was built for {limit} tokens")


def default_lengths(limit: int) -> list[int]:
    """Powers of two from 4096, and the model's limit."""
    return [n for n in (2 ** i for i in range(12, 24)) if n < limit] + [limit]


def info_table(cost: ModelCost, config: CCAConfig, lengths: Sequence[int], kind: str) -> Table:
    """One row per length."""
    g, s = config.group_size, config.window_size
    n = num_sinks(config.sink_size, g)
    width = cost.query_heads // cost.kv_heads if config.core_heads == "query" else 1
    table = Table(title=f"{kind}: {cost.num_layers} full-attention layers, {cost.query_heads} query and "
                        f"{cost.kv_heads} KV heads of {cost.head_dim}, g = {g}, s = {s}" +
                        (f", the first {n} tokens raw" if n else ""), box=SIMPLE_HEAD,
                  caption="operations: a multiplication or an addition each")
    parts = [(f"{part}\nfull", "\nCCA", "") for part in ("attention", "first token", "cache")]
    for column in ("length", *sum(parts, ())):
        table.add_column(column, justify="right", no_wrap=True)
    for length in lengths:
        pairs = [(cost.num_layers * attention_flops(length, cost.query_heads, cost.head_dim, group_size=a,
                                                    window_size=b, sinks=first),
                  cost.prefill_flops(length, a, b, first), cost.cache_bytes(length, a, b, width, first))
                 for a, b, first in ((1, 1, 0), (g, s, n))]
        cells = []
        for full, ours, shown in zip(*pairs, (_flops, _flops, _bytes)):
            cells += [shown(full), shown(ours), f"{full / ours:.1f}x"]
        table.add_row(str(length), *cells)
    return table


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
