"""Which layers, or KV heads, need small groups or every token.

Few look tokens up far back, and should have what tells most. They are found on a model with full
attention, before any training: all get large groups but one, which keeps every token, and the loss
far from the beginning says how much that one makes good. Several are found in rounds, each beside
those of the rounds before. They then get groups so small, and the others groups four times as
large, that the cache stays as large as it was; or they go on keeping every token, and the window
gives up what that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from corecontext.config import CCAConfig
from corecontext.files import UserError
from corecontext.heads.budget import COARSE, Shape, Unit, at_equal_cache, raw_heads, spread
from corecontext.integrations.transformers import handle_of
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
    """What was tried, and what of it was chosen, in order."""

    trials: list[Trial]
    chosen: tuple[Unit, ...]


def rounds_of(count: int) -> list[int]:
    """How many are chosen in each round: 1, 1, 2, 4, 8, ..., until they are `count`."""
    found: list[int] = []
    while sum(found) < count:
        found.append(min(max(1, sum(found)), count - sum(found)))
    return found


def num_trials(units: int, count: int) -> int:
    """How many trials it takes to choose so many of these units."""
    rounds = rounds_of(count)
    return sum(units - sum(rounds[:i]) for i in range(len(rounds)))


def search_units(
    units: Sequence[Unit],
    count: int,
    loss: Callable[[tuple[Unit, ...]], float],
    on_trial: Callable[[int], Any] = lambda trials: None,
) -> Search:
    """Try every unit as the first, then every other beside the best, and so on; each round chooses
    as many as have been chosen before it, so that many of many take few rounds.

    Args:
        count: Units to choose, at most all but one.
        loss: The model's, far from the beginning, where these units keep every token.
        on_trial: Called with 1 after each trial.

    Raises:
        ValueError: there are not so many.
    """
    if not 1 <= count < len(units):
        raise ValueError(
            f"count must be 1 .. {len(units) - 1} of {len(units)} to choose from, got {count}."
        )
    trials: list[Trial] = []
    chosen: tuple[Unit, ...] = ()
    for few in rounds_of(count):
        tried = []
        for unit in units:
            if unit not in chosen:
                tried.append(Trial(unit, chosen, loss((*chosen, unit))))
                on_trial(1)
        trials += tried
        chosen += tuple(one.unit for one in sorted(tried, key=lambda one: one.loss)[:few])
    return Search(trials, chosen)


def far_loss(model: Any, rows: Sequence[Tensor], chunk_size: int = 1024) -> float:
    """Mean negative log-likelihood over the second half of each row [1, L], nats per token."""
    parts = [
        document_nll(model, row, chunk_size=chunk_size)[row.shape[1] // 2 - 1 :].double()
        for row in rows
    ]
    return float(sum(part.sum() for part in parts) / sum(len(part) for part in parts))


@dataclass(frozen=True)
class Found:
    """What needs small groups, or every token, in one model."""

    search: Search
    config: CCAConfig
    """With the group size of each layer or head, and the window beside them."""
    equal: float
    """The loss with equal groups."""
    chosen: float
    """The loss under `config`."""


def least_length(config: CCAConfig) -> int:
    """Tokens that a row needs, so that its second half has core tokens to see."""
    return 2 * (config.window_size + COARSE * config.group_size)


def find_units(
    model: Any,
    rows: Sequence[Tensor],
    length: int,
    count: int | None,
    *,
    heads: bool = False,
    raw: bool = False,
) -> Found:
    """The layers of a model that need small groups, or KV heads of these.

    Args:
        model: With CCA enabled, whose settings are the model's again afterwards.
        rows: [1, n] each, on the model's device, n at least `least_length`.
        length: Tokens at which the cache shall be no larger than with equal groups.
        count: What to choose; None for an eighth of the layers, or a sixteenth of the heads; with
            `raw` what `raw_heads` says.
        heads: Choose KV heads, of the quarter of the layers that are best.
        raw: What is chosen keeps every token, and the window of all is smaller for it.

    Raises:
        UserError: there is not so much to choose from, or the cache has no room for it.
    """
    handle = handle_of(model)
    assert handle is not None
    config = handle.config
    shape = Shape(len(handle.full), ModelSizes.of(model.config).kv_heads)
    layers, best = [Unit(layer) for layer in range(shape.layers)], max(1, shape.layers // 4)
    wanted = (
        count
        if count is not None
        else max(
            1,
            (
                raw_heads(shape, config, length) // (1 if heads else shape.kv_heads)
                if raw
                else shape.layers * shape.kv_heads // 16
                if heads
                else shape.layers // 8
            ),
        )
    )
    choices = best * shape.kv_heads if heads else shape.layers
    if choices < 2:
        raise UserError(
            f"the model must have at least 2 {'KV heads' if heads else 'full-attention layers'} to choose "
            f"from, got {choices}."
        )
    if not 1 <= wanted < choices:
        raise UserError(
            f"count must be 1 .. {choices - 1} of {choices} to choose from, got {wanted}."
        )
    equal = config.replace(layer_group_sizes=None, head_group_sizes=None)
    trials = (
        (num_trials(shape.layers, 1) + num_trials(choices, wanted))
        if heads
        else num_trials(choices, wanted)
    )
    with (
        one_line(),
        progress(
            f"{len(rows)} rows of up to {max(row.shape[1] for row in rows)} tokens", 2 + trials
        ) as advance,
    ):
        like = [Unit(0, head) if heads else Unit(head) for head in range(wanted)]
        at_equal_cache(
            shape, like, equal, length, raw
        )  # says what does not fit before it takes long

        def configure(of: CCAConfig) -> None:
            handle.configure(
                window_size=of.window_size,
                layer_group_sizes=of.layer_group_sizes,
                head_group_sizes=of.head_group_sizes,
            )

        def measured(of: CCAConfig) -> float:
            configure(of)
            return far_loss(model, rows)

        def loss(units: tuple[Unit, ...]) -> float:
            return measured(
                equal.replace(layer_group_sizes=spread(shape, units, 1, COARSE * config.group_size))
            )

        try:
            before = measured(equal)
            advance(1)
            found = search_units(layers, 1 if heads else wanted, loss, advance)
            if heads:
                needy = sorted(found.trials, key=lambda one: one.loss)[:best]
                found = search_units(
                    [Unit(one.unit.layer, head) for one in needy for head in range(shape.kv_heads)],
                    wanted,
                    loss,
                    advance,
                )
            chosen = at_equal_cache(shape, found.chosen, equal, length, raw)
            after = measured(chosen)
            advance(1)
        finally:
            configure(config)
    return Found(found, chosen, before, after)
