"""Run the demo: every method reads the same prompts, and what was measured becomes records."""

import pickle
import signal
import subprocess
import sys
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
TITLES = {
    "full": "full attention",
    "window": "window, same bytes",
    "cca": "CCA",
}
"""Titles of methods; others, such as presets, have their names."""
CHILD_COMMAND = [sys.executable, "-W", "ignore", "-m", "corecontext.demo.measure_method"]
ASSETS = Path(__file__).resolve().parent.parent / "assets"
BUNDLED_MODEL = str(ASSETS / "demo_model")
DOCUMENT = str(ASSETS / "document.txt")
SPARE_TOKENS = 256
"""Room for a question, its answer and the timed tokens."""
CPU_TOKENS = 2560
"""Tokens of the document that another model than the bundled one reads on a CPU by default."""
BUDGET_S = 95.0
"""Estimated seconds of a run on a CPU, of two minutes with its start and the estimate; a model that
takes longer is asked fewer questions."""
FACTS = 6
"""Questions by default, of the bundled model."""
NEEDLES = 3
"""Most questions by default of another model, which reads a prompt for each."""
NEEDLE_TOKENS = 128
"""Room in a prompt for the template and the question."""
MOST_QUESTIONS = 300
"""Most questions of a run: no two ask the same, and the supply of names is limited."""


@dataclass(frozen=True)
class DemoSettings:
    """The model, the document and the settings of CCA."""

    model: str | None = None
    """None: the bundled model, which answers facts in the form that it was trained on."""
    document: str | None = None
    """None: the bundled document."""
    num_questions: int | None = None
    """Facts planted for the bundled model, or prompts with a number each for another; None: FACTS,
    or as many as the time allows, at most NEEDLES."""
    max_tokens: int | None = None
    """Cut the document, facts included, to this many tokens; None means the model's limit, on a CPU
    at most CPU_TOKENS for another model than the bundled one."""
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
    """The records, and the answers of each method."""

    records: list[Record]
    questions: list[Question]
    answers: Mapping[str, list[str]]


def run_demo(settings: DemoSettings) -> DemoResult:
    """Measure every method on the same prompts at the same weights.

    Raises:
        UserError: a setting is bad, the document does not fit, or memory ran out.
    """
    prompts = plan(settings)
    device = pick_device(settings.device)
    measure = _measure_apart if device == "cpu" else _measure_here
    methods = _methods(settings, len(prompts[0].token_ids))
    prompts = _within_budget(settings, prompts, methods)
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
        answers = zip(questions, result["answers"])
        right = [question.is_correct(answer) for question, answer in answers]
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
    texts = {method: result["answers"] for method, result in results.items()}
    return DemoResult(records, questions, texts)


def title_of(method: str) -> str:
    """Return a method's title in tables."""
    return TITLES.get(method, method)


def _methods(settings: DemoSettings, length: int) -> dict[str, dict[str, Any]]:
    """Return the options of each method to load: full attention, a window of the same bytes, the
    settings, and these with the package's adapter for the model."""
    common = {"dtype": settings.dtype, "device": settings.device}
    config = _config(settings)
    ours = {"method": "cca", **settings.attention, **common}
    presets = (name for name in PRESETS if config == CCAConfig.preset(name) and config.fetch_groups)
    name = next(presets, "fetch" if config.fetch_groups else "cca")
    window = {"method": "streaming_llm", "sinks": CCAConfig.sink_size, **common}
    window["window_size"] = same_bytes_window(settings, config, length)
    methods: dict[str, dict[str, Any]] = {"full": {"method": "full", **common}}
    methods |= {"window": window, name: ours}
    adapter = find_adapter(settings.source)
    if adapter is not None and config.fetch_groups:
        methods["adapted"] = {**ours, "adapter": adapter}
    return methods


def _config(settings: DemoSettings) -> CCAConfig:
    """Return the settings of CCA."""
    return cca_config(load_config(settings.source), settings.attention)


def same_bytes_window(settings: DemoSettings, config: CCAConfig, length: int) -> int:
    """Return the window that takes, with the first tokens, the bytes of a cache of `length` tokens
    on the device."""
    import torch

    cost = ModelCost.of(load_config(settings.source))
    if settings.dtype != "auto":
        cost = replace(cost, itemsize=getattr(torch, settings.dtype).itemsize)
    elif pick_device(settings.device) == "cpu":
        cost = replace(cost, itemsize=torch.float32.itemsize)
    entry = cost.num_layers * cost.kv_heads * 2 * cost.head_dim * cost.itemsize
    sliding = cost.cache_bytes(length) - length * entry
    entries = (mean_bytes(cost, config, length).device - sliding) // entry
    return max(1, entries - CCAConfig.sink_size)


def _within_budget(
    settings: DemoSettings, prompts: list[Prompt], methods: Mapping[str, Mapping[str, Any]]
) -> list[Prompt]:
    """Say how long the run takes; return fewer prompts where the default number takes too long on a
    CPU."""
    device = pick_device(settings.device)
    pace = Pace.of(settings.source, settings.dtype, settings.device, prompts[0].token_ids)
    length = len(prompts[0].token_ids)
    ours = pace.settings(_config(settings), length, device)
    window = pace.window(methods["window"]["window_size"], length)
    works = {"full": pace.full(length), "window": window}

    def seconds(count: int) -> float:
        return sum(pace.seconds(works.get(method, ours), count, length) for method in methods)

    most = len(prompts)
    can_be_fewer = device == "cpu" and settings.num_questions is None
    while can_be_fewer and most > 1 and seconds(most) > BUDGET_S:
        most -= 1
    if most < len(prompts):
        prompts = plan(replace(settings, num_questions=most))
    print(
        f"{len(methods)} methods read {most} prompt{'s' * (most > 1)} of {length} tokens: about "
        f"{round(seconds(most))} seconds, by measured beginnings",
        file=sys.stderr,
    )
    return prompts


def plan(settings: DemoSettings) -> list[Prompt]:
    """Make the prompts, and check the settings before any model runs.

    Raises:
        UserError: a setting is bad, or the document does not fit.
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
        is_slow = not is_bundled and pick_device(settings.device) == "cpu"
        max_tokens = min(limit, CPU_TOKENS) if is_slow else limit
    from transformers import AutoTokenizer

    with one_line(f"model '{model}' cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(model)
    if max_tokens > limit:
        raise UserError(f"max-tokens must be at most {limit} for this model, got {max_tokens}.")
    # The questions, in a form that the model was trained on.
    document = read_text(settings.document or DOCUMENT)
    if is_bundled:
        prompts = [fact_prompt(tokenizer, document, count, max_tokens)]
        asked = prompts[0].is_counted.count(False)
    else:
        prompts = needle_prompts(tokenizer, document, count, max_tokens)
        asked = NEEDLE_TOKENS
    config = _config(settings)
    least = config.window_size + config.group_size + asked
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
    """Measure a method in this process: a GPU's allocator counts its peak memory."""
    from corecontext.demo.measure_method import measure_method

    return measure_method(title, model, options, prompts)


def _measure_apart(*order: Any) -> dict[str, Any]:
    """Measure a method in a process of its own: on a CPU the peak memory is the process's."""
    done = subprocess.run(
        CHILD_COMMAND, input=pickle.dumps(order), stdout=subprocess.PIPE, env=package_path()
    )
    if done.returncode == -signal.SIGKILL:  # the kernel's out-of-memory killer
        raise UserError(
            "out of memory: the system stopped the demo. Use --max-tokens with a smaller number."
        )
    if done.returncode:
        raise RuntimeError(f"the process that measures {order[0]} failed; its error is above.")
    outcome = pickle.loads(done.stdout)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome
