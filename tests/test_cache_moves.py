"""Raw tokens of a cache that grows are on the device while they are few, and move to host memory
where its settings name it."""

import pytest
import torch
from budgets import fed
from test_prefill import ROTARY, buffers, dense, inputs, lengths
from transformers import DynamicCache

from corecontext import CCAConfig
from corecontext.cache import CompactLayer, host_store, state
from corecontext.cache import layer as layer_module
from corecontext.cache.host_store import HostStore
from corecontext.integrations.hf.cache_layers import GrowingCache, compact_layer
from corecontext.ops.fetch import prompt_rule

DEFAULT = CCAConfig.paper(4, 9, sink_size=4, core_mass=True, fetch_groups=2, store="host").replace(
    fetch_index="bits:2", prefill="auto"
)
FEW = 30
"""Tokens of two rows that stay on the device."""


@pytest.fixture
def two_memories(monkeypatch):
    """Let the device have memory of its own, and keep FEW tokens there while they are few."""
    lengths(monkeypatch, FEW, FEW)
    monkeypatch.setattr(prompt_rule, "WHOLE_TOKENS", {"cpu": 2 * FEW})
    for module in (state, layer_module):
        monkeypatch.setattr(module, "has_own_memory", lambda device: True)


def is_far(layer):
    return isinstance(layer.store, HostStore)


def fed_all(config, sizes, **options):
    """A layer that got appends of these sizes, and what they attended to."""
    layer = CompactLayer(config, ROTARY, begins_on_device=True, **options)
    return layer, fed(layer, inputs(torch.float32), 0, sizes)


@pytest.mark.parametrize(
    "sizes",
    [[12, *[1] * 48], [FEW, *[1] * 30], [20, 9, *[1] * 31], [FEW + 1, *[1] * 29], [20, 20, 20]],
    ids=str,
)
def test_raw_tokens_move_to_host_memory_when_they_are_many(two_memories, sizes):
    """What is attended to is what a cache on the device attends to, before and after."""
    config = DEFAULT.replace(store="device")
    expected, out = fed_all(config, sizes)
    layer = CompactLayer(DEFAULT, ROTARY, begins_on_device=True)
    start = 0
    for size in sizes:
        got = fed(layer, inputs(torch.float32), start, [size])
        start += size
        assert is_far(layer) == (start > FEW) == (layer.host_bytes > 0)
        torch.testing.assert_close(got, out[:, :, start - size : start], rtol=0, atol=1e-6)
    for x, y in zip(buffers(layer), buffers(expected)):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def test_steps_on_few_tokens_are_those_of_full_attention(two_memories):
    _, out = fed_all(DEFAULT, [12, *[1] * 18])
    full = dense(CCAConfig.paper(1, 1), inputs(torch.float32))
    torch.testing.assert_close(out, full[:, :, :30], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"fetch_slots": 3}, {"prefill": "fetch"}, {"cache_dtype": "int8"}],
    ids=lambda x: next(iter(x)),
)
def test_settings_that_ask_for_more_have_host_memory_from_the_first_token(two_memories, changes):
    layer, _ = fed_all(DEFAULT.replace(**changes), [12])
    assert is_far(layer)


def test_a_chunk_of_padding_may_come_first(two_memories):
    layer = CompactLayer(DEFAULT, ROTARY, begins_on_device=True)
    tensors = [x[:, :, :20] for x in inputs(torch.float32)]
    mask = torch.ones(2, 20)
    mask[:, :6] = 0
    for start, end in ((0, 4), (4, 20)):
        parts = [x[:, :, start:end] for x in tensors]
        out = layer.attend(*parts, attention_mask=mask[:, :end])
    plain = CompactLayer(DEFAULT, ROTARY, begins_on_device=True)
    wanted = plain.attend(*(x[:, :, 6:] for x in tensors))
    torch.testing.assert_close(out[:, :, 2:], wanted, rtol=0, atol=1e-6)
    assert not is_far(layer)


def test_a_fixed_cache_has_host_memory_from_the_first_token(two_memories):
    layer, _ = fed_all(DEFAULT, [12], max_length=20)
    assert is_far(layer)


@pytest.mark.parametrize("is_counted", [False, True])
def test_caches_of_a_model_begin_on_the_device_unless_bytes_are_counted(two_memories, is_counted):
    cache = GrowingCache(None, planned_length=12) if is_counted else DynamicCache()
    compact = compact_layer(cache, 0, DEFAULT, ROTARY).compact
    fed(compact, inputs(torch.float32), 0, [12])
    assert is_far(compact) == is_counted


def test_a_planned_length_decides_at_once(two_memories):
    layer = CompactLayer(DEFAULT, ROTARY, begins_on_device=True)
    layer.plan(FEW + 1)
    fed(layer, inputs(torch.float32), 0, [12])
    assert is_far(layer)


@pytest.mark.parametrize("sizes", [[FEW + 10, 1, 1], [20, 20, 1], [FEW, 1, 1]], ids=str)
def test_host_memory_is_taken_once_for_a_prompt_and_its_first_tokens(
    two_memories, monkeypatch, sizes
):
    lengths = []

    def zeros(shape, dtype, device):
        lengths.append(shape[2])
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(host_store, "host_zeros", zeros)
    monkeypatch.setattr(HostStore, "is_near", False)
    layer, _ = fed_all(DEFAULT, sizes)
    taken = [x for x in lengths if x]
    # Keys and values, with room for an answer.
    assert len(taken) == 2 and min(taken) > sum(sizes) and layer.store.length == taken[0]


def test_more_rows_may_be_too_many(two_memories):
    layer, _ = fed_all(DEFAULT, [20])
    layer.repeat(2)
    tensors = [x.repeat_interleave(2, 0) for x in inputs(torch.float32)]
    out = fed(layer, tensors, 20, [1])
    assert is_far(layer)
    _, expected = fed_all(DEFAULT.replace(store="device", fetch_groups=8), [20, 1])
    torch.testing.assert_close(out[::2], expected[:, :, 20:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [FEW, FEW + 1])
def test_a_loaded_cache_is_where_one_of_its_length_is(two_memories, length):
    layer, _ = fed_all(DEFAULT, [length])
    loaded = CompactLayer(DEFAULT, ROTARY, begins_on_device=True)
    loaded.load_state_dict(layer.state_dict())
    assert is_far(loaded) == is_far(layer) == (length > FEW)
    steps = [1] * 5
    out = [fed(x, inputs(torch.float32), length, steps) for x in (layer, loaded)]
    torch.testing.assert_close(*out, rtol=0, atol=0)


def test_a_move_without_memory_changes_nothing(two_memories, monkeypatch):
    """The next try, with memory, goes on as if nothing had been."""
    layer, _ = fed_all(DEFAULT, [FEW])

    def fails(shape, dtype, device):
        raise MemoryError("no memory")

    for step in ([1], [5]):
        with monkeypatch.context() as patch:
            patch.setattr(host_store, "host_zeros", fails)
            with pytest.raises(MemoryError, match="no memory"):
                fed(layer, inputs(torch.float32), FEW, step)
        assert not is_far(layer) and layer.seq_len == FEW
    out = fed(layer, inputs(torch.float32), FEW, [1] * 4)
    _, expected = fed_all(DEFAULT.replace(store="device"), [FEW, *[1] * 4])
    torch.testing.assert_close(out, expected[:, :, FEW:], rtol=0, atol=1e-6)
