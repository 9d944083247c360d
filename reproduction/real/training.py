"""Train a pretrained model under an attention for a few steps, with the code of `corecontext
train`."""

import math
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.config import listed
from corecontext.data.packing import collate
from corecontext.files import UserError
from corecontext.loading import one_line
from corecontext.measure import PeakMemory
from reproduction.real.texts import Window, WindowRows

DISTIL = 0.5
"""Share of the loss that is the divergence from the model under full attention."""
STRATEGIES = ("full", "partial", "lora")
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_SCALE = 2.0
DEVICE_BYTES = 16 << 30
"""Bytes on the device for the teacher's views of windows."""
ADAPTER = "adapter"
"""Folder of LoRA's matrices, in 8 bits, in that of the trained model."""
EIGHT_BITS = torch.float8_e4m3fn


@dataclass(frozen=True)
class Adaptation:
    """The settings of a training, the same for all methods."""

    steps: int = 0
    """0 leaves the model as it is."""
    rows: int = 8
    """Windows of a step."""
    rows_at_once: int = 4
    """Windows of a forward pass."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more work."""
    fuse: bool = False
    """Compile norms, MLPs and the rotation: less work, after seconds of compiling."""
    learning_rate: float = 1e-4
    warmup_steps: int = 10
    seed: int = 0
    """Of the order of the windows."""
    rope_theta: float | None = None
    """New base of the rotary embedding, for windows longer than the model's; without a teacher,
    which has no such windows."""
    distil: float = DISTIL
    """Share of the loss that is the divergence from the model under full attention."""
    strategy: str = "full"
    """Weights that are trained: full (all), partial (queries, keys, values) or lora."""
    lora_rank: int = 12

    def __post_init__(self) -> None:
        if self.rows % self.rows_at_once:
            raise UserError(
                f"rows-at-once must divide the {self.rows} rows of a step, got {self.rows_at_once}."
            )
        if self.rope_theta is not None and not self.steps:
            raise UserError("rope-theta must come with steps, got none. Use --steps.")
        if self.strategy not in STRATEGIES:
            raise UserError(f"strategy must be {listed(STRATEGIES)}, got {self.strategy!r}.")

    def describe(self) -> dict[str, Any]:
        """Return the settings that are not the protocol's, for a record's params."""
        settings: dict[str, Any] = {}
        if self.rope_theta is not None:
            settings["rope_theta"] = self.rope_theta
        if self.distil != DISTIL:
            settings["distil"] = self.distil
        if self.strategy != "full":
            settings["strategy"] = self.strategy
        if self.strategy == "lora":
            settings["lora_rank"] = self.lora_rank
        return settings


class RememberedTeacher:
    """The model as it was under full attention, whose view of a window is computed once and kept:
    methods and seeds are trained on the same windows.

    Args:
        teacher: A `corecontext.train.teacher.Teacher`.
    """

    def __init__(self, teacher: Any) -> None:
        self.teacher = teacher
        self._view: Any = None
        self._hidden: dict[bytes, Tensor] = {}
        self._room = DEVICE_BYTES
        """Bytes on the device for further windows; those without room are in host memory."""

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, *, share: float, **unused: Any
    ) -> Any:
        """Return the teacher's view of windows [B, L], each a document, for a loss with this share
        of the divergence."""
        windows = [row.tobytes() for row in input_ids.cpu().numpy()]
        for i, window in enumerate(windows):
            if window not in self._hidden:
                self._view = self.teacher(input_ids[i : i + 1], position_ids[i : i + 1])
                hidden = self._view.hidden
                has_room = self._room >= hidden.nbytes
                self._room -= hidden.nbytes
                self._hidden[window] = hidden if has_room else hidden.cpu()
        hidden = torch.cat([self._hidden[window].to(input_ids.device) for window in windows])
        return replace(self._view, hidden=hidden, share=share)


class Cost(NamedTuple):
    """Costs of a training."""

    seconds: float
    peak_bytes: int
    """Of memory: weights, gradients, optimizer and activations."""


def adapt(
    name: str,
    attention: Any,
    adaptation: Adaptation,
    windows: list[Window],
    target: Path,
    teachers: dict[str, RememberedTeacher] | None = None,
) -> Cost:
    """Train all weights of a model under an attention, and write the result to a folder.

    A share of the loss is the divergence from the model as it was, under full attention, the rest
    cross-entropy; with a new rotary base all is cross-entropy. The folder gets its name once it is
    complete.

    Args:
        name: Folder of the model in the Hugging Face format.
        attention: A CCAConfig, a rival's settings, or None for full attention.
        windows: Training text; repeated where the steps need more.
        target: The folder to write.
        teachers: Teachers of earlier trainings, by `name`; this training's is added.
    """
    from transformers.trainer_utils import SaveStrategy

    from corecontext.baselines import enable
    from corecontext.inference.fuse import Fused
    from corecontext.integrations.hf.attention_interface import inner_model
    from corecontext.train.arguments import arguments_of
    from corecontext.train.loss import compute_loss_in_chunks
    from corecontext.train.student import make_model, make_tokenizer, prepare_config
    from corecontext.train.teacher import load_teacher
    from corecontext.train.train_config import TrainConfig
    from corecontext.train.trainer import CCATrainer

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        staged = Path(scratch) / "model"
        # Full attention as far as the run's settings go: `attention` may be any.
        config = TrainConfig(
            model=name,
            output=scratch,
            method="full",
            distil=0.0,
            context_length=len(windows[0].ids),
            steps=adaptation.steps,
            batch_size=adaptation.rows_at_once,
            accumulation=adaptation.rows // adaptation.rows_at_once,
            learning_rate=adaptation.learning_rate,
            warmup_steps=min(adaptation.warmup_steps, adaptation.steps // 2),
            checkpointing=adaptation.checkpointing,
            log_every=max(1, adaptation.steps // 10),
            seed=adaptation.seed,
            rope_theta=adaptation.rope_theta,
            strategy=adaptation.strategy,
            lora_rank=adaptation.lora_rank,
            lora_alpha=LORA_SCALE * adaptation.lora_rank,
            lora_targets=LORA_TARGETS,
        )
        hf_config = prepare_config(config)
        arguments = arguments_of(config)
        arguments.save_strategy = SaveStrategy.NO
        memory = PeakMemory(str(arguments.device))
        model = make_model(config, hf_config, bfloat16=arguments.bf16)
        if attention is not None:
            with one_line():
                enable(model, attention)
        distil = 0.0
        teacher = None
        if adaptation.rope_theta is None:
            distil = adaptation.distil
            teachers = {} if teachers is None else teachers
            if name not in teachers:
                taught = config.replace(method="cca", distil=DISTIL)
                teachers[name] = RememberedTeacher(
                    load_teacher(taught, bfloat16=arguments.bf16, device=arguments.device)
                )
            teacher = partial(teachers[name], share=distil)
        compute_loss_in_chunks(inner_model(model), config.loss_chunk, teacher)
        trainer = CCATrainer(
            model=model,
            args=arguments,
            train_dataset=WindowRows(windows),
            data_collator=collate,
            distil=distil,
        )
        started = time.perf_counter()
        with Fused(model, "compile" if adaptation.fuse else None):
            trainer.train()
        cost = Cost(time.perf_counter() - started, memory.read())
        if adaptation.strategy == "lora":
            model = _merged(model, config, hf_config, staged / ADAPTER)
        model.config.use_cache = True
        model.to(hf_config.dtype).save_pretrained(staged)
        make_tokenizer(config, hf_config).save_pretrained(staged)
        staged.rename(target)
    return cost


def _merged(model: Any, config: Any, hf_config: Any, folder: Path) -> Any:
    """Write LoRA's matrices in 8 bits to a folder, and return the original model with them."""
    from corecontext.integrations.hf.adapter import add_adapter
    from corecontext.integrations.hf.weights import load_weights

    round_factors(model)
    model.save_pretrained(folder)
    original = load_weights(config.model, hf_config, torch.float32)
    add_adapter(original, folder)
    return original


def round_factors(model: Any) -> None:
    """Round LoRA's matrices to float8_e4m3fn, in place.

    All matrices A are scaled by one power of two, and all B by another, so that the largest value
    is near the largest of the format. Its relative precision is constant over 14 octaves.
    lora_alpha takes the scales back.

    Args:
        model: A PEFT model with one adapter, "default".
    """
    most = torch.finfo(EIGHT_BITS).max
    config = model.peft_config["default"]
    for kind in ("lora_A", "lora_B"):
        factors = [weight for name, weight in model.named_parameters() if kind in name]
        largest = max(float(weight.detach().abs().max()) for weight in factors)
        scale = 2.0 ** math.floor(math.log2(most / largest)) if largest else 1.0
        for weight in factors:
            weight.data = (weight.data.float() * scale).to(EIGHT_BITS)
        config.lora_alpha /= scale
