"""Streamed training data: every token of a pass once, shuffled, and read on from the exact
sample."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch

datasets = pytest.importorskip("datasets", reason="training reads its data with datasets")

from corecontext.data.row_stream import StreamedRows, open_shards  # noqa: E402
from corecontext.files import UserError  # noqa: E402

LENGTH = 31


def encode(texts):
    """One token a byte."""
    return [list(text.encode()) for text in texts]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Local files, and a folder that `load_dataset` takes as it takes a name on the hub: 40
    documents."""
    folder, rows = (
        tmp_path_factory.mktemp("stream"),
        [{"text": f"<{i}>" + "abc" * (i % 9)} for i in range(40)],
    )
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[:10])
    (folder / "b.txt").write_text(rows[10]["text"])
    hub = folder / "hub"
    hub.mkdir()
    datasets.Dataset.from_list([{"text": None}, *rows[11:25]]).to_parquet(hub / "train-0.parquet")
    datasets.Dataset.from_list([*rows[25:], {"text": " "}]).to_parquet(hub / "train-1.parquet")
    return [str(folder / "a.jsonl.gz"), str(folder / "b.txt"), f"hub:{hub}"], [
        row["text"] for row in rows
    ]


def stream(names, count=40, **options):
    return StreamedRows(open_shards(names), encode, LENGTH, count, **{"block_size": 6, **options})


def test_a_pass_holds_every_document_once_in_random_order(names):
    names, texts = names
    rows = stream(names)
    per_pass = sum(map(len, texts)) // LENGTH
    passes = [[rows[i] for i in range(per_pass * n, per_pass * (n + 1))] for n in (0, 1)]
    for one in passes:
        text = bytes(np.concatenate([row["input_ids"].numpy() for row in one]).tolist()).decode()
        assert sum(whole in text for whole in texts) >= 38  # what does not fill a row is left out
        assert all(torch.equal(row["labels"] == -100, row["position_ids"] == 0) for row in one)
        assert text != "".join(texts)[: len(text)]
    assert not all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(*passes))
    told = rows.describe(2 * per_pass - 1)
    assert "(tokens 0 to" in told and any(
        name in told for name in ("a.jsonl.gz:", "b.txt:1", "hub part ")
    )
    assert len(rows) == 40 and rows.describe(10**6) == "read long ago"
    with pytest.raises(IndexError):
        rows[40]


def test_each_pass_over_one_file_has_an_order_of_its_own(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": chr(65 + i) * LENGTH}) + "\n" for i in range(20)))
    rows = stream([str(path)], 60, block_size=100)
    first = [int(rows[i]["input_ids"][0]) for i in range(60)]
    passes = [first[:20], first[20:40], first[40:]]
    assert all(sorted(one) == list(range(65, 85)) for one in passes)
    assert len(set(map(tuple, passes))) == 3


def test_it_is_read_on_from_the_exact_sample(names):
    names, _ = names
    whole = [row["input_ids"] for row in map(stream(names).__getitem__, range(40))]
    before = stream(names, ahead=5)
    read = []
    for stop in range(1, 36):
        before[stop + 3]  # as a loader that is ahead
        state = json.loads(json.dumps(before.state_dict(stop)))
        assert state["row"] <= stop
        after = stream(names)
        opened = []
        after.shards = [_Counted(shard, opened) for shard in after.shards]
        after.load_state_dict(state)
        assert torch.equal(after[stop]["input_ids"], whole[stop]), stop
        read.append(len(opened))
        assert torch.equal(after[stop + 4]["input_ids"], whole[stop + 4]), stop
        assert torch.equal(after[stop + 1]["input_ids"], whole[stop + 1]), stop  # and back
    assert (
        max(read) <= 12 and len(before._states) < 10
    )  # neither from the start nor with everything kept
    others = stream(names, seed=1)
    assert not torch.equal(others[0]["input_ids"], whole[0])


class _Counted:
    """A shard that counts the documents read."""

    def __init__(self, shard, opened):
        self.shard, self.opened, self.state = shard, opened, shard.state

    def read(self, state=None):
        for one in self.shard.read(state):
            self.opened.append(one)
            yield one


def test_what_is_broken_is_said(tmp_path, names):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "0123456789"}\n{"text": 7}\n')
    with pytest.raises(UserError, match="a.jsonl', line 2: field 'text' must be text, got int"):
        stream([str(path)])[0]
    path.write_text('{"text": "0123456789"}\n')
    with pytest.raises(UserError, match=f"at least one row of {LENGTH} tokens, got 10 tokens"):
        stream([str(path)])[0]
    with pytest.raises(UserError, match="dataset .* cannot be had"):
        stream([f"hub:{tmp_path}/nothing"])
    for wrong in ("hub:", "hub:a:b:c:d"):
        with pytest.raises(UserError, match=r"must name a hub dataset as hub:NAME\[@REVISION\]"):
            stream([wrong])
    with pytest.raises(UserError, match="data must name at least one"):
        stream([])
    with pytest.raises(
        UserError, match="hub part [01]', line 1: field 'body' is missing, got text"
    ):
        StreamedRows(open_shards(names[0][2:], text_field="body"), encode, LENGTH, 9)[0]
