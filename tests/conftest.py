"""Fixtures shared by all tests."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Generator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read by the import of torch; the processes share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Read once, when triton is first imported by whatever test.
    os.environ.setdefault("TRITON_INTERPRET", "1")


if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        import bounds_check
        import faster_interpreter

        faster_interpreter.install()
        bounds_check.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--soak N and --fuzz N: the size of tests/test_soak.py and of tests of random cases."""
    parser.addoption("--soak", type=int, default=12, help="requests of the soak test")
    parser.addoption("--fuzz", type=int, default=12, help="random cases")
    parser.addoption("--first", type=int, default=0, help="number of the first of them")
    parser.addoption("--record", help="file that gets a record of the soak or the fuzz")


# By the time they take, most first: what begins last must be short, or one process waits for it.
LONGEST = (
    "test_triton_paged_fetch.py",
    "test_triton_compile.py",  # minutes without Triton's cache
    "test_readme.py",
    "test_hopper_kernels.py",
    "test_serve.py",
    "test_inference.py",
    "test_scheduler.py",
    "test_bench.py",
    "test_train.py",
    "test_reproduce.py",
    "test_transformers.py",
    "test_train_recipes.py",
    "test_cache.py",
    "test_demo.py",
    "test_real.py",
    "test_cli.py",
    "test_triton_decode.py",
    "test_triton_fetch_step.py",
    "test_fetch_models.py",
    "test_cache_eight_bit.py",
    "test_context_parallel.py",
    "test_head_search.py",
    "test_ops_numerics.py",
    "test_baselines.py",
    "test_arrows.py",
    "test_triton_fetch.py",
    "test_sinks_models.py",
    "test_soak.py",
    "test_fetch.py",
    "test_cache_fetch.py",
    "test_house.py",
    "test_rivals.py",
    "test_triton_fetch_slots.py",
    "test_tensor_parallel.py",
    "test_train_parts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; within a file the order stays. Slow tests have half
    an hour, as they also pass on a busy machine."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, which leave nearly none: each collection looks
    through all objects so far."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the objects of imported modules, about a million, out of every garbage collection:
    Trainer collects garbage in each run."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Let this process have the children of its children that end before them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what a test that failed has started, such as the ranks of a launcher; let the interpreter
    free all objects at its exit."""
    gc.unfreeze()
    is_controller = config.getoption("numprocesses", 0) and not hasattr(config, "workerinput")
    with contextlib.suppress(ImportError):
        import psutil

        for process in () if is_controller else psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()


@pytest.fixture
def record_check(request: pytest.FixtureRequest):
    """Append a record of a long check that has passed to the file of --record, if there is one."""

    def append(command: str, **params: object) -> None:
        from corecontext.record import append_records, make_record

        path = request.config.getoption("--record")
        if path is not None:
            append_records(path, [make_record("checks.failed", 0, params, command=command)])

    return append


@pytest.fixture
def left_streams_are_not_awaited(monkeypatch):
    """datasets waits seconds where a stream of parquet files is left before its end, so that no
    thread of it outlives the interpreter; this one lives on."""
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


@pytest.fixture
def compile_by(monkeypatch):
    """A function that gives torch.compile a backend. "aot_eager" traces both passes as the real
    compiler does and runs what it traced, without the seconds to minutes of code for a machine."""
    compile = torch.compile

    def choose(backend: object) -> None:
        torch._dynamo.reset()
        monkeypatch.setattr("corecontext.inference.fuse._rotating", {})
        monkeypatch.setattr(
            torch, "compile", lambda *args, **options: compile(*args, backend=backend, **options)
        )

    yield choose
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def default_device(device):
    """Make new tensors and models on the GPU where there is one, for tests that are written without
    devices. The CPU is the default anyway, and a mode of torch would cost half the time of small
    tensors."""
    with torch.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield device


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A small training run: a tiny model, text in several documents, settings."""
    from train_runs import make_setting

    # Drawing takes as long as a short run.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("corecontext.train.card._draw", lambda path, *curves: path.write_bytes(b""))
        yield make_setting(tmp_path_factory.mktemp("train"))
