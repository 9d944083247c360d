"""Models whose first tokens stay raw: every way of generating, the engine, checkpoints, and the
command line."""

import json
from pathlib import Path

import pytest
import torch
from families import recompute, stateless, tiny_model, tokens
from torch.nn.functional import pad

import corecontext
from corecontext import CCAConfig
from corecontext.cli import main
from corecontext.inference import Engine
from corecontext.integrations.hf.cache_layers import cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache
from corecontext.integrations.hf.enabling import handle_of
from corecontext.loading import load
from corecontext.train.arguments import checkpointing_name

pytestmark = pytest.mark.usefixtures("default_device")
CONFIG = CCAConfig.pooling(4, 9, sink_size=6)  # 8 tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 5},
        {"prefill_chunk_size": 1},
        {"prompt_lookup_num_tokens": 5},
    ],
    ids=str,
)
def test_greedy_equals_recomputing(options):
    model, ids = tiny_model(), tokens(1, 37)
    ids[:, 20:30] = ids[:, 5:15]  # something for prompt lookup to find
    with corecontext.enabled(model, CONFIG):
        for prompt in (ids, ids[:, :3]):  # the second answer grows over the end of the first tokens
            out = model.generate(prompt, max_new_tokens=25, do_sample=False, **options)
            assert torch.equal(out, recompute(model, prompt, 25))


def test_the_model_sees_the_rule():
    model, ids = tiny_model(), tokens(2, 61)
    found = []
    for changes in (
        {"backend": "reference"},
        {},
        {"sink_size": 0},
        {"sink_size": 61},
        {"group_size": 1},
    ):
        with corecontext.enabled(model, CONFIG.replace(**changes)):
            found.append(stateless(model, ids))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=3e-5)
    assert (found[1] - found[2]).abs().max() > 1e-2
    full = stateless(model, ids)
    for same in found[3:]:
        torch.testing.assert_close(same, full, rtol=1e-4, atol=3e-5)


def test_beams_padding_and_the_bytes():
    model = tiny_model()
    ids = torch.cat([pad(tokens(1, n, seed=n), (37 - n, 0)) for n in (37, 21, 5)])
    mask = torch.cat([pad(torch.ones_like(tokens(1, n)), (37 - n, 0)) for n in (37, 21, 5)])
    with corecontext.enabled(model, CONFIG):
        options = {"num_beams": 3, "max_new_tokens": 14, "do_sample": False}
        assert torch.equal(
            model.generate(ids, attention_mask=mask, **options),
            model.generate(ids, attention_mask=mask, use_cache=False, **options),
        )
        batch = model.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
        for row, n in enumerate((37, 21, 5)):
            assert torch.equal(
                batch[row : row + 1, 37 - n :], recompute(model, tokens(1, n, seed=n), 14)
            )
        with torch.no_grad():
            cache = returned_cache(model(tokens(1, 50), use_cache=True))
    numbers = 2 * 16 + 1  # of a key, a value and a mass
    entry = model.config.num_hidden_layers * model.config.num_key_value_heads * numbers * 4
    assert cache_bytes(cache) == (50 // 4 - 2 + 8 + 9 + 4 - 1) * entry


@pytest.mark.parametrize("static", [False, True])
def test_the_engine_in_chunks_with_g_and_s_by_request(static):
    model = tiny_model()
    ids = torch.cat([pad(tokens(1, n, seed=n), (41 - n, 0)) for n in (41, 22, 3)])
    mask = torch.cat([pad(torch.ones_like(tokens(1, n)), (41 - n, 0)) for n in (41, 22, 3)])
    with corecontext.enabled(model, CONFIG):
        for sizes in ({}, {"group_size": 5, "window_size": 7}):  # 6 first tokens are 10 then
            made = [
                Engine(model, static=static, chunk_size=size).generate(
                    ids, mask, max_new_tokens=16, **sizes
                )
                for size in (1, 7, 100)
            ]
            handle_of(model).configure(**sizes)
            for row, n in enumerate((41, 22, 3)):
                alone = recompute(model, tokens(1, n, seed=n), 16)[0, n:].tolist()
                assert [one[row] for one in made] == [alone] * 3
        with Engine(model, static=static).stream(
            ids, mask, max_new_tokens=12, window_size=9
        ) as stream:
            for _ in range(4):
                next(stream)
            stream.configure(window_size=3)
            assert len(list(stream)) == 8


def test_checkpoints_and_training(tmp_path):
    model, ids = tiny_model(), tokens(2, 40)
    corecontext.enable(model, CONFIG)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["cca"]["sink_size"] == 6
    loaded = corecontext.from_pretrained(str(tmp_path))
    assert handle_of(loaded).config == CONFIG
    assert torch.equal(stateless(loaded, ids), stateless(model, ids))
    grads = []
    for one, backend, checkpointing in (
        (model, "packed", False),
        (loaded, "reference", False),
        (model, "packed", True),
    ):
        handle_of(one).configure(backend=backend)
        if checkpointing:
            getattr(one, f"{checkpointing_name()}_enable")()
        one.train().zero_grad()
        one(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([parameter.grad.clone() for parameter in one.parameters()])
    for a, b, c in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-7)


def test_the_command_line(tmp_path, capfd, monkeypatch):
    from tiny_model import save_tiny_model

    monkeypatch.chdir(tmp_path)
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The first tokens of a text are where attention rests. " * 8)
    common = ["--model", model, "--device", "cpu"]
    sizes = [*common, "--preset", "pooling", "--group-size", "8", "--window-size", "16"]
    assert (
        main(["perplexity", "text.txt", *sizes, "--compare", "--sinks", "12", "--json", "r.jsonl"])
        == 0
    )
    values = {
        one["params"]["method"]: one
        for one in map(json.loads, Path("r.jsonl").read_text().splitlines())
        if one["name"] == "quality.perplexity" and "bucket" not in one["params"]
    }
    assert values["cca"]["params"]["sinks"] == 12 and "sinks" not in values["full"]["params"]
    command = (
        f"convert {model} with --preset pooling --group-size 8 --window-size 16 --sink-size 12"
    )
    assert main(command.split()) == 0
    assert load("with", device="cpu").config == CCAConfig.pooling(8, 16, sink_size=12)
    texts = []
    argv = ["generate", "--prompt-file", "text.txt", "--max-new-tokens", "6"]
    for options in ([*sizes, "--sinks", "500"], [*common, "--method", "full"], sizes):
        capfd.readouterr()
        assert main([*argv, *options]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1]
    for wrong, message in (
        (["--sinks", "-2"], "sink_size must be at least 0, got -2"),
        (["--method", "full", "--sinks", "2"], "sinks must be left out with method 'full'"),
    ):
        assert main([*argv, *common, *wrong]) == 2
        assert message in capfd.readouterr().err
