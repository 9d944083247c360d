"""One call with more than 2^31 elements of q: its last rows, forward and backward, against the
reference in float64. Takes about 40 GB: `python -m pytest -n 0 -m gpu tests/test_large_gpu.py`."""

from __future__ import annotations

import pytest
import torch

from corecontext import Rotary, cca_attention
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
