"""The card of a trained model beside the model that it was: the table, and how it is measured."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_model import save_tiny_model

pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytest.importorskip("datasets", reason="training reads its data with datasets")

import corecontext
from corecontext import terminal
from corecontext.data.needles import make_needles
from corecontext.files import UserError
from corecontext.train import TrainConfig, before_after, card
from corecontext.train.before_after import BOOK, Comparison, Line, _windows, compare
from corecontext.train.run import train

ROOT = Path(__file__).resolve().parents[1]


def test_a_card_compares_the_model_with_the_one_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(before_after, "NEEDLES", 1)
    monkeypatch.setattr(before_after, "LEAST_ROWS", 2)
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    model = save_tiny_model(tmp_path / "Tiny")
    config = TrainConfig(
        model=model,
        data=(str(ROOT / "docs/math.md"),),
        output=str(tmp_path / "run"),
        cache_dir=str(tmp_path / "cache"),
        context_length=1024,
        group_size=8,
        window_size=64,
        sink_size=16,
        fetch_groups=2,
        rope_theta=5e5,  # the run's, not the original model's
        steps=2,
        learning_rate=3e-3,
        warmup_steps=0,
        precision="float32",
    )
    train(config)
    page = (tmp_path / "run/model/README.md").read_text()
    rows = re.findall(r"^\| (Tiny.*|this model.*) \| ([\d.]+) \| (\d) of 1 \|$", page, re.M)
    titles = ["Tiny, full attention", "Tiny, this model's attention", "this model, trained"]
    assert [row[0] for row in rows] == titles
    assert "the second half of a window of 1024 tokens" in page
    assert f"raw tokens of 2 groups fetched by {config.fetch_index}" in page
    assert corecontext.from_pretrained(str(tmp_path / "run/model")).config.cca["fetch_groups"] == 2

    # Far perplexity of the first line by hand, in one pass over the book's beginning.
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(BOOK.read_text())["input_ids"][:1024])
    original = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.inference_mode():
        logits = original(ids[None]).logits[0]
    far = F.cross_entropy(logits[511:1023], ids[512:]).exp()
    values = [float(row[1]) for row in rows]
    assert values[0] == pytest.approx(float(far), abs=1e-3)
    assert values[2] < values[1]

    # Each row of training and each text of the comparison shows, also where there is no terminal.
    lines = capsys.readouterr().err.splitlines()
    title = "training, 2 steps, each of 1 x 1024 tokens"
    assert title in lines
    assert any(line.startswith(f"{title}: 50 %") for line in lines)
    assert any(line.startswith("comparison, this model, trained, 2 texts: 50 %") for line in lines)


def test_a_short_run_is_compared_on_a_window_alone(tmp_path):
    class Arguments:
        world_size = 1

    model = save_tiny_model(tmp_path / "Tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    positions = torch.arange(1024)
    rows = [{"input_ids": positions % 90, "position_ids": positions}] * 2
    config = TrainConfig(model=model, context_length=1024, accumulation=2)
    short = config.replace(steps=before_after.LEAST_ROWS // 2 - 1)
    measured = before_after._Measurement(short, tokenizer, rows, Arguments)
    assert (len(measured.windows), len(measured.needles)) == (1, 0)
    long = config.replace(steps=before_after.LEAST_ROWS // 2)
    measured = before_after._Measurement(long, tokenizer, rows, Arguments)
    assert (len(measured.windows), len(measured.needles)) == (2, before_after.NEEDLES)


def test_a_comparison_is_left_out_where_it_says_nothing(tmp_path):
    class Arguments:
        world_size = 1

    config = TrainConfig(model="m", context_length=1023)
    assert compare(config, tmp_path, None, None, Arguments) is None
    assert (
        compare(config.replace(context_length=2048, strategy="scratch"), *[None] * 3, Arguments)
        is None
    )
    Arguments.world_size = 2
    assert compare(config.replace(context_length=2048), tmp_path, None, None, Arguments) is None
    assert "Before and after" not in card._comparison_table(None)


def test_a_model_that_cannot_be_measured_leaves_the_comparison_out(tmp_path, monkeypatch, caplog):
    class Arguments:
        world_size = 1

    def fail(*args):
        raise UserError("logits must be finite")

    monkeypatch.setattr(before_after, "_Measurement", fail)
    assert compare(TrainConfig(model="m"), tmp_path, None, None, Arguments) is None
    assert "no comparison with the original model: logits must be finite" in caplog.text


def test_lack_of_memory_leaves_the_comparison_out(tmp_path, monkeypatch, caplog):
    class Arguments:
        world_size = 1

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(before_after, "_Measurement", fail)
    assert compare(TrainConfig(model="m"), tmp_path, None, None, Arguments) is None
    assert "no memory for a comparison" in caplog.text


def test_a_tokenizer_without_places_leaves_needles_out():
    """A finished training must not end with an error of its card."""

    tokenizer = transformers.ByT5Tokenizer()
    config = TrainConfig(model="m", context_length=2048)
    measurement = before_after._Measurement(config, tokenizer, None, None)
    assert measurement.needles == [] and len(measurement.windows[0]) == 2048
    with pytest.raises(UserError, match="tokenizer must give the places of its tokens"):
        make_needles("a text", tokenizer, 100, 1, seed=0)


def test_windows_are_rows_of_one_document():
    whole = {"input_ids": torch.arange(6), "position_ids": torch.arange(6)}
    split = {"input_ids": torch.arange(6), "position_ids": torch.tensor([0, 1, 2, 0, 1, 2])}
    assert len(_windows([split, whole, whole])) == 2 and _windows([split]) == _windows(None) == []
    assert len(_windows([split] * 9 + [whole] * 9)) == before_after.WINDOWS


def test_the_table_has_a_column_of_needles_where_there_are_any():
    comparison = Comparison([Line("m", 3.0, 2)], 4, 2048, 10, 2016)
    text = card._comparison_table(comparison)
    assert "| m | 3.000 | 2 of 10 |" in text and "4 windows of 2048 tokens" in text
    assert "hidden in 2016 tokens" in text
    text = card._comparison_table(comparison._replace(needles=0))
    assert "| m | 3.000 |\n" in text and "eedles" not in text
