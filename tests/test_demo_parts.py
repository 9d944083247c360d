"""The parts of the demo: answers, times and losses of one method, what is said of them, errors."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from corecontext.cost import cache_entries
from corecontext.data.retrieval import Fact
from corecontext.demo import compare, measure_method, report
from corecontext.demo.compare import TITLES, DemoResult, DemoSettings, plan, run_demo
from corecontext.demo.needle_prompts import ChatTask
from corecontext.demo.task import Question, Task, make_task
from corecontext.files import UserError
from corecontext.integrations.hf import adapter as hf_adapter
from corecontext.loading import load
from corecontext.perplexity import document_nll
from corecontext.record import make_record

FACT = Fact("passkey", "The pass key is 12.", "The pass key is", "12")


class Script:
    """A model that gives these tokens one after another, whatever it reads."""

    device = "cpu"

    def __init__(self, text: str) -> None:
        self.left = [ord(c) for c in text]
        self.read: list[list[int]] = []

    def __call__(self, tokens, use_cache, logits_to_keep, **cache):
        self.read.append(tokens[0].tolist())
        logits = torch.zeros(1, tokens.shape[1], 128)
        logits[0, -1, self.left.pop(0)] = 1.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


@pytest.mark.parametrize(
    "made, most, answer, calls",
    [
        (" ab.c", 9, "ab.", 4),
        ("ab\ncd", 9, "ab", 3),
        ("ab\0cd", 9, "ab", 3),
        ("abcd", 2, "ab", 2),
    ],
)
def test_an_answer_ends_with_its_sentence_its_line_the_model_or_the_most_tokens(
    made, most, answer, calls
):
    tokenizer = SimpleNamespace(
        eos_token_id=0,
        decode=lambda ids, skip_special_tokens=False: "".join(
            chr(i) for i in ids if i or not skip_special_tokens
        ),
    )
    model = Script(made)
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer)
    question = Question(FACT, 0.5, 3, [7, 8, 9], most)
    assert measure_method._answer(loaded, None, question) == answer
    assert model.read == [[7, 8, 9], *([ord(c)] for c in made[: calls - 1])]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("demo") / "model", max_length=2048)


def test_a_method_is_measured_on_the_whole_task(model, monkeypatch):
    monkeypatch.setattr(measure_method, "DECODE_STEPS", 3)
    monkeypatch.setattr(measure_method, "DECODE_WARM_UP", 2)
    monkeypatch.setattr(measure_method, "PREFILL_REPEATS", 2)
    original = measure_method._answer

    def answer(loaded, cache, question):
        length = cache.get_seq_length()
        original(loaded, cache, question)
        return str(length)

    monkeypatch.setattr(measure_method, "_answer", answer)
    loaded = load(model, group_size=4, window_size=16, device="cpu")
    ids = torch.randint(1, 256, (1, 120), generator=torch.Generator().manual_seed(0))
    mask = [i % 7 == 3 for i in range(120)]
    question = Question(FACT, 0.5, 3, [65, 66, 67], 4)
    task = Task(ids[0].tolist(), mask, [question, question])
    done: list[float] = []
    result = measure_method.run_method(loaded, task, done.append)
    assert sum(done) == pytest.approx(1.0)
    assert not any(layer._forward_hooks for layer in loaded.model.model.layers)
    nll = document_nll(loaded.model, ids)[torch.tensor(mask[1:])]
    assert result["perplexity"] == pytest.approx(float(nll.double().mean().exp()), rel=1e-5)
    assert result["tokens"] == 120 and result["sizes"] == loaded.sizes()
    assert len(result["first_token_s"]) == 2 and len(result["next_token_ms"]) == 3
    assert result["answers"] == ["120", "120"]  # each is asked on the prompt's own cache
    monkeypatch.setattr(measure_method, "PREFILL_BUDGET_S", 0.0)
    task = dataclasses.replace(task, questions=[])
    assert len(measure_method.run_method(loaded, task, done.append)["first_token_s"]) == 1


@pytest.mark.parametrize(
    "error, answer",
    [
        (UserError("no such model"), {"error": "no such model"}),
        (MemoryError(), {"error": "out of memory. Use --max-tokens with a smaller number."}),
        (torch.OutOfMemoryError(), {"error": "out of memory. Use --max-tokens with a smaller n"}),
        (RuntimeError("a bug"), None),
        (None, {"result": 5}),
    ],
    ids=repr,
)
def test_a_child_answers_in_lines_of_json(error, answer, monkeypatch, capsys):
    order = ("m", {"method": "cca"}, "task")
    stdin = SimpleNamespace(buffer=io.BytesIO(pickle.dumps(order)))
    monkeypatch.setattr(measure_method.sys, "stdin", stdin)
    asked = []

    def load(name, **options):
        asked.append((name, options))
        if error is not None:
            raise error
        return "loaded"

    def run_method(loaded, task, advance):
        asked.append((loaded, task))
        advance(0.25)
        return 5

    monkeypatch.setattr(measure_method, "load", load)
    monkeypatch.setattr(measure_method, "run_method", run_method)
    if answer is None:
        with pytest.raises(RuntimeError, match="a bug"):
            measure_method.main()
        return
    assert measure_method.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert asked[0] == ("m", {"method": "cca"})
    if error is None:
        assert asked[1] == ("loaded", "task")
        assert lines == [{"advance": 0.25}, answer]
    else:
        assert lines[0]["error"].startswith(answer["error"]) and len(lines) == 1


def test_a_childs_result_is_kept_whatever_it_says_after_it(monkeypatch):
    lines = ['{"advance": 0.5}', '{"result": {"tokens": 3}}', '{"advance": 0.5}']
    code = "".join(f"print({line!r});" for line in lines)
    monkeypatch.setattr(compare, "CHILD_COMMAND", [sys.executable, "-S", "-c", code])
    result = compare._run_in_subprocess("cca", DemoSettings(), Task([1], [True], []))
    assert result == {"tokens": 3}


def test_a_window_with_first_tokens_holds_as_many_entries_as_cca():
    common = {"dtype": "float16", "device": "meta"}
    settings = DemoSettings(8, 64, sinks=10, **common)
    task = Task([1] * 1000, [], [])
    methods = compare._methods(settings, task)
    assert list(methods) == ["full", "cca", "streaming_llm"]
    assert methods["full"] == {"method": "full", **common}
    cca = {"method": "cca", "group_size": 8, "window_size": 64, "sinks": 10, **common}
    assert methods["cca"] == cca
    window = cache_entries(1000, 8, 64, sinks=16) - 10
    rival = {"method": "streaming_llm", "window_size": window, "sinks": 10, **common}
    assert methods["streaming_llm"] == rival
    assert list(compare._methods(DemoSettings(), task)) == ["full", "cca"]


def test_a_chat_model_fetches_adapted_where_the_package_has_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_adapter, "ASSETS", tmp_path)
    (tmp_path / "smollm2_fetch").mkdir()
    settings = DemoSettings(8, 64, sinks=10, model="cache/SmolLM2-135M-Instruct.Q8_0.gguf")
    task = ChatTask([Question(FACT, 0.5, 3, [1, 2], 5)])
    methods = compare._methods(settings, task)
    assert list(methods) == ["full", "cca", "fetch"]
    sizes = {"group_size": 32, "window_size": 160, "fetch_groups": 32, "fetch_index": "bits:2"}
    assert methods["fetch"] == {**methods["cca"], **sizes, "store": "host"}
    (tmp_path / "smollm2_fetch/adapter_config.json").write_text("{}")
    methods = compare._methods(settings, task)
    assert methods["adapted"] == {**methods["fetch"], "adapter": "smollm2"}
    assert hf_adapter.find_adapter("smollm2") == "smollm2"
    # Other sizes of the same family have no adapter.
    for name in ("cache/Other", "SmolLM2-360M-Instruct", "cache/smollm2-135m"):
        other = dataclasses.replace(settings, model=name)
        assert list(compare._methods(other, task)) == ["full", "cca", "fetch"]


def test_an_adapter_is_added_to_the_weights(model, tmp_path):
    loaded = load(model, method="full", device="cpu").model
    name = "model.layers.1.mlp.down_proj.weight"
    weight = loaded.get_parameter(name)
    before = weight.detach().clone()
    down, up = torch.randn(3, before.shape[1]), torch.randn(before.shape[0], 3)
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 6.0}')
    layer = "base_model.model.model.layers.1.mlp.down_proj"
    matrices = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    save_file(matrices, tmp_path / "adapter_model.safetensors")
    hf_adapter.add_adapter(loaded, tmp_path)
    torch.testing.assert_close(weight, before + 2 * up @ down)
    matrices[f"{layer}.lora_B.weight"] = up[1:].contiguous()
    save_file(matrices, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="must fit the model"):
        hf_adapter.add_adapter(loaded, tmp_path)
    with pytest.raises(UserError, match="must be a folder with adapter_config.json"):
        hf_adapter.add_adapter(loaded, tmp_path / "none")


def test_the_packages_adapter_fits_its_model():
    """SmolLM2-135M-Instruct, whose weights are not needed for that."""
    folder = hf_adapter.ASSETS / "smollm2_fetch"
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    hf_adapter.add_adapter(model, "smollm2")
    matrices = load_file(folder / "adapter_model.safetensors")
    assert len(matrices) == 2 * 7 * config.num_hidden_layers
    assert all(x.float().isfinite().all() and x.float().any() for x in matrices.values())
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8 * 2**20


def test_an_adapter_of_another_formula_is_refused(tmp_path):
    """It would be added at a wrong scale, or in part."""
    plain = {"r": 3, "lora_alpha": 6.0, "use_dora": False, "rank_pattern": {}}
    layer = "base_model.model.lm_head"
    matrices = {f"{layer}.lora_{x}.weight": torch.ones(3, 3) for x in "AB"}
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(3, 3, bias=False)})
    weight = model["lm_head"].weight
    before = weight.detach().clone()

    def add(settings, tensors):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        hf_adapter.add_adapter(model, tmp_path)

    for changes in ({"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"lm_head": 4}}):
        with pytest.raises(UserError, match=f"must be plain LoRA, got {next(iter(changes))}"):
            add({**plain, **changes}, matrices)
    vector = {f"{layer}.lora_magnitude_vector": torch.ones(3)}
    with pytest.raises(UserError, match="got base_model.model.lm_head.lora_magnitude_vector"):
        add(plain, {**matrices, **vector})
    with pytest.raises(UserError, match="cannot be read: missing or unknown key 'r'"):
        add({"lora_alpha": 6.0}, matrices)
    assert torch.equal(weight, before)
    add(plain, matrices)
    torch.testing.assert_close(weight, before + 6)


def test_a_task_has_room_for_cca_to_differ(model, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("Some words. " * 200)
    settings = DemoSettings(8, 64, model=model, document=str(tmp_path / "text.txt"))
    limit = 2048 - compare.SPARE_TOKENS
    seen = []

    def make_task(tokenizer, document, num_questions, max_tokens):
        seen.append((num_questions, max_tokens))
        return Task([1] * length, [False] * 9 + [True] * (length - 9), [])

    monkeypatch.setattr(compare, "make_task", make_task)
    length = 64 + 8 + 9
    for changes in ({}, {"max_tokens": limit, "num_questions": 300}, {"max_tokens": 100}):
        assert len(plan(dataclasses.replace(settings, **changes)).token_ids) == length
    assert seen == [(6, limit), (300, limit), (6, 100)]
    length -= 1
    with pytest.raises(UserError, match="max-tokens must be at least 81: .* got 80 tokens"):
        plan(settings)
    for changes, message in (
        ({"max_tokens": limit + 1}, "at most 1792 for this model, got 1793"),
        ({"num_questions": 301}, "questions must be at most 300, got 301"),
        ({"sinks": -1}, "sink_size must be at least 0, got -1"),
    ):
        with pytest.raises(UserError, match=message):
            plan(dataclasses.replace(settings, **changes))


def test_facts_stand_at_equal_distances_and_have_room_for_an_answer(model):
    tokenizer = load(model, method="full", device="cpu").tokenizer
    task = make_task(tokenizer, "Some more words. " * 200, 4, 2000, seed=3)
    assert 1900 < len(task.token_ids) <= 2000
    for i, question in enumerate(task.questions):
        assert question.depth == pytest.approx((i + 0.5) / 4, abs=0.06)
        assert question.distance == round(len(task.token_ids) * (1 - question.depth))
        assert question.max_new_tokens == len(question.fact.completion) + 2
        end = len(task.token_ids) - question.distance
        planted = len(question.fact.sentence) + 1
        assert not any(task.document_mask[end - planted : end])
        assert task.document_mask[end] and task.document_mask[end - planted - 1]
        before = tokenizer.decode(task.token_ids[end - planted : end])
        assert before.strip() == question.fact.sentence
    other = make_task(tokenizer, "Some more words. " * 200, 4, 2000, seed=4)
    assert other.token_ids != task.token_ids
    assert task.questions[0].is_correct(f" {task.questions[0].fact.answer}. More")
    assert not task.questions[0].is_correct("")


# Results
# -------------------------------------------------------------------------------------------------

VALUES = {
    "first_token_s": (4.0, 1.0),
    "next_token_ms": (10.0, 20.0),
    "cache_bytes": (8 * 2**20, 2 * 2**20),
    "peak_bytes": (2**20, 3 * 2**20),
    "perplexity": (10.0, 11.0),
}


def run_of(method: str, settings: DemoSettings, task: Task) -> dict:
    i = ("full", "cca").index(method)
    sizes = {"layers": 2, "dtype": "float32"}
    if i:
        sizes |= {"group_size": 4, "window_size": 16}
    answers = [["12", "no", "12"], ["12", "no", "no"]][i]
    values = {name: pair[i] for name, pair in VALUES.items()}
    return {**values, "answers": answers, "tokens": 100, "sizes": sizes}


@pytest.fixture
def result(monkeypatch) -> DemoResult:
    questions = [Question(FACT, depth, 9, [1], 5) for depth in (0.25, 0.5, 0.75)]
    monkeypatch.setattr(compare, "plan", lambda settings: Task([1] * 100, [], questions))
    monkeypatch.setattr(compare, "_run_in_subprocess", run_of)
    return run_demo(DemoSettings(4, 16, device="cpu"))


def test_records_have_each_methods_values_and_share_of_right_answers(result):
    found = {(r.params["method"], r.name.removeprefix("demo.")): r for r in result.records}
    for i, (method, backend, right) in enumerate((("full", "sdpa", 2), ("cca", "auto", 1))):
        for name, pair in VALUES.items():
            assert found[method, name].value == pair[i]
        record = found[method, "retrieval_accuracy"]
        assert record.value == pytest.approx(right / 3)
        given = {"backend": backend, "length": 100, "batch": 1, "layers": 2}
        assert given.items() <= record.params.items()
        assert "threads" in record.device
    assert result.answers["cca"] == ["12", "no", "no"] and len(result.questions) == 3


@pytest.mark.parametrize(
    "name, full, cca, shown",
    [
        ("perplexity", 10.0, 11.0, "+10.0 %"),
        ("perplexity", 10.0, 9.0, "-10.0 %"),
        ("first_token_s", 4.0, 1.0, "4.0x faster"),
        ("next_token_ms", 1.0, 2.0, "2.0x slower"),
        ("cache_bytes", 6.0, 4.0, "1.5x less"),
        ("peak_bytes", 2.0, 3.0, "1.5x more"),
        ("peak_bytes", 2.0, 2.0, "1.0x less"),
        ("peak_bytes", 2.0, 0.0, ""),
        ("peak_bytes", 0.0, 2.0, ""),
    ],
)
def test_a_ratio_says_how_much_less_cca_takes(name, full, cca, shown):
    assert report._ratio(name, full, cca) == shown


def rows(table) -> list[list[str]]:
    return [list(row) for row in zip(*(list(map(str, column.cells)) for column in table.columns))]


def test_tables_lay_the_methods_side_by_side(result):
    table = report.measured_table(result)
    assert [str(column.header) for column in table.columns] == [
        "",
        "full attention",
        "CCA",
        "CCA to full",
    ]
    assert str(table.title).startswith("100 tokens, 2 layers, g = 4, s = 16, float32\n")
    assert rows(table) == [
        ["time to first token", "4.00 s", "1.00 s", "4.0x faster"],
        ["time per further token", "10.0 ms", "20.0 ms", "2.0x slower"],
        ["cache", "8.0 MiB", "2.0 MiB", "4.0x less"],
        ["peak memory of the prefill", "1.0 MiB", "3.0 MiB", "3.0x more"],
        ["perplexity", "10.000", "11.000", "+10.0 %"],
        ["answers right", "2 of 3", "1 of 3", ""],
    ]
    answers = report.answers_table(result)
    assert rows(answers)[2] == ["75%", "9", "The pass key is", "12", "12", "no"]
    cells = [list(column.cells)[2] for column in answers.columns[-2:]]
    assert [cell.style for cell in cells] == ["green", "red"]
    lines = report.demo_table(result.records).splitlines()
    assert lines[0].endswith(": 100 tokens, float32, g = 4, s = 16.")
    assert lines[2:4] == ["| | full attention | CCA |", "|---|---:|---:|"]
    assert lines[4] == "| time to first token | 4.00 s | 1.00 s |"
    assert lines[-1] == "| planted facts found | 67% | 33% |"
    sizes = {"group_size": 8, "window_size": 5, "fetch_groups": 3, "fetch_index": "bits:2"}
    chat = [
        dataclasses.replace(record, params={**record.params, **sizes, "method": name})
        for name in TITLES
        for record in result.records
        if record.params["method"] == "cca"
    ]
    caption = report.demo_table(chat).splitlines()[0]
    assert caption.endswith(
        "fetch: 3 groups of 8 by `bits:2`, s = 5; adapted: with this package's adapter."
    )


def test_a_cache_of_another_size_than_the_formulas_is_said(result, capsys, monkeypatch):
    sizes = {"kv_heads": 1, "head_dim": 8, "group_size": 4, "window_size": 16, "length": 100}
    params = {"method": "cca", "layers": 2, "dtype": "float16", **sizes}
    entries = 100 // 4 + 16 + 3
    for extra, word in ((0, "equals"), (2, "DIFFERS FROM")):
        record = make_record("demo.cache_bytes", 2 * 2 * 8 * 2 * entries + extra, params)
        assert (compare.formula_bytes(record) == record.value) is (extra == 0)
        records = [r for r in result.records if r.name != "demo.cache_bytes"]
        full = make_record("demo.cache_bytes", 1, {**params, "method": "full"})
        records = [full, record, *records]
        report.print_report(dataclasses.replace(result, records=records))
        shown = " ".join(capsys.readouterr().out.split())
        assert f"The cache {word} the formula: L // g + s + g - 1 = 25 + 16 + 4 - 1" in shown
        assert "The model is tiny and trained to show the machinery" in shown
        assert "second half" not in shown
    of_full = make_record(
        "demo.cache_bytes",
        1,
        {"length": 100, "layers": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"},
    )
    assert compare.formula_bytes(of_full) == 2 * 2 * 8 * 4 * 100
