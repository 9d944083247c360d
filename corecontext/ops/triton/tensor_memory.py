"""The tensor memory accelerator's copies under one name each: Triton's Gluon renamed them between releases."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@_core.builtin
def _atomic_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(_core.ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord,
                                              src.handle)


copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
add_out = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _atomic_add
wait_out = tma.store_wait


def descriptor(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """x [N, heads, T, D] for copies of `rows` rows of one head; rows and columns outside read as zeros."""
    block = [1, 1, rows, columns or max(16, triton.next_power_of_2(x.shape[-1]))]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
