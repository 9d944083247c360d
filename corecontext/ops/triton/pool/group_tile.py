"""Device functions that the pooling kernels share: tiles of groups, the rotation to a group's
middle, scores.

A tile is the tuple (groups, rows, cols, num_groups, group_size): which groups, tokens of a group
and columns it holds, and how many groups and tokens there are.

Rotating to the middle position costs no second read of K: with c and s the cosines and sines of a
row of the table, sum_o phi_o R_o k_o = sum_o phi_o c_o k_o + swap(sum_o phi_o s_o k_o), where swap
exchanges the two elements of a pair with a sign. So elements are exchanged in the one pooled row,
and in the backward in the one row dK (docs/math.md, eq. 3 and 10).
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def rotation_pairs(BLOCK_D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return for each column its number, its column in the tables, its partner in the rotation, and
    the partner's sign; a column that does not rotate is its own partner with sign 0."""
    cols = tl.arange(0, BLOCK_D)
    if INTERLEAVED:
        first = cols % 2 == 0
        pair = cols // 2
        partner = tl.where(first, cols + 1, cols - 1)
    else:
        first = cols < HALF
        pair = tl.where(first, cols, cols - HALF)
        partner = tl.where(first, cols + HALF, cols - HALF)
    rotates = cols < 2 * HALF
    partner = tl.where(rotates, partner, cols)
    sign = tl.where(rotates, tl.where(first, -1.0, 1.0), 0.0)
    return cols, pair, partner, sign


@triton.jit
def column_pairs(
    BLOCK_P: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Return the numbers of BLOCK_P pairs, and the two columns of each. Columns that do not rotate
    are in pairs from HALF on. Loaded as two tiles, the elements of a pair meet in one thread."""
    pairs = tl.arange(0, BLOCK_P)
    if INTERLEAVED:
        a = 2 * pairs
        b = 2 * pairs + 1
    elif HALF == 0 or 2 * HALF == HEAD_DIM:
        a = pairs
        b = pairs + HEAD_DIM // 2
    else:
        a = tl.where(pairs < HALF, pairs, pairs + HALF)
        b = tl.where(pairs < HALF, pairs + HALF, pairs + HEAD_DIM // 2)
    return pairs, a, b


@triton.jit
def _tokens_at(strides, tile, HEAD_DIM: tl.constexpr):
    """Return the offsets and the mask of a tile's tokens, [groups, rows, columns]."""
    groups, rows, cols, num_groups, group_size = tile
    in_groups = (groups < num_groups)[:, None, None]
    mask = in_groups & (rows < group_size)[None, :, None] & (cols < HEAD_DIM)[None, None, :]
    at = (groups * strides[1])[:, None, None] + (rows * strides[2])[None, :, None]
    return at + cols[None, None, :], mask


@triton.jit
def load_tokens(ptr, strides, tile, HEAD_DIM: tl.constexpr):
    """Load the tokens of a tile, [groups, rows, columns] in float32, 0 outside."""
    at, mask = _tokens_at(strides, tile, HEAD_DIM)
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tokens(ptr, x, strides, tile, HEAD_DIM: tl.constexpr, ADD: tl.constexpr):
    """Store the tokens of a tile, or add to them."""
    at, mask = _tokens_at(strides, tile, HEAD_DIM)
    if ADD:
        x += tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_row(ptr, stride, tile, HEAD_DIM: tl.constexpr):
    """Load one row for each group of a tile, [groups, columns] in float32, 0 outside."""
    groups, _, cols, num_groups, _ = tile
    mask = (groups < num_groups)[:, None] & (cols < HEAD_DIM)[None, :]
    at = (groups * stride)[:, None] + cols[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, x, stride, tile, HEAD_DIM: tl.constexpr):
    """Store one row for each group of a tile."""
    groups, _, cols, num_groups, _ = tile
    mask = (groups < num_groups)[:, None] & (cols < HEAD_DIM)[None, :]
    at = (groups * stride)[:, None] + cols[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def table_rows(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF: tl.constexpr):
    """Load cosines and sines of each row's rotation to the middle, [rows, columns or 1]; 1 and 0
    where nothing rotates."""
    if HALF > 0:
        mask = (rows < group_size)[:, None] & (cols < 2 * HALF)[None, :]
        at = (rows * HALF)[:, None] + pair[None, :]
        cos = tl.load(cos_ptr + at, mask=mask, other=1.0)
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
    else:
        cos = (rows * 0).to(tl.float32)[:, None] + 1.0
        sin = cos - 1.0
    return cos, sin


@triton.jit
def load_tables(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF: tl.constexpr):
    """Load the same for tiles of groups, [1, rows, columns or 1]."""
    cos, sin = table_rows(cos_ptr, sin_ptr, rows, cols, pair, group_size, HALF)
    return cos[None, :, :], sin[None, :, :]


@triton.jit
def swap_pairs(x, partner, sign, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr):
    """Exchange the elements of each pair in x [BLOCK_M, BLOCK_D], then negate the first of them."""
    if HALF > 0:
        x = tl.gather(x, tl.broadcast_to(partner[None, :], [BLOCK_M, BLOCK_D]), 1) * sign[None, :]
    return x


@triton.jit
def pool_keys(
    weights,
    k,
    rotation,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return the weighted sum of keys rotated to the middle, [groups, columns]; rotation is (cos,
    sin, partner, sign)."""
    cos, sin, partner, sign = rotation
    weighted = weights[:, :, None] * k
    if HALF > 0:
        pooled = tl.sum(weighted * cos, 1)
        pooled += swap_pairs(tl.sum(weighted * sin, 1), partner, sign, BLOCK_M, BLOCK_D, HALF)
    else:
        pooled = tl.sum(weighted, 1)
    return pooled


@triton.jit
def rotate_back(x, swapped, cos, sin, HALF: tl.constexpr):
    """Rotate rows x [groups, columns] from the middle back to each token, [groups, rows, columns];
    swapped is x after `swap_pairs`."""
    if HALF > 0:
        back = x[:, None, :] * cos - swapped[:, None, :] * sin
    else:
        back = x[:, None, :] + cos * 0.0
    return back


@triton.jit
def capped(z, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return scores under the softcap, and its slope."""
    slope = tl.full(z.shape, 1.0, tl.float32)
    if HAS_SOFTCAP:
        x = z / softcap
        # Near 0 the quotient would lose the digits that 1 - exp cancels: there the series, exact to
        # 1e-8.
        e = tl.exp(-2.0 * tl.abs(x))
        far = (1.0 - e) / (1.0 + e)
        y = x * x
        near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
        t = tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))
        z = softcap * t
        slope = 1.0 - t * t
    return z, slope


@triton.jit
def token_scores(q, k, rows, group_size, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the scores of tokens under their group's query, [groups, rows], -inf outside, and the
    slope of the softcap."""
    z, slope = capped(tl.sum(q[:, None, :] * k, 2) * scale, softcap, HAS_SOFTCAP)
    return tl.where((rows < group_size)[None, :], z, -float("inf")), slope


@triton.jit
def softmax(z):
    """Return the softmax over the rows of scores [groups, rows]."""
    probs = tl.exp(z - tl.max(z, 1)[:, None])
    return probs / tl.sum(probs, 1)[:, None]
