"""The compact cache in 8 bits: every law of the cache among rounded tokens, in plain torch and in
the Triton step."""

import math

import pytest
import torch

from corecontext import CCAConfig, Rotary
from corecontext.cache import CompactKVCache, CompactLayer
from corecontext.cache.eight_bit import LARGEST, decode, encode
from corecontext.ops import reference
from corecontext.ops.spec import Cores, Groups, Spec, Tokens
from corecontext.visibility import local_start, num_visible_cores

pytestmark = pytest.mark.usefixtures("default_device")
D = 16
ROTARY = Rotary.from_theta(100.0, D)
KINDS = sorted(LARGEST)


def qkv(batch, heads, kv_heads, length, seed=0, dtype=torch.float64):
    generator = torch.Generator("cpu").manual_seed(seed)
    default = torch.get_default_device()
    return [
        torch.randn(batch, h, length, D, generator=generator, device="cpu").to(default, dtype)
        for h in (heads, kv_heads, kv_heads)
    ]


def rounded(x, kind):
    return decode(*encode(x, kind), kind, x.dtype)


def truth(config, q, k, v, mask=None):
    """Position by position: rounded tokens, pooled, the core tokens rounded again."""
    g, s, n, kind = config.group_size, config.window_size, config.sink_size, config.cache_dtype
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        pad = 0 if mask is None else int((mask[row] == 0).sum())
        own_q = q[row, :, pad:].unflatten(0, (k.shape[1], -1))
        own_k, own_v = (rounded(x[row, :, pad:], kind) for x in (k, v))
        groups = own_k.shape[1] // g
        grouped = [x[:, : groups * g].unflatten(1, (groups, g)) for x in (own_k, own_v)]
        spec = Spec.of(config, ROTARY, D**-0.5)
        q_last = own_q[:, :, g - 1 : groups * g : g]
        cores = reference.pool(Groups(q_last, *grouped), spec)
        core_k, core_v = (rounded(x, kind) for x in cores)
        masses = None
        if config.core_mass:
            masses = reference.mass_of(Groups(q_last, *grouped), spec)
        for t in range(own_k.shape[1]):
            start, seen = local_start(t, g, s), num_visible_cores(t, g, s)
            start = 0 if n else start  # the reference has the first tokens in its mask
            part, _ = reference.attend(
                Tokens(
                    own_q[:, :, t : t + 1],
                    own_k[:, start : t + 1],
                    own_v[:, start : t + 1],
                    q_start=t,
                    k_start=start,
                ),
                Cores(core_k[:, :, n // g : seen], core_v[:, :, n // g : seen]),
                spec,
                None if masses is None else masses[:, :, n // g : seen],
            )
            out[row, :, pad + t] = part.flatten(0, 1)[:, 0]
    return out


def fed(layer, tensors, sizes, mask=None):
    outs, start = [], 0
    for size in sizes:
        end = start + size
        part = None if mask is None or (size == 1 and start > 30) else mask[:, :end]
        outs.append(layer.attend(*(x[:, :, start:end] for x in tensors), attention_mask=part))
        start = end
    return torch.cat(outs, 2)


def test_codes_are_the_nearest():
    x = torch.cat((torch.randn(50, 64), 1e-3 * torch.randn(50, 64), torch.zeros(1, 64)))
    for kind in KINDS:
        codes, scale = encode(x, kind)
        assert (
            codes.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (101, 1)
        )
        every = torch.arange(256, dtype=torch.uint8).view(torch.int8)
        numbers = decode(every, torch.ones(1), kind, torch.float32)
        numbers = numbers[numbers.isfinite() & (numbers.abs() <= LARGEST[kind])]
        best = (x[:, :, None] - numbers * scale[:, :, None]).abs().amin(-1)
        assert (
            (x - decode(codes, scale, kind, torch.float32)).abs() <= best * (1 + 1e-4) + 1e-9
        ).all()
        assert (decode(*encode(x[-1:], kind), kind, torch.float16) == 0).all()
        nan = encode(torch.tensor([[1.0, math.nan]]), kind)
        assert decode(*nan, kind, torch.float32).isnan().all()  # shows, instead of a wrong number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"sink_size": 8}],
    ids=str,
)
def test_any_way_of_appending_is_the_truth_of_rounded_tokens(kind, settings):
    config, tensors = CCAConfig.paper(4, 9, cache_dtype=kind, **settings), qkv(3, 4, 2, 70)
    mask = torch.ones(3, 70, dtype=torch.long)
    mask[1, :3], mask[2, :25] = 0, 0
    expected = truth(config, *tensors, mask)
    for max_length in (None, 72):
        for sizes in ([70], [1] * 70, [20, 7, 1, 1, 24, 17]):
            layer = CompactLayer(config, ROTARY, max_length=max_length)
            torch.testing.assert_close(
                fed(layer, tensors, sizes, mask), expected, rtol=0, atol=1e-11
            )


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_tell_the_truth(kind):
    config, tensors = CCAConfig.paper(4, 9, cache_dtype=kind), qkv(2, 4, 2, 70, dtype=torch.float32)
    for max_length in (None, 70):
        layer = CompactLayer(config, ROTARY, max_length=max_length)
        fed(layer, tensors, [70])
        assert layer.nbytes == layer.allocated_bytes == (70 // 4 + 12) * 2 * 2 * 2 * (D + 4)
        assert layer.keys.dtype == torch.int8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sinks", [0, 8])
def test_crop_shrink_select_and_state(kind, sinks):
    config, tensors = CCAConfig.pooling(4, 9, cache_dtype=kind, sink_size=sinks), qkv(2, 4, 2, 70)
    expected = truth(config, *tensors)
    cache = CompactKVCache(1, config, ROTARY)
    layer = cache.layers[0]
    fed(layer, tensors, [40])
    layer.attend(*(x[:, :, 40:50] for x in qkv(2, 4, 2, 70, seed=1)))  # a draft, taken back
    layer.crop(10)
    other = CompactKVCache(1, config, ROTARY, max_length=90)
    other.load_state_dict(cache.state_dict())
    assert other.nbytes == cache.nbytes
    layer.select(torch.tensor([1, 0]))
    layer.repeat(2)
    for one, rows in ((layer, [1, 1, 0, 0]), (other.layers[0], [0, 1])):
        out = torch.cat(
            [one.attend(*(x[rows][:, :, t : t + 1] for x in tensors)) for t in range(40, 55)], 2
        )
        torch.testing.assert_close(out, expected[rows][:, :, 40:55], rtol=0, atol=1e-11)
    smaller = truth(config.replace(window_size=3), *tensors)
    other.shrink_window(3)
    out = other.layers[0].attend(*(x[:, :, 55:] for x in tensors))
    torch.testing.assert_close(out, smaller[:, :, 55:], rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match="the state must come from a cache with config"):
        CompactLayer(config.replace(cache_dtype="auto"), ROTARY).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_models_generate_with_it(kind):
    from families import tiny_model, tokens
    from torch.nn.functional import pad

    import corecontext
    from corecontext.inference import Engine

    model = tiny_model()
    ids = torch.cat([pad(tokens(1, n, seed=n), (41 - n, 0)) for n in (41, 22, 3)])
    mask = torch.cat([pad(torch.ones_like(tokens(1, n)), (41 - n, 0)) for n in (41, 22, 3)])
    with corecontext.enabled(model, CCAConfig.paper(5, 13, cache_dtype=kind)):
        made = [
            Engine(model, static=static, chunk_size=size).generate(ids, mask, max_new_tokens=12)
            for static, size in ((False, None), (True, 7), (True, 1))
        ]
        assert made[0] == made[1] == made[2]
        assert (
            made[0]
            == model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)[
                :, 41:
            ].tolist()
        )
        alone = [
            Engine(model).generate(tokens(1, n, seed=n), max_new_tokens=12)[0] for n in (41, 22, 3)
        ]
        assert made[0] == alone
        assert model.config.cca["cache_dtype"] == kind


def test_unknown_kinds_are_refused():
    with pytest.raises(
        ValueError, match="^cache_dtype must be one of 'auto', 'int8', 'fp8', got 'int4'"
    ):
        CCAConfig.paper(cache_dtype="int4")


CASES = [
    (4, 9, 4, 2, 21, 26, {}),
    (5, 8, 2, 1, 13, 21, {}),
    (1, 5, 2, 1, 7, 15, {}),
    (4, 5, 2, 1, 6, 18, {"sink_size": 8}),
    (5, 6, 2, 1, 13, 21, {"core_mass": True}),
]


# How codes are read and where rows lie are apart in the kernel: one kind has every case.
@pytest.mark.parametrize(
    "kind, case",
    [*(("int8", case) for case in CASES), ("fp8", CASES[0]), ("fp8", CASES[3]), ("fp8", CASES[4])],
    ids=str,
)
def test_the_triton_step_stores_and_sees_the_same(kind, case):
    pytest.importorskip("triton", reason="the triton backend needs triton")
    g, s, heads, kv_heads, prefill, length, settings = case
    config = CCAConfig.paper(g, s, cache_dtype=kind, **settings)
    qkv32 = qkv(2, heads, kv_heads, length, dtype=torch.float32)
    outs = []
    for backend, max_length in (("packed", None), ("triton", length + 2)):
        layer = CompactLayer(config.replace(backend=backend), ROTARY, max_length=max_length)
        outs.append((fed(layer, qkv32, [prefill] + [1] * (length - prefill)), layer))
    (plain, a), (ours, b) = outs
    assert b._step is not None
    used = a.used
    if config.core_mass:
        torch.testing.assert_close(*(x.mass_buffer[:, :, :used] for x in (a, b)), rtol=0, atol=1e-5)
    same = [(x[:, :, :used] == y[:, :, :used]).float().mean() for x, y in zip(a.buffers, b.buffers)]
    assert same[0] > 0.99 and same[1] > 0.99  # a sum in another order may round to the next code
    torch.testing.assert_close(plain, ours, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_triton_step_in_half_precision(kind):
    pytest.importorskip("triton", reason="the triton backend needs triton")
    # The interpreter gets bfloat16 wrong.
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float16
    config, tensors = (
        CCAConfig.paper(4, 9, cache_dtype=kind, backend="triton"),
        qkv(1, 4, 2, 34, dtype=dtype),
    )
    layer = CompactLayer(config, ROTARY, max_length=50)
    out = fed(layer, tensors, [24] + [1] * 10)
    expected = truth(config, *(x.double() for x in tensors))
    worst = (out.double() - expected).norm(dim=-1).amax() / expected.norm(dim=-1).amax()
    assert worst < 0.02
