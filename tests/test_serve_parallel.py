"""A server whose model is split over processes: the answers of one process, whatever comes at once;
when one goes."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import httpx
import pytest
import torch
from served import KEY, ROOT, Served
from tiny_model import save_tiny_model

from corecontext import CCAConfig
from corecontext.cli import main
from corecontext.files import UserError
from corecontext.serve.build import make_app
from corecontext.serve.rows import RowShape
from corecontext.serve.settings import SERVED, Serving

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed"),
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes in /proc"),
    pytest.mark.timeout(300),
]
SETTINGS = {
    "name": "tiny",
    "cache_mib": 4,
    "chunk_size": 32,
    "rows_per_pool": 3,
    "max_length": 512,
    "window_size": 16,
    "group_size": 4,
    "fetch_groups": 4,
    "policy": "fixed",
    "dtype": "float32",
}
ASKED = [
    {
        "prompt": "abcdefghij" * (3 + 5 * (i % 7)) + "xyz" * i,
        "max_tokens": 5 + 8 * (i % 5),
        "temperature": 0,
        "ignore_eos": True,
        **({"group_size": 2, "window_size": 20} if i % 4 == 1 else {}),
        **({"fetch_groups": i // 4} if i % 4 == 3 else {}),
        **({"temperature": 0.8, "seed": i} if i % 5 == 2 else {}),
        **({"stop": ["a", "e"]} if i % 3 == 0 else {}),
    }
    for i in range(16)
]
USERS = 6


def command_line(settings):
    """The options of `corecontext serve` for these settings."""
    options = ((f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items())
    return [*itertools.chain(*options), "--tensor-parallel", "2"]


def answers_of_one_process(model, settings, asked):
    """The text that a server of one process, here without a network, answers to each request."""
    sizes = {name: settings[name] for name in SERVED if name in settings}
    options = {name: settings[name] for name in settings if name not in sizes}
    app = make_app(Serving(model=model, device="cpu", **options, settings=sizes))

    async def ask_each():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = [
                await client.post("/v1/completions", json={"model": "tiny", **body})
                for body in asked
            ]
        return [answer.json()["choices"][0]["text"] for answer in answers]

    app.state.worker.start()
    try:
        return asyncio.run(ask_each())
    finally:
        app.state.worker.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("parallel") / "m", max_length=512)


def ask(client, body):
    answer = client.post("/v1/completions", json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def open_client(server):
    return httpx.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120
    )


def others_of(server):
    """Processes that the server has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (folder / "status").read_text(), (folder / "cmdline").read_text()
        except OSError:  # it has ended meanwhile
            continue
        if f"PPid:\t{server.process.pid}\n" in status and "serve.build" in command:
            found.append(int(folder.name))
    return found


def listening_addresses(process):
    """Addresses of a process's listening sockets, in the kernel's notation."""
    links = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                addresses.add(fields[1].split(":")[0])
    return addresses


@pytest.fixture(scope="module")
def raw_head(model, tmp_path_factory):
    """The same model of which one KV head keeps every token."""
    folder = tmp_path_factory.mktemp("parallel") / "raw"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["cca"] = CCAConfig.paper(8, 16, layer_group_sizes=(4, (8, 1))).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def settings_of(kind):
    """The settings of a server; a model with sizes by head has its own group sizes."""
    if kind != "model":
        return {name: value for name, value in SETTINGS.items() if name != "group_size"}
    return SETTINGS


@pytest.fixture(scope="module")
def raw_head_server(raw_head, tmp_path_factory):
    """A server of two processes for the tests that leave it as it was, and for the last."""
    log = tmp_path_factory.mktemp("parallel") / "log"
    server = Served(log, "--model", raw_head, *command_line(settings_of("raw_head")))
    yield server
    server.kill()


def check_answers(server, kind, model, gpus):
    """Requests at once, some of which leave, some that are ended by their text, are answered as
    by one process; with little memory, so that pools come and go."""
    settings = settings_of(kind)
    asked = ASKED
    if kind != "model":
        asked = [
            {key: value for key, value in body.items() if key != "group_size"} for body in ASKED
        ]
    if gpus:
        one = Served(
            server.log.with_name("one"), "--model", model, *command_line(settings)[:-2], gpus=True
        )
        with open_client(one) as client:
            alone = [ask(client, body) for body in asked]
        one.kill()
    else:
        alone = answers_of_one_process(model, settings, asked)
    found = [None] * len(asked)

    def user(numbers):
        with open_client(server) as client:
            for i in numbers:
                found[i] = ask(client, asked[i])

    def leaver():
        body = {"model": "tiny", "prompt": "abc" * 30, "max_tokens": 300, "stream": True}
        with open_client(server) as client:
            for _ in range(4):
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    next(answer.iter_lines())

    users = [
        threading.Thread(target=user, args=(range(first, len(asked), USERS),))
        for first in range(USERS)
    ]
    users.append(threading.Thread(target=leaver))
    for thread in users:
        thread.start()
    for thread in users:
        thread.join(120)
    assert found == alone
    assert server.gauge("corecontext_running") == 0


ON_GPUS = pytest.param(
    True,
    marks=[
        pytest.mark.multi_gpu,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ],
    id="gpus",
)


# A model with a raw head answers below, and torchrun's server has a plain one, which is ended
# there.
@pytest.mark.parametrize(
    "kind, gpus",
    [
        pytest.param("model", False, marks=pytest.mark.slow, id="model-cpu"),
        *(
            pytest.param(kind, True, marks=ON_GPUS.marks, id=f"{kind}-gpus")
            for kind in ("model", "raw_head")
        ),
    ],
)
def test_two_processes_answer_as_one_does(kind, gpus, tmp_path, request):
    """The first process ends well and so does the other."""
    model = request.getfixturevalue(kind)
    options = command_line(settings_of(kind))
    server = Served(tmp_path / "two", "--model", model, *options, gpus=gpus)
    try:
        followers = others_of(server)
        assert len(followers) == 1
        check_answers(server, kind, model, gpus)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert not os.path.exists(f"/proc/{followers[0]}")
    finally:
        server.kill()


def test_heads_that_differ_are_each_answered_by_their_process(raw_head, raw_head_server):
    check_answers(raw_head_server, "raw_head", raw_head, gpus=False)


def test_every_process_listens_on_the_loopback_address_alone(raw_head_server):
    """Whoever reaches the store of the ranks can stop the server: it asks for no key."""
    processes = [raw_head_server.process.pid, *others_of(raw_head_server)]
    assert len(processes) == 2
    addresses = set().union(*map(listening_addresses, processes))
    assert addresses == {"0100007F"}  # 127.0.0.1


def test_a_server_without_one_of_its_processes_ends_with_an_error(raw_head_server):
    """The last test on this server: it ends it."""
    body = {
        "model": "tiny",
        "prompt": "abc",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        open_client(raw_head_server) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        os.kill(others_of(raw_head_server)[0], signal.SIGKILL)
        assert any('"error"' in line for line in lines)
    assert raw_head_server.process.wait(60) == 1


def first_rank_of(run):
    """The process of rank 0 that torchrun has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if f"PPid:\t{run.pid}\n" in status and b"RANK=0" in environment:
            return int(folder.name)
    raise AssertionError("torchrun has no process of rank 0")


@pytest.mark.slow
def test_torchrun_starts_them_too(model, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "CORECONTEXT_API_KEY": KEY,
        "OMP_NUM_THREADS": "1",
    }
    log = tmp_path / "log"
    with log.open("w") as out:
        run = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "corecontext",
                "serve",
                "--model",
                model,
                "--port",
                "0",
                *command_line(SETTINGS),
            ],
            stdout=out,
            stderr=out,
            env=environment,
        )
    server = Served.__new__(Served)
    server.log, server.process = log, run
    try:
        server.url = server.wait()
        with open_client(server) as client:
            asked = ASKED[1:3]
            found = [ask(client, body) for body in asked]
        assert found == answers_of_one_process(model, SETTINGS, asked)
        # The first process ends well, and so does the other: torchrun tells.
        os.kill(first_rank_of(run), signal.SIGTERM)
        assert run.wait(60) == 0
    finally:
        run.kill()


def test_a_row_is_as_large_as_in_the_process_that_has_most():
    """One with the head that keeps every token, whichever it is: all decide alike, and find
    room."""
    hf_config = types.SimpleNamespace(
        num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2, head_dim=2
    )
    hf_config.get_text_config = lambda decoder: hf_config
    config = CCAConfig.paper(8, 16, layer_group_sizes=((8, 8, 8, 1), (8, 1, 8, 1)))
    whole, half, quarter = (
        RowShape.of(hf_config, torch.float16, processes) for processes in (1, 2, 4)
    )

    def entries(size, length=100, before=0):
        return 16 + size - 1 + length // size - before // size

    for sizes, shape in (
        ((8, 8, 8, 1, 8, 1, 8, 1), whole),
        ((8, 1, 8, 1), half),
        ((1, 1), quarter),
    ):
        assert shape.row_bytes(config, 100) == sum(map(entries, sizes)) * 2 * 2 * 2
        assert (
            shape.row_bytes(config, 100, 32)
            == sum(entries(size, 100, 32) for size in sizes) * 2 * 2 * 2
        )


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 0},
        {"tensor_parallel": 2, "device": "cpu"},
    ],
)
def test_what_cannot_be_split_is_refused(options):
    with pytest.raises(UserError, match="^tensor-parallel must be at least 1, and 1 with"):
        Serving(**options)


def test_a_number_that_does_not_divide_the_heads_is_one_line(model, capsys):
    assert main(["serve", "--model", model, "--port", "0", "--tensor-parallel", "3"]) == 2
    message = capsys.readouterr().err
    assert "divides its 2 KV heads, got 3" in message and len(message.splitlines()) == 1
