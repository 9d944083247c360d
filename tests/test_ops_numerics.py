"""Errors against float64, row by row, of outputs, log-sum-exps and every gradient
(docs/numerics.md)."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from budgets import (
    assert_accurate,
    assert_within_budget,
    lse_size,
    make_inputs,
    plain_cca,
    results_and_gradients,
    row_errors,
)

from corecontext.ops import partial
from corecontext.ops.api import cca_attention, pool_core_tokens
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Upstream

HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
packed = functools.partial(cca_attention, backend="packed", return_lse=True)
OPTIONS = [
    {},
    {"softcap": 3.0},
    {"core_position": "token"},
]


def rotary_for(head_dim: int, device: torch.device) -> Rotary:
    return Rotary.from_theta(10000.0, head_dim, device)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("backend", ["auto", "packed"])
@pytest.mark.parametrize("first, step", [(0, 1), (1, 1), (0, 2)])
def test_rows_of_any_layout(device, dtype, backend, first, step, monkeypatch):
    """Rows that begin at odd elements, and elements with gaps: PyTorch's attention gets none."""
    x = make_inputs(40, dtype=dtype, device=device)
    qkv = (x.q, x.k, x.v)
    dim = x.q.shape[-1]
    wide = [x.new_empty(*x.shape[:-1], 2 * dim + 1) for x in qkv]
    views = [x[..., first : first + dim * step : step] for x in wide]
    for view, x in zip(views, qkv):
        view.copy_(x)
    attention = F.scaled_dot_product_attention

    def spied(*tensors, **options):
        for x in tensors:
            *steps, last = (n * x.element_size() for n in x.stride())
            assert last == x.element_size() and all(n % 16 == 0 for n in steps)
        return attention(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    for window_size in (40, 9):  # full attention, and CCA
        run = functools.partial(
            cca_attention, group_size=4, window_size=window_size, core_position="token"
        )
        assert torch.allclose(run(*views, backend=backend), run(*qkv, backend=backend), atol=2e-2)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("group_size, window_size", [(4, 9), (7, 3), (16, 33)])
def test_awkward_lengths(device, dtype, group_size, window_size):
    g, s = group_size, window_size
    for seq_len in sorted({1, g - 1, g, s, s + g - 1, s + g, 157}):
        inputs = make_inputs(seq_len, dtype=dtype, device=device, seed=seq_len, with_lse=False)
        assert_accurate(packed, inputs, group_size=g, window_size=s, rotary=rotary_for(16, device))


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("option", range(len(OPTIONS)))
@pytest.mark.parametrize("with_lse", [False, True])
def test_every_option(device, dtype, option, with_lse):
    inputs = make_inputs(83, dtype=dtype, device=device, seed=option, with_lse=with_lse)
    assert_accurate(
        packed,
        inputs,
        group_size=5,
        window_size=12,
        rotary=rotary_for(16, device),
        **OPTIONS[option],
    )


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("head_dim", [16, 18, 64, 80, 128, 256])
def test_head_sizes(device, dtype, head_dim):
    inputs = make_inputs(
        45,
        dtype=dtype,
        device=device,
        seed=head_dim,
        head_dim=head_dim,
        num_heads=2,
        num_kv_heads=1,
        with_lse=False,
    )
    assert_accurate(
        packed, inputs, group_size=4, window_size=9, rotary=rotary_for(head_dim, device)
    )


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (8, 1)], ids=str)
def test_head_layouts_in_a_batch_of_transposed_tensors(device, dtype, heads):
    inputs = make_inputs(
        41,
        dtype=dtype,
        device=device,
        batch_size=2,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        transposed=True,
        seed=heads[0],
        with_lse=False,
    )
    assert heads[0] == 1 or not inputs.q.is_contiguous()
    assert_accurate(
        packed,
        inputs,
        group_size=3,
        window_size=7,
        rotary=rotary_for(16, device),
    )


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_the_reference_keeps_the_budget_too(device, dtype):
    function = functools.partial(cca_attention, backend="reference", return_lse=True)
    assert_accurate(
        function,
        make_inputs(61, dtype=dtype, device=device),
        group_size=5,
        window_size=12,
        rotary=rotary_for(16, device),
    )


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_law_7_errors_are_those_of_full_attention_in_the_same_dtype(device, dtype):
    x = make_inputs(601, dtype=dtype, device=device, head_dim=32, seed=1)
    settings = {"group_size": 8, "window_size": 64, "rotary": rotary_for(32, device)}
    wide = x.to(torch.float64)
    out, _ = packed(x.q, x.k, x.v, **settings)
    truth = cca_attention(wide.q, wide.k, wide.v, backend="reference", **settings)
    full, full_truth = (
        F.scaled_dot_product_attention(y.q, y.k, y.v, is_causal=True, enable_gqa=True)
        for y in (x, wide)
    )
    # Relative errors, row by row: full attention over a long past averages more values, to smaller
    # outputs.
    relative = row_errors(full, full_truth) / full_truth.norm(dim=-1)
    assert_within_budget(
        out, truth, relative * truth.norm(dim=-1), "out", dtype, 3, 32**0.5 / 2, factor=1.5
    )
    ours = (row_errors(out, truth) / truth.norm(dim=-1)).square().mean().sqrt()
    assert ours <= 1.5 * relative.square().mean().sqrt()


def test_long_rows_in_half_precision_do_not_drift(device):
    """A group's gradient is a sum over thousands of queries: kept in bfloat16 it would stop
    growing."""
    length, dtype = 1024, torch.bfloat16
    x = make_inputs(length, num_heads=8, num_kv_heads=1, dtype=dtype, device=device, with_lse=False)
    x = x._replace(grad_out=torch.ones_like(x.grad_out))
    settings = {"group_size": 16, "window_size": 16, "rotary": rotary_for(16, device)}
    got = results_and_gradients(packed, x, **settings)["grad_v"]
    truth = results_and_gradients(packed, x.to(torch.float64), **settings)["grad_v"]
    assert_within_budget(got, truth, torch.zeros(got.shape[:-1], device=device), "grad_v", dtype, 2)


def test_large_scores_do_not_overflow(device):
    for dtype in HALF_AND_SINGLE:
        x = make_inputs(70, dtype=dtype, device=device, with_lse=False)
        x = x._replace(q=x.q * 60, k=x.k * 30)
        found = results_and_gradients(
            packed, x, group_size=4, window_size=9, rotary=rotary_for(16, device)
        )
        assert float(found["lse"].max()) > 1000  # exp of it is infinite in every dtype here
        assert all(bool(value.isfinite().all()) for value in found.values())


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_a_gradient_of_the_log_sum_exp_under_large_scores(device, dtype):
    """Scores that the backward rounds to half precision are not those whose log-sum-exp the forward
    found."""
    x = make_inputs(70, dtype=dtype, device=device, num_kv_heads=4)
    x = x._replace(q=x.q * 20, k=x.k * 10)  # scores of some hundreds
    results = []
    scoring = partial.Scoring(0.25, is_causal=True)
    for y in (x, x.to(torch.float64)):
        out, lse = partial.forward(y.q, y.k, y.v, scoring)
        results.append(
            partial.backward(
                Upstream(y.grad_out, y.grad_lse, out, lse),
                *(y.q, y.k, y.v),
                scoring,
            )
        )
    for found, truth in zip(*results):
        tolerance = 4 * torch.finfo(dtype).eps + 1e-3  # that of a log-sum-exp of some hundreds
        assert (found.double() - truth).norm() < tolerance * truth.norm()


@pytest.mark.parametrize(
    "g, s, length, dim, factor, seed",
    [(7, 3, 120, 32, 16, 613566837), (2, 3, 144, 32, 8, 625756329), (3, 9, 55, 32, 16, 540446738)],
)
def test_scores_of_large_queries_are_rounded_as_sums_of_large_products(
    g, s, length, dim, factor, seed
):
    """Rows, found by chance, whose log-sum-exp is one score or two, near 0: 12 eps off in float32,
    where plain PyTorch, adding in another order, is off by 1 or 2."""
    x = make_inputs(length, seed=seed, head_dim=dim, with_lse=False)
    q, k, v = x.q * factor, x.k, x.v
    settings = {"group_size": g, "window_size": s, "core_position": "token"}
    _, truth = cca_attention(
        q.double(), k.double(), v.double(), backend="reference", return_lse=True, **settings
    )
    plain = [plain_cca(q, k, v, fused=fused, **settings)[1] for fused in (False, True)]
    errors = torch.stack([(lse - truth).abs() for lse in plain]).amax(0)
    _, lse = packed(q, k, v, **settings)
    assert_within_budget(lse[..., None], truth[..., None], errors, "lse", q.dtype, 3, lse_size(q))


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("backend", ["packed", "triton"])
def test_pooling_alone(device, dtype, backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="the triton backend needs triton")
        if device.type == "cpu" and dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter gets bfloat16 wrong")
    x = make_inputs(39, dtype=dtype, device=device, seed=3)
    settings = {"group_size": 6, "rotary": rotary_for(16, device)}

    def pooled(y, backend):
        leaves = [t.detach().requires_grad_() for t in (y.q, y.k, y.v)]
        core_k, core_v = pool_core_tokens(*leaves, backend=backend, **settings)
        grads = torch.autograd.grad((core_k.square().sum(), core_v.square().sum()), leaves)
        return [core_k.detach(), core_v.detach(), *grads]

    truth, exact = pooled(x.to(torch.float64), "reference"), pooled(x, backend)
    # Computed in float32 whatever the inputs. In half precision that leaves one rounding at the
    # end: half an epsilon.
    exact_dtype = dtype == torch.float32
    for name, value, right in zip(("core_k", "core_v", "grad_q", "grad_k", "grad_v"), exact, truth):
        is_grad = name.startswith("grad")
        assert_within_budget(
            value,
            right,
            torch.zeros_like(right[..., 0]),
            name,
            dtype,
            8 if is_grad else 2 if exact_dtype else 0.505,
            4.0 if is_grad or exact_dtype else 0.0,
        )


def test_float64_gradients_by_finite_differences(device):
    """Against no formula at all: every gradient of a small case, the log-sum-exp included."""
    x = make_inputs(11, dtype=torch.float64, device=device, head_dim=4, num_heads=2, num_kv_heads=1)
    rotary = Rotary(torch.tensor([1.0, 0.2], device=device))
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    for settings in ({}, {"softcap": 2.0}, {"core_mass": True}):
        assert torch.autograd.gradcheck(
            lambda q, k, v, settings=settings: packed(
                q, k, v, group_size=3, window_size=2, rotary=rotary, **settings
            ),
            leaves,
            fast_mode=True,
        )


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "queries, keys, is_causal", [(300, 1100, False), (1100, 1100, True), (90, 40, False)]
)
def test_parts_of_a_softmax(device, dtype, head_dim, queries, keys, is_causal):
    """Every fused kernel that a part may take, and its gradients from the whole's log-sum-exp,
    against float64."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    q, k, v = draw(2, 3, queries, head_dim), draw(2, 1, keys, head_dim), draw(2, 1, keys, head_dim)
    grad, scoring = draw(*q.shape), partial.Scoring(head_dim**-0.5, is_causal=is_causal)
    truth, truth_lse = partial.forward(*(x.double() for x in (q, k, v)), scoring)
    out, lse = partial.forward(q, k, v, scoring)
    assert out.dtype == dtype and lse.shape == truth_lse.shape and lse.dtype == torch.float32
    tight = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), truth_lse, rtol=0, atol=2e-4)
    torch.testing.assert_close(out.double(), truth, rtol=2 * tight, atol=2 * tight)
    whole_lse = truth_lse + 0.4  # as if other parts had taken a share
    share = truth * math.exp(-0.4)
    upstream = Upstream(grad.double(), None, share, whole_lse)
    wanted = partial.backward(upstream, *(x.double() for x in (q, k, v)), scoring)
    upstream = Upstream(grad, None, share.to(dtype), whole_lse.float())
    got = partial.backward(upstream, q, k, v, scoring)
    for name, one, right in zip(("q", "k", "v"), got, wanted):
        assert one.shape == right.shape
        error = (one.double() - right).norm() / right.norm()
        assert error < 6 * tight, (name, float(error))
