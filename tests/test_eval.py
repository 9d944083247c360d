"""Evaluations on small files: a copying stub scores 100, a silent one 0; tiny models; resuming;
mistakes."""

from __future__ import annotations

import json
import lzma
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_model import save_tiny_model

from corecontext.cli import main
from corecontext.data.readers import find_file, model_hash, read_lines
from corecontext.eval import longbench, mmlu, multidoc_qa, ruler, runner, windows
from corecontext.eval.evaluate import ModelOptions, data_paths, evaluate, of_task
from corecontext.eval.items import Settings
from corecontext.eval.runner import data_hashes, run_task
from corecontext.eval.subject import ModelSubject
from corecontext.eval.summary import (
    Row,
    draw,
    method_name,
    print_table,
    score_parts,
    summarise,
    to_records,
)
from corecontext.files import UserError
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.loading import load
from corecontext.perplexity import document_nll
from corecontext.record import Record, read_records
from corecontext.terminal import progress

IDENTITY = {"method": "stub", "model": "stub", "weights": ""}
NOUNS = [
    "river",
    "stone",
    "cloud",
    "bridge",
    "window",
    "garden",
    "engine",
    "letter",
    "market",
    "valley",
    "candle",
    "button",
    "pillow",
    "ladder",
    "anchor",
    "basket",
    "copper",
    "dragon",
    "forest",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "lizard",
    "magnet",
    "needle",
    "orange",
    "pencil",
    "quiver",
    "ribbon",
    "saddle",
    "tunnel",
]


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
    (folder / "ruler_words.json").write_text(
        json.dumps(
            {
                "adjectives": [f"a{noun}" for noun in NOUNS],
                "nouns": NOUNS,
                "verbs": [f"{noun}ing" for noun in NOUNS],
            }
        )
    )
    write_lines(
        folder / "haystack_essays.jsonl",
        [{"text": "Some plain words were said. Others were not. " * 40}],
    )
    write_lines(
        folder / "squad.jsonl",
        [
            {
                "context": f"Here {noun} is number {i}.",
                "qas": [
                    {"question": f"which number is {noun}?", "answers": [{"text": f"number {i}"}]}
                ],
            }
            for i, noun in enumerate(NOUNS[:8])
        ],
    )
    (folder / "hotpotqa.json").write_text(
        json.dumps(
            [
                {
                    "question": f"where is {noun}?",
                    "answer": f"{noun} hall",
                    "context": [[f"T{noun}", [f"{noun} hall.", " It is."]], ["Same", ["as ever."]]],
                }
                for noun in NOUNS[:4]
            ]
        )
    )
    for split, count in (("dev", 5), ("test_subset", 3)):
        write_lines(
            folder / f"mmlu_{split}.jsonl",
            [
                {
                    "subject": subject,
                    "idx": i,
                    "question": f"{subject} {i}?",
                    "choices": ["w", "x", "y", "z"],
                    "answer": "ABCD"[i % 4],
                }
                for subject in ("high_school_math", "law")
                for i in range(count)
            ],
        )
    (folder / "longbench_config.json").write_text(
        json.dumps(
            {
                "dataset2prompt": {
                    task: f"Read, {task}. {{context}}\nAsk: {{input}}"
                    for task in longbench.SUBTASKS
                },
                "dataset2maxlen": dict.fromkeys(longbench.SUBTASKS, 6),
            }
        )
    )
    for task in longbench.SUBTASKS:
        answers = {
            "trec": ["Human being"],
            "passage_count": ["7"],
            "passage_retrieval_en": ["Paragraph 7"],
        }
        write_lines(
            folder / f"{task}_e.jsonl",
            [
                {
                    "_id": f"{task}{i}",
                    "input": "what?",
                    "context": f"text {i} " * 20,
                    "length": 3000 + 3000 * i,
                    "answers": answers.get(task, ["a blue bird sang"]),
                    "all_classes": ["Human being", "Human", "Place"],
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


TASKS = [
    ("multidoc_qa", Settings(documents=(1, 5))),
    ("ruler", Settings(lengths=(900, 1500), limit=3)),
    ("mmlu", Settings()),
    ("longbench", Settings(lengths=(30,))),
]


@pytest.mark.parametrize("task, settings", TASKS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_copier_scores_100_and_silence_0(task, settings, data):
    if task == "longbench":
        pytest.importorskip("rouge")
    for copies, score in ((True, 1.0), (False, 0.0)):
        subject = Stub(copies)
        subject.learn(runner.TASKS[task].items(data, settings, subject))
        rows = summarise(run_task(task, data, settings, subject, IDENTITY))
        assert all(row.value == pytest.approx(score) for row in rows) and rows[0].part == ""
        if task == "ruler":
            assert {row.part for row in rows} == {"", *ruler.SUBTASKS}
        if task == "longbench":
            assert {*longbench.CATEGORIES, *longbench.SUBTASKS, ""} == {row.part for row in rows}


def test_perplexity_scores_every_token_once(data):
    settings = Settings(lengths=(16, 32))
    sure, even = (
        summarise(run_task("perplexity", data, settings, Stub(copies), IDENTITY))
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


def test_a_missing_package_is_said_before_the_first_answer(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(UserError, match=r"Install it: pip install 'corecontext\[eval\]'"):
        longbench.items(data, Settings(lengths=(30,), subtasks=("samsum",)), Stub(True))


def test_buckets_and_categories_are_means_of_means(data):
    subject = Stub(True)
    items = longbench.items(data, Settings(lengths=(30,), subtasks=("qasper", "lcc")), subject)
    subject.learn(items)
    records = run_task(
        "longbench", data, Settings(lengths=(30,), subtasks=("qasper", "lcc")), subject, IDENTITY
    )
    extra = [
        records[0].__class__.from_json(records[0].to_json().replace('"value": 1.0', '"value": 0.0'))
    ] * 3
    parts = score_parts([*extra, *records])
    assert parts["qasper"][0] == pytest.approx(
        (0.25 + 1 + 1) / 3
    )  # the first bucket holds one right and three wrong
    assert parts[""][0] == pytest.approx((parts["qasper"][0] + 1) / 2)


def test_multidoc_prompts(data):
    items = multidoc_qa.items(data, Settings(documents=(5,), positions=3), Stub(True))
    assert len(items) == 9 and [item.params["position"] for item in items[:3]] == [0, 2, 4]
    for item in items[:3]:
        lines = item.make().prompt.split("\n")
        documents = [line for line in lines if line.startswith("Document [")]
        assert len(documents) == 5 and "Passage 0 " in documents[item.params["position"]]
        assert not any(
            "Passage 11 " in line for line in documents
        )  # holds an answer: never a distractor
        assert lines[-2:] == ["Question: what does 0 say", "Answer:"]
    assert multidoc_qa.gold_places(20, 5) == [0, 5, 10, 14, 19] and multidoc_qa.gold_places(
        2, 5
    ) == [0, 1]
    with pytest.raises(UserError, match="documents must lie between 1 and the 12"):
        multidoc_qa.items(data, Settings(documents=(13,)), Stub(True))
    with pytest.raises(UserError, match="at most 11 for question q0"):
        multidoc_qa.items(data, Settings(documents=(12,)), Stub(True))[0].make()


@pytest.mark.parametrize("task", ruler.SUBTASKS)
def test_ruler_samples_fit_and_hold_their_answers(task, data):
    subject = Stub(True)
    for length in (800, 1100):
        items = ruler.items(data, Settings(lengths=(length,), subtasks=(task,), limit=3), subject)
        prompts = [item.make() for item in items]
        for item, question in zip(items, prompts):
            tokens = len(subject.encode(question.prompt)) + item.max_new_tokens
            assert tokens <= length
            if not task.startswith(
                "qa"
            ):  # the files here are too short to fill such lengths with passages
                assert tokens > 0.6 * length
            assert question.references and all(
                one in question.prompt for one in question.references
            )
        assert len({question.prompt for question in prompts}) == len(prompts)
        assert (
            prompts
            == [
                item.make()
                for item in ruler.items(  # the same, asked in another order
                    data, Settings(lengths=(length,), subtasks=(task,), limit=3), subject
                )[::-1]
            ][::-1]
        )


def test_a_task_that_ruler_does_not_have_is_refused():
    with pytest.raises(ValueError, match="task must be one of niah_single_1, .* got 'niah'"):
        ruler.builder("niah", 4096, 0, source=None)


def test_ruler_settings(data):
    counts = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}
    assert len(ruler.SUBTASKS) == 13 and len({ruler._place(i) for i in range(40)}) == 40
    for task, count in counts.items():
        item = ruler.items(data, Settings(lengths=(1500,), subtasks=(task,), limit=1), Stub(True))[
            0
        ]
        assert len(set(item.make().references)) == count


def test_ruler_counts_are_right(data):
    subject = Stub(True)
    for task, seldom in (("cwe", 2), ("fwe", 0)):
        for item in ruler.items(
            data, Settings(lengths=(1500,), subtasks=(task,), limit=2), subject
        ):
            question = item.make()
            text = question.prompt.rsplit("\nQuestion", 1)[0].rsplit(".\n", 1)[1]
            words = [word for word in text.split() if word.isalpha()]
            often = sorted((words.count(word) for word in question.references), reverse=True)
            others = max(words.count(word) for word in set(words) - set(question.references))
            assert often[-1] > max(others, seldom)


def test_mmlu_prompt(data):
    subject = Stub(True)
    items = mmlu.items(data, Settings(shots=2, limit=1), subject)
    assert [item.params["subtask"] for item in items] == ["high_school_math", "law"]
    assert items[0].make() == (
        "The following are multiple choice questions (with answers) about high school math.\n\n"
        "high_school_math 0?\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\n"
        "high_school_math 1?\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\n"
        "high_school_math 0?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    )
    subject.limit = 40
    assert items[0].make().count("Answer: ") == 1  # examples are lost from the end
    with pytest.raises(UserError, match="examples must be at least 6"):
        mmlu.items(data, Settings(shots=6), subject)
    with pytest.raises(UserError, match="subtask must be one of high_school_math, law, got 'lwa'"):
        mmlu.items(data, Settings(shots=2, subtasks=("law", "lwa")), subject)


def test_an_mmlu_prompt_and_its_letter_fit_the_limit(data):
    subject = Stub(True)
    items = mmlu.items(data, Settings(shots=2, limit=1), subject)
    subject.learn(items)
    length = len(subject.encode_prompt(items[0].make()))
    for limit, shots in ((length, 1), (length + 1, 2)):
        subject.limit = limit
        subject.learn(items)
        assert items[0].make().count("Answer: ") == shots
        assert items[0].run(subject).value == 1


def test_longbench_cuts_the_middle(data):
    items = longbench.items(data, Settings(lengths=(10,), subtasks=("qasper",)), Stub(True))
    prompt = items[0].make().prompt
    assert len(Stub(True).encode(prompt)) == 10
    assert prompt.startswith("Read, qasper. text 0") and prompt.endswith("what?")
    row = {"all_classes": []}
    assert longbench.scorer("triviaqa", row)("\nblue\nx", ["blue"]) == 1.0
    assert longbench.scorer("qasper", row)("blue\nx", ["blue", "red"]) == pytest.approx(2 / 3)


# Resuming
# -----------------------------------------------------------------------------------------------


def test_interrupted_runs_resume(data, tmp_path):
    results, settings = tmp_path / "r.jsonl", Settings(documents=(4,))

    class Stops(Stub):
        def generate(self, *args):
            if len(self.asked) == 4:
                raise KeyboardInterrupt
            return super().generate(*args)

    items = multidoc_qa.items(data, settings, Stub(True))
    with pytest.raises(KeyboardInterrupt):
        run_task("multidoc_qa", data, settings, Stops(True).learn(items), IDENTITY, results=results)
    assert len(read_records(results)) == 4
    with results.open("a") as file:
        file.write('{"name": "quality.sc')  # a line that a power cut left
    second = Stub(True).learn(items)
    records = run_task("multidoc_qa", data, settings, second, IDENTITY, results=results)
    assert len(second.asked) == len(items) - 4 and len(records) == len(items) == len(
        read_records(results)
    )
    third = Stub(False).learn(items)
    assert (
        run_task("multidoc_qa", data, settings, third, IDENTITY, results=results) == records
        and not third.asked
    )
    for other in ({**IDENTITY, "weights": "other"}, {**IDENTITY, "window_size": 3}):
        fresh = Stub(False).learn(items)
        run_task("multidoc_qa", data, settings, fresh, other, results=results)
        assert len(fresh.asked) == len(items)
    seeded = settings._replace(seed=1)
    fresh = Stub(False).learn(multidoc_qa.items(data, seeded, Stub(True)))
    run_task("multidoc_qa", data, seeded, fresh, IDENTITY, results=results)
    assert len(fresh.asked) == len(items)
    for mine in (
        "not a record\n",
        "a thesis in one line",
        '{"name": "Ann"}',
        'x\n{"name": "quality.',
    ):  # it stays
        results.write_text(mine)
        with pytest.raises(UserError, match="must be a record"):
            run_task("multidoc_qa", data, settings, fresh, IDENTITY, results=results)
        assert results.read_text() == mine


def test_items_that_do_not_fit_are_left_out_and_said(data, capsys):
    subject = Stub(True)
    settings = Settings(documents=(1, 10), positions=1, max_new_tokens=2)
    subject.learn(multidoc_qa.items(data, settings, subject))
    subject.limit = 50
    assert len(run_task("multidoc_qa", data, settings, subject, IDENTITY)) == 3
    assert "3 of 6 left out" in capsys.readouterr().err
    subject.limit = 5
    with pytest.raises(UserError, match="must have an item that fits, got none of 6"):
        run_task("multidoc_qa", data, settings, subject, IDENTITY)


# Real models, command line
# -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_length=2048)


PERPLEXITY = ("--task", "perplexity", "--length", "64", "--limit", "1", "--device", "cpu")

METHODS = ["full", "cca", "window", "streaming_llm", "lm_infinite", "minference"]


def test_every_task_under_every_method(model, data, tmp_path, monkeypatch, capfd):
    pytest.importorskip("rouge")
    monkeypatch.chdir(tmp_path)
    argv = [
        "compare",
        "--model",
        model,
        "--data",
        str(data),
        "--window-size",
        "16",
        "--limit",
        "1",
        "--max-new-tokens",
        "2",
        "--length",
        "400",
        "--documents",
        "3",
        "--positions",
        "1",
        "--shots",
        "1",
        "--device",
        "cpu",
        "--subtask",
        "ruler:niah_single_1",
        "--subtask",
        "longbench:qasper",
        "--subtask",
        "longbench:lcc",
        "--subtask",
        "mmlu:law",
        "--results",
        "r.jsonl",
        "--json",
        "s.jsonl",
        "--plot",
        "p.png",
        "--force",
    ]
    for task in runner.TASKS:
        argv += ["--task", task]
    for method in METHODS:
        argv += ["--method", method]
    assert main(argv) == 0
    shown = capfd.readouterr().out
    assert all(task in shown for task in runner.TASKS) and "streaming_llm" in shown
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    records = read_records("r.jsonl")
    assert {(r.params["method"], r.params["task"]) for r in records} == {
        (m, t) for m in METHODS for t in runner.TASKS
    }
    values = {r.params["method"]: r.value for r in records if r.params["task"] == "perplexity"}
    assert values["minference"] == pytest.approx(
        values["full"], rel=1e-6
    )  # the text is too short for it to skip
    assert len({round(x, 3) for x in values.values()}) == len(METHODS) - 1
    before = len(records)
    summaries = len(read_records("s.jsonl"))
    assert main(argv) == 0  # all from the file
    assert len(read_records("r.jsonl")) == before and len(read_records("s.jsonl")) == 2 * summaries
    one = [
        r
        for r in read_records("s.jsonl")
        if r.params["task"] == "perplexity" and "part" not in r.params
    ]
    assert (
        one[0].params["data"]
        and one[0].params["weights"] == model_hash(model)
        and one[0].params["items"] == 399
    )


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
        settings = Settings(documents=(1,), positions=1, limit=1, max_new_tokens=1, shots=1)
        for task in ("multidoc_qa", "mmlu"):
            record = run_task(task, data, settings, subject, IDENTITY)[0]
            assert record.params["chat_template"] is chats
            prompt = TASK_PROMPTS[task](data, settings, subject)
            tokens = len(subject.encode_prompt(prompt))
            assert record.params["prompt_tokens"] == tokens
            assert tokens == len(subject.encode(prompt)) + chats * len("<user></><assistant>")
    plain = load(model, method="full", device="cpu")
    assert not ModelSubject(plain).chat
    with pytest.raises(UserError, match="chat-template must be left out"):
        ModelSubject(plain, chat_template=True)


TASK_PROMPTS = {
    "multidoc_qa": lambda *given: multidoc_qa.items(*given)[0].make().prompt,
    "mmlu": lambda *given: mmlu.items(*given)[0].make(),
}


def test_what_is_chosen_in_a_chat_begins_with_the_letter(chat_model, data):
    subject = ModelSubject(load(chat_model, method="full", device="cpu"))
    asked = []
    subject.choose = lambda prompt, options: asked.append(options) or 0
    mmlu.items(data, Settings(), subject)[0].run(subject)
    subject.chat = False
    mmlu.items(data, Settings(), subject)[0].run(subject)
    assert asked == [("A", "B", "C", "D"), (" A", " B", " C", " D")]


def test_samples_fit_their_length_with_the_chat_template(chat_model, data):
    subject = ModelSubject(load(chat_model, method="full", device="cpu"))
    settings = Settings(lengths=(1500,), subtasks=("vt",), limit=2)
    for item in ruler.items(data, settings, subject):
        tokens = len(subject.encode_prompt(item.make().prompt)) + item.max_new_tokens
        assert 1000 < tokens <= 1500


def test_longbench_continues_examples_and_code_without_a_template(data):
    items = longbench.items(data, Settings(lengths=(30,)), Stub(True))
    continued = {item.params["subtask"] for item in items if not item.chat}
    assert continued == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}


def test_nothing_counts_twice(model, data):
    twice = evaluate(
        model,
        ["full", "full"],
        ["mmlu", "mmlu"],
        [str(data)],
        Settings(limit=1, shots=1),
        ModelOptions(device="cpu"),
    )
    assert len(twice) == 2  # a question of each subject


def test_eval_with_a_constant_number_of_groups(model, data, capfd):
    argv = [
        "eval",
        "--model",
        model,
        "--task",
        "mmlu",
        "--data",
        f"mmlu={data}",
        "--window-size",
        "16",
        "--num-groups",
        "8",
        "--limit",
        "1",
        "--device",
        "cpu",
    ]
    assert main(argv) == 0
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
    assert subject.choose(subject.encode(prompt), single) == int(
        logits[-1, [subject.encode(x)[0] for x in single]].argmax()
    )
    scores = []
    for end in double:
        both = torch.tensor([subject.encode(prompt) + subject.encode(end)])
        with torch.no_grad():
            found = loaded.model(both).logits[0].double().log_softmax(-1)
        scores.append(float(found[-3, both[0, -2]] + found[-2, both[0, -1]]))
    assert subject.choose(subject.encode(prompt), double) == scores.index(max(scores))


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--task", "glue"], "task must be one of perplexity, multidoc_qa"),
        (["--task", "mmlu", "--limit", "0"], "limit must be at least 1, got 0."),
        (["--task", "ruler", "--subtask", "niah"], "subtask must be one of niah_single_1"),
        (
            ["--task", "ruler", "--subtask", "rulr:vt"],
            "subtask must be SUBTASK or TASK:SUBTASK, with a task of ruler, got 'rulr:vt'.",
        ),
        (["--task", "ruler", "--length", "0"], "length must be at least 1"),
        (
            ["--task", "perplexity", "--length", "100000"],
            "length must be at most that of a document",
        ),
        (["--task", "mmlu", "--method", "nothing"], "method must be cca, full, window"),
        (
            ["--task", "mmlu", "--method", "window", "--sinks", "3"],
            "sinks must be left out with method 'window'",
        ),
        (
            ["--task", "mmlu", "--method", "full", "--sinks", "3"],
            "sinks must be left out with method 'full'",
        ),
        (["--task", "mmlu", "--chunk-size", "0"], "chunk-size must be at least 1"),
        (
            ["--task", "mmlu", "--method", "minference", "--patterns", "none.json"],
            "file 'none.json' does not exist",
        ),
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
    own = f"ruler={tmp_path}"
    with pytest.raises(UserError, match="data must be given for mmlu"):
        data_paths([own], ["ruler", "mmlu"])
    paths = {"ruler": str(tmp_path), "mmlu": str(data)}
    assert data_paths([own, str(data)], ["ruler", "mmlu"]) == paths
    for wrong in ("none", f"rulr={data}", "ruler="):
        with pytest.raises(UserError, match=f"data must be an existing folder, .* got '{wrong}'"):
            data_paths([wrong], ["ruler"])
    with pytest.raises(UserError, match="data of ruler must be a folder, got the file"):
        data_paths([str(tmp_path / "bad.jsonl")], ["perplexity", "ruler"])
    assert of_task(Settings(subtasks=("a", "ruler:b")), "mmlu").subtasks == ("a",)
    assert set(data_hashes("mmlu", data)) == {"mmlu_dev.jsonl", "mmlu_test_subset.jsonl"}


@pytest.mark.parametrize(
    "task, name, rows, message",
    [
        ("perplexity", "lm_test", [{"text": 5}], "line 1: text must be a string, got 5"),
        (
            "mmlu",
            "mmlu_test",
            [{"subject": "law", "question": "q", "choices": list("wxyz"), "answer": ""}],
            "A to D",
        ),
        (
            "mmlu",
            "mmlu_test",
            [{"subject": "law", "question": "q", "choices": list("wxyz"), "answer": 2}],
            "A to D",
        ),
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
        (
            "longbench",
            "lcc_e",
            [{"input": "", "context": "", "answers": [], "length": "9"}],
            "number as length; TypeError",
        ),
        ("longbench", "longbench_config", [{}], "qasper must have its template .* KeyError"),
        ("ruler", "haystack_essays", [{"text": " "}], "must hold words in haystack_essays"),
        ("ruler", "haystack_essays", [{"essay": "a"}], "line 1: must be an object with text"),
        (
            "ruler",
            "squad",
            [{"context": "x", "qas": [{"question": "a"}]}],
            "qas of .* must have question and answers",
        ),
    ],
)
def test_mistakes_in_rows(task, name, rows, message, data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "data")
    (copy / f"{name}.json").unlink(missing_ok=True)
    write_lines(copy / f"{name}.json{'l' * (name != 'longbench_config')}", rows)
    subtasks = {"haystack_essays": ("niah_single_2",), "squad": ("qa_1",)}.get(name, ())
    with pytest.raises(UserError, match=message):
        run_task(
            task,
            copy,
            Settings(subtasks=subtasks, documents=(2,), shots=1, limit=1),
            Stub(True),
            IDENTITY,
        )
    (tmp_path / "plain.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="must be UTF-8 text"):
        run_task("perplexity", tmp_path / "plain.txt", Settings(), Stub(True), IDENTITY)


@pytest.mark.parametrize("name", ["web[/b]", "see [link] here", "[red]", ":warning: a"])
def test_names_of_data_are_printed_as_they_are(name, capsys):
    print_table([Row(name, "perplexity", 100, name, 2.5, 3, {})])
    heading, line = capsys.readouterr().out.split("100")
    assert name in line
    assert all(word in heading for word in name.split())


def test_summaries_name_sizes_and_draw(data, tmp_path):
    assert method_name({"method": "cca", "group_size": 16, "window_size": 8}) == "cca g=16 s=8"
    params = {"method": "cca", "fetch_groups": 4, "prefill": "full"}
    assert method_name(params) == "cca k=4 prefill=full"
    rows = summarise(
        run_task("perplexity", data, Settings(lengths=(16, 32)), Stub(False), IDENTITY)
    )
    assert all(record.name == "quality.perplexity" for record in to_records(rows, "here"))
    draw(rows, str(tmp_path / "p.svg"))
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_a_wrong_folder_of_data_is_refused_before_the_model_is_loaded(capfd):
    assert main(["eval", "--model", "none", "--task", "ruler", "--data", "typo"]) == 2
    assert "data must be an existing folder" in capfd.readouterr().err


def test_ruler_runs_whole_or_by_subtask(data, tmp_path):
    shutil.copy(data / "ruler_words.json", tmp_path)
    settings = Settings(lengths=(900,), limit=1)
    with pytest.raises(
        UserError, match=r"haystack_essays.* that of all 13 .*such as niah_single_1"
    ):
        ruler.items(tmp_path, settings, Stub(True))
    with pytest.raises(UserError, match=r"must hold squad_xquad_en\.jsonl or squad\.jsonl"):
        ruler.items(tmp_path, settings._replace(subtasks=("qa_1",)), Stub(True))
    assert ruler.available(data) == list(ruler.SUBTASKS)
    named = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
    assert ruler.available(tmp_path) == list(named)
    items = ruler.items(tmp_path, settings._replace(subtasks=named), Stub(True))
    assert [item.params["subtask"] for item in items] == list(named)


def test_the_number_of_items_is_said(data, tmp_path, capsys):
    settings = Settings(documents=(1,))
    for reused in (0, 3):
        items = multidoc_qa.items(data, settings, Stub(True))
        subject = Stub(True).learn(items)
        run_task("multidoc_qa", data, settings, subject, IDENTITY, results=tmp_path / "r.jsonl")
        line = f"multidoc_qa: 3 items, {reused} of them done before\n"
        assert line in capsys.readouterr().err


def test_progress_says_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr("corecontext.terminal.LINE_EVERY_S", 0)
    times = iter((100.0, 103.0, 103.0))
    monkeypatch.setattr("corecontext.terminal.time.monotonic", lambda: next(times))
    with progress("work", 4) as advance:
        advance(1)
    assert capsys.readouterr().err == "work: 25 %, about 0:00:09 left\n"


@pytest.mark.parametrize(
    "method, sizes, full, beyond",
    [
        ("cca", {"group_size": 4, "window_size": 20}, 39, 40),
        ("cca", {"group_size": 4, "window_size": 20, "sinks": 0}, 23, 24),
        ("cca", {"group_size": 4, "window_size": 20, "sinks": 5}, 31, 32),
        ("window", {"window_size": 20}, 20, 21),
        ("streaming_llm", {"window_size": 20, "sinks": 5}, 25, 26),
        ("lm_infinite", {"window_size": 20, "sinks": 5}, 21, 22),
        ("duo_attention", {"window_size": 20, "sinks": 5, "full_heads": "0:1"}, 25, 26),
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
        logits = [x.model(ids).logits[0, -1] for x in (loaded, plain)]
    assert not torch.allclose(*logits, rtol=1e-3)
    assert not plain.idle_note(full)


def test_idle_is_said_wherever_numbers_are_shown(model, data, tmp_path, capfd):
    (tmp_path / "text.txt").write_text("A short text.")
    text, page = str(tmp_path / "text.txt"), str(tmp_path / "page.html")
    of_model = ["--model", model, "--device", "cpu"]
    assert main(["perplexity", text, *of_model, "--compare"]) == 0
    shown = capfd.readouterr().out
    assert shown.count("was idle: at most 13 tokens, within its window (s = 1024)") == 3
    assert "positions from" not in shown and "not adapted" not in shown
    assert main(["inspect", text, *of_model, "--output", page]) == 0
    assert "CCA was idle" in capfd.readouterr().err and "CCA was idle" in Path(page).read_text()
    assert main(["compare", *of_model, "--data", str(data), *PERPLEXITY[:-2]]) == 0
    assert capfd.readouterr().err.count("perplexity: CCA was idle: at most 64 tokens") == 1


def test_duo_attention_is_a_method_with_heads_of_its_own(model, data, tmp_path, capfd):
    settings = {"method": "duo_attention", "window_size": 8, "device": "cpu"}
    assert load(model, full_heads="0:1, 1:0", **settings).rival.full_heads == ((1,), (0,))
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for sizes, heads in (([[4, 1], 4], ((1,), ())), ([1, 4], ((0, 1), ()))):
        cca = {"layer_group_sizes": sizes, "window_size": 16}
        (folder / "config.json").write_text(json.dumps({**config, "cca": cca}))
        assert load(str(folder), **settings).rival.full_heads == heads
    for wrong, message in (
        (None, "full_heads must be LAYER:HEAD,.* got none. Find them with corecontext layers"),
        ("0:1;1:0", "full_heads must be LAYER:HEAD,.* with layers from 0 to 1, got '0:1;1:0'"),
        ("2:0", "with layers from 0 to 1, got '2:0'"),
        ("0:2", "full_heads must have heads from 0 to 1 for each layer"),
    ):
        with pytest.raises(UserError, match=message):
            load(model, full_heads=wrong, **settings)
    with pytest.raises(UserError, match="full-heads must be left out with method 'cca'"):
        load(model, full_heads="0:1", device="cpu")
    argv = ["compare", "--model", model, "--data", str(data), *PERPLEXITY, "--full-heads", "0:1"]
    assert main([*argv, "--method", "full", "--method", "duo_attention"]) == 0
    assert "duo_attention" in capfd.readouterr().out


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


@pytest.mark.skipif(
    "CORECONTEXT_DATA" not in os.environ, reason="CORECONTEXT_DATA names no folder with the data"
)
@pytest.mark.parametrize("task", ["multidoc_qa", "ruler", "mmlu"])
def test_real_files(task):
    folder, settings = (
        os.environ["CORECONTEXT_DATA"],
        Settings(lengths=(2048,), documents=(5,), limit=1, positions=2),
    )
    subject = Stub(True)
    subject.learn(runner.TASKS[task].items(folder, settings, subject))
    assert {
        row.value for row in summarise(run_task(task, folder, settings, subject, IDENTITY))
    } == {1.0}
