"""Which layers need small groups."""

import ast
import json
import math
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from families import tiny_model, tokens
from tiny_model import save_tiny_model

import corecontext
from benchmarks.head_budget import (
    COARSE,
    Shape,
    Unit,
    at_equal_cache,
    raw_heads,
    spread,
)
from corecontext import CCAConfig
from corecontext.cache import CompactLayer
from corecontext.cli import main as corecontext_main
from corecontext.files import UserError
from corecontext.integrations.hf.enabling import handle_of
from corecontext.loading import load
from corecontext.perplexity import document_nll
from corecontext.record import read_records
from corecontext.visibility import num_complete_groups, window_capacity
from reproduction import head_search as search
from reproduction.command import main
from reproduction.head_search import Trial, far_loss, num_trials, rounds_of, search_units
from reproduction.layers import find_layers, needle_rows

MODEL, TEXT = "corecontext/assets/demo_model", "corecontext/assets/document.txt"


@pytest.mark.parametrize(
    "shape,chosen,g,s,length",
    [
        ((8, 2), [(4, None)], 16, 256, 4096),
        ((8, 2), [(4, 1)], 16, 256, 4096),
        ((8, 2), [(5, 0), (2, 1)], 16, 256, 4096),
        ((32, 8), [(3, None), (9, None), (20, None)], 16, 1024, 131072),
        ((2, 1), [(0, None)], 4, 8, 1000),
    ],
)
def test_the_cache_stays_as_large_and_groups_as_small_as_it_allows(shape, chosen, g, s, length):
    shape, chosen = Shape(*shape), [Unit(*one) for one in chosen]
    config = at_equal_cache(shape, chosen, CCAConfig.paper(g, s), length)

    def entries(sizes, window):
        return sum(
            num_complete_groups(length, size) + window_capacity(size, window)
            for one in sizes
            for size in (one if isinstance(one, tuple) else (one,) * shape.kv_heads)
        )

    sizes = config.layer_group_sizes
    for layer in range(shape.layers):
        by_head = (
            sizes[layer] if isinstance(sizes[layer], tuple) else (sizes[layer],) * shape.kv_heads
        )
        for head, size in enumerate(by_head):
            assert (size != COARSE * g) == (Unit(layer) in chosen or Unit(layer, head) in chosen)
    small = min(size for one in sizes for size in (one if isinstance(one, tuple) else (one,)))
    equal = entries([g] * shape.layers, s)
    assert 1 <= small < g and config.window_size == s and entries(sizes, s) <= 1.05 * equal
    sizes_that_fit = [
        size
        for size in range(1, g)
        if entries(spread(shape, chosen, size, COARSE * g), s) <= 1.05 * equal
    ]
    assert small == min(sizes_that_fit)


def test_what_keeps_every_token_takes_it_from_the_window():
    shape, chosen = Shape(8, 2), [Unit(4, 1)]
    config = at_equal_cache(shape, chosen, CCAConfig.paper(16, 256), 4096, raw=True)
    assert config.layer_group_sizes == (64,) * 4 + ((64, 1),) + (64,) * 3

    def entries(window):
        return 4096 + window + 15 * (64 + window + 63)

    assert 128 <= config.window_size < 256
    assert entries(config.window_size) <= 1.05 * 16 * 527 < entries(config.window_size + 1)
    many = at_equal_cache(Shape(32, 8), [Unit(3, 1)], CCAConfig.paper(16, 1024), 131072, raw=True)
    assert many.window_size == 1024  # of many heads one costs little


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match="16 fit the same cache; got 2 of 16 KV heads and 600 tokens"
    ):
        at_equal_cache(Shape(8, 2), [Unit(1)], CCAConfig.paper(16, 256), 600)


@pytest.mark.parametrize(
    "kv_heads,chosen,length,room",
    [(2, 2, 4096, 1), (8, 9, 4096, 4), (8, 9, 65536, 3), (1, 2, 65536, 0)],
)
def test_so_many_heads_may_keep_every_token(kv_heads, chosen, length, room):
    shape, config = Shape(8, kv_heads), CCAConfig.paper(16, 256)
    units = [Unit(layer, head) for layer in range(8) for head in range(kv_heads)]
    with pytest.raises(
        ValueError,
        match=f"at most {room} of {8 * kv_heads} KV heads, so that more than half of the "
        f"window of 256 stays with {length} tokens, got {chosen}. Choose fewer",
    ):
        at_equal_cache(shape, units[:chosen], config, length, raw=True)
    if room:
        assert at_equal_cache(shape, units[:room], config, length, raw=True).window_size > 128
    with pytest.raises(ValueError, match=f"at most {room} of"):
        at_equal_cache(shape, units[: room + 1], config, length, raw=True)


def test_units_are_chosen_one_beside_the_other():
    """3 is best alone; beside it 0, which is worst alone."""

    def loss(units):
        fine = {unit.layer for unit in units}
        return (
            {3: -5, 1: -3, 2: -2, 0: 0}[min(fine)]
            if len(fine) == 1
            else -9
            if fine == {0, 3}
            else -6
        )

    done, units = [], [Unit(layer) for layer in range(4)]
    trials, chosen = search_units(units, 2, loss, done.append)
    assert chosen == (Unit(3), Unit(0)) and len(done) == len(trials) == 4 + 3
    assert trials[3] == Trial(Unit(3), (), -5) and trials[4] == Trial(Unit(0), (Unit(3),), -9)
    for count in (0, 4):
        with pytest.raises(
            ValueError, match=f"count must be 1 .. 3 of 4 to choose from, got {count}"
        ):
            search_units(units, count, loss)


def test_many_are_chosen_in_few_rounds():
    """Each round takes as many as there are, the last one what is left; those already chosen are
    not tried again."""
    assert [rounds_of(count) for count in (1, 2, 3, 7, 16)] == [
        [1],
        [1, 1],
        [1, 1, 1],
        [1, 1, 2, 3],
        [1, 1, 2, 4, 8],
    ]
    units, seen = [Unit(layer) for layer in range(12)], []

    def loss(fine):
        seen.append(fine)
        return -sum(unit.layer for unit in fine)

    trials, chosen = search_units(units, 6, loss)
    assert chosen == tuple(Unit(layer) for layer in (11, 10, 9, 8, 7, 6))
    assert len(trials) == num_trials(12, 6) == len(set(seen)) == 12 + 11 + 10 + 8
    assert [len(one.before) for one in trials] == [0] * 12 + [1] * 11 + [2] * 10 + [4] * 8


def test_a_layer_that_alone_attends_makes_good_the_whole_loss():
    """The other layer's attention is multiplied by zero, so its groups do not matter."""
    model, ids = tiny_model("llama"), tokens(1, 120)
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    full = far_loss(model, [ids])
    with torch.no_grad():
        nll = torch.nn.functional.cross_entropy(
            model(ids).logits[0, :-1], ids[0, 1:], reduction="none"
        )
    assert full == pytest.approx(float(nll[59:].mean()), abs=1e-5)
    with corecontext.enabled(model, CCAConfig.paper(4, 8)) as handle:

        def loss(units):
            handle.configure(layer_group_sizes=spread(Shape(2, 2), units, 1, 16))
            return far_loss(model, [ids])

        idle, busy = search_units([Unit(0), Unit(1)], 1, loss).trials
        # Both heads are the layer.
        assert loss((Unit(1, 0), Unit(1, 1))) == pytest.approx(busy.loss, abs=1e-5)
        assert len({loss((Unit(1, 0),)), loss((Unit(1, 1),)), busy.loss}) == 3
    assert busy.loss == pytest.approx(full, abs=1e-5) and abs(idle.loss - full) > 1e-3


def test_the_command_finds_sizes_that_a_checkpoint_can_hold(tmp_path, capsys):
    out, json_path = tmp_path / "model", tmp_path / "layers.jsonl"
    command = ["layers", TEXT, "--model", MODEL, "--length", "512", "--rows", "1"]
    command += ["--group-size", "8", "--window-size", "16", "--device", "cpu"]
    assert main([*command, "--output", str(out), "--json", str(json_path)]) == 0
    printed = capsys.readouterr().out
    sizes = json.loads(printed[printed.index("layer_group_sizes = ") + 20 :].splitlines()[0])
    records = read_records(json_path)
    assert {one.params["model"] for one in records} == {"demo_model"}  # not where it lies
    best = min(records, key=lambda one: one.value)
    assert len(records) == len(sizes) == 8 and sizes.index(min(sizes)) == int(best.params["unit"])
    assert f"{best.value:.3f} <" in printed
    settings = json.loads((out / "config.json").read_text())["cca"]
    assert settings["layer_group_sizes"] == sizes and settings["window_size"] == 16
    assert list(handle_of(corecontext.from_pretrained(str(out))).config.layer_group_sizes) == sizes
    assert main([*command, "--heads"]) == 0
    printed = capsys.readouterr().out
    sizes = ast.literal_eval(printed[printed.index("layer_group_sizes = ") + 20 :].splitlines()[0])
    assert "layer.head" in printed and sum(isinstance(one, tuple) for one in sizes) == 1
    for wrong, message in (
        (["--output", str(out)], "already exists. Give a new folder"),
        (["--length", "100000"], "length must be at most"),
        (["--length", "32"], "at least"),
        (["--length", "128"], "groups smaller than 8 fit"),
        (["--count", "8"], "count must be 1 .. 7 of 8"),
        (["--count", "0"], "count must be 1 .. 7 of 8"),
        (["--rows", "0"], "rows must be"),
    ):
        assert main([*command, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_copy_that_cannot_be_written_is_refused_before_the_search(tmp_path, capsys):
    command = ["layers", TEXT, "--model", "me/on-the-hub", "--output", str(tmp_path / "new")]
    with mock.patch("corecontext.loading.load", side_effect=AssertionError("the search began")):
        assert main(command) == 2
    assert "model 'me/on-the-hub' must be a folder with config.json" in capsys.readouterr().err


def test_heads_that_keep_every_token_fit_where_nobody_says_how_many():
    for length, window, count in (
        (4096, 256, 1),
        (8192, 1024, 16),
        (32768, 1024, 12),
        (131072, 1024, 9),
        (2**20, 1024, 8),
    ):
        shape, config = (
            (Shape(8, 2) if length == 4096 else Shape(32, 8)),
            CCAConfig.paper(16, window),
        )
        assert raw_heads(shape, config, length) == count
        some = [Unit(i % shape.layers, i // shape.layers) for i in range(count)]
        assert at_equal_cache(shape, some, config, length, raw=True).window_size > window // 2


def test_heads_are_found_by_the_answers_to_needles(tmp_path, capsys):
    """The loss counts the number's tokens alone, at the end of prompts with the answer."""
    tiny = save_tiny_model(tmp_path / "tiny")
    text = Path(TEXT).read_text(encoding="utf-8")[:2000]
    loaded = load(tiny, preset="pooling", group_size=4, window_size=32, sinks=4, device="cpu")
    rows, starts = needle_rows(loaded, text, 400, 2)
    numbers = []
    for row, start in zip(rows, starts):
        shown = loaded.tokenizer.decode(row[0, start:])
        numbers.append(shown.strip())
        assert loaded.tokenizer.decode(row[0, :start]).endswith("The special magic number is")
        assert loaded.tokenizer.decode(row[0]).count(numbers[-1]) == 2 and row.shape[1] <= 400
    assert len(set(numbers)) == 2 and all(len(number) == 7 for number in numbers)
    nll = [document_nll(loaded.model, row)[start - 1 :] for row, start in zip(rows, starts)]
    loss = float(torch.cat(nll).double().mean())
    found = find_layers(loaded, text, 400, 2, 1, heads=True, needles=True)
    assert found.equal == pytest.approx(loss) != far_loss(loaded.model, rows)

    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    command = ["layers", str(tmp_path / "text.txt"), "--model", tiny, "--length", "400"]
    command += ["--rows", "2", "--count", "1", "--heads", "--needles", "--device", "cpu"]
    command += ["--group-size", "4", "--window-size", "32", "--sinks", "4"]
    assert main([*command, "--json", str(tmp_path / "layers.jsonl")]) == 0
    assert "Perplexity of numbers in answers, where one keeps" in capsys.readouterr().out
    records = read_records(tmp_path / "layers.jsonl")
    assert {record.params["by"] for record in records} == {"needles"}


def test_rows_longer_than_the_models_positions_name_the_option(tmp_path):
    loaded = load(
        save_tiny_model(tmp_path / "tiny"), preset="pooling", window_size=32, device="cpu"
    )
    limit = loaded.max_length
    with pytest.raises(UserError, match=f"got {limit + 1}. Use --length {limit}, or less"):
        find_layers(loaded, "text", limit + 1, 2, None)


def test_a_head_that_keeps_every_token_is_found_measured_and_written(tmp_path, capsys):
    tiny, out = save_tiny_model(tmp_path / "tiny"), tmp_path / "model"
    text = Path(TEXT).read_text(encoding="utf-8")[:400]
    loaded = load(tiny, preset="pooling", group_size=4, window_size=32, device="cpu")
    found = find_layers(loaded, text, 128, 2, None, heads=True, raw=True)
    assert handle_of(loaded.model).config == loaded.config == CCAConfig.pooling(4, 32)
    (unit,) = found.search.chosen
    assert found.config == at_equal_cache(
        Shape(2, 2), [unit], CCAConfig.pooling(4, 32), 128, raw=True
    )
    assert found.config.layer_group_sizes[unit.layer][unit.head] == 1
    assert 16 < found.config.window_size < 32

    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    command = ["layers", str(tmp_path / "text.txt"), "--model", tiny, "--length", "128"]
    command += ["--rows", "2", "--group-size", "4", "--window-size", "32", "--device", "cpu"]
    command += ["--raw"]
    assert main([*command, "--heads", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"window_size = {found.config.window_size}\nlayer_group_sizes = " in printed
    assert f"at the same cache size {math.exp(found.chosen):.3f} with" in printed
    model = corecontext.from_pretrained(str(out)).eval()
    assert handle_of(model).config == found.config
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"]
    rows = [ids[:, :128], ids[:, 128:256]]
    assert far_loss(model, rows) == pytest.approx(found.chosen, abs=1e-6)
    with torch.no_grad():
        whole = model(ids[:, :200], use_cache=False).logits[:, -1].argmax(-1)
        made = model.generate(ids[:, :200], max_new_tokens=8, do_sample=False)
    assert made.shape == (1, 208) and made[0, 200] == whole
    handle_of(model).configure(window_size=32)
    # It was not measured with the window as it was.
    assert abs(far_loss(model, rows) - found.chosen) > 1e-5

    again = [*command, "--heads", "--model", str(out)]  # the window has paid already
    again = [one for one in again if one not in ("--group-size", "4", "--window-size", "32")]
    assert main(again) == 2
    assert "window-size must be given with --raw for a check" in capsys.readouterr().err
    assert main([*again, "--window-size", "32"]) == 0
    assert (
        f"window_size = {found.config.window_size}\nlayer_group_sizes = " in capsys.readouterr().out
    )

    for wrong, room in ((["--heads", "--window-size", "8"], 0), ([], 1)):  # one layer has two heads
        assert main([*command, *wrong]) == 2
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 1 and f"must be at most {room} of 4 KV heads" in error[0]
        assert "heads in place of layers (--heads)" in error[0]


def test_the_cache_of_a_search_has_its_first_tokens():
    def entries(config, group_size):
        sizes = config.replace(group_size=group_size, core_position="token")
        return CompactLayer(sizes).size(4096)

    for sinks in (0, 100):
        config = CCAConfig.pooling(16, 64, sink_size=sinks)
        sizes = at_equal_cache(Shape(4, 2), [Unit(1)], config, 4096).layer_group_sizes
        most = 1.05 * 4 * entries(config, 16)
        assert 3 * entries(config, 64) + entries(config, sizes[1]) <= most
        assert 3 * entries(config, 64) + entries(config, sizes[1] - 1) > most
    # Groups of 64 keep 64 first tokens for 48, so that groups of 16 do not get smaller.
    config = CCAConfig.pooling(16, 16, sink_size=48)
    assert at_equal_cache(Shape(4, 2), [Unit(1)], config.replace(sink_size=0), 1024)
    with pytest.raises(ValueError, match="groups smaller than 16 fit the same cache"):
        at_equal_cache(Shape(4, 2), [Unit(1)], config, 1024)


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


def test_info_adds_up_what_each_head_costs(capsys, tmp_path):
    def shown(folder, **settings):
        shutil.copytree(MODEL, tmp_path / folder)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        (tmp_path / folder / "config.json").write_text(
            json.dumps({**config, "cca": {"window_size": 128, **settings}})
        )
        code = corecontext_main(["info", "--model", str(tmp_path / folder), "--length", "65536"])
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.err

    text = shown("mixed", layer_group_sizes=[64] * 6 + [[2, 64], 64])
    entries = 15 * (65536 // 64 + 128 + 63) + 65536 // 2 + 128 + 1
    assert "g = 2 or 64" in text and f"{entries * 2 * 64 * 2 / 2**20:.1f} MiB" in text
    assert "one for each of the 2 KV heads" in shown(
        "heads", layer_group_sizes=[64] * 7 + [[2, 64, 64]]
    )
    assert "must have one g for each of the 8 full-attention layers, got 1" in shown(
        "layers", layer_group_sizes=[64]
    )
