"""Learned core tokens, weights from the mean query, sizes by layer: the equations, the laws,
models, checkpoints."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from budgets import make_inputs, results_and_gradients
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM

from corecontext import (
    CCAConfig,
    Rotary,
    cca_attention,
    enable,
    enabled,
    from_pretrained,
    pool_core_tokens,
)
from corecontext.cache import CompactLayer
from corecontext.config import LEARNED
from corecontext.files import UserError
from corecontext.inference import Engine
from corecontext.integrations.hf.cache_name import returned_cache
from corecontext.loading import load
from corecontext.ops import reference, rules
from corecontext.ops.spec import Groups, Spec

HEADS, KV, DIM = 4, 2, 16
RULES = [
    {"pooling": "mean_query"},
    {"pooling": "cca", "learned": True},
    {"pooling": "mean_query", "learned": True},
    {"pooling": "cca", "learned": True, "core_heads": "query"},
]
ROTARY = Rotary.from_theta(10_000.0, DIM)


def make_learned(names=LEARNED, dtype=torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in rules.shapes(tuple(names), HEADS, KV, DIM).items()
    }


def settings_of(rule: dict, dtype=torch.float64) -> dict:
    return {
        **rule,
        "learned": make_learned(dtype=dtype) if rule.get("learned") else None,
        "rotary": ROTARY,
    }


@pytest.mark.parametrize(
    "backend, learned", [("reference", None), ("packed", {"bias": torch.zeros(4)})]
)
def test_a_batch_of_nothing_but_padding_has_gradients_of_zero(backend, learned):
    x = make_inputs(9)
    settings = {"group_size": 2, "window_size": 3, "core_position": "token", "learned": learned}
    attend = functools.partial(cca_attention, backend=backend, return_lse=True, **settings)
    mask = torch.zeros(1, 9, dtype=torch.bool)
    found = results_and_gradients(attend, x, attention_mask=mask)
    assert (found.pop("lse") == -torch.inf).all()
    assert not any(value.any() for value in found.values())


def oracle(q, k, v, *, group_size, window_size, pooling, learned, rotary, core_heads="kv"):
    """Docs/math.md, eq. 12 and 5, token by token."""
    p = {
        name: (learned or {}).get(name, torch.zeros(shape, dtype=q.dtype))
        for name, shape in rules.shapes(LEARNED, HEADS, KV, DIM).items()
    }
    r, scale, out = HEADS // KV, DIM**-0.5, torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(HEADS):
            kv = h // r
            mates = range(kv * r, kv * r + r)
            cores = []
            for first in range(0, q.shape[2] - group_size + 1, group_size):
                end, weights = first + group_size - 1, []
                for mate in mates if core_heads == "kv" else (h,):
                    asks = (
                        q[b, list(mates), end].mean(0)
                        if pooling == "mean_query"
                        else q[b, mate, end]
                    )
                    scores = torch.stack(
                        [
                            (asks @ k[b, kv, t]) * scale * p["temperature"][mate].exp()
                            + (p["probe"][mate] @ v[b, kv, t]) * scale
                            + p["distance"][mate]
                            * torch.log2(torch.tensor(1.0 + end - t, dtype=q.dtype))
                            for t in range(first, end + 1)
                        ]
                    )
                    weights.append(scores.softmax(0))
                weight = torch.stack(weights).mean(0)
                turned = torch.stack(
                    [
                        rotary.rotate(
                            k[b : b + 1, kv : kv + 1, t : t + 1],
                            torch.tensor([group_size // 2 - o]),
                        )[0, 0, 0]
                        for o, t in enumerate(range(first, end + 1))
                    ]
                )
                cores.append(
                    (weight @ turned * p["key_gain"][kv].exp(), weight @ v[b, kv, first : end + 1])
                )
            for t in range(q.shape[2]):
                j = max(0, (t + 1 - window_size) // group_size)
                keys = torch.stack(
                    [core for core, _ in cores[:j]] + list(k[b, kv, j * group_size : t + 1])
                )
                values = torch.stack(
                    [core for _, core in cores[:j]] + list(v[b, kv, j * group_size : t + 1])
                )
                scores = keys @ q[b, h, t] * scale
                scores[:j] += p["bias"][h]
                out[b, h, t] = scores.softmax(0) @ values
    return out


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "packed"])
def test_both_backends_are_the_equations(rule, backend):
    x, settings = make_inputs(29, dtype=torch.float64), settings_of(rule)
    for g, s in ((4, 6), (5, 3)):
        out = cca_attention(x.q, x.k, x.v, group_size=g, window_size=s, backend=backend, **settings)
        torch.testing.assert_close(
            out, oracle(x.q, x.k, x.v, group_size=g, window_size=s, **settings), rtol=0, atol=1e-12
        )


def test_zero_parameters_are_the_papers_rule():
    x = make_inputs(61, batch_size=2)
    zero = {
        name: torch.zeros_like(value) for name, value in make_learned(dtype=torch.float32).items()
    }
    run = functools.partial(
        cca_attention, x.q, x.k, x.v, group_size=4, window_size=9, rotary=ROTARY
    )
    torch.testing.assert_close(run(learned=zero), run(), rtol=0, atol=2e-6)
    for name in LEARNED:
        moved = run(learned=make_learned((name,), torch.float32))
        assert (moved - run()).abs().max() > 1e-3, name


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_agree_with_the_reference(rule, with_lse):
    x, settings = (
        make_inputs(53, batch_size=2, dtype=torch.float64, with_lse=with_lse),
        settings_of(rule),
    )
    grads = []
    for backend in ("reference", "packed"):
        leaves = {
            name: value.clone().requires_grad_()
            for name, value in (settings["learned"] or {}).items()
        }
        found = results_and_gradients(
            functools.partial(cca_attention, backend=backend, return_lse=True),
            x,
            group_size=3,
            window_size=8,
            **{**settings, "learned": leaves or None},
        )
        if leaves:
            out = cca_attention(
                x.q,
                x.k,
                x.v,
                group_size=3,
                window_size=8,
                backend=backend,
                **{**settings, "learned": leaves},
            )
            found |= dict(
                zip(leaves, torch.autograd.grad((out * x.grad_out).sum(), list(leaves.values())))
            )
        grads.append(found)
    for name in grads[0]:
        torch.testing.assert_close(grads[1][name], grads[0][name], rtol=0, atol=1e-10)
        assert grads[0][name].abs().max() > 1e-6, name


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("core_heads", ["kv", "query"])
@pytest.mark.parametrize("rotates", [False, True])
def test_mean_and_max_are_the_reference_and_share_ties(pooling, core_heads, rotates):
    make = torch.Generator().manual_seed(0)
    q_last, k, v = (
        torch.randn(shape, generator=make, dtype=torch.float64)
        for shape in ((2, 3, 5, DIM), (2, 5, 4, DIM), (2, 5, 4, DIM))
    )
    if not rotates:
        k = k.round()  # many equal maxima
    spec = Spec(4, 1, 1.0, pooling=pooling, core_heads=core_heads)
    spec = spec.replace(rotary=ROTARY if rotates else None)
    leaves = [k.requires_grad_(), v.round().requires_grad_()]
    results = []
    for pool in (functools.partial(rules.pool, learned={}), reference.pool):
        cores = pool(Groups(q_last, *leaves), spec)
        weights = torch.randn(cores.k.shape, generator=torch.Generator().manual_seed(1))
        loss = sum((x * weights).sum() for x in cores)
        results.append([*cores, *torch.autograd.grad(loss, leaves)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_reference_refuses_a_pooling_that_it_does_not_have():
    groups = Groups(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
    with pytest.raises(NotImplementedError, match="must be cca, mean or max .* got 'mean_query'"):
        reference.pool(groups, Spec(2, 1, 1.0, pooling="mean_query"))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_causal_ragged_and_full_where_it_must_be(rule):
    settings = settings_of(rule, torch.float32)
    x = make_inputs(45, batch_size=3)
    run = functools.partial(cca_attention, group_size=4, window_size=7, **settings)
    out = run(x.q, x.k, x.v)
    dense = run(x.q, x.k, x.v, backend="reference")
    for t in (7, 20, 40):
        q, k, v = (
            torch.cat((y[:, :, : t + 1], torch.full_like(y[:, :, t + 1 :], torch.nan)), 2)
            for y in x[:3]
        )
        assert torch.equal(run(q, k, v, backend="reference")[:, :, : t + 1], dense[:, :, : t + 1])
        q, k, v = (
            y.nan_to_num(3.0) for y in (q, k, v)
        )  # fused kernels multiply what they mask by zero
        assert torch.equal(run(q, k, v)[:, :, : t + 1], out[:, :, : t + 1])
    mask = torch.ones(3, 45, dtype=torch.long)
    mask[1, :5], mask[2, :30] = 0, 0
    padded = run(x.q, x.k, x.v, attention_mask=mask)
    for row, pad in enumerate((0, 5, 30)):
        alone = run(*(y[row : row + 1, :, pad:] for y in x[:3]))
        torch.testing.assert_close(padded[row : row + 1, :, pad:], alone, rtol=0, atol=1e-6)
        assert not padded[row, :, :pad].any()
    edges = torch.tensor([0, 11, 45])
    packed = run(*(y[:1] for y in x[:3]), cu_seqlens=edges)
    torch.testing.assert_close(
        packed[:, :, 11:], run(*(y[:1, :, 11:] for y in x[:3])), rtol=0, atol=1e-6
    )
    short = [y[:, :, :10] for y in x[:3]]
    torch.testing.assert_close(
        run(*short), cca_attention(*short, group_size=1, rotary=ROTARY), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("max_length", [None, 80])
def test_prefill_is_decoding(rule, max_length):
    settings, x = settings_of(rule, torch.float32), make_inputs(61, batch_size=2)
    learned = settings.pop("learned")
    config = CCAConfig.paper(
        group_size=4,
        window_size=7,
        pooling=rule["pooling"],
        core_heads=rule.get("core_heads", "kv"),
        learned=tuple(learned or ()),
    )
    mask = torch.ones(2, 61, dtype=torch.long)
    mask[1, :6] = 0
    whole = cca_attention(
        x.q, x.k, x.v, group_size=4, window_size=7, learned=learned, attention_mask=mask, **settings
    )
    for cuts in ((20, 7, 1, 33), (20, *(1,) * 41)):
        layer, at, parts = (
            CompactLayer(config, ROTARY, max_length=max_length, learned=learned),
            0,
            [],
        )
        for n in cuts:
            q, k, v = (y[:, :, at : at + n] for y in x[:3])
            at += n
            parts.append(layer.attend(q, k, v, attention_mask=mask[:, :at] if n > 1 else None))
        torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=0, atol=3e-6)


def test_groups_of_one_are_full_attention_unless_weighed():
    x = make_inputs(40)
    full = cca_attention(x.q, x.k, x.v, group_size=1, window_size=5, rotary=ROTARY)
    for name in LEARNED:
        learned = make_learned((name,), torch.float32)
        one = cca_attention(
            x.q, x.k, x.v, group_size=1, window_size=5, rotary=ROTARY, learned=learned
        )
        layer = CompactLayer(
            CCAConfig.paper(group_size=1, window_size=5, learned=(name,)), ROTARY, learned=learned
        )
        torch.testing.assert_close(layer.attend(x.q, x.k, x.v), one, rtol=0, atol=2e-6)
        assert (name in ("key_gain", "bias")) == bool((one - full).abs().max() > 1e-3), name


def test_pooling_alone_and_triton(device):
    x = make_inputs(24)
    mean = (
        x.q.unflatten(1, (KV, -1))
        .mean(2, keepdim=True)
        .expand(-1, -1, HEADS // KV, -1, -1)
        .flatten(1, 2)
    )
    for one, other in zip(
        pool_core_tokens(x.q, x.k, x.v, group_size=4, pooling="mean_query", rotary=ROTARY),
        pool_core_tokens(mean, x.k, x.v, group_size=4, rotary=ROTARY),
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    pytest.importorskip("triton")
    settings = settings_of(RULES[1], torch.float32)
    q, k, v, grad_out = (one.to(device) for one in (x.q, x.k, x.v, x.grad_out))
    grads = []
    for backend in ("packed", "triton"):
        leaves = {
            name: value.to(device).clone().requires_grad_()
            for name, value in settings["learned"].items()
        }
        out = cca_attention(
            q, k, v, group_size=4, window_size=6, rotary=ROTARY, backend=backend, learned=leaves
        )
        grads.append([out, *torch.autograd.grad((out * grad_out).sum(), list(leaves.values()))])
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# Models
# -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), layers=3)


def ids(n: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(256, (rows, n), generator=torch.Generator().manual_seed(n))


def randomise(model) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".cca." in name:
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)


CONFIG = CCAConfig.paper(group_size=4, window_size=8, learned=LEARNED)


def test_checkpoints_carry_learned_parameters(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = set(model.state_dict())
    plain = model(ids(50)).logits
    with enabled(model, dataclasses.replace(CONFIG, learned=())):
        paper = model(ids(50)).logits
    handle = enable(model, CONFIG)
    torch.testing.assert_close(model(ids(50)).logits, paper, rtol=0, atol=1e-5)
    assert len(set(model.state_dict()) - before) == 3 * len(LEARNED)
    model(ids(50), labels=ids(50), use_cache=False).loss.backward()
    assert all(
        p.grad is not None and p.grad.abs().max() > 0
        for n, p in model.named_parameters()
        if ".cca." in n
    )
    randomise(model)
    trained = model(ids(50)).logits
    assert (trained - paper).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(
        from_pretrained(tmp_path / "saved")(ids(50)).logits, trained, rtol=0, atol=1e-6
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / name).write_bytes((tmp_path.__class__(folder) / name).read_bytes())
    loaded = load(str(tmp_path / "saved"), group_size=8, device="cpu")
    assert loaded.config.learned == LEARNED and loaded.config.group_size == 8
    torch.testing.assert_close(
        loaded.model.model.layers[1].self_attn.cca["probe"],
        model.model.layers[1].self_attn.cca["probe"],
    )
    handle.disable()
    assert set(model.state_dict()) == before and torch.equal(model(ids(50)).logits, plain)
    # settings that promise parameters, and a checkpoint without them
    other = AutoModelForCausalLM.from_pretrained(folder)
    other.save_pretrained(tmp_path / "empty")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "empty")
    other.config.cca = CONFIG.to_dict()
    with pytest.raises(ValueError, match="must hold the learned parameter"):
        enable(other)
    assert "_corecontext" not in other.__dict__ and set(other.state_dict()) == before
    other.config.save_pretrained(tmp_path / "empty")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "empty" / name).write_bytes((tmp_path.__class__(folder) / name).read_bytes())
    with pytest.raises(UserError, match="must hold the learned parameter .*, got none"):
        load(str(tmp_path / "empty"))
    # and one that has those of half the heads, as one of two processes that share them does
    path = tmp_path / "saved/model.safetensors"
    save_file(
        {
            name: x[: len(x) // 2].clone() if ".cca." in name else x
            for name, x in load_file(path).items()
        },
        path,
        metadata={"format": "pt"},
    )
    with pytest.raises(
        UserError, match=r"must hold .*temperature' \[4\] that its settings name, got \[2\]"
    ):
        load(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        CCAConfig.paper(window_size=8, layer_group_sizes=(2, 4, 8)),
        CCAConfig.paper(group_size=4, window_size=8, pooling="mean_query"),
    ],
    ids=["learned", "by layer", "mean_query"],
)
def test_models_generate_what_they_would_recompute(folder, config):
    model = from_pretrained(folder, config)
    randomise(model)
    prompt = ids(30)
    wanted = prompt
    for _ in range(12):
        wanted = torch.cat((wanted, model(wanted, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), wanted)
    assert torch.equal(
        model.generate(prompt, cache_implementation="static", disable_compile=True, **options),
        wanted,
    )
    assert (
        Engine(model, chunk_size=7).generate(prompt, max_new_tokens=12)[0]
        == wanted[0, 30:].tolist()
    )


def test_sizes_by_layer_are_sizes_of_layers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = CCAConfig.paper(window_size=8, layer_group_sizes=(1, 4, 8))
    with enabled(model, config) as handle, torch.no_grad():
        cache = returned_cache(model(ids(64), use_cache=True))
        assert [layer.compact.group_size for layer in cache.layers] == [1, 4, 8]
        handle.configure(group_size=2)
        cache = returned_cache(model(ids(64), use_cache=True))
        assert [layer.compact.group_size for layer in cache.layers] == [2, 2, 2]
    with (
        enabled(model, config.replace(layer_group_sizes=(4, 4, 4))),
        enabled_same(model, folder) as same,
    ):
        assert torch.equal(model(ids(64)).logits, same(ids(64)).logits)


class enabled_same:
    """The same model with one g for all."""

    def __init__(self, model, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def __enter__(self):
        enable(self.model, CCAConfig.paper(group_size=4, window_size=8))
        return self.model

    def __exit__(self, *error):
        pass


def test_mistakes_are_said(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    for settings, message in (
        ({"learned": ("temprature",)}, "Did you mean 'temperature'"),
        ({"learned": ("bias",), "pooling": "mean"}, "others have no weights to learn"),
        ({"learned": "bias"}, "learned must be a tuple"),
        ({"layer_group_sizes": (4, 0)}, "layer_group_sizes must be at least 1"),
        ({"layer_group_sizes": (4,), "num_groups": 3}, "both set g"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            CCAConfig.paper(**settings)
    with pytest.raises(ValueError, match="each of the 3 full-attention layers, got 2"):
        enable(model, CCAConfig.paper(layer_group_sizes=(4, 4)))
    assert "_corecontext" not in model.__dict__
    with enabled(model, CONFIG) as handle, pytest.raises(ValueError, match="learned must stay"):
        handle.configure(learned=())
    x = make_inputs(20)
    for learned, message in (
        ({"biass": torch.zeros(4)}, "learned must hold"),
        ({"bias": torch.zeros(3)}, r"must have shape \[4\], got \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            cca_attention(x.q, x.k, x.v, rotary=ROTARY, learned=learned)


def test_compiled_code_leaves_the_rule_to_torch():
    x, settings = make_inputs(40), settings_of(RULES[1], torch.float32)
    run = functools.partial(cca_attention, group_size=4, window_size=6, **settings)
    compiled = torch.compile(lambda q, k, v: run(q, k, v).sum(1), backend="eager")
    torch.testing.assert_close(
        compiled(x.q, x.k, x.v), run(x.q, x.k, x.v).sum(1), rtol=0, atol=1e-5
    )
