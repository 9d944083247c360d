"""Launch kernels, from the second time without Triton's slow look at every argument."""

import contextlib
import functools
import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel


class Fixed:
    """Hold tensors that many launches have as one argument, a tuple: they are looked at once.

    Their memory must not move.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.addresses = tuple(x.data_ptr() for x in tensors)
        self.dtypes = [x.dtype for x in tensors]
        self.joined = functools.reduce(operator.or_, self.addresses)


# Read at import: to ask for it takes a microsecond.
_INTERPRETED = triton.knobs.runtime.interpret
_COMPILED: dict[tuple, CompiledKernel] = {}
_KERNELS: dict[int, tuple[Any, frozenset[int]]] = {}
"""By `id`, as Triton's hash of a kernel takes longer: the kernel, which stays alive here, and the
numbers of the arguments for whose alignment Triton compiles nothing."""
_MOST = 4096  # entries of _COMPILED; many of them are the same kernel


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple,
    specialized: tuple = (),
    *,
    num_warps: int,
    num_stages: int | None = None,
    maxnreg: int | None = None,
    enable_fp_fusion: bool = True,
    **constants: Any,
) -> None:
    """Run a kernel.

    Args:
        kernel: Its constants come last, in the order given here.
        grid: Programs along up to three dimensions.
        arguments: Tensors, tuples of tensors, `Fixed`, descriptors, floats, `ints`, and integers
            that the kernel has in `do_not_specialize`. Descriptors of other tiles or dtypes need a
            constant, or a tensor, that tells them apart. Tensors that begin anywhere belong in
            `do_not_specialize_on_alignment`: others are launched by Triton where they are not
            aligned.
        specialized: The arguments after them, for each of whose values Triton may compile another
            kernel: integers and, as tuples, strides.
        maxnreg: Most registers of a thread, on NVIDIA's chips.
        enable_fp_fusion: Whether a product that is added may stay unrounded.
        constants: The values that the kernel is compiled for; a NamedTuple holds some by name.
    """
    options: dict[str, Any] = {"num_warps": num_warps}
    if num_stages is not None:
        options["num_stages"] = num_stages
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    if not enable_fp_fusion:
        options["enable_fp_fusion"] = False
    if torch.compiler.is_compiling():
        plain = (*_plain(arguments), *specialized)
        _launch_outside_graph(kernel, grid, plain, {**constants, **options})
        return
    pointers = 0  # the addresses joined by "or": a multiple of 16 if all are
    dtypes = []
    # With addresses in place of tensors: of a tensor Triton would ask the driver for its address.
    given: list[Any] = []
    _, any_alignment = _KERNELS.get(id(kernel)) or _known(kernel)
    for i, x in enumerate(arguments):
        if isinstance(x, Fixed):
            if i not in any_alignment:
                pointers |= x.joined
            dtypes += x.dtypes
            given.append(x.addresses)
            continue
        members = []
        for member in x if isinstance(x, tuple) else (x,):
            if isinstance(member, Tensor):
                address = member.data_ptr()
                if i not in any_alignment:
                    pointers |= address
                dtypes.append(member.dtype)
                members.append(address)
            else:
                members.append(member)
        given.append(tuple(members) if isinstance(x, tuple) else members[0])
    if pointers % 16 or _INTERPRETED:
        # The interpreter takes any number.
        assert num_warps & (num_warps - 1) == 0, f"num_warps must be a power of 2, got {num_warps}"
        # Triton compiles a kernel for each choice of unaligned tensors.
        kernel[grid](*_plain(arguments), *specialized, **constants, **options)
        return
    chosen = (*constants.values(), *options.values())
    key = (id(kernel), torch.cuda.current_device(), *dtypes, *specialized, *chosen)
    compiled = _COMPILED.get(key)
    if compiled is None:
        if len(_COMPILED) >= _MOST:
            _COMPILED.clear()
        _COMPILED[key] = kernel[grid](*_plain(arguments), *specialized, **constants, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*given, *specialized, *constants.values())


def _plain(arguments: tuple) -> tuple:
    """Return a launch's arguments as Triton takes them."""
    return tuple(x.tensors if isinstance(x, Fixed) else x for x in arguments)


def _known(kernel: Any) -> tuple[Any, frozenset[int]]:
    """Take a kernel into `_KERNELS`."""
    params = getattr(kernel, "params", ())  # the interpreter's kernels have none
    anywhere = (x.num for x in params if x.do_not_specialize_on_alignment)
    _KERNELS[id(kernel)] = known = kernel, frozenset(anywhere)
    return known


@torch.compiler.disable
def _launch_outside_graph(kernel: Any, grid: tuple, arguments: tuple, constants: dict) -> None:
    """Run a kernel where torch.compile traces: its graphs can hold no tuple argument."""
    kernel[grid](*arguments, **constants)


def ints(*values: int) -> tuple[int, ...]:
    """Return whole numbers from 0 to 2^30 as one argument of a kernel, which `primitives.integers`
    reads. For 1 and for multiples of 16 Triton would compile another kernel; 2 x + 3 is neither."""
    return tuple(2 * x + 3 for x in values)


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x, copied only where the elements of a row are not adjacent."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. `triton.cdiv` takes longer than a launch."""
    return -(-a // b)


@functools.cache
def power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def on_device(x: Tensor) -> AbstractContextManager:
    """Make the device of x the current one, on which Triton launches."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()
