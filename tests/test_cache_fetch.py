"""Caches with fetch hold all raw tokens: any way of appending equals one pass."""

import functools

import pytest
import torch
from budgets import fed, make_inputs

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import CompactLayer, new_layer
from corecontext.cache.raw_store import Newest
from corecontext.ops.fetch.index import index_of

ROTARY = Rotary.from_theta(100.0, 16)
LENGTH = 60
INDICES = ["mean", "oracle", "bits:2", "pairs:2", "parts:3:4"]
KINDS = {
    "plain": {},
    "mass": {"core_mass": True},
    "sinks": {"sink_size": 6, "core_mass": True},
    "heads": {"head_group_sizes": (4, 3), "core_mass": True},
    "single tokens": {"head_group_sizes": (4, 1)},
    "more than there are": {"fetch_groups": 40},
    "int8": {"cache_dtype": "int8", "sink_size": 6, "core_mass": True, "fetch_index": "pairs:2"},
    "fp8": {"cache_dtype": "fp8"},
}
near = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-11)


def inputs(dtype=torch.float64):
    x = make_inputs(LENGTH, dtype=dtype, batch_size=2, num_heads=4, num_kv_heads=2, head_dim=16)
    return x.q * 3, x.k, x.v


def one_pass(config, tensors, **options):
    names = ("window_size", "sink_size", "core_mass", "fetch_groups")
    settings = {name: getattr(config, name) for name in (*names, "fetch_index")}
    return cca_attention(
        *tensors,
        group_size=config.head_group_sizes or config.group_size,
        rotary=ROTARY,
        **settings,
        **options,
    )


def check_ways(config, fixed):
    """Chunks, steps, crop, saving, beams, a smaller window and a reset, against one pass."""
    tensors = inputs()
    options = {"max_length": LENGTH if fixed else None, "rollback": 3}

    def one_pass_of(config):
        if config.cache_dtype == "auto":
            return one_pass(config, tensors)
        return new_layer(config, ROTARY).attend(*tensors)

    expected = one_pass_of(config)
    layer = new_layer(config, ROTARY, **options)
    near(fed(layer, tensors, 0, [27, 6, *[1] * 15]), expected[:, :, :48])
    layer.crop(3)
    near(fed(layer, tensors, 45, [2, 1]), expected[:, :, 45:48])
    loaded = new_layer(config, ROTARY, **options)
    layer.load_state_dict(layer.state_dict())
    loaded.load_state_dict(layer.state_dict())
    assert loaded.nbytes == layer.nbytes
    rows = torch.tensor([1, 0])
    loaded.select(rows)
    near(fed(loaded, [x[rows] for x in tensors], 48, [7, *[1] * 5]), expected[rows][:, :, 48:])
    layer.shrink_window(5)
    shrunk = one_pass_of(config.replace(window_size=5))
    near(fed(layer, tensors, 48, [1] * 7 + [5]), shrunk[:, :, 48:])
    layer.reset()
    near(fed(layer, tensors, 0, [40, *[1] * 9, LENGTH - 49]), shrunk)


def in_store(store, fetch_groups):
    """Settings of a store; "slots" is host memory with as few slots as there may be."""
    if store == "slots":
        return {"store": "host", "fetch_slots": fetch_groups}
    return {"store": store}


@pytest.mark.parametrize(
    "fixed, store",
    [(False, "device"), (True, "device"), (False, "host"), (True, "host"), (True, "slots")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_way_of_appending_equals_one_pass(kind, fixed, store):
    settings = {"fetch_groups": 3, "fetch_index": "oracle", "prefill": "fetch", **KINDS[kind]}
    settings |= in_store(store, settings["fetch_groups"])
    check_ways(CCAConfig.paper(4, 9, **settings), fixed)


@pytest.mark.parametrize("store", ["device", "slots"])
@pytest.mark.parametrize("kind", ["plain", "sinks", "heads"])
def test_a_scale_and_a_softcap_are_those_of_one_pass(kind, store):
    settings = {"fetch_groups": 3, "fetch_index": "mean", "prefill": "fetch", **KINDS[kind]}
    config = CCAConfig.paper(4, 9, **settings | in_store(store, 3))
    options = {"scale": 0.31, "softcap": 0.7}
    layer = new_layer(config, ROTARY, max_length=LENGTH)
    outs = fed(layer, inputs(), 0, [27, 6, *[1] * 27], **options)
    near(outs, one_pass(config, inputs(), **options))


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_the_tensors_of_a_fixed_store_stay_where_they_are(fixed):
    """torch.compile is told, whose captured steps would copy them otherwise."""
    config = CCAConfig.paper(4, 9, fetch_groups=3, fetch_index="bits:2", prefill="fetch")
    layer = new_layer(config, ROTARY, max_length=LENGTH if fixed else None)
    fed(layer, inputs(), 0, [27])
    for x in (*layer.store.raw, *layer.store.extras):
        assert hasattr(x, "_dynamo_static_input_type") == fixed


def test_a_prompt_reads_only_earlier_tokens_from_host_memory():
    config = CCAConfig.paper(
        4, 9, prefill="fetch", fetch_groups=3, fetch_index="mean", store="host"
    )
    layer = CompactLayer(config, ROTARY)
    q, k, v = inputs()
    fed(layer, (q, k, v), 0, [20])
    stored = [x[:, :, 20:30] for x in (k, v)]
    layer.store.reserve(30)
    layer.store.put(slice(None), 20, stored)
    for x in layer.store.raw:
        x[:, :, 20:] = float("nan")
    keys, values = layer.store.tokens(slice(None), 30, Newest(20, stored))
    assert torch.equal(keys, k[:, :, :30].flatten(0, 1))
    assert torch.equal(values, v[:, :, :30].flatten(0, 1))
    (index,) = layer.store.index(layer.store.num_groups(30))
    expected = k[:, :, :28].unflatten(2, (7, 4)).mean(3).flatten(0, 1)
    torch.testing.assert_close(index.view_as(expected), expected)


@pytest.mark.parametrize("store", ["device", "slots"])
@pytest.mark.parametrize("index", INDICES)
def test_any_index_is_kept_as_it_is_built(index, store):
    settings = {"fetch_index": index, "sink_size": 5, **in_store(store, 2)}
    check_ways(CCAConfig.paper(4, 9, prefill="fetch", fetch_groups=2, **settings), False)


@pytest.mark.parametrize(
    "fixed, store",
    [(False, "device"), (True, "device"), (True, "host"), (False, "slots"), (True, "slots")],
)
def test_padded_rows_equal_one_pass(fixed, store):
    settings = {"fetch_index": "mean", "sink_size": 3, "core_mass": True, **in_store(store, 3)}
    config = CCAConfig.paper(4, 9, prefill="fetch", fetch_groups=3, **settings)
    tensors = inputs()
    mask = torch.arange(LENGTH) >= torch.tensor([[0], [7]])
    expected = one_pass(config, tensors, attention_mask=mask)
    layer = CompactLayer(config, ROTARY, max_length=LENGTH if fixed else None)
    outs = [fed(layer, tensors, 0, [5], attention_mask=mask[:, :5])]
    outs.append(fed(layer, tensors, 5, [19], attention_mask=mask[:, :24]))
    outs.append(fed(layer, tensors, 24, [1] * 20))
    loaded = CompactLayer(config, ROTARY, max_length=LENGTH if fixed else None)
    loaded.load_state_dict(layer.state_dict())
    outs.append(fed(loaded, tensors, 44, [10] + [1] * 6))
    near(torch.cat(outs, 2), expected)


def test_float32_steps_equal_one_pass():
    config = CCAConfig.paper(
        4, 9, prefill="fetch", fetch_groups=3, fetch_index="oracle", core_mass=True
    )
    tensors = inputs(torch.float32)
    layer = CompactLayer(config, ROTARY, max_length=LENGTH)
    out = fed(layer, tensors, 0, [20, *[1] * (LENGTH - 20)])
    torch.testing.assert_close(out, one_pass(config, tensors), rtol=0, atol=2e-5)


@pytest.mark.parametrize("index", INDICES)
def test_bytes_are_those_of_tokens_and_index(index):
    config = CCAConfig.paper(4, 9, prefill="fetch", fetch_groups=3, fetch_index=index, sink_size=3)
    tensors = inputs(torch.float32)
    layer, plain = (CompactLayer(x, ROTARY) for x in (config, config.replace(fetch_groups=0)))
    for x in (layer, plain):
        fed(x, tensors, 0, [30, 1, 1])
    heads = 2 * 2  # rows x KV heads
    # Keys in low bits wait for 4 of the 8 tokens that centre them.
    groups = (32 - 4 - 4 * (":" in index)) // 4
    index_size = index_of(index).num_stored_bytes(4, 16, 4)
    assert layer.store_bytes == heads * (32 * 2 * 16 * 4 + groups * index_size)
    assert layer.nbytes == plain.nbytes + layer.store_bytes
    assert plain.store_bytes == 0 and layer.allocated_bytes > plain.allocated_bytes


def test_a_full_cache_of_fixed_length_allocates_what_is_in_use():
    config = CCAConfig.paper(
        4, 9, prefill="fetch", fetch_groups=3, fetch_index="pairs:2", sink_size=3
    )
    layer = CompactLayer(config, ROTARY, max_length=32)
    fed(layer, inputs(torch.float32), 0, [32])
    centre = layer.store.centre
    assert layer.allocated_bytes >= layer.nbytes + centre.numel() * centre.element_size()


def test_a_copy_of_new_entries_keeps_no_others_in_memory():
    config = CCAConfig.paper(4, 9, prefill="fetch", fetch_groups=3, fetch_index="bits:2")
    layer = CompactLayer(config, ROTARY)
    fed(layer, inputs(), 0, [40])
    raw, cores = layer.copy_since(20)
    for x in (*raw, *cores):
        assert x.numel() and x.untyped_storage().nbytes() == x.nbytes


@pytest.mark.parametrize("sizes", [[12, 48], [12, 1, 20, 27], [*[1] * 12, 40, 8]], ids=str)
def test_an_append_may_end_with_the_last_key_that_centres_the_index(sizes):
    """After 4 first tokens and 8 that centre it."""
    config = CCAConfig.paper(
        4, 9, prefill="fetch", fetch_groups=2, fetch_index="bits:1", sink_size=4
    )
    tensors = inputs()
    near(fed(CompactLayer(config, ROTARY), tensors, 0, sizes), one_pass(config, tensors))


def test_a_second_prompt_may_have_groups_of_another_size():
    config = CCAConfig.paper(
        window_size=9, num_groups=5, prefill="fetch", fetch_groups=2, fetch_index="mean"
    )
    used, fresh = (CompactLayer(config, ROTARY, max_length=LENGTH) for _ in range(2))
    tensors = inputs()
    fed(used, tensors, 0, [30, 1, 1])
    used.reset()
    found, expected = (fed(layer, tensors, 0, [50, *[1] * 10]) for layer in (used, fresh))
    near(found, expected)


@pytest.mark.parametrize("store", ["device", "host", "slots"])
def test_a_loaded_cache_reads_nothing_of_before(store):
    """Numbers that no query sees must still be numbers: 0 x NaN is none."""
    config = CCAConfig.paper(
        4, 2, prefill="fetch", fetch_groups=2, fetch_index="mean", **in_store(store, 2)
    )
    tensors = inputs()
    short = CompactLayer(config, ROTARY, max_length=LENGTH)
    fed(short, tensors, 0, [1])
    layer = CompactLayer(config, ROTARY, max_length=LENGTH)
    fed(layer, [x * torch.nan for x in tensors], 0, [40])
    layer.load_state_dict(short.state_dict())
    near(fed(layer, tensors, 1, [1] * 12), one_pass(config, tensors)[:, :, 1:13])


def test_the_first_append_is_differentiable():
    config = CCAConfig.paper(4, 9, prefill="fetch", fetch_groups=3, fetch_index="mean")
    q, k, v = (x.requires_grad_() for x in inputs())
    layer = CompactLayer(config, ROTARY)
    out = layer.attend(q, k, v)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(one_pass(config, (q, k, v)).square().sum(), (q, k, v))
    for x, y in zip(grads, wanted):
        near(x, y)
    assert layer.seq_len == LENGTH


def test_refusals():
    with pytest.raises(NotImplementedError, match="store='none', got 2. Use store='device'"):
        CompactLayer(CCAConfig.paper(4, 9, prefill="fetch", fetch_groups=2, store="none"), ROTARY)
    with pytest.raises(ValueError, match="store must be one of 'none', 'device', 'host', got 'ho'"):
        CCAConfig.pooling(store="ho")
    with pytest.raises(ValueError, match="fetch_slots must be 0 or at least fetch_groups 8, got 7"):
        CCAConfig(store="host", prefill="fetch", fetch_groups=8, fetch_slots=7)
    layer = CompactLayer(CCAConfig.paper(4, 9, prefill="fetch", fetch_groups=2), ROTARY)
    fed(layer, inputs(), 0, [20])
    other = CompactLayer(CCAConfig.paper(4, 9, prefill="fetch", fetch_groups=2), ROTARY)
    with pytest.raises(
        NotImplementedError, match="fetch_groups must be 0 where prompts are shared"
    ):
        other.fill(layer.buffers, 20, group_size=4)


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("window_size", [3, 4, 5])
def test_a_window_shrunk_below_a_group_centres_no_keys(window_size, store):
    tensors = inputs()
    config = CCAConfig(4, 9, prefill="fetch", fetch_groups=3, fetch_index="pairs:2", store=store)
    layer = new_layer(config, ROTARY)
    fed(layer, tensors, 0, [48])
    layer.shrink_window(window_size)
    shrunk = new_layer(config.replace(window_size=window_size), ROTARY).attend(*tensors)
    near(fed(layer, tensors, 48, [1] * 7 + [5]), shrunk[:, :, 48:])
