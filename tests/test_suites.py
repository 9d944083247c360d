"""RULER, MMLU and LongBench-E on small files: a copying stub scores 100, a silent one 0; samples,
prompts and metrics by their definitions."""

import json
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_eval import IDENTITY, Stub, write_lines
from test_eval_parts import Words, score
from tiny_model import save_tiny_model

from corecontext.eval.evaluate import needs_data
from corecontext.eval.items import Question, Settings, TooLong
from corecontext.eval.multidoc_qa import contains_answer
from corecontext.eval.runner import run_task
from corecontext.eval.summary import summarise
from corecontext.files import UserError
from corecontext.record import read_records
from reproduction.command import main
from reproduction.suites import choices, longbench, mmlu, ruler, scores
from reproduction.suites.ruler_data import Passages, Source
from reproduction.suites.tasks import SUITES

NOUNS = [f"noun{a}{b}" for a in "abcd" for b in "abcdefgh"]


@pytest.fixture(scope="session")
def suite_data(tmp_path_factory) -> Path:
    """Small files in the shapes that the suites read."""
    folder = tmp_path_factory.mktemp("suites")
    words = {
        "adjectives": [f"a{noun}" for noun in NOUNS],
        "nouns": NOUNS,
        "verbs": [f"{noun}ing" for noun in NOUNS],
    }
    (folder / "ruler_words.json").write_text(json.dumps(words))
    essay = "Some plain words were said. Others were not. " * 40
    write_lines(folder / "haystack_essays.jsonl", [{"text": essay}])
    passages = []
    for i, noun in enumerate(NOUNS[:8]):
        qas = [{"question": f"which number is {noun}?", "answers": [{"text": f"number {i}"}]}]
        passages.append({"context": f"Here {noun} is number {i}.", "qas": qas})
    write_lines(folder / "squad.jsonl", passages)
    questions = [
        {
            "question": f"where is {noun}?",
            "answer": f"{noun} hall",
            "context": [[f"T{noun}", [f"{noun} hall.", " It is."]], ["Same", ["as ever."]]],
        }
        for noun in NOUNS[:4]
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(questions))
    for split, count in (("dev", 5), ("test_subset", 3)):
        rows = [
            {
                "subject": subject,
                "idx": i,
                "question": f"{subject} {i}?",
                "choices": ["w", "x", "y", "z"],
                "answer": "ABCD"[i % 4],
            }
            for subject in ("high_school_math", "law")
            for i in range(count)
        ]
        write_lines(folder / f"mmlu_{split}.jsonl", rows)
    config = {
        "dataset2prompt": {
            task: f"Read, {task}. {{context}}\nAsk: {{input}}" for task in longbench.SUBTASKS
        },
        "dataset2maxlen": dict.fromkeys(longbench.SUBTASKS, 6),
    }
    (folder / "longbench_config.json").write_text(json.dumps(config))
    answers = {
        "trec": ["Human being"],
        "passage_count": ["7"],
        "passage_retrieval_en": ["Paragraph 7"],
    }
    for task in longbench.SUBTASKS:
        rows = [
            {
                "_id": f"{task}{i}",
                "input": "what?",
                "context": f"text {i} " * 20,
                "length": 3000 + 3000 * i,
                "answers": answers.get(task, ["a blue bird sang"]),
                "all_classes": ["Human being", "Human", "Place"],
            }
            for i in range(3)
        ]
        write_lines(folder / f"{task}_e.jsonl", rows)
    return folder


@pytest.fixture
def stub_chooses(monkeypatch):
    """Let a stub choose by itself."""
    monkeypatch.setattr(choices, "choose", lambda subject, *given: subject.choose(*given))


TASKS = [
    ("ruler", Settings(lengths=(900, 1500), limit=3)),
    ("mmlu", Settings()),
    ("longbench", Settings(lengths=(30,))),
]


@pytest.mark.parametrize("task, settings", TASKS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_copier_scores_100_and_silence_0(task, settings, suite_data, stub_chooses):
    if task == "longbench":
        pytest.importorskip("rouge")
    for copies, value in ((True, 1.0), (False, 0.0)):
        subject = Stub(copies)
        subject.learn(SUITES[task].items(suite_data, settings, subject))
        records = run_task(SUITES[task], suite_data, settings, subject, IDENTITY)
        rows = summarise(records, SUITES)
        assert all(row.value == pytest.approx(value) for row in rows) and rows[0].part == ""
        names = {row.part for row in rows} - {""}
        if task == "ruler":
            assert names == set(ruler.SUBTASKS)
        if task == "longbench":
            assert names == {*longbench.CATEGORIES, *longbench.SUBTASKS}


def test_the_command_compares_methods_on_suites(suite_data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = save_tiny_model(tmp_path / "model", max_length=2048)
    argv = ["compare", "--model", model, "--data", str(suite_data), "--preset", "pooling"]
    argv += ["--window-size", "16"]
    argv += ["--limit", "1", "--max-new-tokens", "2", "--length", "400", "--device", "cpu"]
    argv += ["--full-heads", "0:1", "--results", "r.jsonl", "--json", "s.jsonl"]
    subtasks = ("ruler:niah_single_1", "longbench:qasper", "longbench:lcc", "mmlu:law")
    for option, names in (
        ("--subtask", subtasks),
        ("--task", ("ruler", "longbench", "mmlu")),
        ("--method", ("full", "cca", "minference", "duo_attention")),
    ):
        for name in names:
            argv += [option, name]
    assert main(argv) == 0
    shown = capfd.readouterr().out
    assert all(word in shown for word in ("niah_single_1", "single-document QA", "duo_attention"))
    asked = {(r.params["method"], r.params["task"]) for r in read_records("r.jsonl")}
    assert len(asked) == 12
    names = {r.params["task"]: r.name for r in read_records("s.jsonl")}
    assert names.pop("mmlu") == "quality.accuracy" and set(names.values()) == {"quality.score"}
    for wrong, message in (
        (["--task", "glue"], "task must be perplexity, multidoc_qa, ruler, mmlu or longbench"),
        (["--task", "ruler", "--subtask", "niah"], "subtask must be one of niah_single_1"),
        (["--task", "ruler", "--subtask", "rulr:vt"], "with a task of ruler, got 'rulr:vt'"),
        (["--task", "mmlu", "--method", "minference", "--sinks", "3"], "sinks must be left out"),
        (["--task", "mmlu", "--method", "minference", "--patterns", "no.json"], "does not exist"),
    ):
        assert main(["compare", "--model", model, "--data", str(suite_data), *wrong]) == 2
        err = capfd.readouterr().err
        assert message in err and err.count("\n") == 1
    assert main(["compare", "--model", model, "--task", "ruler", "--subtask", "cwe"]) == 2
    assert "data must be given for ruler, got none. Use --data FOLDER" in capfd.readouterr().err


# RULER


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


@pytest.mark.parametrize("task", ruler.SUBTASKS)
def test_ruler_samples_fit_and_hold_their_answers(task, suite_data):
    subject = Stub(True)
    for length in (800, 1100):
        settings = Settings(lengths=(length,), subtasks=(task,), limit=3)
        items = ruler.items(suite_data, settings, subject)
        questions = [item.make() for item in items]
        for item, question in zip(items, questions):
            tokens = len(subject.encode(question.prompt)) + item.max_new_tokens
            # The files have too few passages to fill such lengths.
            assert tokens <= length and (task.startswith("qa") or tokens > 0.6 * length)
            assert question.references
            assert all(answer in question.prompt for answer in question.references)
        assert len({question.prompt for question in questions}) == len(questions)
        again = ruler.items(suite_data, settings, subject)
        assert [item.make() for item in again[::-1]] == questions[::-1]  # in any order


def test_ruler_runs_whole_or_by_subtask(suite_data, tmp_path):
    shutil.copy(suite_data / "ruler_words.json", tmp_path)
    settings = Settings(lengths=(900,), limit=1)
    with pytest.raises(
        UserError, match=r"haystack_essays.* that of all 13 .*such as niah_single_1"
    ):
        ruler.items(tmp_path, settings, Stub(True))
    with pytest.raises(UserError, match=r"must hold squad_xquad_en\.jsonl or squad\.jsonl"):
        ruler.items(tmp_path, settings._replace(subtasks=("qa_1",)), Stub(True))
    assert ruler.available(suite_data) == list(ruler.SUBTASKS)
    named = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
    assert ruler.available(tmp_path) == list(named)
    items = ruler.items(tmp_path, settings._replace(subtasks=named), Stub(True))
    assert [item.params["subtask"] for item in items] == list(named)


def test_tasks_made_of_random_words_need_no_data(tmp_path, monkeypatch):
    for subtasks, needed in (
        ((), True),
        (("vt",), False),
        (("ruler:vt", "ruler:fwe", "mmlu:law"), False),
        (("vt", "cwe"), True),
    ):
        assert needs_data(Settings(subtasks=subtasks), SUITES["ruler"]) is needed
        assert needs_data(Settings(subtasks=subtasks), SUITES["mmlu"])
    assert ruler.available(tmp_path) == list(ruler.WITHOUT_FILES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squad.jsonl").touch()  # of the folder that it runs in, not its data
    settings = Settings(lengths=(200,), subtasks=("vt", "fwe"), limit=1)
    records = run_task(SUITES["ruler"], "", settings, Words(), {})
    assert [record.params["data"] for record in records] == [{}, {}]


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
        assert question.prompt.endswith("\n\nQuestion: q?\nAnswer:")
        assert question.references == ["a"]
    orders = set()
    for seed in range(20):
        prompt = ruler._passages(passages, 0, random.Random(seed), 3).prompt
        orders.add(tuple(text in ("2", "7") for text in re.findall(r":\ntext (\d)", prompt)))
    assert len(orders) > 5  # of 10: those that are asked about stand anywhere


# MMLU


def test_mmlu_prompt(suite_data, monkeypatch):
    monkeypatch.setattr(mmlu, "SHOTS", 2)
    subject = Stub(True)
    items = mmlu.items(suite_data, Settings(limit=1), subject)
    assert [item.params for item in items] == [
        {"subtask": "high_school_math", "shots": 2},
        {"subtask": "law", "shots": 2},
    ]
    assert items[0].make() == (
        "The following are multiple choice questions (with answers) about high school math.\n\n"
        "high_school_math 0?\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\n"
        "high_school_math 1?\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\n"
        "high_school_math 0?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    )
    subject.limit = 40
    assert items[0].make().count("Answer: ") == 1  # examples are lost from the end
    with pytest.raises(UserError, match="subtask must be one of high_school_math, law, got 'lwa'"):
        mmlu.items(suite_data, Settings(subtasks=("law", "lwa")), subject)
    monkeypatch.setattr(mmlu, "SHOTS", 6)
    with pytest.raises(UserError, match="examples must be at least 6"):
        mmlu.items(suite_data, Settings(), subject)


def test_an_mmlu_prompt_and_its_letter_fit_the_limit(suite_data, stub_chooses):
    subject = Stub(True)
    items = mmlu.items(suite_data, Settings(limit=1), subject)
    subject.learn(items)
    length = len(subject.encode_prompt(items[0].make()))
    for limit, shots in ((length, 4), (length + 1, 5)):
        subject.limit = limit
        subject.learn(items)
        assert items[0].make().count("Answer: ") == shots
        assert items[0].run(subject).value == 1


# LongBench-E


def test_longbench_cuts_the_middle(suite_data):
    items = longbench.items(suite_data, Settings(lengths=(10,), subtasks=("qasper",)), Stub(True))
    prompt = items[0].make().prompt
    assert len(Stub(True).encode(prompt)) == 10
    assert prompt.startswith("Read, qasper. text 0") and prompt.endswith("what?")
    row = {"all_classes": []}
    assert longbench.scorer("triviaqa", row)("\nblue\nx", ["blue"]) == 1.0
    assert longbench.scorer("qasper", row)("blue\nx", ["blue", "red"]) == pytest.approx(2 / 3)


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


def test_longbench_continues_examples_and_code_without_a_template(suite_data):
    items = longbench.items(suite_data, Settings(lengths=(30,)), Stub(True))
    continued = {item.params["subtask"] for item in items if not item.chat}
    assert continued == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}


# Scores


def test_the_whole_is_the_mean_of_what_each_benchmark_says():
    ruler_records = [score(1.0, "ruler", subtask="vt")] + [score(0.0, "ruler", subtask="cwe")] * 3
    assert ruler.combine(ruler_records) == {"": (0.5, 4), "vt": (1.0, 1), "cwe": (0.0, 3)}
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
    assert longbench.combine(tasks) == {
        "": (pytest.approx((0.35 + 0.8) / 2), 5),
        "qasper": (0.5, 3),
        "multifieldqa_en": (0.2, 1),
        "lcc": (0.8, 1),
        "single-document QA": (pytest.approx(0.35), 4),
        "code": (0.8, 1),
    }


def test_f1_counts_a_word_as_often_as_it_comes():
    assert scores.token_f1("cat cat dog dog", "cat cat bird") == pytest.approx(4 / 7)
    assert scores.token_f1("cat cat cat", "cat") == pytest.approx(2 / 4)


def test_edit_similarity_is_in_whole_hundredths():
    assert scores.edit_similarity("ab", "abcd") == 0.67
    assert scores.edit_similarity("a", "abcde") == 0.33


def test_longbench_names_a_missing_package_before_the_first_answer(suite_data, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(UserError, match="Install it: pip install rouge"):
        longbench.items(suite_data, Settings(lengths=(30,), subtasks=("samsum",)), Stub(True))


@pytest.mark.parametrize(
    "task, name, row, message",
    [
        ("mmlu", "mmlu_test", {"subject": "law", "question": "q", "answer": ""}, "A to D"),
        ("longbench", "lcc_e", {"length": "9"}, "number as length; TypeError"),
        ("longbench", "longbench_config", {}, "qasper must have its template .* KeyError"),
        ("ruler", "haystack_essays", {"text": " "}, "must hold words in haystack_essays"),
        ("ruler", "squad", {"context": "x", "qas": [{"question": "a"}]}, "qas of .* must have"),
        ("ruler", "hotpotqa", {"question": "q", "context": [["T", ["x"]]]}, "must have question,"),
    ],
)
def test_mistakes_in_rows(task, name, row, message, suite_data, tmp_path):
    copy = shutil.copytree(suite_data, tmp_path / "data")
    (copy / f"{name}.json").unlink(missing_ok=True)
    blank = {"choices": list("wxyz"), "input": "", "context": "", "answers": []}
    ending = "json" if name == "longbench_config" else "jsonl"
    write_lines(copy / f"{name}.{ending}", [blank | row if task != "ruler" else row])
    subtasks = {"haystack_essays": ("niah_single_2",), "squad": ("qa_1",), "hotpotqa": ("qa_2",)}
    settings = Settings(subtasks=subtasks.get(name, ()), limit=1)
    with pytest.raises(UserError, match=message):
        run_task(SUITES[task], copy, settings, Stub(True), IDENTITY)


@pytest.mark.parametrize("match", [scores.match_any, scores.match_all])
def test_matches_ignore_the_case_of_answer_and_reference(match):
    assert match("it is the ANSWER", ["Answer"]) == match("it is the answer", ["ANSWER"]) == 1
    assert match("it is the answer", ["REPLY"]) == 0


@pytest.mark.parametrize(
    "answer, references, score",
    [
        ("The Beatles!", ["beatles"], 1),
        ("It was  the\tBeatles", ["The Beatles", "x"], 1),
        ("Stones", ["Beatles"], 0),
        ("no\nBeatles", ["Beatles"], 0),
        ("  beatles\nno", ["Beatles"], 1),
        ("", ["Beatles"], 0),
        ("\nBeatles", ["Beatles"], 0),
        ("See an owl, a cat; the dog's", ["see owl cat dogs"], 1),
        ("cat", ["the cat sat"], 0),
        ("theatre", ["atre"], 1),
        ("a-b", ["ab"], 1),
    ],
)
def test_contains_answer(answer, references, score):
    assert contains_answer(answer, references) == score


def test_ruler_matches():
    assert scores.match_all(" 12 and AB\x00c", ["12", "ab", "9", "x"]) == 0.5
    assert scores.match_all("ab\x1fc", ["ab\nc", "abc"]) == 0.5
    assert scores.match_all("1 2", ["1", "2"]) == 1 and scores.match_all("", ["1"]) == 0
    assert scores.match_any("the Answer", ["answer", "x"]) == 1
    assert scores.match_any("no", ["answer", "x"]) == 0


def test_token_f1():
    assert scores.token_f1("The cat sat.", "a cat sat") == 1
    assert scores.token_f1("cat dog", "cat") == pytest.approx(2 / 3)
    assert scores.token_f1("cat cat", "cat cat bird bird") == pytest.approx(2 / 3)
    assert scores.token_f1("dog", "cat") == 0 and scores.token_f1("", "cat") == 0


def test_rouge_l_is_the_f_of_the_package(monkeypatch):
    def get_scores(self, answers, references, avg):
        assert (answers, references, avg) == (["an answer"], ["a reference"], True)
        part = {"r": 0.9, "p": 0.1, "f": 0.5}
        return {"rouge-1": dict.fromkeys(part, 0.2), "rouge-l": part}

    package = SimpleNamespace(Rouge=type("Rouge", (), {"get_scores": get_scores}))
    monkeypatch.setitem(sys.modules, "rouge", package)
    assert scores.rouge_l("an answer", "a reference") == 0.5

    def too_deep(self, answers, references, avg):
        raise RecursionError

    package.Rouge.get_scores = too_deep  # of long answers
    assert scores.rouge_l("an answer", "a reference") == 0


def test_rouge_l():
    pytest.importorskip("rouge")
    assert scores.rouge_l("the cat sat down", "the cat sat down") == pytest.approx(1)
    assert scores.rouge_l("the cat sat down", "the dog sat up") == pytest.approx(0.5, abs=1e-6)
    assert scores.rouge_l("x", "the cat") == 0 and scores.rouge_l("", "the cat") == 0


def test_classification_keeps_the_quirk():
    classes = ["City", "City in a country", "Other"]
    assert scores.classification("City in a country", "City in a country", classes) == 1
    assert scores.classification("City in a country, Other", "City in a country", classes) == 0.5
    assert scores.classification("Other", "City", classes) == 0
    assert scores.classification("", "City", classes) == 0
    nested = ["a", "ab", "abc"]  # dropping "a" while walking skips "ab"
    assert scores.classification("abc", "abc", nested) == 0.5


def test_number_match():
    assert scores.number_match("Paragraph 12", "Paragraph 12") == 1
    assert scores.number_match("12 or 3", "Paragraph 12") == 0.5
    assert scores.number_match("none", "3") == 0 and scores.number_match("30", "3") == 0
    assert scores.number_match("7", "7 of 30") == 1 and scores.number_match("30", "7 of 30") == 0
    assert scores.number_match("7", "none") == 0 and scores.number_match("3 3 4", "3") == 2 / 3


def test_edit_similarity():
    assert scores.edit_similarity("\n# comment\n```\nreturn x\nmore", "return x") == 1
    assert scores.edit_similarity("abcd", "abxx") == 0.5
    assert scores.edit_similarity("// a\nuse `x`\nx = 1 # b\ny\nz", "y") == 1
    assert scores.edit_similarity("\n\n# only\n# comments", "comments") == 0
    assert scores.edit_similarity("", "abc") == 0 and scores.edit_similarity("zzz", "abc") == 0
