"""Data of the tasks that lm-evaluation-harness runs from local files; the YAML files here name
them.

Each function receives the content of `--metadata`: {"data": FOLDER} and fields of `Settings`.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from corecontext.data.readers import find_file
from corecontext.eval import multidoc_qa
from corecontext.eval.items import Settings
from corecontext.eval.windows import FILES, documents
from corecontext.files import UserError


class _NoModel:
    """Prompts are made before the harness loads its model, so they are never cut to its limit."""

    limit = None


def _settings(metadata: dict[str, Any]) -> tuple[str, Settings]:
    """Return the folder, and the task's settings."""
    if not metadata.get("data"):
        raise UserError('data must be given, got none. Use --metadata \'{"data": "FOLDER"}\'.')
    fields = {k: v for k, v in metadata.items() if k in Settings._fields}
    return metadata["data"], Settings(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    )


def perplexity(**metadata: Any) -> dict[str, Dataset]:
    """Return whole documents of lm_test."""
    folder, settings = _settings(metadata)
    texts = [text for _, _, text in documents(find_file(folder, FILES), settings)]
    return {"test": Dataset.from_dict({"text": texts[: settings.limit]})}


def multidoc_questions(**metadata: Any) -> dict[str, Dataset]:
    """Return multi-document QA prompts; {"documents": [20, 48]} sets the numbers of passages."""
    folder, settings = _settings(metadata)
    questions = [item.make() for item in multidoc_qa.items(folder, settings, _NoModel())]
    rows = [{"prompt": x.prompt, "answers": list(x.references)} for x in questions]
    return {"test": Dataset.from_list(rows)}


def score_answer(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return exact match of multi-document QA."""
    return {"exact_match": multidoc_qa.contains_answer(results[0], doc["answers"])}
