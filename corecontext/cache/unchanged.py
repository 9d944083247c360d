"""Leave a layer's cache, or those of several layers, as it was where a change of it fails.

A change replaces tensors or writes to slots that are not in use, so that the old attributes still
hold the old cache. Its few writes to slots in use are put off to its end (`write_last`).
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from corecontext.ops.capability import is_captured

_last_writes: ContextVar[list[Callable[[], None]] | None] = ContextVar("writes", default=None)
"""Writes that the change in progress has put off; None outside of a change."""


def unchanged_by_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method that raises restore the attributes of its object, a layer, several layers or a
    store, and of the layers and stores in it.

    The method gives its writes to slots in use to `write_last`. A compiled or captured call, or one
    within another change, restores nothing by itself.
    """

    @functools.wraps(method)
    def change(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _last_writes.get() is not None:
            return method(layer, *args, **kwargs)
        owners = _owners(layer)
        lengths = [x.seen for x in owners if isinstance(getattr(x, "seen", None), Tensor)]
        if any(is_captured(x.device) for x in lengths):
            return method(layer, *args, **kwargs)
        # Lengths in tensors change in place, as padding does: errors write them back.
        numbers = [x.clone() for x in lengths]
        before = [(x, vars(x).copy()) for x in owners]
        writes: list[Callable[[], None]] = []
        token = _last_writes.set(writes)
        try:
            result = method(layer, *args, **kwargs)
        except BaseException:
            for x, attributes in before:
                vars(x).clear()
                vars(x).update(attributes)
            for x in owners:
                _restore_padding(x)
            for length, number in zip(lengths, numbers):
                length.copy_(number)
            raise
        finally:
            _last_writes.reset(token)
        with torch.no_grad():
            for write in writes:
                write()
        return result

    return change


def write_last(write: Callable[[], None]) -> None:
    """Call `write` at the end of the change in progress, when nothing can fail any more; at once
    outside of a change. It allocates nothing."""
    writes = _last_writes.get()
    if writes is None:
        write()
    else:
        writes.append(write)


def _owners(layer: Any) -> list[Any]:
    """Return a layer, its store, and its parts with theirs."""
    owners = [layer]
    if getattr(layer, "store", None) is not None:
        owners.append(layer.store)
    for part in getattr(layer, "parts", ()):
        owners += _owners(part)
    return owners


def _restore_padding(layer: Any) -> None:
    """Write the padding anew, which a layer changes in place; allocates nothing."""
    if getattr(layer, "pad", None) is not None:
        for x, number in zip(layer.pad, layer.pads):
            x.fill_(number)
