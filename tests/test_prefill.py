"""Prompts read by full attention or shared choices end in the cache of the settings, and decoding
goes on from it."""

import functools
from unittest import mock

import pytest
import torch
from budgets import fed, make_inputs

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import CompactLayer, new_layer
from corecontext.cache.host_store import HostStore
from corecontext.cache.late import catch_up
from corecontext.ops.fetch import prompt_rule

ROTARY = Rotary.from_theta(100.0, 16)
LENGTH = 60
PROMPT = 41
KINDS = {
    "plain": {},
    "mass": {"sink_size": 6, "core_mass": True},
    "heads": {"head_group_sizes": (4, 3), "sink_size": 4},
    "fetch": {"fetch_groups": 2, "fetch_index": "mean", "sink_size": 4},
}
near = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-11)


def inputs(dtype=torch.float64):
    x = make_inputs(LENGTH, dtype=dtype, batch_size=2, num_heads=4, num_kv_heads=2, head_dim=16)
    return x.q * 3, x.k, x.v


def dense(config, tensors, **options):
    """The attention of the settings in one pass."""
    names = ("window_size", "sink_size", "core_mass", "fetch_groups")
    return cca_attention(
        *tensors,
        group_size=config.head_group_sizes or config.group_size,
        rotary=ROTARY,
        fetch_index=config.fetch_index,
        **{name: getattr(config, name) for name in names},
        **options,
    )


def expected(config, tensors, prompt=PROMPT, **options):
    """The definition: the prompt by full attention, later tokens by the settings."""
    read = dense(CCAConfig.paper(1, 1), tensors, **options)
    return torch.cat((read[:, :, :prompt], dense(config, tensors, **options)[:, :, prompt:]), 2)


def lengths(monkeypatch, prompt, step):
    """Let full attention take less time up to these lengths."""
    monkeypatch.setattr(prompt_rule, "PROMPT_LENGTHS", {"cpu": prompt})
    monkeypatch.setattr(prompt_rule, "STEP_LENGTHS", {"cpu": step})


@pytest.fixture
def steps_choose(monkeypatch):
    lengths(monkeypatch, 0, 0)


def buffers(layer):
    parts = getattr(layer, "parts", [layer])
    return [x[:, :, : part.used] for part in parts for x in part.buffers]


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_what_follows_are_those_of_the_definition(monkeypatch, kind, fixed):
    config = CCAConfig.paper(4, 9, **KINDS[kind], prefill="full")
    tensors = inputs()
    lengths(monkeypatch, 0, 0)
    wanted = expected(config, tensors)
    options = {"max_length": LENGTH if fixed else None}
    whole, chunks, plain = (
        new_layer(x, ROTARY, **options) for x in (config, config, config.replace(prefill="auto"))
    )
    steps = [1] * (LENGTH - PROMPT)
    near(fed(whole, tensors, 0, [PROMPT, *steps]), wanted)
    # A last chunk of one token, which has to be announced, and a state saved in between.
    near(fed(chunks, tensors, 0, [27, 6]), wanted[:, :, :33])
    loaded = new_layer(config, ROTARY, **options)
    loaded.load_state_dict(chunks.state_dict())
    near(fed(loaded, tensors, 33, [PROMPT - 34]), wanted[:, :, 33 : PROMPT - 1])
    loaded.expect(PROMPT - 1)
    near(fed(loaded, tensors, PROMPT - 1, [1, *steps]), wanted[:, :, PROMPT - 1 :])
    # The cache is that of the settings.
    fed(plain, tensors, 0, [PROMPT, *steps])
    for x, y, z in zip(buffers(whole), buffers(loaded), buffers(plain)):
        near(x, z)
        near(y, z)
    assert whole.nbytes == loaded.nbytes == plain.nbytes
    # A reset cache reads the next prompt alike.
    whole.reset()
    near(fed(whole, tensors, 0, [PROMPT, *steps]), wanted)


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("fetch_groups", [0, 3])
@pytest.mark.parametrize("pads", [(0, 7), (7, 7)])
def test_padded_rows_are_those_of_the_definition(steps_choose, fixed, fetch_groups, pads):
    settings = {"sink_size": 3, "core_mass": True, "fetch_groups": fetch_groups}
    config = CCAConfig.paper(4, 9, prefill="full", **settings)
    tensors = inputs()
    mask = torch.arange(LENGTH) >= torch.tensor(pads)[:, None]
    layer = new_layer(config, ROTARY, max_length=LENGTH if fixed else None)
    outs = [fed(layer, tensors, 0, [5], attention_mask=mask[:, :5])]
    outs.append(fed(layer, tensors, 5, [PROMPT - 5], attention_mask=mask[:, :PROMPT]))
    outs.append(fed(layer, tensors, PROMPT, [1] * (LENGTH - PROMPT)))
    near(torch.cat(outs, 2), expected(config, tensors, attention_mask=mask))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_scale_and_a_softcap_are_those_of_the_prompt(softcap):
    config = CCAConfig.paper(4, 9, prefill="full")
    tensors = inputs()
    layer = new_layer(config, ROTARY)
    options = {"scale": 0.3, "softcap": softcap}
    out = fed(layer, tensors, 0, [20, PROMPT - 20, *[1] * (LENGTH - PROMPT)], **options)
    near(out, expected(config, tensors, **options))


def test_raw_tokens_leave_with_the_prompt():
    config = CCAConfig.paper(4, 9, prefill="full")
    tensors = inputs(torch.float32)
    layer = new_layer(config, ROTARY)
    fed(layer, tensors, 0, [PROMPT])
    entries = layer.used
    raw = 2 * 2 * 2 * 16 * 4  # rows, KV heads, key and value, channels, bytes
    assert layer.nbytes == (entries + PROMPT) * raw
    fed(layer, tensors, PROMPT, [1])
    assert layer.nbytes == entries * raw
    assert layer.store_bytes == 0
    # A later prompt is read by the settings, and so is one after the end was called.
    near32 = functools.partial(torch.testing.assert_close, rtol=0, atol=2e-5)
    rest = LENGTH - PROMPT - 1
    wanted = dense(config, tensors)
    near32(fed(layer, tensors, PROMPT + 1, [rest]), wanted[:, :, PROMPT + 1 :])
    # Taken back whole, it is a first prompt again.
    other = new_layer(config, ROTARY, rollback=LENGTH)
    fed(other, tensors, 0, [PROMPT, 1])
    other.crop(PROMPT + 1)
    near32(fed(other, tensors, 0, [30, 11]), expected(config, tensors)[:, :, :PROMPT])


@pytest.mark.usefixtures("steps_choose")
def test_a_store_of_fetch_makes_later_prompts_exact():
    config = CCAConfig.paper(4, 9, fetch_groups=2, fetch_index="mean", prefill="full")
    tensors = inputs()
    full = dense(CCAConfig.paper(1, 1), tensors)
    wanted = dense(config, tensors)
    layer = new_layer(config, ROTARY)
    fed(layer, tensors, 0, [20, 1, 1])
    near(fed(layer, tensors, 22, [20]), full[:, :, 22:42])
    near(fed(layer, tensors, 42, [5], is_prompt=False), wanted[:, :, 42:47])
    near(fed(layer, tensors, 47, [1]), wanted[:, :, 47:48])


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_prompt_is_read_in_full_then_by_shared_choices(monkeypatch, store):
    lengths(monkeypatch, 22, 0)
    sizes = {"fetch_groups": 2, "fetch_index": "mean", "sink_size": 4}
    config = CCAConfig.paper(4, 9, **sizes, fetch_share=4, store=store)
    tensors = inputs()
    full = dense(CCAConfig.paper(1, 1), tensors)
    # The choice sees the prompt only, whatever comes behind it, and has twice as many groups.
    twice = config.replace(fetch_groups=4)
    shared = dense(twice, [x[:, :, :PROMPT] for x in tensors], fetch_share=4)
    by_itself = dense(config, tensors)
    wanted = torch.cat((full[:, :, :22], shared[:, :, 22:], by_itself[:, :, PROMPT:]), 2)
    assert (shared - by_itself[:, :, :PROMPT])[:, :, 22:].abs().max() > 0.01
    states = []
    for chunks in ([PROMPT], [8, 4, 12, 16, 1], [24, 16, 1], [20, 20, 1]):
        layer = new_layer(config, ROTARY)
        outs = []
        for chunk in chunks:
            layer.expect(start := sum(x.shape[2] for x in outs))
            outs.append(fed(layer, tensors, start, [chunk]))
        outs.append(fed(layer, tensors, PROMPT, [1] * (LENGTH - PROMPT)))
        near(torch.cat(outs, 2), wanted)
        states.append(buffers(layer))
    for state in states[1:]:
        for x, y in zip(states[0], state):
            near(x, y)
    # A text that is scored, in one call or several, chooses token by token.
    layer = new_layer(config, ROTARY)
    near(fed(layer, tensors, 0, [24, 1, LENGTH - 25], is_prompt=False), by_itself)


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize(
    "sizes_of_first", [[2, *[1] * 28], [25, *[1] * 5]], ids=["steps", "prompt"]
)
def test_steps_read_all_raw_tokens_while_that_takes_less_time(
    monkeypatch, sizes_of_first, fixed, store
):
    sizes = {"fetch_groups": 2, "fetch_index": "bits:2", "sink_size": 4, "core_mass": True}
    config = CCAConfig.paper(4, 9, **sizes, store=store, prefill="full")
    tensors = inputs()
    full = dense(CCAConfig.paper(1, 1), tensors)
    until = LENGTH if fixed else 50
    wanted = torch.cat((full[:, :, :until], dense(config, tensors)[:, :, until:]), 2)
    lengths(monkeypatch, 0, until)
    layer, other = (new_layer(config, ROTARY, max_length=LENGTH if fixed else None) for _ in "ab")
    near(fed(layer, tensors, 0, sizes_of_first), wanted[:, :, :30])
    # What reads the ring finds all tokens in it.
    layer.crop(0)
    layer.load_state_dict(layer.state_dict())
    rows = torch.tensor([1, 0])
    layer.select(rows)
    swapped = [x[rows] for x in tensors]
    near(fed(layer, swapped, 30, [1, 3, *[1] * 26]), wanted[rows][:, :, 30:])
    lengths(monkeypatch, 0, 0)
    fed(other, swapped, 0, [LENGTH - 5, *[1] * 5])
    kept = ([*buffers(x), *x.store.used(LENGTH)] for x in (layer, other))
    for x, y in zip(*kept, strict=True):
        near(x, y)
    # Padded rows are those that stand alone.
    lengths(monkeypatch, 0, until)
    mask = torch.arange(LENGTH) >= torch.tensor([[0], [7]])
    layer = new_layer(config, ROTARY, max_length=LENGTH if fixed else None)
    outs = [fed(layer, tensors, 0, [9], attention_mask=mask[:, :9])]
    outs.append(fed(layer, tensors, 9, [1] * 30))
    alone = dense(CCAConfig.paper(1, 1), tensors, attention_mask=mask)
    near(torch.cat(outs, 2), alone[:, :, :39])
    # So are their core tokens, once steps choose.
    lengths(monkeypatch, 0, 0)
    alone = dense(config, tensors, attention_mask=mask)
    near(fed(layer, tensors, 39, [1] * 11), alone[:, :, 39:50])


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_core_tokens_of_several_layers_are_made_together(monkeypatch, fixed, store):
    sizes = {"fetch_groups": 2, "fetch_index": "bits:2", "sink_size": 4, "core_mass": True}
    config = CCAConfig.paper(4, 9, **sizes, store=store)
    tensors = inputs()
    lengths(monkeypatch, PROMPT, 0)
    monkeypatch.setattr(HostStore, "is_near", False)
    options = {"max_length": LENGTH if fixed else None}
    layers = [new_layer(config, ROTARY, **options) for _ in range(3)]
    for i, layer in enumerate(layers):
        # Layers have keys and queries of their own, and one of them is shorter.
        fed(layer, [x.roll(i, 3) for x in tensors], 0, [PROMPT - 10 * (i == 1)])
        assert layer.is_due
    with mock.patch.object(
        CompactLayer, "pool", autospec=True, side_effect=CompactLayer.pool
    ) as pool:
        catch_up(layers)
    assert pool.call_count == 2
    for i, layer in enumerate(layers):
        alone = new_layer(config.replace(prefill="fetch"), ROTARY, **options)
        length = PROMPT - 10 * (i == 1)
        own = [x.roll(i, 3) for x in tensors]
        fed(alone, own, 0, [length])
        kept = ([*buffers(x), *x.store.used(length)] for x in (layer, alone))
        for x, y in zip(*kept, strict=True):
            near(x, y)
        near(fed(layer, own, length, [1] * 9), fed(alone, own, length, [1] * 9))


def test_a_choice_of_all_groups_is_what_a_step_reads(monkeypatch):
    config = CCAConfig.paper(4, 9, fetch_groups=LENGTH, fetch_index="mean")
    tensors = inputs()
    outs = []
    for step in (0, LENGTH):
        lengths(monkeypatch, 0, step)
        outs.append(fed(new_layer(config, ROTARY), tensors, 0, [PROMPT, *[1] * 9]))
    near(*outs)


def test_a_prompt_is_read_before_its_tokens_are_rounded():
    config = CCAConfig.paper(4, 9, cache_dtype="int8", prefill="full")
    tensors = inputs(torch.float32)
    near32 = functools.partial(torch.testing.assert_close, rtol=0, atol=2e-5)
    layer, plain = (new_layer(x, ROTARY) for x in (config, config.replace(prefill="auto")))
    out = fed(layer, tensors, 0, [22, PROMPT - 22])
    near32(out, dense(CCAConfig.paper(1, 1), tensors)[:, :, :PROMPT])
    fed(plain, tensors, 0, [PROMPT])
    for x, y in zip(buffers(layer), buffers(plain)):
        assert torch.equal(x, y)
    near32(fed(layer, tensors, PROMPT, [1] * 9), fed(plain, tensors, PROMPT, [1] * 9))


@pytest.mark.parametrize("settings", [{}, {"fetch_groups": 2, "fetch_index": "mean"}])
def test_the_first_append_is_differentiable(settings):
    config = CCAConfig.paper(4, 9, sink_size=3, **settings, prefill="full")
    tensors = [x.requires_grad_() for x in inputs()]
    out = new_layer(config, ROTARY).attend(*tensors)
    wanted = dense(CCAConfig.paper(1, 1), tensors)
    near(out, wanted)
    for x, y in zip(*(torch.autograd.grad(x.square().sum(), tensors) for x in (out, wanted))):
        near(x, y)
