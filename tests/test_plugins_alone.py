"""The plug-ins to packages that need an environment of their own, against stand-ins of the
interfaces that they use: lm-evaluation-harness, and the settings of vLLM's."""

import sys
import types

import pytest
import torch
from families import tiny_model
from transformers import LlamaConfig

from corecontext import CCAConfig
from corecontext.files import UserError
from corecontext.integrations import lm_eval
from corecontext.integrations.vllm.model_settings import (
    TAKEN,
    UNUSED,
    raw_heads_of,
    settings_of,
    spec_of,
)
from corecontext.integrations.vllm.page_layout import core_entries, fetched_tokens

CONFIG = CCAConfig.pooling(4, 9, sink_size=3, core_mass=False)


# lm-evaluation-harness


@pytest.fixture
def harness_model(monkeypatch):
    """The class that is registered with a stand-in of the harness, and its name there."""
    registered = {}

    class HFLM:
        prefix_token_id = 1

        def __init__(self, pretrained, **options):
            self._config = LlamaConfig()
            self._create_model(pretrained, **options)

        def _create_model(self, pretrained, **options):
            self.made = (pretrained, options)
            self._model = tiny_model()
            self._model.config.cca = CCAConfig.pooling(7, 11).to_dict()

        def _model_call(self, inps, attn_mask=None, labels=None):
            return inps, attn_mask, labels

    def register_model(name):
        return lambda kind: registered.setdefault(name, kind)

    modules = {"registry": {"register_model": register_model}, "huggingface": {"HFLM": HFLM}}
    for path, own in (
        ("lm_eval", None),
        ("lm_eval.api", None),
        ("lm_eval.models", None),
        ("lm_eval.api.registry", "registry"),
        ("lm_eval.models.huggingface", "huggingface"),
    ):
        module = types.ModuleType(path)
        vars(module).update(modules.get(own, {}))
        monkeypatch.setitem(sys.modules, path, module)
    kind = lm_eval.register.__wrapped__()
    assert registered == {"corecontext": kind}
    return kind


def test_a_model_of_the_harness_has_its_settings_by_argument_or_checkpoint(harness_model):
    made = harness_model("m", window_size=9, backend="causal", dtype="float16")
    options = {"attn_implementation": "sdpa", "backend": "causal", "dtype": "float16"}
    assert made.made == ("m", options)
    assert made._model.config.cca == CCAConfig.pooling(7, 9).to_dict()
    inputs = torch.zeros(2, 3)
    assert made._model_call(inputs, "mask", "labels") == (inputs, "mask", "labels")
    with pytest.raises(UserError, match="model 'm' cannot be used: group_size must be at least 1"):
        harness_model("m", group_size=0)
    made = harness_model("m", num_groups=3)
    made._model_call(inputs[:1])
    with pytest.raises(UserError, match="batch_size must be 1 with num_groups, got 2"):
        made._model_call(inputs)
    # Texts are scored without a cache: they are no prompts.
    assert not made._model.config.use_cache
    harness_model.prefix_token_id = None
    with pytest.raises(UserError, match="the tokenizer must have a token that ends or begins"):
        harness_model("m")


# vLLM


def hf_config(**cca) -> LlamaConfig:
    config = LlamaConfig(rope_theta=100.0, head_dim=16, architectures=["LlamaForCausalLM"])
    config.cca = {**CONFIG.to_dict(), **cca}
    return config


REFUSED = [
    ("num_groups", 4),
    ("cache_dtype", "int8"),
    ("prefill", "full"),
]


def test_a_setting_is_taken_or_refused_or_has_no_effect_over_pages():
    refused = tuple(setting for setting, _ in REFUSED)
    assert sorted((*TAKEN, *UNUSED, *refused)) == sorted(CCAConfig.__dataclass_fields__)
    assert UNUSED == ("backend",) and settings_of(hf_config(backend="packed")).backend == "packed"


@pytest.mark.parametrize(
    "setting, value",
    [
        *REFUSED,
        ("group_size", 1),
        ("head_group_sizes", (2, 4)),
        ("head_group_sizes", (1, 1)),
        ("layer_group_sizes", (2, (1, 4))),
        ("layer_group_sizes", (1, 1)),
    ],
)
def test_settings_without_a_kernel_over_pages_are_refused(setting, value):
    with pytest.raises(ValueError, match=f"^cca.{setting} must be .* vLLM, got "):
        settings_of(hf_config(**{setting: value}))


@pytest.mark.parametrize(
    "setting, value",
    [
        ("sink_size", 0),
        ("prefill", "fetch"),
        ("head_group_sizes", (1, 32)),
        ("fetch_index", "mean"),
        ("fetch_index", "parts:3:2"),
        ("window_size", 31),
    ],
)
def test_settings_of_fetch_without_a_kernel_over_pages_are_refused(setting, value):
    device = CCAConfig.preset("device").to_dict()
    assert settings_of(hf_config(**device)) == CCAConfig.preset("device")
    with pytest.raises(ValueError, match=f"^cca.{setting} must .* vLLM"):
        settings_of(hf_config(**{**device, setting: value}))


def test_a_core_page_has_room_for_the_index_of_its_groups():
    """An entry of g = 32 in bfloat16 has 512 bytes of key and value, 4 of mass, and for each token
    32 of codes and 2 of a scale."""
    config = CCAConfig.preset("device")
    assert core_entries(config, 16, 128, 2) == 4  # 16 * 512 // 1604 is 5
    assert core_entries(config, 4, 128, 2) == 1
    assert fetched_tokens(900, 1000, 16, 128) == 900 * 1000 // (63 + 8)
    with pytest.raises(ValueError, match="^block_size must be at least 4 with .* got 3. Change"):
        core_entries(config, 3, 128, 2)


def test_heads_over_pages_have_one_group_size_or_keep_every_token():
    """As `corecontext train raw` writes them: larger groups pay for the heads that keep all."""
    layers = [8, [1, 8], 1]
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    config.cca = {**CONFIG.to_dict(), "layer_group_sizes": layers, "prefill": "fetch"}
    assert settings_of(config) == CONFIG.replace(group_size=8, prefill="fetch")
    assert spec_of(config, 0.5, None).sinks == 8
    assert raw_heads_of(config, 2).heads == (((), ()), ((0,), ()), ((0,), (0,)))
    config.num_hidden_layers = 4
    with pytest.raises(ValueError, match="^layer_group_sizes must have one g for each of the 4"):
        raw_heads_of(config, 1)


def test_a_layer_over_pages_has_the_settings_of_its_model():
    assert settings_of(hf_config()) == CONFIG
    spec = spec_of(hf_config(core_mass=True), 0.5, 30.0)
    assert (spec.group_size, spec.window_size, spec.sinks, spec.core_mass) == (4, 9, 4, True)
    assert (spec.scale, spec.softcap) == (0.5, 30.0)
    frequencies = 100.0 ** -(torch.arange(8) / 8)
    torch.testing.assert_close(spec.rotary.inv_freq, frequencies)
    assert not spec.rotary.interleaved and not spec.rotary.inv_freq.is_inference()
    with torch.inference_mode():
        assert not spec_of(hf_config(), 0.5, None).rotary.inv_freq.is_inference()
    spec = spec_of(hf_config(core_position="token"), 0.5, 0.0)
    assert spec.rotary is None and spec.softcap is None
    config = hf_config()
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    with pytest.raises(NotImplementedError, match="'dynamic' changes its frequencies"):
        spec_of(config, 0.5, None)
    config.cca["core_position"] = "token"
    assert spec_of(config, 0.5, None).rotary is None
    for architectures in (["Gemma3ForCausalLM"], None):
        config = hf_config()
        config.architectures = architectures
        with pytest.raises(ValueError, match="^architectures must hold one of .* by `corecontext"):
            settings_of(config)
    plain = hf_config()
    del plain.cca
    assert settings_of(plain) == CCAConfig.preset("device")
