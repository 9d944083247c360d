"""Training data: what is read from files, what is said of broken ones, and how documents fill
rows."""

import gzip
import json
import lzma
import os
import random
from functools import partial

import numpy as np
import pytest

datasets = pytest.importorskip("datasets", reason="training reads its data with datasets")

import pyarrow  # noqa: E402
from tiny_model import save_tiny_model  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from corecontext.data import corpus as corpus_module  # noqa: E402
from corecontext.data.corpus import read_beginning, read_corpus  # noqa: E402
from corecontext.data.documents import Fields  # noqa: E402
from corecontext.data.packing import run_order, upsampled  # noqa: E402
from corecontext.files import UserError  # noqa: E402

ROWS = [{"text": f"document {i} " * (i + 1), "meta": {"kind": "ab"[i % 2]}} for i in range(7)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer: one token a byte."""
    return AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("model")))


zstd = partial(pyarrow.compress, codec="zstd", asbytes=True)


def write(path, rows=ROWS):
    """Rows as JSON lines, packed as the name says."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".zst":
        path.write_bytes(zstd(text.encode()))
    else:
        with {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)(path, "wt") as file:
            file.write(text)
    return str(path)


def corpus(tmp_path, tokenizer, *names, **options):
    return read_corpus(list(names), tokenizer, cache_dir=str(tmp_path / "cache"), **options)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.xz", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_every_form_gives_the_same_documents(tmp_path, tokenizer, ending):
    path = tmp_path / f"data{ending}"
    if ending == ".parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    else:
        write(path)
    found = corpus(tmp_path, tokenizer, str(path), source_field="meta.kind", workers=2)
    assert [tokenizer.decode(ids) for ids in found["input_ids"]] == [row["text"] for row in ROWS]
    assert found["source"][:] == ["a", "b"] * 3 + ["a"]
    assert found["origin"][:] == [f"{path}:{i + 1}" for i in range(7)]
    assert found["length"][:] == [len(row["text"]) for row in ROWS]


def test_documents_end_and_changed_files_are_read_again(tmp_path, tokenizer):
    path = tmp_path / "folder" / "a.txt"
    path.parent.mkdir()
    path.write_text("first\n")
    (path.parent / "ignored.png").write_text("no text")
    (path.parent / "b.md").write_text("second")
    folder = str(path.parent)
    assert corpus(tmp_path, tokenizer, folder)["length"][:] == [6, 6]
    tokenizer.eos_token = "a"
    try:
        ended = corpus(tmp_path, tokenizer, folder)
        assert [ids[-1] for ids in ended["input_ids"]] == [tokenizer.eos_token_id] * 2
        assert ended["length"][:] == [7, 7]
    finally:
        tokenizer.eos_token = None
    path.write_text("first, and more")
    assert corpus(tmp_path, tokenizer, folder)["length"][:] == [15, 6]
    before = path.stat().st_mtime_ns
    path.write_text("other, and more")  # of the same size
    os.utime(path, ns=(before + 1, before + 1))
    changed = corpus(tmp_path, tokenizer, folder)["input_ids"][0]
    assert tokenizer.decode(changed) == "other, and more"
    path = write(tmp_path / "kinds.jsonl", [{"text": "one", "kind": "a"}])
    assert corpus(tmp_path, tokenizer, path)["source"][:] == [""]
    assert corpus(tmp_path, tokenizer, path, source_field="kind")["source"][:] == ["a"]


def test_hub_datasets_and_files_together(tmp_path, tokenizer, monkeypatch):
    asked = []

    def load_dataset(name, config, split, **others):
        asked.append((name, config, split))
        if name == "nobody/nothing":
            raise FileNotFoundError("no such dataset\nat length")
        return datasets.Dataset.from_list([{"body": "from the hub", "n": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    local = write(tmp_path / "a.jsonl", [{"body": "from a file"}])
    found = corpus(tmp_path, tokenizer, local, "hub:some/name:part", text_field="body")
    assert [tokenizer.decode(ids) for ids in found["input_ids"]] == ["from a file", "from the hub"]
    assert found["origin"][1] == "some/name:1" and asked == [("some/name", "part", "train")]
    with pytest.raises(UserError, match="dataset 'nobody/nothing' cannot be had: no such dataset$"):
        corpus(tmp_path, tokenizer, "hub:nobody/nothing")
    with pytest.raises(
        UserError, match="file 'some/name', line 1: field 'text' is missing, got body, n"
    ):
        corpus(tmp_path, tokenizer, "hub:some/name")


def test_the_line_of_an_error_is_found_behind_errors_that_do_not_name_it():
    def make():
        try:
            raise UserError("line 2 is broken")
        except UserError:
            raise RuntimeError("a generator failed")  # noqa: B904

    with pytest.raises(UserError, match="^line 2 is broken$"):
        corpus_module._with_user_errors(make)


def test_what_is_broken_is_said_with_file_and_line(tmp_path, tokenizer):
    def refused(name, content, message, **options):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            corpus(tmp_path, tokenizer, str(path), **options)

    refused(
        "a.jsonl", b'{"text": "x"}\n{"text": "y"\n', "a.jsonl', line 2: Expecting ',' delimiter"
    )
    refused(
        "b.jsonl",
        b'{"text": "x"}\n\n{"body": "y"}\n',
        "b.jsonl', line 3: field 'text' is missing, got body",
    )
    refused("c.jsonl", b'{"text": 3}\n', "c.jsonl', line 1: field 'text' must be text, got int")
    refused("d.jsonl", b"[1]\n", "d.jsonl', line 1: must be an object, got a list[.]")
    refused("e.jsonl.xz", lzma.compress(b'{"text": "x"}\n' * 99)[:-30], "e.jsonl.xz', line ")
    refused("f.jsonl.gz", b"no gzip", "f.jsonl.gz', line 1: Not a gzipped file")
    refused("g.txt", b"\xff\xfe", "g.txt' must be UTF-8 text")
    refused(
        "l.jsonl",
        b'{"text": "x"}\n' * 3 + b'{"text": "\xe9"}\n',
        "l.jsonl', line 4: must be UTF-8, got byte 0xe9",
    )
    refused(
        "m.jsonl",
        b'{"text": "x"}\n{"text": "a \\ud800"}\n',
        "m.jsonl', line 2: .* half a character, '.ud800'",
    )
    refused("n.txt.xz", b"no xz", "n.txt.xz' must be UTF-8 text: Input format not supported")
    refused("o.txt.zst", b"no zst", "o.txt.zst' must be UTF-8 text: ZSTD decompress")
    # Two frames of several blocks each.
    frames = 2 * zstd(random.Random(0).randbytes(300_000).hex().encode())
    for cut in (2, len(frames) // 4, len(frames) // 2 + 9, len(frames) - 1):
        refused(
            f"p{cut}.txt.zst",
            frames[:cut],
            f"p{cut}.txt.zst' must be UTF-8 text: Truncated compressed",
        )
    refused(
        "q.jsonl.zst",
        zstd(b'{"text": "x"}\n')[:-1],
        "q.jsonl.zst', line 1: Truncated compressed",
    )
    refused("h.parquet", b"nothing", "h.parquet' cannot be read as parquet")
    refused("i.csv", b"text\nx\n", "i.csv' must end in .txt, .md, .text, .jsonl")
    refused("j.jsonl", b'{"text": " "}\n', "data must hold text, got none")
    datasets.Dataset.from_list([{"body": "x"}]).to_parquet(tmp_path / "k.parquet")
    for name, message in (
        ("k.parquet", "k.parquet' must have a column 'text', got body"),
        ("none", "does not exist"),
        ("empty", "must hold .txt, .jsonl or .parquet files"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=message):
            corpus(tmp_path, tokenizer, str(tmp_path / name))


def test_plain_text_has_no_fields_and_marks_are_no_text(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfplain")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"meta": {"text": "line"}}\n')
    found = corpus(
        tmp_path,
        tokenizer,
        str(tmp_path / "a.txt"),
        str(tmp_path / "b.jsonl"),
        text_field="meta.text",
    )
    assert [tokenizer.decode(ids) for ids in found["input_ids"]] == ["plain", "line"]


def test_tokens_that_cannot_be_kept_are_no_stack_trace(tmp_path, tokenizer):
    (tmp_path / "cache").write_text("a file where the folder should be")
    message = r"^tokens cannot be kept: [\w ]+\. Free space, or give another folder"
    with pytest.raises(UserError, match=message):
        corpus(tmp_path, tokenizer, write(tmp_path / "a.jsonl"))


def test_a_folder_is_read_as_the_hub_is(tmp_path, tokenizer):
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list(
        [{"text": "one"}, {"text": None}, {"text": " "}, {"text": "two"}]
    ).to_parquet(tmp_path / "set/train.parquet")
    datasets.Dataset.from_list([{"text": "three"}]).to_parquet(tmp_path / "set/validation.parquet")
    found = corpus(tmp_path, tokenizer, f"hub:{tmp_path}/set")
    assert found["origin"][:] == [
        f"{tmp_path}/set:1",
        f"{tmp_path}/set:4",
    ]  # rows without text are no error there
    assert corpus(tmp_path, tokenizer, f"hub:{tmp_path}/set::validation")["length"][:] == [5]
    datasets.Dataset.from_list([{"text": None}]).to_parquet(tmp_path / "set/test.parquet")
    with pytest.raises(UserError, match="set' must hold text, got none"):
        corpus(tmp_path, tokenizer, f"hub:{tmp_path}/set::test")
    with pytest.raises(UserError, match="cannot be had: Unknown split"):
        corpus(tmp_path, tokenizer, f"hub:{tmp_path}/set::nothing")


def test_long_documents_come_more_often_within_their_source():
    lengths = np.array([100] * 60 + [1000] * 2 + [100] * 30 + [1000] * 9 + [50] * 10)
    sources = ["web"] * 62 + ["books"] * 39 + ["short"] * 10
    order = upsampled(lengths, sources, 500, 0.7, seed=0)
    names = np.array(sources)
    for source, share in (("web", 0.7), ("books", 0.75), ("short", 0.0)):
        drawn = order[names[order] == source]
        tokens, long = lengths[drawn].sum(), lengths[drawn][lengths[drawn] > 500].sum()
        # The mixture stays, to one document.
        assert abs(tokens - lengths[names == source].sum()) <= 1000
        assert abs(long / tokens - share) < 0.05
    assert len(set(order[:20].tolist())) > 5
    assert np.array_equal(order, upsampled(lengths, sources, 500, 0.7, seed=0))


def test_long_documents_have_more_tokens_than_the_bound():
    lengths = np.array([500] * 40 + [501])
    order = upsampled(lengths, [""] * 41, 500, 0.5, seed=0)
    assert abs(lengths[order][lengths[order] > 500].sum() / lengths[order].sum() - 0.5) < 0.05


def test_a_run_sees_every_row_once_a_pass_and_processes_share_blocks():
    once = run_order(10, 25, seed=4)
    assert sorted(once[:10]) == sorted(once[10:20]) == list(range(10)) and once[:10] != once[10:20]
    assert run_order(10, 40, seed=4)[:25] == once  # a longer run begins like a shorter one
    shared = run_order(10, 25, seed=4, block=2, repeats=3)
    assert shared[:12] == [*once[:2] * 3, *once[2:4] * 3] and len(shared) == 75


@pytest.fixture
def named(tmp_path):
    """A file of five documents, and a folder that `load_dataset` takes as it takes a name on the
    hub: two parts of 30 documents, some without text."""
    rows = [{"text": f"<{i:02d}>" + "abc" * (i % 5)} for i in range(60)]
    hub = tmp_path / "hub"
    hub.mkdir()
    datasets.Dataset.from_list([{"text": None}, *rows[:30]]).to_parquet(hub / "train-0.parquet")
    datasets.Dataset.from_list([*rows[30:], {"text": " "}]).to_parquet(hub / "train-1.parquet")
    file = write(tmp_path / "a.jsonl", [{"text": f"file {i}"} for i in range(5)])
    return [file, f"hub:{hub}"], [row["text"] for row in rows]


def beginning(tmp_path, tokenizer, names, tokens, **options):
    options = {"shuffle": 10, "cache_dir": str(tmp_path / "cache"), **options}
    return read_beginning(names, tokenizer, tokens, Fields(), **options)


@pytest.mark.usefixtures("left_streams_are_not_awaited")
def test_a_beginning_has_as_many_tokens_as_asked_for(tmp_path, tokenizer, named, monkeypatch):
    names, texts = named
    read = beginning(tmp_path, tokenizer, names, 100)
    assert 100 <= sum(read["length"]) < 100 + sum(read["length"][-16:])
    got = [tokenizer.decode(ids) for ids in read["input_ids"]]
    assert got[0:10:2] == [f"file {i}" for i in range(5)]  # from each in turn
    from_hub = [text for text in got if text in texts]
    assert len(set(from_hub)) == len(got) - 5 and from_hub != sorted(from_hub)
    whole = beginning(tmp_path, tokenizer, names, 10**6)
    assert len(whole) == 65 and set(texts) < {tokenizer.decode(ids) for ids in whole["input_ids"]}
    other = beginning(tmp_path, tokenizer, names, 100, seed=1)
    assert other["input_ids"][:] != read["input_ids"][:]
    # The same call reads the tokens that it has kept.
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", None)
        again = beginning(tmp_path, tokenizer, names, 100)
    assert again["input_ids"][:] == read["input_ids"][:]


def test_a_beginning_that_cannot_be_read(tmp_path, tokenizer, named):
    file = write(tmp_path / "b.jsonl", [{"text": "0123456789"}, {"text": 7}])
    gone = named[0][1].replace("hub:", "hub:no/")
    for names, message in (
        ([file], "b.jsonl', line 2: field 'text' must be text, got int"),
        ([write(tmp_path / "c.jsonl", [{"text": " "}])], "data must hold text, got none"),
        ([], "data must name at least one"),
        (["hub:"], r"must name a hub dataset as hub:NAME"),
        ([gone], "dataset .* cannot be had"),
    ):
        with pytest.raises(UserError, match=message):
            beginning(tmp_path, tokenizer, names, 10**6)


def test_a_hub_that_stops_to_answer(tmp_path, tokenizer, monkeypatch):
    class Rows(list):
        def shuffle(self, seed, buffer_size):
            assert (seed, buffer_size) == (3, 10)
            return self

        def __iter__(self):
            yield {"text": "row"}
            raise ConnectionError("the hub is gone\nat length")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **options: Rows())
    with pytest.raises(UserError, match="^dataset 'me/set' cannot be read on: the hub is gone[.]$"):
        beginning(tmp_path, tokenizer, ["hub:me/set"], 100, seed=3)
