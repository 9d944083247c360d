"""Operators of the faster interpreter give what Triton's own gives: numbers, types, shapes and
complaints."""

import inspect
import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

tl = pytest.importorskip("triton.language")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.runtime import interpreter  # noqa: E402

SEMANTIC = interpreter.interpreter_semantic
FLOATS = {tl.float16: "float16", tl.float32: "float32", tl.float64: "float64"}
WHOLE = {
    getattr(tl, f"{kind}int{bits}"): f"{kind}int{bits}"
    for kind in ("", "u")
    for bits in (8, 16, 32, 64)
}
TYPES = {**FLOATS, **WHOLE, tl.int1: "bool"}
OPERATORS = [
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rshift"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
]


def own(fast):
    """Return the interpreter's own function that a faster one falls back to."""
    return inspect.getclosurevars(fast).nonlocals["member"]


def made(dtype, shape, seed, small=False):
    """Return a tensor of numbers that include the extremes of a type."""
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if dtype in FLOATS:
        data = generator.standard_normal(count)
        data[::3] = generator.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], data[::3].size)
    elif dtype is tl.int1:
        data = generator.integers(0, 2, count)
    else:
        bounds = np.iinfo(TYPES[dtype])
        low, high = (1, 6) if small else (bounds.min, bounds.max)
        data = generator.integers(low, high, count, dtype=TYPES[dtype], endpoint=True)
    data = data.astype(TYPES[dtype]).reshape(shape)
    kind = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.tensor(interpreter.TensorHandle(data.reshape(shape or (1,)), dtype), kind)


def outcome(function, *args, **named):
    """Return what a call gives, or the kind of its error."""
    with np.errstate(all="ignore"):
        try:
            out = function(*args, **named)
        except Exception as error:
            return type(error).__name__
    data = np.asarray(out.handle.data)
    bits = np.where(np.isnan(data), np.nan, data) if data.dtype.kind == "f" else data
    return str(out.type), str(out.dtype), data.dtype.str, data.shape, bits.tobytes()


def operands():
    """Yield operands that meet in kernels: blocks, scalars and numbers of Python."""
    for seed, (dtype, small) in enumerate(itertools.product(TYPES, (False, True))):
        x = made(dtype, (4, 8), seed, small)
        for other in (dtype, tl.int32, tl.int64, tl.float32):
            yield x, made(other, (4, 8), seed + 100, small)
            yield x, made(other, (), seed + 200, small)
        yield made(dtype, (), seed, small), made(dtype, (), seed + 300, small)
        for number in (3, -1, 2**31, 0.5, tl.constexpr(2), True):
            yield x, number


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    fast = getattr(tl.tensor, f"__{name}__")
    calculated = 0
    for x, y in operands():
        expected = outcome(own(fast), x, y, _semantic=SEMANTIC)
        assert outcome(fast, x, y) == expected, (x.type, getattr(y, "type", y))
        calculated += not isinstance(expected, str)
    assert calculated > 50


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["where", "minimum", "maximum", "cast"])
def test_functions(name):
    fast = getattr(type(SEMANTIC), name)
    calculated = 0
    for number, (x, y) in enumerate(operands()):
        if name == "cast":
            calls = [(x, kind, *rounding) for kind in TYPES for rounding in ((), (None,))]
        elif name == "where":
            calls = [(made(tl.int1, shape, number), x, y) for shape in ((4, 8), ())]
        else:
            calls = [(x, y, propagate) for propagate in tl.PropagateNan.__members__.values()]
        for call in calls:
            expected = outcome(own(fast), SEMANTIC, *call)
            assert outcome(fast, SEMANTIC, *call) == expected, [getattr(z, "type", z) for z in call]
            calculated += not isinstance(expected, str)
    assert calculated > 50


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["bfloat16", *FLOATS.values(), *WHOLE.values()])
def test_pointers_and_what_is_read(kind):
    """Pointers move by elements in both directions; masked values are 0, or what they are said to
    be."""
    dtype = {**{name: x for x, name in {**FLOATS, **WHOLE}.items()}, "bfloat16": tl.bfloat16}[kind]
    memory = torch.arange(1024).to(torch.uint8)
    interpreter._interpreter.allow(iter([memory]))
    pointer = tl.pointer_type(dtype)
    base = np.array([memory.data_ptr() + 512], np.uint64)
    start = tl.tensor(interpreter.TensorHandle(base, pointer), pointer)
    move, read = tl.tensor.__add__, type(SEMANTIC).load
    names = list(inspect.signature(own(read)).parameters)[4:]  # those of this release of Triton
    policy = SimpleNamespace(_to_ir=lambda builder: None)
    some = {"boundary_check": (), "cache_policy": policy, "is_volatile": False}
    options = [some.get(name, "") for name in names]
    for offset in (3, -2, made(tl.int32, (), 1, small=True), made(tl.int64, (4, 8), 2, small=True)):
        expected = outcome(own(move), start, offset, _semantic=SEMANTIC)
        assert outcome(move, start, offset) == expected
        at = move(start, offset)
        shape = tuple(at.handle.data.shape) if at.type is not at.dtype else ()
        masks = [None, made(tl.int1, shape, 3)]
        for mask in masks:
            for other in (
                None,
                *((made(tl.float32, (), 4), made(tl.int32, (), 5)) if mask else ()),
            ):
                expected = outcome(own(read), SEMANTIC, at, mask, other, *options)
                assert outcome(read, SEMANTIC, at, mask, other, *options) == expected
                assert not isinstance(expected, str)


def test_an_axis_more():
    fast = type(SEMANTIC).expand_dims
    for x in (made(tl.float32, (4, 8), 0), made(tl.int64, (8,), 1)):
        for axis in range(-2, 4):
            assert outcome(fast, SEMANTIC, x, axis) == outcome(own(fast), SEMANTIC, x, axis)
