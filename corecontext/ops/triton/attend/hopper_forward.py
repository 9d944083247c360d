"""Attend over [core tokens; local tokens] on Hopper (compute capability 9.0), in Triton's Gluon.

The same mathematics as `anywhere.py`, whose kernels run everywhere. Here a program is three groups
of warps. The *producer* copies keys and values into shared memory by the tensor memory accelerator.
Two *consumers* own 64 queries each, multiply with asynchronous warpgroup instructions and take
turns, so that the softmax of one runs under the products of the other. Tiles of the far past and
tiles of raw tokens form one sequence of key tiles; tiles that all rows see whole have no mask.

Groups of warps wait for each other at *barriers* in shared memory. A barrier counts phases 0, 1, 2
and so on. A phase ends when as many arrivals have come as `barriers` was given, and all bytes that
`mbarrier.expect`, itself an arrival, has announced. `mbarrier.wait(barrier, p)` waits until a phase
of parity p has ended; before phase 0 one of parity 1 has. Each place of a ring of STAGES has two
barriers: readers wait for `ready`, the writer for `free`. Step i is use i // STAGES of its place,
so readers wait with the parity of that number, the writer with the other: it need not wait at
first.

The file is long because the three groups of warps are one algorithm.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from corecontext.ops.capability import nvidia_capability
from corecontext.ops.spec import Spec, Tokens
from corecontext.ops.triton.attend.anywhere import rule_of, shape_of
from corecontext.ops.triton.attend.far_past import FarPast
from corecontext.ops.triton.attend.marks import Marks, marks_of_rows
from corecontext.ops.triton.attend.mass_parts import MASS_PARTS, mass_parts
from corecontext.ops.triton.launch import ceil_div, launch, power_of_2
from corecontext.ops.triton.primitives import LN2, LOG2E, visible_cores, visible_entries
from corecontext.ops.triton.tensor_memory import (
    DTYPES,
    aligned,
    barriers,
    copy_in,
    copy_out,
    descriptor,
    tiles,
    wait_out,
)

BLOCK_M = gl.constexpr(64)  # queries of a consumer
ITEM_ROWS = gl.constexpr(128)  # queries of both consumers
MASS_COLUMNS = gl.constexpr(MASS_PARTS)  # the least inner size of a product
STAGES = gl.constexpr(2)  # tiles of keys, and of values, in shared memory
CACHE_BYTES = 16 << 20  # of the far past in use at a time, so that it stays in the L2 cache


@gluon.jit
def _work_item(index, work, places, BLOCK_N: gl.constexpr):
    """Return of work item `index`, ITEM_ROWS queries of a head, the head, the first row, the number
    of key tiles of the far past and of all key tiles, and the first raw token.

    Heads come in turns, few enough at a time that their far past stays in the L2 cache; of those,
    tiles that see most first. Every second round runs backwards, so that programs get equal work.

    Args:
        work: num_items, num_tiles (items of a head), num_heads, heads_per_turn, heads_per_n (r).
        places: q_start, num_queries, group_size, window_size, sink_groups.
    """
    num_items, num_tiles, num_heads, heads_per_turn, _ = work
    q_start, num_queries, group_size, window_size, sink_groups = places
    round = index // gl.num_programs(0)
    begin = round * gl.num_programs(0)
    end = gl.minimum(begin + gl.num_programs(0), num_items)
    index = gl.where(round % 2 == 0, index, begin + end - 1 - index)
    turn = index // (heads_per_turn * num_tiles)
    within = index - turn * heads_per_turn * num_tiles
    heads = gl.minimum(heads_per_turn, num_heads - turn * heads_per_turn)
    head = turn * heads_per_turn + within % heads
    row = (num_tiles - 1 - within // heads) * ITEM_ROWS
    local = visible_cores(q_start + row, group_size, window_size) * group_size
    last = q_start + gl.minimum(row + ITEM_ROWS, num_queries) - 1
    groups = visible_cores(last, group_size, window_size)
    far_tiles = (visible_entries(groups, group_size, sink_groups) + BLOCK_N - 1) // BLOCK_N
    return head, row, far_tiles, far_tiles + (last - local + BLOCK_N) // BLOCK_N, local


@gluon.jit
def _copy_tiles(
    HAS_MASSES: gl.constexpr, BLOCK_N: gl.constexpr, source, queries, sizes, ring, work, places
):
    """Copy the queries of each item, then its key and value tiles in turn: the producer warp.

    Args:
        source: Descriptors of q, k, v and of keys, values and masses of the far past.
        queries: Shared memory of both consumers' queries, and its barriers `ready` and `free`.
        sizes: Position of the first raw token, and number of entries.
        ring: Shared memory of keys, of values and of the keys' masses, which use the keys'
            barriers; barriers `ready` and `free` of keys, then of values.
        work, places: As of `_work_item`.
    """
    q_desc, k_desc, v_desc, far_k_desc, far_v_desc, mass_desc = source
    q_smem, q_ready, q_free = queries
    k_start, num_entries = sizes
    k_smem, v_smem, mass_smem, k_ready, k_free, v_ready, v_free = ring
    num_items = work[0]
    heads_per_n = work[4]
    step = 0  # key tiles so far, of all items
    count = 0  # items so far
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, row, far_tiles, tiles, local = _work_item(index, work, places, BLOCK_N)
        n = head // heads_per_n
        r = head % heads_per_n
        for half in gl.static_range(2):
            mbarrier.wait(q_free.index(half), (count & 1) ^ 1)
            mbarrier.expect(q_ready.index(half), q_desc.block_type.nbytes)
            at = [n, r, row + BLOCK_M * half, 0]
            copy_in(q_desc, at, q_ready.index(half), q_smem.index(half))
        for i in range(tiles):
            stage = step % STAGES
            phase = (step // STAGES & 1) ^ 1  # parity
            is_far = i < far_tiles
            token = local - k_start + (i - far_tiles) * BLOCK_N
            mbarrier.wait(k_free.index(stage), phase)
            if HAS_MASSES:
                num_bytes: gl.constexpr = k_desc.block_type.nbytes + mass_desc.block_type.nbytes
                mbarrier.expect(k_ready.index(stage), num_bytes)
                # Raw tokens have mass 0, which is read behind the last entry.
                at = [n, 0, gl.where(is_far, i * BLOCK_N, num_entries), 0]
                copy_in(mass_desc, at, k_ready.index(stage), mass_smem.index(stage))
            else:
                mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
            if is_far:
                at = [n, 0, i * BLOCK_N, 0]
                copy_in(far_k_desc, at, k_ready.index(stage), k_smem.index(stage))
            else:
                copy_in(k_desc, [n, 0, token, 0], k_ready.index(stage), k_smem.index(stage))
            # mutant hopper: values are overwritten that are still read
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
            if is_far:
                at = [n, 0, i * BLOCK_N, 0]
                copy_in(far_v_desc, at, v_ready.index(stage), v_smem.index(stage))
            else:
                copy_in(v_desc, [n, 0, token, 0], v_ready.index(stage), v_smem.index(stage))
            step += 1
        count += 1


@gluon.jit
def _softmax(s, sums, tile, rows, scale, words, kind: gl.constexpr):
    """Take a key tile into the online softmax; return weights, fade, the new maximum and sum.

    Args:
        s: Products of queries and keys [rows, keys], masses added; times `scale` they are scores.
        sums: Maximum and sum so far.
        tile: Number of the key tile, number of far tiles and first raw token.
        rows: All rows see the entries before `whole` and the raw tokens seen_by_all .. first; then
            groups and entries of each row's far past, the rows' positions, and group_size.
        words: From `_tile_marks`, used where HAS_MARKS.
        kind: HAS_MASSES, HAS_MARKS, BLOCK_N and the layout of scores.
    """
    HAS_MARKS: gl.constexpr = kind[1]
    BLOCK_N: gl.constexpr = kind[2]
    layout: gl.constexpr = kind[3]
    running_max, running_sum = sums
    i, far_tiles, local = tile
    whole, seen_by_all, first, groups, entries, position, group_size = rows
    is_far = i < far_tiles
    start = gl.where(is_far, i * BLOCK_N, local + (i - far_tiles) * BLOCK_N)
    begin = gl.where(is_far, 0, seen_by_all)
    end = gl.where(is_far, whole, first + 1)
    if (start < begin) | (start + BLOCK_N > end):  # some row does not see some key
        keys = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        low = gl.where(is_far, 0, groups * group_size)
        high = gl.where(is_far, entries, position + 1)
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        s = gl.where(seen, s, -float("inf"))
    if HAS_MARKS:
        if is_far:
            s = fill_marked(s, words, float("-inf"), 1, BLOCK_N, layout)
    new_max = gl.maximum(running_max, gl.max(s, 1) * scale)
    # A row that has seen no key yet: exp2(-inf - -inf) would be NaN.
    finite = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = gl.exp2(s * scale - finite[:, None])
    fade = gl.exp2(running_max - finite)
    return weights, fade, new_max, running_sum * fade + gl.sum(weights, 1)


@gluon.jit
def _tile_marks(marks, i, far_tiles, HAS_MARKS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Load the marks of key tile i: a tuple of words [rows], one for every 32 keys."""
    words = ()
    if HAS_MARKS:
        for j in gl.static_range(BLOCK_N // 32):
            place = marks + i * (BLOCK_N // 32) + j
            words = words + (gl.load(place, mask=i < far_tiles, other=0),)
    return words


@gluon.jit
def fill_marked(x, words, fill, SHARE: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Return x [rows, columns] with `fill` where a column is marked for the row.

    Args:
        words: A tuple of words [rows], with one bit for every SHARE columns, a power of 2.
    """
    bit = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :] // SHARE
    word = words[0][:, None]
    for j in gl.static_range(1, COLUMNS // (32 * SHARE)):
        word = gl.where(bit < 32 * j, word, words[j][:, None])
    # In this layout bits 1 and 2 of a column's number tell which thread holds it. So a thread
    # shifts a word only once, by these, and tests bits that the compiler knows. Plain code becomes
    # a vector of the bits of all columns, which takes three times as long.
    THREAD: gl.constexpr = 6 // SHARE
    return gl.inline_asm_elementwise(
        """{
        .reg .pred marked;
        .reg .b32 bit;
        and.b32 bit, $2, $3;
        setp.ne.b32 marked, bit, 0;
        selp.f32 $0, $4, $1, marked;
        }""",
        "=f,f,r,r,f",
        [x, word >> (bit & THREAD), 1 << (bit & (31 - THREAD)), fill],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _scores(q, mine, ring, stage, zero, kind: gl.constexpr, BLOCK_D: gl.constexpr):
    """Begin the products of queries with a key tile, and add their masses by one more product, of
    ones with `mass_parts`, so that the softmax has no number to add.

    Args:
        mine, ring: As of `_attend_rows`: mine[6] holds ones, ring[0] keys, ring[2] masses.
        kind: As of `_softmax`.
    """
    HAS_MASSES: gl.constexpr = kind[0]
    BLOCK_N: gl.constexpr = kind[2]
    k = ring[0].index(stage).reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
    if HAS_MASSES:
        masses = ring[2].index(stage).reshape([BLOCK_N, MASS_COLUMNS]).permute([1, 0])
        s = warpgroup_mma(mine[6], masses, zero, use_acc=False, is_async=True)
        s = warpgroup_mma(q, k, s, is_async=True)
    else:
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    return s


@gluon.jit
def _attend_rows(
    HALF: gl.constexpr,
    HAS_MASSES: gl.constexpr,
    HAS_MARKS: gl.constexpr,
    OWN_OUT: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    mine,
    target,
    marking,
    scale,
    ring,
    work,
    places,
):
    """Attend from one half of each item, BLOCK_M queries, to all its key tiles: a consumer.

    Scores of tile i and the output of tile i - 1 are begun together, then the other consumer gets
    the tensor cores; so the softmax of one consumer always runs under products of the other. The
    barrier of a turn is arrived at by the other consumer; that of HALF 0 is the first.

    Args:
        OWN_OUT: Whether the output has shared memory of its own, else that of the queries.
        mine: Shared memory of queries and output, barriers of the queries, `ready` and `free`, and
            of the turns, this consumer's and the other's; shared memory of ones for masses.
        target: Descriptor of the output, and a pointer to log-sum-exp.
        marking: Pointer to marks, queries of a share, number of shares, and words of each share.
        ring, work, places: As of `_copy_tiles`.
    """
    q_smem, out_smem, q_ready, q_free, my_turn, other_turn, _ = mine
    out_desc, lse_ptr = target
    marks_ptr, share, num_shares, num_words = marking
    _, v_smem, _, k_ready, k_free, v_ready, v_free = ring
    num_items = work[0]
    heads_per_n = work[4]
    q_start, num_queries, group_size, window_size, sink_groups = places
    # Results of products: 16 rows with all columns in each of four warps. `p` is the left operand
    # of the next product, in registers.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    q = q_smem.reshape([BLOCK_M, BLOCK_D])
    kind: gl.constexpr = (HAS_MASSES, HAS_MARKS, BLOCK_N, s_layout)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)
    step = 0  # key tiles so far, of all items
    count = 0  # items so far
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, row, far_tiles, tiles, local = _work_item(index, work, places, BLOCK_N)
        row += BLOCK_M * HALF
        marks = marks_ptr
        first = q_start + row
        last = q_start + gl.minimum(row + BLOCK_M, num_queries) - 1
        position = first + gl.arange(0, BLOCK_M, rows)
        if HAS_MARKS:
            shares = (share, num_shares, num_words)
            marks = marks_of_rows(marks_ptr, head // heads_per_n, position, q_start, shares)
        groups = visible_cores(position, group_size, window_size)
        entries = visible_entries(groups, group_size, sink_groups)
        whole = visible_entries(
            visible_cores(first, group_size, window_size), group_size, sink_groups
        )
        seen_by_all = visible_cores(last, group_size, window_size) * group_size
        seen = (whole, seen_by_all, first, groups, entries, position, group_size)
        running_max = gl.full([BLOCK_M], -float("inf"), gl.float32, rows)
        running_sum = gl.full([BLOCK_M], 0.0, gl.float32, rows)
        acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, o_layout)

        # The first tile has only scores.
        words = _tile_marks(marks, 0, far_tiles, HAS_MARKS, BLOCK_N)
        mbarrier.wait(q_ready, count & 1)
        mbarrier.wait(k_ready.index(step % STAGES), step // STAGES & 1)
        mbarrier.wait(my_turn, (step & 1) ^ (1 - HALF))
        s = _scores(q, mine, ring, step % STAGES, zero, kind, BLOCK_D)
        mbarrier.arrive(other_turn)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_free.index(step % STAGES))
        sums = (running_max, running_sum)
        weights, fade, running_max, running_sum = _softmax(
            s, sums, (0, far_tiles, local), seen, scale, words, kind
        )
        p = gl.convert_layout(weights.to(dtype), p_layout)

        # Scores of a tile and output of the one before.
        for i in range(1, tiles):
            before = step % STAGES
            phase = step // STAGES & 1
            step += 1
            stage = step % STAGES
            words = _tile_marks(marks, i, far_tiles, HAS_MARKS, BLOCK_N)
            mbarrier.wait(k_ready.index(stage), step // STAGES & 1)
            mbarrier.wait(my_turn, (step & 1) ^ (1 - HALF))
            s = _scores(q, mine, ring, stage, zero, kind, BLOCK_D)
            mbarrier.wait(v_ready.index(before), phase)
            v = v_smem.index(before).reshape([BLOCK_N, BLOCK_D])
            acc = warpgroup_mma(p, v, acc, is_async=True)
            mbarrier.arrive(other_turn)
            # mutant hopper: scores are used before they are there
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(k_free.index(stage))
            sums = (running_max, running_sum)
            weights, fade, running_max, running_sum = _softmax(
                s, sums, (i, far_tiles, local), seen, scale, words, kind
            )
            acc = warpgroup_mma_wait(0, [acc])
            # mutant hopper: a consumer gives nothing back
            mbarrier.arrive(v_free.index(before))
            acc = acc * gl.convert_layout(fade, o_rows)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)

        # The output of the last tile.
        if OWN_OUT:
            mbarrier.arrive(q_free)
        mbarrier.wait(v_ready.index(step % STAGES), step // STAGES & 1)
        v = v_smem.index(step % STAGES).reshape([BLOCK_N, BLOCK_D])
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(step % STAGES))
        step += 1
        count += 1

        # Write output and log-sum-exp.
        wait_out(0)  # the copy of the item before
        out = (acc / gl.convert_layout(running_sum, o_rows)[:, None]).to(dtype)
        out_smem.reshape([BLOCK_M, BLOCK_D]).store(out)
        fence_async_shared()
        copy_out(out_desc, [head // heads_per_n, head % heads_per_n, row, 0], out_smem)
        at = row + gl.arange(0, BLOCK_M, rows)
        gl.store(
            lse_ptr + head.to(gl.int64) * num_queries + at,
            (running_max + gl.log2(running_sum)) * LN2,
            mask=at < num_queries,
        )
        if not OWN_OUT:
            wait_out(0)
            mbarrier.arrive(q_free)
    wait_out(0)


@gluon.jit(
    do_not_specialize=[
        *("num_items", "num_tiles", "num_heads", "heads_per_turn"),
        *("q_start", "k_start", "num_entries"),
        *("group_size", "window_size", "sink_groups", "share", "num_shares", "num_words"),
    ]
)
def _attend_fwd_hopper(
    q_desc,
    k_desc,
    v_desc,
    far_k_desc,
    far_v_desc,
    mass_desc,
    out_desc,
    pointers,
    num_items,
    num_tiles,
    num_heads,
    heads_per_turn,
    q_start,
    k_start,
    num_entries,
    group_size,
    window_size,
    sink_groups,
    share,
    num_shares,
    num_words,
    scale,
    HAS_MASSES: gl.constexpr,
    HAS_MARKS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Attend.

    Grid: as many programs as the chip has multiprocessors; items of ITEM_ROWS queries of one head
    are dealt out to them. A program reads an item's queries and the keys and values they see once,
    keeps output and sums in float32, and writes output and log-sum-exp.

    Args:
        pointers: To log-sum-exp and marks.
        num_items, ..., num_words: As of `_work_item`, `_copy_tiles` and `_attend_rows`. They come
            one by one: no register need hold them, as it must hold a number from `launch.ints`.
    """
    lse_ptr, marks_ptr = pointers
    # Shared memory: queries, their output, rings of keys and values.
    dtype: gl.constexpr = DTYPE
    q_smem = tiles(q_desc, 2)
    OWN_OUT: gl.constexpr = BLOCK_D <= 128  # else the output waits where the queries were
    out_smem = q_smem
    if OWN_OUT:
        out_smem = tiles(q_desc, 2)
    k_smem = tiles(k_desc, STAGES)
    v_smem = tiles(v_desc, STAGES)
    mass_smem = k_smem  # not read without masses, as `ones`
    ones = q_smem
    if HAS_MASSES:
        mass_smem = tiles(mass_desc, STAGES)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, MASS_COLUMNS], dtype)
        ones = gl.allocate_shared_memory(dtype, [BLOCK_M, MASS_COLUMNS], layout)
        threads: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        ones.store(gl.full([BLOCK_M, MASS_COLUMNS], 1.0, dtype, threads))
    # The producer arrives at `ready`; at `free` both consumers, of queries the one that has them.
    k_ready = barriers(STAGES, 1)
    k_free = barriers(STAGES, 2)
    v_ready = barriers(STAGES, 1)
    v_free = barriers(STAGES, 2)
    q_ready = barriers(2, 1)
    q_free = barriers(2, 1)
    turns = barriers(2, 1)
    fence_async_shared()

    # Arguments of a group of warps: constants, its own, those of consumers, those of all.
    first = (q_smem.index(0), out_smem.index(0), q_ready.index(0), q_free.index(0))
    first += (turns.index(0), turns.index(1), ones)
    second = (q_smem.index(1), out_smem.index(1), q_ready.index(1), q_free.index(1))
    second += (turns.index(1), turns.index(0), ones)
    target = (out_desc, lse_ptr)
    marking = (marks_ptr, share, num_shares, num_words)
    source = (q_desc, k_desc, v_desc, far_k_desc, far_v_desc, mass_desc)
    queries = (q_smem, q_ready, q_free)
    ring = (k_smem, v_smem, mass_smem, k_ready, k_free, v_ready, v_free)
    work = (num_items, num_tiles, num_heads, heads_per_turn, q_desc.shape[1])
    places = (q_start, q_desc.shape[2], group_size, window_size, sink_groups)
    sizes = (k_start, num_entries)
    shared = (target, marking, scale, ring, work, places)
    gl.warp_specialize(
        [
            (_attend_rows, (0, HAS_MASSES, HAS_MARKS, OWN_OUT, BLOCK_D, BLOCK_N, first) + shared),
            (_attend_rows, (1, HAS_MASSES, HAS_MARKS, OWN_OUT, BLOCK_D, BLOCK_N, second) + shared),
            (_copy_tiles, (HAS_MASSES, BLOCK_N, source, queries, sizes, ring, work, places)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of their threads
    )


def takes(q: Tensor, spec: Spec) -> bool:
    """Whether these kernels can take the call."""
    if nvidia_capability(q.device) != (9, 0) or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    dim = q.shape[-1]
    return 32 < dim <= 256 and dim % 8 == 0 and spec.softcap is None and spec.scale > 0


@functools.cache
def num_programs(device: torch.device) -> int:
    """Return the number of multiprocessors of the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend_list(
    tokens: Tokens, far: FarPast, spec: Spec, marks: Marks | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to raw tokens and the entries of a far past, but marked ones, as `best.attend_list`:
    out [N, r, T, D] in the dtype of q and natural log-sum-exp [N, r, T] in float32."""
    if out is not None and aligned(out) is not out:
        results, lse = attend_list(tokens, far, spec, marks)
        return out.copy_(results), lse
    q = aligned(tokens.q)
    k = aligned(tokens.k[:, None])
    v = aligned(tokens.v[:, None])
    num_entries = far.k.shape[1]
    # A descriptor needs memory even where there is no entry to read.
    far_k, far_v = (aligned(x[:, None]) for x in far[:2]) if num_entries else (k, v)
    n, r, num_queries, dim = q.shape
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    masses = None
    if far.mass is not None and num_entries:
        masses = mass_parts(far.mass, spec.scale, q.dtype)
    block_d = power_of_2(dim)
    block_n = 128 if block_d <= 128 else 64
    num_tiles = ceil_div(num_queries, ITEM_ROWS.value)
    heads_per_turn = r * max(1, CACHE_BYTES // (2 * far_k.shape[2] * dim * far_k.element_size()))
    launch(
        _attend_fwd_hopper,
        (min(num_programs(q.device), num_tiles * n * r),),
        (
            descriptor(q, BLOCK_M.value),
            *(descriptor(x, block_n) for x in (k, v, far_k, far_v)),
            descriptor(k if masses is None else masses, block_n),
            descriptor(out, BLOCK_M.value),
            (lse, lse if marks is None else marks.words),  # a launch needs pointers
            *(num_tiles * n * r, num_tiles, n * r, min(heads_per_turn, n * r)),
            *(tokens.q_start, tokens.k_start, num_entries),
            *(*rule_of(spec), 1 if marks is None else marks.share, *shape_of(marks)),
            spec.scale * LOG2E.value,
        ),
        HAS_MASSES=masses is not None,
        HAS_MARKS=marks is not None,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        DTYPE=DTYPES[q.dtype],
        num_warps=4,
    )
    return out, lse
