"""A server compiles the kernels of prompts before the first of them, by what Triton tells kernels
apart by. Needs neither a GPU nor vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

triton = pytest.importorskip("triton", reason="the triton backend needs triton")

# Whoever imports the tests has read TRITON_INTERPRET, so this has a process of its own.
PROGRAM = Path(__file__).with_name("kernels_of_prompts.py")
SERVERS = ("host", "slots", "many groups", "compact", "host, sm_80", "compact, sm_80")
SEVERAL = {
    "_attend_fwd_hopper",
    "_attend_fwd_kernel",
    "_attend_pages_kernel",
    "_mark_kernel",
    "_pool_pages_kernel",
    "_select_kernel",
    "_slots_kernel",
    "merge_kernel",
}
"""Kernels of which a server needs more than one form."""
SPARE = {
    "_attend_pages_kernel",  # for drafts
    "_gather_kernel",  # for the page that stands for all while vLLM measures memory
    "_select_kernel",  # for few lengths, whose groups are just a power of 2
    "merge_kernel",
}
"""Kernels of which the steps below need fewer forms than the start compiles."""


@pytest.fixture(scope="module")
def servers() -> dict[str, dict]:
    """What the program prints of each server."""
    path = os.pathsep.join((str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["server"]: line for line in lines}


@pytest.mark.skipif(Version(triton.__version__) < Version("3.6"), reason="Hopper's need Triton 3.6")
@pytest.mark.parametrize("name", SERVERS)
def test_no_step_needs_a_kernel_that_the_start_has_not_compiled(name, servers):
    """Chunks of prompts of all lengths behind any past, beside any number of decoding sequences."""
    kernels = servers[name]
    assert not kernels["late"]
    assert set(kernels["unused"]) <= SPARE
    assert {kernel for kernel, count in kernels["counts"].items() if count > 1} <= SEVERAL
    assert "_pool_pages_kernel" in kernels["counts"]
