"""Many requests of random lengths, g, s, k, batch sizes and settings through one engine, and
through one server: each answer is that of the request alone, and memory returns to where it was.
`pytest tests/test_soak.py --soak 1000 -n 0` sends more of them."""

import gc
import os
import random
import resource
from pathlib import Path

import pytest
import torch
from families import tiny_model, tokens
from torch.nn.functional import pad

import corecontext
from corecontext import CCAConfig
from corecontext.inference import Engine, Sampling
from corecontext.inference.sampling import Sampler
from corecontext.ops import packed
from corecontext.ops.fetch import low_bits
from corecontext.serve.request import Request
from corecontext.serve.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("default_device")
FETCH = CCAConfig.paper(5, 13, fetch_groups=6)
GROWTH = 48 * 2**20  # bytes that the process may grow by after the first tenth of the requests


def live_tensors() -> int:
    """Tensors that Python still holds."""
    # A few are kept on purpose, their number depends on the tests before.
    for kept in (packed._interior_mask, low_bits.levels, low_bits.rotation):
        kept.cache_clear()
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def resident_bytes() -> int:
    """Of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def prompts(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Rows of these lengths, padded on the left, their mask, and the rows alone."""
    rows, longest = (
        [tokens(1, n, seed=1000 * seed + i) for i, n in enumerate(lengths)],
        max(lengths),
    )
    ids, mask = (
        torch.cat([pad(x, (longest - x.shape[1], 0)) for x in group])
        for group in (rows, [torch.ones_like(row) for row in rows])
    )
    return ids, mask, rows


def one_request(engine: Engine, handle, draw: random.Random, number: int) -> tuple[int, int]:
    """Send a batch, some of them left before their end, and each of its rows alone; return how many
    rows there were, and how many of them a dense pass has checked."""
    handle.configure(
        cache_dtype=draw.choice(("auto", "auto", "int8", "fp8")),
        store=draw.choice(("device", "host")),
        fetch_slots=draw.choice((0, 0, 6, 9)),
        fetch_index=draw.choice(("pairs:2", "mean", "bits:1")),
        prefill=draw.choice(("auto", "fetch", "fetch", "fetch", "full")),
    )
    lengths = [draw.randint(1, 70) for _ in range(draw.randint(1, 4))]
    ids, mask, rows = prompts(lengths, number)
    engine.chunk_size = draw.choice((None, 1, 7, 16))
    count = draw.randint(1, 8)
    stop = draw.randint(1, count) if draw.random() < 0.2 else count
    options = {
        "max_new_tokens": count,
        "group_size": draw.choice((1, 2, 5, 16)),
        "window_size": draw.randint(1, 30),
        "fetch_groups": draw.choice((None, 0, 0, 1, 2, 4, 6)),
        "sampling": draw.choice((Sampling(), Sampling(1.1), Sampling(0.9, top_k=20))),
    }
    seeds = [draw.randint(0, 1000) for _ in lengths]
    with engine.stream(ids, mask, seed=seeds, **options) as stream:
        made = [list(row) for row in zip(*(next(stream) for _ in range(stop)))]
    num_dense = 0
    for row, own, seed in zip(rows, made, seeds):
        alone = Engine(engine.model, static=False, keep=0).generate(row, seed=seed, **options)[0]
        problem = f"request {number}: {lengths}, {options}, {handle.config}"
        assert own == alone[:stop], problem
        dense = dense_answer(handle, row, own, seed, options)
        assert dense in (None, own), f"{problem}, {dense}"
        num_dense += dense is not None
    assert engine.cache_bytes_used == 0 and len(engine._idle) <= engine.keep
    return len(rows), num_dense


def dense_answer(handle, row, own, seed, options) -> list[int] | None:
    """The tokens of an answer that one pass without a cache over it and its prompt chooses; None
    where the cache is coarser than the pass, or the prompt read otherwise than the answer."""
    config = handle.config
    names = ("group_size", "window_size", "fetch_groups")
    sizes = {name: options[name] for name in names if options[name] is not None}
    fetches = sizes.get("fetch_groups", config.fetch_groups) > 0
    as_answer = config.prefill == "fetch" or (config.prefill == "auto" and not fetches)
    if config.cache_dtype != "auto" or not as_answer:
        return None
    whole = torch.cat((row, torch.tensor([own], device=row.device)), 1)[:, :-1]
    handle.configure(**{**sizes, "prefill": "auto"})
    with torch.inference_mode():
        logits = handle.model(whole, use_cache=False).logits[0, row.shape[1] - 1 :]
    handle.configure(**{name: getattr(config, name) for name in (*names, "prefill")})
    sampler = Sampler(row.device, 1)
    sampler.start(options["sampling"], [seed], logits.shape[1])
    kind = options["sampling"].kind
    return [int(sampler.choose(step[None], kind)) for step in logits]


@pytest.mark.timeout(0)
def test_soak(request, record_check):
    count, draw = request.config.getoption("--soak"), random.Random(0)
    model = tiny_model()
    with corecontext.enabled(model, FETCH) as handle:
        engine = Engine(model, static=True, keep=2)
        num_rows = num_dense = 0
        for number in range(count):
            in_batch, checked = one_request(engine, handle, draw, number)
            num_rows += in_batch
            num_dense += checked
            if number == count // 10:  # small caches of the operators (masks) are full by now
                engine.clear()
                tensors, resident = live_tensors(), resident_bytes()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                    allocated = torch.cuda.memory_allocated()
            if number and number % 100 == 0 and "PYTEST_XDIST_WORKER" not in os.environ:
                print(
                    f"{number} of {count} requests, {resident_bytes() / 2**20:.0f} MiB", flush=True
                )
        assert engine.cache_bytes_kept > 0
        engine.clear()
        # Fewer, where what tests before this one left is collected meanwhile.
        assert engine.cache_bytes_kept == 0 and live_tensors() <= tensors
        assert resident_bytes() - resident < GROWTH
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() == allocated
    command = f"python -m pytest tests/test_soak.py -n 0 --soak {count}"
    answers = {"answers": num_rows, "by_dense_passes": num_dense}
    record_check(command, check="soak of the engine", requests=count, **answers)


# A server


class Asked:
    """A request to a server, and the tokens that it got."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self.tokens: list[int] = []
        self.request = request
        self.slot = scheduler.submit(request, self.tokens.append)


def draw_request(draw: random.Random, beginnings: list[list[int]]) -> Request:
    """Draw a request; some begin alike, some choose their g, s and k."""
    ids = tokens(1, draw.randint(1, 40), seed=draw.randint(0, 10**6))[0].tolist()
    g, s = draw.choice(((None, None), (None, None), (3, 20), (16, 9), (1, 7)))
    return Request(
        draw.choice([[], *beginnings]) + ids,
        draw.randint(1, 12),
        sampling=draw.choice((Sampling(), Sampling(1.2), Sampling(0.9, 20, 0.8))),
        seed=draw.randint(0, 1000),
        group_size=g,
        window_size=s,
        fetch_groups=draw.choice((None, 0, 1, 2, 3, 4, 5, 6)),
    )


def check_answer(model: torch.nn.Module, asked: Asked) -> None:
    """Hold an answer to that of an engine with nothing beside it; a request that was cancelled got
    the first tokens of it."""
    request = asked.request
    alone = Engine(model, static=False, keep=0, chunk_size=16).generate(
        torch.tensor([request.prompt]),
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        seed=request.seed,
        eos_token_id=[],
        group_size=request.group_size,
        window_size=request.window_size,
        fetch_groups=request.fetch_groups,
    )[0]
    assert asked.slot.end_reason in ("length", "cancelled"), asked.slot.error
    if asked.slot.end_reason == "cancelled":
        alone = alone[: len(asked.tokens)]
    assert asked.tokens == alone, request


def finish(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        scheduler.run_turn()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_soak_of_a_server(store, fixed, request, record_check):
    """A quarter of the requests for each store and kind of rows."""
    total = request.config.getoption("--soak")
    count = max(4, total // 4)
    draw = random.Random(f"{store} {fixed}")
    model = tiny_model()
    beginnings = [tokens(1, 32, seed=i)[0].tolist() for i in range(3)]
    checked = 0
    with corecontext.enabled(model, FETCH.replace(store=store, fetch_slots=7 * (not fixed))):
        sizes = {"max_rows": 6, "rows_per_pool": 3, "chunk_size": 16, "host_bytes": 2**22}
        scheduler = Scheduler(model, cache_bytes=2**22, capture=False, client_sizes=64, **sizes)
        scheduler.batch.fixed = fixed  # as on a GPU, where idle rows run along
        running: list[Asked] = []
        for number in range(count):
            running.append(Asked(scheduler, draw_request(draw, beginnings)))
            for _ in range(draw.randint(0, 6)):
                scheduler.run_turn()
            while len(scheduler.waiting) > 8:
                scheduler.run_turn()
            if draw.random() < 0.1:
                scheduler.cancel(draw.choice(running).slot)
            if number in (count // 10, count - 1):
                finish(scheduler)
                scheduler.clear()
            for asked in [x for x in running if x.slot.end_reason]:
                check_answer(model, asked)
                running.remove(asked)
                checked += 1
            if number == count // 10:
                left = live_tensors(), resident_bytes()
        assert checked == count and not running
        assert scheduler.memory.used == scheduler.memory.allocated == 0
        assert live_tensors() <= left[0]
        assert resident_bytes() - left[1] < GROWTH
    command = f"python -m pytest tests/test_soak.py -n 0 --soak {total}"
    record_check(command, check="soak of a server", requests=count, store=store, fixed=fixed)
