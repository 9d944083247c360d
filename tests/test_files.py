"""Files, messages and memory: the contract of each small function that every command relies on."""

import errno
import io
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from corecontext import files, measure, terminal
from corecontext.files import UserError, alone_in, atomic_path, check_output, one_line, read_text
from corecontext.record import device_name

MIB = 2**20
OF_A_LIBRARY = type("SafetensorError", (Exception,), {"__module__": "safetensors_rust.errors"})


@pytest.mark.parametrize(
    "prefix, error, line",
    [
        ("", ValueError("bad"), "bad"),
        ("model 'm'", ValueError("bad\nmore"), "model 'm': bad"),
        ("", KeyError("k"), "missing or unknown key 'k'"),
        ("", OF_A_LIBRARY("header"), "header"),
        ("model 'm'", RuntimeError("torn"), "model 'm': torn"),
        ("", RuntimeError("a bug"), None),
        ("model 'm'", AttributeError("a bug"), None),
        ("model 'm'", UserError("mine"), None),
        ("model 'm'", MemoryError(), None),
        ("model 'm'", torch.OutOfMemoryError("GPU"), None),
        ("model 'm'", RuntimeError("DefaultCPUAllocator: can't allocate memory"), None),
    ],
    ids=repr,
)
def test_refusals_become_one_line_and_all_else_passes_through(prefix, error, line):
    with pytest.raises(type(error) if line is None else UserError) as caught, one_line(prefix):
        raise error
    if line is None:
        assert caught.value is error
    else:
        assert str(caught.value) == line


@pytest.mark.parametrize(
    "error, expected",
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(), True),
        (RuntimeError("can't allocate memory: 3 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `f`"), True),
        (RuntimeError("memory"), False),
        (OSError("can't allocate memory"), False),
    ],
    ids=repr,
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    assert files.is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    "data, shown",
    [
        (b" a\r\nb\n", " a\nb\n"),
        (b"\xef\xbb\xbf\xc3\xa9", "\u00e9"),
        (b"ab\xff", "must be UTF-8 text, got byte 0xff at 2. Convert it to UTF-8 first."),
        (b"\xef\xbb\xbfab\xfe", "must be UTF-8 text, got byte 0xfe at 5. Convert it"),
        (b"ab\0c", "must be UTF-8 text, got a binary file (a zero byte at 2)."),
        (b" \n\t", "must hold text, got an empty one."),
    ],
)
def test_text_is_read_with_one_form_of_line_ends_or_refused(data, shown, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(data)
    for path, name in ((str(tmp_path / "a"), f"file '{tmp_path / 'a'}'"), ("-", "standard input")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        if "must" not in shown:
            assert read_text(path) == shown
            continue
        with pytest.raises(UserError) as error:
            read_text(path)
        assert str(error.value).startswith(f"{name} {shown}")


def test_an_output_is_checked_before_any_work(tmp_path):
    there = tmp_path / "there"
    there.touch()
    for path, force in ((None, False), (tmp_path / "new", False), (there, True)):
        check_output(path and str(path), force)
    for path, force, message in (
        (there, False, "already exists. Use --force"),
        (tmp_path, True, "must be a file, got a folder"),
        (tmp_path / "no" / "a", True, f"in an existing folder. Make '{tmp_path / 'no'}' first."),
    ):
        with pytest.raises(UserError, match=message):
            check_output(str(path), force)


def test_a_folder_without_permission_is_said_before_any_work(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(files.os, "access", lambda *given: asked.append(given))
    with pytest.raises(UserError, match=f"cannot be written: no permission for '{tmp_path}'."):
        check_output(str(tmp_path / "new"))
    assert asked == [(tmp_path, os.W_OK)]


def test_the_cache_is_the_users(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for given, folder in (("/x", "/x"), ("", "/home/me/.cache"), ("~/y", "/home/me/y")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert files.cache_folder() == Path(folder, "corecontext")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder() == Path("/home/me/.cache/corecontext")


def test_a_folder_is_made_once(tmp_path):
    for _ in range(2):
        files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="'.*file' must be a folder, or a place for one: File exi"):
        files.make_folder(tmp_path / "file")


def test_where_there_are_no_locks_every_process_has_the_folder(tmp_path, monkeypatch):
    """Some file systems of clusters have none: a run starts there all the same."""
    fcntl = pytest.importorskip("fcntl")

    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone_in(tmp_path) as mine, alone_in(tmp_path) as yours:
        assert mine and yours
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with alone_in(tmp_path) as mine, alone_in(tmp_path) as yours:
        assert mine and yours


def test_a_temporary_file_has_the_ending_and_the_folder_of_its_target(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_path(tmp_path / "a.png") as name:
            assert Path(name).parent == tmp_path
            assert Path(name).suffix == ".png"
            assert Path(name).name.startswith(".a.")
        assert (tmp_path / "a.png").stat().st_mode & 0o777 == 0o640
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    for error, named in ((OSError(28, "full"), "a.png"), (OSError(2, "gone", "other"), "other")):
        with pytest.raises(OSError, match="full|gone") as caught, atomic_path(tmp_path / "a.png"):
            raise error
        assert Path(caught.value.filename).name == named


# Terminal and memory


def test_a_log_has_a_line_of_progress_every_ten_seconds(monkeypatch, capsys):
    times = iter((100.0, 109.9, 110.0, 110.0, 119.9, 120.0, 120.0))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(times))
    with terminal.progress("work", 4) as advance:
        for _ in range(4):
            advance(1.25)
    lines = ["work: 62 %, about 0:00:06 left", "work: 100 %, about 0:00:00 left"]
    assert capsys.readouterr().err.splitlines() == lines


def test_no_time_is_left_to_guess_before_anything_is_done(monkeypatch, capsys):
    times = iter((100.0, 111.0, 111.0))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(times))
    with terminal.progress("work", 4) as advance:
        advance(0)
    assert capsys.readouterr().err == "work: 0 %\n"


def test_a_terminal_has_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", shown)
    with terminal.progress("work [b]", 4) as advance:
        for _ in range(2):
            advance(1.5)
    assert "work [b]" in shown.getvalue() and " 75%" in shown.getvalue()


def test_a_table_in_a_file_has_120_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert terminal.console().width == 120


def test_peak_memory_is_counted_in_bytes_above_the_start():
    if not measure.reset_resident_peak():
        pytest.skip("this system keeps no mark that can be reset")
    peak = measure.PeakMemory()
    # Pages of their own: Python's memory may come from what earlier tests have freed.
    with mmap.mmap(-1, 32 * MIB) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert 31 * MIB < peak.read() < 48 * MIB
    assert measure.PeakMemory().read() < 16 * MIB


def test_memory_of_a_gpu_is_that_of_pytorchs_allocator(monkeypatch):
    calls = []

    def stand_in(name, result=None):
        def call(device):
            calls.append((name, device))
            return result

        monkeypatch.setattr(torch.cuda, name, call)

    stand_in("synchronize")
    stand_in("reset_peak_memory_stats")
    stand_in("memory_allocated", 5)
    stand_in("max_memory_allocated", 12)
    stand_in("get_device_name", "a GPU")
    measure.synchronize("cpu")
    measure.synchronize("cuda:1")
    assert calls == [("synchronize", "cuda:1")]
    assert measure.PeakMemory("cuda:1").read() == 7
    names = ["synchronize", "synchronize", "reset_peak_memory_stats", "memory_allocated"]
    assert [name for name, _ in calls] == [*names, "synchronize", "max_memory_allocated"]
    assert device_name("cuda:1") == "a GPU"
    assert {device for _, device in calls} == {"cuda:1"}


def test_a_child_imports_this_package(monkeypatch):
    root = str(Path(measure.__file__).resolve().parents[1])
    monkeypatch.setenv("PYTHONPATH", "/a")
    assert measure.package_path()["PYTHONPATH"] == f"{root}{os.pathsep}/a"
    monkeypatch.delenv("PYTHONPATH")
    child = measure.package_path()
    assert child == {**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"}
