"""lm-evaluation-harness with CCA: it chooses as our own evaluations do."""

import sys

import pytest
import torch
from tiny_model import save_tiny_model
from transformers import AutoTokenizer

from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from corecontext.integrations import lm_eval as ours
from corecontext.loading import load
from reproduction.suites.choices import choose

SIZES = {"group_size": 4, "window_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model."""
    folder = tmp_path_factory.mktemp("harness")
    save_tiny_model(folder / "model", max_length=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.eos_token = "\u0100"  # how byte-level tokenizers write byte 0
    tokenizer.save_pretrained(folder / "model")
    return folder


def test_the_harness_chooses_as_our_own_evaluations_do(folder):
    """As the harness's own tasks with several choices do, such as MMLU."""
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    model = str(folder / "model")
    lm = ours.register()(pretrained=model, device="cpu", dtype="float32", batch_size=2, **SIZES)
    subject = ModelSubject(load(model, **SIZES))
    options = tuple("ABCDEFGH")
    chosen = []
    for number in range(6):
        prompt = "A law of numbers. " * 12 + str(number)
        asked = [
            instance("loglikelihood", {}, (prompt, option), index)
            for index, option in enumerate(options)
        ]
        scores = [score for score, _ in lm.loglikelihood(asked)]
        chosen.append(choose(subject, subject.encode(prompt), options))
        assert chosen[-1] == scores.index(max(scores))
    assert len(set(chosen)) > 1


def test_settings_reach_the_model_and_matter(folder, tmp_path):
    pytest.importorskip("lm_eval")
    lm = ours.register()(
        pretrained=str(folder / "model"),
        device="cpu",
        dtype="float32",
        group_size=8,
        window_size=16,
        sink_size=3,
    )
    assert lm.model.config.cca["group_size"] == 8 and lm.model.config.cca["sink_size"] == 3
    default = ours.register()(pretrained=str(folder / "model"), device="cpu", dtype="float32")
    assert default.model.config.cca["window_size"] == 1024
    ours.register()(
        pretrained=str(folder / "model"), device="cpu", dtype="float32", num_groups=4, batch_size=1
    )


def test_mistakes_cost_one_line(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    with pytest.raises(UserError, match="tokenizer must have a token"):
        ours.register()(
            pretrained=save_tiny_model(tmp_path / "bare"), device="cpu", dtype="float32"
        )
    base = ["run", "--model", "corecontext", "--tasks", "arc_easy", "--device", "cpu"]
    assert ours.main([*base, "--model_args", f"pretrained={folder / 'model'},window_size=0"]) == 2
    assert "window_size must be at least 1" in capsys.readouterr().err
    lm = ours.register()(
        pretrained=str(folder / "model"), device="cpu", dtype="float32", num_groups=3, window_size=8
    )
    with pytest.raises(UserError, match="batch_size must be 1 with num_groups"):
        lm._model_call(torch.zeros(2, 9, dtype=torch.long))
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    with pytest.raises(UserError, match="Install the extra"):
        ours.register.__wrapped__()  # it is cached
