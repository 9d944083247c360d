"""The first tokens kept raw (sink_size): the rule by definition, the laws, and the ways it must not
change."""

import functools
import inspect
import itertools
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from budgets import assert_accurate, effective_map, make_inputs, results_and_gradients

from benchmarks import floor
from corecontext import CCAConfig, Rotary, cca_attention, cost, pool_core_tokens
from corecontext import visibility as vis
from corecontext.cache import CompactLayer
from corecontext.ops import sinks

pytestmark = pytest.mark.usefixtures("default_device")
ROTARY = Rotary.from_theta(10_000.0, 16)
BACKENDS = ("reference", "packed")
#        g  s  sink_size; the last ones: more than the sequence, groups of one token, rounded up
SIZES = [(4, 7, 8), (3, 1, 6), (16, 20, 16), (2, 3, 60), (1, 5, 3), (4, 9, 5)]
OPTIONS = [
    {},
    {"core_position": "token"},
    {"softcap": 2.0},
]


def seen_by(position: int, g: int, s: int, n: int) -> tuple[list[int], list[int]]:
    """Core tokens and raw tokens that a query sees, by definition: a group whose tokens are all
    older than the s nearest ones is compressed, unless it is one of the first n / g."""
    groups = [c for c in range(position // g + 1) if (c + 1) * g - 1 <= position - s]
    cores = [c for c in groups if c >= n // g]
    return cores, [i for i in range(position + 1) if i // g not in cores]


def dense(q, k, v, *, group_size, window_size, sink_size, softcap=None, **options):
    """One softmax under a mask of that definition; core tokens pooled from all groups."""
    length, repeats = q.shape[2], q.shape[1] // k.shape[1]
    n = -(-sink_size // group_size) * group_size
    core_k, core_v = pool_core_tokens(
        q, k, v, group_size=group_size, softcap=softcap, backend="reference", **options
    )
    mask = torch.zeros(length, core_k.shape[2] + length, dtype=torch.bool)
    for t in range(length):
        cores, raw = seen_by(t, group_size, window_size, n)
        mask[t, cores] = True
        mask[t, [core_k.shape[2] + i for i in raw]] = True
    keys, values = (
        torch.cat(
            (
                core.repeat_interleave(q.shape[1] // core.shape[1], 1),
                x.repeat_interleave(repeats, 1),
            ),
            2,
        )
        for core, x in ((core_k, k), (core_v, v))
    )
    scores = q @ keys.mT * q.shape[3] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("g, s", [*product(range(1, 6), (1, 2, 5, 9))])
def test_the_integer_rules_are_the_definition(g, s):
    for sink_size in (0, 1, g, 2 * g + 1, 40):
        n = vis.num_sinks(sink_size, g)
        assert n % g == 0 and sink_size <= n < sink_size + g
        pairs = 0
        for t in range(40):
            assert vis.num_scores(t, g, s, n) == pairs
            assert (
                cost.attention_flops(t, 3, 8, group_size=g, window_size=s, sinks=n)
                == 4 * 3 * 8 * pairs
            )
            cores, raw = seen_by(t, g, s, n)
            groups = vis.num_visible_cores(t, g, s)
            assert vis.num_far_entries(groups, g, n) == len(cores) + sum(
                i < groups * g for i in raw
            )
            assert floor.decode_bytes(
                t, 2, 8, 4, group_size=g, window_size=s, sinks=n
            ) == 2 * 2 * 8 * 4 * (len(cores) + len(raw))
            assert cost.pooling_flops(t, 2, 2, 8, group_size=g, sinks=n) == (
                0 if g == 1 else max(0, t // g - n // g) * g * 8 * 12
            )
            pairs += len(cores) + len(raw)
            full = not any(seen_by(u, g, s, n)[0] for u in range(t))
            assert (
                vis.is_full_attention(t, g, s, n)
                == (g == 1 or full)
                == (g == 1 or t <= n + s + g - 1)
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("g, s, sink_size", SIZES)
def test_rows_and_gradients_are_those_of_the_dense_mask(backend, option, g, s, sink_size):
    for length, with_lse in ((1, True), (9, False), (53, True)):
        x = make_inputs(
            length,
            dtype=torch.float64,
            batch_size=2,
            with_lse=with_lse,
            device=torch.get_default_device(),
        )
        settings = {
            "group_size": g,
            "window_size": s,
            "sink_size": sink_size,
            "rotary": ROTARY,
            **option,
        }
        expected = results_and_gradients(dense, x, **settings)
        got = results_and_gradients(
            functools.partial(cca_attention, backend=backend, return_lse=True), x, **settings
        )
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_keeps_the_budget_of_every_row(dtype):
    for length, (g, s, sink_size), option in ((157, (4, 7, 8), {}),):
        x = make_inputs(length, dtype=dtype, transposed=True, device=torch.get_default_device())
        assert_accurate(
            functools.partial(cca_attention, backend="packed", return_lse=True),
            x,
            group_size=g,
            window_size=s,
            sink_size=sink_size,
            rotary=ROTARY,
            **option,
        )


def test_full_attention_up_to_its_exact_length():
    """Full attention as long as the tokens after the first n have it by themselves: L <= n + s + g
    - 1; bit for bit."""
    for g, s, n in ((4, 7, 8), (3, 1, 6), (5, 2, 10)):
        last = n + s + g - 1
        x = make_inputs(last + 1, dtype=torch.float32, device=torch.get_default_device())
        run = functools.partial(
            cca_attention, group_size=g, window_size=s, sink_size=n, rotary=ROTARY
        )
        full = F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=True)
        part = [y[:, :, :last] for y in x[:3]]
        assert torch.equal(
            run(*part), F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
        )
        out = run(x.q, x.k, x.v)
        torch.testing.assert_close(out[:, :, :last], full[:, :, :last], rtol=0, atol=1e-6)
        assert (out[:, :, last] - full[:, :, last]).abs().max() > 1e-4
        assert torch.equal(run(x.q, x.k, x.v, sink_size=n + 1), full)  # one more group


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_one_token_are_full_attention(backend):
    x = make_inputs(29, dtype=torch.float64, device=torch.get_default_device())
    full = F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=True)
    settings = {"group_size": 1, "window_size": 3, "sink_size": 5, "rotary": ROTARY}
    out = cca_attention(x.q, x.k, x.v, backend=backend, **settings)
    torch.testing.assert_close(out, full, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_count_every_token_once(backend):
    x = make_inputs(53, dtype=torch.float64, device=torch.get_default_device())
    for g, s, n in ((4, 7, 8), (3, 1, 6)):
        weights = effective_map(
            torch.zeros_like(x.q),
            x.k,
            backend=backend,
            group_size=g,
            window_size=s,
            sink_size=n,
            rotary=ROTARY,
        )
        expected = torch.zeros(53, 53, dtype=torch.float64)
        for t in range(53):
            cores, raw = seen_by(t, g, s, n)
            expected[t, raw] = 1 / (len(cores) + len(raw))
            for c in cores:
                expected[t, c * g : (c + 1) * g] = 1 / (g * (len(cores) + len(raw)))
        torch.testing.assert_close(weights, expected.expand_as(weights), rtol=0, atol=1e-14)


@pytest.mark.parametrize("g, s, n", [(4, 7, 8), (3, 1, 6)])
def test_the_past_is_bit_identical_under_any_future(g, s, n):
    x = make_inputs(90, device=torch.get_default_device())
    run = functools.partial(
        cca_attention, group_size=g, window_size=s, sink_size=n, rotary=ROTARY, return_lse=True
    )
    for backend, future in (("packed", 3.0), ("reference", torch.nan)):
        clean = run(x.q, x.k, x.v, backend=backend)
        for t in (0, n - 1, n, n + s, 60, 88):
            changed = [y.clone() for y in x[:3]]
            for y in changed:
                y[:, :, t + 1 :] = future
            for a, b in zip(run(*changed, backend=backend), clean):
                assert torch.equal(a[:, :, : t + 1], b[:, :, : t + 1]), f"token {t} saw its future"


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_rows_and_packed_documents_have_their_own_first_tokens(backend):
    x = make_inputs(60, batch_size=3, dtype=torch.float64, device=torch.get_default_device())
    run = functools.partial(
        cca_attention, group_size=4, window_size=6, sink_size=8, rotary=ROTARY, backend=backend
    )
    mask, spans = torch.ones(3, 60, dtype=torch.long), ((0, 60), (7, 60), (0, 41))
    for row, (start, end) in enumerate(spans):
        mask[row, :start], mask[row, end:] = 0, 0
    leaves = [y.clone().requires_grad_() for y in x[:3]]
    out = run(*leaves, attention_mask=mask)
    grads = torch.autograd.grad((out * x.grad_out).sum(), leaves)
    for row, (start, end) in enumerate(spans):
        alone = [y[row : row + 1, :, start:end].clone().requires_grad_() for y in x[:3]]
        single = run(*alone)
        torch.testing.assert_close(out[row : row + 1, :, start:end], single, rtol=0, atol=1e-13)
        for whole, part in zip(
            grads,
            torch.autograd.grad((single * x.grad_out[row : row + 1, :, start:end]).sum(), alone),
        ):
            torch.testing.assert_close(whole[row : row + 1, :, start:end], part, rtol=0, atol=1e-13)
    edges = (0, 5, 32, 60)  # the first document is shorter than the first tokens
    packed = run(*(y[:1] for y in x[:3]), cu_seqlens=torch.tensor(edges))
    for start, end in itertools.pairwise(edges):
        torch.testing.assert_close(
            packed[:, :, start:end], run(*(y[:1, :, start:end] for y in x[:3])), rtol=0, atol=1e-13
        )


def test_without_it_nothing_of_it_runs(monkeypatch):
    """sink_size=0 is the paper's rule: the same calls, so the same bits, launches and copies."""

    def never(*args, **options):
        raise AssertionError("the first tokens were attended to")

    monkeypatch.setattr(sinks, "attend", never)
    monkeypatch.setattr(sinks, "attend_backward", never)
    x = make_inputs(60, device=torch.get_default_device())
    leaves = [y.clone().requires_grad_() for y in x[:3]]
    out = cca_attention(*leaves, group_size=4, window_size=6, rotary=ROTARY)
    torch.autograd.grad(out.sum(), leaves)
    layer = CompactLayer(CCAConfig.paper(4, 6), ROTARY)
    layer.attend(*(y[:, :, :40] for y in x[:3]))
    layer.attend(*(y[:, :, 40:41] for y in x[:3]))
    with pytest.raises(AssertionError, match="the first tokens"):
        cca_attention(*leaves, group_size=4, window_size=6, sink_size=8, rotary=ROTARY)
    assert inspect.signature(cca_attention).parameters["sink_size"].default == 0


def test_a_constant_number_of_groups_rounds_up_to_its_own_groups():
    x = make_inputs(50, dtype=torch.float64, device=torch.get_default_device())
    run = functools.partial(cca_attention, x.q, x.k, x.v, window_size=9, rotary=ROTARY)
    assert torch.equal(run(num_groups=10, sink_size=6), run(group_size=5, sink_size=10))
    config = CCAConfig.pooling(window_size=9, sink_size=5, layer_group_sizes=(4, 3))
    assert [
        vis.num_sinks(config.of_layer(i).sink_size, config.of_layer(i).group_size) for i in (0, 1)
    ] == [8, 6]


def test_compiled_as_one_operator():
    x = make_inputs(40, device=torch.get_default_device())
    leaves = [y.clone().requires_grad_() for y in x[:3]]

    def run(q, k, v):
        return cca_attention(q, k, v, group_size=4, window_size=6, sink_size=8, rotary=ROTARY)

    expected = run(*leaves)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(y, leaves, x.grad_out) for y in (out, expected))):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fixed", [None, 80])
def test_a_cache_of_first_tokens_can_always_be_cropped_back_to(fixed):
    """The first tokens never leave, so a prompt's beginning of at most n tokens needs no reading
    again."""
    config, x = (
        CCAConfig.pooling(4, 5, sink_size=12),
        make_inputs(70, batch_size=2, dtype=torch.float64, device=torch.get_default_device()),
    )
    expected = cca_attention(
        *x[:3],
        group_size=4,
        window_size=5,
        sink_size=12,
        core_mass=True,
        rotary=ROTARY,
        backend="reference",
    )
    layer = CompactLayer(config, ROTARY, max_length=fixed)
    for left in (12, 5, 1):
        layer.reset()
        layer.attend(*(-y[:, :, 0:left] for y in x[:3]))
        layer.crop(left)
        layer.attend(*(y[:, :, :60] for y in x[:3]))
        layer.crop(60 - left)
        out = [layer.attend(*(y[:, :, t : t + 1] for y in x[:3])) for t in range(left, 30)]
        out.append(layer.attend(*(y[:, :, 30:] for y in x[:3])))
        torch.testing.assert_close(torch.cat(out, 2), expected[:, :, left:], rtol=0, atol=1e-11)
        with pytest.raises(ValueError, match="crop must leave the window whole"):
            layer.crop(45)


@pytest.mark.parametrize(
    "value, error, message",
    [
        (-1, ValueError, "sink_size must be at least 0, got -1"),
        (True, TypeError, "sink_size must be an integer"),
        (1.5, TypeError, "sink_size must be an integer, got 1.5"),
    ],
)
def test_bad_sizes(value, error, message):
    with pytest.raises(error, match=message):
        CCAConfig.pooling(sink_size=value)
    x = make_inputs(5, device=torch.get_default_device())
    with pytest.raises(error, match=message):
        cca_attention(x.q, x.k, x.v, rotary=ROTARY, sink_size=value)


def test_settings_saved_before_it_existed_are_read():
    old = {k: v for k, v in CCAConfig.paper(4, 9).to_dict().items() if k != "sink_size"}
    assert CCAConfig.from_dict(old) == CCAConfig.paper(4, 9)
    layer, other = (CompactLayer(CCAConfig.paper(4, 9), ROTARY) for _ in "ab")
    layer.attend(*(y[:, :, :20] for y in make_inputs(20, device=torch.get_default_device())[:3]))
    other.load_state_dict({**layer.state_dict(), "config": old})
    assert other.seq_len == 20
