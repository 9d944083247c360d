"""Warm a server up before its first request, so that none waits for kernels to be compiled."""

from collections.abc import Iterable
from typing import Any

from corecontext.config import CCAConfig
from corecontext.graphs import WARM_UP
from corecontext.inference.policy import SIZE_NAMES, Sizes
from corecontext.serve.request import Request
from corecontext.serve.scheduler import Scheduler
from corecontext.visibility import most_fetched_whole, num_sinks


def warm_up(scheduler: Scheduler, sizes: Iterable[Sizes] = ()) -> None:
    """Run a made-up request with the model's own sizes and one with each of `sizes`, and a short
    one where those run in another way; then free their memory.

    Sizes that do not fit the budget are left out.
    """
    config = scheduler.admission.config
    if scheduler.full or config.varies:
        sizes = ()
    for chosen in dict.fromkeys([(), *sizes]):
        own = dict(zip(SIZE_NAMES, chosen))
        _run(scheduler, max(scheduler.chunk_size, _most_raw(config, **own)) + 1, own)
    if not scheduler.full and scheduler.memory.held_as(config, 1) is None:
        _run(scheduler, 1, {})
    scheduler.clear()


def _most_raw(
    config: CCAConfig,
    group_size: int | None = None,
    window_size: int | None = None,
    fetch_groups: int | None = None,
) -> int:
    """Count the tokens of the longest text whose last query sees each of them raw: core tokens, or
    a choice among groups, are used in longer ones only. Sizes that are None are the model's."""
    g, s = group_size or config.group_size, window_size or config.window_size
    k = config.fetch_groups if fetch_groups is None else fetch_groups
    return most_fetched_whole(g, s, num_sinks(config.sink_size, g), k)


def _run(scheduler: Scheduler, length: int, own_sizes: dict[str, Any]) -> None:
    """Run a request of so many tokens to its end, unless it does not fit the budget."""
    # The first token is the prompt's; then WARM_UP steps run uncaptured, and the next is captured.
    length = max(1, min(length, scheduler.max_length - WARM_UP - 2))
    new_tokens = min(WARM_UP + 2, scheduler.max_length - 1)
    try:
        slot = scheduler.submit(Request([0] * length, new_tokens, **own_sizes))
    except ValueError:  # larger than the budget
        return
    while not scheduler.idle:
        scheduler.run_turn()
    if slot.error is not None:
        raise slot.error
