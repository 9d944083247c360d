"""PyTorch's attention is called with few lengths, and gives what it gives without that."""

import math

import pytest
import torch
import torch.nn.functional as F

from corecontext.ops import torch_attention
from corecontext.ops.torch_attention import causal_attention, planned_length, step_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_few_lengths_are_planned_for():
    """Eight for each power of two, each at most an eighth too long."""
    lengths = range(1, 40000)
    planned = [planned_length(x) for x in lengths]
    assert planned == sorted(planned)
    assert all(x <= y <= max(x, x + (x - 1) / 8 + 1) for x, y in zip(lengths, planned))
    for power in range(4, 15):
        assert len({x for x in planned if 2**power < x <= 2 ** (power + 1)}) == 8
    assert all(planned_length(x) == x for x in planned)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


def tensors(length, keys, dtype, heads=4):
    """As a model has them: heads last but one in memory."""
    generator = torch.Generator().manual_seed(length)
    sizes = ((length, heads), (keys, 2), (keys, 2))
    made = (torch.randn(2, *size, 16, generator=generator) for size in sizes)
    return [x.to(DEVICE, dtype).transpose(1, 2) for x in made]


@pytest.mark.parametrize("length", [1, 30, 768, 769, 1023, 1024, 1025, 1300])
@torch.no_grad()
def test_padded_prompts_are_read_as_others(monkeypatch, length, dtype):
    monkeypatch.setattr(torch_attention, "_plans", lambda x: True)
    monkeypatch.setattr(torch_attention, "_MOST_PADDED", 1200)
    seen = []
    attend = F.scaled_dot_product_attention

    def noted(q, *arguments, **options):
        seen.append((q.shape[2], torch.backends.cuda.cudnn_sdp_enabled()))
        return attend(q, *arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    q, k, v = tensors(length, length, dtype)
    out = causal_attention(q, k, v, enable_gqa=True)
    assert out.shape == q.shape
    monkeypatch.undo()
    wide = [x.double() for x in (q, k, v)]
    right = attend(*wide, is_causal=True, enable_gqa=True)
    assert (out - right).norm(dim=-1).max() <= (1e-5 if dtype == torch.float32 else 3e-2)
    is_planned = length >= 769
    is_padded = is_planned and length <= 1200
    assert seen == [(planned_length(length) if is_padded else length, is_planned)]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@torch.no_grad()
def test_steps_leave_cudnn_as_it_was(monkeypatch, dtype):
    monkeypatch.setattr(torch_attention, "_plans", lambda x: True)
    q, k, v = tensors(1, 77, dtype, heads=2)
    for enabled in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        out = step_attention(q, k, v, 0.3)
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    torch.backends.cuda.enable_cudnn_sdp(True)
    weights = (0.3 * q.double() @ k.double().mT).softmax(-1)
    assert (out - weights @ v.double()).norm(dim=-1).max() <= (
        1e-5 if dtype == torch.float32 else 3e-2
    )
    bad = q[..., :7]
    with pytest.raises(RuntimeError):
        step_attention(bad, k, v, 1 / math.sqrt(7))
    assert torch.backends.cuda.cudnn_sdp_enabled()
