"""Run a reproduction on several GPUs: a process for each, on the stages of one work folder."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corecontext.files import UserError
from corecontext.terminal import progress
from reproduction.run import LOOK_AGAIN_S, Miniature

VISIBLE = "CUDA_VISIBLE_DEVICES"


def run_on_gpus(gpus: int, arguments: dict[str, Any], only: Sequence[str] = ()) -> bool:
    """Run `Miniature(**arguments).run(only)` in a process for each GPU, with output in gpu-N.log.

    Raises:
        UserError: a process failed.
    """
    folder = Path(arguments["folder"])
    run = Miniature(**arguments)
    processes = _start(gpus, folder, arguments, tuple(only))
    done = sum(run.is_done(stage.name) for stage in run.plan)
    with progress(f"reproduce on {gpus} GPUs, stages", len(run.plan)) as advance:
        advance(done)
        while any(process.is_alive() for process in processes):
            time.sleep(LOOK_AGAIN_S)
            before = done
            done = sum(run.is_done(stage.name) for stage in run.plan)
            advance(done - before)
    failed = [gpu for gpu, process in enumerate(processes) if process.exitcode]
    if failed:
        raise UserError(
            f"reproducing failed on GPU {failed[0]}: see {folder}/gpu-{failed[0]}.log. What was "
            "done is kept."
        )
    return run.is_all_done(only)


def _start(
    gpus: int, folder: Path, arguments: dict[str, Any], only: tuple[str, ...]
) -> list[multiprocessing.process.BaseProcess]:
    """Start the processes, each of which sees one GPU."""
    spawn = multiprocessing.get_context("spawn")
    before = os.environ.get(VISIBLE)
    visible = before.split(",") if before else [str(gpu) for gpu in range(gpus)]
    processes: list[multiprocessing.process.BaseProcess] = []
    try:
        for gpu in range(gpus):
            os.environ[VISIBLE] = visible[gpu % len(visible)]  # read when the child starts
            log = str(folder / f"gpu-{gpu}.log")
            process = spawn.Process(target=_work, args=(log, arguments, only))
            process.start()
            processes.append(process)
    finally:
        os.environ.pop(VISIBLE)
        if before is not None:
            os.environ[VISIBLE] = before
    return processes


def _work(log: str, arguments: dict[str, Any], only: tuple[str, ...]) -> None:
    """Run one process of `run_on_gpus`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)
    Miniature(**arguments).run(only)
