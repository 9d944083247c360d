"""Records: what is written is what is read, and nothing malformed gets in."""

import json
import re
import resource
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from corecontext.record import (
    UNITS,
    Record,
    _git_version,
    append_records,
    command_line,
    device_name,
    make_record,
    median_and_quantiles,
    newest,
    read_records,
    source_version,
)


def test_a_record_survives_the_file(tmp_path):
    path = tmp_path / "new" / "operator.jsonl"
    first = make_record(
        "operator.forward_ms", [3.0, 1.0, 2.0, 5.0, 4.0], {"method": "cca", "length": 16}
    )
    second = make_record(
        "demo.cache_bytes", 7, {"method": "full"}, device="somewhere", command="do it"
    )
    append_records(path, [first])
    append_records(path, [second])
    assert read_records(path) == [first, second]
    assert (first.value, first.q20, first.q80, first.unit) == (3.0, 1.8, 4.2, "ms")
    line = json.loads(path.read_text().splitlines()[1])
    assert list(line) == [
        "name",
        "value",
        "unit",
        "params",
        "device",
        "versions",
        "commit",
        "dirty",
        "command",
        "date",
    ]
    assert line["versions"]["corecontext"]
    assert line["versions"]["torch"]
    assert line["device"] == "somewhere"


def test_names_end_with_their_units():
    endings = {"ms": "ms", "us": "us", "s": "s", "bytes": "bytes", "perplexity": "perplexity"}
    endings |= {"accuracy": "fraction", "kept": "fraction", "share": "fraction"}
    endings |= {"score": "fraction", "recall": "fraction", "skipped": "count", "failed": "count"}
    endings |= {"tokens": "tokens", "rate": "requests/s", "nll": "nats"}
    for name, unit in UNITS.items():
        quantity, _, per = name.partition("_per_")
        ending = re.split("[._]", quantity)[-1]
        assert unit == (f"{ending}/{per}" if per else endings[ending]), name


def test_all_records_or_none(tmp_path):
    path = tmp_path / "r.jsonl"
    good = make_record("demo.cache_bytes", 7, {})
    bad = make_record("demo.cache_bytes", 7, {"what": object()})
    with pytest.raises(TypeError):
        append_records(path, [good, bad])
    assert not path.exists()
    append_records(path, [])
    assert not path.exists()


def test_parallel_writers_do_not_mix_lines(tmp_path):
    path = tmp_path / "r.jsonl"
    code = (
        "import sys; from corecontext.record import Record, append_records\n"
        "for i in range(200): append_records(sys.argv[1], [Record('demo.cache_bytes', i, 'bytes', "
        "params={'who': sys.argv[2] * 500})])"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), who]) for who in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(read_records(path)) == 400


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"name": "operator.forwards_ms", "value": 1, "unit": "ms"},
            "name must be one of corecontext.record.UNITS, got 'operator.forwards_ms'. "
            "Did you mean 'operator.forward_ms'?",
        ),
        (
            {"name": "operator.forward_ms", "value": 1, "unit": "s"},
            "unit must be 'ms' for operator.forward_ms, got 's'.",
        ),
        (
            {"name": "operator.forward_ms", "value": float("nan"), "unit": "ms"},
            "value must be finite, got nan.",
        ),
        (
            {"name": "operator.forward_ms", "value": float("-inf"), "unit": "ms"},
            "value must be finite, got -inf.",
        ),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ValueError) as error:
        Record(**values)
    assert str(error.value) == message


@pytest.mark.parametrize("value", [True, "3", None])
def test_a_value_is_a_number(value):
    with pytest.raises(TypeError, match="^value must be a number, got "):
        Record("operator.forward_ms", value, "ms")


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    append_records(path, [make_record("demo.cache_bytes", 7, {})])
    with path.open("a") as file:
        file.write('{"name": "demo.cache_bytes", "value": 1, "unit": "bytes", "colour": 3}\n')
    with pytest.raises(
        ValueError, match="r.jsonl:2 must be a record, got .* unknown record key 'colour'"
    ):
        read_records(path)


def test_quantiles_need_three_samples():
    assert median_and_quantiles([2.0, 4.0]) == (3.0, None, None)
    assert median_and_quantiles([1.0, 2.0, 3.0])[0] == 2.0
    with pytest.raises(ValueError, match="samples must hold at least one value"):
        median_and_quantiles([])


def test_the_newest_has_every_parameter_and_is_the_last_of_a_second():
    records = [
        Record(name, value, UNITS[name], params={"method": method, "length": length}, date=date)
        for name, value, method, length, date in (
            ("demo.peak_bytes", 1, "cca", 8, "2023"),
            ("demo.cache_bytes", 2, "cca", 8, "2021"),
            ("demo.cache_bytes", 3, "cca", 8, "2021"),
            ("demo.cache_bytes", 4, "cca", 9, "2022"),
            ("demo.cache_bytes", 5, "full", 8, "2022"),
            ("demo.cache_bytes", 6, "cca", 8, "2020"),
        )
    ]
    assert newest(records, "demo.cache_bytes", method="cca", length=8).value == 3
    with pytest.raises(ValueError, match="must hold demo.cache_bytes with {'length': 7}, got none"):
        newest(records, "demo.cache_bytes", length=7)


def test_a_record_says_when_and_keeps_its_own_parameters():
    params = {"method": "cca"}
    record = make_record("demo.cache_bytes", [1.0, 2.0, 4.0], params, device="here")
    params["method"] = "full"
    assert record.params == {"method": "cca"}
    assert record.device == "here" and record.command == command_line()
    assert next(iter(record.versions)) == "python"
    made = datetime.fromisoformat(record.date)
    assert made.utcoffset() == timedelta(0)
    assert abs(datetime.now(made.tzinfo) - made) < timedelta(minutes=1)
    line = json.loads(record.to_json())
    assert (line["q20"], line["value"], line["q80"]) == (pytest.approx(1.4), 2, pytest.approx(3.2))
    with pytest.raises(ValueError, match="Out of range float"):
        make_record("demo.cache_bytes", 1, {"x": float("nan")}).to_json()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_failed_append_takes_no_record_away(tmp_path, monkeypatch, is_new):
    path = tmp_path / "r.jsonl"
    if not is_new:
        path.write_text("before\n")

    def fail(self, *args, **kwargs):
        self.touch()
        raise OSError(28, "full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full") as error:
        patch.setattr(Path, "open", fail)
        append_records(path, [Record("demo.cache_bytes", 1, "bytes")])
    assert error.value.filename == str(path)
    assert path.exists() is not is_new
    assert is_new or path.read_text() == "before\n"


@pytest.mark.parametrize("size", [0, 1000])
def test_a_full_disk_leaves_no_half_of_a_record(tmp_path, size):
    path = tmp_path / "r.jsonl"
    before = ("x" * (size - 1) + "\n").encode() if size else b""
    if size:
        path.write_bytes(before)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            append_records(path, [Record("demo.cache_bytes", 1, "bytes")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.exists() == bool(size)
    assert not size or path.read_bytes() == before


def test_a_record_begins_a_line_of_its_own(tmp_path):
    path = tmp_path / "r.jsonl"
    records = [Record("demo.cache_bytes", value, "bytes") for value in (1, 2)]
    path.write_text(records[0].to_json())  # as an editor leaves it, without a line break
    append_records(path, records[1:])
    assert read_records(path) == records


def test_a_version_is_clean_whatever_the_results_are(tmp_path):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/r.jsonl"):
        (tmp_path / name).touch()
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    commit, dirty = _git_version.__wrapped__(tmp_path)
    assert len(commit) == 40 and dirty is False
    (tmp_path / "results" / "r.jsonl").write_text("more")
    (tmp_path / "untracked").touch()
    assert _git_version.__wrapped__(tmp_path) == (commit, False)
    (tmp_path / "code.py").write_text("more")
    assert _git_version.__wrapped__(tmp_path) == (commit, True)
    assert _git_version.__wrapped__(tmp_path / "results" / "none") == (None, None)


def test_provenance(monkeypatch):
    assert "threads" in device_name("cpu")
    monkeypatch.delenv("CORECONTEXT_COMMIT", raising=False)
    commit, dirty = source_version()
    assert (commit is None) == (dirty is None) and (commit is None or len(commit) == 40)
    monkeypatch.setattr(sys, "argv", ["/some/where/bin/corecontext", "demo", "--json", "a b"])
    assert command_line() == "corecontext demo --json 'a b'"
    monkeypatch.setattr(
        sys, "argv", ["c", "--json", "/a/b/m.jsonl", "--plot=~/p.png", "--data", "a=/d/e/"]
    )
    assert command_line() == "c --json m.jsonl --plot=p.png --data a=e"
    monkeypatch.setattr(sys, "argv", ["/some/where/benchmarks/figures.py", "--readme"])
    assert command_line() == "python -m benchmarks.figures --readme"
    monkeypatch.setattr(
        sys, "argv", ["/some/corecontext/site-packages/corecontext/__main__.py", "info"]
    )
    assert command_line() == "python -m corecontext info"


def test_the_environment_tells_the_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("CORECONTEXT_COMMIT", "abc123")
    assert source_version() == ("abc123", None)  # a copy may have the history of another commit
    monkeypatch.setattr("corecontext.record.__file__", str(tmp_path / "corecontext" / "record.py"))
    assert source_version() == ("abc123", None)
    (tmp_path / "pyproject.toml").touch()  # a copy of the tree without its history
    assert source_version() == ("abc123", None)
    monkeypatch.delenv("CORECONTEXT_COMMIT")
    assert source_version() == (None, None)


def test_no_published_command_holds_a_path_of_a_machine():
    """Commands can be given again elsewhere: their paths are relative, or names of folders."""
    results = Path(__file__).parents[1] / "results"
    absolute = re.compile(r'"command": "(?:[^"\\]|\\.)*?(?<![\w.])[/~](?:[\w.]+/|\w+[ "])')
    for path in results.rglob("*.jsonl"):
        line = absolute.search(path.read_text(encoding="utf-8"))
        assert line is None, f"{path.name}: {line[0]}"
    assert absolute.search('{"command": "python -m x --json /x/out/a.jsonl --y"}')
    assert not absolute.search('{"command": "python -m x --json a/b.jsonl", "date": "/tmp/"}')
