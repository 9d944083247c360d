"""Measure what a user waits for: first and next token under full attention and under presets, and
the bytes of their caches.

Full attention is the fastest of plain transformers with SDPA and of the Engine, as it runs short
requests, at every length. Methods take turns in one process, in another order each round.
"""

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache

from benchmarks.model_methods import PlainRun
from benchmarks.options import DTYPES, check_choices, check_positive, option
from benchmarks.shapes import make_model, make_prompt
from benchmarks.tables import shown_bytes
from corecontext.config import PRESETS, CCAConfig, check_choice
from corecontext.inference import Engine
from corecontext.integrations.hf.cache_layers import cache_bytes, host_bytes
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.integrations.hf.enabling import enable
from corecontext.measure import synchronize
from corecontext.model_sizes import ModelSizes
from corecontext.ops.fetch import prompt_rule
from corecontext.ops.fetch.prompt_rule import NO_END
from corecontext.record import Record, device_name, make_record

FULL = "full"
ENGINE = "full_engine"
GENERATE = "generate"
TRANSFORMERS = "transformers"
METHODS = {name: CCAConfig.preset(name) for name in PRESETS}
METHODS |= {"exact": CCAConfig(prefill="full"), GENERATE: CCAConfig()}
"""Settings by name: the presets, the default that reads its prompts exactly, and the default as
`generate()` of transformers calls the model."""
WINDOWS = {f"window:{name}": name for name in ("default", "small")}
"""Windows by name, and the preset that has as many bytes on the device."""
NAMES = ("user.first_token_s", "user.next_token_ms", "user.device_bytes", "user.host_bytes")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CPU_LENGTHS = (512, 1024, 2048, 4096)
ENOUGH_S = 10.0
"""No more prompts of a method at a length once they took this long together."""
HIT_SHARES = {1.5: 0.93, 2.0: 0.96}
"""By slots over groups of a step: measured (docs/fetch-results.md)."""
WARM_STEPS = 4
"""Steps in which kernels are compiled and a step is captured."""


@dataclass(frozen=True)
class UserBench:
    """Settings of `run_user_bench`."""

    model: str = "llama3.1-8b"
    """A shape with random weights, or a checkpoint."""
    lengths: tuple[int, ...] = option(CPU_LENGTHS, gpu=LENGTHS, name="length")
    """Tokens of the prompt (repeatable)."""
    methods: tuple[str, ...] = option(("default", "small"), name="method")
    """Presets; window:PRESET for the first tokens and a window, of as many bytes on the device;
    exact for the default that reads prompts by full attention; or generate for the default in calls
    of transformers' own, beside plain ones (repeatable)."""
    new_tokens: int = 24
    """Tokens made behind each prompt."""
    repeats: int = 5
    """Prompts of each method and length, fewer of long ones."""
    hit_share: float | None = None
    """Share of a step's groups that are in a slot on a GPU, as random weights choose at random; by
    default that of a real text with as many slots (`python -m reproduction real --hit-steps`)."""
    dtype: str = option("float32", gpu="bfloat16")
    """Dtype of weights and activations."""
    device: str = "cpu"
    """Device: cpu or cuda."""

    def __post_init__(self) -> None:
        check_positive(lengths=self.lengths, new_tokens=self.new_tokens, repeats=self.repeats)
        check_choices("method", self.methods, (*METHODS, *WINDOWS))
        check_choice("dtype", self.dtype, DTYPES)
        if self.hit_share is not None and not 0 <= self.hit_share <= 1:
            raise ValueError(f"hit_share must be in 0 .. 1, got {self.hit_share}.")


class Way:
    """Run a method in one way, prompt after prompt, and hold its samples."""

    def __init__(self, first: Callable[[], Any], step: Callable[[], Any]) -> None:
        self.first = first
        """Reads the prompt and makes a token."""
        self.step = step
        """Makes one more token."""
        self.first_s: list[float] = []
        self.next_ms: list[float] = []

    def run(self, new_tokens: int, device: str) -> None:
        """Measure one prompt and what follows."""
        self.first_s.append(_seconds(self.first, device))
        for _ in range(WARM_STEPS):
            self.step()

        def steps() -> None:
            """Make tokens as a stream's reader takes them: nobody waits for the device between."""
            for _ in range(new_tokens):
                self.step()

        self.next_ms.append(1e3 * _seconds(steps, device) / new_tokens)


class EngineRun:
    """Send one prompt after another to an engine, which keeps its buffers and captured steps."""

    def __init__(self, model: Any, input_ids: torch.Tensor, new_tokens: int) -> None:
        self.engine = Engine(model, keep=1)
        self.input_ids = input_ids
        self.tokens = new_tokens + WARM_STEPS + 2  # the last step leaves the request open
        self.stream: Any = None

    def first(self) -> None:
        """Read the prompt and make a token."""
        self.close()
        self.stream = self.engine.stream(self.input_ids, max_new_tokens=self.tokens)
        next(self.stream)

    def step(self) -> None:
        """Make one more token."""
        next(self.stream)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the cache, on the device and in host memory."""
        cache = self.stream.session.cache
        return cache_bytes(cache), host_bytes(cache)

    def close(self) -> None:
        """End the request."""
        if self.stream is not None:
            self.stream.close()


class ModelRun:
    """Call a model as `generate()` of transformers does, with a new cache for each prompt, which
    ends before the one before began to be answered: texts of users have other lengths each, and
    kernels that plan for a length plan for each."""

    def __init__(self, model: Any, input_ids: torch.Tensor, new_tokens: int) -> None:
        self.model = model
        self.input_ids = input_ids
        self.less = new_tokens + WARM_STEPS + 1
        self.length = input_ids.shape[1]
        self.cache: Any = None

    def first(self) -> None:
        """Read the prompt and make a token."""
        self.cache = DynamicCache(config=self.model.config)
        self._call(self.input_ids[:, : self.length])
        self.length = max(1, self.length - self.less)

    def step(self) -> None:
        """Make one more token."""
        self._call(self.token)

    @torch.no_grad()
    def _call(self, tokens: torch.Tensor) -> None:
        out = self.model(tokens, **with_cache(self.cache), use_cache=True, logits_to_keep=1)
        self.token = out.logits.argmax(-1)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the cache, on the device and in host memory."""
        return cache_bytes(self.cache), host_bytes(self.cache)

    def close(self) -> None:
        """Release the cache."""
        self.cache = None


class WindowRun(ModelRun):
    """Call a model whose queries see the first tokens and a window; positions are counted inside
    the cache."""

    def __init__(
        self, model: Any, input_ids: torch.Tensor, new_tokens: int, num_bytes: int
    ) -> None:
        """Take a model without CCA, and the bytes of the cache."""
        from corecontext.baselines import StreamingLLM, enable

        sizes = ModelSizes.of(model.config)
        token_bytes = sizes.layers * sizes.kv_heads * 2 * sizes.head_dim * model.dtype.itemsize
        self.entries = num_bytes // token_bytes
        """Tokens that the cache holds."""
        sinks = CCAConfig.sink_size
        twin = _with_weights_of(model)
        enable(twin, StreamingLLM(sinks=sinks, window_size=self.entries - sinks))
        super().__init__(twin, input_ids, new_tokens)


class FullRun(EngineRun):
    """Keep all tokens of requests, however long, as the Engine does of short ones."""

    def first(self) -> None:
        """Read the prompt and make a token."""
        with mock.patch.dict(prompt_rule.WHOLE_TOKENS, cpu=NO_END, cuda=NO_END):
            super().first()


def run_user_bench(
    bench: UserBench, on_records: Callable[[list[Record]], Any] | None = None
) -> list[Record]:
    """Measure each length: full attention and the presets in turn."""
    model, of_model = make_model(bench.model, bench.dtype, bench.device)
    of_model["model"] = of_model.pop("shape")
    # Models that share the weights, each under one method.
    presets = [WINDOWS.get(name, name) for name in bench.methods]
    twins = {name: _twin(model, METHODS[name]) for name in presets}
    twins[ENGINE] = _twin(model, CCAConfig())
    records: list[Record] = []
    for length in bench.lengths:
        params = {**of_model, "length": length, "new_tokens": bench.new_tokens}
        with contextlib.ExitStack() as stack:
            if of_model["weights"] == "random":
                params["choices"] = "random"  # of random queries and keys
                if bench.device.startswith("cuda"):
                    from benchmarks.replay import replayed

                    share = _hit_share(bench, length)
                    params["hit_share"] = share
                    seen = length - CCAConfig.window_size - CCAConfig.sink_size
                    stack.enter_context(replayed(share, seen))
            new = list(_measured(model, twins, bench, params))
        records += new
        if on_records is not None:
            on_records(new)
    return records


def _hit_share(bench: UserBench, length: int) -> float:
    """Return the share of groups in slots of steps behind a prompt."""
    if bench.hit_share is not None:
        return bench.hit_share
    config = CCAConfig()
    return HIT_SHARES[config.slots_for(length) / config.fetch_groups]


def _measured(
    model: Any, twins: dict[str, Any], bench: UserBench, params: dict[str, Any]
) -> Iterator[Record]:
    """Measure one length, and yield its records."""
    length = params["length"]
    input_ids = make_prompt(model, 1, length)
    sizes = (input_ids, bench.new_tokens)
    plain = PlainRun(model, FULL, input_ids)
    runs: dict[str, EngineRun | ModelRun] = {}
    # Other steps of a method, of which the faster count.
    steps = {FULL: FullRun(twins[ENGINE], *sizes)}
    for name in bench.methods:
        if name == GENERATE:
            runs[TRANSFORMERS] = ModelRun(model, *sizes)
            runs[GENERATE] = ModelRun(twins[GENERATE], *sizes)
        elif name in WINDOWS:
            window = WindowRun(model, *sizes, _bytes_of(EngineRun(twins[WINDOWS[name]], *sizes)))
            runs[name] = window
            # Captured steps, over a cache that has as many tokens.
            entries = input_ids[:, : window.entries]
            steps[name] = FullRun(twins[ENGINE], entries, bench.new_tokens)
        else:
            runs[name] = EngineRun(twins[name], *sizes)
    ways = {name: Way(run.first, run.step) for name, run in (*runs.items(), (FULL, plain))}
    ways |= {f"{name}, steps": Way(run.first, run.step) for name, run in steps.items()}

    # The first round warms up: kernels are compiled, buffers made and steps captured.
    full_bytes = 0
    shuffle = random.Random(0)
    for repeat in range(bench.repeats + 1):
        for name, way in shuffle.sample(list(ways.items()), len(ways)):
            if repeat > 1 and sum(way.first_s) > ENOUGH_S:
                continue
            way.run(bench.new_tokens, bench.device)
            if name == FULL:
                full_bytes = cache_bytes(plain.cache)
                plain.close()
            if repeat == 0:
                way.first_s.clear()
                way.next_ms.clear()
    cache_sizes = {name: run.bytes for name, run in runs.items()}
    for run in (*steps.values(), *runs.values()):
        run.close()

    device = device_name(bench.device)
    rows_of: dict[str, tuple[Any, ...]] = {}
    cache_sizes = {FULL: (full_bytes, 0), **cache_sizes}
    for name, num_bytes in cache_sizes.items():
        mine = [ways[x] for x in (name, f"{name}, steps") if x in ways]
        # A window's other steps follow a shorter prompt.
        firsts = mine if name == FULL else mine[:1]
        seconds = min((way.first_s for way in firsts), key=median)
        next_ms = min((way.next_ms for way in mine), key=median)
        rows_of[name] = (seconds, next_ms, *num_bytes)
    for method, values in rows_of.items():
        for name, value in zip(NAMES, values, strict=True):
            yield make_record(name, value, {**params, "method": method}, device=device)


def _seconds(call: Callable[[], Any], device: str) -> float:
    """Time one call until its device has ended it."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def _twin(model: Any, config: CCAConfig) -> Any:
    """Return a model under these settings that has the weights of another."""
    twin = _with_weights_of(model)
    enable(twin, config, warn=False)
    return twin


def _with_weights_of(model: Any) -> Any:
    """Return a model that shares the weights of another."""
    return copy.deepcopy(model, {id(x): x for x in model.parameters()})


def _bytes_of(run: EngineRun) -> int:
    """Return the bytes on the device of a prompt's cache."""
    run.first()
    device_bytes = run.bytes[0]
    run.close()
    return device_bytes


def user_markdown(records: Sequence[Record]) -> str:
    """Return a table of each model on each device: lengths by methods, with times over those of
    full attention in the same run; windows and calls of transformers have tables of their own."""
    tables: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        method = record.params["method"]
        kind = ", called as `generate()` does" if method in (TRANSFORMERS, GENERATE) else ""
        kind = ", first tokens and a window" if method in WINDOWS else kind
        tables.setdefault((record.params["model"], record.device, kind), []).append(record)
    return "\n".join(
        f"**{model}**, {device}{kind}\n\n{_table(rows)}"
        for (model, device, kind), rows in tables.items()
    )


def _table(records: list[Record]) -> str:
    """Return the table of one model on one device: of each cell the last run."""
    shown = (
        ("first token", NAMES[0], 1e3),
        ("next token", NAMES[1], 1.0),
        ("device", NAMES[2], 0.0),
    )
    # Of each cell the value that its time is shown over, from the same run.
    ends: dict[tuple[str, str, int], float] = {}
    cells: dict[tuple[str, str, int], str] = {}
    for record in records:
        length, method = record.params["length"], record.params["method"]
        ends[record.name, method, length] = record.value
        for _, name, milliseconds in shown:
            if record.name != name:
                continue
            text = shown_bytes(record.value)
            if milliseconds:
                value = milliseconds * record.value
                text = f"{value:,.0f} ms" if value >= 1000 else f"{value:.4g} ms"
            if milliseconds and method not in (FULL, TRANSFORMERS, *WINDOWS):
                end = TRANSFORMERS if method == GENERATE else FULL
                text += f" ({record.value / ends[name, end, length]:.3f} x)"
            cells[name, method, length] = text
    methods = list(dict.fromkeys(method for _, method, _ in cells))
    titles = [f"{title}, {method}" for title, _, _ in shown for method in methods]
    lines = [f"| tokens | {' | '.join(titles)} |", "|---:" * (len(titles) + 1) + "|"]
    for length in sorted({length for _, _, length in cells}):
        row = [cells.get((name, method, length), "") for _, name, _ in shown for method in methods]
        lines.append(f"| {length:,} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"
