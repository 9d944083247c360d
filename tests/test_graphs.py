"""Captured steps: warm-up, recording and replays on one side stream; on a CPU by fakes of CUDA."""

import contextlib
import gc
import warnings
import weakref
from unittest import mock

import pytest
import torch

from corecontext import graphs
from corecontext.graphs import WARM_UP, CapturedStep, weak_call


class Stream:
    """A stream that counts nothing; compared by identity, as a key."""

    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        pass


class Fakes:
    """CUDA whose graphs run their function again when they are replayed."""

    def __init__(self):
        self.current = Stream()
        self.used = []  # streams on which functions ran or were recorded
        self.modes = []
        self.registered = []
        self.made = 0
        self.refuses = False

    def stream(self, device):
        self.made += 1
        return Stream(device)

    @contextlib.contextmanager
    def on(self, stream):
        self.used.append(stream)
        yield

    def graph(self):
        return mock.Mock(register_generator_state=self.registered.append)

    @contextlib.contextmanager
    def recording(self, graph, pool=None, stream=None, capture_error_mode="global"):
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.used.append(stream)
        self.modes.append((pool, capture_error_mode))
        yield


@pytest.fixture
def cuda(monkeypatch):
    fakes = Fakes()
    for name, fake in (
        ("current_stream", lambda: fakes.current),
        ("Stream", fakes.stream),
        ("stream", fakes.on),
        ("CUDAGraph", fakes.graph),
        ("graph", fakes.recording),
        ("device", contextlib.nullcontext),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    graphs._side_stream.cache_clear()
    yield fakes
    graphs._side_stream.cache_clear()


def counter():
    """A function that counts its calls, and the list of counts."""
    calls = []

    def function():
        calls.append(len(calls))
        return torch.tensor(len(calls))

    return function, calls


def test_a_step_is_recorded_after_its_warm_up_and_then_replayed(cuda):
    function, calls = counter()
    step = CapturedStep(function, generators=["random"], memory="pool", error_mode="thread_local")
    for number in range(WARM_UP):
        assert int(step()) == number + 1 and not step.recorded
    results = [step() for _ in range(3)]
    assert step.recorded and len(calls) == WARM_UP + 1  # recorded once
    assert step._graph.replay.call_count == 3 and all(x is results[0] for x in results)
    assert cuda.registered == ["random"] and cuda.modes == [("pool", "thread_local")]


def test_nothing_is_collected_while_a_step_is_recorded(cuda):
    """A graph of before, in a cycle that nobody holds, would spoil the one that is captured. Nor
    is anything collected before it, which takes as long as many steps."""
    events = []

    class Old:
        def __init__(self, name):
            self.itself = self
            weakref.finalize(self, events.append, name)

    def function():
        Old("now")
        for _ in range(3 * gc.get_threshold()[0]):
            kept.append([])  # what the collector counts
        events.append("ran")

    kept = []
    step = CapturedStep(function, warm_up=0)
    Old("before")
    step.record()
    assert events[:1] == ["ran"] and gc.isenabled()
    gc.collect()
    assert set(events) == {"ran", "before", "now"}


def test_the_owner_of_a_step_goes_with_its_last_reference(cuda):
    """Its caches must not stay in memory until garbage is collected."""

    class Owner:
        def __init__(self):
            self.calls = 0
            self.step = CapturedStep(weak_call(self.run))

        def run(self):
            self.calls += 1

    gc.disable()
    try:
        owner = Owner()
        for _ in range(WARM_UP + 2):
            owner.step()
        assert owner.calls == WARM_UP + 1 and owner.step.recorded
        alive = weakref.ref(owner)
        del owner
        assert alive() is None
    finally:
        gc.enable()


def test_streams_wait_for_each_other_around_a_warm_up(cuda, monkeypatch):
    """And the memory of the results is not reused before the current stream has read them."""
    order, kept = [], []
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: order.append((self, other)))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append(stream))
    x = torch.zeros(1)
    assert CapturedStep(lambda: order.append("run") or (x, None, x + 1))()[0] is x
    side = cuda.used[0]
    assert order == [(side, cuda.current), "run", (cuda.current, side)]
    assert kept == [cuda.current] * 2
    assert CapturedStep(lambda: x)() is x and len(kept) == 3


def test_all_steps_of_a_stream_share_one_side_stream(cuda):
    for _ in range(3):
        step = CapturedStep(counter()[0])
        for _ in range(WARM_UP + 1):
            step()
    assert cuda.made == 1 and len(set(cuda.used)) == 1 and len(cuda.used) == 3 * (WARM_UP + 1)
    cuda.current = Stream()
    CapturedStep(counter()[0])()
    assert cuda.made == 2


def test_a_step_that_cannot_be_captured_runs_uncaptured_with_one_warning(cuda):
    function, calls = counter()
    step = CapturedStep(function, name="a step of Llama", warm_up=1)
    step()
    cuda.refuses = True
    with pytest.warns(
        UserWarning,
        match="^a step of Llama cannot be captured in a .* slower: operation not permit",
    ):
        assert int(step()) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert int(step()) == 3
    assert not step.recorded and len(calls) == 3


def test_a_measurement_is_told_that_its_call_cannot_be_captured(cuda):
    function, calls = counter()
    step = CapturedStep(function)
    cuda.refuses = True
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        step.record()
    cuda.refuses = False
    step.record()
    assert step.recorded and len(calls) == WARM_UP + 1
    step()
    assert len(calls) == WARM_UP + 1 and step._graph.replay.call_count == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a graph")
def test_replays_compute_anew():
    x = torch.zeros(4, device="cuda")
    step = CapturedStep(lambda: x.add_(1).sum())
    assert [float(step()) for _ in range(6)] == [4.0, 8.0, 12.0, 16.0, 20.0, 24.0]
