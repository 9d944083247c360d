"""Run kernels written in Gluon for Hopper on a CPU: `interpreted(kernel, grid, arguments, ...)`.

Triton's interpreter knows no Gluon. Here a kernel is called as plain Python, with other meanings of
the names it uses: blocks are torch tensors, shared memory is torch tensors that begin as NaN, each
group of warps is a thread, and barriers count phases as the hardware's do. What is asynchronous
happens as late as it may: a product reads shared memory when it is waited for, a copy out of shared
memory when its group of warps waits, copies into it run in a thread of their own. So a place that
is written too early, a barrier that is arrived at too early or waited for with the wrong parity is
a wrong result or a deadlock, which is an error. What a GPU may do besides, as reordering accesses
that no fence separates, is not seen here.
"""

from __future__ import annotations

import builtins
import functools
import operator
import queue
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from corecontext.ops.triton import tensor_memory
from corecontext.ops.triton.launch import Fixed

PATIENCE_S = 30.0
"""A barrier that nobody has completed for so long means a deadlock."""
PAUSES = 0.02
"""Share of a barrier's uses before which a thread pauses, so that runs differ in their order."""


class Block(Tensor):
    """A block in registers, or a number: `x += 1` makes another one."""

    __iadd__ = Tensor.__add__
    __isub__ = Tensor.__sub__
    __imul__ = Tensor.__mul__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        """Return blocks, as PyTorch's own method does at several times the cost."""
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(named or {}))
            return result.as_subclass(cls) if isinstance(result, Tensor) else result

    @property
    def type(self) -> Any:
        """Hold a layout, which means nothing here."""
        return types.SimpleNamespace(layout=None)

    def expand_dims(self, axis: int) -> Tensor:
        """Return the block with one more axis."""
        return self.unsqueeze(axis)


def _block(x: Any) -> Any:
    """Return numbers and tensors as blocks."""
    if isinstance(x, bool | int):
        x = torch.tensor(x)
    return x.as_subclass(Block) if isinstance(x, Tensor) else x


class Pointer:
    """Pointers to elements of a tensor's memory: an offset, or a block of them."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory = memory
        self.offset = offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def of(cls, x: Tensor) -> Pointer:
        """Return a pointer to the first element of a tensor."""
        x = x.detach()
        flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return cls(flat, _block(x.storage_offset()))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def seen(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Return offsets and mask in one shape.

        Raises:
            IndexError: an offset that is not masked is outside the memory.
        """
        offset, seen = torch.broadcast_tensors(
            torch.as_tensor(self.offset), torch.as_tensor(True if mask is None else mask)
        )
        inside = (offset >= 0) & (offset < self.memory.numel())
        if bool((seen & ~inside).any()):
            raise IndexError("a kernel reads or writes outside its memory")
        return torch.where(seen, offset, 0).long(), seen


class Shared:
    """A view of shared memory."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of an element."""
        return self.memory.dtype

    @property
    def shape(self) -> torch.Size:
        """Return the sizes of the view."""
        return self.memory.shape

    def index(self, i: Any) -> Shared:
        """Return one tile."""
        return Shared(self.memory[int(i)])

    def reshape(self, shape: list[int]) -> Shared:
        """Return the same elements in another shape."""
        return Shared(self.memory.view(shape))

    def permute(self, order: list[int]) -> Shared:
        """Return the view with its axes in another order."""
        return Shared(self.memory.permute(order))

    def slice(self, start: int, length: int, axis: int = 0) -> Shared:
        """Return a part along an axis."""
        return Shared(self.memory.narrow(axis, start, length))

    def load(self, layout: Any = None) -> Tensor:
        """Return the elements."""
        return _block(self.memory.clone())

    def store(self, x: Tensor) -> None:
        """Write the elements."""
        assert x.dtype == self.dtype
        self.memory.copy_(x)


class Descriptor:
    """A descriptor of the tensor memory accelerator."""

    def __init__(self, given: Any) -> None:
        self.base = given.base.detach()
        self.shape = tuple(_block(size) for size in given.base.shape)
        self.dtype = given.base.dtype
        self.layout = None
        num_bytes = functools.reduce(operator.mul, given.block_shape) * given.base.element_size()
        self.block_type = types.SimpleNamespace(shape=given.block_shape, nbytes=num_bytes)

    def place(self, at: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return where a tile lies in the tensor, and which part of the tile that is."""
        inside, part = [], []
        sizes = zip(at, self.block_type.shape, self.base.shape, strict=True)
        for start, length, size in sizes:
            start = int(start)
            begin = min(max(start, 0), size)
            end = max(begin, min(start + length, size))
            inside.append(slice(begin, end))
            part.append(slice(begin - start, end - start))
        return tuple(inside), tuple(part)


class Barrier:
    """A barrier in shared memory."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = arrivals
        self.missing = arrivals
        self.bytes = 0
        self.phase = 0


class Product:
    """A product of matrices that may not have been computed yet."""

    def __init__(self, a: Any, b: Any, accumulator: Any) -> None:
        self.factors = (a, b)
        self.accumulator = accumulator
        self.result: Tensor | None = None

    def compute(self) -> None:
        """Read the factors now."""
        if self.result is None:
            a, b = (x.memory if isinstance(x, Shared) else x for x in self.factors)
            before = self.accumulator
            dtype = torch.float64 if a.is_floating_point() else torch.int64
            result = torch.Tensor(a).to(dtype) @ torch.Tensor(b).to(dtype)
            kind = torch.float32 if a.is_floating_point() else torch.int32
            if before is not None:
                before = before.result if isinstance(before, Product) else before
                result = result + before
            self.result = _block(result.to(kind))


class Program:
    """One program of a grid: its barriers, copies on their way, and threads."""

    def __init__(self, number: int, count: int, seed: int) -> None:
        self.number = number
        self.count = count
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.barriers: dict[int, Barrier] = {}
        self.copies: queue.Queue = queue.Queue()
        self.error: BaseException | None = None
        self.of_thread = threading.local()

    def use(self, memory: Shared) -> Barrier:
        """Return the barrier at a place, sometimes after a pause."""
        if self.random.random() < PAUSES:
            threading.Event().wait(1e-3)
        return self.barriers[memory.memory.data_ptr()]

    def count_down(self, barrier: Barrier, arrivals: int, num_bytes: int) -> None:
        """Count arrivals and bytes; the phase ends when none is missing."""
        with self.changed:
            barrier.missing -= arrivals
            barrier.bytes += num_bytes
            if barrier.missing < 0:
                raise AssertionError("a barrier gets more arrivals than it was made for")
            if not barrier.missing and not barrier.bytes:
                barrier.missing = barrier.arrivals
                barrier.phase ^= 1
                self.changed.notify_all()

    def wait(self, barrier: Barrier, parity: int) -> None:
        """Wait until a phase of a parity has ended."""
        with self.changed:
            ended = self.changed.wait_for(
                lambda: barrier.phase != parity or self.error is not None, PATIENCE_S
            )
            if self.error is not None:
                raise RuntimeError("another group of warps failed")
            if not ended:
                raise TimeoutError("a barrier is never completed: the kernel would hang")

    def pending(self, kind: str) -> list:
        """Return what a thread has begun and not waited for."""
        return self.of_thread.__dict__.setdefault(kind, [])

    def run(self, function: Callable[..., None], arguments: tuple) -> None:
        """Run a group of warps, and keep its first error."""
        try:
            function(*arguments)
            if self.pending("stores"):
                raise AssertionError("a group of warps ends before its copies have read")
        except BaseException as error:
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()

    def copy(self) -> None:
        """Copy tiles into shared memory, one after the other, until there is None."""
        while (copy := self.copies.get()) is not None:
            descriptor, at, barrier, shared = copy
            inside, part = descriptor.place(at)
            shared.memory.zero_()
            shared.memory[part] = descriptor.base[inside]
            self.count_down(barrier, 0, -descriptor.block_type.nbytes)


_PROGRAM: Program
"""The one that runs: one after the other do."""


def _range(*bounds: Any) -> Iterator[Any]:
    return map(_block, builtins.range(*map(int, bounds)))


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    offset, seen = pointer.seen(mask)
    values = pointer.memory[offset]
    return _block(torch.where(seen, values, torch.tensor(other, dtype=values.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, seen = pointer.seen(mask)
    value = torch.as_tensor(value).to(pointer.memory.dtype).broadcast_to(offset.shape)
    pointer.memory[offset[seen]] = torch.Tensor(value)[seen] if value.ndim else value


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    return _block(torch.where(torch.as_tensor(condition), a, b))


def _least(a: Any, b: Any) -> Tensor:
    return _block(torch.minimum(torch.as_tensor(a), torch.as_tensor(b)))


def _most(a: Any, b: Any) -> Tensor:
    return _block(torch.maximum(torch.as_tensor(a), torch.as_tensor(b)))


def _select_bits(code: str, constraints: str, arguments: list, **options: Any) -> Tensor:
    """Stand for the assembly of `hopper_forward.fill_marked`."""
    assert "selp.f32 $0, $4, $1, marked" in code
    x, word, bit, fill = arguments
    return _where((word & bit) != 0, fill, x)


def _specialize(groups: list, warps: list[int], registers: list[int]) -> None:
    """Run groups of warps side by side."""
    program = _PROGRAM
    threads = [threading.Thread(target=program.run, args=group) for group in groups]
    copier = threading.Thread(target=program.run, args=(program.copy, ()))
    for thread in (copier, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    program.copies.put(None)
    copier.join()
    if program.error is not None:
        raise program.error


def _multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    product = Product(a, b, acc if use_acc else None)
    _PROGRAM.pending("products").append(product)
    return product


def _wait_products(count: int, products: list) -> Any:
    """Compute all products of the thread but the last `count`."""
    pending = _PROGRAM.pending("products")
    for product in pending[: len(pending) - count]:
        product.compute()
    del pending[: len(pending) - count]
    results = tuple(x.result if isinstance(x, Product) else x for x in products)
    assert all(x is not None for x in results), "a product is used before it is waited for"
    return results if len(results) > 1 else results[0]


def _copy_in(descriptor: Descriptor, at: list, barrier: Shared, shared: Shared) -> None:
    program = _PROGRAM
    program.copies.put((descriptor, at, program.use(barrier), shared))


def _begin_store(add: bool, descriptor: Descriptor, at: list, shared: Shared) -> None:
    def copy() -> None:
        inside, part = descriptor.place(at)
        values = shared.memory[part]
        descriptor.base[inside] = descriptor.base[inside] + values if add else values

    _PROGRAM.pending("stores").append(copy)


def _wait_stores(count: int) -> None:
    pending = _PROGRAM.pending("stores")
    for copy in pending[: len(pending) - count]:
        copy()
    del pending[: len(pending) - count]


def _allocate(dtype: torch.dtype, shape: list, layout: Any = None) -> Shared:
    fill = float("nan") if dtype.is_floating_point else 0
    return Shared(torch.full([int(size) for size in shape], fill, dtype=dtype))


def _init(memory: Shared, arrivals: int) -> None:
    _PROGRAM.barriers[memory.memory.data_ptr()] = Barrier(int(arrivals))


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _axis(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, axis: _block(function(x, axis))


_LANGUAGE = types.SimpleNamespace(
    **{
        name: getattr(torch, name)
        for name in ("float32", "float16", "bfloat16", "int8", "int32", "int64")
    },
    constexpr=None,
    static_range=builtins.range,
    program_id=lambda axis: _block(_PROGRAM.number),
    num_programs=lambda axis: _block(_PROGRAM.count),
    arange=lambda start, end, layout=None: _block(torch.arange(int(start), int(end))),
    zeros=lambda shape, dtype, layout=None: _block(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, x, dtype, layout=None: _block(torch.full(shape, x, dtype=dtype)),
    to_tensor=_block,
    load=_load,
    store=_store,
    where=_where,
    minimum=_least,
    maximum=_most,
    exp2=lambda x: _block(torch.exp2(x)),
    log2=lambda x: _block(torch.log2(x)),
    max=_axis(torch.amax),
    sum=_axis(torch.sum),
    convert_layout=lambda x, layout: x,
    inline_asm_elementwise=_select_bits,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    SliceLayout=_nothing,
    DotOperandLayout=_nothing,
    BlockedLayout=_nothing,
    NVMMADistributedLayout=_nothing,
    NVMMASharedLayout=types.SimpleNamespace(get_default_for=_nothing),
)
_BARRIERS = types.SimpleNamespace(
    MBarrierLayout=_nothing,
    init=_init,
    arrive=lambda barrier: _PROGRAM.count_down(_PROGRAM.use(barrier), 1, 0),
    expect=lambda barrier, size: _PROGRAM.count_down(_PROGRAM.use(barrier), 1, int(size)),
    wait=lambda barrier, parity: _PROGRAM.wait(_PROGRAM.use(barrier), int(parity)),
)
_MEANINGS = {
    id(gl): _LANGUAGE,
    id(tl): _LANGUAGE,
    id(hopper.mbarrier): _BARRIERS,
    id(hopper.warpgroup_mma): _multiply,
    id(hopper.warpgroup_mma_wait): _wait_products,
    id(hopper.fence_async_shared): _nothing,
    id(tensor_memory.copy_in): _copy_in,
    id(tensor_memory.copy_out): functools.partial(_begin_store, False),
    id(tensor_memory.add_out): functools.partial(_begin_store, True),
    id(tensor_memory.wait_out): _wait_stores,
    id(tensor_memory.reinterpreted): lambda x, dtype, shape, layout: x.reshape(shape),
}


def _meaning(x: Any) -> Any:
    """Return what a name of a kernel's module stands for here."""
    if id(x) in _MEANINGS:
        return _MEANINGS[id(x)]
    if isinstance(x, tl.constexpr):
        return x.value
    if isinstance(x, tl.dtype):
        return getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[x.name])
    if type(x).__name__ in ("JITFunction", "GluonJITFunction", "InterpretedFunction"):
        return lambda *arguments, **options: _plain(x.fn)(*arguments, **options)
    return x


@functools.cache
def _plain(function: types.FunctionType) -> Callable[..., Any]:
    """Return the function of a kernel under those meanings."""
    names = {name: _meaning(x) for name, x in function.__globals__.items()} | {"range": _range}
    return types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )


def _argument(x: Any) -> Any:
    """Return an argument of a launch as a kernel gets it."""
    if isinstance(x, Fixed):
        x = x.tensors
    if isinstance(x, tuple):
        return tuple(map(_argument, x))
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    if isinstance(x, Tensor):
        return Pointer.of(x)
    return _block(x)


def interpreted(
    kernel: Any, grid: tuple[int], arguments: tuple, specialized: tuple = (), **constants: Any
) -> None:
    """Run a kernel as `launch.launch` does, programs one after the other."""
    if isinstance(kernel, triton.runtime.interpreter.InterpretedFunction):
        kernel[grid](*arguments, *specialized, **constants)
        return
    global _PROGRAM
    constants = {name: _meaning(x) for name, x in constants.items() if name != "num_warps"}
    given = tuple(map(_argument, (*arguments, *specialized)))
    for number in range(grid[0]):
        _PROGRAM = Program(number, grid[0], seed=number)
        _plain(kernel.fn)(*given, **constants)
