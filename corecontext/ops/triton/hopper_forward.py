"""Attention over [core tokens; local tokens] for Hopper (compute capability 9.0), written in
Triton's Gluon.

The same mathematics as `attend.py`, whose kernels run everywhere. Here a program is three groups of
warps: one copies keys and values into shared memory by the tensor memory accelerator, two own 64
queries each, multiply with asynchronous warpgroup instructions and take turns, so that the softmax
of one runs under the products of the other. Core tiles and local tiles form one sequence of key
tiles; only tiles that some row sees in part are masked.
"""

from __future__ import annotations

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
from corecontext.ops.triton.launch import ceil_div, launch, power_of_2
from corecontext.ops.triton.tensor_memory import (
    DTYPES,
    aligned,
    copy_in,
    copy_out,
    descriptor,
    wait_out,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
CACHE_BYTES = (
    16 << 20
)  # of core tokens in use at a time: what stays in the L2 cache beside everything else


@gluon.jit
def _cores_of(position, group_size, window_size):
    """j(t); // truncates toward zero, so the difference is clamped first."""
    return gl.maximum(position + 1 - window_size, 0) // group_size


@gluon.jit
def _item(
    index,
    num_items,
    num_tiles,
    num_heads,
    heads_per_turn,
    q_start,
    num_queries,
    group_size,
    window_size,
    BLOCK_N: gl.constexpr,
):
    """Work item `index`: its head and first row; core tiles, all tiles and first raw token of its
    128 queries.

    Heads come in turns, few enough at a time that their core tokens stay in the L2 cache; of those,
    the tiles that see most come first. Every second round of programs runs backwards, so that all
    programs get equal work."""
    round = index // gl.num_programs(0)
    begin = round * gl.num_programs(0)
    end = gl.minimum(begin + gl.num_programs(0), num_items)
    index = gl.where(round % 2 == 0, index, begin + end - 1 - index)
    turn = index // (heads_per_turn * num_tiles)
    within = index - turn * heads_per_turn * num_tiles
    heads = gl.minimum(heads_per_turn, num_heads - turn * heads_per_turn)
    head = turn * heads_per_turn + within % heads
    row = (num_tiles - 1 - within // heads) * 128
    local = _cores_of(q_start + row, group_size, window_size) * group_size
    last = q_start + gl.minimum(row + 128, num_queries) - 1
    core_tiles = (_cores_of(last, group_size, window_size) + BLOCK_N - 1) // BLOCK_N
    return head, row, core_tiles, core_tiles + (last - local + BLOCK_N) // BLOCK_N, local


@gluon.jit
def _copy(
    q_desc,
    k_desc,
    v_desc,
    core_k_desc,
    core_v_desc,
    q_smem,
    k_smem,
    v_smem,
    q_ready,
    q_free,
    k_ready,
    k_free,
    v_ready,
    v_free,
    num_items,
    num_tiles,
    num_heads,
    heads_per_turn,
    heads_per_n,
    heads_per_core,
    q_start,
    k_start,
    num_queries,
    group_size,
    window_size,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp: queries of each item, then each key tile and value tile in turn, into rings
    of STAGES."""
    step = 0
    count = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, row, core_tiles, tiles, local = _item(
            index,
            num_items,
            num_tiles,
            num_heads,
            heads_per_turn,
            q_start,
            num_queries,
            group_size,
            window_size,
            BLOCK_N,
        )
        n = head // heads_per_n
        r = head % heads_per_n
        for half in gl.static_range(2):
            mbarrier.wait(q_free.index(half), (count & 1) ^ 1)
            mbarrier.expect(q_ready.index(half), q_desc.block_type.nbytes)
            copy_in(q_desc, [n, r, row + 64 * half, 0], q_ready.index(half), q_smem.index(half))
        for i in range(tiles):
            stage = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            is_core = i < core_tiles
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
            if is_core:
                copy_in(
                    core_k_desc,
                    [n, r // heads_per_core, i * BLOCK_N, 0],
                    k_ready.index(stage),
                    k_smem.index(stage),
                )
            else:
                copy_in(
                    k_desc,
                    [n, 0, local - k_start + (i - core_tiles) * BLOCK_N, 0],
                    k_ready.index(stage),
                    k_smem.index(stage),
                )
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
            if is_core:
                copy_in(
                    core_v_desc,
                    [n, r // heads_per_core, i * BLOCK_N, 0],
                    v_ready.index(stage),
                    v_smem.index(stage),
                )
            else:
                copy_in(
                    v_desc,
                    [n, 0, local - k_start + (i - core_tiles) * BLOCK_N, 0],
                    v_ready.index(stage),
                    v_smem.index(stage),
                )
            step += 1
        count += 1


@gluon.jit
def _softmax(
    s,
    highest,
    total,
    i,
    core_tiles,
    local,
    whole,
    seen_by_all,
    first,
    cores,
    group_size,
    position,
    scale,
    bias,
    BLOCK_N: gl.constexpr,
    layout: gl.constexpr,
):
    """One step of the online softmax over key tile i: weights, and by how much earlier sums
    fade."""
    is_core = i < core_tiles
    start = gl.where(is_core, i * BLOCK_N, local + (i - core_tiles) * BLOCK_N)
    begin = gl.where(is_core, 0, seen_by_all)
    end = gl.where(is_core, whole, first + 1)
    if (start < begin) | (start + BLOCK_N > end):  # some row does not see some key
        keys = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        low = gl.where(is_core, 0, cores * group_size)
        high = gl.where(is_core, cores, position + 1)
        s = gl.where(
            (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None]), s, -float("inf")
        )
    shift = gl.where(is_core, bias, 0.0)
    highest_now = gl.maximum(highest, gl.max(s, 1) * scale + shift)
    finite = gl.where(
        highest_now == -float("inf"), 0.0, highest_now
    )  # a row that has seen no key yet
    weights = gl.exp2(s * scale - (finite - shift)[:, None])
    fade = gl.exp2(highest - finite)
    return weights, fade, highest_now, total * fade + gl.sum(weights, 1)


@gluon.jit
def _attend_rows(
    q_smem,
    out_smem,
    k_smem,
    v_smem,
    q_ready,
    q_free,
    k_ready,
    k_free,
    v_ready,
    v_free,
    my_turn,
    other_turn,
    out_desc,
    lse_ptr,
    bias_ptr,
    num_items,
    num_tiles,
    num_heads,
    heads_per_turn,
    heads_per_n,
    q_start,
    num_queries,
    group_size,
    window_size,
    scale,
    HALF: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    OWN_OUT: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One consumer: of each item one half, 64 queries, against all its key tiles.

    Scores of tile i and the output of tile i - 1 are asked for together, then the other consumer
    gets the tensor cores; so the softmax of one consumer always runs under products of the
    other."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    q = q_smem.reshape([64, BLOCK_D])
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    step = 0
    count = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, row, core_tiles, tiles, local = _item(
            index,
            num_items,
            num_tiles,
            num_heads,
            heads_per_turn,
            q_start,
            num_queries,
            group_size,
            window_size,
            BLOCK_N,
        )
        row += 64 * HALF
        bias = 0.0
        if HAS_BIAS:
            bias = gl.load(bias_ptr + head).to(gl.float32) * LOG2E
        first = q_start + row
        position = first + gl.arange(0, 64, rows)
        cores = _cores_of(position, group_size, window_size)
        whole = _cores_of(first, group_size, window_size)
        seen_by_all = (
            _cores_of(q_start + gl.minimum(row + 64, num_queries) - 1, group_size, window_size)
            * group_size
        )
        highest = gl.full([64], -float("inf"), gl.float32, rows)
        total = gl.full([64], 0.0, gl.float32, rows)
        acc = gl.zeros([64, BLOCK_D], gl.float32, o_layout)

        mbarrier.wait(q_ready, count & 1)
        mbarrier.wait(k_ready.index(step % STAGES), step // STAGES & 1)
        mbarrier.wait(my_turn, (step & 1) ^ (1 - HALF))
        s = warpgroup_mma(
            q,
            k_smem.index(step % STAGES).reshape([BLOCK_N, BLOCK_D]).permute([1, 0]),
            zero,
            use_acc=False,
            is_async=True,
        )
        mbarrier.arrive(other_turn)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_free.index(step % STAGES))
        weights, fade, highest, total = _softmax(
            s,
            highest,
            total,
            0,
            core_tiles,
            local,
            whole,
            seen_by_all,
            first,
            cores,
            group_size,
            position,
            scale,
            bias,
            BLOCK_N,
            s_layout,
        )
        p = gl.convert_layout(weights.to(dtype), p_layout)
        for i in range(1, tiles):
            before = step % STAGES
            phase = step // STAGES & 1
            step += 1
            stage = step % STAGES
            mbarrier.wait(k_ready.index(stage), step // STAGES & 1)
            mbarrier.wait(my_turn, (step & 1) ^ (1 - HALF))
            s = warpgroup_mma(
                q,
                k_smem.index(stage).reshape([BLOCK_N, BLOCK_D]).permute([1, 0]),
                zero,
                use_acc=False,
                is_async=True,
            )
            mbarrier.wait(v_ready.index(before), phase)
            acc = warpgroup_mma(
                p, v_smem.index(before).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True
            )
            mbarrier.arrive(other_turn)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(k_free.index(stage))
            weights, fade, highest, total = _softmax(
                s,
                highest,
                total,
                i,
                core_tiles,
                local,
                whole,
                seen_by_all,
                first,
                cores,
                group_size,
                position,
                scale,
                bias,
                BLOCK_N,
                s_layout,
            )
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(before))
            acc = acc * gl.convert_layout(fade, o_rows)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)
        if OWN_OUT:
            mbarrier.arrive(q_free)
        mbarrier.wait(v_ready.index(step % STAGES), step // STAGES & 1)
        acc = warpgroup_mma(
            p, v_smem.index(step % STAGES).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True
        )
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(step % STAGES))
        step += 1
        count += 1

        wait_out(0)  # the copy of the item before
        out_smem.reshape([64, BLOCK_D]).store(
            (acc / gl.convert_layout(total, o_rows)[:, None]).to(dtype)
        )
        fence_async_shared()
        copy_out(out_desc, [head // heads_per_n, head % heads_per_n, row, 0], out_smem)
        at = row + gl.arange(0, 64, rows)
        gl.store(
            lse_ptr + head.to(gl.int64) * num_queries + at,
            (highest + gl.log2(total)) * LN2,
            mask=at < num_queries,
        )
        if not OWN_OUT:
            wait_out(0)
            mbarrier.arrive(q_free)
    wait_out(0)


@gluon.jit(
    do_not_specialize=[
        "num_items",
        "num_tiles",
        "num_heads",
        "heads_per_turn",
        "heads_per_n",
        "heads_per_core",
        "num_queries",
        "q_start",
        "k_start",
        "group_size",
        "window_size",
    ]
)
def _attend_fwd_hopper(
    q_desc,
    k_desc,
    v_desc,
    core_k_desc,
    core_v_desc,
    out_desc,
    lse_ptr,
    bias_ptr,
    num_items,
    num_tiles,
    num_heads,
    heads_per_turn,
    heads_per_n,
    heads_per_core,
    num_queries,
    q_start,
    k_start,
    scale,
    group_size,
    window_size,
    HAS_BIAS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Grid: as many programs as the chip has multiprocessors; items of 128 queries of one head are
    dealt to them."""
    dtype: gl.constexpr = DTYPE
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, BLOCK_D], q_desc.layout)
    OWN_OUT: gl.constexpr = BLOCK_D <= 128  # else the output waits where the queries were
    out_smem = q_smem
    if OWN_OUT:
        out_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), 1)
        mbarrier.init(k_free.index(i), 2)
        mbarrier.init(v_ready.index(i), 1)
        mbarrier.init(v_free.index(i), 2)
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), 1)
        mbarrier.init(q_free.index(i), 1)
        mbarrier.init(turns.index(i), 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend_rows,
                (
                    q_smem.index(0),
                    out_smem.index(0),
                    k_smem,
                    v_smem,
                    q_ready.index(0),
                    q_free.index(0),
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    turns.index(0),
                    turns.index(1),
                    out_desc,
                    lse_ptr,
                    bias_ptr,
                    num_items,
                    num_tiles,
                    num_heads,
                    heads_per_turn,
                    heads_per_n,
                    q_start,
                    num_queries,
                    group_size,
                    window_size,
                    scale,
                    0,
                    HAS_BIAS,
                    OWN_OUT,
                    BLOCK_D,
                    BLOCK_N,
                    STAGES,
                ),
            ),
            (
                _attend_rows,
                (
                    q_smem.index(1),
                    out_smem.index(1),
                    k_smem,
                    v_smem,
                    q_ready.index(1),
                    q_free.index(1),
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    turns.index(1),
                    turns.index(0),
                    out_desc,
                    lse_ptr,
                    bias_ptr,
                    num_items,
                    num_tiles,
                    num_heads,
                    heads_per_turn,
                    heads_per_n,
                    q_start,
                    num_queries,
                    group_size,
                    window_size,
                    scale,
                    1,
                    HAS_BIAS,
                    OWN_OUT,
                    BLOCK_D,
                    BLOCK_N,
                    STAGES,
                ),
            ),
            (
                _copy,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    core_k_desc,
                    core_v_desc,
                    q_smem,
                    k_smem,
                    v_smem,
                    q_ready,
                    q_free,
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    num_items,
                    num_tiles,
                    num_heads,
                    heads_per_turn,
                    heads_per_n,
                    heads_per_core,
                    q_start,
                    k_start,
                    num_queries,
                    group_size,
                    window_size,
                    BLOCK_N,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def unsupported_reason(q: Tensor, scale: float, softcap: float | None) -> str | None:
    """Why these kernels cannot take the call, or None."""
    if nvidia_capability(q.device) != (9, 0):
        return f"device {q.device} has not compute capability 9.0"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is not bfloat16 or float16"
    if not 32 < q.shape[-1] <= 256 or q.shape[-1] % 8:
        return f"head_dim {q.shape[-1]} is not a multiple of 8 from 40 to 256"
    if softcap is not None or scale <= 0:
        return "scores are capped or their scale is not above 0"
    return None


@functools.cache
def num_programs(device: torch.device) -> int:
    """Multiprocessors of the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_k: Tensor,
    core_v: Tensor,
    *,
    q_start: int = 0,
    k_start: int = 0,
    group_size: int,
    window_size: int,
    scale: float,
    core_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `attend.attend`."""
    q, k, v = aligned(q), aligned(k[:, None]), aligned(v[:, None])
    core_k, core_v = (aligned(core_k), aligned(core_v)) if core_k.shape[2] else (k, v)
    n, r, num_queries, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    block_d = power_of_2(dim)
    block_n = 128 if block_d <= 128 else 64
    num_tiles = ceil_div(num_queries, 128)
    num_items = num_tiles * n * r
    heads_per_turn = r * max(1, CACHE_BYTES // (2 * core_k.shape[2] * dim * core_k.element_size()))
    launch(
        _attend_fwd_hopper,
        (min(num_programs(q.device), num_items),),
        (
            descriptor(q, 64),
            descriptor(k, block_n),
            descriptor(v, block_n),
            descriptor(core_k, block_n),
            descriptor(core_v, block_n),
            descriptor(out, 64),
            lse,
            lse if core_bias is None else core_bias.float().contiguous(),
            num_items,
            num_tiles,
            n * r,
            min(heads_per_turn, n * r),
            r,
            r // core_k.shape[1],
            num_queries,
            q_start,
            k_start,
            scale * LOG2E.value,
            group_size,
            window_size,
        ),
        HAS_BIAS=core_bias is not None,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        STAGES=2,
        DTYPE=DTYPES[q.dtype],
        num_warps=4,
    )
    return out, lse
