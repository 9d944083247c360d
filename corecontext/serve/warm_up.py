"""Warm a server up before its first request, so that none waits for kernels to be compiled."""

from collections.abc import Iterable
from typing import Any

from corecontext.graphs import WARM_UP
from corecontext.inference.policy import SIZE_NAMES, Sizes
from corecontext.serve.request import Request
from corecontext.serve.scheduler import Scheduler


def warm_up(scheduler: Scheduler, sizes: Iterable[Sizes] = ()) -> None:
    """Run a made-up request with the model's own sizes and one with each of `sizes`, then free
    their memory.

    Sizes that do not fit the budget are left out.
    """
    config = scheduler.admission.config
    if scheduler.full or config.varies:
        sizes = ()
    for g, s, *k in dict.fromkeys([(None, None), *sizes]):
        # Core tokens are used only in prompts longer than a group and a window. The first token is
        # the prompt's; then WARM_UP steps run uncaptured, and the next is captured.
        raw_tokens = (g or config.group_size) + (s or config.window_size)
        longest = scheduler.max_length - WARM_UP - 2
        length = max(1, min(max(scheduler.chunk_size, raw_tokens) + 1, longest))
        new_tokens = min(WARM_UP + 2, scheduler.max_length - 1)
        try:
            own_sizes: dict[str, Any] = dict(zip(SIZE_NAMES, (g, s, *k)))
            slot = scheduler.submit(Request([0] * length, new_tokens, **own_sizes))
        except ValueError:  # larger than the budget
            continue
        while not scheduler.idle:
            scheduler.run_turn()
        if slot.error is not None:
            raise slot.error
    scheduler.clear()
