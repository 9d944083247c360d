"""Whole-model inference: the engine, generate() and one full forward agree token by token; limits,
policy."""

import gc
import warnings
import weakref
from unittest import mock

import pytest
import torch
from families import FAMILIES, tiny_model, tokens
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache

import corecontext
from corecontext import CCAConfig
from corecontext.cache import host_store
from corecontext.cache.full import FullLayer
from corecontext.inference import Engine, Load, Sampling, TablePolicy, fuse, prefill
from corecontext.inference import session as sessions
from corecontext.inference.fuse import Fused
from corecontext.inference.limits import (
    cache_bytes_per_token,
    does_not_fit,
    rounded_up,
)
from corecontext.inference.prefill import ANSWER_TOKENS
from corecontext.inference.sampling import InvalidLogits
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.integrations.hf.enabling import handle_of
from corecontext.ops.triton import rotate

pytestmark = pytest.mark.usefixtures("default_device")
CONFIG = CCAConfig.paper(5, 13)
LENGTHS = (41, 22, 3, 30)


@pytest.fixture
def model(default_device):
    model = tiny_model()
    with corecontext.enabled(model, CONFIG):
        yield model


def ragged(lengths=LENGTHS, seed=0):
    """Rows of these lengths, padded on the left, and their mask."""
    rows = [tokens(1, n, seed=100 * seed + n) for n in lengths]
    ids = torch.cat([pad(row, (max(lengths) - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (max(lengths) - row.shape[1], 0)) for row in rows])
    return ids, mask, rows


def recompute(model, ids, count):
    """Greedy tokens of one row by full forwards without any cache."""
    made = []
    with torch.no_grad():
        for _ in range(count):
            made.append(int(model(ids, use_cache=False).logits[0, -1].argmax()))
            ids = torch.cat((ids, torch.tensor([[made[-1]]], device=ids.device)), 1)
    return made


def generated(model, ids, mask=None, **options):
    """What model.generate makes."""
    out = model.generate(
        ids, attention_mask=mask if mask is not None else torch.ones_like(ids), **options
    )
    return out[:, ids.shape[1] :].tolist()


# The same tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_generate_and_full_forward_agree(family):
    model = tiny_model(family)
    ids, mask, rows = ragged()
    with corecontext.enabled(model, CONFIG):
        expected = [recompute(model, row, 12) for row in rows]
        assert generated(model, ids, mask, max_new_tokens=12, do_sample=False) == expected
        for static in (None, True):
            engine = Engine(model, static=static, chunk_size=11)
            assert engine.generate(ids, mask, max_new_tokens=12) == expected


@pytest.mark.parametrize("chunk_size", [None, 1, 7])
def test_short_requests_run_under_full_attention(chunk_size):
    model = tiny_model()
    ids, mask, rows = ragged()
    expected = [recompute(model, row, 12) for row in rows]
    config = CCAConfig(group_size=2, window_size=3, sink_size=0, fetch_groups=1)
    with corecontext.enabled(model, config):
        engine = Engine(model, chunk_size=chunk_size)
        for _ in range(2):  # the second request is in the buffers of the first
            assert engine.generate(ids, mask, max_new_tokens=12) == expected
        padded = (ids[1:2], mask[1:2])  # all rows begin with padding
        with engine.stream(*padded, max_new_tokens=12) as stream:
            made = [next(stream)[0], next(stream)[0]]
            assert stream.session.full_attention and stream.window_size == 3
            stream.configure(window_size=2)  # changes nothing: steps see all tokens
            assert made + [token for (token,) in stream] == expected[1]
            assert stream.key.config.window_size == 2
        assert engine.host_bytes_used == engine.host_bytes_kept == 0
        for changes in ({"prefill": "fetch"}, {"cache_dtype": "int8"}, {"fetch_groups": 0}):
            handle_of(model).configure(**changes)
            stream = Engine(model).stream(ids[3:], max_new_tokens=2)
            next(stream)
            assert not stream.session.full_attention, changes
            handle_of(model).configure(**config.to_dict())
    layer = FullLayer(8, torch.zeros(1, dtype=torch.long), fixed=False)
    q = torch.ones(1, 2, 5, 4)
    layer.attend(q, q, q)
    assert layer.nbytes == layer.allocated_bytes * 5 // 8
    with pytest.raises(ValueError, match="^the full cache must hold at most max_length 8 tokens"):
        layer.attend(q, q, q)


def test_short_requests_keep_the_softcap():
    """Of a model all of whose layers see the whole past."""
    model = tiny_model("gemma2", layer_types=["full_attention"] * 2, attn_logit_softcapping=0.5)
    ids = tokens(1, 24)
    expected = recompute(model, ids, 8)
    with corecontext.enabled(model, CCAConfig(group_size=2, window_size=3, fetch_groups=99)):
        assert not handle_of(model).hybrid
        assert Engine(model).generate(ids, max_new_tokens=8) == [expected]


@pytest.mark.parametrize("g, s", [(1, 9), (5, 13), (16, 10), (16, 33), (4, 8)])
def test_any_chunk_size_and_setting(model, g, s):
    ids, mask, _ = ragged()
    handle, before = handle_of(model), handle_of(model).config
    handle.configure(group_size=g, window_size=s)
    try:
        expected = generated(model, ids, mask, max_new_tokens=20, do_sample=False)
    finally:
        handle.configure(**before.to_dict())
    for chunk_size in (None, 1, 2, 7, 40, 41):
        engine = Engine(model, static=True, chunk_size=chunk_size)
        made = engine.generate(ids, mask, max_new_tokens=20, group_size=g, window_size=s)
        assert made == expected, chunk_size
        assert handle.config == CONFIG


def test_prefill_gives_the_logits_of_one_pass(model):
    ids, mask, rows = ragged()
    for chunk_size in (1, 6, 41, 1000):
        seen = []
        logits, cache, positions = prefill(
            model, ids, mask, chunk_size=chunk_size, on_chunk=seen.append
        )
        assert positions.tolist() == list(LENGTHS) and cache.get_seq_length() == 41
        assert seen[-1] == 41
        assert seen == sorted(seen)
        assert chunk_size != 6 or seen == [6, 12, 18, 24, 30, 36, 41]
        for row, own in zip(rows, logits):
            with torch.no_grad():
                torch.testing.assert_close(
                    own, model(row, use_cache=False).logits[0, -1], rtol=1e-4, atol=1e-4
                )


def test_prefill_of_full_attention_into_any_cache():
    model = tiny_model()
    ids, mask, rows = ragged()
    for cache in (None, DynamicCache()):
        logits = prefill(model, ids, mask, cache=cache, chunk_size=9).logits
        for row, own in zip(rows, logits):
            with torch.no_grad():
                torch.testing.assert_close(own, model(row).logits[0, -1], rtol=1e-4, atol=1e-4)
    made = Engine(model, static=True).generate(ids, mask, max_new_tokens=9)
    assert made == generated(model, ids, mask, max_new_tokens=9, do_sample=False)


def test_the_head_runs_once_on_one_token(model):
    shapes = []
    hook = model.lm_head.register_forward_pre_hook(
        lambda module, args: shapes.append(list(args[0].shape))
    )
    prefill(model, tokens(2, 40), chunk_size=7)
    hook.remove()
    assert shapes == [[2, 1, 48]]


@pytest.mark.parametrize("settings", [{}, {"head_group_sizes": (4, 8)}])
def test_a_prompt_in_chunks_takes_host_memory_once(default_device, monkeypatch, settings):
    """Before, each chunk pinned memory for twice the tokens before it, and moved them there."""
    lengths = []

    def zeros(shape, dtype, device):
        lengths.append(shape[2])
        return torch.zeros(shape, dtype=dtype, device=device)

    monkeypatch.setattr(host_store, "host_zeros", zeros)
    model, ids = tiny_model(), tokens(2, 50)
    config = CCAConfig(
        4, 8, sink_size=4, prefill="fetch", fetch_groups=2, store="host", fetch_slots=0, **settings
    )
    with corecontext.enabled(model, config), torch.no_grad():
        read = prefill(model, ids, chunk_size=9)
        # The first room is that of no tokens.
        assert {length for length in lengths if length} == {50 + ANSWER_TOKENS}
        token = ids[:, -1:]
        for position in range(50, 53):
            model(token, **with_cache(read.cache), position_ids=torch.tensor([[position]]))
        assert max(lengths) == 50 + ANSWER_TOKENS and lengths.count(max(lengths)) % 2 == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks what waits for the device")
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_a_chunk_does_not_wait_for_the_device_in_every_layer(default_device, static):
    ids = tokens(1, 900).to(default_device)

    def waits(layers):
        with corecontext.enabled(
            model := tiny_model("llama", num_hidden_layers=layers, max_position_embeddings=1000),
            CCAConfig.paper(8, 64),
        ):
            cache = (
                StaticCache(model.config, max_cache_len=1000)
                if static
                else DynamicCache(config=model.config)
            )
            for _ in range(2):  # kernels are compiled in the first
                cache.reset()
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    try:
                        prefill(model, ids, cache=cache, chunk_size=300)
                    finally:
                        torch.cuda.set_sync_debug_mode("default")
            return sum("synchroniz" in str(one.message) for one in caught)

    assert waits(2) == waits(6)


def test_num_groups_becomes_the_group_size_of_the_prompt():
    model = tiny_model()
    with corecontext.enabled(model, CCAConfig.paper(window_size=13, num_groups=4)):
        ids = tokens(2, 41)
        stream = Engine(model, static=True, chunk_size=6).stream(ids, max_new_tokens=12)
        assert (stream.group_size, stream.window_size) == (7, 13)
        made = [list(row) for row in zip(*stream)]
        assert made == generated(model, ids, max_new_tokens=12, do_sample=False)
        assert prefill(model, ids).cache.layers[0].compact.group_size == 7
        with pytest.raises(ValueError, match="^num_groups must be used with rows of one length"):
            Engine(model, static=True).stream(*ragged()[:2], max_new_tokens=1)


# Streams


def test_tokens_stream_in_order_and_no_step_is_wasted(model, monkeypatch):
    from corecontext.inference import session

    steps = []
    original = session.Session.step
    monkeypatch.setattr(
        session.Session, "step", lambda self, kind: steps.append(kind) or original(self, kind)
    )
    ids, mask, _ = ragged()
    engine = Engine(model, static=True)
    whole = engine.generate(ids, mask, max_new_tokens=9)
    steps.clear()
    stream = engine.stream(ids, mask, max_new_tokens=9)
    assert steps == [] and stream.made == 0  # nothing runs before it is asked for
    for i, step in enumerate(stream):
        assert step == [row[i] for row in whole]
        if not ids.is_cuda:
            assert len(steps) == i
    assert len(steps) == 8 and list(stream) == []


def test_a_stream_left_early_frees_its_session(model):
    engine = Engine(model, static=True)
    with engine.stream(tokens(1, 30), max_new_tokens=50) as stream:
        next(stream), next(stream)
        assert engine.cache_bytes_used > 0 and engine.cache_bytes_kept == 0
    assert engine.cache_bytes_used == 0 and engine.cache_bytes_kept > 0 and list(stream) == []
    engine.clear()
    assert engine.cache_bytes_kept == 0


def test_two_streams_with_other_settings_at_once(model):
    engine, ids = Engine(model, static=True), tokens(1, 40)
    options = [{"group_size": 5, "window_size": 13}, {"group_size": 3, "window_size": 20}, {}]
    alone = [engine.generate(ids, max_new_tokens=15, **one)[0] for one in options]
    assert alone[0] != alone[1]
    streams = [engine.stream(ids, max_new_tokens=15, **one) for one in options]
    assert [list(row) for row in zip(*([x[0] for x in steps] for steps in zip(*streams)))] == alone
    assert handle_of(model).config == CONFIG


def test_eos_ends_rows_one_by_one(model):
    ids, mask, _ = ragged()
    engine = Engine(model, static=True)
    free = engine.generate(ids, mask, max_new_tokens=25)
    eos = [free[0][4], free[1][9]]
    expected = [
        row[: min((i for i, t in enumerate(row) if t in eos), default=len(row)) + 1] for row in free
    ]
    assert engine.generate(ids, mask, max_new_tokens=25, eos_token_id=eos) == expected
    model.generation_config.eos_token_id = eos
    try:
        assert engine.generate(ids, mask, max_new_tokens=25) == expected
        longest = max(map(len, expected))
        assert generated(model, ids, mask, max_new_tokens=25, do_sample=False) == [
            row + [0] * (longest - len(row)) for row in expected
        ]
        assert engine.generate(ids, mask, max_new_tokens=25, eos_token_id=[]) == free
        steps = list(engine.stream(ids, mask, max_new_tokens=25))
    finally:
        model.generation_config.eos_token_id = None
    assert [[step[i] for step in steps if step[i] is not None] for i in range(4)] == expected
    assert all(
        (steps[n][i] is None) == (n >= len(expected[i]))
        for n in range(len(steps))
        for i in range(4)
    )


class Letters:
    """A tokenizer whose token n is a letter or two."""

    def __repr__(self):  # pytest names tests by it: the same in every process
        return "Letters()"

    def decode(self, ids, **options):
        return "".join(chr(97 + i % 26) * (1 + i % 2) for i in ids)


def test_stop_strings_end_with_the_token_that_completes_them(model):
    ids, engine = tokens(2, 40), Engine(model, static=True)
    free = engine.generate(ids, max_new_tokens=30)
    for first, last in ((7, 11), (20, 20), (0, 2)):
        stop = Letters().decode(free[0][first : last + 1])
        made = engine.generate(
            ids, max_new_tokens=30, stop_strings=["#", stop], tokenizer=Letters()
        )
        for row, own in zip(free, made):
            ends = (n for n in range(1, 31) if stop in Letters().decode(row[:n]))
            assert own == row[: next(ends, 30)]
    # One as it is.
    assert engine.generate(ids, max_new_tokens=30, stop_strings=stop, tokenizer=Letters()) == made


def test_sampling_is_reproducible_and_that_of_generate(model):
    ids, engine = tokens(1, 40), Engine(model, static=True)
    for sampling, options in (
        (Sampling(1.5), {"temperature": 1.5, "top_k": 0}),
        (Sampling(0.8, top_k=10), {"temperature": 0.8, "top_k": 10}),
        (Sampling(2.0, top_p=0.7), {"temperature": 2.0, "top_k": 0, "top_p": 0.7}),
        (Sampling(1.3, 40, 0.9), {"temperature": 1.3, "top_k": 40, "top_p": 0.9}),
    ):
        made = [
            engine.generate(ids, max_new_tokens=20, sampling=sampling, seed=seed)
            for seed in (3, 3, 4)
        ]
        assert made[0] == made[1] != made[2]
        if not ids.is_cuda:
            torch.manual_seed(3)
            assert made[0] == generated(model, ids, max_new_tokens=20, do_sample=True, **options)
    assert engine.generate(
        ids, max_new_tokens=20, sampling=Sampling(1.5, top_k=1)
    ) == engine.generate(ids, max_new_tokens=20)


def test_a_row_with_its_own_seed_does_not_depend_on_its_neighbours(model):
    ids, mask, rows = ragged()
    engine, sampling = Engine(model, static=True), Sampling(1.2, top_k=30)
    together = engine.generate(ids, mask, max_new_tokens=15, sampling=sampling, seed=[5, 6, 7, 8])
    for row, own, seed in zip(rows, together, (5, 6, 7, 8)):
        assert own == engine.generate(row, max_new_tokens=15, sampling=sampling, seed=seed)[0]


def test_sampled_frequencies_are_the_probabilities():
    from corecontext.inference.sampling import Sampler

    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).expand(20000, 5)
    for sampling, kept in (
        (Sampling(1.3), 5),
        (Sampling(1.3, top_k=3), 3),
        (Sampling(1.3, top_p=0.75), 3),
    ):
        sampler = Sampler(logits.device, 1)
        sampler.start(sampling, [0], 5)
        found = sampler.choose(logits, sampling.kind).flatten().bincount(minlength=5) / 20000
        expected = (logits[0] / 1.3).softmax(-1) * (torch.arange(5) < kept)
        torch.testing.assert_close(found, expected / expected.sum(), rtol=0, atol=0.015)


def test_a_top_k_beyond_the_vocabulary_is_every_token():
    from corecontext.inference.sampling import Sampling, choose_rows

    def chosen(top_k, top_p):
        generators = [torch.Generator("cpu").manual_seed(row) for row in range(2)]
        logits = torch.linspace(0, 1, 10, device="cpu").repeat(2, 1)
        return choose_rows(logits, [Sampling(1.0, top_k, top_p)] * 2, generators).tolist()

    assert chosen(50, 1.0) == chosen(10, 1.0) == chosen(None, 1.0)
    assert chosen(50, 0.5) == chosen(10, 0.5) == chosen(None, 0.5)


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    """At an exactly reached bound as transformers does: 0.5 of two equal tokens is one of them."""
    from transformers import TopPLogitsWarper

    from corecontext.inference.sampling import _kept

    for logits, top_p, count in (
        ([0.0, 0.0], 0.5, 1),
        ([0.0, 0.0], 0.51, 2),
        ([0.0, 0.0, 0.0, 0.0], 0.5, 2),
        ([0.0, 0.0, 0.0, 0.0], 1.0, 4),
        ([5.0, 0.0], 1e-9, 1),
    ):
        logits = torch.tensor([logits])
        kept = _kept(logits, torch.tensor(logits.shape[1]), torch.tensor(top_p))
        assert int(kept.sum()) == count
        assert int(TopPLogitsWarper(top_p)(None, logits).isfinite().sum()) == count


@pytest.mark.parametrize("sampling", [None, Sampling(1.2), Sampling(1.2, 5, 0.5)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_end_a_request(model, monkeypatch, sampling, bad):
    """The host sees it with the token that it reads anyway; a step ahead is fed a valid token."""
    engine, fed = Engine(model, static=True), []

    def forward(tokens, **options):
        out = model(tokens, **options)
        fed.append(tokens.clone())
        if len(fed) >= 2:
            out.logits[0, -1, 7] = bad
        return out

    monkeypatch.setattr(engine.fused, "step", forward)
    ids = tokens(2, 40)
    with engine.stream(ids, max_new_tokens=9, sampling=sampling, eos_token_id=[]) as stream:
        assert [None not in next(stream) for _ in range(2)] == [True, True]
        session = stream.session
        session.step(stream.sampling.kind)
        session.step(stream.sampling.kind)
        assert session.chosen[0] == -1 and session.chosen[1] >= 0
        assert all(int(x.min()) >= 0 for x in [*fed, session.tokens])
        stream._start_copy(session)
        with pytest.raises(InvalidLogits, match="^the model's largest logit must be a finite numb"):
            stream._read()
    with torch.no_grad():
        model.lm_head.weight[3] = bad
    with pytest.raises(InvalidLogits):
        engine.generate(ids, max_new_tokens=1, sampling=sampling)
    assert not engine.cache_bytes_used and not engine.cache_bytes_kept


def test_settings_of_generate_are_taken_over():
    from transformers import GenerationConfig

    take = Sampling.from_generation_config
    assert take(GenerationConfig()) == Sampling()
    assert take(GenerationConfig(do_sample=True)) == Sampling(1.0, 50)
    assert take(GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=0)) == Sampling(
        0.6, None, 0.9
    )
    assert take(GenerationConfig(), do_sample=True, temperature=2.0) == Sampling(2.0, 50)


# Elastic g and s


@pytest.mark.parametrize("at", [0, 1, 12])
@pytest.mark.parametrize("static", [False, True])
def test_a_shrunk_window_equals_a_model_that_shrinks(model, at, static):
    """Against generate()'s growing cache, shrunk at the same token."""
    ids, mask, _ = ragged()
    stream = Engine(model, static=static, max_length=80).stream(ids, mask, max_new_tokens=25)
    made = [next(stream) for _ in range(at)]
    ahead = 1 if ids.is_cuda and at > 1 else 0  # a GPU is one step ahead of what was read
    stream.configure(group_size=5, window_size=4)
    made += list(stream)
    assert stream.window_size == 4

    handle = handle_of(model)
    try:
        if at == 0:
            handle.configure(window_size=4)
        out = prefill(model, ids, mask)
        token, positions, expected = out.logits.argmax(-1), out.positions, []
        for n in range(25):
            expected.append(token.tolist())
            if n + 1 == at + ahead:
                handle.configure(window_size=4)
                for layer in out.cache.layers:
                    layer.compact.shrink_window(4)
            with torch.no_grad():
                logits = model(
                    token[:, None], **with_cache(out.cache), position_ids=(positions + n)[:, None]
                ).logits
            token = logits[:, -1].argmax(-1)
    finally:
        handle.configure(**CONFIG.to_dict())
    assert made == expected


def test_g_stays_and_s_only_shrinks(model):
    engine = Engine(model, static=True)
    stream = engine.stream(tokens(1, 40), max_new_tokens=25)
    next(stream), next(stream)
    used = engine.cache_bytes_used
    with pytest.raises(
        ValueError, match="^group_size must stay 5 for the whole request, got 4. Start a new"
    ):
        stream.configure(group_size=4)
    with pytest.raises(
        ValueError, match="^window_size must be at most 13 once set, got 14. Start a new"
    ):
        stream.configure(window_size=14)
    stream.configure(window_size=3)
    assert engine.cache_bytes_used < used
    stream.close()
    with pytest.raises(ValueError, match="^configure must be called on a running request"):
        stream.configure(window_size=2)
    plain = Engine(tiny_model()).stream(tokens(1, 9), max_new_tokens=2)
    with pytest.raises(ValueError, match="^configure must be used with CCA enabled"):
        plain.configure(window_size=2)


def test_policy_chooses_what_the_request_does_not(model):
    seen = []

    def policy(load):
        seen.append(load)
        return (4, 9) if load.queue_length > 3 else (2, 16)

    engine = Engine(model, static=True, policy=policy, cache_bytes_budget=10**6)
    ids = tokens(1, 30)
    for queue, chosen, expected in (
        (0, {}, (2, 16)),
        (9, {}, (4, 9)),
        (9, {"window_size": 5}, (4, 5)),
        (9, {"group_size": 7, "window_size": 5}, (7, 5)),
    ):
        stream = engine.stream(ids, max_new_tokens=3, queue_length=queue, **chosen)
        assert (stream.group_size, stream.window_size) == expected
        list(stream)
    assert seen[0] == Load(0, 0, 10**6, None, 30)
    assert seen[1].time_to_first_token > 0
    assert len(seen) == 3
    with engine.stream(ids, max_new_tokens=3) as stream:
        next(stream)
        assert engine.load().cache_bytes_used == stream.session.allocated_bytes > 0


# Limits


def test_too_long_prompts_are_refused(model):
    with pytest.raises(
        ValueError, match="^input_ids must fit the model's 256 positions, got 257 tokens. Shorten"
    ):
        prefill(model, tokens(1, 257))
    with pytest.raises(ValueError, match="256 positions, got 257 tokens"):  # of the longest row
        prefill(model, tokens(2, 257), torch.arange(257) >= torch.tensor([[0], [9]]))
    with pytest.raises(
        ValueError, match="^input_ids must fit the model's 256 positions, got 250 tokens and 7 new"
    ):
        Engine(model, static=True).stream(tokens(1, 250), max_new_tokens=7)
    ids, mask = tokens(1, 300), torch.ones(1, 300)
    mask[:, :50] = 0
    # Padding takes no positions.
    assert len(Engine(model, static=True).generate(ids, mask, max_new_tokens=6)[0]) == 6


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"input_ids": torch.ones(5)},
            r"input_ids must be \[B, L\] with at least one token a row, got shape \[5\]",
        ),
        ({"input_ids": torch.ones(2, 0)}, r"input_ids must be \[B, L\]"),
        (
            {"attention_mask": torch.ones(1, 8)},
            r"attention_mask must have the shape of input_ids \[2, 8\], got \[1, 8\]",
        ),
        (
            {"attention_mask": torch.tensor([[1] * 8, [0, 1, 0] + [1] * 5])},
            "attention_mask must have padding only on the left, got otherwise in row 1",
        ),
        (
            {"attention_mask": torch.tensor([[1] * 7 + [0], [1] * 8])},
            ".*on the left, got otherwise in row 0",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (
            {"max_new_tokens": 33},
            "max_length must hold prompt and answer, got 40 for 8 and 33 tokens",
        ),
        ({"stop_strings": ["a"]}, "tokenizer must be given with stop_strings"),
        ({"stop_strings": [""], "tokenizer": Letters()}, "stop_strings must not be empty"),
        ({"seed": [1, 2, 3]}, "seed must be one number or one for each of 2 rows, got 3"),
        (
            {"seed": 2**64},
            "seed must be from -2\\*\\*63 to 2\\*\\*63 - 1, got 18446744073709551616",
        ),
        ({"input_ids": tokens(2, 8) + 10**6}, "input_ids must be from 0 to "),
        ({"input_ids": tokens(2, 8) - 10**6}, "input_ids must be from 0 to "),
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"window_size": -1}, "window_size must be at least 1"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused(model, arguments, message):
    options = {"input_ids": tokens(2, 8), "max_new_tokens": 2, **arguments}
    options["input_ids"] = options["input_ids"].to(model.device)
    with pytest.raises(ValueError, match=f"^{message}"):
        Engine(model, static=True, max_length=40).stream(**options)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input_ids": [[1, 2]]}, "input_ids must be a tensor \\[B, L\\], got list"),
        ({"input_ids": tokens(2, 8).float()}, "input_ids must be integers, got torch.float32"),
        ({"attention_mask": [[1] * 8]}, "attention_mask must be a tensor \\[B, L\\], got list"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer, got 2.5"),
        ({"seed": "a"}, "seed must be an integer or one for each row, got 'a'"),
        ({"seed": None}, "seed must be an integer or one for each row, got None"),
        ({"sampling": {"temperature": 1}}, "sampling must be a Sampling, got {"),
        (
            {"eos_token_id": "</s>"},
            "eos_token_id must be token numbers, got '</s>'. Use stop_strings",
        ),
        ({"eos_token_id": [3, "</s>"]}, "eos_token_id must be token numbers, got \\[3, '</s>'\\]"),
    ],
    ids=str,
)
def test_requests_of_another_kind_are_refused(model, arguments, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        Engine(model).stream(**{"input_ids": tokens(2, 8), "max_new_tokens": 2, **arguments})


@pytest.mark.parametrize(
    "sampling", [Sampling(1e-320), Sampling(1e-6), Sampling(1.0, top_p=1e-320)], ids=str
)
def test_numbers_that_float32_does_not_have_take_the_likeliest_token(model, sampling):
    ids = tokens(2, 40)
    assert Engine(model).generate(ids, max_new_tokens=5, sampling=sampling) == Engine(
        model
    ).generate(ids, max_new_tokens=5)


def test_a_tensor_of_tokens_may_end_a_row(model):
    ids, engine = tokens(1, 40), Engine(model)
    free = engine.generate(ids, max_new_tokens=6)[0]
    for last in (torch.tensor(free[2]), torch.tensor([free[2]])):
        ended = engine.generate(ids, max_new_tokens=6, eos_token_id=last)[0]
        assert ended == free[: free.index(free[2]) + 1]


def test_one_text_may_end_a_row(model):
    ids, engine = tokens(1, 40), Engine(model)
    free = engine.generate(ids, max_new_tokens=6)[0]
    stop = Letters().decode(free[:3])
    assert engine.generate(ids, max_new_tokens=6, stop_strings=stop, tokenizer=Letters()) == [
        free[:3]
    ]


def test_wrong_settings_are_refused(model):
    for options, message in (
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"keep": -1}, "keep must be"),
        ({"fuse": "no"}, "fuse must be None, 'kernels' or 'compile'"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            Engine(model, static=True, **options)
    with pytest.raises(ValueError, match="^chunk_size must be at least 1, got 0"):
        prefill(model, tokens(1, 4), chunk_size=0)
    filled = prefill(model, tokens(1, 4)).cache
    with pytest.raises(ValueError, match="^cache must be empty, got 4 tokens"):
        prefill(model, tokens(1, 4), cache=filled)
    plain = tiny_model()
    with pytest.raises(ValueError, match="^policy must be used with CCA enabled"):
        Engine(plain, policy=TablePolicy())
    engine = Engine(plain)
    with pytest.raises(
        ValueError, match="^group_size, window_size and fetch_groups must be used with CCA"
    ):
        engine.stream(tokens(1, 4), max_new_tokens=1, group_size=4)
    with corecontext.enabled(plain), pytest.raises(ValueError, match="^model must stay as it was"):
        engine.stream(tokens(1, 4), max_new_tokens=1)


def test_running_out_of_memory_names_what_would_fit(model, monkeypatch):
    assert "About chunk_size=409 would fit." in does_not_fit(1, 9000, 1024, 0, 2**30, 2**31, 1.0)
    # 1 GiB free, half of it for a chunk: 2**29 / 2**17 = 4096 tokens of cache
    message = does_not_fit(4, 6000, 1024, 3072, 2**30, 2**29, 2.0**17)
    assert message.endswith(
        "About 4096 tokens a row fit with 4 rows, or 2 rows of 6000. Or take a larger group_size "
        "or a smaller chunk_size."
    )
    assert message.startswith(
        "input_ids must fit the device's memory, got 4 x 6000 tokens in chunks of 1024: it ran "
        "out after 3072 tokens a row with 1.00 GiB free before."
    )
    assert "about 512, or fewer rows" in does_not_fit(1, 6000, 1024, 0, 2**30, 2**20, 1.0)
    assert cache_bytes_per_token(model.config, torch.bfloat16) == 2 * 2 * 2 * 16 * 2 / 5
    assert cache_bytes_per_token(tiny_model().config, torch.float32) == 2 * 2 * 2 * 16 * 4

    calls, original = [], model.model.forward

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*args, **kwargs)

    engine = Engine(model, static=True, chunk_size=8)
    expected = engine.generate(tokens(1, 40), max_new_tokens=4)
    monkeypatch.setattr(model.model, "forward", failing)
    with pytest.raises(
        MemoryError,
        match="^input_ids must fit the device's memory, got 1 x 40 tokens in chunks of 8: "
        "it ran out after 16 tokens",
    ):
        engine.generate(tokens(1, 40), max_new_tokens=4)
    assert engine.cache_bytes_used == engine.cache_bytes_kept == 0  # what was half filled is gone
    assert engine.generate(tokens(1, 40), max_new_tokens=4) == expected


def test_lengths_round_up_by_an_eighth_at_most():
    for length in [*range(1, 3000), 10**6]:
        assert length <= rounded_up(length) <= max(length + 63, length * 9 / 8)
    assert len({rounded_up(n) for n in range(512, 4096)}) <= 25


# Reuse


def test_sessions_are_reused_with_their_buffers(model):
    engine, places = Engine(model, static=True), set()
    for seed in range(4):
        with engine.stream(tokens(2, 40 + seed, seed=seed), max_new_tokens=3) as stream:
            next(stream)
            places.add(stream.session.cache.layers[0].compact.keys.data_ptr())
    assert len(places) == 1


def test_sizes_beyond_the_text_are_cut_to_it(model):
    """They take no memory, and the text is read by full attention."""
    ids = tokens(1, 55)
    full = Engine(tiny_model()).generate(ids, max_new_tokens=9, eos_token_id=[])
    for sizes in ({"window_size": 10**9}, {"group_size": 10**9}):
        for static in (False, True):
            engine = Engine(model, static=static)
            made = engine.generate(ids, max_new_tokens=9, eos_token_id=[], **sizes)
            assert made == full and engine.cache_bytes_kept < 2**20


def test_a_smaller_window_captures_its_steps_anew(model, monkeypatch):
    """The buffers move: a graph from before would write into memory that others use."""
    made = []

    class Captured:
        def __init__(self, function, **options):
            made.append(self)
            self.function = function

        def __call__(self):
            self.function()

    monkeypatch.setattr(sessions, "CapturedStep", Captured)
    with Engine(model, static=True).stream(tokens(1, 40), max_new_tokens=9) as stream:
        next(stream)
        stream.session.capture = True
        for _ in range(2):
            next(stream)
        assert len(made) == 1
        stream.configure(window_size=4)
        for _ in range(2):
            next(stream)
        assert len(made) == 2


def test_a_cache_that_is_dropped_is_freed_at_once(model, monkeypatch):
    """With its captured steps, of which it is the owner."""

    class Captured:
        def __init__(self, function, **options):
            self.function = function

        def __call__(self):
            self.function()

    monkeypatch.setattr(sessions, "CapturedStep", Captured)
    engine = Engine(model, static=True)
    with engine.stream(tokens(1, 40), max_new_tokens=9) as stream:
        next(stream)
        stream.session.capture = True
        list(stream)
    [session] = engine._idle.values()
    assert session._captured
    alive = weakref.ref(session.cache.layers[0].compact)
    del stream, session
    gc.disable()
    try:
        engine.clear()
        assert alive() is None
    finally:
        gc.enable()


def test_fused_modules_change_no_token(model, compile_by):
    """torch.compile with a backend that only traces: what is compiled is found, used, and put
    back."""
    compile_by("aot_eager")
    engine, ids = Engine(model, static=True, chunk_size=10), tokens(1, 40)
    expected = engine.generate(ids, max_new_tokens=6)
    engine.fused = Fused(model)
    count = len(engine.fused._modules)
    assert count == 2 * 3 + 1  # an MLP and two norms a layer, and the last norm
    used = []
    engine.fused._modules = [
        (module, lambda *a, module=module: used.append(module) or module._call_impl(*a))
        for module, _ in engine.fused._modules
    ]
    assert engine.generate(ids, max_new_tokens=6) == expected
    assert len(used) == 4 * count
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_a_models_file_gets_its_own_rotation_back(model, monkeypatch):
    from transformers.models.llama import modeling_llama as file

    own, made = file.apply_rotary_pos_emb, []
    monkeypatch.setattr(fuse, "_rotating", {})
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: made.append(function) or function
    )
    first, second = Fused(model), Fused(model)
    with first:
        assert file.apply_rotary_pos_emb is not own and made.count(own) == 1
        with second:
            assert made.count(own) == 1  # compiled already
        assert file.apply_rotary_pos_emb is not own
    assert file.apply_rotary_pos_emb is own
    with first:
        assert file.apply_rotary_pos_emb is not own and made.count(own) == 1  # for good
    assert file.apply_rotary_pos_emb is own


@pytest.fixture
def tracing(compile_by):
    """torch.compile that traces and runs what it traced; counts graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    compile_by(counter)
    return counter


def test_a_fused_step_is_one_graph_and_changes_no_token(default_device, tracing):
    """With one layer, since each further layer traces the same code again."""
    ids, mask, _ = ragged()
    model = tiny_model(num_hidden_layers=1)
    with corecontext.enabled(model, CONFIG):
        plain = Engine(model, static=True)
        expected = plain.generate(ids, mask, max_new_tokens=12)
        engine = Engine(model, fuse="compile", chunk_size=16)
        engine.fused._modules, engine.fused._files = [], set()  # the step alone
        assert engine.static and engine.generate(ids, mask, max_new_tokens=12) == expected
        assert tracing.frame_count == 1
        assert engine.generate(ids, mask, max_new_tokens=12) == expected
        assert tracing.frame_count == 1  # compiled once
        other = {"max_new_tokens": 5, "group_size": 3, "window_size": 9}
        assert engine.generate(ids, mask, **other) == plain.generate(ids, mask, **other)
        growing = Engine(model, fuse="compile", static=False)
        assert growing.generate(ids, mask, max_new_tokens=12) == expected


def test_what_cannot_be_compiled_runs_as_it_is(model, monkeypatch):
    from torch._dynamo.exc import Unsupported

    calls = []

    def broken(*args, **options):
        calls.append(1)
        raise Unsupported("no compiler here\nand more")

    ids, expected = (
        tokens(1, 40),
        Engine(model, static=True).generate(tokens(1, 40), max_new_tokens=6),
    )
    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    monkeypatch.setattr(fuse, "_rotating", {})
    engine = Engine(model, fuse="compile")
    with pytest.warns(
        UserWarning,
        match="cannot be compiled, so it runs as it is, which is slower: no compiler here$",
    ) as seen:
        assert engine.generate(ids, max_new_tokens=6) == expected
    assert {str(one.message).split()[0] for one in seen} == {
        "LlamaForCausalLM",
        "LlamaMLP",
        "LlamaRMSNorm",
        "apply_rotary_pos_emb",
    }
    assert len(calls) == 7 + 2  # each module, the rotation and the step tried once
    assert engine.generate(ids, max_new_tokens=6) == expected and len(calls) == 9


@pytest.mark.parametrize(
    "family, has_plain_norms, rotates_halves",
    [
        *(("llama", True, True), ("qwen3", True, True), ("olmo2", True, False)),
        *(("gemma3", False, True), ("glm4", True, False), ("helium", True, False)),
    ],
)
def test_kernels_give_a_models_numbers(family, has_plain_norms, rotates_halves, monkeypatch):
    """Those that exist for norms and rotary; others stay the model's own."""
    model = tiny_model(family).half()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.uniform_(0.5, 1.5)
    ids = tokens(2, 23)
    monkeypatch.setattr(fuse, "_has_kernels", lambda model: True)
    monkeypatch.setattr(fuse, "_rotating", {})
    fused = Fused(model, "kernels")
    norms = [x for x in model.modules() if type(x).__name__.endswith("RMSNorm")]
    assert len(fused._modules) == has_plain_norms * len(norms)
    kernel = mock.Mock(wraps=rotate.rotate)
    monkeypatch.setattr(rotate, "rotate", kernel)
    with torch.no_grad():
        expected = model(ids).logits
        with fused:
            got = model(ids).logits
        assert torch.equal(fused.step(ids).logits, got)
        assert torch.equal(model(ids).logits, expected)  # the model as it was
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-2 * float(expected.abs().max()))
    if norms:  # whoever looks at a norm goes on seeing it
        seen = []
        norms[0].register_forward_hook(lambda *args: seen.append(args))
        with torch.no_grad(), fused:
            assert torch.equal(norms[0](torch.ones(1, len(norms[0].weight)).half()), seen[0][2])
    if rotates_halves:  # one probe, then each layer of both passes
        assert kernel.call_count == 1 + 2 * model.config.num_hidden_layers
    else:
        assert kernel.call_count <= 1


def test_norms_that_are_elsewhere_stay_the_models_own(monkeypatch):
    """Those of offloaded layers, whose forward brings their weights, and of other signatures."""
    model = tiny_model().half()
    monkeypatch.setattr(fuse, "_has_kernels", lambda model: True)
    norms = [x for x in model.modules() if type(x).__name__.endswith("RMSNorm")]
    norms[0].weight = torch.nn.Parameter(norms[0].weight.to("meta"))
    norms[1].forward = norms[1].forward  # as accelerate replaces it
    del norms[2].variance_epsilon
    fused = Fused(model, "kernels")
    assert [x for x, _ in fused._modules] == norms[3:]
    norms[3]._compiled_call_impl = own = mock.Mock()  # compiled after the engine was made
    with fused:
        with fused:
            assert norms[3]._compiled_call_impl is own is not norms[4]._compiled_call_impl
        assert norms[4]._compiled_call_impl is not None
    assert norms[3]._compiled_call_impl is own and norms[4]._compiled_call_impl is None
    q, table = torch.zeros(70000, 1, 1, 16).half(), torch.zeros(1, 1, 16).half()
    assert "more heads" in rotate.unsupported_reason(q, q, table, table)


@pytest.mark.slow
def test_compiled_modules_and_steps_change_no_token(model):
    ids, mask, _ = ragged()
    expected = Engine(model, static=True).generate(ids, mask, max_new_tokens=12)
    torch._dynamo.reset()
    assert (
        Engine(model, fuse="compile", chunk_size=16).generate(ids, mask, max_new_tokens=12)
        == expected
    )
