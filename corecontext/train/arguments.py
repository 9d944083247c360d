"""Turn a TrainConfig into transformers' TrainingArguments."""

import os
import sys
from typing import Any

import torch

from corecontext.files import UserError
from corecontext.loading import one_line
from corecontext.train.memory_fit import Split
from corecontext.train.train_config import TrainConfig


def arguments_of(config: TrainConfig) -> Any:
    """Return the run's TrainingArguments.

    Raises:
        UserError: FSDP has no GPUs or one process, or transformers refuses a value.
    """
    from transformers import TrainingArguments
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    has_gpu = torch.cuda.is_available()
    sharding: dict[str, Any] = {}
    if config.fsdp:
        _check_fsdp(has_gpu)
        # Gradients are reduced after each backward pass, so no process keeps all of them.
        sharding = {
            "fsdp": True,
            "fsdp_config": {"version": 2, "activation_checkpointing": config.checkpointing},
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        }
    name = checkpointing_name()
    checkpointing: dict[str, Any] = {
        name: config.checkpointing and not config.fsdp,
        f"{name}_kwargs": {"use_reentrant": False},
    }
    # As a fraction of the highest rate; where that is 0, both are.
    min_rate = config.min_learning_rate / (config.learning_rate or 1.0)
    with one_line():
        arguments = TrainingArguments(
            output_dir=config.output,
            max_steps=config.steps,
            per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=config.accumulation,
            learning_rate=config.learning_rate,
            lr_scheduler_type="cosine_warmup_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": min_rate},
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay,
            adam_beta2=config.beta2,
            max_grad_norm=config.max_grad_norm,
            bf16=config.precision == "bfloat16" or (config.precision == "auto" and has_gpu),
            use_cpu=not has_gpu,
            eval_strategy="steps" if config.eval_every and config.eval_data else "no",
            eval_steps=config.eval_every or None,
            save_strategy="steps",
            save_steps=config.save_every,
            logging_steps=config.log_every,
            logging_nan_inf_filter=False,
            report_to=list(config.report_to),
            seed=config.seed,
            data_seed=config.seed,
            disable_tqdm=not sys.stderr.isatty(),
            remove_unused_columns=False,
            prediction_loss_only=True,
            dataloader_pin_memory=has_gpu,
            ddp_find_unused_parameters=False,
            **checkpointing,
            **sharding,
        )
        if config.fsdp and arguments.bf16:
            # accelerate's default would also reduce gradients in bfloat16, and round the loss.
            from torch.distributed.fsdp import MixedPrecisionPolicy

            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
        # Trainer would split batches over all GPUs of a machine (DataParallel), by copies of the
        # model without its attention and its loss. Other GPUs are for torchrun's processes.
        arguments._n_gpu = min(1, arguments.n_gpu)
        if arguments.device.type == "cpu":
            # With several processes it is "cpu:0", to which torch loads no checkpoint.
            arguments.__dict__["_setup_devices"] = torch.device("cpu")
    return arguments


def set_split(arguments: Any, split: Split) -> None:
    """Change how a step's rows are split, in TrainingArguments before Trainer gets them."""
    arguments.per_device_train_batch_size = split.batch_size
    arguments.gradient_accumulation_steps = split.accumulation
    setattr(arguments, checkpointing_name(), split.checkpointing)


def checkpointing_name() -> str:
    """Return the name of the argument that recomputes activations in the backward pass."""
    from transformers import PreTrainedModel

    # Older releases know only the second name, newer ones warn of it.
    is_new = hasattr(PreTrainedModel, "activation_checkpointing_enable")
    return "activation_checkpointing" if is_new else "gradient_checkpointing"


def _check_fsdp(has_gpu: bool) -> None:
    """Raise unless there are several processes with a GPU each."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or not has_gpu:
        raise UserError(
            f"fsdp needs several processes with a GPU each, got {world} on "
            f"{'a GPU' if has_gpu else 'a CPU'}. Start with torchrun --nproc-per-node, or leave "
            "--fsdp out."
        )
