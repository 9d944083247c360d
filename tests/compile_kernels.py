"""Compile the Triton kernels for chips that need not be here: `python tests/compile_kernels.py
sm_90 gfx942 [all]`.

Prints one JSON line for each kernel: the chip, its name, the bytes of shared memory it takes, what
the chip has, and the bytes a thread spills where Triton's CUDA tools say so. Without `all`, each
kernel in one form, to machine code where it has assembly or is known to spill; with it all head
sizes, dtypes and variants, to machine code.
"""

import functools
import itertools
import json
import operator
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # read once, by the import of triton

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from corecontext.ops.fetch import low_bits
from corecontext.ops.spec import Spec
from corecontext.ops.triton import rotate
from corecontext.ops.triton.attend import anywhere as attend
from corecontext.ops.triton.attend import far_past, marks, unions
from corecontext.ops.triton.attend import raw as fetch_kernels
from corecontext.ops.triton.choose import byte_keys
from corecontext.ops.triton.choose import index_keys as fetch_index_keys
from corecontext.ops.triton.choose import score_kernels as fetch_score_kernels
from corecontext.ops.triton.choose import select as fetch_choose
from corecontext.ops.triton.decode import (
    attend_chosen,
    attend_compact,
    merge_parts,
    plain_step,
    score_index,
    select_groups,
)
from corecontext.ops.triton.decode import plan as decode_plan
from corecontext.ops.triton.launch import power_of_2
from corecontext.ops.triton.paged import attend_pages as paged_attend
from corecontext.ops.triton.paged import attend_rows as paged_attend_rows
from corecontext.ops.triton.paged import copy_tokens as paged_copy
from corecontext.ops.triton.paged import gather as paged_gather
from corecontext.ops.triton.paged import group_slots
from corecontext.ops.triton.paged import pool_pages as paged_pool
from corecontext.ops.triton.paged import store_tokens as paged_store
from corecontext.ops.triton.paged import token_rows as paged_rows
from corecontext.ops.triton.pool import kernels as pool_kernels
from corecontext.ops.triton.pool import launcher as pool
from corecontext.ops.triton.tiles import (
    Chip,
    choose_tiles,
    dkv_tiles,
    dq_tiles,
    fetch_dkv_tiles,
    fetch_dq_tiles,
    fetch_tiles,
    forward_tiles,
    paged_tiles,
    pool_tiles,
)
from corecontext.train import loss_kernel

CHIPS = {
    name: (GPUTarget(backend, arch, warp), Chip(kib * 1024, units))
    for name, backend, arch, warp, kib, units in (
        ("sm_80", "cuda", 80, 32, 163, 108),
        ("sm_86", "cuda", 86, 32, 99, 84),
        ("sm_89", "cuda", 89, 32, 99, 128),
        ("sm_90", "cuda", 90, 32, 227, 132),
        ("sm_100", "cuda", 100, 32, 227, 148),
        ("sm_120", "cuda", 120, 32, 99, 170),
        ("gfx942", "hip", "gfx942", 64, 64, 304),
    )
}
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
}
FLOATS = ("unit", "scale", "softcap", "bias", "query_scale", "teacher_share")
"""Arguments that are numbers with a fraction."""
FORWARD = attend._attend_fwd_kernel
QUERY_GRADIENTS = attend._attend_dq_kernel
KEY_GRADIENTS = attend._attend_dkv_kernel
ATTENTION = (FORWARD, QUERY_GRADIENTS, KEY_GRADIENTS)
PLACES = {"tokens": ("", "", ""), "heads": 2, "rule": 3}
ATTENTION_TYPES = {
    FORWARD: {
        **PLACES,
        "far": ("", "", "fp32", "i32"),
        "results": ("", "fp32"),
        "strides": (3, 2, 2, 2, 2),
    },
    QUERY_GRADIENTS: {
        **PLACES,
        "far": ("", "", "fp32", "i32"),
        "upstream": ("", "fp32", "", "fp32"),
        "results": ("fp32", "fp32"),
        "strides": (3, 2, 2, 2, 2, 3),
    },
    KEY_GRADIENTS: {
        **PLACES,
        "far": ("fp32", "i32"),
        "upstream": ("fp32", "", "fp32"),
        "results": ("fp32", "fp32", "fp32"),
        "strides": (3, 2, 2, 3),
    },
}
FETCH = (
    fetch_kernels.fetch_fwd_kernel,
    fetch_kernels.fetch_dq_kernel,
    fetch_kernels.fetch_dkv_kernel,
)
RAW = {"tokens": ("", "", ""), "sizes": 3, "rule": 3, "strides": (3, 2, 2, 3)}
RAW_TYPES = {
    fetch_kernels.fetch_fwd_kernel: {**RAW, "chosen_ptr": "i32", "results": ("", "fp32")},
    fetch_kernels.fetch_dq_kernel: {
        **RAW,
        "chosen_ptr": "i32",
        "upstream": ("", "fp32", "", "fp32"),
        "results": ("fp32", "fp32"),
        "factors": 3,
    },
    fetch_kernels.fetch_dkv_kernel: {
        **RAW,
        "upstream": ("fp32", "", "fp32"),
        "choices": ("i32", "i32"),
        "results": ("fp32", "fp32"),
    },
}
CHOICE = (
    fetch_index_keys.index_keys_kernel,
    fetch_score_kernels.group_scores_kernel,
    fetch_choose._select_kernel,
    marks._mark_kernel,
    unions.union_kernel,
    byte_keys.queries_kernel,
    byte_keys.keys_kernel,
)
PAGED_FETCH = (
    paged_rows._rows_kernel,
    paged_attend_rows._attend_rows_kernel,
    group_slots._slots_kernel,
)
PAGED = (
    paged_store._store_kernel,
    paged_copy._copy_kernel,
    paged_pool._pool_pages_kernel,
    paged_attend._attend_pages_kernel,
    paged_gather._gather_kernel,
    *PAGED_FETCH,
)
STEP = (
    score_index.rotate_kernel,
    score_index.score_kernel,
    select_groups.select_kernel,
    attend_compact.attend_compact_kernel,
    attend_chosen.attend_chosen_kernel,
)
STEP_TYPES = {
    "tokens": ("", "", ""),
    "cache": ("", "", "fp32"),
    "raw": ("", ""),
    "fetched": ("", ""),
    "index": ("u8", "fp16", "fp32", "bf16"),
    "tables": ("fp32", "fp32"),
    "length": ("i64", "i64"),
    "partial": ("fp32", "fp32"),
    "rotated": ("i8", "fp32"),
    "results": ("fp32", "fp32"),
    "scores_ptr": "fp32",
    "centre_ptr": "fp32",
    "choice": ("i32", "i8"),
    "chosen": ("i32", "i32"),
    "seen_ptr": "i64",
}
"""Pointers of the kernels of a decoding step."""
NUMBERS = {
    FORWARD: 7,
    QUERY_GRADIENTS: 5,
    KEY_GRADIENTS: 4,
    fetch_kernels.fetch_fwd_kernel: 5,
    fetch_kernels.fetch_dq_kernel: 3,
    fetch_kernels.fetch_dkv_kernel: 4,
    fetch_score_kernels.group_scores_kernel: 8,
    rotate.rotate_heads_kernel: 3,
    fetch_choose._select_kernel: 8,
    marks._mark_kernel: 5,
    unions.union_kernel: 7,
    attend_chosen.attend_chosen_kernel: 10,
    attend_compact.attend_compact_kernel: 10,
    merge_parts.merge_kernel: 2,
    plain_step.step_kernel: 6,
    score_index.score_kernel: 6,
    select_groups.select_kernel: 7,
    paged_attend._attend_pages_kernel: 2,
    paged_gather._gather_kernel: 7,
    far_past.list_kernel: 2,
    pool_kernels.pool_fwd_kernel: 2,
    pool_kernels.pool_bwd_kernel: 2,
}
"""Whole numbers of `launch.ints`."""
LOSS = (loss_kernel.loss_kernel,)
HEADS = 4  # query heads that share a KV head


INTEGERS = {"int": "i32", "1": "constexpr"}
"""Of `Kernel.types`: a whole number, and one that is 1."""


class Kernel(NamedTuple):
    """One kernel as a launch would have it compiled."""

    function: Any
    constants: dict[str, Any]
    types: dict[str, Any]
    """Of pointers whose elements have not the dtype of q, and of tuples: of pointers, where "" is
    the dtype of q, or numbers of integers."""


def plain_kernels(chip: Chip, dtype: torch.dtype, dim: int) -> Iterator[Kernel]:
    """Those that run everywhere, with the sizes that their launches choose for this chip."""
    for function, tiles_of, has_mass, more in (
        (FORWARD, forward_tiles, False, {}),
        (QUERY_GRADIENTS, dq_tiles, True, {"HAS_GRAD_LSE": True}),
        (KEY_GRADIENTS, dkv_tiles, False, {"FAR": False}),
        (KEY_GRADIENTS, dkv_tiles, True, {"FAR": True}),
    ):
        tiles = tiles_of(chip, dtype, dim)
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        for has_marks in (False, True) if more.get("FAR", True) else (False,):
            form = attend.form_of(tiles, dim, Spec(16, 1024, 1.0), has_mass, has_marks)
            yield Kernel(function, {"FORM": form, **more, **options}, ATTENTION_TYPES[function])
    yield from fetch_kernels_of(chip, dtype, dim)
    yield from paged_kernels(chip, dtype, dim)
    yield from step_kernels_of(chip, dtype, dim)
    if dim == 128:
        sizes = {"HAS_TEACHER": True, "HAS_GRADIENT": True, "BLOCK": loss_kernel.MOST_COLUMNS}
        sums = dict.fromkeys(("count_ptr", "loss_ptr", "entropy_ptr"), "fp32")
        types = {"labels_ptr": "i64", **sums}
        yield Kernel(loss_kernel.loss_kernel, {**sizes, "num_warps": 8}, types)
    yield from kernels_of_pooling(dim)
    halves = {"HALF": dim // 2, "BLOCK": power_of_2(dim // 2), "ROWS": rotate._ROWS}
    halves["num_warps"] = 4
    halves["enable_fp_fusion"] = False
    types = dict.fromkeys(("sources", "tables", "results"), ("", ""))
    strides = {"q_strides": 3, "k_strides": 3, "out_strides": (3, 3), "table_strides": 2}
    if dtype != torch.float32:
        yield Kernel(rotate.rotate_heads_kernel, halves, {**types, **strides})
    plan = decode_plan.step_plan(chip, dtype, 8, HEADS, dim, 4096)
    pooling = decode_plan.Pooling(True, dim // 2, False, HEADS, 8)
    types = {**STEP_TYPES, "cache": ("", "", "fp32", "fp32", "fp32")}
    codes = {"cache": ("i8", "i8", "fp32", "fp32", "fp32")}
    for kind, sinks in (("auto", 0), ("auto", 16), ("int8", 0), ("fp8", 0)):
        form = decode_plan.CacheForm(kind, sinks, sinks > 0, False)
        sizes = {"ON_DEVICE": True, "CACHE": form, "POOLING": pooling, "TILE": plan.tile}
        sizes["num_warps"] = plan.num_warps
        yield Kernel(plain_step.step_kernel, sizes, types | (codes if kind != "auto" else {}))
    for removes, columns in ((False, power_of_2(dim)), (True, power_of_2(dim) // 4)):
        flags = {"ON_DEVICE": True, "REMOVES": removes, "HEADS": HEADS, "HEAD_DIM": dim}
        blocks = {"COLUMNS": columns, "BLOCK_P": 64, "num_warps": 4}
        yield Kernel(merge_parts.merge_kernel, {**flags, **blocks}, STEP_TYPES)


def kernels_of_pooling(dim: int) -> Iterator[Kernel]:
    """Those of pooling, with the tiles of their launches, and the list of what they made."""
    tiles = pool_tiles(16, dim)
    blocks = (tiles.block_m, tiles.block_g, tiles.block_p)
    shape = pool.Shape(HEADS, dim, dim // 2, False, False, True, *blocks)
    sizes = {"SHAPE": shape, "num_warps": tiles.num_warps}
    types = {"tokens": ("", "", ""), "cores": ("", "", "fp32"), "upstream": ("", "", "fp32")}
    types |= {"gradients": ("", "", ""), "tables": ("fp32", "fp32"), "strides": (3,) * 4}
    yield Kernel(pool_kernels.pool_fwd_kernel, sizes, types)
    types = {**types, "strides": (3,) * 8}
    yield Kernel(pool_kernels.pool_bwd_kernel, {**sizes, "ADD": True}, types)
    flags = {"HAS_MASS": True, "HEAD_DIM": dim, "BLOCK_D": power_of_2(dim), "ROWS": 32}
    lists = {"first": ("", ""), "results": ("", "", "fp32"), "strides": (2, 2, 2, 2)}
    yield Kernel(far_past.list_kernel, {**flags, "num_warps": 4}, {**types, **lists})


def fetch_kernels_of(chip: Chip, dtype: torch.dtype, dim: int) -> Iterator[Kernel]:
    """Those of fetch: index scores, the choice, its marks, raw tokens of the chosen groups; one
    query or 16 choose together."""
    types = {"chosen_ptr": "i32", "words_ptr": "i32"}
    tiles = choose_tiles(chip, dtype, dim)
    sizes = {
        "HEADS": HEADS,
        "HEAD_DIM": dim,
        "BLOCK_D": power_of_2(dim),
        "KEYS": 1,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    types |= {"strides": (3, 3), "sequences": 2, "rule": 3, "pointers": ("fp32", "i32", "i32")}
    types |= {"inputs": ("", "", "fp32"), "results": ("fp32", "fp32")}
    yield Kernel(
        fetch_score_kernels.group_scores_kernel,
        {**sizes, "MERGES": True, "SEGMENT": 1024, "RUN": byte_keys.RUN},
        types,
    )
    index = {"GROUP_SIZE": 16, "PARTS": 8, "SHARED": True, "BITS": 2, "LEVELS": low_bits.LEVELS[2]}
    blocks = {"HEAD_DIM": dim, "BLOCK_D": power_of_2(dim), "BLOCK_P": 8, "BLOCK_G": 8}
    wide = {"inputs": ("", "fp32", "bf16"), "strides": 2}
    if dim <= fetch_index_keys.MAX_DIM:
        for as_codes, results in ((False, ("",)), (True, ("u8", "fp16"))):
            sizes = {**index, "AS_CODES": as_codes, **blocks, "num_warps": 4}
            yield Kernel(fetch_index_keys.index_keys_kernel, sizes, {**wide, "results": results})
    sizes = {"RUN": byte_keys.RUN, "FROM_RUNS": True, "BLOCK": 1024, "BLOCK_K": 64, "num_warps": 1}
    yield Kernel(fetch_choose._select_kernel, sizes, types)
    yield Kernel(marks._mark_kernel, {"BY_ENTRY": True, "BLOCK": 64, "num_warps": 1}, types)
    united = {"unions": ("i32", "i32", "i32"), "words_ptr": "i32", "rule": 3}
    sizes = {"QUERIES": unions.QUERIES, "WORDS": 4, "num_warps": 1}
    yield Kernel(unions.union_kernel, sizes, united)
    if dim <= byte_keys.MAX_DIM:
        rounded = {"inputs": ("", "bf16", "fp32"), "strides": 3}
        rounded["results"] = ("i8", "fp32", "fp32")
        blocks = {"HEAD_DIM": dim, "BLOCK_D": power_of_2(dim), "num_warps": 4}
        yield Kernel(byte_keys.queries_kernel, {**blocks, "BLOCK": 64}, rounded)
        rounded = {"results": ("i8", "fp32")}
        sizes = {"PARTS": 32, "RUN": byte_keys.RUN, **blocks}
        yield Kernel(byte_keys.keys_kernel, sizes, rounded)
    for rows in (16, 64):
        for function, tiles in (
            (fetch_kernels.fetch_fwd_kernel, fetch_tiles(chip, dtype, dim, rows)),
            (fetch_kernels.fetch_dq_kernel, fetch_dq_tiles(chip, dtype, dim, rows)),
            (fetch_kernels.fetch_dkv_kernel, fetch_dkv_tiles(chip, dtype, dim, rows)),
        ):
            blocks = (power_of_2(dim), min(rows, tiles.block_m), tiles.block_n)
            form = fetch_kernels.RawForm(HEADS, False, dim, *blocks)
            sizes = {"FORM": form, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
            more = {"HAS_GRAD_LSE": True} if "_dq_" in function.__name__ else {}
            yield Kernel(function, {**more, **sizes}, RAW_TYPES[function])


def paged_kernels(chip: Chip, dtype: torch.dtype, dim: int) -> Iterator[Kernel]:
    """Those over block tables: for prompts, and for decoding tokens in parts."""
    columns = {"HEAD_DIM": dim, "BLOCK_D": power_of_2(dim)}
    plain = {**columns, "HAS_SOFTCAP": False, "HEADS": HEADS, "SINKS": 16, "GROUP": 16}
    numbers = dict.fromkeys(("starts_ptr", "lengths_ptr", "table_ptr", "core_table_ptr"), "i32")
    pages = {"raw": ("", ""), "cores": ("", "", "fp32"), "strides": (2, 3, 3, 3, 2)}
    results = {"results": ("", "fp32", "fp32"), "gathered": ("", "", "fp32")}
    types = {"slots_ptr": "i64", **numbers, **pages, **results}
    types |= {
        "page_tables": ("i32", "i32"),
        "sequences": ("i32", "i32"),
        "tables": ("fp32", "fp32"),
    }
    tile = paged_store.stored_tile(8, dim, dtype.itemsize)
    blocks = dict(zip(("BLOCK_T", "BLOCK_H", "BLOCK_D"), tile))
    sizes = {"NUM_HEADS": 8, "HEAD_DIM": dim, **blocks, "num_warps": 4}
    yield Kernel(paged_store._store_kernel, sizes, types)
    copied = {"layers_ptr": "i64", "slots_ptr": "i64", "far_slots_ptr": "i64", "strides": (3, 3)}
    yield Kernel(paged_copy._copy_kernel, {**sizes, "ALIGNED": 16}, copied)
    flags = {"HAS_MASS": True, "HAS_SLOTS": True, "ALIGNMENT": 16}
    blocks = {"PAGES": (16, 4), "GROUP": 16, "BLOCK_E": paged_gather.BLOCK_E, "num_warps": 4}
    sizes = {**columns, **flags, **blocks}
    gathering = {**types, "new_tokens": ("", ""), "strides": (2, 2, 3, 3, 3), "slots": ("", "i32")}
    yield Kernel(paged_gather._gather_kernel, sizes, gathering)
    for rows, in_parts in ((4096, False), (HEADS, True)):
        tiles = paged_tiles(chip, dtype, dim, rows)
        flags = {"PAGES": (16, 16), "HAS_MASS": in_parts, "IN_PARTS": in_parts, "ALIGNMENT": 16}
        blocks = {
            "BLOCK_Q": tiles.block_m // HEADS,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }
        yield Kernel(paged_attend._attend_pages_kernel, {**plain, **flags, **blocks}, types)


def step_kernels_of(chip: Chip, dtype: torch.dtype, dim: int) -> Iterator[Kernel]:
    """Those of a decoding step with fetch, of pairs in 2 bits."""
    spec = Spec(16, 1024, 1.0, fetch_groups=64, fetch_index="pairs:2", sink_size=16)
    is_nvidia = chip is not CHIPS["gfx942"][1]
    sizes = decode_plan.StepSizes(dtype, 8, HEADS, dim, 9216, 8192, 64, is_nvidia)
    plan = decode_plan.fetch_plan(chip, sizes, spec)
    place = {"ON_DEVICE": True, "SINKS": spec.sinks}
    form = decode_plan.CacheForm("auto", spec.sinks, True, False)
    pooling = decode_plan.Pooling(True, dim // 2, False, HEADS, 8)
    scoring = {"INDEX": plan.index, "SCORING": plan.scoring, "TILE": plan.tile}
    sizes = {**scoring, "num_warps": decode_plan.ROTATE_WARPS}
    if plan.scoring.whole:
        yield Kernel(score_index.rotate_kernel, sizes, STEP_TYPES)
    types = {**STEP_TYPES, "index": ("u8", "fp16", "fp32")}
    types |= {"pages": ("i32", "i32"), "page_strides": (3, 3, 2, 1)}
    sizes = {**place, **scoring, "num_warps": decode_plan.SCORE_WARPS}
    for page in (0, 4):
        yield Kernel(score_index.score_kernel, {**sizes, "PAGE": page}, types)
    types = {**STEP_TYPES, "rows": ("i32",) * 3, "strides": (2, 3, 3, 3, 2, 3)}
    types |= {"cores": ("", "fp32"), "tables": ("i32", "i32"), "numbers": 3}
    types |= {"raw": ("", "", ""), "choice": ("i32", "i8", "i32")}
    sizes = {"PAGES": (16, 4, 64), "GROUP": 16, "SINKS": 16, "WIDTH": plan.scoring.width}
    sizes |= dict.fromkeys(("HAS_MASS", "HAS_FAR", "HAS_SLOTS"), True) | {"ALIGNMENT": 16}
    sizes |= {"BLOCK_K": 64, "TILE": plan.tile, **plan.attend_options}
    yield Kernel(paged_attend_rows._attend_rows_kernel, sizes, types)
    names = ("chosen_ptr", "places_ptr", "core_table_ptr", "sequences_ptr")
    types = {**dict.fromkeys(names, "i32"), "slots": ("", "i32", "i32", "i64", "i64", "i64")}
    types["numbers"] = 4
    for claims in (False, True):
        sizes = {"PAGE": 4, "CLAIMS": claims, "BLOCK_K": 64, "num_warps": 1}
        yield Kernel(group_slots._slots_kernel, sizes, types)
    types = {**STEP_TYPES, "page_tables": ("i32", "i32"), "sequences": ("i32", "i32")}
    types |= {"new": ("", "", "i64"), "far": ("", ""), "cores": ("", "", "fp32"), "numbers": 2}
    # Triton makes a constant of a stride of 1, as scales of pairs have it.
    scales = ("int", "int", "1")
    types |= {"strides": (2, 3, 3, 3, 2, 3, 2, 2, 3, scales, 2)}
    types["slots"] = ("", "i32", "i32", "i64", "i64", "i64")
    tiles = pool_tiles(16, dim)
    flags = dict.fromkeys(("HAS_MASS", "HAS_SLOTS", "HAS_INDEX"), True)
    sizes = {
        "SINKS": 16,
        "GROUP": 16,
        "CENTRED": 160,
        "HEADS": HEADS,
        "HEAD_DIM": dim,
        "HALF": dim // 2,
    }
    sizes |= {**flags, "INTERLEAVED": False, "HAS_SOFTCAP": False, "BLOCK_R": HEADS}
    sizes |= {"PAGES": (16, 4, 64), "BLOCK_G": tiles.block_g, "BLOCK_P": tiles.block_p}
    sizes |= {"INDEX": plan.index, "TILE": plan.tile._replace(block_m=1, block_n=1, heads=1)}
    for stores_far in (False, True):
        blocks = {"STORES_FAR": stores_far, "num_warps": 4}
        yield Kernel(paged_pool._pool_pages_kernel, {**sizes, **blocks}, types)
    names = ("starts_ptr", "lengths_ptr", "full_until_ptr", "rows_ptr")
    blocks = {"BLOCK": paged_rows.BLOCK, "num_warps": 4}
    types = {**dict.fromkeys(names, "i32"), "clock_ptr": "i64", "numbers": 3}
    yield Kernel(paged_rows._rows_kernel, blocks, types)
    blocks = {"BLOCK": plan.scoring.width, "BLOCK_K": 64, "TILE": plan.tile}
    types = {**STEP_TYPES, "slots": ("i32", "i32", "i64", "i64"), "places": ("i32", "i32")}
    for num_slots in (0, 512):
        sizes = {**place, **blocks, "BLOCK_N": num_slots, "num_warps": plan.select_warps}
        yield Kernel(select_groups.select_kernel, sizes, types)
    entries = {"ON_DEVICE": True, "CACHE": form, "TILE": plan.tile, **plan.attend_options}
    sizes = {**entries, "POOLING": pooling, "INDEX": plan.index}
    yield Kernel(attend_compact.attend_compact_kernel, sizes, STEP_TYPES)
    for fetched_sinks, has_slots in ((spec.sinks, False), (0, True)):
        sizes = {**entries, "FETCHED_SINKS": fetched_sinks, "HAS_SLOTS": has_slots}
        yield Kernel(attend_chosen.attend_chosen_kernel, sizes, STEP_TYPES)


LONGEST = {
    "index_keys_kernel": ("AS_CODES", True),
    "score_kernel": ("PAGE", 4),
    "_slots_kernel": ("CLAIMS", True),
    "_pool_pages_kernel": ("STORES_FAR", True),
    "select_kernel": ("BLOCK_N", 512),
    "attend_chosen_kernel": ("HAS_SLOTS", True),
    "merge_kernel": ("REMOVES", True),
    "_attend_fwd_hopper": ("HAS_MASSES", True),
    "_attend_bwd_hopper": ("HAS_MASS", True),
    "_attend_dkv_kernel": ("FAR", True),
    "_attend_pages_kernel": ("IN_PARTS", False),
}
"""A constant of the longest variant of kernels, which holds the code of the others."""
WITH_CODE = {
    # Assembly.
    "score_kernel",
    "_attend_fwd_hopper",
    # Known to spill.
    "_attend_bwd_hopper",
    "fetch_dkv_kernel",
    "group_scores_kernel",
}
"""Kernels that are compiled to machine code without `all`, too."""


def is_default(kernel: Kernel, chip: str, dim: int) -> bool:
    """Whether a kernel is compiled without `all`: each once, in its longest variant.

    On Hopper its own kernels. With head size 256 attention, whose tiles take the most shared
    memory, else with 128.
    """
    function, constants = kernel.function, kernel.constants
    name, value = LONGEST.get(function.__name__, ("", None))
    if name and constants[name] != value:
        return False
    if function in ATTENTION and constants["FORM"].has_marks:
        return False  # holds little more than without
    if dim != (256 if function in (*ATTENTION, paged_attend._attend_pages_kernel) else 128):
        return False
    if function in FETCH:
        return constants["FORM"].block_m != 16
    if function is plain_step.step_kernel:
        return constants["CACHE"].kind == "fp8"
    if function.__name__ == "_attend_fwd_hopper":
        return constants["HAS_MARKS"]
    if function.__name__ == "_attend_bwd_hopper":
        return constants["SHARE"] == 1
    return True


def hopper_kernels(dtype: torch.dtype, dim: int) -> Iterator[Kernel]:
    """Those for compute capability 9.0, with the constants of their launches."""
    from triton.experimental.gluon import language as gl

    from corecontext.ops.triton import tensor_memory
    from corecontext.ops.triton.attend import (
        hopper_backward,
        hopper_forward,
        hopper_union,
        hopper_union_dq,
    )
    from corecontext.ops.triton.attend.mass_parts import MASS_PARTS
    from corecontext.ops.triton.choose import hopper_scores

    def tile(rows: int, columns: int, of: torch.dtype = dtype) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(
            [1, 1, rows, columns], tensor_memory.DTYPES[of]
        )
        return f"tensordesc<{NAMES[of]}[1,1,{rows},{columns}],{layout!r}>"

    keys = 128 if dim <= 128 else 64
    queries = dict.fromkeys(("q_desc", "out_desc", "grad_desc"), tile(64, dim))
    types = {"pointers": ("fp32", "i32"), **queries}
    kinds = ("k_desc", "v_desc", "far_k_desc", "far_v_desc")
    for with_masses, marked in itertools.product((False, True), (False, True)):
        has = {"HAS_MASSES": with_masses, "HAS_MARKS": marked}
        sizes = {"BLOCK_D": dim, "BLOCK_N": keys, "DTYPE": tensor_memory.DTYPES[dtype]}
        masses = tile(keys, MASS_PARTS if with_masses else dim)
        yield Kernel(
            hopper_forward._attend_fwd_hopper,
            {**has, **sizes},
            {**types, **dict.fromkeys(kinds, tile(keys, dim)), "mass_desc": masses},
        )
    if dim > 128:
        return
    descriptors = {
        **dict.fromkeys(("q_desc", "grad_desc"), tile(unions.QUERIES // 2, 64)),
        **dict.fromkeys(("k_desc", "v_desc"), tile(32, 64)),
    }
    united = {**descriptors, "unions": ("i32", "i32", "i32")}
    sizes = {"GROUP_SIZE": 32, "HEAD_DIM": dim}
    results = {"results": ("", "fp32"), "out_strides": 3}
    yield Kernel(hopper_union.union_fwd_hopper, sizes, {**united, **results})
    pointers = {"inputs": ("", "", "fp32", "fp32"), "results": ("fp32", "fp32")}
    more = {**sizes, "HAS_GRAD_LSE": True}
    yield Kernel(hopper_union_dq.union_dq_hopper, more, {**united, **pointers})
    bytes_of = {"q_desc": tile(64, dim, torch.int8), "k_desc": tile(128, dim, torch.int8)}
    bytes_of |= {"rounded": ("fp32",) * 3, "results": ("fp32", "fp32")}
    bytes_of |= {"segments": 3, "rows": 5, "shares": 3, "rule": 3}
    sizes = {"HEADS": HEADS, "PARTS": 32, "MERGES": True, "BLOCK_D": dim}
    yield Kernel(hopper_scores.score_bytes_hopper, sizes, bytes_of)
    one = torch.float32
    sums = {
        "numbers": 2,
        "upstream": ("", "fp32", "", "fp32"),
        "results": ("fp32", "fp32"),
        "gradients": ("fp32", "", ""),
        "strides": (3, 3),
    }
    sizes = {"HEAD_DIM": dim, "BLOCK_D": dim}
    for with_masses, share in itertools.product((False, True), (0, 1, 16)):
        yield Kernel(
            hopper_backward._attend_bwd_hopper,
            {"HAS_MASS": with_masses, "SHARE": share, **sizes},
            {
                **types,
                **dict.fromkeys(kinds, tile(64, dim)),
                "stats_desc": tile(1, 128, one),
                "sum_desc": tile(64, dim // 2, one),
                "inputs": ("fp32", "i32"),
                "results": ("fp32", "", "", "fp32"),
                "numbers": 4,
                "rule": 3,
            },
        )
    sizes["BLOCK"] = hopper_backward.BLOCK_M.value
    yield Kernel(hopper_backward._prepare_kernel, {"HAS_GRAD_LSE": True, **sizes}, sums)
    yield Kernel(hopper_backward._finish_kernel, {"HAS_LAST": True, **sizes}, sums)


def compiled(kernel: Kernel, target: GPUTarget, dtype: torch.dtype) -> Any:
    """The kernel as it is compiled for aligned tensors."""
    options = {
        name: kernel.constants[name]
        for name in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
        if name in kernel.constants
    }
    constants = {name: value for name, value in kernel.constants.items() if name not in options}
    names, signature = kernel.function.arg_names, {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "factors":
            signature[name] = ("fp32",) * kernel.types.get(name, 2)
        elif name == "numbers":
            signature[name] = ("i32",) * (kernel.types.get(name) or NUMBERS[kernel.function])
        elif isinstance(kernel.types.get(name), (tuple, int)):
            signature[name] = types_of(kernel.types[name], dtype)
        elif name.endswith("_desc"):
            signature[name] = kernel.types[name]
        elif name.endswith("_ptr"):
            signature[name] = "*" + kernel.types.get(name, NAMES[dtype])
        elif name.endswith(("_strides", "_sizes")):
            signature[name] = ("i32",) * num_strides(kernel.function, name)
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    if any(name.endswith("_desc") for name in names):
        from triton.experimental.gluon._runtime import GluonASTSource

        return triton.compile(
            GluonASTSource(kernel.function, signature, constants),
            target=target,
            options={"num_warps": 4, **options},
        )
    aligned = {}
    for i, name in enumerate(names):
        if name.endswith("_ptr"):
            aligned[i,] = [["tt.divisibility", 16]]
        elif name.endswith("strides") or isinstance(kernel.types.get(name), tuple):
            for path in paths_of(signature[name]):
                kind = functools.reduce(operator.getitem, path, signature[name])
                if kind == "constexpr":
                    constants[(i, *path)] = 1
                else:
                    aligned[(i, *path)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel.function, signature, constants, aligned), target=target, options=options
    )


def types_of(kind: Any, dtype: torch.dtype) -> Any:
    """Triton's types of one of `Kernel.types`."""
    if isinstance(kind, int):
        return ("i32",) * kind
    if kind in INTEGERS:
        return INTEGERS[kind]
    if isinstance(kind, str):
        return f"*{kind or NAMES[dtype]}"
    return tuple(types_of(x, dtype) for x in kind)


def paths_of(types: Any) -> list[tuple[int, ...]]:
    """The places of all pointers and integers in nested tuples."""
    if not isinstance(types, tuple):
        return [()]
    return [(j, *path) for j, x in enumerate(types) for path in paths_of(x)]


def num_strides(function: Any, name: str) -> int:
    """How many strides the launch passes as one argument: those of all dimensions but the last; the
    new token of a decoding step [B, H, 1, D] has no length."""
    if function in PAGED:
        return 3 if name == "page_strides" else 2
    return 2 if function is plain_step.step_kernel or function in STEP else 3


def spilled(binary: bytes) -> int | None:
    """Bytes of stack of a thread, which only spills use here; None where the tool that knows is
    missing."""
    try:
        tool = triton.knobs.nvidia.cuobjdump.path
    except (AttributeError, RuntimeError):
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        shown = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    found = re.findall(r"STACK:(\d+)", shown)
    return max(map(int, found)) if found else None


def cases_of(name: str, everything: bool) -> Iterator[tuple[Kernel, torch.dtype, int]]:
    """Kernels with their dtypes and head sizes; bfloat16 with head size 128 first."""
    chip = CHIPS[name][1]
    sizes = [(torch.bfloat16, 128)]
    if everything or name != "sm_90":
        sizes += [(torch.bfloat16, 256)]
    if everything:
        sizes += [
            (torch.bfloat16, 64),
            (torch.float16, 80),
            (torch.float32, 64),
            (torch.float32, 128),
            (torch.float32, 256),
        ]
    for dtype, dim in sizes:
        kernels = []
        if everything or name != "sm_90":
            kernels += plain_kernels(chip, dtype, dim)
        if name == "sm_90" and dtype != torch.float32 and dim in (64, 128, 256):
            kernels += hopper_kernels(dtype, dim)
        for kernel in kernels:
            if everything or is_default(kernel, name, dim):
                yield kernel, dtype, dim


def without_code(*stage: Any) -> tuple[str, str] | None:
    """Triton's hook for its stages, which ends them before machine code is made: shared memory is
    allocated before. Asked without arguments, it tells such kernels apart in Triton's cache."""
    if not stage:
        return "without code", "without code"
    stages = stage[1]

    def nothing(source: Any, metadata: dict[str, Any]) -> bytes:
        metadata.setdefault("name", "")
        return b""

    made = list(stages)
    for name in made[made.index("llir") + 1 :]:
        stages[name] = nothing
    return None


def main(names: list[str], everything: bool) -> None:
    """Compile and print."""
    for name in names:
        target, chip = CHIPS[name]
        for kernel, dtype, dim in cases_of(name, everything):
            is_quick = not everything and kernel.function.__name__ not in WITH_CODE
            os.environ["DISABLE_LLVM_OPT"] = str(int(is_quick))
            triton.knobs.runtime.add_stages_inspection_hook = without_code if is_quick else None
            made = compiled(kernel, target, dtype)
            print(
                json.dumps(
                    {
                        "chip": name,
                        "kernel": kernel.function.__name__,
                        "dtype": NAMES[dtype],
                        "dim": dim,
                        "shared": made.metadata.shared,
                        "limit": chip.shared_memory,
                        "spilled": spilled(made.asm["cubin"]) if made.asm.get("cubin") else None,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "all"], "all" in sys.argv[1:])
