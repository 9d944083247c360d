"""Rivals: each against a dense mask of its own definition, on tiny random models of several
families."""

import sys

import pytest
import torch
from families import tiny_model, tokens
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache

from corecontext import baselines
from corecontext.baselines import (
    LMInfinite,
    StreamingLLM,
    WindowOnly,
)
from corecontext.baselines import blocks as blocks_module
from corecontext.baselines.blocks import Scoring, Sinks
from corecontext.baselines.sink_cache import SinkCacheLayer
from corecontext.files import UserError
from corecontext.inference import Engine
from corecontext.integrations.hf.cache_layers import cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.ops.rotary import Rotary

FAMILIES = (
    "llama",
    "llama-mha",
    "llama-yarn",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3",
    "glm4",
)
SINKS = [StreamingLLM(3, 7), LMInfinite(2, 9), WindowOnly(0, 8)]


def in_parts(model, ids):
    """Logits of 45 tokens that come in parts, and the cache that is then filled."""
    parts, cache = [], None
    for a, b in ((0, 2), (2, 20), (20, 21), (21, 22), (22, 45)):
        with torch.no_grad():
            step = model(ids[:, a:b], **with_cache(cache), use_cache=True)
        parts, cache = [*parts, step.logits], returned_cache(step)
    return torch.cat(parts, 1), cache


def oracle_logits(model, ids, config):
    """Logits by loops over queries, from keys BEFORE rotary turned to the positions that the method
    names."""
    previous = model.config._attn_implementation

    def attention(module, q, k, v, mask, scaling=None, softcap=None, **kwargs):
        types = getattr(model.config, "layer_types", None)
        if types and types[module.layer_idx] != "full_attention":
            function = AttentionInterface().get_interface(
                previous, getattr(sys.modules[type(module).__module__], "eager_attention_forward")
            )
            return function(module, q, k, v, mask, scaling=scaling, softcap=softcap, **kwargs)
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        extra = (
            {"layer_type": types[module.layer_idx]}
            if model.config.model_type == "gemma3_text"
            else {}
        )
        length, repeat = q.shape[2], q.shape[1] // k.shape[1]
        cos, sin = (
            x.double()
            for x in model.base_model.rotary_emb(q.float(), torch.arange(length)[None], **extra)
        )
        size2 = (cos**2 + sin**2)[..., :1]
        q, k, v = q.double(), k.double(), v.double()
        raw_q, raw_k = (apply(x, x, cos / size2, -sin / size2)[1] for x in (q, k))
        out = torch.empty_like(q)

        def turned(x, at):
            return apply(x, x, cos[:, at], sin[:, at])[1]

        for t in range(length):
            near = [j for j in range(t + 1) if t - j < config.window_size]
            far = [j for j in range(min(config.sinks, t + 1)) if t - j >= config.window_size]
            seen = far + near
            if config.far_position == "cache":  # tokens that the cache holds are numbered from 0
                at_k, at_q = list(range(len(seen))), len(seen) - 1
                keys = turned(raw_k[:, :, seen], at_k)
                query = turned(raw_q[:, :, t : t + 1], [at_q])
                scores = query @ keys.repeat_interleave(repeat, 1).mT
            else:
                scores = q[:, :, t : t + 1] @ k[:, :, seen].repeat_interleave(repeat, 1).mT
                if config.far_position == "ceiling" and far:
                    query = turned(raw_q[:, :, t : t + 1], [config.window_size])
                    keys = turned(raw_k[:, :, far], [0] * len(far)).repeat_interleave(repeat, 1)
                    scores = torch.cat((query @ keys.mT, scores[..., len(far) :]), -1)
            scores = scores * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[:, :, t : t + 1] = scores.softmax(-1) @ v[:, :, seen].repeat_interleave(repeat, 1)
        return out.float().transpose(1, 2), None

    AttentionInterface.register("rival_oracle", attention)
    AttentionMaskInterface.register("rival_oracle", AttentionMaskInterface()[previous])
    model.config._attn_implementation = "rival_oracle"
    try:
        with torch.no_grad():
            return model(ids, use_cache=False).logits
    finally:
        model.config._attn_implementation = previous


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits


def masked(q, k, v, mask, scale, softcap=None):
    """Dense attention in float64 under a mask [H, T, S]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    scores = q.double() @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).to(q.dtype)


@pytest.mark.parametrize("config", SINKS, ids=lambda c: c.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_sinks_and_window_equal_the_dense_definition(family, config, monkeypatch):
    monkeypatch.setattr(blocks_module, "ROWS", 16)  # several blocks
    model, ids = tiny_model(family), tokens(2, 45)
    full = logits(model, ids)
    expected = oracle_logits(model, ids, config)
    assert (full - expected).abs().max() > 0.3
    with baselines.enabled(model, config):
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=5e-5)
        found, cache = in_parts(model, ids)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5)
    assert torch.equal(logits(model, ids), full)
    held = [layer for layer in cache.layers if isinstance(layer, SinkCacheLayer)]
    assert held and all(layer.keys.shape[2] == config.sinks + config.window_size for layer in held)


@pytest.mark.parametrize("config", SINKS, ids=lambda c: c.name)
def test_generate_left_padded_rows_equal_single_rows(config):
    model, lengths = tiny_model(), (37, 22, 4, 30)
    rows = [tokens(1, n, seed=n) for n in lengths]
    ids = torch.cat([torch.nn.functional.pad(row, (37 - row.shape[1], 0)) for row in rows])
    mask = torch.cat(
        [torch.nn.functional.pad(torch.ones_like(row), (37 - row.shape[1], 0)) for row in rows]
    )
    with baselines.enabled(model, config):
        single = []
        for row in rows:
            end = row
            for _ in range(14):
                end = torch.cat((end, logits(model, end)[:, -1].argmax(-1, keepdim=True)), 1)
            single.append(end[0, row.shape[1] :])
            assert Engine(model, chunk_size=9).generate(row, max_new_tokens=14) == [
                single[-1].tolist()
            ]
        for options in ({}, {"prefill_chunk_size": 9}):
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=14, do_sample=False, **options
            )
            for i, one in enumerate(single):
                assert torch.equal(out[i, 37:], one)
        beams = model.generate(rows[0], num_beams=3, max_new_tokens=8, do_sample=False)
        assert torch.equal(
            beams,
            model.generate(
                rows[0], num_beams=3, max_new_tokens=8, do_sample=False, use_cache=False
            ),
        )


@pytest.mark.parametrize("config", SINKS, ids=lambda c: c.name)
def test_packed_documents_equal_single_ones(config):
    model, parts = tiny_model().train(), [tokens(1, n, seed=n) for n in (11, 30, 20)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    with baselines.enabled(model, config):
        packed = logits(model, torch.cat(parts, 1), position_ids=positions)
        torch.testing.assert_close(
            packed, torch.cat([logits(model, part) for part in parts], 1), rtol=1e-4, atol=5e-5
        )
        with torch.no_grad():
            cache = returned_cache(
                model(torch.cat(parts, 1), position_ids=positions, use_cache=True)
            )
            with pytest.raises(ValueError, match="packed in one row cannot be continued"):
                model(parts[0][:, :1], **with_cache(cache))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("config", [StreamingLLM(2, 6), LMInfinite(2, 6)], ids=lambda c: c.name)
def test_gradients_follow_the_loss(family, config):
    model, ids = tiny_model(family).double().train(), tokens(1, 40)
    weight = model.get_input_embeddings().weight
    with baselines.enabled(model, config):

        def loss():
            return model(ids, labels=ids, use_cache=False).loss

        loss().backward()
        size, ends = weight.grad.norm(), []
        direction = weight.grad / size
        for step in (-2e-3, 4e-3):
            with torch.no_grad():
                weight += step * direction
                ends.append(float(loss()))
    assert (ends[1] - ends[0]) / 4e-3 == pytest.approx(float(size), rel=5e-3)


@pytest.mark.parametrize("config", SINKS, ids=lambda config: config.name)
def test_autocast_changes_no_more_than_rounding(config):
    """Weights and rotation in float32, products in half precision."""
    model, ids = tiny_model("llama"), tokens(1, 48)
    with baselines.enabled(model, config):
        wanted = logits(model, ids)
        with torch.autocast("cpu", torch.bfloat16):
            found = logits(model, ids)
    assert (found.float() - wanted).abs().mean() < 0.1


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(
    "length, window_size",
    [
        (1, 1),
        (100, 8),
        (128, 127),
        (129, 128),
        (300, 1),
        (700, 64),
        (700, 150),
        (700, 699),
        (700, 700),
        (1300, 200),
    ],
)
def test_a_window_alone_equals_its_mask(length, window_size, softcap, monkeypatch):
    monkeypatch.setattr(blocks_module, "ROWS", 200)  # several blocks
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(2, heads, length, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill((distance < 0) | (distance >= window_size), -torch.inf)
    wanted = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    no_sinks = Sinks(k[:, :, :0], v[:, :, :0])
    found = blocks_module.sink_attention(q, k, v, no_sinks, window_size, Scoring(0.3, softcap))
    near = {"rtol": 0, "atol": 1e-12 if softcap is None else 1e-5}  # capped scores are float32
    torch.testing.assert_close(found, wanted, **near)
    grad = torch.randn_like(wanted)
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (found, wanted))):
        torch.testing.assert_close(one, other, **near)


@pytest.mark.parametrize("far_position", ["none", "cache", "ceiling"])
@pytest.mark.parametrize("length, window_size, num_sinks", [(37, 8, 4), (41, 8, 12), (20, 1, 3)])
def test_a_prompt_in_chunks_equals_its_masks(length, window_size, num_sinks, far_position):
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(2, heads, length, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    rotary = Rotary.from_theta(1e4, 8)
    sinks = Sinks(k[:, :, :num_sinks], v[:, :, :num_sinks], far_position, rotary)
    call = (q, k, v, sinks, window_size, Scoring(0.3))
    outs = [
        blocks_module.sink_attention(*call),
        blocks_module.sink_attention(*call, pads=torch.zeros(2, dtype=torch.long)),  # by masks
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    grad = torch.randn(outs[0].shape, dtype=torch.float64, generator=generator)
    grads = [torch.autograd.grad(out, (q, k, v), grad) for out in outs]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_memory_grows_with_the_length_not_its_square(monkeypatch):
    largest = []
    original = blocks_module.masked_attention

    def spy(q, k, v, mask, *rest):
        largest.append(0 if mask is None else mask.numel())
        return original(q, k, v, mask, *rest)

    monkeypatch.setattr(blocks_module, "masked_attention", spy)
    peaks = []
    for length in (4096, 8192):
        q = torch.randn(1, 1, length, 8)
        largest.clear()
        sinks = Sinks(q[:, :, :4], q[:, :, :4])
        blocks_module.sink_attention(q, q, q, sinks, 256, Scoring(0.3, 30.0))
        peaks.append(max(largest))
    assert peaks[0] == peaks[1] < 4096 * 1024


def test_cache_bytes_are_those_of_sinks_and_window():
    model = tiny_model()
    with baselines.enabled(model, StreamingLLM(4, 10)), torch.no_grad():
        cache = returned_cache(model(tokens(1, 120), use_cache=True))
    # Layers, K and V, KV heads, head size, bytes.
    assert cache_bytes(cache) == 2 * 2 * 2 * 16 * 4 * (4 + 10)


def test_refusals():
    model, ids = tiny_model(), tokens(1, 20)
    for wrong, message in (
        (lambda: StreamingLLM(-1, 4), "sinks must be at least 0"),
        (lambda: LMInfinite(1, 0), "window_size must be at least 1"),
        (lambda: WindowOnly(2, 4), "sinks must be 0"),
        (lambda: baselines.make_rival("streaming", window_size=3), "method must be one of"),
        (lambda: baselines.make_rival("window", group_size=3), "has no such size"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    with pytest.raises(TypeError, match="must be an integer"):
        StreamingLLM(2.5, 4)
    for name, way in (("minference", "compare --method min"), ("longlora", "LongLoRA() in a")):
        with pytest.raises(UserError, match=f"{name} has moved to the laboratory. In a clone"):
            baselines.make_rival(name)
        assert way in baselines.rivals.MOVED[name]
    handle = baselines.enable(model, StreamingLLM(2, 6))
    with pytest.raises(ValueError, match="enabled twice"):
        baselines.enable(model, WindowOnly())
    with torch.no_grad():
        cache = returned_cache(model(ids, use_cache=True))
        with pytest.raises(NotImplementedError, match="cannot be taken back"):
            cache.layers[0].crop(-1)
        with pytest.raises(NotImplementedError, match="Use DynamicCache"):
            model(ids, **with_cache(StaticCache(model.config, max_cache_len=40)))
        with pytest.raises(NotImplementedError, match="output_attentions"):
            model(ids, output_attentions=True)
    handle.disable()
    with pytest.raises(ValueError, match="no longer in use"):
        handle.disable()
    with torch.no_grad():
        filled = returned_cache(model(ids, use_cache=True))
    with (
        baselines.enabled(model, WindowOnly(0, 4)),
        pytest.raises(ValueError, match="cached by another attention"),
    ):
        model(ids, **with_cache(filled))
