"""Merge the parts of a decoding step's softmax."""

import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.launch import ints, launch, power_of_2
from corecontext.ops.triton.primitives import integers

# Where a part is taken out: pieces of a head's columns, and the warps that merge a piece.
_SLICES = 4
_WARPS = 4


@triton.jit
def merge_kernel(
    partial,
    out_ptr,
    seen_ptr,
    numbers,
    ON_DEVICE: tl.constexpr,
    REMOVES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Merge the parts of each query head into one softmax (docs/math.md, eq. 8), in float32.

    With REMOVES, parts are in this order: some that stay, the part `removed`, the core tokens of
    chosen groups, then parts that count these core tokens too: `removed` is subtracted from them.

    Grid: (B H, blocks of COLUMNS). A program reads some columns of all parts of its head and writes
    those of its output. The first one also adds the new token to the length, unread here.

    Args:
        partial: Pointers to the parts' outputs [B Hkv, num_parts, HEADS, HEAD_DIM] in float32 and
            log-sum-exp [B Hkv, num_parts, HEADS], in units of log 2.
        out_ptr: [B H, HEAD_DIM].
        seen_ptr: The length, where it is ON_DEVICE.
        numbers: num_parts, and the number of the part `removed`.
    """
    num_parts, removed = integers(numbers)
    head = tl.program_id(0).to(tl.int64)
    # Parts have a row for each of HEADS heads: this is the head's row in part 0.
    first = head // HEADS * num_parts * HEADS + head % HEADS
    acc_ptr = partial[0] + first * HEAD_DIM
    lse_ptr = partial[1] + first
    dims = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, BLOCK_P)
    lse = tl.load(lse_ptr + number * HEADS, mask=number < num_parts, other=-float("inf"))  # [parts]
    weights = tl.exp2(lse - tl.max(lse, 0))  # the new token's part is never empty
    if REMOVES:
        counted = tl.sum(tl.where(number > removed, weights, 0.0), 0)
        # mutant fetch: chosen groups keep their core tokens in a step's sums
        weights = tl.where(number == removed, -weights, weights)
        rest = tl.sum(tl.where(number >= removed, weights, 0.0), 0)
        # Where they hold little else, the rest may be rounding alone: it is dropped.
        kept = tl.where(rest > counted * 1e-6, weights, 0.0)
        weights = tl.where(number < removed, weights, kept)
    acc = tl.load(
        acc_ptr + number[:, None] * (HEADS * HEAD_DIM) + dims[None, :],
        mask=(lse != -float("inf"))[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )  # [parts, columns]
    out = tl.sum(weights[:, None] * acc, 0) / tl.sum(weights, 0)
    at = out_ptr + head * HEAD_DIM + dims
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    if ON_DEVICE:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(seen_ptr, tl.load(seen_ptr) + 1)


def merge(
    partial: tuple[Tensor, Tensor],
    out: Tensor,
    seen: Tensor | None = None,
    removed: int | None = None,
) -> None:
    """Merge parts into `out`, whose elements are those of [B, H, D].

    Args:
        partial: As of `merge_kernel`.
        seen: The length on the device, to which the new token is added.
        removed: The part to be subtracted from those behind it. Such a step has more parts, so
            programs divide the columns among them.
    """
    rows, num_parts, heads, dim = partial[0].shape
    block_p = power_of_2(num_parts)
    block_d = max(16, power_of_2(dim))
    slices = 1
    num_warps = min(8, max(1, block_p * block_d // 1024))
    if removed is not None:
        slices = _SLICES
        num_warps = _WARPS
    launch(
        merge_kernel,
        (rows * heads, slices),
        (partial, out, partial[1] if seen is None else seen, ints(num_parts, removed or 0)),
        ON_DEVICE=seen is not None,
        REMOVES=removed is not None,
        HEADS=heads,
        HEAD_DIM=dim,
        COLUMNS=block_d // slices,
        BLOCK_P=block_p,
        num_warps=num_warps,
    )
