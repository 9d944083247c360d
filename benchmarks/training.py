"""Measure the tokens per second and the memory of a full fine-tuning step, CCA and full attention.

Forward, backward and AdamW on one sequence of random tokens: bfloat16 arithmetic on float32
weights, activation checkpointing, the loss in chunks. With --context-parallel, under torchrun, one
sequence is split over all processes, so many tokens on each, and FSDP2 shards the weights: weak
scaling (docs/training.md).
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.attention import sdpa_kernel

from benchmarks.methods import KERNELS
from benchmarks.operator_settings import backend_of_cca
from benchmarks.shapes import shape_config
from benchmarks.timing import queue_seconds
from benchmarks.training_processes import processes
from benchmarks.training_settings import OURS, TrainingBench
from corecontext.config import CCAConfig
from corecontext.cost import ModelCost
from corecontext.files import is_out_of_memory
from corecontext.measure import PeakMemory
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress

LOSS_CHUNK = 2048
# After the first step, which compiles: a GPU's first steps of a length are slower than later ones.
SETTLE_S = 1.0
CHECK_LENGTH = 512
CHECK_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def run_training_bench(
    bench: TrainingBench, on_records: Callable[[list[Record]], None] | None = None
) -> list[Record]:
    """Check, then measure; returns the records, none but on the first of several processes.

    Args:
        on_records: Given the new records after each step that was measured.

    Raises:
        UserError: --context-parallel without several processes.
    """
    from corecontext.inference.fuse import Fused

    with processes(bench) as (bench, rank, world):
        trial = _Trial(bench, rank, world)
        records: list[Record] = []
        shown: Any = contextlib.nullcontext(lambda amount: None)
        if rank == 0:
            steps = len(bench.lengths) * len(bench.timed_methods)
            shown = progress("python -m benchmarks train", steps)
        with Fused(trial.model, "compile" if bench.fuse else None), shown as advance:
            trial.check()
            for length in sorted(bench.lengths):
                for method in bench.timed_methods:
                    new = trial.measure(method, length)
                    if rank == 0:
                        records += new
                        if on_records is not None:
                            on_records(new)
                    advance(1)
        return records


class _Sample(NamedTuple):
    """The measurements of one method at one length."""

    seconds: list[float]
    peak_bytes: float
    received_bytes: int


class _Trial:
    """The model on this process, its optimizer, and steps of every length."""

    def __init__(self, bench: TrainingBench, rank: int, world: int) -> None:
        from transformers import AutoModelForCausalLM

        from corecontext.integrations.hf.enabling import enable
        from corecontext.train.loss import compute_loss_in_chunks

        self.bench = bench
        self.rank = rank
        self.world = world
        self.device = device_name(bench.device)
        self.last: dict[str, tuple[float, float]] = {}  # operations and seconds by method
        longest = max(*bench.lengths, CHECK_LENGTH) * world
        self.hf_config = shape_config(bench.shape, max_position_embeddings=longest, use_cache=False)
        self.cost = ModelCost.of(self.hf_config)
        torch.manual_seed(0)
        with torch.device(bench.device):
            self.model: Any = AutoModelForCausalLM.from_config(
                self.hf_config, dtype=torch.float32, attn_implementation="sdpa"
            ).train()
        compute_loss_in_chunks(self.model, LOSS_CHUNK)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.config = CCAConfig.paper(bench.group_size, bench.window_size)
        self.handle: Any = None
        self.wire: Any = None
        if bench.context_parallel:
            from corecontext.distributed.wire import Wire

            self.wire = Wire(dist.distributed_c10d._get_default_group())
            self.handle = enable(self.model, self.config)
            self._shard_weights()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=bench.cuda)

    def _shard_weights(self) -> None:
        """Shard the weights over all processes with FSDP2."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.bench.device.split(":")[0], (self.world,))
        dtype = getattr(torch, self.bench.dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    @contextlib.contextmanager
    def _attention(self, method: str, config: CCAConfig) -> Iterator[None]:
        """Let the model attend by a method; `config` is CCA's."""
        from corecontext.integrations.hf.enabling import enabled

        context: Any = contextlib.nullcontext()
        if self.handle is None and method in OURS:
            context = enabled(self.model, config)
        elif self.handle is None and method in KERNELS:
            context = sdpa_kernel(KERNELS[method])
        with context:
            yield

    def _step_flops(self, method: str, length: int) -> float:
        """Return the operations of a step."""
        if method not in OURS:
            return self.cost.step_flops(length)
        return self.cost.step_flops(length, self.config.group_size, self.config.window_size)

    def _loss(self, length: int, whole: bool = False) -> torch.Tensor:
        """Return this process's share of the mean loss on the same random tokens everywhere.

        Args:
            length: Tokens of all processes.
            whole: Compute all of it on this process.
        """
        bench = self.bench
        generator = torch.Generator(bench.device).manual_seed(1)
        vocabulary = self.model.config.vocab_size
        ids = torch.randint(0, vocabulary, (1, length), device=bench.device, generator=generator)
        labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
        inputs = {"input_ids": ids, "shift_labels": labels}
        if self.handle is not None:
            from corecontext.distributed.context_parallel import Shard
            from corecontext.distributed.layout import Layout

            layout = Layout.balanced(length, self.world, self.rank)
            inputs["position_ids"] = torch.arange(length, device=bench.device)[None]
            self.handle.shard = None
            if not whole:
                self.handle.shard = Shard(self.wire, layout)
                inputs = {name: layout.take(x) for name, x in inputs.items()}
        with torch.autocast(torch.device(bench.device).type, torch.bfloat16, enabled=bench.cuda):
            return self.model(**inputs, num_items_in_batch=length - 1).loss

    def step(self, length: int) -> None:
        """Run one whole step; FSDP2 averages the gradients, which are parts of one sum."""
        scale = 1 if self.wire is None else self.world
        (self._loss(length) * scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def check(self) -> None:
        """Raise AssertionError unless CCA with a window over all tokens has full attention's loss,
        and the processes' shares have the whole's."""
        if self.handle is not None:
            share = self._loss(CHECK_LENGTH)
            expected = self._loss(CHECK_LENGTH, whole=True)
            dist.all_reduce(share)
        else:
            wide = CCAConfig.paper(self.config.group_size, CHECK_LENGTH)
            with self._attention("full", wide):
                expected = self._loss(CHECK_LENGTH)
            with self._attention("cca", wide):
                share = self._loss(CHECK_LENGTH)
        error = abs(float(share - expected) / float(expected))
        if not error <= CHECK_TOLERANCE[self.bench.dtype]:
            raise AssertionError(
                f"a step's loss is wrong, nothing was timed: got {float(share):.5f}, expected "
                f"{float(expected):.5f}"
            )

    def measure(self, method: str, length: int) -> list[Record]:
        """Return the records of one method at one length of each process."""
        total = length * self.world
        params = self._params(method, length)
        flops = self._step_flops(method, total)
        params["step_flops"] = flops
        last_flops, last_seconds = self.last.get(method, (flops, 0.0))
        if last_seconds * flops / last_flops > self.bench.limit_s:
            return [self._record("skipped", 1, {**params, "reason": "time"})]
        sample = self._sample(method, total)
        if sample is None:
            self.last[method] = (1.0, float("inf"))
            return [self._record("skipped", 1, {**params, "reason": "memory"})]
        self.last[method] = (flops, min(sample.seconds))
        rates = [total / seconds for seconds in sample.seconds]
        records = [
            self._record("tokens_per_s", rates, params),
            self._record("peak_bytes", sample.peak_bytes, params),
        ]
        if self.wire:
            with_ring = {**params, **self._ring(total)}
            records.append(self._record("received_bytes", sample.received_bytes, with_ring))
        return records

    def _params(self, method: str, length: int) -> dict[str, Any]:
        bench = self.bench
        params: dict[str, Any] = {
            "method": method,
            "backend": self._backend(method),
            "shape": bench.shape,
            "strategy": "full",
            "length": length * self.world,
            "tokens_per_gpu": length,
            "gpus": self.world,
            "batch": 1,
            "dtype": bench.dtype,
            "checkpointing": True,
            "fsdp": self.wire is not None,
            "fuse": bench.fuse,
        }
        if method in OURS:
            params |= {"group_size": bench.group_size, "window_size": bench.window_size}
        return params

    def _record(self, name: str, value: float | list[float], params: dict[str, Any]) -> Record:
        return make_record(f"training.{name}", value, params, device=self.device)

    def _sample(self, method: str, total: int) -> _Sample | None:
        """Time steps; None where memory does not suffice.

        Raises:
            OutOfMemoryError: of several processes, the others of which would wait forever.
        """
        bench = self.bench
        received = self.wire.received_bytes if self.wire else 0
        try:
            with self._attention(method, self.config):
                self.step(total)
                gc.collect()
                if self.wire:
                    received = self.wire.received_bytes - received
                settled = 0.0
                while bench.cuda and settled < SETTLE_S:
                    settled += self._seconds(total)
                peak = self._peak_memory()
                seconds = [self._seconds(total) for _ in range(bench.repeats)]
                return _Sample(seconds, self._slowest(peak()), received)
        except Exception as error:
            if not is_out_of_memory(error) or self.world > 1:
                raise
            self.optimizer.zero_grad()
            return None
        finally:
            gc.collect()
            if bench.cuda:
                torch.cuda.empty_cache()

    def _seconds(self, total: int) -> float:
        """Return the seconds of a step on the slowest process."""
        return self._slowest(queue_seconds(lambda: self.step(total), 1, self.bench.device))

    def _peak_memory(self) -> Callable[[], float]:
        """Return a function that reads the peak from now on: on a GPU with weights and optimizer,
        on a CPU the growth."""
        memory = PeakMemory(self.bench.device)
        if not self.bench.cuda:
            return memory.read
        return lambda: torch.cuda.max_memory_allocated(self.bench.device)

    def _backend(self, method: str) -> str:
        """Name the kernel of the attention."""
        if method in OURS:
            return backend_of_cca(self.cost.head_dim, self.bench.dtype, self.bench.device)
        return "sdpa" if method == "full" else method.removeprefix("sdpa_")

    def _ring(self, total: int) -> dict[str, Any]:
        """Return the bytes that ring attention's layers would receive in such a step.

        Keys and values, forward twice because of checkpointing, and backward.
        """
        from benchmarks.traffic import ring_traffic

        ring = ring_traffic(
            total,
            self.world,
            batch_size=1,
            num_kv_heads=self.cost.kv_heads,
            head_dim=self.cost.head_dim,
            item_bytes=2 if self.bench.cuda else 4,
        )
        layers = self.cost.num_layers
        ring_bytes = layers * (2 * ring.forward_bytes + ring.backward_bytes)
        return {"layers": layers, "ring_bytes": ring_bytes}

    def _slowest(self, value: float) -> float:
        """Return the largest of all processes' values."""
        if self.world == 1:
            return value
        largest = torch.tensor(float(value), device=self.bench.device, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)
