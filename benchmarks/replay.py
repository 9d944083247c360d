"""Let decoding steps fetch groups that repeat as those of a real text do, and layers share host
memory: a model of random weights repeats few, and pinning memory takes longer than measuring.

A step runs all of its own launches. Its choice reads scores that are replayed, one row of a table
for all layers, so that a step has few launches more, and a layer none.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.model_methods import fetching
from benchmarks.model_settings import ModelBench
from corecontext.cache import host_store
from corecontext.ops.triton.decode import step_with_fetch as fetch_decode
from corecontext.ops.triton.launch import launch, power_of_2
from corecontext.ops.triton.paged import attend_rows
from corecontext.ops.triton.paged.group_slots import GroupSlots

LARGE = 1e6
"""A score far above those of groups that are not replayed, also with the centre's products."""


def repeating_choices(
    rows: int, count: int, num_groups: int, share: float, num_slots: int, device: Any = "cpu"
) -> Tensor:
    """Return the groups [steps, rows, count] that steps choose, rising.

    A window moves over a random ring of groups, so that each step keeps `share` of the groups of
    the step before, on average. The others were last chosen before more groups than there are
    slots, where the model has as many: slots that evict the group unread for longest miss exactly
    these.
    """
    size = min(num_groups, num_slots + 2 * count)
    generator = torch.Generator().manual_seed(0)
    ring = torch.rand(rows, num_groups, generator=generator).argsort(1)[:, :size].to(device)
    # Whole turns, so that the last step is followed by the first.
    steps = max(1, round(size / ((1 - share) * count))) if share < 1 else 1
    starts = torch.arange(steps, device=device) * size // steps
    places = (starts[:, None] + torch.arange(count, device=device)) % size
    return torch.stack([ring[:, place].sort(1)[0].int() for place in places])


@triton.jit(do_not_specialize=["num_steps", "num_rows", "num_groups", "num_chosen"])
def _replay_kernel(
    table_ptr,
    clock_ptr,
    chosen_ptr,
    marks_ptr,
    num_steps,
    num_rows,
    num_groups,
    num_chosen,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Replace the groups that a row has chosen, and their marks, by those of a table.

    Grid: (rows,).

    Args:
        table_ptr: [num_steps, num_rows, num_chosen], as of `repeating_choices`.
        clock_ptr: Steps so far.
    """
    n = tl.program_id(0).to(tl.int64)
    step = tl.load(clock_ptr) % num_steps
    choices = tl.arange(0, BLOCK_K)
    inside = choices < num_chosen
    group = tl.load(table_ptr + (step * num_rows + n) * num_chosen + choices, mask=inside)
    tl.store(chosen_ptr + n * num_chosen + choices, group, mask=inside)
    groups = tl.arange(0, BLOCK_N)
    marks_ptr += n * num_groups
    tl.store(marks_ptr + groups, tl.zeros([BLOCK_N], tl.int8), mask=groups < num_groups)
    tl.debug_barrier()
    tl.store(marks_ptr + group, tl.full([BLOCK_K], 1, tl.int8), mask=inside)


@contextlib.contextmanager
def replayed(share: float, length: int | None = None) -> Iterator[None]:
    """Have steps with slots find `share` of their groups in a slot; all groups are among the first
    `length` tokens behind those that are never pooled."""
    select = fetch_decode._select
    shared: dict[tuple[int, ...], _SharedScores] = {}

    def replay(step: Any) -> None:
        slots = step.raw.slots
        if slots is None:
            select(step)
            return
        num_seen = step.raw.codes.shape[2]
        if length is not None:
            num_seen = min(num_seen, length // slots.keys.shape[3])
        rows, count = step.work.choice[0].shape
        scores = step.work.scores
        num_slots = slots.owner.shape[2]
        key = (rows, count, num_seen, num_slots, *scores.shape)
        if key not in shared:
            groups = repeating_choices(rows, count, num_seen, share, num_slots, scores.device)
            shared[key] = _SharedScores(groups, scores)
        work = step.work._replace(scores=shared[key].of(slots.counts))
        select(step._replace(work=work))

    with mock.patch.object(fetch_decode, "_select", replay):
        yield


class _SharedScores:
    """Replace the scores of all layers, once a step, by those that choose the groups of a table."""

    def __init__(self, groups: Tensor, like: Tensor) -> None:
        """Take groups [steps, rows, count], and scores [rows, heads, groups] to be replaced."""
        table = like.new_zeros(len(groups), *like.shape)
        places = groups.long()[:, :, None].expand(-1, -1, like.shape[1], -1)
        self._table = table.scatter_(3, places, LARGE)
        self._scores = table[0].clone()
        self._layers: set[int] = set()

    def of(self, counts: Tensor) -> Tensor:
        """Return the scores for a layer with the counts of these slots; a layer that comes again
        begins a step."""
        layer = counts.data_ptr()
        if not self._layers or layer in self._layers:
            step = counts.flatten()[:1] % len(self._table)
            self._scores.copy_(self._table.index_select(0, step)[0])
            self._layers.clear()
        self._layers.add(layer)
        return self._scores


@contextlib.contextmanager
def replayed_pages(share: float, length: int) -> Iterator[None]:
    """Have steps over block tables with slots do so, in requests of `length` tokens or more, which
    have equally many slots."""
    find = attend_rows.find_places
    replay = _Replay(share)

    def find_places(slots: GroupSlots, choice: tuple[Tensor, ...], *rest: Any) -> None:
        num_seen = length // slots.tokens.shape[2]
        num_slots = slots.owner.numel() // len(choice[0])
        replay.write(choice[0], choice[1], slots.clock, (num_seen, num_slots))
        find(slots, choice, *rest)

    with mock.patch.object(attend_rows, "find_places", find_places):
        yield


class _Replay:
    """Replace what steps choose by a table, made once for each batch."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.tables: dict[Any, Tensor] = {}

    def write(self, chosen: Tensor, marks: Tensor, clock: Tensor, sizes: tuple[int, int]) -> None:
        """Write groups [rows, count] and marks, for rows of so many groups and slots."""
        rows, count = chosen.shape
        num_seen, num_slots = sizes
        key = (rows, count, num_seen)
        if key not in self.tables:
            made = repeating_choices(*key, self.share, num_slots, chosen.device)
            self.tables[key] = made
        launch(
            _replay_kernel,
            (rows,),
            (self.tables[key], clock, chosen, marks),
            (len(self.tables[key]), rows, marks.shape[1], count),
            BLOCK_N=power_of_2(marks.shape[1]),
            BLOCK_K=power_of_2(count),
            num_warps=4,
        )


def repeating(bench: ModelBench, method: str) -> contextlib.AbstractContextManager[None]:
    """Have a method with slots choose groups that repeat, where that is asked for."""
    if bench.hit_share is None or "fetch_slots" not in fetching(bench, method):
        return contextlib.nullcontext()
    return replayed(bench.hit_share)


@contextlib.contextmanager
def shared_host_memory() -> Iterator[None]:
    """Give the keys of all layers one memory, and their values one."""
    allocate = host_store.host_zeros
    memory: dict[Any, list[Tensor]] = {}

    def host_zeros(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensors = memory.setdefault((tuple(shape), dtype, device), [])
        if len(tensors) < 2:
            tensors.append(allocate(shape, dtype, device))
        else:
            tensors.reverse()
        return tensors[-1]

    with mock.patch.object(host_store, "host_zeros", host_zeros):
        yield
