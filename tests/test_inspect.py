"""The maps are the weights that attention has; the page holds them, and nothing in a text can break
out of it."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from budgets import effective_map
from families import tiny_model
from tiny_model import save_tiny_model

from corecontext import CCAConfig, enable
from corecontext.cli import main
from corecontext.eval.inspect.maps import attention_maps
from corecontext.eval.inspect.page import WEIGHTS, inspect_text, make_page, split_text
from corecontext.files import UserError
from corecontext.integrations.hf.enabling import handle_of
from corecontext.loading import Loaded, load
from corecontext.visibility import num_visible_cores

TEXT = "Some </script> words & things, d\u00e9j\u00e0 vu. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"core_mass": True, "sink_size": 8},
        {"core_mass": True},
        {"num_groups": 5},
        {"layer_group_sizes": (3, 5)},
        {"layer_group_sizes": (5, (1, 5)), "sink_size": 5},
        {"sink_size": 8},
        {"sink_size": 60},
        {"fetch_groups": 2, "core_mass": True, "sink_size": 4},
        {"fetch_groups": 3, "fetch_index": "mean", "fetch_share": 4},
        {"fetch_groups": 99, "layer_group_sizes": (5, (1, 4))},
    ],
    ids=str,
)
def test_maps_are_the_weights_of_attention(model, settings):
    loaded = load(model, method="full", device="cpu")
    config = CCAConfig.paper(**{"group_size": 4, "window_size": 9, **settings})
    handle = enable(loaded.model, config)
    ids, queries = (
        torch.randint(256, (1, 47), generator=torch.Generator().manual_seed(1)),
        [3, 11, 12, 46],
    )
    found = attention_maps(Loaded(loaded.model, loaded.tokenizer, config), ids, queries)
    seen = {}
    handle.observer = lambda index, *call: seen.setdefault(index, call)
    with torch.no_grad():
        loaded.model(ids, use_cache=False)
    assert sorted((one.layer, head) for one in found for head in one.heads) == [
        (layer, head) for layer in (0, 1) for head in range(4)
    ]
    for one in found:
        q, k, _, _, _, rotary = seen[one.layer]
        own = handle.layers[one.layer]
        wanted = effective_map(
            q,
            k,
            group_size=own.head_group_sizes or own.group_size,
            rotary=rotary,
            **{
                name: getattr(own, name)
                for name in (
                    "window_size",
                    "num_groups",
                    "core_mass",
                    "sink_size",
                    "fetch_groups",
                    "fetch_index",
                )
            },
        )[0]
        for i, position in enumerate(queries):
            for at, head in enumerate(one.heads):
                torch.testing.assert_close(
                    spread(one, at, i, position),
                    wanted[head, position, : position + 1],
                    rtol=0,
                    atol=2e-6,
                )
            seen_cores, without = (
                num_visible_cores(position, one.group_size, 9),
                own.sink_size // one.group_size,
            )
            assert not one.core[:, i, seen_cores:].any() and not one.core[:, i, :without].any()
            shown = one.core[:, i] > 0
            if own.fetch_groups:
                fetched = (one.fetched[:, i] > 0).all(2)
                assert not (shown & fetched).any()
                count = min(own.fetch_groups, max(0, seen_cores - without))
                assert one.group_size == 1 or (fetched.sum(-1) == count).all()
                shown |= fetched
            assert shown[:, without:seen_cores].all()
        torch.testing.assert_close(one.pooling.sum(-1), torch.ones(one.pooling.shape[:2]))


def test_maps_have_the_scale_and_the_softcap_of_the_model():
    model = tiny_model("gemma2", query_pre_attn_scalar=9)
    config = CCAConfig.pooling(4, 9, sink_size=0)
    handle = enable(model, config)
    ids = torch.randint(2, 96, (1, 47), generator=torch.Generator().manual_seed(1))
    [layer] = attention_maps(Loaded(model, None, config), ids, [46], layers=[0])
    seen = []
    handle.observer = lambda index, *call: seen.append(call)
    with torch.no_grad():
        model(ids, use_cache=False)
    q, k, _, scale, softcap, rotary = seen[0]
    assert scale != q.shape[3] ** -0.5 and softcap is not None
    options = {"group_size": 4, "window_size": 9, "scale": scale, "softcap": softcap}
    options["core_mass"] = config.core_mass
    wanted = effective_map(q, k, rotary=rotary, **options)[0, :, 46]
    for head in range(4):
        torch.testing.assert_close(spread(layer, head, 0, 46), wanted[head], rtol=0, atol=2e-6)


def test_a_page_names_the_layers_and_queries_that_are_asked(model, capsys):
    loaded = load(model, preset="pooling", group_size=4, window_size=8)
    page = inspect_text(loaded, f"some/{model}", TEXT, 30, 4, positions=[9, 5, 9], layers=[1])
    data = data_of(page)
    assert data["queries"] == [5, 9] and data["title"] == f"Core tokens of {Path(model).name}"
    assert [layer["name"] for layer in data["layers"]] == ["layer 1"]
    settings = {"model": Path(model).name, "tokens": "30", "group_size": "4", "window_size": "8"}
    assert settings.items() <= data["settings"].items() and "note" not in data["settings"]
    short = data_of(inspect_text(loaded, model, TEXT[:5], 30, 99))
    assert short["queries"] == [0, 1, 2, 3, 4]
    assert short["settings"]["note"].startswith("CCA was idle")
    assert "CCA was idle: at most 5 tokens" in capsys.readouterr().err
    handle_of(loaded.model).configure(layer_group_sizes=(4, (4, 2)))
    data = data_of(inspect_text(loaded, model, TEXT, 30, 1))
    assert [(x["name"], x["group_size"], x["heads"], x["shared"]) for x in data["layers"]] == [
        ("layer 0", 4, 4, 2),
        ("layer 1, heads with g = 4", 4, 2, 2),
        ("layer 1, heads with g = 2", 2, 2, 2),
    ]
    assert [layer["numbers"] for layer in data["layers"]] == [[0, 1, 2, 3], [0, 1], [2, 3]]


def spread(layer, head: int, query: int, position: int) -> torch.Tensor:
    """Weight of every token in the query's output, core weights spread over their groups."""
    weights = torch.zeros(position + 1)
    far = (layer.core[head, query, :, None] * layer.used[head]).flatten()[: position + 1]
    weights[: len(far)] += far
    near = layer.raw[head, query][-(position + 1) :]
    weights[position + 1 - len(near) :] += near
    first = layer.first[head, query][: position + 1]
    weights[: len(first)] += first
    raw = layer.fetched[head, query].flatten()[: position + 1]
    weights[: len(raw)] += raw
    return weights


def data_of(page: str) -> dict:
    return json.loads(re.search(r"^const data = (.*);$", page, re.M)[1])


def test_the_page_holds_the_maps(model, tmp_path, capsys):
    path, out = tmp_path / "text.txt", tmp_path / "page.html"
    path.write_text(TEXT, encoding="utf-8")
    arguments = ["inspect", str(path), "--model", model, "--output", str(out)]
    arguments += ["--preset", "pooling", "--group-size", "4", "--window-size", "16"]
    arguments += ["--max-tokens", "80", "--queries", "5", "--sinks", "7"]
    assert main(arguments) == 0 and "wrote" in capsys.readouterr().out
    page = out.read_text(encoding="utf-8")
    data = data_of(page)
    loaded = load(model, preset="pooling", group_size=4, window_size=16, sinks=7)
    ids = loaded.tokenizer(TEXT)["input_ids"][:80]
    assert "".join(data["tokens"]) == loaded.tokenizer.decode(ids) and len(data["tokens"]) == 80
    assert data["queries"] == [15, 31, 47, 63, 79]
    found = attention_maps(loaded, torch.tensor([ids], device=loaded.model.device), data["queries"])
    for one, layer in zip(found, data["layers"]):
        assert (layer["groups"], layer["heads"], layer["shared"]) == (20, 4, 2)
        assert layer["kept"] == 8
        for name in WEIGHTS:
            held = np.frombuffer(base64.b64decode(layer[name]), "<f2").reshape(
                getattr(one, name).shape
            )
            np.testing.assert_allclose(held, getattr(one, name), atol=1e-3)
    assert page.count("</script>") == 1 and "://" not in page and "fetch(" not in page
    assert main(arguments) == 2 and "already exists" in capsys.readouterr().err


def test_mistakes_are_said(model, monkeypatch):
    loaded = load(model, preset="pooling", group_size=4, window_size=8)
    for options, message in (
        ({"positions": [40]}, "position from 0 to 29, got 40"),
        ({"layers": [2]}, "one of the 2 with full attention"),
    ):
        with pytest.raises(UserError, match=message):
            inspect_text(loaded, model, TEXT, 30, 4, **options)
    with pytest.raises(UserError, match="method must be cca"):
        inspect_text(load(model, method="full"), model, TEXT, 30, 4)
    assert handle_of(loaded.model).observer is None
    monkeypatch.setattr("corecontext.eval.inspect.page.MOST_BYTES", 1000)
    loaded = load(model, preset="pooling", group_size=4, window_size=8)
    with pytest.raises(UserError, match="Take fewer --layer"):
        inspect_text(loaded, model, TEXT, 30, 4)


def test_tokens_are_told_apart(model):
    tokenizer = load(model, method="full").tokenizer
    ids = tokenizer("a\u00e9b \u20ac")["input_ids"]
    assert split_text(tokenizer, ids) == ["a", "", "\u00e9", "b", " ", "", "", "\u20ac"]
    assert split_text(tokenizer, ids[:2])[:1] == ["a"]
    assert make_page("t", [], [], [], {}).startswith("<!doctype html>")
