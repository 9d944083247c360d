"""Write an index in low bits beside the core tokens in their pages (`ops/fetch/low_bits.py`).

A group has its index as soon as its centre's tokens are there, as in a cache: with the group whose
last token follows its own by the tokens that the centre counts, less a group. The centre is the
mean of a sequence's first keys; it is written with the first index, and read from then on.
"""

import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode.plan import Tile, index_form
from corecontext.ops.triton.decode.write_index import encode_keys
from corecontext.ops.triton.launch import ints, launch, power_of_2
from corecontext.ops.triton.paged.pages import (
    Batch,
    IndexPages,
    Pages,
    num_blocks,
    owned_block,
    page_offsets,
)
from corecontext.ops.triton.primitives import integers, tile_mask

_CENTRE_ROWS = tl.constexpr(32)


@triton.jit
def _index_pages_kernel(
    keys_ptr,
    index,
    page_tables,
    sequences,
    numbers,
    strides,
    page_sizes,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    INDEX: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the index of the group of one KV head whose turn it is when new tokens complete a later
    one.

    Grid: (blocks of GROUP new tokens, Hkv).

    Args:
        keys_ptr: Raw keys in pages.
        index: Pointers to codes, scales, centres and the rotation in float32.
        page_tables, sequences: As of `_pool_pages_kernel`.
        numbers: Sequences, and tokens behind the first ones that the centre counts, whole groups.
        strides: Of pages of raw tokens, of codes, of scales and of centres, and of both tables'
            rows.
        page_sizes: Entries of a page of raw tokens and of core tokens.
    """
    num_sequences, num_centred = integers(numbers)
    codes_ptr, scales_ptr, centre_ptr, rotation_ptr = index
    starts_ptr, lengths_ptr = sequences
    page_strides, codes_strides, scales_strides, centre_strides, table_strides = strides
    KEYS: tl.constexpr = INDEX.keys
    BYTES: tl.constexpr = (TILE.dim * INDEX.bits + 7) // 8
    FIRST: tl.constexpr = SINKS // GROUP
    sequence, block = owned_block(starts_ptr, num_sequences, tl.program_id(0), GROUP)
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + sequence)
    past = length - (tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence))
    completed = past // GROUP + block
    group = completed - (num_centred // GROUP - 1)
    # mutant vllm: an index is written a group too late
    if (completed * GROUP + GROUP <= length) & (group >= FIRST):
        keys_ptr += head * page_strides[2]
        table_ptr = page_tables[0] + sequence.to(tl.int64) * table_strides[0]
        dims = tl.arange(0, TILE.block_d)
        in_dims = dims < TILE.dim

        # The mean key of the first tokens, which are new ones where it was not written before.
        core_table_ptr = page_tables[1] + sequence.to(tl.int64) * table_strides[1]
        page = tl.load(core_table_ptr).to(tl.int64)
        centre_at = centre_ptr + page * centre_strides[0] + head * centre_strides[1] + dims
        num_read = tl.where(past < SINKS + num_centred, 0, TILE.dim)
        num_written = tl.where(group == FIRST, TILE.dim, 0)
        total = tl.full([TILE.block_d], 0.0, tl.float32)
        rows = tl.arange(0, _CENTRE_ROWS)
        for start in range(0, tl.where(num_read > 0, 0, num_centred), _CENTRE_ROWS):
            inside = start + rows < num_centred
            at = page_offsets(table_ptr, SINKS + start + rows, inside, page_strides, page_sizes[0])
            mask = inside[:, None] & in_dims[None, :]
            keys = tl.load(keys_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
            total += tl.sum(keys.to(tl.float32), 0)
        # mutant vllm: an index is centred by another sequence's mean
        centre = tl.load(centre_at, mask=dims < num_read, other=0.0) + total / num_centred
        tl.store(centre_at, centre, mask=dims < num_written)

        # The means of the group's parts, without it.
        key = tl.arange(0, INDEX.block_p)
        mask = tile_mask(key, KEYS, dims, TILE.dim)
        means = tl.full([INDEX.block_p, TILE.block_d], 0.0, tl.float32)
        SIZE: tl.constexpr = GROUP // KEYS
        for i in range(SIZE):
            token = group * GROUP + key * SIZE + i
            at = page_offsets(table_ptr, token, key < KEYS, page_strides, page_sizes[0])
            keys = tl.load(keys_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
            means += keys.to(tl.float32)
        means = tl.where(mask, means / SIZE - centre[None, :], 0.0)

        packed, scales = encode_keys(means, rotation_ptr, INDEX, TILE)
        page = tl.load(core_table_ptr + group // page_sizes[1]).to(tl.int64)
        entry = group % page_sizes[1]
        cols = tl.arange(0, INDEX.block_c)
        codes_ptr += page * codes_strides[0] + entry * codes_strides[1] + head * codes_strides[2]
        at = key[:, None] * BYTES + cols[None, :]
        tl.store(codes_ptr + at, packed.to(tl.uint8), mask=tile_mask(key, KEYS, cols, BYTES))
        scales_ptr += page * scales_strides[0] + entry * scales_strides[1]
        scales_ptr += head * scales_strides[2]
        tl.store(scales_ptr + key, scales.to(scales_ptr.dtype.element_ty), mask=key < INDEX.scales)


def write_index(
    num_new: int, batch: Batch, raw: Pages, table: Tensor, index: IndexPages, spec: Spec
) -> None:
    """Write the index of groups whose turn it is with the groups that new tokens complete.

    Args:
        num_new: New tokens of the batch.
        raw: Holds the new tokens already.
        table: That of core tokens.
    """
    dim = raw.k.shape[3]
    block_d = max(16, power_of_2(dim))
    # Queries and entries have no part in it.
    tile = Tile(1, dim, 1, 1, block_d, vector=False, stages=1)
    launch(
        _index_pages_kernel,
        (num_blocks(num_new, batch.lengths.shape[0], spec.group_size), raw.k.shape[2]),
        (
            *(raw.k, (*index[:3], index.rotations[1]), (raw.table, table)),
            (batch.starts, batch.lengths),
            ints(batch.lengths.shape[0], spec.num_centred),
        ),
        (
            (
                *(x.stride()[:3] for x in (raw.k, index.codes, index.scales)),
                index.centres.stride()[:2],
                (raw.table.stride(0), table.stride(0)),
            ),
            (raw.k.shape[1], index.codes.shape[1]),
        ),
        SINKS=spec.sinks,
        GROUP=spec.group_size,
        INDEX=index_form(spec, dim),
        TILE=tile,
        num_warps=4,
    )
