"""The check of kernels' addresses in Triton's interpreter."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

if not triton.knobs.runtime.interpret:
    pytest.skip("addresses are checked in Triton's interpreter", allow_module_level=True)

SIZE = 16


@triton.jit
def _move(from_ptr, to_ptr, count, FIRST: tl.constexpr, LENGTH: tl.constexpr):
    """Copy entries FIRST .. FIRST + count - 1."""
    entries = FIRST + tl.arange(0, LENGTH)
    mask = tl.arange(0, LENGTH) < count
    tl.store(to_ptr + entries, tl.load(from_ptr + entries, mask=mask), mask=mask)


@triton.jit
def _add(ptr, FIRST: tl.constexpr, LENGTH: tl.constexpr):
    """Add 1 to entries from FIRST on."""
    tl.atomic_add(ptr + FIRST + tl.arange(0, LENGTH), 1.0)


def test_memory_of_a_tensor_is_allowed():
    source = torch.randn(3 * SIZE)
    view = source[SIZE : 2 * SIZE]
    target = torch.zeros(SIZE)
    _move[(1,)](view, target, SIZE, FIRST=0, LENGTH=SIZE)
    assert torch.equal(target, view)
    _add[(1,)](target, FIRST=0, LENGTH=SIZE)
    torch.testing.assert_close(target, view + 1)
    # Masked entries are not touched, wherever they are.
    _move[(1,)](view, target, 4, FIRST=SIZE - 4, LENGTH=SIZE)


@pytest.mark.parametrize("first", [-1, 1, 10**6])
def test_memory_beside_a_tensor_is_refused(first):
    longer, shorter = torch.zeros(3 * SIZE)[SIZE:], torch.zeros(SIZE)
    message = "addresses are outside all tensors"
    with pytest.raises(Exception, match=message):
        _move[(1,)](shorter, longer, SIZE, FIRST=first, LENGTH=SIZE)
    with pytest.raises(Exception, match=message):
        _move[(1,)](longer, shorter, SIZE, FIRST=first, LENGTH=SIZE)
    with pytest.raises(Exception, match=message):
        _add[(1,)](shorter, FIRST=first, LENGTH=SIZE)
