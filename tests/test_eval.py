"""Evaluations on small files: a copying stub scores 100, a silent one 0; tiny models; resuming;
mistakes."""

from __future__ import annotations

import json
import lzma
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tiny_model import save_tiny_model

from corecontext.baselines import NAMES
from corecontext.cli import main
from corecontext.data.readers import find_file, model_hash, read_lines
from corecontext.eval import multidoc_qa, windows
from corecontext.eval.evaluate import ModelOptions, data_paths, evaluate, of_task
from corecontext.eval.items import Settings
from corecontext.eval.runner import data_hashes, run_task
from corecontext.eval.subject import ModelSubject
from corecontext.eval.summary import Row, method_name, print_table, summarise, to_records
from corecontext.eval.task_table import TASKS, pick_tasks
from corecontext.files import UserError
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.loading import load
from corecontext.perplexity import document_nll
from corecontext.record import Record, read_records
from reproduction.suites import choices

IDENTITY = {"method": "stub", "model": "stub", "weights": ""}


def write_lines(path: Path, rows: list[dict]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".xz":
        with lzma.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Small files in the shapes that the tasks read."""
    folder = tmp_path_factory.mktemp("data")
    write_lines(
        folder / "multidoc_qa_pool.jsonl.xz",
        [
            {"doc_id": f"d{i}", "title": f"Title {i}", "text": f"Passage {i} says word{i}."}
            for i in range(12)
        ],
    )
    write_lines(
        folder / "multidoc_qa_test.jsonl",
        [
            {
                "qid": f"q{i}",
                "question": f"what does {i} say",
                "answers": [f"word{i}"],
                "gold_doc": f"d{i}",
                "hard": [f"d{i + 1}", f"d{i + 2}"],
                "contains_answer": ["d11"],
            }
            for i in range(3)
        ],
    )
    write_lines(
        folder / "lm_test.jsonl",
        [
            {
                "id": f"doc{i}",
                "domain": "math" if i % 2 else "books",
                "text": f"{i} is a number. " * (10 + 10 * i),
            }
            for i in range(4)
        ],
    )
    return folder


class Stub:
    """Knows every answer (`copies`) or gives none; a token is a word with its blank."""

    limit = None
    chat = False

    def __init__(self, copies: bool) -> None:
        self.copies, self.asked, self.answers = copies, [], {}

    def learn(self, items) -> Stub:
        for item in items:
            if hasattr(item, "right"):
                self.answers[item.make()] = item.right
            elif hasattr(item, "make"):
                question = item.make()
                self.answers[question.prompt] = list(question.references)
        return self

    def encode(self, text):
        return re.findall(r"\s*\S+", text)

    def encode_prompt(self, text, chat=True):
        return self.encode(text)

    def idle_note(self, length):
        return ""

    def decode(self, ids):
        return "".join(ids)

    def generate(self, ids, max_new_tokens, stop):
        prompt = self.decode(ids)
        self.asked.append(prompt)
        return " ".join(self.answers[prompt]) if self.copies else ""

    def choose(self, ids, options):
        prompt = self.decode(ids)
        self.asked.append(prompt)
        return self.answers[prompt] if self.copies else (self.answers[prompt] + 1) % len(options)

    def nll(self, ids):
        self.asked.append(ids)
        return (
            torch.zeros(len(ids) - 1)
            if self.copies
            else torch.full((len(ids) - 1,), math.log(10.0))
        )


def test_perplexity_scores_every_token_once(data):
    settings = Settings(lengths=(16, 32))
    sure, even = (
        summarise(run_task(TASKS["perplexity"], data, settings, Stub(copies), IDENTITY))
        for copies in (True, False)
    )
    assert {row.value for row in sure} == {1.0}
    assert all(row.value == pytest.approx(10.0) for row in even)
    lengths = [len(Stub(True).encode(row["text"])) for row in read_lines(data / "lm_test.jsonl")]
    whole = {row.size: row.count for row in even if row.part == ""}
    assert whole == {
        length: sum(n // length * (length - 1) for n in lengths) for length in (16, 32)
    }
    domains = {
        row.part: row.count for row in even if row.size == 16 and row.part in ("math", "books")
    }
    assert sum(domains.values()) == whole[16]


def test_multidoc_prompts(data):
    items = multidoc_qa.items(data, Settings(documents=(5,), positions=3), Stub(True))
    assert len(items) == 9 and [item.params["position"] for item in items[:3]] == [0, 2, 4]
    for item in items[:3]:
        lines = item.make().prompt.split("\n")
        documents = [line for line in lines if line.startswith("Document [")]
        assert len(documents) == 5 and "Passage 0 " in documents[item.params["position"]]
        # Holds an answer: never a distractor.
        assert not any("Passage 11 " in line for line in documents)
        assert lines[-2:] == ["Question: what does 0 say", "Answer:"]
    assert multidoc_qa.gold_places(20, 5) == [0, 5, 10, 14, 19]
    assert multidoc_qa.gold_places(2, 5) == [0, 1]
    with pytest.raises(UserError, match="documents must lie between 1 and the 12"):
        multidoc_qa.items(data, Settings(documents=(13,)), Stub(True))
    with pytest.raises(UserError, match="at most 11 for question q0"):
        multidoc_qa.items(data, Settings(documents=(12,)), Stub(True))[0].make()


# Resuming


def test_interrupted_runs_resume(data, tmp_path):
    results, settings = tmp_path / "r.jsonl", Settings(documents=(4,))

    class Stops(Stub):
        def generate(self, *args):
            if len(self.asked) == 4:
                raise KeyboardInterrupt
            return super().generate(*args)

    items = multidoc_qa.items(data, settings, Stub(True))
    with pytest.raises(KeyboardInterrupt):
        run_task(
            TASKS["multidoc_qa"],
            data,
            settings,
            Stops(True).learn(items),
            IDENTITY,
            results=results,
        )
    assert len(read_records(results)) == 4
    with results.open("a") as file:
        file.write('{"name": "quality.sc')  # a line that a power cut left
    second = Stub(True).learn(items)
    records = run_task(TASKS["multidoc_qa"], data, settings, second, IDENTITY, results=results)
    assert len(second.asked) == len(items) - 4
    assert len(records) == len(items) == len(read_records(results))
    third = Stub(False).learn(items)
    assert (
        run_task(TASKS["multidoc_qa"], data, settings, third, IDENTITY, results=results) == records
        and not third.asked
    )
    for other in ({**IDENTITY, "weights": "other"}, {**IDENTITY, "window_size": 3}):
        fresh = Stub(False).learn(items)
        run_task(TASKS["multidoc_qa"], data, settings, fresh, other, results=results)
        assert len(fresh.asked) == len(items)
    seeded = settings._replace(seed=1)
    fresh = Stub(False).learn(multidoc_qa.items(data, seeded, Stub(True)))
    run_task(TASKS["multidoc_qa"], data, seeded, fresh, IDENTITY, results=results)
    assert len(fresh.asked) == len(items)
    for mine in (
        "not a record\n",
        "a thesis in one line",
        '{"name": "Ann"}',
        'x\n{"name": "quality.',
    ):  # it stays
        results.write_text(mine)
        with pytest.raises(UserError, match="must be a record"):
            run_task(TASKS["multidoc_qa"], data, settings, fresh, IDENTITY, results=results)
        assert results.read_text() == mine


def test_items_that_do_not_fit_are_left_out_and_said(data, capsys):
    subject = Stub(True)
    settings = Settings(documents=(1, 10), positions=1, max_new_tokens=2)
    subject.learn(multidoc_qa.items(data, settings, subject))
    subject.limit = 50
    assert len(run_task(TASKS["multidoc_qa"], data, settings, subject, IDENTITY)) == 3
    assert "3 of 6 left out" in capsys.readouterr().err
    subject.limit = 5
    with pytest.raises(UserError, match="must have an item that fits, got none of 6"):
        run_task(TASKS["multidoc_qa"], data, settings, subject, IDENTITY)


# Real models, command line


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_length=2048)


PERPLEXITY = ("--task", "perplexity", "--length", "64", "--limit", "1", "--device", "cpu")


def test_every_task_under_every_method(model, data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    argv = ["compare", "--model", model, "--data", str(data), "--preset", "pooling"]
    argv += ["--window-size", "16"]
    argv += ["--limit", "1", "--max-new-tokens", "2", "--length", "400", "--documents", "3"]
    argv += ["--positions", "1", "--device", "cpu", "--results", "r.jsonl", "--json", "s.jsonl"]
    methods = ["full", "cca", *NAMES]
    for option, names in (("--task", TASKS), ("--method", methods)):
        for name in names:
            argv += [option, name]
    assert main(argv) == 0
    shown = capfd.readouterr().out
    assert all(task in shown for task in TASKS) and "streaming_llm" in shown
    records = read_records("r.jsonl")
    asked = {(r.params["method"], r.params["task"]) for r in records}
    assert asked == {(method, task) for method in methods for task in TASKS}
    values = {r.params["method"]: r.value for r in records if r.params["task"] == "perplexity"}
    assert len({round(value, 3) for value in values.values()}) == len(methods)
    summaries = read_records("s.jsonl")
    assert main(argv) == 0  # all from the file
    assert read_records("r.jsonl") == records
    assert len(read_records("s.jsonl")) == 2 * len(summaries)
    whole = next(r for r in summaries if r.name == "quality.perplexity" and "part" not in r.params)
    assert whole.params["data"] and whole.params["weights"] == model_hash(model)
    assert whole.params["items"] == 399


TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(model, tmp_path_factory) -> str:
    """The tiny model with a chat template."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def test_questions_go_into_the_chat_template(chat_model, model, data):
    loaded = load(chat_model, method="full", device="cpu")
    for choice, chats in ((None, True), (True, True), (False, False)):
        subject = ModelSubject(loaded, chat_template=choice)
        shown = subject.decode(subject.encode_prompt("Why?"))
        assert shown == ("<user>Why?</><assistant>" if chats else "Why?")
        assert subject.decode(subject.encode_prompt("Why", chat=False)) == "Why"
        settings = Settings(documents=(1,), positions=1, limit=1, max_new_tokens=1)
        record = run_task(TASKS["multidoc_qa"], data, settings, subject, IDENTITY)[0]
        assert record.params["chat_template"] is chats
        prompt = multidoc_qa.items(data, settings, subject)[0].make().prompt
        tokens = len(subject.encode_prompt(prompt))
        assert record.params["prompt_tokens"] == tokens
        assert tokens == len(subject.encode(prompt)) + chats * len("<user></><assistant>")
    with mock.patch.object(choices, "choose", return_value=0) as choose:
        for subject.chat in (True, False):  # an answer in a chat begins with the letter
            choices.Chosen("key", {}, lambda: "Why", (" A", " B"), 0).run(subject)
    asked = [tuple(call.args[2]) for call in choose.call_args_list]
    assert asked == [("A", "B"), (" A", " B")]
    plain = load(model, method="full", device="cpu")
    assert not ModelSubject(plain).chat
    with pytest.raises(UserError, match="chat-template must be left out"):
        ModelSubject(plain, chat_template=True)


def test_nothing_counts_twice(model, data):
    tasks = pick_tasks(["multidoc_qa", "multidoc_qa"])
    settings = Settings(documents=(1,), positions=1, limit=1, max_new_tokens=1)
    methods = ["full", "full"]
    records = evaluate(model, methods, tasks, [str(data)], settings, ModelOptions(device="cpu"))
    assert len(records) == 1


def test_eval_with_a_constant_number_of_groups(model, data, capfd):
    argv = ["eval", "--model", model, "--data", f"perplexity={data}", *PERPLEXITY]
    argv += ["--window-size", "16", "--num-groups", "8"]
    for preset in ([], ["--preset", "pooling"]):
        assert main([*argv, *preset]) == 0
    assert "m=8" in capfd.readouterr().out
    assert main([*argv, "--method", "window"]) == 2
    assert "num-groups must be given with core tokens" in capfd.readouterr().err


def test_subject_agrees_with_the_model(model):
    loaded = load(model, method="full", device="cpu")
    subject = ModelSubject(loaded)
    prompt = "Some words of a prompt, and"
    ids = torch.tensor([subject.encode(prompt)])
    with torch.no_grad():
        logits = loaded.model(ids).logits[0].double().log_softmax(-1)
        made = loaded.model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[
            0, ids.shape[1] :
        ]
    assert subject.generate(subject.encode(prompt), 5) == subject.decode(made.tolist())
    expected = -logits[:-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(
        subject.nll(ids[0].tolist()).double(), expected, rtol=1e-4, atol=1e-5
    )
    single, double = ("A", "B", "C"), ("ab", "cd")
    assert choices.choose(subject, subject.encode(prompt), single) == int(
        logits[-1, [subject.encode(x)[0] for x in single]].argmax()
    )
    scores = []
    for end in double:
        both = torch.tensor([subject.encode(prompt) + subject.encode(end)])
        with torch.no_grad():
            found = loaded.model(both).logits[0].double().log_softmax(-1)
        scores.append(float(found[-3, both[0, -2]] + found[-2, both[0, -1]]))
    assert choices.choose(subject, subject.encode(prompt), double) == scores.index(max(scores))


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--task", "glue"], "task must be perplexity or multidoc_qa, got 'glue'."),
        (
            ["--task", "ruler"],
            "task ruler has moved to the laboratory. In a clone of the repository, run `python -m "
            "reproduction compare --task ruler` with the other options",
        ),
        (["--task", "multidoc_qa", "--limit", "0"], "limit must be at least 1, got 0."),
        (
            ["--task", "perplexity", "--subtask", "law", "--subtask", "multidoc:x"],
            "subtask must be SUBTASK or TASK:SUBTASK, with a task of perplexity, got 'multidoc:x'.",
        ),
        (["--task", "perplexity", "--length", "0"], "length must be at least 1"),
        (
            ["--task", "perplexity", "--length", "100000"],
            "length must be at most that of a document",
        ),
        (["--task", "perplexity", "--method", "nothing"], "method must be cca, full, window"),
        (
            ["--task", "perplexity", "--method", "minference"],
            "method minference has moved to the laboratory. In a clone of the repository, run",
        ),
        (
            ["--task", "perplexity", "--method", "window", "--sinks", "3"],
            "sinks must be left out with method 'window'",
        ),
        (
            ["--task", "perplexity", "--method", "full", "--sinks", "3"],
            "sinks must be left out with method 'full'",
        ),
        (["--task", "perplexity", "--chunk-size", "0"], "chunk-size must be at least 1"),
    ],
)
def test_mistakes_cost_one_line(argv, message, model, data, capfd):
    assert main(["eval", "--model", model, "--data", str(data), "--device", "cpu", *argv]) == 2
    err = capfd.readouterr().err
    assert re.match(f"error: .*({message})", err) and err.count("\n") == 1


def test_mistakes_in_files(data, tmp_path):
    with pytest.raises(UserError, match="must be a folder"):
        find_file(tmp_path / "none", ("x",))
    with pytest.raises(UserError, match=r"must hold x\.jsonl"):
        find_file(tmp_path, ("x",))
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[2]\n')
    with pytest.raises(UserError, match="line 2: must be an object with a"):
        list(read_lines(tmp_path / "bad.jsonl", ("a",)))
    (tmp_path / "cut.jsonl.xz").write_bytes(b"no xz")
    with pytest.raises(UserError, match="line 1"):
        list(read_lines(tmp_path / "cut.jsonl.xz"))
    plain = tmp_path / "plain.txt"
    plain.write_text("one two three")
    wrong = Settings(subtasks=("law",))
    for items, folder in ((multidoc_qa.items, data), (windows.items, plain)):
        with pytest.raises(UserError, match="subtask must be left out .* 'law'. Use TASK:law for"):
            items(folder, wrong, Stub(True))
    own = f"perplexity={tmp_path}"
    both = list(TASKS.values())
    with pytest.raises(UserError, match="data must be given for multidoc_qa"):
        data_paths([own], both, Settings())
    paths = {"perplexity": str(tmp_path), "multidoc_qa": str(data), "": str(data)}
    assert data_paths([own, str(data)], both, Settings()) == paths
    for wrong in ("none", f"multidoc={data}", "perplexity="):
        with pytest.raises(UserError, match=f"data must be an existing folder, .* got '{wrong}'"):
            data_paths([wrong], both, Settings())
    with pytest.raises(UserError, match="data of multidoc_qa must be a folder, got the file"):
        data_paths([str(tmp_path / "bad.jsonl")], both, Settings())
    assert of_task(Settings(subtasks=("a", "perplexity:b")), "multidoc_qa").subtasks == ("a",)
    names = {"multidoc_qa_pool.jsonl.xz", "multidoc_qa_test.jsonl"}
    assert set(data_hashes(TASKS["multidoc_qa"], data)) == names


@pytest.mark.parametrize(
    "task, name, rows, message",
    [
        ("perplexity", "lm_test", [{"text": 5}], "line 1: text must be a string, got 5"),
        (
            "multidoc_qa",
            "multidoc_qa_test",
            [{"qid": "q", "question": "q", "answers": ["a"], "gold_doc": "z"}],
            "gold_doc",
        ),
        (
            "multidoc_qa",
            "multidoc_qa_test",
            [{"qid": "q", "question": "q", "answers": "ab", "gold_doc": "d1"}],
            "a list",
        ),
    ],
)
def test_mistakes_in_rows(task, name, rows, message, data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "data")
    write_lines(copy / f"{name}.jsonl", rows)
    with pytest.raises(UserError, match=message):
        run_task(TASKS[task], copy, Settings(documents=(2,), limit=1), Stub(True), IDENTITY)
    (tmp_path / "plain.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="must be UTF-8 text"):
        run_task(TASKS["perplexity"], tmp_path / "plain.txt", Settings(), Stub(True), IDENTITY)


@pytest.mark.parametrize("name", ["web[/b]", "see [link] here", "[red]", ":warning: a"])
def test_names_of_data_are_printed_as_they_are(name, capsys):
    print_table([Row(name, "perplexity", 100, name, 2.5, 3, {})])
    heading, line = capsys.readouterr().out.split("100")
    assert name in line
    assert all(word in heading for word in name.split())


def test_summaries_name_sizes(data):
    assert method_name({"method": "cca", "group_size": 16, "window_size": 8}) == "cca g=16 s=8"
    params = {"method": "cca", "fetch_groups": 4, "prefill": "full"}
    assert method_name(params) == "cca k=4 prefill=full"
    rows = summarise(
        run_task(TASKS["perplexity"], data, Settings(lengths=(16, 32)), Stub(False), IDENTITY)
    )
    assert all(record.name == "quality.perplexity" for record in to_records(rows, "here"))


def test_a_wrong_folder_of_data_is_refused_before_the_model_is_loaded(capfd):
    assert main(["eval", "--model", "none", "--task", "perplexity", "--data", "typo"]) == 2
    assert "data must be an existing folder" in capfd.readouterr().err


POOLING = {"preset": "pooling", "group_size": 4}


@pytest.mark.parametrize(
    "method, sizes, full, beyond",
    [
        ("cca", {**POOLING, "window_size": 20}, 39, 40),
        ("cca", {**POOLING, "window_size": 20, "sinks": 0}, 23, 24),
        ("cca", {**POOLING, "window_size": 20, "sinks": 5}, 31, 32),
        ("cca", {"group_size": 4, "window_size": 20, "fetch_groups": 2}, 47, 48),
        ("window", {"window_size": 20}, 20, 21),
        ("streaming_llm", {"window_size": 20, "sinks": 5}, 25, 26),
        ("lm_infinite", {"window_size": 20, "sinks": 5}, 21, 22),
    ],
    ids=str,
)
def test_idle_is_said_exactly_where_numbers_are_those_of_full_attention(
    model, method, sizes, full, beyond
):
    loaded = load(model, method=method, device="cpu", **sizes)
    plain = load(model, method="full", device="cpu")
    ids = torch.randint(256, (1, beyond), generator=torch.Generator().manual_seed(0))
    ours, theirs = (document_nll(x.model, ids, chunk_size=9) for x in (loaded, plain))
    torch.testing.assert_close(ours[: full - 1], theirs[: full - 1])
    assert "was idle" in loaded.idle_note(full) and not loaded.idle_note(beyond)
    with torch.no_grad():
        logits = [x.model(ids, use_cache=False).logits[0, -1] for x in (loaded, plain)]
    assert not torch.allclose(*logits, rtol=1e-3)
    assert not plain.idle_note(full)


def test_idle_is_said_wherever_numbers_are_shown(model, data, tmp_path, capfd):
    (tmp_path / "text.txt").write_text("A short text.")
    text, page = str(tmp_path / "text.txt"), str(tmp_path / "page.html")
    of_model = ["--model", model, "--device", "cpu"]
    assert main(["perplexity", text, *of_model, "--compare"]) == 0
    shown = capfd.readouterr().out
    assert shown.count("was idle: at most 13 tokens, within its window (s = 160)") == 3
    assert "positions from" not in shown and "not adapted" not in shown
    assert main(["inspect", text, *of_model, "--output", page]) == 0
    assert "CCA was idle" in capfd.readouterr().err and "CCA was idle" in Path(page).read_text()
    assert main(["compare", *of_model, "--data", str(data), *PERPLEXITY[:-2]]) == 0
    assert capfd.readouterr().err.count("perplexity: CCA was idle: at most 64 tokens") == 1


def test_losses_that_are_no_numbers_are_an_error():
    def model(ids, **_):
        logits = torch.zeros(1, ids.shape[1], 5)
        logits[0, 2] = math.nan
        return SimpleNamespace(logits=logits, **with_cache(None))

    with pytest.raises(UserError, match="logits must be finite, got NaN or infinity at token 2"):
        document_nll(model, torch.zeros(1, 6, dtype=torch.long))


def test_records_are_appended_to_records_alone(model, data, tmp_path, capfd):
    argv = ["eval", "--model", model, "--data", str(data), *PERPLEXITY]
    for text in ("import os\n", "a line without an end", '{"name": "Ann"}\n'):
        (tmp_path / "mine").write_text(text)
        for option in ("--json", "--results"):
            assert main([*argv, option, str(tmp_path / "mine")]) == 2
            assert "must be a record" in capfd.readouterr().err
        assert (tmp_path / "mine").read_text() == text
    assert main([*argv, "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert all(Record.from_json(line).name == "quality.perplexity" for line in out.splitlines())
    assert len(out.splitlines()) == 3 and "perplexity" in err
    assert not Path("-").exists()
