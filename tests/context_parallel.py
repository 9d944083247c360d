"""The processes of test_context_parallel.py: python context_parallel.py COUNT PORT TRAINING.

TRAINING is the settings of a run as JSON, for training and its benchmark; empty for the operator
and a model.
"""

import copy
import gc
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from families import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.models.llama import modeling_llama  # noqa: F401

import corecontext
from benchmarks.traffic import context_parallel_traffic, ring_traffic
from benchmarks.training import run_training_bench
from benchmarks.training_settings import TrainingBench
from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.distributed.context_parallel import Shard, context_parallel_attention
from corecontext.distributed.halo import Shape
from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Wire
from corecontext.ops.spec import Inputs, Spec
from corecontext.train.arguments import checkpointing_name

D = 8


def inputs(
    length: int,
    heads: int = 4,
    kv_heads: int = 2,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
) -> list:
    """q, k, v and an upstream gradient of a whole sequence, the same on every process."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(batch, h, length, D, generator=generator, dtype=torch.float64).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def sharded_attention(q, k, v, shard, **settings):
    """`context_parallel_attention` with the keywords of `cca_attention`."""
    softcap, rotary = settings.pop("softcap", None), settings.pop("rotary", None)
    group_size = settings.pop("group_size", 16)
    if isinstance(group_size, tuple):
        config = CCAConfig.paper(head_group_sizes=group_size, **settings)
    else:
        config = CCAConfig.paper(group_size, **settings)
    spec = Spec.of(config, rotary, q.shape[-1] ** -0.5, softcap)
    inputs = Inputs(q, k, v)
    return context_parallel_attention(inputs, shard, spec, config.backend)


class Case(NamedTuple):
    """One call of the operator on the processes of a layout."""

    layout: Layout
    tensors: list
    """As `inputs` returns them."""
    settings: dict
    documents: tuple = ()
    """Boundaries of packed documents."""
    rtol: float = 1e-9


def whole(case: Case) -> dict[str, torch.Tensor]:
    """Output and gradients of the whole sequence on one process, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in zip("qkv", case.tensors)}
    settings = dict(case.settings)
    if case.documents:
        settings["cu_seqlens"] = torch.tensor(case.documents)
    out = cca_attention(leaves["q"], leaves["k"], leaves["v"], **settings)
    out.backward(case.tensors[3])
    return {"out": out.detach(), **{name: x.grad for name, x in leaves.items()}}


def check(
    group: dist.ProcessGroup, case: Case, expected: dict[str, torch.Tensor]
) -> tuple[int, int]:
    """Output and gradients of this process's part equal those of the whole; returns the bytes
    received, forward and backward."""
    layout = case.layout
    settings = dict(case.settings)
    wire = Wire(group)
    mine = [layout.take(x, 2).clone().requires_grad_() for x in case.tensors[:3]]
    out = sharded_attention(*mine, Shard(wire, layout, case.documents), **settings)
    forward = wire.received_bytes
    out.backward(layout.take(case.tensors[3], 2))
    backward = wire.received_bytes - forward
    results = {"out": out, **{name: x.grad for name, x in zip("qkv", mine)}}
    wanted = {name: layout.take(expected[name], 2) for name in results}
    for name, result in results.items():
        torch.testing.assert_close(
            result,
            wanted[name],
            rtol=case.rtol,
            atol=case.rtol,
            msg=lambda text, name=name: f"{name} of {layout} under {settings}: {text}",
        )
    return forward, backward


BASE = {"group_size": 4, "window_size": 9, "rotary": Rotary.from_theta(100.0, D)}


def varied_settings() -> list[dict]:
    """Settings that balanced chunks of one sequence are tried with."""
    rotary = BASE["rotary"]
    return [
        BASE,
        {**BASE, "softcap": 3.0},
        {**BASE, "core_position": "token", "rotary": None},
        {**BASE, "group_size": 5, "window_size": 30},
        {"num_groups": 7, "window_size": 8, "rotary": rotary},
        {**BASE, "group_size": 1},
        {**BASE, "group_size": (4, 1)},
        {**BASE, "group_size": (1, 5)},
        {**BASE, "sink_size": 16, "softcap": 3.0, "core_mass": True},
        {**BASE, "sink_size": 9, "core_mass": True},
        {**BASE, "core_mass": True},
        {"num_groups": 7, "window_size": 8, "rotary": rotary, "sink_size": 50},
        {**BASE, "fetch_groups": 3, "fetch_index": "mean"},
        {**BASE, "fetch_groups": 5, "sink_size": 6, "core_mass": True, "softcap": 3.0},
        {**BASE, "fetch_groups": 2, "fetch_index": "mean"},
        {**BASE, "fetch_groups": 99, "group_size": (1, 5), "core_mass": True},
    ]


def cases(size: int, here: int) -> Iterator[Case]:
    """Yield the calls of process `here` of `size`."""
    balanced = Layout.balanced(157, size, here)
    for settings in varied_settings():
        yield Case(balanced, inputs(157), settings)
    yield Case(balanced, inputs(157, dtype=torch.float32), BASE, rtol=2e-5)
    # Chunks shorter than a group and than the halo, an empty one, and a layout in no order at all.
    for lengths in ((40, 3, 1, 59), (0, 70, 2, 5)):
        layout = Layout(lengths, tuple(i % size for i in range(4)), here)
        for settings in (
            {**BASE, "core_mass": True},
            {**BASE, "sink_size": 7, "core_mass": True},
            {**BASE, "fetch_groups": 3, "sink_size": 7, "core_mass": True},
        ):
            yield Case(layout, inputs(sum(lengths)), settings)
    for sink_size in (0, 16, 200):  # none, those of two processes, all tokens
        layout = Layout.contiguous((13,) * size, here)
        yield Case(layout, inputs(13 * size, heads=2), {**BASE, "sink_size": sink_size})
    for documents in ((0, 31, 33, 120), (0, 5, 100, 110, 120), (0, 60, 120)):
        for settings in (
            {**BASE, "sink_size": 4},
            BASE,
            {**BASE, "fetch_groups": 2, "core_mass": True},
        ):
            yield Case(Layout.balanced(120, size, here), inputs(120, batch=1), settings, documents)
    for documents in ((), (0, 30, 40)):  # all of it on one process
        yield Case(Layout((40,), (1,), here), inputs(40, batch=1), BASE, documents)


def operator(rank: int, pair: dist.ProcessGroup) -> None:
    """The operator on four and on two processes equals one."""
    world = dist.group.WORLD
    calls_of_four = list(cases(world.size(), world.rank()))
    # Two pairs share the calls.
    calls_of_two = list(cases(pair.size(), pair.rank()))[rank // 2 :: 2]
    for group, calls in ((world, calls_of_four), (pair, calls_of_two)):
        # The processes of a group share the work on whole sequences.
        size = group.size()
        shares = [None] * size
        share = [whole(case) for case in calls[group.rank() :: size]]
        dist.all_gather_object(shares, share, group=group)
        for number, case in enumerate(calls):
            check(group, case, shares[number % size][number // size])


def traffic(group: dist.ProcessGroup) -> None:
    """The operator receives as many bytes as the formulas say, fewer than ring attention."""
    size = group.size()
    length = 64 * size
    layout = Layout.contiguous((64,) * size, group.rank())
    shape = Shape(2, 4, 2, D)
    fetching = {"fetch_groups": 2, "fetch_index": "mean", "sink_size": 7}
    for more in (fetching, {"sink_size": 7, "core_mass": True}, {}):
        case = Case(layout, inputs(length), {**BASE, **more})
        moved = check(group, case, whole(case))
        spec = Spec(4, 9, 1.0, **more)
        assert moved == context_parallel_traffic(layout, size, spec, shape, item_bytes=8)
    ring = ring_traffic(length, size, batch_size=2, num_kv_heads=2, head_dim=D, item_bytes=8)
    assert moved[0] < ring.forward_bytes and sum(moved) < ring.total_bytes


def run(
    model: torch.nn.Module,
    ids: torch.Tensor,
    positions: torch.Tensor,
    labels: torch.Tensor,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the loss's share of these tokens after its backward."""
    logits = model(ids, position_ids=positions, use_cache=False).logits
    loss = (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        / tokens
    )
    loss.backward()
    return logits.detach(), loss.detach()


def model(world: int, rank: int, pair: dist.ProcessGroup) -> None:
    """A Hugging Face model: two sequences, each on a pair of processes, weights sharded over all by
    FSDP2."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "context"))
    ids = torch.randint(2, 96, (world // 2, 90), generator=torch.Generator().manual_seed(1))
    labels = torch.cat((ids[:, 1:], torch.full((len(ids), 1), -100)), 1)
    plain = CCAConfig.paper(group_size=4, window_size=9)
    for checkpointing, documents in itertools.product((False, True), ((), (0, 20, 90))):
        positions = torch.arange(90)[None].repeat(len(ids), 1)
        if documents:
            positions[:, 20:] -= 20
        whole = tiny_model()
        parallel = copy.deepcopy(whole)
        config = (
            plain.replace(
                layer_group_sizes=(4, (1, 8)),
                sink_size=5,
                core_mass=True,
            )
            if checkpointing
            else plain.replace(fetch_groups=2, core_mass=bool(documents))
        )
        corecontext.enable(whole, config)
        expected, loss = run(whole, ids, positions, labels, ids.numel())
        handle = corecontext.enable(parallel, config)
        if checkpointing:
            recompute = getattr(parallel.train(), f"{checkpointing_name()}_enable")
            recompute({"use_reentrant": False})
        flat = init_device_mesh("cpu", (world,))
        for layer in parallel.model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(parallel, mesh=flat)
        wire = Wire(mesh["context"].get_group())
        layout = Layout.balanced(90, 2, wire.rank)
        handle.shard = Shard(wire, layout, documents)
        row = slice(mesh["data"].get_local_rank(), mesh["data"].get_local_rank() + 1)
        parts = [layout.take(x[row]) for x in (ids, positions, labels)]
        logits, share = run(parallel, *parts, ids.numel())
        torch.testing.assert_close(logits, layout.take(expected[row]), rtol=1e-4, atol=1e-5)
        dist.all_reduce(share)
        torch.testing.assert_close(share, loss, rtol=1e-6, atol=1e-6)
        for (name, a), b in zip(parallel.named_parameters(), whole.parameters()):
            assert isinstance(a.grad, DTensor), name
            # FSDP2 takes the mean over the processes.
            torch.testing.assert_close(
                a.grad.full_tensor() * world, b.grad, rtol=1e-4, atol=1e-6, msg=name
            )
        try:
            parallel(parts[0], use_cache=False)
        except ValueError as error:
            assert "position_ids must be given" in str(error)
        else:
            raise AssertionError("positions that nobody gave were accepted")


def train(settings: str) -> None:
    """A whole run by Trainer, two rows a step, each on two processes; the last step twice, after it
    was lost."""
    from corecontext.train import TrainConfig, run

    config = TrainConfig.from_dict(json.loads(settings))
    run.train(config)
    dist.barrier()
    if dist.get_rank() == 0:
        for name in ("model", f"checkpoint-{config.steps}"):
            shutil.rmtree(Path(config.output, name))
    dist.barrier()
    assert run.train(config).resumed_from == config.steps - 1


def bench(world: int, rank: int) -> None:
    """The benchmark of a step on parts of a sequence: what it says came in is what the formulas
    say."""
    records = run_training_bench(
        TrainingBench((64,), "tiny", context_parallel=True, group_size=4, window_size=9, repeats=1)
    )
    assert [r.name for r in records] == (
        []
        if rank
        else [f"training.{name}" for name in ("tokens_per_s", "peak_bytes", "received_bytes")]
    )
    if rank == 0:
        params = records[-1].params
        assert (params["gpus"], params["length"], params["fsdp"]) == (world, 64 * world, True)
        one = context_parallel_traffic(
            Layout.balanced(64 * world, world, 0),
            world,
            Spec(4, 9, 1.0),
            Shape(batch_size=1, num_heads=4, num_kv_heads=2, head_dim=32),
            item_bytes=4,
        )
        # Two layers, forward twice because of checkpointing.
        assert (
            records[-1].value
            == 2 * (2 * one.forward_bytes + one.backward_bytes)
            < params["ring_bytes"]
        )


def process(rank: int, world: int, port: str, settings: str) -> None:
    """Everything that one process does."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    dist.init_process_group("gloo")
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    if settings:
        bench(world, rank)
        train(settings)
    else:
        operator(rank, pairs[rank // 2])
        for group in (dist.group.WORLD, pairs[rank // 2]):
            traffic(group)
        model(world, rank, pairs[rank // 2])
    dist.destroy_process_group()


def main(world: int, port: str, settings: str) -> int:
    """Start the processes as copies of this one, whose imports take longer than all the rest; the
    worst exit code."""
    torch.set_num_threads(1)
    if settings:
        import corecontext.train.run
        import corecontext.train.trainer  # noqa: F401
    # Else each copy's garbage collections would walk through all modules and so copy their memory.
    gc.freeze()
    started = [
        mp.get_context("fork").Process(target=process, args=(rank, world, port, settings))
        for rank in range(world)
    ]
    for one in started:
        one.start()
    while any(one.is_alive() for one in started) and not any(one.exitcode for one in started):
        time.sleep(0.05)
    for one in started:  # where one has failed the others would wait for it
        if any(other.exitcode for other in started):
            one.kill()
        one.join()
    return max(abs(one.exitcode or 0) for one in started)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
