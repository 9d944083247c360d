"""The parts of evaluations, each by its contract: questions, prompts, samples, sums, records."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from corecontext import inference
from corecontext.cli import main
from corecontext.eval import evaluate as evaluation
from corecontext.eval import longbench, mmlu, multidoc_qa, ruler, runner, summary, windows
from corecontext.eval.evaluate import ModelOptions, data_paths, evaluate, needs_data
from corecontext.eval.items import Chosen, Generated, Question, Settings, TooLong, Window
from corecontext.eval.ruler_data import Passages, Source
from corecontext.eval.runner import run_task
from corecontext.eval.subject import ModelSubject
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

    def choose(self, prompt, options):
        return 1

    def nll(self, ids):
        return torch.ones(len(ids) - 1)

    def idle_note(self, length):
        return f"idle at {length}"


# Questions
# -------------------------------------------------------------------------------------------------


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


def test_a_choice_is_recorded_beside_the_right_one():
    subject = Words()
    subject.limit = 3
    for right, value in ((1, 1.0), (3, 0.0)):
        item = Chosen("key", {}, lambda: "one two", (" A", " B", " C", " D"), right)
        outcome = item.run(subject)
        expected = {"prompt_tokens": 2, "answer": "B", "references": ["ABCD"[right]]}
        assert (outcome.value, outcome.details) == (value, expected)
    subject.limit = 2
    with pytest.raises(TooLong, match="2 tokens and 1 new ones"):
        item.run(subject)


def test_a_window_fits_the_model_exactly():
    subject = Words()
    subject.limit = 4
    outcome = Window("key", {}, [1, 2, 3, 4], 9).run(subject)
    details = outcome.details
    assert details == {"nll": 3.0, "tokens": 3, "bytes": 9, "buckets": [[0, 4, 3.0, 3]]}
    with pytest.raises(TooLong, match="5 tokens exceed the model's 4"):
        Window("key", {}, [1, 2, 3, 4, 5], 9).run(subject)


# The model under test
# -------------------------------------------------------------------------------------------------


class Tokenizer:
    """Letters, after a special token 0 unless it is left out; "!" goes around a user's message."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True, verbose=True):
        assert not verbose or len(text) < 3
        return {"input_ids": [0] * add_special_tokens + [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i or not skip_special_tokens)

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        assert turns == [{"role": "user", "content": "hi"}] and add_generation_prompt
        return "!hi!"


class Model:
    """Gives token 66 the largest logit after token 65, token 67 after all others."""

    device = "cpu"

    def __call__(self, ids, use_cache, logits_to_keep):
        logits = torch.zeros(1, ids.shape[1], 128)
        logits[0, torch.arange(ids.shape[1]), torch.where(ids[0] == 65, 66, 67)] = 3.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_a_subject_passes_its_settings_on(monkeypatch, chunk_size):
    calls = []

    class Engine:
        def __init__(self, model, **options):
            calls.append(options)

        def generate(self, ids, **options):
            calls.append((ids.tolist(), options))
            return [[0, 65, 66]]

    def prefill(model, ids, *, chunk_size):
        calls.append((ids.tolist(), chunk_size))
        logits = torch.zeros(1, 128)
        logits[0, 66] = 1.0
        return SimpleNamespace(logits=logits)

    def document_nll(model, ids, *, chunk_size):
        return ids.tolist(), chunk_size

    monkeypatch.setattr(inference, "Engine", Engine)
    monkeypatch.setattr(inference, "prefill", prefill)
    monkeypatch.setattr("corecontext.eval.subject.document_nll", document_nll)
    tokenizer = Tokenizer()
    loaded = SimpleNamespace(model=Model(), tokenizer=tokenizer, max_length=9, config=None)
    loaded.idle_note = lambda length: f"idle at {length}"
    subject = ModelSubject(loaded, chunk_size=chunk_size)
    assert subject.limit == 9 and subject.idle_note(4) == "idle at 4"
    subject.has_num_groups = True  # g grows with the text
    assert subject.idle_note(4) == ""
    assert subject.encode("hi") == [0, 104, 105]
    assert subject.encode_prompt("hi", chat=False) == [0, 104, 105]
    assert subject.encode_prompt("hi") == [33, 104, 105, 33]
    assert subject.generate([7], 3, ("x",)) == "AB"
    assert subject.choose([7, 8], ("A", "B", "C")) == 1
    assert subject.choose([7, 8], ("AB", "BC", "BB")) == 0
    assert subject.nll([1, 2]) == ([[1, 2]], chunk_size or 1024)
    options = {"max_new_tokens": 3, "stop_strings": ("x",), "tokenizer": tokenizer}
    assert calls == [
        {"chunk_size": chunk_size, "keep": 1},
        ([[7]], options),
        ([[7, 8]], chunk_size),
    ]


def test_every_option_of_an_evaluation_reaches_its_place(monkeypatch, tmp_path):
    seen = []
    model = SimpleNamespace(device="there")

    def load(name, **options):
        seen.append((name, options))
        config = None if options["method"] == "window" else SimpleNamespace(num_groups=None)
        return SimpleNamespace(model=model, config=config)

    def subject(loaded, **options):
        seen.append(options)
        return "subject"

    def run_task(task, data, settings, *rest, **options):
        seen.append((task, data, settings.subtasks, rest, options))
        return [task]

    monkeypatch.setattr(evaluation, "load", load)
    monkeypatch.setattr(evaluation, "ModelSubject", subject)
    monkeypatch.setattr(evaluation, "run_task", run_task)
    identity = {"group_size": 4, "window_size": 5}
    monkeypatch.setattr(evaluation, "describe", lambda *given: {**identity, "given": given[1:]})
    ours = {"core_mass": False, "fetch_groups": 2, "fetch_index": "mean", "prefill": "full"}
    sizes = {"group_size": 3, "window_size": 5, "sinks": 2, "patterns": "p", **ours}
    options = ModelOptions(sizes, 8, None, False, "float16", "meta")
    folder = str(tmp_path)
    settings = Settings(subtasks=("mmlu:law", "vt"))
    found = evaluate(
        "m", ["window", "cca"], ["mmlu", "ruler"], [folder], settings, options, "r.jsonl"
    )
    assert found == ["mmlu", "ruler"] * 2
    # No method has patterns: `load` refuses them.
    common = {"dtype": "float16", "device": "meta", "window_size": 5, "patterns": "p"}
    place = {"results": "r.jsonl", "device": "there"}
    of_window = {**identity, "given": ("m", "window")}
    of_cca = {"window_size": 5, "given": ("m", "cca"), "num_groups": 8}
    subject_options = {"chunk_size": None, "chat_template": False}
    assert seen == [
        ("m", {"method": "window", **common}),
        {"num_groups": None, **subject_options},
        ("mmlu", folder, ("law", "vt"), ("subject", of_window), place),
        ("ruler", folder, ("vt",), ("subject", of_window), place),
        ("m", {"method": "cca", "group_size": 3, "sinks": 2, **ours, **common}),
        {"num_groups": 8, **subject_options},
        ("mmlu", folder, ("law", "vt"), ("subject", of_cca), place),
        ("ruler", folder, ("vt",), ("subject", of_cca), place),
    ]
    seen.clear()
    evaluate("m", ["window"], ["mmlu"], [folder], settings, options)
    assert seen[1] == {"num_groups": 8, **subject_options}  # which the subject refuses
    seen.clear()
    evaluate("m", ["window", "streaming_llm"], ["mmlu"], [folder], settings, options)
    assert seen[1] == {"num_groups": 8, **subject_options}  # no method has core tokens
    seen.clear()
    options = options._replace(num_groups=None, chunk_size=6)
    evaluate("m", ["window"], ["mmlu"], [folder], settings, options)
    assert seen[0] == ("m", {"method": "window", **common, **sizes})  # one method: load refuses
    assert seen[1] == {"num_groups": None, "chunk_size": 6, "chat_template": False}
    assert seen[2][3] == ("subject", of_window)


# Data and settings
# -------------------------------------------------------------------------------------------------


def test_tasks_made_of_random_words_need_no_data(tmp_path, monkeypatch, capfd):
    for subtasks, needed in (
        ((), True),
        (("vt",), False),
        (("ruler:vt", "ruler:fwe", "mmlu:law"), False),
        (("vt", "cwe"), True),
    ):
        assert needs_data(Settings(subtasks=subtasks), "ruler") is needed
        assert needs_data(Settings(subtasks=subtasks), "mmlu")
    without = [task for task in ruler.SUBTASKS if task in ruler.available(tmp_path)]
    assert without == list(ruler.WITHOUT_FILES)
    assert data_paths([], ["ruler"], optional=["ruler"]) == {"ruler": ""}
    assert data_paths([str(tmp_path)], ["ruler"], optional=["ruler"]) == {"ruler": str(tmp_path)}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squad.jsonl").touch()  # of the folder that it runs in, not its data
    subject = Words()
    settings = Settings(lengths=(200,), subtasks=("vt", "fwe"), limit=1)
    records = run_task("ruler", "", settings, subject, {})
    assert [record.params["data"] for record in records] == [{}, {}]
    assert main(["eval", "--model", "none", "--task", "ruler", "--subtask", "cwe"]) == 2
    assert "data must be given for ruler, got none. Use --data FOLDER" in capfd.readouterr().err
    assert main(["eval", "--model", "./none", "--task", "ruler", "--subtask", "vt"]) == 2
    assert "model './none' does not exist" in capfd.readouterr().err


@pytest.mark.parametrize(
    "settings, message",
    [
        (Settings(limit=0), "limit must be at least 1, got 0."),
        (Settings(positions=0), "positions must be at least 1, got 0."),
        (Settings(shots=-1), "shots must be at least 0, got -1."),
        (Settings(max_new_tokens=0), "max-new-tokens must be at least 1, got 0."),
        (Settings(lengths=(3, 0)), "length must be at least 1, got 0."),
        (Settings(limit=1, positions=1, shots=0, max_new_tokens=1, lengths=(1,)), None),
    ],
)
def test_settings_have_a_least_value(settings, message):
    if message is None:
        runner._check("mmlu", settings)
        return
    with pytest.raises(UserError, match=f"^{message}$"):
        runner._check("mmlu", settings)


def test_each_item_is_recorded_with_all_that_makes_it_differ(tmp_path, monkeypatch, capsys):
    def items(data, settings, subject):
        return [
            Generated("a", {"length": 3}, lambda: Question("x y", ["x"]), 2, lambda *_: 1.0),
            Chosen("b", {"shots": 1}, lambda: "x " * 5, (" A", " B"), 0),
            Generated("e", {}, lambda: Question("x", []), 2, lambda *_: 0.0, chat=False),
            Window("c", {"domain": "d"}, list(range(9)), 7),
            Window("d", {"domain": "d"}, list(range(11)), 7),
        ]

    monkeypatch.setitem(runner.TASKS, "mmlu", runner.Task(items, ("mmlu_dev",)))
    (tmp_path / "mmlu_dev.jsonl.gz").write_text("x")
    (tmp_path / "mmlu_test.jsonl").write_text("not of this task")
    subject = Words()
    subject.chat = True
    subject.limit = 10
    settings = Settings(seed=5, max_new_tokens=2)
    records = run_task("mmlu", tmp_path, settings, subject, {"method": "cca"})
    assert [(r.name, r.unit) for r in records] == [
        ("quality.score", "fraction"),
        ("quality.accuracy", "fraction"),
        ("quality.score", "fraction"),
        ("quality.perplexity", "perplexity"),
    ]
    hashes = runner.data_hashes("mmlu", tmp_path)
    assert list(hashes) == ["mmlu_dev.jsonl.gz"]
    for record, key, item_params in zip(
        records, "abec", ({"length": 3}, {"shots": 1}, {}, {"domain": "d"})
    ):
        common = {"method": "cca", "task": "mmlu", "data": hashes, "seed": 5, "max_new_tokens": 2}
        expected = {**common, **item_params, "item": key}
        if key != "c":
            expected["chat_template"] = key != "e"
        assert expected.items() <= record.params.items()
        assert record.params["run"] == runner.fingerprint(expected)
    assert records[1].value == 0 and records[1].params["answer"] == "B"
    err = capsys.readouterr().err
    assert "mmlu: 1 of 5 left out (11 tokens exceed the model's 10)" in err
    assert "mmlu: idle at 9\n" in err  # the longest: eight losses are nine tokens
    monkeypatch.setitem(runner.TASKS, "mmlu", runner.Task(lambda *given: items(*given)[:1] * 2, ()))
    with pytest.raises(UserError, match="must have names of their own, got 1 twice"):
        run_task("mmlu", tmp_path, settings, subject, {})


def test_progress_counts_every_item_whether_asked_done_before_or_too_long(tmp_path, monkeypatch):
    def items(data, settings, subject):
        return [Window(f"{n}", {}, list(range(n)), n) for n in (3, 4, 9)]

    shown = []

    @contextlib.contextmanager
    def progress(title, total):
        shown.append((title, total))
        yield shown.append

    monkeypatch.setattr(runner, "progress", progress)
    monkeypatch.setitem(runner.TASKS, "mmlu", runner.Task(items, ()))
    subject = Words()
    subject.limit = 5
    for _ in range(2):
        run_task("mmlu", "", Settings(), subject, {"method": "cca"}, results=tmp_path / "r")
    assert shown == [("cca mmlu", 3), 1, 1, 1] * 2


def test_a_fingerprint_does_not_depend_on_the_order_of_parameters():
    assert runner.fingerprint({"a": 1, "b": 2}) == runner.fingerprint({"b": 2, "a": 1})
    assert runner.fingerprint({"a": 1}) != runner.fingerprint({"a": 2})


def test_a_method_is_described_by_the_content_of_its_patterns():
    sizes = {"dtype": "float32", "patterns": [[1, 2]]}
    loaded = SimpleNamespace(sizes=lambda: dict(sizes))
    found = runner.describe(loaded, "no/such/model", "minference")
    assert found == {
        "method": "minference",
        "model": "model",
        "weights": "no/such/model",
        "dtype": "float32",
        "patterns": runner.fingerprint([[1, 2]]),
    }


def test_models_of_one_name_on_the_hub_are_told_apart():
    loaded = SimpleNamespace(sizes=dict)
    assert runner.describe(loaded, "a/model", "cca") != runner.describe(loaded, "b/model", "cca")


# RULER
# -------------------------------------------------------------------------------------------------

WORDS = {
    "adjectives": [f"Adj{c}" for c in "abc"],
    "nouns": [f"noun{c}" for c in "ab"],
    "verbs": [f"verb{a}{b}" for a in "abcdefgh" for b in "abcdefgh"],
}


@pytest.fixture
def source(tmp_path) -> Source:
    lists = {**WORDS, "verbs": [*WORDS["verbs"], "two words", "verbaa"]}
    (tmp_path / "ruler_words.json").write_text(json.dumps(lists))
    (tmp_path / "haystack_essays.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    qas = [
        {"question": "q1", "answers": ["x", {"text": "y"}]},
        {"question": "q2", "answers": []},
    ]
    rows = [{"context": "first", "qas": qas}, {"context": "second", "qas": qas[:1]}]
    (tmp_path / "squad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = ["T", ["One. ", "Two."]]
    pair = {"question": "q", "answer": "a", "context": [["U", ["x"]], shared]}
    (tmp_path / "hotpotqa.json").write_text(json.dumps([{**pair, "context": [shared]}, pair]))
    return Source(tmp_path)


def test_data_files_are_words_essays_and_passages(source):
    assert source.words == WORDS
    assert source.essay_words == ["a", "b", "c"]
    squad = [("q1", ["x", "y"], [0]), ("q1", ["x", "y"], [1])]  # "q2" has no answer
    assert source.squad == Passages(["first", "second"], squad)
    passages = ["T\nOne. Two.", "U\nx"]
    assert source.hotpot == Passages(passages, [("q", ["a"], [0]), ("q", ["a"], [1, 0])])
    assert source.passages("qa_1") is source.squad and source.passages("qa_2") is source.hotpot


@pytest.mark.parametrize(
    "rows",
    [
        {"data": []},
        [{"question": "q", "context": [["T", ["One."]]]}],
        [{"question": "q", "answer": "a", "context": {"title": ["T"], "sentences": [["One."]]}}],
    ],
)
def test_rows_of_another_form_of_hotpotqa_are_refused(tmp_path, rows):
    (tmp_path / "hotpotqa.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match=r"must have question, answer, and context, a list of"):
        _ = Source(tmp_path).hotpot


def test_the_haystack_is_as_large_as_fits():
    def build(rng, units):
        return Question("x " * (10 + units), [])

    for room, step, units in (
        (9, 5, 0),
        (14, 5, 0),
        (15, 5, 5),
        (19, 5, 5),
        (20, 5, 10),
        (73, 1, 63),
        (74, 1, 64),
        (75, 1, 65),
        (30, 3, 18),
    ):
        found = ruler.largest_fitting(build, step, random.Random(0), room, Words())
        assert found == units, (room, step)
    # Data that is exhausted makes no longer prompt.
    endless = ruler.largest_fitting(lambda *_: Question("x", []), 2, random.Random(0), 9, Words())
    assert endless == 30


def test_a_sample_that_does_not_fit_loses_units_or_is_too_long(monkeypatch):
    lengths = {0: 21, 1: 46, 2: 57}

    def builder(task, length, index, source):
        return lambda rng, units: Question("x " * (lengths[index] + units), []), 5

    monkeypatch.setattr(ruler, "builder", builder)
    settings = Settings(lengths=(60,), limit=3, subtasks=("vt",), max_new_tokens=4)
    items = ruler.items("", settings, Words())
    prompts = [len(item.make().prompt.split()) for item in items[:2]]
    assert prompts == [56, 56]
    assert [item.max_new_tokens for item in items] == [4] * 3
    with pytest.raises(TooLong, match="vt needs at least 61 tokens, got 60"):
        items[2].make()


def test_samples_differ_by_seed_length_and_index():
    def prompt(index=0, **settings):
        settings = Settings(**{"lengths": (300,), "subtasks": ("vt",), "limit": 2, **settings})
        return ruler.items("", settings, Words())[index].make().prompt

    prompts = [prompt(), prompt(1), prompt(seed=1), prompt(lengths=(301,))]
    assert len(set(prompts)) == 4 and prompt() == prompts[0]


def test_every_question_of_a_file_is_asked_once_and_others_500_times(source):
    settings = Settings(subtasks=("vt", "qa_1", "qa_2", "cwe"))
    items = ruler.items(source.folder, settings, Words())
    counts = Counter(item.params["subtask"] for item in items)
    assert counts == {"vt": 500, "qa_1": 2, "qa_2": 2, "cwe": 500}
    assert {item.params["length"] for item in items} == {4096}
    limited = ruler.items(source.folder, settings._replace(limit=2), Words())
    assert Counter(item.params["subtask"] for item in limited) == dict.fromkeys(counts, 2)
    by_task = {item.params["subtask"]: item.score for item in items}
    scores = {"vt": ruler.match_all, "cwe": ruler.match_all}
    assert by_task == {**scores, "qa_1": ruler.match_any, "qa_2": ruler.match_any}


def test_needles_lie_at_their_depth():
    haystack = "".join(f"Line {i} of the text.\n" for i in range(100))
    text = ruler._hide(haystack, ["END", "BEGIN", "MIDDLE"], [39, 0, 20], "\n")
    lines = text.split("\n")
    assert len(lines) == 103 and lines[0] == "BEGIN" and lines[-1] == "END"
    assert text.index("MIDDLE") / len(text) == pytest.approx(20 / 39, abs=0.01)
    kept = [line for line in lines if line.startswith("Line")]
    assert kept == haystack.strip().split("\n")
    depths = [ruler._depth("niah_single_1", index)["depth"] for index in range(40)]
    assert sorted(depths) == [round(place / 39, 3) for place in range(40)]
    assert ruler._depth("niah_multivalue", 0) == ruler._depth("vt", 0) == {}


@pytest.mark.parametrize("task", ruler.NEEDLES)
def test_needles_have_the_answers_of_the_keys_that_are_asked(task, source):
    kind = ruler.NEEDLES[task]
    units = 2 if kind.haystack == "needle" and kind.key == "word" else 20
    build, _ = ruler.builder(task, 4096, 3, source)
    question = build(random.Random(1), units)
    text, _, asked = question.prompt.rpartition("\nQuestion: ")
    found = re.findall(r"special magic \w+ for (\S+) is: (\S+)\.", text)
    values: dict[str, list[str]] = {}
    for key, value in found:
        values.setdefault(key, []).append(value)
    others = units if kind.haystack == "needle" else 0
    assert len(values) == kind.keys + others  # no key comes twice
    keys = [key for key in values if key in asked]
    assert len(keys) == kind.asked
    assert sorted(question.references) == sorted(value for key in keys for value in values[key])
    assert len(question.references) == kind.asked * kind.values
    assert all(re.fullmatch(r"\d{7}" if kind.value == "number" else r"[\da-f-]{36}", value)
               for _, value in found)  # fmt: skip


def test_no_needle_of_the_haystack_has_a_key_of_a_question(source):
    used = {"adja-nouna"}
    text = ruler._haystack(ruler.NEEDLES["niah_multikey_2"], source, random.Random(0), 5, used)
    keys = re.findall(r"for (\S+) is", text)
    assert len(set(keys)) == 5 and "adja-nouna" not in keys


def test_variables_are_assigned_in_order():
    for seed in range(5):
        question = ruler._variables(random.Random(seed), 6)
        example, text = question.prompt.split(".\n\n")
        names = question.references
        assert len(set(names)) == 5
        links = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text)
        value = links[0][1]
        assert links == list(zip(names, [value, *names]))
        assert f"assigned the value {value}," in text
        assert text.count("The grass is green.") == 6
        solved = re.findall(r"VAR (\w+) =", example)
        assert example.endswith(" ".join(solved)) and not set(solved) & set(names)


@pytest.mark.parametrize("length, often, seldom", [(4095, 10, 2), (4096, 30, 3)])
def test_common_words_come_as_often_as_ruler_says(source, length, often, seldom):
    build, step = ruler.builder("cwe", length, 0, source)
    assert step == 10
    question = build(random.Random(2), 7)
    example, text = question.prompt.split(".\n\n")
    numbered = re.findall(r"(\d+)\. (\w+)", text)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    counts = Counter(word for _, word in numbered)
    assert counts == dict.fromkeys(question.references, often) | {
        word: seldom for word in counts if word not in question.references
    }
    assert len(counts) == 10 + 7
    common = [word in question.references for _, word in numbered]
    assert common != sorted(common) and common != sorted(common, reverse=True)
    solved = example.split(" are ")[-1].split()
    assert not set(counts) & set(solved)
    counts = Counter(re.findall(r"\d+\. (\w+)", example))
    assert counts == dict.fromkeys(solved, 10) | {
        word: 2 if often == 10 else 3 for word in counts if word not in solved
    }
    assert len(counts) == 30 and not set(counts) & set(question.references)


def test_frequent_words_fall_with_the_square_of_their_rank():
    question = ruler._frequent_words(200, random.Random(0), 400)
    counts = Counter(question.prompt.split("\n")[1].split()).most_common()
    scale = 400 / (1 + 1 / 4 + 1 / 9 + 1 / 16)
    assert [word for word, _ in counts[:4]][:1] == ["..."]
    assert [word for word, _ in counts[1:]] == question.references
    assert [count for _, count in counts] == [round(scale / rank**2) for rank in (1, 2, 3, 4)]


def test_a_question_stands_among_its_passages_and_others():
    passages = Passages([f"text {i}" for i in range(9)], [("q?", ["a"], [2, 7])])
    for units, count in ((0, 2), (3, 5), (50, 9)):
        question = ruler._passages(passages, 0, random.Random(0), units)
        found = re.findall(r"Document (\d+):\n(text \d)", question.prompt)
        assert [int(number) for number, _ in found] == list(range(1, count + 1))
        assert len({text for _, text in found}) == count
        assert {"text 2", "text 7"} <= {text for _, text in found}
        assert question.prompt.endswith("\n\nQuestion: q?\nAnswer:") and question.references == [
            "a"
        ]
    orders = set()
    for seed in range(20):
        prompt = ruler._passages(passages, 0, random.Random(seed), 3).prompt
        orders.add(tuple(text in ("2", "7") for text in re.findall(r":\ntext (\d)", prompt)))
    assert len(orders) > 5  # of 10: those that are asked about stand anywhere


# Prompts of the other tasks
# -------------------------------------------------------------------------------------------------


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


def test_longbench_buckets_and_lengths(tmp_path):
    names = ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]
    assert [longbench._bucket({"length": n}) for n in (0, 3999, 4000, 7999, 8000)] == names
    tasks = ("qasper", "lcc")
    config = {
        "dataset2prompt": dict.fromkeys(tasks, "{context} {input}"),
        "dataset2maxlen": {"qasper": 128, "lcc": 64},
    }
    (tmp_path / "longbench_config.json").write_text(json.dumps(config))
    row = {"input": "a b", "context": "1 2 3 4 5", "answers": ["x"], "length": 5}
    for name, rows in (("qasper_e", 3), ("qasper", 1), ("lcc", 2)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * rows)
    subject = Words()
    items = longbench.items(tmp_path, Settings(limit=2), subject)
    keys = ["qasper/31500/0", "qasper/31500/1", "lcc/31500/0", "lcc/31500/1"]
    assert [item.key for item in items] == keys
    assert [item.max_new_tokens for item in items] == [128, 128, 64, 64]
    subject.limit = 700
    assert {x.params["length"] for x in longbench.items(tmp_path, Settings(), subject)} == {100}
    short = Settings(max_new_tokens=12)
    assert {x.params["length"] for x in longbench.items(tmp_path, short, subject)} == {600}
    subject.limit = 499
    assert {x.params["length"] for x in longbench.items(tmp_path, Settings(), subject)} == {1}
    settings = Settings(lengths=(7, 6, 5, 1), subtasks=("qasper",), max_new_tokens=9, limit=1)
    items = longbench.items(tmp_path, settings, subject)
    assert {item.max_new_tokens for item in items} == {9}
    prompts = [item.make().prompt for item in items]
    assert prompts == ["1 2 3 4 5 a b", "1 2 35 a b", "1 2a b", ""]
    with pytest.raises(UserError, match="subtask must be one of qasper, .* got 'qaspr'"):
        longbench.items(tmp_path, Settings(subtasks=("qaspr",)), subject)
    with pytest.raises(UserError, match="hotpotqa"):
        longbench.items(tmp_path, Settings(subtasks=("hotpotqa",)), subject)


def test_a_cut_prompt_of_longbench_has_room_for_the_longest_answer(tmp_path):
    """By default too; such a prompt would be left out."""
    config = {"dataset2prompt": {"lcc": "{context}"}, "dataset2maxlen": {"lcc": 512}}
    (tmp_path / "longbench_config.json").write_text(json.dumps(config))
    row = {"input": "", "context": "word " * 3000, "answers": ["x"], "length": 3000}
    (tmp_path / "lcc.jsonl").write_text(json.dumps(row))
    subject = Words()
    subject.limit = 2048
    (item,) = longbench.items(tmp_path, Settings(), subject)
    assert 1000 < len(subject.encode(item.make().prompt)) <= 2048 - item.max_new_tokens


@pytest.mark.parametrize(
    "task, answer, references, score",
    [
        ("qasper", "the cat\nsat", ["cat", "cat sat"], 1.0),
        ("triviaqa", "\n\ncat\nsat", ["cat sat", "dog"], 2 / 3),
        ("passage_count", "3 or 4", ["4"], 0.5),
        ("passage_retrieval_en", "Paragraph 4", ["Paragraph 4"], 1.0),
        ("lcc", "# a\nx = 1\ny", ["x = 1"], 1.0),
        ("trec", "City\nPlace", ["City"], 1.0),
        ("trec", "City, Place", ["Place"], 0.5),
        ("multifieldqa_en", "cat", [], 0.0),
    ],
)
def test_longbench_tasks_have_their_own_scores(task, answer, references, score):
    row = {"all_classes": ["City", "Place"]}
    assert longbench.scorer(task, row)(answer, references) == pytest.approx(score)


def test_every_task_of_longbench_has_the_metric_of_the_benchmark():
    metrics = {name: metric.__name__ for name, metric in longbench.METRICS.items()}
    assert metrics == {
        **dict.fromkeys(("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa"), "token_f1"),
        "triviaqa": "token_f1",
        **dict.fromkeys(("gov_report", "multi_news", "samsum"), "rouge_l"),
        **dict.fromkeys(("passage_count", "passage_retrieval_en"), "number_match"),
        **dict.fromkeys(("lcc", "repobench-p"), "edit_similarity"),
    }
    assert set(longbench.SUBTASKS) == {*metrics, "trec"}


def test_mmlu_takes_so_many_questions_and_examples_of_each_subject(tmp_path):
    row = {"choices": list("wxyz"), "answer": "C"}
    for split, count in (("dev", 3), ("test", 4)):
        rows = [
            {**row, "subject": subject, "question": f" {split}{i}? "}
            for subject in ("a_b", "law")
            for i in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"mmlu_{split}.jsonl").write_text(text)
    items = mmlu.items(tmp_path, Settings(limit=3, shots=1), Words())
    keys = ["a_b/0", "a_b/1", "a_b/2", "law/4", "law/5", "law/6"]
    assert [item.key for item in items] == keys
    assert {item.right for item in items} == {2}
    assert items[0].params == {"subtask": "a_b", "shots": 1}
    block = "?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    head = "The following are multiple choice questions (with answers) about a b."
    assert items[0].make() == f"{head}\n\ndev0{block} C\n\ntest0{block}"
    one = mmlu.items(tmp_path, Settings(subtasks=("law",), shots=0), Words())
    assert [item.params["subtask"] for item in one] == ["law"] * 4
    assert one[0].make() == f"{head.replace('a b', 'law')}\n\ntest0{block}"


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
# -------------------------------------------------------------------------------------------------


def score(value: float, task: str, **params):
    common = {"method": "cca", "model": "m", "weights": "w", "task": task, "run": "r"}
    return make_record("quality.score", value, {**common, **params}, device="here")


def test_the_whole_is_the_mean_of_what_each_benchmark_says():
    ruler_records = [score(1.0, "ruler", subtask="vt")] + [score(0.0, "ruler", subtask="cwe")] * 3
    parts = summary.score_parts(ruler_records)
    assert parts == {"": (0.5, 4), "vt": (1.0, 1), "cwe": (0.0, 3)}
    subjects = [score(1.0, "mmlu", subtask="a")] + [score(0.0, "mmlu", subtask="b")] * 3
    assert summary.score_parts(subjects) == {"": (0.25, 4), "a": (1.0, 1), "b": (0.0, 3)}
    places = [score(float(p == 2), "multidoc_qa", position=p) for p in (10, 2, 0, 2)]
    found = summary.score_parts(places)
    assert list(found.items()) == [
        ("", (0.5, 4)),
        ("0", (0.0, 1)),
        ("2", (1.0, 2)),
        ("10", (0.0, 1)),
    ]
    tasks = [
        score(value, "longbench", subtask=subtask, bucket=bucket)
        for value, subtask, bucket in (
            (1.0, "qasper", "0-4k"),
            (0.0, "qasper", "4-8k"),
            (0.0, "qasper", "4-8k"),
            (0.2, "multifieldqa_en", "0-4k"),
            (0.8, "lcc", "8k+"),
        )
    ]
    assert summary.score_parts(tasks) == {
        "": (pytest.approx((0.35 + 0.8) / 2), 5),
        "qasper": (0.5, 3),
        "multifieldqa_en": (0.2, 1),
        "lcc": (0.8, 1),
        "single-document QA": (pytest.approx(0.35), 4),
        "code": (0.8, 1),
    }


def test_rows_are_by_method_model_weights_task_and_size():
    base = {"subtask": "vt", "length": 8, "item": "i", "seed": 1, "extra": 1}
    changes = [
        {},
        {"item": "j", "extra": 2},
        {"method": "full"},
        {"group_size": 4, "sinks": 2},
        {"model": "n"},
        {"weights": "v"},
        {"length": 9},
    ]
    records = [score(float(i), "ruler", **{**base, **change}) for i, change in enumerate(changes)]
    rows = [row for row in summary.summarise(records) if not row.part]
    assert [(row.method, row.size, row.value, row.count) for row in rows] == [
        ("cca", 8, 0.5, 2),
        ("full", 8, 2.0, 1),
        ("cca g=4 sinks=2", 8, 3.0, 1),
        ("cca", 8, 4.0, 1),
        ("cca", 8, 5.0, 1),
        ("cca", 9, 6.0, 1),
    ]
    shared = {"method", "model", "weights", "task", "subtask", "length", "seed", "items"}
    assert set(rows[0].params) == shared and rows[0].params["items"] == 2
    published = summary.to_records(summary.summarise(records[:2]), "there")
    assert [record.params.get("part") for record in published] == [None, "vt"]
    assert {record.device for record in published} == {"there"}
    several = [score(0.0, "ruler", subtask=subtask) for subtask in ("vt", "cwe", "cwe")]
    assert [row.params["items"] for row in summary.summarise(several)] == [3, 1, 2]
    names = [
        summary.to_records([rows[0]._replace(task=task)], "")[0].name
        for task in ("perplexity", "mmlu", "ruler")
    ]
    assert names == ["quality.perplexity", "quality.accuracy", "quality.score"]
    documents = summary.summarise([score(1.0, "multidoc_qa", documents=20, position=0)])
    assert documents[0].size == 20


def test_perplexity_without_a_domain_has_no_part_of_it():
    params = {"nll": 4.0, "tokens": 2, "buckets": [[0, 2, 1.0, 1], [2, 3, 3.0, 1]]}
    records = [make_record("quality.perplexity", 1.0, {**params, "domain": x}) for x in ("", "d")]
    parts = {name: count for name, (_, count) in summary.perplexity_parts(records).items()}
    assert parts == {"": 4, "0-1": 2, "2-2": 2, "d": 2}


def row(method: str, task: str, size: int | None, part: str, value: float) -> summary.Row:
    return summary.Row(method, task, size, part, value, 1, {})


def test_a_table_has_a_column_for_each_method_and_no_parts_if_asked(capsys):
    rows = [
        row("full", "mmlu", None, "", 0.255),
        row("full", "mmlu", None, "law", 1.0),
        row("cca", "perplexity", 64, "", 12.3),
        row("cca", "mmlu", None, "", 0.5),
    ]
    for parts, law in ((True, ["mmlu law 100.0"]), (False, [])):
        summary.print_table(rows, parts)
        shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        lines = [line for line in shown if line[:1].isalpha()]
        assert lines == ["task size part full cca", "mmlu all 25.5 50.0", *law,
                         "perplexity 64 all 12.3000"]  # fmt: skip


class Panel:
    """Keeps the calls of a matplotlib axis."""

    def __init__(self) -> None:
        self.calls: dict[str, list] = {}

    def __getattr__(self, name):
        return lambda *args, **_: self.calls.setdefault(name, []).append(args)


def test_a_figure_has_scores_in_percent_against_sizes_in_order():
    panel = Panel()
    points = [("cca", 16, 0.5), ("full", 8, 1.0), ("cca", 8, 0.25)]
    summary._draw_panel(panel, "ruler", [row(m, "ruler", n, "", x) for m, n, x in points])
    lines = [(["8", "16"], [25.0, 50.0], "o-"), (["8"], [100.0], "o-")]
    assert panel.calls["plot"] == lines
    assert panel.calls["set_ylabel"][-1] == ("score, %",)
    assert panel.calls["set_xlabel"] == [("length, tokens",)]
    assert panel.calls["set_ylim"] == [(-3, 103)]
    panel = Panel()
    summary._draw_panel(panel, "perplexity", [row("cca", "perplexity", None, "", 7.5)])
    assert panel.calls["plot"] == [(["all"], [7.5], "o-")]
    assert panel.calls["set_ylabel"][-1] == ("perplexity",) and "set_ylim" not in panel.calls
    summary._draw_panel(panel, "multidoc_qa", [])
    assert panel.calls["set_xlabel"][-1] == ("documents",)
