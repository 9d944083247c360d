"""Write the table of compressed contexts from its records: one line a method, a value for each
compression."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.tables import Column, Key, Row, markdown, rows_by, shown_mib
from corecontext.record import Record, latest
from reproduction.real.methods import TITLES as TRAINED
from reproduction.rivals.compare import COMPRESSIONS, LEAST, of_first_device
from reproduction.rivals.tasks import Task
from reproduction.suites.ruler import SUBTASKS

TITLES = {
    "full": "full attention",
    "cca": "CCA with mass",
    "cca_raw_heads": "CCA with mass, some KV heads keep every token",
    "fetch": "CCA that fetches groups, raw tokens on the host",
    "fetch_raw_heads": "CCA that fetches groups, some KV heads keep every token",
    "streaming_llm": "StreamingLLM",
    "knorm": "Knorm",
    "keydiff": "KeyDiff",
    "lagkv": "LagKV",
    "tova": "TOVA",
    "snapkv": "SnapKV",
    "pyramidkv": "PyramidKV",
    "expected_attention": "ExpectedAttention",
    "adakv": "AdaKV with ExpectedAttention",
    "kvzip": "KVzip",
    "cca_press": "`CCAPress`: CCA without mass",
}
Show = Callable[[Row, int], str]
"""Shows a row's value at a compression; "" without one."""


def rivals_markdown(records: Sequence[Record], *, trained: bool) -> str:
    """Return the table of models as they are, or of trained ones."""
    chosen = [r for r in of_first_device(records) if bool(r.params["trained_tokens"]) == trained]
    places = list(dict.fromkeys((r.params["method"], r.params["trained_by"]) for r in chosen))
    places.sort(key=lambda place: list(TITLES).index(place[0]))
    by_place = Key("", lambda r: places.index((r.params["method"], r.params["trained_by"])))
    rows = rows_by([by_place], chosen)
    asked = [r for r in chosen if r.name != "real.first_token_s"]
    tasks = list(dict.fromkeys(Task(r.params["task"], r.params["length"]) for r in asked))
    needles = sorted(task for task in tasks if task.name == "needles")
    columns = [Column("attention", lambda row: TITLES[row[0].params["method"]], left=True)]
    if trained:
        title = lambda row: TRAINED[row[0].params["trained_by"]]  # noqa: E731
        columns.append(Column("trained under", title, left=True))
    if needles:
        title = f"cache of {needles[-1].length:,} tokens, MiB"
        columns.append(_column(title, partial(_kept, needles[-1])))
    for task in needles:
        columns.append(_column(f"needles, {task.length:,} tokens, %", _accuracy([task])))
    for task in tasks:
        if task.name == "list":
            columns.append(_column(f"list, {task.length:,} tokens, %", _accuracy([task])))
    if ruler := answered(asked):
        columns.append(_column(f"RULER, {len(ruler)} tasks, %", _accuracy(ruler)))
    for title, name, form in (
        ("answer in passages, nats a token", "real.answer_nll", "{:.2f}"),
        ("first token, s", "real.first_token_s", "{:.3f}"),
    ):
        if any(record.name == name for record in chosen):
            columns.append(_column(title, partial(_single, name, form)))
    return "\n".join(markdown(columns, rows)) + "\n"


def _column(title: str, show: Show) -> Column:
    """Return the column of a value, of compressed contexts at each compression."""

    def cell(row: Row) -> str:
        if row[0].params["method"] == "full":
            return show(row, 1)
        cells = [show(row, compression) for compression in COMPRESSIONS]
        return " / ".join(cell or "-" for cell in cells) if any(cells) else ""

    return Column(title, cell)


def _kept(task: Task, row: Row, compression: int) -> str:
    record = latest(row, "real.accuracy", compression=compression, **_of(task))
    return "" if record is None else shown_mib(record.params["kept_bytes"]).removesuffix(" MiB")


def _accuracy(tasks: Sequence[Task]) -> Show:
    def show(row: Row, compression: int) -> str:
        answers = [latest(row, "real.accuracy", compression=compression, **_of(t)) for t in tasks]
        return "" if None in answers else f"{100 * fmean(r.value for r in answers if r):.0f}"

    return show


def _single(name: str, form: str, row: Row, compression: int) -> str:
    record = latest(row, name, compression=compression)
    return "" if record is None else form.format(record.value)


def _of(task: Task) -> dict[str, Any]:
    """Return the params of a task."""
    return {"task": task.name, "length": task.length}


def answered(records: Sequence[Record]) -> list[Task]:
    """Return RULER's tasks that full attention answers at least half right, where others have been
    asked."""
    full, others = {}, set()
    for record in records:
        task = Task(record.params["task"], record.params["length"])
        if record.params["method"] != "full":
            others.add(task)
        elif record.name == "real.accuracy" and task.name in SUBTASKS:
            full[task] = record.value
    return [task for task, value in full.items() if task in others and value >= LEAST]
