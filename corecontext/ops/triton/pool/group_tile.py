"""Share device functions among pooling kernels: tiles of groups, rotation to the middle, scores.

A tile is the tuple (groups, rows, a, b, num_groups, group_size): the numbers of its groups, of
their tokens (rows), and of the first (a) and second (b) column of each pair; then how many groups,
and tokens of a group, there are. Keys, values and queries come as two tensors, of columns a and of
columns b, so that the rotation to the middle position (docs/math.md, eq. 3 and 10) exchanges
nothing between threads.
"""

import triton
import triton.language as tl

from corecontext.ops.triton.primitives import TINY


@triton.jit
def owned_groups(num_groups, BLOCK_M: tl.constexpr):
    """Return the sequence n and the BLOCK_M groups of this program, in int64."""
    tiles = tl.cdiv(num_groups, BLOCK_M)
    # mutant offsets: 32 bits of a sequence in pooling
    n = (tl.program_id(0) // tiles).to(tl.int64)
    # mutant offsets: 32 bits of a group in pooling
    first = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M
    return n, first + tl.arange(0, BLOCK_M)


@triton.jit
def head_at(ptr, head, stride):
    """Return a pointer to a query head, which may be more than 2^31 elements away."""
    # mutant offsets: 32 bits of a head in pooling
    return ptr + tl.cast(head, tl.int64) * stride


@triton.jit
def column_pairs(
    BLOCK_P: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Return the numbers of BLOCK_P pairs, and the columns a and b of each: HEAD_DIM or more, so
    that they are masked, where there is none. Columns of pairs from HALF on do not rotate."""
    pairs = tl.arange(0, BLOCK_P)
    REST: tl.constexpr = (HEAD_DIM + 1) // 2
    if INTERLEAVED:
        a = 2 * pairs
        b = 2 * pairs + 1
    elif HALF == 0 or 2 * HALF == HEAD_DIM:
        a = pairs
        b = pairs + REST
    else:
        a = tl.where(pairs < HALF, pairs, pairs + HALF)
        b = tl.where(pairs < HALF, pairs + HALF, pairs + REST)
    if HEAD_DIM < 2 * BLOCK_P:
        a = tl.where(pairs < REST, a, HEAD_DIM)
        b = tl.where(pairs < REST, b, HEAD_DIM)
    return pairs, a, b


@triton.jit
def _at_tokens(strides, tile, cols, HEAD_DIM: tl.constexpr):
    """Return offsets and mask of columns `cols` of a tile's tokens, [groups, rows, columns]."""
    groups, rows, _, _, num_groups, group_size = tile
    in_groups = (groups < num_groups)[:, None, None]
    mask = in_groups & (rows < group_size)[None, :, None] & (cols < HEAD_DIM)[None, None, :]
    at = (groups * strides[1])[:, None, None] + (rows * strides[2])[None, :, None]
    return at + cols[None, None, :], mask


@triton.jit
def load_tokens(ptr, strides, tile, HEAD_DIM: tl.constexpr):
    """Load columns a and b of a tile's tokens, each [groups, rows, pairs] in float32, 0 outside."""
    at, mask = _at_tokens(strides, tile, tile[2], HEAD_DIM)
    x_a = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    at, mask = _at_tokens(strides, tile, tile[3], HEAD_DIM)
    return x_a, tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tokens(ptr, x, strides, tile, HEAD_DIM: tl.constexpr, ADD: tl.constexpr):
    """Store both columns of a tile's tokens, or add to them."""
    for i in tl.static_range(2):
        at, mask = _at_tokens(strides, tile, tile[2 + i], HEAD_DIM)
        total = x[i]
        if ADD:
            total += tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(ptr + at, total.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _at_rows(stride, tile, cols, HEAD_DIM: tl.constexpr):
    """Return offsets and mask of columns `cols` of one row a group, [groups, columns]."""
    groups, _, _, _, num_groups, _ = tile
    mask = (groups < num_groups)[:, None] & (cols < HEAD_DIM)[None, :]
    return (groups * stride)[:, None] + cols[None, :], mask


@triton.jit
def load_row(ptr, stride, tile, HEAD_DIM: tl.constexpr):
    """Load columns a and b of one row for each group of a tile, as a query or a core token, each
    [groups, pairs] in float32, 0 outside."""
    at, mask = _at_rows(stride, tile, tile[2], HEAD_DIM)
    x_a = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    at, mask = _at_rows(stride, tile, tile[3], HEAD_DIM)
    return x_a, tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, x, stride, tile, HEAD_DIM: tl.constexpr):
    """Store both columns of one row for each group of a tile."""
    for i in tl.static_range(2):
        at, mask = _at_rows(stride, tile, tile[2 + i], HEAD_DIM)
        tl.store(ptr + at, x[i].to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def table_rows(cos_ptr, sin_ptr, rows, pairs, group_size, HALF: tl.constexpr):
    """Load the cosines and the sines of each token's rotation to the middle, [rows, pairs or 1]; 1
    and 0 where nothing rotates."""
    if HALF > 0:
        mask = (rows < group_size)[:, None] & (pairs < HALF)[None, :]
        at = (rows * HALF)[:, None] + pairs[None, :]
        cos = tl.load(cos_ptr + at, mask=mask, other=1.0)
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
    else:
        cos = (rows * 0).to(tl.float32)[:, None] + 1.0
        sin = cos - 1.0
    return cos, sin


@triton.jit
def pool_pairs(weights, k, cos, sin):
    """Return the weighted sums of keys rotated to the middle, columns a and b, [groups, pairs].

    Args:
        weights: [groups, rows, 1].
        k: Columns a and b, each [groups, rows, pairs].
        cos, sin: [rows, pairs or 1].
    """
    k_a, k_b = k
    rotated_a = k_a * cos[None, :, :] - k_b * sin[None, :, :]
    rotated_b = k_b * cos[None, :, :] + k_a * sin[None, :, :]
    return tl.sum(weights * rotated_a, 1), tl.sum(weights * rotated_b, 1)


@triton.jit
def capped(z, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return scores under the softcap, and its slope."""
    slope = tl.full(z.shape, 1.0, tl.float32)
    if HAS_SOFTCAP:
        x = z / softcap
        # tanh(x); near 0, where 1 - e would cancel digits, its series, exact to 1e-8.
        e = tl.exp(-2.0 * tl.abs(x))
        far = (1.0 - e) / (1.0 + e)
        y = x * x
        near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
        t = tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))
        z = softcap * t
        slope = 1.0 - t * t
    return z, slope


@triton.jit
def token_scores(q, k, rows, group_size, factors, HAS_SOFTCAP: tl.constexpr):
    """Return scores of tokens [groups, rows] in natural units, -inf outside, and softcap slopes."""
    products = tl.sum(q[0][:, None, :] * k[0], 2) + tl.sum(q[1][:, None, :] * k[1], 2)
    z, slope = capped(products * factors[0], factors[1], HAS_SOFTCAP)
    return tl.where((rows < group_size)[None, :], z, -float("inf")), slope


@triton.jit
def softmax(z):
    """Return the softmax over the rows of scores [groups, rows]."""
    probs = tl.exp(z - tl.max(z, 1)[:, None])
    return probs / tl.sum(probs, 1)[:, None]


@triton.jit
def entropy(weights):
    """Return the entropy of weights [groups, rows] in nats; a weight of 0 adds 0."""
    return -tl.sum(weights * tl.log(tl.maximum(weights, TINY)), 1)
