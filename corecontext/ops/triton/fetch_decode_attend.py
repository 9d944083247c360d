"""Attend in parts to the raw tokens of chosen groups and to a compact cache without their core
tokens, while the new token is stored."""

from __future__ import annotations

import triton
import triton.language as tl

from corecontext.ops.triton.decode import (
    append_token,
    attend_share,
    store_part,
    tile_products,
    weighted_sum,
)
from corecontext.ops.triton.primitives import log2_scores, softmax_step, tile_mask


@triton.jit
def _store_raw(tokens, raw, position, room, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the new key and value of a row at its position; padding has none.

    Args:
        tokens: Pointers to the new key and value.
        raw: Pointers to the row's raw keys and values.
        room: Positions that there are.
    """
    dims = tl.arange(0, BLOCK_D)
    mask = dims < HEAD_DIM
    at = tl.maximum(position, 0).to(tl.int64) * HEAD_DIM + dims
    stored = tl.where((position >= 0) & (position < room), HEAD_DIM, 0)
    k = tl.load(tokens[0] + dims, mask=mask, other=0.0)
    v = tl.load(tokens[1] + dims, mask=mask, other=0.0)
    # planted: fetch: a fused step leaves its raw token unstored
    tl.store(raw[0] + at, k, mask=dims < stored)
    tl.store(raw[1] + at, v, mask=dims < stored)


@triton.jit
def _attend_fetched(
    queries,
    raw,
    chosen_ptr,
    parts,
    share,
    sizes,
    scale,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from all heads to the raw tokens of a share of the chosen groups, as `attend_share`.

    Args:
        raw: Pointers to the row's raw keys and values.
        chosen_ptr: Numbers of the row's groups, -1 for none.
        sizes: Groups of a share, groups chosen, and group_size.
    """
    q_ptr, q_stride = queries
    groups_each, num_chosen, group_size = sizes
    dims = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, BLOCK_M)
    mask = tile_mask(heads, HEADS, dims, HEAD_DIM)
    q = tl.load(q_ptr + heads[:, None] * q_stride + dims[None, :], mask=mask, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    offs = tl.arange(0, BLOCK_N)
    begin = share * groups_each * group_size
    end = tl.minimum(begin + groups_each * group_size, num_chosen * group_size)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        place = start + offs
        group = tl.load(chosen_ptr + place // group_size, mask=place < end, other=-1)
        seen = group >= 0
        # planted: fetch: a fused step reads groups as if there were no first tokens
        token = tl.where(seen, group, 0).to(tl.int64) * group_size + (place % group_size + SINKS)
        at = token[:, None] * HEAD_DIM + dims[None, :]
        exists = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(raw[0] + at, mask=exists, other=0.0)
        v = tl.load(raw[1] + at, mask=exists, other=0.0)
        products = tile_products(q, k, VECTOR)
        scores, _ = log2_scores(products, scale, 0.0, 1.0, False)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        weights, fade, running_max, running_sum = softmax_step(
            scores, running_max, running_sum, True
        )
        acc = acc * fade[:, None] + weighted_sum(weights, v, VECTOR)
    store_part(parts, (acc, running_sum, running_max), heads, dims, mask, HEADS, HEAD_DIM)


@triton.jit(
    do_not_specialize=[
        *("seen", "kv_heads", "capacity", "ring_size", "group_size", "window_size"),
        *("room", "fetched_room", "marks_stride", "num_shares", "groups_each"),
    ]
)
def fetch_step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    mass_ptr,
    marks_ptr,
    chosen_ptr,
    raw_k_ptr,
    raw_v_ptr,
    fetched_k_ptr,
    fetched_v_ptr,
    seen_ptr,
    pad_ptr,
    cos_ptr,
    sin_ptr,
    acc_ptr,
    lse_ptr,
    seen,
    kv_heads,
    capacity,
    ring_size,
    group_size,
    window_size,
    room,
    fetched_room,
    marks_stride,
    num_shares,
    groups_each,
    scale,
    bias,
    q_strides,
    k_strides,
    v_strides,
    num_chosen,
    ON_DEVICE: tl.constexpr,
    SINKS: tl.constexpr,
    FETCHED_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Append the new tokens and attend in parts, as `decode._step_kernel`, with fetch.

    Grid: (B Hkv, 1 + num_shares + parts of fetched tokens). The first program of a KV head stores
    the new token twice and pools the group that it closes: no other program of the step reads what
    it writes. The next ones, which read most, attend to the compact entries without the core tokens
    of fetched groups, the others to fetched tokens.

    Args:
        chosen_ptr: Numbers of the groups in the fetched tokens, -1 for none.
        fetched_k_ptr: [B Hkv, fetched_room, HEAD_DIM], the raw keys behind FETCHED_SINKS tokens, or
            the slots of groups; values likewise.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    n = row.to(tl.int64)
    batch = (row // kv_heads).to(tl.int64)
    head = (row % kv_heads).to(tl.int64)
    if ON_DEVICE:
        seen = tl.load(seen_ptr)
    position = (seen - tl.load(pad_ptr + batch)).to(tl.int32)
    slot = tl.maximum(position, 0) % ring_size
    q_ptr += batch * q_strides[0] + head * HEADS * q_strides[1]
    keys_ptr += n * capacity * HEAD_DIM
    values_ptr += n * capacity * HEAD_DIM
    mass_ptr += n * capacity
    raw_k_ptr += n * room * HEAD_DIM
    raw_v_ptr += n * room * HEAD_DIM
    first = (n * tl.num_programs(1) + part) * HEADS
    parts = (acc_ptr + first * HEAD_DIM, lse_ptr + first)
    marks_ptr += n * marks_stride
    buffers = (keys_ptr, values_ptr, keys_ptr, values_ptr, mass_ptr, marks_ptr)
    if part == 0:
        k_ptr += batch * k_strides[0] + head * k_strides[1]
        v_ptr += batch * v_strides[0] + head * v_strides[1]
        append_token(
            (q_ptr, q_strides[1], k_ptr, v_ptr),
            buffers,
            (cos_ptr, sin_ptr),
            parts,
            (position, slot, capacity, ring_size, group_size),
            scale,
            1.0,
            "auto",
            SINKS,
            HEADS,
            WIDTH,
            POOLS,
            HEAD_DIM,
            HALF,
            INTERLEAVED,
            HAS_MASS,
            False,
            BLOCK_R,
            BLOCK_G,
            BLOCK_D,
        )
        _store_raw((k_ptr, v_ptr), (raw_k_ptr, raw_v_ptr), position, room, HEAD_DIM, BLOCK_D)
    elif part <= num_shares:
        attend_share(
            (q_ptr, q_strides[1]),
            buffers,
            parts,
            (part - 1, num_shares),
            (position, slot, capacity, ring_size, group_size, window_size),
            scale,
            1.0,
            bias,
            "auto",
            SINKS,
            HEADS,
            WIDTH,
            HAS_BIAS,
            HAS_MASS,
            True,
            False,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            VECTOR,
            STAGES,
        )
    else:
        fetched = n * fetched_room * HEAD_DIM
        _attend_fetched(
            (q_ptr, q_strides[1]),
            (fetched_k_ptr + fetched, fetched_v_ptr + fetched),
            chosen_ptr + n * num_chosen,
            parts,
            part - 1 - num_shares,
            (groups_each, num_chosen, group_size),
            scale,
            FETCHED_SINKS,
            HEADS,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            VECTOR,
            STAGES,
        )
