"""Attend from one query to the raw tokens of its chosen groups, for Hopper, written in Triton's
Gluon.

The same mathematics as `raw.fetch_fwd_kernel`, which runs everywhere. A program is one
warp. It asks the tensor memory accelerator for the tokens of groups a few groups ahead, so that no
instructions are spent on addresses, and holds scores transposed, [tokens, heads]: then the few
heads fill the short side of a matrix product.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from corecontext.ops.spec import Upstream
from corecontext.ops.triton.attend.anywhere import rule_of
from corecontext.ops.triton.attend.chosen import Call
from corecontext.ops.triton.attend.shares import groups_seen
from corecontext.ops.triton.launch import ints, launch, power_of_2
from corecontext.ops.triton.primitives import LN2, LOG2E, integers
from corecontext.ops.triton.tensor_memory import DTYPES, aligned, barriers, copy_in, descriptor

PAIRS = 2  # pairs of groups in shared memory


@gluon.jit
def _copy_pair(i, count, chosen, source, memory, GROUP_SIZE: gl.constexpr, PAIRS: gl.constexpr):
    """Copy the keys and values of groups 2 i and 2 i + 1; zeros behind the last of `count`.

    Args:
        source: KV head, descriptors of keys and values, num_tokens and sink_groups.
        memory: From `_start_copies`.
    """
    n, k_desc, v_desc, num_tokens, sink_groups = source
    k_smem, v_smem, ready = memory
    slot = i % PAIRS
    mbarrier.expect(ready.index(slot), 4 * k_desc.block_type.nbytes)
    for j in gl.static_range(2):
        group = gl.load(chosen + 2 * i + j, mask=2 * i + j < count, other=-1)
        token = gl.where(group < 0, num_tokens, (sink_groups + group) * GROUP_SIZE)
        copy_in(k_desc, [n, 0, token, 0], ready.index(slot), k_smem.index(2 * slot + j))
        copy_in(v_desc, [n, 0, token, 0], ready.index(slot), v_smem.index(2 * slot + j))


@gluon.jit
def _start_copies(
    pairs,
    count,
    chosen,
    source,
    GROUP_SIZE: gl.constexpr,
    PAIRS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Ask for the first PAIRS pairs of groups; return the memory of keys and of values, two groups
    to a slot, and the barrier of each slot."""
    _, k_desc, v_desc, _, _ = source
    k_smem = gl.allocate_shared_memory(DTYPE, [2 * PAIRS] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [2 * PAIRS] + v_desc.block_type.shape, v_desc.layout)
    ready = barriers(PAIRS, 1)
    fence_async_shared()
    memory = (k_smem, v_smem, ready)
    for i in gl.static_range(PAIRS):
        if i < pairs:
            _copy_pair(i, count, chosen, source, memory, GROUP_SIZE, PAIRS)
    return memory


@gluon.jit
def fetch_query_hopper(
    k_desc,
    v_desc,
    q_ptr,
    out_ptr,
    lse_ptr,
    chosen_ptr,
    numbers,
    scale,
    GROUP_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    PAIRS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Attend to the raw tokens of chosen groups and merge with out and lse, in place.

    Grid: (N T,). A program owns one query of all heads of a KV head. KV heads come one after the
    other, so that the keys and values in use are few.

    Args:
        q_ptr: [N, r, T, D], contiguous.
    """
    values = integers(numbers)
    num_tokens, q_start, num_queries, num_groups = values[:4]
    num_chosen, window_size, sink_groups = values[4:]
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    n = gl.program_id(0) // num_queries
    row = gl.program_id(0) % num_queries
    rule = (GROUP_SIZE, window_size, sink_groups)
    count = gl.minimum(groups_seen(q_start + row, rule, num_groups), num_chosen)
    # Without a group in the far past the first part is the whole.
    if count > 0:
        chosen = chosen_ptr + gl.program_id(0).to(gl.int64) * num_chosen
        pairs = (count + 1) // 2
        source = (n, k_desc, v_desc, num_tokens, sink_groups)
        memory = _start_copies(pairs, count, chosen, source, GROUP_SIZE, PAIRS, DTYPE)
        k_smem, v_smem, ready = memory

        # The queries, [dims, heads].
        first = (n.to(gl.int64) * HEADS * num_queries + row) * HEAD_DIM
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(1, b_layout))[:, None]
        heads = gl.arange(0, COLUMNS, gl.SliceLayout(0, b_layout))[None, :]
        q_tile = q_ptr + first + heads.to(gl.int64) * num_queries * HEAD_DIM + dims
        q = gl.load(q_tile, mask=(heads < HEADS) & (dims < HEAD_DIM), other=0.0)

        running_max = gl.full([COLUMNS], -float("inf"), gl.float32, gl.SliceLayout(0, layout))
        sums = gl.zeros([GROUP_SIZE, COLUMNS], gl.float32, layout)
        acc = gl.zeros([BLOCK_D, COLUMNS], gl.float32, layout)
        zero = gl.zeros([GROUP_SIZE, COLUMNS], gl.float32, layout)
        for i in range(pairs):
            slot = i % PAIRS
            mbarrier.wait(ready.index(slot), i // PAIRS & 1)
            k = k_smem.index(2 * slot).reshape([GROUP_SIZE, BLOCK_D]).load(a_layout)
            s = mma_v2(k, q, zero) * scale
            k = k_smem.index(2 * slot + 1).reshape([GROUP_SIZE, BLOCK_D]).load(a_layout)
            t = mma_v2(k, q, zero) * scale
            t = gl.where(2 * i + 1 < count, t, -float("inf"))
            new_max = gl.maximum(running_max, gl.max(gl.maximum(s, t), 0))
            s = gl.exp2(s - new_max[None, :])
            t = gl.exp2(t - new_max[None, :])
            fade = gl.exp2(running_max - new_max)[None, :]
            running_max = new_max
            sums = sums * fade + s + t
            acc = acc * fade
            v = v_smem.index(2 * slot).reshape([GROUP_SIZE, BLOCK_D]).permute([1, 0])
            acc = mma_v2(v.load(a_layout), gl.convert_layout(s.to(DTYPE), b_layout), acc)
            v = v_smem.index(2 * slot + 1).reshape([GROUP_SIZE, BLOCK_D]).permute([1, 0])
            acc = mma_v2(v.load(a_layout), gl.convert_layout(t.to(DTYPE), b_layout), acc)
            if i + PAIRS < pairs:
                _copy_pair(i + PAIRS, count, chosen, source, memory, GROUP_SIZE, PAIRS)

        # Two parts of one softmax (docs/math.md, eq. 8); the first always has a key.
        head = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        place = lse_ptr + (n.to(gl.int64) * HEADS + head) * num_queries + row
        lse = gl.load(place, mask=head < HEADS, other=0.0) * LOG2E
        top = gl.maximum(lse, running_max)
        fade = gl.exp2(running_max - top)
        kept = gl.exp2(lse - top)
        total = gl.sum(sums, 0) * fade + kept
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(1, layout))[:, None]
        out_tile = out_ptr + first + (head.to(gl.int64) * num_queries * HEAD_DIM)[None, :] + dims
        mask = (head < HEADS)[None, :] & (dims < HEAD_DIM)
        out = gl.load(out_tile, mask=mask, other=0.0).to(gl.float32)
        out = (acc * fade[None, :] + out * kept[None, :]) / total[None, :]
        gl.store(out_tile, out.to(DTYPE), mask=mask)
        gl.store(place, (top + gl.log2(total)) * LN2, mask=head < HEADS)


@gluon.jit
def fetch_query_dq_hopper(
    k_desc,
    v_desc,
    q_ptr,
    out_ptr,
    lse_ptr,
    grad_ptr,
    grad_lse_ptr,
    dq_ptr,
    delta_ptr,
    chosen_ptr,
    numbers,
    scale,
    query_scale,
    HAS_GRAD_LSE: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    PAIRS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Add the gradient of queries through the raw tokens of chosen groups, times query_scale, to
    dq, in place; write delta = sum(grad out) - grad lse.

    Grid: as that of the forward, which begins at position 0. All tensors are contiguous.
    """
    num_tokens, num_queries, num_groups, num_chosen, window_size, sink_groups = integers(numbers)
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    n = gl.program_id(0) // num_queries
    row = gl.program_id(0) % num_queries
    first = (n.to(gl.int64) * HEADS * num_queries + row) * HEAD_DIM
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(1, b_layout))[:, None]
    heads = gl.arange(0, COLUMNS, gl.SliceLayout(0, b_layout))[None, :]
    tile = first + heads.to(gl.int64) * num_queries * HEAD_DIM + dims
    mask = (heads < HEADS) & (dims < HEAD_DIM)
    grad = gl.load(grad_ptr + tile, mask=mask, other=0.0)
    out = gl.load(out_ptr + tile, mask=mask, other=0.0)
    delta = gl.sum(out.to(gl.float32) * grad.to(gl.float32), 0)
    delta = gl.convert_layout(delta, columns)
    head = gl.arange(0, COLUMNS, columns)
    place = (n.to(gl.int64) * HEADS + head) * num_queries + row
    if HAS_GRAD_LSE:
        delta -= gl.load(grad_lse_ptr + place, mask=head < HEADS, other=0.0)
    gl.store(delta_ptr + place, delta, mask=head < HEADS)
    rule = (GROUP_SIZE, window_size, sink_groups)
    count = gl.minimum(groups_seen(row, rule, num_groups), num_chosen)
    if count > 0:
        chosen = chosen_ptr + gl.program_id(0).to(gl.int64) * num_chosen
        pairs = (count + 1) // 2
        source = (n, k_desc, v_desc, num_tokens, sink_groups)
        memory = _start_copies(pairs, count, chosen, source, GROUP_SIZE, PAIRS, DTYPE)
        k_smem, v_smem, ready = memory
        q = gl.load(q_ptr + tile, mask=mask, other=0.0)
        lse = gl.load(lse_ptr + place, mask=head < HEADS, other=0.0) * LOG2E
        dq = gl.zeros([BLOCK_D, COLUMNS], gl.float32, layout)
        zero = gl.zeros([GROUP_SIZE, COLUMNS], gl.float32, layout)
        for i in range(pairs):
            slot = i % PAIRS
            mbarrier.wait(ready.index(slot), i // PAIRS & 1)
            for j in gl.static_range(2):
                k = k_smem.index(2 * slot + j).reshape([GROUP_SIZE, BLOCK_D])
                v = v_smem.index(2 * slot + j).reshape([GROUP_SIZE, BLOCK_D])
                s = mma_v2(k.load(a_layout), q, zero) * scale
                products = mma_v2(v.load(a_layout), grad, zero)
                weights = gl.where(2 * i + j < count, gl.exp2(s - lse[None, :]), 0.0)
                s = (weights * (products - delta[None, :])).to(DTYPE)
                keys = k.permute([1, 0]).load(a_layout)
                dq = mma_v2(keys, gl.convert_layout(s, b_layout), dq)
            if i + PAIRS < pairs:
                _copy_pair(i + PAIRS, count, chosen, source, memory, GROUP_SIZE, PAIRS)
        rows = gl.arange(0, BLOCK_D, gl.SliceLayout(1, layout))[:, None]
        dq_tile = dq_ptr + first + (head.to(gl.int64) * num_queries * HEAD_DIM)[None, :] + rows
        exists = (head < HEADS)[None, :] & (rows < HEAD_DIM)
        total = gl.load(dq_tile, mask=exists, other=0.0) + dq * query_scale
        gl.store(dq_tile, total, mask=exists)


def takes(call: Call) -> bool:
    """Whether this kernel can take a call that `hopper_forward` takes."""
    return (
        call.choice.share == 1
        and call.tokens.q.shape[1] <= 16
        and call.tokens.q.shape[3] <= 128
        and call.spec.group_size in (16, 32)
    )


def attend(call: Call, out: Tensor, lse: Tensor) -> None:
    """Attend to the raw tokens of chosen groups and merge with out [N, r, T, D] and lse [N, r, T],
    in place."""
    tokens, cores, spec, _, choice = call
    k, v = (aligned(x[:, None]) for x in tokens[1:3])
    q = tokens.q.contiguous()
    n, _, num_queries, _ = q.shape
    group_size, window_size, sink_groups = rule_of(spec)
    launch(
        fetch_query_hopper,
        (n * num_queries,),
        (
            *(descriptor(x, group_size) for x in (k, v)),
            *(q, out, lse, choice.groups.contiguous()),
            ints(
                *(k.shape[2], tokens.q_start, num_queries, cores.k.shape[2]),
                *(choice.groups.shape[2], window_size, sink_groups),
            ),
            spec.scale * LOG2E.value,
        ),
        **_constants(call),
    )


def add_query_gradient(
    upstream: Upstream, call: Call, dq: Tensor, delta: Tensor, query_scale: float
) -> None:
    """Add the gradient through raw tokens of chosen groups, times query_scale, to dq [N, r, T, D]
    in float32, in place; fill delta [N, r, T]."""
    tokens, cores, spec, _, choice = call
    k, v = (aligned(x[:, None]) for x in tokens[1:3])
    q = tokens.q.contiguous()
    lse = upstream.lse.contiguous()
    grad_lse = lse if upstream.grad_lse is None else upstream.grad_lse.contiguous()
    group_size, window_size, sink_groups = rule_of(spec)
    launch(
        fetch_query_dq_hopper,
        (q.shape[0] * q.shape[2],),
        (
            *(descriptor(x, group_size) for x in (k, v)),
            *(q, upstream.out.contiguous(), lse, upstream.grad_out.contiguous(), grad_lse),
            *(dq, delta, choice.groups.contiguous()),
            ints(
                *(k.shape[2], q.shape[2], cores.k.shape[2]),
                *(choice.groups.shape[2], window_size, sink_groups),
            ),
            *(spec.scale * LOG2E.value, query_scale),
        ),
        HAS_GRAD_LSE=upstream.grad_lse is not None,
        **_constants(call),
    )


def _constants(call: Call) -> dict[str, Any]:
    """Return what both kernels are compiled for."""
    _, r, _, dim = call.tokens.q.shape
    return {
        "GROUP_SIZE": call.spec.group_size,
        "HEADS": r,
        "COLUMNS": 8 if r <= 8 else 16,
        "HEAD_DIM": dim,
        "BLOCK_D": power_of_2(dim),
        "PAIRS": PAIRS,
        "DTYPE": DTYPES[call.tokens.q.dtype],
        "num_warps": 1,
    }
