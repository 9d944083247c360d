"""Search the layers, or KV heads, of a model that need small groups or every token.

Few heads look tokens up far back; they should get most of the cache. They are found on a model with
full attention, before any training: all heads get large groups but one, which keeps every token,
and the loss far from the beginning tells how much this one regains. Several are found in rounds,
each beside those of the rounds before. In the end they get groups so small, and the others groups
four times as large, that the cache stays as large as it was; or they keep every token, and the
window shrinks to pay for it.
"""

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.head_budget import COARSE, Shape, Unit, at_equal_cache, raw_heads, spread
from corecontext.config import CCAConfig
from corecontext.files import UserError, write_text
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


class Losses:
    """Losses by name, in a file as soon as they are measured: an interrupted search goes on.

    Args:
        path: The file; None, or a folder that cannot be written, keeps none.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, float] = {}
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                self.known = json.loads(path.read_text(encoding="utf-8"))

    def get(self, name: str, measure: Callable[[], float]) -> float:
        """Return a loss, measured now unless it is known."""
        # mutant heads: an interrupted search begins anew
        if name not in self.known:
            self.known[name] = measure()
            if self.path is not None:
                with contextlib.suppress(OSError):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    write_text(self.path, json.dumps(self.known))
        return self.known[name]

    def forget(self) -> None:
        """Remove the file; where it cannot be removed, it is found and used by the next search."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def identify(
    model: Any, rows: Sequence[Tensor], config: CCAConfig, starts: Sequence[int] | None = None
) -> str:
    """Return the name of a search: the same model, rows and settings give the same losses."""
    settings = [model.config.to_dict(), config.to_dict()]
    if starts is not None:
        settings.append(list(starts))
    digest = hashlib.sha256(json.dumps(settings).encode())
    samples = [parameter.detach().flatten()[:16].float() for parameter in model.parameters()]
    # mutant heads: a search goes on with the losses of other weights
    for tensor in (*rows, *samples):
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


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
    folder: Path | None = None,
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
        folder: For a file of the trials, which an interrupted search finds again.
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
    path = None
    if folder is not None:
        path = folder / f"{identify(model, rows, equal, starts)}.json"
    kept = Losses(path)
    with one_line(), progress(title, trials + 3) as advance:
        # Refuse a count that does not fit before the long part.
        any_units = [Unit(0, i) if heads else Unit(i) for i in range(count)]
        at_equal_cache(shape, any_units, equal, length, raw)

        def measure(trial_config: CCAConfig) -> float:
            def measure_now() -> float:
                _configure(handle, trial_config)
                if starts is None:
                    return far_loss(model, rows)
                return end_loss(model, rows, starts)

            return kept.get(repr(trial_config), measure_now)

        def loss(units: tuple[Unit, ...]) -> float:
            sizes = spread(shape, units, 1, COARSE * config.group_size)
            return measure(equal.replace(layer_group_sizes=sizes))

        try:
            before = len(kept.known)
            start = time.monotonic()
            loss_full = measure(equal.replace(layer_group_sizes=(1,) * shape.layers))
            loss_before = measure(equal)
            advance(2)
            seconds = (time.monotonic() - start) / 2 * (trials + 1)
            _print_duration(title, trials, before, seconds)
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
    kept.forget()
    return Findings(search, chosen, loss_full, loss_before, loss_after)


def _print_duration(title: str, trials: int, before: int, seconds: float) -> None:
    """Print the number of trials and the time that they take, in seconds; after an interruption the
    number of passes done `before`, because the time of these is not known."""
    duration = f"about {timedelta(seconds=round(seconds))}"
    if before:
        duration = f"{before} passes are known from a search that was interrupted"
    print(
        f"{trials} trials, each a pass over {title}: {duration}. Fewer or shorter rows, or a "
        "smaller count, take less; after an interruption the same search goes on where it was.",
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
