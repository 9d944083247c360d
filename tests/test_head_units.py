"""The pieces of the search for heads one by one: rows, losses, counts, the units chosen, and their
report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from families import tiny_model, tokens

import corecontext
from benchmarks.head_budget import Shape, Unit, at_equal_cache, raw_heads
from corecontext import CCAConfig
from corecontext.files import UserError
from corecontext.integrations.hf.enabling import handle_of
from reproduction import head_search as search
from reproduction import layers
from reproduction.head_search import search_units


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


# The command


@pytest.mark.parametrize(
    "length, most_rows, rows",
    [(20, 9, 5), (20, 2, 2), (33, 9, 3), (100, 9, 1), (51, 9, 1), (19, 9, 0), (101, 9, 0)],
)
def test_rows_of_the_text_have_the_length_asked_for(length, most_rows, rows, monkeypatch):
    asked = []
    monkeypatch.setattr(
        layers, "find_units", lambda *given, **options: asked.append((given, options))
    )
    loaded = SimpleNamespace(
        config=CCAConfig.paper(2, 2),
        max_length=100,
        tokenizer=lambda text, **_: {"input_ids": torch.arange(100)[None]},
        model=SimpleNamespace(device="cpu"),
    )
    if not rows:
        with pytest.raises(UserError, match=f"length must be at most .*100 tokens.* got {length}"):
            layers.find_layers(loaded, "", length, most_rows, 3)
        return
    layers.find_layers(loaded, "", length, most_rows, 3, True, True)
    (((_, got, *rest), options),) = asked
    assert rest == [length, 3] and options["heads"] and options["raw"]
    assert options["folder"].parts[-2:] == ("corecontext", "heads")
    wanted = [list(range(i * length, (i + 1) * length)) for i in range(rows)]
    assert [row.tolist() for row in got] == [[row] for row in wanted]
    loaded.max_length = length - 1
    with pytest.raises(UserError, match=f"at most the model's {length - 1} tokens, got {length}"):
        layers.find_layers(loaded, "", length, most_rows, 3)
