"""The pieces of the rivals one by one: masks, caches, patterns, how they are attached, and their
table."""

from types import SimpleNamespace

import pytest
import torch
from families import tiny_model, tokens
from transformers import DynamicCache

from corecontext import CCAConfig, Rotary, baselines
from corecontext.baselines import (
    LMInfinite,
    StreamingLLM,
    WindowOnly,
    hook,
)
from corecontext.baselines import blocks as blocks_module
from corecontext.baselines.blocks import Scoring, masked_attention
from corecontext.baselines.method import Call, Layer, Method, left_padding
from corecontext.baselines.sink_cache import SinkCacheLayer
from corecontext.integrations.hf.cache_name import returned_cache, with_cache

LAYER = Layer(0, 0, 4, 2)


def qkv(length, heads=4, kv_heads=2, batch=2, new=None):
    """Random float64 queries of the last tokens, keys and values."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(batch, h, n, 8, dtype=torch.float64, generator=generator)
        for h, n in ((heads, new or length), (kv_heads, length), (kv_heads, length))
    ]


def masked(q, k, v, mask, scoring):
    """Dense attention under a mask that broadcasts to [B, H, T, S]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def call(q, k, v, layer=LAYER, **options):
    """A call of one layer."""
    return Call(q, k, v, Scoring(0.3), layer, **options)


class GrowingCache(Method):
    """A method that leaves transformers' cache as it is."""

    name = "growing"


# Masks


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows, heads", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_mask_may_differ_by_row_and_by_head(rows, heads, softcap):
    q, k, v = qkv(9)
    mask = torch.rand(rows, heads, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    mask |= torch.eye(9, dtype=torch.bool)
    scoring = Scoring(0.3, softcap)
    out = masked_attention(q, k, v, mask, scoring)
    near = {"rtol": 1e-5, "atol": 1e-5} if softcap else {}  # capped scores are float32
    torch.testing.assert_close(out, masked(q, k, v, mask, scoring), **near)


def test_padding_is_counted_on_the_left_alone():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 1]])
    assert left_padding(mask).tolist() == [2, 0, 0, 1, 0]


@pytest.mark.parametrize(
    "config, length",
    [
        (WindowOnly(0, 9), 9),
        (StreamingLLM(3, 9), 12),
        (LMInfinite(3, 9), 10),  # of several sinks beyond the window all but one are moved
        (LMInfinite(0, 9), 9),
    ],
    ids=lambda x: str(x),
)
def test_a_method_is_full_attention_up_to_its_full_length(config, length):
    assert config.full_length == length
    if config.needs_rotary:
        return  # in models: test_sinks_and_window_equal_the_dense_definition
    for n in (length, length + 1):
        q, k, v = qkv(n)
        causal = torch.ones(n, n).tril().bool()
        out = config.attend(call(q, k, v))
        assert torch.allclose(out, masked(q, k, v, causal, Scoring(0.3))) == (n == length)


# Sinks and windows


@pytest.mark.parametrize("far_position", ["none", "cache", "ceiling"])
@pytest.mark.parametrize("rows", [5, 8, 20])
def test_blocks_of_padded_rows_equal_one_block(far_position, rows, monkeypatch):
    q, k, v = qkv(20)
    mask = torch.ones(2, 20)
    mask[1, :7] = 0
    whole, blocks = (SinkCacheLayer(2, 4) for _ in range(2))
    rotary = Rotary.from_theta(1e4, 8)
    wanted = whole.attend(call(q, k, v, attention_mask=mask, rotary=rotary), far_position)
    alone = [x[1:, :, 7:] for x in (q, k, v)]
    single = SinkCacheLayer(2, 4).attend(call(*alone, rotary=rotary), far_position)
    torch.testing.assert_close(wanted[1:, :, 7:], single)
    assert wanted.isfinite().all()  # of padded queries, too: later layers have them as values
    monkeypatch.setattr(blocks_module, "ROWS", rows)
    got = blocks.attend(call(q, k, v, attention_mask=mask, rotary=rotary), far_position)
    torch.testing.assert_close(got, wanted)


def test_a_cache_that_is_reset_begins_anew():
    q, k, v = qkv(30)
    mask = torch.ones(2, 30)
    mask[1, :5] = 0
    for config in (StreamingLLM(3, 6), WindowOnly(0, 6)):
        wanted = config.make_cache(LAYER).attend(call(q, k, v), "none")
        cache = config.make_cache(LAYER)
        first = [x[:1] for x in (q, k, v)]  # of another number of rows
        cache.attend(call(*first, attention_mask=mask[1:]), "none")
        cache.reset()
        assert cache.get_seq_length() == 0
        parts = [x[:, :, :11] for x in (q, k, v)], [x[:, :, 11:] for x in (q, k, v)]
        out = torch.cat([cache.attend(call(*part), "none") for part in parts], 2)
        torch.testing.assert_close(out, wanted)
        cache.reset()
        cache.close()
        with pytest.raises(ValueError, match="packed in one row cannot be continued"):
            cache.attend(call(q, k, v), "none")
        cache.reset()
        cache.attend(call(q, k, v), "none")
        with pytest.raises(ValueError, match="must not follow a filled cache, got 30 tokens"):
            cache.close()
        cache.crop(0)
        with pytest.raises(NotImplementedError, match="cannot be taken back"):
            cache.crop(1)
        with pytest.raises(NotImplementedError, match="cannot hold sinks and window"):
            cache.offload()


def test_rows_of_a_cache_are_selected_and_repeated_with_their_padding():
    config = StreamingLLM(3, 6)
    q, k, v = qkv(30)
    mask = torch.ones(2, 30)
    mask[1, :5] = 0
    first, later = ([x[:, :, at] for x in (q, k, v)] for at in (slice(20), slice(20, 30)))
    whole = config.make_cache(LAYER)
    whole.attend(call(*first, attention_mask=mask[:, :20]), "none")
    wanted = whole.attend(call(*later), "none")
    for change, index in (
        (lambda cache: cache.batch_select_indices(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ):
        cache = config.make_cache(LAYER)
        change(cache)  # of an empty cache: nothing
        cache.attend(call(*first, attention_mask=mask[:, :20]), "none")
        change(cache)
        out = cache.attend(call(*(x[index] for x in later)), "none")
        torch.testing.assert_close(out, wanted[index])


# How they are attached


def test_a_model_has_one_attention_at_a_time(monkeypatch):
    model = tiny_model()
    for first in (CCAConfig.paper(4, 8), StreamingLLM(2, 6)):
        with baselines.enabled(model, first):
            for second in (CCAConfig.paper(4, 8), WindowOnly(0, 6)):
                with pytest.raises(
                    ValueError, match="must not be enabled twice, got one whose att"
                ):
                    baselines.enable(model, second)
        assert baselines.rival_of(model) is None
    asked = []
    monkeypatch.setattr(
        hook.cca_plugin, "admit", lambda *args, **options: asked.append((args, options))
    )
    monkeypatch.setattr(
        hook.cca_plugin, "enable", lambda *args, **options: asked.append((args, options))
    )
    config = CCAConfig.paper(4, 8)
    baselines.enable(model, config, untested=True, warn=True)
    baselines.enable(model, WindowOnly(0, 6), untested=True).disable()
    baselines.enable(model, StreamingLLM(1, 6)).disable()
    assert asked == [
        ((model, config), {"untested": True, "warn": True}),
        ((model, True), {"needs_rotary": False}),
        ((model, False), {"needs_rotary": True}),
    ]


def test_methods_that_rotate_need_every_layer_to():
    model = tiny_model("smollm3")
    for config in (StreamingLLM(1, 6), LMInfinite(1, 6)):
        message = f"{config.name} needs the rotation of every layer"
        with pytest.raises(NotImplementedError, match=message):
            baselines.enable(model, config)
    with baselines.enabled(model, WindowOnly(0, 6)) as handle:
        assert handle.title == "window" and baselines.rival_of(model) is handle


def test_a_cache_keeps_its_sizes_and_its_kind():
    model, ids = tiny_model(), tokens(1, 12)
    with torch.no_grad():
        with baselines.enabled(model, WindowOnly(0, 6)):
            cache = returned_cache(model(ids, use_cache=True))
        with (
            baselines.enabled(model, WindowOnly(0, 7)),
            pytest.raises(ValueError, match=r"keep its sizes \(0, 6\), got \(0, 7\). Start a new"),
        ):
            model(ids[:, :1], **with_cache(cache))
        with baselines.enabled(model, LMInfinite(0, 6)):
            model(ids[:, :1], **with_cache(cache))  # of the same sizes
        with (
            baselines.enabled(model, GrowingCache()),
            pytest.raises(NotImplementedError, match="SinkCacheLayer cannot be used here"),
        ):
            model(ids[:, :1], **with_cache(cache))
        offloaded = DynamicCache(config=model.config)
        # The argument would make a stream, for which PyTorch for GPUs needs a GPU.
        offloaded.offloading = True
        with (
            baselines.enabled(model, WindowOnly(0, 6)),
            pytest.raises(NotImplementedError, match="cannot be used here. Use DynamicCache"),
        ):
            model(ids, **with_cache(offloaded))


def test_documents_are_told_by_positions_or_by_their_edges():
    model = tiny_model()
    q, k, v = (x.float() for x in qkv(12, batch=1))
    parts = ((0, 5), (5, 6), (6, 12))
    positions = torch.cat([torch.arange(b - a) for a, b in parts])[None]
    edges = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    module = SimpleNamespace(training=False)
    with baselines.enabled(model, WindowOnly(0, 3)) as handle:
        layer = hook.RivalHook(handle, None, Layer(0, 0, 4, 2))

        def attend(mask=None, first=0, **options):
            query = q[:, :, first:]
            return layer.attention(None, module, query, k, v, mask, **options)[0].transpose(1, 2)

        t = torch.arange(12)
        near = (t <= t[:, None]) & (t[:, None] - t < 3)
        document = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(parts)])
        apart = near & (document[:, None] == document)
        scoring = Scoring(8**-0.5)  # where none is given
        for out, mask in (
            (attend(position_ids=positions), apart),
            (attend(cu_seq_lens_q=edges), apart),
            (attend(position_ids=torch.arange(12)[None]), near),
            (attend(position_ids=torch.arange(5, 17)[None]), near),
            (attend(torch.ones(1, 12), position_ids=positions), near),  # a mask counts first
        ):
            torch.testing.assert_close(out, masked(q, k, v, mask, scoring))
        out = attend(scaling=0.5, softcap=2.0)
        wanted = masked(q, k, v, near, Scoring(0.5, 2.0))
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        with pytest.raises((NotImplementedError, ValueError), match="dropout"):
            attend(dropout=0.1)
        cache = DynamicCache(config=model.config)
        kept = layer.cache_of(cache)
        layer.attention(kept, module, q, k, v, None, position_ids=positions)
        assert kept.closed and kept.get_seq_length() == 0
        growing = DynamicCache()  # which has no layers yet
        second = hook.RivalHook(handle, None, Layer(1, 1, 4, 2)).cache_of(growing)
        assert growing.layers[1] is second and type(growing.layers[0]) is not type(second)
        first = layer.cache_of(growing)
        assert growing.layers == [first, second] and layer.cache_of(growing) is first


# The table


def test_rivals_are_offered_where_they_can_be_chosen():
    assert baselines.NAMES == ("window", "streaming_llm", "lm_infinite")
    make = baselines.make_rival
    for made, wanted in (
        (make("window", window_size=5, sinks=None), WindowOnly(0, 5)),
        (make("streaming_llm"), StreamingLLM(4)),
        (make("streaming_llm", sinks=0, window_size=7), StreamingLLM(0, 7)),
        (make("lm_infinite"), LMInfinite(16)),
    ):
        assert made == wanted and type(made) is type(wanted)
    with pytest.raises(ValueError, match="^sinks must not be given for window, got 3: it has no"):
        make("window", sinks=3)
    assert StreamingLLM(2, 7).to_dict() == {"sinks": 2, "window_size": 7}
