"""The fused pooling kernels against the plain torch pooling and the specification in float64,
gradients included.

On a CPU the kernels run in Triton's interpreter, in float32; on a GPU compiled, in bfloat16 and
float16 too.
"""

import pytest
import torch

pytest.importorskip("triton")

from corecontext.ops import pooling as plain
from corecontext.ops import reference
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Cores, Groups, Spec
from corecontext.ops.triton.pool import launcher as fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32,)

# group_size, head_dim, heads, groups, rotary, softcap
CASES = [
    (1, 16, 1, 3, "half", None),
    (3, 20, 2, 5, "partial", None),
    (3, 20, 3, 2, "partial_interleaved", 5.0),
    (4, 64, 2, 19, "half", None),
    (4, 64, 3, 5, "half", None),
    (4, 64, 1, 9, None, 0.5),
    (16, 80, 3, 3, "half", 2.0),
    (16, 64, 1, 5, "interleaved", None),
    (16, 20, 2, 3, None, None),
    (5, 21, 2, 3, "odd", None),
    (150, 80, 2, 2, "partial", None),
]


def rotary_of(kind: str | None, head_dim: int) -> Rotary | None:
    if kind is None:
        return None
    size = {"odd": head_dim - 5}.get(kind, head_dim // 2 if "partial" in kind else head_dim)
    return Rotary(Rotary.from_theta(100.0, size).inv_freq, interleaved="interleaved" in kind)


def inputs(
    group_size: int,
    head_dim: int,
    heads: int,
    groups: int,
    dtype: torch.dtype,
    kv_heads: int = 2,
    seed: int = 0,
) -> list[torch.Tensor]:
    """q_last, k and v as views of the projections of a model, [1, T, H, D], with a token left over
    at the end."""
    make = torch.Generator().manual_seed(seed)
    length = groups * group_size + 1
    q = (
        torch.randn(1, length, kv_heads * heads, head_dim, generator=make)
        .to(DEVICE, dtype)
        .transpose(1, 2)
    )
    k, v = (
        torch.randn(1, length, kv_heads, head_dim, generator=make)
        .to(DEVICE, dtype)
        .transpose(1, 2)[0]
        for _ in range(2)
    )
    q_last = q.reshape(kv_heads, heads, length, head_dim)[
        :, :, group_size - 1 : groups * group_size : group_size
    ]
    return [q_last] + [
        x[:, : groups * group_size].unflatten(1, (groups, group_size)) for x in (k, v)
    ]


def truth(q_last, k, v, grads, **options):
    """Outputs and gradients of the specification in float64."""
    leaves = [x.double().detach().requires_grad_() for x in (q_last, k, v)]
    outputs = reference.pool(Groups(*leaves), Spec(k.shape[2], 1, **options))
    sums = [g.double() for g in grads]
    return [*outputs, *torch.autograd.grad(outputs, leaves, sums, allow_unused=True)]


def run(forward, backward, q_last, k, v, grads, **options):
    """Outputs and gradients of a module's forward and backward."""
    spec, groups = Spec(k.shape[2], 1, **options), Groups(q_last, k, v)
    return [*forward(groups, spec)[0], *backward(Cores(*grads), groups, spec)]


FUSED = (fused.pool, fused.pool_backward)
PLAIN = (plain.forward_with_mass, plain.backward)


def check(got, same, exact, dtype):
    """Each row's error is at most twice that of plain torch, plus a few roundings of the largest
    element around."""
    for name, a, b, c in zip(("core_k", "core_v", "grad_q", "grad_k", "grad_v"), got, same, exact):
        if b is None:
            assert a is None, name
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, name
        error, plain_error = ((x.double() - c).abs().amax(-1) for x in (a, b))
        allowed = 2 * plain_error + 8 * torch.finfo(dtype).eps * c.abs().amax().clamp(min=1e-3)
        assert bool((error <= allowed).all()), (
            f"{name}: {error.max():.2e}, plain torch {plain_error.max():.2e}"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_plain_and_reference(case, dtype):
    group_size, head_dim, heads, groups, kind, softcap = case
    q_last, k, v = inputs(group_size, head_dim, heads, groups, dtype)
    options = dict(
        scale=head_dim**-0.5,
        rotary=rotary_of(kind, head_dim),
        softcap=softcap,
    )
    shape = (k.shape[0], 1, groups, head_dim)
    make = torch.Generator().manual_seed(1)
    grads = [torch.randn(shape, generator=make).to(DEVICE) for _ in range(2)]
    got = run(*FUSED, q_last, k, v, grads, **options)
    same = run(*PLAIN, q_last, k, v, grads, **options)
    check(got, same, truth(q_last, k, v, grads, **options), dtype)


@pytest.mark.parametrize(
    "case",
    [(4, 16, 2, 3, "half"), (3, 20, 1, 4, None)],
    ids=str,
)
def test_values_may_lie_otherwise_than_keys(case):
    group_size, head_dim, heads, groups, kind = case
    q_last, k, v = inputs(group_size, head_dim, heads, groups, torch.float32)
    options = dict(scale=0.3, rotary=rotary_of(kind, head_dim))
    shape = (k.shape[0], 1, groups, head_dim)
    grads = [torch.ones(shape, device=DEVICE)] * 2
    wanted = run(*FUSED, q_last, k, v, grads, **options)
    assert k.stride() == v.stride() != v.contiguous().stride()
    for same in ((q_last, k, v.contiguous()), (q_last, k.contiguous(), v)):
        for a, b in zip(run(*FUSED, *same, grads, **options), wanted):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("group_size", [4, 150])
def test_a_nan_stays_in_its_group(group_size):
    q_last, k, v = inputs(group_size, 80, 1, 2, torch.float32)
    k, v = k.clone(), v.clone()
    k[0, 1, group_size // 2, 3] = v[1, 0, 0, 5] = torch.nan
    grads = [torch.ones(2, 1, 2, 80, device=DEVICE)] * 2
    options = dict(scale=0.1)
    got = run(*FUSED, q_last, k, v, grads, **options)
    same = run(*PLAIN, q_last, k, v, grads, **options)
    for a, b in zip(got, same):
        if b is not None:
            assert torch.equal(a.isnan(), b.isnan())


def test_scores_of_any_size():
    q_last, k, v = inputs(16, 20, 2, 2, torch.float32)
    options = dict(scale=300.0)
    grads = [torch.ones(2, 1, 2, 20, device=DEVICE)] * 2
    got = run(*FUSED, q_last, k, v, grads, **options)
    same = run(*PLAIN, q_last, k, v, grads, **options)
    check(got, same, truth(q_last, k, v, grads, **options), torch.float32)


def test_no_groups_and_expanded_gradients():
    q_last, k, v = inputs(4, 16, 2, 3, torch.float32)
    none = Groups(q_last[:, :, :0], k[:, :0], v[:, :0])
    spec = Spec(4, 1, scale=1.0)
    cores, _ = fused.pool(none, spec)
    assert cores.k.shape == (2, 1, 0, 16)
    assert fused.pool_backward(cores, none, spec)[1].shape == (2, 0, 4, 16)
    grads = [torch.ones((), device=DEVICE).expand(2, 1, 3, 16)] * 2
    got = run(*FUSED, q_last, k, v, grads, scale=1.0)
    for a, b in zip(got, run(*PLAIN, q_last, k, v, grads, scale=1.0)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group_size", [4, 150])
def test_gradients_are_added_in_float32_to_those_that_are_there(group_size):
    tokens = inputs(group_size, 16, 2, 3, torch.bfloat16)
    grads = [torch.ones(2, 1, 3, 16, device=DEVICE)] * 2
    expected = run(*PLAIN, *(x.float() for x in tokens), grads, scale=0.3)[2:]
    into = tuple(torch.full(x.shape, 5.0, device=DEVICE) for x in tokens[1:])
    spec = Spec(group_size, 1, scale=0.3)
    got = fused.pool_backward(Cores(*grads), Groups(*tokens), spec, into=into)
    assert got[1] is into[0] and got[2] is into[1]
    for found, right, before in zip(got, expected, (0, 5, 5)):
        torch.testing.assert_close(found - before, right, rtol=1e-3, atol=1e-4)


def test_float64_is_refused():
    q_last, k, v = (x.double() for x in inputs(4, 16, 1, 2, torch.float32))
    with pytest.raises(NotImplementedError, match="float64 is not in"):
        fused.pool(Groups(q_last, k, v), Spec(4, 1, scale=1.0))
