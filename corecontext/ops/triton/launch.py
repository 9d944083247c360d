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


class Constants:
    """Hold what a kernel is compiled for; many launches that have it in common look at it once.

    Args:
        num_warps, num_stages, maxnreg, enable_fp_fusion: Triton's options: maxnreg is the most
            registers of a thread, on NVIDIA's chips, and enable_fp_fusion whether a product that is
            added may stay unrounded.
        constants: The kernel's own, in its order; a NamedTuple holds some by name.
    """

    def __init__(
        self,
        *,
        num_warps: int,
        num_stages: int | None = None,
        maxnreg: int | None = None,
        enable_fp_fusion: bool = True,
        **constants: Any,
    ) -> None:
        self.options: dict[str, Any] = {"num_warps": num_warps}
        if num_stages is not None:
            self.options["num_stages"] = num_stages
        if maxnreg is not None:
            self.options["maxnreg"] = maxnreg
        if not enable_fp_fusion:
            self.options["enable_fp_fusion"] = False
        self.constants = constants
        self.values = tuple(constants.values())
        key = (*self.values, *self.options.values())
        self.number = _NUMBERS.setdefault(key, len(_NUMBERS))
        """The same for the same values."""


_NUMBERS: dict[tuple, int] = {}
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
    constants: Constants | None = None,
    **given: Any,
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
        constants: What the kernel is compiled for; None takes `given`, the arguments of
            `Constants`.
    """
    if torch.compiler.is_compiling():
        plain = (*_plain(arguments), *specialized)
        if constants is not None:
            given = {**constants.constants, **constants.options}
        options = {name: value for name, value in given.items() if value is not None}
        _launch_outside_graph(kernel, grid, plain, options)
        return
    if constants is None:
        constants = Constants(**given)
    pointers = 0  # the addresses joined by "or": a multiple of 16 if all are
    dtypes = []
    # With addresses in place of tensors: of a tensor Triton would ask the driver for its address.
    passed: list[Any] = []
    _, any_alignment = _KERNELS.get(id(kernel)) or _known(kernel)
    for i, x in enumerate(arguments):
        if isinstance(x, Fixed):
            if i not in any_alignment:
                pointers |= x.joined
            dtypes += x.dtypes
            passed.append(x.addresses)
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
        passed.append(tuple(members) if isinstance(x, tuple) else members[0])
    if pointers % 16 or _INTERPRETED:
        # The interpreter takes any number.
        warps = constants.options["num_warps"]
        assert warps & (warps - 1) == 0, f"num_warps must be a power of 2, got {warps}"
        # Triton compiles a kernel for each choice of unaligned tensors.
        _run(kernel, grid, arguments, specialized, constants)
        return
    key = (id(kernel), torch.cuda.current_device(), *dtypes, *specialized, constants.number)
    compiled = _COMPILED.get(key)
    if compiled is None:
        if len(_COMPILED) >= _MOST:
            _COMPILED.clear()
        _COMPILED[key] = _run(kernel, grid, arguments, specialized, constants)
    else:
        compiled[(*grid, 1, 1)[:3]](*passed, *specialized, *constants.values)


def _run(
    kernel: Any, grid: tuple, arguments: tuple, specialized: tuple, constants: Constants
) -> Any:
    """Run a kernel through Triton; return what it has compiled."""
    options = {**constants.constants, **constants.options}
    return kernel[grid](*_plain(arguments), *specialized, **options)


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
