"""Device functions that the kernels share, against the rule and the equations that they repeat; in
Triton's interpreter where there is no GPU."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton", reason="the triton backend needs triton")

import triton.language as tl  # noqa: E402

from corecontext import visibility  # noqa: E402
from corecontext.ops.triton import primitives  # noqa: E402
from corecontext.ops.triton.choose.bisection import bisect, order_of  # noqa: E402
from corecontext.ops.triton.launch import ints  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 64


@triton.jit
def _rule_kernel(out_ptr, group_size, window_size, sink_groups, LENGTH: tl.constexpr):
    """Write the entries that query i sees, the first query of entry i and the end of raw token i's
    queries."""
    index = tl.arange(0, LENGTH)
    groups = primitives.visible_cores(index, group_size, window_size)
    tl.store(out_ptr + index, primitives.visible_entries(groups, group_size, sink_groups))
    first = primitives.first_query_of_entry(index, group_size, window_size, sink_groups)
    tl.store(out_ptr + LENGTH + index, first)
    last = primitives.last_query_of_token(index, group_size, window_size)
    tl.store(out_ptr + 2 * LENGTH + index, last)


@pytest.mark.parametrize("group_size", range(1, 9))
def test_the_rule_and_its_inverses_are_those_of_visibility(group_size):
    for window_size, sink_groups in itertools.product(range(1, 20, 2), (0, 1, 3)):
        out = torch.empty(3, LENGTH, dtype=torch.int32, device=DEVICE)
        _rule_kernel[(1,)](out, group_size, window_size, sink_groups, LENGTH=LENGTH)
        entries, first, last = out.tolist()
        sizes = (group_size, window_size)
        counts = [
            visibility.num_far_entries(
                visibility.num_visible_cores(t, *sizes), group_size, sink_groups * group_size
            )
            for t in range(20 * LENGTH)
        ]
        starts = [visibility.local_start(t, *sizes) for t in range(20 * LENGTH)]
        assert entries == counts[:LENGTH]
        for i in range(LENGTH):
            assert first[i] == next(t for t, count in enumerate(counts) if count > i)
            assert last[i] == next(t for t, start in enumerate(starts) if start > i)


@triton.jit
def _integers_kernel(out_ptr, numbers):
    first, second, third = primitives.integers(numbers)
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, second)
    tl.store(out_ptr + 2, third)


def test_whole_numbers_of_a_tuple_arrive():
    out = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    _integers_kernel[(1,)](out, ints(0, 1, 2**29))
    assert out.tolist() == [0, 1, 2**29]


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Write each row's softmax sum and maximum, in blocks of keys."""
    rows = tl.arange(0, ROWS)
    running_max = tl.full([ROWS], -float("inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    for start in range(0, KEYS, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        scores = tl.load(x_ptr + rows[:, None] * KEYS + keys[None, :])
        _, _, running_max, running_sum = primitives.softmax_step(
            scores, running_max, running_sum, True
        )
    tl.store(out_ptr + rows, running_max + tl.log2(running_sum))


def test_the_online_softmax_is_the_softmax_and_rows_may_see_nothing_at_first():
    x = torch.randn(16, 64, device=DEVICE) * 5
    x[3, :40] = -torch.inf
    out = torch.empty(16, device=DEVICE)
    _softmax_kernel[(1,)](x, out, ROWS=16, KEYS=64, BLOCK=16)
    expected = torch.logsumexp(x * primitives.LN2.value, 1) * primitives.LOG2E.value
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@triton.jit
def _score_kernel(x_ptr, out_ptr, scale, bias, softcap, SIZE: tl.constexpr):
    """Write scores under a softcap, in units of log 2, and their slope."""
    index = tl.arange(0, SIZE)
    scores, slope = primitives.log2_scores(tl.load(x_ptr + index), scale, bias, softcap, True)
    tl.store(out_ptr + index, scores)
    tl.store(out_ptr + SIZE + index, slope)


def test_capped_scores_and_their_slope():
    x = torch.linspace(-60, 60, 64, device=DEVICE)
    out = torch.empty(2, 64, device=DEVICE)
    _score_kernel[(1,)](x, out, 0.25, 0.5, 5.0, SIZE=64)
    capped = torch.tanh(x.double() * 0.25 / 5)
    expected = torch.stack([(5 * capped + 0.5) * primitives.LOG2E.value, 1 - capped.square()])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@triton.jit
def _arithmetic_kernel(x_ptr, out_ptr, y, KIND: tl.constexpr):
    x = tl.load(x_ptr)
    if KIND == "sum":
        tl.store(out_ptr, x + y)
    elif KIND == "difference":
        tl.store(out_ptr, x - y)
    else:
        tl.store(out_ptr, x * y)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU does not look for overflows")
@pytest.mark.parametrize(
    "kind, x, y",
    [("sum", 2**31 - 8, 7), ("difference", 7 - 2**31, 7), ("product", 2**30 - 1, 2)],
)
def test_the_interpreter_finds_what_32_bits_do_not_hold(kind, x, y):
    """So that the kernels' offsets are right wherever their tests pass."""
    out = torch.empty(1, dtype=torch.int32)
    number = torch.tensor([x], dtype=torch.int32)
    _arithmetic_kernel[(1,)](number, out, y, KIND=kind)
    assert out.item() == {"sum": x + y, "difference": x - y, "product": x * y}[kind]
    with pytest.raises(Exception, match="int32 overflow detected"):
        _arithmetic_kernel[(1,)](number, out, y + 2, KIND=kind)


@triton.jit
def _bisect_kernel(x_ptr, out_ptr, size, count, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the bounds of the `count` largest numbers, and how many numbers reach them."""
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size, other=0.0)
    low, high, at_low, at_high = bisect(order_of(x, places < size), count, WIDE)
    tl.store(out_ptr, low)
    tl.store(out_ptr + 1, high)
    tl.store(out_ptr + 2, at_low)
    tl.store(out_ptr + 3, at_high)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("kind", ["any", "ties", "negative", "infinite"])
def test_bisection_finds_the_largest(kind, is_wide):
    """However many tie for the last place."""
    generator = torch.Generator("cpu").manual_seed(0)
    for trial in range(24):
        size = int(torch.randint(1, 129, (), generator=generator))
        count = int(torch.randint(1, 64, (), generator=generator))
        x = torch.randn(size, generator=generator, device="cpu") * 10.0 ** (trial % 7 - 3)
        if kind == "ties":
            x = x.round()
        if kind == "negative":
            x = -1 - x.abs()
        if kind == "infinite":
            x[:2] = torch.tensor([torch.inf, -torch.inf])[: min(size, 2)]
        x = x.to(DEVICE)
        out = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        _bisect_kernel[(1,)](x, out, size, count, is_wide, 128)
        bits = x.view(torch.int32).long()
        order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
        low, high, at_low, at_high = out.tolist()
        assert ((order >= low).sum(), (order >= high).sum()) == (at_low, at_high)
        assert at_high < count
        assert at_low >= min(count, size)
        assert high == low + 1 or at_low <= count
