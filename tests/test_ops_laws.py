"""The laws that the operators keep: exactly where arithmetic allows, else in float64 to its last
few digits."""

import functools
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from budgets import Inputs, effective_map, make_inputs, results_and_gradients

from corecontext.ops import merge, packed, partial
from corecontext.ops import pooling as pooling_chunks
from corecontext.ops.api import cca_attention, pool_core_tokens
from corecontext.ops.batch import once_for_all_layers
from corecontext.ops.rotary import Rotary
from corecontext.visibility import first_core_query, group_size_for, num_visible_cores

BACKENDS = ("reference", "packed")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = [(1, 5), (2, 1), (3, 7), (4, 8), (5, 12), (16, 33)]
OPTIONS = [
    {},
    {"core_position": "token"},
    {"softcap": 3.0},
]


def rotary_on(device, head_dim: int = 16) -> Rotary:
    return Rotary.from_theta(10000.0, head_dim, device)


def cut(x: Inputs, start: int, stop: int) -> Inputs:
    """The first row's tokens start .. stop-1 on their own."""
    return Inputs(*(None if y is None else y[:1, :, start:stop] for y in x))


def assert_equal(a: torch.Tensor, b: torch.Tensor, what: str = "results") -> None:
    """Bit for bit, or to one rounding of float32 on a GPU, whose kernels may split the same sum
    differently."""
    if a.device.type == "cpu":
        assert torch.equal(a, b), (
            f"{what} differ by {float((a.double() - b.double()).abs().max()):.3g}"
        )
    else:
        torch.testing.assert_close(
            a, b, rtol=1e-5 if a.dtype in (torch.float32, torch.float64) else 2e-2, atol=1e-5
        )


# Law 1: sequences without a visible core token, and groups of one token, are full attention.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_law_1_short_sequences_are_full_attention_bit_for_bit(
    device, dtype, group_size, window_size
):
    for seq_len in {1, window_size, first_core_query(group_size, window_size)}:
        x = make_inputs(seq_len, dtype=dtype, device=device, seed=seq_len)
        full = F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=True)
        settings = {
            "group_size": group_size,
            "window_size": window_size,
            "rotary": rotary_on(device),
        }
        assert torch.equal(cca_attention(x.q, x.k, x.v, **settings), full)
        # The operator instead of the shortcut.
        out, _ = cca_attention(x.q, x.k, x.v, return_lse=True, **settings)
        assert_equal(out, full)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS[:2], ids=str)
def test_law_1_groups_of_one_token_are_full_attention(device, backend, option):
    x = make_inputs(29, dtype=torch.float64, device=device)
    full = F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=True)
    settings = {"group_size": 1, "rotary": rotary_on(device), "backend": backend, **option}
    for window_size in (1, 3, 50):
        out = cca_attention(x.q, x.k, x.v, window_size=window_size, **settings)
        torch.testing.assert_close(out, full, rtol=0, atol=1e-13)
    for core, token in zip(pool_core_tokens(x.q, x.k, x.v, **settings), (x.k, x.v)):
        torch.testing.assert_close(core, token, rtol=0, atol=1e-13)


def test_law_1_the_first_core_query_is_the_first_to_differ(device):
    x = make_inputs(20, dtype=torch.float64, device=device)
    full = F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=True)
    out = cca_attention(x.q, x.k, x.v, group_size=4, window_size=7, rotary=rotary_on(device))
    same = [
        bool(torch.allclose(out[:, :, t], full[:, :, t], rtol=0, atol=1e-12)) for t in range(20)
    ]
    assert same == [t < first_core_query(4, 7) for t in range(20)]
    # A sequence whose last query is the first to see a core token.
    first = slice(0, first_core_query(4, 7) + 1)
    out = cca_attention(
        x.q[:, :, first],
        x.k[:, :, first],
        x.v[:, :, first],
        group_size=4,
        window_size=7,
        rotary=rotary_on(device),
    )
    assert not torch.allclose(out[:, :, -1], full[:, :, first][:, :, -1], rtol=0, atol=1e-6)


# Law 2: every token is covered once.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_law_2_the_effective_map_is_causal_positive_and_sums_to_one(
    device, backend, group_size, window_size
):
    x = make_inputs(53, dtype=torch.float64, device=device)
    weights = effective_map(
        x.q,
        x.k,
        backend=backend,
        group_size=group_size,
        window_size=window_size,
        rotary=rotary_on(device),
    )
    lower = torch.ones(53, 53, dtype=torch.bool, device=device).tril()
    assert bool((weights[..., lower] > 0).all()) and bool((weights[..., ~lower] == 0).all())
    torch.testing.assert_close(
        weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group_size, window_size", SIZES[1:])
def test_law_2_with_equal_scores_the_map_counts_every_token_once(
    device, backend, group_size, window_size
):
    """A token that were covered twice would still leave the sum at one, but not its own weight at 1
    / entries."""
    x = make_inputs(53, dtype=torch.float64, device=device)
    weights = effective_map(
        torch.zeros_like(x.q),
        x.k,
        backend=backend,
        group_size=group_size,
        window_size=window_size,
        rotary=rotary_on(device),
    )
    expected = torch.zeros(53, 53, dtype=torch.float64, device=device)
    for t in range(53):
        cores = num_visible_cores(t, group_size, window_size)
        entries = cores + t + 1 - cores * group_size
        expected[t, : cores * group_size] = 1 / (entries * group_size)
        expected[t, cores * group_size : t + 1] = 1 / entries
    torch.testing.assert_close(weights, expected.expand_as(weights), rtol=0, atol=1e-14)


def test_law_2_core_weights_are_spread_by_the_pooling_weights(device):
    """In the same shares for every query and every query head that see a core token."""
    x, g, s = make_inputs(40, dtype=torch.float64, device=device), 4, 7
    weights = effective_map(x.q, x.k, group_size=g, window_size=s, rotary=rotary_on(device))
    assert bool((weights > 0).any())
    for c in range(num_visible_cores(39, g, s)):
        seen = [t for t in range(40) if num_visible_cores(t, g, s) > c]
        group = weights[:, :, seen, c * g : (c + 1) * g].unflatten(1, (2, -1))
        shares = group / group.sum(-1, keepdim=True)  # [B, Hkv, r, queries, g]
        torch.testing.assert_close(shares, shares[:, :, :1, :1].expand_as(shares))
        assert shares[0, 0, 0, 0].std() > 0.01


# Law 3: the future leaves the past untouched.


@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_law_3_nan_in_the_future_of_the_reference(device, group_size, window_size):
    x, settings = (
        make_inputs(41, device=device),
        {
            "group_size": group_size,
            "window_size": window_size,
            "rotary": rotary_on(device),
            "backend": "reference",
        },
    )
    clean = cca_attention(x.q, x.k, x.v, **settings)
    for t in (0, 1, group_size, window_size, first_core_query(group_size, window_size), 39):
        poisoned = [y.clone() for y in (x.q, x.k, x.v)]
        for y in poisoned:
            y[:, :, t + 1 :] = torch.nan
        out = cca_attention(*poisoned, **settings)
        assert torch.equal(out[:, :, : t + 1], clean[:, :, : t + 1]), f"token {t} saw its future"
        assert bool(out[:, :, t + 1 :].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("group_size, window_size", [(2, 1), (3, 7), (16, 33)])
def test_law_3_the_past_is_bit_identical_under_any_finite_future(
    device, dtype, group_size, window_size
):
    x = make_inputs(157, dtype=dtype, device=device)
    huge = torch.finfo(dtype).max / 64
    run = functools.partial(
        cca_attention,
        group_size=group_size,
        window_size=window_size,
        rotary=rotary_on(device),
        backend="packed",
        return_lse=True,
    )
    clean = run(x.q, x.k, x.v)
    for t in (0, window_size, first_core_query(group_size, window_size), 100, 150):
        for future in (0.0, 5.0, huge):
            changed = [y.clone() for y in (x.q, x.k, x.v)]
            # Scores stay finite: a huge query meets small keys, and huge values only meet
            # weights.
            for y, value in zip(changed, (5.0, -min(future, 5.0), future)):
                y[:, :, t + 1 :] = value
            for name, a, b in zip(("out", "lse"), run(*changed), clean):
                assert torch.equal(a[:, :, : t + 1], b[:, :, : t + 1]), (
                    f"{name} of token {t} saw its future"
                )


def test_law_3_nan_beyond_the_block_leaves_packed_blocks_untouched(device):
    """Fused kernels multiply 0 x NaN inside a block; a NaN behind a query's block must still not
    reach it."""
    g, s, length = 4, 8, 1500
    x = make_inputs(length, device=device, num_heads=2, num_kv_heads=1)
    run = functools.partial(
        cca_attention, group_size=g, window_size=s, rotary=rotary_on(device), backend="packed"
    )
    clean = run(x.q, x.k, x.v)
    for y in (x.k, x.v):
        y[:, :, -1] = torch.nan
    out = run(x.q, x.k, x.v)
    assert bool(out[:, :, -1].isnan().all())
    assert torch.equal(out[:, :, : length - 520], clean[:, :, : length - 520])


def test_law_3_no_gradient_flows_from_the_past_to_the_future(device):
    for backend in BACKENDS:
        x, t = make_inputs(61, device=device, with_lse=False), 30
        x.grad_out[:, :, t + 1 :] = 0
        found = results_and_gradients(
            functools.partial(cca_attention, backend=backend, return_lse=True),
            x,
            group_size=3,
            window_size=7,
            rotary=rotary_on(device),
        )
        for name in ("grad_q", "grad_k", "grad_v"):
            assert bool((found[name][:, :, t + 1 :] == 0).all())
            assert bool((found[name][:, :, :t] != 0).any())


# Law 5: padding and packed documents.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_law_5_a_padded_row_gives_what_it_gives_alone(device, dtype, side):
    length, filled = 45, (45, 33, 1, 0, 17)
    x = make_inputs(length, batch_size=5, dtype=dtype, device=device)
    mask = torch.zeros(5, length, dtype=torch.int64, device=device)
    spans = [slice(length - n, length) if side == "left" else slice(0, n) for n in filled]
    for row, span in enumerate(spans):
        mask[row, span] = 1
        for y in x[:3]:  # padding may hold anything
            y[row, :, [i for i in range(length) if not mask[row, i]]] = torch.nan
    run = functools.partial(
        cca_attention, group_size=3, window_size=7, rotary=rotary_on(device), return_lse=True
    )
    for backend in BACKENDS:
        out, lse = run(x.q, x.k, x.v, attention_mask=mask, backend=backend)
        for row, span in enumerate(spans):
            alone, alone_lse = run(*(y[row : row + 1, :, span] for y in x[:3]), backend=backend)
            assert_equal(out[row : row + 1, :, span], alone, f"row {row}")
            assert_equal(lse[row : row + 1, :, span], alone_lse, f"row {row}")
        padded = ~mask.bool()[:, None].expand(-1, 4, -1)
        assert bool((out[padded] == 0).all()) and bool((lse[padded] == -torch.inf).all())


def test_law_5_padding_in_the_gradients(device):
    x = make_inputs(30, batch_size=2, dtype=torch.float64, device=device, with_lse=False)
    mask = torch.ones(2, 30, dtype=torch.bool, device=device)
    mask[0, :13] = False
    run = functools.partial(
        cca_attention, return_lse=True, group_size=3, window_size=5, rotary=rotary_on(device)
    )
    for backend in BACKENDS:
        found = results_and_gradients(
            functools.partial(run, backend=backend, attention_mask=mask), x
        )
        alone = results_and_gradients(functools.partial(run, backend=backend), cut(x, 13, 30))
        for name in ("grad_q", "grad_k", "grad_v"):
            assert_equal(found[name][:1, :, 13:], alone[name], name)
            assert bool((found[name][0, :, :13] == 0).all())


@pytest.mark.parametrize("how", ["cu_seqlens", "position_ids"])
@pytest.mark.parametrize("num_groups, with_lse", [(None, False), (3, True)])
def test_law_5_packed_documents_do_not_see_each_other(device, how, num_groups, with_lse):
    lengths = (20, 1, 13, 26)
    edges = torch.tensor([0, *lengths], device=device).cumsum(0)
    x = make_inputs(sum(lengths), device=device, with_lse=with_lse)
    where = (
        {"cu_seqlens": edges}
        if how == "cu_seqlens"
        else {"position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None]}
    )
    run = functools.partial(
        cca_attention,
        group_size=3,
        window_size=7,
        num_groups=num_groups,
        rotary=rotary_on(device),
        return_lse=True,
    )
    for backend in BACKENDS:
        found = results_and_gradients(functools.partial(run, backend=backend, **where), x)
        for start, stop in zip(edges.tolist(), edges.tolist()[1:]):
            alone = results_and_gradients(
                functools.partial(run, backend=backend), cut(x, start, stop)
            )
            for name, value in alone.items():
                assert_equal(
                    found[name][:, :, start:stop], value, f"{name} of the document at {start}"
                )


@pytest.mark.parametrize("group_size", [4, (1, 4)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", [True, False], ids=["one row of positions", "a row each"])
def test_law_5_documents_of_several_rows(device, backend, shared, group_size):
    """Positions [1, L] tell the documents of all rows, [B, L] those of each."""
    x = make_inputs(60, batch_size=2, dtype=torch.float64, device=device)
    edges = [(0, 23, 24, 60), (0, 23, 24, 60) if shared else (0, 41, 60)]
    positions = torch.stack(
        [torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(row)]) for row in edges]
    )
    settings = {"group_size": group_size, "window_size": 9, "rotary": rotary_on(device)}
    run = functools.partial(cca_attention, backend=backend, **settings)
    out = run(*x[:3], position_ids=positions[:1] if shared else positions)
    for row in range(2):
        for a, b in pairwise(edges[row]):
            alone = run(*(y[row : row + 1, :, a:b] for y in x[:3]))
            torch.testing.assert_close(out[row : row + 1, :, a:b], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group_size", [4, (1, 4)], ids=str)
def test_law_5_masks_of_any_dtype_and_padding_on_both_sides(device, group_size):
    x = make_inputs(45, batch_size=3, dtype=torch.float64, device=device)
    mask = torch.ones(3, 45, device=device)
    mask[0, :7] = 0
    mask[0, 40:] = 0
    mask[2, 44:] = 0
    settings = {"group_size": group_size, "window_size": 9, "rotary": rotary_on(device)}
    run = functools.partial(cca_attention, **settings)
    outs = [run(*x[:3], attention_mask=mask.to(dtype)) for dtype in (torch.bool, torch.int32)]
    outs.append(run(*x[:3], attention_mask=mask))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    for row, span in ((0, slice(7, 40)), (1, slice(0, 45)), (2, slice(0, 44))):
        alone = run(*(y[row : row + 1, :, span] for y in x[:3]))
        torch.testing.assert_close(outs[0][row : row + 1, :, span], alone, rtol=0, atol=1e-12)
    assert bool((outs[0][0, :, 40:] == 0).all() and (outs[0][0, :, :7] == 0).all())
    mask[1, 30] = 0
    with pytest.raises(ValueError, match="got a hole in row 1. Pass packed"):
        run(*x[:3], attention_mask=mask)


def test_num_groups_is_the_group_size_it_stands_for(device):
    for length in (9, 40, 97):
        x = make_inputs(length, device=device)
        size = group_size_for(length, 8, 5)
        a, b = (
            cca_attention(x.q, x.k, x.v, window_size=8, rotary=rotary_on(device), **which)
            for which in ({"num_groups": 5}, {"group_size": size})
        )
        assert torch.equal(a, b)


# Laws 6 and 8: the backends agree, forward and backward.


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("group_size, window_size", SIZES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_laws_6_and_8_backends_agree_in_float64(device, option, group_size, window_size, with_lse):
    for length in (first_core_query(group_size, window_size) + 1, 97):
        x = make_inputs(
            length, batch_size=2, dtype=torch.float64, device=device, seed=length, with_lse=with_lse
        )
        settings = {
            "group_size": group_size,
            "window_size": window_size,
            "rotary": rotary_on(device),
            **option,
        }
        a, b = (
            results_and_gradients(
                functools.partial(cca_attention, backend=backend, return_lse=True),
                x,
                **settings,
            )
            for backend in BACKENDS
        )
        for name in a:
            torch.testing.assert_close(
                a[name], b[name], rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize(
    "option",
    [
        {},
        {"softcap": 3.0},
        {"core_mass": True},
        {"sink_size": 6},
        {"group_size": (1, 4)},
    ],
    ids=str,
)
def test_every_part_has_the_scale_and_the_softcap(device, option):
    """Also short rows, which are PyTorch's attention without a softcap, and pooling alone."""
    for length in (5, 12, 61):
        x = make_inputs(length, batch_size=2, dtype=torch.float64, device=device, with_lse=False)
        settings = {"group_size": 4, "window_size": 9, "rotary": rotary_on(device), **option}
        run = functools.partial(cca_attention, **settings)
        for scale in (0.7, 1):
            scaled = x._replace(q=x.q * (4 * scale))  # the default is 1 / sqrt(16)
            found = results_and_gradients(
                lambda q, k, v: (run(q, k, v, scale=scale), q[..., 0]),
                x,
            )
            expected = results_and_gradients(lambda q, k, v: (run(q, k, v), q[..., 0]), scaled)
            expected["grad_q"] *= 4 * scale
            for name in ("out", "grad_q", "grad_k", "grad_v"):
                torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-11)
            reference = run(*x[:3], scale=scale, backend="reference")
            torch.testing.assert_close(found["out"], reference, rtol=0, atol=1e-11)
    if option in ({}, {"softcap": 3.0}):
        for backend in BACKENDS:
            pool = functools.partial(
                pool_core_tokens, group_size=4, rotary=rotary_on(device), backend=backend, **option
            )
            cores = pool(*x[:3], scale=0.7)
            for core, expected in zip(cores, pool(x.q * 2.8, *x[1:3])):
                torch.testing.assert_close(core, expected, rtol=0, atol=1e-12)
            assert not torch.allclose(cores[0], pool(*x[:3])[0])


def test_law_6_gradients_reach_through_the_pooling_weights(device):
    """Only core tokens of the group are seen by the last query, so the group's query moves it only
    as a weight."""
    x, g, s = make_inputs(12, dtype=torch.float64, device=device), 4, 1
    q = x.q.clone().requires_grad_()
    out = cca_attention(
        q, x.k, x.v, group_size=g, window_size=s, rotary=rotary_on(device), backend="packed"
    )
    (grad,) = torch.autograd.grad(out[:, :, -1].square().sum(), q)
    moved = (grad.abs().amax((0, 1, 3)) > 1e-6).tolist()
    assert moved == [t in (g - 1, 2 * g - 1, 11) for t in range(12)]


def test_law_8_pooling_agrees(device):
    x = make_inputs(29, batch_size=2, dtype=torch.float64, device=device)
    for option in OPTIONS:
        a, b = (
            pool_core_tokens(
                x.q, x.k, x.v, group_size=4, rotary=rotary_on(device), backend=backend, **option
            )
            for backend in BACKENDS
        )
        for one, other in zip(a, b):
            assert one.shape == (2, 2, 7, 16)
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_nothing_but_padding_has_gradients_of_zero(device, backend):
    x = make_inputs(9, device=device)
    settings = {"group_size": 2, "window_size": 3, "core_position": "token"}
    attend = functools.partial(cca_attention, backend=backend, return_lse=True, **settings)
    mask = torch.zeros(1, 9, dtype=torch.bool, device=device)
    found = results_and_gradients(attend, x, attention_mask=mask)
    assert (found.pop("lse") == -torch.inf).all()
    assert not any(value.any() for value in found.values())


def test_a_batch_gives_what_its_rows_give_alone(device):
    x = make_inputs(45, batch_size=3, dtype=torch.float64, device=device)
    run = functools.partial(cca_attention, group_size=3, window_size=7, rotary=rotary_on(device))
    out = run(x.q, x.k, x.v)
    for row in range(3):
        torch.testing.assert_close(
            run(*(y[row : row + 1] for y in x[:3])), out[row : row + 1], rtol=0, atol=1e-14
        )


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(
    "option",
    [
        {},
        {"softcap": 3.0},
        {"core_mass": True},
        {"core_mass": True, "sink_size": 6},
        {"softcap": 3.0, "sink_size": 4, "core_mass": True},
    ],
    ids=str,
)
def test_how_long_inputs_are_cut_changes_nothing(device, option, with_lse, monkeypatch):
    """Long inputs are computed a few groups, heads and rows at a time; here so few that short ones
    are cut, too, with a rest at every end."""
    x = make_inputs(86, batch_size=2, dtype=torch.float64, device=device, with_lse=with_lse)
    settings = {"group_size": 4, "window_size": 9, "rotary": rotary_on(device), **option}
    run = functools.partial(cca_attention, return_lse=True, **settings)
    expected = results_and_gradients(functools.partial(run, backend="reference"), x)
    # 3 groups of 4 sequences.
    monkeypatch.setattr(pooling_chunks, "_CHUNK_ELEMENTS", 3 * 4 * 4 * 16)
    monkeypatch.setattr(packed, "_CORE_ELEMENTS", 3 * 2 * 86 * 16)  # 3 of these
    monkeypatch.setattr(packed, "_BLOCK_QUERIES", {"cpu": 14})
    monkeypatch.setattr(packed, "_BLOCK_QUERIES_DEFAULT", 14)
    monkeypatch.setattr(partial, "_CHUNK_SCORES", 3 * 4 * 2 * 20)
    monkeypatch.setattr(merge, "_ELEMENTS", {"cpu": 5 * 3 * 2 * 16})  # 5 rows
    monkeypatch.setattr(merge, "_ELEMENTS_DEFAULT", 5 * 3 * 2 * 16)
    found = results_and_gradients(functools.partial(run, backend="packed"), x)
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("option", [{}, {"core_mass": True}], ids=str)
def test_either_result_may_be_differentiated_alone(device, option):
    x = make_inputs(50, batch_size=2, dtype=torch.float64, device=device)
    settings = {"group_size": 4, "window_size": 9, "rotary": rotary_on(device), **option}
    leaves = [y.clone().requires_grad_() for y in x[:3]]
    for result, upstream in ((0, x.grad_out), (1, x.grad_lse)):
        found, expected = (
            torch.autograd.grad(
                cca_attention(*leaves, backend=backend, return_lse=True, **settings)[result],
                leaves,
                upstream,
                materialize_grads=True,
            )
            for backend in ("packed", "reference")
        )
        for grad, wanted in zip(found, expected):
            torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-11)


def test_autocast_rounds_the_inputs_and_nothing_else(device):
    """Pooling and sums stay as wide as ever, forward and in a backward that is called inside; and
    float64 stays float64."""
    x = make_inputs(50, batch_size=2, device=device, with_lse=False)
    for option in ({}, {"core_mass": True}):
        settings = {"group_size": 4, "window_size": 9, "rotary": rotary_on(device), **option}
        run = functools.partial(cca_attention, **settings)
        half = [y.bfloat16().requires_grad_() for y in x[:3]]
        single = [y.clone().requires_grad_() for y in x[:3]]
        expected = run(*half)
        with torch.autocast(x.q.device.type, torch.bfloat16):
            out = run(*single)
            wide = run(*(y.double() for y in x[:3]))
        assert_equal(out, expected)
        assert_equal(wide, run(*(y.double() for y in x[:3])))
        outside = torch.autograd.grad(expected, half, x.grad_out.bfloat16())
        again = run(*half)
        with torch.autocast(x.q.device.type, torch.bfloat16):
            inside = torch.autograd.grad(again, half, x.grad_out.bfloat16())
        for a, b in zip(inside, outside):
            assert a.dtype == torch.bfloat16
            assert_equal(a, b)


def test_what_must_be_copied_is_copied_once_for_both_passes(device):
    """As transformers lays tensors out: one row is taken as it is, several are not, but the
    backward has the copies."""
    for rows in (1, 3):
        q, k, v = (
            torch.randn(rows, 90, heads, 16, device=device).transpose(1, 2).requires_grad_()
            for heads in (4, 2, 2)
        )
        out = cca_attention(
            q, k, v, group_size=4, window_size=13, core_position="token", backend="packed"
        )
        for given, saved in zip((q, k, v), out.grad_fn.saved_tensors):
            assert (saved.data_ptr() == given.data_ptr()) == (rows == 1)
            assert saved.flatten(0, 1).data_ptr() == saved.data_ptr() and torch.equal(saved, given)


@pytest.mark.parametrize("sink_size", [0, 4])
@pytest.mark.parametrize(
    "strided",
    [lambda x: x.repeat_interleave(2, -1)[..., ::2], lambda x: x.mT.contiguous().mT],
    ids=["every other element", "transposed"],
)
def test_how_tensors_lie_in_memory_changes_nothing(device, strided, sink_size):
    """torch's own kernels on the CPU take the elements of a row for neighbours."""
    x = make_inputs(45, device=device, with_lse=False)
    settings = {
        "group_size": 4,
        "window_size": 7,
        "rotary": rotary_on(device),
        "sink_size": sink_size,
    }
    run = functools.partial(cca_attention, return_lse=True, backend="packed")
    lying = Inputs(*map(strided, x[:4]), None)
    assert all(y.stride(-1) != 1 for y in lying[:4])
    expected, found = (results_and_gradients(run, y, **settings) for y in (x, lying))
    for name, value in found.items():
        assert_equal(value, expected[name], name)


def test_what_all_layers_ask_is_answered_once_and_anew_after_a_change():
    asked = []

    @once_for_all_layers
    def answer(size, ids=None, mask=None):
        asked.append(size)
        return None if ids is None else ids.sum().item()

    ids, same = torch.arange(4), torch.arange(4)
    assert answer(1, ids) == answer(1, ids) == 6 and len(asked) == 1
    assert answer(1, same) == 6 and answer(2, same) == 6 and len(asked) == 3
    same[0] = 5  # in place: no longer the same question
    assert answer(2, same) == 11 and len(asked) == 4
    assert answer(2) is None
    assert answer(2, None, same) is None
    assert answer(2, same) == 11
    assert len(asked) == 7
    with torch.inference_mode():
        made = torch.arange(4)
        assert answer(3, made) == 6 == answer(3, made) and len(asked) == 9
