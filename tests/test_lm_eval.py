"""lm-evaluation-harness with CCA: its tasks on local files agree with our own evaluations of the
same items."""

from __future__ import annotations

import json
import sys

import pytest
from test_eval import write_lines
from tiny_model import save_tiny_model
from transformers import AutoTokenizer

from corecontext.eval.items import Settings
from corecontext.eval.runner import run_task
from corecontext.eval.subject import ModelSubject
from corecontext.eval.task_table import TASKS
from corecontext.files import UserError
from corecontext.integrations import lm_eval as ours
from corecontext.loading import load

SIZES = {"group_size": 4, "window_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and data of two tasks."""
    folder = tmp_path_factory.mktemp("harness")
    save_tiny_model(folder / "model", max_length=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.eos_token = "\u0100"  # how byte-level tokenizers write byte 0
    tokenizer.save_pretrained(folder / "model")
    write_lines(folder / "lm_test.jsonl", [{"text": f"{i} is a number. " * 12} for i in range(3)])
    write_lines(
        folder / "multidoc_qa_pool.jsonl",
        [
            {"doc_id": f"d{i}", "title": f"Title {i}", "text": f"Passage {i} says word{i}."}
            for i in range(6)
        ],
    )
    write_lines(
        folder / "multidoc_qa_test.jsonl",
        [
            {
                "qid": f"q{i}",
                "question": f"what does {i} say",
                "answers": ["a", "b"],
                "gold_doc": f"d{i}",
            }
            for i in range(2)
        ],
    )
    return folder


def run(
    folder, out, *tasks: str, model_args: str = "", metadata: dict | None = None, batch: str = "2"
) -> dict:
    """The harness's results, from its command line."""
    given = (
        {"data": str(folder), "documents": [3], "positions": 2} if metadata is None else metadata
    )
    code = ours.main(
        [
            "run",
            "--model",
            "corecontext",
            "--model_args",
            f"pretrained={folder / 'model'},dtype=float32,group_size=4,window_size=32{model_args}",
            "--tasks",
            ",".join(tasks),
            "--metadata",
            json.dumps(given),
            "--device",
            "cpu",
            "--batch_size",
            batch,
            "--output_path",
            str(out),
        ]
    )
    assert code == 0
    return json.loads(next(out.rglob("results_*.json")).read_text())["results"]


def test_the_harness_scores_as_our_own_evaluations_do(folder, tmp_path):
    pytest.importorskip("lm_eval")
    found = run(folder, tmp_path, "corecontext_perplexity", "corecontext_multidoc_qa")
    subject = ModelSubject(load(str(folder / "model"), **SIZES))
    settings = Settings(documents=(3,), positions=2)
    asked = run_task(TASKS["multidoc_qa"], folder, settings, subject, {"method": "cca"})
    assert found["corecontext_multidoc_qa"]["exact_match,none"] == pytest.approx(
        sum(r.value for r in asked) / 4
    )
    assert found["corecontext_perplexity"]["bits_per_byte,none"] > 0


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
        chosen.append(subject.choose(subject.encode(prompt), options))
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
        core_bias=0.5,
    )
    assert lm.model.config.cca["group_size"] == 8 and lm.model.config.cca["core_bias"] == 0.5
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
    base = [
        "run",
        "--model",
        "corecontext",
        "--tasks",
        "corecontext_perplexity",
        "--device",
        "cpu",
        "--model_args",
    ]
    for arguments, message in (
        ([f"pretrained={folder / 'model'},window_size=0"], "window_size must be at least 1"),
        ([f"pretrained={folder / 'model'}"], "data must be given"),
        (
            [
                f"pretrained={folder / 'model'},num_groups=3,window_size=8",
                "--batch_size",
                "2",
                "--metadata",
                json.dumps({"data": str(folder)}),
            ],
            "batch_size must be 1 with num_groups",
        ),
    ):
        assert ours.main([*base, *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    with pytest.raises(UserError, match="Install the extra"):
        ours.register.__wrapped__()  # it is cached
