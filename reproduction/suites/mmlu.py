"""MMLU (arXiv 2009.03300): the most likely of A to D after a question and its examples.

Files: mmlu_dev (the examples) and mmlu_test or mmlu_test_subset: subject, question, choices, answer
(A to D). With `num_groups` the model's group size grows with each prompt, so that the number of
core tokens stays constant.
"""

from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from corecontext.data.readers import find_file, read_lines
from corecontext.eval.items import Settings, check_subtasks
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from reproduction.suites.choices import Chosen

FILES = ("mmlu_dev", "mmlu_test", "mmlu_test_subset")
LETTERS = "ABCD"
SHOTS = 5
"""Examples before a question."""
_KEYS = ("subject", "question", "choices", "answer")


def items(folder: str | Path, settings: Settings, subject: ModelSubject) -> list[Chosen]:
    """Return all questions; `limit` is by subject, subtasks are subjects."""
    examples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(find_file(folder, FILES[:1]), _KEYS):
        examples[row["subject"]].append(row)
    counts: Counter[str] = Counter()
    questions: list[Chosen] = []
    rows = list(read_lines(find_file(folder, FILES[1:]), _KEYS))
    subjects = {row["subject"] for row in rows}
    check_subtasks(settings.subtasks, sorted(subjects))
    for number, row in enumerate(rows):
        field = row["subject"]
        if settings.subtasks and field not in settings.subtasks:
            continue
        counts[field] += 1
        if settings.limit is not None and counts[field] > settings.limit:
            continue
        if row["answer"] not in tuple(LETTERS) or len(row["choices"]) != len(LETTERS):
            raise UserError(
                "answers must be A to D with four choices, got "
                f"{row['answer']!r} in question {number + 1}."
            )
        shots = examples[field][:SHOTS]
        if len(shots) < SHOTS:
            raise UserError(f"examples must be at least {SHOTS} for {field}, got {len(shots)}.")
        questions.append(
            Chosen(
                f"{field}/{row.get('idx', number)}",
                {"subtask": field, "shots": SHOTS},
                partial(_fitting_prompt, subject, row, shots),
                tuple(f" {letter}" for letter in LETTERS),
                LETTERS.index(row["answer"]),
            )
        )
    return questions


def _fitting_prompt(
    subject: ModelSubject, question: dict[str, Any], shots: list[dict[str, Any]]
) -> str:
    """Return the prompt with as many of the first examples as the model's limit allows."""
    while True:
        prompt = prompt_of(question, shots)
        # mutant eval: a prompt of MMLU without room for its letter
        if not shots or subject.limit is None or len(subject.encode_prompt(prompt)) < subject.limit:
            return prompt
        shots = shots[:-1]


def prompt_of(question: dict[str, Any], shots: list[dict[str, Any]]) -> str:
    """Return the subject line, examples with their answers, and the question."""
    field = question["subject"].replace("_", " ")
    head = f"The following are multiple choice questions (with answers) about {field}."
    examples = [f"{_block(shot)} {shot['answer']}" for shot in shots]
    return "\n\n".join([head, *examples, _block(question)])


def _block(row: dict[str, Any]) -> str:
    choices = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, row["choices"]))
    return f"{row['question'].strip()}\n{choices}\nAnswer:"
