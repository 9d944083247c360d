"""Which layers, or KV heads, need small groups: few look tokens up far back, and should have what tells most.

They are found on a model with full attention, before any training: all get large groups but one, which keeps every
token, and the loss far from the beginning says how much that one makes good. Several are found one after the other.
They then get groups so small, and the others groups four times as large, that the cache stays as large as it was; or
they go on keeping every token, and the window gives up what that takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from corecontext.cache.allocation import COARSE, Shape, Unit, at_equal_cache, raw_heads, spread
from corecontext.config import CCAConfig
from corecontext.integrations.transformers import handle_of
from corecontext.loading import Loaded, one_line
from corecontext.perplexity import document_nll
from corecontext.record import Record, make_record
from corecontext.terminal import console, progress
from corecontext.text import UserError


@dataclass(frozen=True)
class Trial:
    """A unit that keeps every token, beside those chosen before it."""

    unit: Unit
    before: tuple[Unit, ...]
    loss: float
    """Nats per token of the second half of each row."""


def search_units(units: Sequence[Unit], count: int, loss: Callable[[tuple[Unit, ...]], float],
                 on_trial: Callable[[int], Any] = lambda trials: None) -> list[Trial]:
    """Try every unit as the first, then every other beside the best, and so on; all trials, in order.

    Args:
        count: Units to choose, at most all but one.
        loss: The model's, far from the beginning, where these units keep every token.
        on_trial: Called with 1 after each trial.

    Raises:
        ValueError: there are not so many.
    """
    if not 1 <= count < len(units):
        raise ValueError(f"count must be 1 .. {len(units) - 1} of {len(units)} to choose from, got {count}.")
    found: list[Trial] = []
    for _ in range(count):
        before = chosen_of(found)
        for unit in units:
            if unit not in before:
                found.append(Trial(unit, before, loss((*before, unit))))
                on_trial(1)
    return found


def chosen_of(trials: Sequence[Trial]) -> tuple[Unit, ...]:
    """The best of each round, in order."""
    rounds: dict[tuple[Unit, ...], Trial] = {}
    for one in trials:
        if one.before not in rounds or one.loss < rounds[one.before].loss:
            rounds[one.before] = one
    return tuple(one.unit for one in rounds.values())


def far_loss(model: Any, rows: Sequence[Tensor], chunk_size: int = 1024) -> float:
    """Mean negative log-likelihood over the second half of each row [1, L], nats per token."""
    parts = [document_nll(model, row, chunk_size=chunk_size)[row.shape[1] // 2 - 1:].double() for row in rows]
    return float(sum(part.sum() for part in parts) / sum(len(part) for part in parts))


@dataclass(frozen=True)
class Found:
    """What needs small groups in one model."""

    trials: list[Trial]
    config: CCAConfig
    """With the group size of each layer or head, and the window beside them."""
    equal: float
    """The loss with equal groups."""
    chosen: float
    """The loss under `config`."""


def find_layers(loaded: Loaded, text: str, length: int, most_rows: int, count: int | None,
                heads: bool = False, raw: bool = False) -> Found:
    """The layers of a loaded model that need small groups, or KV heads of these, on rows of `length` tokens of a text.

    Args:
        loaded: With CCA enabled, whose settings are the model's again afterwards.
        count: What to choose; None for an eighth of the layers, or a sixteenth of the heads; with `raw` what
            `raw_heads` says.
        heads: Choose KV heads, of the quarter of the layers that are best.
        raw: What is chosen keeps every token, and the window of all is smaller for it.

    Raises:
        UserError: the text or the length is too short, there is not so much to choose from, or the cache has no room
            for it.
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
    shape = Shape(len(handle.full), handle.full[0].config.num_key_value_heads)
    layers, best = [Unit(layer) for layer in range(shape.layers)], max(1, shape.layers // 4)
    wanted = count if count is not None else max(1, (
        raw_heads(shape, config, length) // (1 if heads else shape.kv_heads) if raw else
        shape.layers * shape.kv_heads // 16 if heads else shape.layers // 8))
    choices = best * shape.kv_heads if heads else shape.layers
    if choices < 2:
        raise UserError(f"the model must have at least 2 {'KV heads' if heads else 'full-attention layers'} to choose "
                        f"from, got {choices}.")
    if not 1 <= wanted < choices:
        raise UserError(f"count must be 1 .. {choices - 1} of {choices} to choose from, got {wanted}.")
    equal = config.replace(layer_group_sizes=None, head_group_sizes=None)
    rounds = [(1, shape.layers), (wanted, best * shape.kv_heads)] if heads else [(wanted, shape.layers)]
    trials = [many - done for times, many in rounds for done in range(times)]
    with one_line(), progress(f"{len(rows)} rows of {length} tokens", 2 + sum(trials)) as advance:
        like = [Unit(0, head) if heads else Unit(head) for head in range(wanted)]
        at_equal_cache(shape, like, equal, length, raw)  # says what does not fit before it takes long

        def configure(of: CCAConfig) -> None:
            handle.configure(window_size=of.window_size, layer_group_sizes=of.layer_group_sizes,
                             head_group_sizes=of.head_group_sizes)

        def measured(of: CCAConfig) -> float:
            configure(of)
            return far_loss(model, rows)

        def loss(units: tuple[Unit, ...]) -> float:
            return measured(equal.replace(layer_group_sizes=spread(shape, units, 1, COARSE * config.group_size)))

        try:
            before = measured(equal)
            advance(1)
            found = search_units(layers, 1 if heads else wanted, loss, advance)
            if heads:
                needy = sorted(found, key=lambda one: one.loss)[:best]
                found = search_units([Unit(one.unit.layer, head) for one in needy for head in range(shape.kv_heads)],
                                     wanted, loss, advance)
            chosen = at_equal_cache(shape, chosen_of(found), equal, length, raw)
            after = measured(chosen)
            advance(1)
        finally:
            configure(config)
    return Found(found, chosen, before, after)


def layer_records(trials: Sequence[Trial], params: dict[str, Any], device: str) -> list[Record]:
    """quality.perplexity of each trial, with the task "layers"."""
    return [make_record("quality.perplexity", math.exp(one.loss), {
        **params, "task": "layers", "unit": str(one.unit), "beside": [str(unit) for unit in one.before]}, device=device)
        for one in trials]


def print_layers(found: Found) -> None:
    """Every trial, the chosen ones marked, and the setting to use."""
    chosen = chosen_of(found.trials)
    print("Perplexity of the second halves of rows, where one keeps every token:")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("layer" if chosen[0].head is None else "layer.head", justify="right")
    for i in range(len(chosen)):
        table.add_column("alone" if i == 0 else f"beside {', '.join(map(str, chosen[:i]))}", justify="right")
    for unit in sorted({one.unit for one in found.trials}):
        losses = {one.before: one.loss for one in found.trials if one.unit == unit}
        table.add_row(str(unit), *("" if chosen[:i] not in losses else
                                   f"{math.exp(losses[chosen[:i]]):.3f}{' <' if chosen[i] == unit else ''}"
                                   for i in range(len(chosen))))
    console().print(table)
    print(f"equal groups of {found.config.group_size}: {math.exp(found.equal):.3f}; at the same cache size "
          f"{math.exp(found.chosen):.3f} with\nwindow_size = {found.config.window_size}\n"
          f"layer_group_sizes = {list(found.config.layer_group_sizes or ())}")
