"""Questions about one of many passages (after "Lost in the Middle", arXiv 2307.03172): exact match
of an answer.

Files: multidoc_qa_pool (doc_id, title, text) and multidoc_qa_test (qid, question, answers,
gold_doc, hard: distractors in order of likeness, contains_answer: never used as such).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from corecontext.data.readers import find_file, read_lines
from corecontext.eval.items import Generated, Item, Question, Settings
from corecontext.eval.scores import contains_answer
from corecontext.eval.subject import Subject
from corecontext.files import UserError

FILES = ("multidoc_qa_pool", "multidoc_qa_test")
MAX_NEW_TOKENS = 100
_ASK = (
    "Write a high-quality answer for the given question using only the provided search results (some of which "
    "might be irrelevant)."
)


def items(folder: str | Path, settings: Settings, subject: Subject) -> list[Item]:
    """Each question with the right passage at each of several places among so many passages."""
    pool = {
        one["doc_id"]: one
        for one in read_lines(find_file(folder, FILES[:1]), ("doc_id", "title", "text"))
    }
    questions = list(
        read_lines(find_file(folder, FILES[1:]), ("qid", "question", "answers", "gold_doc"))
    )
    for one in questions:
        if one["gold_doc"] not in pool or not isinstance(one["answers"], list):
            raise UserError(
                f"gold_doc must be a passage of the pool and answers a list, got {one['gold_doc']!r} and "
                f"{one['answers']!r} in question {one['qid']}."
            )
    found: list[Item] = []
    for count in settings.documents:
        if not 1 <= count <= len(pool):
            raise UserError(
                f"documents must lie between 1 and the {len(pool)} passages there are, got {count}."
            )
        for question in questions[: settings.limit]:
            for place in gold_places(count, settings.positions):
                found.append(
                    Generated(
                        f"{question['qid']}/{count}/{place}",
                        {"documents": count, "position": place},
                        lambda q=question, n=count, at=place: Question(
                            prompt_of(q, passages(pool, q, n, at, settings.seed)), q["answers"]
                        ),
                        settings.max_new_tokens or MAX_NEW_TOKENS,
                        contains_answer,
                        ("\n",),
                    )
                )
    return found


def gold_places(count: int, positions: int) -> list[int]:
    """Evenly spaced places from the first to the last, counted from 0."""
    if positions == 1:
        return [(count - 1) // 2]
    return sorted({round(i * (count - 1) / (positions - 1)) for i in range(positions)})


def passages(
    pool: dict[str, dict[str, Any]], question: dict[str, Any], count: int, gold_at: int, seed: int
) -> list[dict[str, Any]]:
    """`count` passages with the right one at `gold_at`: likely distractors first, then a seeded
    sample."""
    hard = [one for one in question.get("hard", ()) if one in pool]
    never = {question["gold_doc"], *question.get("contains_answer", ())}
    rest = sorted(set(pool) - set(hard) - never)
    random.Random(f"{seed}-{question['qid']}").shuffle(rest)
    picked = (hard + rest)[: count - 1]
    if len(picked) < count - 1:
        raise UserError(
            f"documents must be at most {len(picked) + 1} for question {question['qid']}, got {count}."
        )
    picked.insert(gold_at, question["gold_doc"])
    return [pool[one] for one in picked]


def prompt_of(question: dict[str, Any], documents: list[dict[str, Any]]) -> str:
    """Instruction, numbered passages, question."""
    listed = "\n".join(
        f"Document [{i}](Title: {one['title']}) {one['text']}" for i, one in enumerate(documents, 1)
    )
    return f"{_ASK}\n\n{listed}\n\nQuestion: {question['question']}\nAnswer:"
