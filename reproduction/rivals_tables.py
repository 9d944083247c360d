"""Write the table of compressed contexts from its records: one line a method, a value for each
compression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.tables import Column, markdown
from corecontext.record import Record
from reproduction.real_methods import TITLES as TRAINED
from reproduction.rivals import COMPRESSIONS, LEAST, NAMES, of_first_device
from reproduction.rivals_tasks import PASSAGES, Task
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
Values = dict[tuple[str, str | None, int, str, Task], Record]
"""The newest record by method, training, compression, name and task."""


class Line(NamedTuple):
    """A method, and the attention that its model was trained under."""

    method: str
    trained_by: str | None


def rivals_markdown(records: Sequence[Record], *, trained: bool) -> str:
    """Return the table of models as they are, or of trained ones."""
    values = _newest(records, trained)
    lines = [
        Line(method, trained_by)
        for method in NAMES
        for trained_by in dict.fromkeys(key[1] for key in values if key[0] == method)
    ]
    tasks = list(dict.fromkeys(key[4] for key in values if key[3] != "real.first_token_s"))
    columns = [Column("attention", lambda line: TITLES[line.method], left=True)]
    if trained:
        columns.append(Column("trained under", lambda line: TRAINED[line.trained_by], left=True))

    def add(title: str, show: Callable[[Any, int], str]) -> None:
        columns.append(Column(title, lambda line: _shown(line, show)))

    longest = max((task for task in tasks if task.name == "needles"), default=None)

    def kept(line: Line, compression: int) -> str:
        key = (*line, compression, "real.accuracy", longest)
        return f"{values[key].params['kept_bytes'] / 2**20:.1f}" if key in values else ""

    def accuracy(chosen: Sequence[Task]) -> Callable[[Any, int], str]:
        def show(line: Line, compression: int) -> str:
            keys = [(*line, compression, "real.accuracy", task) for task in chosen]
            if not all(key in values for key in keys):
                return ""
            return f"{100 * fmean(values[key].value for key in keys):.0f}"

        return show

    def likelihood(line: Line, compression: int) -> str:
        records = [values.get((*line, compression, "real.answer_nll", task)) for task in tasks]
        return "".join(f"{record.value:.2f}" for record in records if record)

    def seconds(line: Line, compression: int) -> str:
        records = [
            record
            for key, record in values.items()
            if key[:4] == (*line, compression, "real.first_token_s")
        ]
        return f"{records[-1].value:.3f}" if records else ""

    if longest is not None:
        add(f"cache of {longest.length:,} tokens, MiB", kept)
    for task in sorted(task for task in tasks if task.name == "needles"):
        add(f"needles, {task.length:,} tokens, %", accuracy([task]))
    for task in tasks:
        if task.name == "list":
            add(f"list, {task.length:,} tokens, %", accuracy([task]))
    ruler = answered(values)
    if ruler:
        add(f"RULER, {len(ruler)} tasks, %", accuracy(ruler))
    if any(task.name == PASSAGES for task in tasks):
        add("answer in passages, nats a token", likelihood)
    if any(key[3] == "real.first_token_s" for key in values):
        add("first token, s", seconds)
    return "\n".join(markdown(columns, lines)) + "\n"


def answered(values: Values) -> list[Task]:
    """Return RULER's tasks that full attention answers at least half right, where others have been
    asked."""
    asked = {key[4] for key in values if key[0] != "full"}
    return [
        key[4]
        for key, record in values.items()
        if key[0] == "full"
        and key[3] == "real.accuracy"
        and key[4].name in SUBTASKS
        and key[4] in asked
        and record.value >= LEAST
    ]


def _newest(records: Sequence[Record], trained: bool) -> Values:
    """Return the newest record of each value, in the order of the first."""
    values: Values = {}
    for record in of_first_device(records):
        p = record.params
        if bool(p["trained_tokens"]) == trained:
            task = Task(p["task"], p["length"])
            values[p["method"], p["trained_by"], p["compression"], record.name, task] = record
    return values


def _shown(line: Line, show: Callable[[Any, int], str]) -> str:
    """Show a value, or those at each compression."""
    if line.method == "full":
        return show(line, 1)
    cells = [show(line, compression) for compression in COMPRESSIONS]
    return " / ".join(cell or "-" for cell in cells) if any(cells) else ""
