"""Write an index in low bits (`ops/fetch/low_bits.py`) beside the core tokens in their pages. The
kernel that pools groups calls this at its end.

The centre, which is taken from all keys of the index, is the mean of `num_centred` keys behind the
sinks. So the first group can have an index only when the last of these tokens is there. Each later
group waits as long: when group c is complete, group c - (num_centred / g - 1) gets its index. The
centre is stored with the first index, and read from then on.
"""

import triton
import triton.language as tl

from corecontext.ops.triton.decode.write_index import store_index
from corecontext.ops.triton.paged.sequence_rows import load_rows, rows_of
from corecontext.ops.triton.primitives import tile_mask

_CENTRE_ROWS = tl.constexpr(32)


@triton.jit
def _sum_of_keys(
    keys,
    sequence,
    count,
    page_strides,
    PAGE: tl.constexpr,
    SINKS: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the sum of the first `count` keys behind the sinks, of MOST at most, [D]."""
    dims = tl.arange(0, TILE.block_d)
    number = tl.arange(0, _CENTRE_ROWS)
    # All loads are on their way before the first sum: a loop would wait for each.
    total = tl.full([_CENTRE_ROWS, TILE.block_d], 0.0, tl.float32)
    for start in tl.static_range(0, MOST, _CENTRE_ROWS):
        inside = start + number < count
        rows = rows_of(SINKS + start + number, inside, sequence, page_strides, PAGE)
        total += load_rows(keys, rows, dims, dims < TILE.dim).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def write_group_index(
    keys,
    index,
    sequence,
    core_table_ptr,
    place,
    strides,
    PAGES: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    CENTRED: tl.constexpr,
    INDEX: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the index of the earlier group that waited for group `completed`, for one KV head.

    Args:
        keys: Raw keys of the KV head, as `load_rows` takes them.
        index: Pointers to codes, scales, centres and the signs of the rotation.
        sequence: As of `rows_of`.
        core_table_ptr: The sequence's table of core tokens.
        place: The KV head; the number of the group that new tokens complete, if they do; tokens of
            the sequence.
        strides: Of pages of raw tokens, of codes, of scales and of centres, named one by one:
            Triton 3.6 cannot pass on a slice of strides where one is 1.
        PAGES: Entries of a page of raw tokens and of core tokens.
        CENTRED: Tokens behind the sinks that the centre counts, whole groups.
    """
    codes_ptr, scales_ptr, centre_ptr, signs_ptr = index
    head, completed, length = place
    page_strides, codes_strides, scales_strides, centre_strides = strides
    KEYS: tl.constexpr = INDEX.keys
    FIRST: tl.constexpr = SINKS // GROUP
    group = completed - (CENTRED // GROUP - 1)
    # mutant vllm: an index is written a group too late
    if (completed * GROUP + GROUP <= length) & (group >= FIRST):
        dims = tl.arange(0, TILE.block_d)

        # The centre: read, if an earlier step has stored it, else the mean of its tokens' keys.
        page = tl.load(core_table_ptr).to(tl.int64)
        centre_at = centre_ptr + page * centre_strides[0] + head * centre_strides[1] + dims
        num_read = tl.where(sequence[1] < SINKS + CENTRED, 0, TILE.dim)
        num_written = tl.where(group == FIRST, TILE.dim, 0)
        count = tl.where(num_read > 0, 0, CENTRED)
        total = _sum_of_keys(keys, sequence, count, page_strides, PAGES[0], SINKS, CENTRED, TILE)
        # mutant vllm: an index is centred by another sequence's mean
        centre = tl.load(centre_at, mask=dims < num_read, other=0.0) + total / CENTRED
        tl.store(centre_at, centre, mask=dims < num_written)

        # The group's keys in the index are the means of its parts, less the centre.
        key = tl.arange(0, INDEX.block_p)
        mask = tile_mask(key, KEYS, dims, TILE.dim)
        means = tl.full([INDEX.block_p, TILE.block_d], 0.0, tl.float32)
        SIZE: tl.constexpr = GROUP // KEYS
        for i in range(SIZE):
            token = group * GROUP + key * SIZE + i
            rows = rows_of(token, key < KEYS, sequence, page_strides, PAGES[0])
            means += load_rows(keys, rows, dims, dims < TILE.dim).to(tl.float32)
        means = tl.where(mask, means / SIZE - centre[None, :], 0.0)

        page = tl.load(core_table_ptr + group // PAGES[1]).to(tl.int64)
        entry = group % PAGES[1]
        codes_ptr += page * codes_strides[0] + entry * codes_strides[1] + head * codes_strides[2]
        scales_ptr += page * scales_strides[0] + entry * scales_strides[1]
        scales_ptr += head * scales_strides[2]
        store_index(means, (codes_ptr, scales_ptr, signs_ptr), INDEX, TILE)
