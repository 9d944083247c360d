"""The parts of inference by themselves: sizes, limits, sampling, sessions, streams, the choice of
`generate`."""

import gc
import importlib
import math
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from families import tiny_model, tokens
from torch import Tensor

import corecontext
from corecontext import CCAConfig, generation
from corecontext.files import UserError
from corecontext.generation import PLAIN, Continuation
from corecontext.inference import Engine, Load, Sampling, TablePolicy, chunk_size, limits, prefill
from corecontext.inference import engine as engine_module
from corecontext.inference import session as sessions
from corecontext.inference.policy import cut_to, settings_for, table_rows
from corecontext.inference.prefill import read_left_padding
from corecontext.inference.sampling import INVALID, Sampler, _kept, choose_rows
from corecontext.inference.session import SessionKey, configured
from corecontext.inference.stream import Generation
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.integrations.hf.enabling import handle_of
from corecontext.ops.fetch.prompt_rule import WHOLE_TOKENS

# The package has the function by the module's name.
prefilled = importlib.import_module("corecontext.inference.prefill")
pytestmark = pytest.mark.usefixtures("default_device")
CONFIG = CCAConfig.paper(5, 13)


@pytest.fixture
def model(default_device):
    model = tiny_model()
    with corecontext.enabled(model, CONFIG):
        yield model


# Settings


def test_settings_are_the_requests_else_the_policys_else_the_models():
    asked = []
    load = Load(3)

    def policy(load):
        asked.append(load)
        return 2, 6

    def chosen(g=None, s=None, config=CONFIG, policy=policy, length=30):
        return settings_for(config, g, s, length, policy, load)

    assert chosen(policy=None) == CONFIG and chosen() == CCAConfig.paper(2, 6) and asked == [load]
    assert chosen(3) == CCAConfig.paper(3, 6) and chosen(None, 9) == CCAConfig.paper(2, 9)
    assert len(asked) == 3 and chosen(3, 9) == CCAConfig.paper(3, 9) and len(asked) == 3
    assert chosen(3, policy=None) == CCAConfig.paper(3, 13)
    assert chosen(None, 4, policy=None).group_size == 5
    varied = CCAConfig.paper(5, 13, layer_group_sizes=(2, 3))
    assert chosen(config=varied) == varied.replace(window_size=6)
    by_length = CCAConfig.paper(window_size=10, num_groups=4)
    found = chosen(config=by_length, policy=None)
    assert (found.group_size, found.window_size, found.num_groups) == (5, 10, None)
    found = chosen(None, 2, config=by_length, policy=None)  # g follows the request's own s
    assert (found.group_size, found.window_size, found.num_groups) == (7, 2, None)
    assert chosen(9, config=by_length, policy=None) == CCAConfig.paper(9, 10)
    assert chosen(config=by_length) == CCAConfig.paper(2, 6)
    with pytest.raises(ValueError, match="^num_groups must be used with rows of one length"):
        chosen(config=by_length, policy=None, length=None)


def test_the_number_of_groups_fetched_is_the_requests_else_the_policys():
    config = CCAConfig.paper(5, 13, fetch_groups=6, prefill="fetch")

    def chosen(k=None, sizes=None, *, g=None, s=None, config=config):
        policy = (lambda load: sizes) if sizes else None
        return settings_for(config, g, s, 30, policy, Load(), k)

    assert chosen() == chosen(6) == chosen(sizes=(5, 13)) == config
    assert chosen(2) == config.replace(fetch_groups=2) == chosen(sizes=(5, 13, 2))
    assert chosen(sizes=(5, 13, 99)) == config and chosen(2, (5, 13, 3)).fetch_groups == 2
    # A request that chooses g and s leaves k to the policy.
    assert chosen(sizes=(1, 1, 3), g=5, s=13) == config.replace(fetch_groups=3)
    none = CCAConfig.paper(5, 13)
    assert chosen(0) == config.replace(fetch_groups=0)
    assert chosen(0, config=none) == chosen(sizes=(5, 13, 4), config=none) == none
    for k, rule in ((7, "at most the model's 6, got 7"), (-1, "at least 0, got -1")):
        with pytest.raises(ValueError, match=f"^fetch_groups must be {rule}"):
            chosen(k)
    with pytest.raises(ValueError, match="^fetch_groups must be at most the model's 0, got 1"):
        chosen(1, config=none)
    with pytest.raises(TypeError, match="^fetch_groups must be an integer, got True"):
        chosen(True)
    with pytest.raises(ValueError, match=r"^policy must give .*, got \(5, 13, 2, 1\)"):
        chosen(sizes=(5, 13, 2, 1))


def test_a_table_lowers_the_groups_fetched_before_it_touches_g_and_s():
    rows = table_rows(4, 64, 32)
    steps = (
        (0.5, 4, 64, 32),
        (0.65, 4, 64, 16),
        (0.8, 4, 64, 8),
        (0.9, 8, 32, 4),
        (1.0, 16, 16, 2),
    )
    assert rows == steps
    policy = TablePolicy(rows, queue_limit=100)
    found = [policy(Load(queue)) for queue in (0, 50, 60, 70, 85, 95, 400)]
    assert found == [row[1:] for row in (steps[0], *steps, steps[-1])]
    assert policy.sizes == [row[1:] for row in steps]
    assert [row[3] for row in table_rows(4, 64, 5)] == [5, 2, 1, 1, 1]


def test_sizes_are_cut_to_the_text_and_a_table_gives_its_rows():
    large = CCAConfig.pooling(50, 60, sink_size=70)
    assert cut_to(large, 55) == CCAConfig.pooling(50, 55, sink_size=55)
    assert cut_to(large, 40) == CCAConfig.pooling(40, 40, sink_size=40)
    assert cut_to(large, 99) == large
    varied = CCAConfig.paper(50, 60, layer_group_sizes=(90, 3))
    assert cut_to(varied, 20) == varied.replace(window_size=20)
    assert table_rows(3, 10) == ((0.5, 3, 10), (0.8, 6, 5), (1.0, 12, 2))
    assert table_rows(1, 2) == ((0.5, 1, 2), (0.8, 2, 1), (1.0, 4, 1))
    policy = TablePolicy(table_rows(3, 10), queue_limit=10, first_token_limit=2.0)
    assert policy.sizes == [(3, 10), (6, 5), (12, 2)]
    for load, pressure, sizes in (
        (Load(), 0, (3, 10)),
        (Load(5), 0.5, (3, 10)),
        (Load(8), 0.8, (6, 5)),
        (Load(9), 0.9, (12, 2)),
        (Load(99), 9.9, (12, 2)),
        (Load(1, 60, 100), 0.6, (6, 5)),
        (Load(1, 60, None), 0.1, (3, 10)),
        (Load(1, 10, 100, 1.2), 0.6, (6, 5)),
    ):
        assert policy.pressure(load) == pytest.approx(pressure) and policy(load) == sizes
    assert [Load(0, 5, budget).cache_share for budget in (None, 0, 10)] == [0, 0, 0.5]
    assert (TablePolicy().queue_limit, TablePolicy().first_token_limit) == (32, 30.0)
    assert TablePolicy().rows == table_rows(32, 160, 64)
    for wrong in ({"queue_limit": 0}, {"first_token_limit": 0.0}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be more than 0"):
            TablePolicy(**wrong)
    with pytest.raises(ValueError, match="^rows must rise in pressure"):
        TablePolicy(((0.8, 1, 1), (0.5, 1, 1)))


# Limits


def config_of(**fields):
    text = SimpleNamespace(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=3,
    )
    vars(text).update(fields)
    text.get_text_config = lambda decoder: text
    return text


FETCH = {"fetch_groups": 2, "fetch_index": "mean"}


def test_the_bytes_of_a_token():
    attention = (3 * 8 + 4 * 2) * 16
    assert (
        chunk_size.bytes_per_token(config_of(intermediate_size=100), torch.float16)
        == 2 * (3 * 64 + attention) + 8 * 64
    )
    assert (
        chunk_size.bytes_per_token(config_of(intermediate_size=1000), torch.float32)
        == 4 * (3 * 64 + 3 * 1000) + 8 * 64
    )
    assert chunk_size.bytes_per_token(config_of(), torch.float16) == 2 * (3 * 64 + 3 * 256) + 8 * 64
    experts = {"intermediate_size": 100, "moe_intermediate_size": 300, "num_experts_per_tok": 2}
    assert (
        chunk_size.bytes_per_token(config_of(**experts), torch.float16)
        == 2 * (3 * 64 + 3 * 600) + 8 * 64
    )
    for cca, expected in (
        (None, 2 * 3 * 2 * 32),
        ({"group_size": 4}, 2 * 3 * 2 * 32 / 4),
        ({"group_size": 4, "cache_dtype": "int8"}, 2 * 3 * 2 * 20 / 4),
        ({"group_size": 4, "cache_dtype": "auto"}, 2 * 3 * 2 * 32 / 4),
        ({"group_size": 4, "core_mass": True}, 3 * 2 * (2 * 32 + 4) / 4),
        ({"group_size": 4, "prefill": "full"}, 3 * 2 * (64 / 4 + 64)),
        # With fetch also raw tokens and the mean keys of groups, or slots and their table.
        ({"group_size": 4, **FETCH}, 3 * 2 * (64 / 4 + 64 + 32 / 4)),
        ({"group_size": 4, "prefill": "full", **FETCH}, 3 * 2 * (64 / 4 + 64 + 32 / 4)),
        ({"group_size": 4, "store": "host", **FETCH, "fetch_slots": 0}, 3 * 2 * (64 / 4 + 32 / 4)),
        (
            {"group_size": 4, "store": "host", "fetch_slots": 9, **FETCH},
            3 * 2 * (64 / 4 + 32 / 4 + 4 / 4),
        ),
    ):
        found = limits.cache_bytes_per_token(config_of(cca=cca), torch.float16)
        assert found == pytest.approx(expected, rel=1e-3)
    host = CCAConfig.paper(4, store="host", **FETCH)
    for dtype, itemsize in ((torch.float16, 2), (torch.float32, 4)):
        assert limits.host_bytes_of(config_of(), dtype, host, 10) == 3 * 2 * 10 * 32 * itemsize
    assert limits.host_bytes_of(config_of(), torch.float16, CCAConfig.paper(4), 10) == 0


def test_positions_are_the_larger_of_two_readings():
    for fields, limit in (
        ({}, None),
        ({"max_position_embeddings": 100}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": None}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": {"factor": 2.5}}, 250),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {"factor": 4.0, "original_max_position_embeddings": 20},
            },
            100,
        ),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {"full_attention": {"factor": 3.0}, "sliding_attention": {}},
            },
            300,
        ),
    ):
        assert limits.position_limit(config_of(**fields)) == limit
    config = config_of(max_position_embeddings=100)
    limits.check_length(config, 100)
    limits.check_length(config, 60, 40)
    limits.check_length(config_of(), 10**9)
    with pytest.raises(
        ValueError, match="^input_ids must fit the model's 100 positions, got 101 tok"
    ):
        limits.check_length(config, 101)
    with pytest.raises(ValueError, match="got 61 tokens and 40 new ones. Shorten"):
        limits.check_length(config, 61, 40)


def test_a_chunk_is_as_large_as_saturates_and_fits(monkeypatch):
    config, cuda = config_of(intermediate_size=100), torch.device("cuda")
    each = chunk_size.bytes_per_token(config, torch.float16)
    fake = mock.Mock()
    counts = {name: {"all": {"current": x}} for name, x in (("reserved", 70), ("allocated", 30))}
    counts = {f"{name}_bytes": count for name, count in counts.items()}
    fake.memory_stats_as_nested_dict.return_value = counts
    fake.mem_get_info.return_value = (1000, 5000)
    monkeypatch.setattr(chunk_size.torch, "cuda", fake)
    assert chunk_size.free_bytes(cuda) == 1040
    assert chunk_size.free_bytes(torch.device("cpu")) is None
    for fits, batch, size in ((511, 1, 255), (512, 1, 256), (1023, 1, 256), (1024, 1, 512)):
        monkeypatch.setattr(chunk_size, "free_bytes", lambda device, fits=fits: fits * each)
        assert chunk_size.choose_chunk_size(config, torch.float16, cuda, batch) == size
    for device, batch, size in (
        ("cuda", 1, 16384),
        ("cuda", 3, 5376),
        ("cpu", 1, 4096),
        ("cpu", 18, 227),
    ):
        monkeypatch.setattr(chunk_size, "free_bytes", lambda device: None)
        assert (
            chunk_size.choose_chunk_size(config, torch.float16, torch.device(device), batch) == size
        )
    # Each chunk reads all earlier raw tokens from host memory.
    for settings, size in (({}, 131072), ({"store": "device"}, 16384)):
        config.cca = CCAConfig(**{"fetch_groups": 8, "store": "host", **settings}).to_dict()
        assert chunk_size.choose_chunk_size(config, torch.float16, cuda, 1) == size
    for length, rounded in ((1, 64), (64, 64), (65, 128), (1024, 1024), (1025, 1152), (8193, 9216)):
        assert limits.rounded_up(length) == rounded


def test_memory_that_ran_out_is_explained():
    gib = 2**30

    def way_out(*given):
        return limits.does_not_fit(*given).partition("free before. ")[2]

    assert way_out(1, 100, 50, 0, gib, 2 * gib, 1.0) == "About chunk_size=20 would fit."
    assert way_out(1, 100, 2, 0, gib, 100 * gib, 1.0) == "About chunk_size=1 would fit."
    assert way_out(1, 100, 1, 0, gib, 2 * gib, gib / 50).startswith(
        "About 0 tokens a row fit with 1 row."
    )
    smaller = "Give a smaller chunk_size, about 25, or fewer rows."
    assert way_out(1, 100, 50, 0, gib, 0, gib / 100) == smaller
    assert way_out(1, 100, 50, 0, gib, 0, gib / 99.5).startswith(
        "About 99 tokens a row fit with 1 row. Or"
    )
    assert way_out(1, 100, 1, 0, gib, 0, 1.0) == smaller.replace("25", "1")
    rows = (
        "About 50 tokens a row fit with 4 rows, or 2 rows of 100. Or take a larger group_size or a"
    )
    assert way_out(4, 100, 50, 0, gib, gib // 2, gib / 100).startswith(rows)
    one = "About 25 tokens a row fit with 4 rows, or 1 row of 100. "
    assert way_out(4, 100, 50, 0, gib, gib // 2, gib / 50).startswith(one)
    config = config_of(intermediate_size=100)
    each = chunk_size.bytes_per_token(config, torch.float16) + 2 * 3 * 2 * 32
    for free, fits in ((50, 50), (99, 80)):
        message = limits.whole_does_not_fit(config, torch.float16, 100, free * each)
        assert f"got 100 tokens and ran out with {free * each / gib:.2f} GiB" in message
        assert f"About {fits} tokens fit at once. Shorten the prompt" in message


# Prompts


def test_padding_is_counted_and_stands_on_the_left():
    ids = torch.ones(3, 4, dtype=torch.long)
    mask = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    assert read_left_padding(ids, None) == [0, 0, 0] and read_left_padding(ids, mask) == [3, 0, 1]
    assert read_left_padding(ids.int(), mask.bool()) == [3, 0, 1]
    with pytest.raises(ValueError, match="got only padding in row 2. Leave empty prompts out"):
        read_left_padding(ids, mask * torch.tensor([[1], [1], [0]]))
    for row, wrong in (([1, 0, 1, 1], 1), ([0, 1, 1, 0], 1), ([1, 1, 1, 0], 1)):
        bad = mask.clone()
        bad[wrong] = torch.tensor(row)
        with pytest.raises(ValueError, match=f"only on the left, got otherwise in row {wrong}"):
            read_left_padding(ids, bad)
    for dtype in (torch.bool, torch.float32, torch.complex64):
        with pytest.raises(TypeError, match="^input_ids must be integers, got torch"):
            read_left_padding(ids.to(dtype), None)
    for shape in ((4,), (0, 4), (4, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"^input_ids must be \[B, L\]"):
            read_left_padding(torch.ones(shape, dtype=torch.long), None)
    with pytest.raises(ValueError, match="^attention_mask must have the shape of input_ids"):
        read_left_padding(ids, mask[:, :3])
    with pytest.raises(TypeError, match="^input_ids must be a tensor .* got NoneType"):
        read_left_padding(None, None)


def test_a_prompts_chunks_positions_and_masks(model, monkeypatch):
    calls = []
    original = prefilled.read_chunk

    def read(model, ids, mask, pads, cache, start, end, **options):
        calls.append((start, end, mask is None, pads))
        return original(model, ids, mask, pads, cache, start, end, **options)

    monkeypatch.setattr(prefilled, "read_chunk", read)
    ids, done = tokens(2, 10), []
    out = prefill(model, ids, torch.ones_like(ids), chunk_size=4, on_chunk=done.append)
    assert calls == [(0, 4, True, [0, 0]), (4, 8, True, [0, 0]), (8, 10, True, [0, 0])]
    assert done == [4, 8, 10] and out.positions.tolist() == [10, 10]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    calls.clear()
    out = prefill(model, ids, mask)
    assert calls == [(0, 10, False, [0, 3])] and out.positions.tolist() == [10, 7]
    calls.clear()
    with mock.patch.object(prefilled, "choose_chunk_size", mock.Mock(return_value=6)) as chosen:
        prefill(model, ids)
    assert [call[:2] for call in calls] == [(0, 6), (6, 10)]
    assert chosen.call_args.args == (model.config, model.dtype, ids.device, 2)
    with corecontext.enabled(
        by_length := tiny_model(), CCAConfig.paper(window_size=4, num_groups=2)
    ):
        calls.clear()
        with mock.patch.object(prefilled, "choose_chunk_size", mock.Mock(return_value=6)):
            prefill(by_length, ids)
        assert [call[:2] for call in calls] == [(0, 10)]  # it needs the whole prompt at once


def test_the_meter_measures_the_fullest_chunk_and_what_a_token_adds(model, monkeypatch):
    fake = mock.Mock()
    counts = [{"all": {"peak": 70, "current": 10}}, {"all": {"peak": 50, "current": 20}}]
    stats = [{"allocated_bytes": count} for count in counts]
    fake.memory_stats_as_nested_dict = mock.Mock(side_effect=stats)
    monkeypatch.setattr(prefilled, "free_bytes", lambda device: 5000)
    monkeypatch.setattr(prefilled.torch, "cuda", fake)
    explained = mock.Mock()
    monkeypatch.setattr(prefilled, "does_not_fit", explained)
    meter = prefilled._Meter("device")
    fake.reset_peak_memory_stats.assert_called_once_with("device")
    meter.explain(model, 2, 40, 16, 0, None)
    each = chunk_size.bytes_per_token(model.config, model.dtype)
    added = 2 * limits.cache_bytes_per_token(model.config, model.dtype)
    assert explained.call_args.args == (2, 40, 16, 0, 5000, 2 * 16 * each, added)
    meter.chunk_done()
    meter.chunk_done()
    monkeypatch.undo()
    cache = prefill(model, tokens(2, 30)).cache
    monkeypatch.setattr(prefilled, "does_not_fit", explained)
    meter.explain(model, 2, 40, 16, 30, cache)
    *_, chunk_bytes, token_bytes = explained.call_args.args
    assert chunk_bytes == 60  # the first chunk's
    # Without the ring: keys and values of 2 rows, 2 layers, 2 KV heads, a core token for 5 tokens.
    assert 0 < token_bytes <= 2 * 2 * 2 * 2 * 16 * 4


# Sampling


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"temperature": -0.1}, ValueError, "temperature must be at least 0, got -0.1"),
        ({"temperature": math.nan}, ValueError, "temperature must be at least 0, got nan"),
        ({"temperature": 1.1e30}, ValueError, "temperature must be at least 0 and at most 1e"),
        ({"temperature": True}, TypeError, "temperature must be a number, got True"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, got '1'"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": True}, TypeError, "top_k must be an integer, got True"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer, got 2.0"),
        ({"top_p": 0}, ValueError, "top_p must be more than 0 and at most 1, got 0"),
        ({"top_p": 1.01}, ValueError, "top_p must be more than 0 and at most 1, got 1.01"),
        ({"top_p": None}, TypeError, "top_p must be a number, got None"),
    ],
    ids=str,
)
def test_samplings_that_break_a_rule_are_refused(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        Sampling(**options)


def test_the_kind_of_a_sampling_is_the_least_work():
    for sampling, kind in (
        (Sampling(), "greedy"),
        (Sampling(9e-6, 5, 0.5), "greedy"),
        (Sampling(1e-5), "plain"),
        (Sampling(1e30), "plain"),
        (Sampling(1, None, 1), "plain"),
        (Sampling(1.0, 5), "filtered"),
        (Sampling(1.0, None, 0.999), "filtered"),
    ):
        assert sampling.kind == kind


def test_the_settings_of_a_generation_config_give_way_to_the_requests():
    config = SimpleNamespace(do_sample=True, temperature=0.5, top_k=7, top_p=None)
    take = Sampling.from_generation_config
    assert take(config) == Sampling(0.5, 7, 1.0)
    assert take(config, do_sample=False) == Sampling()
    assert take(config, temperature=2.0, top_k=None, top_p=0.5) == Sampling(2.0, 7, 0.5)
    assert take(config, top_k=0) == Sampling(0.5, None, 1.0)
    config = SimpleNamespace(do_sample=False, temperature=None, top_k=None, top_p=None)
    assert take(config, top_p=0.5) == Sampling()
    assert take(config, do_sample=True) == Sampling(1.0, 50)


def test_each_row_is_chosen_by_its_own_sampling_whatever_its_neighbours():
    samplings = [
        Sampling(),
        Sampling(0.7),
        Sampling(1.3, 3),
        Sampling(2.0, None, 0.6),
        Sampling(0.9, 40, 0.9),
        Sampling(1e-6, 2),
    ]
    draw = torch.Generator("cpu").manual_seed(1)
    for _ in range(4):
        logits = 3 * torch.randn(len(samplings), 17, generator=draw, device="cpu")
        for chosen in (range(6), (1, 1, 3), (0, 5), (2, 1), (4, 0, 2)):
            generators = [torch.Generator("cpu").manual_seed(row) for row, _ in enumerate(chosen)]
            found = choose_rows(logits[list(chosen)], [samplings[i] for i in chosen], generators)
            for row, number in enumerate(chosen):
                sampler = Sampler(torch.device("cpu"), 1)
                sampler.temperature, sampler.top_k, sampler.top_p = (
                    x.cpu() for x in (sampler.temperature, sampler.top_k, sampler.top_p)
                )
                sampler.start(samplings[number], [row], 17)
                alone = sampler.choose(logits[number][None], samplings[number].kind)
                assert int(found[row]) == int(alone)


def test_a_row_without_numbers_is_marked_and_the_others_are_chosen():
    logits = torch.zeros(4, 5, device="cpu")
    logits[:, 2] = 9.0
    logits[0, 1], logits[2, 4], logits[3] = torch.nan, torch.inf, -torch.inf
    for sampling in (Sampling(), Sampling(0.1), Sampling(0.1, 2)):
        generators = [torch.Generator("cpu").manual_seed(row) for row in range(4)]
        found = choose_rows(logits, [sampling] * 4, generators)
        assert found.tolist() == [INVALID, 2, INVALID, INVALID]
    half = choose_rows(logits[1:2].half(), [Sampling(0.1)], generators[:1])
    assert half.tolist() == [2] and half.dtype == torch.int64


def test_a_sampler_starts_anew_with_each_request():
    cpu = torch.device("cpu")
    with cpu:
        sampler = Sampler(cpu, 2)
        logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
        found = []
        for sampling in (Sampling(1.5), Sampling(1.5, 4, 0.5), Sampling(1.5)):
            sampler.start(sampling, [7, 8], 50)
            found.append(torch.cat([sampler.choose(logits, sampling.kind) for _ in range(5)], 1))
        assert torch.equal(found[0], found[2]) and len(set(found[1][0].tolist())) <= 4
        sampler.start(Sampling(1.0), [7, 8], 50)
        values = (float(sampler.temperature), int(sampler.top_k), float(sampler.top_p))
        assert values == (1.0, 50, 1.0)
        sampler.start(Sampling(1.0, 999, 0.25), [7, 8], 50)
        assert int(sampler.top_k) == 50 and float(sampler.top_p) == 0.25


# Sessions and streams


def test_of_the_whole_probability_the_top_k_stay():
    """The probabilities of likelier tokens may add up to less than 1 in float32."""
    logits = torch.randn(500, 40, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    logits = logits.to(torch.get_default_device())
    assert (_kept(logits, torch.tensor([[7]]), torch.tensor([[1.0]])).sum(-1) == 7).all()


def test_the_newest_idle_sessions_are_kept(model, monkeypatch):
    def key(name):
        return SessionKey(name, 8, None, 1)

    def idle():
        return [x.batch for x in engine._idle]

    def make(model, handle, key, **options):
        made.append((key, idle(), options))
        return mock.Mock(key=key, fixed=key[0] != "grows", allocated_bytes=10)

    monkeypatch.setattr(engine_module, "Session", make)
    engine, made = Engine(model, static=True, keep=2), []
    sessions = [engine.take(key(name)) for name in "abc"]
    assert made[0][2] == {"static": True, "capture": True, "forward": engine.fused.step}
    assert engine.cache_bytes_used == 30 and engine.cache_bytes_kept == 0
    for session in sessions:
        session.reset.assert_called_once_with()
        engine.give_back(session, True)
    assert idle() == ["b", "c"]  # the oldest is gone
    assert engine.cache_bytes_used == 0 and engine.cache_bytes_kept == 20
    again = engine.take(key("b"))
    assert again is sessions[1] and again.reset.call_count == 2 and idle() == ["c"]
    engine.give_back(again, False)  # broken
    assert idle() == ["c"]
    engine.give_back(engine.take(key("grows")), True)
    assert idle() == ["c"]
    engine.give_back(engine.take(key("d")), True)
    last = engine.take(key("e"))
    assert made[-1][1] == ["d"]  # room was made before
    for session in [engine.take(key(name)) for name in "fgf"]:
        engine.give_back(session, True)
    assert idle() == ["g", "f"]  # by the newest session of each key
    engine.clear()
    assert engine.cache_bytes_kept == 0 and engine.cache_bytes_used == last.allocated_bytes
    engine = Engine(model, static=True, keep=0)
    engine.give_back(engine.take(key("a")), True)
    assert not engine._idle


def test_a_request_is_keyed_by_all_that_its_buffers_depend_on(model):
    engine = Engine(model)
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)

    def key(mask=None, **options):
        stream = engine.stream(ids, mask, max_new_tokens=34, **options)
        return stream.key, stream.prompt.attention_mask is None, stream.prompt.pads

    assert key() == (SessionKey(2, 64, CONFIG, 1), True, [0, 0])
    assert key(mask) == key() and key(seed=[1, 2])[0] == SessionKey(2, 64, CONFIG, 2)
    mask[1, :4] = 0
    assert key(mask) == (SessionKey(2, 64, CONFIG, 1), False, [0, 4])
    assert key(group_size=99)[0].config.group_size == 64
    engine = Engine(model, max_length=64)
    assert key()[0].max_length == 64
    engine = Engine(model, max_length=63)
    with pytest.raises(
        ValueError, match="^max_length must hold prompt and answer, got 63 for 30 and"
    ):
        key()
    by_load = []
    engine = Engine(
        model, policy=lambda load: by_load.append(load) or (3, 9), cache_bytes_budget=99
    )
    engine.time_to_first_token = 1.5
    assert key(mask, queue_length=4)[0].config == CCAConfig.paper(3, 9)
    assert by_load == [Load(4, 0, 99, 1.5, 30)]  # of the longest row
    mask[:, :2] = 0
    key(mask)
    assert by_load[1:] == [Load(0, 0, 99, 1.5, 28)]  # which may be padded, too


def test_padding_takes_no_position(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(model.config, "max_position_embeddings", 11)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5], mask[1, :3] = 0, 0
    engine = Engine(model)
    rows = engine.generate(tokens(2, 12), mask, max_new_tokens=2, eos_token_id=[])
    assert [len(row) for row in rows] == [2, 2]
    with pytest.raises(ValueError, match="^input_ids must fit the model's 11 positions, got 9 tok"):
        engine.stream(tokens(2, 12), mask, max_new_tokens=3)


def test_host_memory_of_idle_caches_is_free_for_others(monkeypatch):
    monkeypatch.setitem(WHOLE_TOKENS, "cuda", 0)
    model = tiny_model()
    with corecontext.enabled(model, CONFIG.replace(fetch_groups=2, store="host")):
        engine = Engine(model, static=True)
        row = 64 * 2 * 16 * 4 * 2 * 2  # of all layers and KV heads
        available = [0]
        monkeypatch.setattr(engine_module, "available_bytes", lambda: available[0])
        message = f"^raw tokens must fit in host memory, got {row} bytes for 1 rows of 64 tokens"
        with pytest.raises(MemoryError, match=f"{message} with 0 bytes free"):
            engine.stream(tokens(1, 30), max_new_tokens=3)
        available[0] = row
        engine.generate(tokens(1, 30), max_new_tokens=3)
        assert engine.host_bytes_kept == row and engine.load().host_bytes_used == 0
        available[0] = 0
        engine.generate(tokens(1, 20), max_new_tokens=3)  # in the cache that is kept
        available[0] = None
        engine.generate(tokens(2, 20), max_new_tokens=3)
        for asked, k in ((1, 1), (0, 0), (None, 2)):
            stream = engine.stream(tokens(1, 20), max_new_tokens=3, fetch_groups=asked)
            assert stream.fetch_groups == stream.key.config.fetch_groups == k
    for name in ("group_size", "window_size", "fetch_groups"):
        with pytest.raises(ValueError, match="^group_size, window_size and fetch_groups must be u"):
            Engine(model).stream(tokens(1, 20), max_new_tokens=3, **{name: 1})


# In rows of 64 tokens: the budget, the memory available beside idle caches, and what idle caches
# keep after each of three requests, of 1, 2 and 3 rows.
@pytest.mark.parametrize(
    "budget, free, kept",
    [
        (12, None, [1, 3, 6]),
        (11, None, [1, 3, 5]),  # the oldest goes
        (None, 12, [1, 3, 6]),
        (2**30, 8, [1, 3, 5]),
        (6, None, [1, 3, 3]),
        (5, None, [1, 2, 3]),
        (None, None, [1, 2, 3]),
    ],
)
def test_idle_caches_keep_host_memory_while_half_of_it_is_left(monkeypatch, budget, free, kept):
    monkeypatch.setitem(WHOLE_TOKENS, "cuda", 0)
    model = tiny_model()
    row = 64 * 2 * 16 * 4 * 2 * 2  # of all layers and KV heads
    monkeypatch.setattr(engine_module, "available_bytes", lambda: free and free * row)
    with corecontext.enabled(model, CONFIG.replace(fetch_groups=2, store="host")):
        engine = Engine(model, static=True, keep=3, host_bytes_budget=budget and budget * row)
        for rows in (1, 2, 3):
            engine.generate(tokens(1, 64 * rows - 30), max_new_tokens=3)
            assert engine.host_bytes_kept == kept[rows - 1] * row
        caches = [*engine._idle.values()]
        engine.generate(tokens(1, 64 * 3 - 30), max_new_tokens=3)
        assert [*engine._idle.values()] == caches  # the last request's is used again


def test_tokens_are_of_the_models_vocabulary_and_device(model):
    engine = Engine(model)
    engine._check_tokens(torch.tensor([[0, 95]]))
    for token in (-1, 96):
        with pytest.raises(ValueError, match="^input_ids must be from 0 to 95, got "):
            engine._check_tokens(torch.tensor([[5, token]]))
    with pytest.raises(ValueError, match="^input_ids must be on the model's device .* got meta"):
        engine.stream(torch.ones(1, 3, dtype=torch.long, device="meta"), max_new_tokens=1)
    model.resize_token_embeddings(98)
    model.config.vocab_size = 96
    engine._check_tokens(torch.tensor([[0, 97]]))
    with (
        mock.patch.object(model.get_input_embeddings(), "num_embeddings", 48),
        pytest.raises(ValueError, match="^input_ids must be from 0 to 95, got 96 to 96"),
    ):
        engine._check_tokens(torch.tensor([[96]]))  # a rank's part of the rows


def test_a_models_settings_are_set_and_put_back():
    changes = []
    handle = SimpleNamespace(config=CONFIG, configure=lambda **options: changes.append(options))
    for args in ((None, CONFIG), (handle, None), (handle, CONFIG)):
        with configured(*args):
            assert changes == []
    with configured(handle, CCAConfig.paper(2, 3)):
        assert changes == [CCAConfig.paper(2, 3).to_dict()]
    assert changes[1:] == [CONFIG.to_dict()]
    with pytest.raises(KeyError), configured(handle, CCAConfig.paper(2, 3)):
        raise KeyError
    assert changes[3:] == [CONFIG.to_dict()]


def test_each_kind_of_sampling_has_its_captured_step(model, monkeypatch):
    made, run = [], []

    def capture(function, **options):
        made.append((function.args, options))
        return lambda: run.append(function.args[0])

    monkeypatch.setattr(sessions, "CapturedStep", capture)
    key = SessionKey(2, 64, CONFIG, 1)
    options = {"static": True, "capture": True, "forward": model}
    session = sessions.Session(model, handle_of(model), key, **options)
    assert session.fixed and session.capture == session.tokens.is_cuda
    session.capture = True
    for kind in ("greedy", "plain", "greedy"):
        session.step(kind)
    assert run == ["greedy", "plain", "greedy"] and session.length == 3
    assert [kinds for kinds, _ in made] == [("greedy",), ("plain",)]
    assert made[0][1] == {
        "name": "a step of LlamaForCausalLM",
        "generators": session.sampler.generators,
        "device": session.tokens.device,
    }
    session.mask = torch.ones(2, 64)  # of a request before, with padding
    session.reset()
    assert session.length == 0 and session.mask is None
    assert len(session._captured) == 2  # its buffers stay in place
    growing = sessions.Session(model, handle_of(model), key, **{**options, "static": False})
    assert not growing.fixed and not growing.capture
    cache = growing.cache
    growing.reset()
    assert growing.cache is not cache
    plain = sessions.Session(model, None, key._replace(config=None), **options)
    assert not plain.fixed
    # Pinned memory is allocated at once; steps that ask the device are not captured.
    monkeypatch.setitem(WHOLE_TOKENS, "cuda", 0)
    host = CONFIG.replace(fetch_groups=2, store="host", backend="packed")
    for static, num_slots in ((False, 0), (True, 0), (False, 2), (True, 2)):
        key = key._replace(config=host.replace(fetch_slots=num_slots))
        fetching = sessions.Session(model, handle_of(model), key, **{**options, "static": static})
        assert fetching.fixed == (static or fetching.tokens.is_cuda)
        assert fetching.capture == fetching.tokens.is_cuda
        if not fetching.fixed:
            continue
        fetching.capture = True
        with fetching.configured():
            model(fetching.tokens.repeat(1, 20), **with_cache(fetching.cache), use_cache=True)
        made.clear()
        fused = mock.Mock(side_effect=model)
        fetching.forward = fused
        fetching.step("greedy")
        assert len(made) == (0 if num_slots else 1)
        fetching._step("greedy")
        assert fused.called == (not num_slots)


@pytest.mark.parametrize(
    "seed, batch, seeds",
    [
        (5, 3, [5]),
        ([5], 1, [5]),
        ((1, 2), 2, [1, 2]),
        (-(2**63), 1, [-(2**63)]),
        (2**63 - 1, 1, [2**63 - 1]),
        (2**63, 1, ValueError),
        (-(2**63) - 1, 1, ValueError),
        ([1], 2, ValueError),
        ([1, 2**63], 2, ValueError),
        ([1, 2.0], 2, TypeError),
        ("ab", 2, TypeError),
        (1.0, 1, TypeError),
    ],
    ids=str,
)
def test_seeds_are_one_or_one_for_each_row(seed, batch, seeds):
    options = Generation(max_new_tokens=1, seed=seed)
    if isinstance(seeds, list):
        assert options.seeds(batch) == seeds
        return
    with pytest.raises(seeds, match="^seed must be "):
        options.seeds(batch)


def test_rows_end_with_the_requests_tokens_else_the_models():
    def ends(eos, own):
        config = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=own))
        return Generation(max_new_tokens=1, eos_token_id=eos).eos_tokens(config)

    assert ends(None, None) == set() and ends(None, 5) == {5} and ends(None, [5, 6]) == {5, 6}
    assert ends([], 5) == set() and ends(0, 5) == {0} and ends((7, 8), 5) == {7, 8}
    assert ends(None, 0) == {0}


class Spelled:
    """A tokenizer of letters."""

    def decode(self, ids, **options):
        return "".join(chr(97 + i % 26) for i in ids)


def test_each_row_looks_for_stop_texts_in_its_own_newest_tokens(model):
    stream = Engine(model).stream(
        tokens(2, 5), max_new_tokens=40, stop_strings=["ab", "c"], tokenizer=Spelled()
    )
    assert not stream._stops(0, 0) and not stream._stops(1, 1)  # "a" in one row, "b" in the other
    assert stream._stops(1, 2) and stream._stops(0, 1)
    assert not Engine(model).stream(tokens(1, 5), max_new_tokens=4)._stops(0, 0)
    stream._tails = [[], []]
    for _ in range(50):
        assert not stream._stops(0, 25)
    assert len(stream._tails[0]) == 2 + 8 and stream._tails[1] == []


def test_a_stop_text_of_a_token_for_each_byte_is_found(model):
    def decode(ids, **options):
        return bytes(ids).decode(errors="replace")

    options = {"stop_strings": ["\N{FIRE}" * 3], "tokenizer": SimpleNamespace(decode=decode)}
    stream = Engine(model).stream(tokens(1, 5), max_new_tokens=40, **options)
    text = "ab" + "\N{FIRE}" * 3
    assert [stream._stops(0, byte) for byte in text.encode()] == [False] * 13 + [True]


def test_a_stream_that_was_closed_or_failed_gives_no_token(model, monkeypatch):
    engine, ids = Engine(model, static=True), tokens(1, 9)
    unread = engine.stream(ids, max_new_tokens=3)
    unread.close()
    assert list(unread) == [] and engine.time_to_first_token is None
    with engine.stream(ids, max_new_tokens=3) as stream:
        assert stream.session is None and stream.made == 0 and stream.running == [True]
        began = time.perf_counter()
        next(stream)
        assert stream.made == 1 and stream.prompt is None
        assert 0 < engine.time_to_first_token <= time.perf_counter() - began
    assert stream.session is None and not engine._busy and len(engine._idle) == 1
    failing = engine.stream(ids, max_new_tokens=3)
    next(failing)
    with monkeypatch.context() as patch:
        patch.setattr(failing.session, "step", lambda kind: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(failing)
    assert not engine._idle and not engine._busy and list(failing) == []
    with pytest.raises(ValueError, match="^configure must be called on a running request"):
        failing.configure(window_size=2)


def test_a_stream_that_is_dropped_unread_leaves_no_cache(model):
    engine = Engine(model)
    stream = engine.stream(tokens(1, 9), max_new_tokens=3)
    next(stream)
    assert engine.cache_bytes_used > 0
    del stream
    gc.collect()
    assert engine.cache_bytes_used == 0 and not engine._busy


def test_a_window_shrinks_before_the_prompt_is_read_and_equal_sizes_change_nothing(model):
    stream = Engine(model, static=True).stream(tokens(1, 30), max_new_tokens=3)
    key = stream.key
    stream.configure()
    stream.configure(group_size=5, window_size=13)
    assert stream.key is key and (stream.group_size, stream.window_size) == (5, 13)
    stream.configure(window_size=12)
    assert stream.window_size == 12 and stream.key == key._replace(config=CCAConfig.paper(5, 12))
    next(stream)
    with mock.patch.object(stream.session, "shrink_window") as shrink:
        stream.configure(window_size=12)
        assert not shrink.called
        stream.configure(window_size=1)
    shrink.assert_called_once_with(stream.key)
    with pytest.raises(ValueError, match="^window_size must be at most 1 once set, got 2"):
        stream.configure(window_size=2)
    stream.close()


# `generate`


@pytest.mark.parametrize("static", [False, True])
def test_a_request_may_be_closed_while_its_prompt_is_read(model, static):
    """Its half-written session serves nobody else."""
    ids = tokens(1, 40)
    engine = Engine(model, static=static, chunk_size=8)
    wanted = engine.generate(ids, max_new_tokens=4)
    kept = []

    def close(read):
        if read == 16:
            stream.close()
            kept.append((engine.cache_bytes_used > 0, list(engine._idle)))

    stream = engine.stream(ids, max_new_tokens=4, on_chunk=close)
    assert list(stream) == []
    [(is_held, idle)] = kept
    assert is_held and not idle
    assert engine.cache_bytes_used == 0 and not engine._idle
    assert engine.generate(ids, max_new_tokens=4) == wanted


@pytest.mark.parametrize(
    "spread, captures",
    [
        ({}, True),
        ({"tp_size": 1, "hf_device_map": {"": 0}}, True),
        ({"tp_size": None, "hf_device_map": {"model": 0, "lm_head": 1}}, False),
        ({"tp_size": 2}, False),
    ],
    ids=str,
)
def test_steps_of_models_that_are_spread_are_not_captured(spread, captures):
    """Processes that share a model wait for one another, and a graph has one device."""
    assert sessions.can_capture(SimpleNamespace(**spread)) == captures


def test_what_the_engine_does_not_have_is_generated_by_transformers(monkeypatch):
    ways = []
    for name in ("_with_engine", "_with_transformers"):
        monkeypatch.setattr(
            generation, name, lambda *given, name=name: ways.append(name) or len(ways)
        )
    monkeypatch.setattr(
        "transformers.TextStreamer", type("Streamer", (), {"__init__": lambda *a, **k: None})
    )

    def way(config=CONFIG, **settings):
        model = SimpleNamespace(generation_config=SimpleNamespace(**settings))
        loaded = SimpleNamespace(model=model, tokenizer=None, config=config)
        made = generation.generate(loaded, "ids", Continuation(max_new_tokens=1), on_text=print)
        assert made == len(ways)
        return ways[-1]

    assert way() == "_with_engine" == way(**PLAIN) == way(**dict.fromkeys(PLAIN))
    assert way(config=None) == "_with_transformers"
    for name, value in PLAIN.items():
        other = 7 if value is None else value + 1
        assert way(**{name: other}) == "_with_transformers", name
    assert {name: value for name, value in PLAIN.items() if value is not None} == {
        **dict.fromkeys(("num_beams", "top_h", "typical_p"), 1),
        **dict.fromkeys(("repetition_penalty", "guidance_scale"), 1),
        **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), 0),
        **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), 0),
    }
    assert [name for name, value in PLAIN.items() if value is None] == [
        "bad_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "watermarking_config",
        "stop_strings",
    ]


def test_a_chat_template_writes_special_tokens_itself(monkeypatch):
    monkeypatch.setattr(generation, "chat_prompt", lambda tokenizer, turns: f"<{turns}>")
    monkeypatch.setattr(generation, "encode", lambda loaded, text, **options: (text, options))
    asked = generation.encode_prompt
    for template in (None, "{{ messages }}"):
        loaded = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template))
        for chat in (None, False):
            assert asked(loaded, "T \n", None, chat, room_for=3) == ("T \n", {"room_for": 3})
        assert asked(loaded, "T \n", "Q", False, room_for=3) == ("T\n\nQ\n", {"room_for": 3})
    in_template = {"room_for": 3, "special_tokens": False}
    for chat in (None, True):
        text = "<[('user', 'T\\n\\nQ')]>"
        assert asked(loaded, "T \n", "Q", chat, room_for=3) == (text, in_template)
    assert asked(loaded, "T", None, True, room_for=3) == ("<[('user', 'T')]>", in_template)


def test_a_continuation_checks_and_simplifies_its_numbers():
    plain = Continuation(max_new_tokens=3)
    assert (plain.temperature, plain.seed, plain.chunk_size) == (0.0, 0, None)
    assert plain.sampling == {"do_sample": False}
    assert Continuation(max_new_tokens=3, temperature=1e-6).temperature == 0
    full = Continuation(max_new_tokens=3, temperature=0.5, top_k=4, top_p=0.9)
    assert full.sampling == {"do_sample": True, "temperature": 0.5, "top_k": 4, "top_p": 0.9}
    assert Continuation(max_new_tokens=3, temperature=0.5).sampling == {
        "do_sample": True,
        "temperature": 0.5,
    }
    for seed in (-(2**63), 2**63 - 1):
        Continuation(max_new_tokens=3, seed=seed)
    for options, message in (
        ({"seed": 2**63}, "seed must be from -2\\*\\*63 to"),
        ({"seed": -(2**63) - 1}, "seed must be from -2\\*\\*63 to"),
        ({"top_k": 5}, "temperature must be more than 0 to sample by top-k or top-p, got 0.0"),
        ({"top_p": 0.5}, "temperature must be more than 0 to sample"),
        ({"temperature": 1e-6, "top_p": 0.5}, "temperature must be more than 0 to sample"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be at least 1"),
        ({"temperature": 1.0, "top_p": 2.0}, "top_p must be more than 0"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            Continuation(max_new_tokens=3, **options)


def test_memory_that_runs_out_is_the_users_line_where_it_says_what_fits(model, monkeypatch):
    loaded = SimpleNamespace(model=model, tokenizer=SimpleNamespace(eos_token_id=5), config=CONFIG)
    options = Continuation(max_new_tokens=3, chunk_size=4, seed=6, temperature=0.5)
    for error, expected in (
        (MemoryError("input_ids must fit"), UserError),
        (MemoryError(), MemoryError),
    ):
        with (
            mock.patch("corecontext.inference.Engine.stream", side_effect=error) as stream,
            pytest.raises(expected),
        ):
            generation._with_engine(loaded, tokens(1, 5), options, mock.Mock(), print)
    asked = stream.call_args.kwargs
    assert asked["seed"] == 6 and asked["max_new_tokens"] == 3 and asked["on_chunk"] is print
    assert asked["sampling"] == Sampling(0.5, 50)

    made = mock.Mock(return_value=tokens(1, 8))
    monkeypatch.setattr(model, "generate", made)
    model.generation_config.pad_token_id = None
    ids = tokens(1, 5)
    assert generation._with_transformers(loaded, ids, options, "streamer") == 3
    given = made.call_args.kwargs
    assert given["prefill_chunk_size"] == 4 and given["pad_token_id"] == 5 and given["use_cache"]
    assert given["max_new_tokens"] == 3 and given["streamer"] == "streamer" and given["do_sample"]
    assert torch.equal(given["attention_mask"], torch.ones_like(ids))
    assert torch.initial_seed() == 6
    (check,) = given["logits_processor"]
    scores = torch.tensor([[0.0, -torch.inf]])
    assert check(ids, scores) is scores
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="^the model's largest logit must be a finite number"):
            check(ids, torch.tensor([[0.0, bad]]))
    model.generation_config.pad_token_id = 1
    generation._with_transformers(loaded, ids, Continuation(max_new_tokens=3), "streamer")
    assert not {"pad_token_id", "prefill_chunk_size"} & set(made.call_args.kwargs)
    made.side_effect = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(UserError, match="^input_ids must fit the device's memory, got 5 tokens"):
        generation._with_transformers(loaded, ids, options, "streamer")


def test_pieces_of_a_generated_text_are_handed_on(model):
    streamer = mock.Mock()
    loaded = SimpleNamespace(model=model, tokenizer=None, config=CONFIG)
    options = Continuation(max_new_tokens=4)
    chunks = []
    ids = tokens(1, 9)
    assert generation._with_engine(loaded, ids, options, streamer, chunks.append) == 4
    put = [call.args[0] for call in streamer.put.call_args_list]
    assert put[0] is ids and len(put) == 5 and all(isinstance(x, Tensor) for x in put)
    streamer.end.assert_called_once_with()
    assert chunks == [9]
