"""Measuring: time, peak memory, the operator benchmark, and the figures and tables drawn from its records."""

import dataclasses
import sys
import time
from pathlib import Path

import pytest
import torch

from corecontext.bench import figures, measure, operator
from corecontext.record import Record, append_records, read_records
from corecontext.text import UserError

TINY = operator.OperatorBench(lengths=(300,), query_heads=4, kv_heads=2, head_dim=16, group_size=8, window_size=40,
                              memory_lengths=(256, 300), repeats=3)
MIB = 2 ** 20


def allocate(mib: int) -> int:
    """Peak memory of making and dropping a tensor of so many MiB."""
    torch.ones(8 * MIB)  # 32 MiB, given back before the count begins
    peak = measure.PeakMemory()
    torch.ones(mib * MIB // 4)
    torch.ones(1000)
    return peak.read()


@pytest.fixture
def this_file_importable(monkeypatch):
    """By a subprocess."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.parametrize("mib", [8, 64])
def test_peak_memory_counts_what_was_allocated_and_freed(mib, this_file_importable):
    peak = measure.peak_bytes_in_subprocess("test_bench", "allocate", {"mib": mib})
    assert (mib - 1) * MIB <= peak <= (mib + 4) * MIB  # the kernel counts pages in batches


def test_a_failing_subprocess_says_why(this_file_importable):
    with pytest.raises(RuntimeError, match="measuring in a subprocess failed: .*unexpected keyword"):
        measure.peak_bytes_in_subprocess("test_bench", "allocate", {"wrong": 1})


def test_samples_warm_up_and_budget():
    calls = []
    assert len(measure.sample_seconds(lambda: calls.append(1), repeats=4, warm_up=2)) == 4 and len(calls) == 6
    slow = measure.sample_seconds(lambda: time.sleep(0.02), repeats=50, warm_up=0, budget_s=0.03)
    assert len(slow) == 2 and min(slow) >= 0.02


def test_the_matmul_rate_is_positive():
    assert measure.matmul_flops_per_s(torch.float32, size=64) > 1e6


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return operator.run_operator_bench(TINY)


def test_the_operator_bench_records_time_floor_and_memory(records):
    names = [(r.name, r.params["method"], r.params["length"]) for r in records]
    for name in ("operator.forward_ms", "operator.forward_backward_ms"):
        for method in ("full", "cca", "floor"):
            assert (name, method, 300) in names
    peaks = [r for r in records if r.name == "operator.peak_bytes"]
    assert {(r.params["method"], r.params["length"], r.params["backward"]) for r in peaks} == {
        (m, n, b) for m in ("full", "cca") for n in (256, 300) for b in (False, True)}
    assert all(r.value > 0 for r in records)
    times = [r for r in records if r.params["method"] in ("full", "cca") and r.unit == "ms"]
    assert all(r.q20 <= r.value <= r.q80 for r in times)
    assert "group_size" not in next(r for r in records if r.params["method"] == "full").params


def test_the_operator_table_says_what_the_records_say(records, capsys):
    operator.print_table(records)
    shown = capsys.readouterr().out
    rows = operator.table_rows(records)
    assert len(rows) == 2 + 4 and all(cell in shown for row in rows for cell in row)
    full, ours = (next(r.value for r in records if r.name == "operator.forward_ms" and r.params["method"] == m)
                  for m in ("full", "cca"))
    assert rows[0][:2] == ["forward", "300"] and rows[0][4] == f"{full / ours:.2f}x"


def test_nothing_is_timed_when_the_result_is_wrong(monkeypatch):
    right = operator.cca_attention
    monkeypatch.setattr(operator, "cca_attention", lambda *args, backend, **kwargs: right(
        *args, backend=backend, **kwargs) + (0.01 if backend == "auto" else 0))
    with pytest.raises(AssertionError, match="CCA is wrong on this machine, nothing was timed: query "):
        operator.run_operator_bench(TINY)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_check_passes_in_every_dtype(dtype):
    operator.check_correct(dataclasses.replace(TINY, dtype=dtype))


@pytest.mark.parametrize("change, message", [
    ({"lengths": (0,)}, "length must be at least 1, got 0."),
    ({"kv_heads": 3}, "kv_heads must divide query_heads, got 3 and 4."),
    ({"head_dim": 7}, "head_dim must be even and at most 512, got 7."),
    ({"dtype": "int8"}, "dtype must be float32, bfloat16 or float16, got 'int8'."),
    ({"repeats": 0}, "repeats must be at least 1, got 0."),
    ({"group_size": 0}, "group_size must be at least 1, got 0."),
])
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(TINY, **change)
    assert str(error.value) == message


def test_figures_are_drawn_whole(records, tmp_path):
    for suffix in figures.SUFFIXES:
        path = tmp_path / f"operator{suffix}"
        figures.check_plot(str(path))
        figures.draw_operator(records, str(path))
        assert path.stat().st_size > 2000
    assert len(list(tmp_path.iterdir())) == len(figures.SUFFIXES)  # no temporary file is left


def test_a_figure_needs_a_known_ending_and_matplotlib(monkeypatch):
    with pytest.raises(UserError, match="plot must end in .png, .svg, .pdf, got 'a.gif'."):
        figures.check_plot("a.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"plot needs matplotlib.*pip install 'corecontext\[plot\]'"):
        figures.check_plot("a.png")


def test_the_readme_table_takes_the_newest_ours_and_the_fastest_full():
    def record(value, method, backend, length=64, **more):
        return Record("operator.forward_ms", value, "ms", device="gpu", params={
            "method": method, "backend": backend, "length": length, "query_heads": 4, "kv_heads": 2, "head_dim": 16,
            "batch": 1, "dtype": "bfloat16", **more})
    sizes = {"group_size": 16, "window_size": 8}
    found = figures.operator_rows([
        record(9.0, "full", "flash"), record(5.0, "full", "cudnn"), record(3.0, "cca", "packed", **sizes),
        record(2.0, "cca", "packed", **sizes), record(0.5, "floor", "matmul", of="cca", **sizes),
        record(1.0, "cca", "packed", length=128, **sizes)])
    assert [(r["full"], r["cca"], r["backend"], r["floor"]) for r in found] == [(5.0, 2.0, "cudnn", 0.5)]


def test_the_readme_shows_memory_by_length(records):
    rows = figures.memory_rows(records)
    assert len(rows) == 4 and all(sorted(peaks) == [256, 300] for peaks in rows.values())
    (device, name, method), peaks = next(iter(rows.items()))
    assert f"| {device} | {name} | {method} | 256: {peaks[256]:.0f}, 300: {peaks[300]:.0f} |" in \
        figures.operator_table(records)


def test_the_readme_is_rewritten_between_its_marks(records, tmp_path, monkeypatch):
    results, readme = tmp_path / "results", tmp_path / "README.md"
    append_records(results / "operator.jsonl", records)
    readme.write_text("above\n<!-- table: operator -->\nold\n<!-- end table -->\nbetween\n<!-- table: demo -->\nkept\n"
                      "<!-- end table -->\nbelow\n")
    assert figures.main(["--results", str(results), "--readme", str(readme)]) == 0
    text = readme.read_text()
    table = figures.operator_table(read_records(results / "operator.jsonl"))
    assert text == (f"above\n<!-- table: operator -->\n{table}<!-- end table -->\nbetween\n<!-- table: demo -->\nkept\n"
                    "<!-- end table -->\nbelow\n")
    assert (results / "operator.svg").exists()


def test_a_missing_record_is_named():
    with pytest.raises(ValueError, match="records must hold demo.perplexity with .*'cca'.*, got none."):
        figures.newest([], "demo.perplexity", method="cca")
