"""One decoding step with fetch in Triton launches, each by its own kernel:

rotate          the queries, where the index has two bits (`score_index`)
score           the visible groups (`score_index`)
select          the groups with the largest scores (`select_groups`), and slots for them, where
                there are any (`find_slots`)
attend_chosen   to their raw tokens, which it loads into slots where they are missing, and to their
                core tokens, as a part of the softmax of its own (`attend_chosen`)
attend_compact  to compact entries, the core tokens of all groups among them; it also appends the
                new token, pools the group that it closes and writes an index (`attend_compact`)
merge           the parts, and subtract that of the chosen groups' core tokens (`merge_parts`)

In a captured step `attend_compact` is a branch beside the others, whose programs come first. It
begins beside scoring, which leaves memory idle; where groups are loaded from host memory, which
leaves it idle for longer, it begins after scoring and goes on while they are.

Bytes that a step reads for each KV head, M groups seen: the index of P keys in b bits, M (P D b / 8
+ 2), which is 2 D + 2 a group of 16 for pairs in 2 bits; M core tokens and at most s + g - 1 raw
ones; and k g raw tokens of groups chosen. 4 r M bytes of scores are written and read once, from the
chip's own cache. At 131,072 tokens, g = 16, s = 1,024, k = 64, D = 128 and 8 KV heads in 16 bits
that is 17 + 38 + 4 MB, where CCA reads 38.

The number of programs depends on shapes only; each finds its piece of the entries by the length,
which is read on the device. So a captured step replays at any length.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from corecontext.ops.capability import is_captured, nvidia_capability
from corecontext.ops.fetch.low_bits import LowBits
from corecontext.ops.spec import FetchSlots, RawSlots, Slots, Spec
from corecontext.ops.triton.decode.attend_chosen import attend_chosen_kernel
from corecontext.ops.triton.decode.attend_compact import attend_compact_kernel
from corecontext.ops.triton.decode.find_slots import MOST_SLOTS
from corecontext.ops.triton.decode.merge_parts import merge
from corecontext.ops.triton.decode.plain_step import arguments_of, slots_of
from corecontext.ops.triton.decode.plan import (
    ROTATE_WARPS,
    SCORE_WARPS,
    FetchPlan,
    StepSizes,
    cache_form,
    fetch_plan,
    pooling_of,
)
from corecontext.ops.triton.decode.score_index import rotate_kernel, score_kernel
from corecontext.ops.triton.decode.select_groups import select_kernel
from corecontext.ops.triton.launch import contiguous_rows, ints, launch, power_of_2
from corecontext.ops.triton.tiles import chip_of

_MOST_GROUPS = 32768  # of which one program holds the scores


def fetch_step_unsupported_reason(spec: Spec, raw: RawSlots) -> str | None:
    """Return why `fetch_step` cannot take a cache, which is not in 8 bits, or None."""
    g = spec.group_size
    index = spec.index
    if not isinstance(index, LowBits) or g % index.num_keys(g):
        return f"index {index.name} of groups of {g} has no parts of one size in low bits"
    if spec.softcap is not None or spec.scale <= 0:
        return "scores are capped or their scale is not above 0"
    if spec.num_centred < 2 * g:
        return f"window {spec.window_size} is less than two groups of {g}"
    if raw.codes.shape[2] > _MOST_GROUPS:
        return f"{raw.codes.shape[2]} groups are more than {_MOST_GROUPS}"
    if raw.slots is not None and raw.slots.keys.shape[2] > MOST_SLOTS:
        return f"{raw.slots.keys.shape[2]} slots are more than {MOST_SLOTS}"
    return None


class _Work(NamedTuple):
    """Hold the tensors that launches leave for the next ones."""

    rotated: tuple[Tensor, Tensor]
    """As `rotate_kernel` writes them."""
    scores: Tensor
    """As `score_kernel` writes them."""
    choice: tuple[Tensor, Tensor]
    """Groups chosen [B Hkv, k] in int32, and 1 for each of these in marks [B Hkv, `Scoring.width`]
    in int8."""
    places: tuple[Tensor, Tensor]
    """As `give_slots` writes them, [B Hkv, k] in int32 each; without slots the groups."""
    partial: tuple[Tensor, Tensor]
    """Parts of the softmax: outputs [B Hkv, parts, r, D] and log-sum-exp [B Hkv, parts, r] in
    float32: that of the new token, those of `attend_chosen`, those of `attend_compact`."""
    out: Tensor
    """[B, H, 1, D]."""


class _Step(NamedTuple):
    """Hold the arguments of the launches of a step."""

    tokens: tuple[Tensor, Tensor, Tensor]
    """q, k and v."""
    slots: Slots
    raw: RawSlots
    spec: Spec
    plan: FetchPlan
    work: _Work

    @property
    def on_device(self) -> bool:
        """Whether the length is on the device."""
        return isinstance(self.slots.seen, Tensor)

    @property
    def length(self) -> tuple[Tensor, Tensor]:
        """The length on the device, or a tensor that stands in for it, and each row's padding."""
        seen = self.slots.seen
        return (seen if isinstance(seen, Tensor) else self.slots.pad, self.slots.pad)

    @property
    def seen(self) -> int:
        """The length, where it is not on the device."""
        return 0 if isinstance(self.slots.seen, Tensor) else self.slots.seen

    @property
    def cache(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and masses, or a tensor that stands in for them."""
        keys, values, masses = self.slots.keys, self.slots.values, self.slots.masses
        return keys, values, keys if masses is None else masses

    @property
    def grid(self) -> int:
        """Rows of the batch times KV heads."""
        return self.slots.keys.shape[0] * self.slots.keys.shape[1]


def _decode(tokens: list[Tensor], slots: Slots, spec: Spec) -> Tensor:
    """Run the launches of a step."""
    raw = slots.raw
    assert raw is not None, "fetch reads raw tokens"
    q, k, v = map(contiguous_rows, tokens)
    batch, kv_heads, capacity, dim = slots.keys.shape
    rows = batch * kv_heads
    heads = q.shape[1] // kv_heads
    num_groups = raw.codes.shape[2]
    num_chosen = min(spec.fetch_groups, max(1, num_groups))
    sizes = StepSizes(
        dtype=q.dtype,
        rows=rows,
        heads=heads,
        dim=dim,
        capacity=capacity,
        num_groups=num_groups,
        num_chosen=num_chosen,
        is_nvidia=nvidia_capability(q.device) is not None,
    )
    plan = fetch_plan(chip_of(q.device), sizes, spec)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=q.device)

    scoring = plan.scoring
    num_bytes = 8 * scoring.block_m * plan.index.block_c if scoring.whole else 0
    chosen = make(num_chosen, dtype=torch.int32)
    places = (chosen, chosen)
    if raw.slots is not None:
        places = (torch.empty_like(chosen), torch.empty_like(chosen))
    work = _Work(
        rotated=(make(num_bytes, dtype=torch.int8), make(scoring.block_m)),
        scores=make(heads, scoring.width),
        choice=(chosen, make(scoring.width, dtype=torch.int8)),
        places=places,
        partial=(make(plan.num_parts, heads, dim), make(plan.num_parts, heads)),
        out=torch.empty_like(q, memory_format=torch.contiguous_format),
    )
    step = _Step((q, k, v), slots, raw, spec, plan, work)
    with torch.cuda.device_of(q):
        if is_captured(q.device):
            _capture(step)
        else:
            for run in _launches(step):
                run(step)
    return work.out


def _launches(step: _Step) -> list[Callable[[_Step], None]]:
    """Return the launches of a step in their order."""
    scoring = [_rotate, _score] if step.plan.scoring.whole else [_score]
    if step.raw.slots is not None:
        first = [*scoring, _attend_compact]
    else:
        first = [_attend_compact, *scoring]
    return [*first, _select, _attend_chosen, _merge]


def _capture(step: _Step) -> None:
    """Capture the launches of a step: attention to compact entries on the main stream, those that
    may run beside it on another."""
    main = torch.cuda.current_stream()
    side = _side_stream(step.work.out.device)
    side.wait_stream(main)
    for run in _launches(step):
        beside = run not in (_attend_compact, _merge)
        if not beside:
            main.wait_stream(side)
        with torch.cuda.stream(side if beside else main):
            run(step)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream whose programs start before those of the main stream that wait with them."""
    return torch.cuda.Stream(device, priority=-1)


def _rotate(step: _Step) -> None:
    """Rotate the queries."""
    q = step.tokens[0]
    launch(
        rotate_kernel,
        (step.grid,),
        (q, step.raw.rotations[0], step.work.rotated, step.slots.keys.shape[1]),
        (q.stride()[:2],),
        INDEX=step.plan.index,
        SCORING=step.plan.scoring,
        TILE=step.plan.tile,
        num_warps=ROTATE_WARPS,
    )


def _score(step: _Step) -> None:
    """Score the visible groups."""
    q = step.tokens[0]
    raw = step.raw
    spec = step.spec
    launch(
        score_kernel,
        (step.grid, step.plan.num_scoring),
        (
            *(q, raw.rotations[0], step.work.rotated, (raw.codes, raw.scales, raw.centre)),
            *(step.length, step.work.scores, step.length),
            ints(
                *(step.seen, step.slots.keys.shape[1], raw.codes.shape[2]),
                *(spec.group_size, spec.window_size, step.work.choice[0].shape[1]),
            ),
            float(spec.scale),
        ),
        (q.stride()[:2], (0, 0, 0, 0)),
        ON_DEVICE=step.on_device,
        PAGE=0,
        SINKS=spec.sinks,
        INDEX=step.plan.index,
        SCORING=step.plan.scoring,
        TILE=step.plan.tile,
        num_warps=SCORE_WARPS,
    )


def _select(step: _Step) -> None:
    """Choose groups, and give them slots."""
    spec = step.spec
    plan = step.plan
    raw = step.raw
    work = step.work
    num_chosen = work.choice[0].shape[1]
    slots, table_size, num_slots = (*work.choice, *work.choice), 0, 0
    if raw.slots is not None:
        slots = raw.slots[2:]
        table_size, num_slots = raw.slots.table.shape[2], raw.slots.owner.shape[2]
    launch(
        select_kernel,
        (step.grid,),
        (
            *(work.scores, work.choice, step.length, slots, work.places),
            ints(
                *(step.seen, step.slots.keys.shape[1], raw.codes.shape[2]),
                *(spec.group_size, spec.window_size, table_size, num_slots),
            ),
        ),
        (num_chosen,),
        ON_DEVICE=step.on_device,
        SINKS=spec.sinks,
        TILE=plan.tile,
        BLOCK=plan.scoring.width,
        BLOCK_K=power_of_2(num_chosen),
        BLOCK_N=max(32, power_of_2(num_slots)) if num_slots else 0,
        num_warps=plan.select_warps,
    )


def _attend_chosen(step: _Step) -> None:
    """Attend to the groups chosen, which stay in slots, where there are any."""
    spec = step.spec
    raw = step.raw
    plan = step.plan
    q = step.tokens[0]
    chosen = step.work.choice[0]
    fetched = (raw.keys, raw.values)
    fetched_room = raw.keys.shape[2]
    fetched_sinks = spec.sinks
    if raw.slots is not None:
        fetched = (raw.slots.keys, raw.slots.values)
        fetched_room = raw.slots.keys.shape[2] * spec.group_size
        fetched_sinks = 0
    kv_heads, capacity = step.slots.keys.shape[1:3]
    launch(
        attend_chosen_kernel,
        (step.grid, plan.num_fetching),
        (
            *(q, step.cache, fetched, (raw.keys, raw.values), (chosen, step.work.places[0])),
            *(step.length, step.work.partial),
            ints(
                *(step.seen, kv_heads, spec.group_size, spec.window_size, capacity),
                *(step.slots.ring_size, fetched_room, raw.keys.shape[2]),
                *(plan.num_parts, plan.groups_each),
            ),
            float(spec.scale),
        ),
        (chosen.shape[1], q.stride()[:2]),
        ON_DEVICE=step.on_device,
        FETCHED_SINKS=fetched_sinks,
        HAS_SLOTS=raw.slots is not None,
        CACHE=cache_form(step.slots, spec),
        TILE=plan.tile,
        **plan.attend_options,
    )


def _attend_compact(step: _Step) -> None:
    """Append the new token, and attend to compact entries."""
    q, k, v = step.tokens
    slots = step.slots
    raw = step.raw
    spec = step.spec
    kv_heads, capacity = slots.keys.shape[1:3]
    index = (raw.codes, raw.scales, raw.centre, raw.rotations[1])
    launch(
        attend_compact_kernel,
        (step.grid, 1 + step.plan.num_attending),
        (
            *(step.tokens, step.cache, (raw.keys, raw.values), index),
            *(slots.rotation or step.cache[:2], step.length, step.work.partial),
            ints(
                *(step.seen, kv_heads, raw.codes.shape[2], spec.group_size, spec.window_size),
                *(capacity, slots.ring_size, raw.keys.shape[2], spec.num_centred),
                step.plan.num_fetching,
            ),
            float(spec.scale),
        ),
        (q.stride()[:2], k.stride()[:2], v.stride()[:2]),
        ON_DEVICE=step.on_device,
        CACHE=cache_form(slots, spec),
        POOLING=pooling_of(slots, spec, step.plan.tile),
        INDEX=step.plan.index,
        TILE=step.plan.tile,
        **step.plan.attend_options,
    )


def _merge(step: _Step) -> None:
    """Merge the parts; subtract part num_fetching, the last one of `attend_chosen`."""
    seen = step.length[0] if step.on_device else None
    merge(step.work.partial, step.work.out, seen, removed=step.plan.num_fetching)


@torch.library.custom_op("corecontext::fetch_step", mutates_args=("buffers", "raw", "seen"))
def _fetch_op(
    tokens: list[Tensor],
    buffers: list[Tensor],
    raw: list[Tensor],
    seen: Optional[Tensor],  # noqa: UP045 (torch 2.9 reads schemas in this form)
    tables: list[Tensor],
    sizes: list[int],
    factors: list[float],
    index: str,
) -> Tensor:
    """Run `_decode` as one operator of a graph, as `plain_step._decode_op`.

    Args:
        tokens: q, k, v and `Slots.pad`.
        buffers, tables, sizes: Those of `slots_of`; then the rotations of `RawSlots`, and the
            groups that a step fetches.
        raw: The tensors of `RawSlots`, then those of its `FetchSlots`, if any.
        index: `Spec.fetch_index`.
    """
    *tokens, pad = tokens
    *sizes, num_groups = sizes
    *tables, rotation, signs = tables
    slots, spec = slots_of(buffers, seen, pad, tables, sizes, factors, "auto")
    spec = spec.replace(fetch_groups=num_groups, fetch_index=index)
    keys, values, codes, scales, centre, *fetched = raw
    of_slots = FetchSlots(*fetched) if fetched else None
    stored = RawSlots(keys, values, codes, scales, centre, (rotation, signs), of_slots)
    return _decode(tokens, slots._replace(raw=stored), spec)


@_fetch_op.register_fake
def _(tokens, *args):
    q = tokens[0]
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def fetch_step(q: Tensor, k: Tensor, v: Tensor, slots: Slots, spec: Spec) -> Tensor:
    """Append one token to each row of a cache with raw tokens, and attend with fetch, as
    `cache.fetch_step.attend_fetched`.

    Args:
        q: [B, H, 1, D], rotary applied.
        k, v: [B, Hkv, 1, D].
        slots: Written in place, as in `plain_step.decode_step`, its raw tokens and index too.

    Returns:
        [B, H, 1, D] in the dtype of q, the same from run to run.
    """
    if not torch.compiler.is_compiling():
        return _decode([q, k, v], slots, spec)
    assert slots.raw is not None, "fetch reads raw tokens"
    buffers, seen, pad, tables, sizes, factors, _ = arguments_of(slots, spec)
    *raw, rotations, fetched = slots.raw
    tensors = (buffers, [*raw, *(fetched or ())], seen, [*tables, *rotations])
    numbers = ([*sizes, spec.fetch_groups], factors)
    return _fetch_op([q, k, v, pad], *tensors, *numbers, spec.fetch_index)
