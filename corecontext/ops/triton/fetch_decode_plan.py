"""Launches of a decoding step with fetch: programs and constants, by shapes only, so that a
captured step keeps them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from corecontext.config import parse_index
from corecontext.ops.fetch.index import num_parts
from corecontext.ops.fetch.low_bits import LEVELS
from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode import step_plan
from corecontext.ops.triton.fetch_decode_kernel import ALL, ATTEND, CHOOSE, MERGE, SCORE
from corecontext.ops.triton.launch import ceil_div, power_of_2
from corecontext.ops.triton.tiles import Chip

_SLICES = 4  # of a head's columns, merged one by one
# Warps of a program of each phase.
_SCORE_WARPS = 2
_CHOICE_WARPS = 16
_MERGE_WARPS = 4
_ATTEND_REGISTERS = 168  # of a thread of four warps, so that three programs run at once
# Of a step in one launch: warps and registers, by which two programs run on a multiprocessor.
_WARPS = 8
_PROGRAMS = 2
_REGISTERS = 128
_MOST_ROWS = 0
"""Rows of KV heads up to which a step is one launch. None: 2 % of its rows differed from those of
several launches on an H200, which was not shown to come from ties of the choice. With 8 rows it
took 49 us instead of 57, with 64 196 instead of 185."""


class StepSizes(NamedTuple):
    """Hold the sizes that the launches of a step depend on."""

    dtype: torch.dtype
    rows: int
    """Rows of the batch times KV heads."""
    heads: int
    """Query heads that share a KV head."""
    dim: int
    capacity: int
    """Entries of the compact cache."""
    num_groups: int
    """Groups that there is room for."""
    num_chosen: int
    is_nvidia: bool
    has_slots: bool


class Launch(NamedTuple):
    """Hold one launch of the kernel of a step."""

    phase: int
    programs: int
    """For each KV head."""
    options: dict[str, Any]


class StepPlan(NamedTuple):
    """Hold the launches of a step, and what they share."""

    launches: tuple[Launch, ...]
    num_scoring: int
    """Programs that score groups of a KV head."""
    num_shares: int
    """Programs that attend from a KV head."""
    last_units: int
    """Entries of the program that chooses, where the others have 8."""
    first: dict[str, Any]
    """The kernel's constants from its second on, by name, in its order; and after others."""
    constants: dict[str, Any]


def plan_of(chip: Chip, sizes: StepSizes, spec: Spec, core_bias: float) -> StepPlan:
    """Return the launches of a step: one where its programs may wait for each other, else one for
    each phase."""
    shape = (sizes.dtype, sizes.rows, sizes.heads, sizes.dim, sizes.capacity, spec.group_size)
    of_cache = step_plan(chip, *shape)
    tile = dict(of_cache.step)
    attend_options = {"num_warps": tile.pop("num_warps")}
    index = index_constants(spec, sizes.dim)
    scoring = scoring_constants(chip, sizes, index)
    programs = programs_at_once(chip, sizes, index["BITS"])
    overlaps = False
    last_units = 8
    launches: tuple[Launch, ...]
    if programs:
        num_scoring = programs
        num_shares = programs
        scoring["SCORE_N"] *= _WARPS // _SCORE_WARPS
        overlaps = not core_bias and spec.core_heads != "query"
        if overlaps and programs > 1:
            last_units = 0 if programs > 8 else 7
        options: dict[str, Any] = {"num_warps": _WARPS}
        if sizes.is_nvidia:
            options.update(maxnreg=_REGISTERS, cooperative=True)
        launches = (Launch(ALL.value, programs, options),)
    else:
        num_scoring = scoring_splits(chip, sizes.rows, sizes.num_groups, scoring["SCORE_N"])
        num_shares = of_cache.num_parts - 1
        if sizes.is_nvidia:
            attend_options["maxnreg"] = _ATTEND_REGISTERS
        choice_warps = max(4, min(_CHOICE_WARPS, sizes.num_groups // 512))
        launches = (
            Launch(SCORE.value, num_scoring, {"num_warps": _SCORE_WARPS}),
            Launch(CHOOSE.value, 2, {"num_warps": choice_warps}),
            Launch(ATTEND.value, num_shares, attend_options),
            Launch(MERGE.value, sizes.heads * _SLICES, {"num_warps": _MERGE_WARPS}),
        )
    constants = {
        **index,
        **scoring,
        "CLOSE_P": max(16, scoring["SCORE_P"]),
        "SEGMENTS": parse_index(spec.fetch_index).kind == "segments",
        "GROUP": power_of_2(spec.group_size),
        "BLOCK_S": power_of_2(num_scoring),
        "BLOCK_K": power_of_2(sizes.num_chosen),
        "BLOCK_P": power_of_2(num_shares + 1),
        "SLICES": _SLICES,
        **tile,
    }
    first = {"PREFETCHES": programs > 0 and sizes.is_nvidia, "OVERLAPS": overlaps}
    return StepPlan(launches, num_scoring, num_shares, last_units, first, constants)


def index_constants(spec: Spec, dim: int) -> dict[str, Any]:
    """Return the constants that describe the index."""
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
        "SCORE_STAGES": 4,
    }


def scoring_splits(chip: Chip, rows: int, num_groups: int, block_n: int) -> int:
    """Return the number of programs that share the groups of each of `rows` KV heads: seven on a
    multiprocessor, fewer where each would not have three tiles."""
    fitting = 7 * chip.multiprocessors // rows
    return max(1, min(fitting, ceil_div(num_groups, 3 * block_n)))


def programs_at_once(chip: Chip, sizes: StepSizes, bits: int) -> int:
    """Return the programs for each KV head of a step in one launch; 0 where it takes several
    launches, because not all would run at once."""
    half = sizes.dtype != torch.float32
    # Two programs' registers and shared memory fit on a multiprocessor of Hopper.
    fits = half and bits == 2 and sizes.dim <= 128 and sizes.heads <= 8
    fits = fits and sizes.num_groups <= 16384 and chip.shared_memory >= 200 * 1024
    if not fits or not sizes.is_nvidia or sizes.has_slots or sizes.rows > _MOST_ROWS:
        return 0
    most = min(_PROGRAMS * chip.multiprocessors // sizes.rows, 127)  # a program merges 128 parts
    return min(most, ceil_div(sizes.capacity, 64))
