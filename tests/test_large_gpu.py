"""Calls with more than 2^31 elements of q, of raw tokens and of an index: their last rows, forward
and backward, against the reference in float64 or the same rows alone. Takes about 60 GB: `python -m
pytest -n 0 -m gpu tests/test_large_gpu.py`."""

import pytest
import torch

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import CompactLayer
from corecontext.ops import reference
from corecontext.ops.batch import complete_groups
from corecontext.ops.spec import Spec, Tokens

GPU = torch.cuda.is_available()
ENOUGH = GPU and torch.cuda.get_device_properties(0).total_memory > 60e9
HEADS, KV_HEADS, LENGTH, DIM = 136, 8, 131_072, 128
ROWS = 64
SIZES = {"group_size": 16, "window_size": 1024}


def draw(heads: int) -> torch.Tensor:
    """Normal random numbers in bfloat16, [1, heads, L, D]."""
    return torch.randn(1, heads, LENGTH, DIM, device="cuda", dtype=torch.bfloat16)


def of_the_last_rows(q, k, v, grad, rotary):
    """Output, log-sum-exp and gradients of q, k and v, of the last KV head and its last rows."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    spec = Spec(**SIZES, scale=DIM**-0.5, rotary=rotary)
    tokens = Tokens(q, k, v)
    cores = reference.pool(complete_groups(tokens, spec.group_size), spec)
    last = tokens._replace(q=q[:, :, -ROWS:], q_start=LENGTH - ROWS)
    out, lse = reference.attend(last, cores, spec)
    return out, lse, *torch.autograd.grad((out * grad.double()).sum(), (q, k, v))


def assert_rows(name: str, got: torch.Tensor, truth: torch.Tensor) -> None:
    """Each row within 2 % of the largest."""
    error = (got.double() - truth).norm(dim=-1)
    assert (error <= 0.02 * truth.norm(dim=-1).amax()).all(), f"{name} is off by {error.max():.3g}"


@pytest.mark.gpu
@pytest.mark.skipif(not ENOUGH, reason="needs a GPU with 60 GB")
@pytest.mark.parametrize("deterministic", [False, True], ids=["fastest", "portable backward"])
def test_rows_beyond_two_to_the_31_elements(deterministic):
    torch.manual_seed(0)
    repeats = HEADS // KV_HEADS
    q, k, v = (draw(heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
    assert q.numel() > 2**31
    rotary = Rotary.from_theta(10_000.0, DIM, "cuda")
    grad = torch.zeros_like(q)
    grad[:, -repeats:, -ROWS:].normal_()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        out, lse = cca_attention(q, k, v, rotary=rotary, return_lse=True, **SIZES)
        grads = torch.autograd.grad(out, (q, k, v), grad)
    finally:
        torch.use_deterministic_algorithms(before)
    shares = (q[:, -repeats:], k[:, -1], v[:, -1])
    truth = of_the_last_rows(*(x.detach() for x in shares), grad[:, -repeats:, -ROWS:], rotary)
    assert_rows("out", out[:, -repeats:, -ROWS:], truth[0])
    torch.testing.assert_close(lse[:, -repeats:, -ROWS:].double(), truth[1], rtol=0, atol=0.02)
    for name, got, wanted in zip("qkv", grads, truth[2:]):
        got = got[:, -repeats:] if name == "q" else got[:, -1]
        assert_rows(f"gradient of {name}", got, wanted)
        assert not bool(grads["qkv".index(name)][:, 0].any()), "of heads without a gradient"


@pytest.mark.gpu
@pytest.mark.skipif(not ENOUGH, reason="needs a GPU with 60 GB")
def test_fetch_of_rows_beyond_two_to_the_31_elements():
    """A prompt that shares choices, whose last KV head gets what it gets alone."""
    torch.manual_seed(0)
    repeats = HEADS // KV_HEADS
    q, k, v = (draw(heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
    settings = {**SIZES, "fetch_groups": 8, "fetch_index": "pairs:2", "fetch_share": 16}
    settings["rotary"] = Rotary.from_theta(10_000.0, DIM, "cuda")
    grad = torch.zeros_like(q)
    grad[:, -repeats:, -ROWS:].normal_()
    out = cca_attention(q, k, v, **settings)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    last = [x.detach()[:, -n:].clone().requires_grad_() for x, n in ((q, repeats), (k, 1), (v, 1))]
    alone = cca_attention(*last, **settings)
    truth = torch.autograd.grad(alone, last, grad[:, -repeats:])
    assert_rows("out", out[:, -repeats:], alone.double())
    for name, got, wanted in zip("qkv", grads, truth):
        assert_rows(f"gradient of {name}", got[:, -wanted.shape[1] :], wanted.double())


def filled(config: CCAConfig, batch: int, length: int) -> CompactLayer:
    """A cache with room for one more token than `length` random ones."""
    layer = CompactLayer(config, Rotary.from_theta(10_000.0, DIM, "cuda"), max_length=length + 1)
    shape = (batch, KV_HEADS, 2, DIM)
    token = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    layer.attend(token.repeat(1, 4, 1, 1), token, token)
    for buffer in (*layer.buffers, *layer.store.raw):
        buffer.normal_()
    codes, scales = layer.store.index_buffers
    codes.random_(0, 256)
    scales.uniform_(0.5, 1)
    layer.seen.fill_(length)
    return layer


@pytest.mark.gpu
@pytest.mark.skipif(not ENOUGH, reason="needs a GPU with 60 GB")
@pytest.mark.parametrize("index, batch", [("pairs:2", 17), ("bits:4", 33)])
def test_a_step_of_rows_beyond_two_to_the_31_elements(index, batch):
    """Raw tokens of a decoding step with fetch, and an index in 4 bits: the last row gets what it
    gets alone."""
    length = LENGTH - 1
    config = CCAConfig.paper(
        **SIZES, prefill="fetch", fetch_groups=64, fetch_index=index, backend="triton"
    )
    torch.manual_seed(0)
    with torch.no_grad():
        layer = filled(config, batch, length)
        store = layer.store
        assert store.raw[0].numel() > 2**31
        assert index == "pairs:2" or store.index_buffers[0].numel() > 2**31
        one = filled(config, 1, length)
        pairs = [*zip(one.buffers, layer.buffers), *zip(one.store.raw, store.raw)]
        for mine, all_rows in (*pairs, *zip(one.store.index_buffers, store.index_buffers)):
            mine.copy_(all_rows[-1:])
        q = torch.randn(batch, 4 * KV_HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, batch, KV_HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
        assert layer._slots() is not None
        out = layer.attend(q, k, v)[-1:]
        assert_rows("out", out, one.attend(q[-1:], k[-1:], v[-1:]).double())
    for buffer, x in zip(store.raw, (k, v)):
        assert torch.equal(buffer[-1, :, length], x[-1, :, 0])
