"""Core Context Aware attention for long-context language models."""

import importlib
import sys
from typing import Any

__version__ = "0.2.0"

_MODULES = {
    "CCAConfig": "corecontext.config",
    "Rotary": "corecontext.ops.rotary",
    "cca_attention": "corecontext.ops.api",
    "pool_core_tokens": "corecontext.ops.api",
    "merge": "corecontext.ops.merge",
    "CompactKVCache": "corecontext.cache",
    "enable": "corecontext.integrations.hf.enabling",
    "enabled": "corecontext.integrations.hf.enabling",
    "from_pretrained": "corecontext.integrations.hf.enabling",
}
"""The module of each public name."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing the package loads nothing heavy."""
    if name not in _MODULES:
        raise AttributeError(f"module 'corecontext' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the public names, before their first use too, and the modules loaded so far."""
    modules = (name for name in globals() if f"{__name__}.{name}" in sys.modules)
    return sorted({*__all__, "__version__", *modules})
