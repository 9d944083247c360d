"""Join the processes that torchrun started for a training benchmark."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.training_settings import TrainingBench
from corecontext.files import UserError


@contextlib.contextmanager
def processes(bench: TrainingBench) -> Iterator[tuple[TrainingBench, int, int]]:
    """Yield the bench on this process's device, its rank, and the number of processes."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if not bench.context_parallel:
        if world > 1:
            raise UserError("several processes must share a sequence here: use --context-parallel.")
        yield bench, 0, 1
        return
    if "RANK" not in os.environ:
        raise UserError(
            "context-parallel must run in several processes. Use torchrun --nproc-per-node N -m "
            "benchmarks train --context-parallel."
        )
    if bench.cuda:
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        bench = replace(bench, device=f"cuda:{local}")
    starts_group = not dist.is_initialized()
    if starts_group:
        dist.init_process_group("nccl" if bench.cuda else "gloo")
    try:
        yield bench, dist.get_rank(), world
    finally:
        if starts_group:
            dist.destroy_process_group()
