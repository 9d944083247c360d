"""The backward of `hopper_forward.py`: one pass over the key tiles, gradients of the queries added up in
global memory.

A program owns 128 keys, core tokens or raw ones. Two consumers own 64 of them each and keep their
gradients in registers while the copying warp brings the queries that see them; the queries'
gradients are added by the tensor memory accelerator, in whatever order programs come, so the last
bits differ from run to run. Where torch is asked for deterministic algorithms,
`attend.attend_backward` runs instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from corecontext.ops.rotary import Rotary
from corecontext.ops.triton import hopper_forward
from corecontext.ops.triton.hopper_forward import LOG2E
from corecontext.ops.triton.launch import ceil_div, launch, power_of_2
from corecontext.ops.triton.pool import pool_backward
from corecontext.ops.triton.tensor_memory import (
    DTYPES,
    add_out,
    aligned,
    copy_in,
    descriptor,
    wait_out,
)

BLOCK_M = 64  # queries of a tile
BLOCK_N = 128  # keys of a program
HEADS_PER_TURN = 4
MIN_BYTES = (
    288 << 20
)  # enough programs that the longest, a tile of core tokens, is not what a launch takes


@triton.jit(do_not_specialize=["num_queries", "heads_per_n"])
def _prepare_kernel(
    out_ptr,
    grad_ptr,
    lse_ptr,
    grad_lse_ptr,
    stats_ptr,
    sum_ptr,
    num_queries,
    heads_per_n,
    out_n,
    out_r,
    out_t,
    grad_n,
    grad_r,
    grad_t,
    HAS_GRAD_LSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (query tiles, N r). Writes a tile's -lse in units of log 2 and grad lse - sum(out
    grad), 2 x 64 float32 side by side, -infinity and 0 where no query is; and zeros where its
    queries' gradients will be added up."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n, r = head // heads_per_n, head % heads_per_n
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    inside = rows < num_queries
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    wide = rows.to(tl.int64)[:, None]
    out = tl.load(
        out_ptr + n * out_n + r * out_r + wide * out_t + dims[None, :], mask=mask, other=0.0
    )
    grad = tl.load(
        grad_ptr + n * grad_n + r * grad_r + wide * grad_t + dims[None, :], mask=mask, other=0.0
    )
    delta = -tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    flat = head * num_queries + rows
    if HAS_GRAD_LSE:
        delta += tl.load(grad_lse_ptr + flat, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + flat, mask=inside, other=float("inf"))
    at = stats_ptr + (head * tl.num_programs(0) + tile) * 2 * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, -lse * 1.4426950408889634)
    tl.store(at + BLOCK, delta)
    tl.store(
        sum_ptr + flat[:, None] * HEAD_DIM + dims[None, :],
        tl.zeros([BLOCK, BLOCK_D], tl.float32),
        mask=mask,
    )


@triton.jit(do_not_specialize=["num_queries", "num_groups"])
def _finish_kernel(
    sum_ptr,
    last_ptr,
    grad_ptr,
    num_queries,
    num_groups,
    scale,
    group_size,
    HAS_LAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (query tiles, N r). The queries' gradients in their dtype: the scaled sum, and at the
    end of each group what its pooling adds."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    at = (head * num_queries + rows)[:, None] * HEAD_DIM + dims[None, :]
    grad = tl.load(sum_ptr + at, mask=mask, other=0.0) * scale
    if HAS_LAST:
        group = rows // group_size
        closes = (rows % group_size == group_size - 1) & (group < num_groups)
        last = (head * num_groups + group)[:, None] * HEAD_DIM + dims[None, :]
        grad += tl.load(last_ptr + last, mask=mask & closes[:, None], other=0.0).to(tl.float32)
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=mask)


# One array of shared memory holds all tiles of 64 rows: queries and gradients in rings of STAGES,
# then the program's keys and values. What a group of warps is handed costs it registers for good.


@gluon.jit
def _copy_queries(
    q_desc,
    grad_desc,
    stats_desc,
    k_desc,
    v_desc,
    core_k_desc,
    core_v_desc,
    tiles_smem,
    stats_smem,
    ready,
    free,
    n,
    first_head,
    num_heads,
    heads_per_core,
    key,
    is_core,
    last_row,
    tiles,
    STAGES: gl.constexpr,
):
    """The copying warp: the keys and values of the program, then the queries that see them, latest
    first: programs that run together then read the same queries."""
    keys_ready = ready.index(STAGES)
    mbarrier.expect(keys_ready, 4 * k_desc.block_type.nbytes)
    for half in gl.static_range(2):
        if is_core:
            core = first_head // heads_per_core
            copy_in(
                core_k_desc,
                [n, core, key + 64 * half, 0],
                keys_ready,
                tiles_smem.index(2 * STAGES + half),
            )
            copy_in(
                core_v_desc,
                [n, core, key + 64 * half, 0],
                keys_ready,
                tiles_smem.index(2 * STAGES + 2 + half),
            )
        else:
            copy_in(
                k_desc, [n, 0, key + 64 * half, 0], keys_ready, tiles_smem.index(2 * STAGES + half)
            )
            copy_in(
                v_desc,
                [n, 0, key + 64 * half, 0],
                keys_ready,
                tiles_smem.index(2 * STAGES + 2 + half),
            )
    step = 0
    for head in range(first_head, first_head + num_heads):
        for i in range(tiles):
            row = last_row - 64 * i
            stage = step % STAGES
            here = ready.index(stage)
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(here, 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
            copy_in(q_desc, [n, head, row, 0], here, tiles_smem.index(stage))
            copy_in(stats_desc, [n, head, row // 64, 0], here, stats_smem.index(stage))
            copy_in(grad_desc, [n, head, row, 0], here, tiles_smem.index(STAGES + stage))
            step += 1


@gluon.jit
def _add_query_gradients(
    tiles_smem,
    scores_smem,
    sum_smem,
    scores_ready,
    scores_free,
    sum_desc,
    n,
    head,
    row,
    step,
    HALF: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Half the columns of one query tile's gradient from the 128 keys, added to the sum in global
    memory."""
    PART: gl.constexpr = BLOCK_D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    ring = step % 2
    mbarrier.wait(scores_ready.index(ring), step // 2 & 1)
    keys = tiles_smem.index(2 * STAGES).reshape([64, BLOCK_D]).slice(HALF * PART, PART, 1)
    dq = warpgroup_mma(
        scores_smem.index(2 * ring).permute([1, 0]),
        keys,
        gl.zeros([64, PART], gl.float32, layout),
        use_acc=False,
        is_async=True,
    )
    keys = tiles_smem.index(2 * STAGES + 1).reshape([64, BLOCK_D]).slice(HALF * PART, PART, 1)
    dq = warpgroup_mma(scores_smem.index(2 * ring + 1).permute([1, 0]), keys, dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(scores_free.index(ring))
    wait_out(0)  # what lay there has been read
    sum_smem.reshape([64, PART]).store(dq)
    fence_async_shared()
    add_out(sum_desc, [n, head, row, HALF * PART], sum_smem)


@gluon.jit
def _key_gradients(
    tiles_smem,
    stats_smem,
    scores_smem,
    sum_smem,
    ready,
    free,
    scores_ready,
    scores_free,
    sum_desc,
    core_grad_ptr,
    grad_k_ptr,
    grad_v_ptr,
    dbias_ptr,
    bias_ptr,
    n,
    first_head,
    offset,
    key,
    num_keys,
    is_core,
    num_heads,
    last_row,
    tiles,
    num_queries,
    group_size,
    window_size,
    scale,
    value_offset,
    HALF: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One consumer: 64 keys against all queries that see one of them, scores transposed, [keys,
    queries].

    The scores' gradients of both consumers meet in shared memory; the gradient of a query tile is
    made from them one step later, so that neither consumer waits for the other."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = tiles_smem.dtype
    key += 64 * HALF
    k = tiles_smem.index(2 * STAGES + HALF).reshape([64, BLOCK_D])
    v = tiles_smem.index(2 * STAGES + 2 + HALF).reshape([64, BLOCK_D])
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    dk = gl.zeros([64, BLOCK_D], gl.float32, d_layout)
    dv = gl.zeros([64, BLOCK_D], gl.float32, d_layout)
    dbias = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
    # The queries that see a key: low <= t < high; those that see all 64 keys: whole_low <= t <
    # whole_high.
    keys = key + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    if is_core:
        low = (keys + 1) * group_size + window_size - 1
        high = keys * 0 + num_queries
        whole_low = (key + 64) * group_size + window_size - 1
        whole_high = num_queries
    else:
        low = keys
        high = gl.minimum((keys // group_size + 1) * group_size + window_size - 1, num_queries)
        whole_low = key + 63
        whole_high = gl.minimum((key // group_size + 1) * group_size + window_size - 1, num_queries)
    bias = 0.0
    mbarrier.wait(ready.index(STAGES), 0)
    row = last_row
    head = first_head
    row_before = (
        last_row + 64
    )  # not `row`: Triton 3.6 takes two names of one value for one loop variable
    head_before = first_head - 1
    for step in range(num_heads * tiles):
        stage = step % STAGES
        phase = step // STAGES & 1
        q = tiles_smem.index(stage).reshape([64, BLOCK_D])
        grad = tiles_smem.index(STAGES + stage).reshape([64, BLOCK_D])
        if HAS_BIAS:
            bias = gl.where(is_core, gl.load(bias_ptr + head).to(gl.float32) * LOG2E, 0.0)
        mbarrier.wait(ready.index(stage), phase)
        s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, grad.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        stats = stats_smem.index(stage).reshape([128])
        start = stats.slice(0, 64).load(columns)
        if HAS_BIAS:
            start += bias
        p = gl.exp2(s * scale + start[None, :])
        if (row < whole_low) | (row + 64 > whole_high):
            position = row + gl.arange(0, 64, columns)
            p = gl.where(
                (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None]), p, 0.0
            )
        dp = warpgroup_mma_wait(0, [dp])
        ds = p * (dp + stats.slice(64, 64).load(columns)[None, :])
        if HAS_BIAS:
            dbias += gl.sum(ds, 1)
        p_half = gl.convert_layout(p.to(dtype), p_layout)
        ds_half = ds.to(dtype)
        dv = warpgroup_mma(p_half, grad, dv, is_async=True)
        ring = step % 2
        mbarrier.wait(scores_free.index(ring), (step // 2 & 1) ^ 1)
        scores_smem.index(2 * ring + HALF).store(ds_half)
        fence_async_shared()
        mbarrier.arrive(scores_ready.index(ring))
        dk = warpgroup_mma(gl.convert_layout(ds_half, p_layout), q, dk, is_async=True)
        if step > 0:
            _add_query_gradients(
                tiles_smem,
                scores_smem,
                sum_smem,
                scores_ready,
                scores_free,
                sum_desc,
                n,
                head_before,
                row_before,
                step - 1,
                HALF,
                BLOCK_D,
                STAGES,
            )
        dv, dk = warpgroup_mma_wait(0, [dv, dk])
        mbarrier.arrive(free.index(stage))
        row_before = row
        head_before = head
        row -= 64
        if row <= last_row - 64 * tiles:
            row = last_row
            head += 1
    if tiles > 0:
        _add_query_gradients(
            tiles_smem,
            scores_smem,
            sum_smem,
            scores_ready,
            scores_free,
            sum_desc,
            n,
            head_before,
            row_before,
            num_heads * tiles - 1,
            HALF,
            BLOCK_D,
            STAGES,
        )

    keys = key + gl.arange(0, 64, gl.SliceLayout(1, d_layout))
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, d_layout))
    mask = (keys < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
    at = (offset + keys)[:, None] * HEAD_DIM + dims[None, :]
    dk = dk * (scale / LOG2E)
    if is_core:
        gl.store(core_grad_ptr + at, dk, mask=mask)
        gl.store(core_grad_ptr + value_offset + at, dv, mask=mask)
        if HAS_BIAS:
            if key < num_keys:
                gl.store(dbias_ptr + key // 64, gl.sum(dbias, 0))
    else:
        gl.store(grad_k_ptr + at, dk.to(dtype), mask=mask)
        gl.store(grad_v_ptr + at, dv.to(dtype), mask=mask)
    wait_out(0)


@gluon.jit(
    do_not_specialize=[
        "num_queries",
        "num_cores",
        "core_programs",
        "num_n",
        "heads_per_n",
        "heads_per_core",
        "heads_per_turn",
        "group_size",
        "window_size",
    ]
)
def _attend_bwd_hopper(
    q_desc,
    grad_desc,
    stats_desc,
    k_desc,
    v_desc,
    core_k_desc,
    core_v_desc,
    sum_desc,
    bias_ptr,
    core_grad_ptr,
    grad_k_ptr,
    grad_v_ptr,
    dbias_ptr,
    num_queries,
    num_cores,
    core_programs,
    num_n,
    heads_per_n,
    heads_per_core,
    heads_per_turn,
    scale,
    group_size,
    window_size,
    HAS_BIAS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Grid: (tiles of 128 core tokens x N r + tiles of 128 tokens x N,).

    Core tokens come first, heads_per_turn heads at a time and of those the tiles that most queries
    see first: so few heads that what their programs add to stays in the L2 cache."""
    dtype: gl.constexpr = DTYPE
    tiles_smem = gl.allocate_shared_memory(
        dtype, [2 * STAGES + 4, 1, 1, 64, BLOCK_D], q_desc.layout
    )
    stats_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, 1, 128], stats_desc.layout)
    scores_smem = gl.allocate_shared_memory(
        dtype, [4, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    )
    sum_smem = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, BLOCK_D // 2], sum_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scores_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    scores_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), 1)
        mbarrier.init(free.index(i), 2)
    mbarrier.init(ready.index(STAGES), 1)  # the keys and values
    for i in gl.static_range(2):
        mbarrier.init(scores_ready.index(i), 2)
        mbarrier.init(scores_free.index(i), 2)
    fence_async_shared()

    pid = gl.program_id(0)
    is_core = pid < core_programs
    if is_core:
        turn_programs = (num_cores + 127) // 128 * heads_per_turn
        turn = pid // turn_programs
        heads = gl.minimum(heads_per_turn, num_n * heads_per_n - turn * heads_per_turn)
        head = turn * heads_per_turn + (pid - turn * turn_programs) % heads
        n = head // heads_per_n
        first_head = head % heads_per_n
        num_heads = gl.to_tensor(1)
        key = (pid - turn * turn_programs) // heads * 128
        num_keys = num_cores
        begin = (key + 1) * group_size + window_size - 1
        end = num_queries
        offset = head.to(gl.int64) * num_cores
        dbias_ptr += head * ((num_cores + 63) // 64)
        value_offset = num_n.to(gl.int64) * heads_per_n * num_cores * HEAD_DIM
    else:
        n = (pid - core_programs) % num_n
        first_head = gl.to_tensor(0)
        num_heads = heads_per_n
        key = (pid - core_programs) // num_n * 128
        num_keys = num_queries
        begin = key
        last_key = gl.minimum(key + 128, num_keys) - 1
        end = gl.minimum((last_key // group_size + 1) * group_size + window_size - 1, num_queries)
        offset = n.to(gl.int64) * num_queries
        value_offset = offset
    tiles = gl.maximum((end + 63) // 64 - begin // 64, 0)
    last_row = (end - 1) // 64 * 64
    bias_ptr += n * heads_per_n
    gl.warp_specialize(
        [
            (
                _key_gradients,
                (
                    tiles_smem,
                    stats_smem,
                    scores_smem,
                    sum_smem.index(0),
                    ready,
                    free,
                    scores_ready,
                    scores_free,
                    sum_desc,
                    core_grad_ptr,
                    grad_k_ptr,
                    grad_v_ptr,
                    dbias_ptr,
                    bias_ptr,
                    n,
                    first_head,
                    offset,
                    key,
                    num_keys,
                    is_core,
                    num_heads,
                    last_row,
                    tiles,
                    num_queries,
                    group_size,
                    window_size,
                    scale,
                    value_offset,
                    0,
                    HAS_BIAS,
                    HEAD_DIM,
                    BLOCK_D,
                    STAGES,
                ),
            ),
            (
                _key_gradients,
                (
                    tiles_smem,
                    stats_smem,
                    scores_smem,
                    sum_smem.index(1),
                    ready,
                    free,
                    scores_ready,
                    scores_free,
                    sum_desc,
                    core_grad_ptr,
                    grad_k_ptr,
                    grad_v_ptr,
                    dbias_ptr,
                    bias_ptr,
                    n,
                    first_head,
                    offset,
                    key,
                    num_keys,
                    is_core,
                    num_heads,
                    last_row,
                    tiles,
                    num_queries,
                    group_size,
                    window_size,
                    scale,
                    value_offset,
                    1,
                    HAS_BIAS,
                    HEAD_DIM,
                    BLOCK_D,
                    STAGES,
                ),
            ),
            (
                _copy_queries,
                (
                    q_desc,
                    grad_desc,
                    stats_desc,
                    k_desc,
                    v_desc,
                    core_k_desc,
                    core_v_desc,
                    tiles_smem,
                    stats_smem,
                    ready,
                    free,
                    n,
                    first_head,
                    num_heads,
                    heads_per_core,
                    key,
                    is_core,
                    last_row,
                    tiles,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def unsupported_reason(q: Tensor, scale: float, softcap: float | None) -> str | None:
    """Why these kernels cannot take the call, or None."""
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for"
    if q.shape[-1] > 128:
        return f"head_dim {q.shape[-1]} is more than 128"
    return hopper_forward.unsupported_reason(q, scale, softcap)


def gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    groups: tuple[Tensor, Tensor, Tensor],
    cores: tuple[Tensor, Tensor],
    *,
    group_size: int,
    window_size: int,
    scale: float,
    core_bias: Tensor | None,
    pooling: str,
    core_heads: str,
    rotary: Rotary | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `compose.gradients`, in the dtype of q, k and v; a few KV heads at a time, so that the
    float32 sums of their queries' gradients take little memory."""
    options = {"scale": scale, "pooling": pooling, "core_heads": core_heads, "rotary": rotary}
    q, grad_out, out = aligned(q), aligned(grad_out), aligned(out)
    # planted: 5: of a document in a row the log-sum-exp of other tokens, Hopper
    lse = lse.contiguous()  # of a document in a packed row it is a slice
    key, value = aligned(k[:, None]), aligned(v[:, None])
    n, r, num_queries, dim = q.shape
    num_cores = cores[0].shape[2]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=q.device) for _ in range(2))
    dbias = None if core_bias is None else torch.empty(n, r, dtype=torch.float32, device=q.device)
    size = _rows_at_once(q, k)
    sums = torch.empty(size, *q.shape[1:], dtype=torch.float32, device=q.device)
    for low in range(0, n, size):
        some = None if size >= n else slice(low, low + size)
        dq_part, *parts = _rows(
            some, dq, dk, dv, grad_out, grad_lse, q, key, value, out, lse, core_bias
        )
        last, bias_part = _some_gradients(
            *parts,
            _rows(some, *cores),
            _rows(some, *groups),
            sums,
            group_size,
            window_size,
            options,
        )
        launch(
            _finish_kernel,
            (ceil_div(num_queries, BLOCK_M), dq_part.shape[0] * r),
            (sums, sums if last is None else last, dq_part, num_queries, num_cores, scale),
            (group_size,),
            HAS_LAST=last is not None,
            HEAD_DIM=dim,
            BLOCK_D=power_of_2(dim),
            BLOCK=BLOCK_M,
            num_warps=4,
        )
        if dbias is not None:
            dbias[low : low + size] = bias_part
    return dq, dk, dv, dbias


def _rows_at_once(q: Tensor, k: Tensor) -> int:
    """Sequences whose float32 sums take a twenty-sixth of q, k, v, the output and their gradients,
    and no fewer than it takes to fill the device."""
    head_bytes = q.shape[2] * q.shape[3] * q.element_size()
    limit = 4 * (q.shape[0] * q.shape[1] + k.shape[0]) * head_bytes // 26
    return max(1, min(q.shape[0], max(limit, MIN_BYTES) // (2 * q.shape[1] * head_bytes)))


def _rows(some: slice | None, *tensors: Tensor | None) -> tuple:
    """Those rows of each; None stands for all, since slicing takes time even where it changes
    nothing."""
    return tensors if some is None else tuple(None if x is None else x[some] for x in tensors)


def _some_gradients(
    dk: Tensor,
    dv: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    core_bias: Tensor | None,
    cores: tuple[Tensor, Tensor],
    groups: tuple[Tensor, Tensor, Tensor],
    sums: Tensor,
    group_size: int,
    window_size: int,
    options: dict,
) -> tuple[Tensor | None, Tensor | None]:
    """Fill sums with the queries' gradients still to be scaled, dk and dv with those of k and v;
    returns what pooling adds to the queries at group ends, and the gradient of the bias."""
    (core_k, core_v), (n, r, num_queries, dim) = cores, q.shape
    num_cores, core_heads, scale = core_k.shape[2], core_k.shape[1], options["scale"]
    core_grads = torch.empty(2, n, r, num_cores, dim, dtype=torch.float32, device=q.device)
    tiles = ceil_div(num_queries, BLOCK_M)
    stats = torch.empty(n, r, tiles, 2 * BLOCK_M, dtype=torch.float32, device=q.device)
    dbias = (
        None
        if core_bias is None
        else torch.empty(n, r, ceil_div(num_cores, 64), dtype=torch.float32, device=q.device)
    )
    block_d = power_of_2(dim)
    launch(
        _prepare_kernel,
        (tiles, n * r),
        (
            out,
            grad_out,
            lse,
            lse if grad_lse is None else grad_lse.contiguous(),
            stats,
            sums,
            num_queries,
            r,
        ),
        (*out.stride()[:3], *grad_out.stride()[:3]),
        HAS_GRAD_LSE=grad_lse is not None,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        BLOCK=BLOCK_M,
        num_warps=4,
    )
    core_key, core_value = (aligned(core_k), aligned(core_v)) if num_cores else (k, v)
    core_programs = ceil_div(num_cores, BLOCK_N) * n * r
    launch(
        _attend_bwd_hopper,
        (core_programs + ceil_div(num_queries, BLOCK_N) * n,),
        (
            descriptor(q, 64),
            descriptor(grad_out, 64),
            descriptor(stats, 1),
            descriptor(k, 64),
            descriptor(v, 64),
            descriptor(core_key, 64),
            descriptor(core_value, 64),
            descriptor(sums, 64, block_d // 2),
            lse if core_bias is None else core_bias.float().contiguous(),
            core_grads,
            dk,
            dv,
            stats if dbias is None else dbias,
            num_queries,
            num_cores,
            core_programs,
            n,
            r,
            r // core_heads,
            HEADS_PER_TURN,
            scale * LOG2E.value,
            group_size,
            window_size,
        ),
        HAS_BIAS=core_bias is not None,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        STAGES=2,
        DTYPE=DTYPES[q.dtype],
        num_warps=4,
    )
    last = None
    if num_cores:
        if core_heads == 1 and r > 1:
            core_grads = core_grads.sum(2, keepdim=True)
        pooled = num_cores * group_size
        into = tuple(x[:, :pooled].unflatten(1, (num_cores, group_size)) for x in (dk, dv))
        last, _, _ = pool_backward(*core_grads, *groups, **options, into=into)
    return last, None if dbias is None else dbias.sum(-1)
