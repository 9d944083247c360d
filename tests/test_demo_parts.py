"""The parts of the demo: answers, times and losses of one method, what is said of them, errors."""

import dataclasses
import io
import json
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from corecontext.cost import ModelCost
from corecontext.data.retrieval import Fact
from corecontext.demo import compare, measure_method, report
from corecontext.demo.compare import DemoResult, DemoSettings, plan, run_demo
from corecontext.demo.measure_method import Reading
from corecontext.demo.pace import Pace
from corecontext.demo.prompts import Prompt, Question, fact_prompt
from corecontext.files import UserError
from corecontext.integrations.hf import adapter as hf_adapter
from corecontext.loading import load
from corecontext.perplexity import document_nll

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


@pytest.mark.parametrize("asked", [[7, 8, 9], []], ids=["after the prompt", "in the prompt"])
@pytest.mark.parametrize(
    "made, most, answer, tokens",
    [
        ("ab\ncd", 9, "ab", 3),
        ("ab\0cd", 9, "ab", 3),
        ("abcd", 2, "ab", 2),
        ("abcd", 1, "a", 1),
        ("\nabc", 9, "", 1),
    ],
)
def test_an_answer_ends_with_its_line_its_message_or_the_most_tokens(
    asked, made, most, answer, tokens
):
    tokenizer = SimpleNamespace(
        eos_token_id=0,
        decode=lambda ids, skip_special_tokens=False: "".join(
            chr(i) for i in ids if i or not skip_special_tokens
        ),
    )
    model = Script(made if asked else made[1:])
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer)
    reading = Reading(1.0, torch.empty(0), None, torch.tensor([[ord(made[0])]]))
    question = Question(FACT, 0.5, 3, most, asked)
    assert measure_method._answer(loaded, reading, question) == answer
    assert model.read == [*([asked] if asked else []), *([ord(c)] for c in made[: tokens - 1])]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("demo") / "model", max_length=2048)


def prompt_of(ids: torch.Tensor, questions: list[Question]) -> Prompt:
    return Prompt(ids[0].tolist(), [i % 7 == 3 for i in range(ids.shape[1])], questions)


def test_a_method_is_measured_on_whole_prompts(model, monkeypatch):
    monkeypatch.setattr(measure_method, "DECODE_STEPS", 3)
    monkeypatch.setattr(measure_method, "DECODE_WARM_UP", 2)
    original = measure_method._answer

    def answer(loaded, reading, question):
        length = reading.cache.get_seq_length()
        original(loaded, reading, question)
        return str(length)

    monkeypatch.setattr(measure_method, "_answer", answer)
    loaded = load(model, preset="pooling", group_size=4, window_size=16, device="cpu", warn=False)
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 256, (1, length), generator=random) for length in (110, 120)]
    question = Question(FACT, 0.5, 3, 4, [65, 66, 67])
    prompts = [prompt_of(texts[0], [question]), prompt_of(texts[1], [question, question])]
    done: list[float] = []
    with torch.inference_mode():
        result = measure_method.measure(loaded, prompts, done.append)
    assert sum(done) == pytest.approx(len(prompts))
    assert not any(layer._forward_hooks for layer in loaded.model.model.layers)
    losses = [
        float(document_nll(loaded.model, ids)[torch.tensor(prompt.is_counted[1:])].double().mean())
        for ids, prompt in zip(texts, prompts)
    ]
    assert result["perplexity"] == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)
    assert result["tokens"] == 120 and result["sizes"] == loaded.sizes()
    assert len(result["first_token_s"]) == 3 and len(result["next_token_ms"]) == 3
    assert result["answers"] == ["110", "120", "120"]  # each is asked on its prompt's own cache
    monkeypatch.setattr(measure_method, "PREFILL_BUDGET_S", 0.0)
    with torch.inference_mode():
        assert len(measure_method.measure(loaded, prompts, done.append)["first_token_s"]) == 2


OUT_OF_MEMORY = "out of memory. Use --max-tokens with a smaller number."


@pytest.mark.parametrize(
    "error, outcome",
    [
        (UserError("no such model"), "no such model"),
        (MemoryError(), OUT_OF_MEMORY),
        (torch.OutOfMemoryError(), OUT_OF_MEMORY),
        (RuntimeError("a bug"), None),
        (None, {"answers": 5}),
    ],
    ids=repr,
)
def test_a_process_writes_its_outcome(error, outcome, monkeypatch):
    order = ("CCA", "m", {"method": "cca", "adapter": "a"}, [Prompt([1], [True], [])])
    written = io.BytesIO()
    stdin = SimpleNamespace(buffer=io.BytesIO(pickle.dumps(order)))
    stdout = SimpleNamespace(buffer=written)
    monkeypatch.setattr(measure_method, "sys", SimpleNamespace(stdin=stdin, stdout=stdout))
    asked = []

    def load(name, **options):
        asked.append((name, options))
        if error is not None:
            raise error
        return SimpleNamespace(model="weights")

    monkeypatch.setattr(measure_method, "load", load)
    monkeypatch.setattr(measure_method, "add_adapter", lambda *given: asked.append(given))
    monkeypatch.setattr(measure_method, "measure", lambda *given: {"answers": 5})
    if outcome is None:
        with pytest.raises(RuntimeError, match="a bug"):
            measure_method.main()
        return
    assert measure_method.main() == 0
    read = pickle.loads(written.getvalue())
    assert (str(read) if isinstance(read, UserError) else read) == outcome
    assert asked[0] == ("m", {"method": "cca", "warn": False})
    assert asked[1:] == ([] if error else [("weights", "a")])


def test_fetch_is_shown_adapted_where_the_package_has_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_adapter, "ASSETS", tmp_path)
    monkeypatch.setattr(compare, "load_config", lambda name: hf_config)
    hf_config = SimpleNamespace()
    monkeypatch.setattr(compare, "same_bytes_window", lambda settings, config, length: 7)
    (tmp_path / "smollm2_fetch").mkdir()
    common = {"dtype": "float16", "device": "meta"}
    settings = DemoSettings("SmolLM2-135M-Instruct.gguf", **common)
    methods = compare._methods(settings, 100)
    window = {"method": "streaming_llm", "sinks": 16, "window_size": 7}
    assert methods == {
        "full": {"method": "full", **common},
        "window": {**window, **common},
        "default": {"method": "cca", **common},
    }
    (tmp_path / "smollm2_fetch/adapter_config.json").write_text("{}")
    methods = compare._methods(settings, 100)
    assert methods["adapted"] == {**methods["default"], "adapter": "smollm2"}
    assert hf_adapter.find_adapter("smollm2") == "smollm2"
    # Other sizes of the same family have no adapter, and pooling was not what it was trained with.
    for changes, name in (
        ({"model": "cache/Other"}, "default"),
        ({"model": "SmolLM2-360M-Instruct"}, "default"),
        ({"attention": {"preset": "small"}, "model": "cache/smollm2-135m"}, "small"),
        ({"attention": {"fetch_groups": 3}, "model": "m"}, "fetch"),
        ({"attention": {"preset": "pooling"}}, "cca"),
    ):
        other = compare._methods(dataclasses.replace(settings, **changes), 100)
        assert list(other) == ["full", "window", name]
    hf_config.cca = {"group_size": 4}  # the checkpoint's own come before the default
    assert list(compare._methods(settings, 100)) == ["full", "window", "cca"]


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
    for name in ("none", "adapter_model.safetensors"):
        with pytest.raises(UserError, match="must be a folder with adapter_config.json"):
            hf_adapter.add_adapter(loaded, tmp_path / name)


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


def test_a_prompt_has_room_for_cca_to_differ(model, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("Some words. " * 200)
    monkeypatch.setattr(compare, "BUNDLED_MODEL", model)
    attention = {"preset": "pooling", "group_size": 8, "window_size": 64}
    settings = DemoSettings(document=str(tmp_path / "text.txt"), attention=attention)
    limit = 2048 - compare.SPARE_TOKENS
    seen = []

    def make(tokenizer, document, count, max_tokens):
        seen.append((count, max_tokens))
        return Prompt([1] * length, [False] * 9 + [True] * (length - 9), [])

    monkeypatch.setattr(compare, "fact_prompt", make)
    length = 64 + 8 + 9
    for changes in ({}, {"max_tokens": limit, "num_questions": 300}, {"max_tokens": 100}):
        assert len(plan(dataclasses.replace(settings, **changes))[0].token_ids) == length
    assert seen == [(6, limit), (300, limit), (6, 100)]
    length -= 1
    with pytest.raises(UserError, match="max-tokens must be at least 81: .* got 80 tokens"):
        plan(settings)
    with pytest.raises(UserError, match="at most 1792 for this model, got 1793"):
        plan(dataclasses.replace(settings, max_tokens=limit + 1))
    for changes, message in (  # before a model is looked for
        ({"num_questions": 301}, "questions must be at most 300, got 301"),
        ({"num_questions": 0}, "questions must be at least 1, got 0"),
        ({"attention": {"sinks": -1}}, "sink_size must be at least 0, got -1"),
    ):
        with pytest.raises(UserError, match=message):
            plan(dataclasses.replace(settings, model="nowhere/none", **changes))
    monkeypatch.setattr(compare, "needle_prompts", lambda *given: [make(*given)])
    length = 64 + 8 + compare.NEEDLE_TOKENS
    assert len(plan(dataclasses.replace(settings, model=model))[0].token_ids) == length
    length -= 1
    with pytest.raises(UserError, match="max-tokens must be at least 200: .* got 199 tokens"):
        plan(dataclasses.replace(settings, model=model))


def test_facts_stand_at_equal_distances_and_have_room_for_an_answer(model):
    tokenizer = load(model, method="full", device="cpu").tokenizer
    prompt = fact_prompt(tokenizer, "Some more words. " * 200, 4, 2000, seed=3)
    assert 1900 < len(prompt.token_ids) <= 2000
    for i, question in enumerate(prompt.questions):
        assert question.depth == pytest.approx((i + 0.5) / 4, abs=0.06)
        assert question.distance == round(len(prompt.token_ids) * (1 - question.depth))
        assert question.max_new_tokens == len(question.fact.completion)
        end = len(prompt.token_ids) - question.distance
        planted = len(question.fact.sentence) + 1
        assert not any(prompt.is_counted[end - planted : end])
        assert prompt.is_counted[end] and prompt.is_counted[end - planted - 1]
        before = tokenizer.decode(prompt.token_ids[end - planted : end])
        assert before.strip() == question.fact.sentence
    other = fact_prompt(tokenizer, "Some more words. " * 200, 4, 2000, seed=4)
    assert other.token_ids != prompt.token_ids
    assert prompt.questions[0].is_correct(f" {prompt.questions[0].fact.answer}. More")
    assert not prompt.questions[0].is_correct("")


# Results

VALUES = {
    "first_token_s": (4.0, 2.0, 1.0),
    "next_token_ms": (10.0, 5.0, 20.0),
    "cache_bytes": (8 * 2**20, 2**20, 2 * 2**20),
    "peak_bytes": (2**20, 2 * 2**20, 3 * 2**20),
    "perplexity": (10.0, 12.0, 11.0),
}


def result_of(title: str, *order) -> dict:
    i = ("full attention", "window, same bytes", "CCA").index(title)
    sizes = {"layers": 2, "dtype": "float32"}
    sizes |= ({}, {"window_size": 30}, {"group_size": 4, "window_size": 16})[i]
    answers = [["12", "no", "12"], ["no", "no", "no"], ["12", "no", "no"]][i]
    values = {name: per_method[i] for name, per_method in VALUES.items()}
    return {**values, "host_bytes": 0, "answers": answers, "tokens": 100, "sizes": sizes}


@pytest.fixture
def result(monkeypatch) -> DemoResult:
    questions = [Question(FACT, depth, 9, 5, [1]) for depth in (0.25, 0.5, 0.75)]
    monkeypatch.setattr(compare, "plan", lambda settings: [Prompt([1] * 100, [], questions)])
    monkeypatch.setattr(compare, "_measure_apart", result_of)
    pace = Pace(ModelCost(2, 4, 2, 16, 1000, 100), 0.0, 1e-12, 0.0, 0.0)
    monkeypatch.setattr(Pace, "of", lambda *given: pace)
    return run_demo(DemoSettings(device="cpu"))


def test_records_have_each_methods_values_and_share_of_right_answers(result):
    found = {(r.params["method"], r.name.removeprefix("demo.")): r for r in result.records}
    for i, (method, backend, right) in enumerate(
        (("full", "sdpa", 2), ("window", "auto", 0), ("cca", "auto", 1))
    ):
        for name, values in VALUES.items():
            assert found[method, name].value == values[i]
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


def test_the_note_tells_a_tiny_model_from_a_users(result, capsys):
    report.print_report(result)
    assert "The model is tiny and trained to show the machinery" in capsys.readouterr().out
    asked_in_prompts = [dataclasses.replace(x, token_ids=[]) for x in result.questions]
    report.print_report(dataclasses.replace(result, questions=asked_in_prompts))
    shown = capsys.readouterr().out
    assert "second halves" in shown and "is tiny" not in shown
