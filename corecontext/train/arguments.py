"""A run as transformers' TrainingArguments, and what DeepSpeed is given."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from corecontext.data.readers import read_json
from corecontext.files import UserError
from corecontext.loading import one_line
from corecontext.train.train_config import TrainConfig


def arguments_of(config: TrainConfig) -> Any:
    """The run as transformers' TrainingArguments."""
    from transformers import TrainingArguments
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    gpu = torch.cuda.is_available()
    # Gradients are summed split, and so after each pass: no process ever keeps all of them.
    fsdp: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "activation_checkpointing": config.checkpointing},
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    }
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if config.fsdp and (world == 1 or not gpu):
        raise UserError(
            f"fsdp needs several processes with a GPU each, got {world} on "
            f"{'a GPU' if gpu else 'a CPU'}. Start with torchrun --nproc-per-node, or leave --fsdp out."
        )
    deepspeed = None if config.deepspeed is None else _deepspeed(config.deepspeed)
    with one_line():
        made = TrainingArguments(
            output_dir=config.output,
            max_steps=config.steps,
            per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=config.accumulation,
            learning_rate=config.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={
                "min_lr_rate": config.min_learning_rate / (config.learning_rate or 1.0)
            },
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay,
            adam_beta2=config.beta2,
            max_grad_norm=config.max_grad_norm,
            bf16=config.precision == "bfloat16" or (config.precision == "auto" and gpu),
            use_cpu=not gpu,
            gradient_checkpointing=config.checkpointing and not config.fsdp,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            **(fsdp if config.fsdp else {}),
            eval_strategy="steps" if config.eval_every and config.eval_data else "no",
            eval_steps=config.eval_every or None,
            save_strategy="steps",
            save_steps=config.save_every,
            logging_steps=config.log_every,
            logging_nan_inf_filter=False,
            report_to=list(config.report_to),
            seed=config.seed,
            data_seed=config.seed,
            remove_unused_columns=False,
            prediction_loss_only=True,
            deepspeed=deepspeed,
            dataloader_pin_memory=gpu,
            ddp_find_unused_parameters=False,
        )
        if (
            config.fsdp and made.bf16
        ):  # accelerate's own would also sum gradients in it, and round the loss
            from torch.distributed.fsdp import MixedPrecisionPolicy

            made.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(
                torch.bfloat16, torch.float32
            )
        if (
            made.device.type == "cpu"
        ):  # several processes have "cpu:0", to which torch loads no checkpoint
            made.__dict__["_setup_devices"] = torch.device("cpu")
        return made


def _deepspeed(name: str) -> dict[str, Any]:
    """DeepSpeed's settings from a file.

    Raises:
        UserError: it holds none, or some that this training cannot have; or the package is missing.
    """
    settings = read_json(name)
    if not isinstance(settings, dict):
        raise UserError(
            f"deepspeed '{name}' must hold DeepSpeed's settings, a JSON object, got a "
            f"{type(settings).__name__}."
        )
    zero = settings.get("zero_optimization") or {}
    if zero.get("stage", 0) not in (0, 1, 2):
        raise UserError(
            f"deepspeed '{name}' must have ZeRO stage 0, 1 or 2, got {zero['stage']!r}: the loss in chunks "
            "needs the output head whole. Use --fsdp, which splits weights, too."
        )
    for key in ("optimizer", "scheduler"):
        if key in settings:
            raise UserError(
                f"deepspeed '{name}' must have no {key!r}: this training brings AdamW with a cosine. Leave "
                "it out, and use --learning-rate."
            )
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            "--deepspeed needs the package deepspeed. Install corecontext[deepspeed], or use --fsdp."
        )
    if "LOCAL_RANK" not in os.environ:
        raise UserError(
            "--deepspeed needs torchrun, also for one process. Start with torchrun --nproc-per-node COUNT "
            "-m corecontext train."
        )
    return settings
