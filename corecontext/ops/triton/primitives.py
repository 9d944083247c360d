"""Share device functions among kernels: the visibility rule, online softmax, products, levels.

`visible_cores`, `visible_entries`, `first_query_of_entry` and `last_query_of_token` are the rule of
`visibility.py` and its inverses. The far past is one list of entries: the n sinks, of `sink_groups`
groups, then one core token for each later group. On the device // truncates toward zero, so every
dividend is at least 0 here.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(1.1754943508222875e-38)  # least normal float32, in place of 0: it has a log
# In Triton's interpreter (on a CPU) products are of float32: it cannot multiply bfloat16.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def integers(numbers):
    """Return the values of `launch.ints`."""
    values = ()
    for i in tl.static_range(len(numbers)):
        values = values + ((numbers[i] - 3) >> 1,)
    return values


@triton.jit
def visible_cores(position, group_size, window_size):
    """Return how many groups the far past of the query at `position` has, j(t); any shape."""
    return tl.maximum(position + 1 - window_size, 0) // group_size


@triton.jit
def visible_entries(groups, group_size, sink_groups):
    """Return how many entries a far past of `groups` groups has."""
    return groups + tl.minimum(groups, sink_groups) * (group_size - 1)


@triton.jit
def _first_query_of_group(group, group_size, window_size):
    """Return the first position whose far past has this group."""
    return (group + 1) * group_size + window_size - 1


@triton.jit
def first_query_of_entry(entry, group_size, window_size, sink_groups):
    """Return the first position whose far past has this entry."""
    # Entry e < n is token e, of group e // g; from n on it is the core token of group
    # e - sink_groups (g - 1). The formula that holds gives the larger number.
    group = tl.maximum(entry // group_size, entry - sink_groups * (group_size - 1))
    return _first_query_of_group(group, group_size, window_size)


@triton.jit
def last_query_of_token(token, group_size, window_size):
    """Return one past the last position whose near past has raw token `token`: from there on it, or
    its core token, is an entry of the far past."""
    return _first_query_of_group(token // group_size, group_size, window_size)


@triton.jit
def dot(a, b):
    """Return a @ b in float32; true float32 for float32 inputs."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def tile_products(q, k, VECTOR: tl.constexpr):
    """Return rows of q times rows of k, [rows, entries] in float32: where VECTOR as sums, since a
    matrix product of few float32 rows would spill registers."""
    if VECTOR:
        products = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2)
    else:
        products = dot(q, tl.trans(k))
    return products


@triton.jit
def weighted_sum(weights, v, VECTOR: tl.constexpr):
    """Return weighted sums of the rows of v, [rows, columns] in float32."""
    if VECTOR:
        # Not weights * v: Triton compiles a sum of such products over 16 rows as one in TF32.
        mixed = tl.sum(tl.fma(weights[:, :, None], v.to(tl.float32)[None, :, :], 0.0), 1)
    else:
        mixed = dot(weights.to(v.dtype), v)
    return mixed


@triton.jit
def level_of(codes, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the level, in float32, that each code of a low-bit index stands for.

    Levels are symmetric: LEVELS are those above 0, rising, for the upper half of the codes.
    """
    UPPER: tl.constexpr = 2 ** (BITS - 1)
    is_upper = codes >= UPPER
    distance = tl.where(is_upper, codes - UPPER, UPPER - 1 - codes)
    level = tl.zeros(codes.shape, tl.float32) + LEVELS[0]
    for i in tl.static_range(1, UPPER):
        level = tl.where(distance == i, LEVELS[i], level)
    return tl.where(is_upper, level, -level)


@triton.jit
def tanh(x):
    """Return tanh by exp2, which every backend has."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def log2_scores(products, scale, bias, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return scores in units of log 2 (for exp2), and the derivative of the softcap; `bias` is a
    mass, or 0 without, in natural units."""
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
    """Load a tile [rows, columns], or [columns, rows] where TRANSPOSED; zeros outside. Unless
    MASKED, all its rows must exist."""
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
