"""Measurements on a pretrained model, on a tiny one: far halves, needles, gains, records, and a
training of one step."""

import copy
import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_eval import write_lines
from tiny_model import save_tiny_model
from transformers import AutoTokenizer

from benchmarks.head_budget import Shape, Unit
from corecontext import Rotary
from corecontext.baselines import enabled
from corecontext.cache import CompactLayer
from corecontext.config import CCAConfig
from corecontext.data.needles import ANSWER, QUESTION, SENTENCE, make_needles
from corecontext.data.readers import read_lines
from corecontext.files import UserError
from corecontext.inference.engine import Engine
from corecontext.integrations.hf.adapter import add_adapter
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.loading import load, load_config
from corecontext.perplexity import hidden_nll
from corecontext.record import append_records, make_record, read_records
from corecontext.train.loss import Taught
from corecontext.train.train_config import load_recipe
from reproduction.command import main
from reproduction.real import attention as real_attention
from reproduction.real import figure as real_figure
from reproduction.real import plan as real_plan
from reproduction.real import served as real_served
from reproduction.real import tasks as real_tasks
from reproduction.real.attention import AttentionRun
from reproduction.real.figure import draw_frontier, draw_presets
from reproduction.real.gains import gain_kept, gain_records
from reproduction.real.hits import hit_rates
from reproduction.real.methods import METHODS, WITH_HEADS, Heads, Sizes, describe, equal_heads
from reproduction.real.model import Protocol, RealModel, far_half
from reproduction.real.next_tokens import READINGS, losses_behind
from reproduction.real.plan import Row
from reproduction.real.tables import (
    extended_markdown,
    real_markdown,
)
from reproduction.real.tasks import Question, list_questions, share_right
from reproduction.real.texts import cut_windows
from reproduction.real.training import Adaptation, RememberedTeacher, round_factors

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
SIZES = ["--length", "96", "--group-size", "4", "--window-size", "16", "--sink-size", "4"]
COUNTS = ["--windows", "2", "--needles", "2", "--needle-length", "320"]
COUNTS += ["--lists", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with long and short documents, and essays."""
    folder = tmp_path_factory.mktemp("data")
    texts = [f"Text {i}: " + " ".join(str(7 * i + j) for j in range(120)) for i in range(4)]
    documents = [{"text": "too short", "id": "short"}]
    documents += [{"text": text, "id": f"document {i}"} for i, text in enumerate(texts)]
    write_lines(folder / "lm_test.jsonl", documents)
    write_lines(folder / "lm_train.jsonl", documents)
    essays = "A man went out to walk. The way was long.\n\nHe came home late and slept well. " * 40
    write_lines(folder / "haystack_essays.jsonl", [{"text": essays}])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model whose tokenizer has a chat template."""
    name = save_tiny_model(tmp_path_factory.mktemp("real") / "Tiny")
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(name)
    return name


def test_windows_lie_inside_documents(data, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = {f"document {i}": f"Text {i}: " for i in range(4)}
    windows = cut_windows(data / "lm_test.jsonl", tokenizer, 96, 3, most=1)
    assert [window.origin for window in windows] == [f"{name}, token 0" for name in list(texts)[:3]]
    for window, beginning in zip(windows, texts.values()):
        assert len(window.ids) == 96
        assert tokenizer.decode(window.ids.tolist()).startswith(beginning)
    several = cut_windows(data / "lm_test.jsonl", tokenizer, 96, 3)
    assert [window.origin for window in several] == [f"document 0, token {i}" for i in (0, 96, 192)]
    with pytest.raises(UserError, match="length must be at most that of a document"):
        cut_windows(data / "lm_test.jsonl", tokenizer, 5000, 3)


def test_the_far_half_is_that_of_the_tokens_from_the_middle_on(data, model):
    loaded = load(model, method="full", device="cpu")
    protocol = Protocol(model, str(data), "", windows=2, device="cpu")
    real = RealModel(protocol, Sizes(length=96), Adaptation())
    losses = []
    for window in real.test_windows:
        ids = torch.tensor(window.ids.tolist())
        with torch.inference_mode():
            logits = loaded.model(ids[None]).logits[0]
        losses.append(F.cross_entropy(logits[47:95], ids[48:]))
    with AttentionRun(loaded, None) as run:
        nll = far_half(real._nll(run)).mean()
        # Keys and values of 2 layers, 2 KV heads of 16 numbers and 96 tokens, in float32.
        cache = {"device_bytes": 2 * 2 * 2 * 16 * 96 * 4, "host_bytes": 0}
        assert run.cache_size(range(96)) == cache
    assert float(nll) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert far_half(torch.arange(1, 8)).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("length", [320, 500])
def test_needles_are_in_the_template_at_their_depth(data, model, length):
    tokenizer = AutoTokenizer.from_pretrained(model)
    essays = next(read_lines(data / "haystack_essays.jsonl"))["text"]
    needles = make_needles(essays, tokenizer, length, 5, seed=3)
    before_text, after_text = QUESTION.split("{text}")
    assert [needle.depth for needle in needles] == [0, 0.25, 0.5, 0.75, 1]
    assert len({needle.number for needle in needles}) == 5
    for needle in needles:
        assert length - 3 <= len(needle.ids) <= length
        prompt = tokenizer.decode(needle.ids)
        assert prompt.startswith("<user>") and prompt.endswith(f"</><assistant>{ANSWER}")
        sentence = SENTENCE.format(number=needle.number)
        assert len(needle.number) == 7 and prompt.count(sentence) == 1
        assert tokenizer.decode(needle.answer).strip() == needle.number
        text = prompt.partition(before_text)[2].partition(after_text)[0]
        before, _, after = text.partition(sentence)
        longest = 40  # of a sentence of the essays
        assert abs(len(before) - needle.depth * (len(before) + len(after))) <= longest
        assert needle.is_found(f"It is {needle.number}!") and not needle.is_found(needle.number[1:])
    again = make_needles(essays, tokenizer, length, 5, seed=4)
    assert again[0].number != needles[0].number


def test_lists_have_their_values_in_the_text_and_in_the_answer(data, model, monkeypatch):
    monkeypatch.setattr(real_tasks, "LIST_TOKENS", 600)
    tokenizer = AutoTokenizer.from_pretrained(model)
    essays = next(read_lines(data / "haystack_essays.jsonl"))["text"]
    for question in list_questions(essays, tokenizer, 2, seed=3, records=4):
        text, answer = tokenizer.decode(question.ids).split("</><assistant>")
        records = answer.splitlines()
        assert len(set(records)) == len(question.places) == 4
        for record, part in zip(records, question.places):
            assert text.count(record) == 1
            assert tokenizer.decode(question.ids[part]).strip() == str(json.loads(record)["value"])
    with pytest.raises(UserError, match="must have at least 600 tokens"):
        list_questions("Too short.", tokenizer, 1, seed=3)


def test_first_choices_are_those_of_greedy_decoding(model, monkeypatch):
    """Under CCA, from its cache; those of full attention differ."""
    loaded = load(model, method="full", device="cpu")
    attention = CCAConfig.pooling(4, 8, sink_size=4, core_mass=False)
    prompt = AutoTokenizer.from_pretrained(model)("A man went out to walk. " * 8)["input_ids"]
    with enabled(loaded.model, attention):
        answer = Engine(loaded.model).generate(torch.tensor([prompt]), max_new_tokens=8)[0]
    text = [*prompt, *answer]
    wrong = [*text[:-1], (text[-1] + 1) % 256]
    first = len(prompt)
    with AttentionRun(loaded, attention) as run:
        right = [[True] * 8, [True] * 7 + [False]]
        assert run.is_first_choice([text, wrong], first).tolist() == right
        # Prompts of one length are read in batches of two.
        monkeypatch.setattr(real_attention, "TOKENS_AT_ONCE", 2 * len(text))
        halves = (slice(first, first + 4), slice(first + 4, len(text)))
        questions = [Question(ids, halves) for ids in (text, wrong, wrong)]
        questions.append(Question(text[:-1], (slice(first, len(text) - 1),)))
        assert share_right(run, questions) == (1 + 0.5 + 0.5 + 1) / 4
    with AttentionRun(loaded, None) as run:
        assert not run.is_first_choice([text], first).all()


def test_hits_are_those_of_slots_on_the_device(model):
    """The same as counted by a cache with so many slots."""
    loaded = load(model, method="full", device="cpu")
    config = CCAConfig(4, 8, sink_size=4, fetch_groups=3, fetch_index="pairs:2", prefill="fetch")
    ids = torch.randint(256, (120,), generator=torch.Generator().manual_seed(0))
    rates = hit_rates(loaded, config, ids.tolist(), 20, (3, 6, 100))
    decoder = loaded.model.get_decoder()
    for count, rate in rates.items():
        with enabled(loaded.model, config.replace(fetch_slots=count)), torch.inference_mode():
            cache = returned_cache(decoder(ids[None, :100], use_cache=True))
            first = None
            for i in range(100, 120):
                decoder(ids[None, i : i + 1], **with_cache(cache), use_cache=True)
                stores = [layer.compact.store for layer in cache.layers]
                counts = [
                    sum(int(getattr(x, name)) for x in stores) for name in ("hits", "lookups")
                ]
                first = first or counts
        hits, lookups = (b - a for a, b in zip(first, counts))
        assert rate == hits / lookups
    assert 0 < rates[3] < rates[6] < rates[100] < 1


def test_fetch_without_a_cache_is_that_of_its_cache(model):
    loaded = load(model, method="full", device="cpu")
    sizes = Sizes(96, 4, 8, 4, fetch_groups=2)
    heads = Heads(Shape(2, 2), (Unit(1, 0),))
    attention = METHODS["fetch"](sizes, heads)
    params = describe(attention, heads)
    assert (params["fetch_groups"], params["index"]) == (2, sizes.fetch_index)
    every = METHODS["fetch"](dataclasses.replace(sizes, fetch_groups=1000), heads)
    texts = torch.stack((torch.arange(96), torch.arange(100, 196)))
    losses = []
    for setting in (None, attention, every):
        with AttentionRun(loaded, setting) as run:
            losses.append(run.nll(texts.tolist()))
    assert (losses[1] - losses[0]).abs().max() > 1e-4
    torch.testing.assert_close(losses[2], losses[0])
    for store in ("device", "host"):
        cached = attention.replace(store=store)
        with enabled(loaded.model, cached), torch.inference_mode():
            for ids, expected in zip(texts, losses[1]):
                hidden = loaded.model.get_decoder()(ids[None], use_cache=True).last_hidden_state
                torch.testing.assert_close(hidden_nll(loaded.model, hidden, ids[None]), expected)
        with AttentionRun(loaded, cached) as run:
            assert (run.cache_size(texts[0].tolist())["host_bytes"] > 0) == (store == "host")


def test_tokens_behind_a_prompt_choose_one_by_one(model):
    """Behind a prompt that chooses so, too, their losses are those of one pass."""
    loaded = load(model, method="full", device="cpu")
    config = CCAConfig(4, 8, sink_size=4, fetch_groups=2, fetch_index="pairs:2")
    texts = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(0))
    losses = {
        name: losses_behind(loaded.model, config, reading, 32, texts.tolist())
        for name, reading in READINGS.items()
    }
    with AttentionRun(loaded, config) as run:
        torch.testing.assert_close(losses["query"], run.nll(texts.tolist())[:, -31:].double())
    for name in ("full", "share 16"):
        assert (losses[name] - losses["query"]).abs().max() > 1e-4
    every = config.replace(fetch_groups=1000)
    with AttentionRun(loaded, None) as run:
        full = run.nll(texts.tolist())[:, -31:].double()
    behind = losses_behind(loaded.model, every, READINGS["full"], 32, texts.tolist())
    torch.testing.assert_close(behind, full)


def test_the_command_measures_last_tokens_by_the_reading_of_their_prompt(data, model, tmp_path):
    output = tmp_path / "real.jsonl"
    command = ["real", "--model", model, "--data", str(data), *SIZES, *COUNTS, "--needles", "0"]
    command += ["--fetch-groups", "2", "--next-tokens", "32", "--output", str(output)]
    for method in ("full", "streaming_llm", "fetch"):
        command += ["--method", method]
    assert main(command) == 0
    records = read_records(output)
    values = {
        (r.params["method"], r.params["prompt"]): r.value
        for r in records
        if r.name == "real.next_perplexity"
    }
    readings = [("fetch", name) for name in READINGS]
    assert list(values) == [("full", None), ("streaming_llm", None), *readings]
    gains = {r.params["prompt"]: r.value for r in records if r.name == "real.next_gain_kept"}
    ends = (values["streaming_llm", None], values["full", None])
    assert gains == {name: gain_kept(values["fetch", name], *ends) for name in READINGS}
    assert main(command) == 0  # nothing is measured again
    assert len(read_records(output)) == len(records)
    # Far halves are measured besides, and hits by the number of slots.
    assert main([*command, "--next-tokens", "0", "--hit-steps", "8"]) == 0
    names = [r.name for r in read_records(output)[len(records) :]]
    assert names == [*3 * ["real.perplexity"], *4 * ["real.hit_share"], "real.gain_kept"]


def test_the_gain_is_that_of_the_logarithms():
    # docs/real-model.md: a window twice as wide, and DuoAttention
    assert gain_kept(9.39, 11.65, 7.46) == pytest.approx(0.484, abs=1e-3)
    assert gain_kept(5.760, 7.162, 5.530) == pytest.approx(0.842, abs=1e-3)
    assert gain_kept(7.46, 11.65, 7.46) == 1 and gain_kept(11.65, 11.65, 7.46) == 0


SERVER = """
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self, answer=()):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"token_ids": answer}]}).encode())

    def do_POST(self):
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        first = next(i for i in range(len(ids)) if all(15 <= x < 25 for x in ids[i : i + 7]))
        self.do_GET([] if "CUSTOM" in sys.argv else ids[first - 1 : first + 7])

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""
"""In place of vLLM's: without fetch it finds the seven digits of a prompt, tokens 15 to 24."""


def test_needles_are_asked_by_http(data, model, tmp_path, monkeypatch, capsys):
    program, output = tmp_path / "vllm.py", tmp_path / "vllm.jsonl"
    program.write_text(SERVER)
    monkeypatch.setattr(real_served, "VLLM", (sys.executable, str(program)))
    monkeypatch.setattr(real_served, "PAUSE_S", 0.05)
    command = ["served", "--model", model, "--data", str(data), "--needle-length", "320"]
    command += ["--output", str(output), "--needles", "2"]
    assert main([*command, "--method", "full", "--method", "default"]) == 0
    values = {r.params.get("preset"): (r.name, r.value) for r in read_records(output)}
    assert values == {None: ("vllm.accuracy", 1), "default": ("vllm.accuracy", 0)}
    program.write_text("raise SystemExit('no such option')")
    assert main(command) == 2
    assert "no such option" in capsys.readouterr().err


def far(method: str, value: float, **params) -> object:
    """Return a record of far perplexity."""
    sizes = {"model": "m", "trained_tokens": 0, "seed": 0, "length": 96, "windows": 2}
    settings = {"method": method, "window_size": 16, "task": "far", **sizes, **params}
    return make_record("real.perplexity", value, settings)


def test_gains_are_made_once_of_the_latest_rows_and_name_those_missing():
    records = [far("streaming_llm", 9.0), far("full", 3.0), far("cca", 8.0), far("full", 4.0)]
    gains, missing = gain_records(records, 16)
    assert not missing and [gain.params["method"] for gain in gains] == ["cca"]
    assert gains[0].value == pytest.approx(math.log(9 / 8) / math.log(9 / 4))
    assert gains[0].params["of"] == [9.0, 8.0, 4.0] and gains[0].params["over"] == 16
    assert gain_records([*records, *gains], 16) == ([], "")
    # Rows of another seed, training or window do not serve.
    others = [far("cca", 8.0, seed=1), far("cca", 7.0, trained_tokens=5, learning_rate=1e-4)]
    gains, missing = gain_records([*records, *others], 16)
    assert len(gains) == 1
    assert "method full, model m, trained_tokens 0, seed 1, length 96, windows 2" in missing
    assert "trained_tokens 5" in missing and "learning_rate 0.0001" in missing
    gains, missing = gain_records(records, 32)
    assert not gains and "window_size 32" in missing


def test_full_attention_trained_otherwise_has_a_gain():
    """Only the protocol's training bounds the gains."""
    trained = {"trained_tokens": 5, "learning_rate": 1e-4}
    ends = [far("streaming_llm", 9.0, **trained), far("full", 4.0, **trained)]
    other = far("full", 3.0, **trained, strategy="lora", lora_rank=2)
    gains, missing = gain_records([*ends, other], 16)
    assert not missing
    assert [gain.value for gain in gains] == [pytest.approx(math.log(9 / 3) / math.log(9 / 4))]


def test_gains_are_written_beside_rows_that_have_none(tmp_path, capsys):
    output = tmp_path / "real.jsonl"
    records = [far("streaming_llm", 9.0), far("full", 3.0), far("cca", 8.0)]
    append_records(output, [*records, far("fetch", 8.0, rope_theta=5e5)])
    assert main(["real", "--gains", "--window-size", "16", "--output", str(output)]) == 0
    assert [gain.params["method"] for gain in read_records(output)[4:]] == ["cca"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no gain without their ends: method fetch, model m, trained_tokens 0")
    assert "rope_theta 500000.0. Measure method streaming_llm, model m" in line


def test_methods_share_sizes_and_bytes():
    shape = Shape(30, 3)
    sizes = Sizes()
    assert equal_heads(sizes, shape) == 6
    heads = Heads(shape, (Unit(18, 2), Unit(23, 0), Unit(18, 0)))
    assert str(heads) == "18:2,23:0,18:0" and heads.by_layer()[18] == (2, 0)
    wide = METHODS["streaming_llm_wide"](sizes, heads)
    assert (wide.window_size, wide.sinks) == (1024, 16)
    paper = METHODS["cca_paper"](sizes, heads)
    assert paper == CCAConfig.pooling(16, 512, sink_size=0, core_mass=False)
    cca = METHODS["cca"](Sizes(core_mass=True), heads)
    assert cca == CCAConfig.pooling(16, 512, sink_size=16, core_mass=True)
    for method in WITH_HEADS[:2]:
        params = describe(METHODS[method](sizes, heads), heads)
        assert params["raw_heads"] == 3 and params["full_heads"] == str(heads)
        assert params["sink_size"] == 16
    assert describe(cca, heads)["raw_heads"] is None
    assert set(describe(None, heads).values()) == {None}
    bits = dataclasses.replace(sizes, fetch_group_size=32, fetch_index="bits:2", core_mass=True)
    equal = METHODS["fetch_equal_bytes"](bits, heads)
    assert (equal.group_size, equal.window_size, equal.store) == (32, 160, "host")


def test_windows_have_the_bytes_of_presets():
    heads = Heads(Shape(0, 0))
    sizes = Sizes(600, head_dim=16)
    for name in ("default", "small"):
        preset = METHODS[name](sizes, heads)
        assert preset.fetch_groups and preset.store == "host"
        layer = CompactLayer(preset, Rotary.from_theta(100.0, 16))
        layer.attend(*torch.randn(3, 1, 1, 600, 16, dtype=torch.bfloat16))
        window = METHODS[f"window_of_{name}"](sizes, heads)
        entry = 2 * 16 * 2
        assert window.sinks == 16
        assert 0 <= layer.nbytes - entry * (window.window_size + 16) < entry


def test_fetch_with_the_bytes_of_cca():
    sizes = Sizes(600, 8, 64, 8, core_mass=True, fetch_groups=4, head_dim=16)
    equal = METHODS["fetch_equal_bytes"](sizes, Heads(Shape(0, 0)))
    assert (equal.store, equal.fetch_slots, equal.window_size) == ("host", 0, 32)
    configs = (equal, equal.replace(window_size=40), sizes.cca().replace(core_mass=False))
    measured = []
    for config in configs:
        layer = CompactLayer(config, Rotary.from_theta(100.0, 16))
        layer.attend(*torch.randn(3, 1, 1, 600, 16, dtype=torch.bfloat16))
        measured.append(layer.nbytes)
        assert layer.host_bytes == (600 * 64 if config.fetch_groups else 0)
    assert measured[0] <= measured[2] < measured[1] < 1.1 * measured[0]
    # SmolLM2-135M at 8,192 tokens; with larger entries a smaller part goes to the index.
    assert Sizes(core_mass=True, fetch_groups=64).fetch_equal_bytes().window_size == 240
    assert Sizes(head_dim=128).fetch_equal_bytes().window_size == 256
    with pytest.raises(ValueError, match="window_size must be larger than 16 for the index 'bits"):
        Sizes(window_size=16, fetch_index="bits:4").fetch_equal_bytes()


def test_the_command_measures_each_method_once(data, model, tmp_path, capsys):
    output = tmp_path / "real.jsonl"
    methods = ["full", "streaming_llm", "cca", "duo_attention", "fetch_equal_bytes"]
    chosen = [option for method in methods for option in ("--method", method)]
    command = ["real", "--model", model, "--data", str(data), *SIZES, *COUNTS, *chosen]
    command += ["--output", str(output), "--full-heads", "1:0"]
    assert main(command) == 0, capsys.readouterr().err
    records = read_records(output)
    by_method = {
        method: [record for record in records if record.params["method"] == method]
        for method in methods
    }
    for method in methods:
        perplexity, accuracy = by_method[method][:2]
        assert (perplexity.name, accuracy.name) == ("real.perplexity", "real.accuracy")
        assert accuracy.params["length"] == 320 and accuracy.params["task"] == "needles"
        assert perplexity.params["length"] == 96 and perplexity.params["task"] == "far"
        assert perplexity.params["model"] == "tiny"
        assert perplexity.params["trained_tokens"] == 0
        assert (perplexity.params["host_bytes"] > 0) == (method == "fetch_equal_bytes")
        assert 0 < perplexity.params["device_bytes"] <= accuracy.params["device_bytes"]
    assert by_method["cca"][0].params["sink_size"] == 4
    assert by_method["cca"][0].params["core_mass"] is False
    assert by_method["duo_attention"][0].params["full_heads"] == "1:0"
    assert by_method["cca"][0].value != by_method["full"][0].value
    equal = by_method["fetch_equal_bytes"][0].params
    assert (equal["store"], equal["window_size"], equal["fetch_groups"]) == ("host", 12, 32)
    assert equal["device_bytes"] <= by_method["cca"][0].params["device_bytes"]

    assert main(command) == 0  # nothing is measured again
    assert len(read_records(output)) == len(records)
    assert main([*command, "--method", "nothing"]) == 2
    assert "method must be" in capsys.readouterr().err


def test_a_step_of_training_changes_the_model_and_is_recorded(data, model, tmp_path, capsys):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    output = tmp_path / "real.jsonl"
    command = ["real", "--model", model, "--data", str(data), *SIZES, *COUNTS, "--needles", "0"]
    command += ["--output", str(output), "--method", "cca", "--method", "full"]
    trained = [*command, "--steps", "1", "--rows", "2", "--rows-at-once", "1"]
    trained += ["--learning-rate", "3e-3", "--save", str(tmp_path / "saved")]
    assert main(command) == main(trained) == 0, capsys.readouterr().err
    values = {}
    records = read_records(output)
    costs = [record for record in records if record.params["task"] == "training"]
    names = ["real.training_s", "real.training_bytes"]
    assert [record.name for record in costs] == 2 * names
    assert all(record.value > 0 for record in costs)
    for record in records:
        if record in costs:
            continue
        assert record.name == "real.perplexity"
        values[record.params["method"], record.params["trained_tokens"]] = record.value
    assert values.keys() == {(method, t) for method in ("cca", "full") for t in (0, 2 * 96)}
    assert values["cca", 192] < values["cca", 0]
    assert values["full", 192] < values["full", 0]
    saved = sorted((tmp_path / "saved").iterdir())
    assert [folder.name.rpartition("-")[0] for folder in saved] == ["cca", "full"]
    # A trained model that is there is measured, not trained again.
    output.unlink()
    before = [file.stat().st_mtime_ns for folder in saved for file in folder.iterdir()]
    assert main(trained) == 0
    assert before == [file.stat().st_mtime_ns for folder in saved for file in folder.iterdir()]
    assert {record.value for record in read_records(output)} == {
        values["cca", 192],
        values["full", 192],
    }


@pytest.mark.parametrize("name", ["partial", "lora"])
def test_other_trainings_change_their_weights_only(name, data, model, tmp_path, capsys):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    pytest.importorskip("peft", reason="LoRA needs peft")
    output, saved = tmp_path / "real.jsonl", tmp_path / "saved"
    command = ["real", "--model", model, "--data", str(data), *SIZES, *COUNTS, "--needles", "0"]
    command += ["--steps", "1", "--rows", "1", "--rows-at-once", "1", "--learning-rate", "1e-2"]
    command += ["--output", str(output), "--method", "cca", "--save", str(saved)]
    assert main([*command, "--strategy", name]) == 0, capsys.readouterr().err
    assert read_records(output)[0].params["strategy"] == name
    (folder,) = saved.iterdir()
    weights = [load_file(Path(path) / "model.safetensors") for path in (model, folder)]
    changed = {key for key, x in weights[0].items() if not torch.equal(x, weights[1][key])}
    parts = {"partial": "qkv", "lora": "qkvo"}[name]
    wanted = {key for key in weights[0] if re.search(f"[{parts}]_proj", key)}
    if name == "lora":
        wanted |= {key for key in weights[0] if "mlp" in key}
        adapter = load_file(folder / "adapter/adapter_model.safetensors")
        assert {x.dtype for x in adapter.values()} == {torch.float8_e4m3fn}
    assert changed == wanted
    with pytest.raises(UserError, match="strategy must be"):
        Adaptation(strategy="none")


def test_factors_in_8_bits_change_the_weights_alike(model, tmp_path):
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    torch.manual_seed(0)
    plain = load(model, method="full", device="cpu").model
    before = {name: x.clone() for name, x in plain.state_dict().items()}
    lora = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules=["q_proj", "down_proj"])
    trained = peft.get_peft_model(plain, lora)
    # Layers whose factors differ in size by a hundred keep the same precision.
    for i, (name, x) in enumerate(trained.named_parameters()):
        if "lora_" in name:
            x.data.normal_(0.0, 1e-4 if i % 4 else 1e-2)
    exact = copy.deepcopy(trained).merge_and_unload().state_dict()
    round_factors(trained)
    trained.save_pretrained(tmp_path)
    added = load(model, method="full", device="cpu").model
    add_adapter(added, tmp_path)
    by_peft = load(model, method="full", device="cpu").model
    by_peft = peft.PeftModel.from_pretrained(by_peft, str(tmp_path)).merge_and_unload()
    for name, x in added.state_dict().items():
        torch.testing.assert_close(by_peft.state_dict()[name], x, rtol=0, atol=1e-9)
        change, wanted = x - before[name], exact[name] - before[name]
        assert (wanted.norm() > 0) == ("q_proj" in name or "down_proj" in name)
        # Two roundings to 4 bits of mantissa: at most 1/16 each, 1/27 in the mean square.
        assert (change - wanted).norm() <= 0.06 * wanted.norm()


TINY = {"windows": 2, "needles": 2, "needle_lengths": (320,), "lists": 0}


def published(data, model, tmp_path, *options):
    """Run the plan of published rows."""
    command = ["real", "--published", "--model", model, "--data", str(data), "--device", "cpu"]
    return main([*command, "--output", str(tmp_path / "real.jsonl"), *options])


def test_published_rows_without_records_are_measured(data, model, tmp_path, monkeypatch, capsys):
    output = tmp_path / "real.jsonl"
    sizes = Sizes(96, 4, 16, 4, core_mass=True, fetch_groups=2, fetch_group_size=8)
    rows = (
        Row("full", sizes, **TINY),
        Row("cca", dataclasses.replace(sizes, length=5000), **TINY),  # no document is as long
        Row("fetch_equal_bytes", sizes, **TINY | {"windows": 10**6}),
        Row("fetch_equal_bytes", sizes, **TINY),
        Row("duo_attention", sizes, **TINY, full_heads="1:0"),
    )
    monkeypatch.setattr(real_plan, "ROWS", rows)
    commands = [row.command(model) for row in rows]
    assert published(data, model, tmp_path, "--list") == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition(" s  ")[2] for line in listed[:-1]] == commands
    assert published(data, model, tmp_path, "--list", "--only", "--method duo") == 0
    [row, _] = capsys.readouterr().out.splitlines()
    assert row.endswith(commands[4])
    assert published(data, model, tmp_path, "--list", "--only", "--method none") == 2
    assert "only must be part of a missing row's command" in capsys.readouterr().err
    assert not output.exists()
    # The third row takes more than the limit; the second fails.
    assert published(data, model, tmp_path, "--limit-minutes", "9") == 2
    error = capsys.readouterr().err
    assert f"1 rows are left, the first: {commands[2]}" in error
    assert f"1 rows failed, the first: {commands[1]}: length must be at most" in error
    records = read_records(output)
    values = [r for r in records if r.name != "real.gain_kept"]
    assert [r.command for r in values] == [commands[i] for i in (0, 0, 3, 3, 4, 4)]
    assert published(data, model, tmp_path, "--list") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    # A row's command alone has the row's params.
    for i in (3, 4):
        alone = commands[i].replace("FOLDER", str(data)).split()[3:]
        assert main([*alone, "--output", str(output), "--device", "cpu"]) == 0
        assert "measured before" in capsys.readouterr().err
    assert len(read_records(output)) == len(records)
    assert published(data, model, tmp_path, "--steps", "1") == 2
    assert "settings of its rows, got --steps" in capsys.readouterr().err
    assert main(["real", "--list"]) == 2
    assert "must be given with published" in capsys.readouterr().err


def test_a_published_row_keeps_its_model(data, model, tmp_path, monkeypatch, capsys):
    """Where its measurement fails, it is not trained again."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    output = tmp_path / "real.jsonl"
    adaptation = Adaptation(1, rows=1, rows_at_once=1)
    sizes = Sizes(96, 4, 16, 4)
    rows = tuple(
        Row("cca", sizes, dataclasses.replace(adaptation, distil=share), **TINY)
        for share in (1.0, 0.5)
    )
    monkeypatch.setattr(real_plan, "ROWS", rows)
    saved = ("--save", str(tmp_path / "saved"))
    with monkeypatch.context() as broken:
        broken.setattr(RealModel, "_nll", lambda self, run: 1 / 0)
        assert published(data, model, tmp_path, *saved) == 2
    assert {record.params["task"] for record in read_records(output)} == {"training"}
    assert published(data, model, tmp_path, *saved) == 0, capsys.readouterr().err
    records = read_records(output)
    assert [record.name for record in records].count("real.training_s") == 2
    far = [record for record in records if record.name == "real.perplexity"]
    assert [record.params.get("distil") for record in far] == [1.0, None]
    # They share a teacher, not its share of the loss.
    assert far[0].value != far[1].value
    assert published(data, model, tmp_path, "--list") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 rows are missing")


def test_the_plan_has_the_default_settings_but_for_k():
    bits = real_plan.BITS
    recipe = load_recipe("fetch").cca().replace(fetch_groups=32, fetch_slots=0, prefill="fetch")
    assert bits.fetch_equal_bytes(bits.fetch_group_size) == real_plan.RECIPE.fetch() == recipe


def test_the_plan_has_each_row_once():
    for model in ("smollm2", "models/Gemma-3-270M.gguf"):
        rows = real_plan.rows_of(model)
        assert {row.next_tokens for row in rows} == {0, 512}
        commands = [row.command(model) for row in rows]
        assert len(set(commands)) == len(commands)


def test_a_teacher_sees_each_window_once():
    seen = []

    class Teacher:
        def __call__(self, ids, positions):
            seen.append(ids[0].tolist())
            return Taught(ids[0, :, None].float(), torch.eye(1), share=0.5)

    teacher = RememberedTeacher(Teacher())
    positions = torch.arange(3).expand(2, 3)
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for order in ([0, 1], [1, 0]):
        taught = teacher(rows[order], positions, share=0.25)
        assert taught.hidden.tolist() == rows[order].flatten()[:, None].tolist()
        assert taught.share == 0.25
    assert seen == rows.tolist()


def test_windows_beyond_the_models_with_a_new_rotary_base(data, model, tmp_path, capsys):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    output = tmp_path / "real.jsonl"
    command = ["real", "--model", model, "--data", str(data), *SIZES, *COUNTS, "--method", "full"]
    command += ["--length", "400", "--rope-theta", "5000", "--output", str(output)]
    assert main(command) == 2
    assert "rope-theta must come with steps" in capsys.readouterr().err
    saved = tmp_path / "saved"
    command += ["--steps", "1", "--rows", "1", "--rows-at-once", "1", "--save", str(saved)]
    assert main(command) == 0, capsys.readouterr().err
    config = load_config(str(next(saved.iterdir())))
    assert config.max_position_embeddings >= 400
    assert config.rope_parameters["rope_theta"] == 5000
    records = read_records(output)
    values = {r.params.get("position"): r.value for r in records if r.name == "real.perplexity"}
    parts = [math.log(values[f"{i}/8"]) for i in range(1, 9)]
    # Parts of 50 tokens, the last of 49; the far half are the last four.
    far = (50 * sum(parts[4:7]) + 49 * parts[7]) / 199
    assert math.log(values[None]) == pytest.approx(far, abs=0.02)
    (line,) = extended_markdown(records).splitlines()[2:]
    assert line.startswith("| full attention | 0.0 |") and f"| {values['8/8']:.2f} |" in line
    longer = [make_record(r.name, r.value, {**r.params, "trained_tokens": 10**6}) for r in records]
    lines = extended_markdown([*records, *longer]).splitlines()[2:]
    assert lines == [line, line.replace("| 0.0 |", "| 1.0 |", 1)]
    assert real_markdown(records, trained=True).count("\n") == 2


def test_a_point_of_the_figure_is_the_mean_of_its_seeds(monkeypatch, tmp_path):
    """The newest record of each seed counts."""
    drawn = []
    monkeypatch.setattr(real_figure, "_draw", lambda panel, points: drawn.extend(points))
    params = {"method": "full", "trained_tokens": 0, "task": "needles", "length": 7900}
    params |= {"model": real_figure.SMOLLM2, "core_mass": None, "device_bytes": 2 << 20}
    values = ((0, 0.1), (1, 0.5), (0, 0.7))
    records = [make_record("real.accuracy", v, {**params, "seed": seed}) for seed, v in values]
    draw_frontier(records, [], str(tmp_path / "real.svg"))
    assert [(point.label, round(point.percent)) for point in drawn] == [("full attention", 60)]


def test_the_figure_shows_a_point_for_each_method(tmp_path):
    def shown(method, value, task="needles", **changes):
        params = {"method": method, "trained_tokens": 0, "task": task, "length": 7900}
        params |= {"core_mass": True, "fetch_groups": 64, "group_size": 16, "index": "bounds"}
        params |= {"device_bytes": 2 << 20, "kept_bytes": 2 << 20, "compression": 8, "seed": 0}
        params |= {"model": real_figure.SMOLLM2}
        if task == "far":
            params["length"] = 8192
        name = "real.gain_kept" if task == "far" else "real.accuracy"
        return make_record(name, value, params | changes)

    records = [
        shown("full", 0.5, device_bytes=9 << 20),
        shown("cca", 0.3, "far"),
        shown("cca", 0.9, "far", core_mass=False),
        shown("fetch", 0.7, "far"),
        shown("fetch", 0.7, "far", index="mean"),
        shown("fetch_equal_bytes", 0.8, "far", index="bits:2", trained_tokens=8),
        shown("fetch_equal_bytes", 0.1, "far", index="tried", trained_tokens=8, distil=1.0),
        shown("fetch_equal_bytes", 0.1, "far", index="short", trained_tokens=2),
    ]
    cost = {"method": "full", "trained_tokens": 8, "task": "training", "length": 8192}
    cost["model"] = real_figure.SMOLLM2
    records.append(make_record("real.training_s", 60.0, cost))
    rivals = [shown("kvzip", 0.2), shown("kvzip", 0.4, compression=4), shown("cca", 0.9)]
    rivals.append(shown("snapkv", 0.4, length=4000))
    figure = tmp_path / "real.svg"
    draw_frontier(records, rivals, str(figure))
    text = figure.read_text()
    for label in (
        "full attention",
        "CCA",
        "Quest's selection, 1024 tokens",
        "fetch by bits:2",
        "KVzip",
    ):
        assert text.count(f"<!-- {label} -->") == 1, label
    assert not any(hidden in text for hidden in ("SnapKV", "mean", "tried", "by short"))
    # Presets beside the methods of their figure, on two models.
    other = {"model": real_figure.GEMMA, "length": 16384}
    records += [shown("default", 0.9, "far"), shown("default", 0.8, "far", **other)]
    rivals.append(shown("snapkv", 0.4))
    draw_presets(records, rivals, str(figure))
    text = figure.read_text()
    counts = {"default": 2, "CCA": 1, "full attention": 1, "KVzip": 1, "SnapKV": 1}
    assert all(text.count(f"<!-- {label} -->") == count for label, count in counts.items())
    assert "Quest" not in text
