"""Train from a TrainConfig to a checkpoint that loads with CCA: from the start, or from the last
checkpoint of an interrupted run."""

import contextlib
import importlib.util
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corecontext.data.corpus import read_beginning, read_corpus
from corecontext.data.documents import Fields
from corecontext.data.packing import PackedRows, collate, shuffled, upsampled
from corecontext.distributed.announcement import Announcement
from corecontext.files import UserError, install_command, make_folder
from corecontext.terminal import progress
from corecontext.train import card
from corecontext.train.arguments import arguments_of, set_split
from corecontext.train.before_after import compare
from corecontext.train.checkpoint import (
    STAGING,
    clear_staging,
    is_write_failure,
    latest,
    publish,
    step_of,
)
from corecontext.train.folder import MODEL, check_folder, claim, locked, release
from corecontext.train.memory_fit import split_for_memory
from corecontext.train.student import export, make_model, make_tokenizer, prepare_config
from corecontext.train.train_config import TrainConfig

WAIT_S = 10
"""Seconds between attempts to write to a full disk at the end of a run."""
PATIENCE_S = 3600
"""Seconds after which the attempts end."""


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    model: Path
    """The final checkpoint."""
    steps: int
    losses: list[tuple[int, float]]
    """(step, training loss) of each step that was logged."""
    parts: dict[str, float]
    """Of a distilled run the two terms of the last loss, "cross_entropy" and "divergence"."""
    metrics: dict[str, float]
    """Metrics of the last evaluation."""
    resumed_from: int
    """Step of the checkpoint that this process began with; 0 for none."""


class _Inputs(NamedTuple):
    """Hold what a run needs besides its settings."""

    hf_config: Any
    tokenizer: Any
    arguments: Any
    """transformers' TrainingArguments."""
    rows: PackedRows
    eval_rows: PackedRows | None

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes the run's files."""
        return self.arguments.process_index == 0


def train(config: TrainConfig) -> Result:
    """Train, or continue from the last complete checkpoint if the output folder holds a part of
    the same run.

    Raises:
        UserError: a setting, the data or the folder does not fit, or a loss was not finite.
    """
    _check_packages(config)
    if not config.output:
        raise UserError("output must be given, got none. Use --output FOLDER.")
    if config.long_tokens is not None and config.source_field is None:
        raise UserError(
            "source_field must be given with long_tokens, got none. Use --source-field."
        )
    folder = Path(config.output)
    hf_config = prepare_config(config)
    tokenizer = make_tokenizer(config, hf_config)
    arguments = arguments_of(config)
    check_folder(folder, config)
    if not sys.stderr.isatty():
        import datasets

        datasets.disable_progress_bars()
    with _local_rank_0_first(arguments):
        rows = _read_rows(config, tokenizer, arguments.world_size)
        eval_rows = _read_eval_rows(config, tokenizer)
    make_folder(folder)
    inputs = _Inputs(hf_config, tokenizer, arguments, rows, eval_rows)
    lock = locked(folder) if inputs.is_first_rank else contextlib.nullcontext()
    try:
        with lock, _deterministic(config.deterministic), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
            return _run(config, inputs)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only where the run has left nothing in it


def _check_packages(config: TrainConfig) -> None:
    """Raise a UserError unless the packages for training and for reports are installed."""
    for package in ("accelerate", "datasets", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"training needs the package {package}. Install it with: {install_command('train')}"
            )
    for package in config.report_to:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"report_to {package!r} needs the package {package}. Install it, or leave "
                "--report-to out."
            )


def _run(config: TrainConfig, inputs: _Inputs) -> Result:
    """Train in a folder that only this run writes to, and export the model."""
    from corecontext.inference.fuse import Fused

    folder = Path(config.output)
    facts = {"processes": inputs.arguments.world_size, "rows": inputs.rows.fingerprint()}
    if config.is_idle() and inputs.is_first_rank:
        logging.getLogger(__name__).warning(
            "no query of a row of %d tokens sees a core token: CCA is full attention in this run. "
            "Give a longer --context-length, a smaller --window-size or fewer --fetch-groups.",
            config.context_length,
        )
    trainer = _make_trainer(config, inputs)
    # The first rank claims the folder before the others look for a checkpoint in it.
    with inputs.arguments.main_process_first(desc="run folder"):
        if inputs.is_first_rank:
            claim(folder, config, facts)  # after all other checks: from here on the folder is used

    resume = latest(folder)
    resumed_from = step_of(resume) if resume else 0
    # Train; a run without a checkpoint leaves its folder as it was.
    try:
        fused = Fused(trainer.model, "compile" if config.fuse else None)
        with fused, _progress_of_rows(trainer, config, resumed_from):
            trainer.train(resume_from_checkpoint=resume and str(resume))
    except (Exception, KeyboardInterrupt):
        if inputs.is_first_rank:
            release(folder)
        raise
    # The finished model is exported from the last checkpoint.
    if trainer.save_error is not None:
        _retry_writing(trainer.save_checkpoint, folder)

    # All ranks evaluate; the first one writes the finished model.
    metrics = trainer.evaluate() if inputs.eval_rows is not None else {}
    history = trainer.state.log_history
    if inputs.is_first_rank:
        _retry_writing(lambda: _export(config, inputs, history, metrics), folder)
        clear_staging(folder)
    loss_parts = {
        name: card.losses(history, name)[-1][1]
        for name in ("cross_entropy", "divergence")
        if config.distil
    }
    losses = card.losses(history)
    return Result(folder / MODEL, config.steps, losses, loss_parts, metrics, resumed_from)


def _make_trainer(config: TrainConfig, inputs: _Inputs) -> Any:
    """Return the Trainer of the run's model. The model returns its loss, computed in chunks, with a
    teacher if it is distilled; with `fit_memory` as many rows at once as the GPU's memory holds."""
    from corecontext.integrations.hf.attention_interface import inner_model
    from corecontext.train.loss import compute_loss_in_chunks
    from corecontext.train.teacher import load_teacher
    from corecontext.train.trainer import CCATrainer

    arguments = inputs.arguments
    model = make_model(config, inputs.hf_config, bfloat16=arguments.bf16)
    teacher = None
    if config.distil:
        teacher = load_teacher(config, bfloat16=arguments.bf16, device=arguments.device)
    compute_loss_in_chunks(inner_model(model), config.loss_chunk, teacher)
    split = split_for_memory(model, config, arguments)
    if split is not None:
        set_split(arguments, split)
    return CCATrainer(
        model=model,
        args=arguments,
        train_dataset=inputs.rows,
        eval_dataset=inputs.eval_rows,
        data_collator=collate,
        context_parallel=config.context_parallel,
        keep=config.keep,
        distil=config.distil,
    )


@contextlib.contextmanager
def _progress_of_rows(trainer: Any, config: TrainConfig, steps_done: int) -> Iterator[None]:
    """Show the size of the run and its progress by row inside the block, unless Trainer shows a bar
    by step: a step on a CPU may take minutes."""
    steps = config.steps - steps_done
    if not trainer.args.disable_tqdm or not trainer.args.should_log or steps <= 0:
        yield
        return
    rows = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps
    title = f"training, {steps} steps, each of {rows} x {config.context_length} tokens"
    print(title, file=sys.stderr, flush=True)
    with progress(title, steps * rows) as trainer.on_rows:
        yield


def _export(config: TrainConfig, inputs: _Inputs, history: list, metrics: dict[str, float]) -> None:
    """Write the final model with its card; the folder gets its name once it is complete."""
    folder = Path(config.output)
    clear_staging(folder)
    staged = folder / STAGING / MODEL
    staged.mkdir(parents=True)
    last = latest(folder)
    assert last is not None  # the last step is always saved
    dtype = inputs.hf_config.dtype
    if not isinstance(dtype, torch.dtype):
        dtype = torch.float32
    export(config, last, staged, dtype)
    inputs.tokenizer.save_pretrained(staged)
    rows = config.steps * config.rows_per_step(inputs.arguments.world_size)
    tokens = rows * config.context_length
    comparison = compare(config, staged, inputs.tokenizer, inputs.eval_rows, inputs.arguments)
    card.write(staged, config, history, metrics, tokens, comparison)
    publish(staged, folder / MODEL)


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside the block, if wanted.

    Raises:
        UserError: torch has no such algorithm for an operation of the model.
    """
    settings: Any = torch.utils.deterministic
    mode_before = torch.get_deterministic_debug_mode()
    fill_before = settings.fill_uninitialized_memory
    if wanted:
        # cuBLAS reads it when a process first multiplies matrices.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # a debugging aid, which takes time
    try:
        yield
    except RuntimeError as error:
        # PyTorch has no type of error for it.
        if wanted and "does not have a deterministic implementation" in str(error):
            raise UserError(
                f"deterministic must be left out for this model: {str(error).split('. ')[0]}."
            ) from error
        raise
    finally:
        torch.set_deterministic_debug_mode(mode_before)
        settings.fill_uninitialized_memory = fill_before


@contextlib.contextmanager
def _local_rank_0_first(arguments: Any) -> Iterator[None]:
    """Run the block on one process of each machine first, then on the others, which find its tokens
    in the cache on disk.

    Trainer's main_process_first would time out, as collectives do, while the first process
    tokenises a large corpus.
    """
    if arguments.world_size == 1:
        yield
        return
    rank = arguments.process_index
    first_rank = rank - arguments.local_process_index  # of this machine
    announcement = Announcement(f"data on {first_rank}", rank)
    if rank != first_rank:
        announcement.wait()
    try:
        yield
    finally:
        if rank == first_rank:
            announcement.publish()


def _read_rows(config: TrainConfig, tokenizer: Any, world_size: int) -> PackedRows:
    """Return the training rows, packed from the documents in random order; `long_tokens` repeats
    long documents."""
    if config.streaming:
        documents = read_beginning(
            config.data,
            tokenizer,
            config.steps * config.rows_per_step(world_size) * config.context_length,
            Fields(config.text_field, config.source_field),
            shuffle=config.shuffle_documents,
            seed=config.seed,
            cache_dir=config.cache_dir,
        )
    else:
        documents = _documents(config, config.data, tokenizer, config.source_field)
    if config.long_tokens is None:
        order = shuffled(len(documents), config.seed)
    else:
        order = upsampled(
            documents.with_format("numpy")["length"][:],
            documents["source"][:],
            config.long_tokens,
            config.long_share,
            config.seed,
        )
    return PackedRows(documents, config.context_length, order)


def _documents(
    config: TrainConfig, names: Sequence[str], tokenizer: Any, source_field: str | None = None
) -> Any:
    """Return the dataset of `read_corpus` for data of these names."""
    return read_corpus(
        names,
        tokenizer,
        text_field=config.text_field,
        source_field=source_field,
        workers=config.workers,
        cache_dir=config.cache_dir,
    )


def _read_eval_rows(config: TrainConfig, tokenizer: Any) -> PackedRows | None:
    """Return the rows for evaluation; None without evaluation data."""
    if not config.eval_data:
        return None
    try:
        return PackedRows(_documents(config, config.eval_data, tokenizer), config.context_length)
    except UserError as error:
        raise UserError(f"eval_data: {error}") from None


def _retry_writing(write: Callable[[], None], folder: Path) -> None:
    """Call `write` until it succeeds, every WAIT_S seconds for PATIENCE_S: the end of a run must
    not be lost to a full disk."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return write()
        except Exception as error:
            if not is_write_failure(error):
                raise
            if time.monotonic() > end:
                raise UserError(
                    f"output '{folder}' cannot be written: {error}. All checkpoints are kept: free "
                    "space and run the same command again."
                ) from None
            logging.getLogger(__name__).warning(
                "%s; trying again in %d s: free space in %s.", error, WAIT_S, folder
            )
            time.sleep(WAIT_S)
