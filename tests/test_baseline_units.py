"""The pieces of the rivals one by one: masks, caches, patterns, how they are attached, and their
table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from families import tiny_model, tokens
from transformers import DynamicCache

from corecontext import CCAConfig, Rotary, baselines
from corecontext.baselines import (
    DuoAttention,
    LMInfinite,
    LongLoRA,
    MInference,
    Pattern,
    StreamingLLM,
    WindowOnly,
    hook,
    minference,
    pattern_search,
)
from corecontext.baselines import blocks as blocks_module
from corecontext.baselines.blocks import Scoring, masked_attention
from corecontext.baselines.duo_attention import find_heads
from corecontext.baselines.longlora import shifted_attention
from corecontext.baselines.method import Call, Layer, left_padding
from corecontext.baselines.minference import pick_blocks, pick_vertical_slash, sparse_attention
from corecontext.baselines.rivals import offered, takers
from corecontext.baselines.sink_cache import SinkCacheLayer
from corecontext.files import UserError
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


@pytest.mark.parametrize(
    "config, length",
    [
        (WindowOnly(0, 9), 9),
        (StreamingLLM(3, 9), 12),
        (LMInfinite(3, 9), 10),  # of several sinks beyond the window all but one are moved
        (LMInfinite(0, 9), 9),
        (DuoAttention(((),), 3, 9), 12),
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
    for config in (StreamingLLM(3, 6), WindowOnly(0, 6), DuoAttention(((0,),), 3, 6)):
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


@pytest.mark.parametrize("config", [StreamingLLM(3, 6), DuoAttention(((0,),), 3, 6)], ids=str)
def test_rows_of_a_cache_are_selected_and_repeated_with_their_padding(config):
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


def test_heads_of_a_checkpoint_may_be_the_same_in_every_layer():
    config = tiny_model().config
    config.cca = {"layer_group_sizes": None, "head_group_sizes": [8, 1]}
    assert find_heads(None, config) == ((1,),) * config.num_hidden_layers


# Patterns


def test_each_head_and_row_attends_by_its_own_pattern():
    patterns = (
        Pattern("a_shape", 2, 6),
        Pattern("vertical_slash", 5, 16),
        Pattern("block_sparse", 2, 0),
        Pattern("a_shape", 1, 9),
        Pattern("a_shape", 2, 6),
        Pattern("vertical_slash", 2, 8),
    )
    for new in (40, 33):
        q, k, v = qkv(40, 6, 3, new=new)
        out = sparse_attention(q, k, v, patterns, Scoring(0.3), 8, 8)
        for row in range(2):
            for head, pattern in enumerate(patterns):
                tensors = (q[row, head], k[row, head // 2], v[row, head // 2])
                alone = [x[None, None] for x in tensors]
                wanted = sparse_attention(*alone, [pattern], Scoring(0.3), 8, 8)
                torch.testing.assert_close(out[row, head], wanted[0, 0])


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


def test_a_prompt_of_a_block_is_read_by_the_layers_patterns(monkeypatch):
    asked = []

    def sparse(q, k, v, patterns, scoring, block_size, probe):
        asked.append((q.shape[2], patterns, scoring, block_size, probe))
        return q

    monkeypatch.setattr(minference, "sparse_attention", sparse)
    q, k, v = qkv(20)
    first, second = ((Pattern("a_shape", i, 5),) * 4 for i in (1, 2))
    config = MInference((first, second), block_size=8, probe=3)
    layer = Layer(1, 0, 4, 2)  # the second layer, and the first with full attention
    for new in (7, 8, 20):
        config.attend(call(q[:, :, 20 - new :], k, v, layer))
    MInference(block_size=8).attend(call(q, k, v, layer))
    scoring = Scoring(0.3)
    assert asked == [
        (8, second, scoring, 8, 3),
        (20, second, scoring, 8, 3),
        (20, (Pattern("vertical_slash", 1000, 6096),) * 4, scoring, 8, 64),
    ]
    config.check(layer)
    for wrong, got in ((layer._replace(index=2), "no such"), (layer._replace(query_heads=3), "4")):
        with pytest.raises(ValueError, match=f"heads of layer {wrong.index}, got {got}"):
            config.check(wrong)
    for kind, size in (("a_shape", (0, 1)), ("vertical_slash", (1, 1)), ("block_sparse", (1, 0))):
        Pattern(kind, *size)
        for wrong in ((size[0] - 1, size[1]), (size[0], size[1] - 1)):
            with pytest.raises(ValueError, match="must be at least"):
                Pattern(kind, *wrong)


@pytest.mark.parametrize("family", ["llama", "qwen2-hybrid", "gemma3"])
def test_the_search_takes_each_heads_nearest_pattern_of_full_attention(family, monkeypatch):
    model, ids = tiny_model(family), tokens(1, 16)
    candidates = [Pattern("a_shape", i, 5) for i in range(3)]
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * layers
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    calls = []

    def sparse(q, k, v, patterns, scoring, block_size, probe):
        """Return the exact output and an error: the candidate of a head is its number modulo 3 and
        the next one in the next layer, in which the first head has ties."""
        assert (block_size, probe) == (16, 9) and len(set(patterns)) == 1
        index = candidates.index(patterns[0])
        layer = len(calls) // 3
        calls.append(index)
        error = torch.tensor([0.1 if (head + layer) % 3 == index else 0.2 for head in range(heads)])
        if layer:
            error[0] = 0.3
        exact = pattern_search.dense_attention(q, k, v, scoring)
        return exact + error.view(1, -1, 1, 1)

    monkeypatch.setattr(pattern_search, "sparse_attention", sparse)
    chosen = baselines.search_patterns(model, ids, candidates, block_size=16, probe=9)
    assert calls == [0, 1, 2] * len(full) and len(chosen) == full[-1] + 1
    for place, layer in enumerate(full):
        wanted = [candidates[(head + place) % 3] for head in range(heads)]
        if place:
            wanted[0] = candidates[0]
        assert chosen[layer] == tuple(wanted)
    for layer in set(range(len(chosen))) - set(full):
        assert chosen[layer] == (candidates[0],) * heads
    # The layers' inputs were those of full attention.
    states = []
    model.get_decoder().register_forward_hook(lambda *call: states.append(call[2][0]))
    with torch.no_grad():
        model(ids)
    baselines.search_patterns(model, ids, candidates, block_size=16, probe=9)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-4)


def test_patterns_are_read_as_they_were_written_or_refused(tmp_path):
    path = tmp_path / "patterns.json"
    patterns = ((Pattern("a_shape", 0, 1), Pattern()), (Pattern("block_sparse", 3, 0),))
    baselines.write_patterns(path, patterns)
    assert baselines.read_patterns(path) == patterns
    for wrong in ("{", "3", "[[3]]", '[[{"kind": "diagonal"}]]', '[[{"third": 1}]]'):
        path.write_text(wrong)
        with pytest.raises(UserError, match="patterns.json' must hold patterns by layer and head"):
            baselines.read_patterns(path)
    with pytest.raises(UserError, match="does not exist"):
        baselines.read_patterns(tmp_path / "none")


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
            baselines.enabled(model, LongLoRA(4)),
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
    assert offered("train") == ("window", "streaming_llm", "lm_infinite", "longlora")
    assert set(offered("eval")) == set(baselines.NAMES) - {"longlora"}
    assert takers("patterns") == ("minference",) and takers("full_heads") == ("duo_attention",)
    assert takers("group_size") == ("longlora",)
    assert takers("sinks") == ("streaming_llm", "lm_infinite", "duo_attention")
    assert takers("window_size") == ("window", *takers("sinks"))
    make = baselines.make_rival
    for made, wanted in (
        (make("window", window_size=5, sinks=None), WindowOnly(0, 5)),
        (make("streaming_llm"), StreamingLLM(4)),
        (make("streaming_llm", sinks=0, window_size=7), StreamingLLM(0, 7)),
        (make("lm_infinite"), LMInfinite(16)),
        (make("longlora", group_size=8), LongLoRA(8)),
        (make("duo_attention", full_heads=((1,),)), DuoAttention(((1,),), 4)),
        (make("minference", patterns=[[Pattern()]]), MInference(((Pattern(),),))),
    ):
        assert made == wanted and type(made) is type(wanted)
    with pytest.raises(ValueError, match="^sinks must not be given for window, got 3: it has no"):
        make("window", sinks=3)
    assert StreamingLLM(2, 7).to_dict() == {"sinks": 2, "window_size": 7}
