"""Rivals of the laboratory: MInference, LongLoRA and DuoAttention against masks of their
definitions."""

import copy
import functools
import itertools

import pytest
import torch
from families import tiny_model, tokens
from test_baseline_units import call, masked, qkv
from test_baselines import in_parts, logits
from tiny_model import save_tiny_model

from corecontext import Rotary, baselines
from corecontext.baselines import WindowOnly
from corecontext.baselines.blocks import Scoring
from corecontext.baselines.method import Call, Layer
from corecontext.files import UserError
from corecontext.integrations.hf.cache_layers import cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.loading import load
from reproduction.attentions.choice import pick_attention
from reproduction.attentions.duo_attention import DuoAttention, DuoLayer, find_heads
from reproduction.attentions.longlora import LongLoRA, shifted_attention
from reproduction.attentions.minference import (
    MInference,
    Pattern,
    pick_blocks,
    pick_vertical_slash,
    sparse_attention,
)
from reproduction.attentions.pattern_search import read_patterns, search_patterns, write_patterns
from reproduction.attentions.pooled import MaxPooled, MeanPooled

MIXED = (
    Pattern("a_shape", 2, 6),
    Pattern("vertical_slash", 5, 16),
    Pattern("block_sparse", 2, 0),
    Pattern("vertical_slash", 3, 8),
)


# Plain pooling


@pytest.mark.parametrize("pooled", [MeanPooled, MaxPooled])
def test_plain_pooling_is_its_definition(pooled):
    g, window = 4, 9
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    q, k, v = draw(1, 4, 30, 8), draw(1, 2, 30, 8), draw(1, 2, 30, 8)
    rotary = Rotary.from_theta(100.0, 8)
    case = call(q, k, v, rotary=rotary)
    method = pooled(g, window)
    out = method.attend(case)
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
    torch.testing.assert_close(method.attend(case._replace(q=q[:, :, 27:])), out[:, :, 27:])
    model, ids = tiny_model(), tokens(1, 50)
    with baselines.enabled(model, method):
        assert not torch.allclose(logits(model, ids), logits(tiny_model(), ids))


# LongLoRA


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("size, length", [(7, 30), (2, 9), (8, 3), (5, 5), (4, 5)])
def test_groups_are_shifted_by_half_of_them_in_the_second_half_of_heads(
    heads, kv_heads, size, length
):
    q, k, v = qkv(length, heads, kv_heads)
    t = torch.arange(length)
    masks = []
    for offset in (0, size // 2):
        groups = (t + offset) // size
        masks.append((groups[:, None] == groups) & (t <= t[:, None]))
    mask = torch.stack([masks[head >= heads // 2] for head in range(heads)])
    out = shifted_attention(q, k, v, size, Scoring(0.3))
    torch.testing.assert_close(out, masked(q, k, v, mask, Scoring(0.3)))


def test_a_group_is_a_quarter_of_the_length_unless_it_is_given():
    for length, size in ((3, 2), (8, 2), (9, 3), (40, 10), (41, 11)):
        q, k, v = qkv(length)
        out = LongLoRA().attend(call(q, k, v, training=True))
        assert torch.equal(out, shifted_attention(q, k, v, size, Scoring(0.3)))
        given = LongLoRA(6).attend(call(q, k, v, training=True))
        assert torch.equal(given, shifted_attention(q, k, v, 6, Scoring(0.3)))
    with pytest.raises(ValueError, match="trains on whole sequences, got a filled cache"):
        LongLoRA().attend(call(q[:, :, 1:], k, v, training=True))
    causal = torch.ones(40, 41).tril(1).bool()  # later steps see all before them
    out = LongLoRA(4).attend(call(q[:, :, 1:], k, v))
    torch.testing.assert_close(out, masked(q[:, :, 1:], k, v, causal, Scoring(0.3)))


@pytest.mark.parametrize("config", [LongLoRA(4), MInference()], ids=lambda config: config.name)
def test_rows_padded_on_the_left_are_refused_where_any_is(config):
    q, k, v = qkv(6)
    mask = torch.ones(2, 6)
    wanted = config.attend(call(q, k, v))
    mask[1, 4:] = 0  # on the right nothing changes
    assert torch.equal(config.attend(call(q, k, v, attention_mask=mask)), wanted)
    mask[1, 0] = 0
    with pytest.raises(NotImplementedError, match=f"on the left under {config.name}"):
        config.attend(call(q, k, v, attention_mask=mask))


def test_longlora_trains_in_groups_and_reads_all_tokens():
    model, ids = tiny_model(), tokens(1, 41)
    full = logits(model, ids)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 5) % 90 + 2
    with baselines.enabled(model, LongLoRA(8)):
        torch.testing.assert_close(logits(model, ids), full, rtol=1e-4, atol=5e-5)
        model.train()
        trained = logits(model, ids)
        assert (trained - full).abs().max() > 1e-3
        torch.testing.assert_close(logits(model, changed)[:, :-1], trained[:, :-1])
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        LongLoRA(1)


# MInference


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
    torch.testing.assert_close(out, masked(q, k, v, mask, Scoring(0.25)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("new, probe", [(90, 8), (90, 1), (5, 8)])
def test_columns_and_diagonals_are_those_with_most_attention_of_the_last_queries(new, probe):
    q, k, _ = qkv(90, 1, 1, 1, new)
    last = min(new, probe)
    columns = torch.zeros(90, dtype=torch.float64)
    bands = torch.zeros(12, dtype=torch.float64)
    for t in range(90 - last, 90):
        weights = (2.0 * q[0, 0, t - 90] @ k[0, 0, : t + 1].mT).softmax(0)
        columns[: t + 1] += weights
        for j, weight in enumerate(weights):
            bands[t // 8 - j // 8] += weight
    columns[:30] = torch.inf
    bands[:2] = torch.inf
    picked, diagonals = pick_vertical_slash(q, k, Pattern("vertical_slash", 36, 35), 8, probe, 2.0)
    assert sorted(picked.flatten().tolist()) == sorted(columns.topk(36).indices.tolist())
    assert sorted(diagonals.flatten().tolist()) == sorted(bands.topk(5).indices.tolist())
    # Of few columns the first, of few diagonals the nearest.
    picked, diagonals = pick_vertical_slash(q, k, Pattern("vertical_slash", 5, 8), 8, probe, 2.0)
    assert picked.flatten().tolist() == [0, 1, 2, 3, 4] and diagonals.flatten().tolist() == [0]
    _, diagonals = pick_vertical_slash(q, k, Pattern("vertical_slash", 5, 9), 8, probe, 2.0)
    assert diagonals.flatten().tolist() == [0, 1]


def test_blocks_are_picked_by_their_mean_beside_the_own_and_the_first():
    rows = torch.tensor([[[[9.0, 0.0], [0.0, 2.0]]]])  # mean (4.5, 1)
    means = torch.tensor([[[[-9.0, 0.0], [1.0, 0.0], [0.0, 3.0], [1.0, 0.5], [-9.0, 0.0]]]])
    picked = {1: [4], 2: [0, 4], 3: [0, 3, 4], 4: [0, 1, 3, 4], 9: [0, 1, 2, 3, 4]}
    for count, blocks in picked.items():
        assert sorted(pick_blocks(rows, means.clone(), count).flatten().tolist()) == blocks


def test_minference_reads_sparsely_and_decodes_densely():
    model, ids = tiny_model(), tokens(1, 61)
    full = logits(model, ids)
    everything = MInference(((Pattern("vertical_slash", 61, 61),) * 4,) * 2, block_size=8)
    with baselines.enabled(model, everything):
        torch.testing.assert_close(logits(model, ids), full, rtol=1e-4, atol=5e-5)
    with baselines.enabled(model, MInference((MIXED, MIXED), block_size=8, probe=8)):
        assert (logits(model, ids) - full).abs().max() > 1e-3
        with torch.no_grad():
            cache = returned_cache(model(ids[:, :60], use_cache=True))
            copied = copy.deepcopy(cache)
            step = model(ids[:, 60:], **with_cache(cache), use_cache=True).logits
    with torch.no_grad():  # the same cache under full attention gives the same next token
        wanted = model(ids[:, 60:], **with_cache(copied)).logits
    torch.testing.assert_close(wanted, step, rtol=1e-4, atol=5e-5)


def test_search_finds_the_pattern_of_a_head(tmp_path):
    model, ids = tiny_model(), tokens(1, 90)
    narrow, wide = Pattern("a_shape", 0, 1), Pattern("vertical_slash", 90, 90)
    found = search_patterns(model, ids, [narrow, wide], block_size=8)
    assert found == ((wide,) * 4,) * 2  # seeing everything has no error
    mixed = search_patterns(model, ids, MIXED, block_size=8)
    path = tmp_path / "patterns.json"
    write_patterns(path, mixed)
    config = pick_attention("minference", "", str(path))
    assert config == MInference(mixed) and read_patterns(path) == mixed
    record = config.to_dict()
    assert len(record["patterns"]) == 16 and record != MInference((MIXED,) * 2).to_dict()
    with baselines.enabled(model, MInference(mixed, block_size=8)):
        assert torch.isfinite(logits(model, ids)).all()
    for wrong in ("{", "3", "[[3]]", '[[{"kind": "diagonal"}]]', '[[{"third": 1}]]'):
        path.write_text(wrong)
        with pytest.raises(UserError, match="patterns.json' must hold patterns by layer and head"):
            read_patterns(path)
    with pytest.raises(ValueError, match="at least 64 tokens"):
        search_patterns(model, ids[:, :20], [wide])
    with pytest.raises(ValueError, match="one pattern for each of 4"):
        baselines.enable(model, MInference(((Pattern(),),)))


# DuoAttention


def test_duo_heads_see_everything_or_sinks_and_window():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 60, 16) for heads in (8, 4, 4))
    layer = Layer(0, 0, 8, 4)
    for full in ((), (2,), (0, 3), (0, 1, 2, 3)):
        duo, cut = DuoLayer(3, 7, full, 4), 0
        parts = []
        for new in (25, 1, 1, 20, 13):
            at = slice(cut, cut + new)
            now = Call(q[:, :, at], k[:, :, at], v[:, :, at], Scoring(0.25), layer)
            parts.append(duo.attend(now, "none"))
            cut += new
        out = torch.cat(parts, 2)
        for head in range(4):
            mine = q[:, 2 * head : 2 * head + 2], k[:, head : head + 1], v[:, head : head + 1]
            t, j = torch.arange(60)[:, None], torch.arange(60)[None]
            seen = (j <= t) & ((t - j < 7) | (j < 3)) if head not in full else j <= t
            expected = masked(*mine, seen, Scoring(0.25))
            torch.testing.assert_close(
                out[:, 2 * head : 2 * head + 2], expected, rtol=1e-4, atol=1e-5
            )
        held = sum(60 if head in full else 3 + 7 for head in range(4))
        assert duo.nbytes == 2 * 2 * held * 16 * 4 and duo.get_seq_length() == 60


def test_duo_in_models():
    model, ids = tiny_model(), tokens(2, 45)
    full = logits(model, ids)
    with baselines.enabled(model, DuoAttention(((0, 1),) * 2, 2, 9)):
        torch.testing.assert_close(logits(model, ids), full, rtol=1e-4, atol=5e-5)
    with baselines.enabled(model, WindowOnly(0, 9)):
        window = logits(model, ids)
    with baselines.enabled(model, DuoAttention(((),) * 2, 0, 9)):
        torch.testing.assert_close(logits(model, ids), window, rtol=1e-4, atol=5e-5)
    with baselines.enabled(model, DuoAttention(((), (1,)), 2, 9)):
        found, cache = in_parts(model, ids)
        torch.testing.assert_close(found, logits(model, ids), rtol=1e-4, atol=5e-5)
        assert cache_bytes(cache) > 0
        options = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(
            model.generate(ids, **options), model.generate(ids, use_cache=False, **options)
        )
        assert model.generate(ids, num_beams=2, **options).shape == (2, 53)


def test_duo_has_the_heads_of_the_checkpoint_or_of_the_user(tmp_path):
    folder = str(tmp_path)
    save_tiny_model(tmp_path)
    size = {"window_size": 8, "device": "cpu"}
    loaded = load(folder, method=pick_attention("duo_attention", folder, None, "0:1, 1:0"), **size)
    assert loaded.rival == DuoAttention(((1,), (0,)), 4, 8) and loaded.method == "duo_attention"
    with pytest.raises(UserError, match="core-mass must be left out with method 'duo_attention'"):
        load(folder, method=loaded.rival, core_mass=True)
    with pytest.raises(UserError, match=r"full_heads must be LAYER:HEAD,.* got none. Find them"):
        pick_attention("duo_attention", folder)
    assert pick_attention("cca", folder) == "cca"


@pytest.mark.parametrize(
    "text, saved, heads",
    [
        ("0:1", None, {0: (1,)}),
        ("10:1, 2:0,10:0 ", None, {10: (1, 0), 2: (0,)}),
        (None, [4] * 9 + [2, 1, [2, 1]], {10: (0, 1), 11: (1,)}),
        ("3:0", [1] * 12, {3: (0,)}),
    ],
)
def test_heads_that_see_all_tokens_are_given_or_the_checkpoints_own(text, saved, heads):
    config = tiny_model().config
    config.num_hidden_layers = 12
    if saved is not None:
        config.cca = {"layer_group_sizes": saved}
    assert find_heads(text, config) == tuple(heads.get(layer, ()) for layer in range(12))
    for wrong in ("12:0", "1:0,12:0", "1:0,", "1", "a:1", "1:0 2:0", "-1:0"):
        with pytest.raises(ValueError, match="with layers from 0 to 11, got"):
            find_heads(wrong, config)


def test_heads_that_see_all_tokens_are_checked_and_sorted():
    layer = Layer(7, 1, 8, 4)
    config = DuoAttention([[], [3, 0, 3]], 2, 9)
    assert config.full_heads == ((), (3, 0, 3))
    cache = config.make_cache(layer)
    assert cache.settings == (2, 9, (0, 3), 4) and cache.shares == [[0, 3], [1, 2]]
    assert config.make_cache(layer._replace(full_index=0)).shares == [[0, 1, 2, 3]]
    assert DuoAttention(((0, 1),)).make_cache(Layer(0, 0, 4, 2)).shares == [[0, 1]]
    config.check(layer)
    for wrong, got in (
        (layer._replace(full_index=2), "no such"),
        (layer._replace(kv_heads=3), "3"),
    ):
        with pytest.raises(
            ValueError, match=rf"to {wrong.kv_heads - 1} for each layer, got .*{got}"
        ):
            config.check(wrong)
    with pytest.raises(ValueError, match="full_heads must be at least 0, got -1"):
        DuoAttention(((-1,),))
