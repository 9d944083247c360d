"""The gradient of queries through the raw tokens of the union of neighbouring queries' choices, for
Hopper, written in Triton's Gluon.

An item is 32 neighbouring queries of four heads of a KV head, with the union of their groups. A
producer copies the groups' tokens, each of two consumers has ROWS rows, half of the queries; `low`
and `high` are a result's columns 0 to 63 and 64 to 127 (more in `hopper_union.py`). `dp` is the
gradient of weights, `ds` that of scores.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from corecontext.ops.spec import Upstream
from corecontext.ops.triton.attend.chosen import Call
from corecontext.ops.triton.attend.hopper_union import (
    COLUMNS,
    HALF,
    HEADS,
    QUERIES,
    ROWS,
    add_values,
    chosen_by,
    copy_unions,
    launch_items,
    let_pass,
    load_bits,
    num_items_of,
    num_tiles,
    place_of,
    products,
    tile_memory,
    tile_of,
    union_of_item,
    wait_values,
)
from corecontext.ops.triton.primitives import LOG2E
from corecontext.ops.triton.tensor_memory import aligned, barriers, reinterpreted, tiles

TOKENS = gl.constexpr(64)  # of a tile of keys or values
K_STAGES = gl.constexpr(4)  # tiles of keys in shared memory, which are read twice
V_STAGES = gl.constexpr(3)  # tiles of values


@gluon.jit
def _row_delta(inputs, place, is_row, dims, DIM_TILES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Return the sum of out times its gradient of each row, whose number in memory is `place`."""
    out_ptr, grad_ptr = inputs
    layout: gl.constexpr = place.type.layout
    delta = gl.zeros([ROWS], gl.float32, layout)
    for i in gl.static_range(DIM_TILES):
        at = (place * HEAD_DIM + i * COLUMNS)[:, None] + dims[None, :]
        mask = is_row[:, None] & (dims < HEAD_DIM - i * COLUMNS)[None, :]
        out = gl.load(out_ptr + at, mask=mask, other=0.0).to(gl.float32)
        delta += gl.sum(out * gl.load(grad_ptr + at, mask=mask, other=0.0).to(gl.float32), 1)
    return delta


@gluon.jit
def _grad_scores(s, dp, stats, bits, query, scale, GROUP_SIZE: gl.constexpr):
    """Return the gradients of a tile's scores s.

    Args:
        stats: Log-sum-exp of each row in units of log 2, and delta.
        bits: For each group of the tile the queries that chose it, as bits: a tuple of numbers.
        query: Number of each row's query in its union.
    """
    lse, delta = stats
    GROUPS: gl.constexpr = TOKENS // GROUP_SIZE
    grouped = s.reshape([ROWS, GROUPS, GROUP_SIZE])
    best = gl.max(grouped, 2)  # for its layout alone
    groups: gl.constexpr = best.type.layout
    row = gl.convert_layout(lse, gl.SliceLayout(1, groups))
    shift = gl.where(chosen_by(bits, query, GROUPS, groups), row[:, None], float("inf"))
    weights = gl.exp2(grouped * scale - shift.expand_dims(2)).reshape([ROWS, TOKENS])
    layout: gl.constexpr = dp.type.layout
    return gl.convert_layout(weights, layout) * (dp - delta[:, None])


@gluon.jit
def _gradients_of_unions(
    CONSUMER: gl.constexpr,
    DIM_TILES: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_GRAD_LSE: gl.constexpr,
    inputs,
    results,
    factors,
    q_memory,
    memory,
    shape,
    unions,
):
    """Add the gradients of ROWS rows of an item at a time: a consumer.

    Args:
        inputs: Pointers to out, its gradient, log-sum-exp and its gradient.
        results: Pointers to the gradient of queries, in float32, and delta.
        factors: Scale of scores, in units of log 2, and factor of the gradient.
        q_memory: Shared memory of queries and of grad out; barriers `ready` and `free` of both.
        memory: Shared memory of keys and of values, and barriers `ready` and `free` of both.
        shape: Of the queries, [N, r, T, D].
        unions: As of `union_of_item`.
    """
    out_ptr, grad_ptr, lse_ptr, grad_lse_ptr = inputs
    dq_ptr, delta_ptr = results
    scale, query_scale = factors
    q_smem, grad_smem, q_ready, q_free = q_memory
    k_smem, v_smem, k_ready, k_free, v_ready, v_free = memory
    GROUPS: gl.constexpr = TOKENS // GROUP_SIZE
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = q_smem.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, COLUMNS], dtype)
    q = reinterpreted(q_smem, dtype, [2 * DIM_TILES, ROWS, COLUMNS], tile)
    grad = reinterpreted(grad_smem, dtype, [2 * DIM_TILES, ROWS, COLUMNS], tile)
    k = reinterpreted(k_smem, dtype, [DIM_TILES * K_STAGES, TOKENS, COLUMNS], tile)
    v = reinterpreted(v_smem, dtype, [DIM_TILES * V_STAGES, TOKENS, COLUMNS], tile)
    zero = gl.zeros([ROWS, TOKENS], gl.float32, s_layout)
    lanes = gl.arange(0, ROWS, rows)
    query = lanes % HALF + CONSUMER * HALF
    dims = gl.arange(0, COLUMNS, gl.SliceLayout(0, o_layout))
    heads, num_queries = shape[1], shape[2]
    step = 0  # tiles copied so far, of all items
    count = 0  # items so far
    for item in range(gl.program_id(0), num_items_of(shape), gl.num_programs(0)):
        n, first_head, union, first_group, num_groups, pairs = union_of_item(
            item, shape, unions, GROUPS
        )
        if num_groups > 0:
            chosen = unions[1] + first_group
            total = num_tiles(num_groups, GROUPS)
            own = total - pairs
            head = first_head + lanes // HALF
            row = union * QUERIES + query
            exists = (head < heads) & (row < num_queries)
            flat = (n.to(gl.int64) * heads + head) * num_queries + row
            place = gl.convert_layout(flat, gl.SliceLayout(1, o_layout))
            is_row = gl.convert_layout(exists, gl.SliceLayout(1, o_layout))
            delta = _row_delta((out_ptr, grad_ptr), place, is_row, dims, DIM_TILES, HEAD_DIM)
            delta = gl.convert_layout(delta, rows)
            if HAS_GRAD_LSE:
                delta -= gl.load(grad_lse_ptr + flat, mask=exists, other=0.0)
            gl.store(delta_ptr + flat, delta, mask=exists)
            stats = (gl.load(lse_ptr + flat, mask=exists, other=0.0) * LOG2E, delta)
            low = gl.zeros([ROWS, COLUMNS], gl.float32, o_layout)
            high = gl.zeros([ROWS, COLUMNS], gl.float32, o_layout)
            # The first tile has only the gradients of scores.
            bits = load_bits(chosen, tile_of(0, CONSUMER, pairs, total), num_groups, GROUPS)
            mbarrier.wait(q_ready.index(CONSUMER), count & 1)
            let_pass(0, CONSUMER, pairs, step, k_ready, k_free, K_STAGES)
            let_pass(0, CONSUMER, pairs, step, v_ready, v_free, V_STAGES)
            copied = step + place_of(0, CONSUMER, pairs)
            slot = copied % K_STAGES
            v_slot = copied % V_STAGES
            mbarrier.wait(k_ready.index(slot), copied // K_STAGES & 1)
            s = products(q, k, CONSUMER, slot, zero, DIM_TILES)
            mbarrier.wait(v_ready.index(v_slot), copied // V_STAGES & 1)
            dp = products(grad, v, CONSUMER, v_slot, zero, DIM_TILES)
            s, dp = warpgroup_mma_wait(0, [s, dp])
            mbarrier.arrive(v_free.index(v_slot))
            ds = _grad_scores(s, dp, stats, bits, query, scale, GROUP_SIZE)
            rounded_ds = gl.convert_layout(ds.to(dtype), p_layout)

            # Gradients of scores of a tile, and of queries by the tile before.
            for i in range(1, own):
                before = slot
                copied = step + place_of(i, CONSUMER, pairs)
                slot = copied % K_STAGES
                v_slot = copied % V_STAGES
                number = tile_of(i, CONSUMER, pairs, total)
                bits = load_bits(chosen, number, num_groups, GROUPS)
                let_pass(i, CONSUMER, pairs, step, k_ready, k_free, K_STAGES)
                let_pass(i, CONSUMER, pairs, step, v_ready, v_free, V_STAGES)
                mbarrier.wait(k_ready.index(slot), copied // K_STAGES & 1)
                s = products(q, k, CONSUMER, slot, zero, DIM_TILES)
                mbarrier.wait(v_ready.index(v_slot), copied // V_STAGES & 1)
                dp = products(grad, v, CONSUMER, v_slot, zero, DIM_TILES)
                low, high = add_values(rounded_ds, k, before, low, high, DIM_TILES)
                s, dp = warpgroup_mma_wait(DIM_TILES, [s, dp])
                mbarrier.arrive(v_free.index(v_slot))
                ds = _grad_scores(s, dp, stats, bits, query, scale, GROUP_SIZE)
                low, high = wait_values(low, high, DIM_TILES)
                mbarrier.arrive(k_free.index(before))
                rounded_ds = gl.convert_layout(ds.to(dtype), p_layout)
            low, high = add_values(rounded_ds, k, slot, low, high, DIM_TILES)
            low, high = wait_values(low, high, DIM_TILES)
            mbarrier.arrive(k_free.index(slot))
            mbarrier.arrive(q_free.index(CONSUMER))
            let_pass(own, CONSUMER, pairs, step, k_ready, k_free, K_STAGES)
            let_pass(own, CONSUMER, pairs, step, v_ready, v_free, V_STAGES)
            step += total
            count += 1

            at = dq_ptr + (place * HEAD_DIM)[:, None] + dims[None, :]
            mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
            gl.store(at, gl.load(at, mask=mask, other=0.0) + low * query_scale, mask=mask)
            if DIM_TILES == 2:
                mask = is_row[:, None] & (dims < HEAD_DIM - COLUMNS)[None, :]
                before = gl.load(at + COLUMNS, mask=mask, other=0.0)
                gl.store(at + COLUMNS, before + high * query_scale, mask=mask)


@gluon.jit(do_not_specialize=["most", "sink_groups"])
def union_dq_hopper(
    q_desc,
    grad_desc,
    k_desc,
    v_desc,
    inputs,
    results,
    unions,
    most,
    sink_groups,
    scale,
    query_scale,
    HAS_GRAD_LSE: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Add the gradient of queries through the raw tokens of chosen groups, times query_scale, to
    dq, in place; write delta = sum(out * grad out) - grad lse of the queries that chose any.

    Grid: a program for each multiprocessor, which walks the items. All tensors are contiguous.

    Args:
        inputs, results: As of `_gradients_of_unions`.
        unions, most: The pointers of its `unions`, and U.
    """
    GROUPS: gl.constexpr = TOKENS // GROUP_SIZE
    DIM_TILES: gl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = (K_STAGES, V_STAGES)
    q_smem = tiles(q_desc, 2 * HEADS * DIM_TILES)
    grad_smem = tiles(grad_desc, 2 * HEADS * DIM_TILES)
    memory = tile_memory(k_desc, v_desc, STAGES, DIM_TILES * GROUPS)
    q_ready = barriers(2, 1)
    q_free = barriers(2, 1)
    fence_async_shared()

    # Arguments of a group of warps: constants, its own, those of all.
    queries = ((q_desc, grad_desc), (q_smem, grad_smem), q_ready, q_free)
    q_memory = (q_smem, grad_smem, q_ready, q_free)
    unions += (most,)
    consumers = (inputs, results, (scale, query_scale), q_memory, memory, q_desc.shape, unions)
    producer = ((k_desc, v_desc), queries, memory, unions, sink_groups)
    gl.warp_specialize(
        [
            (_gradients_of_unions, (0, DIM_TILES, GROUP_SIZE, HEAD_DIM, HAS_GRAD_LSE) + consumers),
            (_gradients_of_unions, (1, DIM_TILES, GROUP_SIZE, HEAD_DIM, HAS_GRAD_LSE) + consumers),
            (copy_unions, (DIM_TILES, GROUP_SIZE, GROUPS, STAGES, 0) + producer),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of their threads
    )


def add_query_gradient(
    upstream: Upstream, call: Call, dq: Tensor, delta: Tensor, query_scale: float
) -> None:
    """Add the gradient through raw tokens of chosen groups, times query_scale, to dq [N, r, T, D]
    in float32, in place; fill delta [N, r, T] of the queries that chose any group."""
    unions = call.unions(call.marks())
    grad_out = upstream.grad_out.contiguous()
    lse = upstream.lse.contiguous()
    grad_lse = lse if upstream.grad_lse is None else upstream.grad_lse.contiguous()
    launch_items(
        union_dq_hopper,
        call,
        unions,
        (aligned(call.tokens.q), grad_out),
        ((upstream.out.contiguous(), grad_out, lse, grad_lse), (dq, delta)),
        (call.spec.scale * LOG2E.value, query_scale),
        HAS_GRAD_LSE=upstream.grad_lse is not None,
    )
