"""The fused decoding step with fetch against the reference and the step in plain PyTorch."""

import contextlib

import pytest
import torch
import torch._dynamo.testing

pytest.importorskip("triton", reason="the triton backend needs triton")

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import CompactLayer
from corecontext.ops.spec import Spec
from corecontext.ops.triton import backend
from corecontext.ops.triton.decode import plan as fetch_decode_plan
from corecontext.ops.triton.decode import step_with_fetch as fetch_decode
from corecontext.ops.triton.tiles import Chip

pytestmark = pytest.mark.usefixtures("default_device")
GPU = torch.cuda.is_available()
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter gets bfloat16 wrong
WORST = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def tensors(batch, heads, kv_heads, length, dim, dtype=torch.float32, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    default = torch.get_default_device()
    return [
        # Each has strides of its own.
        torch.randn(batch, h, length, dim + gap, generator=generator, device="cpu").to(
            default, dtype
        )[..., :dim]
        for h, gap in ((heads, 0), (kv_heads, 4), (kv_heads, 8))
    ]


def reference(config, rotary, qkv, mask=None, backend="reference"):
    names = ("window_size", "sink_size", "core_mass", "fetch_groups", "fetch_index")
    return cca_attention(
        *(x.double() for x in qkv),
        group_size=config.group_size,
        core_position=config.core_position,
        rotary=rotary,
        attention_mask=mask,
        backend=backend,
        **{name: getattr(config, name) for name in names},
    )


def fed(layer, qkv, prefill, mask=None):
    """Outputs of single tokens after a prefill."""
    part = None if mask is None else mask[:, :prefill]
    layer.attend(*(x[:, :, :prefill] for x in qkv), attention_mask=part)
    outs = []
    for t in range(prefill, qkv[0].shape[2]):
        assert layer._slots().raw is not None and layer._step is backend.fetch_step
        outs.append(layer.attend(*(x[:, :, t : t + 1] for x in qkv)))
    return torch.cat(outs, 2)


def assert_rows(out, expected, dtype, other_choices=0.0):
    """Every row is near, but for the share of rows that may fetch other groups: of many groups
    some have scores that are equal but for rounding."""
    rows = (out.double() - expected).norm(dim=-1)
    far = rows > WORST[dtype] * expected.norm(dim=-1).amax()
    assert far.double().mean() <= other_choices, f"off by {rows.max():.2e}"


RECIPE = {"fetch_index": "bits:2", "core_mass": True, "store": "host"}
CASES = {
    # An index is written at the first step, and read from the fifth on.
    "kv": (4, 8, 4, 2, 16, 2, 26, 32, {"core_mass": True, "sink_size": 4}),
    "half": (4, 8, 4, 2, 16, 3, 38, 44, {"core_mass": True, "store": "host"}),
    "one part": (5, 11, 7, 1, 18, 2, 43, 46, {"fetch_index": "parts:1:4", "sink_size": 5}),
    "more than there are": (4, 9, 1, 1, 16, 9, 30, 32, {"fetch_index": "bits:1"}),
    # The groups and index of the default recipe of `corecontext train`.
    "half, recipe": (32, 64, 3, 1, 64, 2, 256, 262, {**RECIPE, "sink_size": 16}),
    # The centre and all of the index come from steps.
    "short": (4, 8, 1, 1, 16, 1, 2, 26, {"core_position": "token"}),
}
if GPU:
    sizes = (16, 128, 32, 8, 128, 8, 600, 700)
    CASES |= {
        "half, large": (*sizes, {"core_mass": True, "sink_size": 16}),
        "half, bits": (*sizes, {"fetch_index": "bits:2"}),
        "half, host": (*sizes, {"core_mass": True, "sink_size": 16, "store": "host"}),
        "half, 4 bits": (16, 128, 14, 2, 64, 8, 300, 380, {"fetch_index": "parts:4:4"}),
        "large": (*sizes, {}),
    }


@pytest.mark.parametrize("case", CASES)
def test_every_step_of_every_row(case):
    g, s, heads, kv_heads, dim, k, prefill, length, settings = CASES[case]
    config = CCAConfig.paper(g, s, backend="triton", prefill="fetch", fetch_groups=k, **settings)
    dtype = HALF if "half" in case else torch.float32
    rotary = Rotary.from_theta(100.0, dim)
    qkv = tensors(2 if case == "kv" else 1, heads, kv_heads, length, dim, dtype)
    mask = None
    if case == "kv":
        mask = torch.arange(length) >= torch.tensor([[0], [3]])
        # Scores far below 0 on the first query heads: their sums of exponentials are below 1.
        qkv[0][:, ::2, :, -1] = -16
        qkv[1][..., -1] = 4
    layer = CompactLayer(config, rotary, max_length=None if case == "one part" else length)
    out = fed(layer, qkv, prefill, mask)
    expected = reference(config, rotary, qkv, mask)[:, :, prefill:]
    assert_rows(out, expected, dtype, 0.0 if length < 100 or dtype == torch.float32 else 0.05)
    # What the steps have stored is what a prompt stores.
    other = CompactLayer(config, rotary, max_length=length)
    other.attend(*qkv, attention_mask=mask)
    stores = (layer.store.used(layer.seq_len), other.store.used(length))
    for mine, wanted in zip(*stores):
        same = (mine - wanted.to(mine.dtype)).abs() <= 1e-3 * wanted.abs().max()
        assert same.float().mean() > 0.999


@pytest.mark.parametrize("slots", [None, 3])
def test_attention_is_captured_beside_the_choice(slots, monkeypatch):
    launched = []
    launch = fetch_decode.launch
    merge = fetch_decode.merge

    class Stream:
        """A stream of a GPU, by name."""

        current = "main"

        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            launched.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def used(stream):
        monkeypatch.setattr(Stream, "current", stream.name)
        yield

    def recorded(kernel, *arguments, **constants):
        launched.append((Stream.current, kernel.fn.__name__))
        launch(kernel, *arguments, **constants)

    def merged(*arguments, **constants):
        launched.append((Stream.current, "merge"))
        merge(*arguments, **constants)

    monkeypatch.setattr(fetch_decode, "is_captured", lambda device: True)
    monkeypatch.setattr(fetch_decode, "_side_stream", lambda device: Stream("side"))
    monkeypatch.setattr(fetch_decode, "launch", recorded)
    monkeypatch.setattr(fetch_decode, "merge", merged)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", used)
    store = {} if slots is None else {"store": "host", "fetch_slots": slots}
    config = CCAConfig.paper(
        4, 8, backend="triton", prefill="fetch", fetch_groups=3, core_mass=True, **store
    )
    rotary = Rotary.from_theta(100.0, 16)
    qkv = tensors(1, 4, 2, 34, 16)
    layer = CompactLayer(config, rotary, max_length=34)
    out = fed(layer, qkv, 33)
    assert_rows(out, reference(config, rotary, qkv)[:, :, 33:], torch.float32)
    attend = ["main waits for side", ("main", "attend_compact_kernel")]
    score = [("side", "score_kernel")]
    # Attention goes on while groups are loaded into slots.
    first = [*attend, *score] if slots is None else [*score, *attend]
    assert launched == [
        "side waits for main",
        *first,
        ("side", "select_kernel"),
        ("side", "attend_chosen_kernel"),
        "main waits for side",
        ("main", "merge"),
    ]


def test_programs_share_groups_and_entries(monkeypatch):
    """As on a GPU, where several programs score groups, attend and merge."""
    monkeypatch.setattr(fetch_decode_plan, "scoring_splits", lambda *sizes: 3)
    config = CCAConfig.paper(4, 8, backend="triton", prefill="fetch", fetch_groups=5)
    rotary = Rotary.from_theta(100.0, 16)
    qkv = tensors(1, 2, 1, 34, 16)
    layer = CompactLayer(config, rotary, max_length=34)
    out = fed(layer, qkv, 33)
    assert_rows(out, reference(config, rotary, qkv)[:, :, 33:], torch.float32)


def test_more_groups_than_a_program_holds_are_scored_in_plain_pytorch(monkeypatch):
    config = CCAConfig.paper(4, 8, backend="triton", prefill="fetch", fetch_groups=2)
    layer = CompactLayer(config, Rotary.from_theta(100.0, 16), max_length=40)
    layer.attend(*tensors(1, 2, 1, 20, 16))
    for most, takes in ((10, True), (9, False)):
        monkeypatch.setattr(fetch_decode, "_MOST_GROUPS", most)
        assert (layer._slots() is not None) == takes


def test_more_slots_than_a_program_orders_are_found_by_asking_the_device(monkeypatch):
    settings = {"fetch_groups": 2, "store": "host", "fetch_slots": 5}
    config = CCAConfig.paper(4, 8, backend="triton", **settings)
    layer = CompactLayer(config, Rotary.from_theta(100.0, 16), max_length=40)
    layer.attend(*tensors(1, 2, 1, 20, 16))
    for most, takes in ((5, True), (4, False)):
        monkeypatch.setattr(fetch_decode, "MOST_SLOTS", most)
        assert (layer._slots() is not None) == takes and layer.asks_device == (not takes)


def test_scales_that_a_step_writes_are_finite():
    config = CCAConfig.paper(
        4, 8, backend="triton", prefill="fetch", fetch_groups=2, core_position="token"
    )
    layer = CompactLayer(config, None, max_length=12)
    q, k, v = tensors(1, 1, 1, 12, 16)
    k[:, :, 4:8] += torch.tensor([1e6, 1e6, -1e6, -1e6])[:, None]
    fed(layer, (q, k, v), 11)
    scales = layer.store.index_buffers[1]
    assert scales[0, 0, 1] == 65504 and scales.isfinite().all()


def test_of_equal_groups_the_lower_are_fetched():
    config = CCAConfig.paper(4, 8, backend="triton", prefill="fetch", fetch_groups=2)
    rotary = Rotary.from_theta(100.0, 16)
    q, k, v = tensors(1, 2, 1, 33, 16)
    k = k[:, :, :4].repeat(1, 1, 9, 1)[:, :, :33]
    outs = []
    for name in ("packed", "triton"):
        layer = CompactLayer(config.replace(backend=name), rotary, max_length=33)
        layer.attend(*(x[:, :, :32] for x in (q, k, v)))
        outs.append(layer.attend(*(x[:, :, 32:] for x in (q, k, v))))
    torch.testing.assert_close(*outs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings, softcap",
    [
        ({"fetch_index": "mean"}, None),
        ({"fetch_index": "parts:3:2"}, None),
        ({"window_size": 7}, None),
        ({"cache_dtype": "int8"}, None),
        ({"store": "host", "fetch_slots": 2, "cache_dtype": "int8"}, None),
        ({}, 3.0),
    ],
    ids=str,
)
def test_other_caches_decode_in_plain_pytorch(settings, softcap):
    config = CCAConfig.paper(4, 8, backend="triton", prefill="fetch", fetch_groups=2).replace(
        **settings
    )
    layer = CompactLayer(config, Rotary.from_theta(100.0, 16), max_length=40)
    qkv = tensors(1, 2, 1, 21, 16)
    layer.attend(*(x[:, :, :20] for x in qkv), softcap=softcap)
    assert layer._slots() is None
    assert layer.attend(*(x[:, :, 20:] for x in qkv), softcap=softcap).isfinite().all()


@pytest.mark.parametrize("changes", [{}, {"store": "host", "fetch_slots": 3}], ids=str)
def test_compiles_as_one_graph(changes):
    config = CCAConfig.paper(4, 8, backend="triton", prefill="fetch", fetch_groups=2, **changes)
    rotary = Rotary.from_theta(100.0, 16)
    qkv = tensors(1, 2, 1, 29, 16)
    layer = CompactLayer(config, rotary, max_length=40)
    layer.attend(*(x[:, :, :26] for x in qkv))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(layer.attend, fullgraph=True, backend=counter)
    expected = reference(config, rotary, qkv)
    with torch.no_grad():
        for t in range(26, 29):
            out = step(*(x[:, :, t : t + 1] for x in qkv))
            assert_rows(out, expected[:, :, t : t + 1], torch.float32)
    assert counter.frame_count == 1 and layer.seq_len == 29


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="graphs need a GPU")
@pytest.mark.parametrize(
    "index, store, num_slots",
    [
        *(("pairs:2", "device", 0), ("mean", "device", 0), ("pairs:2", "host", 0)),
        *(("mean", "host", 0), ("pairs:2", "host", 6)),
    ],
)
def test_a_captured_step_replays(index, store, num_slots):
    prefill, length = 300, 420
    settings = {"store": store, "fetch_slots": num_slots, "fetch_index": index, "core_mass": True}
    config = CCAConfig.paper(16, 64, prefill="fetch", fetch_groups=4, **settings)
    rotary = Rotary.from_theta(100.0, 128)
    qkv = tensors(2, 8, 2, length, 128, torch.bfloat16)
    layer = CompactLayer(config, rotary, max_length=length)
    layer.attend(*(x[:, :, :prefill] for x in qkv))
    new = [x[:, :, prefill : prefill + 1].clone() for x in qkv]
    layer.attend(*new)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.attend(*new)
    expected = reference(config, rotary, qkv)
    for t in range(prefill + 1, length):
        for buffer, x in zip(new, qkv):
            buffer.copy_(x[:, :, t : t + 1])
        graph.replay()
        assert_rows(out, expected[:, :, t : t + 1], torch.bfloat16, 0.25)


def test_warps_are_a_power_of_2_for_any_length():
    spec = Spec(16, 1024, 1.0, fetch_groups=64, fetch_index="pairs:2", sink_size=16)
    lengths = (1, 511, 2048, 2560, 3072, 4095, 4096, 7700, 8192, 10**6)
    for num_groups, dim in zip(lengths, (32, 64, 96, 128, 160) * 2):
        sizes = (torch.bfloat16, 8, 4, dim, 2048 + num_groups, num_groups, 64, True)
        sizes = fetch_decode_plan.StepSizes(*sizes)
        plan = fetch_decode_plan.fetch_plan(Chip(227 * 1024, 132), sizes, spec)
        warps = plan.select_warps
        assert warps >= 4 and warps & (warps - 1) == 0, num_groups
        assert plan.scoring.asm == (dim % 64 == 0), "instructions for four neighbouring bytes"
