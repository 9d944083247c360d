"""A whole training run in one frozen, validated description; every field is an option of
`corecontext train`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from corecontext.config import CCAConfig, check_choice
from corecontext.files import UserError

STRATEGIES = ("scratch", "full", "partial", "lora")
METHODS = ("cca", "full", "window", "streaming_llm", "lm_infinite", "longlora")
REPORTS = ("tensorboard", "wandb")
RECIPES: dict[str, dict[str, Any]] = {"raw": {"raw_heads": None, "distil": 0.5}, "paper": {}}
"""What `corecontext train` knows by name: what worked best in docs/reproduction.md, and the rule of
the paper."""
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class TrainConfig:
    """What `corecontext train` does."""

    model: str = ""
    """Folder in the Hugging Face format or identifier on the hub; from scratch, only its config and
    tokenizer count."""
    output: str = ""
    """Folder of the run: checkpoints, the final model in model/, logs. The same command again
    continues the run."""
    data: tuple[str, ...] = ()
    """Training text: files (.txt, .md, .jsonl, .parquet, also .xz, .zst, .gz), folders of such, or
    hub:NAME[@REVISION][:CONFIG[:SPLIT]]."""
    eval_data: tuple[str, ...] = ()
    """Text that is only evaluated, in the same forms."""
    strategy: str = "full"
    """What is trained: scratch (all, from random weights), full, partial (W^Q, W^K, W^V, and what
    --learned names) or lora."""
    method: str = "cca"
    """Attention: cca, full, window, streaming_llm, lm_infinite or longlora."""
    group_size: int = 16
    """Tokens per core token, g."""
    window_size: int = 1024
    """Nearest tokens kept as they are, s."""
    pooling: str = "cca"
    """What makes a core token: cca, mean, max or mean_query."""
    core_position: str = "middle"
    """Rotary position of a core key: middle of its group, or token."""
    core_heads: str = "kv"
    """One core token per kv head or per query head."""
    core_bias: float = 0.0
    """Added to every core token's score."""
    learned: tuple[str, ...] = ()
    """Parameters of core tokens that are learned: temperature, probe, distance, key_gain, bias."""
    layer_group_sizes: tuple[int | tuple[int, ...], ...] = ()
    """g of each full-attention layer, in order, instead of one for all; in a recipe also a tuple,
    by KV head."""
    raw_heads: int | None = 0
    """KV heads that keep every token, found on the training text before the first step (from
    scratch: those of middle layers); the other heads and the window pay for them. None, which the
    recipe `raw` has: as many as `corecontext layers --raw` takes."""
    sink_size: int = 0
    """First tokens that every query sees uncompressed, rounded up to a multiple of g; their groups
    are not pooled."""
    distil: float = 0.0
    """Share of the loss that is the divergence from the predictions of the model as it was, under
    full attention."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Settings put over the model's config, as JSON; changes of size only from scratch."""
    rope_theta: float | None = None
    """New base of the rotary embedding; the paper extends contexts with 500000."""
    context_length: int = 4096
    """Tokens of a training row, L; raises the model's max_position_embeddings where that is
    less."""
    text_field: str = "text"
    """Where rows of data have their text; dots go into objects."""
    source_field: str | None = None
    """Where rows say what kind of text they are; needed to upsample by source."""
    long_tokens: int | None = None
    """Documents with more tokens are long, and come more often in each source (per-source length
    upsampling)."""
    long_share: float = 0.7
    """Share of each source's tokens that long documents are brought to."""
    streaming: bool = False
    """Read and tokenise the training text while it trains, instead of all of it before; nothing of
    it is kept."""
    shuffle_documents: int = 1000
    """Documents that are shuffled together where text is streamed; all of them where it is not."""
    cache_dir: str | None = None
    """Where tokenised text is kept; default that of the package datasets."""
    workers: int = 1
    """Processes that tokenise."""
    steps: int = 1000
    """Optimiser steps."""
    batch_size: int = 1
    """Rows per process and forward pass."""
    accumulation: int = 1
    """Forward and backward passes per step."""
    learning_rate: float = 2e-5
    """Highest learning rate."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 20
    """Steps in which the learning rate rises."""
    weight_decay: float = 0.0
    """Of AdamW, on matrices."""
    beta2: float = 0.95
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Longer gradients are shortened to it."""
    lora_rank: int = 8
    """Rank of LoRA's matrices."""
    lora_alpha: float = 16.0
    """LoRA's scale, times its rank."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Layers that get LoRA matrices, by the end of their names."""
    precision: str = "auto"
    """Of the arithmetic: auto (bfloat16 on a GPU), bfloat16 or float32; trained weights are kept in
    float32."""
    checkpointing: bool = True
    """Forget activations and compute them again in the backward: less memory, a third more work."""
    fuse: bool = False
    """Compile norms, MLPs and the rotation of queries and keys (torch.compile): their intermediate
    tensors are not made."""
    loss_chunk: int = 2048
    """Tokens whose logits exist at once."""
    fsdp: bool = False
    """Split weights, gradients and optimiser over the processes (FSDP2); under torchrun, on
    GPUs."""
    deepspeed: str | None = None
    """DeepSpeed's settings, a JSON file; ZeRO stage 0 to 2. The package deepspeed must be
    installed."""
    context_parallel: int = 1
    """Processes that share one row, each with a part of it; under torchrun."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    log_every: int = 1
    """Steps between log entries."""
    report_to: tuple[str, ...] = ()
    """Where else logs go: tensorboard (in runs/ of the output), wandb."""
    push_to: str | None = None
    """Repository on the hub that gets the final model, private if it is new."""
    seed: int = 0
    """Of weights, data order and LoRA."""
    deterministic: bool = False
    """On a GPU, too, the same bits whenever the same is run, stopped and continued or not: sums in
    a fixed order, which takes longer."""

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("method", self.method, METHODS)
        check_choice("precision", self.precision, PRECISIONS)
        for name in self.report_to:
            check_choice("report_to", name, REPORTS)
        self.cca()  # validates
        for name in (
            "workers",
            "steps",
            "batch_size",
            "accumulation",
            "lora_rank",
            "loss_chunk",
            "context_parallel",
            "shuffle_documents",
            "save_every",
            "keep",
            "log_every",
        ):
            _check_number(name, getattr(self, name), 1, int)
        _check_number("context_length", self.context_length, 2, int)
        for name in ("warmup_steps", "eval_every", "seed"):
            _check_number(name, getattr(self, name), 0, int)
        for name in (
            "learning_rate",
            "min_learning_rate",
            "weight_decay",
            "max_grad_norm",
            "beta2",
            "distil",
        ):
            _check_number(name, getattr(self, name), 0, (int, float))
        if self.beta2 >= 1:
            raise ValueError(f"beta2 must be below 1, got {self.beta2}.")
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, got {self.seed}.")
        if self.rope_theta is not None and not 1 < self.rope_theta < float("inf"):
            raise ValueError(f"rope_theta must be a number above 1, got {self.rope_theta}.")
        if not isinstance(self.shape, dict):
            raise TypeError(
                f'shape must be a JSON object, as {{"hidden_size": 64}}, got {self.shape!r}.'
            )
        if not 0 < self.long_share < 1:
            raise ValueError(f"long_share must lie between 0 and 1, got {self.long_share}.")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate must be at most learning_rate {self.learning_rate}, got "
                f"{self.min_learning_rate}."
            )
        if self.long_tokens is not None:
            _check_number("long_tokens", self.long_tokens, 1, int)
        if self.context_parallel > 1 and (self.method != "cca" or self.sink_size):
            raise ValueError(
                f"context_parallel must be 1, got {self.context_parallel}, but for method 'cca' without "
                "sink_size: only core tokens travel."
            )
        if self.deepspeed is not None and (self.fsdp or self.context_parallel > 1):
            other = "fsdp" if self.fsdp else "context_parallel"
            raise ValueError(
                f"deepspeed must be left out with {other}, got {self.deepspeed!r}: both would split the "
                "run. Use --fsdp with --context-parallel."
            )
        self._check_distil()
        self._check_raw_heads()
        if self.method != "cca" and (self.learned or self.layer_group_sizes):
            raise ValueError(
                f"learned and layer_group_sizes must be left out with method {self.method!r}, which has "
                "no core tokens."
            )
        if self.learned and self.strategy == "lora":
            raise ValueError(
                "learned must be left out with strategy 'lora', whose checkpoints hold LoRA's matrices "
                "only. Use strategy 'partial'."
            )

    def _check_raw_heads(self) -> None:
        """Raise where heads that keep every token cannot be looked for, or have been already."""
        if self.raw_heads is not None:
            _check_number("raw_heads", self.raw_heads, 0, int)
        reason = None
        if self.method != "cca":
            reason = f"method {self.method!r}, which has no core tokens"
        elif self.layer_group_sizes:
            reason = "layer_group_sizes, which say which heads keep every token"
        if self.raw_heads != 0 and reason is not None:
            raise ValueError(
                f"raw_heads must be 0 with {reason}, got {self.raw_heads}. Use --raw-heads 0."
            )

    def _check_distil(self) -> None:
        """Raise where a teacher is asked for that cannot be, or can teach nothing."""
        if self.distil > 1:
            raise ValueError(f"distil must be at most 1, the whole loss, got {self.distil}.")
        reason = None
        if self.strategy == "scratch":
            reason = "strategy 'scratch', whose random weights are no teacher"
        elif self.method == "full":
            reason = "method 'full', which is the teacher's own attention"
        elif self.context_parallel > 1:
            reason = f"context_parallel {self.context_parallel}: the teacher needs the whole row"
        if self.distil and reason is not None:
            raise ValueError(f"distil must be 0 with {reason}, got {self.distil}. Use --distil 0.")

    def cca(self) -> CCAConfig:
        """The settings of the attention, as they stand in the checkpoint."""
        return CCAConfig(
            self.group_size,
            self.window_size,
            pooling=self.pooling,
            core_position=self.core_position,
            core_heads=self.core_heads,
            core_bias=self.core_bias,
            learned=self.learned,
            layer_group_sizes=self.layer_group_sizes or None,
            sink_size=self.sink_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for train_config.json."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; unknown keys are errors."""
        known = {one.name: one for one in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                near = get_close_matches(key, known, 1)
                raise ValueError(
                    f"unknown recipe key {key!r}." + (f" Did you mean {near[0]!r}?" if near else "")
                )
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**fields)

    def replace(self, **changes: Any) -> TrainConfig:
        """A copy with some fields changed, validated again."""
        return self.from_dict(
            {**{one.name: getattr(self, one.name) for one in dataclasses.fields(self)}, **changes}
        )


def field_help() -> dict[str, str]:
    """The string under each field of TrainConfig."""
    body: list[Any] = ast.parse(inspect.getsource(TrainConfig)).body[0].body  # type: ignore[attr-defined]
    kinds = [type(one) for one in body]
    return {
        body[i].target.id: body[i + 1].value.value
        for i in range(len(body) - 1)
        if kinds[i : i + 2] == [ast.AnnAssign, ast.Expr]
    }


def load_recipe(name: str) -> TrainConfig:
    """The TrainConfig that a recipe returns.

    Args:
        name: "raw" or "paper"; FILE.py:FUNCTION, or FILE.py where the function is called as the
            file; or a train_config.json of a run.

    Raises:
        UserError: there is none.
    """
    if name in RECIPES:
        return TrainConfig().replace(**RECIPES[name])
    file, _, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(
            f"recipe '{file}' does not exist. Give {', '.join(RECIPES)}, FILE.py:FUNCTION, or a run's "
            "train_config.json."
        )
    if path.suffix == ".json":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise TypeError(f"got a {type(values).__name__}")
            return TrainConfig.from_dict(
                values.get("config", values)
            )  # a run's has more than its settings
        except (ValueError, TypeError) as error:
            raise UserError(f"recipe '{file}' must hold a TrainConfig: {error}") from None
    space: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), space)
    except (SyntaxError, ImportError, UnicodeDecodeError) as error:
        raise UserError(f"recipe '{file}' cannot be read: {error}") from None
    function = function or path.stem
    recipes = sorted(
        key
        for key, value in space.items()
        if inspect.isfunction(value) and value.__module__ == path.stem and not key.startswith("_")
    )
    if function not in recipes:
        raise UserError(
            f"recipe '{file}' must have a function {function!r}, got {', '.join(recipes) or 'none'}. "
            "Give FILE.py:FUNCTION."
        )
    config = space[function]()
    if not isinstance(config, TrainConfig):
        raise UserError(f"recipe '{name}' must return a TrainConfig, got {type(config).__name__}.")
    return config


def _check_number(name: str, value: Any, least: float, kind: Any) -> None:
    """Raise unless value is a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(
            f"{name} must be {'an integer' if kind is int else 'a number'}, got {value!r}."
        )
    if not least <= value < float("inf"):
        raise ValueError(f"{name} must be at least {least}, got {value}.")
