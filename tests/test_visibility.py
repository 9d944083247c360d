"""The integer rules against definitions written independently, for every small length, group and
window."""

from itertools import product

import pytest
import torch

from corecontext import visibility as vis

GROUPS, WINDOWS, LENGTHS = range(1, 8), range(1, 12), range(41)
SIZES = list(product(GROUPS, WINDOWS))


def seen_by(position: int, group_size: int, window_size: int) -> tuple[list[int], list[int]]:
    """Core tokens and raw tokens that a query sees, by definition: a group is compressed as soon as
    none of its tokens is among the window_size nearest ones, and everything not compressed is seen
    as itself."""
    nearest = set(range(position - window_size + 1, position + 1))
    cores = []
    for group in range(position // group_size + 1):
        members = set(range(group * group_size, (group + 1) * group_size))
        if max(members) <= position and not members & nearest:
            cores.append(group)
    raw = [token for token in range(position + 1) if token // group_size not in cores]
    return cores, raw


@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_queries_see_what_the_definition_says(group_size, window_size):
    positions = torch.arange(max(LENGTHS))
    as_tensor = vis.visible_cores_of(positions, group_size, window_size)
    sees_core = vis.sees_core(positions, positions[:, None], group_size, window_size)
    sees_token = vis.sees_token(positions, positions[:, None], group_size, window_size)
    for position in positions.tolist():
        cores, raw = seen_by(position, group_size, window_size)
        assert cores == list(range(vis.num_visible_cores(position, group_size, window_size)))
        assert raw == list(range(vis.local_start(position, group_size, window_size), position + 1))
        assert int(as_tensor[position]) == len(cores)
        assert sees_core[position].nonzero().flatten().tolist() == cores
        assert sees_token[position].nonzero().flatten().tolist() == raw
        for sinks in (group_size, 3 * group_size):
            with_sinks = vis.sees_token(
                positions, positions[position], group_size, window_size, sinks
            )
            first = range(min(sinks, position + 1))
            assert with_sinks.nonzero().flatten().tolist() == sorted({*first, *raw})


@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_each_token_is_covered_exactly_once(group_size, window_size):
    for position in range(max(LENGTHS)):
        times = [0] * (position + 1)
        for core in range(vis.num_visible_cores(position, group_size, window_size)):
            for token in range(core * group_size, (core + 1) * group_size):
                times[token] += 1
        for token in range(vis.local_start(position, group_size, window_size), position + 1):
            times[token] += 1
        assert times == [1] * (position + 1)


@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_the_local_part_has_between_s_and_s_plus_g_minus_1_tokens(group_size, window_size):
    counts = [t + 1 - vis.local_start(t, group_size, window_size) for t in range(max(LENGTHS))]
    full = counts[window_size - 1 :]
    assert counts[:window_size] == list(range(1, window_size + 1))
    assert min(full) == window_size
    assert max(full) == window_size + group_size - 1 == vis.window_capacity(group_size, window_size)


@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_a_core_token_is_only_seen_once_its_group_is_complete(group_size, window_size):
    for position in range(max(LENGTHS)):
        visible = vis.num_visible_cores(position, group_size, window_size)
        assert (
            visible
            <= vis.num_complete_groups(position + 1, group_size)
            == (position + 1) // group_size
        )


@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_first_core_query_and_full_attention(group_size, window_size):
    first = vis.first_core_query(group_size, window_size)
    assert vis.num_visible_cores(first - 1, group_size, window_size) == 0
    assert vis.num_visible_cores(first, group_size, window_size) == 1
    for seq_len in LENGTHS:
        sees_core = any(seen_by(t, group_size, window_size)[0] for t in range(seq_len))
        assert vis.is_full_attention(seq_len, group_size, window_size) == (
            group_size == 1 or not sees_core
        )


@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_queries_in_packs_of_g_see_one_more_core_token_each_pack(group_size, window_size):
    first = vis.first_core_query(group_size, window_size)  # docs/math.md, eq. 6
    for u in range(3 * group_size):
        assert vis.num_visible_cores(first + u, group_size, window_size) == u // group_size + 1


@pytest.mark.parametrize("group_size, window_size", SIZES)
def test_number_of_scores_in_closed_form(group_size, window_size):
    total = 0
    for seq_len in LENGTHS:
        assert vis.num_scores(seq_len, group_size, window_size) == total
        cores, raw = seen_by(seq_len, group_size, window_size)
        total += len(cores) + len(raw)


@pytest.mark.parametrize("window_size, num_groups", list(product(WINDOWS, range(1, 7))))
def test_constant_number_of_groups(window_size, num_groups):
    for seq_len in range(1, 60):
        size = vis.group_size_for(seq_len, window_size, num_groups)
        seen = vis.num_visible_cores(seq_len - 1, size, window_size)
        assert size >= 1 and seen <= num_groups
        # The smallest such size: with groups one token smaller they would no longer be enough for
        # the distant tokens.
        assert size == 1 or (size - 1) * num_groups < seq_len - window_size <= size * num_groups


def test_the_specification_sizes():
    assert vis.num_scores(131072, 16, 1024) / (131072 * 131073 / 2) == pytest.approx(
        1 / 12.9, rel=0.01
    )
