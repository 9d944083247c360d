"""Warm a server up before its first request, so that none waits for kernels to be compiled."""

from __future__ import annotations

from collections.abc import Iterable

from corecontext.graphs import WARM_UP
from corecontext.serve.request import Request
from corecontext.serve.scheduler import Scheduler


def warm_up(scheduler: Scheduler, sizes: Iterable[tuple[int, int]] = ()) -> None:
    """Run a made-up request with the model's own (g, s) and with each of `sizes`, then free its
    memory.

    Sizes that do not fit the budget are left out.
    """
    config = scheduler.admission.config
    if scheduler.full or config.varies:
        sizes = ()
    for g, s in dict.fromkeys([(None, None), *sizes]):
        # Core tokens are used only in prompts longer than a group and a window.
        seen = (g or config.group_size) + (s or config.window_size)
        longest = scheduler.max_length - WARM_UP - 2
        length = max(1, min(max(scheduler.chunk_size, seen) + 1, longest))
        new_tokens = min(WARM_UP + 2, scheduler.max_length - 1)
        try:
            slot = scheduler.submit(Request([0] * length, new_tokens, group_size=g, window_size=s))
        except ValueError:  # larger than the budget
            continue
        while not scheduler.idle:
            scheduler.run_turn()
        if slot.error is not None:
            raise slot.error
    scheduler.clear()
