"""Models are loaded with exactly their own weights, finite ones, or refused with one line."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model

from corecontext import CCAConfig, from_pretrained
from corecontext.cli import main
from corecontext.files import UserError, first_line
from corecontext.loading import load, load_config, load_weights

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("loading") / "model")


@pytest.fixture
def variant(model, tmp_path):
    """Return a function that copies the model with other weights and another config.json."""

    def make(change=lambda weights: None, **config) -> str:
        folder = tmp_path / "variant"
        shutil.copytree(model, folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | config))
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return make


@pytest.mark.parametrize(
    "change, config, message",
    [
        (
            lambda w: None,
            {"num_hidden_layers": 4},
            "got 18 missing (model.layers.2.input_layernorm",
        ),
        (lambda w: None, {"num_hidden_layers": 1}, "got 9 not in the model (model.layers.1.input_"),
        (lambda w: w.pop("lm_head.weight"), {}, "got 1 missing (lm_head.weight). Take the whole"),
        (
            lambda w: None,
            {"intermediate_size": 80},
            "got 6 of another shape (model.layers.0.mlp.down_proj.weight [64, 96] for [64, 80], ",
        ),
    ],
    ids=["missing layers", "layers too many", "no head", "shapes"],
)
def test_weights_are_those_that_the_config_describes(variant, change, config, message):
    folder = variant(change, **config)
    with pytest.raises(UserError) as error:
        load_weights(folder, load_config(folder), torch.float32)
    assert "must hold exactly the weights that its config.json describes" in str(error.value)
    assert message in str(error.value) and len(str(error.value)) < 500


def test_python_refuses_them_too(variant):
    folder = variant(num_hidden_layers=1)
    with pytest.raises(ValueError, match="got 9 not in the model"):
        from_pretrained(folder, CCAConfig())


def test_harmless_keys_are_no_fault(variant):
    def change(weights):
        del weights["lm_head.weight"]
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        weights["model.layers.0.self_attn.cca.temperature"] = torch.zeros(4)

    folder = variant(change, tie_word_embeddings=True)
    assert load_weights(folder, load_config(folder), "auto").dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_are_finite(variant, value):
    folder = variant(lambda weights: weights[NORM].__setitem__(3, value))
    with pytest.raises(UserError, match="must hold finite weights, got NaN or infinity in 1 "):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    "config, message",
    [
        ({"vocab_size": 0}, "must have a vocab_size of at least 1 in its config.json, got 0."),
        ({"num_hidden_layers": -1}, "must have a num_hidden_layers of at least 1 in its config"),
        (
            {"num_key_value_heads": 3},
            "must have a multiple of its 3 KV heads as query heads in its config.json, got 4.",
        ),
    ],
)
def test_sizes_that_no_model_has_are_refused(variant, config, message):
    with pytest.raises(UserError) as error:
        load_config(variant(**config))
    assert message in str(error.value)


def test_a_tokenizer_of_another_model_is_refused(variant):
    def cut(weights):
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            weights[name] = weights[name][:200].clone()

    with pytest.raises(UserError, match="must have at most the model's 200 entries, got 256."):
        load(variant(cut, vocab_size=200), device="cpu")


def test_sizes_beyond_the_model_are_bounded(model):
    loaded = load(model, window_size=10**9, sinks=10**8, device="cpu")
    assert loaded.sizes()["window_size"] == loaded.sizes()["sinks"] == loaded.max_length
    for method in ("streaming_llm", "mean"):
        sizes = load(model, method=method, window_size=10**9, sinks=10**8, device="cpu").sizes()
        assert sizes["window_size"] == sizes["sinks"] == loaded.max_length


@pytest.mark.parametrize(
    "error, line",
    [
        (ValueError("one of:\n\n  a\n  b"), "one of: a"),
        (KeyError("added_tokens"), "missing or unknown key 'added_tokens'"),
        (ValueError("for field:\n"), "for field:"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_line_has_its_content(error, line):
    assert first_line(error) == line


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"layer_group_sizes": [4, 4, 8]}, "each of the 2 full-attention layers, got 3."),
        ({"head_group_sizes": [4, 4, 8]}, "each of the 2 KV heads, got (4, 4, 8)."),
        ({"layer_group_sizes": [4, [4, 8, 4]]}, "each of the 2 KV heads, got (4, 8, 4)."),
    ],
    ids=["layers", "heads", "heads of a layer"],
)
def test_settings_that_do_not_fit_the_model_are_written_nowhere(
    variant, sizes, message, tmp_path, capsys
):
    folder = variant(cca=sizes)
    new = tmp_path / "new"
    for arguments in (["convert", folder, str(new)], ["info", "--model", folder]):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert not new.exists()
    assert main(["convert", folder, str(new), "--method", "full", "--group-size", "4"]) == 2
    assert "given for method cca, got method full" in capsys.readouterr().err
    assert main(["convert", folder, str(new), "--method", "full"]) == 0
    assert "cca" not in json.loads((new / "config.json").read_text())
