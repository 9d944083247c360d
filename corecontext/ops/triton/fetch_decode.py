"""One decoding step with fetch in four Triton launches: score the index, choose, attend in parts
while the new token is stored, merge the parts.

Bytes that a step reads for each KV head, M groups seen: the index, M (P D B / 8 + 2) of them, which
is 2 D + 2 a group for pairs in 2 bits; M core tokens and at most s + g - 1 raw ones; and k g raw
tokens of groups chosen. 4 r M bytes of scores are written and read once, from the chip's own cache.
At 131,072 tokens, g = 16, s = 1,024, k = 64, D = 128 and 8 KV heads in 16 bits that is 17 + 38 + 4
MB, where CCA reads 38. Decoding the index takes 0.6 operations a code. The choice is one program
for each KV head, which reads 4 r M bytes.

All programs are split by shapes and share the entries seen by the length, which is read on the
device, so a captured step replays at any length.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from corecontext.config import parse_index
from corecontext.ops.capability import nvidia_capability
from corecontext.ops.fetch.index import num_centred, num_parts
from corecontext.ops.fetch.low_bits import LEVELS
from corecontext.ops.spec import FetchSlots, RawSlots, Slots, Spec
from corecontext.ops.triton.decode import _merge_kernel, arguments_of, slots_of, step_plan
from corecontext.ops.triton.fetch_decode_attend import fetch_step_kernel
from corecontext.ops.triton.fetch_decode_choice import fetch_choose_kernel
from corecontext.ops.triton.fetch_decode_index import fetch_scores_kernel
from corecontext.ops.triton.fetch_decode_slots import MOST_SLOTS, find_and_load
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, launch, power_of_2
from corecontext.ops.triton.tiles import Chip, chip_of

_MOST_GROUPS = 32768  # whose scores one program holds
_FETCHED_TOKENS = 128  # of a KV head, that one program attends to
_MOST_PARTS = 128  # that one program merges
_CHOICE_WARPS = 16
_REGISTERS = 168  # of a thread of four warps, so that three programs run on a multiprocessor


def fetch_step_unsupported_reason(spec: Spec, raw: RawSlots) -> str | None:
    """Return why `fetch_step` cannot take a cache, or None.

    The cache stores keys and values as they are; `spec` has its group size.
    """
    g = spec.group_size
    kind, _, bits = parse_index(spec.fetch_index)
    if not bits or (kind != "segments" and g % num_parts(spec.fetch_index, g)):
        return f"index {spec.fetch_index} of groups of {g} has no parts of one size in low bits"
    if spec.softcap is not None:
        return "a softcap needs the products with the centre"
    if num_centred(spec) < 2 * g:
        return f"window {spec.window_size} is less than two groups of {g}"
    if raw.codes.shape[2] > _MOST_GROUPS:
        return f"{raw.codes.shape[2]} groups are more than {_MOST_GROUPS}"
    if raw.slots is not None and raw.slots.keys.shape[2] > MOST_SLOTS:
        return f"{raw.slots.keys.shape[2]} slots are more than {MOST_SLOTS}"
    return None


def index_constants(spec: Spec, dim: int) -> dict[str, Any]:
    """Return the constants that kernels which read or write the index share."""
    kind, _, bits = parse_index(spec.fetch_index)
    parts = num_parts(spec.fetch_index, spec.group_size)
    return {
        "BITS": bits,
        "PARTS": parts,
        "SCALES": parts if kind == "bits" else 1,
        "LEVELS": LEVELS[bits],
        "HEAD_DIM": dim,
        # The least inner size of a matrix product of whole numbers is 32.
        "BLOCK_C": max(32 if bits == 2 else 16, power_of_2(ceil_div(dim * bits, 8))),
    }


def scores_constants(
    chip: Chip, dtype: torch.dtype, heads: int, index: dict[str, Any]
) -> dict[str, Any]:
    """Return the other constants of `fetch_scores_kernel`; without tensor cores, sums of vectors.

    Two warps hold the keys of a tile as the smaller operand of a matrix product needs them, so that
    bytes become levels in registers.
    """
    vector = dtype == torch.float32
    keys = 32
    if chip.shared_memory and not vector:
        keys = 256 * 128 // max(128, index["HEAD_DIM"])
    block_p = power_of_2(index["PARTS"])
    whole = index["BITS"] == 2 and not vector
    block_m = power_of_2(heads)
    if not vector:  # columns of the smallest matrix product, two for each head of whole numbers
        block_m = max(4 if whole else 8, block_m)
    return {
        "WHOLE": whole,
        # Instructions of NVIDIA's, whose registers have four neighbouring bytes where whole rows
        # are loaded.
        "ASM": whole
        and torch.version.hip is None
        and chip.shared_memory > 0
        and index["HEAD_DIM"] % 64 == 0,
        "BLOCK_M": block_m,
        "BLOCK_N": max(1, keys // block_p),
        "BLOCK_P": block_p,
        "BLOCK_D": max(16, power_of_2(index["HEAD_DIM"])),
        "VECTOR": vector,
        "STAGES": 4,
        "num_warps": 2,
    }


def scoring_splits(chip: Chip, rows: int, num_groups: int, block_n: int) -> int:
    """Return the number of programs that share the groups of each of `rows` KV heads: seven on a
    multiprocessor, fewer where each would not have three tiles."""
    fitting = 7 * chip.multiprocessors // rows
    return max(1, min(fitting, ceil_div(num_groups, 3 * block_n)))


def _decode(
    tokens: list[Tensor],
    slots: Slots,
    spec: Spec,
    core_bias: float,
) -> Tensor:
    """Launch the four kernels of a step."""
    raw = slots.raw
    assert raw is not None, "fetch reads raw tokens"
    q, k, v = map(contiguous_rows, tokens)
    batch, num_heads, _, dim = q.shape
    keys, values = slots.keys, slots.values
    kv_heads, capacity = keys.shape[1:3]
    rows = batch * kv_heads
    heads = num_heads // kv_heads
    num_groups = raw.codes.shape[2]
    g = spec.group_size
    chosen_groups = min(spec.fetch_groups, max(1, num_groups))
    chip = chip_of(q.device)
    plan = step_plan(chip, q.dtype, rows, heads, dim, capacity, g)
    tile = plan.step
    index = index_constants(spec, dim)
    scoring = scores_constants(chip, q.dtype, heads, index)
    block_p = scoring["BLOCK_P"]

    # Shares of the index, of the chosen groups and of the compact entries.
    num_scoring = scoring_splits(chip, rows, num_groups, scoring["BLOCK_N"])
    num_fetching = min(16, ceil_div(chosen_groups * g, _FETCHED_TOKENS))
    groups_each = ceil_div(chosen_groups, num_fetching)
    # No more programs than run at once, where that is less than a tile each.
    num_shares = min(plan.num_parts - 1, _MOST_PARTS - 1 - num_fetching)
    num_shares = max(num_shares - num_fetching, min(num_shares, 16))
    total = 1 + num_fetching + num_shares

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    block = max(16, power_of_2(num_groups))
    scores = make(rows, heads, block)
    words = 8 * scoring["BLOCK_M"] * index["BLOCK_C"] if scoring["WHOLE"] else 0
    scratch = make(rows, num_scoring, words, dtype=torch.int8)
    score_lse = make(rows, num_scoring, heads)
    chosen = make(rows, chosen_groups, dtype=torch.int32)
    marks = make(rows, block, dtype=torch.int8)
    acc = make(rows, total, heads, dim)
    lse = make(rows, total, heads)
    # Kernels do not touch the tensors that stand in for missing ones.
    on_device = isinstance(slots.seen, Tensor)
    if on_device:
        length = slots.seen
        seen = 0
    else:
        length = slots.pad
        seen = slots.seen
    cos, sin = slots.rotation or (keys, keys)
    masses = keys if slots.masses is None else slots.masses
    place = {"ON_DEVICE": on_device, "SINKS": spec.sinks, "HEADS": heads}
    rule = (num_groups, g, spec.window_size)
    with torch.cuda.device_of(q):
        launch(
            fetch_scores_kernel,
            (rows, num_scoring),
            (
                *(q, raw.rotations[0], raw.codes, raw.scales, scratch, scores, score_lse),
                *(length, slots.pad, seen, kv_heads, *rule, float(spec.scale)),
            ),
            (q.stride()[:2],),
            **place,
            **index,
            **scoring,
            WIDTH=block,
        )
        launch(
            fetch_choose_kernel,
            (rows, 2),
            (
                *(scores, score_lse, chosen, marks, k, raw.keys, raw.centre, raw.codes),
                *(raw.scales, raw.rotations[1], length, slots.pad, seen, kv_heads),
                *(*rule, num_scoring, raw.keys.shape[2], num_centred(spec)),
            ),
            (k.stride()[:2], chosen_groups),
            **place,
            **index,
            SEGMENTS=parse_index(spec.fetch_index).kind == "segments",
            BLOCK_G=power_of_2(g),
            BLOCK_P=max(16, block_p),
            BLOCK_D=tile["BLOCK_D"],
            BLOCK=block,
            BLOCK_H=power_of_2(heads),
            BLOCK_S=power_of_2(num_scoring),
            BLOCK_K=power_of_2(chosen_groups),
            num_warps=max(4, min(_CHOICE_WARPS, block // 512)),
        )
        fetched = (raw.keys, raw.values)
        fetched_room = raw.keys.shape[2]
        fetched_sinks = spec.sinks
        if raw.slots is not None:
            # Chosen groups are those of slots from here on.
            chosen = find_and_load(raw, chosen, marks, spec.sinks)
            fetched = (raw.slots.keys, raw.slots.values)
            fetched_room = raw.slots.keys.shape[2] * g
            fetched_sinks = 0
        launch(
            fetch_step_kernel,
            (rows, total),
            (
                *(q, k, v, keys, values, masses, marks, chosen, raw.keys, raw.values, *fetched),
                *(
                    length,
                    slots.pad,
                    cos,
                    sin,
                    acc,
                    lse,
                    seen,
                    kv_heads,
                    capacity,
                    slots.ring_size,
                    g,
                ),
                *(spec.window_size, raw.keys.shape[2], fetched_room, block),
                *(num_shares, groups_each, float(spec.scale), float(core_bias)),
            ),
            (q.stride()[:2], k.stride()[:2], v.stride()[:2], chosen_groups),
            ON_DEVICE=on_device,
            SINKS=spec.sinks,
            FETCHED_SINKS=fetched_sinks,
            HEADS=heads,
            WIDTH=heads if spec.core_heads == "query" else 1,
            POOLS=capacity > slots.ring_size + spec.sinks,
            HALF=0 if slots.rotation is None else cos.shape[1],
            INTERLEAVED=spec.rotary is not None and spec.rotary.interleaved,
            HAS_BIAS=core_bias != 0,
            HAS_MASS=slots.masses is not None,
            HEAD_DIM=dim,
            maxnreg=_REGISTERS if nvidia_capability(q.device) else None,
            **tile,
        )
        launch(
            _merge_kernel,
            (batch * num_heads,),
            (acc, lse, out, length, total),
            ON_DEVICE=on_device,
            HEADS=heads,
            HEAD_DIM=dim,
            **{**plan.merge, "BLOCK_P": power_of_2(total)},
        )
    return out


@torch.library.custom_op("corecontext::fetch_step", mutates_args=("buffers", "seen"))
def _fetch_op(
    tokens: list[Tensor],
    buffers: list[Tensor],
    seen: Optional[Tensor],  # noqa: UP045 (torch 2.9 reads schemas in this form)
    pad: Tensor,
    tables: list[Tensor],
    sizes: list[int],
    factors: list[float],
    index: str,
) -> Tensor:
    """Run `_decode` as one operator of a graph, as `decode._decode_op`.

    Args:
        buffers, tables, sizes: Those of `slots_of`, then `RawSlots` and its `FetchSlots`, its
            rotations, the groups that a step fetches and whether there are `FetchSlots`.
        index: `Spec.fetch_index`.
    """
    *sizes, num_groups, has_slots = sizes
    fetched = None
    if has_slots:
        fetched = FetchSlots(*buffers[-6:])
        buffers = buffers[:-6]
    arguments = (buffers[:-5], seen, pad, tables[:-2], sizes, factors, "auto")
    slots, spec, core_bias = slots_of(*arguments)
    spec = spec.replace(fetch_groups=num_groups, fetch_index=index)
    slots = slots._replace(raw=RawSlots(*buffers[-5:], tuple(tables[-2:]), fetched))
    return _decode(tokens, slots, spec, core_bias)


@_fetch_op.register_fake
def _(tokens, *args):
    q = tokens[0]
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def fetch_step(
    q: Tensor, k: Tensor, v: Tensor, slots: Slots, spec: Spec, core_bias: float = 0.0
) -> Tensor:
    """Append one token to each row of a cache with raw tokens, and attend with fetch, as
    `cache.fetch_step.attend_fetched`.

    Args:
        q: [B, H, 1, D], rotary applied.
        k, v: [B, Hkv, 1, D].
        slots: Written in place, as in `decode.decode_step`, its raw tokens and index too.

    Returns:
        [B, H, 1, D] in the dtype of q, the same from run to run.
    """
    if not torch.compiler.is_compiling():
        return _decode([q, k, v], slots, spec, core_bias)
    assert slots.raw is not None, "fetch reads raw tokens"
    buffers, seen, pad, tables, sizes, factors, _ = arguments_of(slots, spec, core_bias)
    *stored, rotations, fetched = slots.raw
    buffers = [*buffers, *stored, *(fetched or ())]
    tables = [*tables, *rotations]
    sizes = [*sizes, spec.fetch_groups, int(fetched is not None)]
    return _fetch_op([q, k, v], buffers, seen, pad, tables, sizes, factors, spec.fetch_index)
