"""The parts of the scheduler by themselves: memory, beginnings, rows, steps, the queue, and the
start of a server."""

import asyncio
import random
import signal
import socket
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from families import tiny_model, tokens
from transformers import AutoConfig, LlamaConfig

import corecontext
from corecontext import CCAConfig
from corecontext.cache import host_memory
from corecontext.cache.full import FullLayer
from corecontext.cost import CacheBytes, entry_bytes
from corecontext.files import UserError
from corecontext.inference import Load, TablePolicy, fuse
from corecontext.inference.room import RowShape
from corecontext.inference.sampling import INVALID, InvalidLogits
from corecontext.model_sizes import ModelSizes
from corecontext.ops.fetch import prompt_rule
from corecontext.serve import build, prefix, reading, step
from corecontext.serve import memory as serve_memory
from corecontext.serve import scheduler as scheduler_module
from corecontext.serve.admission import Admission
from corecontext.serve.errors import Code, InvalidRequest, RequestError
from corecontext.serve.logprobs import add_logprobs, add_prompt_logprobs, logprobs_of
from corecontext.serve.memory import CacheMemory
from corecontext.serve.prefix import PrefixStore
from corecontext.serve.request import Request, Slot, TokenLogprobs
from corecontext.serve.rows import IDLE, PooledLayer, RowPool
from corecontext.serve.scheduler import Scheduler
from corecontext.serve.settings import Serving
from corecontext.serve.step import DecodeBatch

pytestmark = pytest.mark.usefixtures("default_device")
CONFIG = CCAConfig.paper(5, 13)
A = CCAConfig.paper(4, 8)
B = CCAConfig.paper(4, 9)


@pytest.fixture
def model(default_device):
    model = tiny_model()
    with corecontext.enabled(model, CONFIG):
        yield model


def prompt(length, seed=0):
    return tokens(1, length, seed=1000 * seed + length)[0].tolist()


def finish(scheduler):
    for _ in range(1000):
        if scheduler.idle:
            return
        scheduler.run_turn()
    raise AssertionError("the scheduler did not come to an end")


# Memory


class Bytes(RowShape):
    """A shape whose rows take a byte for each token."""

    def __init__(self):
        super().__init__(sizes=None, itemsize=1)

    def bytes_of(self, config, max_length, before=0):
        return CacheBytes(max_length - before, 0)


def make_memory(budget, rows_per_pool=2, share=0, fixed=False):
    """A memory of such rows; `forgotten` has the pools whose steps were dropped."""
    batch = SimpleNamespace(fixed=fixed, forget=lambda pool: forgotten.append(pool))
    forgotten = []
    store = PrefixStore(16, share, Bytes())
    memory = CacheMemory(Bytes(), budget, rows_per_pool, store, batch)
    memory.forgotten = forgotten
    return memory


def make_pool(memory, length, rows=1, config=A, used=0, promised=0):
    """Add a pool with requests in some of its rows."""
    pool = RowPool(config, rows, length, memory.shape, fixed=memory.batch.fixed)
    pool.slots = [object() for _ in range(used)]
    pool.promised = promised
    memory.pools.append(pool)
    return pool


def fill_prefixes(memory, count, nbytes=10):
    """Let the store hold `count` beginnings that nothing needs."""
    for number in range(count):
        node = SimpleNamespace(key=number, parent=None, children=0, last_use=number, nbytes=nbytes)
        memory.prefixes._nodes[number] = node
    memory.prefixes.nbytes = count * nbytes


def test_bytes_are_counted_by_rows_prompts_and_beginnings():
    memory = make_memory(2000, share=500)
    make_pool(memory, 100, rows=3, used=1, promised=2)
    make_pool(memory, 64, rows=2, config=B, used=2)
    fill_prefixes(memory, 3)
    assert memory.used == (1 + 2 * 2) * 100 + 2 * 64
    assert memory.allocated == (3 + 2) * 100 + 2 * 64 + 30
    assert memory.unallocated == 2000 - memory.allocated
    assert memory.fits(A, 1000) == (2 * 1024 <= 2000)
    assert make_memory(256).fits(A, 65) and not make_memory(255).fits(A, 65)


def test_bytes_of_raw_tokens_count_where_they_are(monkeypatch):
    """Those by which full attention reads a prompt are on the device."""
    monkeypatch.setattr(Bytes, "bytes_of", lambda self, config, n, before=0: CacheBytes(n, 3 * n))
    memory = make_memory(10_000)
    config = A.replace(prefill="full")
    make_pool(memory, 100, rows=3, config=config, used=1, promised=2)
    used, allocated = memory.counted()
    assert used == ((1 + 2 * 2) * 100 + 2 * 100, 5 * 300)
    assert allocated == ((3 + 2) * 100 + 2 * 100, 5 * 300)


def test_short_requests_run_under_full_attention_while_there_is_room(monkeypatch):
    """It leaves the share of beginnings; where the settings ask for nothing else."""
    monkeypatch.setitem(prompt_rule.WHOLE_TOKENS, "cuda", 128)
    monkeypatch.setattr(serve_memory, "MANY_WHOLE", 6)
    config = CCAConfig(4, 10, fetch_groups=3, store="device")
    memory = make_memory(1200, share=300, fixed=True)
    assert memory.place(config, 100).config == config  # no steps are captured
    memory.clear()
    memory.runs_short_whole = True
    assert memory.place(config, 129).config == config
    assert memory.place(config, 100, may_be_whole=False).config == config
    for asked in ({"prefill": "fetch"}, {"cache_dtype": "int8"}, {"fetch_groups": 0}):
        assert memory.place(config.replace(**asked), 100).config is not None
    assert memory.place(None, 100).config is None
    memory.clear()

    pools = []
    for _ in range(6):
        pools.append(memory.place(config, 100))
        pools[-1].slots.append(object())
    assert [pool.config for pool in pools] == [None] * 6
    assert [pool.rows for pool in pools] == [2] * 6 and len({*pools}) == 3
    # Beside many such rows one waits for the next.
    assert memory.place(config, 100) is None
    assert memory.place(config, 100, may_be_whole=False).config == config
    monkeypatch.setitem(prompt_rule.WHOLE_TOKENS, "cuda", 192)
    assert memory.place(config, 150).config == config  # too long for one of these
    monkeypatch.setitem(prompt_rule.WHOLE_TOKENS, "cuda", 128)
    pools[0].slots.pop()
    assert memory.place(config, 64) is pools[0]

    # Idle pools of another length make room, beginnings do not.
    memory.clear()
    fill_prefixes(memory, 30)
    idle, busy = make_pool(memory, 64, rows=4), make_pool(memory, 100, rows=4, used=1)
    assert memory.place(config, 128).config is None and memory.pools[0] is busy
    assert idle in memory.forgotten and memory.prefixes.nbytes == 300
    busy.rows = 6
    assert memory.place(config, 30).config == config and memory.prefixes.nbytes == 300

    # An idle pool of rows too long goes, beginnings stay.
    memory = make_memory(3000, share=750, fixed=True)
    memory.runs_short_whole = True
    make_pool(memory, 960, rows=3, config=None)
    fill_prefixes(memory, 5)
    assert memory.place(config, 100).max_length == 128 and memory.prefixes.nbytes == 50


def test_few_rows_under_full_attention_leave_room_for_those_that_choose(monkeypatch):
    """Where the cache holds few of them, they take half of it at most, and none beside rows that
    choose."""
    monkeypatch.setitem(prompt_rule.WHOLE_TOKENS, "cuda", 128)

    def bytes_of(shape, config, length, before=0):
        return CacheBytes(length if config is None else length // 2, 0)

    monkeypatch.setattr(Bytes, "bytes_of", bytes_of)
    config = CCAConfig(4, 10, fetch_groups=3, store="device")
    memory = make_memory(1024, rows_per_pool=8, fixed=True)
    memory.runs_short_whole = True
    whole = memory.place(config, 100)
    assert (whole.config, whole.rows) == (None, 4)
    whole.slots = [object() for _ in range(4)]
    choosing = memory.place(config, 100)
    assert (choosing.config, choosing.rows) == (config, 7)
    choosing.slots.append(object())
    # Rows under full attention do not come again until no row chooses.
    choosing.slots *= 7
    memory.drop(whole)
    assert memory.place(config, 100).config == config
    choosing.slots.clear()
    memory.pools.pop()
    assert memory.place(config, 100).config is None


def test_idle_rows_stay_for_the_next_prompt_while_another_is_read():
    memory = make_memory(64 * 5 + 63, fixed=True)
    used, idle = make_pool(memory, 64, rows=2, used=1), make_pool(memory, 64)
    other = make_pool(memory, 64, config=B)
    assert memory.place(A, 64) is used
    used.promised = 1
    idle.rows = 2
    # It takes a cache to be read into, for which there is no room beside the first.
    assert memory.place(A, 64) is None
    assert memory.forgotten == [other] and memory.pools == [used, idle]
    used.slots.append(object())
    used.promised = 0
    assert memory.place(A, 64) is idle


def test_a_pool_is_made_when_prompts_have_been_read_if_it_has_more_rows_then():
    memory = make_memory(64 * 5, rows_per_pool=4)
    used = make_pool(memory, 64, used=0, promised=1)
    assert memory.place(A, 64) is None
    used.slots, used.promised = [object()], 0
    assert memory.place(A, 64).rows == 3


class Traffic:
    """Requests at random that are placed, read, decoded and ended, in memory without tensors."""

    def __init__(self, memory, draw):
        self.memory, self.draw = memory, draw
        self.reading, self.running, self.ended, self.kept = [], [], 0, 0

    def submit(self, config, length, may_be_whole):
        """Let requests go on until one is placed."""
        while (pool := self.memory.place(config, length, may_be_whole)) is None:
            assert self.reading or self.running, "a request that fits waits forever"
            self.step()
        assert self.memory.allocated <= self.memory.budget
        pool.promised += 1
        self.reading.append(pool)
        if len(self.reading) == 4 or self.draw.random() < 0.5:
            self.step()

    def step(self):
        """Read a prompt, then end some requests."""
        prefixes = self.memory.prefixes
        if self.reading:
            pool = self.reading.pop(self.draw.randrange(len(self.reading)))
            pool.promised -= 1
            pool.slots.append(object())
            self.running.append(pool)
            room = self.memory.unallocated + prefixes.nbytes
            if min(room, prefixes.limit) >= prefixes.nbytes + 10:
                self.kept += 1
                node = SimpleNamespace(key=self.kept, parent=None, children=0, nbytes=10)
                node.last_use = self.kept
                prefixes._nodes[node.key] = node
                prefixes.nbytes += 10
        for pool in list(self.running):
            if self.draw.random() < 0.1:
                self.running.remove(pool)
                pool.slots.pop()
                self.memory.release(pool)
                self.ended += 1
        assert self.memory.allocated <= self.memory.budget


@pytest.mark.parametrize("seed", range(40))
def test_every_request_that_fits_is_placed_within_the_budget(seed, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setitem(prompt_rule.WHOLE_TOKENS, "cuda", draw.choice((0, 128, 512)))
    factor = draw.choice((1, 4))

    def bytes_of(shape, config, length, before=0):
        return CacheBytes((length - before) // (1 if config is None else factor), 0)

    monkeypatch.setattr(Bytes, "bytes_of", bytes_of)
    fetching = CCAConfig(4, 10, fetch_groups=3, store="device")
    memory = make_memory(draw.randint(200, 6000), draw.choice((1, 3, 8)), fixed=draw.random() < 0.7)
    memory.prefixes.limit = draw.choice((0, memory.budget // 4))
    memory.runs_short_whole = draw.random() < 0.7
    traffic = Traffic(memory, draw)
    lengths = [draw.randint(1, 1000) for _ in range(draw.choice((1, 2, 6)))]
    count = 0
    for _ in range(150):
        config = draw.choice((A, fetching, fetching, None))
        length = draw.choice(lengths)
        if memory.fits(config, length):
            traffic.submit(config, length, draw.random() < 0.9)
            count += 1
    while traffic.reading or traffic.running:
        traffic.step()
    assert traffic.ended == count
    assert not any(pool.promised or pool.slots for pool in memory.pools)


def test_a_request_gets_the_shortest_pool_that_is_not_much_too_long():
    memory = make_memory(10_000)
    long, fitting = make_pool(memory, 192), make_pool(memory, 128)
    other = make_pool(memory, 64, config=B)
    assert memory.place(A, 60) is fitting  # at most twice as long as needed
    fitting.promised = 1
    fresh = memory.place(A, 60)
    assert fresh is memory.pools[3] and (fresh.max_length, fresh.rows) == (64, 2)
    assert memory.place(A, 96) is long and memory.place(B, 64) is other
    assert memory.place(B, 65).max_length == 128 and len(memory.pools) == 5


def test_a_pool_that_is_much_too_long_is_better_than_none():
    """A prompt needs a row and a cache beside it; a pool that is there has its rows already."""

    def placed(free, beginnings=0, length=192, used=1):
        memory = make_memory(2 * length + 10 * beginnings + free, share=10 * beginnings)
        pool = make_pool(memory, length, rows=2, used=used)
        fill_prefixes(memory, beginnings)
        found = memory.place(A, 60)
        return found and found.max_length, memory.prefixes.nbytes, pool in memory.pools

    assert placed(128) == (64, 0, True) and placed(127) == (None, 0, True)
    assert placed(128, 10) == (64, 100, True)
    assert placed(92, 10) == (192, 0, True)  # beginnings make room for its prompt
    assert placed(91, 10) == (64, 0, True)  # too little for 192, enough for two rows of 64
    assert placed(27, 10) == (None, 0, True)
    assert placed(128, length=128) == (128, 0, True) and placed(127, length=128) == (None, 0, True)
    # An idle pool stays where it is the one that is wanted, and makes room for another where not.
    assert placed(128, length=128, used=0) == (128, 0, True)
    assert placed(127, length=128, used=0) == (64, 0, False)


def test_idle_pools_go_before_beginnings_and_both_only_where_needed():
    memory = make_memory(1000, share=200)
    idle, busy, kept = (make_pool(memory, n, used=u) for n, u in ((300, 0), (200, 1), (100, 0)))
    fill_prefixes(memory, 20)
    assert memory.free(200) and memory.forgotten == [] and memory.prefixes.nbytes == 200
    assert memory.free(201, keep=[kept])
    assert memory.forgotten == [idle] and memory.pools == [busy, kept]
    assert memory.prefixes.nbytes == 200
    assert memory.free(505, keep=[kept]) and memory.prefixes.nbytes == 190  # by whole beginnings
    assert not memory.free(5000) and memory.pools == [busy] and memory.prefixes.nbytes == 0
    # Pools, too, go where only the share that beginnings may still fill would be missing.
    memory = make_memory(1000, share=200)
    make_pool(memory, 300)
    fill_prefixes(memory, 5)
    assert memory.free(500) and len(memory.pools) == 1
    assert memory.free(501) and memory.pools == [] and memory.prefixes.nbytes == 50


def test_a_pool_has_as_many_rows_as_fit_besides_the_rest():
    def rows(budget, share=0, held=0):
        memory = make_memory(budget, rows_per_pool=4, share=share)
        fill_prefixes(memory, held)
        return memory.place(A, 64).rows

    # A row for the prompt that is read, and the share of the beginnings, stay free.
    assert [rows(64 * n) for n in (2, 3, 4, 5, 9)] == [1, 2, 3, 4, 4]
    assert rows(64 * 5, share=64) == 3 and rows(64 * 5, share=60, held=6) == 3
    assert rows(64 * 3 - 1) == 1


def test_a_pool_that_a_request_left_is_kept_only_for_captured_steps():
    for fixed in (False, True):
        memory = make_memory(1000, fixed=fixed)
        idle, busy = make_pool(memory, 64), make_pool(memory, 64, promised=1)
        assert memory.place(B, 64).fixed == fixed
        memory.pools.pop()
        memory.release(idle)
        memory.release(busy)
        assert memory.pools == ([idle, busy] if fixed else [busy])
        assert memory.forgotten == ([] if fixed else [idle])


@pytest.mark.parametrize("fixed", [False, True])
def test_a_failed_pool_is_replaced_where_rows_of_it_are_promised(fixed):
    memory = make_memory(1000, fixed=fixed)
    pool, empty = make_pool(memory, 64, rows=3, config=B, promised=2), make_pool(memory, 64)
    fresh = memory.replace(pool)
    assert memory.pools == [empty, fresh] and memory.forgotten == [pool] and fresh is not pool
    assert (fresh.config, fresh.rows, fresh.max_length) == (B, 3, 64)
    assert (fresh.promised, fresh.fixed, fresh.slots) == (2, fixed, [])
    assert memory.replace(empty) is None and memory.pools == [fresh]
    assert memory.replace(empty) is None  # it is gone already
    fill_prefixes(memory, 4)
    memory.clear()
    assert memory.pools == [] and memory.prefixes.nbytes == 0 and memory.forgotten[-1] is fresh


# Beginnings


@pytest.fixture
def store(monkeypatch):
    """A store of beginnings without tensors; each takes 10 bytes."""

    class Node(SimpleNamespace):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    def make_node(key, layers, shape):
        return Node(key=key, parent=key[1], children=0, nbytes=10, length=layers[0].seq_len)

    monkeypatch.setattr(prefix, "Node", make_node)
    return PrefixStore(2, 40, None)


def add(store, config, parent, chunk, room=1000):
    length = 2 if parent is None else parent.length + 2
    layer = SimpleNamespace(compact=SimpleNamespace(seq_len=length))
    return store.add(config, parent, chunk, SimpleNamespace(layers=[layer]), room)


def test_the_longest_beginning_leaves_a_token_to_read(store):
    first = add(store, A, None, [1, 2])
    second = add(store, A, first, [3, 4])
    assert store.find(A, [1, 2, 3, 4, 5]) is second and store.find(A, [1, 2, 3, 4]) is first
    assert store.find(A, [1, 2]) is None and store.find(A, [1, 2, 9, 9, 3, 4, 5]) is first
    assert store.find(B, [1, 2, 3, 4, 5]) is None and store.find(None, [1, 2, 3]) is None
    assert store.find(A, [3, 4, 5]) is None  # it is a chunk behind another
    again = add(store, A, None, (1, 2))
    assert again is first and store.nbytes == 20 and first.children == 1


def test_later_chunks_of_all_prompts_end_in_the_same_places():
    store = PrefixStore(2, 40, None)
    assert [store.chunk_end(A, start) for start in (0, 6, 8, 10)] == [2, 8, 10, 12]
    store.later_chunk_size = 5
    assert [store.chunk_end(A, start) for start in (0, 6, 8, 13)] == [2, 8, 13, 18]
    assert [store.chunk_end(None, start) for start in (0, 6, 8, 13)] == [2, 8, 10, 15]


def test_the_beginning_that_was_not_used_for_longest_goes_first(store):
    nodes = [add(store, A, None, [n, n]) for n in range(4)]
    assert store.find(A, [0, 0, 5]) is nodes[0]
    add(store, A, None, [9, 9])
    assert store.find(A, [1, 1, 5]) is None and store.find(A, [0, 0, 5]) is nodes[0]
    assert store.nbytes == 40 and nodes[1].raw == nodes[1].cores == () and nodes[1].fetched == []
    store.trim(40)
    assert store.nbytes == 40
    store.trim(39)
    assert store.nbytes == 30 and store.find(A, [2, 2, 5]) is None


def test_a_chunk_is_kept_only_behind_those_before_it_and_where_there_is_room(store):
    first = add(store, A, None, [1, 2])
    second = add(store, A, first, [3, 4])
    store.trim(10)
    assert first.children == 0 and store.find(A, [1, 2, 3, 4, 5]) is first
    assert add(store, A, second, [5, 6]) is None  # its parent is gone
    orphan = SimpleNamespace(compact=SimpleNamespace(seq_len=4))
    assert store.add(A, None, [3, 4], SimpleNamespace(layers=[orphan]), 100) is None
    assert add(store, A, None, [7, 8], room=0) is None and store.nbytes == 10
    assert add(store, A, None, [7, 8], room=9) is None and store.nbytes == 0
    assert add(store, A, None, [7, 8], room=10) is not None
    store.limit = 0
    assert add(store, A, None, [1, 1]) is None and store.nbytes == 10
    store.limit = 10
    newest = add(store, A, None, [1, 1])
    assert newest is not None and store.find(A, [7, 8, 9]) is None and store.nbytes == 10


# Rows


def test_the_bytes_of_a_row():
    shape = RowShape(ModelSizes(query_heads=8, kv_heads=2, head_dim=16, layers=3), itemsize=2)
    assert shape.row_bytes(None, 100) == 3 * 2 * 100 * 2 * 16 * 2
    assert entry_bytes(A, 16, 2) == 2 * 16 * 2
    assert entry_bytes(A.replace(core_mass=True), 16, 2) == 2 * 16 * 2 + 4
    assert entry_bytes(A.replace(group_size=1, core_mass=True), 16, 2) == 2 * 16 * 2
    assert entry_bytes(A.replace(cache_dtype="int8"), 16, 2) == 2 * (16 + 4)
    assert entry_bytes(A.replace(cache_dtype="fp8", core_mass=True), 16, 2) == 2 * (16 + 4) + 4
    ring = 8 + 3
    assert shape.entries(None, 100) == 100 and shape.entries(A, 103) == ring + 25
    assert shape.entries(A.replace(sink_size=5), 103) == ring + 8 + 23
    assert shape.row_bytes(A, 100, before=48) == 3 * 2 * (ring + 25 - 12) * 64
    # With fetch, raw tokens count where they are.
    fetch = A.replace(fetch_groups=2, fetch_index="mean", core_mass=False)
    compact = shape.row_bytes(A.replace(core_mass=False), 100)
    assert shape.row_bytes(fetch, 100) == compact + 3 * 2 * (100 * 64 + 25 * 32)
    host = fetch.replace(store="host", fetch_slots=0)
    assert shape.bytes_of(host, 100) == (compact + 3 * 2 * 25 * 32, 3 * 2 * 100 * 64)
    slots = 4 * (4 * 64 + 12) + 4 * 26
    by_slots = (compact + 3 * 2 * (25 * 32 + slots), 3 * 2 * 100 * 64)
    assert shape.bytes_of(host.replace(fetch_slots=4), 100) == by_slots
    assert shape.bytes_of(host, 100, before=40).host == 3 * 2 * 60 * 64
    scarce = replace(shape, host_rate=5.5)
    assert scarce.row_bytes(host, 100) == 5.5 * 3 * 2 * 100 * 64
    assert scarce.row_bytes(fetch, 100) == shape.row_bytes(fetch, 100)
    config = mock.MagicMock()
    text = SimpleNamespace(
        num_attention_heads=8, num_key_value_heads=4, head_dim=16, num_hidden_layers=3
    )
    config.get_text_config.return_value = text
    of_config = RowShape.of(config, torch.float16)
    assert of_config == RowShape(ModelSizes(8, 4, 16, 3), 2)


def read_prompt(length, value):
    """The cache of a prompt that was read: one layer of full attention."""
    layer = FullLayer(8)
    layer.buffers = [torch.full((1, 1, 8, 2), float(value)) for _ in range(2)]
    layer.seen = length
    return [layer]


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_of_a_pool_are_the_first_and_close_up(fixed):
    shape = RowShape(ModelSizes(query_heads=1, kv_heads=1, head_dim=2, layers=1), itemsize=4)
    pool = RowPool(None, 3, 8, shape, fixed=fixed)
    pool.seen = 5
    assert pool.is_idle and pool.has_room(None, 8) and not pool.has_room(None, 9)
    assert not pool.has_room(A, 8) and pool.nbytes == 3 * 8 * 2 * 2 * 4
    for name, length in (("a", 2), ("b", 4), ("c", 3)):
        pool.add(name, read_prompt(length, ord(name)))
    assert pool.slots == ["a", "b", "c"] and pool._pads == [3, 1, 2] == pool._pad.tolist()
    assert not pool.has_room(None, 1) and not pool.is_idle
    for buffer in pool._buffers[0]:
        assert buffer[:, 0, :, 0].tolist() == [
            [97.0] * 2 + [0.0] * 6,
            [98.0] * 4 + [0.0] * 4,
            [99.0] * 3 + [0.0] * 5,
        ]
    with pytest.raises(AssertionError, match="full pool"):
        pool.add("d", read_prompt(1, 1))
    pool.remove("a")
    assert pool.slots == ["c", "b"] and pool._pads == [2, 1, IDLE] == pool._pad.tolist()
    assert all(buffer[0, 0, :4, 1].tolist() == [99.0] * 3 + [0.0] for buffer in pool._buffers[0])
    pool.remove("b")
    assert pool.slots == ["c"] and pool._pads == [2, IDLE, IDLE] == pool._pad.tolist()
    pool.promised = 2
    assert not pool.has_room(None, 1)
    pool.promised = 1
    assert pool.has_room(None, 1)
    pool.hold(2)
    cache = pool.layers[0]
    assert cache.pads == [2, IDLE] and cache.pad.tolist() == [2, IDLE]
    assert [len(buffer) for buffer in cache.buffers] == [2, 2] and int(cache.seen) == 0
    pool.remove("c")
    assert pool.slots == [] and not pool.is_idle
    pool.add("d", read_prompt(1, 100))  # behind a longer one
    assert all(buffer[0, 0, :, 0].tolist() == [100.0] + [0.0] * 7 for buffer in pool._buffers[0])
    pool.remove("d")
    pool.promised = 0
    assert pool.is_idle


def test_rows_of_several_pools_attend_each_for_themselves():
    calls = []

    def layer(number):
        def attend(q, k, v, **options):
            calls.append((number, len(q), len(k), len(v), options))
            return q + number

        return SimpleNamespace(attend=attend)

    x = torch.arange(5.0)[:, None]
    out = PooledLayer([layer(10), layer(20)], [2, 3]).attend(x, x, x, scale=2)
    assert out[:, 0].tolist() == [10, 11, 22, 23, 24]
    assert calls == [(10, 2, 2, 2, {"scale": 2}), (20, 3, 3, 3, {"scale": 2})]
    assert PooledLayer([layer(1)], [5]).attend(x, x, x)[4] == 5


def test_steps_on_a_gpu_have_rows_in_powers_of_four_and_few_are_kept(model, monkeypatch):
    batch = DecodeBatch(model, capture=False)
    sizes = [1, 2, 3, 4, 5, 15, 16, 17]

    def rounded(rows, fixed, beside=0):
        pools = [SimpleNamespace(fixed=fixed, rows=rows, slots=[0] * n) for n in sizes]
        other = SimpleNamespace(fixed=fixed, rows=12, slots=[0] * beside)
        return [batch._rows_of([pool, other])[0][1] for pool in pools]

    assert rounded(100, True) == [1, 4, 4, 4, 16, 16, 16, 100] and rounded(100, False) == sizes
    # All rows of each pool where they are many together.
    assert rounded(20, True) == [1, 4, 4, 4, 16, 16, 16, 20]
    assert rounded(20, True, beside=12) == [1, 4, 4, 4, 20, 20, 20, 20]
    assert rounded(20, False, beside=12) == sizes

    made = []
    monkeypatch.setattr(step, "Step", lambda *given: made.append(given) or given)
    monkeypatch.setattr(step, "KEEP_GRAPHS", 2)
    plain, asking = (SimpleNamespace(asks_device=asks) for asks in (False, True))
    pools = [SimpleNamespace(layers=[plain, plain]) for _ in range(3)]
    shares = [((pool, 1),) for pool in pools]
    assert batch._step_for(shares[0]) == (model, shares[0]) and not batch._steps
    batch._memory = "memory"
    first = batch._step_for(shares[0])
    assert first == (model, shares[0], "memory", 2) and batch._step_for(shares[0]) is first
    assert batch._step_for(shares[1])[3] == 1  # its kernels are compiled
    assert batch._step_for(shares[0]) is first
    batch._step_for(shares[2])  # drops the one that was not used for longest
    assert [shares for _, shares, _, _ in batch._steps.values()] == [shares[0], shares[2]]
    batch._step_for(((pools[1], 4), (pools[2], 1)))
    batch.forget(pools[1])
    assert [shares for _, shares, _, _ in batch._steps.values()] == [shares[2]]
    batch._step_for(((pools[1], 4), (pools[2], 1)))
    batch.forget(pools[2])
    assert not batch._steps
    # Steps that ask the device cannot be captured, whatever runs beside them.
    shares = ((pools[0], 1), (SimpleNamespace(layers=[plain, asking]), 1))
    assert batch._step_for(shares) == (model, shares) and not batch._steps
    batch._step_for(((SimpleNamespace(layers=[plain]), 1),))
    assert len(batch._steps) == 1


# Admission and log-probabilities


def admission(config=CONFIG, full=False, policy=None, fits=lambda config, length: True):
    memory = SimpleNamespace(fits=fits, budgets="3 MiB")
    return Admission(20, memory, config, full, policy)


@pytest.mark.parametrize(
    "length, new, code",
    [
        (15, 5, None),
        (16, 5, Code.TOO_LONG),
        (1, 0, None),
        (0, 5, Code.INVALID),
        (5, -1, Code.INVALID),
    ],
)
def test_a_request_fits_the_longest_length_exactly(length, new, code):
    request = Request([1] * length, new)
    if code is None:
        assert admission().check(request) is None
        return
    with pytest.raises(InvalidRequest) as refused:
        admission().check(request)
    assert refused.value.code is code and f"got {length} and {new}." in str(refused.value)


def test_settings_follow_the_request_the_policy_and_the_prompt():
    loads = []
    policy = lambda load: loads.append(load) or (2, 7)  # noqa: E731
    load = Load(3)
    rules = admission(policy=policy)
    assert rules.settings_for(Request([1], 1), load) == CCAConfig.paper(2, 7) and loads == [load]
    assert rules.settings_for(Request([1], 1), None) == CONFIG and loads == [load]
    by_length = admission(CCAConfig.paper(window_size=4, num_groups=2))
    assert by_length.settings_for(Request([1] * 24, 1), load).group_size == 10
    full = admission(full=True, policy=policy)
    assert full.settings_for(Request([1], 1), load) is None
    for sizes in ({"group_size": 2}, {"window_size": 2}, {"fetch_groups": 0}):
        with pytest.raises(ValueError, match="^group_size, window_size and fetch_groups must be"):
            full.settings_for(Request([1], 1, **sizes), load)
    varied = admission(CCAConfig.paper(5, 13, head_group_sizes=(3, 8)), policy=policy)
    assert varied.settings_for(Request([1], 1), load).window_size == 7
    with pytest.raises(ValueError, match=r"^group_size must be left out, got 5 .*\(3, 8\)"):
        varied.settings_for(Request([1], 1, group_size=5), load)
    fetches = admission(CONFIG.replace(fetch_groups=4), policy=policy)
    assert fetches.settings_for(Request([1], 1, fetch_groups=2), load).fetch_groups == 2
    # A request costs by its own tokens, whatever sizes it names.
    large = rules.settings_for(Request([1], 9, group_size=2**20, window_size=2**24), load)
    assert (large.group_size, large.window_size) == (64, 64)
    wide = admission(CCAConfig.paper(100, 200))
    chosen = Request([1], 9, group_size=90, window_size=300)
    assert wide.settings_for(chosen, load) == CCAConfig.paper(90, 200)
    with pytest.raises(ValueError, match="^fetch_groups must be at most the model's 4, got 5. Ask"):
        fetches.check(Request([1], 1, fetch_groups=5))


def test_a_request_ends_at_its_own_tokens_alone():
    slots = [Slot(Request([1], 2)), Slot(Request([1], 2, eos=frozenset({5})))]
    assert [[slot.take(token) for token in (0, 5)] for slot in slots] == [
        [None, "length"],
        [None, "stop"],
    ]


def test_log_probabilities_are_those_of_the_rows_that_want_them():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]))
    found = logprobs_of(logits, [1, 2], 2)
    assert [record.token for record in found] == [1, 2]
    assert [round(record.logprob, 4) for record in found] == [-1.3863, -0.6931]
    assert [token for token, _ in found[1].top] == [2, 1] and found[0].top[0][0] == 0
    assert len(logprobs_of(logits, [1, 2], 9)[0].top) == 3
    assert logprobs_of(logits, [1, 2], 0)[0].top == []
    for bad in (torch.nan, torch.inf):
        wrong = logits.clone()
        wrong[1, 0] = bad
        with pytest.raises(InvalidLogits):
            logprobs_of(wrong, [1, 2], 0)
    slots = [Slot(Request([5, 6, 7], 1, logprobs=count)) for count in (None, 1, 2)]
    add_logprobs(slots, torch.stack([logits[0], wrong[1], logits[1]]), [0, INVALID, 1])
    assert [len(slot.logprobs) for slot in slots] == [0, 0, 1]  # a broken row concerns itself alone
    assert slots[2].logprobs[0].token == 1 and len(slots[2].logprobs[0].top) == 2

    scored = Slot(Request([0, 2, 1, 1], 1, logprobs=1))
    add_prompt_logprobs(scored, logits, 0)
    add_prompt_logprobs(scored, logits, 2)  # behind its last token the answer begins
    assert scored.logprobs[0] == TokenLogprobs(0)
    assert [record.token for record in scored.logprobs] == [0, 2, 1, 1]
    expected = [0.25, 0.3, 0.25]
    values = torch.tensor([record.logprob for record in scored.logprobs[1:]]).exp()
    torch.testing.assert_close(values, torch.tensor(expected))


# The queue


def test_raw_tokens_have_a_budget_of_their_own():
    model = tiny_model()
    with corecontext.enabled(model, CONFIG.replace(fetch_groups=2, store="host")):
        scheduler = Scheduler(model, cache_bytes=3000, host_bytes=1000)
        assert scheduler.memory.shape.host_rate == 3.0 and scheduler.memory.budget == 3000
        assert scheduler.memory.budgets == "0 MiB, and 0 MiB in host memory"
        assert Scheduler(model, host_bytes=2**21).memory.budgets.endswith(
            ", and 2 MiB in host memory"
        )
        assert Scheduler(model, full=True).memory.shape.host_rate == 0
    with corecontext.enabled(tiny_model(), CONFIG) as handle:
        assert Scheduler(handle.model).memory.shape.host_rate == 0


def test_requests_choose_few_sizes_at_once(model):
    """Each set of sizes takes rows and a part of every step of its own."""
    scheduler = Scheduler(model, client_sizes=2)
    for sizes in ({}, {"group_size": 2}, {"window_size": 4}, {"group_size": 2}):
        scheduler.submit(Request([2] * 5, 2, **sizes))
    with pytest.raises(RequestError, match="^requests of 2 other sizes run already") as refused:
        scheduler.submit(Request([2] * 5, 2, group_size=3))
    assert refused.value.code is Code.QUEUE_FULL
    finish(scheduler)
    scheduler.submit(Request([2] * 5, 2, group_size=3))
    scheduler = Scheduler(model, client_sizes=0)
    scheduler.submit(Request([2] * 5, 2))
    with pytest.raises(InvalidRequest, match="lets no request choose them"):
        scheduler.submit(Request([2] * 5, 2, group_size=3))
    with pytest.raises(ValueError, match="^client_sizes must be at least 0, got -1"):
        Scheduler(model, client_sizes=-1)


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_no_request_enters_a_queue_whose_thread_has_ended(model, monkeypatch, end):
    """A request that is being checked while the thread ends would wait for ever."""
    scheduler = Scheduler(model)

    def check(request):
        scheduler.close() if end == "close" else scheduler.abandon(RuntimeError("gone"))

    monkeypatch.setattr(Admission, "check", lambda self, request: check(request))
    with pytest.raises(RequestError) as refused:
        scheduler.submit(Request([1, 2], 3))
    assert refused.value.code is Code.DRAINING and scheduler.idle


def test_a_request_that_waits_for_memory_has_no_sizes_yet(model):
    row = Scheduler(model).memory.shape.row_bytes(CONFIG, 64)
    scheduler = Scheduler(model, cache_bytes=2 * row, policy=lambda load: (5, 13))
    running = scheduler.submit(Request([1] * 9, 55))
    waiting = scheduler.submit(Request([2] * 9, 55))
    for _ in range(3):
        scheduler.run_turn()
    assert running.config == CONFIG and waiting in scheduler.waiting
    assert waiting.config is None
    finish(scheduler)
    assert waiting.config == CONFIG


def test_a_device_that_is_broken_ends_no_request_alone(model, monkeypatch):
    scheduler = Scheduler(model)
    slot = scheduler.submit(Request([1, 2], 3))
    broken = mock.Mock(side_effect=torch.AcceleratorError("device-side assert triggered"))
    monkeypatch.setattr(scheduler_module, "read_next_chunk", broken)
    with pytest.raises(torch.AcceleratorError):
        scheduler.run_turn()
    assert slot.end_reason is None


def test_prompts_and_steps_run_norms_by_kernels_as_in_the_engine(model, monkeypatch):
    monkeypatch.setattr(fuse, "_has_kernels", lambda model: True)
    scheduler, norm, seen = Scheduler(model), model.model.norm, []
    norm.register_forward_pre_hook(lambda *args: seen.append(norm._compiled_call_impl))
    scheduler.submit(Request([1, 2, 3], 3))
    while scheduler.run_turn():
        pass
    assert len(seen) == 3 and all(seen) and not norm._compiled_call_impl


def test_four_prompts_are_read_at_once_in_alternation(model, monkeypatch):
    scheduler = Scheduler(model)
    order = []

    def read(model, slot, memory):
        order.append(slot.request.seed)
        slot.read += 10

    monkeypatch.setattr(scheduler_module, "read_next_chunk", read)
    slots = [scheduler.submit(Request([1] * n, 5, seed=n)) for n in (90, 40, 60, 30, 20)]
    for _ in range(6):
        assert scheduler.run_turn()
    # The first to come, and the nearest to its end; the fifth waits.
    assert order == [90, 30, 90, 30, 90, 30]
    assert scheduler.reading == slots[:4] and list(scheduler.waiting) == slots[4:]
    scheduler.cancel(slots[0])
    for _ in range(4):
        scheduler.run_turn()
    assert order[6:] == [40, 30, 40, 30]  # 30 has nothing left: the nearest of all
    assert scheduler.reading == slots[1:]


def test_the_load_is_of_the_others_and_recent(model, monkeypatch):
    clock = [1000.0]
    fake = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr(scheduler_module, "time", fake)
    scheduler = Scheduler(model, cache_bytes=12345678, chunk_size=2)
    assert scheduler.load() == Load(0, 0, 12345678, None, 0)
    slots = [scheduler.submit(Request([n] * n, 9, arrived=990.0)) for n in (3, 5)]
    assert scheduler.load(7) == Load(1, 0, 12345678, None, 7)
    for now, seconds in ((999.0, None), (1000.0, 10.0), (1000.5, 10.0), (1000.75, 10.0)):
        clock[0] = now
        scheduler.run_turn()
        assert scheduler.load().time_to_first_token == seconds
    assert (slots[0].started, slots[0].first_token_at) == (999.0, 1000.0)
    clock[0] = 1001.0
    scheduler.run_turn()
    assert scheduler.load().time_to_first_token == 11.0 and scheduler.load().queue_length == 0
    clock[0] = 1030.9
    assert scheduler.load().time_to_first_token == 11.0
    clock[0] = 1031.0
    assert scheduler.load().time_to_first_token is None
    finish(scheduler)
    assert scheduler.load().cache_bytes_used == 0
    clock[0] = 1005.0
    scheduler.clear()
    clock[0] = 5.0
    assert scheduler.load().time_to_first_token is None


def test_requests_end_at_their_deadline_wherever_they_are(model, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    scheduler = Scheduler(model, max_rows=2, chunk_size=8)
    ends = []
    slots = [
        scheduler.submit(Request([1] * n, 9, deadline=end), on_end=ends.append)
        for n, end in ((5, 110.0), (100, 120.0), (5, 110.0), (5, None))
    ]
    for _ in range(2):
        scheduler.run_turn()
    assert slots[0].made and slots[1] in scheduler.reading and slots[0].started == 100.0
    assert (slots[0].first_token_at, slots[2].started) == (100.0, None)
    clock[0] = 110.0
    scheduler.run_turn()
    assert ends == []
    clock[0] = 110.5
    scheduler.run_turn()
    assert {id(slot) for slot in ends} == {id(slots[0]), id(slots[2])}
    clock[0] = 120.5
    scheduler.run_turn()
    assert ends[2] is slots[1] and {slot.end_reason for slot in ends} == {"timeout"}
    finish(scheduler)
    assert slots[3].end_reason == "length" and scheduler.memory.used == 0


@pytest.mark.parametrize("how", ["length", "cancelled", "error", "first"])
def test_a_request_that_has_ended_holds_nothing(model, monkeypatch, how):
    scheduler = Scheduler(model, chunk_size=4)
    slot = scheduler.submit(Request([1] * 12, 1 if how == "first" else 4))
    neighbour = scheduler.submit(Request([2] * 3, 9))
    scheduler.run_turn()
    assert slot.cache is not None and slot.ids is not None and slot.node is not None
    if how == "cancelled":
        scheduler.cancel(slot)
    if how == "error":
        with monkeypatch.context() as patch:
            patch.setattr(scheduler_module, "read_next_chunk", lambda *given: 1 / 0)
            scheduler._read_oldest = False
            scheduler.run_turn()
    while slot.end_reason is None:
        scheduler.run_turn()
    assert slot.end_reason == ("length" if how == "first" else how)
    held = (slot.cache, slot.ids, slot.node, slot.pool, slot.generator)
    assert held == (None,) * 5
    assert neighbour.end_reason is None
    finish(scheduler)
    assert neighbour.made == 9 and scheduler.memory.used == 0
    # On a GPU an idle pool stays, with its captured steps.
    assert scheduler.batch.fixed or not scheduler.memory.pools


def test_a_request_ends_once_where_the_device_breaks_on_its_way_to_a_row(model, monkeypatch):
    scheduler = Scheduler(model)
    ends = []
    slot = scheduler.submit(Request([1] * 3, 9), on_end=ends.append)
    broken = mock.Mock(side_effect=torch.AcceleratorError("device-side assert triggered"))
    monkeypatch.setattr(RowPool, "_set_pad", broken)  # the last of all that `add` writes
    with pytest.raises(torch.AcceleratorError) as error:
        scheduler.run_turn()
    scheduler.abandon(error.value)
    assert ends == [slot]


def test_a_prompt_that_is_scored_is_read_in_small_chunks(model, monkeypatch):
    monkeypatch.setattr(reading, "SCORED_CHUNK", 4)
    scheduler = Scheduler(model, chunk_size=6)
    plain = scheduler.submit(Request([1] * 14, 1))
    read = []
    while not scheduler.idle:
        scheduler.run_turn()
        read.append(plain.read)
    assert read == [6, 12, 14] and len(scheduler.memory.prefixes._nodes) == 2
    records = []
    scored = Request([1] * 14, 1, logprobs=0, prompt_logprobs=True)
    slot = scheduler.submit(scored, on_logprobs=records.extend)
    read = []
    while not scheduler.idle:
        scheduler.run_turn()
        read.append(slot.read)
    assert read == [4, 8, 12, 14] and slot.cached_tokens == 0 and len(records) == 15
    assert len(scheduler.memory.prefixes._nodes) == 2
    scheduler = Scheduler(model, chunk_size=3)
    slot = scheduler.submit(scored)
    scheduler.run_turn()
    assert slot.read == 3


# The start of a server


@pytest.fixture
def made(monkeypatch):
    """What a server is made of: the arguments of `load` and of the scheduler."""
    made = SimpleNamespace(device=torch.device("cpu"), config=A, load=None)
    made.hf_config = LlamaConfig()
    monkeypatch.setattr(build, "load_config", lambda source: made.hf_config)

    def load(source, **options):
        made.load = (source, options)
        return SimpleNamespace(
            model=SimpleNamespace(device=made.device), tokenizer="tokenizer", config=made.config
        )

    def scheduler(model, **options):
        made.options = options
        return SimpleNamespace(model=model, policy=options["policy"])

    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr(scheduler_module, "Scheduler", scheduler)
    monkeypatch.setattr(build, "_cache_bytes", lambda serving, device: 12345)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**21)
    return made


def test_the_settings_of_a_server_reach_its_model_and_its_scheduler(made):
    assert build.make_scheduler(Serving("m"))[1] == "tokenizer"
    defaults = dict(made.options)
    assert (defaults["cache_bytes"], defaults["host_bytes"]) == (12345, 2**20)
    assert (defaults["rows_per_pool"], defaults["chunk_size"]) == (8, 256)
    assert defaults["later_chunk_size"] is None
    made.device = torch.device("cuda")
    build.make_scheduler(Serving("m", host_cache_mib=3))
    on_gpu = {"rows_per_pool": 16, "chunk_size": 2048, "later_chunk_size": 4096}
    on_gpu["host_bytes"] = 3 * 2**20
    assert made.options == {**defaults, **on_gpu}
    chosen = {
        "rows_per_pool": 3,
        "queue_limit": 5,
        "client_sizes": 0,
        "chunk_size": 7,
        "max_length": 90,
    }
    build.make_scheduler(
        Serving("m", policy="elastic", first_token_limit=3.0, max_running=2, **chosen)
    )
    policy = made.options["policy"]
    assert policy == TablePolicy(((0.5, 4, 8), (0.8, 8, 4), (1.0, 16, 2)), first_token_limit=3.0)
    chosen |= {"policy": policy, "max_rows": 2, "later_chunk_size": 14, "host_bytes": 3 * 2**19}
    assert made.options == {**defaults, **chosen}
    made.config = made.config.replace(fetch_groups=8)
    build.make_scheduler(Serving("m", policy="elastic"))
    assert made.options["policy"].sizes[:3] == [(4, 8, 8), (4, 8, 4), (4, 8, 2)]
    sizes = {"group_size": 2, "window_size": 3, "sinks": 4, "core_mass": False}
    sizes |= {"fetch_groups": 5, "fetch_index": "mean", "store": "host", "prefill": "fetch"}
    sizes |= {"fetch_slots": 9}
    serving = Serving("m", dtype="float16", device="cpu", untested=True, settings=sizes)
    build.make_scheduler(serving)
    assert made.load[1] == {
        **sizes,
        "dtype": "float16",
        "device": "cpu",
        "untested": True,
        "warn": True,
    }
    build.make_scheduler(Serving("m", method="full"))
    assert made.options["full"] and not made.load[1]["warn"]


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_loaded(made):
    for name, words in (
        ("gemma3_text", "^model must have full attention in all layers .*`corecontext generate`"),
        ("gpt2", "^architecture 'gpt2' is not tested"),
    ):
        made.hf_config = AutoConfig.for_model(name)
        with pytest.raises(UserError, match=words):
            build.make_scheduler(Serving("m"))
    assert made.load is None


def test_a_server_on_a_gpu_is_warmed_up_with_its_tables_sizes(made, monkeypatch):
    warmed = []
    monkeypatch.setattr(
        "corecontext.serve.warm_up.warm_up", lambda scheduler, sizes: warmed.append(sizes)
    )
    monkeypatch.setattr("corecontext.serve.http.create_app", lambda *given: given[1:])
    serving = Serving("m", policy="elastic")
    assert build.make_app(serving) == ("tokenizer", serving) and warmed == []
    made.device = torch.device("cuda")
    build.make_app(serving)
    build.make_app(Serving("m"))
    assert warmed == [[(4, 8), (8, 4), (16, 2)], ()]


def test_the_budget_is_set_or_a_share_of_the_free_memory(monkeypatch):
    free = {"value": 1000}
    monkeypatch.setattr("corecontext.inference.chunk_size.free_bytes", lambda device: free["value"])
    assert build._cache_bytes(Serving(cache_mib=3), "cuda") == 3 * 2**20
    assert build._cache_bytes(Serving(), "cuda") == 800
    free["value"] = None
    for available, budget in ((4000, 1000), (None, 2**30)):  # within the control group's limit
        monkeypatch.setattr(host_memory, "available_bytes", lambda given=available: given)
        assert build._cache_bytes(Serving(), "cpu") == budget


def test_the_budget_of_host_memory_is_set_or_a_share_of_what_is_available(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for available, *budgets in ((1000, 750, 500), (0, 1, 1), (-5, 1, 1), (None, 3 * 2**29, 2**30)):
        monkeypatch.setattr(host_memory, "available_bytes", lambda given=available: given)
        assert [build._host_bytes(Serving(), device) for device in (gpu, cpu)] == budgets
    assert build._host_bytes(Serving(host_cache_mib=3), gpu) == 3 * 2**20


@pytest.mark.parametrize("host, family", [("127.0.0.1", "AF_INET"), ("::1", "AF_INET6")])
def test_a_port_is_taken_at_once_after_the_server_before(host, family):
    try:
        socket.create_server((host, 0), family=getattr(socket, family)).close()
    except OSError:
        pytest.skip(f"no {family} here")
    with build._bind(Serving(host=host, port=0)) as listener:
        assert listener.family == getattr(socket, family)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            UserError, match=f"^cannot listen on {host} port {port}: .* with --port"
        ):
            build._bind(Serving(host=host, port=port))


def test_the_first_signal_drains_and_the_second_ends(monkeypatch):
    servers, worker = [], mock.Mock(draining=False, idle=False, alive=False, failed=False)
    app = SimpleNamespace(state=SimpleNamespace(worker=worker, service=mock.Mock()))
    monkeypatch.setattr(build, "make_app", lambda serving: app)
    monkeypatch.setattr("corecontext.serve.logs.start_logging", lambda: None)
    monkeypatch.setattr("corecontext.serve.logs.log_event", lambda event, **fields: None)

    def run(server, sockets):
        servers.append(server)
        sockets[0].close()

    monkeypatch.setattr("uvicorn.Server.run", run)
    assert build.run(Serving(port=0)) == 0
    (server,) = servers
    assert server.config.timeout_graceful_shutdown == 30 and not server.config.access_log
    assert server.config.http.__name__ == "Connection" and server.config.log_config is None
    server.handle_exit(signal.SIGTERM, None)
    assert worker.draining and not server.should_exit and not server.force_exit

    async def tick():
        await server.on_tick(1)
        return server.should_exit

    assert not asyncio.run(tick())  # a request still runs
    worker.idle = True
    assert asyncio.run(tick())
    server.should_exit = worker.draining = False
    assert not asyncio.run(tick())  # idle, but no signal has come
    worker.draining = True
    monkeypatch.setattr("uvicorn.Server.shutdown", mock.AsyncMock())
    asyncio.run(server.shutdown())
    assert not worker.stop.called
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit
    asyncio.run(server.shutdown())
    worker.stop.assert_called_once_with(5.0)
    worker.alive = worker.failed = True
    monkeypatch.setattr(build.os, "_exit", mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        build.run(Serving(port=0))
    build.os._exit.assert_called_once_with(1)
