"""Search the layers, or KV heads, of a model that need small groups or every token.

Few heads look tokens up far back; they should get most of the cache. They are found on a model with
full attention, before any training: all heads get large groups but one, which keeps every token,
and the loss far from the beginning tells how much this one regains. Several are found in rounds,
each beside those of the rounds before. In the end they get groups so small, and the others groups
four times as large, that the cache stays as large as it was; or they keep every token, and the
window shrinks to pay for it.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.head_budget import COARSE, Shape, Unit, at_equal_cache, raw_heads, spread
from corecontext.config import CCAConfig
from corecontext.files import UserError
from corecontext.integrations.hf.enabling import Handle, handle_of
from corecontext.loading import one_line
from corecontext.model_sizes import ModelSizes
from corecontext.perplexity import document_nll
from corecontext.terminal import progress


@dataclass(frozen=True)
class Trial:
    """A unit that keeps every token, beside those chosen before it."""

    unit: Unit
    before: tuple[Unit, ...]
    loss: float
    """Nats per token of the second half of each row."""


class Search(NamedTuple):
    """All trials, and the chosen units in order."""

    trials: list[Trial]
    chosen: tuple[Unit, ...]


@dataclass(frozen=True)
class Findings:
    """The units of one model that need small groups, or every token."""

    search: Search
    config: CCAConfig
    """With the group size of each layer or head, and the window beside them."""
    full: float
    """The loss with full attention."""
    equal: float
    """The loss with equal groups."""
    chosen: float
    """The loss under `config`."""


def rounds_of(count: int) -> list[int]:
    """Return how many units each round chooses: 1, 1, 2, 4, 8, ..., in total `count`."""
    rounds: list[int] = []
    while sum(rounds) < count:
        rounds.append(min(max(1, sum(rounds)), count - sum(rounds)))
    return rounds


def num_trials(units: int, count: int) -> int:
    """Return how many trials it takes to choose `count` of these units."""
    rounds = rounds_of(count)
    return sum(units - sum(rounds[:i]) for i in range(len(rounds)))


def least_length(config: CCAConfig) -> int:
    """Return the tokens that a row needs, so that its second half has core tokens to see."""
    return 2 * (config.window_size + COARSE * config.group_size)


def far_loss(model: Any, rows: Sequence[Tensor], chunk_size: int = 1024) -> float:
    """Return the mean negative log-likelihood over the second half of each row [1, L], in nats per
    token."""
    return end_loss(model, rows, [row.shape[1] // 2 for row in rows], chunk_size)


def end_loss(
    model: Any, rows: Sequence[Tensor], starts: Sequence[int], chunk_size: int = 1024
) -> float:
    """Return the mean negative log-likelihood of the tokens from starts[i] on of each row [1, L],
    in nats per token."""
    ends = [
        document_nll(model, row, chunk_size=chunk_size)[start - 1 :].double()
        for row, start in zip(rows, starts)
    ]
    return float(sum(end.sum() for end in ends) / sum(map(len, ends)))


def search_units(
    units: Sequence[Unit],
    count: int,
    loss: Callable[[tuple[Unit, ...]], float],
    on_trial: Callable[[int], Any] = lambda trials: None,
) -> Search:
    """Choose units greedily: try each beside those chosen so far.

    Each round chooses as many units as all rounds before it, so that many units take few rounds.

    Args:
        count: Units to choose, at most all but one.
        loss: The model's, far from the beginning, where these units keep every token.
        on_trial: Called with 1 after each trial.

    Raises:
        ValueError: there are not as many units.
    """
    if not 1 <= count < len(units):
        raise ValueError(
            f"count must be 1 .. {len(units) - 1} of {len(units)} to choose from, got {count}."
        )
    trials: list[Trial] = []
    chosen: tuple[Unit, ...] = ()
    for few in rounds_of(count):
        round_trials = []
        for unit in units:
            if unit not in chosen:
                round_trials.append(Trial(unit, chosen, loss((*chosen, unit))))
                on_trial(1)
        trials += round_trials
        chosen += tuple(trial.unit for trial in _best(round_trials, few))
    return Search(trials, chosen)


def find_units(
    model: Any,
    rows: Sequence[Tensor],
    length: int,
    count: int | None,
    *,
    heads: bool = False,
    raw: bool = False,
    starts: Sequence[int] | None = None,
) -> Findings:
    """Find the layers of a model that need small groups, or KV heads of these.

    Args:
        model: With CCA enabled, whose settings are the model's again afterwards.
        rows: [1, n] each, on the model's device, n at least `least_length`.
        length: Tokens at which the cache shall be no larger than with equal groups.
        count: Units to choose; None for an eighth of the layers, or a sixteenth of the heads; with
            `raw` the number of `raw_heads`.
        heads: Choose KV heads, of the quarter of the layers that are best.
        raw: Let the chosen units keep every token, and shrink the window of all to pay for it.
        starts: First token of each row that the loss counts; None for the second halves.

    Raises:
        UserError: there is not as much to choose from, or the cache has no room for it.
    """
    handle = handle_of(model)
    assert handle is not None
    config = handle.config
    shape = Shape(len(handle.full), ModelSizes.of(model.config).kv_heads)
    best_layers = max(1, shape.layers // 4)
    choices = best_layers * shape.kv_heads if heads else shape.layers
    if count is None:
        count = _default_count(shape, config, length, heads, raw)
    _check_count(count, choices, heads)

    equal = config.replace(layer_group_sizes=None, head_group_sizes=None)
    trials = num_trials(choices, count)
    if heads:
        trials += num_trials(shape.layers, 1)
    longest = max(row.shape[1] for row in rows)
    title = f"{len(rows)} rows of up to {longest} tokens"
    with one_line(), progress(title, trials + 3) as advance:
        # Refuse a count that does not fit before the long part.
        any_units = [Unit(0, i) if heads else Unit(i) for i in range(count)]
        at_equal_cache(shape, any_units, equal, length, raw)

        def measure(trial_config: CCAConfig) -> float:
            _configure(handle, trial_config)
            if starts is None:
                return far_loss(model, rows)
            return end_loss(model, rows, starts)

        def loss(units: tuple[Unit, ...]) -> float:
            sizes = spread(shape, units, 1, COARSE * config.group_size)
            return measure(equal.replace(layer_group_sizes=sizes))

        try:
            start = time.monotonic()
            loss_full = measure(equal.replace(layer_group_sizes=(1,) * shape.layers))
            loss_before = measure(equal)
            advance(2)
            seconds = (time.monotonic() - start) / 2 * (trials + 1)
            _print_duration(title, trials, seconds)
            layers = [Unit(layer) for layer in range(shape.layers)]
            search = search_units(layers, 1 if heads else count, loss, advance)
            if heads:
                # Layers come first: they narrow the heads to try.
                layers = [trial.unit for trial in _best(search.trials, best_layers)]
                units = [Unit(layer, i) for layer, _ in layers for i in range(shape.kv_heads)]
                search = search_units(units, count, loss, advance)
            chosen = at_equal_cache(shape, search.chosen, equal, length, raw)
            loss_after = measure(chosen)
            advance(1)
        finally:
            _configure(handle, config)
    return Findings(search, chosen, loss_full, loss_before, loss_after)


def _print_duration(title: str, trials: int, seconds: float) -> None:
    """Print the number of trials and the time that they take, in seconds."""
    print(
        f"{trials} trials, each a pass over {title}: about {timedelta(seconds=round(seconds))}. "
        "Fewer or shorter rows, or a smaller count, take less.",
        file=sys.stderr,
    )


def _best(trials: Sequence[Trial], count: int) -> list[Trial]:
    """Return the trials with the least loss."""
    return sorted(trials, key=lambda trial: trial.loss)[:count]


def _default_count(shape: Shape, config: CCAConfig, length: int, heads: bool, raw: bool) -> int:
    """Return how many units are chosen by default."""
    if raw:
        count = raw_heads(shape, config, length)
        return count if heads else max(1, count // shape.kv_heads)
    if heads:
        return max(1, shape.layers * shape.kv_heads // 16)
    return max(1, shape.layers // 8)


def _check_count(count: int, choices: int, heads: bool) -> None:
    """Raise unless there are more units to choose from than are to be chosen."""
    if choices < 2:
        kind = "KV heads" if heads else "full-attention layers"
        raise UserError(f"the model must have at least 2 {kind} to choose from, got {choices}.")
    if not 1 <= count < choices:
        raise UserError(
            f"count must be 1 .. {choices - 1} of {choices} to choose from, got {count}."
        )


def _configure(handle: Handle, config: CCAConfig) -> None:
    """Set a model's window and group sizes."""
    handle.configure(
        window_size=config.window_size,
        layer_group_sizes=config.layer_group_sizes,
        head_group_sizes=config.head_group_sizes,
    )
