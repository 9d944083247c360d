"""The comparison of indices on a pretrained model, on a tiny one."""

import pytest
import torch
from test_real import COUNTS, SIZES, data, model  # noqa: F401

from corecontext import cca_attention
from corecontext.config import CCAConfig
from corecontext.ops.fetch import query_blocks
from corecontext.ops.fetch.mean import Mean
from corecontext.record import read_records
from reproduction.command import main
from reproduction.real.methods import Sizes


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
    values = {}
    assert len(read_records(output)) == 2 + 3 * 3 + 2
    for record in read_records(output):
        p = record.params
        values[record.name, p["index"], p["fetch_groups"]] = record
    assert values["real.recall", "oracle", 2].value == 1
    assert 0 < values["real.recall", "pairs:2", 2].value < 1
    assert values["real.recall", "mean", 1].params["group_size"] == 8
    full = values["real.accuracy", None, None].params
    assert (full["method"], full["host_bytes"]) == ("full", 0)
    ours = values["real.perplexity", "oracle", 2]
    assert ours.value == pytest.approx(whole["real.perplexity"], rel=1e-5)
    assert values["real.accuracy", "oracle", 2].value == whole["real.accuracy"]


class Projected(Mean):
    """The mean of projected keys; an index may carry weights."""

    name = "projected"

    def __init__(self, query, key):
        self.query, self.key = query, key

    def key_dim(self, head_dim):
        return self.key.shape[-1]

    def encode(self, keys, centre):
        return super().encode(keys @ self.of_heads(keys, self.key)[:, None], centre)

    def map_queries(self, q):
        return q @ self.of_heads(q, self.query)[:, None]

    def of_heads(self, x, weights):
        return weights.repeat(len(x) // len(weights), 1, 1)


def test_each_kv_head_chooses_by_its_own_projection(monkeypatch):
    """In blocks of one KV head as in one block of all; by identities as without projections."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 160, 8, generator=generator)
    k, v = torch.randn(2, 1, 3, 160, 8, generator=generator)
    options = {"group_size": 4, "window_size": 8, "fetch_groups": 2, "fetch_index": "mean"}
    options |= {"fetch_share": 1, "backend": "packed", "core_position": "token"}
    pair = torch.randn(2, 3, 8, 4, generator=generator)
    identity = torch.eye(8).expand(3, 8, 8)
    whole = cca_attention(q, k, v, **options)

    def by(*weights):
        return cca_attention(q, k, v, **options | {"fetch_index": Projected(*weights)})

    expected = by(*pair)
    assert not torch.allclose(expected, whole)
    for number in (1 << 22, 1):
        monkeypatch.setitem(query_blocks._ELEMENTS, "cpu", number)
        torch.testing.assert_close(by(*pair), expected)
        torch.testing.assert_close(by(identity, identity), whole)


def test_groups_of_another_size_in_the_bytes_of_cca():
    sizes = Sizes(core_mass=True, fetch_groups=32, fetch_index="bits:2")
    equal = sizes.fetch_equal_bytes(32)
    assert (equal.group_size, equal.window_size, equal.store) == (32, 160, "host")
    assert isinstance(equal, CCAConfig)
    with pytest.raises(ValueError, match="window_size must be larger"):
        sizes.fetch_equal_bytes()
