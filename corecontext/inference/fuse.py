"""Fuse a model's elementwise work (norms, rotary, SwiGLU, residuals) by torch.compile.

While a prompt is read, or a model trained, the MLP and norm modules and the rotation of queries and
keys are compiled, for any number of tokens: their intermediate tensors, several times the hidden
state, are not made. A decoding step is compiled as one graph, so that its many small kernels become
few; a CUDA graph then captures the compiled step.
"""

import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

FUSE = (None, "compile")
MOST_STEPS = 64
"""Most variants of the step (by batch, length, g, s) that stay compiled; later ones run
uncompiled."""
MOST_PARTS = 32
"""Most variants of an MLP, norm or rotation that stay compiled. torch counts all norms of a model
(of layers, of heads, with and without gradients) as one function."""
_REFUSED = (TorchDynamoException, FailOnRecompileLimitHit)
_ROTATE = "apply_rotary_pos_emb"  # transformers' name of the rotation in each model's file


@dataclass
class _Rotation:
    """The rotation of a model's file."""

    original: Callable[..., Any]
    compiled: Callable[..., Any]
    users: int = 0
    """Open with blocks whose models use the compiled function."""


_rotating: dict[ModuleType, _Rotation] = {}
_limits: list[int] = []  # torch's recompile_limit before each open with block
_lock = threading.Lock()


class Fused:
    """Compile one model's parts: modules within a with block, and `step` for decoding.

    MLP and norm modules work on each token by itself; they are recognized by their class's name, as
    transformers names them. Modules that are compiled already keep their own. The rotation is a
    function of a model's file, so other models of that architecture also rotate by the compiled
    function for the length of the with block. Where the compiler fails (none for this machine, a
    model that it cannot trace), a warning is given and the model runs uncompiled.

    Args:
        model: Any module.
        fuse: "compile", or None to change nothing.

    Raises:
        ValueError: `fuse` is something else.
    """

    def __init__(self, model: nn.Module, fuse: str | None = "compile") -> None:
        if fuse not in FUSE:
            raise ValueError(f"fuse must be None or 'compile', got {fuse!r}.")
        self.model = model
        self._is_on = fuse is not None
        self._step: Callable[..., Any] = model
        self._compiled: list[tuple[nn.Module, Any]] = []
        self._files: set[ModuleType] = set()
        if fuse is None:
            return
        # As one graph or not at all: where it fails, no part has run and the cache is untouched.
        name = type(model).__name__
        self._step = compiled_or_plain(model, name, dynamic=False, fullgraph=True)
        for module in model.modules():
            name = type(module).__name__
            if module._compiled_call_impl is None and name.endswith(("MLP", "RMSNorm")):
                self._compiled.append((module, compiled_or_plain(module._call_impl, name)))
            if name.endswith("Attention"):
                file = sys.modules[type(module).__module__]
                if hasattr(file, _ROTATE):
                    self._files.add(file)

    def __enter__(self) -> None:
        if not self._is_on:
            return
        for module, compiled in self._compiled:
            module._compiled_call_impl = compiled
        with _lock:
            _limits.append(torch._dynamo.config.recompile_limit)
            torch._dynamo.config.recompile_limit = max(_limits[-1], MOST_PARTS)
            for file in self._files:
                rotation = _rotation_of(file)
                rotation.users += 1
                setattr(file, _ROTATE, rotation.compiled)

    def __exit__(self, *exc: Any) -> None:
        if not self._is_on:
            return
        for module, _ in self._compiled:
            module._compiled_call_impl = None
        with _lock:
            torch._dynamo.config.recompile_limit = _limits.pop()
            for file in self._files:
                rotation = _rotating[file]
                rotation.users -= 1
                if not rotation.users:
                    setattr(file, _ROTATE, rotation.original)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on one token a row and a cache of fixed buffers."""
        with torch._dynamo.config.patch(recompile_limit=MOST_STEPS):
            return self._step(*args, **kwargs)


def _rotation_of(file: ModuleType) -> _Rotation:
    """Return the rotation of a model's file, compiled once unless the file's has changed since."""
    rotation = _rotating.get(file)
    current = getattr(file, _ROTATE)
    if rotation is None or (not rotation.users and current is not rotation.original):
        rotation = _Rotation(current, compiled_or_plain(current, _ROTATE))
        _rotating[file] = rotation
    return rotation


def compiled_or_plain(
    function: Callable[..., Any], name: str, *, dynamic: bool = True, fullgraph: bool = False
) -> Callable[..., Any]:
    """Return a function that runs compiled until the compiler fails, then uncompiled.

    `function` must have no state, or be compiled as a full graph, so that running it again after a
    failure is safe.
    """
    compiled: Callable[..., Any] | None = torch.compile(
        function, dynamic=dynamic, fullgraph=fullgraph
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(*args, **kwargs)
            except _REFUSED as error:
                compiled = None
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                warnings.warn(
                    f"{name} cannot be compiled, so it runs as it is, which is slower: {why}",
                    stacklevel=2,
                )
        return function(*args, **kwargs)

    return call
