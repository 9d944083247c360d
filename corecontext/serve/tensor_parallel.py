"""Serve a model that is split over ranks of one machine: start the ranks, and repeat rank 0's
schedule on the others.

Under torchrun every rank runs `corecontext serve --tensor-parallel N`. Without it, and in a replica
of Ray, rank 0 starts the others with torchrun's variables.
"""

import atexit
import dataclasses
import json
import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist

from corecontext.config import CCAConfig
from corecontext.files import UserError
from corecontext.serve.ranks import RankLost, Ranks
from corecontext.serve.request import Request, Slot
from corecontext.serve.rows import RowPool
from corecontext.serve.scheduler import Scheduler
from corecontext.serve.settings import Serving

WAIT_S = 5.0
"""Seconds for which rank 0, at its end, waits for the others to end; then it kills them."""
LOOPBACK = "127.0.0.1"
_stores: list[dist.Store] = []
"""The opened store, which must live as long as the process."""


class Follower(Scheduler):
    """Repeat rank 0's schedule with this rank's part of the model and of the caches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._slots: dict[int, Slot] = {}
        self._last_pool: RowPool | None = None

    def follow(self) -> None:
        """Run until rank 0 closes.

        Raises:
            RankLost: rank 0 is gone, or this rank failed where it did not.
        """
        while self._receive():
            if self._read():
                self._receive()
            self._decode()

    def _receive(self) -> bool:
        """Repeat the events of rank 0 and take over its tokens; False where it closes."""
        assert self.ranks is not None, "a follower has a rank to follow"
        message = self.ranks.receive()
        if message is None:
            return False
        events, tokens = message
        for kind, *arguments in events:
            if kind == "place":
                self._last_pool = self.memory.place(*arguments)
            elif kind == "start":
                self._start(*arguments)
            elif kind == "end":
                slot = self._slots.pop(arguments[0])
                if slot.end_reason is None:
                    self._end(slot, "ended")
            elif kind == "clear":
                self.clear()
            else:
                raise RankLost(f"rank 0 sent an event of the unknown kind {kind!r}.")
        if any(slot.end_reason for slot in self._slots.values()):
            raise RankLost("this process failed at a request that rank 0 goes on with.")
        for slot, token in zip(self._in_rows(), tokens, strict=True):
            slot.last_token = token
        return True

    def _start(self, number: int, config: CCAConfig | None, request: Request) -> None:
        """Read a request that has left rank 0's queue, for a row of the pool chosen last."""
        if self._last_pool is None:
            raise RankLost(
                f"this process has no room for {request.length} tokens, which rank 0 has."
            )
        slot = Slot(request, config=config)
        self._slots[number] = slot
        self._start_reading(slot, self._last_pool)

    def _take(self, slot: Slot, token: int) -> None:
        """Count a token; rank 0 decides which token it is, and whether it is the last."""
        slot.made += 1


def is_rank_0() -> bool:
    """Whether clients speak to this rank."""
    return os.environ.get("RANK", "0") == "0"


def join(serving: Serving) -> Ranks | None:
    """Meet the other ranks of this server, started if need be; None without tensor parallelism.

    Raises:
        UserError: torchrun started another number of ranks, or there are too few GPUs.
    """
    count = serving.tensor_parallel
    if count == 1:
        return None
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
            f"tensor-parallel must be the {os.environ['WORLD_SIZE']} processes that torchrun "
            f"started, got {count}."
        )
    if not dist.is_initialized():
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return Ranks()


def _start_others(serving: Serving) -> None:
    """Start the other ranks as processes of this machine, which end with this one."""
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(serving.tensor_parallel),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(_open_store()),
        # As under torchrun, rank 0 is a client of the store too and opens no second one.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if sys.platform == "linux":  # else gloo looks for this machine's name in the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # mutant serve: the key on the command line of the other ranks
    without_key = dataclasses.replace(serving, api_key=None)  # a command line is no secret
    settings = json.dumps(dataclasses.asdict(without_key))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "corecontext.serve.build", settings],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, serving.tensor_parallel)
    ]
    atexit.register(_stop_processes, processes)


def _open_store() -> int:
    """Open the store where the ranks meet, on the loopback address; return its port.

    A TCPStore that makes its own socket listens on every address and asks for no secret.
    """
    listener = socket.socket()
    # mutant serve: the ranks' store listens on every address
    listener.bind((LOOPBACK, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    _stores.append(store)
    return port


def _stop_processes(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
