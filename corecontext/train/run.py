"""A run from a TrainConfig to a checkpoint that loads with CCA: started, or continued where it was stopped."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from corecontext.config import CCAConfig
from corecontext.data.corpus import encoder, read_corpus
from corecontext.data.files import read_json
from corecontext.data.packing import PackedRows, collate, shuffled, upsampled
from corecontext.data.stream import StreamedRows, open_shards
from corecontext.loading import one_line
from corecontext.record import source_version, versions
from corecontext.text import UserError, write_text
from corecontext.train import card, hub
from corecontext.train.checkpoint import STAGING, STREAM, clear_staging, is_write_failure, latest, publish, step_of
from corecontext.train.config import TrainConfig
from corecontext.train.model import export, make_model, make_tokenizer, read_config

SETTINGS, MODEL = "train_config.json", "model"
MAY_CHANGE = {"output", "workers", "cache_dir", "save_every", "keep", "log_every", "report_to", "eval_every", "push_to"}
"""Fields that a continued run may have changed: what it computes stays the same."""
WAIT_S, PATIENCE_S = 10, 3600  # how often and how long a full disk is waited for at the end


@dataclass(frozen=True)
class Result:
    """What a run leaves."""

    model: Path
    """The final checkpoint."""
    steps: int
    losses: list[tuple[int, float]]
    """Training loss by step."""
    metrics: dict[str, float]
    """Of the last evaluation."""
    resumed_from: int
    """Step of the checkpoint that this process began with; 0 for none."""


def train(config: TrainConfig) -> Result:
    """Train as described; a folder that holds part of this very run is continued from its last complete checkpoint.

    Raises:
        UserError: a setting, the data or the folder is not as it must be, or a loss was no number.
    """
    for package in ("accelerate", "datasets", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"training needs the package {package}. Install corecontext[train].")
    for package in config.report_to:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"report_to {package!r} needs the package {package}. Install it, or leave --report-to out.")
    if not config.output:
        raise UserError("output must be given, got none. Use --output FOLDER.")
    if config.long_tokens is not None and config.source_field is None:
        raise UserError("source_field must be given with long_tokens, got none. Use --source-field.")
    if config.long_tokens is not None and config.streaming:
        raise UserError("long_tokens must be left out with streaming, got both: how often a document comes follows "
                        "from the lengths of all. Leave --streaming out.")
    folder = Path(config.output)
    finished = folder / MODEL
    hf_config = read_config(config)
    tokenizer = make_tokenizer(config, hf_config)
    arguments = _arguments(config)
    main = arguments.process_index == 0
    _check_folder(folder, config)
    with arguments.main_process_first(desc="data"):
        rows, eval_rows = _rows(config, tokenizer, arguments.world_size)
    trainer = _trainer(config, arguments, make_model(config, hf_config, bfloat16=arguments.bf16), rows, eval_rows)
    with arguments.main_process_first(desc="run folder"):
        if main:
            _claim(folder, config)
        if main and config.push_to is not None:
            hub.prepare(config.push_to)
    resume = latest(folder)
    if resume is not None and isinstance(rows, StreamedRows) and (resume / STREAM).is_file():
        rows.load_state_dict(json.loads((resume / STREAM).read_text(encoding="utf-8")))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    if trainer.save_error is not None:
        _save_after_all(trainer, folder)
    last = latest(folder)
    assert last is not None  # the last step is always saved
    history = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    metrics = trainer.evaluate() if eval_rows is not None else {}
    if main:
        staged = folder / STAGING / MODEL
        clear_staging(folder)
        dtype = getattr(hf_config, "dtype", None)
        groups = arguments.world_size // config.context_parallel
        tokens = config.steps * config.accumulation * config.batch_size * groups * config.context_length
        _patiently(lambda: _export(config, last, staged, tokenizer, dtype, history, metrics, tokens), folder)
        clear_staging(folder)
        if config.push_to is not None:
            hub.push(finished, config.push_to)
    return Result(finished, step_of(last), card.losses(history), metrics, step_of(resume) if resume else 0)


def _export(config: TrainConfig, last: Path, staged: Path, tokenizer: Any, dtype: Any, history: list,
            metrics: dict[str, float], tokens: int) -> None:
    """The final checkpoint with its card, complete or not there."""
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    export(config, last, staged, tokenizer, dtype if isinstance(dtype, torch.dtype) else torch.float32)
    card.write(staged, config, history, metrics, tokens)
    publish(staged, Path(config.output) / MODEL)


def _check_folder(folder: Path, config: TrainConfig) -> None:
    """Raise unless the folder is free, or holds part of this run."""
    path = folder / SETTINGS
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))["config"]
        now = config.to_dict()
        changed = sorted(key for key in now if before.get(key) != now[key] and key not in MAY_CHANGE)
        if changed:
            raise UserError(f"output '{folder}' holds a run with other settings: {changed[0]} was "
                            f"{before.get(changed[0])!r}, got {now[changed[0]]!r}. Give another --output, or the same "
                            "settings to continue it.")
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"output '{folder}' must be a new or empty folder, or a run's, got one with other files.")
    if (folder / MODEL).exists():
        raise UserError(f"output '{folder}' already holds the finished run in {MODEL}/. Give another --output.")


def _claim(folder: Path, config: TrainConfig) -> None:
    """Write the settings into the run's folder, once all else is known to be right."""
    folder.mkdir(parents=True, exist_ok=True)
    clear_staging(folder)
    commit, dirty = source_version()
    write_text(folder / SETTINGS, json.dumps({"config": config.to_dict(), "commit": commit, "dirty": dirty,
                                              "versions": versions()}, indent=1) + "\n")


def _rows(config: TrainConfig, tokenizer: Any, world_size: int) -> tuple[PackedRows | StreamedRows, PackedRows | None]:
    """Training rows in their order, and rows that are only evaluated."""
    options: dict[str, Any] = {"text_field": config.text_field, "cache_dir": config.cache_dir}
    rows: PackedRows | StreamedRows
    if config.streaming:
        shards = open_shards(config.data, source_field=config.source_field, **options)
        step = config.accumulation * config.batch_size * max(1, world_size // config.context_parallel)
        rows = StreamedRows(shards, encoder(tokenizer), config.context_length, config.steps * step, seed=config.seed,
                            block_size=config.shuffle_documents, ahead=3 * step)  # Trainer fetches a step ahead
        if latest(Path(config.output)) is None:
            rows[0]  # what is wrong with the data is said before the run begins
    else:
        documents = read_corpus(config.data, tokenizer, source_field=config.source_field, workers=config.workers,
                                **options)
        if config.long_tokens is None:
            order = shuffled(len(documents), config.seed)
        else:
            lengths = documents.with_format("numpy")["length"][:]
            order = upsampled(lengths, documents["source"][:], config.long_tokens, config.long_share, config.seed)
        rows = PackedRows(documents, config.context_length, order)
    if not config.eval_data:
        return rows, None
    try:
        evaluated = read_corpus(config.eval_data, tokenizer, workers=config.workers, **options)
        return rows, PackedRows(evaluated, config.context_length)
    except UserError as error:
        raise UserError(f"eval_data: {error}") from None


def _arguments(config: TrainConfig) -> Any:
    """The run as transformers' TrainingArguments."""
    from transformers import TrainingArguments
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    gpu = torch.cuda.is_available()
    fsdp: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2,
                                                                  "activation_checkpointing": config.checkpointing}}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if config.fsdp and (world == 1 or not gpu):
        raise UserError(f"fsdp needs several processes with a GPU each, got {world} on "
                        f"{'a GPU' if gpu else 'a CPU'}. Start with torchrun --nproc-per-node, or leave --fsdp out.")
    deepspeed = None if config.deepspeed is None else _deepspeed(config.deepspeed)
    with one_line():
        return TrainingArguments(
            output_dir=config.output, max_steps=config.steps, per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=1, gradient_accumulation_steps=config.accumulation,
            learning_rate=config.learning_rate, lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": config.min_learning_rate / (config.learning_rate or 1.0)},
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay, adam_beta2=config.beta2, max_grad_norm=config.max_grad_norm,
            bf16=config.precision == "bfloat16" or (config.precision == "auto" and gpu), use_cpu=not gpu,
            gradient_checkpointing=config.checkpointing and not config.fsdp,
            gradient_checkpointing_kwargs={"use_reentrant": False}, **(fsdp if config.fsdp else {}),
            eval_strategy="steps" if config.eval_every and config.eval_data else "no",
            eval_steps=config.eval_every or None, save_strategy="steps", save_steps=config.save_every,
            logging_steps=config.log_every, logging_nan_inf_filter=False,
            report_to=list(config.report_to), seed=config.seed, data_seed=config.seed, remove_unused_columns=False,
            prediction_loss_only=True, deepspeed=deepspeed, dataloader_pin_memory=gpu, ddp_find_unused_parameters=False)


def _deepspeed(name: str) -> dict[str, Any]:
    """DeepSpeed's settings from a file.

    Raises:
        UserError: it holds none, or some that this training cannot have; or the package is missing.
    """
    settings = read_json(name)
    if not isinstance(settings, dict):
        raise UserError(f"deepspeed '{name}' must hold DeepSpeed's settings, a JSON object, got a "
                        f"{type(settings).__name__}.")
    zero = settings.get("zero_optimization") or {}
    if zero.get("stage", 0) not in (0, 1, 2):
        raise UserError(f"deepspeed '{name}' must have ZeRO stage 0, 1 or 2, got {zero['stage']!r}: the loss in chunks "
                        "needs the output head whole. Use --fsdp, which splits weights, too.")
    for key in ("optimizer", "scheduler"):
        if key in settings:
            raise UserError(f"deepspeed '{name}' must have no {key!r}: this training brings AdamW with a cosine. Leave "
                            "it out, and use --learning-rate.")
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("--deepspeed needs the package deepspeed. Install corecontext[deepspeed], or use --fsdp.")
    if "LOCAL_RANK" not in os.environ:
        raise UserError("--deepspeed needs torchrun, also for one process. Start with torchrun --nproc-per-node COUNT "
                        "-m corecontext train.")
    return settings


def _trainer(config: TrainConfig, arguments: Any, model: Any, rows: PackedRows | StreamedRows,
             eval_rows: PackedRows | None) -> Any:
    """Trainer on the model, whose loss comes in chunks."""
    from corecontext.integrations.transformers import _inner_model
    from corecontext.train.loss import compute_loss_in_chunks
    from corecontext.train.trainer import CCATrainer

    compute_loss_in_chunks(_inner_model(model), config.loss_chunk)
    return CCATrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=eval_rows, data_collator=collate,
                      context_parallel=config.context_parallel, keep=config.keep)


def _save_after_all(trainer: Any, folder: Path) -> None:
    """The last checkpoint, which a full disk had no room for."""
    def save() -> None:
        trainer._save_checkpoint(trainer.model_wrapped, None)
        if trainer.save_error is not None:
            raise trainer.save_error
    _patiently(save, folder)


def _patiently(write: Any, folder: Path) -> None:
    """Write something that must not be lost; where that fails (a full disk), try again for an hour."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return write()
        except Exception as error:
            if not is_write_failure(error):
                raise
            if time.monotonic() > end:
                raise UserError(f"output '{folder}' cannot be written: {error}. All checkpoints are kept: free space "
                                "and run the same command again.") from None
            logging.getLogger(__name__).warning("%s; trying again in %d s: free space in %s.", error, WAIT_S, folder)
            time.sleep(WAIT_S)


def convert(source: str, target: str, config: CCAConfig | None) -> None:
    """Copy a checkpoint with CCA's settings put into its config.json, or (None) taken out: weights are the same.

    Raises:
        UserError: source is no checkpoint, or target exists.
    """
    old, new = Path(source).expanduser(), Path(target)
    if not (old / "config.json").is_file():
        raise UserError(f"model '{source}' must be a folder with config.json, got none.")
    if new.exists():
        raise UserError(f"output '{target}' already exists. Give a new folder.")
    staged = new.with_name(f".{new.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        shutil.copytree(old, staged)
        settings = json.loads((staged / "config.json").read_text(encoding="utf-8"))
        settings.pop("cca", None)
        if config is not None:
            settings["cca"] = config.to_dict()
        write_text(staged / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
        publish(staged, new)
    except OSError as error:
        raise UserError(f"output '{target}' cannot be written: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
