"""Fuse a model's elementwise work (norms, rotary, SwiGLU, residuals) by torch.compile.

While a prompt is read, or a model trained, the MLP and norm modules and the rotation of queries and
keys are compiled, for any number of tokens: their intermediate tensors, several times the hidden
state, are not made. A decoding step is compiled as one graph, so that its many small kernels become
few; a CUDA graph then captures what was compiled.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

FUSE = (None, "compile")
MOST_STEPS = 64  # kinds of steps (batch, length, g, s) that stay compiled at once; later ones run as they are
MOST_PARTS = 32  # kinds of norms (of a layer, of a head; learning or not, ...), which torch counts as one function
_REFUSED = (TorchDynamoException, FailOnRecompileLimitHit)
_ROTATE = "apply_rotary_pos_emb"  # what transformers calls it in each model's file
_rotating: dict[
    ModuleType, tuple[int, Callable[..., Any], Callable[..., Any]]
] = {}  # uses now, its own, compiled
_limits: list[int] = []  # torch's for kinds of one function, as each use now found it
_lock = threading.Lock()


class Fused:
    """One model's compiled parts: modules within a with block, and `step` for decoding.

    MLP and norm modules work on each token by itself; they are found by their class's name, as
    transformers names them. Modules that are compiled already keep what they have. The rotation is
    a function of a model's file, so other models of that architecture rotate by the compiled one,
    too, for the length of the with block. Where the compiler fails (none for this machine, a model
    that it cannot trace), a warning says so and the model runs as it is.

    Args:
        model: Any module.
        fuse: "compile", or None to change nothing.

    Raises:
        ValueError: `fuse` is something else.
    """

    def __init__(self, model: nn.Module, fuse: str | None = "compile") -> None:
        if fuse not in FUSE:
            raise ValueError(f"fuse must be None or 'compile', got {fuse!r}.")
        self.model, self._is_on = model, fuse is not None
        self._step: Callable[..., Any] | None = None
        self._compiled: list[tuple[nn.Module, Any]] = []
        self._files: set[ModuleType] = set()
        if fuse is not None:
            # As one graph or not at all: then nothing has run, and the cache is untouched, when it
            # fails.
            self._step = torch.compile(model, dynamic=False, fullgraph=True)
            self._compiled = [
                (module, compiled_or_plain(module._call_impl, type(module).__name__))
                for module in model.modules()
                if module._compiled_call_impl is None
                and type(module).__name__.endswith(("MLP", "RMSNorm"))
            ]
            self._files = {
                file
                for module in model.modules()
                if type(module).__name__.endswith("Attention")
                and hasattr(file := sys.modules[type(module).__module__], _ROTATE)
            }

    def __enter__(self) -> None:
        if not self._is_on:
            return
        for module, compiled in self._compiled:
            module._compiled_call_impl = compiled
        with _lock:
            _limits.append(torch._dynamo.config.recompile_limit)
            torch._dynamo.config.recompile_limit = max(_limits[-1], MOST_PARTS)
            for file in self._files:
                now = getattr(file, _ROTATE)
                users, own, compiled = _rotating.get(file, (0, None, None))
                if not users and now is not own:
                    own, compiled = now, compiled_or_plain(now, _ROTATE)
                setattr(file, _ROTATE, compiled)
                _rotating[file] = users + 1, own, compiled  # type: ignore[assignment]

    def __exit__(self, *exc: Any) -> None:
        if not self._is_on:
            return
        for module, _ in self._compiled:
            module._compiled_call_impl = None
        with _lock:
            torch._dynamo.config.recompile_limit = _limits.pop()
            for file in self._files:
                users, own, compiled = _rotating[file]
                _rotating[file] = users - 1, own, compiled
                if users == 1:
                    setattr(file, _ROTATE, own)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on one token a row and a cache of fixed buffers."""
        if self._step is not None:
            try:
                with torch._dynamo.config.patch(recompile_limit=MOST_STEPS):
                    return self._step(*args, **kwargs)
            except _REFUSED as error:
                _warn(type(self.model).__name__, error)
                self._step = None
        return self.model(*args, **kwargs)


def compiled_or_plain(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The compiled function, which has no state to spoil, until the compiler fails."""
    compiled: Callable[..., Any] | None = torch.compile(function, dynamic=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(*args, **kwargs)
            except _REFUSED as error:
                _warn(name, error)
                compiled = None
        return function(*args, **kwargs)

    return call


def _warn(name: str, error: BaseException) -> None:
    why = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    warnings.warn(
        f"{name} cannot be compiled, so it runs as it is, which is slower: {why}", stacklevel=3
    )
