"""Which layers need small groups."""

from __future__ import annotations

import json

import pytest
import torch
from families import tiny_model, tokens

import corecontext
from corecontext import CCAConfig
from corecontext.cli import main
from corecontext.eval.layers import COARSE, Trial, chosen_of, far_loss, search_layers, sizes_at_equal_cache
from corecontext.integrations.transformers import handle_of
from corecontext.record import read_records
from corecontext.visibility import num_complete_groups, window_capacity

MODEL, TEXT = "corecontext/assets/demo_model", "corecontext/assets/document.txt"


@pytest.mark.parametrize("layers,chosen,g,s,length", [(8, (4,), 16, 256, 4096), (8, (5, 2), 16, 256, 4096),
                                                      (32, (3, 9, 20, 31), 16, 1024, 131072), (2, (0,), 4, 8, 1000)])
def test_the_cache_stays_as_large_and_groups_as_small_as_it_allows(layers, chosen, g, s, length):
    sizes = sizes_at_equal_cache(layers, chosen, CCAConfig(g, s), length)
    assert {sizes[i] for i in range(layers) if i not in chosen} == {COARSE * g}
    small, = {sizes[i] for i in chosen}

    def entries(of):
        return sum(num_complete_groups(length, size) + window_capacity(size, s) for size in of)

    equal = entries([g] * layers)
    assert 1 <= small < g and entries(sizes) <= 1.05 * equal
    assert entries(small - 1 if size == small else size for size in sizes) > 1.05 * equal


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="groups smaller than 16 fit the same cache; got 1 of 8 layers and 600 tokens"):
        sizes_at_equal_cache(8, (1,), CCAConfig(16, 256), 600)


def test_layers_are_chosen_one_beside_the_other():
    """3 is best alone; beside it 0, which is worst alone."""
    def loss(config):
        fine = {i for i, size in enumerate(config.layer_group_sizes) if size == 1}
        assert set(config.layer_group_sizes) <= {1, 4 * COARSE}
        return {3: -5, 1: -3, 2: -2, 0: 0}.get(min(fine), 0) if len(fine) == 1 else -9 if fine == {0, 3} else -6

    done = []
    trials = search_layers(4, 2, CCAConfig(4, 8), loss, done.append)
    assert chosen_of(trials) == (3, 0) and len(done) == len(trials) == 4 + 3
    assert trials[3] == Trial(3, (), -5) and trials[4] == Trial(0, (3,), -9)
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"count must be 1 .. 3 for 4 full-attention layers, got {count}"):
            search_layers(4, count, CCAConfig(4, 8), loss)


def test_a_layer_that_alone_attends_makes_good_the_whole_loss():
    """The other layer's attention is multiplied by zero, so its groups do not matter."""
    model, ids = tiny_model("llama"), tokens(1, 120)
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    full = far_loss(model, [ids])
    with torch.no_grad():
        nll = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    assert full == pytest.approx(float(nll[59:].mean()), abs=1e-5)
    with corecontext.enabled(model, CCAConfig(4, 8)) as handle:
        def loss(config):
            handle.configure(layer_group_sizes=config.layer_group_sizes)
            return far_loss(model, [ids])

        idle, busy = search_layers(2, 1, handle.config, loss)
    assert busy.loss == pytest.approx(full, abs=1e-5) and abs(idle.loss - full) > 1e-3


def test_the_command_finds_sizes_that_a_checkpoint_can_hold(tmp_path, capsys):
    out, json_path = tmp_path / "model", tmp_path / "layers.jsonl"
    command = ["layers", TEXT, "--model", MODEL, "--length", "1024", "--rows", "1", "--window-size", "32",
               "--device", "cpu"]
    assert main([*command, "--output", str(out), "--json", str(json_path)]) == 0
    printed = capsys.readouterr().out
    sizes = json.loads(printed[printed.index("layer_group_sizes = ") + 20:].splitlines()[0])
    records = read_records(json_path)
    best = min(records, key=lambda one: one.value)
    assert len(records) == len(sizes) == 8 and sizes.index(min(sizes)) == best.params["layer"]
    assert f"{best.value:.3f} <" in printed
    settings = json.loads((out / "config.json").read_text())["cca"]
    assert settings["layer_group_sizes"] == sizes and settings["window_size"] == 32
    assert list(handle_of(corecontext.from_pretrained(str(out))).config.layer_group_sizes) == sizes
    for wrong, message in ((["--output", str(out)], "already exists. Give a new folder"),
                           (["--length", "100000"], "length must be at most"), (["--length", "64"], "at least"),
                           (["--length", "512"], "groups smaller than 16 fit"),
                           (["--count", "8"], "count must be 1 .. 7"), (["--rows", "0"], "rows must be")):
        assert main([*command, *wrong]) == 2
        assert message in capsys.readouterr().err
