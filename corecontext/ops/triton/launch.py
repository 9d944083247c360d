"""Launching a kernel again without Triton's look at every argument, which takes longer than a short
kernel runs."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

_COMPILED: dict[tuple, CompiledKernel] = {}
_MOST = 4096  # compiled kernels by what they were launched with; many of the entries are the same kernel


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple,
    exact: tuple[int, ...] = (),
    *,
    num_warps: int,
    **constants: Any,
) -> None:
    """Run a kernel.

    Args:
        kernel: Its constants come last, in the order given here.
        grid: Programs along one or two dimensions.
        arguments: Tensors, descriptors, floats, and integers that the kernel has in
            `do_not_specialize`. Descriptors of other tiles need another constant that tells them
            apart.
        exact: The integers after them, for whose values Triton may compile a kernel of its own:
            strides.
        constants: What the kernel is compiled for.
    """
    if torch.compiler.is_compiling():  # the compiler knows launches by this form
        kernel[grid](*arguments, *exact, **constants, num_warps=num_warps)
        return
    pointers, dtypes = 0, []
    for x in arguments:
        if isinstance(x, torch.Tensor):
            pointers |= x.data_ptr()
            dtypes.append(x.dtype)
    if (
        pointers % 16 or triton.knobs.runtime.interpret
    ):  # a kernel of its own for each choice of unaligned tensors
        kernel[grid](*arguments, *exact, **constants, num_warps=num_warps)
        return
    key = (kernel, torch.cuda.current_device(), *dtypes, *exact, *constants.values())
    compiled = _COMPILED.get(key)
    if compiled is None:
        if len(_COMPILED) >= _MOST:
            _COMPILED.clear()
        _COMPILED[key] = kernel[grid](*arguments, *exact, **constants, num_warps=num_warps)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments, *exact, *constants.values())


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes longer than a launch."""
    return -(-a // b)


@functools.cache
def power_of_2(n: int) -> int:
    """The least power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()
