"""The Triton attention kernels against the reference: on the GPU where there is one, else in
Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton")

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import CompactLayer
from corecontext.ops import reference
from corecontext.ops.spec import Cores, Spec, Tokens, Upstream
from corecontext.ops.triton.attend import anywhere as kernels

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter gets bfloat16 wrong. On the GPU every dtype runs.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
ERROR = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}  # of the norm of all rows
WORST = {
    torch.float32: 2e-5,
    torch.float16: 6e-3,
    torch.bfloat16: 5e-2,
}  # of the largest element, in any row

#        N  r  T    D   g    s
SHAPES = [
    (1, 2, 70, 16, 4, 9),
    (2, 2, 70, 20, 7, 13),
    (1, 1, 101, 32, 16, 33),
    (1, 3, 60, 16, 5, 1),
    (1, 1, 130, 16, 100, 20),
    (1, 1, 33, 64, 1, 5),
    (1, 2, 20, 16, 4, 9),
    (1, 1, 1, 16, 4, 9),
]
if GPU:
    SHAPES += [
        (2, 4, 1500, 128, 16, 64),
        (1, 2, 700, 256, 16, 100),
        (1, 2, 999, 80, 5, 33),
    ]


def tensors(n, r, t, d, g, s, dtype, q_start=0, sink_groups=0):
    """q, k, v, core_k, core_v as a cache would pass them: raw keys from the first one that any
    query sees."""
    generator = torch.Generator(DEVICE).manual_seed(t + d)
    total, k_start = q_start + t, max(0, (q_start + 1 - s) // g) * g
    shapes = (
        (n, r, t, d),
        (n, total - k_start, d),
        (n, total - k_start, d),
        *((n, 1, max(0, total // g - sink_groups), d),) * 2,
    )
    return [
        torch.randn(shape, device=DEVICE, generator=generator).to(dtype) for shape in shapes
    ], k_start


def assert_near(got, expected, dtype, what, terms=16):
    """Close as a whole and in every row; a single bound for a tensor would hide a wrong row.

    Sums that cancel may be off by a rounding of each of their `terms`, which are of size 1.
    """
    floor = ERROR[dtype] * terms**0.5
    got, expected = got.double(), expected.double()
    assert got.isfinite().all(), what
    if not expected.numel():
        return
    assert (got - expected).norm() <= ERROR[dtype] * expected.norm() + floor, what
    rows = (
        (got - expected).flatten(0, -2).norm(dim=-1)
        if expected.dim() > 1
        else (got - expected).abs()
    )
    size = (
        expected.flatten(0, -2).norm(dim=-1).amax() if expected.dim() > 1 else expected.abs().amax()
    )
    assert (rows <= WORST[dtype] * size + floor).all(), (
        f"{what}: row {int(rows.argmax())} is off by {rows.max():.2e}"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 5.0},
        {"mass": True, "grad_lse": True, "sink_groups": 2},
    ],
    ids=str,
)
def test_forward_and_gradients(shape, dtype, options):
    if not GPU and dtype != torch.float32 and "softcap" in options and shape not in SHAPES[:2]:
        pytest.skip("the interpreter is slow, and caps scores of float32 whatever the dtype")
    sink_groups = options.get("sink_groups", 0)
    (q, k, v, core_k, core_v), _ = tensors(*shape, dtype, sink_groups=sink_groups)
    mass = None
    if "mass" in options:
        mass = torch.randn(shape[0], 1, core_k.shape[2], device=DEVICE)
    spec = Spec(
        shape[4],
        shape[5],
        scale=shape[3] ** -0.5,
        softcap=options.get("softcap"),
        sink_size=sink_groups * shape[4],
    )
    tokens, cores = Tokens(q, k, v), Cores(core_k, core_v)
    leaves = [x.double().requires_grad_() for x in (q, k, v, core_k, core_v)]
    wide_mass = None if mass is None else mass.double().requires_grad_()
    truth, truth_lse = reference.attend(Tokens(*leaves[:3]), Cores(*leaves[3:]), spec, wide_mass)
    out, lse = kernels.attend(tokens, cores, spec, mass)
    assert_near(out, truth, dtype, "out")
    torch.testing.assert_close(lse.double(), truth_lse, rtol=0, atol=ERROR[dtype])
    grad = torch.randn_like(q)
    grad_lse = torch.randn_like(lse) if "grad_lse" in options else None
    loss = (truth * grad.double()).sum() + (
        0 if grad_lse is None else (truth_lse * grad_lse.double()).sum()
    )
    expected = torch.autograd.grad(
        loss, leaves + ([] if mass is None else [wide_mass]), allow_unused=True
    )
    upstream = Upstream(grad, grad_lse, out, lse)
    got = kernels.attend_backward(upstream, tokens, cores, spec, mass)
    for name, a, b in zip(("q", "k", "v", "core_k", "core_v", "mass"), got, expected):
        terms = shape[2] * shape[3] if name == "mass" else 16
        assert_near(a, torch.zeros_like(a) if b is None else b, dtype, f"gradient of {name}", terms)
    if not GPU and shape != SHAPES[0]:
        return  # the interpreter has one order, whatever the shape
    again = kernels.attend_backward(upstream, tokens, cores, spec, mass)
    assert all(a is b or torch.equal(a, b) for a, b in zip(got, again))  # the same from run to run


@pytest.mark.parametrize("q_start", [0, 5, 23, 60])
@pytest.mark.parametrize("length", [1, 17, 50])
def test_queries_may_start_anywhere(q_start, length):
    shape = (1, 2, length, 16, 4, 9)
    (q, k, v, core_k, core_v), k_start = tensors(*shape, torch.float32, q_start=q_start)
    spec = Spec(group_size=4, window_size=9, scale=0.25)
    truth, _ = reference.attend(
        Tokens(q.double(), k.double(), v.double(), q_start, k_start),
        Cores(core_k.double(), core_v.double()),
        spec,
    )
    out, _ = kernels.attend(Tokens(q, k, v, q_start, k_start), Cores(core_k, core_v), spec)
    assert_near(out, truth, torch.float32, "out")


@pytest.mark.parametrize("q_start, length", [(0, 5), (3, 20), (9, 30), (23, 17), (60, 1)])
def test_first_tokens_may_come_apart_from_the_others(q_start, length):
    """As a cache hands them over: keys and values of the first tokens, then those from where a
    query sees raw tokens."""
    g, s, n = 4, 9, 8
    k_start = max(n, (q_start + 1 - s) // g * g)
    shape = (1, 2, q_start + length, 16, g, s)
    (q, k, v, core_k, core_v), _ = tensors(*shape, torch.float32, sink_groups=2)
    q = q[:, :, q_start:]
    spec = Spec(group_size=g, window_size=s, scale=0.25, sink_size=n)
    tokens = Tokens(q, k[:, k_start:], v[:, k_start:], q_start, k_start, k[:, :n], v[:, :n])
    mass = torch.randn(1, 1, core_k.shape[2], device=DEVICE)
    truth, truth_lse = reference.attend(
        Tokens(q.double(), k.double(), v.double(), q_start),
        Cores(core_k.double(), core_v.double()),
        spec,
        mass,
    )
    out, lse = kernels.attend(tokens, Cores(core_k, core_v), spec, mass)
    assert_near(out, truth, torch.float32, "out")
    assert_near(lse, truth_lse, torch.float32, "log-sum-exp")


def test_the_future_changes_nothing():
    (q, k, v, core_k, core_v), _ = tensors(1, 2, 120, 16, 4, 9, torch.float32)
    spec = Spec(group_size=4, window_size=9, scale=0.25)
    before, _ = kernels.attend(Tokens(q, k, v), Cores(core_k, core_v), spec)
    for t in (0, 12, 13, 60, 118):
        changed = [x.clone() for x in (q, k, v, core_k, core_v)]
        changed[0][:, :, t + 1 :] = 7
        changed[1][:, t + 1 :], changed[2][:, t + 1 :] = 1e4, -1e4
        changed[3][:, :, (t + 1) // 4 :], changed[4][:, :, (t + 1) // 4 :] = 1e4, -1e4
        after, _ = kernels.attend(Tokens(*changed[:3]), Cores(*changed[3:]), spec)
        assert torch.equal(after[:, :, : t + 1], before[:, :, : t + 1])


@pytest.mark.parametrize("g, s", [(2, 62), (34, 29)])
def test_tiles_without_a_mask_hold_no_token_of_the_future(g, s):
    """Of these sizes a row's next token is the first of a tile, so that one more is a leak."""
    (q, k, v, core_k, core_v), _ = tensors(1, 1, 128, 16, g, s, torch.float32)
    spec = Spec(group_size=g, window_size=s, scale=0.25)
    wide = [x.double() for x in (q, k, v, core_k, core_v)]
    truth, _ = reference.attend(Tokens(*wide[:3]), Cores(*wide[3:]), spec)
    out, _ = kernels.attend(Tokens(q, k, v), Cores(core_k, core_v), spec)
    assert_near(out, truth, torch.float32, "out")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_mask": True},
        {"cu_seqlens": True},
        {"sink_size": 8, "core_mass": True},
    ],
    ids=str,
)
def test_public_operator(options):
    rows = 1 if "cu_seqlens" in options else 2
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(rows, 75, h, 16, device=DEVICE, generator=generator).transpose(1, 2)
        for h in (4, 2, 2)
    )
    settings = {
        "group_size": 4,
        "window_size": 9,
        "rotary": Rotary.from_theta(100.0, 16, DEVICE),
        **options,
    }
    if "attention_mask" in options:
        settings["attention_mask"] = torch.ones(2, 75, device=DEVICE)
        settings["attention_mask"][0, :30] = 0
    if "cu_seqlens" in options:
        settings["cu_seqlens"] = torch.tensor([0, 30, 31, 75], device=DEVICE)
    weights = torch.randn(q.shape, device=DEVICE, generator=generator)

    def results(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = cca_attention(*leaves, backend=backend, **settings)
        return [out, *torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)]

    for name, a, b in zip(
        ("out", "q", "k", "v"),
        results("triton", torch.float32),
        results("reference", torch.float64),
    ):
        assert_near(a, b, torch.float32, name)


def test_cache_in_chunks():
    (q, k, v), rotary = (
        (torch.randn(2, h, 70, 16, device=DEVICE) for h in (4, 2, 2)),
        Rotary.from_theta(100.0, 16),
    )
    layer = CompactLayer(CCAConfig.paper(4, 9, backend="triton"), rotary)
    outs, start = [], 0
    for size in (30, 1, 5, 1, 33):
        outs.append(layer.attend(*(x[:, :, start : start + size] for x in (q, k, v))))
        start += size
    truth = cca_attention(
        q.double(),
        k.double(),
        v.double(),
        group_size=4,
        window_size=9,
        rotary=rotary,
        backend="reference",
    )
    assert_near(torch.cat(outs, 2), truth, torch.float32, "out")


def test_refusals():
    q = torch.randn(1, 1, 40, 16, device=DEVICE, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="backend 'triton' cannot run this call: float64"):
        cca_attention(q, q, q, core_position="token", backend="triton")
