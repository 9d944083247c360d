"""Fit the rows of a training step to a GPU's memory: as many at once as it holds, by the peaks of
passes over made-up rows before the run."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from corecontext.files import is_out_of_memory
from corecontext.train.train_config import TrainConfig

MARGIN = 0.1
"""Share of a GPU's memory that a split leaves free: the allocator cannot fill every gap between its
blocks, collectives have buffers, and real rows hold several documents."""


class Split(NamedTuple):
    """How a process takes its rows of a step."""

    batch_size: int
    """Rows of a forward and backward pass."""
    accumulation: int
    """Passes of a step."""
    checkpointing: bool
    """Whether activations are recomputed in the backward pass."""


class Gpu:
    """The memory of a GPU, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def total(self) -> int:
        """Return the size of the memory."""
        return torch.cuda.mem_get_info(self.device)[1]

    def free(self) -> int:
        """Return the bytes that tensors can still take, those in PyTorch's cache included."""
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + cached

    def begin_peak(self) -> int:
        """Measure the peak from here on; return the bytes of all tensors now."""
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the most bytes of tensors since `begin_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def empty_cache(self) -> None:
        """Give memory without tensors back to the GPU."""
        gc.collect()  # an error's frames, which hold tensors
        torch.cuda.empty_cache()


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the memory of a CUDA device, None for another device."""
    return Gpu(device) if device.type == "cuda" else None


def split_for_memory(model: Any, config: TrainConfig, arguments: Any) -> Split | None:
    """Return the split of a step's rows that the GPU's memory allows, the same on every rank; None
    where the run keeps its own.

    The rows of the step, their order and their weights stay. The model moves to the GPU, and the
    first rank prints the split to stderr.

    Args:
        model: The run's model, with its attention and its loss.
        arguments: TrainingArguments: device, bf16, and the processes.
    """
    gpu = gpu_of(arguments.device)
    if gpu is None or not _may_split(model, config):
        return None
    rows = config.batch_size * config.accumulation
    model.to(arguments.device)
    peaks = _measure_peaks(model, config, arguments, gpu, most=min(rows, 2))
    gpu.empty_cache()
    # The gradients of the passes are still there.
    free = gpu.free() - _bytes_to_come(model, arguments.world_size)
    model.zero_grad(set_to_none=True)
    gpu.empty_cache()
    fitting = largest_divisor(rows, peaks, free - MARGIN * gpu.total())
    batch_size = _least_of_ranks(fitting, arguments)
    if arguments.process_index == 0:
        used = gpu.total() - free + bytes_of_pass(batch_size, peaks) if batch_size else None
        print(describe(batch_size, used, gpu.total()), file=sys.stderr, flush=True)
    if not batch_size:
        return Split(1, rows, True)
    return Split(batch_size, rows // batch_size, False)


def _may_split(model: Any, config: TrainConfig) -> bool:
    """Whether the run asks for a split, each process has the whole model and whole rows, and
    results do not depend on the split but for rounding."""
    is_sharded = config.fsdp or config.deepspeed is not None or config.context_parallel > 1
    has_loss_by_pass = getattr(model.config, "output_router_logits", False)
    is_excluded = is_sharded or has_loss_by_pass or config.deterministic
    return config.fit_memory and not is_excluded


def _measure_peaks(
    model: Any, config: TrainConfig, arguments: Any, gpu: Gpu, most: int
) -> list[int]:
    """Return the bytes that passes of 1 to `most` rows take at their peaks, without recomputation,
    beside weights and gradients; none of a pass that runs out of memory, nor of later ones."""
    model.train()
    peaks: list[int] = []
    try:
        # The first pass makes the gradients, and kernels are tuned and compiled in it.
        _run_pass(model, 1, config.context_length, arguments)
        for rows in range(1, most + 1):
            before = gpu.begin_peak()
            _run_pass(model, rows, config.context_length, arguments)
            peaks.append(gpu.peak() - before)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return peaks


def _run_pass(model: Any, rows: int, length: int, arguments: Any) -> None:
    """Run a forward and backward pass on made-up rows, in the arithmetic of the run."""
    positions = torch.arange(length, device=arguments.device).repeat(rows, 1)
    ids = positions % model.config.vocab_size
    with torch.autocast(arguments.device.type, torch.bfloat16, enabled=arguments.bf16):
        loss = model(input_ids=ids, position_ids=positions, labels=ids)["loss"]
    loss.backward()


def _bytes_to_come(model: Any, processes: int) -> int:
    """Return the bytes that the first step will add: AdamW's two moments, and among several
    processes the buckets in which gradients are reduced."""
    trained = sum(x.nbytes for x in model.parameters() if x.requires_grad)
    return trained * (2 if processes == 1 else 3)


def bytes_of_pass(rows: int, peaks: Sequence[int]) -> float:
    """Return the bytes of a pass of so many rows: from the peaks of one row and of two, each
    further row takes as many as the second; infinite without the peaks that this needs."""
    if rows <= len(peaks):
        return peaks[rows - 1]
    if len(peaks) < 2:
        return math.inf
    return peaks[1] + (rows - 2) * (peaks[1] - peaks[0])


def largest_divisor(rows: int, peaks: Sequence[int], free: float) -> int:
    """Return the largest divisor of a step's rows whose pass takes at most `free` bytes; 0 where
    not even one row does."""
    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    fitting = [count for count in divisors if bytes_of_pass(count, peaks) <= free]
    return max(fitting, default=0)


def _least_of_ranks(count: int, arguments: Any) -> int:
    """Return the least count of all ranks: each has measured its own GPU."""
    if arguments.world_size == 1:
        return count
    least = torch.tensor(count, device=arguments.device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def describe(batch_size: int, used: float | None, total: int) -> str:
    """Return a line about a split, with the bytes used at the peak and those of the GPU in GiB."""
    size = f"{total / 2**30:.0f} GiB"
    if used is None:
        return f"1 row at once, activations recomputed: {size} hold no row without recomputation"
    rows = "1 row" if batch_size == 1 else f"{batch_size} rows"
    return f"{rows} at once, no recomputation: about {used / 2**30:.0f} of {size}"
