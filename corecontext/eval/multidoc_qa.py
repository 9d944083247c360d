"""Questions about one of many passages (after "Lost in the Middle", arXiv 2307.03172): exact match
of an answer.

Files: multidoc_qa_pool has passages (doc_id, title, text); multidoc_qa_test has questions (qid,
question, answers, gold_doc: the right passage, hard: distractors, the most similar first,
contains_answer: passages never used as distractors).
"""

import random
import re
import string
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from corecontext.data.readers import find_file, read_lines
from corecontext.eval.items import Generated, Item, Question, Settings, check_subtasks
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError

FILES = ("multidoc_qa_pool", "multidoc_qa_test")
MAX_NEW_TOKENS = 100
_INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


def items(folder: str | Path, settings: Settings, subject: ModelSubject) -> list[Item]:
    """Return the items: each question among each number of passages, with the right one at each of
    several places."""
    check_subtasks(settings.subtasks, ())
    pool_path = find_file(folder, FILES[:1])
    pool = {row["doc_id"]: row for row in read_lines(pool_path, ("doc_id", "title", "text"))}
    keys = ("qid", "question", "answers", "gold_doc")
    rows = list(read_lines(find_file(folder, FILES[1:]), keys))
    for row in rows:
        if row["gold_doc"] not in pool or not isinstance(row["answers"], list):
            raise UserError(
                "gold_doc must be a passage of the pool and answers a list, got "
                f"{row['gold_doc']!r} and {row['answers']!r} in question {row['qid']}."
            )
    questions: list[Item] = []
    for count in settings.documents:
        if not 1 <= count <= len(pool):
            raise UserError(
                f"documents must lie between 1 and the {len(pool)} passages there are, got {count}."
            )
        for row in rows[: settings.limit]:
            for place in gold_places(count, settings.positions):
                questions.append(
                    Generated(
                        f"{row['qid']}/{count}/{place}",
                        {"documents": count, "position": place},
                        partial(_question, pool, row, count, place, settings.seed),
                        settings.max_new_tokens or MAX_NEW_TOKENS,
                        score=contains_answer,
                        stop=("\n",),
                    )
                )
    return questions


def gold_places(count: int, positions: int) -> list[int]:
    """Return evenly spaced places from the first to the last of `count`, from 0."""
    if positions == 1:
        return [(count - 1) // 2]
    return sorted({round(i * (count - 1) / (positions - 1)) for i in range(positions)})


def _question(
    pool: dict[str, Any], row: dict[str, Any], count: int, gold_at: int, seed: int
) -> Question:
    """Make the prompt of a question; arguments as of `passages`."""
    return Question(prompt_of(row, passages(pool, row, count, gold_at, seed)), row["answers"])


def passages(
    pool: dict[str, dict[str, Any]], question: dict[str, Any], count: int, gold_at: int, seed: int
) -> list[dict[str, Any]]:
    """Return `count` passages, the right one at place `gold_at` (from 0) among distractors: those
    of `hard`, then others in random order."""
    excluded = {question["gold_doc"], *question.get("contains_answer", ())}
    distractors = pool.keys() - excluded
    hard = [name for name in question.get("hard", ()) if name in distractors]
    rest = sorted(distractors - set(hard))
    random.Random(f"{seed}-{question['qid']}").shuffle(rest)
    names = (hard + rest)[: count - 1]
    if len(names) < count - 1:
        raise UserError(
            f"documents must be at most {len(names) + 1} for question {question['qid']}, got "
            f"{count}."
        )
    names.insert(gold_at, question["gold_doc"])
    return [pool[name] for name in names]


def prompt_of(question: dict[str, Any], documents: list[dict[str, Any]]) -> str:
    """Return the instruction, the numbered passages and the question."""
    lines = "\n".join(
        f"Document [{i}](Title: {document['title']}) {document['text']}"
        for i, document in enumerate(documents, 1)
    )
    return f"{_INSTRUCTION}\n\n{lines}\n\nQuestion: {question['question']}\nAnswer:"


def normalise(text: str) -> str:
    """Return text in lower case, without punctuation and articles, with single blanks (SQuAD)."""
    kept = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def contains_answer(answer: str, references: Sequence[str]) -> float:
    """Return 1 if a normalised reference occurs in the normalised first line of the answer, else
    0."""
    line = normalise(answer.split("\n")[0].strip())
    return float(any(normalise(reference) in line for reference in references))
