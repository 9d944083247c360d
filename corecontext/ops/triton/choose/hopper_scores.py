"""Score groups by index keys in 8 bits, for Hopper, written in Triton's Gluon.

The same rule as `score_kernels.group_scores_kernel`, which runs everywhere: a group's score is the
largest product of any of its keys with any query head. A program is three groups of warps: a
producer copies tiles of keys into shared memory by the tensor memory accelerator; two consumers own
64 shares of some heads each and multiply with asynchronous warpgroup instructions. A tile's keys
lie so that the largest of a group is found within a thread (`byte_keys.keys_kernel`).

Groups are counted in runs of 8, in blocks (`byte_keys.block_of`), whose keys fill whole tiles, and
in segments of blocks (`segments_of`). A program takes one item after the other: 128 shares of one
KV head and the segment of groups that they are scored against.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from corecontext.ops.fetch.index import Index
from corecontext.ops.fetch.low_bits import LowBits
from corecontext.ops.triton.attend.hopper_forward import num_programs
from corecontext.ops.triton.attend.shares import Choosing, groups_of_share
from corecontext.ops.triton.choose.byte_keys import MAX_DIM, TILE_KEYS, Bytes, block_of
from corecontext.ops.triton.choose.byte_keys import RUN as GROUP_RUN
from corecontext.ops.triton.launch import ceil_div, ints, launch
from corecontext.ops.triton.primitives import integers
from corecontext.ops.triton.tensor_memory import aligned, barriers, copy_in, descriptor, tiles

ROWS = gl.constexpr(64)  # shares of a consumer: rows of q and of scores
KEYS = gl.constexpr(TILE_KEYS)  # keys of a tile
RUN = gl.constexpr(GROUP_RUN)
MOST_HEADS = 4  # query heads whose queries are in shared memory
_MOST_BLOCKS = 128  # of groups, of a segment
_LEAST_BLOCKS = 4  # for which a program does not wait long for its queries
_TURNS = 4  # items of a program, where shorter segments can make as many
STAGES = gl.constexpr(8)  # tiles of keys in shared memory


@gluon.jit
def _blocks_of_item(item, work, places, GROUPS: gl.constexpr):
    """Return an item's KV head n, its first row, counted from first_row, and the first and one past
    the last of its blocks of GROUPS groups that its last share sees.

    Args:
        work: num_items, number of segments, items of a segment and KV head, blocks of a segment.
        places: first_row, num_rows, shares as of `groups_of_share`, rule and num_groups.
    """
    _, num_segments, row_tiles, segment = work
    first_row, num_rows, shares, rule, num_groups = places
    n = item // (num_segments * row_tiles)
    row = item % row_tiles * (2 * ROWS)
    last = first_row + gl.minimum(row + 2 * ROWS, num_rows) - 1
    groups = groups_of_share(last, shares, rule, num_groups)
    begin = item // row_tiles % num_segments * segment
    end = gl.minimum(begin + segment, (groups + GROUPS - 1) // GROUPS)
    return n, row, begin, end


@gluon.jit
def _copy_keys(HEADS: gl.constexpr, PARTS: gl.constexpr, descs, first_head, memory, work, places):
    """Copy the queries of each item, then its tiles of keys: the producer warp. The phase of a
    barrier, 0 or 1, changes with each use: `count` numbers those of queries, `step` of keys.

    Args:
        descs: Descriptors of queries and of keys.
        memory: Tiles of queries and of keys; then barriers: queries ready, free, keys ready, free.
        work, places: As of `_blocks_of_item`.
    """
    q_desc, k_desc = descs
    q_smem, k_smem, q_ready, q_free, k_ready, k_free = memory
    TILES: gl.constexpr = max(1, PARTS * RUN // KEYS)  # tiles of a block
    GROUPS: gl.constexpr = TILES * KEYS // PARTS  # groups of a block
    step = 0
    count = 0
    for item in range(gl.program_id(0), work[0], gl.num_programs(0)):
        n, row, begin, end = _blocks_of_item(item, work, places, GROUPS)
        if begin < end:
            for half in gl.static_range(2):
                mbarrier.wait(q_free.index(half), (count & 1) ^ 1)
                mbarrier.expect(q_ready.index(half), HEADS * q_desc.block_type.nbytes)
                for i in gl.static_range(HEADS):
                    at = [n, first_head + i, places[0] + row + half * ROWS, 0]
                    copy_in(q_desc, at, q_ready.index(half), q_smem.index(half * HEADS + i))
            count += 1
            for i in range(begin * TILES, end * TILES):
                slot = step % STAGES
                mbarrier.wait(k_free.index(slot), (step // STAGES & 1) ^ 1)
                mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
                copy_in(k_desc, [n, 0, i * KEYS, 0], k_ready.index(slot), k_smem.index(slot))
                step += 1


@gluon.jit
def _largest(s, so_far, PARTS: gl.constexpr):
    """Return the largest product of each group, of a tile's products s [ROWS, KEYS] and of
    `so_far` [ROWS, runs of a tile, RUN]."""
    TOGETHER: gl.constexpr = min(PARTS, KEYS // RUN)
    largest = gl.max(s.reshape([ROWS, KEYS // (RUN * TOGETHER), TOGETHER, RUN]), 2)
    return gl.maximum(so_far, largest)


@gluon.jit
def _products(q, k_smem, slot, largest, TILES: gl.constexpr, PARTS: gl.constexpr):
    """Return the largest product of each group of a block, whole numbers, not below `largest`. The
    product of a tile runs while the largest of the tile before are found."""
    DIM: gl.constexpr = q.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    zero = gl.zeros([ROWS, KEYS], gl.int32, layout)
    k = k_smem.index(slot).reshape([KEYS, DIM]).permute([1, 0])
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    for i in gl.static_range(1, TILES):
        k = k_smem.index(slot + i).reshape([KEYS, DIM]).permute([1, 0])
        following = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        # mutant hopper: products of a block's last tile alone
        largest = _largest(s, largest, PARTS)
        s = following
    s = warpgroup_mma_wait(0, [s])
    return _largest(s, largest, PARTS)


@gluon.jit
def _score_items(
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    MERGES: gl.constexpr,
    target,
    heads,
    memory,
    work,
    places,
):
    """Score all groups of an item for ROWS shares: a consumer.

    Args:
        HALF: Which of the two consumers, 0 or 1.
        target: Pointers to the units and offsets of queries, the units of groups, scores and the
            largest of each run; elements of a row of scores; units of groups of a KV head.
        heads: Query heads in all, the first of this launch, and the shares of the call.
        memory, work, places: As of `_copy_keys`.
    """
    unit_ptr, offset_ptr, group_unit_ptr, scores_ptr, best_ptr, stride_row, stride_unit = target
    num_heads, first_head, num_shares = heads
    q_smem, k_smem, q_ready, q_free, k_ready, k_free = memory
    first_row, num_rows, shares, rule, num_groups = places
    TILES: gl.constexpr = max(1, PARTS * RUN // KEYS)
    SETS: gl.constexpr = max(1, KEYS // (RUN * PARTS))  # runs of a block
    GROUPS: gl.constexpr = RUN * SETS
    DIM: gl.constexpr = q_smem.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    # Scores of a block are [ROWS, SETS, RUN], in the layout of the largest products of a tile.
    least = gl.full([ROWS, KEYS], -(2**31), gl.int32, layout)
    least = gl.max(least.reshape([ROWS, SETS, KEYS // GROUPS, RUN]), 2)
    whole: gl.constexpr = least.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, whole))
    by_set: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, whole))
    by_run: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, whole))
    lanes = gl.arange(0, ROWS, by_row)
    sets = gl.arange(0, SETS, by_set)
    within = (sets * RUN)[None, :, None] + gl.arange(0, RUN, by_run)[None, None, :]
    step = 0
    count = 0
    for item in range(gl.program_id(0), work[0], gl.num_programs(0)):
        n, row, begin, end = _blocks_of_item(item, work, places, GROUPS)
        if begin < end:
            offs = row + HALF * ROWS + lanes
            exists = offs < num_rows
            share = first_row + offs
            visible = groups_of_share(share, shares, rule, num_groups)[:, None, None]
            flat = n.to(gl.int64) * num_rows + offs
            place = scores_ptr + flat[:, None, None] * stride_row
            runs = best_ptr + flat[:, None] * (stride_row // RUN) + sets[None, :]
            first = (n * num_heads + first_head).to(gl.int64) * num_shares + share
            mbarrier.wait(q_ready.index(HALF), count & 1)
            for i in range(begin, end):
                group = i * GROUPS + within
                group_unit = gl.load(group_unit_ptr + n * stride_unit + group)
                scores = gl.full([ROWS, SETS, RUN], -float("inf"), gl.float32, whole)
                if MERGES:
                    scores = gl.load(place + group, mask=exists[:, None, None], other=0.0)
                slot = step % STAGES
                for j in gl.static_range(TILES):
                    mbarrier.wait(k_ready.index(slot + j), step // STAGES & 1)
                for j in range(HEADS):
                    head = first + j * num_shares
                    unit = gl.load(unit_ptr + head, mask=exists, other=0.0)[:, None, None]
                    offset = gl.load(offset_ptr + head, mask=exists, other=0.0)[:, None, None]
                    q = q_smem.index(HALF * HEADS + j).reshape([ROWS, DIM])
                    largest = _products(q, k_smem, slot, least, TILES, PARTS)
                    product = largest.to(gl.float32) * (unit * group_unit) + offset
                    scores = gl.maximum(scores, product)
                for j in gl.static_range(TILES):
                    mbarrier.arrive(k_free.index(slot + j))
                step += TILES
                scores = gl.where(group < visible, scores, -float("inf"))
                gl.store(place + group, scores, mask=exists[:, None, None])
                gl.store(runs + i * SETS, gl.max(scores, 2), mask=exists[:, None])
            mbarrier.arrive(q_free.index(HALF))
            count += 1


@gluon.jit
def score_bytes_hopper(
    q_desc,
    k_desc,
    rounded,
    results,
    segments,
    rows,
    shares,
    rule,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    MERGES: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """Write the scores of the groups that each share sees, [N, num_rows, stride_row] in float32, of
    the shares first_row .. first_row + num_rows - 1 of the call, and the largest of each run of
    groups, [N, num_rows, stride_row / RUN].

    Grid: as many programs as the chip has multiprocessors, or items if fewer. Program i takes items
    i, i + programs, ...; items go through the KV heads one after the other.

    Args:
        q_desc, k_desc: Descriptors of the queries and keys of `Bytes`.
        rounded: Pointers to the units and offsets of queries, and to the units of groups.
        results: Pointers to scores and to the largest of each run.
        segments: Number of segments, blocks of each, and groups; by `launch.ints`, as all below.
        rows: First head, first_row, num_rows, elements of a row of scores, and units of groups of a
            KV head.
        shares: As of `groups_of_share`.
        HEADS: Query heads of this launch.
        PARTS: Keys of a group.
        MERGES: Whether an earlier launch stored scores of other query heads: the larger one stays.
        BLOCK_D: Columns of a tile, by which `launch` tells apart descriptors.
    """
    num_segments, segment, num_groups = integers(segments)
    first_head, first_row, num_rows, stride_row, stride_unit = integers(rows)
    q_smem = tiles(q_desc, 2 * HEADS)
    k_smem = tiles(k_desc, STAGES)
    # The producer arrives at `ready`; a consumer at its `free` of queries, both at that of keys.
    q_ready = barriers(2, 1)
    q_free = barriers(2, 1)
    k_ready = barriers(STAGES, 1)
    k_free = barriers(STAGES, 2)
    fence_async_shared()

    memory = (q_smem, k_smem, q_ready, q_free, k_ready, k_free)
    row_tiles = (num_rows + 2 * ROWS - 1) // (2 * ROWS)
    num_items = q_desc.shape[0] * num_segments * row_tiles
    work = (num_items, num_segments, row_tiles, segment)
    places = (first_row, num_rows, integers(shares), integers(rule), num_groups)
    target = rounded + results + (stride_row, stride_unit)
    heads = (q_desc.shape[1], first_head, q_desc.shape[2])
    scoring = (target, heads, memory, work, places)
    copying = ((q_desc, k_desc), first_head, memory, work, places)
    gl.warp_specialize(
        [
            (_score_items, (0, HEADS, PARTS, MERGES) + scoring),
            (_score_items, (1, HEADS, PARTS, MERGES) + scoring),
            (_copy_keys, (HEADS, PARTS) + copying),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of a thread of each
    )


class ByteScorer(NamedTuple):
    """Score groups in 8 bits: a `select.Scorer`."""

    numbers: Bytes

    @property
    def queries(self) -> Tensor:
        """The queries of shares, [N, r, C, D'] in int8."""
        return self.numbers.queries

    @property
    def num_groups(self) -> int:
        """Groups: M."""
        return self.numbers.num_groups

    def width(self, num_groups: int) -> int:
        """Return the elements of a row of scores: whole blocks of groups."""
        block = block_of(self.numbers.num_keys)
        return block * ceil_div(num_groups, block)

    def score(self, settings: Choosing, first_row: int, scores: Tensor, best: Tensor) -> None:
        """Fill the scores [N, rows, groups] of the shares from first_row on, -inf for what a share
        does not see, and the largest of each run of groups, [N, rows, groups / RUN]."""
        numbers = self.numbers
        q, k = aligned(numbers.queries), aligned(numbers.keys)
        n, r = q.shape[:2]
        rows, width = scores.shape[1:]
        blocks = width // block_of(numbers.num_keys)
        row_tiles = n * ceil_div(rows, 2 * ROWS.value)
        segments = segments_of(blocks, row_tiles, num_programs(q.device))
        num_items = segments * row_tiles
        for first_head in range(0, r, MOST_HEADS):
            launch(
                score_bytes_hopper,
                (min(num_programs(q.device), num_items),),
                (
                    *(descriptor(q, ROWS.value), descriptor(k, KEYS.value)),
                    (numbers.units, numbers.offsets, numbers.group_units),
                    (scores, best),
                    ints(segments, ceil_div(blocks, segments), numbers.num_groups),
                    ints(first_head, first_row, rows, width, numbers.group_units.shape[1]),
                    ints(settings.first_share, settings.share, settings.q_end),
                    ints(*settings.rule),
                ),
                HEADS=min(MOST_HEADS, r - first_head),
                PARTS=numbers.num_keys,
                MERGES=first_head > 0,
                BLOCK_D=q.shape[3],
                num_warps=4,
            )


def segments_of(blocks: int, row_tiles: int, programs: int) -> int:
    """Return into how many segments blocks of groups are divided, for so many tiles of shares of
    all KV heads: a chunk of a prompt has few, which would leave programs idle."""
    for_all = min(_TURNS * programs // row_tiles, ceil_div(blocks, _LEAST_BLOCKS))
    return max(for_all, ceil_div(blocks, _MOST_BLOCKS))


def takes(index: Index, group_size: int, dim: int) -> bool:
    """Whether this kernel can score by an index, where `hopper_forward` takes device and dtype."""
    if not isinstance(index, LowBits) or dim > MAX_DIM:
        return False
    num_keys = index.num_keys(group_size)
    return group_size % num_keys == 0 and num_keys in (1, 2, 4, 8, 16, 32, 64)
