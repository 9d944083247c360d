"""Data of the tasks that lm-evaluation-harness runs from local files; the YAML files beside this
one name them.

Each function gets what `--metadata` holds: {"data": FOLDER} and what the task's own `Settings` has.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from corecontext.data.readers import find_file, read_documents
from corecontext.eval import mmlu, multidoc_qa
from corecontext.eval.items import Settings
from corecontext.eval.scores import contains_answer
from corecontext.eval.windows import FILES
from corecontext.files import UserError


class _NoModel:
    """Prompts are made before the harness has loaded its model, so they are never cut to its
    limit."""

    limit = None


def _settings(metadata: dict[str, Any]) -> tuple[str, Settings]:
    """The folder, and what the task may be told."""
    if not metadata.get("data"):
        raise UserError('data must be given, got none. Use --metadata \'{"data": "FOLDER"}\'.')
    known = {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in metadata.items()
        if k in Settings._fields
    }
    return metadata["data"], Settings(**known)


def perplexity(**metadata: Any) -> dict[str, Dataset]:
    """Whole documents of lm_test."""
    folder, settings = _settings(metadata)
    texts = [
        text
        for _, domain, text in read_documents(find_file(folder, FILES))
        if not settings.subtasks or domain in settings.subtasks
    ]
    return {"test": Dataset.from_dict({"text": texts[: settings.limit]})}


def mmlu_questions(**metadata: Any) -> dict[str, Dataset]:
    """MMLU prompts with their examples."""
    folder, settings = _settings(metadata)
    items = mmlu.items(folder, settings, _NoModel())
    return {
        "test": Dataset.from_dict(
            {"prompt": [one.make() for one in items], "right": [one.right for one in items]}
        )
    }


def multidoc_questions(**metadata: Any) -> dict[str, Dataset]:
    """Multi-document QA prompts; {"documents": [20, 48]} sets the numbers of passages."""
    folder, settings = _settings(metadata)
    asked = [one.make() for one in multidoc_qa.items(folder, settings, _NoModel())]
    return {
        "test": Dataset.from_dict(
            {
                "prompt": [one.prompt for one in asked],
                "answers": [list(one.references) for one in asked],
            }
        )
    }


def score_answer(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Exact match of multi-document QA."""
    return {"exact_match": contains_answer(results[0], doc["answers"])}
