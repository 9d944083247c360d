"""The mass of core tokens (core_mass): Gibbs' inequality, its equality, gradients, and where it
changes nothing."""

import functools
from types import SimpleNamespace

import pytest
import torch
from budgets import make_inputs, results_and_gradients

from corecontext import Rotary, cca_attention
from corecontext.ops import pooling, reference
from corecontext.ops.attend_buffer import attend_buffer
from corecontext.ops.autograd import _flat, cca_attention_op
from corecontext.ops.batch import complete_groups
from corecontext.ops.spec import Cores, Groups, Spec, Tokens

ROTARY = Rotary.from_theta(100.0, 16)
OPTIONS = [
    {},
    {"softcap": 2.0},
    {"core_position": "token"},
    {"sink_size": 6},
    {"num_groups": 5},
    {"group_size": (4, 7)},
    {"group_size": 1},
]


def groups_of(length: int, g: int, heads: int = 2):
    """Queries [N, r, L, D] and their groups, in float64."""
    x = make_inputs(length, dtype=torch.float64, num_heads=heads, num_kv_heads=1)
    tokens = Tokens(x.q, x.k[:, 0], x.v[:, 0])
    return tokens, complete_groups(tokens, g)


def masses_and_gradients(groups, spec, module=None):
    """Masses, and gradients of q_last, k and v through masses and core tokens: of the reference, or
    of a module's `backward`."""
    like = groups.k.new_ones(groups.k.shape[0], 1, groups.k.shape[1])
    grad_mass = like.cumsum(2).sin()
    grad_cores = Cores(*(grad_mass[..., None] * x[:, None, :, 0] for x in groups[1:]))
    if module is None:
        leaves = [x.detach().requires_grad_() for x in groups]
        cores, mass = reference.pool_with_mass(Groups(*leaves), spec)
        grads = [x.to(y.dtype) for x, y in zip((*grad_cores, grad_mass), (*cores, mass))]
        return mass, torch.autograd.grad((*cores, mass), leaves, grads)
    mass = module.forward_with_mass(groups, spec)[1]
    return mass, module.backward(grad_cores, groups, spec, grad_mass)


def test_a_core_token_weighs_at_most_as_its_group():
    """Gibbs' inequality, for every query and every group."""
    tokens, groups = groups_of(60, 5)
    spec = Spec(5, 7, scale=0.5)
    cores = reference.pool(groups, spec)
    masses = reference.mass_of(groups, spec)
    scores = 0.5 * tokens.q @ cores.k.mT + masses[:, :, None]  # [N, r, T, M]
    true = (0.5 * torch.einsum("nrtd,nmgd->nrtmg", tokens.q, groups.k)).logsumexp(-1)
    assert (scores <= true + 1e-12).all()
    assert (masses >= 0).all() and (masses > 1.0).any()


def test_at_the_pooling_query_a_core_token_weighs_as_its_group():
    """Of one query head, whose weights are the softmax, keys at their tokens' positions."""
    _, groups = groups_of(60, 5, heads=1)
    spec = Spec(5, 7, scale=0.5)
    cores = reference.pool(groups, spec)
    scores = (
        0.5 * (groups.q_last[:, 0] * cores.k[:, 0]).sum(-1) + reference.mass_of(groups, spec)[:, 0]
    )
    true = (0.5 * torch.einsum("nrmd,nmgd->nrmg", groups.q_last, groups.k)).logsumexp(-1)[:, 0]
    torch.testing.assert_close(scores, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "packed"])
def test_one_token_in_a_group_changes_nothing(backend):
    x = make_inputs(40)
    run = functools.partial(cca_attention, x.q, x.k, x.v, group_size=1, window_size=5)
    settings = {"core_position": "token", "backend": backend}
    assert torch.equal(run(core_mass=True, **settings), run(**settings))


def test_the_sum_of_a_row_is_nearer_to_that_of_full_attention():
    x = make_inputs(200, num_heads=1, num_kv_heads=1, dtype=torch.float64)
    run = functools.partial(
        cca_attention, x.q, x.k, x.v, group_size=8, window_size=8, core_position="token"
    )
    full = cca_attention(
        x.q, x.k, x.v, group_size=1, window_size=8, core_position="token", return_lse=True
    )[1]
    with_mass, without = (run(core_mass=m, return_lse=True)[1] for m in (True, False))
    assert (with_mass <= full + 1e-12).all()
    assert (full - with_mass).mean() < 0.5 * (full - without).abs().mean()


@pytest.mark.parametrize("backend", ["packed"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("with_lse", [False, True])
def test_results_and_gradients_are_the_references(options, with_lse, backend):
    x = make_inputs(75, batch_size=2, dtype=torch.float64, with_lse=with_lse)
    settings = {"group_size": 4, "window_size": 9, "rotary": ROTARY, "core_mass": True, **options}
    found = [
        results_and_gradients(
            functools.partial(cca_attention, return_lse=True, backend=name), x, **settings
        )
        for name in ("reference", backend)
    ]
    for name, truth in found[0].items():
        torch.testing.assert_close(found[1][name], truth, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_lower_precision(dtype):
    x = make_inputs(83, dtype=dtype)
    settings = {"group_size": 5, "window_size": 8, "rotary": ROTARY, "core_mass": True}
    found = [
        results_and_gradients(
            functools.partial(cca_attention, return_lse=True, backend=backend),
            inputs,
            **settings,
        )
        for backend, inputs in (("reference", x.to(torch.float64)), ("packed", x))
    ]
    for name, truth in found[0].items():
        error = (found[1][name].double() - truth).norm(dim=-1)
        allowed = 16 * torch.finfo(dtype).eps * truth.norm(dim=-1).clamp(min=4)
        assert (error <= allowed).all(), (name, float((error / allowed).max()))


@pytest.mark.parametrize("ragged", ["attention_mask", "cu_seqlens"])
def test_padded_and_packed_rows_equal_their_documents(ragged):
    x = make_inputs(70, dtype=torch.float64)
    run = functools.partial(
        cca_attention, group_size=4, window_size=9, rotary=ROTARY, core_mass=True
    )
    alone = run(x.q[:, :, 20:], x.k[:, :, 20:], x.v[:, :, 20:])
    if ragged == "attention_mask":
        together = run(x.q, x.k, x.v, attention_mask=(torch.arange(70) >= 20)[None])
    else:
        together = run(x.q, x.k, x.v, cu_seqlens=torch.tensor([0, 20, 70]))
    torch.testing.assert_close(together[:, :, 20:], alone, rtol=0, atol=1e-12)


def test_gradients_are_those_of_autograd_through_the_reference():
    _, groups = groups_of(12, 4)
    for softcap in (None, 3.0):
        spec = Spec(4, 3, scale=0.5, softcap=softcap, core_mass=True)
        truth, expected = masses_and_gradients(groups, spec)
        mass, gradients = masses_and_gradients(groups, spec, pooling)
        torch.testing.assert_close(mass, truth, rtol=0, atol=1e-13)
        for got, wanted in zip(gradients, expected):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-13)


def test_the_registered_operator_has_the_setting():
    """What torch.compile runs: the same results and gradients as eager code."""
    x = make_inputs(50)
    spec = Spec(4, 9, scale=0.25, core_mass=True, rotary=ROTARY)

    def compiled(q, k, v):
        return cca_attention_op(q, k, v, ROTARY.inv_freq, None, None, None, *_flat(spec, "packed"))

    eager = functools.partial(
        cca_attention, group_size=4, window_size=9, rotary=ROTARY, core_mass=True, return_lse=True
    )
    got = results_and_gradients(compiled, x)
    for name, value in results_and_gradients(eager, x).items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)


def test_refusals():
    x = make_inputs(20)
    with pytest.raises(TypeError, match="core_mass must be True or False, got 1"):
        cca_attention(x.q, x.k, x.v, core_mass=1, core_position="token")


@pytest.mark.parametrize(
    "g, heads, dim, softcap", [(5, 3, 20, 2.0), (16, 1, 16, None), (5, 2, 21, None)]
)
def test_triton_kernels_of_the_mass(g, heads, dim, softcap):
    launcher = pytest.importorskip("corecontext.ops.triton.pool.launcher")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = make_inputs(4 * g + 2, device=device, num_heads=heads, num_kv_heads=1, head_dim=dim)
    x = x._replace(q=x.q * 30)  # weights of 0 among them
    groups = complete_groups(Tokens(x.q, x.k[:, 0], x.v[:, 0]), g)
    spec = Spec(g, 3, scale=dim**-0.5, softcap=softcap, core_mass=True)
    truth, expected = masses_and_gradients(Groups(*(y.double() for y in groups)), spec)
    kernels = SimpleNamespace(forward_with_mass=launcher.pool, backward=launcher.pool_backward)
    mass, gradients = masses_and_gradients(groups, spec, kernels)
    torch.testing.assert_close(mass.double(), truth, rtol=0, atol=2e-5)
    for got, wanted in zip(gradients, expected):
        assert (got.double() - wanted).norm() <= 2e-5 * wanted.norm()


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sink_size": 6}], ids=str)
def test_triton_kernels_take_it(options):
    pytest.importorskip("triton", reason="the triton backend needs triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = make_inputs(30, num_heads=2, num_kv_heads=1, device=device)
    rotary = Rotary.from_theta(100.0, 16, device)
    settings = {"group_size": 4, "window_size": 9, "rotary": rotary, "core_mass": True, **options}
    found = [
        results_and_gradients(
            functools.partial(cca_attention, return_lse=True, backend=backend), inputs, **settings
        )
        for backend, inputs in (("reference", x.to(torch.float64)), ("triton", x))
    ]
    for name, truth in found[0].items():
        error = (found[1][name].double() - truth).norm(dim=-1)
        assert (error <= 1e-5 * truth.norm(dim=-1).clamp(min=4)).all(), (name, float(error.max()))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_buffer_of_entries_with_their_masses(softcap):
    """As a decoding step attends: raw tokens, then core tokens, for each row and KV head."""
    x = make_inputs(30, batch_size=2, dtype=torch.float64)  # 4 heads, 2 KV heads
    masses = torch.rand(2, 2, 20, dtype=torch.float64)
    see = torch.ones(2, 1, 30, dtype=torch.bool)
    options = {"scale": 0.25, "softcap": softcap}
    got = attend_buffer(x.q[:, :, :1], x.k, x.v, see, 10, mass=masses, **options)
    scores = 0.25 * x.q[:, :, :1] @ x.k.repeat_interleave(2, 1).mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores[..., 10:] += masses.repeat_interleave(2, 1)[:, :, None]
    truth = scores.softmax(-1) @ x.v.repeat_interleave(2, 1)
    torch.testing.assert_close(got, truth, rtol=0, atol=1e-12)
