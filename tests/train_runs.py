"""Helpers of the tests of training runs: make a small run, stop it, and compare weights."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import save_tiny_model

pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytest.importorskip("datasets", reason="training reads its data with datasets")

from corecontext.train import TrainConfig, card, trainer
from corecontext.train.run import train

ROOT = Path(__file__).resolve().parents[1]
STEPS = 6
EVERY = 2
DRAW = card._draw
"""Draws the curve of a loss; the runs of `setting` draw none."""


def make_setting(folder: Path) -> TrainConfig:
    """Make a tiny model, text in several documents, and a run on them in float32 in a folder."""
    text = (ROOT / "LICENSE").read_text()
    for i in range(3):
        (folder / f"text{i}.txt").write_text(text[1500 * i : 1500 * (i + 1)])
    return TrainConfig.preset(
        "paper",
        model=save_tiny_model(folder / "model"),
        data=tuple(map(str, sorted(folder.glob("*.txt")))),
        output=str(folder / "whole"),
        cache_dir=str(folder / "cache"),
        context_length=96,
        group_size=4,
        window_size=10,
        steps=STEPS,
        save_every=EVERY,
        learning_rate=3e-3,
        warmup_steps=1,
        keep=10,
        precision="float32",
        deterministic=torch.cuda.is_available(),
    )


def weights(config: TrainConfig, which: str = "model") -> dict[str, torch.Tensor]:
    """Return the weights of the final model or of a checkpoint of a run."""
    return load_file(Path(config.output) / which / "model.safetensors")


def stop_at(step: int, config: TrainConfig, before: Callable[[], None] = lambda: None) -> None:
    """Train until Ctrl-C after so many steps."""
    original = trainer.CCATrainer.training_step

    def stopped(self, *args):
        if self.state.global_step == step:
            before()
            raise KeyboardInterrupt
        return original(self, *args)

    with (
        mock.patch.object(trainer.CCATrainer, "training_step", stopped),
        pytest.raises(KeyboardInterrupt),
    ):
        train(config)


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Check that weights are equal bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
