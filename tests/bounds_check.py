"""Check each address that a kernel reads or writes in Triton's interpreter: it must lie in the
memory of one of the kernel's tensors, or of those that a test names."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class CheckedMemory:
    """The interpreter's access to memory, for the tensors of the kernel that runs.

    Args:
        memory: The interpreter's own module.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.starts = self.ends = np.empty(0, np.uint64)
        """Of the tensors' storages, in order."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def allow(self, tensors: Iterator[torch.Tensor]) -> None:
        """Allow the storages of these tensors, and no other memory."""
        storages = (x.untyped_storage() for x in tensors)
        spans = sorted({(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages})
        bounds = np.array(spans, np.uint64).reshape(-1, 2)
        self.starts, self.ends = bounds[:, 0].copy(), bounds[:, 1].copy()

    def check(self, pointers: np.ndarray, mask: Any, size: int) -> None:
        """Raise unless each pointer under the mask has `size` bytes within a storage."""
        used = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        if not used.size:
            return
        storage = np.searchsorted(self.starts, used, side="right").astype(np.int64) - 1
        inside = (storage >= 0) & (used + np.uint64(size) <= self.ends[storage])
        assert inside.all(), f"{(~inside).sum()} of {used.size} addresses are outside all tensors"

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Load where the mask is true."""
        self.check(pointers, mask, np.dtype(dtype).itemsize)
        return self.memory.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        """Store where the mask is true."""
        self.check(pointers, mask, values.dtype.itemsize)
        return self.memory.store(pointers, values, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        """Change values in place where the mask is true."""
        self.check(pointers, mask, values.dtype.itemsize)
        return self.memory.atomic_rmw(operation, pointers, values, mask, order)

    def atomic_cas(self, pointers: Any, compared: Any, values: Any, order: Any) -> Any:
        """Exchange values that equal others."""
        self.check(pointers, True, values.dtype.itemsize)
        return self.memory.atomic_cas(pointers, compared, values, order)


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a kernel's arguments: in tuples, wrappers and descriptors, too."""
    if isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from tensors_in(argument)
    elif isinstance(arguments, torch.Tensor):
        yield arguments
    elif hasattr(arguments, "base"):
        yield from tensors_in(arguments.base)


_reached: list[torch.Tensor] = []


@contextlib.contextmanager
def reaching(*tensors: torch.Tensor) -> Iterator[None]:
    """Allow tensors whose addresses a kernel reads from a table."""
    _reached.extend(tensors)
    try:
        yield
    finally:
        _reached.clear()


def install() -> None:
    """Check all kernels from now on."""
    memory = CheckedMemory(interpreter._interpreter)
    interpreter._interpreter = memory
    prepare = interpreter.GridExecutor._init_args_hst

    def prepare_and_allow(self: Any, given: Any, named: Any) -> Any:
        prepared = prepare(self, given, named)
        memory.allow(tensors_in((*prepared[0], *prepared[1].values(), _reached)))
        return prepared

    interpreter.GridExecutor._init_args_hst = prepare_and_allow
