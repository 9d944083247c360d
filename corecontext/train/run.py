"""A run from a TrainConfig to a checkpoint that loads with CCA: started, or continued where it was
stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from corecontext.config import CCAConfig
from corecontext.data.corpus import encoder, read_corpus
from corecontext.data.packing import PackedRows, collate, shuffled, upsampled
from corecontext.data.row_stream import StreamedRows, open_shards
from corecontext.files import UserError, write_text
from corecontext.train import card, hub
from corecontext.train.arguments import arguments_of
from corecontext.train.checkpoint import (
    STAGING,
    STREAM,
    clear_staging,
    is_write_failure,
    latest,
    publish,
    step_of,
)
from corecontext.train.choose_heads import with_heads
from corecontext.train.folder import MODEL, check_folder, claim, held, make
from corecontext.train.student import export, make_model, make_tokenizer, read_config
from corecontext.train.train_config import TrainConfig

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
    """Train as described; a folder that holds part of this very run is continued from its last
    complete checkpoint.

    Raises:
        UserError: a setting, the data or the folder is not as it must be, or a loss was no number.
    """
    for package in ("accelerate", "datasets", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"training needs the package {package}. Install corecontext[train].")
    for package in config.report_to:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"report_to {package!r} needs the package {package}. Install it, or leave --report-to out."
            )
    if not config.output:
        raise UserError("output must be given, got none. Use --output FOLDER.")
    if config.long_tokens is not None and config.source_field is None:
        raise UserError(
            "source_field must be given with long_tokens, got none. Use --source-field."
        )
    if config.long_tokens is not None and config.streaming:
        raise UserError(
            "long_tokens must be left out with streaming, got both: how often a document comes follows "
            "from the lengths of all. Leave --streaming out."
        )
    folder = Path(config.output)
    hf_config = read_config(config)
    tokenizer = make_tokenizer(config, hf_config)
    arguments = arguments_of(config)
    main = arguments.process_index == 0
    check_folder(folder, config)
    with _one_first(arguments):
        rows, eval_rows = _rows(config, tokenizer, arguments.world_size)
    make(folder)
    with held(folder) if main else contextlib.nullcontext(), _in_fixed_order(config.deterministic):
        return _run(config, arguments, hf_config, tokenizer, rows, eval_rows)


def _run(
    asked: TrainConfig,
    arguments: Any,
    hf_config: Any,
    tokenizer: Any,
    rows: PackedRows | StreamedRows,
    eval_rows: PackedRows | None,
) -> Result:
    """The training itself, in a folder that is this run's."""
    from corecontext.inference.fuse import Fused

    folder, main = Path(asked.output), arguments.process_index == 0
    config = with_heads(asked, hf_config, arguments, rows)
    facts = {"processes": arguments.world_size, "rows": rows.mark()}
    if asked.raw_heads != 0:
        facts["heads"] = {
            name: getattr(config, name) for name in ("window_size", "layer_group_sizes")
        }
    trainer = _trainer(
        config, arguments, make_model(config, hf_config, bfloat16=arguments.bf16), rows, eval_rows
    )
    with arguments.main_process_first(desc="run folder"):
        if main:
            claim(folder, asked, facts)
        if main and config.push_to is not None:
            hub.prepare(config.push_to)
    resume = latest(folder)
    if resume is not None and isinstance(rows, StreamedRows) and (resume / STREAM).is_file():
        rows.load_state_dict(json.loads((resume / STREAM).read_text(encoding="utf-8")))
    with Fused(trainer.model, "compile" if config.fuse else None):
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
        tokens = (
            config.steps * config.accumulation * config.batch_size * groups * config.context_length
        )
        _patiently(
            lambda: _export(config, last, staged, tokenizer, dtype, history, metrics, tokens),
            folder,
        )
        clear_staging(folder)
        if config.push_to is not None:
            hub.push(folder / MODEL, config.push_to)
    return Result(
        folder / MODEL,
        step_of(last),
        card.losses(history),
        metrics,
        step_of(resume) if resume else 0,
    )


def _export(
    config: TrainConfig,
    last: Path,
    staged: Path,
    tokenizer: Any,
    dtype: Any,
    history: list,
    metrics: dict[str, float],
    tokens: int,
) -> None:
    """The final checkpoint with its card, complete or not there."""
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    export(
        config, last, staged, tokenizer, dtype if isinstance(dtype, torch.dtype) else torch.float32
    )
    card.write(staged, config, history, metrics, tokens)
    publish(staged, Path(config.output) / MODEL)


@contextlib.contextmanager
def _in_fixed_order(wanted: bool) -> Iterator[None]:
    """Sums whose order does not depend on which program of a GPU comes first, where that is wanted.

    Raises:
        UserError: torch has no such sum for something that the model does.
    """
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    if wanted:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # read when a process first multiplies matrices
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # for those who look for such reads; takes time
    try:
        yield
    except RuntimeError as error:
        if wanted and "does not have a deterministic implementation" in str(error):
            raise UserError(
                f"deterministic must be left out for this model: {str(error).split('. ')[0]}."
            ) from error
        raise
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]


@contextlib.contextmanager
def _one_first(arguments: Any) -> Iterator[None]:
    """One process of each machine first, as Trainer's main_process_first, but for as long as it
    takes: to tokenise a large corpus takes longer than collectives, which that one waits with, may
    last."""
    if arguments.world_size == 1:
        yield
        return
    store, machine = (
        dist.distributed_c10d._get_default_store(),
        arguments.process_index - arguments.local_process_index,
    )
    ready = f"corecontext data {store.add(f'corecontext data of {arguments.process_index}', 1)} on {machine}"
    if arguments.local_process_index:
        store.wait([ready], timedelta(days=365))
    try:
        yield
    finally:
        if not arguments.local_process_index:
            store.set(ready, "")


def _rows(
    config: TrainConfig, tokenizer: Any, world_size: int
) -> tuple[PackedRows | StreamedRows, PackedRows | None]:
    """Training rows in their order, and rows that are only evaluated."""
    options: dict[str, Any] = {"text_field": config.text_field, "cache_dir": config.cache_dir}
    rows: PackedRows | StreamedRows
    if config.streaming:
        shards = open_shards(config.data, source_field=config.source_field, **options)
        step = (
            config.accumulation * config.batch_size * max(1, world_size // config.context_parallel)
        )
        rows = StreamedRows(
            shards,
            encoder(tokenizer),
            config.context_length,
            config.steps * step,
            seed=config.seed,
            block_size=config.shuffle_documents,
            ahead=3 * step,
        )  # Trainer fetches a step ahead
        if latest(Path(config.output)) is None:
            rows[0]  # what is wrong with the data is said before the run begins
    else:
        documents = read_corpus(
            config.data,
            tokenizer,
            source_field=config.source_field,
            workers=config.workers,
            **options,
        )
        if config.long_tokens is None:
            order = shuffled(len(documents), config.seed)
        else:
            lengths = documents.with_format("numpy")["length"][:]
            order = upsampled(
                lengths, documents["source"][:], config.long_tokens, config.long_share, config.seed
            )
        rows = PackedRows(documents, config.context_length, order)
    if not config.eval_data:
        return rows, None
    try:
        evaluated = read_corpus(config.eval_data, tokenizer, workers=config.workers, **options)
        return rows, PackedRows(evaluated, config.context_length)
    except UserError as error:
        raise UserError(f"eval_data: {error}") from None


def _trainer(
    config: TrainConfig,
    arguments: Any,
    model: Any,
    rows: PackedRows | StreamedRows,
    eval_rows: PackedRows | None,
) -> Any:
    """Trainer on the model, whose loss comes in chunks, with a teacher if it is distilled."""
    from corecontext.integrations.hf_attention import inner_model
    from corecontext.train.loss import compute_loss_in_chunks
    from corecontext.train.teacher import load_teacher
    from corecontext.train.trainer import CCATrainer

    teacher = (
        load_teacher(config, bfloat16=arguments.bf16, device=arguments.device)
        if config.distil
        else None
    )
    compute_loss_in_chunks(inner_model(model), config.loss_chunk, teacher)
    return CCATrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=eval_rows,
        data_collator=collate,
        context_parallel=config.context_parallel,
        keep=config.keep,
    )


def _save_after_all(trainer: Any, folder: Path) -> None:
    """The last checkpoint, which a full disk had no room for."""

    def save() -> None:
        trainer._save_checkpoint(trainer.model_wrapped, None)
        if trainer.save_error is not None:
            raise trainer.save_error

    _patiently(save, folder)


def _patiently(write: Any, folder: Path) -> None:
    """Write something that must not be lost; where that fails (a full disk), try again for an
    hour."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return write()
        except Exception as error:
            if not is_write_failure(error):
                raise
            if time.monotonic() > end:
                raise UserError(
                    f"output '{folder}' cannot be written: {error}. All checkpoints are kept: free space "
                    "and run the same command again."
                ) from None
            logging.getLogger(__name__).warning(
                "%s; trying again in %d s: free space in %s.", error, WAIT_S, folder
            )
            time.sleep(WAIT_S)


def convert(source: str, target: str, config: CCAConfig | None) -> None:
    """Copy a checkpoint with CCA's settings put into its config.json, or (None) taken out: weights
    are the same.

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
        raise UserError(
            f"output '{target}' cannot be written: {error.strerror or error}."
        ) from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
