"""Continuous batching: every request gets the tokens it gets alone, whatever runs beside it, and
frees what it held."""

import contextlib
import gc
import queue
import random
import sys
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from families import tiny_model, tokens

import corecontext
from corecontext import CCAConfig
from corecontext.inference import Engine, Sampling
from corecontext.inference.policy import TablePolicy
from corecontext.inference.room import RowShape
from corecontext.inference.sampling import InvalidLogits
from corecontext.ops.fetch import prompt_rule
from corecontext.serve import request as request_module
from corecontext.serve.errors import Code, RequestError
from corecontext.serve.prefix import PrefixStore
from corecontext.serve.request import Request
from corecontext.serve.rows import RowPool
from corecontext.serve.scheduler import Scheduler
from corecontext.serve.step import _graph_memory
from corecontext.serve.warm_up import warm_up
from corecontext.serve.worker import Worker

pytestmark = pytest.mark.usefixtures("default_device")
CONFIG = CCAConfig.paper(5, 13)


@pytest.fixture
def model(default_device):
    model = tiny_model()
    with corecontext.enabled(model, CONFIG):
        yield model


def prompt(length, seed=0):
    return tokens(1, length, seed=1000 * seed + length)[0].tolist()


class Asked:
    """A request of a test: it keeps its tokens, and has its slot's attributes once submitted."""

    def __init__(self, request):
        self.request = request
        self.tokens = []
        self.ends = []
        self.on_token = self.tokens.append

    def submit(self, scheduler):
        self.slot = scheduler.submit(
            self.request,
            lambda token: self.on_token(token),
            lambda slot: self.ends.append(slot.end_reason),
        )

    def __getattr__(self, name):
        slot = vars(self).get("slot")
        return getattr(self.request if hasattr(self.request, name) else slot, name)


def ask(length, new=8, seed=0, **options):
    """A request that is still to be submitted."""
    ids = options.pop("prompt", None) or prompt(length, seed)
    return Asked(Request(ids, new, seed=seed, **options))


def finish(scheduler, limit=10000):
    for _ in range(limit):
        if scheduler.idle:
            return
        scheduler.run_turn()
    raise AssertionError("the scheduler did not come to an end")


def alone(model, one, chunk_size=16):
    """What the engine makes of a request by itself."""
    options = (
        {}
        if one.config is None
        else {"group_size": one.config.group_size, "window_size": one.config.window_size}
    )
    return Engine(model, chunk_size=chunk_size).generate(
        torch.tensor([one.prompt]),
        max_new_tokens=one.max_new_tokens,
        sampling=one.sampling,
        seed=one.seed,
        eos_token_id=list(one.eos),
        **options,
    )[0]


def assert_empty(scheduler):
    scheduler.memory.prefixes.trim(0)
    if scheduler.batch.fixed:
        scheduler.memory.free(10**15)
    assert scheduler.idle and scheduler.memory.used == scheduler.memory.allocated == 0
    assert scheduler.memory.prefixes.nbytes == 0 and not scheduler.memory.prefixes._nodes


@pytest.mark.parametrize(
    "family, fixed",
    [
        ("llama", False),
        ("llama", True),
        ("llama-yarn", False),
        ("qwen3_moe", False),
        ("gemma", False),
        ("glm4", True),
    ],
)
def test_requests_that_come_and_go_get_the_tokens_they_get_alone(family, fixed):
    model, draw = tiny_model(family), random.Random(1)
    count = 14 if family == "llama" else 7  # the others differ in what a forward computes
    with corecontext.enabled(model, CONFIG):
        scheduler = Scheduler(model, chunk_size=16, rows_per_pool=5, capture=False)
        scheduler.batch.fixed = fixed  # as on a GPU, where idle rows run along
        jobs = []
        for number in range(count):
            g, s = draw.choice(((None, None), (5, 13), (3, 20), (16, 9), (1, 7)))
            jobs.append(
                ask(
                    draw.randint(1, 70),
                    draw.randint(1, 30),
                    number,
                    group_size=g,
                    window_size=s,
                    sampling=draw.choice((Sampling(), Sampling(1.2), Sampling(0.9, 20, 0.8))),
                    eos=frozenset(draw.sample(range(96), 2)),
                )
            )
            jobs[-1].submit(scheduler)
            for _ in range(draw.randint(0, 6)):
                scheduler.run_turn()
        finish(scheduler)
        assert [one.error for one in jobs] == [None] * count
        reasons = {one.end_reason for one in jobs}
        assert reasons <= {"stop", "length"}
        # A GPU draws other tokens, and the requests of the other families are few.
        if family == "llama" or not torch.cuda.is_available():
            assert len(reasons) == 2
        for one in jobs:
            assert one.tokens == alone(model, one)
        assert_counted(scheduler.memory.prefixes)
        assert_empty(scheduler)


@pytest.mark.parametrize("kind", ["whole", "choose", "full"])
def test_a_second_burst_finds_the_pools_of_the_first(kind, monkeypatch):
    """As steps over them are captured; whatever else the memory holds by then."""
    monkeypatch.setitem(prompt_rule.WHOLE_TOKENS, "cuda", 64 if kind == "whole" else 0)
    fetching = CCAConfig(4, 8, fetch_groups=2, sink_size=4, store="device")
    model = tiny_model()
    with corecontext.enabled(model, fetching):
        row = Scheduler(model).memory.shape.row_bytes(None, 64)
        scheduler = Scheduler(
            model, full=kind == "full", cache_bytes=19 * row, chunk_size=10, capture=False
        )
        scheduler.batch.fixed = True
        scheduler.memory.runs_short_whole = kind == "whole"
        dropped = []
        monkeypatch.setattr(scheduler.batch, "forget", dropped.append)
        for burst in range(2):
            jobs = [ask(20, 44, seed=100 * burst + number) for number in range(24)]
            for one in jobs:
                one.submit(scheduler)
            finish(scheduler)
            assert [one.end_reason for one in jobs] == ["length"] * 24
            if not burst:
                pools = list(scheduler.memory.pools)
        assert scheduler.memory.pools == pools and not dropped
        sizes = [pool.rows for pool in pools]
        # A row is what a prompt is read into, and a quarter is for beginnings, whose place is taken
        # row by row.
        assert sizes == {"full": [8, 8, 2], "whole": [8, 5], "choose": [8, 1, 1, 1]}[kind]


def test_full_attention_from_a_static_cache():
    model = tiny_model()
    jobs = [ask(n, 12, seed=n) for n in (3, 40, 17, 16, 33, 64)]
    expected = [
        model.generate(torch.tensor([one.prompt]), max_new_tokens=12, do_sample=False)[
            0, len(one.prompt) :
        ].tolist()
        for one in jobs
    ]
    with corecontext.enabled(model, CONFIG):
        for fixed in (False, True):
            scheduler = Scheduler(model, full=True, chunk_size=16, rows_per_pool=4, capture=False)
            scheduler.batch.fixed = fixed
            again = [ask(0, 12, prompt=one.prompt) for one in jobs]
            for one in again:
                one.submit(scheduler)
            finish(scheduler)
            assert [one.tokens for one in again] == expected and again[0].config is None
            assert_empty(scheduler)
        with pytest.raises(
            ValueError, match="^group_size, window_size and fetch_groups must be left out, got a"
        ):
            ask(3, group_size=2).submit(scheduler)


def test_the_kernel_decodes_from_a_full_cache_as_pytorch_does(monkeypatch):
    triton = pytest.importorskip("triton")
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        pytest.skip("no GPU, and the interpreter is off")
    from corecontext.cache import full

    x = [
        torch.randn(
            2, heads, 1, 16, generator=torch.Generator("cpu").manual_seed(i), device="cpu"
        ).to(torch.get_default_device())
        for i, heads in enumerate((4, 2, 2))
    ]
    past = torch.randn(
        2, 2, 2, 24, 16, generator=torch.Generator("cpu").manual_seed(9), device="cpu"
    ).to(x[0].device)
    out, kept = [], []
    for backend in ("packed", "triton"):
        monkeypatch.setattr(full, "choose_backend", lambda *_, backend=backend: backend)
        for fixed in (False, True):
            layer = full.FullLayer(24, fixed=fixed)
            layer.buffers = list(past.clone())
            layer.pads, layer.seen = [-3, 11], 16  # rows of 19 and 5 tokens
            layer.pad = torch.tensor(layer.pads)
            if fixed:
                layer.seen = torch.tensor(16)
            out.append(layer.attend(*x))
            assert int(layer.seen) == 17
            kept.append(torch.stack([layer.buffers[0][0, :, 19], layer.buffers[0][1, :, 5]]))
    for one, held in zip(out[1:], kept[1:]):
        torch.testing.assert_close(one, out[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(held, kept[0])
    assert torch.equal(kept[0], x[1][:, :, 0])


@pytest.mark.parametrize(
    "later, cached", [(None, [0, 96, 96, 80, 32]), (30, [0, 94, 94, 94, 32])], ids=str
)
def test_a_shared_beginning_is_read_once_and_changes_no_bit(model, later, cached):
    document, logits = prompt(100), {}
    original = Scheduler._join

    def join(self, slot, last):
        logits[slot.request.seed] = last
        original(self, slot, last)

    scheduler = Scheduler(model, chunk_size=16, later_chunk_size=later)
    scheduler._join = join.__get__(scheduler)
    jobs = [ask(0, 6, prompt=document + prompt(n, seed=n), seed=n) for n in (9, 3, 30)]
    # Whole chunks: the last one is read for its logits.
    jobs.append(ask(0, 6, prompt=document[:96], seed=96))
    jobs.append(ask(0, 6, prompt=document[:40] + prompt(30, seed=5), seed=40))
    for one in jobs:
        one.submit(scheduler)
        finish(scheduler)
    assert [one.cached_tokens for one in jobs] == cached
    for one in jobs:
        branched = logits[one.seed]
        fresh = Scheduler(model, chunk_size=16, later_chunk_size=later)
        fresh._join = join.__get__(fresh)
        other = ask(0, 6, prompt=one.prompt, seed=one.seed)
        other.submit(fresh)
        finish(fresh)
        assert torch.equal(logits[one.seed], branched)
        assert other.tokens == one.tokens
        assert not other.cached_tokens
    other = ask(0, 6, prompt=document, window_size=20)
    other.submit(scheduler)
    finish(scheduler)
    assert other.cached_tokens == 0  # other settings have other caches
    held = scheduler.memory.prefixes.nbytes
    assert held == sum(node.nbytes for node in scheduler.memory.prefixes._nodes.values()) > 0
    assert_counted(scheduler.memory.prefixes)
    scheduler.memory.prefixes.trim(held - 1)
    assert 0 < scheduler.memory.prefixes.nbytes < held
    again = ask(0, 6, prompt=jobs[0].prompt)
    again.submit(scheduler)
    finish(scheduler)
    assert again.tokens == jobs[0].tokens
    assert_empty(scheduler)


class HashedToken(int):
    """A token number that counts how often it is hashed."""

    hashed = 0

    def __hash__(self):
        HashedToken.hashed += 1
        return super().__hash__()


@pytest.fixture
def shallow():
    """A recursion limit that few chunks reach."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(500)
    yield 500
    sys.setrecursionlimit(before)


def test_a_prompt_of_many_chunks_is_shared_at_a_cost_by_chunk(shallow):
    """More chunks than Python's recursion is deep; and a chunk is hashed by its own tokens."""
    chunks = shallow + 20
    model = tiny_model(num_hidden_layers=1, max_position_embeddings=4 * chunks)
    ids = [HashedToken(token) for token in prompt(2 * chunks + 1)]
    with corecontext.enabled(model, CONFIG):
        scheduler = Scheduler(model, chunk_size=2)
        first, again = ask(0, 3, prompt=ids), ask(0, 3, prompt=ids)
        hashed = []
        for one in (first, again):
            HashedToken.hashed = 0
            one.submit(scheduler)
            finish(scheduler)
            hashed.append(HashedToken.hashed)
        assert [one.error for one in (first, again)] == [None, None]
        assert again.cached_tokens == 2 * chunks and again.tokens == first.tokens
        assert 0 < hashed[1] <= len(ids) and hashed[0] <= 4 * len(ids)
        assert_counted(scheduler.memory.prefixes)
        assert_empty(scheduler)


def assert_counted(prefixes):
    """Beginnings are counted by their sizes, which are what they take."""
    for node in prefixes._nodes.values():
        assert node.nbytes == sum(x.nbytes for held in (*node.raw, *node.cores) for x in held)


def test_a_long_prompt_delays_the_others_by_a_chunk_only(model):
    scheduler = Scheduler(model, chunk_size=8)
    first = ask(10, 40)
    first.submit(scheduler)
    while not first.tokens:
        scheduler.run_turn()
    long, short = ask(200, 2), ask(7, 2, seed=3)
    long.submit(scheduler)
    short.submit(scheduler)
    for _ in range(10):
        before = len(first.tokens)
        scheduler.run_turn()
        assert len(first.tokens) == before + 1
    assert short.end_reason == "length" and long.end_reason is None and long.read < 200
    finish(scheduler)
    assert long.tokens == alone(model, long, 8) and first.tokens == alone(model, first, 8)


def test_the_load_counts_the_cache_into_which_a_prompt_is_read(model):
    needed = 2 * RowShape.of(model.config, model.dtype).row_bytes(CONFIG, 64)
    scheduler = Scheduler(model, chunk_size=8, cache_bytes=needed)
    one = ask(40, 8)
    one.submit(scheduler)
    scheduler.run_turn()
    assert one.slot in scheduler.reading and scheduler.load().cache_share == 1
    finish(scheduler)
    assert one.tokens == alone(model, one, 8)


def test_a_cancelled_request_is_gone_before_the_next_step(model):
    scheduler = Scheduler(model, chunk_size=8, max_rows=3)
    jobs = [ask(20, 100, seed=n) for n in range(3)] + [ask(100, 5, seed=9), ask(4, 5, seed=10)]
    for one in jobs[:3]:
        one.submit(scheduler)
    while not jobs[2].tokens:
        scheduler.run_turn()
    for one in jobs[3:]:
        one.submit(scheduler)
    scheduler.run_turn()
    assert scheduler.num_active == 3 and len(scheduler.waiting) == 2
    used = scheduler.memory.used
    scheduler.cancel(jobs[0].slot)  # running
    scheduler.cancel(jobs[4].slot)  # waiting
    scheduler.run_turn()
    assert jobs[0].end_reason == jobs[4].end_reason == "cancelled"
    assert scheduler.reading == [jobs[3].slot]
    scheduler.cancel(jobs[3].slot)  # being read
    scheduler.run_turn()
    assert jobs[3].end_reason == "cancelled"
    assert scheduler.num_active == 2
    assert scheduler.memory.used < used
    finish(scheduler)
    for one in jobs[1:3]:
        assert one.tokens == alone(model, one, 8)
    assert_empty(scheduler)


def test_the_queue_has_a_limit_and_the_budget_makes_requests_wait(model):
    row = Scheduler(model).memory.shape.row_bytes(CONFIG, 64)
    assert row == 2 * 2 * 2 * 16 * 4 * (13 + 4 + 64 // 5)
    scheduler = Scheduler(model, cache_bytes=4 * row, queue_limit=3)
    jobs = [ask(30, 20, seed=n) for n in range(6)]
    for one in jobs[:3]:
        one.submit(scheduler)
    with pytest.raises(RequestError, match="^3 requests wait already") as refused:
        jobs[3].submit(scheduler)
    assert refused.value.code is Code.QUEUE_FULL
    most = 0
    while not scheduler.idle:
        scheduler.run_turn()
        most = max(most, scheduler.num_active)
        assert scheduler.memory.allocated <= 4 * row
        if jobs and len(scheduler.waiting) < 3:
            for one in jobs[3:]:
                one.submit(scheduler)
                jobs.remove(one)
                break
    assert most >= 2 and not scheduler.waiting
    with pytest.raises(
        ValueError, match="^prompt and answer must fit the cache, got 190 tokens for a budget"
    ) as refused:
        ask(180, 10).submit(Scheduler(model, cache_bytes=2 * row))
    assert refused.value.code is Code.TOO_LONG
    with pytest.raises(
        ValueError, match="^prompt and answer must fit 256 tokens, got 250 and 7"
    ) as refused:
        ask(250, 7).submit(scheduler)
    assert refused.value.code is Code.TOO_LONG
    with pytest.raises(ValueError, match="^the prompt must have at least one token") as refused:
        ask(5, -1).submit(scheduler)
    assert refused.value.code is Code.INVALID
    with pytest.raises(ValueError, match="^window_size must be at least 1"):
        ask(5, window_size=0).submit(scheduler)


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_and_beginnings_share_one_budget(model, fixed):
    row = Scheduler(model).memory.shape.row_bytes(CONFIG, 64)
    scheduler = Scheduler(
        model, cache_bytes=12 * row, rows_per_pool=16, chunk_size=16, capture=False
    )
    scheduler.batch.fixed = fixed
    jobs = [ask(0, 5, prompt=prompt(40) + prompt(9, seed)) for seed in range(3)]
    jobs += [ask(0, 5, prompt=prompt(40) + prompt(9, seed), window_size=11) for seed in range(3)]
    for one in jobs:
        one.submit(scheduler)
        while not scheduler.idle:
            scheduler.run_turn()
            assert scheduler.memory.allocated <= 12 * row
    assert [one.cached_tokens for one in jobs] == [0, 32, 32] * 2
    assert jobs[2].tokens == alone(model, jobs[2])
    assert_empty(scheduler)


def test_the_policy_sees_the_load_and_chooses_for_requests_that_start_now(model):
    seen = []

    def policy(load):
        seen.append(load)
        return (2, 16) if load.queue_length < 2 else (4, 9)

    scheduler = Scheduler(model, policy=policy)
    jobs = [ask(30, 3, seed=n) for n in range(4)] + [
        ask(30, 3, seed=9, window_size=5),
        ask(30, 3, group_size=7, window_size=6),
    ]
    for one in jobs:
        one.submit(scheduler)
    finish(scheduler)
    assert [(one.config.group_size, one.config.window_size) for one in jobs] == [
        (4, 9),
        (4, 9),
        (4, 9),
        (4, 9),
        (2, 5),
        (7, 6),
    ]
    assert len(seen) >= 5 and seen[0].cache_bytes_budget == 2**30 and seen[0].prompt_length == 30
    assert seen[-1].time_to_first_token > 0 or seen[-1].queue_length == 1

    def broken(load):
        raise RuntimeError("no idea")

    for wrong in (broken, lambda load: (0, 5), lambda load: None):
        scheduler.admission = replace(scheduler.admission, policy=wrong)
        one = ask(8)
        one.submit(scheduler)
        finish(scheduler)
        assert one.end_reason == "error"
        assert isinstance(one.error, (RuntimeError, ValueError, TypeError))
    scheduler.admission = replace(scheduler.admission, policy=None)
    one = ask(8)
    one.submit(scheduler)
    finish(scheduler)
    assert one.end_reason == "length" and one.config == CONFIG
    assert_empty(scheduler)


@pytest.mark.parametrize("reading, accepted", [(2, True), (16, False)])
def test_a_request_is_sized_by_its_own_settings_while_another_is_read(model, reading, accepted):
    """Requests are submitted from other threads, at any moment of a step."""
    shape = Scheduler(model).memory.shape
    length = 240 if accepted else 256
    needed = 2 * shape.row_bytes(CONFIG, 256)
    scheduler = Scheduler(model, chunk_size=16, cache_bytes=needed if accepted else needed - 1)
    original, outcomes = model.model.forward, []

    def submit():
        one = ask(length - 4, 4, seed=2)
        try:
            one.submit(scheduler)
        except ValueError as error:
            outcomes.append(str(error))
        else:
            scheduler.cancel(one.slot)
            outcomes.append("accepted")

    def forward(*args, **kwargs):
        thread = threading.Thread(target=submit)
        thread.start()
        thread.join()
        return original(*args, **kwargs)

    first = ask(30, 1, group_size=reading)
    first.submit(scheduler)
    with mock.patch.object(model.model, "forward", forward):
        finish(scheduler)
    assert first.end_reason == "length" and len(outcomes) == 2
    for outcome in outcomes:
        assert outcome.startswith("accepted" if accepted else "prompt and answer must fit")


def test_an_error_ends_what_it_concerns_and_no_more(model, monkeypatch):
    # A captured step does not come to what fails here.
    scheduler = Scheduler(model, chunk_size=8, capture=False)
    good, bad, talker = ask(20, 30), ask(20, 5, seed=2), ask(9, 30, seed=3)
    good.submit(scheduler)
    while not good.tokens:
        scheduler.run_turn()
    original = model.model.forward

    def failing(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    bad.submit(scheduler)
    talker.submit(scheduler)
    monkeypatch.setattr(model.model, "forward", failing)
    scheduler._admit()
    scheduler._read_oldest = False  # the one that came first has its turn
    scheduler._read()
    assert bad.end_reason == "error" and isinstance(bad.error, torch.OutOfMemoryError)
    monkeypatch.setattr(model.model, "forward", original)
    talker.on_token = lambda token: 1 / 0
    finish(scheduler)
    assert isinstance(talker.error, ZeroDivisionError) and good.tokens == alone(model, good, 8)
    after = [ask(15, 20, seed=n) for n in range(3)]
    for one in after:
        one.submit(scheduler)
    while not after[2].tokens:
        scheduler.run_turn()
    monkeypatch.setattr(model.model, "forward", failing)
    scheduler.run_turn()
    assert [one.end_reason for one in after] == ["error"] * 3 and scheduler.handle.config == CONFIG
    monkeypatch.setattr(model.model, "forward", original)
    again = ask(15, 20, seed=0)
    again.submit(scheduler)
    finish(scheduler)
    assert again.tokens == alone(model, again, 8)
    assert_empty(scheduler)


@pytest.mark.parametrize("new", [1, 5])
def test_a_callback_that_fails_at_the_end_changes_no_other_answer(model, new):
    """The end falls on a prompt's first token, or into a step beside others."""
    scheduler = Scheduler(model, chunk_size=16)
    first, neighbour = ask(10, new, seed=1), ask(12, 15, seed=2)
    ends = []

    def failing(slot):
        ends.append(slot.end_reason)
        raise RuntimeError("the event loop is closed")

    first.slot = scheduler.submit(first.request, first.on_token, failing)
    neighbour.submit(scheduler)
    with mock.patch.object(request_module.log, "exception") as logged:
        finish(scheduler)
    assert ends == ["length"] and logged.call_count == 1
    assert first.tokens == alone(model, first) and neighbour.tokens == alone(model, neighbour)
    assert_empty(scheduler)


def test_a_callback_that_fails_on_a_token_changes_no_other_answer(model):
    scheduler = Scheduler(model, chunk_size=16)
    failing, neighbour = ask(10, 15, seed=1), ask(12, 15, seed=2)
    taken = []

    def third_fails(token):
        taken.append(token)
        if len(taken) == 3:
            raise RuntimeError("no text for this token")

    failing.on_token = third_fails
    for one in (failing, neighbour):
        one.submit(scheduler)
    finish(scheduler)
    assert failing.ends == ["error"] and isinstance(failing.error, RuntimeError)
    assert len(taken) == 3 and neighbour.tokens == alone(model, neighbour)
    assert_empty(scheduler)


def test_a_chunk_that_fails_leaves_the_models_settings_as_they_were(model, monkeypatch):
    """The request has its own g and s; the next one leaves both to the model."""
    scheduler = Scheduler(model, chunk_size=8)
    bad, after = ask(20, 5, group_size=3, window_size=7), ask(40, 9, seed=2)
    bad.submit(scheduler)
    scheduler.run_turn()
    assert bad.read == 8 and scheduler.handle.config == CONFIG
    with monkeypatch.context() as patch:
        patch.setattr(model.model, "forward", lambda *args, **kwargs: 1 / 0)
        scheduler.run_turn()
    assert isinstance(bad.error, ZeroDivisionError)
    assert scheduler.handle.config == CONFIG and model.config.cca == CONFIG.to_dict()
    after.submit(scheduler)
    finish(scheduler)
    assert after.config == CONFIG and after.tokens == alone(model, after, 8)
    assert_empty(scheduler)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_prompt_that_is_read_outlives_a_step_that_fails(model, monkeypatch, fixed):
    scheduler = Scheduler(model, chunk_size=8, capture=False)
    scheduler.batch.fixed = fixed
    lost, read = ask(20, 20), ask(40, 9, seed=2)
    lost.submit(scheduler)
    while not lost.tokens:
        scheduler.run_turn()
    read.submit(scheduler)
    scheduler.run_turn()
    assert scheduler.reading == [read.slot] and read.pool is lost.pool
    held = scheduler.memory.allocated
    half_written = read.pool
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.batch, "step", lambda *args: 1 / 0)
        scheduler._decode()
    assert lost.end_reason == "error"
    assert read.pool in scheduler.memory.pools
    assert read.pool is not half_written
    assert scheduler.memory.allocated == held
    finish(scheduler, 100)
    assert read.tokens == alone(model, read, 8)
    assert_empty(scheduler)


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_that_could_not_be_allocated_are_allocated_for_the_next(model, monkeypatch, fixed):
    scheduler, layers, original = Scheduler(model, chunk_size=8, capture=False), [], RowPool._like
    scheduler.batch.fixed = fixed

    def second_fails(pool, layer):
        layers.append(layer)
        if len(layers) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(pool, layer)

    monkeypatch.setattr(RowPool, "_like", second_fails)
    bad, good = ask(9, 5), ask(20, 5, seed=2)
    for one in (bad, good):
        one.submit(scheduler)
    finish(scheduler)
    assert isinstance(bad.error, torch.OutOfMemoryError) and good.tokens == alone(model, good, 8)
    assert_empty(scheduler)


def test_what_a_call_that_failed_had_computed_is_freed(model, monkeypatch):
    computed = []

    def failing(*args, **kwargs):
        activations = torch.zeros(5)
        computed.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(model.model, "forward", failing)
    scheduler, one = Scheduler(model), ask(9)
    one.submit(scheduler)
    finish(scheduler)
    assert isinstance(one.error, torch.OutOfMemoryError) and [gone() for gone in computed] == [None]


def test_models_that_cannot_be_served_are_refused(model):
    with pytest.raises(ValueError, match="^model must have CCA enabled"):
        Scheduler(tiny_model())
    with (
        corecontext.enabled(hybrid := tiny_model("gemma2")),
        pytest.raises(NotImplementedError, match="^model must have full attention in all layers"),
    ):
        Scheduler(hybrid)
    with corecontext.enabled(taken_back := tiny_model(), CONFIG, rollback=2):
        with pytest.raises(
            NotImplementedError, match="^rollback must be 0 in a model that is served, got 2"
        ):
            Scheduler(taken_back)
        Scheduler(taken_back, full=True)
    for name in (
        "cache_bytes",
        "host_bytes",
        "max_rows",
        "rows_per_pool",
        "chunk_size",
        "max_length",
    ):
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0"):
            Scheduler(model, **{name: 0})


def held_bytes(scheduler):
    """Bytes of everything that pools and beginnings hold, by their storage."""
    tensors = [x for pool in scheduler.memory.pools for buffers in pool._buffers for x in buffers]
    tensors += [
        x
        for node in scheduler.memory.prefixes._nodes.values()
        for held in (*node.raw, *node.cores)
        for x in held
    ]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()
    }
    return sum(storages.values())


SETTINGS = {
    "int8": {"cache_dtype": "int8"},
    "fp8": {"cache_dtype": "fp8"},
    "layers": {"layer_group_sizes": (3, 8)},
    "heads": {"layer_group_sizes": ((3, 1), 8)},
    "heads-all": {
        "head_group_sizes": (7, 4),
        "cache_dtype": "int8",
        "sink_size": 7,
    },
    "sinks": {"sink_size": 10},
    "all": {
        "cache_dtype": "int8",
        "layer_group_sizes": (8, 3),
        "sink_size": 7,
    },
}
COMBINED = ("fp8", "heads-all", "all")


# By default the settings that hold all others in rows of fixed size, the others in growing ones.
@pytest.mark.parametrize(
    "setting, fixed",
    [
        pytest.param(
            setting,
            fixed,
            id=f"{setting}-{'fixed' if fixed else 'growing'}",
            marks=[] if fixed == (setting in COMBINED) else [pytest.mark.slow],
        )
        for fixed in (False, True)
        for setting in SETTINGS
    ],
)
def test_eight_bits_and_a_g_for_each_layer(setting, fixed):
    draw, config = random.Random(3), CCAConfig.paper(5, 13, **SETTINGS[setting])
    with corecontext.enabled(model := tiny_model(), config):
        scheduler = Scheduler(model, chunk_size=16, rows_per_pool=3, capture=False)
        scheduler.batch.fixed = fixed  # as on a GPU, where idle rows run along
        document, jobs, measured = prompt(90), [], 0
        for number in range(10):
            beginning = document[: draw.choice((0, 20, 50, 90))]
            jobs.append(
                ask(
                    0,
                    draw.randint(2, 14),
                    number,
                    prompt=beginning + prompt(draw.randint(1, 40), number),
                    window_size=draw.choice((None, None, 7)),
                )
            )
            jobs[-1].submit(scheduler)
            for _ in range(draw.randint(0, 12)):
                scheduler.run_turn()
                if not scheduler.reading and all(pool.layers for pool in scheduler.memory.pools):
                    assert scheduler.memory.allocated == held_bytes(scheduler)
                    measured += bool(scheduler.memory.pools)
        finish(scheduler)
        assert [one.error for one in jobs] == [None] * 10
        assert sum(one.cached_tokens > 0 for one in jobs) >= 3
        assert measured > 3
        for one in jobs:
            assert one.config.layer_group_sizes == config.layer_group_sizes
            assert one.tokens == alone(model, one)
        assert_counted(scheduler.memory.prefixes)
        assert_empty(scheduler)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_branched_cache_is_the_same_bits_under_every_setting(setting):
    with corecontext.enabled(model := tiny_model(), CCAConfig.paper(5, 13, **SETTINGS[setting])):
        shared, fresh = (Scheduler(model, chunk_size=16) for _ in range(2))
        first, branched, again = (ask(0, 20, prompt=prompt(60) + prompt(9, n)) for n in (0, 1, 1))
        for scheduler, one in ((shared, first), (shared, branched), (fresh, again)):
            one.submit(scheduler)
            while not one.tokens:
                scheduler.run_turn()
            one.held = [
                x[one.pool.slots.index(one.slot)].clone()
                for buffers in one.pool._buffers
                for x in buffers
            ]
            finish(scheduler)
        assert [one.cached_tokens for one in (first, branched, again)] == [0, 48, 0]
        assert all(map(torch.equal, branched.held, again.held)) and branched.tokens == again.tokens


def test_a_g_for_each_layer_leaves_only_s_to_choose():
    with corecontext.enabled(
        model := tiny_model(), CCAConfig.paper(5, 13, layer_group_sizes=(3, 8))
    ):
        scheduler = Scheduler(model, chunk_size=16, policy=lambda load: (40, 6))
        row = scheduler.memory.shape.row_bytes(scheduler.handle.config, 64)
        assert row == 2 * 2 * 16 * 4 * ((13 + 2 + 64 // 3) + (13 + 7 + 64 // 8))
        # 6 for 2 groups, 8 for one.
        more = scheduler.memory.shape.row_bytes(scheduler.handle.config.replace(sink_size=4), 64)
        assert more == row + 2 * 2 * 16 * 4 * ((6 - 2) + (8 - 1))
        with pytest.raises(
            ValueError, match="^group_size must be left out, got 5 for a model with a g for each"
        ):
            ask(9, group_size=5).submit(scheduler)
        one = ask(30)
        one.submit(scheduler)
        finish(scheduler)
        assert one.config == CCAConfig.paper(5, 6, layer_group_sizes=(3, 8))
        assert one.tokens == alone(model, one)


def test_beginnings_are_dropped_in_one_pass_the_least_recently_used_leaf_first():
    """As if all leaves were compared before each: a chunk goes only after those behind it."""
    draw = random.Random(0)
    for limit in (0, 5, 20, 39):
        store, nodes = PrefixStore(4, 40, None), []
        for number in range(40):
            parent = draw.choice([None, *nodes])
            nodes.append(SimpleNamespace(key=number, parent=parent, children=0, nbytes=1))
            if parent is not None:
                parent.children += 1
        for last_use, node in enumerate(draw.sample(nodes, 40)):
            node.last_use = last_use
        kept = list(nodes)
        while len(kept) > limit:
            inner = [id(node.parent) for node in kept]
            leaves = [node for node in kept if id(node) not in inner]
            kept.remove(min(leaves, key=lambda node: node.last_use))
        store._nodes, store.nbytes = Counted((node.key, node) for node in nodes), 40
        store.trim(limit)
        assert list(store._nodes.values()) == kept and store.nbytes == limit
        assert store._nodes.passes == 2


def test_a_dropped_beginning_frees_its_memory_while_a_prompt_behind_it_is_read(model):
    scheduler = Scheduler(model, chunk_size=16)
    document = prompt(64)
    ask(0, 2, prompt=document).submit(scheduler)
    finish(scheduler)
    one = ask(0, 2, prompt=document + prompt(40))
    one.submit(scheduler)
    scheduler.run_turn()
    nodes = list(scheduler.memory.prefixes._nodes.values())
    tensors = [weakref.ref(x) for node in nodes for x in node.raw[0]]
    assert one.node in nodes and len(tensors) > 3
    scheduler.memory.prefixes.trim(0)
    assert not any(tensor() is not None for tensor in tensors)
    finish(scheduler)
    assert one.tokens == alone(model, one)


class Counted(dict):
    """Counts the passes over its values."""

    passes = 0

    def values(self):
        self.passes += 1
        return super().values()


@pytest.mark.parametrize("fixed", [False, True])
def test_caches_never_take_more_than_the_budget(model, fixed):
    """At all times: a prompt being read has a cache besides the row that it is promised."""
    row = Scheduler(model).memory.shape.row_bytes(CONFIG, 192)
    for rows in (2, 3, 5.5):
        scheduler = Scheduler(model, cache_bytes=int(rows * row), chunk_size=12, capture=False)
        scheduler.batch.fixed = fixed
        jobs = [ask(182 + n, 4, n) for n in range(4)]
        for one in jobs:
            one.submit(scheduler)
        most_read = 0
        while not scheduler.idle:
            scheduler.run_turn()
            most_read = max(most_read, len(scheduler.reading))
            assert scheduler.memory.allocated <= scheduler.memory.budget
            caches = [one.cache for one in scheduler.reading if one.cache is not None]
            layers = [layer.compact for cache in caches for layer in cache.layers]
            read = sum(x.nbytes for layer in layers for x in layer.buffers)
            assert held_bytes(scheduler) + read <= scheduler.memory.budget
        assert [one.error for one in jobs] == [None] * 4 and most_read == rows // 2


def test_a_broken_device_ends_all_requests_and_the_thread(model, monkeypatch, caplog):
    scheduler = Scheduler(model, max_rows=2)

    def step(pools):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(scheduler.batch, "step", step)
    ends = queue.Queue()
    for _ in range(3):
        scheduler.submit(Request([1, 2, 3], 4), on_end=ends.put)
    worker = Worker(scheduler)
    worker.start()
    slots = [ends.get(timeout=20) for _ in range(3)]
    assert all(isinstance(slot.error, torch.AcceleratorError) for slot in slots)
    worker.stop(20)
    assert worker.failed and worker.draining and not worker.alive and worker.idle
    (record,) = caplog.records
    assert record.levelname == "ERROR" and record.exc_info[0] is torch.AcceleratorError
    with pytest.raises(RequestError, match="shutting down"):
        worker.submit(Request([1], 1), mock.Mock())


def test_logits_that_are_no_numbers_end_their_request_alone(model, monkeypatch):
    scheduler = Scheduler(model, chunk_size=16)
    bad, good = ask(20, 9), ask(30, 9, seed=1, sampling=Sampling(1.0))
    for one in (bad, good):
        one.submit(scheduler)
    step = scheduler.batch.step

    def poisoned(pools):
        logits = step(pools)
        slots = [slot for pool in pools for slot in pool.slots]
        if len(bad.tokens) == 3 and bad.slot in slots:
            logits[slots.index(bad.slot), 5] = torch.nan
        return logits

    monkeypatch.setattr(scheduler.batch, "step", poisoned)
    finish(scheduler)
    assert bad.end_reason == "error" and isinstance(bad.error, InvalidLogits)
    assert len(bad.tokens) == 3 and good.tokens == alone(model, good)
    assert_empty(scheduler)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    first = ask(20, 9)
    first.submit(scheduler)
    finish(scheduler)
    assert isinstance(first.error, InvalidLogits) and not first.tokens


def test_an_empty_pool_that_is_wanted_is_not_given_up_for_itself(model):
    """With captured steps empty pools are kept until memory is short: then others go, and the
    wanted one stays."""
    row = Scheduler(model).memory.shape.row_bytes(CONFIG, 64)
    scheduler = Scheduler(
        model, cache_bytes=5 * row + row // 2, rows_per_pool=2, chunk_size=8, capture=False
    )
    scheduler.batch.fixed = True
    scheduler.memory.prefixes.limit = 0
    first = ask(30, 5)
    first.submit(scheduler)
    finish(scheduler)
    assert len(scheduler.memory.pools) == 1 and not scheduler.memory.pools[0].slots
    other, again = ask(30, 5, seed=1, group_size=4, window_size=14), ask(20, 9, seed=2)
    other.submit(scheduler)
    again.submit(scheduler)
    while not scheduler.idle:
        scheduler.run_turn()
        assert scheduler.memory.allocated <= scheduler.memory.budget
        assert all(one.pool in scheduler.memory.pools for one in scheduler.active())
    assert other.tokens == alone(model, other) and again.tokens == alone(model, again)
    assert_empty(scheduler)


def test_nobody_waits_for_the_memory_of_an_empty_pool_that_is_too_long(model):
    row = Scheduler(model).memory.shape.row_bytes(CONFIG, 256)
    scheduler = Scheduler(
        model, cache_bytes=int(3.5 * row), rows_per_pool=1, chunk_size=64, capture=False
    )
    scheduler.batch.fixed = True
    scheduler.memory.prefixes.limit = 0
    ask(200, 3).submit(scheduler)
    finish(scheduler)
    scheduler.memory.rows_per_pool = 8
    other, short = ask(30, 30, group_size=4), ask(20, 3)
    for one in (other, short):
        one.submit(scheduler)
        for _ in range(3):
            scheduler.run_turn()
    assert short.started is not None and other.end_reason is None
    finish(scheduler)
    assert short.tokens == alone(model, short, 64)
    assert_empty(scheduler)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_warming_up_leaves_nothing_behind(model, full, fixed):
    scheduler, tried = Scheduler(model, chunk_size=16, full=full, capture=False), []
    scheduler.batch.fixed = fixed
    place = scheduler.memory.place
    scheduler.memory.place = lambda config, length, *rest: (
        tried.append((config and (config.group_size, config.window_size), length))
        or place(config, length, *rest)
    )
    warm_up(scheduler, TablePolicy(((0.5, 5, 13), (1.0, 10, 30))).sizes)
    assert [sizes for sizes, _ in tried] == ([None] if full else [(5, 13), (5, 13), (10, 30)])
    # Core tokens are seen, too.
    assert all(length > 18 for _, length in tried) and (full or tried[2][1] > 41)
    assert_empty(scheduler)
    assert not scheduler.memory.pools and scheduler.load().time_to_first_token is None
    one = ask(40, 9)
    one.submit(scheduler)
    finish(scheduler)
    assert full or one.tokens == alone(model, one)


def test_warming_up_passes_over_what_does_not_fit(model):
    scheduler = Scheduler(model, chunk_size=16, cache_bytes=2**17, max_length=60, capture=False)
    warm_up(scheduler, [(1, 1000)])
    assert_empty(scheduler)


class Memory:
    """As PyTorch counts them: memory whose last graph has gone takes no more."""

    used: ClassVar[dict] = {}

    def __init__(self):
        self.pool = None

    def __del__(self):
        if self.pool is not None:
            self.used[self.pool] -= 1

    def replay(self):
        """The fake capture ran its step already."""


@contextlib.contextmanager
def recording(graph, pool=None, stream=None, capture_error_mode="global"):
    if Memory.used.get(pool, 1) < 1:
        raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
    Memory.used[pool], graph.pool = Memory.used.get(pool, 0) + 1, pool
    yield


def test_steps_are_captured_again_after_all_pools_were_given_up(model, monkeypatch, recwarn):
    """On a CPU graphs are fakes that count as PyTorch does."""
    if not torch.cuda.is_available():
        stream = mock.Mock()
        for name, fake in (
            ("graph_pool_handle", object),
            ("CUDAGraph", Memory),
            ("graph", recording),
            ("Stream", lambda device: stream),
            ("current_stream", lambda: stream),
            ("stream", contextlib.nullcontext),
            ("device", contextlib.nullcontext),
        ):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    scheduler = Scheduler(model, chunk_size=16)
    batch = scheduler.batch
    batch.fixed = True
    if batch._memory is None:
        batch._memory, batch._keeper = _graph_memory(model.device)
    for _ in range(2):
        ask(40, 4).submit(scheduler)
        finish(scheduler)
        assert [step._captured.recorded for step in batch._steps.values()] == [True]
        buffers = [weakref.ref(pool._buffers[0][0]) for pool in scheduler.memory.pools]
        gc.disable()  # nothing but the last reference frees memory
        try:
            while scheduler.memory.pools:
                scheduler.memory.drop(scheduler.memory.pools[0])
            assert buffers and not [one for one in buffers if one() is not None]
        finally:
            gc.enable()
        assert not batch._steps
    assert not [one for one in recwarn if "cannot be captured" in str(one.message)]
