"""The pieces of the search for heads one by one: rows, losses, counts, the units chosen, and their
report."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from families import tiny_model, tokens
from tiny_model import save_tiny_model

import corecontext
from corecontext import CCAConfig
from corecontext.data.packing import fill_row
from corecontext.data.row_stream import StreamedRows
from corecontext.files import UserError
from corecontext.heads import choose, findings, search
from corecontext.heads.budget import Shape, Unit, at_equal_cache, raw_heads, untrained_heads
from corecontext.heads.search import Findings, Search, Trial, search_units
from corecontext.integrations.hf.enabling import handle_of
from corecontext.train import TrainConfig


def test_a_loss_is_the_mean_over_all_tokens_of_second_halves(monkeypatch):
    def nll(model, row, chunk_size):
        assert chunk_size == 1024
        return row[0, 1:].float()  # of every token but the first

    monkeypatch.setattr(search, "document_nll", nll)
    rows = [torch.arange(8)[None], torch.arange(100, 105)[None]]
    counted = [*range(4, 8), *range(102, 105)]  # from the middle on
    assert search.far_loss(None, rows) == sum(counted) / len(counted)


def test_losses_that_cannot_be_kept_do_no_harm(tmp_path):
    """Not at the end of a search, either, which may have taken hours."""
    (tmp_path / "file").write_text("")
    for path in (None, tmp_path / "none/a.json", tmp_path / "file/a.json", tmp_path / ("x" * 300)):
        kept = search.Losses(path)
        assert kept.get("a", lambda: 2.0) == kept.get("a", lambda: 3.0) == 2.0
        kept.forget()
        kept.forget()
    assert not (tmp_path / "none/a.json").exists()


def test_of_equal_units_the_first_is_chosen():
    units = [Unit(layer) for layer in (2, 0, 1)]
    trials, chosen = search_units(units, 2, lambda tried: 1.0)
    assert chosen == (Unit(2), Unit(0))
    assert [trial.unit.layer for trial in trials] == [2, 0, 1, 0, 1]


@pytest.mark.parametrize(
    "shape, heads, raw, count",
    [
        ((16, 4), False, False, 2),
        ((7, 4), False, False, 1),
        ((15, 4), False, False, 1),
        ((5, 4), True, False, 1),
        ((16, 4), True, False, 4),
        ((3, 4), True, False, 1),
        ((32, 8), True, True, 16),
        ((32, 8), False, True, 2),
        ((32, 32), False, True, 2),
        ((8, 8), False, True, 1),
    ],
)
def test_units_to_choose_by_default(shape, heads, raw, count):
    shape, config = Shape(*shape), CCAConfig.paper(16, 1024)
    assert search._default_count(shape, config, 8192, heads, raw) == count
    if raw and heads:
        assert count == raw_heads(shape, config, 8192)


def test_there_is_more_to_choose_from_than_is_chosen():
    search._check_count(1, 2, True)
    search._check_count(6, 7, False)
    for count, choices, heads, message in (
        (1, 1, True, "at least 2 KV heads to choose from, got 1"),
        (1, 1, False, "at least 2 full-attention layers to choose from, got 1"),
        (2, 2, True, "count must be 1 .. 1 of 2"),
        (0, 2, True, "count must be 1 .. 1 of 2"),
    ):
        with pytest.raises(UserError, match=message):
            search._check_count(count, choices, heads)


def test_more_than_half_of_the_window_stays():
    shape, config = Shape(4, 4), CCAConfig.paper(4, 8)
    heads = [Unit(3, head) for head in range(3)]
    # 200 tokens would leave a window of 4.
    message = "at most 2 of 16 KV heads, so that more than half of the window of 8 stays with 200"
    with pytest.raises(ValueError, match=message):
        at_equal_cache(shape, heads, config, 200, raw=True)
    assert at_equal_cache(shape, heads[:2], config, 200, raw=True).window_size > 4


def test_heads_of_random_weights_are_upwards_from_five_eighths():
    layers = [unit.layer for unit in untrained_heads(Shape(8, 1), 8)]
    assert layers == [5, 6, 7, 4, 3, 2, 1, 0]


def test_a_search_is_named_by_all_that_its_losses_depend_on(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(search, "identify", lambda *given: named.append(given) or "name")
    for loss in ("far_loss", "end_loss"):
        monkeypatch.setattr(search, loss, lambda *given: 1.0)
    model = tiny_model("llama", num_hidden_layers=4)
    rows = [tokens(1, 600)]
    with corecontext.enabled(model, CCAConfig.paper(16, 256, layer_group_sizes=(4,) * 4)):
        for starts in (None, [500]):
            search.find_units(model, rows, 4096, 1, folder=tmp_path, starts=starts)
    equal = CCAConfig.paper(16, 256)
    assert named == [(model, rows, equal, None), (model, rows, equal, [500])]


@pytest.mark.parametrize("raw", [False, True])
def test_heads_are_looked_for_in_the_best_quarter_of_the_layers(raw, monkeypatch, capsys):
    """With the losses of a table: layers 6 and 2 are best alone, of their heads 2.1, and beside it
    6.0."""
    model = tiny_model("llama", num_hidden_layers=8)
    config = CCAConfig.paper(16, 256, layer_group_sizes=(4,) * 8)
    if raw:
        config = CCAConfig.paper(16, 256, head_group_sizes=(4, 2))
    measured, totals, advanced = [], [], []

    def loss(measured_model, rows):
        now = handle_of(measured_model).config
        measured.append(now)
        sizes = now.layer_group_sizes
        if sizes is None or sizes == (1,) * 8:
            return 2.0 if sizes is None else 1.0
        units = {
            Unit(i) if size == 1 else Unit(i, size.index(1))
            for i, size in enumerate(sizes)
            if size == 1 or (isinstance(size, tuple) and 1 in size)
        }
        if now.window_size < 256 or not units:
            return 9.0
        best = {Unit(6): 3.0, Unit(2): 3.1, Unit(2, 1): 5.0}
        if len(units) > 1:
            return 4.5 if units == {Unit(2, 1), Unit(6, 0)} else 4.8
        return best.get(*units, 6.0)

    class Progress:
        def __init__(self, title, total):
            totals.append((title, total))

        def __enter__(self):
            return advanced.append

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(search, "far_loss", loss)
    monkeypatch.setattr(search, "progress", Progress)
    with corecontext.enabled(model, config) as handle:
        rows = [tokens(1, 600), tokens(1, 640)]
        length = 1300 if raw else 4096
        result = search.find_units(model, rows, length, 2, heads=True, raw=raw)
        assert handle.config == config
    chosen = (Unit(2, 1), Unit(6, 0))
    assert result.search.chosen == chosen
    units = [Unit(6, 0), Unit(6, 1), Unit(2, 0), Unit(2, 1)]
    assert [(trial.unit, trial.before) for trial in result.search.trials] == [
        *((unit, ()) for unit in units),
        *((unit, chosen[:1]) for unit in units[:3]),
    ]
    assert (result.full, result.equal, result.chosen) == (1.0, 2.0, 9.0)
    equal = CCAConfig.paper(16, 256)
    assert result.config == at_equal_cache(Shape(8, 2), chosen, equal, length, raw)
    # Full attention, equal groups, 8 layers, 4 and 3 heads, and the result.
    assert len(measured) == 18 and measured[-1] == result.config
    assert totals == [("2 rows of up to 640 tokens", 18)] and sum(advanced) == 18
    assert "15 trials, each a pass over 2 rows of up to 640 tokens" in capsys.readouterr().err
    assert {c.layer_group_sizes.count(64) for c in measured[2:17]} == {6, 7}


# The heads of a training run


def rows_of(*rows):
    """Rows of documents with so many tokens; a document's tokens are its number."""
    numbers = itertools.count()
    filled = []
    for lengths in rows:
        pieces = [torch.full((n,), next(numbers)).numpy() for n in lengths]
        filled.append(fill_row(sum(lengths), pieces, 0))
    return filled


@pytest.mark.parametrize(
    "rows, limit, shapes",
    [
        ([(30, 10), (15, 25), (40,)], None, {4: 40, 0: 30, 3: 25}),
        ([(20, 20), (19, 21)], None, {3: 21, 0: 20, 1: 20}),  # 20 tokens are enough
        ([(21, 22), (23, 24), (25, 26)], None, {5: 26, 4: 25, 3: 24, 2: 23}),  # of four at most
        ([(60, 20)], 33, {0: 33, 1: 20}),
        ([(19, 20)] * 65, None, {1: 20, 3: 20, 5: 20, 7: 20}),
        ([(19, 20)] * 64 + [(39,)], None, {1: 20, 3: 20, 5: 20, 7: 20}),  # in 64 rows
    ],
)
def test_the_longest_documents_are_looked_at(rows, limit, shapes):
    config = CCAConfig.paper(2, 2)  # of which a search needs 20 tokens
    texts = choose._longest_documents(rows_of(*rows), config, limit)
    assert {int(text[0, 0]): text.shape[1] for text in texts} == shapes
    assert all(text.shape[0] == 1 and bool((text == text[0, 0]).all()) for text in texts)


def test_a_stream_that_was_looked_at_begins_where_it_was():
    stream, rows = mock.MagicMock(spec=StreamedRows), rows_of((30, 10))
    stream.__len__.return_value = 1
    stream.__getitem__.side_effect = rows.__getitem__
    assert len(choose._longest_documents(stream, CCAConfig.paper(2, 2), None)) == 1
    stream.state_dict.assert_called_once_with(0)
    stream.load_state_dict.assert_called_once_with(stream.state_dict.return_value)


def test_documents_too_short_for_a_search_are_refused():
    with pytest.raises(
        UserError, match="20 tokens or more in a row, .* 19 tokens at most in 2 row"
    ):
        choose._longest_documents(rows_of((19,), (3, 16)), CCAConfig.paper(2, 2), None)


def test_a_run_with_random_weights_or_known_sizes_does_not_search():
    run = TrainConfig.preset("pooling", context_length=8192)
    assert choose.with_heads(run, None, None, None, None) is run
    hf_config = tiny_model("llama", num_hidden_layers=8, num_key_value_heads=4).config
    scratch = run.replace(strategy="scratch", raw_heads=3)
    found = choose.with_heads(scratch, hf_config, None, None, {"window_size": 1})
    units = untrained_heads(Shape(8, 4), 3)
    wanted = at_equal_cache(Shape(8, 4), units, run.cca(), 8192, raw=True)
    assert found.cca() == wanted and found.raw_heads == 0 and found.strategy == "scratch"
    default = choose.with_heads(scratch.replace(raw_heads=None), hf_config, None, None, None)
    every = untrained_heads(Shape(8, 4), raw_heads(Shape(8, 4), run.cca(), 8192))
    assert default.cca() == at_equal_cache(Shape(8, 4), every, run.cca(), 8192, raw=True)
    with pytest.raises(UserError, match="^raw_heads: what keeps every token .* --raw-heads 0"):
        choose.with_heads(scratch.replace(raw_heads=31), hf_config, None, None, None)


def test_the_search_of_a_run_is_on_the_checkpoint_as_it_is(tmp_path, monkeypatch, capsys):
    name = save_tiny_model(tmp_path / "model")
    path = tmp_path / "model/config.json"
    cca = CCAConfig.paper(4, 32).to_dict()
    path.write_text(json.dumps({**json.loads(path.read_text()), "cca": cca}))
    run = TrainConfig.preset("pooling", model=name, group_size=4, window_size=8)
    run = run.replace(context_length=99, raw_heads=2, rope_theta=5e5)
    asked = []

    def find_units(model, rows, *arguments, **options):
        handle = handle_of(model)
        asked.append((rows, arguments, options))
        assert handle.config == run.cca()
        assert model.dtype == torch.bfloat16 and not model.training
        assert model.config.rope_parameters["rope_theta"] == 10_000.0
        config = CCAConfig.paper(4, 7, layer_group_sizes=((16, 1), 16))
        return Findings(Search([], (Unit(0, 1),)), config, 1.0, 2.0, 3.0)

    monkeypatch.setattr(choose, "find_units", find_units)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = SimpleNamespace(bf16=True, device=torch.device("cpu"), world_size=1)
    rows = rows_of((60, 39))
    found = choose.with_heads(run, None, settings, rows, None)
    assert (found.window_size, found.layer_group_sizes) == (7, ((16, 1), 16))
    ((texts, arguments, options),) = asked
    assert [text.shape[1] for text in texts] == [60] and arguments == (99, 2)
    folder = tmp_path / "cache/corecontext/heads"
    assert options == {"heads": True, "raw": True, "folder": folder}
    line = "(layer.head): 0.1; s = 7 for all, g = 16 for the others"
    assert line in capsys.readouterr().out
    refusal = mock.Mock(side_effect=NotImplementedError("a layer of another kind\nat length"))
    with monkeypatch.context() as patch:
        patch.setattr(choose, "enable", refusal)
        with pytest.raises(UserError, match="^a layer of another kind$"):
            choose.with_heads(run, None, settings, rows, None)
    monkeypatch.setattr(choose, "find_units", mock.Mock(side_effect=UserError("too few heads.")))
    with pytest.raises(UserError, match=r"^raw_heads: too few heads\. .* --raw-heads 0\.$"):
        choose.with_heads(run, None, settings, rows, None)
    saved = {"window_size": 5, "layer_group_sizes": [[16, 1], 16]}
    kept = choose.with_heads(run, None, settings, rows, saved)
    assert (kept.window_size, len(asked)) == (5, 1)


# The command


@pytest.mark.parametrize(
    "length, most_rows, rows",
    [(20, 9, 5), (20, 2, 2), (33, 9, 3), (100, 9, 1), (51, 9, 1), (19, 9, 0), (101, 9, 0)],
)
def test_rows_of_the_text_have_the_length_asked_for(length, most_rows, rows, monkeypatch):
    asked = []
    monkeypatch.setattr(
        findings, "find_units", lambda *given, **options: asked.append((given, options))
    )
    loaded = SimpleNamespace(
        config=CCAConfig.paper(2, 2),
        max_length=100,
        tokenizer=lambda text, **_: {"input_ids": torch.arange(100)[None]},
        model=SimpleNamespace(device="cpu"),
    )
    if not rows:
        with pytest.raises(UserError, match=f"length must be at most .*100 tokens.* got {length}"):
            findings.find_layers(loaded, "", length, most_rows, 3)
        return
    findings.find_layers(loaded, "", length, most_rows, 3, True, True)
    (((_, got, *rest), options),) = asked
    assert rest == [length, 3] and options["heads"] and options["raw"]
    assert options["folder"].parts[-2:] == ("corecontext", "heads")
    wanted = [list(range(i * length, (i + 1) * length)) for i in range(rows)]
    assert [row.tolist() for row in got] == [[row] for row in wanted]
    loaded.max_length = length - 1
    with pytest.raises(UserError, match=f"at most the model's {length - 1} tokens, got {length}"):
        findings.find_layers(loaded, "", length, most_rows, 3)


def test_every_trial_is_reported_beside_those_before_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    a, b, c, d = (Unit(0, 1), Unit(2, 0), Unit(1, 1), Unit(3, 0))
    rounds = (((), (a, b, c, d)), ((b,), (a, c, d)), ((b, d), (a, c)))
    losses = iter(math.log(value) for value in (10, 11, 12, 13, 5, 6, 7, 2, 3))
    trials = [Trial(unit, before, next(losses)) for before, units in rounds for unit in units]
    config = CCAConfig.paper(16, 48, layer_group_sizes=((64, 1), 64))
    result = Findings(Search(trials, (b, d, a)), config, math.log(4), math.log(20), math.log(8))
    findings.print_layers(result)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for row in (
        "layer.head alone beside 2.0 beside 2.0, 3.0",
        "full attention 4.000",
        "equal groups 20.000",
        "0.1 10.000 5.000 2.000 <",
        "1.1 12.000 6.000 3.000",
        "2.0 11.000 <",
        "3.0 13.000 7.000 <",
        "equal groups of 16: 20.000; at the same cache size 8.000 with",
        "window_size = 48",
        "layer_group_sizes = [(64, 1), 64]",
    ):
        assert row in lines, row
    records = findings.layer_records(trials, {"model": "m"}, "cpu")
    assert [record.value for record in records] == pytest.approx([10, 11, 12, 13, 5, 6, 7, 2, 3])
    params = {"model": "m", "task": "layers", "unit": "1.1", "beside": ["2.0", "3.0"]}
    assert records[-1].params == params and records[-1].name == "quality.perplexity"


def test_other_processes_hear_of_a_search_that_failed(monkeypatch):
    """Else they would wait for ever; with the first process's result they go on."""
    published = []
    announcement = SimpleNamespace(
        publish=published.append, wait=lambda: published[-1] if published else None
    )
    monkeypatch.setattr(choose, "Announcement", lambda topic, rank: announcement)

    def fail(*call):
        raise UserError("no such text")

    first, second = SimpleNamespace(process_index=0), SimpleNamespace(process_index=1)
    monkeypatch.setattr(choose, "_find", fail)
    with pytest.raises(UserError, match="no such text"):
        choose._find_together(None, first, None, None)
    with pytest.raises(UserError, match="the first process says why"):
        choose._find_together(None, second, None, None)
    sizes = {"window_size": 7}
    monkeypatch.setattr(choose, "_find", lambda *call: sizes)
    assert choose._find_together(None, first, None, None) == sizes
    assert choose._find_together(None, second, None, None) == sizes
