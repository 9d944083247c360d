"""Split the rows of a training step by the memory of a GPU: as many at once as it holds, judged by
the peak memory of passes over made-up rows."""

import gc
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from corecontext.files import is_out_of_memory
from corecontext.inference.chunk_size import free_bytes
from corecontext.measure import PeakMemory
from corecontext.train.train_config import TrainConfig

MARGIN = 0.1
"""Share of a GPU's memory that a split leaves free: the allocator cannot fill every gap between its
blocks, collectives have buffers, and documents of other lengths may take more."""


class Split(NamedTuple):
    """How a process takes its rows of a step."""

    batch_size: int
    """Rows of a forward and backward pass."""
    accumulation: int
    """Passes of a step."""
    checkpointing: bool
    """Whether activations are recomputed in the backward pass."""


def split_for_memory(model: Any, config: TrainConfig, arguments: Any) -> Split | None:
    """Return the split of a step's rows that the GPU's memory allows, the same on every rank; None
    where the run keeps its own.

    The rows of the step, their order and their weights stay. The model moves to the GPU, and the
    first rank prints the split to stderr.

    Args:
        model: The run's model, with its attention and its loss.
        arguments: TrainingArguments: device, bf16, and the processes.
    """
    if free_bytes(arguments.device) is None or not _may_split(model, config):
        return None
    rows = config.batch_size * config.accumulation
    total = total_bytes(arguments.device)
    model.to(arguments.device)
    # Two passes tell the bytes of each further row: see `bytes_of_pass`.
    peaks = _measure_peaks(model, config, arguments, most=min(rows, 2))
    free = _free_bytes_of_run(model, arguments)
    batch_size = largest_divisor(rows, peaks, free - MARGIN * total)
    if arguments.world_size > 1:  # each rank has measured its own GPU
        least = torch.tensor(batch_size, device=arguments.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        batch_size = int(least)
    if arguments.process_index == 0:
        used = total - free + (bytes_of_pass(batch_size, peaks) if batch_size else 0)
        print(describe(batch_size, used, total), file=sys.stderr, flush=True)
    if batch_size == 0:
        return Split(1, rows, checkpointing=True)
    return Split(batch_size, rows // batch_size, checkpointing=False)


def _may_split(model: Any, config: TrainConfig) -> bool:
    """Whether the run asks for a split, each process has the whole model and whole rows, and the
    split changes results by rounding alone, which a deterministic run does not allow either."""
    is_sharded = config.fsdp or config.context_parallel > 1
    # A router's loss is a mean over the rows of a pass, so it depends on the split.
    has_loss_of_router = getattr(model.config, "output_router_logits", False)
    return config.fit_memory and not (is_sharded or has_loss_of_router or config.deterministic)


def total_bytes(device: torch.device) -> int:
    """Return the size of a GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def _measure_peaks(model: Any, config: TrainConfig, arguments: Any, most: int) -> list[int]:
    """Return the peak bytes of passes of 1 to `most` rows without recomputation, beside weights and
    gradients, which remain; the list ends before a pass that runs out of memory.

    The model is not compiled here; passes of a run with `fuse` take less.
    """
    model.train()
    peaks: list[int] = []
    try:
        # The first pass makes the gradients, and kernels are compiled in it.
        _run_pass(model, 1, config.context_length, arguments)
        for rows in range(1, most + 1):
            memory = PeakMemory(str(arguments.device))
            _run_pass(model, rows, config.context_length, arguments)
            peaks.append(memory.read())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return peaks


def _run_pass(model: Any, rows: int, length: int, arguments: Any) -> None:
    """Run a forward and backward pass on made-up rows, in the arithmetic of the run.

    Each row is a long document and a short one. Attention takes the most memory for a long one, and
    full attention also takes a mask where a row holds several.
    """
    tokens = torch.arange(length, device=arguments.device).repeat(rows, 1)
    ids = tokens % model.config.vocab_size
    positions = tokens % (length - length // 8)
    with torch.autocast(arguments.device.type, torch.bfloat16, enabled=arguments.bf16):
        loss = model(input_ids=ids, position_ids=positions, labels=ids)["loss"]
    loss.backward()


def _free_bytes_of_run(model: Any, arguments: Any) -> int:
    """Return the bytes that a run leaves for its passes, and drop the gradients.

    Beside weights and gradients, which exist now, a run keeps AdamW's two moments and, in several
    processes, buffers in which gradients are reduced: each as large as the trained weights.
    """
    gc.collect()  # the traceback of a pass that failed holds tensors
    torch.cuda.empty_cache()
    free = free_bytes(arguments.device)
    assert free is not None
    trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return free - trained * (2 if arguments.world_size == 1 else 3)


def bytes_of_pass(rows: int, peaks: Sequence[int]) -> float:
    """Return the peak bytes of a pass: each row after the second adds as many as the second did.

    Args:
        rows: The rows of the pass, at least 1.
        peaks: Those of one row and of two, as far as they fit; infinite where one is missing that
            the result needs.
    """
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


def describe(batch_size: int, used: float, total: float) -> str:
    """Return a line about a split; a `batch_size` of 0 is a row that does not fit.

    Args:
        used: Bytes of the GPU's memory at the peak.
        total: Bytes of the GPU's memory.
    """
    size = f"{total / 2**30:.0f} GiB"
    if batch_size == 0:
        return f"1 row at once, activations recomputed: {size} hold no row without recomputation"
    rows = "1 row" if batch_size == 1 else f"{batch_size} rows"
    return f"{rows} at once, no recomputation: about {used / 2**30:.0f} of {size}"
