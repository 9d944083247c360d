"""Warm a server up before its first request, so that none waits for kernels to be compiled."""

from collections.abc import Iterable
from typing import Any

from corecontext.graphs import WARM_UP
from corecontext.inference.policy import SIZE_NAMES, Sizes
from corecontext.serve.request import Request
from corecontext.serve.scheduler import Scheduler


def warm_up(scheduler: Scheduler, sizes: Iterable[Sizes] = ()) -> None:
    """Run a made-up request with the model's own sizes and one with each of `sizes`, and short
    ones where those run in another way; then free their memory.

    Sizes that do not fit the budget are left out.
    """
    config = scheduler.admission.config
    memory = scheduler.memory
    runs_short_whole = memory.runs_short_whole
    if scheduler.full or config.varies:
        sizes = ()
    try:
        memory.runs_short_whole = False
        for chosen in dict.fromkeys([(), *sizes]):
            chosen_sizes: dict[str, Any] = dict(zip(SIZE_NAMES, chosen))
            g = chosen_sizes.get("group_size", config.group_size)
            s = chosen_sizes.get("window_size", config.window_size)
            # Core tokens are used only in prompts longer than a group and a window.
            _run(scheduler, max(scheduler.chunk_size, g + s) + 1, chosen_sizes)
    finally:
        memory.runs_short_whole = runs_short_whole
    if runs_short_whole:
        for length in (1, scheduler.chunk_size + 1):
            _run(scheduler, length, {})
    scheduler.clear()


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
