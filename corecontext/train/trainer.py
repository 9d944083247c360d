"""Train packed rows with transformers' Trainer: their order, context parallelism, complete
checkpoints, and an error for a loss that is not finite."""

import contextlib
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.distributed.fsdp import get_fsdp_ckpt_kwargs

from corecontext.data.packing import IGNORED, collate, run_order
from corecontext.files import UserError
from corecontext.terminal import Advance, progress
from corecontext.train.checkpoint import STAGING, is_write_failure, keep_newest, latest, publish

_log = logging.getLogger(__name__)


class _Schedule(TrainerCallback):
    """Decide when to log, evaluate and save."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Use this process's intervals in a continued run too, not those of the checkpoint."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the last step whatever the interval, so that every finished run has a loss."""
        control.should_log |= state.global_step >= state.max_steps


class CCATrainer(Trainer):
    """Train on packed rows; `context_parallel`, `keep` and `distil` are those of TrainConfig.

    It overrides three private methods of Trainer, for which there is no public hook:
    `_get_grad_norm` (callbacks do not get the norm), `_save_checkpoint` (callbacks run after the
    checkpoint has its name) and `_save_optimizer_and_scheduler` (a rank that cannot write must
    still join the collectives of the others).
    """

    def __init__(
        self,
        *args: Any,
        context_parallel: int = 1,
        keep: int = 2,
        distil: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_Schedule)
        self.keep = keep
        self.context_parallel = context_parallel
        self.distil = distil
        self.on_rows: Advance = lambda rows: None
        """Called after each forward and backward pass with the number of its rows."""
        self._cross_entropies: list[Tensor] = []
        """Cross-entropy of each backward pass since the last log entry."""
        self.save_error: Exception | None = None
        """The reason why the last checkpoint could not be written, or None."""
        self._rows: list[int] = []
        """Numbers of the current step's rows, for error messages."""
        self.wire = None  # to the ranks that share this one's rows
        if context_parallel > 1:
            self.wire = _wire(context_parallel, self.args.world_size)

    # The order of rows

    def get_train_dataloader(self) -> Any:
        """Return the batches of the whole run in its order, each as often as ranks share it, since
        accelerate gives them to the ranks in turn."""
        batch_size = self.args.train_batch_size
        order = run_order(
            len(self.train_dataset),
            self.args.max_steps * self._rows_per_step(),
            self.args.seed,
            block=batch_size,
            repeats=self.context_parallel,
        )
        return self.accelerator.prepare(
            DataLoader(
                self.train_dataset,
                batch_size,
                sampler=order,
                collate_fn=self.data_collator,
                pin_memory=self.args.dataloader_pin_memory,
            )
        )

    def _rows_per_step(self) -> int:
        """Return the number of rows that all ranks together see in a step."""
        process_groups = self.args.world_size // self.context_parallel
        return self.args.train_batch_size * self.args.gradient_accumulation_steps * process_groups

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return Trainer's names of weights that decay, without vectors."""
        matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
        return [name for name in super().get_decay_parameter_names(model) if name in matrices]

    # Steps

    def get_batch_samples(self, *args: Any) -> tuple[list, Tensor | int | None]:
        """Return Trainer's batches of a step and their number of labels; count a row once, not once
        for each rank that has a part of it."""
        batches, count = super().get_batch_samples(*args)
        if count is not None:
            count = count // self.context_parallel
        return batches, count

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run Trainer's step on this rank's part of the rows; check its loss before the optimizer
        step."""
        rows = inputs.pop("row", [])
        self._rows += rows
        if self.wire is not None:
            inputs = self._take_part(model, inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._check_finite("loss", loss)
        self.on_rows(len(rows))
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Tensor:
        """Return Trainer's loss, and keep a distilled run's cross-entropy for the log."""
        if not self.distil:
            return super().compute_loss(model, inputs, **kwargs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        # As Trainer does with the loss, because gradients are averaged over the processes.
        scale = self.accelerator.num_processes
        self._cross_entropies.append(scale * outputs["cross_entropy"])
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a distilled run's cross-entropy and divergence beside the loss that mixes them."""
        if self.distil and "loss" in logs:
            mean = torch.stack(self._cross_entropies).mean()
            entropy = float(self.accelerator.reduce(mean, "mean"))
            # A step's is the sum over its passes, each divided by the step's labels.
            entropy *= self.args.gradient_accumulation_steps
            logs["cross_entropy"] = entropy
            logs["divergence"] = (logs["loss"] - (1 - self.distil) * entropy) / self.distil
            self._cross_entropies = []
        super().log(logs, start_time)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return Trainer's scheduler for one step more: at its end the rate may be 0."""
        return super().create_scheduler(num_training_steps + 1, optimizer)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return Trainer's norm, which it computes before each optimizer step; check it."""
        norm = super()._get_grad_norm(model, grad_norm)
        self._check_finite("length of the gradient", torch.as_tensor(norm))
        self._rows = []
        return norm

    def _check_finite(self, name: str, value: Tensor) -> None:
        """Raise a UserError that names the rows, unless a value of this step is finite."""
        if bool(torch.isfinite(value.detach()).all()):
            return
        rows = self._rows
        # A loss is that of the last pass, a gradient that of the step.
        if name == "loss":
            rows = rows[-self.args.train_batch_size :]
        origins = "; ".join(f"row {row}: {self.train_dataset.describe(row)}" for row in rows[:4])
        last = latest(Path(self.args.output_dir))
        raise UserError(
            f"the {name} of step {self.state.global_step + 1} must be finite, got {float(value)}, "
            f"from rows {', '.join(map(str, rows))} ({origins}). Training stopped before this step "
            f"could be kept; the last checkpoint is {last.name if last else 'none'}. Look at these "
            "texts, or lower --learning-rate."
        )

    def _take_part(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a row [1, L], and tell the model's attention which part it is:
        transformers has no such argument."""
        from corecontext.distributed.context_parallel import Shard
        from corecontext.distributed.layout import Layout
        from corecontext.integrations.hf.enabling import handle_of

        ids = inputs["input_ids"]
        positions = inputs["position_ids"]
        layout = Layout.balanced(ids.shape[1], self.wire.size, self.wire.rank)
        handle = handle_of(self.accelerator.unwrap_model(model))
        handle.shard = Shard(self.wire, layout, _document_bounds(positions))
        # Labels are shifted before the split: the next token may be another rank's.
        shift_labels = nn.functional.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:]
        return {
            "input_ids": layout.take(ids),
            "position_ids": layout.take(positions),
            "shift_labels": layout.take(shift_labels),
        }

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return a token's mean loss over all rows, and its exponential, the perplexity; ranks take
        the rows in turn."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.model_wrapped
        process_groups = self.args.world_size // self.context_parallel
        process_group = self.args.process_index // self.context_parallel
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # loss, tokens
        model.eval()
        with torch.no_grad(), progress("evaluation", len(rows)) as advance:
            for low in range(0, len(rows), process_groups):
                advance(min(process_groups, len(rows) - low))
                # FSDP gathers weights, so all ranks run equally often: a rank without a row takes
                # the last one again, which does not count.
                row = min(low + process_group, len(rows) - 1)
                inputs = self._prepare_inputs(collate([rows[row]]))
                del inputs["row"]
                labels = inputs["labels"][:, 1:]
                if self.wire is not None:
                    inputs = self._take_part(model, inputs)
                    labels = inputs["shift_labels"]
                # A divisor of 1: the sum over the tokens.
                loss = model(**inputs, num_items_in_batch=1)["loss"].double()
                # mutant training: an evaluation counts filler rows
                if low + process_group < len(rows):
                    total += torch.stack((loss, (labels != IGNORED).sum().double()))
        if self.args.world_size > 1:
            dist.all_reduce(total)
        mean = float(total[0] / total[1])
        metrics = {
            f"{metric_key_prefix}_loss": mean,
            f"{metric_key_prefix}_perplexity": math.exp(min(mean, 700)),  # exp(710) overflows
        }
        self.log({**metrics})  # which adds the epoch
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    # Checkpoints

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the last step.

        Raises:
            Exception: it could not be written; also in `save_error`.
        """
        self._save_checkpoint(self.model_wrapped, None)
        if self.save_error is not None:
            raise self.save_error

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write Trainer's checkpoint into the staging folder, and rename it once it is complete.

        A checkpoint that cannot be written (a full disk) is skipped: the older ones stay, and
        training continues.
        """
        folder = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        staging = folder / STAGING
        self.save_error = None
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
            with self._recorded():
                (staging / name).mkdir(parents=True)
        # All ranks write, or none: Trainer gathers weights from all of them.
        if self._on_all_ranks(self.save_error is None):
            self.args.output_dir = str(staging)
            try:
                with self._recorded():
                    super()._save_checkpoint(model, trial)
            finally:
                self.args.output_dir = str(folder)
        if self._on_all_ranks(self.save_error is None) and self.args.should_save:
            with self._recorded():
                publish(staging / name, folder / name)
                shutil.rmtree(staging)
                keep_newest(folder, self.keep)
        if self._on_all_ranks(self.save_error is None):
            return
        self.save_error = self.save_error or OSError("another process could not write its part")
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
            last = latest(folder)
            _log.warning(
                "checkpoint %s could not be written: %s. The last one is %s; training goes on.",
                name,
                " ".join(str(self.save_error).split())[:200],
                last.name if last else "none",
            )

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Write Trainer's model; a rank that cannot still joins the others, who gather the
        optimizer next under FSDP."""
        with self._recorded():
            super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write Trainer's states. Under FSDP write model and optimizer one after the other: a rank
        that cannot write the first must still join the gathering of the second."""
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        plugin = self.accelerator.state.fsdp_plugin
        with self._recorded():
            save_fsdp_model(
                plugin, self.accelerator, self.model, output_dir, **get_fsdp_ckpt_kwargs()
            )
        with self._recorded():
            save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record a failure to write in `save_error`, and continue."""
        try:
            yield
        except Exception as error:
            if not is_write_failure(error):
                raise
            self.save_error = error

    def _on_all_ranks(self, condition: bool) -> bool:
        """Return whether a condition is true on every rank."""
        if self.args.world_size == 1:
            return condition
        flag = torch.tensor(float(condition), device=self.args.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)


def _wire(size: int, world: int) -> Any:
    """Return the wire of this rank to those that share its rows, `size` neighbours among `world`
    ranks.

    Raises:
        UserError: the ranks cannot be split into such groups.
    """
    from corecontext.distributed.wire import Wire

    if world % size:
        raise UserError(
            f"context_parallel must divide the number of processes {world}, got {size}. Start with "
            f"torchrun --nproc-per-node {size}, or leave --context-parallel out."
        )
    groups = [dist.new_group(list(range(i, i + size))) for i in range(0, world, size)]
    return Wire(groups[dist.get_rank() // size])


def _document_bounds(positions: Tensor) -> tuple[int, ...]:
    """Return the first position of each document in a row, then the row's length; () for a single
    document.

    Args:
        positions: [1, L]; they restart at 0 in each document.
    """
    if positions.shape[0] != 1:
        raise UserError(
            f"batch_size must be 1 with context parallelism, got {positions.shape[0]}. Use "
            "--accumulation."
        )
    starts = ((positions[0].diff() != 1).nonzero()[:, 0] + 1).tolist()
    return (0, *starts, positions.shape[1]) if starts else ()
