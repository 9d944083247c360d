"""Rotate the queries and keys of a layer in one launch, with the roundings of transformers'
`apply_rotary_pos_emb`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.launch import ceil_div, ints, launch, on_device, power_of_2
from corecontext.ops.triton.primitives import integers

_INTERPRETED = triton.knobs.runtime.interpret
_MOST_PROGRAMS = 65535  # along the second dimension of a launch
_ROWS = 32  # tokens of a head that one program rotates


@triton.jit
def rotate_heads_kernel(
    sources,
    tables,
    results,
    numbers,
    q_strides,
    k_strides,
    out_strides,
    table_strides,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate ROWS tokens of a head, of D = 2 HALF elements each.

    Grid: (blocks of ROWS tokens, B (H + Hkv)).

    Args:
        sources: Pointers to q [B, H, T, D] and k [B, Hkv, T, D].
        tables: Pointers to cosines and sines, [1 or B, T, D].
        results: Pointers to what is written, as the sources.
        numbers: T, H and Hkv.
        out_strides: Of both results.
    """
    num_tokens, heads, kv_heads = integers(numbers)
    batch = tl.program_id(1) // (heads + kv_heads)
    head = tl.program_id(1) % (heads + kv_heads)
    is_key = head >= heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_tokens)[:, None] & (cols < HALF)[None, :]
    rows = rows.to(tl.int64)[:, None]
    batch = batch.to(tl.int64)
    source = sources[0] + batch * q_strides[0] + head * q_strides[1] + rows * q_strides[2]
    result = results[0] + batch * out_strides[0][0] + head * out_strides[0][1]
    result += rows * out_strides[0][2]
    if is_key:
        head -= heads
        source = sources[1] + batch * k_strides[0] + head * k_strides[1] + rows * k_strides[2]
        result = results[1] + batch * out_strides[1][0] + head * out_strides[1][1]
        result += rows * out_strides[1][2]
    first = tl.load(source + cols[None, :], mask=mask, other=0.0)
    second = tl.load(source + HALF + cols[None, :], mask=mask, other=0.0)
    at = batch * table_strides[0] + rows * table_strides[1] + cols[None, :]
    # x cos + rotate_half(x) sin, where rotate_half(x) is (-second, first).
    for half in tl.static_range(2):
        cos = tl.load(tables[0] + at + half * HALF, mask=mask, other=0.0)
        sin = tl.load(tables[1] + at + half * HALF, mask=mask, other=0.0)
        if half:
            x, rotated_half = second, first
        else:
            x, rotated_half = first, -second
        # Each product is rounded, and so is their sum.
        by_cos = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
        by_sin = (rotated_half.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
        out = by_cos.to(tl.float32) + by_sin.to(tl.float32)
        tl.store(result + half * HALF + cols[None, :], out.to(x.dtype), mask=mask)


def unsupported_reason(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """Return why `rotate` cannot take a call, or None."""
    if not q.is_cuda and not _INTERPRETED:
        return f"device {q.device.type!r} is not cuda"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is not one of bfloat16, float16"
    if not q.dtype == k.dtype == cos.dtype == sin.dtype:
        return "dtypes differ"
    has_tables = cos.dim() == 3 and cos.shape == sin.shape and cos.stride() == sin.stride()
    if not has_tables or cos.shape[2] != q.shape[3] or q.shape[3] % 2:
        return f"cosines {list(cos.shape)} are not those of whole heads of {q.shape[3]}"
    if len(q) * (q.shape[1] + k.shape[1]) > _MOST_PROGRAMS:
        return f"{len(q)} rows have more heads than {_MOST_PROGRAMS}"
    if any(x.stride(-1) != 1 for x in (q, k, cos, sin)):
        return "elements of a row are not neighbours"
    return None


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k, rotated, in the memory layout of each.

    Args:
        q: [B, H, T, D]. k: [B, Hkv, T, D].
        cos, sin: [1 or B, T, D].
    """
    out = (torch.empty_like(q), torch.empty_like(k))
    batch, heads, count, dim = q.shape
    kv_heads = k.shape[1]
    of_row = 0 if cos.shape[0] == 1 else cos.stride(0)
    with on_device(q):
        launch(
            rotate_heads_kernel,
            (ceil_div(count, _ROWS), batch * (heads + kv_heads)),
            ((q, k), (cos, sin), out, ints(count, heads, kv_heads)),
            (
                *(x.stride()[:3] for x in (q, k)),
                tuple(x.stride()[:3] for x in out),
                (of_row, cos.stride(1)),
            ),
            HALF=dim // 2,
            BLOCK=power_of_2(dim // 2),
            ROWS=_ROWS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
