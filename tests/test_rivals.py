"""Contexts that are compressed before the question is known, on a tiny model: questions, caches of
equal bytes, records and the table. Presses are in test_kvpress.py."""

from dataclasses import replace

import pytest
import torch
from test_eval import write_lines
from tiny_model import save_tiny_model
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from benchmarks.head_budget import Shape, Unit
from corecontext.baselines import enabled
from corecontext.cost import cache_bytes
from corecontext.inference import prefill
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.loading import load, one_line
from corecontext.record import append_records, make_record, read_records
from reproduction.command import main
from reproduction.real import plan as real_plan
from reproduction.real.methods import Heads, Sizes
from reproduction.real.model import Protocol
from reproduction.real.tasks import LIST_TOKENS
from reproduction.real.training import Adaptation
from reproduction.rivals import caches as rivals_caches
from reproduction.rivals import plan as rivals_plan
from reproduction.rivals import published as rivals_published
from reproduction.rivals.caches import CacheRun
from reproduction.rivals.tasks import Cell, Counts, Item, Source, Task, make_items

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
ESSAYS = "A man went out to walk. The way was long.\n\nHe came home late and slept well. " * 40
COUNTS = Counts(2, (320,), lists=0, ruler=1, ruler_length=1600, passages=2, documents=2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A tiny model whose tokenizer has a chat template."""
    name = save_tiny_model(tmp_path_factory.mktemp("rivals") / "Tiny")
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(name)
    return load(name, method="full", device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with essays, which are training text, too, and two questions about four passages."""
    folder = tmp_path_factory.mktemp("data")
    write_lines(folder / "haystack_essays.jsonl", [{"text": ESSAYS}])
    write_lines(folder / "lm_train.jsonl", [{"text": ESSAYS}])
    write_lines(folder / "lm_test.jsonl", [{"text": ESSAYS}])
    pool = [{"doc_id": f"d{i}", "title": f"T{i}", "text": f"Passage {i}."} for i in range(4)]
    write_lines(folder / "multidoc_qa_pool.jsonl", pool)
    questions = [
        {"qid": f"q{i}", "question": f"Who is {i}?", "answers": [f"A{i}"], "gold_doc": f"d{i}"}
        for i in range(2)
    ]
    write_lines(folder / "multidoc_qa_test.jsonl", questions)
    return str(folder)


def test_questions_follow_their_contexts(loaded, data):
    tasks = make_items(Source(loaded, data, lambda: ESSAYS, 0), COUNTS)
    decode = loaded.tokenizer.decode
    names = [task.name for task in tasks]
    assert names[0] == "needles" and {"vt", "fwe"} < set(names) and names[-1] == "passages"
    for task, items in tasks.items():
        for item in items:
            context = decode(item.ids[: item.question])
            question = decode(item.ids[item.question : item.answer])
            facts = [decode(item.ids[part]) for part in item.places]
            mark = "What is the special" if task.name == "needles" else "Question:"
            assert context.startswith("<user>") and "</>" not in context
            assert question.startswith(mark) and question.count("</><assistant>") == 1
            assert decode(item.ids[item.answer :]) == ",".join(facts)
            assert all(fact.startswith(" ") for fact in facts)
            if task.name == "vt":
                assert all(f"VAR{fact} = " in context for fact in facts) and len(facts) == 5
    passages = tasks[Task("passages", 2)]
    assert [item.ids[item.answer :] for item in passages] == [
        loaded.tokenizer(f" A{i}")["input_ids"] for i in range(2)
    ]
    # The right passage comes first, then last.
    for i, item in enumerate(passages):
        assert f"[{i + 1}](Title: T{i})" in decode(item.ids)


def test_a_share_is_that_of_whole_facts():
    item = Item([0, 1, 2, 3, 4, 5, 6, 7, 8], 3, (slice(5, 7), slice(8, 9)))
    assert item.answer == 5
    assert item.share_right([5, 6, 0, 8]) == 1
    assert item.share_right([5, 0, 7, 8]) == 0.5


HEADS = Heads(Shape(2, 2), (Unit(1, 1),))
ITEM = Item([(7 * i * i + i) % 250 for i in range(440)], 400, (slice(420, 440),))


@pytest.mark.parametrize(
    ("name", "compression"),
    [("full", 1), ("cca", 4), ("cca_raw_heads", 2), ("fetch", 4), ("fetch_raw_heads", 2)],
)
def test_a_question_is_read_from_the_compressed_context(loaded, name, compression):
    """Token by token, which no setting reads as a prompt, gives the same logits."""
    model = loaded.model
    cell = Cell(name, compression)
    run = CacheRun(loaded, cell, HEADS)
    ((logits, sizes),) = run.read(ITEM, len(ITEM.ids) - 1).values()
    assert logits.shape == (20, 256)
    tokens = torch.tensor([ITEM.ids])
    config = run.settings(400)
    with torch.no_grad():
        if config is None:
            expected = model(tokens).logits[0, 419:439]
        else:
            with one_line(), enabled(model, config):
                cache = prefill(model, tokens[:, :400]).cache
                steps = [model(tokens[:, [i]], **with_cache(cache)) for i in range(400, 439)]
            expected = torch.cat([step.logits[0] for step in steps])[-20:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    assert run.first_token(cell, ITEM) == sizes
    answer = run.ask(ITEM)[cell]
    right = torch.tensor(ITEM.ids[420:])
    assert answer.choices == expected.argmax(-1).tolist() and answer.sizes == sizes
    assert answer.nll == pytest.approx(float(cross_entropy(expected, right)), abs=2e-5)
    limit = cache_bytes(400 // compression, 2, 2, 16, 4)
    assert 0.9 * limit < sizes["device_bytes"] <= limit
    assert sizes["kept_bytes"] == sizes["device_bytes"]
    assert (sizes["host_bytes"] > 0) == name.startswith("fetch")


def test_one_reading_answers_for_full_attention_too(loaded, monkeypatch):
    """As two readings do."""
    monkeypatch.setitem(rivals_caches.FETCH, 4, (rivals_caches.Fetch(16, "bits:2", 2),))
    end = len(ITEM.ids) - 1
    cells = (Cell("full", 1), Cell("fetch", 4))
    shared = CacheRun(loaded, cells[1], HEADS, with_full=True)
    answers = shared.read(ITEM, end)
    assert tuple(answers) == shared.cells == cells
    for cell in cells:
        logits, sizes = CacheRun(loaded, cell, HEADS).read(ITEM, end)[cell]
        torch.testing.assert_close(answers[cell][0], logits, rtol=0, atol=2e-5)
        assert answers[cell][1] == sizes
    assert not torch.allclose(answers[cells[0]][0], answers[cells[1]][0], rtol=0, atol=1e-3)
    assert [answer.sizes["host_bytes"] > 0 for answer in shared.ask(ITEM).values()] == [False, True]
    assert shared.sizes(cells[0], 400)["index"] is None


def test_the_command_records_what_full_attention_answers(loaded, data, tmp_path, capsys):
    full = tmp_path / "full.jsonl"
    common = {"method": "full", "length": 320, "trained_tokens": 0}
    append_records(full, [make_record("real.accuracy", 0.4, {**common, "task": "needles"})])
    nll = {**common, "task": "passages", "length": 2}
    append_records(full, [make_record("real.answer_nll", 3.0, nll)])
    # A trained model's answers say nothing of this one.
    trained = {**common, "task": "needles", "trained_tokens": 9}
    append_records(full, [make_record("real.accuracy", 1.0, trained)])
    arguments = ["rivals", "--model", loaded.model.name_or_path, "--data", data, "--device", "cpu"]
    arguments += ["--needles", "1", "--needle-length", "320", "--lists", "0", "--ruler", "0"]
    arguments += ["--passages", "1", "--documents", "2", "--output", str(tmp_path / "out.jsonl")]
    assert main([*arguments, "--method", "full", "--full", str(full)]) == 0
    (record,) = read_records(tmp_path / "out.jsonl")
    assert record.name == "real.answer_nll" and record.value > 0 and record.unit == "nats"
    assert record.params["model"] == "tiny" and record.params["compression"] == 1
    assert record.params["questions"] == 1 and record.params["trained_by"] is None
    assert main([*arguments, "--method", "full", "--first-tokens", "3", "--passages", "0"]) == 0
    assert read_records(tmp_path / "out.jsonl")[-1].name == "real.first_token_s"
    # Contexts that are too short are named; the others are measured.
    arguments += ["--compression", "4", "--compression", "16"]
    assert main([*arguments, "--method", "cca"]) == 2
    assert "contexts must be longer for cca" in capsys.readouterr().err
    assert read_records(tmp_path / "out.jsonl")[-1].params["method"] == "cca"
    assert main([*arguments, "--method", "none"]) == 2
    assert "method must be" in capsys.readouterr().err


def test_published_cells_without_records_are_measured(loaded, data, tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    model, output = loaded.model.name_or_path, tmp_path / "rivals.jsonl"
    counts = Counts(0, (320,), lists=0, ruler=0, passages=2, documents=2)
    training = real_plan.Row("full", Sizes(96, 4, 16, 4), Adaptation(1, rows=1, rows_at_once=1))
    rows = (
        rivals_plan.Row(("full",), counts, (1,)),
        rivals_plan.Row(("cca",), counts, (4, 16)),  # 16: the contexts are too short
        rivals_plan.Row(("snapkv",), counts),
        rivals_plan.Row(("full",), counts, (1,), first_tokens=3),
        rivals_plan.Row(("cca",), counts, (4,), trained=training),
    )
    monkeypatch.setattr(rivals_plan, "ROWS", rows)
    monkeypatch.setattr(rivals_published, "find_spec", lambda name: None)
    command = ["rivals", "--published", "--model", model, "--data", data, "--device", "cpu"]
    command += ["--output", str(output), "--save", str(tmp_path / "saved")]

    def listed():
        assert main([*command, "--list"]) == 0
        out, err = capsys.readouterr()
        assert "1 rows are measured in the environment of kvpress" in err
        return [line.partition(" s  ")[2] for line in out.splitlines()[:-1]]

    commands = listed()
    assert len(commands) == 4 and "--method cca --compression 4 --compression 16" in commands[1]
    assert main([*command, "--limit-minutes", "0"]) == 0 and not output.exists()
    assert main(command) == 2
    assert "1 rows failed, the first: " + commands[1] in capsys.readouterr().err
    records = read_records(output)
    measured = [(r.params["method"], r.params["trained_by"], r.name[5:]) for r in records]
    assert measured == [
        ("full", None, "answer_nll"),
        ("cca", None, "answer_nll"),
        ("full", None, "first_token_s"),
        ("cca", "full", "answer_nll"),
    ]
    assert records[3].params["trained_tokens"] == 96 and records[3].value != records[1].value
    assert listed() == [commands[1].replace("--compression 4 ", "")]
    # The table shows records of one device.
    shown = [replace(record, device=record.device + "s") for record in records]
    output.unlink()
    append_records(output, [shown[0], records[1], *shown[2:]])
    assert commands[1] in listed()
    output.unlink()
    append_records(output, records)
    # A row's command alone gives its record anew.
    alone = records[3].command.replace("FOLDER", data).replace("DIR", str(tmp_path / "saved"))
    assert main([*alone.split()[3:], "--output", str(output), "--device", "cpu"]) == 0
    again = read_records(output)[-1]
    assert (again.params, again.value) == (records[3].params, records[3].value)


def test_cells_of_a_model_trained_under_another_index_are_missing(loaded):
    sizes = Sizes(96, 4, 16, 4, fetch_groups=2, fetch_index="bits:2")
    training = real_plan.Row("fetch", sizes, Adaptation(1))
    row = rivals_plan.Row(("fetch",), rivals_plan.LISTS, (4,), trained=training)
    assert "--trained-index bits:2" in rivals_published.PublishedCells(
        Protocol(loaded.model.name_or_path, "d", "out", device="cpu")
    ).command(row, [Cell("fetch", 4)])
    params = {"model": "m", "method": "fetch", "compression": 4, "seed": 0, "index": "bits:2"}
    params |= {"task": "list", "length": LIST_TOKENS, "trained_tokens": row.trained_tokens}
    params["trained_by"] = "fetch"
    of_pairs = make_record("real.accuracy", 1.0, params, device="cpu")
    of_bits = replace(of_pairs, params={**params, "trained_index": "bits:2"})
    assert row.missing([of_pairs], "m") == [Cell("fetch", 4)]
    assert row.missing([of_pairs, of_bits], "m") == []
    assert rivals_plan.Row(("cca",), Counts(), trained=real_plan.CORES).trained_index is None


def test_presses_share_a_reading_of_answers_and_none_of_times():
    presses, caches = (rivals_plan.Row((name,), Counts()) for name in ("snapkv", "cca"))
    seconds = [row.seconds(33, is_trained=True) for row in (presses, caches)]
    assert seconds[0] < 0.5 * seconds[1]
    seconds = [
        replace(row, first_tokens=7).seconds(33, is_trained=True) for row in (presses, caches)
    ]
    assert seconds[0] == seconds[1]
