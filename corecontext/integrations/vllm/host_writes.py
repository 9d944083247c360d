"""Store the raw tokens of prompts in host memory beside the layer's attention and products: the
bus takes a tenth of the time of these."""

from __future__ import annotations

from torch import Tensor

from corecontext.integrations.vllm.side_stream import SideStream
from corecontext.ops.triton.paged.pages import Pages
from corecontext.ops.triton.paged.pool_pages import store_tokens

PROGRAMS = 8
"""Programs that store to host memory: enough for the bus, and most multiprocessors stay free
(docs/tuning-notes.md)."""


def store_beside(
    side: SideStream, new: tuple[Tensor, Tensor], slots: Tensor, pages: Pages, is_last: bool
) -> None:
    """Store new tokens in host memory.

    What a step writes is there when the step ends. No token of the same step reads it: one that
    shares it waits for the next step (`cache_managers.CoreManager`), and all others have it in the
    window or as new tokens.

    Args:
        new: Keys and values [T, Hkv, D].
        slots: As of `store_tokens`.
        pages: In host memory.
        is_last: Whether no later layer of the worker stores in this step.
    """
    if not side.takes(new[0]):
        store_tokens(*new, slots, pages)
        return
    with side.beside(new, is_last):
        store_tokens(*new, slots, pages, PROGRAMS)
