"""Launching a kernel again without Triton's look at every argument, which takes longer than a short kernel runs."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

_COMPILED: dict[tuple, CompiledKernel] = {}


def launch(kernel: Any, programs: int, arguments: tuple, *, num_warps: int, **constants: Any) -> None:
    """Run a kernel on a grid of one dimension.

    Args:
        kernel: All its integers are in `do_not_specialize`; its constants come last, in the order given here.
        arguments: Tensors, descriptors, numbers. Tensors of other dtypes than at the first call with these constants,
            and descriptors of other tiles, need another constant that tells them apart.
        constants: What the kernel is compiled for.
    """
    pointers = 0
    for x in arguments:
        if isinstance(x, torch.Tensor):
            pointers |= x.data_ptr()
    key = (kernel, torch.cuda.current_device(), pointers % 16 == 0, *constants.values())
    compiled = None if triton.knobs.runtime.interpret else _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[(programs,)](*arguments, **constants, num_warps=num_warps)
    else:
        compiled[(programs, 1, 1)](*arguments, *constants.values())
