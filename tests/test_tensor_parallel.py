"""A model that transformers splits over processes computes the same under CCA: each has its heads
and their cache."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tensor_parallel
import torch
from tiny_model import save_tiny_model
from torch.multiprocessing import start_processes

PROGRAM = Path(__file__).with_name("tensor_parallel.py")


def start(folder: str, output: Path, device: str) -> None:
    """Run both processes, on the CPU or with a GPU each; a failure shows their output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    if not torch.cuda.is_available():
        # Copies of this process have imported what new ones would import for seconds.
        arguments = (folder, str(output), port)
        start_processes(tensor_parallel.process, arguments, nprocs=2, start_method="fork")
        return
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            (str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", ""))
        ),
    }
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    method = "fork" if device == "cpu" else "spawn"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), folder, str(output), port, method],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.multi_gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
            ],
        ),
    ],
)
def test_two_processes_equal_one(tmp_path, device, monkeypatch):
    folder = save_tiny_model(tmp_path / "model")
    start(folder, tmp_path / "two.pt", device)
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tensor_parallel.main(folder, str(tmp_path / "one.pt"))
    one, two, second = (
        torch.load(tmp_path / name) for name in ("one.pt.0", "two.pt.0", "two.pt.1")
    )
    # Each process keeps its own KV heads only, each with its g.
    assert [x["equal"]["heads"] for x in (one, two, second)] == [
        [(2, 4)] * 2,
        [(1, 4)] * 2,
        [(1, 4)] * 2,
    ]
    assert [set(x["by head"]["heads"]) for x in (one, two, second)] == [
        {(2, 4), (1, 8), (1, 1)},
        {(1, 4), (1, 8)},
        {(1, 4), (1, 1)},
    ]
    for name in ("equal", "by head", "fetch", "fetch from host"):
        assert one[name]["device"] == two[name]["device"] == device
        for what in ("whole", "last"):
            torch.testing.assert_close(two[name][what], one[name][what], rtol=1e-5, atol=1e-5)
        assert two[name]["tokens"] == one[name]["tokens"] == second[name]["tokens"]
