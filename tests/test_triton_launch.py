"""The lean launch: when Triton's own is gone through again, and what the kernel is handed."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="the triton backend needs triton")
launching = pytest.importorskip("corecontext.ops.triton.launch")
tiles = pytest.importorskip("corecontext.ops.triton.tiles")


class Kernel:
    """Takes note of launches, its own and those of what it was compiled to."""

    def __init__(self):
        self.own, self.lean = [], []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.own.append((grid, arguments, constants))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.lean.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(launching, "_INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def run(kernel, x, exact=(64, 1), block=32, num_warps=4):
    launching.launch(kernel, (5,), (x, 7, 0.5), exact, BLOCK=block, num_warps=num_warps)


def test_the_second_launch_is_lean(kernel):
    x = torch.zeros(64)
    run(kernel, x)
    run(kernel, x)
    assert kernel.own == [((5,), (x, 7, 0.5, 64, 1), {"BLOCK": 32, "num_warps": 4})]
    assert kernel.lean == [((5, 1, 1), (x.data_ptr(), 7, 0.5, 64, 1, 32))]


def test_constants_of_many_launches_are_looked_at_once(kernel):
    """Launches share a kernel with all that have the same values, however these are given."""
    x = torch.zeros(64)
    options = {"num_warps": 4, "num_stages": 2, "maxnreg": 96, "enable_fp_fusion": False}
    constants = launching.Constants(BLOCK=32, **options)
    again = launching.Constants(BLOCK=32, **options)
    assert constants.number == again.number
    for changed in ({"BLOCK": 16}, {"num_warps": 2}, {"maxnreg": None}):
        other = launching.Constants(**{"BLOCK": 32, **options, **changed})
        assert other.number != constants.number
    launching.launch(kernel, (5,), (x,), (64,), constants)
    assert kernel.own == [((5,), (x, 64), {"BLOCK": 32, **options})]
    launching.launch(kernel, (5,), (x,), (64,), again)
    launching.launch(kernel, (5,), (x,), (64,), BLOCK=32, **options)
    assert kernel.lean == 2 * [((5, 1, 1), (x.data_ptr(), 64, 32))]


@pytest.mark.parametrize(
    "other",
    [
        {"exact": (65, 1)},
        {"exact": (64, 2)},
        {"block": 16},
        {"num_warps": 8},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_what_triton_compiles_anew_goes_through_triton(kernel, other):
    run(kernel, torch.zeros(64))
    run(kernel, torch.zeros(64, dtype=other.pop("dtype", torch.float32)), **other)
    assert len(kernel.own) == 2 and not kernel.lean


def test_unaligned_tensors_always_go_through_triton(kernel):
    for offset in (1, 0, 1, 1, 2):
        run(kernel, torch.zeros(64)[offset:])
    assert len(kernel.own) == 5


@pytest.mark.parametrize("offset, dtype, lean", [(0, None, 1), (1, None, 0), (0, torch.half, 0)])
def test_tensors_in_tuples_are_looked_at_one_by_one(kernel, offset, dtype, lean):
    """Their alignment and their dtypes."""
    x = torch.zeros(64)
    run(kernel, (x, x))
    run(kernel, (x, x[offset:].to(dtype or x.dtype)))
    assert len(kernel.lean) == lean and len(kernel.own) == 2 - lean


def test_tensors_that_begin_anywhere_are_launched_leanly(kernel):
    """Where Triton compiles nothing for their alignment: rows of block tables."""
    kernel.params = [SimpleNamespace(num=0, do_not_specialize_on_alignment=True)]
    for offset in (1, 0, 2):
        run(kernel, torch.zeros(64)[offset:])
    assert len(kernel.own) == 1 and len(kernel.lean) == 2


def test_each_device_has_a_kernel_of_its_own(kernel, monkeypatch):
    x = torch.zeros(64)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        run(kernel, x)
    assert len(kernel.own) == len(kernel.lean) == 2


def test_a_chip_is_known_by_what_a_program_may_use_at_most(monkeypatch):
    found = SimpleNamespace(
        shared_memory_per_block=48, shared_memory_per_block_optin=227, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    tiles.chip_of.cache_clear()
    assert tiles.chip_of(torch.device("cuda:1")) == (227, 132)
    tiles.chip_of.cache_clear()
    assert tiles.chip_of(torch.device("cpu")) == (0, 8)


def test_as_many_are_kept_as_fit(kernel, monkeypatch):
    monkeypatch.setattr(launching, "_MOST", 3)
    for stride in range(10):
        run(kernel, torch.zeros(64), exact=(stride,))
    assert len(launching._COMPILED) <= 3 and len(kernel.own) == 10


@pytest.mark.parametrize("n", [0, 1, 2, 3, 16, 17, 127, 128, 1025])
def test_integers(n):
    assert launching.power_of_2(n) == max(1, triton.next_power_of_2(n))
    assert launching.ceil_div(n, 16) == triton.cdiv(n, 16)


def test_triton_compiles_nothing_for_whole_numbers_in_a_tuple():
    """It does for 1 and for multiples of 16."""
    assert all(x != 1 and x % 16 for x in launching.ints(*range(100)))
