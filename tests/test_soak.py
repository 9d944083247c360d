"""Many requests of random lengths, g, s, batch sizes and settings through one engine: each answer
is that of the rows alone, and memory returns to where it was. `pytest tests/test_soak.py --soak
1000 -n 0` sends more of them."""

from __future__ import annotations

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
from corecontext.ops import packed

pytestmark = pytest.mark.usefixtures("default_device")
GROWTH = 48 * 2**20  # bytes that the process may grow by after the first tenth of the requests


def live_tensors() -> int:
    """Tensors that Python still holds."""
    # A few masks are kept on purpose, their number depends on the tests before.
    packed._interior_bias.cache_clear()
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


def one_request(engine: Engine, handle, draw: random.Random, number: int) -> None:
    """Send a batch, some of them left before their end, and each of its rows alone."""
    handle.configure(
        cache_dtype=draw.choice(("auto", "auto", "int8", "fp8")),
        core_heads=draw.choice(("kv", "query")),
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
        "sampling": draw.choice((Sampling(), Sampling(1.1), Sampling(0.9, top_k=20))),
    }
    seeds = [draw.randint(0, 1000) for _ in lengths]
    with engine.stream(ids, mask, seed=seeds, **options) as stream:
        made = [list(row) for row in zip(*(next(stream) for _ in range(stop)))]
    for row, own, seed in zip(rows, made, seeds):
        alone = Engine(engine.model, static=False, keep=0).generate(row, seed=seed, **options)[0]
        assert own == alone[:stop], f"request {number}: {lengths}, {options}, {handle.config}"
    assert engine.cache_bytes_used == 0 and len(engine._idle) <= engine.keep


@pytest.mark.timeout(0)
def test_soak(request):
    count, draw = request.config.getoption("--soak"), random.Random(0)
    model = tiny_model()
    with corecontext.enabled(model, CCAConfig.paper(5, 13)) as handle:
        engine = Engine(model, static=True, keep=2)
        for number in range(count):
            one_request(engine, handle, draw, number)
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
