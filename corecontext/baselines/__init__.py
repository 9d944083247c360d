"""Rival methods, attached to a model as CCA is: sinks and a window (sink_methods.py); rivals.py
lists them."""

import importlib
from typing import Any

from corecontext.baselines.rivals import NAMES, RIVALS, make_rival

_FILES = {
    "Method": "method",
    **dict.fromkeys(("enable", "enabled", "rival_of"), "hook"),
    **{rival.maker: rival.file for rival in RIVALS.values()},
}
"""The file of each public name."""

__all__ = ["NAMES", "RIVALS", "make_rival", *sorted(_FILES)]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that the table of rivals loads nothing heavy."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
