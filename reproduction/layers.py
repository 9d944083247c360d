"""Run the search for a text, and report it: its table and its records."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from corecontext.data.needles import ANSWER_TOKENS, make_needles
from corecontext.files import UserError
from corecontext.loading import Loaded
from corecontext.record import Record, make_record
from corecontext.terminal import console
from reproduction.head_search import Findings, Trial, find_units, least_length, rounds_of


def find_layers(
    loaded: Loaded,
    text: str,
    length: int,
    most_rows: int,
    count: int | None,
    heads: bool = False,
    raw: bool = False,
    needles: bool = False,
) -> Findings:
    """Search with rows of `length` tokens of a text; other arguments as of `find_units`.

    Args:
        loaded: With CCA enabled, whose settings are the model's again afterwards.
        needles: Search by the loss of answers: rows ask for a number hidden in the text.

    Raises:
        UserError: the text or the length is too short, or `find_units` raises.
    """
    assert loaded.config is not None
    if loaded.max_length is not None and length > loaded.max_length:
        raise UserError(
            f"length must be at most the model's {loaded.max_length} tokens, got {length}. Use "
            f"--length {loaded.max_length}, or less for a shorter text."
        )
    ids = loaded.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    least = least_length(loaded.config)
    if not least <= length <= ids.shape[1]:
        raise UserError(
            f"length must be at most the text's {ids.shape[1]} tokens, and at least {least}, so "
            f"that the second half of a row has core tokens to see; got {length}."
        )
    options: dict[str, Any] = {"heads": heads, "raw": raw}
    if needles:
        rows, options["starts"] = needle_rows(loaded, text, length, most_rows)
    else:
        pieces = ids.to(loaded.model.device).split(length, 1)[:most_rows]
        rows = [row for row in pieces if row.shape[1] == length]
    return find_units(loaded.model, rows, length, count, **options)


def needle_rows(
    loaded: Loaded, text: str, length: int, count: int
) -> tuple[list[Tensor], list[int]]:
    """Return prompts with their answers, rows [1, n] of at most `length` tokens, and the place of
    each answer's number."""
    room = length - ANSWER_TOKENS
    rows = []
    starts = []
    for needle in make_needles(text, loaded.tokenizer, room, count, seed=0):
        ids = [*needle.ids, *needle.answer]
        rows.append(torch.tensor([ids], device=loaded.model.device))
        starts.append(len(needle.ids))
    return rows, starts


def layer_records(trials: Sequence[Trial], params: dict[str, Any], device: str) -> list[Record]:
    """Return a record quality.perplexity of each trial, with the task "layers"."""
    records = []
    for trial in trials:
        beside = [str(unit) for unit in trial.before]
        trial_params = {**params, "task": "layers", "unit": str(trial.unit), "beside": beside}
        records.append(
            make_record("quality.perplexity", math.exp(trial.loss), trial_params, device=device)
        )
    return records


def print_layers(findings: Findings, *, needles: bool = False) -> None:
    """Print every trial, the chosen units marked, and the setting to use."""
    trials, chosen = findings.search
    # Units chosen before each round; the rounds are the columns.
    edges = list(accumulate(rounds_of(len(chosen)), initial=0))
    table = Table(box=SIMPLE_HEAD)
    table.add_column("layer" if chosen[0].head is None else "layer.head", justify="right")
    for before in edges[:-1]:
        beside = ", ".join(map(str, chosen[:before]))
        table.add_column(f"beside {beside}" if before else "alone", justify="right")
    table.add_row("full attention", f"{math.exp(findings.full):.3f}")
    table.add_row("equal groups", f"{math.exp(findings.equal):.3f}")
    losses = {(trial.unit, trial.before): trial.loss for trial in trials}
    for unit in sorted({trial.unit for trial in trials}):
        cells = []
        for before, after in pairwise(edges):
            loss = losses.get((unit, chosen[:before]))
            mark = " <" if unit in chosen[before:after] else ""
            cells.append("" if loss is None else f"{math.exp(loss):.3f}{mark}")
        table.add_row(str(unit), *cells)
    counted = "numbers in answers" if needles else "the second halves of rows"
    print(f"Perplexity of {counted}, where one keeps every token:")
    console().print(table)
    config = findings.config
    print(
        f"equal groups of {config.group_size}: {math.exp(findings.equal):.3f}; at the same cache "
        f"size {math.exp(findings.chosen):.3f} with\nwindow_size = {config.window_size}\n"
        f"layer_group_sizes = {list(config.layer_group_sizes or ())}"
    )
