"""Attend from the queries of a share to the raw tokens of its chosen groups, for Hopper, written in
Triton's Gluon.

The same mathematics as `raw.fetch_fwd_kernel`, which runs everywhere. A program is three
groups of warps: one copies the groups' tokens into shared memory by the tensor memory accelerator,
a group at a time; two own 64 rows each, which are queries of all heads of a KV head that chose
together, and multiply with asynchronous warpgroup instructions. Tiles have 64 columns, in which
groups of 8 rows or more lie side by side in shared memory as one tile would. The file is long
because the groups of warps are one algorithm.
"""

from __future__ import annotations

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
from corecontext.ops.triton.attend.shares import groups_seen
from corecontext.ops.triton.launch import ceil_div, launch
from corecontext.ops.triton.primitives import LN2, LOG2E
from corecontext.ops.triton.tensor_memory import (
    DTYPES,
    aligned,
    barriers,
    copy_in,
    descriptor,
    reinterpreted,
)

ROWS = gl.constexpr(64)  # queries of a consumer
TOKENS = gl.constexpr(64)  # tokens of a tile
COLUMNS = gl.constexpr(64)  # of a tile in shared memory
STAGES = 3  # tiles of each consumer in shared memory


@gluon.jit
def _share_of_item(item, work, places, rule, SHARE: gl.constexpr, GROUP_SIZE: gl.constexpr):
    """Return of an item KV head, share, first head, position of the share's first query and number
    of tiles; no tile behind the last item.

    Args:
        work: num_items, num_shares, row_blocks.
        places: first_share, q_start, num_queries, num_groups, num_chosen.
        rule: window_size and sink_groups.
    """
    num_items, num_shares, row_blocks = work
    first_share, q_start, num_queries, num_groups, num_chosen = places
    n = item // (num_shares * row_blocks)
    number = item // row_blocks % num_shares
    first_head = item % row_blocks * (ROWS // SHARE)
    position = (first_share + number) * SHARE
    last = gl.minimum(position + SHARE, q_start + num_queries) - 1
    seen = groups_seen(last, (GROUP_SIZE, rule[0], rule[1]), num_groups)
    count = gl.minimum(seen, num_chosen)
    count = gl.where(item < num_items, count, 0)
    return n, number, first_head, position, (count * GROUP_SIZE + TOKENS - 1) // TOKENS


@gluon.jit
def _copy_queries(HALF: gl.constexpr, count, item, queries):
    """Copy the queries of a consumer's item that has tiles; return the number of its items."""
    q_desc, q_start, q_smem, q_ready, q_free = queries
    n, _, first_head, position, tiles = item
    HEADS: gl.constexpr = ROWS // q_desc.block_type.shape[2]
    if tiles > 0:
        mbarrier.wait(q_free.index(HALF), (count & 1) ^ 1)
        mbarrier.expect(q_ready.index(HALF), 2 * HEADS * q_desc.block_type.nbytes)
        for j in gl.static_range(2 * HEADS):
            at = [n, first_head + j % HEADS, position - q_start, j // HEADS * COLUMNS]
            place = q_smem.index(HALF * 2 * HEADS + j)
            copy_in(q_desc, at, q_ready.index(HALF), place)
        count += 1
    return count


@gluon.jit
def _copy_tile(
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    step,
    i,
    item,
    chosen,
    source,
):
    """Copy tile i of a consumer's item, if there is one; return the number of its tiles.

    Args:
        chosen: Pointer to the groups of the item.
        source: Descriptors and memory of keys and values, barriers, num_chosen, num_tokens and
            sink_groups.
    """
    k_desc, v_desc, k_smem, v_smem, ready, free, num_chosen, num_tokens, sink_groups = source
    n, _, _, _, tiles = item
    GROUPS: gl.constexpr = TOKENS // GROUP_SIZE
    if i < tiles:
        tokens = ()
        for j in gl.static_range(GROUPS):
            inside = i * GROUPS + j < num_chosen
            group = gl.load(chosen + i * GROUPS + j, mask=inside, other=-1)
            # Behind the last token zeros are read.
            token = gl.where(group < 0, num_tokens, (sink_groups + group) * GROUP_SIZE)
            tokens = tokens + (token,)
        slot = HALF * STAGES + step % STAGES
        mbarrier.wait(free.index(slot), (step // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(slot), 4 * GROUPS * k_desc.block_type.nbytes)
        for j in gl.static_range(2 * GROUPS):
            at = [n, 0, tokens[j % GROUPS], j // GROUPS * COLUMNS]
            copy_in(k_desc, at, ready.index(slot), k_smem.index(slot * 2 * GROUPS + j))
            copy_in(v_desc, at, ready.index(slot), v_smem.index(slot * 2 * GROUPS + j))
        step += 1
    return step


@gluon.jit
def _copy_items(
    SHARE: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    q_desc,
    k_desc,
    v_desc,
    num_tokens,
    memory,
    chosen_ptr,
    work,
    places,
    rule,
):
    """Copy the queries of both consumers' items, then the tokens of their groups, in turn: the
    producer warp."""
    q_ready, q_free, q_smem, k_smem, v_smem, ready, free = memory
    num_items, num_shares, _ = work
    _, q_start, _, _, num_chosen = places
    source = (k_desc, v_desc, k_smem, v_smem, ready, free)
    source += (num_chosen, num_tokens, rule[1])
    queries = (q_desc, q_start, q_smem, q_ready, q_free)
    first_step = 0
    second_step = 0
    first_count = 0
    second_count = 0
    for index in range(gl.program_id(0) * 2, num_items, gl.num_programs(0) * 2):
        first = _share_of_item(index, work, places, rule, SHARE, GROUP_SIZE)
        second = _share_of_item(index + 1, work, places, rule, SHARE, GROUP_SIZE)
        first_count = _copy_queries(0, first_count, first, queries)
        second_count = _copy_queries(1, second_count, second, queries)
        first_row = chosen_ptr + (first[0].to(gl.int64) * num_shares + first[1]) * num_chosen
        second_row = chosen_ptr + (second[0].to(gl.int64) * num_shares + second[1]) * num_chosen
        for i in range(gl.maximum(first[4], second[4])):
            first_step = _copy_tile(0, STAGES, GROUP_SIZE, first_step, i, first, first_row, source)
            second_step = _copy_tile(
                1, STAGES, GROUP_SIZE, second_step, i, second, second_row, source
            )


@gluon.jit
def _softmax(s, state, i, groups, scale, GROUP_SIZE: gl.constexpr, layout: gl.constexpr):
    """Take tile i into the online softmax: weights, the factor of earlier sums, the new maximum and
    sum.

    Args:
        state: Running maximum and sum of each row.
        groups: Pointer to the share's groups, num_chosen of them, ascending, then -1; their number,
            how many groups each row sees, and how many all rows see.
    """
    running_max, running_sum = state
    chosen, num_chosen, visible, seen_by_all = groups
    GROUPS: gl.constexpr = TOKENS // GROUP_SIZE
    end = i * GROUPS + GROUPS
    last = gl.load(chosen + gl.minimum(end, num_chosen) - 1)
    if (end > num_chosen) | (last < 0) | (last >= seen_by_all):  # some row does not see some token
        place = i * GROUPS + gl.arange(0, TOKENS, gl.SliceLayout(0, layout)) // GROUP_SIZE
        group = gl.load(chosen + place, mask=place < num_chosen, other=-1)
        seen = (group >= 0)[None, :] & (group[None, :] < visible[:, None])
        s = gl.where(seen, s, -float("inf"))
    new_max = gl.maximum(running_max, gl.max(s, 1) * scale)
    # A row that has seen no token yet: exp2(-inf - -inf) would be NaN.
    finite = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = gl.exp2(s * scale - finite[:, None])
    fade = gl.exp2(running_max - finite)
    return weights, fade, (new_max, running_sum * fade + gl.sum(weights, 1))


@gluon.jit
def _attend_items(
    HALF: gl.constexpr,
    SHARE: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    out_ptr,
    lse_ptr,
    scale,
    memory,
    chosen_ptr,
    work,
    places,
    rule,
):
    """Attend from ROWS queries of a share at a time to the raw tokens of its groups, and merge with
    out and lse, in place: a consumer."""
    q_ready, q_free, q_smem, k_smem, v_smem, ready, free = memory
    num_items, num_shares, _ = work
    _, q_start, num_queries, num_groups, num_chosen = places
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = q_smem.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, COLUMNS], dtype)
    q = reinterpreted(q_smem, dtype, [4, ROWS, COLUMNS], tile)
    k = reinterpreted(k_smem, dtype, [4 * STAGES, TOKENS, COLUMNS], tile)
    v = reinterpreted(v_smem, dtype, [4 * STAGES, TOKENS, COLUMNS], tile)
    zero = gl.zeros([ROWS, TOKENS], gl.float32, s_layout)
    lanes = gl.arange(0, ROWS, rows)
    dims = gl.arange(0, COLUMNS, gl.SliceLayout(0, s_layout))
    step = 0
    count = 0
    for index in range(gl.program_id(0) * 2, num_items, gl.num_programs(0) * 2):
        n, number, first_head, position, tiles = _share_of_item(
            index + HALF, work, places, rule, SHARE, GROUP_SIZE
        )
        if tiles > 0:
            chosen = chosen_ptr + (n.to(gl.int64) * num_shares + number) * num_chosen
            head = first_head + lanes // SHARE
            row = position + lanes % SHARE - q_start
            exists = (head < HEADS) & (row < num_queries)
            whole_rule = (GROUP_SIZE, rule[0], rule[1])
            visible = groups_seen(q_start + row, whole_rule, num_groups)
            seen_by_all = groups_seen(position, whole_rule, num_groups)
            groups = (chosen, num_chosen, visible, seen_by_all)
            running_max = gl.full([ROWS], -float("inf"), gl.float32, rows)
            state = (running_max, gl.zeros([ROWS], gl.float32, rows))
            first = gl.zeros([ROWS, COLUMNS], gl.float32, s_layout)
            second = gl.zeros([ROWS, COLUMNS], gl.float32, s_layout)

            # The first tile has only scores.
            slot = HALF * STAGES + step % STAGES
            mbarrier.wait(q_ready.index(HALF), count & 1)
            mbarrier.wait(ready.index(slot), step // STAGES & 1)
            s = _scores(q, k, HALF, slot, zero)
            s = warpgroup_mma_wait(0, [s])
            weights, fade, state = _softmax(s, state, 0, groups, scale, GROUP_SIZE, s_layout)
            p = gl.convert_layout(weights.to(dtype), p_layout)

            # Scores of a tile and output of the one before.
            for i in range(1, tiles):
                before = slot
                step += 1
                slot = HALF * STAGES + step % STAGES
                mbarrier.wait(ready.index(slot), step // STAGES & 1)
                s = _scores(q, k, HALF, slot, zero)
                first = warpgroup_mma(p, v.index(2 * before), first, is_async=True)
                second = warpgroup_mma(p, v.index(2 * before + 1), second, is_async=True)
                s = warpgroup_mma_wait(2, [s])
                weights, fade, state = _softmax(s, state, i, groups, scale, GROUP_SIZE, s_layout)
                first, second = warpgroup_mma_wait(0, [first, second])
                mbarrier.arrive(free.index(before))
                first = first * fade[:, None]
                second = second * fade[:, None]
                p = gl.convert_layout(weights.to(dtype), p_layout)

            # The output of the last tile, while the results so far are read.
            mbarrier.arrive(q_free.index(HALF))
            first = warpgroup_mma(p, v.index(2 * slot), first, is_async=True)
            second = warpgroup_mma(p, v.index(2 * slot + 1), second, is_async=True)
            flat = (n.to(gl.int64) * HEADS + head) * num_queries + row
            place = out_ptr + flat[:, None] * HEAD_DIM + dims[None, :]
            has_first = exists[:, None] & (dims < HEAD_DIM)[None, :]
            has_second = exists[:, None] & (dims < HEAD_DIM - COLUMNS)[None, :]
            out_first = gl.load(place, mask=has_first, other=0.0).to(gl.float32)
            out_second = gl.load(place + COLUMNS, mask=has_second, other=0.0).to(gl.float32)
            lse = gl.load(lse_ptr + flat, mask=exists, other=0.0) * LOG2E
            first, second = warpgroup_mma_wait(0, [first, second])
            mbarrier.arrive(free.index(slot))
            step += 1
            count += 1

            # Two parts of one softmax (docs/math.md, eq. 8); the one before always has a key.
            running_max, running_sum = state
            top = gl.maximum(lse, running_max)
            fade = gl.exp2(running_max - top)
            kept = gl.exp2(lse - top)
            total = running_sum * fade + kept
            fade = (fade / total)[:, None]
            kept = (kept / total)[:, None]
            gl.store(place, (first * fade + out_first * kept).to(dtype), mask=has_first)
            second = second * fade + out_second * kept
            gl.store(place + COLUMNS, second.to(dtype), mask=has_second)
            gl.store(lse_ptr + flat, (top + gl.log2(total)) * LN2, mask=exists)


@gluon.jit
def _scores(q, k, HALF: gl.constexpr, slot, zero):
    """Ask for the products of a consumer's queries with the keys of a slot."""
    s = warpgroup_mma(
        q.index(2 * HALF), k.index(2 * slot).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    return warpgroup_mma(
        q.index(2 * HALF + 1), k.index(2 * slot + 1).permute([1, 0]), s, is_async=True
    )


@gluon.jit(
    do_not_specialize=[
        *("num_tokens", "num_items", "num_shares", "row_blocks", "first_share", "q_start"),
        *("num_queries", "num_groups", "num_chosen", "window_size", "sink_groups"),
    ]
)
def fetch_fwd_hopper(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    chosen_ptr,
    num_tokens,
    num_items,
    num_shares,
    row_blocks,
    first_share,
    q_start,
    num_queries,
    num_groups,
    num_chosen,
    window_size,
    sink_groups,
    scale,
    SHARE: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Attend to the raw tokens of chosen groups and merge with out and lse, in place.

    Grid: as many programs as the chip has multiprocessors; pairs of items, ROWS queries of a share
    each, are dealt out to them. KV heads come one after the other, so that the keys and values in
    use are few.
    """
    GROUPS: gl.constexpr = TOKENS // GROUP_SIZE
    q_smem = gl.allocate_shared_memory(
        DTYPE, [4 * (ROWS // SHARE), 1, 1, SHARE, COLUMNS], q_desc.layout
    )
    k_smem = gl.allocate_shared_memory(
        DTYPE, [4 * STAGES * GROUPS, 1, 1, GROUP_SIZE, COLUMNS], k_desc.layout
    )
    v_smem = gl.allocate_shared_memory(
        DTYPE, [4 * STAGES * GROUPS, 1, 1, GROUP_SIZE, COLUMNS], v_desc.layout
    )
    # Barriers: the producer arrives at `ready`, a consumer at `free`.
    q_ready = barriers(2, 1)
    q_free = barriers(2, 1)
    ready = barriers(2 * STAGES, 1)
    free = barriers(2 * STAGES, 1)
    fence_async_shared()

    # Arguments of a group of warps: constants (first, since a sum of tuples unwraps those on its
    # right), its own, those of all.
    producer = (q_desc, k_desc, v_desc, num_tokens)
    consumers = (out_ptr, lse_ptr, scale)
    shared = ((q_ready, q_free, q_smem, k_smem, v_smem, ready, free), chosen_ptr)
    shared += ((num_items, num_shares, row_blocks),)
    shared += ((first_share, q_start, num_queries, num_groups, num_chosen),)
    shared += ((window_size, sink_groups),)
    gl.warp_specialize(
        [
            (
                _attend_items,
                (0, SHARE, GROUP_SIZE, HEADS, HEAD_DIM, STAGES) + consumers + shared,
            ),
            (
                _attend_items,
                (1, SHARE, GROUP_SIZE, HEADS, HEAD_DIM, STAGES) + consumers + shared,
            ),
            (_copy_items, (SHARE, GROUP_SIZE, STAGES) + producer + shared),
        ],
        [4, 1],
        [240, 24],
    )


def takes(call: Call) -> bool:
    """Whether this kernel can take a call that `hopper_forward` takes, and has no idle rows."""
    tokens = call.tokens
    spec = call.spec
    share = call.choice.share
    return (
        64 < tokens.q.shape[3] <= 128
        and share in (8, 16, 32, 64)
        and tokens.q.shape[1] * share % ROWS.value == 0
        and tokens.q_start % share == 0
        and spec.group_size in (8, 16, 32, 64)
    )


def attend(call: Call, out: Tensor, lse: Tensor) -> None:
    """Attend to the raw tokens of chosen groups and merge with out [N, r, T, D] and lse [N, r, T],
    in place."""
    tokens, cores, spec, _, choice = call
    q, k, v = aligned(tokens.q), aligned(tokens.k[:, None]), aligned(tokens.v[:, None])
    n, r, num_queries, dim = q.shape
    _, num_shares, num_chosen = choice.groups.shape
    share = choice.share
    group_size, window_size, sink_groups = rule_of(spec)
    row_blocks = r * share // ROWS.value
    num_items = n * num_shares * row_blocks
    launch(
        fetch_fwd_hopper,
        (min(num_programs(q.device), ceil_div(num_items, 2)),),
        (
            descriptor(q, share, COLUMNS.value),
            *(descriptor(x, group_size, COLUMNS.value) for x in (k, v)),
            *(out, lse, choice.groups.contiguous()),
            *(k.shape[2], num_items, num_shares, row_blocks, tokens.q_start // share),
            *(tokens.q_start, num_queries, cores.k.shape[2], num_chosen),
            *(window_size, sink_groups, spec.scale * LOG2E.value),
        ),
        SHARE=share,
        GROUP_SIZE=group_size,
        HEADS=r,
        HEAD_DIM=dim,
        STAGES=STAGES,
        DTYPE=DTYPES[q.dtype],
        num_warps=4,
    )
