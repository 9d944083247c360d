"""transformers' Trainer for packed rows: their order, context parallelism, checkpoints that are
whole or not there, and a stop, instead of poisoned weights, where a loss is no number."""

from __future__ import annotations

import contextlib
import json
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
from transformers import Trainer
from transformers.distributed.fsdp import get_fsdp_ckpt_kwargs

from corecontext.data.packing import IGNORED, PackedRows, RunOrder, collate
from corecontext.data.row_stream import StreamedRows
from corecontext.files import UserError
from corecontext.terminal import progress
from corecontext.train.checkpoint import (
    STAGING,
    STREAM,
    is_write_failure,
    keep_newest,
    latest,
    publish,
)

_log = logging.getLogger(__name__)


class CCATrainer(Trainer):
    """Trainer for packed rows."""

    def __init__(self, *args: Any, context_parallel: int = 1, keep: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keep, self.context_parallel, self.wire = keep, context_parallel, None
        self._rows: list[int] = []
        self._staging: Path | None = None
        self.save_error: Exception | None = None
        """Why the last checkpoint could not be written, or None."""
        if context_parallel > 1:
            self.wire = _wire(context_parallel, self.args.world_size)

    # The order of rows
    # -----------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> RunOrder:
        """Rows of the whole run; processes that share a row get it in turn, as accelerate deals
        batches out."""
        seed = None if isinstance(self.train_dataset, StreamedRows) else self.args.seed
        return RunOrder(
            len(self.train_dataset),
            self.args.max_steps * self._rows_per_step(),
            seed,
            block=self._train_batch_size,
            repeats=self.context_parallel,
        )

    def _rows_per_step(self) -> int:
        """Rows that all processes together see in one step."""
        groups = self.args.world_size // self.context_parallel
        return self._train_batch_size * self.args.gradient_accumulation_steps * groups

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """Trainer's; a continued run logs, evaluates and saves as often as it is told now, not as
        it was at first."""
        found = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)
        return found

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's; the last step is always logged, so that a finished run has a loss."""
        self.control.should_log |= self.state.global_step >= self.state.max_steps
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's without vectors, which some learned parameters of core tokens are."""
        matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
        return [name for name in super().get_decay_parameter_names(model) if name in matrices]

    # Context parallelism
    # ---------------------------------------------------------------------------------------------

    def _get_num_items_in_batch(
        self, batch_samples: list, device: torch.device
    ) -> Tensor | int | None:
        """Each row counts once, not once for each process that holds a part."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        return count if count is None else count // self.context_parallel

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """This process's part of the rows."""
        self._rows += inputs.pop("row", [])
        return contextlib.nullcontext, inputs if self.wire is None else self._part(model, inputs)

    def _part(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """This process's part of the rows, the model told of it."""
        from corecontext.distributed.context_parallel import Shard
        from corecontext.distributed.layout import Layout
        from corecontext.integrations.transformers import handle_of

        ids, positions = inputs["input_ids"], inputs["position_ids"]
        layout = Layout.balanced(ids.shape[1], self.wire.size, self.wire.rank)
        handle = handle_of(self.accelerator.unwrap_model(model))
        handle.shard = Shard(self.wire, layout, _documents(positions))
        wanted = nn.functional.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:]
        return {
            "input_ids": layout.take(ids),
            "position_ids": layout.take(positions),
            "shift_labels": layout.take(wanted),
        }

    # Evaluation
    # -------------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss of a token over all rows, and its exponential; rows are dealt out over the
        processes."""
        rows, model = (
            self.eval_dataset if eval_dataset is None else eval_dataset,
            self.model_wrapped,
        )
        groups, mine = (
            self.args.world_size // self.context_parallel,
            self.args.process_index // self.context_parallel,
        )
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        model.eval()
        with torch.no_grad(), progress("evaluation", len(rows)) as advance:
            for low in range(0, len(rows), groups):  # every process runs as often as any other
                advance(min(groups, len(rows) - low))
                inputs = self._prepare_inputs(collate([rows[min(low + mine, len(rows) - 1)]]))
                del inputs["row"]
                if self.wire is not None:
                    inputs = self._part(model, inputs)
                wanted = (
                    inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
                )
                loss = model(**inputs, num_items_in_batch=1)["loss"].double()
                if low + mine < len(rows):
                    total += torch.stack((loss, (wanted != IGNORED).sum().double()))
        if self.args.world_size > 1:
            dist.all_reduce(total)
        mean = float(total[0] / total[1])
        metrics = {
            f"{metric_key_prefix}_loss": mean,
            f"{metric_key_prefix}_perplexity": math.exp(min(mean, 700)),
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    # Losses that are no numbers
    # ---------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Trainer's, with a look at the loss before it can reach the weights."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._check_finite("loss", loss)
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Trainer's; DeepSpeed's backward is followed by its optimiser at once, so the look comes
        before."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.is_deepspeed_enabled:
            self._check_finite("loss", loss)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Trainer's, called before each optimiser step."""
        norm = super()._get_grad_norm(model, grad_norm)
        self._check_finite("length of the gradient", torch.as_tensor(norm))
        self._rows = []
        return norm

    def _check_finite(self, what: str, value: Tensor) -> None:
        if bool(torch.isfinite(value.detach()).all()):
            return
        rows = self._rows if what != "loss" else self._rows[-self._train_batch_size :]
        told = "; ".join(
            f"row {row}: {self.train_dataset.describe(row)}"
            for row in rows[:4]
            if isinstance(self.train_dataset, (PackedRows, StreamedRows))
        )
        last = latest(Path(self.args.output_dir))
        raise UserError(
            f"the {what} of step {self.state.global_step + 1} must be finite, got {float(value)}, from "
            f"rows {', '.join(map(str, rows))} ({told}). Training stopped before this step could be kept; "
            f"the last checkpoint is {last.name if last else 'none'}. Look at these texts, or lower "
            "--learning-rate."
        )

    # Checkpoints
    # ------------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's, into a folder aside that gets its name once it is complete. What cannot be
        written (a full disk) is left to the next time: the older checkpoints stay, and training
        goes on."""
        folder, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        staging, self.save_error = folder / STAGING, None
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
            with self._noted():
                (staging / name).mkdir(parents=True)
        if self._everywhere(self.save_error is None):
            self._staging = staging
            try:
                with self._noted():
                    super()._save_checkpoint(model, trial)
                    if self.args.should_save and isinstance(self.train_dataset, StreamedRows):
                        rows = self.state.global_step * self._rows_per_step()
                        (staging / name / STREAM).write_text(
                            json.dumps(self.train_dataset.state_dict(rows)), encoding="utf-8"
                        )
            finally:
                self._staging = None
        if self._everywhere(self.save_error is None) and self.args.should_save:
            with self._noted():
                publish(staging / name, folder / name)
                shutil.rmtree(staging)
                keep_newest(folder, self.keep)
        if not self._everywhere(self.save_error is None):
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

    def _save(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's; under FSDP all gather the optimizer next, also the one process that could not
        write the model."""
        with self._noted():
            super()._save(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Trainer's; under FSDP in parts, because all gather the second where one could not write
        the first."""
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        plugin = self.accelerator.state.fsdp_plugin
        with self._noted():
            save_fsdp_model(
                plugin, self.accelerator, self.model, output_dir, **get_fsdp_ckpt_kwargs()
            )
        with self._noted():
            save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep what could not be written in `save_error`, and go on."""
        try:
            yield
        except Exception as error:
            if not is_write_failure(error):
                raise
            self.save_error = error

    def _everywhere(self, here: bool) -> bool:
        """Whether something is true on every process."""
        if self.args.world_size == 1:
            return here
        flag = torch.tensor(float(here), device=self.args.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)


def _wire(size: int, world: int) -> Any:
    """This process's end of the group of neighbours that share rows.

    Raises:
        UserError: the processes cannot be dealt into such groups.
    """
    from corecontext.distributed.wire import Wire

    if world % size:
        raise UserError(
            f"context_parallel must divide the number of processes {world}, got {size}. Start with "
            f"torchrun --nproc-per-node {size}, or leave --context-parallel out."
        )
    groups = [dist.new_group(list(range(i, i + size))) for i in range(0, world, size)]
    return Wire(groups[dist.get_rank() // size])


def _documents(positions: Tensor) -> tuple[int, ...]:
    """Boundaries of the documents in a row, where positions [1, L] begin anew; () for one
    document."""
    if positions.shape[0] != 1:
        raise UserError(
            f"batch_size must be 1 with context parallelism, got {positions.shape[0]}. Use --accumulation."
        )
    starts = ((positions[0].diff() != 1).nonzero()[:, 0] + 1).tolist()
    return (0, *starts, positions.shape[1]) if starts else ()
