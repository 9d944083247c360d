"""Fetch: raw tokens of the groups that an index chooses, in one softmax with the core tokens of the
others; its laws, its gradients, its indices."""

import functools
from types import SimpleNamespace

import pytest
import torch
from budgets import fed, make_inputs, results_and_gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import new_layer
from corecontext.config import parse_index
from corecontext.ops import packed, reference
from corecontext.ops.autograd import _flat, cca_attention_op
from corecontext.ops.batch import complete_groups
from corecontext.ops.fetch import attend as fetch
from corecontext.ops.fetch import choice, gathered, low_bits, query_blocks
from corecontext.ops.fetch.choice import Choice
from corecontext.ops.fetch.index import index_of
from corecontext.ops.fetch.scoring import Queries, centre_of, group_keys, scores
from corecontext.ops.spec import Cores, Spec, Tokens, Upstream
from corecontext.visibility import num_visible_cores

TRITON = "corecontext.ops.triton"
ROTARY = Rotary.from_theta(100.0, 16)
SIZES = {"group_size": 4, "window_size": 9, "sink_size": 0}
INDICES = [
    *("mean", "oracle", "bits:1", "bits:2", "bits:4"),
    *("pairs:2", "parts:2:4", "parts:3:4"),
]
OPTIONS = [
    {},
    {"softcap": 2.0, "core_mass": True},
    {"core_position": "token", "sink_size": 6},
    {"core_mass": True, "sink_size": 4},
    {"core_mass": True},
    {"num_groups": 9},
    {"group_size": (4, 7)},
    {"group_size": (1, 5)},
    {"fetch_share": 7, "core_mass": True},
    {"fetch_share": 64},
]
FETCH = functools.partial(
    cca_attention, fetch_groups=3, fetch_index="oracle", core_position="token", **SIZES
)


def sequence(length: int, spec: Spec, **sizes: int):
    """Arguments of a backend's attention on one whole sequence, in float64: tokens, core tokens,
    spec and masses."""
    x = make_inputs(length, dtype=torch.float64, num_heads=3, num_kv_heads=1, **sizes)
    tokens = Tokens(x.q, x.k[:, 0], x.v[:, 0])
    groups = complete_groups(tokens, spec.group_size, spec.sinks)
    cores, masses = packed.pool_with_mass(groups, spec)
    return tokens, cores, spec, masses


def attended(tokens: Tokens, cores: Cores, spec: Spec, mass: torch.Tensor | None = None):
    """Out, log-sum-exp and choice by blocks of queries."""
    chosen = query_blocks.choose(tokens, cores.k.shape[2], spec)
    return *query_blocks.attend(tokens, cores, spec, mass, chosen), chosen


# Laws


@pytest.mark.parametrize("backend", ["reference", "packed"])
def test_no_group_fetched_is_cca_bit_for_bit(backend):
    x = make_inputs(70)
    settings = {"core_position": "token", "core_mass": True, "backend": backend, **SIZES}
    run = functools.partial(results_and_gradients, inputs=x, return_lse=True, **settings)
    plain = run(cca_attention)
    fetched = run(functools.partial(cca_attention, fetch_groups=0, fetch_index="bits:2"))
    assert all(torch.equal(plain[name], fetched[name]) for name in plain)


@pytest.mark.parametrize("backend", ["reference", "packed"])
@pytest.mark.parametrize("sinks", [0, 6])
@pytest.mark.parametrize("index", ["mean", "bits:1"])
def test_all_groups_fetched_are_full_attention(backend, sinks, index):
    """Also where the call is not recognised as full attention beforehand."""
    spec = Spec(4, 9, 0.25, sink_size=sinks, core_mass=True, fetch_groups=100, fetch_index=index)
    tokens, *rest = sequence(75, spec)
    out, lse = attended(tokens, *rest)[:2]
    if backend == "reference":
        out, lse = reference.attend(tokens, *rest)
    scores = (0.25 * tokens.q @ tokens.k[:, None].mT).masked_fill(
        torch.ones(75, 75, dtype=torch.bool).triu(1), -torch.inf
    )
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-13)
    torch.testing.assert_close(out, scores.softmax(-1) @ tokens.v[:, None], rtol=0, atol=1e-13)


def test_as_many_groups_as_are_seen_are_full_attention():
    x = make_inputs(75, dtype=torch.float64)
    visible = num_visible_cores(74, 4, 9)
    full = cca_attention(x.q, x.k, x.v, group_size=1, core_position="token")
    errors = [
        float((FETCH(x.q, x.k, x.v, fetch_groups=k) - full).abs().max())
        for k in (visible - 1, visible)
    ]
    assert errors[0] > 1e-6 and errors[1] < 1e-13


@pytest.mark.parametrize("backend", ["reference", "packed"])
@pytest.mark.parametrize("sinks", [0, 6])
@pytest.mark.parametrize("fetch_share", [1, 5])
def test_each_earlier_token_is_represented_once(backend, sinks, fetch_share):
    """With scores of almost 0 and masses, each token has the weight 1 / (t + 1), whichever groups
    are fetched; values are unit vectors."""
    length = 60
    x = make_inputs(length, dtype=torch.float64, head_dim=length)
    unit = torch.eye(length, dtype=torch.float64).expand_as(x.k)
    settings = {"core_mass": True, "sink_size": sinks, "fetch_share": fetch_share}
    out = FETCH(1e-9 * x.q, x.k, unit, backend=backend, **settings)
    position = torch.arange(length)
    weights = torch.ones(length, length, dtype=torch.float64).tril() / (position[:, None] + 1)
    torch.testing.assert_close(out, weights.expand_as(out), rtol=0, atol=1e-8)


def test_of_equal_groups_the_lower_ones_are_fetched():
    """All keys are equal, so all groups are; whole numbers, so that sums have no rounding."""
    spec = Spec(4, 9, 0.25, fetch_groups=3, fetch_index="mean")
    tokens, cores, *rest = sequence(75, spec)
    tokens = tokens._replace(q=tokens.q.round(), k=torch.ones_like(tokens.k))
    numbers = query_blocks.choose(tokens, 18, spec).groups
    for position in range(75):
        count = min(3, num_visible_cores(position, 4, 9))
        wanted = [*range(count), *[-1] * (3 - count)]
        assert numbers[0, position].tolist() == wanted
    out = reference.attend(tokens, cores, *rest)[0]
    torch.testing.assert_close(out, attended(tokens, cores, *rest)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_best_are_those_of_a_stable_sort(count):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(4, (50, 8), generator=generator).double()
    values[values == 0] = -torch.inf
    order = values.sort(stable=True, dim=-1, descending=True).indices[:, :count]
    truth = torch.zeros_like(values, dtype=torch.bool).scatter(1, order, True)
    marks = choice.best(values, count)
    assert torch.equal(marks, truth & (values > -torch.inf))
    numbers = choice.to_numbers(marks[None], count)
    assert torch.equal(choice.to_marks(numbers, 8)[0], marks)
    assert (numbers[numbers >= 0] < 8).all() and ((numbers < 0).int().diff() >= 0).all()


@pytest.mark.parametrize("backend", ["reference", "packed"])
@pytest.mark.parametrize("index", INDICES)
def test_later_tokens_change_no_earlier_row(backend, index):
    x = make_inputs(70)
    run = functools.partial(FETCH, backend=backend, fetch_index=index, sink_size=3)
    out = run(x.q, x.k, x.v)
    for t in (20, 41):
        later = [y.clone() for y in x[:3]]
        for y in later:
            y[:, :, t + 1 :] = 3 * y[:, :, t + 1 :].roll(1, 2) + 1
        changed = run(*later)
        assert torch.equal(changed[:, :, : t + 1], out[:, :, : t + 1])
        assert not torch.equal(changed[:, :, t + 1 :], out[:, :, t + 1 :])


def test_a_shared_choice_looks_ahead_to_the_end_of_its_share_only():
    x = make_inputs(70, dtype=torch.float64)
    run = functools.partial(FETCH, fetch_share=8, fetch_groups=1)
    out = run(x.q, x.k, x.v)
    q = x.q.clone()
    q[:, :, 61] = 10 * q[:, :, 61].flip(-1)
    changed = run(q, x.k, x.v)
    rows = (changed != out).any(-1).any(1)[0].nonzero()[:, 0].tolist()
    assert torch.equal(changed[:, :, :56], out[:, :, :56]) and rows[0] in range(56, 61)
    assert torch.equal(changed[:, :, 64:], out[:, :, 64:])


def test_shares_are_aligned_to_positions_of_the_sequence():
    """A call on the last queries has the choice of the whole, from a multiple of the share on."""
    spec = Spec(4, 9, 0.25, sink_size=3, fetch_groups=2, fetch_index="mean", fetch_share=8)
    tokens, *rest = sequence(75, spec)
    whole, _, chosen = attended(tokens, *rest)
    late = tokens._replace(q=tokens.q[:, :, 48:], q_start=48)
    for attend in (attended, reference.attend):
        torch.testing.assert_close(attend(late, *rest)[0], whole[:, :, 48:], rtol=0, atol=1e-12)
    assert torch.equal(attended(late, *rest)[2].groups, chosen.groups[:, 6:])
    odd = attended(tokens._replace(q=tokens.q[:, :, 45:], q_start=45), *rest)
    torch.testing.assert_close(odd[0][:, :, 3:], whole[:, :, 48:], rtol=0, atol=1e-12)
    few = tokens._replace(q=tokens.q[:, :, 70:], q_start=70)  # fewer than share one
    out, _, _ = fetch.attend(packed, few, *rest)
    torch.testing.assert_close(out, reference.attend(few, *rest)[0])


@pytest.mark.parametrize("ragged", ["attention_mask", "cu_seqlens"])
def test_padded_and_packed_rows_equal_their_documents(ragged):
    x = make_inputs(80, dtype=torch.float64)
    alone = FETCH(x.q[:, :, 20:], x.k[:, :, 20:], x.v[:, :, 20:])
    if ragged == "attention_mask":
        together = FETCH(x.q, x.k, x.v, attention_mask=(torch.arange(80) >= 20)[None])
    else:
        together = FETCH(x.q, x.k, x.v, cu_seqlens=torch.tensor([0, 20, 80]))
    torch.testing.assert_close(together[:, :, 20:], alone, rtol=0, atol=1e-12)


def test_documents_of_different_length_have_gradients_of_their_own_choice():
    x = make_inputs(150, dtype=torch.float64)
    settings = {"cu_seqlens": torch.tensor([0, 40, 45, 150]), "return_lse": True}
    found = [
        results_and_gradients(functools.partial(FETCH, backend=backend, **settings), x)
        for backend in ("reference", "packed")
    ]
    for name, truth in found[0].items():
        torch.testing.assert_close(found[1][name], truth, rtol=0, atol=1e-10, msg=name)


# Agreement with the reference


def compare(x, index: str, **options) -> None:
    """Hold the packed backend to the reference, results and gradients, in float64."""
    settings = {**SIZES, "rotary": ROTARY, "fetch_groups": 3, "fetch_index": index, **options}
    found = [
        results_and_gradients(
            functools.partial(cca_attention, return_lse=True, backend=name), x, **settings
        )
        for name in ("reference", "packed")
    ]
    for name, truth in found[0].items():
        torch.testing.assert_close(found[1][name], truth, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("with_lse", [False, True])
def test_results_and_gradients_are_the_references(options, with_lse):
    x = make_inputs(80, batch_size=2, dtype=torch.float64, with_lse=with_lse)
    compare(x, "parts:2:4", **options)


@pytest.mark.parametrize("index", INDICES)
def test_each_index_chooses_as_in_the_reference(index):
    compare(make_inputs(80, dtype=torch.float64), index, sink_size=5, core_mass=True, softcap=3.0)


@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 7, 8])
def test_any_number_of_query_heads(repeats):
    x = make_inputs(60, dtype=torch.float64, num_heads=2 * repeats)
    compare(x, "oracle", core_mass=True)


@pytest.mark.parametrize("index, fetch_share", [("oracle", 1), ("oracle", 6), ("pairs:2", 1)])
@pytest.mark.parametrize("elements", [1 << 22, 1])
def test_gathered_groups_and_small_blocks_change_nothing(index, fetch_share, elements, monkeypatch):
    monkeypatch.setitem(query_blocks._GATHER_COST, "cpu", 0)
    monkeypatch.setitem(query_blocks._ELEMENTS, "cpu", elements)
    monkeypatch.setitem(query_blocks._BLOCK_QUERIES, "cpu", 13)
    x = make_inputs(80, batch_size=2, dtype=torch.float64)
    compare(x, index, sink_size=5, core_mass=True, fetch_share=fetch_share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gathers", [0, 16])
def test_rows_in_lower_precision(dtype, gathers, monkeypatch, device):
    monkeypatch.setitem(query_blocks._GATHER_COST, device.type, gathers)
    x = make_inputs(83, dtype=dtype, device=device)
    rotary = Rotary.from_theta(100.0, 16, device)
    settings = {**SIZES, "rotary": rotary, "core_mass": True, "sink_size": 4}
    found = [
        results_and_gradients(
            functools.partial(cca_attention, return_lse=True, backend=backend),
            inputs,
            fetch_groups=4,
            fetch_index="oracle",
            **settings,
        )
        for backend, inputs in (("reference", x.to(torch.float64)), ("packed", x))
    ]
    for name, truth in found[0].items():
        error = (found[1][name].double() - truth).norm(dim=-1)
        allowed = 16 * torch.finfo(dtype).eps * truth.norm(dim=-1).clamp(min=4)
        assert (error <= allowed).all(), (name, float((error / allowed).max()))


def test_the_backward_takes_the_choice_of_the_forward():
    """And chooses again where none is kept."""
    spec = Spec(4, 9, 0.25, core_mass=True, fetch_groups=2, fetch_index="mean")
    arguments = sequence(75, spec)
    out, lse, chosen = attended(*arguments)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    upstream = Upstream(grad, None, out, lse)
    truth = query_blocks.attend_backward(upstream, *arguments, chosen)
    for kept in (chosen, None):
        grads = fetch.attend_backward(packed, upstream, *arguments, kept)
        for got, wanted in zip(grads, truth):
            assert torch.equal(got, wanted)
    none = chosen._replace(groups=torch.full_like(chosen.groups, -1))
    grads = fetch.attend_backward(packed, upstream, *arguments, none)
    assert not torch.allclose(grads[0], truth[0])


def test_a_text_without_a_group_asks_for_no_choice(monkeypatch):
    monkeypatch.delattr(query_blocks, "choose")
    results_and_gradients(functools.partial(FETCH, group_size=80, return_lse=True), make_inputs(75))
    with pytest.raises(AttributeError, match="choose"):
        FETCH(*make_inputs(75)[:3])


def test_the_registered_operator_has_the_settings():
    """What torch.compile runs: the same results and gradients as eager code."""
    x = make_inputs(50)
    spec = Spec(4, 9, scale=0.25, rotary=ROTARY, fetch_groups=2, fetch_index="mean", fetch_share=3)

    def compiled(q, k, v):
        return cca_attention_op(q, k, v, ROTARY.inv_freq, None, None, None, *_flat(spec, "packed"))

    settings = {"fetch_groups": 2, "fetch_index": "mean", "fetch_share": 3, "rotary": ROTARY}
    eager = functools.partial(cca_attention, return_lse=True, **SIZES, **settings)
    found = results_and_gradients(compiled, x)
    for name, value in results_and_gradients(eager, x).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


# Memory


class LargestTensor(TorchDispatchMode):
    """Keep the elements of the largest tensor that an operator returns."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        self.size = max(self.size, *(x.numel() for x in tensors), 0)
        return results


@pytest.mark.parametrize("where", ["packed", "triton", "device", "host", "slots"])
def test_memory_follows_the_sequence_not_the_settings(where):
    """A million groups, queries of a share and slots make no tensor larger than as many as there
    are: forward, backward, a prompt, a chunk, a step."""
    if where == "triton" and torch.cuda.is_available():
        pytest.skip("the tensors are on the CPU, where kernels run in the interpreter")
    x = make_inputs(40)
    backend = packed if where != "triton" else pytest.importorskip(f"{TRITON}.backend")

    def largest(k: int, share: int) -> int:
        choice = {"fetch_groups": k, "fetch_index": "bits:2", "fetch_share": share}
        with LargestTensor() as largest:
            if where in ("packed", "triton"):
                tokens, cores, spec, _ = sequence(40, Spec(4, 9, 0.25, **choice))
                out, lse, chosen = fetch.attend(backend, tokens, cores, spec)
                upstream = Upstream(out, None, out, lse)
                fetch.attend_backward(backend, upstream, tokens, cores, spec, None, chosen)
            else:
                stored = {"store": where if where == "device" else "host"}
                stored["fetch_slots"] = k if where == "slots" else 0
                config = CCAConfig(4, 9, backend="packed", prefill="fetch", **stored, **choice)
                fed(new_layer(config, ROTARY), x[:3], 0, [20, 18, 1, 1])
        return largest.size

    assert largest(10**6, 1) <= largest(8, 1)
    assert largest(10**6, 10**6) <= largest(8, 40)


# A choice that is given


@pytest.mark.parametrize("backend", ["reference", "packed"])
@pytest.mark.parametrize("share", [1, 6])
def test_a_choice_that_is_given_is_fetched(backend, share):
    """That of an index has the results of the index, and gradients; none is CCA."""
    x = make_inputs(80, batch_size=2, dtype=torch.float64)
    options = {"core_mass": True, "core_position": "token", "backend": backend}
    sizes = {**SIZES, "sink_size": 5}
    spec = Spec(4, 9, 0.25, sink_size=5, fetch_groups=3, fetch_index="mean", fetch_share=share)
    rows = (x.q.unflatten(1, (x.k.shape[1], -1)).flatten(0, 1), *(y.flatten(0, 1) for y in x[1:3]))
    chosen = query_blocks.choose(Tokens(*rows), 18, spec)
    run = functools.partial(cca_attention, return_lse=True, **sizes, **options)
    index = {"fetch_groups": 3, "fetch_index": "mean", "fetch_share": share}
    truth = results_and_gradients(run, x, **index)
    found = results_and_gradients(run, x, choice=chosen)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)
    none = Choice(torch.full_like(chosen.groups, -1), share)
    cca, _ = run(*x[:3])
    torch.testing.assert_close(run(*x[:3], choice=none)[0], cca, rtol=0, atol=1e-10)
    assert not torch.allclose(run(*x[:3], choice=chosen)[0], cca)
    # As many numbers as groups, but not all of them: this is not full attention.
    many = Choice(torch.nn.functional.pad(none.groups, (0, 20), value=-1), share)
    torch.testing.assert_close(run(*x[:3], choice=many)[0], cca, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "groups, share, settings, error, message",
    [
        (None, 1, {}, TypeError, "choice must be a Choice, got tuple. Make one with"),
        ([[[0]]], 0, {}, ValueError, "choice.share must be at least 1, got 0"),
        ([[0]], 4, {}, ValueError, r"choice.groups must be \[B Hkv, C, k\], got \[1, 1\]"),
        ([[[0]] * 5], 4, {"fetch_groups": 2}, ValueError, "fetch_groups must be the choice's 1"),
        ([[[0]] * 5], 4, {"fetch_share": 2}, ValueError, "fetch_share must be the choice's 4"),
        ([[[0]] * 4], 4, {}, ValueError, r"with B Hkv = 1 and C = ceil\(L / share\) = 5, got"),
        ([[[-2]] * 5], 4, {}, ValueError, "choice.groups must rise in each row"),
        ([[[1, 0]] * 5], 4, {}, ValueError, "choice.groups must rise in each row"),
        ([[[1, 1]] * 5], 4, {}, ValueError, "choice.groups must rise in each row"),
        ([[[-1, 1]] * 5], 4, {}, ValueError, "choice.groups must rise in each row"),
        ([[[-1], [0], [0], [1], [2]]], 4, {}, ValueError, "got 0 in share 1, which sees 0"),
        ([[[-1], [-1], [-1], [0], [2]]], 4, {}, ValueError, "got 2 in share 4, which sees 2"),
        ([[[-1]] * 4 + [[1]]], 4, {"sink_size": 4}, ValueError, "got 1 in share 4, which sees 1"),
        ([[[-1]] * 5], 4, {"attention_mask": torch.ones(1, 20)}, NotImplementedError, "one length"),
        ([[[-1]] * 5], 4, {"group_size": (4,)}, NotImplementedError, "one group_size for all"),
    ],
)
def test_other_choices_are_refused(groups, share, settings, error, message):
    x = make_inputs(20, num_heads=2, num_kv_heads=1)
    given = (groups, share)
    if groups is not None:
        given = Choice(torch.tensor(groups, dtype=torch.int32), share)
    with pytest.raises(error, match=message):
        cca_attention(x.q, x.k, x.v, choice=given, **SIZES | {"core_position": "token"} | settings)


def test_a_choice_of_other_numbers_or_elsewhere_is_refused():
    x = make_inputs(20, num_heads=2, num_kv_heads=1)
    for groups, error in ((torch.zeros(1, 5, 1), TypeError), ([[[0]]], TypeError)):
        with pytest.raises(error, match="^choice.groups must be (int32|a tensor), got"):
            FETCH(x.q, x.k, x.v, fetch_groups=0, choice=Choice(groups, 4))
    meta = torch.zeros(1, 5, 1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="^choice.groups must be on cpu, got meta. Move them"):
        FETCH(x.q, x.k, x.v, fetch_groups=0, choice=Choice(meta, 4))


# Indices


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_index_has_the_bytes_that_it_says(index, dtype):
    keys = make_inputs(60, dtype=dtype, num_kv_heads=3).k[0].unflatten(1, (12, 5))
    index = index_of(index)
    num_bytes = sum(x.numel() * x.element_size() for x in index.encode(keys, None))
    assert num_bytes == 36 * index.num_bytes(5, 16, dtype.itemsize)


@pytest.mark.parametrize("index", ["mean", "parts:2:4", "pairs:2"])
def test_means_of_keys_in_16_bits_are_summed_in_more(index):
    keys = make_inputs(60, dtype=torch.bfloat16, num_kv_heads=3).k[0].unflatten(1, (12, 5))
    encode = index_of(index).encode
    for x, wide in zip(encode(keys, None), encode(keys.float(), None)):
        assert torch.equal(x, wide.to(x.dtype))


def test_gathered_gradients_are_summed_in_float32():
    q, k, v = (x.bfloat16() for x in (torch.randn(1, 2, 3, 8), *torch.randn(2, 1, 4, 2, 8)))
    chosen = torch.tensor([[[0, 1], [1, -1], [0, 3]]], dtype=torch.int32)
    gather = gathered.Gather(q, k, v, chosen, 10**6)
    spec = Spec(2, 1, 0.5)
    out, lse = gathered.forward(gather, spec)
    assert lse.dtype == torch.float32
    grads = gathered.backward(Upstream(out, None, out, lse), gather, spec)
    assert {grad.dtype for grad in grads} == {torch.float32}


def test_marks_are_of_the_groups_that_there_are():
    numbers = torch.tensor([[[0, 5, -1], [2, 3, 1]]], dtype=torch.int32)
    marks = [[True, False, False], [False, True, True]]
    assert choice.to_marks(numbers, 3).tolist() == [marks]


def test_fetch_needs_all_raw_tokens():
    tokens, *rest = sequence(30, Spec(4, 9, 0.25, fetch_groups=2))
    for less in ({"k_start": 4}, {"sink_k": tokens.k[:, :4]}):
        with pytest.raises(ValueError, match="^tokens must begin at position 0 for fetch"):
            query_blocks.choose(tokens._replace(**less), 7, rest[1])


@pytest.mark.parametrize("dim", [16, 24, 6])
@pytest.mark.parametrize("bits, error", [(1, 0.85), (2, 0.45), (4, 0.13)])
def test_stored_keys_keep_their_own_product(dim, bits, error):
    k = make_inputs(40, dtype=torch.float64, head_dim=dim).k
    k[0, 0, 0] = 0
    codes, scales = low_bits.encode(k, bits)
    matrix = low_bits.rotation(dim, k.dtype, k.device)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=k.dtype))
    stored = low_bits.decode(codes, bits, dim, k.dtype) * scales[..., None] @ matrix.T
    norm = k.square().sum(-1)
    torch.testing.assert_close((stored * k).sum(-1), norm, rtol=1e-3, atol=0)
    assert ((stored - k).square().sum(-1) <= (1.6 * error) ** 2 * norm).all()
    assert (stored - k).square().sum() <= error**2 * norm.sum()
    assert not stored[0, 0, 0].any()


def test_scales_of_keys_are_finite_numbers():
    k = torch.tensor([[1e6, -1e6], [0.0, 0.0]])
    for shared in (False, True):
        _, scales = low_bits.encode(k, 2, shared)
        assert scales.dtype == torch.float16 and scales.isfinite().all()
        assert scales.flatten()[0] == torch.finfo(torch.float16).max


@pytest.mark.parametrize("bits, error", [(1, 0.85), (2, 0.45), (4, 0.13)])
def test_keys_may_share_a_scale(bits, error):
    """Their products with themselves add up; the scale is of the whole group."""
    k = make_inputs(40, dtype=torch.float64, head_dim=16).k.unflatten(2, (10, 4))
    codes, scales = low_bits.encode(k, bits, shared=True)
    assert scales.shape == k.shape[:-2]
    matrix = low_bits.rotation(16, k.dtype, k.device)
    stored = low_bits.decode(codes, bits, 16, k.dtype) * scales[..., None, None] @ matrix.T
    norm = k.square().sum((-2, -1))
    torch.testing.assert_close((stored * k).sum((-2, -1)), norm, rtol=1e-3, atol=0)
    assert (stored - k).square().sum() <= error**2 * norm.sum()


@pytest.mark.parametrize("window", [3, 9, 600])
def test_low_bits_are_centred_by_tokens_that_every_query_sees(window):
    """Keys far from 0 lose nothing, and no query with a group sees a token that came later."""
    spec = Spec(4, window, 0.25, sink_size=3, fetch_index="pairs:4")
    count = spec.num_centred
    assert count % 4 == 0 and count <= min(window, 512)
    x = make_inputs(700, dtype=torch.float64, num_heads=1, num_kv_heads=1)
    found = []
    for k in (x.k[:, 0], x.k[:, 0] + 100):
        centre = centre_of(k, spec)
        stored = spec.index.encode(group_keys(k, spec, 174), centre)
        found.append(scores(stored, Queries.of(x.q, spec.index, centre), spec).log_softmax(-1))
    error = float((found[1] - found[0]).abs().max())
    assert (error < 1e-6) == (window > 3)


@pytest.mark.parametrize("name", ["mean", "oracle", "pairs:2", "bits:1", "parts:3:4"])
def test_keys_as_decoded_have_the_products_of_the_scores(name):
    """Kernels read them; the product with the centre, which they leave out, is the offset."""
    x = make_inputs(60, dtype=torch.float64, num_heads=3, num_kv_heads=1)
    index = index_of(name)
    centre = x.k[:, 0].mean(1) if isinstance(index, low_bits.LowBits) else None
    stored = index.encode(x.k[:, 0].unflatten(1, (15, 4)), centre)
    queries = Queries.of(x.q, index, centre)
    keys = index.decode(stored, 16, torch.float64)
    each = torch.einsum("nrtd,nmpd->nrtmp", queries.mapped, keys)
    torch.testing.assert_close(index.products(stored, queries.mapped), each, rtol=0, atol=1e-9)
    if centre is not None:
        offset = (x.q @ centre[:, None, :, None])[..., 0]
        torch.testing.assert_close(queries.offset, offset, rtol=0, atol=1e-9)
    sizes = torch.tensor(index.key_sizes(4), dtype=torch.float64)
    assert sizes.sum() == 4 and keys.shape[2] == index.num_keys(4) == len(sizes)


# Settings


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"fetch_groups": -1}, ValueError, "fetch_groups must be at least 0, got -1"),
        ({"fetch_groups": True}, TypeError, "fetch_groups must be an integer"),
        ({"fetch_share": 0}, ValueError, "fetch_share must be at least 1, got 0"),
        (
            {"fetch_index": "parts:4:B"},
            ValueError,
            "fetch_index must be .* Did you mean 'parts:P:B'",
        ),
        ({"fetch_index": "bits:3"}, ValueError, "fetch_index must be .*, got 'bits:3'"),
        ({"fetch_index": 3}, ValueError, "fetch_index must be .*, got 3"),
    ],
)
def test_refused_settings(settings, error, message):
    with pytest.raises(error, match=message):
        CCAConfig.paper(**settings)


def test_names_of_indices():
    assert parse_index("mean").numbers == () and parse_index("parts:3:4").numbers == (3, 4)
    assert index_of("pairs:2").name == "pairs:2" and index_of("pairs:2") is index_of("pairs:2")
    refused = ("parts", "parts:", "parts:0", "parts:x", "mean:1", "bits", "oracle:", "", "pairs")
    for name in (
        *refused,
        "parts:0:2",
        "parts:2:3",
        "parts:2:2:2",
        "segments:2",
        "pairs:3",
        "bits:16",
        "bits:2:2",
    ):
        with pytest.raises(ValueError, match="fetch_index must be"):
            parse_index(name)


def test_the_rotation_is_made_under_any_default_device():
    expected = low_bits.rotation(16, torch.float32, torch.device("cpu"))
    with torch.device("meta"):
        found = low_bits.rotation.__wrapped__(16, torch.float32, torch.device("cpu"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_keys, num_cores", [(40, 9), (7, 0)])
def test_gradients_of_later_queries_are_those_of_the_portable_path_on_every_backend(
    num_keys, num_cores
):
    """Kernels have a backward of whole sequences only; among the first tokens kept raw there is no
    core token yet."""
    generator = torch.Generator().manual_seed(0)
    spec = Spec(4, 9, 0.4, sink_size=4, fetch_groups=2, fetch_index="mean")
    q = torch.randn(1, 2, num_keys - 2, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, num_keys, 8, generator=generator, dtype=torch.float64)
    tokens = Tokens(q, k, v, q_start=2)
    cores = Cores(*torch.randn(2, 1, 1, num_cores, 8, generator=generator, dtype=torch.float64))

    def kernels(*call):
        raise AssertionError("a backward of whole sequences was called")

    of_fetch = SimpleNamespace(
        choose=query_blocks.choose, attend=query_blocks.attend, attend_backward=kernels
    )
    module = SimpleNamespace(attend=packed.attend, attend_backward=kernels, fetch=of_fetch)
    out, lse, chosen = fetch.attend(module, tokens, cores, spec)
    upstream = Upstream(torch.ones_like(out), None, out, lse)
    dq, dk, *_ = fetch.attend_backward(module, upstream, tokens, cores, spec, None, chosen)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    reference.attend(Tokens(*leaves, v, q_start=2), cores, spec)[0].sum().backward()
    torch.testing.assert_close(dq, leaves[0].grad)
    torch.testing.assert_close(dk, leaves[1].grad)


def test_a_backward_of_whole_sequences_refuses_later_queries():
    q, k, v = torch.zeros(3, 1, 2, 5, 8)
    tokens = Tokens(q[:, :, 2:], k[:, 0], v[:, 0], q_start=2)
    cores = Cores(*torch.zeros(2, 1, 1, 0, 8))
    spec = Spec(4, 9, 0.4, sink_size=4)
    out, lse = packed.attend(tokens, cores, spec)
    with pytest.raises(ValueError, match="q_start must be 0 in a backend's backward, got 2. Use"):
        packed.attend_backward(Upstream(out, None, out, lse), tokens, cores, spec)
