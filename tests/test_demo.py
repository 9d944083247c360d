"""The demo: both methods measured in processes of their own, the cache as the formula says, records
as shown."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
from tiny_model import save_tiny_model

from corecontext.cli import main
from corecontext.data.needles import ANSWER
from corecontext.demo import compare, report
from corecontext.demo.compare import ASSETS, DemoSettings, formula_bytes, plan, run_demo
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


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> DemoSettings:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "document.txt").write_text(DOCUMENT)
    return DemoSettings(
        group_size=8,
        window_size=64,
        num_questions=3,
        max_tokens=1500,
        model=save_tiny_model(folder / "model"),
        document=str(folder / "document.txt"),
    )


def value(result, name: str, method: str) -> float:
    return newest(result.records, f"demo.{name}", method=method).value


@pytest.fixture(scope="module")
def result(settings):
    """CCA is measured in a process of its own, as always; full attention here, which saves the
    imports of another."""
    in_subprocess = compare._run_in_subprocess

    def run(method, settings, task):
        measure = in_subprocess if method == "cca" else in_process
        return measure(method, settings, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_run_in_subprocess", run)
        return run_demo(settings)


def test_a_chat_model_is_asked_in_its_own_template(settings, tmp_path, monkeypatch, capsys):
    """Full attention, CCA and fetch, on prompts with a number to find."""
    from transformers import AutoTokenizer

    folder = tmp_path / "chat"
    shutil.copytree(settings.model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}[USER]{{ m.content }}[END]{% endfor %}"
        "{% if add_generation_prompt %}[BOT]{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    chat = dataclasses.replace(
        settings, model=str(folder), sinks=8, num_questions=2, max_tokens=500
    )
    task = plan(chat)
    for question, depth in zip(task.questions, (0, 1)):
        text = tokenizer.decode(question.token_ids)
        assert text.startswith("[USER]A special magic number is hidden")
        assert text.endswith("What is the special magic number?[END][BOT]" + ANSWER)
        assert text.count(question.fact.answer) == 1 and question.depth == depth
        assert question.is_correct(f"It is {question.fact.answer}, I think.")
        assert 400 < len(question.token_ids) <= 500
    assert len(plan(dataclasses.replace(chat, num_questions=None)).questions) == compare.NEEDLES

    monkeypatch.setattr(compare, "_run_in_subprocess", in_process)
    monkeypatch.setattr(compare, "FETCH", {"fetch_groups": 3, "store": "host"})
    result = run_demo(chat)
    by_name = {
        name: {r.params["method"]: r.value for r in result.records if r.name == f"demo.{name}"}
        for name in ("cache_bytes", "host_bytes", "perplexity")
    }
    assert list(by_name["cache_bytes"]) == ["full", "cca", "fetch"]
    tokens = len(task.questions[-1].token_ids)
    assert by_name["host_bytes"]["fetch"] >= 2 * 2 * 2 * 16 * 4 * tokens
    assert by_name["host_bytes"]["full"] == by_name["host_bytes"]["cca"] == 0
    assert len(set(by_name["perplexity"].values())) == 3
    print_report(result)
    shown = " ".join(capsys.readouterr().out.split())
    assert "cache in host memory" in shown, shown
    assert "The cache equals the formula: (L - n)" in shown
    assert "Perplexity is that of the prompts' second halves." in shown


def in_process(method, settings, task):
    """Measure in this process, which saves two imports of torch."""
    from corecontext.demo.measure_method import run_method
    from corecontext.demo.needle_prompts import ChatTask, run_chat
    from corecontext.loading import load

    measure = run_chat if isinstance(task, ChatTask) else run_method
    loaded = load(settings.model, **compare._methods(settings, task)[method])
    return {**measure(loaded, task, lambda amount: None), "peak_bytes": 1}  # a process's own


def test_every_value_is_recorded_for_both_methods(result):
    names = (
        "first_token_s",
        "next_token_ms",
        "cache_bytes",
        "peak_bytes",
        "perplexity",
        "retrieval_accuracy",
    )
    assert [(r.name, r.params["method"]) for r in result.records] == [
        (f"demo.{name}", method) for method in ("full", "cca") for name in names
    ]
    for name in names[:5]:
        assert value(result, name, "full") > 0 and value(result, name, "cca") > 0
    assert value(result, "perplexity", "full") != value(result, "perplexity", "cca")


def test_cache_bytes_equal_the_formula(result):
    for record in result.records:
        if record.name == "demo.cache_bytes":
            assert record.value == formula_bytes(record)
    entry = 2 * 2 * (2 * 16 + 1) * 4  # layers, KV heads, a key, a value and a mass
    assert value(result, "cache_bytes", "cca") == entry * (1500 // 8 + 64 + 8 - 1)


def test_what_is_shown_is_what_is_recorded(result, capsys):
    print_report(result)
    shown = capsys.readouterr().out
    for label, name, form, unit in report.DEMO_ROWS[:5]:
        assert label in shown
        for method in ("full", "cca"):
            assert form.format(value(result, name, method) / unit) in shown
    assert (
        "The cache equals the formula: L // g + s + g - 1 = 187 + 64 + 8 - 1 entries, each with a "
        "mass, a layer." in " ".join(shown.split())
    )


def test_a_figure_of_the_demo(result, tmp_path):
    report.draw_demo(result.records, str(tmp_path / "demo.svg"))
    assert (tmp_path / "demo.svg").stat().st_size > 2000
    assert "| cache | " in report.demo_table(result.records)


def test_the_task_is_the_document_with_facts(settings):
    from transformers import AutoTokenizer

    task = plan(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    assert len(task.token_ids) == len(task.document_mask) <= 1500
    own = tokenizer.decode([t for t, keep in zip(task.token_ids, task.document_mask) if keep])
    assert own and DOCUMENT.startswith(own)
    text = tokenizer.decode(task.token_ids)
    assert len(task.questions) == 3
    for question in task.questions:
        assert question.fact.sentence in text
        assert tokenizer.decode(question.token_ids) == question.fact.prompt
        assert 0 < question.depth < 1 and question.distance == pytest.approx(
            (1 - question.depth) * 1500, abs=2
        )


@pytest.mark.parametrize("device, tokens", [("cpu", compare.CPU_TOKENS), ("cuda", 7936)])
def test_another_model_reads_less_on_a_cpu(settings, tmp_path, monkeypatch, device, tokens):
    monkeypatch.setattr(compare, "pick_device", lambda name: device)
    (tmp_path / "long.txt").write_text(DOCUMENT * 4)
    change = {"max_tokens": None, "document": str(tmp_path / "long.txt")}
    task = plan(dataclasses.replace(settings, **change))
    assert tokens - 8 <= len(task.token_ids) <= tokens


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
    monkeypatch.setattr(compare, "_run_in_subprocess", None)
    with pytest.raises(UserError) as error:
        run_demo(dataclasses.replace(settings, **change))
    assert str(error.value).startswith(message)


def child(monkeypatch, code: str) -> None:
    """Put a program in the place of the one that measures."""
    monkeypatch.setattr(compare, "CHILD_COMMAND", [sys.executable, "-c", code])


def test_the_childs_errors_are_the_users(settings, monkeypatch):
    task = plan(settings)
    child(monkeypatch, """print('{"error": "out of memory. Use less."}')""")
    with pytest.raises(UserError, match="^out of memory. Use less.$"):
        compare._run_in_subprocess("cca", settings, task)
    child(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match="^out of memory: the system stopped the demo."):
        compare._run_in_subprocess("cca", settings, task)
    child(monkeypatch, "raise SystemError('a bug')")
    with pytest.raises(RuntimeError, match="a bug"):
        compare._run_in_subprocess("cca", settings, task)


def test_the_command_writes_what_it_shows(result, tmp_path, capfd, monkeypatch):
    """That it runs on its own assets is seen where README's commands are run."""
    records, plot, asked = tmp_path / "demo.jsonl", tmp_path / "demo.png", []
    monkeypatch.setattr(compare, "run_demo", lambda settings: asked.append(settings) or result)
    assert (
        main(
            [
                "demo",
                "--max-tokens",
                "3000",
                "--group-size",
                "8",
                "--json",
                str(records),
                "--plot",
                str(plot),
            ]
        )
        == 0
    )
    assert asked == [DemoSettings(group_size=8, max_tokens=3000)]
    shown = capfd.readouterr().out
    assert "time to first token" in shown and "equals the formula" in shown
    assert len(read_records(records)) == 12 and plot.stat().st_size > 2000
    assert json.loads(records.read_text().splitlines()[0])["name"] == "demo.first_token_s"
    chosen = ("demo", "--model", "some/model", "--document", "mine.txt", "--group-size", "4")
    assert main(chosen) == main([*chosen, "--sinks", "2"]) == 0
    assert [(s.model, s.document, s.sinks) for s in asked[1:]] == [
        ("some/model", "mine.txt", sinks) for sinks in (16, 2)
    ]


@needs_assets
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo(tmp_path):
    """On the whole document CCA's first token comes at least three times sooner; all within three
    minutes."""
    import time

    start = time.monotonic()
    result = run_demo(DemoSettings())
    assert time.monotonic() - start < 180
    assert value(result, "first_token_s", "full") >= 3 * value(result, "first_token_s", "cca")
    held = next(
        r for r in result.records if r.name == "demo.cache_bytes" and r.params["method"] == "cca"
    )
    assert held.value == formula_bytes(held)


def test_the_bundled_paths_are_in_the_package():
    assert Path(DemoSettings().model).parent == ASSETS and ASSETS.parent.name == "corecontext"
