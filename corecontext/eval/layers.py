"""Which layers need small groups: few layers look tokens up far back, and should have the core tokens that tell most.

The layers are found on a model with full attention, before any training: all layers but one get large groups, one keeps
every token, and the loss far from the beginning says how much that one layer makes good. Several layers are found one
after the other. They then get groups so small, and the others groups four times as large, that the cache stays as large
as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from corecontext.config import CCAConfig
from corecontext.integrations.transformers import handle_of
from corecontext.loading import Loaded, one_line
from corecontext.perplexity import document_nll
from corecontext.record import Record, make_record
from corecontext.terminal import console, progress
from corecontext.text import UserError
from corecontext.visibility import num_complete_groups, window_capacity

COARSE = 4
"""Times the group size of layers that were not chosen."""
MORE_ENTRIES = 1.05
"""Of the cache with equal groups, at most."""


@dataclass(frozen=True)
class Trial:
    """A layer that keeps every token, beside those chosen before it."""

    layer: int
    before: tuple[int, ...]
    loss: float
    """Nats per token of the second half of each row."""


def sizes_at_equal_cache(layers: int, chosen: Collection[int], config: CCAConfig, length: int) -> tuple[int, ...]:
    """g of each layer: the smallest for the chosen ones with which a cache of `length` tokens is no larger than with
    `config.group_size` everywhere (5 % more entries at most), and four times that g for the others.

    Raises:
        ValueError: no smaller g fits: too many layers are chosen, or the length is too short.
    """
    g, s = config.group_size, config.window_size

    def entries(size: int) -> int:
        return num_complete_groups(length, size) + window_capacity(size, s)

    most = MORE_ENTRIES * layers * entries(g) - (layers - len(chosen)) * entries(COARSE * g)
    for small in range(1, g):
        if len(chosen) * entries(small) <= most:
            return tuple(small if i in chosen else COARSE * g for i in range(layers))
    raise ValueError(f"chosen layers must be so few, and length so large, that groups smaller than {g} fit the same "
                     f"cache; got {len(chosen)} of {layers} layers and {length} tokens.")


def search_layers(layers: int, count: int, config: CCAConfig, loss: Callable[[CCAConfig], float],
                  on_trial: Callable[[int], Any] = lambda trials: None) -> list[Trial]:
    """Try every layer as the first, then every other beside the best, and so on; all trials, in order.

    Args:
        layers: Full-attention layers of the model.
        count: Layers to choose, at most all but one.
        config: The settings whose group size is spread anew.
        loss: The model's, far from the beginning, under a config with `layer_group_sizes`.
        on_trial: Called with 1 after each trial.

    Raises:
        ValueError: there are not so many layers.
    """
    if not 1 <= count < layers:
        raise ValueError(f"count must be 1 .. {layers - 1} for {layers} full-attention layers, got {count}.")
    found: list[Trial] = []
    for _ in range(count):
        before = chosen_of(found)
        for layer in sorted(set(range(layers)) - set(before)):
            sizes = tuple(1 if i == layer or i in before else COARSE * config.group_size for i in range(layers))
            found.append(Trial(layer, before, loss(config.replace(layer_group_sizes=sizes))))
            on_trial(1)
    return found


def chosen_of(trials: Sequence[Trial]) -> tuple[int, ...]:
    """The best of each round, in order."""
    rounds: dict[tuple[int, ...], Trial] = {}
    for one in trials:
        if one.before not in rounds or one.loss < rounds[one.before].loss:
            rounds[one.before] = one
    return tuple(one.layer for one in rounds.values())


def far_loss(model: Any, rows: Sequence[Tensor], chunk_size: int = 1024) -> float:
    """Mean negative log-likelihood over the second half of each row [1, L], nats per token."""
    parts = [document_nll(model, row, chunk_size=chunk_size)[row.shape[1] // 2 - 1:].double() for row in rows]
    return float(sum(part.sum() for part in parts) / sum(len(part) for part in parts))


@dataclass(frozen=True)
class Found:
    """The layers of one model."""

    trials: list[Trial]
    config: CCAConfig
    """With the group size of each layer."""
    equal: float
    """The loss with equal groups."""
    chosen: float
    """The loss under `config`."""


def find_layers(loaded: Loaded, text: str, length: int, most_rows: int, count: int | None) -> Found:
    """The layers of a loaded model that need small groups, on rows of `length` tokens of a text.

    Args:
        loaded: With CCA enabled, whose settings are the model's again afterwards.
        count: Layers to choose; None for an eighth of them.

    Raises:
        UserError: the text or the length is too short, or there are not so many layers.
    """
    model, config = loaded.model, loaded.config
    assert config is not None
    ids = loaded.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(model.device)
    rows = [ids[:, at:at + length] for at in range(0, min(ids.shape[1], most_rows * length) - length + 1, length)]
    least = 2 * (config.window_size + COARSE * config.group_size)
    if loaded.max_length is not None and length > loaded.max_length:
        raise UserError(f"length must be at most the model's {loaded.max_length} tokens, got {length}.")
    if not rows or length < least:
        raise UserError(f"length must be at most the text's {ids.shape[1]} tokens, and at least {least}, so that the "
                        f"second half of a row has core tokens to see; got {length}.")
    handle = handle_of(model)
    assert handle is not None
    layers = len(handle.full)
    count = max(1, layers // 8) if count is None else count
    equal = config.replace(layer_group_sizes=None)
    with one_line(), progress(f"layers, {len(rows)} rows of {length} tokens", 2 + sum(range(layers, layers - count, -1))
                              ) as advance:
        sizes_at_equal_cache(layers, range(count), equal, length)  # says what does not fit before it takes long

        def loss(of: CCAConfig) -> float:
            handle.configure(layer_group_sizes=of.layer_group_sizes)
            return far_loss(model, rows)

        try:
            before = loss(equal)
            advance(1)
            trials = search_layers(layers, count, equal, loss, advance)
            sizes = sizes_at_equal_cache(layers, chosen_of(trials), equal, length)
            chosen = equal.replace(layer_group_sizes=sizes)
            after = loss(chosen)
            advance(1)
        finally:
            handle.configure(layer_group_sizes=config.layer_group_sizes)
    return Found(trials, chosen, before, after)


def layer_records(trials: Sequence[Trial], params: dict[str, Any], device: str) -> list[Record]:
    """quality.perplexity of each trial, with the task "layers"."""
    return [make_record("quality.perplexity", math.exp(one.loss), {**params, "task": "layers", "layer": one.layer,
                                                                   "beside": list(one.before)}, device=device)
            for one in trials]


def print_layers(found: Found) -> None:
    """Each layer's trials, the chosen ones marked, and the setting to use."""
    chosen = chosen_of(found.trials)
    print("Perplexity of the second halves of rows, where one layer keeps every token:")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("layer", justify="right")
    for i in range(len(chosen)):
        table.add_column("alone" if i == 0 else f"beside {', '.join(map(str, chosen[:i]))}", justify="right")
    for layer in sorted({one.layer for one in found.trials}):
        losses = {one.before: one.loss for one in found.trials if one.layer == layer}
        table.add_row(str(layer), *("" if chosen[:i] not in losses else
                                    f"{math.exp(losses[chosen[:i]]):.3f}{' <' if chosen[i] == layer else ''}"
                                    for i in range(len(chosen))))
    console().print(table)
    print(f"equal groups of {found.config.group_size}: {math.exp(found.equal):.3f}; at the same cache size "
          f"{math.exp(found.chosen):.3f} with\nlayer_group_sizes = {list(found.config.layer_group_sizes or ())}")
