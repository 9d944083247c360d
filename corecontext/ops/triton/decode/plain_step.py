"""One decoding step of the compact cache in two launches: store, pool and attend; merge the parts.

A step is bound by reading the cache once, so several programs read an even piece of a KV head's
entries each, and write a *part*, the softmax over it. They read the length on the device: the
launch does not depend on it and can be captured in a graph. Storing and pooling need no launch of
their own, as no other program of the step reads what they write (`append_token`).
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Slots, Spec
from corecontext.ops.triton.decode.append_token import append_token
from corecontext.ops.triton.decode.attend_entries import (
    attend_entries,
    load_queries,
    num_entries,
    row_of,
    store_part,
)
from corecontext.ops.triton.decode.merge_parts import merge
from corecontext.ops.triton.decode.plan import cache_form, pooling_of, step_plan
from corecontext.ops.triton.launch import contiguous_rows, ints, launch
from corecontext.ops.triton.primitives import integers
from corecontext.ops.triton.tiles import chip_of


@triton.jit
def step_kernel(
    tokens,
    cache,
    tables,
    length,
    partial,
    numbers,
    scale,
    softcap,
    q_strides,
    k_strides,
    v_strides,
    ON_DEVICE: tl.constexpr,
    CACHE: tl.constexpr,
    POOLING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Append the new tokens and attend in parts.

    Grid: (B Hkv, parts). The first program of a KV head stores its new token and pools the group
    that it closes; each other one reads an even piece of the visible entries once, at least a tile,
    for all heads. Each writes a part.

    Args:
        tokens: Pointers to q [B, H, 1, D], k and v [B, Hkv, 1, D].
        cache: Pointers to keys and values [B Hkv, capacity, D], their scales, not read unless in 8
            bits, and masses [B Hkv, capacity], not read unless there are any.
        tables: Pointers to cosines and sines [g, R / 2] of the rotation to a group's middle.
        length: Pointers to the length on the device, and to each row's padding.
        partial: Pointers to outputs [B Hkv, parts, heads, D] and log-sum-exp [B Hkv, parts, heads]
            in float32.
        CACHE, POOLING, TILE: `plan.CacheForm`, `plan.Pooling` and `plan.Tile`.
    """
    seen, kv_heads, capacity, ring_size, group_size, window_size = integers(numbers)
    n, batch, head, position = row_of(length, seen, kv_heads, ON_DEVICE)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    slot = tl.maximum(position, 0) % ring_size
    q_ptr = tokens[0] + batch * q_strides[0] + head * TILE.heads * q_strides[1]
    cache_of_row = (
        cache[0] + n * capacity * TILE.dim,
        cache[1] + n * capacity * TILE.dim,
        cache[2] + n * capacity,
        cache[3] + n * capacity,
        cache[4] + n * capacity,
    )
    first = (n * programs + program) * TILE.heads
    part = (partial[0] + first * TILE.dim, partial[1] + first)
    factors = (scale, softcap)
    if program == 0:
        k_ptr = tokens[1] + batch * k_strides[0] + head * k_strides[1]
        v_ptr = tokens[2] + batch * v_strides[0] + head * v_strides[1]
        new = (q_ptr, q_strides[1], k_ptr, v_ptr)
        place = (position, slot, capacity, ring_size, group_size)
        append_token(new, cache_of_row, tables, part, place, factors, CACHE, POOLING, TILE)
    else:
        q = load_queries(q_ptr, q_strides[1], TILE)  # [heads, D]
        sizes = (position, capacity, ring_size, group_size, window_size)
        entries, cores = num_entries(sizes, CACHE.sinks)
        pieces = programs - 1  # at least 1: `step_plan` has two parts or more
        size = tl.maximum((entries + pieces - 1) // pieces, TILE.block_n)
        begin = (program - 1) * size
        bounds = (begin, tl.minimum(begin + size, entries))
        reach = position - CACHE.sinks - cores * group_size  # older tokens are in core tokens
        around = (position, slot, reach, ring_size)
        sums = attend_entries(q, cache_of_row, bounds, around, factors, CACHE, TILE)
        store_part(part, sums, TILE)


def _decode(q: Tensor, k: Tensor, v: Tensor, slots: Slots, spec: Spec) -> Tensor:
    """Launch both kernels of a step."""
    q, k, v = map(contiguous_rows, (q, k, v))
    batch, num_heads, _, head_dim = q.shape
    keys, values = slots.keys, slots.values
    kv_heads, capacity = keys.shape[1:3]
    rows = batch * kv_heads
    heads = num_heads // kv_heads
    plan = step_plan(chip_of(q.device), q.dtype, rows, heads, head_dim, capacity)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    acc = torch.empty((rows, plan.num_parts, heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, plan.num_parts, heads), dtype=torch.float32, device=q.device)
    # A launch needs pointers: other tensors stand in for those that are missing and not read.
    on_device = isinstance(slots.seen, Tensor)
    length = slots.seen if on_device else slots.pad
    key_scales = keys if slots.key_scales is None else slots.key_scales
    value_scales = values if slots.value_scales is None else slots.value_scales
    masses = keys if slots.masses is None else slots.masses
    with torch.cuda.device_of(q):
        launch(
            step_kernel,
            (rows, plan.num_parts),
            (
                *((q, k, v), (keys, values, key_scales, value_scales, masses)),
                *(slots.rotation or (keys, keys), (length, slots.pad), (acc, lse)),
                ints(
                    *(0 if on_device else slots.seen, kv_heads, capacity, slots.ring_size),
                    *(spec.group_size, spec.window_size),
                ),
                *(float(spec.scale), float(spec.softcap or 1.0)),
            ),
            (q.stride()[:2], k.stride()[:2], v.stride()[:2]),
            ON_DEVICE=on_device,
            CACHE=cache_form(slots, spec),
            POOLING=pooling_of(slots, spec, plan.tile),
            TILE=plan.tile,
            num_warps=plan.num_warps,
        )
        # It adds the new token to a length on the device, which no program reads any more.
        merge((acc, lse), out, length if on_device else None)
    return out


def slots_of(
    buffers: list[Tensor],
    seen: Tensor | None,
    pad: Tensor,
    tables: list[Tensor],
    sizes: list[int],
    factors: list[float],
    cache_dtype: str,
) -> tuple[Slots, Spec]:
    """Return the slots and the settings that `arguments_of` took apart."""
    keys, values, *scales = buffers
    masses = scales.pop() if len(scales) % 2 else None
    group_size, window_size, sink_size, ring_size, interleaved, length = sizes
    scale, softcap = factors
    seen = length if seen is None else seen
    tables = tuple(tables) or None
    slots = Slots(
        keys, values, seen, pad, ring_size, tables, *(scales or (None, None)), cache_dtype, masses
    )
    spec = Spec(group_size, window_size, scale, sink_size=sink_size, softcap=softcap or None)
    if tables:  # of the rotation only the layout of pairs is read: the tables have its angles
        spec = spec.replace(rotary=Rotary(tables[0], bool(interleaved)))
    return slots, spec


def arguments_of(slots: Slots, spec: Spec) -> list[Any]:
    """Return the arguments of `_decode_op`, an operator of a graph, all but the tokens."""
    optional = (slots.key_scales, slots.value_scales, slots.masses)
    on_device = isinstance(slots.seen, Tensor)
    sizes = (spec.group_size, spec.window_size, spec.sink_size, slots.ring_size)
    # mutant decoding: a compiled step takes interleaved pairs for halves
    interleaved = spec.rotary is not None and spec.rotary.interleaved
    return [
        [slots.keys, slots.values, *(x for x in optional if x is not None)],
        slots.seen if on_device else None,
        slots.pad,
        list(slots.rotation or ()),
        [int(x) for x in (*sizes, interleaved, 0 if on_device else slots.seen)],
        [float(spec.scale), float(spec.softcap or 0)],
        slots.cache_dtype,
    ]


@torch.library.custom_op("corecontext::decode_step", mutates_args=("buffers", "seen"))
def _decode_op(
    tokens: list[Tensor],
    buffers: list[Tensor],
    seen: Optional[Tensor],  # noqa: UP045 (torch 2.9 reads schemas in this form)
    pad: Tensor,
    tables: list[Tensor],
    sizes: list[int],
    factors: list[float],
    cache_dtype: str,
) -> Tensor:
    """Run `_decode` as one operator of a graph.

    Args:
        tokens: q, k and v.
        buffers: Keys, values, in 8 bits the scales of both, and masses where there are any.
        seen: `Slots.seen` where it is on the device; else None, and it is the last of `sizes`.
        tables: `Slots.rotation`, or empty.
        sizes: group_size, window_size, sink_size, ring_size, whether pairs are interleaved, seen.
        factors: scale, and softcap or 0.
    """
    return _decode(*tokens, *slots_of(buffers, seen, pad, tables, sizes, factors, cache_dtype))


@_decode_op.register_fake
def _(tokens, *args):
    q = tokens[0]
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def decode_step(q: Tensor, k: Tensor, v: Tensor, slots: Slots, spec: Spec) -> Tensor:
    """Append a token to each row of a compact cache and attend from it (docs/math.md, eq. 1 to 5).

    Args:
        q: [B, H, 1, D], rotary applied.
        k, v: [B, Hkv, 1, D].
        slots: The new token and the core tokens of a group that it closes are written in place; a
            core token without a slot is dropped. A tensor `seen` counts the new token, in place.

    Returns:
        [B, H, 1, D] in the dtype of q. Sums are float32, the same from run to run.
    """
    if not torch.compiler.is_compiling():
        return _decode(q, k, v, slots, spec)
    # An operator's dispatch costs more than the launches, so only graphs have it.
    return _decode_op([q, k, v], *arguments_of(slots, spec))
