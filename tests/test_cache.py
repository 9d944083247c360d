"""The compact cache: any way of appending gives what one pass of the reference gives; bytes are the
formula's."""

import copy
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

import corecontext
from corecontext import CCAConfig, CompactKVCache, Rotary, cca_attention, cost
from corecontext.cache import UNDO_LIMIT, CompactLayer, FullLayer
from corecontext.cache import layer as layer_module
from corecontext.inference.room import RowShape
from corecontext.model_sizes import ModelSizes
from corecontext.serve.rows import RowPool

pytestmark = pytest.mark.usefixtures("default_device")
D = 16
ROTARY = Rotary.from_theta(100.0, D)


def qkv(batch, heads, kv_heads, length, seed=0, dtype=torch.float64):
    generator = torch.Generator("cpu").manual_seed(seed)
    default = torch.get_default_device()
    return [
        torch.randn(batch, h, length, D, generator=generator, dtype=dtype, device="cpu").to(default)
        for h in (heads, kv_heads, kv_heads)
    ]


def reference(config, q, k, v, **options):
    return cca_attention(
        q,
        k,
        v,
        group_size=config.group_size,
        window_size=config.window_size,
        num_groups=config.num_groups,
        core_position=config.core_position,
        core_mass=config.core_mass,
        sink_size=config.sink_size,
        rotary=ROTARY,
        backend="reference",
        **options,
    )


def fed(layer, tensors, sizes, mask=None, **options):
    """Outputs of appending in pieces of the given sizes."""
    outs, start = [], 0
    for size in sizes:
        end = start + size
        part = None if mask is None or (size == 1 and start > 40) else mask[:, :end]
        outs.append(
            layer.attend(*(x[:, :, start:end] for x in tensors), attention_mask=part, **options)
        )
        start = end
    return torch.cat(outs, 2)


def left_padding(batch, length):
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, pad in zip(range(batch), (0, 3, length // 3)):
        mask[row, :pad] = 0
    return mask


SIZES = {
    "once": lambda n: [n],
    "one by one": lambda n: [1] * n,
    "chunks": lambda n: [20, 7, 1, 1, 24, n - 53],
    "small chunks": lambda n: [3] * (n // 3) + [1] * (n % 3),
}


# The first of the padded rows has no padding; without a mask two ways of appending are enough.
@pytest.mark.parametrize(
    "sizes, padded", [*((sizes, True) for sizes in SIZES), ("once", False), ("chunks", False)]
)
@pytest.mark.parametrize(
    "g, s, sinks",
    [
        (4, 8, 0),
        (3, 7, 0),
        (16, 5, 0),
        (1, 4, 0),
        (5, 1, 0),
        (7, 30, 0),
        (4, 8, 8),
        (3, 7, 20),
        (16, 5, 16),
        (1, 4, 3),
        (5, 1, 70),
        (5, 2, 200),
    ],
)
def test_any_way_of_appending_equals_one_pass(g, s, sinks, sizes, padded, monkeypatch):
    monkeypatch.setattr(layer_module, "LEAST_RING", 3)
    config = CCAConfig.pooling(g, s, sink_size=sinks)
    tensors = qkv(3, 4, 2, 90)
    mask = left_padding(3, 90) if padded else None
    expected = reference(config, *tensors, attention_mask=mask)
    for max_length in (None, 92):
        layer = CompactLayer(config, ROTARY, max_length=max_length)
        out = fed(layer, tensors, SIZES[sizes](90), mask)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {"core_position": "token"},
        {"backend": "reference"},
        {"sink_size": 8, "core_mass": True},
        {"sink_size": 26},
        {"sink_size": 4, "backend": "reference"},
    ],
    ids=str,
)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_every_setting_decodes_as_it_prefills(options, softcap):
    config, tensors = CCAConfig.paper(4, 9, **options), qkv(2, 4, 2, 70)
    expected = reference(config, *tensors, softcap=softcap)
    for max_length, sizes in itertools.product(
        (None, 70), ([30] + [1] * 40, [1] * 70, [25, 25, 20])
    ):
        layer = CompactLayer(config, ROTARY, max_length=max_length)
        torch.testing.assert_close(
            fed(layer, tensors, sizes, softcap=softcap), expected, rtol=0, atol=1e-11
        )


def test_a_cache_that_was_closed_takes_tokens_again_after_a_reset():
    layer = CompactLayer(CCAConfig.paper(4, 8), ROTARY)
    tensors = qkv(2, 2, 1, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, -3:] = 0
    layer.attend(*tensors, attention_mask=mask)
    with pytest.raises(ValueError, match="padded on the right"):
        layer.attend(*(x[:, :, :1] for x in tensors))
    layer.reset()
    expected = CompactLayer(CCAConfig.paper(4, 8), ROTARY).attend(*tensors)
    torch.testing.assert_close(fed(layer, tensors, [12, 1, 7]), expected, rtol=0, atol=1e-11)


def test_random_appends_and_crops_agree_with_the_reference(monkeypatch):
    monkeypatch.setattr(layer_module, "LEAST_RING", 3)
    chance = random.Random(0)
    crops = 0
    for trial in range(60):
        config = CCAConfig.pooling(
            *chance.choice([(4, 8), (3, 7), (16, 5), (5, 1), (1, 3)]), sink_size=5 * (trial % 3)
        )
        rollback, length = chance.choice([0, 6]), 80
        tensors = qkv(2, 2, 1, length, seed=trial)
        mask = left_padding(2, length) if trial % 2 else None
        expected = reference(config, *tensors, attention_mask=mask)
        layer, end, peak = CompactLayer(config, ROTARY, rollback=rollback), 0, 0
        while end < length:
            size = min(chance.choice([1, 1, 2, 5, 17, 40]), length - end)
            part = None if mask is None else mask[:, : end + size]
            out = layer.attend(*(x[:, :, end : end + size] for x in tensors), attention_mask=part)
            torch.testing.assert_close(out, expected[:, :, end : end + size], rtol=0, atol=1e-11)
            end += size
            if end > size and chance.random() < 0.4:
                # The last append can always be taken back; from the furthest point, `rollback`
                # tokens more.
                back = chance.randint(
                    1, size + (rollback if end > peak and end >= size + rollback else 0)
                )
                layer.crop(back)
                peak, end, crops = max(peak, end), end - back, crops + 1
            peak = max(peak, end)
    assert crops > 100


def test_crop_refuses_what_has_left_the_window():
    layer = CompactLayer(CCAConfig.paper(4, 9), ROTARY)
    tensors = qkv(1, 2, 1, 60)
    fed(layer, tensors, [30] + [1] * 30)
    with pytest.raises(ValueError, match="Give it a larger rollback"):
        layer.crop(5)
    with pytest.raises(ValueError, match="0 to 60 tokens, got 61"):
        layer.crop(61)
    assert layer.seq_len == 60  # a refused crop changes nothing
    layer.crop(0)
    layer.crop(60)  # back to the beginning is always possible
    torch.testing.assert_close(
        fed(layer, tensors, [60]), reference(CCAConfig.paper(4, 9), *tensors), rtol=0, atol=1e-11
    )
    long = UNDO_LIMIT + 50
    tensors = qkv(1, 2, 1, 50 + long)
    layer.reset()
    fed(layer, tensors, [50, long])
    with pytest.raises(ValueError, match="Give it a larger rollback"):
        layer.crop(long)
    layer.reset()
    fed(layer, tensors, [50, UNDO_LIMIT])
    layer.crop(UNDO_LIMIT)  # the longest append that is kept to be undone
    assert layer.seq_len == 50


def test_crop_of_fixed_length_knows_what_steps_pushed_out():
    """Such steps count on the device only; what they wrote over must not be taken for the
    window."""
    tensors = qkv(1, 2, 1, 60)
    expected = reference(CCAConfig.paper(4, 9), *tensors)
    layer = CompactLayer(CCAConfig.paper(4, 9), ROTARY, max_length=60, rollback=6)
    fed(layer, tensors, [30] + [1] * 30)
    with pytest.raises(ValueError, match="Give it a larger rollback"):
        layer.crop(10)
    layer.crop(6)
    out = fed(layer, [x[:, :, 54:] for x in tensors], [1] * 6)
    torch.testing.assert_close(out, expected[:, :, 54:], rtol=0, atol=1e-11)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("sinks", [0, 8])
def test_bytes_equal_the_formula_from_the_first_token_on(fixed, sinks):
    g, s, length = 4, 9, 70
    config, tensors = (
        CCAConfig.pooling(g, s, sink_size=sinks),
        qkv(2, 4, 2, length, dtype=torch.float32),
    )
    token = 2 * 2 * (2 * D + 1) * 4  # rows, KV heads, key, value and mass, bytes of a number

    def entries(length):
        return max(0, length // g - sinks // g) + min(sinks, length) + s + g - 1

    layer = CompactLayer(config, ROTARY, max_length=length if fixed else None)
    for t in range(length):
        fed(layer, [x[:, :, t : t + 1] for x in tensors], [1])
        assert layer.nbytes == entries(t + 1) * token
        if fixed:
            assert layer.allocated_bytes == entries(length) * token
    for n in (1, 5, 70):  # the same in prefill, and nothing else is held
        layer = CompactLayer(config, ROTARY)
        fed(layer, tensors, [n])
        assert layer.nbytes == layer.allocated_bytes == entries(n) * token
        shape = RowShape(ModelSizes(4, 2, D, layers=3), 4)
        assert 2 * shape.row_bytes(config, n) == 3 * layer.nbytes
        assert cost.cache_entries(n, g, s, sinks) * token == layer.nbytes
        model = cost.ModelCost(1, 4, 2, D, linear_weights=0, head_weights=0, itemsize=4)
        assert 2 * model.config_bytes(config, n).device == layer.nbytes


def test_what_an_append_pushed_out_is_allocated_until_the_next():
    layer = CompactLayer(CCAConfig.paper(4, 9, core_position="token"))
    x = torch.randn(1, 1, 40, 8)
    layer.attend(*[x[:, :, :20]] * 3)
    layer.attend(*[x[:, :, 20:25]] * 3)
    own = sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers)
    assert layer.allocated_bytes == own + 2 * 5 * 8 * 4
    layer.attend(*[x[:, :, 25:26]] * 3)
    assert layer.allocated_bytes == own


def test_growth_is_geometric_not_per_token():
    layer, tensors = (
        CompactLayer(CCAConfig.paper(2, 4), ROTARY),
        qkv(1, 1, 1, 1, dtype=torch.float32),
    )
    buffers = set()
    for _ in range(2000):
        layer.attend(*tensors)
        buffers.add(layer.keys.data_ptr())
        assert layer.allocated_bytes < 1.3 * layer.nbytes + 17 * 2 * D * 4
    assert len(buffers) < 30


@pytest.mark.parametrize("sinks", [0, 8])
def test_select_and_repeat_rows(sinks):
    config, tensors = CCAConfig.pooling(4, 9, sink_size=sinks), qkv(3, 4, 2, 70)
    mask = left_padding(3, 70)
    layer = CompactLayer(config, ROTARY)
    fed(layer, tensors, [40], mask)
    # A draft, so that what it pushed out must follow too.
    fed(layer, [x[:, :, 40:45] for x in tensors], [5])
    rows = torch.tensor([2, 0, 0])
    layer.select(rows)
    layer.repeat(2)
    layer.crop(3)
    rows = rows.repeat_interleave(2)
    out = fed(layer, [x[rows, :, 42:] for x in tensors], [1] * 28)
    expected = reference(config, *(x[rows] for x in tensors), attention_mask=mask[rows])[:, :, 42:]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("sinks", [0, 8])
def test_state_dict_round_trip(tmp_path, fixed, sinks):
    config, tensors = CCAConfig.pooling(4, 9, sink_size=sinks), qkv(2, 4, 2, 70)
    mask = left_padding(2, 70)
    cache = CompactKVCache(2, config, ROTARY)
    for i in range(2):
        fed(cache.layers[i], tensors, [41], mask)
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    other = CompactKVCache(2, config, ROTARY, max_length=80 if fixed else None)
    other.load_state_dict(
        torch.load(tmp_path / "cache.pt", map_location=torch.get_default_device())
    )
    assert other.seq_len == 41 and other.nbytes == cache.nbytes
    expected = reference(config, *tensors, attention_mask=mask)[:, :, 41:]
    for i in range(2):
        for layer in (cache.layers[i], other.layers[i]):
            out = fed(layer, [x[:, :, 41:] for x in tensors], [1] * 20 + [9])
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match="the state must come from a cache with config"):
        CompactLayer(config.replace(group_size=5), ROTARY).load_state_dict(
            cache.layers[0].state_dict()
        )
    with pytest.raises(ValueError, match="must have 3 layers, got 2"):
        CompactKVCache(3, config, ROTARY).load_state_dict(cache.state_dict())


@pytest.mark.parametrize("sinks", [4, 40])
def test_a_cache_follows_its_tokens(sinks, monkeypatch):
    """Also where a cache of either kind takes its state over, and under settings of any size."""
    monkeypatch.setattr(layer_module, "LEAST_RING", 8)
    config, tensors = CCAConfig.pooling(4, 60, sink_size=sinks), qkv(2, 4, 2, 90)
    expected = reference(config, *tensors)
    for max_length in (None, 90):
        layer = CompactLayer(config, ROTARY, max_length=max_length)
        out = fed(layer, tensors, [5, 1, 1, 20])
        torch.testing.assert_close(out, expected[:, :, :27], rtol=0, atol=1e-11)
        assert max_length or 27 <= layer.ring_size <= 34
        allocated = layer.allocated_bytes
        layer.reserve(layer.reserve(27))
        assert layer.allocated_bytes == allocated, "there is room already"
        for other_length in (None, 90, 50):
            other = CompactLayer(config, ROTARY, max_length=other_length)
            other.load_state_dict(layer.state_dict())
            sizes = [1] * 20 + [3] * (1 if other_length == 50 else 14)
            out = fed(other, [x[:, :, 27:] for x in tensors], sizes)
            seen = expected[:, :, 27 : other.seq_len]
            torch.testing.assert_close(out, seen, rtol=0, atol=1e-11)
            assert other_length is not None or other.ring_size == 63 or sinks == 40
    for sizes in ((50, 10**9), (4, 9, 10**5), (10**6, 9), (10**6, 10**9, 10**5)):
        names = ("group_size", "window_size", "sink_size")
        for make, length in itertools.product((CCAConfig.pooling, CCAConfig), (None, 50)):
            layer = CompactLayer(make(**dict(zip(names, sizes))), ROTARY, max_length=length)
            fed(layer, tensors, [20, 1, 1])
            assert layer.allocated_bytes < 2**17


@pytest.mark.parametrize("sinks", [0, 3])  # rounded up to 5
def test_num_groups_fixes_the_group_size(sinks):
    config, tensors = (
        CCAConfig.pooling(num_groups=10, window_size=9, sink_size=sinks),
        qkv(2, 4, 2, 70),
    )
    layer = CompactLayer(config, ROTARY)
    out = fed(layer, tensors, [50])
    torch.testing.assert_close(
        out, reference(config, *(x[:, :, :50] for x in tensors)), rtol=0, atol=1e-11
    )
    assert layer.group_size == 5  # ceil((50 - 9) / 10)
    other = CompactLayer(config, ROTARY)
    other.load_state_dict(layer.state_dict())
    rest = [x[:, :, 50:] for x in tensors]
    assert torch.equal(fed(layer, rest, [1] * 12), fed(other, rest, [1] * 12))
    with pytest.raises(ValueError, match="whole prompt in one call"):
        fed(layer, [x[:, :, 62:] for x in tensors], [8])
    with pytest.raises(ValueError, match="rows of one length"):
        fed(CompactLayer(config, ROTARY), tensors, [70], left_padding(2, 70))


@pytest.mark.parametrize("sinks", [0, 8])
def test_first_append_is_differentiable_later_ones_refuse(sinks):
    config, tensors = (
        CCAConfig.pooling(4, 9, sink_size=sinks),
        [x.requires_grad_() for x in qkv(2, 4, 2, 40)],
    )
    layer = CompactLayer(config, ROTARY)
    weights = torch.randn(2, 4, 40, D, dtype=torch.float64)
    got = torch.autograd.grad((layer.attend(*tensors) * weights).sum(), tensors)
    for a, b in zip(
        got, torch.autograd.grad((reference(config, *tensors) * weights).sum(), tensors)
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    for n in (1, 4):
        with pytest.raises(ValueError, match="gradients must not be asked"):
            layer.attend(*(x[:, :, :n] for x in tensors))
    with torch.no_grad():
        layer.attend(*(x[:, :, :4] for x in tensors))


@pytest.mark.parametrize("sinks", [0, 8])
def test_nan_in_fresh_memory_never_shows(sinks):
    config, tensors = CCAConfig.pooling(4, 9, sink_size=sinks), qkv(2, 4, 2, 60)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        for sizes in ([60], [1] * 60, [5, 1, 1, 53]):
            assert fed(CompactLayer(config, ROTARY, max_length=99), tensors, sizes).isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_padding_may_reach_over_whole_chunks():
    config, tensors = CCAConfig.paper(4, 9), qkv(2, 4, 2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :33] = 0
    out = fed(CompactLayer(config, ROTARY), tensors, [10, 10, 10, 10, 20], mask)
    torch.testing.assert_close(
        out, reference(config, *tensors, attention_mask=mask), rtol=0, atol=1e-11
    )
    assert (out[0, :, :33] == 0).all()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_length", [None, 60])
def test_padding_is_never_guessed(max_length, n):
    """Without a mask nobody can tell a row's first token from more of its padding."""
    config, tensors = CCAConfig.paper(4, 9), qkv(2, 4, 2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :33] = 0
    expected = reference(config, *tensors, attention_mask=mask)
    layer = CompactLayer(config, ROTARY, max_length=max_length)
    fed(layer, [x[:, :, :12] for x in tensors], [1] * 12, mask)
    piece = [x[:, :, 12 : 12 + n] for x in tensors]
    for call in (
        lambda: layer.attend(*piece),
        lambda: layer.attend(*piece, attention_mask=torch.ones(2, 12 + n)),
    ):
        with pytest.raises(ValueError, match="^attention_mask must"):
            call()
    assert not layer.padding_known and layer.seq_len == 12  # a refused call changes nothing
    out = [
        layer.attend(*(x[:, :, t : t + 1] for x in tensors), attention_mask=mask[:, : t + 1])
        for t in range(12, 34)
    ]
    assert layer.padding_known
    out += [layer.attend(*(x[:, :, t : t + 1] for x in tensors)) for t in range(34, 60)]
    torch.testing.assert_close(torch.cat(out, 2), expected[:, :, 12:], rtol=0, atol=1e-11)


def test_what_changes_the_rows_or_the_length_knows_the_padding():
    config, tensors = CCAConfig.paper(4, 9), qkv(2, 4, 2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :33] = 0
    layer = CompactLayer(config, ROTARY)
    fed(layer, tensors, [30], mask)
    other = CompactLayer(config, ROTARY)
    other.load_state_dict(layer.state_dict())
    assert not layer.padding_known and not other.padding_known
    other.repeat(2)
    assert not other.padding_known
    other.select(torch.tensor([3, 2]))  # only the row without padding
    assert other.padding_known
    layer.attend(*(x[:, :, 30:35] for x in tensors), attention_mask=mask[:, :35])
    assert layer.padding_known
    layer.crop(3)  # back into the padding
    assert not layer.padding_known
    out = layer.attend(*(x[:, :, 32:] for x in tensors), attention_mask=mask)
    torch.testing.assert_close(
        out, reference(config, *tensors, attention_mask=mask)[:, :, 32:], rtol=0, atol=1e-11
    )
    layer.reset()
    torch.testing.assert_close(
        layer.attend(*tensors), reference(config, *tensors), rtol=0, atol=1e-11
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: CompactLayer(CCAConfig.paper()), "rotary must be given"),
        (
            lambda: CompactLayer(CCAConfig.paper(), ROTARY, rollback=-1),
            "rollback must be at least 0",
        ),
        (
            lambda: fed(
                CompactLayer(CCAConfig.paper(4, 9), ROTARY, max_length=9), qkv(1, 1, 1, 10), [10]
            ),
            "at most max_length 9",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_batch_and_its_padding_must_not_change():
    layer = CompactLayer(CCAConfig.paper(4, 9), ROTARY)
    tensors = qkv(3, 2, 2, 40)
    fed(layer, [x[:, :, :20] for x in tensors], [20], left_padding(3, 20))
    for n in (1, 3):
        with pytest.raises(ValueError, match="must keep its 3 rows, got 2"):
            layer.attend(*(x[:2, :, :n] for x in tensors))
    mask = torch.ones(3, 25, dtype=torch.long)
    with pytest.raises(ValueError, match="keep the padding of the cached tokens: row 1 has 3"):
        layer.attend(*(x[:, :, :5] for x in tensors), attention_mask=mask)


def test_public_name():
    assert corecontext.CompactKVCache is CompactKVCache


@pytest.mark.parametrize("sizes", [[1] * 30, [13, 1, 1, 15]], ids=("one by one", "chunks"))
@pytest.mark.parametrize("max_length", [None, 92])
@pytest.mark.parametrize(
    "g, s, smaller, sinks",
    [(4, 18, 7, 0), (3, 7, 1, 0), (16, 40, 39, 0), (1, 9, 4, 0), (5, 5, 5, 0), (4, 18, 7, 16)],
)
def test_a_shrunk_window_is_exact_from_then_on(g, s, smaller, sinks, max_length, sizes):
    """Queries before see s, those after the smaller window: each row of the output is that of its
    own reference."""
    tensors, mask = qkv(3, 4, 2, 90), left_padding(3, 90)
    mask[1, :50] = 0  # 10 tokens when the window shrinks: fewer than the new ring holds
    layer = CompactLayer(CCAConfig.pooling(g, s, sink_size=sinks), ROTARY, max_length=max_length)
    first = fed(layer, [x[:, :, :60] for x in tensors], [45, 15], mask)
    before = layer.allocated_bytes
    layer.shrink_window(smaller)
    layer.shrink_window(smaller)
    rest, start = [], 60
    for size in sizes:
        span = slice(start, start + size)
        rest.append(layer.attend(*(x[:, :, span] for x in tensors)))
        start += size
    for config, got, span in (
        (CCAConfig.pooling(g, s, sink_size=sinks), first, slice(0, 60)),
        (CCAConfig.pooling(g, smaller, sink_size=sinks), torch.cat(rest, 2), slice(60, 90)),
    ):
        expected = reference(config, *tensors, attention_mask=mask)[:, :, span]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    assert layer.config == CCAConfig.pooling(g, smaller, sink_size=sinks)
    assert layer.ring_size == smaller + g - 1
    if max_length is not None:
        numbers = 2 * D + (g > 1)  # of a key and a value, and the mass of groups of several tokens
        entry = 3 * 2 * numbers * 8  # rows, KV heads, float64
        assert before - layer.allocated_bytes == (s - smaller) * entry
    with pytest.raises(
        ValueError,
        match=f"^window_size must be at most {smaller} once set, got {s + 1}. Start a new",
    ):
        layer.shrink_window(s + 1)
    with pytest.raises(ValueError, match="^window_size must be at least 1"):
        layer.shrink_window(0)


def test_a_shrunk_window_can_be_cropped_and_saved():
    config, tensors = CCAConfig.paper(4, 18), qkv(1, 4, 2, 90)
    layer = CompactLayer(config, ROTARY, rollback=6)
    fed(layer, [x[:, :, :60] for x in tensors], [60])
    layer.shrink_window(9)
    layer.crop(5)
    other = CompactLayer(CCAConfig.paper(4, 9), ROTARY, rollback=6)
    other.load_state_dict(layer.state_dict())
    expected = reference(CCAConfig.paper(4, 9), *tensors)[:, :, 55:]
    for one in (layer, other):
        torch.testing.assert_close(
            one.attend(*(x[:, :, 55:] for x in tensors)), expected, rtol=0, atol=1e-11
        )
    with pytest.raises(ValueError, match="^crop must leave the window whole"):
        layer.crop(80)
    caches = CompactKVCache(2, config, ROTARY)
    for i in range(2):
        caches.attend(i, *tensors)
    caches.shrink_window(3)
    assert [layer.config.window_size for layer in caches.layers] == [3, 3]
    empty = CompactLayer(config, ROTARY)
    empty.shrink_window(3)
    torch.testing.assert_close(
        empty.attend(*tensors), reference(CCAConfig.paper(4, 3), *tensors), rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_an_expected_length_is_used_once(fixed):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 60, 16) for _ in range(3))
    layer, plain = (
        CompactLayer(
            CCAConfig.paper(4, 8), Rotary.from_theta(1e4, 16), max_length=60 if fixed else None
        )
        for _ in range(2)
    )
    for start, end in ((0, 20), (20, 40), (40, 41), (41, 60)):
        new = [x[:, :, start:end] for x in (q, k, v)]
        if end - start > 1:
            layer.expect(start)
        torch.testing.assert_close(layer.attend(*new), plain.attend(*new), rtol=0, atol=0)
        assert layer.seq_len == plain.seq_len == end
    layer.expect(60)
    layer.crop(1)
    assert layer.seq_len == 59
    layer.expect(59)
    layer.reset()
    assert layer.seq_len == 0


@pytest.mark.parametrize("sinks", [0, 8])
def test_a_full_cache_of_fixed_length_refuses_steps(sinks):
    config, tensors = CCAConfig.pooling(4, 9, sink_size=sinks), qkv(2, 4, 2, 60)
    expected = reference(config, *tensors)
    layer = CompactLayer(config, ROTARY, max_length=24)
    fed(layer, tensors, [10, 1, 1])
    other = CompactLayer(config, ROTARY, max_length=24)
    other.load_state_dict(layer.state_dict())
    full = "^the compact cache must hold at most max_length 24 tokens, got 25. Make it with a"
    for cache in (layer, other):
        out = fed(cache, [x[:, :, 12:] for x in tensors], [1] * 12)
        torch.testing.assert_close(out, expected[:, :, 12:24], rtol=0, atol=1e-11)
        with pytest.raises(ValueError, match=full):
            cache.attend(*(x[:, :, 24:25] for x in tensors))
        assert cache.seq_len == 24  # a refused step changes nothing
    layer.crop(1)
    fed(layer, [x[:, :, 23:] for x in tensors], [1])
    with pytest.raises(ValueError, match=full):
        layer.attend(*(x[:, :, 24:25] for x in tensors))
    layer.reset()
    torch.testing.assert_close(
        fed(layer, tensors, [23, 1]), expected[:, :, :24], rtol=0, atol=1e-11
    )


def test_steps_that_run_later_are_not_counted(monkeypatch):
    """Recording a step runs nothing; its replays count on the device."""
    tensors = qkv(1, 2, 1, 30, dtype=torch.float32)
    layer = CompactLayer(CCAConfig.paper(4, 9), ROTARY, max_length=12)
    fed(layer, tensors, [10])
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        fed(layer, [x[:, :, 10:] for x in tensors], [1] * 5)
    layer.set_length(10)
    fed(layer, [x[:, :, 10:] for x in tensors], [1] * 2)
    with pytest.raises(ValueError, match="at most max_length 12 tokens, got 13"):
        fed(layer, [x[:, :, 12:] for x in tensors], [1])


def test_a_loaded_cache_knows_from_where_its_ring_is_whole():
    """A crop takes tokens from the ring's other end: the state says so, and a load keeps it."""
    tensors = qkv(1, 2, 1, 60)
    layer = CompactLayer(CCAConfig.paper(4, 9), ROTARY, rollback=6)
    fed(layer, tensors, [50])
    layer.crop(4)
    other = CompactLayer(CCAConfig.paper(4, 9), ROTARY, rollback=6)
    other.load_state_dict(layer.state_dict())
    for cache in (layer, other):
        with pytest.raises(ValueError, match="^crop must leave the window whole, got 7 tokens"):
            cache.crop(7)
        cache.crop(6)
    torch.testing.assert_close(
        fed(other, [x[:, :, 40:] for x in tensors], [1] * 20),
        reference(CCAConfig.paper(4, 9), *tensors)[:, :, 40:],
        rtol=0,
        atol=1e-11,
    )


def assert_crops(layer, length, oldest, tensors, expected, pad=0):
    """Assert that each crop is taken and exact where the ring has what the next query sees from
    position `oldest`, and refused elsewhere."""
    g, s, sinks = (getattr(layer.config, x) for x in ("group_size", "window_size", "sink_size"))
    state = copy.deepcopy(layer.state_dict())
    for crop in range(1, 15):
        layer.load_state_dict(state)
        left = length - crop
        # The next query is at left - pad of its row; core tokens stand for whole groups.
        position = left - pad - sinks
        needed = pad + sinks + max(0, position - s + 1) // g * g
        if needed < oldest:
            with pytest.raises(ValueError, match="^crop must leave the window whole"):
                layer.crop(crop)
            continue
        layer.crop(crop)
        out = fed(layer, [x[:, :, left:] for x in tensors], [1] * 3)
        torch.testing.assert_close(out, expected[:, :, left : left + 3], rtol=0, atol=1e-11)


@pytest.mark.parametrize("rollback", [0, 3, 6])
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("sinks, pad", [(0, 0), (8, 0), (0, 3)])
def test_crop_is_refused_exactly_where_the_window_is_broken(rollback, fixed, sinks, pad):
    """From every length, every crop: taken where the ring still has all that the next query sees
    uncompressed, and exact then; else refused."""
    g, s = 4, 9
    config, tensors = CCAConfig.pooling(g, s, sink_size=sinks), qkv(1, 2, 1, 60)
    mask = torch.ones(1, 60, dtype=torch.long)
    mask[:, :pad] = 0
    expected = reference(config, *tensors, attention_mask=mask)
    for length in range(45, 50):
        layer = CompactLayer(config, ROTARY, max_length=60 if fixed else None, rollback=rollback)
        fed(layer, tensors, [length], mask)
        assert_crops(layer, length, length - (s + g - 1 + rollback), tensors, expected, pad)


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_the_longest_length_counts_after_a_crop_a_chunk_and_a_step(fixed):
    """46 tokens were cached, then 42, 44 and 45: the ring is whole as after 46, not after 45."""
    g, s, rollback = 3, 7, 6
    config, tensors = CCAConfig.paper(g, s), qkv(1, 2, 1, 60)
    layer = CompactLayer(config, ROTARY, max_length=60 if fixed else None, rollback=rollback)
    fed(layer, tensors, [45, 1])
    layer.crop(4)
    fed(layer, [x[:, :, 42:] for x in tensors], [2, 1])
    expected = reference(config, *tensors)
    assert_crops(layer, 45, 46 - (s + g - 1 + rollback), tensors, expected)


def test_a_draft_from_before_a_shrink_cannot_be_taken_back():
    """What it pushed out had its place in the larger ring."""
    layer, tensors = CompactLayer(CCAConfig.paper(4, 18), ROTARY), qkv(1, 4, 2, 70)
    fed(layer, tensors, [50, 5])
    layer.check_crop(5)
    layer.shrink_window(9)
    with pytest.raises(ValueError, match="^crop must leave the window whole, got 5 tokens"):
        layer.crop(5)
    torch.testing.assert_close(
        fed(layer, [x[:, :, 55:] for x in tensors], [15]),
        reference(CCAConfig.paper(4, 9), *tensors)[:, :, 55:],
        rtol=0,
        atol=1e-11,
    )


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_a_cache_reset_within_padding_is_as_new(fixed):
    tensors, mask = qkv(2, 4, 2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :33] = 0
    layer = CompactLayer(CCAConfig.paper(4, 9), ROTARY, max_length=60 if fixed else None)
    fed(layer, [x[:, :, :30] for x in tensors], [30], mask)
    assert not layer.padding_known
    layer.reset()
    assert layer.padding_known
    torch.testing.assert_close(
        fed(layer, tensors, [1] * 60),
        reference(CCAConfig.paper(4, 9), *tensors),
        rtol=0,
        atol=1e-11,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_does_not_round_masses(dtype):
    config = CCAConfig.paper(16, 64, core_mass=True)
    tensors = qkv(1, 4, 2, 400)
    rounded = [x.to(dtype) for x in tensors]
    exact = reference(config, *(x.double() for x in rounded))
    once = cca_attention(
        *rounded, group_size=16, window_size=64, rotary=ROTARY, core_mass=True, backend="packed"
    )
    layer = CompactLayer(config, ROTARY)
    steps = fed(layer, rounded, [200] + [1] * 200)
    errors = [(x.double() - exact)[:, :, 200:].norm() for x in (once, steps)]
    assert errors[1] < errors[0]


def test_a_captured_step_finds_the_tables_of_changed_frequencies(monkeypatch):
    """Where it has always read them: the frequencies of a model may change between requests."""
    pytest.importorskip("triton")
    from corecontext.cache import layer as module
    from corecontext.ops.triton.pool.launcher import rotation_tables

    backend = SimpleNamespace(decode_step=None, rotation_tables=rotation_tables)
    monkeypatch.setattr(module, "choose_backend", lambda *_: "triton")
    monkeypatch.setattr(module, "backend_module", lambda *_: backend)
    rotary = Rotary(ROTARY.inv_freq.clone())
    layer, places = CompactLayer(CCAConfig.paper(4, 9), rotary, max_length=60), []
    for factor in (1.0, 0.5, 1.0):
        rotary.inv_freq.mul_(factor)
        layer.reset()
        layer.attend(*qkv(1, 4, 2, 20))
        fresh = rotation_tables(Rotary(rotary.inv_freq.clone()), 4, layer.keys.device)
        assert all(map(torch.equal, layer._tables, fresh))
        places.append([table.data_ptr() for table in layer._tables])
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_a_longer_request_leaves_nothing_behind_in_its_row(fixed):
    """A step may read what no query sees, and 0 x NaN is NaN."""
    config, shape = CCAConfig.paper(4, 9), RowShape(ModelSizes(4, 2, D, layers=1), 8)
    pool = RowPool(config, 2, 60, shape, fixed=fixed)
    tensors = qkv(1, 4, 2, 60)
    expected = reference(config, *tensors)
    for length, values in ((50, torch.nan), (20, 1.0)):
        layer = CompactLayer(config, ROTARY)
        q, k, v = (x[:, :, :length] for x in tensors)
        layer.attend(q, k, v * values)
        pool.add(length, [layer])
        pool.hold(1)
        out = pool.layers[0].attend(*(x[:, :, length : length + 1] for x in tensors))
        pool.seen += 1
        pool.remove(length)
    torch.testing.assert_close(out, expected[:, :, 20:21], rtol=0, atol=1e-11)
    past = layer.size(21)
    assert all((buffer[0, :, past:] == 0).all() for buffer in pool._buffers[0])


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_a_cache_may_load_its_own_state(fixed):
    """A fixed cache keeps its buffers, for captured steps; what was behind the tokens is gone."""
    config, tensors = CCAConfig.paper(4, 9), qkv(2, 4, 2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :3] = 0
    layer = CompactLayer(config, ROTARY, max_length=60 if fixed else None)
    fed(layer, tensors, [30], mask)
    state, addresses = layer.state_dict(), [x.data_ptr() for x in layer.buffers]
    layer.load_state_dict(state)
    assert not fixed or [x.data_ptr() for x in layer.buffers] == addresses
    out = fed(layer, [x[:, :, 30:] for x in tensors], [1] * 30)
    other = CompactLayer(config, ROTARY)
    expected = fed(other, tensors, [60], mask)[:, :, 30:]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    other.reset()
    fed(other, tensors, [30], mask)
    layer.load_state_dict(other.state_dict())
    out = fed(layer, [x[:, :, 30:] for x in tensors], [1] * 30)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_a_full_cache_of_full_attention_takes_no_more(fixed):
    tensors = qkv(1, 4, 2, 30)
    if fixed and tensors[0].is_cuda:
        pytest.skip("a length on a GPU is not read back")
    layer = FullLayer(24, fixed=fixed)
    if fixed:
        layer.seen = torch.zeros((), dtype=torch.long)
    expected = reference(CCAConfig.paper(1, 1), *tensors)
    steps = fed(layer, tensors, [20, *[1] * 4])
    torch.testing.assert_close(steps, expected[:, :, :24], rtol=0, atol=1e-11)
    for count in (1, 2):
        with pytest.raises(ValueError, match="hold at most max_length 24 tokens, got 2[56]. Make"):
            layer.attend(*(x[:, :, 24 : 24 + count] for x in tensors))
    assert int(layer.seen) == 24


def test_a_differentiated_first_append_has_every_setting_and_fills_the_cache():
    config = CCAConfig.pooling(4, 9, sink_size=4)
    tensors, mask = qkv(3, 4, 2, 40), left_padding(3, 40)
    weights = torch.randn(3, 4, 30, D, dtype=torch.float64)
    options = {"scale": 0.31, "softcap": 5.0}
    layer = CompactLayer(config, ROTARY)
    first = [x[:, :, :30].clone().requires_grad_() for x in tensors]
    out = layer.attend(*first, attention_mask=mask[:, :30], **options)
    expected = reference(config, *first, attention_mask=mask[:, :30], **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    grads, wanted = (torch.autograd.grad((x * weights).sum(), first) for x in (out, expected))
    for grad, want in zip(grads, wanted):
        torch.testing.assert_close(grad, want, rtol=0, atol=1e-11)
    out = fed(layer, [x[:, :, 30:] for x in tensors], [3] + [1] * 7, **options)
    expected = reference(config, *tensors, attention_mask=mask, **options)
    torch.testing.assert_close(out, expected[:, :, 30:], rtol=0, atol=1e-11)


@pytest.mark.parametrize("count", [1, 3])
def test_no_gradient_is_asked_of_a_filled_cache_by_any_tensor(count):
    layer = CompactLayer(CCAConfig.paper(4, 9), ROTARY)
    fed(layer, qkv(1, 2, 1, 20), [20])
    for place in range(3):
        tensors = qkv(1, 2, 1, count)
        tensors[place].requires_grad_()
        with pytest.raises(ValueError, match="gradients must not be asked"):
            layer.attend(*tensors)
        assert layer.seq_len == 20
        with torch.no_grad():
            layer.attend(*tensors)
        layer.crop(count)


@pytest.mark.parametrize("sizes", [[5, 30, 1, 1, 23], [60]], ids=str)
@pytest.mark.parametrize("max_length", [None, 60])
def test_every_part_of_a_cache_has_the_scale(sizes, max_length):
    """Prompts too short for a core token, chunks, steps and pooling."""
    tensors, config = qkv(2, 4, 2, 60), CCAConfig.pooling(4, 9, sink_size=2)
    expected = reference(config, *tensors, scale=0.7)
    layer = CompactLayer(config, ROTARY, max_length=max_length)
    out = fed(layer, tensors, sizes, scale=0.7)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)


def test_under_autocast_a_cache_is_one_of_rounded_tokens():
    """Pooled and attended to as without autocast."""
    config, tensors = CCAConfig.paper(4, 9), qkv(2, 4, 2, 60, dtype=torch.float32)
    half = [x.bfloat16() for x in tensors]
    plain, inside = (CompactLayer(config, ROTARY) for _ in range(2))
    sizes = [30, 1, 1, 8, 20]
    expected = fed(plain, half, sizes)
    with torch.autocast(tensors[0].device.type, torch.bfloat16):
        out = fed(inside, [tensors[0], half[1], tensors[2]], sizes)
    assert torch.equal(out, expected) and out.dtype == torch.bfloat16
    assert all(map(torch.equal, inside.buffers, plain.buffers))


def test_a_constant_number_of_groups_counts_no_padding():
    config, tensors = CCAConfig.paper(num_groups=5, window_size=9), qkv(2, 4, 2, 50)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[:, :11] = 0
    layer = CompactLayer(config, ROTARY)
    out = fed(layer, tensors, [50], mask)
    assert layer.group_size == 6  # ceil((39 - 9) / 5)
    expected = reference(config, *tensors, attention_mask=mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)


def test_a_mask_may_be_of_the_new_tokens_only():
    config, tensors, mask = CCAConfig.paper(4, 9), qkv(3, 4, 2, 60), left_padding(3, 60)
    layer = CompactLayer(config, ROTARY)
    fed(layer, tensors, [40], mask)
    new = [layer.attend(*(x[:, :, 40:47] for x in tensors), attention_mask=mask[:, 40:47])]
    new.append(layer.attend(*(x[:, :, 47:] for x in tensors), attention_mask=mask[:, 47:].bool()))
    expected = reference(config, *tensors, attention_mask=mask)[:, :, 40:]
    torch.testing.assert_close(torch.cat(new, 2), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_a_state_keeps_that_the_cache_is_closed(fixed):
    config, tensors = CCAConfig.paper(4, 9), qkv(2, 2, 1, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, -3:] = 0
    layer = CompactLayer(config, ROTARY)
    layer.attend(*tensors, attention_mask=mask)
    other = CompactLayer(config, ROTARY, max_length=30 if fixed else None)
    other.load_state_dict(layer.state_dict())
    for count in (1, 2):
        with pytest.raises(ValueError, match="continued after a batch padded on the right"):
            other.attend(*(x[:, :, :count] for x in tensors))
    fresh = CompactLayer(config, ROTARY)
    fresh.attend(*tensors)
    other.load_state_dict(fresh.state_dict())  # open again
    other.attend(*(x[:, :, :1] for x in tensors))
    other.load_state_dict(CompactLayer(config, ROTARY).state_dict())  # of no tokens
    assert other.is_empty and other.seq_len == 0
    torch.testing.assert_close(fed(other, tensors, [9, 11]), reference(config, *tensors))
    with pytest.raises(ValueError, match="rollback 0, got .* and 2"):
        other.load_state_dict(CompactLayer(config, ROTARY, rollback=2).state_dict())


@pytest.mark.parametrize("steps", [(1, 2), (2, 2, 1), (4, 1)])
def test_a_draft_may_be_taken_back_bit_by_bit(steps):
    """Then written again, and all of it taken back at once."""
    config, tensors = CCAConfig.paper(4, 9), qkv(2, 4, 2, 60)
    expected = reference(config, *tensors)
    layer = CompactLayer(config, ROTARY)
    fed(layer, tensors, [41])
    wrong = qkv(2, 4, 2, 5, seed=7)
    layer.attend(*wrong)
    lost = 2 * 2 * 2 * 5 * D * 8  # keys and values, rows, KV heads, tokens in float64
    assert layer.allocated_bytes == sum(x.nbytes for x in layer.buffers) + lost
    for count in steps:
        layer.crop(count)
    end = 46 - sum(steps)
    layer.crop(end - 41)
    out = fed(layer, [x[:, :, 41:] for x in tensors], [4, 1, 14])
    torch.testing.assert_close(out, expected[:, :, 41:], rtol=0, atol=1e-11)
    layer.attend(*wrong)
    layer.attend(*(x[:, :, :1] for x in wrong))  # a step: the draft before it cannot be undone
    with pytest.raises(ValueError, match="^crop must leave the window whole"):
        layer.crop(6)


def test_bytes_of_padded_rows_are_those_of_the_longest():
    config, tensors = CCAConfig.paper(4, 9), qkv(2, 4, 2, 60, dtype=torch.float32)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :24] = 0
    mask[1, :20] = 0
    layer = CompactLayer(config, ROTARY)
    assert layer.seq_len == layer.nbytes == layer.allocated_bytes == 0
    fed(layer, tensors, [60], mask)
    slot = 2 * 2 * 2 * D * 4
    assert layer.nbytes == layer.allocated_bytes == slot * (40 // 4 + 9 + 4 - 1)
    assert layer.raw_bytes == slot * (9 + 4 - 1)
    cache = CompactKVCache(3, config.replace(sink_size=3), ROTARY)
    for i in range(3):
        cache.attend(i, *tensors, attention_mask=mask)
    assert cache.raw_bytes == 3 * slot * (9 + 4 - 1 + 4)
    assert cache.nbytes == cache.allocated_bytes == 3 * slot * (9 + 4 - 1 + 4 + 9)


def test_a_fixed_cache_never_moves():
    """A captured step finds buffers, length and padding where they were."""
    layer = CompactLayer(CCAConfig.paper(4, 9), ROTARY, max_length=60, rollback=2)
    tensors = qkv(2, 4, 2, 60)

    def places():
        return [x.data_ptr() for x in (*layer.buffers, layer.seen, layer.pad)]

    fed(layer, tensors, [30], left_padding(2, 30))
    before, state = places(), copy.deepcopy(layer.state_dict())
    layer.attend(*(x[:, :, 30:31] for x in tensors))
    layer.attend(*(x[:, :, 31:40] for x in tensors))
    layer.crop(2)
    layer.reset()
    assert layer.seq_len == 0 and not layer.pad.any() and not layer.buffers[0].any()
    layer.attend(*(x[:, :, :7] for x in tensors))
    layer.load_state_dict(state)
    assert places() == before and layer.seq_len == 30 and layer.pad.tolist() == [0, 3]


@pytest.mark.parametrize("max_length", [None, 10, 15])
def test_decoding_before_the_first_group_is_full(max_length):
    config, tensors = CCAConfig.paper(16, 3), qkv(2, 4, 2, 10)
    out = fed(CompactLayer(config, ROTARY, max_length=max_length), tensors, [1] * 10)
    torch.testing.assert_close(out, reference(config, *tensors), rtol=0, atol=1e-11)


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_full_cache_decodes_rows_of_different_lengths(fixed, softcap):
    tensors = qkv(3, 4, 2, 20)
    lengths = (12, 5, 9)  # of each row before the steps
    layer = FullLayer(16, fixed=fixed)
    layer.attend(*(x[:, :, :1] for x in tensors))
    layer.pads = [12 - length for length in lengths]
    layer.pad = torch.tensor(layer.pads)
    layer.seen = torch.tensor(12) if fixed else 12
    for buffer, x in zip(layer.buffers, tensors[1:]):
        buffer.fill_(100.0)  # of another request
        for row, length in enumerate(lengths):
            buffer[row, :, :length] = x[row, :, :length]
    for step in range(3):
        new = [
            torch.stack([x[row, :, n + step : n + step + 1] for row, n in enumerate(lengths)])
            for x in tensors
        ]
        out = layer.attend(*new, scale=0.4, softcap=softcap)
        for row, length in enumerate(lengths):
            end = length + step + 1
            alone = [x[row : row + 1, :, :end] for x in tensors]
            expected = reference(CCAConfig.paper(1, 1), *alone, scale=0.4, softcap=softcap)
            torch.testing.assert_close(out[row], expected[0, :, -1:], rtol=0, atol=1e-11)
    assert int(layer.seen) == 15


def test_a_full_cache_reads_prompts_in_chunks():
    tensors = qkv(2, 4, 2, 20)
    for pads in ([0, 0], [0, 7], [7, 7]):
        tokens = slice(max(pads), None)  # of all rows
        mask = (torch.arange(20) >= torch.tensor(pads)[:, None]).long()
        expected = reference(CCAConfig.paper(1, 1), *tensors, attention_mask=mask, scale=0.4)
        for sizes in ([20], [7, 13], [1, 9, 1, 9], [1] * 20):
            layer = FullLayer(20, torch.tensor(pads))
            layer.begin(pads)
            out = fed(layer, tensors, sizes, scale=0.4)
            right = expected[:, :, tokens]
            torch.testing.assert_close(out[:, :, tokens], right, rtol=0, atol=1e-11)
        seen = torch.tensor(99)  # of another request
        layer = FullLayer(20, torch.tensor(pads), fixed=True, seen=seen)
        layer.begin(pads)
        prompt = fed(layer, [x[:, :, :18] for x in tensors], [17, 1], scale=0.4)
        layer.end_prompt()
        seen.fill_(18)
        steps = fed(layer, [x[:, :, 18:] for x in tensors], [1, 1], scale=0.4)
        out = torch.cat((prompt, steps), 2)
        torch.testing.assert_close(out[:, :, tokens], right, rtol=0, atol=1e-11)
    out = fed(FullLayer(20), tensors, [8, 12])
    torch.testing.assert_close(out, reference(CCAConfig.paper(1, 1), *tensors), rtol=0, atol=1e-11)
    mask = torch.ones(2, 5)
    for count, options in ((5, {"softcap": 2.0}), (1, {"attention_mask": mask[:, :1]})):
        with pytest.raises(NotImplementedError, match="without masks and softcap"):
            FullLayer(20).attend(*(x[:, :, :count] for x in tensors), **options)


def test_heads_of_several_group_sizes_are_one_layer():
    config = CCAConfig.paper(window_size=9, head_group_sizes=(4, 1))
    layer, tensors = corecontext.cache.new_layer(config, ROTARY), qkv(2, 4, 2, 40)
    assert type(corecontext.cache.new_layer(CCAConfig.paper(4, 9), ROTARY)) is CompactLayer
    fed(layer, [x[:, :, :30] for x in tensors], [30])
    assert layer.raw_bytes == sum(part.raw_bytes for part in layer.parts)
    assert layer.parts[0].raw_bytes != layer.parts[1].raw_bytes
    other = corecontext.cache.new_layer(config.replace(window_size=8), ROTARY)
    with pytest.raises(ValueError, match="the state must come from a cache with config"):
        other.load_state_dict(layer.state_dict())
    with pytest.raises(ValueError, match="one g for each of the 1 KV heads"):
        layer.attend(*(x[:, :1, :1] for x in tensors))
    with pytest.raises(ValueError, match="window_size must be at most 9"):
        layer.shrink_window(10)
    assert layer.config == config  # a refused change changes nothing
    layer.shrink_window(8)
    assert layer.config == config.replace(window_size=8)
    other.load_state_dict(layer.state_dict())
    layer.close("a test")
    q, k, v = (x[:, :, :1] for x in tensors)
    with pytest.raises(ValueError, match="must not be continued after a test"):
        layer.attend(q, k, v)
    for part in layer.parts:
        with pytest.raises(ValueError, match="must not be continued after a test"):
            part.attend(q[:, :2], k[:, :1], v[:, :1])


@pytest.mark.parametrize("index", ["pairs:2", "mean"])
@pytest.mark.parametrize("emptied", ["crop", "padding"])
def test_a_cache_without_a_token_can_be_saved(index, emptied):
    sizes = {"fetch_groups": 3, "fetch_index": index, "store": "device", "prefill": "fetch"}
    config = CCAConfig(4, 9, **sizes)
    layers = [CompactLayer(config, ROTARY) for _ in range(2)]
    tensors = qkv(2, 4, 2, 40)
    mask = torch.ones(2, 40)
    if emptied == "padding":
        mask[:, :6] = 0
    fed(layers[0], tensors, [6], mask)
    if emptied == "crop":
        layers[0].crop(6)
    layers[1].load_state_dict(layers[0].state_dict())
    start = layers[0].seq_len
    rest = [x[:, :, start : start + 20] for x in tensors]
    options = {"attention_mask": mask[:, : start + 20] if start else None}
    first, second = (layer.attend(*rest, **options) for layer in layers)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
