"""Promises of training that a run rarely shows: what an evaluation counts, and when a
checkpoint gets its name."""

import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model

pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytest.importorskip("datasets", reason="training reads its data with datasets")

from corecontext.cli import main
from corecontext.data.packing import IGNORED
from corecontext.files import UserError
from corecontext.train import TrainConfig, card, run, student
from corecontext.train.arguments import arguments_of
from corecontext.train.checkpoint import publish
from corecontext.train.run import train
from corecontext.train.teacher import load_teacher
from corecontext.train.train_config import load_recipe
from corecontext.train.trainer import CCATrainer


def test_every_evaluation_row_counts_once_on_any_number_of_processes():
    """The number of processes does not divide that of the rows: fillers keep ranks in step."""

    class Model:
        def eval(self) -> None:
            pass

        def __call__(self, labels: torch.Tensor, **inputs: object) -> dict[str, torch.Tensor]:
            return {"loss": (labels[:, 1:] != IGNORED).sum() * labels.max().float()}

    rows = []
    for row, length in enumerate((4, 7, 5, 9, 6)):
        ids = torch.full((length,), row + 1)
        rows.append({"input_ids": ids, "labels": ids, "position_ids": ids, "row": row})
    sums: list[torch.Tensor] = []

    def metrics(world: int, rank: int) -> dict[str, float]:
        trainer = mock.Mock(spec=CCATrainer, eval_dataset=rows, model_wrapped=Model(), wire=None)
        trainer.args = SimpleNamespace(world_size=world, process_index=rank, device="cpu")
        trainer.context_parallel = 1
        trainer.state = trainer.control = trainer.callback_handler = mock.Mock()
        trainer._prepare_inputs = lambda inputs: inputs

        def all_reduce(total: torch.Tensor) -> None:
            sums.append(total.clone())
            total += sum(sums[:-1])

        with mock.patch.object(dist, "all_reduce", all_reduce):
            return CCATrainer.evaluate(trainer)

    alone = metrics(1, 0)
    for world in (2, 3, 4):
        sums.clear()
        assert [metrics(world, rank) for rank in range(world)][-1] == alone


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    staged = tmp_path / "staging/checkpoint-1"
    (staged / "part").mkdir(parents=True)
    (staged / "weights").write_text("w")
    (staged / "part/optimizer").write_text("o")
    content = {path.stat().st_ino for path in (staged, *staged.rglob("*"))}
    events: list[object] = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: events.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "rename", lambda *names: (events.append("name"), rename(*names)))
    publish(staged, tmp_path / "checkpoint-1")
    named = events.index("name")
    assert set(events[:named]) == content
    assert events[named + 1 :] == [tmp_path.stat().st_ino]  # and then the name itself


def test_a_recipe_that_raises_is_one_line_with_its_own_line_number(tmp_path):
    path = tmp_path / "mine.py"
    for body, message in (
        (
            "def mine():\n    x = 1\n    return 1 / 0\n",
            "mine.py', line 3: ZeroDivisionError: divis",
        ),
        ("x = nothing\n", "mine.py', line 1: NameError: name 'nothing'"),
        (
            "from corecontext.train import TrainConfig\nmine = lambda: TrainConfig(steps=0)\n",
            "mine.py', line 2: steps must be at least 1, got 0",
        ),
    ):
        path.write_text(body)
        with pytest.raises(UserError, match=message):
            load_recipe(str(path))


def test_a_run_whose_rows_never_leave_the_window_is_said_to_be_idle(tmp_path):
    # g = 16, s = 1024
    sizes = {"context_length": 1039, "sink_size": 0}
    config = TrainConfig.preset("pooling", model="me/model", output="run", **sizes)
    assert config.is_idle() and not config.replace(context_length=1040).is_idle()
    assert config.replace(context_length=1040, sink_size=16).is_idle()
    assert not config.replace(method="full").is_idle()
    assert not config.replace(layer_group_sizes=(16, (16, 4))).is_idle()
    assert config.replace(context_length=1040, layer_group_sizes=(32, (32, 48))).is_idle()
    # Each query fetches every group that it sees: all tokens are raw.
    fetching = config.replace(context_length=1040 + 2 * 16, fetch_groups=2)
    assert not fetching.is_idle() and fetching.replace(fetch_groups=3).is_idle()
    assert fetching.replace(context_length=1040 + 2 * 16 - 1).is_idle()
    config = config.replace(layer_group_sizes=(1, (1, 8)))
    assert not config.is_idle() and config.replace(context_length=1031).is_idle()
    config = config.replace(context_length=1031)
    card.write(tmp_path, config, [{"step": 1, "loss": 2.0}], {}, 5)
    assert "- core tokens were idle: no query" in (tmp_path / "README.md").read_text()


def test_a_run_that_fails_before_its_first_checkpoint_leaves_no_folder(
    setting, tmp_path, monkeypatch
):
    config = setting.replace(output=str(tmp_path / "run"), steps=1)
    heads = config.replace(strategy="scratch", shape={"num_key_value_heads": 3})
    with pytest.raises(UserError, match="num_attention_heads must be a multiple of num_key_value"):
        train(heads)
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with monkeypatch.context() as patch:
            patch.setattr(CCATrainer, "training_step", mock.Mock(side_effect=error))
            with pytest.raises(error):
                train(config)
        assert not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:
        patch.setattr(run, "_make_trainer", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault, message", [("lacks", "1 missing"), ("nan", "finite weights")])
def test_a_broken_checkpoint_neither_learns_nor_teaches(setting, tmp_path, fault, message):
    name = save_tiny_model(tmp_path / "model")
    weights = load_file(f"{name}/model.safetensors")
    broken = "model.layers.1.mlp.down_proj.weight"
    if fault == "lacks":
        del weights[broken]
    else:
        weights[broken][3, 4] = float("nan")
    save_file(weights, f"{name}/model.safetensors", {"format": "pt"})
    config = setting.replace(model=name, distil=0.5)
    with pytest.raises(UserError, match=f"{message}.*{broken}"):
        student.make_model(config, student.prepare_config(config), bfloat16=False)
    with pytest.raises(UserError, match=f"{message}.*{broken}"):
        load_teacher(config, bfloat16=False, device=torch.device("cpu"))


def test_every_step_learns_the_first_and_the_last_too(tmp_path):
    config = TrainConfig(output=str(tmp_path), steps=10, warmup_steps=4, learning_rate=1.0)
    trainer = CCATrainer(torch.nn.Linear(2, 2), arguments_of(config))
    trainer.create_optimizer_and_scheduler(config.steps)
    rates = []
    for _ in range(config.steps):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True) and 0 < rates[-1] < 0.1


def test_the_help_has_groups_and_options_take_what_they_show(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("Speed and memory", "hub:NAME[@REVISION][:CONFIG[:SPLIT]]", "--sink-size"):
        assert text in shown
    parsed = []
    monkeypatch.setattr(run, "train", lambda config: parsed.append(config) or sys.exit(0))
    for options in (
        ("--raw-heads", "0", "--sinks", "4"),
        ("--lora-rank", "2", "--sink-size", "8"),
    ):
        with pytest.raises(SystemExit):
            main(["train", "paper", *options])
    assert [(config.lora_rank, config.sink_size) for config in parsed] == [(8, 4), (2, 8)]
    assert main(["train", "--shape", "{x}"]) == 2
    assert "error: shape must be JSON, got '{x}': Expecting" in capsys.readouterr().err
