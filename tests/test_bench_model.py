"""The benchmark of whole models: what it records, that one failure does not end it, its tables and
figures."""

import collections
import copy
import dataclasses
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tiny_model import save_tiny_model

from benchmarks import (
    figures,
    model,
    model_check,
    model_figure,
    model_methods,
    model_report,
    model_tables,
    replay,
    shapes,
)
from benchmarks.command import main
from benchmarks.floor import step_bytes
from benchmarks.model_settings import ModelBench, model_defaults
from corecontext.cache import host_store
from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, cache_bytes
from corecontext.inference import chunk_size
from corecontext.ops.fetch import prompt_rule
from corecontext.record import Record, append_records, read_records
from corecontext.visibility import num_visible_cores

TINY = ModelBench(
    "tiny",
    (96, 128),
    ("full", "streaming_llm", "cca"),
    group_size=4,
    window_size=32,
    repeats=1,
    steps=2,
    max_batch=3,
)
# Of layers and head, used for each token.
WEIGHTS = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256) + 512 * 128


@pytest.fixture(scope="module", autouse=True)
def rates():
    """The machine's rates, which no test here is about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "matmul_flops_per_s", lambda *args: 1e10)
        patch.setattr(model, "copy_bytes_per_s", lambda *args: 1e9)
        yield


@pytest.fixture(scope="module")
def records() -> list[Record]:
    kept: list[Record] = []
    found = model.run_model_bench(TINY, kept.extend)
    assert kept == found  # handed over as they are made
    return found


def value(records, name, **params):
    found = [
        r for r in records if r.name == f"model.{name}" and params.items() <= dict(r.params).items()
    ]
    assert len(found) == 1, found
    return found[0].value


def test_every_method_is_measured_at_every_length(records):
    for length in TINY.lengths:
        for method in TINY.methods:
            for name in ("first_token_s", "peak_bytes", "cache_bytes"):
                assert value(records, name, method=method, length=length) > 0
            growing = {"cache": "compact" if method == "cca" else "dynamic"}
            assert value(records, "next_token_ms", method=method, length=length, **growing) > 0
        assert value(records, "next_token_ms", method="full", length=length, cache="static") > 0
        entry = 2 * 2 * 2 * 32 * 4  # layers, keys and values, KV heads, head size, float32
        assert value(records, "cache_bytes", method="full", length=length) == entry * length
        assert value(records, "cache_bytes", method="cca", length=length) == entry * (
            length // 4 + 35
        )
        assert value(records, "cache_bytes", method="streaming_llm", length=length) == entry * 36
        assert value(records, "peak_bytes", method="cca", length=length) >= 4 * WEIGHTS
    assert {r.params["weights"] for r in records} == {"random"}
    assert {r.params["shape"] for r in records} == {"tiny"}
    assert not [r for r in records if r.name == "model.skipped"]


def test_the_least_possible_is_that_of_the_formulas(records):
    length = 128
    cost = ModelCost(2, 4, 2, 32, WEIGHTS - 512 * 128, 512 * 128, (), 4)
    assert value(
        records, "first_token_s", method="floor", of="cca", length=length
    ) == pytest.approx(cost.prefill_flops(length, 4, 32) / 1e10)
    assert value(records, "cache_bytes", method="floor", of="full", length=length) == cache_bytes(
        length, 2, 2, 32, 4
    )
    seen = (129 - 32) // 4 + 129 - (129 - 32) // 4 * 4
    assert value(
        records, "next_token_ms", method="floor", of="cca", length=length
    ) == pytest.approx(1e3 * (4 * WEIGHTS + 2 * 2 * 2 * 32 * 4 * seen) / 1e9)
    assert (
        step_bytes(cost, length, cache_itemsize=1.125) == 4 * WEIGHTS + 2 * 2 * 2 * 32 * 1.125 * 129
    )


def test_memory_that_runs_out_is_recorded_and_the_rest_goes_on(monkeypatch):
    real = model_methods.prefill

    def failing(one, ids, **options):
        if ids.shape[1] == 128:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return real(one, ids, **options)

    monkeypatch.setattr(model_methods, "prefill", failing)  # full attention's and StreamingLLM's
    found = model.run_model_bench(dataclasses.replace(TINY, lengths=(128, 96), what=("ftl",)))
    skips = [r for r in found if r.name == "model.skipped"]
    assert [(r.params["method"], r.params["length"], r.params["reason"]) for r in skips] == [
        ("full", 128, "out of memory"),
        ("streaming_llm", 128, "out of memory"),
    ]
    for method, length in (("full", 96), ("streaming_llm", 96), ("cca", 96), ("cca", 128)):
        assert value(found, "first_token_s", method=method, length=length) > 0
    assert model_report.skipped(found)[0].startswith("full not measured on ")
    later = [
        dataclasses.replace(r, params={**r.params, "length": 128})
        for r in found
        if r.params["method"] == "full" and r.name != "model.skipped"
    ]
    assert [line.split()[0] for line in model_report.skipped(found + later)] == ["StreamingLLM"]


def test_a_prompt_over_the_limit_is_left_out(monkeypatch):
    monkeypatch.setattr(model, "_seconds", lambda run, call: (call(), 1.0)[1])
    found = model.run_model_bench(
        dataclasses.replace(
            TINY, lengths=(64, 128), methods=("full",), what=("ftl",), baseline_limit_s=3.9
        )
    )
    assert [r.params["length"] for r in found if r.name == "model.skipped"] == [128]
    assert value(found, "first_token_s", method="full", length=64) == 1.0


def test_nothing_is_timed_where_decoding_is_wrong(monkeypatch):
    one, _ = shapes.make_model("tiny", "float32", "cpu")
    for kind in ("auto", "int8"):
        model_check.check_model(one, CCAConfig.paper(4, 32, cache_dtype=kind))
    from corecontext.cache import CompactLayer

    real = CompactLayer._decode
    monkeypatch.setattr(
        CompactLayer, "_decode", lambda *given, **options: 3 * real(*given, **options)
    )
    with pytest.raises(
        AssertionError,
        match="decoding is wrong on this machine, nothing was timed: logits are off by",
    ):
        model.run_model_bench(TINY)


@pytest.fixture(scope="module")
def more() -> list[Record]:
    """Throughput, with an 8-bit cache, and the sweep."""
    bench = dataclasses.replace(
        TINY, lengths=(64,), throughput=True, methods=("full", "cca"), cache_dtype="int8"
    )
    found = model.run_model_bench(bench)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.model_settings.SWEEP_GROUPS", (2, 4))
        patch.setattr("benchmarks.model_settings.SWEEP_WINDOWS", (16, 32))
        return found + model.run_model_bench(
            dataclasses.replace(TINY, lengths=(96,), sweep=True, methods=("cca",))
        )


def test_a_sweep_does_not_measure_fetch(capsys):
    command = "model --shape tiny --method fetch --sweep --device cpu"
    assert main(command.split()) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and "method must be without fetch for a sweep run" in error[0]


def test_fetch_from_host_memory_counts_its_bytes_there(monkeypatch):
    monkeypatch.setattr(prompt_rule, "WHOLE_TOKENS", {})
    bench = dataclasses.replace(TINY, lengths=(96,), methods=("cca", "fetch", "fetch_host"))
    found = model.run_model_bench(bench)
    device = [value(found, "cache_bytes", method=m) for m in ("cca", "fetch_host", "fetch")]
    host = value(found, "host_bytes", method="fetch_host")
    assert device[0] < device[1] and device[2] == device[1] + host
    (comparison,) = model_report.comparisons(found)
    label = "CCA, 64 groups fetched from host memory"
    assert comparison.value("model.next_token_ms", label) > 0


def test_throughput_with_fetch():
    bench = dataclasses.replace(TINY, lengths=(64,), throughput=True, methods=("fetch_host",))
    bench = dataclasses.replace(bench, fetch_slots=64, hit_share=0.9, max_batch=1)
    (rate,) = model.run_model_bench(bench)
    assert rate.name == "model.tokens_per_s" and rate.value > 0
    assert {"fetch_slots": 64, "hit_share": 0.9, "store": "host"}.items() <= rate.params.items()
    with pytest.raises(ValueError, match="hit_share must come with slots"):
        dataclasses.replace(bench, fetch_slots=0)


@pytest.mark.parametrize("share, kept", [(0.7, {7}), (0.75, {7, 8}), (1.0, {10})])
def test_replayed_choices_are_in_slots_by_their_share(share, kept):
    """Of slots that evict the group unread for longest, also where choices repeat from the
    first."""
    steps = replay.repeating_choices(3, 10, 100, share, 16)
    assert (steps.diff(dim=2) > 0).all()  # no group twice
    slots: list[int] = []
    hits = []
    for step in [*steps, *steps]:
        chosen = step[1].tolist()
        hits.append(len(set(chosen) & set(slots)))
        slots = ([group for group in slots if group not in chosen] + chosen)[-16:]
    assert set(hits[1:]) == kept
    assert sum(hits[1:]) / len(hits[1:]) == pytest.approx(10 * share, abs=0.1)


def test_steps_choose_the_replayed_groups():
    """All layers of a step choose by the scores of its first one's clock."""
    chosen = []
    work = collections.namedtuple("Work", "choice scores")
    made = collections.namedtuple("Step", "raw work")
    steps = []
    for layer in range(2):
        counts = torch.full((1, 4, 3), 2 + layer)
        slots = SimpleNamespace(owner=torch.zeros(1, 4, 16), counts=counts)
        raw = SimpleNamespace(slots=slots, codes=torch.zeros(1, 4, 30, 1))
        steps.append(made(raw, work((torch.zeros(4, 5), None), torch.zeros(4, 2, 32))))
    without = made(SimpleNamespace(slots=None), "as it is")
    select = mock.patch.object(
        replay.fetch_decode, "_select", lambda step: chosen.append(copy.deepcopy(step.work))
    )
    with select, replay.replayed(0.8):
        for step in (*steps, *steps, without):
            replay.fetch_decode._select(step)
            if step is steps[1]:
                for x in steps:
                    x.raw.slots.counts[..., 0] += 1
    assert chosen.pop() == "as it is"
    wanted = replay.repeating_choices(4, 5, 30, 0.8, 16)
    for work, number in zip(chosen, (2, 2, 3, 3), strict=True):
        assert work.scores.shape == (4, 2, 32)
        for head in range(2):
            found = work.scores[:, head].topk(5).indices.sort(1)[0]
            assert torch.equal(found.int(), wanted[number])


def test_steps_over_pages_choose_the_replayed_groups():
    found = []
    tokens = torch.zeros(4, 50, 8, 2)
    slots = SimpleNamespace(clock=torch.tensor([2]), tokens=tokens, owner=torch.zeros(4, 16))
    choice = torch.zeros(4, 5, dtype=torch.int32), torch.ones(4, 32, dtype=torch.int8)
    find = mock.patch.object(replay.attend_rows, "find_places", lambda *given: found.append(given))
    with find, replay.replayed_pages(0.8, 240):
        replay.attend_rows.find_places(slots, choice, "cores")
    wanted = replay.repeating_choices(4, 5, 30, 0.8, 16)[2]
    assert torch.equal(choice[0], wanted)
    assert found == [(slots, choice, "cores")]


def test_layers_share_host_memory():
    with replay.shared_host_memory():
        made = [host_store.host_zeros((2, 3), torch.float32, torch.device("cpu")) for _ in range(4)]
    assert made[2] is made[0] is not made[1] is made[3]


def test_throughput_by_batch(more):
    found = [r for r in more if r.name == "model.tokens_per_s"]
    assert [(r.params["method"], r.params["batch"], r.params["cache"]) for r in found] == [
        (method, batch, cache)
        for method, cache in (("full", "static"), ("cca", "compact"))
        for batch in (1, 2, 3)
    ]
    (comparison,) = (p for p in model_report.comparisons(more) if p.length == 64)
    best = {
        method: max(r.value for r in found if r.params["method"] == method)
        for method in ("full", "cca")
    }
    assert comparison.gain("model.tokens_per_s") == pytest.approx(best["cca"] / best["full"])
    assert comparison.value("model.tokens_per_s", "CCA, int8") == best["cca"]


def test_the_largest_batch_follows_from_the_memory(monkeypatch):
    run = model._Run(dataclasses.replace(TINY, max_batch=1000))
    room, entry = 64 + 8 + 2 + 2, 2 * 2 * 2 * 32 * 4
    for method, row in (("full", entry * room), ("cca", entry * (room // 4 + 35))):
        row += 16 * 512
        monkeypatch.setattr(model, "free_bytes", lambda device: 20 * row / 0.95 + 1)
        assert model.batches(run, method, 64) == [2, 4, 8, 16, 20]
    monkeypatch.setattr(model, "free_bytes", lambda device: 0)
    assert model.batches(run, "cca", 64) == [1]
    assert chunk_size.free_bytes(torch.device("cpu")) is None


def test_rows_decode_the_tokens_of_the_static_cache():
    run, made = model._Run(TINY), []
    for method, kind in (("full", model.StaticRun), (model.FULL_ROWS, model.RowsRun)):
        with model.attention(run.model, method, TINY.config()), torch.random.fork_rng():
            torch.manual_seed(0)  # the same random numbers fill both
            going, tokens = kind(run.model, method, 2, 40, 5), []
            for _ in range(4):
                going.step()
                tokens.append(going.token.flatten().tolist())
        made.append((tokens, going.positions.tolist()))
    assert made[0] == made[1] and len({token for step in made[0][0] for token in step}) > 2


def test_a_batch_that_does_not_fit_ends_the_search(monkeypatch):
    real = model.StaticRun

    def failing(one, method, batch, *rest):
        if batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(one, method, batch, *rest)

    monkeypatch.setattr(model, "StaticRun", failing)
    found = model.run_model_bench(
        dataclasses.replace(TINY, lengths=(64,), throughput=True, methods=("full",))
    )
    assert [(r.name, r.params["batch"]) for r in found] == [
        ("model.tokens_per_s", 1),
        ("model.skipped", 2),
    ]


def test_the_sweep_measures_each_g_and_s(more):
    pairs = [
        (r.params["group_size"], r.params["window_size"])
        for r in more
        if r.name == "model.first_token_s" and r.params["method"] == "cca"
    ]
    assert pairs == [(2, 32), (4, 32), (4, 16)]


def test_tables_and_figures(records, more, tmp_path):
    for drawn, draw in (
        (records, model_figure.draw_model),
        (more, model_figure.draw_sweep),
        (more, model_figure.draw_model),
    ):
        path = tmp_path / "model.svg"
        draw(drawn, str(path))
        assert path.stat().st_size > 5000
    text = model_tables.model_markdown(records)
    assert "**tiny (random weights), float32, g = 4, s = 32, " in text
    assert (
        "| first token: L | full | StreamingLLM | CCA | full / CCA | least: full | least: CCA |"
        in text
    )
    full, ours = (
        value(records, "cache_bytes", method=method, length=128) for method in ("full", "cca")
    )
    assert f"| {full / ours:.2f}x |" in text
    shown = model_tables.model_markdown(more, every_size=True)
    assert "tokens per second" in shown and "full, static cache" in shown and "CCA, int8" in shown
    append_records(tmp_path / "model.jsonl", records)
    assert figures.main(["--results", str(tmp_path)]) == 0
    assert (tmp_path / "model_sweep.svg").exists()
    readme = figures.update_tables("<!-- table: model -->\nold\n<!-- end table -->\n", tmp_path)
    assert readme == f"<!-- table: model -->\n{text}<!-- end table -->\n"


def test_the_command_on_a_checkpoint(tmp_path, capsys):
    folder = save_tiny_model(tmp_path / "small")
    out = tmp_path / "model.jsonl"
    command = (
        f"model --shape {folder} --length 64 --method full --method cca --group-size 4 "
        f"--window-size 16 --repeats 1 --steps 2 --what itl --device cpu --json {out} "
        f"--plot {tmp_path}/m.svg"
    )
    assert main(command.split()) == 0
    shown = capsys.readouterr().out
    assert "small (checkpoint weights), float32, g = 4, s = 16" in shown
    assert "first token" not in shown
    assert {json.loads(line)["name"] for line in out.read_text().splitlines()} == {
        "model.next_token_ms"
    }
    assert len(read_records(out)) == 5 and (tmp_path / "m.svg").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "no/such/model"], "model 'no/such/model' does not exist"),
        (
            ["--shape", "tiny", "--sweep", "--throughput"],
            "sweep and throughput must be asked for one at a time, got both",
        ),
        (["--shape", "tiny", "--method", "fast"], "method must be one of 'full', "),
        (["--shape", "tiny", "--what", "speed"], "what must be one of 'ftl', 'itl', got 'speed'"),
        (["--shape", "tiny", "--fuse", "all"], "fuse must be one of 'none', 'compile', got 'all'"),
        (["--shape", "tiny", "--length", "0"], "length must be at least 1, got 0"),
        (["--shape", "tiny", "--steps", "0"], "steps must be at least 1, got 0"),
        (["--shape", "tiny", "--chunk-size", "0"], "chunk_size must be at least 1, got 0"),
        (["--shape", "tiny", "--length", "99999999"], "input_ids must fit the model's "),
        (
            ["--shape", "tiny", "--cache-dtype", "int4"],
            "cache_dtype must be one of 'auto', 'int8', 'fp8', got 'int4'",
        ),
        (["--shape", "tiny", "--dtype", "int8"], "dtype must be one of 'float32', "),
        (["--shape", "tiny", "--baseline-limit-s", "0"], "baseline_limit_s must be above 0"),
    ],
    ids=str,
)
def test_wrong_settings_are_one_line(arguments, message, capsys):
    assert main(["model", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_what_suits_a_device():
    assert model_defaults("cpu", "tiny").methods == ("full", "streaming_llm", "cca")
    gpu = model_defaults("cuda", "llama2-7b")
    assert gpu.lengths == tuple(2**i for i in range(12, 18))
    assert gpu.dtype == "bfloat16"
    assert "sdpa_cudnn" in gpu.methods
    assert model_defaults("cuda", "llama2-7b", sweep=True).methods == ("cca",)
    assert model_defaults("cuda", "llama3.1-8b", throughput=True).lengths == (32768,)
    pairs = [
        (c.group_size, c.window_size)
        for c in model_defaults("cuda", "llama2-7b", sweep=True).sweep_configs()
    ]
    assert len(pairs) == 10 and (16, 1024) in pairs and (2, 1024) in pairs and (16, 4096) in pairs


def test_a_warm_up_chooses_groups():
    """Else the kernels that choose are loaded while the first prompt is timed."""
    bench = model_defaults("cuda", "llama3.1-8b")
    seen = num_visible_cores(model.WARM_LENGTH - 1, bench.group_size, bench.window_size)
    assert all(x["fetch_groups"] < seen for x in model_methods.FETCHING.values())


@pytest.mark.parametrize("shape", [name for name in shapes.SHAPES if name != "tiny"])
def test_shapes_are_those_of_the_models(shape, monkeypatch):
    one, of_model = shapes.make_model(shape, "bfloat16", "meta")
    parameters = sum(x.numel() for x in one.parameters())
    assert (
        parameters
        == {
            "llama2-7b": 6738415616,
            "llama3.1-8b": 8030261248,
            "qwen2.5-7b": 7615616512,
            "qwen3-8b-kv4": 8039740416,
            "smollm2-135m-instruct": 162826560,
            "llama-1b": 1137772544,
        }[shape]
    )
    head_dim = 64 if shape == "smollm2-135m-instruct" else 128
    assert of_model["weights"] == "random" and of_model["head_dim"] == head_dim
