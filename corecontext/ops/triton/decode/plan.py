"""Plan the launches of a decoding step: constants of the kernels and programs, by shapes only, so
that a captured step keeps them.

Kernels take the tuples here as constants, by the names CACHE (`CacheForm`), POOLING, TILE, INDEX
(`IndexForm`) and SCORING. Sizes named block_* are those of tiles in registers, powers of 2.
"""

import functools
from typing import NamedTuple

import torch

from corecontext.ops.fetch.low_bits import LEVELS
from corecontext.ops.spec import Slots, Spec
from corecontext.ops.triton.launch import ceil_div, power_of_2
from corecontext.ops.triton.tiles import Chip, decode_splits, decode_tiles

# Warps of a program.
ROTATE_WARPS = 8
SCORE_WARPS = 2
_SELECT_WARPS = 16  # at most
_ATTEND_REGISTERS = 168  # of a thread: with four warps a program, three programs run at once
# Programs that run on a multiprocessor: those that score run beside those that attend to entries.
_SCORING = 6
_ATTENDING = 1
_FETCHING = 4
# At least so many programs for a KV head.
_LEAST_ATTENDING = 2
_LEAST_FETCHING = 2


class CacheForm(NamedTuple):
    """Describe the entries of a compact cache and their scores."""

    kind: str
    """One of `config.CACHE_DTYPES`."""
    sinks: int
    """First tokens, which lie behind the ring."""
    has_mass: bool
    """Whether core tokens have masses."""
    has_softcap: bool


class Tile(NamedTuple):
    """Describe a tile of entries and the queries of all heads of a KV head."""

    heads: int
    """Query heads that share a KV head."""
    dim: int
    """Columns of a head (D)."""
    block_m: int
    """Rows of queries, at least heads."""
    block_n: int
    """Entries."""
    block_d: int
    """Columns, at least dim."""
    vector: bool
    """Whether products are sums over vectors, without matrix instructions."""
    stages: int
    """Tiles that are loaded ahead."""


class Pooling(NamedTuple):
    """Describe how the group that a token closes is pooled."""

    pools: bool
    """Whether there is room for core tokens."""
    half: int
    """Pairs of columns that rotate, from the first on."""
    interleaved: bool
    """Whether the columns of a pair are neighbours."""
    block_r: int
    """Rows of queries, at least `Tile.heads`."""
    block_g: int
    """Tokens read at once."""


class IndexForm(NamedTuple):
    """Describe an index in low bits."""

    bits: int
    """Bits of a code."""
    keys: int
    """Keys of a group (P)."""
    scales: int
    """Scales of a group: one, or one for each key."""
    levels: tuple[float, ...]
    """Numbers that codes stand for: those above 0, as of `low_bits.LEVELS`."""
    block_c: int
    """Bytes of a key."""
    block_p: int
    """Keys of a group, where an index is written."""


class Scoring(NamedTuple):
    """Describe a tile of the index whose groups are scored."""

    whole: bool
    """Whether codes are multiplied as whole numbers (`score_index`)."""
    asm: bool
    """Whether NVIDIA's instructions make them from codes."""
    width: int
    """Scores of a query head that there is room for, a power of 2."""
    block_m: int
    """Rows of queries, at least the heads."""
    block_n: int
    """Groups."""
    block_p: int
    """Keys of a group."""
    stages: int
    """Tiles that are loaded ahead."""


class Plan(NamedTuple):
    """Hold the launch of a step without fetch."""

    num_parts: int
    """Parts of the softmax of a KV head, that of the new token first."""
    tile: Tile
    num_warps: int


@functools.lru_cache(maxsize=1024)
def step_plan(
    chip: Chip, dtype: torch.dtype, rows: int, heads: int, head_dim: int, capacity: int
) -> Plan:
    """Return the plan of a step without fetch; `rows` is B Hkv, `heads` the query heads of a KV
    head. Results are kept, as each step asks."""
    tiles = decode_tiles(chip, dtype, heads, head_dim)
    tile = Tile(
        heads=heads,
        dim=head_dim,
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_d=max(16, power_of_2(head_dim)),
        vector=tiles.vector,
        stages=tiles.num_stages,
    )
    return Plan(1 + decode_splits(chip, rows, capacity, tiles.block_n), tile, tiles.num_warps)


def cache_form(slots: Slots, spec: Spec) -> CacheForm:
    """Return the form of a cache."""
    return CacheForm(
        kind=slots.cache_dtype,
        sinks=spec.sinks,
        has_mass=slots.masses is not None,
        has_softcap=spec.softcap is not None,
    )


def pooling_of(slots: Slots, spec: Spec, tile: Tile) -> Pooling:
    """Return how a step pools."""
    block_r = power_of_2(tile.heads)
    return Pooling(
        pools=slots.keys.shape[2] > slots.ring_size + spec.sinks,
        half=0 if slots.rotation is None else slots.rotation[0].shape[1],
        interleaved=spec.rotary is not None and spec.rotary.interleaved,
        block_r=block_r,
        block_g=max(1, min(power_of_2(spec.group_size), 4096 // (block_r * tile.block_d))),
    )


# With fetch


class StepSizes(NamedTuple):
    """Hold the sizes that the launches of a step with fetch depend on."""

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


class FetchPlan(NamedTuple):
    """Hold the launches of a step with fetch."""

    num_scoring: int
    """Programs that score groups of a KV head."""
    num_attending: int
    """Programs that attend to compact entries from a KV head."""
    num_fetching: int
    """Programs that attend to the groups chosen from a KV head, the last one to core tokens."""
    groups_each: int
    """Chosen groups that such a program attends to."""
    select_warps: int
    attend_options: dict[str, int]
    """Warps and registers of the launches that attend, for Triton."""
    tile: Tile
    index: IndexForm
    scoring: Scoring

    @property
    def num_parts(self) -> int:
        """Parts of the softmax of a KV head, that of the new token first."""
        return 1 + self.num_fetching + self.num_attending


def fetch_plan(chip: Chip, sizes: StepSizes, spec: Spec) -> FetchPlan:
    """Return the launches of a step with fetch."""
    rows = sizes.rows
    plan = step_plan(chip, sizes.dtype, rows, sizes.heads, sizes.dim, sizes.capacity)
    index = index_form(spec, sizes.dim)
    scoring = scoring_of(chip, sizes, index)
    fitting = _SCORING * chip.multiprocessors // rows
    per_row = _ATTENDING * chip.multiprocessors // rows
    of_a_tile = ceil_div(plan.tile.block_n, spec.group_size)
    fetching = max(_LEAST_FETCHING, _FETCHING * chip.multiprocessors // rows)
    groups_each = max(of_a_tile, ceil_div(sizes.num_chosen, fetching))
    options = {"num_warps": plan.num_warps}
    if sizes.is_nvidia:
        options["maxnreg"] = _ATTEND_REGISTERS
    return FetchPlan(
        num_scoring=scoring_splits(fitting, sizes.num_groups, scoring.block_n),
        num_attending=max(_LEAST_ATTENDING, min(plan.num_parts - 1, per_row)),
        num_fetching=ceil_div(sizes.num_chosen, groups_each) + 1,
        groups_each=groups_each,
        select_warps=_select_warps(sizes.num_groups),
        attend_options=options,
        tile=plan.tile,
        index=index,
        scoring=scoring,
    )


def _select_warps(num_groups: int) -> int:
    """Return the warps of the program that chooses among so many groups."""
    # mutant fetch: as many warps as there are runs of groups
    return power_of_2(max(4, min(_SELECT_WARPS, num_groups // 512)))


def index_form(spec: Spec, dim: int) -> IndexForm:
    """Return the form of the index."""
    bits = spec.index.bits
    keys = spec.index.num_keys(spec.group_size)
    return IndexForm(
        bits=bits,
        keys=keys,
        scales=1 if spec.index.shares_scale else keys,
        levels=LEVELS[bits],
        # The least inner size of a matrix product of whole numbers is 32.
        block_c=max(32 if bits == 2 else 16, power_of_2(ceil_div(dim * bits, 8))),
        block_p=max(16, power_of_2(keys)),
    )


def scoring_of(chip: Chip, sizes: StepSizes, index: IndexForm) -> Scoring:
    """Return the tile of scoring, by SCORE_WARPS warps.

    Two warps hold the keys of a tile as the left operand of a matrix product needs them, so that
    bytes become levels in registers.
    """
    vector = sizes.dtype == torch.float32
    keys = 32  # of a tile, of all its groups
    if chip.shared_memory and not vector:
        keys = 256 * 128 // max(128, sizes.dim)
    block_p = power_of_2(index.keys)
    whole = index.bits == 2 and not vector
    block_m = power_of_2(sizes.heads)
    if not vector:  # columns of the smallest matrix product, two for each head of whole numbers
        block_m = max(4 if whole else 8, block_m)
    return Scoring(
        whole=whole,
        # NVIDIA's instructions: registers have four neighbouring bytes where whole rows are loaded.
        asm=whole and sizes.is_nvidia and sizes.dim % 64 == 0,
        width=max(16, power_of_2(sizes.num_groups)),
        block_m=block_m,
        block_n=max(1, keys // block_p),
        block_p=block_p,
        stages=3,
    )


def scoring_splits(fitting: int, num_groups: int, block_n: int) -> int:
    """Return the number of programs that share the groups of a KV head: the `fitting` ones that run
    at once, fewer where each would not have three tiles."""
    return max(1, min(fitting, ceil_div(num_groups, 3 * block_n)))
