"""The decoding step in Triton against the reference: on the GPU where there is one, else in
Triton's interpreter."""

import itertools

import pytest
import torch
import torch._dynamo.testing

pytest.importorskip("triton", reason="the triton backend needs triton")

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import CompactLayer
from corecontext.cache.eight_bit import encode
from corecontext.ops.spec import FetchSlots, RawSlots, Slots, Spec
from corecontext.ops.triton import backend
from corecontext.ops.triton.decode import plain_step, step_with_fetch
from corecontext.ops.triton.decode.plain_step import decode_step
from corecontext.ops.triton.tiles import chip_of, decode_splits, decode_tiles
from corecontext.visibility import num_visible_cores

pytestmark = pytest.mark.usefixtures("default_device")
GPU = torch.cuda.is_available()
# The interpreter gets bfloat16 wrong. On the GPU every dtype runs.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
WORST = {
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # of the largest row's norm, in any row


def rotary_of(dim, share=1.0, interleaved=False):
    """Frequencies for the first part of the dimensions."""
    return Rotary(Rotary.from_theta(100.0, dim).inv_freq[: int(dim * share) // 2], interleaved)


def tensors(batch, heads, kv_heads, length, dim, dtype, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    default = torch.get_default_device()
    return [
        # Each has strides of its own.
        torch.randn(batch, h, length, dim + gap, generator=generator, device="cpu").to(
            default, dtype
        )[..., :dim]
        for h, gap in ((heads, 0), (kv_heads, 4), (kv_heads, 8))
    ]


def reference(config, rotary, qkv, mask=None, softcap=None):
    c = config
    return cca_attention(
        *(x.double() for x in qkv),
        group_size=c.group_size,
        window_size=c.window_size,
        core_position=c.core_position,
        core_mass=c.core_mass,
        sink_size=c.sink_size,
        rotary=rotary,
        attention_mask=mask,
        softcap=softcap,
        backend="reference",
    )


def decoded(layer, qkv, prefill, mask=None, before=None, **options):
    """Outputs of a prefill and of single tokens after it; `before` is called with each step's
    slot."""
    part = None if mask is None else mask[:, :prefill]
    outs = [layer.attend(*(x[:, :, :prefill] for x in qkv), attention_mask=part, **options)]
    assert layer._step is backend.decode_step
    for t in range(prefill, qkv[0].shape[2]):
        if before:
            before(t)
        outs.append(layer.attend(*(x[:, :, t : t + 1] for x in qkv), **options))
    return torch.cat(outs, 2)


def assert_rows(got, expected, dtype):
    """A single bound for a tensor would hide a wrong row."""
    assert got.isfinite().all()
    rows = (got.double() - expected).norm(dim=-1)
    assert (rows <= WORST[dtype] * expected.norm(dim=-1).amax()).all(), f"off by {rows.max():.2e}"


#        g   s   H  Hkv D   prefill length, settings
CASES = [
    (4, 9, 4, 2, 16, 21, 34, {}),
    (5, 12, 2, 2, 16, 1, 24, {}),
    (16, 4, 2, 1, 16, 13, 37, {}),
    (1, 5, 2, 1, 16, 7, 19, {}),
    (7, 3, 3, 1, 80, 20, 36, {}),
    (5, 6, 3, 1, 16, 13, 31, {}),
    (5, 8, 2, 1, 16, 13, 31, {}),
    (4, 9, 2, 1, 18, 13, 31, {"core_position": "token"}),
    (40, 3, 2, 1, 96, 35, 45, {}),
    (4, 5, 4, 2, 16, 6, 24, {"sink_size": 8}),
    (5, 6, 2, 1, 16, 1, 28, {"sink_size": 10}),
]
if GPU:
    CASES += [
        (16, 100, 32, 8, 128, 3000, 3050, {}),
        (16, 64, 8, 8, 128, 1000, 1040, {}),
        (16, 33, 64, 1, 128, 500, 540, {}),
        (300, 50, 4, 2, 256, 890, 905, {}),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_step_of_every_row(case, softcap, dtype):
    g, s, heads, kv_heads, dim, prefill, length, settings = case
    # Whatever the dtype, scores are float32: half precision has its own tiles alone.
    half = dtype != torch.float32
    if softcap:
        chosen = () if half else (CASES[5], CASES[7])
    else:
        chosen = (CASES[2], CASES[4], CASES[9], CASES[10]) if half else CASES
    if not GPU and case not in chosen:
        pytest.skip("the interpreter is slow")
    config = CCAConfig.paper(g, s, backend="triton", **settings)
    rotary = rotary_of(dim, interleaved=g == 5) if g != 7 else rotary_of(dim, 0.5)
    qkv = tensors(2, heads, kv_heads, length, dim, dtype)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, : 3 if prefill > 3 else 0] = 0
    fixed = (softcap is None) == (length % 2 == 0)
    layer = CompactLayer(
        config, rotary, max_length=length + 2 if fixed else None, rollback=3 if fixed else 0
    )
    out = decoded(layer, qkv, prefill, mask, softcap=softcap)
    expected = reference(config, rotary, qkv, mask, softcap)
    assert_rows(out, expected, dtype)
    assert layer.seq_len == length


# The second walks its groups in two blocks. The group that closes at the first step is seen.
@pytest.mark.parametrize(
    "g, heads, kv_heads, dim, dtype, settings",
    [
        (5, 4, 2, 16, DTYPES[-1], {"sink_size": 5}),
        (12, 3, 1, 96, torch.float32, {}),
    ],
)
def test_masses_are_computed_and_added(g, heads, kv_heads, dim, dtype, settings):
    config = CCAConfig.paper(g, 3, backend="triton", core_mass=True, **settings)
    qkv = tensors(1, heads, kv_heads, 2 * g + 6, dim, dtype)
    layer = CompactLayer(config, rotary_of(dim), max_length=2 * g + 6)
    out = decoded(layer, qkv, 2 * g - 1)
    assert_rows(out, reference(config, rotary_of(dim), qkv), dtype)
    without = reference(config.replace(core_mass=False), rotary_of(dim), qkv)
    with pytest.raises(AssertionError, match="off by"):
        assert_rows(out, without, dtype)


def test_entries_are_shared_by_several_programs():
    chip = chip_of(torch.zeros(()).device)
    for dtype in (torch.float32, torch.float16):
        assert decode_splits(chip, 4, 60, decode_tiles(chip, dtype, 2, 16).block_n) > (
            0 if GPU else 1
        )
    assert decode_splits(chip, 10**6, 10**6, 64) == 1


@pytest.mark.parametrize("prefill, length", [(3, 31), (30, 46)])
def test_nothing_unseen_is_read(prefill, length):
    g, s = 4, 9
    layer, qkv = (
        CompactLayer(CCAConfig.paper(g, s, backend="triton"), rotary_of(16), max_length=99),
        tensors(1, 4, 2, length, 16, torch.float32),
    )

    def poison(t):
        """NaN in all that the step at t does not see, but for core tokens that a later one does."""
        ring, low = layer.ring_size, num_visible_cores(t, g, s) * g
        unseen = torch.ones(layer.keys.shape[2], dtype=torch.bool)
        unseen[ring : ring + t // g] = False
        unseen[[p % ring for p in range(low, t)]] = False
        layer.keys[:, :, unseen] = float("nan")
        layer.values[:, :, unseen] = float("nan")

    out = decoded(layer, qkv, prefill, before=poison)
    assert_rows(out, reference(layer.config, layer.spec.rotary, qkv), torch.float32)


def test_the_same_bits_from_run_to_run():
    config, qkv = CCAConfig.paper(4, 9, backend="triton"), tensors(2, 2, 1, 30, 16, torch.float16)
    runs = []
    for _ in range(2):
        layer = CompactLayer(config, rotary_of(16), max_length=60)
        runs.append((decoded(layer, qkv, 20), layer.keys, layer.values))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_crop_state_and_rows_go_with_it():
    config, qkv = CCAConfig.paper(4, 9, backend="triton"), tensors(2, 2, 1, 44, 16, torch.float32)
    expected = reference(config, rotary_of(16), qkv)
    for fixed in (None, 60):
        layer = CompactLayer(config, rotary_of(16), max_length=fixed, rollback=6)
        decoded(layer, [x[:, :, :36] for x in qkv], 31)
        layer.crop(5)
        other = CompactLayer(config, rotary_of(16), max_length=fixed, rollback=6)
        other.load_state_dict(layer.state_dict())
        for one, rows in ((layer, [0, 1]), (other, [1, 1])):
            one.select(torch.tensor(rows))
            for t in range(31, 37):
                out = one.attend(*(x[rows, :, t : t + 1] for x in qkv))
                assert_rows(out, expected[rows, :, t : t + 1], torch.float32)


def test_strided_inputs():
    config, qkv = CCAConfig.paper(4, 9, backend="triton"), tensors(2, 4, 2, 30, 16, torch.float32)
    layer = CompactLayer(config, rotary_of(16))
    expected = reference(config, rotary_of(16), qkv)
    layer.attend(*(x[:, :, :24] for x in qkv))
    for t in range(24, 30):
        # As one projection gives them.
        step = torch.cat([x[:, :, t : t + 1] for x in qkv], 1).transpose(1, 2).flatten(2)
        q, k, v = (x.unflatten(2, (-1, 16)).transpose(1, 2) for x in step.split((64, 32, 32), 2))
        assert_rows(layer.attend(q, k, v), expected[:, :, t : t + 1], torch.float32)


def test_what_has_no_slot_is_not_written():
    g, s, ring = 4, 5, 8
    memory = [torch.full((2, ring, 16), 7.0) for _ in range(2)]
    keys, values = (x[:1].view(1, 1, ring, 16) for x in memory)
    q, k, v = tensors(1, 2, 1, 1, 16, torch.float32)
    spec = Spec(g, s, scale=0.25)
    seen = torch.tensor(3)
    slots = Slots(keys, values, seen, torch.tensor([0]), ring)
    decode_step(q, k, v, slots, spec)  # closes group 0, which has no slot
    assert seen == 4
    assert torch.equal(keys[0, 0, 3], k[0, 0, 0])
    assert torch.equal(values[0, 0, 3], v[0, 0, 0])
    decode_step(q, k, v, slots._replace(seen=4, pad=torch.tensor([5])), spec)  # padding
    for x in (*memory, keys[0], values[0]):
        assert (x.flatten(0, 1)[[0, 1, 2, 4, 5, 6, 7]] == 7).all() and (memory[0][1] == 7).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_token_halfway_between_two_codes_gets_the_even_one(kind):
    """The largest number makes the scale 1, so that the others are halfway between codes."""
    halves = {
        "int8": [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5],
        "fp8": [448, 17, 19, 21, -17, -19, 1.0625, 1.1875],
    }[kind]
    x = torch.tensor([halves * 2]).view(1, 1, 1, 16)
    buffers = [torch.zeros(1, 1, 8, 16, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(1, 1, 8, 1) for _ in range(2)]
    pad = torch.zeros(1, dtype=torch.int64)
    slots = Slots(*buffers, 0, pad, 8, None, *scales, kind)
    decode_step(x, x, -x, slots, Spec(4, 5, scale=0.25))
    for stored, scale, token in zip(buffers, scales, (x, -x)):
        assert scale[0, 0, 0] == 1
        assert torch.equal(stored[0, 0, 0], encode(token, kind)[0].flatten())


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_compiles_as_one_graph(interleaved):
    """The step at 27 closes a group: its core token is the one that an append pools."""
    config, qkv = CCAConfig.paper(4, 9, backend="triton"), tensors(2, 4, 2, 29, 16, torch.float32)
    rotary = rotary_of(16, interleaved=interleaved)
    layer, appended = (CompactLayer(config, rotary, max_length=40) for _ in range(2))
    expected = reference(config, rotary, qkv)
    appended.attend(*qkv)
    layer.attend(*(x[:, :, :26] for x in qkv))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda q, k, v: 2 * layer.attend(q, k, v), fullgraph=True, backend=counter)
    with torch.no_grad():
        for t in range(26, 29):
            assert_rows(
                step(*(x[:, :, t : t + 1] for x in qkv)) / 2,
                expected[:, :, t : t + 1],
                torch.float32,
            )
    assert counter.frame_count == 1 and layer.seq_len == 29
    for stored, whole in zip(layer.buffers, appended.buffers):
        cores = slice(layer.ring_size, layer.ring_size + 7)
        assert_rows(stored[:, :, cores], whole[:, :, cores].double(), torch.float32)


def described(x):
    """Return a nested value whose parts compare: a tensor as its numbers, settings as a dict."""
    if isinstance(x, torch.Tensor):
        return str(x.dtype), x.tolist()
    if isinstance(x, (Spec, Rotary)):
        return {name: described(value) for name, value in vars(x).items()}
    return [*map(described, x)] if isinstance(x, (tuple, list)) else x


@pytest.mark.parametrize(
    "sinks, softcap, interleaved, on_device, with_raw, extras",
    [*itertools.product((0, 8), (None, 3.0), (None, False, True), (0, 1), (0, 1, 2), range(4))],
)
def test_an_operator_of_a_graph_passes_all_on(
    sinks, softcap, interleaved, on_device, with_raw, extras, monkeypatch
):
    """Whatever a step takes outside a graph, it takes through the operator."""
    new = (torch.tensor([0.5 + i]) for i in itertools.count())
    q, k, v, keys, values, key_scales, value_scales, masses, inv_freq = itertools.islice(new, 9)
    rotary = None if interleaved is None else Rotary(inv_freq, interleaved)
    settings = {} if not with_raw else {"fetch_groups": 6, "fetch_index": "bits:2"}
    spec = Spec(4, 9, 0.25, sink_size=sinks, softcap=softcap, rotary=rotary, **settings)
    scales = (key_scales, value_scales) if extras % 2 and not with_raw else (None, None)
    raw = None
    if with_raw:
        raw = RawSlots(*itertools.islice(new, 5), tuple(itertools.islice(new, 2)))
        raw = raw._replace(slots=FetchSlots(*itertools.islice(new, 6)) if with_raw > 1 else None)
    slots = Slots(
        *(keys, values, torch.tensor(7) if on_device else 7, torch.tensor([3]), 12),
        None if rotary is None else (inv_freq, next(new)),
        *(*scales, "auto" if scales[0] is None else "int8", masses if extras // 2 else None, raw),
    )
    taken = []
    module = step_with_fetch if with_raw else plain_step
    monkeypatch.setattr(module, "_decode", lambda *args: taken.append(args) or torch.zeros(1))
    step = step_with_fetch.fetch_step if with_raw else decode_step
    for in_graph in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda in_graph=in_graph: in_graph)
        step(q, k, v, slots, spec)
    assert described(taken[0]) == described(taken[1])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="graphs need a GPU")
def test_a_captured_step_replays():
    g, s, prefill, length = 16, 64, 700, 740
    config, qkv = CCAConfig.paper(g, s), tensors(2, 8, 2, length, 128, torch.bfloat16)
    layer = CompactLayer(config, rotary_of(128), max_length=length)
    expected = reference(config, rotary_of(128), qkv)
    layer.attend(*(x[:, :, :prefill] for x in qkv))
    new = [x[:, :, prefill : prefill + 1].clone() for x in qkv]
    layer.attend(*new)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.attend(*new)
    for t in range(prefill + 1, length):
        for buffer, x in zip(new, qkv):
            buffer.copy_(x[:, :, t : t + 1])
        graph.replay()
        assert_rows(out, expected[:, :, t : t + 1], torch.bfloat16)
