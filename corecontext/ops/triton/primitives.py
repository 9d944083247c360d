"""Device functions that the kernels share: the visibility rule, online softmax, products, masked
tiles.

`visible_cores`, `first_query_of_core` and `last_query_of_token` are the rule of `visibility.py` and
its two inverses; kernels in Gluon call them too. // truncates toward zero on the device, so every
dividend is at least 0 here.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The interpreter cannot multiply bfloat16 and has no tensor cores: there, products are of float32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def visible_cores(position, group_size, window_size):
    """Return how many core tokens the query at `position` sees, j(t); any shape."""
    return tl.maximum(position + 1 - window_size, 0) // group_size


@triton.jit
def first_query_of_core(core, group_size, window_size):
    """Return the first position whose query sees core token `core`."""
    return (core + 1) * group_size + window_size - 1


@triton.jit
def last_query_of_token(token, group_size, window_size):
    """Return one past the last position whose query sees raw token `token`: from there on its core
    token stands for it."""
    return first_query_of_core(token // group_size, group_size, window_size)


@triton.jit
def dot(a, b):
    """Return a @ b in float32; true float32 for float32 inputs."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def tanh(x):
    """Return tanh by exp2, which every backend has."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def log2_scores(products, scale, bias, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return scores in units of log 2, and the derivative of the softcap."""
    slope = 1.0
    if HAS_SOFTCAP:
        capped = tanh(products * (scale / softcap))
        scores = (softcap * capped + bias) * LOG2E
        slope = 1 - capped * capped
    else:
        scores = products * (scale * LOG2E) + bias * LOG2E
    return scores, slope


@triton.jit
def softmax_step(scores, running_max, running_sum, SOME_SEE_NOTHING: tl.constexpr):
    """Take scores [rows, keys] in units of log 2 into an online softmax.

    Returns:
        Their weights, the factor of earlier sums, the new maximum and the new sum.
    """
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    shift = new_max
    if SOME_SEE_NOTHING:  # exp2(-inf - -inf) would be NaN
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(running_max - shift)
    return weights, fade, new_max, running_sum * fade + tl.sum(weights, 1)


@triton.jit
def tile_mask(rows, num_rows, dims, HEAD_DIM: tl.constexpr):
    """Return which elements of a tile [rows, columns] exist."""
    return (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]


@triton.jit
def load_tile(
    pointers,
    rows,
    num_rows,
    dims,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load a tile [rows, columns], or [columns, rows] where TRANSPOSED; zeros outside. Rows end
    only where MASKED."""
    if TRANSPOSED:
        in_rows = (rows < num_rows)[None, :]
        in_dims = (dims < HEAD_DIM)[:, None]
    else:
        in_rows = (rows < num_rows)[:, None]
        in_dims = (dims < HEAD_DIM)[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=in_rows & in_dims, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=in_dims, other=0.0)
    return tile
