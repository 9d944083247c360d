"""LongBench-E (arXiv 2308.14508): 13 tasks in six categories, from the benchmark's own files.

Files: longbench_config.json (dataset2prompt, dataset2maxlen: the benchmark's templates and limits)
and one file a task, `TASK_e.jsonl` or `TASK.jsonl` (input, context, answers, length, all_classes).
Prompts longer than the length lose their middle. A task's score is the mean of its three length
buckets, a category's the mean of its tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from corecontext.data.readers import find_file, read_json, read_lines
from corecontext.eval.items import Generated, Item, Question, Settings
from corecontext.eval.scores import (
    Metric,
    classification,
    edit_similarity,
    number_match,
    rouge_l,
    token_f1,
)
from corecontext.eval.subject import Subject
from corecontext.files import UserError

CATEGORIES = {
    "single-document QA": ("qasper", "multifieldqa_en"),
    "multi-document QA": ("hotpotqa", "2wikimqa"),
    "summaries": ("gov_report", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
SUBTASKS = tuple(task for tasks in CATEGORIES.values() for task in tasks)
METRICS: dict[str, Metric] = {
    **dict.fromkeys(("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "triviaqa"), token_f1),
    **dict.fromkeys(("gov_report", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("passage_count", "passage_retrieval_en"), number_match),
    **dict.fromkeys(("lcc", "repobench-p"), edit_similarity),
}
FIRST_LINE = ("trec", "triviaqa", "samsum")
"""Tasks of which only the answer's first line counts."""
BUCKETS = ((4000, "0-4k"), (8000, "4-8k"), (float("inf"), "8k+"))
SPARE = 500
"""Tokens left free below the model's limit where no length is given."""


def items(folder: str | Path, settings: Settings, subject: Subject) -> list[Item]:
    """All questions of the tasks asked for, of all tasks that there are files for otherwise;
    `limit` is by task."""
    config = read_json(find_file(folder, ("longbench_config",), (".json",)))
    for task in settings.subtasks:
        if task not in SUBTASKS:
            raise UserError(f"subtask must be one of {', '.join(SUBTASKS)}, got {task!r}.")
    lengths = settings.lengths or ((max(1, subject.limit - SPARE) if subject.limit else 31500),)
    found: list[Item] = []
    for task in settings.subtasks or SUBTASKS:
        try:
            path = find_file(folder, (f"{task}_e", task))
        except UserError:
            if settings.subtasks:
                raise
            continue
        rows = list(read_lines(path, ("input", "context", "answers", "length")))[: settings.limit]
        try:
            template, most = config["dataset2prompt"][task], config["dataset2maxlen"][task]
            for row in rows:
                template.format(**row)
                next(name for end, name in BUCKETS if row["length"] < end)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(
                f"{task} must have its template and limit in longbench_config, and rows that fit the "
                f"template, with a number as length; {type(error).__name__}: {error}."
            ) from None
        for length in lengths:
            for number, row in enumerate(rows):
                bucket = next(name for end, name in BUCKETS if row["length"] < end)
                found.append(
                    Generated(
                        f"{task}/{length}/{row.get('_id', number)}",
                        {"length": length, "subtask": task, "bucket": bucket},
                        partial(_question, template, row, length, subject),
                        settings.max_new_tokens or most,
                        scorer(task, row),
                    )
                )
    if not found:
        raise UserError(f"data '{folder}' must hold files such as {SUBTASKS[0]}_e.jsonl, got none.")
    return found


def _question(template: str, row: dict[str, Any], length: int, subject: Subject) -> Question:
    """The prompt, its middle cut out where it is too long."""
    prompt = template.format(**row)
    ids = subject.encode(prompt)
    if len(ids) > length:
        half = length // 2
        prompt = subject.decode(ids[:half]) + subject.decode(ids[-half:])
    return Question(prompt, row["answers"])


def scorer(task: str, row: dict[str, Any]) -> Callable[[str, Sequence[str]], float]:
    """The task's metric, highest over the references."""
    metric = (
        partial(classification, classes=row.get("all_classes") or ())
        if task == "trec"
        else METRICS[task]
    )

    def score(answer: str, references: Sequence[str]) -> float:
        if task in FIRST_LINE:
            answer = answer.lstrip("\n").split("\n")[0]
        return max((metric(answer, one) for one in references), default=0.0)

    return score
