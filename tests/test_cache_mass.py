"""The caches hold the mass of each core token: any way of appending equals one pass."""

import pytest
import torch
from budgets import fed, make_inputs

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import CompactLayer, new_layer

ROTARY = Rotary.from_theta(100.0, 16)
LENGTH = 45
KINDS = {
    "kv": {},
    "sinks": {"sink_size": 6},
    "heads": {"head_group_sizes": (4, 1)},
}


def inputs(batch=2):
    x = make_inputs(
        LENGTH, dtype=torch.float64, batch_size=batch, num_heads=4, num_kv_heads=2, head_dim=16
    )
    return x.q * 3, x.k, x.v


def one_pass(config, tensors):
    sizes = config.head_group_sizes or config.group_size
    return cca_attention(
        *tensors,
        group_size=sizes,
        window_size=config.window_size,
        rotary=ROTARY,
        sink_size=config.sink_size,
        core_mass=config.core_mass,
    )


def near(x, expected):
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_way_of_appending_equals_one_pass(kind, fixed):
    config = CCAConfig.paper(4, 9, core_mass=True, **KINDS[kind])
    tensors = inputs()
    expected = one_pass(config, tensors)
    without = one_pass(config.replace(core_mass=False), tensors)
    assert (expected - without).abs().max() > 1e-3
    options = {"max_length": LENGTH if fixed else None, "rollback": 3}
    layer = new_layer(config, ROTARY, **options)
    near(fed(layer, tensors, 0, [17, 6, *[1] * 10]), expected[:, :, :33])
    layer.crop(3)
    near(fed(layer, tensors, 30, [2, 1]), expected[:, :, 30:33])
    other = new_layer(config, ROTARY, **options)
    other.load_state_dict(layer.state_dict())
    rows = torch.tensor([1, 0])
    other.select(rows)
    swapped = [x[rows] for x in tensors]
    near(fed(other, swapped, 33, [7, *[1] * 5]), expected[rows][:, :, 33:])
    layer.shrink_window(5)
    shrunk = one_pass(config.replace(window_size=5), tensors)
    near(fed(layer, tensors, 33, [1] * 7 + [5]), shrunk[:, :, 33:])
    layer.reset()
    near(fed(layer, tensors, 0, [LENGTH]), shrunk)


def test_tokens_before_the_first_core_token_are_decoded():
    config = CCAConfig.paper(4, 2, core_mass=True)
    tensors = [x[:, :, :9] for x in inputs()]
    layer = new_layer(config, ROTARY)
    near(fed(layer, tensors, 0, [1] * 9), one_pass(config, tensors))


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_masses_are_not_rounded_to_8_bits(cache_dtype):
    """They are those of the rounded keys."""
    config = CCAConfig.paper(4, 9, core_mass=True, cache_dtype=cache_dtype)
    tensors = inputs()
    layers = [CompactLayer(config, ROTARY) for _ in range(2)]
    once = fed(layers[0], tensors, 0, [LENGTH])
    steps = fed(layers[1], tensors, 0, [12, *[1] * 20, LENGTH - 32])
    near(steps, once)
    masses = layers[0].masses(slice(None), LENGTH // 4)
    assert masses.dtype == torch.float64 and masses.unique().numel() == masses.numel()
    assert (masses > 0).all()
    assert layers[0].buffers[-1].shape == (*layers[0].keys.shape[:3], 1)
    plain = CompactLayer(config.replace(core_mass=False), ROTARY)
    fed(plain, tensors, 0, [LENGTH])
    assert layers[0].nbytes == plain.nbytes + layers[0].used * 2 * 2 * 8  # rows x KV heads
