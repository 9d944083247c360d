"""The estimates of `corecontext info`: figures, lengths, and shares of layers and heads."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import tiny_model
from tiny_model import save_tiny_model
from transformers import AutoConfig

from corecontext import CCAConfig, info
from corecontext.cli import main
from corecontext.cost import ModelCost, attention_flops, fetch_flops, operator_flops
from corecontext.inference import limits
from corecontext.inference.room import RowShape
from corecontext.integrations.hf import attention_interface
from corecontext.integrations.vllm import capacity
from corecontext.model_sizes import ModelSizes
from corecontext.serve import build
from corecontext.serve.build import make_scheduler
from corecontext.serve.memory import CacheMemory


@pytest.mark.parametrize(
    "form, value, shown",
    [
        (info._flops, 0, "0.00"),
        (info._flops, 999, "999"),
        (info._flops, 1000, "1.00 k"),
        (info._flops, 12_345_678, "12.3 M"),
        (info._flops, 123.4e9, "123 G"),
        (info._flops, 5e21, "5e+03 E"),
        (info._bytes, 1000, "1000 B"),
        (info._bytes, 1024, "1.00 KiB"),
        (info._bytes, 10.5 * 2**20, "10.5 MiB"),
        (info._bytes, 3 * 2**40, "3 TiB"),
    ],
)
def test_figures_have_three_digits_and_a_prefix(form, value, shown):
    assert form(value) == shown


def test_lengths_are_powers_of_two_up_to_the_limit():
    assert info.default_lengths(100) == [100]
    assert info.default_lengths(4096) == [4096]
    assert info.default_lengths(9000) == [4096, 8192, 9000]
    assert info.default_lengths(32768) == [4096, 8192, 16384, 32768]


COST = ModelCost(2, 4, 2, 16, linear_weights=1000, head_weights=500, itemsize=4)


def cells(config: CCAConfig, length: int) -> list[str]:
    table = info.info_table(COST, config, [length], "llama")
    assert len(table.rows) == 1
    return [next(iter(column.cells)) for column in table.columns]


def attention(length: int, g: int = 1, s: int = 1, sinks: int = 0) -> int:
    return 2 * attention_flops(length, 4, 16, group_size=g, window_size=s, sinks=sinks)


@pytest.mark.parametrize(
    "sizes, shares",
    [
        ({"group_size": 4}, {4: 1}),
        ({"group_size": 4, "sink_size": 8}, {4: 1}),
        ({"layer_group_sizes": (4, (8, 2))}, {4: 0.5, 8: 0.25, 2: 0.25}),
        ({"head_group_sizes": (4, 8)}, {4: 0.5, 8: 0.5}),
        ({"num_groups": 90}, {11: 1}),
    ],
    ids=str,
)
def test_a_row_has_the_mean_cost_of_the_heads(sizes, shares):
    config = CCAConfig.paper(window_size=10, **sizes)
    row = cells(config, 1000)
    full = attention(1000)
    compact = sum(share * attention(1000, g, 10, config.sink_size) for g, share in shares.items())
    assert row[:4] == ["1000", info._flops(full), info._flops(compact), f"{full / compact:.1f}x"]


@pytest.mark.parametrize(
    "settings, entries",
    [
        ({}, 250 + 13),
        ({"sink_size": 6}, 248 + 8 + 13),
        # A mass has the bytes of one number in float32, beside 2 x 16 of them.
        ({"core_mass": True}, 263 + 263 / 32),
    ],
    ids=str,
)
def test_a_cache_has_core_tokens_first_tokens_and_the_window(settings, entries):
    row = cells(CCAConfig.paper(4, 10, **settings), 1000)
    full, compact = (2 * 2 * 2 * 16 * 4 * count for count in (1000, entries))
    assert row[-3:] == [info._bytes(full), info._bytes(compact), f"{full / compact:.1f}x"]


def test_what_is_fetched_costs_operations_and_bytes():
    plain = CCAConfig.paper(4, 10)
    device = plain.replace(fetch_groups=3, fetch_index="mean")
    host = device.replace(store="host")
    rows = {}
    for config in (plain, device, host):
        table = info.info_table(COST, config, [1000], "llama")
        rows[config] = [next(iter(column.cells)) for column in table.columns]
    more = 2 * fetch_flops(device, 1000, 4, 16)
    weights = 2 * (1000 * 1000 + 500)
    pooled = operator_flops(1000, 4, 2, 16, 4, 10)
    for config in (device, host):
        assert rows[config][2] == info._flops(attention(1000, 4, 10) + more)
        assert rows[config][5] == info._flops(weights + 2 * pooled + more)
    heads = 2 * 2
    raw = heads * 1000 * 2 * 16 * 4
    assert rows[plain][8] == info._bytes(heads * 263 * 128)
    assert rows[device][8] == info._bytes(heads * (263 * 128 + 250 * 64) + raw)
    slots = 6 * (4 * 128 + 12) + 4 * 251  # as on a GPU: 2 k slots, and a table of the groups
    assert rows[host][8] == info._bytes(heads * (263 * 128 + 250 * 64 + slots))
    assert cells(host.replace(fetch_slots=0), 1000)[8] == info._bytes(
        heads * (263 * 128 + 250 * 64)
    )
    assert len(rows[device]) == 10 and rows[host][10] == info._bytes(raw)
    title = info.info_table(COST, host.replace(sink_size=6), [1000], "llama").title
    assert title.endswith(
        "g = 4, s = 10, the first 8 tokens raw (sink_size 6, in whole groups), 3 groups fetched by "
        "mean, raw tokens on the host"
    )
    masses = info.info_table(COST, CCAConfig.pooling(4, 10), [1000], "llama").title
    assert masses.endswith("g = 4, s = 10, the first 16 tokens raw, with masses")
    varied = CCAConfig.paper(window_size=10, head_group_sizes=(4, 6), sink_size=5)
    assert "the first 6 tokens raw" in info.info_table(COST, varied, [1000], "llama").title


def test_the_limit_has_the_scaling_of_the_rotation_and_dynamic_scaling_is_said(tmp_path, capsys):
    folder = save_tiny_model(tmp_path / "model", max_length=1024)
    path = Path(folder, "config.json")
    values = json.loads(path.read_text())
    rope = {"rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 1024}
    for kind, settings, refused in (
        ("yarn", None, False),
        ("dynamic", None, True),
        ("dynamic", {"core_position": "token"}, False),
    ):
        changes = {"rope_parameters": {**rope, "rope_type": kind}, "cca": settings}
        path.write_text(json.dumps(values | changes))
        assert main(["info", "--model", folder]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "the model was built for 3072 tokens" in shown
        assert ("CCA cannot be enabled: rotary embedding 'dynamic' changes" in shown) is refused


def room_for(config: CCAConfig, length: int, less: int = 0) -> info.Room:
    """Return just the room on the device in which a server holds a request, less some bytes."""
    needed = info.needed_for(COST, config, length, info.Room(0))
    return info.Room(needed.device - less)


def test_the_first_settings_that_fit_are_advised():
    """The fastest first, those of the checkpoint before all, and none where none fits."""
    length = 100_000
    configs = {name: CCAConfig.preset(name) for name in ("device", "default", "small")}
    rooms = {name: room_for(config, length) for name, config in configs.items()}
    own = CCAConfig.pooling(64, 100)
    least = room_for(own, length).device
    assert rooms["device"].device > rooms["default"].device > rooms["small"].device > least
    for name, config in configs.items():
        slots = config.slots_for(length, on_gpu=True)  # those of a GPU
        device, host = COST.config_bytes(config.replace(fetch_slots=slots), length)
        advice = info.preset_advice("--model m", COST, None, length, rooms[name])
        assert advice.verdict.startswith(f"{name} fits: 100000 tokens take {info._bytes(device)} ")
        assert advice.verdict.endswith("; quality and time, as measured: docs/choose.md")
        assert advice.way == f"run: corecontext serve --model m --preset {name}"
        assert (f"and {info._bytes(host)} in host memory" in advice.verdict) is (host > 0)
        unknown = "with unknown room, which --host-memory states"
        assert (unknown in advice.verdict) is (host > 0)
        assert (" on the device, slots included, where " in advice.verdict) is (host > 0)
        fits = [*advice.table.columns[-1].cells]
        assert fits.count("yes") == [*configs][::-1].index(name) + 1 + (name == "device")
    too_small = room_for(configs["small"], length, less=1)
    shorter = info.preset_advice("--model m", COST, None, length, too_small)
    assert shorter.verdict.startswith("small fits 98304 tokens, not 100000: those take ")
    room = info._bytes(too_small.device)
    reason = f" on the device with small while they are read, with room for {room}"
    assert reason in shorter.verdict
    assert shorter.way == "run: corecontext serve --model m --preset small --max-length 98304"
    ours = info.preset_advice("--model m", COST, own, length, too_small)
    assert ours.verdict.startswith("the checkpoint's own fits: ")
    assert "docs/" not in ours.verdict
    assert ours.way == "run: corecontext serve --model m"
    nothing = info.preset_advice("--model m", COST, None, length, info.Room(0))
    assert nothing.verdict.startswith("nothing fits: 100000 tokens take ")
    assert nothing.way.startswith("take a smaller --length")
    unknown = info.preset_advice("--model m", COST, None, length, None)
    assert unknown.verdict.startswith("default: 100000 tokens take ")
    assert len(unknown.table.columns) == 4


@pytest.mark.parametrize("prefill", ["auto", "full"])
def test_a_model_with_sliding_windows_needs_one_cache(prefill):
    """No server takes it; `generate` reads the prompt into the cache of the answer."""
    length = 1000
    own = CCAConfig.pooling(8, 64, prefill=prefill)
    cost = replace(COST, windows=(512,))
    taken = cost.config_bytes(own, length).device + (prefill == "full") * length * RAW
    for less, words in ((0, "fits: 1000 "), (1, "fits 960 ")):
        advice = info.preset_advice("--model m", cost, own, length, info.Room(taken - less))
        assert advice.verdict.startswith(f"the checkpoint's own {words}tokens")
        assert advice.way == "run: corecontext generate --model m --prompt-file FILE"
    host = CCAConfig.preset("default", fetch_slots=0)
    needed = info.needed_for(cost, host, length, info.Room(2**30, 2**30))
    assert (needed.device, needed.host) == cost.config_bytes(host, length)


RAW = 2 * 2 * 2 * 16 * 4
"""Bytes of a raw token of `COST`."""


@pytest.mark.parametrize("dtype, share", [("auto", 1), ("int8", 20 / 64)])
def test_host_memory_is_weighed_too(dtype, share):
    """Twice the bytes of the raw tokens: of the row, and of the cache the prompt is read into."""
    length = 65536
    own = CCAConfig.preset("default", cache_dtype=dtype)
    room = room_for(own, length)._replace(of_host="75% of the given 1 GiB")
    raw = int(length * RAW * share)
    enough = info.preset_advice("--model m", COST, own, length, room._replace(host=2 * raw))
    assert enough.verdict.startswith("the checkpoint's own fits: 65536 tokens take ")
    assert enough.verdict.endswith(
        f", and {info._bytes(raw)} in host memory, {info._bytes(2 * raw)} while they are "
        f"read, with room for {info._bytes(2 * raw)} (75% of the given 1 GiB)"
    )
    little = info.preset_advice("--model m", COST, own, length, room._replace(host=raw))
    assert little.verdict == (
        f"the checkpoint's own fits 32768 tokens, not 65536: those take {info._bytes(2 * raw)} in "
        "host memory with the checkpoint's own while they are read, with room for "
        f"{info._bytes(raw)} (75% of the given 1 GiB)"
    )
    assert little.way == "run: corecontext serve --model m --max-length 32768"
    assert [*little.table.columns[-1].cells].count("yes") == 0


def test_without_host_memory_all_is_kept_on_the_device():
    none = {"host": 0, "of_host": "75% of the given 0 B"}
    room = room_for(CCAConfig.preset("device"), 65536)._replace(**none)
    whole = info.preset_advice("--model m", COST, None, 65536, room)
    assert whole.verdict.startswith("device fits: ")
    assert "in host memory" not in whole.verdict
    room = room_for(CCAConfig.preset("small"), 65536)._replace(**none)
    part = info.preset_advice("--model m", COST, None, 65536, room)
    held = int(
        part.way.removeprefix("run: corecontext serve --model m --preset device --max-length")
    )
    assert 64 <= held < 65536
    needed = info._bytes(2 * 65536 * RAW)
    assert part.verdict.startswith(
        f"device fits {held} tokens, not 65536: those take {needed} in host memory with small while"
    )


@pytest.mark.parametrize("length", [64, 4096, 65536, 81920, 106496])
def test_what_fits_is_what_an_empty_server_takes(length):
    """By the server's own rule: for presets and others, and room for just less, and more."""
    configs = [CCAConfig.preset(name) for name in info.OFFERED]
    configs += [CCAConfig.pooling(8, 64, prefill="full"), configs[1].replace(cache_dtype="int8")]
    configs += [CCAConfig(head_group_sizes=(1, 8))]
    sizes = ModelSizes(COST.query_heads, COST.kv_heads, COST.head_dim, COST.num_layers)
    seen = set()
    for config in configs:
        slots = config.replace(fetch_slots=config.slots_for(length, on_gpu=True))
        for device, host in itertools.product((1, 2, 3, 20, 40), (0.9, 1.1, 1.9, 2.1, 9)):
            room = info.Room(device * length * 300, int(host * length * RAW))
            shape = RowShape(sizes, COST.itemsize, room.device / room.host)
            memory = CacheMemory(shape, room.device, 1, None, None)
            fits = room.fits(info.needed_for(COST, config, length, room))
            assert fits is memory.fits(slots, length), (config, room)
            seen.add(fits)
    assert length == 64 or seen == {False, True}


def test_lengths_are_rounded_down_to_those_of_rows():
    for length in range(1, 5000):
        down = limits.rounded_down(length)
        assert down <= length < limits.rounded_up(down + 1) + (length == down)
        assert down == 0 or limits.rounded_up(down) == down


def test_bytes_are_the_mean_of_the_heads():
    varied = CCAConfig(head_group_sizes=(4, 8))
    each = [COST.config_bytes(CCAConfig(g), 1000) for g in (4, 8)]
    assert info.mean_bytes(COST, varied, 1000) == tuple(sum(x) / 2 for x in zip(*each))


def test_the_command_advises_unless_settings_are_given(tmp_path, capfd, monkeypatch):
    model = save_tiny_model(tmp_path / "model")
    line = ["info", "--model", model, "--length", "4000"]
    assert main([*line, "--gpu-memory", "1"]) == 0
    first, second, *_ = capfd.readouterr().out.splitlines()
    assert first.startswith("device fits: 4000 tokens take ")
    assert second == f"run: corecontext serve --model {model} --preset device"
    assert main([*line, "--gpu-memory", "1e-5"]) == 0
    assert capfd.readouterr().out.startswith("nothing fits: ")
    monkeypatch.setattr(info, "available_bytes", lambda: 48 * 2**20)
    line[-1] = "65536"
    tight = [*line, "--gpu-memory", "0.03"]
    assert main(tight) == 0
    first, second, *_ = capfd.readouterr().out.splitlines()
    assert first.startswith("default fits 36864 tokens, not 65536: those take 64.0 MiB in host ")
    assert " with room for 36.0 MiB (75% of this machine's available 48.0 MiB)" in first
    assert second.endswith(" --preset default --max-length 36864")
    assert main([*tight, "--host-memory", "1"]) == 0
    first, *_ = capfd.readouterr().out.splitlines()
    assert first.startswith("default fits: 65536 tokens take ")
    assert ", with room for 768 MiB (75% of the given 1.00 GiB); quality and time" in first
    monkeypatch.setattr(info, "available_bytes", lambda: None)
    assert main(tight) == 0
    assert ", with unknown room, which --host-memory states; " in capfd.readouterr().out
    assert main([*line, "--preset", "small"]) == 0
    assert "corecontext serve" not in capfd.readouterr().out


@pytest.mark.parametrize("settings", [None, CCAConfig.pooling(4, 16)])
@pytest.mark.parametrize("options", [[], ["--untested"]])
@pytest.mark.parametrize(
    "family, command", [("llama", "serve"), ("qwen2-hybrid", "generate"), ("gemma3", "generate")]
)
def test_the_printed_command_takes_the_model(
    family, command, options, settings, tmp_path, capfd, monkeypatch
):
    """With enough memory and with little: a server starts, or a text is generated."""
    model = save_tiny_model(tmp_path / "model")
    changed = tiny_model(family, vocab_size=256, max_position_embeddings=8192)
    changed.config.cca = settings and settings.to_dict()
    changed.save_pretrained(model)
    if options:
        monkeypatch.setattr(attention_interface, "TESTED", ())
    text = tmp_path / "text"
    text.write_text("to be continued " * 4)
    served = []
    monkeypatch.setattr(build, "run", lambda serving: served.append(make_scheduler(serving)))
    for gib, fits in (("1", " fits: "), ("7e-4", " fits ")):
        assert main(["info", "--model", model, *options, "--gpu-memory", gib]) == 0
        verdict, way, *_ = capfd.readouterr().out.splitlines()
        assert fits in verdict
        words = way.removeprefix("run: corecontext ").replace("FILE", str(text)).split()
        assert words[0] == command
        assert main([*words, *(["--max-new-tokens", "2"] if command == "generate" else [])]) == 0
        capfd.readouterr()
    assert len(served) == 2 * (command == "serve")


def test_tokens_in_the_cache_of_vllm(tmp_path, capfd):
    model = save_tiny_model(tmp_path / "model")
    line = ["info", "--model", str(model), "--vllm", "--gpu-memory", "0.01"]
    line += ["--preset", "pooling"]
    line += ["--group-size", "4", "--window-size", "8", "--sinks", "0"]
    assert main([*line, "--length", "640"]) == 0
    hf_config = AutoConfig.from_pretrained(model)
    cost = ModelCost.of(hf_config)
    weights = cost.weight_bytes()
    weights += 0 if hf_config.tie_word_embeddings else cost.head_weights * cost.itemsize
    free = int(0.92 * 0.01 * 2**30) - weights
    entries = 16 * cost.num_layers * cost.kv_heads
    usual = free // (entries * 2 * cost.head_dim * cost.itemsize)
    pages = free // (entries * (2 * cost.head_dim * cost.itemsize + 4))  # with masses
    # A prompt's step brings all tokens; decoding, 11 raw tokens in two pages, 160 core tokens.
    compact = (pages - 40 + 2) * 640 // (2 + 10)
    shown = capfd.readouterr().out.split()
    assert f"{16 * usual:,}" in shown
    assert f"{compact:,}" in shown
    assert main([*line, "--length", "500", "--length", "640"]) == 0
    assert f"{compact:,}" in capfd.readouterr().out.split()
    assert main([*line, "--cache-dtype", "int8"]) == 2
    assert "cca.cache_dtype must be 'auto' in vLLM" in capfd.readouterr().err


def test_vllms_cache_with_heads_that_keep_every_token():
    """Four layers of two KV heads: one head in each of two layers, or a whole layer."""
    cost = replace(COST, num_layers=4, kv_heads=2, head_dim=8, itemsize=4)
    page = 2 * 16 * 2 * 8 * 4
    for sizes, layers, groups in (((8, (1, 8), (8, 1), 8), 2, 2), ((8, 8, 1, 8), 1, 3)):
        config = CCAConfig.pooling(16, 64, sink_size=0, core_mass=False, layer_group_sizes=sizes)
        per_page = 32 if layers == 2 else 16  # tokens of a page of raw heads
        raw = 4096 // per_page
        compact = groups * (6 + 4096 // (8 * 16))  # window pages and core pages
        chunk = groups * (256 - 6)  # more window pages of the request whose prompt is read
        pages = 10 * (compact + raw) + chunk
        held = [
            capacity.held_tokens(cost, config, 4096, count * layers * page)[1]
            for count in (pages, pages - 1)
        ]
        assert held[0] == 10 * 4096 > held[1] > 9 * 4096


@pytest.mark.parametrize(
    "options, message",
    [
        (["--vllm"], "gpu_memory must be given on a machine without a GPU"),
        (["--vllm", "--gpu-memory", "0"], "gpu_memory must be more than 0, got 0.0."),
        (["--vllm", "--gpu-memory", "1e-5"], "gpu_memory must be more than the weights'"),
        (["--gpu-memory", "-1"], "gpu_memory must be more than 0, got -1.0."),
        (["--host-memory", "-1"], "host_memory must be at least 0, got -1.0."),
        (["--host-memory", "8"], "host_memory must be given with gpu_memory on a machine without"),
    ],
)
def test_memory_that_holds_no_cache_of_vllm(options, message, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = save_tiny_model(tmp_path / "model")
    assert main(["info", "--model", str(model), *options]) == 2
    assert message in capfd.readouterr().err


def test_the_table_of_vllms_cache(monkeypatch):
    hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    config = CCAConfig.pooling(16, 64, core_mass=False)
    table = capacity.capacity_table(hf_config, COST, config, [2048, 16384], 0.1)
    free = int(0.92 * 0.1 * 2**30) - COST.weight_bytes()
    columns = [list(column.cells) for column in table.columns]
    held = [capacity.held_tokens(COST, config, length, free) for length in (2048, 16384)]
    assert columns[:3] == [
        ["2048", "16384"],
        [f"{full:,}" for full, _ in held],
        [f"{compact:,}" for _, compact in held],
    ]
    assert held[0][0] == held[1][0] < held[0][1] < held[1][1]
    assert columns[3] == [f"{compact / full:.1f}x" for full, compact in held]
    fetched = CCAConfig.preset("device")
    full, with_fetch = capacity.held_tokens(COST, fetched, 16384, free)
    assert full // 2 < with_fetch < full
    host = CCAConfig.preset("default")
    assert capacity.held_tokens(COST, host, 16384, free)[1] > 2 * full
    table = capacity.capacity_table(hf_config, COST, host, [16384], 0.1)
    assert "GiB of host memory" in table.caption and "--num-gpu-blocks-override" in table.caption
    hf_config.architectures = ["GPT2LMHeadModel"]
    with pytest.raises(ValueError, match="^architectures must hold one of Llama"):
        capacity.capacity_table(hf_config, COST, config, [2048], 0.01)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=3 * 2**29)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    assert capacity.gpu_gib(None) == 1.5 and capacity.gpu_gib(2.5) == 2.5
