"""Every Triton kernel is compiled for every chip that it is meant for, without having one, and fits
its memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

triton = pytest.importorskip("triton", reason="the triton backend needs triton")

pytestmark = pytest.mark.timeout(600)  # one process compiles all kernels of two chips

# Whoever imports the tests has read TRITON_INTERPRET, so compilation has a process of its own.
PROGRAM = Path(__file__).with_name("compile_kernels.py")
PLAIN = {
    "_attend_fwd_kernel",
    "_attend_dq_kernel",
    "_attend_dkv_kernel",
    "pool_fwd_kernel",
    "pool_bwd_kernel",
    "list_kernel",
    "step_kernel",
    "merge_kernel",
    "rotate_heads_kernel",
}
FETCH = {
    "index_keys_kernel",
    "keys_kernel",
    "queries_kernel",
    "union_kernel",
    "group_scores_kernel",
    "_select_kernel",
    "_mark_kernel",
    "fetch_fwd_kernel",
    "fetch_dq_kernel",
    "fetch_dkv_kernel",
    "rotate_kernel",
    "score_kernel",
    "select_kernel",
    "attend_compact_kernel",
    "attend_chosen_kernel",
}
LOSS = {"loss_kernel"}
PAGED = {"_store_kernel", "_pool_pages_kernel", "_gather_kernel", "_attend_pages_kernel"}
PAGED |= {"_rows_kernel", "_attend_rows_kernel", "_slots_kernel", "_copy_kernel"}
HOPPER = {
    "_attend_fwd_hopper",
    "_attend_bwd_hopper",
    "_prepare_kernel",
    "_finish_kernel",
    "score_bytes_hopper",
    "union_dq_hopper",
    "union_fwd_hopper",
}
# Bytes a thread, where it is more than a few registers. Kernels without assembly that are not known
# to spill become machine code in the slow tests only.
SPILLED = {
    "_attend_bwd_hopper": 320,  # 296 by Triton 3.6
    "_attend_dkv_kernel": 1088,  # 1,072 by Triton 3.6
    "fetch_dkv_kernel": 512,
    "group_scores_kernel": 640,  # 632 by Triton 3.6
}


def compile_for(*arguments: str) -> list[dict]:
    """What the program prints; Triton's own cache returns kernels whose source is unchanged."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(
            (str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", ""))
        ),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(made: list[dict], kernels: set[str]) -> None:
    """All these kernels are there and fit."""
    assert {one["kernel"] for one in made} == kernels
    for one in made:
        assert one["shared"] <= one["limit"], one
        if one["dtype"] == "bf16" and one["dim"] == 128:
            assert (one["spilled"] or 0) <= SPILLED.get(one["kernel"], 256), one


OLD = pytest.mark.skipif(
    Version(triton.__version__) < Version("3.6"), reason="Triton 3.5 has none of them on Hopper"
)


# Hopper's own kernels, and the least shared memory of NVIDIA's chips. AMD's are compiled below.
@pytest.fixture(scope="module")
def made() -> list[dict]:
    """By one process, whose imports take as long as several kernels."""
    chips = ["sm_86"]
    if not OLD.args[0]:
        chips.append("sm_90")
    return compile_for(*chips)


@pytest.mark.parametrize("chip", [pytest.param("sm_90", marks=OLD), "sm_86"])
def test_kernels_fit(chip, made):
    kernels = {"sm_90": HOPPER, "sm_86": PLAIN | FETCH | PAGED | LOSS}[chip]
    check([one for one in made if one["chip"] == chip], kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chip",
    ["sm_80", "sm_89", "sm_100", "sm_120", pytest.param("sm_90", marks=OLD), "sm_86", "gfx942"],
)
def test_all_sizes_fit(chip):
    kernels = PLAIN | FETCH | LOSS | PAGED
    check(compile_for(chip, "all"), kernels | HOPPER if chip == "sm_90" else kernels)
