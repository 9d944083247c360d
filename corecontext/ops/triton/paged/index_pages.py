"""Write an index in low bits (`ops/fetch/low_bits.py`) beside the core tokens in their pages. The
kernel that pools groups calls this at its end.

The centre, which is taken from all keys of the index, is the mean of `num_centred` keys behind the
sinks. So the first group can have an index only when the last of these tokens is there. Each later
group waits as long: when group c is complete, group c - (num_centred / g - 1) gets its index. The
centre is stored with the first index, and read from then on.
"""

import triton
import triton.language as tl

from corecontext.ops.triton.decode.write_index import encode_keys
from corecontext.ops.triton.paged.pages import page_offsets
from corecontext.ops.triton.primitives import tile_mask

_CENTRE_ROWS = tl.constexpr(32)


@triton.jit
def write_group_index(
    keys_ptr,
    index,
    tables,
    place,
    num_centred,
    strides,
    PAGES: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    INDEX: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the index of the earlier group that waited for group `completed`, for one KV head.

    Args:
        keys_ptr: Raw keys of the KV head in pages.
        index: Pointers to codes, scales, centres and the rotation in float32.
        tables: Pointers to the sequence's tables of raw tokens and of core tokens.
        place: The KV head; the number of the group that new tokens complete, if they do; tokens of
            the sequence; its tokens before the new ones.
        num_centred: Tokens behind the sinks that the centre counts, whole groups.
        strides: Of pages of raw tokens, of codes, of scales and of centres, named one by one:
            Triton 3.6 cannot pass on a slice of strides where one is 1.
        PAGES: Entries of a page of raw tokens and of core tokens.
    """
    codes_ptr, scales_ptr, centre_ptr, rotation_ptr = index
    table_ptr, core_table_ptr = tables
    head, completed, length, past = place
    page_strides, codes_strides, scales_strides, centre_strides = strides
    KEYS: tl.constexpr = INDEX.keys
    BYTES: tl.constexpr = (TILE.dim * INDEX.bits + 7) // 8
    FIRST: tl.constexpr = SINKS // GROUP
    group = completed - (num_centred // GROUP - 1)
    # mutant vllm: an index is written a group too late
    if (completed * GROUP + GROUP <= length) & (group >= FIRST):
        dims = tl.arange(0, TILE.block_d)
        in_dims = dims < TILE.dim

        # The centre: read, if an earlier step has stored it, else the mean of its tokens' keys.
        page = tl.load(core_table_ptr).to(tl.int64)
        centre_at = centre_ptr + page * centre_strides[0] + head * centre_strides[1] + dims
        num_read = tl.where(past < SINKS + num_centred, 0, TILE.dim)
        num_written = tl.where(group == FIRST, TILE.dim, 0)
        total = tl.full([TILE.block_d], 0.0, tl.float32)
        rows = tl.arange(0, _CENTRE_ROWS)
        for start in range(0, tl.where(num_read > 0, 0, num_centred), _CENTRE_ROWS):
            inside = start + rows < num_centred
            at = page_offsets(table_ptr, SINKS + start + rows, inside, page_strides, PAGES[0])
            mask = inside[:, None] & in_dims[None, :]
            keys = tl.load(keys_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
            total += tl.sum(keys.to(tl.float32), 0)
        # mutant vllm: an index is centred by another sequence's mean
        centre = tl.load(centre_at, mask=dims < num_read, other=0.0) + total / num_centred
        tl.store(centre_at, centre, mask=dims < num_written)

        # The group's keys in the index are the means of its parts, less the centre.
        key = tl.arange(0, INDEX.block_p)
        mask = tile_mask(key, KEYS, dims, TILE.dim)
        means = tl.full([INDEX.block_p, TILE.block_d], 0.0, tl.float32)
        SIZE: tl.constexpr = GROUP // KEYS
        for i in range(SIZE):
            token = group * GROUP + key * SIZE + i
            at = page_offsets(table_ptr, token, key < KEYS, page_strides, PAGES[0])
            keys = tl.load(keys_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
            means += keys.to(tl.float32)
        means = tl.where(mask, means / SIZE - centre[None, :], 0.0)

        packed, scales = encode_keys(means, rotation_ptr, INDEX, TILE)
        page = tl.load(core_table_ptr + group // PAGES[1]).to(tl.int64)
        entry = group % PAGES[1]
        cols = tl.arange(0, INDEX.block_c)
        codes_ptr += page * codes_strides[0] + entry * codes_strides[1] + head * codes_strides[2]
        at = key[:, None] * BYTES + cols[None, :]
        tl.store(codes_ptr + at, packed.to(tl.uint8), mask=tile_mask(key, KEYS, cols, BYTES))
        scales_ptr += page * scales_strides[0] + entry * scales_strides[1]
        scales_ptr += head * scales_strides[2]
        tl.store(scales_ptr + key, scales.to(scales_ptr.dtype.element_ty), mask=key < INDEX.scales)
