"""Which layers of a checkpoint, or KV heads, need small groups: `corecontext layers`, its table and
its records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from corecontext.files import UserError
from corecontext.heads.search import Found, Trial, find_units, least_length, rounds_of
from corecontext.loading import Loaded
from corecontext.record import Record, make_record
from corecontext.terminal import console


def find_layers(
    loaded: Loaded,
    text: str,
    length: int,
    most_rows: int,
    count: int | None,
    heads: bool = False,
    raw: bool = False,
) -> Found:
    """`find_units` on rows of `length` tokens of a text.

    Args:
        loaded: With CCA enabled, whose settings are the model's again afterwards.

    Raises:
        UserError: the text or the length is too short, or what `find_units` raises.
    """
    assert loaded.config is not None
    ids = loaded.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(
        loaded.model.device
    )
    rows = [
        ids[:, at : at + length]
        for at in range(0, min(ids.shape[1], most_rows * length) - length + 1, length)
    ]
    least = least_length(loaded.config)
    if loaded.max_length is not None and length > loaded.max_length:
        raise UserError(
            f"length must be at most the model's {loaded.max_length} tokens, got {length}."
        )
    if not rows or length < least:
        raise UserError(
            f"length must be at most the text's {ids.shape[1]} tokens, and at least {least}, so that the "
            f"second half of a row has core tokens to see; got {length}."
        )
    return find_units(loaded.model, rows, length, count, heads=heads, raw=raw)


def layer_records(trials: Sequence[Trial], params: dict[str, Any], device: str) -> list[Record]:
    """quality.perplexity of each trial, with the task "layers"."""
    return [
        make_record(
            "quality.perplexity",
            math.exp(one.loss),
            {
                **params,
                "task": "layers",
                "unit": str(one.unit),
                "beside": [str(unit) for unit in one.before],
            },
            device=device,
        )
        for one in trials
    ]


def print_layers(found: Found) -> None:
    """Every trial, the chosen ones marked, and the setting to use."""
    trials, chosen = found.search
    firsts = [0]
    for few in rounds_of(len(chosen)):
        firsts.append(firsts[-1] + few)
    print("Perplexity of the second halves of rows, where one keeps every token:")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("layer" if chosen[0].head is None else "layer.head", justify="right")
    for first in firsts[:-1]:
        table.add_column(
            f"beside {', '.join(map(str, chosen[:first]))}" if first else "alone", justify="right"
        )
    for unit in sorted({one.unit for one in trials}):
        losses = {one.before: one.loss for one in trials if one.unit == unit}
        table.add_row(
            str(unit),
            *(
                ""
                if chosen[:a] not in losses
                else f"{math.exp(losses[chosen[:a]]):.3f}{' <' if unit in chosen[a:b] else ''}"
                for a, b in zip(firsts, firsts[1:])
            ),
        )
    console().print(table)
    print(
        f"equal groups of {found.config.group_size}: {math.exp(found.equal):.3f}; at the same cache size "
        f"{math.exp(found.chosen):.3f} with\nwindow_size = {found.config.window_size}\n"
        f"layer_group_sizes = {list(found.config.layer_group_sizes or ())}"
    )
