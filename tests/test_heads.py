"""KV heads with group sizes of their own: each head gets what it gets alone, in every way to run
it."""

import json
from unittest import mock

import pytest
import torch
from families import tiny_model, tokens

import corecontext
from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import CompactKVCache, CompactLayer, new_layer
from corecontext.inference import Engine
from corecontext.integrations.hf.cache_layers import cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache
from corecontext.ops.head_split import gather_heads, heads_of_each, split_heads

pytestmark = pytest.mark.usefixtures("default_device")
SIZES = (5, 1, 5, 9)
MIXED = CCAConfig.paper(5, 13, layer_group_sizes=(7, (1, 5)))


def inputs(length=90, repeats=2, dtype=torch.float64, batch=2):
    torch.manual_seed(length)
    q = torch.randn(batch, 4 * repeats, length, 16, dtype=dtype)
    k, v = (torch.randn(batch, 4, length, 16, dtype=dtype) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v)]


def rotary():
    return Rotary.from_theta(1e4, 16)


@pytest.mark.parametrize("sizes", [SIZES, (3, 3, 3, 3), (1, 2, 3, 4), (2, 1, 1, 2)])
def test_parts_come_together_in_order(sizes):
    x = torch.arange(2 * 12).view(2, 12)
    every, parts = heads_of_each(sizes)
    dealt = split_heads(x, parts, 4)
    assert torch.equal(gather_heads(dealt, parts), x)
    for g, heads, part in zip(every, parts, dealt, strict=True):
        assert [sizes[head] for head in heads] == [g] * len(heads)
        assert part[0].tolist() == [3 * head + j for head in heads for j in range(3)]
    any_order = [heads[::-1] for heads in parts]  # DuoAttention's heads come as they were found
    assert torch.equal(gather_heads(split_heads(x, any_order, 4), any_order), x)


def test_splitting_heads_adds_a_cat_for_each_tensor_to_the_backward():
    """Not zeros as large as the whole, a copy and a sum for every part."""
    x = torch.randn(1, 8, 6, 4, requires_grad=True)
    _, parts = heads_of_each((5, 1, 5, 9))
    loss = (gather_heads(split_heads(x, parts, 4), parts) ** 2).sum()
    with torch.profiler.profile() as profile:
        loss.backward()
    ran = [event.key for event in profile.key_averages() if event.key.startswith("aten::")]
    assert "aten::cat" in ran and not {
        "aten::slice_backward",
        "aten::zeros",
        "aten::new_zeros",
    } & set(ran)


def test_autocast_gives_heads_one_dtype(default_device):
    """Under it queries and keys are float32, for a rotation in float32, and values in half
    precision."""
    q, k, v = inputs(dtype=torch.float32)
    wanted = cca_attention(q, k, v, group_size=SIZES, window_size=13, rotary=rotary())
    with torch.autocast(default_device.type, torch.bfloat16):
        out = cca_attention(
            q, k, v.to(torch.bfloat16), group_size=SIZES, window_size=13, rotary=rotary()
        )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0.03, rtol=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"core_mass": True},
        {"sink_size": 3},
    ],
)
def test_each_head_attends_as_alone_and_so_do_its_gradients(options, default_device):
    leaves = q, k, v = inputs()
    settings = {"window_size": 13, "rotary": rotary()}
    out, lse = cca_attention(q, k, v, group_size=SIZES, return_lse=True, **settings, **options)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum() + lse.sum(), leaves)
    for head, g in enumerate(SIZES):
        mine, one = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        parts = [x.detach()[:, at].requires_grad_() for x, at in zip(leaves, (mine, one, one))]
        alone, alone_lse = cca_attention(
            *parts, group_size=g, return_lse=True, **settings, **options
        )
        torch.testing.assert_close(out[:, mine], alone)
        torch.testing.assert_close(lse[:, mine], alone_lse)
        wanted = torch.autograd.grad((alone * weights[:, mine]).sum() + alone_lse.sum(), parts)
        for grad, at, want in zip(grads, (mine, one, one), wanted):
            torch.testing.assert_close(grad[:, at], want)


def test_a_head_with_groups_of_one_keeps_every_token():
    q, k, v = (x.detach() for x in inputs())
    out = cca_attention(q, k, v, group_size=SIZES, window_size=13, rotary=rotary())
    full = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out[:, 2:4], full[:, 2:4])
    assert not torch.allclose(out[:, :2], full[:, :2])


@pytest.mark.parametrize("max_length", [None, 120])
@pytest.mark.parametrize("chunks", [(90,), (1,) * 40, (33, 20, 1, 1, 7), (30, 1, 1, 1, 28)])
def test_a_cache_gives_what_one_pass_gives(chunks, max_length):
    q, k, v = (x.detach() for x in inputs())
    config = CCAConfig.paper(5, 13, head_group_sizes=SIZES)
    wanted = cca_attention(q, k, v, group_size=SIZES, window_size=13, rotary=rotary())
    cache = CompactKVCache(1, config, rotary(), max_length=max_length)
    start = 0
    for new in chunks:
        at = slice(start, start + new)
        torch.testing.assert_close(
            cache.attend(0, q[:, :, at], k[:, :, at], v[:, :, at]), wanted[:, :, at]
        )
        start += new
        assert cache.seq_len == start
    alone = [CompactLayer(CCAConfig.paper(g, 13), rotary(), max_length=max_length) for g in SIZES]
    for head, layer in enumerate(alone):
        layer.attend(
            q[:, 2 * head : 2 * head + 2, :start],
            k[:, head : head + 1, :start],
            v[:, head : head + 1, :start],
        )
    assert cache.nbytes == sum(layer.nbytes for layer in alone)


def test_padded_rows_take_back_select_and_save():
    q, k, v = (x.detach() for x in inputs())
    config, mask = (
        CCAConfig.paper(5, 13, head_group_sizes=SIZES),
        torch.ones(2, 60, dtype=torch.long),
    )
    mask[1, :11] = 0
    cache, other = (CompactKVCache(1, config, rotary(), rollback=4).layers[0] for _ in range(2))
    cache.attend(*(x[:, :, :60] for x in (q, k, v)), attention_mask=mask)
    step = [x[:, :, 60:61] for x in (q, k, v)]
    wanted = cache.attend(*step)
    short = [x[1:, :, 11:61] for x in (q, k, v)]
    torch.testing.assert_close(
        wanted[1:],
        cca_attention(*short, group_size=SIZES, window_size=13, rotary=rotary())[:, :, -1:],
    )
    for _ in range(3):
        cache.attend(*(torch.randn_like(x) for x in step))
    cache.crop(4)
    other.load_state_dict(cache.state_dict())
    torch.testing.assert_close(cache.attend(*step), wanted)
    torch.testing.assert_close(other.attend(*step), wanted)
    with pytest.raises(ValueError, match="crop must leave the window whole"):
        cache.crop(30)
    assert cache.seq_len == 61
    # No part was cropped.
    torch.testing.assert_close(cache.attend(*step)[0, 2:4], other.attend(*step)[0, 2:4])
    cache.select(torch.tensor([1, 0]))
    assert cache.pads == [11, 0]
    cache.repeat(2)
    assert cache.pads == [11, 11, 0, 0]
    cache.reset()
    assert cache.is_empty and cache.seq_len == 0


def test_a_crop_that_one_group_size_refuses_changes_no_part():
    """At 9 tokens groups of 3 need nothing before, groups of 5 the tokens from 5 on, which have
    left the ring."""
    q, k, v = (x.detach()[:1, :, :13] for x in inputs())
    cache = CompactKVCache(
        1, CCAConfig.paper(window_size=1, head_group_sizes=(3, 5, 5, 3)), rotary()
    ).layers[0]
    for t in range(12):
        cache.attend(*(x[:, :, t : t + 1] for x in (q, k, v)))
    with pytest.raises(ValueError, match="crop must leave the window whole"):
        cache.crop(3)
    wanted = cca_attention(q, k, v, group_size=(3, 5, 5, 3), window_size=1, rotary=rotary())
    torch.testing.assert_close(cache.attend(*(x[:, :, 12:] for x in (q, k, v))), wanted[:, :, 12:])


def test_a_model_generates_what_it_generates_without_a_cache(tmp_path):
    model, ids = tiny_model("llama"), tokens(2, 50)
    with corecontext.enabled(model, MIXED) as handle:
        assert [one.head_group_sizes for one in handle.layers] == [None, (1, 5)]
        assert handle.layers[0].group_size == 7
        options = {"max_new_tokens": 12, "do_sample": False}
        wanted = model.generate(ids, use_cache=False, **options)
        assert torch.equal(model.generate(ids, **options), wanted)
        assert torch.equal(
            model.generate(ids, cache_implementation="static", disable_compile=True, **options),
            wanted,
        )
        assert model.generate(ids, num_beams=3, **options).shape == wanted.shape
        assert (
            Engine(model, chunk_size=16).generate(ids, max_new_tokens=12) == wanted[:, 50:].tolist()
        )
        with torch.no_grad():
            full = returned_cache(model(ids[:1], use_cache=True))
        one = CCAConfig.paper(5, 13)
        handle.configure(**one.to_dict())
        with torch.no_grad():
            assert cache_bytes(full) != cache_bytes(returned_cache(model(ids[:1], use_cache=True)))
        handle.configure(**MIXED.to_dict())
        model.save_pretrained(tmp_path)
    again = corecontext.from_pretrained(str(tmp_path)).to(model.device)
    with torch.no_grad(), corecontext.enabled(model, MIXED):
        assert corecontext.CCAConfig.from_dict(again.config.cca) == MIXED
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_settings_survive_json_and_are_checked():
    assert CCAConfig.from_dict(json.loads(json.dumps(MIXED.to_dict()))) == MIXED
    assert MIXED.of_layer(1).head_group_sizes == (1, 5)
    assert MIXED.of_layer(0) == CCAConfig.paper(7, 13)
    assert MIXED.replace(group_size=6) == CCAConfig.paper(6, 13)
    of_heads = CCAConfig.paper(4, 13, head_group_sizes=(4, 8))
    assert of_heads.replace(group_size=6) == CCAConfig.paper(6, 13)
    assert of_heads.replace(window_size=9).head_group_sizes == (4, 8)
    for changes, message in (
        ({"layer_group_sizes": (4, ())}, "must not be empty"),
        ({"layer_group_sizes": (4, (0, 2))}, "must be at least 1"),
        ({"layer_group_sizes": (4, (True, 2))}, "must be an integer"),
        ({"head_group_sizes": (4, (1, 2))}, "must be an integer"),
        ({"head_group_sizes": (4, 4)}, "must not be given with layer_group_sizes"),
        ({"num_groups": 4}, "num_groups must not be given"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            MIXED.replace(**changes)


def test_what_cannot_be_had_is_refused():
    q, k, v = inputs(20)
    with pytest.raises(ValueError, match="one for each of the 4 KV heads"):
        cca_attention(q, k, v, group_size=(4, 5), rotary=rotary())
    with pytest.raises(ValueError, match="num_groups must not be given"):
        cca_attention(q, k, v, group_size=SIZES, num_groups=3, rotary=rotary())
    with pytest.raises(ValueError, match="group_size must be at least 1"):
        cca_attention(q, k, v, group_size=(4, 0, 1, 1), rotary=rotary())
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="one for each of the 2 KV heads"):
        corecontext.enable(model, CCAConfig.paper(5, 13, layer_group_sizes=(7, (1, 5, 3))))


@pytest.mark.parametrize("dtype,max_length", [(torch.float32, None), (torch.float16, 100)])
def test_kernels_take_slices_of_heads(dtype, max_length, default_device):
    """On the GPU where there is one, else in Triton's interpreter; as a model gives them, heads
    behind tokens."""
    pytest.importorskip("triton")
    torch.manual_seed(1)
    q, k, v = (x.transpose(1, 2) for x in torch.randn(1, 48, 16, 16).to(dtype).split((8, 4, 4), 2))
    settings = {"group_size": SIZES, "window_size": 13, "rotary": rotary()}
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    found = []
    for backend in ("triton", "packed"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = cca_attention(*leaves, backend=backend, **settings)
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
    for ours, plain in zip(*found):
        torch.testing.assert_close(ours, plain, rtol=0, atol=4 * tolerance)
    cache = CompactKVCache(
        1,
        CCAConfig.paper(5, 13, head_group_sizes=SIZES, backend="triton"),
        rotary(),
        max_length=max_length,
    )
    start = 0
    for new in (30, 1, 1, 1, 9, 1):
        at = slice(start, start + new)
        got = cache.attend(0, q[:, :, at], k[:, :, at], v[:, :, at])
        torch.testing.assert_close(got, found[1][0][:, :, at], rtol=0, atol=tolerance)
        start += new


def test_a_layer_of_several_sizes_is_all_of_its_parts():
    layer = new_layer(CCAConfig.paper(4, 9, head_group_sizes=(4, 2)), rotary())
    layer.parts = [mock.Mock(store=None, parts=(), pad=None) for _ in range(2)]
    first, second = layer.parts
    for name in ("nbytes", "host_bytes", "raw_bytes", "allocated_bytes", "allocated_host_bytes"):
        setattr(first, name, 3)
        setattr(second, name, 4)
        assert getattr(layer, name) == 7
    for name in ("seq_len", "is_empty", "padding_known", "seen", "pads", "max_length"):
        assert getattr(layer, name) is getattr(first, name)
    for name in ("crop", "select", "repeat", "reset", "expect", "plan", "close", "end_prompt"):
        getattr(layer, name)(5)
        for part in layer.parts:
            getattr(part, name).assert_called_once_with(5)
