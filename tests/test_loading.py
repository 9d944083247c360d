"""Models are loaded with exactly their own weights, finite ones, or refused with one line."""

import json
import shutil
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model

from corecontext import CCAConfig, from_pretrained, loading
from corecontext.cli import main
from corecontext.files import UserError, first_line
from corecontext.integrations.hf import attention_interface as hf_attention
from corecontext.integrations.hf import enabling as transformers
from corecontext.integrations.hf.weights import check_keys
from corecontext.loading import Loaded, encode, load, load_config, load_weights, pick_device
from corecontext.methods import cut_to_positions

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
        from_pretrained(folder, CCAConfig.paper())


def test_harmless_keys_are_no_fault(variant):
    def change(weights):
        del weights["lm_head.weight"]
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    folder = variant(change, tie_word_embeddings=True)
    assert load_weights(folder, load_config(folder), "auto").dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_are_finite(variant, value):
    folder = variant(lambda weights: weights[NORM].__setitem__(3, value))
    with pytest.raises(UserError, match="must hold finite weights, got NaN or infinity in 1 "):
        load(folder, device="cpu")


def test_every_fault_of_a_checkpoint_is_named_up_to_three_each():
    keys = [f"layer.{i}" for i in (4, 2, 3, 1)]
    info = {
        "missing_keys": {"head", "norm"},
        "unexpected_keys": keys,
        "mismatched_keys": [("norm", torch.Size([3]), torch.Size([4]))],
    }
    with pytest.raises(UserError) as error:
        check_keys("name", info)
    assert (
        "got 1 missing (head), 4 not in the model (layer.1, layer.2, layer.3, ...), "
        "1 of another shape (norm [3] for [4])."
    ) in str(error.value)
    check_keys("name", {"missing_keys": set(), "unexpected_keys": keys[:0], "mismatched_keys": []})
    with pytest.raises(UserError, match=r"3 not in the model \(layer.1, layer.2, layer.4\)"):
        check_keys("name", {**info, "unexpected_keys": [keys[i] for i in (0, 1, 3)]})


def test_numbers_are_float32_on_a_cpu_unless_the_user_says_otherwise(tmp_path):
    folder = save_tiny_model(tmp_path / "model", layers=1, dtype=torch.bfloat16)
    for dtype, expected in (("auto", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")):
        loaded = load(folder, method="full", device="cpu", dtype=dtype)
        assert loaded.sizes()["dtype"] == expected
        assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, expected)}
        assert not loaded.model.training


def of_length(limit: int | None, count: int = 10) -> tuple[Loaded, dict]:
    """Return a model of so many positions whose every text has `count` tokens, and the options that
    its tokenizer gets."""
    options: dict = {}

    def tokenizer(text, **given):
        options.update(given)
        return {"input_ids": torch.zeros(1, count, dtype=torch.long)}

    config = SimpleNamespace(max_position_embeddings=limit)
    config.get_text_config = lambda decoder: config
    return Loaded(SimpleNamespace(config=config, device="cpu"), tokenizer, None), options


def test_a_text_and_its_answer_fit_the_model_exactly():
    for limit, room in ((None, 99), (10, 0), (12, 2)):
        loaded, options = of_length(limit)
        assert encode(loaded, "", room_for=room, at_least=10).shape == (1, 10)
        assert options["add_special_tokens"] is True
    for limit, wanted, message in (
        (9, {}, "text must fit the model's 9 tokens, got 10. Shorten it or take a model"),
        (12, {"room_for": 3}, "got 10 and 3 new ones. Shorten it, ask for fewer new tokens, or"),
        (None, {"at_least": 11}, "text must have at least 11 tokens, got 10."),
    ):
        loaded, options = of_length(limit)
        with pytest.raises(UserError) as error:
            encode(loaded, "", special_tokens=False, **wanted)
        assert message in str(error.value)
        assert options["add_special_tokens"] is False


def test_a_text_that_is_far_too_long_is_not_encoded_whole():
    encoded: list[str] = []

    def tokenizer(text, **options):
        encoded.append(text)
        words = torch.zeros(1, len(text.split()), dtype=torch.long)
        return {"input_ids": words if "return_tensors" in options else words[0].tolist()}

    config = SimpleNamespace(max_position_embeddings=100)
    config.get_text_config = lambda decoder: config
    loaded = Loaded(SimpleNamespace(config=config, device="cpu"), tokenizer, None)
    with pytest.raises(UserError, match="the model's 100 tokens, got more than 100 and 2 new ones"):
        encode(loaded, "word " * 10000, room_for=2)
    assert list(map(len, encoded)) == [800]
    # A text of long words fits. One whose beginning has a few tokens too many is encoded whole, as
    # the cut may have made them.
    assert encode(loaded, "a-word-of-20-letters " * 100).shape == (1, 100)
    with pytest.raises(UserError, match="got 1133. Shorten"):
        encode(loaded, "word " * 131 + "x" * 200 + " word" * 1001)


@pytest.mark.parametrize(
    "settings, most",
    [
        ({"group_size": 4}, 23),
        ({"group_size": 1}, None),
        ({"layer_group_sizes": (4, 8)}, 23),
        ({"layer_group_sizes": (32, 32)}, 51),
        ({"layer_group_sizes": (8, (6, 3))}, 22),
        ({"layer_group_sizes": (1, (1, 5))}, 24),
        ({"head_group_sizes": (9, 7)}, 26),
        ({"group_size": 4, "sink_size": 3}, 27),
        ({"num_groups": 2}, 22),
    ],
    ids=str,
)
def test_cca_is_idle_until_one_head_sees_a_core_token(settings, most):
    loaded = Loaded(None, None, CCAConfig.paper(window_size=20, **settings))
    note = f"CCA was idle: at most {most or 999} tokens, within its window (s = 20): its numbers"
    assert loaded.idle_note(most or 999).startswith(note)
    if most is not None:
        assert loaded.idle_note(most + 1) == ""


def test_cca_is_idle_where_every_group_is_fetched():
    config = CCAConfig.paper(window_size=20, group_size=4, fetch_groups=2)
    loaded = Loaded(None, None, config)
    note = "at most 31 tokens, within its window (s = 20) and the groups that it fetches (k = 2):"
    assert note in loaded.idle_note(31)
    assert "a smaller --window-size or --fetch-groups." in loaded.idle_note(31)
    assert loaded.idle_note(32) == ""


def test_a_note_names_the_method_that_was_idle(model):
    for method in ("streaming_llm", "window"):
        loaded = load(model, method=method, window_size=20, device="cpu")
        assert loaded.idle_note(10).startswith(f"{method} was idle: at most 10 tokens")
    assert load(model, method="full", device="cpu").idle_note(10) == ""


def test_sizes_name_what_differs_from_the_default(model):
    plain = load(model, device="cpu").sizes()
    assert plain == {
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "layers": 2,
        "dtype": "float32",
        "group_size": 32,
        "window_size": 160,
        "sinks": 16,
        "core_mass": True,
        "fetch_groups": 64,
        "fetch_index": "bits:2",
        "store": "host",
    }
    loaded = load(model, cache_dtype="int8", sinks=3, device="cpu")
    assert loaded.sizes() == {**plain, "cache_dtype": "int8", "sinks": 3}
    host = {"fetch_groups": 3, "fetch_index": "mean"}
    for given in (host, {**host, "fetch_slots": 3}, {"prefill": "full"}):
        assert Loaded(loaded.model, None, CCAConfig(**given)).sizes() == {**plain, **given}
    pooled = load(model, preset="pooling", group_size=3, device="cpu", warn=False).sizes()
    without = {"fetch_groups", "fetch_index", "store"}
    kept = {name: value for name, value in plain.items() if name not in without}
    assert pooled == {**kept, "group_size": 3, "window_size": 1024}
    del plain["core_mass"]
    loaded = load(model, core_mass=False, device="cpu")
    assert loaded.sizes() == plain
    for name in ("layer_group_sizes", "head_group_sizes"):
        config = CCAConfig(**{name: (4, 8)}, core_mass=False)
        sizes = Loaded(loaded.model, None, config).sizes()
        assert sizes == {**plain, name: [4, 8]}


@pytest.mark.parametrize(
    "options, message",
    [
        *(
            (
                {"method": method, **sizes},
                f"{option} must be left out with method {method!r}, which would ignore it, got",
            )
            for method, option, sizes in (
                ("full", "group-size", {"group_size": 4}),
                ("full", "window-size", {"window_size": 4}),
                ("full", "sinks", {"sinks": 0}),
                ("full", "cache-dtype", {"cache_dtype": "int8"}),
                ("window", "group-size", {"group_size": 4, "window_size": 8}),
                ("window", "core-mass", {"core_mass": False}),
                ("lm_infinite", "cache-dtype", {"sinks": 4, "cache_dtype": "int8"}),
            )
        ),
        ({"cache_dtype": "int4"}, "cache_dtype must be one of 'auto', 'int8', 'fp8', got 'int4'"),
        ({"method": "window", "window_size": 0}, "window_size must be at least 1"),
        ({"group_size": 0}, "group_size must be at least 1, got 0."),
        ({"sinks": -1}, "sink_size must be at least 0, got -1."),
        ({"dtype": "half"}, "dtype must be auto, float32, bfloat16 or float16, got 'half'."),
        ({"method": "dense"}, "method must be cca, full, window, "),
    ],
    ids=str,
)
def test_settings_are_refused_before_the_model_is_looked_for(options, message):
    with pytest.raises(UserError) as error:
        load("./no/such/model", device="cpu", **options)
    assert message in str(error.value)


def test_a_model_is_accepted_and_warned_of_as_asked(model, variant, monkeypatch):
    with pytest.warns(UserWarning, match="not trained with CCA"):
        assert not load(model, device="cpu", preset="pooling").adapted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not load(model, device="cpu", preset="pooling", warn=False).adapted
        assert not load(model, device="cpu").adapted
        assert load(model, device="cpu", method="window").method == "window"
        adapted = variant(cca={"group_size": 4})
        assert load(adapted, device="cpu").adapted
        assert load(adapted, device="cpu", method="window").adapted
    monkeypatch.setattr(hf_attention, "TESTED", ())
    monkeypatch.setattr(transformers, "TESTED", ())
    for method in ("cca", "window"):
        with pytest.raises(UserError, match="'llama' is not tested"):
            load(model, device="cpu", method=method)
        assert load(model, device="cpu", method=method, untested=True).method == method
    assert load(model, device="cpu", method="full").config is None


def test_quantized_weights_are_loaded_onto_their_device(monkeypatch):
    """They cannot be moved later; others are moved."""
    loads, moves = [], []
    model = SimpleNamespace(to=moves.append, named_parameters=dict, eval=lambda: "ready")

    def load_weights(name, config, dtype, **options):
        loads.append(options)
        return model

    monkeypatch.setattr(loading, "load_weights", load_weights)
    monkeypatch.setattr(loading, "check_finite", lambda model, name: None)
    for quantized in (None, {"quant_method": "bitsandbytes"}):
        config = SimpleNamespace(quantization_config=quantized)
        assert loading._load_model("m", config, "auto", "cuda:1") == "ready"
    assert loads == [{}, {"device_map": "cuda:1"}] and moves == ["cuda:1"]


def test_gpus_are_counted_from_0(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for given, device in (("auto", "cuda"), ("cuda", "cuda"), ("cuda:1", "cuda:1"), ("cpu", "cpu")):
        assert pick_device(given) == device
    with pytest.raises(UserError, match="'cuda:2' is not available: .* there are 2"):
        pick_device("cuda:2")


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_another_device_must_hold_numbers(device, monkeypatch):
    held = mock.Mock(side_effect=AssertionError("not built in"))
    monkeypatch.setattr(torch, "zeros", held)
    with pytest.raises(UserError, match=f"^device '{device}' is not available, or holds no numb"):
        pick_device(device)
    held.side_effect = None
    assert pick_device(device) == device
    assert held.call_args.kwargs == {"device": device}


def test_a_folder_of_a_gguf_file_is_told_how_to_name_it(tmp_path):
    (tmp_path / "a.gguf").touch()
    with pytest.raises(
        UserError, match=r"got one without\. Give its GGUF file: --model '.*a.gguf'"
    ):
        load_config(str(tmp_path))


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
    for field, value in (("layer_group_sizes", ((10**9, 2), 3)), ("group_size", 10**9)):
        config = cut_to_positions(CCAConfig(**{field: value, "window_size": 9}), 8)
        assert getattr(config, field) == (((8, 2), 3) if field.startswith("layer") else 8)
        assert config.window_size == 8
    for method in ("streaming_llm", "lm_infinite"):
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
        ({"layer_group_sizes": [4, 8]}, "each of the 1 full-attention layers, got 2."),
        ({"head_group_sizes": [4, 4, 8]}, "each of the 2 KV heads, got (4, 4, 8)."),
        ({"layer_group_sizes": [[4, 8, 4]]}, "each of the 2 KV heads, got (4, 8, 4)."),
    ],
    ids=["layers", "heads", "heads of a layer"],
)
def test_settings_that_do_not_fit_the_model_are_written_nowhere(
    variant, sizes, message, tmp_path, capsys
):
    folder = variant(cca=sizes, layer_types=["full_attention", "sliding_attention"])
    new = tmp_path / "new"
    for arguments in (["convert", folder, str(new)], ["info", "--model", folder]):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert not new.exists()
    assert main(["convert", folder, str(new), "--method", "full", "--group-size", "4"]) == 2
    assert "group-size must be left out with method 'full'" in capsys.readouterr().err
    assert main(["convert", folder, str(new), "--method", "full"]) == 0
    assert "cca" not in json.loads((new / "config.json").read_text())
