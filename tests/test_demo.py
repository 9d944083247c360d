"""The demo: every method on the same prompts, the cache as the formula says, records as shown."""

import dataclasses
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from families import tiny_model as family_model
from tiny_model import save_tiny_model
from transformers import AutoTokenizer

from corecontext.cli import main
from corecontext.config import CCAConfig
from corecontext.cost import ModelCost
from corecontext.data.needles import ANSWER, ANSWER_TOKENS
from corecontext.demo import compare, measure_method, report
from corecontext.demo import pace as pace_module
from corecontext.demo.compare import ASSETS, DemoSettings, plan, run_demo
from corecontext.demo.measure_method import read
from corecontext.demo.pace import Pace, rates_of
from corecontext.demo.prompts import Prompt
from corecontext.demo.report import print_report
from corecontext.files import UserError
from corecontext.record import newest, read_records

needs_assets = pytest.mark.skipif(
    not (ASSETS / "demo_model" / "config.json").is_file(), reason="the bundled model is not here"
)
DOCUMENT = (
    "It was a bright cold day, and the clocks in the hall struck one after another without end. "
    * 40
)
COST = ModelCost(2, 4, 2, 16, 1000, 100)
QUICK = Pace(COST, 0.0, 1e-12, 0.0, 0.0)
POOLING = {"preset": "pooling", "group_size": 8, "window_size": 64, "sinks": 0}
TEMPLATE = (
    "{% for m in messages %}[USER]{{ m.content }}[END]{% endfor %}"
    "{% if add_generation_prompt %}[BOT]{% endif %}"
)


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """Put a tiny model in the place of the bundled one."""
    with pytest.MonkeyPatch.context() as patch:
        folder = save_tiny_model(tmp_path_factory.mktemp("bundled") / "model")
        patch.setattr(compare, "BUNDLED_MODEL", folder)
        yield folder


@pytest.fixture(scope="module")
def settings(bundled, tmp_path_factory) -> DemoSettings:
    document = tmp_path_factory.mktemp("demo") / "document.txt"
    document.write_text(DOCUMENT)
    return DemoSettings(num_questions=3, max_tokens=1500, document=str(document), attention=POOLING)


@pytest.fixture(scope="module", autouse=True)
def quick_start():
    """Start no processes that only import what this one has imported."""
    command = pace_module.IMPORTS
    assert command[:-1] == [sys.executable, "-W", "ignore", "-c"]
    exec(command[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace_module, "IMPORTS", [sys.executable, "-S", "-c", ""])
        yield


@pytest.fixture
def of_a_user(settings, bundled) -> DemoSettings:
    """Settings of a model that a user names."""
    change = {"model": bundled, "num_questions": 2, "max_tokens": 500}
    change["attention"] = {"group_size": 4, "fetch_groups": 9}
    return dataclasses.replace(settings, **change)


def value(result, name: str, method: str) -> float:
    return newest(result.records, f"demo.{name}", method=method).value


def measure_here(*order):
    """Measure in this process, which saves an import of torch; its memory is another matter."""
    return {**compare._measure_here(*order), "peak_bytes": 1}


@pytest.fixture(scope="module")
def result(settings):
    """CCA is measured in a process of its own, as always on a CPU; full attention here."""
    apart = compare._measure_apart

    def measure(title, *order):
        return (apart if title == "CCA" else measure_here)(title, *order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_measure_apart", measure)
        return run_demo(settings)


def test_methods_are_measured_in_processes_only_where_memory_is_the_processs(settings, monkeypatch):
    results = {"tokens": 9, "sizes": {}, "answers": ["a", "b", "c"], "host_bytes": 0}
    results |= dict.fromkeys(compare.MEASURED, 1.0)
    done = []
    monkeypatch.setattr(compare, "device_name", str)
    for place in ("apart", "here"):
        monkeypatch.setattr(
            compare, f"_measure_{place}", lambda *order, place=place: done.append(place) or results
        )
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(compare, "pick_device", lambda name, device=device: device)
        monkeypatch.setattr(Pace, "of", lambda *given: QUICK)
        assert run_demo(settings).records[0].device == device
    assert done == ["apart"] * 3 + ["here"] * 3


def test_a_users_model_is_asked_in_its_own_template(of_a_user):
    tokenizer = AutoTokenizer.from_pretrained(of_a_user.model)
    for template, begin, end in (
        (TEMPLATE, "[USER]", "[END][BOT]"),
        (None, "user: ", "\nassistant:"),
    ):
        tokenizer.chat_template = template
        prompts = plan_with(tokenizer, of_a_user)
        for prompt, depth in zip(prompts, (0, 1)):
            (question,) = prompt.questions
            text = tokenizer.decode(prompt.token_ids)
            assert text.startswith(f"{begin}A special magic number is hidden")
            assert text.endswith(f"What is the special magic number?{end}{ANSWER}")
            assert text.count(question.fact.answer) == 1 and question.depth == depth
            assert question.is_correct(f"It is {question.fact.answer}, I think.")
            assert 400 < len(prompt.token_ids) <= 500
            assert question.max_new_tokens == ANSWER_TOKENS == 32
            assert len(prompt.is_counted) == len(prompt.token_ids)
            assert not any(prompt.is_counted[: len(prompt.token_ids) // 2])
            assert all(prompt.is_counted[len(prompt.token_ids) // 2 + 1 :])
    assert len(plan(dataclasses.replace(of_a_user, num_questions=None))) == compare.NEEDLES


def plan_with(tokenizer, settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)
        return plan(settings)


@pytest.mark.parametrize("prefill", ["auto", "fetch"])
def test_a_users_model_shows_its_window_and_fetch(of_a_user, prefill, monkeypatch, capsys):
    """A base model, too: it has no chat template."""
    monkeypatch.setattr(compare, "_measure_apart", measure_here)
    attention = {**of_a_user.attention, "prefill": prefill}
    result = run_demo(dataclasses.replace(of_a_user, attention=attention))
    by_name = {
        name: {r.params["method"]: r.value for r in result.records if r.name == f"demo.{name}"}
        for name in ("cache_bytes", "host_bytes", "perplexity")
    }
    assert list(by_name["cache_bytes"]) == ["full", "window", "fetch"]
    tokens = len(plan(of_a_user)[-1].token_ids)
    assert by_name["host_bytes"]["fetch"] >= 2 * 2 * 2 * 16 * 4 * tokens
    assert by_name["host_bytes"]["full"] == by_name["host_bytes"]["window"] == 0
    # A window has whole tokens, two layers with two KV heads each.
    less = by_name["cache_bytes"]["fetch"] - by_name["cache_bytes"]["window"]
    assert 0 <= less < 2 * 2 * 2 * 16 * 4
    # By default full attention reads so short a prompt.
    is_read_in_full = by_name["perplexity"]["fetch"] == by_name["perplexity"]["full"]
    assert is_read_in_full == (prefill == "auto")
    print_report(result)
    shown = " ".join(capsys.readouterr().out.split())
    assert "cache in host memory" in shown, shown
    assert "fetch: 9 groups of 4 by `bits:2`, s = 160" in shown
    assert "Perplexity is that of the prompts' second halves." in shown


def test_a_window_of_the_same_bytes_leaves_sliding_layers_out(of_a_user, tmp_path):
    """They cache the same under all methods."""
    family_model("gemma3", vocab_size=256, max_position_embeddings=8192).save_pretrained(tmp_path)
    windows = set()
    for sinks in (0, 16):
        config = CCAConfig.pooling(8, 64, sink_size=sinks, core_mass=False)
        sizes = dataclasses.replace(of_a_user, model=str(tmp_path))
        windows.add(compare.same_bytes_window(sizes, config, 800))
    assert windows == {800 // 8 + 64 + 7 - 16, 784 // 8 + 16 + 64 + 7 - 16}


def test_every_value_is_recorded_for_each_method(result):
    names = ("first_token_s", "next_token_ms", "cache_bytes", "peak_bytes", "perplexity")
    recorded = (*names, "retrieval_accuracy")
    assert [(r.name, r.params["method"]) for r in result.records] == [
        (f"demo.{name}", method) for method in ("full", "window", "cca") for name in recorded
    ]
    for name in names:
        assert value(result, name, "full") > 0 and value(result, name, "cca") > 0
    assert value(result, "perplexity", "full") != value(result, "perplexity", "cca")


def test_cache_bytes_equal_the_formula(result):
    entry = 2 * 2 * (2 * 16 + 1) * 4  # layers and KV heads, a key, a value and a mass
    assert value(result, "cache_bytes", "cca") == entry * (1500 // 8 + 64 + 8 - 1)
    assert value(result, "cache_bytes", "full") == 2 * 2 * 2 * 16 * 4 * 1500


def test_what_is_shown_is_what_is_recorded(result, capsys):
    print_report(result)
    shown = capsys.readouterr().out
    for label, name, form, unit in report.DEMO_ROWS:
        if name == "host_bytes":
            assert label not in shown
            continue
        assert label in shown
        for method in ("full", "window", "cca"):
            assert form.format(value(result, name, method) / unit) in shown


def test_the_prompt_is_the_document_with_facts(settings):
    (prompt,) = plan(settings)
    tokenizer = AutoTokenizer.from_pretrained(compare.BUNDLED_MODEL)
    assert len(prompt.token_ids) == len(prompt.is_counted) <= 1500
    own = tokenizer.decode([t for t, keep in zip(prompt.token_ids, prompt.is_counted) if keep])
    assert own and DOCUMENT.startswith(own)
    text = tokenizer.decode(prompt.token_ids)
    assert len(prompt.questions) == 3
    for question in prompt.questions:
        assert question.fact.sentence in text
        assert tokenizer.decode(question.token_ids) == question.fact.prompt
        assert 0 < question.depth < 1
        assert question.distance == pytest.approx((1 - question.depth) * 1500, abs=2)


@pytest.mark.parametrize("device, tokens", [("cpu", (2560, 5000)), ("cuda", (7936, 7936))])
def test_a_document_is_cut_on_a_cpu(settings, bundled, tmp_path, monkeypatch, device, tokens):
    monkeypatch.setattr(compare, "pick_device", lambda name: device)
    monkeypatch.setattr(compare, "BUNDLED_CPU_TOKENS", 5000)
    (tmp_path / "long.txt").write_text(DOCUMENT * 4)
    change = {"max_tokens": None, "document": str(tmp_path / "long.txt")}
    for model, most in zip((bundled, None), tokens):
        for prompt in plan(dataclasses.replace(settings, model=model, **change)):
            assert most - 8 <= len(prompt.token_ids) <= most


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_tokens": 150}, "max-tokens must be at least "),
        ({"max_tokens": 9000}, "max-tokens must be at most 7936 for this model, got 9000."),
        ({"document": "nothing.txt"}, "file 'nothing.txt' does not exist."),
        ({"model": "./nothing"}, "model './nothing' does not exist."),
    ],
)
def test_a_mistake_is_found_before_a_model_runs(settings, change, message, monkeypatch):
    monkeypatch.setattr(compare, "_measure_apart", None)
    monkeypatch.setattr(compare, "_within_budget", None)
    with pytest.raises(UserError) as error:
        run_demo(dataclasses.replace(settings, **change))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "program, error, message",
    [
        ("import os; os.kill(os.getpid(), 9)", UserError, "^out of memory: the system stopped the"),
        ("raise SystemError('a bug')", RuntimeError, "that measures CCA failed; its error is abov"),
    ],
)
def test_a_process_that_dies(program, error, message, monkeypatch, capfd):
    monkeypatch.setattr(compare, "CHILD_COMMAND", [sys.executable, "-S", "-c", program])
    with pytest.raises(error, match=message):
        compare._measure_apart("CCA", "model", {}, [])
    assert ("a bug" in capfd.readouterr().err) is (error is RuntimeError)


def test_the_errors_of_a_process_are_the_users(monkeypatch):
    """The process is this one, which has imported what a new one would."""

    def run(command, input, **options):
        given, written = (io.TextIOWrapper(io.BytesIO(data)) for data in (input, b""))
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr(sys, "stdin", given)
            patch.setattr(sys, "stdout", written)
            runpy.run_path(measure_method.__file__, run_name="__main__")
        assert command[-2:] == ["-m", measure_method.__name__]
        return SimpleNamespace(returncode=end.value.code, stdout=written.buffer.getvalue())

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    with pytest.raises(UserError, match="^model './nothing' does not exist."):
        compare._measure_apart("CCA", "./nothing", {}, [Prompt([1], [True], [])])


def test_the_command_writes_what_it_shows(result, tmp_path, capfd, monkeypatch):
    """That it runs on its own assets is seen where README's commands are run."""
    records, asked = tmp_path / "demo.jsonl", []
    monkeypatch.setattr(compare, "run_demo", lambda settings: asked.append(settings) or result)
    sizes = ["--max-tokens", "3000", "--preset", "small", "--group-size", "8"]
    assert main(["demo", *sizes, "--json", str(records)]) == 0
    attention = {"preset": "small", "group_size": 8}
    assert asked == [DemoSettings(max_tokens=3000, attention=attention)]
    shown = capfd.readouterr().out
    assert "time to first token" in shown
    assert len(read_records(records)) == 18
    assert json.loads(records.read_text().splitlines()[0])["name"] == "demo.first_token_s"


def run_at(token_s: float, settings, monkeypatch):
    """Return the prompts of a run on a machine that takes `token_s` seconds a token."""
    pace = Pace(COST, 1.0, token_s / 2000, 0.0, 0.0)
    monkeypatch.setattr(Pace, "of", lambda *given: pace)
    monkeypatch.setattr(compare.time, "process_time", lambda: 9.0)
    prompts, methods = compare._within_budget(settings, plan(settings))
    assert methods == compare._methods(settings, len(prompts[0].token_ids))
    return prompts


@pytest.mark.parametrize("token_s, count", [(0.01, 3), (0.02, 2), (0.2, 1)])
def test_a_slow_machine_asks_fewer_questions(of_a_user, monkeypatch, capsys, token_s, count):
    """As many as the time allows, at least one, and as many as asked for."""
    by_default = dataclasses.replace(of_a_user, num_questions=None)
    prompts = run_at(token_s, by_default, monkeypatch)
    assert len(prompts) == count
    length = len(prompts[0].token_ids)
    # The output head takes a tenth of the layers' operations, for perplexity.
    readings = max(count, min(3, int(6 / (length * token_s))))
    seconds = round(9 + 3 * (1 + (readings + count / 10) * length * token_s))
    shown = capsys.readouterr().err
    assert f"{length} tokens: about {seconds} seconds in all" in shown
    assert seconds <= compare.BUDGET_S or count == 1
    assert ("This takes longer than two minutes: a smaller model" in shown) == (seconds > 120)
    asked = dataclasses.replace(of_a_user, num_questions=3)
    assert len(run_at(0.2, asked, monkeypatch)) == 3
    assert capsys.readouterr().err.endswith("smaller number for --max-tokens or --questions.\n")


@pytest.fixture
def of_a_long_text(of_a_user, tmp_path, monkeypatch) -> DemoSettings:
    """Default sizes for a user's model and a text of more tokens than it reads."""
    monkeypatch.setattr(compare, "CPU_TOKENS", 5120)
    (tmp_path / "long.txt").write_text(DOCUMENT * 4)
    change = {"num_questions": None, "max_tokens": None, "document": str(tmp_path / "long.txt")}
    return dataclasses.replace(of_a_user, **change)


@pytest.mark.parametrize(
    "token_s, count, most",
    [
        (0.001, 3, 5120),
        (0.002, 2, 5120),
        (0.005, 1, 5120),
        (0.01, 1, 2560),
        (0.02, 1, 1280),
        (0.025, 1, 1024),
        (9.0, 1, 1024),
    ],
)
def test_a_slower_one_reads_fewer_tokens(of_a_long_text, monkeypatch, capsys, token_s, count, most):
    """Half, a quarter and so on, where one question takes too long; never less than 1,024."""
    prompts = run_at(token_s, of_a_long_text, monkeypatch)
    assert len(prompts) == count
    assert most - 8 <= len(prompts[0].token_ids) <= most
    assert ("longer than two minutes" in capsys.readouterr().err) == (token_s == 9)


@pytest.mark.parametrize(
    "change, device, count, most",
    [
        ({"max_tokens": 3000}, "cpu", 1, 3000),
        ({"num_questions": 2}, "cpu", 2, 5120),
        ({"num_questions": 1}, "cpu", 1, 1024),
        ({"model": None}, "cpu", 1, 5000),
        ({}, "cuda", 3, 7936),
        # Twice the tokens that CCA needs.
        ({"attention": {"group_size": 4, "window_size": 900}}, "cpu", 1, 2 * (900 + 4 + 128)),
        ({"attention": {"group_size": 4, "window_size": 2500}}, "cpu", 1, 5120),
    ],
    ids=str,
)
def test_what_is_given_stays(of_a_long_text, monkeypatch, change, device, count, most):
    monkeypatch.setattr(compare, "BUNDLED_CPU_TOKENS", 5000)
    monkeypatch.setattr(compare, "pick_device", lambda name: device)
    prompts = run_at(9.0, dataclasses.replace(of_a_long_text, **change), monkeypatch)
    assert len(prompts) == count
    assert most - 8 <= len(prompts[0].token_ids) <= most


def test_the_pace_is_measured_on_two_beginnings(of_a_user):
    pace = Pace.of(of_a_user.source, "auto", "cpu", [1] * 1200)
    assert min(pace.start_s, pace.weights_s, pace.byte_s) > 0 and pace.attention_s >= 0
    seconds = [pace.seconds(pace.full(n), [Prompt([1] * n, [], [])]) for n in (10**4, 10**5)]
    assert pace.start_s < seconds[0] < seconds[1]
    given = [(n, 3e-9 * 2000 * n + 1e-9 * (COST.prefill_flops(n) - 2000 * n)) for n in (512, 4096)]
    assert rates_of(COST, *given) == pytest.approx((3e-9, 1e-9))
    # Attention that seems to take no time, or more than the weights.
    assert rates_of(COST, (512, 1.0), (4096, 2.0))[1] == 0
    of_weights, of_attention = rates_of(COST, (512, 2.0), (512, 2.0))
    assert of_weights > of_attention * (1 - 1e-9) > 0
    assert min(rates_of(COST, (512, 0.1), (4096, 99.0))) > 0


def test_a_slow_model_reads_one_beginning(of_a_user, monkeypatch):
    """Its estimate must not take the time that the demo has."""
    given = []

    def slow(model, token_ids):
        given.append(len(token_ids))
        return read(model, token_ids)._replace(seconds=3.0)

    monkeypatch.setattr(pace_module, "read", slow)
    pace = Pace.of(of_a_user.source, "auto", "cpu", [1] * 1200)
    assert given == [64, 512]
    full = pace.weights_s * 2 * pace.cost.linear_weights * 512
    assert full + pace.attention_s * pace.full(512).attention == pytest.approx(3.0)


def test_the_pace_knows_what_each_method_reads():
    pace = Pace(COST, 0.0, 1.0, 1.0, 1.0)
    full, window = pace.full(20000), pace.window(600, 20000)
    paces = (Pace(COST, 0.0, 1.0, 0.0, byte_s) for byte_s in (0.0, 1.0))
    prompt = Prompt([1] * 20000, [], [None] * 6)
    reading, all_work = (each.seconds(full, [prompt]) for each in paces)
    assert all_work - reading == (36 + 6 * 16) * (COST.weight_bytes() + full.cache_bytes)
    assert window.cache_bytes == COST.cache_bytes(600)
    assert window.attention < full.attention / 15
    cca = pace.cca(CCAConfig.pooling(), 20000, "cpu")
    assert cca.attention < full.attention / 4 and cca.cache_bytes < full.cache_bytes / 8
    # Full attention reads short prompts of fetch on a CPU, and its steps.
    fetch = CCAConfig()
    assert pace.cca(fetch, 4000, "cpu") == pace.full(4000)
    assert pace.cca(fetch, 20000, "cpu").attention < full.attention
    steps = pace.cca(fetch, 20000, "cuda")
    assert steps.cache_bytes < full.cache_bytes / 5


@needs_assets
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo(monkeypatch):
    """On the whole document CCA's first token comes at least three times sooner."""
    monkeypatch.setattr(compare, "BUNDLED_MODEL", str(ASSETS / "demo_model"))
    result = run_demo(DemoSettings(max_tokens=40000))
    assert value(result, "first_token_s", "full") >= 3 * value(result, "first_token_s", "cca")


def test_the_bundled_paths_are_in_the_package():
    assert Path(compare.DOCUMENT).parent == ASSETS and ASSETS.parent.name == "corecontext"
