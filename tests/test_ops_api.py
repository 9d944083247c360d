"""The public operators: every message, the choice of a backend, compilation, fresh memory, and
merging."""

import functools
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from budgets import make_inputs, results_and_gradients

from corecontext.ops import capability as chips
from corecontext.ops import partial
from corecontext.ops.api import TRITON_DTYPES, cca_attention, choose_backend, pool_core_tokens
from corecontext.ops.autograd import cca_attention_backward_op, cca_attention_op
from corecontext.ops.merge import merge
from corecontext.ops.packed import _interior_mask
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Spec

ROTARY = Rotary.from_theta(10000.0, 16)
X = torch.zeros(2, 4, 6, 16)
KV = torch.zeros(2, 2, 6, 16)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


SHAPE_ERRORS = [
    (([1], KV, KV), TypeError, "q must be a tensor, got list."),
    ((X[0], KV, KV), ValueError, "q must be [B, heads, L, D], got [4, 6, 16]."),
    ((X.int(), KV, KV), TypeError, "q must be float32, bfloat16, float16 or float64, got torch.in"),
    ((X, KV, KV[:, :, :5]), ValueError, "v must have the shape of k, [2, 2, 6, 16], got [2, 2, 5"),
    (
        (X.half(), KV, KV),
        TypeError,
        "q, k and v must share one dtype and device, got torch.float16",
    ),
    (
        (X[:, :, -1:], KV, KV),
        ValueError,
        "k must match q in batch, length and head size: q is [2, ",
    ),
    ((X[:, :3], KV, KV), ValueError, "the KV heads must divide the query heads, got 2 and 3."),
    (
        (X, KV[:, :0], KV[:, :0]),
        ValueError,
        "the KV heads must divide the query heads, got 0 and 4",
    ),
    (
        (X[..., :5], KV[..., :5], KV[..., :5]),
        ValueError,
        "head_dim must be even and at most 512, g",
    ),
    (
        (X.to("meta"), KV, KV),
        ValueError,
        "q must hold numbers, got a meta tensor. Load the weights",
    ),
]
NUMBER = "Use None for 1 / sqrt(D)."
SETTING_ERRORS = [
    ({"rotary": None}, ValueError, "rotary must be given for core_position='middle', got None. Pa"),
    ({"rotary": Rotary(torch.ones(9))}, ValueError, "rotary must rotate at most head_dim 16 dimen"),
    ({"group_size": 0}, ValueError, "group_size must be at least 1, got 0."),
    ({"core_position": "end"}, ValueError, "core_position must be one of 'middle', 'token', got '"),
    ({"rotary": ROTARY.inv_freq}, TypeError, "rotary must be a corecontext.ops.rotary.Rotary, got"),
    ({"softcap": 0.0}, ValueError, "softcap must be above 0, got 0.0. Use None for none."),
    ({"softcap": float("inf")}, ValueError, "softcap must be above 0 and finite, got inf. Use Non"),
    ({"scale": 0.0}, ValueError, f"scale must be above 0, got 0.0. {NUMBER}"),
    ({"scale": float("nan")}, ValueError, f"scale must be above 0, got nan. {NUMBER}"),
    ({"scale": "0.1"}, TypeError, f"scale must be a number, got '0.1'. {NUMBER}"),
    ({"scale": -0.5}, ValueError, f"scale must be above 0, got -0.5. {NUMBER}"),
    ({"backend": "tritn"}, ValueError, "backend must be one of 'auto', 'reference', 'packed', 'tr"),
]
HOLE = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]])
RESTARTS = torch.tensor([[0, 1, 0, 1, 2, 3]])
POSITIONS = "position_ids must be [1 or B, L] with B = 2, L = 6, got [1, 5]."
CALL_ERRORS = [
    ({"window_size": 0}, ValueError, "window_size must be at least 1 (a query sees itself), got 0"),
    ({"num_groups": 0}, ValueError, "num_groups must be at least 1, got 0."),
    ({"attention_mask": [[1] * 6] * 2}, TypeError, "attention_mask must be a tensor, got list."),
    ({"attention_mask": -1e9 * ones(2, 6).float()}, ValueError, "attention_mask must hold 1 for "),
    ({"attention_mask": ones(2, 5)}, ValueError, "attention_mask must be [B, L] = [2, 6], got [2,"),
    ({"attention_mask": HOLE}, ValueError, "attention_mask must have its padding at the ends of e"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "cu_seqlens must come with a batch of one "),
    ({"position_ids": RESTARTS[:, :5]}, ValueError, POSITIONS),
    ({"position_ids": torch.arange(5)[None]}, ValueError, POSITIONS),
    (
        {"position_ids": RESTARTS, "attention_mask": ones(2, 6)},
        ValueError,
        "attention_mask, cu_seqlens and position_ids must not be given together: padding or ",
    ),
]


@pytest.mark.parametrize(
    "tensors, error, message", SHAPE_ERRORS, ids=[case[2][:40] for case in SHAPE_ERRORS]
)
@pytest.mark.parametrize("operator", [cca_attention, pool_core_tokens])
def test_messages_about_tensors(operator, tensors, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        operator(*tensors, rotary=ROTARY)


@pytest.mark.parametrize(
    "settings, error, message", SETTING_ERRORS, ids=[case[2][:40] for case in SETTING_ERRORS]
)
@pytest.mark.parametrize("operator", [cca_attention, pool_core_tokens])
def test_messages_about_settings(operator, settings, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        operator(X, KV, KV, **{"rotary": ROTARY, **settings})


@pytest.mark.parametrize("backend", ["reference", "packed"])
@pytest.mark.parametrize(
    "settings, error, message", CALL_ERRORS, ids=[case[2][:40] for case in CALL_ERRORS]
)
def test_messages_about_a_call(backend, settings, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        cca_attention(X, KV, KV, rotary=ROTARY, backend=backend, **settings)


@pytest.mark.parametrize("edges", [[0, 5], [1, 6], [0, 4, 3, 6], [6]])
def test_message_about_document_edges(edges):
    with pytest.raises(
        ValueError, match=re.escape(f"cu_seqlens must rise from 0 to the length 6, got {edges}.")
    ):
        cca_attention(X[:1], KV[:1], KV[:1], rotary=ROTARY, cu_seqlens=torch.tensor(edges))


@pytest.mark.parametrize(
    "theta, head_dim, message",
    [
        (0.0, 16, "theta must be finite and above 0, got 0.0. Take the model's rope_theta."),
        (
            float("nan"),
            16,
            "theta must be finite and above 0, got nan. Take the model's rope_theta.",
        ),
        (10000.0, 15, "head_dim must be even and at least 2, got 15."),
    ],
)
def test_messages_about_a_rotation(theta, head_dim, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Rotary.from_theta(theta, head_dim)


def test_unknown_keywords_are_errors():
    with pytest.raises(TypeError, match="chunk_size"):
        cca_attention(X, KV, KV, rotary=ROTARY, chunk_size=3)


def test_choice_of_a_backend_never_falls_back_from_an_explicit_one():
    assert choose_backend("auto", X) == choose_backend("packed", X) == "packed"
    meta = X.to("meta")
    assert (
        choose_backend("auto", meta)
        == choose_backend("reference", meta)
        == choose_backend("reference", X)
    )
    message = (
        "backend 'packed' cannot run this call: device 'meta' is not one of cpu, cuda, mps, xpu. "
        "Use backend='reference'."
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        choose_backend("packed", meta)


@pytest.mark.parametrize("backend", ["reference", "packed"])
def test_sizes_that_hold_nothing(device, backend):
    rotary = Rotary.from_theta(10000.0, 16, device)
    for batch_size, length in ((1, 0), (0, 40), (0, 0)):
        x = make_inputs(length, batch_size=batch_size, device=device, dtype=torch.bfloat16)
        for mask in (None, torch.ones(batch_size, length, device=device)):
            out, lse = cca_attention(
                x.q,
                x.k,
                x.v,
                rotary=rotary,
                group_size=4,
                window_size=5,
                backend=backend,
                attention_mask=mask,
                return_lse=True,
            )
            assert out.shape == x.q.shape
            assert lse.shape == x.q.shape[:-1]
            assert lse.dtype == torch.float32
        leaves = [y.requires_grad_() for y in x[:3]]  # a process without tokens calls backward, too
        out, lse = cca_attention(*leaves, rotary=rotary, backend=backend, return_lse=True)
        assert [y.shape for y in torch.autograd.grad(out.sum() + lse.sum(), leaves)] == [
            y.shape for y in leaves
        ]
    x = make_inputs(3, device=device)
    core_k, core_v = pool_core_tokens(x.q, x.k, x.v, rotary=rotary, group_size=4, backend=backend)
    assert core_k.shape == core_v.shape == (1, 2, 0, 16)


def test_the_smallest_and_largest_heads_are_taken(device):
    for head_dim in (2, 512):
        x = make_inputs(7, head_dim=head_dim, device=device)
        rotary = Rotary.from_theta(10000.0, head_dim, device)
        assert cca_attention(*x[:3], rotary=rotary, group_size=2, window_size=1).shape == x.q.shape
        wide = Rotary.from_theta(10000.0, head_dim + 2, device)
        for operator in (cca_attention, pool_core_tokens):
            with pytest.raises(ValueError, match=f"must rotate at most head_dim {head_dim} dim"):
                operator(*x[:3], rotary=wide, group_size=2)
    x = make_inputs(3, head_dim=514, device=device)
    with pytest.raises(ValueError, match="head_dim must be even and at most 512, got 514"):
        cca_attention(*x[:3], core_position="token")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["reference", "packed"])
def test_dtypes_of_results(device, dtype, backend):
    x = make_inputs(20, dtype=dtype, device=device)
    settings = {
        "rotary": Rotary.from_theta(10000.0, 16, device),
        "group_size": 3,
        "backend": backend,
    }
    out, lse = cca_attention(x.q, x.k, x.v, window_size=5, return_lse=True, **settings)
    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    assert {core.dtype for core in pool_core_tokens(x.q, x.k, x.v, **settings)} == {dtype}


def test_two_tokens_are_two_documents_where_positions_begin_again(device):
    q, k, v = torch.randn(3, 1, 2, 2, 4, device=device).unbind()
    positions = torch.zeros(1, 2, dtype=torch.long, device=device)
    settings = {"group_size": 2, "window_size": 2, "core_position": "token"}
    out = cca_attention(q, k, v, position_ids=positions, **settings)
    torch.testing.assert_close(out, v)  # each sees itself alone


def test_position_ids_that_only_rise_are_one_document(device):
    x, rotary = make_inputs(40, batch_size=2, device=device), Rotary.from_theta(10000.0, 16, device)
    run = functools.partial(
        cca_attention, x.q, x.k, x.v, group_size=4, window_size=5, rotary=rotary
    )
    assert torch.equal(run(position_ids=torch.arange(7, 47, device=device)[None]), run())


def compiled_case(device):
    """A call and inputs for torch.compile: out and log-sum-exp of CCA between two elementwise
    operations."""
    rotary = Rotary.from_theta(10000.0, 16, device)

    def call(q, k, v):
        out, lse = cca_attention(
            q * 1.25,
            k,
            v,
            group_size=4,
            window_size=9,
            rotary=rotary,
            core_mass=True,
            return_lse=True,
        )
        return out.sin(), lse

    return call, make_inputs(61, device=device)


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiles_as_one_graph_forward_and_backward(device, compiler):
    if compiler == "inductor" and device.type == "cpu" and not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    call, inputs = compiled_case(device)
    eager = results_and_gradients(call, inputs)
    torch.compiler.reset()
    compiled = results_and_gradients(torch.compile(call, fullgraph=True, backend=compiler), inputs)
    for name, value in eager.items():
        torch.testing.assert_close(
            compiled[name],
            value,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def operator_arguments(device, **changes):
    """Arguments of the registered forward operator."""
    x = make_inputs(29, batch_size=2, device=device)
    arguments = {
        "q": x.q,
        "k": x.k,
        "v": x.v,
        "inv_freq": ROTARY.inv_freq.to(device),
        "attention_mask": None,
        "cu_seqlens": None,
        "position_ids": None,
        "group_size": 3,
        "window_size": 5,
        "scale": 0.25,
        "num_groups": None,
        "sink_size": 0,
        "softcap": None,
        "core_mass": False,
        "fetch_groups": 0,
        "fetch_index": "pairs:2",
        "fetch_share": 1,
        "interleaved": False,
        "backend": "packed",
        **changes,
    }
    return list(arguments.values()), x


@pytest.mark.parametrize("fetch_groups", [0, 2])
def test_registered_operators_describe_themselves_truly(device, fetch_groups):
    arguments, x = operator_arguments(device, fetch_groups=fetch_groups)
    for tensor in arguments[:4]:
        tensor.requires_grad_()
    torch.library.opcheck(cca_attention_op, arguments)
    arguments, x = operator_arguments(device, fetch_groups=fetch_groups)
    out, lse = cca_attention_op(*arguments)
    torch.library.opcheck(
        cca_attention_backward_op,
        [x.grad_out, x.grad_lse, *arguments[:3], out, lse, *arguments[3:]],
        test_utils=("test_schema", "test_faketensor"),
    )


def test_masks_made_in_inference_mode_serve_training(device):
    x, rotary = make_inputs(61, device=device), Rotary.from_theta(10000.0, 16, device)
    run = functools.partial(
        cca_attention, group_size=4, window_size=9, rotary=rotary, return_lse=True
    )
    first = results_and_gradients(run, x)
    _interior_mask.cache_clear()
    with torch.inference_mode():
        run(x.q, x.k, x.v)
    assert _interior_mask.cache_info().currsize == 1
    again = results_and_gradients(run, x)
    assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.fixture
def fresh_memory_is_nan():
    """Uninitialised memory holds NaN, so that a result which reads it shows it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("settings", [{}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("length", [1, 4, 12, 13, 61])
def test_nothing_reads_fresh_memory(device, fresh_memory_is_nan, settings, length):
    x = make_inputs(length, batch_size=2, device=device)
    mask = torch.ones(2, length, device=device)
    mask[0, : length // 3] = 0
    rotary = Rotary.from_theta(10000.0, 16, device)
    for extra in ({}, {"attention_mask": mask}):
        found = results_and_gradients(
            functools.partial(cca_attention, return_lse=True, **extra),
            x,
            group_size=4,
            window_size=9,
            rotary=rotary,
            **settings,
        )
        assert not any(bool(value.isnan().any()) for value in found.values())


def partial_softmaxes(parts: int, dtype: torch.dtype, shift: float = 0.0):
    """Scores of 5 queries to 12 keys dealt to some parts, and each part's output and
    log-sum-exp."""
    generator = torch.Generator().manual_seed(parts)
    scores = torch.randn(5, 12, generator=generator, dtype=torch.float64) + shift
    values = torch.randn(12, 8, generator=generator, dtype=torch.float64).to(dtype).double()
    owner = torch.randint(parts, (5, 12), generator=generator)  # each row deals its keys on its own
    scores[4] = -torch.inf  # a row without any key
    owner[3] = 0  # a row whose keys are all in one part
    outs, lses = [], []
    for part in range(parts):
        own = scores.masked_fill(owner != part, -torch.inf)
        lses.append(own.logsumexp(-1))
        outs.append((own.softmax(-1).nan_to_num(0.0) @ values).to(dtype))
    return outs, lses, scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("shift", [0.0, 2000.0, -2000.0])
def test_merge_is_one_softmax_over_all_keys(parts, shift):
    outs, lses, out, lse = partial_softmaxes(parts, torch.float64, shift)
    merged, merged_lse = merge(outs, lses)
    torch.testing.assert_close(merged, out, rtol=0, atol=1e-11)
    torch.testing.assert_close(merged_lse, lse, rtol=0, atol=1e-11)
    assert bool((merged[4] == 0).all()) and float(merged_lse[4]) == -torch.inf


def test_merge_keeps_a_part_that_has_every_key_bit_for_bit():
    outs, lses, _, _ = partial_softmaxes(3, torch.float32)
    merged, _ = merge(outs, [x.float() for x in lses])
    assert merged.dtype == torch.float32 and torch.equal(merged[3], outs[0][3])


@pytest.mark.parametrize("level", [0.0, 30.0, 3000.0, -3000.0])
def test_merge_of_equal_outputs_is_that_output_however_large_the_scores(level):
    """Weights that do not sum to one exactly would scale the row: by the rounding of a large
    log-sum-exp."""
    lses = [level + torch.randn(50, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    out, _ = merge([torch.ones(50, 4)] * 3, lses)
    torch.testing.assert_close(out, torch.ones(50, 4), rtol=0, atol=3e-7)


def test_merge_is_differentiable_where_a_part_has_no_key():
    outs, lses, _, _ = partial_softmaxes(3, torch.float64)
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    out, lse = merge(leaves[:3], leaves[3:])
    grads = torch.autograd.grad(out.square().sum() + lse[:4].square().sum(), leaves)
    assert not any(bool(grad.isnan().any()) for grad in grads)
    finite = [x.detach()[:3].clone().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(
        lambda *x: merge(list(x[:2]), list(x[2:])), (*finite[:2], *finite[3:5])
    )


@pytest.mark.parametrize("num_outs, num_lses", [(0, 0), (2, 1)])
def test_merge_message(num_outs, num_lses):
    message = (
        f"merge must get one lse per out and at least one of each, got {num_outs} and {num_lses}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        merge([torch.zeros(2, 3)] * num_outs, [torch.zeros(2)] * num_lses)


def test_the_log_sum_exp_merges_attention_over_more_keys(device):
    """CCA of a sequence, merged with attention of the same queries to other keys, is one softmax
    over both."""
    x, other = (
        make_inputs(37, dtype=torch.float64, device=device, num_kv_heads=4, seed=seed)
        for seed in (0, 1)
    )
    settings = {"group_size": 4, "window_size": 5, "rotary": Rotary.from_theta(10000.0, 16, device)}
    out, lse = cca_attention(x.q, x.k, x.v, return_lse=True, **settings)
    scores = x.q @ other.k.mT / 4
    merged, merged_lse = merge([out, scores.softmax(-1) @ other.v], [lse, scores.logsumexp(-1)])
    share = (lse - merged_lse).exp()[..., None]
    expected = share * out + (scores - merged_lse[..., None]).exp() @ other.v
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        share[..., 0] + (scores - merged_lse[..., None]).exp().sum(-1),
        torch.ones_like(lse),
        rtol=0,
        atol=1e-13,
    )


@pytest.mark.parametrize(
    "hip, capability, backend, kernel",
    [
        (None, (7, 5), "packed", "plain"),
        (None, (8, 6), "triton", "flash"),
        (None, (9, 0), "triton", "cudnn"),
        (None, (12, 0), "triton", "cudnn"),
        ("7.0", (9, 0), "triton", "flash"),
    ],
)
def test_every_generation_has_kernels_that_it_can_run(
    hip, capability, backend, kernel, monkeypatch
):
    """Triton and FlashAttention begin with Ampere; AMD's MI200 has the number of NVIDIA's
    Hopper."""
    hopper = pytest.importorskip("corecontext.ops.triton.attend.hopper_forward")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    chips._capability.cache_clear()
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 1, 2000, 64))
    try:
        assert choose_backend("auto", q) == backend
        single = SimpleNamespace(device=q.device, dtype=torch.float32, shape=q.shape)
        assert choose_backend("auto", single) == "packed"
        assert choose_backend("auto", single, TRITON_DTYPES) == backend
        assert partial._kernel(q, q, partial.Scoring(1.0)) == kernel
        takes = hopper.takes(q, Spec(16, 64, scale=1.0))
        assert takes == (capability == (9, 0) and hip is None)
        if backend != "triton":
            with pytest.raises(
                NotImplementedError, match="capability 7.5 is less than 8.0. Use backend=.packed"
            ):
                choose_backend("triton", q)
    finally:
        chips._capability.cache_clear()


def test_each_kernel_gets_the_parts_that_it_takes(monkeypatch):
    """On one GPU, at the bounds of dtype, head size, keys and masks."""
    capability = [(9, 0)]
    monkeypatch.setattr(partial, "nvidia_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)

    def kernel(dim=64, keys=2000, dtype=torch.bfloat16, kind="cuda", **scoring):
        q = SimpleNamespace(device=torch.device(kind), dtype=dtype, shape=(1, 2, 32, dim))
        k = SimpleNamespace(shape=(1, 2, keys, dim))
        return partial._kernel(q, k, partial.Scoring(1.0, **scoring))

    mask, masks = torch.zeros(32, 40), torch.zeros(1, 1, 32, 40)
    assert [kernel(dim) for dim in (8, 12, 128, 136, 256, 264)] == [
        *("cudnn", "plain", "cudnn", "flash", "flash", "plain")
    ]
    assert [kernel(keys=keys) for keys in (1, 1023, 1024)] == ["flash", "flash", "cudnn"]
    assert [kernel(dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64)] == [
        *("cudnn", "plain", "plain")
    ]
    assert kernel(softcap=3.0) == kernel(softcap=3.0, kind="cpu") == "plain"
    assert kernel(kind="cpu") == kernel(kind="cpu", mask=mask, dtype=torch.float64) == "cpu"
    assert kernel(key_bias=torch.zeros(1, 2, 40), kind="cpu") == kernel(mask=mask) == "plain"
    assert kernel(mask=masks) == "plain"
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel() == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
    for capability[0], found in (((8, 0), "flash"), (None, "flash"), ((7, 5), "plain")):
        assert kernel() == found


@pytest.mark.parametrize("option", [{}, {"sink_size": 3}], ids=str)
def test_plain_products_are_the_fused_kernels(device, option, monkeypatch):
    """What takes every device and head size, with causal and other masks."""
    x = make_inputs(61, batch_size=2, dtype=torch.float64, device=device, with_lse=False)
    settings = {"group_size": 4, "window_size": 9, "core_position": "token", **option}
    run = functools.partial(cca_attention, return_lse=True, backend="packed", **settings)
    expected = results_and_gradients(run, x)
    monkeypatch.setattr(partial, "_kernel", lambda *_: "plain")
    monkeypatch.setattr(partial, "_CHUNK_SCORES", 5 * 8 * 20)
    for name, value in results_and_gradients(run, x).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_the_kind_of_a_gpu_is_no_node_of_a_compiled_graph(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=8, minor=0)
        )
    device, targets = torch.device("cuda"), []

    def look(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    chips._capability.cache_clear()
    try:
        torch.compile(
            lambda x: x + chips.nvidia_capability(device)[0], fullgraph=True, backend=look
        )(torch.zeros(()))
        assert targets == ["<built-in function add>"]
    finally:
        torch._dynamo.reset()
        chips._capability.cache_clear()
