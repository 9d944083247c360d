"""Rivals: each against a dense mask of its own definition, on tiny random models of several
families."""

from __future__ import annotations

import functools
import itertools
import sys

import pytest
import torch
from families import tiny_model, tokens
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache

import corecontext
from corecontext import CCAConfig, baselines
from corecontext.baselines import (
    DuoAttention,
    LMInfinite,
    LongLoRA,
    MInference,
    Pattern,
    StreamingLLM,
    WindowOnly,
)
from corecontext.baselines import blocks as blocks_module
from corecontext.baselines.blocks import Scoring, Sinks
from corecontext.baselines.duo_attention import DuoLayer
from corecontext.baselines.method import Call, Layer
from corecontext.baselines.minference import pick_blocks, pick_vertical_slash, sparse_attention
from corecontext.baselines.sink_cache import SinkCacheLayer
from corecontext.inference import Engine
from corecontext.integrations.hf.cache_layers import cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.ops.rotary import Rotary
from reproduction.attentions.pooled import MaxPooled, MeanPooled

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
MIXED = (
    Pattern("a_shape", 2, 6),
    Pattern("vertical_slash", 5, 16),
    Pattern("block_sparse", 2, 0),
    Pattern("vertical_slash", 3, 8),
)


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


@pytest.mark.parametrize("config", [*SINKS, LongLoRA(8)], ids=lambda c: c.name)
def test_packed_documents_equal_single_ones(config):
    model, parts = tiny_model().train(), [tokens(1, n, seed=n) for n in (11, 30, 20)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    with baselines.enabled(model, config):
        packed = logits(model, torch.cat(parts, 1), position_ids=positions)
        torch.testing.assert_close(
            packed, torch.cat([logits(model, part) for part in parts], 1), rtol=1e-4, atol=5e-5
        )
        if config.name != "longlora":
            with torch.no_grad():
                cache = returned_cache(
                    model(torch.cat(parts, 1), position_ids=positions, use_cache=True)
                )
                with pytest.raises(ValueError, match="packed in one row cannot be continued"):
                    model(parts[0][:, :1], **with_cache(cache))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "config", [StreamingLLM(2, 6), LMInfinite(2, 6), LongLoRA(8)], ids=lambda c: c.name
)
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


@pytest.mark.parametrize("family", ["llama", "llama-mha", "gemma2"])
@pytest.mark.parametrize("length", [5, 16, 41])
def test_longlora_equals_its_mask_and_sees_no_future(family, length):
    model, ids = tiny_model(family), tokens(2, length)
    full = logits(model, ids)
    heads, seen = model.config.num_attention_heads, []
    half = torch.arange(heads)[:, None, None] >= heads // 2
    t = torch.arange(length)
    plain, shifted = (
        ((t + offset) // 8)[:, None] == ((t + offset) // 8)[None] for offset in (0, 4)
    )
    mask = torch.where(half, shifted, plain) & (t <= t[:, None])

    def attention(module, q, k, v, attention_mask, scaling=None, softcap=None, **kwargs):
        if getattr(module, "is_sliding", False):
            return AttentionInterface()["sdpa"](
                module, q, k, v, attention_mask, scaling=scaling, **kwargs
            )
        seen.append(module)
        return masked(q, k, v, mask, scaling, softcap).transpose(1, 2), None

    AttentionInterface.register("longlora_oracle", attention)
    AttentionMaskInterface.register("longlora_oracle", AttentionMaskInterface()["sdpa"])
    if family == "gemma2":  # a softcap, and no sliding layer in the way
        model = tiny_model(family, layer_types=["full_attention"] * 2)
        model.config._attn_implementation = "eager"  # the only one that caps
        full = logits(model, ids)
    model.config._attn_implementation = "longlora_oracle"
    expected = logits(model, ids)
    model.config._attn_implementation = "sdpa" if family != "gemma2" else "eager"
    assert seen
    with baselines.enabled(model, LongLoRA(8)):
        model.train()
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=5e-5)
        changed = ids.clone()
        changed[:, -1] = (changed[:, -1] + 5) % 90 + 2
        torch.testing.assert_close(
            logits(model, changed)[:, :-1], expected[:, :-1], rtol=1e-4, atol=5e-5
        )
        model.eval()
        torch.testing.assert_close(logits(model, ids), full, rtol=1e-4, atol=5e-5)  # training only


def pattern_mask(q, k, pattern, size, probe, scale):
    """[H, T, S]: the mask in words of minference.py, for one batch row."""
    new, seen = q.shape[2], k.shape[2]
    t, j = torch.arange(seen - new, seen)[:, None], torch.arange(seen)[None]
    causal = j <= t
    if pattern.kind == "a_shape":
        return (((j < pattern.first) | (t - j < pattern.second)) & causal).expand(
            q.shape[1], -1, -1
        )
    masks = []
    for head in range(q.shape[1]):
        one_q, one_k = q[:, head : head + 1], k[:, head : head + 1]
        if pattern.kind == "vertical_slash":
            columns, bands = pick_vertical_slash(one_q, one_k, pattern, size, probe, scale)
            seen_here = torch.isin(j, columns) | torch.isin(t // size - j // size, bands)
        else:
            means = torch.stack([part.mean(2) for part in one_k.split(size, 2)], 2)
            seen_here = torch.zeros(new, seen, dtype=torch.bool)
            for block in range(int(t[0]) // size, int(t[-1]) // size + 1):
                rows = (t[:, 0] // size == block).nonzero()[:, 0]
                chosen = pick_blocks(one_q[:, :, rows], means[:, :, : block + 1], pattern.first)
                seen_here[rows] = torch.isin(j // size, chosen)
        masks.append(seen_here & causal)
    return torch.stack(masks)


def test_the_picked_diagonals_hold_as_many_tokens_as_the_pattern_says():
    q = k = torch.randn(1, 2, 40, 8)
    for second, count in ((1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3), (100, 5)):
        pattern = Pattern("vertical_slash", 3, second)
        _, bands = pick_vertical_slash(q, k, pattern, 8, 8, 1.0)
        assert bands.shape[2] == count, second


@pytest.mark.parametrize("new", [64, 40, 23])
@pytest.mark.parametrize("pattern", [*MIXED, Pattern("vertical_slash", 40, 8)], ids=str)
def test_patterns_equal_their_masks(pattern, new):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, heads, length, 16, generator=generator)
        for heads, length in ((4, new), (2, 71), (2, 71))
    )
    out = sparse_attention(q, k, v, [pattern] * 4, Scoring(0.25), block_size=8, probe=8)
    mask = pattern_mask(q, k.repeat_interleave(2, 1), pattern, 8, 8, 0.25)
    assert bool(mask.diagonal(71 - new, -2, -1).all())  # every query sees itself
    assert not bool(mask.flatten(0, -3).all())
    torch.testing.assert_close(out, masked(q, k, v, mask, 0.25), rtol=1e-4, atol=1e-5)


def test_patterns_pick_what_gets_attention():
    q, k = torch.zeros(1, 1, 80, 8), torch.zeros(1, 1, 80, 8)
    q[..., 0], k[0, 0, 37, 0] = 3.0, 9.0
    columns, _ = pick_vertical_slash(q, k, Pattern("vertical_slash", 31, 8), 8, 8, 1.0)
    assert sorted(columns.flatten().tolist()) == [*range(30), 37]
    means = torch.stack([part.mean(2) for part in k.split(8, 2)], 2)
    assert sorted(pick_blocks(q[:, :, 72:], means, 3).flatten().tolist()) == [0, 4, 9]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_minference_reads_sparsely_and_decodes_densely(family):
    model, ids = tiny_model(family), tokens(1, 61)
    config = MInference((MIXED, MIXED), block_size=8, probe=8)
    everything = MInference(((Pattern("vertical_slash", 61, 61),) * 4,) * 2, block_size=8)
    if family == "gemma2":
        model.config._attn_implementation = "eager"  # the only one that caps
    full = logits(model, ids)
    with baselines.enabled(model, everything):
        torch.testing.assert_close(logits(model, ids), full, rtol=1e-4, atol=5e-5)
    with baselines.enabled(model, config):
        sparse = logits(model, ids)
        assert (sparse - full).abs().max() > 1e-3
        with torch.no_grad():
            cache = returned_cache(model(ids[:, :60], use_cache=True))
            step = model(ids[:, 60:], **with_cache(cache), use_cache=True).logits
        copied = DynamicCache(config=model.config)
        for i, layer in enumerate(cache.layers):
            copied.update(layer.keys[:, :, :60], layer.values[:, :, :60], i)
        assert model.generate(ids, max_new_tokens=5, do_sample=False).shape == (1, 66)
    if family != "gemma2":
        with torch.no_grad():  # the same cache under full attention gives the same next token
            torch.testing.assert_close(
                model(ids[:, 60:], **with_cache(copied)).logits, step, rtol=1e-4, atol=5e-5
            )


@pytest.mark.parametrize(
    "config",
    [
        *SINKS,
        DuoAttention(((1,), ()), 2, 9),
        LongLoRA(16),
        MInference((MIXED,) * 2, block_size=8, probe=8),
    ],
    ids=lambda config: config.name,
)
def test_autocast_changes_no_more_than_rounding(config):
    """Weights and rotation in float32, products in half precision."""
    model, ids = tiny_model("llama"), tokens(1, 48)
    with baselines.enabled(model, config):
        wanted = logits(model, ids)
        with torch.autocast("cpu", torch.bfloat16):
            found = logits(model, ids)
    assert (found.float() - wanted).abs().mean() < 0.1


def test_duo_heads_see_everything_or_sinks_and_window():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 60, 16) for heads in (8, 4, 4))
    layer = Layer(0, 0, 8, 4)
    for full in ((), (2,), (0, 3), (0, 1, 2, 3)):
        duo, cut = DuoLayer(3, 7, full, 4), 0
        parts = []
        for new in (25, 1, 1, 20, 13):
            at = slice(cut, cut + new)
            call = Call(q[:, :, at], k[:, :, at], v[:, :, at], Scoring(0.25), layer)
            parts.append(duo.attend(call, "none"))
            cut += new
        out = torch.cat(parts, 2)
        for head in range(4):
            mine = q[:, 2 * head : 2 * head + 2], k[:, head : head + 1], v[:, head : head + 1]
            t, j = torch.arange(60)[:, None], torch.arange(60)[None]
            seen = (j <= t) & ((t - j < 7) | (j < 3)) if head not in full else j <= t
            expected = masked(*mine, seen.expand(2, 60, 60), 0.25)
            torch.testing.assert_close(
                out[:, 2 * head : 2 * head + 2], expected, rtol=1e-4, atol=1e-5
            )
        held = sum(60 if head in full else 3 + 7 for head in range(4))
        assert duo.nbytes == 2 * 2 * held * 16 * 4 and duo.get_seq_length() == 60


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_duo_in_models(family):
    model, ids = tiny_model(family), tokens(2, 45)
    full, layers = logits(model, ids), len(enable_and_count(model))
    kv_heads = model.config.get_text_config().num_key_value_heads
    every = tuple(range(kv_heads))
    with baselines.enabled(model, DuoAttention((every,) * layers, 2, 9)):
        torch.testing.assert_close(logits(model, ids), full, rtol=1e-4, atol=5e-5)
    with baselines.enabled(model, WindowOnly(0, 9)):
        window = logits(model, ids)
    with baselines.enabled(model, DuoAttention(((),) * layers, 0, 9)):
        torch.testing.assert_close(logits(model, ids), window, rtol=1e-4, atol=5e-5)
    mixed = DuoAttention(((), *((kv_heads - 1,),) * (layers - 1)), 2, 9)
    with baselines.enabled(model, mixed):
        stateless = logits(model, ids)
        found, cache = in_parts(model, ids)
        torch.testing.assert_close(found, stateless, rtol=1e-4, atol=5e-5)
        assert cache_bytes(cache) > 0
        options = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(
            model.generate(ids, **options), model.generate(ids, use_cache=False, **options)
        )
        assert model.generate(ids, num_beams=2, **options).shape == (2, 53)
    for wrong in (DuoAttention(((kv_heads,),) * layers), DuoAttention(())):
        with pytest.raises(ValueError, match="full_heads must have heads from 0 to"):
            baselines.enable(model, wrong)
    assert torch.equal(logits(model, ids), full)


def enable_and_count(model):
    """The full-attention layers of a model."""
    with corecontext.enabled(model, CCAConfig.paper(4, 8)) as handle:
        return handle.full


def test_search_finds_the_pattern_of_a_head(tmp_path):
    model, ids = tiny_model(), tokens(1, 90)
    narrow, wide = Pattern("a_shape", 0, 1), Pattern("vertical_slash", 90, 90)
    found = baselines.search_patterns(model, ids, [narrow, wide], block_size=8)
    assert found == ((wide,) * 4,) * 2  # seeing everything has no error
    mixed = baselines.search_patterns(model, ids, MIXED, block_size=8)
    baselines.write_patterns(tmp_path / "p.json", mixed)
    assert baselines.read_patterns(tmp_path / "p.json") == mixed
    with baselines.enabled(model, MInference(mixed, block_size=8)):
        assert torch.isfinite(logits(model, ids)).all()
    (tmp_path / "bad.json").write_text('[{"kind": 3}]')
    with pytest.raises(corecontext.files.UserError, match="must hold patterns"):
        baselines.read_patterns(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="at least 64 tokens"):
        baselines.search_patterns(model, ids[:, :20], [wide])


@pytest.mark.parametrize("pooled", [MeanPooled, MaxPooled])
def test_plain_pooling_is_its_definition(pooled):
    g, window = 4, 9
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    q, k, v = draw(1, 4, 30, 8), draw(1, 2, 30, 8), draw(1, 2, 30, 8)
    rotary = Rotary.from_theta(100.0, 8)
    call = Call(q, k, v, Scoring(0.3), Layer(0, 0, 4, 2), rotary=rotary)
    method = pooled(g, window)
    out = method.attend(call)
    reduce = torch.mean if pooled is MeanPooled else torch.amax
    for head, t in itertools.product(range(4), range(30)):
        keys, values = k[0, head // 2], v[0, head // 2]
        far = max(0, (t + 1 - window) // g)
        groups = [slice(c * g, c * g + g) for c in range(far)]
        offsets = torch.tensor([2, 1, 0, -1])  # to the middle of a group
        near = slice(far * g, t + 1)
        cores = [reduce(rotary.rotate(keys[group], offsets), 0) for group in groups]
        scores = torch.stack([*cores, *keys[near]]) @ q[0, head, t] * 0.3
        seen = torch.stack([*(reduce(values[group], 0) for group in groups), *values[near]])
        torch.testing.assert_close(out[0, head, t], scores.softmax(0) @ seen)
    # The last tokens alone, as in a cache.
    torch.testing.assert_close(method.attend(call._replace(q=q[:, :, 27:])), out[:, :, 27:])
    model, ids = tiny_model(), tokens(1, 50)
    with baselines.enabled(model, method):
        assert not torch.allclose(logits(model, ids), logits(tiny_model(), ids))


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
    assert cache_bytes(cache) == 2 * 2 * 2 * 16 * 4 * (
        4 + 10
    )  # layers, K and V, KV heads, head size, bytes


def test_refusals():
    model, ids = tiny_model(), tokens(1, 20)
    for wrong, message in (
        (lambda: StreamingLLM(-1, 4), "sinks must be at least 0"),
        (lambda: LMInfinite(1, 0), "window_size must be at least 1"),
        (lambda: WindowOnly(2, 4), "sinks must be 0"),
        (lambda: Pattern("diagonal"), "kind must be one of"),
        (lambda: LongLoRA(1), "group_size must be at least 2"),
        (lambda: baselines.make_rival("streaming", window_size=3), "method must be one of"),
        (lambda: baselines.make_rival("window", group_size=3), "has no such size"),
        (lambda: baselines.enable(model, MInference(((Pattern(),),))), "one pattern for each of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    with pytest.raises(TypeError, match="must be an integer"):
        StreamingLLM(2.5, 4)
    handle = baselines.enable(model, StreamingLLM(2, 6))
    with pytest.raises(ValueError, match="enabled twice"):
        baselines.enable(model, LongLoRA())
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
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with (
        baselines.enabled(model, MInference(block_size=4)),
        pytest.raises(NotImplementedError, match="on the left"),
    ):
        logits(model, ids, attention_mask=mask)
    with torch.no_grad():
        filled = returned_cache(model(ids, use_cache=True))
    with (
        baselines.enabled(model, WindowOnly(0, 4)),
        pytest.raises(ValueError, match="cached by another attention"),
    ):
        model(ids, **with_cache(filled))
