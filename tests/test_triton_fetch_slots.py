"""The kernels that find slots of groups in a decoding step, and load them, against `SlotStore`."""

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton")

import triton
import triton.language as tl
from test_triton_fetch_step import HALF, assert_rows, fed, reference, tensors

from corecontext import CCAConfig, Rotary
from corecontext.cache import CompactLayer, state, stores
from corecontext.cache import layer as layer_module
from corecontext.cache.host_slots import SlotStore
from corecontext.cache.raw_store import Format
from corecontext.ops.fetch import prompt_rule
from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode.find_slots import give_slots

pytestmark = pytest.mark.usefixtures("default_device")


def filled_store(num_slots):
    """A store of two rows of two KV heads with 30 groups of four tokens behind five."""
    spec = Spec(4, 8, 1.0, fetch_groups=4, fetch_index="pairs:2", sink_size=5)
    like = [torch.zeros(2, 2, 1, 16)] * 2
    store = SlotStore(spec, like, Format("auto", torch.float32), 8 + 120, num_slots)
    for x in store.raw:
        x.normal_(generator=torch.Generator(x.device).manual_seed(0))
    return store


@triton.jit
def slots_kernel(choice, slots, results, sizes, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Give slots to the groups of each row."""
    give_slots(tl.program_id(0).to(tl.int64), choice, slots, results, sizes, BLOCK_N, BLOCK_K)


@pytest.mark.parametrize("num_slots", [4, 7, 33])
def test_slots_are_those_of_the_store(num_slots):
    """Also of groups that were chosen before, and after a crop."""
    store, wanted = filled_store(num_slots), filled_store(num_slots)
    generator = torch.Generator("cpu").manual_seed(1)
    for step in range(24):
        if step == 12:
            lengths = torch.tensor([60, 128])
            store.forget(lengths)
            wanted.forget(lengths)
        # The first row has fewer groups, and now and then none.
        chosen = torch.full((4, 4), -1, dtype=torch.int32)
        marks = torch.zeros(4, 30, dtype=torch.int8)
        for row in range(4):
            count = 30 if row > 1 else 13
            size = (step + row) % 5 if row < 2 else 4
            groups = torch.randperm(count, generator=generator, device="cpu")[:size].sort()[0]
            chosen[row, :size] = groups.int()
            marks[row, groups] = 1
        found = torch.empty_like(chosen)
        results = (found, torch.empty_like(chosen))
        sizes = (4, 30, store.table.shape[2], store.owner.shape[2])
        slots_kernel[(4,)]((chosen, marks), store.as_slots().slots[2:], results, sizes, 64, 4)
        slots, is_missing = wanted._find_slots(chosen.long())
        slots = torch.where(is_missing, -2 - slots, slots)
        assert torch.equal(found.long(), torch.where(chosen < 0, -1, slots))
        for name in ("table", "owner", "last_used", "counts"):
            assert torch.equal(getattr(store, name), getattr(wanted, name)), name
    assert 0 < store.hits < store.lookups < 24 * 16
    assert (store.table[..., 30] == -1).all()


def by_dtype(backend, q, triton_dtypes):
    """As `choose_backend` on a GPU."""
    return "triton" if q.dtype in triton_dtypes else "packed"


def test_a_step_with_slots_is_one_of_triton_in_float32_too(monkeypatch):
    """Other steps would ask the device for the groups that have none."""
    monkeypatch.setattr(layer_module, "choose_backend", by_dtype)
    config = CCAConfig.paper(4, 8, prefill="fetch", fetch_groups=2)
    rotary = Rotary.from_theta(100.0, 16)
    qkv = tensors(1, 4, 2, 40, 16)
    layer = CompactLayer(config.replace(store="host", fetch_slots=3), rotary, max_length=40)
    out = fed(layer, qkv, 33)
    assert_rows(out, reference(config, rotary, qkv)[:, :, 33:], torch.float32)
    assert not layer.asks_device
    near = CompactLayer(config, rotary, max_length=40)
    near.attend(*qkv)
    assert near._slots() is None and not near.asks_device


def test_raw_tokens_that_move_to_host_memory_get_the_step_with_slots(monkeypatch):
    """A cache that grows has them on the device while they are few, and its compact form from the
    first token on where rows have padding."""
    monkeypatch.setattr(layer_module, "choose_backend", by_dtype)
    for module in (layer_module, state, stores):
        monkeypatch.setattr(module, "has_own_memory", lambda device: True)
    for name, length in (("PROMPT_LENGTHS", 24), ("STEP_LENGTHS", 24), ("WHOLE_TOKENS", 48)):
        monkeypatch.setattr(prompt_rule, name, dict.fromkeys(("cpu", "cuda"), length))
    monkeypatch.setattr(CCAConfig, "slots_for", lambda config, length, **options: 3)
    config = CCAConfig.paper(4, 8, fetch_groups=2, fetch_index="bits:2")
    rotary = Rotary.from_theta(100.0, 16)
    qkv = tensors(2, 4, 2, 40, 16)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :3] = False
    outs = []
    for store in ("host", "device"):
        layer = CompactLayer(config.replace(store=store), rotary, begins_on_device=True)
        outs.append(layer.attend(*(x[:, :, :20] for x in qkv), attention_mask=mask))
        for t in range(20, 40):
            outs.append(layer.attend(*(x[:, :, t : t + 1] for x in qkv)))
            has_slots = store == "host" and t >= 24
            assert isinstance(layer.store, SlotStore) == has_slots
            assert (layer._slots() is not None) == has_slots and not layer.asks_device
    torch.testing.assert_close(torch.cat(outs[:21], 2), torch.cat(outs[21:], 2))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("num_slots", [2, 3])
def test_every_step_reads_its_slots(dtype, num_slots):
    """Where there are as many as a step fetches, and one more; a slot holds its group's tokens."""
    settings = {"core_mass": True, "sink_size": 4, "store": "host", "fetch_slots": num_slots}
    config = CCAConfig.paper(4, 8, backend="triton", prefill="fetch", fetch_groups=2, **settings)
    rotary = Rotary.from_theta(100.0, 16)
    qkv = tensors(1, 4, 2, 40, 16, dtype)
    layer = CompactLayer(config, rotary, max_length=40)
    out = fed(layer, qkv, 33)
    assert_rows(out, reference(config, rotary, qkv)[:, :, 33:], dtype)
    store = layer.store
    assert 0 < store.hits < store.lookups == 28
    assert not layer.asks_device
    groups = store.owner.flatten(0, 1)
    assert (groups >= 0).all()
    for slots, x in zip(store.slots, super(SlotStore, store).groups(groups)):
        assert torch.equal(slots.flatten(0, 1).flatten(1, 2), x)
