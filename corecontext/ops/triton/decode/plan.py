"""Launches of a decoding step with fetch: programs and constants, by shapes only, so that a
captured step keeps them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from corecontext.ops.fetch.low_bits import LEVELS
from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode.fetch_kernel import (
    ATTEND,
    CHOOSE,
    FETCH,
    MERGE,
    ROTATE,
    SCORE,
)
from corecontext.ops.triton.decode.plain_step import step_plan
from corecontext.ops.triton.launch import ceil_div, power_of_2
from corecontext.ops.triton.tiles import Chip

_SLICES = 4  # of a head's columns, merged one by one
# Warps of a program of each phase.
_SCORE_WARPS = 2
_CHOICE_WARPS = 16
_MERGE_WARPS = 4
_SCORING_ALONE = 7  # programs on a multiprocessor
_ATTEND_REGISTERS = 168  # of a thread of four warps, so that three programs run at once
# With a branch: programs on a multiprocessor that score beside those that attend, and that fetch.
_ROTATE_WARPS = 8
_SCORING = 6
_ATTENDING = 1
_LEAST_ATTENDING = 2  # programs that attend from a KV head
_FETCHING = 4
_LEAST_FETCHING = 2  # programs that fetch for a KV head


class StepSizes(NamedTuple):
    """Hold the sizes that the launches of a step depend on."""

    dtype: torch.dtype
    batch: int
    kv_heads: int
    heads: int
    """Query heads that share a KV head."""
    dim: int
    capacity: int
    """Entries of the compact cache."""
    num_groups: int
    """Groups that there is room for."""
    num_chosen: int
    has_slots: bool
    """Whether groups are loaded into slots before they are read."""
    is_nvidia: bool

    @property
    def rows(self) -> int:
        """Rows of the batch times KV heads."""
        return self.batch * self.kv_heads


class Launch(NamedTuple):
    """Hold one launch of the kernel of a step."""

    phase: int
    programs: int
    """For each KV head."""
    options: dict[str, Any]


class StepPlan(NamedTuple):
    """Hold the launches of a step, and what they share."""

    launches: list[Launch]
    num_scoring: int
    """Programs that score groups of a KV head."""
    num_fetching: int
    """Programs of the launch that attends to fetched tokens from a KV head."""
    num_parts: int
    """Parts of the softmax of a KV head."""
    groups_each: int
    """Chosen groups that a program attends to."""
    fetches: int
    """The phase that reads fetched tokens."""
    constants: dict[str, Any]
    """The kernel's last constants by name, in its order."""


def can_take_out(spec: Spec, core_bias: float) -> bool:
    """Whether core tokens can be taken out of a sum again: not if they may weigh far more than
    their raw tokens."""
    return not core_bias and spec.core_heads != "query"


def plan_of(chip: Chip, sizes: StepSizes, spec: Spec, core_bias: float) -> StepPlan:
    """Return the launches of a step."""
    shape = (sizes.dtype, sizes.rows, sizes.heads, sizes.dim, sizes.capacity, spec.group_size)
    of_cache = step_plan(chip, *shape)
    tile = dict(of_cache.step)
    attending = {"num_warps": tile.pop("num_warps")}
    if sizes.is_nvidia:
        attending["maxnreg"] = _ATTEND_REGISTERS
    index = index_constants(spec, sizes.dim)
    scoring = scoring_constants(chip, sizes, index)
    overlaps = can_take_out(spec, core_bias)
    per_chip = _SCORING if overlaps else _SCORING_ALONE
    fitting = per_chip * chip.multiprocessors // sizes.rows
    num_scoring = scoring_splits(fitting, sizes.num_groups, scoring["SCORE_N"])
    choice_warps = max(4, min(_CHOICE_WARPS, sizes.num_groups // 512))
    num_shares = of_cache.num_parts - 1
    num_fetching = 0
    groups_each = ceil_div(sizes.num_chosen, num_shares)
    if overlaps:
        per_row = _ATTENDING * chip.multiprocessors // sizes.rows
        num_shares = max(_LEAST_ATTENDING, min(num_shares, per_row))
        fitting = max(_LEAST_FETCHING, _FETCHING * chip.multiprocessors // sizes.rows)
        of_a_tile = ceil_div(tile["BLOCK_N"], spec.group_size)
        groups_each = max(of_a_tile, ceil_div(sizes.num_chosen, fitting))
        num_fetching = ceil_div(sizes.num_chosen, groups_each) + 1  # and the core tokens
    rotate = Launch(ROTATE.value, 1, {"num_warps": _ROTATE_WARPS})
    score = Launch(SCORE.value, num_scoring, {"num_warps": _SCORE_WARPS})
    choose = Launch(CHOOSE.value, 1 if overlaps else 2, {"num_warps": choice_warps})
    attend = Launch(ATTEND.value, num_shares, attending)
    fetch = Launch(FETCH.value, num_fetching, attending)
    merge = Launch(MERGE.value, sizes.heads * _SLICES, {"num_warps": _MERGE_WARPS})
    launches = [score, choose, attend, merge]
    if overlaps:
        scores = [rotate, score] if scoring["WHOLE"] else [score]
        # Scoring leaves memory idle, and loading groups from host memory leaves it idle for longer:
        # attention to compact entries runs beside the longer of the two.
        first = [*scores, attend] if sizes.has_slots else [attend, *scores]
        launches = [*first, choose, fetch, merge]
    num_parts = 1 + num_fetching + num_shares
    constants = {
        "OVERLAPS": overlaps,
        **index,
        **scoring,
        "CLOSE_P": max(16, scoring["SCORE_P"]),
        "BLOCK_S": power_of_2(num_scoring),
        "BLOCK_K": power_of_2(sizes.num_chosen),
        "BLOCK_P": power_of_2(num_parts),
        "SLICES": _SLICES,
        **tile,
    }
    return StepPlan(
        launches,
        num_scoring,
        num_fetching,
        num_parts,
        groups_each,
        (FETCH if overlaps else ATTEND).value,
        constants,
    )


def index_constants(spec: Spec, dim: int) -> dict[str, Any]:
    """Return the constants that describe the index."""
    index = spec.index
    bits = index.bits
    parts = index.num_keys(spec.group_size)
    return {
        "BITS": bits,
        "PARTS": parts,
        "SCALES": 1 if index.shares_scale else parts,
        "LEVELS": LEVELS[bits],
        "HEAD_DIM": dim,
        # The least inner size of a matrix product of whole numbers is 32.
        "BLOCK_C": max(32 if bits == 2 else 16, power_of_2(ceil_div(dim * bits, 8))),
    }


def scoring_constants(chip: Chip, sizes: StepSizes, index: dict[str, Any]) -> dict[str, Any]:
    """Return the constants of scoring by two warps; without tensor cores, sums of vectors.

    Two warps hold the keys of a tile as the smaller operand of a matrix product needs them, so that
    bytes become levels in registers.
    """
    vector = sizes.dtype == torch.float32
    keys = 32
    if chip.shared_memory and not vector:
        keys = 256 * 128 // max(128, sizes.dim)
    block_p = power_of_2(index["PARTS"])
    whole = index["BITS"] == 2 and not vector
    block_m = power_of_2(sizes.heads)
    if not vector:  # columns of the smallest matrix product, two for each head of whole numbers
        block_m = max(4 if whole else 8, block_m)
    return {
        "WHOLE": whole,
        # Instructions of NVIDIA's, whose registers have four neighbouring bytes where whole rows
        # are loaded.
        "ASM": whole and sizes.is_nvidia and sizes.dim % 64 == 0,
        "WIDTH": max(16, power_of_2(sizes.num_groups)),
        "SCORE_M": block_m,
        "SCORE_N": max(1, keys // block_p),
        "SCORE_P": block_p,
        "SCORE_STAGES": 3,
    }


def scoring_splits(fitting: int, num_groups: int, block_n: int) -> int:
    """Return the number of programs that share the groups of a KV head: the `fitting` ones that run
    at once, fewer where each would not have three tiles."""
    return max(1, min(fitting, ceil_div(num_groups, 3 * block_n)))
