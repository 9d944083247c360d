"""The comparison of indices on a pretrained model, on a tiny one."""

from __future__ import annotations

import pytest
import torch
from test_real import COUNTS, SIZES, data, model  # noqa: F401

from corecontext import cca_attention
from corecontext.config import CCAConfig
from corecontext.ops.fetch import query_blocks
from corecontext.ops.fetch.index import index_of
from corecontext.ops.spec import Spec
from corecontext.record import read_records
from reproduction.command import main
from reproduction.index_methods import Projected
from reproduction.index_training import (
    LayerIndex,
    Projections,
    Sample,
    groups_of,
    log_shares,
    principal,
    sees_groups,
)
from reproduction.real_methods import Sizes


def test_the_command(data, model, tmp_path):  # noqa: F811
    """Far perplexity and needles are those of `real`, which reads text by text with a cache; the
    exact masses recall all groups."""
    output = str(tmp_path / "real.jsonl")
    base = ["--model", str(model), "--data", str(data), "--output", output, *SIZES, *COUNTS]
    fetch = ["--method", "fetch", "--fetch-index", "oracle", "--fetch-groups", "2", "--core-mass"]
    assert main(["real", *fetch, *base]) == 0
    whole = {record.name: record.value for record in read_records(output)}
    base += ["--tokens", "8", "--rows-at-once", "2"]
    options = ["--full", "--recall-windows", "1", "--index", "oracle", "--index", "pairs:2"]
    options += ["--index", "mean@8"]
    assert main(["indices", *base, *options]) == 0
    options = ["--index", "parts:4:4", "--rank", "4", "--steps", "2", "--learn-windows", "2"]
    options += ["--learn-length", "64", "--needles", "0"]
    assert main(["indices", *base, *options]) == 0
    values = {}
    assert len(read_records(output)) == 2 + 3 * 3 + 2 + 2 * 2
    for record in read_records(output):
        p = record.params
        values[record.name, p["index"], p["fetch_groups"]] = record
    assert values["real.recall", "oracle", 2].value == 1
    assert 0 < values["real.recall", "pairs:2", 2].value < 1
    assert values["real.recall", "mean", 1].params["group_size"] == 8
    full = values["real.accuracy", None, None].params
    assert (full["method"], full["host_bytes"]) == ("full", 0)
    learned = values["real.perplexity", "learned:4:parts:4:4", 2]
    assert (learned.params["index_steps"], learned.params["index_windows"]) == (2, 2)
    projected = values["real.perplexity", "projected:4:parts:4:4", 2]
    assert projected.params["index_steps"] == 0 and projected.value != learned.value
    ours = values["real.perplexity", "oracle", 2]
    assert ours.value == pytest.approx(whole["real.perplexity"], rel=1e-5)
    assert values["real.accuracy", "oracle", 2].value == whole["real.accuracy"]
    assert learned.params["device_bytes"] > ours.params["device_bytes"]


def test_an_index_learns_the_shares_of_the_groups():
    """By two of eight elements, and two keys of four: queries read hardly any others."""
    generator = torch.Generator().manual_seed(0)
    spec = Spec(4, 8, 1.0, sink_size=4)
    q = torch.randn(2, 3, 40, 8, generator=generator)
    k = torch.randn(2, 132, 8, generator=generator)
    q[..., 2:] *= 0.01
    k[..., 2:] *= 3
    # The first query sees no group.
    position = torch.cat((torch.tensor([6]), torch.arange(93, 132)))
    index = LayerIndex([Sample(q, position, k)] * 2, 2, "parts:2:2", spec)
    first = index.projections.detached()
    index.learn(120, generator)
    assert index.losses[0] < 0.2 and index.losses[-1] < 0.75 * index.losses[0]
    assert not torch.equal(first.key, index.projections.key)
    groups = groups_of(k, spec)
    assert torch.equal(groups[:, 0], k[:, 4:8]) and groups.shape == (2, 32, 4, 8)
    visible = sees_groups(position, 32, spec)
    assert visible.sum(1).tolist() == [0] + [(int(p) - 4 - 8 + 1) // 4 for p in position[1:]]
    shares = log_shares(q[:, :, 1:], groups, visible[1:], spec).exp()
    torch.testing.assert_close(shares.sum(-1), torch.ones(2, 3, 39))


def test_principal_directions_keep_the_scores():
    """All of them every score; two of eight those of queries and keys that differ in two alone, of
    the same variance in each direction."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 40, 8, generator=generator) * torch.tensor([9.0] + [1.0] * 7)
    k = torch.randn(2, 132, 8, generator=generator)
    flat = q.flatten(1, 2)
    for rank in (8, 2):
        if rank == 2:
            k[..., :6] *= 1e-4
        query, key = principal(q, k, rank)
        projected_q = flat @ query
        projected_k = k @ key
        torch.testing.assert_close(projected_q @ projected_k.mT, flat @ k.mT, atol=0.02, rtol=0)
        variances = [x.square().mean(1) for x in (projected_q, projected_k)]
        torch.testing.assert_close(*variances, atol=1e-4, rtol=1e-3)
        assert (variances[0].diff(dim=1) < 0).all()


def test_each_kv_head_chooses_by_its_own_projection(monkeypatch):
    """In blocks of one KV head as in one block of all; by identities as without projections."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 160, 8, generator=generator)
    k, v = torch.randn(2, 1, 3, 160, 8, generator=generator)
    options = {"group_size": 4, "window_size": 8, "fetch_groups": 2, "fetch_index": "pairs:4"}
    options |= {"fetch_share": 1, "backend": "packed", "core_position": "token"}
    pair = torch.randn(2, 3, 8, 4, generator=generator)
    identity = torch.eye(8).expand(3, 8, 8)
    same, narrow = Projections(identity, identity), Projections(*pair)
    whole = cca_attention(q, k, v, **options)

    def by(projections):
        index = Projected(projections, index_of("pairs:4"))
        return cca_attention(q, k, v, **options | {"fetch_index": index})

    expected = by(narrow)
    assert not torch.allclose(expected, whole)
    for number in (1 << 22, 1):
        monkeypatch.setitem(query_blocks._ELEMENTS, "cpu", number)
        torch.testing.assert_close(by(narrow), expected)
        torch.testing.assert_close(by(same), whole)


def test_groups_of_another_size_in_the_bytes_of_cca():
    sizes = Sizes(core_mass=True, fetch_groups=32, fetch_index="bits:2")
    equal = sizes.fetch_equal_bytes(32)
    assert (equal.group_size, equal.window_size, equal.store) == (32, 160, "host")
    assert isinstance(equal, CCAConfig)
    with pytest.raises(ValueError, match="window_size must be larger"):
        sizes.fetch_equal_bytes()
