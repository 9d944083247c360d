"""Run the demo: every method reads the same prompts, and what was measured becomes records."""

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corecontext.config import PRESETS, CCAConfig
from corecontext.cost import ModelCost
from corecontext.demo.pace import Pace
from corecontext.demo.prompts import Prompt, Question, fact_prompt, needle_prompts
from corecontext.files import UserError, read_text
from corecontext.info import mean_bytes
from corecontext.integrations.hf.adapter import find_adapter
from corecontext.loading import load_config, one_line, pick_device
from corecontext.measure import package_path
from corecontext.methods import cca_config
from corecontext.record import Record, device_name, make_record

MEASURED = ("first_token_s", "next_token_ms", "cache_bytes", "peak_bytes", "perplexity")
"""Values of `measure_method.measure` that become records "demo.NAME"."""
TITLES = {"full": "full attention", "window": "window, same bytes", "cca": "CCA"}
"""Titles of methods in tables; others, as the preset "default", are called by their names."""
CHILD_COMMAND = [sys.executable, "-W", "ignore", "-m", "corecontext.demo.measure_method"]
ASSETS = Path(__file__).resolve().parent.parent / "assets"
BUNDLED_MODEL = str(ASSETS / "demo_model")
DOCUMENT = str(ASSETS / "document.txt")
SPARE_TOKENS = 256
"""Positions of the model behind the document: for a question, its answer and the timed tokens."""
BUNDLED_CPU_TOKENS = 22528
"""Tokens of the document that the bundled model reads on a CPU by default."""
CPU_TOKENS = 2560
"""Tokens of the document that another model reads on a CPU by default."""
LEAST_CPU_TOKENS = 1024
"""Fewest tokens of the document that another model reads because CPU_TOKENS take too long."""
LIMIT_S = 120.0
"""Most seconds of a run on a CPU by default; one that takes longer by the estimate says so."""
BUDGET_S = 100.0
"""Seconds within LIMIT_S for the estimate, which may be too low. A run that takes longer has fewer
questions by default, and one question about fewer tokens."""
FACTS = 6
"""Questions to the bundled model by default."""
NEEDLES = 3
"""Most questions to another model by default; it reads a prompt for each."""
NEEDLE_TOKENS = 128
"""Room in such a prompt for the chat template and the question, in tokens."""
MOST_QUESTIONS = 300
"""Most questions of a run: no two ask the same, and the supply of names is limited."""


@dataclass(frozen=True)
class DemoSettings:
    """Hold the model, the document and the settings of CCA."""

    model: str | None = None
    """None: the bundled model, which answers facts in the form that it was trained on."""
    document: str | None = None
    """None: the bundled document."""
    num_questions: int | None = None
    """Facts planted for the bundled model, or for another one prompts with a hidden number each.
    None: FACTS, or as many as the time allows, at most NEEDLES."""
    max_tokens: int | None = None
    """The document, facts included, is cut to this many tokens. None: the model's limit, on a CPU
    at most BUNDLED_CPU_TOKENS, or CPU_TOKENS for another model than the bundled one, and halved
    where one question takes too long."""
    attention: Mapping[str, Any] = field(default_factory=dict)
    """Settings of CCA that are given, by name; others are the checkpoint's, or the defaults."""
    dtype: str = "auto"
    device: str = "auto"

    @property
    def source(self) -> str:
        """The model's folder or name."""
        return self.model or BUNDLED_MODEL


@dataclass(frozen=True)
class DemoResult:
    """Hold the records, and the answers of each method to the questions, in their order."""

    records: list[Record]
    questions: list[Question]
    answers: Mapping[str, list[str]]


def run_demo(settings: DemoSettings) -> DemoResult:
    """Measure every method on the same prompts at the same weights.

    Raises:
        UserError: a setting breaks a rule, the document does not fit, or memory ran out.
    """
    prompts = plan(settings)
    device = pick_device(settings.device)
    measure = _measure_apart if device == "cpu" else _measure_here
    prompts, methods = _within_budget(settings, prompts)
    results = {
        method: measure(title_of(method), settings.source, options, prompts)
        for method, options in methods.items()
    }
    questions = [question for prompt in prompts for question in prompt.questions]
    measured = list(MEASURED)
    if any(result["host_bytes"] for result in results.values()):
        measured.append("host_bytes")
    records = []
    for method, result in results.items():
        asked = zip(questions, result["answers"])
        right = [question.is_correct(answer) for question, answer in asked]
        params = {
            "method": method,
            "backend": "sdpa" if method == "full" else "auto",
            "length": result["tokens"],
            "batch": 1,
            **result["sizes"],
        }
        values = {name: result[name] for name in measured}
        values["retrieval_accuracy"] = sum(right) / len(right)
        for name, value in values.items():
            records.append(make_record(f"demo.{name}", value, params, device=device_name(device)))
    answers = {method: result["answers"] for method, result in results.items()}
    return DemoResult(records, questions, answers)


def title_of(method: str) -> str:
    """Return a method's title in tables."""
    return TITLES.get(method, method)


def _methods(settings: DemoSettings, length: int) -> dict[str, dict[str, Any]]:
    """Return the options of `measure_method` for each method: full attention, a window of the bytes
    that CCA's cache of `length` tokens takes, CCA, and for some models CCA with the package's
    adapter to it."""
    common = {"dtype": settings.dtype, "device": settings.device}
    config = _config(settings)
    cca = {"method": "cca", **settings.attention, **common}
    # CCA goes by the name of its preset, if it has one.
    presets = (name for name in PRESETS if config == CCAConfig.preset(name) and config.fetch_groups)
    name = next(presets, "fetch" if config.fetch_groups else "cca")
    window = {"method": "streaming_llm", "sinks": CCAConfig.sink_size, **common}
    window["window_size"] = same_bytes_window(settings, config, length)
    methods: dict[str, dict[str, Any]] = {"full": {"method": "full", **common}}
    methods |= {"window": window, name: cca}
    adapter = find_adapter(settings.source)
    if adapter is not None and config.fetch_groups:
        methods["adapted"] = {**cca, "adapter": adapter}
    return methods


def _config(settings: DemoSettings) -> CCAConfig:
    """Return the settings of CCA."""
    return cca_config(load_config(settings.source), settings.attention)


def same_bytes_window(settings: DemoSettings, config: CCAConfig, length: int) -> int:
    """Return the window whose cache takes, sinks included, the bytes that CCA's cache of `length`
    tokens takes on the device."""
    import torch

    cost = ModelCost.of(load_config(settings.source))
    if settings.dtype != "auto":
        cost = replace(cost, itemsize=getattr(torch, settings.dtype).itemsize)
    elif pick_device(settings.device) == "cpu":
        cost = replace(cost, itemsize=torch.float32.itemsize)
    entry_bytes = cost.num_layers * cost.kv_heads * 2 * cost.head_dim * cost.itemsize
    sliding_bytes = cost.cache_bytes(length) - length * entry_bytes
    entries = (mean_bytes(cost, config, length).device - sliding_bytes) // entry_bytes
    return max(1, entries - CCAConfig.sink_size)


def _within_budget(
    settings: DemoSettings, prompts: list[Prompt]
) -> tuple[list[Prompt], dict[str, dict[str, Any]]]:
    """Print how long the command takes; return the prompts, fewer or shorter where they take too
    long on a CPU (`_smaller`), and the options of each method."""
    # Until now one thread has worked: its seconds are those since the command began.
    spent_s = time.process_time() - time.perf_counter()
    pace = Pace.of(settings.source, settings.dtype, settings.device, prompts[0].token_ids)
    spent_s += time.perf_counter()
    while True:
        methods = _methods(settings, len(prompts[0].token_ids))
        seconds = spent_s + _seconds(settings, pace, prompts, methods)
        smaller = _smaller(settings, prompts)
        if seconds <= BUDGET_S or smaller is None:
            break
        prompts = plan(smaller)
    print(_forecast(seconds, prompts, len(methods)), file=sys.stderr)
    return prompts, methods


def _seconds(
    settings: DemoSettings,
    pace: Pace,
    prompts: Sequence[Prompt],
    methods: Mapping[str, Mapping[str, Any]],
) -> float:
    """Estimate how long all methods take."""
    length = len(prompts[0].token_ids)
    cca = pace.cca(_config(settings), length, pick_device(settings.device))
    window = pace.window(methods["window"]["window_size"], length)
    works = {"full": pace.full(length), "window": window}  # all others are CCA
    return sum(pace.seconds(works.get(method, cca), prompts) for method in methods)


def _smaller(settings: DemoSettings, prompts: Sequence[Prompt]) -> DemoSettings | None:
    """Return the settings of the next smaller run on a CPU: a question fewer, or one question about
    half of the tokens; None where these are as few as can be, or as given."""
    if pick_device(settings.device) != "cpu":
        return None
    count = len(prompts)
    if settings.num_questions is None and count > 1:
        return replace(settings, num_questions=count - 1)
    if count > 1 or settings.max_tokens is not None or settings.model is None:
        return None
    length = len(prompts[0].token_ids)
    # Twice those that CCA needs: a window that holds most of a prompt would show nothing.
    least = max(LEAST_CPU_TOKENS, 2 * _least_tokens(settings, NEEDLE_TOKENS))
    if length <= least:
        return None
    return replace(settings, num_questions=1, max_tokens=max(least, length // 2))


def _least_tokens(settings: DemoSettings, added: int) -> int:
    """Return the fewest tokens of which CCA differs from full attention, where `added` of them are
    not the document's."""
    config = _config(settings)
    return config.window_size + config.group_size + added


def _forecast(seconds: float, prompts: Sequence[Prompt], num_methods: int) -> str:
    """Say how long the command takes, and what to do where that is longer than it should be."""
    count = len(prompts)
    length = len(prompts[0].token_ids)
    text = (
        f"{num_methods} methods read {count} prompt{'s' * (count > 1)} of {length} tokens: about "
        f"{round(seconds)} seconds in all, by measured beginnings"
    )
    if seconds <= LIMIT_S:
        return text
    options = "--max-tokens or --questions" if count > 1 else "--max-tokens"
    return (
        f"{text}. This takes longer than two minutes: a smaller model takes less time, and so does "
        f"a smaller number for {options}."
    )


def plan(settings: DemoSettings) -> list[Prompt]:
    """Make the prompts, and check the settings before any model runs.

    Raises:
        UserError: a setting breaks a rule, or the document does not fit.
    """
    # Checks that need no model come first.
    cca_config(None, settings.attention)
    is_bundled = settings.model is None
    count = settings.num_questions
    if count is None:
        count = FACTS if is_bundled else NEEDLES
    if count < 1:
        raise UserError(f"questions must be at least 1, got {count}.")
    if count > MOST_QUESTIONS:
        raise UserError(f"questions must be at most {MOST_QUESTIONS}, got {count}.")
    # The length of the document.
    model = settings.source
    limit = load_config(model).get_text_config(decoder=True).max_position_embeddings - SPARE_TOKENS
    max_tokens = settings.max_tokens
    if max_tokens is None:
        max_tokens = limit
        if pick_device(settings.device) == "cpu":
            max_tokens = min(limit, BUNDLED_CPU_TOKENS if is_bundled else CPU_TOKENS)
    from transformers import AutoTokenizer

    with one_line(f"model '{model}' cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(model)
    if max_tokens > limit:
        raise UserError(f"max-tokens must be at most {limit} for this model, got {max_tokens}.")
    # The questions, in a form that the model was trained on.
    document = read_text(settings.document or DOCUMENT)
    if is_bundled:
        prompts = [fact_prompt(tokenizer, document, count, max_tokens)]
        added = prompts[0].is_counted.count(False)  # tokens that are not the document's
    else:
        prompts = needle_prompts(tokenizer, document, count, max_tokens)
        added = NEEDLE_TOKENS
    least = _least_tokens(settings, added)
    tokens = len(prompts[0].token_ids)
    if tokens < least:
        raise UserError(
            f"max-tokens must be at least {least}: the planted facts, and window-size + group-size "
            f"tokens of the document for CCA to differ from full attention, got {tokens} tokens."
        )
    return prompts


def _measure_here(
    title: str, model: str, options: Mapping[str, Any], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Measure a method in this process, where the allocator of a GPU counts its peak memory."""
    from corecontext.demo.measure_method import measure_method

    return measure_method(title, model, options, prompts)


def _measure_apart(*arguments: Any) -> dict[str, Any]:
    """Measure a method by the arguments of `_measure_here` in a process of its own, since on a CPU
    the peak memory is the process's."""
    child = subprocess.run(
        CHILD_COMMAND, input=pickle.dumps(arguments), stdout=subprocess.PIPE, env=package_path()
    )
    if child.returncode == -signal.SIGKILL:  # the kernel's out-of-memory killer
        raise UserError(
            "out of memory: the system stopped the demo. Use --max-tokens with a smaller number."
        )
    if child.returncode:
        raise RuntimeError(f"the process that measures {arguments[0]} failed; its error is above.")
    outcome = pickle.loads(child.stdout)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome
