"""Run the demo: measure each method in its own process and make the records."""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corecontext import cost
from corecontext.config import DEFAULT_GROUP_SIZE, CCAConfig
from corecontext.demo.needle_prompts import ChatTask, make_chat_task
from corecontext.demo.task import Question, Task, make_task
from corecontext.files import UserError, read_text
from corecontext.integrations.hf.adapter import find_adapter
from corecontext.loading import load_config, one_line, pick_device
from corecontext.measure import package_path
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress
from corecontext.train.train_config import RECIPES
from corecontext.visibility import num_sinks

MEASURED = ("first_token_s", "next_token_ms", "cache_bytes", "peak_bytes", "perplexity")
TITLES = {
    "full": "full attention",
    "cca": "CCA",
    "streaming_llm": "sinks + window",
    "fetch": "fetch",
    "adapted": "fetch, adapted",
}
FETCH_SIZES = ("group_size", "window_size", "fetch_groups", "fetch_index", "store")
FETCH = {name: RECIPES["fetch"][name] for name in FETCH_SIZES}
"""Fetch on a chat model: as `corecontext train` adapts it."""
CHILD_COMMAND = [sys.executable, "-m", "corecontext.demo.measure_method"]
ASSETS = Path(__file__).resolve().parent.parent / "assets"
SPARE_TOKENS = 256
"""Room for a question, its answer and the timed tokens."""
CPU_TOKENS = 2560
"""Tokens of the document that another model than the bundled one reads on a CPU by default: within
minutes, each method for itself."""
FACTS = 6
"""Questions by default, of a model without a chat template."""
NEEDLES = 3
"""Questions by default of a chat model, which reads a prompt for each."""
CHAT_TOKENS = 128
"""Room for the template and the question of a chat."""
MOST_QUESTIONS = 300
"""Most questions of a run: no two ask the same, and the supply of names is limited."""


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of CCA, the model and the document."""

    group_size: int = DEFAULT_GROUP_SIZE
    window_size: int = 512
    num_questions: int | None = None
    """Facts planted, or for a chat model prompts with a number each; None: FACTS or NEEDLES."""
    max_tokens: int | None = None
    """Cut the document, facts included, to this many tokens; None means the model's limit, on a CPU
    at most CPU_TOKENS for another model than the bundled one."""
    sinks: int = 0
    """First tokens kept raw under CCA. With them a model without a chat template has a third
    method, which keeps only them and a window, as many entries."""
    model: str = str(ASSETS / "demo_model")
    document: str = str(ASSETS / "document.txt")
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class DemoResult:
    """The records, and the answers of each method."""

    records: list[Record]
    questions: list[Question]
    answers: Mapping[str, list[str]]


def run_demo(settings: DemoSettings) -> DemoResult:
    """Measure every method on the same document at the same weights.

    Raises:
        UserError: a setting is bad, the document does not fit, or memory ran out.
    """
    task = plan(settings)
    results = {
        method: _run_in_subprocess(method, settings, task) for method in _methods(settings, task)
    }
    device = device_name(pick_device(settings.device))
    measured = list(MEASURED)
    if any(result.get("host_bytes") for result in results.values()):
        measured.append("host_bytes")
    records = []
    for method, result in results.items():
        answers = zip(task.questions, result["answers"])
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
            records.append(make_record(f"demo.{name}", value, params, device=device))
    texts = {method: result["answers"] for method, result in results.items()}
    return DemoResult(records, task.questions, texts)


def _methods(settings: DemoSettings, task: Task | ChatTask) -> dict[str, dict[str, Any]]:
    """Return the options of each method to load, full attention first."""
    g = settings.group_size
    s = settings.window_size
    sinks = settings.sinks
    common = {"dtype": settings.dtype, "device": settings.device}
    cca = {"method": "cca", "group_size": g, "window_size": s, "sinks": sinks, **common}
    methods: dict[str, dict[str, Any]] = {"full": {"method": "full", **common}, "cca": cca}
    if isinstance(task, ChatTask):
        methods["fetch"] = {**cca, **FETCH}
        adapter = find_adapter(settings.model)
        if adapter is not None:
            methods["adapted"] = {**methods["fetch"], "adapter": adapter}
    elif sinks:
        length = len(task.token_ids)
        entries = cost.cache_entries(length, g, s, sinks=num_sinks(sinks, g))
        sizes = {"window_size": entries - sinks, "sinks": sinks}
        methods["streaming_llm"] = {"method": "streaming_llm", **sizes, **common}
    return methods


def plan(settings: DemoSettings) -> Task | ChatTask:
    """Make the task, and check the settings before any model runs.

    Raises:
        UserError: a setting is bad, or the document does not fit.
    """
    # Checks that need no model come first.
    with one_line():
        CCAConfig(settings.group_size, settings.window_size, sink_size=settings.sinks)
    count = settings.num_questions
    if count is None:
        count = FACTS
    if count < 1:
        raise UserError(f"questions must be at least 1, got {count}.")
    if count > MOST_QUESTIONS:
        raise UserError(f"questions must be at most {MOST_QUESTIONS}, got {count}.")
    # The length of the document.
    text_config = load_config(settings.model).get_text_config(decoder=True)
    limit = text_config.max_position_embeddings - SPARE_TOKENS
    max_tokens = settings.max_tokens
    if max_tokens is None:
        is_slow = settings.model != DemoSettings.model and pick_device(settings.device) == "cpu"
        max_tokens = min(limit, CPU_TOKENS) if is_slow else limit
    from transformers import AutoTokenizer

    with one_line(f"model '{settings.model}' cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
    if max_tokens > limit:
        raise UserError(f"max-tokens must be at most {limit} for this model, got {max_tokens}.")
    # The questions, in the form that the model was trained on.
    document = read_text(settings.document)
    task: Task | ChatTask
    if tokenizer.chat_template:
        prompts = settings.num_questions or NEEDLES
        task = make_chat_task(tokenizer, document, prompts, max_tokens)
        planted = CHAT_TOKENS
    else:
        task = make_task(tokenizer, document, num_questions=count, max_tokens=max_tokens)
        planted = task.document_mask.count(False)
    needed = settings.window_size + settings.group_size + planted
    if len(task.token_ids) < needed:
        raise UserError(
            f"max-tokens must be at least {needed}: the planted facts, and window-size + "
            "group-size tokens of the document for CCA to differ from full attention, got "
            f"{len(task.token_ids)} tokens."
        )
    return task


def formula_bytes(record: Record) -> int:
    """Return the cache size of a record's method by the formula."""
    import torch

    params = record.params
    g = params.get("group_size", 1)
    sinks = num_sinks(params.get("sinks", 0), g)
    entries = cost.cache_entries(params["length"], g, params.get("window_size", 1), sinks=sinks)
    itemsize = getattr(torch, params["dtype"]).itemsize
    config = CCAConfig(g, core_mass=params.get("core_mass", False))
    heads = params["layers"] * params["kv_heads"]
    return entries * heads * cost.entry_bytes(config, params["head_dim"], itemsize)


def _run_in_subprocess(
    method: str, settings: DemoSettings, task: Task | ChatTask
) -> dict[str, Any]:
    """Run one method in a fresh process; its progress becomes a bar here."""
    options = _methods(settings, task)[method]
    title = TITLES[method]
    result = None
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        tempfile.TemporaryFile("w+") as errors,
        progress(f"{title}, {len(task.token_ids)} tokens", 1.0) as advance,
    ):
        child = subprocess.Popen(CHILD_COMMAND, stderr=errors, env=package_path(), **pipes)
        try:
            assert child.stdin is not None and child.stdout is not None
            # A child that died at once breaks the pipe; its exit code says why.
            with contextlib.suppress(BrokenPipeError), child.stdin:
                pickle.dump((settings.model, options, task), child.stdin)
            for line in child.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise UserError(message["error"])
                advance(message.get("advance", 0.0))
                result = message.get("result", result)
            child.wait()
        finally:
            child.kill()
            child.wait()
        if result is not None:
            return result
        if child.returncode == -signal.SIGKILL:  # the kernel's out-of-memory killer
            raise UserError(
                "out of memory: the system stopped the demo. Use --max-tokens with a smaller "
                "number."
            )
        errors.seek(0)
        raise RuntimeError(f"the process that measures {title} failed:\n{errors.read()}")
