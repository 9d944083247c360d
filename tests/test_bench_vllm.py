"""The benchmark of vLLM, with an engine that answers at once in place of vLLM's."""

import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest

from benchmarks import vllm as bench_vllm
from benchmarks import vllm_profile, vllm_turns
from benchmarks.command import main
from benchmarks.vllm import VllmBench, make_engine, model_config, timed
from benchmarks.vllm_profile import Kernel, Phase, Span, phase_of
from benchmarks.vllm_report import vllm_markdown
from corecontext import CCAConfig
from corecontext.files import UserError
from corecontext.integrations.vllm.page_layout import PageLayout
from corecontext.record import UNITS, Record, read_records


class Engine:
    """Gives each request a token in each step, its first one after a step of its prompt."""

    def __init__(self) -> None:
        cache = SimpleNamespace(num_gpu_blocks=1000)
        self.vllm_config = SimpleNamespace(
            cache_config=cache, max_in_flight_tokens=32, use_v2_model_runner=True
        )
        self.waiting: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompts: list[list[int]] = []

    def add_request(self, name, prompt, options):
        assert options["ignore_eos"] and options["temperature"] == 0
        self.prompts.append(prompt["prompt_token_ids"])
        self.waiting[name] = options["max_tokens"]
        self.tokens[name] = []

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        outputs = []
        for name, left in list(self.waiting.items()):
            self.tokens[name].append(7)
            completion = SimpleNamespace(token_ids=self.tokens[name])
            outputs.append(SimpleNamespace(request_id=name, outputs=[completion]))
            self.waiting[name] = left - 1
            if left == 1:
                del self.waiting[name]
        return outputs


@pytest.fixture
def engine(monkeypatch):
    """An engine, which `python -m benchmarks vllm` measures."""
    engine = Engine()
    package = SimpleNamespace(SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setattr(bench_vllm.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(bench_vllm, "make_engine", lambda *args: engine)
    monkeypatch.setattr(bench_vllm, "device_name", lambda device: "a GPU")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
    return engine


def test_each_token_has_its_time(engine):
    times = timed(engine, [[1, 2], [3]], 5)
    assert [len(row) for row in times] == [5, 5]
    assert all(row == sorted(row) and row[0] > 0 for row in times)


def test_pages_are_given_where_the_host_holds_raw_tokens():
    """Other methods take what fits, beside it, too."""
    bench = VllmBench(methods=("full", "fetch"), store="host", pages=7)
    assert [bench.pages_of(method) for method in ("full", "cca", "fetch")] == [0, 0, 7]
    assert dataclasses.replace(bench, store="device").pages_of("fetch") == 0
    assert bench.params("fetch")["preset"] == "default"


@pytest.mark.parametrize("method", ["cca", "fetch", "full"])
def test_records_of_a_method(engine, method, tmp_path, capsys):
    path = tmp_path / "vllm.jsonl"
    line = f"vllm --method {method} --length 20 --length 40 --steps 3 --prompt-length 30"
    line += f" --new-tokens 4 --requests 5 --most-batched 16 --json {path}"
    assert main(line.split()) == 0
    records = read_records(path)
    assert [record.name.removeprefix("vllm.") for record in records] == [
        "cache_tokens",
        *("first_token_s", "next_token_ms") * 2,
        "requests_per_s",
        "first_token_s",
    ]
    tokens = 16000
    if method == "cca":
        tokens = PageLayout.of(VllmBench().config(method), 16).cache_tokens(1000, 34, 32)
    if method == "fetch":
        tokens = 1000 * 34 // (3 + 1)
    assert records[0].value == tokens
    assert records[1].params["length"] == 20
    assert records[1].params["runner"] == "V2"
    presets = {"cca": "pooling", "fetch": "device", "full": None}
    assert records[1].params.get("preset") == presets[method]
    assert records[-2].params["requests"] == 5
    assert all(record.params["method"] == method for record in records)
    assert [len(prompt) for prompt in engine.prompts[-5:]] == [30] * 5
    assert len(set(map(tuple, engine.prompts))) == len(engine.prompts)
    assert "30 + 4 in steps of 16, 5 at once" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["cca", "full"])
def test_both_methods_get_the_same_load(engine, method, tmp_path):
    path = tmp_path / "vllm.jsonl"
    line = f"vllm --method {method} --length 5 --steps 1 --prompt-length 6 --new-tokens 2"
    assert main([*line.split(), "--json", str(path)]) == 0
    assert read_records(path)[-1].params["requests"] == 96


@pytest.mark.parametrize("weights, quantization", [("bfloat16", None), ("fp8", "fp8")])
def test_weights_are_quantized_by_vllm(monkeypatch, tmp_path, weights, quantization):
    given = {}

    def start(folder, **options):
        given.update(options)
        return SimpleNamespace(llm_engine=None)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start, __version__="0"))
    bench = VllmBench(weights=weights)
    with pytest.warns(UserWarning, match="vLLM 0"):
        make_engine(bench, "full", str(tmp_path))
    assert given["quantization"] == quantization
    assert given["dtype"] == "bfloat16"
    assert bench.params("full")["weights"] == weights


def test_the_model_has_positions_for_the_longest_request():
    bench = VllmBench(lengths=(200_000,), steps=10, group_size=8)
    shape = model_config(bench, "cca")
    assert shape["max_position_embeddings"] == bench.longest == 200_010
    assert CCAConfig.from_dict(shape["cca"]).group_size == 8
    assert "cca" not in model_config(bench, "full")


def test_several_methods_run_in_a_process_each(engine, monkeypatch):
    """Records of one that ends early are kept; all have the command that started the processes."""
    line = Record("vllm.cache_tokens", 5, "tokens", params={"method": "cca"}).to_json()
    called = []

    class Process:
        returncode = 3
        stdout = ("a log\n", line + "\n")

        def __init__(self, program, **options):
            called.append(program[-1])

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(bench_vllm.subprocess, "Popen", Process)
    monkeypatch.setattr(sys, "argv", ["bench", "vllm"])
    kept = []
    with pytest.raises(UserError, match=r"full: vLLM ended with code 3\."):
        bench_vllm.run_vllm_bench(VllmBench(), kept.extend)
    assert [(record.value, record.command) for record in kept] == [(5, "bench vllm")] * 2
    assert '"methods": ["full"]' in called[1]
    Process.returncode = 0
    assert bench_vllm.run_vllm_bench(VllmBench(), kept.extend) == kept[2:]


@pytest.mark.parametrize("asks", [[], ["20", "20", "keep"]])
def test_a_process_does_what_it_is_asked_for(engine, asks, capsys, monkeypatch):
    pinned = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 3, 5, 4}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *to: pinned.append(to), raising=False)
    bench = VllmBench(methods=("full",), lengths=(20,), steps=3, requests=0)
    vllm_turns.take_turns(bench, [f"{ask}\n" for ask in asks])
    lines = capsys.readouterr().out.splitlines()
    assert lines.count(vllm_turns.READY) == 1 + len(asks) and lines[-1] == vllm_turns.READY
    records = [Record.from_json(line) for line in lines if line != vllm_turns.READY]
    names = ["vllm.first_token_s", "vllm.next_token_ms"] if asks else []
    assert [record.name for record in records] == names
    assert all(record.params["length"] == 20 for record in records)
    assert pinned == [(0, [3, 4])]


CHILD = """
import sys
from corecontext.record import Record
method, often, ready, keep = sys.argv[1:]
print("a log")
print(ready, flush=True)
asked = 0
for line in sys.stdin:
    if method == "cca" and asked == int(often):
        sys.exit(7)
    if line.strip() == keep:
        params = {"method": method}
        print(Record("vllm.cache_tokens", asked, "tokens", params=params).to_json())
    asked += 1
    print(ready, flush=True)
"""
"""Imports no torch, which takes seconds."""


@pytest.fixture
def children(monkeypatch):
    """Returns a function: processes answer in place of those with vLLM, that of cca so often."""
    popen = vllm_turns.subprocess.Popen

    def answer(often):
        def start(program, **options):
            bench = vllm_turns.bench_of(program[-1])
            assert bench.memory_share == 0.4 and not bench.turns
            (method,) = bench.methods
            asked = [method, str(often), vllm_turns.READY, vllm_turns.KEEP]
            return popen([sys.executable, "-c", CHILD, *asked], **options)

        monkeypatch.setattr(vllm_turns.subprocess, "Popen", start)

    return answer


TURNS = VllmBench(turns=True, requests=0, lengths=(5, 9), trials=2, memory_share=0.8)


def test_methods_take_turns(children, monkeypatch):
    """Each has its part of the memory, a prompt in each round of each length, and its records."""
    children(99)
    order = []
    ask = vllm_turns.Turn.ask

    def recorded(turn, text):
        order.append((turn.method, text))
        return ask(turn, text)

    monkeypatch.setattr(vllm_turns.Turn, "ask", recorded)
    monkeypatch.setattr(bench_vllm.importlib.util, "find_spec", lambda name: name)
    kept = []
    records = vllm_turns.measure_in_turns(TURNS, kept.extend)
    assert kept == records
    assert [(record.params["method"], record.value) for record in records] == [
        ("cca", 4),
        ("full", 4),
    ]
    rounds = [sorted(order[i : i + 2]) for i in range(0, 8, 2)]
    assert rounds == [[("cca", n), ("full", n)] for n in ("5", "5", "9", "9")]


def test_an_early_end_of_a_turn_is_told(children, monkeypatch):
    children(1)
    monkeypatch.setattr(bench_vllm.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=r"cca: vLLM ended with code 7\."):
        vllm_turns.measure_in_turns(TURNS, list)


@pytest.mark.parametrize("given", [{"methods": ("full",), "requests": 0}, {}])
def test_turns_need_methods_and_no_load(given):
    with pytest.raises(ValueError, match="turns must be given with several methods and 0 requests"):
        VllmBench(turns=True, **given)


def test_the_table_has_the_newest_of_both_methods():
    def record(name, value, method, date, **params):
        params |= {"method": method}
        return Record(name, value, UNITS[name], params=params, device="a GPU", date=date)

    alone, together = {"length": 32768}, {"prompt_length": 32768, "new_tokens": 1024}
    records = [
        record("vllm.requests_per_s", 1.5, "cca", "3", **together, requests=40),
        record("vllm.requests_per_s", 0.5, "full", "2", **together, requests=40),
        record("vllm.next_token_ms", 3.0, "cca", "2", **alone),
        record("vllm.next_token_ms", 9.0, "cca", "1", **alone),
        record("vllm.next_token_ms", 6.0, "full", "1", **alone),
        record("vllm.cache_tokens", 7e6, "cca", "1", length=33792),
        record("vllm.accuracy", 0.9, "cca", "1", length=7900),
        record("vllm.requests_per_s", 2.0, "cca", "4", **together, requests=64, weights="fp8"),
        record("vllm.next_token_ms", 2.0, "cca", "3", **alone, weights="fp8", compiled=True),
        record(
            "vllm.requests_per_s", 0.6, "full", "3", **together, requests=40, weights="bfloat16"
        ),
    ]
    *rows, _, note = vllm_markdown(records).splitlines()[2:]
    assert rows == [
        "| next token | 32K alone | 6 ms | 3 ms | 2.00x |",
        "| next token | 32K alone, fp8 weights, torch.compile |  | 2 ms |  |",
        "| requests per second | 32K + 1,024, 40 at once | 0.6 | 1.5 | 2.50x |",
        "| requests per second | 32K + 1,024, fp8 weights, 64 at once |  | 2 |  |",
        "| tokens in the cache | requests of 33,792 tokens |  | 7,000,000 |  |",
    ]
    assert note == "a GPU, vLLM unknown."
    records.append(record("vllm.next_token_ms", 4.0, "fetch", "2", **alone))
    row = vllm_markdown(records).splitlines()[2]
    assert row == "| next token | 32K alone | 6 ms | 3 ms | 2.00x | 4 ms | 1.50x |"
    records.append(record("vllm.next_token_ms", 5.0, "fetch", "3", **alone, store="host"))
    sizes = {"length": 33792, "memory_share": 0.37}
    records.append(record("vllm.cache_tokens", 3e6, "fetch", "1", **sizes, store="host"))
    row, *_, last = vllm_markdown(records).splitlines()[2:-2]
    assert row.endswith("| 4 ms | 1.50x | 5 ms | 1.20x |")
    assert "| requests of 33,792 tokens, 37% of the memory |" in last
    wide = {**together, "requests": 40, "most_batched": 16512}
    records += [record("vllm.requests_per_s", value, "full", "5", **wide) for value in (0.5, 0.7)]
    [row] = [line for line in vllm_markdown(records).splitlines() if "16,512" in line]
    assert row.startswith("| requests per second | 32K + 1,024 in steps of 16,512, 40 at once |")


def test_other_numbers_of_requests_give_no_gain():
    """And their rows go when both methods were sent one number."""

    def record(method, value, requests, date):
        params = {"method": method, "prompt_length": 32768, "new_tokens": 1024}
        params["requests"] = requests
        name = "vllm.requests_per_s"
        return Record(name, value, UNITS[name], params=params, device="a GPU", date=date)

    def rows():
        return [line[24:-2] for line in vllm_markdown(records).splitlines()[2:-2]]

    records = [record("cca", 1.5, 48, "1"), record("full", 0.5, 24, "1")]
    own = ["32K + 1,024, 24 at once | 0.5 |  | ", "32K + 1,024, 48 at once |  | 1.5 | "]
    assert rows() == own
    records.append(record("cca", 2.0, 96, "2"))
    assert rows() == [*own, "32K + 1,024, 96 at once |  | 2 | "]
    records.append(record("full", 0.5, 96, "2"))
    assert rows() == ["32K + 1,024, 96 at once | 0.5 | 2 | 4.00x"]


@pytest.mark.parametrize(
    "options, message",
    [
        ("--method sdpa", "method must be one of 'cca', 'fetch', 'full'"),
        ("--length 0", "length must be at least 1"),
        ("--weights int4", "weights must be one of 'bfloat16', 'fp8'"),
        ("--requests -1", "requests must be at least 0"),
        ("--memory-share 1.5", "memory_share must be between 0 and 1"),
        ("--plot x.svg", "plot must be left out"),
        ("", "bench vllm needs vLLM"),
    ],
)
def test_wrong_options(options, message, monkeypatch, capsys):
    monkeypatch.setattr(bench_vllm.importlib.util, "find_spec", lambda name: None)
    assert main(f"vllm {options}".split()) == 2
    assert message in capsys.readouterr().err


def test_phases_sum_up_kernels_and_the_time_that_the_device_is_busy():
    spans = [Span("a", 10.0, 20.0), Span("b", 15.0, 40.0), Span("a", 100.0, 130.0)]
    phase = phase_of("decoding", 2, 1.0, spans)
    assert phase == Phase(
        "decoding", 2, 0.5, 0.03, [Kernel("a", 0.02, 1.0), Kernel("b", 0.0125, 0.5)]
    )


def test_a_profile_goes_through_the_phases_of_requests(engine, monkeypatch, capsys):
    """A prompt alone, beside decoding sequences, and decoding, with the requests that get tokens
    then."""
    states = []

    def measure(engine, title, steps):
        states.append((title, steps, len(engine.waiting)))
        for _ in range(steps):
            engine.step()
        return phase_of(title, steps, 2.0, [Span("attend", 0.0, 1000.0)])

    monkeypatch.setattr(vllm_profile, "_measure", measure)
    line = "vllm --method cca --profile --length 20 --prompt-length 30 --most-batched 16"
    assert main([*line.split(), "--requests", "6", "--new-tokens", "90"]) == 0
    assert states == [
        ("a prompt alone", 2, 1),
        ("a prompt beside 6 decoding sequences", vllm_profile.STEPS, 6),
        ("decoding of 6 sequences", vllm_profile.STEPS, 6),
    ]
    out = capsys.readouterr().out
    assert "the device is busy for 0.125 ms" in out and "attend" in out
    assert main([*line.split(), "--method", "full"]) == 2
    assert "profile must be given with one method" in capsys.readouterr().err
