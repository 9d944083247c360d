"""The caches of KV heads that keep every token in vLLM: every head of a rank has a place of its
own, in caches that are alike on all ranks."""

import random

import pytest

from corecontext import CCAConfig
from corecontext.integrations.vllm.raw_heads import RawHeads, grouped_caches


def raw_heads(sizes, kv_heads: int, ranks: int = 1) -> RawHeads:
    config = CCAConfig.pooling(4, 9, layer_group_sizes=sizes)
    return RawHeads.of([config.of_layer(i) for i in range(len(sizes))], kv_heads, ranks)


def test_heads_of_each_rank():
    sizes = (4, (1, 4, 4, 1), 1)
    assert raw_heads(sizes, 4).heads == (((),), ((0, 3),), ((0, 1, 2, 3),))
    assert raw_heads(sizes, 4, 2) == ((((), ()), ((0,), (1,)), ((0, 1), (0, 1))), 2)
    # More ranks than heads: two ranks have the same one.
    assert raw_heads(sizes, 4, 8).heads[1] == ((0,), (0,), (), (), (), (), (0,), (0,))
    plan = raw_heads(sizes, 4, 4)
    assert [plan.pools(layer) for layer in range(3)] == [True, True, False]
    assert plan.most([0, 1]) == 1 and plan.most([1, 2]) == 2
    by_head = CCAConfig.pooling(4, 9, head_group_sizes=(4, 1))
    assert RawHeads.of([by_head] * 2, 2).heads == (((1,),), ((1,),))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_head_of_a_rank_has_a_place_of_its_own(ranks):
    draw = random.Random(ranks)
    for _ in range(50):
        sizes = tuple(tuple(draw.choices((1, 4), (1, 3), k=4)) for _ in range(5))
        plan = raw_heads(sizes, 4, ranks)
        layers = sorted(draw.sample(range(5), draw.randint(1, 5)))
        per_cache = draw.randint(1, plan.kv_heads)
        caches = -(-plan.most(layers) // per_cache)
        for rank in range(ranks):
            shares = plan.shares(layers, rank, per_cache)
            for layer in layers:
                heads = [head for share in shares[layer] for head in share.heads]
                assert heads == list(plan.heads[layer][rank])
            placed = [share for layer in layers for share in shares[layer]]
            places = [(x.cache, x.first + i) for x in placed for i in range(len(x.heads))]
            assert len(set(places)) == len(places) <= plan.most(layers)
            assert all(cache < caches and place < per_cache for cache, place in places)


def picked(counts: list[int], layers: int = 32, kv_heads: int = 8, page_size: int = 16) -> int:
    """Heads of a cache where layers have so many raw heads, the others none; g is 16."""
    counts = counts + [0] * (layers - len(counts))
    sizes = tuple(tuple([1] * count + [16] * (kv_heads - count)) for count in counts)
    return raw_heads(sizes, kv_heads).per_cache(page_size, 16)


@pytest.mark.parametrize(
    "counts, expected",
    [
        ([1] * 16, 1),  # two groups of 16 layers, and one of these heads
        ([2] * 32, 2),  # a cache a layer
        ([8] * 8, 8),  # layers of such heads alone have caches of their own
        ([1], 1),
        ([5] * 32, 1),  # five do not divide the entries of a page
        ([1] * 16 + [2] * 16, 4),  # 12 layers a group: with one or two heads 32, a third empty
    ],
)
def test_heads_of_a_cache_take_the_least_memory(counts, expected):
    assert picked(counts) == expected


def test_groups_of_layers():
    assert grouped_caches([32, 16]) == (16, [2, 1])
    assert grouped_caches([32, 33]) == (33, [1, 1])
    assert grouped_caches([4, 6]) == (4, [1, 2])
    assert grouped_caches([3, 1]) == (1, [3, 1])
