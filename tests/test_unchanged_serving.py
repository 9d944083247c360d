"""A call of an engine or a turn of a server that fails, refused or out of memory, leaves all other
requests, the model and the memory as they were.

`pytest tests/test_unchanged_serving.py --fuzz 1000 --first 5000 -n 0` draws more lives.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import tiny_model, tokens
from test_changing_rotation import model_of
from test_scheduler import alone, ask, assert_empty
from test_unchanged import KINDS, FailingAllocation

import corecontext
from corecontext import CCAConfig
from corecontext.inference import Engine
from corecontext.serve.scheduler import Scheduler

MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_model,
    "hybrid": lambda: tiny_model("qwen2-hybrid"),
    "dynamic": lambda: model_of("dynamic"),
}


def draw_config(draw: random.Random, kind: str) -> CCAConfig:
    """Draw settings that a kind of model takes."""
    settings = draw.choice(KINDS) if kind == "llama" else {}
    position = "token" if kind == "dynamic" else "middle"
    return CCAConfig.paper(4, 20, backend="packed", core_position=position, **settings)


def draw_place(draw: random.Random) -> int:
    """Draw how many allocations pass before one fails; a step of a tiny model has about 200."""
    return draw.choice((draw.randint(0, 30), draw.randint(0, 400), 10**9))


def state_of(model: Any) -> tuple:
    """What a request changes in a model while it runs."""
    rotary = model.model.rotary_emb
    return model.config.cca, rotary.rope_type, rotary.inv_freq.tolist()


def draw_call(draw: random.Random, engines: list[Engine], streams: list[list]) -> Callable:
    """Draw a call that engine or stream 0 or 1 may take or refuse."""
    running = [pair for pair in streams if not pair[0]._closed]
    if not running or draw.random() < 0.1:
        ids = tokens(draw.choice((1, 2)), draw.choice((10, 37, 70)), draw.randint(0, 9))
        options = {
            "max_new_tokens": draw.choice((1, 9, 20, 20, 10**6)),
            "group_size": draw.choice((None, None, None, 5, 0)),
            "window_size": draw.choice((None, None, 12)),
        }
        return lambda i: engines[i].stream(ids, **options)
    pair = draw.choice([*running, *streams])
    window = draw.choice((0, 3, 10, 15, 19, 50))
    calls = [lambda i: pair[i].close(), lambda i: engines[i].clear()]
    calls += [lambda i: pair[i].configure(window_size=window)] * 4
    return draw.choice([*calls, *[lambda i: next(pair[i], "end")] * 8])


def result(call: Callable, which: int) -> Any:
    """What a call returns, or the error by which it is refused."""
    try:
        return call(which)
    except ValueError as error:
        return str(error)


def engine_life(number: int) -> int:
    """Live one life of an engine beside a twin; return how many calls failed."""
    draw = random.Random(f"engine {number}")
    kind = draw.choice(list(MODELS))
    model = MODELS[kind]()
    static = draw.choice((False, True))
    failed = 0
    with torch.no_grad(), corecontext.enabled(model, draw_config(draw, kind), warn=False):
        engines = [Engine(model, static=static, chunk_size=16) for _ in range(2)]
        before = state_of(model)
        streams: list[list] = []
        for step in range(20):
            case = f"engine {number}, step {step}, {kind}, {model.config.cca}, static={static}"
            call = draw_call(draw, engines, streams)
            found = None
            try:
                with FailingAllocation(draw_place(draw)):
                    found = result(call, 0)
            except (RuntimeError, MemoryError):
                failed += 1
                assert state_of(model) == before, case
                # A request ends whose step fails; whatever else failed can be done now.
                running = [pair for pair in streams if pair[0]._closed != pair[1]._closed]
                for _, other in running:
                    other.close()
                found = "end" if running else result(call, 0)
                wanted = "end" if running else result(call, 1)
            else:
                wanted = result(call, 1)
            if isinstance(found, corecontext.inference.Stream):
                streams.append([found, wanted])
            else:
                assert found == wanted, case
            assert state_of(model) == before, case
            loads = [dataclasses.replace(x.load(), time_to_first_token=None) for x in engines]
            assert loads[0] == loads[1], case
        for pair in streams:
            assert list(pair[0]) == list(pair[1])
    return failed


def server_life(number: int) -> int:
    """Live one life of a server with turns that fail; return how many requests they ended."""
    draw = random.Random(f"server {number}")
    kind = draw.choice(("llama", "dynamic"))
    model = MODELS[kind]()
    config = draw_config(draw, kind)
    with corecontext.enabled(model, config, warn=False):
        scheduler = Scheduler(model, chunk_size=16, rows_per_pool=2, capture=False, max_length=60)
        scheduler.batch.fixed = draw.choice((False, True))
        before = state_of(model)
        asked = []
        for step in range(200):
            if len(asked) < 7 and draw.random() < 0.4:
                size = None if config.varies else draw.choice((None, None, 6))
                # Some begin alike.
                ids = tokens(1, 17, 1)[0].tolist() + tokens(1, 23, step)[0].tolist()
                ids = ids[: draw.choice((9, 25, 40))]
                asked.append(ask(0, new=7, prompt=ids, group_size=size))
                asked[-1].submit(scheduler)
            fault = FailingAllocation(draw_place(draw), once=True)
            with fault if draw.random() < 0.3 else contextlib.nullcontext():
                scheduler.run_turn()
            assert state_of(model) == before
            if scheduler.idle and len(asked) == 7:
                break
        case = f"server {number}, {kind}, {model.config.cca}"
        assert_empty(scheduler)
        for each in asked:
            expected = alone(model, each)
            reasons = {"length", "error"}
            assert each.ends == [each.slot.end_reason] and each.slot.end_reason in reasons, case
            if each.slot.end_reason == "error":
                assert isinstance(each.slot.error, RuntimeError), case
                expected = expected[: len(each.tokens)]
            assert each.tokens == expected, case
    return sum(each.slot.end_reason == "error" for each in asked)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("life", [engine_life, server_life])
def test_what_fails_changes_nothing_else(life, request):
    count = -(-request.config.getoption("--fuzz") // 4)
    first = request.config.getoption("--first")
    assert sum(life(first + number) for number in range(count)) > count / 2
