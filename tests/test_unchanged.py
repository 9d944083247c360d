"""A change of a cache that fails, refused or out of memory, leaves the cache as it was.

Random lives of a cache, each beside a twin: every change of the one first fails at a random
allocation, then both make it, or another, and give the same, bit for bit. `pytest
tests/test_unchanged.py --fuzz 1000 --first 5000 -n 0` draws more lives, from a number on.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from budgets import make_inputs
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode

from corecontext import CCAConfig, Rotary
from corecontext.cache import CompactKVCache, new_layer
from corecontext.cache import layer as layer_module

ROTARY = Rotary.from_theta(100.0, 16)
LENGTH = 120
ROWS = 4
KINDS = (
    {},
    {"core_mass": True, "sink_size": 6},
    {"cache_dtype": "int8"},
    {"head_group_sizes": (4, 8)},
    {"fetch_groups": 3, "fetch_index": "bits:2"},
    {"fetch_groups": 2, "fetch_index": "mean", "prefill": "full"},
    {"fetch_groups": 3, "fetch_index": "pairs:2", "store": "host"},
    {"fetch_groups": 3, "fetch_index": "bits:2", "store": "host", "fetch_slots": 4},
)
Change = Callable[[object], torch.Tensor | None]


class NoMemory(RuntimeError):
    """An allocation failed."""


def causal_mask(queries: int, keys: int) -> torch.Tensor:
    """Which keys the last queries see."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


class FailingAllocation(TorchDispatchMode):
    """Fail each operator that makes a new tensor, or only one, after a number of them. The mask of
    PyTorch's causal attention, whose class allows no such mode, is a plain tensor."""

    def __init__(self, left: int, once: bool = False) -> None:
        super().__init__()
        self.left = left
        self.once = once
        self.mask = mock.patch.object(bias, "causal_lower_right", causal_mask)

    def __enter__(self) -> FailingAllocation:
        self.mask.start()
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        self.mask.stop()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(result.alias_info is None for result in function._schema.returns):
            self.left -= 1
            if self.left == -1 or (self.left < 0 and not self.once):
                raise NoMemory(str(function))
        return function(*args, **(kwargs or {}))


@functools.cache
def tokens() -> list[torch.Tensor]:
    """Queries, keys and values of a text."""
    return list(make_inputs(LENGTH, batch_size=ROWS)[:3])


def append(layer, size: int, pads: tuple[int, ...] = (), **options) -> torch.Tensor:
    """Append the next tokens of the text, the first of them behind padding."""
    if isinstance(layer, CompactKVCache):
        return torch.cat([append(each, size, pads, **options) for each in layer.layers])
    start = layer.seq_len
    rows = len(pads) or len(layer.pads) or 2
    pieces = [x[:rows, :, start : start + size] for x in tokens()]
    if pads:
        end = start + pieces[0].shape[2]
        options["attention_mask"] = torch.arange(end) >= torch.tensor(pads)[:, None]
    return layer.attend(*pieces, **options)


def draw_change(draw: random.Random, layer) -> Change:
    """Draw a change that layers of this state may take or refuse."""
    rows = len(getattr(layer, "layers", [layer])[0].pads) or 2
    order = [draw.randrange(rows) for _ in range(draw.choice((rows, rows, 1)))]
    size = draw.choice((1, 1, 1, 2, 7, 25))
    if layer.seq_len == 0:
        pads = tuple(draw.randint(0, 6) for _ in range(rows)) if draw.random() < 0.3 else ()
        return functools.partial(append, size=25, pads=pads)
    appends: list[Change] = [
        *[functools.partial(append, size=size)] * 3,
        functools.partial(append, size=size, is_prompt=False),
        functools.partial(append, size=size, pads=(3,) * rows),
        functools.partial(append, size=size, pads=(0,) * (rows + 1)),
    ]
    window = draw.randint(0, 11)
    state = copy.deepcopy(layer.state_dict())
    changes: list[Change] = [
        lambda x: x.crop(size),
        lambda x: x.shrink_window(window),
        lambda x: x.select(torch.tensor(order)),
        lambda x: x.repeat(2) if rows * 2 <= ROWS else None,
        lambda x: x.load_state_dict(state),
    ]
    return draw.choice([*appends, *changes])


def result(change: Change, layer) -> tuple[torch.Tensor | None, str]:
    """What a change returns, and the error by which it is refused."""
    try:
        return change(layer), ""
    except (ValueError, RuntimeError) as error:
        assert not isinstance(error, NoMemory)
        return None, f"{type(error).__name__}: {error}"


def live(number: int) -> int:
    """Live one life of a cache and its twin; return how many changes failed."""
    draw = random.Random(f"life {number}")
    config = CCAConfig.paper(4, 9, backend="packed", **draw.choice(KINDS))
    options = {"max_length": draw.choice((None, LENGTH)), "rollback": draw.choice((0, 3))}
    make = draw.choice((new_layer, functools.partial(CompactKVCache, 2)))
    layer, twin = (make(config, ROTARY, **options) for _ in range(2))
    failed = 0
    for step in range(12):
        change = draw_change(draw, twin)
        place = draw.choice((0, 3, 10, 30, 60, 100)) + draw.randint(0, 9)
        appended = change.keywords["size"] if isinstance(change, functools.partial) else 0
        try:
            # The layers of a model append one by one, in a forward.
            if not appended or make is new_layer:
                with FailingAllocation(place):
                    change(layer)
                layer = copy.deepcopy(twin)  # it made the change: go back
        except (NoMemory, MemoryError):
            failed += 1
            # A step that fails lets no tokens before it be taken back.
            change = change if appended == 1 else draw.choice((change, draw_change(draw, twin)))
        except (ValueError, RuntimeError):
            pass  # refused
        case = f"life {number}, change {step}, {config}, {options}"
        assert (layer.seq_len, layer.nbytes) == (twin.seq_len, twin.nbytes), case
        (ours, refusal), (expected, wanted) = result(change, layer), result(change, twin)
        assert refusal == wanted, case
        assert (ours is None) == (expected is None), case
        assert ours is None or torch.equal(ours, expected), case
    return failed


@pytest.mark.timeout(0)
def test_a_change_that_fails_changes_nothing(request, record_check, monkeypatch):
    monkeypatch.setattr(layer_module, "LEAST_RING", 3)
    count = request.config.getoption("--fuzz")
    first = request.config.getoption("--first")
    with torch.no_grad():
        failed = sum(live(first + number) for number in range(count))
    assert failed > 2 * count
    command = f"python -m pytest tests/test_unchanged.py -n 0 --fuzz {count} --first {first}"
    record_check(command, check="caches", cases=count, failed=failed)


@torch.no_grad()
@pytest.mark.parametrize("name", ["crop", "load_state_dict"])
def test_parts_of_a_cache_change_together(name):
    """Wherever one of them fails, those before it write nothing either."""
    layer = new_layer(CCAConfig.paper(4, 9, head_group_sizes=(4, 8)), ROTARY)
    append(layer, 25)
    argument = 7 if name == "crop" else copy.deepcopy(layer.state_dict())
    append(layer, 7)
    expected = append(copy.deepcopy(layer), 2)
    for place in range(500):
        changed = copy.deepcopy(layer)
        try:
            with FailingAllocation(place):
                getattr(changed, name)(argument)
        except NoMemory:
            assert torch.equal(append(changed, 2), expected)
        else:
            break
    assert 1 < place < 499


@pytest.mark.parametrize("place", range(0, 25, 4))
def test_entries_that_could_not_be_made_are_made_later(place):
    config = CCAConfig.paper(4, 9, **KINDS[-1])
    layer, twin = (new_layer(config, ROTARY) for _ in range(2))
    with torch.no_grad():
        for x in (layer, twin):
            append(x, 25)
            assert x.is_late
        with pytest.raises(NoMemory), FailingAllocation(place):
            layer.catch_up()
        steps = [append(x, 1, is_prompt=False) for x in (layer, twin)]
    assert torch.equal(*steps)
