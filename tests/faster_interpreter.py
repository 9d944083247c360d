"""Make Triton's interpreter twice as fast, with the same results.

The interpreter runs a kernel operation by operation in NumPy; most of its time goes to bookkeeping
that gives the same answer each time. Each function here replaces one of the interpreter's own.
"""

import functools
import inspect
import operator
from typing import Any

import numpy as np
from triton.runtime import interpreter

tl = interpreter.tl


class Members:
    """The module inspect for the interpreter, which looks for operators among a module's members
    at each call of a kernel: here their names are found once."""

    def __init__(self) -> None:
        self.operators = functools.cache(
            lambda owner: [name for name, x in inspect.getmembers(owner) if tl.core.is_builtin(x)]
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getmembers(self, owner: Any) -> list[tuple[str, Any]]:
        """Return the operators of a module or class as they are now."""
        return [(name, getattr(owner, name)) for name in self.operators(owner)]


@functools.cache
def languages(fn: Any) -> list[Any]:
    """Return the modules whose operators a kernel calls."""
    return [x for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]


def patched_once(patch: Any) -> Any:
    """Return the interpreter's patch of a function's operators, for functions whose operators are
    not patched yet: a kernel patches them for all functions that it calls."""

    def patch_where_needed(fn: Any) -> Any:
        modules = languages(fn)
        operators = [lang.load for lang in modules] + [lang.tensor.__add__ for lang in modules]
        if not operators or any(tl.core.is_builtin(x) for x in operators):
            return patch(fn)
        scope = getattr(interpreter, "_LangPatchScope", None)
        return scope and scope()  # changes nothing, so restores nothing

    return patch_where_needed


def dtype_by_name(numpy_dtype: Any) -> Any:
    """Return the interpreter's table of NumPy's dtypes, looked up by the names of Triton's."""
    table: dict[str, np.dtype] = {}

    def look_up(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        if scalar.name not in table:
            table[scalar.name] = numpy_dtype(scalar)
        return table[scalar.name]

    return look_up


def check_overflow(semantic: Any, lhs: Any, rhs: Any, method: Any) -> None:
    """Raise where a sum, difference or product does not fit into the operands' integers. The
    interpreter's own method looks for the same in ten operations, and raises in debug mode only."""
    dtype = lhs.type.scalar
    if dtype.int_bitwidth >= 64 or not semantic.builder.options.sanitize_overflow:
        return
    calculate = getattr(operator, method.__name__)
    exact = calculate(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    fits = exact.min() >= dtype.get_int_min_value() and exact.max() <= dtype.get_int_max_value()
    assert fits, f"int{dtype.int_bitwidth} overflow detected for operation {method.__name__}"


def sizes(shape: Any) -> tuple[int, ...]:
    """Return a shape in numbers, from numbers or constants of Triton."""
    return tuple(getattr(size, "value", size) for size in shape)


def new_tensor(initialize: Any) -> Any:
    """Return the constructor of tensors, which takes the attributes that follow from the shape from
    the first tensor of that shape."""
    attributes: dict[tuple[int, ...], dict[str, Any]] = {}

    def construct(self: Any, handle: Any, type: Any) -> None:
        shape = sizes(type.shape) if type.is_block() else ()
        if shape not in attributes:
            initialize(self, handle, type)
            own = ("handle", "type", "dtype")
            attributes[shape] = {name: x for name, x in vars(self).items() if name not in own}
        vars(self).update(attributes[shape], handle=handle, type=type, dtype=type.scalar)

    return construct


def new_block_type(initialize: Any) -> Any:
    """Return the constructor of types of blocks, which takes all but the elements' type from the
    first such type."""
    attributes: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def construct(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, sizes(shape))
        if key not in attributes:
            initialize(self, element_ty, shape)
            attributes[key] = vars(self).copy()
        vars(self).update(attributes[key], element_ty=element_ty)

    return construct


def broadcast_where_needed(broadcast: Any) -> Any:
    """Return the broadcast of two tensors, for tensors of two shapes."""

    def of_two(semantic: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        is_block = lhs.type.is_block()
        if is_block == rhs.type.is_block() and lhs.handle.data.shape == rhs.handle.data.shape:
            return lhs, rhs
        return broadcast(semantic, lhs, rhs)

    return of_two


def install() -> None:
    """Replace the interpreter's functions."""
    interpreter.inspect = Members()
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = dtype_by_name(interpreter._get_np_dtype)
    semantic = type(interpreter.interpreter_semantic)
    semantic.binary_op_sanitize_overflow_impl = check_overflow
    semantic.broadcast_impl_value = broadcast_where_needed(semantic.broadcast_impl_value)
    tl.tensor.__init__ = new_tensor(tl.tensor.__init__)
    tl.block_type.__init__ = new_block_type(tl.block_type.__init__)
