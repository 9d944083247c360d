"""Name the copies of the tensor memory accelerator, which moves tiles between global and shared
memory: Triton's Gluon renamed them between releases."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from corecontext.ops.triton.launch import power_of_2

DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int8: gl.int8,
}


@_core.builtin
def _atomic_add(tensor_desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory, where Gluon has no function for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        _core.ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )


@_core.builtin
def reinterpreted(memory, dtype, shape, layout, _semantic=None):
    """Return shared memory as tiles of another shape."""
    shape = [_core._unwrap_if_constexpr(size) for size in shape]
    dtype, layout = map(_core._unwrap_if_constexpr, (dtype, layout))
    return _semantic.memdesc_reinterpret(memory, dtype, shape, layout)


copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
add_out = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _atomic_add
wait_out = tma.store_wait


@gluon.jit
def tiles(desc, COUNT: gl.constexpr):
    """Return shared memory for COUNT tiles of a descriptor."""
    shape: gl.constexpr = [COUNT] + desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers in shared memory, each completed by ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), ARRIVALS)
    return made


def aligned(x: Tensor) -> Tensor:
    """Return x, copied unless the accelerator can read it: last stride 1, the start and all other
    strides multiples of 16 bytes."""
    *steps, last = x.stride()
    unit = 16 // x.element_size()
    if (
        last == 1
        and x.data_ptr() % 16 == 0
        and all(size == 1 or (step and step % unit == 0) for size, step in zip(x.shape, steps))
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Describe x [N, heads, T, D], `aligned`, for copies of tiles of one head: `rows` rows of
    `columns` columns, D or more by default; rows and columns outside x read as zeros."""
    shape = list(x.shape)
    strides = list(x.stride())
    block = (1, 1, rows, columns or max(16, power_of_2(shape[3])))
    if 1 in shape:  # along an axis of size 1 any aligned stride will do
        strides = [step if size > 1 else block[3] for size, step in zip(shape[:3], strides)] + [1]
    # TensorDescriptor's own checks take longer than all else here; `aligned` has made them.
    made = object.__new__(TensorDescriptor)
    made.base = x
    made.shape = shape
    made.strides = strides
    made.block_shape = list(block)
    made.layout = _layout(block, x.dtype)
    made.padding = "zero"
    return made


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of such a tile in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])
