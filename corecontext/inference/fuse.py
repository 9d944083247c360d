"""Compile a model's MLP and norm modules: their intermediate tensors, several times the hidden state, are not made."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

FUSE = (None, "compile")


class Fused:
    """Within a with block these modules of a model run through torch.compile, for any number of tokens.

    MLP and norm modules work on each token by itself; they are found by their class's name, as transformers names them.
    Modules that are compiled already keep what they have.

    Args:
        model: Any module.
        fuse: "compile", or None to change nothing.

    Raises:
        ValueError: `fuse` is something else.
    """

    def __init__(self, model: nn.Module, fuse: str | None = "compile") -> None:
        if fuse not in FUSE:
            raise ValueError(f"fuse must be None or 'compile', got {fuse!r}.")
        self._compiled: list[tuple[nn.Module, Any]] = []
        if fuse is not None:
            self._compiled = [(module, torch.compile(module._call_impl, dynamic=True)) for module in model.modules()
                              if type(module).__name__.endswith(("MLP", "RMSNorm"))
                              and module._compiled_call_impl is None]

    def __enter__(self) -> None:
        for module, compiled in self._compiled:
            module._compiled_call_impl = compiled

    def __exit__(self, *exc: Any) -> None:
        for module, _ in self._compiled:
            module._compiled_call_impl = None
