"""Kernels of a decoding step with fetch: the choice, and attention in parts while the new token is
stored."""

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
from corecontext.ops.triton.fetch_step_index import write_index
from corecontext.ops.triton.primitives import (
    TINY,
    log2_scores,
    softmax_step,
    tile_mask,
    visible_cores,
)


@triton.jit
def _rising(x):
    """Return whole numbers in the order of finite floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _choose(
    scores_ptr,
    lse_ptr,
    chosen_ptr,
    marks_ptr,
    sizes,
    num_chosen,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the numbers of the k groups with the largest sums of shares over the query heads
    (`ops.fetch.choice.choose`), rising, then -1, and a mark for each visible group.

    Bisection of a float's bits finds the sum of the last group chosen; of those with this sum the
    first ones are chosen.

    Args:
        sizes: Visible groups, groups that there is room for, and parts of the log-sum-exp.
    """
    count, num_groups, num_parts = sizes
    groups = tl.arange(0, BLOCK)
    inside = groups < count
    parts = tl.arange(0, BLOCK_S)
    # The log of the sum of shares.
    total = tl.full([BLOCK], -float("inf"), tl.float32)
    for h in range(HEADS):
        lse = tl.load(lse_ptr + parts * HEADS + h, mask=parts < num_parts, other=-float("inf"))
        highest = tl.maximum(tl.max(lse, 0), -1e30)  # none is seen
        lse = highest + tl.log2(tl.maximum(tl.sum(tl.exp2(lse - highest), 0), TINY))
        shares = tl.load(scores_ptr + h * num_groups + groups, mask=inside, other=0.0) - lse
        larger = tl.maximum(total, shares)
        total = larger + tl.log2(tl.exp2(total - larger) + tl.exp2(shares - larger))

    # At least k have low or more, fewer have high or more.
    values = tl.where(inside, _rising(total), -0x7FFFFFFF)
    low = tl.min(tl.where(inside, values, 0x7FFFFFF0), 0)
    high = tl.max(values, 0) + 1
    at_low = count
    at_high = count * 0
    while (at_low > num_chosen) & (low + 1 < high):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        at_middle = tl.sum((values >= middle).to(tl.int32), 0)
        enough = at_middle >= num_chosen
        at_low = tl.where(enough, at_middle, at_low)
        at_high = tl.where(enough, at_high, at_middle)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)

    is_chosen = inside & (values >= low)
    if at_low > num_chosen:
        is_last = inside & (values == low)
        before = tl.cumsum(is_last.to(tl.int32), 0)
        # planted: fetch: of equal shares a step chooses the last groups
        is_chosen = (inside & (values >= high)) | (is_last & (before <= num_chosen - at_high))
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen_ptr + place, groups, mask=is_chosen)
    slots = tl.arange(0, BLOCK_K)
    empty = (slots >= tl.minimum(at_low, num_chosen)) & (slots < num_chosen)
    tl.store(chosen_ptr + slots, slots * 0 - 1, mask=empty)
    tl.store(marks_ptr + groups, is_chosen.to(tl.int8), mask=inside)


@triton.jit(
    do_not_specialize=[
        *("seen", "kv_heads", "num_groups", "group_size", "window_size", "num_parts"),
        *("room", "num_centred"),
    ]
)
def fetch_choose_kernel(
    scores_ptr,
    lse_ptr,
    chosen_ptr,
    marks_ptr,
    k_ptr,
    raw_k_ptr,
    centre_ptr,
    codes_ptr,
    scales_ptr,
    rotation_ptr,
    seen_ptr,
    pad_ptr,
    seen,
    kv_heads,
    num_groups,
    group_size,
    window_size,
    num_parts,
    room,
    num_centred,
    k_strides,
    num_chosen,
    ON_DEVICE: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALES: tl.constexpr,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose groups for each row of KV heads, and write the index of an earlier group, which no
    query sees yet, where the new token closes one.

    Grid: (B Hkv, 2), a program for each of the two.
    """
    row = tl.program_id(0)
    n = row.to(tl.int64)
    batch = (row // kv_heads).to(tl.int64)
    if ON_DEVICE:
        seen = tl.load(seen_ptr)
    later = (seen - tl.load(pad_ptr + batch)).to(tl.int32) - SINKS
    if tl.program_id(1) == 0:
        count = tl.minimum(visible_cores(later, group_size, window_size), num_groups)
        _choose(
            scores_ptr + n * HEADS * num_groups,
            lse_ptr + n * num_parts * HEADS,
            chosen_ptr + n * num_chosen,
            marks_ptr + n * num_groups,
            (count, num_groups, num_parts),
            num_chosen,
            HEADS,
            BLOCK,
            BLOCK_S,
            BLOCK_K,
        )
    else:
        group = tl.maximum(later + 1 - num_centred, 0) // group_size
        closes = ((later + SINKS + 1) % group_size == 0) & (later + 1 >= num_centred)
        if closes & (group < num_groups):
            BYTES: tl.constexpr = (HEAD_DIM * BITS + 7) // 8
            k_ptr += batch * k_strides[0] + (row % kv_heads).to(tl.int64) * k_strides[1]
            write_index(
                (raw_k_ptr + (n * room + SINKS) * HEAD_DIM, k_ptr),
                (
                    centre_ptr + n * HEAD_DIM,
                    codes_ptr + n * num_groups * PARTS * BYTES,
                    scales_ptr + n * num_groups * SCALES,
                    rotation_ptr,
                ),
                (later, group, group_size, num_centred),
                BITS,
                PARTS,
                SCALES,
                LEVELS,
                HEAD_DIM,
                BLOCK_P,
                BLOCK_C,
                BLOCK_D,
            )


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
        *("room", "num_groups", "num_shares", "groups_each"),
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
    num_groups,
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

    Grid: (B Hkv, 1 + parts of fetched tokens + num_shares). The first program of a KV head stores
    the new token twice and pools the group that it closes: no other program of the step reads what
    it writes. The next ones attend to fetched tokens, the
    others to the compact entries without the core tokens of fetched groups.
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
    marks_ptr += n * num_groups
    buffers = (keys_ptr, values_ptr, keys_ptr, values_ptr, mass_ptr, marks_ptr)
    num_fetching = tl.num_programs(1) - 1 - num_shares
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
    elif part <= num_fetching:
        _attend_fetched(
            (q_ptr, q_strides[1]),
            (raw_k_ptr, raw_v_ptr),
            chosen_ptr + n * num_chosen,
            parts,
            part - 1,
            (groups_each, num_chosen, group_size),
            scale,
            SINKS,
            HEADS,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            VECTOR,
            STAGES,
        )
    else:
        attend_share(
            (q_ptr, q_strides[1]),
            buffers,
            parts,
            (part - 1 - num_fetching, num_shares),
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
