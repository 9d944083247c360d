"""The Triton kernels of fetch against dense float64: the choice of groups, attention to raw tokens
of the chosen and core tokens of the other groups, its gradients."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton")

from corecontext.ops import api
from corecontext.ops.api import cca_attention
from corecontext.ops.batch import complete_groups
from corecontext.ops.fetch import crossover, low_bits
from corecontext.ops.fetch.choice import Choice
from corecontext.ops.fetch.scoring import Queries, centre_of, group_keys, scores
from corecontext.ops.pooling import widen
from corecontext.ops.spec import Cores, Spec, Tokens, Upstream
from corecontext.ops.triton import fetch_kernels as fetch
from corecontext.ops.triton.attend import best as best_kernels
from corecontext.ops.triton.attend import chosen, marks, unions
from corecontext.ops.triton.attend.chosen import Call
from corecontext.ops.triton.attend.shares import Choosing
from corecontext.ops.triton.choose import byte_keys
from corecontext.ops.triton.choose import group_scores as fetch_scores
from corecontext.ops.triton.choose import select as fetch_choose
from corecontext.visibility import sees_core, sees_token

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
HOPPER = (
    GPU and torch.cuda.get_device_capability() == (9, 0) and best_kernels.hopper_forward is not None
)
WAYS = ("anywhere", "hopper") if HOPPER else ("anywhere",)
DTYPES = [torch.float32] + ([torch.float16, torch.bfloat16] if GPU else [])


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def with_extras(cases):
    """Each case as it is or with a softcap and masses, in turn; on a GPU both."""
    extras = ("", "softcap mass")
    if GPU:
        return list(itertools.product(cases, extras))
    return [(case, extras[number % 2]) for number, case in enumerate(cases)]


# The choice


def dense_scores(q, offsets, index, settings):
    """Scores of groups [N, C, M] in float64, -infinity for groups that a share does not see."""
    scores = torch.einsum("nrcd,nmpd->nrcmp", q.double(), index.double()) * settings.scale
    count, num_groups = q.shape[2], index.shape[1]
    seen = [settings.visible_groups(share, num_groups) for share in range(count)]
    numbers = torch.arange(num_groups, device=q.device)
    is_seen = numbers < torch.tensor(seen, device=q.device)[:, None]
    largest = (scores.amax(-1) + offsets.double()[..., None]).amax(1)
    return largest.masked_fill(~is_seen, -torch.inf)


def best(scores, k):
    """The k best groups of scores [..., M], ties to the lower number, ascending, then -1."""
    num_groups = scores.shape[-1]
    value, order = scores.sort(dim=-1, descending=True, stable=True)
    kept = torch.where(value == -torch.inf, num_groups, order)[..., :k].sort(-1).values
    kept = torch.where(kept == num_groups, -1, kept)
    return torch.nn.functional.pad(kept, (0, k - kept.shape[-1]), value=-1)


#        N  r  T   D   g  s  n / g M   p  k  share start
CHOICES = [
    (2, 4, 41, 16, 4, 9, 0, 10, 1, 3, 1, 0),
    (1, 3, 70, 20, 4, 9, 1, 14, 2, 3, 5, 0),
    (1, 7, 61, 16, 3, 5, 0, 16, 1, 4, 16, 0),
    (2, 1, 40, 80, 4, 5, 0, 20, 4, 30, 2, 37),
    (1, 5, 33, 16, 2, 5, 2, 20, 1, 2, 4, 11),
    (1, 3, 50, 16, 2, 5, 0, 25, 5, 3, 4, 11),
    (1, 2, 9, 16, 4, 9, 0, 0, 1, 3, 1, 0),
]


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_choice(case):
    n, r, t, d, g, s, sinks, m, p, k, share, start = case
    settings = Choosing((g, s, sinks), d**-0.5, k, share, start, start + t)
    q, index = normal(n, r, settings.num_shares, d), normal(n, m, p, d)
    offsets = normal(n, r, settings.num_shares, seed=1) - 1
    got = fetch_choose.choose(fetch_scores.Keys(q, offsets, index), settings)
    assert got.dtype == torch.int32
    assert got.tolist() == best(dense_scores(q, offsets, index, settings), k).tolist()


@pytest.mark.parametrize("k, p", [(3, 1), (20, 1), (3, 4)])
def test_choice_in_pieces(k, p, monkeypatch):
    """Scores of a few shares at a time, the best runs of groups first, and more groups than one
    program holds."""
    monkeypatch.setattr(fetch_choose, "_SCORE_BYTES", 2000)
    monkeypatch.setattr(fetch_scores, "_SEGMENT", 32)
    monkeypatch.setattr(fetch_choose, "_MOST_SELECTED", 32)
    for module in (fetch_choose, fetch_scores):
        monkeypatch.setattr(module, "RUN", 4)
    settings = Choosing((2, 5, 0), 0.25, k, 8, 11, 101)
    q, index = normal(1, 2, settings.num_shares, 16), normal(1, 48, p, 16)
    offsets = normal(1, 2, settings.num_shares)
    got = fetch_choose.choose(fetch_scores.Keys(q, offsets, index), settings)
    assert got.tolist() == best(dense_scores(q, offsets, index, settings), k).tolist()


def test_queries_and_keys_in_8_bits():
    """Their sizes, their order and what they stand for; a group behind the last one is zero."""
    q, keys, centre = normal(2, 3, 70, 48), normal(2, 19, 16, 48), normal(2, 48)
    torch.use_deterministic_algorithms(True)  # fills new memory with the largest numbers
    try:
        numbers = byte_keys.to_bytes(q, keys, centre, 0.3)
    finally:
        torch.use_deterministic_algorithms(False)
    rotated = q @ low_bits.rotation(48, q.dtype, q.device)
    got = numbers.queries * numbers.units[..., None]
    assert not got[..., 48:].any()
    error = (got[..., :48] - 0.3 * rotated).abs()
    assert bool((error <= 0.3 * rotated.abs().amax(-1, keepdim=True) / 253).all())
    offsets = 0.3 * (q * centre[:, None, None]).sum(-1)
    torch.testing.assert_close(numbers.offsets, offsets, rtol=0, atol=1e-5)
    stored = numbers.keys.view(2, 3, 16, byte_keys.RUN, -1).transpose(2, 3).reshape(2, 24, 16, -1)
    stored = stored[..., :48] * numbers.group_units[..., None, None]
    assert not stored[:, 19:].any()
    error = (stored[:, :19] - keys).abs()
    assert bool((error <= keys.abs().amax((2, 3), keepdim=True) / 253).all())


@pytest.mark.parametrize("name, g", [("pairs:2", 4), ("bits:1", 3), ("parts:3:4", 6)])
def test_index_keys_are_those_of_the_scores(name, g):
    """Their products with rotated queries, of each index in low bits."""
    spec = Spec(g, 9, 1.0, fetch_groups=1, fetch_index=name)
    tokens = Tokens(normal(2, 3, 1, 20), normal(2, 41, 20), normal(2, 41, 20))
    centre = centre_of(tokens.k, spec)
    keys = fetch._keys(tokens, 41 // g, spec, centre)
    queries = Queries.of(tokens.q, spec.index, centre)
    products = torch.einsum("nrtd,nmpd->nrtmp", queries.mapped, keys)
    got = products.amax(-1) + tokens.q @ centre[:, None, :, None]
    stored = spec.index.encode(group_keys(tokens.k, spec, 41 // g), centre)
    right = scores(stored, queries, spec)
    torch.testing.assert_close(got, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name, g, d", [("pairs:2", 4, 20), ("bits:1", 3, 16), ("parts:3:4", 6, 36), ("bits:2", 32, 128)]
)
def test_codes_are_those_of_the_index(name, g, d, dtype):
    """Of each index in low bits: a cache stores them, and steps read them."""
    spec = Spec(g, 9, 1.0, sink_size=4, fetch_groups=1, fetch_index=name)
    # Keys of a layer as a model has them: heads are neighbours, and tokens a row apart.
    keys = (3 * normal(7 * g + 5, 2, d) + normal(2, d)).to(dtype).transpose(0, 1)[:, 4 : 4 + 7 * g]
    keys = keys.unflatten(1, (7, g))
    centre = widen(keys[:, 0]).mean(1)
    for middle in (centre, None):
        codes, scales = fetch.encode(keys, middle, spec)
        right_codes, right_scales = spec.index.encode(keys, middle)
        assert codes.shape == right_codes.shape and scales.shape == right_scales.shape
        # Sums in another order may cross the border of two levels, nowhere else.
        assert float((codes != right_codes).double().mean()) <= 2e-3
        torch.testing.assert_close(scales, right_scales, rtol=2e-3, atol=0)


def test_equal_scores_go_to_the_lower_number():
    settings = Choosing((2, 3, 0), 0.25, 5, 1, 0, 40)
    index = normal(1, 4, 1, 16).repeat_interleave(5, 1)  # every key five times
    keys = fetch_scores.Keys(normal(1, 2, 40, 16), torch.zeros(1, 2, 40, device=DEVICE), index)
    got = fetch_choose.choose(keys, settings)
    for share, groups in enumerate(got[0].tolist()):
        visible = settings.visible_groups(share, 20)
        chosen = [group for group in groups if group >= 0]
        assert len(chosen) == min(visible, 5)
        for group in chosen:
            copies = range(group - group % 5, group)
            assert all(copy in chosen for copy in copies), (share, groups)


# Attention


def dense(inputs, choice, spec, q_start=0, mass=None):
    """out [N, r, T, D] and log-sum-exp [N, r, T] over first tokens, core tokens of groups not
    chosen, raw tokens of chosen groups and the window; differentiable."""
    q, k, v, core_k, core_v = inputs
    n, r, t, _ = q.shape
    g, s = spec.group_size, spec.window_size
    first = spec.sinks // g
    m = core_k.shape[2]
    position = torch.arange(q_start, q_start + t, device=q.device)
    token = torch.arange(k.shape[1], device=q.device)
    share = position // choice.share - q_start // choice.share
    chosen = torch.zeros(n, choice.groups.shape[1], m + 1, dtype=torch.bool, device=q.device)
    groups = torch.where(choice.groups < 0, m, choice.groups).long()
    chosen.scatter_(2, groups, True)
    chosen = chosen[:, share, :m]  # [N, T, M]
    core = torch.arange(m, device=q.device)
    far = sees_core(core + first, position[:, None], g, s)
    see_core = far & ~chosen
    group_of = (token // g - first).clamp(0, max(0, m - 1))
    fetched_raw = torch.zeros(n, t, k.shape[1], dtype=torch.bool, device=q.device)
    if m:
        in_group = (token // g >= first) & (token // g < first + m)
        fetched_raw = (far & chosen)[:, :, group_of] & in_group
    see_raw = sees_token(token, position[:, None], g, s, spec.sinks) | fetched_raw
    keys = torch.cat((core_k.expand(-1, r, -1, -1), k[:, None].expand(-1, r, -1, -1)), 2)
    values = torch.cat((core_v.expand(-1, r, -1, -1), v[:, None].expand(-1, r, -1, -1)), 2)
    scores = q @ keys.mT * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mass is not None:
        scores = scores + torch.nn.functional.pad(mass, (0, k.shape[1]))[:, :, None]
    seen = torch.cat((see_core, see_raw), 2)[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


#        N  r  T   D   g  s  sinks k share
CASES = [
    (2, 4, 23, 16, 4, 9, 0, 2, 1),
    (1, 3, 55, 20, 5, 7, 6, 2, 4),
    (1, 7, 36, 16, 3, 5, 0, 30, 3),
    (2, 1, 60, 64, 4, 6, 4, 4, 16),
    (1, 2, 67, 16, 16, 10, 0, 2, 5),
    (1, 2, 12, 16, 4, 9, 0, 3, 1),
]
if GPU:
    CASES += [(2, 4, 1500, 128, 16, 64, 16, 8, 16), (1, 3, 700, 80, 16, 100, 0, 5, 1)]
    # Several tiles of a union on Hopper that only half of its queries chose.
    CASES += [(1, 4, 1500, 128, 32, 160, 32, 24, 16), (1, 3, 1200, 64, 8, 40, 8, 70, 1)]


def case_of(case, dtype=torch.float32, extra="", q_start=0):
    """Tensors, choice, spec and masses of a case; the choice is that of random index scores."""
    n, r, t, d, g, s, sinks, k, share = case
    spec = Spec(g, s, d**-0.5, sink_size=sinks, softcap=4.0 if "softcap" in extra else None)
    total = q_start + t
    m = max(0, total // g - spec.sinks // g)
    shapes = ((n, r, t, d), *((n, total, d),) * 2, *((n, 1, m, d),) * 2)
    tensors = [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    settings = Choosing((g, s, spec.sinks // g), 1.0, k, share, q_start, total)
    scores = normal(n, settings.num_shares, m).abs()
    for number in range(settings.num_shares):
        scores[:, number, settings.visible_groups(number, m) :] = -torch.inf
    mass = normal(n, 1, m) if "mass" in extra else None
    return tensors, Choice(best(scores, k).to(torch.int32), share), spec, mass


def assert_rows(got, expected, dtype, message, least=1.0):
    """Every row is right; one bound for a tensor would hide a wrong row. Errors are those of rows
    as long as `least`, a number or one for each row."""
    assert got.shape == expected.shape, message
    got, expected = got.double(), expected.double()
    error = (got - expected).flatten(0, -2).norm(dim=-1)
    size = expected.flatten(0, -2).norm(dim=-1).clamp(min=least)
    assert bool((error <= ERROR[dtype] * size).all()), (message, float((error / size).max()))


@pytest.mark.parametrize("case, extra", with_extras(CASES), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(dtype, case, extra, monkeypatch):
    tensors, choice, spec, mass = case_of(case, dtype, extra)
    tokens, cores = Tokens(*tensors[:3]), Cores(*tensors[3:])
    wide = None if mass is None else mass.double()
    expected, expected_lse = dense([x.double() for x in tensors], choice, spec, mass=wide)
    for name in WAYS:
        if name == "anywhere":
            monkeypatch.setattr(best_kernels, "hopper_forward", None)
        out, lse = fetch.attend(tokens, cores, spec, mass, choice)
        monkeypatch.undo()
        assert_rows(out, expected, dtype, f"out, {name}")
        assert_rows(lse[..., None], expected_lse[..., None], dtype, f"lse, {name}")


@pytest.mark.parametrize("q_start", [1, 33])
def test_a_later_chunk(q_start):
    case = (1, 3, 21, 16, 4, 9, 4, 3, 8)
    tensors, choice, spec, _ = case_of(case, q_start=q_start)
    tokens, cores = Tokens(*tensors[:3], q_start), Cores(*tensors[3:])
    out, lse = fetch.attend(tokens, cores, spec, None, choice)
    expected, expected_lse = dense([x.double() for x in tensors], choice, spec, q_start)
    assert_rows(out, expected, torch.float32, "out")
    assert_rows(lse[..., None], expected_lse[..., None], torch.float32, "lse")


@pytest.mark.parametrize("case, extra", with_extras(CASES[:5]), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype, case, extra):
    tensors, choice, spec, mass = case_of(case, dtype, extra)
    out, lse = fetch.attend(Tokens(*tensors[:3]), Cores(*tensors[3:]), spec, mass, choice)
    grad_out, grad_lse = normal(*out.shape, seed=7).to(dtype), normal(*lse.shape, seed=8)
    leaves = [x.double().requires_grad_() for x in tensors]
    wide = None if mass is None else mass.double().requires_grad_()
    expected, expected_lse = dense(leaves, choice, spec, mass=wide)
    wanted = torch.autograd.grad(
        (expected * grad_out.double()).sum() + (expected_lse * grad_lse.double()).sum(),
        [*leaves, *([] if wide is None else [wide])],
    )
    got = fetch.attend_backward(
        Upstream(grad_out, grad_lse, out, lse),
        Tokens(*tensors[:3]),
        Cores(*tensors[3:]),
        spec,
        mass,
        choice,
    )
    # Where a query sees few tokens the gradients of its scores are small differences, from which
    # a product with the rounded output is taken. A key's gradient sums those of its queries.
    rounded = out.double().norm(dim=-1) * grad_out.double().norm(dim=-1) / out.shape[-1] ** 0.5
    least = {"q": rounded.flatten().clamp(min=1), "k": float(rounded.mean().clamp(min=1))}
    for name, grad, right in zip(("q", "k", "v", "core_k", "core_v"), got, wanted):
        assert_rows(grad, right, dtype, name, least.get(name, 1))
    if mass is not None:
        assert torch.allclose(got[5].double(), wanted[5], atol=20 * ERROR[dtype])


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("sinks, share", [(0, 1), (32, 1), (0, 2), (16, 16), (0, 64)])
def test_gradients_at_once(sinks, share, monkeypatch):
    """Those of the kernels for Hopper are those of the kernels that run everywhere."""
    case = (2, 4, 1205, 128, 16, 64, sinks, 9, share)
    tensors, choice, spec, mass = case_of(case, torch.bfloat16, "mass")
    spec = spec.replace(fetch_groups=9, fetch_index="mean", fetch_share=share)
    tokens, cores = Tokens(*tensors[:3]), Cores(*tensors[3:])
    groups = complete_groups(tokens, 16, sinks)
    out, lse = fetch.attend(tokens, cores, spec, mass, choice)
    grad_out, grad_lse = normal(*out.shape, seed=7).bfloat16(), normal(*lse.shape, seed=8)
    inputs = (Upstream(grad_out, grad_lse, out, lse), tokens, groups, cores, spec, mass)
    got = fetch.gradients(*inputs, choice)
    monkeypatch.setattr(best_kernels, "hopper_backward", None)
    right = fetch.gradients(*inputs, choice)
    for name, grad, expected in zip("qkv", got, right):
        assert_rows(grad, expected, torch.bfloat16, name)


@pytest.mark.parametrize("extra", ["", "mass"])
def test_marks_of_some_heads_at_a_time(extra, monkeypatch):
    tensors, choice, spec, mass = case_of(CASES[0], extra=extra)
    arguments = (Tokens(*tensors[:3]), Cores(*tensors[3:]), spec, mass, choice)
    whole = fetch.attend(*arguments)
    upstream = Upstream(normal(*whole[0].shape, seed=7), normal(*whole[1].shape, seed=8), *whole)
    whole += fetch.attend_backward(upstream, *arguments)
    monkeypatch.setattr(chosen, "_MARK_BYTES", 1)
    parts = (*fetch.attend(*arguments), *fetch.attend_backward(upstream, *arguments))
    for got, expected in zip(parts, whole, strict=True):
        assert (got is None and expected is None) or torch.equal(got, expected)


def test_marks_by_entry():
    """The same bits, where the gradients of core tokens read them."""
    chosen = torch.tensor([[[0, 5], [2, -1], [5, 40]]], dtype=torch.int32, device=DEVICE)
    words = marks.mark_entries(chosen, 2, 50, 4).words
    bits = (words[..., None] >> torch.arange(32, device=DEVICE)) & 1
    marked = {tuple(place) for place in bits.flatten(2).nonzero().tolist()}
    assert marked == {(0, 4, 0), (0, 9, 0), (0, 6, 1), (0, 9, 2), (0, 44, 2)}


@pytest.mark.parametrize(
    "share, start, count", [(1, 0, 50), (5, 13, 70), (16, 600, 64), (64, 64, 40)]
)
def test_unions(share, start, count):
    """Of 32 queries each: the groups of the first half, of both, of the second, and who chose and
    sees each."""
    g, s, sinks, k = 4, 9, 1, 3
    m = (start + count) // g - sinks
    settings = Choosing((g, s, sinks), 1.0, k, share, start, start + count)
    order = normal(2, settings.num_shares, m).argsort(-1)[..., :k].sort(-1).values
    kv = torch.zeros(2, 2, start + count, 16, device=DEVICE)
    tokens = Tokens(torch.zeros(2, 1, count, 16, device=DEVICE), *kv, start)
    cores = Cores(*torch.zeros(2, 2, 1, m, 16, device=DEVICE))
    spec = Spec(g, s, 1.0, sink_size=sinks * g)
    call = Call(tokens, cores, spec, None, Choice(order.int(), share))
    got = call.unions(call.marks())
    position = start + torch.arange(count, device=DEVICE)
    chosen = order[:, position // share - start // share, :, None] == torch.arange(m, device=DEVICE)
    see = torch.arange(m, device=DEVICE) < ((position + 1 - s).clamp(min=0) // g - sinks)[:, None]
    for n, item in itertools.product(range(2), range(got.ends.shape[1])):
        rows = (chosen.any(2) & see)[n, item * unions.QUERIES : (item + 1) * unions.QUERIES]
        first, second = rows[: unions.QUERIES // 2].any(0), rows[unions.QUERIES // 2 :].any(0)
        lists = [x.nonzero()[:, 0] for x in (first & ~second, first & second, second & ~first)]
        groups = torch.cat(lists)
        number = len(groups)
        assert got.ends[n, item].tolist() == list(itertools.accumulate(map(len, lists)))
        assert torch.equal(got.groups[n, item, :number], groups.int())
        bits = got.queries[n, item, :number, None] >> torch.arange(len(rows), device=DEVICE)
        assert torch.equal((bits & 1).bool().mT, rows[:, groups])


# The operator


@pytest.mark.parametrize(
    "index, share, window_size",
    [
        *(("mean", 8, 9), ("parts:2:4", 1, 9), ("oracle", 8, 9)),
        *(("bits:4", 4, 9), ("pairs:2", 1, 9), ("pairs:2", 8, 9)),
        ("bits:2", 1, 3),  # no token centres the keys
    ],
)
def test_operator(index, share, window_size):
    """The plug-in of the kernels: out, and for the default index gradients, are the reference's."""
    settings = {
        "group_size": 4,
        "window_size": window_size,
        "sink_size": 4,
        "core_position": "token",
        "fetch_groups": 2,
        "fetch_index": index,
        "fetch_share": share,
        "core_mass": True,
    }
    q, k, v = normal(1, 4, 33, 16), normal(1, 2, 33, 16, seed=1), normal(1, 2, 33, 16, seed=2)
    results = {}
    for name in ("reference", "triton"):
        leaves = [x.clone().requires_grad_(index == "pairs:2") for x in (q, k, v)]
        out = cca_attention(*leaves, backend=name, **settings)
        results[name] = [out.detach()]
        if out.requires_grad:
            results[name] += torch.autograd.grad(out.square().sum(), leaves)
    for got, right in zip(results["triton"], results["reference"]):
        assert_rows(got, right, torch.float32, "out, q, k or v")


def test_a_choice_that_is_given_is_fetched():
    """Of two rows and two KV heads, of any strides, by shares of 8 queries."""
    x = [normal(2, heads, 33, 16, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    rows = [[[-1, -1], [-1, -1], [0, -1], [0, n], [n, 4]] for n in (1, 1, 2, 2)]
    groups = torch.tensor(rows, dtype=torch.int32, device=DEVICE).mT.contiguous().mT
    settings = {"group_size": 4, "window_size": 9, "sink_size": 4, "core_position": "token"}
    found = [
        cca_attention(*x, backend=name, choice=Choice(groups, 8), **settings)
        for name in ("triton", "reference")
    ]
    assert_rows(*found, torch.float32, "out")


@pytest.mark.parametrize(
    "options",
    [
        {"fetch_index": "bits:4", "softcap": 2.0},
        {"fetch_index": "parts:2:4", "group_size": 3},
        {"fetch_index": "pairs:2", "group_size": 3},
    ],
    ids=str,
)
def test_softcaps_and_parts_that_differ_in_size(options):
    settings = {"group_size": 4, "window_size": 5, "core_position": "token", "fetch_groups": 3}
    q, k, v = 3 * normal(1, 4, 64, 16), normal(1, 2, 64, 16, seed=1), normal(1, 2, 64, 16, seed=2)
    got, right = (
        cca_attention(q, k, v, backend=name, **settings | options)
        for name in ("triton", "reference")
    )
    assert_rows(got, right, torch.float32, "out")


def test_full_attention_where_it_takes_less_time(monkeypatch):
    """Only where the operator chooses the kernels itself, and no choice of each query is asked for;
    lengths depend on index, sharing and gradients."""
    monkeypatch.setattr(api, "choose_backend", lambda backend, q: "triton")
    q, k, v = normal(1, 4, 33, 16), normal(1, 2, 33, 16, seed=1), normal(1, 2, 33, 16, seed=2)
    settings = {"group_size": 4, "window_size": 9, "core_position": "token", "fetch_groups": 2}

    def attends_to_all(index="mean", **more):
        out = cca_attention(q, k, v, fetch_index=index, **settings | more)
        return torch.equal(out, whole)

    whole = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    assert attends_to_all() and attends_to_all(fetch_share=8)
    compiled = torch.compile(cca_attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, fetch_index="bits:2", **settings), whole)
    assert not attends_to_all(fetch_share=1)
    assert not attends_to_all(fetch_share=8, backend="triton")
    assert not attends_to_all(backend="triton")
    assert not attends_to_all(fetch_share=8, fetch_groups=0)
    for shares, gradients, lengths in (
        (False, False, ((4, 32), (8, 33))),
        (True, False, ((4, 33), (8, 32))),
        (False, True, ((4, 33), (8, 32))),
    ):
        monkeypatch.setitem(crossover._LENGTHS, (shares, gradients), lengths)
    assert not attends_to_all() and attends_to_all("pairs:2") and attends_to_all("oracle")
    assert attends_to_all(fetch_share=8) and not attends_to_all("pairs:2", fetch_share=8)
    more = Spec(16, 64, 1.0, fetch_groups=128, fetch_index="mean")
    assert [crossover.is_full_faster(more, n, False) for n in (64, 65)] == [True, False]
    q.requires_grad_()
    assert attends_to_all() and not attends_to_all("pairs:2")
