"""The reproduction in seconds: every stage, its records, its report; resuming; what it measures on
known answers."""

import copy
import dataclasses
import json
import math
import multiprocessing
import pickle
import random
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from test_eval import write_lines
from tiny_model import save_tiny_model
from transformers import LlamaForCausalLM

from corecontext import CCAConfig
from corecontext.eval.summary import Row as ScoreRow
from corecontext.eval.summary import to_records
from corecontext.files import UserError, alone_in
from corecontext.methods import name_of
from corecontext.record import append_records, make_record, read_records
from reproduction import paper
from reproduction.command import main
from reproduction.gains import gains
from reproduction.methods import SCRATCH, methods
from reproduction.miniature import add_lora, attention, make_model, merge_lora, nll_of
from reproduction.muon import Muon
from reproduction.on_checkpoint import METHODS, _page
from reproduction.optimizer_step import (
    Step,
    _fused_head,
    half_stream,
    head_loss,
    loss_backward,
    optimizers,
)
from reproduction.plan import stages, tuned
from reproduction.processes import run_on_gpus
from reproduction.quality_tables import brief_markdown
from reproduction.report import write_report
from reproduction.run import Miniature
from reproduction.scoring import (
    answers_right,
    cloze,
    fact_rows,
    time_and_cache,
    top_mass,
    window_nll,
)
from reproduction.sizes import BRIEF, FULL, SMOKE, brief_of
from reproduction.stages import KINDS
from reproduction.texts import END, SPLITS, Corpus, Row
from reproduction.training_loop import OutOfTime, Schedule, thinned, train

TINY = dataclasses.replace(SMOKE, levels=((64, 2), (128, 3)), length=128, step_tokens=256)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The whole thing in its smallest size, from the command line."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("mini") / "out"
    json_path = out.parent / "quality.jsonl"
    assert main(["--smoke", "--out", str(out), "--device", "cpu", "--json", str(json_path)]) == 0
    return out, json_path


@pytest.fixture
def unpainted(done, monkeypatch):
    """Pictures of later reports are drawn and not painted, which `done` does once for all."""
    picture = next(done[0].glob("*.png"))
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **options: shutil.copy(picture, path)
    )


def test_every_stage_leaves_records_and_the_report_ties_numbers_to_them(done):
    out, json_path = done
    plan = stages(SMOKE)
    assert {stage.name for stage in plan} == {
        path.parent.name for path in out.glob("*/records.jsonl")
    }
    records = [one for stage in plan for one in read_records(out / stage.name / "records.jsonl")]
    assert len(records) == len(read_records(json_path)) > 150
    of_cloze = {
        one.params.get("num_groups"): one.params.get("group_size")
        for one in records
        if one.params.get("task") == "cloze"
    }
    assert of_cloze == {None: None, 16: 14, 64: 4}  # 255 tokens, of which 32 are the window's
    page = (out / "report.html").read_text(encoding="utf-8")
    anchors, links = set(re.findall(r'id="([\w-]+)"', page)), re.findall(r'href="#([\w-]+)"', page)
    assert len(links) > 150 and set(links) <= anchors
    listed = [
        json.loads(re.sub("&quot;", '"', one)) for one in re.findall(r"<pre>(.*?)</pre>", page)
    ]
    assert [one["value"] for one in listed[: len(records)]] == [one.value for one in records]
    for number, shown in re.findall(r'<a href="#r(\d+)">([\d.-]+) %</a>', page):
        assert float(shown) == pytest.approx(100 * listed[int(number)]["value"], abs=0.051)
    assert page.count("data:image/png;base64,") == len(list(out.glob("*.png"))) >= 5
    plain = re.sub(r"base64,[^\"]+", "", page)
    assert "://" not in plain
    assert "NaN" not in plain
    assert "nan" not in re.findall(r">([^<]*)</a>", plain)
    # Models that have learned nothing have no gain to keep.
    assert plain.count("Not measured yet") <= 1
    for one in paper.rows():
        assert one.here in anchors or (not one.here and one.why)
        assert one.why.endswith(".")


def test_shares_of_the_gain_are_of_whole_measurements_only(done):
    """Not of short trainings, nor of other sizes at test time, which all lie in one folder."""
    out, _ = done
    whole = {
        stage.name
        for stage in stages(SMOKE)
        if stage.kind in ("scratch", "zero", "adapt") and not stage.sizes
    }
    assert {path.parent.name for path in out.glob("*/far_test.npy")} == whole
    assert {path.parent.name for path in out.glob("*/far_val.npy")} == whole
    assert {one.params["stage"] for one in read_records(out / "derived.jsonl")} <= whole


def test_a_report_says_what_is_not_measured_yet(done, unpainted, tmp_path):
    out, _ = done
    records = [
        one for stage in stages(SMOKE) for one in read_records(out / stage.name / "records.jsonl")
    ]
    for split in SPLITS:
        shutil.copy(out / f"tokens_{split}.npy", tmp_path)
    for left in ("cost", "flexibility", "full-0", "maps", "cloze"):
        page = write_report(
            tmp_path, [one for one in records if one.params["stage"] != left], SMOKE
        ).read_text()
        assert "not measured" in page.lower() and "nan" not in re.findall(r">([^<]*)</a>", page)
    assert "Not measured yet" in write_report(tmp_path, [], SMOKE).read_text()


def test_run_again_runs_nothing_and_other_runs_are_refused(done, unpainted, capsys, tmp_path):
    out, json_path = done
    before = json_path.read_bytes()
    assert main(["--smoke", "--out", str(out), "--device", "cpu", "--json", str(json_path)]) == 0
    assert json_path.read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for arguments, message in (
        (["--data", str(tmp_path), "--out", str(out)], "must be a folder of this run"),
        (["--smoke", "--out", str(tmp_path / "mine")], "got other files"),
        (["--out", str(tmp_path / "a")], "data must be given"),
        (["--out", str(tmp_path / "a"), "--data", str(tmp_path)], "must hold lm_train.jsonl"),
        (["--out", str(tmp_path / "a"), "--model", "x"], "data must be given with a model"),
        (["--out", str(tmp_path / "a"), "--model", "x", "--minutes", "9"], "without a model"),
        (["--smoke", "--out", str(tmp_path / "a"), "--limit", "9"], "must be given with a mod"),
        (["--smoke", "--out", str(tmp_path / "b"), "--stage", "zzz"], "stage must be one of"),
        (["--smoke", "--out", str(tmp_path / "c"), "--finalist", "full_zero"], "finalist must"),
        (["--smoke", "--out", str(tmp_path / "d"), "--minutes", "0"], "minutes must be above 0"),
        (["--smoke", "--out", str(tmp_path / "mine/thesis.tex")], "must be a folder, or"),
        (["--smoke", "--out", str(tmp_path / "d"), "--gpus", "0"], "gpus must be at least 1"),
    ):
        assert main(["--device", "cpu", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_methods_have_one_cache_size():
    for size in (FULL,):
        entries, known = {}, methods(size)
        for name, one in known.items():
            if not isinstance(one.config, CCAConfig):
                continue
            per = [
                g
                for one_layer in one.config.layer_group_sizes
                or (one.config.group_size,) * size.layers
                for g in (
                    one_layer if isinstance(one_layer, tuple) else (one_layer,) * size.kv_heads
                )
            ]
            n, s = one.config.sink_size, one.config.window_size
            entries[name] = sum((size.length - n) // g + n + s + g - 1 for g in per) / len(per)
        assert len(entries) >= 12
        assert entries["sinks"] == entries["cca"]
        assert known["sinks"].config.sink_size
        for name, count in entries.items():
            assert count <= 1.1 * entries["cca"], name  # a larger group also has a larger open end
        more = stages(size, ("distilled",))
        assert sum(stage.method == "distilled" and stage.kind == "adapt" for stage in more) == len(
            size.seeds
        )


# Data


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    found = Corpus(tmp_path_factory.mktemp("corpus"), None)
    found.prepare()
    return found


@pytest.mark.parametrize("only_list", [False, True])
def test_fact_rows_hold_facts_and_their_answers(corpus, only_list):
    rng, seen = random.Random(5), 0
    for length in (200, 600, 1500):
        for _ in range(5):
            row = corpus.fact_row("val", rng, length, only_list)
            text = corpus.tokenizer.decode(row.ids.tolist())
            assert len(row.ids) <= length and (only_list or len(row.ids) > length - 40)
            for a, b, distance in row.answers:
                answer = corpus.tokenizer.decode(row.ids[a:b].tolist())
                question = corpus.tokenizer.decode(row.ids[:a].tolist()).rsplit("Recall: ", 1)[1]
                at = a - distance  # the token after the fact
                assert corpus.tokenizer.decode(row.ids[:at].tolist()).endswith(
                    f"{question}{answer}"
                )
                assert text.count(f"{question}{answer}") >= 2
                seen += 1
    assert seen > 40


def test_batches_follow_from_seed_and_step(corpus):
    a, b, c = (corpus.batch(seed, step, 256, 10) for seed, step in ((1, 7), (1, 7), (1, 8)))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and not torch.equal(a[0], c[0])
    assert a[0].shape == (10, 256) and (a[1][:5] == 1).all() and (a[1][5:] > 1).any(1).sum() >= 3


def test_questions_come_with_passages(corpus, tmp_path):
    tokens = tmp_path / "data"
    tokens.mkdir()
    corpus.tokenizer.save(str(tokens / "tokenizer.json"))
    for split in ("train", "val", "test"):
        write_lines(
            tokens / f"lm_{split}.jsonl",
            [{"text": f"{split} text number {i}. " * 20} for i in range(4)],
        )
        if split != "val":
            write_lines(
                tokens / f"multidoc_qa_{split}.jsonl",
                [
                    {
                        "qid": f"{split}{i}",
                        "question": f"what is {i}",
                        "answers": [f"word{i}"],
                        "gold_doc": f"d{i}",
                    }
                    for i in range(3)
                ],
            )
    write_lines(
        tokens / "multidoc_qa_pool.jsonl",
        [{"doc_id": f"d{i}", "title": "T", "text": f"{i} is word{i}."} for i in range(6)],
    )
    own = Corpus(tmp_path, str(tokens))
    assert own.prepare() == {
        split: sum(len(f"{split} text number {i}. " * 20) + 1 for i in range(4))  # and an end each
        for split in ("train", "val", "test")
    }
    row = own.qa_row("test", own.questions("test")[1], random.Random(0), 3, 2000)
    text = own.tokenizer.decode(row.ids.tolist())
    assert text.endswith("Question: what is 1\nAnswer: word1\n") and "1 is word1." in text
    a, b, _ = row.answers[0]
    assert own.tokenizer.decode(row.ids[a:b].tolist()) == " word1\n"
    assert own.qa_row("test", own.questions("test")[1], random.Random(0), 3, 100) is None
    for seed in range(6):
        row = own.planted_qa_row(random.Random(seed), 4, 2000)
        (a, b, distance), text = row.answers[0], own.tokenizer.decode(row.ids.tolist())
        question = own.tokenizer.decode(row.ids[:a].tolist()).rsplit("Recall: ", 1)[1]
        fact = question + own.tokenizer.decode(row.ids[a:b].tolist())
        assert text.count(fact) == 2 and text.count("Document [") == 4 and b == len(row.ids)
        assert own.tokenizer.decode(row.ids[: a - distance].tolist()).endswith(f"{fact}\n")
    assert own.planted_qa_row(random.Random(0), 4, 200) is None
    batch, weights = own.batch(0, 0, 600, 10)
    assert "Answer: word" in own.tokenizer.decode(batch[9].tolist()) and weights[9].max() > 1
    for rows, texts, questions in ((8, 4, 1), (16, 8, 2), (10, 5, 1), (4, 2, 0)):
        batch, weights = own.batch(0, 1, 600, rows)
        assert (weights[:texts] == 1).all()
        assert ["Answer: word" in own.tokenizer.decode(row.tolist()) for row in batch] == (
            [False] * (rows - questions) + [True] * questions
        )
    with pytest.raises(UserError, match="must hold tokenizer.json"):
        Corpus(tmp_path / "x", str(tmp_path)).encode("a")


# Training


def test_processes_share_a_folder_and_do_nothing_twice(tmp_path, monkeypatch, capfd):
    out, stages_wanted = str(tmp_path / "o"), ("cca-0", "window-0", "mean-0", "maps")
    arguments = {
        "folder": out,
        "size": SMOKE,
        "data": None,
        "device": "cpu",
        "json_path": str(tmp_path / "all.jsonl"),
    }
    # A copy of this process has imported what a new one would import for seconds; a new one gets
    # its arguments pickled. With CUDA, autograd's threads would not be in a copy.
    method = "spawn" if torch.version.cuda else "fork"
    context = multiprocessing.get_context(method)
    asked = []
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: asked.append(name) or context)
    assert pickle.loads(pickle.dumps(arguments)) == arguments
    with capfd.disabled():  # copies write where they are told to
        assert run_on_gpus(2, arguments, stages_wanted)
    assert asked == ["spawn"]
    run = Miniature(**arguments)
    assert run.is_all_done(stages_wanted) and not run.is_all_done()
    assert [one.to_json() for one in sorted(read_records(tmp_path / "all.jsonl"), key=str)] == [
        one.to_json() for one in sorted(run.records(), key=str)
    ]
    logs = [(tmp_path / "o" / f"gpu-{number}.log").read_text() for number in (0, 1)]
    begun = re.findall(r"^([\w.-]+) \(\d+ to go\)", "\n".join(logs), re.M)
    assert sorted(begun) == sorted(
        {"prepare", "tune-full-0.001", "tune-full-0.002", "base-0", *stages_wanted}
    )
    with pytest.raises(UserError, match="^reproducing failed on GPU 0: see .*gpu-0.log"):
        run_on_gpus(
            1,
            {
                **arguments,
                "folder": str(tmp_path / "p"),
                "size": dataclasses.replace(SMOKE, rates=(math.nan,)),
            },
            ("base-0",),
        )


def test_a_stage_that_fails_stops_only_those_that_need_it(tmp_path, monkeypatch, capsys):
    run = Miniature(tmp_path / "o", SMOKE, None, "cpu")
    real, tried = KINDS["adapt"], []

    def adapt(work, stage):
        tried.append(stage.name)
        if stage.name in ("cca-0", "mean-0"):
            raise ZeroDivisionError(stage.name)
        yield from real(work, stage)

    monkeypatch.setitem(KINDS, "adapt", adapt)
    with pytest.raises(ZeroDivisionError, match="^mean-0$"):  # the first in order
        run.run(("flexibility", "window-0", "mean-0", "maps"))
    assert sorted(tried) == ["cca-0", "mean-0", "window-0"]
    assert run.is_done("window-0") and run.is_done("maps") and not run.is_done("flexibility")
    assert "cca-0 failed" in capsys.readouterr().out


def test_a_folder_moves_with_its_data_and_says_what_was_left_behind(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "lm_train.jsonl", [{"text": "a b"}])
        write_lines(tmp_path / name / "lm_val.jsonl", [{"text": name}])
    shutil.copytree(tmp_path / "here", tmp_path / "copied")
    Miniature(tmp_path / "o", SMOKE, str(tmp_path / "here"), "cpu")
    Miniature(tmp_path / "o", SMOKE, str(tmp_path / "copied"), "cpu")
    with pytest.raises(UserError, match="must be a folder of this run"):
        Miniature(tmp_path / "o", SMOKE, str(tmp_path / "there"), "cpu")
    run = Miniature(tmp_path / "p", SMOKE, None, "cpu")
    assert run.run(("maps",))
    (tmp_path / "p/tokens_val.npy").unlink()
    assert not run.is_done("prepare")
    (tmp_path / "p/base-0/weights.pt").unlink()
    with pytest.raises(UserError, match="base-0/weights.pt' is needed and was left behind"):
        run.run(("full_zero-0",))
    assert run.is_done("prepare")


def test_a_thin_curve_has_the_means_and_every_look():
    history = [
        {"step": i, "loss": float(i), "right": 0.5, **({"val": i} if i == 7 else {})}
        for i in range(1, 11)
    ]
    found = thinned(history, 3)
    assert [(one["step"], one["loss"]) for one in found] == [(4, 2.5), (7, 6.0), (10, 9.0)]
    assert [one.get("val") for one in found] == [None, 7, None] and thinned(history) == history


def test_a_stage_that_another_process_is_at_is_left_to_it(tmp_path):
    with alone_in(tmp_path) as mine, alone_in(tmp_path) as yours:
        assert mine and not yours
    with alone_in(tmp_path) as again:
        assert again


def test_texts_too_short_for_facts_are_refused(corpus):
    with pytest.raises(
        ValueError, match="^length must leave room for facts and their questions, got 12 tokens"
    ):
        fact_rows(corpus, 12, 2)


def test_interrupted_training_ends_as_if_it_had_not_been(corpus, tmp_path):
    ends = []
    for cut in (None, 1, 3):
        model, folder = make_model(TINY, 264, 0), tmp_path / str(cut)
        folder.mkdir()
        args = (corpus, Schedule(TINY.levels, TINY.step_tokens, 1e-3, 0), folder)
        if cut is not None:
            left = iter([1.0] * cut)
            with pytest.raises(OutOfTime):
                train(model, *args, time_left=lambda left=left: next(left, 0.0))
            model = make_model(TINY, 264, 1)  # another process
        history = train(model, *args)
        ends.append((history, model.state_dict()))
    for history, weights in ends[1:]:
        assert history == ends[0][0] and len(history) == 5
        assert all(torch.equal(weights[key], ends[0][1][key]) for key in weights)


def test_training_in_parts_is_training_at_once(corpus, monkeypatch):
    model = make_model(TINY, 264, 0)
    ids, weights = corpus.batch(0, 0, 400, 4)
    assert (weights > 1).any()
    ids = ids.long()
    for module in ("miniature", "optimizer_step"):
        monkeypatch.setattr(f"reproduction.{module}.HEAD_TOKENS", 50)
    loss, right = loss_backward(model, ids, weights, "cpu", None)
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    nll = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten().float()
    whole = (nll * weight).sum() / weight.sum()
    whole.backward()
    assert float(loss) == pytest.approx(float(whole), rel=1e-5)
    assert float(right) == pytest.approx(
        float((logits.argmax(-1) == ids[:, 1:].flatten())[weight > 1].float().mean())
    )
    for one, p in zip(grads, model.parameters()):
        torch.testing.assert_close(one, p.grad, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(nll_of(model, ids)[0].flatten(), nll.detach(), rtol=1e-4, atol=1e-5)
    # its own predictions teach nothing new: half of the loss is then zero
    taught, _ = loss_backward(model, ids, weights, "cpu", copy.deepcopy(model))
    assert float(taught) == pytest.approx(float(loss) / 2, rel=1e-4)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler"),
            ],
        ),
    ],
)
def test_the_compiled_head_is_the_plain_one(backend, compile_by):
    compile_by(backend)
    _fused_head.cache_clear()

    def run(head):
        generator = torch.Generator().manual_seed(0)
        weight, hidden, taught = (torch.randn(n, 32, generator=generator) for n in (100, 40, 40))
        leaves = [weight.requires_grad_(), hidden.requires_grad_()]
        target, weights = torch.arange(40), 1.0 + torch.arange(40) % 3
        found = []
        for more in ((), (weight.detach(), taught)):
            loss, right = head(weight, hidden, target, weights, *more)
            found += [loss.detach(), right, *torch.autograd.grad(loss, leaves)]
        return found

    for ours, plain in zip(run(_fused_head()), run(head_loss)):
        torch.testing.assert_close(ours, plain)


def test_muon_by_shape_is_torchs_muon():
    """Over several steps with changing rates, tall, wide and square matrices, and one without a
    gradient."""
    shapes, models = ((8, 8), (8, 24), (24, 8), (8, 8), (24, 8), (5, 5)), []
    for kind in (torch.optim.Muon, Muon):
        generator = torch.Generator().manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = kind(weights, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            for weight in weights[:-1]:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        models.append((weights, optimizer.state_dict()))
    (theirs, state), (ours, own) = models
    for one, other in zip(theirs, ours):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)  # updates are rounded to bfloat16
    assert torch.equal(theirs[-1], ours[-1]) and own["state"].keys() == state["state"].keys()
    for key, values in state["state"].items():
        torch.testing.assert_close(own["state"][key]["momentum_buffer"], values["momentum_buffer"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "name", ["full", "cca", "window", "streaming_llm", "mean", "raw_1", "duo_1"]
)
def test_captured_steps_are_the_uncaptured_ones(name):
    """Several contexts one after the other, rates that change; to the rounding of gradients summed
    in any order."""

    def losses(captures):
        model = make_model(FULL, 1024, 0).cuda().train()
        with attention(model, methods(FULL)[name].config):
            opts = optimizers(model, 1e-3, "all")
            run = Step(model, opts, "cuda", None)
            run.captures = captures
            draw, found = torch.Generator().manual_seed(0), []
            with half_stream(model, "cuda"):
                for length in (512, 1024):
                    for i in range(12):
                        # Few, to be learned.
                        ids = torch.randint(64, (4, length), generator=draw, dtype=torch.int32)
                        run.set_rates(1 / (1 + i))
                        found.append(run(ids, torch.ones(4, length, dtype=torch.uint8))[0])
            assert run.recorded == captures
        return torch.stack(found).tolist()

    plain, captured = losses(False), losses(True)
    assert captured == pytest.approx(plain, rel=2e-3) and plain[-1] < plain[0] - 0.02


def test_partial_training_moves_projections_alone(corpus, tmp_path):
    model, method = make_model(TINY, 264, 0), methods(TINY)["partial"]
    before = copy.deepcopy(model.state_dict())
    with attention(model, method.config):
        train(model, corpus, Schedule(((128, 2),), 256, 1e-3, 0, method.trains), tmp_path)
    moved = {
        key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert moved and all(re.search(r"\.[qkv]_proj\.", key) for key in moved)


def test_lora_moves_its_factors_alone_and_is_merged(corpus, tmp_path):
    pytest.importorskip("peft")
    model, method = make_model(TINY, 264, 0), methods(TINY)["lora"]
    add_lora(model)
    add_lora(other := make_model(TINY, 264, 0))
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values())
    )
    before, ids = copy.deepcopy(model.state_dict()), torch.arange(40)[None]
    with attention(model, method.config):
        train(model, corpus, Schedule(((128, 2),), 256, 1e-2, 0, method.trains), tmp_path)
        moved = {
            key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
        }
        assert moved and all("lora_" in key for key in moved)
        learned = model(ids).logits
        merge_lora(model)
        torch.testing.assert_close(model(ids).logits, learned, rtol=1e-4, atol=1e-5)
    assert any(
        not torch.equal(value, before[key])
        for key, value in model.state_dict().items()
        if "lora_" not in key
    )


def test_from_scratch_takes_the_best_rate_and_is_followed(done):
    out, _ = done
    for name in SCRATCH:
        tries = [
            one
            for rate in SMOKE.rates
            for one in read_records(out / tuned(name, rate) / "records.jsonl")
            if one.params["bucket"] == "all"
        ]
        best = min(tries, key=lambda one: one.value).params["lr"]
        stage = "base-0" if name == "full" else f"scratch-{name}-0"
        assert {
            one.params["lr"]
            for one in read_records(out / stage / "records.jsonl")
            if "lr" in one.params
        } == {best}
        steps = [
            json.loads(line) for line in (out / stage / "curve.jsonl").read_text().splitlines()
        ]
        assert [one["step"] for one in steps if "val_far" in one] == [2, 4] and len(steps) == 4


# Measuring


def test_measurements_know_right_from_wrong(corpus, monkeypatch):
    rows = fact_rows(corpus, 400, 6)
    assert sum(len(row.answers) for row in rows) >= 6
    monkeypatch.setattr(
        "reproduction.scoring.nll_of",
        lambda model, ids: (torch.ones(ids[:, 1:].shape), torch.ones(ids[:, 1:].shape, dtype=bool)),
    )
    assert all(right for _, right in answers_right(None, rows, "cpu"))
    first = rows[0].answers[0][0] - 1

    def misses(model, ids):
        hit = torch.ones(ids[:, 1:].shape, dtype=bool)
        hit[:, first : first + 1] = False
        return torch.ones(hit.shape), hit

    monkeypatch.setattr("reproduction.scoring.nll_of", misses)
    assert [right for _, right in answers_right(None, rows[:1], "cpu")].count(False) == 1
    monkeypatch.setattr(
        "reproduction.scoring.nll_of", lambda model, ids: (None, ids[:, 1:] % 5 > 0)
    )
    alone = [one for row in rows for one in answers_right(None, [row], "cpu")]
    # With padding.
    assert len({right for _, right in alone}) == 2 and answers_right(None, rows, "cpu") == alone
    monkeypatch.setattr(
        "reproduction.scoring.nll_of",
        lambda model, ids: (torch.ones(ids[:, 1:].shape), None),
    )
    nll = window_nll(None, corpus, TINY, "test", "cpu")
    assert nll.shape[1] == 127 and (nll == 1).all()
    known = {}

    def remembers(model, ids):  # the first ending is the right one
        known["rows"] = ids
        return torch.arange(4.0)[:, None].expand(4, ids.shape[1] - 1), None

    monkeypatch.setattr("reproduction.scoring.nll_of", remembers)
    assert all(cloze(None, corpus, TINY, "cpu")) and known["rows"].shape == (4, 128)
    even = np.full((2, 10, 10), 0.1)
    assert top_mass(even, 0.2) == pytest.approx(
        0.1 * np.mean([max(1, round(0.2 * (t + 1))) for t in range(5, 10)])
    )


def test_rows_are_not_padded_for_a_method_that_would_see_it(corpus, tmp_path, monkeypatch):
    """MInference picks keys by the last queries: a row's answer must be what it is when the row is
    alone."""
    model, method, rows = make_model(TINY, 264, 0).eval(), methods(TINY)["minference_zero"], []
    with torch.no_grad(), attention(model, method.config):
        for p in model.parameters():
            p.mul_(4)
        for n in (90, 120, 120, 101):
            ids = torch.randint(
                1, 264, (1, n), generator=torch.Generator().manual_seed(n + len(rows))
            )
            ids[0, -1] = model(ids[:, :-1]).logits[0, -1].argmax()
            rows.append(Row(ids[0].numpy(), [(n - 1, n, 0)]))
        assert all(right for _, right in answers_right(model, rows, "cpu", padded=False))
        assert not all(right for _, right in answers_right(model, rows, "cpu"))
        run, asked = Miniature(tmp_path / "o", TINY, None, "cpu"), []
        monkeypatch.setattr(
            "reproduction.scoring.answers_right",
            lambda *args: asked.append(args[3]) or [],
        )
        monkeypatch.setattr("reproduction.scoring.fact_rows", lambda *args: rows)
        run.work.corpus = corpus
        for chosen in (method, methods(TINY)["full"]):
            list(run.work.measure(model, chosen, run.plan[0], brief=True))
        assert asked == [False, True]


def test_caches_have_one_dtype_whatever_the_method():
    model, known = make_model(TINY, 264, 0).eval(), methods(TINY)
    before, entry = (
        copy.deepcopy(model.state_dict()),
        2 * TINY.layers * TINY.kv_heads * TINY.hidden // TINY.heads,
    )
    for name, entries in (
        ("full", TINY.length),
        ("cca", TINY.length // TINY.group + TINY.window + TINY.group - 1),
        ("window", TINY.window),
    ):
        with attention(model, known[name].config):
            seconds, held, _ = time_and_cache(model, TINY, "cpu", torch.bfloat16)
        assert held == 2 * entry * entries and len(seconds) == 1
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) and value.dtype == torch.float32


def test_gain_kept_is_a_share(tmp_path):
    text = np.arange(1, SMOKE.length + 1, dtype=np.uint16)
    for split in SPLITS:
        np.save(
            tmp_path / f"tokens_{split}.npy",
            np.concatenate((text, text, [END], text[:9], [END], text, text)),
        )
    for name, nll in (
        ("window-0", 2.0),
        ("full-0", 1.0),
        ("cca-0", [1.4] * 4),
        ("odd-0", 2.5),
        ("base-0", 0.0),
        ("mean-0", [1.1, 1.9, 1.9, 1.1]),
        ("max-0", [1.9, 1.9, 1.1, 1.1]),
        ("scratch-window-0", 4.0),
        ("scratch-cca-0", 1.0),
    ):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "far_val.npy", np.zeros(4) + nll)
    records = [
        make_record(
            "quality.perplexity",
            math.exp(2.0),
            {"bucket": "far", "method": name, "seed": 0, "stage": stage, "split": "val"},
        )
        for name, stage in (
            *(
                (name, f"{name}-0")
                for name in ("window", "full", "cca", "odd", "absent", "mean", "max")
            ),
            ("cca", "scratch-cca-0"),
        )
    ]
    size = dataclasses.replace(SMOKE, eval_tokens=4 * SMOKE.length)
    found = {one.params["stage"].removesuffix("-0"): one for one in gains(tmp_path, records, size)}
    assert set(found) == {"cca", "odd", "mean", "max", "scratch-cca"}
    assert found["scratch-cca"].value == pytest.approx(0.75)
    assert found["cca"].value == pytest.approx(0.6) and found["odd"].value == pytest.approx(-0.5)
    for name, low, high in (
        ("cca", 0.6, 0.6),
        ("mean", 0.5, 0.5),
        ("max", 0.1, 0.9),
    ):  # documents of two windows each
        assert found[name].params["low"] == pytest.approx(low)
        assert found[name].params["high"] == pytest.approx(high)


def test_later_methods_have_the_second_seed_and_finalists_all_from_there():
    plan = stages(FULL)
    seeds = {
        name: [
            one.seed
            for one in plan
            if one.method == name and one.kind in ("adapt", "zero") and not one.sizes
        ]
        for name in methods(FULL)
    }
    assert seeds["cca"] == [1, 0, 2] and seeds["max"] == [1] and seeds["sinks"] == [0]
    assert seeds["duo_1_distilled"] == [0, 2] and all(seeds.values())
    needs = {one.name: one.needs for one in plan}
    assert needs["cca-2"] == ("base-0",) and needs["raw_1-2"] == ("base-0", "layers-0")
    names = [one.name for one in plan]
    assert len(set(names)) == len(names)
    assert all(need in names for one in plan for need in one.needs)
    assert all(names.index(need) < names.index(one.name) for one in plan for need in one.needs)


def test_a_report_has_the_finalists_of_other_calls(tmp_path):
    size = dataclasses.replace(SMOKE, seeds=(0, 1), bases=(0, 0))
    asked, other = (
        Miniature(tmp_path, size, None, "cpu", finalists=names) for names in (("mean",), ())
    )
    stage = next(one.name for one in asked.plan if one.method == "mean" and one.seed == 1)
    assert stage not in [one.name for one in other.plan]
    (tmp_path / stage).mkdir()
    append_records(
        tmp_path / stage / "records.jsonl",
        [make_record("quality.perplexity", 3.0, {"stage": stage})],
    )
    assert [one.params["stage"] for one in other.records()] == [stage]


def test_a_checkpoints_page_claims_no_row_that_was_not_run():
    rows = [ScoreRow(name_of(x), "longbench", 4000, "", 0.5, 1, {}) for x in METHODS]
    page = _page("m", rows, [], to_records(rows, "cpu"))
    line = re.search(r"<td>Table 5</td><td>LongLoRA</td><td>(.*?)</td>", page)
    assert line[1] == "none" and '<td>CCA-LLM</td><td><a href="#longbench">' in page


def test_texts_too_short_for_a_window_are_refused_before_any_training(tmp_path):
    run = Miniature(tmp_path / "o", dataclasses.replace(SMOKE, length=1 << 20), None, "cpu")
    with pytest.raises(UserError, match="^lm_val must have a document of at least 1048576 tokens"):
        run.run(("base-0",))


def test_the_time_of_a_call_ends_it_cleanly(tmp_path, capsys):
    run = Miniature(tmp_path / "o", SMOKE, None, "cpu", minutes=0.01)
    assert not run.run(("base-0",)) and not run.is_done("prepare")
    run = Miniature(tmp_path / "o", SMOKE, None, "cpu")
    assert run.run(("prepare",)) and run.is_done("prepare") and not run.is_done("base-0")


def test_a_checkpoint_is_evaluated_from_files(tmp_path, capsys):
    save_tiny_model(tmp_path / "model", max_length=2048)
    data = tmp_path / "data"
    data.mkdir()
    write_lines(
        data / "lm_test.jsonl",
        [{"text": f"{i} is a number. " * 40, "domain": "math"} for i in range(2)],
    )
    write_lines(
        data / "multidoc_qa_pool.jsonl",
        [{"doc_id": f"d{i}", "title": "T", "text": f"{i} is word{i}."} for i in range(4)],
    )
    write_lines(
        data / "multidoc_qa_test.jsonl",
        [{"qid": "q", "question": "what is 1", "answers": ["word1"], "gold_doc": "d1"}],
    )
    arguments = ["--model", str(tmp_path / "model"), "--data", str(data)]
    arguments += ["--out", str(tmp_path / "out"), "--length", "256", "--documents", "2"]
    arguments += ["--limit", "1", "--device", "cpu"]
    assert main(arguments) == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    links, anchors = re.findall(r'href="#([\w-]+)"', page), set(re.findall(r'id="([\w-]+)"', page))
    assert set(links) <= anchors
    assert {"perplexity", "multidoc_qa", "flexibility", "paper"} <= anchors
    size = (tmp_path / "out" / "items.jsonl").stat().st_size
    assert main(arguments) == 0 and (tmp_path / "out" / "items.jsonl").stat().st_size == size
    assert main([*arguments[:3], str(tmp_path / "model"), *arguments[4:]]) == 2
    assert "must hold the files of a task" in capsys.readouterr().err


def test_what_draws_is_asked_for_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--smoke", "--out", str(tmp_path / "out")]) == 2
    assert "needs matplotlib, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_brief_size_measures_masses_and_fetch_untrained_and_adapted(tmp_path):
    """From one base; fetch has the device bytes of CCA, or says what it has more."""
    brief = {name: getattr(BRIEF, name) for name in ("groups", "windows", "seeds", "bases")}
    size = dataclasses.replace(SMOKE, **brief, is_brief=True, questions=2, eval_tokens=512)
    run = Miniature(tmp_path, size, None, "cpu")
    stages_run = ("full_zero-0", "window_zero-0", "fetch_zero-0", "fetch_equal_bytes-0", "cost")
    assert run.run(stages_run)
    records = run.records()
    of_stage = {record.params["stage"]: record.params for record in records}
    base, adaptation = 4 * 512, 2 * 512
    assert of_stage["fetch_zero-0"]["trained_tokens"] == base
    fetched = of_stage["fetch_equal_bytes-0"]
    assert fetched["trained_tokens"] == base + adaptation
    assert (fetched["fetch_groups"], fetched["index"], fetched["store"]) == (8, "pairs:2", "host")
    caches = {r.params["method"]: r for r in records if r.name == "model.cache_bytes"}
    assert caches["fetch_equal_bytes"].value <= caches["cca"].value < caches["fetch"].value
    assert caches["fetch"].params["host_bytes"] == caches["full"].value
    table = write_report(tmp_path, records, size).read_text()
    assert brief_markdown(records, size) == table and "in host memory, MiB" in table
    assert {record.params.get("split") for record in records} == {None, "test"}
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 4 and rows[0][0] == "| full attention, not adapted"


def test_a_brief_size_can_have_a_base_of_the_users(tmp_path, capsys):
    base = save_tiny_model(tmp_path / "base")
    size = dataclasses.replace(brief_of(base), length=256, window=64, questions=2, eval_tokens=256)
    size = dataclasses.replace(size, levels=((256, 0),), adapt_tokens=256, adapt_steps=1)
    run = Miniature(tmp_path / "out", size, None, "cpu")
    run.work.workers = 0
    assert run.run(("full_zero-0", "cca_mass-0"))
    records = [r for r in run.records() if r.name == "quality.perplexity"]
    tokens = {r.params["stage"]: r.params["trained_tokens"] for r in records}
    assert tokens == {"full_zero-0": 0, "cca_mass-0": 256}
    given = LlamaForCausalLM.from_pretrained(base).state_dict()
    held = run.work.load("base-0").state_dict()
    assert all(torch.equal(held[name], given[name]) for name in given)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "gpt2"}')
    for arguments, message in (
        (["--base", base], "base must be given with brief"),
        (["--brief", "--smoke"], "smoke must not be given with brief"),
        (["--brief", "--base", str(tmp_path / "other")], "must be a Llama, got gpt2"),
    ):
        assert main(["--out", str(tmp_path / "o"), "--data", str(tmp_path), *arguments]) == 2
        assert message in capsys.readouterr().err
