"""How many tokens a second does a full fine-tuning step take, and how much memory, with CCA and
with full attention?

Forward, backward and AdamW on one sequence of random tokens: bfloat16 arithmetic on float32
weights, activations forgotten and computed again, the loss in chunks. With --context-parallel,
under torchrun, one sequence lies on all processes, so many tokens on each, and FSDP2 spreads the
weights: weak scaling (docs/training.md).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import sdpa_kernel

from benchmarks.check import short
from benchmarks.methods import KERNELS
from benchmarks.model_methods import RAW, raw_config
from benchmarks.shapes import ROTARY, SHAPES
from corecontext.config import CCAConfig
from corecontext.cost import ModelCost
from corecontext.files import UserError
from corecontext.heads.budget import Shape
from corecontext.loading import is_out_of_memory
from corecontext.measure import PeakMemory, queue_seconds
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress

LENGTHS = {"cuda": (8192, 32_768, 131_072, 262_144, 524_288), "cpu": (1024, 4096)}
DEFAULT = "cca_default"
"""What `corecontext train` does where no recipe is named: heads that keep every token, and a
teacher."""
OURS = ("cca", RAW, DEFAULT)
LOSS_CHUNK = 2048
TEACHES = 0.5  # of the loss; what it is makes no difference to time
SETTLE_S = 1.0  # after the first step, which compiles: a GPU's first steps of a length are slower than all later ones
CHECK_LENGTH, CHECK_TOLERANCE = 512, {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class TrainingBench:
    """What is measured."""

    device: str
    lengths: Sequence[int]
    """Tokens of the sequence; with context parallelism, of each process's part."""
    shape: str = "llama-1b"
    methods: Sequence[str] = ()
    """cca, cca_raw, cca_default, and full attention by kernel: full, sdpa_flash, sdpa_cudnn; () for
    those that suit the device."""
    group_size: int = 16
    window_size: int = 1024
    repeats: int = 5
    limit_s: float = 60.0
    """A method is left out at lengths where its step would take longer, going by the last."""
    context_parallel: bool = False
    fuse: bool = False
    """Norms, MLPs and the rotation of queries and keys compiled, for every method."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UserError(f"shape must be one of {', '.join(SHAPES)}, got {self.shape!r}.")
        known = (*OURS, "full", *KERNELS)
        for method in self.methods:
            if method not in known:
                raise UserError(f"method must be {', '.join(known)}, got {method!r}.")
        if self.context_parallel and set(self.methods) - {"cca"}:
            raise UserError("method must be cca with --context-parallel. Leave --method out.")
        for name, value in (("length", min(self.lengths)), ("repeats", self.repeats)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}.")
        if not self.limit_s > 0:
            raise UserError(f"limit_s must be above 0, got {self.limit_s}.")
        CCAConfig(self.group_size, self.window_size)

    @property
    def cuda(self) -> bool:
        """Whether this runs on a GPU."""
        return torch.device(self.device).type == "cuda"

    @property
    def dtype(self) -> str:
        """Of the arithmetic."""
        return "bfloat16" if self.cuda else "float32"

    def wanted(self) -> Sequence[str]:
        """The methods, CCA first: the others may run out of time."""
        return self.methods or (
            ("cca",) if self.context_parallel else ("cca", *(KERNELS if self.cuda else ("full",)))
        )


def run_training_bench(
    bench: TrainingBench, on_records: Callable[[list[Record]], None] | None = None
) -> list[Record]:
    """Check, then measure; returns the records of this process, none but on the first of several.

    Args:
        on_records: Given the new records after each step that was measured.

    Raises:
        UserError: --context-parallel without several processes.
    """
    from corecontext.inference.fuse import Fused

    with _processes(bench) as (bench, rank, world):
        trial = _Trial(bench, rank, world)
        records: list[Record] = []
        last: dict[str, tuple[int, float]] = {}
        steps = len(bench.lengths) * len(bench.wanted())
        shown = (
            progress("python -m benchmarks train", steps)
            if rank == 0
            else contextlib.nullcontext(lambda amount: None)
        )
        with Fused(trial.model, "compile" if bench.fuse else None), shown as ahead:
            trial.check()
            for length in sorted(bench.lengths):
                for method in bench.wanted():
                    new = trial.measure(method, length, last)
                    if rank == 0:
                        records += new
                        if on_records is not None:
                            on_records(new)
                    ahead(1)
        return records


class _Trial:
    """The model on this process, its optimiser, and steps of every length."""

    def __init__(self, bench: TrainingBench, rank: int, world: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from corecontext.integrations.transformers import enable
        from corecontext.train.loss import compute_loss_in_chunks

        self.bench, self.rank, self.world = bench, rank, world
        kind, sizes = SHAPES[bench.shape]
        longest = max(*bench.lengths, CHECK_LENGTH) * world
        hf_config = AutoConfig.for_model(
            kind,
            **sizes,
            max_position_embeddings=longest,
            rope_parameters=ROTARY,
            use_cache=False,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        self.cost = ModelCost.of(hf_config)
        torch.manual_seed(0)
        with torch.device(bench.device):
            self.model: Any = AutoModelForCausalLM.from_config(
                hf_config, dtype=torch.float32, attn_implementation="sdpa"
            ).train()
        self.hf_config, self.teacher = hf_config, None
        compute_loss_in_chunks(self.model, LOSS_CHUNK, self._taught)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.config = CCAConfig(bench.group_size, bench.window_size)
        self.handle: Any = None
        self.wire: Any = None
        if bench.context_parallel:
            from corecontext.distributed.wire import Wire

            self.wire = Wire(dist.distributed_c10d._get_default_group())
            self.handle = enable(self.model, self.config)
            self._shard_weights()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=bench.cuda)

    def _shard_weights(self) -> None:
        """FSDP2 over all processes."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.bench.device.split(":")[0], (self.world,))
        dtype = getattr(torch, self.bench.dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def _taught(self, input_ids: torch.Tensor, **rest: Any) -> Any:
        """The teacher's view, in the steps that have one."""
        if self.teacher is None:
            return None
        return self.teacher(
            input_ids, torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        )

    @contextlib.contextmanager
    def _attention(self, method: str, config: CCAConfig) -> Iterator[None]:
        """The context in which the model attends, and learns, by a method; `config` is CCA's."""
        from corecontext.integrations.transformers import enabled

        self.teacher = self._make_teacher() if method == DEFAULT else None
        with (
            contextlib.nullcontext()
            if self.handle is not None
            else enabled(self.model, config)
            if method in OURS
            else sdpa_kernel(KERNELS[method])
            if method in KERNELS
            else contextlib.nullcontext()
        ):
            try:
                yield
            finally:
                self.teacher = None

    def _make_teacher(self) -> Any:
        """Random weights of the student's shape; no other method shares the device with them."""
        from transformers import AutoModelForCausalLM

        from corecontext.train.teacher import Teacher

        with torch.device(self.bench.device):
            return Teacher(
                AutoModelForCausalLM.from_config(
                    copy.deepcopy(self.hf_config),
                    dtype=getattr(torch, self.bench.dtype),
                    attn_implementation="sdpa",
                ),
                TEACHES,
                "compile" if self.bench.fuse else None,
            )

    def _config(self, method: str, length: int) -> CCAConfig:
        """CCA's settings: with heads that keep every token, the cache is as large as with equal
        groups.

        Raises:
            ValueError: they do not fit.
        """
        shape = Shape(self.cost.num_layers, self.cost.kv_heads)
        return (
            self.config
            if method not in (RAW, DEFAULT)
            else raw_config(shape, self.config, length)[0]
        )

    def _step_flops(self, method: str, length: int, config: CCAConfig) -> float:
        """Operations of a step; a teacher adds a pass of full attention, and the head for each
        token."""
        if method not in OURS:
            return self.cost.step_flops(length)
        sizes = [
            size
            for one in config.layer_group_sizes or (config.group_size,)
            for size in (one if isinstance(one, tuple) else (one,) * self.cost.kv_heads)
        ]
        own = statistics.mean(
            self.cost.step_flops(length, size, config.window_size) for size in sizes
        )
        teacher = self.cost.prefill_flops(length) + 2 * (length - 1) * self.cost.head_weights
        return own + teacher * (method == DEFAULT)

    def _loss(self, length: int, whole: bool = False) -> torch.Tensor:
        """This process's share of the mean loss on random tokens, which are the same everywhere;
        length of all."""
        bench = self.bench
        ids = torch.randint(
            0,
            self.model.config.vocab_size,
            (1, length),
            device=bench.device,
            generator=torch.Generator(bench.device).manual_seed(1),
        )
        inputs = {
            "input_ids": ids,
            "shift_labels": torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:],
        }
        if self.handle is not None:
            from corecontext.distributed.context_parallel import Shard
            from corecontext.distributed.layout import Layout

            layout = Layout.balanced(length, self.world, self.rank)
            self.handle.shard = None if whole else Shard(self.wire, layout)
            inputs["position_ids"] = torch.arange(length, device=bench.device)[None]
            if not whole:
                inputs = {name: layout.take(x) for name, x in inputs.items()}
        with torch.autocast(torch.device(bench.device).type, torch.bfloat16, enabled=bench.cuda):
            return self.model(**inputs, num_items_in_batch=length - 1).loss

    def step(self, length: int) -> None:
        """One whole step; FSDP2 takes the mean of the processes' gradients, which are parts of one
        sum."""
        (self._loss(length) * (1 if self.wire is None else self.world)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self) -> None:
        """Raise unless CCA whose window holds everything has full attention's loss, and parts have
        the whole's."""
        with torch.no_grad():
            if self.handle is not None:
                share, expected = (self._loss(CHECK_LENGTH, whole=whole) for whole in (False, True))
                dist.all_reduce(share)
            else:
                wide = CCAConfig(self.config.group_size, CHECK_LENGTH)
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

    def measure(self, method: str, length: int, last: dict[str, tuple[int, float]]) -> list[Record]:
        """Records of one method at one length."""
        bench, total = self.bench, length * self.world
        params: dict[str, Any] = {
            "method": method,
            "backend": self._backend(method),
            "shape": bench.shape,
            "strategy": "full",
            "length": total,
            "tokens_per_gpu": length,
            "gpus": self.world,
            "batch": 1,
            "dtype": bench.dtype,
            "checkpointing": True,
            "fsdp": self.wire is not None,
            "fuse": bench.fuse,
        }
        device = device_name(bench.device)
        if method in OURS:
            params |= {"group_size": bench.group_size, "window_size": bench.window_size}
        try:
            config = self._config(method, total)
        except ValueError as error:
            return [
                make_record(
                    "training.skipped", 1, {**params, "reason": short(error)}, device=device
                )
            ]
        if config is not self.config:
            params |= {"raw_window_size": config.window_size}
        params["step_flops"] = self._step_flops(method, total, config)
        known = last.get(method)
        if known is not None and known[1] * params["step_flops"] / known[0] > bench.limit_s:
            return [make_record("training.skipped", 1, {**params, "reason": "time"}, device=device)]
        received = self.wire.received_bytes if self.wire else 0
        try:
            with self._attention(method, config):
                self.step(total)
                gc.collect()
                if self.wire:
                    received = self.wire.received_bytes - received
                settled = 0.0
                while bench.cuda and settled < SETTLE_S:
                    settled += self._seconds(total)
                memory = self._memory()
                seconds = [self._seconds(total) for _ in range(bench.repeats)]
                peak = self._slowest(memory())
        except Exception as error:
            if not is_out_of_memory(error) or self.world > 1:  # the others would wait for ever
                raise
            self.optimizer.zero_grad()
            last[method] = (1, float("inf"))
            return [
                make_record("training.skipped", 1, {**params, "reason": "memory"}, device=device)
            ]
        finally:
            gc.collect()
            if bench.cuda:
                torch.cuda.empty_cache()
        last[method] = (params["step_flops"], min(seconds))
        found = [
            make_record(
                "training.tokens_per_s", [total / one for one in seconds], params, device=device
            ),
            make_record("training.peak_bytes", peak, params, device=device),
        ]
        if self.wire:
            found.append(
                make_record(
                    "training.received_bytes",
                    received,
                    {**params, **self._ring(total)},
                    device=device,
                )
            )
        return found

    def _seconds(self, total: int) -> float:
        """Of a step, on the slowest process."""
        return self._slowest(queue_seconds(lambda: self.step(total), 1, self.bench.device))

    def _memory(self) -> Callable[[], float]:
        """Peak memory of a process: on a GPU all of it, weights and optimiser too; on a CPU the
        growth from now on."""
        memory = PeakMemory(self.bench.device)
        if not self.bench.cuda:
            return memory.read
        return lambda: torch.cuda.max_memory_allocated(self.bench.device)

    def _backend(self, method: str) -> str:
        """What computes the attention."""
        if method not in OURS:
            return {"full": "sdpa"}.get(method, method.removeprefix("sdpa_"))
        from corecontext.ops.api import choose_backend

        dim = self.cost.head_dim
        return choose_backend(
            "auto",
            torch.empty(
                1, 1, 1, dim, dtype=getattr(torch, self.bench.dtype), device=self.bench.device
            ),
        )

    def _ring(self, total: int) -> dict[str, Any]:
        """What the layers of ring attention would receive in such a step: keys and values forward,
        twice with checkpointing, and backward."""
        from corecontext.distributed.traffic import ring_traffic

        ring = ring_traffic(
            total,
            self.world,
            batch_size=1,
            num_kv_heads=self.cost.kv_heads,
            head_dim=self.cost.head_dim,
            item_bytes=2 if self.bench.cuda else 4,
        )
        return {
            "layers": self.cost.num_layers,
            "ring_bytes": self.cost.num_layers * (2 * ring.forward_bytes + ring.backward_bytes),
        }

    def _slowest(self, value: float) -> float:
        """The largest of all processes' values."""
        if self.world == 1:
            return value
        every = torch.tensor(float(value), device=self.bench.device, dtype=torch.float64)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        return float(every)


@contextlib.contextmanager
def _processes(bench: TrainingBench) -> Any:
    """The bench on this process's device, this process's number, and how many there are."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if not bench.context_parallel:
        if world > 1:
            raise UserError("several processes must share a sequence here: use --context-parallel.")
        yield bench, 0, 1
        return
    if "RANK" not in os.environ:
        raise UserError(
            "context-parallel must run in several processes. Use torchrun --nproc-per-node N -m "
            "python -m benchmarks train --context-parallel."
        )
    if bench.cuda:
        from dataclasses import replace

        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        bench = replace(bench, device=f"cuda:{local}")
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("nccl" if bench.cuda else "gloo")
    try:
        yield bench, dist.get_rank(), world
    finally:
        if mine:
            dist.destroy_process_group()
