"""vLLM's whole engine with core context generates the tokens of our Engine: on the GPU where there
is one, else with the kernels in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("vllm_engine.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="the plug-in to vLLM needs vllm"
    ),
]


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
CASES = ["plain", "mass", "long chunks", "small cache", "drafts"]
CASES += ["fetch", "fetch, shared choices", "fetch, small cache", "fetch, drafts"]
CASES += ["fetch, host", "fetch, host, shared choices", "fetch, host, small cache"]
CASES += ["fetch, host, drafts", "fetch, offload", "fetch, all groups, small cache"]
CASES += ["fetch, host, all groups, small cache"]
CASES += ["fetch, 64 requests", "fetch, host, 64 requests"]
CASES += ["raw heads", "raw heads, small cache", "raw heads, drafts", "raw pairs"]
CASES += ["llama 2", "llama 3", "mistral", "qwen2", "qwen3", "two workers, plain"]
CASES += ["two workers, raw heads", "two stages, raw heads"]
CASES += ["two workers, fetch", "two workers, fetch, host"]
GPU_CASES = ["captured", "graphs", "many", "real", "raw heads, captured", "real, raw heads"]
GPU_CASES += ["fetch, captured", "fetch, host, captured", "fetch, many", "fetch, host, many"]
GPU_CASES += ["fetch, graphs", "fetch, host, graphs"]
GPU_CASES += ["real, fetch", "real, fetch, drafts", "real, fetch, all groups, small cache"]
GPU_CASES += ["real, fetch, host", "real, fetch, host, drafts", "qwen3, 16K", "qwen3, 16K, host"]
CASES += [pytest.param(case, marks=ON_GPU) for case in GPU_CASES]


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_the_engine(case, runner):
    """In chunks of prompts, with shared beginnings, preemption, and drafts some of which are
    rejected; with vLLM's model runners V1 and V2."""
    if "drafts" in case and runner == "V2" and not torch.cuda.is_available():
        pytest.skip("vLLM's own kernel for ngram drafts does not run in Triton's interpreter")
    if "two stages" in case and runner == "V1" and not torch.cuda.is_available():
        pytest.skip("vLLM 0.32 itself ends with an error there")
    # A process of its own: vLLM's modules keep the platform that they were loaded for.
    paths = [str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), runner, case], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["runner"] == runner
    if case.startswith("fetch") and "small cache" in case and "all groups" not in case:
        # A preempted request reads its answer again as a prompt, and may go on in another way.
        assert len({*line["wrong"], *line["not_greedy"]}) <= line["preempted"] < line["requests"]
    else:
        assert line["wrong"] == line["not_greedy"] == line["not_as_alone"] == []
    if "small cache" in case:
        assert line["preempted"] > 0
    else:
        assert line["shared"] > 0
    if "drafts" in case:
        assert line["accepted"] > 0
    assert (line["loaded"] > 0) == ("offload" in case)
