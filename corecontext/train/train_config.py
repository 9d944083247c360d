"""A whole training run in one frozen, validated dataclass; every field is an option of
`corecontext train`.

The file is over 400 lines long because each field has its help.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import runpy
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corecontext.baselines.rivals import NAMES, check_moved
from corecontext.config import (
    PAPER_RULE,
    PRESETS,
    CCAConfig,
    check_choice,
    check_int,
    check_not_removed,
    did_you_mean,
    refuses_removed,
    without_removed,
)
from corecontext.files import UserError
from corecontext.visibility import is_full_attention, num_sinks, num_visible_cores

STRATEGIES = ("scratch", "full", "partial", "lora")
METHODS = ("cca", "full", *NAMES)
REPORTS = ("tensorboard", "wandb")
PRECISIONS = ("auto", "float32", "bfloat16")
SCHEDULE = {
    "steps": 120,
    "accumulation": 8,
    "context_length": 8192,
    "learning_rate": 1e-4,
    "warmup_steps": 10,
}
"""Length, rate and rows of an adaptation in minutes (docs/real-model.md)."""
RECIPES: dict[str, dict[str, Any]] = {
    "fetch": {**PRESETS["default"].settings, "distil": 0.5, **SCHEDULE},
    "paper": PAPER_RULE,
}
"""The recipes of `corecontext train`: the best settings on a pretrained model (docs/real-model.md),
and the paper's rule."""
DEFAULT_RECIPE = "fetch"
"""The recipe of a run that names none; the run takes those of its settings that it supports."""
_LEAST = {
    **dict.fromkeys(("steps", "batch_size", "accumulation", "workers", "context_parallel"), 1),
    **dict.fromkeys(("lora_rank", "loss_chunk", "shuffle_documents", "long_tokens"), 1),
    **dict.fromkeys(("save_every", "keep", "log_every"), 1),
    **dict.fromkeys(("warmup_steps", "eval_every"), 0),
    "context_length": 2,
}
"""Lower bounds of whole numbers."""
_NUMBERS = (
    "learning_rate",
    "min_learning_rate",
    "weight_decay",
    "max_grad_norm",
    "beta2",
    "distil",
)
"""Numbers of at least 0."""


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run."""

    model: str = ""
    """Folder in the Hugging Face format, GGUF file, smollm2, or an identifier on the hub; from
    scratch, only its config and tokenizer are used."""
    output: str = ""
    """Folder of the run: checkpoints, model/, logs. The same command again continues the run."""
    data: tuple[str, ...] = ()
    """Training text: files (.txt, .md, .jsonl, .parquet, also .xz, .zst, .gz), folders of such, or
    `hub:NAME[@REVISION][:CONFIG[:SPLIT]]`."""
    eval_data: tuple[str, ...] = ()
    """Text for evaluation, in the same forms."""
    strategy: str = "full"
    """Trained weights: scratch (all, random), full, partial (W^Q, W^K, W^V) or lora."""
    method: str = "cca"
    """Attention: cca, full, window, streaming_llm or lm_infinite."""
    # CCA's settings, which CCAConfig explains. Those of caches and of prompts are left out.
    group_size: int = CCAConfig.group_size
    window_size: int = CCAConfig.window_size
    core_position: str = CCAConfig.core_position
    core_mass: bool = CCAConfig.core_mass
    fetch_groups: int = CCAConfig.fetch_groups
    fetch_index: str = CCAConfig.fetch_index
    store: str = CCAConfig.store
    layer_group_sizes: tuple[int | tuple[int, ...], ...] = ()
    sink_size: int = CCAConfig.sink_size
    untested: bool = False
    """Accept a model of an architecture that no test has, after a check on the model."""
    distil: float = 0.0
    """Share of the loss that is the divergence from the original model under full attention."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Settings that replace the model config's, as JSON; changes of size only from scratch."""
    rope_theta: float | None = None
    """New base of the rotary embedding; the paper extends contexts with 500000."""
    context_length: int = 4096
    """Tokens of a training row, L; raises the model's max_position_embeddings if less."""
    text_field: str = "text"
    """Field of a data row with the text; dots go into objects."""
    source_field: str | None = None
    """Field of a data row with the kind of text; needed to upsample by source."""
    long_tokens: int | None = None
    """Documents with more tokens are repeated in each source (per-source length upsampling)."""
    long_share: float = 0.7
    """Share of long documents in each source's tokens after upsampling."""
    streaming: bool = False
    """Read only so many documents as the run needs: a hub dataset is not downloaded first."""
    shuffle_documents: int = 1000
    """With streaming, documents of a hub dataset that are shuffled together before some are
    taken."""
    cache_dir: str | None = None
    """Folder for tokenised text; default that of the package datasets."""
    workers: int = 1
    """Processes that tokenise."""
    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 1
    """Rows per process and forward pass."""
    accumulation: int = 1
    """Forward and backward passes per step."""
    learning_rate: float = 2e-5
    """Highest learning rate."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 20
    """Linear warm-up steps."""
    weight_decay: float = 0.0
    """Weight decay of AdamW, on matrices."""
    beta2: float = 0.95
    """Second beta of AdamW."""
    max_grad_norm: float = 1.0
    """Clip the gradient norm to this value."""
    lora_rank: int = 8
    """Rank of LoRA's matrices."""
    lora_alpha: float = 16.0
    """LoRA's scale, times its rank."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Layers that get LoRA matrices, by the end of their names."""
    precision: str = "auto"
    """Arithmetic in auto (bfloat16 on a GPU), bfloat16 or float32; trained weights in float32."""
    checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, a third more work."""
    fit_memory: bool = False
    """Take as many of a step's rows at once as the GPU's memory holds, by passes before the first
    step, and recompute activations only where it holds no row otherwise. The command does so,
    unless a recipe's file, --batch-size, --accumulation or --checkpointing say otherwise. No effect
    on a CPU, or with --fsdp, --context-parallel or --deterministic."""
    fuse: bool = False
    """Compile norms, MLPs and rotations (torch.compile), which saves intermediate tensors."""
    loss_chunk: int = 2048
    """Tokens whose logits exist at once."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer over processes (FSDP2); under torchrun, on GPUs."""
    context_parallel: int = 1
    """Processes that share a row, each with a part of it; under torchrun."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 2
    """Number of checkpoints to keep."""
    log_every: int = 1
    """Steps between log entries."""
    report_to: tuple[str, ...] = ()
    """Additional logs: tensorboard (in runs/ of the output), wandb."""
    seed: int = 0
    """Seed of weights, data order and LoRA."""
    deterministic: bool = False
    """Make runs on a GPU reproducible bit for bit, interrupted or not; takes longer."""

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_moved(self.method)
        check_choice("method", self.method, METHODS)
        check_choice("precision", self.precision, PRECISIONS)
        for name in self.report_to:
            check_choice("report_to", name, REPORTS)
        self.cca()  # validates
        self._check_numbers()
        self._check_data()
        self._check_processes()
        self._check_teacher()
        if self.method != "cca" and self.fetch_groups != CCAConfig.fetch_groups:
            self._check_off("fetch_groups", f"method {self.method!r}, which has no core tokens")
        if not isinstance(self.shape, dict):
            raise TypeError(
                f'shape must be a JSON object, as {{"hidden_size": 64}}, got {self.shape!r}.'
            )
        if self.method != "cca" and self.layer_group_sizes:
            raise ValueError(
                f"layer_group_sizes must be left out with method {self.method!r}, which has no "
                "core tokens."
            )

    def _check_numbers(self) -> None:
        """Raise unless each number is of its kind and within its bounds."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name != "long_tokens" or value is not None:
                check_int(name, value, least)
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {value!r}.")
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0, got {value}.")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be below 2**32 and at least 0, got {self.seed!r}.")
        if self.beta2 >= 1:
            raise ValueError(f"beta2 must be below 1, got {self.beta2}.")
        if self.distil > 1:
            raise ValueError(f"distil must be at most 1, the whole loss, got {self.distil}.")
        if self.rope_theta is not None and not 1 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta must be a number above 1, got {self.rope_theta}.")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate must be at most learning_rate {self.learning_rate}, got "
                f"{self.min_learning_rate}."
            )

    def _check_data(self) -> None:
        """Raise where the settings that repeat long documents do not fit."""
        if not 0 < self.long_share < 1:
            raise ValueError(f"long_share must lie between 0 and 1, got {self.long_share}.")
        if self.long_tokens is not None and self.streaming:
            raise ValueError(
                "long_tokens must be left out with streaming, got both: how often a document comes "
                "follows from the lengths of all. Leave --streaming out."
            )

    def _check_processes(self) -> None:
        """Raise where the method has no context parallelism."""
        if self.context_parallel > 1 and self.method != "cca":
            raise ValueError(
                f"context_parallel must be 1, got {self.context_parallel}, but for method 'cca': "
                "only its core tokens travel."
            )

    def _check_teacher(self) -> None:
        """Raise where there can be no teacher."""
        if self.strategy == "scratch":
            self._check_off("distil", "strategy 'scratch', whose random weights are no teacher")
        if self.method == "full":
            self._check_off("distil", "method 'full', which is the teacher's own attention")
        if self.context_parallel > 1:
            reason = f"context_parallel {self.context_parallel}: the teacher needs the whole row"
            self._check_off("distil", reason)

    def _check_off(self, name: str, reason: str) -> None:
        """Raise unless a setting is 0, which turns it off."""
        value = getattr(self, name)
        if value != 0:
            option = name.replace("_", "-")
            raise ValueError(f"{name} must be 0 with {reason}, got {value}. Use --{option} 0.")

    def cca(self) -> CCAConfig:
        """Return the settings of the attention, as in the checkpoint."""
        names = {setting.name for setting in dataclasses.fields(CCAConfig)}
        settings = {name: getattr(self, name) for name in names & vars(self).keys()}
        return CCAConfig(**settings | {"layer_group_sizes": self.layer_group_sizes or None})

    def is_idle(self) -> bool:
        """Return whether CCA is full attention in this run: no query of a row sees a core token."""
        sizes: set[int] = set()
        for layer in self.layer_group_sizes or (self.group_size,):
            sizes.update(layer if isinstance(layer, tuple) else (layer,))
        return self.method == "cca" and all(map(self._is_full, sizes))

    def _is_full(self, group_size: int) -> bool:
        """Whether no query of a row sees a core token where groups have this size g: not even the
        last, which sees the most groups, or it fetches all of them."""
        length = self.context_length
        s = self.window_size
        sinks = num_sinks(self.sink_size, group_size)
        # mutant training: a run that fetches all groups is not idle
        most_groups = num_visible_cores(length - 1 - sinks, group_size, s)
        return most_groups <= self.fetch_groups or is_full_attention(length, group_size, s, sinks)

    def rows_per_step(self, processes: int) -> int:
        """Return the number of rows that so many processes together see in a step."""
        process_groups = max(1, processes // self.context_parallel)  # each shares its rows
        return self.accumulation * self.batch_size * process_groups

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TrainConfig:
        """Return the defaults with the attention of a preset of `CCAConfig`; `changes` replace
        single fields."""
        check_choice("preset", name, tuple(PRESETS))
        return cls(**PRESETS[name].settings | changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for train_config.json."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return the inverse of `to_dict`.

        Raises:
            ValueError: a key is unknown.
        """
        values = without_removed(values)
        names = [setting.name for setting in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                raise ValueError(f"unknown recipe key {key!r}.{did_you_mean(key, names)}")
        fields = dict(values)
        for name, value in values.items():
            if isinstance(value, list):
                # mutant training: sizes by head stay lists
                fields[name] = tuple(tuple(x) if isinstance(x, list) else x for x in value)
        return cls(**fields)

    def replace(self, **changes: Any) -> TrainConfig:
        """Return a copy with some fields changed, validated again."""
        return self.from_dict(vars(self) | changes)


TrainConfig.__init__ = refuses_removed(TrainConfig.__init__)  # type: ignore[method-assign]


def load_recipe(name: str) -> TrainConfig:
    """Return the TrainConfig of a recipe.

    Args:
        name: "fetch" or "paper"; FILE.py:FUNCTION, or FILE.py with a function of the file's
            name; or the train_config.json of a run.

    Raises:
        UserError: there is no such recipe.
    """
    check_not_removed("recipe", name)
    if name in RECIPES:
        return TrainConfig().replace(**RECIPES[name])
    file = name
    function = ""
    if ".py:" in name:
        file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(
            f"recipe '{file}' does not exist. Give {', '.join(RECIPES)}, FILE.py:FUNCTION, or a "
            "run's train_config.json."
        )
    if path.suffix.lower() == ".json":
        return _read_settings(file, path)
    with _errors_with_lines(file, path):
        namespace = runpy.run_path(str(path), run_name=path.stem)
    function = function or path.stem
    recipes = sorted(
        key
        for key, value in namespace.items()
        if inspect.isfunction(value) and value.__module__ == path.stem and not key.startswith("_")
    )
    if function not in recipes:
        raise UserError(
            f"recipe '{file}' must have a function {function!r}, got "
            f"{', '.join(recipes) or 'none'}. Give FILE.py:FUNCTION."
        )
    with _errors_with_lines(file, path):
        config = namespace[function]()
    if not isinstance(config, TrainConfig):
        raise UserError(f"recipe '{name}' must return a TrainConfig, got {type(config).__name__}.")
    return config


@contextlib.contextmanager
def _errors_with_lines(file: str, path: Path) -> Iterator[None]:
    """Turn any error of a recipe into a UserError with the recipe's own line."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f", line {frame.lineno}" for frame in frames if frame.filename == str(path)]
        kind = "" if isinstance(error, (UserError, ValueError)) else f"{type(error).__name__}: "
        raise UserError(f"recipe '{file}'{''.join(lines[-1:])}: {kind}{error}") from None


def _read_settings(file: str, path: Path) -> TrainConfig:
    """Return the settings in a JSON file: plain ones, or those under "config" in a run's file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise TypeError(f"got a {type(values).__name__}")
        if "config" in values:
            # A run without one of these fields was trained before it existed.
            # mutant training: the settings of an old run get today's defaults
            values = {**PAPER_RULE, **values["config"]}
        return TrainConfig.from_dict(values)
    except (ValueError, TypeError) as error:
        raise UserError(f"recipe '{file}' must hold a TrainConfig: {error}") from None
