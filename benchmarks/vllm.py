"""Measure vLLM with core context beside vLLM with its own attention: first and next token of one
request, requests per second, and tokens that the cache holds.

Each method runs in a process of its own, on the same vLLM, with random weights and without prefix
caching. Records are handed over as soon as they are made.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.options import check_choices, check_positive, option
from benchmarks.serving_settings import SERVED_SHAPES
from corecontext.config import PAPER_RULE, PRESETS, CCAConfig
from corecontext.files import UserError, install_command
from corecontext.integrations.vllm.page_layout import PageLayout, core_entries, fetched_tokens
from corecontext.measure import package_path
from corecontext.record import Record, command_line, device_name, make_record

BACKENDS = {"cca": "CUSTOM", "fetch": "CUSTOM", "full": "FLASH_ATTN"}
"""Method -> vLLM's name of its attention."""
WEIGHTS = ("bfloat16", "fp8")
MOST_REQUESTS = 256
"""Requests in a step at most."""
PAGE_SIZE = 16
BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class VllmBench:
    """Model, methods and load to measure."""

    methods: tuple[str, ...] = option(("cca", "full"), name="method")
    """cca; fetch: the preset "device" or "default"; or full: vLLM's own FlashAttention."""
    store: str = "device"
    """Where fetch keeps raw tokens: device or host."""
    hit_share: float | None = None
    """Share of the groups of a step that are in a slot, with the host store: choices of groups that
    repeat so are replayed, because random weights choose at random. None leaves them."""
    pages: int = 0
    """Pages of the cache of fetch with the host store, for each of which the host holds raw tokens;
    0 takes what fits, as the other methods do."""
    shape: str = "llama3.1-8b"
    """llama3.1-8b: a model of these sizes with random weights."""
    group_size: int = PAPER_RULE["group_size"]
    """Tokens per core token of cca, g."""
    window_size: int = PAPER_RULE["window_size"]
    """Nearest tokens that cca keeps as they are, s."""
    lengths: tuple[int, ...] = option((1024, 32768, 131072), name="length")
    """Tokens of a prompt alone on the machine, whose first and next token are measured."""
    weights: str = "bfloat16"
    """bfloat16, or fp8: vLLM's online quantization, whose matrix products are in fp8 too."""
    steps: int = 48
    """Next tokens of such a prompt."""
    trials: int = 3
    """Times that each of these lengths is measured."""
    prompt_length: int = 32768
    """Tokens of each prompt that is sent with others."""
    new_tokens: int = 1024
    """Tokens of each answer to them."""
    requests: int = 96
    """Requests sent all at once, the same to each method; 0 measures none."""
    most_batched: int = 8192
    """Tokens that a step brings at most."""
    compiled: bool = False
    """Compile the model by torch.compile, as vLLM does by default; starting takes longer."""
    memory_share: float = 0.9
    """Share of the GPU's memory that vLLM uses."""
    seed: int = 0
    """Seed of the prompts."""
    turns: bool = False
    """Have several methods take turns, prompt by prompt, each with a part of the memory: where the
    host's speed changes, they see the same. Only prompts alone are measured."""
    profile: bool = False
    """Print which kernels the steps run, by their time on the device, and measure nothing else."""

    def __post_init__(self) -> None:
        check_choices("method", self.methods, tuple(BACKENDS))
        check_choices("shape", (self.shape,), tuple(SERVED_SHAPES))
        check_choices("store", (self.store,), ("device", "host"))
        check_choices("weights", (self.weights,), WEIGHTS)
        if self.hit_share is not None and not 0 <= self.hit_share <= 1:
            raise ValueError(f"hit_share must be in 0 .. 1, got {self.hit_share}.")
        check_positive(
            length=self.lengths,
            steps=self.steps,
            trials=self.trials,
            prompt_length=self.prompt_length,
            new_tokens=self.new_tokens,
            most_batched=self.most_batched,
        )
        if self.requests < 0:
            raise ValueError(f"requests must be at least 0, got {self.requests}.")
        if self.profile and (len(self.methods) > 1 or not self.requests):
            raise ValueError(
                f"profile must be given with one method and requests, got {', '.join(self.methods)}"
                f" and {self.requests} requests."
            )
        if self.turns and (len(self.methods) < 2 or self.requests):
            raise ValueError(
                f"turns must be given with several methods and 0 requests, got "
                f"{', '.join(self.methods)} and {self.requests} requests."
            )
        if not 0 < self.memory_share < 1:
            raise ValueError(f"memory_share must be between 0 and 1, got {self.memory_share}.")

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(*(n + self.steps for n in self.lengths), self.prompt_length + self.new_tokens)

    def config(self, method: str) -> CCAConfig:
        """Return the settings of core context under a method of it."""
        if method == "fetch":
            return CCAConfig.preset("device", store=self.store)
        return CCAConfig.pooling(group_size=self.group_size, window_size=self.window_size)

    def pages_of(self, method: str) -> int:
        """Return the pages that a method's cache is given, 0 for those that fit."""
        return self.pages if method == "fetch" and self.store == "host" else 0

    def params(self, method: str, **more: Any) -> dict[str, Any]:
        """Return a record's params."""
        settings: dict[str, Any] = {}
        if method != "full":
            sizes = ["group_size", "window_size", "sink_size", "core_mass"]
            if method == "fetch":
                sizes += ["fetch_groups", "fetch_index", "store"]
            settings = {name: getattr(self.config(method), name) for name in sizes}
            same = (name for name in PRESETS if CCAConfig.preset(name) == self.config(method))
            settings["preset"] = next(same, None)
            if self.config(method).fetches_by_slots:
                settings |= {"fetch_slots": self.config(method).slots_for(self.longest)}
                settings |= {"hit_share": self.hit_share}
        return {
            "method": method,
            "attention": BACKENDS[method],
            **settings,
            "model": self.shape,
            "random_weights": True,
            "dtype": "bfloat16",
            "weights": self.weights,
            "compiled": self.compiled,
            "most_batched": self.most_batched,
            "most_requests": min(MOST_REQUESTS, self.most_batched),
            "memory_share": self.memory_share,
            **more,
        }


def check_installed() -> None:
    """Raise UserError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "bench vllm needs vLLM, which is not installed. Install it with: "
            f"{install_command('vllm')}"
        )


def run_vllm_bench(
    bench: VllmBench, on_records: Callable[[list[Record]], Any] = lambda new: None
) -> list[Record]:
    """Measure all methods, several of them in a process each.

    Raises:
        UserError: vLLM is not installed, or ended early with a method; the others are measured all
            the same.
    """
    check_installed()
    if len(bench.methods) > 1:
        measured = [_measure_apart(bench, method, on_records) for method in bench.methods]
        reasons = [reason for _, reason in measured if reason]
        if reasons:
            raise UserError("vllm must measure each method. " + " ".join(reasons))
        return [record for records, _ in measured for record in records]
    [method] = bench.methods
    with started(bench, method, on_records) as trial:
        if bench.profile:
            trial.profile()
            return []
        if not bench.pages_of(method):
            trial.cache_tokens()
        for length in bench.lengths:
            for _ in range(bench.trials):
                trial.alone(length)
            trial.keep_alone(length)
        if bench.requests:
            trial.together()
    return trial.records


@contextlib.contextmanager
def started(
    bench: VllmBench, method: str, on_records: Callable[[list[Record]], Any] = lambda new: None
) -> Iterator["Trial"]:
    """Start and warm up vLLM in this process."""
    # vLLM reads the environment when it is imported. Engine and scheduler stay in this process, so
    # that the times are those of steps, not of messages.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    config = bench.config(method)
    with contextlib.ExitStack() as stack:
        if config.fetches_by_slots and bench.hit_share is not None:
            from benchmarks.replay import replayed_pages

            shortest = min(*bench.lengths, bench.prompt_length)
            stack.enter_context(replayed_pages(bench.hit_share, shortest))
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(bench, method, folder)
        trial = Trial(bench, method, engine, device_name("cuda"), on_records)
        trial.warm_up()
        yield trial


def _measure_apart(
    bench: VllmBench, method: str, on_records: Callable[[list[Record]], Any]
) -> tuple[list[Record], str]:
    """Measure a method in a process of its own, which frees the GPU's memory when it ends; return
    its records, and the reason where it ended early."""
    given = {**asdict(bench), "methods": [method]}
    program = [sys.executable, "-m", "benchmarks.vllm", json.dumps(given)]
    records = []
    with subprocess.Popen(program, env=package_path(), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith('{"name"'):
                records.append(replace(Record.from_json(line), command=command_line()))
                on_records(records[-1:])
    reason = f"{method}: vLLM ended with code {child.returncode}." if child.returncode else ""
    return records, reason


def model_config(bench: VllmBench, method: str) -> dict[str, Any]:
    """Return the config.json of the model, with positions for the longest request."""
    shape = dict(SERVED_SHAPES[bench.shape])
    shape["max_position_embeddings"] = max(shape["max_position_embeddings"], bench.longest)
    if method != "full":
        shape["cca"] = bench.config(method).to_dict()
    return shape


def make_engine(bench: VllmBench, method: str, folder: str) -> Any:
    """Start vLLM's engine on a model whose config.json is written to a folder."""
    from vllm import LLM

    from corecontext.integrations.vllm.plugin import register

    register()  # as the entry point of an installed package does
    Path(folder, "config.json").write_text(json.dumps(model_config(bench, method)))
    most_requests = min(MOST_REQUESTS, bench.most_batched)
    # vLLM's own sizes up to there; larger ones would not be replayed.
    compilation: dict[str, Any] = {"max_cudagraph_capture_size": most_requests}
    if not bench.compiled:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        quantization="fp8" if bench.weights == "fp8" else None,
        attention_backend=BACKENDS[method],
        block_size=PAGE_SIZE,
        max_model_len=bench.longest,
        max_num_batched_tokens=bench.most_batched,
        max_num_seqs=most_requests,
        enable_prefix_caching=False,
        gpu_memory_utilization=bench.memory_share,
        num_gpu_blocks_override=bench.pages_of(method) or None,
        compilation_config=compilation,
        seed=0,
    )
    return llm.llm_engine


class Trial:
    """Measure one method."""

    def __init__(
        self,
        bench: VllmBench,
        method: str,
        engine: Any,
        device: str,
        on_records: Callable[[list[Record]], Any],
    ) -> None:
        self.bench = bench
        self.method = method
        self.engine = engine
        self.device = device
        self.on_records = on_records
        self.records: list[Record] = []
        self.random = random.Random(bench.seed)
        self.first_s: dict[int, list[float]] = {}
        """By the prompt's length, as `next_ms`."""
        self.next_ms: dict[int, list[float]] = {}

    def keep(self, name: str, value: float | list[float], **more: Any) -> None:
        """Make a record and hand it over."""
        runner = "V2" if self.engine.vllm_config.use_v2_model_runner else "V1"
        params = self.bench.params(self.method, runner=runner, **more)
        record = make_record(f"vllm.{name}", value, params, device=self.device)
        self.records.append(record)
        self.on_records([record])

    def prompt(self, length: int) -> list[int]:
        """Return a prompt that begins like no other."""
        return [self.random.randrange(1000, 100_000) for _ in range(length)]

    def cache_tokens(self) -> None:
        """Count the tokens that the cache holds in requests of this benchmark."""
        pages = self.engine.vllm_config.cache_config.num_gpu_blocks
        length = self.bench.prompt_length + self.bench.new_tokens
        tokens = pages * PAGE_SIZE
        config = self.bench.config(self.method)
        if self.method == "fetch":
            head_dim = SERVED_SHAPES[self.bench.shape]["head_dim"]
            entries = core_entries(config, PAGE_SIZE, head_dim, BFLOAT16_BYTES)
            layout = PageLayout.of(config, PAGE_SIZE, entries)
            tokens = fetched_tokens(pages, length, PAGE_SIZE, layout.core_page_tokens)
        if self.method == "cca":
            layout = PageLayout.of(config, PAGE_SIZE)
        if self.method == "cca" or config.fetches_from_host:
            in_flight = self.engine.vllm_config.max_in_flight_tokens
            tokens = layout.cache_tokens(pages, length, in_flight)
        self.keep("cache_tokens", tokens, length=length, pages=pages)

    def warm_up(self) -> None:
        """Run prompts of one chunk, of several, and beside others, so that kernels are compiled."""
        most = self.bench.longest - 4
        for length in (min(10, most), min(300, most), *sorted(self.bench.lengths)):
            timed(self.engine, [self.prompt(length)], 4)
        long = min(2 * self.bench.most_batched + 100, most)
        timed(self.engine, [self.prompt(long), *(self.prompt(min(40, most)) for _ in range(7))], 4)

    def profile(self) -> None:
        """Print the kernels of the steps that the requests of this benchmark go through."""
        from benchmarks.vllm_profile import print_phase, profile_engine

        bench = self.bench
        first_steps = math.ceil(bench.prompt_length / bench.most_batched)
        options = _greedy(bench.new_tokens)
        prompt = partial(self.prompt, bench.prompt_length)
        for phase in profile_engine(self.engine, prompt, options, bench.requests, first_steps):
            print_phase(phase)

    def alone(self, length: int) -> None:
        """Measure the first and the next tokens of one request alone."""
        [times] = timed(self.engine, [self.prompt(length)], 1 + self.bench.steps)
        self.first_s.setdefault(length, []).append(times[0])
        steps = [1000 * (b - a) for a, b in itertools.pairwise(times)]
        self.next_ms.setdefault(length, []).extend(steps)

    def keep_alone(self, length: int) -> None:
        """Keep what was measured of requests alone."""
        self.keep("first_token_s", self.first_s[length], length=length)
        self.keep("next_token_ms", self.next_ms[length], length=length)

    def together(self) -> None:
        """Measure requests sent all at once, from the first one sent to the last token made."""
        bench = self.bench
        load = {
            "prompt_length": bench.prompt_length,
            "new_tokens": bench.new_tokens,
            "requests": bench.requests,
        }
        prompts = [self.prompt(bench.prompt_length) for _ in range(bench.requests)]
        times = timed(self.engine, prompts, bench.new_tokens)
        self.keep("requests_per_s", bench.requests / max(t[-1] for t in times), **load)
        self.keep("first_token_s", statistics.median(t[0] for t in times), **load)


def timed(engine: Any, prompts: Sequence[list[int]], new_tokens: int) -> list[list[float]]:
    """Send prompts at once to vLLM's engine, and return for each when its tokens were there, in
    seconds since then."""
    options = _greedy(new_tokens)
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, options)
    times: list[list[float]] = [[] for _ in prompts]
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            arrived = times[int(output.request_id)]
            # More than one token is there only with drafts or after a late look.
            arrived += [now] * (len(output.outputs[0].token_ids) - len(arrived))
    return times


def _greedy(new_tokens: int) -> Any:
    """Return vLLM's parameters of greedy answers of so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def bench_of(text: str) -> VllmBench:
    """Return the settings that JSON holds."""
    given = json.loads(text)
    return VllmBench(**given | {name: tuple(given[name]) for name in ("methods", "lengths")})


def hand_over(new: list[Record]) -> None:
    """Print records for the process that started this one."""
    for record in new:
        print(record.to_json(), flush=True)


if __name__ == "__main__":
    run_vllm_bench(bench_of(sys.argv[1]), hand_over)
