"""Make Triton's interpreter several times as fast, with the same results.

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
        if not modules or any(tl.core.is_builtin(x.load) for x in modules):
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


NUMBERS = {
    name: np.dtype(numpy_name)
    for name, numpy_name in (
        *((f"{kind}int{bits}",) * 2 for kind in ("", "u") for bits in (8, 16, 32, 64)),
        *(("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64")),
    )
}
"""NumPy's types of the numbers that it calculates with as Triton does, by Triton's names: neither
bits nor the types of floats that NumPy does not know."""
WHOLE = {name: (np.iinfo(x).min, np.iinfo(x).max) for name, x in NUMBERS.items() if x.kind in "iu"}
"""The least and the greatest of whole numbers."""
SIGNED = (tl.int8, tl.int16, tl.int32, tl.int64)
WIDER = {
    (a.name, b.name): SIGNED[max(i, j)] for i, a in enumerate(SIGNED) for j, b in enumerate(SIGNED)
}
"""The type of what is calculated from two signed types."""
STORED = {**NUMBERS, "bf16": np.dtype("uint16")}
"""NumPy's types of what lies in memory."""
EXACT = {np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul}
OFFSETS = ("int32", "int64")
"""Types of what is added to pointers."""


class Fast:
    """Operators of tensors in one step each, for operands of one type, or a tensor and a number;
    other operands take the interpreter's own way."""

    def __init__(self) -> None:
        self.tensor, self.handle = tl.tensor, interpreter.TensorHandle
        self.attributes: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}

    def make(self, data: np.ndarray, dtype: Any, is_block: bool) -> Any:
        """Return a tensor of a type."""
        handle = object.__new__(self.handle)
        handle.__dict__.update(data=data, dtype=dtype, attr={})
        key = (dtype.name, data.shape if is_block else None)
        if key not in self.attributes:
            kind = tl.block_type(dtype, list(data.shape)) if is_block else dtype
            self.attributes[key] = vars(self.tensor(handle, kind)).copy()
        made = object.__new__(self.tensor)
        made.__dict__.update(self.attributes[key], handle=handle)
        return made

    def operand(self, x: Any, dtype: Any) -> Any:
        """Return what NumPy takes for a tensor or a number, or None where it is of another type
        than the tensor beside it."""
        if type(x) is self.tensor:
            return x.handle.data if x.dtype.name == dtype.name else None
        if type(x) is int and dtype.name in WHOLE:
            least, greatest = WHOLE[dtype.name]
            return x if least <= x <= greatest else None
        if type(x) is int:
            return x if dtype.name in NUMBERS else None
        # NumPy lets a number of Python have the type of an array.
        return x if type(x) is float and dtype.is_floating() else None

    def is_block(self, *operands: Any) -> bool:
        """Return whether there is a block among tensors and numbers."""
        return any(type(x) is self.tensor and x.type is not x.dtype for x in operands)

    def moved(self, pointers: Any, offset: Any) -> Any:
        """Return pointers to elements further on, or None for other offsets than whole numbers."""
        size = max(1, pointers.dtype.element_ty.primitive_bitwidth // 8)
        is_block = pointers.type is not pointers.dtype
        if type(offset) is self.tensor and offset.dtype.name in OFFSETS:
            steps = offset.handle.data.astype(np.uint64) * size
            is_block = is_block or offset.type is not offset.dtype
        elif type(offset) is int and abs(offset) < 2**31:
            steps = np.uint64(offset * size % 2**64)
        else:
            return None
        return self.make(pointers.handle.data + steps, pointers.dtype, is_block)

    def operator(self, member: Any, calculate: Any, types: Any, **options: bool) -> Any:
        """Return an operator of tensors.

        Args:
            member: The interpreter's own operator.
            calculate: NumPy's function.
            types: Names of the types that it is for.
            options: Whether the operands come in turned order, the result is checked for overflow,
                is a comparison, and pointers may be an operand.
        """
        turned, checked, compares, moves = (
            options.get(name, False) for name in ("turned", "checked", "compares", "moves")
        )
        make, tensor, own = self.make, self.tensor, interpreter.interpreter_semantic

        def operate(x: Any, y: Any, _semantic: Any = None) -> Any:
            dtype = x.dtype
            name = dtype.name
            if type(y) is tl.constexpr:
                y = y.value
            if name in types:
                is_block = x.type is not dtype
                if type(y) is tensor:
                    b = y.handle.data
                    is_block = is_block or y.type is not y.dtype
                    if y.dtype.name != name:
                        dtype = WIDER.get((name, y.dtype.name))
                else:
                    b = self.operand(y, dtype)
                if b is not None and dtype is not None:
                    a = x.handle.data
                    if turned:
                        a, b = b, a
                    if checked and name in WHOLE:
                        check_range(a, b, dtype, calculate)
                    return make(calculate(a, b), tl.int1 if compares else dtype, is_block)
            elif moves and dtype.is_ptr():
                moved = self.moved(x, y)
                if moved is not None:
                    return moved
            return member(x, y, _semantic=_semantic or own)

        return operate

    def load(self, member: Any) -> Any:
        """Return the values at pointers."""

        def read(semantic: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
            kind = getattr(pointers.dtype, "element_ty", None)
            is_block = pointers.type is not pointers.dtype
            is_other_fast = other is None or (mask is not None and other.type is other.dtype)
            if kind is None or kind.name not in STORED or not is_other_fast:
                return member(semantic, pointers, mask, other, *options)
            at, element = pointers.handle.data, STORED[kind.name]
            if mask is None:
                seen = np.ones(at.shape, bool)
            elif mask.dtype.name != "int1" or (not is_block and mask.type is not mask.dtype):
                return member(semantic, pointers, mask, other, *options)
            else:
                seen = mask.handle.data
                if seen.shape != at.shape:
                    at, seen = np.broadcast_arrays(at, seen)
            if other is None:
                filled = np.zeros(at.shape, element)
            else:
                filled = np.full(at.shape, semantic.cast(other, kind).handle.data, element)
            data = interpreter._interpreter.load(at, seen, filled, element)
            return self.make(data, kind, is_block)

        return read

    def where(self, member: Any) -> Any:
        """Return the choice between two tensors or numbers."""

        def choose(semantic: Any, condition: Any, x: Any, y: Any) -> Any:
            like = x if type(x) is self.tensor else y
            if type(like) is self.tensor and condition.dtype.name == "int1":
                dtype = like.dtype
                a, b = self.operand(x, dtype), self.operand(y, dtype)
                if dtype.name in NUMBERS and a is not None and b is not None:
                    kind = NUMBERS[dtype.name].type
                    a, b = (z if type(z) is np.ndarray else kind(z) for z in (a, b))
                    data = np.where(condition.handle.data, a, b)
                    return self.make(data, dtype, self.is_block(condition, x, y))
            return member(semantic, condition, x, y)

        return choose

    def extremum(self, member: Any, of_floats: Any, of_integers: Any) -> Any:
        """Return the lesser or the greater of two tensors or numbers."""

        def choose(semantic: Any, x: Any, y: Any, propagate_nan: Any) -> Any:
            like = x if type(x) is self.tensor else y
            if type(like) is self.tensor and propagate_nan == tl.PropagateNan.NONE:
                dtype = like.dtype
                a, b = self.operand(x, dtype), self.operand(y, dtype)
                if dtype.name in NUMBERS and a is not None and b is not None:
                    calculate = of_integers if dtype.name in WHOLE else of_floats
                    return self.make(calculate(a, b), dtype, self.is_block(x, y))
            return member(semantic, x, y, propagate_nan)

        return choose

    def cast(self, member: Any) -> Any:
        """Return the conversion of a tensor."""

        def convert(semantic: Any, x: Any, dst_ty: Any, *rounding: Any, **named: Any) -> Any:
            source, target = x.dtype.name, dst_ty.scalar.name
            if source == target:
                return x
            # These have ways of their own.
            is_narrower = source == "fp16" or (source == "fp64" and target == "fp16")
            is_unsigned = target.startswith("uint")
            is_rounded = any(option is not None for option in (*rounding, *named.values()))
            is_other = is_rounded or is_narrower or is_unsigned
            if source in NUMBERS and target in NUMBERS and not is_other:
                data = x.handle.data.astype(NUMBERS[target])
                return self.make(data, dst_ty.scalar, x.type is not x.dtype)
            return member(semantic, x, dst_ty, *rounding, **named)

        return convert

    def expand_dims(self, member: Any) -> Any:
        """Return the view of a block with one more axis."""

        def expand(semantic: Any, x: Any, axis: int) -> Any:
            data = x.handle.data
            if x.type is x.dtype or not 0 <= axis <= data.ndim:
                return member(semantic, x, axis)
            shape = data.shape
            return self.make(data.reshape(*shape[:axis], 1, *shape[axis:]), x.dtype, True)

        return expand

    def install(self) -> None:
        """Replace the operators."""
        whole = tuple(WHOLE)
        for names, calculate, types, options in (
            (("add", "radd"), np.add, NUMBERS, {"checked": True, "moves": True}),
            (("sub", "rsub"), np.subtract, NUMBERS, {"checked": True}),
            (("mul", "rmul"), np.multiply, NUMBERS, {"checked": True}),
            (("truediv", "rtruediv"), np.divide, ("fp32", "fp64"), {}),
            (("floordiv", "rfloordiv"), quotient, whole, {}),
            (("mod", "rmod"), np.fmod, whole, {}),
            (("and", "rand"), np.bitwise_and, (*whole, "int1"), {}),
            (("or", "ror"), np.bitwise_or, (*whole, "int1"), {}),
            (("xor", "rxor"), np.bitwise_xor, (*whole, "int1"), {}),
            (("lshift",), np.left_shift, whole, {}),
            (("rshift",), np.right_shift, whole, {}),
            (("lt",), np.less, NUMBERS, {"compares": True}),
            (("le",), np.less_equal, NUMBERS, {"compares": True}),
            (("gt",), np.greater, NUMBERS, {"compares": True}),
            (("ge",), np.greater_equal, NUMBERS, {"compares": True}),
            (("eq",), np.equal, NUMBERS, {"compares": True}),
            (("ne",), np.not_equal, NUMBERS, {"compares": True}),
        ):
            for name in names:
                member = getattr(tl.tensor, f"__{name}__")
                turned = name != names[0]
                fast = self.operator(member, calculate, frozenset(types), turned=turned, **options)
                setattr(tl.tensor, f"__{name}__", fast)
        semantic = type(interpreter.interpreter_semantic)
        semantic.load = self.load(semantic.load)
        semantic.where = self.where(semantic.where)
        semantic.minimum = self.extremum(semantic.minimum, np.fmin, np.minimum)
        semantic.maximum = self.extremum(semantic.maximum, np.fmax, np.maximum)
        semantic.cast = self.cast(semantic.cast)
        semantic.expand_dims = self.expand_dims(semantic.expand_dims)


def quotient(a: Any, b: Any) -> Any:
    """Return a quotient of whole numbers, rounded towards 0."""
    return (a - np.fmod(a, b)) // b


def check_range(a: Any, b: Any, dtype: Any, calculate: Any) -> None:
    """Raise where a sum, difference or product does not fit into whole numbers of a type."""
    least, greatest = WHOLE[dtype.name]
    if greatest >= 2**63 - 1:
        return
    if type(a) is np.ndarray and a.size == 1 and (type(b) is int or b.size == 1):
        low = high = EXACT[calculate](a.item(), b if type(b) is int else b.item())
    else:
        exact = calculate(*(x if type(x) is int else x.astype(np.int64) for x in (a, b)))
        low, high = exact.min(), exact.max()
    fits = least <= low and high <= greatest
    assert fits, f"{dtype.name} overflow detected for operation {calculate.__name__}"


def patched_attribute(patch: Any) -> Any:
    """Return the interpreter's patch of an operator, which calls it without the check that Triton's
    compiler does."""

    def patch_one(owner: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        call = getattr(member, "__wrapped__", member)
        own = interpreter.interpreter_semantic

        def operate(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = own
            return call(*args, **kwargs)

        if scope:
            scope[0].set_attr(owner, name, operate)
        else:
            setattr(owner, name, operate)

    return patch_one


def install() -> None:
    """Replace the interpreter's functions."""
    interpreter._patch_attr = patched_attribute(interpreter._patch_attr)
    interpreter.inspect = Members()
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = dtype_by_name(interpreter._get_np_dtype)
    semantic = type(interpreter.interpreter_semantic)
    semantic.binary_op_sanitize_overflow_impl = check_overflow
    semantic.broadcast_impl_value = broadcast_where_needed(semantic.broadcast_impl_value)
    tl.tensor.__init__ = new_tensor(tl.tensor.__init__)
    tl.block_type.__init__ = new_block_type(tl.block_type.__init__)
    Fast().install()
