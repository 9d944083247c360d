"""Run the demo: one process per method, then records and tables. Started by `corecontext demo`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corecontext import cost
from corecontext.config import CCAConfig
from corecontext.demo.task import Question, Task, make_task
from corecontext.files import UserError, read_text
from corecontext.loading import METHODS, load_config, one_line, pick_device
from corecontext.measure import package_path
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress

CHILD = [sys.executable, "-m", "corecontext.demo.measure_method"]
ASSETS = Path(__file__).resolve().parent.parent / "assets"


@dataclass(frozen=True)
class DemoSettings:
    """What to show."""

    group_size: int = 16
    window_size: int = 512
    num_questions: int = 6
    max_tokens: int | None = None
    """Cut the document so that it has at most this many tokens with its facts; None takes all of
    it."""
    model: str = str(ASSETS / "demo_model")
    document: str = str(ASSETS / "document.txt")
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class DemoResult:
    """What was seen: the records, and what each method answered."""

    records: list[Record]
    questions: list[Question]
    answers: Mapping[str, list[str]]

    def value(self, name: str, method: str) -> float:
        """One measured value."""
        return next(
            r.value
            for r in self.records
            if r.name == f"demo.{name}" and r.params["method"] == method
        )


def run_demo(settings: DemoSettings) -> DemoResult:
    """Measure every method on the same document at the same weights.

    Raises:
        UserError: a setting is bad, the document does not fit, or memory ran out.
    """
    task = plan(settings)
    results = {method: _run_in_process(method, settings, task) for method in METHODS[::-1]}
    device = device_name(pick_device(settings.device))
    records = []
    for method, result in results.items():
        right = [
            question.fact.is_correct(answer)
            for question, answer in zip(task.questions, result["answers"])
        ]
        params = {
            "method": method,
            "backend": "sdpa" if method == "full" else "auto",
            "length": result["tokens"],
            "batch": 1,
            **result["sizes"],
        }
        for name, value in (
            ("first_token_s", result["first_token_s"]),
            ("next_token_ms", result["next_token_ms"]),
            ("cache_bytes", result["cache_bytes"]),
            ("peak_bytes", result["peak_bytes"]),
            ("perplexity", result["perplexity"]),
            ("retrieval_accuracy", sum(right) / len(right)),
        ):
            records.append(make_record(f"demo.{name}", value, params, device=device))
    return DemoResult(
        records, task.questions, {method: result["answers"] for method, result in results.items()}
    )


def plan(settings: DemoSettings) -> Task:
    """Check everything that can be checked before any model runs, and make the task."""
    with one_line():
        CCAConfig(settings.group_size, settings.window_size)
    if settings.num_questions < 1:
        raise UserError(f"questions must be at least 1, got {settings.num_questions}.")
    if settings.num_questions > 300:  # no two ask the same, and names are not without end
        raise UserError(f"questions must be at most 300, got {settings.num_questions}.")
    limit = load_config(settings.model).get_text_config(decoder=True).max_position_embeddings
    from transformers import AutoTokenizer

    with one_line(f"model '{settings.model}' cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
    spare = 256  # for a question, its answer and the timed tokens
    if settings.max_tokens is not None and settings.max_tokens > limit - spare:
        raise UserError(
            f"max-tokens must be at most {limit - spare} for this model, got {settings.max_tokens}."
        )
    task = make_task(
        tokenizer,
        read_text(settings.document),
        num_questions=settings.num_questions,
        max_tokens=min(
            limit if settings.max_tokens is None else settings.max_tokens, limit - spare
        ),
    )
    needed = settings.window_size + settings.group_size + task.document_mask.count(False)
    if len(task.token_ids) < needed:
        raise UserError(
            f"max-tokens must be at least {needed}: the planted facts, and window-size + group-size tokens "
            f"of the document for CCA to differ from full attention, got {len(task.token_ids)} tokens."
        )
    return task


def formula_bytes(record: Record) -> int:
    """What the cache of a record's method must hold, by the formula."""
    p = record.params
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}[p["dtype"]]
    return cost.cache_bytes(
        p["length"],
        p["layers"],
        p["kv_heads"],
        p["head_dim"],
        itemsize,
        group_size=p.get("group_size", 1),
        window_size=p.get("window_size", 1),
    )


def _run_in_process(method: str, settings: DemoSettings, task: Task) -> dict[str, Any]:
    """One method in a fresh process; its progress becomes a bar here."""
    order = {
        "model": settings.model,
        "method": method,
        "group_size": settings.group_size,
        "window_size": settings.window_size,
        "dtype": settings.dtype,
        "device": settings.device,
        "task": task.to_json(),
    }
    title = {"full": "full attention", "cca": "CCA"}[method]
    result = None
    with (
        tempfile.TemporaryFile("w+") as errors,
        progress(f"{title}, {len(task.token_ids)} tokens", 1.0) as advance,
    ):
        child = subprocess.Popen(
            CHILD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=package_path(),
        )
        try:
            assert child.stdin is not None and child.stdout is not None
            with contextlib.suppress(
                BrokenPipeError
            ):  # a child that died at once; its exit code says why
                child.stdin.write(json.dumps(order))
                child.stdin.close()
            for line in child.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise UserError(message["error"])
                advance(message.get("advance", 0.0))
                result = message.get("result", result)
            child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if result is None:
            if child.returncode == -9:
                raise UserError(
                    "out of memory: the system stopped the demo. Use --max-tokens with a smaller number."
                )
            errors.seek(0)
            raise RuntimeError(f"the process that measures {title} failed:\n{errors.read()}")
    return result
