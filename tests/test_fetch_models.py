"""Models that fetch: every way of generating, the engine, and the command line."""

import contextlib

import pytest
import torch
from families import recompute, stateless, tiny_model, tokens

import corecontext
from corecontext import CCAConfig
from corecontext.cache.raw_store import num_bytes
from corecontext.cli import main
from corecontext.inference import Engine, room
from corecontext.inference.limits import host_bytes_of
from corecontext.inference.room import RowShape
from corecontext.inference.session import configured
from corecontext.integrations.hf.cache_layers import cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache
from corecontext.loading import load
from corecontext.ops.fetch import prompt_rule
from corecontext.perplexity import document_nll
from corecontext.record import read_records
from corecontext.serve.errors import InvalidRequest
from corecontext.serve.request import Request
from corecontext.serve.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("default_device")
CONFIG = CCAConfig.preset(
    "device",
    group_size=4,
    window_size=9,
    sink_size=4,
    fetch_groups=3,
    fetch_index="mean",
    prefill="fetch",
)


@pytest.mark.parametrize(
    "options, store",
    [
        ({}, "device"),
        ({"cache_implementation": "static"}, "device"),
        ({"prefill_chunk_size": 5}, "device"),
        ({"prompt_lookup_num_tokens": 5}, "device"),
        ({"num_beams": 2}, "device"),
        ({"cache_implementation": "static"}, "host"),
        ({"num_beams": 2}, "host"),
    ],
    ids=str,
)
def test_greedy_equals_recomputing(options, store):
    model, ids = tiny_model(), tokens(1, 37)
    ids[:, 20:30] = ids[:, 5:15]  # something for prompt lookup to find
    with corecontext.enabled(model, CONFIG.replace(store=store)):
        out = model.generate(ids, max_new_tokens=20, do_sample=False, **options)
        if "num_beams" in options:
            truth = model.generate(ids, max_new_tokens=20, use_cache=False, **options)
        else:
            truth = recompute(model, ids, 20)
        assert torch.equal(out, truth)


@pytest.mark.parametrize("static, store", [(False, "device"), (True, "device"), (False, "host")])
def test_the_engine_equals_recomputing(static, store):
    model, ids = tiny_model(), tokens(2, 37)
    with corecontext.enabled(model, CONFIG.replace(store=store)):
        engine = Engine(model, static=static)
        for prompt in (ids, ids[:, :20]):
            out = engine.generate(prompt, max_new_tokens=15)
            truth = recompute(model, prompt, 15)[:, prompt.shape[1] :]
            assert [list(row) for row in out] == truth.tolist()


def test_the_engine_refuses_what_host_memory_does_not_hold():
    model, ids = tiny_model(), tokens(2, 37)
    config = model.config
    # Rounded up to 64 tokens a row.
    row = 64 * 2 * config.head_dim * 4 * config.num_hidden_layers * config.num_key_value_heads
    with corecontext.enabled(model, CONFIG.replace(store="host")):
        engine = Engine(model, static=True, host_bytes_budget=3 * row)
        assert host_bytes_of(config, model.dtype, engine.handle.config, 64) == row
        stream = engine.stream(ids, max_new_tokens=15)
        later = engine.stream(ids, max_new_tokens=15)
        next(stream)
        assert engine.host_bytes_used == 2 * row and engine.load().cache_share == 2 / 3
        message = f"got {2 * row} bytes for 2 rows of 64 tokens with {row} bytes free"
        for call in (lambda: engine.stream(ids, max_new_tokens=15), lambda: next(later)):
            with pytest.raises(MemoryError, match=message):
                call()
        assert len(engine.generate(ids[:1], max_new_tokens=3)[0]) == 3
        stream.close()
        assert (engine.host_bytes_used, engine.host_bytes_kept) == (0, 3 * row)
        # Idle caches give their memory to a request of other sizes.
        assert len(engine.generate(ids[[0, 1, 0]], max_new_tokens=2)[2]) == 2
        assert engine.host_bytes_kept == 3 * row
        with pytest.raises(MemoryError, match=f"got {4 * row} bytes for 2 rows of 128 tokens"):
            engine.stream(ids, max_new_tokens=80)
        with pytest.raises(ValueError, match="host_bytes_budget must be at least 0, got -1"):
            Engine(model, host_bytes_budget=-1)


def test_the_model_sees_the_rule():
    model, ids = tiny_model(), tokens(2, 61)
    full = stateless(model, ids)
    changes = ({"backend": "reference"}, {}, {"fetch_groups": 0}, {"fetch_groups": 20})
    found = []
    for change in changes:
        with corecontext.enabled(model, CONFIG.replace(**change)):
            found.append(stateless(model, ids))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=3e-5)
    assert (found[1] - found[2]).abs().max() > 1e-2
    torch.testing.assert_close(found[3], full, rtol=1e-4, atol=3e-5)


def test_perplexity_in_chunks_is_that_of_one_pass():
    model, ids = tiny_model(), tokens(1, 80)
    with corecontext.enabled(model, CONFIG):
        logits = stateless(model, ids)[0, :-1].float()
        truth = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").cpu()
        for chunk_size in (7, 1000):
            found = document_nll(model, ids, chunk_size=chunk_size)
            torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def test_a_cache_counts_its_raw_tokens():
    model, ids = tiny_model(), tokens(1, 61)
    sizes = []
    for change in ({}, {"fetch_groups": 0}):
        with corecontext.enabled(model, CONFIG.replace(**change)):
            sizes.append(cache_bytes(returned_cache(model(ids))))
    config = model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    groups = (61 - 4) // 4
    assert sizes[0] - sizes[1] == heads * config.head_dim * 4 * (2 * 61 + groups)


@pytest.mark.parametrize(
    "store, num_slots, near_share",
    [("device", 0, 1), ("host", 3, 1), ("host", 3, 0), ("host", 0, 1), ("host", 0, 0)],
)
def test_a_server_equals_recomputing(monkeypatch, store, num_slots, near_share):
    """Rows that come and go, of prompts that begin alike and are read from the device or from host
    memory."""
    monkeypatch.setattr(room, "NEAR_SHARE", near_share)
    model = tiny_model()
    config = CONFIG.replace(store=store, fetch_index="pairs:2", fetch_slots=num_slots)
    first = tokens(1, 70)[0].tolist()
    prompts = [first, tokens(1, 25)[0].tolist(), first[:48] + first[:9], first[:33] + first[50:]]
    with corecontext.enabled(model, config):
        scheduler = Scheduler(model, chunk_size=16, rows_per_pool=2, host_bytes=2**21)
        made = [[] for _ in prompts]
        slots = [
            scheduler.submit(Request(ids, 6 + 3 * i), made[i].append)
            for i, ids in enumerate(prompts)
        ]
        while not scheduler.idle:
            scheduler.run_turn()
            used, allocated = scheduler.memory.counted()
            assert (used.host > 0) == (store == "host" and used.device > 0)
            assert allocated.host <= 2**21
            reading = {slot.pool.reading.store for slot in scheduler.reading}
            assert reading <= {"device" if near_share else store}
        assert [slot.cached_tokens for slot in slots[2:]] == [48, 32]
        for ids, new in zip(prompts, made):
            truth = recompute(model, torch.tensor([ids]), len(new))[0, len(ids) :]
            assert new == truth.tolist()


@pytest.mark.parametrize("store, fixed", [("host", False), ("device", True), ("host", True)])
def test_short_requests_of_a_server_run_under_full_attention(monkeypatch, store, fixed):
    """In steps with others, which choose, and from beginnings that they share: all get what
    recomputing gives. Those that ask for sizes, or score their prompt, get what they ask for."""
    for table in ("PROMPT_LENGTHS", "STEP_LENGTHS"):
        monkeypatch.setattr(prompt_rule, table, {})
    monkeypatch.setitem(prompt_rule.WHOLE_TOKENS, "cuda", 64)
    model = tiny_model()
    first = tokens(1, 70)[0].tolist()
    prompts = [first[:40], first, first[:33] + first[:8], first[2:], first[4:30], first[7:30]]
    options = [{}, {}, {}, {}, {"fetch_groups": 3}, {"prompt_logprobs": True, "logprobs": 1}]
    wholes = [True, False, True, False, False, False]
    with corecontext.enabled(model, CONFIG.replace(prefill="auto", fetch_share=1, store=store)):
        scheduler = Scheduler(model, chunk_size=16, rows_per_pool=2)
        scheduler.batch.fixed = fixed
        scheduler.memory.runs_short_whole = True
        made = [[] for _ in prompts]
        slots = [
            scheduler.submit(Request(ids, 12, **more), new.append)
            for ids, more, new in zip(prompts, options, made)
        ]
        settings = {}
        while not scheduler.idle:
            scheduler.run_turn()
            settings.update({slots.index(slot): slot.config for slot in scheduler.active()})
        assert [settings[i] is None for i in range(len(prompts))] == wholes
        assert slots[2].cached_tokens == 32
        for node in scheduler.memory.prefixes._nodes.values():
            if node.key[0] is None:
                held = [x for tensors in node.cores for x in tensors]
                assert node.nbytes == num_bytes(held) == node.counted.device
    for ids, whole, new in zip(prompts, wholes, made):
        with contextlib.nullcontext() if whole else corecontext.enabled(model, CONFIG):
            truth = recompute(model, torch.tensor([ids]), len(new))[0, len(ids) :]
        assert new == truth.tolist()


@pytest.mark.parametrize("store", ["device", "host"])
def test_each_request_has_its_own_number_of_groups(store):
    """Rows of one step fetch 0 to 6 groups: each gets what it gets alone, and no beginning that was
    read with another number."""
    model = tiny_model()
    config = CONFIG.replace(store=store, fetch_groups=6)
    prompt = tokens(1, 70)[0].tolist()
    asked = (6, 0, 1, None, 3, 1)
    with corecontext.enabled(model, config) as handle:
        scheduler = Scheduler(model, chunk_size=32, rows_per_pool=2)
        made = [[] for _ in asked]
        requests = [Request(prompt, 12, fetch_groups=k) for k in asked]
        slots = [scheduler.submit(x, new.append) for x, new in zip(requests, made)]
        most = 0
        while not scheduler.idle:
            scheduler.run_turn()
            most = max(most, sum(bool(pool.slots) for pool in scheduler.memory.pools))
        assert most == 4  # settings in one step
        assert [slot.cached_tokens for slot in slots] == [0, 0, 0, 64, 0, 64]
        engine = Engine(model, static=False)
        for k, new in zip(asked, made):
            ids = torch.tensor([prompt])
            assert engine.generate(ids, max_new_tokens=12, fetch_groups=k) == [new]
            assert handle.config == config
            with configured(handle, config.replace(fetch_groups=6 if k is None else k)):
                assert new == recompute(model, ids, 12)[0, 70:].tolist()
        assert len({tuple(new) for new in made}) > 1
        with pytest.raises(ValueError, match="^fetch_groups must be at most the model's 6, got 7"):
            engine.stream(ids, max_new_tokens=2, fetch_groups=7)
        with engine.stream(ids, max_new_tokens=2, fetch_groups=2) as stream:
            assert (stream.group_size, stream.fetch_groups) == (4, 2)


def test_a_server_refuses_what_its_memories_do_not_hold():
    model = tiny_model()
    config = CONFIG.replace(store="host")
    token = 2 * model.config.head_dim * 4 * 2 * model.config.num_key_value_heads
    with corecontext.enabled(model, config):
        # A request takes a row in host memory, and little on the device to read its prompt.
        scheduler = Scheduler(model, host_bytes=3 * 128 * token // 2)
        scheduler.submit(Request([1] * 100, 28))
        message = "got 129 tokens for a budget of 1024 MiB, and 0 MiB in host memory"
        with pytest.raises(InvalidRequest, match=message):
            scheduler.submit(Request([1] * 100, 29))
    with corecontext.enabled(model, CONFIG):
        device = RowShape.of(model.config, model.dtype).bytes_of(CONFIG, 128)
        assert device.device > 128 * token and device.host == 0
        Scheduler(model, cache_bytes=2 * device.device).submit(Request([1] * 100, 28))
        scheduler = Scheduler(model, cache_bytes=2 * device.device - 1)
        with pytest.raises(InvalidRequest, match="must fit the cache"):
            scheduler.submit(Request([1] * 100, 28))
    with (
        corecontext.enabled(model, CONFIG.replace(store="none")),
        pytest.raises(NotImplementedError, match="fetch_groups must be 0 with a cache of store"),
    ):
        Scheduler(model)


def test_from_the_command_line(tmp_path, monkeypatch):
    from tiny_model import save_tiny_model

    monkeypatch.chdir(tmp_path)
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The words of a text, repeated. " * 10)
    common = ["perplexity", "text.txt", "--model", model, "--device", "cpu", "--json", "r.jsonl"]
    argv = [*common, "--preset", "pooling", "--group-size", "4", "--window-size", "16"]
    assert main(argv) == 0
    for count in ("4", "500"):
        assert main([*argv, "--fetch-groups", count, "--fetch-index", "mean"]) == 0
    assert main([*common, "--method", "full"]) == 0
    values = [
        x
        for x in read_records("r.jsonl")
        if x.name == "quality.perplexity" and "bucket" not in x.params
    ]
    assert [x.params.get("fetch_groups") for x in values] == [None, 4, 500, None]
    assert values[1].params["fetch_index"] == "mean"
    assert values[0].value != values[1].value
    assert values[2].value == pytest.approx(values[3].value, rel=1e-5)
    assert main([*argv, "--fetch-index", "bits:3"]) == 2
    assert main([*common, "--method", "full", "--fetch-groups", "3"]) == 2
    assert load(model, fetch_groups=2, device="cpu", warn=False).config.fetch_groups == 2
