"""Offsets beyond 32 bits in the Triton kernels, of heads, groups and rows: strides that overflow on
purpose, in memory that is reserved and hardly ever touched."""

import functools
import mmap
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton")

from corecontext import Rotary
from corecontext.ops.spec import Cores, Groups, Slots, Spec, Tokens, Upstream
from corecontext.ops.triton.attend import anywhere as attend
from corecontext.ops.triton.decode.plain_step import decode_step
from corecontext.ops.triton.pool import launcher as pool

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of a GPU is not reserved"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved as on Linux"),
]
NORESERVE = 0x4000  # mmap.MAP_NORESERVE of later Python
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE


def reserved(count: int) -> torch.Tensor:
    """Zeros in float32 of which only the pages that are written take memory."""
    return torch.frombuffer(mmap.mmap(-1, 4 * count, flags=FLAGS), dtype=torch.float32)


def far_apart(x: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """A copy of x whose neighbours along a dimension are `stride` elements apart."""
    strides = list(x.contiguous().stride())
    strides[dim] = stride
    size = 1 + sum((n - 1) * step for n, step in zip(x.shape, strides))
    assert size > 2**31
    # An offset that has lost its upper bits may be negative: it then finds zeros.
    return reserved(2**31 + size).as_strided(x.shape, strides, 2**31).copy_(x)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


ROWS = 1 << 25  # the 64th of these steps is beyond; those of one tile are not
HEADS = 1 << 30


@pytest.mark.parametrize(
    "name, dim, stride",
    [
        *(("q", 2, ROWS), ("k", 1, ROWS), ("grad", 2, ROWS), ("core_k", 2, ROWS)),
        *(("q", 1, HEADS), ("k", 0, HEADS)),
    ],
)
def test_attention(name, dim, stride):
    """Core tokens are many (g = 1) and rows few, so that either kind of key is far away."""
    n, r = (3, 1) if dim == 0 else (1, 3 if dim == 1 and name != "k" else 1)
    length = 67 if stride == ROWS else 7
    spec = Spec(1, 3, scale=0.25) if name.startswith("core") else Spec(4, 60, scale=0.25)
    near = attention_inputs(n, r, length, spec)
    far = near | {name: far_apart(near[name], dim, stride)}
    for a, b in zip(results_near(n, r, length, spec), attended(far, spec)):
        assert a is b or torch.equal(a, b)


def attention_inputs(n: int, r: int, length: int, spec: Spec) -> dict[str, torch.Tensor]:
    """Contiguous tensors of one call of attention."""
    num_cores = length // spec.group_size
    return {
        "q": draw(n, r, length, 16),
        "grad": draw(n, r, length, 16),
        "k": draw(n, length, 16),
        "v": draw(n, length, 16),
        "core_k": draw(n, 1, num_cores, 16),
        "core_v": draw(n, 1, num_cores, 16),
    }


def attended(tensors: dict[str, torch.Tensor], spec: Spec) -> tuple[torch.Tensor | None, ...]:
    """Output, log-sum-exp and gradients."""
    q, grad, k, v, *cores = tensors.values()
    tokens = Tokens(q, k, v)
    out, lse = attend.attend(tokens, Cores(*cores), spec)
    upstream = Upstream(grad, None, out, lse)
    return out, lse, *attend.attend_backward(upstream, tokens, Cores(*cores), spec)


@functools.cache
def results_near(n: int, r: int, length: int, spec: Spec) -> tuple[torch.Tensor | None, ...]:
    """The same of tensors whose offsets fit 32 bits, once for each size."""
    return attended(attention_inputs(n, r, length, spec), spec)


@pytest.mark.parametrize("name, dim", [("k", 1), ("v", 0), ("q_last", 1)])
def test_pooling(name, dim):
    g, head_dim = 4, 16
    n = 3 if dim == 0 else 1
    groups = 3 if name == "k" and dim == 1 else 1
    spec = Spec(g, 1, scale=0.25, rotary=Rotary.from_theta(100.0, head_dim))
    near = {
        "q_last": draw(n, 3, groups, head_dim),
        "k": draw(n, groups, g, head_dim),
        "v": draw(n, groups, g, head_dim),
    }
    grads = Cores(*(draw(n, 1, groups, head_dim) for _ in range(2)))
    results = []
    for tensors in (near, near | {name: far_apart(near[name], dim, HEADS)}):
        given = Groups(*tensors.values())
        results.append((*pool.pool(given, spec)[0], *pool.pool_backward(grads, given, spec)))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_decoding():
    """The buffers of a cache are contiguous: here with room for more entries than 32 bits reach."""
    ring, dim, rows = 8, 16, 3
    capacity = 2**30 // dim  # the third row begins beyond
    spec = Spec(2, 5, scale=0.25)
    results = []
    for size in (ring + 3, capacity):
        shape = (1, rows, size, dim)
        keys, values = (reserved(2**31 + rows * size * dim)[2**31 :].view(shape) for _ in range(2))
        slots = Slots(keys, values, torch.tensor(0), torch.zeros(1, dtype=torch.int64), ring)
        generator = torch.Generator().manual_seed(0)
        outs = []
        for _ in range(2):
            q, k, v = (torch.randn(1, h, 1, dim, generator=generator) for h in (rows, rows, rows))
            outs.append(decode_step(q, k, v, slots, spec))
        results.append(torch.cat([*outs, keys[:, :, :2], values[:, :, :2]], 2))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
