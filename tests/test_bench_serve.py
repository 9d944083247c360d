"""The load generator: when requests come and what they ask; a short day and a short rise against a
real server."""

import asyncio
import math
import subprocess
from contextlib import contextmanager

import pytest
from tiny_model import save_tiny_model

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from benchmarks import random_server, serving
from benchmarks import replay as replay_of_choices
from benchmarks.command import main
from benchmarks.request_load import arrivals, day_rate, prompt_of, replay
from benchmarks.serving import percentile
from benchmarks.serving_report import draw_serve, newest_run
from benchmarks.serving_settings import SERVED_SHAPES, ServeBench
from corecontext.files import UserError
from corecontext.record import read_records


def test_arrivals_follow_the_rate():
    def rate(t):
        return day_rate(t, 1000.0, 2.0, 20.0)

    found = arrivals(rate, 20.0, 1000.0, 3)
    assert found == arrivals(rate, 20.0, 1000.0, 3) != arrivals(rate, 20.0, 1000.0, 4)
    assert found == sorted(found) and found[0] > 0 and found[-1] < 1000
    for hour in range(10):
        count = sum(hour * 100 <= t < hour * 100 + 100 for t in found)
        expected = sum(rate(hour * 100 + t + 0.5) for t in range(100))
        assert abs(count - expected) < 5 * math.sqrt(expected)
    assert max(rate(t) for t in range(1000)) == pytest.approx(20)
    assert rate(580) == 20
    assert rate(80) == pytest.approx(2)


def test_prompts_are_distinct_after_what_they_share():
    first, second = (prompt_of(number, 50, 20, 7) for number in (1, 2))
    assert (
        first[:20] == second[:20] and first[20:] != second[20:] and len(first) == len(second) == 50
    )
    assert first == prompt_of(1, 50, 20, 7) and max(first) < 256
    assert prompt_of(1, 50, 0, 7)[0:20] != prompt_of(2, 50, 0, 7)[0:20]


def test_percentiles():
    assert [percentile(list(range(1, 101)), q) for q in (0.01, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([5.0], 0.99) == 5.0 and percentile([3, 1, 2], 0.5) == 2


def test_a_server_is_warmed_up_by_other_prompts_and_a_saturated_one_by_its_whole_load(monkeypatch):
    """Else its captures of steps over many rows would be measured."""
    sent = []

    async def replayed(url, model, due, prompts, new_tokens, on_done):
        sent.append((len(due), new_tokens, [prompts(number) for number in range(len(due))]))
        return []

    monkeypatch.setattr(serving, "replay", replayed)
    for mode, count, new_tokens in (("rising", 4, 16), ("saturated", 9, 40)):
        bench = ServeBench(mode=mode, counts=(9,), prompt_lengths=(5,), new_tokens=40)
        serving.warm_up(bench, "")
        asyncio.run(serving._replay(bench, "", [0.0] * 9))
        (few, short, warming), (*_, measured) = sent[-2:]
        assert (few, short) == (count, new_tokens)
        assert not {tuple(x) for x in warming} & {tuple(x) for x in measured}


def test_one_server_gets_all_loads_none_of_whose_prompts_begin_alike():
    given = {"prompt_lengths": (5, 9), "counts": (2, 3)}
    loads = list(ServeBench(mode="saturated", **given).loads())
    assert [(x.prompt_length, x.requests) for x in loads] == [(5, 2), (5, 3), (9, 2), (9, 3)]
    assert [x.params("full")["requests"] for x in loads] == [2, 3, 2, 3]
    begins = {
        tuple(prompt_of(number, x.prompt_length, 0, x.seed)[:5])
        for x in loads
        for number in range(-x.requests, x.requests)
    }
    assert len(begins) == sum(2 * x.requests for x in loads)
    assert [x.prompt_length for x in ServeBench(mode="day", **given).loads()] == [5, 9]


def test_a_server_that_is_not_there_is_an_error_of_each_request():
    seen = asyncio.run(
        replay("http://127.0.0.1:9", "x", [0.0, 0.01], lambda n: [1], 3, lambda one: None)
    )
    assert [one.error for one in seen] == ["ConnectError"] * 2 and seen[0].first_token_s is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "week"}, "mode must be one of 'day', 'rising', 'sat"),
        ({"variants": ("fast",)}, "variant must be elastic, fixed, full"),
        ({"variants": ("cca:0:5",)}, "variant must be"),
        ({"variants": ()}, "variant must be given"),
        ({"shape": "gpt"}, "shape must be one of llama3.1-8b"),
        ({"new_tokens": 0}, "new_tokens must be at least 1"),
        ({"shared_length": 1024}, "shared_length must be"),
        ({"seconds": 0}, "seconds must be more than 0"),
        ({"peak_rate": 0.1}, "peak_rate must be at least base_rate"),
        ({"growth": 1.0}, "peak_rate must be"),
        ({"hit_share": 0.9}, "hit_share must be in 0 .. 1, and come with --shape"),
        ({"prompt_lengths": ()}, "prompt-length and requests must be given"),
        ({"prompt_lengths": (9, 5), "shared_length": 7}, "shared_length must be"),
        ({"prompt_lengths": (9, 5), "hit_share": 0.9}, "hit_share must come with one"),
        ({"hit_share": 1.1, "shape": "llama3.1-8b"}, "hit_share must be in"),
    ],
    ids=str,
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        ServeBench(**options)


def test_variants_become_options_of_the_server():
    bench = ServeBench(group_size=8, window_size=64)
    own = ["--group-size", "8", "--window-size", "64"]
    assert bench.server_options("elastic") == ["--policy", "elastic", *own]
    assert bench.server_options("full") == ["--method", "full"]
    assert bench.server_options("small") == ["--policy", "fixed", "--preset", "small"]
    assert bench.server_options("cca:4:99") == [
        "--policy",
        "fixed",
        "--group-size",
        "4",
        "--window-size",
        "99",
    ]


def test_only_presets_replay_choices():
    bench = ServeBench(shape="llama3.1-8b", hit_share=0.9)
    assert bench.params("default")["hit_share"] == 0.9
    assert "hit_share" not in bench.params("full") and "hit_share" not in bench.params("cca:4:16")
    assert not ServeBench(shape="llama3.1-8b").replays("default")


def test_a_server_of_random_weights_replays_choices(monkeypatch):
    seen = []

    def served(options):
        seen.append((options, replay_of_choices.fetch_decode._select is original))
        return 0

    original = replay_of_choices.fetch_decode._select
    monkeypatch.setattr(random_server, "main", served)
    monkeypatch.setattr(random_server.build, "load", None)
    assert random_server.serve(["--port", "0", "--replay", "0.9", "500"]) == 0
    assert random_server.serve(["--port", "0"]) == 0
    assert seen == [(["serve", "--port", "0"], False), (["serve", "--port", "0"], True)]


def test_the_shape_is_that_of_the_model():
    from transformers import AutoConfig

    config = AutoConfig.for_model(**SERVED_SHAPES["llama3.1-8b"])
    per_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert 32 * per_layer + 2 * 128256 * 4096 + 4096 == 8030261248
    assert (
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
    ) == (32, 4096, 14336, 128256)


@pytest.mark.slow
def test_a_day_and_a_rise_on_one_server(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model, original, urls = save_tiny_model(tmp_path / "m", max_length=512), serving.served, []
    common = ["serve", "--model", model, "--prompt-length", "60", "--new-tokens", "6"]
    common += ["--device", "cpu", "--cache-mib", "64", "--json", "r.jsonl"]
    day = ["--mode", "day", "--seconds", "2", "--base-rate", "3", "--peak-rate", "15"]
    day += ["--plot", "day.svg"]
    rise = ["--mode", "rising", "--seconds", "0.5", "--base-rate", "4", "--peak-rate", "9"]
    rise += ["--growth", "2", "--variant", "fixed", "--variant", "cca:4:16"]
    rise += ["--plot", "rise.svg"]

    bench = ServeBench(model=model, device="cpu", cache_mib=64, host_cache_mib=32)
    assert bench.params("fixed")["host_cache_mib"] == 32
    with original(bench, "elastic") as url:

        @contextmanager
        def same(bench, variant):
            urls.append(variant)
            yield url

        monkeypatch.setattr(serving, "served", same)
        assert main([*common, *day, "--variant", "elastic"]) == 0
        assert main([*common, *rise]) == 0
        assert main([*common, *rise, "--first-token-limit", "0.0001", "--force"]) == 0
        assert (
            main([*common, "--mode", "saturated", "--requests", "5", "--variant", "cca:4:16"]) == 0
        )
        assert main([*common, "--mode", "saturated", "--plot", "s.svg"]) == 2
    shown = capfd.readouterr().out
    records = read_records("r.jsonl")
    total = {r.name: r for r in records if r.params["mode"] == "day" and "hour" not in r.params}
    hours = [r for r in records if r.name == "serve.requests_per_s" and "hour" in r.params]
    count = total["serve.requests_per_s"].params["offered_per_s"] * 2
    assert len(hours) == 24 and count > 5 and total["serve.failed"].value == 0
    assert sum(r.params["offered_per_s"] for r in hours) * 2 / 24 == pytest.approx(count)
    assert total["serve.tokens_per_s"].value == pytest.approx(
        6 * total["serve.requests_per_s"].value
    )
    shares = [
        r
        for r in records
        if r.name == "serve.setting_share" and r.params["mode"] == "day" and "hour" not in r.params
    ]
    assert sum(r.value for r in shares) == pytest.approx(1) and shares[0].params["group_size"] in (
        16,
        32,
        64,
    )
    first = [r for r in records if r.name == "serve.first_token_s" and r.params.get("rate") == 4]
    assert {r.params["quantile"] for r in first} == {0.5, 0.99}
    assert all(0 < r.value < 60 for r in first)
    limits = [
        (r.params["variant"], r.value, r.params["reached"])
        for r in records
        if r.name == "serve.limit_rate"
    ]
    assert limits[2:] == [("fixed", 0.0, True), ("cca:4:16", 0.0, True)] and len(limits) == 4
    assert limits[0][1] in (4.0, 8.0, 0.0) and "for its first token at" in shown
    assert urls == ["elastic"] + ["fixed", "cca:4:16"] * 2 + ["cca:4:16"]
    saturated = {r.name: r for r in records if r.params["mode"] == "saturated"}
    assert saturated["serve.tokens_per_s"].value == pytest.approx(
        6 * saturated["serve.requests_per_s"].value
    )
    assert saturated["serve.requests_per_s"].params["requests"] == 5
    assert saturated["serve.failed"].value == 0
    records = [r for r in records if r.params["mode"] != "saturated"]
    assert (tmp_path / "day.svg").stat().st_size > 5000
    assert (tmp_path / "rise.svg").stat().st_size > 5000
    kept = newest_run(records)
    assert {r.params["variant"] for r in kept} == {"fixed", "cca:4:16"}
    draw_serve(records, "again.svg")


def test_a_server_that_does_not_start_says_why(tmp_path):
    (tmp_path / "log").write_text("Loading\nerror: model 'nowhere' does not exist.\n")
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(
        UserError, match="^the server did not start: model 'nowhere' does not exist.$"
    ):
        serving._wait_for(ended, tmp_path / "log")
