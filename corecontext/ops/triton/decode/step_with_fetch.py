"""One decoding step with fetch in Triton launches: score the index, choose, attend in parts, merge
them. In a captured step attention to compact entries is a branch beside rotating the queries,
scoring, choosing and attention to fetched tokens, whose programs come first; it takes the core
tokens of all groups, and those of the groups chosen are taken out again. Where groups are loaded
from host memory, it begins after scoring, and goes on while they are. Where core tokens cannot be
taken out (`fetch_decode_plan.can_take_out`), attention waits for the choice, in four launches.

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

import functools
from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from corecontext.ops.capability import is_captured, nvidia_capability
from corecontext.ops.fetch.low_bits import LowBits
from corecontext.ops.spec import FetchSlots, RawSlots, Slots, Spec
from corecontext.ops.triton.decode.fetch_kernel import ATTEND, MERGE, fetch_step_kernel
from corecontext.ops.triton.decode.find_slots import MOST_SLOTS, find_and_load
from corecontext.ops.triton.decode.plain_step import arguments_of, slots_of
from corecontext.ops.triton.decode.plan import Launch, StepPlan, StepSizes, plan_of
from corecontext.ops.triton.launch import contiguous_rows, launch
from corecontext.ops.triton.tiles import chip_of

_MOST_GROUPS = 32768  # whose scores one program holds


def fetch_step_unsupported_reason(spec: Spec, raw: RawSlots) -> str | None:
    """Return why `fetch_step` cannot take a cache, or None.

    The cache stores keys and values as they are; `spec` has its group size.
    """
    g = spec.group_size
    index = spec.index
    if not isinstance(index, LowBits) or g % index.num_keys(g):
        return f"index {index.name} of groups of {g} has no parts of one size in low bits"
    if spec.softcap is not None:
        return "a softcap needs the products with the centre"
    if spec.num_centred < 2 * g:
        return f"window {spec.window_size} is less than two groups of {g}"
    if raw.codes.shape[2] > _MOST_GROUPS:
        return f"{raw.codes.shape[2]} groups are more than {_MOST_GROUPS}"
    if raw.slots is not None and raw.slots.keys.shape[2] > MOST_SLOTS:
        return f"{raw.slots.keys.shape[2]} slots are more than {MOST_SLOTS}"
    return None


class _Work(NamedTuple):
    """Hold the tensors that launches leave for the next ones, [B, Hkv, ...] with the shapes of
    `fetch_step_kernel`."""

    scratch: Tensor
    unit: Tensor
    scores: Tensor
    score_lse: Tensor
    chosen: Tensor
    marks: Tensor
    acc: Tensor
    lse: Tensor
    out: Tensor


class _Step(NamedTuple):
    """Hold the arguments of the launches of a step."""

    tokens: Sequence[Tensor]
    """q, k and v."""
    slots: Slots
    work: _Work
    plan: StepPlan
    spec: Spec
    core_bias: float


def _decode(tokens: list[Tensor], slots: Slots, spec: Spec, core_bias: float) -> Tensor:
    """Run the launches of a step."""
    raw = slots.raw
    assert raw is not None, "fetch reads raw tokens"
    q, k, v = map(contiguous_rows, tokens)
    batch, kv_heads, capacity, dim = slots.keys.shape
    heads = q.shape[1] // kv_heads
    num_groups = raw.codes.shape[2]
    num_chosen = min(spec.fetch_groups, max(1, num_groups))
    sizes = StepSizes(
        dtype=q.dtype,
        batch=batch,
        kv_heads=kv_heads,
        heads=heads,
        dim=dim,
        capacity=capacity,
        num_groups=num_groups,
        num_chosen=num_chosen,
        has_slots=raw.slots is not None,
        is_nvidia=nvidia_capability(q.device) is not None,
    )
    plan = plan_of(chip_of(q.device), sizes, spec, core_bias)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((batch, kv_heads, *shape), dtype=dtype, device=q.device)

    constants = plan.constants
    width = constants["WIDTH"]
    block_m = constants["SCORE_M"]
    words = 8 * block_m * constants["BLOCK_C"] if constants["WHOLE"] else 0
    work = _Work(
        scratch=make(plan.num_scoring, words, dtype=torch.int8),
        unit=make(block_m),
        scores=make(heads, width),
        score_lse=make(plan.num_scoring, heads),
        chosen=make(num_chosen, dtype=torch.int32),
        marks=make(width, dtype=torch.int8),
        acc=make(plan.num_parts, heads, dim),
        lse=make(plan.num_parts, heads),
        out=torch.empty_like(q, memory_format=torch.contiguous_format),
    )
    step = _Step((q, k, v), slots, work, plan, spec, core_bias)
    with torch.cuda.device_of(q):
        if constants["OVERLAPS"] and is_captured(q.device):
            _capture(step)
        else:
            for which in plan.launches:
                _launch(step, which)
    return work.out


def _capture(step: _Step) -> None:
    """Capture the launches of a step: attention to compact entries beside those that follow it, but
    the merge."""
    main = torch.cuda.current_stream()
    side = _side_stream(step.work.out.device)
    side.wait_stream(main)
    for which in step.plan.launches:
        beside = which.phase not in (ATTEND.value, MERGE.value)
        if not beside:
            main.wait_stream(side)
        with torch.cuda.stream(side if beside else main):
            _launch(step, which)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream whose programs start before those of attention, which waits for nothing."""
    return torch.cuda.Stream(device, priority=-1)


def _launch(step: _Step, which: Launch) -> None:
    """Run one launch of a step; groups that it reads from slots are loaded before."""
    (q, k, v), slots, work, plan, spec, core_bias = step
    raw = slots.raw
    batch, kv_heads, capacity, _ = slots.keys.shape
    heads = q.shape[1] // kv_heads
    num_chosen = work.chosen.shape[2]
    # Kernels do not touch the tensors that stand in for missing ones.
    on_device = isinstance(slots.seen, Tensor)
    length, seen = (slots.seen, 0) if on_device else (slots.pad, slots.seen)
    cos, sin = slots.rotation or (slots.keys, slots.keys)
    masses = slots.keys if slots.masses is None else slots.masses
    fetched = (raw.keys, raw.values)
    fetched_room = raw.keys.shape[2]
    fetched_sinks = spec.sinks
    numbers = work.chosen
    if raw.slots is not None and which.phase == plan.fetches:
        chosen, marks = (x.flatten(0, 1) for x in (work.chosen, work.marks))
        numbers = find_and_load(raw, chosen, marks, spec.sinks)
        fetched = (raw.slots.keys, raw.slots.values)
        fetched_room = raw.slots.keys.shape[2] * spec.group_size
        fetched_sinks = 0
    launch(
        fetch_step_kernel,
        (batch * kv_heads, which.programs),
        (
            *(q, k, v, slots.keys, slots.values, masses, raw.keys, raw.values, *fetched),
            *(raw.codes, raw.scales, raw.centre, *raw.rotations, length, slots.pad, cos, sin),
            *(work.scratch, work.unit, work.scores, work.score_lse, work.chosen, numbers),
            *(work.marks, work.acc, work.lse, work.out),
            *(seen, kv_heads, raw.codes.shape[2], spec.group_size, spec.window_size, capacity),
            *(slots.ring_size, raw.keys.shape[2], fetched_room, spec.num_centred),
            *(plan.num_scoring, plan.num_fetching, plan.num_parts, plan.groups_each),
            *(float(spec.scale), float(core_bias)),
        ),
        (q.stride()[:2], k.stride()[:2], v.stride()[:2], num_chosen),
        PHASE=which.phase,
        ON_DEVICE=on_device,
        SINKS=spec.sinks,
        FETCHED_SINKS=fetched_sinks,
        HEADS=heads,
        CORE_WIDTH=heads if spec.core_heads == "query" else 1,
        POOLS=capacity > slots.ring_size + spec.sinks,
        HALF=0 if slots.rotation is None else cos.shape[1],
        INTERLEAVED=spec.rotary is not None and spec.rotary.interleaved,
        HAS_BIAS=core_bias != 0,
        HAS_MASS=slots.masses is not None,
        **plan.constants,
        **which.options,
    )


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
