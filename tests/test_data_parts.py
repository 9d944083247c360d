"""The parts of training data: names, fields and places of documents, compressed files, and which
tokens a row has; each function against a table of cases."""

import bz2
import gzip
import hashlib
import json
import lzma
import os

import numpy as np
import pytest

datasets = pytest.importorskip("datasets", reason="training reads its data with datasets")

from corecontext.data.corpus import encoder, read_corpus  # noqa: E402
from corecontext.data.documents import (  # noqa: E402
    Fields,
    HubName,
    document,
    documents,
    field,
    files_of,
)
from corecontext.data.packing import (  # noqa: E402
    PackedRows,
    run_order,
    shuffled,
)
from corecontext.data.readers import (  # noqa: E402
    file_hash,
    find_file,
    model_hash,
    numbered_lines,
    open_text,
    read_documents,
    read_json,
    read_text_file,
)
from corecontext.files import UserError, read_text  # noqa: E402

# Names, fields and places


@pytest.mark.parametrize(
    "name, parts",
    [
        ("hub:me/set", ("me/set", None, None, "train")),
        ("hub:me/set@v2", ("me/set", "v2", None, "train")),
        ("hub:me/set:part", ("me/set", None, "part", "train")),
        ("hub:me/set::test", ("me/set", None, None, "test")),
        ("hub:me/set@v2:part:test", ("me/set", "v2", "part", "test")),
    ],
)
def test_a_hub_name_has_four_parts_that_all_reach_the_hub(name, parts, monkeypatch):
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **options: asked.append((args, options))
    )
    parsed = HubName.parse(name)
    assert parsed == parts
    parsed.load(cache_dir="c", streaming=True)
    identifier, revision, config, split = parts
    options = {"split": split, "revision": revision, "cache_dir": "c", "streaming": True}
    assert asked == [((identifier, config), options)]


def test_a_document_has_its_text_kind_and_place():
    fields = Fields("meta.text", "meta.kind.name")
    row = {"meta": {"text": " a ", "kind": {"name": 3}}}
    place = "c:/a:b.jsonl:7"
    assert document(row, place, fields) == {"text": " a ", "source": "3", "origin": place}
    assert document({"text": "a"}, place, Fields())["source"] == ""
    assert document({"text": "\n\t"}, place, Fields()) is None
    assert field({"a": {"b": None}}, "a.b", place) is None
    for wrong in ({"meta": "text"}, {"meta": ["text"]}, {"meta": {"body": 1}}, {"text": "a"}):
        (key,) = wrong
        message = rf"^file 'c:/a:b.jsonl', line 7: field 'meta.text' is missing, got {key}\."
        with pytest.raises(UserError, match=message):
            document(wrong, place, fields)
    with pytest.raises(UserError, match="'c:/a:b.jsonl', line 7: field 'text' must be text, got"):
        document({"text": None}, place, Fields())


def test_files_of_a_folder_come_in_order_from_all_its_folders(tmp_path, monkeypatch):
    names = ["a/b/c.parquet", "a/z.jsonl.bz2", "b.TXT", "b.txt", "c.NDJSON.GZ", "d.text", "e.Md"]
    for name in ("e.csv", *reversed(names), "f"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "g.txt").mkdir()
    assert files_of(str(tmp_path)) == [tmp_path / name for name in names]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files_of("~/b.txt") == [tmp_path / "b.txt"]


def test_rows_of_a_parquet_file_are_numbered_through_all_its_batches(tmp_path):
    rows = [{"other": {"x": 1}, "meta": {"text": str(i), "kind": "k"}} for i in range(300)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("plain")
    paths = [tmp_path / "b.txt", tmp_path / "a.parquet"]  # in the order that is asked for
    plain, *got = documents(paths, Fields("meta.text", "meta.kind"))
    assert [one["origin"] for one in got] == [f"{paths[1]}:{i + 1}" for i in range(300)]
    assert [one["text"] for one in got] == [str(i) for i in range(300)]
    assert {one["source"] for one in got} == {"k"}
    # Plain text has no fields.
    assert plain == {"text": "plain", "source": "", "origin": f"{paths[0]}:1"}


def test_rows_of_a_hub_dataset_are_numbered(tmp_path):
    rows = [{"body": None if i % 3 else str(i), "kind": "k"} for i in range(150)]
    got = list(HubName.parse("hub:full").documents(rows, Fields("body", "kind")))
    assert [one["origin"] for one in got] == [f"full:{i + 1}" for i in range(0, 150, 3)]
    assert [one["text"] for one in got] == [str(i) for i in range(0, 150, 3)]
    assert {one["source"] for one in got} == {"k"}


def test_a_document_ends_once():
    tokenizer = lambda texts, **_: {"input_ids": [list(map(int, text)) for text in texts]}  # noqa: E731
    tokenizer.eos_token_id = 9
    assert encoder(tokenizer)(["12", "129", "9", ""]) == [[1, 2, 9], [1, 2, 9], [9], [9]]
    tokenizer.eos_token_id = 0
    assert encoder(tokenizer)(["12", "10"]) == [[1, 2, 0], [1, 0]]
    tokenizer.eos_token_id = None
    assert encoder(tokenizer)(["12"]) == [[1, 2]]


class _Tokenizer:
    """A tokenizer that gives every character a number of its own."""

    eos_token_id = None

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __repr__(self) -> str:
        return f"offset {self.offset}"

    def __call__(self, texts, **_):
        return {"input_ids": [[ord(x) + self.offset for x in text] for text in texts]}


def test_kept_tokens_are_of_the_same_file_fields_and_tokenizer(tmp_path):
    path = tmp_path / "a.jsonl"
    stamp = 10**18

    def write(**row):
        nonlocal stamp
        path.write_text(json.dumps(row))
        stamp += 10**9
        os.utime(path, ns=(stamp, stamp))

    def read(offset=0, **options):
        (row,) = read_corpus([str(path)], _Tokenizer(offset), cache_dir=str(tmp_path), **options)
        return "".join(map(chr, row["input_ids"])), row["source"]

    write(a="x", b="y")
    assert read(text_field="a") == ("x", "")
    assert read(text_field="b") == ("y", "")
    assert read(text_field="a", source_field="b") == ("x", "y")
    assert read(text_field="a", offset=1) == ("y", "")
    write(a="z", b="y")  # of the same size
    assert read(text_field="a") == ("z", "")


# Files


def test_a_file_is_read_by_its_ending(tmp_path):
    content = '\ufeff{"text": "\u00e9"}\n\n{"text": "b"}\n'.encode()
    for ending, pack in (
        ("", bytes),
        (".xz", lzma.compress),
        (".GZ", gzip.compress),
        (".bz2", bz2.compress),
    ):
        path = tmp_path / f"a.jsonl{ending}"
        path.write_bytes(pack(content))
        assert list(numbered_lines(path)) == [(1, {"text": "\u00e9"}), (3, {"text": "b"})]
        assert read_text_file(path).startswith('{"text": "\u00e9"')
        path = tmp_path / f"a.json{ending}"
        path.write_bytes(pack(b'\xef\xbb\xbf{"a": [1]}'))
        assert read_json(path) == {"a": [1]}
    with pytest.raises(UserError, match="cannot be read: No such file or directory"):
        open_text(tmp_path / "none")
    path = tmp_path / "b.jsonl"
    path.write_text('{"a": 1, "b": 2}\n{"a": 1, "c": 2}\n')
    with pytest.raises(UserError, match="line 2: must be an object with a, b, got one with a, c"):
        list(numbered_lines(path, ("a", "b")))


def test_the_first_name_and_ending_is_the_file(tmp_path):
    wanted = ("x.txt", "x.txt.gz", "x.md.xz", "y.txt", "y.md")
    for name in reversed(wanted):
        (tmp_path / name).write_text("")
        assert find_file(tmp_path, ("x", "y"), (".txt", ".md")) == tmp_path / name
    for name in wanted:
        (tmp_path / name).unlink()
    (tmp_path / "x.txt").mkdir()
    with pytest.raises(UserError, match="must hold x.txt or y.txt "):
        find_file(tmp_path, ("x", "y"), (".txt", ".md"))


def test_documents_of_an_evaluation_have_a_name_and_a_domain(tmp_path):
    path = tmp_path / "a.NDJSON.gz"
    rows = ['{"text": "one"}', "", '{"text": "two", "id": 7, "domain": "law"}', '{"text": "three"}']
    with gzip.open(path, "wt") as file:
        file.write("\n".join(rows))
    assert list(read_documents(path)) == [
        ("0", "", "one"),
        ("7", "law", "two"),
        ("2", "", "three"),
    ]
    path = tmp_path / "b.txt"
    path.write_bytes("\ufeffwhole\r\ntext\r".encode())
    assert list(read_documents(str(path))) == [("b.txt", "", "whole\ntext\n")]
    assert read_text(str(path)) == "whole\ntext\n"  # all commands read one text
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": 5}\n')
    with pytest.raises(UserError, match="c.jsonl', line 3: text must be a string, got 5"):
        list(read_documents(path))


def test_a_hash_is_of_the_whole_file(tmp_path):
    path = tmp_path / "a"
    for size in (0, 5, (1 << 20) + 1, 5 << 19):
        content = bytes(size - 1) + b"x" if size else b""
        path.write_bytes(content)
        assert file_hash(path) == hashlib.sha256(content).hexdigest()[:16]


def test_checkpoints_differ_by_config_names_sizes_and_both_ends_of_their_weights(tmp_path):
    content = bytearray(3 << 20)
    weights = tmp_path / "a.safetensors"
    marks = set()
    changes = ((0, 1), ((1 << 16) - 1, 1), (2 << 20, 1), ((3 << 20) - 1, 1), (0, 2))
    for index, (place, value) in enumerate(changes):
        content[place] = value
        weights.write_bytes(content)
        marks.add(model_hash(str(tmp_path)))
        assert len(marks) == index + 1
    for size in (2 << 20, 3 << 20):
        weights.write_bytes(bytes(size))
        marks.add(model_hash(str(tmp_path)))
    (tmp_path / "b.bin").write_bytes(b"")
    marks.add(model_hash(str(tmp_path)))
    (tmp_path / "b.bin").rename(tmp_path / "c.bin")
    marks.add(model_hash(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    marks.add(model_hash(str(tmp_path)))
    assert len(marks) == 10
    (tmp_path / "notes.txt").write_text("of no account")
    assert model_hash(str(tmp_path)) in marks and model_hash("me/model") == ""


# Rows


def packed(lengths, row_length, order=None, first=0):
    """Rows of documents whose tokens count on from `first`."""
    starts = np.cumsum([first, *lengths[:-1]])
    columns = {
        "input_ids": [list(range(a, a + n)) for a, n in zip(starts.tolist(), lengths)],
        "length": lengths,
        "origin": [f"f:{i}" for i in range(len(lengths))],
    }
    return PackedRows(datasets.Dataset.from_dict(columns), row_length, order)


@pytest.mark.parametrize(
    "lengths, order, rows",
    [
        ((6,), None, [[(0, 0, 6)]]),  # one row, just
        ((6, 6), None, [[(0, 0, 6)], [(1, 0, 6)]]),  # documents end where rows end
        ((4, 0, 9), None, [[(0, 0, 4), (2, 0, 2)], [(2, 2, 8)]]),  # and one has no tokens
        ((0, 6, 0, 6, 0), None, [[(1, 0, 6)], [(3, 0, 6)]]),
        ((4, 9), (1, 0), [[(0, 0, 6)], [(0, 6, 9), (1, 0, 3)]]),
        ((2, 5), (0, 0, 1, 1), [[(0, 0, 2), (1, 0, 2), (2, 0, 2)], [(2, 2, 5), (3, 0, 3)]]),
    ],
)
def test_a_row_is_a_slice_of_all_documents(lengths, order, rows):
    order = tuple(range(len(lengths))) if order is None else order
    data = packed(lengths, 6, np.asarray(order))
    starts = np.cumsum([0, *lengths])
    assert len(data) == len(rows)
    for row, pieces in enumerate(rows):
        got = data[row]
        ids = [starts[order[i]] + t for i, a, b in pieces for t in range(a, b)]
        assert got["input_ids"].tolist() == ids and got["row"] == row
        assert got["position_ids"].tolist() == [t for _, a, b in pieces for t in range(b - a)]
        assert data.describe(row) == "; ".join(
            f"f:{order[i]} (tokens {a} to {b - 1})" for i, a, b in pieces
        )
    for wrong in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"row must be below {len(rows)}, got {wrong}"):
            data[wrong]
    with pytest.raises(UserError, match=f"row of {sum(lengths) + 1} tokens, got {sum(lengths)} "):
        packed(lengths, sum(lengths) + 1)


def test_documents_without_an_order_come_as_they_are():
    assert packed((3, 4), 7)[0]["input_ids"].tolist() == list(range(7))


def test_more_than_four_documents_of_a_row_are_counted():
    assert packed([1] * 4, 4).describe(0).count("(tokens 0 to 0)") == 4
    described = packed([1] * 6, 6).describe(0)
    assert described.count("(tokens 0 to 0)") == 4 and described.endswith("; and 2 more documents")


def test_the_fingerprint_of_rows_depends_on_lengths_order_and_the_first_and_last_tokens():
    lengths = [5, 7, 8, 20]
    fingerprints = {packed(lengths, 4).fingerprint()}
    fingerprints.add(packed([7, 5, 8, 20], 4).fingerprint())  # the same tokens in other documents
    fingerprints.add(packed(lengths, 4, np.array([0, 1, 3, 2])).fingerprint())
    fingerprints.add(packed(lengths, 4, first=1).fingerprint())
    for place in (0, 19, 39):  # of ten rows nine are looked at
        data = packed(lengths, 4)
        changed = np.arange(40)
        changed[place] = 99
        data.tokens = [{"input_ids": part} for part in np.split(changed, np.cumsum(lengths)[:-1])]
        fingerprints.add(data.fingerprint())
    assert len(fingerprints) == 7 and packed(lengths, 4).fingerprint() in fingerprints


def test_orders_are_permutations_by_their_seed():
    assert sorted(shuffled(50, 0)) == list(range(50))
    assert shuffled(50, 0).tolist() == shuffled(50, 0).tolist() != shuffled(50, 1).tolist()
    assert run_order(20, 40, 0) != run_order(20, 40, 1)
    assert sorted(run_order(3, 6, 0)) == [0, 0, 1, 1, 2, 2]
