"""Cost formulas, against counting and against PyTorch's own counter."""

from types import SimpleNamespace

import pytest
import torch
from tiny_model import save_tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen3MoeConfig,
)

from benchmarks import floor
from corecontext import cost
from corecontext.files import UserError
from corecontext.model_sizes import ModelSizes, check_counts
from corecontext.visibility import local_start, num_visible_cores


@pytest.mark.parametrize(
    "length, g, s", [(1, 4, 3), (40, 4, 3), (157, 16, 32), (300, 7, 50), (50, 1, 5)]
)
def test_attention_operations_count_every_visible_pair(length, g, s):
    pairs = sum(num_visible_cores(t, g, s) + t + 1 - local_start(t, g, s) for t in range(length))
    assert (
        2 * cost.attention_flops(length, 6, 8, group_size=g, window_size=s) == 4 * 8 * 6 * 2 * pairs
    )
    assert (
        cost.attention_flops(length, 6, 8, group_size=g, window_size=s, backward=True)
        == 10 * 8 * 6 * pairs
    )


def test_one_group_token_is_full_attention():
    assert cost.attention_flops(100, 2, 4) == 4 * 2 * 4 * 5050
    assert cost.operator_flops(100, 2, 2, 4) == cost.attention_flops(100, 2, 4)
    assert cost.cache_entries(100) == 100


def test_pooling_operations_match_pytorchs_counter():
    g, heads, kv_heads, dim, length = 4, 6, 2, 8, 22
    groups = length // g
    q, k = (
        torch.randn(kv_heads, groups, heads // kv_heads, dim),
        torch.randn(kv_heads, groups, g, dim),
    )
    with FlopCounterMode(display=False) as counter:
        weights = torch.matmul(q, k.mT).mean(2, keepdim=True)
        torch.matmul(weights, k), torch.matmul(weights, k)
    assert (
        cost.pooling_flops(length, heads, kv_heads, dim, group_size=g) == counter.get_total_flops()
    )


def test_the_papers_figure():
    """At 128K, g = 16, s = 1024: 1 / 12.9 of the operations of causal attention, and 7.0 % of its
    cache."""
    full, ours = (
        cost.attention_flops(131072, 32, 128, group_size=g, window_size=1024) for g in (1, 16)
    )
    assert full / ours == pytest.approx(12.95, abs=0.01)
    assert cost.cache_entries(131072, 16, 1024) / 131072 == pytest.approx(0.070, abs=0.0005)


def test_cache_bytes():
    assert cost.cache_entries(100, 8, 20) == 12 + 27
    assert cost.cache_bytes(cost.cache_entries(100, 8, 20), 3, 2, 16, 4) == 2 * 3 * 2 * 16 * 4 * 39


def test_the_floor_is_the_slower_of_arithmetic_and_memory():
    assert floor.floor_seconds(10, 2) == 5
    assert floor.floor_seconds(10, 2, 100, 10) == 10
    assert floor.operator_bytes(10, 4, 2, 8, 2) == 10 * 8 * 2 * 12
    assert floor.operator_bytes(10, 4, 2, 8, 2, backward=True) == 2 * 10 * 8 * 2 * 12


def test_decoding_reads_what_the_last_query_sees():
    for position, g, s in ((0, 4, 3), (6, 4, 3), (39, 4, 3), (500, 16, 32)):
        entries = num_visible_cores(position, g, s) + position + 1 - local_start(position, g, s)
        assert (
            floor.decode_bytes(position, 3, 8, 2, group_size=g, window_size=s, batch=5)
            == 2 * 5 * 3 * 8 * 2 * entries
        )
    assert floor.decode_bytes(99, 3, 8, 2) == 2 * 3 * 8 * 2 * 100


def test_operations_of_a_pass():
    forward, backward, both = (
        floor.pass_flops(name, 200, 4, 2, 8, group_size=4, window_size=9)
        for name in ("forward", "backward", "forward_backward")
    )
    assert forward == cost.operator_flops(200, 4, 2, 8, group_size=4, window_size=9)
    assert backward == cost.operator_flops(200, 4, 2, 8, group_size=4, window_size=9, backward=True)
    assert both == forward + backward


def test_model_operations_match_pytorchs_counter(tmp_path):
    folder = save_tiny_model(tmp_path)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    length = 50
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), logits_to_keep=1, use_cache=False)
    found = cost.ModelCost.of(config)
    # Eager attention computes the whole square, we count the causal half; and the rotary angles are
    # no matrix product.
    square = 2 * 4 * 4 * 16 * length * length
    causal = 2 * cost.attention_flops(length, 4, 16)
    rotary = counter.get_total_flops() - (found.prefill_flops(length) - causal + square)
    assert 0 <= rotary <= 2 * length * 16
    assert found.weight_bytes() == 4 * (
        sum(p.numel() for p in model.parameters() if p.dim() > 1) - 256 * 64
    )
    assert found.cache_bytes(4000, 16, 256) == 2 * 2 * 2 * 16 * 4 * (250 + 271)


def test_tied_head_and_sliding_layers():
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    found = cost.ModelCost.of(config)
    assert (found.num_layers, found.windows, found.head_weights) == (1, (16, 16), 64 * 32)
    assert found.linear_weights == 3 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48)
    entry = 2 * 2 * 8 * found.itemsize
    assert found.cache_bytes(1000, 10, 50) == entry * (2 * 16 + 100 + 59)
    attention = found.prefill_flops(1000) - 2 * (1000 * found.linear_weights + found.head_weights)
    banded = sum(min(t + 1, 16) for t in range(1000))
    assert attention == 4 * 4 * 8 * (1000 * 1001 // 2 + 2 * banded)


def test_experts_count_as_often_as_they_are_used():
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    expected = 32 * 32 * 2 + 2 * 32 * 16 + 2 * (3 * 32 * 24) + 32 * 8  # the last: the router
    assert cost.ModelCost.of(config).linear_weights == expected


def test_llama_2_7b():
    """6.6 G weights a token, 0.5 MiB of cache a token in 16 bits."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        dtype="bfloat16",
    )
    found = cost.ModelCost.of(config)
    assert found.linear_weights == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert found.cache_bytes(1) == 2**19


@pytest.mark.parametrize("length, n", [(5, 8), (8, 8), (9, 8), (60, 8), (61, 40), (61, 44)])
def test_first_tokens_count_as_seen_by_all_that_follow(length, n):
    """Each query's visible entries, one by one: first tokens raw, the rest a sequence of its
    own."""
    g, s = 4, 9
    pairs = 0
    for t in range(length):
        pairs += min(t + 1, n)
        if t >= n:
            pairs += num_visible_cores(t - n, g, s) + t - n + 1 - local_start(t - n, g, s)
    settings = {"group_size": g, "window_size": s, "sinks": n}
    attention = 4 * 8 * 6 * pairs
    pooling = max(0, length - n) // g * g * 8 * (2 * 6 + 4 * 2)
    assert cost.attention_flops(length, 6, 8, **settings) == attention
    assert cost.operator_flops(length, 6, 2, 8, **settings) == attention + pooling
    backward = cost.operator_flops(length, 6, 2, 8, **settings, backward=True)
    assert 2 * backward == 5 * attention + 4 * pooling
    model = cost.ModelCost(3, 6, 2, 8, linear_weights=100, head_weights=70, itemsize=2)
    weights = 2 * (100 * length + 70)
    assert model.prefill_flops(length, g, s, n) == weights + 3 * (attention + pooling)
    entries = max(0, length - n) // g + min(n, length) + s + g - 1
    assert model.cache_bytes(length, g, s, n) == 2 * 3 * 2 * 8 * 2 * entries


@pytest.mark.parametrize("forwards", [1, 2])
def test_a_training_step_is_its_forwards_and_a_backward(forwards):
    """A weight costs two operations for each token of a forward and four of a backward, the output
    head no second forward."""
    model = cost.ModelCost(3, 6, 2, 8, linear_weights=100, head_weights=70, windows=(5, 60))
    length, g, s = 40, 4, 9
    sizes = (length, 6, 2, 8, g, s)
    layers = forwards * cost.operator_flops(*sizes) + cost.operator_flops(*sizes, backward=True)
    banded = sum(min(t + 1, window) for t in range(length) for window in (5, 60))
    sliding = 2 * (2 * forwards + 5) * 6 * 8 * banded
    weights = length * (2 * (forwards + 2) * 100 + 6 * 70)
    step = model.step_flops(length, g, s, checkpointing=forwards == 2)
    assert step == 3 * layers + sliding + weights
    if forwards == 2:
        assert step == model.step_flops(length, g, s)
    # A window holds no more tokens than there are.
    assert model.cache_bytes(length) == 2 * 2 * 8 * 2 * (3 * 40 + 5 + 40)
    assert model.weight_bytes() == 170 * 2


def test_bytes_of_a_number_are_those_of_the_checkpoint():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    for dtype, size in (("float16", 2), (torch.bfloat16, 2), ("float64", 8), (None, 4)):
        config = LlamaConfig(**sizes, **heads, dtype=dtype)
        found = cost.ModelCost.of(config)
        assert found.itemsize == size and (found.query_heads, found.kv_heads) == (2, 1)
        assert found.head_dim == 4


def test_sizes_that_a_config_leaves_out():
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, num_key_value_heads=2, head_dim=16)
    assert ModelSizes.of(config) == (6, 2, 16, 3)
    config.num_key_value_heads = None
    config.head_dim = None
    assert ModelSizes.of(config) == (6, 6, 8, 3)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "multiple of its 4 KV heads .* 6"),
        ({"num_hidden_layers": 0}, "num_hidden_layers of at least 1 in its config.json, got 0"),
        ({"num_key_value_heads": -1}, "num_key_value_heads of at least 1 in its config.json"),
        ({"vocab_size": 0}, "vocab_size of at least 1"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, None),
        ({"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}, None),
        ({}, None),
    ],
)
def test_counts_that_no_model_has_are_refused(sizes, message):
    config = SimpleNamespace(**sizes)
    if message is None:
        check_counts("tiny", config)
        return
    with pytest.raises(UserError, match=f"model 'tiny' must have a {message}"):
        check_counts("tiny", config)


@pytest.mark.parametrize("name", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_of_routed_experts_those_that_a_token_uses_count(name):
    """Whatever a family calls their number; a router and shared experts count whole, embeddings
    and vectors not at all."""
    model = torch.nn.Module()
    model.embed, model.head = (torch.nn.Linear(4, 9, bias=False) for _ in range(2))
    model.get_input_embeddings = lambda: model.embed
    model.get_output_embeddings = lambda: model.head
    model.norm = torch.nn.LayerNorm(4)
    model.shared_experts = torch.nn.Linear(4, 5)
    model.router = torch.nn.Linear(4, 3)
    model.mlp = torch.nn.Module()
    model.mlp.experts = torch.nn.Linear(4, 7, bias=False)
    text = SimpleNamespace(**{name: 3, "num_experts_per_tok": 2})
    assert cost._weights_per_token(model, text) == 20 + 12 + 28 * 2 // 3
    text.num_experts_per_tok = None
    assert cost._weights_per_token(model, text) == 20 + 12 + 28
    assert cost._weights_per_token(model, SimpleNamespace()) == 20 + 12 + 28


def test_sizes_are_those_of_the_text_decoder():
    """Of a model that also sees or encodes."""
    text = SimpleNamespace(
        num_attention_heads=6, num_key_value_heads=2, head_dim=5, num_hidden_layers=3
    )
    config = SimpleNamespace(get_text_config=lambda decoder=False: text if decoder else None)
    assert ModelSizes.of(config) == ModelSizes(query_heads=6, kv_heads=2, head_dim=5, layers=3)
    for dtype, size in (("bfloat16", 2), ("float64", 8), (torch.float16, 2), ("unknown", 4)):
        assert cost._itemsize(SimpleNamespace(dtype=dtype)) == size
