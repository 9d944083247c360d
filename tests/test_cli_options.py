"""Each option of a command reaches the function that it is for, and each output its place."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, get_args

import pytest
import torch
import typer
from rich.markup import escape

from corecontext import CCAConfig, cli, generation, info, perplexity
from corecontext.cli import entry, options
from corecontext.cli.entry import application, run
from corecontext.config import MOVED_OPTIONS, setting_help
from corecontext.demo import compare as demo_compare
from corecontext.demo import report
from corecontext.eval import evaluate as evaluation
from corecontext.eval import summary
from corecontext.eval.evaluate import ModelOptions
from corecontext.eval.inspect import page
from corecontext.eval.items import Settings
from corecontext.eval.task_table import TASKS
from corecontext.files import UserError
from corecontext.methods import CCA_SETTINGS, field_of
from corecontext.record import make_record, read_records
from corecontext.train import conversion

SIZE_VALUES = {
    "group_size": 3,
    "window_size": 5,
    "sinks": 2,
    "core_mass": False,
    "dtype": "float16",
    "device": "cpu",
    "untested": True,
}
SIZES = ["--untested", "--no-core-mass"]
for _name in ("group_size", "window_size", "sinks", "dtype", "device"):
    SIZES += [f"--{_name.replace('_', '-')}", str(SIZE_VALUES[_name])]

FETCH = ["--fetch-groups", "6", "--fetch-index", "parts:2:4"]
FETCH_VALUES = {"fetch_groups": 6, "fetch_index": "parts:2:4"}
STORED = [*FETCH, "--store", "host", "--fetch-slots", "8"]
STORED_VALUES = {**FETCH_VALUES, "store": "host", "fetch_slots": 8}
READ = [*STORED, "--prefill", "fetch"]
READ_VALUES = {**STORED_VALUES, "prefill": "fetch"}


class Calls(list):
    """The calls of the functions that stand in for others, in order."""

    def keep(self, name: str, result=None):
        """Return a function that keeps its arguments under a name."""

        def call(*args, **kwargs):
            self.append((name, args, kwargs))
            return result

        return call


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text")
    return tmp_path


def loaded(config=None, note: str = "") -> SimpleNamespace:
    return SimpleNamespace(
        config=config,
        model=SimpleNamespace(device=torch.device("cpu")),
        sizes=lambda: {"layers": 2},
        idle_note=lambda length: note and f"{note} {length}",
    )


def main(line: str, *more: str) -> int:
    return cli.main([*line.split(), *more])


def test_demo(monkeypatch, calls, here):
    result = SimpleNamespace(records=[make_record("demo.cache_bytes", 1, {})])
    monkeypatch.setattr(demo_compare, "run_demo", calls.keep("run", result))
    monkeypatch.setattr(report, "print_report", calls.keep("print"))
    line = "demo --group-size 3 --window-size 5 --questions 4 --max-tokens 70 --dtype float16"
    assert main(f"{line} --device cpu --sinks 2 --json r.jsonl") == 0
    attention = {"group_size": 3, "window_size": 5, "sinks": 2}
    settings = demo_compare.DemoSettings(
        num_questions=4, max_tokens=70, attention=attention, dtype="float16", device="cpu"
    )
    assert [name for name, _, _ in calls] == ["run", "print"]
    assert calls[0][1] == (settings,)
    assert read_records("r.jsonl") == result.records
    calls.clear()
    assert main("demo --model m --document d --sinks 0") == 0
    assert calls[0][1] == (demo_compare.DemoSettings("m", "d", attention={"sinks": 0}),)


def test_generate(monkeypatch, calls, here, capsys):
    model = loaded(note="idle at")
    monkeypatch.setattr("corecontext.loading.load", calls.keep("load", model))
    encode = calls.keep("encode", torch.zeros(1, 6))
    monkeypatch.setattr(generation, "encode_prompt", encode)

    def generate(*args, on_text, on_chunk):
        calls.append(("generate", args, {}))
        on_chunk(6)
        on_text("ab")
        on_text("c")
        return 3

    monkeypatch.setattr(generation, "generate", generate)
    line = "generate --model m --question q --no-chat-template --max-new-tokens 9 --chunk-size 4"
    line += " --temperature 0.5 --top-k 7 --top-p 0.25 --seed 8 --method window"
    line += " --cache-dtype int8"
    assert main(line, *SIZES, *READ, "--prompt", "a text") == 0
    of_load = {**SIZE_VALUES, **READ_VALUES, "method": "window"}
    of_load |= {"cache_dtype": "int8"}
    wanted = generation.Continuation(
        max_new_tokens=9, temperature=0.5, top_k=7, top_p=0.25, seed=8, chunk_size=4
    )
    assert calls[0] == ("load", ("m",), of_load)
    assert calls[1] == ("encode", (model, "a text", "q", False), {"room_for": 9})
    assert calls[2][1][0] is model and calls[2][1][2] == wanted
    assert capsys.readouterr() == ("abc\n", "idle at 9\n")
    assert main(line, *SIZES, "--prompt-file", "text.txt", "--output", "out.txt") == 0
    assert calls[3][2] == {name: of_load[name] for name in of_load if name not in READ_VALUES}
    assert calls[4] == calls[1]
    assert Path("out.txt").read_text() == "abc"
    assert capsys.readouterr() == ("", "idle at 9\n")


def test_perplexity(monkeypatch, calls, here, capsys):
    config = CCAConfig.pooling(3, 50, sink_size=0)
    monkeypatch.setattr("corecontext.loading.load", calls.keep("load", loaded(config)))
    measured = calls.keep("measure", "measured")
    monkeypatch.setattr(perplexity, "measure", measured)
    monkeypatch.setattr(perplexity, "print_table", calls.keep("print"))
    monkeypatch.setattr(perplexity, "to_records", calls.keep("records", []))
    line = "perplexity text.txt --model f/m --chunk-size 6 --json r.jsonl"
    line += " --cache-dtype int8"
    assert main(line, *SIZES, *READ, "--method", "full") == 0
    sizes = {**SIZE_VALUES, **READ_VALUES, "method": "full"}
    sizes |= {"cache_dtype": "int8"}
    assert calls[0] == ("load", ("f/m",), sizes)
    assert calls[1][1][1:] == ("a text", "full", 6)
    assert calls[2:] == [
        ("print", ({"full": "measured"},), {}),
        ("records", ({"full": "measured"}, "f/m"), {}),
    ]
    calls.clear()
    assert main(line, *SIZES, *READ, "--compare") == 0
    pairs = zip(calls[:10:2], calls[1:10:2])
    found = {measure[1][2]: load[2] for load, measure in pairs}
    plain = {name: SIZE_VALUES[name] for name in ("dtype", "device", "untested")}
    cca = {**SIZE_VALUES, **READ_VALUES, **plain, "method": "cca", "cache_dtype": "int8"}
    assert found == {
        "full": {**plain, "method": "full"},
        "cca": cca,
        "window": {**plain, "method": "window", "window_size": 50},
        "streaming_llm": {
            **plain,
            "method": "streaming_llm",
            "window_size": 50,
            "sinks": SIZE_VALUES["sinks"],
        },
        "cca sinks=16": {**cca, "sinks": 16},
    }
    calls.clear()
    with_sinks = loaded(config.replace(sink_size=4))
    monkeypatch.setattr("corecontext.loading.load", calls.keep("load", with_sinks))
    assert main(line, "--compare") == 0
    assert [call[0] for call in calls].count("load") == 4
    calls.clear()
    assert main(line, "--compare", "--method", "window") == 2
    refusal = (
        "method must be left out with --compare, which measures full, cca, window and streamin"
    )
    assert refusal in capsys.readouterr().err
    assert not calls


def test_info(monkeypatch, calls):
    monkeypatch.setattr(info, "print_info", calls.keep("info"))
    line = "info --model m --group-size 3 --window-size 5 --sinks 2 --length 7 --length 8"
    assert main(f"{line} --untested") == main("info --model m") == 0
    assert main("info --model m --cache-dtype int8 --no-core-mass", *STORED) == 0
    sizes = {"group_size": 3, "window_size": 5, "sinks": 2}
    fetch = {**STORED_VALUES, "cache_dtype": "int8", "core_mass": False}
    assert [args for _, args, _ in calls] == [
        ("m", sizes, [7, 8], True, None, False, None),
        ("m", {}, None, False, None, False, None),
        ("m", fetch, None, False, None, False, None),
    ]
    assert main("info --model m --vllm --gpu-memory 80 --host-memory 64") == 0
    assert calls[3][1][-3:] == (80, True, 64)


def test_convert(monkeypatch, calls, capsys):
    monkeypatch.setattr("corecontext.loading.load_config", calls.keep("config", SimpleNamespace()))
    checked = calls.keep("check")
    monkeypatch.setattr("corecontext.loading.check_architecture", checked)
    monkeypatch.setattr(conversion, "convert", calls.keep("convert"))
    line = "convert m new --group-size 3 --window-size 5 --sinks 2 --no-core-mass --untested"
    assert main(line) == 0
    assert calls[1][1][1] is True
    assert calls[2][1] == ("m", "new", CCAConfig(3, 5, sink_size=2, core_mass=False))
    assert main("convert m new --preset small --sinks 2") == 0
    assert calls[-1][1] == ("m", "new", CCAConfig.preset("small", sink_size=2))
    assert main("convert m new --method full") == 0
    assert calls[-1][1] == ("m", "new", None)
    assert capsys.readouterr().out == "wrote new\n" * 3
    for option in (
        "--preset small",
        "--group-size 2",
        "--window-size 2",
        "--sinks 2",
        "--no-core-mass",
    ):
        assert main(f"convert m new --method full {option}") == 2
    assert main("convert m new --method window") == 2
    assert "method must be cca or full, got 'window'." in capsys.readouterr().err


EVALUATION = (
    "--model f/m --task multidoc_qa --task perplexity --data d --data perplexity=e --length 8 "
    "--length 9 --documents 3 --subtask law --limit 4 --positions 6 --seed 10 --max-new-tokens 11 "
    "--chunk-size 12 --no-chat-template --results r.jsonl"
)


@pytest.mark.parametrize("command", ["eval", "compare"])
def test_eval_and_compare(monkeypatch, calls, here, command):
    record = make_record("quality.score", 1.0, {}, device="there")
    monkeypatch.setattr(evaluation, "evaluate", calls.keep("run", [record]))
    rows = [1] * 61
    monkeypatch.setattr(summary, "summarise", calls.keep("summarise", rows))
    monkeypatch.setattr(summary, "print_table", calls.keep("print"))
    monkeypatch.setattr(summary, "to_records", calls.keep("records", [record]))
    more = "" if command == "eval" else " --method full --method cca"
    assert (
        main(f"{command} {EVALUATION} --json s.jsonl{more}", *SIZES, *FETCH, "--prefill", "fetch")
        == 0
    )
    settings = Settings((8, 9), (3,), ("law",), 4, 6, 10, 11)
    names = ("group_size", "window_size", "sinks", "core_mass", "untested")
    sizes = {name: SIZE_VALUES[name] for name in names} | FETCH_VALUES | {"prefill": "fetch"}
    model_options = ModelOptions(sizes, None, 12, False, "float16", "cpu")
    methods = ["cca"] if command == "eval" else ["full", "cca"]
    tasks = [TASKS["multidoc_qa"], TASKS["perplexity"]]
    data = ["d", "perplexity=e"]
    given = ("f/m", methods, tasks, data, settings, model_options, "r.jsonl")
    assert calls == [
        ("run", given, {}),
        ("summarise", ([record], TASKS), {}),
        ("print", (rows,), {"parts": command == "eval"}),
        ("records", (rows, "there"), {}),
    ]
    assert read_records("s.jsonl") == [record]
    calls.clear()
    assert main(f"{command} --model m --task perplexity --num-groups 3 --chat-template") == 0
    assert calls[0][1][1:5] == (methods, tasks[1:], (), Settings())
    assert calls[0][1][5].num_groups == 3 and calls[0][1][5].chat_template is True
    rows.pop()
    assert main(f"{command} --model m --task perplexity") == 0
    assert calls[-1][2] == {"parts": True}


def test_inspect(monkeypatch, calls, here):
    model = loaded()
    monkeypatch.setattr("corecontext.loading.load", calls.keep("load", model))
    monkeypatch.setattr(page, "inspect_text", calls.keep("inspect", "<page>"))
    line = "inspect text.txt --model m --output o.html --max-tokens 7 --queries 3"
    assert main(f"{line} --position 4 --position 2 --layer 1", *SIZES) == 0
    assert calls == [
        ("load", ("m",), SIZE_VALUES),
        ("inspect", (model, "m", "a text", 7, 3, [4, 2], [1]), {}),
    ]
    assert Path("o.html").read_text() == "<page>"
    assert main("inspect text.txt --model m --output o.html --force") == 0
    assert calls[-1][1][3:] == (512, 16, (), ())


def test_serve_ends_with_the_code_of_the_server(monkeypatch, calls):
    for code in (0, 3):
        monkeypatch.setattr("corecontext.serve.build.run", calls.keep("serve", code))
        assert main("serve --model m --port 5") == code
    assert calls[0][1][0].port == 5


@pytest.mark.parametrize("option", MOVED_OPTIONS)
def test_an_option_of_a_method_that_has_moved_says_where(option, capsys):
    assert main(f"compare --model m --task perplexity {option} x") == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith(f"error: {option}, {MOVED_OPTIONS[option]}, has moved")
    assert "python -m reproduction compare" in refusal


def test_a_server_of_several_gpus_is_vllm(capsys):
    assert main("serve --model m --tensor-parallel 2") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --tensor-parallel was removed") and "vllm serve" in line


def test_an_option_of_a_setting_is_its_field():
    for name in CCA_SETTINGS:
        kind, option = get_args(options.setting_option(name))
        default = getattr(CCAConfig, field_of(name))
        assert kind == (int if default is None else type(default)) | None
        assert option.help.startswith(escape(setting_help(field_of(name))))
        stated = "yes" if default is True else default
        if default is None:
            stated = "twice the groups on a GPU, fewer from 80K tokens on, none elsewhere"
        assert option.help.endswith(f" Default: the checkpoint's, else {stated}.")


# Outputs


def test_records_go_to_the_file_or_alone_to_standard_output(here, capsys):
    record = make_record("quality.score", 1.0, {})
    for path, out, err in (
        (None, "table\n", ""),
        ("r.jsonl", "table\n", ""),
        ("-", record.to_json() + "\n", "table\n"),
    ):
        options.publish(path, lambda: print("table"), lambda: [record])
        assert capsys.readouterr() == (out, err)
    assert read_records("r.jsonl") == [record]
    assert sorted(path.name for path in here.iterdir()) == ["r.jsonl", "text.txt"]

    def show() -> None:
        raise BrokenPipeError  # as where `head` reads the table

    with pytest.raises(BrokenPipeError):
        options.publish("r.jsonl", show, lambda: [record])
    assert read_records("r.jsonl") == [record, record]


def test_every_file_of_records_is_looked_at(here):
    good = make_record("quality.score", 1.0, {}).to_json()
    Path("good").write_text(good + "\n")
    Path("cut").write_text(good[:20])
    Path("empty").touch()
    Path("mine").write_text('{"name": "Ann"}\n')
    options.check_appended(None, "-", "good", "cut", "empty", "new")
    for paths in (("mine",), ("good", "mine"), ("good", "text.txt"), ("good", "no/new"), (".",)):
        with pytest.raises(UserError):
            options.check_appended(*paths)


def test_counts_have_a_least_value():
    options.check_least(2, length=None, rows=2)
    with pytest.raises(UserError, match="^max-rows must be at least 2, got 1.$"):
        options.check_least(2, length=3, max_rows=1)
    with pytest.raises(UserError, match="^length must be at least 1, got 0.$"):
        options.check_least(1, length=0)


@pytest.mark.parametrize(
    "error, code, line",
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Abort(), 130, "interrupted\n"),
        (typer.Exit(7), 7, ""),
        (typer.Exit(130), 130, "interrupted\n"),
        (UserError("bad\n value"), 2, "error: bad value\n"),
        (OSError(5, "torn", "a"), 2, "error: a cannot be read or written: torn.\n"),
        (OSError(5, "torn"), 2, "error: the output cannot be read or written: torn.\n"),
        (OSError("odd"), 2, "error: the output cannot be read or written: odd.\n"),
        (None, 0, ""),
    ],
    ids=repr,
)
def test_a_command_ends_with_a_code_and_a_line(error, code, line, capsys):
    def command() -> None:
        if error is not None:
            raise error

    app = application({"one": command, "two": command}, lambda: None)
    assert run(app, "program", ["one"]) == code
    assert capsys.readouterr() == ("", line)


def test_closed_streams_are_replaced_and_the_arguments_are_the_process_s(monkeypatch):
    def command(number: int = 1) -> None:
        sys.stdout.write("text")
        sys.stderr.write("text")
        raise typer.Exit(number)

    app = application({"one": command, "two": command}, lambda: None)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(sys, "argv", ["program", "two", "--number", "5"])
    assert entry.run(app, "program") == 5


def test_a_default_is_stated_once(capsys, monkeypatch):
    def option(kind, text: str):
        return Annotated[kind, typer.Option(help=text)]

    def command(said=6, none=None, listed=("a", "b"), flag=False) -> None:
        """Do nothing."""

    command.__annotations__ |= {
        "said": option(int, "In words. Default: some."),
        "none": option(int | None, "Nothing."),
        "listed": option(list[str], "Several."),
        "flag": option(bool, "A flag."),
    }
    monkeypatch.setenv("COLUMNS", "200")
    app = application({"one": command, "two": command}, lambda: None)
    assert run(app, "program", ["one", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert "In words. Default: some. " in text and "Default: 6" not in text
    assert "Several. Default: a, b." in text
    assert "Nothing. Default" not in text and "A flag. Default" not in text
    assert "[default" not in text
