"""LongBench-E (arXiv 2308.14508): 13 tasks in six categories, from the benchmark's own files.

Files: longbench_config.json (dataset2prompt, dataset2maxlen: the benchmark's templates and limits)
and one file per task, `TASK_e.jsonl` or `TASK.jsonl` (input, context, answers, length,
all_classes). Prompts longer than the length lose their middle. A task's score is the mean of its
three length buckets, a category's the mean of its tasks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from corecontext.data.readers import find_file, read_json, read_lines
from corecontext.eval.combine import Values, group_by, mean
from corecontext.eval.items import Generated, Item, Question, Settings, check_subtasks
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from corecontext.record import Record
from reproduction.suites.scores import (
    Metric,
    classification,
    edit_similarity,
    import_rouge,
    number_match,
    rouge_l,
    token_f1,
)

CATEGORIES = {
    "single-document QA": ("qasper", "multifieldqa_en"),
    "multi-document QA": ("hotpotqa", "2wikimqa"),
    "summaries": ("gov_report", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
SUBTASKS = tuple(task for tasks in CATEGORIES.values() for task in tasks)
FILES = ("longbench_config", *SUBTASKS, *(f"{task}_e" for task in SUBTASKS))
METRICS: dict[str, Metric] = {
    **dict.fromkeys(("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "triviaqa"), token_f1),
    **dict.fromkeys(("gov_report", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("passage_count", "passage_retrieval_en"), number_match),
    **dict.fromkeys(("lcc", "repobench-p"), edit_similarity),
}
"""Metric of each task; trec's depends on its classes, see `scorer`."""
FIRST_LINE = ("trec", "triviaqa", "samsum")
"""Tasks of which only the answer's first line counts."""
CONTINUED = (*FIRST_LINE, *CATEGORIES["code"])
"""Tasks whose prompts are continued without a chat template, as in the benchmark: their examples,
or their code, end where the answer begins."""
BUCKETS = ((4000, "0-4k"), (8000, "4-8k"), (float("inf"), "8k+"))
LONGEST_ANSWER = 512
"""Most new tokens of any task in the benchmark's file."""
TEMPLATE = 88
"""Room for a chat template."""


class _Task(NamedTuple):
    """A task's template, most new tokens and questions."""

    template: str
    max_new_tokens: int
    rows: list[dict[str, Any]]


def items(folder: str | Path, settings: Settings, subject: ModelSubject) -> list[Item]:
    """Return the questions of the requested tasks, or of all tasks with a file; `limit` is by
    task."""
    config = read_json(find_file(folder, ("longbench_config",), (".json",)))
    check_subtasks(settings.subtasks, SUBTASKS)
    lengths = settings.lengths
    if not lengths:
        lengths = (_default_length(subject.limit, settings),)
    questions: list[Item] = []
    for name in settings.subtasks or SUBTASKS:
        try:
            path = find_file(folder, (f"{name}_e", name))
        except UserError:
            if settings.subtasks:
                raise
            continue
        if METRICS.get(name) is rouge_l:
            import_rouge()  # a missing package is said before the first answer
        task = _read_task(name, path, config, settings.limit)
        for length in lengths:
            for number, row in enumerate(task.rows):
                questions.append(
                    Generated(
                        f"{name}/{length}/{row.get('_id', number)}",
                        {"length": length, "subtask": name, "bucket": _bucket(row)},
                        partial(_question, task.template, row, length, subject),
                        settings.max_new_tokens or task.max_new_tokens,
                        scorer(name, row),
                        chat=name not in CONTINUED,
                    )
                )
    if not questions:
        raise UserError(f"data '{folder}' must hold files such as {SUBTASKS[0]}_e.jsonl, got none.")
    return questions


def combine(records: Sequence[Record]) -> Values:
    """Return the score of each task and category; the whole is the mean of the categories."""
    groups = group_by(records, lambda record: record.params["subtask"])
    tasks = {name: (_mean_of_buckets(group), len(group)) for name, group in groups.items()}
    categories = {}
    for category, names in CATEGORIES.items():
        present = [tasks[name] for name in names if name in tasks]
        if present:
            value = sum(value for value, _ in present) / len(present)
            categories[category] = (value, sum(count for _, count in present))
    whole = sum(value for value, _ in categories.values()) / len(categories)
    return {"": (whole, len(records)), **tasks, **categories}


def _mean_of_buckets(records: Sequence[Record]) -> float:
    """Return the mean of the means of the length buckets."""
    buckets = group_by(records, lambda record: str(record.params.get("bucket")))
    return sum(map(mean, buckets.values())) / len(buckets)


def _default_length(limit: int | None, settings: Settings) -> int:
    """Return the length of prompts where none is given, the same for all tasks: as long as the
    model's limit allows beside the longest answer, or the benchmark's own."""
    if limit is None:
        return 31500
    return max(1, limit - (settings.max_new_tokens or LONGEST_ANSWER) - TEMPLATE)


def _read_task(name: str, path: Path, config: Any, limit: int | None) -> _Task:
    """Return a task whose rows all fit its template."""
    rows = list(read_lines(path, ("input", "context", "answers", "length")))[:limit]
    try:
        task = _Task(config["dataset2prompt"][name], config["dataset2maxlen"][name], rows)
        for row in rows:
            task.template.format(**row)
            _bucket(row)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(
            f"{name} must have its template and limit in longbench_config, and rows that fit the "
            f"template, with a number as length; {type(error).__name__}: {error}."
        ) from None
    return task


def _bucket(row: dict[str, Any]) -> str:
    return next(name for end, name in BUCKETS if row["length"] < end)


def _question(template: str, row: dict[str, Any], length: int, subject: ModelSubject) -> Question:
    """Return the prompt, with its middle cut out where it is too long."""
    prompt = template.format(**row)
    ids = subject.encode(prompt)
    if len(ids) > length:
        half = length // 2
        prompt = subject.decode(ids[:half]) + subject.decode(ids[len(ids) - half :])
    return Question(prompt, row["answers"])


def scorer(task: str, row: dict[str, Any]) -> Callable[[str, Sequence[str]], float]:
    """Return the task's metric, highest over the references."""
    if task == "trec":
        metric: Metric = partial(classification, classes=row.get("all_classes") or ())
    else:
        metric = METRICS[task]

    def score(answer: str, references: Sequence[str]) -> float:
        if task in FIRST_LINE:
            answer = answer.lstrip("\n").split("\n")[0]
        return max((metric(answer, reference) for reference in references), default=0.0)

    return score
