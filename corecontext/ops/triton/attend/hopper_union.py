"""Attend from neighbouring queries to the raw tokens of their choices' union, on Hopper, in Gluon.

The same mathematics as `raw.fetch_fwd_kernel`, which runs everywhere. A union is the groups that
QUERIES neighbouring queries of one KV head chose, with those that chose each as bits of a number.
An item is those queries of HEADS query heads with their union; programs go through the items.

A program is three groups of warps: the producer copies the tokens of a union's groups into shared
memory by the tensor memory accelerator; two consumers own 64 rows each, half of the queries of four
heads, multiply with asynchronous warpgroup instructions, in turns. A row sees only its query's
groups.

Tiles at the beginning of a union have groups that only the first consumer's queries chose, those at
its end groups of the second one alone (`unions.Unions`). As many as are at both ends, *pairs*, are
read in turns, each by its own consumer while the other one lets it pass; both read all others.

Tiles in shared memory have 64 of the head's D columns, so a head takes DIM_TILES of them, 1 or 2;
`low` and `high` are a result's columns 0 to 63 and 64 to 127. Groups of 8 tokens or more lie there
one after the other as one tile would. Barriers `ready` say that a copy has arrived, `free` that its
place may be written again; their phases are explained in `hopper_forward.py`.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from corecontext.ops.triton.attend.anywhere import rule_of
from corecontext.ops.triton.attend.chosen import Call
from corecontext.ops.triton.attend.hopper_forward import num_programs
from corecontext.ops.triton.attend.unions import QUERIES as UNION_QUERIES
from corecontext.ops.triton.attend.unions import Unions
from corecontext.ops.triton.launch import ceil_div, launch
from corecontext.ops.triton.primitives import LN2, LOG2E
from corecontext.ops.triton.tensor_memory import (
    aligned,
    barriers,
    copy_in,
    descriptor,
    reinterpreted,
    tiles,
)

QUERIES = gl.constexpr(UNION_QUERIES)
ROWS = gl.constexpr(64)  # of a consumer: half of the queries, of HEADS heads
HEADS = gl.constexpr(4)  # query heads of an item
HALF = gl.constexpr(UNION_QUERIES // 2)  # queries of a consumer
TOKENS = gl.constexpr(128)  # of a tile of keys or values: 128 / g groups
COLUMNS = gl.constexpr(64)  # of a head, in a tile in shared memory
K_STAGES = gl.constexpr(2)  # tiles of keys in shared memory at a time
V_STAGES = gl.constexpr(4)  # tiles of values, which are read a tile later


@gluon.jit
def num_items_of(shape):
    """Return the number of items of queries [N, r, T, D]: QUERIES queries of HEADS heads."""
    heads = (shape[1] + HEADS - 1) // HEADS
    return shape[0] * ((shape[2] + QUERIES - 1) // QUERIES) * heads


@gluon.jit
def union_of_item(item, shape, unions, GROUPS: gl.constexpr):
    """Return of an item its sequence n, its first query head, the number of its union in n, where
    the groups of that union begin in memory, how many they are, and its pairs of tiles.

    Args:
        shape: Of the queries, [N, r, T, D].
        unions: Pointers to the tensors of `Unions`, and the groups there is room for in each, U.
        GROUPS: Groups of a tile.
    """
    num_unions = (shape[2] + QUERIES - 1) // QUERIES
    row_blocks = (shape[1] + HEADS - 1) // HEADS
    union = item // row_blocks
    ends_ptr = unions[2] + 3 * union
    only_first = gl.load(ends_ptr)
    not_second = gl.load(ends_ptr + 1)
    count = gl.load(ends_ptr + 2)
    only_second = num_tiles(count, GROUPS) - num_tiles(not_second, GROUPS)
    pairs = gl.minimum(only_first // GROUPS, only_second)
    first = union.to(gl.int64) * unions[3]
    head = item % row_blocks * HEADS
    return union // num_unions, head, union % num_unions, first, count, pairs


@gluon.jit
def num_tiles(count, GROUPS: gl.constexpr):
    """Return the tiles of so many groups."""
    return (count + GROUPS - 1) // GROUPS


@gluon.jit
def tile_of(i, CONSUMER: gl.constexpr, pairs, total):
    """Return the number of a consumer's i-th tile among the `total` tiles of a union."""
    tile = i
    if CONSUMER == 1:
        tile = gl.where(i < pairs, total - pairs + i, i)
    return tile


@gluon.jit
def place_of(i, CONSUMER: gl.constexpr, pairs):
    """Return the place of a consumer's i-th tile in the order in which tiles are copied."""
    return gl.where(i < pairs, 2 * i + CONSUMER, i + pairs)


@gluon.jit
def let_pass(i, CONSUMER: gl.constexpr, pairs, step, ready, free, STAGES: gl.constexpr):
    """Give back the tile between a consumer's tiles i - 1 and i that only the other one reads, if
    there is one. Nobody waits long for it: tile i is copied later.

    Args:
        step: Tiles copied for all items before.
        ready, free: Barriers of keys or of values, which have STAGES slots.
    """
    pair = i - 1 + CONSUMER
    if (pair >= 0) & (pair < pairs):
        place = step + 2 * pair + 1 - CONSUMER
        mbarrier.wait(ready.index(place % STAGES), place // STAGES & 1)
        # mutant hopper: a tile of the other consumer is kept
        mbarrier.arrive(free.index(place % STAGES))


@gluon.jit
def _copy_groups(desc, smem, slot, ready, tokens, n, DIM_TILES: gl.constexpr, GROUPS: gl.constexpr):
    """Copy one tile of keys or values of sequence n, GROUPS groups that begin at `tokens`, into a
    slot, a place of the ring."""
    mbarrier.expect(ready.index(slot), DIM_TILES * GROUPS * desc.block_type.nbytes)
    for j in gl.static_range(DIM_TILES * GROUPS):
        at = [n, 0, tokens[j % GROUPS], j // GROUPS * COLUMNS]
        copy_in(desc, at, ready.index(slot), smem.index(slot * DIM_TILES * GROUPS + j))


@gluon.jit
def _tokens_of_tile(place, unions, first, count, pairs, rule, GROUPS: gl.constexpr):
    """Return where the groups begin of the tile that is copied as number `place` of a union.

    Args:
        unions, first, count, pairs: As of `union_of_item`.
        rule: The groups that are sinks, tokens of a group, and of the sequence: behind these only
            zeros are read.
    """
    sinks, group_size, end = rule
    total = num_tiles(count, GROUPS)
    tile = gl.where(place % 2 == 0, place // 2, total - pairs + place // 2)
    tile = gl.where(place < 2 * pairs, tile, place - pairs)
    tokens = ()
    for j in gl.static_range(GROUPS):
        at = tile * GROUPS + j
        group = gl.load(unions[0] + first + at, mask=at < count, other=0)
        tokens = tokens + (gl.where(at < count, (sinks + group) * group_size, end),)
    return tokens


@gluon.jit
def copy_unions(
    DIM_TILES: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    descs,
    queries,
    memory,
    unions,
    sink_groups,
):
    """Copy the queries of each item, then the tokens of its union's groups: the producer warp.

    Args:
        STAGES: Slots of keys and of values.
        AHEAD: Tiles, 0 or 1, by which keys are copied before the values of the same tile.
        descs: Descriptors of keys and values.
        queries: Descriptors of queries, and of other tensors that have their shape, and the shared
            memory of each; then barriers `ready` and `free` of both consumers.
        memory: Of `tile_memory`.
        unions: As of `union_of_item`.
    """
    k_desc, v_desc = descs
    q_descs, places, q_ready, q_free = queries
    k_smem, v_smem, k_ready, k_free, v_ready, v_free = memory
    shape = q_descs[0].shape
    rule = (sink_groups, GROUP_SIZE, k_desc.shape[2])
    boxes: gl.constexpr = HEADS * DIM_TILES  # of a consumer's queries
    num_bytes: gl.constexpr = len(q_descs) * boxes * q_descs[0].block_type.nbytes
    step = 0  # tiles so far, of all items
    count = 0  # items so far
    for item in range(gl.program_id(0), num_items_of(shape), gl.num_programs(0)):
        n, head, union, first, num_groups, pairs = union_of_item(item, shape, unions, GROUPS)
        if num_groups > 0:
            of_union = (unions, first, num_groups, pairs, rule)
            tokens = _tokens_of_tile(0, *of_union, GROUPS)
            for consumer in gl.static_range(2):
                mbarrier.wait(q_free.index(consumer), (count & 1) ^ 1)
                mbarrier.expect(q_ready.index(consumer), num_bytes)
                for i in gl.static_range(len(q_descs)):
                    for j in gl.static_range(boxes):
                        row = union * QUERIES + consumer * HALF
                        at = [n, head + j % HEADS, row, j // HEADS * COLUMNS]
                        place = places[i].index(consumer * boxes + j)
                        copy_in(q_descs[i], at, q_ready.index(consumer), place)
            count += 1
            total = num_tiles(num_groups, GROUPS)
            # Made anew: Triton does not carry `before` through the loop if it is `tokens` first.
            before = _tokens_of_tile(0, *of_union, GROUPS)
            for i in range(total + AHEAD):
                # The next tile's groups are on the way while this one's slots become free.
                upcoming = _tokens_of_tile(i + 1, *of_union, GROUPS)
                if i < total:
                    slot = (step + i) % STAGES[0]
                    mbarrier.wait(k_free.index(slot), ((step + i) // STAGES[0] & 1) ^ 1)
                    _copy_groups(k_desc, k_smem, slot, k_ready, tokens, n, DIM_TILES, GROUPS)
                if AHEAD == 0:
                    before = tokens
                if i >= AHEAD:
                    copied = step + i - AHEAD
                    slot = copied % STAGES[1]
                    mbarrier.wait(v_free.index(slot), (copied // STAGES[1] & 1) ^ 1)
                    _copy_groups(v_desc, v_smem, slot, v_ready, before, n, DIM_TILES, GROUPS)
                before = tokens
                tokens = upcoming
            step += total


@gluon.jit
def chosen_by(bits, query, GROUPS: gl.constexpr, layout: gl.constexpr):
    """Return which groups of a tile each row's query chose, [rows, groups].

    Args:
        bits: For each group the queries that chose it, as bits: a tuple of GROUPS numbers.
        query: Number of each row's query in its union.
    """
    lanes = gl.arange(0, GROUPS, gl.SliceLayout(0, layout))
    words = gl.zeros([GROUPS], gl.int32, gl.SliceLayout(0, layout))
    for j in gl.static_range(GROUPS):
        words = gl.where(lanes == j, bits[j], words)
    row = gl.convert_layout(query, gl.SliceLayout(1, layout))
    return (words[None, :] >> row[:, None]) & 1 != 0


@gluon.jit
def load_bits(queries_ptr, i, count, GROUPS: gl.constexpr):
    """Load `bits` of `chosen_by` for the groups of tile i."""
    bits = ()
    for j in gl.static_range(GROUPS):
        at = i * GROUPS + j
        bits = bits + (gl.load(queries_ptr + at, mask=at < count, other=0),)
    return bits


@gluon.jit
def _softmax(s, sums, bits, query, scale, GROUP_SIZE: gl.constexpr, layout: gl.constexpr):
    """Take scores s of a tile into the online softmax; return weights, fade, and the new sums."""
    running_max, running_sum = sums
    GROUPS: gl.constexpr = TOKENS // GROUP_SIZE
    grouped = s.reshape([ROWS, GROUPS, GROUP_SIZE])
    best = gl.max(grouped, 2)
    groups: gl.constexpr = best.type.layout
    seen = chosen_by(bits, query, GROUPS, groups)
    best = gl.where(seen, best * scale, -float("inf"))
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    new_max = gl.maximum(running_max, gl.convert_layout(gl.max(best, 1), rows))
    # A row that has seen no token yet: exp2(-inf - -inf) would be NaN.
    finite = gl.where(new_max == -float("inf"), 0.0, new_max)
    row = gl.convert_layout(finite, gl.SliceLayout(1, groups))
    shift = gl.where(seen, row[:, None], float("inf"))
    weights = gl.exp2(grouped * scale - shift.expand_dims(2))
    weights = gl.convert_layout(weights.reshape([ROWS, TOKENS]), layout)
    fade = gl.exp2(running_max - finite)
    return weights, fade, (new_max, running_sum * fade + gl.sum(weights, 1))


@gluon.jit
def products(rows, tokens, consumer: gl.constexpr, slot, zero, DIM_TILES: gl.constexpr):
    """Start the products of a consumer's rows with the tokens of a slot. Wait for the result before
    use (`warpgroup_mma_wait`); so with `add_values`."""
    low = tokens.index(DIM_TILES * slot).permute([1, 0])
    s = warpgroup_mma(rows.index(DIM_TILES * consumer), low, zero, use_acc=False, is_async=True)
    if DIM_TILES == 2:
        high = tokens.index(DIM_TILES * slot + 1).permute([1, 0])
        s = warpgroup_mma(rows.index(DIM_TILES * consumer + 1), high, s, is_async=True)
    return s


@gluon.jit
def add_values(weights, tokens, slot, low, high, DIM_TILES: gl.constexpr):
    """Start adding the weighted tokens of a slot to `low` and `high` of a result."""
    low = warpgroup_mma(weights, tokens.index(DIM_TILES * slot), low, is_async=True)
    if DIM_TILES == 2:
        high = warpgroup_mma(weights, tokens.index(DIM_TILES * slot + 1), high, is_async=True)
    return low, high


@gluon.jit
def wait_values(low, high, DIM_TILES: gl.constexpr):
    """Wait until `low` and `high` of a result are computed."""
    if DIM_TILES == 2:
        low, high = warpgroup_mma_wait(0, [low, high])
    else:
        low = warpgroup_mma_wait(0, [low])
    return low, high


@gluon.jit
def _attend_unions(
    CONSUMER: gl.constexpr,
    DIM_TILES: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    target,
    q_memory,
    turns,
    memory,
    shape,
    unions,
):
    """Attend from ROWS rows of an item to the raw tokens of its union, and merge: a consumer.

    Args:
        target: Pointers to out and log-sum-exp, scale in units of log 2, and strides of out.
        q_memory: Shared memory of queries; barriers `ready` and `free` of both consumers.
        turns: Barriers of the consumers' turns, each arrived at by the other consumer.
        memory: Of `tile_memory`.
        shape, unions: As of `union_of_item`.
    """
    out_ptr, lse_ptr, scale, out_strides = target
    q_smem, q_ready, q_free = q_memory
    k_smem, v_smem, k_ready, k_free, v_ready, v_free = memory
    GROUPS: gl.constexpr = TOKENS // GROUP_SIZE
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, COLUMNS], dtype)
    q = reinterpreted(q_smem, dtype, [2 * DIM_TILES, ROWS, COLUMNS], tile)
    k = reinterpreted(k_smem, dtype, [DIM_TILES * K_STAGES, TOKENS, COLUMNS], tile)
    v = reinterpreted(v_smem, dtype, [DIM_TILES * V_STAGES, TOKENS, COLUMNS], tile)
    my_turn = turns.index(CONSUMER)
    other_turn = turns.index(1 - CONSUMER)
    zero = gl.zeros([ROWS, TOKENS], gl.float32, s_layout)
    lanes = gl.arange(0, ROWS, rows)
    query = lanes % HALF + CONSUMER * HALF
    dims = gl.arange(0, COLUMNS, gl.SliceLayout(0, o_layout))
    heads, num_queries = shape[1], shape[2]
    step = 0  # tiles copied so far, of all items
    turn = 0  # this consumer's tiles so far
    count = 0  # items so far
    for item in range(gl.program_id(0), num_items_of(shape), gl.num_programs(0)):
        n, first_head, union, first_group, num_groups, pairs = union_of_item(
            item, shape, unions, GROUPS
        )
        if num_groups > 0:
            chosen = unions[1] + first_group
            total = num_tiles(num_groups, GROUPS)
            own = total - pairs
            running_max = gl.full([ROWS], -float("inf"), gl.float32, rows)
            sums = (running_max, gl.zeros([ROWS], gl.float32, rows))
            low = gl.zeros([ROWS, COLUMNS], gl.float32, o_layout)
            high = gl.zeros([ROWS, COLUMNS], gl.float32, o_layout)

            # The first tile has only scores.
            bits = load_bits(chosen, tile_of(0, CONSUMER, pairs, total), num_groups, GROUPS)
            mbarrier.wait(q_ready.index(CONSUMER), count & 1)
            let_pass(0, CONSUMER, pairs, step, k_ready, k_free, K_STAGES)
            place = step + place_of(0, CONSUMER, pairs)
            slot = place % K_STAGES
            mbarrier.wait(k_ready.index(slot), place // K_STAGES & 1)
            mbarrier.wait(my_turn, (turn & 1) ^ (1 - CONSUMER))
            s = products(q, k, CONSUMER, slot, zero, DIM_TILES)
            mbarrier.arrive(other_turn)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(k_free.index(slot))
            weights, fade, sums = _softmax(s, sums, bits, query, scale, GROUP_SIZE, s_layout)
            p = gl.convert_layout(weights.to(dtype), p_layout)

            # Scores of a tile and output of the one before.
            for i in range(1, own):
                turn += 1
                before = place
                place = step + place_of(i, CONSUMER, pairs)
                slot = place % K_STAGES
                v_slot = before % V_STAGES
                number = tile_of(i, CONSUMER, pairs, total)
                bits = load_bits(chosen, number, num_groups, GROUPS)
                let_pass(i, CONSUMER, pairs, step, k_ready, k_free, K_STAGES)
                mbarrier.wait(k_ready.index(slot), place // K_STAGES & 1)
                mbarrier.wait(my_turn, (turn & 1) ^ (1 - CONSUMER))
                s = products(q, k, CONSUMER, slot, zero, DIM_TILES)
                let_pass(i - 1, CONSUMER, pairs, step, v_ready, v_free, V_STAGES)
                mbarrier.wait(v_ready.index(v_slot), before // V_STAGES & 1)
                low, high = add_values(p, v, v_slot, low, high, DIM_TILES)
                mbarrier.arrive(other_turn)
                s = warpgroup_mma_wait(DIM_TILES, [s])
                mbarrier.arrive(k_free.index(slot))
                weights, fade, sums = _softmax(s, sums, bits, query, scale, GROUP_SIZE, s_layout)
                low, high = wait_values(low, high, DIM_TILES)
                mbarrier.arrive(v_free.index(v_slot))
                factor = gl.convert_layout(fade, o_rows)[:, None]
                low = low * factor
                high = high * factor
                p = gl.convert_layout(weights.to(dtype), p_layout)

            # The output of the last tile, while the results so far are read.
            mbarrier.arrive(q_free.index(CONSUMER))
            let_pass(own, CONSUMER, pairs, step, k_ready, k_free, K_STAGES)
            let_pass(own - 1, CONSUMER, pairs, step, v_ready, v_free, V_STAGES)
            slot = place % V_STAGES
            mbarrier.wait(v_ready.index(slot), place // V_STAGES & 1)
            low, high = add_values(p, v, slot, low, high, DIM_TILES)
            head = first_head + lanes // HALF
            row = union * QUERIES + query
            exists = (head < heads) & (row < num_queries)
            flat = (n.to(gl.int64) * heads + head) * num_queries + row
            lse = gl.load(lse_ptr + flat, mask=exists, other=0.0) * LOG2E
            at = n.to(gl.int64) * out_strides[0] + head * out_strides[1]
            at += row.to(gl.int64) * out_strides[2]
            place = gl.convert_layout(at, o_rows)[:, None] + dims[None, :]
            is_row = gl.convert_layout(exists, o_rows)[:, None]
            has_low = is_row & (dims < HEAD_DIM)[None, :]
            has_high = is_row & (dims < HEAD_DIM - COLUMNS)[None, :]
            before_low = gl.load(out_ptr + place, mask=has_low, other=0.0).to(gl.float32)
            low, high = wait_values(low, high, DIM_TILES)
            mbarrier.arrive(v_free.index(slot))
            let_pass(own, CONSUMER, pairs, step, v_ready, v_free, V_STAGES)
            step += total
            turn += 1
            count += 1

            # Merge two parts (docs/math.md, eq. 8); the one in out always has a key.
            running_max, running_sum = sums
            top = gl.maximum(lse, running_max)
            fade = gl.exp2(running_max - top)
            kept = gl.exp2(lse - top)
            total = running_sum * fade + kept
            gl.store(lse_ptr + flat, (top + gl.log2(total)) * LN2, mask=exists)
            fade = gl.convert_layout(fade / total, o_rows)[:, None]
            kept = gl.convert_layout(kept / total, o_rows)[:, None]
            low = low * fade + before_low * kept
            gl.store(out_ptr + place, low.to(dtype), mask=has_low)
            if DIM_TILES == 2:
                place += COLUMNS
                before_high = gl.load(out_ptr + place, mask=has_high, other=0.0)
                high = high * fade + before_high.to(gl.float32) * kept
                gl.store(out_ptr + place, high.to(dtype), mask=has_high)


@gluon.jit
def tile_memory(k_desc, v_desc, STAGES: gl.constexpr, TILES: gl.constexpr):
    """Return shared memory of STAGES tiles of keys and of values, each of TILES copies, and
    barriers of both: the producer arrives at `ready`, both consumers at `free`."""
    k_smem = tiles(k_desc, STAGES[0] * TILES)
    v_smem = tiles(v_desc, STAGES[1] * TILES)
    k_ready = barriers(STAGES[0], 1)
    k_free = barriers(STAGES[0], 2)
    v_ready = barriers(STAGES[1], 1)
    v_free = barriers(STAGES[1], 2)
    return k_smem, v_smem, k_ready, k_free, v_ready, v_free


@gluon.jit(do_not_specialize=["most", "sink_groups"])
def union_fwd_hopper(
    q_desc,
    k_desc,
    v_desc,
    results,
    unions,
    most,
    sink_groups,
    scale,
    out_strides,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Attend to the raw tokens of chosen groups and merge with out and lse, which hold attention to
    all else that the queries see, in place.

    Grid: as many programs as the chip has multiprocessors, which take items in turn. KV heads come
    one after the other, so that the keys and values in use are few.

    Args:
        results: Pointers to out [N, r, T, D] and log-sum-exp [N, r, T].
        unions: Pointers to the tensors of `Unions`, which have room for `most` groups each.
    """
    GROUPS: gl.constexpr = TOKENS // GROUP_SIZE
    DIM_TILES: gl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = (K_STAGES, V_STAGES)
    q_smem = tiles(q_desc, 2 * HEADS * DIM_TILES)
    memory = tile_memory(k_desc, v_desc, STAGES, DIM_TILES * GROUPS)
    q_ready = barriers(2, 1)
    q_free = barriers(2, 1)
    turns = barriers(2, 1)
    fence_async_shared()

    # Arguments of a group of warps: constants, its own, those of all.
    queries = ((q_desc,), (q_smem,), q_ready, q_free)
    unions += (most,)
    target = results + (scale, out_strides)
    consumers = (target, (q_smem, q_ready, q_free), turns, memory, q_desc.shape, unions)
    producer = ((k_desc, v_desc), queries, memory, unions, sink_groups)
    gl.warp_specialize(
        [
            (_attend_unions, (0, DIM_TILES, GROUP_SIZE, HEAD_DIM) + consumers),
            (_attend_unions, (1, DIM_TILES, GROUP_SIZE, HEAD_DIM) + consumers),
            (copy_unions, (DIM_TILES, GROUP_SIZE, GROUPS, STAGES, 1) + producer),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of their threads
    )


def takes(call: Call) -> bool:
    """Whether these kernels can take a call whose queries `hopper_forward` can take: heads of one
    or two tiles of 64 columns, groups that tiles of 64 and 128 tokens hold whole."""
    return call.tokens.q.shape[3] <= 128 and call.spec.group_size in (8, 16, 32, 64)


def launch_items(
    kernel: Any,
    call: Call,
    unions: Unions,
    queries: tuple[Tensor, ...],
    pointers: tuple[tuple[Tensor, ...], ...],
    factors: tuple[float, ...],
    specialized: tuple = (),
    **constants: Any,
) -> None:
    """Launch a kernel over the items of unions.

    Args:
        queries: Tensors [N, r, T, D], aligned, of which a program copies an item's rows.
        pointers: The kernel's arguments before `unions`.
        factors: Its arguments behind `sink_groups`.
        specialized: Those behind them, as of `launch`.
    """
    k, v = (aligned(x[:, None]) for x in call.tokens[1:3])
    _, r, _, dim = call.tokens.q.shape
    group_size, _, sink_groups = rule_of(call.spec)
    num_items = unions.ends[..., 0].numel() * ceil_div(r, HEADS.value)
    launch(
        kernel,
        (min(num_programs(k.device), num_items),),
        (
            *(descriptor(x, HALF.value, COLUMNS.value) for x in queries),
            *(descriptor(x, group_size, COLUMNS.value) for x in (k, v)),
            *(*pointers, tuple(unions), unions.groups.shape[2], sink_groups, *factors),
        ),
        specialized,
        **constants,
        GROUP_SIZE=group_size,
        HEAD_DIM=dim,
        num_warps=4,
    )


def attend(call: Call, unions: Unions, out: Tensor, lse: Tensor) -> None:
    """Attend to the raw tokens of chosen groups and merge with out [N, r, T, D] and lse [N, r, T],
    in place."""
    scale = call.spec.scale * LOG2E.value
    queries = (aligned(call.tokens.q),)
    strides = (out.stride()[:-1],)
    launch_items(union_fwd_hopper, call, unions, queries, ((out, lse),), (scale,), strides)
