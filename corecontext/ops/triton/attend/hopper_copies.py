"""Copy queries and the raw tokens of their chosen groups into shared memory: the producer warp of
`hopper_raw.py`, written in Triton's Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from corecontext.ops.triton.attend.shares import groups_seen
from corecontext.ops.triton.tensor_memory import copy_in

ROWS = gl.constexpr(64)  # queries of a consumer
TOKENS = gl.constexpr(64)  # tokens of a tile
COLUMNS = gl.constexpr(64)  # of a tile in shared memory


@gluon.jit
def share_of_item(item, work, places, rule, SHARE: gl.constexpr, GROUP_SIZE: gl.constexpr):
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
def copy_items(
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
        first = share_of_item(index, work, places, rule, SHARE, GROUP_SIZE)
        second = share_of_item(index + 1, work, places, rule, SHARE, GROUP_SIZE)
        first_count = _copy_queries(0, first_count, first, queries)
        second_count = _copy_queries(1, second_count, second, queries)
        first_row = chosen_ptr + (first[0].to(gl.int64) * num_shares + first[1]) * num_chosen
        second_row = chosen_ptr + (second[0].to(gl.int64) * num_shares + second[1]) * num_chosen
        for i in range(gl.maximum(first[4], second[4])):
            first_step = _copy_tile(0, STAGES, GROUP_SIZE, first_step, i, first, first_row, source)
            second_step = _copy_tile(
                1, STAGES, GROUP_SIZE, second_step, i, second, second_row, source
            )
