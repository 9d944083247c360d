"""Measuring: time, peak memory, the operator benchmark, and the figures and tables drawn from its
records."""

import dataclasses
import importlib
import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks import (
    check,
    decoding,
    drawing,
    figures,
    flex,
    methods,
    operator,
    operator_figure,
    operator_report,
    operator_settings,
    operator_tables,
    peak_memory,
    published,
    row_check,
    tables,
    timing,
)
from benchmarks.command import COMMANDS, main
from benchmarks.training_settings import TrainingBench
from benchmarks.user import NAMES, UserBench, run_user_bench, user_markdown
from corecontext import CCAConfig, record
from corecontext.files import UserError
from corecontext.ops.fetch import prompt_rule
from corecontext.record import Record, append_records, latest, make_record, read_records

SIZES = methods.Sizes(4, 2, 16, 1, "float32", "cpu")
TINY = operator_settings.OperatorBench(
    lengths=(300,),
    query_heads=4,
    kv_heads=(2,),
    head_dim=16,
    group_size=8,
    window_size=40,
    memory_lengths=(256, 300),
    repeats=3,
)
MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def rates():
    """The machine's rates, which are measured in a test of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "matmul_flops_per_s", lambda *args: 1e10)
        patch.setattr(operator, "copy_bytes_per_s", lambda *args: 1e9)
        yield


@pytest.fixture
def this_file_importable(monkeypatch):
    """By a subprocess."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def test_peak_memory_counts_what_was_allocated_and_freed(this_file_importable):
    peak = peak_memory.peak_bytes_in_subprocess("allocate", "allocate", {"mib": 64})
    assert 60 * MIB <= peak <= 72 * MIB  # the kernel counts pages in batches, of each processor


def test_a_failing_subprocess_says_why(this_file_importable):
    with pytest.raises(
        RuntimeError, match="measuring in a subprocess failed: .*unexpected keyword"
    ):
        peak_memory.peak_bytes_in_subprocess("allocate", "allocate", {"wrong": 1})


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.sleep` moves."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return SimpleNamespace(sleep=lambda seconds: now.append(now.pop() + seconds))


def test_samples_warm_up_and_budget(clock):
    calls = []
    assert len(timing.sample_seconds(lambda: calls.append(1), repeats=4, warm_up=2)) == 4
    assert len(calls) == 6
    slow = timing.sample_seconds(lambda: clock.sleep(2.0), repeats=50, warm_up=0, budget_s=3.0)
    assert slow == [2.0, 2.0]


def test_the_machines_rates_are_positive():
    assert timing.matmul_flops_per_s(torch.float32, size=64) > 1e6
    assert timing.copy_bytes_per_s(num_bytes=2**20) > 1e6


def test_calls_take_turns_and_slow_ones_are_called_once(clock):
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = timing.sample_in_turns(calls, repeats=9, once={"c"})
    assert order[:3] == ["a", "b", "c"]  # a and b warmed up, c not
    rounds = ["".join(order[i : i + 2]) for i in range(3, len(order), 2)]
    assert len(rounds) == 9 and set(rounds) == {"ab", "ba"}  # none always behind the other
    assert {name: len(samples) for name, samples in found.items()} == {"a": 9, "b": 9, "c": 1}
    found = timing.sample_in_turns(
        {"slow": lambda: clock.sleep(2.0), "quick": int}, repeats=5, budget_s=3.0
    )
    assert found == {"slow": [2.0] * 2, "quick": [0.0] * 5}


def test_calls_settle_before_each_sample_on_a_gpu(monkeypatch):
    queues = []

    def queue_seconds(call, count, device, settling=0):
        queues.append((call(), count, settling))
        return {"short": 0.001, "long": 0.3}[call()]

    monkeypatch.setattr(timing, "queue_seconds", queue_seconds)
    calls = {name: lambda name=name: name for name in ("short", "long")}
    timing.sample_in_turns(calls, repeats=2, device="cuda")
    assert sorted(queues[-4:]) == 2 * [("long", 1, 0)] + 2 * [("short", 20, 50)]


def test_a_captured_call_keeps_what_it_reads(monkeypatch):
    """A graph does not: its replay would read memory that something else uses by then."""
    for name in ("current_stream", "stream", "device", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr("corecontext.graphs.side_stream", mock.MagicMock())
    monkeypatch.setattr(torch.Tensor, "record_stream", mock.MagicMock())
    tensor = torch.zeros(1)
    gone = weakref.ref(tensor)
    replay = timing.capture(lambda tensor=tensor: tensor.add_(1))
    del tensor
    replay()
    assert gone() is not None and torch.cuda.CUDAGraph().replay.called
    del replay
    assert gone() is None


def peak_bytes_here(module, function, arguments):
    """Measure a peak in this process, as a fresh one would be told to."""
    measure = getattr(importlib.import_module(module), function)
    return measure(**json.loads(json.dumps(arguments)))


@pytest.fixture(scope="module")
def records() -> list[Record]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "peak_bytes_in_subprocess", peak_bytes_here)
        return operator.run_operator_bench(TINY)


def test_the_operator_bench_records_time_floor_and_memory(records):
    names = [(r.name, r.params["method"], r.params["length"]) for r in records]
    for name in ("operator.forward_ms", "operator.forward_backward_ms"):
        for method in ("full", "cca", "floor"):
            assert (name, method, 300) in names
    peaks = [r for r in records if r.name == "operator.peak_bytes"]
    assert {(r.params["method"], r.params["length"], r.params["backward"]) for r in peaks} == {
        (m, n, b) for m in ("full", "cca") for n in (256, 300) for b in (False, True)
    }
    assert all(r.value > 0 for r in records if r.unit == "ms")
    # Linux counts resident pages by batches, more than these sizes may need.
    assert all(r.value >= 0 for r in peaks)
    times = [r for r in records if r.params["method"] in ("full", "cca") and r.unit == "ms"]
    assert all(r.q20 <= r.value <= r.q80 for r in times)
    assert "group_size" not in next(r for r in records if r.params["method"] == "full").params


def test_the_operator_table_says_what_the_records_say(records, capsys):
    text = operator_tables.operator_markdown(records)
    full, ours = (
        next(
            r.value for r in records if r.name == "operator.forward_ms" and r.params["method"] == m
        )
        for m in ("full", "cca")
    )
    line = next(line for line in text.splitlines() if line.startswith("| 2 | 300 |"))
    best, cca, gain = (cell.strip() for cell in line.split("|")[3:6])
    assert (best, cca) == (f"{tables.shown_ms(full)} (sdpa)", tables.shown_ms(ours))
    assert gain == f"{full / ours:.2f}x" and "Peak memory above the inputs:" in text
    tables.print_page(text.splitlines())  # the same on the terminal
    shown = capsys.readouterr().out
    assert all(cell.strip() in shown for cell in line.split("|")) and "|" not in shown


def test_nothing_is_timed_when_the_result_is_wrong(monkeypatch):
    right = methods.cca_attention
    monkeypatch.setattr(
        methods,
        "cca_attention",
        lambda *args, backend, **kwargs: (
            right(*args, backend=backend, **kwargs) + (0.01 if backend == "auto" else 0)
        ),
    )
    with pytest.raises(
        AssertionError, match="CCA is wrong on this machine, nothing was timed: query "
    ):
        operator.run_operator_bench(TINY)


def test_a_wrong_baseline_is_left_out(monkeypatch):
    monkeypatch.setattr(methods, "_flash_attn_4", lambda *args: args[1])
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=None))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    missing = check.check_correct(("flash_attn_4", "cca"), SIZES, 8, 40, longest=100)
    assert list(missing) == ["flash_attn_4"]
    assert "wrong on this machine: query" in missing["flash_attn_4"]


def test_fetch_is_checked_with_fewer_groups_than_there_are(monkeypatch):
    calls = []
    right = methods.cca_attention

    def wrong(*args, **settings):
        calls.append(settings)
        is_wrong = "fetch_groups" in settings and settings["backend"] != "reference"
        return right(*args, **settings) + is_wrong

    names = ("fetch", "fetch_shared", "cca")
    assert check.check_correct(names, SIZES, 8, 40, longest=100) == {}
    monkeypatch.setattr(methods, "cca_attention", wrong)
    assert list(check.check_correct(names[:2], SIZES, 8, 40, longest=30)) == [
        "fetch",
        "fetch_shared",
    ]
    assert {call["fetch_groups"] for call in calls if "fetch_groups" in call} == {1}


def test_records_of_fetch_have_its_settings():
    bench = operator_settings.OperatorBench(methods=("fetch_shared",), device="cpu")
    params = bench.params("fetch_shared", "forward", 2, 32768)
    assert (params["fetch_groups"], params["fetch_share"], params["store"]) == (64, 16, "device")


@pytest.mark.parametrize("length", [1, 30, 47, 48, 200])
def test_the_true_rows_are_the_references(length):
    q, k, v = methods.make_inputs(length, SIZES._replace(dtype="float64"))
    sampled, spec = row_check.sample_rows(length, 8, 40), methods.spec_for(q, 8, 40)
    truth = methods.attend_cca(q, k, v, 8, 40, backend="reference")
    for kv_head in (0, 1):
        found = row_check.true_rows(q, k, v, sampled, kv_head, spec)
        torch.testing.assert_close(
            found, truth[0, 2 * kv_head : 2 * kv_head + 2, sampled].transpose(0, 1)
        )


@pytest.mark.parametrize("row, head", [(0, 0), (47, 1), (48, 3), (500, 2), (999, 0)])
def test_the_row_check_finds_a_planted_wrong_row(row, head):
    q, k, v = methods.make_inputs(1000, SIZES)
    out = methods.attend_cca(q, k, v, 8, 40)
    spec = methods.spec_for(q, 8, 40)
    row_check.check_rows(out, q, k, v, spec)
    for wrong in (out[0, head, row] * 1.001, torch.nan):
        planted = out.clone()
        planted[0, head, row] = wrong
        with pytest.raises(
            AssertionError,
            match=f"CCA is wrong at length 1000, nothing was timed: query {row} is off",
        ):
            row_check.check_rows(planted, q, k, v, spec)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_row_check_passes_in_half_precision(dtype):
    q, k, v = methods.make_inputs(1000, SIZES._replace(dtype=dtype))
    out = methods.attend_cca(q, k, v, 8, 40)
    row_check.check_rows(out, q, k, v, methods.spec_for(q, 8, 40))


@pytest.mark.parametrize(
    "length, g, s", [(300, 8, 40), (512, 16, 128), (1000, 3, 200), (257, 4, 1), (130, 16, 200)]
)
def test_flex_attention_computes_cca(length, g, s):
    q, k, v = methods.make_inputs(length, SIZES)
    out = flex.flex_cca(q, k, v, g, s, rotary_theta=methods.THETA, compiled=False)
    torch.testing.assert_close(out, methods.attend_cca(q, k, v, g, s), atol=1e-5, rtol=1e-4)


MORE = dataclasses.replace(
    TINY,
    lengths=(64, 128, 256),
    kv_heads=(4, 1),
    memory_lengths=(64,),
    repeats=1,
    passes=methods.PASSES,
    methods=("full", "flash_attn_4"),
    decode_batches=(1, 2),
    decode_lengths=(300,),
)


@pytest.fixture(scope="module")
def more() -> list[Record]:
    """Several KV heads, every pass, decoding, a package that is missing."""
    kept: list[Record] = []
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # no subprocesses: memory is not what these tests are about
        patch.setattr(operator, "peak_bytes_in_subprocess", lambda *args: 2**20)
        patch.setattr(decoding, "MAX_LAYERS", 4)  # as if 4 left nothing of each other in a cache
        found = operator.run_operator_bench(MORE, kept.extend)
    assert kept == found
    return found


def test_every_pass_and_number_of_heads_is_measured(more):
    found = {
        (r.params["pass"], r.params["kv_heads"], r.params["length"])
        for r in more
        if r.params["method"] == "cca" and r.unit == "ms"
    }
    assert found == {(p, h, n) for p in methods.PASSES for h in (4, 1) for n in (64, 128, 256)}
    assert {r.params["timer"] for r in more if r.params["method"] == "cca" and r.unit == "ms"} == {
        "wall"
    }
    assert len(operator_report.time_rows(more)) == 18
    assert all(row.best and row.share for row in operator_report.time_rows(more))


def test_what_is_not_installed_is_said(more):
    text = operator_tables.operator_markdown(more)
    assert "flash_attn_4 not measured on" in text
    assert "not installed (KV heads 4, 1; pass every pass)" in text


def test_decoding_is_recorded_with_its_bytes(more):
    found = operator_report.decode_rows(more)
    assert [(row.params["kv_heads"], row.params["batch"], row.length) for row in found] == [
        (h, b, 300) for h in (4, 1) for b in (1, 2)
    ]
    entries = (300 - 40) // 8 + 300 - (300 - 40) // 8 * 8
    assert [row.params["bytes_read"] for row in found] == [
        2 * b * h * 16 * 4 * entries for h in (4, 1) for b in (1, 2)
    ]
    assert all(row.cca > 0 and row.full["sdpa"] > 0 and row.floor for row in found)
    assert operator_tables.operator_markdown(more).count("| 300 |") >= 4


def test_a_filled_layer_decodes_up_to_its_length():
    q, k, v = methods.make_inputs(1, SIZES)
    layer = decoding.filled_layer(k, 290, 300, CCAConfig.paper(8, 40))
    with torch.no_grad():
        for _ in range(10):
            assert layer.attend(q, k, v).isfinite().all()
    assert layer.seq_len == 300 and layer.keys.shape[2] == 40 + 7 + 300 // 8


def test_decoding_is_checked_first(monkeypatch):
    decoding.check_decode(SIZES, 8, 40)
    right = decoding.attend_cca
    monkeypatch.setattr(
        decoding, "attend_cca", lambda *args, **kwargs: 1.01 * right(*args, **kwargs)
    )
    with pytest.raises(
        AssertionError, match="decoding is wrong on this machine, nothing was timed"
    ):
        decoding.check_decode(SIZES, 8, 40)


def test_a_baseline_over_the_limit_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr(operator, "peak_bytes_in_subprocess", lambda *args: 2**20)
    bench = dataclasses.replace(
        MORE, kv_heads=(2,), baseline_limit_s=1e-9, decode_batches=(), methods=()
    )
    found = operator.run_operator_bench(bench)
    measured = {
        (r.params["pass"], r.params["length"])
        for r in found
        if r.params["method"] == "full" and r.unit == "ms"
    }
    assert measured == {(p, 64) for p in methods.PASSES}  # the first length has nothing to go by
    left_out = [
        r for r in found if r.name == "operator.skipped" and r.params["pass"] in methods.PASSES
    ]
    assert [r.params["length"] for r in left_out] == [128] * 3 + [256] * 3
    first, second = (
        next(r.params["estimated_s"] for r in left_out if r.params["length"] == n)
        for n in (128, 256)
    )
    assert second == pytest.approx(4 * first)
    text = operator_tables.operator_markdown(found)
    assert "| not measured |" in text
    assert "full not measured on" in text and "over the limit of 1e-09 s a call" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_check_passes_in_every_dtype(dtype):
    assert (
        check.check_correct(
            ("full", "cca"), SIZES._replace(dtype=dtype), 8, 40, longest=300, decoding=True
        )
        == {}
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"methods": ("sdpa",)},
            "method must be one of 'full', 'sdpa_flash', 'sdpa_cudnn', 'flash_attn_4', 'flex', "
            "'packed', 'cca_sinks', 'cca_default', 'fetch', 'fetch_shared', 'fetch_mean', "
            "'fetch_mean_shared', 'fetch_default', 'fetch_default_shared', 'cca', got 'sdpa'.",
        ),
        (
            {"passes": ("back",)},
            "pass must be one of 'forward', 'backward', 'forward_backward', got 'back'.",
        ),
        ({"baseline_limit_s": 0}, "baseline_limit_s must be above 0, got 0."),
        ({"decode_batches": (0,)}, "decode_batch must be at least 1, got 0."),
        ({"lengths": (0,)}, "length must be at least 1, got 0."),
        ({"kv_heads": (2, 3)}, "kv_heads must divide query_heads, got 3 and 4."),
        ({"head_dim": 7}, "head_dim must be even and at most 512, got 7."),
        ({"dtype": "int8"}, "dtype must be one of 'float32', 'bfloat16', 'float16', got 'int8'."),
        ({"repeats": 0}, "repeats must be at least 1, got 0."),
        ({"group_size": 0}, "group_size must be at least 1, got 0."),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(TINY, **change)
    assert str(error.value).startswith(message)


def test_figures_are_drawn_whole(records, more, tmp_path):
    for suffix, drawn in zip(drawing.SUFFIXES, (records, more, records)):
        path = tmp_path / f"operator{suffix}"
        drawing.check_plot(str(path))
        operator_figure.draw_operator(drawn, str(path))
        assert path.stat().st_size > 2000
    assert len(list(tmp_path.iterdir())) == len(drawing.SUFFIXES)  # no temporary file is left


def test_a_figure_needs_a_known_ending_and_matplotlib(monkeypatch):
    with pytest.raises(UserError, match="plot must end in .png, .svg, .pdf, got 'a.gif'."):
        drawing.check_plot("a.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"plot needs matplotlib.*pip install 'matplotlib"):
        drawing.check_plot("a.png")


def test_the_readme_is_rewritten_between_its_marks(records, tmp_path, monkeypatch):
    results, readme = tmp_path / "results", tmp_path / "README.md"
    append_records(results / "operator.jsonl", records)
    readme.write_text(
        "above\n<!-- table: operator -->\nold\n<!-- end table -->\nbetween\n"
        "<!-- table: demo -->\nkept\n<!-- end table -->\nbelow\n"
    )
    assert figures.main(["--results", str(results), "--readme", str(readme)]) == 0
    text = readme.read_text()
    table = figures.operator_markdown(read_records(results / "operator.jsonl"))
    assert text == (
        f"above\n<!-- table: operator -->\n{table}<!-- end table -->\nbetween\n"
        "<!-- table: demo -->\nkept\n<!-- end table -->\nbelow\n"
    )
    assert (results / "operator.svg").exists()


def test_a_missing_record_is_named():
    with pytest.raises(
        ValueError, match="records must hold demo.perplexity with .*'cca'.*, got none."
    ):
        record.newest([], "demo.perplexity", method="cca")


def test_training_steps_are_measured_and_drawn(tmp_path, capsys):
    from benchmarks.training_report import draw_training, steps

    kept, plot = tmp_path / "training.jsonl", tmp_path / "training.svg"
    command = ["train", "--shape", "tiny", "--device", "cpu", "--length", "96"]
    command += ["--length", "200", "--window-size", "16", "--repeats", "1", "--json", str(kept)]
    command += ["--plot", str(plot)]
    assert main(command) == 0
    assert "of allowed" in capsys.readouterr().out and plot.stat().st_size > 5000
    records = read_records(kept)
    found = steps(records)
    assert [(one.length, one.gpus, one.fsdp, one.fuse) for one in found] == [
        (96, 1, False, False),
        (200, 1, False, False),
    ]
    for one in found:
        assert one.speedup > 0 and 1 < one.allowed < 3 and one.full.params["backend"] == "sdpa"
    # Four processes whose work per token is twice as much, at half the tokens per second each:
    # nothing is lost.
    alone = next(r for r in records if r.params["method"] == "cca" and r.params["length"] == 200)
    alone = dataclasses.replace(alone, params={**alone.params, "fsdp": True})
    four = dataclasses.replace(
        alone,
        value=2 * alone.value,
        params={
            **alone.params,
            "gpus": 4,
            "length": 800,
            "step_flops": 8 * alone.params["step_flops"],
        },
    )
    peak = next(r for r in records if r.name == "training.peak_bytes")
    peaks = [dataclasses.replace(peak, params=one.params) for one in (alone, four)]
    assert [one.efficiency for one in steps([*records, four, peaks[1]])] == [
        None
    ] * 3  # nothing to compare with
    spread = [*records, alone, four, *peaks]
    assert [one.efficiency for one in steps(spread)] == [None, None, None, pytest.approx(1.0)]
    draw_training(spread, str(plot))
    for wrong, message in (
        (["--context-parallel"], "must run in several processes"),
        (["--method", "flex"], "method must be"),
        (["--shape", "huge"], "shape must be"),
        (["--length", "0"], "length must be at least 1"),
    ):
        assert main([*command[:5], *wrong]) == 2 and message in capsys.readouterr().err


def test_a_training_step_that_is_wrong_is_not_timed(monkeypatch):
    from benchmarks import training

    real = training.CCAConfig.paper
    monkeypatch.setattr(training.CCAConfig, "paper", lambda g, s: real(g, 3))
    with pytest.raises(AssertionError, match="a step's loss is wrong, nothing was timed"):
        training.run_training_bench(TrainingBench((64,), "tiny"))


def test_the_operator_command(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(operator, "peak_bytes_in_subprocess", peak_bytes_here)
    sizes = "--length 256 --heads 2 --kv-heads 1 --head-dim 16 --window-size 32 --repeats 3"
    options = "--forward-only --memory-length 128 --json sub.jsonl --plot o.png"
    assert main(["operator", "--device", "cpu", *sizes.split(), *options.split()]) == 0
    assert "forward" in capfd.readouterr().out
    names = {record.name for record in read_records("sub.jsonl")}
    assert names == {"operator.forward_ms", "operator.peak_bytes"}
    assert (tmp_path / "o.png").stat().st_size > 2000


@pytest.mark.parametrize(
    "options, message",
    [
        ("--device cpu --kv-heads 3", "kv_heads must divide query_heads, got 3 and 8."),
        ("--window-size 0", "window_size must be at least 1"),
        ("--dtype int8", "dtype must be one of 'float32', 'bfloat16', 'float16', got 'int8'."),
    ],
)
def test_a_mistake_is_one_line(options, message, capfd):
    assert main(["operator", *options.split()]) == 2
    shown = capfd.readouterr()
    assert shown.out == "" and message in shown.err and shown.err.count("\n") == 1


def test_help_of_every_benchmark(capfd):
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert "--help" in capfd.readouterr().out


@pytest.fixture
def commands(monkeypatch):
    """Three published commands, of which the second fails; each run writes a record of its own."""
    rows = tuple(published.Published("fetch", name) for name in ("one", "two", "three"))
    monkeypatch.setattr(published, "PUBLISHED", rows)
    monkeypatch.setattr(published, "source_version", lambda: (COMMIT, False))

    def run(argv, timeout):
        if timeout is not None and argv[3] == "three":
            raise subprocess.TimeoutExpired(argv, timeout)
        value = {"one": 1.0, "two": 2.0, "three": 3.0}[argv[3]]
        made = make_record("operator.forward_ms", value, {})
        append_records(argv[-1], [dataclasses.replace(made, commit=COMMIT)])
        return SimpleNamespace(returncode=2 if argv[3] == "two" else 0)

    fake = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(published, "subprocess", fake)
    return rows


COMMIT = "0123456"


def test_published_commands_run_until_each_has_a_record(commands, tmp_path, capsys):
    argv = ["published", "--results", str(tmp_path)]
    assert main([*argv, "--limit-minutes", "1"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "two: exit code 2; three: stopped at the limit" in error
    (record,) = read_records(tmp_path / "fetch.jsonl")
    assert record.value == 1 and record.command == published.recorded_command(commands[0])
    (partial,) = read_records(tmp_path / "fetch.partial.jsonl")
    assert partial.value == 2
    assert published.pending(tmp_path) == list(commands[1:])
    assert main([*argv, "--only", "three"]) == 0
    assert [r.value for r in read_records(tmp_path / "fetch.jsonl")] == [1, 3]
    capsys.readouterr()
    assert main([*argv, "--list"]) == 0
    assert capsys.readouterr().out.split()[3:4] == ["two"]


def test_records_of_other_code_do_not_count(commands, tmp_path, monkeypatch):
    assert main(["published", "--results", str(tmp_path), "--only", "one"]) == 0
    for version in (("89abcde", False), (COMMIT, True), (None, None)):
        monkeypatch.setattr(published, "source_version", lambda version=version: version)
        assert published.pending(tmp_path) == list(commands)


def test_a_foreign_file_among_records_gives_one_line(commands, tmp_path, capsys):
    (tmp_path / "sweep.jsonl").write_text('{"form": "off"}\n')
    assert main(["published", "--results", str(tmp_path)]) == 2
    assert "sweep.jsonl:1 must be a record" in " ".join(capsys.readouterr().err.split())


def test_published_commands_can_be_parsed():
    for row in published.PUBLISHED:
        name, *options = row.command.split()
        assert main([name, *options, "--help"]) == 0


def test_what_a_user_waits_for_is_measured_in_turns():
    bench = UserBench("tiny", lengths=(40, 70), methods=("default",), new_tokens=2, repeats=2)
    kept = []
    records = run_user_bench(bench, kept.extend)
    assert records == kept
    names = [
        f"user.{name}" for name in ("first_token_s", "next_token_ms", "device_bytes", "host_bytes")
    ]
    rows = [(r.name, r.params["method"], r.params["length"]) for r in records]
    assert rows == [(n, m, x) for x in (40, 70) for m in ("full", "default") for n in names]
    assert {r.params["model"] for r in records} == {"tiny"}
    full, ours = (
        latest(records, "user.device_bytes", length=70, method=m) for m in ("full", "default")
    )
    # Full attention is the fastest here: tokens of 2 layers, 2 KV heads of 32 in float32. The step
    # that is measured last ended with another token.
    token = 2 * 2 * 2 * 32 * 4
    assert full.value % token == 0 and ours.value - full.value in (0, token, 2 * token)
    table = user_markdown(records).splitlines()
    assert table[0].startswith("**tiny**, ") and table[2].startswith(
        "| tokens | first token, full |"
    )
    cells = table[4].split(" | ")
    times = [latest(records, NAMES[0], length=40, method=m).value for m in ("full", "default")]
    assert cells[0] == "| 40"
    wanted = [f"{1e3 * value:.4g} ms" for value in times]
    assert cells[1:3] == [wanted[0], f"{wanted[1]} ({times[1] / times[0]:.3f} x)"]
    with pytest.raises(ValueError, match="method must be one of"):
        UserBench(methods=("full",))


def test_a_window_has_the_bytes_of_a_preset(monkeypatch):
    monkeypatch.setitem(prompt_rule.WHOLE_TOKENS, "cpu", 0)
    methods = ("window:small", "small")
    bench = UserBench("tiny", lengths=(900,), methods=methods, new_tokens=2, repeats=1)
    records = run_user_bench(bench)
    shown = [r.params["method"] for r in records if r.name == NAMES[0]]
    assert shown == ["full", "window:small", "small"]
    full, window, small = (latest(records, NAMES[2], length=900, method=m).value for m in shown)
    token = 2 * 2 * 2 * 32 * 4  # of 2 layers, 2 KV heads of 32 in float32
    assert small - token < window <= small < full
    assert latest(records, NAMES[3], length=900, method="window:small").value == 0
    presets, windows = user_markdown(records).split("\n\n**")
    assert "window" not in presets and ", first tokens and a window" in windows
    first = latest(records, NAMES[0], length=900, method="window:small").value
    assert f"| 900 | {1e3 * first:.4g} ms |" in windows


def test_calls_of_transformers_are_compared_with_its_own():
    bench = UserBench("tiny", lengths=(40,), methods=("generate",), new_tokens=2, repeats=1)
    records = run_user_bench(bench)
    methods = ("full", "transformers", "generate")
    assert [r.params["method"] for r in records if r.name == NAMES[0]] == list(methods)
    values = {m: [latest(records, x, length=40, method=m).value for x in NAMES] for m in methods}
    # The second text begins where the first one began to be answered; so few tokens have no compact
    # form.
    tokens = 40 - 1
    assert values["transformers"][2:] == [tokens * 2 * 2 * 2 * 32 * 4, 0]
    assert values["generate"][2:] == values["transformers"][2:]
    own, calls = user_markdown(records).split("\n\n**")
    assert "transformers" not in own and ", called as `generate()` does" in calls
    cells = calls.splitlines()[4].split(" | ")
    first = [values[m][0] for m in methods]
    assert cells[1] == f"{1e3 * first[1]:.4g} ms"
    assert cells[2] == f"{1e3 * first[2]:.4g} ms ({first[2] / first[1]:.3f} x)"
