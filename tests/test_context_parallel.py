"""One sequence on several processes: chunks, and the operator and a whole model on them equal one
process."""

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import context_parallel
import pytest
import torch
from families import tiny_model
from safetensors.torch import load_file
from tiny_model import save_tiny_model

import corecontext
from corecontext import CCAConfig
from corecontext.distributed.layout import Layout
from corecontext.ops.spec import Inputs, Spec

needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="PyTorch without distributed"
)
PROGRAM = Path(__file__).with_name("context_parallel.py")


def free_port() -> str:
    """Return a port of this machine that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextlib.contextmanager
def running(world: int, settings: str) -> Iterator[None]:
    """Run the program with `world` processes beside the block; a failure shows their output."""
    path = f"{PROGRAM.parent.parent}{os.pathsep}{PROGRAM.parent}"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": path,
    }
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), str(world), free_port(), settings],
        text=True,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as program:
        try:
            yield
            output, _ = program.communicate(timeout=250)
        finally:
            program.kill()
    assert program.returncode == 0, output


@needs_distributed
def test_two_and_four_processes_equal_one(monkeypatch):
    """The operator and its traffic, a model sharded by FSDP2, and a prefill."""
    if torch.cuda.is_available():  # what CUDA has begun cannot be copied
        with running(4, ""):
            return
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def start():
        sys.exit(context_parallel.main(4, free_port(), ""))

    # A copy of this process has imported what a new one would import for seconds.
    copied = multiprocessing.get_context("fork").Process(target=start)
    copied.start()
    try:
        copied.join(250)
        assert copied.exitcode == 0
    finally:
        copied.kill()


@needs_distributed
@pytest.mark.skipif(not find_spec("accelerate"), reason="needs accelerate")
@pytest.mark.skipif(not find_spec("datasets"), reason="needs datasets")
@pytest.mark.slow
def test_training_on_four_processes_equals_one(tmp_path, monkeypatch):
    """A run of Trainer on rows of several documents; and the benchmark's step."""
    from corecontext.train import TrainConfig

    text = (Path(corecontext.__file__).parent / "assets/document.txt").read_text(encoding="utf-8")
    for i in range(4):
        (tmp_path / f"text{i}.txt").write_text(text[i * 700 : i * 700 + 300 * i + 100])
    one = TrainConfig(
        model=save_tiny_model(tmp_path / "model"),
        output=str(tmp_path / "one"),
        context_length=120,
        data=tuple(str(path) for path in sorted(tmp_path.glob("*.txt"))),
        group_size=4,
        window_size=9,
        steps=3,
        learning_rate=1e-3,
        accumulation=2,
        cache_dir=str(tmp_path / "cache"),
        eval_data=(str(tmp_path / "text3.txt"),),
        precision="float32",
    )
    four = one.replace(
        output=str(tmp_path / "four"), accumulation=1, context_parallel=2, save_every=2
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where the four are
    with running(4, json.dumps(four.to_dict())):
        from corecontext.train import run  # takes as long as the four take to start

        result = run.train(one)
    states = [
        json.loads((tmp_path / name / "checkpoint-3/trainer_state.json").read_text())
        for name in ("four", "one")
    ]
    losses, expected = (
        [entry["loss"] for entry in state["log_history"] if "loss" in entry] for state in states
    )
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    weights, wanted = (
        load_file(tmp_path / name / "model/model.safetensors") for name in ("four", "one")
    )
    for name in wanted:
        torch.testing.assert_close(weights[name], wanted[name], rtol=1e-4, atol=1e-5, msg=name)
    card = (tmp_path / "four/model/README.md").read_text()
    # Each process has a part of each row.
    assert f"evaluation: loss {result.metrics['eval_loss']:.4f}" in card
    assert "3 steps, 720 tokens" in card


@pytest.mark.parametrize("processes, length", [(1, 5), (2, 157), (3, 4), (4, 1024)])
def test_balanced_chunks_cover_the_sequence_once_and_share_the_work(processes, length):
    layouts = [Layout.balanced(length, processes, rank) for rank in range(processes)]
    seen = torch.cat([layout.positions() for layout in layouts], 1)[0]
    assert sorted(seen.tolist()) == list(range(length))
    counts = [layout.positions().numel() for layout in layouts]
    assert max(counts) - min(counts) <= 2
    if length == 1024:  # what a query sees of the far past grows with its position
        work = [int(layout.positions().sum()) for layout in layouts]
        assert max(work) - min(work) <= length


def test_layouts_refuse_what_is_none():
    with pytest.raises(ValueError, match="lengths must be at least 0, one for each owner"):
        Layout((3, -1), (0, 1), 0)
    with pytest.raises(ValueError, match="lengths must be at least 0, one for each owner"):
        Layout((3, 1), (0,), 0)


def test_the_nth_announcement_is_the_nth_of_every_process(monkeypatch):
    """Of one topic; and a wait has no time limit to speak of."""
    from corecontext.distributed.announcement import Announcement

    texts, counts, waits = {}, {}, []

    def add(key, value):
        counts[key] = counts.get(key, 0) + value
        return counts[key]

    store = SimpleNamespace(
        add=add,
        set=lambda key, text: texts.update({key: text.encode()}),
        wait=lambda keys, limit: waits.append((keys, limit.days)),
        get=texts.__getitem__,
    )
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    first, second = (Announcement("model", 0) for _ in range(2))
    other_topic = Announcement("rows", 1)
    waiting = [Announcement("model", 1) for _ in range(2)]
    second.publish("path é")
    other_topic.publish("others")
    first.publish()
    assert [one.wait() for one in waiting] == ["", "path é"] and second.wait() == "path é"
    assert all(days >= 30 for _, days in waits) and [keys for keys, _ in waits[:1]] == [[first.key]]


def test_chunks_get_what_they_see_once_and_make_each_group_once():
    """Every token that a chunk sees before its own comes in one message from the chunk that holds
    it; every group is made where its last token is."""
    g, s = 4, 9
    for lengths in ((40, 3, 1, 59), (0, 70, 2, 0, 5), (13,), (5, 0, 30)):
        layout = Layout(lengths, tuple(i % 2 for i in range(len(lengths))), 1)
        length = sum(lengths)
        assert layout.seq_len == length and layout.starts[0] == 0
        holder = [i for i, n in enumerate(lengths) for _ in range(n)]
        made = [range(*layout.groups(g).span(i)) for i in range(len(lengths))]
        assert [i for groups in made for i in groups] == list(range(length // g))
        assert all(holder[j * g + g - 1] == i for i, groups in enumerate(made) for j in groups)
        messages = layout.messages(g, s)
        for target, (start, end) in enumerate(map(layout.span, range(len(lengths)))):
            seen = [max(0, t + 1 - s) // g * g for t in range(start, end)]
            received = [m for m in messages if m.target == target]
            tokens = [(m.source, t) for m in received for t in range(m.low, m.high)]
            wanted = range(min(seen), start) if seen else ()
            assert tokens == [(holder[t], t) for t in wanted]
            assert all(m.low < m.high for m in received)
        whole = torch.arange(length)
        mine = [t for t in range(length) if holder[t] % 2 == 1]
        assert layout.take(whole, 0).tolist() == layout.positions()[0].tolist() == mine
        cut = layout.clip(3, length - 2)
        assert cut.seq_len == max(0, length - 5) and cut.owners == layout.owners
        assert [t + 3 for t in cut.positions()[0].tolist()] == [
            t for t in mine if 3 <= t < length - 2
        ]
        held = {holder[t] % 2 for t in range(length)}
        assert layout.is_shared == (len(held) == 2)


def test_fetch_that_cannot_be_spread_is_refused_with_the_way_out():
    from corecontext.distributed.context_parallel import Shard, context_parallel_attention

    wire = SimpleNamespace(rank=0, size=2)
    x = torch.zeros(1, 2, 20, 8)
    spec = Spec(4, 9, 1.0, fetch_groups=3, fetch_share=16)
    shard = Shard(wire, Layout.balanced(40, 2, 0))
    with pytest.raises(NotImplementedError, match="fetch_share must be 1 .* got 16"):
        context_parallel_attention(Inputs(x, x, x), shard, spec)


def test_shards_refuse_what_does_not_fit():
    from corecontext.distributed.context_parallel import Shard, context_parallel_attention

    wire = SimpleNamespace(rank=0, size=2)  # one end of two, that never sends
    layout = Layout.balanced(40, 2, 0)
    with pytest.raises(ValueError, match=r"of process 0 of 2, got rank 0 and owners \(0, 2\)"):
        Shard(wire, Layout((20, 20), (0, 2), 0))
    with pytest.raises(ValueError, match="layout must be of process 0 of 2, got rank 1"):
        Shard(wire, Layout.balanced(40, 2, 1))
    for documents in ((0, 30), (5, 40), (0, 20, 20, 40)):
        with pytest.raises(ValueError, match="documents must rise from 0 to the length 40"):
            Shard(wire, layout, documents)
    shard, spec = Shard(wire, layout), Spec(4, 9, 1.0)
    x = torch.zeros(1, 2, 19, 8)
    with pytest.raises(
        ValueError, match="must hold the 20 tokens that the layout gives process 0, got 19"
    ):
        context_parallel_attention(Inputs(x, x, x), shard, spec)
    x = torch.zeros(1, 2, 20, 8)
    with pytest.raises(ValueError, match="rotary must be given for core_position='middle'"):
        Spec.of(CCAConfig.paper(4, 9), None, 1.0)
    with pytest.raises(
        NotImplementedError, match="backend 'reference' cannot run context parallelism"
    ):
        context_parallel_attention(Inputs(x, x, x), shard, spec, "reference")
    hybrid = corecontext.enable(tiny_model("qwen2-hybrid"), CCAConfig.paper(4, 9))
    with pytest.raises(
        NotImplementedError, match="sliding-window layers cannot run on parts of a sequence"
    ):
        hybrid.shard = shard


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_equal_one():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(torch.cuda.device_count())]
    command += [str(PROGRAM.with_name("context_parallel_gpus.py"))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            (str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", ""))
        ),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
