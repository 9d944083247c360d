"""Run the demo: every method reads the same prompts, and what was measured becomes records."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corecontext.config import PAPER_RULE, CCAConfig
from corecontext.demo.prompts import Prompt, Question, fact_prompt, needle_prompts
from corecontext.files import UserError, read_text
from corecontext.integrations.hf.adapter import find_adapter
from corecontext.loading import load_config, one_line, pick_device
from corecontext.measure import package_path
from corecontext.record import Record, device_name, make_record

MEASURED = ("first_token_s", "next_token_ms", "cache_bytes", "peak_bytes", "perplexity")
TITLES = {
    "full": "full attention",
    "cca": "CCA",
    "fetch": "fetch",
    "adapted": "fetch, adapted",
}
CHILD_COMMAND = [sys.executable, "-W", "ignore", "-m", "corecontext.demo.measure_method"]
ASSETS = Path(__file__).resolve().parent.parent / "assets"
BUNDLED_MODEL = str(ASSETS / "demo_model")
DOCUMENT = str(ASSETS / "document.txt")
SPARE_TOKENS = 256
"""Room for a question, its answer and the timed tokens."""
CPU_TOKENS = 2560
"""Tokens of the document that another model than the bundled one reads on a CPU by default: within
minutes, each method for itself."""
FACTS = 6
"""Questions by default, of the bundled model."""
NEEDLES = 3
"""Questions by default of another model, which reads a prompt for each."""
NEEDLE_TOKENS = 128
"""Room in a prompt for the template and the question."""
MOST_QUESTIONS = 300
"""Most questions of a run: no two ask the same, and the supply of names is limited."""


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of CCA, the model and the document."""

    group_size: int = PAPER_RULE["group_size"]
    window_size: int = 512
    num_questions: int | None = None
    """Facts planted for the bundled model, or prompts with a number each for another; None: FACTS
    or NEEDLES."""
    max_tokens: int | None = None
    """Cut the document, facts included, to this many tokens; None means the model's limit, on a CPU
    at most CPU_TOKENS for another model than the bundled one."""
    sinks: int | None = None
    """First tokens kept raw under CCA; None: 0 for the bundled model, else 16."""
    model: str | None = None
    """None: the bundled model, which answers facts in the form that it was trained on."""
    document: str | None = None
    """None: the bundled document."""
    dtype: str = "auto"
    device: str = "auto"

    @property
    def sink_size(self) -> int:
        """The first tokens kept raw under CCA."""
        if self.sinks is not None:
            return self.sinks
        return 0 if self.model is None else CCAConfig.sink_size


@dataclass(frozen=True)
class DemoResult:
    """The records, and the answers of each method."""

    records: list[Record]
    questions: list[Question]
    answers: Mapping[str, list[str]]
    compact_bytes: list[int]
    """Bytes of the cache of each layer that CCA attends in."""
    formula_bytes: int
    """The same of one layer, by the formula."""


def run_demo(settings: DemoSettings) -> DemoResult:
    """Measure every method on the same prompts at the same weights.

    Raises:
        UserError: a setting is bad, the document does not fit, or memory ran out.
    """
    prompts = plan(settings)
    device = pick_device(settings.device)
    measure = _measure_apart if device == "cpu" else _measure_here
    model = settings.model or BUNDLED_MODEL
    results = {
        method: measure(TITLES[method], model, options, prompts)
        for method, options in _methods(settings).items()
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
    cca = results["cca"]
    return DemoResult(records, questions, texts, cca["compact_bytes"], cca["formula_bytes"])


def _methods(settings: DemoSettings) -> dict[str, dict[str, Any]]:
    """Return the options of each method to load, full attention first."""
    common = {"dtype": settings.dtype, "device": settings.device}
    cca = {
        "method": "cca",
        "preset": "pooling",
        "group_size": settings.group_size,
        "window_size": settings.window_size,
        "sinks": settings.sink_size,
        **common,
    }
    methods: dict[str, dict[str, Any]] = {"full": {"method": "full", **common}, "cca": cca}
    if settings.model is not None:
        methods["fetch"] = {"method": "cca", "preset": "default", **common}
        adapter = find_adapter(settings.model)
        if adapter is not None:
            # The adapter was trained so.
            methods["adapted"] = {**methods["fetch"], "fetch_groups": 32, "adapter": adapter}
    return methods


def plan(settings: DemoSettings) -> list[Prompt]:
    """Make the prompts, and check the settings before any model runs.

    Raises:
        UserError: a setting is bad, or the document does not fit.
    """
    # Checks that need no model come first.
    g = settings.group_size
    s = settings.window_size
    with one_line():
        CCAConfig.pooling(g, s, sink_size=settings.sink_size)
    is_bundled = settings.model is None
    count = settings.num_questions
    if count is None:
        count = FACTS if is_bundled else NEEDLES
    if count < 1:
        raise UserError(f"questions must be at least 1, got {count}.")
    if count > MOST_QUESTIONS:
        raise UserError(f"questions must be at most {MOST_QUESTIONS}, got {count}.")
    # The length of the document.
    model = settings.model or BUNDLED_MODEL
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
    tokens = len(prompts[0].token_ids)
    if tokens < s + g + asked:
        raise UserError(
            f"max-tokens must be at least {s + g + asked}: the planted facts, and window-size + "
            "group-size tokens of the document for CCA to differ from full attention, got "
            f"{tokens} tokens."
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
