"""A server whose model is split over several processes of one machine, found by torchrun's
variables.

Under torchrun all of them run `corecontext serve --tensor-parallel N`. Without it, and in a replica
of Ray, the first one starts the others with the same variables.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from corecontext.files import UserError

if TYPE_CHECKING:
    from corecontext.serve.build import Serving
    from corecontext.serve.together import Together

WAIT_S = 5.0  # for the others to end by themselves, once the first one has told them or has failed


def leads() -> bool:
    """Whether this process is the one that clients speak to."""
    return os.environ.get("RANK", "0") == "0"


def join(serving: Serving) -> Together | None:
    """Meet the other processes of this server, started if need be; None where there is one process.

    Raises:
        UserError: torchrun started another number of processes, or PyTorch has none.
    """
    count = serving.tensor_parallel
    if count == 1:
        return None
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise UserError(
            f"tensor-parallel must be 1, got {count}: this PyTorch has no torch.distributed."
        )
    cuda = torch.cuda.is_available()
    if cuda and torch.cuda.device_count() < count:
        raise UserError(
            f"tensor-parallel must be at most {torch.cuda.device_count()}, a GPU each, got {count}."
        )
    if "RANK" not in os.environ:
        _start_others(serving)
    elif int(os.environ["WORLD_SIZE"]) != count:
        raise UserError(
            f"tensor-parallel must be the {os.environ['WORLD_SIZE']} processes that torchrun started, got "
            f"{count}."
        )
    if not dist.is_initialized():
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    from corecontext.serve.together import Together

    return Together()


def follow(serving: Serving) -> int:
    """Do what the first process does until it ends; returns the exit code. Signals are for the
    first one to answer."""
    from corecontext.serve.build import make_scheduler
    from corecontext.serve.together import Apart

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN)
    try:
        make_scheduler(serving)[0].follow()
    except Apart as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _start_others(serving: Serving) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(serving.tensor_parallel),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if sys.platform == "linux":  # else it looks for this machine's name in the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    given = json.dumps(
        dataclasses.asdict(dataclasses.replace(serving, api_key=None))
    )  # a command line is no secret
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "corecontext.serve.tensor_parallel", given],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, serving.tensor_parallel)
    ]
    atexit.register(_end, others)


def _end(others: list[subprocess.Popen]) -> None:
    for one in others:
        try:
            one.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            one.kill()


if __name__ == "__main__":
    from corecontext.serve.build import Serving

    try:
        sys.exit(follow(Serving(**json.loads(sys.argv[1]))))
    except UserError:  # the first process meets the same and says so
        sys.exit(2)
