"""The check when vLLM starts: each change of vLLM's that would give wrong tokens without an error
is one line. Here the changes are made to the vLLM that is installed."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="the plug-in to vLLM needs vllm")

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_planning import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    planning_config,
)

from corecontext.integrations.vllm import start_check
from corecontext.integrations.vllm.cache_managers import WindowManager, register_cache_specs
from corecontext.integrations.vllm.cache_plan import LayerCache
from corecontext.integrations.vllm.cache_specs import CoreSpec, RawSpec, WindowSpec
from corecontext.integrations.vllm.page_layout import PageLayout
from corecontext.integrations.vllm.paged_backend import CoreContextBackend, pages_of
from corecontext.integrations.vllm.start_check import check_layout, check_start, check_table

LAYOUT = PageLayout(group_size=4, window_size=9, sinks=8, page_size=4)
SHAPE = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
MASSES = 4 * 2 * 4  # bytes of a page's
WINDOW = WindowSpec.of(LAYOUT, 0, **SHAPE)
CORES = CoreSpec.of(LAYOUT, **SHAPE)
RAW = RawSpec(block_size=8, **{**SHAPE, "num_kv_heads": 1})


@pytest.fixture(autouse=True)
def registered():
    register_cache_specs()


@pytest.mark.parametrize("specs", [[WINDOW, CORES], [WINDOW, CORES, RAW]])
def test_a_tested_release_passes_in_silence(monkeypatch, specs):
    monkeypatch.setattr(start_check.vllm, "__version__", "0.33.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_start(specs)


def test_a_newer_release_that_passes_is_said_to_be_untested(monkeypatch):
    monkeypatch.setattr(start_check.vllm, "__version__", "0.34.0")
    with pytest.warns(
        UserWarning, match="vLLM 0.34.0 is untested .* 0.29 to 0.33; the check .* pa"
    ):
        check_start([WINDOW, CORES])


def test_pages_of_other_bytes_are_refused():
    """As where vLLM takes the bytes of all tokens of a core page, as since 0.29."""
    message = (
        "^page bytes of WindowSpec, CoreSpec must be equal for core context, got .512, 2048. in"
    )
    with pytest.raises(ValueError, match=message):
        check_start([WINDOW, replace(CORES, tokens_per_state=1)])


@pytest.mark.parametrize(
    "name, request_name, lost",
    [("remove_skipped_blocks", "alone", "0"), ("add_local_computed_blocks", "alike", "0, 1")],
)
def test_first_pages_that_are_dropped_are_refused(monkeypatch, name, request_name, lost):
    """As where a method that keeps or shares them has another name in vLLM."""
    monkeypatch.setattr(WindowManager, name, getattr(SlidingWindowManager, name))
    message = f"^pages of a request {request_name} must be kept by .*, got .{lost}. dropped"
    with pytest.raises(ValueError, match=message):
        check_start([WINDOW, CORES])


def test_a_window_that_is_dropped_too_early_is_refused(monkeypatch):
    monkeypatch.setattr(WindowManager, "get_num_skipped_tokens", lambda self, computed: computed)
    with pytest.raises(ValueError, match="^pages of a request alone must be kept"):
        check_start([WINDOW, CORES])


def test_other_interfaces_are_refused(monkeypatch):
    monkeypatch.setattr(start_check, "KVCacheManager", lambda config: None)
    with pytest.raises(ValueError, match="^interfaces of pages must be those of a tested .* given"):
        check_start([WINDOW, CORES])


def config_of(*layers) -> SimpleNamespace:
    """A config of vLLM with a table of layers."""
    config = planning_config()
    config.compilation_config = SimpleNamespace(
        static_forward_context={layer.layer_name: layer for layer in layers}
    )
    hf = SimpleNamespace(architectures=["LlamaForCausalLM"], cca={"group_size": 4})
    config.model_config = SimpleNamespace(hf_text_config=hf, dtype=torch.float32, max_model_len=256)
    return config


def builder_of(spec, layer: LayerCache):
    """Make the builder of a group with one layer."""
    kind = CoreContextBackend.get_builder_cls()
    return kind(spec, [layer.layer_name], config_of(layer), torch.device("cpu"))


def test_a_group_of_other_pages_than_planned_is_refused():
    """As where vLLM enlarges the pages of windows to those of other layers."""
    layer = LayerCache("layer", WINDOW, AttentionBackend)
    builder_of(WINDOW, layer)
    message = "^tokens and bytes of a page of WindowSpec must be .4, 512. for .*, got .8, 1024. in"
    with pytest.raises(ValueError, match=message):
        builder_of(replace(WINDOW, block_size=8), layer)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
def test_masses_are_behind_the_keys_and_values_of_a_page(layout):
    """In each layout whose pages are in one piece."""
    spec = replace(CORES, page_size_padded=512 + MASSES)
    config = planning_config()
    config.cache_config.get_resolved_kv_cache_layout = lambda: KVCacheLayout[layout]
    groups = get_kv_cache_groups(config, {f"layers.{i}.attn": spec for i in range(2)})
    caches = get_kv_cache_config_from_groups(config, groups, 2 * 5 * spec.page_size_bytes)
    named = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout[layout])
    for cache in named.values():
        LayerCache("layer", spec, AttentionBackend).bind_kv_cache(cache)
        pages = pages_of(cache, torch.zeros(0), spec.page_size_bytes)
        pages.mass.fill_(1)
        pages.k.fill_(2)
        pages.v.fill_(3)
        assert pages.k.shape == (5, 4, 2, 8)
    for cache in named.values():
        pages = pages_of(cache, torch.zeros(0), spec.page_size_bytes)
        assert (pages.mass == 1).all() and (pages.k == 2).all() and (pages.v == 3).all()


def test_pages_of_another_layout_are_refused():
    spec = replace(CORES, page_size_padded=512 + MASSES)
    pages = torch.zeros(5, 136)[:, :128].view(5, 2, 4, 16)
    check_layout(pages, spec)
    with pytest.raises(
        ValueError, match="^shape of a page must be .2, 4, 16. for .* .4, 2, 16. in"
    ):
        check_layout(pages.transpose(1, 2).contiguous(), spec)
    message = (
        "^numbers of a page must be 128 in one piece and pages at least 136 apart for .*, got "
    )
    for other in (
        torch.zeros(2, 5, 4, 16).transpose(0, 1),  # heads outside of pages
        torch.zeros(5, 2, 4, 16),  # no room for masses
        torch.zeros(5, 2, 16, 5)[..., :4].transpose(2, 3),
    ):
        with pytest.raises(ValueError, match=message):
            check_layout(other, spec)


def test_first_pages_that_the_runner_hides_are_refused():
    """As vLLM's V2 runner does since 0.33 below a sliding window, at the first step behind it."""
    assert WINDOW.num_retained_tokens == 0
    table = torch.tensor([[1, 2, 3, 0, 0, 0, 0, 0, 0], [4, 5, 0, 0, 0, 8, 9, 1, 2]])
    starts = torch.tensor([0, 1, 3])
    early = torch.tensor([12, 18])
    assert not check_table(table, starts, early, LAYOUT)
    late = torch.tensor([12, 36])
    assert not check_table(table * 0, starts, late, LAYOUT)  # a step that warms up
    assert check_table(table, starts, late, LAYOUT)
    table[1, :2] = 0
    message = "^first pages of a request must be passed on by vLLM's runner for .*, got .0, 0. in"
    with pytest.raises(ValueError, match=message):
        check_table(table, starts, late, LAYOUT)
    builder = builder_of(WINDOW, LayerCache("layer", WINDOW, AttentionBackend))
    common = SimpleNamespace(
        block_table_tensor=table,
        query_start_loc_cpu=starts,
        seq_lens_cpu_upper_bound=late,
    )
    with pytest.raises(ValueError, match=message):
        builder.build(0, common)
    assert builder_of(CORES, LayerCache("layer", CORES, AttentionBackend)).is_checked
