"""MMLU (arXiv 2009.03300): which of A to D is likeliest after the question and its examples.

Files: mmlu_dev (the examples) and mmlu_test or mmlu_test_subset: subject, question, choices, answer
(A to D). With `num_groups` the model's group size grows with each prompt, so that the number of
core tokens stays constant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corecontext.data.readers import find_file, read_lines
from corecontext.eval.items import Chosen, Item, Settings
from corecontext.eval.subject import Subject
from corecontext.files import UserError

FILES = ("mmlu_dev", "mmlu_test", "mmlu_test_subset")
LETTERS = "ABCD"
_KEYS = ("subject", "question", "choices", "answer")


def items(folder: str | Path, settings: Settings, subject: Subject) -> list[Item]:
    """All questions; `limit` is by subject, subtasks are subjects."""
    examples: dict[str, list[dict[str, Any]]] = {}
    for one in read_lines(find_file(folder, FILES[:1]), _KEYS):
        examples.setdefault(one["subject"], []).append(one)
    counts: dict[str, int] = {}
    found: list[Item] = []
    for number, one in enumerate(read_lines(find_file(folder, FILES[1:]), _KEYS)):
        field = one["subject"]
        if settings.subtasks and field not in settings.subtasks:
            continue
        counts[field] = counts.get(field, 0) + 1
        if settings.limit is not None and counts[field] > settings.limit:
            continue
        if one["answer"] not in tuple(LETTERS) or len(one["choices"]) != len(LETTERS):
            raise UserError(
                "answers must be A to D with four choices, got "
                f"{one['answer']!r} in question {number + 1}."
            )
        shots = examples.get(field, [])[: settings.shots]
        if len(shots) < settings.shots:
            raise UserError(
                f"examples must be at least {settings.shots} for {field}, got {len(shots)}."
            )
        found.append(
            Chosen(
                f"{field}/{one.get('idx', number)}",
                {"subtask": field, "shots": settings.shots},
                lambda q=one, s=shots: _cropped(subject, q, s),
                tuple(f" {x}" for x in LETTERS),
                LETTERS.index(one["answer"]),
            )
        )
    return found


def _cropped(subject: Subject, question: dict[str, Any], shots: list[dict[str, Any]]) -> str:
    """The prompt with as many examples, counted from the first, as the model's limit allows."""
    for count in range(len(shots), 0, -1):
        prompt = prompt_of(question, shots[:count])
        if subject.limit is None or len(subject.encode(prompt)) < subject.limit:
            return prompt
    return prompt_of(question, [])


def prompt_of(question: dict[str, Any], shots: list[dict[str, Any]]) -> str:
    """Subject line, examples with their answers, question."""
    head = f"The following are multiple choice questions (with answers) about {question['subject'].replace('_', ' ')}."
    return "\n\n".join(
        [head, *(f"{_block(one)} {one['answer']}" for one in shots), _block(question)]
    )


def _block(one: dict[str, Any]) -> str:
    choices = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, one["choices"]))
    return f"{one['question'].strip()}\n{choices}\nAnswer:"
