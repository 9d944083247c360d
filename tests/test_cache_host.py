"""Raw tokens in host memory: with any number of slots on the device, results are those of one
pass."""

import copy
import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cache_fetch import LENGTH, ROTARY, fed, inputs, one_pass
from torch.utils._python_dispatch import TorchDispatchMode

from corecontext import CCAConfig
from corecontext.cache import CompactLayer, host_memory, host_store
from corecontext.cache.host_slots import FREE
from corecontext.cache.raw_store import Newest
from corecontext.cost import ModelCost, fetch_flops, store_bytes
from corecontext.inference.room import RowShape
from corecontext.model_sizes import ModelSizes
from corecontext.serve.rows import RowPool
from corecontext.visibility import num_visible_cores

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("default_device")
SETTINGS = {"fetch_groups": 2, "fetch_index": "pairs:2", "sink_size": 4, "core_mass": True}
SETTINGS |= {"prefill": "fetch"}
CONFIG = CCAConfig.paper(4, 5, **SETTINGS, store="host", fetch_slots=2)


def texts():
    """Queries, keys and values of two texts, on the GPU where there is one."""
    return [x.to(torch.get_default_device()) for x in inputs(torch.float32)]


def near(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-5)


def some_rows(tensors, *rows):
    return [x[list(rows)] for x in tensors]


@pytest.mark.parametrize("num_slots", [0, 2, 5, 40])
def test_a_second_text_after_a_crop(num_slots):
    config = CONFIG.replace(fetch_slots=num_slots)
    first = texts()
    second = [x.roll(1, 0) for x in texts()]
    second = [torch.cat((x[:, :, :29], y[:, :, 29:]), 2) for x, y in zip(first, second)]
    layer = CompactLayer(config, ROTARY, rollback=24)
    near(fed(layer, first, 0, [20, *[1] * 33]), one_pass(config, first)[:, :, :53])
    layer.crop(24)
    out = fed(layer, second, 29, [1] * 11 + [9] + [1] * 11)
    near(out, one_pass(config, second)[:, :, 29:])


@pytest.mark.parametrize("fixed, num_slots", [(False, 2), (True, 2), (False, 0), (True, 0)])
def test_beams_take_their_tokens_along(fixed, num_slots):
    config = CONFIG.replace(fetch_slots=num_slots)
    tensors = texts()
    layer = CompactLayer(config, ROTARY, max_length=LENGTH if fixed else None)
    expected = one_pass(config, tensors)
    fed(layer, tensors, 0, [30, *[1] * 6])
    for order in ((1, 0), (0, 0, 1, 1), (3, 1, 2), (1, 0, 2), (1, 1, 0), (0, 1, 2)):
        if order == (0, 0, 1, 1):
            layer.repeat(2)
        else:
            layer.select(torch.tensor(order))
        tensors = some_rows(tensors, *order)
        expected = expected[list(order)]
        start = layer.seq_len
        near(fed(layer, tensors, start, [1] * 3), expected[:, :, start : start + 3])


def expected_hits(choices, num_slots):
    """Count hits of a buffer from which the group that was not read for longest goes first."""
    slots: dict[int, int] = {}
    hits = 0
    for step, choice in enumerate(choices):
        hits += sum(group in slots for group in choice)
        for group in choice:
            slots[group] = step
        while len(slots) > num_slots:
            slots.pop(min(slots, key=slots.get))
    return hits


def test_slots_hold_the_groups_read_last(monkeypatch):
    config = CCAConfig.paper(4, 5, prefill="fetch", fetch_groups=3, store="host", fetch_slots=5)
    layer = CompactLayer(config, ROTARY, max_length=400)
    tensors = [x[:1, :2].repeat(1, 1, 6, 1) for x in texts()]
    tensors[1:] = [x[:, :1] for x in tensors[1:]]
    fed(layer, tensors, 0, [200])
    store = layer.store
    choices = []
    groups = store.groups

    def recorded(numbers):
        choices.append([x for x in numbers[0].tolist() if x >= 0])
        return groups(numbers)

    monkeypatch.setattr(store, "groups", recorded)
    for step in range(150):
        fed(layer, tensors, 200 + step, [1])
        owner = store.owner.flatten().tolist()
        slots = {group: slot for slot, group in enumerate(owner) if group != FREE}
        table = store.table.flatten().tolist()
        assert {group: slot for group, slot in enumerate(table) if slot != FREE} == slots
    assert set(choices[-1]) <= set(slots)
    assert store.lookups == sum(map(len, choices)) == 450
    assert 0 < expected_hits(choices, 3) < expected_hits(choices, 5) == store.hits < 450
    layer.reset()
    assert store.lookups == store.hits == 0 and (store.table == FREE).all()


def test_slots_without_a_group_are_taken_first():
    """After a crop, and after a step that chose fewer groups than it may."""
    config = CCAConfig.paper(4, 5, prefill="fetch", fetch_groups=2, store="host", fetch_slots=4)
    layer = CompactLayer(config, ROTARY)
    fed(layer, [x[:1, :1] for x in texts()], 0, [40])
    store = layer.store

    def read(*groups):
        store.groups(torch.tensor([groups], device=store.owner.device))
        return sorted(store.owner.flatten().tolist())

    read(0, 1)
    assert read(2, 3) == [0, 1, 2, 3]
    store.forget(torch.tensor([4 * 3 + 1], device=store.owner.device))
    assert read(2, 4) == [0, 1, 2, 4]
    assert read(5, FREE) == [1, 2, 4, 5]
    assert read(FREE, FREE) == [1, 2, 4, 5]
    assert read(6, 5) == [2, 4, 5, 6]


@pytest.mark.parametrize("num_slots", [0, 6])
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_device_and_host_bytes_are_apart(cache_dtype, num_slots):
    config = CONFIG.replace(cache_dtype=cache_dtype, fetch_slots=num_slots)
    tensors = texts()
    host, device, plain = (
        CompactLayer(x, ROTARY)
        for x in (config, config.replace(store="device"), config.replace(fetch_groups=0))
    )
    for layer in (host, device, plain):
        fed(layer, tensors, 0, [40, *[1] * 3])
    token = 2 * (64 if cache_dtype == "auto" else 16 + 4)
    heads = 4  # rows x KV heads
    num_groups = 9
    slots = heads * (4 * (num_groups + 1) + num_slots * (4 * token + 12)) if num_slots else 0
    assert host.host_bytes == heads * 43 * token and device.host_bytes == plain.host_bytes == 0
    assert host.store_bytes == slots + device.store_bytes - host.host_bytes
    assert host.nbytes == plain.nbytes + host.store_bytes
    # Grown to twice the first length; where memory is pinned, that had room for a short answer.
    room = 45 if torch.cuda.is_available() else 2 * 40
    assert host.allocated_host_bytes == heads * room * token
    assert device.allocated_bytes > host.allocated_bytes > plain.allocated_bytes


def test_a_planned_prompt_makes_room_once(monkeypatch):
    """Before, each chunk of a prompt pinned memory anew and moved the tokens before it."""
    lengths = []

    def zeros(shape, dtype, device):
        lengths.append(shape[2])
        return torch.zeros(shape, dtype=dtype, device=device)

    monkeypatch.setattr(host_store, "host_zeros", zeros)
    layer = CompactLayer(CONFIG, ROTARY)
    layer.plan(43)
    fed(layer, texts(), 0, [10, 10, 20, *[1] * 3])
    assert max(lengths) == 43 and lengths.count(43) == 2
    layer.reset()
    fed(layer, texts(), 0, [10])
    assert max(lengths) == 43  # not planned any more


@pytest.mark.parametrize("change", ["append", "repeat"])
def test_a_store_for_which_memory_runs_out_stays_as_it_was(monkeypatch, change):
    tensors = texts()
    layers = [CompactLayer(CONFIG, ROTARY) for _ in range(2)]
    for layer in layers:
        fed(layer, tensors, 0, [30])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(host_memory, "available_bytes", lambda: 10)
        if change == "append":
            fed(layers[0], tensors, 30, [50])
        else:
            layers[0].store.select(torch.tensor([0, 0, 1, 1]))
    ours, untouched = (fed(layer, tensors, 30, [5, 1, 20]) for layer in layers)
    torch.testing.assert_close(ours, untouched, rtol=0, atol=0)


def test_host_memory_that_is_not_there(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 10_000)
    layer = CompactLayer(CONFIG, ROTARY, max_length=4096)
    with pytest.raises(MemoryError, match="got 1048576 bytes more: 10000 are available. Use fewer"):
        fed(layer, texts(), 0, [8])
    monkeypatch.undo()
    fed(layer, texts(), 0, [8])
    assert host_memory.available_bytes() is None or host_memory.available_bytes() > 0


def test_memory_is_that_of_the_machine_and_of_the_control_group(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert host_memory.available_bytes() is None
    group = tmp_path / "sys" / "fs" / "cgroup"
    for folder in (tmp_path / "proc", group):
        folder.mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemFree: 9 kB\nMemAvailable:   1000 kB\nX: 7 kB\n")
    assert host_memory.available_bytes() == 1024_000
    for limit, current, available in ((900_000, 200_000, 700_000), (2_000_000, 1, 1024_000)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text("anon 5\nfile 9\ninactive_anon 7\n")
        assert host_memory.available_bytes() == available
    (group / "memory.max").write_text("900000\n")
    (group / "memory.current").write_text("800000\n")
    (group / "memory.stat").write_text("inactive_anon 7\ninactive_file 500000\nslab 3\n")
    assert host_memory.available_bytes() == 600_000  # files that were read can be dropped
    (group / "memory.max").write_text("max\n")
    assert host_memory.available_bytes() == 1024_000


def test_host_memory_may_be_taken_to_the_last_byte(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 24)
    for shape, fits in (((2, 3), True), ((1, 7), False)):
        if fits:
            zeros = host_memory.host_zeros(shape, torch.float32, torch.device("cpu"))
            assert zeros.tolist() == [[0.0] * 3] * 2
            continue
        with pytest.raises(MemoryError, match="got 28 bytes more: 24 are available"):
            host_memory.host_zeros(shape, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("index", ["mean", "oracle", "parts:3:4", "bits:1"])
@pytest.mark.parametrize("store, num_slots", [("device", 4), ("host", 4), ("host", 0)])
def test_bytes_are_those_of_the_formula(index, store, num_slots):
    kinds = {"cache_dtype": "fp8" if index == "mean" else "auto", "fetch_index": index}
    config = CONFIG.replace(store=store, **kinds, fetch_slots=num_slots)
    tensors = texts()
    layer = CompactLayer(config, ROTARY)
    plain = CompactLayer(config.replace(fetch_groups=0), ROTARY)
    fed(plain, tensors, 0, [17, 1, 33])
    for size in (17, 1, 33):
        fed(layer, tensors, layer.seq_len, [size])
        expected = store_bytes(config, layer.seq_len, 16, 4)
        assert (layer.store_bytes, layer.host_bytes) == tuple(4 * x for x in expected)
    model = ModelCost(3, 4, 2, 16, 0, 0, itemsize=4)
    in_model = model.config_bytes(config, 51)
    assert in_model.host == 3 * layer.host_bytes / 2
    assert in_model.device == 3 * layer.nbytes / 2
    assert model.config_bytes(config.replace(fetch_groups=0), 51) == (3 * plain.nbytes / 2, 0)


def test_operations_of_fetch_are_counted_by_query():
    cases = ((5, 2, 1), (13, 2, 1), (60, 3, 1), (60, 3, 4), (60, 30, 4), (60, 1, 1), (60, 1, 4))
    for length, k, share in cases:
        sizes = {"fetch_groups": k, "fetch_share": share}
        config = CONFIG.replace(**sizes, fetch_slots=0, prefill="auto")
        seen = [num_visible_cores(t - 4, 4, 5) for t in range(4, length)]
        # Neighbours choose twice as many together.
        keys = sum(min(k if share == 1 else 2 * k, x) * 3 for x in seen)
        assert fetch_flops(config, length, 6, 8) == 4 * 6 * 8 * keys + 2 * 6 * 8 * (
            2 * (sum(seen) // share)
        )


def test_a_prompt_is_not_read_back():
    config = CONFIG.replace(fetch_slots=0)
    tensors = texts()
    layer = CompactLayer(config, ROTARY)
    near(fed(layer, tensors, 0, [40, 20]), one_pass(config, tensors))
    whole = Newest(0, [x[:, :, :40] for x in tensors[1:]])
    for x in layer.store.raw:
        x.fill_(float("nan"))
    for x, kept in zip(layer.store.tokens(slice(None), 40, whole), whole.stored, strict=True):
        assert torch.equal(x, kept.flatten(0, 1))


class AsksNothing(TorchDispatchMode):
    """Refuse what reads a number from the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        asked = (aten._local_scalar_dense.default, aten.nonzero.default)
        assert function not in asked, f"{function} asks the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("changes", [{}, {"cache_dtype": "int8"}, {"fetch_index": "mean"}], ids=str)
def test_steps_without_slots_ask_the_device_nothing(changes):
    tensors = texts()
    config = CONFIG.replace(fetch_slots=0, backend="packed", **changes)
    layer = CompactLayer(config, ROTARY, max_length=LENGTH)
    fed(layer, tensors, 0, [20])
    with AsksNothing():
        fed(layer, tensors, 20, [1] * 9)
    layer = CompactLayer(config.replace(fetch_slots=2), ROTARY, max_length=LENGTH)
    fed(layer, tensors, 0, [20])
    with AsksNothing(), pytest.raises(AssertionError, match="asks the device"):
        fed(layer, tensors, 20, [1])


def test_tokens_of_a_text_before_reach_no_result():
    """Also where a step reads the first group in place of none."""
    tensors = texts()
    config = CONFIG.replace(fetch_slots=0)
    layer = CompactLayer(config, ROTARY, max_length=LENGTH)
    expected = one_pass(config, tensors)
    fed(layer, tensors, 0, [40])
    saved = copy.deepcopy(layer.state_dict())
    for restart in (layer.reset, lambda: layer.load_state_dict(saved)):
        for x in layer.store.raw:
            x.fill_(torch.nan)
        restart()
        start = layer.seq_len
        out = fed(layer, tensors, start, [5, *[1] * 10])
        near(out, expected[:, :, start : start + 15])


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="needs Linux")
def test_forked_processes_do_not_share_pinned_memory():
    """Writing to a shared page would move it away from the device."""
    pages = host_memory._new_pages(2**22 + 5)
    assert pages.numel() == 2**22 + 5 and not pages.any()
    maps = Path("/proc/self/smaps").read_text()
    (flags,) = re.findall(f"^{pages.data_ptr():08x}-.*?VmFlags: (.*?)$", maps, re.M | re.S)
    assert "dc" in flags.split() and "sh" not in flags.split()


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="needs Linux")
@pytest.mark.parametrize("is_much", [False, True])
def test_threads_are_woken_for_much_memory_only(monkeypatch, is_much):
    size = 2**22 + 5
    monkeypatch.setattr(host_memory, "_TOUCHED", size if is_much else size + 1)
    pages = host_memory._new_pages(size)
    maps = Path("/proc/self/smaps").read_text()
    resident = re.search(f"^{pages.data_ptr():08x}-.*?Rss: +([0-9]+) kB", maps, re.M | re.S)
    assert int(resident[1]) == (4100 if is_much else 0)


@pytest.fixture
def unpinned(monkeypatch):
    """Addresses that were unpinned; nothing is spare before and after."""
    freed = []
    runtime = SimpleNamespace(cudaHostUnregister=lambda address: freed.append(address) or 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(host_memory, "_spare", [])
    return freed


def spare(*sizes):
    pages = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in sizes]
    for x in pages:
        host_memory._keep(x, torch.device("cuda", 0))
    return pages


def test_spare_pinned_memory_is_used_for_the_next_tensor_of_its_size(unpinned):
    first, second = spare(8, 8)
    assert host_memory._spare_pages(8, torch.device("cuda", 0)) is first
    assert host_memory._spare_pages(8, torch.device("cuda", 0)) is second
    assert host_memory._spare_pages(8, torch.device("cuda", 0)) is None and not unpinned


@pytest.mark.parametrize("size, index", [(9, 0), (8, 1)])
def test_spare_memory_of_another_size_or_device_is_released(unpinned, size, index):
    pages = spare(8, 16)
    assert host_memory._spare_pages(size, torch.device("cuda", index)) is None
    assert set(unpinned) == {x.data_ptr() for x in pages} and not host_memory._spare


def test_no_more_memory_is_spare_than_is_available(unpinned, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 20)
    spare(8, 12)
    assert not unpinned
    spare(1)
    assert len(unpinned) == 3 and not host_memory._spare


def test_memory_is_not_unpinned_while_a_graph_is_captured(unpinned, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    pages = spare(8)
    assert not unpinned
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    pages += spare(8)
    assert set(unpinned) == {x.data_ptr() for x in pages}


@pytest.mark.parametrize("is_spare", [False, True], ids=["new", "spare"])
def test_copies_in_host_memory_share_one_piece_and_hold_no_other_tokens(device, is_spare):
    x = torch.randn(2, 3, 50, 7, device=device)
    sources = [x[:, :, 10:31], x.bfloat16(), x[:, :, :5, :1], x[:, :, :0]]
    expected = [source.clone() for source in sources]
    if is_spare:
        host_memory.copies_in_host_memory(sources).tensors[0].fill_(3)
    copies, ended = host_memory.copies_in_host_memory(sources)
    x += 1  # behind the copies
    if ended is not None:
        ended.wait()
    for found, right in zip(copies, expected, strict=True):
        assert found.is_contiguous() and found.device == right.device
        assert found.dtype == right.dtype and torch.equal(found, right)
    storage = copies[0].untyped_storage()
    assert {x.untyped_storage().data_ptr() for x in copies} == {storage.data_ptr()}
    assert storage.nbytes() < sum(x.nbytes for x in copies) + 256 * len(copies)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pinned_memory_is_used_again_and_zero(device):
    host_memory._release()
    x = host_memory.host_zeros((4, 1000), torch.float32, device)
    address = x.data_ptr()
    x.fill_(3)
    del x
    assert [pages.data_ptr() for pages, _ in host_memory._spare] == [address]
    x = host_memory.host_zeros((1000, 8), torch.bfloat16, device)
    assert x.data_ptr() == address and not x.any() and not host_memory._spare
    del x
    y = host_memory.host_zeros((3, 1000), torch.float32, device)
    assert not host_memory._spare and not y.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pinned_memory_is_read_and_written_by_captured_steps(device):
    x = host_memory.host_zeros((4, 1000), torch.bfloat16, device)
    assert x.is_cuda and x.dtype == torch.bfloat16 and not x.any()
    before = torch.cuda.memory_allocated()
    rows = torch.tensor([2], device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.index_copy_(0, rows, x.index_select(0, rows) + 1)
        total = x.float().sum()
    for step in range(3):
        graph.replay()
        assert total == 1000 * (step + 1)
    rows.fill_(3)
    graph.replay()
    assert x[2:].float().sum(1).tolist() == [3000, 1000]
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.parametrize("store, num_slots", [("device", 0), ("host", 20), ("host", 0)])
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_rows_of_a_pool_come_and_go(fixed, store, num_slots):
    """Each with its own raw tokens and slots."""
    config = CONFIG.replace(store=store, fetch_slots=num_slots)
    shape = RowShape(ModelSizes(4, 2, 16, layers=1), 4)
    pool = RowPool(config, 3, LENGTH, shape, fixed=fixed)
    tensors = [torch.cat((x, x.roll(7, 2)[:1]), 0) for x in texts()]
    expected = one_pass(config, tensors)
    lengths: dict[int, int] = {}

    def add(request, length):
        layer = CompactLayer(config, ROTARY)
        fed(layer, some_rows(tensors, request), 0, [length])
        pool.add(request, [layer])
        lengths[request] = length

    def step():
        pool.hold(len(pool.slots))
        places = [lengths[request] for request in pool.slots]
        new = [
            torch.stack([x[request, :, at : at + 1] for request, at in zip(pool.slots, places)])
            for x in tensors
        ]
        out = pool.layers[0].attend(*new)
        for row, (request, at) in enumerate(zip(pool.slots, places)):
            near(out[row, :, 0], expected[request, :, at])
            lengths[request] += 1
        pool.seen += 1

    add(0, 40)
    step()
    add(1, 25)
    step()
    add(2, 33)
    for _ in range(9):
        step()
    pool.remove(0)
    for _ in range(4):
        step()
    add(0, 18)
    for _ in range(3):
        step()
    pool.remove(1)
    for _ in range(5):
        step()
