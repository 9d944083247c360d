"""Triton's `attend` and `gradients` as the operator calls them: kernels that run everywhere, and
those for Hopper.

On a GPU of compute capability 9.0 both take the same calls; elsewhere the surface has only the
first kind. Without a GPU one small case runs in Triton's interpreter, so that the test itself is
tested.
"""

import ast
import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="the triton backend needs triton")

from budgets import (  # noqa: E402
    Inputs,
    assert_accurate,
    assert_within_budget,
    make_inputs,
    plain_cca,
    results_and_gradients,
    row_errors,
)

from corecontext import Rotary, cca_attention, pool_core_tokens  # noqa: E402
from corecontext.ops import compose  # noqa: E402
from corecontext.ops.batch import complete_groups  # noqa: E402
from corecontext.ops.fetch.choice import Choice  # noqa: E402
from corecontext.ops.fetch.index import index_of  # noqa: E402
from corecontext.ops.mass import if_any  # noqa: E402
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream  # noqa: E402
from corecontext.ops.triton import backend  # noqa: E402
from corecontext.ops.triton.attend import anywhere, best, chosen  # noqa: E402
from corecontext.ops.triton.attend.chosen import Call  # noqa: E402
from corecontext.ops.triton.attend.far_past import FarPast, far_past  # noqa: E402
from corecontext.ops.triton.attend.mass_parts import mass_parts  # noqa: E402
from corecontext.ops.triton.attend.shares import Choosing  # noqa: E402
from corecontext.ops.triton.attend.unions import Unions  # noqa: E402
from corecontext.ops.triton.choose.byte_keys import to_bytes  # noqa: E402
from corecontext.ops.triton.launch import ints  # noqa: E402

GPU = torch.cuda.is_available()
HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0) and best.hopper_forward is not None
DEVICE = "cuda" if GPU else "cpu"
# The interpreter gets bfloat16 wrong.
DTYPES = [torch.bfloat16, torch.float16] if GPU else [torch.float16]


class _Anywhere:
    """The functions that run everywhere, in the shape of the surface."""

    pool = staticmethod(backend.pool)
    pool_with_mass = staticmethod(backend.pool_with_mass)
    pool_backward = staticmethod(backend.pool_backward)
    attend = staticmethod(anywhere.attend)
    attend_backward = staticmethod(backend.attend_backward)

    @staticmethod
    def gradients(upstream, tokens, groups, cores, spec, mass=None):
        grads = backend.attend_backward(upstream, tokens, cores, spec, mass)
        return compose.through_pooling(grads, groups, spec, backend.pool_backward)


SURFACES = {"anywhere": _Anywhere, "hopper": backend}
ON_HOPPER = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
WAYS = pytest.mark.parametrize("way", ["anywhere", pytest.param("hopper", marks=ON_HOPPER)])
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])

#        r  length D    g    s    options
CASES = [
    (1, 600, 128, 16, 64, {}),
    (2, 601, 64, 7, 33, {}),
    (4, 700, 128, 16, 100, {"grad_lse": True}),
    (4, 333, 80, 7, 50, {"grad_lse": True}),
    (2, 500, 96, 1, 64, {}),
    (2, 500, 96, 1, 61, {"mass": True}),
    (2, 700, 128, 150, 170, {}),
    (1, 460, 64, 150, 10, {"mass": True, "grad_lse": True}),
    (1, 400, 256, 16, 64, {}),
    (2, 300, 256, 7, 45, {"grad_lse": True}),
    (4, 600, 128, 16, 64, {}),
    (2, 430, 80, 7, 20, {"mass": True}),
    (4, 600, 128, 16, 50, {"mass": True}),
    (4, 130, 96, 16, 40, {"mass": True, "grad_lse": True}),
    (2, 127, 128, 7, 1, {}),
    (1, 20, 64, 16, 9, {}),
    (1, 1, 128, 16, 9, {}),
    (4, 600, 128, 16, 64, {"sink_groups": 1}),
    (2, 500, 64, 7, 33, {"sink_groups": 3, "mass": True, "grad_lse": True}),
    (2, 700, 128, 150, 170, {"sink_groups": 1}),
    (1, 400, 256, 16, 64, {"sink_groups": 9}),
]
SMALL = [(2, 45, 40, 7, 10, {"mass": True, "grad_lse": True, "sink_groups": 1})]
CASES = CASES if GPU else SMALL
BATCH = 2 if GPU else 1  # two KV heads are two sequences to the kernels


def by_sequence(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H or Hkv, L, ...] to [N, r or 1, L, ...], as a view where there is one."""
    return x.unflatten(1, (kv_heads, -1)).flatten(0, 1)


def rearranged(x: Tensor) -> Tensor:
    """The same numbers, with the sequence outermost in memory."""
    return x.movedim(-2, 0).contiguous().movedim(0, -2)


def misaligned(x: Tensor) -> Tensor:
    """The same numbers, one element away from where a storage begins."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def odd_rows(x: Tensor) -> Tensor:
    """The same numbers in rows that do not begin at multiples of 16 bytes."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 3)[..., :-3].copy_(x)


def every_second(x: Tensor) -> Tensor:
    """The same numbers, not side by side."""
    return x.new_empty(*x.shape, 2)[..., 0].copy_(x)


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "rearranged": rearranged,
    "misaligned": misaligned,
    "odd rows": odd_rows,
    "every second": every_second,
}


def one(x: Tensor, like: Tensor) -> Tensor:
    """Gradient of a sum: one number, seen everywhere."""
    return like.new_ones(()).expand(like.shape)


def one_row(x: Tensor, like: Tensor) -> Tensor:
    """One row, seen everywhere."""
    return x[:1, :1, :1].expand(like.shape)


class _Direct(torch.autograd.Function):
    """A surface's `pool_with_mass`, `attend` and `gradients` on whole sequences, called with
    tensors laid out by `place`."""

    @staticmethod
    def forward(ctx, q, k, v, surface, place, spec):
        ctx.set_materialize_grads(False)
        ctx.shapes, kv_heads, g = (q.shape, k.shape), k.shape[1], spec.group_size
        q = place(by_sequence(q, kv_heads))
        k, v = (place(by_sequence(x, kv_heads)[:, 0]) for x in (k, v))
        n = spec.sinks
        count = max(0, q.shape[2] - n) // g
        pooled = slice(n, n + count * g)
        groups = Groups(
            q[:, :, pooled][:, :, g - 1 :: g],
            *(x[:, pooled].unflatten(1, (count, g)) for x in (k, v)),
        )
        tokens = Tokens(q, k, v)
        cores, mass = surface.pool_with_mass(groups, spec)
        mass = if_any(mass)
        out, lse = surface.attend(tokens, cores, spec, mass)
        ctx.surface, ctx.place, ctx.results = surface, place, (place(out), place(lse))
        ctx.inputs = (tokens, groups, cores, spec, mass)
        return out.view(ctx.shapes[0]), lse.view(ctx.shapes[0][:-1])

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        kv_heads = ctx.shapes[1][1]
        grad_out = by_sequence(grad_out, kv_heads)
        if 0 not in grad_out.stride():  # an expanded gradient is handed over as it is
            grad_out = ctx.place(grad_out)
        grad_lse = None if grad_lse is None else by_sequence(grad_lse, kv_heads)
        upstream = Upstream(grad_out, grad_lse, *ctx.results)
        grads = ctx.surface.gradients(upstream, *ctx.inputs)
        dq, dk, dv = (
            x.reshape(shape).to(grad_out.dtype)
            for x, shape in zip(grads, (ctx.shapes[0], ctx.shapes[1], ctx.shapes[1]))
        )
        return dq, dk, dv, None, None, None


def direct(
    surface: Any,
    place: Callable[[Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp, differentiable, by `_Direct`."""
    spec = Spec(scale=q.shape[-1] ** -0.5, **settings)
    return _Direct.apply(q, k, v, surface, place, spec)


def prepared(case: tuple, dtype: torch.dtype) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and settings of a case."""
    r, length, dim, g, s, options = case
    inputs = make_inputs(
        length,
        batch_size=BATCH,
        num_heads=2 * r,
        num_kv_heads=2,
        head_dim=dim,
        dtype=dtype,
        device=DEVICE,
        seed=length,
        with_lse="grad_lse" in options,
    )
    return inputs, {
        "group_size": g,
        "window_size": s,
        "sink_size": options.get("sink_groups", 0) * g,
        "rotary": Rotary.from_theta(1e4, dim, DEVICE),
        "core_mass": "mass" in options,
    }


@contextlib.contextmanager
def deterministic():
    """As torch.use_deterministic_algorithms(True); also fills fresh memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def test_triton_takes_heads_of_any_size_up_to_the_largest():
    for dim in (1, 2, 17, 96, 255, backend.MAX_HEAD_DIM):
        q = torch.empty(1, 1, 1, dim, device=DEVICE)
        assert backend.unsupported_reason(q) is backend.unsupported_reason(q.half()) is None
        assert "float64 is not one of" in backend.unsupported_reason(q.double())
    q = torch.empty(1, 1, 1, backend.MAX_HEAD_DIM + 1, device=DEVICE)
    assert backend.unsupported_reason(q) == "head_dim 257 is more than 256"


@ON_HOPPER
def test_hopper_takes_the_calls():
    """Else the cases below would compare a kernel with itself."""
    spec = Spec(16, 64, scale=1.0)
    for _, length, dim, *_ in CASES:
        q = torch.empty(1, 1, length, dim, dtype=torch.bfloat16, device=DEVICE)
        assert best.hopper_forward.takes(q, spec)
        assert best.hopper_backward.takes(q, spec) == (dim <= 128)
        with deterministic():
            assert not best.hopper_backward.takes(q, spec)


@DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_output_that_is_given_is_written_in_place(layout, dtype):
    """By the kernels of this device; rows outside stay as they are."""
    length, dim = (600, 128) if GPU else (45, 40)
    torch.manual_seed(0)
    whole = torch.randn(2, 4, length + 2, dim, device=DEVICE).to(dtype)
    k, v = torch.randn(2, 2, length, dim, device=DEVICE).to(dtype)
    cores = Cores(*torch.randn(2, 2, 1, length // 7, dim, device=DEVICE).to(dtype))
    spec = Spec(7, 10, scale=dim**-0.5)
    tokens = Tokens(whole[:, :, 1:-1], k, v)
    far = FarPast(*(x[:, 0] for x in cores), None)
    wanted, lse = backend.attend(tokens, cores, spec)
    buffer = LAYOUTS[layout](torch.full_like(whole, 7.0))
    out = buffer[:, :, 1:-1]
    written, own_lse = backend.attend_list(tokens, far, spec, out)
    assert written is out
    assert torch.equal(out, wanted) and torch.equal(own_lse, lse)
    assert (buffer[:, :, [0, -1]] == 7.0).all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_parts_of_masses_add_up_to_them_over_the_scale(dtype):
    if dtype == torch.bfloat16 and not GPU:
        pytest.skip("the interpreter gets bfloat16 wrong")
    mass = torch.rand(3, 200, device=DEVICE)[:, 3:] * math.log(1024)
    parts = mass_parts(mass, 0.088, dtype)
    assert parts.shape == (3, 1, 197, 16) and parts.dtype == dtype and not parts[..., 3:].any()
    torch.testing.assert_close(parts[:, 0].float().sum(-1), mass / 0.088, rtol=1e-6, atol=1e-6)


def test_entries_have_the_masses_of_their_core_tokens():
    """First tokens have none."""
    n, r, count = 2, 3, 5
    cores = Cores(*torch.randn(2, n, 1, count, 8, device=DEVICE))
    tokens = Tokens(torch.randn(n, r, 40, 8), *torch.randn(2, n, 40, 8, device=DEVICE))
    spec = Spec(4, 8, 1.0, sink_size=4)
    mass = torch.rand(n, 1, count, device=DEVICE)
    far = far_past(tokens, cores, spec, mass)
    assert torch.equal(far.mass, torch.cat((torch.zeros(n, 4, device=DEVICE), mass[:, 0]), 1))
    assert far_past(tokens, cores, spec, None).mass is None


@WAYS
@DTYPE
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_is_within_its_budget(case, dtype, way):
    inputs, settings = prepared(case, dtype)
    assert_accurate(
        functools.partial(direct, SURFACES[way], LAYOUTS["contiguous"]), inputs, **settings
    )


@WAYS
@DTYPE
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded number", "expanded row"])
def test_tensors_may_lie_anyhow(layout, dtype, way):
    inputs, settings = prepared((2, 300, 80, 7, 33, {"mass": True}) if GPU else SMALL[0], dtype)
    spread = {"expanded number": one, "expanded row": one_row}.get(layout)
    if spread is not None:
        inputs = inputs._replace(grad_out=spread(inputs.grad_out, inputs.q))
    place = LAYOUTS.get(layout, LAYOUTS["contiguous"])
    assert_accurate(functools.partial(direct, SURFACES[way], place), inputs, **settings)


@WAYS
@DTYPE
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_from_run_to_run(case, dtype, way):
    inputs, settings = prepared(case, dtype)
    leaves = [x.requires_grad_() for x in inputs[:3]]

    def run():
        out, lse = direct(SURFACES[way], LAYOUTS["contiguous"], *leaves, **settings)
        into = inputs.grad_out if inputs.grad_lse is None else (inputs.grad_out, inputs.grad_lse)
        with deterministic():
            return [
                out,
                lse,
                *torch.autograd.grad((out, lse) if isinstance(into, tuple) else out, leaves, into),
            ]

    first = run()
    for _ in range(2 if GPU else 1):
        for a, b in zip(first, run()):
            assert a.isfinite().all() and torch.equal(a, b)


@WAYS
@DTYPE
@pytest.mark.parametrize(
    "q_start, count",
    [(0, 1), (0, 130), (5, 64), (64, 200), (133, 128), (299, 1), (150, 150)] if GPU else [(23, 17)],
)
@pytest.mark.parametrize(
    "r, dim, g, s",
    [(1, 128, 16, 64), (2, 64, 7, 33), (4, 256, 16, 50), (2, 80, 1, 20)]
    if GPU
    else [(2, 40, 7, 10)],
)
def test_chunks_of_queries(r, dim, g, s, q_start, count, dtype, way):
    """A chunk's rows hold the budget of the same rows of the whole; keys before the window are not
    handed over."""
    inputs = make_inputs(
        300 if GPU else 45,
        batch_size=BATCH,
        num_heads=2 * r,
        num_kv_heads=2,
        head_dim=dim,
        dtype=dtype,
        device=DEVICE,
    )
    q, k, v = inputs[:3]
    settings = {
        "group_size": g,
        "window_size": s,
        "rotary": Rotary.from_theta(1e4, dim, DEVICE),
        "core_mass": True,
    }
    truth = cca_attention(
        *(x.double() for x in inputs[:3]),
        backend="reference",
        return_lse=True,
        **settings,
    )
    plain = [plain_cca(q, k, v, fused=fused, **settings) for fused in (False, True)]
    surface, end = SURFACES[way], q_start + count
    rows, (keys, values) = by_sequence(q, 2), (by_sequence(x, 2)[:, 0] for x in (k, v))
    groups = end // g
    spec = Spec(scale=dim**-0.5, **settings)
    q_last = rows[:, :, g - 1 : groups * g : g]
    grouped = (x[:, : groups * g].unflatten(1, (groups, g)) for x in (keys, values))
    cores, mass = surface.pool_with_mass(Groups(q_last, *grouped), spec)
    k_start = max(0, (q_start + 1 - s) // g) * g
    tokens = Tokens(
        rows[:, :, q_start:end], keys[:, k_start:end], values[:, k_start:end], q_start, k_start
    )
    got = [surface.attend(tokens, cores, spec, if_any(mass)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*got))
    for name, index, roundings, size in (("out", 0, 2, dim**0.5 / 2), ("lse", 1, 3, 1.0)):

        def here(x: Tensor) -> Tensor:
            return (x[:, :, q_start:end] if x.dim() == 4 else x[:, :, q_start:end, None]).flatten(
                0, 1
            )

        expected = here(truth[index])
        actual = got[0][index].reshape(expected.shape)
        error = torch.stack([row_errors(here(run[index]), expected) for run in plain]).amax(0)
        assert_within_budget(actual, expected, error, name, dtype, roundings, size)


@DTYPE
@pytest.mark.parametrize("how", ["packed", "padded"])
def test_gradients_of_a_part_of_a_row_are_those_of_the_part_alone(how, dtype):
    """Documents in a row, and rows with padding, are slices of the batch: of its log-sum-exp,
    too."""
    length, edges = (500, (0, 130, 131, 420, 500)) if GPU else (60, (0, 25, 26, 60))
    dim, g, s = (64, 16, 33) if GPU else (40, 4, 9)
    inputs = make_inputs(
        length,
        num_heads=4,
        num_kv_heads=2,
        head_dim=dim,
        dtype=dtype,
        device=DEVICE,
        with_lse=False,
    )
    run = functools.partial(
        cca_attention,
        backend="triton",
        return_lse=True,
        group_size=g,
        window_size=s,
        rotary=Rotary.from_theta(1e4, dim, DEVICE),
    )
    if how == "packed":
        parts, where = (
            list(itertools.pairwise(edges)),
            {"cu_seqlens": torch.tensor(edges, device=DEVICE)},
        )
    else:
        parts, mask = [(edges[1], length)], torch.arange(length, device=DEVICE)[None] >= edges[1]
        where = {"attention_mask": mask}
    found = results_and_gradients(run, inputs, **where)
    for start, end in parts:
        alone = type(inputs)(*(x if x is None else x[:, :, start:end].contiguous() for x in inputs))
        for name, value in results_and_gradients(run, alone).items():
            torch.testing.assert_close(
                found[name][:, :, start:end],
                value,
                rtol=1e-2,
                atol=1e-2,
                msg=lambda why: f"{name} of {start} to {end}: {why}",
            )


@pytest.mark.skipif(best.hopper_forward is None, reason="this Triton has no Gluon")
def test_the_calls_that_hoppers_kernels_refuse(monkeypatch):
    """Any other takes the portable kernels, which cap scores and take other sizes."""
    chip = [(9, 0)]
    monkeypatch.setattr(best.hopper_forward, "nvidia_capability", lambda device: chip[0])

    def takes(dim: int = 64, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> bool:
        spec = Spec(16, 64, **{"scale": 0.1, **settings})
        q = torch.empty(1, 1, 4, dim, dtype=dtype)
        return best.hopper_forward.takes(q, spec)

    assert [takes(dim) for dim in (32, 36, 40, 128, 256, 264)] == [
        *(False, False, True, True, True, False)
    ]
    assert takes(dtype=torch.float16) and not takes(dtype=torch.float32)
    assert not takes(softcap=20.0) and not takes(scale=0.0) and not takes(scale=-0.1)
    for chip[0] in ((8, 0), (10, 0), None):
        assert not takes()


@pytest.mark.skipif(best.hopper_backward is None, reason="this Triton has no Gluon")
@DTYPE
def test_what_the_hopper_backward_prepares_is_of_its_own_rows(dtype, monkeypatch):
    """The kernels for Hopper run nowhere else, but what comes before them does; and what they are
    given lies as they take it to lie: whatever comes without its strides, element by element."""
    from corecontext.ops.triton.attend import hopper_backward, hopper_forward

    taken, launched, dim, length = [], [], 40, 45

    def launch(kernel, grid, arguments, strides=(), *, num_warps, **constants):
        launched.append(kernel)
        pointers = [y for x in arguments for y in (x if isinstance(x, tuple) else (x,))]
        if kernel is hopper_backward._prepare_kernel:
            kernel[grid](*arguments, *strides, **constants, num_warps=num_warps)
            taken.append(arguments[1][0])
            del pointers[0:3:2]  # the output and its gradient, which come with their strides
        assert all(x.is_contiguous() for x in pointers if isinstance(x, Tensor))

    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(hopper_forward, "num_programs", lambda device: 132)
    monkeypatch.setattr(
        hopper_backward, "pool_backward", lambda *args, **options: (None, None, None)
    )
    generator = torch.Generator(DEVICE).manual_seed(0)
    row = {
        name: torch.randn(2, *shape, device=DEVICE, generator=generator).to(dtype)
        for name, shape in {
            "grad_out": (2, 80, dim),
            "q": (2, 80, dim),
            "k": (80, dim),
            "v": (80, dim),
            "out": (2, 80, dim),
        }.items()
    }
    lse, grad_lse = (torch.randn(2, 2, 80, device=DEVICE, generator=generator) for _ in range(2))
    some = {name: x[..., 20 : 20 + length, :] for name, x in row.items()}
    some_lse, some_grad_lse = lse[..., 20 : 20 + length], grad_lse[..., 20 : 20 + length]
    cores = Cores(*torch.zeros(2, 2, 1, length // 7, dim, dtype=dtype, device=DEVICE))
    grouped = (some[name][:, :42].unflatten(1, (6, 7)) for name in "kv")
    groups = Groups(some["q"][:, :, 6:42:7], *grouped)
    mass = torch.ones(4, 1, length // 7, device=DEVICE)[::2]
    spec = Spec(group_size=7, window_size=10, scale=0.2)
    tokens = Tokens(some["q"], some["k"], some["v"])
    upstream = Upstream(some["grad_out"], some_grad_lse, some["out"], some_lse)
    hopper_forward.attend_list(tokens, far_past(tokens, cores, spec, mass), spec)
    hopper_backward.gradients(upstream, tokens, groups, cores, spec, mass)
    assert launched == [
        hopper_forward._attend_fwd_hopper,
        hopper_backward._prepare_kernel,
        hopper_backward._attend_bwd_hopper,
        hopper_backward._finish_kernel,
    ]
    stats = taken[0].unflatten(-1, (2, -1)).transpose(2, 3).flatten(3)[..., :length]
    torch.testing.assert_close(stats[:, :, 0], -some_lse / math.log(2), rtol=1e-6, atol=1e-6)
    delta = some_grad_lse - (some["out"].float() * some["grad_out"].float()).sum(-1)
    torch.testing.assert_close(stats[:, :, 1], delta, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(best.hopper_backward is None, reason="this Triton has no Gluon")
def test_pooling_for_hopper_has_the_tokens_after_the_first(monkeypatch):
    """Gradients of the far past, given here, reach the first tokens as they are, and by pooling the
    tokens and group-end queries behind them."""
    from corecontext.ops.triton.attend import hopper_backward
    from corecontext.ops.triton.pool import launcher as pool

    dim, length, g, first = 40, 45, 7, 14
    spec = Spec(group_size=g, window_size=10, scale=0.2, sink_size=first)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, grad_out, out = torch.randn(3, 2, 2, length, dim, device=DEVICE, generator=generator)
    k, v = torch.randn(2, 2, length, dim, device=DEVICE, generator=generator)
    tokens = Tokens(q, k, v)
    groups = complete_groups(tokens, g, first)
    count = groups.k.shape[1]
    far = torch.randn(2, 2, 2, first + count, dim, device=DEVICE, generator=generator)

    def attend_backward(chunk, *args):
        chunk.dk.zero_()
        chunk.dv.zero_()
        return far.clone()

    monkeypatch.setattr(hopper_backward, "_attend_backward", attend_backward)
    upstream = Upstream(grad_out, None, out, torch.zeros(2, 2, length, device=DEVICE))
    cores = Cores(*torch.zeros(2, 2, 1, count, dim, device=DEVICE))
    dq, *grads, _ = hopper_backward.gradients(upstream, tokens, groups, cores, spec)

    of_entries = far.sum(2)
    expected = pool.pool_backward(Cores(*of_entries[:, :, None, first:]), groups, spec)
    ends = torch.zeros_like(dq)
    ends[:, :, first + g - 1 : first + count * g : g] = expected[0]
    torch.testing.assert_close(dq, ends, rtol=1e-5, atol=1e-5)
    for grad, to_first, pooled in zip(grads, of_entries, expected[1:]):
        wanted = torch.zeros_like(grad)
        wanted[:, :first] = to_first[:, :first]
        wanted[:, first : first + count * g] = pooled.flatten(1, 2)
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture
def unions_for_hopper(monkeypatch):
    """The modules that launch fetch's kernels for Hopper, and their launches by argument."""
    pytest.importorskip(
        "corecontext.ops.triton.attend.hopper_union", reason="this Triton has no Gluon"
    )
    from corecontext.ops.triton.attend import hopper_union, hopper_union_dq
    from corecontext.ops.triton.choose import hopper_scores

    launches = []

    def launch(kernel, grid, arguments, specialized=(), *, num_warps, **constants):
        names = dict(zip(kernel.arg_names, arguments + specialized, strict=False))
        launches.append((kernel, grid, SimpleNamespace(**names), constants))

    for module in (hopper_union, hopper_scores):
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "num_programs", lambda device: 132)
    return hopper_union, hopper_union_dq, hopper_scores, launches


def fetched_call(share: int, start: int = 0, r: int = 8, dim: int = 128, g: int = 16) -> Call:
    """A call for two KV heads, of 100 queries from `start` on, with 3 groups for each share."""
    spec = Spec(g, 64, 0.5, sink_size=g)
    length, shares = start + 100, -(-(start + 100) // share) - start // share
    q, k, v = (torch.zeros(2, *x, dim).bfloat16() for x in ((r, 100), (length,), (length,)))
    cores = Cores(*torch.zeros(2, 2, 1, length // g - 1, dim).bfloat16())
    choice = Choice(torch.zeros(2, shares, 3, dtype=torch.int32), share)
    return Call(Tokens(q, k, v, start), cores, spec, None, choice)


def test_the_calls_that_hoppers_kernels_of_fetch_take(unions_for_hopper):
    module = unions_for_hopper[0]
    for share, change, takes in (
        (1, {}, True),
        (5, {"r": 3, "dim": 64, "start": 8}, True),
        (128, {"r": 17, "dim": 72}, True),
        (1, {"dim": 136}, False),
        (1, {"g": 8}, True),
        (16, {"g": 64}, True),
        (16, {"g": 24}, False),
    ):
        assert module.takes(fetched_call(share, **change)) == takes, change


@pytest.mark.parametrize("with_lse", [False, True])
def test_what_hoppers_kernels_of_a_union_get(unions_for_hopper, monkeypatch, with_lse):
    forward, backward, _, launches = unions_for_hopper
    call = fetched_call(16, start=48)
    out, lse = torch.zeros_like(call.tokens.q), torch.zeros(2, 8, 100)
    unions = Unions(*torch.zeros(2, 2, 4, 6, dtype=torch.int32), torch.zeros(2, 4, 3).int())
    forward.attend(call, unions, out, lse)
    monkeypatch.setattr(Call, "marks", lambda call: None)
    monkeypatch.setattr(Call, "unions", lambda call, marks: unions)
    q = call.tokens.q.mT.contiguous().mT
    whole = fetched_call(16)
    whole = whole._replace(tokens=whole.tokens._replace(q=q))
    grad_lse = torch.ones(2, 8, 100) if with_lse else None
    dq, delta = torch.zeros(2, 8, 100, 128), torch.zeros_like(lse)
    backward.add_query_gradient(Upstream(out, grad_lse, out, lse), whole, dq, delta, 0.25)
    kernels = (forward.union_fwd_hopper, backward.union_dq_hopper)
    for (kernel, grid, given, constants), wanted in zip(launches, kernels, strict=True):
        # 4 unions of 32 queries each, items of 4 of 8 heads, of two sequences.
        assert kernel is wanted and grid == (16,)
        assert given.q_desc.shape == [2, 8, 100, 128]
        assert (given.most, given.sink_groups) == (6, 1)
        assert all(map(operator.is_, given.unions, unions))
        assert given.scale == pytest.approx(0.5 / math.log(2))
        assert given.q_desc.block_shape == [1, 1, 16, 64]
        assert given.k_desc.block_shape == given.v_desc.block_shape == [1, 1, 16, 64]
        assert (constants["GROUP_SIZE"], constants["HEAD_DIM"]) == (16, 128)
    first, second = (given for _, _, given, _ in launches)
    assert all(map(operator.is_, first.results, (out, lse)))
    assert first.out_strides == out.stride()[:3]
    assert (first.k_desc.shape[2], second.k_desc.shape[2], second.query_scale) == (148, 100, 0.25)
    assert all(map(operator.is_, second.results, (dq, delta)))
    wanted = (out, out, lse, grad_lse if with_lse else lse)
    assert all(map(operator.is_, second.inputs, wanted))
    assert launches[1][3]["HAS_GRAD_LSE"] == with_lse
    many = torch.zeros(2, 100, 3, dtype=torch.int32)
    forward.attend(call, Unions(unions.groups, unions.queries, many), out, lse)
    assert launches[2][1] == (132,)  # no more than the chip has


@pytest.mark.usefixtures("default_device")
def test_what_hoppers_kernel_of_scores_gets(unions_for_hopper):
    module, launches = unions_for_hopper[2:]
    q, keys = torch.zeros(2, 6, 300, 80), torch.zeros(2, 50, 4, 80)
    numbers = to_bytes(q, keys, None, 0.5)
    scorer = module.ByteScorer(numbers)
    assert (scorer.num_groups, scorer.queries.shape[2], scorer.width(33)) == (50, 300, 64)
    settings = Choosing((8, 64, 1), 0.5, 3, 2, 10, 610)
    scores, best_scores = torch.zeros(2, 200, 64), torch.zeros(2, 200, 8)
    scorer.score(settings, 100, scores, best_scores)
    for (kernel, grid, given, constants), (first, heads) in zip(launches, ((0, 4), (4, 2))):
        # 2 tiles of 128 shares and one segment of two blocks of 32 groups, of two sequences.
        assert kernel is module.score_bytes_hopper and grid == (4,)
        assert (constants["HEADS"], constants["MERGES"]) == (heads, first > 0)
        assert given.segments == ints(1, 2, 50) and given.rows == ints(first, 100, 200, 64, 64)
        assert given.shares == ints(5, 2, 610) and given.rule == ints(8, 64, 1)
        assert given.q_desc.shape == [2, 6, 300, 128]
        assert (constants["PARTS"], constants["BLOCK_D"]) == (4, 128)
        assert given.q_desc.block_shape == [1, 1, 64, 128]
        assert given.k_desc.block_shape == [1, 1, 128, 128]
    for blocks, row_tiles, segments in (
        (128, 32, 16),  # a chunk of 8,192 tokens behind 24,576: four items for each of 132 programs
        (30, 32, 8),  # of four blocks at least
        (512, 512, 4),  # of 128 at most
        (1, 8192, 1),
    ):
        assert module.segments_of(blocks, row_tiles, 132) == segments
    for index, g, dim, takes in (
        ("bits:2", 32, 128, True),
        ("bits:2", 32, 136, False),
        ("bits:2", 24, 64, False),
        ("pairs:2", 9, 64, False),
        ("parts:4:1", 8, 64, True),
        ("mean", 8, 64, False),
    ):
        assert module.takes(index_of(index), g, dim) == takes


def test_copies_by_the_accelerator_are_of_tensors_that_it_can_read():
    memory = pytest.importorskip("corecontext.ops.triton.tensor_memory", reason="no Gluon")
    x = torch.randn(2, 3, 5, 40).bfloat16()
    for same in (x, x[:, 1:], x[:, :, 1:4], x[:1, :, ::2], x.transpose(1, 2).contiguous().mT.mT):
        assert memory.aligned(same) is same
    for layout in (misaligned, odd_rows, every_second):
        copy = memory.aligned(layout(x))
        assert torch.equal(copy, x) and copy.is_contiguous() and copy.data_ptr() % 16 == 0
    wide = torch.zeros(2, 3, 4, 44).bfloat16()[..., :40]  # rows 88 bytes apart
    assert memory.aligned(wide) is not wide
    expanded = x[:, :1].expand(-1, 3, -1, -1)
    assert memory.aligned(expanded) is not expanded  # a step of 0 is none
    made = memory.descriptor(x, 64)
    assert made.shape == [2, 3, 5, 40] and made.strides == [600, 200, 40, 1]
    assert made.block_shape == [1, 1, 64, 64] and made.base is x
    made = memory.descriptor(x[:, 1:2], 8, 16)
    assert made.shape == [2, 1, 5, 40] and made.strides == [600, 16, 40, 1]
    assert made.block_shape == [1, 1, 8, 16]


def test_sums_for_hopper_take_a_small_share_of_the_memory(monkeypatch):
    module = pytest.importorskip("corecontext.ops.triton.attend.hopper_backward", reason="no Gluon")
    q, k = torch.zeros(30, 4, 10, 8).half(), torch.zeros(30, 10, 8).half()
    each = 4 * 10 * 8 * 4  # of a sequence, float32
    for least, count in ((0, 2), (3 * each, 3), (3 * each - 1, 2), (10**9, 30)):
        monkeypatch.setattr(module, "MIN_BYTES", least)
        assert module._sequences_at_once(q, k) == count
    # 1 / 26 of 4 x (queries and keys) in half precision.
    assert 4 * 30 * 5 * 160 // 26 // each == 2
    monkeypatch.setattr(module, "MIN_BYTES", 0)
    assert module._sequences_at_once(q[:3], k[:3]) == 1


@pytest.mark.usefixtures("default_device")
def test_fetch_takes_the_kernels_made_for_a_chip_where_they_take_it(monkeypatch):
    calls = []

    monkeypatch.setattr(chosen, "attend_raw", lambda *given: calls.append("anywhere"))
    chip = SimpleNamespace(takes=lambda q, spec: spec.softcap is None)
    call = fetched_call(1)
    capped = call._replace(spec=call.spec.replace(softcap=2.0))
    for takes, given, name in (
        (True, call, "union"),
        (False, call, "anywhere"),
        (True, capped, "anywhere"),
    ):
        union = SimpleNamespace(takes=lambda call, takes=takes: takes)
        union.attend = lambda *given: calls.append("union")
        monkeypatch.setattr(best, "hopper_forward", chip)
        monkeypatch.setattr(best, "hopper_union", union, raising=False)
        best.attend_raw(given, given.marks(), None, None)
        assert calls.pop() == name and not calls
    monkeypatch.setattr(best, "hopper_forward", None)
    best.attend_raw(call, call.marks(), None, None)
    assert calls == ["anywhere"]

    def gradients(spec: Spec, has_chip: bool = True) -> Any:
        young = SimpleNamespace(takes=chip.takes, gradients=lambda *given: given[-1])
        monkeypatch.setattr(best, "hopper_backward", young if has_chip else None)
        arguments = (None, call.tokens, None, call.cores, spec, None, call.choice)
        return best.gradients(*arguments)

    assert gradients(call.spec) is call.choice
    assert gradients(call.spec, has_chip=False) is None
    assert gradients(capped.spec) is None


class _OneChip:
    """Kernels that say they take every call, and must not get one."""

    @staticmethod
    def takes(*args: Any) -> bool:
        return True

    @staticmethod
    def attend_list(*args: Any, **options: Any) -> None:
        raise AssertionError("a kernel made for one chip was called")

    gradients = attend_list


def test_first_tokens_kept_raw_take_the_kernels_made_for_a_chip_too(monkeypatch):
    inputs = make_inputs(40, num_heads=4, num_kv_heads=2, head_dim=16, device=DEVICE)
    settings = {"group_size": 4, "window_size": 7, "rotary": Rotary.from_theta(1e4, 16, DEVICE)}
    run = functools.partial(cca_attention, backend="triton", return_lse=True)
    with monkeypatch.context() as patched:
        patched.setattr(best, "hopper_forward", _OneChip)
        with pytest.raises(AssertionError, match="made for one chip"):
            run(*inputs[:3], sink_size=6, **settings)
    assert_accurate(run, inputs, sink_size=6, **settings)


def test_a_triton_that_cannot_compile_for_hopper_has_the_other_kernels(monkeypatch):
    """Triton 3.5 imports what the kernels need, and then has other arguments."""

    def refuse(*args, **options):
        raise triton.CompilationError(
            None, ast.parse("f()").body[0], "f() missing 1 required positional argument: 'x'"
        )

    young = SimpleNamespace(takes=lambda *args: True, attend_list=refuse, gradients=refuse)
    q, k, v = (
        torch.randn(1, heads, 45, 40, device=DEVICE, requires_grad=True) for heads in (2, 1, 1)
    )
    found = []
    for kernels in (None, (young, None), (None, young)):
        monkeypatch.setattr(best, "hopper_forward", kernels and kernels[0])
        monkeypatch.setattr(best, "hopper_backward", kernels and kernels[1])
        with (
            pytest.warns(UserWarning, match="cannot compile .*It said: f.. missing 1")
            if kernels
            else (contextlib.nullcontext())
        ):
            out = cca_attention(
                q, k, v, group_size=7, window_size=10, core_position="token", backend="triton"
            )
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert best.hopper_forward is None and best.hopper_backward is None
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other))


def test_pooling_compiles_as_one_graph_with_its_gradients():
    x = make_inputs(21, head_dim=16, device=DEVICE)
    rotary = Rotary.from_theta(100.0, 16, DEVICE)
    options = {"group_size": 4, "rotary": rotary}

    def run(backend, q, k, v):
        return pool_core_tokens(q, k, v, backend=backend, **options)

    compiled = torch.compile(
        functools.partial(run, "triton"), fullgraph=True, backend="aot_eager", dynamic=False
    )
    found = []
    for function in (compiled, functools.partial(run, "triton"), functools.partial(run, "packed")):
        leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        cores = function(*leaves)
        loss = sum((core * core).sum() for core in cores)
        found.append([*cores, *torch.autograd.grad(loss, leaves)])
    for compiled_result, eager, packed in zip(*found):
        assert torch.equal(compiled_result, eager)
        torch.testing.assert_close(eager, packed, rtol=1e-4, atol=1e-4)
