"""Leave a layer's cache as it was where a change of it fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor


def unchanged_by_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method that raises restore all attributes of a layer, of its parts and stores, or of a
    store.

    The method writes into tensors that stay in use last, when nothing can fail any more.
    """

    @functools.wraps(method)
    def change(layer: Any, *args: Any, **kwargs: Any) -> Any:
        owners = _owners(layer)
        before = [(x, vars(x).copy()) for x in owners]
        try:
            return method(layer, *args, **kwargs)
        except BaseException:
            for x, attributes in before:
                vars(x).clear()
                vars(x).update(attributes)
            for x in owners:
                _restore_counts(x)
            raise

    return change


def _owners(layer: Any) -> list[Any]:
    """Return a layer, its store and its parts."""
    owners = [layer]
    if getattr(layer, "store", None) is not None:
        owners.append(layer.store)
    for part in getattr(layer, "parts", ()):
        owners += _owners(part)
    return owners


def _restore_counts(layer: Any) -> None:
    """Write padding and length anew, which a layer changes in place; allocates nothing."""
    if getattr(layer, "pad", None) is not None:
        for x, number in zip(layer.pad, layer.pads):
            x.fill_(number)
    if getattr(layer, "is_empty", False) and isinstance(layer.seen, Tensor):
        layer.seen.zero_()
