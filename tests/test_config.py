"""The configuration: defaults, round trips, and the message of every error."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch

from corecontext import cca_attention, pool_core_tokens
from corecontext.config import (
    CACHE_DTYPES,
    CORE_POSITIONS,
    INDICES,
    PAPER_RULE,
    PREFILLS,
    PRESETS,
    REMOVED,
    STORES,
    CCAConfig,
    Removed,
    field_help,
    setting_help,
)
from corecontext.train.train_config import TrainConfig


def test_defaults_are_those_that_a_pretrained_model_needs():
    config = CCAConfig()
    assert (config.group_size, config.window_size, config.sink_size) == (32, 160, 16)
    assert (config.fetch_groups, config.fetch_index, config.store) == (64, "bits:2", "host")
    assert config.core_mass
    assert CCAConfig.pooling().replace(sink_size=0, core_mass=False) == CCAConfig.paper()


def test_each_preset_states_the_same_fields_and_has_one_line():
    assert CCAConfig.preset("default") == CCAConfig()
    assert CCAConfig.preset("device") == CCAConfig(store="device")
    assert CCAConfig.preset("small", window_size=9) == CCAConfig(
        group_size=64, window_size=9, fetch_groups=32, fetch_index="pairs:2"
    )
    assert CCAConfig.preset("pooling") == CCAConfig.pooling()
    assert CCAConfig.preset("paper", group_size=3) == CCAConfig.paper(3)
    for preset in PRESETS.values():
        assert preset.settings.keys() == PAPER_RULE.keys()
        assert preset.purpose.endswith(".") and "\n" not in preset.purpose
    message = "preset must be one of 'default', .* got 'smal'. Did you mean 'small'?"
    with pytest.raises(ValueError, match=message):
        CCAConfig.preset("smal")


def test_the_papers_rule_has_a_name():
    config = CCAConfig.paper()
    assert (config.sink_size, config.core_mass, config.fetch_groups) == (0, False, 0)
    assert (config.group_size, config.window_size, config.core_position) == (
        16,
        1024,
        "middle",
    )
    assert (config.num_groups, config.backend) == (None, "auto")


def test_dict_round_trip_through_json():
    config = CCAConfig(
        group_size=3,
        window_size=5,
        num_groups=7,
        core_position="token",
        core_mass=False,
        backend="reference",
    )
    assert CCAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("key", PAPER_RULE)
def test_settings_saved_before_a_field_existed_are_the_papers(key):
    """A checkpoint was trained without sinks and fetch if its config.json does not know them."""
    saved = CCAConfig.paper(fetch_share=3).to_dict()
    assert saved.pop(key) == PAPER_RULE[key]
    checkpoint = SimpleNamespace(cca=saved)
    for read in (CCAConfig.from_dict(saved), CCAConfig.saved_in(checkpoint)):
        assert read == CCAConfig.paper(fetch_share=3)
        assert read.replace(num_groups=5) == CCAConfig.paper(fetch_share=3, num_groups=5)
    assert CCAConfig.from_dict({}) == CCAConfig.paper()


def test_settings_that_were_saved_are_kept():
    for config in (CCAConfig(4, 9), CCAConfig.paper(4, 9), CCAConfig.pooling(4, core_mass=False)):
        checkpoint = SimpleNamespace(cca=json.loads(json.dumps(config.to_dict())))
        assert CCAConfig.saved_in(checkpoint) == config


@pytest.mark.parametrize("checkpoint", [None, SimpleNamespace(), SimpleNamespace(cca=None)])
def test_a_checkpoint_without_settings_gets_the_defaults(checkpoint):
    assert CCAConfig.saved_in(checkpoint) == CCAConfig()


def test_every_field_has_a_string_under_it():
    assert [*field_help(CCAConfig)] == [field.name for field in dataclasses.fields(CCAConfig)]


def test_the_help_of_a_setting_is_its_first_sentence_and_names_its_choices():
    assert setting_help("fetch_share") == (
        "Neighbouring queries of a prompt read into a cache that share one choice, aligned to "
        "absolute positions, of twice as many groups."
    )
    choices = {"cache_dtype": CACHE_DTYPES, "fetch_index": tuple(INDICES)}
    choices |= {"store": STORES, "prefill": PREFILLS, "core_position": CORE_POSITIONS}
    for name, allowed in choices.items():
        for choice in allowed:
            assert f'"{choice}"' in setting_help(name), (name, choice)


def test_frozen_and_replaced():
    config = CCAConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.group_size = 2
    assert config.replace(group_size=2) == CCAConfig(group_size=2) and config.group_size == 32


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"group_size": 0}, ValueError, "group_size must be at least 1, got 0."),
        ({"group_size": 2.0}, TypeError, "group_size must be an integer, got 2.0 (float)."),
        ({"group_size": True}, TypeError, "group_size must be an integer, got True (bool)."),
        (
            {"window_size": 0},
            ValueError,
            "window_size must be at least 1 (a query sees itself), got 0.",
        ),
        ({"window_size": "8"}, TypeError, "window_size must be an integer, got '8' (str)."),
        ({"num_groups": 0}, ValueError, "num_groups must be at least 1, got 0."),
        ({"num_groups": 1.5}, TypeError, "num_groups must be an integer, got 1.5 (float)."),
        (
            {"core_position": 3},
            ValueError,
            "core_position must be one of 'middle', 'token', got 3.",
        ),
        (
            {"backend": "pack"},
            ValueError,
            "backend must be one of 'auto', 'reference', 'packed', 'triton', got 'pack'. Did you "
            "mean 'packed'?",
        ),
        (
            {"window_size": 10**20},
            ValueError,
            "window_size must be at most 2147483647, got 100000000000000000000.",
        ),
    ],
)
def test_messages(settings, error, message):
    for make in (
        lambda: CCAConfig(**settings),
        lambda: CCAConfig().replace(**settings),
        lambda: CCAConfig.from_dict(settings),
    ):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            make()


@pytest.mark.parametrize(
    "key, hint",
    [
        ("group_sise", "Did you mean 'group_size'?"),
        (
            "zzz",
            "Known: group_size, window_size, num_groups, core_position, "
            "layer_group_sizes, sink_size, cache_dtype, head_group_sizes, backend, "
            "core_mass, fetch_groups, fetch_index, fetch_share, store, fetch_slots, prefill.",
        ),
    ],
)
def test_unknown_keys_are_errors(key, hint):
    with pytest.raises(ValueError, match=f"^{re.escape(f'unknown CCA setting {key!r}. {hint}')}$"):
        CCAConfig.from_dict({key: 1})
    with pytest.raises(TypeError, match=key):
        CCAConfig(**{key: 1})


@pytest.mark.parametrize("values", [None, 5, ["group_size"]], ids=str)
def test_settings_that_are_no_mapping_are_refused(values):
    with pytest.raises(
        TypeError, match=re.escape(f"CCA settings must map names to values, got {values!r}.")
    ):
        CCAConfig.from_dict(values)


def test_fetch_has_its_defaults_and_bounds():
    config = CCAConfig()
    assert (config.fetch_share, config.fetch_slots, config.prefill) == (16, None, "auto")
    for store, groups, from_host in (("host", 1, True), ("host", 0, False), ("device", 1, False)):
        config = CCAConfig(store=store, fetch_groups=groups)
        assert config.fetches_from_host is from_host
        has_slots = from_host and torch.cuda.is_available()
        assert config.fetches_by_slots is has_slots
        assert config.replace(fetch_slots=1).fetches_by_slots is from_host
    for name, least in (("fetch_groups", 0), ("fetch_share", 1), ("fetch_slots", 0)):
        with pytest.raises(ValueError, match=f"^{name} must be at least {least}, got {least - 1}"):
            CCAConfig(**{name: least - 1})
    for index in ("pairs:\u00b2", "parts:0:2", "parts:1234567890:2", "bits:3", "bits", "mean:2", 5):
        with pytest.raises(ValueError, match="^fetch_index must be 'mean', .* or 'oracle', got "):
            CCAConfig(fetch_index=index)


def test_a_large_cache_has_fewer_slots(monkeypatch):
    config = CCAConfig(fetch_groups=64)
    for has_gpu, slots in ((True, [128, 128, 96]), (False, [0, 0, 0])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert [config.slots_for(length) for length in (1, 81920, 81921)] == slots
        assert config.slots_for(81921, on_gpu=True) == 96
        assert config.slots_for(1, on_gpu=False) == 0
        assert config.replace(fetch_slots=70).slots_for(81921, on_gpu=False) == 70


@pytest.mark.parametrize(
    "name, value, instead",
    [
        ("fetch_index", "core", "Use 'mean' or 'pairs:2'"),
        ("fetch_index", "bounds", "Use 'pairs:2'"),
        ("fetch_index", "segments:16:24", "Use 'pairs:2'"),
        ("fetch_index", "parts:16", "Use 'parts:P:B'"),
    ],
)
def test_a_setting_that_is_gone_is_refused_in_one_line(name, value, instead):
    message = rf"^{name} must not be {value!r}, .* removed in version 0.2\. {instead}\.$"
    for make in (CCAConfig, lambda **settings: CCAConfig.from_dict(settings)):
        with pytest.raises(ValueError, match=message):
            make(**{name: value})


def test_the_table_of_removed_settings_knows_which_fields_are_left():
    left = {row.field for row in REMOVED if not row.is_field_gone}
    gone = {row.field for row in REMOVED if row.is_field_gone}
    assert left <= {*CCAConfig.__dataclass_fields__, "recipe"} and not gone & left
    assert not gone & set(CCAConfig.__dataclass_fields__)


def test_a_saved_field_that_is_gone_is_ignored_unless_its_value_is(monkeypatch):
    values = re.compile(r"yes|\(.+\)")
    row = Removed("lost", values, "a try", "Use 'group_size'.", is_field_gone=True)
    monkeypatch.setattr("corecontext.config.removed.REMOVED", (row,))
    for value in ("no", ()):
        assert CCAConfig.from_dict({"lost": value}) == CCAConfig.from_dict({})
    for value in ("yes", (1,)):
        with pytest.raises(ValueError, match="^lost must not be .*, a try, removed in version"):
            CCAConfig.from_dict({"lost": value})


def test_bounds_are_the_last_that_are_taken():
    for name in ("group_size", "window_size", "num_groups", "sink_size"):
        assert getattr(CCAConfig(**{name: 2**31 - 1}), name) == 2**31 - 1
        with pytest.raises(ValueError, match=f"^{name} must be at most 2147483647, got 2147483648"):
            CCAConfig(**{name: 2**31})
    assert CCAConfig(1, 1, 1) == CCAConfig(num_groups=1).replace(group_size=1, window_size=1)
    with pytest.raises(TypeError, match="core_mass must be True or False, got 1"):
        CCAConfig(core_mass=1)


@pytest.mark.parametrize(
    "field, values, harmless",
    [
        ("pooling", ("mean", "ccax"), ("cca",)),
        ("core_heads", ("query", "kvx"), ("kv",)),
        ("learned", (("bias",), ["bias"]), ((), [])),
        ("raw_heads", (4, 10), (0,)),
        ("push_to", ("name/model",), (None,)),
    ],
)
def test_a_field_that_is_no_more_is_refused_unless_it_was_off(field, values, harmless):
    saved = CCAConfig(4, 9).to_dict()
    x = torch.zeros(1, 1, 8, 4)
    for take in (
        lambda given: CCAConfig(4, 9, **given),
        lambda given: CCAConfig(4, 9).replace(**given),
        lambda given: CCAConfig.from_dict({**saved, **given}),
        lambda given: TrainConfig.from_dict({"group_size": 4, **given}),
        lambda given: TrainConfig(group_size=4, **given),
        lambda given: cca_attention(x, x, x, core_position="token", **given),
        lambda given: pool_core_tokens(x, x, x, core_position="token", **given),
    ):
        for value in values:
            with pytest.raises(ValueError, match=f"^{field} must not be .*, removed in version "):
                take({field: value})
        for value in harmless:
            take({field: value})
    for value in harmless:
        assert CCAConfig.from_dict({**saved, field: value}) == CCAConfig(4, 9)


def test_a_layer_has_its_own_group_size_and_all_else_of_the_model():
    config = CCAConfig(7, 9, layer_group_sizes=(3, (1, 4)), sink_size=2)
    plain = CCAConfig(7, 9, sink_size=2)
    assert plain.of_layer(50) is plain and not plain.varies and config.varies
    assert config.of_layer(0) == plain.replace(group_size=3)
    assert plain.replace(layer_group_sizes=(6, 6)).of_layer(1) == plain.replace(group_size=6)
    assert config.of_layer(1) == plain.replace(head_group_sizes=(1, 4))
    assert config.of_layer(1).varies
    with pytest.raises(ValueError, match="one g for each full-attention layer, got 2"):
        config.of_layer(2)
    assert config.replace(window_size=5).layer_group_sizes == (3, (1, 4))
    assert config.replace(group_size=7).layer_group_sizes == (3, (1, 4))


def test_each_process_has_the_group_sizes_of_its_heads():
    heads = CCAConfig(window_size=9, head_group_sizes=(4, 4, 4, 2, 1, 5))
    assert heads.of_process(0, 1) is heads
    assert heads.of_process(0, 3) == CCAConfig(4, 9)
    assert heads.of_process(1, 3) == CCAConfig(window_size=9, head_group_sizes=(4, 2))
    assert heads.of_process(2, 3) == CCAConfig(window_size=9, head_group_sizes=(1, 5))
    assert heads.of_process(1, 2) == CCAConfig(window_size=9, head_group_sizes=(2, 1, 5))
    one = CCAConfig(4, 9)
    assert one.of_process(1, 2) is one


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"layer_group_sizes": (4, 0)}, "layer_group_sizes must be at least 1, got 0."),
        ({"layer_group_sizes": (4, (2, 0))}, "layer_group_sizes must be at least 1, got 0."),
        ({"layer_group_sizes": ()}, "layer_group_sizes must not be empty, got ()."),
        ({"layer_group_sizes": (4, ())}, "layer_group_sizes must not be empty, got ()."),
        ({"layer_group_sizes": 4}, "layer_group_sizes must be a tuple, got 4."),
        ({"head_group_sizes": (4, 0)}, "head_group_sizes must be at least 1, got 0."),
        ({"head_group_sizes": []}, "head_group_sizes must not be empty, got ()."),
        ({"sink_size": -1}, "sink_size must be at least 0, got -1."),
    ],
    ids=str,
)
def test_messages_about_several_sizes_name_the_field(settings, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        CCAConfig(**settings)


def test_lists_of_sizes_become_tuples_and_may_be_one():
    config = CCAConfig(layer_group_sizes=[1, [1, 4]])
    assert config.layer_group_sizes == (1, (1, 4))
    assert CCAConfig(head_group_sizes=[1, 1]).head_group_sizes == (1, 1)
    assert hash(config) == hash(CCAConfig.from_dict(json.loads(json.dumps(config.to_dict()))))
