"""A reproduction on several GPUs: a process for each, all at the stages of one work folder."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corecontext.files import UserError
from corecontext.terminal import progress
from reproduction.stages import LOOK_AGAIN_S, Miniature


def run_on_gpus(gpus: int, arguments: dict[str, Any], only: Sequence[str] = ()) -> bool:
    """`Miniature(**arguments).run(only)` in a process for each GPU, in one work folder; what each
    prints goes to gpu-N.log there.

    Raises:
        UserError: a process failed.
    """
    folder, spawn, processes = Path(arguments["folder"]), multiprocessing.get_context("spawn"), []
    run = Miniature(**arguments)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = before.split(",") if before else [str(gpu) for gpu in range(gpus)]
    try:
        for gpu in range(gpus):
            os.environ["CUDA_VISIBLE_DEVICES"] = seen[
                gpu % len(seen)
            ]  # read by the child before it finds its GPUs
            one = spawn.Process(
                target=_work, args=(str(folder / f"gpu-{gpu}.log"), arguments, tuple(only))
            )
            one.start()
            processes.append(one)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    shown = sum(run.is_done(stage.name) for stage in run.plan)
    with progress(f"reproduce on {gpus} GPUs, stages", len(run.plan)) as advance:
        advance(shown)
        while any(one.is_alive() for one in processes):
            time.sleep(LOOK_AGAIN_S)
            done = sum(run.is_done(stage.name) for stage in run.plan)
            advance(done - shown)
            shown = done
    failed = [gpu for gpu, one in enumerate(processes) if one.exitcode]
    if failed:
        raise UserError(
            f"reproducing failed on GPU {failed[0]}: see {folder}/gpu-{failed[0]}.log. What was done is "
            "kept."
        )
    return run.is_all_done(only)


def _work(log: str, arguments: dict[str, Any], only: tuple[str, ...]) -> None:
    """One process of `run_on_gpus`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)
    Miniature(**arguments).run(only)
