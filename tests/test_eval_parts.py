"""The parts of evaluations, each by its contract: questions, prompts, samples, sums, records."""

import json
from types import SimpleNamespace

import pytest
import torch

from corecontext.eval import multidoc_qa, runner, summary, windows
from corecontext.eval.combine import perplexities, scores_by
from corecontext.eval.items import Generated, Question, Settings, TooLong, Window
from corecontext.eval.runner import run_task
from corecontext.eval.task_table import TASKS, Task
from corecontext.files import UserError
from corecontext.record import make_record


class Words:
    """A subject whose tokens are words; it answers the prompt's first word and keeps the calls."""

    limit: int | None = None
    chat = False

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def encode(self, text):
        return text.split()

    def decode(self, ids):
        return " ".join(ids)

    def encode_prompt(self, prompt, chat=True):
        self.calls.append(("encode", chat))
        return self.encode(prompt)

    def generate(self, prompt, max_new_tokens, stop=()):
        self.calls.append(("generate", max_new_tokens, stop))
        return prompt[0]

    def nll(self, ids):
        return torch.ones(len(ids) - 1)

    def idle_note(self, length):
        return f"idle at {length}"


# Questions


def test_a_question_is_asked_as_it_says_and_recorded():
    asked = []
    item = Generated(
        "key",
        {},
        lambda: Question("one two three", ("one", "x")),
        7,
        lambda *given: asked.append(given) or 0.25,
        ("\n", "."),
        chat=False,
    )
    subject = Words()
    subject.limit = 10
    outcome = item.run(subject)
    assert subject.calls == [("encode", False), ("generate", 7, ("\n", "."))]
    assert asked == [("one", ("one", "x"))]
    assert outcome.value == 0.25
    assert outcome.details == {"prompt_tokens": 3, "answer": "one", "references": ["one", "x"]}
    subject.limit = 9
    with pytest.raises(TooLong, match="3 tokens and 7 new ones exceed the model's 9"):
        item.run(subject)


def test_a_window_fits_the_model_exactly():
    subject = Words()
    subject.limit = 4
    outcome = Window("key", {}, [1, 2, 3, 4], 9).run(subject)
    details = outcome.details
    assert details == {"nll": 3.0, "tokens": 3, "bytes": 9, "buckets": [[0, 4, 3.0, 3]]}
    with pytest.raises(TooLong, match="5 tokens exceed the model's 4"):
        Window("key", {}, [1, 2, 3, 4, 5], 9).run(subject)


# Data and settings


@pytest.mark.parametrize(
    "settings, message",
    [
        (Settings(limit=0), "limit must be at least 1, got 0."),
        (Settings(positions=0), "positions must be at least 1, got 0."),
        (Settings(max_new_tokens=0), "max-new-tokens must be at least 1, got 0."),
        (Settings(lengths=(3, 0)), "length must be at least 1, got 0."),
        (Settings(limit=1, positions=1, max_new_tokens=1, lengths=(1,)), None),
    ],
)
def test_settings_have_a_least_value(settings, message):
    if message is None:
        runner._check(settings)
        return
    with pytest.raises(UserError, match=f"^{message}$"):
        runner._check(settings)


def test_each_item_is_recorded_with_all_that_makes_it_differ(tmp_path, monkeypatch, capsys):
    def items(data, settings, subject):
        return [
            Generated("a", {"length": 3}, lambda: Question("x y", ["x"]), 2, lambda *_: 1.0),
            Generated("e", {}, lambda: Question("x", []), 2, lambda *_: 0.0, chat=False),
            Window("c", {"domain": "d"}, list(range(9)), 7),
            Window("d", {"domain": "d"}, list(range(11)), 7),
        ]

    task = Task("exam", items, ("exam_dev",), perplexities)
    (tmp_path / "exam_dev.jsonl.gz").write_text("x")
    (tmp_path / "exam_test.jsonl").write_text("not of this task")
    subject = Words()
    subject.chat = True
    subject.limit = 10
    settings = Settings(seed=5, max_new_tokens=2)
    records = run_task(task, tmp_path, settings, subject, {"method": "cca"})
    assert [(r.name, r.unit) for r in records] == [
        ("quality.score", "fraction"),
        ("quality.score", "fraction"),
        ("quality.perplexity", "perplexity"),
    ]
    hashes = runner.data_hashes(task, tmp_path)
    assert list(hashes) == ["exam_dev.jsonl.gz"]
    for record, key, item_params in zip(records, "aec", ({"length": 3}, {}, {"domain": "d"})):
        common = {"method": "cca", "task": "exam", "data": hashes, "seed": 5, "max_new_tokens": 2}
        expected = {**common, **item_params, "item": key}
        if key != "c":
            expected["chat_template"] = key != "e"
        assert expected.items() <= record.params.items()
        assert record.params["run"] == runner.fingerprint(expected)
    err = capsys.readouterr().err
    assert "exam: 1 of 4 left out (11 tokens exceed the model's 10)" in err
    assert "exam: idle at 9\n" in err  # the longest: eight losses are nine tokens
    task = task._replace(items=lambda *given: items(*given)[:1] * 2)
    with pytest.raises(UserError, match="must have names of their own, got 1 twice"):
        run_task(task, tmp_path, settings, subject, {})


def test_a_fingerprint_does_not_depend_on_the_order_of_parameters():
    assert runner.fingerprint({"a": 1, "b": 2}) == runner.fingerprint({"b": 2, "a": 1})
    assert runner.fingerprint({"a": 1}) != runner.fingerprint({"a": 2})


def test_models_of_one_name_on_the_hub_are_told_apart():
    loaded = SimpleNamespace(sizes=dict, method="cca")
    assert runner.describe(loaded, "a/model") != runner.describe(loaded, "b/model")


# Prompts of the other tasks


def test_distractors_are_similar_ones_then_a_sample():
    pool = {f"d{i}": {"title": f"T{i}", "text": f"t{i}"} for i in range(30)}
    question = {
        "qid": "q",
        "question": "why?",
        "gold_doc": "d3",
        "hard": ["d9", "none", "d5", "d7", "d3"],
        "contains_answer": ["d7", "d1"],
    }

    def names(count: int, place: int = 0, seed: int = 1, **changes) -> list[str]:
        found = multidoc_qa.passages(pool, {**question, **changes}, count, place, seed)
        return [f"d{passage['title'][1:]}" for passage in found]

    assert names(1) == ["d3"] and names(2, 1) == ["d9", "d3"]
    assert names(3, 1) == ["d9", "d3", "d5"]
    many = names(27)
    assert many[:3] == ["d3", "d9", "d5"] and len(set(many)) == 27
    assert not {"d7", "d1"} & set(names(28))
    with pytest.raises(UserError, match="documents must be at most 28 for question q, got 29"):
        names(29)
    sampled = names(10)[3:]
    assert sampled == names(10)[3:] != sorted(sampled)
    assert sampled != names(10, seed=2)[3:]
    assert sampled != names(10, qid="r")[3:]
    assert multidoc_qa.gold_places(9, 1) == [4] and multidoc_qa.gold_places(9, 3) == [0, 4, 8]
    prompt = multidoc_qa.prompt_of(question, multidoc_qa.passages(pool, question, 2, 1, 1))
    lines = "Document [1](Title: T9) t9\nDocument [2](Title: T3) t3\n\nQuestion: why?\nAnswer:"
    assert prompt.endswith(f"\n\n{lines}")


def test_multidoc_items_stop_at_a_line_and_have_their_limits(tmp_path):
    pool = [{"doc_id": f"d{i}", "title": "t", "text": "x"} for i in range(4)]
    rows = [
        {"qid": i, "question": "q", "answers": ["a"], "gold_doc": "d0", "hard": []}
        for i in range(3)
    ]
    for name, lines in (("pool", pool), ("test", rows)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"multidoc_qa_{name}.jsonl").write_text(text)
    settings = Settings(documents=(4, 1), positions=2, limit=2)
    items = multidoc_qa.items(tmp_path, settings, Words())
    keys = ["0/4/0", "0/4/3", "1/4/0", "1/4/3", "0/1/0", "1/1/0"]
    assert [item.key for item in items] == keys
    assert {(item.max_new_tokens, item.stop, item.chat) for item in items} == {(100, ("\n",), True)}
    short = multidoc_qa.items(tmp_path, settings._replace(max_new_tokens=3), Words())
    assert {item.max_new_tokens for item in short} == {3}


def test_windows_have_the_length_the_limit_and_the_domain_that_is_asked(tmp_path):
    rows = [("a", 9), ("b", 25), ("a", 10), ("a", 40)]
    text = "".join(
        json.dumps({"id": f"{i}", "domain": domain, "text": "x " * count}) + "\n"
        for i, (domain, count) in enumerate(rows)
    )
    path = tmp_path / "lm_test.jsonl"
    path.write_text(text)

    def keys(limit_of_model=None, **settings):
        subject = Words()
        subject.limit = limit_of_model
        return [item.key for item in windows.items(tmp_path, Settings(**settings), subject)]

    every = keys(lengths=(10,))
    assert every == ["1/10/0", "1/10/10", "2/10/0", "3/10/0", "3/10/10", "3/10/20", "3/10/30"]
    assert keys(lengths=(10,), subtasks=("a",)) == every[2:]
    assert keys(lengths=(10, 25), limit=3) == [*every[:3], "1/25/0", "3/25/0"]
    assert keys(lengths=(10,), limit=1) == every[:1]
    assert keys(limit_of_model=20) == ["1/20/0", "3/20/0", "3/20/20"]
    assert windows.items(path, Settings(lengths=(40,)), Words())[0].params["domain"] == "a"
    for settings, message in (
        ({"lengths": (1,)}, "length must be at least 2, got 1."),
        ({}, "length must be at most that of a document, got 4096 and none"),
        ({"lengths": (10, 41)}, "got 41 and none as long"),
        ({"lengths": (30,), "subtasks": ("b",)}, "subtask must be a domain .* 30 tokens .*b"),
        ({"lengths": (10,), "subtasks": ("b", "c")}, "subtask must be one of a, b, got 'c'."),
    ):
        with pytest.raises(UserError, match=message):
            keys(**settings)


# Summaries


def test_the_whole_is_the_mean_of_its_items():
    places = [score(float(p == 2), "multidoc_qa", position=p) for p in (10, 2, 0, 2)]
    values = TASKS["multidoc_qa"].combine(places)
    assert list(values.items()) == [
        ("", (0.5, 4)),
        ("0", (0.0, 1)),
        ("2", (1.0, 2)),
        ("10", (0.0, 1)),
    ]
    names = [score(1.0, "x", subtask="b")] + [score(0.0, "x", subtask="a")] * 3
    assert list(scores_by("subtask", names).items()) == [
        ("", (0.25, 4)),
        ("b", (1.0, 1)),
        ("a", (0.0, 3)),
    ]


def score(value: float, task: str, **params):
    common = {"method": "cca", "model": "m", "weights": "w", "task": task, "run": "r"}
    return make_record("quality.score", value, {**common, **params}, device="here")


def test_rows_are_by_method_model_weights_task_and_size():
    base = {"position": 3, "length": 8, "item": "i", "seed": 1, "extra": 1}
    changes = [
        {},
        {"item": "j", "extra": 2},
        {"method": "full"},
        {"group_size": 4, "sinks": 2},
        {"model": "n"},
        {"weights": "v"},
        {"length": 9},
    ]
    records = [
        score(float(i), "multidoc_qa", **{**base, **change}) for i, change in enumerate(changes)
    ]
    rows = [row for row in summary.summarise(records) if not row.part]
    assert [(row.method, row.size, row.value, row.count) for row in rows] == [
        ("cca", 8, 0.5, 2),
        ("full", 8, 2.0, 1),
        ("cca g=4 sinks=2", 8, 3.0, 1),
        ("cca", 8, 4.0, 1),
        ("cca", 8, 5.0, 1),
        ("cca", 9, 6.0, 1),
    ]
    shared = {"method", "model", "weights", "task", "position", "length", "seed", "items"}
    assert set(rows[0].params) == shared and rows[0].params["items"] == 2
    published = summary.to_records(summary.summarise(records[:2]), "there")
    assert [record.params.get("part") for record in published] == [None, "3"]
    assert {record.device for record in published} == {"there"}
    several = [score(0.0, "multidoc_qa", position=place) for place in (0, 4, 4)]
    assert [row.params["items"] for row in summary.summarise(several)] == [3, 1, 2]
    names = ("quality.perplexity", "quality.accuracy", "quality.score")
    published = summary.to_records([rows[0]._replace(name=name) for name in names], "")
    assert tuple(record.name for record in published) == names
    documents = summary.summarise([score(1.0, "multidoc_qa", documents=20, position=0)])
    assert documents[0].size == 20


def test_perplexity_without_a_domain_has_no_part_of_it():
    params = {"nll": 4.0, "tokens": 2, "buckets": [[0, 2, 1.0, 1], [2, 3, 3.0, 1]]}
    records = [make_record("quality.perplexity", 1.0, {**params, "domain": x}) for x in ("", "d")]
    parts = {name: count for name, (_, count) in perplexities(records).items()}
    assert parts == {"": 4, "0-1": 2, "2-2": 2, "d": 2}
